//! Templates: text with `${…}`, parsed once and rendered in one pass.
//!
//! The value of a parameter is not expanded again: `${secrets.X}` in it stays text.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;

use serde_json::{Map, Value};

use super::mapping::quoted;
use super::parameter::Reference;
use super::place::{Findings, Place};
use super::schema;
use super::yaml::Node;

/// Maximum size of a call after its template is filled in, in bytes.
pub(super) const MAX_RENDERED: usize = 4 << 20;
const MEMBER_WEIGHT: usize = 8;
const WORKSPACE_SECRET: &str = "workspace-secret://";

/// A piece of a text.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Part {
    Secret(String),
    Text(String),
    Value(Reference),
}

/// A value that may contain templates.
#[derive(Clone, Debug)]
pub(super) enum Template {
    List(Vec<Template>),
    Literal(Value),
    Map(Vec<(String, Template)>),
    Text(Vec<Part>),
    /// A text that consists of one placeholder. It is replaced by the value with its type.
    Whole(Reference),
}

/// The names that the templates of one tool may use.
pub(super) struct Scope<'p> {
    pub(super) schema: &'p Value,
    pub(super) findings: &'p Findings,
    /// The secrets that are named where they are permitted.
    pub(super) secrets: RefCell<BTreeSet<String>>,
}

/// Whether secrets may occur in a text, and where they belong if not.
#[derive(Clone, Copy)]
pub(super) enum Secrets {
    Here,
    Not(&'static str),
}

/// Parses the placeholders of a text. A run of dollar signs before `{` is halved, as backslashes are elsewhere: `$${`
/// is the text `${`.
pub(super) fn parse(text: &str) -> Result<Vec<Part>, String> {
    let mut parts = Vec::new();
    let mut literal = String::new();
    let mut rest = text;
    while let Some(at) = rest.find("${") {
        let (before, after) = rest.split_at(at + 1);
        let run = before.len() - before.trim_end_matches('$').len();
        literal.push_str(before.get(..before.len() - run).unwrap_or_default());
        literal.extend(std::iter::repeat_n('$', run / 2));
        let after = after.get(1..).unwrap_or_default();
        if run % 2 == 0 {
            literal.push('{');
            rest = after;
            continue;
        }
        let (name, behind) = after.split_once('}').ok_or("a ${ that no } closes; $${ is the text ${")?;
        if !literal.is_empty() {
            parts.push(Part::Text(std::mem::take(&mut literal)));
        }
        parts.push(placeholder(name)?);
        rest = behind;
    }
    literal.push_str(rest);
    if !literal.is_empty() {
        parts.push(Part::Text(literal));
    }
    Ok(parts)
}

fn placeholder(name: &str) -> Result<Part, String> {
    if name.is_empty() {
        return Err("an empty placeholder ${}; $${ is the text ${".to_owned());
    }
    let malformed = || {
        format!(
            "{} is not a placeholder: ${{name}}, ${{name.member}}, ${{name.0}}, ${{parameters}} or ${{secrets.NAME}}; $${{ is the text ${{",
            quoted(&format!("${{{name}}}"))
        )
    };
    let steps: Vec<&str> = name.split('.').collect();
    let plain = |step: &&str| !step.is_empty() && step.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_".contains(&b));
    match steps.as_slice() {
        steps if !steps.iter().all(plain) => Err(malformed()),
        ["secrets", secret] => Ok(Part::Secret((*secret).to_owned())),
        ["secrets", ..] => Err(malformed()),
        ["parameters"] => Ok(Part::Value(Reference(Vec::new()))),
        ["parameters", rest @ ..] => Err(format!("parameters are named on their own: ${{{}}}", quoted_path(rest))),
        steps => Ok(Part::Value(Reference(steps.iter().map(|step| (*step).to_owned()).collect()))),
    }
}

fn quoted_path(steps: &[&str]) -> String {
    super::problem::truncate(&steps.join("."), super::mapping::MAX_ECHO)
}

impl Scope<'_> {
    /// Parses a node of the arguments.
    pub(super) fn template(&self, node: &Node, place: &Place, secrets: Secrets) -> Template {
        match node {
            Node::Text(text) => self.text(text, place, secrets),
            Node::List(items) => {
                let item = |(at, item): (usize, &Node)| self.template(item, &place.at(at), secrets);
                Template::List(items.iter().enumerate().map(item).collect())
            }
            Node::Map(members) => Template::Map(
                members
                    .iter()
                    .map(|(key, value)| {
                        let place = place.key(key);
                        self.key(key, &place);
                        (key.clone(), self.template(value, &place, secrets))
                    })
                    .collect(),
            ),
            other => Template::Literal(other.to_value()),
        }
    }

    pub(super) fn key(&self, key: &str, place: &Place) {
        if key.contains("${") {
            self.findings.problem(place, "placeholders are not allowed in keys");
        }
        no_workspace_secret(key, place, self.findings);
    }

    pub(super) fn text(&self, text: &str, place: &Place, secrets: Secrets) -> Template {
        match self.parts(text, place, secrets) {
            parts if parts.is_empty() => Template::Literal(Value::String(String::new())),
            parts => match parts.as_slice() {
                [Part::Value(reference)] => Template::Whole(reference.clone()),
                [Part::Text(text)] => Template::Literal(Value::String(text.clone())),
                _ => Template::Text(parts),
            },
        }
    }

    /// Parses and checks the parts of a text.
    pub(super) fn parts(&self, text: &str, place: &Place, secrets: Secrets) -> Vec<Part> {
        no_workspace_secret(text, place, self.findings);
        let parts = parse(text).unwrap_or_else(|why| {
            self.findings.problem(place, why);
            Vec::new()
        });
        for part in &parts {
            match (part, secrets) {
                (Part::Text(_), _) => {}
                (Part::Value(reference), _) => {
                    if let Err(why) = schema::declares(self.schema, reference) {
                        self.findings.problem(place, why);
                    }
                }
                (Part::Secret(name), Secrets::Here) => {
                    self.secrets.borrow_mut().insert(name.clone());
                }
                (Part::Secret(name), Secrets::Not(why)) => {
                    self.findings.problem(place, format!("${{secrets.{}}} {why}", quoted_path(&[name])));
                }
            }
        }
        parts
    }
}

pub(super) fn no_workspace_secret(text: &str, place: &Place, findings: &Findings) {
    if text.contains(WORKSPACE_SECRET) {
        findings.problem(
            place,
            "workspace-secret:// belongs in the credential sources of the proxy's configuration; a pack says ${secrets.NAME}",
        );
    }
}

/// The values to fill in.
pub(super) struct Values<'c> {
    arguments: &'c Value,
    nonce: &'c str,
    left: Cell<usize>,
}

impl<'c> Values<'c> {
    pub(super) fn new(arguments: &'c Value, nonce: &'c str) -> Self {
        Self { arguments, nonce, left: Cell::new(MAX_RENDERED) }
    }

    pub(super) fn find(&self, reference: &Reference) -> Option<&'c Value> {
        reference.find(self.arguments)
    }

    /// Returns the value of a template, or `None` if it is one placeholder whose argument is absent.
    pub(super) fn fill(&self, template: &Template) -> Result<Option<Value>, String> {
        Ok(Some(match template {
            Template::Literal(value) => self.copy(value)?,
            Template::Whole(reference) => match self.find(reference) {
                Some(value) => self.copy(value)?,
                None => return Ok(None),
            },
            Template::Text(parts) => Value::String(self.text(parts)?),
            Template::List(items) => {
                let filled: Result<Vec<_>, _> = items.iter().map(|item| self.fill(item)).collect();
                Value::Array(filled?.into_iter().flatten().collect())
            }
            Template::Map(members) => {
                let mut filled = Map::new();
                for (key, value) in members {
                    if let Some(value) = self.fill(value)? {
                        self.charge(key.len())?;
                        filled.insert(key.clone(), value);
                    }
                }
                Value::Object(filled)
            }
        }))
    }

    fn text(&self, parts: &[Part]) -> Result<String, String> {
        let mut out = String::new();
        for part in parts {
            out.push_str(&self.part(part)?);
        }
        Ok(out)
    }

    /// Returns a part as text, unescaped.
    pub(super) fn part(&self, part: &Part) -> Result<String, String> {
        let text = match part {
            Part::Text(text) => text.clone(),
            Part::Secret(name) => format!("${{{}.{name}}}", self.nonce),
            Part::Value(reference) => match self.find(reference) {
                None | Some(Value::Null) => String::new(),
                Some(Value::String(text)) => text.clone(),
                Some(other) => other.to_string(),
            },
        };
        self.charge(text.len())?;
        Ok(text)
    }

    fn copy(&self, value: &Value) -> Result<Value, String> {
        self.charge(weight(value))?;
        Ok(value.clone())
    }

    fn charge(&self, bytes: usize) -> Result<(), String> {
        let left = self.left.get().checked_sub(bytes).ok_or("the call exceeds 4 MiB")?;
        self.left.set(left);
        Ok(())
    }
}

fn weight(value: &Value) -> usize {
    MEMBER_WEIGHT
        + match value {
            Value::String(text) => text.len(),
            Value::Array(items) => items.iter().map(weight).sum(),
            Value::Object(members) => members.iter().map(|(key, value)| key.len() + weight(value)).sum(),
            Value::Bool(_) | Value::Null | Value::Number(_) => 0,
        }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn text(text: &str) -> Part {
        Part::Text(text.to_owned())
    }

    fn value(path: &str) -> Part {
        Part::Value(Reference(path.split('.').map(str::to_owned).collect()))
    }

    #[test]
    fn reads_placeholders_and_their_escape() {
        let secret = Part::Secret("A_b-1".into());
        let rows = [
            ("", vec![]),
            ("plain $ {x} }", vec![text("plain $ {x} }")]),
            ("${a}", vec![value("a")]),
            ("x${a.b.0}y", vec![text("x"), value("a.b.0"), text("y")]),
            ("${a}${b}", vec![value("a"), value("b")]),
            ("${parameters}", vec![Part::Value(Reference(vec![]))]),
            ("${secrets.A_b-1}", vec![secret]),
            ("$${a}", vec![text("${a}")]),
            ("$$${a}", vec![text("$"), value("a")]),
            ("$$$${a}", vec![text("$${a}")]),
            ("5$${", vec![text("5${")]),
            ("$$x", vec![text("$$x")]),
            ("é${a}", vec![text("é"), value("a")]),
        ];
        for (template, want) in rows {
            assert_eq!(parse(template), Ok(want), "{template}");
        }
    }

    #[test]
    fn refuses_invalid_placeholders() {
        let malformed = |name: &str| {
            format!(
                "\"{name}\" is not a placeholder: ${{name}}, ${{name.member}}, ${{name.0}}, ${{parameters}} or ${{secrets.NAME}}; $${{ is the text ${{"
            )
        };
        let rows = [
            ("${a", "a ${ that no } closes; $${ is the text ${".to_owned()),
            ("x ${", "a ${ that no } closes; $${ is the text ${".to_owned()),
            ("${}", "an empty placeholder ${}; $${ is the text ${".to_owned()),
            ("${ a }", malformed("${ a }")),
            ("${a..b}", malformed("${a..b}")),
            ("${.a}", malformed("${.a}")),
            ("${a[0]}", malformed("${a[0]}")),
            ("${a${b}}", malformed("${a${b}")),
            ("${secrets}", malformed("${secrets}")),
            ("${secrets.A.B}", malformed("${secrets.A.B}")),
            ("${parameters.a.b}", "parameters are named on their own: ${a.b}".to_owned()),
        ];
        for (template, want) in rows {
            assert_eq!(parse(template), Err(want), "{template}");
        }
    }

    fn filled(template: &Value, arguments: &Value) -> Option<Value> {
        let schema = json!({"properties": {"a": {}, "b": {}, "o": {}, "l": {}, "n": {}}});
        let findings = Findings::default();
        let scope = Scope { schema: &schema, findings: &findings, secrets: RefCell::default() };
        let node = Node::read(&template.to_string()).unwrap();
        let template = scope.template(&node, &Place::default(), Secrets::Here);
        assert!(findings.is_empty(), "{:?}", findings.into_problems(&node));
        Values::new(arguments, "NONCE").fill(&template).unwrap()
    }

    #[test]
    fn substitutes_values_typed_or_as_text() {
        let arguments = json!({"a": "x", "n": null, "b": 1.5, "o": {"k": [true, {"d": "v"}]}, "l": [1, "two"]});
        let rows = [
            (json!("${a}"), Some(json!("x"))),
            (json!("${b}"), Some(json!(1.5))),
            (json!("${o}"), Some(json!({"k": [true, {"d": "v"}]}))),
            (json!("${o.k.1.d}"), Some(json!("v"))),
            (json!("${l.1}"), Some(json!("two"))),
            (json!("${l.7}"), None),
            (json!("${o.none}"), None),
            (json!("${n}"), Some(Value::Null)),
            (json!("<${n}${o.none}>"), Some(json!("<>"))),
            (json!("${b} ${a} ${o.k.0} ${l}"), Some(json!("1.5 x true [1,\"two\"]"))),
            (json!("all: ${parameters}"), Some(json!(format!("all: {arguments}")))),
            (json!({"p": "${parameters}"}), Some(json!({"p": arguments}))),
            (json!({"in": "${o.none}", "not": 1}), Some(json!({"not": 1}))),
            (json!(["${l.9}", "${l.0}", "k"]), Some(json!([1, "k"]))),
            (json!("Bearer ${secrets.KEY}"), Some(json!("Bearer ${NONCE.KEY}"))),
            (json!("${secrets.KEY}"), Some(json!("${NONCE.KEY}"))),
            (json!("$${secrets.KEY}"), Some(json!("${secrets.KEY}"))),
            (json!(7), Some(json!(7))),
        ];
        for (template, want) in rows {
            assert_eq!(filled(&template, &arguments), want, "{template}");
        }
    }

    #[test]
    fn limits_the_size_of_repeated_values() {
        let big = json!({"a": "x".repeat(1 << 20)});
        let schema = json!({"properties": {"a": {}}});
        let findings = Findings::default();
        let scope = Scope { schema: &schema, findings: &findings, secrets: RefCell::default() };
        for (text, fits) in [("${a}${a}${a}", true), ("${a}${a}${a}${a}.", false)] {
            let template = scope.text(text, &Place::default(), Secrets::Here);
            assert_eq!(Values::new(&big, "N").fill(&template).is_ok(), fits, "{text}");
        }
        let lists = Template::List(vec![Template::Whole(Reference(vec![])); 5]);
        assert!(Values::new(&big, "N").fill(&lists).is_err());
    }

    proptest! {
        #[test]
        fn values_are_never_expanded(a in ".{0,20}|\\$\\{(secrets\\.X|parameters|b|NONCE\\.X)\\}|\\$+\\{b\\}") {
            let arguments = json!({"a": a, "b": "expanded"});
            prop_assert_eq!(filled(&json!("<${a}>"), &arguments), Some(json!(format!("<{a}>"))));
            prop_assert_eq!(filled(&json!(["${a}"]), &arguments), Some(json!([a])));
        }

        #[test]
        fn any_text_is_parsed_or_refused(text in "[$${}.a0 ]{0,16}|.{0,16}") {
            let _ = parse(&text);
        }
    }
}

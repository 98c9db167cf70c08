//! Mocks: responses written in a pack. They use no network.

use serde_json::Value;

use super::mapping::{Fields, MISSING, quoted};
use super::parameter::Reference;
use super::place::{Findings, Place};
use super::schema;
use super::template::{Part, no_workspace_secret, parse};
use super::yaml::Node;

const STRATEGIES: &str = "static, lookup, echo";
const COMMON: [&str; 4] = ["type", "strategy", "primitive", "args"];
const LOOKUP: [&str; 3] = ["lookup_key", "responses", "default"];

/// The strategy of a mock.
#[derive(Debug)]
pub(super) enum Mock {
    Echo,
    Lookup { key: Reference, responses: Vec<(String, Value)>, default: Option<Value> },
    Static(Value),
}

impl Mock {
    pub(super) fn read(fields: &Fields<'_>, schema: &Value, findings: &Findings) -> Option<Self> {
        for key in fields.keys() {
            if let Some(node) = fields.node(key) {
                literal(node, &fields.at(key), findings);
            }
        }
        let strategy = match fields.node("strategy") {
            Some(_) => fields.text("strategy")?,
            None => inferred(fields),
        };
        match strategy {
            "static" => fixed(fields, findings),
            "lookup" => lookup(fields, schema, findings),
            "echo" => {
                fields.report_others(&COMMON);
                Some(Self::Echo)
            }
            other => {
                let problem = format!("unknown strategy {}; choose one of {STRATEGIES}", quoted(other));
                findings.problem(&fields.at("strategy"), problem);
                None
            }
        }
    }

    pub(super) fn answer(&self, arguments: &Value) -> Result<Value, String> {
        match self {
            Self::Echo => Ok(arguments.clone()),
            Self::Static(response) => Ok(response.clone()),
            Self::Lookup { key, responses, default } => {
                let text = key.find(arguments).map(as_key);
                let found = text.and_then(|text| responses.iter().find(|(key, _)| *key == text));
                let response = found.map(|(_, response)| response).or(default.as_ref());
                response.cloned().ok_or_else(|| format!("the mock has no response for this {}", key.0.join(".")))
            }
        }
    }
}

/// Returns the strategy of a mock that names none, from the keys that only one strategy has.
fn inferred(fields: &Fields<'_>) -> &'static str {
    if LOOKUP.iter().any(|key| fields.has(key)) {
        "lookup"
    } else if fields.has("response") {
        "static"
    } else {
        "echo"
    }
}

fn as_key(value: &Value) -> String {
    value.as_str().map_or_else(|| value.to_string(), str::to_owned)
}

fn fixed(fields: &Fields<'_>, findings: &Findings) -> Option<Mock> {
    fields.report_others(&[COMMON.as_slice(), &["response"]].concat());
    let response = fields.written("response");
    if response.is_none() {
        findings.problem(&fields.at("response"), MISSING);
    }
    Some(Mock::Static(response?.to_value()))
}

fn lookup(fields: &Fields<'_>, schema: &Value, findings: &Findings) -> Option<Mock> {
    fields.report_others(&[COMMON.as_slice(), &LOOKUP].concat());
    let key = fields.required_text("lookup_key").and_then(|text| {
        let key = reference(text).and_then(|key| schema::declares(schema, &key).map(|()| key));
        key.map_err(|why| findings.problem(&fields.at("lookup_key"), why)).ok()
    });
    if fields.node("responses").is_none() {
        findings.problem(&fields.at("responses"), MISSING);
    }
    fields.fields("responses")?;
    let Some(Node::Map(members)) = fields.node("responses") else { return None };
    let responses = members.iter().map(|(key, response)| (key.clone(), response.to_value())).collect();
    Some(Mock::Lookup { key: key?, responses, default: fields.written("default").map(Node::to_value) })
}

/// Parses the name of a parameter or a path in it, such as `order.id`.
fn reference(text: &str) -> Result<Reference, String> {
    match parse(&format!("${{{text}}}")).as_deref() {
        Ok([Part::Value(reference)]) if !reference.0.is_empty() => Ok(reference.clone()),
        _ => Err(format!("{} is not a valid parameter name, such as sku or order.id", quoted(text))),
    }
}

/// Reports placeholders. Nothing in a mock is expanded, so they are mistakes.
fn literal(node: &Node, place: &Place, findings: &Findings) {
    match node {
        Node::Text(text) => literal_text(text, place, findings),
        Node::List(items) => {
            items.iter().enumerate().for_each(|(index, item)| literal(item, &place.at(index), findings));
        }
        Node::Map(members) => members.iter().for_each(|(key, value)| {
            literal_text(key, &place.key(key), findings);
            literal(value, &place.key(key), findings);
        }),
        Node::Bool(_) | Node::Null | Node::Number(_) => {}
    }
}

fn literal_text(text: &str, place: &Place, findings: &Findings) {
    no_workspace_secret(text, place, findings);
    if text.contains("${secrets.") {
        findings.problem(place, "a mock resolves no secret");
    }
}

//! A YAML document model that keeps the order of keys and bounds aliases.

use std::cell::Cell;
use std::collections::HashSet;
use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};
use serde_saphyr::options::NonFiniteFloatPolicy;

use super::problem::{Problem, truncate};

/// Maximum size of a pack, in bytes.
pub(super) const MAX_TEXT: usize = 1 << 20;
/// Maximum weight of a pack with its aliases expanded: bytes of text, plus a constant for every node.
const MAX_WEIGHT: usize = 8 << 20;
const NODE_WEIGHT: usize = 32;
const MAX_DEPTH: usize = 64;
/// Maximum length of a repeated message of the YAML parser.
const MAX_MESSAGE: usize = 300;
/// Maximum length of a repeated key.
const MAX_KEY: usize = 80;

#[derive(Clone, Debug, PartialEq)]
pub(super) enum Node {
    Bool(bool),
    List(Vec<Node>),
    Map(Vec<(String, Node)>),
    Null,
    Number(Number),
    Text(String),
}

impl Node {
    pub(super) fn read(text: &str) -> Result<Self, Problem> {
        if text.len() > MAX_TEXT {
            return Err(Problem { path: "pack".into(), message: "larger than 1 MiB".into() });
        }
        let budget = serde_saphyr::budget! {
            max_depth: MAX_DEPTH,
            max_documents: 1,
            max_events: 250_000,
            max_nodes: 125_000,
            max_aliases: 5_000,
            max_anchors: 1_000,
            max_merge_keys: 1_000,
            max_recorded_anchor_events: 250_000,
        };
        let options = serde_saphyr::options! {
            alias_limits: serde_saphyr::alias_limits! { max_total_replayed_events: 250_000, max_replay_stack_depth: 16 },
            budget: budget,
            non_finite_float_policy: NonFiniteFloatPolicy::Reject,
            strict_booleans: true,
            with_snippet: false,
        };
        let left = Cell::new(MAX_WEIGHT);
        serde_saphyr::with_deserializer_from_str_with_options(text, options, |yaml| {
            Seed { left: &left, depth: 0 }.deserialize(yaml)
        })
        .map_err(|error| problem(&error))
    }

    pub(super) fn to_value(&self) -> Value {
        match self {
            Self::Bool(value) => Value::Bool(*value),
            Self::List(items) => Value::Array(items.iter().map(Self::to_value).collect()),
            Self::Map(members) => {
                Value::Object(members.iter().map(|(key, value)| (key.clone(), value.to_value())).collect::<Map<_, _>>())
            }
            Self::Null => Value::Null,
            Self::Number(number) => Value::Number(number.clone()),
            Self::Text(text) => Value::String(text.clone()),
        }
    }

    /// Returns the name of the node's kind.
    pub(super) fn kind(&self) -> &'static str {
        match self {
            Self::Bool(_) => "true or false",
            Self::List(_) => "a list",
            Self::Map(_) => "a mapping",
            Self::Null => "nothing",
            Self::Number(_) => "a number",
            Self::Text(_) => "text",
        }
    }
}

fn problem(error: &serde_saphyr::Error) -> Problem {
    let error = error.without_snippet();
    let path = match error.location() {
        Some(at) => format!("line {}, column {}", at.line(), at.column()),
        None => "pack".to_owned(),
    };
    let text = error.to_string();
    // The message already names the position.
    let why = text.strip_suffix(&format!(" at {path}")).unwrap_or(&text);
    Problem { path, message: format!("no YAML that can be read: {}", truncate(why, MAX_MESSAGE)) }
}

struct Seed<'b> {
    left: &'b Cell<usize>,
    /// The depth, which aliases can make larger than that of the text.
    depth: usize,
}

impl Seed<'_> {
    fn charge<E: Error>(&self, bytes: usize) -> Result<(), E> {
        let left = self.left.get().checked_sub(bytes.saturating_add(NODE_WEIGHT));
        self.left.set(left.ok_or_else(|| E::custom("too large once its aliases are followed"))?);
        Ok(())
    }

    fn inner<E: Error>(&self) -> Result<Self, E> {
        if self.depth == MAX_DEPTH {
            return Err(E::custom("nested too deep once its aliases are followed"));
        }
        Ok(Self { left: self.left, depth: self.depth + 1 })
    }
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Node;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Node;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("YAML that JSON can say too")
    }

    fn visit_bool<E: Error>(self, value: bool) -> Result<Node, E> {
        self.charge(0).map(|()| Node::Bool(value))
    }

    fn visit_i64<E: Error>(self, value: i64) -> Result<Node, E> {
        self.charge(0).map(|()| Node::Number(value.into()))
    }

    fn visit_u64<E: Error>(self, value: u64) -> Result<Node, E> {
        self.charge(0).map(|()| Node::Number(value.into()))
    }

    fn visit_f64<E: Error>(self, value: f64) -> Result<Node, E> {
        self.charge(0)?;
        Number::from_f64(value).map(Node::Number).ok_or_else(|| E::custom("a number that JSON cannot say"))
    }

    fn visit_str<E: Error>(self, value: &str) -> Result<Node, E> {
        self.charge(value.len()).map(|()| Node::Text(value.to_owned()))
    }

    fn visit_none<E: Error>(self) -> Result<Node, E> {
        self.charge(0).map(|()| Node::Null)
    }

    fn visit_unit<E: Error>(self) -> Result<Node, E> {
        self.charge(0).map(|()| Node::Null)
    }

    fn visit_some<D: Deserializer<'de>>(self, deserializer: D) -> Result<Node, D::Error> {
        self.deserialize(deserializer)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        self.charge(0)?;
        let mut items = Vec::new();
        while let Some(item) = access.next_element_seed(self.inner()?)? {
            items.push(item);
        }
        Ok(Node::List(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Node, A::Error> {
        self.charge(0)?;
        let mut members = Vec::new();
        let mut keys = HashSet::new();
        while let Some(key) = access.next_key::<String>()? {
            self.charge(key.len())?;
            // The YAML parser distinguishes 1 and '1'.
            if !keys.insert(key.clone()) {
                return Err(A::Error::custom(format_args!("duplicate mapping key: {}", truncate(&key, MAX_KEY))));
            }
            members.push((key, access.next_value_seed(self.inner()?)?));
        }
        Ok(Node::Map(members))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(text: &str) -> Node {
        Node::Text(text.to_owned())
    }

    #[test]
    fn parses_json_values_in_document_order() {
        let read = Node::read("z: yes\na: [1, -2, 1.5, true, null, '5']\nn: {}\n1: x").unwrap();
        let number = |value: f64| Node::Number(Number::from_f64(value).unwrap());
        let list = vec![
            Node::Number(1.into()),
            Node::Number((-2).into()),
            number(1.5),
            Node::Bool(true),
            Node::Null,
            text("5"),
        ];
        let members = [("z", text("yes")), ("a", Node::List(list)), ("n", Node::Map(Vec::new())), ("1", text("x"))];
        assert_eq!(read, Node::Map(members.map(|(key, value)| (key.to_owned(), value)).into()));
    }

    #[test]
    fn refuses_invalid_and_oversized_yaml() {
        let laughs: String =
            (1..12).map(|n| format!("a{n}: &a{n} [{}]\n", vec![format!("*a{}", n - 1); 9].join(","))).collect();
        let long = format!("a: &a {}\nb: [{}]", "x".repeat(500_000), vec!["*a"; 1000].join(","));
        let nested: String =
            (1..80).map(|n| format!("a{n}: &a{n} {}*a{}{}\n", "[".repeat(50), n - 1, "]".repeat(50))).collect();
        let rows = [
            ("nested aliases", format!("a0: &a0 [x]\n{nested}")),
            ("unclosed", "a: [1".to_owned()),
            ("twice", "a: 1\na: 2".to_owned()),
            ("twice as text", "{1: x, '1': y}".to_owned()),
            ("twice as text, too", "{true: x, 'true': y}".to_owned()),
            ("two documents", "a: 1\n---\nb: 2".to_owned()),
            ("infinite", "a: .inf".to_owned()),
            ("deep", format!("{}{}", "[".repeat(100), "]".repeat(100))),
            ("deeper", "- ".repeat(5000)),
            ("billion laughs", format!("a0: &a0 [x]\n{laughs}")),
            ("long aliases", long),
            ("long", "x".repeat(MAX_TEXT + 1)),
        ];
        for (name, yaml) in rows {
            let problem = Node::read(&yaml).unwrap_err();
            assert!(problem.to_string().chars().count() < 400, "{name}: {problem}");
        }
        let problem = Node::read("a: 1\nb: [").unwrap_err();
        assert!(problem.path.starts_with("line "), "{problem}");
    }
}

//! References to the parameters of a tool.

use serde_json::Value;

/// A reference to an argument. An empty one refers to all arguments: `${parameters}`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Reference(pub(super) Vec<String>);

impl Reference {
    pub(super) fn find<'v>(&self, arguments: &'v Value) -> Option<&'v Value> {
        let mut value = arguments;
        for step in &self.0 {
            value = match value {
                Value::Object(members) => members.get(step)?,
                Value::Array(items) => items.get(step.parse::<usize>().ok()?)?,
                _ => return None,
            };
        }
        Some(value)
    }
}

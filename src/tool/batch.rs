//! Runs a model's calls in sequence and builds the blocks with their results.

use std::collections::HashMap;

use serde_json::{Value, json};

use super::outcome::Outcome;
use super::proxy::Proxy;
use super::registry::Registry;

/// Why no call of a batch was run.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum BatchError {
    /// The batch is not an array.
    #[error("a batch is a JSON array of tool_use blocks, or of tool_calls")]
    NotAnArray,
    /// A call has no id, so its result could not be assigned.
    #[error("block {0} has no id to answer to")]
    NoId(usize),
    /// Two calls have the same id, so their results could not be told apart.
    #[error("blocks {0} and {1} have the same id")]
    SameId(usize, usize),
}

/// A call in the format of one of two model APIs.
struct Block<'a> {
    id: &'a str,
    name: &'a str,
    shape: Shape,
    input: Result<Value, &'static str>,
}

#[derive(Clone, Copy)]
enum Shape {
    Anthropic,
    Openai,
}

/// Runs a model's calls in order. Blocks of other kinds, such as text, are skipped.
///
/// # Errors
/// [`BatchError`] if the results could not be assigned to calls. Nothing has been run then.
pub async fn run(registry: &Registry, proxy: &Proxy, batch: &Value) -> Result<Vec<Value>, BatchError> {
    let all = batch.as_array().ok_or(BatchError::NotAnArray)?;
    let mut blocks = Vec::new();
    let mut known = HashMap::new();
    for (at, one) in all.iter().enumerate() {
        let Some(block) = read(one, at)? else { continue };
        if let Some(other) = known.insert(block.id, at) {
            return Err(BatchError::SameId(other, at));
        }
        blocks.push(block);
    }
    let mut answers = Vec::new();
    for block in blocks {
        let outcome = match &block.input {
            Ok(input) => registry.execute(proxy, block.name, input).await,
            Err(text) => registry.refuse(proxy, block.name, text).await,
        };
        answers.push(block.answered(outcome));
    }
    Ok(answers)
}

fn read(one: &Value, at: usize) -> Result<Option<Block<'_>>, BatchError> {
    let (shape, name, input) = match one.get("type").and_then(Value::as_str) {
        Some("tool_use") => (Shape::Anthropic, one.get("name"), one.get("input").cloned().map(Ok)),
        Some("function") => {
            let function = one.get("function");
            let input = match function.and_then(|function| function.get("arguments")) {
                Some(Value::String(text)) if text.trim().is_empty() => None,
                Some(Value::String(text)) => {
                    Some(serde_json::from_str(text).map_err(|_| "Error: arguments are not valid JSON"))
                }
                // Some models write the arguments as an object instead of a string.
                other => other.cloned().map(Ok),
            };
            (Shape::Openai, function.and_then(|function| function.get("name")), input)
        }
        _ => return Ok(None),
    };
    let id = one.get("id").and_then(Value::as_str).filter(|id| !id.is_empty()).ok_or(BatchError::NoId(at))?;
    let name = name.and_then(Value::as_str).unwrap_or_default();
    Ok(Some(Block { id, name, shape, input: input.unwrap_or(Ok(Value::Null)) }))
}

impl Block<'_> {
    fn answered(&self, outcome: Outcome) -> Value {
        match self.shape {
            Shape::Anthropic => json!({
                "type": "tool_result",
                "tool_use_id": self.id,
                "is_error": outcome.is_error(),
                "content": outcome.result.content,
            }),
            Shape::Openai => json!({ "role": "tool", "tool_call_id": self.id, "content": outcome.result.content }),
        }
    }
}

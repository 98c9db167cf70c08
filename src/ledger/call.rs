//! The stored record of a tool call.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::execution::Millis;

/// Tool calls that are kept of an execution.
pub const MOST_CALLS: usize = 50;
/// Longest URL that is kept, in bytes.
pub(super) const MAX_URL: usize = 2048;
/// Longest of any other text, in bytes.
pub(super) const MAX_TEXT: usize = 256;

/// The record of a tool call, without the response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The exchange's id in the audit log.
    pub id: String,
    /// The tool's name.
    pub tool: String,
    /// Where to, as far as it may be written down.
    pub url: String,
    /// The HTTP method.
    pub method: String,
    /// The credential's name, if one was put in.
    pub credential_used: Option<String>,
    /// The origin's answer.
    pub response_status: Option<u16>,
    /// Bytes of the body that were taken from the origin.
    pub response_size_bytes: u64,
    /// From the first byte of the request to the last of the response.
    pub latency_ms: f64,
    /// Whether it was refused.
    pub blocked: bool,
    /// The refusal's code.
    pub block_reason: Option<String>,
    /// Whether the response was cut for its size.
    pub truncated: bool,
    /// When it was asked for.
    pub called_at: Millis,
    /// The client has told of it; the proxy has not seen it.
    pub reported: bool,
}

impl ToolCall {
    /// With texts of a length that can be kept.
    pub(super) fn bounded(mut self) -> Self {
        cut(&mut self.url, MAX_URL);
        let texts = [&mut self.id, &mut self.tool, &mut self.method];
        for text in texts.into_iter().chain(&mut self.credential_used).chain(&mut self.block_reason) {
            cut(text, MAX_TEXT);
        }
        self
    }
}

pub(super) fn cut(text: &mut String, most: usize) {
    text.truncate(text.floor_char_boundary(most));
}

/// The record of an execution. What was only reported makes room first, and never makes others go.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Calls {
    /// The number of the latest one.
    pub(super) last: u64,
    judged: VecDeque<Kept>,
    reported: VecDeque<Kept>,
}

/// A call as JSON, which is what it takes the least room as.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    /// In which order they came.
    pub(super) number: u64,
    pub(super) call: Box<RawValue>,
}

impl Calls {
    /// Adds one. One that was added before is not added again.
    pub(super) fn add(&mut self, kept: Kept, reported: bool) {
        if kept.number <= self.last {
            return;
        }
        self.last = kept.number;
        if reported {
            self.reported.push_back(kept)
        } else {
            self.judged.push_back(kept)
        }
        while self.judged.len() > MOST_CALLS {
            self.judged.pop_front();
        }
        while self.reported.len() > MOST_CALLS.saturating_sub(self.judged.len()) {
            self.reported.pop_front();
        }
    }

    /// All that are kept, in the order in which they came.
    pub(super) fn all(&self) -> Vec<Kept> {
        let mut all: Vec<Kept> = self.judged.iter().chain(&self.reported).cloned().collect();
        all.sort_unstable_by_key(|kept| kept.number);
        all
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_are_cut_where_a_character_ends() {
        let call = ToolCall {
            url: "ü".repeat(2000),
            tool: "x".repeat(1000),
            block_reason: Some(format!("x{}", "ü".repeat(200))),
            ..ToolCall::default()
        };
        let call = call.bounded();
        assert_eq!((call.url.len(), call.tool.len()), (MAX_URL, MAX_TEXT));
        assert_eq!(call.block_reason.unwrap().len(), MAX_TEXT - 1);
    }
}

//! The stored record of a tool call.

use std::collections::VecDeque;

use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::execution::Millis;

/// The maximum number of tool calls kept per execution.
pub const MAX_CALLS: usize = 50;
/// The maximum length of a stored URL, in bytes.
pub(super) const MAX_URL: usize = 2048;
/// The maximum length of any other stored text, in bytes.
pub(super) const MAX_TEXT: usize = 256;

/// The record of a tool call, without the response.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ToolCall {
    /// The exchange's id in the audit log.
    pub id: String,
    /// The tool's name.
    pub tool: String,
    /// The URL, redacted for logging.
    pub url: String,
    /// The HTTP method.
    pub method: String,
    /// The name of the injected credential.
    pub credential_used: Option<String>,
    /// The origin's status code.
    pub response_status: Option<u16>,
    /// The number of body bytes read from the origin.
    pub response_size_bytes: u64,
    /// The time from the first byte of the request to the last byte of the response, in milliseconds.
    pub latency_ms: f64,
    /// Whether the call was refused.
    pub blocked: bool,
    /// The refusal's code.
    pub block_reason: Option<String>,
    /// Whether the response was truncated at the size limit.
    pub truncated: bool,
    /// When the call was made.
    pub called_at: Millis,
    /// Whether only the client reported the call; the proxy did not see it.
    pub reported: bool,
}

impl ToolCall {
    /// Truncates the texts to the lengths that the ledger stores.
    pub(super) fn bounded(mut self) -> Self {
        truncate(&mut self.url, MAX_URL);
        let texts = [&mut self.id, &mut self.tool, &mut self.method];
        for text in texts.into_iter().chain(&mut self.credential_used).chain(&mut self.block_reason) {
            truncate(text, MAX_TEXT);
        }
        self
    }
}

pub(super) fn truncate(text: &mut String, most: usize) {
    text.truncate(text.floor_char_boundary(most));
}

/// The tool calls of an execution. Reported calls are removed first and never displace calls that the proxy handled.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Calls {
    /// The number of the latest call.
    pub(super) last: u64,
    judged: VecDeque<Kept>,
    reported: VecDeque<Kept>,
}

/// A call as JSON, its most compact form.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Kept {
    /// The sequence number of the call.
    pub(super) number: u64,
    pub(super) call: Box<RawValue>,
}

impl Calls {
    /// Adds a call. A call whose number was already added is ignored.
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
        while self.judged.len() > MAX_CALLS {
            self.judged.pop_front();
        }
        while self.reported.len() > MAX_CALLS.saturating_sub(self.judged.len()) {
            self.reported.pop_front();
        }
    }

    /// Returns true if this call is stored.
    pub(super) fn contains(&self, call: &RawValue) -> bool {
        self.judged.iter().chain(&self.reported).any(|kept| kept.call.get() == call.get())
    }

    /// Returns all stored calls, in sequence order.
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
    fn texts_are_truncated_at_a_character_boundary() {
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

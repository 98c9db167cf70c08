//! The outcome of a tool call.

use serde::Serialize;

use crate::model::refusal::Refusal;

/// The result of a tool call, as a loop logs it and a model reads it.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ToolCallResult {
    /// The tool's name.
    pub tool: String,
    /// The response in tags, or the error text.
    pub content: String,
    /// Where to.
    pub url: String,
    /// The HTTP method.
    pub method: String,
    /// The credential that went along, or was asked for.
    pub credential_used: Option<String>,
    /// The origin's answer.
    pub response_status: Option<u16>,
    /// Bytes of the body that were taken from the origin, before decoding.
    pub response_size_bytes: u64,
    /// From the call to the end of the answer.
    pub latency_ms: f64,
    /// Whether a security layer refused it.
    pub blocked: bool,
    /// Why.
    pub block_reason: Option<String>,
}

/// A result, and what only we need to know of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The result.
    pub result: ToolCallResult,
    /// How it went.
    pub state: State,
}

/// How a call went.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// There is an answer, whatever its status.
    Completed,
    /// The operator has to decide first.
    AwaitingApproval,
    /// We will not.
    Denied,
    /// We could not.
    Failed,
}

impl State {
    /// Of a call that was refused.
    pub(super) fn of(refusal: Option<Refusal>) -> Self {
        use crate::model::refusal::Deny;
        match refusal {
            Some(Refusal::Deny(Deny::ApprovalPending)) => Self::AwaitingApproval,
            Some(Refusal::Fail(_)) => Self::Failed,
            Some(Refusal::Deny(_)) | None => Self::Denied,
        }
    }
}

impl Outcome {
    /// True if the content is no answer but says what went wrong.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.state != State::Completed
    }
}

//! The outcome of a tool call.

use serde::Serialize;

use crate::model::refusal::Refusal;

/// The result of a tool call, for logs and for the model.
#[derive(Clone, Debug, Default, PartialEq, Serialize)]
pub struct ToolCallResult {
    /// The tool's name.
    pub tool: String,
    /// The response in tags, or the error text.
    pub content: String,
    /// The URL.
    pub url: String,
    /// The HTTP method.
    pub method: String,
    /// The credential that was sent or requested.
    pub credential_used: Option<String>,
    /// The status of the origin's response.
    pub response_status: Option<u16>,
    /// The number of body bytes received from the origin, before decoding.
    pub response_size_bytes: u64,
    /// The time from the call to the end of the response, in milliseconds.
    pub latency_ms: f64,
    /// Whether a security layer refused the call.
    pub blocked: bool,
    /// The reason.
    pub block_reason: Option<String>,
}

/// A result and its state, which is not part of it.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// The result.
    pub result: ToolCallResult,
    /// The state of the call.
    pub state: State,
}

/// The state of a finished call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum State {
    /// The origin responded, with any status.
    Completed,
    /// The call waits for an operator's approval.
    AwaitingApproval,
    /// The call was refused.
    Denied,
    /// The call failed.
    Failed,
}

impl State {
    /// Returns the state of a refused call.
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
    /// Returns true if the content is an error text and not a response.
    #[must_use]
    pub fn is_error(&self) -> bool {
        self.state != State::Completed
    }
}

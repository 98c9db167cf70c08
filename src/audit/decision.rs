//! The line for an operator's decision.

use serde::Serialize;

use super::line::Event;
use super::sink::{Sink, SinkError};
use super::timestamp;

/// An operator's decision on a pending request. Its line has the fields of [`Line`](super::line::Line).
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RecordedDecision<'d> {
    /// The approval's id, as in the lines of the requests.
    pub approval: &'d str,
    /// `approve` or `deny`.
    pub decision: &'static str,
    /// The execution that made the request.
    pub execution: &'d str,
    /// The execution's task.
    pub task: &'d str,
    /// The tool, if the request is a tool call.
    pub tool: Option<&'d str>,
    /// The request's method.
    pub method: &'d str,
    /// The URL as logged.
    pub url: &'d str,
}

impl RecordedDecision<'_> {
    /// Writes the line and waits until it is written.
    ///
    /// # Errors
    /// [`SinkError`] if the sink cannot take it.
    pub async fn write(&self, sink: &Sink) -> Result<(), SinkError> {
        #[derive(Serialize)]
        struct DecisionLine<'l> {
            ts: String,
            event: Event,
            #[serde(flatten)]
            decision: &'l RecordedDecision<'l>,
        }
        let line = DecisionLine { ts: timestamp::now(), event: Event::Approval, decision: self };
        sink.write_and_wait(&line).await
    }
}

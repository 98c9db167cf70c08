//! The line about a token that was minted, or could not be.

use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::line::Event;
use super::sink::{Sink, SinkError};
use super::timestamp;
use crate::model::name::CredentialName;

/// The line about one attempt. It holds no value.
#[derive(Debug, Serialize)]
pub struct MintLine<'l> {
    ts: String,
    event: Event,
    credential: &'l str,
    workspace: &'l str,
    /// The token endpoint, without its path.
    endpoint: String,
    /// `minted` or `failed`.
    outcome: &'static str,
    /// The end of the token's life.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    /// The reason of a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<&'l str>,
    latency_ms: f64,
}

impl<'l> MintLine<'l> {
    /// Creates the line.
    #[must_use]
    pub fn new(
        credential: &'l CredentialName,
        workspace: &'l str,
        endpoint: &impl ToString,
        latency: Duration,
    ) -> Self {
        Self {
            ts: timestamp::now(),
            event: Event::Mint,
            credential: credential.as_str(),
            workspace,
            endpoint: endpoint.to_string(),
            outcome: "failed",
            expires_at: None,
            reason: None,
            latency_ms: (latency.as_secs_f64() * 1e6).round() / 1e3,
        }
    }

    /// Sets the end of the life of the token that was minted.
    pub fn set_expiry(&mut self, at: SystemTime) {
        self.outcome = "minted";
        self.expires_at = Some(timestamp::of(at));
    }

    /// Sets the reason of a failure, which holds no text of the endpoint.
    pub fn set_error(&mut self, reason: &'l str) {
        self.reason = Some(reason);
    }

    /// Writes the line and waits until it is written.
    ///
    /// # Errors
    /// [`SinkError`] if it cannot be written.
    pub async fn write(&self, sink: &Sink) -> Result<(), SinkError> {
        sink.write_and_wait(self).await
    }
}

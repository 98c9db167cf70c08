//! The line about a token that was minted, or could not be.

use std::time::{Duration, SystemTime};

use serde::Serialize;

use super::line::Event;
use super::sink::{Sink, SinkError};
use super::timestamp;
use crate::model::name::CredentialName;

/// The line about one attempt. It holds no value. Its members have the names that they have in other lines, so that what reads
/// those shows this one, too.
#[derive(Debug, Serialize)]
pub struct MintLine<'l> {
    ts: String,
    event: Event,
    credential_used: &'l str,
    workspace: &'l str,
    /// The token endpoint, without its path.
    url: String,
    /// `minted` or `failed`.
    decision: &'static str,
    /// The end of the token's life.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<String>,
    /// The reason of a failure.
    #[serde(skip_serializing_if = "Option::is_none")]
    rule: Option<&'l str>,
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
            credential_used: credential.as_str(),
            workspace,
            url: endpoint.to_string(),
            decision: "failed",
            expires_at: None,
            rule: None,
            latency_ms: (latency.as_secs_f64() * 1e6).round() / 1e3,
        }
    }

    /// Sets the end of the life of the token that was minted.
    pub fn set_expiry(&mut self, at: SystemTime) {
        self.decision = "minted";
        self.expires_at = Some(timestamp::of(at));
    }

    /// Sets the reason of a failure, which holds no text of the endpoint.
    pub fn set_error(&mut self, reason: &'l str) {
        self.rule = Some(reason);
    }

    /// Writes the line and waits until it is written.
    ///
    /// # Errors
    /// [`SinkError`] if it cannot be written.
    pub async fn write(&self, sink: &Sink) -> Result<(), SinkError> {
        sink.write_and_wait(self).await
    }
}

//! The task of the caller, as reported by the proxy.

use http::Method;
use serde_json::Value;

use super::messages;
use super::proxy::{Proxy, ProxyReply, ProxyUnreachable, Refused};
use crate::model::refusal::{Deny, Refusal};
use crate::model::tool::Tool;

/// A task and its tools.
#[derive(Clone, Debug, Default)]
pub struct Task {
    name: String,
    tools: Vec<String>,
    credentials: Vec<String>,
}

/// Why the task is unknown.
#[derive(Debug, thiserror::Error)]
pub enum TaskError {
    /// The proxy is unreachable.
    #[error(transparent)]
    Unreached(#[from] ProxyUnreachable),
    /// The proxy refused, with the text for a model.
    #[error("{}", .0.trim_start_matches("Error: "))]
    Refused(String),
}

impl Task {
    /// Requests the task from the proxy.
    ///
    /// # Errors
    /// [`TaskError`] if the proxy is unreachable or does not know the caller.
    pub async fn of(proxy: &Proxy) -> Result<Self, TaskError> {
        Self::request(proxy).await?.map_err(|refused| {
            let mut text = messages::refused(&refused, "");
            if refused.refusal == Some(Refusal::Deny(Deny::CallerUnknown)) {
                text.push_str("; is ID:TOKEN in the proxy's URL right, and has its execution not ended?");
            }
            TaskError::Refused(text)
        })
    }

    /// As [`Self::of`], but returns the refusal itself.
    pub(super) async fn request(proxy: &Proxy) -> Result<Result<Self, Refused>, ProxyUnreachable> {
        match proxy.ask(Method::GET, "/v1/self", None).await? {
            ProxyReply::Document(about) => Ok(Ok(Self::from_document(&about))),
            ProxyReply::Refused(refused) => Ok(Err(refused)),
        }
    }

    fn from_document(about: &Value) -> Self {
        let all = |member: &str| about.get(member).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let names = |one: &Value| one.get("name").and_then(Value::as_str).map(str::to_owned);
        Self {
            name: about.get("task").and_then(Value::as_str).unwrap_or_default().to_owned(),
            tools: all("tools").iter().filter_map(Value::as_str).map(str::to_owned).collect(),
            credentials: all("credentials").iter().filter_map(names).collect(),
        }
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns whether it has a tool.
    #[must_use]
    pub fn has(&self, tool: Tool) -> bool {
        self.tools.iter().any(|name| name == tool.as_str())
    }

    /// Returns whether it has a credential with this name that has a value.
    #[must_use]
    pub fn can_use(&self, credential: &str) -> bool {
        self.credentials.iter().any(|name| name == credential)
    }
}

//! The registry of tools and their handlers.

use std::pin::Pin;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::arguments::ArgumentError;
use super::call::UnsentCall;
use super::definition::Definition;
use super::nonce::nonce;
use super::outcome::Outcome;
use super::proxy::Proxy;
use super::task::Task;
use super::{builtin, messages, pack};
use crate::model::name::is_plain;
use crate::model::refusal::Deny;
use crate::model::tool::Tool;

/// Runs a tool. It receives the model's arguments in any shape, and always returns an outcome.
pub trait Handler: Send + Sync {
    /// Runs it.
    fn run<'a>(&'a self, proxy: &'a Proxy, name: &'a str, given: &'a Value) -> Running<'a>;

    /// As what its requests are judged: without that tool the task does not have it. None for one that sends none.
    fn goes_as(&self) -> Option<Tool>;
}

/// A tool at work.
pub type Running<'a> = Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

/// A tool as it is registered.
#[derive(Clone)]
pub struct Registration {
    /// The name for the model: letters, digits, `_` and `-`, at most 64.
    pub name: String,
    /// The handler.
    pub handler: Arc<dyn Handler>,
    /// The description for the model.
    pub description: String,
    /// JSON Schema of what the model may give it.
    pub schema: Value,
    /// The credential without which it is of no use.
    pub requires: Option<String>,
}

/// Why a tool was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// Another one has that name.
    #[error("there is a tool '{0}' already")]
    Taken(String),
    /// No model can call it.
    #[error("a tool's name is 1 to 64 letters, digits, '_' and '-'")]
    Name,
}

/// The tools, in the order in which they were registered.
#[derive(Default)]
pub struct Registry {
    tools: Vec<Registration>,
    /// Names that are known, and not to be called: why.
    withheld: Vec<(String, Withheld)>,
}

/// Why a tool that is known is not to be had.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withheld {
    /// A pack's policy does not allow it.
    NotEnabled,
    /// It is one that exeat does not run.
    NotServed,
}

/// One of the tools that need no pack.
struct Builtin(Tool);

impl Registry {
    /// The tools that need no pack.
    #[must_use]
    pub fn builtin() -> Self {
        let tools = [Tool::ApiCall, Tool::HttpGet, Tool::HttpPost, Tool::Webhook, Tool::HttpRequest];
        let registered = tools.map(|tool| Registration {
            name: tool.as_str().to_owned(),
            handler: Arc::new(Builtin(tool)),
            description: builtin::description(tool).to_owned(),
            schema: builtin::schema(tool),
            requires: None,
        });
        let elsewhere = pack::not_served().map(|name| (name.to_owned(), Withheld::NotServed));
        Self { tools: registered.into(), withheld: elsewhere.collect() }
    }

    /// Adds one.
    ///
    /// # Errors
    /// [`RegisterError`] for a name that is taken, or none.
    pub fn register(&mut self, tool: Registration) -> Result<(), RegisterError> {
        if !is_plain(&tool.name) {
            return Err(RegisterError::Name);
        }
        if self.tools.iter().any(|other| other.name == tool.name) {
            return Err(RegisterError::Taken(tool.name));
        }
        self.withheld.retain(|(name, _)| *name != tool.name);
        self.tools.push(tool);
        Ok(())
    }

    /// Makes a name known as one that is not to be had.
    pub fn withhold(&mut self, name: &str, why: Withheld) {
        self.tools.retain(|tool| tool.name != name);
        self.withheld.retain(|(known, _)| known != name);
        self.withheld.push((name.to_owned(), why));
    }

    /// Returns the definitions of the task's tools.
    #[must_use]
    pub fn definitions(&self, task: &Task) -> Vec<Definition> {
        self.tools.iter().filter(|tool| is_enabled(tool, task)).map(Definition::of).collect()
    }

    /// Returns the definitions of all tools.
    #[must_use]
    pub fn all(&self) -> Vec<Definition> {
        self.tools.iter().map(Definition::of).collect()
    }

    /// Why a tool is not to be had, whatever the task has: the text for a model.
    pub(super) fn why_withheld(&self, name: &str) -> Option<String> {
        match self.withheld.iter().find(|(known, _)| known == name)? {
            (_, Withheld::NotEnabled) => Some(messages::not_enabled(name)),
            (_, Withheld::NotServed) => Some(messages::not_served(name)),
        }
    }

    /// Answers a call whose arguments could not be read.
    pub(super) async fn refuse(&self, proxy: &Proxy, name: &str, text: &str) -> Outcome {
        let reason = Some(Deny::RequestMalformed.into());
        UnsentCall { tool: name.to_owned(), text: text.to_owned(), reason, ..UnsentCall::default() }.told(proxy).await
    }

    /// Runs one.
    pub async fn execute(&self, proxy: &Proxy, name: &str, given: &Value) -> Outcome {
        let Some(tool) = self.tools.iter().find(|tool| tool.name == name) else {
            let text = self.why_withheld(name).unwrap_or_else(|| messages::unknown_tool(name));
            return unsent(name, text).told(proxy).await;
        };
        // Where it cannot be told, the tool is not run: what the proxy has against the caller is said in place of this.
        if tool.requires.is_some() && !Task::of(proxy).await.is_ok_and(|task| is_enabled(tool, &task)) {
            return unsent(name, messages::not_enabled(name)).told(proxy).await;
        }
        tool.handler.run(proxy, name, given).await
    }
}

fn is_enabled(tool: &Registration, task: &Task) -> bool {
    let goes = tool.handler.goes_as().is_none_or(|goes_as| task.has(goes_as));
    goes && tool.requires.as_ref().is_none_or(|credential| task.can_use(credential))
}

fn unsent(name: &str, text: String) -> UnsentCall {
    UnsentCall { tool: name.to_owned(), text, reason: Some(Deny::ToolNotEnabled.into()), ..UnsentCall::default() }
}

impl Handler for Builtin {
    fn run<'a>(&'a self, proxy: &'a Proxy, _name: &'a str, given: &'a Value) -> Running<'a> {
        Box::pin(async move {
            let call = object(given).and_then(|all| builtin::call(self.0, all)).and_then(|mut call| {
                // A model that writes a placeholder writes text.
                let nonce = (self.0 == Tool::HttpRequest).then(nonce).transpose();
                call.nonce = nonce.map_err(|why| ArgumentError::malformed(format!("Error: {why}")))?;
                Ok(call)
            });
            match call {
                Ok(call) => call.perform(proxy).await,
                Err(wrong) => not_sent(self.0.as_str(), given, wrong).told(proxy).await,
            }
        })
    }

    fn goes_as(&self) -> Option<Tool> {
        Some(self.0)
    }
}

/// Arguments, which are an object; none are an empty one.
pub(super) fn object(given: &Value) -> Result<&Map<String, Value>, ArgumentError> {
    static NONE: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
    match given {
        Value::Object(all) => Ok(all),
        Value::Null => Ok(&NONE),
        _ => Err(ArgumentError::malformed("Error: arguments must be a JSON object".to_owned())),
    }
}

/// A call that is not made, with what it would have been as far as it can be said.
pub(super) fn not_sent(tool: &str, given: &Value, wrong: ArgumentError) -> UnsentCall {
    let text = |member: &str| given.get(member).and_then(Value::as_str).unwrap_or_default().to_owned();
    UnsentCall {
        tool: tool.to_owned(),
        url: text("url"),
        method: text("method"),
        credential: given.get("credential").and_then(Value::as_str).map(str::to_owned),
        text: wrong.text,
        reason: Some(wrong.reason),
    }
}

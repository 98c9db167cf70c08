//! The registry of tools and their handlers.

use std::pin::Pin;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::arguments::ArgumentError;
use super::call::UnsentCall;
use super::definition::Definition;
use super::nonce::nonce;
use super::outcome::Outcome;
use super::primitives::Primitive;
use super::proxy::Proxy;
use super::task::Task;
use super::{builtin, messages};
use crate::model::name::is_plain;
use crate::model::refusal::Deny;
use crate::model::tool::Tool;

/// Runs a tool. It receives the model's arguments in any shape, and always returns an outcome.
pub trait Handler: Send + Sync {
    /// Runs the tool.
    fn run<'a>(&'a self, proxy: &'a Proxy, name: &'a str, given: &'a Value) -> Running<'a>;

    /// Returns the tool as which its requests are judged. A task without that tool does not have this one. `None` for a
    /// tool that sends no requests.
    fn judged_as(&self) -> Option<Tool>;
}

/// A running tool.
pub type Running<'a> = Pin<Box<dyn Future<Output = Outcome> + Send + 'a>>;

/// A registered tool.
#[derive(Clone)]
pub struct Registration {
    /// The name for the model: letters, digits, `_` and `-`, at most 64.
    pub name: String,
    /// The handler.
    pub handler: Arc<dyn Handler>,
    /// The description for the model.
    pub description: String,
    /// The JSON Schema of its arguments.
    pub schema: Value,
    /// The credential that the tool requires.
    pub requires: Option<String>,
}

impl Registration {
    fn definition(&self) -> Definition {
        Definition { name: self.name.clone(), description: self.description.clone(), schema: self.schema.clone() }
    }
}

/// Why a tool was not registered.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RegisterError {
    /// The name is taken.
    #[error("there is a tool '{0}' already")]
    Taken(String),
    /// The name is invalid for models.
    #[error("a tool's name is 1 to 64 letters, digits, '_' and '-'")]
    Name,
}

/// The tools, in the order in which they were registered.
#[derive(Default)]
pub struct Registry {
    tools: Vec<Registration>,
    /// Known names that cannot be called, with the reason.
    withheld: Vec<(String, Withheld)>,
}

/// Why a known tool cannot be called.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Withheld {
    /// The pack's policy does not allow it.
    NotEnabled,
    /// The operator has registered no program for it.
    NoPrograms,
    /// It works in a sandbox, and there is none.
    NoSandbox,
}

/// A built-in tool.
struct Builtin(Tool);

impl Registry {
    /// Registers the built-in tools.
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
        let elsewhere = Primitive::ALL.map(|primitive| (primitive.name().to_owned(), Withheld::NoSandbox));
        Self { tools: registered.into(), withheld: elsewhere.into() }
    }

    /// Registers a tool.
    ///
    /// # Errors
    /// [`RegisterError`] for a name that is taken or invalid.
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

    /// Records a name as known but not callable.
    pub fn withhold(&mut self, name: &str, why: Withheld) {
        self.tools.retain(|tool| tool.name != name);
        self.withheld.retain(|(known, _)| known != name);
        self.withheld.push((name.to_owned(), why));
    }

    /// Returns the definitions of the task's tools.
    #[must_use]
    pub fn definitions(&self, task: &Task) -> Vec<Definition> {
        self.tools.iter().filter(|tool| is_enabled(tool, task)).map(Registration::definition).collect()
    }

    /// Returns the definitions of all tools.
    #[must_use]
    pub fn all(&self) -> Vec<Definition> {
        self.tools.iter().map(Registration::definition).collect()
    }

    /// Returns the text for a model if a tool cannot be called, whatever the task has.
    pub(super) fn why_withheld(&self, name: &str) -> Option<String> {
        Some(match self.withheld_as(name)? {
            Withheld::NotEnabled => messages::not_enabled(name),
            Withheld::NoPrograms => messages::no_programs(name),
            Withheld::NoSandbox => messages::no_sandbox(name),
        })
    }

    pub(super) fn withheld_as(&self, name: &str) -> Option<Withheld> {
        self.withheld.iter().find(|(known, _)| known == name).map(|(_, why)| *why)
    }

    /// Refuses a call whose arguments could not be parsed.
    pub(super) async fn refuse(&self, proxy: &Proxy, name: &str, text: &str) -> Outcome {
        let reason = Some(Deny::RequestMalformed.into());
        UnsentCall { tool: name.to_owned(), text: text.to_owned(), reason, ..UnsentCall::default() }.report(proxy).await
    }

    /// Runs a tool.
    pub async fn execute(&self, proxy: &Proxy, name: &str, given: &Value) -> Outcome {
        let Some(tool) = self.tools.iter().find(|tool| tool.name == name) else {
            let text = self.why_withheld(name).unwrap_or_else(|| messages::unknown_tool(name));
            return unsent_call(name, text).report(proxy).await;
        };
        // If the task cannot be determined, the tool is not run. The proxy's refusal is returned instead.
        if tool.requires.is_some() && !Task::of(proxy).await.is_ok_and(|task| is_enabled(tool, &task)) {
            return unsent_call(name, messages::not_enabled(name)).report(proxy).await;
        }
        tool.handler.run(proxy, name, given).await
    }
}

fn is_enabled(tool: &Registration, task: &Task) -> bool {
    let goes = tool.handler.judged_as().is_none_or(|goes_as| task.has(goes_as));
    goes && tool.requires.as_ref().is_none_or(|credential| task.can_use(credential))
}

pub(super) fn unsent_call(name: &str, text: String) -> UnsentCall {
    UnsentCall { tool: name.to_owned(), text, reason: Some(Deny::ToolNotEnabled.into()), ..UnsentCall::default() }
}

impl Handler for Builtin {
    fn run<'a>(&'a self, proxy: &'a Proxy, _name: &'a str, given: &'a Value) -> Running<'a> {
        Box::pin(async move {
            let call = object(given).and_then(|all| builtin::call(self.0, all)).and_then(|mut call| {
                // A placeholder written by a model is text.
                let nonce = (self.0 == Tool::HttpRequest).then(nonce).transpose();
                call.nonce = nonce.map_err(|why| ArgumentError::malformed(format!("Error: {why}")))?;
                Ok(call)
            });
            match call {
                Ok(call) => call.perform(proxy).await,
                Err(wrong) => refused_call(self.0.as_str(), given, wrong).report(proxy).await,
            }
        })
    }

    fn judged_as(&self) -> Option<Tool> {
        Some(self.0)
    }
}

/// Returns the arguments as an object. Missing arguments are an empty one.
pub(super) fn object(given: &Value) -> Result<&Map<String, Value>, ArgumentError> {
    static NONE: std::sync::LazyLock<Map<String, Value>> = std::sync::LazyLock::new(Map::new);
    match given {
        Value::Object(all) => Ok(all),
        Value::Null => Ok(&NONE),
        _ => Err(ArgumentError::malformed("Error: arguments must be a JSON object".to_owned())),
    }
}

/// Returns a call that was not made, with as much of its request as can be determined.
pub(super) fn refused_call(tool: &str, given: &Value, wrong: ArgumentError) -> UnsentCall {
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

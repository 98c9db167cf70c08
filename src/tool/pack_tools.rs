//! Registers a pack's tools.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::arguments::ArgumentError;
use super::builtin;
use super::call::UnsentCall;
use super::outcome::{Outcome, State, ToolCallResult};
use super::pack::{Lookup, Pack, Rendered, Step};
use super::proxy::Proxy;
use super::registry::{Handler, RegisterError, Registration, Registry, Running, Withheld, refused_call};
use super::tool_response::wrap_in_tags;
use crate::model::tool::Tool;

/// Maximum time for checking arguments.
const CHECK_TIMEOUT: Duration = Duration::from_secs(2);
/// Maximum number of concurrent checks. An abandoned check runs to its end; the schema and the size of the arguments
/// bound its duration.
static CHECKS: Semaphore = Semaphore::const_new(4);
/// The stack size of a check, in bytes, for the deepest permitted arguments.
const STACK: usize = 8 << 20;

/// A tool of a pack.
struct PackTool {
    pack: Arc<Pack>,
    goes_as: Option<Tool>,
}

impl Registry {
    /// Registers the built-in tools that the pack allows, and the pack's own tools.
    ///
    /// # Errors
    /// [`RegisterError`] for a name that is taken. A parsed pack contains none.
    pub fn with_pack(pack: Pack) -> Result<Self, RegisterError> {
        let mut registry = Self::builtin();
        let pack = Arc::new(pack);
        for gate in pack.gates() {
            match pack.find(&gate.name) {
                Lookup::Withheld(_) => registry.withhold(&gate.name, Withheld::NotEnabled),
                Lookup::NotServed => registry.withhold(&gate.name, Withheld::NotServed),
                Lookup::Offered(_) | Lookup::HttpRequest | Lookup::Unknown => {}
            }
        }
        if !pack.calls_tools() {
            Tool::ALL.into_iter().for_each(|tool| registry.withhold(tool.as_str(), Withheld::NotEnabled));
        }
        for tool in pack.tools() {
            registry.register(Registration {
                name: tool.name().to_owned(),
                handler: Arc::new(PackTool {
                    pack: pack.clone(),
                    goes_as: tool.sends_requests().then_some(Tool::HttpRequest),
                }),
                description: tool.description().to_owned(),
                schema: tool.parameters().clone(),
                requires: None,
            })?;
        }
        Ok(registry)
    }
}

impl Handler for PackTool {
    fn run<'a>(&'a self, proxy: &'a Proxy, name: &'a str, given: &'a Value) -> Running<'a> {
        Box::pin(async move {
            match step(&self.pack, name, given).await {
                Ok(Step::Answer(answer)) => mocked(name, &answer),
                Ok(Step::Request(rendered)) => send(proxy, name, rendered).await,
                Err(why) => {
                    let nothing = Value::Null;
                    refused_call(name, &nothing, ArgumentError::malformed(format!("Error: {why}"))).report(proxy).await
                }
            }
        })
    }

    fn judged_as(&self) -> Option<Tool> {
        self.goes_as
    }
}

/// Renders a call on a thread of its own, so that a slow template does not delay other calls.
async fn step(pack: &Arc<Pack>, name: &str, given: &Value) -> Result<Step, String> {
    let too_long = || "the arguments take too long to check".to_owned();
    let checked = async {
        let permit = CHECKS.acquire().await.map_err(|_| too_long())?;
        let (tell, told) = oneshot::channel();
        let (pack, name, given) = (pack.clone(), name.to_owned(), given.clone());
        let check = move || {
            let _permit = permit;
            let _ = tell.send(match pack.find(&name) {
                Lookup::Offered(tool) => tool.run(&given),
                _ => Err("it is not in its pack".to_owned()),
            });
        };
        let begun = std::thread::Builder::new().name("check".to_owned()).stack_size(STACK).spawn(check);
        begun.map_err(|_| "no thread is available to check the arguments".to_owned())?;
        told.await.map_err(|_| "the arguments cannot be checked".to_owned())?
    };
    timeout(CHECK_TIMEOUT, checked).await.unwrap_or_else(|_| Err(too_long()))
}

/// Sends the request that a template rendered.
async fn send(proxy: &Proxy, name: &str, rendered: Rendered) -> Outcome {
    let Rendered { arguments, nonce, own_fields } = rendered;
    let may_authorize = own_fields.iter().any(|field| field == "authorization");
    match builtin::composed(&arguments, may_authorize) {
        Ok(mut call) => {
            call.name = name.to_owned();
            call.nonce = Some(nonce);
            call.perform(proxy).await
        }
        Err(wrong) => {
            // The text may contain placeholders, which must not be shown.
            let reason = Some(wrong.reason);
            UnsentCall { tool: name.to_owned(), text: wrong.text, reason, ..UnsentCall::default() }.report(proxy).await
        }
    }
}

/// Returns a mocked answer in the form of a real one. It was never sent, so the proxy has no record of it.
fn mocked(name: &str, answer: &Value) -> Outcome {
    let text = answer.as_str().map_or_else(|| answer.to_string(), str::to_owned);
    let result =
        ToolCallResult { tool: name.to_owned(), content: wrap_in_tags(&text, false), ..ToolCallResult::default() };
    Outcome { result, state: State::Completed }
}

//! Registers a pack's tools.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;
use tokio::sync::{Semaphore, oneshot};
use tokio::time::timeout;

use super::arguments::ArgumentError;
use super::builtin;
use super::call::UnsentCall;
use super::messages;
use super::outcome::{Outcome, State, ToolCallResult};
use super::pack::{Lookup, Pack, Rendered, Step, is_open_without_pack};
use super::primitives::{Primitive, Primitives};
use super::proxy::Proxy;
use super::registry::{Handler, RegisterError, Registration, Registry, Running, Withheld, refused_call, unsent_call};
use super::shell::ToolSandbox;
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
    primitives: Option<Arc<Primitives>>,
}

impl Registry {
    /// Registers the built-in tools, the primitives that work in the sandbox, if there is one, and the pack's own tools, as far as the
    /// pack allows them.
    ///
    /// # Errors
    /// [`RegisterError`] for a name that is taken. A parsed pack contains none.
    pub fn new(pack: Option<Pack>, sandbox: Option<ToolSandbox>) -> Result<Self, RegisterError> {
        let mut registry = Self::builtin();
        let writes_sql = pack.as_ref().is_some_and(Pack::allows_sql_writes);
        let primitives = sandbox.map(|sandbox| Arc::new(Primitives::new(sandbox, writes_sql)));
        for primitive in Primitive::ALL {
            let name = primitive.name();
            let is_open = match &pack {
                Some(pack) => matches!(pack.find(name), Lookup::Primitive(_)),
                None => is_open_without_pack(name),
            };
            match &primitives {
                _ if !is_open => registry.withhold(name, Withheld::NotEnabled),
                None => registry.withhold(name, Withheld::NoSandbox),
                Some(primitives) if !primitives.serves(primitive) => registry.withhold(name, Withheld::NoPrograms),
                Some(primitives) => registry.register(primitives.registration(primitive))?,
            }
        }
        if let Some(pack) = pack {
            registry.add_pack(Arc::new(pack), primitives)?;
        }
        Ok(registry)
    }

    fn add_pack(&mut self, pack: Arc<Pack>, primitives: Option<Arc<Primitives>>) -> Result<(), RegisterError> {
        for gate in pack.gates().iter().filter(|gate| !gate.allowed) {
            self.withhold(&gate.name, Withheld::NotEnabled);
        }
        if !pack.calls_tools() {
            Tool::ALL.into_iter().for_each(|tool| self.withhold(tool.as_str(), Withheld::NotEnabled));
        }
        for (tool, primitive) in pack.tools() {
            let primitive = primitive.and_then(Primitive::named);
            let withheld = primitive.and_then(|primitive| self.withheld_as(primitive.name()));
            if let Some(withheld) = withheld {
                self.withhold(tool.name(), withheld);
                continue;
            }
            self.register(Registration {
                name: tool.name().to_owned(),
                handler: Arc::new(PackTool {
                    pack: pack.clone(),
                    goes_as: tool.sends_requests().then_some(Tool::HttpRequest),
                    primitives: primitives.clone(),
                }),
                description: tool.description().to_owned(),
                schema: tool.parameters().clone(),
                requires: None,
            })?;
        }
        Ok(())
    }
}

impl Handler for PackTool {
    fn run<'a>(&'a self, proxy: &'a Proxy, name: &'a str, given: &'a Value) -> Running<'a> {
        Box::pin(async move {
            match step(&self.pack, name, given).await {
                Ok(Step::Answer(answer)) => mocked(name, &answer),
                Ok(Step::Request(rendered)) => send(proxy, name, rendered).await,
                Ok(Step::Primitive { name: primitive, arguments }) => {
                    match self.primitives.as_ref().zip(Primitive::named(primitive)) {
                        Some((primitives, primitive)) => primitives.run(primitive, name, &arguments, proxy).await,
                        // It is not registered without a sandbox.
                        None => unsent_call(name, messages::no_sandbox(name)).report(proxy).await,
                    }
                }
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

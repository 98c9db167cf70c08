//! Handles the SDK's requests: listing tools and calling them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use rmcp::model::{
    CallToolRequestParams, CallToolResponse, CallToolResult, ContentBlock, CustomRequest, CustomResult, ErrorCode,
    Implementation, ListToolsResult, MetaObject, PaginatedRequestParams, ProgressNotificationParam, ProtocolVersion,
    ServerCapabilities, ServerConfig, Tool, ToolAnnotations,
};
use rmcp::service::RequestContext;
use rmcp::{ErrorData, RoleServer, ServerHandler};
use serde_json::{Map, Value};
use tokio::time::{interval, timeout};

use super::call_limit::CallLimit;
use crate::model::tool::Tool as Builtin;
use crate::tool::definition::{Definition, PREAMBLE};
use crate::tool::messages;
use crate::tool::outcome::Outcome;
use crate::tool::proxy::Proxy;
use crate::tool::registry::Registry;
use crate::tool::task::Task;

/// Maximum time for the proxy to report what the task may do.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);
/// The interval between progress notifications, and the maximum time for a client to read one.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// The key of the structured result for programs. Clients do not show it to a model.
const META: &str = "exeat/result";

/// The tools, shared by all sessions.
#[derive(Clone)]
pub(super) struct Server(Arc<Shared>);

struct Shared {
    registry: Registry,
    proxy: Proxy,
    call_limit: CallLimit,
}

impl Server {
    pub(super) fn new(registry: Registry, proxy: Proxy) -> Self {
        Self(Arc::new(Shared { registry, proxy, call_limit: CallLimit::new() }))
    }

    /// Waits until no call is in progress.
    pub(super) async fn wait_until_idle(&self) {
        self.0.call_limit.wait_until_idle().await;
    }

    /// Runs a tool. A cancelled call is dropped, which closes its connection.
    async fn call(
        &self,
        name: &str,
        given: &Value,
        context: &RequestContext<RoleServer>,
    ) -> Result<CallToolResult, ErrorData> {
        tokio::select! {
            biased;
            // The client does not get a response to a cancelled request.
            () = context.ct.cancelled() => Err(ErrorData::internal_error("the call was cancelled", None)),
            result = with_progress(self.run(name, given), context) => Ok(result),
        }
    }

    async fn run(&self, name: &str, given: &Value) -> CallToolResult {
        match self.0.call_limit.acquire().await {
            Some(_permit) => result(self.0.registry.execute(&self.0.proxy, name, given).await),
            None => CallToolResult::error(vec![ContentBlock::text(messages::too_many())]),
        }
    }

    async fn tools(&self) -> Result<Vec<Tool>, ErrorData> {
        let cannot = |why: String| ErrorData::internal_error(why, None);
        let Some(_permit) = self.0.call_limit.acquire().await else {
            return Err(cannot(messages::too_many().to_owned()));
        };
        let task = timeout(LIST_TIMEOUT, Task::of(&self.0.proxy)).await;
        let task = task.map_err(|_| cannot(format!("the proxy at {} did not answer in time", self.0.proxy)))?;
        let task = task.map_err(|error| cannot(error.to_string()))?;
        Ok(self.0.registry.definitions(&task).into_iter().map(tool).collect())
    }
}

impl ServerHandler for Server {
    fn get_info(&self) -> ServerConfig {
        let about = Implementation::new("exeat-tools", env!("CARGO_PKG_VERSION"));
        ServerConfig::new(ServerCapabilities::builder().enable_tools().build())
            .with_server_info(about)
            .with_instructions(PREAMBLE)
    }

    async fn list_tools(
        &self,
        _page: Option<PaginatedRequestParams>,
        context: RequestContext<RoleServer>,
    ) -> Result<ListToolsResult, ErrorData> {
        tokio::select! {
            () = context.ct.cancelled() => Err(ErrorData::internal_error("the request was cancelled", None)),
            tools = self.tools() => Ok(ListToolsResult::with_all_items(tools?)),
        }
    }

    async fn call_tool(
        &self,
        request: CallToolRequestParams,
        context: RequestContext<RoleServer>,
    ) -> Result<CallToolResponse, ErrorData> {
        let given = request.arguments.map_or(Value::Null, Value::Object);
        Ok(self.call(&request.name, &given, &context).await?.into())
    }

    /// Handles requests that the SDK cannot parse, such as a call whose arguments are not an object; the model gets an
    /// error.
    async fn on_custom_request(
        &self,
        request: CustomRequest,
        context: RequestContext<RoleServer>,
    ) -> Result<CustomResult, ErrorData> {
        let member = |name: &str| request.params.as_ref().and_then(|params| params.get(name));
        if request.method != "tools/call" {
            return Err(ErrorData::new(ErrorCode::METHOD_NOT_FOUND, "no such method", None));
        }
        let name = member("name").and_then(Value::as_str);
        let name = name.ok_or_else(|| ErrorData::invalid_params("a call names a tool", None))?;
        let mut result = self.call(name, member("arguments").unwrap_or(&Value::Null), &context).await?;
        if context.protocol_version().is_none_or(|version| version < ProtocolVersion::V_2026_07_28) {
            result.result_type = None;
        }
        let result = serde_json::to_value(result);
        result.map(CustomResult::new).map_err(|error| ErrorData::internal_error(error.to_string(), None))
    }
}

/// Runs a future and reports progress every second to a client that requests it.
async fn with_progress<T>(work: impl Future<Output = T>, context: &RequestContext<RoleServer>) -> T {
    let Some(token) = context.meta.get_progress_token() else { return work.await };
    let started = Instant::now();
    let mut work = std::pin::pin!(work);
    let mut ticks = interval(PROGRESS_INTERVAL);
    loop {
        tokio::select! {
            done = &mut work => return done,
            _ = ticks.tick() => {}
        }
        let progress = ProgressNotificationParam::new(token.clone(), started.elapsed().as_secs_f64());
        let sent = context.peer.notify_progress(progress.with_message("waiting for the answer"));
        // Progress that the client does not read in time is dropped, so that it cannot arrive after the response.
        if !matches!(timeout(PROGRESS_INTERVAL, sent).await, Ok(Ok(()))) {
            return work.await;
        }
    }
}

fn tool(definition: Definition) -> Tool {
    let Definition { name, description, schema } = definition;
    let schema = match schema {
        Value::Object(schema) => schema,
        _ => Map::new(),
    };
    let only_reads = name == Builtin::HttpGet.as_str();
    Tool::new(name, description, schema).with_annotations(ToolAnnotations::new().read_only(only_reads).open_world(true))
}

/// Returns the text for the model and the structured result for programs. A failed call is a result, not a protocol
/// error, so that the model sees it.
fn result(outcome: Outcome) -> CallToolResult {
    let is_error = outcome.is_error();
    let mut rest = match serde_json::to_value(&outcome.result) {
        Ok(Value::Object(rest)) => rest,
        _ => Map::new(),
    };
    rest.remove("content");
    let content = vec![ContentBlock::text(outcome.result.content)];
    let result = if is_error { CallToolResult::error(content) } else { CallToolResult::success(content) };
    result.with_meta(Some(MetaObject(Map::from_iter([(META.to_owned(), Value::Object(rest))]))))
}

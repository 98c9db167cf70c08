//! Executions in the admin API: started, listed, shown and stopped.

use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use http::header::HOST;
use http::{HeaderMap, Method, Request, StatusCode};
use hyper::body::Incoming;
use ipnet::IpNet;
use serde::Deserialize;
use serde_json::json;

use super::reply::{Reply, error, ledger_error, only_parameter, read_json};
use crate::files;
use crate::flow::{Services, documents};
use crate::ledger::{Execution, Millis, StopReason};
use crate::model::name::{ExecutionId, TaskName};
use crate::model::secret::TokenHash;
use crate::model::{token, unique_id};
use crate::policy::settings::ListenerMode;

/// Default lifetime of an execution, in seconds.
const DAY: u64 = 24 * 3600;
/// Maximum lifetime of an execution, in seconds.
const YEAR: u64 = 365 * DAY;

/// The body of a POST.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct StartRequest {
    task: String,
    /// The lifetime in seconds.
    expires_in_s: Option<u64>,
    peers: Option<String>,
    #[serde(default)]
    r#static: bool,
}

/// Returns true for paths of this module.
pub(crate) fn owns(path: &str) -> bool {
    path == "/v1/executions" || path.starts_with("/v1/executions/")
}

/// Answers an authorized request.
pub(crate) async fn answer(services: &Arc<Services>, request: Request<Incoming>) -> Reply {
    let path = request.uri().path().to_owned();
    let segments: Vec<&str> = path.strip_prefix("/v1/executions").unwrap_or_default().split('/').skip(1).collect();
    let result = match (request.method(), segments.as_slice()) {
        (&Method::GET, []) => list(services, request.uri().query()).await,
        (&Method::POST, []) => start(services, request).await,
        (&Method::GET, [id]) => show(services, &ExecutionId::new(id)).await,
        (&Method::DELETE, [id]) => stop(services, &ExecutionId::new(id)).await,
        (&Method::GET, [id, "tool_calls"]) => tool_calls(services, &ExecutionId::new(id)).await,
        _ => Err(error(StatusCode::NOT_FOUND, "no such page")),
    };
    result.unwrap_or_else(|reply| reply)
}

/// Starts an execution and returns its token, which is never returned again.
async fn start(services: &Arc<Services>, request: Request<Incoming>) -> Result<Reply, Reply> {
    let authority = authority(services, request.headers());
    let wanted: StartRequest = read_json(request).await?;
    let name = TaskName::new(&wanted.task);
    if services.policies.snapshot().task(&name).is_none() {
        return Err(error(StatusCode::UNPROCESSABLE_ENTITY, "the task does not exist"));
    }
    if wanted.r#static {
        return restart_static(services, &wanted, &name).await;
    }
    let seconds = wanted.expires_in_s.unwrap_or(DAY);
    if !(1..=YEAR).contains(&seconds) {
        return Err(error(StatusCode::UNPROCESSABLE_ENTITY, "expires_in_s must be between 1 and 31536000"));
    }
    let network = |text: &String| IpNet::from_str(text).map(|network| network.trunc());
    let peers = wanted.peers.as_ref().map(network).transpose();
    let peers =
        peers.map_err(|_| error(StatusCode::UNPROCESSABLE_ENTITY, "peers must be a network such as \"10.0.0.0/8\""))?;
    let now = Millis::now();
    let id = ExecutionId::new(&unique_id::new().simple().to_string());
    let random = files::random::<{ token::RANDOM }>();
    let random = random.map_err(|_| error(StatusCode::INTERNAL_SERVER_ERROR, "no random numbers are available"))?;
    let token = token::write(&id, &random);
    let expires_at = Some(now.plus(Duration::from_secs(seconds)));
    let execution = Execution {
        id: id.clone(),
        task: name,
        created_at: now,
        expires_at,
        token: Some(TokenHash::of(token.as_bytes())),
        peers,
        is_static: false,
    };
    services.ledger.start(execution, now).await.map_err(ledger_error)?;
    let scheme = if services.settings.proxy.tls.is_some() { "https" } else { "http" };
    let document = json!({
        "id": id.as_str(),
        "task": wanted.task,
        "token": *token,
        "proxy_url": authority.map(|authority| format!("{scheme}://{id}:{}@{authority}", *token)),
        "created_at": documents::timestamp(now),
        "expires_at": expires_at.map(documents::timestamp),
    });
    Ok((StatusCode::CREATED, document))
}

/// Restarts the execution of a task's static token, which clears its counts and starts it again if it was stopped.
async fn restart_static(services: &Services, wanted: &StartRequest, name: &TaskName) -> Result<Reply, Reply> {
    if wanted.expires_in_s.is_some() || wanted.peers.is_some() {
        return Err(error(StatusCode::UNPROCESSABLE_ENTITY, "a static execution takes neither expires_in_s nor peers"));
    }
    // The log's finds of this millisecond are those of before, and must not be restored from it.
    let execution = Execution::of_static(name, Millis::now().plus(Duration::from_millis(1)));
    let id = execution.id.clone();
    services.ledger.restart(execution).await.map_err(ledger_error)?;
    services.finds.forget(&id);
    services.throttle.restarted(&id);
    show(services, &id).await.map(|(_, document)| (StatusCode::CREATED, document))
}

/// Returns the proxy's host and port for sandboxes. For a listener on all addresses, the host is taken from the Host
/// field of the operator's request. Returns `None` if there is no TCP listener, or no such host.
fn authority(services: &Services, headers: &HeaderMap) -> Option<String> {
    let address = {
        let mut http =
            services.listeners.iter().filter(|listener| listener.mode == ListenerMode::Proxy && listener.is_direct);
        http.find_map(|listener| listener.at.tcp())?
    };
    if !address.ip().is_unspecified() {
        return Some(address.to_string());
    }
    let host = headers.get(HOST)?.to_str().ok()?.parse::<http::uri::Authority>().ok()?;
    Some(format!("{}:{}", host.host(), address.port()))
}

async fn list(services: &Services, query: Option<&str>) -> Result<Reply, Reply> {
    let task = only_parameter(query, "task")?;
    let mut known = services.ledger.list().await.map_err(ledger_error)?;
    known.retain(|state| task.as_ref().is_none_or(|task| state.execution.task.as_str() == task));
    known.sort_by(|a, b| (a.execution.created_at, &a.execution.id).cmp(&(b.execution.created_at, &b.execution.id)));
    Ok((StatusCode::OK, known.iter().map(|state| documents::execution(services, state)).collect()))
}

async fn show(services: &Services, id: &ExecutionId) -> Result<Reply, Reply> {
    let state = services.ledger.state(id).await.map_err(ledger_error)?.ok_or_else(unknown)?;
    Ok((StatusCode::OK, documents::execution(services, &state)))
}

async fn stop(services: &Services, id: &ExecutionId) -> Result<Reply, Reply> {
    if !services.ledger.stop(id, StopReason::Asked, Millis::now()).await.map_err(ledger_error)? {
        return Err(unknown());
    }
    // Exchanges of the execution that are in progress end.
    services.finds.stop(id);
    show(services, id).await
}

async fn tool_calls(services: &Services, id: &ExecutionId) -> Result<Reply, Reply> {
    if services.ledger.find(id).await.map_err(ledger_error)?.is_none() {
        return Err(unknown());
    }
    let calls = services.ledger.tool_calls(id).await.map_err(ledger_error)?;
    Ok((StatusCode::OK, json!(calls)))
}

fn unknown() -> Reply {
    error(StatusCode::NOT_FOUND, "the execution does not exist")
}

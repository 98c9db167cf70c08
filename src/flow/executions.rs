//! Executions over the admin listener: begun, shown, stopped.

use std::str::FromStr;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::HOST;
use http::{HeaderMap, Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use ipnet::IpNet;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use uuid::Uuid;

use super::Services;
use crate::files;
use crate::ledger::{Counter, Execution, LedgerError, Millis, Standing, Stop, Stopped};
use crate::model::name::{ExecutionId, TaskName};
use crate::model::secret::TokenHash;
use crate::model::token;
use crate::model::tool::{Kind, Tool};
use crate::policy::plan::Calls;
use crate::policy::settings::ListenAt;

/// For the body of a POST.
const PATIENCE: Duration = Duration::from_secs(10);
/// Bytes of a body.
const MAX_BODY: usize = 64 * 1024;
/// How long an execution lasts whose beginning does not say.
const DAY: u64 = 24 * 3600;
/// The longest that one may last.
const YEAR: u64 = 365 * DAY;

/// What is answered: a status and a document.
pub(super) type Said = (StatusCode, Value);

/// What a POST asks for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    task: String,
    /// In seconds.
    expires_in_s: Option<u64>,
    peers: Option<String>,
    #[serde(default)]
    r#static: bool,
}

/// True for paths that are answered here.
pub(super) fn owns(path: &str) -> bool {
    path == "/v1/executions" || path.starts_with("/v1/executions/")
}

/// Answers a request of the operator, who has shown the token.
pub(super) async fn answer(services: &Arc<Services>, request: Request<Incoming>) -> Said {
    let path = request.uri().path().to_owned();
    let named: Vec<&str> = path.strip_prefix("/v1/executions").unwrap_or_default().split('/').skip(1).collect();
    let done = match (request.method(), named.as_slice()) {
        (&Method::GET, []) => list(services, request.uri().query()).await,
        (&Method::POST, []) => start(services, request).await,
        (&Method::GET, [id]) => show(services, &ExecutionId::new(id)).await,
        (&Method::DELETE, [id]) => stop(services, &ExecutionId::new(id)).await,
        (&Method::GET, [id, "tool_calls"]) => tool_calls(services, &ExecutionId::new(id)).await,
        _ => Err(said(StatusCode::NOT_FOUND, "no such page")),
    };
    done.unwrap_or_else(|why| why)
}

/// Begins an execution and tells its token, once.
async fn start(services: &Arc<Services>, request: Request<Incoming>) -> Result<Said, Said> {
    let authority = authority(services, request.headers());
    let wanted: Wanted = read(request).await?;
    let name = TaskName::new(&wanted.task);
    if services.policies.snapshot().task(&name).is_none() {
        return Err(said(StatusCode::UNPROCESSABLE_ENTITY, "there is no such task"));
    }
    if wanted.r#static {
        return begin_anew(services, &wanted, &name).await;
    }
    let seconds = wanted.expires_in_s.unwrap_or(DAY);
    if !(1..=YEAR).contains(&seconds) {
        return Err(said(StatusCode::UNPROCESSABLE_ENTITY, "expires_in_s: 1 to 31536000"));
    }
    let network = |text: &String| IpNet::from_str(text).map(|network| network.trunc());
    let peers = wanted.peers.as_ref().map(network).transpose();
    let peers = peers.map_err(|_| said(StatusCode::UNPROCESSABLE_ENTITY, "peers: a network such as \"10.0.0.0/8\""))?;
    let now = Millis::now();
    let id = ExecutionId::new(&Uuid::now_v7().simple().to_string());
    let random = files::random::<{ token::RANDOM }>();
    let random = random.map_err(|_| said(StatusCode::INTERNAL_SERVER_ERROR, "there is no randomness"))?;
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
    services.ledger.start(execution, now).await.map_err(failed)?;
    let scheme = if services.settings.proxy.tls.is_some() { "https" } else { "http" };
    let document = json!({
        "id": id.as_str(),
        "task": wanted.task,
        "token": *token,
        "proxy_url": authority.map(|authority| format!("{scheme}://{id}:{}@{authority}", *token)),
        "created_at": written(now),
        "expires_at": expires_at.map(written),
    });
    Ok((StatusCode::CREATED, document))
}

/// The execution of a task's static token: nothing counted, and not stopped.
async fn begin_anew(services: &Services, wanted: &Wanted, name: &TaskName) -> Result<Said, Said> {
    if wanted.expires_in_s.is_some() || wanted.peers.is_some() {
        return Err(said(StatusCode::UNPROCESSABLE_ENTITY, "a static execution has no expires_in_s and no peers"));
    }
    let execution = Execution::of_static(name, Millis::now());
    let id = execution.id.clone();
    services.ledger.restart(execution).await.map_err(failed)?;
    services.finds.forget(&id);
    services.throttle.begun(&id);
    show(services, &id).await.map(|(_, document)| (StatusCode::CREATED, document))
}

/// The document that a request brings.
pub(super) async fn read<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Said> {
    let body = Limited::new(request.into_body(), MAX_BODY).collect();
    let body = match tokio::time::timeout(PATIENCE, body).await {
        Ok(Ok(body)) => body.to_bytes(),
        Ok(Err(_)) => return Err(said(StatusCode::PAYLOAD_TOO_LARGE, "64 KiB at most, and the body has to be whole")),
        Err(_) => return Err(said(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    };
    serde_json::from_slice(&body).map_err(|error| said(StatusCode::BAD_REQUEST, &error.to_string()))
}

/// Where sandboxes reach the proxy, as far as can be told: a listener on all addresses is where the operator has
/// reached us.
fn authority(services: &Services, headers: &HeaderMap) -> Option<String> {
    let address = services.listeners.iter().find_map(ListenAt::tcp)?;
    if !address.ip().is_unspecified() {
        return Some(address.to_string());
    }
    let host = headers.get(HOST)?.to_str().ok()?.parse::<http::uri::Authority>().ok()?;
    Some(format!("{}:{}", host.host(), address.port()))
}

async fn list(services: &Services, query: Option<&str>) -> Result<Said, Said> {
    let task = query.and_then(|query| query.strip_prefix("task="));
    let mut known = services.ledger.list().await.map_err(failed)?;
    known.retain(|standing| task.is_none_or(|task| standing.execution.task.as_str() == task));
    known.sort_by(|a, b| (a.execution.created_at, &a.execution.id).cmp(&(b.execution.created_at, &b.execution.id)));
    Ok((StatusCode::OK, known.iter().map(|standing| shown(services, standing)).collect()))
}

async fn show(services: &Services, id: &ExecutionId) -> Result<Said, Said> {
    let standing = services.ledger.standing(id).await.map_err(failed)?.ok_or_else(unknown)?;
    Ok((StatusCode::OK, shown(services, &standing)))
}

async fn stop(services: &Services, id: &ExecutionId) -> Result<Said, Said> {
    if !services.ledger.stop(id, Stop::Asked, Millis::now()).await.map_err(failed)? {
        return Err(unknown());
    }
    // What of it is under way ends.
    services.finds.stop(id);
    show(services, id).await
}

async fn tool_calls(services: &Services, id: &ExecutionId) -> Result<Said, Said> {
    if services.ledger.find(id).await.map_err(failed)?.is_none() {
        return Err(unknown());
    }
    let calls = services.ledger.tool_calls(id).await.map_err(failed)?;
    Ok((StatusCode::OK, json!(calls)))
}

/// An execution as its operator and, without its siblings, its caller may see it.
pub(super) fn shown(services: &Services, standing: &Standing) -> Value {
    let Standing { execution, stopped, tool, raw, finds, half_credits } = standing;
    let now = Millis::now();
    let policy = services.policies.snapshot();
    let task = policy.task(&execution.task);
    let limits = |kind| {
        let limits = task.map(|task| task.limits(kind));
        let calls = limits.map(|limits| limits.calls).unwrap_or_default();
        let Calls { per_execution, per_minute } = calls;
        json!({ "calls_per_execution": per_execution, "calls_per_minute": per_minute })
    };
    let mut document = counted(tool, now);
    let mut put = |key: &str, value: Value| drop(document.insert(key.to_owned(), value));
    put("id", execution.id.as_str().into());
    put("task", execution.task.as_str().into());
    put("created_at", written(execution.created_at).into());
    put("expires_at", execution.expires_at.map(written).into());
    put("peers", execution.peers.map(|peers| peers.to_string()).into());
    put("stopped", why(*stopped, execution, now).into());
    put("stopped_at", standing.ended_at(now).map(written).into());
    put("finds", (*finds).into());
    put("credits", credits(*half_credits));
    put("limits", limits(Kind::Tool(Tool::HttpRequest)));
    let mut raw = counted(raw, now);
    raw.insert("limits".to_owned(), limits(Kind::Raw));
    put("raw", raw.into());
    document.into()
}

/// Calls of one kind.
fn counted(counter: &Counter, now: Millis) -> serde_json::Map<String, Value> {
    let window = counter.window_at(now);
    let values = [
        ("calls", json!(counter.calls)),
        ("calls_in_window", json!(window.map_or(0, |window| window.calls))),
        ("window_started_at", json!(window.map(|window| written(window.started_at)))),
    ];
    values.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn why(stopped: Option<Stopped>, execution: &Execution, now: Millis) -> Option<&'static str> {
    match stopped.map(|stopped| stopped.why) {
        Some(Stop::Asked) => Some("asked"),
        Some(Stop::Finds) => Some("finds"),
        Some(Stop::Expired) => Some("expired"),
        None => execution.expires_at.filter(|end| *end <= now).map(|_| "expired"),
    }
}

/// Halves are exact in binary.
#[expect(clippy::cast_precision_loss, reason = "below 2^53 nothing is lost, and nobody makes so many calls")]
fn credits(half_credits: u64) -> Value {
    json!(half_credits as f64 / 2.0)
}

/// RFC 3339, UTC.
pub(super) fn written(at: Millis) -> String {
    let time = SystemTime::UNIX_EPOCH.checked_add(Duration::from_millis(at.0));
    time.and_then(|time| OffsetDateTime::from(time).format(&Rfc3339).ok()).unwrap_or_default()
}

fn unknown() -> Said {
    said(StatusCode::NOT_FOUND, "there is no such execution")
}

pub(super) fn failed(error: LedgerError) -> Said {
    let status = match error {
        LedgerError::Exists => StatusCode::CONFLICT,
        LedgerError::Full | LedgerError::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        LedgerError::Unknown => StatusCode::NOT_FOUND,
    };
    said(status, &error.to_string())
}

pub(super) fn said(status: StatusCode, why: &str) -> Said {
    (status, json!({ "error": why }))
}

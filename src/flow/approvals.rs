//! Approvals over the admin listener: shown, decided. Nobody else decides: a sandbox cannot reach that listener, also
//! not through the proxy.

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::{Value, json};

use super::Services;
use super::executions::{Said, failed, read, said, written};
use crate::audit::record;
use crate::ledger::{Approval, Decided, Decision, Millis, State};

/// What a POST asks for.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Wanted {
    decision: Word,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Word {
    Approve,
    Deny,
}

/// True for paths that are answered here.
pub(super) fn owns(path: &str) -> bool {
    path == "/v1/approvals" || path.starts_with("/v1/approvals/")
}

/// Answers a request of the operator, who has shown the token.
pub(super) async fn answer(services: &Services, request: Request<Incoming>) -> Said {
    let path = request.uri().path().to_owned();
    let named: Vec<&str> = path.strip_prefix("/v1/approvals").unwrap_or_default().split('/').skip(1).collect();
    let done = match (request.method(), named.as_slice()) {
        (&Method::GET, []) => list(services, request.uri().query()).await,
        (&Method::GET, [id]) => show(services, id).await,
        (&Method::POST, [id]) => decide(services, id, request).await,
        _ => Err(said(StatusCode::NOT_FOUND, "no such page")),
    };
    done.unwrap_or_else(|why| why)
}

/// All of them, oldest first, or those of one state.
async fn list(services: &Services, query: Option<&str>) -> Result<Said, Said> {
    let state = query.map(state).transpose()?;
    let now = Millis::now();
    let known = services.ledger.approvals(now).await.map_err(failed)?;
    let meant = known.iter().filter(|known| state.is_none_or(|state| known.state_at(now) == state));
    Ok((StatusCode::OK, meant.map(|known| shown(known, now)).collect()))
}

fn state(query: &str) -> Result<State, Said> {
    let state = query.strip_prefix("state=").and_then(|name| serde_json::from_value(name.into()).ok());
    let known = "state= and one of pending, approved, denied, used, expired";
    state.ok_or_else(|| said(StatusCode::UNPROCESSABLE_ENTITY, known))
}

async fn show(services: &Services, id: &str) -> Result<Said, Said> {
    let now = Millis::now();
    let known = services.ledger.approval(id, now).await.map_err(failed)?.ok_or_else(unknown)?;
    Ok((StatusCode::OK, shown(&known, now)))
}

async fn decide(services: &Services, id: &str, request: Request<Incoming>) -> Result<Said, Said> {
    let Wanted { decision } = read(request).await?;
    let decision = match decision {
        Word::Approve => Decision::Approve,
        Word::Deny => Decision::Deny,
    };
    match services.ledger.decide(id, decision, Millis::now()).await.map_err(failed)? {
        Decided::Done => {
            note(services, id, decision).await?;
            show(services, id).await
        }
        Decided::AlreadyDecided(state) => Err(too_late("it has been decided", state)),
        Decided::Expired => Err(too_late("it has expired", State::Expired)),
        Decided::Unknown => Err(unknown()),
    }
}

/// Who reads the log must see why a request was let through.
async fn note(services: &Services, id: &str, decision: Decision) -> Result<(), Said> {
    let known = services.ledger.approval(id, Millis::now()).await.map_err(failed)?.ok_or_else(unknown)?;
    let decision = match decision {
        Decision::Approve => "approve",
        Decision::Deny => "deny",
    };
    let (execution, task) = (known.execution.as_str(), known.task.as_str());
    let (method, url, tool) = (&*known.method, &*known.url, known.tool.as_deref());
    let line = record::Decision { approval: &known.id, decision, execution, task, tool, method, url };
    line.write(&services.audit)
        .await
        .map_err(|_| said(StatusCode::SERVICE_UNAVAILABLE, "it has been decided, and the audit log cannot be written"))
}

/// An approval as its operator and its caller may see it: without the digest.
pub(super) fn shown(approval: &Approval, now: Millis) -> Value {
    json!({
        "id": approval.id,
        "execution": approval.execution.as_str(),
        "task": approval.task.as_str(),
        "tool": approval.tool,
        "method": approval.method,
        "url": approval.url,
        "created_at": written(approval.created_at),
        "expires_at": written(approval.expires_at),
        "state": approval.state_at(now),
    })
}

fn too_late(why: &str, state: State) -> Said {
    (StatusCode::CONFLICT, json!({ "error": why, "state": state }))
}

fn unknown() -> Said {
    said(StatusCode::NOT_FOUND, "there is no such approval")
}

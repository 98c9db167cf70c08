//! Approvals in the admin API: listed and decided. A sandbox cannot reach the admin listener, not even through the
//! proxy.

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::json;

use super::reply::{Reply, error, ledger_error, read_json};
use crate::audit::record;
use crate::flow::{Services, documents};
use crate::ledger::{ApprovalState, Decision, DecisionResult, Millis};

/// The body of a POST.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DecisionRequest {
    decision: RequestedDecision,
}

#[derive(Clone, Copy, Deserialize)]
#[serde(rename_all = "lowercase")]
enum RequestedDecision {
    Approve,
    Deny,
}

/// True for paths that are answered here.
pub(crate) fn owns(path: &str) -> bool {
    path == "/v1/approvals" || path.starts_with("/v1/approvals/")
}

/// Answers a request of the operator, who has shown the token.
pub(crate) async fn answer(services: &Services, request: Request<Incoming>) -> Reply {
    let path = request.uri().path().to_owned();
    let named: Vec<&str> = path.strip_prefix("/v1/approvals").unwrap_or_default().split('/').skip(1).collect();
    let done = match (request.method(), named.as_slice()) {
        (&Method::GET, []) => list(services, request.uri().query()).await,
        (&Method::GET, [id]) => show(services, id).await,
        (&Method::POST, [id]) => decide(services, id, request).await,
        _ => Err(error(StatusCode::NOT_FOUND, "no such page")),
    };
    done.unwrap_or_else(|why| why)
}

/// All of them, oldest first, or those of one state.
async fn list(services: &Services, query: Option<&str>) -> Result<Reply, Reply> {
    let state = query.map(state).transpose()?;
    let now = Millis::now();
    let known = services.ledger.approvals(now).await.map_err(ledger_error)?;
    let meant = known.iter().filter(|known| state.is_none_or(|state| known.state_at(now) == state));
    Ok((StatusCode::OK, meant.map(|known| documents::approval(known, now)).collect()))
}

fn state(query: &str) -> Result<ApprovalState, Reply> {
    let state = query.strip_prefix("state=").and_then(|name| serde_json::from_value(name.into()).ok());
    let known = "state= and one of pending, approved, denied, used, expired";
    state.ok_or_else(|| error(StatusCode::UNPROCESSABLE_ENTITY, known))
}

async fn show(services: &Services, id: &str) -> Result<Reply, Reply> {
    let now = Millis::now();
    let known = services.ledger.approval(id, now).await.map_err(ledger_error)?.ok_or_else(unknown)?;
    Ok((StatusCode::OK, documents::approval(&known, now)))
}

async fn decide(services: &Services, id: &str, request: Request<Incoming>) -> Result<Reply, Reply> {
    let DecisionRequest { decision } = read_json(request).await?;
    let decision = match decision {
        RequestedDecision::Approve => Decision::Approve,
        RequestedDecision::Deny => Decision::Deny,
    };
    match services.ledger.decide(id, decision, Millis::now()).await.map_err(ledger_error)? {
        DecisionResult::Done => {
            note(services, id, decision).await?;
            show(services, id).await
        }
        DecisionResult::AlreadyDecided(state) => Err(too_late("it has been decided", state)),
        DecisionResult::Expired => Err(too_late("it has expired", ApprovalState::Expired)),
        DecisionResult::Unknown => Err(unknown()),
    }
}

/// The reader of the log must see why a request was allowed.
async fn note(services: &Services, id: &str, decision: Decision) -> Result<(), Reply> {
    let known = services.ledger.approval(id, Millis::now()).await.map_err(ledger_error)?.ok_or_else(unknown)?;
    let decision = match decision {
        Decision::Approve => "approve",
        Decision::Deny => "deny",
    };
    let (execution, task) = (known.execution.as_str(), known.task.as_str());
    let (method, url, tool) = (&*known.method, &*known.url, known.tool.as_deref());
    let line = record::Decision { approval: &known.id, decision, execution, task, tool, method, url };
    line.write(&services.audit)
        .await
        .map_err(|_| error(StatusCode::SERVICE_UNAVAILABLE, "it has been decided, and the audit log cannot be written"))
}

fn too_late(why: &str, state: ApprovalState) -> Reply {
    (StatusCode::CONFLICT, json!({ "error": why, "state": state }))
}

fn unknown() -> Reply {
    error(StatusCode::NOT_FOUND, "the approval does not exist")
}

//! Approvals in the admin API: listed and decided. Sandboxes cannot reach the admin listener, not even through the
//! proxy.

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::json;

use super::reply::{Reply, error, ledger_error, only_parameter, read_json};
use crate::audit::decision::RecordedDecision;
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

/// Returns true for paths of this module.
pub(crate) fn owns(path: &str) -> bool {
    path == "/v1/approvals" || path.starts_with("/v1/approvals/")
}

/// Answers an authorized request.
pub(crate) async fn answer(services: &Services, request: Request<Incoming>) -> Reply {
    let path = request.uri().path().to_owned();
    let segments: Vec<&str> = path.strip_prefix("/v1/approvals").unwrap_or_default().split('/').skip(1).collect();
    let result = match (request.method(), segments.as_slice()) {
        (&Method::GET, []) => list(services, request.uri().query()).await,
        (&Method::GET, [id]) => show(services, id).await,
        (&Method::POST, [id]) => decide(services, id, request).await,
        _ => Err(error(StatusCode::NOT_FOUND, "no such page")),
    };
    result.unwrap_or_else(|reply| reply)
}

/// Returns all approvals, or those in one state, oldest first.
async fn list(services: &Services, query: Option<&str>) -> Result<Reply, Reply> {
    let state = only_parameter(query, "state")?.map(state).transpose()?;
    let now = Millis::now();
    let known = services.ledger.approvals(now).await.map_err(ledger_error)?;
    let selected = known.iter().filter(|known| state.is_none_or(|state| known.state_at(now) == state));
    Ok((StatusCode::OK, selected.map(|known| documents::approval(known, now)).collect()))
}

fn state(name: String) -> Result<ApprovalState, Reply> {
    let expected = "state must be one of pending, approved, denied, used, expired";
    serde_json::from_value(name.into()).map_err(|_| error(StatusCode::UNPROCESSABLE_ENTITY, expected))
}

async fn show(services: &Services, id: &str) -> Result<Reply, Reply> {
    let now = Millis::now();
    let known = services.ledger.approval(id, now).await.map_err(ledger_error)?.ok_or_else(unknown)?;
    let mut document = documents::approval(&known, now);
    if let Some(fields) = document.as_object_mut() {
        fields.insert("bound".to_owned(), json!(services.pending_approvals.facts.of(id)));
    }
    Ok((StatusCode::OK, document))
}

async fn decide(services: &Services, id: &str, request: Request<Incoming>) -> Result<Reply, Reply> {
    let DecisionRequest { decision } = read_json(request).await?;
    let decision = match decision {
        RequestedDecision::Approve => Decision::Approve,
        RequestedDecision::Deny => Decision::Deny,
    };
    match services.ledger.decide(id, decision, Millis::now()).await.map_err(ledger_error)? {
        DecisionResult::Done => {
            record_decision(services, id, decision).await?;
            show(services, id).await
        }
        DecisionResult::AlreadyDecided(state) => Err(conflict("it has been decided", state)),
        DecisionResult::Expired => Err(conflict("it has expired", ApprovalState::Expired)),
        DecisionResult::Unknown => Err(unknown()),
    }
}

/// Writes a decision to the audit log, which shows why a request was allowed.
async fn record_decision(services: &Services, id: &str, decision: Decision) -> Result<(), Reply> {
    let known = services.ledger.approval(id, Millis::now()).await.map_err(ledger_error)?.ok_or_else(unknown)?;
    let decision = match decision {
        Decision::Approve => "approve",
        Decision::Deny => "deny",
    };
    let (execution, task) = (known.execution.as_str(), known.task.as_str());
    let (method, url, tool) = (&*known.method, &*known.url, known.tool.as_deref());
    let line = RecordedDecision { approval: &known.id, decision, execution, task, tool, method, url };
    line.write(&services.audit).await.map_err(|_| {
        error(StatusCode::SERVICE_UNAVAILABLE, "the decision is stored, but the audit log cannot be written")
    })
}

fn conflict(why: &str, state: ApprovalState) -> Reply {
    (StatusCode::CONFLICT, json!({ "error": why, "state": state }))
}

fn unknown() -> Reply {
    error(StatusCode::NOT_FOUND, "the approval does not exist")
}

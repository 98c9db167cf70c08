//! `exeat approvals`, `approve` and `deny`: lists and decides the requests that need an approval.

use std::path::Path;

use serde_json::{Value, json};

use super::admin_client::{self, AdminRequest};
use super::terminal::{print, say, table};
use super::{Exit, execution};

pub(super) fn list(config: Option<&Path>, admin: Option<&str>, json: bool) -> Exit {
    admin_client::send(config, admin, &AdminRequest::get("/v1/approvals"), |answer| {
        if json {
            admin_client::print_json(answer);
            return Some(());
        }
        let approvals = answer.as_array()?;
        if approvals.is_empty() {
            say("no pending approvals");
            return Some(());
        }
        let head = ["ID", "STATE", "CREATED (UTC)", "EXPIRES (UTC)", "TASK", "EXECUTION", "TOOL", "REQUEST"];
        print(table(&head, approvals.iter().map(row)));
        Some(())
    })
}

/// Approves or denies a request. The decision is final.
pub(super) fn decide(config: Option<&Path>, admin: Option<&str>, id: &str, decision: &str) -> Exit {
    if let Err(exit) = execution::check_id(id) {
        return exit;
    }
    let path = format!("/v1/approvals/{id}");
    admin_client::send(config, admin, &AdminRequest::post(&path, json!({ "decision": decision })), |answer| {
        let or = |key| execution::text(answer, key).unwrap_or_else(|| "-".to_owned());
        let state = execution::text(answer, "state")?;
        say(format_args!("{id} is {state}: {} {}, task {}", or("method"), or("url"), or("task")));
        Some(())
    })
}

fn row(approval: &Value) -> Vec<String> {
    let text = |key| execution::text(approval, key).unwrap_or_else(|| "-".to_owned());
    let time = |key: &str| execution::to_minute(approval.get(key));
    let request = format!("{} {}", text("method"), text("url"));
    let (created, expires) = (time("created_at"), time("expires_at"));
    vec![text("id"), text("state"), created, expires, text("task"), text("execution"), text("tool"), request]
}

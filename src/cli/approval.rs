//! `exeat approvals`, `approve` and `deny`: lists and decides the requests that need an approval.

use std::path::Path;

use serde_json::{Value, json};

use super::admin_client::{self, AdminRequest};
use super::terminal::{clean, print, say, table};
use super::{Exit, execution};
use crate::model::shell_command::SHELL_TOOL;

/// The length of a code.
const MIN_CODE: usize = 8;
/// The columns of a row behind its beginning.
const ROW: usize = 66;

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

/// Prints an approval with all that it is bound to.
pub(super) fn show(config: Option<&Path>, admin: Option<&str>, id: &str, json: bool) -> Exit {
    if let Err(exit) = execution::check_id(id) {
        return exit;
    }
    admin_client::send(config, admin, &AdminRequest::get(&format!("/v1/approvals/{id}")), |answer| {
        if json {
            admin_client::print_json(answer);
        } else {
            print(whole(answer)?);
        }
        Some(())
    })
}

/// Approves a request. `code` is that of the facts that were read, and whether they may be incomplete. Without it, no command is
/// approved: the list does not show it.
pub(super) fn approve(config: Option<&Path>, admin: Option<&str>, id: &str, code: Option<(&str, bool)>) -> Exit {
    if let Err(exit) = execution::check_id(id) {
        return exit;
    }
    let mut why_not = None;
    let shown = admin_client::send(config, admin, &AdminRequest::get(&format!("/v1/approvals/{id}")), |answer| {
        answer.get("state")?.as_str()?;
        why_not = why_not_approved(answer, id, code);
        Some(())
    });
    match (shown, why_not) {
        (Exit::Done, None) => decide(config, admin, id, "approve"),
        (Exit::Done, Some(why)) => {
            say(format_args!("exeat: not approved: {why}"));
            Exit::Failed
        }
        (exit, _) => exit,
    }
}

fn why_not_approved(approval: &Value, id: &str, code: Option<(&str, bool)>) -> Option<String> {
    let Some((code, may_be_incomplete)) = code else {
        let why = format!("it is a command; read it with exeat approvals {id}, which shows the code for --code");
        return is_command(approval).then_some(why);
    };
    let Some(known) = approval.pointer("/bound/code").and_then(Value::as_str) else {
        return Some("what it is bound to is not known here; the client has to ask again".to_owned());
    };
    if code != known || known.len() < MIN_CODE {
        return Some(format!("the code is another one; see exeat approvals {id}"));
    }
    let is_shown = is_complete(approval.get("bound")?) || may_be_incomplete;
    (!is_shown).then(|| "not all of it is shown; deny it, or add --incomplete".to_owned())
}

fn is_command(approval: &Value) -> bool {
    approval.get("tool").and_then(Value::as_str) == Some(SHELL_TOOL)
}

fn is_complete(bound: &Value) -> bool {
    bound.get("is_complete") == Some(&Value::Bool(true))
}

/// Returns an approval as a text: first the body or the command, which may be long, and then all else. No row is wider than a terminal,
/// and each tells by its beginning what it is part of, so that no text of the client is taken for something else.
fn whole(approval: &Value) -> Option<String> {
    let mut text = String::new();
    let bound = approval.get("bound").filter(|bound| bound.is_object());
    let shown = bound.and_then(|bound| bound.pointer("/body/text")).and_then(Value::as_str).unwrap_or_default();
    for (at, line) in shown.split('\n').enumerate().filter(|_| !shown.is_empty()) {
        let line = line.split('\t').map(clean).collect::<Vec<_>>().join("    ");
        text.push_str(&rows(&format!("{:>10} | ", at.saturating_add(1)), "           : ", &line));
    }
    let mut row = |name: &str, value: &str| text.push_str(&rows(&format!("{name:<11}= "), "           : ", value));
    let or = |key: &str| execution::text(approval, key).unwrap_or_else(|| "-".to_owned());
    row("id", &or("id"));
    let expires = execution::to_minute(approval.get("expires_at"));
    row("state", &format!("{}, until {expires} (UTC)", execution::text(approval, "state")?));
    row("task", &format!("{}, execution {}", or("task"), or("execution")));
    row("tool", &or("tool"));
    row("request", &format!("{} {}", or("method"), or("url")));
    let Some(bound) = bound else {
        row("bound to", "not known here: the client has to ask again, or another proxy was asked");
        return Some(text);
    };
    let list = |key: &str| bound.get(key).and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    if let Some(query) = execution::text(bound, "query") {
        row("query", &query);
    }
    for credential in list("credentials") {
        let places = credential.get("places").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
        let places: Vec<String> = places.iter().filter_map(Value::as_str).map(clean).collect();
        let name = execution::text(credential, "name").unwrap_or_default();
        row("credential", &format!("{name} in {}", places.join(", ")));
    }
    for (name, key) in [("field", "fields"), ("trailer", "trailers")] {
        for field in list(key) {
            let part = |at: usize| clean(field.get(at).and_then(Value::as_str).unwrap_or_default());
            row(name, &format!("{}: {}", part(0), part(1)));
        }
    }
    let body = bound.get("body")?;
    let lines = if shown.is_empty() { 0 } else { shown.split('\n').count() };
    let (bytes, sha256) = (body.get("bytes")?.as_u64()?, execution::text(body, "sha256").unwrap_or_default());
    let name = if is_command(approval) { "command" } else { "body" };
    let ending = if lines == 1 { "" } else { "s" };
    row(name, &format!("{lines} line{ending} above, {bytes} bytes, sha256 {sha256}"));
    let all = if is_complete(bound) {
        "all of it"
    } else {
        "NOT ALL: a part is masked, hashed, too long, invisible or not text"
    };
    row("shown", all);
    row("code", &execution::text(bound, "code")?);
    Some(text)
}

/// Breaks a text into rows that are no wider than a terminal. Characters that are not ASCII may take two columns.
fn rows(first: &str, next: &str, text: &str) -> String {
    let (mut rows, mut left) = (first.to_owned(), ROW);
    for c in text.chars() {
        let width = if c.is_ascii() { 1 } else { 2 };
        if left < width {
            rows.push('\n');
            rows.push_str(next);
            left = ROW;
        }
        rows.push(c);
        left = left.saturating_sub(width);
    }
    rows.push('\n');
    rows
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_narrow_and_marked() {
        assert_eq!(rows("a = ", "  : ", ""), "a = \n");
        let text = rows("         1 | ", "           : ", &format!("true #{}digest = x", " ".repeat(100)));
        assert!(
            text.lines()
                .all(|row| row.len() < 80 && (row.starts_with("         1 | ") || row.starts_with("           : "))),
            "{text}"
        );
        let wide = rows("", ":", &"漢".repeat(100));
        assert!(wide.lines().all(|row| row.chars().count() <= 34), "{wide}");
        assert_eq!(wide.matches('漢').count(), 100);
    }
}

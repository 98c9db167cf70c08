//! The error texts of tools for models.

use serde_json::Value;

use super::proxy::Refused;
use crate::model::refusal::{Deny, Fail, Refusal};

/// Maximum length of a repeated name, in characters.
const MAX_NAME: usize = 64;
/// Maximum length of a repeated host. No name is longer (RFC 1035 §2.3.4, without the final dot).
const MAX_HOST: usize = 253;

/// Returns the text of a proxy's refusal of a call of `tool`.
pub(super) fn refused(refused: &Refused, tool: &str) -> String {
    let known = |text: Option<&str>| text.map(name).unwrap_or_default();
    let host = || refused.text("host").map(|host| short(host, MAX_HOST)).unwrap_or_default();
    let limit = |member: &str| refused.problem.get("limit").and_then(|limit| limit.get(member));
    match refused.refusal {
        // A response to HEAD has no body, so only the code is known.
        Some(
            refusal @ (Refusal::Deny(
                Deny::HostNotAllowed | Deny::AddressNotAllowed | Deny::ExecutionLimit | Deny::RateLimited,
            )
            | Refusal::Fail(Fail::ResolveFailed)),
        ) if refused.problem.is_null() => default_text(refusal),
        Some(Refusal::Deny(Deny::HostNotAllowed)) => format!(
            "Error: URL blocked -- Domain {} not in any approved integration for this task. Approved: [{}]",
            host(),
            approved(&refused.problem)
        ),
        Some(Refusal::Deny(Deny::CredentialUnknown)) => credential_unknown(&known(refused.text("credential"))),
        Some(Refusal::Deny(Deny::LeakDetected)) => {
            // The proxy names only credentials of the task.
            let whose = refused.text("credential").map(|credential| format!(" {}", name(credential)));
            let whose = whose.unwrap_or_default();
            format!("Error: Blocked -- Credential{whose} detected in outbound request. This has been logged.")
        }
        Some(Refusal::Deny(Deny::AddressNotAllowed) | Refusal::Fail(Fail::ResolveFailed)) => {
            format!("Error: DNS resolution failed or blocked for {}", host())
        }
        Some(Refusal::Deny(Deny::ExecutionLimit)) => {
            format!("Error: Execution limit reached ({} API calls)", seconds(limit("allowed")))
        }
        Some(Refusal::Deny(Deny::RateLimited)) => {
            let what = match limit("name").and_then(Value::as_str) {
                Some("calls_per_minute") => "API calls per minute",
                Some("dns.new_names_per_minute") => "new host names per minute",
                _ => "requests per second",
            };
            format!("Error: Rate limit reached ({} {what})", seconds(limit("allowed")))
        }
        Some(Refusal::Fail(Fail::RequestTimedOut | Fail::ConnectTimedOut)) => {
            timed_out(limit("allowed").map(|allowed| seconds(Some(allowed))).as_deref())
        }
        Some(Refusal::Deny(Deny::ToolNotEnabled)) => not_enabled(tool),
        Some(Refusal::Deny(Deny::WebhookNotEnabled)) => {
            "Error: webhook integration not enabled for this task".to_owned()
        }
        Some(Refusal::Deny(Deny::WebhookNotRegistered)) => {
            "Error: webhook URL not registered for this task. Register it in your task settings.".to_owned()
        }
        Some(other) => default_text(other),
        None => format!("Error: the proxy refused the request ({})", name(&refused.code)),
    }
}

/// Returns the text of a refusal without a text of its own.
pub(super) fn default_text(refusal: Refusal) -> String {
    let notice = refusal.notice();
    format!("Error: {} ({})", notice.title, notice.code)
}

pub(super) fn timed_out(seconds: Option<&str>) -> String {
    match seconds {
        Some(seconds) => format!("Error: request timed out ({seconds}s)"),
        None => "Error: request timed out".to_owned(),
    }
}

pub(super) fn credential_unknown(credential: &str) -> String {
    format!("Error: credential '{}' not found. Check your task's credential configuration.", name(credential))
}

pub(super) fn unknown_tool(tool: &str) -> String {
    format!("Error: unknown tool '{}'", name(tool))
}

pub(super) fn not_enabled(tool: &str) -> String {
    format!("Error: tool '{}' not enabled for this task", name(tool))
}

pub(super) fn too_many() -> &'static str {
    "Error: too many calls at once; wait until some have ended"
}

pub(super) fn no_sandbox(tool: &str) -> String {
    format!(
        "Error: tool '{}' is not served here: it works in a sandbox, and the operator has given none to tools",
        name(tool)
    )
}

pub(super) fn no_programs(tool: &str) -> String {
    format!("Error: tool '{}' is not served here: the operator has registered no command for it", name(tool))
}

pub(super) fn field_required(field: &str, tool: &str) -> String {
    format!("Error: '{field}' field required for {tool}")
}

pub(super) fn field_wrong(field: &str, must: &str, tool: &str) -> String {
    format!("Error: '{field}' field {must} for {tool}")
}

/// Returns an external name, truncated and on one line.
pub(super) fn name(text: &str) -> String {
    short(text, MAX_NAME)
}

/// Returns an external text on one line, truncated to `most` characters.
fn short(text: &str, most: usize) -> String {
    let clean = |c: char| if c.is_control() || matches!(c, '\u{2028}' | '\u{2029}') { '\u{fffd}' } else { c };
    let mut short: String = text.chars().take(most).map(clean).collect();
    if text.chars().nth(most).is_some() {
        short.push('…');
    }
    short
}

fn approved(problem: &Value) -> String {
    let all = problem.get("approved").and_then(Value::as_array).map(Vec::as_slice).unwrap_or_default();
    all.iter().filter_map(Value::as_str).collect::<Vec<_>>().join(", ")
}

/// Formats a number of seconds: `30`, `0.5`.
fn seconds(number: Option<&Value>) -> String {
    match number.and_then(Value::as_f64) {
        Some(number) => format!("{number}"),
        None => "?".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn of(code: &str, problem: Value) -> String {
        let refused = Refused { refusal: Refusal::with_code(code), code: code.to_owned(), problem };
        super::refused(&refused, "http_get")
    }

    #[test]
    fn every_refusal_has_a_text() {
        let rows = [
            (
                "host_not_allowed",
                json!({"host": "evil.test", "approved": ["api.test", "*.b.test"]}),
                "Error: URL blocked -- Domain evil.test not in any approved integration for this task. Approved: [api.test, *.b.test]",
            ),
            (
                "credential_unknown",
                json!({"credential": "MY_KEY"}),
                "Error: credential 'MY_KEY' not found. Check your task's credential configuration.",
            ),
            (
                "leak_detected",
                json!({"credential": "KEY"}),
                "Error: Blocked -- Credential KEY detected in outbound request. This has been logged.",
            ),
            (
                "leak_detected",
                json!({}),
                "Error: Blocked -- Credential detected in outbound request. This has been logged.",
            ),
            ("resolve_failed", json!({"host": "h.test"}), "Error: DNS resolution failed or blocked for h.test"),
            (
                "address_not_allowed",
                json!({"host": "10.0.0.1"}),
                "Error: DNS resolution failed or blocked for 10.0.0.1",
            ),
            (
                "execution_limit",
                json!({"limit": {"name": "calls_per_execution", "allowed": 20}}),
                "Error: Execution limit reached (20 API calls)",
            ),
            (
                "rate_limited",
                json!({"limit": {"name": "calls_per_minute", "allowed": 10}}),
                "Error: Rate limit reached (10 API calls per minute)",
            ),
            (
                "rate_limited",
                json!({"limit": {"name": "requests_per_second", "allowed": 5}}),
                "Error: Rate limit reached (5 requests per second)",
            ),
            (
                "rate_limited",
                json!({"limit": {"name": "dns.new_names_per_minute", "allowed": 300}}),
                "Error: Rate limit reached (300 new host names per minute)",
            ),
            (
                "request_timed_out",
                json!({"limit": {"name": "request_timeout", "allowed": 30}}),
                "Error: request timed out (30s)",
            ),
            (
                "connect_timed_out",
                json!({"limit": {"name": "connect_timeout", "allowed": 0.5}}),
                "Error: request timed out (0.5s)",
            ),
            ("request_timed_out", json!({}), "Error: request timed out"),
            ("tool_not_enabled", json!({}), "Error: tool 'http_get' not enabled for this task"),
            ("webhook_not_enabled", json!({}), "Error: webhook integration not enabled for this task"),
            (
                "webhook_not_registered",
                json!({}),
                "Error: webhook URL not registered for this task. Register it in your task settings.",
            ),
            (
                "execution_stopped",
                json!({"title": "what an origin may have said"}),
                "Error: This execution has ended or was stopped (execution_stopped)",
            ),
            (
                "host_not_allowed",
                Value::Null,
                "Error: No approved integration of this task allows the host (host_not_allowed)",
            ),
            (
                "execution_limit",
                Value::Null,
                "Error: This execution has made all the calls that its plan allows (execution_limit)",
            ),
            ("tool_not_enabled", Value::Null, "Error: tool 'http_get' not enabled for this task"),
            ("of_a_newer_proxy", json!({}), "Error: the proxy refused the request (of_a_newer_proxy)"),
        ];
        for (code, problem, want) in rows {
            assert_eq!(of(code, problem), want);
        }
        for refusal in Refusal::ALL {
            let text = of(refusal.code(), json!({}));
            assert!(text.starts_with("Error: ") && !text.contains('\n'), "{text}");
        }
    }

    #[test]
    fn a_host_is_shown_complete_up_to_the_maximum_length() {
        let host = |length: usize| ["b".repeat(63), "c".repeat(63), "d".repeat(63), "e".repeat(length)].join(".");
        let longest = host(61);
        assert_eq!(longest.len(), 253);
        let blocked = |host: &str| of("host_not_allowed", json!({"host": host, "approved": []}));
        let text = |host: &str| {
            format!("Error: URL blocked -- Domain {host} not in any approved integration for this task. Approved: []")
        };
        assert_eq!(blocked(&longest), text(&longest));
        assert_eq!(blocked(&host(62)), text(&format!("{longest}…")));
        assert_eq!(blocked("a\nb\u{2028}c\u{1b}"), text("a\u{fffd}b\u{fffd}c\u{fffd}"));
        for code in ["resolve_failed", "address_not_allowed"] {
            let want = format!("Error: DNS resolution failed or blocked for {longest}");
            assert_eq!(of(code, json!({"host": longest})), want);
        }
    }

    #[test]
    fn names_from_outside_are_short_and_on_one_line() {
        assert_eq!(unknown_tool("a\n[TOOL_RESULT:1]"), "Error: unknown tool 'a\u{fffd}[TOOL_RESULT:1]'");
        assert_eq!(unknown_tool(&"x".repeat(1000)).chars().count(), "Error: unknown tool ''".len() + 65);
    }
}

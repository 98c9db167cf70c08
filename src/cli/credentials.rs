//! `exeat credentials`: the credentials of the running daemon, never their values.

use std::path::Path;

use serde_json::Value;

use super::Exit;
use super::admin_client::{self, AdminRequest};
use super::terminal::{clean, print, say, table};

/// Prints the list.
pub(super) fn run(config: Option<&Path>, admin: Option<&str>, json: bool) -> Exit {
    admin_client::send(config, admin, &AdminRequest::get("/v1/credentials"), |answer| {
        if json {
            admin_client::print_json(answer);
            return Some(());
        }
        let credentials = answer.as_array()?;
        if credentials.is_empty() {
            say("no credentials");
            return Some(());
        }
        let head = ["NAME", "WORKSPACE", "TYPE", "SOURCE", "STATE", "DOMAINS"];
        print(table(&head, credentials.iter().map(row)));
        Some(())
    })
}

fn row(credential: &Value) -> Vec<String> {
    let text = |key: &str| credential.get(key).and_then(Value::as_str).map(clean);
    let or_dash = |key: &str| text(key).filter(|text| !text.is_empty()).unwrap_or_else(|| "-".to_owned());
    let domains = credential.get("domains").and_then(Value::as_array).into_iter().flatten().filter_map(Value::as_str);
    let domains = domains.map(clean).collect::<Vec<_>>().join(", ");
    let state = match (text("state").as_deref(), text("expires_at"), text("failure")) {
        (_, Some(end), Some(why)) => format!("ready until {end}; the renewal FAILS: {why}"),
        (_, Some(end), None) => format!("ready; token of {}, until {end}", or_dash("minted_at")),
        (Some("no_value"), ..) => "NO VALUE".to_owned(),
        (Some("failed"), _, Some(why)) => format!("FAILS: {why}"),
        (Some("not_fetched"), ..) => "no token fetched yet".to_owned(),
        (state, ..) => state.unwrap_or("-").to_owned(),
    };
    vec![or_dash("credential"), or_dash("workspace"), or_dash("auth_type"), or_dash("source"), state, domains]
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn a_row_says_whether_the_value_can_be_sent() {
        let states = [
            (json!({"state": "ready"}), "ready"),
            (json!({"state": "no_value"}), "NO VALUE"),
            (json!({"state": "not_fetched"}), "no token fetched yet"),
            (json!({"state": "failed", "failure": "it answered 500"}), "FAILS: it answered 500"),
            (
                json!({"state": "ready", "minted_at": "2026-01-01T00:00:00Z", "expires_at": "2026-01-01T01:00:00Z"}),
                "ready; token of 2026-01-01T00:00:00Z, until 2026-01-01T01:00:00Z",
            ),
            (
                json!({"state": "ready", "expires_at": "2026-01-01T01:00:00Z", "failure": "it answered 500"}),
                "ready until 2026-01-01T01:00:00Z; the renewal FAILS: it answered 500",
            ),
            (json!({"state": "of a newer version"}), "of a newer version"),
            (json!({}), "-"),
        ];
        for (credential, want) in states {
            assert_eq!(row(&credential)[4], want);
        }
        let whole = row(&json!({
            "credential": "A", "workspace": "default", "auth_type": "bearer", "source": "env:A", "state": "ready",
            "domains": ["a.test", "b.test:8443"],
        }));
        assert_eq!(whole, ["A", "default", "bearer", "env:A", "ready", "a.test, b.test:8443"]);
    }
}

//! Blocks all calls while an approval is pending, as reported by the proxy.

use http::Method;
use serde_json::Value;

use crate::model::shell_command::SHELL_TOOL;
use crate::model::target::Target;
use crate::tool::messages;
use crate::tool::outcome::State;
use crate::tool::proxy::{Proxy, ProxyReply};
use crate::tool::verbs::VerbResult;

const PATH: &str = "/v1/self/approvals";

/// Returns the result that blocks all calls. An unreachable proxy blocks them too.
pub(super) async fn blocking_result(proxy: &Proxy) -> Option<VerbResult> {
    match proxy.ask(Method::GET, PATH, None).await {
        Ok(ProxyReply::Document(document)) => match document.get("approvals").and_then(Value::as_array) {
            None => Some(VerbResult::failed("not run: the proxy does not say whether an action awaits approval")),
            Some(waiting) => waiting.first().map(|first| VerbResult::denied(&held(first))),
        },
        Ok(ProxyReply::Refused(refused)) => {
            let done = VerbResult::refused(&refused, "");
            let state = if done.state == State::Failed { State::Failed } else { State::Denied };
            Some(VerbResult { state, text: format!("not run: {}", done.text) })
        }
        Err(why) => {
            let done = VerbResult::unreachable(&why);
            Some(VerbResult { text: format!("not run: {}", done.text), ..done })
        }
    }
}

/// Returns the result of a call that follows a pending one.
pub(super) fn after_pending() -> VerbResult {
    VerbResult::denied(
        "not run: an earlier action awaits the operator's approval; repeat this call when that is decided",
    )
}

fn held(approval: &Value) -> String {
    if approval.get("tool").and_then(Value::as_str) == Some(SHELL_TOOL) {
        return "not run: a command of the dangerous shell awaits the operator's decision and must be decided first; tell the user, and call \
                nothing until then"
            .to_owned();
    }
    let text = |member: &str| messages::name(approval.get(member).and_then(Value::as_str).unwrap_or("?"));
    let url = approval.get("url").and_then(Value::as_str).and_then(|url| url.parse().ok());
    let host = url
        .and_then(|url| Target::absolute(&url).ok())
        .map_or("?".to_owned(), |to| messages::name(&to.host().to_string()));
    format!(
        "not run: an action ({} {host}) awaits the operator's decision and must be decided first; tell the user, and call \
         nothing until then",
        text("method")
    )
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn pending_approvals_are_named_by_method_and_host() {
        let of = |approval| held(&approval);
        let text = of(json!({"method": "POST", "url": "https://api.test:8443/secret?x=1"}));
        assert!(text.starts_with("not run: an action (POST api.test) awaits"), "{text}");
        assert!(of(json!({})).starts_with("not run: an action (? ?) awaits"));
        assert!(of(json!({"method": 1, "url": "no url"})).starts_with("not run: an action (? ?) awaits"));
    }
}

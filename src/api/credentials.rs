//! `GET /v1/credentials`: the credentials of the policy in force, never their values.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use serde_json::{Value, json};

use super::status::timestamp;
use crate::flow::Services;
use crate::policy::credential::Credential;

/// The state of a token that is fetched.
struct Token {
    minted: Option<SystemTime>,
    expires: Option<SystemTime>,
    failure: Option<String>,
}

/// Returns the description of each credential, ordered by name and workspace.
pub(crate) fn document(services: &Services) -> Value {
    let tokens = services.mints.report().into_iter().map(|token| {
        let state = Token { minted: token.minted, expires: token.expires, failure: token.failure };
        ((token.credential, token.workspace), state)
    });
    let tokens: HashMap<_, _> = tokens.collect();
    let policy = services.policies.snapshot();
    let mut credentials: Vec<&Arc<Credential>> = policy.credentials().collect();
    credentials.sort_by(|a, b| (a.name().as_str(), a.workspace()).cmp(&(b.name().as_str(), b.workspace())));
    let described = credentials.into_iter().map(|credential| {
        let key = (credential.name().clone(), credential.workspace().to_owned());
        describe(credential, tokens.get(&key))
    });
    described.collect()
}

fn describe(credential: &Credential, token: Option<&Token>) -> Value {
    let failure = token.and_then(|token| token.failure.clone());
    let state = match token {
        // A reload has added it in between.
        None if credential.recipe().is_some() => "not_fetched",
        None if credential.is_enabled() => "ready",
        None => "no_value",
        Some(token) if token.expires.is_some() => "ready",
        Some(_) if failure.is_some() => "failed",
        Some(_) => "not_fetched",
    };
    json!({
        "credential": credential.name().as_str(),
        "workspace": credential.workspace(),
        "auth_type": credential.kind(),
        "source": credential.source(),
        "domains": credential.domains().collect::<Vec<_>>(),
        "inject": if credential.is_always_injected() { "always" } else { "named" },
        "with": credential.with().iter().map(|name| name.as_str()).collect::<Vec<_>>(),
        "state": state,
        "minted_at": token.and_then(|token| token.minted).map(timestamp),
        "expires_at": token.and_then(|token| token.expires).map(timestamp),
        "failure": failure,
    })
}

//! Parses the answers of token endpoints. Nothing of them is logged, except registered error codes.

use std::time::{Duration, SystemTime};

use serde::Deserialize;
use serde_json::Value;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use zeroize::Zeroizing;

use crate::model::secret::Secret;
use crate::policy::token_request::{TokenGrant, TokenRequest};
use crate::stages::mint::MintError;

/// The longest token, in bytes. Origins accept request heads of at least 8 KiB.
const MAX_TOKEN: usize = 8 * 1024;
/// The longest refresh token, in bytes. It is sent in a body.
const MAX_REFRESH_TOKEN: usize = 16 * 1024;
/// The error codes of token endpoints (RFC 6749 §5.2, RFC 8693 §2.2.2 and RFC 8707 §2).
const ERRORS: [&str; 7] = [
    "invalid_client",
    "invalid_grant",
    "invalid_request",
    "invalid_scope",
    "invalid_target",
    "unauthorized_client",
    "unsupported_grant_type",
];

/// An answer with status 200.
pub(super) struct Answer {
    /// The access token with its life, if the endpoint states it; or why it cannot be used.
    pub(super) token: Result<(Secret, Option<Duration>), MintError>,
    /// The refresh token that replaces the one used. It is read first, because the old one may not be valid any more.
    pub(super) refresh_token: Option<Secret>,
}

/// An answer of RFC 6749 §5.1. A member that occurs twice is an error.
#[derive(Deserialize)]
struct OAuthAnswer {
    access_token: Zeroizing<String>,
    token_type: String,
    expires_in: Option<Value>,
}

/// An answer of GitHub's API to a request for an installation token.
#[derive(Deserialize)]
struct GithubAnswer {
    token: Zeroizing<String>,
    expires_at: String,
}

#[derive(Deserialize)]
struct ErrorAnswer {
    error: String,
}

/// Only the refresh token of an answer.
#[derive(Deserialize)]
struct RefreshAnswer {
    refresh_token: Option<Zeroizing<String>>,
}

/// Parses the answer. `now` is the time by the endpoint's clock.
pub(super) fn parse(body: &[u8], recipe: &TokenRequest, now: SystemTime) -> Answer {
    // Without the grant of a refresh token, one is of no use.
    let refresh_token = match recipe.grant {
        TokenGrant::RefreshToken { .. } => serde_json::from_slice(body).ok().and_then(new_refresh_token),
        _ => None,
    };
    Answer { token: access_token(body, recipe, now).map_err(MintError::lasting), refresh_token }
}

/// Returns a refresh token of printable ASCII characters (RFC 6749 appendix A.17).
fn new_refresh_token(RefreshAnswer { refresh_token }: RefreshAnswer) -> Option<Secret> {
    let is_valid = |token: &Zeroizing<String>| {
        (1..=MAX_REFRESH_TOKEN).contains(&token.len())
            && token.bytes().all(|byte| matches!(byte, b' '..=b'~'))
            && !token.trim().is_empty()
    };
    refresh_token.filter(is_valid).map(|token| Secret::new(token.as_bytes().to_vec()))
}

fn access_token(
    body: &[u8],
    recipe: &TokenRequest,
    now: SystemTime,
) -> Result<(Secret, Option<Duration>), &'static str> {
    // The error's text could have a part of the answer.
    const UNKNOWN: &str = "the answer is not that of a token endpoint";
    if let TokenGrant::GithubInstallation { .. } = recipe.grant {
        let GithubAnswer { token, expires_at } = serde_json::from_slice(body).map_err(|_| UNKNOWN)?;
        let end =
            OffsetDateTime::parse(&expires_at, &Rfc3339).map_err(|_| "the end of the token's life is not a time")?;
        let life = SystemTime::from(end).duration_since(now).map_err(|_| "the token has expired already")?;
        return Ok((checked(token)?, Some(life)));
    }
    let OAuthAnswer { access_token, token_type, expires_in } = serde_json::from_slice(body).map_err(|_| UNKNOWN)?;
    // `N_A` is for tokens that are not access tokens (RFC 8693 §2.2.1). They are sent as the configuration says.
    let is_exchanged = matches!(recipe.grant, TokenGrant::TokenExchange { .. }) && token_type == "N_A";
    if !token_type.eq_ignore_ascii_case("bearer") && !is_exchanged {
        return Err("the type of the token is not Bearer");
    }
    let life = expires_in.filter(|life| !life.is_null()).map(|life| seconds(&life)).transpose()?;
    Ok((checked(access_token)?, life))
}

/// Returns the error code of an answer, if it is a registered one.
pub(super) fn registered_error(body: &[u8]) -> Option<&'static str> {
    let ErrorAnswer { error } = serde_json::from_slice(body).ok()?;
    ERRORS.into_iter().find(|known| *known == error)
}

/// Returns a token of visible ASCII characters (RFC 6749 appendix A.12), without blanks, which a field could lose.
fn checked(token: Zeroizing<String>) -> Result<Secret, &'static str> {
    match token.len() {
        0 => Err("the token is empty"),
        1..=MAX_TOKEN if token.bytes().all(|byte| byte.is_ascii_graphic()) => {
            Ok(Secret::new(token.as_bytes().to_vec()))
        }
        1..=MAX_TOKEN => Err("the token has characters that a header field cannot carry"),
        _ => Err("the token is longer than 8192 bytes"),
    }
}

/// Reads seconds: a number, or the same in quotes, as some endpoints send it.
fn seconds(life: &Value) -> Result<Duration, &'static str> {
    let number = life.as_f64().or_else(|| life.as_str().and_then(|text| text.parse::<u32>().ok()).map(f64::from));
    match number {
        Some(number) if number > 0.0 && number < f64::from(u32::MAX) => Ok(Duration::from_secs_f64(number)),
        Some(number) if number <= 0.0 => Err("the token has expired already"),
        _ => Err("the life of the token is not a number of seconds"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::held_secret::HeldSecret;
    use crate::policy::hook_url::HookUrl;
    use crate::policy::settings::Source;
    use crate::policy::source::{SecretStore, SourceError};
    use crate::policy::token_request::{Assertion, ClientAuth, StoredSecret};
    use std::sync::Arc;

    fn recipe(grant: TokenGrant) -> TokenRequest {
        TokenRequest {
            url: HookUrl::parse("https://login.test/token").unwrap(),
            grant,
            client: ClientAuth::Anonymous,
            parameters: Vec::new(),
            assumed_life: Duration::from_secs(60),
            fetched: Vec::new(),
        }
    }

    fn held() -> Arc<HeldSecret> {
        Arc::new(HeldSecret::new(Secret::new(b"x".to_vec())))
    }

    #[test]
    fn answers_are_read_strictly() {
        let long = format!(r#"{{"access_token":"{}","token_type":"Bearer"}}"#, "a".repeat(MAX_TOKEN + 1));
        let rows: [(&str, Result<Option<u64>, &str>); 18] = [
            (r#"{"access_token":"abc","token_type":"Bearer","expires_in":3600}"#, Ok(Some(3600))),
            (r#"{"access_token":"abc","token_type":"bearer","expires_in":"60","scope":"x"}"#, Ok(Some(60))),
            (r#"{"access_token":"abc","token_type":"BEARER","expires_in":1.5}"#, Ok(Some(1))),
            (r#"{"access_token":"abc","token_type":"Bearer"}"#, Ok(None)),
            (r#"{"access_token":"abc","token_type":"Bearer","expires_in":null}"#, Ok(None)),
            (r#"{"access_token":"abc","token_type":"Bearer","expires_in":0}"#, Err("expired")),
            (r#"{"access_token":"abc","token_type":"Bearer","expires_in":-5}"#, Err("expired")),
            (r#"{"access_token":"abc","token_type":"Bearer","expires_in":1e300}"#, Err("seconds")),
            (r#"{"access_token":"abc","token_type":"Bearer","expires_in":[]}"#, Err("seconds")),
            (r#"{"access_token":"abc","token_type":"DPoP"}"#, Err("Bearer")),
            (r#"{"access_token":"abc","token_type":"N_A"}"#, Err("Bearer")),
            (r#"{"access_token":"abc"}"#, Err("not that of a token endpoint")),
            (r#"{"access_token":"","token_type":"Bearer"}"#, Err("empty")),
            (r#"{"access_token":"a\r\nX: y","token_type":"Bearer"}"#, Err("characters")),
            (r#"{"access_token":"a b","token_type":"Bearer"}"#, Err("characters")),
            (r#"{"access_token":"a","access_token":"b","token_type":"Bearer"}"#, Err("not that of a token endpoint")),
            ("<html>", Err("not that of a token endpoint")),
            (&long, Err("longer")),
        ];
        for (body, want) in rows {
            let found = parse(body.as_bytes(), &recipe(TokenGrant::ClientCredentials), SystemTime::now());
            match (found.token, want) {
                (Ok((_, life)), Ok(want)) => assert_eq!(life.map(|life| life.as_secs()), want, "{body}"),
                (Err(why), Err(want)) => assert!(why.reason.contains(want), "{body}: {why:?}"),
                (found, _) => panic!("{body}: {:?}", found.err()),
            }
        }
    }

    struct NoStore;

    impl SecretStore for NoStore {
        fn get(&self, _: &str, _: &str) -> Result<Secret, SourceError> {
            Err(SourceError::Missing(String::new()))
        }

        fn replace(&self, _: &str, _: &str, _: &Secret, _: &Secret) -> Result<bool, SourceError> {
            Ok(false)
        }

        fn lock(&self, _: &str, _: &str) -> Result<Box<dyn Send>, SourceError> {
            Ok(Box::new(()))
        }
    }

    /// The old one may be of no use any more, whatever is wrong with the access token.
    #[test]
    fn a_refresh_token_is_read_from_every_answer_to_its_grant() {
        let stored = StoredSecret { store: Arc::new(NoStore), workspace: String::new(), name: String::new() };
        let refresh = recipe(TokenGrant::RefreshToken { token: held(), stored });
        let rows = [
            (r#"{"access_token":"abc","token_type":"Bearer","refresh_token":"new"}"#, Some("new"), true),
            (r#"{"access_token":"abc","refresh_token":"new one"}"#, Some("new one"), false),
            (
                r#"{"access_token":"abc","token_type":"Bearer","expires_in":0,"refresh_token":"new"}"#,
                Some("new"),
                false,
            ),
            (r#"{"refresh_token":"new"}"#, Some("new"), false),
            (r#"{"access_token":"abc","token_type":"Bearer","refresh_token":""}"#, None, true),
            (r#"{"access_token":"abc","token_type":"Bearer","refresh_token":null}"#, None, true),
            (r#"{"access_token":"abc","token_type":"Bearer","refresh_token":"a\nb"}"#, None, true),
            (r#"{"refresh_token":"a","refresh_token":"b"}"#, None, false),
        ];
        for (body, want, is_usable) in rows {
            let answer = parse(body.as_bytes(), &refresh, SystemTime::now());
            assert_eq!(answer.refresh_token.as_ref().map(Secret::expose), want.map(str::as_bytes), "{body}");
            assert_eq!(answer.token.is_ok(), is_usable, "{body}");
            let ignored = parse(body.as_bytes(), &recipe(TokenGrant::ClientCredentials), SystemTime::now());
            assert!(ignored.refresh_token.is_none());
        }
        let (source, stored) = (Source::Env(String::new()), None);
        let exchange =
            TokenGrant::TokenExchange { subject_token: held(), source, stored, subject_token_type: String::new() };
        let body = br#"{"access_token":"abc","token_type":"N_A","issued_token_type":"x"}"#;
        assert!(parse(body, &recipe(exchange), SystemTime::now()).token.is_ok());
    }

    #[test]
    fn the_end_of_a_life_is_by_the_endpoints_clock() {
        let assertion =
            Assertion { issuer: String::new(), subject: None, audience: None, scope: None, key_id: None, key: held() };
        let github =
            recipe(TokenGrant::GithubInstallation { assertion, repositories: Vec::new(), permissions: Vec::new() });
        let at = |time: &str| SystemTime::from(OffsetDateTime::parse(time, &Rfc3339).unwrap());
        let body = br#"{"token":"ghs_abc","expires_at":"2026-11-27T11:00:00Z","permissions":{}}"#;
        let (_, life) = parse(body, &github, at("2026-11-27T10:00:00Z")).token.ok().unwrap();
        assert_eq!(life, Some(Duration::from_secs(3600)));
        let late = parse(body, &github, at("2026-11-27T12:00:00Z")).token.err().unwrap();
        assert_eq!(late.reason, "the token has expired already");
        assert!(parse(br#"{"token":"ghs_abc","expires_at":"soon"}"#, &github, SystemTime::now()).token.is_err());
    }

    #[test]
    fn only_registered_errors_are_told() {
        assert_eq!(
            registered_error(br#"{"error":"invalid_grant","error_description":"secret"}"#),
            Some("invalid_grant")
        );
        assert_eq!(registered_error(br#"{"error":"<script>"}"#), None);
        assert_eq!(registered_error(b"oops"), None);
    }
}

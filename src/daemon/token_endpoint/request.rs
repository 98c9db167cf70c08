//! Builds the requests to token endpoints: forms of OAuth 2.0, and JSON for GitHub.

use std::time::SystemTime;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{ACCEPT, AUTHORIZATION, CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderValue, Request};
use http_body_util::Full;
use hyper::body::Bytes;
use percent_encoding::percent_encode;
use serde_json::json;
use zeroize::Zeroizing;

use super::assertion;
use crate::daemon::form::{Form, NOT_IN_FORM};
use crate::policy::token_request::{Assertion, ClientAuth, TokenGrant, TokenRequest};
use crate::stages::mint::MintError;

const JWT_BEARER: &str = "urn:ietf:params:oauth:grant-type:jwt-bearer";
const CLIENT_JWT_BEARER: &str = "urn:ietf:params:oauth:client-assertion-type:jwt-bearer";
const TOKEN_EXCHANGE: &str = "urn:ietf:params:oauth:grant-type:token-exchange";

/// Builds the request for a token. `now` is the time by the endpoint's clock.
///
/// # Errors
/// [`MintError`] for a private key that cannot sign, and for a secret that a header field cannot carry.
pub(super) fn build(recipe: &TokenRequest, now: SystemTime) -> Result<Request<Full<Bytes>>, MintError> {
    let signed = |assertion: &Assertion| assertion::sign(assertion, now).map_err(MintError::lasting);
    let TokenRequest { grant, client, .. } = recipe;
    if let TokenGrant::GithubInstallation { assertion, repositories, permissions } = grant {
        let mut narrowed = serde_json::Map::new();
        if !repositories.is_empty() {
            narrowed.insert("repositories".to_owned(), json!(repositories));
        }
        if !permissions.is_empty() {
            let permissions = permissions.iter().map(|(name, level)| (name.clone(), json!(level)));
            narrowed.insert("permissions".to_owned(), serde_json::Value::Object(permissions.collect()));
        }
        let body = serde_json::Value::Object(narrowed).to_string();
        let authorization = Zeroizing::new(format!("Bearer {}", *signed(assertion)?));
        return request(recipe, ("application/vnd.github+json", "application/json"), Some(authorization), body.into());
    }
    let mut form = Form::default();
    match grant {
        TokenGrant::ClientCredentials => form.add("grant_type", b"client_credentials"),
        TokenGrant::RefreshToken { token, .. } => {
            form.add("grant_type", b"refresh_token");
            form.add("refresh_token", token.secret().expose());
        }
        TokenGrant::JwtBearer(assertion) => {
            form.add("grant_type", JWT_BEARER.as_bytes());
            form.add("assertion", signed(assertion)?.as_bytes());
        }
        TokenGrant::TokenExchange { subject_token, subject_token_type, .. } => {
            form.add("grant_type", TOKEN_EXCHANGE.as_bytes());
            form.add("subject_token", subject_token.secret().expose());
            form.add("subject_token_type", subject_token_type.as_bytes());
        }
        // Sent above.
        TokenGrant::GithubInstallation { .. } => {}
    }
    for (name, value) in &recipe.parameters {
        form.add(name, value.as_bytes());
    }
    let mut authorization = None;
    match client {
        ClientAuth::Anonymous => {}
        ClientAuth::Public { id } => form.add("client_id", id.as_bytes()),
        ClientAuth::Basic { id, secret } => {
            let (id, secret) =
                (percent_encode(id.as_bytes(), NOT_IN_FORM), percent_encode(secret.secret().expose(), NOT_IN_FORM));
            let pair = Zeroizing::new(format!("{id}:{secret}"));
            authorization = Some(Zeroizing::new(format!("Basic {}", STANDARD.encode(pair.as_bytes()))));
        }
        ClientAuth::Post { id, secret } => {
            form.add("client_id", id.as_bytes());
            form.add("client_secret", secret.secret().expose());
        }
        ClientAuth::PrivateKeyJwt { id, assertion } => {
            form.add("client_id", id.as_bytes());
            form.add("client_assertion_type", CLIENT_JWT_BEARER.as_bytes());
            form.add("client_assertion", signed(assertion)?.as_bytes());
        }
    }
    let types = ("application/json", "application/x-www-form-urlencoded");
    request(recipe, types, authorization, Bytes::from_owner(form.0))
}

fn request(
    recipe: &TokenRequest,
    (accepted, sent): (&'static str, &'static str),
    authorization: Option<Zeroizing<String>>,
    body: Bytes,
) -> Result<Request<Full<Bytes>>, MintError> {
    let mut request = Request::post(recipe.url.path())
        .header(HOST, recipe.url.host_field())
        .header(USER_AGENT, concat!("exeat/", env!("CARGO_PKG_VERSION")))
        .header(ACCEPT, accepted)
        .header(CONTENT_TYPE, sent)
        .body(Full::new(body))
        .map_err(|_| MintError::lasting("the request is not valid"))?;
    if let Some(authorization) = authorization {
        let value = HeaderValue::from_str(&authorization);
        let mut value = value.map_err(|_| MintError::lasting("a header field cannot carry the secret"))?;
        value.set_sensitive(true);
        request.headers_mut().insert(AUTHORIZATION, value);
    }
    Ok(request)
}

//! Reads values from Google Secret Manager and Azure Key Vault, with an access token from a token endpoint.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::StatusCode;
use http::header::AUTHORIZATION;
use serde::Deserialize;
use zeroize::Zeroizing;

use super::logins::{Login, Logins};
use super::{StoreFailure, StoreRequest, StoreValue, parsed, path};
use crate::daemon::own_request::OwnRequests;
use crate::daemon::token_endpoint::TokenEndpoints;
use crate::model::secret::Secret;
use crate::policy::secret_store::{StoreItem, StoreLogin, StoreRead};
use crate::stages::mint::{IssuedToken, MintError};

#[derive(Deserialize)]
struct GoogleAnswer {
    payload: GooglePayload,
}

#[derive(Deserialize)]
struct GooglePayload {
    data: Zeroizing<String>,
}

#[derive(Deserialize)]
struct AzureAnswer {
    value: Zeroizing<String>,
}

/// Reads the value that `read` refers to. If the token is not accepted, another one is fetched, once.
pub(super) async fn read(
    (requests, endpoints): (&OwnRequests, &TokenEndpoints),
    logins: &Logins,
    read: &StoreRead,
) -> Result<StoreValue, MintError> {
    let place = match &read.item {
        StoreItem::Google { project, secret, version } => {
            path(["v1", "projects", project, "secrets", secret, "versions", version]) + ":access"
        }
        StoreItem::Azure { secret, version } => {
            let version = version.as_deref().into_iter();
            path(["secrets", secret.as_str()].into_iter().chain(version)) + "?api-version=7.4"
        }
        _ => return Err(MintError::lasting("not an item of this store")),
    };
    let key = read.server.fingerprint();
    let none = async |_| None;
    let (token, _) = logins.token(key, login(endpoints, read), none).await?;
    let mut answer = send(requests, read, &place, &token).await;
    if matches!(&answer, Err(StoreFailure { status: Some(StatusCode::UNAUTHORIZED), .. })) {
        logins.forget(key, &token).await;
        let (token, _) = logins.token(key, login(endpoints, read), none).await?;
        answer = send(requests, read, &place, &token).await;
    }
    let body = answer?;
    match &read.item {
        StoreItem::Google { .. } => {
            let data = parsed::<GoogleAnswer>(&body)?.payload.data;
            let bytes = STANDARD.decode(data.as_bytes()).map(Zeroizing::new);
            let bytes = bytes.map_err(|_| MintError::lasting("the value is not in base64"))?;
            let text = std::str::from_utf8(&bytes).map_err(|_| MintError::lasting("the value is not a text"))?;
            StoreValue::of_text(text, read)
        }
        _ => StoreValue::of_text(&parsed::<AzureAnswer>(&body)?.value, read),
    }
}

async fn login(endpoints: &TokenEndpoints, read: &StoreRead) -> Result<Login, MintError> {
    let StoreLogin::Token(request) = &read.server.login else {
        return Err(MintError::lasting("the store has no login"));
    };
    // Its grants replace no secret.
    let (token, _) = endpoints.issue(request).await;
    let IssuedToken { value, life, .. } = token?;
    Ok(Login::new(value, life.time()))
}

async fn send(
    requests: &OwnRequests,
    read: &StoreRead,
    place: &str,
    token: &Arc<Secret>,
) -> Result<Zeroizing<Vec<u8>>, StoreFailure> {
    let mut request = StoreRequest::get(place.to_owned());
    request.secrets.push((AUTHORIZATION, super::bearer(token)?));
    request.send(requests, &read.server).await
}

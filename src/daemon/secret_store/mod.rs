//! Reads the values of credentials from secret stores. Nothing of their answers is logged.

mod aws;
mod logins;
mod members;
mod one_password;
mod vault;
mod with_token;

use std::sync::Arc;
use std::time::Duration;

use http::header::{ACCEPT, CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderName, HeaderValue, Method, Request, StatusCode};
use http_body_util::Full;
use hyper::body::Bytes;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde::de::DeserializeOwned;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use zeroize::Zeroizing;

use self::logins::Logins;
use self::members::Members;
use self::vault::Leases;
use super::own_request::{OwnRequests, is_json, retry_after};
use super::own_server::OwnServers;
use super::token_endpoint::TokenEndpoints;
use crate::model::secret::Secret;
use crate::policy::aws::{AwsKey, FetchedAwsKey, FetchedKeyId, is_access_key_id};
use crate::policy::held_secret::HeldSecret;
use crate::policy::mint::TokenLife;
use crate::policy::secret_store::{LoginSecret, StoreItem, StoreRead, StoreServer};
use crate::policy::source::{read_source, usable, usable_document};
use crate::stages::mint::{IssuedToken, MintError, Purpose};
use crate::stages::pin::OwnServer;

/// The time limit for a read, with all of its requests. It is longer than any request waits.
const READ_TIMEOUT: Duration = Duration::from_secs(60);
/// The maximum size of a response's body, in bytes. Items of Vault have 1 MiB at most.
const MAX_RESPONSE: usize = 2 * 1024 * 1024;
/// The longest session token of AWS, in bytes. Services accept heads of 8 KiB at least.
pub(super) const MAX_SESSION_TOKEN: usize = 4096;
const JSON: &str = "application/json";
/// All but the characters that a segment of a path may carry as they are (RFC 3986 §2.3).
const NOT_IN_SEGMENT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// The secret stores of the configuration.
pub(super) struct SecretStores {
    requests: OwnRequests,
    logins: Logins,
    leases: Leases,
}

/// A request to a secret store.
struct StoreRequest {
    method: Method,
    /// The path of the API, without the one of the address.
    path: String,
    /// The fields that identify the proxy.
    secrets: Vec<(HeaderName, Zeroizing<String>)>,
    /// Further fields.
    fields: Vec<(HeaderName, String)>,
    /// The type of the body, if there is one.
    content_type: &'static str,
    body: Zeroizing<Vec<u8>>,
}

/// A request that failed.
struct StoreFailure {
    /// The status, if there was a response.
    status: Option<StatusCode>,
    error: MintError,
}

/// A value, and its life if the store states one.
struct StoreValue {
    value: Secret,
    aws_key: Option<AwsKey>,
    life: Option<TokenLife>,
}

/// The parts of an item that are wanted.
#[derive(Clone, Copy)]
pub(super) struct Wanted<'w> {
    /// The member with the value. `None` for the whole text.
    pub(super) member: Option<&'w str>,
    /// The rest of the key, if the value is the secret of one of AWS.
    pub(super) aws_key: Option<&'w FetchedAwsKey>,
    /// The value may have several lines.
    pub(super) is_document: bool,
}

impl SecretStores {
    pub(super) fn new(own_servers: &OwnServers<'_>) -> Self {
        let (dialer, server) = (own_servers.dialer(), OwnServer::SecretStore);
        let requests = OwnRequests { dialer, server, name: "store" };
        Self { requests, logins: Logins::default(), leases: Leases::default() }
    }

    /// Reads a value. Returns also how the next one is read, if the secrets of the login have changed.
    pub(super) async fn read(
        &self,
        read: &Arc<StoreRead>,
        purpose: Purpose,
        endpoints: &TokenEndpoints,
    ) -> (Result<IssuedToken, MintError>, Option<Arc<StoreRead>>) {
        let used = match with_current_secrets(read).await {
            Ok(used) => used,
            Err(error) => return (Err(error), None),
        };
        let next = (!Arc::ptr_eq(&used, read)).then(|| used.clone());
        let value = match timeout(READ_TIMEOUT, self.value(&used, purpose, endpoints)).await {
            Ok(value) => value,
            Err(_) => Err(MintError::new("the store did not answer in time")),
        };
        let kept = TokenLife::Kept { refresh: used.refresh, max_stale: used.max_stale };
        let token = value.and_then(|StoreValue { value, aws_key, life }| {
            let value = checked(value, used.is_document)?;
            Ok(IssuedToken { value, aws_key, life: life.unwrap_or(kept) })
        });
        (token, next)
    }

    async fn value(
        &self,
        used: &StoreRead,
        purpose: Purpose,
        endpoints: &TokenEndpoints,
    ) -> Result<StoreValue, MintError> {
        match &used.item {
            StoreItem::VaultKv1 { .. } | StoreItem::VaultKv2 { .. } | StoreItem::VaultLease { .. } => {
                vault::read(&self.requests, (&self.logins, &self.leases), used, purpose).await
            }
            StoreItem::OnePassword { .. } => one_password::read(&self.requests, used).await,
            StoreItem::AwsSecret { .. } | StoreItem::AwsParameter { .. } => aws::read(&self.requests, used).await,
            StoreItem::Google { .. } | StoreItem::Azure { .. } => {
                with_token::read((&self.requests, endpoints), &self.logins, used).await
            }
        }
    }
}

/// Returns the value in a text, without a line feed at its end: the whole of it, or a member of the JSON object in it, perhaps with
/// others.
pub(super) fn text_value(text: &[u8], wanted: Wanted<'_>) -> Result<(Secret, Option<AwsKey>), MintError> {
    let text_value = |text: &[u8]| checked(Secret::new(text.to_vec()), wanted.is_document);
    match wanted {
        Wanted { member: None, aws_key: None, .. } => Ok((text_value(text)?, None)),
        Wanted { member: None, aws_key: Some(FetchedAwsKey { access_key_id: FetchedKeyId::Text(id), .. }), .. } => {
            let key = AwsKey { access_key_id: id.clone(), session_token: None };
            Ok((text_value(text)?, Some(key)))
        }
        _ => {
            let members = serde_json::from_slice::<Members>(text);
            member_values(&members.map_err(|_| MintError::lasting("the value is not a JSON object"))?, wanted)
        }
    }
}

/// Returns the value among the members of an item, perhaps with others.
fn member_values(members: &Members, wanted: Wanted<'_>) -> Result<(Secret, Option<AwsKey>), MintError> {
    let value = checked(members.text(wanted.member.unwrap_or_default())?, wanted.is_document)?;
    let Some(FetchedAwsKey { access_key_id, session_token }) = wanted.aws_key else { return Ok((value, None)) };
    let access_key_id = match access_key_id {
        FetchedKeyId::Text(id) => id.clone(),
        FetchedKeyId::Member(name) => {
            let id = String::from_utf8(checked(members.text(name)?, false)?.expose().to_vec()).ok();
            let id = id.filter(|id| is_access_key_id(id));
            id.ok_or_else(|| MintError::lasting("the item has no valid id of an access key"))?
        }
    };
    let session_token = match session_token {
        Some(name) => {
            let token = checked(members.text(name)?, false)?;
            let fits = token.expose().iter().all(u8::is_ascii_graphic) && token.expose().len() <= MAX_SESSION_TOKEN;
            let token = Some(token).filter(|_| fits);
            let token = token.ok_or_else(|| MintError::lasting("the item has no valid session token"))?;
            Some(Arc::new(HeldSecret::new(token)))
        }
        None => None,
    };
    Ok((value, Some(AwsKey { access_key_id, session_token })))
}

fn checked(value: Secret, is_document: bool) -> Result<Secret, MintError> {
    let value = if is_document { usable_document(value) } else { usable(without_line_end(value)) };
    value.map_err(|error| MintError::lasting(error.to_string()))
}

/// Removes one line feed at the end, as from files.
fn without_line_end(secret: Secret) -> Secret {
    match secret.expose().strip_suffix(b"\n") {
        Some(rest) => Secret::new(rest.to_vec()),
        None => secret,
    }
}

/// Returns the read with the secrets that their sources have now: others may have renewed them.
async fn with_current_secrets(read: &Arc<StoreRead>) -> Result<Arc<StoreRead>, MintError> {
    let old = read.clone();
    let read_all = spawn_blocking(move || {
        let current = |secret: &LoginSecret| match read_source(&secret.source, &|name| std::env::var(name).ok()) {
            Ok(new) => {
                let known = secret.held.as_ref().filter(|held| held.secret().expose() == new.expose());
                Ok(known.cloned().unwrap_or_else(|| Arc::new(HeldSecret::new(new))))
            }
            // A variable of `exeat run` is not one of the daemon.
            Err(_) if secret.held.is_some() && secret.source.file().is_none() => {
                secret.held.clone().ok_or_else(|| MintError::new("there is no secret"))
            }
            Err(error) => Err(MintError::new(format!("{} of the store: {error}", secret.key))),
        };
        let new = old.server.secrets.iter().map(current).collect::<Result<Vec<_>, _>>()?;
        let is_same = |(secret, new): (&LoginSecret, &Arc<HeldSecret>)| {
            secret.held.as_ref().is_some_and(|held| Arc::ptr_eq(held, new))
        };
        if old.server.secrets.iter().zip(&new).all(is_same) {
            return Ok(old);
        }
        let server = old.server.with_secrets(new.into_iter().map(Some).collect());
        Ok(Arc::new(StoreRead { server: Arc::new(server), ..(*old).clone() }))
    });
    read_all.await.map_err(|_| MintError::new("the secrets of the store cannot be read"))?
}

/// Returns a path of the API from its segments.
fn path<'s>(segments: impl IntoIterator<Item = &'s str>) -> String {
    let encoded = segments.into_iter().map(|segment| utf8_percent_encode(segment, NOT_IN_SEGMENT).to_string());
    encoded.fold(String::new(), |path, segment| path + "/" + &segment)
}

impl StoreRequest {
    fn get(path: String) -> Self {
        let (secrets, fields, body) = (Vec::new(), Vec::new(), Zeroizing::default());
        Self { method: Method::GET, path, secrets, fields, content_type: JSON, body }
    }

    /// Sends the request, and returns the body of a response with JSON.
    async fn send(self, requests: &OwnRequests, server: &StoreServer) -> Result<Zeroizing<Vec<u8>>, StoreFailure> {
        let other = |error| StoreFailure { status: None, error };
        let is_json_expected = self.content_type == JSON;
        let request = self.build(server).map_err(other)?;
        let response = requests.send(&server.url, request).await.map_err(other)?;
        let (head, body) = response.into_parts();
        let body = requests.read(body, MAX_RESPONSE).await.map_err(other)?;
        if !head.status.is_success() {
            let (status, retry_after) = (head.status, retry_after(&head.headers));
            let passes = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&status);
            let is_lasting = !status.is_server_error() && !passes;
            let mut error = MintError { reason: reason(status), retry_after, is_lasting };
            if let Some(known) = aws_error(&body) {
                error.reason.push_str(&format!(": {known}"));
                error.is_lasting &= known != "ThrottlingException";
            }
            return Err(StoreFailure { status: Some(status), error });
        }
        // AWS has a type of its own for JSON, which servers like it do not all send.
        if is_json_expected && !is_json(&head.headers) {
            return Err(other(MintError::lasting("the answer is not JSON")));
        }
        Ok(body)
    }

    fn build(self, server: &StoreServer) -> Result<Request<Full<Bytes>>, MintError> {
        let invalid = || MintError::lasting("the request to the store is not valid");
        let base = server.url.path().trim_end_matches('/');
        let mut request = Request::builder()
            .method(self.method)
            .uri(format!("{base}{}", self.path))
            .header(HOST, server.url.host_field())
            .header(USER_AGENT, concat!("exeat/", env!("CARGO_PKG_VERSION")))
            .header(ACCEPT, self.content_type);
        if !self.body.is_empty() {
            request = request.header(CONTENT_TYPE, self.content_type);
        }
        for (name, value) in self.fields {
            request = request.header(name, value);
        }
        let mut request = request.body(Full::new(Bytes::from_owner(self.body))).map_err(|_| invalid())?;
        for (name, value) in self.secrets {
            let value = HeaderValue::from_str(&value);
            let mut value = value.map_err(|_| MintError::lasting("a header field cannot carry the secret"))?;
            value.set_sensitive(true);
            request.headers_mut().insert(name, value);
        }
        Ok(request)
    }
}

/// Returns the parts that a read wants.
fn wanted(read: &StoreRead) -> Wanted<'_> {
    Wanted { member: read.reference.member.as_deref(), aws_key: read.aws_key.as_ref(), is_document: read.is_document }
}

impl StoreValue {
    /// Returns the value among the members of an item.
    fn of_members(members: &Members, read: &StoreRead, life: Option<TokenLife>) -> Result<Self, MintError> {
        let (value, aws_key) = member_values(members, wanted(read))?;
        Ok(Self { value, aws_key, life })
    }

    /// Returns the value in a text: the whole of it, or a member of the JSON object in it.
    fn of_text(text: &str, read: &StoreRead) -> Result<Self, MintError> {
        let (value, aws_key) = text_value(text.as_bytes(), wanted(read))?;
        Ok(Self { value, aws_key, life: None })
    }
}

/// Parses an answer. The error's text could have a part of it.
fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, MintError> {
    serde_json::from_slice(body).map_err(|_| MintError::lasting("the answer is not that of such a store"))
}

/// Returns the value of `Authorization` with a token.
fn bearer(token: &Secret) -> Result<Zeroizing<String>, MintError> {
    let token = std::str::from_utf8(token.expose());
    let token = token.map_err(|_| MintError::lasting("a header field cannot carry the token"))?;
    Ok(Zeroizing::new(format!("Bearer {token}")))
}

/// The errors of AWS that are told to operators.
const AWS_ERRORS: [&str; 10] = [
    "AccessDeniedException",
    "DecryptionFailure",
    "ExpiredTokenException",
    "InvalidSignatureException",
    "ParameterNotFound",
    "ResourceNotFoundException",
    "SignatureDoesNotMatch",
    "ThrottlingException",
    "UnrecognizedClientException",
    "ValidationException",
];

/// Returns the error of an answer of AWS, if it is one of those.
fn aws_error(body: &[u8]) -> Option<&'static str> {
    #[derive(serde::Deserialize)]
    struct ErrorAnswer {
        #[serde(rename = "__type")]
        kind: String,
    }
    let ErrorAnswer { kind } = serde_json::from_slice(body).ok()?;
    let kind = kind.rsplit('#').next()?;
    AWS_ERRORS.into_iter().find(|known| *known == kind)
}

/// Returns the reason of a failure in the proxy's own words.
fn reason(status: StatusCode) -> String {
    let meaning = match status {
        StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN => ": the login may not read this, or is not valid any more",
        StatusCode::NOT_FOUND => ": there is no such item, or it was deleted",
        StatusCode::SERVICE_UNAVAILABLE => ": it is sealed or not available",
        status if status.is_redirection() => ": a redirect, which is not followed",
        _ => "",
    };
    format!("the store answered {}{meaning}", status.as_u16())
}

impl From<StoreFailure> for MintError {
    fn from(failure: StoreFailure) -> Self {
        failure.error
    }
}

impl From<MintError> for StoreFailure {
    fn from(error: MintError) -> Self {
        Self { status: None, error }
    }
}

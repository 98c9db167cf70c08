//! Reads values from HashiCorp Vault and OpenBao.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::{HeaderName, Method, StatusCode};
use parking_lot::Mutex;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use tokio::sync::Mutex as AsyncMutex;
use zeroize::Zeroizing;

use super::logins::{Login, Logins, MAX_LOGIN, TokenEnd};
use super::members::Members;
use super::{StoreFailure, StoreRequest, StoreValue, parsed, path};
use crate::daemon::own_request::OwnRequests;
use crate::model::secret::Secret;
use crate::policy::mint::TokenLife;
use crate::policy::secret_store::{StoreItem, StoreLogin, StoreRead, StoreServer};
use crate::stages::mint::{MintError, Purpose};

const TOKEN: HeaderName = HeaderName::from_static("x-vault-token");
const NAMESPACE: HeaderName = HeaderName::from_static("x-vault-namespace");
/// A field that some servers require, so that other programs cannot be made to send requests to them.
const REQUEST: HeaderName = HeaderName::from_static("x-vault-request");
/// The longest token of a login, in bytes.
const MAX_TOKEN: usize = 8 * 1024;

/// The leases of the process, by the login and the path.
#[derive(Default)]
pub(super) struct Leases(Mutex<HashMap<([u8; 32], String), SharedLease>>);

type SharedLease = Arc<AsyncMutex<Option<Lease>>>;

/// Secrets that the server created for us, all with one life.
struct Lease {
    members: Members,
    id: Option<Zeroizing<String>>,
    created: Instant,
    /// The life at the creation or the last extension, not beyond that of the token then, and when that was.
    granted: Duration,
    at: Instant,
    /// The end of the token that created it, which is its end too. `None` if that is not known.
    token_end: Option<TokenEnd>,
}

#[derive(Deserialize)]
struct LoginAnswer {
    auth: LoginAuth,
}

#[derive(Deserialize)]
struct LoginAuth {
    client_token: Zeroizing<String>,
    lease_duration: u64,
}

#[derive(Deserialize)]
struct Kv1Answer {
    #[serde(default)]
    lease_id: String,
    data: Members,
}

#[derive(Deserialize)]
struct Kv2Answer {
    data: Kv2Data,
}

#[derive(Deserialize)]
struct Kv2Data {
    data: Option<Members>,
}

#[derive(Deserialize)]
struct LeaseAnswer {
    lease_id: Zeroizing<String>,
    lease_duration: u64,
    #[serde(default)]
    renewable: bool,
    /// Not in the answer to a renewal.
    data: Option<Members>,
}

/// Reads the value that `read` refers to.
pub(super) async fn read(
    requests: &OwnRequests,
    (logins, leases): (&Logins, &Leases),
    read: &StoreRead,
    purpose: Purpose,
) -> Result<StoreValue, MintError> {
    let server = Server { logins, requests, server: &read.server };
    let strs = |names: &[String]| path(names.iter().map(String::as_str));
    match &read.item {
        StoreItem::VaultKv1 { path } => {
            let answer: Kv1Answer = server.ask(&StoreCall::get(strs(path))).await?.0;
            if !answer.lease_id.is_empty() {
                return Err(MintError::lasting("the secret has a lease, so its engine is a dynamic one"));
            }
            StoreValue::of_members(&answer.data, read, None)
        }
        StoreItem::VaultKv2 { mount, path } => {
            let place = format!("{}/data{}", strs(mount), strs(path));
            let answer: Kv2Answer = server.ask(&StoreCall::get(place)).await?.0;
            let data = answer.data.data.ok_or_else(|| MintError::lasting("the item was deleted"))?;
            StoreValue::of_members(&data, read, None)
        }
        StoreItem::VaultLease { path } => leases.read(&server, &strs(path), read, purpose).await,
        _ => Err(MintError::lasting("not an item of Vault")),
    }
}

impl Leases {
    fn entry(&self, key: ([u8; 32], String)) -> SharedLease {
        let mut all = self.0.lock();
        if !all.contains_key(&key) {
            // Those of paths that are not in the configuration any more.
            all.retain(|_, lease| {
                let is_live = |lease: &Option<Lease>| lease.as_ref().is_some_and(|lease| !lease.left().is_zero());
                Arc::strong_count(lease) > 1 || lease.try_lock().is_ok_and(|lease| is_live(&lease))
            });
        }
        all.entry(key).or_default().clone()
    }

    /// Returns a member of a secret with a lease. A lease is extended if it can be; all credentials with this path share it.
    async fn read(
        &self,
        server: &Server<'_>,
        place: &str,
        read: &StoreRead,
        purpose: Purpose,
    ) -> Result<StoreValue, MintError> {
        let key = (server.server.fingerprint(), place.to_owned());
        let entry = self.entry(key);
        let mut lease = entry.lock().await;
        let is_usable = |held: &Lease| match purpose {
            Purpose::First | Purpose::Confirmation => held.has_rest(),
            // Of credentials that need it at once, one extends or replaces it.
            Purpose::Renewal => held.is_recent(held.at),
            // An extension does not make a rejected one valid.
            Purpose::Replacement => held.is_recent(held.created),
        };
        let mut is_live = lease.as_ref().is_some_and(is_usable);
        if !is_live && let Some(held) = lease.as_mut().filter(|_| purpose != Purpose::Replacement) {
            match server.renew(held).await {
                Ok(granted) => (held.granted, held.at, is_live) = (granted, Instant::now(), true),
                // It was revoked, or has reached its maximum. Another one is created.
                Err(StoreFailure { status: Some(status), .. }) if ENDED.contains(&status) => {}
                Err(failure) => return Err(failure.into()),
            }
        }
        if !is_live {
            *lease = Some(server.create(place).await?);
        }
        let held = lease.as_ref().ok_or_else(|| MintError::new("there is no lease"))?;
        StoreValue::of_members(&held.members, read, Some(TokenLife::Stated(held.left())))
    }
}

/// The answers to the extension of a lease that does not exist any more, or cannot be extended.
const ENDED: [StatusCode; 3] = [StatusCode::BAD_REQUEST, StatusCode::FORBIDDEN, StatusCode::NOT_FOUND];

impl Lease {
    /// Returns true if this was a short time ago.
    fn is_recent(&self, time: Instant) -> bool {
        time.elapsed() < (self.granted / 10).min(Duration::from_secs(30)) && !self.left().is_zero()
    }

    /// Returns true if it is not in the last quarter of its life, in which a value is renewed.
    fn has_rest(&self) -> bool {
        self.left() > self.granted / 4
    }

    fn left(&self) -> Duration {
        let left = self.granted.saturating_sub(self.at.elapsed());
        self.token_end.as_ref().map_or(left, |end| left.min(end.left()))
    }
}

/// A call of the API, which may be repeated after another login.
struct StoreCall {
    method: Method,
    place: String,
    body: Zeroizing<Vec<u8>>,
}

impl StoreCall {
    fn get(place: String) -> Self {
        Self { method: Method::GET, place, body: Zeroizing::default() }
    }
}

/// A server, for the calls of one read.
struct Server<'v> {
    logins: &'v Logins,
    requests: &'v OwnRequests,
    server: &'v StoreServer,
}

impl Server<'_> {
    /// Sends a call. If the token is not valid any more, there is one other login. Returns also the end of the token.
    async fn ask<T: DeserializeOwned>(&self, call: &StoreCall) -> Result<(T, Option<TokenEnd>), StoreFailure> {
        let (mut token, mut end) = self.token().await?;
        let mut answer = self.send(call, Some(&token)).await;
        let is_denied = matches!(&answer, Err(StoreFailure { status: Some(StatusCode::FORBIDDEN), .. }));
        // The same status tells that the token may not do this. Then another login would not help.
        if is_denied && matches!(self.server.login, StoreLogin::Vault { .. }) && !self.is_valid(&token).await {
            self.logins.forget(self.server.fingerprint(), &token).await;
            (token, end) = self.token().await?;
            answer = self.send(call, Some(&token)).await;
        }
        Ok((parsed(&answer?)?, end))
    }

    /// Returns false if the server does not know a token any more.
    async fn is_valid(&self, token: &Secret) -> bool {
        let call = StoreCall::get(path(["auth", "token", "lookup-self"]));
        let answer = self.send(&call, Some(token)).await;
        !matches!(answer, Err(StoreFailure { status: Some(StatusCode::FORBIDDEN), .. }))
    }

    /// Extends the life of the login's token if it is in its second half: a lease ends with it.
    async fn extend_login(&self) {
        if matches!(self.server.login, StoreLogin::Vault { .. }) {
            let extend = async |token: Arc<Secret>| self.extended_life(&token).await;
            self.logins.extend_aging(self.server.fingerprint(), extend).await;
        }
    }

    async fn send(&self, call: &StoreCall, token: Option<&Secret>) -> Result<Zeroizing<Vec<u8>>, StoreFailure> {
        let mut request = StoreRequest::get(format!("/v1{}", call.place));
        request.method = call.method.clone();
        request.body = call.body.clone();
        request.fields.push((REQUEST, "true".to_owned()));
        if let StoreLogin::Vault { namespace: Some(name), .. } | StoreLogin::VaultToken { namespace: Some(name) } =
            &self.server.login
        {
            request.fields.push((NAMESPACE, name.clone()));
        }
        if let Some(token) = token {
            let token =
                std::str::from_utf8(token.expose()).map_err(|_| lasting("a header field cannot carry the token"))?;
            request.secrets.push((TOKEN, Zeroizing::new(token.to_owned())));
        }
        request.send(self.requests, self.server).await
    }

    /// Returns a token: the configured one, or that of a login, which is shared.
    async fn token(&self) -> Result<(Arc<Secret>, Option<TokenEnd>), StoreFailure> {
        if let StoreLogin::Vault { mount, role, secret, .. } = &self.server.login {
            let login = self.login(mount, (role.0, &role.1), secret);
            let extend = async |token: Arc<Secret>| self.extended_life(&token).await;
            let token = self.logins.token(self.server.fingerprint(), login, extend).await;
            return token.map(|(token, end)| (token, Some(end))).map_err(StoreFailure::from);
        }
        let token = self.server.secret("token").ok_or_else(|| lasting("the store has no token"))?;
        Ok((Arc::new(Secret::new(token.expose().to_vec())), None))
    }

    /// Extends the life of a token: leases end with the one that created them. `None` if it cannot be extended.
    async fn extended_life(&self, token: &Secret) -> Option<Duration> {
        let body = Zeroizing::new(b"{}".to_vec());
        let call = StoreCall { method: Method::POST, place: path(["auth", "token", "renew-self"]), body };
        let body = self.send(&call, Some(token)).await.ok()?;
        let LoginAnswer { auth: LoginAuth { lease_duration, .. } } = parsed(&body).ok()?;
        Some(Duration::from_secs(lease_duration))
    }

    async fn login(&self, mount: &[String], role: (&str, &str), secret_key: &str) -> Result<Login, MintError> {
        let secret = self.server.secret(secret_key);
        let secret = secret.ok_or_else(|| MintError::lasting("the store has no secret for the login"))?;
        let secret =
            std::str::from_utf8(secret.expose()).map_err(|_| MintError::lasting("the secret is not in UTF-8"))?;
        let body = serde_json::to_vec(&HashMap::from([role, (secret_key, secret)]));
        let body = Zeroizing::new(body.map_err(|_| MintError::lasting("the login cannot be written"))?);
        let place = path(std::iter::once("auth").chain(mount.iter().map(String::as_str)).chain(["login"]));
        let LoginAnswer { auth } = parsed(&self.send(&StoreCall { method: Method::POST, place, body }, None).await?)?;
        let LoginAuth { client_token, lease_duration } = auth;
        if !(1..=MAX_TOKEN).contains(&client_token.len()) || !client_token.bytes().all(|byte| byte.is_ascii_graphic()) {
            return Err(MintError::lasting("the token of the login is not one"));
        }
        // A token without an end has the duration 0.
        let life = if lease_duration == 0 { MAX_LOGIN } else { Duration::from_secs(lease_duration) };
        Ok(Login::new(Secret::new(client_token.as_bytes().to_vec()), life))
    }

    /// Creates a secret with a lease.
    async fn create(&self, place: &str) -> Result<Lease, StoreFailure> {
        self.extend_login().await;
        let (answer, token_end) = self.ask::<LeaseAnswer>(&StoreCall::get(place.to_owned())).await?;
        let members = answer.data.ok_or_else(|| lasting("the item has no fields"))?;
        if answer.lease_duration == 0 {
            return Err(lasting("the secret has no lease, so its engine is not a dynamic one"));
        }
        let id = Some(answer.lease_id).filter(|id| answer.renewable && !id.is_empty());
        let (now, granted) = (Instant::now(), bounded(answer.lease_duration, token_end.as_ref()));
        Ok(Lease { members, id, created: now, granted, at: now, token_end })
    }

    /// Extends a lease. Returns its new life.
    async fn renew(&self, lease: &Lease) -> Result<Duration, StoreFailure> {
        let refused = || StoreFailure {
            status: Some(StatusCode::BAD_REQUEST),
            error: MintError::new("the lease cannot be extended"),
        };
        let id = lease.id.as_ref().ok_or_else(refused)?;
        self.extend_login().await;
        let body = serde_json::json!({ "lease_id": id.as_str(), "increment": lease.granted.as_secs() });
        let place = path(["sys", "leases", "renew"]);
        let call = StoreCall { method: Method::PUT, place, body: Zeroizing::new(body.to_string().into_bytes()) };
        let (answer, _) = self.ask::<LeaseAnswer>(&call).await?;
        let granted = bounded(answer.lease_duration, lease.token_end.as_ref());
        // Near its maximum, a lease is extended by less and less, and so is its token.
        if granted < lease.granted / 2 { Err(refused()) } else { Ok(granted) }
    }
}

/// Returns the life of a lease, which ends with its token.
fn bounded(seconds: u64, token_end: Option<&TokenEnd>) -> Duration {
    let stated = Duration::from_secs(seconds);
    token_end.map_or(stated, |end| stated.min(end.left()))
}

fn lasting(reason: &str) -> StoreFailure {
    MintError::lasting(reason).into()
}

//! Fetches access tokens from the token endpoints of the configuration. Redirects are not followed.

mod answer;
mod assertion;
mod request;

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{CONTENT_TYPE, DATE, RETRY_AFTER};
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use zeroize::Zeroizing;

use self::answer::Answer;
use self::assertion::ClockSkew;
use super::own_server::{OwnServerDialer, OwnServers, ServerAddress};
use super::vault;
use crate::model::secret::Secret;
use crate::policy::hook_url::HookUrl;
use crate::policy::mint::{MintRecipe, TokenGrant};
use crate::policy::settings::Vault;
use crate::stages::forward::EarlyAnswer;
use crate::stages::mint::{IssuedToken, Issuer, MintError};
use crate::stages::pin::OwnServer;

/// The time limit for a connection with TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for a request, up to the end of the response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// The maximum size of a response's head, and of its body, in bytes.
const MAX_RESPONSE: usize = 64 * 1024;
/// A clock that differs more than this is noticed, in seconds. Assertions are valid a little earlier than now.
const MIN_SKEW: i64 = 20;

/// The token endpoints of the configuration.
pub(super) struct TokenEndpoints {
    dialer: OwnServerDialer,
    vault: Vault,
    /// How much the clocks of endpoints differ from ours. There are as many as the configuration names.
    skews: Mutex<HashMap<String, ClockSkew>>,
}

impl TokenEndpoints {
    pub(super) fn new(own_servers: &OwnServers<'_>, vault: &Vault) -> Self {
        Self { dialer: own_servers.dialer(), vault: vault.clone(), skews: Mutex::default() }
    }

    pub(super) fn issuer(self) -> Issuer {
        let this = Arc::new(self);
        Arc::new(move |recipe| {
            let this = this.clone();
            Box::pin(async move { this.issue(&recipe).await })
        })
    }

    /// Fetches a token. A refresh token that replaces the one used is in the vault when this returns.
    async fn issue(&self, recipe: &Arc<MintRecipe>) -> Result<IssuedToken, MintError> {
        let used = self.with_stored_token(recipe).await?;
        let is_asserted = used.has_assertion();
        let mut asked = self.ask(&used).await?;
        if is_asserted && asked.has_new_skew && asked.response.status().is_client_error() {
            // Perhaps because of a wrong clock, ours or the endpoint's.
            asked = self.ask(&used).await?;
        }
        let Asked { response, skew, .. } = asked;
        let now = skew.applied_to(SystemTime::now());
        let answer = read_answer(response, &used, now).await?;
        let Answer { token, life, refresh_token } = answer;
        let next = match (refresh_token, Arc::ptr_eq(&used, recipe)) {
            (Some(token), _) => Some(self.store(&used, token).await?),
            (None, true) => None,
            (None, false) => Some(used.clone()),
        };
        Ok(IssuedToken { value: token, life: life.unwrap_or(used.assumed_life), next })
    }

    /// Returns the recipe with the refresh token that the vault has now: another process may have replaced it.
    async fn with_stored_token(&self, recipe: &Arc<MintRecipe>) -> Result<Arc<MintRecipe>, MintError> {
        let TokenGrant::RefreshToken { token, workspace, name } = &recipe.grant else { return Ok(recipe.clone()) };
        let (place, workspace, name) = (self.vault.clone(), workspace.clone(), name.clone());
        let read = spawn_blocking(move || vault::vault(&place).get(&workspace, &name)).await;
        let stored = read.map_err(|_| MintError::new("the vault cannot be read"))?;
        let stored = stored.map_err(|error| MintError::new(format!("the vault cannot be read: {error}")))?;
        match stored {
            None => Err(MintError::lasting("the vault no longer has the refresh token")),
            Some(stored) if stored.expose() == token.secret().expose() => Ok(recipe.clone()),
            Some(stored) => Ok(Arc::new(recipe.with_refresh_token(stored))),
        }
    }

    /// Stores a new refresh token, before the access token that came with it is used. Returns the recipe with it.
    async fn store(&self, recipe: &MintRecipe, new: Secret) -> Result<Arc<MintRecipe>, MintError> {
        let TokenGrant::RefreshToken { workspace, name, token } = &recipe.grant else {
            return Err(MintError::lasting("the endpoint sent a refresh token that nobody asked for"));
        };
        if token.secret().expose() == new.expose() {
            return Ok(Arc::new(recipe.clone()));
        }
        let (place, workspace, name) = (self.vault.clone(), workspace.clone(), name.clone());
        let copy = Secret::new(new.expose().to_vec());
        let stored = spawn_blocking(move || vault::vault(&place).set(&workspace, &name, copy)).await;
        let stored = stored.map_err(|_| MintError::new("the vault cannot be written"))?;
        stored.map_err(|error| {
            MintError::new(format!("the new refresh token is lost: the vault cannot be written: {error}"))
        })?;
        Ok(Arc::new(recipe.with_refresh_token(new)))
    }

    /// Sends a request, with the time by the endpoint's clock.
    async fn ask(&self, recipe: &Arc<MintRecipe>) -> Result<Asked, MintError> {
        let host = recipe.url.to_string();
        let known = self.skews.lock().get(&host).copied().unwrap_or_default();
        let (signed, now) = (recipe.clone(), known.applied_to(SystemTime::now()));
        // Signing takes milliseconds.
        let request = spawn_blocking(move || request::build(&signed, now)).await;
        let request = request.map_err(|_| MintError::new("the request could not be built"))??;
        let response = self.send(&recipe.url, request).await?;
        let found = date(response.headers()).map(|date| ClockSkew::between(SystemTime::now(), date));
        let new = found.filter(|found| found.differs_from(known, MIN_SKEW));
        if let Some(new) = new {
            self.skews.lock().insert(host, new);
        }
        Ok(Asked { response, skew: new.unwrap_or(known), has_new_skew: new.is_some() })
    }

    async fn send(&self, url: &HookUrl, request: Request<Full<Bytes>>) -> Result<Response<Incoming>, MintError> {
        let HookUrl { host, port, is_tls, .. } = url;
        let address = ServerAddress { server: OwnServer::TokenEndpoint, host, port: *port, is_tls: *is_tls };
        let unreachable = |error: io::Error| MintError::new(format!("the endpoint cannot be reached: {error}"));
        let no_answer = || MintError::new("the endpoint did not answer in time");
        let opened = timeout(CONNECT_TIMEOUT, self.dialer.connect(&address)).await;
        let stream = opened.map_err(|_| no_answer())?.map_err(unreachable)?;
        // The text of hyper's errors has no data of the server.
        let failed = |error: hyper::Error| MintError::new(format!("the connection failed: {error}"));
        let sent = timeout(ANSWER_TIMEOUT, async {
            let stream = TokioIo::new(EarlyAnswer::new(stream));
            let handshake = http1::Builder::new().max_buf_size(MAX_RESPONSE).handshake(stream);
            let (mut sender, driver) = handshake.await.map_err(failed)?;
            let driver = AbortOnDropHandle::new(tokio::spawn(driver));
            let mut response = sender.send_request(request).await.map_err(failed)?;
            // The connection must live as long as its response.
            response.extensions_mut().insert(Arc::new(Connection { _sender: sender, _driver: driver }));
            Ok(response)
        });
        sent.await.map_err(|_| no_answer())?
    }
}

/// A response, and the difference between the clocks.
struct Asked {
    response: Response<Incoming>,
    skew: ClockSkew,
    /// The request was made with another difference.
    has_new_skew: bool,
}

/// A connection, open until its response has been read.
struct Connection {
    _sender: http1::SendRequest<Full<Bytes>>,
    _driver: AbortOnDropHandle<hyper::Result<()>>,
}

/// Reads the whole response.
async fn read_answer(response: Response<Incoming>, recipe: &MintRecipe, now: SystemTime) -> Result<Answer, MintError> {
    let (head, body) = response.into_parts();
    let retry_after = retry_after(&head.headers);
    let read = timeout(ANSWER_TIMEOUT, Limited::new(body, MAX_RESPONSE).collect()).await;
    let read = read.map_err(|_| MintError::new("the endpoint did not answer in time"))?;
    let body = read.map_err(|_| MintError::new("the answer is too long or incomplete"))?.to_bytes();
    let body = Zeroizing::new(body.to_vec());
    if !head.status.is_success() {
        let reason = match answer::registered_error(&body) {
            Some(error) => format!("the endpoint answered {}: {error}", head.status.as_u16()),
            None => format!("the endpoint answered {}", head.status.as_u16()),
        };
        let passes = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&head.status);
        let is_lasting = head.status.is_client_error() && !passes;
        return Err(MintError { reason, retry_after, is_lasting });
    }
    let is_json = head.headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).is_some_and(|kind| {
        let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        essence == "application/json" || essence.ends_with("+json")
    });
    if !is_json {
        return Err(MintError::lasting("the answer is not JSON"));
    }
    answer::parse(&body, recipe, now).map_err(MintError::lasting)
}

fn date(headers: &HeaderMap) -> Option<SystemTime> {
    httpdate::parse_http_date(headers.get(DATE)?.to_str().ok()?).ok()
}

/// Returns the seconds of `Retry-After`. Its other form, a date, is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}

//! Fetches access tokens from the token endpoints of the configuration. Redirects are not followed.

mod answer;
mod assertion;
mod request;

use std::collections::HashMap;
use std::sync::Arc;
use std::time::SystemTime;

use http::{Response, StatusCode};
use hyper::body::Incoming;
use parking_lot::Mutex;
use tokio::sync::{Mutex as AsyncMutex, OwnedMutexGuard};
use tokio::task::spawn_blocking;

use self::answer::Answer;
use super::clock_skew::{ClockSkew, ClockSkews};
use super::own_request::{OwnRequests, is_json, retry_after};
use super::own_server::OwnServers;
use crate::model::secret::Secret;
use crate::policy::mint::TokenLife;
use crate::policy::settings::Source;
use crate::policy::source::{SourceError, read_source, usable};
use crate::policy::token_request::{StoredSecret, TokenGrant, TokenRequest};
use crate::stages::mint::{IssuedToken, MintError};
use crate::stages::pin::OwnServer;

/// The maximum size of the body of most responses, in bytes.
const MAX_RESPONSE: usize = 64 * 1024;
/// The maximum size of a body from GitHub, which describes each repository of the token at length.
const MAX_GITHUB_RESPONSE: usize = 4 * 1024 * 1024;

/// The token endpoints of the configuration.
pub(super) struct TokenEndpoints {
    requests: OwnRequests,
    skews: ClockSkews,
    /// The refresh tokens, by workspace and name. There are as many as the configuration names.
    refresh_tokens: Mutex<HashMap<(String, String), Arc<RefreshToken>>>,
}

/// A refresh token, which one request at a time uses: a server may revoke one that is sent twice.
type RefreshToken = AsyncMutex<Option<Unsaved>>;

/// A refresh token that could not be stored, and the one that it replaces.
struct Unsaved {
    old: Secret,
    new: Secret,
}

/// A token of the grant that is in use, until the guard is dropped.
struct InUse {
    unsaved: OwnedMutexGuard<Option<Unsaved>>,
    stored: StoredSecret,
    _lock: Box<dyn Send>,
}

impl TokenEndpoints {
    pub(super) fn new(own_servers: &OwnServers<'_>) -> Self {
        let (dialer, server) = (own_servers.dialer(), OwnServer::TokenEndpoint);
        let requests = OwnRequests { dialer, server, name: "endpoint" };
        Self { requests, skews: ClockSkews::default(), refresh_tokens: Mutex::default() }
    }

    /// Fetches a token. A refresh token that replaces the one used is in the vault when this returns. Returns also the request for
    /// the next token, if it is not the same.
    pub(super) async fn issue(
        &self,
        recipe: &Arc<TokenRequest>,
    ) -> (Result<IssuedToken, MintError>, Option<Arc<TokenRequest>>) {
        let failed = |error| (Err(error), None);
        let mut in_use = match self.use_refresh_token(recipe).await {
            Ok(in_use) => in_use,
            Err(error) => return failed(error),
        };
        let used = match with_current_token(recipe).await {
            Ok(used) => used,
            Err(error) => return failed(error),
        };
        // A token that others have renewed is searched for from now on, whatever becomes of the request.
        let mut next = (!Arc::ptr_eq(&used, recipe)).then(|| used.clone());
        let (token, refresh_token) = match self.answer(&used).await {
            Ok(Answer { token, refresh_token }) => (token, refresh_token),
            Err(error) => (Err(error), None),
        };
        let token = match (refresh_token, &mut in_use) {
            (Some(new), Some(in_use)) => {
                let stored = store_refresh_token(in_use, &used, &new).await;
                next = Some(Arc::new(used.with_token(new)));
                stored.and(token)
            }
            _ => token,
        };
        let assumed = TokenLife::Assumed(used.assumed_life);
        let token = token.map(|(value, life)| {
            let life = life.map_or(assumed, TokenLife::Stated);
            IssuedToken { value, aws_key: None, life }
        });
        (token, next)
    }

    /// Waits until no other request uses the refresh token of the recipe, in this process or in another one. Stores first what
    /// could not be stored before: the old one must not be sent again.
    async fn use_refresh_token(&self, recipe: &TokenRequest) -> Result<Option<InUse>, MintError> {
        let TokenGrant::RefreshToken { stored, .. } = &recipe.grant else { return Ok(None) };
        let key = (stored.workspace.clone(), stored.name.clone());
        let token = self.refresh_tokens.lock().entry(key).or_default().clone();
        let mut unsaved = token.lock_owned().await;
        let place = stored.clone();
        let lock = spawn_blocking(move || place.store.lock(&place.workspace, &place.name)).await;
        let lock = lock.map_err(|_| MintError::new("the vault cannot be locked"))?;
        let lock = lock.map_err(|error| MintError::new(format!("the vault cannot be locked: {error}")))?;
        if let Some(Unsaved { old, new }) = unsaved.take() {
            let place = stored.clone();
            let saved = spawn_blocking(move || {
                let saved = place.store.replace(&place.workspace, &place.name, &old, &new);
                (saved, Unsaved { old, new })
            });
            let (saved, kept) = saved.await.map_err(|_| MintError::new("the vault cannot be written"))?;
            if let Err(error) = saved {
                *unsaved = Some(kept);
                return Err(MintError::new(format!("the new refresh token cannot be stored: {error}")));
            }
        }
        Ok(Some(InUse { unsaved, stored: stored.clone(), _lock: lock }))
    }

    /// Asks for a token, once more if the clocks differ.
    async fn answer(&self, recipe: &Arc<TokenRequest>) -> Result<Answer, MintError> {
        let is_asserted = recipe.has_assertion();
        let mut asked = self.ask(recipe).await?;
        if is_asserted && asked.has_new_skew && asked.response.status().is_client_error() {
            // Perhaps because of a wrong clock, ours or the endpoint's.
            asked = self.ask(recipe).await?;
        }
        let Asked { response, skew, .. } = asked;
        self.read_answer(response, recipe, skew.applied_to(SystemTime::now())).await
    }

    /// Sends a request, with the time by the endpoint's clock.
    async fn ask(&self, recipe: &Arc<TokenRequest>) -> Result<Asked, MintError> {
        let host = recipe.url.to_string();
        let known = self.skews.of(&host);
        let (signed, now) = (recipe.clone(), known.applied_to(SystemTime::now()));
        // Signing takes milliseconds.
        let request = spawn_blocking(move || request::build(&signed, now)).await;
        let request = request.map_err(|_| MintError::new("the request could not be built"))??;
        let response = self.requests.send(&recipe.url, request).await?;
        let new = self.skews.note(&host, response.headers(), known);
        Ok(Asked { response, skew: new.unwrap_or(known), has_new_skew: new.is_some() })
    }

    /// Reads the whole response.
    async fn read_answer(
        &self,
        response: Response<Incoming>,
        recipe: &TokenRequest,
        now: SystemTime,
    ) -> Result<Answer, MintError> {
        let (head, body) = response.into_parts();
        let retry_after = retry_after(&head.headers);
        let max = match recipe.grant {
            TokenGrant::GithubInstallation { .. } => MAX_GITHUB_RESPONSE,
            _ => MAX_RESPONSE,
        };
        let body = self.requests.read(body, max).await?;
        if !head.status.is_success() {
            let reason = match answer::registered_error(&body) {
                Some(error) => format!("the endpoint answered {}: {error}", head.status.as_u16()),
                None => format!("the endpoint answered {}", head.status.as_u16()),
            };
            let passes = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&head.status);
            let is_lasting = head.status.is_client_error() && !passes;
            return Err(MintError { reason, retry_after, is_lasting });
        }
        let mut answer = answer::parse(&body, recipe, now);
        if !is_json(&head.headers) {
            answer.token = Err(MintError::lasting("the answer is not JSON"));
        }
        Ok(answer)
    }
}

/// A response, and the difference between the clocks.
struct Asked {
    response: Response<Incoming>,
    skew: ClockSkew,
    /// The request was made with another difference.
    has_new_skew: bool,
}

/// Returns the recipe with the token that its source has now: the endpoint, another process or another service may have
/// replaced it.
async fn with_current_token(recipe: &Arc<TokenRequest>) -> Result<Arc<TokenRequest>, MintError> {
    if recipe.fetches("subject_token") {
        return Ok(recipe.clone());
    }
    let (token, stored, source) = match &recipe.grant {
        TokenGrant::RefreshToken { token, stored } => (token, Some(stored.clone()), None),
        TokenGrant::TokenExchange { subject_token, stored, source, .. } => {
            (subject_token, stored.clone(), Some(source.clone()))
        }
        _ => return Ok(recipe.clone()),
    };
    let read = spawn_blocking(move || match (stored, source) {
        (Some(StoredSecret { store, workspace, name }), _) => store.get(&workspace, &name).and_then(usable),
        (None, Some(source)) => read_source(&source, &|name| std::env::var(name).ok()),
        (None, None) => Err(SourceError::Missing("it has no source".to_owned())),
    });
    let read = read.await.map_err(|_| MintError::new("the token of the grant cannot be read"))?;
    let read = match read {
        // A variable of `exeat run` is not one of the daemon.
        Err(_) if matches!(&recipe.grant, TokenGrant::TokenExchange { source: Source::Env(_), .. }) => {
            return Ok(recipe.clone());
        }
        read => read.map_err(|error| MintError::lasting(format!("the token of the grant: {error}")))?,
    };
    let is_same = read.expose() == token.secret().expose();
    Ok(if is_same { recipe.clone() } else { Arc::new(recipe.with_token(read)) })
}

/// Stores a new refresh token, before the access token that came with it is used.
async fn store_refresh_token(in_use: &mut InUse, used: &TokenRequest, new: &Secret) -> Result<(), MintError> {
    let copy = |secret: &Secret| Secret::new(secret.expose().to_vec());
    let Some(old) = used.changing_token().map(|held| copy(held.secret())) else { return Ok(()) };
    if old.expose() == new.expose() {
        return Ok(());
    }
    let (place, kept) = (in_use.stored.clone(), Unsaved { old, new: copy(new) });
    let stored = spawn_blocking(move || {
        let stored = place.store.replace(&place.workspace, &place.name, &kept.old, &kept.new);
        (stored, kept)
    });
    let (stored, kept) = stored.await.map_err(|_| MintError::new("the vault cannot be written"))?;
    match stored {
        Ok(true) => Ok(()),
        Ok(false) => Err(MintError::new("the refresh token in the vault was changed meanwhile")),
        Err(error) => {
            *in_use.unsaved = Some(kept);
            Err(MintError::new(format!("the new refresh token cannot be stored: {error}")))
        }
    }
}

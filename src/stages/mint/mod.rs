//! Provides valid tokens for requests to hosts that minted credentials are sent to: fetches one if there is none, and renews
//! one that will expire soon while requests still go there.
//!
//! A token that was fetched is part of a new policy, so it is searched for and redacted before it is used.

mod backoff;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant, SystemTime};

use futures_util::future::BoxFuture;
use http::StatusCode;
use parking_lot::Mutex;
use prometheus_client::metrics::counter::Counter;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::backoff::{Backoff, Rejections};
use super::authorize::Grant;
use crate::audit::mint_line::MintLine;
use crate::audit::record::Record;
use crate::audit::sink::Sink;
use crate::model::name::CredentialName;
use crate::model::refusal::{Fail, Stage, Verdict};
use crate::model::secret::Secret;
use crate::policy::credential::Credential;
use crate::policy::mint::{Freshness, MAX_REPLACED, MintKey, MintRecipe, MintedValue, Placing, TokenGrant, TokenLife};
use crate::policy::store::PolicyStore;

/// The longest time for one token, up to its place in the policy. Its parts have limits of their own.
const MAX_FLIGHT: Duration = Duration::from_secs(120);
/// How long a request waits for a token that it can do without.
const SHORT_WAIT: Duration = Duration::from_secs(2);
/// Tokens with a shorter life are fetched with increasing intervals: each is a new policy.
const SHORT_LIFE: Duration = Duration::from_secs(60);

/// Fetches a token by a recipe.
pub type Issuer = Arc<dyn Fn(Arc<MintRecipe>) -> BoxFuture<'static, Issued> + Send + Sync>;

/// The result of a request to a token endpoint.
pub struct Issued {
    /// The token, or why there is none.
    pub token: Result<IssuedToken, MintError>,
    /// The recipe for the next token, if it is not the one that was used.
    pub next: Option<Arc<MintRecipe>>,
}

/// A token, as its endpoint issued it.
pub struct IssuedToken {
    /// The token.
    pub value: Secret,
    /// Its life.
    pub life: TokenLife,
}

/// Why a token was not fetched. The text is the proxy's own.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MintError {
    /// The reason, for the log.
    pub reason: String,
    /// How long the endpoint asks to wait.
    pub retry_after: Option<Duration>,
    /// The same request would fail again soon.
    pub is_lasting: bool,
}

/// The tokens that are being fetched, and the attempts that failed.
pub struct Mints {
    policies: Arc<PolicyStore>,
    audit: Arc<Sink>,
    issuer: Issuer,
    /// A token that replaces its own refresh token must not be lost at the end of the process.
    tracker: TaskTracker,
    /// Nothing is fetched after it.
    drain: CancellationToken,
    states: Mutex<HashMap<MintKey, State>>,
    metrics: MintMetrics,
}

/// The numbers of tokens since the start.
#[derive(Default)]
pub struct MintMetrics {
    /// Tokens that were fetched.
    pub minted: Counter,
    /// Attempts that failed.
    pub failed: Counter,
}

/// The state of a minted credential, for operators.
pub struct TokenReport {
    /// The credential.
    pub credential: CredentialName,
    /// The workspace of its tasks.
    pub workspace: String,
    /// The token endpoint, without its path.
    pub endpoint: String,
    /// The end of the token's life, if there is a token.
    pub expires: Option<SystemTime>,
    /// Why the last attempt to fetch one has failed.
    pub failure: Option<String>,
}

/// The state of one credential.
#[derive(Default)]
struct State {
    /// The recipe of the flight and of the failures.
    recipe: [u8; 32],
    flight: Option<Flight>,
    backoff: Backoff,
    rejections: Rejections,
    /// Why the last attempt has failed.
    failure: Option<String>,
}

/// A fetch of one token, for all requests that wait for it.
#[derive(Clone, Default)]
struct Flight {
    /// Cancelled at its end, whatever ends it.
    over: CancellationToken,
    has_token: Arc<AtomicBool>,
}

/// The need of a request for another token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Need {
    /// There is none: the token is fresh.
    Nothing,
    /// The token will expire soon.
    Renewal,
    /// The token has expired, and the next one is there.
    Promotion,
    /// An origin has rejected the token, which may have another reason.
    Replacement,
    /// There is no token.
    Token,
}

/// A minted token that is sent in a request.
pub struct SentToken {
    key: MintKey,
    minted: Instant,
}

impl Mints {
    /// Creates the state. Nothing is fetched yet, and nothing once `drain` is cancelled.
    #[must_use]
    pub fn new(
        policies: Arc<PolicyStore>,
        audit: Arc<Sink>,
        issuer: Issuer,
        (tracker, drain): (TaskTracker, CancellationToken),
    ) -> Self {
        Self { policies, audit, issuer, tracker, drain, states: Mutex::default(), metrics: MintMetrics::default() }
    }

    /// Returns the numbers of tokens since the start.
    #[must_use]
    pub fn metrics(&self) -> &MintMetrics {
        &self.metrics
    }

    /// Returns the state of each minted credential of the policy in force.
    #[must_use]
    pub fn report(&self) -> Vec<TokenReport> {
        let policy = self.policies.snapshot();
        let states = self.states.lock();
        let report = |credential: &Arc<Credential>| {
            let (key, recipe) = (credential.mint_key()?, credential.recipe()?);
            let is_usable = matches!(credential.freshness(), Freshness::Fresh | Freshness::Aging);
            let value = credential.minted_value().filter(|_| is_usable);
            let failure = states.get(&key).and_then(|state| state.failure.clone());
            let MintKey { name, workspace } = key;
            let (endpoint, expires) = (recipe.url.to_string(), value.map(|value| value.expires()));
            Some(TokenReport { credential: name, workspace, endpoint, expires, failure })
        };
        policy.credentials().filter_map(report).collect()
    }

    /// Notes the status of a response. A token that is rejected with 401 is replaced before the next request. Nothing is
    /// repeated.
    pub fn note_status(&self, sent: Option<SentToken>, status: StatusCode) {
        let Some(SentToken { key, minted }) = sent.filter(|_| status == StatusCode::UNAUTHORIZED) else { return };
        let policy = self.policies.snapshot();
        let current = policy.minted(&key).and_then(|credential| credential.minted_value());
        // It may have been replaced while the request was in progress.
        if current.is_some_and(|current| current.minted() == minted) {
            self.states.lock().entry(key).or_default().rejections.note(minted);
        }
    }

    fn need(&self, credential: &Credential, key: &MintKey) -> Need {
        let is_rejected = |minted: Instant| {
            // The others may still be valid, and are searched for up to their end.
            credential.earlier_count() < MAX_REPLACED
                && self.states.lock().get(key).is_some_and(|state| state.rejections.is_of(minted))
        };
        match (credential.freshness(), credential.minted_value()) {
            (Freshness::Absent, _) | (_, None) => Need::Token,
            (Freshness::Replaceable, _) => Need::Promotion,
            (_, Some(value)) if is_rejected(value.minted()) => Need::Replacement,
            (Freshness::Aging, _) => Need::Renewal,
            (Freshness::Fresh, _) => Need::Nothing,
        }
    }

    /// Returns the fetch in progress, or starts one; true if it was started. `None` if the last attempt has failed a short time
    /// ago.
    fn flight(self: &Arc<Self>, key: &MintKey, recipe: &Arc<MintRecipe>, placing: Placing) -> Option<(Flight, bool)> {
        let fingerprint = recipe.fingerprint();
        let mut states = self.states.lock();
        let state = states.entry(key.clone()).or_default();
        if state.recipe != fingerprint {
            // The failures of another recipe say nothing of this one.
            (state.recipe, state.flight, state.backoff) = (fingerprint, None, Backoff::default());
            state.failure = None;
        }
        if let Some(flight) = state.flight.as_ref().filter(|flight| !flight.over.is_cancelled()) {
            return Some((flight.clone(), false));
        }
        if state.backoff.is_waiting() || self.drain.is_cancelled() {
            return None;
        }
        let (this, key, recipe, flight) = (self.clone(), key.clone(), recipe.clone(), Flight::default());
        state.flight = Some(flight.clone());
        let Flight { over, has_token } = flight.clone();
        let must_end = matches!(recipe.grant, TokenGrant::RefreshToken { .. });
        // It goes on without the request that started it.
        let fetch = async move {
            let _over = over.drop_guard();
            has_token.store(this.fetch(key, recipe, placing).await, Ordering::Release);
        };
        if must_end {
            self.tracker.spawn(fetch);
        } else {
            tokio::spawn(fetch);
        }
        Some((flight, true))
    }

    /// Fetches a token and puts it into the policy.
    async fn fetch(self: Arc<Self>, key: MintKey, recipe: Arc<MintRecipe>, placing: Placing) -> bool {
        let began = Instant::now();
        let issued = timeout(MAX_FLIGHT, (self.issuer)(recipe.clone())).await;
        let late = || Issued { token: Err(MintError::new("no token in time")), next: None };
        let Issued { token, next } = issued.unwrap_or_else(|_| late());
        let token = match token {
            Ok(token) => checked(token).await,
            Err(error) => Err(error),
        };
        let mut line = MintLine::new(&key.name, &key.workspace, &recipe.url, began.elapsed());
        match &token {
            Ok((value, _)) => line.set_expiry(value.expires()),
            Err(error) => line.set_error(&error.reason),
        }
        let is_written = line.write(&self.audit).await.is_ok();
        // A token is put into the policy only if the log says so.
        let token =
            token.and_then(
                |token| {
                    if is_written { Ok(token) } else { Err(MintError::new("the audit log cannot be written")) }
                },
            );
        let (policies, place) = (self.policies.clone(), key.clone());
        let (used, after) = (recipe.clone(), next.clone().unwrap_or_else(|| recipe.clone()));
        let fingerprint = recipe.fingerprint();
        match token {
            Ok((value, is_short)) => {
                // False if the configuration has changed in the meantime. The next request fetches another one.
                let (used_for, next_for) = (used.clone(), after.clone());
                let add = move || policies.add_minted(&place, (&used_for, &next_for), (&value, placing));
                let is_added = spawn_blocking(add).await.unwrap_or(false);
                self.metrics.minted.inc();
                self.note(&key, fingerprint, &after, |state| {
                    state.failure = None;
                    match is_short {
                        true => state.backoff.failed(None, false),
                        false => state.backoff = Backoff::default(),
                    }
                });
                is_added
            }
            Err(error) => {
                if next.is_some() {
                    // The new secret is searched for, although there is no token.
                    let next_for = after.clone();
                    let replace = move || policies.replace_recipe(&place, &used, &next_for);
                    let _ = spawn_blocking(replace).await;
                }
                let (credential, workspace, reason) = (key.name.as_str(), &*key.workspace, &*error.reason);
                tracing::warn!(credential, workspace, reason, "no token could be minted");
                self.metrics.failed.inc();
                self.note(&key, fingerprint, &after, |state| {
                    state.backoff.failed(error.retry_after, error.is_lasting);
                    state.failure = Some(error.reason);
                });
                false
            }
        }
    }

    /// Notes the result of a recipe, unless another one is in use by now.
    fn note(&self, key: &MintKey, used: [u8; 32], next: &MintRecipe, note: impl FnOnce(&mut State)) {
        let mut states = self.states.lock();
        if let Some(state) = states.get_mut(key).filter(|state| state.recipe == used) {
            state.recipe = next.fingerprint();
            note(state);
        }
    }

    /// Puts the next token into use, unless another request has done it or the configuration has changed.
    async fn promote(&self, key: &MintKey, recipe: &Arc<MintRecipe>) {
        let (policies, key, recipe) = (self.policies.clone(), key.clone(), recipe.clone());
        let _ = spawn_blocking(move || policies.promote_next(&key, &recipe)).await;
    }

    /// Makes sure that a credential has a token. Returns why it has none.
    async fn provide(
        self: &Arc<Self>,
        credential: &Credential,
        is_selected: bool,
        within: Option<Duration>,
    ) -> Result<(), &'static str> {
        let (Some(key), Some(recipe)) = (credential.mint_key(), credential.recipe()) else { return Ok(()) };
        let need = self.need(credential, &key);
        let placing = match need {
            Need::Nothing => return Ok(()),
            Need::Renewal => Placing::AfterCurrent,
            Need::Replacement | Need::Token => Placing::Now,
            Need::Promotion => {
                self.promote(&key, recipe).await;
                return Ok(());
            }
        };
        let flight = self.flight(&key, recipe, placing);
        let limit = match (need, flight.as_ref()) {
            // The token is renewed beside the request, and a rejected one may still be valid.
            (Need::Renewal, _) | (Need::Replacement, None | Some((_, false))) => return Ok(()),
            (Need::Replacement, Some(_)) => recipe.mint_timeout.min(SHORT_WAIT),
            _ if is_selected => recipe.mint_timeout,
            _ => recipe.mint_timeout.min(SHORT_WAIT),
        };
        let Some((flight, _)) = flight else { return Err("the last attempt to mint a token has failed") };
        let ended = timeout(within.map_or(limit, |within| limit.min(within)), flight.end()).await;
        match ended {
            Ok(true) => {
                // The old one may have expired after the renewal had begun.
                let policy = self.policies.snapshot();
                let now = policy.minted(&key).filter(|now| self.need(now, &key) == Need::Promotion);
                if let Some(recipe) = now.and_then(|now| now.recipe()) {
                    self.promote(&key, recipe).await;
                }
                Ok(())
            }
            _ if need == Need::Replacement => Ok(()),
            Ok(false) => Err("no token could be minted"),
            Err(_) => Err("no token within mint_timeout"),
        }
    }
}

impl Flight {
    /// Returns whether there is a token at its end.
    async fn end(self) -> bool {
        self.over.cancelled().await;
        self.has_token.load(Ordering::Acquire)
    }
}

/// Checks a token, and returns whether its life is so short that the next fetch has to wait.
async fn checked(IssuedToken { value, life }: IssuedToken) -> Result<(Arc<MintedValue>, bool), MintError> {
    let (TokenLife::Stated(time) | TokenLife::Assumed(time)) = life;
    let spread = backoff::random_share();
    // Whether it can be guessed is estimated, which is slow.
    let value = spawn_blocking(move || MintedValue::new(value, life, spread)).await;
    let value = value.map_err(|_| MintError::new("the token could not be checked"))?;
    let value = value.map_err(|error| MintError::lasting(error.to_string()))?;
    Ok((Arc::new(value), time < SHORT_LIFE))
}

impl MintError {
    /// Creates an error that may pass.
    #[must_use]
    pub fn new(reason: impl Into<String>) -> Self {
        Self { reason: reason.into(), retry_after: None, is_lasting: false }
    }

    /// Creates an error that the same request would have again.
    #[must_use]
    pub fn lasting(reason: impl Into<String>) -> Self {
        Self { is_lasting: true, ..Self::new(reason) }
    }
}

/// Waits until the minted credentials that may be sent to the destination of a request have tokens, the selected one longer than
/// others. The policy in force has them then. So an exchange that could show a token began after it was there.
///
/// # Errors
/// [`Fail::CredentialUnavailable`] if the selected credential has no token within `mint_timeout`, or after a failure a short
/// time ago.
pub async fn provide_tokens(
    mints: &Arc<Mints>,
    grant: &Grant,
    began: tokio::time::Instant,
    record: &mut Record,
) -> Verdict<()> {
    let needed: Vec<(Arc<Credential>, bool)> = {
        let policy = mints.policies.snapshot();
        let Some(task) = policy.task(grant.admitted().caller().task()) else { return Ok(()) };
        let selected = grant.selected_credential().map(|chosen| chosen.credential.name());
        let credentials = task.credentials().minted_for(grant.admitted().target().host());
        credentials.map(|credential| (credential.clone(), Some(credential.name()) == selected)).collect()
    };
    if needed.is_empty() {
        return Ok(());
    }
    record.enter(Stage::Mint);
    let left = grant.timeouts().request.map(|total| total.saturating_sub(began.elapsed()));
    for (credential, is_selected) in needed {
        if let Err(why) = mints.provide(&credential, is_selected, left).await
            && is_selected
        {
            record.rule(why);
            return Err(Fail::CredentialUnavailable.into());
        }
    }
    Ok(())
}

/// Returns the minted token of a request, for [`Mints::note_status`].
#[must_use]
pub fn sent_token(grant: &Grant) -> Option<SentToken> {
    let credential = &grant.selected_credential()?.credential;
    Some(SentToken { key: credential.mint_key()?, minted: credential.minted_value()?.minted() })
}

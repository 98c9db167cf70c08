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
use crate::policy::aws::AwsKey;
use crate::policy::credential::Credential;
use crate::policy::mint::{Freshness, MAX_REPLACED, MintKey, MintRecipe, MintedValue, Placing, TokenLife};
use crate::policy::store::PolicyStore;

/// How long a request waits for a token that it can do without.
const SHORT_WAIT: Duration = Duration::from_secs(2);
/// Tokens with a shorter life are fetched with increasing intervals: each is a new policy.
const SHORT_LIFE: Duration = Duration::from_secs(60);

/// Fetches a token by a recipe.
pub type Issuer = Arc<dyn Fn(Arc<MintRecipe>, Purpose) -> BoxFuture<'static, Issued> + Send + Sync>;

/// The purpose of a fetch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    /// There is none.
    First,
    /// The token that is there will expire soon, and may be extended.
    Renewal,
    /// The configuration was read again. The store may have another value.
    Confirmation,
    /// The token that is there was rejected.
    Replacement,
}

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
    /// The rest of the key, if it is one of AWS.
    pub aws_key: Option<AwsKey>,
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
    /// The time at which the token was minted, if there is one.
    pub minted: Option<SystemTime>,
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
    /// The time at which the configuration was read.
    configured_at: Option<Instant>,
    flight: Option<Flight>,
    backoff: Backoff,
    rejections: Rejections,
    /// Why the last attempt has failed.
    failure: Option<String>,
}

/// A fetch of one token, for all requests that wait for it.
#[derive(Clone)]
struct Flight {
    began: Instant,
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
    /// The configuration was read again since the value was fetched. The store may have another one.
    Confirmation,
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
            let is_usable = !matches!(credential.freshness(), Freshness::Absent | Freshness::Replaceable);
            let value = credential.minted_value().filter(|_| is_usable);
            let failure = states.get(&key).and_then(|state| state.failure.clone());
            let MintKey { name, workspace } = key;
            let (endpoint, expires) = (recipe.server(), value.map(|value| value.expires()));
            let minted = value.map(|value| value.minted_at());
            Some(TokenReport { credential: name, workspace, endpoint, minted, expires, failure })
        };
        policy.credentials().filter_map(report).collect()
    }

    /// Notes the status of a response. A token that is rejected with 401 is replaced before the next request. Nothing is
    /// repeated.
    pub fn note_status(&self, sent: Vec<SentToken>, status: StatusCode) {
        if status == StatusCode::UNAUTHORIZED {
            sent.into_iter().for_each(|sent| self.note_rejection(sent));
        }
    }

    fn note_rejection(&self, SentToken { key, minted }: SentToken) {
        let policy = self.policies.snapshot();
        let current = policy.minted(&key).and_then(|credential| credential.minted_value());
        // It may have been replaced while the request was in progress.
        if current.is_some_and(|current| current.minted() == minted) {
            self.states.lock().entry(key).or_default().rejections.note(minted);
        }
    }

    /// Decides what a request needs, and starts a fetch if one is needed and none is in progress. Both are done at once, so that
    /// of many requests one starts it.
    fn begin(self: &Arc<Self>, key: &MintKey) -> Option<Beginning> {
        let mut states = self.states.lock();
        // A fetch puts its token into the policy before it ends.
        let policy = self.policies.snapshot();
        let credential = policy.minted(key)?;
        let recipe = credential.recipe()?;
        let state = states.entry(key.clone()).or_default();
        let fingerprint = credential.fingerprint()?;
        if state.recipe != fingerprint {
            // The failures of another recipe say nothing of this one.
            (state.recipe, state.flight, state.backoff) = (fingerprint, None, Backoff::default());
            state.failure = None;
        }
        if state.configured_at != credential.configured_at() {
            // An operator may have mended what has failed.
            (state.configured_at, state.backoff) = (credential.configured_at(), Backoff::default());
        }
        let need = state.need(credential);
        let purpose = match need {
            Need::Nothing | Need::Promotion => None,
            Need::Renewal => Some(Purpose::Renewal),
            Need::Confirmation => Some(Purpose::Confirmation),
            Need::Replacement => Some(Purpose::Replacement),
            Need::Token => Some(Purpose::First),
        };
        let running = state.flight.as_ref().filter(|flight| !flight.over.is_cancelled()).cloned();
        let (flight, is_new) = match (purpose, running) {
            (None, _) => (None, false),
            (Some(_), Some(running)) => (Some(running), false),
            (Some(_), None) if state.backoff.is_waiting() || self.drain.is_cancelled() => (None, false),
            (Some(purpose), None) => (Some(self.start(key, recipe, purpose, state)), true),
        };
        Some(Beginning { need, recipe: recipe.clone(), flight, is_new, rejected: state.rejections.last() })
    }

    fn start(self: &Arc<Self>, key: &MintKey, recipe: &Arc<MintRecipe>, purpose: Purpose, state: &mut State) -> Flight {
        let (this, key, recipe, flight) = (self.clone(), key.clone(), recipe.clone(), Flight::begin());
        state.flight = Some(flight.clone());
        let Flight { over, has_token, .. } = flight.clone();
        let must_end = recipe.replaces_secret();
        // It goes on without the request that started it.
        let fetch = async move {
            let _over = over.drop_guard();
            has_token.store(this.fetch(key, recipe, purpose).await, Ordering::Release);
        };
        if must_end {
            self.tracker.spawn(fetch);
        } else {
            tokio::spawn(fetch);
        }
        flight
    }

    /// Fetches a token and puts it into the policy.
    async fn fetch(self: Arc<Self>, key: MintKey, recipe: Arc<MintRecipe>, purpose: Purpose) -> bool {
        let began = Instant::now();
        // Each of its parts has a time limit. It is not cancelled: a refresh token that was replaced would be lost.
        let Issued { token, next } = (self.issuer)(recipe.clone(), purpose).await;
        let token = match token {
            Ok(token) => self.checked(&key, token, began).await,
            Err(error) => Err(error),
        };
        let mut line = MintLine::new(&key.name, &key.workspace, &recipe.server(), began.elapsed());
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
            Ok((value, life)) => {
                let placing = match (purpose, life) {
                    (Purpose::First | Purpose::Replacement, _) => Placing::Now,
                    (Purpose::Confirmation, TokenLife::Kept { .. }) => Placing::Now,
                    (Purpose::Renewal, TokenLife::Kept { .. }) => Placing::Soon,
                    // Its server says that the earlier one is still valid.
                    (_, TokenLife::Stated(_) | TokenLife::Assumed(_)) => Placing::AfterCurrent,
                };
                let is_known = next.is_none() && self.confirm(&key, fingerprint, &value);
                // One that is not known is a new policy.
                let is_short = !is_known && life.time() < SHORT_LIFE && !matches!(life, TokenLife::Kept { .. });
                // False if the configuration has changed in the meantime. The next request fetches another one.
                let (used_for, next_for) = (used.clone(), next.clone());
                let add = move || policies.add_minted(&place, (&used_for, next_for.as_ref()), (&value, placing));
                let is_added = is_known || spawn_blocking(add).await.unwrap_or(false);
                self.metrics.minted.inc();
                self.note(&key, fingerprint, &after, |state| {
                    state.failure = None;
                    match is_short {
                        true => state.backoff.short_lived(life.time()),
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

    /// Checks a token for its credential, and returns it with its life.
    async fn checked(
        &self,
        key: &MintKey,
        IssuedToken { value, aws_key, life }: IssuedToken,
        asked: Instant,
    ) -> Result<(Arc<MintedValue>, TokenLife), MintError> {
        let credential = self.policies.snapshot().minted(key).cloned();
        let credential = credential.ok_or_else(|| MintError::new("there is no such credential any more"))?;
        let spread = backoff::random_share();
        // Whether it can be guessed is estimated, which is slow.
        let value = spawn_blocking(move || credential.checked((value, aws_key), (asked, life), spread)).await;
        let value = value.map_err(|_| MintError::new("the token could not be checked"))?;
        let value = value.map_err(|error| MintError::lasting(error.to_string()))?;
        if value.is_over() {
            return Err(MintError::new("the token was over when it came"));
        }
        Ok((Arc::new(value), life))
    }

    /// Takes over the times of a value that is in use already. Returns false if it is another one.
    fn confirm(&self, key: &MintKey, fingerprint: [u8; 32], value: &MintedValue) -> bool {
        let policy = self.policies.snapshot();
        let credential = policy.minted(key).filter(|credential| credential.fingerprint() == Some(fingerprint));
        // One that would follow is not what the server has now.
        let credential = credential.filter(|credential| !credential.has_next());
        let current = credential.and_then(|credential| credential.minted_value());
        let is_same = current.filter(|current| current.is_same_as(value));
        is_same.inspect(|current| current.confirm(value)).is_some()
    }

    /// Notes the result of a recipe, unless another one is in use by now.
    fn note(&self, key: &MintKey, used: [u8; 32], next: &MintRecipe, note: impl FnOnce(&mut State)) {
        let mut states = self.states.lock();
        if let Some(state) = states.get_mut(key).filter(|state| state.recipe == used) {
            state.recipe = next.fingerprint();
            note(state);
        }
    }

    fn has_other_recipe(&self, key: &MintKey, recipe: &Arc<MintRecipe>) -> bool {
        let policy = self.policies.snapshot();
        policy.minted(key).and_then(|now| now.recipe()).is_some_and(|now| !Arc::ptr_eq(now, recipe))
    }

    /// Makes sure that a credential has a token, within a time limit. Returns why it has none.
    async fn provide(self: &Arc<Self>, key: &MintKey, is_selected: bool, within: Duration) -> Result<(), &'static str> {
        let entered = Instant::now();
        let deadline = entered.checked_add(within);
        loop {
            // A later step refuses the request if the credential is no longer there.
            let Some(Beginning { need, recipe, flight, is_new, rejected }) = self.begin(key) else { return Ok(()) };
            match need {
                // The token is renewed beside the request.
                Need::Nothing | Need::Renewal => return Ok(()),
                Need::Promotion => {
                    let (policies, key) = (self.policies.clone(), key.clone());
                    // False if another request has done it.
                    let _ = spawn_blocking(move || policies.promote_next(&key, &recipe, rejected)).await;
                    return Ok(());
                }
                // One request waits. The rejected token may still be valid.
                Need::Replacement if !is_new => return Ok(()),
                // The value that is there is used after a short wait, or if its store does not answer.
                Need::Confirmation if flight.is_none() || entered.elapsed() >= SHORT_WAIT => return Ok(()),
                Need::Replacement | Need::Confirmation | Need::Token => {}
            }
            let Some(flight) = flight else { return Err("the last attempt to mint a token has failed") };
            let limit = if is_selected && need == Need::Token {
                recipe.mint_timeout
            } else {
                recipe.mint_timeout.min(SHORT_WAIT)
            };
            // All tries have one limit, and nobody waits long for a store that was slow for others.
            let waited = if need == Need::Confirmation { flight.began.elapsed() } else { Duration::ZERO };
            let limit = limit.saturating_sub(waited.max(entered.elapsed()));
            let left = deadline.map_or(limit, |deadline| deadline.saturating_duration_since(Instant::now()).min(limit));
            match timeout(left, flight.end()).await {
                // The token may be the next one, if the current one has expired meanwhile; or it was asked for before the reload.
                Ok(true) if need != Need::Replacement => {}
                Ok(true) => return Ok(()),
                _ if need != Need::Token => return Ok(()),
                // A reload has changed the credential meanwhile.
                Ok(false) if self.has_other_recipe(key, &recipe) => {}
                Ok(false) => return Err("no token could be minted"),
                Err(_) => return Err("no token within mint_timeout"),
            }
        }
    }
}

/// The decision on one request.
struct Beginning {
    need: Need,
    recipe: Arc<MintRecipe>,
    flight: Option<Flight>,
    /// The request has started the flight.
    is_new: bool,
    /// The token that was rejected last, by the time at which it was minted.
    rejected: Option<Instant>,
}

impl State {
    fn need(&self, credential: &Credential) -> Need {
        let is_rejected = |minted: Instant| self.rejections.last() == Some(minted);
        match (credential.freshness(), credential.minted_value()) {
            (Freshness::Absent, _) | (_, None) => Need::Token,
            (Freshness::Replaceable, _) => Need::Promotion,
            (_, Some(value)) if is_rejected(value.minted()) && credential.has_next() => Need::Promotion,
            // The others may still be valid, and are searched for up to their end.
            (_, Some(value)) if is_rejected(value.minted()) && credential.replaced_count() < MAX_REPLACED => {
                Need::Replacement
            }
            (Freshness::Unconfirmed, _) => Need::Confirmation,
            (Freshness::Aging, _) => Need::Renewal,
            (Freshness::Fresh, _) => Need::Nothing,
        }
    }
}

impl Flight {
    fn begin() -> Self {
        Self { began: Instant::now(), over: CancellationToken::new(), has_token: Arc::default() }
    }

    /// Returns whether there is a token at its end.
    async fn end(self) -> bool {
        self.over.cancelled().await;
        self.has_token.load(Ordering::Acquire)
    }
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
    let needed: Vec<(MintKey, Use)> = {
        let policy = mints.policies.snapshot();
        let Some(task) = policy.task(grant.admitted().caller().task()) else { return Ok(()) };
        let is_selected =
            |name: &CredentialName| grant.selected_credentials().iter().any(|chosen| chosen.credential.name() == name);
        let of_use = |name: &CredentialName| match () {
            () if is_selected(name) => Use::Selected,
            () if grant.only_in_messages().any(|one| one.name() == name) => Use::InMessages,
            () => Use::None,
        };
        let credentials = task.credentials().minted_for(grant.admitted().target().host());
        let keys = credentials.filter_map(|one| Some((one.mint_key()?, of_use(one.name()))));
        keys.collect()
    };
    if needed.is_empty() {
        return Ok(());
    }
    let left = grant.timeouts().request.map_or(Duration::MAX, |total| total.saturating_sub(began.elapsed()));
    // Boxed, so that the requests without such a credential do not pay for it.
    Box::pin(provide_needed(mints, needed, left, record)).await
}

/// The use of a credential in a request.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Use {
    /// It is sent.
    Selected,
    /// It may be sent in messages, which are not known yet.
    InMessages,
    /// It is not sent. The destination may know it.
    None,
}

async fn provide_needed(
    mints: &Arc<Mints>,
    needed: Vec<(MintKey, Use)>,
    left: Duration,
    record: &mut Record,
) -> Verdict<()> {
    record.enter(Stage::Mint);
    // All that the request does without have one time limit together.
    let entered = Instant::now();
    for (key, of_use) in needed {
        let short = SHORT_WAIT.saturating_sub(entered.elapsed());
        let is_waited_for = of_use != Use::None;
        let within = if is_waited_for { left } else { left.min(short) };
        if let Err(why) = mints.provide(&key, is_waited_for, within).await
            && of_use == Use::Selected
        {
            record.rule(why);
            return Err(Fail::CredentialUnavailable.into());
        }
    }
    Ok(())
}

/// Returns the minted tokens of a request, for [`Mints::note_status`].
#[must_use]
pub fn sent_tokens(grant: &Grant) -> Vec<SentToken> {
    let selected = grant.selected_credentials().iter().map(|chosen| &chosen.credential);
    let token = |credential: &Arc<Credential>| {
        Some(SentToken { key: credential.mint_key()?, minted: credential.minted_value()?.minted() })
    };
    selected.filter_map(token).collect()
}

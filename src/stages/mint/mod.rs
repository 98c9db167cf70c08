//! Provides a valid token for a request with a minted credential: fetches one if there is none, and renews one that will
//! expire soon while requests still use it.
//!
//! A token that was fetched is part of a new policy, so it is searched for and redacted before it is used.

mod backoff;

use std::collections::HashMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use futures_util::future::BoxFuture;
use http::StatusCode;
use parking_lot::Mutex;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::backoff::Backoff;
use super::authorize::Grant;
use crate::audit::mint_line::MintLine;
use crate::audit::record::Record;
use crate::audit::sink::Sink;
use crate::model::refusal::{Fail, Stage, Verdict};
use crate::model::secret::Secret;
use crate::policy::credential::Credential;
use crate::policy::mint::{Freshness, MintKey, MintRecipe, MintedValue};
use crate::policy::store::PolicyStore;

/// The longest time for one token, up to its place in the policy.
const MAX_FLIGHT: Duration = Duration::from_secs(60);
/// A token that an origin rejects is replaced at most this often.
const REJECTION_INTERVAL: Duration = Duration::from_secs(60);

/// Fetches a token by a recipe.
pub type Issuer = Arc<dyn Fn(Arc<MintRecipe>) -> BoxFuture<'static, Result<IssuedToken, MintError>> + Send + Sync>;

/// A token, as its endpoint issued it.
pub struct IssuedToken {
    /// The token.
    pub value: Secret,
    /// Its life.
    pub life: Duration,
    /// The recipe for the next token, if it is not the one that was used.
    pub next: Option<Arc<MintRecipe>>,
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
    states: Mutex<HashMap<MintKey, State>>,
}

/// The state of one credential.
#[derive(Default)]
struct State {
    flight: Option<Flight>,
    backoff: Backoff,
    /// The token that an origin rejected last, by the time at which it was minted, and the time of the rejection.
    rejected: Option<(Instant, Instant)>,
}

/// A fetch of one token, for all requests that wait for it.
#[derive(Clone, Default)]
struct Flight {
    /// Cancelled at its end, whatever ends it.
    over: CancellationToken,
    has_token: Arc<AtomicBool>,
}

/// The need of a request for another token.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Need {
    /// There is none: the token is fresh.
    Nothing,
    /// The token will expire soon.
    Renewal,
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
    /// Creates the state. Nothing is fetched yet.
    #[must_use]
    pub fn new(policies: Arc<PolicyStore>, audit: Arc<Sink>, issuer: Issuer, tracker: TaskTracker) -> Self {
        Self { policies, audit, issuer, tracker, states: Mutex::default() }
    }

    /// Notes the status of a response. A token that is rejected with 401 is replaced before the next request. Nothing is
    /// repeated.
    pub fn note_status(&self, sent: Option<SentToken>, status: StatusCode) {
        let Some(SentToken { key, minted }) = sent.filter(|_| status == StatusCode::UNAUTHORIZED) else { return };
        let mut states = self.states.lock();
        let state = states.entry(key).or_default();
        // A client can cause this status by other means.
        if state.rejected.is_none_or(|(_, at)| at.elapsed() >= REJECTION_INTERVAL) {
            state.rejected = Some((minted, Instant::now()));
        }
    }

    /// Returns the credential of the request under the policy in force.
    fn current(&self, grant: &Grant) -> Option<Arc<Credential>> {
        let policy = self.policies.snapshot();
        let task = policy.task(grant.admitted().caller().task())?;
        task.credentials().named(grant.selected_credential()?.credential.name().as_str()).cloned()
    }

    fn need(&self, credential: &Credential, key: &MintKey) -> Need {
        let is_rejected = |minted: Instant| {
            let states = self.states.lock();
            let rejected = states.get(key).and_then(|state| state.rejected);
            rejected.is_some_and(|(rejected, _)| rejected == minted)
        };
        match (credential.freshness(), credential.minted_value()) {
            (Freshness::Absent, _) | (_, None) => Need::Token,
            (_, Some(value)) if is_rejected(value.minted()) => Need::Replacement,
            (Freshness::Aging, _) => Need::Renewal,
            (Freshness::Fresh, _) => Need::Nothing,
        }
    }

    /// Returns the fetch in progress, or starts one. `None` if the last attempt has failed a short time ago.
    fn flight(self: &Arc<Self>, key: &MintKey, recipe: &Arc<MintRecipe>) -> Option<Flight> {
        let mut states = self.states.lock();
        let state = states.entry(key.clone()).or_default();
        if let Some(flight) = state.flight.as_ref().filter(|flight| !flight.over.is_cancelled()) {
            return Some(flight.clone());
        }
        if state.backoff.is_waiting() {
            return None;
        }
        let (this, key, recipe, flight) = (self.clone(), key.clone(), recipe.clone(), Flight::default());
        state.flight = Some(flight.clone());
        let Flight { over, has_token } = flight.clone();
        // It goes on without the request that started it.
        self.tracker.spawn(async move {
            let _over = over.drop_guard();
            has_token.store(this.fetch(key, recipe).await, Ordering::Release);
        });
        Some(flight)
    }

    /// Fetches a token and puts it into the policy.
    async fn fetch(self: Arc<Self>, key: MintKey, recipe: Arc<MintRecipe>) -> bool {
        let began = Instant::now();
        let fetched = timeout(MAX_FLIGHT, self.fetch_once(&recipe)).await;
        let fetched = fetched.unwrap_or_else(|_| Err(MintError::new("no token in time")));
        let mut line = MintLine::new(&key.name, &key.workspace, &recipe.url, began.elapsed());
        match &fetched {
            Ok(fetched) => line.set_expiry(fetched.value.expires()),
            Err(error) => line.set_error(&error.reason),
        }
        let is_written = line.write(&self.audit).await.is_ok();
        // A token is put into the policy only if the log says so.
        let fetched = fetched.and_then(|fetched| {
            if is_written { Ok(fetched) } else { Err(MintError::new("the audit log cannot be written")) }
        });
        match fetched {
            Ok(FetchedToken { value, next }) => {
                self.states.lock().entry(key.clone()).or_default().backoff = Backoff::default();
                let policies = self.policies.clone();
                // False if the configuration has changed in the meantime. The next request fetches another one.
                let add = move || policies.add_minted(&key, (&recipe, next.as_ref().unwrap_or(&recipe)), &value);
                spawn_blocking(add).await.unwrap_or(false)
            }
            Err(error) => {
                let (credential, workspace, reason) = (key.name.as_str(), &*key.workspace, &*error.reason);
                tracing::warn!(credential, workspace, reason, "no token could be minted");
                let mut states = self.states.lock();
                states.entry(key).or_default().backoff.failed(error.retry_after, error.is_lasting);
                false
            }
        }
    }

    async fn fetch_once(&self, recipe: &Arc<MintRecipe>) -> Result<FetchedToken, MintError> {
        let IssuedToken { value, life, next } = (self.issuer)(recipe.clone()).await?;
        let spread = backoff::random_share();
        // Whether it can be guessed is estimated, which is slow.
        let value = spawn_blocking(move || MintedValue::new(value, life, spread)).await;
        let value = value.map_err(|_| MintError::new("the token could not be checked"))?;
        Ok(FetchedToken { value: Arc::new(value.map_err(|error| MintError::new(error.to_string()))?), next })
    }
}

struct FetchedToken {
    value: Arc<MintedValue>,
    next: Option<Arc<MintRecipe>>,
}

impl Flight {
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

/// Waits until the credential of a request has a token, if it is minted. The policy in force has it then.
///
/// # Errors
/// [`Fail::CredentialUnavailable`] if there is none within `mint_timeout`, or after a failure a short time ago.
pub async fn provide_token(mints: &Arc<Mints>, grant: &Grant, record: &mut Record) -> Verdict<()> {
    let is_minted = grant.selected_credential().is_some_and(|chosen| chosen.credential.recipe().is_some());
    if !is_minted {
        return Ok(());
    }
    record.enter(Stage::Mint);
    let unavailable = |record: &mut Record, why: &'static str| {
        record.rule(why);
        Err(Fail::CredentialUnavailable.into())
    };
    // A later step refuses the request if the credential is no longer there, or no longer minted.
    let Some(credential) = mints.current(grant) else { return Ok(()) };
    let (Some(key), Some(recipe)) = (credential.mint_key(), credential.recipe()) else { return Ok(()) };
    let need = mints.need(&credential, &key);
    if need == Need::Nothing {
        return Ok(());
    }
    let flight = mints.flight(&key, recipe);
    // The token is renewed beside the request.
    if need == Need::Renewal {
        return Ok(());
    }
    let within = grant.timeouts().request.map_or(recipe.mint_timeout, |total| total.min(recipe.mint_timeout));
    let why = match flight {
        None => "the last attempt to mint a token has failed",
        Some(flight) => match timeout(within, flight.end()).await {
            Ok(true) => return Ok(()),
            Ok(false) => "no token could be minted",
            Err(_) => "no token within mint_timeout",
        },
    };
    // A token that is not replaced may still be valid.
    if need == Need::Replacement { Ok(()) } else { unavailable(record, why) }
}

/// Returns the minted token of a request, for [`Mints::note_status`].
#[must_use]
pub fn sent_token(grant: &Grant) -> Option<SentToken> {
    let credential = &grant.selected_credential()?.credential;
    Some(SentToken { key: credential.mint_key()?, minted: credential.minted_value()?.minted() })
}

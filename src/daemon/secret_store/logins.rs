//! Tokens that secret stores, or their token endpoints, issued to the proxy. They are shared by all reads of a store.

use std::collections::HashMap;
use std::future::Future;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;

use crate::model::secret::Secret;
use crate::stages::mint::MintError;

/// How long a login that failed is not repeated, for the reads that wait for the same one.
const FAILED_LOGIN: Duration = Duration::from_secs(2);
/// The longest use of a token without another login.
pub(super) const MAX_LOGIN: Duration = Duration::from_secs(24 * 3600);

/// The longest life of a token, whatever its server says.
const MAX_LIFE: Duration = Duration::from_secs(400 * 24 * 3600);

/// The logins by the hash of the server and the way of the login.
#[derive(Default)]
pub(super) struct Logins(Mutex<HashMap<[u8; 32], Arc<AsyncMutex<State>>>>);

#[derive(Default)]
struct State {
    login: Option<Login>,
    failed: Option<(Instant, MintError)>,
}

/// A token. It is not used in the last fifth of its life.
pub(super) struct Login {
    token: Arc<Secret>,
    /// The life when it was issued.
    life: Duration,
    until: Instant,
    end: TokenEnd,
}

/// The end of a token's life, which an extension changes. What belongs to the token ends with it.
#[derive(Clone)]
pub(super) struct TokenEnd(Arc<Mutex<Instant>>);

impl TokenEnd {
    /// Returns the rest of the life.
    pub(super) fn left(&self) -> Duration {
        self.0.lock().saturating_duration_since(Instant::now())
    }
}

impl Login {
    /// Creates a login with a token that lives for this time.
    pub(super) fn new(token: Secret, life: Duration) -> Self {
        let (until, end) = times(life);
        Self { token: Arc::new(token), life, until, end: TokenEnd(Arc::new(Mutex::new(end))) }
    }

    fn extend(&mut self, life: Duration) {
        let (until, end) = times(life);
        self.until = until;
        *self.end.0.lock() = end;
    }
}

/// Returns the end of the use, and of the life.
fn times(life: Duration) -> (Instant, Instant) {
    let now = Instant::now();
    let after = |time: Duration| now.checked_add(time).unwrap_or(now);
    (after(life.min(MAX_LOGIN) / 5 * 4), after(life.min(MAX_LIFE)))
}

impl Logins {
    /// Returns the token of a login, and its end. One request at a time makes the login, and the others wait for that. `extend` asks for a
    /// longer life of a token. Near its maximum, it is extended by less and less.
    pub(super) async fn token<E: Future<Output = Option<Duration>>>(
        &self,
        key: [u8; 32],
        login: impl Future<Output = Result<Login, MintError>>,
        extend: impl FnOnce(Arc<Secret>) -> E,
    ) -> Result<(Arc<Secret>, TokenEnd), MintError> {
        let state = self.state(key);
        let mut state = state.lock().await;
        let of = |login: &Login| (login.token.clone(), login.end.clone());
        if let Some(login) = state.login.as_ref().filter(|login| login.until > Instant::now()) {
            return Ok(of(login));
        }
        if let Some((at, error)) = &state.failed
            && at.elapsed() < FAILED_LOGIN
        {
            return Err(error.clone());
        }
        if let Some(login) = state.login.as_mut().filter(|login| !login.end.left().is_zero())
            && let Some(life) = extend(login.token.clone()).await.filter(|life| *life >= login.life / 2)
        {
            login.extend(life);
            return Ok(of(login));
        }
        match login.await {
            Ok(login) => {
                let issued = of(&login);
                *state = State { login: Some(login), failed: None };
                Ok(issued)
            }
            Err(error) => {
                let error = MintError { reason: format!("login: {}", error.reason), ..error };
                *state = State { login: None, failed: Some((Instant::now(), error.clone())) };
                Err(error)
            }
        }
    }

    /// Extends the life of a token that is in its second half, so that what is created with it lives long enough.
    pub(super) async fn extend_aging<E: Future<Output = Option<Duration>>>(
        &self,
        key: [u8; 32],
        extend: impl FnOnce(Arc<Secret>) -> E,
    ) {
        let state = self.state(key);
        let mut state = state.lock().await;
        let is_aging = |login: &Login| (Duration::from_nanos(1)..login.life / 2).contains(&login.end.left());
        if let Some(login) = state.login.as_mut().filter(|login| is_aging(login))
            && let Some(life) = extend(login.token.clone()).await.filter(|life| *life >= login.life / 2)
        {
            login.extend(life);
        }
    }

    /// Forgets a token that was not accepted.
    pub(super) async fn forget(&self, key: [u8; 32], token: &Arc<Secret>) {
        let state = self.state(key);
        let mut state = state.lock().await;
        if let Some(login) = state.login.take_if(|login| Arc::ptr_eq(&login.token, token)) {
            // Its leases have ended with it.
            *login.end.0.lock() = Instant::now();
        }
    }

    fn state(&self, key: [u8; 32]) -> Arc<AsyncMutex<State>> {
        let mut all = self.0.lock();
        if !all.contains_key(&key) {
            // Those of servers that are not in the configuration any more.
            all.retain(|_, state| {
                let is_used = Arc::strong_count(state) > 1;
                is_used || state.try_lock().is_ok_and(|it| it.login.as_ref().is_some_and(|it| !it.end.left().is_zero()))
            });
        }
        all.entry(key).or_default().clone()
    }
}

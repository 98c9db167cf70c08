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

/// The logins by the hash of the server and the way of the login. There are as many as the configurations named.
#[derive(Default)]
pub(super) struct Logins(Mutex<HashMap<[u8; 32], Arc<AsyncMutex<State>>>>);

#[derive(Default)]
struct State {
    login: Option<Login>,
    failed: Option<(Instant, MintError)>,
}

/// A token, and the end of its use.
pub(super) struct Login {
    token: Arc<Secret>,
    until: Instant,
}

impl Login {
    /// Creates a login with a token that lives for this time. It is not used in the last fifth of it.
    pub(super) fn new(token: Secret, life: Duration) -> Self {
        let used = life.min(MAX_LOGIN) / 5 * 4;
        Self { token: Arc::new(token), until: Instant::now().checked_add(used).unwrap_or_else(Instant::now) }
    }
}

impl Logins {
    /// Returns the token of a login. One request at a time makes it, and the others wait for that.
    pub(super) async fn token(
        &self,
        key: [u8; 32],
        login: impl Future<Output = Result<Login, MintError>>,
    ) -> Result<Arc<Secret>, MintError> {
        let state = self.state(key);
        let mut state = state.lock().await;
        if let Some(login) = state.login.as_ref().filter(|login| login.until > Instant::now()) {
            return Ok(login.token.clone());
        }
        if let Some((at, error)) = &state.failed
            && at.elapsed() < FAILED_LOGIN
        {
            return Err(error.clone());
        }
        match login.await {
            Ok(login) => {
                let token = login.token.clone();
                *state = State { login: Some(login), failed: None };
                Ok(token)
            }
            Err(error) => {
                let error = MintError { reason: format!("login: {}", error.reason), ..error };
                *state = State { login: None, failed: Some((Instant::now(), error.clone())) };
                Err(error)
            }
        }
    }

    /// Forgets a token that was not accepted.
    pub(super) async fn forget(&self, key: [u8; 32], token: &Arc<Secret>) {
        let state = self.state(key);
        let mut state = state.lock().await;
        if state.login.as_ref().is_some_and(|login| Arc::ptr_eq(&login.token, token)) {
            state.login = None;
        }
    }

    fn state(&self, key: [u8; 32]) -> Arc<AsyncMutex<State>> {
        self.0.lock().entry(key).or_default().clone()
    }
}

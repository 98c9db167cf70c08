//! The data of an execution in the ledger, and the result of counting a call.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::files;
use crate::model::name::{ExecutionId, TaskName};
use crate::model::secret::TokenHash;

/// A point in time: milliseconds since 1970, UTC. The ledger's callers pass it in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Millis(pub u64);

/// The facts of an execution, fixed when it starts.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Stored", try_from = "Stored")]
pub struct Execution {
    /// The id. For a static execution, it is derived from the task's name.
    pub id: ExecutionId,
    /// The task that this execution runs.
    pub task: TaskName,
    /// When the execution started.
    pub created_at: Millis,
    /// When the execution expires; after that, no call is admitted. `None`: never.
    pub expires_at: Option<Millis>,
    /// The hash of the execution's own token.
    pub token: Option<TokenHash>,
    /// The network that callers must connect from.
    pub peers: Option<IpNet>,
    /// Whether this is the execution of a task's static token. It is created at its first call and never removed.
    pub is_static: bool,
}

/// The full state of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecutionState {
    /// The facts that never change.
    pub execution: Execution,
    /// The reason and time of the stop.
    pub stopped: Option<Stopped>,
    /// The counter of tool calls.
    pub tool: Counter,
    /// The counter of raw requests.
    pub raw: Counter,
    /// How many times credentials were found in outbound data.
    pub finds: u32,
    /// The bill, in half-credits.
    pub half_credits: u64,
}

/// The counter for one kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// The number of admitted calls.
    #[serde(rename = "n")]
    pub calls: u64,
    /// The latest one-minute window; it may have passed.
    #[serde(rename = "w")]
    pub window: Option<Window>,
}

/// A one-minute window that starts at its first call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// When the first call was made.
    #[serde(rename = "a")]
    pub started_at: Millis,
    /// The number of calls admitted in the window.
    #[serde(rename = "n")]
    pub calls: u64,
}

/// The stop of an execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// The reason.
    pub why: StopReason,
    /// The time.
    pub at: Millis,
}

/// Why an execution is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StopReason {
    /// A stop was requested.
    Asked,
    /// The execution expired, and a caller recorded it.
    Expired,
    /// Too many credentials were found in outbound data.
    Finds,
}

/// The limits for one kind of call.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    /// The maximum per execution.
    pub per_execution: Option<u64>,
    /// The maximum per one-minute window.
    pub per_minute: Option<u64>,
}

/// The result of counting a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeResult {
    /// The call is admitted and was counted.
    Counted {
        /// The number of calls of this kind so far, including this one.
        call: u64,
    },
    /// The limit per execution is reached.
    ExecutionLimit {
        /// The limit.
        limit: u64,
    },
    /// The execution has expired.
    Expired,
    /// The limit per minute is reached.
    RateLimited {
        /// The limit.
        limit: u64,
        /// The time until the window ends.
        retry_after: Duration,
    },
    /// The execution was stopped.
    Stopped,
    /// The execution does not exist or has been removed.
    Unknown,
}

/// The position in the audit log up to which calls have been billed. Opaque to the ledger.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cursor(String);

/// The length of a window.
const MINUTE: Duration = Duration::from_secs(60);

impl Millis {
    /// Returns the current time.
    #[must_use]
    pub fn now() -> Self {
        Self::of(SystemTime::now())
    }

    /// Converts a system time; times before 1970 become 1970.
    #[must_use]
    pub fn of(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    /// Returns the time `time` later.
    #[must_use]
    pub fn plus(self, time: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Returns the time `time` earlier.
    #[must_use]
    pub fn before(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
    }

    /// Returns the time elapsed since `earlier`; zero if `earlier` is later.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl Execution {
    /// Creates the execution for a task's static token.
    #[must_use]
    pub fn of_static(task: &TaskName, now: Millis) -> Self {
        let (id, task) = (ExecutionId::of_static(task), task.clone());
        Self { id, task, created_at: now, expires_at: None, token: None, peers: None, is_static: true }
    }
}

impl Counter {
    /// Returns the window that is current at `now`, if any.
    #[must_use]
    pub fn window_at(&self, now: Millis) -> Option<Window> {
        self.window.filter(|window| now.since(window.started_at) < MINUTE)
    }

    /// Admits a call and counts it, or refuses it and counts nothing.
    pub(super) fn take(&mut self, caps: Caps, now: Millis) -> TakeResult {
        if let Some(limit) = caps.per_execution.filter(|limit| self.calls >= *limit) {
            return TakeResult::ExecutionLimit { limit };
        }
        let mut window = self.window_at(now).unwrap_or(Window { started_at: now, calls: 0 });
        // If the clock was set back, the window must not last longer than a minute.
        window.started_at = window.started_at.min(now);
        if let Some(limit) = caps.per_minute.filter(|limit| window.calls >= *limit) {
            if let Some(kept) = &mut self.window {
                kept.started_at = kept.started_at.min(now);
            }
            return TakeResult::RateLimited { limit, retry_after: window.started_at.plus(MINUTE).since(now) };
        }
        window.calls = window.calls.saturating_add(1);
        self.window = Some(window);
        self.calls = self.calls.saturating_add(1);
        TakeResult::Counted { call: self.calls }
    }

    /// Takes back one call that was counted at `taken_at`.
    pub(super) fn give_back(&mut self, taken_at: Millis) {
        self.calls = self.calls.saturating_sub(1);
        // A window that started later did not count this call.
        if let Some(window) = self.window.as_mut().filter(|window| window.started_at <= taken_at) {
            window.calls = window.calls.saturating_sub(1);
        }
    }
}

impl ExecutionState {
    /// Returns when the execution ended, if it has ended at `now`.
    #[must_use]
    pub fn ended_at(&self, now: Millis) -> Option<Millis> {
        ended_at(&self.execution, self.stopped, now)
    }
}

/// Returns the earlier of the stop and the expiry.
pub(super) fn ended_at(execution: &Execution, stopped: Option<Stopped>, now: Millis) -> Option<Millis> {
    let expired = execution.expires_at.filter(|end| *end <= now);
    stopped.map(|stopped| stopped.at).into_iter().chain(expired).min()
}

impl Cursor {
    /// The maximum length of a cursor, in bytes.
    pub const MAX: usize = 1024;

    /// Wraps a position. Returns `None` if it is longer than [`Self::MAX`].
    #[must_use]
    pub fn new(text: &str) -> Option<Self> {
        (text.len() <= Self::MAX).then(|| Self(text.to_owned()))
    }

    /// Returns the text given to [`Self::new`].
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

/// Omits the token's hash.
impl fmt::Debug for Execution {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Execution")
            .field("id", &self.id)
            .field("task", &self.task)
            .field("created_at", &self.created_at)
            .field("expires_at", &self.expires_at)
            .field("peers", &self.peers)
            .field("is_static", &self.is_static)
            .finish_non_exhaustive()
    }
}

/// The stored form of an execution.
#[derive(Serialize, Deserialize)]
struct Stored {
    id: String,
    task: String,
    created: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    expires: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    token: Option<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    peers: Option<String>,
    #[serde(default, rename = "static")]
    is_static: bool,
}

impl From<Execution> for Stored {
    fn from(execution: Execution) -> Self {
        Self {
            id: execution.id.to_string(),
            task: execution.task.to_string(),
            created: execution.created_at,
            expires: execution.expires_at,
            token: execution.token.map(|hash| files::hex(hash.as_bytes())),
            peers: execution.peers.map(|net| net.to_string()),
            is_static: execution.is_static,
        }
    }
}

/// The error for a stored execution that cannot be parsed.
#[derive(Debug, thiserror::Error)]
#[error("{0} cannot be read")]
struct Unreadable(&'static str);

impl TryFrom<Stored> for Execution {
    type Error = Unreadable;

    fn try_from(stored: Stored) -> Result<Self, Unreadable> {
        let hash = |text: String| files::unhex(&text)?.try_into().ok().map(TokenHash::from_bytes);
        let token = stored.token.map(|text| hash(text).ok_or(Unreadable("a token's hash"))).transpose()?;
        let peers = stored.peers.map(|text| text.parse().map_err(|_| Unreadable("a network"))).transpose()?;
        Ok(Self {
            id: ExecutionId::new(&stored.id),
            task: TaskName::new(&stored.task),
            created_at: stored.created,
            expires_at: stored.expires,
            token,
            peers,
            is_static: stored.is_static,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_window_starts_at_its_first_call_and_refusals_do_not_extend_it() {
        let caps = Caps { per_execution: Some(5), per_minute: Some(2) };
        let limited = |left| TakeResult::RateLimited { limit: 2, retry_after: Duration::from_millis(left) };
        let rows = [
            (1_000, TakeResult::Counted { call: 1 }),
            (50_000, TakeResult::Counted { call: 2 }),
            (50_001, limited(10_999)),
            (60_999, limited(1)),
            (61_000, TakeResult::Counted { call: 3 }),
            (200_000, TakeResult::Counted { call: 4 }),
            // The clock was set back by more than a minute.
            (100_000, TakeResult::Counted { call: 5 }),
            (100_001, TakeResult::ExecutionLimit { limit: 5 }),
        ];
        let mut counter = Counter::default();
        for (now, want) in rows {
            assert_eq!(counter.take(caps, Millis(now)), want, "{now}");
        }
        assert_eq!(counter.window, Some(Window { started_at: Millis(100_000), calls: 2 }));
        let minute_only = Caps { per_execution: None, ..caps };
        assert_eq!(counter.take(minute_only, Millis(90_000)), limited(60_000), "put back once more");
        assert_eq!(counter.take(minute_only, Millis(150_000)), TakeResult::Counted { call: 6 });
    }

    #[test]
    fn a_call_given_back_counts_neither_in_total_nor_in_its_window() {
        let caps = Caps { per_execution: Some(3), per_minute: Some(2) };
        let mut counter = Counter::default();
        for (now, call) in [(1_000, 1), (2_000, 2)] {
            assert_eq!(counter.take(caps, Millis(now)), TakeResult::Counted { call });
        }
        counter.give_back(Millis(1_000));
        assert_eq!(counter.take(caps, Millis(3_000)), TakeResult::Counted { call: 2 });
        // A new window has started, which did not count the call.
        assert_eq!(counter.take(caps, Millis(70_000)), TakeResult::Counted { call: 3 });
        counter.give_back(Millis(3_000));
        assert_eq!(counter, Counter { calls: 2, window: Some(Window { started_at: Millis(70_000), calls: 1 }) });
        let mut nothing = Counter::default();
        nothing.give_back(Millis(1));
        assert_eq!(nothing, Counter::default());
    }

    #[test]
    fn an_execution_round_trips_and_its_debug_output_hides_the_token() {
        let execution = Execution {
            id: ExecutionId::new("a \"b\"\n"),
            task: TaskName::new("research"),
            created_at: Millis(1),
            expires_at: Some(Millis(2)),
            token: Some(TokenHash::of(b"token")),
            peers: Some("10.0.0.0/8".parse().unwrap()),
            is_static: false,
        };
        let text = serde_json::to_string(&execution).unwrap();
        assert!(serde_json::from_str::<Execution>(&text).unwrap() == execution, "{text}");
        assert!(!format!("{execution:?}").contains("token"));
        for wrong in ["10.0.0.0/8", &files::hex(TokenHash::of(b"token").as_bytes())] {
            assert!(serde_json::from_str::<Execution>(&text.replace(wrong, "x")).is_err());
        }
    }
}

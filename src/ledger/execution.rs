//! The data of an execution in the ledger, and the result of counting a call.

use std::fmt;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use ipnet::IpNet;
use serde::{Deserialize, Serialize};

use crate::files;
use crate::model::name::{ExecutionId, TaskName};
use crate::model::secret::TokenHash;

/// A point in time: milliseconds since 1970, UTC. Whoever calls the ledger passes it in.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Millis(pub u64);

/// The facts of an execution, fixed when it begins.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Stored", try_from = "Stored")]
pub struct Execution {
    /// Its id. That of a static one is its task's name.
    pub id: ExecutionId,
    /// The task that it is a run of.
    pub task: TaskName,
    /// When it began.
    pub created_at: Millis,
    /// From when on no call is taken. None: until it is stopped.
    pub expires_at: Option<Millis>,
    /// The hash of its own token.
    pub token: Option<TokenHash>,
    /// Where its callers have to come from.
    pub peers: Option<IpNet>,
    /// It stands for a task's static token: it comes into being at its first call and is never forgotten.
    pub is_static: bool,
}

/// Everything there is to show of an execution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ExecutionState {
    /// The facts that never change.
    pub execution: Execution,
    /// Why and since when it is stopped.
    pub stopped: Option<Stopped>,
    /// Tool calls.
    pub tool: Counter,
    /// Raw requests.
    pub raw: Counter,
    /// How often credentials were found in what it wanted to send.
    pub finds: u32,
    /// Its bill, in half-credits.
    pub half_credits: u64,
}

/// Calls of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Counter {
    /// All that were let through.
    #[serde(rename = "n")]
    pub calls: u64,
    /// The last minute that was begun; it may have passed.
    #[serde(rename = "w")]
    pub window: Option<Window>,
}

/// A minute, anchored at its first call.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    /// When its first call came.
    #[serde(rename = "a")]
    pub started_at: Millis,
    /// How many it has let through.
    #[serde(rename = "n")]
    pub calls: u64,
}

/// That an execution was stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Stopped {
    /// Why.
    pub why: StopReason,
    /// Since when.
    pub at: Millis,
}

/// Why an execution is stopped.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum StopReason {
    /// Somebody asked for it.
    Asked,
    /// It has expired, and whoever saw it says so.
    Expired,
    /// Credentials were found in what it wanted to send too often.
    Finds,
}

/// How many calls of a kind may be let through.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Caps {
    /// From beginning to end.
    pub per_execution: Option<u64>,
    /// In a minute that begins with its first call.
    pub per_minute: Option<u64>,
}

/// The result of counting a call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TakeResult {
    /// It may go on, and has been counted.
    Counted {
        /// It is the execution's so-manieth of its kind.
        call: u64,
    },
    /// The execution has had all its calls.
    ExecutionLimit {
        /// So many.
        limit: u64,
    },
    /// The execution is over.
    Expired,
    /// The minute has had all its calls.
    RateLimited {
        /// So many.
        limit: u64,
        /// When the minute is over.
        retry_after: Duration,
    },
    /// The execution was stopped.
    Stopped,
    /// There is no such execution, or none any more.
    Unknown,
}

/// How far the record that bills are made from has been billed: what whoever bills needs to go on from there.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Cursor(String);

/// How long a window lasts.
const MINUTE: Duration = Duration::from_secs(60);

impl Millis {
    /// The time of day.
    #[must_use]
    pub fn now() -> Self {
        Self::of(SystemTime::now())
    }

    /// That time; 1970 for any before.
    #[must_use]
    pub fn of(time: SystemTime) -> Self {
        let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
        Self(u64::try_from(since.as_millis()).unwrap_or(u64::MAX))
    }

    /// So much later.
    #[must_use]
    pub fn plus(self, time: Duration) -> Self {
        Self(self.0.saturating_add(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
    }

    /// So much earlier.
    #[must_use]
    pub fn before(self, time: Duration) -> Self {
        Self(self.0.saturating_sub(u64::try_from(time.as_millis()).unwrap_or(u64::MAX)))
    }

    /// How much later it is than another; nothing if it is earlier.
    #[must_use]
    pub fn since(self, earlier: Self) -> Duration {
        Duration::from_millis(self.0.saturating_sub(earlier.0))
    }
}

impl Execution {
    /// The one that a task's static token stands for.
    #[must_use]
    pub fn of_static(task: &TaskName, now: Millis) -> Self {
        let (id, task) = (ExecutionId::of_static(task), task.clone());
        Self { id, task, created_at: now, expires_at: None, token: None, peers: None, is_static: true }
    }
}

impl Counter {
    /// The calls of the minute that has not passed yet, and when it began.
    #[must_use]
    pub fn window_at(&self, now: Millis) -> Option<Window> {
        self.window.filter(|window| now.since(window.started_at) < MINUTE)
    }

    /// Lets a call through and counts it, or changes nothing that counts.
    pub(super) fn take(&mut self, caps: Caps, now: Millis) -> TakeResult {
        if let Some(limit) = caps.per_execution.filter(|limit| self.calls >= *limit) {
            return TakeResult::ExecutionLimit { limit };
        }
        let mut window = self.window_at(now).unwrap_or(Window { started_at: now, calls: 0 });
        // A clock that was put back must not make the minute longer than one.
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

    /// Takes back one call that was counted at that time.
    pub(super) fn give_back(&mut self, taken_at: Millis) {
        self.calls = self.calls.saturating_sub(1);
        // A minute that has begun since has not counted it.
        if let Some(window) = self.window.as_mut().filter(|window| window.started_at <= taken_at) {
            window.calls = window.calls.saturating_sub(1);
        }
    }
}

impl ExecutionState {
    /// When it ended, if it has by then.
    #[must_use]
    pub fn ended_at(&self, now: Millis) -> Option<Millis> {
        ended_at(&self.execution, self.stopped, now)
    }
}

/// The earlier of stopped and expired.
pub(super) fn ended_at(execution: &Execution, stopped: Option<Stopped>, now: Millis) -> Option<Millis> {
    let expired = execution.expires_at.filter(|end| *end <= now);
    stopped.map(|stopped| stopped.at).into_iter().chain(expired).min()
}

impl Cursor {
    /// Longest cursor, in bytes.
    pub const MAX: usize = 1024;

    /// Wraps what is needed to go on. None: it is longer than [`Self::MAX`].
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

/// Without the token's hash.
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

/// An execution as stores write it.
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

/// A stored execution that is none.
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
    fn a_minute_begins_with_its_first_call_and_refusals_do_not_extend_it() {
        let caps = Caps { per_execution: Some(5), per_minute: Some(2) };
        let limited = |left| TakeResult::RateLimited { limit: 2, retry_after: Duration::from_millis(left) };
        let rows = [
            (1_000, TakeResult::Counted { call: 1 }),
            (50_000, TakeResult::Counted { call: 2 }),
            (50_001, limited(10_999)),
            (60_999, limited(1)),
            (61_000, TakeResult::Counted { call: 3 }),
            (200_000, TakeResult::Counted { call: 4 }),
            // The clock was put back by more than a minute.
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
    fn a_call_that_is_given_back_counts_neither_in_all_nor_in_its_minute() {
        let caps = Caps { per_execution: Some(3), per_minute: Some(2) };
        let mut counter = Counter::default();
        for (now, call) in [(1_000, 1), (2_000, 2)] {
            assert_eq!(counter.take(caps, Millis(now)), TakeResult::Counted { call });
        }
        counter.give_back(Millis(1_000));
        assert_eq!(counter.take(caps, Millis(3_000)), TakeResult::Counted { call: 2 });
        // Another minute has begun: the call was none of it.
        assert_eq!(counter.take(caps, Millis(70_000)), TakeResult::Counted { call: 3 });
        counter.give_back(Millis(3_000));
        assert_eq!(counter, Counter { calls: 2, window: Some(Window { started_at: Millis(70_000), calls: 1 }) });
        let mut nothing = Counter::default();
        nothing.give_back(Millis(1));
        assert_eq!(nothing, Counter::default());
    }

    #[test]
    fn an_execution_is_read_back_as_it_was_written_and_shows_no_token() {
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

//! The limit that a call has reached, as reported to its caller.

use std::time::Duration;

use super::refusal::{Deny, Fail, Refusal};

/// A limit on one exchange, by its configuration key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeLimit {
    /// `[upstream].connect_timeout`.
    Connect(Duration),
    /// `[proxy].handshake_timeout`.
    Handshake(Duration),
    /// `idle_timeout`.
    Idle(Duration),
    /// `request_timeout`, or the timeout that the call itself asks for.
    Request(Duration),
    /// `max_request_bytes`, or the maximum body size of a request to the self API.
    RequestBytes(u64),
    /// `max_response_bytes`.
    ResponseBytes(u64),
    /// `response_header_timeout`.
    ResponseHeader(Duration),
}

/// The value of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitValue {
    /// A size in bytes.
    Bytes(u64),
    /// A duration.
    Time(Duration),
}

impl ExchangeLimit {
    /// Returns the configuration key.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Connect(_) => "connect_timeout",
            Self::Handshake(_) => "handshake_timeout",
            Self::Idle(_) => "idle_timeout",
            Self::Request(_) => "request_timeout",
            Self::RequestBytes(_) => "max_request_bytes",
            Self::ResponseBytes(_) => "max_response_bytes",
            Self::ResponseHeader(_) => "response_header_timeout",
        }
    }

    /// Returns the value of the limit.
    #[must_use]
    pub const fn value(self) -> LimitValue {
        match self {
            Self::RequestBytes(most) | Self::ResponseBytes(most) => LimitValue::Bytes(most),
            Self::Connect(most)
            | Self::Handshake(most)
            | Self::Idle(most)
            | Self::Request(most)
            | Self::ResponseHeader(most) => LimitValue::Time(most),
        }
    }

    /// Returns the refusal for an exchange that exceeds the limit.
    #[must_use]
    pub const fn refusal(self) -> Refusal {
        match self {
            Self::Connect(_) | Self::Handshake(_) => Refusal::Fail(Fail::ConnectTimedOut),
            Self::Idle(_) | Self::Request(_) | Self::ResponseHeader(_) => Refusal::Fail(Fail::RequestTimedOut),
            Self::RequestBytes(_) => Refusal::Deny(Deny::RequestTooLarge),
            Self::ResponseBytes(_) => Refusal::Fail(Fail::ResponseTooLarge),
        }
    }
}

/// A limit on calls that has been reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReachedLimit {
    /// The plan's key.
    pub name: &'static str,
    /// The number of calls that the limit allows.
    pub limit: u64,
    /// The scope in which calls are counted.
    pub scope: LimitScope,
    /// The time until another call is allowed, if known.
    pub retry_after: Option<Duration>,
}

/// The scope of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitScope {
    /// All calls of an execution.
    Execution,
    /// The calls in a period.
    Time(Duration),
    /// The requests in progress.
    Concurrent,
}

impl ReachedLimit {
    /// Returns the whole seconds until another call is allowed, rounded up so that the first retry is not too early.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u64> {
        let wait = self.retry_after?;
        Some(wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1))
    }

    /// Returns the value of `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-10 §3).
    #[must_use]
    pub fn policy_field(&self) -> String {
        let Self { name, limit, scope, .. } = self;
        match scope {
            LimitScope::Execution => format!("\"{name}\";q={limit}"),
            LimitScope::Time(time) => format!("\"{name}\";q={limit};w={}", time.as_secs()),
            LimitScope::Concurrent => format!("\"{name}\";q={limit};qu=\"concurrent-requests\""),
        }
    }

    /// Returns the value of `RateLimit` (the same draft, §4), with nothing remaining.
    #[must_use]
    pub fn field(&self) -> String {
        let until = self.retry_after_s().map(|seconds| format!(";t={seconds}")).unwrap_or_default();
        format!("\"{}\";r=0{until}", self.name)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_contain_the_limit_and_the_time_to_wait() {
        let limited = |scope, millis: Option<u64>| ReachedLimit {
            name: "key",
            limit: 10,
            scope,
            retry_after: millis.map(Duration::from_millis),
        };
        let minute = LimitScope::Time(Duration::from_secs(60));
        let rows = [
            (limited(minute, Some(33_001)), "\"key\";q=10;w=60", "\"key\";r=0;t=34"),
            (limited(minute, Some(20)), "\"key\";q=10;w=60", "\"key\";r=0;t=1"),
            (limited(minute, Some(2_000)), "\"key\";q=10;w=60", "\"key\";r=0;t=2"),
            (limited(LimitScope::Execution, None), "\"key\";q=10", "\"key\";r=0"),
            (limited(LimitScope::Concurrent, None), "\"key\";q=10;qu=\"concurrent-requests\"", "\"key\";r=0"),
        ];
        for (limited, policy, field) in rows {
            assert_eq!((&*limited.policy_field(), &*limited.field()), (policy, field));
        }
    }
}

//! Limits, as reported to the caller that reached one.

use std::time::Duration;

use super::refusal::{Deny, Fail, Refusal};

/// A limit of one exchange, by its configuration key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ExchangeLimit {
    /// `[upstream].connect_timeout`.
    Connect(Duration),
    /// `[proxy].handshake_timeout`.
    Handshake(Duration),
    /// `idle_timeout`.
    Idle(Duration),
    /// `request_timeout`, or as long as the call itself asks for.
    Request(Duration),
    /// `max_request_bytes`, or what a question may have.
    RequestBytes(u64),
    /// `max_response_bytes`.
    ResponseBytes(u64),
    /// `response_header_timeout`.
    ResponseHeader(Duration),
}

/// As much as a bound allows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitValue {
    /// So much data.
    Bytes(u64),
    /// So long.
    Time(Duration),
}

impl ExchangeLimit {
    /// Its key.
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

    /// Returns the refusal of an exchange that exceeds the limit.
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

/// A limit that has been reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReachedLimit {
    /// The plan's key.
    pub name: &'static str,
    /// The value of the limit.
    pub limit: u64,
    /// For how long.
    pub scope: LimitScope,
    /// When there will be room again, as far as that is known.
    pub retry_after: Option<Duration>,
}

/// The scope of a limit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LimitScope {
    /// All calls of an execution.
    Execution,
    /// Calls in a time.
    Time(Duration),
    /// Requests under way.
    Concurrent,
}

impl ReachedLimit {
    /// Whole seconds until there will be room: rounded up, or the first try would come too early.
    #[must_use]
    pub fn retry_after_s(&self) -> Option<u64> {
        let wait = self.retry_after?;
        Some(wait.as_secs().saturating_add(u64::from(wait.subsec_nanos() > 0)).max(1))
    }

    /// The value of `RateLimit-Policy` (draft-ietf-httpapi-ratelimit-headers-10 §3).
    #[must_use]
    pub fn policy_field(&self) -> String {
        let Self { name, limit, scope: within, .. } = self;
        match within {
            LimitScope::Execution => format!("\"{name}\";q={limit}"),
            LimitScope::Time(time) => format!("\"{name}\";q={limit};w={}", time.as_secs()),
            LimitScope::Concurrent => format!("\"{name}\";q={limit};qu=\"concurrent-requests\""),
        }
    }

    /// The value of `RateLimit` (the same draft, §4): nothing is left.
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
    fn fields_say_what_the_limit_is_and_when_it_ends() {
        let limited = |within, millis: Option<u64>| ReachedLimit {
            name: "key",
            limit: 10,
            scope: within,
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

//! `[plans]`: limits of a task's requests, separate for tool calls and raw requests.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::model::tool::{Kind, MAX_TIMEOUT, Tool};

/// How long a tool call may take.
const TOOL_TIMEOUT: Duration = Duration::from_secs(30);
/// Bytes of the body that a tool call may send.
const TOOL_REQUEST: u64 = 1_000_000;

/// The limits of one plan. A task without a plan has the default: unlimited calls, and for raw requests timeouts long
/// enough for a day's work.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// `[plans.NAME]`: of tool calls.
    pub(super) tools: Limits,
    /// `[plans.NAME.raw]`: of raw requests.
    pub(super) raw: Limits,
}

/// The limits of one kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How many.
    pub calls: Calls,
    /// How fast.
    pub rate: Option<Rate>,
    /// How many at a time.
    pub concurrent: Option<u32>,
    /// How long.
    pub timeouts: Timeouts,
    /// Bytes of the body that may be sent. None: as many as there are.
    pub request: Option<u64>,
    /// How much may come back.
    pub response: Sizes,
}

/// How many calls an execution may make. None: as many as it likes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// From its beginning to its end.
    pub per_execution: Option<u64>,
    /// In a minute that begins with its first call.
    pub per_minute: Option<u64>,
}

/// How fast calls may follow one another (the generic cell rate algorithm, ITU-T I.371).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// In the long run, in a second.
    pub per_second: NonZeroU32,
    /// At once, after a rest.
    pub burst: NonZeroU32,
}

/// How long an exchange may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// From the last byte of the request to the head of the response.
    pub response_header: Duration,
    /// Without a byte in either direction.
    pub idle: Duration,
    /// The whole exchange. None: as long as bytes flow.
    pub request: Option<Duration>,
    /// The longest that a call may ask for: what the plan says for the whole exchange, if it does.
    pub most_asked: Duration,
}

/// How much of a body may come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of the body as the client gets it. None: as many as there are.
    pub most: Option<u64>,
    /// The treatment of a larger body.
    pub oversize: Oversize,
}

/// `on_oversize`: what becomes of a body that is too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oversize {
    /// It is refused, or broken off where that is found out too late.
    Refuse,
    /// The client gets as much as it may have.
    Truncate,
}

impl Plan {
    /// The limits of one kind of request.
    #[must_use]
    pub fn limits(&self, kind: Kind) -> Limits {
        match kind {
            Kind::Raw => self.raw,
            Kind::Tool(Tool::HttpRequest) => self.tools,
            // The results of these four are read by a model, so a part of a body is better than none.
            Kind::Tool(Tool::ApiCall | Tool::HttpGet | Tool::HttpPost | Tool::Webhook) => {
                Limits { response: Sizes { oversize: Oversize::Truncate, ..self.tools.response }, ..self.tools }
            }
        }
    }
}

impl Default for Plan {
    fn default() -> Self {
        let limits = |oversize| Limits {
            calls: Calls::default(),
            rate: None,
            concurrent: None,
            timeouts: Timeouts::default(),
            request: None,
            response: Sizes { most: None, oversize },
        };
        let (tools, raw) = (limits(Oversize::Truncate), limits(Oversize::Refuse));
        let timeouts = Timeouts { request: Some(TOOL_TIMEOUT), ..tools.timeouts };
        Self { tools: Limits { timeouts, request: Some(TOOL_REQUEST), ..tools }, raw }
    }
}

impl Default for Limits {
    /// Those of raw requests without a plan.
    fn default() -> Self {
        Plan::default().raw
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            response_header: Duration::from_secs(120),
            idle: Duration::from_secs(300),
            request: None,
            most_asked: MAX_TIMEOUT,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::compile::tests::policy;
    use super::*;
    use crate::model::name::TaskName;

    #[test]
    fn each_kind_of_request_has_limits_of_its_own() {
        let policy = policy(
            r#"
            [plans.p]
            calls_per_execution = 20
            calls_per_minute = 10
            concurrent = 2
            max_request_bytes = "2MB"
            max_response_bytes = "500KB"
            on_oversize = "refuse"
            request_timeout = "20s"
            [plans.p.raw]
            requests_per_second = 50
            burst = 200
            max_request_bytes = 7
            max_response_bytes = 12
            idle_timeout = "7s"
            [plans.q.raw]
            requests_per_second = 5
            [tasks.t]
            token = "env:T"
            plan = "p"
            [tasks.free]
            token = "env:F"
            [tasks.q]
            token = "env:Q"
            plan = "q"
            "#,
        );
        let limits = |task: &str, kind| policy.task(&TaskName::new(task)).unwrap().limits(kind);
        let number = |n| NonZeroU32::new(n).unwrap();
        let seconds = Duration::from_secs;
        let (request, tool) = (Kind::Tool(Tool::HttpRequest), Kind::Tool(Tool::HttpGet));
        let none = Limits::default();
        let tools = Limits {
            calls: Calls { per_execution: Some(20), per_minute: Some(10) },
            concurrent: Some(2),
            timeouts: Timeouts { request: Some(seconds(20)), most_asked: seconds(20), ..none.timeouts },
            request: Some(2_000_000),
            response: Sizes { most: Some(500_000), oversize: Oversize::Refuse },
            ..none
        };
        let raw = Limits {
            rate: Some(Rate { per_second: number(50), burst: number(200) }),
            timeouts: Timeouts { idle: seconds(7), ..none.timeouts },
            request: Some(7),
            response: Sizes { most: Some(12), oversize: Oversize::Refuse },
            ..none
        };
        assert_eq!(limits("t", Kind::Raw), raw);
        assert_eq!(limits("t", request), tools);
        let truncated = Sizes { oversize: Oversize::Truncate, ..tools.response };
        assert_eq!(limits("t", tool), Limits { response: truncated, ..tools });
        assert_eq!(limits("free", Kind::Raw), none);
        let free = Limits {
            timeouts: Timeouts { request: Some(seconds(30)), ..none.timeouts },
            request: Some(1_000_000),
            response: Sizes { most: None, oversize: Oversize::Truncate },
            ..none
        };
        assert_eq!(limits("free", request), free);
        assert_eq!(limits("q", request), free, "neither inherits from the other");
        assert_eq!(limits("q", Kind::Raw).rate, Some(Rate { per_second: number(5), burst: number(5) }));
    }
}

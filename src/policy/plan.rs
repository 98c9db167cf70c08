//! `[plans]`: the limits on a task's requests, separate for tool calls and raw requests.

use std::num::NonZeroU32;
use std::time::Duration;

use crate::model::tool::{Kind, MAX_TIMEOUT, Tool};

/// The default timeout of a tool call.
const TOOL_TIMEOUT: Duration = Duration::from_secs(30);
/// The default maximum size of a tool call's request body, in bytes.
const TOOL_REQUEST: u64 = 1_000_000;

/// The limits of one plan. A task without a plan has the default plan: an unlimited number of calls, and no timeout
/// for a whole raw request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// `[plans.NAME]`: the limits of tool calls.
    pub(super) tools: Limits,
    /// `[plans.NAME.raw]`: the limits of raw requests.
    pub(super) raw: Limits,
}

/// The limits of one kind of request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// The number of calls.
    pub calls: Calls,
    /// The rate of calls.
    pub rate: Option<Rate>,
    /// The number of concurrent requests.
    pub concurrent: Option<u32>,
    /// The timeouts.
    pub timeouts: Timeouts,
    /// The maximum size of the request body, in bytes. `None` if it is unlimited.
    pub request: Option<u64>,
    /// The limit on the response body.
    pub response: Sizes,
}

/// The numbers of calls that an execution may make. `None` is unlimited.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Calls {
    /// The number of calls in the whole execution.
    pub per_execution: Option<u64>,
    /// The number of calls in a minute that begins with its first call.
    pub per_minute: Option<u64>,
}

/// The rate of calls (generic cell rate algorithm, ITU-T I.371).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rate {
    /// The sustained number of calls per second.
    pub per_second: NonZeroU32,
    /// The number of calls allowed at once after an idle period.
    pub burst: NonZeroU32,
}

/// The timeouts of an exchange.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timeouts {
    /// The time from the last byte of the request to the head of the response.
    pub response_header: Duration,
    /// The time without a byte in either direction.
    pub idle: Duration,
    /// The time of the whole exchange. `None` if it is unlimited.
    pub request: Option<Duration>,
    /// The longest timeout that a call may ask for: the plan's own `request_timeout`, if it is set.
    pub most_asked: Duration,
}

/// The limit on a response body.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// The maximum size of the body as the client receives it, in bytes. `None` if it is unlimited.
    pub most: Option<u64>,
    /// The handling of a larger body.
    pub oversize: Oversize,
}

/// `on_oversize`: the handling of a response body that is too large.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Oversize {
    /// The response is refused, or aborted if its head has already been sent.
    Refuse,
    /// The body is truncated to the limit.
    Truncate,
}

impl Plan {
    /// Returns the limits of one kind of request.
    #[must_use]
    pub fn limits(&self, kind: Kind) -> Limits {
        match kind {
            Kind::Raw => self.raw,
            Kind::Tool(Tool::HttpRequest) => self.tools,
            // A model reads the results of these four tools, and a truncated result is better than none.
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
    /// Returns the limits of raw requests without a plan.
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
    fn each_kind_of_request_has_its_own_limits() {
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

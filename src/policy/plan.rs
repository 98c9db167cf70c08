//! `[plans]`: how much a task's requests may take, tool calls and raw requests apart.

use std::time::Duration;

use crate::model::tool::{Kind, Tool};

/// What one plan allows. A task without a plan has the default: no limits, and patience as long as a day's
/// work needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Plan {
    /// `[plans.NAME]`: of tool calls.
    pub(super) tools: Limits,
    /// `[plans.NAME.raw]`: of raw requests.
    pub(super) raw: Limits,
}

/// What one kind of request may take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// How long.
    pub timeouts: Timeouts,
    /// How much may come back.
    pub response: Sizes,
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
}

/// How much of a body may come back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sizes {
    /// Bytes of the body as the client gets it. None: as many as there are.
    pub most: Option<u64>,
    /// What becomes of a body that is larger.
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
            // What these four return is read by a model, and part of it is better than nothing.
            Kind::Tool(Tool::ApiCall | Tool::HttpGet | Tool::HttpPost | Tool::Webhook) => {
                Limits { response: Sizes { oversize: Oversize::Truncate, ..self.tools.response }, ..self.tools }
            }
        }
    }
}

impl Default for Plan {
    fn default() -> Self {
        let limits = |oversize| Limits { timeouts: Timeouts::default(), response: Sizes { most: None, oversize } };
        Self { tools: limits(Oversize::Truncate), raw: limits(Oversize::Refuse) }
    }
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { response_header: Duration::from_secs(120), idle: Duration::from_secs(300), request: None }
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
            max_response_bytes = "500KB"
            on_oversize = "refuse"
            [plans.p.raw]
            max_response_bytes = 12
            idle_timeout = "7s"
            [tasks.t]
            token = "env:T"
            plan = "p"
            [tasks.free]
            token = "env:F"
            "#,
        );
        let rows = [
            ("t", Kind::Raw, Some(12), Oversize::Refuse, 7),
            ("t", Kind::Tool(Tool::HttpRequest), Some(500_000), Oversize::Refuse, 7),
            ("t", Kind::Tool(Tool::HttpGet), Some(500_000), Oversize::Truncate, 7),
            ("free", Kind::Raw, None, Oversize::Refuse, 300),
            ("free", Kind::Tool(Tool::HttpRequest), None, Oversize::Truncate, 300),
        ];
        for (task, kind, most, oversize, idle) in rows {
            let limits = policy.task(&TaskName::new(task)).unwrap().limits(kind);
            assert_eq!(limits.response, Sizes { most, oversize }, "{task} {kind:?}");
            assert_eq!(limits.timeouts.idle.as_secs(), idle, "{task} {kind:?}");
        }
    }
}

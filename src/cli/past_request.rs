//! The requests that an audit log records, as `exeat audit learn` and `exeat audit replay` need them.

use std::net::IpAddr;

use http::Method;
use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use crate::audit::line::Event;
use crate::model::name::TaskName;
use crate::model::refusal::Refusal;
use crate::model::target::{Scheme, Target};
use crate::model::tool::{Kind, Tool};

/// A request, or a tunnel that was not inspected.
pub(super) struct PastRequest {
    pub(super) at: OffsetDateTime,
    pub(super) task: TaskName,
    pub(super) kind: Kind,
    pub(super) method: Method,
    pub(super) target: Target,
    /// The path. `None` for `CONNECT`.
    pub(super) path: Option<LoggedPath>,
    pub(super) outcome: Outcome,
    /// The credentials that were sent, the selected one first.
    pub(super) credentials: Vec<String>,
    /// Whether an operator had to approve it.
    pub(super) needed_approval: bool,
    /// The address that it was sent to.
    pub(super) address: Option<IpAddr>,
}

/// The decision on a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Outcome {
    /// It was allowed and sent. `observed` if only `observe` allowed it.
    Allowed { observed: bool },
    /// It was refused.
    Refused(Refusal),
    /// An allowed one has ended: its address is known now. The request itself is in an earlier line.
    Ended,
}

/// A path as the log has it.
pub(super) enum LoggedPath {
    /// As the client sent it, or with a value of a credential replaced by asterisks.
    Whole(String),
    /// The beginning of a longer path.
    Cut(String),
    /// The path of a webhook, of which the log has only a hash.
    Hash,
}

/// The meaning of a line.
pub(super) enum Parsed {
    Request(Box<PastRequest>),
    /// A number of requests that have no lines of their own.
    Counted {
        count: u64,
        of: LineOrigin,
    },
    /// A line about a request of which the log does not say enough.
    Incomplete(LineOrigin),
    /// A line that is not about a request, or that belongs to an earlier one.
    Other,
    /// Not a line of an audit log.
    Unreadable,
}

/// The time of a line and its task.
pub(super) struct LineOrigin {
    pub(super) at: OffsetDateTime,
    pub(super) task: Option<String>,
}

/// The length of a path from which it may have been cut, in characters.
const CUT_LENGTH: usize = 2048;

/// The fields that are used.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Line {
    ts: String,
    event: Event,
    task: Option<String>,
    tool: Option<String>,
    method: Option<String>,
    scheme: Option<String>,
    host: Option<String>,
    port: Option<u16>,
    path: Option<String>,
    count: Option<u64>,
    code: Option<String>,
    rule: Option<String>,
    approval: Option<String>,
    addr: Option<String>,
    credential_used: Option<String>,
    credentials_beside: Vec<String>,
}

/// Reads a line of the log.
pub(super) fn parse(written: &str) -> Parsed {
    let Ok(line) = serde_json::from_str::<Line>(written.trim_end()) else { return Parsed::Unreadable };
    let Ok(at) = OffsetDateTime::parse(&line.ts, &Rfc3339) else { return Parsed::Unreadable };
    let is_end = line.event == Event::Closed && line.addr.is_some();
    if !is_end && !matches!(line.event, Event::Decided | Event::Refused) {
        return Parsed::Other;
    }
    if let Some(count) = line.count {
        return Parsed::Counted { count, of: LineOrigin { at, task: line.task } };
    }
    let of = LineOrigin { at, task: line.task.clone() };
    let otherwise = if is_end { Parsed::Other } else { Parsed::Incomplete(of) };
    request(line, at).map_or(otherwise, |request| Parsed::Request(Box::new(request)))
}

fn request(line: Line, at: OffsetDateTime) -> Option<PastRequest> {
    let outcome = match line.event {
        Event::Decided => {
            Outcome::Allowed { observed: line.rule.as_deref().is_some_and(|rule| rule.starts_with("observe:")) }
        }
        Event::Closed => Outcome::Ended,
        _ => Outcome::Refused(Refusal::with_code(line.code.as_deref()?)?),
    };
    let kind = match line.tool.as_deref() {
        None => Kind::Raw,
        // Other names are those of requests to the proxy itself.
        Some(name) => Kind::Tool(Tool::from_name(name)?),
    };
    let scheme = match line.scheme.as_deref()? {
        "https" => Scheme::Https,
        "http" => Scheme::Http,
        _ => return None,
    };
    let target = Target::from_authority(scheme, &format!("{}:{}", line.host?, line.port?)).ok()?;
    let method: Method = line.method?.parse().ok()?;
    let path = match line.path {
        Some(path) if path.starts_with("sha256:") => Some(LoggedPath::Hash),
        Some(path) if path.chars().count() >= CUT_LENGTH => Some(LoggedPath::Cut(path)),
        Some(path) => Some(LoggedPath::Whole(path)),
        None if method == Method::CONNECT => None,
        None => return None,
    };
    Some(PastRequest {
        at,
        task: TaskName::new(&line.task?),
        kind,
        method,
        target,
        path,
        outcome,
        credentials: line.credential_used.into_iter().chain(line.credentials_beside).collect(),
        needed_approval: line.approval.is_some(),
        address: line.addr.and_then(|address| address.parse().ok()),
    })
}

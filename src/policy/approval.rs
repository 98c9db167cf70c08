//! `approval`: the requests of an integration that the operator has to approve one by one. `commands`: the same for commands of a
//! task.

use std::time::Duration;

use http::Method;
use toml::Value;

use super::reader::{Findings, Readable, Section};
use crate::model::tool::{Kind, Tool};

/// The default time in which an approval can be decided and used.
const DEFAULT_EXPIRY: Duration = Duration::from_secs(600);
/// The bounds of `expires`. A person cannot decide in less time, and has forgotten the request after more.
const EXPIRY_BOUNDS: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(24 * 3600)];

/// The approval rule of an integration. Without methods and tools, it covers every request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Approval {
    methods: Option<Vec<Method>>,
    tools: Option<Vec<Tool>>,
    expires: Duration,
}

impl Approval {
    /// Returns how long an approval of such a request is valid, or `None` if the request needs none.
    pub(super) fn expiry_for(&self, method: &Method, kind: Kind) -> Option<Duration> {
        // Some origins accept `post` as POST.
        let same = |known: &Method| known.as_str().eq_ignore_ascii_case(method.as_str());
        let by_method = self.methods.as_ref().is_none_or(|methods| methods.iter().any(same));
        let by_tool = self.tools.as_ref().is_none_or(|tools| kind.tool().is_some_and(|tool| tools.contains(&tool)));
        (by_method && by_tool).then_some(self.expires)
    }

    /// Returns the methods that the rule lists.
    pub(super) fn methods(&self) -> &[Method] {
        self.methods.as_deref().unwrap_or_default()
    }

    /// Reads the key `approval`, which is a string or a table.
    pub(super) fn read(s: &mut Section<'_>, findings: &Findings) -> Option<Self> {
        if s.has_table("approval") {
            return Some(Self::table(s.section("approval"), findings));
        }
        s.take::<Required>("approval").map(|_| Self { methods: None, tools: None, expires: DEFAULT_EXPIRY })
    }

    fn table(mut s: Section<'_>, findings: &Findings) -> Self {
        let (methods, tools) = (s.take::<Vec<Method>>("methods"), s.take::<Vec<Tool>>("tools"));
        let expires = expiry(&mut s, findings);
        let empty = [
            ("methods", methods.as_ref().is_some_and(Vec::is_empty)),
            ("tools", tools.as_ref().is_some_and(Vec::is_empty)),
        ];
        for (key, _) in empty.into_iter().filter(|(_, is_empty)| *is_empty) {
            findings.problem(
                s.at(key),
                "an empty list requires no approval",
                "at least one entry, or leave the key out",
            );
        }
        Self { methods, tools, expires }
    }
}

/// Reads the key `commands` of a task: a string, or a table. Returns how long the approval of a command is valid.
pub(super) fn of_commands(s: &mut Section<'_>, findings: &Findings) -> Option<Duration> {
    if s.has_table("commands") {
        return Some(expiry(&mut s.section("commands"), findings));
    }
    s.take::<ByApproval>("commands").map(|_| DEFAULT_EXPIRY)
}

fn expiry(s: &mut Section<'_>, findings: &Findings) -> Duration {
    let expires = s.take("expires").unwrap_or(DEFAULT_EXPIRY);
    let [min, max] = EXPIRY_BOUNDS;
    if !(min..=max).contains(&expires) {
        findings.problem(s.at("expires"), format!("{} s is out of range", expires.as_secs_f64()), "\"10s\" to \"24h\"");
    }
    expires
}

/// The string `"by_approval"`.
struct ByApproval;

impl Readable for ByApproval {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let is_by_approval = value.as_str() == Some("by_approval");
        if !is_by_approval {
            findings.problem(path, format!("invalid value {value}"), "\"by_approval\" or { expires = \"10m\" }");
        }
        is_by_approval.then_some(Self)
    }
}

/// The string `"required"`.
struct Required;

impl Readable for Required {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let is_required = value.as_str() == Some("required");
        if !is_required {
            findings.problem(path, format!("invalid value {value}"), "\"required\" or { methods = [\"POST\"] }");
        }
        is_required.then_some(Self)
    }
}

//! `approval`: the requests under an integration that need an approval.

use std::time::Duration;

use http::Method;
use toml::Value;

use super::reader::{Findings, Readable, Section};
use crate::model::tool::{Kind, Tool};

/// Until when one can be decided and used, if nothing is said.
const EXPIRES: Duration = Duration::from_secs(600);
/// Nobody decides in less, and nobody remembers after more what was asked.
const BOUNDS: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(24 * 3600)];

/// The approval settings of an integration. Without methods and tools, every request needs one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Approval {
    methods: Option<Vec<Method>>,
    tools: Option<Vec<Tool>>,
    expires: Duration,
}

impl Approval {
    /// How long an approval of such a request is good for, if it needs one.
    pub(super) fn asks(&self, method: &Method, kind: Kind) -> Option<Duration> {
        // Some origins take `post` for POST.
        let same = |known: &Method| known.as_str().eq_ignore_ascii_case(method.as_str());
        let by_method = self.methods.as_ref().is_none_or(|methods| methods.iter().any(same));
        let by_tool = self.tools.as_ref().is_none_or(|tools| kind.tool().is_some_and(|tool| tools.contains(&tool)));
        (by_method && by_tool).then_some(self.expires)
    }

    /// Methods that it names.
    pub(super) fn methods(&self) -> &[Method] {
        self.methods.as_deref().unwrap_or_default()
    }

    /// Reads the key, which is a word or a table.
    pub(super) fn read(s: &mut Section<'_>, findings: &Findings) -> Option<Self> {
        if s.has_table("approval") {
            return Some(Self::table(s.section("approval"), findings));
        }
        s.take::<Required>("approval").map(|_| Self { methods: None, tools: None, expires: EXPIRES })
    }

    fn table(mut s: Section<'_>, findings: &Findings) -> Self {
        let (methods, tools) = (s.take::<Vec<Method>>("methods"), s.take::<Vec<Tool>>("tools"));
        let expires = s.take("expires").unwrap_or(EXPIRES);
        let [least, most] = BOUNDS;
        if !(least..=most).contains(&expires) {
            findings.problem(s.at("expires"), format!("{} s", expires.as_secs_f64()), "\"10s\" to \"24h\"");
        }
        let empty = [
            ("methods", methods.as_ref().is_some_and(Vec::is_empty)),
            ("tools", tools.as_ref().is_some_and(Vec::is_empty)),
        ];
        for (key, _) in empty.into_iter().filter(|(_, is_empty)| *is_empty) {
            findings.problem(s.at(key), "an empty list requires nothing", "list the intended values, or omit the key");
        }
        Self { methods, tools, expires }
    }
}

/// The word.
struct Required;

impl Readable for Required {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let is_required = value.as_str() == Some("required");
        if !is_required {
            findings.problem(
                path,
                format!("{value} is not a valid choice"),
                "\"required\" or { methods = [\"POST\"] }",
            );
        }
        is_required.then_some(Self)
    }
}

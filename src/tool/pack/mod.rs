//! Packs: tools composed of primitives. A pack is checked as a whole before any of its tools is offered.
//!
//! The order of use is `Pack::read`, [`Pack::tools`], [`Composed::run`] and [`Step`]. Nothing here performs a request or
//! touches a file: the caller sends the request, and the proxy judges it like any other, or has a sandbox run the primitive.

mod compose;
mod composed;
mod delegation;
mod mapping;
mod mock;
mod parameter;
mod place;
mod policy;
mod problem;
mod references;
mod request;
mod schema;
mod template;
#[cfg(test)]
mod tests;
mod url;
mod yaml;
pub use composed::{Composed, Step};
pub use problem::Problem;
pub use request::Rendered;

use compose::Linked;
use mapping::Fields;
use place::{Findings, Place};
use policy::{HTTP_REQUEST, Lock, PRIMITIVES, Policy, primitive};
use yaml::Node;

use super::primitives::Primitive;

/// A valid pack.
#[derive(Debug)]
pub struct Pack {
    policy: Policy,
    tools: Vec<Entry>,
}

/// A composed tool, and whether it may be called.
#[derive(Debug)]
struct Entry {
    tool: std::sync::Arc<Composed>,
    judged: Result<String, String>,
    /// The primitive at the end of its delegation. `None` for a mock.
    primitive: Option<&'static str>,
}

/// One row of the gate table.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Gate {
    /// The tool's or primitive's name.
    pub name: String,
    /// Whether it is a composed tool and not a built-in primitive.
    pub composed: bool,
    /// Whether the pack allows its calls.
    pub allowed: bool,
    /// The part of the pack that decides this.
    pub by: String,
    /// What it needs to be offered: nothing, a sandbox, or one with commands for it.
    pub needs: Option<&'static str>,
}

/// The meaning of a name in a pack.
#[derive(Clone, Debug)]
pub enum Lookup<'p> {
    /// The primitive `http_request`, which may be called.
    HttpRequest,
    /// A composed tool that may be called, where its primitive is served.
    Offered(&'p Composed),
    /// Another primitive that may be called, in a sandbox.
    Primitive(&'static str),
    /// The name is unknown.
    Unknown,
    /// Closed by the pack, with the reason.
    Withheld(String),
}

/// Returns whether a primitive that works in a sandbox may be called without a pack, as with an empty one.
pub(super) fn is_open_without_pack(name: &str) -> bool {
    primitive(name).is_some_and(|(_, lock)| Policy::default().check_lock(lock).is_ok())
}

fn needs(primitive: &str) -> Option<&'static str> {
    match Primitive::named(primitive)? {
        Primitive::RunTests | Primitive::Build | Primitive::Exec => Some("a sandbox with commands"),
        _ => Some("a sandbox"),
    }
}

impl Pack {
    /// Parses a pack from YAML.
    ///
    /// # Errors
    /// All problems, in document order.
    pub fn read(text: &str) -> Result<Self, Vec<Problem>> {
        let root = Node::read(text).map_err(|problem| vec![problem])?;
        let findings = Findings::default();
        if !matches!(root, Node::Map(_)) {
            let message = format!("must be a mapping, not {}", root.kind());
            return Err(vec![Problem { path: "pack".to_owned(), message }]);
        }
        let read = Fields::of(&root, Place::default(), &findings).and_then(|fields| {
            fields.report_misspellings(&["tools", "version"]);
            let policy = Policy::read(&fields, &findings);
            let linked = compose::read(&fields, &findings)?;
            Some(Self::new(policy, linked))
        });
        read.ok_or_else(|| findings.into_problems(&root))
    }

    fn new(policy: Policy, linked: Vec<Linked>) -> Self {
        let entry = |Linked { tool, target }| {
            let judged = match target.primitive.and_then(primitive) {
                None => policy.calls_tools().map(|()| "a mock needs no gate".to_owned()),
                Some((name, lock)) => {
                    let over = |by: String| format!("over {name}: {by}");
                    policy.calls_tools().and_then(|()| policy.check_lock(lock)).map(over).map_err(over)
                }
            };
            Entry { tool, judged, primitive: target.primitive }
        };
        let tools = linked.into_iter().map(entry).collect();
        Self { policy, tools }
    }

    /// Returns all primitives, then all composed tools: whether they are allowed and by what, and what they need.
    #[must_use]
    pub fn gates(&self) -> Vec<Gate> {
        let row = |name: &str, composed: bool, judged: &Result<String, String>, primitive: Option<&str>| {
            let (Ok(by) | Err(by)) = judged.clone();
            let needs = primitive.and_then(needs);
            Gate { name: name.to_owned(), composed, allowed: judged.is_ok(), by, needs }
        };
        let primitives =
            PRIMITIVES.iter().map(|(name, lock)| row(name, false, &self.policy.check_lock(*lock), Some(name)));
        let tools = self.tools.iter().map(|entry| row(entry.tool.name(), true, &entry.judged, entry.primitive));
        primitives.chain(tools).collect()
    }

    /// Returns whether any tool may be called, including the built-in ones.
    #[must_use]
    pub fn calls_tools(&self) -> bool {
        self.policy.calls_tools().is_ok()
    }

    /// Returns whether `http_request` itself may be called.
    #[must_use]
    pub fn offers_http_request(&self) -> bool {
        self.policy.check_lock(Lock::Network).is_ok()
    }

    /// Returns whether `query_sql` may change databases.
    #[must_use]
    pub fn allows_sql_writes(&self) -> bool {
        self.policy.sql_writes
    }

    /// Returns the reason why scripts may not use a primitive under another name, if they may not.
    pub(super) fn why_closed(&self, name: &str) -> Option<String> {
        primitive(name).and_then(|(_, lock)| self.policy.check_lock(lock).err())
    }

    /// Returns the composed tools that may be called, in document order, each with the primitive at the end of its delegation. A
    /// mock has none.
    pub fn tools(&self) -> impl Iterator<Item = (&Composed, Option<&'static str>)> {
        self.tools.iter().filter(|entry| entry.judged.is_ok()).map(|entry| (&*entry.tool, entry.primitive))
    }

    /// Returns the meaning of a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Lookup<'_> {
        if let Some(entry) = self.tools.iter().find(|entry| entry.tool.name() == name) {
            return match &entry.judged {
                Err(why) => Lookup::Withheld(why.clone()),
                Ok(_) => Lookup::Offered(&entry.tool),
            };
        }
        match primitive(name).map(|(primitive, lock)| (primitive, self.policy.check_lock(lock))) {
            None => Lookup::Unknown,
            Some((_, Err(why))) => Lookup::Withheld(why),
            Some((HTTP_REQUEST, Ok(_))) => Lookup::HttpRequest,
            Some((name, Ok(_))) => Lookup::Primitive(name),
        }
    }
}

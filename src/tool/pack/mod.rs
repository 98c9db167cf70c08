//! Packs: tools composed of `http_request`. A pack is checked as a whole before any of its tools is offered.
//!
//! The order of use is `Pack::read`, [`Pack::tools`], [`Composed::run`] and [`Step`]. Nothing here performs a request:
//! the caller sends it, and the proxy judges it like any other.

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
    served: bool,
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
    /// Whether exeat serves it.
    pub served: bool,
}

/// The meaning of a name in a pack.
#[derive(Clone, Debug)]
pub enum Lookup<'p> {
    /// The primitive `http_request`, which may be called.
    HttpRequest,
    /// Allowed, but it uses or is a primitive that exeat does not serve.
    NotServed,
    /// A composed tool that may be called.
    Offered(&'p Composed),
    /// The name is unknown.
    Unknown,
    /// Closed by the pack, with the reason.
    Withheld(String),
}

/// Returns the known primitives that exeat does not serve.
pub fn not_served() -> impl Iterator<Item = &'static str> {
    PRIMITIVES.iter().map(|(name, _)| *name).filter(|name| *name != HTTP_REQUEST)
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
            Entry { tool, judged, served: target.primitive.is_none_or(|name| name == HTTP_REQUEST) }
        };
        let tools = linked.into_iter().map(entry).collect();
        Self { policy, tools }
    }

    /// Returns all primitives, then all composed tools: whether they are allowed and by what, and whether exeat serves
    /// them.
    #[must_use]
    pub fn gates(&self) -> Vec<Gate> {
        let row = |name: &str, composed: bool, judged: &Result<String, String>, served: bool| {
            let (Ok(by) | Err(by)) = judged.clone();
            Gate { name: name.to_owned(), composed, allowed: judged.is_ok(), by, served }
        };
        let primitives = PRIMITIVES
            .iter()
            .map(|(name, lock)| row(name, false, &self.policy.check_lock(*lock), *name == HTTP_REQUEST));
        let tools = self.tools.iter().map(|entry| row(entry.tool.name(), true, &entry.judged, entry.served));
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

    /// Returns the composed tools that may be called, in document order.
    pub fn tools(&self) -> impl Iterator<Item = &Composed> {
        self.tools.iter().filter(|entry| entry.served && entry.judged.is_ok()).map(|entry| &*entry.tool)
    }

    /// Returns the meaning of a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Lookup<'_> {
        if let Some(entry) = self.tools.iter().find(|entry| entry.tool.name() == name) {
            return match &entry.judged {
                Err(why) => Lookup::Withheld(why.clone()),
                Ok(_) if entry.served => Lookup::Offered(&entry.tool),
                Ok(_) => Lookup::NotServed,
            };
        }
        match primitive(name).map(|(primitive, lock)| (primitive, self.policy.check_lock(lock))) {
            None => Lookup::Unknown,
            Some((_, Err(why))) => Lookup::Withheld(why),
            Some((HTTP_REQUEST, Ok(_))) => Lookup::HttpRequest,
            Some((_, Ok(_))) => Lookup::NotServed,
        }
    }
}

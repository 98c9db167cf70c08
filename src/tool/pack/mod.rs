//! Packs: tools composed of `http_request`, checked as a whole before any is offered.
//!
//! `Pack::read` → [`Pack::tools`] → [`Composed::run`] → [`Step`]. Pure: the request itself is made by who asked,
//! and the proxy judges it like any other.

mod compose;
mod composed;
mod delegation;
mod mapping;
mod mock;
mod place;
mod policy;
mod references;
mod request;
mod schema;
mod template;
#[cfg(test)]
mod tests;
mod url;
mod yaml;
pub use composed::{Composed, Step};
pub use place::Problem;
pub use request::Rendered;

use compose::Linked;
use mapping::Fields;
use place::{Findings, Place};
use policy::{HTTP_REQUEST, Lock, PRIMITIVES, Policy, primitive};
use yaml::Node;

/// A pack in which nothing is wrong.
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
    /// A tool of the pack, and no built-in primitive.
    pub composed: bool,
    /// Whether the pack lets it be called.
    pub allowed: bool,
    /// The part of the pack that requires it.
    pub by: String,
    /// Whether exeat runs it.
    pub served: bool,
}

/// The meaning of a name in a pack.
#[derive(Clone, Debug)]
pub enum Found<'p> {
    /// The primitive `http_request`, which may be called.
    HttpRequest,
    /// Allowed, but over a primitive that is not run here, or such a primitive itself.
    NotServed,
    /// A composed tool that may be called.
    Offered(&'p Composed),
    /// Nothing of that name.
    Unknown,
    /// Closed by the pack; the words say by what.
    Withheld(String),
}

/// Primitives that are known, and run elsewhere.
pub fn not_served() -> impl Iterator<Item = &'static str> {
    PRIMITIVES.iter().map(|(name, _)| *name).filter(|name| *name != HTTP_REQUEST)
}

impl Pack {
    /// Reads a pack from YAML.
    ///
    /// # Errors
    /// Everything that is wrong, in the document's order.
    pub fn read(text: &str) -> Result<Self, Vec<Problem>> {
        let root = Node::read(text).map_err(|problem| vec![problem])?;
        let findings = Findings::default();
        if !matches!(root, Node::Map(_)) {
            let message = format!("must be a mapping, not {}", root.kind());
            return Err(vec![Problem { path: "pack".to_owned(), message }]);
        }
        let read = Fields::of(&root, Place::default(), &findings).and_then(|fields| {
            fields.no_slips(&["tools", "version"]);
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
                    policy.calls_tools().and_then(|()| policy.judge(lock)).map(over).map_err(over)
                }
            };
            Entry { tool, judged, served: target.primitive.is_none_or(|name| name == HTTP_REQUEST) }
        };
        let tools = linked.into_iter().map(entry).collect();
        Self { policy, tools }
    }

    /// Every primitive, then every composed tool: allowed or not and by what, and whether it is run here.
    #[must_use]
    pub fn gates(&self) -> Vec<Gate> {
        let row = |name: &str, composed: bool, judged: &Result<String, String>, served: bool| {
            let (Ok(by) | Err(by)) = judged.clone();
            Gate { name: name.to_owned(), composed, allowed: judged.is_ok(), by, served }
        };
        let primitives =
            PRIMITIVES.iter().map(|(name, lock)| row(name, false, &self.policy.judge(*lock), *name == HTTP_REQUEST));
        let tools = self.tools.iter().map(|entry| row(entry.tool.name(), true, &entry.judged, entry.served));
        primitives.chain(tools).collect()
    }

    /// Whether any tool may be called at all, those that need no pack included.
    #[must_use]
    pub fn calls_tools(&self) -> bool {
        self.policy.calls_tools().is_ok()
    }

    /// Whether `http_request` itself may be called.
    #[must_use]
    pub fn offers_http_request(&self) -> bool {
        self.policy.judge(Lock::Network).is_ok()
    }

    /// The composed tools that may be called, in the document's order.
    pub fn tools(&self) -> impl Iterator<Item = &Composed> {
        self.tools.iter().filter(|entry| entry.served && entry.judged.is_ok()).map(|entry| &*entry.tool)
    }

    /// Returns the meaning of a name.
    #[must_use]
    pub fn find(&self, name: &str) -> Found<'_> {
        if let Some(entry) = self.tools.iter().find(|entry| entry.tool.name() == name) {
            return match &entry.judged {
                Err(why) => Found::Withheld(why.clone()),
                Ok(_) if entry.served => Found::Offered(&entry.tool),
                Ok(_) => Found::NotServed,
            };
        }
        match primitive(name).map(|(primitive, lock)| (primitive, self.policy.judge(lock))) {
            None => Found::Unknown,
            Some((_, Err(why))) => Found::Withheld(why),
            Some((HTTP_REQUEST, Ok(_))) => Found::HttpRequest,
            Some((_, Ok(_))) => Found::NotServed,
        }
    }
}

//! Positions in a pack, and the problems found at them.

use std::cell::RefCell;
use std::fmt;

use super::problem::{Problem, truncate};
use super::yaml::Node;

/// Maximum length of a key in a path, in characters.
const MAX_KEY: usize = 80;

/// A position in the document.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Place(Vec<Step>);

#[derive(Clone, Debug, PartialEq, Eq)]
enum Step {
    At(usize),
    Key(String),
}

impl Place {
    pub(super) fn key(&self, key: &str) -> Self {
        self.step(Step::Key(key.to_owned()))
    }

    pub(super) fn at(&self, index: usize) -> Self {
        self.step(Step::At(index))
    }

    fn step(&self, step: Step) -> Self {
        let mut steps = self.0.clone();
        steps.push(step);
        Self(steps)
    }

    /// Returns the sort key for document order. A missing key counts as its mapping, which precedes everything in it.
    fn order(&self, root: &Node) -> Vec<usize> {
        let mut order = Vec::new();
        let mut node = root;
        for step in &self.0 {
            let found = match (step, node) {
                (Step::At(index), Node::List(items)) => items.get(*index).map(|item| (*index, item)),
                (Step::Key(key), Node::Map(members)) => {
                    members.iter().enumerate().find(|(_, (name, _))| name == key).map(|(at, (_, value))| (at, value))
                }
                _ => None,
            };
            let Some((at, next)) = found else { break };
            order.push(at);
            node = next;
        }
        order
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (depth, step) in self.0.iter().enumerate() {
            match step {
                Step::At(index) => write!(f, "[{index}]")?,
                Step::Key(key) if plain(key) => write!(f, "{}{key}", if depth == 0 { "" } else { "." })?,
                Step::Key(key) => write!(f, "[{:?}]", truncate(key, MAX_KEY))?,
            }
        }
        Ok(())
    }
}

fn plain(key: &str) -> bool {
    let byte = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'$');
    !key.is_empty() && key.len() <= MAX_KEY && key.bytes().all(byte)
}

/// The problems found so far.
#[derive(Default)]
pub(super) struct Findings(RefCell<Vec<(Place, String)>>);

impl Findings {
    pub(super) fn problem(&self, place: &Place, message: impl Into<String>) {
        self.0.borrow_mut().push((place.clone(), message.into()));
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.borrow().is_empty()
    }

    /// Returns the problems in document order. Problems at one position keep the order in which they were found.
    pub(super) fn into_problems(self, root: &Node) -> Vec<Problem> {
        let mut found = self.0.into_inner();
        found.sort_by_cached_key(|(place, _)| place.order(root));
        found.into_iter().map(|(place, message)| Problem { path: place.to_string(), message }).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_are_written_as_key_paths() {
        let tool = Place::default().key("tools").key("custom").at(2);
        assert_eq!(tool.key("args").to_string(), "tools.custom[2].args");
        assert_eq!(tool.key("a b\n").to_string(), "tools.custom[2][\"a b\u{fffd}\"]");
        assert_eq!(tool.key(&"k".repeat(1000)).to_string().chars().count(), 15 + 81 + 4);
    }

    #[test]
    fn problems_are_in_document_order() {
        let root = Node::read("b: {x: 1, y: 2}\na: [1, 2]").unwrap();
        let at = Place::default();
        let places = [at.key("a").at(1), at.key("b").key("y"), at.key("b").key("missing"), at.key("a")];
        let findings = Findings::default();
        places.iter().for_each(|place| findings.problem(place, "wrong"));
        let paths: Vec<String> = findings.into_problems(&root).into_iter().map(|problem| problem.path).collect();
        assert_eq!(paths, ["b.missing", "b.y", "a", "a[1]"]);
    }
}

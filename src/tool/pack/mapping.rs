//! Parses one mapping of a pack key by key.

use super::place::{Findings, Place};
use super::problem::truncate;
use super::yaml::Node;

/// The problem with a missing key.
pub(super) const MISSING: &str = "missing";

/// Maximum length of a text of the pack in a message, in characters.
pub(super) const MAX_ECHO: usize = 80;

/// A mapping. A key with an empty value counts as absent.
pub(super) struct Fields<'p> {
    pub(super) place: Place,
    members: &'p [(String, Node)],
    findings: &'p Findings,
}

impl<'p> Fields<'p> {
    pub(super) fn of(node: &'p Node, place: Place, findings: &'p Findings) -> Option<Self> {
        match node {
            Node::Map(members) => Some(Self { place, members, findings }),
            other => {
                findings.problem(&place, format!("must be a mapping, not {}", other.kind()));
                None
            }
        }
    }

    pub(super) fn at(&self, key: &str) -> Place {
        self.place.key(key)
    }

    /// Returns true if the key is present, even with an empty value.
    pub(super) fn has(&self, key: &str) -> bool {
        self.members.iter().any(|(name, _)| name == key)
    }

    /// Returns the value as written, even an empty one.
    pub(super) fn written(&self, key: &str) -> Option<&'p Node> {
        self.members.iter().find(|(name, _)| name == key).map(|(_, value)| value)
    }

    pub(super) fn node(&self, key: &str) -> Option<&'p Node> {
        self.written(key).filter(|node| !matches!(node, Node::Null))
    }

    pub(super) fn fields(&self, key: &str) -> Option<Fields<'p>> {
        Fields::of(self.node(key)?, self.at(key), self.findings)
    }

    pub(super) fn bool(&self, key: &str) -> Option<bool> {
        match self.node(key)? {
            Node::Bool(value) => Some(*value),
            other => self.mismatch(key, "true or false", other),
        }
    }

    pub(super) fn text(&self, key: &str) -> Option<&'p str> {
        match self.node(key)? {
            Node::Text(text) => Some(text),
            other => self.mismatch(key, "text", other),
        }
    }

    pub(super) fn required_text(&self, key: &str) -> Option<&'p str> {
        if self.node(key).is_none() {
            self.findings.problem(&self.at(key), MISSING);
        }
        self.text(key)
    }

    pub(super) fn list(&self, key: &str) -> &'p [Node] {
        match self.node(key) {
            None => &[],
            Some(Node::List(items)) => items,
            Some(other) => self.mismatch(key, "a list", other).unwrap_or_default(),
        }
    }

    pub(super) fn texts(&self, key: &str) -> Vec<(Place, &'p str)> {
        let mut texts = Vec::new();
        for (index, item) in self.list(key).iter().enumerate() {
            match item {
                Node::Text(text) => texts.push((self.at(key).at(index), text.as_str())),
                other => {
                    self.findings.problem(&self.at(key).at(index), format!("must be text, not {}", other.kind()));
                }
            }
        }
        texts
    }

    fn mismatch<T>(&self, key: &str, want: &str, found: &Node) -> Option<T> {
        self.findings.problem(&self.at(key), format!("must be {want}, not {}", found.kind()));
        None
    }

    pub(super) fn keys(&self) -> impl Iterator<Item = &'p str> {
        self.members.iter().map(|(key, _)| key.as_str())
    }

    /// Reports all other keys as problems.
    pub(super) fn report_others(&self, known: &[&str]) {
        for key in self.keys().filter(|key| !known.contains(key)) {
            self.findings.problem(&self.at(key), format!("unknown key; known: {}", known.join(", ")));
        }
    }

    /// Reports keys that are misspellings of known ones. Other keys belong to other readers of the document, but a
    /// misspelled restriction would have no effect.
    pub(super) fn report_misspellings(&self, known: &[&str]) {
        for key in self.keys().filter(|key| !known.contains(key)) {
            if let Some(meant) = known.iter().find(|known| is_similar(key, known)) {
                self.findings.problem(&self.at(key), format!("unknown key; is {meant} meant?"));
            }
        }
    }
}

/// Quotes a text of the pack for a message.
pub(super) fn quoted(text: &str) -> String {
    format!("{:?}", truncate(text, MAX_ECHO))
}

/// Whether two keys are similar: a Levenshtein distance of one for short words, and of two for others.
fn is_similar(written: &str, known: &str) -> bool {
    if written.len() > known.len() + 2 {
        return false;
    }
    let allowed = if known.len() < 8 { 1 } else { 2 };
    let mut row: Vec<usize> = (0..=known.len()).collect();
    for (at, byte) in written.bytes().enumerate() {
        let mut diagonal = at;
        let mut left = at + 1;
        let mut next = vec![left];
        for (other, above) in known.bytes().zip(row.iter().skip(1)) {
            left = (diagonal + usize::from(byte != other)).min(above + 1).min(left + 1);
            diagonal = *above;
            next.push(left);
        }
        row = next;
    }
    row.last().is_some_and(|distance| *distance <= allowed) || is_swapped(written, known)
}

/// Whether two adjacent letters are swapped, which counts as one mistake too.
fn is_swapped(written: &str, known: &str) -> bool {
    let pairs = written.bytes().zip(known.bytes()).enumerate();
    let wrong: Vec<_> = pairs.filter(|(_, (written, known))| written != known).collect();
    match wrong.as_slice() {
        [(at, (a, b)), (next, (c, d))] => written.len() == known.len() && *next == at + 1 && a == d && b == c,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn suggests_only_for_small_typing_errors() {
        let rows = [
            ("network_acess", "network_access", true),
            ("netwrok_access", "network_access", true),
            ("tool_polcy", "tool_policy", true),
            ("versoin", "version", true),
            ("tolos", "tools", true),
            ("verxoin", "version", false),
            ("tool", "tools", true),
            ("goals", "tools", false),
            ("sandboxes", "sandbox", false),
            ("", "tools", false),
        ];
        for (written, known, want) in rows {
            assert_eq!(is_similar(written, known), want, "{written}");
        }
    }
}

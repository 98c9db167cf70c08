//! Problems in a pack, and the texts of packs in them.

use std::fmt;

/// A problem in a pack.
#[derive(Clone, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Problem {
    /// The position, such as `tools.custom[2].implementation.args.url`, or a line and column if the text is not valid
    /// YAML.
    pub path: String,
    /// The problem and, if it is not obvious, a suggestion.
    pub message: String,
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.message)
    }
}

/// Truncates a text to a number of characters and removes control characters.
pub(super) fn truncate(text: &str, max: usize) -> String {
    let mut out = String::new();
    for (count, char) in text.chars().enumerate() {
        if count == max {
            out.push('…');
            break;
        }
        out.push(if char.is_control() { char::REPLACEMENT_CHARACTER } else { char });
    }
    out
}

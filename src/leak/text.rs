//! A stream as text: as it comes, and what stands in its parts.

use super::layers::Hit;
use super::matcher::{Index, Scope};
use super::parts::Parts;
use super::scan::Scan;

/// One stream, as far as it has come.
#[derive(Default)]
pub(super) struct Text {
    scan: Scan,
    parts: Parts,
}

impl Text {
    /// Bytes that came so far.
    pub(super) fn position(&self) -> u64 {
        self.scan.position()
    }

    /// Looks through the next bytes.
    pub(super) fn feed(&mut self, index: &Index, scope: &Scope, text: &[u8], hits: &mut Vec<Hit>) {
        self.scan.feed(index, scope, text, hits);
        self.parts.feed(index, scope, text, hits);
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, index: &Index, scope: &Scope, hits: &mut Vec<Hit>) {
        self.scan.end(index, scope, hits);
        self.parts.end(index, scope, hits);
    }

    /// The longest half of a value at the end that begins before a place: where, and whose.
    pub(super) fn half(&self, index: &Index, before: u64, scope: &Scope) -> Option<(u64, u32)> {
        let halves = [self.scan.half(index, before, scope), self.parts.half(index, before, scope)];
        halves.into_iter().flatten().min()
    }
}

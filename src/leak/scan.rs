//! A stream that is looked through as it comes, wherever it is cut.

use super::layers::{Hit, Layers};
use super::matcher::{Index, Scope};
use super::reading::BLOCK;

/// One stream, as far as it has come.
#[derive(Default)]
pub(super) struct Scan {
    layers: Layers,
    /// Bytes that came so far.
    at: u64,
}

impl Scan {
    /// Bytes that came so far.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Looks through the next bytes, and tells what ends in them, in order.
    pub(super) fn feed(&mut self, index: &Index, scope: &Scope, text: &[u8], hits: &mut Vec<Hit>) {
        let before = hits.len();
        for piece in text.chunks(BLOCK) {
            self.layers.take(index, scope, piece, self.at, hits);
            self.at = self.at.saturating_add(piece.len() as u64);
        }
        in_order(hits, before);
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, index: &Index, scope: &Scope, hits: &mut Vec<Hit>) {
        let before = hits.len();
        self.layers.end(index, scope, hits);
        in_order(hits, before);
    }

    /// The longest half of a value at the end that begins before a place: where, and whose.
    pub(super) fn half(&self, index: &Index, before: u64, scope: &Scope) -> Option<(u64, u32)> {
        self.layers.half(index, before, scope)
    }
}

/// The layers tell one after another what they have found.
fn in_order(hits: &mut [Hit], before: usize) {
    hits.get_mut(before..).unwrap_or_default().sort_unstable();
}

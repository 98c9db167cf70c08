//! A stream that is looked through as it comes, wherever it is cut.
//!
//! Ordinary bytes are passed over by a filter that is much faster than the automaton. Where the filter
//! stops, at escapes and line breaks and at the end of what is here, every byte is looked at, until
//! nothing is in question any more.

use memchr::{memchr2, memchr3};

use super::anchors::LOOK;
use super::escape::Placed;
use super::layers::{Hit, Layers};
use super::matcher::{Index, Scope};

/// One stream, as far as it has come.
#[derive(Default)]
pub(super) struct Scan {
    layers: Layers,
    /// Bytes that came so far.
    at: u64,
    /// Every byte is looked at from here on, and to where at least.
    wary: bool,
    until: u64,
}

impl Scan {
    /// Bytes that came so far.
    pub(super) fn position(&self) -> u64 {
        self.at
    }

    /// Looks through the next bytes.
    pub(super) fn feed(&mut self, index: &Index, scope: &Scope, text: &[u8], hits: &mut Vec<Hit>) {
        let base = self.at;
        let place = |at: usize| base.saturating_add(at as u64);
        let mut specials = Specials::default();
        let mut at = 0;
        while at < text.len() {
            if self.wary {
                at = self.step(index, scope, text, at, hits);
                continue;
            }
            let stop = specials.next(text, at);
            let ordinary = text.get(at..stop).unwrap_or_default();
            let start = match index.anchors.find(ordinary) {
                Some(look) => {
                    self.until = place(at.saturating_add(look).saturating_add(LOOK));
                    at.saturating_add(look.saturating_sub(index.anchors.before()))
                }
                None => {
                    self.until = place(stop.saturating_add(1).min(text.len()));
                    at.max(stop.saturating_sub(index.anchors.reach().saturating_sub(1)))
                }
            };
            self.layers.skip(&index.automaton, place(at), start.saturating_sub(at));
            self.wary = true;
            at = start;
        }
        self.at = place(text.len());
    }

    /// Looks at bytes from `at` on until nothing is in question, and tells where to go on.
    fn step(&mut self, index: &Index, scope: &Scope, text: &[u8], mut at: usize, hits: &mut Vec<Hit>) -> usize {
        let base = self.at;
        for byte in text.get(at..).unwrap_or_default() {
            let from = base.saturating_add(at as u64);
            at = at.saturating_add(1);
            let to = from.saturating_add(1);
            if super::fold::is_special(*byte) {
                // What stands before it is not looked at a second time.
                self.until = self.until.max(to);
            }
            self.layers.step(&index.automaton, Placed { byte: *byte, from, to }, scope, hits);
            if let Some(depth) = self.layers.depth(&index.automaton).filter(|depth| *depth < LOOK)
                && to.saturating_sub(depth as u64) >= self.until.max(base)
            {
                // So few bytes are better left to the filter.
                self.layers.rewind(depth);
                self.wary = false;
                return at.saturating_sub(depth);
            }
        }
        at
    }

    /// Nothing more comes.
    pub(super) fn end(&mut self, index: &Index, scope: &Scope, hits: &mut Vec<Hit>) {
        self.layers.end(&index.automaton, scope, hits);
    }

    /// The longest half of a value at the end that begins before a place: where, and whose.
    pub(super) fn half(&self, index: &Index, before: u64, scope: &Scope) -> Option<(u64, u32)> {
        self.layers.half(&index.automaton, before, scope)
    }
}

/// Where bytes stand that are not ordinary.
#[derive(Default)]
struct Specials {
    escape: Option<usize>,
    newline: Option<usize>,
}

impl Specials {
    /// The first from `at` on, or the end.
    fn next(&mut self, text: &[u8], at: usize) -> usize {
        let rest = text.get(at..).unwrap_or_default();
        let known = |place: Option<usize>| place.filter(|place| *place >= at);
        let find = |found: Option<usize>| found.map_or(text.len(), |found| at.saturating_add(found));
        let escape = known(self.escape).unwrap_or_else(|| find(memchr3(b'%', b'\\', b'&', rest)));
        let newline = known(self.newline).unwrap_or_else(|| find(memchr2(b'\n', b'\r', rest)));
        (self.escape, self.newline) = (Some(escape), Some(newline));
        escape.min(newline)
    }
}

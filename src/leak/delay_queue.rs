//! A queue of delayed bytes; unchanged pieces are not copied.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::redact::mask;

/// Pieces that are smaller are put together, or a sender of single bytes would fill our memory.
const SMALL_PIECE: usize = 512;
/// As long as these are not larger.
const MAX_MERGED: usize = 4096;

/// Bytes that wait, and where in the stream they stand.
#[derive(Default)]
pub(super) struct DelayQueue {
    pieces: VecDeque<Bytes>,
    from: u64,
    to: u64,
}

impl DelayQueue {
    /// Where the next byte will stand.
    pub(super) fn end(&self) -> u64 {
        self.to
    }

    /// How many bytes wait.
    pub(super) fn len(&self) -> usize {
        usize::try_from(self.to.saturating_sub(self.from)).unwrap_or(usize::MAX)
    }

    pub(super) fn push(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        self.to = self.to.saturating_add(bytes.len() as u64);
        let merges = |last: &mut Bytes| bytes.len() < SMALL_PIECE && last.len() < MAX_MERGED;
        match self.pieces.pop_back_if(merges) {
            Some(last) => {
                let mut merged = into_mut(last);
                merged.extend_from_slice(&bytes);
                self.pieces.push_back(merged.freeze());
            }
            None => self.pieces.push_back(bytes),
        }
    }

    /// The next piece that stands before `until`.
    pub(super) fn pop(&mut self, until: u64) -> Option<Bytes> {
        let most = usize::try_from(until.saturating_sub(self.from)).unwrap_or(usize::MAX);
        if most == 0 {
            return None;
        }
        let first = self.pieces.front_mut()?;
        let piece = if first.len() > most { first.split_to(most) } else { self.pieces.pop_front()? };
        self.from = self.from.saturating_add(piece.len() as u64);
        Some(piece)
    }

    /// Overwrites what waits of a part of the stream.
    pub(super) fn overwrite(&mut self, part: Range<u64>) {
        let mut at = self.from;
        for piece in &mut self.pieces {
            let end = at.saturating_add(piece.len() as u64);
            let (from, to) = (part.start.max(at), part.end.min(end));
            if from < to {
                let within = |place: u64| usize::try_from(place.saturating_sub(at)).unwrap_or(usize::MAX);
                let mut changed = into_mut(std::mem::take(piece));
                mask(changed.get_mut(within(from)..within(to)).unwrap_or_default());
                *piece = changed.freeze();
            }
            at = end;
        }
    }
}

/// The same bytes, to be written to. A copy only if somebody else has them, too.
fn into_mut(bytes: Bytes) -> BytesMut {
    bytes.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&*shared))
}

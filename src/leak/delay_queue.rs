//! A queue of delayed bytes. Unchanged pieces are not copied.

use std::collections::VecDeque;
use std::ops::Range;

use bytes::{Bytes, BytesMut};

use super::mask::mask;

/// Pieces below this size in bytes are merged. Otherwise a sender of single bytes could fill the memory.
const SMALL_PIECE: usize = 512;
/// The size in bytes from which a merged piece does not grow further.
const MAX_MERGED: usize = 4096;

/// Delayed bytes and their positions in the stream.
#[derive(Default)]
pub(super) struct DelayQueue {
    pieces: VecDeque<Bytes>,
    from: u64,
    to: u64,
}

impl DelayQueue {
    /// Returns the position of the next byte.
    pub(super) fn end(&self) -> u64 {
        self.to
    }

    /// Returns the number of delayed bytes.
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

    /// Returns the next piece before `until`.
    pub(super) fn pop(&mut self, until: u64) -> Option<Bytes> {
        let max_len = usize::try_from(until.saturating_sub(self.from)).unwrap_or(usize::MAX);
        if max_len == 0 {
            return None;
        }
        let first = self.pieces.front_mut()?;
        let piece = if first.len() > max_len { first.split_to(max_len) } else { self.pieces.pop_front()? };
        self.from = self.from.saturating_add(piece.len() as u64);
        Some(piece)
    }

    /// Overwrites the delayed bytes of a range of the stream.
    pub(super) fn overwrite(&mut self, range: Range<u64>) {
        let mut at = self.from;
        for piece in &mut self.pieces {
            let end = at.saturating_add(piece.len() as u64);
            let (from, to) = (range.start.max(at), range.end.min(end));
            if from < to {
                let offset = |position: u64| usize::try_from(position.saturating_sub(at)).unwrap_or(usize::MAX);
                let mut changed = into_mut(std::mem::take(piece));
                mask(changed.get_mut(offset(from)..offset(to)).unwrap_or_default());
                *piece = changed.freeze();
            }
            at = end;
        }
    }
}

/// Makes bytes mutable. They are copied only if they are shared.
fn into_mut(bytes: Bytes) -> BytesMut {
    bytes.try_into_mut().unwrap_or_else(|shared| BytesMut::from(&*shared))
}

//! Brotli (RFC 7932).

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brotli_decompressor::{Allocator, BrotliDecompressStream, BrotliResult, BrotliState, SliceWrapper, StandardAlloc};

use super::DecodeError;
use super::budget::{WindowMemory, WindowPool};

/// The maximum number of coded bytes that one call decodes. Tables can follow each other without any output, and those of a
/// hundred bytes take a third of a millisecond to build.
pub(super) const MAX_PIECE: usize = 512;

/// Returns the window size of a brotli stream in bits, from its first byte (RFC 7932 §9.1).
pub(super) fn window_bits(first: u8) -> u32 {
    match (first & 1, first >> 1 & 7, first >> 4 & 7) {
        (0, ..) => 16,
        (_, 0, 0 | 1) => 17,
        (_, 0, more) => u32::from(more).saturating_add(8),
        (_, more, _) => u32::from(more).saturating_add(17),
    }
}

/// Allocates the tables of a decoder, and counts their bytes. A few bytes of a body can request three megabytes of them.
#[derive(Clone, Default)]
struct TableAlloc {
    inner: StandardAlloc,
    allocated: Arc<AtomicUsize>,
}

impl<T> Allocator<T> for TableAlloc
where
    StandardAlloc: Allocator<T>,
{
    type AllocatedMemory = <StandardAlloc as Allocator<T>>::AllocatedMemory;

    fn alloc_cell(&mut self, length: usize) -> Self::AllocatedMemory {
        self.allocated.fetch_add(length.saturating_mul(size_of::<T>()), Ordering::Relaxed);
        self.inner.alloc_cell(length)
    }

    fn free_cell(&mut self, memory: Self::AllocatedMemory) {
        self.allocated.fetch_sub(memory.slice().len().saturating_mul(size_of::<T>()), Ordering::Relaxed);
        <StandardAlloc as Allocator<T>>::free_cell(&mut self.inner, memory);
    }
}

pub(super) struct Brotli {
    state: BrotliState<StandardAlloc, TableAlloc, TableAlloc>,
    ended: bool,
    room: WindowMemory,
    table_room: WindowMemory,
    tables: TableAlloc,
    has_started: bool,
}

impl Brotli {
    /// Creates a decoder that refuses windows larger than RFC 7932 allows.
    pub(super) fn new(pool: Arc<WindowPool>) -> Self {
        let tables = TableAlloc::default();
        Self {
            state: BrotliState::new_strict(StandardAlloc::default(), tables.clone(), tables.clone()),
            ended: false,
            room: WindowMemory::new(pool.clone()),
            table_room: WindowMemory::new(pool),
            tables,
            has_started: false,
        }
    }

    pub(super) fn is_whole(&self) -> bool {
        self.ended
    }

    /// Returns the number of bytes that have been written to the window. One call writes up to the whole window, of which
    /// only the first part has been returned then.
    fn decoded(&self) -> u64 {
        let size = u64::try_from(self.state.ringbuffer_size).unwrap_or_default();
        let position = u64::try_from(self.state.pos).unwrap_or_default();
        self.state.rb_roundtrips.saturating_mul(size).saturating_add(position)
    }

    pub(super) fn decode(
        &mut self,
        coded: &mut &[u8],
        out: &mut Vec<u8>,
        scratch: &mut [u8],
    ) -> Result<bool, DecodeError> {
        if self.ended {
            return if coded.is_empty() { Ok(false) } else { Err(DecodeError::Malformed) };
        }
        if let Some(first) = coded.first().filter(|_| !self.has_started) {
            self.has_started = true;
            self.room.start_window(1 << window_bits(*first));
        }
        let piece = coded.get(..MAX_PIECE).unwrap_or(coded);
        let (mut left, mut taken) = (piece.len(), 0);
        let (mut room, mut given, mut total) = (scratch.len(), 0, 0);
        let result = BrotliDecompressStream(
            &mut left,
            &mut taken,
            piece,
            &mut room,
            &mut given,
            scratch,
            &mut total,
            &mut self.state,
        );
        *coded = coded.get(taken..).unwrap_or_default();
        out.extend_from_slice(scratch.get(..given).unwrap_or_default());
        self.room.reserve(self.decoded())?;
        self.table_room.reserve_tables(self.tables.allocated.load(Ordering::Relaxed) as u64)?;
        match result {
            // The crate also returns this while it holds more output than there was room for.
            BrotliResult::NeedsMoreInput => Ok(given == scratch.len() || !coded.is_empty()),
            BrotliResult::NeedsMoreOutput => Ok(true),
            BrotliResult::ResultFailure => Err(DecodeError::Malformed),
            BrotliResult::ResultSuccess => {
                self.ended = true;
                if coded.is_empty() { Ok(false) } else { Err(DecodeError::Malformed) }
            }
        }
    }
}

//! `aws-chunked`: the framing that Amazon's clients put around a signed upload ("Signature Version 4: Transferring
//! Payload in Multiple Chunks").
//!
//! It looks like chunked transfer coding (RFC 9112 §7.1), with a signature as the extension of each chunk. S3 stores the
//! data without the framing, so a value could be split by it.

use super::{DecodeError, STEP};

/// The maximum length of the line before a chunk, in bytes. Clients write a size and a signature, about 90 bytes.
const MAX_LINE: u64 = 1024;
/// The maximum length of everything after the last chunk, in bytes. Clients write a checksum and its signature.
const MAX_TRAILER: u64 = 16 * 1024;

/// A decoder for `aws-chunked`.
#[derive(Default)]
pub(crate) struct AwsChunked {
    state: State,
}

/// The part of the framing that the next byte belongs to.
#[derive(Clone, Copy)]
enum State {
    /// The line before a chunk: its length so far, the digits of the size, the size, and what follows the digits.
    Line { length: u64, digits: u32, size: u64, place: LinePlace },
    /// The data of a chunk.
    Data { left: u64 },
    /// The line end after a chunk. The flag is set after the carriage return.
    DataEnd { is_return_read: bool },
    /// The trailer: its length so far, and that of its current line. An empty line ends it.
    Trailer { length: u64, line: u64 },
    /// After the trailer.
    End,
}

/// A place in the line before a chunk.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LinePlace {
    Digits,
    Extension,
    /// After the carriage return.
    End,
}

const LINE_START: State = State::Line { length: 0, digits: 0, size: 0, place: LinePlace::Digits };

impl Default for State {
    fn default() -> Self {
        LINE_START
    }
}

impl AwsChunked {
    /// Returns true after the trailer.
    pub(crate) fn is_whole(&self) -> bool {
        matches!(self.state, State::End)
    }

    pub(crate) fn decode(&mut self, coded: &mut &[u8], out: &mut Vec<u8>) -> Result<bool, DecodeError> {
        let mut room = STEP;
        while let Some((first, rest)) = coded.split_first() {
            if let State::Data { left } = self.state {
                let length = usize::try_from(left).unwrap_or(usize::MAX).min(coded.len()).min(room);
                if length == 0 {
                    return Ok(true);
                }
                let (data, after) = coded.split_at_checked(length).unwrap_or((coded, &[]));
                out.extend_from_slice(data);
                *coded = after;
                room = room.saturating_sub(length);
                let left = left.saturating_sub(length as u64);
                self.state = if left == 0 { State::DataEnd { is_return_read: false } } else { State::Data { left } };
                continue;
            }
            *coded = rest;
            self.state = after_framing_byte(self.state, *first)?;
        }
        Ok(false)
    }
}

/// Returns the state after a byte of the framing.
fn after_framing_byte(state: State, byte: u8) -> Result<State, DecodeError> {
    match state {
        State::Line { length, digits, size, place } => {
            let length = length.saturating_add(1);
            if length > MAX_LINE {
                return Err(DecodeError::Malformed);
            }
            match (place, byte, char::from(byte).to_digit(16)) {
                (LinePlace::Digits, _, Some(digit)) => {
                    let size = size.checked_mul(16).and_then(|size| size.checked_add(u64::from(digit)));
                    let (digits, size) = (digits.saturating_add(1), size.ok_or(DecodeError::Malformed)?);
                    Ok(State::Line { length, digits, size, place })
                }
                (LinePlace::Digits, b';', _) if digits > 0 => {
                    Ok(State::Line { length, digits, size, place: LinePlace::Extension })
                }
                (LinePlace::Digits | LinePlace::Extension, b'\r', _) if digits > 0 => {
                    Ok(State::Line { length, digits, size, place: LinePlace::End })
                }
                (LinePlace::Extension, 0x21..=0x7e, _) => Ok(State::Line { length, digits, size, place }),
                (LinePlace::End, b'\n', _) if size == 0 => Ok(State::Trailer { length: 0, line: 0 }),
                (LinePlace::End, b'\n', _) => Ok(State::Data { left: size }),
                _ => Err(DecodeError::Malformed),
            }
        }
        State::DataEnd { is_return_read: false } if byte == b'\r' => Ok(State::DataEnd { is_return_read: true }),
        State::DataEnd { is_return_read: true } if byte == b'\n' => Ok(LINE_START),
        State::Trailer { length, line } if length < MAX_TRAILER => {
            let length = length.saturating_add(1);
            match byte {
                b'\n' if line == 0 => Ok(State::End),
                b'\n' => Ok(State::Trailer { length, line: 0 }),
                b'\r' => Ok(State::Trailer { length, line }),
                _ => Ok(State::Trailer { length, line: line.saturating_add(1) }),
            }
        }
        State::DataEnd { .. } | State::Trailer { .. } | State::Data { .. } | State::End => Err(DecodeError::Malformed),
    }
}

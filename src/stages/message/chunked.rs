//! Finds the end of a chunked body (RFC 9112 §7.1) without buffering it. Used on both the client's and the origin's
//! connections.

/// Maximum length of a chunk-size line's extensions, in bytes.
const MAX_SIZE_LINE: usize = 1024;

/// An incremental parser for a chunked body.
#[derive(Clone)]
pub struct ChunkedReader {
    state: State,
    /// Bytes that trailers may still use.
    trailers_left: usize,
}

#[derive(Clone, Copy)]
enum State {
    /// In the chunk size: its value and the number of digits so far.
    Size(u64, u8),
    /// In the chunk extensions: the chunk size and the bytes left for the line.
    Extension(u64, usize),
    /// After the CR of the chunk-size line.
    SizeEnd(u64),
    Data(u64),
    /// Before the CR, then before the LF, that follow the chunk data.
    DataEnd,
    DataLf,
    /// At the start of a trailer line or of the final empty line.
    Line,
    Trailer,
    TrailerLf,
    LastLf,
    Over,
    Broken,
}

impl ChunkedReader {
    /// Creates a parser that allows at most `trailers` bytes of trailers.
    #[must_use]
    pub fn new(trailers: usize) -> Self {
        Self { state: State::Size(0, 0), trailers_left: trailers }
    }

    /// Returns true once the last byte of the body has been read.
    #[must_use]
    pub fn is_over(&self) -> bool {
        matches!(self.state, State::Over)
    }

    /// Returns true if the framing is invalid, so the end of the body cannot be found.
    #[must_use]
    pub fn is_broken(&self) -> bool {
        matches!(self.state, State::Broken)
    }

    /// Returns true after the last chunk, where trailers start.
    #[must_use]
    pub fn is_at_trailers(&self) -> bool {
        matches!(self.state, State::Line)
    }

    /// Parses bytes and returns how many of them belong to the body.
    pub fn pass(&mut self, bytes: &[u8]) -> usize {
        self.pass_until(bytes, |_| false)
    }

    /// Parses bytes and returns how many of them precede the trailers.
    pub fn pass_data(&mut self, bytes: &[u8]) -> usize {
        self.pass_until(bytes, Self::is_at_trailers)
    }

    fn pass_until(&mut self, bytes: &[u8], is_there: impl Fn(&Self) -> bool) -> usize {
        let mut passed = 0;
        while let Some(rest) = bytes.get(passed..).filter(|rest| !rest.is_empty()) {
            if is_there(self) {
                break;
            }
            match self.state {
                State::Over | State::Broken => break,
                State::Data(left) => {
                    let n = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                    let left = left.saturating_sub(n as u64);
                    self.state = if left == 0 { State::DataEnd } else { State::Data(left) };
                    passed = passed.saturating_add(n);
                }
                at => {
                    let Some(byte) = rest.first() else { break };
                    self.state = self.step(at, *byte);
                    passed = passed.saturating_add(1);
                }
            }
        }
        passed
    }

    fn step(&mut self, at: State, byte: u8) -> State {
        let is_text = byte == b'\t' || (byte >= b' ' && byte != 0x7f);
        match (at, byte) {
            (State::Size(size, digits), _) if byte.is_ascii_hexdigit() && digits < 16 => {
                let digit = u64::from(char::from(byte).to_digit(16).unwrap_or_default());
                State::Size((size << 4) | digit, digits.saturating_add(1))
            }
            (State::Size(size, 1..), b';' | b' ' | b'\t') => State::Extension(size, MAX_SIZE_LINE),
            (State::Size(size, 1..) | State::Extension(size, _), b'\r') => State::SizeEnd(size),
            (State::Extension(size, left), _) if is_text && left > 0 => State::Extension(size, left.saturating_sub(1)),
            (State::SizeEnd(0), b'\n') => State::Line,
            (State::SizeEnd(size), b'\n') => State::Data(size),
            (State::DataEnd, b'\r') => State::DataLf,
            (State::DataLf, b'\n') => State::Size(0, 0),
            (State::Line, b'\r') => State::LastLf,
            (State::LastLf, b'\n') => State::Over,
            (State::Trailer, b'\r') => State::TrailerLf,
            (State::TrailerLf, b'\n') => State::Line,
            (State::Line | State::Trailer, _) if is_text && self.trailers_left > 0 => {
                self.trailers_left = self.trailers_left.saturating_sub(1);
                State::Trailer
            }
            _ => State::Broken,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn follow<'b>(pieces: impl IntoIterator<Item = &'b [u8]>) -> (usize, bool, bool) {
        let mut chunks = ChunkedReader::new(64);
        let passed = pieces.into_iter().map(|piece| chunks.pass(piece)).sum();
        (passed, chunks.is_over(), chunks.is_broken())
    }

    #[test]
    fn finds_the_end_of_valid_bodies_only() {
        let rows: [(&str, Option<usize>, bool); 17] = [
            ("0\r\n\r\nGET", Some(5), false),
            ("5\r\nhello\r\n0\r\n\r\nGET", Some(15), false),
            ("5;a=b\r\nhello\r\n000\r\n\r\n", Some(21), false),
            ("a \r\n0123456789\r\n0\r\n\r\n", Some(21), false),
            ("0\r\nx-sum: 1\r\n\r\nGET", Some(15), false),
            ("5\r\nhel", None, false),
            ("5\nhello\r\n0\r\n\r\n", None, true),
            ("5\r\nhello0\r\n\r\n", None, true),
            ("5\r\nhello\n0\r\n\r\n", None, true),
            ("\r\n", None, true),
            ("x\r\n", None, true),
            ("-1\r\n", None, true),
            ("+1\r\n", None, true),
            ("0x5\r\n", None, true),
            ("11111111111111111\r\n", None, true),
            ("0\r\nx-sum: 1\n\r\n", None, true),
            ("0\r\nx: 0123456789012345678901234567890123456789012345678901234567890123456789\r\n\r\n", None, true),
        ];
        for (text, want, broken) in rows {
            let (passed, over, is_broken) = follow([text.as_bytes()]);
            assert_eq!((over.then_some(passed), is_broken), (want, broken), "{text:?}");
        }
    }

    proptest! {
        #[test]
        fn whole_equals_cut_anywhere(text in "([0-9a-f]{1,2}(;x=[a-z]{0,3})?\r\n[a-z]{0,20}\r\n|0\r\n(a: b\r\n)?\r\n|.){0,4}", at in 0_usize..64) {
            let bytes = text.as_bytes();
            let (head, tail) = bytes.split_at(at.min(bytes.len()));
            prop_assert_eq!(follow([bytes]), follow([head, tail]));
            prop_assert_eq!(follow([bytes]), follow(bytes.chunks(1)));
        }
    }
}

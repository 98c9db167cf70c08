//! Counts the fields in HTTP/2 field blocks before they are decoded. A field of a table takes one byte (RFC 7541 §6.1), so a
//! block of a few kilobytes can have thousands of fields, each of which costs the decoder as much as a hundred bytes of
//! content.

/// The state within a field block: between fields, or within one. The values of the tables are not needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
enum State {
    /// Before a field, or a table size update.
    #[default]
    Field,
    /// Within a number that is followed by these strings.
    Number(Strings),
    /// Before the length of the first of these strings.
    Length(Strings),
    /// Within the length of a string, whose value so far and number of bits are given.
    LongLength(Strings, u32, u32),
    /// Within a string of which this many bytes are left.
    Text(Strings, u32),
}

/// The strings that are left of a field.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Strings {
    None,
    Value,
    NameAndValue,
}

impl Strings {
    fn next(self) -> State {
        if self == Self::None { State::Field } else { State::Length(self) }
    }

    /// Returns the strings after the first one.
    fn rest(self) -> Self {
        if self == Self::NameAndValue { Self::Value } else { Self::None }
    }
}

/// Counts the fields of field blocks, in pieces of any size.
#[derive(Debug, Default)]
pub(super) struct FieldCount {
    state: State,
}

impl FieldCount {
    /// Begins a block.
    pub(super) fn begin(&mut self) {
        self.state = State::Field;
    }

    /// Reads a piece of a block. Returns the number of fields that begin in it.
    pub(super) fn feed(&mut self, mut bytes: &[u8]) -> usize {
        let mut fields = 0_usize;
        while let Some((byte, rest)) = bytes.split_first() {
            if let State::Text(strings, left) = self.state {
                let passed = usize::try_from(left).unwrap_or(usize::MAX).min(bytes.len());
                bytes = bytes.get(passed..).unwrap_or_default();
                let left = left.saturating_sub(u32::try_from(passed).unwrap_or(u32::MAX));
                self.state = if left == 0 { strings.next() } else { State::Text(strings, left) };
                continue;
            }
            bytes = rest;
            fields = fields.saturating_add(usize::from(self.state == State::Field));
            self.state = match self.state {
                State::Field => after_first_byte(*byte),
                State::Number(strings) if byte & 0x80 == 0 => strings.next(),
                State::Number(strings) => State::Number(strings),
                State::Length(strings) if byte & 0x7f == 0x7f => State::LongLength(strings.rest(), 0x7f, 0),
                State::Length(strings) => text(strings.rest(), u32::from(byte & 0x7f)),
                State::LongLength(strings, length, bits) => {
                    let more = u32::from(byte & 0x7f).checked_shl(bits).unwrap_or(u32::MAX);
                    let length = length.saturating_add(more);
                    match byte & 0x80 {
                        0 => text(strings, length),
                        _ => State::LongLength(strings, length, bits.saturating_add(7)),
                    }
                }
                State::Text(strings, left) => State::Text(strings, left),
            };
        }
        fields
    }
}

fn text(strings: Strings, length: u32) -> State {
    if length == 0 { strings.next() } else { State::Text(strings, length) }
}

/// Returns the state after the first byte of a field or of a table size update (RFC 7541 §6).
fn after_first_byte(byte: u8) -> State {
    let (prefix, strings) = match byte {
        0x80.. => (0x7f, Strings::None),
        0x40.. => (0x3f, Strings::Value),
        0x20.. => (0x1f, Strings::None),
        _ => (0x0f, Strings::Value),
    };
    match byte & prefix {
        // The name of a literal is not in a table.
        0 if strings == Strings::Value => State::Length(Strings::NameAndValue),
        index if index == prefix => State::Number(strings),
        _ => strings.next(),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn count(pieces: &[&[u8]]) -> usize {
        let mut count = FieldCount::default();
        pieces.iter().map(|piece| count.feed(piece)).sum()
    }

    #[test]
    fn fields_of_each_kind_are_counted() {
        let long = [&b"\x10\x7f\x80\x01"[..], &[b'n'; 255], b"\x01v"].concat();
        let rows: [(&[u8], usize); 10] = [
            (b"", 0),
            (b"\x82\x86\x84\xbe\xbe", 5),
            (b"\xff\x80\x01\xbe", 2),
            (b"\x40\x01a\x00\xbe", 2),
            (b"\x10\x0eexeat-trailers\x00", 1),
            (b"\x0f\x2b\x03abc\x82", 2),
            (b"\x5f\x02hi", 1),
            (b"\x7f\x00\x02hi", 1),
            (b"\x3f\xe1\x1f\x82", 2),
            (&long, 1),
        ];
        for (block, fields) in rows {
            assert_eq!(count(&[block]), fields, "{block:x?}");
            for at in 0..=block.len() {
                let (first, second) = block.split_at(at);
                assert_eq!(count(&[first, second]), fields, "{block:x?} cut at {at}");
            }
        }
        assert_eq!(count(&[&[0xbe; 4_000]]), 4_000);
    }

    #[test]
    fn a_new_block_does_not_continue_the_last() {
        let mut fields = FieldCount::default();
        assert_eq!(fields.feed(b"\x40\x7f\xff\xff\xff\xff\xff\xff\xff\x7f"), 1);
        assert_eq!(fields.feed(&[0xbe; 10]), 0);
        fields.begin();
        assert_eq!(fields.feed(&[0xbe; 10]), 10);
    }

    proptest! {
        #[test]
        fn whole_equals_cut_anywhere(block in prop::collection::vec(any::<u8>(), 0..300), cuts in prop::collection::vec(0_usize..300, 0..8)) {
            let mut cuts = cuts;
            cuts.sort_unstable();
            let mut pieces = Vec::new();
            let mut from = 0;
            for cut in cuts {
                let to = cut.min(block.len());
                pieces.push(&block[from..to]);
                from = to;
            }
            pieces.push(&block[from..]);
            prop_assert_eq!(count(&pieces), count(&[&block]));
        }
    }
}

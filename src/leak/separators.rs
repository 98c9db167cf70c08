//! Bytes that no pattern contains. A pattern never extends over such a byte, so only the bytes up to the next one matter
//! to an escape.
//!
//! The sets are fixed and few, because the time of a scan depends on the set in use. It tells a sandbox no more than
//! whether some value of its task has unusual characters.

use super::encodings::Form;
use super::fold::{begins_ignorable, is_indent, is_line_break};

/// The separators for a set of patterns.
pub(super) struct Separators(&'static [bool; 256]);

static FOR_KEYS: [bool; 256] = all_but(b"+-_/=.~:@!#$*^");
static FOR_TEXT: [bool; 256] = all_but(b"+-_/=.~:@!#$*^'()[]{},;?`|");
static NONE: [bool; 256] = [false; 256];

/// Returns the separators if patterns contain letters, digits, blanks and these bytes. Bytes that are skipped, or belong
/// to a code point that may be, are none.
#[expect(clippy::indexing_slicing, reason = "the function is evaluated at compile time")]
const fn all_but(content: &[u8]) -> [bool; 256] {
    let mut separators = [true; 256];
    let mut at = 0;
    while at < content.len() {
        separators[content[at] as usize] = false;
        at += 1;
    }
    let mut byte = 0_u8;
    loop {
        let is_skipped =
            is_line_break(byte) || is_indent(byte) || begins_ignorable(byte) || matches!(byte, 0x80..=0xbf);
        if byte.is_ascii_alphanumeric() || is_skipped {
            separators[byte as usize] = false;
        }
        if byte == u8::MAX {
            return separators;
        }
        byte += 1;
    }
}

impl Separators {
    /// Chooses the set for these patterns.
    pub(super) fn new(forms: &[(Form, u32)]) -> Self {
        let separates_none = |separators: &&'static [bool; 256]| {
            forms.iter().all(|(form, _)| form.bytes.iter().all(|byte| !is_in(separators, *byte)))
        };
        Self([&FOR_KEYS, &FOR_TEXT].into_iter().find(separates_none).unwrap_or(&NONE))
    }

    /// Returns true for a byte that no pattern contains and no view skips.
    #[inline]
    pub(super) fn is_separator(&self, byte: u8) -> bool {
        is_in(self.0, byte)
    }
}

#[inline]
fn is_in(separators: &[bool; 256], byte: u8) -> bool {
    separators.get(usize::from(byte)).copied().unwrap_or_default()
}

//! Bytes that no pattern contains. A pattern never extends over such a byte, so only the bytes up to the next one matter
//! to an escape.
//!
//! The sets are fixed and few, because the time of a scan depends on the set in use. It tells a sandbox no more than
//! whether some value of its task has unusual characters.

use super::encodings::Form;
use super::fold::{begins_escape, begins_ignorable, is_indent, is_line_break};

/// The separators for a set of patterns.
pub(super) struct Separators(&'static Classes);

/// The classes of each byte, as bits.
type Classes = [u8; 256];

/// No pattern contains the byte, and no view skips it.
const SEPARATOR: u8 = 1;
/// The byte may start an escape.
const ESCAPE: u8 = 2;
/// Some view may skip the byte, other than a blank.
const SKIPPED: u8 = 4;

static FOR_KEYS: Classes = classes(Some(b"+-_/=.~:@!#$*^"));
static FOR_TEXT: Classes = classes(Some(b"+-_/=.~:@!#$*^'()[]{},;?`|"));
static NONE: Classes = classes(None);

/// Returns the classes if patterns contain letters, digits, blanks and these bytes, or any bytes.
#[expect(clippy::indexing_slicing, reason = "the function is evaluated at compile time")]
const fn classes(content: Option<&[u8]>) -> Classes {
    let mut classes = [if content.is_some() { SEPARATOR } else { 0 }; 256];
    if let Some(content) = content {
        let mut at = 0;
        while at < content.len() {
            classes[content[at] as usize] = 0;
            at += 1;
        }
    }
    let mut byte = 0_u8;
    loop {
        let is_in_code_point = begins_ignorable(byte) || matches!(byte, 0x80..=0xbf);
        let class = &mut classes[byte as usize];
        if byte.is_ascii_alphanumeric() || byte == b' ' {
            *class = 0;
        } else if is_line_break(byte) || is_indent(byte) || is_in_code_point || (!byte.is_ascii() && *class == 0) {
            *class = SKIPPED;
        }
        if begins_escape(byte) {
            *class |= ESCAPE;
        }
        if byte == u8::MAX {
            return classes;
        }
        byte += 1;
    }
}

impl Separators {
    /// Chooses the set for these patterns.
    pub(super) fn new(forms: &[(Form, u32)]) -> Self {
        let separates_none = |classes: &&'static Classes| {
            forms.iter().all(|(form, _)| form.bytes.iter().all(|byte| class_in(classes, *byte) & SEPARATOR == 0))
        };
        Self([&FOR_KEYS, &FOR_TEXT].into_iter().find(separates_none).unwrap_or(&NONE))
    }

    /// Returns true for a byte that no pattern contains and no view skips.
    #[inline]
    pub(super) fn is_separator(&self, byte: u8) -> bool {
        class_in(self.0, byte) & SEPARATOR != 0
    }

    /// Returns true for a byte that patterns contain, that no view skips after another such byte, and that starts no
    /// escape.
    #[inline]
    pub(super) fn is_plain(&self, byte: u8) -> bool {
        class_in(self.0, byte) == 0
    }
}

#[inline]
fn class_in(classes: &Classes, byte: u8) -> u8 {
    classes.get(usize::from(byte)).copied().unwrap_or_default()
}

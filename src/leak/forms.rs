//! What a value may look like on its way out or back.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD_NO_PAD, URL_SAFE_NO_PAD};
use zeroize::Zeroizing;

/// Values that are shorter are not looked for, in bytes: they stand in texts that have nothing to do with them.
pub const MIN_VALUE: usize = 8;
/// Letters alone that are not more than this are taken for words.
const MAX_WORD: usize = 16;

/// A form of a value, and from how much of it on a part counts as half a value.
pub(super) struct Form {
    pub(super) bytes: Zeroizing<Vec<u8>>,
    pub(super) half: usize,
}

/// Why a value is not looked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Unsearchable {
    /// A word, a number, or the same few bytes again and again.
    #[error("it looks like a word or a number, and would be found in harmless texts")]
    DictionaryLike,
    /// Shorter than [`MIN_VALUE`].
    #[error("it is shorter than {MIN_VALUE} bytes")]
    Short,
}

/// Why a value cannot be looked for, if it cannot.
#[must_use]
pub fn unsearchable(value: &[u8]) -> Option<Unsearchable> {
    if value.len() < MIN_VALUE {
        return Some(Unsearchable::Short);
    }
    let mut distinct = [false; 256];
    value.iter().for_each(|byte| {
        if let Some(seen) = distinct.get_mut(usize::from(*byte)) {
            *seen = true;
        }
    });
    let few = distinct.iter().filter(|seen| **seen).count() < 4;
    let (_, rest) = value.split_at(1);
    let word = value.len() <= MAX_WORD
        && (rest.iter().all(u8::is_ascii_lowercase) && value.is_ascii() || value.iter().all(u8::is_ascii_uppercase));
    let number = value.len() <= MAX_WORD && value.iter().all(|b| b.is_ascii_digit() || b"-./ ".contains(b));
    (few || word || number).then_some(Unsearchable::DictionaryLike)
}

/// All forms of a value, each once.
pub(super) fn of(value: &[u8]) -> Vec<Form> {
    let raw_half = |length: usize| length.div_ceil(2).max(MIN_VALUE);
    let mut forms: Vec<Form> = Vec::new();
    let mut add = |bytes: Zeroizing<Vec<u8>>, half: usize| {
        if forms.iter().all(|form| form.bytes != bytes) {
            forms.push(Form { bytes, half });
        }
    };
    add(Zeroizing::new(value.to_vec()), raw_half(value.len()));
    for (digits, space) in [(UPPER, None), (LOWER, None), (UPPER, Some(b'+')), (LOWER, Some(b'+'))] {
        // As much of it as half of the value becomes.
        let half = value.get(..raw_half(value.len())).map_or(0, |half| percent(half, digits, space).len());
        add(percent(value, digits, space), half);
    }
    for alignment in 0..3 {
        for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
            let form = aligned(value, alignment, engine);
            // Eleven characters hold eight bytes of the value.
            let half = form.len().div_ceil(2).max(11);
            add(form, half);
        }
    }
    forms
}

/// What is left of a value in a host's name.
pub(super) fn folded(value: &[u8]) -> Form {
    let bytes = Zeroizing::new(value.iter().filter(|b| **b != b'.').map(u8::to_ascii_lowercase).collect::<Vec<_>>());
    Form { half: bytes.len(), bytes }
}

const UPPER: &[u8; 16] = b"0123456789ABCDEF";
const LOWER: &[u8; 16] = b"0123456789abcdef";

/// Percent-encoded as a component (RFC 3986 §2.1), or with `+` for a space as forms do.
fn percent(value: &[u8], digits: &[u8; 16], space: Option<u8>) -> Zeroizing<Vec<u8>> {
    let mut out = Zeroizing::new(Vec::with_capacity(value.len().saturating_mul(3)));
    for byte in value {
        match (byte, space) {
            (b' ', Some(plus)) => out.push(plus),
            _ if byte.is_ascii_alphanumeric() || b"-._~".contains(byte) => out.push(*byte),
            _ => {
                let digit = |nibble: u8| digits.get(usize::from(nibble)).copied().unwrap_or_default();
                out.extend_from_slice(&[b'%', digit(byte >> 4), digit(byte & 0xf)]);
            }
        }
    }
    out
}

/// The characters of base64 that depend on the value alone when it stands `offset` bytes behind a
/// multiple of three.
fn aligned(value: &[u8], offset: usize, engine: &impl Engine) -> Zeroizing<Vec<u8>> {
    let mut shifted = Zeroizing::new(vec![0; offset]);
    shifted.extend_from_slice(value);
    let encoded = Zeroizing::new(engine.encode(&*shifted));
    let start = offset.saturating_mul(8).div_ceil(6);
    let end = shifted.len().saturating_mul(8) / 6;
    Zeroizing::new(encoded.as_bytes().get(start..end).unwrap_or_default().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn forms_are_what_encoders_write_around_a_value() {
        let value = b"s3cr3t/+? value";
        let forms: Vec<_> = of(value).into_iter().map(|form| String::from_utf8(form.bytes.to_vec()).unwrap()).collect();
        for wanted in ["s3cr3t/+? value", "s3cr3t%2F%2B%3F%20value", "s3cr3t%2f%2b%3f%20value", "s3cr3t%2F%2B%3F+value"]
        {
            assert!(forms.iter().any(|form| form == wanted), "{wanted}: {forms:?}");
        }
        for before in ["", "u", "us", "use", "user:"] {
            for engine in [&STANDARD_NO_PAD, &URL_SAFE_NO_PAD] {
                let whole = engine.encode([before.as_bytes(), value, b"tail"].concat());
                assert!(forms.iter().any(|form| whole.contains(form.as_str())), "{before:?} {whole}");
            }
        }
    }

    #[test]
    fn words_and_numbers_are_not_looked_for() {
        let rows: [(&[u8], Option<Unsearchable>); 9] = [
            (b"abc123", Some(Unsearchable::Short)),
            (b"password", Some(Unsearchable::DictionaryLike)),
            (b"Password", Some(Unsearchable::DictionaryLike)),
            (b"PASSWORD", Some(Unsearchable::DictionaryLike)),
            (b"2026-11-22", Some(Unsearchable::DictionaryLike)),
            (b"aaaaaaaaaaaaaaaaaaaaaaab", Some(Unsearchable::DictionaryLike)),
            (b"passw0rd", None),
            (b"ghp_0123456789abcdef", None),
            (b"correcthorsebatterystaple", None),
        ];
        for (value, want) in rows {
            assert_eq!(unsearchable(value), want, "{}", String::from_utf8_lossy(value));
        }
    }
}

//! What a value may look like on its way out or back. Forms that cannot be listed, because any byte may be
//! escaped or not, are undone instead: see `escape`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use zeroize::Zeroizing;

use super::escape;
use super::fold::fold;

/// Values that are shorter are not looked for, in bytes: they stand in texts that have nothing to do with them.
pub const MIN_VALUE: usize = 8;
/// Values of other tasks that are shorter are not looked for, in bytes.
pub(super) const MIN_FOREIGN: usize = 16;
/// Letters alone that are not more than this are taken for words.
const MAX_WORD: usize = 16;

/// A form of a value, folded, and from how much of it on a part counts as half a value.
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
        let bytes: Zeroizing<Vec<u8>> = Zeroizing::new(bytes.iter().map(|byte| fold(*byte)).collect());
        if bytes.len() >= MIN_VALUE && forms.iter().all(|form| form.bytes != bytes) {
            forms.push(Form { bytes, half });
        }
    };
    add(Zeroizing::new(value.to_vec()), raw_half(value.len()));
    // Where escapes are undone, those that the value itself seems to hold are undone with them.
    let mut undone = Zeroizing::new(value.to_vec());
    for _ in 0..2 {
        undone = escape::undone(&undone);
        undone.retain(|byte| fold(*byte) != super::fold::SKIPPED);
        let half = raw_half(undone.len());
        add(undone.clone(), half);
    }
    for offset in 0..3 {
        let form = aligned(value, offset);
        let characters = |bytes: usize| bytes.saturating_mul(8).div_ceil(6);
        let whole = characters(offset.saturating_add(raw_half(value.len())));
        let half = whole.saturating_sub(characters(offset)).min(form.len());
        add(form, half);
    }
    let hex = hex(value);
    let half = raw_half(value.len()).saturating_mul(2);
    add(hex, half);
    forms
}

/// What is left of a value in a host's name or a field's: no case, and no dots. Base64 that has lost its case is worth
/// little, but the name of a field over HTTP/1.1 only loses it on its way to us, and not to the origin.
pub(super) fn in_name(value: &[u8]) -> impl Iterator<Item = Form> {
    let plain: Zeroizing<Vec<u8>> = Zeroizing::new(value.iter().copied().filter(|b| *b != b'.').collect());
    let coded = (0..3).map(|offset| aligned(value, offset)).collect::<Vec<_>>();
    std::iter::once(plain).chain(coded).filter(|bytes| bytes.len() >= MIN_VALUE).map(|bytes| {
        let bytes: Zeroizing<Vec<u8>> =
            Zeroizing::new(bytes.iter().map(|byte| fold(byte.to_ascii_lowercase())).collect());
        Form { half: bytes.len(), bytes }
    })
}

fn hex(value: &[u8]) -> Zeroizing<Vec<u8>> {
    let digit = |nibble: u8| b"0123456789abcdef".get(usize::from(nibble)).copied().unwrap_or_default();
    let mut out = Zeroizing::new(Vec::with_capacity(value.len().saturating_mul(2)));
    value.iter().for_each(|byte| out.extend_from_slice(&[digit(byte >> 4), digit(byte & 0xf)]));
    out
}

/// The characters of base64 that depend on the value alone when it stands `offset` bytes behind a
/// multiple of three.
fn aligned(value: &[u8], offset: usize) -> Zeroizing<Vec<u8>> {
    let mut shifted = Zeroizing::new(vec![0; offset]);
    shifted.extend_from_slice(value);
    let encoded = Zeroizing::new(STANDARD_NO_PAD.encode(&*shifted));
    let start = offset.saturating_mul(8).div_ceil(6);
    let end = shifted.len().saturating_mul(8) / 6;
    Zeroizing::new(encoded.as_bytes().get(start..end).unwrap_or_default().to_vec())
}

#[cfg(test)]
mod tests {
    use super::*;
    use base64::engine::general_purpose::URL_SAFE_NO_PAD;

    #[test]
    fn forms_are_what_encoders_write_around_a_value() {
        let value = b"s3cr3t/+? value";
        let forms: Vec<_> = of(value).into_iter().map(|form| String::from_utf8(form.bytes.to_vec()).unwrap()).collect();
        let folded = |text: &str| text.bytes().map(|byte| char::from(fold(byte))).collect::<String>();
        for wanted in ["s3cr3t/+? value", "733363723374 2f2b3f2076616c7565", "733363723374 2F2B3F2076616C7565"] {
            let wanted = folded(&wanted.replacen("74 2", "742", 1));
            assert!(forms.contains(&wanted), "{wanted}: {forms:?}");
        }
        for before in ["", "u", "us", "use", "user:"] {
            for whole in [
                STANDARD_NO_PAD.encode([before.as_bytes(), value, b"tail"].concat()),
                URL_SAFE_NO_PAD.encode([before.as_bytes(), value, b"tail"].concat()),
            ] {
                let whole = folded(&whole);
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

//! The encodings of a value that can be listed. Encodings that cannot, because any byte may be escaped or not, are
//! undone instead: see `unescape`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use zeroize::Zeroizing;

use super::fold::{fold, without_ignorable};
use super::unescape;

/// Values shorter than this are weak, in bytes: they stand in texts that have nothing to do with them.
pub const MIN_VALUE: usize = 8;
/// Values shorter than this are not looked for at all, in bytes.
pub(super) const MIN_SEARCHED: usize = 4;
/// The filter prefers bytes of a form that stand behind so many bytes of the value: prefixes of well-known kinds of
/// keys are no secret.
const PREFIX: usize = 16;

/// A form of a value, folded.
pub(super) struct Form {
    pub(super) bytes: Zeroizing<Vec<u8>>,
    /// From how many bytes on the beginning of it counts as half of the value.
    pub(super) half: usize,
    /// How many bytes of it stand for the value's first [`PREFIX`] bytes.
    pub(super) lead: usize,
}

/// A value to look for: some bytes, and what may stand before the secret part of them.
#[derive(Clone, Copy)]
pub(super) struct Searched<'v> {
    /// All of it.
    pub(super) value: &'v [u8],
    /// Bytes before the secret part, such as the user of `user:password`.
    pub(super) public: usize,
    /// The length of the shortest beginning that counts as a part, if that is not half of the secret part.
    pub(super) part: Option<usize>,
    /// No part of it counts.
    pub(super) is_whole: bool,
}

/// All forms of a value, each once.
pub(super) fn of(Searched { value, public, part, is_whole }: Searched<'_>) -> Vec<Form> {
    let least = value.len().clamp(MIN_SEARCHED, MIN_VALUE);
    let raw_half = |length: usize| {
        if let Some(part) = part {
            // Undone escapes make a value shorter, and its parts with it.
            return part.saturating_mul(length).checked_div(value.len()).unwrap_or(length).max(MIN_VALUE);
        }
        let secret = length.saturating_sub(public);
        public.saturating_add(secret.div_ceil(2).max(MIN_VALUE))
    };
    let mut forms: Vec<Form> = Vec::new();
    let mut add = |bytes: Zeroizing<Vec<u8>>, half: usize, lead: usize| {
        let bytes: Zeroizing<Vec<u8>> = Zeroizing::new(bytes.iter().map(|byte| fold(*byte)).collect());
        if bytes.len() >= least && forms.iter().all(|form| form.bytes != bytes) {
            let half = if is_whole { bytes.len() } else { half };
            forms.push(Form { bytes, half, lead });
        }
    };
    // Code points that nobody sees are left out of texts.
    add(without_ignorable(value), raw_half(value.len()), PREFIX);
    // Where escapes are undone, those that the value itself seems to hold are undone with them.
    let mut undone = Zeroizing::new(value.to_vec());
    for _ in 0..2 {
        undone = unescape::undone(&undone);
        undone.retain(|byte| fold(*byte) != super::fold::SKIPPED);
        let seen = without_ignorable(&undone);
        let half = raw_half(seen.len());
        add(seen, half, PREFIX);
    }
    for offset in 0..3 {
        let form = aligned(value, offset);
        let characters = |bytes: usize| bytes.saturating_mul(8).div_ceil(6);
        let end = offset.saturating_add(raw_half(value.len())).saturating_mul(8) / 6;
        let half = end.saturating_sub(characters(offset)).min(form.len());
        add(form, half, characters(PREFIX));
    }
    let hex = hex(value);
    let half = raw_half(value.len()).saturating_mul(2);
    add(hex, half, PREFIX.saturating_mul(2));
    forms
}

/// The forms of a value in a host's name or a field's: no case, and no dots. Base64 that has lost its case is worth
/// little, but the name of a field over HTTP/1.1 only loses it on its way to us, and not to the origin.
pub(super) fn in_name(value: &[u8]) -> impl Iterator<Item = Form> {
    let plain: Zeroizing<Vec<u8>> = Zeroizing::new(value.iter().copied().filter(|b| *b != b'.').collect());
    let coded = (0..3).map(|offset| aligned(value, offset)).collect::<Vec<_>>();
    std::iter::once(plain).chain(coded).filter(|bytes| bytes.len() >= MIN_VALUE).map(|bytes| {
        let bytes: Zeroizing<Vec<u8>> =
            Zeroizing::new(bytes.iter().map(|byte| fold(byte.to_ascii_lowercase())).collect());
        Form { half: bytes.len(), lead: PREFIX, bytes }
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
        let forms: Vec<_> = of(Searched { value, public: 0, part: None, is_whole: false })
            .into_iter()
            .map(|form| String::from_utf8(form.bytes.to_vec()).unwrap())
            .collect();
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
}

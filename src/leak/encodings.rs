//! The encodings of a value that can be enumerated. Escapes cannot, because any byte may be escaped or not. They are
//! decoded instead, see `unescape`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use zeroize::Zeroizing;

use super::fold::{fold, without_ignorable};
use super::readings::readings;
use super::unescape;

/// Values shorter than this are weak, in bytes, because they occur in unrelated texts.
pub const MIN_VALUE: usize = 8;
/// Values shorter than this are not searched for, in bytes.
pub(super) const MIN_SEARCHED: usize = 4;
/// The prefilter prefers bytes after this many bytes of the value, because the prefixes of well-known keys are public.
const PUBLIC_PREFIX: usize = 16;

/// One folded encoding of a value.
pub(super) struct Form {
    pub(super) bytes: Zeroizing<Vec<u8>>,
    /// The minimum length of a prefix of the form that counts as a partial match.
    pub(super) min_partial: usize,
    /// The same in a response to a request in which the value was sent.
    pub(super) min_sent_partial: usize,
    /// The number of bytes of the form that encode the first [`PUBLIC_PREFIX`] bytes of the value.
    pub(super) prefix_len: usize,
}

/// A value to search for.
#[derive(Clone, Copy)]
pub(super) struct SearchTerm<'v> {
    /// All bytes of the value.
    pub(super) value: &'v [u8],
    /// The number of bytes before the secret part, such as the user of `user:password`.
    pub(super) public: usize,
    /// The minimum length of a prefix that counts as a partial match, if it is not half of the secret part.
    pub(super) min_partial: Option<usize>,
    /// The same in a response to a request in which the value was sent, if it is another length.
    pub(super) min_sent_partial: Option<usize>,
    /// No prefix counts as a partial match, except as [`Self::min_sent_partial`] says.
    pub(super) is_whole_only: bool,
}

impl<'v> SearchTerm<'v> {
    /// Creates a term for a value that is secret from its first byte on.
    pub(super) fn new(value: &'v [u8]) -> Self {
        Self { value, public: 0, min_partial: None, min_sent_partial: None, is_whole_only: false }
    }
}

/// Returns all forms of a value without duplicates, also those of the value in other character sets. Of these only whole
/// ones count.
pub(super) fn forms(term: SearchTerm<'_>) -> Vec<Form> {
    let mut forms = Vec::new();
    add_forms(term, &mut forms);
    for reading in readings(term.value) {
        add_forms(SearchTerm { is_whole_only: true, ..SearchTerm::new(&reading) }, &mut forms);
    }
    forms
}

fn add_forms(term: SearchTerm<'_>, forms: &mut Vec<Form>) {
    let SearchTerm { value, public, min_partial, min_sent_partial, is_whole_only } = term;
    let min_len = value.len().clamp(MIN_SEARCHED, MIN_VALUE);
    // The minimum lengths of partial matches in a form of the whole value that has this length.
    let min_partials = |length: usize| {
        // Decoded escapes shorten a value and its parts in proportion.
        let scaled = |min: usize| min.saturating_mul(length).checked_div(value.len()).unwrap_or(length).max(MIN_VALUE);
        let half = || public.saturating_add(length.saturating_sub(public).div_ceil(2).max(MIN_VALUE));
        let always = min_partial.map_or_else(half, scaled);
        [always, min_sent_partial.map_or(always, scaled)]
    };
    let mut add = |bytes: Zeroizing<Vec<u8>>, [min_partial, min_sent_partial]: [usize; 2], prefix_len: usize| {
        let bytes: Zeroizing<Vec<u8>> = Zeroizing::new(bytes.iter().map(|byte| fold(*byte)).collect());
        if bytes.len() >= min_len && forms.iter().all(|form| form.bytes != bytes) {
            let length = bytes.len();
            let is_sent_whole_only = is_whole_only && term.min_sent_partial.is_none();
            let min_partial = if is_whole_only { length } else { min_partial };
            let min_sent_partial = if is_sent_whole_only { length } else { min_sent_partial };
            forms.push(Form { bytes, min_partial, min_sent_partial, prefix_len });
        }
    };
    // Invisible code points are removed from searched texts.
    add(without_ignorable(value), min_partials(value.len()), PUBLIC_PREFIX);
    // If the value itself contains apparent escapes, they are decoded together with those of the text.
    let mut decoded = Zeroizing::new(value.to_vec());
    for _ in 0..2 {
        decoded = unescape::unescape_once(&decoded);
        decoded.retain(|byte| fold(*byte) != super::fold::SKIPPED);
        let visible = without_ignorable(&decoded);
        let min_partials = min_partials(visible.len());
        add(visible, min_partials, PUBLIC_PREFIX);
    }
    for offset in 0..3 {
        let form = base64_at(value, offset);
        let characters = |bytes: usize| bytes.saturating_mul(8).div_ceil(6);
        let end = |min: usize| offset.saturating_add(min).saturating_mul(8) / 6;
        let min_partials =
            min_partials(value.len()).map(|min| end(min).saturating_sub(characters(offset)).min(form.len()));
        add(form, min_partials, characters(PUBLIC_PREFIX));
    }
    let hex = hex(value);
    let min_partials = min_partials(value.len()).map(|min| min.saturating_mul(2));
    add(hex, min_partials, PUBLIC_PREFIX.saturating_mul(2));
}

/// Returns the forms of a value in a host name or a field name: in lower case and without dots. Base64 without case is
/// of little use to a recipient. A field name over HTTP/1.1, however, loses its case only on the way to the proxy, not
/// on the way to the origin.
pub(super) fn name_forms(value: &[u8]) -> impl Iterator<Item = Form> {
    let plain: Zeroizing<Vec<u8>> = Zeroizing::new(value.iter().copied().filter(|b| *b != b'.').collect());
    let coded = (0..3).map(|offset| base64_at(value, offset)).collect::<Vec<_>>();
    std::iter::once(plain).chain(coded).filter(|bytes| bytes.len() >= MIN_VALUE).map(|bytes| {
        let bytes: Zeroizing<Vec<u8>> =
            Zeroizing::new(bytes.iter().map(|byte| fold(byte.to_ascii_lowercase())).collect());
        Form { min_partial: bytes.len(), min_sent_partial: bytes.len(), prefix_len: PUBLIC_PREFIX, bytes }
    })
}

fn hex(value: &[u8]) -> Zeroizing<Vec<u8>> {
    let digit = |nibble: u8| b"0123456789abcdef".get(usize::from(nibble)).copied().unwrap_or_default();
    let mut out = Zeroizing::new(Vec::with_capacity(value.len().saturating_mul(2)));
    value.iter().for_each(|byte| out.extend_from_slice(&[digit(byte >> 4), digit(byte & 0xf)]));
    out
}

/// Returns the base64 characters that depend on the value alone if it starts `offset` bytes after a multiple of three.
fn base64_at(value: &[u8], offset: usize) -> Zeroizing<Vec<u8>> {
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
    fn encoders_produce_one_of_the_forms() {
        let value = b"s3cr3t/+? value";
        let forms: Vec<_> = forms(SearchTerm::new(value))
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

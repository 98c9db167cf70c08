//! Other texts that contain the whole secret of a value which is itself an encoding.
//!
//! The credential of a field may be `Basic` and base64, a key may be base64 with padding, a UUID, or hex digits. A server
//! that reads one and shows it often shows it decoded, or as its library writes it.

use base64::Engine;
use base64::alphabet;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use zeroize::Zeroizing;

use super::encodings::MIN_VALUE;
use super::matcher::password;
use super::strength::{Strength, distinctive_part};

/// The number of digits of a UUID, and the lengths of its groups (RFC 9562 §4).
const UUID_DIGITS: usize = 32;
const UUID_GROUPS: [usize; 5] = [8, 4, 4, 4, 12];
/// Fewer hex digits have no equivalents, and fewer than those of a UUID are not searched for as bytes: short patterns make the
/// search slower for all texts.
const MIN_DIGITS: usize = 16;

const CONFIG: GeneralPurposeConfig = GeneralPurposeConfig::new()
    .with_decode_padding_mode(DecodePaddingMode::Indifferent)
    .with_decode_allow_trailing_bits(true);
const BASE64: [GeneralPurpose; 2] =
    [GeneralPurpose::new(&alphabet::STANDARD, CONFIG), GeneralPurpose::new(&alphabet::URL_SAFE, CONFIG)];

/// Returns the equivalents of a value, without the value itself. Those that are easy to guess are left out.
pub(super) fn equivalents(value: &[u8]) -> Vec<Zeroizing<Vec<u8>>> {
    let key = distinctive_part(value);
    if key.len() < value.len() && !is_strong(key) {
        return Vec::new();
    }
    let mut found = hex_equivalents(key);
    if let Some(unpadded) = without_padding(key) {
        found.push(Zeroizing::new(unpadded.to_vec()));
    }
    if let Some(text) = decoded_text(key) {
        let part = password(&text);
        if part.len() < text.len() && is_strong(part) {
            found.push(Zeroizing::new(part.to_vec()));
        }
        if is_strong(&text) {
            found.push(text);
        }
    }
    found.retain(|equivalent| equivalent.as_slice() != value);
    found
}

/// Returns base64 without its padding. A recipient needs none.
pub(super) fn without_padding(key: &[u8]) -> Option<&[u8]> {
    let unpadded = key.strip_suffix(b"==").or_else(|| key.strip_suffix(b"="))?;
    let is_base64 = |byte: &u8| byte.is_ascii_alphanumeric() || b"+/-_".contains(byte);
    (unpadded.len() >= MIN_VALUE && unpadded.iter().all(is_base64)).then_some(unpadded)
}

/// Returns the text that a value in base64 encodes. A random key rarely decodes to a text.
fn decoded_text(key: &[u8]) -> Option<Zeroizing<Vec<u8>>> {
    let decoded = BASE64.iter().find_map(|engine| engine.decode(key).ok()).map(Zeroizing::new)?;
    let text = std::str::from_utf8(&decoded).ok()?;
    (decoded.len() >= MIN_VALUE && !text.chars().any(char::is_control)).then_some(decoded)
}

fn is_strong(text: &[u8]) -> bool {
    text.len() >= MIN_VALUE && Strength::of(text).is_strong()
}

/// Returns hex digits in both cases, their bytes, and those of a UUID with and without hyphens.
fn hex_equivalents(key: &[u8]) -> Vec<Zeroizing<Vec<u8>>> {
    let is_uuid = UUID_GROUPS.iter().try_fold(key, |rest, group| {
        let (digits, rest) = rest.split_at_checked(*group)?;
        let is_hex = digits.iter().all(u8::is_ascii_hexdigit);
        is_hex.then(|| rest.strip_prefix(b"-").unwrap_or(rest))
    });
    let is_uuid = is_uuid == Some(&[]);
    let mut digits = Zeroizing::new(key.to_ascii_lowercase());
    if is_uuid {
        digits.retain(|byte| *byte != b'-');
    }
    if digits.len() < MIN_DIGITS || !digits.len().is_multiple_of(2) || !digits.iter().all(u8::is_ascii_hexdigit) {
        return Vec::new();
    }
    let mut lower = vec![digits.clone()];
    if digits.len() == UUID_DIGITS {
        let mut groups = Zeroizing::new(Vec::with_capacity(UUID_DIGITS.saturating_add(UUID_GROUPS.len())));
        let mut rest = digits.as_slice();
        for group in UUID_GROUPS {
            let (part, rest_of_digits) = rest.split_at_checked(group).unwrap_or((rest, &[]));
            let hyphen: &[u8] = if groups.is_empty() { b"" } else { b"-" };
            groups.extend_from_slice(hyphen);
            groups.extend_from_slice(part);
            rest = rest_of_digits;
        }
        lower.push(groups);
    }
    let upper: Vec<_> = lower.iter().map(|text| Zeroizing::new(text.to_ascii_uppercase())).collect();
    let nibble = |digit: &u8| char::from(*digit).to_digit(16).and_then(|nibble| u8::try_from(nibble).ok());
    let byte = |pair: &[u8]| match pair {
        [high, low] => Some(nibble(high)?.saturating_mul(16).saturating_add(nibble(low)?)),
        _ => None,
    };
    // Allocated at once, because a growing buffer leaves copies in freed memory.
    let mut bytes = Zeroizing::new(Vec::with_capacity(digits.len() / 2));
    bytes.extend(digits.chunks(2).map_while(byte));
    let bytes = (digits.len() >= UUID_DIGITS).then_some(bytes);
    lower.into_iter().chain(upper).chain(bytes).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "Pw7Rr2mVt6LxK0pWd3NfHb7YcAe5UgJ";

    fn base64(text: &[u8]) -> String {
        base64::engine::general_purpose::STANDARD.encode(text)
    }

    #[test]
    fn a_value_has_its_usual_other_spellings() {
        let pair = base64(format!("alice:{KEY}").as_bytes());
        let unpadded = pair.trim_end_matches('=');
        let (digits, uuid) = ("3f2504e04f8941d39a0c0305e82c3301", "3f2504e0-4f89-41d3-9a0c-0305e82c3301");
        let bytes: &[u8] = &[63, 37, 4, 224, 79, 137, 65, 211, 154, 12, 3, 5, 232, 44, 51, 1];
        let [upper, upper_uuid] = [digits, uuid].map(str::to_ascii_uppercase);
        let decoded = format!("alice:{KEY}");
        let rows: [(&str, Vec<&[u8]>); 10] = [
            (KEY, vec![]),
            ("sk-live-Zq8R2mVt6LxK0pWd3NfHb7YcAe5UgJ1s", vec![]),
            (&format!("Basic {pair}"), vec![unpadded.as_bytes(), KEY.as_bytes(), decoded.as_bytes()]),
            (&format!("ApiKey {unpadded}"), vec![KEY.as_bytes(), decoded.as_bytes()]),
            ("Zq8R2mVt6LxK0pWd3Nfz9A==", vec![b"Zq8R2mVt6LxK0pWd3Nfz9A"]),
            (uuid, vec![digits.as_bytes(), upper.as_bytes(), upper_uuid.as_bytes(), bytes]),
            (digits, vec![uuid.as_bytes(), upper.as_bytes(), upper_uuid.as_bytes(), bytes]),
            ("a1f2c3d4e5f60718", vec![b"A1F2C3D4E5F60718"]),
            // The key of this connection string is weak.
            ("Endpoint=sb://bus.test/;SharedAccessKeyName=RootManage;SharedAccessKey=YWFhYWFhYWE=", vec![]),
            // A dictionary contains what these decode to.
            ("Basic YWRtaW46cGFzc3dvcmQ=", vec![b"YWRtaW46cGFzc3dvcmQ"]),
        ];
        for (value, want) in rows {
            let found = equivalents(value.as_bytes());
            let mut found: Vec<&[u8]> = found.iter().map(|text| text.as_slice()).collect();
            found.retain(|text| *text != pair.as_bytes());
            assert_eq!(found, want, "{value}");
        }
    }
}

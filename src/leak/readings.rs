//! The other bytes that a value becomes when a recipient takes it for a text in another character set.
//!
//! Many servers read header fields as ISO-8859-1 (RFC 9110 §5.5) and write what they have read in UTF-8, or the reverse.
//! An echo of theirs then contains `Ã¤` for `ä`, or one byte of it.

use encoding_rs::WINDOWS_1252;
use zeroize::Zeroizing;

/// Returns the value in other character sets, without duplicates. There are none for ASCII.
pub(super) fn readings(value: &[u8]) -> Vec<Zeroizing<Vec<u8>>> {
    let mut readings: Vec<Zeroizing<Vec<u8>>> = Vec::new();
    if value.is_ascii() {
        return readings;
    }
    // Its bytes as characters. Windows-1252 has letters and signs in place of the control characters 0x80 to 0x9f.
    // The capacity is allocated at once, because a growing text leaves copies of the value in freed memory.
    let mut latin1 = Zeroizing::new(String::with_capacity(value.len().saturating_mul(2)));
    latin1.extend(value.iter().copied().map(char::from));
    let windows = Zeroizing::new(WINDOWS_1252.decode_without_bom_handling(value).0.into_owned());
    readings.extend([latin1, windows].map(|text| Zeroizing::new(text.as_bytes().to_vec())));
    // Its characters as bytes.
    if let Ok(text) = std::str::from_utf8(value) {
        let mut latin1 = Zeroizing::new(Vec::with_capacity(text.len()));
        latin1.extend(text.chars().map_while(|char| u8::try_from(char).ok()));
        let (windows, _, has_unmappable) = WINDOWS_1252.encode(text);
        readings.extend((latin1.len() == text.chars().count()).then_some(latin1));
        readings.extend((!has_unmappable).then(|| Zeroizing::new(windows.into_owned())));
    }
    readings.sort_by(|a, b| a.as_slice().cmp(b));
    readings.dedup_by(|a, b| a == b);
    readings
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_is_read_in_other_character_sets() {
        let rows: [(&[u8], &[&[u8]]); 4] = [
            (b"plain", &[]),
            ("pä".as_bytes(), &[b"p\xe4", "pÃ¤".as_bytes()]),
            // The letter has a byte in Windows-1252 only. Its last byte is a control character in Latin-1.
            ("pœ".as_bytes(), &[b"p\x9c", "pÅ\u{93}".as_bytes(), "pÅ“".as_bytes()]),
            (b"p\xe4", &["pä".as_bytes()]),
        ];
        for (value, want) in rows {
            let mut want: Vec<_> = want.iter().map(|reading| reading.to_vec()).collect();
            want.sort();
            let got: Vec<_> = readings(value).iter().map(|reading| reading.to_vec()).collect();
            assert_eq!(got, want, "{value:?}");
        }
    }
}

//! Checks in addition to a shape: checksums, embedded ids, and bodies that no issuer creates.

/// A check for a body of the right length and alphabet.
#[derive(Clone, Copy)]
pub(super) enum Check {
    /// An AWS id that contains an account, or one from before accounts were included.
    Aws,
    /// The last six digits are the CRC-32 of the others, in base 62.
    Crc62,
    /// No further check.
    None,
    /// At least this many upper-case letters, lower-case letters and digits. Names in programs have the same alphabet,
    /// but rarely this mixture.
    Mixed(usize, usize, usize),
    /// OpenAI's infix between two halves of equal length, which a kind or a name and `-` may precede.
    OpenAi,
    /// 64 bytes in base64 with at least one upper-case letter, lower-case letter and digit, except for the public key
    /// of the storage emulator.
    AzureStorageKey,
}

impl Check {
    pub(super) fn passes(self, body: &[u8]) -> bool {
        match self {
            Self::Aws => is_aws_id(body) && !is_placeholder(body),
            Self::Crc62 => ends_with_crc(body),
            Self::None => true,
            Self::Mixed(upper, lower, digits) => is_mixed(body, upper, lower, digits) && !is_placeholder(body),
            Self::OpenAi => is_openai(body),
            Self::AzureStorageKey => {
                let (_, key) = body.split_at_checked(body.len().saturating_sub(STORAGE_KEY_LEN)).unwrap_or_default();
                is_mixed(key, 1, 1, 1) && !is_placeholder(key) && !key.starts_with(EMULATOR_KEY_PREFIX)
            }
        }
    }
}

/// "OpenAI" in base64.
pub(super) const OPENAI_INFIX: &[u8] = b"T3BlbkFJ";
/// The numbers of characters before and after the infix: of keys from 2024, and of later ones.
const OPENAI_HALVES: [usize; 3] = [20, 58, 74];

fn is_openai(body: &[u8]) -> bool {
    let places = body.windows(OPENAI_INFIX.len()).enumerate().filter(|(_, window)| *window == OPENAI_INFIX);
    places.map(|(at, _)| at).any(|at| {
        let half = body.len().saturating_sub(at).saturating_sub(OPENAI_INFIX.len());
        let Some((name, random)) = at.checked_sub(half).and_then(|start| body.split_at_checked(start)) else {
            return false;
        };
        OPENAI_HALVES.contains(&half)
            && name.last().is_none_or(|byte| *byte == b'-')
            && (half != 20 || random.iter().all(u8::is_ascii_alphanumeric))
            && is_mixed(random, 2, 2, 1)
            && !is_placeholder(random)
    })
}

/// The length of 64 bytes in base64.
const STORAGE_KEY_LEN: usize = 88;

/// The start of Azurite's key in Microsoft's documentation ("Use the Azurite emulator").
const EMULATOR_KEY_PREFIX: &[u8] = b"Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq";

/// A number of equal characters in a row that occurs in hardly any key: in 64 random hex digits once in 18 000, in base
/// 62 once in 10⁷.
const PLACEHOLDER_EQUAL_RUN: usize = 6;
/// A number of characters in a row that count up, as in `12345678`.
const PLACEHOLDER_COUNTING_RUN: usize = 8;

/// Returns true for the placeholders of documentation, such as `xxxxxxxx`, `12345678` or `EXAMPLE`.
fn is_placeholder(body: &[u8]) -> bool {
    let counts = |pair: &[u8]| matches!(pair, [a, b] if a.checked_add(1) == Some(*b) || (*a, *b) == (b'9', b'0'));
    body.windows(PLACEHOLDER_EQUAL_RUN).any(|run| run.windows(2).all(|pair| pair.first() == pair.last()))
        || body.windows(PLACEHOLDER_COUNTING_RUN).any(|run| run.windows(2).all(counts))
        || body.windows(EXAMPLE.len()).any(|word| word.eq_ignore_ascii_case(EXAMPLE))
}

const EXAMPLE: &[u8] = b"example";

fn is_mixed(body: &[u8], upper: usize, lower: usize, digits: usize) -> bool {
    let at_least = |min: usize, kind: fn(&u8) -> bool| body.iter().filter(|byte| kind(byte)).count() >= min;
    at_least(upper, u8::is_ascii_uppercase)
        && at_least(lower, u8::is_ascii_lowercase)
        && at_least(digits, u8::is_ascii_digit)
}

/// Checks the 16 characters after the prefix. Since 2019 their first bit is one, and the next 40 bits are the account
/// number of at most twelve decimal digits. Older ids start with `I` or `J`.
fn is_aws_id(body: &[u8]) -> bool {
    if matches!(body.first(), Some(b'I' | b'J')) {
        return true;
    }
    let bits = body.iter().take(9).try_fold(0_u64, |bits, byte| Some(bits << 5 | base32(*byte)?));
    // Of the 45 bits, the first is one, 40 are the account, and four are ignored.
    bits.is_some_and(|bits| bits >> 44 == 1 && (bits >> 4) & 0xff_ffff_ffff <= 999_999_999_999)
}

fn base32(byte: u8) -> Option<u64> {
    match byte {
        b'A'..=b'Z' => Some(u64::from(byte.wrapping_sub(b'A'))),
        b'2'..=b'7' => Some(u64::from(byte.wrapping_sub(b'2').wrapping_add(26))),
        _ => None,
    }
}

fn ends_with_crc(body: &[u8]) -> bool {
    body.split_last_chunk::<6>().is_some_and(|(random, checksum)| crc62(random) == *checksum)
}

/// Returns the CRC-32 of zip files as six base 62 digits, in GitHub's format.
pub(super) fn crc62(body: &[u8]) -> [u8; 6] {
    let mut rest = crc32(body);
    let mut text = [b'0'; 6];
    for digit in text.iter_mut().rev() {
        *digit = BASE62.get((rest % 62) as usize).copied().unwrap_or_default();
        rest /= 62;
    }
    text
}

const BASE62: &[u8; 62] = b"0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz";

/// Computed bit by bit, because it only runs for bytes that look like a key.
fn crc32(bytes: &[u8]) -> u32 {
    let turn = |crc: u32, _| if crc & 1 == 1 { (crc >> 1) ^ 0xedb8_8320 } else { crc >> 1 };
    !bytes.iter().fold(!0, |crc, byte| (0..8).fold(crc ^ u32::from(*byte), turn))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crc62_is_crc32_in_six_digits() {
        assert_eq!(crc32(b"123456789"), 0xcbf4_3926, "the check value of CRC-32/ISO-HDLC");
        assert_eq!(crc32(b""), 0);
        assert_eq!(&crc62(b""), b"000000");
        // A revoked token, quoted in the explanation of GitHub's format.
        assert_eq!(&crc62(b"zQWBuTSOoRi4A9spHcVY5ncnsDkxkJ"), b"0mLq17");
    }

    #[test]
    fn aws_ids_contain_an_account() {
        // The id with account 029608264753 of Aidan Steele's "AWS Access Key ID formats".
        for good in ["QNZGKIQY56JQ7WML", "IOSFODNN7AAAAAAA", "JAAAAAAAAAAAAAAA", "QAAAAAAAAAAAAAAA"] {
            assert!(is_aws_id(good.as_bytes()), "{good}");
        }
        for bad in ["77777777Q7777777", "ANZGKIQY56JQ7WML", "PNZGKIQY56JQ7WML", "QNZGKIQ156JQ7WML"] {
            assert!(!is_aws_id(bad.as_bytes()), "{bad}");
        }
    }

    #[test]
    fn recognizes_placeholders() {
        for text in ["xxxxxxxxxxxx", "aB3dddddd9", "a123456789b", "567890123", "abcdefgh", "IOSFODNN7EXAMPLE"] {
            assert!(is_placeholder(text.as_bytes()), "{text}");
        }
        for text in ["", "aaaaa", "1234567", "ab12cd34ef56", "exampl"] {
            assert!(!is_placeholder(text.as_bytes()), "{text}");
        }
    }
}

//! The table of key shapes, and the matcher for one shape.
//!
//! The sources are in `docs/leak-families.md`, with the keys that were left out and the reasons.

use super::Family;
use super::checks::Check;

/// One form of a family's keys.
pub(super) struct Shape {
    pub(super) family: Family,
    /// At least three bytes, which the search looks up.
    pub(super) prefix: &'static [u8],
    /// The parts that follow the prefix.
    parts: &'static [Part],
    /// A check for all of `parts` together.
    check: Check,
    /// The characters that may be adjacent to the key on neither side, because it would be part of a longer word.
    boundary: Set,
    /// The prefix is a name, which may be the end of a longer name.
    is_named: bool,
}

/// A part of a key. Each part consumes as many bytes as it can, so the next part must start with a byte that it does
/// not accept.
enum Part {
    Between(usize, usize, Set),
    Exactly(usize, Set),
    /// Any number of lines such as `Proc-Type: 4,ENCRYPTED`, and the empty line after them.
    Headers,
    /// A line of base64 of at least this length and its end. Shortened keys in documentation end in dots instead.
    /// Beyond the maximum length of a line no end is required, because the lines have been joined.
    Line(usize),
    /// A line break, possibly escaped as in JSON or a URL, and the indentation of the next line.
    Newline,
    Text(&'static [u8]),
}

#[derive(Clone, Copy)]
enum Set {
    /// RFC 4648 §6.
    Base32,
    /// RFC 4648 §4, without the padding.
    Base64,
    /// As above, with the characters of base64url.
    Base64Any,
    /// RFC 4648 §5. These are also the characters of a word.
    Base64Url,
    /// As above, with the padding.
    Base64UrlPadded,
    Alphanumeric,
    /// The separator between a name and its value in a command, a connection string, JSON, YAML or a program.
    Assignment,
    /// The upper-case alphabet of bech32 (BIP 173).
    Bech32,
    Dashes,
    Digits,
    /// Lower-case hex digits.
    Hex,
    Letters,
    /// The second of two base64 characters that encode one byte, before the padding.
    LastOfTwo,
    /// The alphabet of base 36.
    LowerOrDigits,
    Printable,
    UpperOrDigits,
}

impl Set {
    fn has(self, byte: u8) -> bool {
        match self {
            Self::Alphanumeric => byte.is_ascii_alphanumeric(),
            Self::Base32 => matches!(byte, b'A'..=b'Z' | b'2'..=b'7'),
            Self::Base64 => byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/'),
            Self::Base64Any => byte.is_ascii_alphanumeric() || matches!(byte, b'+' | b'/' | b'-' | b'_'),
            Self::Base64Url => byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_'),
            Self::Base64UrlPadded => byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'='),
            Self::Assignment => matches!(byte, b' ' | b'\t' | b'"' | b'\'' | b'`' | b'\\' | b':' | b'=' | b'>' | b','),
            Self::Bech32 => {
                byte.is_ascii_digit() && byte != b'1'
                    || byte.is_ascii_uppercase() && !matches!(byte, b'B' | b'I' | b'O')
            }
            Self::Dashes => byte == b'-',
            Self::Digits => byte.is_ascii_digit(),
            Self::Hex => matches!(byte, b'0'..=b'9' | b'a'..=b'f'),
            Self::Letters => byte.is_ascii_alphabetic(),
            Self::LastOfTwo => matches!(byte, b'A' | b'Q' | b'g' | b'w'),
            Self::LowerOrDigits => byte.is_ascii_digit() || byte.is_ascii_lowercase(),
            Self::Printable => matches!(byte, b' '..=b'~') && byte != b'\\',
            Self::UpperOrDigits => byte.is_ascii_digit() || byte.is_ascii_uppercase(),
        }
    }
}

/// The result of matching a shape at its prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Verdict {
    Mismatch,
    /// The shape matches, and the key ends here.
    Match(usize),
    /// The shape matches so far, and the next bytes decide.
    Undecided,
}

/// The maximum look-behind in bytes.
pub(super) const MAX_LOOKBEHIND: usize = 16;
/// The maximum length of a key and its look-ahead, in bytes.
pub(super) const MAX_KEY: usize = 1024;
/// The maximum length of a prefix, in bytes.
pub(super) const MAX_PREFIX: usize = 40;
/// The maximum look-ahead after a key, in bytes.
#[cfg(test)]
const MAX_LOOKAHEAD: usize = 8;

impl Shape {
    const fn new(family: Family, prefix: &'static [u8], parts: &'static [Part], check: Check) -> Self {
        Self { family, prefix, parts, check, boundary: Set::Base64Url, is_named: false }
    }

    /// Sets the boundary for a prefix that may occur in base64.
    const fn within_base64(self) -> Self {
        Self { boundary: Set::Base64Any, ..self }
    }

    /// Creates the shape of an Azure account key after its name: `AccountKey=…`, `"accountKey": "…"`,
    /// `STORAGE_ACCOUNT_KEY: …`.
    const fn account_key(name: &'static [u8]) -> Self {
        Self { is_named: true, ..Self::new(Family::Azure, name, ACCOUNT_KEY, Check::AzureStorageKey).within_base64() }
    }

    const fn armour(prefix: &'static [u8], parts: &'static [Part]) -> Self {
        Self { boundary: Set::Dashes, ..Self::new(Family::PrivateKey, prefix, parts, Check::None) }
    }

    /// Returns the number of bytes that decide any text.
    #[cfg(test)]
    pub(super) fn max_len(&self) -> usize {
        let newline = 7 + MAX_INDENT;
        let parts = self.parts.iter().map(|part| match part {
            Part::Between(_, count, _) | Part::Exactly(count, _) => *count,
            Part::Headers => MAX_HEADERS * (MAX_HEADER + newline) + newline,
            Part::Line(_) => MAX_LINE + newline,
            Part::Newline => newline,
            Part::Text(text) => text.len(),
        });
        self.prefix.len() + parts.sum::<usize>() + MAX_LOOKAHEAD
    }

    /// Matches the shape at `start`, where its prefix is. `ended` is true if the text does not continue.
    pub(super) fn match_at(&self, text: &[u8], start: usize, ended: bool) -> Verdict {
        let (before, from_start) = text.split_at_checked(start).unwrap_or_default();
        if !self.is_named && last_char(before).is_some_and(|byte| self.boundary.has(byte)) {
            return Verdict::Mismatch;
        }
        let mut reader = Reader { rest: from_start.get(self.prefix.len()..).unwrap_or_default(), ended };
        let body = reader.rest;
        if let Err(error) = self.parts.iter().try_for_each(|part| reader.match_part(part)) {
            return error.into();
        }
        let length = body.len().saturating_sub(reader.rest.len());
        match reader.rest.first() {
            // The part of an armored key that has matched is enough.
            _ if matches!(self.boundary, Set::Dashes) => {}
            None if !ended => return Verdict::Undecided,
            Some(byte) if self.boundary.has(*byte) => return Verdict::Mismatch,
            Some(b'=') if matches!(self.boundary, Set::Base64Any) => return Verdict::Mismatch,
            _ => {}
        }
        if !self.check.passes(body.get(..length).unwrap_or_default()) {
            return Verdict::Mismatch;
        }
        if matches!(self.check, Check::Aws) {
            match is_in_signed_url(before, reader) {
                Ok(false) => {}
                Ok(true) => return Verdict::Mismatch,
                Err(error) => return error.into(),
            }
        }
        Verdict::Match(start.saturating_add(self.prefix.len()).saturating_add(length))
    }
}

/// The reason why a text does not match a part.
enum MatchError {
    Differs,
    Undecided,
}

impl From<MatchError> for Verdict {
    fn from(error: MatchError) -> Self {
        match error {
            MatchError::Differs => Self::Mismatch,
            MatchError::Undecided => Self::Undecided,
        }
    }
}

#[derive(Clone, Copy)]
struct Reader<'t> {
    rest: &'t [u8],
    ended: bool,
}

impl Reader<'_> {
    fn match_part(&mut self, part: &Part) -> Result<(), MatchError> {
        match part {
            Part::Between(min, max, set) => {
                let run = self.run(max.saturating_add(1), *set);
                if run == self.rest.len() && run <= *max && !self.ended {
                    return Err(MatchError::Undecided);
                }
                self.skip_if((*min..=*max).contains(&run), run)
            }
            Part::Exactly(count, set) => {
                let run = self.run(*count, *set);
                self.skip_if(run == *count, run)
            }
            Part::Headers => self.headers(),
            Part::Line(min) => self.line(*min),
            Part::Newline => self.newline(),
            Part::Text(text) => self.text(text),
        }
    }

    /// Returns the number of bytes of a set at the start of the rest, up to `max`.
    fn run(&self, max: usize, set: Set) -> usize {
        self.rest.iter().take(max).take_while(|byte| set.has(**byte)).count()
    }

    fn skip_if(&mut self, fits: bool, count: usize) -> Result<(), MatchError> {
        if fits {
            self.rest = self.rest.get(count..).unwrap_or_default();
            return Ok(());
        }
        let may_continue = count == self.rest.len() && !self.ended;
        Err(if may_continue { MatchError::Undecided } else { MatchError::Differs })
    }

    fn text(&mut self, text: &[u8]) -> Result<(), MatchError> {
        let equal = self.rest.iter().zip(text).take_while(|(a, b)| a == b).count();
        self.skip_if(equal == text.len(), equal)
    }

    fn newline(&mut self) -> Result<(), MatchError> {
        self.any_of(NEWLINES)?;
        let indentation = self.rest.iter().take(MAX_INDENT).take_while(|byte| matches!(byte, b' ' | b'\t'));
        self.skip_if(true, indentation.count())
    }

    /// Skips the first text that matches. No text may be a prefix of another.
    fn any_of(&mut self, texts: &[&[u8]]) -> Result<(), MatchError> {
        let mut error = MatchError::Differs;
        for text in texts {
            match self.text(text) {
                Ok(()) => return Ok(()),
                Err(MatchError::Undecided) => error = MatchError::Undecided,
                Err(MatchError::Differs) => {}
            }
        }
        Err(error)
    }

    fn line(&mut self, min: usize) -> Result<(), MatchError> {
        let run = self.run(MAX_LINE, Set::Base64);
        self.skip_if(run >= min, run)?;
        let is_end = self.rest.is_empty() && self.ended;
        if run == MAX_LINE || is_end || self.rest.first() == Some(&b'=') {
            return Ok(());
        }
        self.newline()
    }

    fn headers(&mut self) -> Result<(), MatchError> {
        for _ in 0..MAX_HEADERS {
            let mut empty = *self;
            match empty.newline() {
                Ok(()) => {
                    *self = empty;
                    return Ok(());
                }
                Err(MatchError::Undecided) => return Err(MatchError::Undecided),
                Err(MatchError::Differs) => {}
            }
            self.match_part(&Part::Between(1, MAX_HEADER, Set::Printable))?;
            self.newline()?;
        }
        Err(MatchError::Differs)
    }
}

const NEWLINES: &[&[u8]] = &[b"\n", b"\r\n", b"\\n", b"\\r\\n", b"\\\\n", b"\\\\r\\\\n", b"%0A", b"%0D%0A"];
/// The longest lines are those of RFC 2045, with 76 characters.
const MAX_LINE: usize = 100;
const MAX_INDENT: usize = 32;
const MAX_HEADERS: usize = 4;
const MAX_HEADER: usize = 80;

/// Returns the last character of a text with an escape decoded, because `\n` or `%3D` separates a key just as the
/// character that it encodes does.
fn last_char(before: &[u8]) -> Option<u8> {
    let hex = |digits: &[u8]| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok();
    if let [.., b'%', a, b] | [.., b'\\', b'u', b'0', b'0', a, b] = before
        && let Some(byte) = hex(&[*a, *b])
    {
        return Some(byte);
    }
    match before {
        [.., b'\\', b'b' | b'f' | b'n' | b'r' | b't'] => Some(b' '),
        [.., byte] => Some(*byte),
        [] => None,
    }
}

/// Returns true for an id in a signed URL: before the date of its credential scope, `AKIA…%2F20260102%2F…` (version 4),
/// or in version 2. Such URLs are meant to be shared. An unescaped slash is already excluded by the boundary.
fn is_in_signed_url(before: &[u8], mut after: Reader<'_>) -> Result<bool, MatchError> {
    if before.ends_with(b"?AWSAccessKeyId=") || before.ends_with(b"&AWSAccessKeyId=") {
        return Ok(true);
    }
    match after.any_of(&[b"%2F20", b"%2f20", b"%252F20"]) {
        Ok(()) => Ok(true),
        Err(MatchError::Differs) => Ok(false),
        Err(error) => Err(error),
    }
}

use Part::{Between, Exactly, Headers, Line, Newline, Text};
use Set::{
    Alphanumeric, Assignment, Base32, Base64, Base64Url, Base64UrlPadded, Bech32, Digits, Hex, LastOfTwo, Letters,
    LowerOrDigits, UpperOrDigits,
};

/// For bodies in base 62 or 64 without a checksum.
const MIXED: Check = Check::Mixed(2, 2, 1);
const HEX: Check = Check::Mixed(0, 1, 1);

pub(super) const GROQ_INFIX: &[u8] = b"WGdyb3FY";

/// 64 bytes in base64 after the separator between a name and its value.
const ACCOUNT_KEY: &[Part] = &[Between(1, 8, Assignment), Exactly(85, Base64), Exactly(1, LastOfTwo), Text(b"==")];
const LANGSMITH: &[Part] = &[Exactly(32, Hex), Text(b"_"), Exactly(10, Hex)];
const ANTHROPIC: &[Part] = &[Exactly(93, Base64Url), Text(b"AA")];

/// Thirty random characters and a checksum of six.
const CHECKED_36: &[Part] = &[Exactly(36, Alphanumeric)];
const CHECKED_76: &[Part] = &[Exactly(76, Alphanumeric)];

/// The old format, and the one that contains the account.
const STRIPE_24: &[Part] = &[Exactly(24, Alphanumeric)];
const STRIPE_99: &[Part] = &[Text(b"51"), Exactly(97, Alphanumeric)];

/// A macaroon for `pypi.org` or `test.pypi.org`. Its identifier is a UUID of 36 bytes.
const PYPI: &[Part] = &[Between(90, 600, Base64Url)];

/// DER starts with the tag of a sequence, which is M in base64.
const DER: &[Part] = &[Newline, Text(b"M"), Line(39)];
/// RFC 1421 §4.6: encrypted, with headers.
const TRADITIONAL: &[Part] = &[Newline, Text(b"Proc-Type: 4,ENCRYPTED"), Newline, Headers, Line(40)];

pub(super) const SHAPES: &[Shape] = &[
    Shape::new(Family::Age, b"AGE-SECRET-KEY-1", &[Exactly(58, Bech32)], Check::Mixed(2, 0, 1)),
    Shape::new(Family::Anthropic, b"sk-ant-api03-", ANTHROPIC, MIXED),
    Shape::new(Family::Anthropic, b"sk-ant-admin01-", ANTHROPIC, MIXED),
    Shape::new(Family::Anthropic, b"sk-ant-oat01-", ANTHROPIC, MIXED),
    Shape::new(Family::Aws, b"AKIA", &[Exactly(16, Base32)], Check::Aws).within_base64(),
    Shape::new(Family::Aws, b"ASIA", &[Exactly(16, Base32)], Check::Aws).within_base64(),
    Shape::new(Family::Atlassian, b"ATATT3", &[Exactly(186, Base64UrlPadded)], MIXED).within_base64(),
    Shape::account_key(b"AccountKey"),
    Shape::account_key(b"accountKey"),
    Shape::account_key(b"accountkey"),
    Shape::account_key(b"account_key"),
    Shape::account_key(b"account-key"),
    Shape::account_key(b"ACCOUNT_KEY"),
    Shape::new(
        Family::Brevo,
        b"xkeysib-",
        &[Exactly(64, Hex), Text(b"-"), Exactly(16, Alphanumeric)],
        Check::Mixed(1, 1, 1),
    ),
    Shape::new(Family::CratesIo, b"cio", &[Exactly(32, Alphanumeric)], MIXED).within_base64(),
    Shape::new(Family::Databricks, b"dapi", &[Exactly(32, Hex)], HEX).within_base64(),
    Shape::new(Family::Databricks, b"dapi", &[Exactly(32, Hex), Text(b"-"), Exactly(1, Digits)], HEX).within_base64(),
    Shape::new(Family::DigitalOcean, b"dop_v1_", &[Exactly(64, Hex)], HEX),
    Shape::new(Family::DigitalOcean, b"doo_v1_", &[Exactly(64, Hex)], HEX),
    Shape::new(Family::DigitalOcean, b"dor_v1_", &[Exactly(64, Hex)], HEX),
    Shape::new(Family::Docker, b"dckr_pat_", &[Exactly(27, Base64Url)], Check::Mixed(1, 1, 1)),
    Shape::new(Family::Doppler, b"dp.pt.", &[Exactly(43, Alphanumeric)], MIXED),
    Shape::new(
        Family::Dynatrace,
        b"dt0c01.",
        &[Exactly(24, UpperOrDigits), Text(b"."), Exactly(64, UpperOrDigits)],
        Check::Mixed(2, 0, 2),
    ),
    Shape::new(Family::Fly, b"fo1_", &[Exactly(43, Base64Url)], MIXED),
    Shape::new(Family::GitHub, b"ghp_", CHECKED_36, Check::Crc62),
    Shape::new(Family::GitHub, b"gho_", CHECKED_36, Check::Crc62),
    Shape::new(Family::GitHub, b"ghu_", CHECKED_36, Check::Crc62),
    Shape::new(Family::GitHub, b"ghs_", CHECKED_36, Check::Crc62),
    Shape::new(Family::GitHub, b"ghr_", CHECKED_76, Check::Crc62),
    Shape::new(
        Family::GitHub,
        b"github_pat_",
        &[Exactly(22, Alphanumeric), Text(b"_"), Exactly(59, Alphanumeric)],
        MIXED,
    ),
    Shape::new(Family::GitLab, b"glpat-", &[Exactly(20, Base64Url)], Check::Mixed(1, 1, 1)),
    Shape::new(
        Family::GitLab,
        b"glpat-",
        &[Between(27, 300, Base64Url), Text(b"."), Exactly(2, LowerOrDigits), Text(b"."), Exactly(9, LowerOrDigits)],
        MIXED,
    ),
    Shape::new(Family::GitLab, b"glpat-", &[Between(27, 300, Base64Url), Text(b"."), Exactly(9, LowerOrDigits)], MIXED),
    Shape::new(Family::GitLab, b"gldt-", &[Exactly(20, Base64Url)], Check::Mixed(1, 1, 1)),
    Shape::new(Family::GitLab, b"glptt-", &[Exactly(40, Hex)], HEX),
    Shape::new(Family::GitLab, b"gloas-", &[Exactly(64, Hex)], HEX),
    Shape::new(Family::GitLab, b"glagent-", &[Exactly(50, Base64Url)], MIXED),
    Shape::new(Family::Google, b"AIzaSy", &[Exactly(33, Base64Url)], MIXED).within_base64(),
    Shape::new(Family::Grafana, b"glsa_", &[Exactly(32, Alphanumeric), Text(b"_"), Exactly(8, Hex)], MIXED),
    Shape::new(Family::Groq, b"gsk_", &[Exactly(20, Alphanumeric), Text(GROQ_INFIX), Exactly(24, Alphanumeric)], MIXED),
    Shape::new(Family::HuggingFace, b"hf_", &[Exactly(34, Letters)], Check::Mixed(10, 6, 0)),
    Shape::new(Family::HuggingFace, b"api_org_", &[Exactly(34, Letters)], Check::Mixed(10, 6, 0)),
    Shape::new(Family::LangSmith, b"lsv2_pt_", LANGSMITH, HEX),
    Shape::new(Family::LangSmith, b"lsv2_sk_", LANGSMITH, HEX),
    Shape::new(Family::Linear, b"lin_api_", &[Exactly(40, Alphanumeric)], MIXED),
    Shape::new(Family::NewRelic, b"NRAK-", &[Exactly(27, UpperOrDigits)], Check::Mixed(2, 0, 1)),
    Shape::new(Family::Notion, b"ntn_", &[Exactly(11, Digits), Exactly(35, Alphanumeric)], MIXED),
    Shape::new(Family::Npm, b"npm_", CHECKED_36, Check::Crc62),
    Shape::new(Family::OpenAi, b"sk-", &[Between(48, 220, Base64Url)], Check::OpenAi),
    Shape::new(Family::OpenRouter, b"sk-or-v1-", &[Exactly(64, Hex)], HEX),
    Shape::new(Family::OpenShift, b"sha256~", &[Exactly(43, Base64Url)], MIXED),
    Shape::new(Family::Perplexity, b"pplx-", &[Exactly(48, Alphanumeric)], MIXED),
    Shape::new(Family::Postman, b"PMAK-", &[Exactly(24, Hex), Text(b"-"), Exactly(34, Hex)], HEX),
    Shape::armour(b"-----BEGIN PRIVATE KEY-----", DER),
    Shape::armour(b"-----BEGIN ENCRYPTED PRIVATE KEY-----", DER),
    Shape::armour(b"-----BEGIN RSA PRIVATE KEY-----", DER),
    Shape::armour(b"-----BEGIN RSA PRIVATE KEY-----", TRADITIONAL),
    Shape::armour(b"-----BEGIN EC PRIVATE KEY-----", DER),
    Shape::armour(b"-----BEGIN EC PRIVATE KEY-----", TRADITIONAL),
    Shape::armour(b"-----BEGIN DSA PRIVATE KEY-----", DER),
    Shape::armour(b"-----BEGIN DSA PRIVATE KEY-----", TRADITIONAL),
    // "openssh-key-v1" with its zero byte, in base64.
    Shape::armour(b"-----BEGIN OPENSSH PRIVATE KEY-----", &[Newline, Text(b"b3BlbnNzaC1rZXktdjEA"), Line(20)]),
    // RFC 9580 §6.2. A secret key packet starts with 0x94 to 0x97 or with 0xc5 (§4.2), which is l or x in base64.
    Shape::armour(b"-----BEGIN PGP PRIVATE KEY BLOCK-----", &[Newline, Headers, Text(b"l"), Line(39)]),
    Shape::armour(b"-----BEGIN PGP PRIVATE KEY BLOCK-----", &[Newline, Headers, Text(b"x"), Line(39)]),
    Shape::new(Family::Pulumi, b"pul-", &[Exactly(40, Hex)], HEX),
    Shape::new(Family::PyPi, b"pypi-AgEIcHlwaS5vcmcCJ", PYPI, MIXED),
    Shape::new(Family::PyPi, b"pypi-AgENdGVzdC5weXBpLm9yZwIk", PYPI, MIXED),
    Shape::new(Family::Replicate, b"r8_", &[Exactly(37, Alphanumeric)], MIXED),
    Shape::new(Family::RubyGems, b"rubygems_", &[Exactly(48, Hex)], HEX),
    Shape::new(Family::SendGrid, b"SG.", &[Exactly(22, Base64Url), Text(b"."), Exactly(43, Base64Url)], MIXED),
    Shape::new(Family::Sentry, b"sntryu_", &[Exactly(64, Hex)], HEX),
    Shape::new(Family::Shopify, b"shpat_", &[Exactly(32, Hex)], HEX),
    Shape::new(Family::Shopify, b"shpca_", &[Exactly(32, Hex)], HEX),
    Shape::new(Family::Shopify, b"shppa_", &[Exactly(32, Hex)], HEX),
    Shape::new(Family::Shopify, b"shpss_", &[Exactly(32, Hex)], HEX),
    Shape::new(
        Family::Slack,
        b"xapp-1-A",
        &[Between(8, 12, UpperOrDigits), Text(b"-"), Between(10, 13, Digits), Text(b"-"), Exactly(64, Hex)],
        HEX,
    ),
    Shape::new(
        Family::Slack,
        b"xoxb-",
        &[Between(10, 13, Digits), Text(b"-"), Between(10, 13, Digits), Text(b"-"), Exactly(24, Alphanumeric)],
        MIXED,
    ),
    Shape::new(
        Family::Slack,
        b"xoxp-",
        &[
            Between(10, 13, Digits),
            Text(b"-"),
            Between(10, 13, Digits),
            Text(b"-"),
            Between(10, 13, Digits),
            Text(b"-"),
            Exactly(32, Hex),
        ],
        HEX,
    ),
    Shape::new(Family::Sourcegraph, b"sgp_", &[Exactly(40, Hex)], HEX),
    Shape::new(Family::Sourcegraph, b"sgp_", &[Exactly(16, Hex), Text(b"_"), Exactly(40, Hex)], HEX),
    Shape::new(Family::Sourcegraph, b"sgp_local_", &[Exactly(40, Hex)], HEX),
    Shape::new(Family::Stripe, b"sk_live_", STRIPE_24, MIXED),
    Shape::new(Family::Stripe, b"sk_live_", STRIPE_99, MIXED),
    Shape::new(Family::Stripe, b"rk_live_", STRIPE_24, MIXED),
    Shape::new(Family::Stripe, b"rk_live_", STRIPE_99, MIXED),
    Shape::new(Family::Vault, b"hvs.", &[Between(90, 120, Base64Url)], MIXED),
    Shape::new(Family::Vault, b"hvb.", &[Between(138, 300, Base64Url)], MIXED),
    Shape::new(Family::XAi, b"xai-", &[Exactly(80, Alphanumeric)], MIXED),
];

//! Estimates the number of guesses that a value takes. A reaction to a value confirms a guess, so weak values are not
//! searched for.

use super::MIN_VALUE;

/// The minimum number of guesses of a strong value.
const MIN_STRONG_GUESSES: u64 = 1 << 40;
/// The numbers of characters that are estimated, and the number of guesses from which on no more are. The cost of the
/// estimator grows faster than linearly, and random characters need few.
const ESTIMATES: [(usize, u64); 3] = [(FIRST_ESTIMATE, 1 << 50), (40, MIN_STRONG_GUESSES), (100, 0)];
/// The first estimate is used only for characters of mixed kinds that are not cut off within a long word.
const FIRST_ESTIMATE: usize = 16;
/// The number of letters from which on a run of them may be a long word.
const LONG_WORD: usize = 10;

/// The consequence of a weak value, for operators who have to change it.
pub const WEAK: &str = "it is injected, but redacted only in responses of the exchange in which it was sent, and not \
                        searched for in requests";

/// The minimum number of guesses for half of a value after the prefix that it shares with other keys. Eight random
/// bytes take more.
const MIN_HALF_GUESSES: u64 = 1 << 26;
/// The minimum length of a strong value whose halves are searched for too, in bytes.
pub const MIN_HALVED: usize = 32;

/// How hard a value is to guess.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Strength {
    /// The value is searched for everywhere, and so are these halves of it.
    Strong(Halves),
    /// The value is redacted only in responses of the exchange in which it was sent, and searched for nowhere else.
    Weak(Weakness),
}

/// The halves of a value that are searched for on their own: those of a value of [`MIN_HALVED`] bytes or more that are
/// strong themselves. A half that is guessable or mostly a public prefix would occur in unrelated texts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Halves {
    pub(super) first: bool,
    pub(super) second: bool,
    /// The secret part of a longer text, such as the password of a URL, is searched for on its own. It is too short for
    /// halves.
    pub(super) secret_part: bool,
    /// The minimum number of bytes at the start of the value that count as a part of it at a pause or at the end of a
    /// text. They are at least half of the value and strong themselves. Without it only the whole value counts.
    pub(super) part: Option<usize>,
    /// The same in a response to a request in which the value was sent. The origin knows the value then and may return it,
    /// so the rest after a shorter part must be hard to guess too.
    pub(super) sent_part: Option<usize>,
}

/// The reason why a value is weak.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Weakness {
    /// The approximate number of guesses, as a power of two.
    #[error("about 2^{0} guesses find it, but at least 2^40 are required")]
    Guessable(u32),
    /// Shorter than [`MIN_VALUE`].
    #[error("it is shorter than {MIN_VALUE} bytes")]
    Short,
}

impl Strength {
    /// Estimates the number of guesses that the secret part of a value takes.
    ///
    /// The estimator copies the value into memory that is not wiped.
    #[must_use]
    pub fn of(secret: &[u8]) -> Self {
        let mut estimator = Estimator::default();
        match estimator.weakness(secret) {
            Some(why) => Self::Weak(why),
            None if distinctive_part(secret).len() < MIN_HALVED => {
                let distinctive = distinctive_part(secret);
                let secret_part = distinctive.len() < secret.len() && estimator.weakness(distinctive).is_none();
                let [part, sent_part] = parts(secret, &mut estimator);
                Self::Strong(Halves { secret_part, part, sent_part, ..Halves::default() })
            }
            None => {
                let (first, second) = halves(secret);
                let after_prefix = first.get(kind_prefix_len(first)..).unwrap_or_default();
                let is_distinctive =
                    after_prefix.len() >= MIN_VALUE && estimator.guesses(after_prefix) >= MIN_HALF_GUESSES;
                let is_first_searched = is_distinctive && estimator.weakness(first).is_none();
                // A part that is longer than the first half would not continue a match of that half.
                let first_end = memchr::memmem::rfind(secret, first).map_or(secret.len(), |at| at + first.len());
                let [part, sent_part] = parts(secret, &mut estimator)
                    .map(|part| part.map(|part| if is_first_searched { part.min(first_end) } else { part }));
                Self::Strong(Halves {
                    first: is_first_searched,
                    second: estimator.weakness(second).is_none(),
                    part,
                    sent_part,
                    ..Halves::default()
                })
            }
        }
    }

    /// Returns true for a value that is searched for everywhere.
    #[must_use]
    pub fn is_strong(self) -> bool {
        matches!(self, Self::Strong(_))
    }

    /// Returns true if each half of the value is strong itself, which takes 32 bytes or more. Such a value cannot be found
    /// by somebody who can try out guesses without asking the proxy, as fast as a computer can.
    #[must_use]
    pub fn has_strong_halves(self) -> bool {
        matches!(self, Self::Strong(Halves { first: true, second: true, .. }))
    }
}

/// Returns the minimum lengths of the starts of the value that count as a part of it, [`Halves::part`] and
/// [`Halves::sent_part`]. They have at least half of its secret part and are hard to guess without the public prefix of
/// its kind of keys.
///
/// A guessable part must not count. The reaction to it would confirm the guess, and the rest could then be guessed too.
/// Where the value was sent, an origin that returns it shows everything before such a part, so a part that takes as many
/// guesses as the rest is the best choice.
fn parts(value: &[u8], estimator: &mut Estimator) -> [Option<usize>; 2] {
    let distinctive = distinctive_part(value);
    let Some(offset) = memchr::memmem::rfind(value, distinctive).filter(|_| !distinctive.is_empty()) else {
        return [None; 2];
    };
    let public = kind_prefix_len(distinctive);
    let secret = distinctive.get(public..).unwrap_or_default();
    let eighths = |n: usize| secret.len().saturating_mul(n).div_ceil(8).max(MIN_VALUE);
    let lengths = [4, 5, 6, 7].map(eighths).into_iter().filter(|length| *length < secret.len());
    let to_end = |length: usize| offset.saturating_add(public).saturating_add(length);
    let (mut strong, mut sent) = (None, None);
    for length in lengths {
        let part = secret.get(..length).unwrap_or_default();
        let is_strong = estimator.weakness(part).is_none() || random_bits(part, estimator) * MARGIN >= STRONG_BITS;
        if is_strong {
            strong = Some(to_end(length));
        }
        if sent.is_none() && (is_strong || random_bits(part, estimator) >= SENT_PART_BITS) {
            sent = Some(to_end(length));
        }
        if is_strong {
            break;
        }
    }
    [strong, sent]
}

/// The number of guesses of a strong part, as a power of two.
const STRONG_BITS: f64 = MIN_STRONG_GUESSES.ilog2() as f64;
/// Allows for keys that are less random than they look.
const MARGIN: f64 = 0.85;
/// The same for a part of a value that was sent: eight hex digits.
const SENT_PART_BITS: f64 = 32.0;

/// Returns the number of guesses that a part of a strong value takes if it looks random, as a power of two; otherwise 0.
///
/// The estimator assumes ten possibilities for each character that it cannot explain. A key has more, and with the
/// estimator's figure nearly all of a short key could pass before a part of it counts.
fn random_bits(part: &[u8], estimator: &mut Estimator) -> f64 {
    let is_hex = part.iter().all(u8::is_ascii_hexdigit);
    let sizes = if is_hex { [6.0, 6.0, 10.0, 0.0] } else { [26.0, 26.0, 10.0, 16.0] };
    let used = |wanted: u8| part.iter().any(|byte| kind_of(byte) == wanted);
    let alphabet: f64 = (0..).zip(sizes).filter(|(wanted, _)| used(*wanted)).map(|(_, size)| size).sum();
    let unexplained = 10_u64.saturating_pow(u32::try_from(part.len().saturating_sub(1)).unwrap_or(u32::MAX));
    // Words of hex digits are short, and the estimator knows dates.
    let is_mixed = if is_hex { used(2) && (used(0) || used(1)) } else { is_mixed(part) };
    let is_random = part.len() >= MIN_VALUE && is_mixed && estimator.guesses(part) >= unexplained;
    if is_random { part.len() as f64 * alphabet.log2() } else { 0.0 }
}

/// Returns true if the text changes between kinds of characters as often as random text. Words and dates do so rarely.
fn is_mixed(text: &[u8]) -> bool {
    let changes = text.windows(2).filter(|pair| pair.first().map(kind_of) != pair.last().map(kind_of)).count();
    changes.saturating_mul(5) >= text.len().saturating_sub(1).saturating_mul(2)
}

/// Returns the number of letters around the boundary before a character.
fn letters_at(text: &str, char: usize) -> usize {
    let (mut run, mut after) = (0_usize, false);
    for (at, next) in text.chars().enumerate() {
        after |= at >= char;
        if next.is_ascii_alphabetic() {
            run = run.saturating_add(1);
        } else if after {
            break;
        } else {
            run = 0;
        }
    }
    run
}

/// Returns the kind of a character: lower case, upper case, digit or other.
const fn kind_of(byte: &u8) -> u8 {
    match byte {
        b'a'..=b'z' => 0,
        b'A'..=b'Z' => 1,
        b'0'..=b'9' => 2,
        _ => 3,
    }
}

/// Fields of connection strings that hold a secret, in lower case and without blanks.
const SECRET_FIELDS: [&[u8]; 6] = [b"password", b"pwd", b"key", b"secret", b"signature", b"token"];

/// Returns the part of a value that is distinctive. The rest of a signed token (JWT, RFC 7519) names its issuer and
/// audience, that of a URL its host, that of a connection string or a document the server, that of a cookie its name, that of a
/// whole field its scheme, and the first and last line of a PEM text its kind. Other texts contain them as well. Returns
/// nothing if a text of such a form has no part that looks secret.
pub(super) fn distinctive_part(value: &[u8]) -> &[u8] {
    let value = without_auth_scheme(value);
    if value.starts_with(b"eyJ") && value.contains(&b'.') {
        return value.rsplit(|byte| *byte == b'.').next().unwrap_or_default();
    }
    if let Some(secret) = secret_field(value) {
        return secret;
    }
    if let Some(rest) = after_scheme(value) {
        return password_of_url(rest);
    }
    without_pem_lines(if is_document(value) { secret_member(value) } else { value })
}

/// Returns the private key of a text in PEM (RFC 7468) without its first and last line, which programs remove before they send
/// it. Other blocks, such as certificates and parameters, are public. In a string of JSON, line breaks are escaped.
fn without_pem_lines(value: &[u8]) -> &[u8] {
    const BEGIN: &[u8] = b"-----BEGIN ";
    let mut rest = value;
    while let Some(at) = memchr::memmem::find(rest, BEGIN) {
        rest = rest.get(at.saturating_add(BEGIN.len())..).unwrap_or_default();
        let Some((label, behind)) = split_at_text(rest, b"-----") else { break };
        let Some((body, behind)) = split_at_text(behind, b"-----END ") else { break };
        if memchr::memmem::find(label, b"PRIVATE KEY").is_some() {
            return without_escaped_breaks(body.trim_ascii());
        }
        rest = behind;
    }
    value
}

/// Returns the parts of a text before and after another one.
fn split_at_text<'t>(text: &'t [u8], other: &[u8]) -> Option<(&'t [u8], &'t [u8])> {
    let at = memchr::memmem::find(text, other)?;
    Some((text.get(..at)?, text.get(at.checked_add(other.len())?..)?))
}

/// Returns a text without escaped line breaks at its ends.
fn without_escaped_breaks(mut text: &[u8]) -> &[u8] {
    loop {
        let breaks: [&[u8]; 2] = [b"\\n", b"\\r"];
        let shorter = breaks.iter().find_map(|end| text.strip_prefix(*end).or_else(|| text.strip_suffix(*end)));
        match shorter {
            Some(shorter) => text = shorter,
            None => return text,
        }
    }
}

/// Returns a key without an authentication scheme before it (RFC 9110 §11.1), such as `Token`.
fn without_auth_scheme(value: &[u8]) -> &[u8] {
    const MAX_SCHEME: usize = 24;
    let parts = memchr::memchr(b' ', value).and_then(|at| value.split_at_checked(at));
    let Some((scheme, rest)) = parts.map(|(scheme, rest)| (scheme, rest.trim_ascii_start())) else { return value };
    let is_scheme = !scheme.is_empty()
        && scheme.len() <= MAX_SCHEME
        && scheme.iter().all(|byte| byte.is_ascii_alphabetic() || *byte == b'-');
    if is_scheme && rest.len() >= MIN_VALUE && !rest.contains(&b' ') { rest } else { value }
}

/// Returns the value of the longest field that names a secret, or else of the longest one that looks random, as that of a
/// session cookie does. Returns nothing if no field does, and `None` for a text that does not consist of fields: names and
/// values, separated by semicolons.
fn secret_field(value: &[u8]) -> Option<&[u8]> {
    if !value.contains(&b';') {
        return None;
    }
    let all = value.split(|byte| *byte == b';').map(<[u8]>::trim_ascii).filter(|field| !field.is_empty());
    let parsed = all.map(|field| {
        let (name, value) = field.split_at_checked(memchr::memchr(b'=', field)?)?;
        Some((name, value.get(1..).unwrap_or_default()))
    });
    // The first field of some connection strings is a URL.
    let named = longest_named(parsed.clone().flatten());
    if named.is_some() {
        return named;
    }
    let fields = parsed.map(|field| field.filter(|(name, _)| is_field_name(name))).collect::<Option<Vec<_>>>()?;
    Some(longest_random(fields.into_iter()))
}

type Field<'v> = (&'v [u8], &'v [u8]);

/// Returns the longest value whose name is that of a secret.
fn longest_named<'v>(fields: impl Iterator<Item = Field<'v>>) -> Option<&'v [u8]> {
    fields.filter(|(name, _)| names_secret(name)).map(|(_, value)| value).max_by_key(|value| value.len())
}

/// Returns the longest value that looks random, or nothing.
fn longest_random<'v>(fields: impl Iterator<Item = Field<'v>>) -> &'v [u8] {
    const MIN_RANDOM: usize = 16;
    let random = fields.map(|(_, value)| value).filter(|value| value.len() >= MIN_RANDOM && is_mixed(value));
    random.max_by_key(|value| value.len()).unwrap_or_default()
}

/// Returns the secret among the members of a JSON document, at any depth, as [`secret_field`] does among fields.
fn secret_member(document: &[u8]) -> &[u8] {
    let mut strings = Vec::new();
    let (mut start, mut at) = (None, 0_usize);
    while let Some(found) = document.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        let here = at.saturating_add(found);
        let is_escape = document.get(here) == Some(&b'\\');
        at = here.saturating_add(if is_escape { 2 } else { 1 });
        if !is_escape {
            start = match start {
                None => Some(at),
                Some(from) => {
                    strings.push((from, here));
                    None
                }
            };
        }
    }
    let text = |(from, to): (usize, usize)| document.get(from..to).unwrap_or_default();
    let pairs = strings.iter().zip(strings.iter().skip(1)).filter(|((_, end), (start, _))| {
        // Between a name and its value, there is a colon and nothing else: `": "`.
        let between = document.get(end.saturating_add(1)..start.saturating_sub(1)).unwrap_or_default();
        between.trim_ascii() == b":"
    });
    let fields = pairs.map(|(name, value)| (text(*name), text(*value)));
    longest_named(fields.clone()).unwrap_or_else(|| longest_random(fields))
}

/// Returns true for the name of a field that holds a secret, however it is spaced.
fn names_secret(name: &[u8]) -> bool {
    let name: Vec<u8> = name.iter().filter(|byte| !byte.is_ascii_whitespace()).map(u8::to_ascii_lowercase).collect();
    SECRET_FIELDS.iter().any(|secret| name.ends_with(secret))
}

/// Returns true for a word, or several with blanks between them.
fn is_field_name(name: &[u8]) -> bool {
    name.first().is_some_and(u8::is_ascii_alphabetic)
        && name.iter().all(|byte| byte.is_ascii_alphanumeric() || b" _-.".contains(byte))
}

/// Returns the rest of a URL after its scheme (RFC 3986 §3.1), which may consist of several, such as `jdbc:mysql`.
fn after_scheme(value: &[u8]) -> Option<&[u8]> {
    let (scheme, rest) = value.split_at_checked(memchr::memmem::find(value, b"://")?)?;
    let is_scheme = scheme.first().is_some_and(u8::is_ascii_alphabetic)
        && scheme.iter().all(|byte| byte.is_ascii_alphanumeric() || b"+-.:".contains(byte));
    rest.get(3..).filter(|_| is_scheme)
}

/// Returns the password of a URL, or nothing.
fn password_of_url(rest: &[u8]) -> &[u8] {
    let authority = rest.split(|byte| b"/?#".contains(byte)).next().unwrap_or_default();
    let user = memchr::memrchr(b'@', authority).and_then(|at| authority.get(..at)).unwrap_or_default();
    memchr::memchr(b':', user).and_then(|at| user.get(at.saturating_add(1)..)).unwrap_or_default()
}

/// Returns true for a document, such as the JSON of a service account.
fn is_document(value: &[u8]) -> bool {
    let members = value.strip_prefix(b"{").map(<[u8]>::trim_ascii_start);
    let names = memchr::memmem::find_iter(value, b"\"").filter_map(|quote| value.get(quote.saturating_add(1)..));
    members.is_some_and(|members| members.starts_with(b"\""))
        && names.map(<[u8]>::trim_ascii_start).any(|after| after.starts_with(b":"))
}

/// Returns the halves of the distinctive part of a value. Both contain the middle byte if the length is odd.
pub(super) fn halves(value: &[u8]) -> (&[u8], &[u8]) {
    let value = distinctive_part(value);
    let first = value.get(..value.len().div_ceil(2)).unwrap_or_default();
    (first, value.get(value.len() / 2..).unwrap_or_default())
}

/// Returns the length of the public prefix of a kind of keys, such as `sk-ant-api03-`: words of up to eight letters and
/// up to two digits after them, each followed by a separator.
fn kind_prefix_len(value: &[u8]) -> usize {
    const MAX_WORD: usize = 8;
    const MAX_DIGITS: usize = 2;
    let mut end = 0_usize;
    while let Some(rest) = value.get(end..) {
        let letters = rest.iter().take_while(|byte| byte.is_ascii_alphabetic()).count();
        let digits = rest.iter().skip(letters).take_while(|byte| byte.is_ascii_digit()).count();
        let word = letters.saturating_add(digits);
        let separator = rest.get(word).is_some_and(|byte| b"-_.:".contains(byte));
        let bytes = rest.get(..word).unwrap_or_default();
        let is_mixed = bytes.iter().any(u8::is_ascii_lowercase) && bytes.iter().any(u8::is_ascii_uppercase);
        if letters == 0 || word > MAX_WORD || digits > MAX_DIGITS || !separator || is_mixed {
            break;
        }
        end = end.saturating_add(word).saturating_add(1);
    }
    end
}

/// Estimates texts, and remembers the results for one value, because its parts begin alike.
#[derive(Default)]
struct Estimator {
    known: Vec<(zeroize::Zeroizing<String>, u64)>,
}

impl Estimator {
    /// Returns the reason why a value is weak, or `None` for a strong one.
    fn weakness(&mut self, secret: &[u8]) -> Option<Weakness> {
        if secret.len() < MIN_VALUE {
            return Some(Weakness::Short);
        }
        let estimate = self.guesses(secret);
        (estimate < MIN_STRONG_GUESSES).then(|| Weakness::Guessable(estimate.max(1).ilog2()))
    }

    /// Returns the approximate number of guesses that find a value.
    fn guesses(&mut self, secret: &[u8]) -> u64 {
        let text = String::from_utf8_lossy(secret);
        let mut estimate = 0;
        for (max_chars, enough) in ESTIMATES {
            let chars: zeroize::Zeroizing<String> = zeroize::Zeroizing::new(text.chars().take(max_chars).collect());
            let is_all = chars.len() == text.len();
            if !is_all
                && max_chars == FIRST_ESTIMATE
                && !(is_mixed(chars.as_bytes()) && letters_at(&text, max_chars) < LONG_WORD)
            {
                continue;
            }
            estimate = self.guesses_of(chars);
            if is_all || estimate >= enough {
                break;
            }
        }
        estimate
    }

    fn guesses_of(&mut self, text: zeroize::Zeroizing<String>) -> u64 {
        if let Some((_, guesses)) = self.known.iter().find(|(known, _)| *known == text) {
            return *guesses;
        }
        let guesses = zxcvbn::zxcvbn(&text, &[]).guesses();
        self.known.push((text, guesses));
        guesses
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_dates_runs_and_short_values_are_weak() {
        let weak = [
            "abc123",
            "password",
            "Password",
            "2026-11-22",
            "aaaaaaaaaaaaaaaaaaaaaaab",
            "Winter1987?",
            "abcdefghijklmnop",
        ];
        for value in weak {
            assert!(!Strength::of(value.as_bytes()).is_strong(), "{value}");
        }
        assert_eq!(Strength::of(b"s3cr3t!"), Strength::Weak(Weakness::Short));
        let strong = [
            "ghp_16C7e42F292c6912E7710c838347Ae178B4a",
            "qhzvkwplmxtbnrjd",
            "correcthorsebatterystaple",
            "7381946205174839",
        ];
        for value in strong {
            assert!(Strength::of(value.as_bytes()).is_strong(), "{value}");
        }
    }

    #[test]
    fn the_lines_around_a_pem_key_are_not_its_secret() {
        let body = "MIIEvQIBADANBgkqhkiG9w0BAQEFAASC\nk7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5J\nfTgA1xZq";
        let pem = format!("-----BEGIN PRIVATE KEY-----\n{body}\n-----END PRIVATE KEY-----\n");
        assert_eq!(distinctive_part(pem.as_bytes()), body.as_bytes());
        let escaped = |text: &str| text.replace('\n', "\\n");
        let document = format!("{{\"type\": \"service_account\", \"private_key\": \"{}\"}}", escaped(&pem));
        assert_eq!(distinctive_part(document.as_bytes()), escaped(body).as_bytes());
        let windows = pem.replace('\n', "\\r\\n");
        assert_eq!(distinctive_part(windows.as_bytes()), body.replace('\n', "\\r\\n").as_bytes());
        // Other blocks are public.
        let parameters = "-----BEGIN EC PARAMETERS-----\nBggqhkjOPQMBBw==\n-----END EC PARAMETERS-----\n";
        let ec = format!("{parameters}{}", pem.replace("PRIVATE KEY", "EC PRIVATE KEY"));
        assert_eq!(distinctive_part(ec.as_bytes()), body.as_bytes());
        for other in ["-----BEGIN A B", "-----BEGIN A B-----", "-----BEGIN A B-----x-----END", parameters] {
            assert_eq!(distinctive_part(other.as_bytes()), other.as_bytes());
        }
    }

    #[test]
    fn a_long_run_before_a_random_end_does_not_make_a_value_weak() {
        let value = "0".repeat(60) + "ghp_16C7e42F292c6912E7710c838347Ae178B4a";
        assert!(Strength::of(value.as_bytes()).is_strong());
    }

    #[test]
    fn guessable_halves_are_not_searched_for() {
        let rows = [
            ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", true, true),
            ("k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf", true, true),
            ("k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5J", false, false),
            ("0000000000000000000k7Qz2mXv9LpW4sVt6eR", false, true),
            ("k7Qz2mXv9LpW4sVt6eRpasswordpassword1234", true, false),
            ("sk_live_4eC39HqLyjWDarjtT1zdp7dc", true, true),
            ("sk-ant-api03-_HJTNJ-dzNnk5vSk8VE", false, true),
            ("k7Qz2mXv9LpW-sVt6eRRu8YbN3cHd5Jf", true, true),
            ("postgres://app:k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf@db.example.com/main", true, true),
            ("postgres://app:k7Qz2mXv9LpW4sVt6eRRu8Yb@db.internal.example.com:5432/main", false, false),
            ("https://hooks.example.com/services/T024BE7LD/B0ADSRX9Q/k7Qz2mXv9LpW4sVt6eRRu8Yb", false, false),
            ("Endpoint=sb://k/;SharedAccessKeyName=n;SharedAccessKey=k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf==", true, true),
            ("Server=tcp:prod-sql.database.windows.net,1433;User ID=app;Password=Xk29dLq8VwRt41;", false, false),
            ("AccountName=k;AccountKey=k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf==;Suffix=core.example.com", true, true),
            ("{\"type\":\"service_account\",\"key\":\"k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf\"}", true, true),
            (
                "{\"a\":{\"token\": \"k7Qz2mXv9LpW4sVt6eRRu8Yb\",\"id\":\"orders_service_of_the_first_zone\"}}",
                false,
                false,
            ),
            (
                "{\"type\":\"service_account\",\"url\":\"https://prod-sql.database.windows.net\",\"zone\":71283}",
                false,
                false,
            ),
            ("sessionid=k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf; theme=dark", true, true),
            ("theme=dark; sessionid=k7Qz2mXv9LpW4sVt6eRRu8Yb", false, false),
            ("Server=prod-sql.database.windows.net;Trusted_Connection=yes;Database=orders2026", false, false),
            ("jdbc:sqlserver://db.example.com:1433;user=app;password=k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf", true, true),
            ("jdbc:postgresql://app:k7Qz2mXv9LpW4sVt6eRRu8Yb@db.internal.example.com:5432/main", false, false),
            ("Bearer k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf", true, true),
            ("Token k7Qz2mXv9LpW4sVt6eRRu8Yb", false, false),
            ("Bearer eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiJhIn0.k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf", true, true),
            // These are no connection strings, documents or URLs.
            ("k7Qz2mXv9LpW4sVt6 eRRu8YbN3cHd5JfQ", true, true),
            ("kQ7zR2mX9v;T4bL8nW3pJ=6sY1cF5hD0gAuE3xN5iZ", true, true),
            ("{k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf}", true, true),
            ("k7Qz2mXv9L$pW4://sVt6eRRu8YbN3cHd5Jf", true, true),
        ];
        for (value, first, second) in rows {
            let Strength::Strong(halves) = Strength::of(value.as_bytes()) else { panic!("{value}") };
            assert_eq!((halves.first, halves.second), (first, second), "{value}");
        }
    }

    #[test]
    fn guessable_or_public_parts_do_not_count() {
        let rows = [
            ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", Some(20)),
            ("acme_live_k7Qz2mXv9LpW4sVt6eRRu8Yb", Some(10 + 12)),
            ("acme_live_k7Qz2mXv9L", Some(10 + 8)),
            ("550e8400-e29b-41d4-a716-446655440000", Some(18)),
            ("k7Qz2mXv9LpW4sVt6eRRu8Yb", Some(12)),
            ("sk-live-51H/8xPq+Zz~0=%w&R", Some(8 + 9)),
            ("Sommer2024!Winter2025", Some(19)),
            ("correct-horse-battery", None),
            ("0000000000000000000000000000k7Qz2mXv9L", None),
            ("hunter2-k7Qz2mXv9LpW4sVt6", Some(8 + 9)),
            ("https://hooks.slack.com/services/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", None),
            ("postgres://orders_readonly_service:k7Qz2mXv9LpW4sVt6eRRu8Yb@db/o", Some(35 + 12)),
            ("Server=tcp:prod-sql.database.windows.net,1433;Password=k7Qz2mXv9LpW4sVt6eRRu8Yb;", Some(55 + 12)),
            ("{\"type\":\"service_account\",\"key\":\"k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf\"}", Some(33 + 16)),
        ];
        for (value, part) in rows {
            let Strength::Strong(halves) = Strength::of(value.as_bytes()) else { panic!("{value}") };
            assert_eq!(halves.part, part, "{value}");
        }
    }
}

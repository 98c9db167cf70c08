//! `exeat run --credential`: gives the child process a placeholder instead of the key.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::path::Path;
use std::sync::Arc;

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;
use toml::Table;
use zeroize::Zeroizing;

use crate::files;
use crate::leak::strength::Strength;
use crate::leak::{Finding, Matcher, password};
use crate::model::name::is_plain;
use crate::policy::compile::Problem;
use crate::policy::credential::Credential;
use crate::policy::rule::Task;

/// The minimum length of a key, in bytes. A shorter placeholder could occur in unrelated text.
const MIN_KEY_LEN: usize = 8;
/// The longest name of a variable that an error shows, in bytes.
const MAX_SHOWN_NAME: usize = 40;
/// The maximum length, in bytes, of the public prefix that identifies the kind of a key.
const MAX_PREFIX_LEN: usize = 16;
/// Known public prefixes that do not end with a separator.
const KEY_PREFIXES: [&str; 4] = ["AIza", "AKIA", "ASIA", "eyJ"];

/// The file in the state directory from which placeholders are derived, and the length of its key in bytes.
const KEY_FILE: &str = "placeholder.key";
const KEY_LEN: usize = 32;

/// The key from which placeholders are derived, so that a credential has the same one at each run of this user. Clients
/// remember the keys that were approved or stored.
pub(super) struct PlaceholderKey(Zeroizing<Vec<u8>>);

impl PlaceholderKey {
    /// Reads the key from the state directory, or creates it.
    ///
    /// # Errors
    /// I/O errors; also if the file can be read by others or is too short.
    pub(super) fn read_or_create(state_dir: &Path) -> io::Result<Self> {
        let path = state_dir.join(KEY_FILE);
        let at_path = |error: &dyn std::fmt::Display| io::Error::other(format!("{}: {error}", path.display()));
        let make = || Ok(Zeroizing::new(files::random::<KEY_LEN>()?.to_vec()));
        let key = files::read_or_create(&path, make).map_err(|error| at_path(&error))?;
        if key.len() < KEY_LEN { Err(at_path(&"is too short")) } else { Ok(Self(key)) }
    }

    /// Returns bytes that depend on the name, the value and the number, and reveal nothing about them to somebody who does
    /// not know the key.
    fn derive(&self, name: &str, value: &[u8], number: u64) -> io::Result<Zeroizing<[u8; CHUNK]>> {
        let mut hmac = Hmac::<Sha256>::new_from_slice(&self.0).map_err(io::Error::other)?;
        hmac.update(&(name.len() as u64).to_be_bytes());
        hmac.update(name.as_bytes());
        hmac.update(&number.to_be_bytes());
        hmac.update(value);
        Ok(Zeroizing::new(hmac.finalize().into_bytes().into()))
    }
}

/// The number of bytes of a placeholder that are made at a time.
const CHUNK: usize = 32;

/// Returns true for a short value of only letters or only digits.
fn is_word(value: &[u8]) -> bool {
    let alike = value.iter().all(u8::is_ascii_alphabetic) || value.iter().all(u8::is_ascii_digit);
    alike && value.len() <= MAX_PREFIX_LEN
}

/// A key that the child process may use but not see.
pub(super) struct PlaceholderCredential {
    pub(super) name: String,
    /// The credential's configuration.
    pub(super) credential: Table,
    pub(super) hidden: HiddenKey,
}

/// A value that is hidden from the child process, and its placeholder.
pub(super) struct HiddenKey {
    value: Zeroizing<Vec<u8>>,
    placeholder: String,
}

impl HiddenKey {
    /// Returns the key of a configured credential, or `None` if the credential has no value.
    fn from_credential(credential: &Credential) -> Option<Self> {
        let value = Zeroizing::new(credential.value()?.expose().to_vec());
        Some(Self { value, placeholder: credential.given_placeholder() })
    }

    /// Replaces each occurrence of the value by the placeholder. Returns `None` if there is none. A value that is a
    /// word or a number is replaced only if it is the whole text.
    fn replace_in(&self, text: &OsStr) -> Option<OsString> {
        let mut rest = text.as_bytes();
        if rest != self.value.as_slice() && is_word(&self.value) {
            // A short word within a longer text is probably not the key.
            return None;
        }
        let mut hidden = Vec::new();
        while let Some(at) = memchr::memmem::find(rest, &self.value) {
            hidden.extend_from_slice(rest.get(..at)?);
            hidden.extend_from_slice(self.placeholder.as_bytes());
            rest = rest.get(at.saturating_add(self.value.len())..)?;
        }
        if hidden.is_empty() {
            return None;
        }
        hidden.extend_from_slice(rest);
        Some(OsString::from_vec(hidden))
    }
}

impl PlaceholderCredential {
    /// Parses `NAME@HOST` or `NAME=HOW@HOST` and reads the value from the variable NAME. Without a key, the placeholder is random.
    pub(super) fn new(
        flag: &str,
        env: &dyn Fn(&str) -> Option<String>,
        key: Option<&PlaceholderKey>,
    ) -> Result<Self, Problem> {
        // Errors do not repeat the text after the name, because it may be the key itself.
        // A name that is not that of a variable may be the key, too.
        let name = variable_of(flag);
        let is_variable = name.bytes().all(|byte| byte.is_ascii_uppercase() || byte.is_ascii_digit() || byte == b'_');
        let shown = if is_variable && name.len() <= MAX_SHOWN_NAME { name } else { "…" };
        let wrong = |problem: &str| {
            let suggestion = "NAME@HOST, or NAME=HOW@HOST, where HOW is bearer, basic, header:FIELD, query:PARAMETER, cookie:COOKIE, path, body:json:/POINTER, body:form:PARAMETER or websocket:/POINTER";
            Problem::new("--credential", format!("{shown} {problem}"), suggestion)
        };
        let (before, host) = flag.rsplit_once('@').ok_or_else(|| wrong("has no @HOST"))?;
        let how = before.split_once('=').map_or("auto", |(_, how)| how);
        if !is_plain(name) || host.is_empty() {
            return Err(wrong("has an invalid variable name or no host"));
        }
        if host.contains("://") || host.contains('*') {
            return Err(wrong("has a scheme or a wildcard: list each host by name, such as api.example.com"));
        }
        let invalid = |why: String| {
            let suggestion = "NAME@HOST, with a NAME that is set to the key in exeat's environment";
            Problem::new("--credential", format!("the variable {shown} {why}"), suggestion)
        };
        let value = env(name).ok_or_else(|| invalid("is not set".to_owned()))?;
        let value = Zeroizing::new(value.into_bytes());
        if value.len() < MIN_KEY_LEN {
            // Keys this short are not fully redacted in responses, so an origin that echoes one would reveal it.
            return Err(invalid(format!("holds a key that is too short to protect: less than {MIN_KEY_LEN} bytes")));
        }
        // The command may read the file of the key, and try out guesses of the value as fast as it can.
        let key = key.filter(|_| Strength::of(password(&value)).has_strong_halves());
        let bytes = |number| key.map_or_else(files::random, |key| key.derive(name, &value, number));
        let placeholder = make_placeholder(&value, &bytes).map_err(|error| wrong(&error.to_string()))?;
        let (auth_type, own) = match how.split_once(':') {
            None if ["auto", "bearer", "basic"].contains(&how) => (how, None),
            Some(("header", field)) => ("header", Some(("auth_header_name", field))),
            Some(("query", parameter)) => ("query_param", Some(("auth_query_name", parameter))),
            Some(("cookie", cookie)) => ("cookie", Some(("auth_cookie_name", cookie))),
            None if how == "path" => ("path", None),
            // The place is in `swap_in`.
            Some(("body" | "websocket", _)) => ("placeholder", None),
            _ => return Err(wrong("has an unknown HOW")),
        };
        let mut credential = Table::new();
        credential.insert("auth_type".to_owned(), auth_type.into());
        if let Some((key, field)) = own {
            credential.insert(key.to_owned(), field.into());
        }
        if auth_type == "placeholder" {
            credential.insert("swap_in".to_owned(), vec![how].into());
        }
        credential.insert("value".to_owned(), format!("env:{name}").into());
        credential.insert("domains".to_owned(), vec![host.to_ascii_lowercase()].into());
        credential.insert("placeholder".to_owned(), placeholder.clone().into());
        Ok(Self { name: name.to_owned(), credential, hidden: HiddenKey { value, placeholder } })
    }

    /// Returns the hosts that may receive the key, in the format of `--allow`.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &str> {
        self.credential
            .get("domains")
            .and_then(toml::Value::as_array)
            .into_iter()
            .flatten()
            .filter_map(toml::Value::as_str)
    }

    /// Returns the placeholder that the child process gets in the variable.
    pub(super) fn placeholder(&self) -> &str {
        &self.hidden.placeholder
    }

    /// Adds the hosts of another flag for the same key, and the place of another HOW, which then applies to all hosts.
    ///
    /// # Errors
    /// If one flag says `basic` and the other `bearer`, or one of them a place that no other goes with.
    pub(super) fn add(&mut self, other: &Self) -> Result<(), Problem> {
        let auth = |flag: &Self| {
            ["auth_type", "auth_header_name", "auth_query_name", "auth_cookie_name"]
                .map(|key| flag.credential.get(key).and_then(toml::Value::as_str).map(str::to_owned))
        };
        let (own, [how, field, parameter, cookie]) = (auth(self), auth(other));
        let is_alone = |how: &Option<String>| matches!(how.as_deref(), Some("cookie" | "path" | "placeholder"));
        if own != [how.clone(), field.clone(), parameter.clone(), cookie] {
            if is_alone(&own[0]) || is_alone(&how) {
                let problem = format!("{} is given with places that do not go together", self.name);
                return Err(Problem::new("--credential", problem, "a configuration with swap_in, and -c"));
            }
            let place = match (own[0].as_deref(), how.as_deref()) {
                (Some("auto"), _) => None,
                (_, Some("auto")) => {
                    for key in ["auth_header_name", "auth_query_name", "swap_in"] {
                        self.credential.remove(key);
                    }
                    self.credential.insert("auth_type".to_owned(), "auto".into());
                    None
                }
                (_, Some("header")) => field.map(|field| format!("header:{field}")),
                (_, Some("query_param")) => parameter.map(|parameter| format!("query:{parameter}")),
                (Some("header" | "query_param"), _) => Some("header:authorization".to_owned()),
                _ => {
                    let problem = format!("{} is given with both basic and bearer", self.name);
                    let suggestion = format!("{}@HOST, which is for both", self.name);
                    return Err(Problem::new("--credential", problem, suggestion));
                }
            };
            extend_list(&mut self.credential, "swap_in", place.into_iter().map(Into::into));
        }
        let places = other.credential.get("swap_in").and_then(toml::Value::as_array).cloned().unwrap_or_default();
        extend_list(
            &mut self.credential,
            "swap_in",
            places.into_iter().filter(|_| how.as_deref() == Some("placeholder")),
        );
        let hosts = other.credential.get("domains").and_then(toml::Value::as_array).cloned().unwrap_or_default();
        extend_list(&mut self.credential, "domains", hosts);
        Ok(())
    }
}

/// Adds to a list what it does not contain.
fn extend_list(table: &mut Table, key: &str, more: impl IntoIterator<Item = toml::Value>) {
    let mut list = table.get(key).and_then(toml::Value::as_array).cloned().unwrap_or_default();
    for value in more {
        if !list.contains(&value) {
            list.push(value);
        }
    }
    if !list.is_empty() {
        table.insert(key.to_owned(), list.into());
    }
}

/// Returns the variable that a flag `NAME@HOST` or `NAME=HOW@HOST` names.
pub(super) fn variable_of(flag: &str) -> &str {
    flag.split(['=', '@']).next().unwrap_or_default()
}

/// The keys that are hidden from the child process.
pub(super) struct HiddenKeys {
    /// The longest comes first, because a key may be part of another.
    keys: Vec<HiddenKey>,
    /// Finds strong keys in other forms.
    matcher: Arc<Matcher>,
}

impl HiddenKeys {
    /// Hides the keys given by flags, and those of the other credentials of the task.
    pub(super) fn new(task: Option<&Task>, flags: Vec<PlaceholderCredential>) -> Self {
        let credentials = task.map(|task| task.credentials().to_vec()).unwrap_or_default();
        let is_flag = |credential: &&Arc<Credential>| flags.iter().any(|flag| flag.name == credential.name().as_str());
        let others = credentials.iter().filter(|credential| !is_flag(credential));
        let mut keys: Vec<_> = others.filter_map(|credential| HiddenKey::from_credential(credential)).collect();
        keys.extend(flags.into_iter().map(|flag| flag.hidden));
        Self::of(keys, task.map(|task| task.own().clone()).unwrap_or_default())
    }

    fn of(mut keys: Vec<HiddenKey>, matcher: Arc<Matcher>) -> Self {
        keys.sort_by_key(|key| std::cmp::Reverse(key.value.len()));
        Self { keys, matcher }
    }

    /// Replaces all keys in a text by their placeholders. Returns `None` if the text contains no key.
    pub(super) fn replace_in(&self, text: &OsStr) -> Option<OsString> {
        let mut found: Option<OsString> = None;
        for key in &self.keys {
            if let Some(hidden) = key.replace_in(found.as_deref().unwrap_or(text)) {
                found = Some(hidden);
            }
        }
        found
    }

    /// Returns an argument or the value of a variable with all keys replaced.
    ///
    /// # Errors
    /// The key that the text contains in another form, such as base64, or of which it contains a part.
    pub(super) fn hide_in(&self, text: &OsStr) -> Result<OsString, Finding> {
        let hidden = self.replace_in(text).unwrap_or_else(|| text.into());
        // Behind the `=`, a text that is base64 as a whole is recognized.
        let searched = Zeroizing::new([b"=", hidden.as_bytes()].concat());
        self.matcher.find(&searched).map_or(Ok(hidden), Err)
    }
}

/// Generates a placeholder for a key. It keeps the public prefix, the length and the class of each character, so that
/// it passes a client's format check. The parts of `user:password` are treated as separate keys, because a token is
/// often used as the user name. `bytes` returns unpredictable bytes for a number.
fn make_placeholder(value: &[u8], bytes: &dyn Fn(u64) -> io::Result<Zeroizing<[u8; CHUNK]>>) -> io::Result<String> {
    let mut text = String::with_capacity(value.len());
    let (mut replaced, mut numbers) = (0_usize, 0..);
    for part in value.split(|byte| *byte == b':') {
        if !text.is_empty() || replaced > 0 {
            text.push(':');
        }
        let (prefix, rest) = part.split_at_checked(public_prefix_len(part)).unwrap_or((&[], part));
        text.extend(prefix.iter().copied().map(char::from));
        for (chunk, number) in rest.chunks(CHUNK).zip(&mut numbers) {
            let random = bytes(number)?;
            text.extend(chunk.iter().zip(random.iter()).map(|(byte, random)| random_like(*byte, *random)));
        }
        replaced = replaced.saturating_add(rest.iter().filter(|byte| !is_separator(**byte)).count());
    }
    if replaced < MIN_KEY_LEN {
        return Err(io::Error::other("has too few characters that can be replaced"));
    }
    Ok(text)
}

fn is_separator(byte: u8) -> bool {
    matches!(byte, b'-' | b'_' | b'.' | b'+' | b'/' | b'=')
}

fn random_like(byte: u8, random: u8) -> char {
    let one_of = |first: u8, many: u8| char::from(first.saturating_add(random.checked_rem(many).unwrap_or_default()));
    match byte {
        b'A'..=b'Z' => one_of(b'A', 26),
        b'0'..=b'9' => one_of(b'0', 10),
        _ if is_separator(byte) => char::from(byte),
        // Other bytes become letters, because placeholders consist of visible characters.
        _ => one_of(b'a', 26),
    }
}

/// Returns the length of the public prefix: a known one, or short words that end with a separator. The latter are at
/// most a third of the key.
fn public_prefix_len(key: &[u8]) -> usize {
    let max = MAX_PREFIX_LEN.min(key.len() / 3);
    let kind = KEY_PREFIXES.iter().find(|kind| key.starts_with(kind.as_bytes())).map_or(0, |kind| kind.len());
    let start = key.get(..max).unwrap_or_default();
    let separator = start.iter().rposition(|byte| matches!(byte, b'-' | b'_')).map_or(0, |at| at.saturating_add(1));
    let words = start.get(..separator).unwrap_or_default().split(|byte| matches!(byte, b'-' | b'_'));
    let short = words.into_iter().all(|word| word.len() <= 6 && word.iter().all(u8::is_ascii_alphanumeric));
    if short { separator.max(kind) } else { kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(key: &str) -> String {
        make_placeholder(key.as_bytes(), &|_| files::random()).unwrap()
    }

    /// The same user gets the same placeholder for the same name and key. Of a key that guesses might find it is random,
    /// because the command could try them out.
    #[test]
    fn placeholders_of_strong_keys_are_stable() {
        let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
        let of = |dir: usize, name: &str, value: &str| {
            let key = PlaceholderKey::read_or_create(dirs[dir].path()).unwrap();
            let flag = format!("{name}=bearer@a.example");
            let credential = PlaceholderCredential::new(&flag, &|_| Some(value.to_owned()), Some(&key)).ok().unwrap();
            credential.placeholder().to_owned()
        };
        const PASSWORD: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb3NcG5JdF1HaK";
        let strong = format!("ghp_{}:{PASSWORD}", "16C7e42F292c6912E7710c838347Ae178B4a".repeat(3));
        let usual = of(0, "KEY", &strong);
        assert_eq!(usual, of(0, "KEY", &strong));
        for other in [of(1, "KEY", &strong), of(0, "OTHER", &strong), of(0, "KEY", &strong.replace("7e", "8e"))] {
            let same = usual.chars().zip(other.chars()).filter(|(a, b)| a == b).count();
            assert!(same < usual.len() / 3, "{usual} {other}");
        }
        let (user, password) = usual.split_at(strong.len() - PASSWORD.len());
        assert!(!user.contains(&password[..4]), "{usual}");
        for guessable in ["Winter1987?", "k7Qz2mXv9LpW4sVt6eRRu8Yb", "k7Qz2mXv9LpW4sVt6eRRu8YbWinterWinterWinterWinter"]
        {
            assert_ne!(of(0, "KEY", guessable), of(0, "KEY", guessable), "{guessable}");
        }
        std::fs::write(dirs[0].path().join(KEY_FILE), "short").unwrap();
        let error = PlaceholderKey::read_or_create(dirs[0].path()).err().unwrap();
        assert!(error.to_string().ends_with("placeholder.key: is too short"), "{error}");
    }

    #[test]
    fn a_flag_can_name_each_place() {
        let flag = |how: &str| {
            let value = |_: &str| Some("k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf".to_owned());
            PlaceholderCredential::new(&format!("KEY{how}@a.example"), &value, None)
        };
        let text = |credential: &PlaceholderCredential| {
            let mut table = credential.credential.clone();
            ["value", "placeholder"].iter().for_each(|key| drop(table.remove(*key)));
            table.to_string().replace('\n', " ")
        };
        let rows = [
            ("", "auth_type = \"auto\" domains = [\"a.example\"] "),
            ("=bearer", "auth_type = \"bearer\" domains = [\"a.example\"] "),
            ("=cookie:sid", "auth_cookie_name = \"sid\" auth_type = \"cookie\" domains = [\"a.example\"] "),
            ("=path", "auth_type = \"path\" domains = [\"a.example\"] "),
            (
                "=body:json:/a/b",
                "auth_type = \"placeholder\" domains = [\"a.example\"] swap_in = [\"body:json:/a/b\"] ",
            ),
            (
                "=websocket:/auth/token",
                "auth_type = \"placeholder\" domains = [\"a.example\"] swap_in = [\"websocket:/auth/token\"] ",
            ),
            ("=body:form:key", "auth_type = \"placeholder\" domains = [\"a.example\"] swap_in = [\"body:form:key\"] "),
        ];
        for (how, want) in rows {
            assert_eq!(text(&flag(how).ok().unwrap()), want, "{how}");
        }
        for how in ["=cookie", "=path:a", "=other", "=header"] {
            assert!(flag(how).is_err(), "{how}");
        }
        let together = |one: &str, two: &str| {
            let mut first = flag(one).ok().unwrap();
            first.add(&flag(two).ok().unwrap()).ok().map(|()| text(&first))
        };
        let both = together("=body:json:/a", "=body:form:b").unwrap();
        assert!(both.ends_with("swap_in = [\"body:json:/a\", \"body:form:b\"] "), "{both}");
        assert!(together("=path", "=path").is_some());
        for (one, two) in [("=path", ""), ("", "=cookie:a"), ("=cookie:a", "=cookie:b"), ("=body:json:/a", "=header:x")]
        {
            assert!(together(one, two).is_none(), "{one} {two}");
        }
    }

    #[test]
    fn placeholders_have_the_format_of_the_key_but_not_its_secret() {
        let rows = [
            ("ghp_16C7e42F292c6912E7710c838347Ae178B4a", "ghp_"),
            ("sk-ant-api03-R2D2c3po_AAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAAA", "sk-ant-api03-"),
            ("sk-proj-abcdefghijklmnopqrstuvwxyz0123456789", "sk-proj-"),
            ("xoxb-123456789012-abcdefghijkl", "xoxb-"),
            ("AKIAIOSFODNN7EXAMPLE", "AKIA"),
            ("0123456789abcdef0123456789abcdef", ""),
            ("ghp_16C7e42F292c6912E7710c838347Ae178B4a:x-oauth-basic", "ghp_"),
            ("sk_live_4eC39HqLyjWDarjtT1zdp7dc:", "sk_live_"),
            ("correcthorse-batterystaple-x", ""),
        ];
        for (key, prefix) in rows {
            let made = made(key);
            assert_eq!(made.len(), key.len(), "{key}");
            assert!(made.starts_with(prefix), "{key}: {made}");
            let kind = |c: char| (c.is_ascii_lowercase(), c.is_ascii_uppercase(), c.is_ascii_digit());
            assert!(made.chars().zip(key.chars()).all(|(a, b)| kind(a) == kind(b)), "{key}: {made}");
            let same =
                made.chars().zip(key.chars()).skip(prefix.len()).filter(|(a, b)| a == b && a.is_ascii_alphanumeric());
            assert!(same.count() < key.len() / 2, "{key}: {made}");
        }
    }

    #[test]
    fn unusual_keys_get_a_placeholder_and_short_keys_are_rejected() {
        let cyrillic = made("\u{43f}\u{430}\u{440}\u{43e}\u{43b}\u{44c}-1234");
        assert!(cyrillic.len() == 17 && cyrillic.is_ascii() && !cyrillic.contains("xxxxx"), "{cyrillic}");
        let parts = made("supersecretlongtokenvalue0123:1");
        assert!(!parts.contains("secretlong") && parts.ends_with(|c: char| c.is_ascii_digit()), "{parts}");
        let odd = made("\u{e9}\"-0123456789abcdef");
        assert!(odd.is_ascii() && odd.len() == 20 && !odd.contains('"'), "{odd}");
        let random = |_| files::random();
        assert!(make_placeholder(b"a:b", &random).is_err() && make_placeholder(b"--------", &random).is_err());
        let tiny = PlaceholderCredential::new("KEY=bearer@a.example", &|_| Some("tiny1".to_owned()), None);
        let refused = tiny.err().unwrap();
        assert!(refused.problem.contains("too short to protect") && !refused.problem.contains("tiny1"), "{refused}");
    }

    #[test]
    fn overlapping_keys_are_replaced_by_their_own_placeholders() {
        let env = |name: &str| Some(if name == "PASS" { "hunter2hunter2" } else { "user:hunter2hunter2" }.to_owned());
        let keys: Vec<_> = ["PASS=bearer@a.example", "CRED=basic@b.example"]
            .map(|flag| PlaceholderCredential::new(flag, &env, None).ok().unwrap().hidden)
            .into();
        let placeholders: Vec<String> = keys.iter().map(|key: &HiddenKey| key.placeholder.clone()).collect();
        let keys = HiddenKeys::of(keys, Arc::default());
        let hide = |text: &str| keys.replace_in(OsStr::new(text)).unwrap().into_string().unwrap();
        assert_eq!(hide("user:hunter2hunter2"), placeholders[1]);
        assert_eq!(hide("hunter2hunter2"), placeholders[0]);
    }

    #[test]
    fn credential_flags_are_parsed() {
        let env = |name: &str| (name == "KEY").then(|| "ghp_0123456789abcdef".to_owned());
        let rows = [
            ("KEY=bearer@api.example.com", Some("bearer")),
            ("KEY=basic@api.example.com:8443", Some("basic")),
            ("KEY=header:X-Api-Key@api.example.com", Some("header")),
            ("KEY=query:key@api.example.com", Some("query_param")),
            ("KEY@api.example.com", Some("auto")),
            ("KEY=auto@api.example.com", Some("auto")),
            ("KEY=cookie@api.example.com", None),
            ("KEY=@api.example.com", None),
            ("KEY@", None),
            ("@api.example.com", None),
            ("KEY=bearer", None),
            ("KEY", None),
            ("KEY=bearer@*.example.com", None),
            ("KEY=bearer@http://api.example.com", None),
            ("UNSET=bearer@api.example.com", None),
        ];
        for (flag, auth_type) in rows {
            let credential = PlaceholderCredential::new(flag, &env, None).ok();
            assert_eq!(
                credential.as_ref().and_then(|credential| credential.credential["auth_type"].as_str()),
                auth_type,
                "{flag}"
            );
        }
    }

    #[test]
    fn flags_of_one_key_are_merged() {
        let merged = |flags: &[&str]| {
            let of = |how: &&str| {
                let flag = format!("KEY{how}");
                PlaceholderCredential::new(&flag, &|_| Some("ghp_0123456789:abcdef0123456789".to_owned()), None)
            };
            let mut flags = flags.iter().map(of);
            let mut first = flags.next().unwrap().ok().unwrap();
            for flag in flags {
                first.add(&flag.ok().unwrap()).ok()?;
            }
            let mut table = first.credential;
            table.remove("placeholder");
            table.remove("value");
            Some(table.to_string().replace(['\n', '"'], " ").split_whitespace().collect::<Vec<_>>().join(" "))
        };
        let rows: [(&[&str], Option<&str>); 9] = [
            (&["@a.test", "@b.test", "@a.test"], Some("auth_type = auto domains = [ a.test , b.test ]")),
            (&["=bearer@a.test", "=bearer@b.test"], Some("auth_type = bearer domains = [ a.test , b.test ]")),
            (
                &["=bearer@a.test", "=header:x-key@a.test", "=query:key@b.test"],
                Some("auth_type = bearer domains = [ a.test , b.test ] swap_in = [ header:x-key , query:key ]"),
            ),
            (
                &["=header:x-key@a.test", "=basic@a.test"],
                Some(
                    "auth_header_name = x-key auth_type = header domains = [ a.test ] swap_in = [ header:authorization ]",
                ),
            ),
            (
                &["=header:x-key@a.test", "=header:x-other@a.test"],
                Some("auth_header_name = x-key auth_type = header domains = [ a.test ] swap_in = [ header:x-other ]"),
            ),
            (&["=query:key@a.test", "@a.test"], Some("auth_type = auto domains = [ a.test ]")),
            (&["@a.test", "=query:key@a.test"], Some("auth_type = auto domains = [ a.test ]")),
            (&["=basic@a.test", "=bearer@a.test"], None),
            (&["=bearer@a.test", "=basic@b.test"], None),
        ];
        for (flags, want) in rows {
            assert_eq!(merged(flags).as_deref(), want, "{flags:?}");
        }
    }

    #[test]
    fn every_occurrence_of_a_key_is_replaced() {
        let key = "ghp_0123456789abcdef";
        let flag = PlaceholderCredential::new("KEY=bearer@a.example", &|_| Some(key.to_owned()), None).ok().unwrap();
        let placeholder = flag.placeholder().to_owned();
        let keys = HiddenKeys::new(None, vec![flag]);
        let text = format!("Bearer {key}, {key}");
        let hidden = keys.replace_in(OsStr::new(&text)).unwrap().into_string().unwrap();
        assert_eq!(hidden, format!("Bearer {placeholder}, {placeholder}"));
        assert!(keys.replace_in(OsStr::new("nothing")).is_none());
    }
}

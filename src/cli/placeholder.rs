//! `exeat run --credential`: gives the child a placeholder in place of the key.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use toml::Table;
use zeroize::Zeroizing;

use crate::files;
use crate::model::name::is_plain;
use crate::policy::compile::Problem;
use crate::policy::credential::Credential;

/// Minimum length of a key. A shorter placeholder would occur in texts by accident.
const MIN_KEY: usize = 8;
/// Maximum length of the public beginning of a key, which shows its kind.
const MAX_PREFIX: usize = 16;
/// Beginnings that show the kind without a separator.
const KINDS: [&str; 4] = ["AIza", "AKIA", "ASIA", "eyJ"];

/// Returns true for a short run of only letters or only digits.
fn is_word(value: &[u8]) -> bool {
    let alike = value.iter().all(u8::is_ascii_alphabetic) || value.iter().all(u8::is_ascii_digit);
    alike && value.len() <= MAX_PREFIX
}

/// A key that the child may use but not see.
pub(super) struct PlaceholderCredential {
    pub(super) name: String,
    /// The credential's configuration.
    pub(super) credential: Table,
    pub(super) hidden: Hidden,
}

/// A value that the child does not see, and its placeholder.
pub(super) struct Hidden {
    value: Zeroizing<Vec<u8>>,
    placeholder: String,
}

impl Hidden {
    /// Returns the value of a credential that the configuration gives to the task.
    pub(super) fn of(credential: &Credential) -> Option<Self> {
        let value = credential.value()?.expose();
        let usual = || format!("${{secrets.{}}}", credential.name());
        let placeholder = credential.placeholder().map_or_else(usual, str::to_owned);
        Some(Self { value: Zeroizing::new(value.to_vec()), placeholder })
    }

    /// Returns the text with placeholders in place of the value, or `None` if it does not contain it. A word or a
    /// number must be the whole text.
    fn hidden_in(&self, text: &OsStr) -> Option<OsString> {
        let mut rest = text.as_bytes();
        if rest != self.value.as_slice() && is_word(&self.value) {
            // Within another text, it probably has another meaning.
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
    /// Parses `NAME=HOW@HOST` and reads the value from the variable NAME.
    pub(super) fn new(flag: &str, env: &dyn Fn(&str) -> Option<String>) -> Result<Self, Problem> {
        // The text after the name is not repeated, because it may be the key itself.
        let named = flag.split_once('=').map_or("…", |(name, _)| name);
        let wrong = |problem: &str| Problem {
            path: "--credential".to_owned(),
            problem: format!("{named}=… {problem}"),
            suggestion: "NAME=HOW@HOST, where HOW is bearer, basic, header:FIELD or query:PARAMETER".to_owned(),
        };
        let (name, rest) = flag.split_once('=').ok_or_else(|| wrong("has no = behind the name"))?;
        let (how, host) = rest.rsplit_once('@').ok_or_else(|| wrong("names no host"))?;
        if !is_plain(name) || host.is_empty() {
            return Err(wrong("names no variable or no host"));
        }
        if host.contains("://") || host.contains('*') {
            return Err(wrong("has a scheme or a wildcard: write each host out, such as api.example.com"));
        }
        let unfit = |why: String| Problem {
            path: "--credential".to_owned(),
            problem: format!("the variable {name} {why}"),
            suggestion: format!("{name} set to the key in the environment of exeat"),
        };
        let value = env(name).ok_or_else(|| unfit("is not set".to_owned()))?;
        let value = Zeroizing::new(value.into_bytes());
        if value.len() < MIN_KEY {
            // Redaction would not cover a shorter key, so an origin could return it to the command.
            return Err(unfit(format!("holds no key that could be protected: it is shorter than {MIN_KEY} bytes")));
        }
        let placeholder = placeholder(&value).map_err(|error| wrong(&error.to_string()))?;
        let (auth_type, own) = match how.split_once(':') {
            None if how == "bearer" || how == "basic" => (how, None),
            Some(("header", field)) => ("header", Some(("auth_header_name", field))),
            Some(("query", parameter)) => ("query_param", Some(("auth_query_name", parameter))),
            _ => return Err(wrong("says no known way to send it")),
        };
        let mut credential = Table::new();
        credential.insert("auth_type".to_owned(), auth_type.into());
        if let Some((key, field)) = own {
            credential.insert(key.to_owned(), field.into());
        }
        credential.insert("value".to_owned(), format!("env:{name}").into());
        credential.insert("domains".to_owned(), vec![host.to_ascii_lowercase()].into());
        credential.insert("placeholder".to_owned(), placeholder.clone().into());
        Ok(Self { name: name.to_owned(), credential, hidden: Hidden { value, placeholder } })
    }

    /// Returns its hosts in the syntax of `--allow`.
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

    /// Adds the host of another flag for the same key, which must be sent in the same way.
    pub(super) fn also(&mut self, other: &Self) -> Result<(), Problem> {
        let way = |lent: &Self| {
            ["auth_type", "auth_header_name", "auth_query_name"].map(|key| lent.credential.get(key).cloned())
        };
        let hosts = other.credential.get("domains").and_then(toml::Value::as_array).cloned().unwrap_or_default();
        let same_way = way(self) == way(other);
        match self.credential.get_mut("domains") {
            Some(toml::Value::Array(domains)) if same_way => domains.extend(hosts),
            _ => {
                let problem = format!("{} has two ways of being sent", self.name);
                let suggestion = "one way for all of its hosts".to_owned();
                return Err(Problem { path: "--credential".to_owned(), problem, suggestion });
            }
        }
        Ok(())
    }
}

/// Returns a text with placeholders in place of all keys, or `None` if it contains none.
pub(super) fn hidden(keys: &[Hidden], text: &OsStr) -> Option<OsString> {
    let mut found: Option<OsString> = None;
    // A key may be a part of another.
    let mut longest_first: Vec<&Hidden> = keys.iter().collect();
    longest_first.sort_by_key(|key| std::cmp::Reverse(key.value.len()));
    for key in longest_first {
        if let Some(hidden) = key.hidden_in(found.as_deref().unwrap_or(text)) {
            found = Some(hidden);
        }
    }
    found
}

/// Returns a text of the same format: the public beginning, the length and the class of each character are kept, so
/// that a client's own check accepts it. The parts of `user:password` are each treated as a key, because tokens are
/// often used as user names.
fn placeholder(value: &[u8]) -> io::Result<String> {
    let mut text = String::with_capacity(value.len());
    let mut replaced = 0_usize;
    for part in value.split(|byte| *byte == b':') {
        if !text.is_empty() || replaced > 0 {
            text.push(':');
        }
        let (prefix, rest) = part.split_at_checked(prefix(part)).unwrap_or((&[], part));
        text.extend(prefix.iter().copied().map(char::from));
        for chunk in rest.chunks(64) {
            let random = files::random::<64>()?;
            text.extend(chunk.iter().zip(random.iter()).map(|(byte, random)| alike(*byte, *random)));
        }
        replaced = replaced.saturating_add(rest.iter().filter(|byte| !is_kept(**byte)).count());
    }
    if replaced < MIN_KEY {
        return Err(io::Error::other("holds too little that could be replaced"));
    }
    Ok(text)
}

fn is_kept(byte: u8) -> bool {
    matches!(byte, b'-' | b'_' | b'.' | b'+' | b'/' | b'=')
}

fn alike(byte: u8, random: u8) -> char {
    let one_of = |first: u8, many: u8| char::from(first.saturating_add(random.checked_rem(many).unwrap_or_default()));
    match byte {
        b'A'..=b'Z' => one_of(b'A', 26),
        b'0'..=b'9' => one_of(b'0', 10),
        _ if is_kept(byte) => char::from(byte),
        // Other bytes become letters, because placeholders consist of visible characters.
        _ => one_of(b'a', 26),
    }
}

/// Returns the length of the public beginning: short words before a separator, at most a third of the key.
fn prefix(key: &[u8]) -> usize {
    let most = MAX_PREFIX.min(key.len() / 3);
    let kind = KINDS.iter().find(|kind| key.starts_with(kind.as_bytes())).map_or(0, |kind| kind.len());
    let start = key.get(..most).unwrap_or_default();
    let separator = start.iter().rposition(|byte| matches!(byte, b'-' | b'_')).map_or(0, |at| at.saturating_add(1));
    let words = start.get(..separator).unwrap_or_default().split(|byte| matches!(byte, b'-' | b'_'));
    let short = words.into_iter().all(|word| word.len() <= 6 && word.iter().all(u8::is_ascii_alphanumeric));
    if short { separator.max(kind) } else { kind }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_placeholder_has_the_keys_format_and_none_of_its_secret() {
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
            let made = placeholder(key.as_bytes()).unwrap();
            assert_eq!(made.len(), key.len(), "{key}");
            assert!(made.starts_with(prefix), "{key}: {made}");
            let kind = |c: char| (c.is_ascii_lowercase(), c.is_ascii_uppercase(), c.is_ascii_digit());
            assert!(made.chars().zip(key.chars()).all(|(a, b)| kind(a) == kind(b)), "{key}: {made}");
            let same =
                made.chars().zip(key.chars()).skip(prefix.len()).filter(|(a, b)| a == b && a.is_ascii_alphanumeric());
            assert!(same.count() < key.len() / 2, "{key}: {made}");
            assert_ne!(made, placeholder(key.as_bytes()).unwrap(), "another each time");
        }
    }

    #[test]
    fn any_key_has_a_placeholder_unless_it_is_too_short() {
        let cyrillic = placeholder("\u{43f}\u{430}\u{440}\u{43e}\u{43b}\u{44c}-1234".as_bytes()).unwrap();
        assert!(cyrillic.len() == 17 && cyrillic.is_ascii() && !cyrillic.contains("xxxxx"), "{cyrillic}");
        let parts = placeholder(b"supersecretlongtokenvalue0123:1").unwrap();
        assert!(!parts.contains("secretlong") && parts.ends_with(|c: char| c.is_ascii_digit()), "{parts}");
        let odd = placeholder("\u{e9}\"-0123456789abcdef".as_bytes()).unwrap();
        assert!(odd.is_ascii() && odd.len() == 20 && !odd.contains('"'), "{odd}");
        assert!(placeholder(b"a:b").is_err() && placeholder(b"--------").is_err());
        let refused = PlaceholderCredential::new("KEY=bearer@a.example", &|_| Some("tiny1".to_owned())).err().unwrap();
        assert!(refused.problem.contains("could be protected") && !refused.problem.contains("tiny1"), "{refused}");
    }

    #[test]
    fn nested_keys_are_hidden_by_their_own_placeholders() {
        let env = |name: &str| Some(if name == "PASS" { "hunter2hunter2" } else { "user:hunter2hunter2" }.to_owned());
        let lent: Vec<_> = ["PASS=bearer@a.example", "CRED=basic@b.example"]
            .map(|flag| PlaceholderCredential::new(flag, &env).ok().unwrap().hidden)
            .into();
        let hide = |text: &str| hidden(&lent, OsStr::new(text)).unwrap().into_string().unwrap();
        assert_eq!(hide("user:hunter2hunter2"), lent[1].placeholder);
        assert_eq!(hide("hunter2hunter2"), lent[0].placeholder);
    }

    #[test]
    fn a_flag_names_the_key_its_hosts_and_its_type() {
        let env = |name: &str| (name == "KEY").then(|| "ghp_0123456789abcdef".to_owned());
        let rows = [
            ("KEY=bearer@api.example.com", Some("bearer")),
            ("KEY=basic@api.example.com:8443", Some("basic")),
            ("KEY=header:X-Api-Key@api.example.com", Some("header")),
            ("KEY=query:key@api.example.com", Some("query_param")),
            ("KEY=cookie@api.example.com", None),
            ("KEY=bearer", None),
            ("KEY", None),
            ("KEY=bearer@*.example.com", None),
            ("KEY=bearer@http://api.example.com", None),
            ("UNSET=bearer@api.example.com", None),
        ];
        for (flag, auth_type) in rows {
            let lent = PlaceholderCredential::new(flag, &env).ok();
            assert_eq!(lent.as_ref().and_then(|lent| lent.credential["auth_type"].as_str()), auth_type, "{flag}");
        }
    }

    #[test]
    fn a_key_is_hidden_in_every_place() {
        let key = "ghp_0123456789abcdef";
        let lent = [PlaceholderCredential::new("KEY=bearer@a.example", &|_| Some(key.to_owned())).ok().unwrap().hidden];
        let text = format!("Bearer {key}, {key}");
        let hidden = hidden(&lent, OsStr::new(&text)).unwrap().into_string().unwrap();
        assert_eq!(hidden, format!("Bearer {0}, {0}", lent[0].placeholder));
        assert!(super::hidden(&lent, OsStr::new("nothing")).is_none());
    }
}

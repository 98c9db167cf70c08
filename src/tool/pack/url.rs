//! The URL of a template. A parameter's position decides what it may contain. It cannot change the host unless it is in
//! the host.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::Value;

use super::parameter::Reference;
use super::place::Place;
use super::problem::truncate;
use super::template::{Part, Scope, Secrets, Values};
use crate::model::host::Host;

/// All characters that are not unreserved (RFC 3986 §2.3).
const STRICT: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');
/// For complete pairs of a query.
const PAIRS: &AsciiSet = &STRICT.remove(b'=').remove(b'&');
/// The characters of a path (RFC 3986 §3.3), including slashes.
const PATH: &AsciiSet = &STRICT
    .remove(b'!')
    .remove(b'$')
    .remove(b'&')
    .remove(b'\'')
    .remove(b'(')
    .remove(b')')
    .remove(b'*')
    .remove(b'+')
    .remove(b',')
    .remove(b';')
    .remove(b'=')
    .remove(b':')
    .remove(b'@')
    .remove(b'/');
const ENDS_AUTHORITY: [char; 3] = ['/', '?', '#'];
const NO_SECRET: &str = "is in a place where the proxy swaps none; in a URL it may be a part of the path, or the value of a query parameter";
const NO_HOST: &str = "the url has no valid host";

/// A URL template.
#[derive(Debug)]
pub(super) enum Url {
    Built(Built),
    Whole(Reference),
}

#[derive(Debug)]
pub(super) struct Built {
    scheme: &'static str,
    authority: Vec<Part>,
    /// A placeholder directly follows the host. Its value may start the path, but must not extend the host.
    glued: bool,
    rest: Vec<Part>,
}

/// The position of a part in a URL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Position {
    Behind,
    Fragment,
    Path,
    Query,
}

impl Url {
    pub(super) fn read(text: &str, place: &Place, scope: &Scope<'_>) -> Option<Self> {
        let parts = scope.parts(text, place, Secrets::Here);
        if let [Part::Value(reference)] = parts.as_slice() {
            return Some(Self::Whole(reference.clone()));
        }
        let built = split(parts).and_then(|built| built.check().map(|()| built));
        built.map(Self::Built).map_err(|why| scope.findings.problem(place, why)).ok()
    }

    /// Returns true if the template itself specifies plain HTTP.
    pub(super) fn is_plain_http(&self) -> bool {
        matches!(self, Self::Built(Built { scheme: "http://", .. }))
    }

    pub(super) fn fill(&self, values: &Values<'_>) -> Result<String, String> {
        match self {
            Self::Whole(reference) => match values.find(reference) {
                Some(Value::String(_)) => values.part(&Part::Value(reference.clone())),
                Some(_) => Err("the url must be text".to_owned()),
                None => Err("the url is missing".to_owned()),
            },
            Self::Built(built) => built.fill(values),
        }
    }
}

fn split(parts: Vec<Part>) -> Result<Built, String> {
    let mut parts = parts.into_iter();
    let Some(Part::Text(first)) = parts.next() else { return Err(scheme_needed()) };
    let (scheme, first) = split_scheme(&first)?;
    let (mut authority, mut rest) = (Vec::new(), Vec::new());
    for part in std::iter::once(Part::Text(first.to_owned())).chain(parts) {
        match part {
            part if !rest.is_empty() => rest.push(part),
            Part::Text(text) => {
                let (before, behind) = text.split_at(text.find(ENDS_AUTHORITY).unwrap_or(text.len()));
                let pieces = [(&mut authority, before), (&mut rest, behind)];
                for (to, piece) in pieces.into_iter().filter(|(_, piece)| !piece.is_empty()) {
                    to.push(Part::Text(piece.to_owned()));
                }
            }
            placeholder => authority.push(placeholder),
        }
    }
    let glued = is_glued(&authority);
    if glued {
        let mut placeholders = authority.split_off(1);
        placeholders.append(&mut rest);
        rest = placeholders;
    }
    Ok(Built { scheme, authority, glued, rest })
}

fn split_scheme(text: &str) -> Result<(&'static str, &str), String> {
    for scheme in ["https://", "http://"] {
        if let Some((written, rest)) = text.split_at_checked(scheme.len())
            && written.eq_ignore_ascii_case(scheme)
        {
            return Ok((scheme, rest));
        }
    }
    Err(match text.split_once("://") {
        Some((scheme, _)) => format!("{} is not supported; use http or https", super::mapping::quoted(scheme)),
        None => scheme_needed(),
    })
}

fn scheme_needed() -> String {
    "must begin with https:// or http://, or be one placeholder as a whole".to_owned()
}

/// Whether only placeholders stand between a complete literal host and the end of the authority.
fn is_glued(authority: &[Part]) -> bool {
    match authority {
        [Part::Text(host), placeholders @ ..] => {
            !placeholders.is_empty()
                && !host.ends_with(['.', '-', ':', '[', '@', '%'])
                && placeholders.iter().all(|part| !matches!(part, Part::Text(_)))
        }
        _ => false,
    }
}

impl Built {
    /// Checks the parts that do not depend on arguments.
    fn check(&self) -> Result<(), String> {
        let literal = |part: &Part| if let Part::Text(text) = part { text.clone() } else { "x".to_owned() };
        self.authority.iter().try_for_each(|part| match part {
            Part::Text(text) => check_literal_host(text),
            Part::Secret(name) => Err(format!("${{secrets.{}}} {NO_SECRET}", truncate(name, 80))),
            Part::Value(_) => Ok(()),
        })?;
        if let [] | [Part::Text(_)] = self.authority.as_slice() {
            check_authority(&self.authority.iter().map(literal).collect::<String>())?;
        }
        let rest: String = self.rest.iter().map(literal).collect();
        check_characters(&rest)?;
        if has_dot_segment(rest.split(['?', '#']).next().unwrap_or_default()) {
            return Err("a dot segment in the path; write the path without".to_owned());
        }
        self.check_secrets()
    }

    fn check_secrets(&self) -> Result<(), String> {
        let (mut position, mut in_value) = (Position::Path, false);
        for part in &self.rest {
            match part {
                Part::Text(text) => {
                    for char in text.chars() {
                        position = position.after(char);
                        in_value = (in_value || char == '=') && char != '&' && position == Position::Query;
                    }
                }
                Part::Secret(_) if in_value || (position == Position::Path && !self.glued) => {}
                Part::Secret(name) => return Err(format!("${{secrets.{}}} {NO_SECRET}", truncate(name, 80))),
                Part::Value(_) => {}
            }
        }
        Ok(())
    }

    fn fill(&self, values: &Values<'_>) -> Result<String, String> {
        let authority = self.fill_authority(values)?;
        let mut out = Filling {
            text: String::new(),
            position: if self.glued { Position::Behind } else { Position::Path },
            pairs: false,
        };
        for part in &self.rest {
            let text = values.part(part)?;
            match part {
                Part::Text(_) => out.literal(&text),
                // The braces are not in the alphabet of a path.
                Part::Secret(_) if out.position == Position::Path => {
                    out.text.push_str(&utf8_percent_encode(&text, PATH).to_string());
                }
                Part::Secret(_) => out.text.push_str(&text),
                Part::Value(reference) => out.value(&text).map_err(|why| format!("{}: {why}", named(reference)))?,
            }
        }
        if has_dot_segment(out.text.split(['?', '#']).next().unwrap_or_default()) {
            return Err("the arguments make a dot segment in the path of the url".to_owned());
        }
        Ok(format!("{}{authority}{}", self.scheme, out.text))
    }

    fn fill_authority(&self, values: &Values<'_>) -> Result<String, String> {
        let mut authority = String::new();
        for (at, part) in self.authority.iter().enumerate() {
            let text = values.part(part)?;
            if let Part::Value(reference) = part {
                let next = match self.authority.get(at + 1) {
                    Some(Part::Text(text)) => text.chars().next(),
                    Some(_) => Some('x'),
                    None => None,
                };
                if !fits_host(&text, &authority, next) {
                    return Err(format!("{}: not a part of a host", named(reference)));
                }
            }
            authority.push_str(&text);
        }
        if !matches!(self.authority.as_slice(), [Part::Text(_)]) {
            check_authority(&authority).map_err(|_| NO_HOST.to_owned())?;
        }
        Ok(authority)
    }
}

fn named(reference: &Reference) -> String {
    let path = reference.0.join(".");
    truncate(if path.is_empty() { "parameters" } else { &path }, 80)
}

/// Whether a value is valid in the authority: as a port after a colon, as a host with or without a port if nothing else
/// of the host follows, or as a part of a name.
fn fits_host(value: &str, before: &str, next: Option<char>) -> bool {
    let letters = |text: &str| text.bytes().all(|b| b.is_ascii_alphanumeric() || b"._-".contains(&b));
    if before.rsplit(']').next().is_some_and(|behind| behind.contains(':')) && !before.starts_with('[') {
        return value.bytes().all(|b| b.is_ascii_digit());
    }
    let bracketed = value
        .strip_prefix('[')
        .and_then(|rest| rest.split_once(']'))
        .filter(|(ip, _)| before.is_empty() && ip.bytes().all(|b| b.is_ascii_hexdigit() || b":.".contains(&b)));
    match (bracketed, next) {
        (Some((_, port)), None) => port.bytes().all(|b| b.is_ascii_digit() || b == b':'),
        (Some((_, port)), Some(':')) => port.is_empty(),
        (Some(_), Some(_)) => false,
        (None, None) => letters(&value.replacen(':', "", 1)),
        (None, Some(_)) => letters(value),
    }
}

fn check_literal_host(text: &str) -> Result<(), String> {
    if text.contains('@') {
        return Err("a URL must not contain a user or password; put credentials into headers".to_owned());
    }
    match text.chars().find(|char| !char.is_ascii_alphanumeric() && !"._:-[]".contains(*char)) {
        Some(char) => Err(format!("{char:?} is not allowed in a host; write other names in their xn-- form")),
        None => Ok(()),
    }
}

fn check_authority(authority: &str) -> Result<(), String> {
    let host_end = authority.rfind(']').map_or_else(|| authority.find(':'), |at| Some(at + 1));
    let (host, port) = authority.split_at(host_end.unwrap_or(authority.len()));
    let sound = |digits: &str| digits.bytes().all(|b| b.is_ascii_digit()) && digits.parse::<u16>().is_ok_and(|n| n > 0);
    if !port.is_empty() && !port.strip_prefix(':').is_some_and(sound) {
        return Err("the URL's port is invalid".to_owned());
    }
    if host.is_empty() {
        return Err("the url has no host".to_owned());
    }
    Host::parse(host).map(|_| ()).map_err(|why| format!("the URL's host is invalid: {why}"))
}

/// Checks that literal text is valid in a URL (RFC 3986 §2), because it is sent unchanged.
fn check_characters(text: &str) -> Result<(), String> {
    let fits = |char: char| char.is_ascii_alphanumeric() || "-._~:/?#[]@!$&'()*+,;=%".contains(char);
    if let Some(char) = text.chars().find(|char| !fits(*char)) {
        return Err(format!("{char:?} is not allowed in a URL; percent-encode it"));
    }
    let escaped = |rest: &str| rest.bytes().take(2).filter(u8::is_ascii_hexdigit).count() == 2;
    if text.split('%').skip(1).all(escaped) {
        Ok(())
    } else {
        Err("a % without two hex digits behind it; write %25".to_owned())
    }
}

/// Whether a path has a dot segment, also as `%2e` or with parameters (`..;x`).
fn has_dot_segment(path: &str) -> bool {
    path.split('/').any(|segment| {
        let name = segment.split(';').next().unwrap_or_default();
        matches!(name.replace("%2e", ".").replace("%2E", ".").as_str(), "." | "..")
    })
}

impl Position {
    fn after(self, char: char) -> Self {
        match (self, char) {
            (Self::Fragment, _) | (_, '#') => Self::Fragment,
            (Self::Query, _) | (_, '?') => Self::Query,
            _ => Self::Path,
        }
    }
}

/// The text after the authority, as built so far.
struct Filling {
    text: String,
    position: Position,
    /// The literal text ends where a pair of the query begins.
    pairs: bool,
}

impl Filling {
    fn literal(&mut self, text: &str) {
        self.position = text.chars().fold(self.position, Position::after);
        self.pairs = self.position == Position::Query && text.ends_with(['?', '&']);
        self.text.push_str(text);
    }

    fn value(&mut self, value: &str) -> Result<(), &'static str> {
        let pairs = std::mem::take(&mut self.pairs);
        let (set, value) = match self.position {
            Position::Behind => return self.behind(value),
            Position::Path => (PATH, value),
            Position::Query if pairs => (PAIRS, value),
            Position::Fragment | Position::Query => (STRICT, value),
        };
        self.text.extend(utf8_percent_encode(value, set));
        Ok(())
    }

    fn behind(&mut self, value: &str) -> Result<(), &'static str> {
        let Some(first) = value.chars().next() else { return Ok(()) };
        if !ENDS_AUTHORITY.contains(&first) {
            return Err("follows the URL's host directly, so it must begin with /, ? or #");
        }
        let (first, rest) = value.split_at(1);
        self.literal(first);
        self.value(rest)
    }
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use proptest::prelude::*;
    use serde_json::json;

    use super::*;
    use crate::tool::pack::place::Findings;
    use crate::tool::pack::yaml::Node;

    fn read(text: &str) -> Result<Url, String> {
        let schema = json!({"properties": {"a": {}, "b": {}}});
        let findings = Findings::default();
        let scope = Scope { schema: &schema, findings: &findings, secrets: RefCell::default() };
        let url = Url::read(text, &Place::default().key("url"), &scope);
        url.ok_or_else(|| findings.into_problems(&Node::Null).remove(0).message)
    }

    fn fill(text: &str, arguments: &Value) -> Result<String, String> {
        read(text).unwrap_or_else(|why| panic!("{text}: {why}")).fill(&Values::new(arguments, "NONCE"))
    }

    #[test]
    fn values_are_escaped_for_their_place() {
        let url = "https://api.example.com";
        let rows = [
            ("/items/${a}", "A-1", "/items/A-1"),
            ("/items/${a}", "a b/ü?x#y%2f", "/items/a%20b/%C3%BC%3Fx%23y%252f"),
            ("/items/${a}", "!$&'()*+,;=:@\\[]{}\"", "/items/!$&'()*+,;=:@%5C%5B%5D%7B%7D%22"),
            ("/items/${a}", "", "/items/"),
            ("/items?q=${a}", "a b&c=d+e/ü", "/items?q=a%20b%26c%3Dd%2Be%2F%C3%BC"),
            ("/items?${a}", "q=a b&r=%", "/items?q=a%20b&r=%25"),
            ("/items?x=1&${a}", "q=1&r=2#", "/items?x=1&q=1&r=2%23"),
            ("/items?x=1&y${a}", "q=1", "/items?x=1&yq%3D1"),
            ("/items#${a}", "a b?&", "/items#a%20b%3F%26"),
            ("/items?q=1#f?${a}", "x=1", "/items?q=1#f?x%3D1"),
            ("?q=${a}", "/x", "?q=%2Fx"),
            ("${a}", "/a b?c", "/a%20b%3Fc"),
            ("${a}", "?q=a&b=c d", "?q=a&b=c%20d"),
            ("${a}", "#f", "#f"),
            ("${a}", "", ""),
            ("${a}/x", "", "/x"),
            ("${a}?x=1", "/p", "/p?x=1"),
            (":8443${a}", "/p", ":8443/p"),
            ("/x?key=${secrets.KEY}&q=${a}", "1", "/x?key=${NONCE.KEY}&q=1"),
            ("/.${a}", "well-known", "/.well-known"),
            ("/%7Ex!*'();:@&=+$,[]/${a}", "y", "/%7Ex!*'();:@&=+$,[]/y"),
        ];
        for (template, value, want) in rows {
            let filled = fill(&format!("{url}{template}"), &json!({"a": value}));
            assert_eq!(filled, Ok(format!("{url}{want}")), "{template} with {value}");
        }
    }

    #[test]
    fn a_value_cannot_move_the_host_or_climb_the_path() {
        let behind = "a: follows the URL's host directly, so it must begin with /, ? or #";
        let dots = "the arguments make a dot segment in the path of the url";
        let part = "a: not a part of a host";
        let rows = [
            ("https://api.example.com${a}", "@evil.test/", behind),
            ("https://api.example.com${a}", ".evil.test", behind),
            ("https://api.example.com${a}", ":8443/", behind),
            ("https://api.example.com${a}", "\\@evil.test/", behind),
            ("https://api.example.com${b}${a}", "x", behind),
            ("https://api.example.com${a}/x", "y", behind),
            ("https://api.example.com/${a}/x", "..", dots),
            ("https://api.example.com/${a}", "a/../../b", dots),
            ("https://api.example.com/${a}", ".", dots),
            ("https://api.example.com/${a}", "..;x=1/y", dots),
            ("https://api.example.com/.${a}", ".", dots),
            ("https://api.example.com/%2E${a}/", ".", dots),
            ("https://api.example.com${a}", "/..", dots),
            ("https://${a}/x", "evil.test/x?", part),
            ("https://${a}/x", "user@evil.test", part),
            ("https://${a}/x", "evil.test#", part),
            ("https://${a}/x", "evil.test\\", part),
            ("https://${a}/x", "evil.test:1:2", part),
            ("https://${a}/x", "münchen.example", part),
            ("https://${a}.example.com/x", "evil.test:443", part),
            ("https://${a}.example.com/x", "[::1]", part),
            ("https://${a}:8443/x", "evil.test:1", part),
            ("https://api.example.com:${a}/x", "80.evil.test", part),
            ("https://${a}/x", "", NO_HOST),
            ("https://${a}.example.com/x", "", NO_HOST),
            ("https://${a}/x", "host:99999", NO_HOST),
            ("https://api.${a}/x", "..", NO_HOST),
        ];
        for (template, value, want) in rows {
            assert_eq!(fill(template, &json!({"a": value})), Err(want.to_owned()), "{template} with {value}");
        }
    }

    #[test]
    fn the_template_may_put_a_parameter_into_the_host() {
        let rows = [
            ("${a}", "anything at all", "anything at all"),
            ("https://${a}/x", "api.example.com", "https://api.example.com/x"),
            ("https://${a}/x", "api.example.com:8443", "https://api.example.com:8443/x"),
            ("https://${a}/x", "[2001:db8::1]:8443", "https://[2001:db8::1]:8443/x"),
            ("https://${a}:8443/x", "[2001:db8::1]", "https://[2001:db8::1]:8443/x"),
            ("https://${a}.example.com", "eu", "https://eu.example.com"),
            ("https://api.${a}/x", "example.com", "https://api.example.com/x"),
            ("HTTP://api.example.com:${a}/x", "8080", "http://api.example.com:8080/x"),
        ];
        for (template, value, want) in rows {
            assert_eq!(fill(template, &json!({"a": value})), Ok(want.to_owned()), "{template} with {value}");
        }
        assert_eq!(fill("${a}", &json!({"a": 5})), Err("the url must be text".into()));
        assert_eq!(fill("${a}", &json!({})), Err("the url is missing".into()));
    }

    #[test]
    fn refuses_invalid_urls() {
        let scheme = "must begin with https:// or http://, or be one placeholder as a whole";
        let rows = [
            ("", scheme),
            ("api.example.com/x", scheme),
            ("${a}/x", scheme),
            ("http${a}", scheme),
            ("${a}://api.example.com/", scheme),
            ("ftp://api.example.com/", "\"ftp\" is not supported; use http or https"),
            ("https:///x", "the url has no host"),
            ("https://", "the url has no host"),
            ("https://:80/", "the url has no host"),
            ("https://u:p@api.example.com/", "a URL must not contain a user or password; put credentials into headers"),
            (
                "https://${a}@api.example.com/",
                "a URL must not contain a user or password; put credentials into headers",
            ),
            ("https://api.example.com:0/", "the URL's port is invalid"),
            ("https://api.example.com:x/", "the URL's port is invalid"),
            ("https://api..example.com/", "the URL's host is invalid: an empty name or label"),
            ("https://münchen.example/", "'ü' is not allowed in a host; write other names in their xn-- form"),
            (
                "https://evil.test\\@api.example.com/",
                "a URL must not contain a user or password; put credentials into headers",
            ),
            ("https://api.example.com/a b", "' ' is not allowed in a URL; percent-encode it"),
            ("https://api.example.com/\n", "'\\n' is not allowed in a URL; percent-encode it"),
            ("https://api.example.com/%zz", "a % without two hex digits behind it; write %25"),
            ("https://api.example.com/%${a}", "a % without two hex digits behind it; write %25"),
            ("https://api.example.com/a/../b", "a dot segment in the path; write the path without"),
        ];
        for (template, want) in rows {
            assert_eq!(read(template).unwrap_err(), want, "{template}");
        }
    }

    #[test]
    fn secrets_are_allowed_in_the_path_and_in_query_values_only() {
        let rows = [
            ("https://h.example/?key=${secrets.K}", true),
            ("https://h.example/?a=1&key=${secrets.K}&b=2", true),
            ("https://h.example/${a}?key=${secrets.K}", true),
            ("https://h.example${a}?key=${secrets.K}", true),
            ("https://h.example/?${secrets.K}", false),
            ("https://h.example/?${secrets.K}=1", false),
            ("https://h.example/?a=1&${secrets.K}", false),
            ("https://h.example/${secrets.K}", true),
            ("https://h.example/bot${secrets.K}/send", true),
            ("https://h.example${secrets.K}", false),
            ("https://${secrets.K}.example/", false),
            ("https://h.example/?a=1#x=${secrets.K}", false),
            ("https://h.example/a=${secrets.K}", true),
            ("https://h.example${a}/${secrets.K}", false),
        ];
        for (template, want) in rows {
            assert_eq!(
                read(template).map(|_| ()).map_err(|why| why.contains(NO_SECRET)),
                if want { Ok(()) } else { Err(true) },
                "{template}"
            );
        }
        assert!(read("${secrets.K}").is_err());
    }

    proptest! {
        #[test]
        fn a_fixed_host_never_changes(a in ".{0,24}|[@/\\\\?#:.%a0\\[\\]]{0,12}", b in "[@/\\\\?#:.%a]{0,6}") {
            let arguments = json!({"a": a, "b": b});
            let templates = [
                "https://api.example.com/${a}", "https://api.example.com?${a}", "https://api.example.com#${a}",
                "https://api.example.com/x/${a}/${b}?${a}&y=${b}#${a}", "https://api.example.com${a}",
                "https://api.example.com${a}${b}", "https://api.example.com${a}/${b}",
            ];
            for template in templates {
                let Ok(url) = fill(template, &arguments) else { continue };
                let behind = url.strip_prefix("https://api.example.com").unwrap();
                prop_assert!(behind.is_empty() || behind.starts_with(['/', '?', '#']), "{}", url);
                prop_assert!(url.bytes().all(|b| (0x21..0x7f).contains(&b) && b != b'\\'), "{}", url);
                let uri: http::Uri = url.parse().unwrap();
                prop_assert_eq!(uri.authority().unwrap().as_str(), "api.example.com");
                prop_assert!(!has_dot_segment(uri.path()));
            }
        }
    }
}

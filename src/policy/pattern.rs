//! Host and path patterns. There are few forms, each with one meaning.

use crate::model::host::{Host, HostName};

/// A pattern for the hosts of an integration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum HostPattern {
    /// `*.example.com`: all names below at any depth, but not `example.com` itself.
    Below(HostName),
    /// `api.example.com`, or an address.
    Exactly(Host),
}

/// A pattern for the paths of an integration, in canonical form and case-sensitive.
///
/// `*` matches exactly one segment. As the last segment it matches everything below.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathPattern {
    segments: Vec<Segment>,
    open_end: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum Segment {
    Any,
    Exactly(String),
}

/// The error of an invalid pattern.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PatternError {
    /// The problem.
    pub problem: String,
    /// The expected pattern.
    pub suggestion: String,
}

/// A warning that a pattern is valid but wider than it looks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Warning(pub String);

impl HostPattern {
    /// Returns true if it allows an address, and no name.
    #[must_use]
    pub fn is_address(&self) -> bool {
        matches!(self, Self::Exactly(Host::Ip(_)))
    }

    /// Parses a pattern from the configuration.
    ///
    /// # Errors
    /// [`PatternError`] for anything but a host in normal form or `*.` before one, and for a wildcard
    /// over a whole registry suffix such as `*.com`.
    pub fn parse(text: &str) -> Result<(Self, Option<Warning>), PatternError> {
        let pattern = Self::parse_wide(text)?;
        let warning = match &pattern {
            Self::Below(base) => check_width(text, base)?,
            Self::Exactly(_) => None,
        };
        Ok((pattern, warning))
    }

    /// Parses a pattern like [`Self::parse`], but without a limit on its width. For patterns that deny.
    ///
    /// # Errors
    /// [`PatternError`] for anything but a host in normal form or `*.` before one.
    pub fn parse_wide(text: &str) -> Result<Self, PatternError> {
        let Some(base) = text.strip_prefix("*.") else {
            return if text.contains('*') {
                Err(error(
                    format!("{} is not a valid host pattern", quoted(text)),
                    "a host, or *.example.com for all its subdomains; for the public internet, any_public_host = true",
                ))
            } else {
                normal(text).map(Self::Exactly)
            };
        };
        if base.contains('*') {
            return Err(error(format!("{text:?} has more than one *"), "one *, as the first label"));
        }
        match normal(base)? {
            Host::Name(name) => Ok(Self::Below(name)),
            Host::Ip(_) => Err(error(
                format!("{text:?} puts * before an address"),
                "the address itself, or allow_cidrs for a network",
            )),
        }
    }

    /// Returns true if the pattern matches this host.
    #[must_use]
    pub fn matches(&self, host: &Host) -> bool {
        match self {
            Self::Below(base) => host.name().is_some_and(|name| name != base && name.is_at_or_below(base.as_str())),
            Self::Exactly(exact) => exact == host,
        }
    }
}

/// Rejects a wildcard over a registry suffix, and warns of other public suffixes, because such a wildcard covers
/// the domains of many owners (Public Suffix List). Some suffixes are wildcards themselves, such as `*.ck`.
fn check_width(text: &str, base: &HostName) -> Result<Option<Warning>, PatternError> {
    let is_suffix = |name: &str| {
        psl::suffix(name.as_bytes()).filter(|suffix| suffix.as_bytes() == name.as_bytes()).map(|suffix| suffix.typ())
    };
    let own = is_suffix(base.as_str());
    let below = is_suffix(&format!("x.{base}"));
    match (own, below) {
        (Some(Some(psl::Type::Icann)), _) | (_, Some(Some(psl::Type::Icann))) => {
            Err(error(format!("{text:?} covers a whole registry suffix"), "a narrower pattern, such as *.example.com"))
        }
        (Some(Some(psl::Type::Private)), _) | (_, Some(Some(psl::Type::Private))) => {
            Ok(Some(Warning(format!("{text:?} covers the domains of many owners"))))
        }
        (Some(None), _) => Ok(Some(Warning(format!("{text:?} covers a whole top-level domain")))),
        _ => Ok(None),
    }
}

impl std::fmt::Display for HostPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Below(base) => write!(f, "*.{base}"),
            Self::Exactly(host) => host.fmt(f),
        }
    }
}

impl std::fmt::Display for PathPattern {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        for segment in &self.segments {
            match segment {
                Segment::Any => f.write_str("/*")?,
                Segment::Exactly(text) => write!(f, "/{text}")?,
            }
        }
        f.write_str(if self.open_end { "/*" } else { "" })
    }
}

impl PathPattern {
    /// Parses a pattern from the configuration.
    ///
    /// # Errors
    /// [`PatternError`] if it is not in canonical form, has a query or a fragment, or a `*` that is not a whole segment.
    pub fn parse(text: &str) -> Result<Self, PatternError> {
        if let Some((path, _)) = text.split_once(['?', '#']) {
            return Err(error(
                format!("{text:?} can match no path: a query or fragment is not part of it"),
                &format!("{path:?}"),
            ));
        }
        match super::path::canonical(text) {
            Ok(canonical) if canonical == text => {}
            Ok(canonical) => {
                return Err(error(format!("{text:?} is not in canonical form"), &format!("{canonical:?}")));
            }
            Err(_) => {
                return Err(error(
                    format!("{text:?} is not a valid path"),
                    "a path such as \"/repos/*\", without dot segments",
                ));
            }
        }
        let mut segments = Vec::new();
        for segment in text.split('/').skip(1) {
            segments.push(match segment {
                "*" => Segment::Any,
                _ if segment.contains('*') => {
                    return Err(error(
                        format!("{text:?} has a * inside a segment"),
                        "* as a whole segment, such as \"/repos/*\"",
                    ));
                }
                _ => Segment::Exactly(segment.to_owned()),
            });
        }
        let open_end = segments.last() == Some(&Segment::Any);
        if open_end {
            segments.pop();
        }
        Ok(Self { segments, open_end })
    }

    /// Returns the segment at a position: `Some(None)` for `*`, and `None` behind the last one. An open end is none of them.
    pub(super) fn segment(&self, at: usize) -> Option<Option<&str>> {
        Some(match self.segments.get(at)? {
            Segment::Any => None,
            Segment::Exactly(text) => Some(text),
        })
    }

    /// Returns true if the pattern matches whatever follows its segments, if something does.
    pub(super) fn has_open_end(&self) -> bool {
        self.open_end
    }

    /// Returns true if this is one of the segments that the pattern names.
    pub(super) fn names(&self, segment: &str) -> bool {
        self.segments.iter().any(|own| matches!(own, Segment::Exactly(text) if text == segment))
    }

    /// Returns true if the pattern matches this path, which must be in canonical form.
    #[must_use]
    pub fn matches(&self, path: &str) -> bool {
        let mut given = path.split('/').skip(1);
        for segment in &self.segments {
            match (segment, given.next()) {
                (_, None) => return false,
                (Segment::Any, Some("")) => return false,
                (Segment::Exactly(want), Some(text)) if want != text => return false,
                _ => {}
            }
        }
        given.next().is_some() == self.open_end
    }
}

/// Returns a text for a message, quoted. The user and the password of a URL are left out: the text may have been written in the
/// wrong place.
pub(super) fn quoted(text: &str) -> String {
    let Some((before, rest)) = text.rsplit_once('@') else { return format!("{text:?}") };
    let is_scheme = |text: &str| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"+-.".contains(&byte));
    let scheme = before.split_once("://").filter(|(scheme, _)| is_scheme(scheme));
    let scheme = scheme.map_or_else(String::new, |(scheme, _)| format!("{scheme}://"));
    format!("{:?}", format!("{scheme}…@{rest}"))
}

fn normal(text: &str) -> Result<Host, PatternError> {
    let bracketed = text.parse::<std::net::Ipv6Addr>().map(|ip| format!("[{ip}]"));
    let spelled = bracketed.as_deref().unwrap_or(text);
    let host = Host::parse(spelled).map_err(|why| match idna::domain_to_ascii(text) {
        Ok(ascii) if !text.is_ascii() && !text.contains('@') => {
            error(format!("{} is not in normal form", quoted(text)), &format!("{ascii:?}"))
        }
        _ => error(
            format!("{} is not a valid host: {why}", quoted(text)),
            "a host name such as \"api.example.com\", or an address, without scheme, port and path",
        ),
    })?;
    let normal = host.to_string();
    if normal == spelled {
        Ok(host)
    } else {
        Err(error(format!("{text:?} is not in normal form"), &format!("{normal:?}")))
    }
}

fn error(problem: String, suggestion: &str) -> PatternError {
    PatternError { problem, suggestion: suggestion.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passwords_in_urls_are_not_quoted() {
        let rows = [
            ("api.example", "\"api.example\""),
            ("https://api.example", "\"https://api.example\""),
            ("https://user:secret@api.example", "\"https://…@api.example\""),
            ("user:sec@ret@api.example:443", "\"…@api.example:443\""),
            ("user:sec://ret@api.example", "\"…@api.example\""),
        ];
        for (text, wanted) in rows {
            assert_eq!(quoted(text), wanted);
        }
        for text in ["https://u:s3cret@a.example", "*.u:s3cret@a.example", "u:s3cret@*", "ü:s3cret@a.example"] {
            let shown = format!("{:?}", HostPattern::parse(text).map(|_| ()).unwrap_err());
            assert!(!shown.contains("s3cret"), "{shown}");
        }
    }

    #[test]
    fn host_patterns_match_whole_labels_only() {
        let rows = [
            ("api.example.com", "api.example.com", true),
            ("api.example.com", "x.api.example.com", false),
            ("api.example.com", "example.com", false),
            ("*.example.com", "a.example.com", true),
            ("*.example.com", "a.b.example.com", true),
            ("*.example.com", "example.com", false),
            ("*.example.com", "badexample.com", false),
            ("*.example.com", "example.com.evil.test", false),
            ("10.0.0.1", "10.0.0.1", true),
            ("2001:db8::1", "[2001:db8::1]", true),
            ("10.0.0.1", "10.0.0.2", false),
        ];
        for (pattern, host, want) in rows {
            let (parsed, _) = HostPattern::parse(pattern).unwrap();
            assert_eq!(parsed.matches(&Host::parse(host).unwrap()), want, "{pattern} on {host}");
        }
    }

    #[test]
    fn rejects_patterns_that_are_too_wide_or_not_normal_with_a_suggestion() {
        let rows = [
            ("*", "any_public_host"),
            ("*.com", "*.example.com"),
            ("*.co.uk", "*.example.com"),
            ("*.ck", "*.example.com"),
            ("*.kawasaki.jp", "*.example.com"),
            ("a.*.com", "*.example.com"),
            ("*.*.example.com", "first label"),
            ("API.example.com", "\"api.example.com\""),
            ("example.com.", "\"example.com\""),
            ("*.Example.com", "\"example.com\""),
            ("münchen.example", "xn--mnchen-3ya.example"),
            ("https://example.com", "without scheme"),
            ("example.com:443", "without scheme"),
            ("127.1", "a host name"),
            ("*.10.0.0.1", "allow_cidrs"),
            ("", "a host name"),
        ];
        for (pattern, suggestion) in rows {
            let error = HostPattern::parse(pattern).unwrap_err();
            assert!(error.suggestion.contains(suggestion), "{pattern:?}: {error:?}");
        }
    }

    #[test]
    fn warns_of_suffixes_that_many_owners_share() {
        for pattern in ["*.github.io", "*.internal"] {
            assert!(HostPattern::parse(pattern).unwrap().1.is_some(), "{pattern}");
        }
        assert_eq!(HostPattern::parse("*.example.com").unwrap().1, None);
    }

    #[test]
    fn path_patterns_match_whole_segments() {
        let rows = [
            ("/repos/*", "/repos/a", true),
            ("/repos/*", "/repos/a/b/c", true),
            ("/repos/*", "/repos/", true),
            ("/repos/*", "/repos", false),
            ("/repos/*", "/reposx/a", false),
            ("/repos/*/issues", "/repos/a/issues", true),
            ("/repos/*/issues", "/repos/a/b/issues", false),
            ("/repos/*/issues", "/repos//issues", false),
            ("/repos/*/issues/*", "/repos/a/issues/1/comments", true),
            ("/", "/", true),
            ("/", "/a", false),
            ("/*", "/a/b", true),
            ("/*", "/", true),
            ("/a", "/a/", false),
            ("/a/", "/a", false),
            ("/a", "/A", false),
        ];
        for (pattern, path, want) in rows {
            assert_eq!(PathPattern::parse(pattern).unwrap().matches(path), want, "{pattern} on {path}");
        }
    }

    #[test]
    fn rejects_ambiguous_path_patterns() {
        for pattern in ["repos", "/a/../b", "/a*", "/%61", "/a//b", "", "/a?b=1", "/a#b", "/a?*"] {
            assert!(PathPattern::parse(pattern).is_err(), "{pattern:?}");
        }
    }
}

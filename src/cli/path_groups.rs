//! Paths as patterns: segments that are ids, hashes or versions become `*`.

/// A pattern, as a list of segments. `*` is any one segment, and as the last one everything below.
pub(super) type Pattern = Vec<String>;

const ANY: &str = "*";

/// The most segments of a pattern. What is below becomes `*`.
const MAX_SEGMENTS: usize = 32;

/// The shortest hexadecimal text that is a hash, if it has digits and letters.
const MIN_HASH: usize = 7;
/// The shortest hexadecimal text that is a hash, if it has letters only or is a part of a segment.
const MIN_PLAIN_HASH: usize = 16;
/// The shortest text of digits and letters that is an id.
const MIN_ID: usize = 12;
/// The shortest number that is an id as a part of a segment, such as a date.
const MIN_NUMBER: usize = 6;
/// The longest hexadecimal text that is the beginning of the hash behind it, as in `/ab/cd/abcd12…`.
const MAX_SHARD: usize = 3;

/// Returns the pattern of a path in canonical form.
pub(super) fn pattern(path: &str) -> Pattern {
    let segments: Vec<&str> = path.split('/').skip(1).collect();
    let mut out: Pattern = Vec::with_capacity(segments.len());
    let mut is_before_hash = false;
    for (index, segment) in segments.iter().enumerate().rev() {
        let is_hash = is_hash(segment, MIN_HASH) && segment.len() > MAX_SHARD;
        let is_shard = is_before_hash && segment.len() <= MAX_SHARD && is_hex(segment);
        let is_variable = is_hash || is_shard || is_variable(segment, index == 0);
        out.push(if is_variable { ANY.to_owned() } else { (*segment).to_owned() });
        is_before_hash = is_hash || is_shard;
    }
    out.reverse();
    if out.len() > MAX_SEGMENTS {
        out.truncate(MAX_SEGMENTS);
        out.push(ANY.to_owned());
    }
    out
}

/// Returns the pattern of everything below a path in canonical form.
pub(super) fn pattern_of_all_below(path: &str) -> Pattern {
    let mut pattern = pattern(path);
    pattern.push(ANY.to_owned());
    pattern
}

/// Writes a pattern as the configuration has it.
pub(super) fn text(pattern: &Pattern) -> String {
    format!("/{}", pattern.join("/"))
}

/// Returns true if the first pattern matches every path that the second one matches.
pub(super) fn covers(wide: &Pattern, narrow: &Pattern) -> bool {
    let (wide, is_wide_open) = fixed(wide);
    let (narrow, is_narrow_open) = fixed(narrow);
    if narrow.len() < wide.len() {
        return false;
    }
    // `*` in the middle matches no empty segment.
    let is_within = |(wide, narrow): (&String, &String)| if wide == ANY { !narrow.is_empty() } else { wide == narrow };
    if !wide.iter().zip(narrow).all(is_within) {
        return false;
    }
    if is_wide_open {
        narrow.len() > wide.len() || is_narrow_open
    } else {
        narrow.len() == wide.len() && !is_narrow_open
    }
}

/// Returns the segments before an open end, and whether there is one.
fn fixed(pattern: &Pattern) -> (&[String], bool) {
    match pattern.split_last() {
        Some((last, before)) if last == ANY => (before, true),
        _ => (pattern, false),
    }
}

fn is_variable(segment: &str, is_first: bool) -> bool {
    if segment.contains(ANY) {
        // The log replaces values of credentials by asterisks, and a pattern has no other use of them.
        return true;
    }
    if is_api_version(segment) {
        return !is_first && segment.contains('.');
    }
    let is_number = !segment.is_empty() && segment.bytes().all(|byte| byte.is_ascii_digit());
    if is_number {
        return segment.len() > 1 || !is_first;
    }
    is_uuid(segment) || has_version(segment) || segment.split(|c: char| !c.is_ascii_alphanumeric()).any(is_id)
}

/// Returns true for `v1` and `v1.0`.
fn is_api_version(segment: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let Some(rest) = segment.strip_prefix(['v', 'V']) else { return false };
    match rest.split_once('.') {
        Some((major, minor)) => is_number(major) && is_number(minor),
        None => is_number(rest),
    }
}

fn is_uuid(segment: &str) -> bool {
    let groups: Vec<&str> = segment.split('-').collect();
    groups.iter().map(|group| group.len()).eq([8, 4, 4, 4, 12]) && groups.iter().all(|group| is_hex(group))
}

/// Returns true for a text with a number such as `1.2`, or a date such as `2026-11-27`.
fn has_version(segment: &str) -> bool {
    let bytes = segment.as_bytes();
    let has_point =
        bytes.windows(3).any(|three| matches!(three, [a, b'.', b] if a.is_ascii_digit() && b.is_ascii_digit()));
    let is_date = |ten: &[u8]| {
        ten.iter().enumerate().all(|(at, byte)| if matches!(at, 4 | 7) { *byte == b'-' } else { byte.is_ascii_digit() })
    };
    has_point || bytes.windows(10).any(is_date)
}

/// Returns true for a part of a segment that is not a word.
fn is_id(part: &str) -> bool {
    let digits = part.bytes().filter(u8::is_ascii_digit).count();
    let is_number = digits == part.len() && digits >= MIN_NUMBER;
    let is_mixed = digits > 0 && digits < part.len() && part.len() >= MIN_ID;
    is_number || is_mixed || is_hash(part, MIN_HASH.saturating_add(1))
}

/// Returns true for a hexadecimal text of this length with digits and letters, or for a longer one.
fn is_hash(text: &str, min: usize) -> bool {
    let has_digit = text.bytes().any(|byte| byte.is_ascii_digit());
    let has_letter = text.bytes().any(|byte| byte.is_ascii_alphabetic());
    is_hex(text) && ((has_digit && has_letter && text.len() >= min) || text.len() >= MIN_PLAIN_HASH)
}

fn is_hex(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::pattern::PathPattern;

    #[test]
    fn ids_hashes_and_versions_become_wildcards() {
        let rows = [
            ("/", "/"),
            ("/v1/users/123/posts", "/v1/users/*/posts"),
            ("/v1/users/7", "/v1/users/*"),
            ("/2/tweets/1460323737035677698", "/2/tweets/*"),
            ("/v1.0/me", "/v1.0/me"),
            ("/repo/releases/v1.2", "/repo/releases/*"),
            ("/repo/tree/v1.2.3/src", "/repo/tree/*/src"),
            ("/left-pad", "/left-pad"),
            ("/left-pad/-/left-pad-1.3.0.tgz", "/left-pad/-/*"),
            ("/simple/requests/", "/simple/requests/"),
            ("/packages/ab/cd/0123456789abcdef0123456789abcdef/requests-2.31.0-py3-none-any.whl", "/packages/*/*/*/*"),
            ("/packages/ab/cd/file", "/packages/ab/cd/file"),
            ("/o/9f1c2d3e-1111-4222-8333-1234567890ab/x", "/o/*/x"),
            ("/commit/9fceb02", "/commit/*"),
            ("/commit/9fceb02d0ae598e95dc970b74767f19372d61af8", "/commit/*"),
            ("/facade/decade/added", "/facade/decade/added"),
            ("/customers/cus_NffrFeUfNV2Hib", "/customers/*"),
            ("/runs/01HZY3X8Q9", "/runs/01HZY3X8Q9"),
            ("/runs/01HZY3X8Q9V7W6T5S4R3Q2P1N0", "/runs/*"),
            ("/models/claude-sonnet-4-20250514", "/models/*"),
            ("/models/my-model-v2", "/models/my-model-v2"),
            ("/static/main.3f4e5a6b.js", "/static/*"),
            ("/logs/2026-11-27/all", "/logs/*/all"),
            ("/page/index-2.html", "/page/index-2.html"),
            ("/key/***", "/key/*"),
            ("/key/a*b/c", "/key/*/c"),
            ("/a%20b", "/a%20b"),
            ("/dists/bookworm/main/binary-amd64/Packages.xz", "/dists/bookworm/main/binary-amd64/Packages.xz"),
        ];
        for (path, want) in rows {
            assert_eq!(text(&pattern(path)), want, "{path}");
            assert!(PathPattern::parse(want).unwrap().matches(path), "{want} matches {path}");
        }
        assert_eq!(text(&pattern_of_all_below("/a/b")), "/a/b/*");
    }

    proptest::proptest! {
        /// A pattern that covers another one matches what that one matches, and no pattern loses its own path.
        #[test]
        fn covered_patterns_match_less(
            wide in "(/(a|b|[*])){1,3}/?",
            narrow in "(/(a|b|[*])){1,4}/?",
            path in "(/(a|b|c)){1,4}/?",
        ) {
            let of = |text: &str| -> Pattern { text.split('/').skip(1).map(str::to_owned).collect() };
            let matches = |text: &str| PathPattern::parse(text).unwrap().matches(&path);
            if covers(&of(&wide), &of(&narrow)) && matches(&narrow) {
                proptest::prop_assert!(matches(&wide), "{wide} {narrow} {path}");
            }
            proptest::prop_assert!(covers(&of(&wide), &of(&wide)));
        }

        #[test]
        fn a_pattern_matches_the_path_that_it_came_from(path in "(/([a-z0-9.-]{1,20})){1,4}/?") {
            if crate::policy::path::canonical(&path).is_ok_and(|canonical| canonical == path) {
                let pattern = text(&pattern(&path));
                proptest::prop_assert!(PathPattern::parse(&pattern).unwrap().matches(&path), "{pattern} {path}");
            }
        }
    }
}

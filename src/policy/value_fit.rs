//! Checks that a value can be sent in the places of its credential.

use super::credential::{Auth, Placement, fits_cookie, fits_path};
use super::source::has_blank_edge;
use crate::model::secret::Secret;

/// The longest value that is injected, in bytes. Origins accept request heads of at least 8 KiB.
pub(super) const MAX_VALUE: usize = 8 * 1024;

/// The reason why a value cannot be sent, and what would be accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Unfit {
    pub(super) problem: &'static str,
    pub(super) expected: &'static str,
}

/// Returns the scheme that a value begins with although its `auth_type` adds one.
pub(super) fn repeated_scheme(value: &Secret, auth: &Auth) -> Option<&'static str> {
    let starts_with = |scheme: &str| {
        let start = value.expose().get(..scheme.len());
        start.is_some_and(|start| start.eq_ignore_ascii_case(scheme.as_bytes()))
    };
    let scheme = if starts_with("Bearer ") { "Bearer" } else { "Basic" };
    let is_added = matches!(auth, Auth::Bearer | Auth::Header(_));
    (is_added && (starts_with("Bearer ") || starts_with("Basic "))).then_some(scheme)
}

/// Returns why a value cannot be sent.
pub(super) fn unfit(value: &Secret, auth: &Auth, swap_in: &[Placement]) -> Option<Unfit> {
    let unfit = |problem, expected| Some(Unfit { problem, expected });
    let bytes = value.expose();
    let has_place = |place: fn(&Placement) -> bool| swap_in.iter().any(place);
    if *auth == Auth::Basic && !bytes.contains(&b':') {
        return unfit("the value is not of the form user:password", "a value with a colon, or another auth_type");
    }
    if matches!(auth, Auth::Aws(_)) && (has_blank_edge(value) || !bytes.is_ascii()) {
        return unfit("the value is not a secret access key", "the key alone, without blanks around it");
    }
    if let Auth::Hmac(recipe) = auth
        && !recipe.takes_key(bytes)
    {
        return unfit("the value is not a key in its key_encoding", "the key, or another key_encoding");
    }
    let is_in_field =
        matches!(auth, Auth::Bearer | Auth::Header(_)) || has_place(|it| matches!(it, Placement::Field(_)));
    if is_in_field && has_blank_edge(value) {
        // A blank there is not part of the field's value (RFC 9110 §5.5). The origin would return another value than
        // the one that is searched for.
        return unfit(
            "the value begins or ends with a blank, which a header field cannot carry",
            "the value without it",
        );
    }
    if (*auth == Auth::Path || has_place(|it| *it == Placement::Path)) && !fits_path(bytes) {
        return unfit(
            "the value has a character that a path cannot carry unambiguously, such as a slash",
            "a value without /, \\, %, ?, #, ; and blanks, or another place",
        );
    }
    let is_cookie = matches!(auth, Auth::Cookie(_)) || has_place(|it| matches!(it, Placement::Cookie(_)));
    if is_cookie && !fits_cookie(bytes) {
        return unfit(
            "the value has a character that a cookie cannot carry",
            "a value without blanks, quotes, commas, semicolons and backslashes, or another place",
        );
    }
    if has_place(|it| matches!(it, Placement::Json(_) | Placement::Message(_))) && std::str::from_utf8(bytes).is_err() {
        return unfit("the value is not in UTF-8, as JSON is", "a value in UTF-8, or another place");
    }
    if bytes.len() > MAX_VALUE {
        return unfit("the value is longer than 8192 bytes", "a shorter value");
    }
    None
}

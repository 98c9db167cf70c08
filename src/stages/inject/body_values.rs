//! Puts values into the places of their placeholders in a body.

use std::ops::Range;

use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use zeroize::Zeroizing;

use crate::model::refusal::{Deny, Fail, Verdict};
use crate::policy::credential::Placement;
use crate::stages::authorize::Grant;
use crate::stages::message::message_swaps::{json_escaped, with_values};
use crate::stages::message::request_body::RequestBody;

/// Returns the body with the values, escaped for their places, or `None` if it has no placeholders.
///
/// # Errors
/// [`Fail::CredentialUnavailable`] if a token has expired since the request was authorized; [`Deny::CredentialNotBound`] for a token
/// that the body cannot carry.
pub(super) fn swapped(grant: &Grant, body: &RequestBody) -> Verdict<Option<Zeroizing<Vec<u8>>>> {
    if !grant.swaps_in_body() {
        return Ok(None);
    }
    let (data, _) = body.buffered().ok_or(Fail::Draining)?;
    let mut places: Vec<(Range<usize>, Zeroizing<Vec<u8>>)> = Vec::new();
    for chosen in grant.selected_credentials() {
        for swap in &chosen.in_body {
            let value = chosen.credential.usable_value().ok_or(Fail::CredentialUnavailable)?.expose();
            places.push((swap.range.clone(), escaped(value, &swap.place).ok_or(Deny::CredentialNotBound)?));
        }
    }
    places.sort_unstable_by_key(|(range, _)| range.start);
    with_values(data, &places).map(Some).ok_or(Deny::RequestMalformed.into())
}

/// Returns a value as a part of a string or a parameter.
fn escaped(value: &[u8], place: &Placement) -> Option<Zeroizing<Vec<u8>>> {
    match place {
        Placement::Form(_) => Some(Zeroizing::new(percent_encode(value, NON_ALPHANUMERIC).to_string().into_bytes())),
        Placement::Json(_) => json_escaped(value),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_escaped_for_their_place() {
        let value = "a\"b\\c\n&=+ ä%/";
        let json = escaped(value.as_bytes(), &Placement::Json(None)).unwrap();
        assert_eq!(*json, "a\\\"b\\\\c\\u000a&=+ ä%/".as_bytes());
        let read: String = serde_json::from_slice(&[b"\"", json.as_slice(), b"\""].concat()).unwrap();
        assert_eq!(read, value);
        let form = escaped(value.as_bytes(), &Placement::Form(None)).unwrap();
        assert_eq!(*form, b"a%22b%5Cc%0A%26%3D%2B%20%C3%A4%25%2F");
        assert!(escaped(b"\xff", &Placement::Json(None)).is_none());
        assert!(escaped(b"x", &Placement::Path).is_none());
    }
}

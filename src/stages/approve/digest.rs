//! The digest that identifies a request, under which `approve` asks for an approval and finds it again when the request
//! is repeated.

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, COOKIE, EXPECT, HOST, HeaderName, SEC_WEBSOCKET_EXTENSIONS, SEC_WEBSOCKET_KEY};
use http::request::Parts;
use http::{HeaderMap, HeaderValue};
use sha2::{Digest, Sha256};

use crate::model::name::CredentialName;
use crate::model::refusal::Verdict;
use crate::model::trace_context::{TRACEPARENT, TRACESTATE};
use crate::policy::credential::Placement;
use crate::stages::authorize::Grant;
use crate::stages::authorize::credential::{BodySwap, SelectedCredential, Swap};
use crate::stages::message::{cookies, headers, query, websocket};

/// Separates this digest from all other hashes.
const DOMAIN: &[u8] = b"exeat approval 1";
/// The bytes of a body hashed before the task yields.
const PORTION: usize = 512 * 1024;

/// Returns the digest of a request as it will be sent, with the name and placements of the credential instead of its
/// value. Excludes hop-by-hop fields and values that a client has to generate anew for each request: the key of a
/// WebSocket handshake (RFC 6455 §4.1), the nonce that marks placeholders, a signature that the proxy makes, and the ids of a trace.
///
/// # Errors
/// [`Deny::RequestMalformed`](crate::model::refusal::Deny::RequestMalformed) for an invalid WebSocket handshake.
pub(crate) async fn of(
    grant: &Grant,
    parts: &Parts,
    (data, trailers): (&Bytes, Option<&HeaderMap>),
) -> Verdict<[u8; 32]> {
    let is_websocket = websocket::parse_upgrade(parts)?.is_some();
    let mut digest = DigestWriter::default();
    hash_head(&mut digest, grant, is_websocket);
    digest.fields(&end_to_end(grant, parts, is_websocket));
    hash_body(&mut digest, grant, data).await;
    digest.fields(trailers.unwrap_or(&HeaderMap::new()));
    Ok(digest.finish())
}

/// Hashes the body, with the names and places of credentials instead of their placeholders.
async fn hash_body(digest: &mut DigestWriter, grant: &Grant, data: &Bytes) {
    let mut swaps: Vec<(&BodySwap, &CredentialName)> = Vec::new();
    for chosen in grant.selected_credentials() {
        swaps.extend(chosen.in_body.iter().map(|swap| (swap, chosen.credential.name())));
    }
    swaps.sort_unstable_by_key(|(swap, _)| swap.range.start);
    digest.length(swaps.len());
    let mut from = 0;
    for (BodySwap { place, range, .. }, name) in swaps {
        digest.text(data.get(from..range.start).unwrap_or_default()).await;
        digest.part(name.as_str());
        digest.part(place.to_string());
        from = range.end;
    }
    digest.text(data.get(from..).unwrap_or_default()).await;
}

/// Hashes the execution, the tool, the method, the target and the credential.
fn hash_head(digest: &mut DigestWriter, grant: &Grant, is_websocket: bool) {
    let (admitted, path) = (grant.admitted(), grant.path());
    let target = admitted.target();
    digest.part(DOMAIN);
    digest.part(admitted.caller().execution().as_str());
    digest.optional(grant.kind().tool().map(|tool| tool.as_str()));
    digest.part(grant.method().as_str());
    digest.optional(is_websocket.then_some("websocket"));
    digest.part(target.scheme().as_str());
    digest.part(target.authority());
    // The texts before and behind a placeholder in the path are hashed with its credential.
    let is_swapped = |chosen: &SelectedCredential| chosen.swaps.iter().any(|swap| swap.place == Placement::Path);
    let has_placeholder = grant.selected_credentials().iter().any(is_swapped);
    digest.optional((!has_placeholder).then(|| path.path()));
    digest.optional(sent_query(grant));
    digest.length(grant.selected_credentials().len());
    grant.selected_credentials().iter().for_each(|chosen| digest.credential(chosen));
    // Its messages are not known yet.
    if let Some(swaps) = grant.message_swaps() {
        digest.length(swaps.credentials().count());
        for credential in swaps.credentials() {
            digest.part(credential.name().as_str());
            let places: Vec<String> = credential.message_places().map(|place| place.to_string()).collect();
            digest.length(places.len());
            places.into_iter().for_each(|place| digest.part(place));
        }
    }
}

/// Returns the query without the parameters that the credential replaces.
pub(super) fn sent_query(grant: &Grant) -> Option<String> {
    let query = grant.path().query()?;
    let places = grant.selected_credentials().iter().flat_map(SelectedCredential::placements);
    let names: Vec<String> = places.filter_map(parameter).collect();
    // Without replaced parameters, the query is sent unchanged.
    if names.is_empty() {
        return Some(query.to_owned());
    }
    Some(query::remove_parameters(query, |name| names.iter().any(|replaced| replaced.as_bytes() == name)))
}

fn parameter(place: Placement) -> Option<String> {
    match place {
        Placement::Parameter(name) => Some(name),
        _ => None,
    }
}

/// Returns the client's end-to-end fields, for a request whose handshake, if it has one, is valid.
pub(super) fn end_to_end_fields(grant: &Grant, parts: &Parts) -> HeaderMap {
    let is_websocket = matches!(websocket::parse_upgrade(parts), Ok(Some(_)));
    end_to_end(grant, parts, is_websocket)
}

/// Returns the client's end-to-end fields.
fn end_to_end(grant: &Grant, parts: &Parts, is_websocket: bool) -> HeaderMap {
    let mut headers = parts.headers.clone();
    headers::remove_hop_by_hop(&mut headers);
    // The destination and the length are hashed separately.
    for name in [HOST, EXPECT, CONTENT_LENGTH] {
        headers.remove(name);
    }
    if is_websocket {
        headers.remove(SEC_WEBSOCKET_KEY);
        headers.remove(SEC_WEBSOCKET_EXTENSIONS);
    }
    // The ids differ in each attempt. What is forwarded of them is chosen by the proxy, or has a fixed form.
    headers.remove(TRACEPARENT);
    if !grant.forwards_trace_context() {
        headers.remove(TRACESTATE);
    }
    for place in grant.selected_credentials().iter().flat_map(SelectedCredential::placements) {
        match place {
            Placement::Field(name) => drop(headers.remove(name)),
            Placement::Cookie(name) => {
                // The other cookies are sent.
                let others = cookies::without_cookie(&headers, &name);
                headers.remove(COOKIE);
                if let (false, Ok(others)) = (others.is_empty(), HeaderValue::from_bytes(&others)) {
                    headers.insert(COOKIE, others);
                }
            }
            _ => {}
        }
    }
    headers
}

/// A digest in which each part is prefixed by its length and each list by its count, so that no two requests hash the
/// same bytes.
#[derive(Default)]
pub(super) struct DigestWriter(Sha256);

impl DigestWriter {
    pub(super) fn finish(self) -> [u8; 32] {
        self.0.finalize().into()
    }

    pub(super) fn length(&mut self, length: usize) {
        self.0.update((length as u64).to_be_bytes());
    }

    pub(super) fn part(&mut self, bytes: impl AsRef<[u8]>) {
        let bytes = bytes.as_ref();
        self.length(bytes.len());
        self.0.update(bytes);
    }

    /// Hashes a text that may have megabytes. Other tasks run between its portions.
    async fn text(&mut self, text: &[u8]) {
        self.length(text.len());
        for portion in text.chunks(PORTION) {
            self.0.update(portion);
            tokio::task::yield_now().await;
        }
    }

    fn optional(&mut self, bytes: Option<impl AsRef<[u8]>>) {
        self.length(usize::from(bytes.is_some()));
        if let Some(bytes) = bytes {
            self.part(bytes);
        }
    }

    /// Hashes fields sorted by name. Fields of the same name keep their order.
    fn fields(&mut self, headers: &HeaderMap) {
        let mut names: Vec<&HeaderName> = headers.keys().collect();
        names.sort_unstable_by_key(|name| name.as_str());
        self.length(headers.len());
        for (name, value) in names.into_iter().flat_map(|name| headers.get_all(name).iter().map(move |v| (name, v))) {
            self.part(name);
            self.part(value);
        }
    }

    fn credential(&mut self, chosen: &SelectedCredential) {
        self.part(chosen.credential.name().as_str());
        self.length(usize::from(chosen.uses_auth_type()));
        // The client may have chosen them.
        self.optional(chosen.scope.as_ref().map(|scope| scope.algorithm.name()));
        self.optional(chosen.scope.as_ref().map(|scope| &*scope.region));
        self.optional(chosen.scope.as_ref().map(|scope| &*scope.service));
        self.length(chosen.swaps.len());
        for Swap { place, before, after, basic } in &chosen.swaps {
            self.part(place.to_string());
            self.part(before);
            self.part(after);
            self.length(usize::from(*basic));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn digest(parted: impl FnOnce(&mut DigestWriter)) -> Vec<u8> {
        let mut digest = DigestWriter::default();
        parted(&mut digest);
        digest.0.finalize().to_vec()
    }

    fn headers(fields: &[(&'static str, &'static str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in fields {
            headers.append(*name, value.parse().unwrap());
        }
        headers
    }

    #[test]
    fn parts_cannot_be_shifted_into_each_other() {
        let parts = |parts: &[&str]| digest(|digest| parts.iter().for_each(|part| digest.part(part)));
        assert_ne!(parts(&["ab", "c"]), parts(&["a", "bc"]));
        assert_ne!(parts(&["a", ""]), parts(&["a"]));
        let perhaps = |part: Option<&str>| digest(|digest| digest.optional(part));
        assert_ne!(perhaps(None), perhaps(Some("")));
        let fields = |fields| digest(|digest| digest.fields(&headers(fields)));
        assert_ne!(fields(&[("a", "1"), ("b", "2")]), fields(&[("a", "1b2")]));
    }

    #[test]
    fn fields_are_sorted_by_name_and_keep_their_order_within_one() {
        let fields = |fields| digest(|digest| digest.fields(&headers(fields)));
        assert_eq!(fields(&[("b", "1"), ("a", "2")]), fields(&[("a", "2"), ("b", "1")]));
        assert_eq!(fields(&[("a", "1"), ("b", "2"), ("a", "3")]), fields(&[("b", "2"), ("a", "1"), ("a", "3")]));
        assert_ne!(fields(&[("a", "1"), ("a", "2")]), fields(&[("a", "2"), ("a", "1")]));
        assert_ne!(fields(&[("a", "1"), ("a", "2")]), fields(&[("a", "1, 2")]));
    }
}

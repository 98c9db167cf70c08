//! Fields of requests that are signed for AWS.

use http::header::{AUTHORIZATION, CONTENT_TYPE, HeaderName};
use http::{HeaderMap, Uri};
use percent_encoding::percent_decode_str;
use sha2::{Digest, Sha256};

use crate::model::refusal::{Deny, Verdict};

/// The field with the hash of the body, or with the way in which the body is not signed.
pub(crate) const CONTENT_SHA256: HeaderName = HeaderName::from_static("x-amz-content-sha256");
/// The field with the time of the signature.
pub(crate) const DATE: HeaderName = HeaderName::from_static("x-amz-date");
/// The fields of a client's own signature, which differ in each attempt. They are removed when a request is signed, with those in which
/// SDKs count attempts.
pub(crate) const REPLACED: [HeaderName; 6] = [
    AUTHORIZATION,
    DATE,
    HeaderName::from_static("x-amz-region-set"),
    HeaderName::from_static("x-amz-security-token"),
    HeaderName::from_static("amz-sdk-invocation-id"),
    HeaderName::from_static("amz-sdk-request"),
];
const UNSIGNED: &str = "UNSIGNED-PAYLOAD";
const UNSIGNED_CHUNKS: &str = "STREAMING-UNSIGNED-PAYLOAD-TRAILER";

/// The bytes of a body that are hashed before the task yields.
const PORTION: usize = 512 * 1024;

/// The SHA-256 of a body that is part of a signature, in lower-case hex digits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct PayloadHash(pub(crate) String);

impl PayloadHash {
    /// Hashes a body. Other tasks run between its portions.
    pub(crate) async fn of(data: &[u8]) -> Self {
        let mut hash = Sha256::new();
        for portion in data.chunks(PORTION) {
            hash.update(portion);
            tokio::task::yield_now().await;
        }
        Self(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
    }
}

/// The part of a body in a signature, as the client has announced it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum AnnouncedPayload {
    /// Nothing was announced.
    None,
    /// The SHA-256 of the body, in lower-case hex digits. The service compares it with the body.
    Hash(String),
    /// The body is not signed.
    Unsigned,
    /// The body comes in chunks that are not signed, with a checksum behind them.
    UnsignedChunks,
}

impl AnnouncedPayload {
    /// Reads the field. `None` if it is repeated or unknown, or if each chunk of the body has a signature: those of a client
    /// without the key are worth nothing, and cannot be made anew while a body is sent.
    pub(crate) fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(CONTENT_SHA256).iter();
        let (first, second) = (values.next(), values.next());
        let Some(value) = first else { return Some(Self::None) };
        let is_hash =
            |text: &str| text.len() == 64 && text.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'));
        match value.to_str().ok().filter(|_| second.is_none())? {
            UNSIGNED => Some(Self::Unsigned),
            UNSIGNED_CHUNKS => Some(Self::UnsignedChunks),
            hash if is_hash(hash) => Some(Self::Hash(hash.to_owned())),
            _ => None,
        }
    }
}

/// Returns the fields to sign.
///
/// # Errors
/// [`Deny::RequestMalformed`] for a repeated field, because the origin would join its values to a text that was not scanned; for a
/// field that is not in ASCII, and a query that is not in UTF-8, which would be replaced in the signature.
pub(crate) fn signed_fields(headers: &HeaderMap, uri: &Uri) -> Verdict<Vec<(String, String)>> {
    percent_decode_str(uri.query().unwrap_or_default()).decode_utf8().map_err(|_| Deny::RequestMalformed)?;
    let signed = || headers.iter().filter(|(name, _)| is_signed(name));
    if signed().any(|(name, _)| headers.get_all(name).iter().count() > 1) {
        return Err(Deny::RequestMalformed.into());
    }
    signed()
        .map(|(name, value)| Ok((name.to_string(), value.to_str().map_err(|_| Deny::RequestMalformed)?.to_owned())))
        .collect()
}

fn is_signed(name: &HeaderName) -> bool {
    // The others are written by the signature.
    *name == CONTENT_TYPE
        || (name.as_str().starts_with("x-amz-") && *name != CONTENT_SHA256 && !REPLACED.contains(name))
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    #[test]
    fn clients_announce_how_their_body_is_signed() {
        let hash = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        let rows: [(&[&str], Option<AnnouncedPayload>); 8] = [
            (&[], Some(AnnouncedPayload::None)),
            (&[hash], Some(AnnouncedPayload::Hash(hash.to_owned()))),
            (&["UNSIGNED-PAYLOAD"], Some(AnnouncedPayload::Unsigned)),
            (&["STREAMING-UNSIGNED-PAYLOAD-TRAILER"], Some(AnnouncedPayload::UnsignedChunks)),
            (&["STREAMING-AWS4-HMAC-SHA256-PAYLOAD"], None),
            (&["STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER"], None),
            (&[hash, hash], None),
            (&["E3B0C44298FC1C149AFBF4C8996FB92427AE41E4649B934CA495991B7852B855"], None),
        ];
        for (values, want) in rows {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(CONTENT_SHA256, HeaderValue::from_str(value).unwrap());
            }
            assert_eq!(AnnouncedPayload::of(&headers), want, "{values:?}");
        }
    }

    #[test]
    fn a_repeated_field_is_not_signed() {
        let (uri, mut headers) = (Uri::from_static("/?a=%C3%A4"), HeaderMap::new());
        for (name, value) in [
            ("x-amz-date", "1"),
            ("x-amz-date", "2"),
            ("x-amz-meta-a", "1"),
            ("accept", "a"),
            ("accept", "b"),
            ("content-type", "text/plain"),
        ] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        headers.insert(CONTENT_SHA256, HeaderValue::from_static("UNSIGNED-PAYLOAD"));
        let signed = [("x-amz-meta-a", "1"), ("content-type", "text/plain")];
        assert_eq!(
            signed_fields(&headers, &uri).unwrap(),
            signed.map(|(name, value)| (name.to_owned(), value.to_owned()))
        );
        headers.append("x-amz-meta-a", HeaderValue::from_static("2"));
        assert_eq!(signed_fields(&headers, &uri), Err(Deny::RequestMalformed.into()));
        headers.remove("x-amz-meta-a");
        assert_eq!(signed_fields(&headers, &Uri::from_static("/?a=%FF")), Err(Deny::RequestMalformed.into()));
    }
}

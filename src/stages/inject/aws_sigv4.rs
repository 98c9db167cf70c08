//! Signs the upstream request for AWS (Signature Version 4), after everything else in it has been decided.
//!
//! A signature of the client's own, made with a placeholder as its key, is replaced. The fields that are signed are `Host`,
//! `Content-Type` and those that begin with `x-amz-`, since others may change on the way to the origin.

use std::time::SystemTime;

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{
    PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningSettings, UriPathNormalizationMode,
    sign,
};
use aws_sigv4::sign::v4;
use aws_smithy_runtime_api::client::identity::Identity;
use http::header::{CONTENT_TYPE, HeaderName, HeaderValue};
use http::request::Parts;
use http::{HeaderMap, Uri};
use http_body::Body;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

use super::set_sensitive;
use crate::model::refusal::{Deny, Verdict};
use crate::policy::aws::AwsScope;
use crate::policy::credential::Credential;
use crate::stages::message::aws_payload::{AnnouncedPayload, CONTENT_SHA256, REPLACED};
use crate::stages::message::request_body::RequestBody;

/// Signs a request whose head is complete.
///
/// # Errors
/// [`Deny::CredentialUnknown`] if the credential has no value; [`Deny::RequestMalformed`] for a field that cannot be signed;
/// [`Deny::RequestTooLarge`] for a body that has to be signed and has not been read.
pub(super) fn sign_request(
    credential: &Credential,
    scope: &AwsScope,
    parts: &mut Parts,
    body: &RequestBody,
) -> Verdict<()> {
    let (Some(key), Some(secret)) = (credential.aws(), credential.value()) else {
        return Err(Deny::CredentialUnknown.into());
    };
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| Deny::CredentialUnknown);
    let token = key.session_token.as_ref().map(|token| text(token.expose())).transpose()?;
    // The library wipes its copies.
    let identity: Identity = Credentials::new(&*key.access_key_id, text(secret.expose())?, token, None, "exeat").into();
    let announced = AnnouncedPayload::of(&parts.headers).ok_or(Deny::RequestMalformed)?;
    for name in REPLACED {
        parts.headers.remove(name);
    }
    let has_payload_field = scope.is_s3() || announced != AnnouncedPayload::None;
    let payload = payload(announced, scope, body)?;
    parts.headers.remove(CONTENT_SHA256);
    join_repeated(&mut parts.headers)?;
    let signed = signed_fields(&parts.headers)?;
    let mut settings = SigningSettings::default();
    if has_payload_field {
        settings.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
    }
    if scope.is_s3() {
        settings.percent_encoding_mode = PercentEncodingMode::Single;
        settings.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
    }
    let params = v4::SigningParams::builder()
        .identity(&identity)
        .region(&scope.region)
        .name(&scope.service)
        .time(SystemTime::now())
        .settings(settings)
        .build()
        .map_err(|_| Deny::CredentialUnknown)?
        .into();
    // Its authority is `Host`.
    let uri = if scope.is_s3() { with_canonical_path(&parts.uri) } else { parts.uri.to_string() };
    let request = SignableRequest::new(parts.method.as_str(), &uri, signed.iter().map(|(a, b)| (&**a, &**b)), payload);
    let output = sign(request.map_err(|_| Deny::RequestMalformed)?, &params).map_err(|_| Deny::RequestMalformed)?;
    let (instructions, _) = output.into_parts();
    for (name, value) in instructions.headers() {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| Deny::RequestMalformed)?;
        set_sensitive(&mut parts.headers, &name, value.as_bytes())?;
    }
    Ok(())
}

/// Returns a URI with its path as S3 puts it into the signature: decoded and encoded again, so that only unreserved characters and
/// slashes are literal. It is sent as it was. For other services the library encodes the path as it is sent.
fn with_canonical_path(uri: &Uri) -> String {
    let decoded = percent_decode_str(uri.path()).collect::<Vec<u8>>();
    let path = percent_encode(&decoded, NOT_IN_PATH);
    let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
    let scheme = uri.scheme_str().unwrap_or("https");
    let authority = uri.authority().map(http::uri::Authority::as_str).unwrap_or_default();
    format!("{scheme}://{authority}{path}{query}")
}

/// All but the unreserved characters of RFC 3986 §2.3 and the slash.
const NOT_IN_PATH: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~').remove(b'/');

fn payload<'b>(announced: AnnouncedPayload, scope: &AwsScope, body: &'b RequestBody) -> Verdict<SignableBody<'b>> {
    match (announced, body.buffered()) {
        (AnnouncedPayload::Hash(hash), _) => Ok(SignableBody::Precomputed(hash)),
        (AnnouncedPayload::Unsigned, _) => Ok(SignableBody::UnsignedPayload),
        (AnnouncedPayload::UnsignedChunks, _) => Ok(SignableBody::StreamingUnsignedPayloadTrailer),
        (AnnouncedPayload::None, Some((data, _))) => Ok(SignableBody::Bytes(data)),
        (AnnouncedPayload::None, None) if body.is_end_stream() => Ok(SignableBody::empty()),
        (AnnouncedPayload::None, None) if scope.is_s3() => Ok(SignableBody::UnsignedPayload),
        // `inspect` reads such bodies, or refuses them.
        (AnnouncedPayload::None, None) => Err(Deny::RequestTooLarge.into()),
    }
}

/// A field that is signed has one value, joined as in the signature (RFC 9110 §5.3), so that the origin cannot join it in another
/// way.
fn join_repeated(headers: &mut HeaderMap) -> Verdict<()> {
    let repeated = headers.keys().filter(|name| is_signed(name) && headers.get_all(*name).iter().count() > 1);
    let repeated: Vec<HeaderName> = repeated.cloned().collect();
    for name in repeated {
        let values: Vec<&[u8]> = headers.get_all(&name).iter().map(HeaderValue::as_bytes).collect();
        let joined = HeaderValue::from_bytes(&values.join(&b","[..])).map_err(|_| Deny::RequestMalformed)?;
        headers.insert(name, joined);
    }
    Ok(())
}

fn signed_fields(headers: &HeaderMap) -> Verdict<Vec<(String, String)>> {
    let signed = headers.iter().filter(|(name, _)| is_signed(name));
    signed
        .map(|(name, value)| Ok((name.to_string(), value.to_str().map_err(|_| Deny::RequestMalformed)?.to_owned())))
        .collect()
}

fn is_signed(name: &HeaderName) -> bool {
    *name == CONTENT_TYPE || name.as_str().starts_with("x-amz-")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repeated_fields_are_sent_as_they_are_signed() {
        let mut headers = HeaderMap::new();
        for (name, value) in [("x-amz-meta-a", "1"), ("x-amz-meta-a", "2, 3"), ("accept", "a"), ("accept", "b")] {
            headers.append(HeaderName::from_static(name), HeaderValue::from_static(value));
        }
        join_repeated(&mut headers).unwrap();
        assert_eq!(headers.get_all("x-amz-meta-a").iter().collect::<Vec<_>>(), ["1,2, 3"]);
        assert_eq!(headers.get_all("accept").iter().count(), 2);
        assert_eq!(signed_fields(&headers).unwrap(), [("x-amz-meta-a".to_owned(), "1,2, 3".to_owned())]);
    }
}

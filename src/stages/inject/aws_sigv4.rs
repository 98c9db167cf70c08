//! Signs the upstream request for AWS (Signature Version 4 and 4A), after everything else in it has been decided.
//!
//! A signature of the client's own, made with a placeholder as its key, is replaced. The fields that are signed are `Host`,
//! `Content-Type` and those that begin with `x-amz-`, since others may change on the way to the origin.

use std::time::SystemTime;

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{
    PayloadChecksumKind, PercentEncodingMode, SignableBody, SignableRequest, SigningParams, SigningSettings,
    UriPathNormalizationMode, sign,
};
use aws_sigv4::sign::{v4, v4a};
use aws_smithy_runtime_api::client::identity::Identity;
use http::Uri;
use http::header::HeaderName;
use http::request::Parts;
use http_body::Body;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};

use super::set_sensitive;
use crate::model::refusal::{Deny, Verdict};
use crate::policy::aws::{AwsAlgorithm, AwsScope};
use crate::policy::credential::Credential;
use crate::stages::message::aws_fields::{self, AnnouncedPayload, PayloadHash};
use crate::stages::message::request_body::RequestBody;

/// Signs a request whose head is complete.
///
/// # Errors
/// [`Deny::CredentialUnknown`] if the credential has no value; [`Deny::RequestMalformed`] for a field that cannot be signed or is
/// repeated, and for a query that is not in UTF-8;
/// [`Deny::RequestTooLarge`] for a body that has to be signed and has not been read.
pub(super) fn sign_request(
    credential: &Credential,
    scope: &AwsScope,
    parts: &mut Parts,
    body: &RequestBody,
) -> Verdict<()> {
    let (Some(key), Some(secret)) = (credential.aws_key(), credential.value()) else {
        return Err(Deny::CredentialUnknown.into());
    };
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).map_err(|_| Deny::CredentialUnknown);
    let token = key.session_token.as_ref().map(|token| text(token.secret().expose())).transpose()?;
    // The library wipes these copies, but not the one that it derives the signing key from.
    let identity: Identity = Credentials::new(&*key.access_key_id, text(secret.expose())?, token, None, "exeat").into();
    let announced = AnnouncedPayload::of(&parts.headers).ok_or(Deny::RequestMalformed)?;
    let has_payload_field = scope.is_s3() || announced != AnnouncedPayload::None;
    let hash = parts.extensions.remove::<PayloadHash>();
    let payload = payload_to_sign(announced, scope, hash, body)?;
    // Checked by `authorize` already, before an approval is used up.
    let signed = aws_fields::signed_fields(&parts.headers, &parts.uri)?;
    let mut settings = SigningSettings::default();
    if has_payload_field {
        settings.payload_checksum_kind = PayloadChecksumKind::XAmzSha256;
    }
    if scope.is_s3() {
        settings.percent_encoding_mode = PercentEncodingMode::Single;
        settings.uri_path_normalization_mode = UriPathNormalizationMode::Disabled;
    }
    let params = params(&identity, scope, settings)?;
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

fn params<'p>(identity: &'p Identity, scope: &'p AwsScope, settings: SigningSettings) -> Verdict<SigningParams<'p>> {
    let (region, service, now) = (&scope.region, &scope.service, SystemTime::now());
    match scope.algorithm {
        AwsAlgorithm::V4 => {
            let params = v4::SigningParams::builder().identity(identity).region(region).name(service);
            params.time(now).settings(settings).build().map(Into::into).map_err(|_| Deny::CredentialUnknown.into())
        }
        AwsAlgorithm::V4a => {
            let params = v4a::SigningParams::builder().identity(identity).region_set(region).name(service);
            params.time(now).settings(settings).build().map(Into::into).map_err(|_| Deny::CredentialUnknown.into())
        }
    }
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

fn payload_to_sign<'b>(
    announced: AnnouncedPayload,
    scope: &AwsScope,
    hash: Option<PayloadHash>,
    body: &'b RequestBody,
) -> Verdict<SignableBody<'b>> {
    match (announced, body.buffered()) {
        (AnnouncedPayload::Hash(hash), _) => Ok(SignableBody::Precomputed(hash)),
        (AnnouncedPayload::Unsigned, _) => Ok(SignableBody::UnsignedPayload),
        (AnnouncedPayload::UnsignedChunks, _) => Ok(SignableBody::StreamingUnsignedPayloadTrailer),
        (AnnouncedPayload::None, Some((data, _))) => {
            // A body to S3 that was read is small.
            Ok(hash.map_or(SignableBody::Bytes(data), |PayloadHash(hash)| SignableBody::Precomputed(hash)))
        }
        (AnnouncedPayload::None, None) if body.is_end_stream() => Ok(SignableBody::empty()),
        (AnnouncedPayload::None, None) if scope.is_s3() => Ok(SignableBody::UnsignedPayload),
        // `inspect` reads such bodies, or refuses them.
        (AnnouncedPayload::None, None) => Err(Deny::RequestTooLarge.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_unreserved_characters_are_literal_in_a_path_for_s3() {
        for (path, want) in
            [("/a,b", "/a%2Cb"), ("/a%2cb", "/a%2Cb"), ("/%41+b", "/A%2Bb"), ("/ä%20", "/%C3%A4%20"), ("/", "/")]
        {
            let uri = Uri::builder()
                .scheme("https")
                .authority("b.test")
                .path_and_query(format!("{path}?x=,"))
                .build()
                .unwrap();
            assert_eq!(with_canonical_path(&uri), format!("https://b.test{want}?x=,"), "{path}");
        }
    }
}

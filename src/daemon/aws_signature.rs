//! Signs requests of the proxy's own to AWS (Signature Version 4).

use std::time::SystemTime;

use aws_credential_types::Credentials;
use aws_sigv4::http_request::{SignableBody, SignableRequest, SigningSettings, sign};
use aws_sigv4::sign::v4;
use http::HeaderName;
use zeroize::Zeroizing;

use crate::policy::hook_url::HookUrl;

/// The request cannot be signed.
pub(super) struct Unsignable;

/// A request to be signed.
pub(super) struct UnsignedRequest<'r> {
    pub(super) method: &'r str,
    pub(super) url: &'r HookUrl,
    /// The path after that of the URL.
    pub(super) path: &'r str,
    pub(super) fields: Vec<(&'r str, &'r str)>,
    pub(super) body: &'r [u8],
}

/// The scope and the time of a signature.
pub(super) struct SignedFor<'s> {
    pub(super) region: &'s str,
    pub(super) service: &'s str,
    pub(super) time: SystemTime,
}

/// Returns the fields that sign a request.
pub(super) fn signature(
    request: &UnsignedRequest<'_>,
    (id, secret, token): (String, String, Option<String>),
    signed_for: &SignedFor<'_>,
) -> Result<Vec<(HeaderName, Zeroizing<String>)>, Unsignable> {
    // The library wipes these copies.
    let identity = Credentials::new(id, secret, token, None, "exeat").into();
    let params = v4::SigningParams::builder()
        .identity(&identity)
        .region(signed_for.region)
        .name(signed_for.service)
        .time(signed_for.time)
        .settings(SigningSettings::default())
        .build()
        .map_err(|_| Unsignable)?
        .into();
    let base = request.url.path().trim_end_matches('/');
    let uri = format!("https://{}{base}{}", request.url.host_field(), request.path);
    let (fields, body) = (request.fields.iter().copied(), SignableBody::Bytes(request.body));
    let signable = SignableRequest::new(request.method, &uri, fields, body).map_err(|_| Unsignable)?;
    let (instructions, _) = sign(signable, &params).map_err(|_| Unsignable)?.into_parts();
    let field = |(name, value): (&str, &str)| {
        let name = HeaderName::from_bytes(name.as_bytes()).map_err(|_| Unsignable)?;
        Ok((name, Zeroizing::new(value.to_owned())))
    };
    instructions.headers().map(field).collect()
}

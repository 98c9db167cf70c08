//! The proxy's own header fields, except those of tool calls ([`super::tool`]). An origin's or client's own fields of
//! these names pass in neither direction.

use http::HeaderName;

/// The prefix of the proxy's own fields.
pub const PREFIX: &str = "exeat-";

/// Names the credential to inject. Read and removed.
pub const EXEAT_CREDENTIAL: HeaderName = HeaderName::from_static("exeat-credential");
/// Makes `${NONCE.NAME}` the only placeholder. Read and removed.
pub const EXEAT_SWAP: HeaderName = HeaderName::from_static("exeat-swap");

/// The refusal's code: the one thing of an answer that a client may believe comes from the proxy.
pub const EXEAT_REFUSAL: HeaderName = HeaderName::from_static("exeat-refusal");
/// The id under which the exchange stands in the audit log. Every answer has one.
pub const EXEAT_REQUEST_ID: HeaderName = HeaderName::from_static("exeat-request-id");
/// The credential that went along.
pub const EXEAT_CREDENTIAL_USED: HeaderName = HeaderName::from_static("exeat-credential-used");
/// The original length of a body that was cut, or `unknown`.
pub const EXEAT_TRUNCATED: HeaderName = HeaderName::from_static("exeat-truncated");
/// How many places were overwritten.
pub const EXEAT_REDACTED: HeaderName = HeaderName::from_static("exeat-redacted");
/// Bytes that were taken from the origin.
pub const EXEAT_RESPONSE_SIZE: HeaderName = HeaderName::from_static("exeat-response-size");

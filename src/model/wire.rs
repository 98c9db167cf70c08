//! The header fields between the proxy and its clients, except those of tool calls ([`super::tool`]). The proxy removes
//! fields of these names from requests to origins and from their responses.

use http::HeaderName;

/// The prefix of the proxy's own fields.
pub const PREFIX: &str = "exeat-";

/// Names the credential to inject. Removed before forwarding.
pub const EXEAT_CREDENTIAL: HeaderName = HeaderName::from_static("exeat-credential");
/// Makes `${NONCE.NAME}` the only placeholder. Removed before forwarding.
pub const EXEAT_SWAP: HeaderName = HeaderName::from_static("exeat-swap");

/// The refusal's code. Its presence proves to a client that the proxy generated the response.
pub const EXEAT_REFUSAL: HeaderName = HeaderName::from_static("exeat-refusal");
/// The id of the exchange in the audit log. Every response has one.
pub const EXEAT_REQUEST_ID: HeaderName = HeaderName::from_static("exeat-request-id");
/// The credential that was sent to the origin.
pub const EXEAT_CREDENTIAL_USED: HeaderName = HeaderName::from_static("exeat-credential-used");
/// The original length of a truncated body, or `unknown`.
pub const EXEAT_TRUNCATED: HeaderName = HeaderName::from_static("exeat-truncated");
/// The number of redacted places.
pub const EXEAT_REDACTED: HeaderName = HeaderName::from_static("exeat-redacted");
/// The number of bytes read from the origin.
pub const EXEAT_RESPONSE_SIZE: HeaderName = HeaderName::from_static("exeat-response-size");

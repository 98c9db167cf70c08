//! The fields of a request that are not sent to the origin.

use http::HeaderMap;
use http::header::{
    ACCEPT_CHARSET, ACCEPT_ENCODING, CONTENT_LENGTH, EXPECT, HOST, HeaderName, IF_RANGE, RANGE,
    SEC_WEBSOCKET_EXTENSIONS,
};

use super::strip;
use crate::policy::credential::Placement;
use crate::stages::authorize::Grant;
use crate::stages::message::headers;
use crate::stages::message::headers::HopByHop;

/// The fields of a request that are not sent to the origin. `inspect` ignores them and `inject` removes them, so that
/// the fields scanned as neighbors are neighbors in the request that is sent.
pub(crate) struct UnsentFields<'g> {
    hop_by_hop: HopByHop,
    removes_overrides: bool,
    reserved: Option<&'g [Placement]>,
    /// The response must be decodable, and whether the destination may know a credential.
    redaction: Option<bool>,
}

impl<'g> UnsentFields<'g> {
    /// Reads the fields of the request that `grant` was given for.
    pub(crate) fn of(grant: &'g Grant, headers: &HeaderMap) -> Self {
        Self {
            hop_by_hop: HopByHop::of(headers),
            removes_overrides: grant.is_restricted(),
            reserved: grant.reserved_placements(),
            redaction: (!grant.values_in_response().is_empty()).then(|| grant.may_know_credential()),
        }
    }

    /// Returns true for a field that is removed or written anew.
    pub(crate) fn contains(&self, name: &HeaderName) -> bool {
        // The pin determines the host, and the body its length (RFC 9112 §6.3). Extensions of WebSocket could compress
        // payloads, which could then not be scanned.
        [HOST, EXPECT, CONTENT_LENGTH, SEC_WEBSOCKET_EXTENSIONS].contains(name)
            || self.hop_by_hop.contains(name)
            || (self.removes_overrides && headers::is_override(name))
            // The sandbox could send keys of its own.
            || self.reserved.is_some_and(|places| strip::is_reserved(name, places))
            || self.redaction.is_some_and(|may_know| UNREDACTABLE.contains(name) || (may_know && PARTIAL.contains(name)))
    }
}

/// Fields that request a coding or a delta. Responses can be redacted in some of these codings only.
const UNREDACTABLE: [HeaderName; 4] = [
    ACCEPT_ENCODING,
    HeaderName::from_static("grpc-accept-encoding"),
    HeaderName::from_static("connect-accept-encoding"),
    HeaderName::from_static("a-im"),
];

/// Fields that request a range, which could contain a part of an echoed credential, or UTF-16 or EBCDIC, in which an
/// echo would not be found.
const PARTIAL: [HeaderName; 4] = [RANGE, IF_RANGE, HeaderName::from_static("x-ms-range"), ACCEPT_CHARSET];

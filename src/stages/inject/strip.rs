//! The fields of a request that are not sent to the origin, and the fields and parameters from which origins read keys.
//! The latter are removed where only an injected credential may be sent, and from trailers.

use http::HeaderMap;
use http::header::{
    ACCEPT_CHARSET, ACCEPT_ENCODING, CONTENT_LENGTH, EXPECT, HOST, HeaderName, IF_RANGE, RANGE,
    SEC_WEBSOCKET_EXTENSIONS,
};

use crate::policy::credential::Placement;
use crate::stages::authorize::Grant;
use crate::stages::message::headers::HopByHop;
use crate::stages::message::{headers, query};

/// A field carries a key, session or password if its name contains one of these or ends with `key`.
const FIELD_WORDS: [&str; 11] = [
    "accesskey",
    "apikey",
    "auth",
    "cookie",
    "credential",
    "jwt",
    "password",
    "secret",
    "session",
    "subscriptionkey",
    "token",
];

/// Exceptions: these identify messages, caches or connections.
const FIELD_EXCEPTIONS: [&str; 6] =
    ["idempotencykey", "xidempotencykey", "mcpsessionid", "partitionkey", "secwebsocketkey", "surrogatekey"];

/// Parameters that carry a key. Compared by the whole name, since many APIs paginate with a `page_token`.
const PARAMETERS: [&str; 28] = [
    "accesskey",
    "accesstoken",
    "apikey",
    "apitoken",
    "appkey",
    "auth",
    "authkey",
    "authorization",
    "authtoken",
    "clientsecret",
    "idtoken",
    "jobtoken",
    "jwt",
    "key",
    "oauthtoken",
    "password",
    "privatetoken",
    "secret",
    "sessiontoken",
    "sig",
    "signature",
    "subscriptionkey",
    "token",
    "usertoken",
    "xamzcredential",
    "xamzsecuritytoken",
    "xamzsignature",
    "xgoogsignature",
];

/// Returns true if a field may carry a key.
pub(crate) fn carries_key(name: &HeaderName) -> bool {
    let folded = fold(name.as_str().as_bytes());
    let carries = folded.ends_with("key") || folded == "xpat" || FIELD_WORDS.iter().any(|word| folded.contains(word));
    carries && !FIELD_EXCEPTIONS.contains(&folded.as_str())
}

/// Returns true if a field may carry a key, or is the field of one of these placements.
pub(crate) fn is_reserved(name: &HeaderName, places: &[Placement]) -> bool {
    carries_key(name) || places.iter().any(|place| matches!(place, Placement::Field(field) if field == name))
}

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
            || self.reserved.is_some_and(|places| is_reserved(name, places))
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

/// Returns the query without such parameters and without the parameters of these placements.
pub(crate) fn without_parameters(query: &str, places: &[Placement]) -> String {
    let listed = |name: &[u8]| places.iter().any(|p| matches!(p, Placement::Parameter(own) if own.as_bytes() == name));
    query::remove_parameters(query, |name| PARAMETERS.contains(&fold(name).as_str()) || listed(name))
}

/// Folds a name: servers ignore case and separators, and some read `name[]` as `name`.
fn fold(name: &[u8]) -> String {
    let own = name.split(|byte| *byte == b'[').next().unwrap_or_default();
    own.iter().filter(|byte| byte.is_ascii_alphanumeric()).map(|byte| char::from(byte.to_ascii_lowercase())).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_keys_by_name() {
        let fields = [
            ("authorization", true),
            ("cookie", true),
            ("x_api_key", true),
            ("dd-api-key", true),
            ("ocp-apim-subscription-key", true),
            ("x-amz-security-token", true),
            ("x-vault-token", true),
            ("private-token", true),
            ("x-functions-key", true),
            ("x-jwt-assertion", true),
            ("idempotency-key", false),
            ("mcp-session-id", false),
            ("sec-websocket-key", false),
            ("content-type", false),
            ("if-none-match", false),
            ("x-request-id", false),
        ];
        for (name, want) in fields {
            assert_eq!(carries_key(&HeaderName::from_static(name)), want, "{name}");
        }
        let rows = [
            ("a=1&API_KEY=x&b", "a=1&b"),
            ("apiKey=x&access-token=x&page_token=kept", "page_token=kept"),
            ("a=1;api_key=x&b=2", "a=1&b=2"),
            ("%6bey=x", ""),
            ("api%20key=x&api_key[]=x&keys=kept", "keys=kept"),
            ("k.y=x", ""),
        ];
        let place = [Placement::Parameter("k.y".to_owned())];
        for (query, want) in rows {
            assert_eq!(without_parameters(query, &place), want, "{query}");
        }
    }
}

//! Fields and parameters from which origins read keys. `inject` removes them where only an injected credential may be
//! sent, and they are removed from trailers.

use http::header::HeaderName;

use crate::policy::credential::Placement;
use crate::stages::message::query;

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
const PARAMETERS: [&str; 31] = [
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
    "passwd",
    "privatetoken",
    "pwd",
    "secret",
    "sessionid",
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
    let carries = folded.ends_with("key")
        || folded.ends_with("pwd")
        || ["dpop", "xpass", "xpat"].contains(&&*folded)
        || FIELD_WORDS.iter().any(|word| folded.contains(word));
    carries && !FIELD_EXCEPTIONS.contains(&folded.as_str())
}

/// Returns true if a field may carry a key, or is the field of one of these placements.
pub(crate) fn is_reserved(name: &HeaderName, places: &[Placement]) -> bool {
    let is_same = |field: &HeaderName| fold(field.as_str().as_bytes()) == fold(name.as_str().as_bytes());
    carries_key(name) || places.iter().any(|place| matches!(place, Placement::Field(field) if is_same(field)))
}

/// Returns the query without such parameters and without the parameters of these placements.
pub(crate) fn without_parameters(query: &str, places: &[Placement]) -> String {
    query::remove_parameters(query, |name| {
        let folded = fold(name);
        // A name without letters and digits has no folded form.
        let is_same = |own: &[u8]| own == name || (!folded.is_empty() && fold(own) == folded);
        let is_own = |place: &Placement| match place {
            // Some servers read a parameter of the query before one of the body.
            Placement::Parameter(own) | Placement::Form(Some(own)) => is_same(own.as_bytes()),
            Placement::Json(Some(pointer)) => pointer.rsplit('/').next().is_some_and(|own| is_same(own.as_bytes())),
            _ => false,
        };
        PARAMETERS.contains(&folded.as_str()) || places.iter().any(is_own)
    })
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
            ("dpop", true),
            ("x_pwd", true),
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
            ("K-Y=x&ky=x&k=kept", "k=kept"),
        ];
        let field = [Placement::Field(HeaderName::from_static("x-zed"))];
        assert!(is_reserved(&HeaderName::from_static("x_zed"), &field), "servers treat both alike");
        assert!(!is_reserved(&HeaderName::from_static("x-zeds"), &field));
        let place = [Placement::Parameter("k.y".to_owned())];
        for (query, want) in rows {
            assert_eq!(without_parameters(query, &place), want, "{query}");
        }
        let in_body = [Placement::Form(Some("hapi_key".to_owned())), Placement::Json(Some("/auth/zed".to_owned()))];
        assert_eq!(without_parameters("a=1&hapikey=x&Zed=x&auth=x", &in_body), "a=1");
    }
}

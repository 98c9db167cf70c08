//! Fields and parameters that origins take keys from. Not a stage: what `inject` takes out where only an
//! injected credential may pass, and `upload` out of trailers.

use http::HeaderMap;
use http::header::HeaderName;

use super::query;
use crate::policy::credential::Place;

/// A field whose name holds one of these carries a key, a session or a password.
const IN_FIELDS: [&str; 10] = [
    "accesskey",
    "apikey",
    "auth",
    "cookie",
    "credential",
    "password",
    "secret",
    "session",
    "subscriptionkey",
    "token",
];

/// Parameters with these names do. By the whole name: many an API turns its pages with a `page_token`.
const PARAMETERS: [&str; 24] = [
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
    "jobtoken",
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
    "xamzcredential",
    "xamzsecuritytoken",
    "xamzsignature",
];

/// True for a field that can carry a key.
pub(super) fn is_field(name: &HeaderName) -> bool {
    let folded = folded(name.as_str().as_bytes());
    IN_FIELDS.iter().any(|word| folded.contains(word))
}

/// Takes all such fields out, and those that these places name.
pub(super) fn remove_fields(headers: &mut HeaderMap, places: &[Place]) {
    let listed = |name: &HeaderName| places.iter().any(|place| *place == Place::Field(name.clone()));
    let keys: Vec<HeaderName> = headers.keys().filter(|name| is_field(name) || listed(name)).cloned().collect();
    for name in keys {
        headers.remove(name);
    }
}

/// The query without such parameters, and without those that these places name.
pub(super) fn without_parameters(query: &str, places: &[Place]) -> String {
    let listed = |name: &[u8]| places.iter().any(|p| matches!(p, Place::Parameter(own) if own.as_bytes() == name));
    query::without(query, |name| PARAMETERS.contains(&folded(name).as_str()) || listed(name))
}

/// Servers tell neither case nor these characters apart.
fn folded(name: &[u8]) -> String {
    let kept = name.iter().filter(|byte| !b"-_.".contains(byte)).map(u8::to_ascii_lowercase);
    kept.map(char::from).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_known_by_their_names() {
        let fields = [
            ("authorization", true),
            ("cookie", true),
            ("x_api_key", true),
            ("dd-api-key", true),
            ("ocp-apim-subscription-key", true),
            ("x-amz-security-token", true),
            ("x-vault-token", true),
            ("private-token", true),
            ("idempotency-key", false),
            ("content-type", false),
            ("if-none-match", false),
            ("x-request-id", false),
        ];
        for (name, want) in fields {
            assert_eq!(is_field(&HeaderName::from_static(name)), want, "{name}");
        }
        let rows = [
            ("a=1&API_KEY=x&b", "a=1&b"),
            ("apiKey=x&access-token=x&page_token=kept", "page_token=kept"),
            ("a=1;api_key=x&b=2", "a=1&b=2"),
            ("%6bey=x", ""),
            ("k.y=x", ""),
        ];
        let place = [Place::Parameter("k.y".to_owned())];
        for (query, want) in rows {
            assert_eq!(without_parameters(query, &place), want, "{query}");
        }
    }
}

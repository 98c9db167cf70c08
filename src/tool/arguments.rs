//! Parses the arguments of a tool call. A model may give them in any shape.

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE};
use http::{HeaderMap, HeaderName, HeaderValue};
use serde_json::{Map, Value};

use super::messages;
use crate::model::refusal::{Deny, Refusal};
use crate::model::wire;

/// A problem with the arguments: the text for the model, and the code for the record.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct ArgumentError {
    pub(super) text: String,
    pub(super) reason: Refusal,
}

/// The arguments of a call of `tool`.
pub(super) struct Arguments<'a> {
    pub(super) tool: &'a str,
    pub(super) all: &'a Map<String, Value>,
}

impl ArgumentError {
    pub(super) fn malformed(text: String) -> Self {
        Self { text, reason: Deny::RequestMalformed.into() }
    }
}

impl From<Refusal> for ArgumentError {
    fn from(reason: Refusal) -> Self {
        Self { text: messages::default_text(reason), reason }
    }
}

impl<'a> Arguments<'a> {
    /// Returns a member. `null` counts as absent.
    pub(super) fn get(&self, field: &str) -> Option<&'a Value> {
        self.all.get(field).filter(|value| !value.is_null())
    }

    /// Returns a required text that is not empty.
    pub(super) fn text(&self, field: &str) -> Result<&'a str, ArgumentError> {
        match self.get(field) {
            None => Err(ArgumentError::malformed(messages::field_required(field, self.tool))),
            Some(Value::String(text)) if text.is_empty() => {
                Err(ArgumentError::malformed(messages::field_required(field, self.tool)))
            }
            Some(Value::String(text)) => Ok(text),
            Some(_) => Err(self.wrong(field, "must be a string")),
        }
    }

    /// Returns a required text, which may be empty.
    pub(super) fn any_text(&self, field: &str) -> Result<&'a str, ArgumentError> {
        match self.get(field) {
            None => Err(ArgumentError::malformed(messages::field_required(field, self.tool))),
            Some(Value::String(text)) => Ok(text),
            Some(_) => Err(self.wrong(field, "must be a string")),
        }
    }

    pub(super) fn optional_text(&self, field: &str) -> Result<Option<&'a str>, ArgumentError> {
        match self.get(field) {
            None => Ok(None),
            Some(_) => self.text(field).map(Some),
        }
    }

    /// Returns a whole number from 1 to `most`.
    pub(super) fn number(&self, field: &str, most: u64) -> Result<Option<u64>, ArgumentError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let number = value.as_u64().filter(|number| (1..=most).contains(number));
        number.map(Some).ok_or_else(|| self.wrong(field, &format!("must be a whole number from 1 to {most}")))
    }

    /// Returns a list, which is empty if it is left out.
    pub(super) fn list(&self, field: &str) -> Result<&'a [Value], ArgumentError> {
        match self.get(field) {
            None => Ok(&[]),
            Some(Value::Array(all)) => Ok(all),
            Some(_) => Err(self.wrong(field, "must be a list")),
        }
    }

    /// Returns a list of texts that is not empty.
    pub(super) fn texts(&self, field: &str) -> Result<Option<Vec<String>>, ArgumentError> {
        let Some(value) = self.get(field) else { return Ok(None) };
        let texts = value.as_array().filter(|all| !all.is_empty());
        let texts = texts.and_then(|all| all.iter().map(|one| one.as_str().map(str::to_owned)).collect());
        texts.map(Some).ok_or_else(|| self.wrong(field, "must be a list of strings that is not empty"))
    }

    pub(super) fn object(&self, field: &str) -> Result<Option<&'a Map<String, Value>>, ArgumentError> {
        match self.get(field) {
            None => Ok(None),
            Some(Value::Object(object)) => Ok(Some(object)),
            Some(_) => Err(self.wrong(field, "must be an object")),
        }
    }

    pub(super) fn wrong(&self, field: &str, must: &str) -> ArgumentError {
        ArgumentError::malformed(messages::field_wrong(field, must, self.tool))
    }

    /// Returns the query parameters: texts, numbers, booleans, and lists of them for repeated names.
    pub(super) fn query(&self) -> Result<Vec<(String, String)>, ArgumentError> {
        let mut pairs = Vec::new();
        for (name, value) in self.object("query_params")?.into_iter().flatten() {
            let values = value.as_array().map_or(std::slice::from_ref(value), Vec::as_slice);
            for value in values.iter().filter(|value| !value.is_null()) {
                let text = scalar(value).ok_or_else(|| self.wrong("query_params", "must hold strings and numbers"))?;
                pairs.push((name.clone(), text));
            }
        }
        Ok(pairs)
    }

    /// Returns the header fields without those that the caller must not set. `may_authorize` permits `Authorization`.
    pub(super) fn fields(&self, may_authorize: bool) -> Result<HeaderMap, ArgumentError> {
        let mut fields = HeaderMap::new();
        for (name, value) in self.object("headers")?.into_iter().flatten() {
            let text = scalar(value).ok_or_else(|| self.wrong("headers", "must hold strings"))?;
            // Dropped fields are checked too: a control character is a sign of an attack.
            if name.chars().chain(text.chars()).any(char::is_control) {
                return Err(Refusal::from(Deny::RequestMalformed).into());
            }
            let name: HeaderName = name.parse().map_err(|_| Refusal::from(Deny::RequestMalformed))?;
            if is_reserved(name.as_str()) || (name == AUTHORIZATION && !may_authorize) {
                continue;
            }
            let value = HeaderValue::from_bytes(text.as_bytes()).map_err(|_| Refusal::from(Deny::RequestMalformed))?;
            if fields.try_append(name, value).is_err() {
                return Err(Refusal::from(Deny::HeadTooLarge).into());
            }
        }
        Ok(fields)
    }

    /// Returns a JSON body and sets its `Content-Type`.
    pub(super) fn json(&self, fields: &mut HeaderMap) -> Result<Bytes, ArgumentError> {
        let Some(body) = self.object("body")? else { return Ok(Bytes::new()) };
        ensure_json_type(fields);
        Ok(written(&Value::Object(body.clone())))
    }
}

/// Keeps a media type that is JSON and replaces any other.
pub(super) fn ensure_json_type(fields: &mut HeaderMap) {
    let is_json = |value: &HeaderValue| {
        let kind = value.to_str().unwrap_or_default().split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        kind == "application/json" || (kind.starts_with("application/") && kind.ends_with("+json"))
    };
    if !fields.get(CONTENT_TYPE).is_some_and(is_json) {
        fields.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    }
}

pub(super) fn written(value: &Value) -> Bytes {
    Bytes::from(value.to_string())
}

fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(truth) => Some(truth.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

/// Whether models and packs must not set a field, given in lower case: framing, hop-by-hop and routing fields, fields
/// for the proxy, and codings that the client does not decode.
pub(super) fn is_reserved(name: &str) -> bool {
    const OURS: [&str; 10] = [
        "accept-encoding",
        "connection",
        "content-length",
        "expect",
        "host",
        "keep-alive",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    ];
    OURS.contains(&name) || name.starts_with("proxy-") || name.starts_with(wire::PREFIX)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn fields(headers: Value, may_authorize: bool) -> Result<Vec<(String, String)>, ArgumentError> {
        let all = json!({ "headers": headers });
        let fields = Arguments { tool: "x", all: all.as_object().unwrap() }.fields(may_authorize)?;
        let text = |value: &HeaderValue| String::from_utf8(value.as_bytes().to_vec()).unwrap();
        Ok(fields.iter().map(|(name, value)| (name.to_string(), text(value))).collect())
    }

    #[test]
    fn reserved_fields_are_dropped_and_control_characters_refused() {
        for dropped in [
            "Authorization",
            "host",
            "Content-Length",
            "Transfer-Encoding",
            "Connection",
            "Keep-Alive",
            "TE",
            "Trailer",
            "Upgrade",
            "Expect",
            "Accept-Encoding",
            "Proxy-Authorization",
            "Proxy-Connection",
            "Exeat-Credential",
            "EXEAT-Tool",
            "Exeat-Swap",
            "Exeat-Anything",
        ] {
            assert_eq!(fields(json!({ dropped: "x" }), false), Ok(vec![]), "{dropped}");
        }
        let kept = |name: &str, value: &str| Ok(vec![(name.to_owned(), value.to_owned())]);
        assert_eq!(fields(json!({"Authorization": "x"}), true), kept("authorization", "x"));
        assert_eq!(fields(json!({"X-Count": 3}), false), kept("x-count", "3"));
        assert_eq!(fields(json!({"X-Text": "ü"}), false), kept("x-text", "ü"));
        for wrong in [
            json!({"X": "a\r\nHost: evil"}),
            json!({"X": "a\nb"}),
            json!({"X": "\u{0}"}),
            json!({"X": "a\tb"}),
            json!({"X": "\u{85}"}),
            json!({"X\r\nY": "a"}),
            json!({"Exeat-Credential": "a\r\nX: y"}),
            json!({"X Y": "a"}),
            json!({"": "a"}),
            json!({"X:": "a"}),
        ] {
            assert_eq!(fields(wrong.clone(), false), Err(Refusal::from(Deny::RequestMalformed).into()), "{wrong}");
        }
        for wrong in [json!({"X": null}), json!({"X": []}), json!({"X": {}}), json!([]), json!("X: y"), json!(1)] {
            assert!(fields(wrong.clone(), false).is_err(), "{wrong}");
        }
    }

    #[test]
    fn a_media_type_other_than_json_is_replaced() {
        for (given, want) in [
            (None, "application/json"),
            (Some("text/plain"), "application/json"),
            (Some("application/json; charset=utf-8"), "application/json; charset=utf-8"),
            (Some("application/merge-patch+json"), "application/merge-patch+json"),
        ] {
            let mut fields = HeaderMap::new();
            if let Some(given) = given {
                fields.insert(CONTENT_TYPE, HeaderValue::from_static(given));
            }
            ensure_json_type(&mut fields);
            assert_eq!(fields[CONTENT_TYPE], want);
        }
    }
}

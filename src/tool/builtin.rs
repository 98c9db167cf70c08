//! The built-in tools: `api_call`, `http_get`, `http_post`, `webhook` and `http_request`.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Method};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use serde_json::{Map, Value, json};

use super::arguments::{ArgumentError, Arguments, ensure_json_type, written};
use super::call::Call;
use super::{messages, url};
use crate::model::refusal::{Deny, Refusal};
use crate::model::tool::{MAX_TIMEOUT, Tool};

/// Returns the description of a tool for a model.
pub(super) fn description(tool: Tool) -> &'static str {
    match tool {
        Tool::ApiCall => {
            "Make an authenticated HTTP request to an external API. The credential is injected automatically into the auth header -- never include API keys in the URL, body, or custom headers."
        }
        Tool::HttpGet => {
            "Make an unauthenticated HTTP GET request to an approved domain. No credential is injected; use api_call where authentication is needed."
        }
        Tool::HttpPost => {
            "Make an unauthenticated HTTP POST request with a JSON body to an approved domain. No credential is injected; use api_call where authentication is needed."
        }
        Tool::Webhook => "Post JSON data to one of the webhook URLs that are registered for this task.",
        Tool::HttpRequest => {
            "Make an HTTP request to an approved destination. No credential is injected; Authorization headers are dropped."
        }
    }
}

/// Returns the JSON schema of a tool's arguments.
pub(super) fn schema(tool: Tool) -> Value {
    let text = |description: &str| json!({ "type": "string", "description": description });
    let object = |description: &str| json!({ "type": "object", "description": description });
    match tool {
        Tool::ApiCall => json!({
            "type": "object",
            "properties": {
                "method": { "type": "string", "enum": ["GET", "POST", "PUT", "DELETE"], "description": "HTTP method" },
                "url": text("The API endpoint URL (HTTPS only)"),
                "credential": text("Name of the credential to use (e.g., LUNARCRUSH_API_KEY)"),
                "headers": object("Additional request headers (do NOT include auth headers)"),
                "body": object("Request body for POST/PUT (JSON)"),
                "query_params": object("URL query parameters"),
            },
            "required": ["method", "url", "credential"],
        }),
        Tool::HttpGet => json!({
            "type": "object",
            "properties": {
                "url": text("The URL to fetch (HTTPS only)"),
                "headers": object("Additional request headers (do NOT include auth headers)"),
                "query_params": object("URL query parameters"),
            },
            "required": ["url"],
        }),
        Tool::HttpPost | Tool::Webhook => json!({
            "type": "object",
            "properties": {
                "url": text(if tool == Tool::Webhook {
                    "A webhook URL that is registered for this task (HTTPS only)"
                } else {
                    "The URL to post to (HTTPS only)"
                }),
                "body": object("Request body (JSON)"),
                "headers": object("Additional request headers (do NOT include auth headers)"),
            },
            "required": ["url", "body"],
        }),
        Tool::HttpRequest => json!({
            "type": "object",
            "properties": {
                "method": text("HTTP method; GET if it is left out"),
                "url": text("The URL, http or https"),
                "headers": object("Request headers"),
                "body": { "description": "Request body: a string is sent as it is, anything else as JSON" },
                "timeout": {
                    "type": "integer", "minimum": 1, "maximum": MAX_TIMEOUT.as_secs(),
                    "description": "Seconds that the request may take",
                },
            },
            "required": ["url"],
        }),
    }
}

/// Returns the request for a model's arguments. They are checked in the order of the tool's documentation.
pub(super) fn call(tool: Tool, all: &Map<String, Value>) -> Result<Call, ArgumentError> {
    let given = Arguments { tool: tool.as_str(), all };
    match tool {
        Tool::ApiCall => api_call(&given),
        Tool::HttpGet => {
            let uri = url::target(given.text("url")?, &given.query()?)?;
            Ok(Call { fields: given.fields(false)?, ..bare(tool, Method::GET, uri) })
        }
        Tool::HttpPost | Tool::Webhook => {
            let uri = url::target(given.text("url")?, &[])?;
            if given.get("body").is_none() {
                return Err(ArgumentError::malformed(messages::field_required("body", tool.as_str())));
            }
            let mut fields = given.fields(false)?;
            let body = given.json(&mut fields)?;
            Ok(Call { fields, body, ..bare(tool, Method::POST, uri) })
        }
        Tool::HttpRequest => http_request(&given, false),
    }
}

/// Returns the request that a pack has composed. Its template may set `Authorization`.
pub(super) fn composed(all: &Map<String, Value>, may_authorize: bool) -> Result<Call, ArgumentError> {
    http_request(&Arguments { tool: Tool::HttpRequest.as_str(), all }, may_authorize)
}

fn api_call(given: &Arguments<'_>) -> Result<Call, ArgumentError> {
    let credential = match given.get("credential") {
        Some(Value::String(name)) if !name.is_empty() => name,
        Some(Value::String(_)) | None => {
            let text = messages::field_required("credential", given.tool);
            return Err(ArgumentError { text, reason: Deny::CredentialRequired.into() });
        }
        Some(_) => return Err(given.wrong("credential", "must be a string")),
    };
    let method = match &*given.text("method")?.to_ascii_uppercase() {
        "GET" => Method::GET,
        "POST" => Method::POST,
        "PUT" => Method::PUT,
        "DELETE" => Method::DELETE,
        _ => {
            let wrong = given.wrong("method", "must be one of GET, POST, PUT, DELETE");
            return Err(ArgumentError { reason: Deny::MethodNotAllowed.into(), ..wrong });
        }
    };
    let uri = url::target(given.text("url")?, &given.query()?)?;
    let mut fields = given.fields(false)?;
    let body = match given.object("body")? {
        Some(body) if method == Method::GET && body.is_empty() => Bytes::new(),
        Some(_) if method == Method::GET => return Err(given.wrong("body", "is not for GET")),
        _ => given.json(&mut fields)?,
    };
    // A name that is invalid in a field is encoded and sent. The proxy refuses it, after everything that it checks
    // first.
    let odd = || HeaderValue::try_from(utf8_percent_encode(credential, NON_ALPHANUMERIC).to_string());
    let credential =
        HeaderValue::from_str(credential).or_else(|_| odd()).map_err(|_| Refusal::from(Deny::HeadTooLarge))?;
    Ok(Call { fields, body, credential: Some(credential), ..bare(Tool::ApiCall, method, uri) })
}

fn http_request(given: &Arguments<'_>, may_authorize: bool) -> Result<Call, ArgumentError> {
    let method = match given.get("method") {
        None => Method::GET,
        Some(Value::String(method)) => named(method)
            // CONNECT opens a tunnel and is not a request.
            .filter(|method| *method != Method::CONNECT)
            .ok_or_else(|| given.wrong("method", "must be an HTTP method"))?,
        Some(_) => return Err(given.wrong("method", "must be a string")),
    };
    let uri = url::target(given.text("url")?, &[])?;
    let mut fields = given.fields(may_authorize)?;
    let body = match given.get("body") {
        None => Bytes::new(),
        Some(Value::String(text)) => {
            fields.entry(CONTENT_TYPE).or_insert(HeaderValue::from_static("text/plain; charset=utf-8"));
            Bytes::from(text.clone())
        }
        Some(value) => {
            ensure_json_type(&mut fields);
            written(value)
        }
    };
    let most = MAX_TIMEOUT.as_secs();
    let within = match given.get("timeout") {
        None => None,
        Some(value) => {
            let seconds = value.as_u64().or_else(|| value.as_f64().filter(|s| s.fract() == 0.0).map(|s| s as u64));
            let sound = seconds.filter(|seconds| (1..=most).contains(seconds));
            Some(sound.ok_or_else(|| given.wrong("timeout", "must be a whole number of seconds from 1 to 60"))?)
        }
    };
    Ok(Call { fields, body, within, ..bare(Tool::HttpRequest, method, uri) })
}

/// Parses a method. Standard methods may be in lower case; the case of other methods matters (RFC 9110 §9.1).
fn named(method: &str) -> Option<Method> {
    const KNOWN: [&str; 9] = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS", "TRACE", "CONNECT"];
    let known = KNOWN.into_iter().find(|known| known.eq_ignore_ascii_case(method));
    Method::from_bytes(known.unwrap_or(method).as_bytes()).ok()
}

fn bare(tool: Tool, method: Method, uri: http::Uri) -> Call {
    Call {
        name: tool.as_str().to_owned(),
        tool,
        method,
        uri,
        fields: HeaderMap::new(),
        body: Bytes::new(),
        credential: None,
        nonce: None,
        within: None,
    }
}

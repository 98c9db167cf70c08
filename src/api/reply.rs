//! Replies of the admin API: a status and a JSON document.

use std::time::Duration;

use http::{Request, StatusCode};
use http_body_util::{BodyExt, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use percent_encoding::percent_decode_str;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::ledger::LedgerError;

/// Maximum time for a request body to arrive.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of a request body, in bytes.
pub(super) const MAX_BODY: usize = 64 * 1024;

/// A status and a JSON document.
pub(super) type Reply = (StatusCode, Value);

/// Returns a reply with an error text.
pub(super) fn error(status: StatusCode, text: &str) -> Reply {
    (status, json!({ "error": text }))
}

/// Returns the reply to a request that the ledger could not carry out.
pub(super) fn ledger_error(failed: LedgerError) -> Reply {
    let status = match failed {
        LedgerError::Exists => StatusCode::CONFLICT,
        LedgerError::Full | LedgerError::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        LedgerError::Unknown => StatusCode::NOT_FOUND,
    };
    error(status, &failed.to_string())
}

/// Returns the value of the only parameter that a query may have, percent-decoded.
///
/// # Errors
/// The reply if the query has another parameter, or more than one.
pub(super) fn only_parameter(query: Option<&str>, name: &str) -> Result<Option<String>, Reply> {
    let Some(query) = query.filter(|query| !query.is_empty()) else { return Ok(None) };
    let value = query.strip_prefix(name).and_then(|rest| rest.strip_prefix('=')).filter(|value| !value.contains('&'));
    let value = value.and_then(|value| percent_decode_str(value).decode_utf8().ok());
    let unknown = || error(StatusCode::UNPROCESSABLE_ENTITY, &format!("the only parameter of the query is {name}"));
    Ok(Some(value.ok_or_else(unknown)?.into_owned()))
}

/// Reads a request body of at most [`MAX_BODY`] bytes.
///
/// # Errors
/// The reply if the body is too large, incomplete or late.
pub(super) async fn read_body(body: Incoming) -> Result<Bytes, Reply> {
    match tokio::time::timeout(BODY_TIMEOUT, Limited::new(body, MAX_BODY).collect()).await {
        Ok(Ok(body)) => Ok(body.to_bytes()),
        Ok(Err(failed)) if failed.is::<LengthLimitError>() => {
            Err(error(StatusCode::PAYLOAD_TOO_LARGE, "the body is larger than 64 KiB"))
        }
        Ok(Err(_)) => Err(error(StatusCode::BAD_REQUEST, "the body is incomplete or malformed")),
        Err(_) => Err(error(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    }
}

/// Reads a request body as a JSON document.
///
/// # Errors
/// The reply if the body cannot be read or parsed.
pub(super) async fn read_json<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, Reply> {
    let body = read_body(request.into_body()).await?;
    serde_json::from_slice(&body).map_err(|why| error(StatusCode::BAD_REQUEST, &why.to_string()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_query_has_at_most_the_known_parameter() {
        let rows = [
            (None, Some(None)),
            (Some(""), Some(None)),
            (Some("task="), Some(Some(""))),
            (Some("task=a%20b"), Some(Some("a b"))),
            (Some("tasks=a"), None),
            (Some("task"), None),
            (Some("task=a&task=b"), None),
            (Some("task=%ff"), None),
        ];
        for (query, want) in rows {
            let parsed = only_parameter(query, "task").ok();
            assert_eq!(parsed, want.map(|value| value.map(str::to_owned)), "{query:?}");
        }
    }
}

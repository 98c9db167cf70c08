//! The newest lines of the audit log, for an operator who watches.

use bytes::Bytes;
use http::{Response, StatusCode};
use http_body_util::Full;
use serde::Serialize;
use serde_json::value::RawValue;

use super::admin::{document, reply};
use super::reply::{error, only_parameter};
use crate::audit::recent::Newer;
use crate::flow::Services;

#[derive(Serialize)]
struct Decisions {
    lines: Vec<Box<RawValue>>,
    next: u64,
    skipped: u64,
}

/// Returns the lines from the number in `after` on.
pub(super) fn answer(services: &Services, query: Option<&str>) -> Response<Full<Bytes>> {
    let after = match only_parameter(query, "after") {
        Ok(None) => 0,
        Ok(Some(number)) => match number.parse() {
            Ok(number) => number,
            Err(_) => {
                let (status, value) = error(StatusCode::UNPROCESSABLE_ENTITY, "after must be a number");
                return document(status, &value);
            }
        },
        Err((status, value)) => return document(status, &value),
    };
    let Newer { lines, next, skipped } = services.audit.recent().since(after);
    let lines = lines.into_iter().filter_map(|line| RawValue::from_string(line).ok()).collect();
    let text = serde_json::to_string(&Decisions { lines, next, skipped }).unwrap_or_default();
    reply(StatusCode::OK, "application/json", text.into())
}

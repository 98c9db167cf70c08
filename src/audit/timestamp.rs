//! The time format of audit lines.

use std::time::SystemTime;

use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

/// Returns the current time in the format of audit lines: RFC 3339, UTC.
#[must_use]
pub(super) fn now() -> String {
    of(SystemTime::now())
}

/// Returns a time in that format.
#[must_use]
pub(super) fn of(time: SystemTime) -> String {
    OffsetDateTime::from(time).format(&Rfc3339).unwrap_or_default()
}

/// Parses a time in that format.
pub(super) fn parse(text: &str) -> Option<SystemTime> {
    OffsetDateTime::parse(text, &Rfc3339).ok().map(SystemTime::from)
}

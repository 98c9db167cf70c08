//! The trace context that a request carries: the fields `traceparent` and `tracestate` (W3C Trace Context).

use std::fmt;

use http::{HeaderMap, HeaderName};

/// The field with the ids.
pub const TRACEPARENT: HeaderName = HeaderName::from_static("traceparent");
/// The field with further data of tracing systems.
pub const TRACESTATE: HeaderName = HeaderName::from_static("tracestate");

/// The value of `traceparent` (W3C Trace Context §3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TraceParent {
    /// The id of the trace. Never zero.
    pub trace: u128,
    /// The id of the span that the request belongs to. Never zero.
    pub span: u64,
    /// The flags. The lowest bit says that the sender may have recorded the trace.
    pub flags: u8,
}

impl TraceParent {
    /// The flag of a trace that is recorded.
    pub const SAMPLED: u8 = 1;

    /// Returns the context of a request. `None` without the field, and if it is invalid or repeated: then `tracestate` has no
    /// meaning either (§4.3).
    #[must_use]
    pub fn of(headers: &HeaderMap) -> Option<Self> {
        let mut values = headers.get_all(TRACEPARENT).iter();
        let value = values.next()?;
        Self::parse(value.to_str().ok()?).filter(|_| values.next().is_none())
    }

    /// Parses `VERSION-TRACE-SPAN-FLAGS` in lower-case hex digits. Later versions may have more fields, which are ignored.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        let mut parts = text.split('-');
        let version = digits(parts.next()?, 2)?;
        let (trace, span, flags) = (digits(parts.next()?, 32)?, digits(parts.next()?, 16)?, digits(parts.next()?, 2)?);
        let is_valid = match version {
            0 => parts.next().is_none(),
            0xff => false,
            _ => true,
        };
        let (span, flags) = (u64::try_from(span).ok()?, u8::try_from(flags).ok()?);
        (is_valid && trace != 0 && span != 0).then_some(Self { trace, span, flags })
    }
}

/// The value of the field, in version 00.
impl fmt::Display for TraceParent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { trace, span, flags } = self;
        write!(f, "00-{trace:032x}-{span:016x}-{flags:02x}")
    }
}

fn digits(text: &str, length: usize) -> Option<u128> {
    let is_hex = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
    (text.len() == length && text.bytes().all(is_hex)).then(|| u128::from_str_radix(text, 16).ok()).flatten()
}

#[cfg(test)]
mod tests {
    use http::HeaderValue;

    use super::*;

    const VALID: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";

    #[test]
    fn a_context_has_ids_that_are_not_zero() {
        let valid =
            TraceParent { trace: 0x4bf9_2f35_77b3_4da6_a3ce_929d_0e0e_4736, span: 0x00f0_67aa_0ba9_02b7, flags: 1 };
        let rows = [
            (VALID, Some(valid)),
            ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", Some(valid)),
            ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-later", Some(valid)),
            ("cc-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01.later", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-later", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-", None),
            ("ff-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
            ("00-00000000000000000000000000000000-00f067aa0ba902b7-01", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01", None),
            ("00-4BF92F3577B34DA6A3CE929D0E0E4736-00f067aa0ba902b7-01", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e473-00f067aa0ba902b7-01", None),
            ("00-+bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
            ("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7", None),
            (" 00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01", None),
            ("00", None),
            ("", None),
        ];
        for (text, want) in rows {
            assert_eq!(TraceParent::parse(text), want, "{text:?}");
        }
        assert_eq!(valid.to_string(), VALID);
    }

    #[test]
    fn a_repeated_field_is_no_context() {
        let mut headers = HeaderMap::new();
        assert_eq!(TraceParent::of(&headers), None);
        headers.append(TRACEPARENT, HeaderValue::from_static(VALID));
        assert!(TraceParent::of(&headers).is_some());
        headers.append(TRACEPARENT, HeaderValue::from_static(VALID));
        assert_eq!(TraceParent::of(&headers), None);
        headers.insert(TRACEPARENT, HeaderValue::from_bytes(b"\xff").unwrap());
        assert_eq!(TraceParent::of(&headers), None);
    }
}

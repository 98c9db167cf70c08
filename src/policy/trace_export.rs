//! `[traces]`: the collector of traces.

use std::collections::HashSet;
use std::path::Path;

use http::HeaderName;
use http::header::{
    CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, EXPECT, HOST, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
    USER_AGENT,
};
use toml::Value;

use super::hook_url::HookUrl;
use super::reader::{Findings, Readable, Section};
use super::settings::Source;

const TRACE_ENDPOINT: &str = "endpoint = \"https://HOST:4318/v1/traces\"";
/// The fields of the requests to a collector of traces that are not free.
const FRAMING_FIELDS: [HeaderName; 12] = [
    CONNECTION,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    CONTENT_TYPE,
    EXPECT,
    HOST,
    HeaderName::from_static("keep-alive"),
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    USER_AGENT,
];

/// `[traces]`: the collector that the traces of exchanges are sent to, by OTLP over HTTP.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TraceExport {
    /// The URL.
    pub endpoint: HookUrl,
    /// Fields of its requests, such as one with a key.
    pub headers: Vec<(HeaderName, Source)>,
    /// The share of exchanges that are traced.
    pub sample: Share,
    /// The name of this service in the traces.
    pub service_name: String,
}

/// A share, in millionths.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share(u32);

impl Default for Share {
    /// Everything.
    fn default() -> Self {
        Self(1_000_000)
    }
}

impl Share {
    /// Converts a number from 0 to 1.
    #[must_use]
    pub fn of(number: f64) -> Option<Self> {
        let millionths = (number * 1_000_000.0).round();
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "checked")]
        (0.0..=1_000_000.0).contains(&millionths).then_some(Self(millionths as u32))
    }

    /// Returns the share in millionths.
    #[must_use]
    pub fn millionths(self) -> u32 {
        self.0
    }
}

impl Readable for Share {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let share = value.as_float().or_else(|| value.as_integer().and_then(|n| i32::try_from(n).ok()).map(f64::from));
        let share = share.and_then(Self::of);
        if share.is_none() {
            findings.problem(path, format!("invalid value {value}"), "a share from 0.0 to 1.0");
        }
        share
    }
}

/// Reads `[traces]`.
pub(super) fn read(mut s: Section<'_>, base: &Path, findings: &Findings) -> Option<TraceExport> {
    let at = s.path().to_owned();
    let headers = s.values::<Source>("headers");
    let sample = s.take::<Share>("sample");
    let service_name = s.take::<String>("service_name");
    let is_given = !headers.is_empty() || sample.is_some() || service_name.is_some();
    let Some(text) = s.take::<String>("endpoint") else {
        if is_given && !findings.has(&s.at("endpoint")) {
            findings.problem(s.at("endpoint"), "missing", TRACE_ENDPOINT);
        }
        return None;
    };
    if !cfg!(feature = "otel") {
        findings.problem(at, "this exeat was built without traces", "a build with `cargo build --features otel`");
    }
    let endpoint = match HookUrl::parse(&text) {
        Ok(url) => url.with_default_path("/v1/traces"),
        Err(error) => {
            findings.problem(s.at("endpoint"), error.to_string(), TRACE_ENDPOINT);
            return None;
        }
    };
    if !headers.is_empty() && !endpoint.is_tls {
        findings.problem(s.at("headers"), "they would be sent without TLS", "an https:// URL");
    }
    let mut seen = HashSet::new();
    let headers = headers.into_iter().filter_map(|(name, source)| {
        let known = HeaderName::from_bytes(name.as_bytes()).ok().filter(|name| !FRAMING_FIELDS.contains(name));
        let known = known.filter(|known| seen.insert(known.clone()));
        if known.is_none() {
            findings.problem(
                s.at("headers"),
                format!("{name:?} cannot be set, or is repeated"),
                "the name of a header field for a key",
            );
        }
        Some((known?, source.relative_to(base)))
    });
    Some(TraceExport {
        endpoint,
        headers: headers.collect(),
        sample: sample.unwrap_or_default(),
        service_name: service_name.unwrap_or_else(|| "exeat".to_owned()),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_share_is_from_nothing_to_everything() {
        let rows = [(0.0, Some(0)), (1.0, Some(1_000_000)), (0.1, Some(100_000)), (0.000_001, Some(1))];
        let rows = rows.into_iter().chain([(-0.1, None), (1.1, None), (f64::NAN, None), (f64::INFINITY, None)]);
        for (number, want) in rows {
            assert_eq!(Share::of(number).map(Share::millionths), want, "{number}");
        }
    }
}

//! Sends the traces of exchanges to a collector, by OTLP over HTTP with protobuf (OpenTelemetry Protocol 1.x).
//!
//! Nothing waits for the collector. Spans that it does not take, and those that do not fit into the queue, are dropped and
//! counted.

use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use http::StatusCode;
use opentelemetry_proto::tonic::collector::trace::v1::{ExportTraceServiceRequest, ExportTraceServiceResponse};
use opentelemetry_proto::tonic::common::v1::any_value::Value;
use opentelemetry_proto::tonic::common::v1::{AnyValue, InstrumentationScope, KeyValue};
use opentelemetry_proto::tonic::resource::v1::Resource;
use opentelemetry_proto::tonic::trace::v1::span::SpanKind;
use opentelemetry_proto::tonic::trace::v1::status::StatusCode as SpanStatusCode;
use opentelemetry_proto::tonic::trace::v1::{ResourceSpans, ScopeSpans, Span, Status};
use prost::Message;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use super::http_sender::{HttpSender, SecretField, SendError};
use super::own_server::OwnServers;
use crate::audit::traces::{Attribute, ExchangeSpan, StageSpan, TraceCounts, Traces};
use crate::model::refusal::Stage;
use crate::model::unique_id;
use crate::policy::settings::Source;
use crate::policy::source;
use crate::policy::trace_export::TraceExport;
use crate::stages::pin::OwnServer;

/// How long spans wait for others.
const INTERVAL: Duration = Duration::from_secs(2);
/// The most exchanges in one request to the collector.
const MAX_BATCH: usize = 256;
/// The pauses before further attempts.
const PAUSES: [Duration; 3] = [Duration::from_secs(1), Duration::from_secs(5), Duration::from_secs(25)];
/// The longest pause that a collector can ask for.
const MAX_PAUSE: Duration = Duration::from_secs(60);
/// The time limit for the last spans when the daemon ends.
const LAST_SPANS: Duration = Duration::from_secs(2);
/// The same when another process takes over and waits for the end.
const LAST_BATCH: Duration = Duration::from_millis(250);
/// The bits of `flags` (`SpanFlags` of the protocol): the trace is recorded, and the parent is in this process, or in another.
const SAMPLED: u32 = 1;
const LOCAL_PARENT: u32 = 0x100;
const REMOTE_PARENT: u32 = 0x300;

/// The task, before it runs.
pub(super) struct TraceExporter {
    traces: Arc<Traces>,
    sender: HttpSender,
    resource: Resource,
    /// The last attempt has failed.
    has_failed: bool,
    stop: CancellationToken,
}

/// The running task.
pub(super) struct TraceExporting {
    stop: CancellationToken,
    task: JoinHandle<()>,
}

impl TraceExporting {
    /// Sends the spans that wait, for a limited time.
    pub(super) async fn finish(self) {
        self.end_within(LAST_SPANS).await;
    }

    /// As [`Self::finish`], for a short time, because another process waits.
    pub(super) async fn hand_over(self) {
        self.end_within(LAST_BATCH).await;
    }

    async fn end_within(mut self, limit: Duration) {
        self.stop.cancel();
        if timeout(limit, &mut self.task).await.is_err() {
            self.task.abort();
        }
    }
}

impl TraceExporter {
    /// `None` in a build without the feature `otel` only.
    pub(super) fn new(export: &TraceExport, traces: Arc<Traces>, own_servers: &OwnServers<'_>) -> Option<Self> {
        let TraceExport { endpoint, headers, sample: _, service_name } = export;
        // Without a key, anybody who reaches the collector can write to it.
        let server =
            if headers.is_empty() { OwnServer::OpenTraceCollector } else { OwnServer::AuthenticatingCollector };
        let to = (server, endpoint.clone());
        let fields = headers.iter().map(|(name, source)| SecretField {
            name: name.clone(),
            source: source.clone(),
            key: format!("headers.{name}"),
        });
        let sender = HttpSender::new(to, "application/x-protobuf", fields.collect(), own_servers);
        let instance = unique_id::new().to_string();
        let attributes = [
            ("service.name", service_name.as_str()),
            ("service.version", env!("CARGO_PKG_VERSION")),
            ("service.instance.id", &instance),
        ];
        let attributes = attributes.map(|(name, text)| pair(name, Value::StringValue(text.to_owned()))).to_vec();
        let resource = Resource { attributes, ..Resource::default() };
        Some(Self { traces, sender, resource, has_failed: false, stop: CancellationToken::new() })
    }

    pub(super) fn start(self) -> TraceExporting {
        TraceExporting { stop: self.stop.clone(), task: tokio::spawn(self.run()) }
    }

    /// Connects, to see whether the collector can be reached and the values of fields be read.
    ///
    /// # Errors
    /// [`SendError`].
    pub(super) async fn try_open(&mut self) -> Result<(), SendError> {
        self.sender.try_open().await
    }

    async fn run(mut self) {
        let (stop, traces) = (self.stop.clone(), self.traces.clone());
        // The address of a collector without a key is denied to sandboxes once it is known.
        if let Some(Err(error)) = stop.run_until_cancelled(self.try_open()).await {
            self.note_failure(&error, 0);
        }
        loop {
            // Before the spans are taken: those of the last requests are sent, too.
            let is_last = stop.is_cancelled();
            let mut exchanges = traces.take();
            while !exchanges.is_empty() {
                let rest = exchanges.split_off(exchanges.len().min(MAX_BATCH));
                self.deliver_parts(exchanges).await;
                exchanges = rest;
            }
            if is_last {
                return;
            }
            tokio::select! {
                () = stop.cancelled() => {}
                () = traces.many_waiting() => {}
                () = sleep(INTERVAL) => {}
            }
        }
    }

    /// Sends exchanges, in two parts each time that the collector refuses their size, so that large ones drop no others.
    async fn deliver_parts(&mut self, exchanges: Vec<ExchangeSpan>) {
        let mut parts = vec![exchanges];
        while let Some(mut part) = parts.pop() {
            if let Err(SendError::TooLarge) = self.deliver(&part, part.len() > 1).await {
                let second = part.split_off(part.len() / 2);
                parts.extend([second, part]);
            }
        }
    }

    /// Sends exchanges, or drops them if the collector refuses them or fails several times.
    ///
    /// # Errors
    /// [`SendError::TooLarge`], if they can be sent in parts.
    async fn deliver(&mut self, exchanges: &[ExchangeSpan], can_split: bool) -> Result<(), SendError> {
        let count = u64::try_from(exchanges.len()).unwrap_or(u64::MAX);
        let document = self.document(exchanges);
        let mut pauses = PAUSES.into_iter();
        let outcome = loop {
            let error = match self.sender.send(document.clone()).await {
                Ok(body) => break Ok(body),
                Err(SendError::TooLarge) if can_split => return Err(SendError::TooLarge),
                Err(error) => error,
            };
            let asked = match &error {
                SendError::Status { retry_after, .. } => retry_after.map(|asked| asked.min(MAX_PAUSE)),
                _ => None,
            };
            let pause = pauses.next().filter(|_| may_pass(&error) && !self.stop.is_cancelled());
            let Some(pause) = pause else { break Err(error) };
            tracing::debug!(%error, "traces are sent again");
            let _ = self.stop.run_until_cancelled(sleep(asked.unwrap_or(pause).max(pause))).await;
        };
        match outcome {
            Ok(body) => {
                self.traces.count(TraceCounts { sent: count, dropped: 0 });
                match rejected_spans(&body) {
                    0 => self.has_failed = false,
                    spans if !std::mem::replace(&mut self.has_failed, true) => {
                        tracing::warn!(spans, "the collector has rejected spans");
                    }
                    _ => {}
                }
            }
            Err(error) => {
                self.traces.count(TraceCounts { sent: 0, dropped: count });
                self.note_failure(&error, count);
            }
        }
        Ok(())
    }

    /// Logs the first failure of an outage.
    fn note_failure(&mut self, error: &SendError, exchanges: u64) {
        if !std::mem::replace(&mut self.has_failed, true) {
            tracing::warn!(%error, exchanges, "the collector of traces fails; traces are dropped until it takes them");
        }
    }

    fn document(&self, exchanges: &[ExchangeSpan]) -> Vec<u8> {
        let scope = InstrumentationScope {
            name: "exeat".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..InstrumentationScope::default()
        };
        let spans = exchanges.iter().cloned().flat_map(spans_of).collect();
        let scope_spans = vec![ScopeSpans { scope: Some(scope), spans, schema_url: String::new() }];
        let resource_spans =
            vec![ResourceSpans { resource: Some(self.resource.clone()), scope_spans, schema_url: String::new() }];
        ExportTraceServiceRequest { resource_spans }.encode_to_vec()
    }
}

/// Reads the values of the fields, for `check`.
///
/// # Errors
/// The name of the field, and why its value cannot be read.
pub(super) fn check_secrets(export: &TraceExport) -> Result<(), String> {
    let read = |source: &Source| source::read_source(source, &|name| std::env::var(name).ok());
    export.headers.iter().try_for_each(|(name, source)| match read(source) {
        Ok(_) => Ok(()),
        Err(error) => Err(format!("{name}: {error}")),
    })
}

/// Returns whether the same spans may be taken later (OTLP, "Retryable Response Codes").
fn may_pass(error: &SendError) -> bool {
    match error {
        SendError::Status { status, .. } => matches!(
            *status,
            StatusCode::TOO_MANY_REQUESTS
                | StatusCode::BAD_GATEWAY
                | StatusCode::SERVICE_UNAVAILABLE
                | StatusCode::GATEWAY_TIMEOUT
        ),
        SendError::TooLarge => false,
        SendError::Field(..) | SendError::Connection(_) => true,
    }
}

/// Returns the number of spans that a collector has rejected although it answered with success.
fn rejected_spans(body: &[u8]) -> i64 {
    let answer = ExportTraceServiceResponse::decode(body).unwrap_or_default();
    answer.partial_success.map_or(0, |partial| partial.rejected_spans)
}

/// Returns the span of an exchange, and those of its stages.
fn spans_of(exchange: ExchangeSpan) -> Vec<Span> {
    let ExchangeSpan { trace, id, parent, name, began, duration, attributes, error, stages } = exchange;
    let began = nanoseconds(began);
    let attributes = attributes.into_iter().map(|(name, value)| match value {
        Attribute::Text(text) => pair(name, Value::StringValue(text)),
        Attribute::Number(number) => pair(name, Value::IntValue(i64::try_from(number).unwrap_or(i64::MAX))),
    });
    let status = error.map(|message| Status { message, code: SpanStatusCode::Error.into() });
    let whole = Span {
        trace_id: trace.to_be_bytes().to_vec(),
        span_id: id.to_be_bytes().to_vec(),
        parent_span_id: parent.map(|parent| parent.to_be_bytes().to_vec()).unwrap_or_default(),
        flags: SAMPLED | if parent.is_some() { REMOTE_PARENT } else { 0 },
        name: name.to_owned(),
        kind: SpanKind::Server.into(),
        start_time_unix_nano: began,
        end_time_unix_nano: later(began, duration),
        attributes: attributes.collect(),
        status,
        ..Span::default()
    };
    let parts = stages.into_iter().map(|StageSpan { id, parent, stage, began: after, duration }| {
        let began = later(began, after);
        let kind = if stage == Stage::Forward { SpanKind::Client } else { SpanKind::Internal };
        Span {
            trace_id: trace.to_be_bytes().to_vec(),
            span_id: id.to_be_bytes().to_vec(),
            parent_span_id: parent.to_be_bytes().to_vec(),
            flags: SAMPLED | LOCAL_PARENT,
            name: stage.as_str().to_owned(),
            kind: kind.into(),
            start_time_unix_nano: began,
            end_time_unix_nano: later(began, duration),
            ..Span::default()
        }
    });
    std::iter::once(whole).chain(parts).collect()
}

fn pair(name: &str, value: Value) -> KeyValue {
    KeyValue { key: name.to_owned(), value: Some(AnyValue { value: Some(value) }), ..KeyValue::default() }
}

fn nanoseconds(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}

fn later(time: u64, by: Duration) -> u64 {
    time.saturating_add(u64::try_from(by.as_nanos()).unwrap_or(u64::MAX))
}

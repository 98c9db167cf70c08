//! Billing and the record of tool calls: both are sums over the audit log, so that they agree with it after a crash.
//! The ledger stores the position up to which the log has been summed; the rest is read at start.

use std::collections::HashMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::mpsc;
use tokio::time::sleep;

use crate::audit::replay;
use crate::audit::sink::Written;
use crate::flow::Services;
use crate::ledger::{Cursor, LedgerError, Millis, ToolCall};
use crate::model::name::ExecutionId;
use crate::model::refusal::Refusal;

/// Groups of lines that may wait.
pub(crate) const MOST_WAITING: usize = 16_384;
/// How long a ledger that takes nothing is left alone.
const PAUSE: Duration = Duration::from_millis(250);
/// Lines that are summed up at a time when the log is read again.
const BATCH: usize = 4096;

/// A line that ended an exchange, as far as it matters here.
#[derive(Deserialize)]
struct Line {
    #[serde(default)]
    id: String,
    ts: String,
    event: String,
    execution: Option<String>,
    tool: Option<String>,
    method: Option<String>,
    scheme: Option<String>,
    host: Option<String>,
    port: Option<u16>,
    path: Option<String>,
    credential_used: Option<String>,
    code: Option<String>,
    response_status: Option<u16>,
    response_size_bytes: Option<u64>,
    truncated: Option<bool>,
    latency_ms: Option<f64>,
    credits: Option<f64>,
}

/// Sums up what the log said when it was opened, and the ledger has not been told. `last` is the mac of its last line
/// then. False if the ledger cannot be asked.
///
/// # Errors
/// If the log cannot be read.
pub(crate) async fn catch_up(services: &Services, last: &str) -> io::Result<bool> {
    let Ok(known) = services.ledger.cursor().await else { return Ok(false) };
    let Some(path) = services.settings.audit.path.clone() else { return Ok(true) };
    let Some(known) = known.filter(|known| known.as_str() != last) else {
        begin(services, last).await;
        return Ok(true);
    };
    let to = last.to_owned();
    let (batches, mut read) = mpsc::channel::<Written>(2);
    let reading = tokio::task::spawn_blocking(move || {
        let mut batch = Written { lines: Vec::new(), mac: String::new() };
        let found = replay::behind(&path, known.as_str(), &to, |line, mac| {
            batch.lines.push(line.to_owned());
            mac.clone_into(&mut batch.mac);
            if batch.lines.len() >= BATCH {
                let full = std::mem::replace(&mut batch, Written { lines: Vec::new(), mac: String::new() });
                // Nobody reads any more if the daemon is told to stop.
                let _ = batches.blocking_send(full);
            }
        });
        if !batch.lines.is_empty() {
            let _ = batches.blocking_send(batch);
        }
        found
    });
    while let Some(written) = read.recv().await {
        sum_up(services, &written, Told::Again).await;
    }
    if !reading.await.map_err(io::Error::other)?? {
        tracing::warn!(
            "the audit log does not continue at the ledger's position; the exchanges between are not billed"
        );
        begin(services, last).await;
    }
    Ok(true)
}

/// From the end of the log on.
async fn begin(services: &Services, last: &str) {
    sum_up(services, &Written { lines: Vec::new(), mac: last.to_owned() }, Told::Again).await;
}

/// Sums up what is written, until all exchanges have ended; first, if it is given the mac of the last line, what was
/// written before.
pub(crate) async fn run(services: Arc<Services>, mut told: mpsc::Receiver<Written>, last: Option<String>) {
    if let Some(last) = last {
        // Until the ledger can be asked. Nothing passes before, so nothing that costs waits here.
        while matches!(catch_up(&services, &last).await, Ok(false)) {
            if services.abort.run_until_cancelled(sleep(PAUSE)).await.is_none() {
                return;
            }
        }
    }
    loop {
        let written = tokio::select! {
            // Lines written before the end are summed first.
            biased;
            written = told.recv() => written,
            () = services.abort.cancelled() => return,
        };
        match written {
            Some(written) => sum_up(&services, &written, Told::First).await,
            None => return,
        }
    }
}

/// Whether lines may have been summed up in part before the process that did so died.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Told {
    Again,
    First,
}

async fn sum_up(services: &Services, written: &Written, told: Told) {
    let lines: Vec<Line> = written.lines.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let mut bills: HashMap<ExecutionId, u32> = HashMap::new();
    for line in &lines {
        if let (Some(execution), Some(half_credits)) = (&line.execution, line.half_credits()) {
            let sum = bills.entry(ExecutionId::new(execution)).or_default();
            *sum = sum.saturating_add(half_credits);
        }
    }
    let calls = lines.iter().filter_map(|line| Some((ExecutionId::new(line.execution.as_ref()?), line.call()?)));
    for (execution, call) in calls {
        if told == Told::Again && is_recorded(services, &execution, &call).await {
            continue;
        }
        until_taken(services, || services.ledger.record(&execution, call.clone())).await;
    }
    // Last: with it, all of this has been done.
    if let Some(cursor) = Cursor::new(&written.mac) {
        let bills: Vec<_> = bills.into_iter().collect();
        until_taken(services, || services.ledger.bill(&bills, cursor.clone())).await;
    }
}

async fn is_recorded(services: &Services, execution: &ExecutionId, call: &ToolCall) -> bool {
    let known = services.ledger.tool_calls(execution).await.unwrap_or_default();
    known.iter().any(|known| known.id == call.id)
}

/// Tries again until the ledger takes it. Meanwhile nothing passes that would have to wait here.
async fn until_taken<F: Future<Output = Result<(), LedgerError>>>(services: &Services, act: impl Fn() -> F) {
    while let Err(error) = act().await {
        if error != LedgerError::Unavailable {
            // Of an execution that is no longer known, nobody will ask.
            return;
        }
        tracing::error!(%error, "the cost of calls cannot be written; trying again");
        if services.abort.run_until_cancelled(sleep(PAUSE)).await.is_none() {
            return;
        }
    }
}

impl Line {
    /// Returns the cost of the exchange.
    fn half_credits(&self) -> Option<u32> {
        // Written by us: a small multiple of a half.
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
        let half_credits = (self.credits? * 2.0).round().clamp(0.0, 1_000.0) as u32;
        (half_credits > 0).then_some(half_credits)
    }

    /// The tool call that it ended.
    fn call(&self) -> Option<ToolCall> {
        if !matches!(&*self.event, "closed" | "refused") {
            return None;
        }
        let refusal = self.code.as_deref().and_then(Refusal::with_code);
        let latency_ms = self.latency_ms.unwrap_or_default();
        Some(ToolCall {
            id: self.id.clone(),
            tool: self.tool.clone()?,
            url: self.url(),
            method: self.method.clone().unwrap_or_default(),
            credential_used: self.credential_used.clone(),
            response_status: self.response_status,
            response_size_bytes: self.response_size_bytes.unwrap_or_default(),
            latency_ms,
            blocked: refusal.is_some_and(Refusal::is_blocked),
            block_reason: refusal.map(|refusal| refusal.block_reason().to_owned()),
            truncated: self.truncated.unwrap_or_default(),
            called_at: self.called_at(latency_ms),
            reported: false,
        })
    }

    /// Without the query, which the log does not have.
    fn url(&self) -> String {
        let Self { scheme: Some(scheme), host: Some(host), port, .. } = self else { return String::new() };
        let usual = if scheme == "https" { 443 } else { 80 };
        let port = port.filter(|port| *port != usual).map(|port| format!(":{port}")).unwrap_or_default();
        let path = self.path.as_deref().unwrap_or_default();
        // Of a webhook it is a hash.
        let slash = if path.is_empty() || path.starts_with('/') { "" } else { "/" };
        format!("{scheme}://{host}{port}{slash}{path}")
    }

    /// The line is written at the end.
    fn called_at(&self, latency_ms: f64) -> Millis {
        let ended = OffsetDateTime::parse(&self.ts, &Rfc3339).unwrap_or(OffsetDateTime::UNIX_EPOCH);
        let took = Duration::try_from_secs_f64(latency_ms / 1000.0).unwrap_or_default();
        Millis::of(std::time::SystemTime::from(ended).checked_sub(took).unwrap_or(std::time::UNIX_EPOCH))
    }
}

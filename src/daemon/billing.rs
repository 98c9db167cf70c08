//! Billing and the record of tool calls, both derived from the audit log, so that they agree with it after a crash. Finds
//! that the ledger does not have yet are restored from the log too.
//!
//! The ledger stores the position up to which the log has been processed. The rest of the log is processed at start.

use std::collections::{HashMap, VecDeque};
use std::io;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::join_all;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::mpsc;
use tokio::time::{sleep, timeout};

use crate::audit::line::{Event, Line};
use crate::audit::replay;
use crate::audit::sink::Written;
use crate::flow::Services;
use crate::ledger::{Billed, Cursor, LedgerError, MAX_CALLS, Millis, ToolCall};
use crate::model::name::ExecutionId;
use crate::model::refusal::Refusal;

/// Maximum number of groups of lines that wait to be processed.
pub(crate) const MAX_WAITING: usize = 16_384;
/// Time between retries while the ledger is unavailable.
const RETRY_INTERVAL: Duration = Duration::from_millis(250);
/// Lines per batch when the log is replayed.
const BATCH: usize = 4096;
/// A batch of written lines takes no further group once it has this many lines.
const MAX_BATCH: usize = 16_384;
/// Maximum number of executions whose calls are recorded at the same time.
const MAX_CONCURRENT: usize = 64;
/// How long the start waits for lines of an earlier run. The rest is processed while requests are served.
const START_TIMEOUT: Duration = Duration::from_secs(3);

/// As [`catch_up`], for a limited time. Returns false if lines are left.
///
/// # Errors
/// If the log cannot be read.
pub(crate) async fn catch_up_at_start(services: &Services, last: &str) -> io::Result<bool> {
    timeout(START_TIMEOUT, catch_up(services, last)).await.unwrap_or(Ok(false))
}

/// Processes the lines between the ledger's position and `last`, the MAC of the last line when the log was opened.
/// Returns false if the ledger is unavailable.
///
/// # Errors
/// If the log cannot be read.
async fn catch_up(services: &Services, last: &str) -> io::Result<bool> {
    let Ok(known) = services.ledger.cursor().await else { return Ok(false) };
    let Some(path) = services.settings.audit.path.clone() else { return Ok(true) };
    let Some(known) = known.filter(|known| known.as_str() != last) else {
        skip_to_end(services, last).await;
        return Ok(true);
    };
    let to = last.to_owned();
    let (batches, mut read) = mpsc::channel::<Written>(2);
    let reading = tokio::task::spawn_blocking(move || {
        let mut batch = Written { lines: Vec::new(), mac: String::new() };
        let found = replay::lines_after(&path, known.as_str(), &to, |line, mac| {
            batch.lines.push(line.to_owned());
            mac.clone_into(&mut batch.mac);
            if batch.lines.len() >= BATCH {
                let full = std::mem::replace(&mut batch, Written { lines: Vec::new(), mac: String::new() });
                // The receiver is dropped when the daemon stops.
                let _ = batches.blocking_send(full);
            }
        });
        if !batch.lines.is_empty() {
            let _ = batches.blocking_send(batch);
        }
        found
    });
    let mut biller = Biller::new(services, LineSource::Replay);
    while let Some(written) = read.recv().await {
        biller.process(&written).await;
    }
    if !reading.await.map_err(io::Error::other)?? {
        tracing::warn!("the audit log does not contain the ledger's position; the exchanges after it are not billed");
        skip_to_end(services, last).await;
    }
    Ok(true)
}

/// Sets the ledger's position to the end of the log.
async fn skip_to_end(services: &Services, last: &str) {
    let written = Written { lines: Vec::new(), mac: last.to_owned() };
    Biller::new(services, LineSource::Replay).process(&written).await;
}

/// Processes lines as they are written, until all exchanges have ended. With `last`, first catches up on the lines
/// before it.
pub(crate) async fn run(services: Arc<Services>, mut written: mpsc::Receiver<Written>, last: Option<String>) {
    if let Some(last) = last {
        // Retries until the ledger is available. Requests are refused until then, so no billable lines accumulate.
        loop {
            match catch_up(&services, &last).await {
                Ok(true) => break,
                Ok(false) => {}
                Err(error) => {
                    tracing::error!(%error, "the audit log cannot be read, so nothing is billed yet; retrying")
                }
            }
            if services.abort.run_until_cancelled(sleep(RETRY_INTERVAL)).await.is_none() {
                return;
            }
        }
    }
    let mut biller = Biller::new(&services, LineSource::Live);
    loop {
        let group = tokio::select! {
            // Lines written before the abort are processed first.
            biased;
            group = written.recv() => group,
            () = services.abort.cancelled() => return,
        };
        let Some(mut group) = group else { return };
        // Groups that have queued up are one batch, so a distant ledger does not delay them one by one.
        while group.lines.len() < MAX_BATCH
            && let Ok(next) = written.try_recv()
        {
            group.lines.extend(next.lines);
            group.mac = next.mac;
        }
        biller.process(&group).await;
    }
}

/// The source of lines to process.
#[derive(Clone, Copy, PartialEq, Eq)]
enum LineSource {
    /// Lines read from the log again. A part of them may have been processed before a crash.
    Replay,
    /// Lines of this process, which have not been processed before.
    Live,
}

/// Writes batches of lines to the ledger, one after the other.
struct Biller<'s> {
    services: &'s Services,
    source: LineSource,
    /// The ledger's position, if known.
    position: Option<Cursor>,
}

impl<'s> Biller<'s> {
    fn new(services: &'s Services, source: LineSource) -> Self {
        Self { services, source, position: None }
    }

    async fn process(&mut self, written: &Written) {
        let lines: Vec<Line> = written.lines.iter().filter_map(|line| serde_json::from_str(line).ok()).collect();
        let mut bills: HashMap<ExecutionId, u32> = HashMap::new();
        let mut calls: HashMap<ExecutionId, VecDeque<ToolCall>> = HashMap::new();
        // The ledger gets the finds of this process as they occur.
        let is_replay = self.source == LineSource::Replay;
        let mut finds: HashMap<ExecutionId, Vec<(Millis, u32)>> = HashMap::new();
        for line in &lines {
            let Some(execution) = line.execution.as_deref().map(ExecutionId::new) else { continue };
            if let Some(call) = tool_call(line) {
                let latest = calls.entry(execution.clone()).or_default();
                // The ledger keeps no more calls of an execution, so earlier ones are not written at all.
                if latest.len() >= MAX_CALLS {
                    latest.pop_front();
                }
                latest.push_back(call);
            }
            if let Some(count) = line.finds.filter(|_| is_replay) {
                let at = written_at(line);
                let known = finds.entry(execution.clone()).or_default();
                // The count grows, and is the only one that matters, except after a restart of the execution.
                if known.last().is_none_or(|(_, last)| *last != count) {
                    known.push((at, count));
                }
            }
            if let Some(half_credits) = half_credits(line) {
                let sum = bills.entry(execution).or_default();
                *sum = sum.saturating_add(half_credits);
            }
        }
        for (execution, counts) in finds {
            self.restore_finds(&execution, &counts).await;
        }
        let mut calls = calls.into_iter();
        loop {
            let mut records = Vec::new();
            for (execution, calls) in calls.by_ref().take(MAX_CONCURRENT) {
                records.push(self.record(execution, calls.into()));
            }
            if records.is_empty() {
                break;
            }
            join_all(records).await;
        }
        // Billed last, because this also stores the position, which marks all the lines as processed.
        if let Some(cursor) = Cursor::new(&written.mac) {
            self.bill(bills.into_iter().collect(), cursor).await;
        }
    }

    /// Restores the number of finds of an execution from its lines. Lines before the execution was last restarted do not
    /// count.
    async fn restore_finds(&self, execution: &ExecutionId, counts: &[(Millis, u32)]) {
        let services = self.services;
        let state = retry(services, || services.ledger.state(execution)).await.flatten();
        let Some(started) = state.map(|state| state.execution.created_at) else { return };
        let finds = counts.iter().filter(|(at, _)| *at >= started).map(|(_, count)| *count).max();
        if let Some(finds) = finds {
            let most = services.policies.snapshot().leak().max_finds();
            retry(services, || services.ledger.restore_finds(execution, finds, most, Millis::now())).await;
        }
    }

    /// Records the calls of an execution, except those that were recorded before a crash.
    async fn record(&self, execution: ExecutionId, mut calls: Vec<ToolCall>) {
        let services = self.services;
        if self.source == LineSource::Replay {
            let recorded = services.ledger.tool_calls(&execution).await.unwrap_or_default();
            calls.retain(|call| !recorded.iter().any(|known| known.id == call.id));
        }
        if !calls.is_empty() {
            retry(services, || services.ledger.record_all(&execution, calls.clone())).await;
        }
    }

    async fn bill(&mut self, bills: Vec<(ExecutionId, u32)>, cursor: Cursor) {
        let services = self.services;
        loop {
            if self.position.is_none() {
                self.position = retry(services, || services.ledger.cursor()).await.flatten();
            }
            let after = self.position.take();
            match retry(services, || services.ledger.bill(&bills, after.as_ref(), cursor.clone())).await {
                Some(Billed::Done) => {
                    self.position = Some(cursor);
                    return;
                }
                // The position is read again.
                Some(Billed::Moved) => {}
                None => return,
            }
        }
    }
}

/// Repeats a call until the ledger is available. Requests are refused meanwhile, so no billable lines accumulate.
/// Returns `None` if the execution no longer exists, so that its costs and calls are not needed, or if the daemon stops.
async fn retry<T, F>(services: &Services, call: impl Fn() -> F) -> Option<T>
where
    F: Future<Output = Result<T, LedgerError>>,
{
    loop {
        match call().await {
            Ok(done) => return Some(done),
            Err(LedgerError::Unavailable) => {}
            Err(_) => return None,
        }
        tracing::error!(error = %LedgerError::Unavailable, "costs and calls cannot be written to the ledger; retrying");
        services.abort.run_until_cancelled(sleep(RETRY_INTERVAL)).await?;
    }
}

/// Returns the cost of the exchange.
fn half_credits(line: &Line) -> Option<u32> {
    // Credits are multiples of a half.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "clamped")]
    let half_credits = (line.credits? * 2.0).round().clamp(0.0, 1_000.0) as u32;
    (half_credits > 0).then_some(half_credits)
}

/// Returns the tool call that the line ends, or `None` if it ends none.
fn tool_call(line: &Line) -> Option<ToolCall> {
    if !matches!(line.event, Event::Closed | Event::Refused) {
        return None;
    }
    let refusal = line.code.as_deref().and_then(Refusal::with_code);
    let latency_ms = line.latency_ms.unwrap_or_default();
    Some(ToolCall {
        id: line.id.clone(),
        tool: line.tool.as_deref()?.to_owned(),
        url: line.target_url().unwrap_or_default(),
        method: line.method.clone().unwrap_or_default(),
        credential_used: line.credential_used.clone(),
        response_status: line.response_status,
        response_size_bytes: line.response_size_bytes.unwrap_or_default(),
        latency_ms,
        blocked: refusal.is_some_and(Refusal::is_blocked),
        block_reason: refusal.map(|refusal| refusal.block_reason().to_owned()),
        truncated: line.truncated.unwrap_or_default(),
        called_at: called_at(line, latency_ms),
        reported: false,
    })
}

/// Returns when the line was written.
fn written_at(line: &Line) -> Millis {
    Millis::of(std::time::SystemTime::from(written_time(line)))
}

fn written_time(line: &Line) -> OffsetDateTime {
    OffsetDateTime::parse(&line.ts, &Rfc3339).unwrap_or(OffsetDateTime::UNIX_EPOCH)
}

/// Returns the start of the call: the time of the line, which is written at the end, minus the latency.
fn called_at(line: &Line, latency_ms: f64) -> Millis {
    let ended = written_time(line);
    let took = Duration::try_from_secs_f64(latency_ms / 1000.0).unwrap_or_default();
    Millis::of(std::time::SystemTime::from(ended).checked_sub(took).unwrap_or(std::time::UNIX_EPOCH))
}

//! The progress of an exchange, which its two bodies share: bytes, times, and the reason why it was stopped.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::Notify;

use super::finds::{NotedFind, StreamFinds};
use super::tally::Scanned;
use crate::leak::Finding;
use crate::model::limited::ExchangeLimit;
use crate::model::name::CredentialName;
use crate::model::refusal::{Deny, Refusal};

/// State that the two bodies of an exchange share: the bytes transferred, the time of the last transfer, and how either
/// side ended.
#[derive(Debug)]
pub struct TransferCounts {
    request: AtomicU64,
    response: AtomicU64,
    began: Instant,
    /// Milliseconds from `began` to the last transfer in either direction.
    last_transfer: AtomicU64,
    client_failed: AtomicBool,
    client_stalled: AtomicBool,
    request_done: AtomicBool,
    over: AtomicBool,
    stopped: OnceLock<Refusal>,
    find: OnceLock<StreamFind>,
    /// Held while a find is counted, which may stop the execution before the find is known here.
    counting: Mutex<()>,
    stops: Notify,
    reached: OnceLock<ExchangeLimit>,
    heads: Mutex<HeadProgress>,
    scans: [ScanProgress; 2],
    /// The credentials whose values were sent in messages, each once.
    in_messages: Mutex<Vec<CredentialName>>,
}

/// The direction of the data that is searched for values.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScanDirection {
    /// To the origin.
    Request,
    /// To the client.
    Response,
}

/// The bytes that were searched for values in one direction, and the time that took.
#[derive(Debug, Default)]
struct ScanProgress {
    bytes: AtomicU64,
    nanos: AtomicU64,
}

/// A find in a request that was being sent.
#[derive(Debug)]
pub(crate) struct StreamFind {
    pub(super) found: Finding,
    /// The part of the request, for the log.
    pub(super) place: &'static str,
    /// `None` if the caller is not known.
    pub(super) noted: Option<NotedFind>,
}

/// Tracks whether the request's head was sent.
#[derive(Debug, Default)]
struct HeadProgress {
    /// Whether the head was sent on an earlier connection.
    has_left: bool,
    /// The counter of sent heads of the latest connection, and its value before the request.
    last: Option<(Arc<AtomicU64>, u64)>,
    /// The head has been passed to a connection, which may send it even if the exchange is aborted at the same moment.
    is_queued: bool,
}

impl HeadProgress {
    fn has_left(&self) -> bool {
        let counted = |(heads, before): &(Arc<AtomicU64>, u64)| heads.load(Ordering::Relaxed) > *before;
        self.has_left || self.is_queued || self.last.as_ref().is_some_and(counted)
    }
}

impl TransferCounts {
    pub(crate) fn new() -> Self {
        Self {
            request: AtomicU64::new(0),
            response: AtomicU64::new(0),
            began: Instant::now(),
            last_transfer: AtomicU64::new(0),
            client_failed: AtomicBool::new(false),
            client_stalled: AtomicBool::new(false),
            request_done: AtomicBool::new(false),
            over: AtomicBool::new(false),
            stopped: OnceLock::new(),
            find: OnceLock::new(),
            counting: Mutex::default(),
            stops: Notify::new(),
            reached: OnceLock::new(),
            heads: Mutex::default(),
            scans: Default::default(),
            in_messages: Mutex::default(),
        }
    }

    /// Records that this many bytes were searched for values, or that a search took this long.
    pub fn scanned(&self, direction: ScanDirection, bytes: usize, time: Duration) {
        let [request, response] = &self.scans;
        let scan = if direction == ScanDirection::Request { request } else { response };
        scan.bytes.fetch_add(bytes as u64, Ordering::Relaxed);
        scan.nanos.fetch_add(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX), Ordering::Relaxed);
    }

    /// Returns the searches in the request and in the response.
    pub(super) fn scans(&self) -> [Scanned; 2] {
        self.scans.each_ref().map(|scan| Scanned {
            bytes: scan.bytes.load(Ordering::Relaxed),
            time: Duration::from_nanos(scan.nanos.load(Ordering::Relaxed)),
        })
    }

    /// Records the limit that the exchange reached, and returns the refusal for it.
    #[must_use]
    pub fn reached(&self, bound: ExchangeLimit) -> Refusal {
        let _ = self.reached.set(bound);
        bound.refusal()
    }

    /// Returns the limit that the exchange exceeded, if it was refused for that.
    #[must_use]
    pub fn limit_of(&self, refusal: Refusal) -> Option<ExchangeLimit> {
        self.reached.get().copied().filter(|bound| bound.refusal() == refusal)
    }

    /// Records that the request must not be sent further.
    pub fn stop(&self, refusal: Refusal) {
        let _ = self.stopped.set(refusal);
        self.stops.notify_waiters();
    }

    /// Notes credentials whose values have been sent in messages.
    pub fn sent_in_messages(&self, names: &[CredentialName]) {
        // Most messages have none.
        if names.is_empty() {
            return;
        }
        let mut known = self.in_messages.lock();
        for name in names {
            if !known.contains(name) {
                known.push(name.clone());
            }
        }
    }

    /// Returns the credentials whose values have been sent in messages.
    pub(super) fn credentials_in_messages(&self) -> Vec<CredentialName> {
        self.in_messages.lock().clone()
    }

    /// Records that the request must not be sent further because of a find, and counts it at once. The task of the exchange
    /// learns of it later, when parts of other requests have been sent.
    pub fn stop_at_find(&self, found: Finding, place: &'static str, finds: &StreamFinds) {
        let _counting = self.counting.lock();
        let _ = self.find.set(StreamFind { found, place, noted: finds.note() });
        self.stop(Deny::LeakDetected.into());
    }

    /// Returns the refusal of an exchange that is no longer allowed. If a find in its own request is the reason, the find is
    /// the refusal.
    #[must_use]
    pub fn revoked(&self, refusal: Refusal) -> Refusal {
        if self.find().is_some() { Deny::LeakDetected.into() } else { refusal }
    }

    /// Returns the refusal if the request must not be sent further.
    #[must_use]
    pub fn stopped(&self) -> Option<Refusal> {
        self.stopped.get().copied()
    }

    /// Returns the find in the request, if there was one while it was sent.
    pub(crate) fn find(&self) -> Option<&StreamFind> {
        // A find that is being counted is waited for.
        let _counting = self.counting.lock();
        self.find.get()
    }

    /// Waits until the request must not be sent further.
    pub async fn wait_until_stopped(&self) -> Refusal {
        loop {
            let stops = self.stops.notified();
            if let Some(refusal) = self.stopped() {
                return refusal;
            }
            stops.await;
        }
    }

    /// Records that the request is passed to a connection, which counts the heads it sends. Another thread may be writing
    /// the head when the exchange is aborted, so until [`Self::settle_head`] is called, it counts as sent.
    pub fn sends(&self, heads: Arc<AtomicU64>) {
        let before = heads.load(Ordering::Relaxed);
        let mut known = self.heads.lock();
        *known = HeadProgress { has_left: known.has_left(), last: Some((heads, before)), is_queued: true };
    }

    /// Records that the connection has responded or failed, so that no head is queued any longer.
    pub fn settle_head(&self) {
        self.heads.lock().is_queued = false;
    }

    /// Returns whether the request's head was sent. With concurrent heads, true means that at least one was sent.
    #[must_use]
    pub fn has_left(&self) -> bool {
        self.heads.lock().has_left()
    }

    /// Adds bytes sent to the origin.
    pub fn sent(&self, bytes: usize) {
        self.request.fetch_add(bytes as u64, Ordering::Relaxed);
        self.tick();
    }

    /// Resets the count, for a request that is sent again from its first byte.
    pub(super) fn sends_again(&self) {
        self.request.store(0, Ordering::Relaxed);
    }

    /// Returns the number of bytes sent to the origin so far.
    #[must_use]
    pub fn sent_so_far(&self) -> u64 {
        self.request.load(Ordering::Relaxed)
    }

    /// Adds bytes received from the origin.
    pub fn received(&self, bytes: usize) {
        self.response.fetch_add(bytes as u64, Ordering::Relaxed);
        self.tick();
    }

    /// Returns the number of bytes received from the origin so far.
    #[must_use]
    pub fn received_so_far(&self) -> u64 {
        self.response.load(Ordering::Relaxed)
    }

    /// Records a transfer.
    pub fn tick(&self) {
        let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        self.last_transfer.store(millis, Ordering::Relaxed);
    }

    /// Returns the time since the last transfer in either direction.
    #[must_use]
    pub fn idle_time(&self) -> Duration {
        self.began.elapsed().saturating_sub(Duration::from_millis(self.last_transfer.load(Ordering::Relaxed)))
    }

    /// Records that the client sent nothing of its body for `idle`, which exceeds the limit.
    pub fn client_stalled(&self, idle: Duration) {
        let _ = self.reached(ExchangeLimit::Idle(idle));
        self.client_stalled.store(true, Ordering::Relaxed);
    }

    /// Returns whether the client's body timed out.
    #[must_use]
    pub fn has_client_stalled(&self) -> bool {
        self.client_stalled.load(Ordering::Relaxed)
    }

    /// Records that the client disconnected within its body.
    pub fn client_failed(&self) {
        self.client_failed.store(true, Ordering::Relaxed);
    }

    /// Returns whether the client disconnected within its body.
    #[must_use]
    pub fn has_client_failed(&self) -> bool {
        self.client_failed.load(Ordering::Relaxed)
    }

    /// Records that the request was passed on completely.
    pub fn request_done(&self) {
        self.request_done.store(true, Ordering::Relaxed);
    }

    /// Returns whether the request was passed on completely.
    #[must_use]
    pub fn is_request_done(&self) -> bool {
        self.request_done.load(Ordering::Relaxed)
    }

    /// Ends the exchange: nothing of the request is sent any more.
    pub fn end(&self) {
        self.over.store(true, Ordering::Relaxed);
    }

    /// Returns whether the request must not continue, for a reason other than its connection.
    #[must_use]
    pub fn is_broken_off(&self) -> bool {
        self.stopped().is_some() || self.has_client_stalled() || self.has_client_failed() || self.is_over()
    }

    /// Returns whether the exchange has ended.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.over.load(Ordering::Relaxed)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::audit::finds::Finds;
    use crate::leak::{Matcher, ValueOwner};
    use crate::model::name::{CredentialName, ExecutionId};

    /// Other requests of the execution are sent until a find is counted, so it is counted where it is found.
    #[test]
    fn a_find_counts_at_once() {
        let finds = Arc::new(Finds::new(|| 1));
        let execution = ExecutionId::new("a");
        let other = StreamFinds::new(&finds, Some(execution.clone()));
        assert!(other.check().is_ok());
        let value = "k7Qz2mXv9LpW4sVt6eRRu8Yb";
        let owner = ValueOwner::Credential(CredentialName::new("KEY"));
        let found = Matcher::new(std::iter::once((owner, value.as_bytes()))).find(value.as_bytes()).unwrap();
        let counts = TransferCounts::new();
        let stopped = Deny::ExecutionStopped.into();
        assert_eq!(counts.revoked(stopped), stopped);
        counts.stop_at_find(found, "the body", &StreamFinds::new(&finds, Some(execution)));
        assert_eq!(other.check(), Err(stopped));
        // The exchange with the last find is refused for it, and not for the stop that it caused.
        assert_eq!(counts.revoked(stopped), Deny::LeakDetected.into());
        assert!(counts.find().is_some_and(|find| find.noted.is_some()));
    }
}

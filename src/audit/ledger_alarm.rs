//! The alarm for an entry of the shared ledger.

use serde::Serialize;

use super::line::Event;
use super::sink::{Announce, Keep, Sink};
use super::timestamp;

/// The line for an entry of the shared ledger that no proxy wrote, or that was moved.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct LedgerAlarm<'a> {
    /// `facts`, `request` or `decision`.
    pub kind: &'static str,
    /// The server's key of the entry.
    pub key: &'a str,
    /// The number of further entries since the last line.
    pub more: u64,
}

impl LedgerAlarm<'_> {
    /// Queues the line without waiting.
    pub fn write(&self, sink: &Sink) {
        #[derive(Serialize)]
        struct Line<'l> {
            ts: String,
            event: Event,
            alarm: &'static str,
            #[serde(flatten)]
            entry: &'l LedgerAlarm<'l>,
        }
        let alarm = "an entry of the ledger does not verify";
        sink.write(&Line { ts: timestamp::now(), event: Event::Alarm, alarm, entry: self }, Announce::No, Keep::Line);
    }
}

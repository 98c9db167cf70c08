//! Authenticates entries on the server by a MAC (HMAC-SHA-256) under a key that the proxies share. The MAC covers the
//! kind of the entry, its key on the server, and its id. A changed, forged or moved entry does not verify.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use super::super::{LedgerError, Result};
use crate::files;
use crate::model::secret::Secret;

/// The number of hex digits in a MAC.
const MAC_DIGITS: usize = 64;
/// The domain separation label, the first part of every MAC input.
const LABEL: &[u8] = b"exeat ledger 1";
/// The minimum interval between alarms. Alarms in between are counted.
const ALARM_INTERVAL: Duration = Duration::from_secs(1);
/// The maximum length of a key in an alarm, in bytes.
const MAX_NAME: usize = 256;

/// An entry that does not verify.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TamperedRecord {
    /// The kind of the entry: `facts`, `request` or `decision`.
    pub kind: &'static str,
    /// The server's key of the entry.
    pub key: String,
    /// The number of further entries since the last alarm.
    pub more: u64,
}

/// The callback that raises an alarm. It must not block.
pub type Alarm = Arc<dyn Fn(&TamperedRecord) + Send + Sync>;

/// The kind of an entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// An operator's decision.
    Decision,
    /// The facts of an execution, including the hash of its token.
    Facts,
    /// A request that waits for a decision.
    Request,
}

/// The key that proxies share, and the alarm for entries that do not verify.
pub struct Seal {
    key: Secret,
    alarm: Alarm,
    began: Instant,
    /// Milliseconds from `began` to the earliest next alarm.
    next: AtomicU64,
    suppressed: AtomicU64,
}

impl Seal {
    /// Creates a seal from a key of 32 random bytes.
    #[must_use]
    pub fn new(key: Secret, alarm: Alarm) -> Self {
        Self { key, alarm, began: Instant::now(), next: AtomicU64::new(0), suppressed: AtomicU64::new(0) }
    }

    /// Returns `MAC text`.
    pub(super) fn sealed(&self, kind: Kind, key: &str, id: &str, text: &str) -> Result<String> {
        let mac = files::hex(&self.mac(kind, key, id, text)?.finalize().into_bytes());
        Ok(format!("{mac} {text}"))
    }

    /// Verifies `MAC text` and returns the text.
    ///
    /// # Errors
    /// [`LedgerError::Unavailable`] if no proxy with the same key wrote it. This raises an alarm.
    pub(super) fn opened<'t>(&self, kind: Kind, key: &str, id: &str, sealed: &'t str) -> Result<&'t str> {
        self.verified(kind, key, id, sealed)?.ok_or_else(|| self.altered(kind, key))
    }

    /// Verifies in constant time.
    fn verified<'t>(&self, kind: Kind, key: &str, id: &str, sealed: &'t str) -> Result<Option<&'t str>> {
        let Some((mac, text)) = sealed.split_once(' ').filter(|(mac, _)| mac.len() == MAC_DIGITS) else {
            return Ok(None);
        };
        let Some(mac) = files::unhex(mac) else { return Ok(None) };
        Ok(self.mac(kind, key, id, text)?.verify_slice(&mac).is_ok().then_some(text))
    }

    /// Prefixes each part with its length, so that the boundaries between parts are unambiguous.
    fn mac(&self, kind: Kind, key: &str, id: &str, text: &str) -> Result<Hmac<Sha256>> {
        let hmac = Hmac::<Sha256>::new_from_slice(self.key.expose());
        let mut hmac = hmac.map_err(|_| LedgerError::Unavailable)?;
        for part in [LABEL, kind.name().as_bytes(), key.as_bytes(), id.as_bytes(), text.as_bytes()] {
            hmac.update(&(part.len() as u64).to_be_bytes());
            hmac.update(part);
        }
        Ok(hmac)
    }

    /// Raises the alarm, at most once a second.
    pub(super) fn altered(&self, kind: Kind, key: &str) -> LedgerError {
        let now = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
        let next = now.saturating_add(u64::try_from(ALARM_INTERVAL.as_millis()).unwrap_or(u64::MAX));
        let is_due = |due: u64| (due <= now).then_some(next);
        if self.next.fetch_update(Ordering::Relaxed, Ordering::Relaxed, is_due).is_err() {
            self.suppressed.fetch_add(1, Ordering::Relaxed);
            return LedgerError::Unavailable;
        }
        let more = self.suppressed.swap(0, Ordering::Relaxed);
        let key = key.get(..key.floor_char_boundary(MAX_NAME)).unwrap_or_default().to_owned();
        let altered = TamperedRecord { kind: kind.name(), key, more };
        tracing::error!(
            kind = altered.kind,
            key = altered.key,
            more,
            "an entry of the ledger does not verify: it was altered on the server, or written with another [ledger].key"
        );
        (self.alarm)(&altered);
        LedgerError::Unavailable
    }
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Self::Decision => "decision",
            Self::Facts => "facts",
            Self::Request => "request",
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    fn seal(key: u8) -> (Seal, Arc<Mutex<Vec<TamperedRecord>>>) {
        let raised = Arc::<Mutex<Vec<TamperedRecord>>>::default();
        let alarm = {
            let raised = raised.clone();
            Arc::new(move |altered: &TamperedRecord| raised.lock().unwrap().push(altered.clone()))
        };
        (Seal::new(Secret::new(vec![key; 32]), alarm), raised)
    }

    #[test]
    fn an_entry_verifies_only_unchanged_and_in_place() {
        let (seal, raised) = seal(1);
        let text = seal.sealed(Kind::Facts, "exeat:{a}:x", "a", "{}").unwrap();
        assert_eq!(seal.opened(Kind::Facts, "exeat:{a}:x", "a", &text), Ok("{}"));
        let other = super::tests::seal(2).0.sealed(Kind::Facts, "exeat:{a}:x", "a", "{}").unwrap();
        let rows = [
            (Kind::Request, "exeat:{a}:x", "a", text.clone()),
            (Kind::Facts, "exeat:{b}:x", "a", text.clone()),
            (Kind::Facts, "exeat:{a}:x", "b", text.clone()),
            (Kind::Facts, "exeat:{a}:", "xa", text.clone()),
            (Kind::Facts, "exeat:{a}:x", "a", format!("{text} ")),
            (Kind::Facts, "exeat:{a}:x", "a", text.replace("{}", "[]")),
            (Kind::Facts, "exeat:{a}:x", "a", text[1..].to_owned()),
            (Kind::Facts, "exeat:{a}:x", "a", "{}".to_owned()),
            (Kind::Facts, "exeat:{a}:x", "a", String::new()),
            (Kind::Facts, "exeat:{a}:x", "a", format!("{} {{}}", "ü".repeat(MAC_DIGITS / 2))),
            (Kind::Facts, "exeat:{a}:x", "a", other),
        ];
        for (kind, key, id, sealed) in rows {
            assert_eq!(
                seal.opened(kind, key, id, &sealed),
                Err(LedgerError::Unavailable),
                "{kind:?} {key} {id} {sealed}"
            );
        }
        let raised = raised.lock().unwrap();
        assert_eq!(
            *raised,
            [TamperedRecord { kind: "request", key: "exeat:{a}:x".to_owned(), more: 0 }],
            "once a second"
        );
    }
}

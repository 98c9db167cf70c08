//! What an approval is bound to, for the operator who decides: kept in memory, for the newest requests only.

use std::collections::{HashMap, VecDeque};

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use http::request::Parts;
use parking_lot::Mutex;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::digest;
use crate::audit::record::Record;
use crate::stages::authorize::Grant;

/// The most requests whose facts are kept.
const MAX_KEPT: usize = 256;
/// The most fields that are kept of a request.
const MAX_FIELDS: usize = 64;
/// The most characters of a field, and of the query.
const MAX_FIELD: usize = 1_000;
/// The most characters of a body.
const MAX_BODY: usize = 8_000;
/// A character has at most so many bytes.
const MAX_CHARACTER: usize = 4;
/// The bytes behind the longest text that are searched too: a value may begin in the text and end behind it.
const MARGIN: usize = 4_096;

/// The parts of a request that an approval is bound to, beside its execution, tool, method and URL. Texts have no values of
/// credentials in them.
#[derive(Clone, Debug, Serialize)]
pub struct BoundFacts {
    /// The digest of all parts, in hex.
    digest: String,
    /// The query, as it is sent.
    query: Option<String>,
    /// The credential that the proxy adds, and where.
    credential: Option<BoundCredential>,
    /// The header fields that are sent, without those of the credential.
    fields: Vec<[String; 2]>,
    /// Whether there are more fields than are kept.
    more_fields: bool,
    body: BoundBody,
    /// The trailer fields.
    trailers: Vec<[String; 2]>,
}

#[derive(Clone, Debug, Serialize)]
struct BoundCredential {
    name: String,
    places: Vec<String>,
}

#[derive(Clone, Debug, Serialize)]
struct BoundBody {
    bytes: usize,
    sha256: String,
    /// The beginning of the body. `None` if it is not text.
    text: Option<String>,
    /// Whether the text is the whole body.
    is_whole: bool,
}

/// The facts of the newest requests that wait for an approval.
#[derive(Default)]
pub struct FactStore(Mutex<Kept>);

#[derive(Default)]
struct Kept {
    facts: HashMap<String, BoundFacts>,
    order: VecDeque<String>,
}

impl FactStore {
    /// Returns the facts of an approval. They are not known after a restart, and by no other proxy of the same ledger.
    #[must_use]
    pub fn of(&self, approval: &str) -> Option<BoundFacts> {
        self.0.lock().facts.get(approval).cloned()
    }

    /// Keeps the facts of an approval, unless they are known: a client repeats its request.
    pub(super) fn keep(&self, approval: &str, facts: impl FnOnce() -> BoundFacts) {
        if self.0.lock().facts.contains_key(approval) {
            return;
        }
        let facts = facts();
        let mut kept = self.0.lock();
        if kept.facts.insert(approval.to_owned(), facts).is_none() {
            kept.order.push_back(approval.to_owned());
        }
        if kept.order.len() > MAX_KEPT
            && let Some(oldest) = kept.order.pop_front()
        {
            kept.facts.remove(&oldest);
        }
    }
}

impl BoundFacts {
    pub(super) fn of(
        grant: &Grant,
        parts: &Parts,
        (data, trailers): (&Bytes, Option<&HeaderMap>),
        hash: [u8; 32],
        record: &Record,
    ) -> Self {
        let shown = |text: &str, most: usize| -> String { record.redact(text).chars().take(most).collect() };
        let fields = |headers: &HeaderMap| -> Vec<[String; 2]> {
            let field = |(name, value): (&http::HeaderName, &http::HeaderValue)| {
                [shown(name.as_str(), MAX_FIELD), shown(&String::from_utf8_lossy(value.as_bytes()), MAX_FIELD)]
            };
            headers.iter().take(MAX_FIELDS).map(field).collect()
        };
        let sent = digest::end_to_end_fields(grant, parts);
        let credential = grant.selected_credential().map(|chosen| BoundCredential {
            name: chosen.credential.name().to_string(),
            places: chosen.placements().iter().map(ToString::to_string).collect(),
        });
        // Cut by bytes first: a body may have megabytes.
        let beginning = data.get(..data.len().min(MAX_BODY.saturating_mul(MAX_CHARACTER).saturating_add(MARGIN)));
        let beginning = beginning.unwrap_or_default();
        let is_coded = parts.headers.contains_key(CONTENT_ENCODING);
        let text = match std::str::from_utf8(beginning) {
            _ if is_coded => None,
            Ok(text) => Some(text),
            // Only the last character may be cut.
            Err(error)
                if error.valid_up_to().saturating_add(MAX_CHARACTER) > beginning.len()
                    && error.error_len().is_none() =>
            {
                beginning.get(..error.valid_up_to()).and_then(|valid| std::str::from_utf8(valid).ok())
            }
            Err(_) => None,
        };
        let is_whole = text.is_some_and(|text| text.len() == data.len() && text.chars().count() <= MAX_BODY);
        Self {
            digest: hex(&hash),
            query: digest::sent_query(grant).map(|query| shown(&query, MAX_FIELD)),
            credential,
            fields: fields(&sent),
            more_fields: sent.len() > MAX_FIELDS,
            body: BoundBody {
                bytes: data.len(),
                sha256: hex(&Sha256::digest(data)),
                text: text.map(|text| shown(text, MAX_BODY)),
                is_whole,
            },
            trailers: trailers.map(fields).unwrap_or_default(),
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

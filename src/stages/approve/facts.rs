//! The facts that an approval is bound to, for the operator who decides: kept in memory, for the newest requests only.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use bytes::Bytes;
use http::HeaderMap;
use http::header::CONTENT_ENCODING;
use http::request::Parts;
use parking_lot::Mutex;
use serde::Serialize;
use sha2::{Digest, Sha256};

use super::digest;
use crate::audit::record::Record;
use crate::model::name::ExecutionId;
use crate::model::tool::{Kind, Tool};
use crate::policy::credential::Credential;
use crate::stages::authorize::Grant;
use crate::stages::authorize::credential::SelectedCredential;

/// The most requests whose facts are kept.
const MAX_KEPT: usize = 512;
/// The most characters of the query, the fields and the trailers together.
const MAX_HEAD: usize = 32_000;
/// The most characters of a body.
const MAX_BODY: usize = 8_000;
/// A character has at most so many bytes.
const MAX_CHARACTER: usize = 4;
/// The bytes behind the longest text that are searched too: a value may begin in the text and end behind it, and be escaped.
const MARGIN: usize = 64 * 1024;
/// The bytes of a body that are hashed before the task yields.
const PORTION: usize = 512 * 1024;

/// The parts of a request that an approval is bound to, beside its execution, tool, method and URL. Texts have no values of
/// credentials in them.
#[derive(Clone, Debug, Serialize)]
pub struct BoundFacts {
    /// The digest of all parts, in hex.
    digest: String,
    /// Whether all texts are whole, the URL included.
    is_complete: bool,
    /// The query, as it is sent. For a webhook, its hash: the log has no more of the URL either.
    query: Option<String>,
    /// The credentials that the proxy adds, and where.
    credentials: Vec<BoundCredential>,
    /// The header fields that are sent, without those of the credential.
    fields: Vec<[String; 2]>,
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
    /// The approvals with their executions, oldest first.
    order: VecDeque<(String, ExecutionId)>,
}

impl FactStore {
    /// Returns the facts of an approval. They are not known after a restart, by another proxy of the same ledger, and of the oldest
    /// approvals of executions that ask for many.
    #[must_use]
    pub fn of(&self, approval: &str) -> Option<BoundFacts> {
        self.0.lock().facts.get(approval).cloned()
    }

    /// Returns true if the facts of an approval are known: a client repeats its request.
    pub(super) fn has(&self, approval: &str) -> bool {
        self.0.lock().facts.contains_key(approval)
    }

    /// Keeps the facts of an approval. If there are too many, the execution with most of them loses its oldest.
    pub(super) fn keep(&self, approval: &str, execution: &ExecutionId, facts: BoundFacts) {
        let kept = &mut *self.0.lock();
        if kept.facts.insert(approval.to_owned(), facts).is_none() {
            kept.order.push_back((approval.to_owned(), execution.clone()));
        }
        if kept.order.len() > MAX_KEPT {
            let mut counts: HashMap<&ExecutionId, usize> = HashMap::new();
            kept.order.iter().for_each(|(_, execution)| {
                let count = counts.entry(execution).or_default();
                *count = count.saturating_add(1);
            });
            let most = counts.into_iter().max_by_key(|(_, count)| *count).map(|(execution, _)| execution.clone());
            let oldest = kept.order.iter().position(|(_, execution)| Some(execution) == most.as_ref());
            if let Some((id, _)) = oldest.and_then(|at| kept.order.remove(at)) {
                kept.facts.remove(&id);
            }
        }
    }
}

/// Texts of a request, without values of credentials, up to a number of characters together.
struct Texts<'r> {
    record: &'r Record,
    left: usize,
    is_complete: bool,
}

impl Texts<'_> {
    fn of(&mut self, text: &str) -> String {
        let redacted = self.record.redact(text);
        let shown: String = redacted.chars().take(self.left).collect();
        self.left = self.left.saturating_sub(shown.chars().count());
        self.is_complete &= shown.len() == redacted.len();
        shown
    }

    fn fields(&mut self, headers: &HeaderMap) -> Vec<[String; 2]> {
        let mut fields = Vec::new();
        for (name, value) in headers {
            if self.left == 0 {
                self.is_complete = false;
                break;
            }
            fields.push([self.of(name.as_str()), self.of(&String::from_utf8_lossy(value.as_bytes()))]);
        }
        fields
    }
}

impl BoundFacts {
    pub(super) async fn of(
        grant: &Grant,
        parts: &Parts,
        (data, trailers): (&Bytes, Option<&HeaderMap>),
        hash: [u8; 32],
        (record, is_url_whole): (&Record, bool),
    ) -> Self {
        let mut sha256 = Sha256::new();
        for portion in data.chunks(PORTION) {
            sha256.update(portion);
            tokio::task::yield_now().await;
        }
        let sha256 = hex(&sha256.finalize());
        let in_messages = |credential: &Credential| -> Vec<String> {
            let is_swapped = grant.message_swaps().is_some();
            credential.message_places().filter(|_| is_swapped).map(ToString::to_string).collect()
        };
        let bound = |chosen: &SelectedCredential| BoundCredential {
            name: chosen.credential.name().to_string(),
            places: {
                let placements = chosen.placements().into_iter().map(|place| place.to_string());
                placements.chain(in_messages(&chosen.credential)).collect()
            },
        };
        let only_in_messages = |credential: &Arc<Credential>| BoundCredential {
            name: credential.name().to_string(),
            places: in_messages(credential),
        };
        let credentials = grant.selected_credentials().iter().map(bound);
        let credentials = credentials.chain(grant.only_in_messages().map(only_in_messages)).collect();
        let mut texts = Texts { record, left: MAX_HEAD, is_complete: is_url_whole };
        let is_webhook = grant.kind() == Kind::Tool(Tool::Webhook);
        let query = digest::sent_query(grant).map(|query| match is_webhook {
            true => format!("sha256:{}", hex(&Sha256::digest(query))),
            false => texts.of(&query),
        });
        let fields = texts.fields(&digest::end_to_end_fields(grant, parts));
        let trailers = trailers.map(|trailers| texts.fields(trailers)).unwrap_or_default();
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
        let shown = |text: &str| -> String { record.redact(text).chars().take(MAX_BODY).collect() };
        Self {
            digest: hex(&hash),
            is_complete: texts.is_complete && (is_whole || data.is_empty()),
            query,
            credentials,
            fields,
            body: BoundBody { bytes: data.len(), sha256, text: text.map(shown), is_whole },
            trailers,
        }
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

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

use super::{command, digest};
use crate::audit::record::Record;
use crate::model::name::ExecutionId;
use crate::model::shell_command::ShellCommand;
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
    /// The code for `exeat approve --code`: random, so that nobody but a reader of these facts knows it.
    code: String,
    /// Whether all of it is shown as it is, the method and the URL included: nothing is masked, cut, hashed or invisible.
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
        // A text in which a value is masked is not shown whole either.
        self.is_complete &= shown == text && is_visible(text);
        shown
    }

    fn fields(&mut self, headers: &HeaderMap) -> Vec<[String; 2]> {
        let mut fields = Vec::new();
        for (name, value) in headers {
            if self.left == 0 {
                self.is_complete = false;
                break;
            }
            let text = String::from_utf8_lossy(value.as_bytes());
            self.is_complete &= text.as_bytes() == value.as_bytes();
            fields.push([self.of(name.as_str()), self.of(&text)]);
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
        (record, is_target_shown): (&Record, bool),
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
        // The client may have chosen the parts of a signature's scope.
        let scope = |chosen: &SelectedCredential| {
            let scope = chosen.scope.as_ref()?;
            let text = format!("scope:{}/{} with {}", scope.region, scope.service, scope.algorithm.name());
            Some(record.redact(&text).into_owned())
        };
        let bound = |chosen: &SelectedCredential| BoundCredential {
            name: chosen.credential.name().to_string(),
            places: {
                let placements = chosen.placements().into_iter().map(|place| place.to_string());
                placements.chain(in_messages(&chosen.credential)).chain(scope(chosen)).collect()
            },
        };
        let only_in_messages = |credential: &Arc<Credential>| BoundCredential {
            name: credential.name().to_string(),
            places: in_messages(credential),
        };
        let credentials = grant.selected_credentials().iter().map(bound);
        let credentials = credentials.chain(grant.only_in_messages().map(only_in_messages)).collect();
        let mut texts = Texts { record, left: MAX_HEAD, is_complete: is_target_shown };
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
        let shown = |text: &str| -> String { record.redact(text).chars().take(MAX_BODY).collect() };
        let is_readable = text.is_some_and(is_visible);
        let text = text.map(shown);
        let is_whole = text.as_ref().is_some_and(|text| text.as_bytes() == data.as_ref());
        Self {
            digest: hex(&hash),
            code: code(),
            is_complete: texts.is_complete && ((is_whole && is_readable) || data.is_empty()),
            query,
            credentials,
            fields,
            body: BoundBody { bytes: data.len(), sha256, text, is_whole },
            trailers,
        }
    }
}

impl BoundFacts {
    /// Returns the facts of a command: it is the body, and the fields tell where it would run.
    pub(super) fn of_command(shown: &ShellCommand, hash: [u8; 32], record: &Record) -> Self {
        let mut texts = Texts { record, left: MAX_HEAD, is_complete: true };
        let fields = command::conditions(shown).into_iter().map(|[name, value]| [name, texts.of(&value)]).collect();
        let text: String = record.redact(&shown.command).chars().take(MAX_BODY).collect();
        let is_whole = text == shown.command;
        let (bytes, sha256) = (shown.command.len(), hex(&Sha256::digest(&shown.command)));
        Self {
            digest: hex(&hash),
            code: code(),
            is_complete: texts.is_complete && is_whole,
            query: None,
            credentials: Vec::new(),
            fields,
            body: BoundBody { bytes, sha256, text: Some(text), is_whole },
            trailers: Vec::new(),
        }
    }
}

/// Returns a random code. Without random numbers, it is too short to be used.
fn code() -> String {
    getrandom::u64().map(|random| format!("{random:016x}")).unwrap_or_default().chars().take(8).collect()
}

/// Returns whether a text has no characters that are not visible, or change the order of the others. Ends of lines and tabs are visible.
fn is_visible(text: &str) -> bool {
    let is_hidden = |c: char| {
        (c.is_control() && !matches!(c, '\t' | '\n' | '\r'))
            || matches!(
                c,
                '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'
                    ..='\u{180f}'
            )
            || matches!(c, '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}')
            || matches!(c, '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}')
            || matches!(c, '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
    };
    !text.chars().any(is_hidden)
}

pub(super) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn invisible_characters_are_known() {
        for text in ["", "a b\tc\r\n", "äöü 漢字 😀", "\u{a0}"] {
            assert!(is_visible(text), "{text:?}");
        }
        for text in [
            "\0",
            "\u{1b}[2K",
            "\u{7f}",
            "\u{9b}",
            "a\u{ad}b",
            "\u{200b}",
            "\u{202e}",
            "\u{2066}",
            "\u{feff}",
            "\u{e0041}",
            "\u{fe0f}",
        ] {
            assert!(!is_visible(text), "{text:?}");
        }
    }

    #[test]
    fn codes_are_random() {
        let codes: std::collections::HashSet<String> = (0..100).map(|_| code()).collect();
        assert!(codes.len() > 98 && codes.iter().all(|code| code.len() == 8), "{codes:?}");
    }
}

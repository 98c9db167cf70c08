//! Data for the benchmarks of the scanner: credentials and text, the same in every run.

use std::sync::Arc;

use exeat::leak::strength::Strength;
use exeat::leak::{Matcher, Value, ValueOwner};
use exeat::model::name::CredentialName;

const PREFIXES: [&str; 8] = ["sk-ant-api03-", "sk-proj-", "ghp_", "github_pat_", "xoxb-", "AKIA", "glpat-", ""];
const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// xorshift64*: the same bytes in every run.
pub(crate) struct Random(pub(crate) u64);

impl Random {
    pub(crate) fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        usize::try_from((self.next() >> 33) % n as u64).unwrap()
    }

    pub(crate) fn pick<'t, T>(&mut self, from: &'t [T]) -> &'t T {
        &from[self.below(from.len())]
    }
}

/// Returns realistic credentials: the prefix of their kind, then 20 to 128 bytes in all.
pub(crate) fn values(n: usize) -> Vec<Vec<u8>> {
    let mut random = Random(42);
    let mut one = |_| {
        let mut value = random.pick(&PREFIXES).as_bytes().to_vec();
        let length = 20 + random.below(109);
        value.resize_with(length.max(value.len()), || *random.pick(LETTERS));
        value
    };
    (0..n).map(&mut one).collect()
}

/// Returns the index of the credentials.
pub(crate) fn matcher(values: &[Vec<u8>]) -> Arc<Matcher> {
    let whose = |at: usize| ValueOwner::Credential(CredentialName::new(&format!("KEY_{at}")));
    let values = values.iter().enumerate();
    Arc::new(Matcher::new(values.map(|(at, value)| Value::new(whose(at), value).with_halves(Strength::of(value)))))
}

pub(crate) const WORDS: [&str; 40] = [
    "the",
    "of",
    "and",
    "request",
    "answer",
    "a",
    "in",
    "function",
    "value",
    "is",
    "that",
    "it",
    "returns",
    "when",
    "stream",
    "was",
    "for",
    "with",
    "which",
    "bytes",
    "held",
    "because",
    "an",
    "error",
    "I",
    "would",
    "suggest",
    "to",
    "first",
    "look",
    "at",
    "file",
    "`config.toml`",
    "and",
    "then",
    "run",
    "tests",
    "again",
    "they",
    "pass",
];

/// Returns a sentence as a model might write it.
pub(crate) fn sentence(random: &mut Random) -> String {
    let words: Vec<&str> = (0..6 + random.below(14)).map(|_| *random.pick(&WORDS)).collect();
    match random.below(12) {
        0 => format!("\"{}\" is 100% R&D. ", words.join(" ")),
        1 => format!("{}:\n\n", words.join(" ")),
        2 => format!("{}.\n", words.join(" ")),
        _ => format!("{}. ", words.join(" ")),
    }
}

/// Returns JSON of a chat, of at least this many bytes.
pub(crate) fn chat(random: &mut Random, size: usize) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < size {
        let content: String = (0..12).map(|_| sentence(random)).collect();
        let id = format!("msg_{:016x}", random.next());
        let message =
            serde_json::json!({"id": id, "role": "assistant", "content": content, "stop": null, "tokens": 318});
        out.extend_from_slice(message.to_string().as_bytes());
    }
    out
}

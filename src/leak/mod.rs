//! Finds held credentials in what passes, in the forms they take on their way. Pure: bytes in, bytes out.
//!
//! A value is looked for as it is, percent-encoded, and in base64 and base64url at all three alignments.
//! Texts are also read with their percent-encoding undone, once and twice. What is compressed is undone by
//! [`coding`], so that it can be looked at too.

mod automaton;
pub mod coding;
mod forms;
mod inflate;
mod matcher;
mod redact;
mod zstd;

pub use forms::{MIN_VALUE, Unsearchable, unsearchable};
pub use matcher::{Match, Matcher};
pub use redact::Redactor;

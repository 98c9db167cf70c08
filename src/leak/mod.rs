//! Finds and redacts credentials in all their encodings. No I/O.
//!
//! A value is found in plain form, in base64 and base64url at all three alignments, and in hex (`encodings`); across
//! line breaks, and behind percent-encoding, string escapes and HTML references, each undone once and twice, all families
//! together and each alone (`unescape`, `unescaped_view`, `view`, `views`); in embedded base64 (`embedded`), and in lists
//! of numbers (`number_lists`). [`strength`] tells weak values apart, because a reaction to a guessable value confirms the
//! guess. Streams are scanned as they arrive, wherever they are cut (`stream`, `scanner`). Outgoing bytes are held back
//! while a value may be incomplete (`holdback`); in answers values are overwritten (`redact`). [`crate::coding`] decodes
//! compressed bodies before.

mod automaton;
mod delay_queue;
mod embedded;
mod encodings;
pub mod families;
mod fold;
mod holdback;
mod matcher;
mod number_lists;
mod prefilter;
mod redact;
mod scanner;
mod stream;
pub mod strength;
mod unescape;
mod unescaped_view;
mod view;
mod views;

pub use encodings::MIN_VALUE;
pub use holdback::Holdback;
pub use matcher::{Finding, Matcher, Value, ValueOwner, password};
pub use redact::Redactor;

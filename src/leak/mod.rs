//! Finds held credentials in what passes, in the forms they take on their way. Pure: bytes in, bytes out.
//!
//! A value is looked for as it is, in base64 and base64url at all three alignments, and in hex (`forms`);
//! wherever line breaks stand between, and behind percent-encoding, the escapes of strings and the references
//! of HTML, each undone once and twice, all together and each alone (`escape`, `undone`, `reading`, `layers`); in
//! parts that are base64 as a whole (`parts`), and in lists of numbers (`numbers`). Values that can be guessed are
//! told apart by [`strength`], because any reaction to them would confirm a guess. Streams are looked through as they come, wherever they are cut (`scan`, `text`); on their
//! way out they are held for as long as a value could still come to its end (`hold`), on their way back values
//! are overwritten (`redact`). What is compressed is undone by [`crate::coding`], so that it can be looked at too.

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

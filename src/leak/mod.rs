//! Finds held credentials in what passes, in the forms they take on their way. Pure: bytes in, bytes out.
//!
//! A value is looked for as it is, in base64 and base64url at all three alignments, and in hex (`forms`);
//! wherever line breaks stand between, and behind percent-encoding, the escapes of strings and the references
//! of HTML, each undone once and twice, all together and each alone (`escape`, `undone`, `reading`, `layers`); in
//! parts that are base64 as a whole (`parts`), and in lists of numbers (`numbers`). Values that can be guessed are
//! told apart by [`strength`], because any reaction to them would confirm a guess. Streams are looked through as they come, wherever they are cut (`scan`, `text`); on their
//! way out they are held for as long as a value could still come to its end (`hold`), on their way back values
//! are overwritten (`redact`). What is compressed is undone by [`coding`], so that it can be looked at too.

mod anchors;
mod automaton;
pub mod coding;
mod escape;
pub mod families;
mod fold;
mod forms;
mod hold;
mod inflate;
mod layers;
mod matcher;
mod numbers;
mod parts;
mod queue;
mod reading;
mod redact;
mod scan;
pub mod strength;
mod text;
mod undone;
mod zstd;

pub use forms::MIN_VALUE;
pub use hold::Hold;
pub use matcher::{Found, Matcher, Value, Whose, password};
pub use redact::Redactor;

//! Finds and redacts credentials in all their encodings. No I/O.
//!
//! A value is found in plain form, in base64 and base64url at all three alignments, and in hex (`encodings`), also if
//! it was transcoded to another character set (`readings`), or is itself an encoding and was decoded (`equivalents`). It
//! is found across line breaks, and behind
//! percent-encoding, string escapes and HTML references, decoded once and twice, all families together and each alone
//! (`unescape`, `unescaped_view`, `view`, `views`). Embedded base64 (`embedded`) and lists of numbers (`number_lists`)
//! are decoded and scanned too. [`crate::coding`] decompresses bodies before the scan.
//!
//! The layers, from the outside to the inside:
//!
//! 1. `holdback` scans outgoing bytes and holds them back while a value may be incomplete. `redact` overwrites values
//!    in responses.
//! 2. `scanner` scans a stream as it arrives, regardless of how it is cut: its bytes (`stream`), embedded base64 and
//!    lists of numbers.
//! 3. `views` searches the bytes in several views, because recipients decode escapes differently.
//! 4. In each view, `prefilter` finds candidates and `automaton` verifies them.
//!
//! Terms: a *value* is a secret. Its *owner* is a credential, the token or a family, and is a number in the index. A
//! *form* is one encoding of a value. A *partial match* is the start of a form that has at least half of the value, but
//! not all of it. A *half* is the first or second half of a long value that is searched for on its own. A *position* is
//! a byte offset in the stream.
//!
//! If the proxy refuses or redacts a text, a sandbox that guessed a value learns that the guess is right. So neither the
//! time of a search nor the bytes released may depend on how much of a guess is right. For the same reason weak values
//! are not searched for ([`strength`]).

mod automaton;
mod delay_queue;
mod embedded;
mod encodings;
mod equivalents;
pub mod families;
mod fold;
mod holdback;
mod index;
mod log_values;
mod mask;
mod matcher;
mod matches;
mod number_lists;
mod prefilter;
mod readings;
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
pub use index::ValueOwner;
pub use log_values::{LogValues, ValueSource};
pub use matcher::{Finding, Matcher, Value, password};
pub use redact::{FindCount, Redactor};
pub use unescape::ends_within_escape;

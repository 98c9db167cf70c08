//! Forms in requests of the proxy's own.

use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_encode};
use zeroize::Zeroizing;

/// All but the characters that a form and the parts of `Basic` may carry as they are (RFC 6749 appendix B).
pub(super) const NOT_IN_FORM: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// A form, as it is sent.
#[derive(Default)]
pub(super) struct Form(pub(super) Zeroizing<Vec<u8>>);

impl Form {
    pub(super) fn add(&mut self, name: &str, value: &[u8]) {
        if !self.0.is_empty() {
            self.0.push(b'&');
        }
        self.0.extend_from_slice(name.as_bytes());
        self.0.push(b'=');
        percent_encode(value, NOT_IN_FORM).for_each(|part| self.0.extend_from_slice(part.as_bytes()));
    }
}

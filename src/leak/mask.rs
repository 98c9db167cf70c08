//! Overwrites values.

use super::fold::is_line_break;

/// The byte that overwrites values.
const MASK: u8 = b'*';

/// Overwrites bytes except for line breaks, which may be syntax.
pub(super) fn mask(bytes: &mut [u8]) {
    bytes.iter_mut().filter(|byte| !is_line_break(**byte)).for_each(|byte| *byte = MASK);
}

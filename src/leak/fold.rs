//! Which bytes are taken for one another, and which begin an escape.

/// What is skipped wherever it stands: no value holds a line break, and encoders break lines at will.
pub(super) const SKIPPED: u8 = b'\n';

/// A byte as the automaton reads it. The two alphabets of base64 are one (RFC 4648 §4, §5), a `+` may be a
/// space of a form, and the digits of hex have no case. For bytes as random as those of a key it makes no
/// difference; for what is caught it does.
pub(super) const fn fold(byte: u8) -> u8 {
    match byte {
        b'\r' => SKIPPED,
        b' ' | b'-' => b'+',
        b'_' => b'/',
        b'A'..=b'F' => byte | 0x20,
        _ => byte,
    }
}

/// All bytes that are read as this one.
pub(super) fn unfolded(folded: u8) -> impl Iterator<Item = u8> {
    (0..=u8::MAX).filter(move |byte| fold(*byte) == folded)
}

/// True for a byte that may begin an escape.
pub(super) const fn begins_escape(byte: u8) -> bool {
    matches!(byte, b'%' | b'\\' | b'&')
}

/// True for a byte that is skipped behind a line break: the line may be indented.
pub(super) const fn is_indent(byte: u8) -> bool {
    matches!(byte, b' ' | b'\t')
}

/// True for a byte that is skipped.
pub(super) const fn is_break(byte: u8) -> bool {
    matches!(byte, b'\n' | b'\r')
}

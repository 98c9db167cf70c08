//! The nonce that the placeholders of one call begin with: `${NONCE.NAME}`.

/// Letters of a nonce: 64 of them, so that six random bits are one.
const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const LENGTH: usize = 32;

/// Returns a nonce that a model cannot guess. Without one a call is not made, because its placeholders would be
/// ambiguous.
pub(super) fn nonce() -> Result<String, &'static str> {
    let mut bytes = [0; LENGTH];
    getrandom::fill(&mut bytes).map_err(|_| "no random numbers are available")?;
    let letter = |byte: &u8| LETTERS.get(usize::from(byte & 63)).map_or('A', |letter| char::from(*letter));
    Ok(bytes.iter().map(letter).collect())
}

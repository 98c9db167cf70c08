//! The nonce that the placeholders of one call begin with: `${NONCE.NAME}`.

/// The letters of a nonce. There are 64, so each one encodes six random bits.
const LETTERS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const LENGTH: usize = 32;

/// Returns a nonce that a model cannot guess. A call without one is not made, because its placeholders would be
/// ambiguous.
pub(super) fn nonce() -> Result<String, &'static str> {
    let mut bytes = [0; LENGTH];
    getrandom::fill(&mut bytes).map_err(|_| "no random numbers are available")?;
    let letter = |byte: &u8| LETTERS.get(usize::from(byte & 63)).map_or('A', |letter| char::from(*letter));
    Ok(bytes.iter().map(letter).collect())
}

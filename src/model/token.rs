//! Tokens of executions. A token contains the execution id, so that a `Bearer` field can be resolved without a search.

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use zeroize::Zeroizing;

use super::name::ExecutionId;

/// The prefix of every token, by which people and secret scanners recognize it.
pub const PREFIX: &str = "exeat_";
/// The number of random bytes in a token.
pub const RANDOM: usize = 32;

/// Builds the token of an execution.
#[must_use]
pub fn write(id: &ExecutionId, random: &[u8; RANDOM]) -> Zeroizing<String> {
    let mut token =
        Zeroizing::new(String::with_capacity(PREFIX.len().saturating_add(id.as_str().len()).saturating_add(44)));
    token.push_str(PREFIX);
    token.push_str(id.as_str());
    token.push('_');
    URL_SAFE_NO_PAD.encode_string(random, &mut token);
    token
}

/// Returns the execution id in a token, unverified.
#[must_use]
pub fn id_of(token: &str) -> Option<ExecutionId> {
    let (id, _) = token.strip_prefix(PREFIX)?.split_once('_')?;
    is_id(id).then(|| ExecutionId::new(id))
}

/// Returns true for a well-formed id of a started execution: a UUID of 32 hexadecimal digits.
#[must_use]
pub fn is_id(id: &str) -> bool {
    id.len() == 32 && id.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_contains_its_execution_id() {
        let id = ExecutionId::new("019f00c4e9a37d00a1b2c3d4e5f60718");
        let token = write(&id, &[0xfb; RANDOM]);
        assert_eq!(*token, format!("exeat_{id}_{}", "-_v7".repeat(10) + "-_s"));
        assert_eq!(id_of(&token), Some(id));
        for other in ["", "exeat_", "exeat_x_y", "exeat_019F00c4e9a37d00a1b2c3d4e5f60718_x", "token"] {
            assert_eq!(id_of(other), None, "{other}");
        }
    }
}

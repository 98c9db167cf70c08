//! The audit chain: every line carries an HMAC over itself and the line before it.
//!
//! A writer of the file who lacks the key cannot change, insert or drop a line without detection. Truncation is
//! detected by comparison with the head, which is stored in the state directory and authenticated too.

use hmac::{Hmac, KeyInit, Mac};
use sha2::Sha256;

use crate::files;
use crate::model::secret::Secret;

/// An HMAC in lower-case hex, the last field of a line.
pub type MacHex = String;

/// The MAC that the first line follows.
pub const GENESIS: &str = "0000000000000000000000000000000000000000000000000000000000000000";

const FIELD: &str = ",\"mac\":\"";
const HEX_LEN: usize = GENESIS.len();

/// The key of the chain.
pub struct ChainKey(Secret);

impl ChainKey {
    /// Creates a chain key.
    #[must_use]
    pub fn new(key: Secret) -> Self {
        Self(key)
    }

    /// Adds the MAC to a JSON object: `{…}` becomes `{…,"mac":"…"}` and a newline. Returns the line and its MAC.
    #[must_use]
    pub fn seal(&self, previous: &str, json: &str) -> (String, MacHex) {
        let mac = self.mac(&[previous.as_bytes(), json.as_bytes()]);
        let open = json.strip_suffix('}').unwrap_or(json);
        (format!("{open}{FIELD}{mac}\"}}\n"), mac)
    }

    /// Returns the MAC of a line if the line follows `previous` and is unchanged.
    #[must_use]
    pub fn check(&self, previous: &str, line: &str) -> Option<MacHex> {
        let (json, given) = split(line)?;
        let mac = self.mac(&[previous.as_bytes(), json.as_bytes()]);
        constant_time_eq(&mac, given).then_some(mac)
    }

    /// Authenticates the head: the last MAC and the number of lines.
    #[must_use]
    pub fn seal_head(&self, head: &Head) -> String {
        let text = format!("{} {:020}", head.mac, head.lines);
        let mac = self.mac(&[b"head", text.as_bytes()]);
        format!("{text} {mac}\n")
    }

    /// Parses and verifies a head.
    #[must_use]
    pub fn open_head(&self, text: &str) -> Option<Head> {
        let (content, mac) = text.trim_end().rsplit_once(' ')?;
        if !constant_time_eq(&self.mac(&[b"head", content.as_bytes()]), mac) {
            return None;
        }
        let (mac, lines) = content.split_once(' ')?;
        Some(Head { mac: mac.to_owned(), lines: lines.parse().ok()? })
    }

    fn mac(&self, parts: &[&[u8]]) -> MacHex {
        // HMAC takes keys of any length; the constructor cannot fail.
        let Ok(mut hmac) = Hmac::<Sha256>::new_from_slice(self.0.expose()) else { return String::new() };
        for part in parts {
            hmac.update(part);
        }
        files::hex(&hmac.finalize().into_bytes())
    }
}

/// The head of the chain.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Head {
    /// The MAC of the last line.
    pub mac: MacHex,
    /// The number of lines in the chain.
    pub lines: u64,
}

/// Returns the MAC at the end of a line.
#[must_use]
pub fn mac_of(line: &str) -> Option<&str> {
    split(line).map(|(_, mac)| mac)
}

/// Splits a line into the JSON object without the MAC and the MAC.
#[must_use]
pub fn split(line: &str) -> Option<(String, &str)> {
    let rest = line.strip_suffix("\"}")?;
    let cut = rest.len().checked_sub(HEX_LEN)?;
    let (open, mac) = (rest.get(..cut)?, rest.get(cut..)?);
    let open = open.strip_suffix(FIELD)?;
    mac.bytes().all(|b| b.is_ascii_hexdigit()).then(|| (format!("{open}}}"), mac))
}

fn constant_time_eq(a: &str, b: &str) -> bool {
    subtle::ConstantTimeEq::ct_eq(a.as_bytes(), b.as_bytes()).into()
}

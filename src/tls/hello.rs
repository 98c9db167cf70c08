//! Parses the `ClientHello` in the first bytes of a tunnel.
//!
//! The server name is meaningless if the `ClientHello` is encrypted (ECH), and rustls does not expose raw
//! extensions. So this module has its own bounds-checked parser, for any number of records.

/// The maximum size of a `ClientHello`, in bytes. Its length field allows 16 MiB.
pub const MAX_HELLO: usize = 64 * 1024;

/// The relevant content of a `ClientHello`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Hello {
    /// The server name as sent (RFC 6066 §3).
    pub server_name: Option<String>,
    /// Whether there is an `encrypted_client_hello` extension or one of its drafts. Real and GREASE extensions cannot
    /// be distinguished.
    pub ech: bool,
}

/// The result of parsing the bytes received so far.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Progress {
    /// A complete `ClientHello`.
    Hello(Hello),
    /// A valid but incomplete `ClientHello`.
    Partial,
}

/// The error of bytes that do not begin a TLS handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("not a TLS ClientHello")]
pub struct NotTls;

const RECORD_HANDSHAKE: u8 = 22;
pub(super) const CLIENT_HELLO: u8 = 1;
const EXT_SERVER_NAME: u16 = 0;
/// `encrypted_client_hello` (RFC 9849) and its drafts from the eighth on.
const EXT_ECH: std::ops::RangeInclusive<u16> = 0xfe08..=0xfe0d;
/// `encrypted_server_name` of the drafts up to the sixth, and the numbers of the seventh draft and its working copies.
const EXT_ESNI: [u16; 3] = [0xffce, 0xff02, 0xff08];
/// The maximum size of a record's fragment, in bytes (RFC 8446 §5.1).
const MAX_RECORD: usize = 1 << 14;

/// Parses the bytes received so far, from the first byte of the connection.
///
/// # Errors
/// [`NotTls`] as soon as the bytes cannot be the beginning of a `ClientHello`.
pub fn read(bytes: &[u8]) -> Result<Progress, NotTls> {
    let Some(message) = unframe(bytes)? else { return Ok(Progress::Partial) };
    parse(&message).map(Progress::Hello).ok_or(NotTls)
}

/// Reassembles the handshake message from its records. Returns `None` while a part is missing.
fn unframe(bytes: &[u8]) -> Result<Option<Vec<u8>>, NotTls> {
    let mut rest = bytes;
    let mut message = Vec::new();
    loop {
        let (head, ok) = rest.split_at_checked(5).map_or((rest, false), |(head, _)| (head, true));
        let plausible = head
            .iter()
            .zip([Some(RECORD_HANDSHAKE), Some(3), None, None, None])
            .all(|(got, want)| want.is_none_or(|w| w == *got));
        if !plausible {
            return Err(NotTls);
        }
        if !ok {
            return Ok(None);
        }
        let mut reader = Reader(rest.get(3..).unwrap_or_default());
        let length = reader.u16().map_or(0, usize::from);
        if length == 0 || length > MAX_RECORD {
            return Err(NotTls);
        }
        let available = reader.0.get(..length);
        message.extend_from_slice(available.unwrap_or(reader.0));
        if message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
            return Err(NotTls);
        }
        if let Some(wanted) = message_length(&message) {
            if wanted > MAX_HELLO {
                return Err(NotTls);
            }
            if message.len() >= wanted {
                message.truncate(wanted);
                return Ok(Some(message));
            }
        }
        if available.is_none() {
            return Ok(None);
        }
        rest = reader.0.get(length..).unwrap_or_default();
    }
}

/// Returns the length of a handshake message with its head, in bytes, or `None` while the head is incomplete.
pub(super) fn message_length(message: &[u8]) -> Option<usize> {
    let mut reader = Reader(message.get(1..)?);
    reader.u24().map(|body| body.saturating_add(4))
}

/// Parses a `ClientHello` message (RFC 8446 §4.1.2). Returns `None` for inconsistent lengths or two server names.
pub(super) fn parse(message: &[u8]) -> Option<Hello> {
    let mut r = Reader(message.get(4..)?);
    r.take(2 + 32)?;
    r.vector8()?;
    r.vector16()?;
    r.vector8()?;
    let mut hello = Hello::default();
    if r.0.is_empty() {
        return Some(hello);
    }
    let mut extensions = Reader(r.vector16()?);
    if !r.0.is_empty() {
        return None;
    }
    let mut seen_name = false;
    while !extensions.0.is_empty() {
        let kind = extensions.u16()?;
        let content = extensions.vector16()?;
        match kind {
            EXT_SERVER_NAME if seen_name => return None,
            EXT_SERVER_NAME => {
                seen_name = true;
                hello.server_name = Some(server_name(content)?);
            }
            kind if EXT_ECH.contains(&kind) || EXT_ESNI.contains(&kind) => hello.ech = true,
            _ => {}
        }
    }
    Some(hello)
}

/// Parses a list of exactly one entry of type `host_name`, which is what every client sends (RFC 6066 §3).
fn server_name(content: &[u8]) -> Option<String> {
    let mut outer = Reader(content);
    let mut list = Reader(outer.vector16()?);
    let kind = list.u8()?;
    let name = list.vector16()?;
    let is_single = outer.0.is_empty() && list.0.is_empty() && kind == 0 && !name.is_empty();
    is_single.then(|| String::from_utf8_lossy(name).into_owned())
}

struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    fn u8(&mut self) -> Option<u8> {
        self.take(1)?.first().copied()
    }

    fn u16(&mut self) -> Option<u16> {
        self.take(2)?.try_into().ok().map(u16::from_be_bytes)
    }

    fn u24(&mut self) -> Option<usize> {
        let (high, low) = (self.u8()?, self.u16()?);
        Some(usize::from(high) << 16 | usize::from(low))
    }

    fn vector8(&mut self) -> Option<&'a [u8]> {
        let n = self.u8()?;
        self.take(n.into())
    }

    fn vector16(&mut self) -> Option<&'a [u8]> {
        let n = self.u16()?;
        self.take(n.into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn real_hello(name: &'static str) -> Vec<u8> {
        let config = rustls::ClientConfig::builder_with_provider(super::super::provider())
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_root_certificates(rustls::RootCertStore::empty())
            .with_no_client_auth();
        let mut client = rustls::ClientConnection::new(Arc::new(config), name.try_into().unwrap()).unwrap();
        let mut wire = Vec::new();
        client.write_tls(&mut wire).unwrap();
        wire
    }

    /// Splits the handshake message into records of `size` bytes.
    fn reframe(hello: &[u8], size: usize) -> Vec<u8> {
        hello[5..]
            .chunks(size)
            .flat_map(|part| [&[22, 3, 1][..], &(part.len() as u16).to_be_bytes(), part].concat())
            .collect()
    }

    /// Builds a minimal `ClientHello` with these extensions.
    fn hello_with(extensions: &[(u16, Vec<u8>)]) -> Vec<u8> {
        let extensions: Vec<u8> = extensions
            .iter()
            .flat_map(|(kind, content)| {
                [&kind.to_be_bytes()[..], &(content.len() as u16).to_be_bytes(), content].concat()
            })
            .collect();
        let body = [
            &[3, 3][..],
            &[7; 32],
            &[0],
            &[0, 2, 0x13, 0x01],
            &[1, 0],
            &(extensions.len() as u16).to_be_bytes(),
            &extensions,
        ]
        .concat();
        let message = [&[1, 0][..], &(body.len() as u16).to_be_bytes(), &body].concat();
        [&[22, 3, 1][..], &(message.len() as u16).to_be_bytes(), &message].concat()
    }

    fn sni(name: &[u8]) -> (u16, Vec<u8>) {
        let entry = [&[0][..], &(name.len() as u16).to_be_bytes(), name].concat();
        (0, [&(entry.len() as u16).to_be_bytes()[..], &entry].concat())
    }

    fn named(name: &str) -> Hello {
        Hello { server_name: Some(name.to_owned()), ech: false }
    }

    #[test]
    fn parses_a_real_client_hello_in_records_of_any_size() {
        let wire = real_hello("api.example.com");
        for size in [1, 2, 3, 100, 1000, 16_000] {
            let framed = reframe(&wire, size);
            for end in 0..framed.len() {
                assert_eq!(read(&framed[..end]), Ok(Progress::Partial), "{end} bytes of records of {size}");
            }
            assert_eq!(read(&framed), Ok(Progress::Hello(named("api.example.com"))));
            let more = [&framed[..], b"early data"].concat();
            assert_eq!(read(&more), Ok(Progress::Hello(named("api.example.com"))), "bytes after it");
        }
    }

    #[test]
    fn an_address_has_no_server_name() {
        assert_eq!(read(&real_hello("192.0.2.1")), Ok(Progress::Hello(Hello::default())));
    }

    #[test]
    fn finds_a_name_after_the_first_kilobyte_and_ech() {
        let wire = hello_with(&[(0x15, vec![0; 9000]), sni(b"far.example"), (0xfe0d, vec![1, 2, 3])]);
        let want = Hello { server_name: Some("far.example".to_owned()), ech: true };
        assert_eq!(read(&wire), Ok(Progress::Hello(want)));
    }

    #[test]
    fn every_draft_of_ech_is_found() {
        let rows = [(0xfe07, false), (0xfe08, true), (0xfe0a, true), (0xfe0d, true), (0xfe0e, false), (0xffce, true)];
        for (number, ech) in rows.into_iter().chain([(0xff02, true), (0xff08, true), (0xff01, false), (0x0a0a, false)])
        {
            let wire = hello_with(&[sni(b"far.example"), (number, vec![0])]);
            let want = Hello { ech, ..named("far.example") };
            assert_eq!(read(&wire), Ok(Progress::Hello(want)), "{number:x}");
        }
    }

    #[test]
    fn rejects_other_protocols_at_the_first_wrong_byte() {
        let two_names = [sni(b"a.example").1, sni(b"b.example").1];
        let rows: &[(&str, Vec<u8>)] = &[
            ("http", b"GET / HTTP/1.1\r\n".to_vec()),
            ("ssh", b"SSH-2.0-".to_vec()),
            ("an alert record", vec![21, 3, 1, 0, 2, 2, 40]),
            ("an empty record", vec![22, 3, 1, 0, 0]),
            ("a record over 16 KiB", vec![22, 3, 1, 0x40, 1]),
            ("another handshake message", vec![22, 3, 1, 0, 4, 2, 0, 0, 0]),
            ("a message of 16 MiB", vec![22, 3, 1, 0, 4, 1, 0xff, 0xff, 0xff]),
            ("SSLv2", vec![0x80, 0x2e, 1, 3, 1]),
            ("two server name extensions", hello_with(&[sni(b"a.example"), sni(b"b.example")])),
            ("two names in one", hello_with(&[(0, [&[0, 24][..], &two_names[0][2..], &two_names[1][2..]].concat())])),
            ("an empty name", hello_with(&[sni(b"")])),
            ("an extension longer than the rest", {
                let mut wire = hello_with(&[sni(b"a.example")]);
                let at = wire.len() - 16;
                wire[at] = 0xff;
                wire
            }),
        ];
        for (what, wire) in rows {
            assert_eq!(read(wire), Err(NotTls), "{what}");
        }
        assert_eq!(read(&[]), Ok(Progress::Partial));
        assert_eq!(read(&[22]), Ok(Progress::Partial));
        assert_eq!(read(&[22, 2]), Err(NotTls));
    }

    proptest::proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(0u8.., 0..300), at in 0usize..300, to in 0u8..) {
            let _ = read(&bytes);
            let mut wire = real_hello("api.example.com");
            if let Some(byte) = wire.get_mut(at) {
                *byte = to;
            }
            let _ = read(&wire);
        }
    }
}

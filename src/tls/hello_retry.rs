//! Follows the plaintext records at the beginning of a TLS connection, up to the `ClientHello` that answers a
//! HelloRetryRequest (RFC 8446 §4.1.4).
//!
//! A client sends its server name a second time in that message, and a server may act on either name. A server accepts
//! a plaintext `ClientHello` at no other time, so nothing has to be followed after it.

use super::hello::{self, CLIENT_HELLO, Hello, MAX_HELLO, NotTls};

const CHANGE_CIPHER_SPEC: u8 = 20;
const ALERT: u8 = 21;
const HANDSHAKE: u8 = 22;
const APPLICATION_DATA: u8 = 23;
const SERVER_HELLO: u8 = 2;
/// The maximum size of a record's fragment, in bytes, with the expansion of encryption (RFC 5246 §6.2.3).
const MAX_RECORD: usize = (1 << 14) + 2048;
/// The `Random` of a `ServerHello` that is a HelloRetryRequest (RFC 8446 §4.1.3).
const RETRY_RANDOM: [u8; 32] = [
    0xcf, 0x21, 0xad, 0x74, 0xe5, 0x9a, 0x61, 0x11, 0xbe, 0x1d, 0x8c, 0x02, 0x1e, 0x65, 0xb8, 0x91, 0xc2, 0xa2, 0x11,
    0x16, 0x7a, 0xbb, 0x8c, 0x5e, 0x07, 0x9e, 0x09, 0xe2, 0xc8, 0xa8, 0x33, 0x9c,
];
/// Position of `Random` in a `ServerHello`: behind the head of the message and the version.
const RANDOM_AT: usize = 6;

/// The first message of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A `ServerHello`.
    Hello,
    /// A HelloRetryRequest.
    Retry,
    /// Bytes that are neither.
    Other,
}

/// The result of reading more bytes of the client.
#[derive(Debug, PartialEq, Eq)]
pub enum Progress {
    /// The bytes may be sent.
    Pass,
    /// The bytes are kept, because they are part of an incomplete second `ClientHello`.
    Held,
    /// The second `ClientHello`, and all bytes that were kept. They may be sent if the message is acceptable.
    Second(Hello, Vec<u8>),
}

/// The records of the client.
#[derive(Default)]
pub struct ClientRecords {
    records: Records,
    message: Vec<u8>,
    held: Vec<u8>,
    stage: Stage,
}

#[derive(Clone, Copy, Default, PartialEq, Eq)]
enum Stage {
    #[default]
    First,
    Between,
    Second,
    Done,
}

impl ClientRecords {
    /// Reads the next bytes of the client. `answer` is the server's first message, if it has been read.
    ///
    /// # Errors
    /// [`NotTls`] for bytes that no TLS client sends at this point, which includes handshake messages before the
    /// answer.
    pub fn read(&mut self, bytes: &[u8], answer: Option<Answer>) -> Result<Progress, NotTls> {
        let mut rest = bytes;
        while self.stage != Stage::Done
            && let Some((kind, fragment)) = self.records.next(&mut rest)?
        {
            match (self.stage, kind) {
                (Stage::First | Stage::Second, HANDSHAKE) => {}
                (Stage::First | Stage::Second, _) => return Err(NotTls),
                (Stage::Between, _) if answer == Some(Answer::Hello) => {
                    self.stage = Stage::Done;
                    continue;
                }
                (Stage::Between, HANDSHAKE) if answer == Some(Answer::Retry) => {
                    self.stage = Stage::Second;
                    self.message.clear();
                }
                // Early data, or a message of middlebox compatibility.
                (Stage::Between, CHANGE_CIPHER_SPEC | ALERT | APPLICATION_DATA) => continue,
                (Stage::Between | Stage::Done, _) => return Err(NotTls),
            }
            if !self.add(fragment)? {
                continue;
            }
            if self.stage == Stage::Second {
                self.stage = Stage::Done;
                let hello = hello::parse(&std::mem::take(&mut self.message)).ok_or(NotTls)?;
                let mut held = std::mem::take(&mut self.held);
                held.extend_from_slice(bytes);
                return Ok(Progress::Second(hello, held));
            }
            self.stage = Stage::Between;
        }
        if self.stage != Stage::Second {
            return Ok(Progress::Pass);
        }
        if self.held.len().saturating_add(bytes.len()) > MAX_HELLO {
            return Err(NotTls);
        }
        self.held.extend_from_slice(bytes);
        Ok(Progress::Held)
    }

    /// Adds a fragment to the message. Returns true if the message is complete.
    fn add(&mut self, fragment: &[u8]) -> Result<bool, NotTls> {
        self.message.extend_from_slice(fragment);
        if self.message.first().is_some_and(|kind| *kind != CLIENT_HELLO) {
            return Err(NotTls);
        }
        let Some(wanted) = hello::message_length(&self.message) else { return Ok(false) };
        if wanted > MAX_HELLO || self.message.len() > wanted {
            return Err(NotTls);
        }
        let complete = self.message.len() == wanted;
        // A ClientHello ends its record, because the keys may change after it (RFC 8446 §5.1).
        if complete && self.records.left > 0 { Err(NotTls) } else { Ok(complete) }
    }
}

/// The records of the server.
#[derive(Default)]
pub struct ServerRecords {
    records: Records,
    message: Vec<u8>,
}

impl ServerRecords {
    /// Reads the next bytes of the server. Returns `None` until the first message is known.
    pub fn read(&mut self, bytes: &[u8]) -> Option<Answer> {
        let mut rest = bytes;
        loop {
            let (kind, fragment) = match self.records.next(&mut rest) {
                Ok(next) => next?,
                Err(NotTls) => return Some(Answer::Other),
            };
            match kind {
                HANDSHAKE => {}
                // A warning may come before the ServerHello, for example `unrecognized_name` (RFC 6066 §3).
                ALERT => continue,
                _ => return Some(Answer::Other),
            }
            let missing = (RANDOM_AT + RETRY_RANDOM.len()).saturating_sub(self.message.len());
            self.message.extend_from_slice(fragment.get(..missing).unwrap_or(fragment));
            if self.message.first().is_some_and(|kind| *kind != SERVER_HELLO) {
                return Some(Answer::Other);
            }
            if fragment.len() >= missing {
                let random = self.message.get(RANDOM_AT..);
                return Some(if random == Some(&RETRY_RANDOM) { Answer::Retry } else { Answer::Hello });
            }
        }
    }
}

/// Splits a stream into records, wherever it is cut.
#[derive(Default)]
struct Records {
    head: Vec<u8>,
    kind: u8,
    /// Bytes of the current record that have not been read.
    left: usize,
}

impl Records {
    /// Returns the type of the current record and the next part of its fragment, which is empty directly behind the
    /// record's head. Returns `None` at the end of `bytes`.
    fn next<'b>(&mut self, bytes: &mut &'b [u8]) -> Result<Option<(u8, &'b [u8])>, NotTls> {
        if self.left > 0 {
            let (fragment, rest) = bytes.split_at_checked(self.left).unwrap_or((bytes, &[]));
            *bytes = rest;
            self.left = self.left.saturating_sub(fragment.len());
            return Ok((!fragment.is_empty()).then_some((self.kind, fragment)));
        }
        let missing = 5_usize.saturating_sub(self.head.len());
        let (head, rest) = bytes.split_at_checked(missing).unwrap_or((bytes, &[]));
        *bytes = rest;
        self.head.extend_from_slice(head);
        let &[kind, major, _, high, low] = self.head.as_slice() else { return Ok(None) };
        self.head.clear();
        self.left = u16::from_be_bytes([high, low]).into();
        self.kind = kind;
        if major != 3 || self.left > MAX_RECORD || (kind == HANDSHAKE && self.left == 0) {
            return Err(NotTls);
        }
        Ok(Some((kind, &[])))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    use rustls::crypto::aws_lc_rs::kx_group::{SECP256R1, SECP384R1, X25519};
    use rustls::{ClientConnection, ServerConnection};

    /// The bytes of both sides of a real handshake, in turn: the client's first, the server's answer, the client's next.
    fn handshake(client_groups: &[&'static dyn rustls::crypto::SupportedKxGroup], tls12: bool) -> [Vec<u8>; 3] {
        let provider = |groups: &[&'static dyn rustls::crypto::SupportedKxGroup]| {
            let mut provider = (*super::super::provider()).clone();
            provider.kx_groups = groups.to_vec();
            Arc::new(provider)
        };
        let versions: &[_] = if tls12 { &[&rustls::version::TLS12] } else { &[&rustls::version::TLS13] };
        let issued = rcgen::generate_simple_self_signed(vec!["api.example.com".to_owned()]).unwrap();
        let key = rustls::pki_types::PrivateKeyDer::Pkcs8(issued.signing_key.serialize_der().into());
        let mut roots = rustls::RootCertStore::empty();
        roots.add(issued.cert.der().clone()).unwrap();
        let server = rustls::ServerConfig::builder_with_provider(provider(&[SECP256R1]))
            .with_protocol_versions(versions)
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(vec![issued.cert.der().clone()], key)
            .unwrap();
        let client = rustls::ClientConfig::builder_with_provider(provider(client_groups))
            .with_protocol_versions(versions)
            .unwrap()
            .with_root_certificates(roots)
            .with_no_client_auth();
        let mut client = ClientConnection::new(Arc::new(client), "api.example.com".try_into().unwrap()).unwrap();
        let mut server = ServerConnection::new(Arc::new(server)).unwrap();
        let mut wire = [Vec::new(), Vec::new(), Vec::new()];
        client.write_tls(&mut wire[0]).unwrap();
        server.read_tls(&mut wire[0].as_slice()).unwrap();
        server.process_new_packets().unwrap();
        server.write_tls(&mut wire[1]).unwrap();
        client.read_tls(&mut wire[1].as_slice()).unwrap();
        client.process_new_packets().unwrap();
        client.write_tls(&mut wire[2]).unwrap();
        wire
    }

    fn retried() -> [Vec<u8>; 3] {
        handshake(&[X25519, SECP384R1, SECP256R1], false)
    }

    /// The bytes that passed, and the name of the second message.
    type Passed = (Vec<u8>, Option<String>);

    /// Returns what passes and the name that was found, with the client's bytes cut at each multiple of `size`.
    fn follow(parts: &[(&[u8], Option<Answer>)], size: usize) -> Result<Passed, (NotTls, Vec<u8>)> {
        let (mut records, mut passed, mut name) = (ClientRecords::default(), Vec::new(), None);
        for (bytes, answer) in parts {
            for part in bytes.chunks(size) {
                match records.read(part, *answer) {
                    Ok(Progress::Pass) => passed.extend_from_slice(part),
                    Ok(Progress::Held) => {}
                    Ok(Progress::Second(hello, held)) => {
                        passed.extend(held);
                        name = hello.server_name;
                    }
                    Err(error) => return Err((error, passed)),
                }
            }
        }
        Ok((passed, name))
    }

    #[test]
    fn the_answer_of_a_real_server_is_recognized_wherever_it_is_cut() {
        let groups: [&'static dyn rustls::crypto::SupportedKxGroup; 1] = [SECP256R1];
        let rows = [
            (retried(), Answer::Retry),
            (handshake(&groups, false), Answer::Hello),
            (handshake(&groups, true), Answer::Hello),
        ];
        for (wire, want) in rows {
            let warned = [&[21, 3, 3, 0, 2, 1, 112][..], &wire[1]].concat();
            for answer in [&wire[1], &warned] {
                for size in [1, 2, 3, 5, 7, 40, 43, 44, 20_000] {
                    let mut records = ServerRecords::default();
                    let got = answer.chunks(size).find_map(|part| records.read(part));
                    assert_eq!(got, Some(want), "pieces of {size}");
                }
            }
        }
        let rows: [&[u8]; 4] =
            [b"HTTP/1.1 400", &[22, 3, 3, 0, 0], &[22, 3, 3, 0, 4, 0, 0, 0, 0], &[23, 3, 3, 0, 1, 0]];
        for bytes in rows {
            assert_eq!(ServerRecords::default().read(bytes), Some(Answer::Other), "{bytes:?}");
        }
    }

    #[test]
    fn the_second_hello_is_held_until_it_is_complete() {
        let wire = retried();
        let whole = [&wire[0][..], &wire[2]].concat();
        for size in 1..whole.len() {
            let got = follow(&[(&wire[0], None), (&wire[2], Some(Answer::Retry))], size);
            assert_eq!(got, Ok((whole.clone(), Some("api.example.com".to_owned()))), "pieces of {size}");
        }
        let incomplete = &wire[2][..wire[2].len() - 1];
        let (passed, name) = follow(&[(&wire[0], None), (incomplete, Some(Answer::Retry))], 20_000).unwrap();
        assert_eq!((passed, name), (wire[0].clone(), None));
    }

    #[test]
    fn everything_passes_after_a_server_hello() {
        let groups: [&'static dyn rustls::crypto::SupportedKxGroup; 1] = [SECP256R1];
        for tls12 in [true, false] {
            let wire = handshake(&groups, tls12);
            let rest = [&wire[2][..], b"\x16\x03\x03\x00\x02\x01\x00 anything"].concat();
            for size in [1, 5, 20_000] {
                let (passed, name) = follow(&[(&wire[0], None), (&rest, Some(Answer::Hello))], size).unwrap();
                assert_eq!((passed, name), ([&wire[0][..], &rest].concat(), None), "pieces of {size}");
            }
        }
    }

    #[test]
    fn early_data_passes_before_the_second_hello() {
        let wire = retried();
        let early = [&[20, 3, 3, 0, 1, 1][..], &[23, 3, 3, 0, 3, 7, 8, 9], &[23, 3, 3, 0, 0]].concat();
        for size in [1, 2, 6, 20_000] {
            let parts = [(&wire[0][..], None), (&early, None), (&wire[2], Some(Answer::Retry))];
            let (passed, name) = follow(&parts, size).unwrap();
            assert_eq!((passed, name.as_deref()), (parts.map(|(b, _)| b).concat(), Some("api.example.com")));
        }
    }

    #[test]
    fn handshake_messages_at_another_time_are_errors() {
        let wire = retried();
        let second_at = wire[2].iter().position(|byte| *byte == 22).unwrap();
        let second = &wire[2][second_at..];
        let (in_one_record, after_first) = {
            let mut wire = wire[0].clone();
            let message = wire[5..].to_vec();
            wire.extend_from_slice(&message);
            let length = (message.len() * 2) as u16;
            wire[3..5].copy_from_slice(&length.to_be_bytes());
            (wire, message.len() + 5)
        };
        let split = [&[22, 3, 3, 0, 1, 1][..], &[20, 3, 3, 0, 1, 1]].concat();
        let endless = [&[22, 3, 3, 0, 1, 1][..], &[22, 3, 3, 0, 1, 0].repeat(20_000)].concat();
        let rows = [
            ("before the answer", wire[0].as_slice(), second, None),
            ("after an answer that is not TLS", &wire[0], second, Some(Answer::Other)),
            ("in the record of the first", &in_one_record[..], &[][..], None),
            ("another message", &wire[0], &[22, 3, 3, 0, 4, 11, 0, 0, 0], Some(Answer::Retry)),
            ("interrupted by another record", &wire[0], &split, Some(Answer::Retry)),
            ("an empty record", &wire[0], &[22, 3, 3, 0, 0], Some(Answer::Retry)),
            ("another version", &wire[0], &[22, 2, 0, 0, 1, 1], None),
            ("another protocol", &wire[0], b"GET / HTTP/1.1\r\n\r\n", None),
            ("a message without end", &wire[0], &endless, Some(Answer::Retry)),
        ];
        for (what, first, then, answer) in rows {
            for size in [1, 5, 200_000] {
                let (_, passed) = follow(&[(first, None), (then, answer)], size).expect_err(what);
                // At most the head of a record passes, because it may be cut from its first byte.
                assert!(passed.len() <= after_first.max(first.len()) + 5, "{what}: {} bytes", passed.len());
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn never_panics(bytes in proptest::collection::vec(0u8.., 0..300), cut in 1usize..40, at in 0usize..900, to in 0u8..) {
            let mut whole = retried().concat();
            if let Some(byte) = whole.get_mut(at) {
                *byte = to;
            }
            for answer in [None, Some(Answer::Hello), Some(Answer::Retry), Some(Answer::Other)] {
                let _ = follow(&[(&bytes, answer)], cut);
                let _ = follow(&[(&whole, answer)], cut);
            }
            let _ = ServerRecords::default().read(&bytes);
        }
    }
}

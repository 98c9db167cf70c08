//! Compares the WebSocket frames that pass with those that another library accepts: valid and invalid frames, split
//! anywhere.

use std::io::{self, Read, Write};
use std::sync::Arc;

use exeat::leak::{Matcher, Redactor, ValueOwner};
use exeat::stages::message::websocket::{Broken, Downward, RelayError, Upward};
use proptest::prelude::*;
use tokio_tungstenite::tungstenite::protocol::{Role, WebSocket};
use tokio_tungstenite::tungstenite::{Error, Message};

/// A stream that yields these bytes and then ends. Written bytes are discarded.
struct Wire<'b>(&'b [u8]);

impl Read for Wire<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        self.0.read(buffer)
    }
}

impl Write for Wire<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The state of a stream after its bytes: still open, closed, or broken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    Open,
    Broken(Broken),
}

/// Returns the messages that the reference implementation reads as `role`.
fn read_by_reference(bytes: &[u8], role: Role) -> (Vec<Message>, End) {
    let mut socket = WebSocket::from_raw_socket(Wire(bytes), role, None);
    let mut messages = Vec::new();
    loop {
        match socket.read() {
            // The library's representation of a code that may not be sent.
            Ok(Message::Close(Some(frame))) if frame.reason == "Protocol violation" => {
                return (messages, End::Broken(Broken::Protocol));
            }
            Ok(message) => {
                let closes = message.is_close();
                messages.push(message);
                if closes {
                    return (messages, End::Open);
                }
            }
            Err(Error::Utf8(_)) => return (messages, End::Broken(Broken::Text)),
            // The input has ended.
            Err(Error::Protocol(
                tokio_tungstenite::tungstenite::error::ProtocolError::ResetWithoutClosingHandshake,
            )) => return (messages, End::Open),
            Err(Error::Protocol(_)) => return (messages, End::Broken(Broken::Protocol)),
            Err(other) => panic!("{other:?}"),
        }
    }
}

const VALUE: &[u8] = b"a-value-to-look-for";

fn values() -> Arc<Matcher> {
    Arc::new(Matcher::new([(ValueOwner::Token, VALUE)].into_iter()))
}

/// Returns the bytes that pass, and the result.
fn forwarded<'b>(bytes: impl IntoIterator<Item = &'b [u8]>, masked: bool, scanned: bool) -> (Vec<u8>, End) {
    let matcher = if scanned { values() } else { Arc::default() };
    let mut up = Upward::new(matcher);
    let mut down = Downward::new(scanned.then(|| Redactor::new(values())));
    let mut out = Vec::new();
    for bytes in bytes {
        let passed = if masked { up.pass(bytes, &mut out) } else { down.pass(bytes, &mut out, |_| Ok(())) };
        match passed {
            Ok(()) => {}
            Err(RelayError::Broken(broken)) => return (out, End::Broken(broken)),
            Err(other) => panic!("{other:?}"),
        }
    }
    // Nothing more arrives.
    out.extend(down.pause());
    (out, End::Open)
}

/// Encodes a frame: its first byte, and a payload with its length.
fn frame(first: u8, payload: &[u8], mask: Option<[u8; 4]>) -> Vec<u8> {
    let bit = if mask.is_some() { 0x80 } else { 0 };
    let mut wire = vec![first];
    match payload.len() {
        length @ 0..126 => wire.push(bit | length as u8),
        length => {
            wire.push(bit | 126);
            wire.extend((length as u16).to_be_bytes());
        }
    }
    wire.extend(mask.into_iter().flatten());
    let mask = mask.unwrap_or_default();
    wire.extend(payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask));
    wire
}

fn payloads() -> impl Strategy<Value = Vec<u8>> {
    prop_oneof![
        6 => "[a-zé€😀]{0,12}".prop_map(String::into_bytes),
        2 => "[a-z€]{120,140}".prop_map(String::into_bytes),
        2 => proptest::collection::vec(any::<u8>(), 0..6),
        // Parts of a character, and bytes that are not valid in UTF-8.
        3 => proptest::sample::select(vec![
            b"\xe2".to_vec(), b"\xe2\x82".to_vec(), b"\xac".to_vec(), b"\x82\xac".to_vec(), b"a\xf0\x9f".to_vec(),
            b"\x98\x80z".to_vec(), b"\xed\xa0".to_vec(), b"\xf4\x90".to_vec(), b"\xc0\x80".to_vec(),
        ]),
        // Codes of close frames; 1014 is newer than the reference library.
        3 => (prop_oneof![any::<u16>(), 990_u16..1020, 2990_u16..3010, 4990_u16..5010], "[a-z€]{0,4}")
            .prop_filter("", |(code, _)| *code != 1014)
            .prop_map(|(code, reason)| [&code.to_be_bytes()[..], reason.as_bytes()].concat()),
    ]
}

/// Generates the frames of one direction, most of them valid.
fn streams(masked: bool) -> impl Strategy<Value = Vec<u8>> {
    let first = prop_oneof![
        20 => proptest::sample::select(vec![0x81_u8, 0x82, 0x01, 0x02, 0x00, 0x80, 0x80, 0x89, 0x8a, 0x88]),
        1 => any::<u8>(),
    ];
    let one = (first, payloads(), any::<[u8; 4]>(), proptest::bool::weighted(0.02))
        .prop_map(move |(first, payload, mask, wrong)| frame(first, &payload, (masked != wrong).then_some(mask)));
    proptest::collection::vec(one, 1..8).prop_map(|frames| frames.concat())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    /// The reference reads the same messages from the forwarded bytes as from the sent bytes, and rejects the same
    /// streams.
    #[test]
    fn forwarded_frames_agree_with_the_reference(
        (masked, wire) in any::<bool>().prop_flat_map(|masked| (Just(masked), streams(masked))),
        scanned: bool,
        cuts in proptest::collection::vec(1_usize..40, 1..20),
    ) {
        let role = || if masked { Role::Server } else { Role::Client };
        let (messages, end) = read_by_reference(&wire, role());
        // A frame may have both an invalid code and an invalid text.
        let (out, ours) = forwarded([&wire[..]], masked, scanned);
        prop_assert_eq!(read_by_reference(&out, role()), (messages.clone(), End::Open));
        prop_assert_eq!(ours, end);

        let mut rest = &wire[..];
        let mut pieces = Vec::new();
        for size in cuts.iter().cycle() {
            let (piece, behind) = rest.split_at((*size).min(rest.len()));
            pieces.push(piece);
            rest = behind;
            if rest.is_empty() {
                break;
            }
        }
        for pieces in [pieces, wire.chunks(1).collect()] {
            let (out, ours) = forwarded(pieces, masked, scanned);
            prop_assert_eq!(read_by_reference(&out, role()), (messages.clone(), End::Open), "cut");
            prop_assert_eq!(ours, end, "cut");
        }
    }

    /// A stream that ends anywhere: exactly the messages that the reference reads have passed.
    #[test]
    fn a_partial_stream_agrees_with_the_reference(
        (masked, wire) in any::<bool>().prop_flat_map(|masked| (Just(masked), streams(masked))),
        scanned: bool,
        at in any::<prop::sample::Index>(),
    ) {
        let role = || if masked { Role::Server } else { Role::Client };
        let part = &wire[..at.index(wire.len())];
        let (messages, end) = read_by_reference(part, role());
        let (out, ours) = forwarded([part], masked, scanned);
        prop_assert_eq!(read_by_reference(&out, role()), (messages, End::Open));
        // An error may show before its frame has ended, while the reference still waits.
        prop_assert!(ours == end || end == End::Open, "{:?} {:?}", ours, end);
    }
}

/// A fragment whose end was held passes, although the next one, which is long, turns out to be broken.
#[test]
fn a_fragment_before_a_long_broken_one_passes() {
    let first = frame(0x01, &[b'a'; 20], None);
    let ping = frame(0x89, b"ping", None);
    let broken = frame(0x80, &[&[b'b'; 50_000][..], b"\xff"].concat(), None);
    for together in [false, true] {
        let before = [first.clone(), ping.clone()].concat();
        let pieces = if together {
            vec![[before.clone(), broken.clone()].concat()]
        } else {
            vec![before.clone(), broken.clone()]
        };
        let (out, end) = forwarded(pieces.iter().map(Vec::as_slice), false, true);
        assert_eq!(end, End::Broken(Broken::Text));
        assert!(out == before, "{together}: {} bytes", out.len());
    }
}

/// A text that ends within a character is broken by its last fragment, which may be empty.
#[test]
fn an_empty_fragment_that_breaks_a_text_does_not_pass() {
    let first = frame(0x01, b"a\xf0\x9f", None);
    for last in [frame(0x80, b"", None), frame(0x80, b"b", None)] {
        for pieces in [vec![[first.clone(), last.clone()].concat()], vec![first.clone(), last.clone()]] {
            let (out, end) = forwarded(pieces.iter().map(Vec::as_slice), false, true);
            assert_eq!((out, end), (first.clone(), End::Broken(Broken::Text)), "{last:?}");
        }
    }
}

/// A broken frame does not discard the messages before it, and a value in them does not pass.
#[test]
fn messages_before_a_broken_frame_pass_after_scanning() {
    let mask = Some([1, 2, 3, 4]);
    let (good, broken) = (frame(0x81, b"good", mask), b"\xff\xff");
    let (half, rest) = VALUE.split_at(VALUE.len() - 1);
    let run = |frames: &[&[u8]], at: Option<usize>| {
        let wire = [&frames.concat()[..], broken].concat();
        let (mut up, mut out) = (Upward::new(values()), Vec::new());
        let (first, second) = wire.split_at(at.unwrap_or(0));
        let stop = [first, second].into_iter().map(|bytes| up.pass(bytes, &mut out)).find(Result::is_err);
        (out, stop.unwrap().unwrap_err())
    };
    assert_eq!(run(&[&good, &good], None), ([&good[..], &good].concat(), RelayError::Broken(Broken::Protocol)));
    // The message is incomplete, so it has not been scanned.
    let begun = frame(0x01, b"good", mask);
    assert_eq!(run(&[&good, &begun], None), (good.clone(), RelayError::Broken(Broken::Protocol)));
    let ping = frame(0x89, b"ping", mask);
    assert_eq!(run(&[&begun, &ping], None), (ping, RelayError::Broken(Broken::Protocol)));
    for secret in [
        vec![frame(0x81, VALUE, mask)],
        vec![frame(0x01, half, mask), frame(0x80, rest, mask)],
        vec![frame(0x81, half, mask)],
        vec![frame(0x01, VALUE, mask)],
        vec![frame(0x89, VALUE, mask)],
        vec![frame(0x88, &[&[3, 232], VALUE].concat(), mask)],
    ] {
        let secret = secret.concat();
        for at in 0..secret.len() {
            let (out, stop) = run(&[&secret], Some(at));
            assert!(out.is_empty() && matches!(stop, RelayError::Leak(_)), "{out:02x?} {stop:?}");
        }
    }
}

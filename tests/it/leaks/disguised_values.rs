//! Attacks of hostile sandboxes and origins with disguised values, each of which succeeded once.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, STANDARD_NO_PAD};
use exeat::leak::{Holdback, Matcher, Redactor, ValueOwner};
use exeat::stages::message::websocket::{Downward, RelayError, Upward};
use flate2::Compression;
use flate2::write::GzEncoder;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use crate::lab::client::{Way, auth, read_head};
use crate::lab::{Lab, LabBuilder, Origin, TIMEOUT};

/// A value whose bytes can form the head of a gRPC message. No head that announces compression begins in it.
const VALUE: &str = "rhp_7q2zt9lmx4vbn8kcyw3pdf6sjg1haeroutk5";

fn matcher() -> Arc<Matcher> {
    let whose = ValueOwner::Credential(exeat::model::name::CredentialName::new("KEY"));
    Arc::new(Matcher::new([(whose, VALUE.as_bytes())].into_iter()))
}

async fn lab() -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), VALUE).unwrap();
    let origin = builder.origin("api.test").await;
    let lab = builder.proxy(&config(origin.port())).await;
    (lab, origin)
}

fn config(port: u16) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nplain_http = true\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
    )
}

/// Encodes a client frame with this mask.
fn masked(opcode: u8, mask: [u8; 4], payload: &[u8]) -> Vec<u8> {
    let payload = payload.iter().zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask);
    let payload: Vec<u8> = payload.collect();
    [&[0x80 | opcode, 0x80 | u8::try_from(payload.len()).unwrap()][..], &mask, &payload].concat()
}

/// Five bytes before each message can be five bytes of a value, for an origin that reads the raw body.
#[tokio::test(flavor = "multi_thread")]
async fn grpc_message_heads_hide_no_value() {
    let (lab, origin) = lab().await;
    let url = format!("https://api.test:{}/x", origin.port());
    let in_two = format!("\0\0\0\0\x08{VALUE}");
    let streamed = format!("{VALUE}{}", "x".repeat(100_000));
    let rows =
        [("application/grpc", VALUE), ("application/grpc+proto", &in_two), ("application/connect+json", &streamed)];
    for (kind, body) in rows {
        let reply = lab.by(Way::TunnelH2, "POST", &url, &[("content-type", kind)], body).await;
        assert_eq!(reply.header("exeat-refusal"), Some("leak_detected"), "{kind}: {reply:?}");
    }
    assert!(origin.seen().is_empty(), "{:?}", origin.seen());
    let kind = ("content-type", "application/grpc");
    assert_eq!(lab.by(Way::TunnelH2, "POST", &url, &[kind], "\0\0\0\0\x08harmless").await.status, 200);
}

/// Neither can the mask of a WebSocket frame, for an origin that reads the raw bytes after the handshake.
#[test]
fn websocket_masks_hide_no_value() {
    let mask = VALUE.as_bytes().first_chunk().unwrap();
    let rest: Vec<u8> = VALUE.bytes().skip(4).zip(mask.iter().cycle()).map(|(byte, mask)| byte ^ mask).collect();
    let frame = masked(2, *mask, &rest);
    assert!(frame.ends_with(VALUE.as_bytes()));
    assert!(matches!(Upward::new(matcher()).pass(&frame, &mut Vec::new()), Err(RelayError::Leak(_))));
}

/// A value in pieces over several control frames does not pass, neither whole nor by half.
#[test]
fn control_frames_do_not_carry_a_value_in_pieces() {
    for size in [1, 9, 20, 39] {
        let mut up = Upward::new(matcher());
        let passed: Vec<_> =
            VALUE.as_bytes().chunks(size).map(|piece| up.pass(&masked(9, [0; 4], piece), &mut Vec::new())).collect();
        let left = passed.iter().take_while(|passed| passed.is_ok()).count() * size;
        assert!(left < VALUE.len() / 2, "{left} bytes left in pieces of {size}");
        let mut down = Downward::new(Some(Redactor::new(matcher())));
        let mut shown = Vec::new();
        for piece in VALUE.as_bytes().chunks(size) {
            let frame = [&[0x89, u8::try_from(piece.len()).unwrap()][..], piece].concat();
            let mut out = Vec::new();
            down.pass(&frame, &mut out, |_| Ok(())).unwrap();
            shown.extend_from_slice(&out[2..]);
        }
        let shown = String::from_utf8(shown).unwrap();
        let known = shown.bytes().zip(VALUE.bytes()).filter(|(a, b)| a == b).count();
        assert!(shown.len() == VALUE.len() && known < VALUE.len() / 2, "{shown}");
        assert!(down.found().is_some());
    }
}

/// A character reference may begin with any number of zeros.
#[test]
fn leading_zeros_hide_no_value() {
    let rows: [&dyn Fn(u8) -> String; 3] =
        [&|b| format!("&#{b:010};"), &|b| format!("&#x{b:040x};"), &|b| format!("&#X{b:09x}")];
    for row in rows {
        let text: String = VALUE.bytes().map(row).collect();
        assert!(matcher().find(format!("before {text} after").as_bytes()).is_some(), "{text}");
        let mut redactor = Redactor::new(matcher());
        let masked = redactor.redact_text(format!("before {text} after").as_bytes()).unwrap();
        assert!(masked.starts_with(b"before ***") && masked.ends_with(b"* after"));
    }
}

/// The last byte of a value may be an escape without a terminator, and half of a short value is all of it.
#[test]
fn an_unterminated_escape_hides_no_last_byte() {
    for value in ["p4ssw0rd", VALUE] {
        let whose = ValueOwner::Credential(exeat::model::name::CredentialName::new("KEY"));
        let matcher = Arc::new(Matcher::new([(whose, value.as_bytes())].into_iter()));
        let (begin, last) = value.split_at(value.len() - 1);
        for text in [
            format!("{begin}&#{}", last.as_bytes()[0]),
            format!("{begin}&#x{:x}", last.as_bytes()[0]),
            format!("{begin}%26%23{}", last.as_bytes()[0]),
        ] {
            let mut hold = Holdback::new(matcher.clone());
            let fed = hold.feed(text.clone().into());
            assert!(fed.and_then(|()| hold.pause()).is_err(), "{text}");
            let mut redactor = Redactor::new(matcher.clone());
            redactor.feed(text.clone().into());
            redactor.pause();
            assert_eq!(redactor.take().unwrap(), "*".repeat(text.len()));
        }
    }
}

/// The character that opens a part may be escaped, as in the data URL of a form.
#[test]
fn parts_after_an_escaped_delimiter_are_scanned() {
    let percent: String = VALUE.bytes().map(|b| format!("%{b:02x}")).collect();
    let part = STANDARD.encode(format!("a text, {percent}, and more of it"));
    let rows = [
        format!("n=1&img=data%3Aimage%2Fpng%3Bbase64%2C{}&m=2", part.replace('+', "%2B").replace('=', "%3D")),
        format!("json=%7B%22image%22%3a%22{}%22%7D", part.replace('=', "%3D")),
        format!("{{\"image\": \"\\n{part}\\n\"}}"),
        format!("<image>{part}</image>"),
    ];
    for text in rows {
        for size in [1, 2, 3, 7, 64, text.len()] {
            let mut redactor = Redactor::new(matcher());
            for piece in text.as_bytes().chunks(size) {
                redactor.feed(bytes::Bytes::copy_from_slice(piece));
            }
            redactor.end();
            assert_eq!(redactor.count(), 1, "{text} in pieces of {size}");
            assert_eq!(redactor.found().count(), 1);
        }
    }
}

/// A flushed part of an encoded stream is sent at a pause, without waiting for more data.
#[tokio::test(flavor = "multi_thread")]
async fn a_flushed_encoded_stream_is_forwarded_at_a_pause() {
    use std::io::Write;
    let text = b"a message that is waited for";
    let mut gzip = GzEncoder::new(Vec::new(), Compression::default());
    gzip.write_all(text).unwrap();
    gzip.flush().unwrap();
    let mut brotli = brotli::CompressorWriter::new(Vec::new(), 4096, 5, 22);
    brotli.write_all(text).unwrap();
    brotli.flush().unwrap();
    let rows = [("gzip", gzip.get_ref().clone()), ("br", brotli.get_ref().clone())];
    for (coding, coded) in rows {
        let builder = LabBuilder::new().await;
        std::fs::write(builder.dir.path().join("value"), VALUE).unwrap();
        builder.dns.set("api.test", &["127.0.0.1"]);
        let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let lab = builder.proxy(&config(port)).await;
        let head = format!(
            "POST http://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n\
             Content-Encoding: {coding}\r\nTransfer-Encoding: chunked\r\n\r\n{:x}\r\n",
            auth(),
            coded.len()
        );
        let mut client = lab.connect().await;
        client.write_all(&[head.as_bytes(), &coded, b"\r\n"].concat()).await.unwrap();
        let (mut origin, _) = timeout(TIMEOUT, listener.accept()).await.unwrap().unwrap();
        read_head(&mut origin).await;
        let (mut got, mut data) = (Vec::new(), Vec::new());
        while data.len() < coded.len() {
            let n = timeout(TIMEOUT, origin.read_buf(&mut got)).await.expect("the bytes are released").unwrap();
            assert!(n > 0, "the stream continues");
            data = dechunked(&got);
        }
        assert_eq!(data, coded, "{coding}");
    }
}

/// Returns the data of the complete chunks.
fn dechunked(mut bytes: &[u8]) -> Vec<u8> {
    let mut data = Vec::new();
    while let Some(end) = bytes.windows(2).position(|pair| pair == b"\r\n") {
        let size = usize::from_str_radix(std::str::from_utf8(&bytes[..end]).unwrap(), 16).unwrap();
        let Some(chunk) = bytes.get(end + 2..end + 2 + size) else { break };
        data.extend_from_slice(chunk);
        bytes = bytes.get(end + 4 + size..).unwrap_or_default();
    }
    data
}

/// The scanner ignores the case of field names, but the case is kept for an origin over HTTP/1.1.
#[tokio::test(flavor = "multi_thread")]
async fn a_value_does_not_leave_as_base64_in_a_field_name() {
    // This needs a value whose base64 has no slash, because names cannot contain one.
    let value = "sk-live-7q2zt9lmx4vbn8kc";
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), value).unwrap();
    let origin = Origin::http().await;
    builder.dns.set("plain.test", &["127.0.0.1"]);
    let text = format!(
        "[integrations.plain]\nallowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"plain.test\"]\n\
         [tasks.t]\nintegrations = [\"plain\"]\ncredentials = [\"KEY\"]\n",
        origin.port()
    );
    let lab = builder.proxy(&text).await;
    let to = format!("plain.test:{}", origin.port());
    for before in ["", "x", "xy"] {
        let name = STANDARD_NO_PAD.encode(format!("{before}{value}"));
        assert!(!name.contains('/'), "{name}");
        let request =
            format!("GET http://{to}/ HTTP/1.1\r\nHost: {to}\r\n{{auth}}{name}: x\r\nConnection: close\r\n\r\n");
        let reply = lab.raw(&request).await;
        assert!(reply.contains("exeat-refusal: leak_detected"), "{name}: {reply}");
        assert_eq!(lab.ended(0).await["code"], "leak_detected");
    }
    assert!(origin.seen().is_empty());
}

//! Streams without a value pass unchanged, each message before the next is sent. A find in an answer in progress aborts
//! it.

use bytes::Bytes;
use http_body_util::{BodyExt, Channel};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;

use super::config;
use super::forms::{VALUES, contains};
use super::road::{chunk, frame, line, more, unmasked, upgrade};
use crate::lab::client::{auth, read_head};
use crate::lab::{Lab, LabBuilder, TIMEOUT};

/// Both ends of an exchange through a proxy.
struct Ends {
    lab: Lab,
    client: End,
    origin: End,
}

struct End {
    stream: TcpStream,
    /// Bytes that have been read and not yet checked.
    rest: Vec<u8>,
}

const SOCKET: &[u8] = b"HTTP/1.1 101 Switching Protocols\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n\
    Sec-WebSocket-Accept: s3pPLMBiTxaQ9kYGzzhZRbK+xOo=\r\n\r\n";

/// Opens a chunked upload that is answered by a stream, or a WebSocket.
async fn ends(kind: &str, is_socket: bool) -> Ends {
    let builder = LabBuilder::new().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let text = config(&builder, &[port], &VALUES);
    let lab = builder.proxy(&text).await;
    let mut client = lab.connect().await;
    let method = if is_socket { "GET" } else { "POST" };
    let mut head = format!(
        "{method} http://api.test:{port}/x HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {}\r\n",
        auth()
    );
    if is_socket {
        for (name, value) in upgrade() {
            head.push_str(&format!("{}: {}\r\n", String::from_utf8(name).unwrap(), String::from_utf8(value).unwrap()));
        }
    } else {
        head.push_str(&format!("Content-Type: {kind}\r\nTransfer-Encoding: chunked\r\n"));
    }
    client.write_all(format!("{head}\r\n").as_bytes()).await.unwrap();
    let (mut origin, _) = timeout(TIMEOUT, listener.accept()).await.unwrap().unwrap();
    assert!(read_head(&mut origin).await.starts_with(method));
    let answer = format!("HTTP/1.1 200 OK\r\nContent-Type: {kind}\r\nTransfer-Encoding: chunked\r\n\r\n");
    origin.write_all(if is_socket { SOCKET } else { answer.as_bytes() }).await.unwrap();
    assert!(read_head(&mut client).await.starts_with("HTTP/1.1 "));
    let end = |stream| End { stream, rest: Vec::new() };
    Ends { lab, client: end(client), origin: end(origin) }
}

impl End {
    /// Reads the next bytes of a chunked body; fewer at its end.
    async fn data(&mut self, length: usize) -> Vec<u8> {
        let reading = async {
            let mut data = Vec::new();
            while data.len() < length {
                let Some(size) = line(&mut self.stream, &mut self.rest).await else { break };
                let size = usize::from_str_radix(&size, 16).unwrap();
                if size == 0 {
                    break;
                }
                while self.rest.len() < size + 2 && more(&mut self.stream, &mut self.rest).await {}
                data.extend(self.rest.drain(..size + 2).take(size));
            }
            data
        };
        timeout(TIMEOUT, reading).await.expect("the message is not held back")
    }

    async fn bytes(&mut self, length: usize) -> Vec<u8> {
        let mut bytes = vec![0; length];
        timeout(TIMEOUT, self.stream.read_exact(&mut bytes)).await.expect("the message is not held back").unwrap();
        bytes
    }

    async fn write(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).await.unwrap();
    }
}

/// Returns messages that nearly match: every prefix that may pass, many in one message, and unrelated ones.
fn messages() -> Vec<Vec<u8>> {
    let mut messages = Vec::new();
    for (_, value) in VALUES {
        let begun = &value.as_bytes()[..value.len().div_ceil(2) - 1];
        messages.extend(begun.iter().map(|byte| vec![*byte]));
        messages.push([begun, b"!\n"].concat());
        messages.push([begun, b"!"].concat().repeat(10_000));
        messages.push([&b"\n"[..], begun].concat());
        messages.push(b"\n".to_vec());
    }
    messages
}

/// Returns whole messages that repeatedly contain nearly all of a value.
fn near_misses() -> Vec<u8> {
    let (_, value) = VALUES[1];
    // Ten thousand in one message would be a find, because that many do not occur by accident.
    [&value.as_bytes()[..value.len() - 1], b"!"].concat().repeat(9_000)
}

#[tokio::test(flavor = "multi_thread")]
async fn events_and_uploads_pass_unchanged_without_delay() {
    for kind in ["text/event-stream", "application/octet-stream"] {
        let mut ends = ends(kind, false).await;
        for message in messages() {
            ends.origin.write(&chunk(&message)).await;
            assert!(ends.client.data(message.len()).await == message, "{kind}: down");
        }
        for message in messages() {
            ends.client.write(&chunk(&message)).await;
            assert!(ends.origin.data(message.len()).await == message, "{kind}: up");
        }
        ends.client.write(b"0\r\n\r\n").await;
        ends.origin.write(b"0\r\n\r\n").await;
        assert!(ends.client.data(1).await.is_empty() && ends.origin.data(1).await.is_empty());
        let line = ends.lab.ended(0).await;
        assert_eq!((line["verdict"].as_str(), line.get("redacted")), (Some("allow"), None), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn websocket_messages_pass_unchanged_without_delay() {
    let mut ends = ends("", true).await;
    for message in messages().into_iter().chain([near_misses()]) {
        let up = frame(2, true, &message);
        ends.client.write(&up).await;
        assert!(ends.origin.bytes(up.len()).await == up, "up");
        let down = unmasked(2, true, &message);
        ends.origin.write(&down).await;
        assert!(ends.client.bytes(down.len()).await == down, "down");
    }
}

/// A call that streams in both directions, whose server echoes its input.
#[tokio::test(flavor = "multi_thread")]
async fn grpc_messages_pass_unchanged_without_delay() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = config(&builder, &[origin.port()], &VALUES);
    let lab = builder.proxy(&text).await;
    let (mut send, body) = Channel::<Bytes, std::io::Error>::new(4);
    let mut sender = lab.h2(&format!("api.test:{}", origin.port())).await;
    let request = http::Request::post(format!("https://api.test:{}/echo", origin.port()));
    let request = request.header("content-type", "application/grpc").body(body.boxed_unsync()).unwrap();
    let answered = tokio::spawn(async move { sender.send_request(request).await.unwrap() });
    let mut answer = None;
    let mut asked = Some(answered);
    for message in messages().into_iter().chain([near_misses()]) {
        let sent = [&[0][..], &u32::try_from(message.len()).unwrap().to_be_bytes(), &message].concat();
        send.send_data(sent.clone().into()).await.unwrap();
        if let Some(answered) = asked.take() {
            answer = Some(timeout(TIMEOUT, answered).await.expect("an answer").unwrap().into_body());
        }
        let mut came = Vec::new();
        while came.len() < sent.len() {
            let next = timeout(TIMEOUT, answer.as_mut().unwrap().frame()).await.expect("the message is not held back");
            came.extend(next.unwrap().unwrap().into_data().unwrap());
        }
        // An answer of many frames may pause anywhere, and half of a value before a pause is masked.
        let is_near_miss = message.len() > 200_000;
        let is_same = |(came, sent): (&u8, &u8)| came == sent || (is_near_miss && *came == b'*');
        assert!(came.len() == sent.len() && came.iter().zip(&sent).all(is_same), "{} bytes", message.len());
    }
}

/// Once the head of the answer has been sent, there can be no 403.
#[tokio::test]
async fn a_find_after_the_answers_head_aborts_it() {
    let mut ends = ends("text/plain", false).await;
    ends.origin.write(&chunk(b"go on")).await;
    assert_eq!(ends.client.data(5).await, b"go on");
    let (name, value) = VALUES[1];
    ends.client.write(&chunk(value.as_bytes())).await;
    let mut heard = Vec::new();
    let _ = timeout(TIMEOUT, ends.client.stream.read_to_end(&mut heard)).await.expect("the connection closes");
    assert!(!heard.ends_with(b"0\r\n\r\n"), "cut, not ended: {}", String::from_utf8_lossy(&heard));
    let line = ends.lab.ended(0).await;
    assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), Some("leak_detected")), "{line}");
    assert!(line["rule"].as_str().unwrap().starts_with(&format!("{name}: ")), "{line}");
    let mut arrived = Vec::new();
    let _ = timeout(TIMEOUT, ends.origin.stream.read_to_end(&mut arrived)).await.expect("the connection closes");
    assert!(!contains(&arrived, &value.as_bytes()[..value.len() / 2]), "{}", String::from_utf8_lossy(&arrived));
}

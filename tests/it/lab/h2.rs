//! HTTP/2 frame by frame, including frames that no client library would send.

use std::collections::VecDeque;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::client::TlsStream;

use super::{Lab, TIMEOUT};

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
pub const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;
pub const END_STREAM: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// Encodes a frame with its header.
pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
    [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
}

/// Encodes fields in HPACK as literals that are never indexed.
pub fn block(fields: &[(&str, &str)]) -> Vec<u8> {
    let text = |text: &str| {
        // Lengths of 127 and more take a second and a third byte (RFC 7541 §5.1).
        let mut out = match text.len() {
            n @ 0..127 => vec![n as u8],
            n => vec![0x7f, (n - 127) as u8 | 0x80, ((n - 127) >> 7) as u8],
        };
        out.extend_from_slice(text.as_bytes());
        out
    };
    fields.iter().flat_map(|(name, value)| [vec![0x10], text(name), text(value)].concat()).collect()
}

/// A received frame.
#[derive(Clone, Debug)]
pub struct Frame {
    pub kind: u8,
    pub flags: u8,
    pub stream: u32,
    pub payload: Vec<u8>,
}

/// The first HEADERS or RST_STREAM frame of a stream, or the end of the connection.
#[derive(Debug, PartialEq, Eq)]
pub enum Answer {
    Head,
    /// The error code of the stream.
    Reset(u32),
    /// The error code of the connection.
    GoAway(u32),
    Closed,
}

pub async fn read_frame(io: &mut (impl AsyncRead + Unpin)) -> Option<Frame> {
    let mut head = [0; 9];
    timeout(TIMEOUT, io.read_exact(&mut head)).await.expect("a frame arrives").ok()?;
    let [a, b, c, kind, flags, stream @ ..] = head;
    let mut payload = vec![0; u32::from_be_bytes([0, a, b, c]) as usize];
    timeout(TIMEOUT, io.read_exact(&mut payload)).await.expect("the frame ends").ok()?;
    Some(Frame { kind, flags, stream: u32::from_be_bytes(stream), payload })
}

/// An h2 connection in a tunnel of its own, on which the test writes raw frames.
pub struct Wire<T = TlsStream<TcpStream>> {
    pub io: T,
    pub out: Vec<u8>,
    received: VecDeque<Frame>,
}

impl Wire {
    pub async fn open(lab: &Lab, to: &str) -> Self {
        Self::over(lab.tls(to, &["h2"]).await)
    }

    /// Begins a connection over this one.
    pub fn over(io: TlsStream<TcpStream>) -> Self {
        Self { io, out: [PREFACE, &frame(SETTINGS, 0, 0, &[])].concat(), received: VecDeque::new() }
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> Wire<T> {
    pub fn headers(&mut self, stream: u32, ends: bool, fields: &[(&str, &str)]) {
        let flags = END_HEADERS | if ends { END_STREAM } else { 0 };
        self.out.extend(frame(HEADERS, flags, stream, &block(fields)));
    }

    /// Writes the queued frames, followed by `more`.
    pub async fn send(&mut self, more: &[u8]) {
        let bytes = [std::mem::take(&mut self.out).as_slice(), more].concat();
        self.io.write_all(&bytes).await.unwrap();
        self.io.flush().await.unwrap();
    }

    /// Waits for the first HEADERS or RST_STREAM of a stream. Frames of other streams are kept for later calls.
    pub async fn answer(&mut self, stream: u32) -> Answer {
        let code = |payload: &[u8]| u32::from_be_bytes(payload.try_into().unwrap());
        if let Some(at) = self.received.iter().position(|frame| frame.stream == stream) {
            let frame = self.received.remove(at).unwrap();
            return if frame.kind == HEADERS { Answer::Head } else { Answer::Reset(code(&frame.payload)) };
        }
        while let Some(frame) = read_frame(&mut self.io).await {
            match frame.kind {
                HEADERS if frame.stream == stream => return Answer::Head,
                RST_STREAM if frame.stream == stream => return Answer::Reset(code(&frame.payload)),
                GOAWAY if frame.payload[4..8] != [0; 4] => return Answer::GoAway(code(&frame.payload[4..8])),
                HEADERS | RST_STREAM => self.received.push_back(frame),
                _ => {}
            }
        }
        Answer::Closed
    }
}

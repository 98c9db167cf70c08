//! The ways in, as exact in bytes as each allows: the bytes written here appear unchanged on the wire.

use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Request};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::Frame;
use hyper::client::conn::http2::SendRequest;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

use super::Field;
use super::origin::Recorder;
use crate::lab::TIMEOUT;
use crate::lab::client::auth;

/// The way in which a request enters the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// CONNECT, then HTTP/1.1 over TLS.
    TunnelH1,
    /// CONNECT, then HTTP/2 over TLS.
    TunnelH2,
    /// `http://` in absolute form.
    Http,
    /// `https://` in absolute form.
    Https,
}

impl Way {
    pub const ALL: [Self; 4] = [Self::TunnelH1, Self::TunnelH2, Self::Http, Self::Https];
    pub const H1: [Self; 3] = [Self::TunnelH1, Self::Http, Self::Https];
}

/// A request.
#[derive(Clone, Default)]
pub struct Ask {
    /// The label of a host below `api.test`.
    pub label: Option<String>,
    /// The path after the key.
    pub path: Vec<u8>,
    pub fields: Vec<(Vec<u8>, Vec<u8>)>,
    pub payload: Payload,
    pub trailers: Vec<(Vec<u8>, Vec<u8>)>,
}

#[derive(Clone, Default)]
pub enum Payload {
    #[default]
    None,
    /// A body with a declared length.
    Known(Vec<u8>),
    /// Chunks, or frames without a length.
    Pieces(Vec<Vec<u8>>),
}

/// A response. The status is absent if there was none.
#[derive(Clone, Debug, Default)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Vec<u8>,
    pub trailers: HeaderMap,
    /// Whether the response broke off.
    pub cut: bool,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).and_then(|value| value.to_str().ok())
    }
}

pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {}
impl<S: AsyncRead + AsyncWrite + Unpin + Send> Stream for S {}

type Outgoing = UnsyncBoxBody<Bytes, std::io::Error>;

/// A connection to the proxy that is used again as long as the proxy keeps it open.
pub struct Road<'f> {
    pub field: &'f Field,
    pub way: Way,
    h1: Option<Box<dyn Stream>>,
    h2: Option<SendRequest<Outgoing>>,
}

impl Field {
    pub fn road(&self, way: Way) -> Road<'_> {
        Road { field: self, way, h1: None, h2: None }
    }

    /// Returns the origin of a way in.
    pub fn origin(&self, way: Way) -> &Recorder {
        self.origins.at(way)
    }

    pub fn authority(&self, way: Way) -> String {
        format!("api.test:{}", self.origin(way).port)
    }

    /// Opens a connection for HTTP/1.1 requests.
    pub async fn wire(&self, way: Way) -> Box<dyn Stream> {
        match way {
            Way::TunnelH1 => Box::new(self.lab.tls(&self.authority(way), &["http/1.1"]).await),
            Way::Http | Way::Https => Box::new(self.lab.connect().await),
            Way::TunnelH2 => panic!("this way is not HTTP/1.1"),
        }
    }

    /// Returns the head of a request, to the end of its last field.
    pub fn head(&self, way: Way, method: &str, key: &str, ask: &Ask) -> Vec<u8> {
        let mut host = self.authority(way);
        if let Some(label) = &ask.label {
            host = format!("{label}.{host}");
        }
        let before = match way {
            Way::Http => format!("http://{host}"),
            Way::Https => format!("https://{host}"),
            Way::TunnelH1 | Way::TunnelH2 => String::new(),
        };
        let mut head = format!("{method} {before}/cell/{key}").into_bytes();
        head.extend(&ask.path);
        head.extend(format!(" HTTP/1.1\r\nHost: {host}\r\n").bytes());
        if !before.is_empty() {
            head.extend(format!("Proxy-Authorization: {}\r\n", auth()).bytes());
        }
        for (name, value) in &ask.fields {
            head.extend([name, &b": "[..], value, b"\r\n"].concat());
        }
        head
    }
}

impl Road<'_> {
    pub async fn send(&mut self, key: &str, ask: &Ask) -> Answer {
        let asked = async {
            if self.way == Way::TunnelH2 {
                return self.send_h2(key, ask).await;
            }
            // A connection that was closed meanwhile gives no answer, so the request is sent once more.
            for _ in 0..2 {
                if let Some(answer) = self.send_h1(key, ask).await {
                    return answer;
                }
            }
            Answer { cut: true, ..Answer::default() }
        };
        timeout(TIMEOUT, asked).await.unwrap_or_else(|_| panic!("no answer to {key}"))
    }

    async fn send_h1(&mut self, key: &str, ask: &Ask) -> Option<Answer> {
        let stream = match self.h1.take() {
            Some(stream) => stream,
            None => self.field.wire(self.way).await,
        };
        let (mut read, mut write) = tokio::io::split(stream);
        let bytes = self.bytes(key, ask);
        let (answer, written) = {
            let writing = async {
                if write.write_all(&bytes).await.is_err() || write.flush().await.is_err() {
                    std::future::pending::<()>().await;
                }
            };
            let reading = read_answer(&mut read);
            tokio::pin!(writing, reading);
            // An answer may arrive before everything has been written.
            tokio::select! {
                biased;
                () = &mut writing => (reading.await, true),
                answer = &mut reading => (answer, false),
            }
        };
        let answer = answer?;
        let closes = answer.cut || answer.header("connection").is_some_and(|value| value.contains("close"));
        if written && !closes {
            self.h1 = Some(Box::new(tokio::io::join(read, write)));
        }
        Some(answer)
    }

    fn bytes(&self, key: &str, ask: &Ask) -> Vec<u8> {
        let method = if matches!(ask.payload, Payload::None) { "GET" } else { "POST" };
        let mut bytes = self.field.head(self.way, method, key, ask);
        match &ask.payload {
            Payload::None => bytes.extend(b"\r\n"),
            Payload::Known(body) => {
                bytes.extend(format!("Content-Length: {}\r\n\r\n", body.len()).bytes());
                bytes.extend(body);
            }
            Payload::Pieces(pieces) => {
                bytes.extend(b"Transfer-Encoding: chunked\r\n\r\n");
                pieces.iter().for_each(|piece| bytes.extend(chunk(piece)));
                bytes.extend(b"0\r\n");
                for (name, value) in &ask.trailers {
                    bytes.extend([name, &b": "[..], value, b"\r\n"].concat());
                }
                bytes.extend(b"\r\n");
            }
        }
        bytes
    }

    async fn send_h2(&mut self, key: &str, ask: &Ask) -> Answer {
        let authority = self.field.authority(self.way);
        let mut sender = match self.h2.take().filter(|sender| !sender.is_closed()) {
            Some(sender) => sender,
            None => self.field.lab.h2(&authority).await,
        };
        let path = [format!("https://{authority}/cell/{key}").as_bytes(), &ask.path].concat();
        let mut request = Request::builder().uri(http::Uri::try_from(path).unwrap());
        if !matches!(ask.payload, Payload::None) {
            request = request.method("POST");
        }
        let fields = request.headers_mut().unwrap();
        for (name, value) in &ask.fields {
            fields.append(HeaderName::from_bytes(name).unwrap(), HeaderValue::from_bytes(value).unwrap());
        }
        let body = match ask.payload.clone() {
            Payload::None => Full::default().map_err(|never| match never {}).boxed_unsync(),
            Payload::Known(body) => Full::new(Bytes::from(body)).map_err(|never| match never {}).boxed_unsync(),
            Payload::Pieces(pieces) => {
                let mut frames: Vec<_> = pieces.into_iter().map(|piece| Frame::data(Bytes::from(piece))).collect();
                if !ask.trailers.is_empty() {
                    let trailers = ask.trailers.iter().map(|(name, value)| {
                        (HeaderName::from_bytes(name).unwrap(), HeaderValue::from_bytes(value).unwrap())
                    });
                    frames.push(Frame::trailers(trailers.collect()));
                }
                StreamBody::new(futures_util::stream::iter(frames.into_iter().map(Ok))).boxed_unsync()
            }
        };
        sender.ready().await.unwrap();
        let response = sender.send_request(request.body(body).unwrap()).await;
        self.h2 = Some(sender);
        let Ok(response) = response else { return Answer { cut: true, ..Answer::default() } };
        let (parts, mut body) = response.into_parts();
        let mut answer = Answer { status: parts.status.as_u16(), headers: parts.headers, ..Answer::default() };
        while let Some(frame) = body.frame().await {
            match frame.map(Frame::into_data) {
                Ok(Ok(data)) => answer.body.extend(&data),
                Ok(Err(frame)) => answer.trailers = frame.into_trailers().unwrap_or_default(),
                Err(_) => answer.cut = true,
            }
        }
        answer
    }
}

pub fn chunk(piece: &[u8]) -> Vec<u8> {
    [format!("{:x}\r\n", piece.len()).as_bytes(), piece, b"\r\n"].concat()
}

/// Reads one HTTP/1.1 answer. Returns `None` if the connection ends before it.
pub async fn read_answer(stream: &mut (impl AsyncRead + Unpin)) -> Option<Answer> {
    let mut bytes = Vec::new();
    let (mut answer, begin) = loop {
        if let Some(end) = memchr::memmem::find(&bytes, b"\r\n\r\n") {
            let mut fields = [httparse::EMPTY_HEADER; 64];
            let mut head = httparse::Response::new(&mut fields);
            head.parse(&bytes).unwrap();
            let headers = fields_of(head.headers);
            break (Answer { status: head.code.unwrap(), headers, ..Answer::default() }, end + 4);
        }
        if !more(stream, &mut bytes).await {
            return None;
        }
    };
    let mut rest = bytes.split_off(begin);
    if answer.status == 101 {
        answer.body = rest;
        return Some(answer);
    }
    if let Some(length) = answer.header("content-length") {
        let length: usize = length.parse().unwrap();
        while rest.len() < length && more(stream, &mut rest).await {}
        answer.cut = rest.len() < length;
        rest.truncate(length);
        answer.body = rest;
        return Some(answer);
    }
    if answer.header("transfer-encoding").is_none() {
        // A status without a body, such as 204.
        return Some(answer);
    }
    loop {
        let Some(line) = line(stream, &mut rest).await else { break };
        let size = usize::from_str_radix(line.split(';').next().unwrap().trim(), 16).unwrap();
        if size == 0 {
            let mut trailers = Vec::new();
            while let Some(line) = self::line(stream, &mut rest).await {
                if line.is_empty() {
                    answer.trailers = trailers.into_iter().collect();
                    return Some(answer);
                }
                let (name, value) = line.split_once(':').unwrap();
                trailers.push((HeaderName::try_from(name).unwrap(), HeaderValue::try_from(value.trim()).unwrap()));
            }
            break;
        }
        while rest.len() < size + 2 && more(stream, &mut rest).await {}
        if rest.len() < size + 2 {
            answer.body.extend(&rest);
            break;
        }
        answer.body.extend(&rest[..size]);
        rest.drain(..size + 2);
    }
    answer.cut = true;
    Some(answer)
}

fn fields_of(fields: &[httparse::Header<'_>]) -> HeaderMap {
    let field = |field: &httparse::Header<'_>| {
        (HeaderName::try_from(field.name).unwrap(), HeaderValue::from_bytes(field.value).unwrap())
    };
    let mut headers = HeaderMap::new();
    for (name, value) in fields.iter().filter(|one| !one.name.is_empty()).map(field) {
        headers.append(name, value);
    }
    headers
}

pub async fn more(stream: &mut (impl AsyncRead + Unpin), bytes: &mut Vec<u8>) -> bool {
    stream.read_buf(bytes).await.is_ok_and(|n| n > 0)
}

pub async fn line(stream: &mut (impl AsyncRead + Unpin), bytes: &mut Vec<u8>) -> Option<String> {
    loop {
        if let Some(end) = memchr::memmem::find(bytes, b"\r\n") {
            let line = String::from_utf8(bytes[..end].to_vec()).unwrap();
            bytes.drain(..end + 2);
            return Some(line);
        }
        if !more(stream, bytes).await {
            return None;
        }
    }
}

/// Encodes a client frame with a mask of zeros, so that its bytes appear unchanged on the wire.
pub fn frame(opcode: u8, last: bool, payload: &[u8]) -> Vec<u8> {
    let mut frame = head_of(opcode, last, payload.len(), 0x80);
    frame.extend([0; 4]);
    frame.extend(payload);
    frame
}

/// Encodes a frame of an origin.
pub fn unmasked(opcode: u8, last: bool, payload: &[u8]) -> Vec<u8> {
    let mut frame = head_of(opcode, last, payload.len(), 0);
    frame.extend(payload);
    frame
}

fn head_of(opcode: u8, last: bool, length: usize, mask: u8) -> Vec<u8> {
    let mut head = vec![if last { 0x80 | opcode } else { opcode }];
    match u16::try_from(length) {
        Ok(length @ 0..=125) => head.push(mask | u8::try_from(length).unwrap()),
        Ok(length) => {
            head.push(mask | 126);
            head.extend(length.to_be_bytes());
        }
        Err(_) => {
            head.push(mask | 127);
            head.extend((length as u64).to_be_bytes());
        }
    }
    head
}

/// Returns the fields that request a WebSocket.
pub fn upgrade() -> Vec<(Vec<u8>, Vec<u8>)> {
    [
        ("Connection", "Upgrade"),
        ("Upgrade", "websocket"),
        ("Sec-WebSocket-Version", "13"),
        ("Sec-WebSocket-Key", "dGhlIHNhbXBsZSBub25jZQ=="),
    ]
    .map(|(name, value)| (name.into(), value.into()))
    .to_vec()
}

impl Field {
    /// Opens a WebSocket. Returns it with the bytes that have already arrived.
    pub async fn socket(&self, way: Way, key: &str) -> (Box<dyn Stream>, Vec<u8>) {
        let mut stream = self.wire(way).await;
        let head = self.head(way, "GET", key, &Ask { fields: upgrade(), ..Ask::default() });
        stream.write_all(&[&head[..], b"\r\n"].concat()).await.unwrap();
        stream.flush().await.unwrap();
        let answer = timeout(TIMEOUT, read_answer(&mut stream)).await.expect("an answer").expect("an answer");
        assert_eq!(answer.status, 101, "{answer:?}");
        (stream, answer.body)
    }
}

/// Reads until the stream ends or fails.
pub async fn rest(mut stream: impl AsyncRead + Unpin) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = timeout(TIMEOUT, stream.read_to_end(&mut bytes)).await.expect("an end");
    bytes
}

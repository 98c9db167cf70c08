//! An origin that records every byte, including those of requests that never end, and sends configured answers.

use std::collections::HashMap;
use std::io;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, ready};
use std::time::Instant;

use bytes::Bytes;
use futures_util::StreamExt;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpListener;
use tokio::sync::Notify;
use tokio_rustls::TlsAcceptor;

use crate::lab::{LabBuilder, TIMEOUT};

/// The request as it arrived.
#[derive(Clone, Default)]
pub struct Arrived {
    pub head: Vec<u8>,
    pub fields: HeaderMap,
    /// Includes the trailers, or the bytes after the upgrade to a WebSocket.
    pub body: Vec<u8>,
}

/// The response of an origin.
#[derive(Clone, Default)]
pub struct Words {
    pub status: u16,
    pub fields: Vec<(String, Vec<u8>)>,
    pub pieces: Vec<Vec<u8>>,
    /// Whether `Content-Length` is sent.
    pub known: bool,
    pub trailers: Vec<(String, Vec<u8>)>,
    /// The response stalls after the pieces, without an end.
    pub silent: bool,
    /// The last bytes of the response, sent when the notification arrives.
    pub later: Option<(Arc<Notify>, Vec<u8>)>,
}

#[derive(Clone)]
pub struct Recorder {
    pub port: u16,
    arrived: Arc<Mutex<HashMap<String, Arrived>>>,
    wire: Arc<Mutex<Vec<u8>>>,
    words: Arc<Mutex<HashMap<String, Words>>>,
    live: Arc<AtomicUsize>,
}

impl Recorder {
    /// Starts the origin for `api.test`, over TLS with these protocols or without TLS.
    pub async fn start(tls: Option<(&LabBuilder, &[&str])>) -> Self {
        let tls = tls.map(|(builder, alpn)| {
            let mut config = builder.server_config("api.test").as_ref().clone();
            config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
            TlsAcceptor::from(Arc::new(config))
        });
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        let this =
            Self { port, arrived: Arc::default(), wire: Arc::default(), words: Arc::default(), live: Arc::default() };
        let origin = this.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (origin, tls) = (origin.clone(), tls.clone());
                origin.live.fetch_add(1, Ordering::SeqCst);
                tokio::spawn(async move {
                    let live = origin.live.clone();
                    match tls {
                        None => origin.serve(stream, false).await,
                        Some(tls) => {
                            if let Ok(stream) = tls.accept(stream).await {
                                let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                                origin.serve(stream, h2).await;
                            }
                        }
                    }
                    live.fetch_sub(1, Ordering::SeqCst);
                });
            }
        });
        this
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, h2: bool) {
        let io = TokioIo::new(Tee { inner: stream, wire: self.wire.clone() });
        let service = service_fn(move |request| {
            let origin = self.clone();
            async move { origin.answer(request).await }
        });
        // Some tests abort the connection, so errors are ignored.
        let _ = if h2 {
            hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await
        } else {
            hyper::server::conn::http1::Builder::new().serve_connection(io, service).with_upgrades().await
        };
    }

    async fn answer(self, mut request: Request<Incoming>) -> io::Result<Response<UnsyncBoxBody<Bytes, io::Error>>> {
        let key = request.uri().path().split('/').nth(2).unwrap_or_default().to_owned();
        let mut head = format!("{} {}\n", request.method(), request.uri()).into_bytes();
        for (name, value) in request.headers() {
            head.extend([name.as_str().as_bytes(), b": ", value.as_bytes(), b"\n"].concat());
        }
        let fields = request.headers().clone();
        self.arrived.lock().unwrap().insert(key.clone(), Arrived { head, fields, body: Vec::new() });
        let words = self.words.lock().unwrap().get(&key).cloned();
        let note = |bytes: &[u8]| self.arrived.lock().unwrap().entry(key.clone()).or_default().body.extend(bytes);
        if request.headers().contains_key("upgrade") {
            let upgrade = hyper::upgrade::on(&mut request);
            let origin = self.clone();
            let key = key.clone();
            let said = words.clone();
            self.live.fetch_add(1, Ordering::SeqCst);
            tokio::spawn(async move {
                if let Ok(stream) = upgrade.await {
                    origin.switched(TokioIo::new(stream), &key, said).await;
                }
                origin.live.fetch_sub(1, Ordering::SeqCst);
            });
            let fields = words.as_ref().map(|words| words.fields.clone()).unwrap_or_default();
            let mut response = Response::builder()
                .status(101)
                .header("connection", "upgrade")
                .header("upgrade", "websocket")
                .header("sec-websocket-accept", "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=");
            for (name, value) in fields {
                response = response.header(name, value);
            }
            return Ok(response.body(full(Vec::new())).unwrap());
        }
        let mut body = request.into_body();
        while let Some(frame) = body.frame().await {
            match frame.map_err(io::Error::other)?.into_data() {
                Ok(data) => note(&data),
                Err(frame) => frame.into_trailers().iter().flatten().for_each(|(name, value)| {
                    self.arrived.lock().unwrap().entry(key.clone()).or_default().head.extend(name.as_str().bytes());
                    note(value.as_bytes());
                }),
            }
        }
        Ok(said(words.unwrap_or(Words { status: 200, known: true, ..Words::default() })))
    }

    /// Records the bytes after an upgrade, and sends its answer.
    async fn switched(&self, mut stream: impl AsyncRead + AsyncWrite + Unpin, key: &str, words: Option<Words>) {
        for piece in words.unwrap_or_default().pieces {
            if stream.write_all(&piece).await.is_err() || stream.flush().await.is_err() {
                return;
            }
        }
        let mut piece = vec![0; 16 * 1024];
        while let Ok(n @ 1..) = stream.read(&mut piece).await {
            self.arrived.lock().unwrap().entry(key.to_owned()).or_default().body.extend(&piece[..n]);
        }
    }

    pub fn says(&self, key: &str, words: Words) {
        self.words.lock().unwrap().insert(key.to_owned(), words);
    }

    pub fn arrived(&self, key: &str) -> Option<Arrived> {
        self.arrived.lock().unwrap().get(key).cloned()
    }

    pub fn each(&self, look: impl Fn(&Arrived)) {
        self.arrived.lock().unwrap().values().for_each(look);
    }

    /// Returns the bytes of all connections, after TLS decryption.
    pub fn wire(&self) -> Vec<u8> {
        self.wire.lock().unwrap().clone()
    }

    /// Waits until this many bytes of a body have arrived.
    pub async fn has(&self, key: &str, length: usize) {
        let start = Instant::now();
        while self.arrived(key).is_none_or(|arrived| arrived.body.len() < length) {
            assert!(start.elapsed() < TIMEOUT, "{key}: {:?}", self.arrived(key).map(|arrived| arrived.body.len()));
            tokio::task::yield_now().await;
        }
    }

    /// Waits until no connection is open, so that nothing can be in flight.
    pub async fn is_quiet(&self) {
        let start = Instant::now();
        while self.live.load(Ordering::SeqCst) > 0 {
            assert!(start.elapsed() < TIMEOUT, "connections are still open");
            tokio::task::yield_now().await;
        }
    }
}

fn full(bytes: Vec<u8>) -> UnsyncBoxBody<Bytes, io::Error> {
    Full::new(Bytes::from(bytes)).map_err(|never| match never {}).boxed_unsync()
}

fn said(words: Words) -> Response<UnsyncBoxBody<Bytes, io::Error>> {
    let mut response = Response::builder().status(words.status);
    for (name, value) in &words.fields {
        response = response.header(name.as_str(), HeaderValue::from_bytes(value).unwrap());
    }
    if words.known {
        return response.body(full(words.pieces.concat())).unwrap();
    }
    let mut frames: Vec<_> = words.pieces.into_iter().map(|piece| Ok(Frame::data(Bytes::from(piece)))).collect();
    if !words.trailers.is_empty() {
        let mut trailers = HeaderMap::new();
        for (name, value) in &words.trailers {
            response = response.header("trailer", name.as_str());
            trailers.append(HeaderName::try_from(name.as_str()).unwrap(), HeaderValue::from_bytes(value).unwrap());
        }
        frames.push(Ok(Frame::trailers(trailers)));
    }
    let frames = futures_util::stream::iter(frames);
    if let Some((may, piece)) = words.later {
        let later = futures_util::stream::once(async move {
            may.notified().await;
            Ok(Frame::data(Bytes::from(piece)))
        });
        return response.body(StreamBody::new(frames.chain(later)).boxed_unsync()).unwrap();
    }
    if words.silent {
        return response.body(StreamBody::new(frames.chain(futures_util::stream::pending())).boxed_unsync()).unwrap();
    }
    response.body(StreamBody::new(frames).boxed_unsync()).unwrap()
}

/// Records the bytes that are read.
struct Tee<S> {
    inner: S,
    wire: Arc<Mutex<Vec<u8>>>,
}

impl<S: AsyncRead + Unpin> AsyncRead for Tee<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let known = buffer.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, buffer))?;
        self.wire.lock().unwrap().extend_from_slice(&buffer.filled()[known..]);
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Tee<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

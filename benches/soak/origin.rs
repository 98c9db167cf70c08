//! The origins: they answer as the path says, and search all that they receive for values.
//!
//! A path is `/WHAT/SERIAL/SIZE`, sometimes with an interval in milliseconds behind it.

use std::io::{self, Read, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::read::GzDecoder;
use flate2::write::GzEncoder;
use futures_util::{SinkExt, StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use tokio::net::TcpListener;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsAcceptor;
use tokio_tungstenite::tungstenite::Message;

use crate::book::{Book, Serial};
use crate::measure::now_ns;
use crate::payload;
use crate::pki::Ca;
use crate::secrets::{Scan, Secrets, Watched};

type Body = UnsyncBoxBody<Bytes, io::Error>;

/// The size of the text that all bodies are parts of.
const TEXT: usize = 3 << 20;
/// The largest body.
pub(crate) const MAX_BODY: usize = 1 << 20;
/// The longest time that an origin stalls. Longer than every timeout of the proxy's that the scenarios wait for.
const STALL: Duration = Duration::from_secs(60);
const HANDSHAKE_TIMEOUT: Duration = Duration::from_secs(30);

/// The ports of the origins.
#[derive(Clone, Copy)]
pub(crate) struct Ports {
    /// HTTP/1.1 and h2; no request may carry a value.
    pub(crate) plain: u16,
    /// HTTP/1.1 and h2; requests carry exactly one value.
    pub(crate) credential: u16,
    /// HTTP/1.1 only, so that a connection that dies carries one exchange.
    pub(crate) fault: u16,
    /// Nobody listens.
    pub(crate) closed: u16,
}

/// The text of all bodies. Client and origin take the same part of it for one serial.
#[derive(Clone)]
pub(crate) struct Text(Bytes);

impl Text {
    pub(crate) fn new() -> Self {
        Self(payload::text(TEXT))
    }

    pub(crate) fn part(&self, serial: Serial, size: usize) -> Bytes {
        let from = serial.wrapping_mul(7_919) % (TEXT - MAX_BODY);
        self.0.slice(from..from + size.min(MAX_BODY))
    }
}

pub(crate) fn gzip(text: &[u8]) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

/// What the handlers need.
#[derive(Clone)]
struct Origin {
    book: Arc<Book>,
    secrets: Arc<Secrets>,
    text: Text,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    Credential,
    Fault,
    Plain,
}

/// Starts all origins in the current runtime.
pub(crate) async fn start(dir: &Path, book: &Arc<Book>, secrets: &Arc<Secrets>, text: &Text) -> Ports {
    let origin = Origin { book: book.clone(), secrets: secrets.clone(), text: text.clone() };
    let ca = Ca::load(dir, "origin-ca");
    let hosts = ["*.work.test", "*.opaque.test", "*.cred.test", "*.fault.test", "*.added.test"];
    let both = ca.server_config(&hosts, &["h2", "http/1.1"]);
    let plain = listen(origin.clone(), Place::Plain, both.clone()).await;
    let credential = listen(origin.clone(), Place::Credential, both).await;
    let fault = listen(origin, Place::Fault, ca.server_config(&hosts, &["http/1.1"])).await;
    // Bound, but not listening: nobody else can use the port.
    let closed = tokio::net::TcpSocket::new_v4().unwrap();
    closed.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let port = closed.local_addr().unwrap().port();
    std::mem::forget(closed);
    Ports { plain, credential, fault, closed: port }
}

async fn listen(origin: Origin, place: Place, config: Arc<ServerConfig>) -> u16 {
    let socket = tokio::net::TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(4_096).unwrap();
    let port = listener.local_addr().unwrap().port();
    tokio::spawn(accept(listener, origin, place, TlsAcceptor::from(config)));
    port
}

async fn accept(listener: TcpListener, origin: Origin, place: Place, acceptor: TlsAcceptor) {
    loop {
        let tcp = match listener.accept().await {
            Ok((tcp, _)) => tcp,
            Err(error) => {
                origin.book.violation(&format!("the origin cannot accept a connection: {error}"));
                sleep(Duration::from_millis(100)).await;
                continue;
            }
        };
        let (origin, acceptor) = (origin.clone(), acceptor.clone());
        tokio::spawn(async move {
            let _ = tcp.set_nodelay(true);
            // A second descriptor of the socket, through which a handler can make its close a reset.
            let socket = (place == Place::Fault).then(|| tcp.as_fd().try_clone_to_owned().ok().map(Arc::new)).flatten();
            let Ok(Ok(tls)) = timeout(HANDSHAKE_TIMEOUT, acceptor.accept(tcp)).await else { return };
            let is_h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
            let service = service_fn(|request| answer(origin.clone(), place, socket.clone(), request));
            if place == Place::Credential {
                serve(TokioIo::new(tls), is_h2, service).await;
            } else {
                let watched = Watched::new(tls, &origin.secrets, &origin.book, "the origin");
                serve(TokioIo::new(watched), is_h2, service).await;
            }
        });
    }
}

async fn serve<I, S>(io: I, is_h2: bool, service: S)
where
    I: hyper::rt::Read + hyper::rt::Write + Unpin + Send + 'static,
    S: hyper::service::Service<Request<Incoming>, Response = Response<Body>, Error = io::Error>,
    S::Future: Send + 'static,
{
    if is_h2 {
        let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
        let _ = server.max_concurrent_streams(1_000).serve_connection(io, service).await;
    } else {
        let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).with_upgrades().await;
    }
}

async fn answer(
    origin: Origin,
    place: Place,
    socket: Option<Arc<OwnedFd>>,
    request: Request<Incoming>,
) -> io::Result<Response<Body>> {
    let path = request.uri().path().to_owned();
    let mut words = path.split('/').skip(1);
    let what = words.next().unwrap_or_default();
    let mut number = || words.next().and_then(|word| word.parse::<usize>().ok()).unwrap_or_default();
    let (serial, size, interval) = (number(), number(), number());
    origin.check_head(place, &request);
    let text = origin.text.part(serial, size);
    match what {
        "text" => Ok(respond(&request, text)),
        "post" => origin.take(request, serial, &text).await,
        "events" => Ok(events(serial, size, Duration::from_millis(interval as u64))),
        "ws" => Ok(payload::accept_websocket(request, echo).map(|()| full(Bytes::new()))),
        "echo" => origin.echo_credential(&request, size),
        "tell" => origin.tell_credential(request),
        "leakstream" => origin.drain_leak(request, serial).await,
        "leak" => {
            origin.book.violation(&format!("request {serial}, a leak attempt, has reached the origin: {path}"));
            Ok(respond(&request, text))
        }
        "cut" => Ok(cut(&text, true)),
        "cutchunked" => Ok(cut(&text, false)),
        "reset" | "resetbody" => {
            if let Some(socket) = socket {
                let _ = socket2::SockRef::from(&socket).set_linger(Some(Duration::ZERO));
            }
            if what == "reset" { Err(io::Error::other("reset")) } else { Ok(cut(&text, true)) }
        }
        "stall" => {
            sleep(STALL).await;
            Ok(respond(&request, text))
        }
        "stallbody" => Ok(stalled(text)),
        // "die" and all others.
        _ => Err(io::Error::other("dead")),
    }
}

fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).map_err(|never| match never {}).boxed_unsync()
}

/// Answers with the text, and compresses it for clients that ask for it.
fn respond(request: &Request<Incoming>, text: Bytes) -> Response<Body> {
    let wants_gzip = request.headers().get("accept-encoding").is_some_and(|codings| codings == "gzip");
    let mut response = if wants_gzip {
        let coded = Bytes::from(gzip(&text));
        // Without a length, in two pieces.
        let pieces = [coded.slice(..coded.len() / 2), coded.slice(coded.len() / 2..)];
        let frames = pieces.map(|piece| Ok(Frame::data(piece)));
        let mut response = Response::new(StreamBody::new(stream::iter(frames)).boxed_unsync());
        response.headers_mut().insert("content-encoding", "gzip".parse().unwrap());
        response
    } else {
        Response::new(full(text))
    };
    response.headers_mut().insert("content-type", "application/json".parse().unwrap());
    response
}

/// Sends one event after each interval, with the time at which it was sent.
fn events(serial: Serial, count: usize, interval: Duration) -> Response<Body> {
    let events = stream::unfold(0, move |n| async move {
        if n == count {
            return None;
        }
        sleep(interval).await;
        let event = format!("id: {serial}-{n}\ndata: {{\"sent\":{:>20}}}\n\n", now_ns());
        Some((Ok(Frame::data(Bytes::from(event))), n + 1))
    });
    let mut response = Response::new(StreamBody::new(events).boxed_unsync());
    response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
    response
}

async fn echo(mut socket: payload::ServerSocket) {
    while let Some(Ok(message)) = socket.next().await {
        if (message.is_text() || message.is_binary()) && socket.send(message).await.is_err() {
            return;
        }
    }
}

/// Half of the text, and then an error, which closes the connection or resets the stream.
fn cut(text: &Bytes, has_length: bool) -> Response<Body> {
    let half = text.slice(..text.len() / 2);
    let frames = [Ok(Frame::data(half)), Err(io::Error::other("dead"))];
    // The pause lets the first half leave before the error.
    let frames = stream::iter(frames).then(|frame| async {
        sleep(Duration::from_millis(20)).await;
        frame
    });
    let mut response = Response::new(StreamBody::new(frames).boxed_unsync());
    if has_length {
        response.headers_mut().insert("content-length", text.len().into());
    }
    response
}

/// Half of the text, and the other half much later.
fn stalled(text: Bytes) -> Response<Body> {
    let frames = stream::iter([text.slice(..text.len() / 2), text.slice(text.len() / 2..)]).enumerate();
    let frames = frames.then(|(n, piece)| async move {
        sleep(STALL * u32::from(n > 0)).await;
        Ok(Frame::data(piece))
    });
    Response::new(StreamBody::new(frames).boxed_unsync())
}

impl Origin {
    /// Searches a head for values. HPACK may have compressed it, so a search of the stream is not enough.
    fn check_head(&self, place: Place, request: &Request<Incoming>) {
        for (name, value) in request.headers() {
            let name = name.as_str();
            if name.starts_with("proxy-") || name.starts_with("exeat-") {
                self.book.violation(&format!("the origin received the field {name} of {}", request.uri()));
            }
            if place == Place::Credential && name == "authorization" {
                continue;
            }
            self.check(value.as_bytes(), request);
        }
        self.check(request.uri().to_string().as_bytes(), request);
    }

    fn check(&self, text: &[u8], request: &Request<Incoming>) {
        if let Some(name) = self.secrets.find(text) {
            self.book.violation(&format!("the origin received a value ({name}) in the head of {}", request.uri()));
        }
    }

    /// Takes a body, which must be the expected one, and sends it back.
    async fn take(&self, request: Request<Incoming>, serial: Serial, expected: &Bytes) -> io::Result<Response<Body>> {
        let is_gzip = request.headers().get("content-encoding").is_some_and(|coding| coding == "gzip");
        let collected = request.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
        let body = if is_gzip {
            let mut text = Vec::new();
            GzDecoder::new(&collected[..]).read_to_end(&mut text)?;
            Bytes::from(text)
        } else {
            collected
        };
        if body != *expected {
            let (got, wanted) = (body.len(), expected.len());
            self.book
                .violation(&format!("the origin received another body of request {serial}: {got} of {wanted} bytes"));
        }
        let mut response = Response::new(full(body));
        response.headers_mut().insert("content-type", "application/json".parse().unwrap());
        Ok(response)
    }

    /// Returns the authorization field, which must have the value of the credential that the host is named after.
    fn injected(&self, request: &Request<Incoming>) -> Option<String> {
        let host = request.uri().host().map(str::to_owned);
        let host = host.or_else(|| Some(request.headers().get("host")?.to_str().ok()?.to_owned()))?;
        let n: usize = host.strip_prefix('c')?.split('.').next()?.parse().ok()?;
        let found = request.headers().get("authorization")?.to_str().ok()?;
        (found == format!("Bearer {}", self.secrets.value(n))).then(|| found.to_owned())
    }

    /// Echoes the injected credential in a field, and in the body in pieces that cut it.
    fn echo_credential(&self, request: &Request<Incoming>, size: usize) -> io::Result<Response<Body>> {
        let Some(found) = self.injected(request) else { return Ok(not_injected(request)) };
        let padding = self.text.part(size, size);
        let cut = found.len() - 11;
        let pieces = [
            Bytes::from(format!("{{\"received\":\"{}", &found[..cut])),
            Bytes::from(format!("{}\",\"padding\":", &found[cut..])),
            padding,
        ];
        let frames = pieces.map(|piece| Ok(Frame::data(piece)));
        let mut response = Response::new(StreamBody::new(stream::iter(frames)).boxed_unsync());
        response.headers_mut().insert("content-type", "application/json".parse().unwrap());
        response.headers_mut().insert("x-received", found.parse().unwrap());
        Ok(response)
    }

    /// Answers each message on a WebSocket with the injected credential.
    fn tell_credential(&self, request: Request<Incoming>) -> io::Result<Response<Body>> {
        let Some(found) = self.injected(&request) else { return Ok(not_injected(&request)) };
        let talk = |mut socket: payload::ServerSocket| async move {
            while let Some(Ok(message)) = socket.next().await {
                if message.is_text() && socket.send(Message::text(found.clone())).await.is_err() {
                    return;
                }
            }
        };
        Ok(payload::accept_websocket(request, talk).map(|()| full(Bytes::new())))
    }

    /// Reads the body of a leak attempt, which must break off before the value.
    async fn drain_leak(&self, request: Request<Incoming>, serial: Serial) -> io::Result<Response<Body>> {
        let mut scan = Scan::new(self.secrets.clone());
        let mut body = request.into_body();
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(io::Error::other)?;
            if let Some(name) = frame.data_ref().and_then(|data| scan.feed(data)) {
                self.book.violation(&format!("the origin received a value ({name}) in the body of request {serial}"));
            }
        }
        self.book.violation(&format!("request {serial}, a leak attempt, has reached the origin to its end"));
        Ok(Response::new(full(Bytes::new())))
    }
}

fn not_injected(request: &Request<Incoming>) -> Response<Body> {
    let mut response = Response::new(full(format!("no credential was injected into {}", request.uri())));
    *response.status_mut() = StatusCode::UNAUTHORIZED;
    response
}

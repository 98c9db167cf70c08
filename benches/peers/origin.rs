//! The origin: answers of a requested size, uploads, server-sent events and a WebSocket echo, over TLS.

use std::convert::Infallible;
use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use futures_util::{SinkExt, StreamExt, stream};
use http::{Request, Response, StatusCode};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

use crate::lab::daemon::REAL_KEY;
use crate::measure::now_ns;
use crate::payload::{self, text};
use crate::pki::Ca;

/// The interval of server-sent events.
const EVENT_INTERVAL: Duration = Duration::from_millis(5);
/// The most bytes that `/text/N` sends at once.
const PIECE: usize = 64 * 1024;

type Body = UnsyncBoxBody<Bytes, Infallible>;

pub(crate) async fn bind() -> TcpListener {
    TcpListener::bind("127.0.0.1:0").await.unwrap()
}

/// Serves until the process is killed.
pub(crate) async fn serve(listener: TcpListener, dir: &Path) {
    let hosts = ["*.bench.test", "*.opaque.test", "bench.test", "opaque.test", "localhost"];
    let acceptor = TlsAcceptor::from(Ca::load(dir, "origin-ca").server_config(&hosts, &["h2", "http/1.1"]));
    loop {
        let (tcp, _) = listener.accept().await.unwrap();
        let acceptor = acceptor.clone();
        tokio::spawn(async move {
            let _ = tcp.set_nodelay(true);
            let Ok(tls) = acceptor.accept(tcp).await else { return };
            let is_h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
            let io = TokioIo::new(tls);
            if is_h2 {
                let mut server = hyper::server::conn::http2::Builder::new(TokioExecutor::new());
                let _ = server.max_concurrent_streams(1_000).serve_connection(io, service_fn(answer)).await;
            } else {
                let server = hyper::server::conn::http1::Builder::new();
                let _ = server.serve_connection(io, service_fn(answer)).with_upgrades().await;
            }
        });
    }
}

async fn answer(request: Request<Incoming>) -> Result<Response<Body>, Infallible> {
    let path = request.uri().path().to_owned();
    let version = format!("{:?}", request.version());
    let mut response = match path.strip_prefix("/text/").and_then(|size| size.parse().ok()) {
        Some(size) => Response::new(text_body(size)),
        None => match path.as_str() {
            "/upload" => upload(request).await,
            "/auth" if request.headers().get("authorization").is_some_and(|key| key == REAL_KEY) => {
                Response::new(text_body(1_024))
            }
            "/events" => events(),
            "/ws" => echo(request),
            _ => {
                let mut refused = Response::new(text_body(0));
                *refused.status_mut() = StatusCode::UNAUTHORIZED;
                refused
            }
        },
    };
    response.headers_mut().insert("origin-version", version.parse().unwrap());
    Ok(response)
}

fn text_body(size: usize) -> Body {
    thread_local! {
        static TEXTS: std::cell::RefCell<std::collections::HashMap<usize, Bytes>> = std::cell::RefCell::default();
    }
    let piece =
        TEXTS.with_borrow_mut(|texts| texts.entry(size.min(PIECE)).or_insert_with(|| text(size.min(PIECE))).clone());
    if size <= PIECE {
        return Full::new(piece).boxed_unsync();
    }
    SizedBody { piece, left: size }.boxed_unsync()
}

/// A body of a known length that repeats one piece.
struct SizedBody {
    piece: Bytes,
    left: usize,
}

impl hyper::body::Body for SizedBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: std::pin::Pin<&mut Self>,
        _: &mut std::task::Context<'_>,
    ) -> std::task::Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let size = self.left.min(self.piece.len());
        self.left -= size;
        let frame = (size > 0).then(|| Ok(Frame::data(self.piece.slice(..size))));
        std::task::Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        hyper::body::SizeHint::with_exact(self.left as u64)
    }
}

/// Answers with the number of bytes received.
async fn upload(request: Request<Incoming>) -> Response<Body> {
    let mut body = request.into_body();
    let mut received = 0;
    while let Some(Ok(frame)) = body.frame().await {
        received += frame.data_ref().map_or(0, Bytes::len);
    }
    Response::new(Full::new(Bytes::from(format!("{received:>12}"))).boxed_unsync())
}

/// Events that carry the time at which they were sent.
fn events() -> Response<Body> {
    let events = stream::unfold((), |()| async {
        tokio::time::sleep(EVENT_INTERVAL).await;
        let event = format!("data: {{\"sent\":{:>20},\"delta\":\"and then \"}}\n\n", now_ns());
        Some((Ok(Frame::data(Bytes::from(event))), ()))
    });
    let mut response = Response::new(StreamBody::new(events).boxed_unsync());
    response.headers_mut().insert("content-type", "text/event-stream".parse().unwrap());
    response
}

/// Sends every text message back.
fn echo(request: Request<Incoming>) -> Response<Body> {
    let answer = payload::accept_websocket(request, |mut socket| async move {
        while let Some(Ok(message)) = socket.next().await {
            if message.is_text() && socket.send(message).await.is_err() {
                return;
            }
        }
    });
    answer.map(|()| text_body(0))
}

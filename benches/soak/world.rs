//! What all clients share, and the ways in which they send requests.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::sync::CancellationToken;

use crate::book::{Book, Outcome};
use crate::client::{Connection, Head};
use crate::gateway::{Execution, Gateway};
use crate::origin::{MAX_BODY, Ports, Text};
use crate::pki;
use crate::secrets::{Secrets, Watched};

/// The longest time of one exchange, of a connection with its handshake, and of a message.
pub(crate) const PATIENCE: Duration = Duration::from_secs(60);

/// The beginning of the error of a connection or stream that ended without a response.
pub(crate) const NO_RESPONSE: &str = "no response: ";

pub(crate) type Body = UnsyncBoxBody<Bytes, Infallible>;
/// A connection to the proxy.
pub(crate) type Tcp = Watched<TcpStream>;
/// A TLS connection in a tunnel.
pub(crate) type Tls = Watched<TlsStream<Tcp>>;

/// What all clients share.
pub(crate) struct World {
    pub(crate) book: Arc<Book>,
    pub(crate) secrets: Arc<Secrets>,
    pub(crate) text: Text,
    pub(crate) ports: Ports,
    pub(crate) gateway: Gateway,
    /// The clients end their work once this is cancelled.
    pub(crate) stop: CancellationToken,
    /// The number of malformed heads that were refused.
    pub(crate) malformed: AtomicU64,
    /// The number of CONNECTs of stopped executions, whose lines name no host.
    pub(crate) stopped_connects: AtomicU64,
    /// The number of CONNECTs of clients that did not wait. The lines of some name no host.
    pub(crate) vanished_connects: AtomicU64,
    tls: Configs,
}

/// The TLS configurations of clients.
struct Configs {
    inspected_h1: Arc<ClientConfig>,
    inspected_h2: Arc<ClientConfig>,
    /// Trusts the CA of the origins.
    opaque: Arc<ClientConfig>,
}

/// The way of a request to its origin.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Way {
    Absolute,
    /// Without the proxy.
    Direct,
    Http1,
    Http2,
    Opaque,
}

/// A request.
pub(crate) struct Call {
    pub(crate) method: &'static str,
    pub(crate) path: String,
    pub(crate) fields: Vec<(&'static str, String)>,
    pub(crate) body: Body,
}

/// A complete response.
pub(crate) struct Reply {
    pub(crate) status: u16,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Bytes,
}

/// A client connection on which requests are sent, to one host.
pub(crate) struct Session {
    sender: Sender,
    driver: JoinHandle<()>,
    way: Way,
    authority: String,
    execution: Arc<Execution>,
    /// The tunnel's own call, which its first raw request uses.
    has_prepaid: bool,
}

enum Sender {
    Http1(http1::SendRequest<Body>),
    Http2(http2::SendRequest<Body>),
}

impl World {
    pub(crate) fn new(
        dir: &Path,
        (book, secrets): (Arc<Book>, Arc<Secrets>),
        text: Text,
        ports: Ports,
        gateway: Gateway,
    ) -> Self {
        let tls = Configs {
            inspected_h1: pki::client_config(dir, "ca", &["http/1.1"], true),
            inspected_h2: pki::client_config(dir, "ca", &["h2"], true),
            opaque: pki::client_config(dir, "origin-ca", &["http/1.1"], false),
        };
        let [malformed, stopped_connects, vanished_connects] = [0, 0, 0].map(AtomicU64::new);
        Self {
            book,
            secrets,
            text,
            ports,
            gateway,
            stop: CancellationToken::new(),
            malformed,
            stopped_connects,
            vanished_connects,
            tls,
        }
    }

    /// Waits, as long as the load goes on. Returns false once it has ended.
    pub(crate) async fn pause(&self, duration: Duration) -> bool {
        tokio::select! {
            () = self.stop.cancelled() => false,
            () = sleep(duration) => true,
        }
    }

    /// Opens a connection to the proxy.
    pub(crate) async fn connect(&self) -> Result<Tcp, String> {
        self.connect_to(self.gateway.port).await.map(|tcp| Watched::counted(tcp, &self.book))
    }

    async fn connect_to(&self, port: u16) -> Result<TcpStream, String> {
        let tcp = timeout(PATIENCE, TcpStream::connect(("127.0.0.1", port))).await;
        let tcp = tcp.map_err(|_| "no connection in time".to_owned())?.map_err(|error| format!("connect: {error}"))?;
        let _ = tcp.set_nodelay(true);
        Ok(tcp)
    }

    /// Searches what a client reads from a stream for values.
    pub(crate) fn watched<S>(&self, stream: S) -> Watched<S> {
        Watched::new(stream, &self.secrets, &self.book, "a client")
    }

    /// Sends CONNECT, which is one call. Returns the head of a refusal.
    pub(crate) async fn tunnel(
        &self,
        execution: &Execution,
        host: &str,
        port: u16,
    ) -> Result<Result<Tcp, Head>, String> {
        let mut connection = Connection::new(self.connect().await?);
        let head = timeout(PATIENCE, connection.ask_for_tunnel(&execution.authorization, host, port)).await;
        let head = head.map_err(|_| format!("no answer to CONNECT {host} within {PATIENCE:?}"))??;
        execution.calls.fetch_add(1, Ordering::Relaxed);
        Ok(if head.status == 200 { Ok(connection.stream) } else { Err(head) })
    }

    /// Opens a tunnel that must not be refused, and TLS in it.
    pub(crate) async fn tls(&self, execution: &Execution, way: Way, (host, port): (&str, u16)) -> Result<Tls, String> {
        let tunnel = self.tunnel(execution, host, port).await?.map_err(|head| {
            format!("CONNECT {host}:{port}: {} {}", head.status, head.field("exeat-refusal").unwrap_or_default())
        })?;
        self.handshake(tunnel, way, host).await.map(|tls| self.watched(tls))
    }

    /// Performs the TLS handshake of a way on a stream.
    pub(crate) async fn handshake<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        stream: S,
        way: Way,
        name: &str,
    ) -> Result<TlsStream<S>, String> {
        let config = match way {
            Way::Http1 | Way::Absolute => &self.tls.inspected_h1,
            Way::Http2 => &self.tls.inspected_h2,
            Way::Opaque | Way::Direct => &self.tls.opaque,
        };
        let name = ServerName::try_from(name.to_owned()).unwrap();
        let tls = timeout(PATIENCE, TlsConnector::from(config.clone()).connect(name, stream)).await;
        tls.map_err(|_| "no TLS handshake in time".to_owned())?.map_err(|error| format!("TLS: {error}"))
    }

    /// Opens a connection for requests to a host.
    pub(crate) async fn session(
        &self,
        execution: &Arc<Execution>,
        way: Way,
        (host, port): (&str, u16),
    ) -> Result<Session, String> {
        let (sender, driver) = match way {
            Way::Absolute => http1_over(self.watched(self.connect().await?)).await?,
            Way::Direct => {
                let tls = self.handshake(self.connect_to(port).await?, way, host).await?;
                http1_over(self.watched(tls)).await?
            }
            Way::Http1 | Way::Opaque => http1_over(self.tls(execution, way, (host, port)).await?).await?,
            Way::Http2 => {
                let tls = self.tls(execution, way, (host, port)).await?;
                if tls.get_ref().get_ref().1.alpn_protocol() != Some(b"h2") {
                    return Err("HTTP/2 is not offered".to_owned());
                }
                http2_over(tls).await?
            }
        };
        let has_prepaid = matches!(way, Way::Http1 | Way::Http2);
        let (authority, execution) = (format!("{host}:{port}"), execution.clone());
        Ok(Session { sender, driver, way, authority, execution, has_prepaid })
    }
}

async fn http1_over(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<(Sender, JoinHandle<()>), String> {
    let (sender, connection) = http1::handshake(TokioIo::new(io)).await.map_err(|error| error.to_string())?;
    let driver = tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok((Sender::Http1(sender), driver))
}

async fn http2_over(
    io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
) -> Result<(Sender, JoinHandle<()>), String> {
    let handshake = http2::handshake(TokioExecutor::new(), TokioIo::new(io));
    let (sender, connection) = handshake.await.map_err(|error| error.to_string())?;
    let driver = tokio::spawn(async move {
        let _ = connection.await;
    });
    Ok((Sender::Http2(sender), driver))
}

impl Session {
    /// Sends a request and returns its head.
    ///
    /// # Errors
    /// If there is no response, or none in time.
    pub(crate) async fn begin(&mut self, call: Call) -> Result<Response<Incoming>, String> {
        let request = self.request(call);
        let response = async {
            match &mut self.sender {
                Sender::Http1(sender) => {
                    sender.ready().await?;
                    sender.send_request(request).await
                }
                Sender::Http2(sender) => {
                    sender.ready().await?;
                    sender.send_request(request).await
                }
            }
        };
        let response = timeout(PATIENCE, response).await.map_err(|_| format!("no response within {PATIENCE:?}"))?;
        response.map_err(no_response)
    }

    /// Sends a request and returns its complete response.
    pub(crate) async fn send(&mut self, call: Call) -> Result<Reply, String> {
        Reply::read(self.begin(call).await?).await
    }

    /// Returns a future that sends a request, for several requests at once on one h2 connection.
    pub(crate) fn send_in_parallel(&mut self, call: Call) -> impl Future<Output = Result<Reply, String>> + use<> {
        let request = self.request(call);
        let sender = match &self.sender {
            Sender::Http2(sender) => Some(sender.clone()),
            Sender::Http1(_) => None,
        };
        async move {
            let mut sender = sender.ok_or("only h2 has parallel requests")?;
            let response = timeout(PATIENCE, async {
                sender.ready().await?;
                sender.send_request(request).await
            });
            let response = response.await.map_err(|_| format!("no response within {PATIENCE:?}"))?;
            Reply::read(response.map_err(no_response)?).await
        }
    }

    fn request(&mut self, call: Call) -> Request<Body> {
        let is_tool = call.fields.iter().any(|(name, _)| *name == "exeat-tool");
        let is_free = std::mem::take(&mut self.has_prepaid) || matches!(self.way, Way::Opaque | Way::Direct);
        if is_tool {
            self.execution.tool_calls.fetch_add(1, Ordering::Relaxed);
        } else if !is_free {
            self.execution.calls.fetch_add(1, Ordering::Relaxed);
        }
        let Call { method, path, fields, body } = call;
        let mut request = Request::builder().method(method);
        request = match self.way {
            Way::Absolute | Way::Http2 => request.uri(format!("https://{}{path}", self.authority)),
            Way::Direct | Way::Http1 | Way::Opaque => request.uri(path),
        };
        if self.way != Way::Http2 && !fields.iter().any(|(name, _)| *name == "host") {
            request = request.header("host", &self.authority);
        }
        if self.way == Way::Absolute {
            request = request.header("proxy-authorization", &self.execution.authorization);
        }
        for (name, value) in fields {
            request = request.header(name, value);
        }
        request.body(body).unwrap()
    }
}

/// Describes why there is no response. A request that did not leave, because the connection had ended before, is told
/// apart.
fn no_response(error: hyper::Error) -> String {
    let what = if error.is_closed() || error.is_canceled() { "the connection had ended: " } else { NO_RESPONSE };
    format!("{what}{}", chain(&error))
}

impl Drop for Session {
    /// Closes the connection at once, so that it no longer counts as open.
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Call {
    pub(crate) fn get(path: String) -> Self {
        Self { method: "GET", path, fields: Vec::new(), body: full(Bytes::new()) }
    }

    pub(crate) fn post(path: String, body: Body) -> Self {
        Self { method: "POST", body, ..Self::get(path) }.field("content-type", "application/json")
    }

    pub(crate) fn field(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.fields.push((name, value.into()));
        self
    }
}

impl Reply {
    async fn read(response: Response<Incoming>) -> Result<Self, String> {
        let (parts, mut body) = response.into_parts();
        let mut bytes = Vec::new();
        let read = timeout(PATIENCE, async {
            while let Some(frame) = body.frame().await {
                if let Some(data) = frame.map_err(|error| chain(&error))?.data_ref() {
                    bytes.extend_from_slice(data);
                }
                if bytes.len() > 2 * MAX_BODY {
                    return Err("the body is too long".to_owned());
                }
            }
            Ok(())
        });
        let read = read.await.unwrap_or_else(|_| Err(format!("no end within {PATIENCE:?}")));
        read.map_err(|error| format!("status {}, {} bytes, then: {error}", parts.status, bytes.len()))?;
        Ok(Self { status: parts.status.as_u16(), headers: parts.headers, body: bytes.into() })
    }

    pub(crate) fn code(&self) -> Option<&str> {
        self.headers.get("exeat-refusal")?.to_str().ok()
    }

    /// Describes the response for a report.
    pub(crate) fn describe(&self) -> String {
        let body = String::from_utf8_lossy(&self.body[..self.body.len().min(300)]);
        format!("status {}, {:?}, {} bytes: {body:?}", self.status, self.headers, self.body.len())
    }

    /// Checks that the response is a 200 with exactly this body.
    pub(crate) fn expect_body(&self, expected: &[u8]) -> Result<Outcome, String> {
        if self.status != 200 || self.code().is_some() {
            return Err(self.describe());
        }
        if self.body == expected {
            return Ok(Outcome::Answered);
        }
        let common = self.body.iter().zip(expected).take_while(|(found, wanted)| found == wanted).count();
        Err(format!("another body: {} of {} bytes, different from {common} on", self.body.len(), expected.len()))
    }

    /// Checks that the response is a refusal with exactly this status and code.
    pub(crate) fn expect_refusal(&self, status: u16, code: &str) -> Result<(), String> {
        if (self.status, self.code()) == (status, Some(code)) {
            return Ok(());
        }
        Err(format!("{status} {code} was expected: {}", self.describe()))
    }
}

pub(crate) fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).boxed_unsync()
}

/// Returns the texts of an error and its sources.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    let sources = std::iter::successors(Some(error), |error| error.source());
    sources.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

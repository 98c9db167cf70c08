//! The sandbox's side of the lab: raw bytes, HTTP/1.1 and HTTP/2, inside and outside tunnels.

use std::net::SocketAddr;
use std::sync::Arc;

use base64::Engine;
use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use hyper::body::{Body, Incoming};
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ClientConfig;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use exeat::policy::settings::ListenerMode;

use super::{Lab, TIMEOUT, TOKEN};

/// A complete response.
#[derive(Debug)]
pub struct Reply {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: HeaderMap,
}

impl Reply {
    pub async fn read(response: Response<Incoming>) -> Self {
        let (parts, body) = response.into_parts();
        let collected = timeout(TIMEOUT, body.collect()).await.expect("the body ends").expect("the body is complete");
        let trailers = collected.trailers().cloned().unwrap_or_default();
        Self { status: parts.status, headers: parts.headers, body: collected.to_bytes(), trailers }
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }

    pub fn problem(&self) -> Value {
        serde_json::from_slice(&self.body).unwrap()
    }

    pub fn text(&self) -> &str {
        std::str::from_utf8(&self.body).unwrap()
    }

    /// Asserts that the proxy itself refused the request, and that every part of the refusal is present.
    pub fn assert_refused(&self, status: u16, code: &str) {
        assert_eq!((self.status.as_u16(), self.header("exeat-refusal")), (status, Some(code)), "{self:?}");
        assert_eq!(self.header("content-type"), Some("application/problem+json"));
        assert!(self.header("proxy-status").is_some_and(|s| s.starts_with("exeat; error=")), "{self:?}");
        let problem = self.problem();
        assert_eq!(problem["code"], code);
        assert_eq!(problem["type"], format!("urn:exeat:{code}"));
        assert_eq!(problem["status"], status);
        assert_eq!(problem["instance"].as_str(), self.header("exeat-request-id"));
        assert!(problem["hint"].as_str().is_some_and(|hint| hint.len() > 10));
    }
}

/// `Basic` credentials of the task `t`.
pub fn auth() -> String {
    basic(&format!("t:{TOKEN}"))
}

/// `Basic` with this user and password.
pub fn basic(text: &str) -> String {
    format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(text))
}

/// The way in which a request enters the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    Absolute,
    TunnelH1,
    TunnelH2,
    /// HTTP/1.1 in TLS in a SOCKS5 connection.
    Socks,
}

impl Way {
    pub const ALL: [Self; 4] = [Self::Absolute, Self::TunnelH1, Self::TunnelH2, Self::Socks];
}

impl Lab {
    /// Sends a request for an https URL by the given way.
    pub async fn by(&self, way: Way, method: &str, url: &str, fields: &[(&str, &str)], body: &str) -> Reply {
        let uri: http::Uri = url.parse().unwrap();
        let authority = uri.authority().unwrap().to_string();
        let to = if authority.contains(':') { authority.clone() } else { format!("{authority}:443") };
        let target = match way {
            Way::Absolute | Way::TunnelH2 => uri,
            Way::TunnelH1 | Way::Socks => uri.path_and_query().unwrap().as_str().parse().unwrap(),
        };
        let mut request = Request::builder().method(method).uri(target);
        if way != Way::TunnelH2 {
            request = request.header("host", authority);
        }
        if way == Way::Absolute {
            request = request.header("proxy-authorization", auth());
        }
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let request = request.body(Full::new(Bytes::copy_from_slice(body.as_bytes()))).unwrap();
        match way {
            Way::Absolute => self.send(request).await,
            Way::TunnelH1 => self.send_in_tunnel(&to, request).await,
            Way::Socks => {
                let stream = self.socks(&to).await.expect("the request is accepted");
                Reply::read(h1(self.tls_over(stream, &to, &["http/1.1"]).await, request).await).await
            }
            Way::TunnelH2 => {
                let mut h2 = self.h2(&to).await;
                Reply::read(timeout(TIMEOUT, h2.send_request(request)).await.unwrap().unwrap()).await
            }
        }
    }

    /// Sends a request to the admin listener with the operator's token. Returns the status and the JSON body.
    pub async fn admin_request(&self, method: &str, path: &str, body: &Value) -> (u16, Value) {
        let reply = self.admin_reply(method, path, body).await;
        (reply.status.as_u16(), serde_json::from_str(reply.text()).unwrap_or_default())
    }

    /// Sends a request to the admin listener with the operator's token.
    pub async fn admin_reply(&self, method: &str, path: &str, body: &Value) -> Reply {
        let address = self.daemon.admin_address().unwrap();
        let token = std::fs::read_to_string(self.dir.path().join("admin.token")).unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let stream = TcpStream::connect(address).await.unwrap();
        let request = Request::builder().method(method).uri(path).header("host", address.to_string());
        let request = request.header("authorization", format!("Bearer {token}"));
        let body = if body.is_null() { Bytes::new() } else { body.to_string().into() };
        let reply = Reply::read(h1(stream, request.body(Full::new(body)).unwrap()).await).await;
        reply.assert_described(method, path);
        reply
    }

    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox: it connects to the proxy")]
    pub async fn connect(&self) -> TcpStream {
        let stream = TcpStream::connect(self.proxy).await.unwrap();
        // The second of two writes must not wait for the acknowledgment of the first.
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Sends bytes and reads until the proxy closes the connection. `{auth}` expands to a valid `Proxy-Authorization`
    /// line.
    pub async fn raw(&self, text: &str) -> String {
        let mut stream = self.connect().await;
        stream
            .write_all(text.replace("{auth}", &format!("Proxy-Authorization: {}\r\n", auth())).as_bytes())
            .await
            .unwrap();
        read_to_end(&mut stream).await
    }

    /// Sends a request in absolute form on a new connection.
    pub async fn send<B>(&self, request: Request<B>) -> Reply
    where
        B: Body + Send + Unpin + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Reply::read(h1(self.connect().await, request).await).await
    }

    pub async fn get(&self, url: &str) -> Reply {
        self.send(self.absolute("GET", url).body(empty()).unwrap()).await
    }

    /// Returns a builder for a request in absolute form, with the token and a Host field.
    pub fn absolute(&self, method: &str, url: &str) -> http::request::Builder {
        let authority = url.parse::<http::Uri>().unwrap().authority().unwrap().to_string();
        Request::builder().method(method).uri(url).header("host", authority).header("proxy-authorization", auth())
    }

    /// Sends CONNECT. Returns the head of the answer and the connection.
    pub async fn try_connect(&self, to: &str) -> (String, TcpStream) {
        let mut stream = self.connect().await;
        let head = format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", auth());
        stream.write_all(head.as_bytes()).await.unwrap();
        (read_head(&mut stream).await, stream)
    }

    /// Returns the address of the SOCKS5 listener.
    pub fn socks_address(&self) -> SocketAddr {
        let mut listeners = self.daemon.proxy().iter();
        let listener = listeners.find(|one| one.mode == ListenerMode::Socks5).expect("a SOCKS5 listener");
        listener.at.tcp().unwrap()
    }

    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox: it connects to the proxy")]
    pub async fn connect_socks(&self) -> TcpStream {
        let stream = TcpStream::connect(self.socks_address()).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }

    /// Connects through SOCKS5, with the token. Returns the reply code of a refusal.
    pub async fn socks(&self, to: &str) -> Result<TcpStream, u8> {
        let mut stream = self.connect_socks().await;
        socks_connect(&mut stream, &format!("t:{TOKEN}"), to).await.map(|()| stream)
    }

    pub async fn tunnel(&self, to: &str) -> TcpStream {
        let (head, stream) = self.try_connect(to).await;
        assert!(head.starts_with("HTTP/1.1 200"), "{head}");
        stream
    }

    /// Returns the TLS configuration of a client inside the sandbox. It trusts the interception CA and nothing else.
    pub fn client_tls_config(&self, alpn: &[&str]) -> ClientConfig {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.daemon.ca_pem().as_bytes()).unwrap()).unwrap();
        client_config(roots, alpn)
    }

    /// Opens a tunnel and a TLS connection in it, which the proxy terminates.
    pub async fn tls(&self, to: &str, alpn: &[&str]) -> TlsStream<TcpStream> {
        self.tls_over(self.tunnel(to).await, to, alpn).await
    }

    /// Opens a TLS connection in a tunnel.
    pub async fn tls_over<S>(&self, stream: S, to: &str, alpn: &[&str]) -> TlsStream<S>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        let host = to.rsplit_once(':').unwrap().0.trim_matches(['[', ']']).to_owned();
        TlsConnector::from(Arc::new(self.client_tls_config(alpn)))
            .connect(host.try_into().unwrap(), stream)
            .await
            .unwrap()
    }

    /// Sends one HTTP/1.1 request in a new tunnel.
    pub async fn send_in_tunnel<B>(&self, to: &str, request: Request<B>) -> Reply
    where
        B: Body + Send + Unpin + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        Reply::read(h1(self.tls(to, &["http/1.1"]).await, request).await).await
    }

    /// Opens an h2 connection in a new tunnel.
    pub async fn h2<B>(&self, to: &str) -> hyper::client::conn::http2::SendRequest<B>
    where
        B: Body + Send + Unpin + 'static,
        B::Data: Send,
        B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
    {
        let tls = self.tls(to, &["h2"]).await;
        assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await.unwrap();
        tokio::spawn(connection);
        sender
    }
}

/// The result of a negotiation through SOCKS5 whose user name and password are rejected. It is no reply code.
pub const SOCKS_PASSWORD_WRONG: u8 = 255;

/// Negotiates a connection to `host:port` through SOCKS5. The host is sent as a name, whatever it is. Returns the reply code of a
/// refusal.
pub async fn socks_connect(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), user: &str, to: &str) -> Result<(), u8> {
    let (name, password) = user.split_once(':').unwrap();
    let (host, port) = to.rsplit_once(':').unwrap();
    let host = host.trim_matches(['[', ']']);
    let text = |text: &str| [&[u8::try_from(text.len()).unwrap()], text.as_bytes()].concat();
    stream.write_all(&[5, 2, 0, 2]).await.unwrap();
    assert_eq!(read_exactly::<2>(stream).await, [5, 2]);
    stream.write_all(&[&[1][..], &text(name), &text(password)].concat()).await.unwrap();
    match read_exactly::<2>(stream).await {
        [1, 0] => {}
        [1, 1] => return Err(SOCKS_PASSWORD_WRONG),
        other => panic!("{other:?}"),
    }
    let port = port.parse::<u16>().unwrap().to_be_bytes();
    stream.write_all(&[&[5, 1, 0, 3][..], &text(host), &port].concat()).await.unwrap();
    match read_exactly::<10>(stream).await {
        [5, 0, 0, 1, 0, 0, 0, 0, 0, 0] => Ok(()),
        [5, code, 0, 1, 0, 0, 0, 0, 0, 0] => Err(code),
        other => panic!("{other:?}"),
    }
}

async fn read_exactly<const N: usize>(stream: &mut (impl AsyncRead + Unpin)) -> [u8; N] {
    let mut bytes = [0; N];
    timeout(TIMEOUT, stream.read_exact(&mut bytes)).await.expect("an answer arrives").expect("a whole answer");
    bytes
}

pub fn client_config(roots: rustls::RootCertStore, alpn: &[&str]) -> ClientConfig {
    let builder =
        ClientConfig::builder_with_provider(exeat::tls::provider()).with_safe_default_protocol_versions().unwrap();
    let mut config = builder.with_root_certificates(roots).with_no_client_auth();
    config.alpn_protocols = alpn.iter().map(|p| p.as_bytes().to_vec()).collect();
    config
}

/// Sends one request over HTTP/1.1. A background task drives the connection until the answer has been read.
pub async fn h1<B>(io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, request: Request<B>) -> Response<Incoming>
where
    B: Body + Send + Unpin + 'static,
    B::Data: Send,
    B::Error: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    let (mut sender, connection) = hyper::client::conn::http1::handshake(TokioIo::new(io)).await.unwrap();
    tokio::spawn(connection);
    timeout(TIMEOUT, sender.send_request(request)).await.expect("an answer arrives").expect("the answer is valid HTTP")
}

pub fn empty() -> Full<Bytes> {
    Full::default()
}

pub async fn read_to_end(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut bytes = Vec::new();
    // A reset after the answer counts as the end of the connection.
    let _ = timeout(TIMEOUT, stream.read_to_end(&mut bytes)).await.expect("the connection closes");
    String::from_utf8_lossy(&bytes).into_owned()
}

pub async fn read_head(stream: &mut (impl AsyncRead + Unpin)) -> String {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        match timeout(TIMEOUT, stream.read_u8()).await.expect("an answer arrives") {
            Ok(byte) => head.push(byte),
            Err(_) => break,
        }
    }
    String::from_utf8_lossy(&head).into_owned()
}

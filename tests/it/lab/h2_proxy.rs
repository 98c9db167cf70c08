//! Clients that speak HTTP/2 to the proxy itself, over TLS.

use std::sync::Arc;

use bytes::Bytes;
use http::Request;
use http_body_util::Full;
use hyper::client::conn::http2::SendRequest;
use hyper::upgrade::Upgraded;
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio::task::JoinHandle;
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use super::client::{Reply, auth};
use super::{Lab, TIMEOUT};
use crate::callers::listeners::Certificates;

/// The part of a configuration with which the proxy's listeners take TLS. Its files are those of [`Certificates`].
pub const TLS: &str = "[proxy]\ntls = { cert = \"proxy.pem\", key = \"proxy-key.pem\" }\n";

/// The bytes of a tunnel on a stream.
pub type TunnelIo = TokioIo<Upgraded>;

/// An HTTP/2 connection to the proxy.
pub struct H2Proxy {
    pub sender: SendRequest<Full<Bytes>>,
    pub connection: JoinHandle<hyper::Result<()>>,
}

impl Lab {
    /// Opens a TLS connection to the proxy itself.
    pub async fn proxy_tls(&self, alpn: &[&str]) -> TlsStream<TcpStream> {
        let mut config = Certificates::client_config(self.dir.path());
        config.alpn_protocols = alpn.iter().map(|name| name.as_bytes().to_vec()).collect();
        let stream = self.connect().await;
        TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), stream).await.unwrap()
    }

    /// Opens an HTTP/2 connection to the proxy itself.
    pub async fn proxy_h2(&self) -> H2Proxy {
        let tls = self.proxy_tls(&["h2", "http/1.1"]).await;
        assert_eq!(tls.get_ref().1.alpn_protocol(), Some(&b"h2"[..]));
        H2Proxy::over(tls).await
    }
}

impl H2Proxy {
    pub async fn over(tls: TlsStream<TcpStream>) -> Self {
        let (sender, connection) =
            hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await.unwrap();
        Self { sender, connection: tokio::spawn(connection) }
    }

    pub async fn send(&mut self, request: Request<Full<Bytes>>) -> Reply {
        let response = timeout(TIMEOUT, self.sender.send_request(request)).await.expect("an answer arrives");
        Reply::read(response.expect("the answer is valid HTTP")).await
    }

    /// Sends CONNECT with these fields. Returns the tunnel, or the refusal.
    pub async fn connect_with(&mut self, to: &str, fields: &[(&str, &str)]) -> Result<TunnelIo, Reply> {
        let mut request = Request::connect(to);
        for (name, value) in fields {
            request = request.header(*name, *value);
        }
        let sent = self.sender.send_request(request.body(Full::default()).unwrap());
        let response = timeout(TIMEOUT, sent).await.expect("an answer arrives").expect("the answer is valid HTTP");
        if !response.status().is_success() {
            return Err(Reply::read(response).await);
        }
        assert!(response.headers().contains_key("exeat-request-id"), "{response:?}");
        Ok(TokioIo::new(timeout(TIMEOUT, hyper::upgrade::on(response)).await.unwrap().unwrap()))
    }

    /// Sends CONNECT with the token.
    pub async fn connect(&mut self, to: &str) -> Result<TunnelIo, Reply> {
        self.connect_with(to, &[("proxy-authorization", &auth())]).await
    }
}

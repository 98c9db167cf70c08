//! The demo's origin: TLS with a private CA, and behaviour chosen by path.

use std::convert::Infallible;
use std::io;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

/// Serves TLS, with h2 or HTTP/1.1.
pub(super) async fn https(config: Arc<ServerConfig>) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = TlsAcceptor::from(config.clone());
            tokio::spawn(async move {
                if let Ok(tls) = acceptor.accept(stream).await {
                    let h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
                    let (io, service) = (TokioIo::new(tls), service_fn(answer));
                    // A disconnected client is not an error of the origin.
                    let _ = if h2 {
                        hyper::server::conn::http2::Builder::new(TokioExecutor::new())
                            .serve_connection(io, service)
                            .await
                    } else {
                        hyper::server::conn::http1::Builder::new().serve_connection(io, service).await
                    };
                }
            });
        }
    });
    Ok(address)
}

/// Serves plain HTTP with a greeting.
pub(super) async fn plain() -> io::Result<SocketAddr> {
    raw(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nhello\n").await
}

/// Sends the same bytes to every client, after the client's first bytes.
pub(super) async fn raw(words: &'static [u8]) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(say(stream, words));
        }
    });
    Ok(address)
}

async fn say(mut stream: TcpStream, words: &'static [u8]) -> io::Result<()> {
    let mut buffer = [0; 4096];
    let _ = stream.read(&mut buffer).await?;
    stream.write_all(words).await?;
    stream.shutdown().await
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.uri().path() == "/slow" {
        std::future::pending::<()>().await;
    }
    // Some debugging endpoints return what they receive.
    let key = request.headers().get("authorization").map(|key| key.as_bytes()).unwrap_or_default();
    Ok(Response::new(Full::new([b"hello ", key, b"\n"].concat().into())))
}

//! The demo's origin servers.

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

/// Starts an HTTPS origin that supports HTTP/2 and HTTP/1.1. Returns its address.
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
                    // Connection errors are ignored: the client may close at any time.
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

/// Starts a plain HTTP origin. Returns its address.
pub(super) async fn plain() -> io::Result<SocketAddr> {
    fixed_reply(b"HTTP/1.1 200 OK\r\ncontent-length: 6\r\nconnection: close\r\n\r\nhello\n").await
}

/// Starts a TCP server that sends the same bytes to every client after its first data. Returns its address.
pub(super) async fn fixed_reply(bytes: &'static [u8]) -> io::Result<SocketAddr> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
    let address = listener.local_addr()?;
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            tokio::spawn(reply(stream, bytes));
        }
    });
    Ok(address)
}

async fn reply(mut stream: TcpStream, bytes: &'static [u8]) -> io::Result<()> {
    let mut buffer = [0; 4096];
    let _ = stream.read(&mut buffer).await?;
    stream.write_all(bytes).await?;
    stream.shutdown().await
}

async fn answer(request: Request<Incoming>) -> Result<Response<Full<Bytes>>, Infallible> {
    if request.uri().path() == "/slow" {
        std::future::pending::<()>().await;
    }
    // The key is echoed, as by a debugging endpoint.
    let key = request.headers().get("authorization").map(|key| key.as_bytes()).unwrap_or_default();
    Ok(Response::new(Full::new([b"hello ", key, b"\n"].concat().into())))
}

//! The floor: relays without any policy. One process serves both kinds of traffic on one port.
//!
//! A CONNECT to a host under `opaque.test` is copied byte by byte. All others are intercepted with hyper and rustls, on
//! pooled connections to the origin. Nothing is checked, limited, logged or scanned.

use std::cell::RefCell;
use std::collections::HashMap;
use std::convert::Infallible;
use std::path::Path;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode, Uri, Version};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Empty};
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::client::conn::{http1, http2};
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, ServerConfig};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::{TlsAcceptor, TlsConnector};

use crate::pki::{self, Ca};

type Answer = Response<UnsyncBoxBody<Bytes, hyper::Error>>;
type IdleConnections = Arc<Mutex<Vec<http1::SendRequest<Incoming>>>>;

/// All state of the relay. It has a single thread.
struct Relay {
    ca: Ca,
    leaves: RefCell<HashMap<String, Arc<ServerConfig>>>,
    client: Arc<ClientConfig>,
    client_h1: Arc<ClientConfig>,
    idle: RefCell<HashMap<String, IdleConnections>>,
    shared: RefCell<HashMap<String, http2::SendRequest<Incoming>>>,
}

/// Serves until the process is killed. Prints its port.
pub(crate) async fn serve(dir: &Path) {
    let relay = Rc::new(Relay {
        ca: Ca::load(dir, "ca"),
        leaves: RefCell::default(),
        client: pki::client_config(dir, "origin-ca", &["h2", "http/1.1"], true),
        client_h1: pki::client_config(dir, "origin-ca", &["http/1.1"], true),
        idle: RefCell::default(),
        shared: RefCell::default(),
    });
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    let local = tokio::task::LocalSet::new();
    local
        .run_until(async {
            loop {
                let (tcp, _) = listener.accept().await.unwrap();
                let _ = tcp.set_nodelay(true);
                let relay = relay.clone();
                tokio::task::spawn_local(async move {
                    let service = service_fn(|request| relay.clone().outer(request));
                    let server = hyper::server::conn::http1::Builder::new();
                    let _ = server.serve_connection(TokioIo::new(tcp), service).with_upgrades().await;
                });
            }
        })
        .await;
}

impl Relay {
    /// Answers a CONNECT, or forwards an absolute-form request.
    async fn outer(self: Rc<Self>, mut request: Request<Incoming>) -> Result<Answer, Infallible> {
        let Some(authority) = request.uri().authority().cloned() else { return Ok(status(StatusCode::BAD_REQUEST)) };
        let (host, port) = (authority.host().to_owned(), authority.port_u16().unwrap_or(443));
        if request.method() != Method::CONNECT {
            return Ok(self.forward(&host, port, request, false).await);
        }
        tokio::task::spawn_local(async move {
            let Ok(upgraded) = hyper::upgrade::on(&mut request).await else { return };
            let mut io = TokioIo::new(upgraded);
            if host.ends_with("opaque.test") {
                let Ok(mut origin) = TcpStream::connect(("127.0.0.1", port)).await else { return };
                let _ = origin.set_nodelay(true);
                let _ = tokio::io::copy_bidirectional(&mut io, &mut origin).await;
            } else {
                self.intercept(io, host, port).await;
            }
        });
        Ok(status(StatusCode::OK))
    }

    async fn intercept(
        self: Rc<Self>,
        io: impl AsyncRead + AsyncWrite + Send + Unpin + 'static,
        host: String,
        port: u16,
    ) {
        let leaf = self.leaves.borrow().get(&host).cloned();
        let leaf = leaf.unwrap_or_else(|| {
            let config = self.ca.server_config(&[&host], &["h2", "http/1.1"]);
            self.leaves.borrow_mut().insert(host.clone(), config.clone());
            config
        });
        let Ok(tls) = TlsAcceptor::from(leaf).accept(io).await else { return };
        let is_h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
        let service = service_fn(|request| {
            let (relay, host) = (self.clone(), host.clone());
            async move { Ok::<_, Infallible>(relay.forward(&host, port, request, is_h2).await) }
        });
        if is_h2 {
            let mut server = hyper::server::conn::http2::Builder::new(LocalExecutor);
            let _ = server.max_concurrent_streams(1_000).serve_connection(TokioIo::new(tls), service).await;
        } else {
            let _ = hyper::server::conn::http1::Builder::new()
                .serve_connection(TokioIo::new(tls), service)
                .with_upgrades()
                .await;
        }
    }

    async fn forward(&self, host: &str, port: u16, mut request: Request<Incoming>, is_h2: bool) -> Answer {
        request.headers_mut().remove("proxy-authorization");
        let path = request.uri().path_and_query().cloned().unwrap_or_else(|| "/".parse().unwrap());
        let key = format!("{host}:{port}");
        if is_h2 {
            *request.uri_mut() = Uri::builder().scheme("https").authority(&*key).path_and_query(path).build().unwrap();
            *request.version_mut() = Version::HTTP_2;
            return match self.send_h2(host, port, key, request).await {
                Some(response) => response.map(BodyExt::boxed_unsync),
                None => status(StatusCode::BAD_GATEWAY),
            };
        }
        *request.uri_mut() = path.into();
        if request.headers().contains_key("upgrade") {
            return self.upgrade(host, port, request).await.unwrap_or_else(|| status(StatusCode::BAD_GATEWAY));
        }
        let idle = self.idle.borrow_mut().entry(key).or_default().clone();
        let mut sender = None;
        loop {
            let Some(mut known) = idle.lock().pop() else { break };
            if known.ready().await.is_ok() {
                sender = Some(known);
                break;
            }
        }
        let sender = match sender {
            Some(known) => Some(known),
            None => self.open(host, port).await,
        };
        let Some(mut sender) = sender else { return status(StatusCode::BAD_GATEWAY) };
        match sender.send_request(request).await {
            Ok(response) => response.map(|body| ReturningBody { body, sender: Some(sender), idle }.boxed_unsync()),
            Err(_) => status(StatusCode::BAD_GATEWAY),
        }
    }

    async fn open(&self, host: &str, port: u16) -> Option<http1::SendRequest<Incoming>> {
        let tls = self.connect(host, port, &self.client_h1).await?;
        let (sender, connection) = http1::handshake(TokioIo::new(tls)).await.ok()?;
        tokio::task::spawn_local(connection.with_upgrades());
        Some(sender)
    }

    async fn connect(
        &self,
        host: &str,
        port: u16,
        config: &Arc<ClientConfig>,
    ) -> Option<tokio_rustls::client::TlsStream<TcpStream>> {
        let tcp = TcpStream::connect(("127.0.0.1", port)).await.ok()?;
        let _ = tcp.set_nodelay(true);
        let name = ServerName::try_from(host.to_owned()).ok()?;
        TlsConnector::from(config.clone()).connect(name, tcp).await.ok()
    }

    async fn send_h2(
        &self,
        host: &str,
        port: u16,
        key: String,
        request: Request<Incoming>,
    ) -> Option<Response<Incoming>> {
        let known = self.shared.borrow().get(&key).filter(|sender| !sender.is_closed()).cloned();
        let mut sender = match known {
            Some(known) => known,
            None => {
                let tls = self.connect(host, port, &self.client).await?;
                let (sender, connection) = http2::handshake(LocalExecutor, TokioIo::new(tls)).await.ok()?;
                tokio::task::spawn_local(connection);
                self.shared.borrow_mut().insert(key, sender.clone());
                sender
            }
        };
        sender.send_request(request).await.ok()
    }

    async fn upgrade(&self, host: &str, port: u16, mut request: Request<Incoming>) -> Option<Answer> {
        let client = hyper::upgrade::on(&mut request);
        let mut response = self.open(host, port).await?.send_request(request).await.ok()?;
        let origin = hyper::upgrade::on(&mut response);
        tokio::task::spawn_local(async move {
            let (Ok(client), Ok(origin)) = (client.await, origin.await) else { return };
            let _ = tokio::io::copy_bidirectional(&mut TokioIo::new(client), &mut TokioIo::new(origin)).await;
        });
        Some(response.map(BodyExt::boxed_unsync))
    }
}

fn status(status: StatusCode) -> Answer {
    let mut response = Response::new(Empty::new().map_err(|never| match never {}).boxed_unsync());
    *response.status_mut() = status;
    response
}

/// A body that puts its connection back into the pool at its end.
struct ReturningBody {
    body: Incoming,
    sender: Option<http1::SendRequest<Incoming>>,
    idle: IdleConnections,
}

impl Body for ReturningBody {
    type Data = Bytes;
    type Error = hyper::Error;

    fn poll_frame(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, hyper::Error>>> {
        let frame = ready!(Pin::new(&mut self.body).poll_frame(cx));
        if (frame.is_none() || self.body.is_end_stream())
            && let Some(sender) = self.sender.take()
        {
            self.idle.lock().push(sender);
        }
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

impl Drop for ReturningBody {
    fn drop(&mut self) {
        if let Some(sender) = self.sender.take().filter(|_| self.body.is_end_stream()) {
            self.idle.lock().push(sender);
        }
    }
}

/// Runs the tasks of HTTP/2 connections on the only thread.
#[derive(Clone, Copy)]
struct LocalExecutor;

impl<F: Future<Output = ()> + 'static> hyper::rt::Executor<F> for LocalExecutor {
    fn execute(&self, task: F) {
        tokio::task::spawn_local(task);
    }
}

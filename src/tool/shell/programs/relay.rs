//! The network of a program: a listener on its own loopback interface, whose connections lead to the proxy as this task. The program
//! has no other network, and not the token.

use std::convert::Infallible;
use std::time::Duration;

use bytes::Bytes;
use futures_util::StreamExt;
use futures_util::stream::FuturesUnordered;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::{TokioIo, TokioTimer};
use parking_lot::Mutex;
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream};

use crate::tool::messages;
use crate::tool::proxy::Proxy;

/// Maximum number of connections of a program at a time. More wait.
const MAX_CONNECTIONS: usize = 32;
/// Maximum number of refusals that are kept for the result.
const MAX_REFUSALS: usize = 8;
/// The time for the head of a request.
const HEAD: Duration = Duration::from_secs(30);

/// The connections of a program.
pub(super) struct Relay<'a> {
    proxy: &'a Proxy,
    /// The reasons why the proxy refused connections, for the result.
    refusals: Mutex<Vec<String>>,
}

impl<'a> Relay<'a> {
    pub(super) fn new(proxy: &'a Proxy) -> Self {
        Self { proxy, refusals: Mutex::default() }
    }

    /// Returns why the proxy refused connections.
    pub(super) fn refusals(&self) -> Vec<String> {
        self.refusals.lock().clone()
    }

    /// Serves connections until it is dropped.
    pub(super) async fn serve(&self, listener: &TcpListener) -> Infallible {
        let mut open = FuturesUnordered::new();
        loop {
            tokio::select! {
                accepted = listener.accept(), if open.len() < MAX_CONNECTIONS => match accepted {
                    Ok((stream, _)) => open.push(self.connection(stream)),
                    // Descriptors may be used up, until a connection ends.
                    Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
                },
                Some(()) = open.next() => {}
            }
        }
    }

    /// Serves one connection, which becomes a tunnel.
    async fn connection(&self, stream: TcpStream) {
        let tunnel: Mutex<Option<(OnUpgrade, Upgraded)>> = Mutex::default();
        let service = service_fn(|mut request: Request<Incoming>| {
            let (upgrade, tunnel) = (hyper::upgrade::on(&mut request), &tunnel);
            async move {
                let answer = match self.open(&request).await {
                    Ok(upgraded) => {
                        *tunnel.lock() = Some((upgrade, upgraded));
                        Response::new(Full::default())
                    }
                    Err((status, text)) => {
                        let mut response = Response::new(Full::new(Bytes::from(text)));
                        *response.status_mut() = status;
                        response
                    }
                };
                Ok::<_, Infallible>(answer)
            }
        });
        let mut builder = http1::Builder::new();
        builder.timer(TokioTimer::new()).header_read_timeout(HEAD);
        // An error ends the connection, and the program sees that.
        let _ = builder.serve_connection(TokioIo::new(stream), service).with_upgrades().await;
        let Some((upgrade, upgraded)) = tunnel.into_inner() else { return };
        if let Ok(inside) = upgrade.await {
            let _ = copy_bidirectional(&mut TokioIo::new(inside), &mut TokioIo::new(upgraded)).await;
        }
    }

    /// Opens the tunnel that a request asks for.
    async fn open(&self, request: &Request<Incoming>) -> Result<Upgraded, (StatusCode, String)> {
        let authority = request.uri().authority().filter(|_| request.method() == Method::CONNECT);
        let Some(authority) = authority else {
            let text = "programs reach the network by https alone, through CONNECT";
            return Err((StatusCode::METHOD_NOT_ALLOWED, self.kept(text.to_owned())));
        };
        match self.proxy.tunnel(authority.as_str()).await {
            Ok(Ok(upgraded)) => Ok(upgraded),
            Ok(Err(refused)) => {
                let text = messages::refused(&refused, "");
                Err((StatusCode::FORBIDDEN, self.kept(text.strip_prefix("Error: ").unwrap_or(&text).to_owned())))
            }
            Err(why) => Err((StatusCode::BAD_GATEWAY, self.kept(why.to_string()))),
        }
    }

    fn kept(&self, text: String) -> String {
        let mut refusals = self.refusals.lock();
        if refusals.len() < MAX_REFUSALS && !refusals.contains(&text) {
            refusals.push(text.clone());
        }
        text
    }
}

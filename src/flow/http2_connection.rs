//! Serves HTTP/2 on one client connection (RFC 9113): each stream is a request, or the tunnel of a CONNECT (§8.5).

use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::header::HOST;
use http::uri::Scheme;
use http::{HeaderValue, Request, Response, Uri};
use hyper::body::Incoming;

use super::carrier::Carrier;
use super::client::{Client, ClientStream};
use super::connection;
use super::http2_server::{self, ENDED_GRACE, Http2Service, NotProcessed, Windows};
use super::http2_streams::{Event, StreamState, TunnelStream};
use super::open_answers::OpenAnswers;
use super::respond::AnswerBody;
use super::self_api;
use crate::model::host::Host;
use crate::model::refusal::Deny;
use crate::policy::plan::Timeouts;
use crate::stages::message::h2_trailers::is_over_budget;

/// A connection, as its requests share it.
pub(super) struct Http2Connection {
    client: Arc<Client>,
    /// The name of the proxy in the client's TLS handshake (SNI).
    proxy_name: Option<Host>,
    /// Set by the first request. A later error of the protocol is not logged: the requests have lines of their own.
    is_used: AtomicBool,
    /// There were too many requests of unknown callers.
    ending: Arc<Event>,
}

/// A request, with the connection that it has arrived on.
pub(super) struct Http2Request {
    stream: Arc<StreamState>,
    answers: Arc<OpenAnswers>,
    ending: Arc<Event>,
}

/// Serves a connection until it ends or fails, or the daemon drains.
pub(super) async fn serve(client: Arc<Client>, stream: ClientStream, proxy_name: Option<Host>) {
    let (is_used, ending) = (AtomicBool::new(false), Arc::default());
    let connection = Arc::new(Http2Connection { client, proxy_name, is_used, ending });
    let client = &connection.client;
    let served = async {
        if let Err(error) = http2_server::serve(&connection, Windows::CLIENT, stream).await {
            connection.note_broken(&error);
        }
    };
    tokio::select! {
        biased;
        () = client.gone() => {}
        () = served => {}
    }
}

impl Http2Service for Http2Connection {
    // A client opens a tunnel for a WebSocket.
    const HAS_WEBSOCKETS: bool = false;
    const IS_SHARED: bool = true;

    fn client(&self) -> &Client {
        &self.client
    }

    fn idle(&self) -> Duration {
        Timeouts::default().idle
    }

    fn ending(&self) -> &Event {
        &self.ending
    }

    fn grace(&self) -> Duration {
        // Nothing new is served on a connection that ends, and identified callers may have tunnels on it.
        if self.client.slot.deadline().is_some() { ENDED_GRACE } else { Duration::MAX }
    }

    async fn answer(
        &self,
        mut request: Request<Incoming>,
        answers: &Arc<OpenAnswers>,
    ) -> Result<Response<AnswerBody>, NotProcessed> {
        self.is_used.store(true, Ordering::Relaxed);
        let stream = StreamState::current().ok_or(NotProcessed)?;
        if self.ending.is_set() {
            return Err(NotProcessed);
        }
        self.address_own_path(&mut request);
        let carrier = Http2Request { stream, answers: answers.clone(), ending: self.ending.clone() };
        Ok(connection::answer(&self.client, &Carrier::Http2(carrier), request).await)
    }
}

impl Http2Connection {
    /// Writes to the audit log that the client has broken the protocol before its first request, or has exceeded its budget of
    /// frames. One that has disconnected has not.
    fn note_broken(&self, error: &hyper::Error) {
        tracing::debug!(%error, peer = %self.client.peer, "a client connection broke");
        let is_io = error.source().is_some_and(|source| source.is::<io::Error>());
        if is_over_budget(error) || !is_io && !self.is_used.load(Ordering::Relaxed) {
            self.client.services.record(&self.client.peer).failed(Deny::RequestMalformed.into());
        }
    }

    /// Gives a request for one of the proxy's own paths its form in HTTP/1.1, with the path alone as the target. In HTTP/2, every
    /// request names a host: here it is that of the proxy, over TLS.
    fn address_own_path(&self, request: &mut Request<Incoming>) {
        let uri = request.uri();
        let is_own = uri.scheme() == Some(&Scheme::HTTPS)
            && uri.host().and_then(|host| Host::parse(host).ok()).is_some_and(|host| self.is_proxy(&host));
        let path = uri.path_and_query().filter(|path| is_own && self_api::has_path(path.path())).cloned();
        let (Some(path), Some(authority)) = (path, uri.authority().cloned()) else { return };
        *request.uri_mut() = Uri::from(path);
        if let Ok(host) = HeaderValue::from_str(authority.as_str()) {
            request.headers_mut().insert(HOST, host);
        }
    }

    /// Returns whether the client knows the proxy by this host. One that connects to an address sends no name in its handshake
    /// (RFC 6066 §3), and the address may be another one here, because of port mapping or NAT.
    fn is_proxy(&self, host: &Host) -> bool {
        match &self.proxy_name {
            Some(name) => host == name,
            None => matches!(host, Host::Ip(_)),
        }
    }
}

impl Http2Request {
    pub(super) fn stream(&self) -> &Arc<StreamState> {
        &self.stream
    }

    /// Returns the client of a tunnel on this stream.
    pub(super) fn tunnel_client(&self, client: &Client) -> Arc<Client> {
        client.of_stream(TunnelStream::new(self.stream.clone(), self.answers.begin()))
    }

    /// Ends the connection once the open responses have been sent, or after [`ENDED_GRACE`]. Open tunnels may finish.
    pub(super) fn end(&self) {
        self.ending.set();
    }
}

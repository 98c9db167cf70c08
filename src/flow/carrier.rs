//! The connection that a request to the proxy has arrived on: one of HTTP/1.1, or a stream of HTTP/2.

use std::sync::Arc;

use http::Request;
use hyper::body::Incoming;

use super::client::Client;
use super::http1_gate::GateHandle;
use super::http2_connection::Http2Request;
use super::tunnel::ClientSide;
use super::websocket::PendingUpgrade;
use crate::model::refusal::Verdict;
use crate::stages::identify::Caller;

/// The connection of a request.
pub(super) enum Carrier {
    /// A connection that the request has for itself until it is answered.
    Http1(GateHandle),
    /// A stream of a connection.
    Http2(Http2Request),
}

impl Carrier {
    /// Registers the upgrade to another protocol that a request asks for. HTTP/2 has none (RFC 9113 §8.6).
    pub(super) fn upgrade(&self, request: &mut Request<Incoming>) -> Option<PendingUpgrade> {
        match self {
            Self::Http1(gate) => PendingUpgrade::of(request, gate),
            Self::Http2(_) => None,
        }
    }

    /// Returns the client's side of the tunnel that a CONNECT requests.
    pub(super) fn client_side(&self, request: &mut Request<Incoming>) -> ClientSide {
        let upgrade = hyper::upgrade::on(request);
        match self {
            Self::Http1(_) => ClientSide::Upgrade(upgrade),
            Self::Http2(request) => ClientSide::Http2(upgrade, request.stream().clone()),
        }
    }

    /// Counts a stream as a connection of its caller.
    ///
    /// # Errors
    /// [`Fail::Overloaded`](crate::model::refusal::Fail::Overloaded) if the caller has too many, or the proxy has no free slot.
    pub(super) async fn count(&self, client: &Client, caller: &Caller) -> Verdict<()> {
        match self {
            Self::Http1(_) => Ok(()),
            Self::Http2(request) => request.stream().identify(client, caller).await,
        }
    }

    /// Returns the client of a tunnel that is opened: that of the connection, which carries nothing else from now on, or a new one for
    /// the stream.
    pub(super) fn tunnel_client(&self, client: &Arc<Client>) -> Arc<Client> {
        match self {
            Self::Http1(gate) => {
                gate.accept_upgrade();
                client.clone()
            }
            Self::Http2(request) => request.tunnel_client(client),
        }
    }

    /// Ends the connection with this request.
    pub(super) fn end(&self) {
        match self {
            Self::Http1(gate) => gate.end_after_request(),
            Self::Http2(request) => request.end(),
        }
    }

    /// Ends an HTTP/1.1 connection with a CONNECT that opens no tunnel: the bytes that follow it may be meant for the tunnel, and must
    /// not be read as requests (RFC 9112 §11.2). Over HTTP/2 they stay on their stream.
    pub(super) fn end_after_connect(&self) {
        if let Self::Http1(gate) = self {
            gate.end_after_request();
        }
    }
}

//! The connection that a request to the proxy has arrived on, as far as the version of HTTP matters.

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
    pub(super) fn side(&self, request: &mut Request<Incoming>) -> ClientSide {
        let upgrade = hyper::upgrade::on(request);
        match self {
            Self::Http1(_) => ClientSide::Upgrade(upgrade),
            Self::Http2(of) => ClientSide::Http2(upgrade, of.stream().clone()),
        }
    }

    /// Notes that the caller is known. A stream counts as a connection of its caller.
    ///
    /// # Errors
    /// [`Fail::Overloaded`](crate::model::refusal::Fail::Overloaded) if the caller has too many.
    pub(super) fn identified(&self, client: &Client, caller: &Caller) -> Verdict<()> {
        match self {
            Self::Http1(_) => Ok(()),
            Self::Http2(of) => of.stream().identify(client, caller),
        }
    }

    /// Returns the client of a tunnel that is opened. A connection is the tunnel's own from now on.
    pub(super) fn tunnel_client(&self, client: &Arc<Client>) -> Arc<Client> {
        match self {
            Self::Http1(gate) => {
                gate.accept_upgrade();
                client.clone()
            }
            Self::Http2(of) => of.tunnel_client(client),
        }
    }

    /// Ends the connection with this request.
    pub(super) fn end(&self) {
        match self {
            Self::Http1(gate) => gate.end_after_request(),
            Self::Http2(of) => of.end(),
        }
    }

    /// Ends the connection with a CONNECT that opens no tunnel, if the bytes that follow it there may not be HTTP
    /// (RFC 9112 §11.2).
    pub(super) fn end_after_connect(&self) {
        if let Self::Http1(gate) = self {
            gate.end_after_request();
        }
    }
}

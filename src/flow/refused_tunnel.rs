//! Refused CONNECTs whose tunnels are opened, so that the requests inside are answered with the refusal.
//!
//! Most clients show neither the status nor the body of a refused CONNECT, and many of them try again. They show the
//! response to a request. So the proxy takes TLS for the refused name itself: no name is looked up, and nothing is sent
//! anywhere.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::request::Parts;
use moka::sync::Cache;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use super::Services;
use super::accept::write_and_linger;
use super::client::Client;
use super::inner_server::{InnerServer, TunnelTarget};
use super::tunnel::{ALERT_TIMEOUT, ClientSide, ClientStream, FirstProtocol, first_protocol};
use crate::audit::record::Record;
use crate::model::host::Host;
use crate::model::limited::ReachedLimit;
use crate::model::name::ExecutionId;
use crate::model::refusal::{Deny, Refusal};
use crate::model::target::Target;
use crate::policy::rule::Policy;
use crate::stages::identify::Caller;
use crate::stages::parse;
use crate::stages::throttle::ConcurrencyPermit;

/// The time for which a host is remembered whose refusal was not fetched.
const MEMORY: Duration = Duration::from_secs(3600);
/// The number of such hosts of all executions that are remembered.
const MAX_REMEMBERED: u64 = 10_000;
/// The ports below 1024 on which clients speak TLS or HTTP. On others, such as 22, a client may wait for the server.
const WEB_PORTS: [u16; 2] = [80, 443];
const FIRST_FREE_PORT: u16 = 1024;

/// Whether the refusal for a host was fetched from its tunnel. If an execution did not fetch it, usually because its client does
/// not trust the interception CA, its CONNECTs to this host are refused as such.
pub(crate) struct UnreadRefusals(Cache<(ExecutionId, Host), bool>);

impl Default for UnreadRefusals {
    fn default() -> Self {
        Self(Cache::builder().max_capacity(MAX_REMEMBERED).time_to_live(MEMORY).build())
    }
}

/// A refused CONNECT whose tunnel is opened.
pub(super) struct RefusedTunnel {
    caller: Caller,
    target: Target,
    refusal: Refusal,
    limited: Option<ReachedLimit>,
    /// The number of such tunnels of an execution is limited.
    _permit: ConcurrencyPermit,
}

/// Returns the tunnel for a refused CONNECT, or `None` if the CONNECT itself is answered with the refusal: because the
/// refusal is none of the policy, the port is that of another protocol, the task does not use interception or not for this
/// host, the client did not fetch the last refusal for this host from its tunnel, or the execution has too many such tunnels.
pub(super) fn offer(
    services: &Services,
    policy: &Policy,
    caller: &Caller,
    head: &mut Parts,
    (refusal, record): (Refusal, &Record),
) -> Option<RefusedTunnel> {
    let is_by_policy = matches!(
        refusal,
        Refusal::Deny(
            Deny::HostNotAllowed
                | Deny::SchemeNotAllowed
                | Deny::PortNotAllowed
                | Deny::ExecutionStopped
                | Deny::ExecutionLimit
                | Deny::RateLimited
                | Deny::ConcurrencyLimited
        )
    );
    if !is_by_policy || !services.settings.interception.refuse_inside {
        return None;
    }
    let target = parse::target(head).ok()?;
    if target.port() < FIRST_FREE_PORT && !WEB_PORTS.contains(&target.port()) {
        return None;
    }
    policy.task(caller.task()).filter(|task| task.intercepts(target.host()))?;
    if services.unread_refusals.0.get(&(caller.execution().clone(), target.host().clone())) == Some(false) {
        return None;
    }
    let permit = services.throttle.take_refused_tunnel(caller)?;
    let (caller, limited) = (caller.clone(), record.limit().copied());
    Some(RefusedTunnel { caller, target, refusal, limited, _permit: permit })
}

/// The outcome of a tunnel. It is noted when the tunnel ends, also if it is cancelled.
struct Outcome {
    services: Arc<Services>,
    of: (ExecutionId, Host),
    /// A request has arrived.
    is_used: Arc<AtomicBool>,
    /// The client has finished the handshake. It may have opened the connection in advance.
    is_connected: bool,
}

impl Drop for Outcome {
    fn drop(&mut self) {
        let refusals = &self.services.unread_refusals.0;
        let was_read = || self.is_connected && refusals.get(&self.of).unwrap_or(false);
        let is_read = self.is_used.load(Ordering::Relaxed) || was_read();
        refusals.insert(self.of.clone(), is_read);
    }
}

impl RefusedTunnel {
    /// Runs the tunnel after the client has been told that it is open. `record` has the refusal of the CONNECT, and writes it unless a request
    /// arrives.
    pub(super) async fn run(self, side: ClientSide, client: Arc<Client>, record: Record) {
        let of = (self.caller.execution().clone(), self.target.host().clone());
        let (services, is_used) = (client.services.clone(), Arc::default());
        let mut outcome = Outcome { services, of, is_used, is_connected: false };
        let limit = client.services.settings.proxy.handshake_timeout;
        let Ok(Some((stream, first))) = first_protocol(side, limit).await else { return };
        let watched = client.clone();
        let answering = async move {
            let failed = match first {
                FirstProtocol::Http => {
                    let target = self.target.in_the_clear();
                    self.server(client, target, record, &outcome).serve_h1(stream).await;
                    None
                }
                FirstProtocol::Tls(_) => self.answer_in_tls(client, stream, record, &mut outcome).await,
            };
            // The next CONNECT must know of it.
            drop(outcome);
            if let Some(stream) = failed {
                // An alert of the proxy is lost if the stream is reset before it has been read.
                let _ = timeout(ALERT_TIMEOUT, write_and_linger(stream, &[])).await;
            }
        };
        watched.until_reset(answering).await;
    }

    /// Returns the stream of a handshake that has failed.
    async fn answer_in_tls(
        self,
        client: Arc<Client>,
        stream: ClientStream,
        record: Record,
        outcome: &mut Outcome,
    ) -> Option<ClientStream> {
        // The leaf is not cached: it would take the place of another, and the cache would show which names other tasks have
        // tried.
        let config = client.services.authority.mint_server_config(self.target.host()).ok()?;
        let limit = client.services.settings.proxy.handshake_timeout;
        let handshake = TlsAcceptor::from(Arc::new(config)).accept(stream).into_fallible();
        let tls = match timeout(limit, handshake).await {
            Ok(Ok(tls)) => tls,
            Ok(Err((_, stream))) => return Some(stream),
            Err(_) => return None,
        };
        outcome.is_connected = true;
        let h2 = tls.get_ref().1.alpn_protocol() == Some(b"h2");
        let target = self.target.clone();
        let server = self.server(client, target, record, outcome);
        if h2 {
            server.serve_h2(tls).await
        } else {
            server.serve_h1(tls).await
        }
        None
    }

    fn server(&self, client: Arc<Client>, target: Target, record: Record, outcome: &Outcome) -> InnerServer {
        let (to, limited, is_used) = (Err(self.refusal), self.limited, outcome.is_used.clone());
        let inside = TunnelTarget { caller: self.caller.clone(), target, to, limited, prepaid: None, is_used };
        InnerServer::new(client, inside, record)
    }
}

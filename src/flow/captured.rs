//! Captured connections: TLS or HTTP that a program sends to another server, without knowing of the proxy.
//!
//! The client names its destination in the TLS handshake (SNI) or in `Host`. That name is authorized and resolved like the target
//! of a CONNECT. The address that the client has connected to is only compared with the result, and never dialed.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use http::HeaderMap;
use http::header::HOST;
use http::request::Parts;
use tokio::time::{timeout, timeout_at};

use super::Services;
use super::accept::write_and_linger;
use super::client::{self, Client};
use super::connection::{self, Refused};
use super::io::Rewind;
use super::respond;
use super::tunnel::{self, ALERT_TIMEOUT, ClientSide, ClientStream, FirstProtocol, Tunnel, TunnelIo};
use crate::audit::record::Record;
use crate::model::host::Host;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::model::target::{Scheme, Target};
use crate::policy::rule::Policy;
use crate::stages::authorize::Admitted;
use crate::stages::identify::Caller;
use crate::stages::parse;
use crate::stages::pin::PinnedTarget;
use crate::tls::hello::Hello;

/// The connection was made to an address that is not one of the host's.
pub(super) struct OtherAddress;

/// The address that a captured connection was made to.
#[derive(Clone, Copy)]
pub(super) struct Original {
    ip: IpAddr,
    /// Only the address tells the host: the client has looked it up at the DNS listener, and names none itself.
    pub(super) is_only_name: bool,
}

/// Serves a connection until it ends or fails, or the daemon drains.
pub(super) async fn serve(client: Arc<Client>, stream: client::ClientStream) {
    let Some(original) = client.peer.original() else { return };
    let first = async {
        let deadline = client.deadline(client.services.settings.proxy.handshake_timeout);
        let detected = timeout_at(deadline, tunnel::detect_protocol(Rewind::new(Bytes::new(), stream))).await;
        match detected.unwrap_or(Err(Deny::HeaderTimeout.into())) {
            Ok(found) => found,
            Err(refusal) => {
                let mut record = client.services.record(&client.peer);
                // The log has the task, if the listener knows it, and so the name that it has looked up.
                let identified = connection::identify(&client, &HeaderMap::new(), &mut record).await;
                if let Ok((_, caller)) = &identified {
                    let synthetic = &client.services.synthetic_addresses;
                    let name = synthetic.name_at(caller.task(), original.ip(), Instant::now());
                    record.destination(&name.map_or(Host::Ip(original.ip()), Host::Name), original.port());
                }
                record.failed(identified.err().unwrap_or(refusal));
                None
            }
        }
    };
    let first = tokio::select! {
        biased;
        () = client.gone() => None,
        first = first => first,
    };
    match first {
        // The client closed without sending anything, or has been refused.
        None => {}
        Some((stream, FirstProtocol::Http)) => {
            let (first, stream) = stream.into_parts();
            connection::serve_after(client, first, stream).await;
        }
        Some((stream, FirstProtocol::Tls(hello))) => {
            tokio::select! {
                biased;
                () = client.gone() => {}
                () = serve_tls(&client, stream.map(TunnelIo::Left), &hello, original) => {}
            }
        }
    }
}

/// Opens the tunnel that a CONNECT to the server name would open.
async fn serve_tls(client: &Arc<Client>, stream: ClientStream, hello: &Hello, original: SocketAddr) {
    let mut record = client.services.record(&client.peer);
    let refused = match open(client, hello, original, &mut record).await {
        Ok(tunnel) => {
            record.keep_line();
            return tunnel.run(ClientSide::Stream(stream), client.clone(), record).await;
        }
        Err(refused) => refused,
    };
    let refusal = refused.refusal;
    client.services.settle(Some(refusal), &mut record).await;
    if let Some(tunnel) = refused.open_inside(&mut record) {
        return tunnel.run(ClientSide::Stream(stream), client.clone(), record).await;
    }
    record.failed(refusal);
    let alert = respond::tls_alert(record.shown(refusal));
    drop(record);
    // Best effort: the log has the refusal.
    let _ = timeout(ALERT_TIMEOUT, write_and_linger(stream, &alert)).await;
}

async fn open(
    client: &Arc<Client>,
    hello: &Hello,
    original: SocketAddr,
    record: &mut Record,
) -> Result<Tunnel, Refused> {
    let name = hello.server_name.as_deref();
    let request =
        connection::connect_request(&name.map(|name| format!("{name}:{}", original.port())).unwrap_or_default());
    record.request(&request);
    let (policy, caller) = connection::identify(client, request.headers(), record).await?;
    let services = &client.services;
    let request = match name {
        Some(_) => request,
        None => {
            let name = services.synthetic_addresses.name_at(caller.task(), original.ip(), Instant::now());
            let name = name.ok_or_else(|| {
                record.destination(&Host::Ip(original.ip()), original.port());
                Refusal::from(Deny::NoName)
            })?;
            connection::connect_request(&format!("{}:{}", name.as_str(), original.port()))
        }
    };
    let mut head = request.into_parts().0;
    let original = Original { ip: original.ip(), is_only_name: name.is_none() };
    connection::connect(services, (&policy, &caller), (&mut head, Some(original)), record).await
}

/// Returns the target of a request in a captured connection: the host that `Host` or the absolute-form names, at the port that
/// the connection was made to. Without a name, it is the one that the client has looked up.
///
/// # Errors
/// The errors of [`parse::inner`]; [`Deny::NoName`] without a name; [`Deny::TargetMalformed`]; [`Deny::AuthorityMismatch`] for
/// another port.
pub(super) fn http_target(
    services: &Services,
    caller: &Caller,
    head: &mut Parts,
    original: SocketAddr,
) -> Verdict<Target> {
    parse::inner(head)?;
    let target = if head.uri.scheme().is_some() {
        Target::absolute(&head.uri).ok().filter(|target| target.scheme() == Scheme::Http)
    } else {
        let looked_up = || services.synthetic_addresses.name_at(caller.task(), original.ip(), Instant::now());
        let authority = match head.headers.get(HOST) {
            Some(host) => host.to_str().ok().map(str::to_owned),
            None => Some(format!("{}:{}", looked_up().ok_or(Deny::NoName)?.as_str(), original.port())),
        };
        authority.and_then(|authority| Target::from_authority(Scheme::Http, &authority).ok())
    };
    let target = target.ok_or(Deny::TargetMalformed)?;
    if target.port() != original.port() {
        return Err(Deny::AuthorityMismatch.into());
    }
    Ok(target)
}

/// Resolves and checks the host of a request in a captured connection, which was made to the address `original`.
///
/// # Errors
/// The errors of the resolver; [`Deny::AuthorityMismatch`] if that address is not one of the host's.
pub(super) async fn pin(
    services: &Services,
    policy: &Policy,
    admitted: &Admitted,
    original: IpAddr,
    record: &mut Record,
) -> Verdict<PinnedTarget> {
    let pinned = services.resolver.pin(policy, admitted, record).await?;
    let original = Original { ip: original, is_only_name: false };
    check_address(services, original, (admitted.caller(), &pinned), record).map_err(|_| Deny::AuthorityMismatch)?;
    Ok(pinned)
}

/// Checks that a captured connection was made to an address of its host: one that the proxy has resolved, or the one that the DNS
/// listener has answered its task with.
///
/// # Errors
/// [`OtherAddress`].
pub(super) fn check_address(
    services: &Services,
    original: Original,
    (caller, pinned): (&Caller, &PinnedTarget),
    record: &mut Record,
) -> Result<(), OtherAddress> {
    let (ip, host) = (original.ip, pinned.target().host());
    let synthetic = &services.synthetic_addresses;
    let is_of_host = match host {
        _ if !synthetic.contains(ip) => pinned.includes(ip),
        Host::Name(name) => {
            let tasks = services.policies.snapshot().tasks().count();
            synthetic.leads_to((caller.task(), tasks), name, ip, Instant::now())
        }
        Host::Ip(_) => false,
    };
    if !is_of_host {
        record.rule(format!("captured: {ip} is no address of {host}"));
        return Err(OtherAddress);
    }
    Ok(())
}

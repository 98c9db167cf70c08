//! Connects to the daemon's own servers, at addresses from the proxy's own resolver: a shared ledger, a log collector.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::TlsConnector;

use crate::ledger::{Connect, Connecting, Stream};
use crate::model::host::Host;
use crate::policy::store::PolicyStore;
use crate::stages::forward::connect_own_server;
use crate::stages::pin::{OwnServer, Resolver};
use crate::tls::upstream::{self, UpstreamTls};

/// The parts of the daemon that connections to its own servers need.
pub(crate) struct OwnServers<'d> {
    pub(crate) policies: &'d Arc<PolicyStore>,
    pub(crate) resolver: &'d Arc<Resolver>,
    pub(crate) tls: &'d UpstreamTls,
    pub(crate) connect_timeout: Duration,
}

/// A server and its address.
pub(crate) struct ServerAddress<'s> {
    pub(crate) server: OwnServer,
    pub(crate) host: &'s Host,
    pub(crate) port: u16,
    pub(crate) is_tls: bool,
}

impl OwnServers<'_> {
    /// Returns a function that connects. TLS verifies the server's name, with the roots for origins.
    pub(crate) fn connector(&self, address: &ServerAddress<'_>) -> Connect {
        let (policies, resolver) = (self.policies.clone(), self.resolver.clone());
        let (server, host, port) = (address.server, address.host.clone(), address.port);
        let within = self.connect_timeout;
        let tls = address.is_tls.then(|| {
            let mut config = self.tls.config().as_ref().clone();
            config.alpn_protocols.clear();
            TlsConnector::from(Arc::new(config))
        });
        Arc::new(move || {
            let (policies, resolver, host, tls) = (policies.clone(), resolver.clone(), host.clone(), tls.clone());
            Box::pin(async move {
                let addresses = resolver.own_server(&policies.snapshot(), server, &host, port).await;
                let addresses = addresses.map_err(|refusal| io::Error::other(refusal.code()))?;
                let stream = connect_own_server(&addresses, within).await?;
                wrap_tls(stream, &host, tls).await
            }) as Connecting
        })
    }
}

async fn wrap_tls(
    stream: tokio::net::TcpStream,
    host: &Host,
    tls: Option<TlsConnector>,
) -> io::Result<Box<dyn Stream>> {
    let Some(tls) = tls else { return Ok(Box::new(stream)) };
    let name = upstream::server_name(host).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(Box::new(tls.connect(name, stream).await?))
}

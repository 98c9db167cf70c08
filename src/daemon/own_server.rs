//! Connects to the daemon's own servers, at addresses from the proxy's own resolver: a shared ledger, collectors of the log and
//! of traces, a server that is told of approvals.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use tokio_rustls::TlsConnector;

use crate::ledger::{Connect, Connecting, Stream};
use crate::model::host::Host;
use crate::model::upstream_proxy::UpstreamProxyFailure;
use crate::policy::store::PolicyStore;
use crate::policy::upstream_proxy::UpstreamProxy;
use crate::stages::forward::{OriginStream, connect_own_server, try_upstream_proxy};
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

/// Connects to the daemon's own servers, through the upstream proxy if there is one. TLS verifies the server's name, with the roots
/// for origins.
#[derive(Clone)]
pub(crate) struct OwnServerDialer {
    policies: Arc<PolicyStore>,
    resolver: Arc<Resolver>,
    tls: TlsConnector,
    /// TLS with an upstream proxy.
    proxy_tls: TlsConnector,
    connect_timeout: Duration,
}

impl OwnServers<'_> {
    pub(crate) fn dialer(&self) -> OwnServerDialer {
        let mut config = self.tls.config().as_ref().clone();
        config.alpn_protocols.clear();
        OwnServerDialer {
            policies: self.policies.clone(),
            resolver: self.resolver.clone(),
            tls: TlsConnector::from(Arc::new(config)),
            proxy_tls: TlsConnector::from(self.tls.config_h1()),
            connect_timeout: self.connect_timeout,
        }
    }

    /// Returns a function that connects.
    pub(crate) fn connector(&self, address: &ServerAddress<'_>) -> Connect {
        let dialer = self.dialer();
        let ServerAddress { server, host, port, is_tls } = *address;
        let host = host.clone();
        Arc::new(move || {
            let (dialer, host) = (dialer.clone(), host.clone());
            Box::pin(async move { dialer.connect(&ServerAddress { server, host: &host, port, is_tls }).await })
                as Connecting
        })
    }
}

impl OwnServerDialer {
    /// Connects to an upstream proxy, with its TLS, and closes the connection.
    ///
    /// # Errors
    /// [`UpstreamProxyFailure`].
    pub(crate) async fn try_upstream_proxy(&self, proxy: &UpstreamProxy) -> Result<(), UpstreamProxyFailure> {
        let addresses = self.resolver.proxy_addresses(&self.policies.snapshot(), proxy).await;
        let addresses = addresses.map_err(|_| UpstreamProxyFailure::Unresolved)?;
        try_upstream_proxy((proxy, &addresses), &self.proxy_tls, self.connect_timeout).await
    }

    /// Connects at an address from the proxy's own resolver.
    ///
    /// # Errors
    /// I/O errors; the code of the refusal of an address.
    pub(crate) async fn connect(&self, address: &ServerAddress<'_>) -> io::Result<Box<dyn Stream>> {
        let ServerAddress { server, host, port, is_tls } = *address;
        let route = self.resolver.own_server(&self.policies.snapshot(), server, host, port).await;
        let route = route.map_err(|refusal| io::Error::other(refusal.code()))?;
        let stream = connect_own_server(&route, &self.proxy_tls, self.connect_timeout).await?;
        wrap_tls(stream, host, is_tls.then(|| self.tls.clone())).await
    }
}

async fn wrap_tls(stream: OriginStream, host: &Host, tls: Option<TlsConnector>) -> io::Result<Box<dyn Stream>> {
    let Some(tls) = tls else { return Ok(Box::new(stream)) };
    let name = upstream::server_name(host).ok_or(io::ErrorKind::InvalidInput)?;
    Ok(Box::new(tls.connect(name, stream).await?))
}

//! Opens the configured ledger. The address of a ledger server comes from the proxy's own resolver.

use std::io;
use std::sync::Arc;

use tokio_rustls::TlsConnector;
use zeroize::Zeroizing;

use super::vault;
use crate::audit::ledger_alarm::LedgerAlarm;
use crate::audit::sink::Sink;
use crate::files;
use crate::ledger::{Alarm, Connect, Connecting, Ledger, Seal, Server, Stream};
use crate::model::host::Host;
use crate::model::unique_id;
use crate::policy::settings::{LedgerAt, Settings};
use crate::policy::source;
use crate::policy::store::PolicyStore;
use crate::stages::forward::connect_own_server;
use crate::stages::pin::Resolver;
use crate::tls::upstream::{self, UpstreamTls};
use crate::vault::VaultError;

/// Opens the ledger. A server need not be reachable yet. Requests are refused until it is.
///
/// # Errors
/// If a file cannot be opened, or the server's URL, password or key is invalid.
pub(crate) fn open(
    settings: &Settings,
    policies: &Arc<PolicyStore>,
    resolver: &Arc<Resolver>,
    tls: &UpstreamTls,
    audit: &Arc<Sink>,
) -> io::Result<Ledger> {
    let (url, user, password, key) = match &settings.ledger {
        LedgerAt::Embedded(path) => return Ledger::embedded(path),
        LedgerAt::Memory => return Ok(Ledger::memory()),
        LedgerAt::Shared { url, user, password, key } => (url, user, password, key),
    };
    let env = |name: &str| std::env::var(name).ok();
    let read_password =
        |source| source::read_source(source, &env).map_err(|why| io::Error::other(format!("password: {why}")));
    let password = password.as_ref().map(read_password).transpose()?;
    let server = Server::parse(url).map_err(io::Error::other)?.with_password(user.clone(), password);
    let connect = connect(settings, &server, policies, resolver, tls);
    let unusable = |error| match error {
        VaultError::Key(why) => io::Error::other(format!("signing key: {why}")),
        other => io::Error::other(format!("signing key from the vault: {other}")),
    };
    let key = vault::ledger_key(settings, key.as_ref()).map_err(unusable)?;
    Ok(Ledger::shared(server, Seal::new(key, alarm(audit.clone())), &name(settings)?, connect))
}

/// Returns a callback that writes an audit line for each ledger entry that does not verify.
fn alarm(audit: Arc<Sink>) -> Alarm {
    Arc::new(move |altered| {
        LedgerAlarm { kind: altered.kind, key: &altered.key, more: altered.more }.write(&audit);
    })
}

/// Returns the name of this proxy among those that share the ledger. It is created at the first start.
fn name(settings: &Settings) -> io::Result<String> {
    let make = || Ok(Zeroizing::new(unique_id::new().to_string().into_bytes()));
    let name = files::read_or_create(&settings.state_dir.join("proxy.id"), make)?;
    Ok(String::from_utf8_lossy(name.trim_ascii()).into_owned())
}

fn connect(
    settings: &Settings,
    server: &Server,
    policies: &Arc<PolicyStore>,
    resolver: &Arc<Resolver>,
    tls: &UpstreamTls,
) -> Connect {
    let (policies, resolver) = (policies.clone(), resolver.clone());
    let (host, port, within) = (server.host.clone(), server.port, settings.upstream.connect_timeout);
    let tls = server.is_tls.then(|| {
        let mut config = tls.config().as_ref().clone();
        config.alpn_protocols.clear();
        TlsConnector::from(Arc::new(config))
    });
    Arc::new(move || {
        let (policies, resolver, host, tls) = (policies.clone(), resolver.clone(), host.clone(), tls.clone());
        Box::pin(async move {
            let addresses = resolver.ledger(&policies.snapshot(), &host, port).await;
            let addresses = addresses.map_err(|refusal| io::Error::other(refusal.code()))?;
            let stream = connect_own_server(&addresses, within).await?;
            wrap_tls(stream, &host, tls).await
        }) as Connecting
    })
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

//! Opens the configured ledger.

use std::io;
use std::sync::Arc;

use zeroize::Zeroizing;

use super::own_server::{OwnServers, ServerAddress};
use super::vault;
use crate::audit::ledger_alarm::LedgerAlarm;
use crate::audit::sink::Sink;
use crate::files;
use crate::ledger::{Alarm, Connect, Ledger, Seal, Server};
use crate::model::unique_id;
use crate::policy::settings::{LedgerAt, Settings};
use crate::policy::source;
use crate::stages::pin::OwnServer;
use crate::vault::VaultError;

/// Opens the ledger. A server need not be reachable yet. Requests are refused until it is.
///
/// # Errors
/// If a file cannot be opened, or the server's URL, password or key is invalid.
pub(crate) fn open(settings: &Settings, own_servers: &OwnServers<'_>, audit: &Arc<Sink>) -> io::Result<Ledger> {
    let key = match &settings.ledger {
        LedgerAt::Embedded(path) => return Ledger::embedded(path),
        LedgerAt::Memory => return Ok(Ledger::memory()),
        LedgerAt::Shared { key, .. } => key,
    };
    let server = server(&settings.ledger)?.ok_or(io::ErrorKind::InvalidInput)?;
    let connect = connector(&server, own_servers);
    let unusable = |error| match error {
        VaultError::Key(why) => io::Error::other(format!("signing key: {why}")),
        other => io::Error::other(format!("signing key from the vault: {other}")),
    };
    let key = vault::ledger_key(settings, key.as_ref()).map_err(unusable)?;
    Ok(Ledger::shared(server, Seal::new(key, alarm(audit.clone())), &name(settings)?, connect))
}

/// Returns the server of a shared ledger, with its password.
///
/// # Errors
/// If the URL is invalid, or the password cannot be read.
pub(super) fn server(ledger: &LedgerAt) -> io::Result<Option<Server>> {
    let LedgerAt::Shared { url, user, password, .. } = ledger else { return Ok(None) };
    let env = |name: &str| std::env::var(name).ok();
    let read_password =
        |source| source::read_source(source, &env).map_err(|why| io::Error::other(format!("password: {why}")));
    let password = password.as_ref().map(read_password).transpose()?;
    Ok(Some(Server::parse(url).map_err(io::Error::other)?.with_password(user.clone(), password)))
}

/// Returns a function that connects to the server of a shared ledger.
pub(super) fn connector(server: &Server, own_servers: &OwnServers<'_>) -> Connect {
    own_servers.connector(&ServerAddress {
        server: OwnServer::Ledger,
        host: &server.host,
        port: server.port,
        is_tls: server.is_tls,
    })
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

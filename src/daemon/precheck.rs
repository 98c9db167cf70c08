//! Finds what a start would refuse, without creating or changing anything: for `exeat check`.

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit};
use socket2::{Domain, SockAddr, Socket, Type};

use super::admin_tokens::{self, UnusableToken};
use super::approval_notifier::{self, ApprovalNotifier};
use super::command_runner::CommandRunner;
use super::issuer::issuer;
use super::log_sender::LogSender;
use super::own_server::OwnServers;
use super::trace_exporter::TraceExporter;
use super::{ledger, trace_exporter, vault};
use crate::audit::traces::Traces;
use crate::files;
use crate::flow::listener::ConnectionSetup;
use crate::flow::peer_user;
use crate::ledger::reach;
use crate::model::descriptors::Descriptors;
use crate::model::upstream_proxy::UpstreamProxyFailure;
use crate::policy::compile::Problem;
use crate::policy::credential::Credential;
use crate::policy::mint::MintMethod;
use crate::policy::rule::Policy;
use crate::policy::settings::{LedgerAt, ListenAt, ProxyListener, Roots, Settings};
use crate::policy::source;
use crate::policy::store::PolicyStore;
use crate::stages::mint::{Issued, Issuer, Purpose};
use crate::stages::pin::{OwnEndpoints, Resolver};
use crate::tls::authority::Authority;
use crate::tls::upstream::UpstreamTls;

/// The key of the state directory, as the path of a problem.
const STATE_DIR: &str = "state_dir";

/// The problems that stop a start, and the warnings.
#[derive(Default)]
pub struct Found {
    /// The problems that stop a start.
    pub problems: Vec<Problem>,
    /// Problems that may stop a start now, or will soon.
    pub warnings: Vec<Problem>,
}

impl Found {
    fn problem(&mut self, path: &str, problem: impl ToString, suggestion: &str) {
        self.problems.push(self::problem(path, problem, suggestion));
    }

    fn warning(&mut self, path: &str, problem: impl ToString, suggestion: &str) {
        self.warnings.push(self::problem(path, problem, suggestion));
    }
}

fn problem(path: &str, problem: impl ToString, suggestion: &str) -> Problem {
    Problem::new(path, problem.to_string(), suggestion)
}

/// Checks the files, directories and addresses that a start needs, as this process's user.
#[must_use]
pub fn find(settings: &Settings) -> Found {
    let mut found = Found::default();
    check_files(settings, &mut found);
    check_authority(settings, &mut found);
    if let Err(problem) = resolver(settings) {
        found.problems.push(problem);
    }
    if let Err(error) = ConnectionSetup::new(&settings.proxy) {
        found.problem("proxy.tls", error, "");
    }
    // Without a state directory, every file in it would be a problem of its own.
    if found.problems.iter().all(|problem| problem.path != STATE_DIR) {
        check_secrets(settings, &mut found);
    }
    if let Some(listener) = without_owners(settings) {
        found.warning(&format!("{}.user_tasks", listener.key), NO_OWNERS, "");
    }
    for listener in &settings.proxy.listeners {
        check_address(&listener.key, &listener.at, &mut found);
    }
    if let Some(at) = &settings.admin.listen {
        check_address("admin.listen", at, &mut found);
    }
    if let Some(at) = &settings.metrics.listen {
        check_address("metrics.listen", at, &mut found);
    }
    found
}

/// Returns the first listener whose clients are known by their user, if the kernel does not say who owns a socket.
#[must_use]
pub fn without_owners(settings: &Settings) -> Option<&ProxyListener> {
    let listener = settings.proxy.listeners.iter().find(|listener| !listener.tasks.loopback_users.is_empty());
    listener.filter(|_| !peer_user::is_supported().unwrap_or_default())
}

/// The problem of such a listener.
pub(super) const NO_OWNERS: &str = "the kernel does not say here who owns a socket (sock_diag), so clients of this listener \
     need a token; under systemd, RestrictAddressFamilies needs AF_NETLINK";

/// Checks that upstream proxies and the daemon's own servers can be reached: that of a shared ledger, the log collector and
/// others. Fetches a token for each credential that is minted, except by a refresh token, which its endpoint could replace.
pub async fn find_unreachable(settings: &Settings, policy: Policy, commands: Option<Arc<CommandRunner>>) -> Found {
    let mut found = Found::default();
    // Their problems have been found already.
    let (Ok(resolver), Ok(tls)) = (resolver(settings), upstream_tls(settings)) else { return found };
    let upstream_proxies = policy.upstream_proxies().to_vec();
    let minted: Vec<_> = policy.credentials().filter(|credential| credential.recipe().is_some()).cloned().collect();
    let (policies, resolver) = (Arc::new(PolicyStore::new(policy)), Arc::new(resolver));
    let connect_timeout = settings.upstream.connect_timeout;
    let own_servers = OwnServers { policies: &policies, resolver: &resolver, tls: &tls, connect_timeout };
    for proxy in &upstream_proxies {
        if let Err(failure) = own_servers.dialer().try_upstream_proxy(proxy).await {
            let refused = match failure {
                UpstreamProxyFailure::Unresolved => "all requests are refused",
                _ => "requests through it are refused",
            };
            let problem = format!("{}: {}; {refused}", proxy.address(), failure.text().detail);
            found.problem(&format!("{}.proxy", proxy.section()), problem, "a proxy that this machine can reach");
        }
    }
    if let Ok(Some(server)) = ledger::server(&settings.ledger)
        && let Err(why) = reach(&server, &ledger::connector(&server, &own_servers)).await
    {
        let problem = format!("{}:{}: {why}; requests are refused until it answers", server.host, server.port);
        found.problem("ledger.store", problem, "");
    }
    if let Some(shipping) = &settings.audit.ship
        && let Err(error) = LogSender::new(shipping, &own_servers).try_open().await
    {
        let problem = format!("{}: {error}; lines wait in the log's files until it answers", shipping.collector);
        found.warning("audit.ship", problem, "");
    }
    if let Some(notify) = &settings.notify
        && let Err(error) = ApprovalNotifier::new(notify, &own_servers, None).try_open().await
    {
        found.warning("approvals.notify", format_args!("{error}; nobody is told of approvals until it answers"), "");
    }
    let exporter = settings.traces.as_ref();
    let exporter = exporter.and_then(|export| TraceExporter::new(export, Arc::new(Traces::new(0)), &own_servers));
    if let Some(mut exporter) = exporter
        && let Err(error) = exporter.try_open().await
    {
        found.warning("traces.endpoint", format_args!("{error}; traces are dropped until it answers"), "");
    }
    check_tokens(&minted, issuer(&own_servers, commands), &mut found).await;
    found
}

async fn check_tokens(minted: &[Arc<Credential>], issuer: Issuer, found: &mut Found) {
    for credential in minted {
        let Some(recipe) = credential.recipe() else { continue };
        let (key, what) = match &recipe.method {
            MintMethod::Token(_) => ("token_url", "token"),
            MintMethod::Store(_) | MintMethod::Command(_) => ("value", "value"),
            MintMethod::Role(_) => ("assume_role", "key"),
        };
        let path = format!("credentials.{}.{key}", credential.name());
        if recipe.replaces_secret() {
            found.warning(&path, "no token was fetched, because that could replace the refresh token", "");
        } else if let Err(error) = fetched(credential, issuer(recipe.clone(), Purpose::First).await) {
            let problem = format!("no {what} could be fetched from {}: {error}", recipe.server());
            found.warning(&path, format_args!("{problem}; requests with the credential are refused"), "");
        }
    }
}

/// Returns why a value that was fetched cannot be used.
fn fetched(credential: &Credential, issued: Issued) -> Result<(), String> {
    let token = issued.token.map_err(|error| error.reason)?;
    credential
        .checked((token.value, token.aws_key), (Instant::now(), token.life), 0.0)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// Returns the resolver of a daemon with these settings.
///
/// # Errors
/// The problem with the root certificates or with the resolver itself.
pub fn resolver(settings: &Settings) -> Result<Resolver, Problem> {
    let tls = upstream_tls(settings)?;
    let descriptors = Descriptors::divided(getrlimit(Resource::Nofile).current, settings.proxy.max_connections);
    Resolver::new(&settings.dns, &tls, OwnEndpoints::default(), &descriptors)
        .map_err(|error| problem("dns", format_args!("the resolver cannot be set up: {error}"), ""))
}

fn upstream_tls(settings: &Settings) -> Result<UpstreamTls, Problem> {
    let system = settings.upstream.roots == Roots::System;
    UpstreamTls::new(system, &settings.upstream.extra_roots, &settings.upstream.crls)
        .map_err(|error| problem("upstream", error, "files with PEM certificates or revocation lists"))
}

/// Checks the vault, which is opened at the start even if no credential uses it, and the admin token.
fn check_secrets(settings: &Settings, found: &mut Found) {
    if let Err(error) = vault::vault(&settings.vault).open() {
        found.problem("vault", error, "the path and the key with which the vault was created");
    }
    if let Err(error) = ledger::server(&settings.ledger) {
        found.problem("ledger", error, "");
    }
    if let LedgerAt::Shared { key: Some(key), .. } = &settings.ledger
        && let Err(error) = vault::ledger_key(settings, Some(key))
    {
        found.problem("ledger.key", error, "");
    }
    let authorization = settings.audit.ship.as_ref().and_then(|ship| ship.authorization.as_ref());
    if let Some(source) = authorization
        && let Err(error) = source::read_source(source, &|name| std::env::var(name).ok())
    {
        found.warning(
            "audit.ship_authorization",
            format_args!("{error}; lines wait in the log's files until it can be read"),
            "",
        );
    }
    if let Some(notify) = &settings.notify
        && let Err(error) = approval_notifier::check_secrets(notify)
    {
        found.warning("approvals", format_args!("{error}; nobody is told of approvals until it can be read"), "");
    }
    if let Some(export) = &settings.traces
        && let Err(error) = trace_exporter::check_secrets(export)
    {
        found.warning("traces.headers", format_args!("{error}; traces are dropped until it can be read"), "");
    }
    if settings.admin.listen.is_some()
        && let Err(UnusableToken { key, error }) = admin_tokens::read(&settings.admin, &settings.state_dir)
        // A start creates the token.
        && error.kind() != io::ErrorKind::NotFound
    {
        found.problem(&format!("admin.{key}"), error, "");
    }
}

/// Checks that the files that are written can be, or that they can be created.
fn check_files(settings: &Settings, found: &mut Found) {
    let suggestion = "a place that the daemon's user may write";
    if let Err(error) = writable(&settings.state_dir) {
        found.problem(STATE_DIR, format_args!("{}: {error}", settings.state_dir.display()), suggestion);
    }
    // Those that a start only reads, once they exist, are checked where they are read.
    let created = [
        ("interception.ca_cert", Some(&settings.interception.ca_cert)),
        ("interception.ca_key", settings.interception.ca_key.as_ref()),
        ("vault.path", Some(&settings.vault.path)),
        ("vault.key", settings.vault.key.file()),
    ];
    let written = [("audit.path", settings.audit.path.as_ref()), ("ledger.path", settings.ledger.file())];
    let created = created.into_iter().filter_map(|(path, file)| Some((path, file?, false)));
    let written = written.into_iter().filter_map(|(path, file)| Some((path, file?, true)));
    for (path, file, is_written) in created.chain(written) {
        let result = match access(file, Access::EXISTS) {
            Err(_) if file.parent() == Some(&settings.state_dir) => Ok(()),
            Err(_) => writable(files::folder(file)),
            Ok(()) if is_written => access(file, Access::READ_OK | Access::WRITE_OK).map_err(Into::into),
            Ok(()) => Ok(()),
        };
        if let Err(error) = result {
            found.problem(path, format_args!("{}: {error}", file.display()), suggestion);
        }
    }
}

/// Returns an error if the directory, or the nearest parent that exists, is not a writable directory.
fn writable(directory: &Path) -> io::Result<()> {
    let existing = directory.ancestors().map(|path| if path.as_os_str().is_empty() { Path::new(".") } else { path });
    for path in existing {
        match access(path, Access::EXISTS) {
            Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
            Ok(()) if !path.is_dir() => return Err(io::ErrorKind::NotADirectory.into()),
            Ok(()) => return Ok(access(path, Access::WRITE_OK | Access::EXEC_OK)?),
        }
    }
    Ok(())
}

fn check_authority(settings: &Settings, found: &mut Found) {
    let Some(key) = &settings.interception.ca_key else { return };
    match Authority::existing(&settings.interception.ca_cert, key) {
        Ok(authority) => {
            let days = authority.and_then(|authority| authority.expires_within_days());
            if let Some(days) = days {
                let path = settings.interception.ca_cert.display();
                found.warning("interception.ca_cert", format_args!("{path} expires in {days} days"), "");
            }
        }
        Err(error) => found.problem("interception", error, ""),
    }
}

/// Warns of an address that cannot be bound now. It may be that of the running daemon, or be passed by the service manager.
fn check_address(path: &str, at: &ListenAt, found: &mut Found) {
    let result = match at {
        ListenAt::Tcp(address) => bind(*address),
        ListenAt::Unix(socket) => check_socket(socket),
    };
    let Err(error) = result else { return };
    match error.kind() {
        io::ErrorKind::AddrInUse => found.warning(path, format_args!("{at} is in use, perhaps by a running exeat"), ""),
        _ => found.warning(path, format_args!("{at}: {error}"), ""),
    }
}

/// Binds an address for a moment, without listening.
fn bind(address: SocketAddr) -> io::Result<()> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM, None)?;
    socket.set_reuse_address(true)?;
    socket.bind(&address.into())
}

/// Checks that a Unix socket can be created: a daemon replaces one that nobody serves, and nothing else.
fn check_socket(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => writable(files::folder(path)),
        Err(error) => Err(error),
        Ok(found) if !found.file_type().is_socket() => Err(io::ErrorKind::AlreadyExists.into()),
        Ok(_) if is_served(path) => Err(io::ErrorKind::AddrInUse.into()),
        Ok(_) => Ok(()),
    }
}

/// Returns true if a process listens on the socket, also if it does not accept connections.
fn is_served(path: &Path) -> bool {
    let connected = SockAddr::unix(path).and_then(|address| {
        let socket = Socket::new(Domain::UNIX, Type::STREAM, None)?;
        socket.set_nonblocking(true)?;
        socket.connect(&address)
    });
    match connected {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

//! Settings that are read once at start: listen addresses, files, timeouts.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use ipnet::IpNet;

use super::command_source::CommandSource;
use super::hook_url::HookUrl;
use super::log_collector::LogCollector;
use super::secret_store::StoreReference;
use super::trace_export::TraceExport;
use crate::model::name::TaskName;

/// The settings outside the policy. A change takes effect at the next start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// The directory of the CA, the audit log and the admin token.
    pub state_dir: PathBuf,
    /// `[proxy]`.
    pub proxy: Proxy,
    /// `[admin]`.
    pub admin: Admin,
    /// `[metrics]`.
    pub metrics: Metrics,
    /// `[interception]`.
    pub interception: Interception,
    /// `[upstream]`.
    pub upstream: Upstream,
    /// `[dns]`, without `hosts`.
    pub dns: Dns,
    /// `[vault]`.
    pub vault: Vault,
    /// `[audit]`.
    pub audit: Audit,
    /// `[ledger]`.
    pub ledger: LedgerAt,
    /// `[approvals]`: the server that is told of requests that wait for an approval.
    pub notify: Option<Notify>,
    /// `[traces]`: the collector of traces.
    pub traces: Option<TraceExport>,
}

impl Settings {
    /// Returns the sections that differ, and `state_dir`.
    #[must_use]
    pub fn changed_since(&self, old: &Self) -> Vec<&'static str> {
        let Self {
            state_dir,
            proxy,
            admin,
            metrics,
            interception,
            upstream,
            dns,
            vault,
            audit,
            ledger,
            notify,
            traces,
        } = self;
        let sections = [
            ("state_dir", *state_dir != old.state_dir),
            ("[proxy]", *proxy != old.proxy),
            ("[admin]", admin.is_changed_since(&old.admin)),
            ("[metrics]", *metrics != old.metrics),
            ("[interception]", *interception != old.interception),
            ("[upstream]", *upstream != old.upstream),
            ("[dns]", *dns != old.dns),
            ("[vault]", *vault != old.vault),
            ("[audit]", *audit != old.audit),
            ("[approvals]", *notify != old.notify),
            ("[traces]", *traces != old.traces),
            ("[ledger]", *ledger != old.ledger),
        ];
        sections.into_iter().filter(|(_, differs)| *differs).map(|(name, _)| name).collect()
    }
}

impl Settings {
    /// Returns the ranges of the addresses that stand for names. Without a DNS listener, no address does.
    #[must_use]
    pub fn synthetic_ranges(&self) -> &[IpNet] {
        if self.proxy.listeners.iter().any(ProxyListener::is_dns) { &self.dns.synthetic_ranges } else { &[] }
    }
}

/// `[proxy]`: the listeners for sandboxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// The listeners.
    pub listeners: Vec<ProxyListener>,
    /// TLS to the proxy itself, on TCP listeners.
    pub tls: Option<ProxyTls>,
    /// The file mode of Unix sockets, which controls who may connect.
    pub unix_mode: u32,
    /// The tasks of the clients of listeners that have none of their own.
    pub tasks: ListenerTasks,
    /// The maximum number of concurrent connections. Further ones are answered with `overloaded`.
    pub max_connections: usize,
    /// The maximum number of concurrent connections per execution. Requests on further ones are answered with
    /// `overloaded`.
    pub max_connections_per_caller: usize,
    /// The maximum size of a request head, in bytes.
    pub max_head_bytes: usize,
    /// The time from the start of waiting for a request to the last byte of its head.
    pub header_timeout: Duration,
    /// The time from the 200 of a CONNECT to the end of the TLS handshake.
    pub handshake_timeout: Duration,
    /// The time that requests in flight have to finish after SIGTERM.
    pub drain_timeout: Duration,
    /// Whether to add `Via` to forwarded messages.
    pub via: bool,
}

/// A listener for sandboxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyListener {
    /// Its address.
    pub at: ListenAt,
    /// Its place in the configuration.
    pub key: String,
    /// It is an entry of `[[proxy.listeners]]`.
    pub is_own: bool,
    /// The tasks of its clients.
    pub tasks: ListenerTasks,
    /// The networks of the load balancers that its clients come through. They name the address of a client in the PROXY
    /// protocol, without which no connection is served. `None` if clients come directly.
    pub balancers: Option<Vec<IpNet>>,
    /// The protocol that its clients speak to it.
    pub mode: ListenerMode,
    /// It takes connections to addresses of other machines, which TPROXY rules lead to it. Its own address says nothing of who
    /// reaches it.
    pub is_tproxy: bool,
}

impl ProxyListener {
    /// Returns whether it answers DNS queries. All others accept connections that are relayed.
    #[must_use]
    pub fn is_dns(&self) -> bool {
        self.mode == ListenerMode::Dns
    }

    /// Returns whether programs can be told to use it as their HTTP proxy.
    #[must_use]
    pub fn is_http_proxy(&self) -> bool {
        self.mode == ListenerMode::Proxy
    }
}

/// The protocol that the clients of a listener speak to it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ListenerMode {
    /// That of an HTTP proxy: CONNECT, and requests in absolute-form.
    #[default]
    Proxy,
    /// SOCKS5 (RFC 1928).
    Socks5,
    /// None. Their connections to other addresses are captured, and contain TLS or HTTP for a server.
    Transparent,
    /// DNS over UDP and TCP.
    Dns,
}

/// The tasks as which the clients of a listener act without a token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ListenerTasks {
    /// The task of all clients.
    pub all: Option<TaskName>,
    /// The tasks of networks, narrower ones first.
    pub networks: Vec<(IpNet, TaskName)>,
    /// The tasks of user ids, on Unix sockets.
    pub users: BTreeMap<u32, TaskName>,
    /// The tasks of user ids, on TCP sockets of the loopback interface.
    pub loopback_users: BTreeMap<u32, TaskName>,
}

/// The address of a listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAt {
    /// A TCP address. Port 0 selects a free port.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl ListenAt {
    /// Returns the TCP address, or `None` for a Unix socket.
    #[must_use]
    pub fn tcp(&self) -> Option<SocketAddr> {
        match self {
            Self::Tcp(address) => Some(*address),
            Self::Unix(_) => None,
        }
    }
}

impl fmt::Display for ListenAt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(address) => address.fmt(f),
            Self::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

/// `[proxy].tls`: PEM files, read again on reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyTls {
    /// The certificate chain, leaf first.
    pub cert: PathBuf,
    /// The leaf's key.
    pub key: PathBuf,
    /// The CA of client certificates. If set, every client must present one.
    pub client_ca: Option<PathBuf>,
    /// The list of revoked client certificates (CRL).
    pub crl: Option<PathBuf>,
}

/// `[admin]`: the operator's listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// The listen address. `None` if there is no admin listener.
    pub listen: Option<ListenAt>,
    /// The user ids that may use the Unix socket without a token, in addition to the daemon's own.
    pub uids: Vec<u32>,
    /// The sources of the tokens, of which each is accepted. Empty for the token in the state directory, which is generated
    /// at the first start. A change takes effect at a reload.
    pub tokens: Vec<TokenSource>,
}

impl Admin {
    /// Returns whether other settings than the tokens differ, which a reload reads again.
    fn is_changed_since(&self, old: &Self) -> bool {
        let Self { listen, uids, tokens: _ } = self;
        *listen != old.listen || *uids != old.uids
    }
}

/// `[metrics]`: a listener for metrics alone, which needs no token.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Metrics {
    /// The listen address. `None` if the admin listener alone has them.
    pub listen: Option<ListenAt>,
}

/// The source of a token, one of several while a token is replaced.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TokenSource {
    /// The key in its section: `token` or `tokens[0]`.
    pub key: String,
    /// The source.
    pub source: Source,
}

/// `[interception]`: the CA that clients inside the sandbox trust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interception {
    /// The certificate file in PEM, generated at the first start.
    pub ca_cert: PathBuf,
    /// The key file in PEM, with mode 0600. `None` for a new CA at each start, with its key only in memory.
    pub ca_key: Option<PathBuf>,
    /// Whether a CONNECT that the policy refuses is accepted, so that the client gets the refusal inside the tunnel.
    pub refuse_inside: bool,
}

/// `[upstream]`: connections to origins and trust in them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// The trusted roots.
    pub roots: Roots,
    /// PEM files with additional roots.
    pub extra_roots: Vec<PathBuf>,
    /// Files with lists of revoked certificates (CRLs), in PEM or DER.
    pub crls: Vec<PathBuf>,
    /// The connect timeout for all addresses of a host together.
    pub connect_timeout: Duration,
}

/// The root certificates that are trusted for origins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Roots {
    /// The roots of the operating system.
    System,
    /// Mozilla's roots, compiled in.
    Webpki,
}

/// `[dns]`: name resolution.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// The DNS servers, in order of preference.
    pub servers: Vec<DnsServer>,
    /// The timeout of a look-up, for both address families together.
    pub timeout: Duration,
    /// The number of names per minute that an execution may look up for the first time.
    pub new_names_per_minute: u32,
    /// The ranges of the addresses that DNS listeners answer with, at most one of each family.
    pub synthetic_ranges: Vec<IpNet>,
}

/// A DNS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsServer {
    /// DNS over HTTPS (RFC 8484).
    Https {
        /// Address and port.
        at: SocketAddr,
        /// The name in its certificate.
        name: String,
        /// The path, such as `/dns-query`.
        path: String,
    },
    /// DNS over UDP, and over TCP if the answer is truncated.
    Plain(SocketAddr),
    /// The `nameserver` lines of `/etc/resolv.conf`.
    System,
    /// DNS over TLS (RFC 7858).
    Tls {
        /// Address and port.
        at: SocketAddr,
        /// The name in its certificate.
        name: String,
    },
}

/// `[vault]`: the encrypted store of secrets.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vault {
    /// The encrypted file.
    pub path: PathBuf,
    /// The master key or a passphrase. A key file is generated at the first use.
    pub key: Source,
}

/// `[ledger]`: the store of executions and their usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LedgerAt {
    /// A file.
    Embedded(PathBuf),
    /// Memory. The data is lost when the process ends.
    Memory,
    /// A Redis or Valkey server, which several proxies can share.
    Shared {
        /// `redis://HOST:PORT` or `rediss://HOST:PORT`.
        url: String,
        /// The user to log in as.
        user: Option<String>,
        /// The password to log in with.
        password: Option<Source>,
        /// The key that the proxies share, 32 bytes in hex or base64. If `None`, it is derived from the vault's master
        /// key.
        key: Option<Source>,
    },
}

impl LedgerAt {
    /// Returns the ledger's file, if it is in one.
    #[must_use]
    pub fn file(&self) -> Option<&PathBuf> {
        match self {
            Self::Embedded(path) => Some(path),
            Self::Memory | Self::Shared { .. } => None,
        }
    }
}

/// `[audit]`: the audit log.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    /// The file. `None` for standard output.
    pub path: Option<PathBuf>,
    /// The durability that a line must have before its request continues.
    pub durability: Durability,
    /// The size at which the file is rotated, in bytes.
    pub rotate_bytes: u64,
    /// The time for which lines are kept. `None`: forever.
    pub keep: Option<Duration>,
    /// The total size of the files that are kept, in bytes. `None`: without a limit.
    pub max_total: Option<u64>,
    /// The server that lines are sent to.
    pub ship: Option<Shipping>,
    /// The number of refusals per second and execution that are logged with a line each. Further ones are only counted.
    pub refusals_per_second: u32,
}

/// The durability that an audit line must have before its request continues.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// `fdatasync` has returned: the line survives a power failure.
    Synced,
    /// The kernel has the line: it survives a crash of the process.
    Written,
}

/// The server that lines of the audit log are sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shipping {
    /// The server.
    pub collector: LogCollector,
    /// The value of the header `Authorization`. Only servers with HTTPS can have it.
    pub authorization: Option<Source>,
}

/// The server that is told of requests that wait for an approval.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notify {
    /// The URL.
    pub url: NotifyUrl,
    /// The form of the messages.
    pub format: NotifyFormat,
    /// The key of the signatures.
    pub key: Option<Source>,
    /// The address of the live page in the messages, if it is not that of the admin listener.
    pub link: Option<String>,
}

/// The URL of the server. One with a secret in it is read from elsewhere.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum NotifyUrl {
    /// The URL itself.
    Plain(HookUrl),
    /// The source of the URL.
    Secret(Source),
}

/// The form of the messages about approvals.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum NotifyFormat {
    /// A JSON document with the facts of the approval.
    #[default]
    Generic,
    /// A message for an incoming webhook of Slack.
    Slack,
}

/// The source of a secret. The configuration names secrets but never contains them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An environment variable of the daemon.
    Env(String),
    /// A file. One trailing newline is removed.
    File(PathBuf),
    /// A secret in the vault, in the task's workspace. Only credentials can have this source.
    Secret(String),
    /// A value in a secret store. Only the values of credentials can have this source.
    Store(StoreReference),
    /// The output of a command. Only the values of credentials can have this source.
    Command(CommandSource),
}

impl std::fmt::Display for Source {
    /// Writes the source as the configuration names it, with the whole path of a file.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Env(name) => write!(f, "env:{name}"),
            Self::File(path) => write!(f, "file:{}", path.display()),
            Self::Secret(name) => write!(f, "secret:{name}"),
            Self::Store(reference) => reference.fmt(f),
            Self::Command(command) => command.fmt(f),
        }
    }
}

impl Source {
    /// Parses `env:NAME` or `file:PATH`.
    #[must_use]
    pub fn parse(text: &str) -> Option<Self> {
        match text.split_once(':') {
            Some(("env", name)) if !name.is_empty() => Some(Self::Env(name.to_owned())),
            Some(("file", path)) if !path.is_empty() => Some(Self::File(path.into())),
            _ => None,
        }
    }

    /// Returns true if the value is fetched while the policy is in force: from a secret store, or by a command.
    #[must_use]
    pub fn is_fetched(&self) -> bool {
        matches!(self, Self::Store(_) | Self::Command(_))
    }

    /// Returns true for a variable or a file.
    #[must_use]
    pub fn is_local(&self) -> bool {
        matches!(self, Self::Env(_) | Self::File(_))
    }

    /// Returns the file, if the source is one.
    #[must_use]
    pub fn file(&self) -> Option<&PathBuf> {
        match self {
            Self::File(path) => Some(path),
            Self::Env(_) | Self::Secret(_) | Self::Store(_) | Self::Command(_) => None,
        }
    }
}

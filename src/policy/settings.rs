//! Settings that are read once at start: listening addresses, files, timeouts.

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use crate::model::name::TaskName;

/// Everything outside of the policy. A change takes effect at the next start.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Where the CA, the audit log and the admin token live.
    pub state_dir: PathBuf,
    /// `[proxy]`.
    pub proxy: Proxy,
    /// `[admin]`.
    pub admin: Admin,
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
}

/// `[proxy]`: the listeners for sandboxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// Where; several at once are served alike.
    pub listen: Vec<ListenAt>,
    /// On TCP: TLS to the proxy itself.
    pub tls: Option<ProxyTls>,
    /// The mode of the Unix sockets, which decides who may connect.
    pub unix_mode: u32,
    /// On Unix sockets: which task a user id is.
    pub unix_tasks: BTreeMap<u32, TaskName>,
    /// Connections at a time; one more is answered `overloaded`.
    pub max_connections: usize,
    /// Connections at a time of one execution; a request on one more is answered `overloaded`.
    pub max_connections_per_caller: usize,
    /// Bytes of a request's head.
    pub max_head_bytes: usize,
    /// From the first byte wanted to the last byte of the head.
    pub header_timeout: Duration,
    /// From the 200 of a CONNECT to the end of the TLS handshake.
    pub handshake_timeout: Duration,
    /// How long requests in flight may take after SIGTERM.
    pub drain_timeout: Duration,
    /// Adds `Via` to what is forwarded.
    pub via: bool,
}

/// Where a listener is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ListenAt {
    /// A TCP address; port 0 takes a free one.
    Tcp(SocketAddr),
    /// A Unix socket.
    Unix(PathBuf),
}

impl ListenAt {
    /// The TCP address, if it is one.
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

/// `[proxy].tls`: PEM files, read again at a reload.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ProxyTls {
    /// The chain, the leaf first.
    pub cert: PathBuf,
    /// The leaf's key.
    pub key: PathBuf,
    /// The CA that signs client certificates; with it, every client must have one.
    pub client_ca: Option<PathBuf>,
    /// Client certificates that no longer count.
    pub crl: Option<PathBuf>,
}

/// `[admin]`: the operator's listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// None: no admin listener.
    pub listen: Option<ListenAt>,
    /// On a Unix socket: user ids that are let in beside the daemon's own.
    pub uids: Vec<u32>,
    /// None: the token in the state directory, made at first start.
    pub token: Option<Source>,
}

/// `[interception]`: the CA whose certificates clients inside the sandbox trust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interception {
    /// PEM, made on first start.
    pub ca_cert: PathBuf,
    /// PEM, mode 0600. None: a new CA at each start, whose key is kept in memory only.
    pub ca_key: Option<PathBuf>,
}

/// `[upstream]`: how origins are reached and believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// Which roots vouch for origins.
    pub roots: Roots,
    /// PEM files with more roots.
    pub extra_roots: Vec<PathBuf>,
    /// Files with lists of revoked certificates, PEM or DER.
    pub crls: Vec<PathBuf>,
    /// For all addresses of a host together.
    pub connect_timeout: Duration,
}

/// Which roots vouch for origins.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Roots {
    /// The machine's.
    System,
    /// Mozilla's, compiled in.
    Webpki,
}

/// `[dns]`: whom to ask.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dns {
    /// In order of preference.
    pub servers: Vec<DnsServer>,
    /// For both families together.
    pub timeout: Duration,
    /// Names that an execution may have looked up in a minute, of those that it has not asked for before.
    pub new_names_per_minute: u32,
}

/// One DNS server.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DnsServer {
    /// DNS over HTTPS (RFC 8484).
    Https {
        /// Address and port.
        at: SocketAddr,
        /// The name in its certificate.
        name: String,
        /// Such as `/dns-query`.
        path: String,
    },
    /// UDP, and TCP where the answer is cut.
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

/// `[vault]`: secrets at rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Vault {
    /// The encrypted file.
    pub path: PathBuf,
    /// The master key, or a passphrase; a file is made at the first use.
    pub key: Source,
}

/// `[ledger]`: where executions and what they have used up are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LedgerAt {
    /// In a file.
    Embedded(PathBuf),
    /// Nowhere: with the process it is gone.
    Memory,
    /// On a Redis or Valkey server, which several proxies may share.
    Shared {
        /// `redis://HOST:PORT` or `rediss://HOST:PORT`.
        url: String,
        /// The user to log in as.
        user: Option<String>,
        /// With what.
        password: Option<Source>,
        /// The key that the proxies share, 32 bytes in hex or base64. None: it is derived from the vault's master key.
        key: Option<Source>,
    },
}

/// `[audit]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    /// None: standard output.
    pub path: Option<PathBuf>,
    /// How sure a line must be before its request goes on.
    pub durability: Durability,
    /// A file of this size is put aside and a new one begun.
    pub rotate_bytes: u64,
    /// Refusals of one execution within a second that have a line each; the others are counted.
    pub refusals_per_second: u32,
}

/// How sure an audit line must be before its request goes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Durability {
    /// On the disk, `fdatasync` has returned: survives a power cut.
    Synced,
    /// Handed to the kernel: survives the death of the process.
    Written,
}

/// Where a secret is read from. The configuration names secrets, it never holds one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Source {
    /// An environment variable of the daemon.
    Env(String),
    /// A file; one final newline is cut.
    File(PathBuf),
    /// A secret of the vault, in the task's workspace. Only credentials have such sources.
    Secret(String),
}

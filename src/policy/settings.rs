//! What is read once at start: addresses to listen on, files, timeouts.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

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
}

/// `[proxy]`: the listeners for sandboxes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// TCP addresses; port 0 takes a free one.
    pub listen: Vec<SocketAddr>,
    /// Connections at a time; one more is answered `overloaded`.
    pub max_connections: usize,
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

/// `[admin]`: the operator's listener.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Admin {
    /// None: no admin listener.
    pub listen: Option<SocketAddr>,
    /// None: the token in the state directory, made at first start.
    pub token: Option<Source>,
}

/// `[interception]`: the CA whose certificates clients inside the sandbox trust.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Interception {
    /// PEM, made on first start.
    pub ca_cert: PathBuf,
    /// PEM, mode 0600.
    pub ca_key: PathBuf,
}

/// `[upstream]`: how origins are reached and believed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Upstream {
    /// Which roots vouch for origins.
    pub roots: Roots,
    /// PEM files with more roots.
    pub extra_roots: Vec<PathBuf>,
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

/// `[audit]`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Audit {
    /// None: standard output.
    pub path: Option<PathBuf>,
    /// How sure a line must be before its request goes on.
    pub durability: Durability,
    /// A file of this size is put aside and a new one begun.
    pub rotate_bytes: u64,
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

//! Listeners: TCP, TLS, Unix sockets, and sockets passed by a service manager.

use std::fmt;
use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};

use ipnet::IpNet;
use parking_lot::RwLock;
use rustls::ServerConfig;
use time::OffsetDateTime;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::server::TlsStream;

use super::disconnect::{ClientSocket, DisconnectWatch};
use super::peer_user;
use super::proxy_header::{self, ProxyHeaderError};
use crate::admission::Source;
use crate::model::host::Host;
use crate::model::name::TaskName;
use crate::model::peer::Peer;
use crate::policy::settings::{ListenAt, ListenerMode, ListenerTasks, Proxy, ProxyListener, ProxyTls};
use crate::socket_options;
use crate::tls::listener;
use crate::tls::listener::{ListenerTlsError, certificate_end};

/// Length of the kernel's queue of connections to accept, which `net.core.somaxconn` may lower. The kernel drops
/// connections beyond it, and their clients retry after a second, so a burst of one client must not fill it.
const BACKLOG: u32 = 4096;

/// The clients of a listener behind load balancers.
pub(crate) struct BehindBalancers {
    balancers: Arc<[IpNet]>,
    tasks: Arc<ListenerTasks>,
}

/// A connection to a listener behind load balancers that is not served.
#[derive(Debug, thiserror::Error)]
pub(crate) enum NotBehindBalancer {
    #[error("the connection is not from a trusted load balancer")]
    Untrusted,
    #[error("PROXY header: {0}")]
    Header(#[from] ProxyHeaderError),
}

impl BehindBalancers {
    /// Reads the header of a connection, and returns that with the address of the client. The caller limits the time.
    ///
    /// # Errors
    /// [`NotBehindBalancer`]. Nothing is read from a connection that is not from a load balancer.
    pub(crate) async fn identify(&self, accepted: Accepted) -> Result<Accepted, NotBehindBalancer> {
        let AcceptedSocket::Tcp(mut stream, balancer) = accepted.socket else {
            return Err(NotBehindBalancer::Untrusted);
        };
        let address = balancer.ip().to_canonical();
        if !self.balancers.iter().any(|network| network.contains(&address)) {
            return Err(NotBehindBalancer::Untrusted);
        }
        let client = proxy_header::read(&mut stream).await?;
        // A connection whose client is not named, such as a health check, has the load balancer's address, and no task by it.
        let task = client.and_then(|client| self.tasks.of_address(client.ip())).cloned();
        Ok(Accepted { socket: AcceptedSocket::Tcp(stream, client.unwrap_or(balancer)), task, ..accepted })
    }
}

/// A socket that connections are accepted from.
pub struct Listener {
    socket: Socket,
    at: ListenAt,
    /// The tasks of its clients.
    tasks: Arc<ListenerTasks>,
    /// The networks of the load balancers that its clients come through, if they do.
    balancers: Option<Arc<[IpNet]>>,
    /// The protocol that its clients speak to it.
    mode: ListenerMode,
    /// The socket file that this process created. It is removed on drop.
    file: Option<SocketFile>,
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// Sockets passed by the service manager.
#[derive(Default)]
pub struct Inherited {
    /// Listeners for sandboxes. They replace `proxy.listen`, unless there are none.
    pub proxy: Vec<Listener>,
    /// The admin listener. It replaces `admin.listen`.
    pub admin: Option<Listener>,
}

/// A second handle of a listening socket, for another process.
pub struct SharedSocket {
    /// The address in the configuration, whose port may be 0.
    pub configured: ListenAt,
    /// The socket.
    pub socket: OwnedFd,
    /// True if the file of the socket is kept when this process stops listening.
    keeps_file: Arc<AtomicBool>,
}

impl SharedSocket {
    /// Keeps the file of a Unix socket when this process stops listening: another process uses it.
    pub fn keep_file(&self) {
        self.keeps_file.store(true, Ordering::Relaxed);
    }
}

/// An accepted connection, before any handshake.
pub(crate) struct Accepted {
    pub(crate) socket: AcceptedSocket,
    /// The task that the listener knows.
    task: Option<TaskName>,
    /// The protocol that the client speaks to the proxy.
    mode: ListenerMode,
    /// The address that the client has connected to, if the connection was captured.
    original: Option<SocketAddr>,
}

/// The socket of an accepted connection.
pub(crate) enum AcceptedSocket {
    Tcp(TcpStream, SocketAddr),
    /// With the user id of the peer.
    Unix(UnixStream, u32),
}

/// The client's side of a connection, ready for HTTP.
pub(crate) enum Stream {
    Plain(ClientSocket),
    Tls(Box<TlsStream<ClientSocket>>),
}

/// A connection that is ready for the protocol of its listener.
pub(crate) struct Opened {
    pub(crate) stream: Stream,
    pub(crate) peer: Peer,
    pub(crate) watch: DisconnectWatch,
    pub(crate) mode: ListenerMode,
    /// The client has chosen HTTP/2.
    pub(crate) is_http2: bool,
    /// The name in the client's TLS handshake.
    pub(crate) server_name: Option<Host>,
}

/// The address of an open listener for sandboxes.
#[derive(Clone, Debug)]
pub struct ListenerAddress {
    /// The address, with the port that was assigned to it.
    pub at: ListenAt,
    /// The protocol of its clients.
    pub mode: ListenerMode,
    /// Clients connect to it without a load balancer.
    pub is_direct: bool,
}

impl fmt::Display for ListenerAddress {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.mode {
            ListenerMode::Proxy => self.at.fmt(f),
            ListenerMode::Socks5 => write!(f, "{} (socks5)", self.at),
            ListenerMode::Transparent => write!(f, "{} (transparent)", self.at),
            ListenerMode::Dns => write!(f, "{} (dns)", self.at),
        }
    }
}

impl Accepted {
    /// Returns the peer's identity as known before a handshake.
    pub(crate) fn peer(&self) -> Peer {
        let peer = match (&self.socket, &self.task) {
            (AcceptedSocket::Tcp(_, address), None) => Peer::tcp(*address),
            (AcceptedSocket::Tcp(_, address), Some(task)) => Peer::at_address(*address, task.clone()),
            (AcceptedSocket::Unix(_, uid), task) => Peer::unix(*uid, task.clone()),
        };
        match self.original {
            Some(original) => peer.captured_for(original),
            None => peer,
        }
    }

    /// Returns the socket of an HTTP client, if it does not expect TLS.
    pub(crate) fn into_plain(self, setup: &ConnectionSetup) -> Option<ClientSocket> {
        match self.socket {
            _ if self.mode != ListenerMode::Proxy => None,
            AcceptedSocket::Tcp(..) if setup.has_tls() => None,
            AcceptedSocket::Tcp(stream, _) => Some(stream.into()),
            AcceptedSocket::Unix(stream, _) => Some(stream.into()),
        }
    }

    /// Returns the source that the limits on unidentified connections apply to.
    pub(crate) fn source(&self) -> Source {
        match &self.socket {
            AcceptedSocket::Tcp(_, address) => address.ip().into(),
            AcceptedSocket::Unix(_, uid) => Source::Unix(*uid),
        }
    }
}

/// A Unix socket file, removed on drop if it is still the same file.
struct SocketFile {
    path: PathBuf,
    /// Another process uses it.
    is_kept: Arc<AtomicBool>,
    /// Device and inode. A file that has replaced this one is not removed.
    identity: (u64, u64),
}

impl SocketFile {
    fn of(path: &Path) -> io::Result<Self> {
        Ok(Self { path: path.to_owned(), is_kept: Arc::default(), identity: identity(path)? })
    }
}

fn identity(path: &Path) -> io::Result<(u64, u64)> {
    fs::symlink_metadata(path).map(|found| (found.dev(), found.ino()))
}

impl Drop for SocketFile {
    fn drop(&mut self) {
        let is_kept = self.is_kept.load(Ordering::Relaxed);
        if !is_kept && identity(&self.path).is_ok_and(|found| found == self.identity) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

impl Listener {
    /// Listens on an address. The file of a Unix socket is replaced only if no process listens on it. A new file gets
    /// the permissions `mode`.
    ///
    /// # Errors
    /// If the address is in use, or cannot be bound.
    pub async fn bind(at: &ListenAt, mode: u32) -> io::Result<Self> {
        match at {
            ListenAt::Tcp(address) => {
                let socket = if address.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
                // A restart does not wait for the end of TIME_WAIT of old connections.
                socket.set_reuseaddr(true)?;
                socket.bind(*address)?;
                Self::tcp(socket.listen(BACKLOG)?)
            }
            ListenAt::Unix(path) => {
                remove_unused(path)?;
                let socket = UnixListener::bind(path)?;
                let file = SocketFile::of(path)?;
                fs::set_permissions(path, fs::Permissions::from_mode(mode))?;
                Ok(Self { file: Some(file), ..Self::of(Socket::Unix(socket), at.clone()) })
            }
        }
    }

    /// Wraps a TCP socket that is already listening.
    ///
    /// # Errors
    /// If its local address cannot be read.
    pub fn tcp(socket: TcpListener) -> io::Result<Self> {
        let at = ListenAt::Tcp(socket.local_addr()?);
        Ok(Self::of(Socket::Tcp(socket), at))
    }

    /// Returns an HTTP proxy's listener that knows no client.
    fn of(socket: Socket, at: ListenAt) -> Self {
        Self { socket, at, tasks: Arc::default(), balancers: None, mode: ListenerMode::Proxy, file: None }
    }

    /// Wraps a Unix socket that is already listening. Its file is not removed.
    ///
    /// # Errors
    /// If its local address cannot be read.
    pub fn unix(socket: UnixListener) -> io::Result<Self> {
        let path = socket.local_addr()?.as_pathname().map(Path::to_owned).unwrap_or_default();
        Ok(Self::of(Socket::Unix(socket), ListenAt::Unix(path)))
    }

    /// Wraps a socket of the process that this one takes over from, which listens at the same configured address. The file of a
    /// Unix socket stays with that process until [`Self::own_file`].
    ///
    /// # Errors
    /// If it is no listening socket of that kind.
    pub fn taken_over(socket: OwnedFd, configured: &ListenAt) -> io::Result<Self> {
        // Other systems do not say it; there, the first accept fails.
        #[cfg(target_os = "linux")]
        if !rustix::net::sockopt::socket_acceptconn(&socket)? {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        match configured {
            ListenAt::Tcp(_) => {
                let socket = std::net::TcpListener::from(socket);
                socket.set_nonblocking(true)?;
                Self::tcp(TcpListener::from_std(socket)?)
            }
            ListenAt::Unix(path) => {
                let socket = std::os::unix::net::UnixListener::from(socket);
                socket.set_nonblocking(true)?;
                let file = SocketFile::of(path)?;
                file.is_kept.store(true, Ordering::Relaxed);
                Ok(Self { file: Some(file), ..Self::unix(UnixListener::from_std(socket)?)? })
            }
        }
    }

    /// Makes the file of a Unix socket this process's own: it gets the permissions `mode`, and is removed with the listener.
    ///
    /// # Errors
    /// If the permissions cannot be set.
    pub fn own_file(&self, mode: u32) -> io::Result<()> {
        let Some(file) = &self.file else { return Ok(()) };
        file.is_kept.store(false, Ordering::Relaxed);
        // Somebody may have removed or replaced it meanwhile.
        if identity(&file.path).is_ok_and(|found| found == file.identity) {
            fs::set_permissions(&file.path, fs::Permissions::from_mode(mode))?;
        }
        Ok(())
    }

    /// Returns a second handle of the socket.
    ///
    /// # Errors
    /// If there are too many descriptors.
    pub fn share(&self, configured: &ListenAt) -> io::Result<SharedSocket> {
        let socket = match &self.socket {
            Socket::Tcp(socket) => socket.as_fd().try_clone_to_owned()?,
            Socket::Unix(socket) => socket.as_fd().try_clone_to_owned()?,
        };
        let keeps_file = self.file.as_ref().map(|file| file.is_kept.clone()).unwrap_or_default();
        Ok(SharedSocket { configured: configured.clone(), socket, keeps_file })
    }

    /// Sets the tasks of its clients. A new listener has none.
    pub(crate) fn set_tasks(&mut self, tasks: ListenerTasks) {
        self.tasks = Arc::new(tasks);
    }

    /// Sets the clients that it has, and their protocol, as configured.
    ///
    /// # Errors
    /// If the process may not take connections to other addresses.
    pub(crate) fn configure(&mut self, configured: &ProxyListener) -> io::Result<()> {
        self.set_tasks(configured.tasks.clone());
        self.balancers = configured.balancers.clone().map(Into::into);
        self.mode = configured.mode;
        self.set_tproxy(configured.is_tproxy)
    }

    /// Lets TPROXY rules lead connections to other addresses to it. A socket that was passed with the option needs no privilege.
    ///
    /// # Errors
    /// Without the privilege; and if a passed socket has the option, and the configuration has not: its address does not limit who
    /// reaches it.
    #[cfg(target_os = "linux")]
    fn set_tproxy(&self, is_on: bool) -> io::Result<()> {
        let Socket::Tcp(listening) = &self.socket else { return Ok(()) };
        let socket = socket2::SockRef::from(listening);
        // The kernel has one option under two names.
        let is_v4 = listening.local_addr()?.is_ipv4();
        let current = if is_v4 { socket.ip_transparent_v4()? } else { socket.ip_transparent_v6()? };
        match (current, is_on) {
            (true, true) | (false, false) => return Ok(()),
            (true, false) => {
                return Err(io::Error::other(
                    "the passed socket takes connections to other addresses, and tproxy is not set",
                ));
            }
            (false, true) => {}
        }
        let set = if is_v4 { socket.set_ip_transparent_v4(true) } else { socket.set_ip_transparent_v6(true) };
        set.map_err(|error| match error.kind() {
            io::ErrorKind::PermissionDenied => io::Error::new(
                error.kind(),
                "tproxy needs CAP_NET_RAW, which does not count in a user namespace (systemd: PrivateUsers=no), or a socket of the \
                 service manager (systemd: Transparent=yes)",
            ),
            _ => error,
        })
    }

    /// There is no such listener: the configuration refuses it.
    #[cfg(not(target_os = "linux"))]
    fn set_tproxy(&self, is_on: bool) -> io::Result<()> {
        if is_on { Err(io::ErrorKind::Unsupported.into()) } else { Ok(()) }
    }

    /// Returns its address and its clients' protocol.
    pub(crate) fn address(&self) -> ListenerAddress {
        ListenerAddress { at: self.at.clone(), mode: self.mode, is_direct: self.balancers.is_none() }
    }

    /// Returns how the address of a client behind a load balancer is found, if clients come through one.
    pub(crate) fn behind_balancers(&self) -> Option<BehindBalancers> {
        let balancers = self.balancers.clone()?;
        Some(BehindBalancers { balancers, tasks: self.tasks.clone() })
    }

    /// Returns the address, with the port that was assigned to it.
    #[must_use]
    pub fn at(&self) -> &ListenAt {
        &self.at
    }

    /// Accepts a connection.
    pub(crate) async fn accept(&self) -> io::Result<Accepted> {
        match &self.socket {
            Socket::Tcp(socket) => {
                let (stream, address) = socket.accept().await?;
                socket_options::set(&stream);
                let is_captured = self.mode == ListenerMode::Transparent;
                let original = is_captured.then(|| original_address(&stream)).transpose()?;
                let owner = || {
                    let owner = match original {
                        Some(original) => peer_user::of_captured(address, original),
                        None => peer_user::of_connection(address, stream.local_addr().ok()?),
                    };
                    // A client that has reset this connection frees its port, and another user may have it by now.
                    owner.filter(|_| {
                        stream.peer_addr().is_ok() && stream.take_error().is_ok_and(|error| error.is_none())
                    })
                };
                // The address of a load balancer says nothing of its clients.
                let tasks = Some(&self.tasks).filter(|_| self.balancers.is_none());
                let of = |tasks: &Arc<ListenerTasks>| {
                    tasks.of_address(address.ip()).or_else(|| tasks.of_loopback_user(owner)).cloned()
                };
                let task = tasks.and_then(of);
                Ok(Accepted { socket: AcceptedSocket::Tcp(stream, address), task, mode: self.mode, original })
            }
            Socket::Unix(socket) => {
                let (stream, _) = socket.accept().await?;
                let uid = stream.peer_cred()?.uid();
                let task = self.tasks.of_user(uid).cloned();
                Ok(Accepted { socket: AcceptedSocket::Unix(stream, uid), task, mode: self.mode, original: None })
            }
        }
    }
}

/// Returns the address that a captured connection was made to.
///
/// A rule that redirects connections has the kernel keep it. Otherwise, as with routes that make every address local, it is the
/// socket's own.
///
/// # Errors
/// If the connection has ended.
fn original_address(stream: &TcpStream) -> io::Result<SocketAddr> {
    let own = stream.local_addr().map_err(|_| io::ErrorKind::ConnectionAborted)?;
    #[cfg(target_os = "linux")]
    let kept = {
        let socket = socket2::SockRef::from(stream);
        let is_v4 = own.ip().to_canonical().is_ipv4();
        let kept = if is_v4 { socket.original_dst_v4() } else { socket.original_dst_v6() };
        kept.ok().and_then(|kept| kept.as_socket())
    };
    #[cfg(not(target_os = "linux"))]
    let kept = None;
    let original = kept.unwrap_or(own);
    Ok(SocketAddr::new(original.ip().to_canonical(), original.port()))
}

/// Removes a socket file that no process listens on.
///
/// # Errors
/// If a process listens on it, the file is not a socket, or it cannot be removed.
fn remove_unused(path: &Path) -> io::Result<()> {
    match fs::symlink_metadata(path) {
        Ok(found) if found.file_type().is_socket() => match std::os::unix::net::UnixStream::connect(path) {
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => fs::remove_file(path),
            Ok(_) | Err(_) => Err(io::ErrorKind::AddrInUse.into()),
        },
        Ok(_) => Err(io::Error::new(io::ErrorKind::AlreadyExists, "a file that is not a socket exists at this path")),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(error) => Err(error),
    }
}

/// Sets up an accepted connection for HTTP: TLS handshake and peer identity.
pub(crate) struct ConnectionSetup {
    /// The TLS files and the configuration from them, which is replaced at a reload.
    tls: Option<(ProxyTls, RwLock<Arc<ServerConfig>>)>,
    /// When the certificate in use expires.
    certificate_end: RwLock<Option<OffsetDateTime>>,
}

impl ConnectionSetup {
    pub(crate) fn new(settings: &Proxy) -> Result<Self, ListenerTlsError> {
        let tls = match &settings.tls {
            None => None,
            Some(files) => Some((files.clone(), RwLock::new(server_config(files)?))),
        };
        let end = settings.tls.as_ref().and_then(|files| certificate_end(&files.cert));
        Ok(Self { tls, certificate_end: RwLock::new(end) })
    }

    /// Reads the certificate, the key and the revocation list again. After an error the old ones stay in use.
    pub(crate) fn renew(&self) -> Result<(), ListenerTlsError> {
        if let Some((files, config)) = &self.tls {
            let renewed = server_config(files)?;
            *config.write() = renewed;
            *self.certificate_end.write() = certificate_end(&files.cert);
        }
        Ok(())
    }

    /// Returns when the certificate of the TLS listeners expires, if there are any.
    pub(crate) fn certificate_end(&self) -> Option<OffsetDateTime> {
        *self.certificate_end.read()
    }

    /// Runs the TLS handshake, if the listener uses TLS. The caller limits its time.
    pub(crate) async fn open(&self, accepted: Accepted) -> io::Result<Opened> {
        let peer = accepted.peer();
        let mode = accepted.mode;
        let (socket, address) = match accepted.socket {
            AcceptedSocket::Unix(stream, _) => (ClientSocket::from(stream), None),
            AcceptedSocket::Tcp(stream, address) => (ClientSocket::from(stream), Some(address)),
        };
        let watch = socket.watch();
        let (Some((files, config)), Some(address), ListenerMode::Proxy) = (&self.tls, address, mode) else {
            let (is_http2, server_name) = (false, None);
            return Ok(Opened { stream: Stream::Plain(socket), peer, watch, mode, is_http2, server_name });
        };
        let config = config.read().clone();
        let stream = Box::new(TlsAcceptor::from(config).accept(socket).await?);
        let session = stream.get_ref().1;
        let is_http2 = session.alpn_protocol() == Some(b"h2");
        let server_name = session.server_name().and_then(|name| Host::parse(name).ok());
        if files.client_ca.is_none() {
            return Ok(Opened { stream: Stream::Tls(stream), peer, watch, mode, is_http2, server_name });
        }
        let leaf = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
        let names = leaf.map(listener::names).unwrap_or_default();
        let tasks = names.iter().map(|name| TaskName::new(name)).collect();
        let (stream, peer) = (Stream::Tls(stream), Peer::certified(address, tasks));
        Ok(Opened { stream, peer, watch, mode, is_http2, server_name })
    }

    fn has_tls(&self) -> bool {
        self.tls.is_some()
    }
}

fn server_config(files: &ProxyTls) -> Result<Arc<ServerConfig>, ListenerTlsError> {
    listener::server_config(&listener::PemFiles {
        cert: &files.cert,
        key: &files.key,
        client_ca: files.client_ca.as_deref(),
        crl: files.crl.as_deref(),
    })
}

macro_rules! with_inner {
    ($stream:expr, $inner:ident => $call:expr) => {
        match $stream.get_mut() {
            Stream::Plain($inner) => $call,
            Stream::Tls($inner) => $call,
        }
    };
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        with_inner!(self, inner => Pin::new(inner).poll_read(cx, buf))
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        with_inner!(self, inner => Pin::new(inner).poll_write(cx, buf))
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_inner!(self, inner => Pin::new(inner).poll_flush(cx))
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        with_inner!(self, inner => Pin::new(inner).poll_shutdown(cx))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        with_inner!(self, inner => Pin::new(inner).poll_write_vectored(cx, bufs))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(inner) => inner.is_write_vectored(),
            Self::Tls(inner) => inner.is_write_vectored(),
        }
    }
}

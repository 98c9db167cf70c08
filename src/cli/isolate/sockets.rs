//! The proxy's sockets in the command's network. They are opened inside, and passed to the proxy outside, which serves them without
//! being reachable in another way.

use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::process::ExitStatus;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::directory::RunDirectory;
use super::{DNS_PORT, PROXY, network};
use crate::model::name::TaskName;
use crate::policy::settings::{ListenAt, ListenerMode, ListenerTasks, ProxyListener};
use crate::socket_passing;

/// The name of the Unix socket in the run's directory over which the others are passed.
const SOCKET: &str = "sockets.sock";
/// The byte of the process outside: the proxy is ready, and the command may start.
const READY: u8 = 1;
/// How long the creation of the command's network may take.
const CREATED_WITHIN: Duration = Duration::from_secs(30);
/// The length of the queue of connections to accept.
const BACKLOG: i32 = 1024;

/// The ports of the command's network at which connections to other machines are captured. Without any, the command has to use the
/// proxy as such, and has no DNS.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct CapturedPorts(Vec<u16>);

impl CapturedPorts {
    /// The ports of HTTP and HTTPS, and that of SSH, whose refusal the log then has.
    const ALWAYS: [u16; 3] = [22, 80, 443];
    /// Maximum number of ports.
    const MAX: usize = 64;

    /// Returns the usual ports with those that integrations have.
    pub(in super::super) fn with(ports: impl IntoIterator<Item = u16>) -> Self {
        let mut all = Self::ALWAYS.to_vec();
        for port in ports {
            if all.len() < Self::MAX && !all.contains(&port) && ![DNS_PORT, PROXY.port()].contains(&port) {
                all.push(port);
            }
        }
        Self(all)
    }

    pub(super) fn listed(ports: &[u16]) -> Self {
        Self(ports.to_vec())
    }

    pub(super) fn list(&self) -> &[u16] {
        &self.0
    }

    /// Returns the listeners, in the order of their sockets. All of their clients are the command's.
    pub(in super::super) fn listeners(&self, task: &TaskName) -> Vec<ProxyListener> {
        let listener = |at, mode| ProxyListener {
            at: ListenAt::Tcp(at),
            key: "--isolate".to_owned(),
            is_own: true,
            tasks: ListenerTasks { all: Some(task.clone()), ..ListenerTasks::default() },
            balancers: None,
            mode,
        };
        let any = |port| SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
        let dns = (!self.0.is_empty()).then(|| listener(any(DNS_PORT), ListenerMode::Dns));
        let captured = self.0.iter().map(|port| listener(any(*port), ListenerMode::Transparent));
        [listener(PROXY, ListenerMode::Proxy)].into_iter().chain(dns).chain(captured).collect()
    }
}

/// Configures this network, and opens the sockets of [`CapturedPorts::listeners`].
pub(super) fn open(captured: &CapturedPorts) -> io::Result<Vec<OwnedFd>> {
    network::enable_loopback()?;
    let mut sockets = vec![bound(PROXY, Type::STREAM)?];
    if captured.0.is_empty() {
        return Ok(sockets);
    }
    let any: IpAddr = match network::lead_everything_here()? {
        true => Ipv6Addr::UNSPECIFIED.into(),
        false => Ipv4Addr::UNSPECIFIED.into(),
    };
    for kind in [Type::STREAM, Type::DGRAM] {
        sockets.push(bound(SocketAddr::new(any, DNS_PORT), kind)?);
    }
    for port in &captured.0 {
        sockets.push(bound(SocketAddr::new(any, *port), Type::STREAM)?);
    }
    Ok(sockets)
}

/// No options allow the command to share the address.
fn bound(at: SocketAddr, kind: Type) -> io::Result<OwnedFd> {
    let named = |error: io::Error| io::Error::new(error.kind(), format!("{at}: {error}"));
    let bind = || {
        let socket = Socket::new(Domain::for_address(at), kind, None)?;
        if at.is_ipv6() {
            socket.set_only_v6(false)?;
            // Answers come from whatever address was asked, and a route alone makes none of them an address of this machine.
            socket.set_freebind_v6(kind == Type::DGRAM)?;
        }
        socket.bind(&at.into())?;
        if kind == Type::STREAM {
            socket.listen(BACKLOG)?;
        }
        Ok(socket.into())
    };
    bind().map_err(named)
}

/// The connection to the process outside.
pub(super) struct Outside(StdUnixStream);

impl Outside {
    /// Connects to the process outside. Must be called outside the namespaces.
    pub(super) fn connect(directory: &OwnedFd) -> io::Result<Self> {
        StdUnixStream::connect(format!("/proc/self/fd/{}/{SOCKET}", directory.as_raw_fd())).map(Self)
    }

    /// Passes the sockets, and waits until the proxy is ready.
    pub(super) fn pass(mut self, sockets: &[OwnedFd]) -> io::Result<()> {
        let sockets: Vec<_> = sockets.iter().map(AsFd::as_fd).collect();
        socket_passing::send(&self.0, &[READY], &sockets)?;
        let mut ready = [0];
        self.0.read_exact(&mut ready)
    }
}

/// A command whose network exists, and which waits for its proxy.
pub(in super::super) struct WaitingCommand {
    child: Child,
    inside: UnixStream,
}

/// The reason why the command has no network.
pub(in super::super) enum NoNetwork {
    /// The process inside has said why, and has ended.
    Ended(ExitStatus),
    Failed(io::Error),
}

impl From<io::Error> for NoNetwork {
    fn from(error: io::Error) -> Self {
        Self::Failed(error)
    }
}

impl WaitingCommand {
    /// Starts the process inside, and returns the sockets of its network.
    pub(in super::super) async fn spawn(
        mut command: Command,
        directory: &RunDirectory,
    ) -> Result<(Self, Vec<OwnedFd>), NoNetwork> {
        let listener = UnixListener::bind(directory.path().join(SOCKET))?;
        let mut child = command.spawn()?;
        let connected = async {
            let (inside, _) = listener.accept().await?;
            inside.readable().await?;
            let (_, sockets) =
                inside.async_io(tokio::io::Interest::READABLE, || socket_passing::receive(&inside)).await?;
            Ok::<_, io::Error>((inside, sockets))
        };
        let connected = tokio::select! {
            connected = timeout(CREATED_WITHIN, connected) => connected.map_err(io::Error::from)?,
            ended = child.wait() => return Err(NoNetwork::Ended(ended?)),
        };
        match connected {
            Ok((inside, sockets)) => Ok((Self { child, inside }, sockets)),
            // It has closed the connection because it ends.
            Err(_) => Err(NoNetwork::Ended(child.wait().await?)),
        }
    }

    /// Starts the command.
    pub(in super::super) async fn start(mut self) -> io::Result<Child> {
        self.inside.write_all(&[READY]).await?;
        Ok(self.child)
    }
}

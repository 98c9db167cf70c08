//! The proxy's sockets in the command's network. They are opened inside, and passed to the proxy outside, which serves them without
//! being reachable in another way.

use std::fmt::Display;
use std::io::{self, Read};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream as StdUnixStream;
use std::time::Duration;

use socket2::{Domain, Socket, Type};
use tokio::io::AsyncWriteExt;
use tokio::net::{UnixListener, UnixStream};
use tokio::process::{Child, Command};
use tokio::time::timeout;

use super::directory::RunDirectory;
use super::{DNS_PORT, PROXY};
use crate::isolation::network;
use crate::model::name::TaskName;
use crate::policy::settings::{ListenAt, ListenerMode, ListenerTasks, ProxyListener};
use crate::socket_passing;

/// The name of the Unix socket in the run's directory over which the others are passed.
const SOCKET: &str = "sockets.sock";
/// The byte of the process outside: the proxy is ready, and the command may start.
const READY: u8 = 1;
/// How long the creation of the command's network may take.
const CREATED_WITHIN: Duration = Duration::from_secs(30);
/// How long the process inside may take to end after it has closed its connection.
const ENDED_WITHIN: Duration = Duration::from_secs(5);
/// The length of the queue of connections to accept.
const BACKLOG: i32 = 1024;

/// The ports of the command's network at which connections to other machines are captured. Without any, the command has to use the
/// proxy as such, and has no DNS.
#[derive(Clone, Debug, Default)]
pub(in super::super) struct CapturedPorts {
    ports: Vec<u16>,
    /// The ports of allowed names that are not captured.
    left_out: Vec<u16>,
}

impl CapturedPorts {
    /// The ports of HTTP and HTTPS, and that of SSH, whose refusal the log then has.
    const ALWAYS: [u16; 3] = [22, 80, 443];
    /// Maximum number of ports.
    const MAX: usize = 64;

    /// Returns the usual ports with those that integrations have.
    pub(in super::super) fn with(ports: impl IntoIterator<Item = u16>) -> Self {
        let mut all = Self { ports: Self::ALWAYS.to_vec(), left_out: Vec::new() };
        for port in ports {
            let is_known = all.ports.contains(&port) || all.left_out.contains(&port);
            if all.ports.len() >= Self::MAX || [DNS_PORT, PROXY.port()].contains(&port) {
                all.left_out.extend((!is_known).then_some(port));
            } else {
                all.ports.extend((!is_known).then_some(port));
            }
        }
        all
    }

    pub(super) fn listed(ports: &[u16]) -> Self {
        Self { ports: ports.to_vec(), left_out: Vec::new() }
    }

    pub(super) fn list(&self) -> &[u16] {
        &self.ports
    }

    /// Returns the ports of allowed names that are not captured, because the network has other sockets there, or too many.
    pub(in super::super) fn left_out(&self) -> &[u16] {
        &self.left_out
    }

    /// Returns the listeners, in the order of their sockets. All of their clients are the command's.
    pub(in super::super) fn listeners(&self, task: &TaskName) -> Vec<ProxyListener> {
        let listener = |at, mode| ProxyListener {
            at: ListenAt::Tcp(at),
            key: "--isolate".to_owned(),
            is_own: true,
            tasks: ListenerTasks { all: Some(task.clone()), ..ListenerTasks::default() },
            balancers: None,
            is_tproxy: false,
            mode,
        };
        let any = |port| SocketAddr::new(Ipv6Addr::UNSPECIFIED.into(), port);
        let dns = (!self.ports.is_empty()).then(|| listener(any(DNS_PORT), ListenerMode::Dns));
        let captured = self.ports.iter().map(|port| listener(any(*port), ListenerMode::Transparent));
        [listener(PROXY, ListenerMode::Proxy)].into_iter().chain(dns).chain(captured).collect()
    }
}

/// Configures this network, and opens the sockets of [`CapturedPorts::listeners`].
pub(super) fn open(captured: &CapturedPorts) -> io::Result<Vec<OwnedFd>> {
    network::enable_loopback()?;
    let mut sockets = vec![bound(PROXY, Type::STREAM)?];
    if captured.ports.is_empty() {
        return Ok(sockets);
    }
    let routed = network::lead_everything_here();
    let routed = routed.map_err(|error| {
        io::Error::new(error.kind(), format!("the route for all addresses: {error}; --proxy-only needs none"))
    });
    let any: IpAddr = match routed? {
        true => Ipv6Addr::UNSPECIFIED.into(),
        false => Ipv4Addr::UNSPECIFIED.into(),
    };
    for kind in [Type::STREAM, Type::DGRAM] {
        sockets.push(bound(SocketAddr::new(any, DNS_PORT), kind)?);
    }
    for port in &captured.ports {
        sockets.push(bound(SocketAddr::new(any, *port), Type::STREAM)?);
    }
    Ok(sockets)
}

/// No options allow the command to share the address.
fn bound(at: SocketAddr, kind: Type) -> io::Result<OwnedFd> {
    let named = in_step(at);
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

/// Adds to an error what was done.
fn in_step(step: impl Display) -> impl FnOnce(io::Error) -> io::Error {
    move |error| io::Error::new(error.kind(), format!("{step}: {error}"))
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

/// The reason why the command has not been started.
pub(in super::super) enum NotStarted {
    /// The process inside has ended, and has said why.
    Ended,
    Failed(io::Error),
}

impl WaitingCommand {
    /// Starts the process inside, and returns the sockets of its network. Dropping this kills the process.
    pub(in super::super) async fn spawn(
        mut command: Command,
        directory: &RunDirectory,
    ) -> Result<(Self, Vec<OwnedFd>), NotStarted> {
        let listener = UnixListener::bind(directory.path().join(SOCKET));
        let listener = listener.map_err(in_step("the directory of the run")).map_err(NotStarted::Failed)?;
        let mut child = command.spawn().map_err(in_step("starting a process")).map_err(NotStarted::Failed)?;
        let passed = async {
            let (inside, _) = listener.accept().await?;
            let (_, sockets) =
                inside.async_io(tokio::io::Interest::READABLE, || socket_passing::receive(&inside)).await?;
            Ok::<_, io::Error>((inside, sockets))
        };
        let error = tokio::select! {
            passed = timeout(CREATED_WITHIN, passed) => match passed {
                Ok(Ok((inside, sockets))) => return Ok((Self { child, inside }, sockets)),
                Ok(Err(error)) => error,
                Err(_) => io::Error::new(io::ErrorKind::TimedOut, "it took too long"),
            },
            ended = child.wait() => return Err(match ended {
                Ok(status) if status.code().is_some() => NotStarted::Ended,
                _ => NotStarted::Failed(io::Error::other("the process in the command's network was killed")),
            }),
        };
        // It has closed the connection because it ends.
        if error.kind() == io::ErrorKind::UnexpectedEof && timeout(ENDED_WITHIN, child.wait()).await.is_ok() {
            return Err(NotStarted::Ended);
        }
        Err(NotStarted::Failed(in_step("the command's network")(error)))
    }

    /// Starts the command.
    pub(in super::super) async fn start(mut self) -> Result<Child, NotStarted> {
        let started = self.inside.write_all(&[READY]).await;
        started.map_err(in_step("the process in the command's network has ended")).map_err(NotStarted::Failed)?;
        Ok(self.child)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_that_are_not_captured_are_known() {
        let captured = CapturedPorts::with([443, 8443, 53, 3128, 8443].into_iter().chain(9000..9100));
        assert_eq!(captured.list()[..5], [22, 80, 443, 8443, 9000]);
        assert_eq!(captured.list().len(), CapturedPorts::MAX);
        assert_eq!(captured.left_out()[..3], [53, 3128, 9060]);
        let listeners = captured.listeners(&TaskName::new("t"));
        // The proxy and DNS.
        assert_eq!(listeners.len(), CapturedPorts::MAX + 2);
    }
}

//! The peer of a client connection, as identified by its listener before the first byte of HTTP.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::name::TaskName;

/// The client's end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    from: From,
    /// The tasks that the peer may act as, if the listener has authenticated it.
    tasks: Option<Arc<[TaskName]>>,
    /// Nothing but the connection says which task it is.
    is_known_by_address: bool,
    /// The address that it has connected to, if its connection was captured.
    original: Option<SocketAddr>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum From {
    Tcp(SocketAddr),
    Unix(u32),
}

/// The network that a peer is in, judging by its address.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerNetwork {
    /// This machine, over TCP.
    Loopback,
    /// A private or link-local network.
    Private,
    /// A public address.
    Public,
    /// This machine, over a Unix socket.
    Unix,
}

impl PeerNetwork {
    /// Returns the text in the audit log.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Loopback => "loopback",
            Self::Private => "private",
            Self::Public => "public",
            Self::Unix => "unix",
        }
    }
}

impl Peer {
    /// Creates a peer with an address and no authentication.
    #[must_use]
    pub fn tcp(address: SocketAddr) -> Self {
        Self { from: From::Tcp(address), tasks: None, is_known_by_address: false, original: None }
    }

    /// Creates a peer that may act only as this task, because of the listener that it has reached, or of its network.
    #[must_use]
    pub fn at_address(address: SocketAddr, task: TaskName) -> Self {
        Self { tasks: Some([task].into()), is_known_by_address: true, ..Self::tcp(address) }
    }

    /// Creates a peer with a client certificate for these tasks. It may act only as one of them.
    #[must_use]
    pub fn certified(address: SocketAddr, tasks: Vec<TaskName>) -> Self {
        Self { tasks: Some(tasks.into()), ..Self::tcp(address) }
    }

    /// Creates a peer for a process of this user on this machine. With a task, it may act only as that task.
    #[must_use]
    pub fn unix(uid: u32, task: Option<TaskName>) -> Self {
        let tasks = task.map(|task| [task].into());
        Self { from: From::Unix(uid), tasks, is_known_by_address: false, original: None }
    }

    /// Adds the address that the peer has connected to. Its connection was captured.
    #[must_use]
    pub fn captured_for(self, original: SocketAddr) -> Self {
        Self { original: Some(original), ..self }
    }

    /// Returns the address that the peer has connected to, if its connection was captured.
    #[must_use]
    pub fn original(&self) -> Option<SocketAddr> {
        self.original
    }

    /// Returns the peer's address, or `None` on a Unix socket.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        match &self.from {
            From::Tcp(address) => Some(address.ip().to_canonical()),
            From::Unix(_) => None,
        }
    }

    /// Returns the network that the peer is in.
    #[must_use]
    pub fn network(&self) -> PeerNetwork {
        let From::Tcp(address) = &self.from else { return PeerNetwork::Unix };
        let is_near = match address.ip().to_canonical() {
            address if address.is_loopback() => return PeerNetwork::Loopback,
            IpAddr::V4(address) => address.is_private() || address.is_link_local(),
            IpAddr::V6(address) => address.is_unique_local() || address.is_unicast_link_local(),
        };
        if is_near { PeerNetwork::Private } else { PeerNetwork::Public }
    }

    /// Returns true if nothing but the connection says which task the peer is. Every program that can open one is that
    /// task, web pages in a browser included.
    #[must_use]
    pub fn is_known_by_address(&self) -> bool {
        self.is_known_by_address
    }

    /// Returns the tasks that the peer may act as, or `None` if the listener has not authenticated it and a token must.
    #[must_use]
    pub fn tasks(&self) -> Option<&[TaskName]> {
        self.tasks.as_deref()
    }
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.from {
            From::Tcp(address) => address.fmt(f),
            From::Unix(uid) => write!(f, "unix:{uid}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_address_determines_the_network() {
        let rows = [
            ("127.0.0.1:1", PeerNetwork::Loopback),
            ("[::1]:1", PeerNetwork::Loopback),
            ("[::ffff:127.0.0.1]:1", PeerNetwork::Loopback),
            ("10.1.2.3:1", PeerNetwork::Private),
            ("[::ffff:192.168.0.1]:1", PeerNetwork::Private),
            ("169.254.1.1:1", PeerNetwork::Private),
            ("[fd00::1]:1", PeerNetwork::Private),
            ("[fe80::1]:1", PeerNetwork::Private),
            ("192.0.2.1:1", PeerNetwork::Public),
            ("[2001:db8::1]:1", PeerNetwork::Public),
        ];
        for (address, want) in rows {
            assert_eq!(Peer::tcp(address.parse().unwrap()).network(), want, "{address}");
        }
        assert_eq!(Peer::unix(0, None).network(), PeerNetwork::Unix);
    }
}

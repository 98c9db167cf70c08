//! The peer of a connection, and its identity as known from the listener.

use std::fmt;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;

use super::name::TaskName;

/// A client's end of a connection.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Peer {
    from: From,
    /// The tasks that it may be, where the listener vouches for it.
    tasks: Option<Arc<[TaskName]>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
enum From {
    Tcp(SocketAddr),
    Unix(u32),
}

/// Where a peer is, as far as its address tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PeerNetwork {
    /// This machine, over TCP.
    Loopback,
    /// The same network, or one that is nobody's in particular.
    Private,
    /// Anywhere.
    Public,
    /// This machine, over a Unix socket.
    Unix,
}

impl PeerNetwork {
    /// As the audit log has it.
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
    /// A peer of whom nothing but the address is known.
    #[must_use]
    pub fn tcp(address: SocketAddr) -> Self {
        Self { from: From::Tcp(address), tasks: None }
    }

    /// A peer whose certificate bears the names of tasks. It is none but one of these.
    #[must_use]
    pub fn certified(address: SocketAddr, tasks: Vec<TaskName>) -> Self {
        Self { from: From::Tcp(address), tasks: Some(tasks.into()) }
    }

    /// A process on this machine, of this user. With a task, it is none but this one.
    #[must_use]
    pub fn unix(uid: u32, task: Option<TaskName>) -> Self {
        Self { from: From::Unix(uid), tasks: task.map(|task| [task].into()) }
    }

    /// Its address; none of a process on this machine that comes over a Unix socket.
    #[must_use]
    pub fn address(&self) -> Option<IpAddr> {
        match &self.from {
            From::Tcp(address) => Some(address.ip().to_canonical()),
            From::Unix(_) => None,
        }
    }

    /// Where it is.
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

    /// The tasks that it may be; none if the listener does not vouch for it, and a token has to.
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
    fn an_address_tells_where_a_peer_is() {
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

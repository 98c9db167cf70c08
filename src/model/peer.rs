//! Where a connection comes from, and what its listener knows of it before the first byte of HTTP.

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

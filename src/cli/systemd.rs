//! The protocol between a service manager and the daemon: passed sockets and state notifications (sd_listen_fds(3),
//! sd_notify(3)).

use std::io;

use std::net::TcpListener as StdTcpListener;
use std::os::unix::net::UnixListener as StdUnixListener;

use listenfd::ListenFd;
use sd_notify::NotifyState;
use tokio::net::{TcpListener, UnixListener};

use crate::flow::listener::{Inherited, Listener};

/// The name of the admin socket. All other inherited sockets are proxy listeners.
const ADMIN_SOCKET: &str = "admin";

/// The sockets that the service manager has opened for the daemon, with their names. Programs that the daemon starts do not
/// get them.
pub(super) struct Passed(Vec<(String, PassedSocket)>);

enum PassedSocket {
    Tcp(StdTcpListener),
    Unix(StdUnixListener),
}

/// Takes the sockets that the service manager has opened for the daemon.
///
/// # Errors
/// One of them is not a listening stream socket.
pub(super) fn take_sockets() -> io::Result<Passed> {
    let names = std::env::var("LISTEN_FDNAMES").unwrap_or_default();
    let mut names = names.split(':');
    let mut sockets = ListenFd::from_env();
    let mut passed = Vec::new();
    for at in 0..sockets.len() {
        let name = names.next().unwrap_or_default();
        let socket = take_socket(&mut sockets, at)
            .map_err(|error| io::Error::new(error.kind(), format!("the inherited socket {at} ({name:?}): {error}")))?;
        passed.push((name.to_owned(), socket));
    }
    Ok(Passed(passed))
}

fn take_socket(sockets: &mut ListenFd, at: usize) -> io::Result<PassedSocket> {
    if let Ok(Some(socket)) = sockets.take_tcp_listener(at) {
        socket.set_nonblocking(true)?;
        return Ok(PassedSocket::Tcp(socket));
    }
    let socket = sockets.take_unix_listener(at)?.ok_or(io::ErrorKind::NotFound)?;
    socket.set_nonblocking(true)?;
    Ok(PassedSocket::Unix(socket))
}

impl Passed {
    /// Returns the listeners of the daemon's runtime.
    ///
    /// # Errors
    /// One of them cannot be used, or two are for the admin listener.
    pub(super) fn into_listeners(self) -> io::Result<Inherited> {
        let mut inherited = Inherited::default();
        for (name, socket) in self.0 {
            let listener = match socket {
                PassedSocket::Tcp(socket) => Listener::tcp(TcpListener::from_std(socket)?),
                PassedSocket::Unix(socket) => Listener::unix(UnixListener::from_std(socket)?),
            };
            let listener = listener
                .map_err(|error| io::Error::new(error.kind(), format!("the inherited socket {name:?}: {error}")))?;
            if name != ADMIN_SOCKET {
                inherited.proxy.push(listener);
            } else if inherited.admin.replace(listener).is_some() {
                return Err(io::Error::other("two inherited sockets are named \"admin\""));
            }
        }
        Ok(inherited)
    }
}

/// Reports that the daemon is ready.
pub(super) fn ready(status: &str) {
    notify(&[NotifyState::Ready, NotifyState::Status(status)]);
}

/// Reports that the daemon is reloading its configuration. [`ready`] reports the end of the reload.
pub(super) fn reloading() {
    match NotifyState::monotonic_usec_now() {
        Ok(now) => notify(&[NotifyState::Reloading, now]),
        Err(error) => tracing::warn!(%error, "cannot notify the service manager of the reload"),
    }
}

/// Reports that the daemon is finishing the exchanges in flight before it stops.
pub(super) fn stopping() {
    notify(&[NotifyState::Stopping]);
}

/// Notifies the service manager, if it expects notifications.
fn notify(states: &[NotifyState<'_>]) {
    if let Err(error) = sd_notify::notify(states) {
        tracing::warn!(%error, "cannot notify the service manager");
    }
}

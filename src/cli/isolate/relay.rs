//! Relays connections from the loopback inside to the proxy's Unix socket outside.

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FileType, Mode, OFlags};
use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;

/// The maximum number of concurrent connections. Each uses two descriptors of the usual limit of 1024. Further ones
/// wait in the listener's backlog.
const MAX_CONNECTIONS: usize = 400;

/// The proxy's socket, opened before the command starts. It has no path.
pub(super) struct Proxy {
    socket: OwnedFd,
    /// The directory of this process's open files, in the file system that shows them.
    open_files: OwnedFd,
}

impl Proxy {
    pub(super) fn open(directory: &OwnedFd, name: &str) -> io::Result<Self> {
        let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let socket = rustix::fs::openat(directory, name, flags, Mode::empty())?;
        let kind = FileType::from_raw_mode(rustix::fs::fstat(&socket)?.st_mode);
        if kind != FileType::Socket {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a socket"));
        }
        let open_files =
            rustix::fs::open("/proc/self/fd", OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        Ok(Self { socket, open_files })
    }
}

pub(super) async fn run(listener: TcpListener, proxy: Proxy) -> io::Result<Infallible> {
    // The file system that is now mounted on `/proc` does not have this process.
    rustix::process::fchdir(&proxy.open_files)?;
    let socket: Arc<Path> = Path::new(&proxy.socket.as_raw_fd().to_string()).into();
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let slot = slots.clone().acquire_owned().await;
        match listener.accept().await {
            Ok((client, _)) => {
                let socket = socket.clone();
                tokio::spawn(async move {
                    relay(client, &socket).await;
                    drop(slot);
                });
            }
            // The usual cause is a lack of descriptors, which ends when connections close.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Relays a connection until both sides have ended it. The proxy enforces all timeouts. An error on one side closes
/// both.
async fn relay(mut client: TcpStream, socket: &Path) {
    let _ = client.set_nodelay(true);
    if let Ok(mut proxy) = UnixStream::connect(socket).await {
        let _ = copy_bidirectional(&mut client, &mut proxy).await;
    }
}

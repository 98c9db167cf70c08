//! Relays connections from the loopback inside to the proxy's Unix socket outside.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;

/// The maximum number of concurrent connections. Each uses two descriptors of the usual limit of 1024. Further ones
/// wait in the listener's backlog.
const MAX_CONNECTIONS: usize = 400;

pub(super) async fn run(listener: TcpListener, socket: &'static Path) -> Infallible {
    let slots = Arc::new(Semaphore::new(MAX_CONNECTIONS));
    loop {
        let slot = slots.clone().acquire_owned().await;
        match listener.accept().await {
            Ok((client, _)) => {
                tokio::spawn(async move {
                    relay(client, socket).await;
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

//! Relays bytes from the loopback inside to the proxy's socket outside, without inspecting them.

use std::convert::Infallible;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::copy_bidirectional;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::Semaphore;

/// Maximum number of connections, with two of the usual 1024 descriptors each. Further ones wait in the listener's
/// queue.
const MOST: usize = 400;

pub(super) async fn run(listener: TcpListener, socket: &'static Path) -> Infallible {
    let seats = Arc::new(Semaphore::new(MOST));
    loop {
        let seat = seats.clone().acquire_owned().await;
        match listener.accept().await {
            Ok((client, _)) => {
                tokio::spawn(async move {
                    carry(client, socket).await;
                    drop(seat);
                });
            }
            // Usually there are no descriptors left until a connection ends.
            Err(_) => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    }
}

/// Relays until both sides have ended. The proxy limits the duration. An error on one side closes both.
async fn carry(mut client: TcpStream, socket: &Path) {
    let _ = client.set_nodelay(true);
    if let Ok(mut proxy) = UnixStream::connect(socket).await {
        let _ = copy_bidirectional(&mut client, &mut proxy).await;
    }
}

//! Takes connections, up to the limit, and hands each to its own task.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::AsyncWriteExt;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::time::timeout;

use super::Services;
use super::connection::{self, Client};
use super::io::Impatient;
use super::respond;
use crate::model::refusal::Fail;
use crate::policy::rule::Timeouts;

/// Connections over the limit that are told so at a time; the others are just closed.
const TOLD_AT_ONCE: usize = 64;
/// After an error such as EMFILE, which passes only when others close something.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Accepts until the daemon drains.
pub(super) async fn run(listener: TcpListener, services: Arc<Services>, connections: Arc<Semaphore>) {
    let telling = Arc::new(Semaphore::new(TOLD_AT_ONCE));
    loop {
        let accepted = tokio::select! {
            accepted = listener.accept() => accepted,
            () = services.drain.cancelled() => return,
        };
        match accepted {
            Ok((stream, peer)) => match connections.clone().try_acquire_owned() {
                Ok(permit) => {
                    let client = Client { services: services.clone(), peer, _permit: permit };
                    services.tracker.spawn(serve(client, stream));
                }
                Err(_) => {
                    if let Ok(permit) = telling.clone().try_acquire_owned() {
                        let services = services.clone();
                        tokio::spawn(async move {
                            overloaded(&services, stream, peer).await;
                            drop(permit);
                        });
                    }
                }
            },
            Err(error) => {
                if is_about_the_listener(&error) {
                    tracing::warn!(%error, "cannot accept connections for now");
                    tokio::time::sleep(BACK_OFF).await;
                }
            }
        }
    }
}

async fn serve(client: Client, stream: TcpStream) {
    // Latency matters more than packets; a stream that cannot take the option still works.
    let _ = stream.set_nodelay(true);
    let stream = Impatient::new(stream, Timeouts::default().idle);
    let abort = client.services.abort.clone();
    abort.run_until_cancelled(connection::serve(Arc::new(client), stream)).await;
}

async fn overloaded(services: &Services, mut stream: TcpStream, peer: SocketAddr) {
    let record = services.record(peer);
    let words = respond::raw(Fail::Overloaded.into(), record);
    let told = async {
        stream.write_all(&words).await?;
        stream.shutdown().await?;
        // A close with unread bytes would reset the connection and take our words with it.
        tokio::io::copy(&mut stream, &mut tokio::io::sink()).await
    };
    let _ = timeout(Duration::from_secs(1), told).await;
}

/// Errors of the connection that was to be accepted are no concern of the next one.
fn is_about_the_listener(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

//! Accepts connections up to the limit, and serves each on a task of its own.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::time::{Instant, timeout, timeout_at};

use super::Services;
use super::accept_queue::{AcceptQueue, QueueStep};
use super::admission::Slot;
use super::caller_connections::ConnectionSlots;
use super::connection::{self, Client};
use super::io::{Linger, WriteTimeout};
use super::listener::{Accepted, Listener, Opened};
use super::respond;
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Fail};
use crate::policy::plan::Timeouts;

/// Connections over the limit that are told so at a time; the others are just closed.
const TOLD_AT_ONCE: usize = 64;
/// After an error such as EMFILE, which passes only when others close something.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Accepts until the daemon drains. It waits for no single connection.
pub(crate) async fn run(listener: Listener, services: Arc<Services>, lobby: Arc<AcceptQueue<Accepted>>) {
    let telling = Arc::new(Semaphore::new(TOLD_AT_ONCE));
    loop {
        let accepted = tokio::select! {
            biased;
            () = services.drain.cancelled() => return,
            step = lobby.next() => {
                take(&services, step, &telling);
                continue;
            }
            accepted = listener.accept() => accepted,
        };
        match accepted {
            Ok(accepted) => lobby.enqueue(accepted.source(), accepted),
            Err(error) => {
                if is_about_the_listener(&error) {
                    tracing::warn!(%error, "cannot accept connections for now");
                    tokio::time::sleep(BACK_OFF).await;
                }
            }
        }
    }
}

fn take(services: &Arc<Services>, step: QueueStep<Accepted>, telling: &Arc<Semaphore>) {
    match step {
        QueueStep::Serve(accepted, slot) => {
            services.tracker.spawn(serve(services.clone(), accepted, slot.into()));
        }
        QueueStep::Close(accepted) => closed_for_another(services, &services.connection_setup.peer(&accepted)),
        QueueStep::Refuse(accepted) => {
            if let Ok(permit) = telling.clone().try_acquire_owned() {
                let services = services.clone();
                tokio::spawn(async move {
                    overloaded(&services, accepted).await;
                    drop(permit);
                });
            }
        }
    }
}

fn closed_for_another(services: &Services, peer: &Peer) {
    let mut record = services.record(peer);
    record.rule("connection: unidentified, closed for a newer one");
    record.failed(Fail::Overloaded.into());
}

/// Serves a connection for as long as it may have its slot.
async fn serve(services: Arc<Services>, accepted: Accepted, slot: Arc<Slot>) {
    let peer = services.connection_setup.peer(&accepted);
    tokio::select! {
        () = services.abort.cancelled() => {}
        () = slot.evicted() => closed_for_another(&services, &peer),
        () = slot.overdue() => {}
        () = served(&services, accepted, &slot) => {}
    }
}

async fn served(services: &Arc<Services>, accepted: Accepted, slot: &Arc<Slot>) {
    let peer = services.connection_setup.peer(&accepted);
    let handshake = Instant::now() + services.settings.proxy.handshake_timeout;
    let handshake = slot.deadline().map_or(handshake, |deadline| deadline.min(handshake));
    let Opened { stream, peer, watch } = match timeout_at(handshake, services.connection_setup.open(accepted)).await {
        Ok(Ok(opened)) => opened,
        Ok(Err(error)) => {
            let mut record = services.record(&peer);
            record.rule(format!("client handshake: {error}"));
            return record.failed(Deny::CallerUnknown.into());
        }
        Err(_) => return services.record(&peer).failed(Deny::HeaderTimeout.into()),
    };
    let stream = WriteTimeout::new(stream, Timeouts::default().idle);
    let client = Client {
        services: services.clone(),
        peer,
        held: ConnectionSlots::default(),
        slot: slot.clone(),
        watch,
        unidentified: AtomicU32::new(0),
    };
    connection::serve(Arc::new(client), stream).await;
}

/// Says why in HTTP, if it can be said without a handshake.
async fn overloaded(services: &Services, accepted: Accepted) {
    let words = respond::raw(Fail::Overloaded.into(), services.record(&services.connection_setup.peer(&accepted)));
    let _ = match accepted {
        Accepted::Tcp(_, _) if services.connection_setup.has_tls() => return,
        Accepted::Tcp(stream, _) => timeout(Duration::from_secs(1), tell(stream, &words)).await,
        Accepted::Unix(stream, _) => timeout(Duration::from_secs(1), tell(stream, &words)).await,
    };
}

async fn tell(mut stream: impl AsyncRead + AsyncWrite + Unpin, words: &[u8]) -> io::Result<()> {
    stream.write_all(words).await?;
    stream.shutdown().await?;
    let mut linger = Linger::new();
    poll_fn(|cx| linger.poll(cx, |cx, out| Pin::new(&mut stream).poll_read(cx, out))).await;
    Ok(())
}

/// Errors of the connection that was to be accepted are no concern of the next one.
fn is_about_the_listener(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

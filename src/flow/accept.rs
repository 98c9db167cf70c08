//! Accepts connections up to the limit, and serves each on its own task.

use std::future::poll_fn;
use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::AtomicU32;
use std::time::Duration;

use futures_util::future::OptionFuture;
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{Instant, timeout, timeout_at};

use super::Services;
use super::caller_connections::ConnectionSlots;
use super::captured;
use super::client::Client;
use super::connection;
use super::http2_connection;
use super::io::{Linger, WriteTimeout};
use super::listener::{Accepted, BehindBalancers, Listener, Opened};
use super::respond;
use super::socks;
use crate::admission::Slot;
use crate::admission::queue::{AcceptQueue, QueueStep};
use crate::fair_queue::Membership;
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Fail};
use crate::policy::plan::Timeouts;
use crate::policy::settings::ListenerMode;

/// Maximum number of concurrent overload responses. Further connections over the limit are closed without one.
const MAX_OVERLOAD_RESPONSES: usize = 64;
/// Pause after an error such as EMFILE, which ends only when other connections close.
const BACK_OFF: Duration = Duration::from_millis(50);

/// Accepts connections until the daemon drains or is taken over. No single connection can block it.
pub(crate) async fn run(listener: Listener, services: Arc<Services>, queue: Arc<AcceptQueue<Accepted>>) {
    let response_permits = Arc::new(Semaphore::new(MAX_OVERLOAD_RESPONSES));
    let behind = listener.behind_balancers().map(Arc::new);
    let mut listener = Some(listener);
    // Connections whose load balancer has not named the client yet. They end with this.
    let mut unnamed = JoinSet::new();
    while listener.is_some() || !queue.is_empty() || !unnamed.is_empty() {
        let accepted = tokio::select! {
            biased;
            () = services.drain.cancelled() => return,
            step = queue.next() => {
                handle_step(&services, step, &response_permits);
                continue;
            }
            // Accepted connections are served. The new process accepts the others.
            () = services.last_requests.cancelled(), if listener.is_some() => {
                listener = None;
                continue;
            }
            Some(named) = unnamed.join_next() => {
                if let Ok(Some(accepted)) = named {
                    queue.enqueue(Accepted::source(&accepted), accepted);
                }
                continue;
            }
            Some(accepted) = OptionFuture::from(listener.as_ref().map(Listener::accept)) => accepted,
        };
        match (accepted, &behind) {
            (Ok(accepted), Some(_)) if !queue.has_room_for(unnamed.len()) => {
                let mut record = services.record(&accepted.peer());
                record.rule("connection: too many have no PROXY header yet");
                record.failed(Fail::Overloaded.into());
            }
            (Ok(accepted), Some(behind)) => {
                unnamed.spawn(identify(services.clone(), behind.clone(), accepted));
            }
            (Ok(accepted), None) => queue.enqueue(accepted.source(), accepted),
            (Err(error), _) => {
                if is_listener_error(&error) {
                    tracing::warn!(%error, "cannot accept connections for now");
                    tokio::time::sleep(BACK_OFF).await;
                }
            }
        }
    }
}

/// Reads the header with the address of a client behind a load balancer. Returns `None` for a connection that is not served, after
/// it has been recorded.
async fn identify(services: Arc<Services>, behind: Arc<BehindBalancers>, accepted: Accepted) -> Option<Accepted> {
    let peer = accepted.peer();
    match timeout(services.settings.proxy.handshake_timeout, behind.identify(accepted)).await {
        Ok(Ok(accepted)) => Some(accepted),
        Ok(Err(error)) => {
            let mut record = services.record(&peer);
            record.rule(error.to_string());
            record.failed(Deny::CallerUnknown.into());
            None
        }
        Err(_) => {
            services.record(&peer).failed(Deny::HeaderTimeout.into());
            None
        }
    }
}

fn handle_step(services: &Arc<Services>, step: QueueStep<Accepted>, response_permits: &Arc<Semaphore>) {
    match step {
        QueueStep::Serve(accepted, slot) => {
            let member = slot.queue().member();
            let served = serve(services.clone(), accepted, slot.into(), member.clone());
            services.tracker.spawn(member.run(served));
        }
        QueueStep::Close(accepted) => record_eviction(services, &accepted.peer()),
        QueueStep::Refuse(accepted) => {
            if let Ok(permit) = response_permits.clone().try_acquire_owned() {
                let services = services.clone();
                tokio::spawn(async move {
                    refuse_overloaded(&services, accepted).await;
                    drop(permit);
                });
            }
        }
    }
}

fn record_eviction(services: &Services, peer: &Peer) {
    let mut record = services.record(peer);
    record.rule("connection: unidentified, closed for a newer one");
    record.failed(Fail::Overloaded.into());
}

/// Serves a connection until it ends, loses its slot, or the daemon aborts.
async fn serve(services: Arc<Services>, accepted: Accepted, slot: Arc<Slot>, member: Membership) {
    let peer = accepted.peer();
    tokio::select! {
        () = services.abort.cancelled() => {}
        () = slot.evicted() => record_eviction(&services, &peer),
        () = slot.overdue() => {}
        () = serve_connection(&services, accepted, &slot, member) => {}
    }
}

async fn serve_connection(services: &Arc<Services>, accepted: Accepted, slot: &Arc<Slot>, member: Membership) {
    let peer = accepted.peer();
    let deadline = Instant::now() + services.settings.proxy.handshake_timeout;
    let deadline = slot.deadline().map_or(deadline, |slot_deadline| slot_deadline.min(deadline));
    let Opened { stream, peer, watch, mode, is_http2, server_name } =
        match timeout_at(deadline, services.connection_setup.open(accepted)).await {
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
        connection_slots: ConnectionSlots::default(),
        slot: slot.clone(),
        member,
        watch,
        is_multiplexed: is_http2,
        stream: None,
        unidentified: AtomicU32::new(0),
    };
    let client = Arc::new(client);
    match mode {
        ListenerMode::Proxy if is_http2 => Box::pin(http2_connection::serve(client, stream, server_name)).await,
        ListenerMode::Proxy => connection::serve(client, stream).await,
        ListenerMode::Socks5 => Box::pin(socks::serve(client, stream)).await,
        ListenerMode::Transparent => Box::pin(captured::serve(client, stream)).await,
        // Such a listener is another one.
        ListenerMode::Dns => {}
    }
}

/// Refuses a connection, with a response to a client that speaks HTTP without TLS.
async fn refuse_overloaded(services: &Services, accepted: Accepted) {
    let response = respond::raw(Fail::Overloaded.into(), services.record(&accepted.peer()));
    let Some(stream) = accepted.into_plain(&services.connection_setup) else { return };
    let _ = timeout(Duration::from_secs(1), write_and_linger(stream, &response)).await;
}

pub(super) async fn write_and_linger(
    mut stream: impl AsyncRead + AsyncWrite + Unpin,
    response: &[u8],
) -> io::Result<()> {
    stream.write_all(response).await?;
    stream.shutdown().await?;
    let mut linger = Linger::new();
    poll_fn(|cx| linger.poll(cx, |cx, out| Pin::new(&mut stream).poll_read(cx, out))).await;
    Ok(())
}

/// Returns true if an error of `accept` concerns the listener, not only the connection to be accepted.
fn is_listener_error(error: &io::Error) -> bool {
    !matches!(
        error.kind(),
        io::ErrorKind::ConnectionAborted | io::ErrorKind::ConnectionReset | io::ErrorKind::ConnectionRefused
    )
}

//! Accepts and serves the connections of the listeners for operators: a few at a time, with one request each.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::OptionFuture;
use http::{Request, Response};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::io::{AsyncRead, AsyncWrite};

use crate::admission::queue::{AcceptQueue, QueueStep};
use crate::admission::{Admission, Slot};
use crate::flow::Services;
use crate::flow::listener::{Accepted, AcceptedSocket, Listener};

/// Maximum time for one request and its response, and for the wait for a slot.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(30);
/// Maximum size of a request head that arrives in several reads, in bytes. hyper may read as much again in the last one.
const MAX_HEAD: usize = 32_768;
/// The answers of a listener.
pub(super) trait Site: Send + Sync + 'static {
    /// Maximum concurrent connections.
    const MAX_CONNECTIONS: usize;

    fn services(&self) -> &Arc<Services>;

    /// Returns true if a user of a Unix socket needs no token.
    fn is_trusted(&self, uid: u32) -> bool;

    /// Returns the response. `slot` is marked once the client has been identified.
    fn answer(
        &self,
        request: Request<Incoming>,
        trusted: bool,
        slot: &Slot,
    ) -> impl Future<Output = Response<Full<Bytes>>> + Send;
}

/// Accepts connections until the daemon drains or is taken over.
pub(super) async fn run<S: Site>(site: Arc<S>, listener: Listener) {
    let services = site.services().clone();
    let lifetime = services.settings.proxy.header_timeout;
    let connections = Arc::new(Admission::new(S::MAX_CONNECTIONS, lifetime));
    let queue = AcceptQueue::new(connections).with_timeout(REQUEST_TIMEOUT);
    let mut listener = Some(listener);
    loop {
        let accepted = tokio::select! {
            biased;
            () = services.drain.cancelled() => return,
            step = queue.next() => {
                if let QueueStep::Serve(accepted, slot) = step {
                    services.tracker.spawn(serve_accepted(site.clone(), accepted, slot));
                }
                continue;
            }
            () = services.last_requests.cancelled(), if listener.is_some() => {
                listener = None;
                continue;
            }
            Some(accepted) = OptionFuture::from(listener.as_ref().map(Listener::accept)) => accepted,
        };
        match accepted {
            Ok(accepted) => queue.enqueue(accepted.source(), accepted),
            Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
        }
    }
}

async fn serve_accepted<S: Site>(site: Arc<S>, accepted: Accepted, slot: Slot) {
    match accepted.socket {
        AcceptedSocket::Tcp(stream, _) => serve(&site, stream, false, slot).await,
        AcceptedSocket::Unix(stream, uid) => serve(&site, stream, site.is_trusted(uid), slot).await,
    }
}

async fn serve<S: Site>(site: &Arc<S>, stream: impl AsyncRead + AsyncWrite + Unpin, trusted: bool, slot: Slot) {
    if trusted && !slot.identify() {
        return;
    }
    let service = service_fn(|request| {
        let (site, slot) = (site.clone(), &slot);
        async move { Ok::<_, Infallible>(site.answer(request, trusted, slot).await) }
    });
    let connection = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(Duration::from_secs(10))
        // One request per connection, so that a client cannot hold a slot by pipelining requests without reading.
        .keep_alive(false)
        .max_buf_size(MAX_HEAD)
        .serve_connection(TokioIo::new(stream), service);
    tokio::select! {
        ended = tokio::time::timeout(REQUEST_TIMEOUT, connection) => {
            if let Ok(Err(error)) = ended {
                tracing::debug!(%error, "an admin connection broke");
            }
        }
        () = slot.evicted() => {}
        () = slot.overdue() => {}
        () = site.services().drain.cancelled() => {}
    }
}

//! The HTTP/1.1 server on client connections and inside tunnels, behind the gate.

use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use http::{Response, StatusCode};
use hyper::server::conn::http1;
use tokio::io::{AsyncRead, AsyncWrite};

use super::client::Client;
use super::http1_gate::{GateHandle, HeadLimits, Http1Gate};
use super::respond::AnswerBody;
use super::{Services, respond};
use crate::audit::record::Record;
use crate::model::refusal::Deny;
use crate::policy::settings;

/// Logs an error that hyper reports on a request that passed the gate. hyper answers the request itself, so the refusal
/// is written to the audit log here.
pub(super) fn note_broken(client: &Client, error: &hyper::Error) {
    tracing::debug!(%error, peer = %client.peer, "a client connection broke");
    if error.is_parse() || error.is_parse_too_large() {
        client.services.record(&client.peer).failed(Deny::RequestMalformed.into());
    }
}

/// Wraps a stream in the gate, so that the HTTP server reads only valid heads. `introduce` adds the caller and the
/// destination to the record of a rejected head, as far as they are known.
pub(super) fn gated<T: AsyncRead + AsyncWrite + Unpin>(
    client: &Arc<Client>,
    stream: T,
    idle: Duration,
    introduce: impl Fn(&mut Record) + Send + 'static,
) -> Http1Gate<T> {
    let settings = &client.services.settings.proxy;
    let limits = HeadLimits { head: settings.max_head_bytes, header_timeout: settings.header_timeout, idle };
    let (client, slot, watch) = (client.clone(), client.slot.clone(), client.watch.clone());
    let refuse = move |refusal| {
        let mut record = client.services.record(&client.peer);
        introduce(&mut record);
        respond::raw(refusal, record)
    };
    Http1Gate::new(stream, limits, refuse).until(move || slot.deadline()).probed_for(watch)
}

/// Runs a connection until it ends. When the daemon drains, requests in flight are finished first.
pub(super) async fn until_drained<C: Future>(
    connection: C,
    finish: impl FnOnce(Pin<&mut C>),
    gate: &GateHandle,
    services: &Services,
) -> C::Output {
    tokio::pin!(connection);
    let drained = async {
        services.drain.cancelled().await;
        // Finish a request head that has started arriving, even while draining.
        while gate.is_reading() {
            tokio::time::sleep(POLL_INTERVAL).await;
        }
    };
    tokio::select! {
        ended = &mut connection => ended,
        () = drained => {
            finish(connection.as_mut());
            connection.await
        }
    }
}

/// Makes a response the last on its connection if a new process takes over, which serves the next one. Neither the response to
/// an upgrade nor that to a CONNECT may say so.
pub(super) fn last_at_takeover(
    response: Response<AnswerBody>,
    is_connect: bool,
    services: &Services,
) -> Response<AnswerBody> {
    let opens = response.status() == StatusCode::SWITCHING_PROTOCOLS || is_connect && response.status().is_success();
    if services.last_requests.is_cancelled() && !opens { respond::last(response) } else { response }
}

/// Interval at which the gate is checked for a partly read head while the daemon drains.
const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// Returns the HTTP/1.1 server, which is also used inside tunnels. The gate enforces the size and the time limit of a
/// head, so hyper's header timeout is off.
///
/// hyper has one limit for the bytes that it reads ahead and for those that it holds for a slow client. It must hold a
/// whole head, and every stalled connection may fill it twice.
pub(super) fn h1(settings: &settings::Proxy) -> http1::Builder {
    let mut builder = http1::Builder::new();
    let max_buffer = settings.max_head_bytes.saturating_add(MIN_BUFFER);
    builder.header_read_timeout(None).max_buf_size(max_buffer).preserve_header_case(true).half_close(true);
    builder
}

/// The least that hyper allows as the limit of its buffers, in bytes.
const MIN_BUFFER: usize = 8 * 1024;

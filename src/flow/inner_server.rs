//! Serves the requests inside a tunnel, over HTTP/1.1 and HTTP/2.

use std::convert::Infallible;
use std::error::Error as _;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use http::{Request, Response};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::runtime::Handle;
use tokio::task::JoinHandle;

use super::client::Client;
use super::exchange::{self, Destination};
use super::http1_server;
use super::http2_server::{self, ENDED_GRACE, Http2Service, NotProcessed, Windows};
use super::http2_streams::Event;
use super::open_answers::OpenAnswers;
use super::respond::{self, AnswerBody};
use super::websocket::{self, PendingUpgrade};
use crate::audit::record::Record;
use crate::model::limited::ReachedLimit;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::model::target::{Scheme, Target};
use crate::model::tool::Kind;
use crate::policy::rule::Policy;
use crate::stages::body_budget::Reservation;
use crate::stages::identify::Caller;
use crate::stages::message::h2_trailers::is_over_budget;
use crate::stages::parse;
use crate::stages::throttle::{CountedCall, Prepaid};

/// The destination that the requests in a tunnel are sent to.
pub(super) struct TunnelTarget {
    pub(super) caller: Caller,
    pub(super) target: Target,
    /// The destination, or the refusal of every request.
    pub(super) to: Verdict<Destination>,
    /// The limit that was reached, if that is the refusal.
    pub(super) limited: Option<ReachedLimit>,
    /// The call that was counted for the CONNECT, if a request may use it.
    pub(super) prepaid: Option<Prepaid>,
    /// Set when a request arrives.
    pub(super) is_used: Arc<AtomicBool>,
}

/// Serves the requests inside a tunnel. If the destination was refused, each of them is refused, and the connection ends
/// with the first, or over HTTP/2 shortly after it, so that a client cannot repeat it much without another CONNECT.
pub(super) struct InnerServer {
    client: Arc<Client>,
    caller: Caller,
    target: Target,
    to: Verdict<Destination>,
    limited: Option<ReachedLimit>,
    /// A request has been refused because of its destination.
    has_refused: Event,
    /// The record of the tunnel itself, until a request arrives. Each request has its own record.
    tunnel_record: Mutex<Option<Record>>,
    /// The call that was counted for the CONNECT, until a request uses it.
    prepaid: Mutex<Option<Prepaid>>,
    is_used: Arc<AtomicBool>,
}

impl Drop for InnerServer {
    /// Records a tunnel without requests. Some clients reject the interception CA only after the handshake, and close
    /// without an alert.
    fn drop(&mut self) {
        // The record of a refused destination has its refusal.
        if let Some(mut record) = self.take_record().filter(|_| self.to.is_ok()) {
            if self.target.scheme() == Scheme::Https {
                record.rule("client handshake: closed behind it, without a request");
            }
            record.abandoned();
        }
    }
}

impl InnerServer {
    pub(super) fn new(client: Arc<Client>, tunnel: TunnelTarget, record: Record) -> Self {
        let TunnelTarget { caller, target, to, limited, prepaid, is_used } = tunnel;
        let (tunnel_record, prepaid) = (Mutex::new(Some(record)), Mutex::new(prepaid));
        Self { client, caller, target, to, limited, has_refused: Event::default(), tunnel_record, prepaid, is_used }
    }

    pub(super) async fn serve_h1(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let inner = &Arc::new(self);
        let tunnel = inner.clone();
        let io = http1_server::gated(&inner.client, io, inner.idle(), move |record| tunnel.describe_unparsed(record));
        let gate = io.handle();
        let service = service_fn(|mut request| {
            let (inner, unanswered) = (inner.clone(), gate.mark_unanswered(&request));
            let upgrade = PendingUpgrade::of(&mut request, &gate);
            let gate = gate.clone();
            async move {
                let _unanswered = unanswered;
                let answer = inner.answer_request(request, upgrade).await;
                if inner.to.is_ok() {
                    return Ok::<_, Infallible>(http1_server::last_at_takeover(answer, false, &inner.client.services));
                }
                gate.end_after_request();
                Ok(respond::last(answer))
            }
        });
        let connection = http1_server::h1(&inner.client.services.settings.proxy)
            .serve_connection(TokioIo::new(io), service)
            .with_upgrades();
        let ended =
            http1_server::until_drained(connection, |it| it.graceful_shutdown(), &gate, &inner.client.services).await;
        gate.finish_refused_upgrade().await;
        if let Err(error) = ended {
            http1_server::note_broken(&inner.client, &error);
        }
    }

    pub(super) async fn serve_h2(self, io: impl AsyncRead + AsyncWrite + Unpin + Send + 'static) {
        let inner = &Arc::new(self);
        // The reservation is held until the connection ends.
        let window = inner.reserve_window();
        let windows = if window.is_some() { Windows::TUNNEL } else { Windows::SMALL_TUNNEL };
        if let Err(error) = http2_server::serve(inner, windows, io).await
            && inner.to.is_ok()
        {
            inner.note_broken(&error);
        }
    }

    /// Writes to the audit log that the client has broken the protocol before its first request, or has exceeded its budget of
    /// frames. One that has disconnected has not.
    fn note_broken(&self, error: &hyper::Error) {
        let is_io = error.source().is_some_and(|source| source.is::<io::Error>());
        let is_over_budget = is_over_budget(error);
        let unused = if !is_io || is_over_budget { self.take_record() } else { None };
        let record = unused.or_else(|| {
            let mut record = is_over_budget.then(|| self.client.services.record(&self.client.peer))?;
            self.record_identity(&mut record);
            Some(record)
        });
        if let Some(mut record) = record {
            record.failed(Deny::RequestMalformed.into());
        }
    }

    /// Adds the caller and the destination to the record of a request that could not be parsed.
    fn describe_unparsed(&self, record: &mut Record) {
        if self.to.is_ok() {
            self.mark_used(record);
        }
        self.record_identity(record);
    }

    fn record_identity(&self, record: &mut Record) {
        let policy = self.client.services.policies.snapshot();
        let task = policy.task(self.caller.task());
        record.caller(self.caller.task(), self.caller.execution(), task.map(|task| task.values()));
        record.target(&self.target);
    }

    /// Drops the tunnel's own record when the first request arrives, because that request's audit line also stands for the
    /// tunnel.
    fn mark_used(&self, first: &mut Record) {
        if let Some(record) = self.take_record() {
            record.replaced_by(first);
            self.is_used.store(true, Ordering::Relaxed);
        }
    }

    fn take_record(&self) -> Option<Record> {
        self.tunnel_record.lock().take()
    }

    fn prepaid(&self) -> MutexGuard<'_, Option<Prepaid>> {
        self.prepaid.lock()
    }

    /// Counts a request as a call. The first raw request uses the call of the CONNECT. If it is refused or aborted
    /// before it is counted, that call is left for the next request.
    async fn take_call(
        &self,
        policy: &Policy,
        caller: &Caller,
        kind: Kind,
        record: &mut Record,
    ) -> Verdict<CountedCall> {
        let throttle = &self.client.services.throttle;
        let prepaid = if kind == Kind::Raw { self.prepaid().take() } else { None };
        let Some(prepaid) = prepaid else { return throttle.take(policy, caller, kind, record).await };
        let mut unused = UnusedCall { inner: self, prepaid: Some(prepaid) };
        throttle.redeem(policy, caller, &mut unused.prepaid, record).await
    }

    /// Gives the call of the CONNECT back, if it has not been used. The task runs to its end even if the handle is
    /// dropped, because the client may reset the stream.
    fn give_back(&self) -> Option<JoinHandle<()>> {
        // Without a runtime the process is shutting down, and the ledger keeps the call.
        let runtime = Handle::try_current().ok()?;
        let prepaid = self.prepaid().take()?;
        let (services, caller) = (self.client.services.clone(), self.caller.clone());
        let give_back = async move { services.throttle.give_back(&caller, prepaid).await };
        Some(self.client.services.tracker.spawn_on(give_back, &runtime))
    }

    /// Reserves memory for the connection's window. Returns `None` if the execution has too many tunnels.
    fn reserve_window(&self) -> Option<Reservation> {
        let to = self.to.as_ref().ok()?;
        self.client
            .services
            .windows
            .reserve_for(to.admitted.caller().execution(), u64::from(Windows::TUNNEL.connection))
    }

    async fn answer_request(
        &self,
        request: Request<Incoming>,
        upgrade: Option<PendingUpgrade>,
    ) -> Response<AnswerBody> {
        let services = &self.client.services;
        let mut record = services.record(&self.client.peer);
        self.mark_used(&mut record);
        record.request(&request);
        let result = self.exchange(request, &mut record).await;
        services.settle(result.as_ref().err().copied(), &mut record).await;
        match result {
            Ok(answer) => websocket::respond(&self.client, upgrade, answer, record),
            Err(refusal) => respond::refusal(services, refusal, record),
        }
    }

    async fn exchange(&self, request: Request<Incoming>, record: &mut Record) -> Verdict<exchange::Answer> {
        self.record_identity(record);
        let to = self.to.as_ref().map_err(|refusal| self.refuse(*refusal, record))?;
        let caller = &self.caller;
        parse::count_fields(request.headers())?;
        let services = &self.client.services;
        let (policy, kind) = (services.policies.snapshot(), Kind::from_headers_or_raw(request.headers()));
        let taken = self.take_call(&policy, caller, kind, record).await?;
        let (mut head, body) = request.into_parts();
        parse::inner(&mut head)?;
        let settlement = CallSettlement { inner: self, kind, record };
        let received = exchange::run(services, to, taken, Request::from_parts(head, body), settlement.record).await;
        settlement.settle().await;
        received
    }

    /// Returns the refusal of the destination.
    fn refuse(&self, refusal: Refusal, record: &mut Record) -> Refusal {
        self.has_refused.set();
        match (refusal, self.limited) {
            (Refusal::Deny(deny), Some(limited)) => record.limited(deny, limited),
            _ => refusal,
        }
    }
}

impl Http2Service for InnerServer {
    const HAS_WEBSOCKETS: bool = true;
    const IS_SHARED: bool = false;

    fn client(&self) -> &Client {
        &self.client
    }

    fn idle(&self) -> Duration {
        let policy = self.client.services.policies.snapshot();
        policy.task(self.caller.task()).map_or(Duration::ZERO, |task| task.idle())
    }

    fn ending(&self) -> &Event {
        &self.has_refused
    }

    fn grace(&self) -> Duration {
        if self.to.is_err() { ENDED_GRACE } else { Duration::MAX }
    }

    async fn answer(
        &self,
        mut request: Request<Incoming>,
        answers: &Arc<OpenAnswers>,
    ) -> Result<Response<AnswerBody>, NotProcessed> {
        let upgrade = PendingUpgrade::of_stream(&mut request, answers);
        Ok(self.answer_request(request, upgrade).await)
    }
}

/// The call of the CONNECT while a raw request is trying to use it. It is put back on drop if it was not used.
struct UnusedCall<'a> {
    inner: &'a InnerServer,
    prepaid: Option<Prepaid>,
}

impl Drop for UnusedCall<'_> {
    fn drop(&mut self) {
        if let Some(prepaid) = self.prepaid.take() {
            *self.inner.prepaid() = Some(prepaid);
        }
    }
}

/// Settles the cost of an exchange in a tunnel. An allowed tool call is counted itself, so the call of the CONNECT is
/// given back, even if the client resets the stream before the exchange ends.
struct CallSettlement<'a> {
    inner: &'a InnerServer,
    kind: Kind,
    record: &'a mut Record,
}

impl CallSettlement<'_> {
    /// Returns after the ledger has the call of the CONNECT back, if it is given back, so that the next request can use
    /// it.
    async fn settle(self) {
        if let Some(task) = self.give_back() {
            // If the task panicked, the ledger keeps the call.
            let _ = task.await;
        }
    }

    fn give_back(&self) -> Option<JoinHandle<()>> {
        if self.kind == Kind::Raw || !self.record.is_decided() { None } else { self.inner.give_back() }
    }
}

impl Drop for CallSettlement<'_> {
    fn drop(&mut self) {
        drop(self.give_back());
    }
}

//! The HTTP/1.1 request gate: passes heads to hyper one at a time, and rejects ambiguous ones.
//!
//! hyper accepts and hides messages that a proxy must reject, such as a Content-Length together with a
//! Transfer-Encoding, or bare line feeds. It answers an unparsable head with a bare status line. The gate checks each
//! head as it was sent, and answers a rejected one with a refusal, after the responses to earlier requests
//! (RFC 9112 §9.3.2).

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use http::header::UPGRADE;
use http::{Method, Request, Version};
use hyper::upgrade::OnUpgrade;
use hyper_util::rt::TokioIo;
use parking_lot::{Mutex, MutexGuard};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::time::{Instant, Sleep, sleep};

use super::disconnect::DisconnectWatch;
use super::io::Linger;
use crate::model::refusal::{Deny, Refusal};
use crate::stages::message::chunked::ChunkedReader;
use crate::stages::parse::{self, Framing, Head};

/// Bytes reserved for one read while a head is incomplete.
const STEP: usize = 4096;

/// Bytes that the HTTP server gets before the task yields. It processes what it has got without a pause.
const TURN: usize = 64 * 1024;
/// The share of the turn that a byte of a head or of a chunked body counts for. They take longer than other bytes: a chunk
/// can hold one byte, and a refused head is written to the log.
const COSTLY: usize = 4;

/// Size and time limits of request heads.
#[derive(Clone, Copy)]
pub(super) struct HeadLimits {
    /// Maximum size of a head, in bytes.
    pub(super) head: usize,
    /// Maximum time from the first to the last byte of a head, and until the first byte of the first head.
    pub(super) header_timeout: Duration,
    /// Maximum time until the first byte of a later head.
    pub(super) idle: Duration,
}

/// A stream that yields only valid request heads and their bodies to the HTTP server.
pub(super) struct Http1Gate<T> {
    inner: T,
    /// Bytes read and not yet returned.
    buffer: BytesMut,
    /// Bytes left of the turn.
    turn: usize,
    state: State,
    limits: HeadLimits,
    /// True until the first head has been accepted.
    first: bool,
    /// True if a byte of the next head has arrived, or the empty line before it.
    head_started: bool,
    /// True if an empty line was skipped before the next head.
    blank: bool,
    /// The start of the wait for the next bytes of a head, and the timer of its end.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
    /// Returns the deadline of all waits for heads, or `None`.
    deadline: Box<dyn Fn() -> Option<Instant> + Send>,
    /// Requests probes of the client.
    watch: Option<DisconnectWatch>,
    /// The part of a probe that has not been written yet.
    probe: &'static [u8],
    handle: GateHandle,
    refuse: Box<dyn FnMut(Refusal) -> Vec<u8> + Send>,
    /// The unwritten part of the response to a rejected head.
    refusal_response: Option<Bytes>,
    linger: Option<Linger>,
}

enum State {
    /// Reading the next head. This many bytes of it have been searched for its end.
    Head(usize),
    /// Returning an accepted head: this many bytes of the buffer remain. The body follows.
    ReturnHead(usize, Framing),
    Length(u64),
    Chunked(ChunkedReader),
    /// No more bytes are returned.
    Closed,
}

/// A handle to a gate, shared with the code that serves the connection.
#[derive(Clone, Default)]
pub(super) struct GateHandle(Arc<Shared>);

#[derive(Default)]
struct Shared {
    open: AtomicBool,
    reading: AtomicBool,
    ended: AtomicBool,
    /// True while a request waits for the first byte of its response, and its client understands 1xx.
    unanswered: AtomicBool,
    /// hyper's handle of a requested upgrade that has not taken place.
    pending: Mutex<Option<OnUpgrade>>,
}

impl GateHandle {
    /// Opens the gate permanently. Later bytes are not HTTP and pass unchecked.
    pub(super) fn pass_all(&self) {
        self.0.open.store(true, Ordering::Release);
    }

    /// Registers a request for an upgrade, and returns its handle. hyper hands the connection over at its end instead
    /// of closing it, even if the upgrade is refused.
    pub(super) fn register_upgrade<B>(&self, request: &mut Request<B>) -> Option<OnUpgrade> {
        let asks = *request.method() == Method::CONNECT || request.headers().contains_key(UPGRADE);
        asks.then(|| {
            let upgrade = hyper::upgrade::on(&mut *request);
            request.extensions_mut().insert(upgrade.clone());
            *self.pending() = Some(upgrade.clone());
            upgrade
        })
    }

    /// Notes that the connection ends with the current request. Later bytes from the client may not be HTTP.
    pub(super) fn end_after_request(&self) {
        self.0.ended.store(true, Ordering::Release);
    }

    /// Marks a request as unanswered until the guard is dropped, which happens before its response is handed over.
    pub(super) fn mark_unanswered<B>(&self, request: &Request<B>) -> Unanswered {
        let has_interim = request.version() == Version::HTTP_11 && *request.method() != Method::CONNECT;
        self.0.unanswered.store(has_interim, Ordering::Release);
        Unanswered(self.clone())
    }

    /// Notes that the upgrade is accepted, so another task takes the connection over.
    pub(super) fn accept_upgrade(&self) {
        self.pending().take();
    }

    /// Shuts down a connection whose upgrade was refused, which writes the pending response.
    pub(super) async fn finish_refused_upgrade(&self) {
        let Some(upgrade) = self.pending().take() else { return };
        // A broken connection needs no shutdown. The shutdown of any other is limited by `Linger`.
        if let Ok(connection) = upgrade.await {
            let _ = TokioIo::new(connection).shutdown().await;
        }
    }

    fn pending(&self) -> MutexGuard<'_, Option<OnUpgrade>> {
        self.0.pending.lock()
    }

    fn is_open(&self) -> bool {
        self.0.open.load(Ordering::Acquire)
    }

    /// True while part of a head has been read and not yet passed to the HTTP server.
    pub(super) fn is_reading(&self) -> bool {
        self.0.reading.load(Ordering::Acquire)
    }

    fn reading(&self, reading: bool) {
        self.0.reading.store(reading, Ordering::Release);
    }
}

/// Guard of a request that waits for its response.
pub(super) struct Unanswered(GateHandle);

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.0.0.unanswered.store(false, Ordering::Release);
    }
}

/// An interim response, which every HTTP/1.1 client skips (RFC 9110 §15.2). The kernel of a client that has closed its
/// connection answers it with a reset.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl<T> Http1Gate<T> {
    /// Creates a gate. `refuse` records a refusal and returns the response to send.
    pub(super) fn new(inner: T, limits: HeadLimits, refuse: impl FnMut(Refusal) -> Vec<u8> + Send + 'static) -> Self {
        Self {
            inner,
            buffer: BytesMut::new(),
            turn: TURN,
            state: State::Head(0),
            limits,
            first: true,
            head_started: false,
            blank: false,
            waiting: None,
            deadline: Box::new(|| None),
            watch: None,
            probe: &[],
            handle: GateHandle::default(),
            refuse: Box::new(refuse),
            refusal_response: None,
            linger: None,
        }
    }

    /// Sets the deadline of all waits for heads. It is evaluated at each wait.
    pub(super) fn until(self, deadline: impl Fn() -> Option<Instant> + Send + 'static) -> Self {
        Self { deadline: Box::new(deadline), ..self }
    }

    /// Puts bytes before the stream that have been read from it.
    pub(super) fn after(self, first: Bytes) -> Self {
        Self { buffer: first.into(), ..self }
    }

    /// Sets the watch that requests probes of the client.
    pub(super) fn probed_for(self, watch: DisconnectWatch) -> Self {
        Self { watch: Some(watch), ..self }
    }

    /// Returns a handle to the gate.
    pub(super) fn handle(&self) -> GateHandle {
        self.handle.clone()
    }

    /// Returns the bytes that were read from the stream and not returned, and the stream.
    pub(super) fn into_parts(self) -> (Bytes, T) {
        (self.buffer.freeze(), self.inner)
    }

    fn refuse(&mut self, refusal: impl Into<Refusal>) {
        self.state = State::Closed;
        self.handle.reading(false);
        self.refusal_response = Some((self.refuse)(refusal.into()).into());
    }

    /// Replaces a target that means the server as a whole with `*`. Returns the number of bytes by which the head got
    /// shorter.
    fn write_asterisk(&mut self) -> usize {
        let Some(target) = parse::server_wide(&self.buffer) else { return 0 };
        let Some(removed) = target.len().checked_sub(1) else { return 0 };
        self.buffer.copy_within(..target.start, removed);
        self.buffer.advance(removed);
        if let Some(byte) = self.buffer.get_mut(target.start) {
            *byte = b'*';
        }
        removed
    }

    /// Parses the part of a head that has been read. `searched` bytes of it contain no end.
    fn parse_head(&mut self, searched: usize) {
        // One empty line before a request is ignored (RFC 9112 §2.2).
        if self.buffer.starts_with(b"\r\n") {
            self.buffer.advance(2);
            self.handle.reading(!self.buffer.is_empty());
            self.state = State::Head(0);
            if std::mem::replace(&mut self.blank, true) {
                self.refuse(Deny::RequestMalformed);
            }
            return;
        }
        if *self.buffer == *b"\r" {
            self.state = State::Head(1);
            return;
        }
        match parse::raw_head(&self.buffer, searched, self.limits.head) {
            Ok(Head::Whole(length, framing)) => {
                self.first = false;
                self.state = State::ReturnHead(length.saturating_sub(self.write_asterisk()), framing);
            }
            Ok(Head::Partial) => self.state = State::Head(self.buffer.len()),
            Err(deny) => self.refuse(deny),
        }
    }
}

impl<T: AsyncRead + Unpin> Http1Gate<T> {
    /// Reads more of a head until its time limit. Returns 0 at the end of the stream or of the time.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.buffer.reserve(STEP);
        let read = tokio_util::io::poll_read_buf(Pin::new(&mut self.inner), cx, &mut self.buffer);
        if let Poll::Ready(read) = read {
            if !std::mem::replace(&mut self.head_started, true) {
                self.waiting = None;
            }
            self.handle.reading(!self.buffer.is_empty());
            return Poll::Ready(read);
        }
        let limit = if self.head_started || self.first { self.limits.header_timeout } else { self.limits.idle };
        let (since, waiting) = self.waiting.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(limit))));
        let until = (self.deadline)().map_or(*since + limit, |deadline| deadline.min(*since + limit));
        if waiting.deadline() != until {
            waiting.as_mut().reset(until);
        }
        ready!(waiting.as_mut().poll(cx));
        if self.buffer.is_empty() {
            // No response is due without a request. Only a connection without any request is recorded.
            if self.first {
                let _ = (self.refuse)(Deny::HeaderTimeout.into());
            }
            self.state = State::Closed;
        } else {
            self.refuse(Deny::HeaderTimeout);
        }
        Poll::Ready(Ok(0))
    }

    /// Returns at most `max` bytes of a body, from the buffer or directly from the stream. `belongs` returns how many of them
    /// belong to the body; the rest is kept in the buffer.
    fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
        (out, max): (&mut ReadBuf<'_>, usize),
        belongs: impl FnOnce(&[u8]) -> usize,
    ) -> Poll<io::Result<()>> {
        let length = out.remaining().min(max);
        if !self.buffer.is_empty() {
            let n = belongs(self.buffer.get(..self.buffer.len().min(length)).unwrap_or_default());
            out.put_slice(&self.buffer.split_to(n.min(self.buffer.len())));
            return Poll::Ready(Ok(()));
        }
        let mut part = ReadBuf::new(out.initialize_unfilled_to(length));
        ready!(Pin::new(&mut self.inner).poll_read(cx, &mut part))?;
        let n = belongs(part.filled()).min(part.filled().len());
        self.buffer.extend_from_slice(part.filled().get(n..).unwrap_or_default());
        out.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl<T> Http1Gate<T> {
    /// True if the current body is incomplete.
    fn is_within_body(&self) -> bool {
        match &self.state {
            State::ReturnHead(..) => true,
            State::Length(left) => *left > 0,
            State::Chunked(chunks) => !chunks.is_over() && !chunks.is_broken(),
            State::Head(_) | State::Closed => false,
        }
    }

    /// True if the end of the incoming data cannot be determined.
    fn is_lost(&self) -> bool {
        let is_broken = matches!(&self.state, State::Chunked(chunks) if chunks.is_broken());
        is_broken || self.refusal_response.is_some() || self.handle.0.ended.load(Ordering::Acquire)
    }
}

impl<T: AsyncRead + Unpin> Http1Gate<T> {
    /// Reads data to be discarded: the rest of a body, and any bytes after it that have already arrived. If the end of
    /// the request is unknown, reads until the client closes.
    fn poll_rest(&mut self, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.is_within_body() {
            ready!(Pin::new(&mut *self).poll_read(cx, out))?;
            if !out.filled().is_empty() || self.is_within_body() {
                return Poll::Ready(Ok(()));
            }
        }
        match Pin::new(&mut self.inner).poll_read(cx, out) {
            Poll::Pending if !self.is_lost() => Poll::Ready(Ok(())),
            read => read,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Http1Gate<T> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if out.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        if this.handle.is_open() {
            // A pause of these bytes has a meaning for their reader, so there are no turns.
            return this.poll_body(cx, (out, usize::MAX), <[u8]>::len);
        }
        if this.turn == 0 {
            this.turn = TURN;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let (before, is_plain) = (out.filled().len(), matches!(this.state, State::Length(1..)));
        let read = this.poll_checked(cx, out);
        let passed = out.filled().len().saturating_sub(before);
        let used = passed.saturating_mul(if is_plain { 1 } else { COSTLY });
        this.turn = if read.is_pending() { TURN } else { this.turn.saturating_sub(used) };
        read
    }
}

impl<T: AsyncRead + Unpin> Http1Gate<T> {
    /// Reads bytes of the next head or body.
    fn poll_checked(&mut self, cx: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        loop {
            match std::mem::replace(&mut self.state, State::Closed) {
                State::Closed => return Poll::Ready(Ok(())),
                State::Head(searched) if searched < self.buffer.len() => self.parse_head(searched),
                State::Head(searched) => {
                    self.state = State::Head(searched);
                    let read = ready!(self.poll_more(cx))?;
                    if read == 0 {
                        if !self.buffer.is_empty() && self.refusal_response.is_none() {
                            self.refuse(Deny::RequestMalformed);
                        }
                        self.state = State::Closed;
                    }
                }
                State::ReturnHead(left, framing) => {
                    (self.waiting, self.head_started, self.blank) = (None, false, false);
                    self.handle.reading(false);
                    let n = left.min(out.remaining()).min(self.buffer.len());
                    out.put_slice(&self.buffer.split_to(n));
                    self.state = match (left.saturating_sub(n), framing) {
                        (0, Framing::None) => State::Head(0),
                        (0, Framing::Length(length)) => State::Length(length),
                        (0, Framing::Chunked) => State::Chunked(ChunkedReader::new(self.limits.head)),
                        (left, framing) => State::ReturnHead(left, framing),
                    };
                    return Poll::Ready(Ok(()));
                }
                State::Length(0) => self.state = State::Head(0),
                State::Length(left) => {
                    self.state = State::Length(left);
                    let limit = usize::try_from(left).unwrap_or(usize::MAX);
                    let mut passed = 0;
                    ready!(self.poll_body(cx, (out, self.turn), |bytes| {
                        passed = bytes.len().min(limit);
                        passed
                    }))?;
                    self.state = State::Length(left.saturating_sub(passed as u64));
                    return Poll::Ready(Ok(()));
                }
                State::Chunked(chunks) if chunks.is_over() => self.state = State::Head(0),
                State::Chunked(chunks) if chunks.is_broken() => {
                    // The end of the stream here makes the server treat the body as truncated.
                    self.state = State::Chunked(chunks);
                    return Poll::Ready(Ok(()));
                }
                State::Chunked(mut chunks) => {
                    let max = (self.turn / COSTLY).max(1);
                    let read = self.poll_body(cx, (out, max), |bytes| chunks.pass(bytes));
                    self.state = State::Chunked(chunks);
                    return read;
                }
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> Http1Gate<T> {
    /// Starts a probe if one is wanted. hyper flushes after it has written its whole buffer, so a probe is sent between
    /// responses and never within one.
    fn begin_probe(&mut self) {
        if !self.handle.0.unanswered.load(Ordering::Acquire) || !self.probe.is_empty() {
            return;
        }
        if let Some(watch) = self.watch.as_ref().filter(|watch| watch.wants_probe()) {
            watch.probed();
            self.probe = PROBE;
        }
    }

    fn poll_probe(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.probe.is_empty() {
            let n = ready!(Pin::new(&mut self.inner).poll_write(cx, self.probe))?;
            if n == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.probe = self.probe.get(n..).unwrap_or_default();
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Http1Gate<T> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_probe(cx))?;
        Pin::new(&mut this.inner).poll_write(cx, buf)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        this.begin_probe();
        ready!(this.poll_probe(cx))?;
        Pin::new(&mut this.inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if let Some(response) = &mut this.refusal_response {
            while !response.is_empty() {
                let n = ready!(Pin::new(&mut this.inner).poll_write(cx, response))?;
                if n == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                response.advance(n.min(response.len()));
            }
        }
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.inner).poll_shutdown(cx))?;
        }
        // After an upgrade, the code that took the connection over ends the read direction.
        if this.handle.is_open() {
            return Poll::Ready(Ok(()));
        }
        let mut linger = this.linger.take().unwrap_or_else(Linger::new);
        let lingered = linger.poll(cx, |cx, out| this.poll_rest(cx, out));
        this.linger = Some(linger);
        lingered.map(Ok)
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        ready!(this.poll_probe(cx))?;
        Pin::new(&mut this.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use std::collections::VecDeque;
    use tokio::io::{AsyncReadExt, duplex};

    /// A client that sends its bytes in these pieces and then closes.
    struct Pieces(VecDeque<Vec<u8>>);

    impl AsyncRead for Pieces {
        fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, out: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
            if let Some(mut piece) = self.0.pop_front() {
                let rest = piece.split_off(piece.len().min(out.remaining()));
                out.put_slice(&piece);
                if !rest.is_empty() {
                    self.0.push_front(rest);
                }
            }
            Poll::Ready(Ok(()))
        }
    }

    /// Returns the bytes that the HTTP server reads in steps of `step` bytes, and the refusals.
    async fn pass_through(pieces: VecDeque<Vec<u8>>, step: usize) -> (Vec<u8>, Vec<Refusal>) {
        let limits = HeadLimits { head: 1000, header_timeout: Duration::from_secs(1), idle: Duration::from_secs(9) };
        let refused = Arc::<Mutex<Vec<Refusal>>>::default();
        let noted = refused.clone();
        let mut heads = Http1Gate::new(Pieces(pieces), limits, move |refusal| {
            noted.lock().push(refusal);
            Vec::new()
        });
        let (mut found, mut buffer) = (Vec::new(), vec![0; step]);
        loop {
            match heads.read(&mut buffer).await.unwrap() {
                0 => break,
                n => found.extend_from_slice(&buffer[..n]),
            }
        }
        let refused = refused.lock().clone();
        (found, refused)
    }

    /// Returns the time in seconds that a shutdown takes after the request `sent`, while the client sends one of
    /// `pieces` every half second and does not close.
    async fn shutdown_time(sent: &str, pieces: &[&'static str]) -> f64 {
        let (mut client, near) = duplex(64);
        let limits = HeadLimits { head: 1000, header_timeout: Duration::from_secs(1), idle: Duration::from_secs(9) };
        let mut heads = Http1Gate::new(near, limits, |_| b"no".to_vec());
        client.write_all(sent.as_bytes()).await.unwrap();
        let _ = heads.read(&mut [0; 1024]).await.unwrap();
        let start = Instant::now();
        let more = async {
            for piece in pieces {
                sleep(Duration::from_millis(500)).await;
                // The gate may have stopped reading.
                let _ = client.write_all(piece.as_bytes()).await;
            }
            std::future::pending().await
        };
        tokio::select! {
            done = heads.shutdown() => done.unwrap(),
            () = more => {}
        }
        start.elapsed().as_secs_f64()
    }

    #[tokio::test(start_paused = true)]
    async fn an_unwanted_body_is_read_to_its_end_or_for_two_seconds() {
        let rows = [
            ("GET / HTTP/1.1\r\n\r\n", &[][..], 0.0),
            ("PUT / HTTP/1.1\r\nContent-Length: 4\r\n\r\n", &["ab", "cd"], 1.0),
            ("PUT / HTTP/1.1\r\nContent-Length: 400\r\n\r\n", &["a", "b", "c", "d", "e", "f"], 2.0),
            ("PUT / HTTP/1.1\r\nContent-Length: 4\r\n\r\n", &[], 2.0),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", &["1\r\na\r\n", "0\r\n\r\n"], 1.0),
            ("PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n", &["zz\r\n", "0\r\n\r\n"], 2.0),
            ("GET / HTTP/1.1\n\n", &["x"], 2.0),
        ];
        for (sent, pieces, want) in rows {
            let took = shutdown_time(sent, pieces).await;
            assert!((took - want).abs() < 0.01, "{sent:?} {pieces:?}: {took} s");
        }
    }

    const MESSAGES: [&str; 6] = [
        "GET / HTTP/1.1\r\nHost: a\r\n\r\n",
        "\r\nGET / HTTP/1.1\r\n\r\n",
        "PUT / HTTP/1.1\r\nContent-Length: 4\r\n\r\n\r\n\r\n",
        "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n4\r\n\r\n\r\n\r\n0\r\n\r\n",
        "PUT / HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\n5;a=b\r\nGET /\r\n0\r\nx: y\r\n\r\n",
        "CONNECT a:443 HTTP/1.1\r\nHost: a:443\r\n\r\n",
    ];
    const BAD: [&str; 4] = [
        "GET / HTTP/1.1\n\n",
        "G / HTTP/1.1\r\nTransfer-Encoding: x\r\n\r\n",
        "\r\n\r\nGET / HTTP/1.1\r\n\r\n",
        "\x16\x03\x01\r\n\r\n",
    ];

    /// The server gets bytes of some microseconds or a millisecond of work before the task yields, and all of them in the end.
    #[test]
    fn a_turn_has_an_end() {
        let head = |fields: &str| format!("PUT / HTTP/1.1\r\n{fields}\r\n\r\n").into_bytes();
        let chunks = [&b"1\r\na\r\n".repeat(100_000)[..], b"0\r\n\r\n"].concat();
        let rows = [
            ([head("Transfer-Encoding: chunked"), chunks].concat(), TURN / COSTLY),
            ([head("Content-Length: 1000000"), vec![b'x'; 1_000_000]].concat(), TURN),
            (head("Host: a").repeat(10_000), TURN / COSTLY),
        ];
        for (sent, most) in rows {
            let limits =
                HeadLimits { head: 1000, header_timeout: Duration::from_secs(1), idle: Duration::from_secs(9) };
            let mut gate = Http1Gate::new(Pieces([sent.clone()].into()), limits, |_| Vec::new());
            let (mut buffer, mut received, mut turn) = (vec![0; 400_000], Vec::new(), 0);
            loop {
                let mut out = ReadBuf::new(&mut buffer);
                match Pin::new(&mut gate).poll_read(&mut Context::from_waker(std::task::Waker::noop()), &mut out) {
                    Poll::Ready(read) => {
                        read.unwrap();
                        received.extend_from_slice(out.filled());
                        turn += out.filled().len();
                        assert!(turn <= most + limits.head, "{turn}");
                        if out.filled().is_empty() {
                            break;
                        }
                    }
                    Poll::Pending => turn = 0,
                }
            }
            assert!(received == sent);
        }
    }

    /// The target is rewritten and the bytes after it stay unchanged, however the head is split.
    #[test]
    fn server_wide_options_become_an_asterisk_however_they_are_split() {
        let (one, two) = ("OPTIONS http://a.example", " HTTP/1.1\r\nHost: a.example\r\nContent-Length: 2\r\n\r\nab");
        let behind = "GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n";
        let text = format!("{one}{two}{behind}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for size in [1, 2, 7, 30, 60, text.len()] {
            let pieces = text.as_bytes().chunks(size).map(<[u8]>::to_vec).collect();
            let (found, refused) = runtime.block_on(pass_through(pieces, 3));
            assert_eq!(String::from_utf8(found).unwrap(), format!("OPTIONS *{two}{behind}"), "in pieces of {size}");
            assert!(refused.is_empty(), "{refused:?}");
        }
    }

    proptest! {
        #[test]
        fn valid_messages_pass_unchanged_however_they_are_split(
            which in proptest::collection::vec(0..MESSAGES.len(), 0..5),
            bad in proptest::option::of(0..BAD.len()),
            cuts in proptest::collection::vec(1_usize..40, 1..20),
            step in 1_usize..64,
        ) {
            let good: String = which.iter().map(|at| MESSAGES[*at]).collect();
            let wire = good.clone() + bad.map_or("", |at| BAD[at]);
            let (mut pieces, mut rest) = (VecDeque::new(), wire.as_bytes());
            for cut in cuts.iter().cycle() {
                if rest.is_empty() {
                    break;
                }
                let (piece, tail) = rest.split_at(rest.len().min(*cut));
                pieces.push_back(piece.to_vec());
                rest = tail;
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let (found, refused) = runtime.block_on(pass_through(pieces, step));
            // The gate drops an empty line before a request.
            let mut want = String::new();
            for at in &which {
                want.push_str(MESSAGES[*at].trim_start_matches("\r\n"));
            }
            prop_assert_eq!(String::from_utf8(found).unwrap(), want);
            prop_assert_eq!(refused.len(), usize::from(bad.is_some()));
        }
    }
}

//! The HTTP/1.1 request gate: passes heads to hyper one at a time, and rejects ambiguous ones.
//!
//! hyper takes much that a proxy must refuse, hides it (a length beside a transfer coding, bare line
//! feeds), and answers what it cannot read in bare words. Here each head is looked at as it was sent;
//! what is refused gets our answer, after those to the requests before it (RFC 9112 §9.3.2).

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

/// The bytes read from a client at once while its head is incomplete.
const STEP: usize = 4096;

/// How much and how long.
#[derive(Clone, Copy)]
pub(super) struct HeadLimits {
    /// Bytes of a head.
    pub(super) head: usize,
    /// From its first byte to its last; and for the first byte of the first one.
    pub(super) header_timeout: Duration,
    /// For the first byte of a further one.
    pub(super) idle: Duration,
}

/// A stream on which an HTTP server finds nothing but sound heads and the bodies that belong to them.
pub(super) struct Http1Gate<T> {
    inner: T,
    /// Bytes read and not yet returned.
    buffer: BytesMut,
    state: State,
    limits: HeadLimits,
    /// True until the first head is through.
    first: bool,
    /// A byte of the next head has come, or an empty line before it.
    begun: bool,
    blank: bool,
    /// When the wait for the next bytes of a head began, and its end.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
    /// When all waits end.
    deadline: Box<dyn Fn() -> Option<Instant> + Send>,
    /// Knows when the client should be probed.
    watch: Option<DisconnectWatch>,
    /// The rest of a probe that is still to be written.
    probe: &'static [u8],
    passage: GateHandle,
    refuse: Box<dyn FnMut(Refusal) -> Vec<u8> + Send>,
    /// Our answer to what was refused, as far as it is not out.
    farewell: Option<Bytes>,
    linger: Option<Linger>,
}

enum State {
    /// The next head is awaited; so many bytes of it have been searched for its end.
    Head(usize),
    /// So many bytes of the buffer are through, and then comes a body.
    Through(usize, Framing),
    Length(u64),
    Chunked(ChunkedReader),
    /// Nothing comes any more.
    Over,
}

/// A handle to a gate, shared with the code that serves the connection.
#[derive(Clone, Default)]
pub(super) struct GateHandle(Arc<Shared>);

#[derive(Default)]
struct Shared {
    open: AtomicBool,
    reading: AtomicBool,
    ended: AtomicBool,
    /// A request waits for its answer, of which no byte has been written, and its client understands 1xx.
    unanswered: AtomicBool,
    /// hyper's handle for an upgrade that did not take place.
    pending: Mutex<Option<OnUpgrade>>,
}

impl GateHandle {
    /// Opens the gate for good: what comes now is no HTTP.
    pub(super) fn open(&self) {
        self.0.open.store(true, Ordering::Release);
    }

    /// Notes that a request asks to switch. Whether or not it may, hyper hands the connection over in the end
    /// instead of closing it.
    pub(super) fn asks<B>(&self, request: &mut Request<B>) -> Option<OnUpgrade> {
        let asks = *request.method() == Method::CONNECT || request.headers().contains_key(UPGRADE);
        asks.then(|| {
            let upgrade = hyper::upgrade::on(&mut *request);
            request.extensions_mut().insert(upgrade.clone());
            *self.pending() = Some(upgrade.clone());
            upgrade
        })
    }

    /// It may not, and what the client sends behind it is no HTTP.
    pub(super) fn ends(&self) {
        self.0.ended.store(true, Ordering::Release);
    }

    /// Notes a request, until the guard is dropped, before its answer is handed over.
    pub(super) fn awaits<B>(&self, request: &Request<B>) -> Unanswered {
        let has_interim = request.version() == Version::HTTP_11 && *request.method() != Method::CONNECT;
        self.0.unanswered.store(has_interim, Ordering::Release);
        Unanswered(self.clone())
    }

    /// It may, and somebody else takes the connection.
    pub(super) fn switches(&self) {
        self.pending().take();
    }

    /// Says what is left to say on a connection that nobody has taken.
    pub(super) async fn closed_by_client(&self) {
        let Some(upgrade) = self.pending().take() else { return };
        // There are no last words if the connection broke; those that there are have their own deadline.
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

    /// True while a part of a head is here: the HTTP server does not know of it yet.
    pub(super) fn is_reading(&self) -> bool {
        self.0.reading.load(Ordering::Acquire)
    }

    fn reading(&self, reading: bool) {
        self.0.reading.store(reading, Ordering::Release);
    }
}

/// A request that waits for its answer.
pub(super) struct Unanswered(GateHandle);

impl Drop for Unanswered {
    fn drop(&mut self) {
        self.0.0.unanswered.store(false, Ordering::Release);
    }
}

/// The interim answer that every client of HTTP/1.1 skips (RFC 9110 §15.2). A client that has closed its connection
/// answers it with a reset.
const PROBE: &[u8] = b"HTTP/1.1 100 Continue\r\n\r\n";

impl<T> Http1Gate<T> {
    /// `refuse` writes a refusal down and gives our answer.
    pub(super) fn new(inner: T, limits: HeadLimits, refuse: impl FnMut(Refusal) -> Vec<u8> + Send + 'static) -> Self {
        Self {
            inner,
            buffer: BytesMut::new(),
            state: State::Head(0),
            limits,
            first: true,
            begun: false,
            blank: false,
            waiting: None,
            deadline: Box::new(|| None),
            watch: None,
            probe: &[],
            passage: GateHandle::default(),
            refuse: Box::new(refuse),
            farewell: None,
            linger: None,
        }
    }

    /// Waits for no head beyond this deadline, which is asked for at each wait.
    pub(super) fn until(self, deadline: impl Fn() -> Option<Instant> + Send + 'static) -> Self {
        Self { deadline: Box::new(deadline), ..self }
    }

    /// Probes the client when this watch asks for it.
    pub(super) fn probed_for(self, watch: DisconnectWatch) -> Self {
        Self { watch: Some(watch), ..self }
    }

    /// The key to it.
    pub(super) fn passage(&self) -> GateHandle {
        self.passage.clone()
    }

    /// Returns the bytes that were read and not returned, and the stream.
    pub(super) fn into_parts(self) -> (Bytes, T) {
        (self.buffer.freeze(), self.inner)
    }

    fn refuse(&mut self, refusal: impl Into<Refusal>) {
        self.state = State::Over;
        self.passage.reading(false);
        self.farewell = Some((self.refuse)(refusal.into()).into());
    }

    /// Writes `*` over a target that means the server as a whole, and returns by how many bytes the head is shorter.
    fn write_asterisk(&mut self) -> usize {
        let Some(target) = parse::server_wide(&self.buffer) else { return 0 };
        let Some(shorter) = target.len().checked_sub(1) else { return 0 };
        self.buffer.copy_within(..target.start, shorter);
        self.buffer.advance(shorter);
        if let Some(byte) = self.buffer.get_mut(target.start) {
            *byte = b'*';
        }
        shorter
    }

    /// Looks at what is here of a head.
    fn look(&mut self, searched: usize) {
        // One empty line before a request is let pass (RFC 9112 §2.2).
        if self.buffer.starts_with(b"\r\n") {
            self.buffer.advance(2);
            self.passage.reading(!self.buffer.is_empty());
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
                self.state = State::Through(length.saturating_sub(self.write_asterisk()), framing);
            }
            Ok(Head::Partial) => self.state = State::Head(self.buffer.len()),
            Err(deny) => self.refuse(deny),
        }
    }
}

impl<T: AsyncRead + Unpin> Http1Gate<T> {
    /// Reads more of a head, as long as its sender has time.
    fn poll_more(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        self.buffer.reserve(STEP);
        let read = tokio_util::io::poll_read_buf(Pin::new(&mut self.inner), cx, &mut self.buffer);
        if let Poll::Ready(read) = read {
            if !std::mem::replace(&mut self.begun, true) {
                self.waiting = None;
            }
            self.passage.reading(!self.buffer.is_empty());
            return Poll::Ready(read);
        }
        let most = if self.begun || self.first { self.limits.header_timeout } else { self.limits.idle };
        let (since, waiting) = self.waiting.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(most))));
        let until = (self.deadline)().map_or(*since + most, |deadline| deadline.min(*since + most));
        if waiting.deadline() != until {
            waiting.as_mut().reset(until);
        }
        ready!(waiting.as_mut().poll(cx));
        if self.buffer.is_empty() {
            // Nobody waits for an answer. That it was the first is worth a line.
            if self.first {
                let _ = (self.refuse)(Deny::HeaderTimeout.into());
            }
            self.state = State::Over;
        } else {
            self.refuse(Deny::HeaderTimeout);
        }
        Poll::Ready(Ok(0))
    }

    /// Gives bytes of a body out, from the buffer or right from the stream. `belongs` says how many of them
    /// are the body's; the rest is kept.
    fn poll_body(
        &mut self,
        cx: &mut Context<'_>,
        out: &mut ReadBuf<'_>,
        belongs: impl FnOnce(&[u8]) -> usize,
    ) -> Poll<io::Result<()>> {
        if !self.buffer.is_empty() {
            let n = belongs(self.buffer.get(..self.buffer.len().min(out.remaining())).unwrap_or_default());
            out.put_slice(&self.buffer.split_to(n.min(self.buffer.len())));
            return Poll::Ready(Ok(()));
        }
        let before = out.filled().len();
        ready!(Pin::new(&mut self.inner).poll_read(cx, out))?;
        let fresh = out.filled().get(before..).unwrap_or_default();
        let n = belongs(fresh);
        if let Some(rest) = fresh.get(n..).filter(|rest| !rest.is_empty()) {
            self.buffer.extend_from_slice(rest);
            out.set_filled(before.saturating_add(n));
        }
        Poll::Ready(Ok(()))
    }
}

impl<T> Http1Gate<T> {
    /// True if there is more to come of a body.
    fn is_within_body(&self) -> bool {
        match &self.state {
            State::Through(..) => true,
            State::Length(left) => *left > 0,
            State::Chunked(chunks) => !chunks.is_over() && !chunks.is_broken(),
            State::Head(_) | State::Over => false,
        }
    }

    /// True if there is no telling where what comes now ends.
    fn is_lost(&self) -> bool {
        let is_broken = matches!(&self.state, State::Chunked(chunks) if chunks.is_broken());
        is_broken || self.farewell.is_some() || self.passage.0.ended.load(Ordering::Acquire)
    }
}

impl<T: AsyncRead + Unpin> Http1Gate<T> {
    /// Reads what nobody wants any more: the rest of a body, and behind it what is here already. Where a request
    /// ends that is not known, until the client ends.
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
        if this.passage.is_open() {
            return this.poll_body(cx, out, <[u8]>::len);
        }
        loop {
            match std::mem::replace(&mut this.state, State::Over) {
                State::Over => return Poll::Ready(Ok(())),
                State::Head(searched) if searched < this.buffer.len() => this.look(searched),
                State::Head(searched) => {
                    this.state = State::Head(searched);
                    let read = ready!(this.poll_more(cx))?;
                    if read == 0 {
                        if !this.buffer.is_empty() && this.farewell.is_none() {
                            this.refuse(Deny::RequestMalformed);
                        }
                        this.state = State::Over;
                    }
                }
                State::Through(left, framing) => {
                    (this.waiting, this.begun, this.blank) = (None, false, false);
                    this.passage.reading(false);
                    let n = left.min(out.remaining()).min(this.buffer.len());
                    out.put_slice(&this.buffer.split_to(n));
                    this.state = match (left.saturating_sub(n), framing) {
                        (0, Framing::None) => State::Head(0),
                        (0, Framing::Length(length)) => State::Length(length),
                        (0, Framing::Chunked) => State::Chunked(ChunkedReader::new(this.limits.head)),
                        (left, framing) => State::Through(left, framing),
                    };
                    return Poll::Ready(Ok(()));
                }
                State::Length(0) => this.state = State::Head(0),
                State::Length(left) => {
                    this.state = State::Length(left);
                    let most = usize::try_from(left).unwrap_or(usize::MAX);
                    let mut passed = 0;
                    ready!(this.poll_body(cx, out, |bytes| {
                        passed = bytes.len().min(most);
                        passed
                    }))?;
                    this.state = State::Length(left.saturating_sub(passed as u64));
                    return Poll::Ready(Ok(()));
                }
                State::Chunked(chunks) if chunks.is_over() => this.state = State::Head(0),
                State::Chunked(chunks) if chunks.is_broken() => {
                    // The server finds its body cut short, which it is.
                    this.state = State::Chunked(chunks);
                    return Poll::Ready(Ok(()));
                }
                State::Chunked(mut chunks) => {
                    let read = this.poll_body(cx, out, |bytes| chunks.pass(bytes));
                    this.state = State::Chunked(chunks);
                    return read;
                }
            }
        }
    }
}

impl<T: AsyncWrite + Unpin> Http1Gate<T> {
    /// Begins a probe if one is wanted. hyper flushes once it has written all that it has, so that a probe stands
    /// between answers and never within one.
    fn begin_probe(&mut self) {
        if !self.passage.0.unanswered.load(Ordering::Acquire) || !self.probe.is_empty() {
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
        if let Some(words) = &mut this.farewell {
            while !words.is_empty() {
                let n = ready!(Pin::new(&mut this.inner).poll_write(cx, words))?;
                if n == 0 {
                    return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
                }
                words.advance(n.min(words.len()));
            }
        }
        if this.linger.is_none() {
            ready!(Pin::new(&mut this.inner).poll_shutdown(cx))?;
        }
        // Behind a switch the other direction is not ours to end.
        if this.passage.is_open() {
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

    /// A client that sends its bytes in these pieces and is then through.
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

    /// Returns the bytes that the HTTP server reads in steps of `step` bytes, and the refusal.
    async fn through(pieces: VecDeque<Vec<u8>>, step: usize) -> (Vec<u8>, Vec<Refusal>) {
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

    /// How long it takes to shut down behind this of a request, in seconds, while the client goes on sending such
    /// pieces, one each half second, and does not end.
    async fn shut_down_behind(sent: &str, pieces: &[&'static str]) -> f64 {
        let (mut client, near) = duplex(64);
        let limits = HeadLimits { head: 1000, header_timeout: Duration::from_secs(1), idle: Duration::from_secs(9) };
        let mut heads = Http1Gate::new(near, limits, |_| b"no".to_vec());
        client.write_all(sent.as_bytes()).await.unwrap();
        let _ = heads.read(&mut [0; 1024]).await.unwrap();
        let start = Instant::now();
        let more = async {
            for piece in pieces {
                sleep(Duration::from_millis(500)).await;
                // It may be cut off.
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
    async fn a_body_that_nobody_wants_is_heard_to_its_end_or_for_two_seconds() {
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
            let took = shut_down_behind(sent, pieces).await;
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

    /// However it comes, the target is rewritten and what follows keeps its place.
    #[test]
    fn options_of_the_whole_server_become_an_asterisk_wherever_they_are_cut() {
        let (one, two) = ("OPTIONS http://a.example", " HTTP/1.1\r\nHost: a.example\r\nContent-Length: 2\r\n\r\nab");
        let behind = "GET http://a.example/ HTTP/1.1\r\nHost: a.example\r\n\r\n";
        let text = format!("{one}{two}{behind}");
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        for size in [1, 2, 7, 30, 60, text.len()] {
            let pieces = text.as_bytes().chunks(size).map(<[u8]>::to_vec).collect();
            let (found, refused) = runtime.block_on(through(pieces, 3));
            assert_eq!(String::from_utf8(found).unwrap(), format!("OPTIONS *{two}{behind}"), "in pieces of {size}");
            assert!(refused.is_empty(), "{refused:?}");
        }
    }

    proptest! {
        #[test]
        fn sound_messages_pass_as_they_are_wherever_they_are_cut(
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
                let (piece, behind) = rest.split_at(rest.len().min(*cut));
                pieces.push_back(piece.to_vec());
                rest = behind;
            }
            let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
            let (found, refused) = runtime.block_on(through(pieces, step));
            // An empty line before a request goes no further.
            let mut want = String::new();
            for at in &which {
                want.push_str(MESSAGES[*at].trim_start_matches("\r\n"));
            }
            prop_assert_eq!(String::from_utf8(found).unwrap(), want);
            prop_assert_eq!(refused.len(), usize::from(bad.is_some()));
        }
    }
}

//! Records whether a request head has been written to the origin and whether bytes have been received, and bounds what is
//! read without a pause. Wraps the connection used by the HTTP client.

use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::task::coop;

use crate::model::tls::TlsFailure;
use crate::stages::message::arrivals::Arrivals;
use crate::tls::failure;

/// The length of the HTTP/2 connection preface (RFC 9113 §3.4) and of a frame header (§4.1), in bytes.
const PREFACE: usize = 24;
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;

/// The bytes that are read for one unit of a task's budget. A task has 128 units for each poll, and the HTTP client, which
/// reads interim heads (1xx) as long as there are any, therefore yields after 16 KiB.
const BYTES_PER_UNIT: usize = 128;

/// A connection to an origin that counts the request heads written and the bytes received.
pub(crate) struct WriteProgress<T> {
    inner: T,
    reader: Reader,
    traffic: Arc<Traffic>,
}

/// The counters of a connection.
#[derive(Default)]
pub(crate) struct Traffic {
    /// Request heads written. Over HTTP/1.1 each write counts, so only an increase is meaningful.
    pub(crate) heads: Arc<AtomicU64>,
    /// Bytes received, of responses or anything else.
    pub(crate) received: AtomicU64,
    /// Whether everything that has arrived has been read.
    pub(crate) arrivals: Arc<Arrivals>,
    /// The TLS alert that ended the connection.
    pub(crate) alert: OnceLock<TlsFailure>,
}

/// How request heads are detected in the written bytes.
enum Reader {
    /// HTTP/1.1, one exchange at a time: every write starts with or follows the head.
    Bytes,
    /// HTTP/2, with concurrent exchanges.
    Frames(Frames),
}

/// An incremental parser for HTTP/2 frames.
struct Frames {
    /// Bytes left of the preface or of a frame's payload.
    skip: usize,
    /// The skipped payload belongs to a HEADERS frame.
    is_head: bool,
    /// Bytes of the frame header written so far, with the length and type read from them.
    at: usize,
    length: usize,
    kind: u8,
}

impl<T> WriteProgress<T> {
    /// Wraps an HTTP/1.1 connection.
    pub(crate) fn h1(inner: T) -> Self {
        Self { inner, reader: Reader::Bytes, traffic: Arc::default() }
    }

    /// Wraps an HTTP/2 connection from its first byte.
    pub(crate) fn h2(inner: T) -> Self {
        Self { inner, reader: Reader::Frames(Frames::new()), traffic: Arc::default() }
    }

    /// Returns the counters, which remain valid after the connection has ended.
    pub(crate) fn traffic(&self) -> Arc<Traffic> {
        self.traffic.clone()
    }

    fn bytes_written(&mut self, bytes: &[u8]) {
        let heads = match &mut self.reader {
            Reader::Bytes => u64::from(!bytes.is_empty()),
            Reader::Frames(frames) => frames.read(bytes),
        };
        self.traffic.heads.fetch_add(heads, Ordering::Relaxed);
    }
}

impl Frames {
    fn new() -> Self {
        Self { skip: PREFACE, is_head: false, at: 0, length: 0, kind: 0 }
    }

    /// Returns how many HEADERS frames end within these bytes.
    fn read(&mut self, mut bytes: &[u8]) -> u64 {
        let mut heads = 0_u64;
        loop {
            let (skipped, rest) = bytes.split_at(self.skip.min(bytes.len()));
            self.skip = self.skip.saturating_sub(skipped.len());
            if self.skip == 0 && std::mem::take(&mut self.is_head) {
                heads = heads.saturating_add(1);
            }
            let Some((byte, rest)) = rest.split_first() else { return heads };
            self.header(*byte);
            bytes = rest;
        }
    }

    fn header(&mut self, byte: u8) {
        match self.at {
            0..=2 => self.length = self.length << 8 | usize::from(byte),
            3 => self.kind = byte,
            _ => {}
        }
        self.at = self.at.saturating_add(1);
        if self.at == FRAME_HEADER {
            *self = Self { skip: self.length, is_head: self.kind == HEADERS, at: 0, length: 0, kind: 0 };
        }
    }
}

/// Takes units from the budget of the task, as far as there are any.
fn take_units(units: usize, cx: &mut Context<'_>) {
    for _ in 0..units {
        if !coop::has_budget_remaining() {
            return;
        }
        if let Poll::Ready(unit) = coop::poll_proceed(cx) {
            unit.made_progress();
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for WriteProgress<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let unit = ready!(coop::poll_proceed(cx));
        let before = buf.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buf);
        let received = buf.filled().len().saturating_sub(before);
        // A read may also have to wait because the task's budget is spent.
        self.traffic.arrivals.note_read(read.is_pending() && coop::has_budget_remaining());
        if read.is_ready() {
            unit.made_progress();
            take_units(received / BYTES_PER_UNIT, cx);
        }
        self.traffic.received.fetch_add(received as u64, Ordering::Relaxed);
        if let Poll::Ready(Err(error)) = &read
            && let Some(failure) = failure::alert_behind(error)
        {
            let _ = self.traffic.alert.set(failure);
        }
        read
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for WriteProgress<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, bytes))?;
        self.bytes_written(bytes.get(..written).unwrap_or(bytes));
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = ready!(Pin::new(&mut self.inner).poll_write_vectored(cx, parts))?;
        let mut left = written;
        for part in parts {
            self.bytes_written(part.get(..left).unwrap_or(part));
            left = left.saturating_sub(part.len());
        }
        Poll::Ready(Ok(written))
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::stages::message::arrivals::PauseWatch;
    use tokio::io::AsyncWriteExt;

    /// A read that waits for the budget of its task is no pause of the origin.
    #[tokio::test]
    async fn a_spent_budget_is_no_pause() {
        for spent in 0..4 {
            let (ours, mut theirs) = tokio::io::duplex(100_000);
            theirs.write_all(&[b'x'; 100_000]).await.unwrap();
            let mut io = WriteProgress::h1(ours);
            let pauses = PauseWatch::new(io.traffic().arrivals.clone());
            let reading = std::future::poll_fn(move |cx| {
                take_units(spent, cx);
                let mut buffer = [0; 100];
                while Pin::new(&mut io).poll_read(cx, &mut ReadBuf::new(&mut buffer)).is_ready() {}
                Poll::Ready(pauses.is_drained())
            });
            assert!(!tokio::spawn(reading).await.unwrap(), "{spent}");
        }
    }

    /// However much has arrived, a poll of a task reads about 16 KiB. The rest is read in the next ones.
    #[tokio::test]
    async fn reading_yields_before_the_data_ends() {
        const ALL: usize = 1_000_000;
        for step in [100, 4_096, 20_000] {
            let (ours, mut theirs) = tokio::io::duplex(ALL);
            theirs.write_all(&vec![b'x'; ALL]).await.unwrap();
            let mut io = WriteProgress::h1(ours);
            let (mut buffer, mut total, mut polls) = (vec![0; step], 0, 0);
            let reading = std::future::poll_fn(move |cx| {
                let before = total;
                loop {
                    let mut buf = ReadBuf::new(&mut buffer);
                    match Pin::new(&mut io).poll_read(cx, &mut buf) {
                        Poll::Ready(result) => result.unwrap(),
                        Poll::Pending => break,
                    }
                    total += buf.filled().len();
                    if total == ALL {
                        return Poll::Ready(polls);
                    }
                }
                polls += 1;
                assert!(total - before <= 128 * BYTES_PER_UNIT + step, "{} bytes in a poll", total - before);
                Poll::Pending
            });
            let polls = tokio::spawn(reading).await.unwrap();
            assert!(polls >= 15, "{polls} polls");
        }
    }

    fn frame(kind: u8, payload: usize) -> Vec<u8> {
        let mut frame = (payload as u32).to_be_bytes()[1..].to_vec();
        frame.extend([kind, 0, 0, 0, 0, 1]);
        frame.extend(vec![HEADERS; payload]);
        frame
    }

    #[test]
    fn counts_heads_when_completely_written() {
        let parts =
            [vec![HEADERS; PREFACE], frame(4, 6), frame(HEADERS, 70_000), frame(0, 9), frame(HEADERS, 0), frame(4, 0)];
        let (all, first) = (parts.concat(), parts[..3].concat().len());
        for size in [1, 2, 7, 9, 33, 1_000, usize::MAX] {
            let mut frames = Frames::new();
            let mut sent = 0;
            let mut heads = 0;
            for part in all.chunks(size.min(all.len())) {
                heads += frames.read(part);
                sent += part.len();
                assert_eq!(heads >= 1, sent >= first, "{sent} in {size}");
            }
            assert_eq!(heads, 2, "{size}");
        }
    }

    #[tokio::test]
    async fn failed_writes_are_not_counted() {
        let (ours, theirs) = tokio::io::duplex(16);
        let mut io = WriteProgress::h1(ours);
        let heads = io.traffic().heads.clone();
        assert_eq!(heads.load(Ordering::Relaxed), 0);
        io.write_all(b"GET /").await.unwrap();
        assert!(heads.load(Ordering::Relaxed) > 0);
        let before = heads.load(Ordering::Relaxed);
        drop(theirs);
        assert!(io.write_all(&[0; 100]).await.is_err());
        assert_eq!(heads.load(Ordering::Relaxed), before);
        let (ours, mut theirs) = tokio::io::duplex(1_000);
        let mut io = WriteProgress::h2(ours);
        let heads = io.traffic().heads.clone();
        let bytes = [vec![0; PREFACE], frame(HEADERS, 10)].concat();
        let (one, two) = bytes.split_at(30);
        let parts = [IoSlice::new(one), IoSlice::new(two)];
        std::future::poll_fn(|cx| Pin::new(&mut io).poll_write_vectored(cx, &parts)).await.unwrap();
        io.write_all(two).await.unwrap();
        drop(io);
        tokio::io::copy(&mut theirs, &mut tokio::io::sink()).await.unwrap();
        assert!(heads.load(Ordering::Relaxed) >= 1);
    }
}

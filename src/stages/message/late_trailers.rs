//! Writes request trailers to an HTTP/1.1 origin, in a stream wrapped between hyper and the connection.
//!
//! hyper writes a trailer only if the request head announces its name, but an HTTP/2 client need not announce any
//! (RFC 9110 §6.6.2). So hyper writes the body without trailers, and this stream inserts them after the last chunk.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::{Buf, Bytes};
use http::HeaderMap;
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::stages::message::chunked::ChunkedReader;

/// The serialized trailers of one request. Empty until its body has ended.
#[derive(Clone, Default)]
pub(crate) struct Trailers(Arc<Mutex<Bytes>>);

/// The framing of a request body.
#[derive(Clone)]
pub(crate) enum Framing {
    /// A chunked body and its trailers.
    Chunked(Trailers),
    /// A body of this many bytes.
    Length(u64),
}

/// The framing of the requests announced for a connection, in the order in which they will be written.
#[derive(Clone, Default)]
pub(crate) struct FramingQueue(Arc<Mutex<VecDeque<Framing>>>);

/// An HTTP/1.1 connection that inserts trailers after the chunked bodies written to it.
pub(crate) struct LateTrailers<T> {
    inner: T,
    announced: FramingQueue,
    /// The announced messages that have not started.
    queue: VecDeque<Framing>,
    message: Position,
    /// Trailers that are being written.
    insertion: Bytes,
}

/// The parse position in the written bytes.
#[derive(Clone)]
enum Position {
    /// Between messages: the next byte starts one.
    None,
    /// In a request head, with this many bytes of the CRLF CRLF at its end matched.
    Head(u8, Framing),
    /// In a body with this many bytes left.
    Length(u64),
    /// In a chunked body, before its trailers.
    Chunked(ChunkedReader, Trailers),
    /// In a chunked body, at its trailers.
    End(ChunkedReader),
    /// In data that was not announced, such as a WebSocket. Nothing is inserted any more.
    Unknown,
}

impl Trailers {
    /// Stores fields that have passed the trailer checks. Neither names nor values can contain a line break.
    pub(crate) fn set(&self, fields: &HeaderMap) {
        let mut text = Vec::new();
        for (name, value) in fields {
            for part in [name.as_str().as_bytes(), b": ", value.as_bytes(), b"\r\n"] {
                text.extend_from_slice(part);
            }
        }
        *self.0.lock() = text.into();
    }

    fn take(&self) -> Bytes {
        std::mem::take(&mut *self.0.lock())
    }
}

impl FramingQueue {
    /// Announces the next request to be written.
    pub(crate) fn push(&self, framing: Framing) {
        self.0.lock().push_back(framing);
    }
}

impl Position {
    /// Parses `bytes` up to the next insertion point. Returns the number of bytes parsed, and the trailers to insert
    /// there.
    fn advance(&mut self, queue: &mut impl Iterator<Item = Framing>, bytes: &[u8]) -> (usize, Option<Trailers>) {
        let mut passed = 0_usize;
        while let Some(rest) = bytes.get(passed..).filter(|rest| !rest.is_empty()) {
            let (next, part) = match std::mem::replace(self, Self::Unknown) {
                Self::None => (queue.next().map_or(Self::Unknown, |framing| Self::Head(0, framing)), 0),
                Self::Head(matched, framing) => match (match_head_end(matched, rest), framing) {
                    ((4, part), Framing::Chunked(trailers)) => (Self::Chunked(ChunkedReader::new(0), trailers), part),
                    ((4, part), Framing::Length(0)) => (Self::None, part),
                    ((4, part), Framing::Length(length)) => (Self::Length(length), part),
                    ((matched, part), framing) => (Self::Head(matched, framing), part),
                },
                Self::Length(left) => {
                    let part = usize::try_from(left).unwrap_or(usize::MAX).min(rest.len());
                    let left = left.saturating_sub(part as u64);
                    (if left == 0 { Self::None } else { Self::Length(left) }, part)
                }
                Self::Chunked(mut chunks, trailers) => {
                    let part = chunks.pass_data(rest);
                    if chunks.is_at_trailers() {
                        *self = Self::End(chunks);
                        return (passed.saturating_add(part), Some(trailers));
                    }
                    (if chunks.is_broken() { Self::Unknown } else { Self::Chunked(chunks, trailers) }, part)
                }
                Self::End(mut chunks) => {
                    let part = chunks.pass(rest);
                    let next = if chunks.is_broken() { Self::Unknown } else { Self::End(chunks.clone()) };
                    (if chunks.is_over() { Self::None } else { next }, part)
                }
                Self::Unknown => return (bytes.len(), None),
            };
            *self = next;
            passed = passed.saturating_add(part);
        }
        (passed, None)
    }
}

/// Returns how many bytes of the CRLF CRLF that ends a head are matched after `bytes`, and how many of `bytes` belong
/// to the head.
fn match_head_end(mut matched: u8, bytes: &[u8]) -> (u8, usize) {
    for (at, byte) in bytes.iter().enumerate() {
        matched = match (matched, byte) {
            (0 | 2, b'\r') | (1 | 3, b'\n') => matched.saturating_add(1),
            (_, b'\r') => 1,
            _ => 0,
        };
        if matched == 4 {
            return (4, at.saturating_add(1));
        }
    }
    (matched, bytes.len())
}

impl<T> LateTrailers<T> {
    pub(crate) fn new(inner: T) -> Self {
        let (announced, queue) = (FramingQueue::default(), VecDeque::new());
        Self { inner, announced, queue, message: Position::None, insertion: Bytes::new() }
    }

    /// Returns the queue that announces requests for this connection.
    pub(crate) fn announced(&self) -> FramingQueue {
        self.announced.clone()
    }

    /// Returns the number of bytes before the next insertion point, or `None` if these bytes contain none.
    fn insertion_point<'b>(&mut self, parts: impl Iterator<Item = &'b [u8]>) -> Option<usize> {
        self.queue.append(&mut self.announced.0.lock());
        let (mut message, mut queue) = (self.message.clone(), self.queue.iter().cloned());
        let mut before = 0_usize;
        for part in parts {
            let (passed, trailers) = message.advance(&mut queue, part);
            before = before.saturating_add(passed);
            if trailers.is_some() {
                return Some(before);
            }
        }
        None
    }

    /// Parses bytes that were written to the connection.
    fn bytes_written(&mut self, bytes: &[u8]) {
        let Self { queue, message, .. } = self;
        let (_, trailers) = message.advance(&mut std::iter::from_fn(|| queue.pop_front()), bytes);
        if let Some(trailers) = trailers {
            self.insertion = trailers.take();
        }
    }
}

impl<T: AsyncWrite + Unpin> LateTrailers<T> {
    fn poll_insertion(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.insertion.is_empty() {
            match ready!(Pin::new(&mut self.inner).poll_write(cx, &self.insertion))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                written => self.insertion.advance(written.min(self.insertion.len())),
            }
        }
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for LateTrailers<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for LateTrailers<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_insertion(cx))?;
        let max = self.insertion_point(std::iter::once(bytes)).unwrap_or(bytes.len());
        let bytes = bytes.get(..max).unwrap_or(bytes);
        let written = ready!(Pin::new(&mut self.inner).poll_write(cx, bytes))?;
        self.bytes_written(bytes.get(..written).unwrap_or(bytes));
        Poll::Ready(Ok(written))
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        ready!(self.poll_insertion(cx))?;
        if self.insertion_point(parts.iter().map(|part| &**part)).is_some() {
            // This happens once per message: write one part at a time up to the insertion point.
            let first = parts.iter().find(|part| !part.is_empty()).map_or(&[][..], |part| part);
            return self.poll_write(cx, first);
        }
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
        ready!(self.poll_insertion(cx))?;
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn fields() -> HeaderMap {
        let mut fields = HeaderMap::new();
        fields.append("x-late", http::HeaderValue::from_static("1"));
        fields.append("x-late", http::HeaderValue::from_static("2"));
        fields
    }

    /// Returns a message as hyper writes it, its announced framing, and the bytes expected on the wire.
    fn message(kind: u8, data: &str) -> (String, Framing, String) {
        let trailers = Trailers::default();
        let body = if data.is_empty() { String::new() } else { format!("{:X}\r\n{data}\r\n", data.len()) };
        let chunked = format!("POST / HTTP/1.1\r\ntransfer-encoding: chunked\r\n\r\n{body}0\r\n");
        match kind {
            0 => {
                trailers.set(&fields());
                let out = format!("{chunked}x-late: 1\r\nx-late: 2\r\n\r\n");
                (format!("{chunked}\r\n"), Framing::Chunked(trailers), out)
            }
            1 => (format!("{chunked}\r\n"), Framing::Chunked(trailers), format!("{chunked}\r\n")),
            _ => {
                let text = format!("POST / HTTP/1.1\r\ncontent-length: {}\r\n\r\n{data}", data.len());
                (text.clone(), Framing::Length(data.len() as u64), text)
            }
        }
    }

    async fn through(messages: &[(String, Framing, String)], steps: &[usize], room: usize, vectored: bool) -> String {
        let (ours, mut theirs) = tokio::io::duplex(room);
        let mut io = LateTrailers::new(ours);
        let announced = io.announced();
        for (_, framing, _) in messages {
            announced.push(framing.clone());
        }
        let text: String = messages.iter().map(|(text, ..)| text.as_str()).collect();
        let steps = steps.to_vec();
        let writing = async move {
            let (mut rest, mut step) = (text.as_bytes(), steps.iter().cycle());
            while !rest.is_empty() {
                let (one, two) = rest.split_at((*step.next().unwrap()).min(rest.len()));
                if vectored {
                    let more = two.get(..two.len().min(5)).unwrap();
                    let parts = [IoSlice::new(&[]), IoSlice::new(one), IoSlice::new(more)];
                    let written = std::future::poll_fn(|cx| Pin::new(&mut io).poll_write_vectored(cx, &parts)).await;
                    rest = &rest[written.unwrap()..];
                } else {
                    io.write_all(one).await.unwrap();
                    rest = two;
                }
            }
            io.flush().await.unwrap();
            drop(io);
        };
        let mut out = String::new();
        let (_, read) = tokio::join!(writing, theirs.read_to_string(&mut out));
        read.unwrap();
        out
    }

    proptest! {
        /// For all write sizes and all partial writes.
        #[test]
        fn inserts_trailers_only_after_the_last_chunk(
            kinds in prop::collection::vec((0_u8..3, "(|0\r\n\r\n|hello|0\r\n|\r\n\r\nPOST )"), 1..4),
            steps in prop::collection::vec(1_usize..40, 1..6),
            room in 1_usize..64,
            vectored: bool,
        ) {
            let messages: Vec<_> = kinds.iter().map(|(kind, data)| message(*kind, data)).collect();
            let want: String = messages.iter().map(|(_, _, want)| want.as_str()).collect();
            let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
            prop_assert_eq!(runtime.block_on(through(&messages, &steps, room, vectored)), want);
        }
    }

    #[tokio::test]
    async fn passes_unannounced_data_unchanged() {
        let (text, _, _) = message(0, "hello");
        let unannounced = (text.clone(), Framing::Length(0), String::new());
        let sent = through(&[unannounced], &[7], 1000, false).await;
        assert_eq!(sent, text);
        let broken = ("POST / HTTP/1.1\r\n\r\nzz\r\n0\r\n\r\n".to_owned(), message(0, "").1, String::new());
        let want = broken.0.clone();
        assert_eq!(through(&[broken], &[3], 1000, false).await, want);
    }
}

//! Bounds the size of DNS answers over TCP, before they are parsed.
//!
//! The owner of a zone decides what its answers contain. An answer of 64 KiB can hold thousands of names of 255 bytes, and
//! reading them takes tens of milliseconds, in which a thread does nothing else. Over UDP answers are small already.

use std::future::Future;
use std::io;
use std::net::SocketAddr;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use hickory_resolver::net::runtime::iocompat::AsyncIoTokioAsStd;
use hickory_resolver::net::runtime::{RuntimeProvider, TokioRuntimeProvider};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// The size of the largest answer that is read, in bytes: two hundred addresses with some names.
const MAX_ANSWER: usize = 4096;
/// The length before each message (RFC 1035 §4.2.2).
const LENGTH: usize = 2;
/// The length and the header of a message (RFC 1035 §4.1.1).
const HEAD: usize = LENGTH + 12;
/// The response code of a server that failed (RFC 1035 §4.1.1).
const SERVFAIL: u8 = 2;

/// The sockets of the resolver.
#[derive(Clone)]
pub(super) struct DnsSockets {
    tokio: TokioRuntimeProvider,
    /// The servers with which DNS is spoken over TCP without TLS. Of an encrypted stream the messages cannot be seen here.
    plain: Arc<[SocketAddr]>,
}

impl DnsSockets {
    /// Bounds the answers of these servers.
    pub(super) fn new(plain: Arc<[SocketAddr]>) -> Self {
        Self { tokio: TokioRuntimeProvider::default(), plain }
    }
}

impl RuntimeProvider for DnsSockets {
    type Handle = <TokioRuntimeProvider as RuntimeProvider>::Handle;
    type Timer = <TokioRuntimeProvider as RuntimeProvider>::Timer;
    type Udp = <TokioRuntimeProvider as RuntimeProvider>::Udp;
    type Tcp = AsyncIoTokioAsStd<AnswerStream<TcpStream>>;

    fn create_handle(&self) -> Self::Handle {
        self.tokio.create_handle()
    }

    fn connect_tcp(
        &self,
        server: SocketAddr,
        bind: Option<SocketAddr>,
        timeout: Option<Duration>,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Tcp>>>> {
        let connect = self.tokio.connect_tcp(server, bind, timeout);
        let bounded = self.plain.contains(&server);
        Box::pin(async move { Ok(AsyncIoTokioAsStd(AnswerStream::new(connect.await?.0, bounded))) })
    }

    fn bind_udp(
        &self,
        local: SocketAddr,
        server: SocketAddr,
    ) -> Pin<Box<dyn Send + Future<Output = io::Result<Self::Udp>>>> {
        self.tokio.bind_udp(local, server)
    }
}

/// A connection to a DNS server. In place of each answer that is too large, it returns one without records that says that
/// the server failed. Other queries on the connection are not affected.
pub(super) struct AnswerStream<S> {
    inner: S,
    /// `None` if the answers are not bounded.
    answer: Option<Answer>,
}

/// The answer that is read.
#[derive(Default)]
struct Answer {
    /// Its length and header. Once complete, those that are returned.
    head: [u8; HEAD],
    /// The number of bytes of the head that have been received, and that have been returned.
    received: usize,
    returned: usize,
    /// The number of bytes behind the head that are still to be returned, or to be dropped.
    rest: usize,
    is_dropped: bool,
}

impl<S> AnswerStream<S> {
    fn new(inner: S, bounded: bool) -> Self {
        Self { inner, answer: bounded.then(Answer::default) }
    }
}

impl Answer {
    /// Decides over the answer when its head is complete.
    ///
    /// # Errors
    /// [`io::ErrorKind::InvalidData`] if it is shorter than a header.
    fn decide(&mut self) -> io::Result<()> {
        let [high, low, _, _, _, flags, counts @ ..] = &mut self.head;
        let length = usize::from(u16::from_be_bytes([*high, *low]));
        let Some(rest) = length.checked_sub(HEAD - LENGTH) else {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "a DNS message shorter than its header"));
        };
        self.rest = rest;
        self.is_dropped = length > MAX_ANSWER;
        if self.is_dropped {
            tracing::debug!("a DNS answer of {length} bytes is not read; the maximum is {MAX_ANSWER}");
            (*high, *low, *counts) = (0, (HEAD - LENGTH) as u8, [0; 8]);
            *flags = (*flags & 0xf0) | SERVFAIL;
        }
        Ok(())
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AnswerStream<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let Self { inner, answer } = self.get_mut();
        let Some(answer) = answer else { return Pin::new(inner).poll_read(cx, buffer) };
        loop {
            if answer.received < HEAD {
                let read = ready!(poll_into(inner, cx, answer.head.get_mut(answer.received..)))?;
                if read == 0 {
                    return Poll::Ready(Ok(()));
                }
                answer.received = answer.received.saturating_add(read);
                if answer.received == HEAD {
                    answer.decide()?;
                }
                continue;
            }
            let head = answer.head.get(answer.returned..).unwrap_or_default();
            if !head.is_empty() {
                let part = head.get(..buffer.remaining()).unwrap_or(head);
                buffer.put_slice(part);
                answer.returned = answer.returned.saturating_add(part.len());
                return Poll::Ready(Ok(()));
            }
            if answer.rest == 0 {
                *answer = Answer::default();
                continue;
            }
            if answer.is_dropped {
                let mut dropped = [0; MAX_ANSWER];
                let read = ready!(poll_into(inner, cx, dropped.get_mut(..answer.rest.min(MAX_ANSWER))))?;
                if read == 0 {
                    return Poll::Ready(Ok(()));
                }
                answer.rest = answer.rest.saturating_sub(read);
                continue;
            }
            let length = answer.rest.min(buffer.remaining());
            let read = ready!(poll_into(inner, cx, Some(buffer.initialize_unfilled_to(length))))?;
            buffer.advance(read);
            answer.rest = answer.rest.saturating_sub(read);
            return Poll::Ready(Ok(()));
        }
    }
}

/// Reads into a buffer and returns the number of bytes read.
fn poll_into<S: AsyncRead + Unpin>(
    stream: &mut S,
    cx: &mut Context<'_>,
    buffer: Option<&mut [u8]>,
) -> Poll<io::Result<usize>> {
    let mut buffer = ReadBuf::new(buffer.unwrap_or_default());
    ready!(Pin::new(stream).poll_read(cx, &mut buffer))?;
    Poll::Ready(Ok(buffer.filled().len()))
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AnswerStream<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().inner).poll_write(cx, bytes)
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};

    use super::*;

    fn message(id: u8, length: usize) -> Vec<u8> {
        let mut message = (length as u16).to_be_bytes().to_vec();
        message.extend([0, id, 0x81, 0x80, 0, 1, 2, 3, 0, 0, 0, 0]);
        message.resize(LENGTH + length, id);
        message
    }

    fn failure(id: u8) -> Vec<u8> {
        vec![0, 12, 0, id, 0x81, 0x82, 0, 0, 0, 0, 0, 0, 0, 0]
    }

    /// Returns what is read of these bytes, of which at most `piece` arrive at a time.
    async fn pass(sent: &[u8], piece: usize, bounded: bool) -> io::Result<Vec<u8>> {
        let (reader, mut writer) = duplex(piece);
        let (mut stream, mut received) = (AnswerStream::new(reader, bounded), Vec::new());
        let write = async {
            // The reader may stop early.
            let _ = writer.write_all(sent).await;
            drop(writer);
        };
        let (read, ()) = tokio::join!(
            async {
                let read = stream.read_to_end(&mut received).await;
                drop(stream);
                read
            },
            write
        );
        read.map(|_| received)
    }

    #[tokio::test]
    async fn large_answers_become_failures_wherever_the_stream_is_cut() {
        let sent =
            [message(1, 40), message(2, MAX_ANSWER + 1), message(3, MAX_ANSWER), message(4, 65_535), message(5, 12)];
        let want = [message(1, 40), failure(2), message(3, MAX_ANSWER), failure(4), message(5, 12)].concat();
        let sent = sent.concat();
        for piece in [1, 2, 3, 13, 14, 15, 100, 4096, 5000, sent.len()] {
            assert_eq!(pass(&sent, piece, true).await.unwrap(), want, "pieces of {piece} bytes");
        }
    }

    #[tokio::test]
    async fn a_message_shorter_than_its_header_is_an_error() {
        let short = [&[0, 11][..], &[0; 12]].concat();
        assert_eq!(pass(&short, 100, true).await.unwrap_err().kind(), io::ErrorKind::InvalidData);
    }

    #[tokio::test]
    async fn an_encrypted_stream_is_passed_as_it_is() {
        let sent = message(1, 20_000);
        assert_eq!(pass(&sent, 100, false).await.unwrap(), sent);
    }
}

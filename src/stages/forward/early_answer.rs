//! A connection to an origin that may respond before it has read the whole request.
//!
//! An origin that refuses an upload (413) responds and closes. The next write then fails, and hyper would report this
//! error instead of the response. So writes to a closed connection are discarded, and the exchange ends with what is
//! read: the response or the end of the stream.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

pub(crate) struct EarlyAnswer<T> {
    inner: T,
    closed: bool,
}

impl<T> EarlyAnswer<T> {
    pub(crate) fn new(inner: T) -> Self {
        Self { inner, closed: false }
    }

    fn ignore_closed<R>(&mut self, step: Poll<io::Result<R>>, swallowed: R) -> Poll<io::Result<R>> {
        match step {
            Poll::Ready(Err(error)) if is_closed(&error) => {
                self.closed = true;
                Poll::Ready(Ok(swallowed))
            }
            other => other,
        }
    }
}

fn is_closed(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset)
}

impl<T: AsyncRead + Unpin> AsyncRead for EarlyAnswer<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_read(cx, buf)
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for EarlyAnswer<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        if self.closed {
            return Poll::Ready(Ok(buf.len()));
        }
        let step = Pin::new(&mut self.inner).poll_write(cx, buf);
        self.ignore_closed(step, buf.len())
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.closed {
            return Poll::Ready(Ok(()));
        }
        let step = Pin::new(&mut self.inner).poll_flush(cx);
        self.ignore_closed(step, ())
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let all = bufs.iter().map(|buf| buf.len()).sum();
        if self.closed {
            return Poll::Ready(Ok(all));
        }
        let step = Pin::new(&mut self.inner).poll_write_vectored(cx, bufs);
        self.ignore_closed(step, all)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

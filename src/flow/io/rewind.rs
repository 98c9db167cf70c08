//! A stream with bytes put back before it.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// A stream with bytes that were read ahead put back before it.
pub(in crate::flow) struct Rewind<T> {
    prefix: Bytes,
    inner: T,
}

impl<T> Rewind<T> {
    pub(in crate::flow) fn new(prefix: Bytes, inner: T) -> Self {
        Self { prefix, inner }
    }

    /// Returns the bytes that were read ahead and not returned, and the stream.
    pub(in crate::flow) fn into_parts(self) -> (Bytes, T) {
        (self.prefix, self.inner)
    }

    /// Puts bytes back that were read.
    pub(in crate::flow) fn put_back(self, seen: Bytes) -> Self {
        let Self { prefix, inner } = self;
        Self { prefix: if prefix.is_empty() { seen } else { [seen, prefix].concat().into() }, inner }
    }

    /// Replaces the stream.
    pub(in crate::flow) fn map<U>(self, wrap: impl FnOnce(T) -> U) -> Rewind<U> {
        Rewind { prefix: self.prefix, inner: wrap(self.inner) }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for Rewind<T> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        if self.prefix.is_empty() {
            return Pin::new(&mut self.inner).poll_read(cx, buf);
        }
        let n = self.prefix.len().min(buf.remaining());
        if let Some(head) = self.prefix.get(..n) {
            buf.put_slice(head);
        }
        self.prefix.advance(n);
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for Rewind<T> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

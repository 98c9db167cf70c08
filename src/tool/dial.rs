//! Opens sockets, only to the proxy. The system resolver looks up its name and no other.

use std::io;
use std::path::Path;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// TLS to the proxy.
pub(super) struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Verifies the certificate with the public roots, or with `roots` alone. Returns `None` if those cannot be read or
    /// the name is invalid.
    pub(super) fn to(host: &str, roots: Option<&[u8]>) -> Option<Self> {
        let mut store = RootCertStore::empty();
        match roots {
            Some(pem) => {
                let certificates = CertificateDer::pem_slice_iter(pem).collect::<Result<Vec<_>, _>>().ok()?;
                let (added, ignored) = store.add_parsable_certificates(certificates);
                if added == 0 || ignored > 0 {
                    return None;
                }
            }
            None => store.extend(webpki_roots::TLS_SERVER_ROOTS.iter().cloned()),
        }
        let provider = Arc::new(rustls::crypto::aws_lc_rs::default_provider());
        let config = ClientConfig::builder_with_provider(provider).with_safe_default_protocol_versions().ok()?;
        let config = config.with_root_certificates(store).with_no_client_auth();
        Some(Self { config: Arc::new(config), name: ServerName::try_from(host.to_owned()).ok()? })
    }

    pub(super) async fn over<S>(&self, stream: S) -> io::Result<TlsStream<S>>
    where
        S: AsyncRead + AsyncWrite + Unpin,
    {
        TlsConnector::from(self.config.clone()).connect(self.name.clone(), stream).await
    }
}

#[expect(clippy::disallowed_methods, reason = "to the proxy, not to an origin")]
pub(super) async fn tcp(host: &str, port: u16) -> io::Result<ReadTimeout<TcpStream>> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    Ok(ReadTimeout::new(stream))
}

pub(super) async fn unix(path: &Path) -> io::Result<ReadTimeout<UnixStream>> {
    UnixStream::connect(path).await.map(ReadTimeout::new)
}

/// A stream whose response is read even if writing the request fails, because the proxy may answer and close early. A
/// proxy that does not respond runs into a timeout, and bytes that arrive before the request are ignored.
pub(super) struct ReadTimeout<S> {
    inner: S,
    has_asked: bool,
    is_refused: bool,
    waiting: Option<Waker>,
}

impl<S> ReadTimeout<S> {
    fn new(inner: S) -> Self {
        Self { inner, has_asked: false, is_refused: false, waiting: None }
    }

    fn wrote(&mut self, written: Poll<io::Result<usize>>, all: usize) -> Poll<io::Result<usize>> {
        let written = match written {
            Poll::Ready(Err(_)) => {
                self.is_refused = true;
                Poll::Ready(Ok(all))
            }
            other => other,
        };
        if written.is_ready() && !std::mem::replace(&mut self.has_asked, true) {
            self.waiting.take().into_iter().for_each(Waker::wake);
        }
        written
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ReadTimeout<S> {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.has_asked {
            return Pin::new(&mut this.inner).poll_read(cx, buffer);
        }
        this.waiting = Some(cx.waker().clone());
        Poll::Pending
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ReadTimeout<S> {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        if this.is_refused {
            return Poll::Ready(Ok(bytes.len()));
        }
        let written = Pin::new(&mut this.inner).poll_write(cx, bytes);
        this.wrote(written, bytes.len())
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        let all = parts.iter().map(|part| part.len()).sum();
        if this.is_refused {
            return Poll::Ready(Ok(all));
        }
        let written = Pin::new(&mut this.inner).poll_write_vectored(cx, parts);
        this.wrote(written, all)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().inner).poll_shutdown(cx)
    }
}

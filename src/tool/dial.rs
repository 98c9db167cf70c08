//! The only sockets here: to the proxy itself. Its name is looked up as the system does it; no other name ever is.

use std::io;
use std::path::Path;
use std::sync::Arc;

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, ServerName};
use rustls::{ClientConfig, RootCertStore};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// TLS to the proxy.
pub(super) struct Tls {
    config: Arc<ClientConfig>,
    name: ServerName<'static>,
}

impl Tls {
    /// Proven by the public roots, or by `roots` alone. None if those are unreadable, or the name is none.
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
pub(super) async fn tcp(host: &str, port: u16) -> io::Result<TcpStream> {
    let stream = TcpStream::connect((host, port)).await?;
    stream.set_nodelay(true)?;
    Ok(stream)
}

pub(super) async fn unix(path: &Path) -> io::Result<UnixStream> {
    UnixStream::connect(path).await
}

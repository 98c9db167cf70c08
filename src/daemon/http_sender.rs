//! Sends documents to one of the daemon's own servers by POST requests, over one connection at a time.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_TYPE, HOST, HeaderName, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Collected, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::own_server::{OwnServers, ServerAddress};
use crate::ledger::Connect;
use crate::policy::hook_url::HookUrl;
use crate::policy::settings::Source;
use crate::policy::source;
use crate::stages::forward::EarlyAnswer;
use crate::stages::pin::OwnServer;

/// The time limit for a connection with TLS, and for the values of fields.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for one document, up to the end of the response.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for the body of a response.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum size of a response body, in bytes. A connection with a larger one is closed.
const MAX_RESPONSE: usize = 64 * 1024;
/// The maximum size of a response head, in bytes.
const MAX_HEAD: usize = 64 * 1024;

/// Sends documents to one URL.
pub(super) struct HttpSender {
    url: HookUrl,
    content_type: &'static str,
    fields: Vec<SecretField>,
    connect: Connect,
    connection: Option<Connection>,
}

/// A field with a value from elsewhere.
#[derive(Clone)]
pub(super) struct SecretField {
    /// The name of the field.
    pub(super) name: HeaderName,
    /// The source of its value.
    pub(super) source: Source,
    /// The key of the configuration that names the source.
    pub(super) key: String,
}

struct Connection {
    sender: http1::SendRequest<Full<Bytes>>,
    _driver: AbortOnDropHandle<hyper::Result<()>>,
}

/// Why a document was not sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// The document is too large for the server.
    #[error("the server refuses the size of a document")]
    TooLarge,
    /// The server answered with another status than 2xx.
    #[error("the server answered {status}")]
    Status {
        /// The status.
        status: StatusCode,
        /// How long the server asks to wait.
        retry_after: Option<Duration>,
    },
    /// The value of a field cannot be read.
    #[error("{0}: {1}")]
    Field(String, String),
    /// The connection cannot be opened, or has failed.
    #[error("{0}")]
    Connection(String),
}

impl From<io::Error> for SendError {
    fn from(error: io::Error) -> Self {
        Self::Connection(error.to_string())
    }
}

impl From<hyper::Error> for SendError {
    fn from(error: hyper::Error) -> Self {
        // The text of hyper's error has no data of the server.
        Self::Connection(error.to_string())
    }
}

impl SendError {
    pub(super) fn no_answer() -> Self {
        Self::Connection("no answer in time".to_owned())
    }
}

impl HttpSender {
    /// Fields are sent to servers with TLS only, which the configuration ensures.
    pub(super) fn new(
        (server, url): (OwnServer, HookUrl),
        content_type: &'static str,
        fields: Vec<SecretField>,
        own_servers: &OwnServers<'_>,
    ) -> Self {
        let HookUrl { host, port, is_tls, .. } = &url;
        let connect = own_servers.connector(&ServerAddress { server, host, port: *port, is_tls: *is_tls });
        Self { url, content_type, fields, connect, connection: None }
    }

    /// Sends a document. Returns the body of the response, or nothing if it cannot be read.
    ///
    /// # Errors
    /// [`SendError`]. The server may have taken the document.
    pub(super) async fn send(&mut self, document: Vec<u8>) -> Result<Bytes, SendError> {
        // A connection that fails is not used again.
        let connection = match self.connection.take().filter(|connection| !connection.sender.is_closed()) {
            Some(connection) => connection,
            None => self.open().await?,
        };
        let sent = timeout(SEND_TIMEOUT, self.post(connection, document));
        let (connection, body) = sent.await.map_err(|_| SendError::no_answer())??;
        self.connection = connection;
        Ok(body)
    }

    /// Connects, to see whether the server can be reached and the values of fields be read.
    ///
    /// # Errors
    /// [`SendError`].
    pub(super) async fn try_open(&mut self) -> Result<(), SendError> {
        let fields = timeout(CONNECT_TIMEOUT, self.fields());
        fields.await.map_err(|_| SendError::no_answer())??;
        self.open().await.map(drop)
    }

    async fn open(&mut self) -> Result<Connection, SendError> {
        let opened = timeout(CONNECT_TIMEOUT, async {
            // A server may refuse a document before it has read it.
            let stream = TokioIo::new(EarlyAnswer::new((self.connect)().await?));
            let handshake = http1::Builder::new().max_buf_size(MAX_HEAD).handshake(stream);
            let (sender, driver) = handshake.await?;
            Ok(Connection { sender, _driver: AbortOnDropHandle::new(tokio::spawn(driver)) })
        });
        opened.await.map_err(|_| SendError::no_answer())?
    }

    /// Returns the connection if it can be used again, and the body of the response.
    async fn post(
        &self,
        mut connection: Connection,
        document: Vec<u8>,
    ) -> Result<(Option<Connection>, Bytes), SendError> {
        let request = self.request(document).await?;
        connection.sender.ready().await?;
        let (head, body) = connection.sender.send_request(request).await?.into_parts();
        // The status decides. The rest only shows whether the connection can be used again.
        let read = timeout(BODY_TIMEOUT, Limited::new(body, MAX_RESPONSE).collect()).await;
        let read = read.ok().and_then(Result::ok).map(Collected::to_bytes);
        match head.status {
            status if status.is_success() => Ok((read.is_some().then_some(connection), read.unwrap_or_default())),
            StatusCode::PAYLOAD_TOO_LARGE => Err(SendError::TooLarge),
            status => Err(SendError::Status { status, retry_after: retry_after(&head.headers) }),
        }
    }

    async fn request(&self, document: Vec<u8>) -> Result<Request<Full<Bytes>>, SendError> {
        let mut request = Request::post(self.url.path())
            .header(HOST, self.url.host_field())
            .header(USER_AGENT, concat!("exeat/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, self.content_type)
            .body(Full::new(Bytes::from(document)))
            .map_err(|error| SendError::Connection(error.to_string()))?;
        request.headers_mut().extend(self.fields().await?);
        Ok(request)
    }

    /// Reads the values each time, because they may have been replaced in their files.
    async fn fields(&self) -> Result<HeaderMap, SendError> {
        if self.fields.is_empty() {
            return Ok(HeaderMap::new());
        }
        let fields = self.fields.clone();
        // A file may be on a disk that hangs.
        let read = spawn_blocking(move || fields.into_iter().map(read_field).collect::<Result<HeaderMap, _>>());
        read.await.map_err(io::Error::other)?
    }
}

fn read_field(SecretField { name, source, key }: SecretField) -> Result<(HeaderName, HeaderValue), SendError> {
    let value = source::read_source(&source, &|name| std::env::var(name).ok());
    let value = value.map_err(|error| SendError::Field(key.clone(), error.to_string()))?;
    let mut value = HeaderValue::from_bytes(value.expose())
        .map_err(|_| SendError::Field(key, "the value is not one of a header".to_owned()))?;
    value.set_sensitive(true);
    Ok((name, value))
}

/// Returns the seconds of `Retry-After`. Its other form, a date, is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}

//! Requests to servers that values of credentials are fetched from. Redirects are not followed.

use std::io;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{CONTENT_TYPE, DATE, RETRY_AFTER};
use http::{HeaderMap, Request, Response};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::{Bytes, Incoming};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use zeroize::Zeroizing;

use super::own_server::{OwnServerDialer, ServerAddress};
use crate::policy::hook_url::HookUrl;
use crate::stages::forward::EarlyAnswer;
use crate::stages::mint::MintError;
use crate::stages::pin::OwnServer;

/// The time limit for a connection with TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for a request, and again for the rest of its response.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(20);
/// The maximum size of a response's head, in bytes.
const MAX_HEAD: usize = 64 * 1024;

/// Sends requests to servers of one kind.
#[derive(Clone)]
pub(super) struct OwnRequests {
    pub(super) dialer: OwnServerDialer,
    /// The kind of the servers.
    pub(super) server: OwnServer,
    /// The word for such a server in error texts.
    pub(super) name: &'static str,
}

/// A connection, open until its response has been read.
struct Connection {
    _sender: http1::SendRequest<Full<Bytes>>,
    _driver: AbortOnDropHandle<hyper::Result<()>>,
}

impl OwnRequests {
    /// Sends a request on a connection of its own, and returns the head of the response.
    pub(super) async fn send(
        &self,
        url: &HookUrl,
        request: Request<Full<Bytes>>,
    ) -> Result<Response<Incoming>, MintError> {
        let HookUrl { host, port, is_tls, .. } = url;
        let address = ServerAddress { server: self.server, host, port: *port, is_tls: *is_tls };
        let unreachable =
            |error: io::Error| MintError::new(format!("the {} cannot be reached: {}", self.name, cause(&error)));
        let opened = timeout(CONNECT_TIMEOUT, self.dialer.connect(&address)).await;
        let stream = opened.map_err(|_| self.no_answer())?.map_err(unreachable)?;
        // The text of hyper's errors has no data of the server.
        let failed = |error: hyper::Error| MintError::new(format!("the connection failed: {error}"));
        let sent = timeout(ANSWER_TIMEOUT, async {
            let stream = TokioIo::new(EarlyAnswer::new(stream));
            let handshake = http1::Builder::new().max_buf_size(MAX_HEAD).handshake(stream);
            let (mut sender, driver) = handshake.await.map_err(failed)?;
            let driver = AbortOnDropHandle::new(tokio::spawn(driver));
            let mut response = sender.send_request(request).await.map_err(failed)?;
            // The connection must live as long as its response.
            response.extensions_mut().insert(Arc::new(Connection { _sender: sender, _driver: driver }));
            Ok(response)
        });
        sent.await.map_err(|_| self.no_answer())?
    }

    /// Reads the whole body of a response, up to `max` bytes.
    pub(super) async fn read(&self, body: Incoming, max: usize) -> Result<Zeroizing<Vec<u8>>, MintError> {
        let read = timeout(ANSWER_TIMEOUT, Limited::new(body, max).collect()).await;
        let body = read.map_err(|_| self.no_answer())?.map_err(|error| match error.is::<LengthLimitError>() {
            true => MintError::lasting("the answer is too long"),
            false => MintError::new("the answer is incomplete"),
        })?;
        Ok(Zeroizing::new(body.to_bytes().to_vec()))
    }

    fn no_answer(&self) -> MintError {
        MintError::new(format!("the {} did not answer in time", self.name))
    }
}

/// Returns the cause in the proxy's own words: the text of a TLS error may have names of the server's certificate.
fn cause(error: &io::Error) -> String {
    match error.kind() {
        io::ErrorKind::InvalidData => "the TLS handshake failed".to_owned(),
        // The code of a refusal.
        io::ErrorKind::Other => error.to_string(),
        kind => kind.to_string(),
    }
}

/// Returns true if the body of a response is JSON.
pub(super) fn is_json(headers: &HeaderMap) -> bool {
    headers.get(CONTENT_TYPE).and_then(|kind| kind.to_str().ok()).is_some_and(|kind| {
        let essence = kind.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        essence == "application/json" || essence.ends_with("+json")
    })
}

/// Returns the time of the server's clock.
pub(super) fn date(headers: &HeaderMap) -> Option<SystemTime> {
    httpdate::parse_http_date(headers.get(DATE)?.to_str().ok()?).ok()
}

/// Returns the seconds of `Retry-After`. Its other form, a date, is ignored.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}

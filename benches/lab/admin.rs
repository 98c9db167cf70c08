//! Requests to the admin listener.

use std::path::Path;
use std::time::Duration;

use bytes::Bytes;
use http::Request;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::net::UnixStream;
use tokio::time::timeout;

/// The maximum duration of a request.
pub(crate) const TIMEOUT: Duration = Duration::from_secs(30);

/// Sends a request to the admin listener, and returns the JSON of the response.
pub(crate) async fn request(socket: &Path, method: &str, path: &str, body: Option<Value>) -> Result<Value, String> {
    let exchange = async {
        let stream = UnixStream::connect(socket).await.map_err(|error| error.to_string())?;
        let (mut sender, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(stream)).await.map_err(|error| error.to_string())?;
        let driver = tokio::spawn(connection);
        let body = Full::new(body.map_or_else(Bytes::new, |body| body.to_string().into()));
        let request = Request::builder().method(method).uri(path).header("host", "localhost").body(body).unwrap();
        let response = sender.send_request(request).await.map_err(|error| error.to_string())?;
        let status = response.status();
        let bytes = response.into_body().collect().await.map_err(|error| error.to_string())?.to_bytes();
        driver.abort();
        let text = String::from_utf8_lossy(&bytes).into_owned();
        if !status.is_success() {
            return Err(format!("{status}: {text}"));
        }
        serde_json::from_str(&text).map_err(|error| format!("{error}: {text}"))
    };
    let answered = timeout(TIMEOUT, exchange).await;
    let answered = answered.unwrap_or_else(|_| Err(format!("no answer within {TIMEOUT:?}")));
    answered.map_err(|error| format!("admin {method} {path}: {error}"))
}

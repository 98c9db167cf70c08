//! The client of the proxy: its address and token, and one connection per request.

use std::fmt;
use std::io;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_TYPE, HOST, PROXY_AUTHORIZATION, TE};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Request, Response, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper::body::Incoming;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use percent_encoding::percent_decode_str;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use zeroize::Zeroizing;

use super::dial::{Tls, tcp, unix};
use crate::model::refusal::Refusal;
use crate::model::secret::Secret;
use crate::model::wire::{EXEAT_REFUSAL, EXEAT_REQUEST_ID};

/// The variable that names the proxy. Without it, `HTTPS_PROXY` is used.
pub const EXEAT_PROXY: &str = "EXEAT_PROXY";
const HTTPS_PROXY: [&str; 2] = ["HTTPS_PROXY", "https_proxy"];
/// Maximum time to connect to the proxy.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum time for a call. The proxy's own limits are shorter unless its operator has raised them.
const CALL_TIMEOUT: Duration = Duration::from_secs(900);
/// Maximum number of fields of a response. An h2 origin may send more than the usual hundred.
const MAX_FIELDS: usize = 1000;
/// Maximum size of its certificate in PEM, in bytes.
#[cfg(target_os = "linux")]
const MAX_CERTIFICATE: usize = 16 * 1024;
/// Maximum size of a document of the proxy, in bytes.
const MAX_DOCUMENT: usize = 4_000_000;

/// The address of the proxy, and the caller's credentials.
pub struct Proxy {
    at: At,
    /// The value of `Proxy-Authorization`. `None` if the listener identifies the caller.
    authorization: Option<Secret>,
}

enum At {
    Tcp { host: String, port: u16, tls: Option<Tls> },
    Unix(std::path::PathBuf),
}

/// Why there is no trustworthy response.
#[derive(Debug, thiserror::Error)]
pub enum ProxyUnreachable {
    /// The connection was refused.
    #[error("no proxy can be reached at {0}: {1}")]
    Connect(String, io::Error),
    /// The connection broke off.
    #[error("the proxy at {0} broke off the connection")]
    Broken(String),
    /// The response is not one of exeat.
    #[error("what answers at {0} is not an exeat proxy")]
    NotExeat(String),
    /// The request timed out.
    #[error("the proxy at {0} did not answer in time")]
    TimedOut(String),
    /// The proxy refuses its certificate.
    #[error("the proxy refuses its certificate ({0})")]
    NoCertificate(String),
    /// The request cannot be represented.
    #[error("the request cannot be sent")]
    Unwritable,
}

/// A problem with the proxy URL in the environment. The text is not repeated, because it holds a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PlaceError {
    /// No proxy is set.
    #[error(
        "EXEAT_PROXY is not set, nor HTTPS_PROXY; `exeat execution start TASK` and `exeat env --task TASK` print what to set"
    )]
    Missing,
    /// The value is not a proxy URL.
    #[error(
        "EXEAT_PROXY, or HTTPS_PROXY in its place, is not http://ID:TOKEN@HOST:PORT, https://ID:TOKEN@HOST:PORT or unix:PATH"
    )]
    Malformed,
    /// The root certificates cannot be read.
    #[error("EXEAT_PROXY_CA cannot be read, or holds no certificate in PEM")]
    Roots,
}

/// A response of an exeat proxy.
pub(super) struct Answer {
    pub(super) response: Response<Incoming>,
    /// The connection. It is closed when the response is dropped.
    connection: Connection,
}

/// The task that drives the connection. The response body ends with it.
pub(super) struct Connection {
    _task: AbortOnDropHandle<()>,
}

/// A connection to the proxy.
trait Io: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Io for S {}

/// The proxy's reply about itself: a document or an error.
pub(super) enum ProxyReply {
    /// A document. A missing one is null.
    Document(Value),
    /// A refusal.
    Refused(Refused),
}

/// A refusal, recognized by its header field alone, which an origin cannot send.
pub(super) struct Refused {
    /// The refusal. `None` for one of a newer proxy.
    pub(super) refusal: Option<Refusal>,
    pub(super) code: String,
    pub(super) problem: Value,
}

impl Proxy {
    /// Returns the proxy that the environment names.
    ///
    /// # Errors
    /// [`PlaceError`] if there is none, or its URL is invalid.
    pub fn from_env() -> Result<Self, PlaceError> {
        let named = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty()).map(Zeroizing::new);
        let place =
            named(EXEAT_PROXY).or_else(|| HTTPS_PROXY.into_iter().find_map(named)).ok_or(PlaceError::Missing)?;
        let roots = match std::env::var_os("EXEAT_PROXY_CA").filter(|path| !path.is_empty()) {
            Some(path) => Some(std::fs::read(path).map_err(|_| PlaceError::Roots)?),
            None => None,
        };
        Self::at(&place, roots.as_deref())
    }

    /// Returns the proxy at `place`. With TLS, its certificate is verified with the public roots or with `roots` in
    /// PEM.
    ///
    /// # Errors
    /// [`PlaceError`] for anything but `http://`, `https://` or `unix:`.
    pub fn at(place: &str, roots: Option<&[u8]>) -> Result<Self, PlaceError> {
        if let Some(path) = place.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() {
                Err(PlaceError::Malformed)
            } else {
                Ok(Self { at: At::Unix(path.into()), authorization: None })
            };
        }
        let (scheme, rest) = place.split_once("://").ok_or(PlaceError::Malformed)?;
        let (usual, is_tls) = match scheme {
            "http" => (80, false),
            "https" => (443, true),
            _ => return Err(PlaceError::Malformed),
        };
        let rest = rest.strip_suffix('/').unwrap_or(rest);
        let (userinfo, authority) = rest.rsplit_once('@').map_or((None, rest), |(user, at)| (Some(user), at));
        let uri: Uri = format!("{scheme}://{authority}/").parse().map_err(|_| PlaceError::Malformed)?;
        let is_bare = uri.path() == "/" && uri.query().is_none() && !authority.contains(['/', '?', '#', '@']);
        let host = uri.host().filter(|host| !host.is_empty() && is_bare).ok_or(PlaceError::Malformed)?;
        let port = match authority.get(host.len()..) {
            Some("") => usual,
            // An invalid port is not replaced by the default one, which would receive the token.
            _ => uri.port_u16().filter(|port| *port != 0).ok_or(PlaceError::Malformed)?,
        };
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let tls = if is_tls { Some(Tls::to(&host, roots).ok_or(PlaceError::Roots)?) } else { None };
        let proof = userinfo.map(authorization).transpose()?;
        Ok(Self { at: At::Tcp { host, port, tls }, authorization: proof })
    }

    /// Sends one request through the proxy, or requests one of the proxy's own paths.
    pub(super) async fn send(&self, request: Request<Full<Bytes>>) -> Result<Answer, ProxyUnreachable> {
        let answer = timeout(CALL_TIMEOUT, self.exchange(request))
            .await
            .map_err(|_| ProxyUnreachable::TimedOut(self.to_string()))??;
        if answer.response.headers().contains_key(EXEAT_REQUEST_ID) {
            Ok(answer)
        } else {
            Err(ProxyUnreachable::NotExeat(self.to_string()))
        }
    }

    /// Requests one of the proxy's own paths.
    pub(super) async fn ask(
        &self,
        method: Method,
        path: &str,
        body: Option<&Value>,
    ) -> Result<ProxyReply, ProxyUnreachable> {
        let mut request = Request::builder().method(method).uri(path);
        if body.is_some() {
            request = request.header(CONTENT_TYPE, "application/json");
        }
        let body = body.map(|body| Bytes::from(body.to_string())).unwrap_or_default();
        let request = request.body(Full::new(body)).map_err(|_| ProxyUnreachable::Unwritable)?;
        let answer = self.send(request).await?;
        let code = answer.refusal().map(str::to_owned);
        let status = answer.response.status();
        let document = answer.document(self).await?;
        Ok(match code {
            Some(code) => ProxyReply::Refused(Refused::new(code, document)),
            None if status.is_success() => ProxyReply::Document(document),
            None => ProxyReply::Document(Value::Null),
        })
    }

    /// Opens a tunnel to `HOST:PORT`. The outer error is one of the connection, the inner one the refusal of the proxy.
    #[cfg(target_os = "linux")]
    pub(super) async fn tunnel(&self, to: &str) -> Result<Result<hyper::upgrade::Upgraded, Refused>, ProxyUnreachable> {
        let request = Request::builder().method(Method::CONNECT).uri(to).body(Full::new(Bytes::new()));
        let request = request.map_err(|_| ProxyUnreachable::Unwritable)?;
        let answer = timeout(CALL_TIMEOUT, self.exchange(request))
            .await
            .map_err(|_| ProxyUnreachable::TimedOut(self.to_string()))??;
        if answer.refusal().is_some() {
            return answer.refused(self).await.map(Err);
        }
        if !answer.response.status().is_success() {
            return Err(ProxyUnreachable::NotExeat(self.to_string()));
        }
        let (response, _connection) = answer.into_parts();
        let upgraded = hyper::upgrade::on(response).await;
        upgraded.map(Ok).map_err(|_| ProxyUnreachable::Broken(self.to_string()))
    }

    /// Returns the certificate of the interception CA in PEM. `None` if the proxy has none.
    #[cfg(target_os = "linux")]
    pub(super) async fn ca_certificate(&self) -> Result<Option<String>, ProxyUnreachable> {
        let request = Request::builder().uri("/v1/self/ca.pem").body(Full::new(Bytes::new()));
        let answer = self.send(request.map_err(|_| ProxyUnreachable::Unwritable)?).await?;
        match answer.response.status() {
            http::StatusCode::NOT_FOUND => return Ok(None),
            status if status.is_success() => {}
            _ => return Err(ProxyUnreachable::NoCertificate(answer.refusal().unwrap_or("unknown").to_owned())),
        }
        let (response, _connection) = answer.into_parts();
        let body = timeout(CALL_TIMEOUT, Limited::new(response.into_body(), MAX_CERTIFICATE).collect()).await;
        let body = body.map_err(|_| ProxyUnreachable::TimedOut(self.to_string()))?;
        let body = body.map_err(|_| ProxyUnreachable::Broken(self.to_string()))?;
        Ok(String::from_utf8(body.to_bytes().into()).ok())
    }

    async fn exchange(&self, request: Request<Full<Bytes>>) -> Result<Answer, ProxyUnreachable> {
        let connected = timeout(CONNECT_TIMEOUT, self.connected()).await;
        let stream = connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()));
        let stream = stream.map_err(|why| ProxyUnreachable::Connect(self.to_string(), why))?;
        let broken = |error: hyper::Error| {
            if error.is_parse() {
                ProxyUnreachable::NotExeat(self.to_string())
            } else {
                ProxyUnreachable::Broken(self.to_string())
            }
        };
        let handshake = http1::Builder::new().max_headers(MAX_FIELDS).handshake(TokioIo::new(stream));
        let (mut sender, connection) = handshake.await.map_err(broken)?;
        let task = tokio::spawn(async move {
            // Errors reach the caller that waits for the response.
            let _ = connection.with_upgrades().await;
        });
        let connection = Connection { _task: AbortOnDropHandle::new(task) };
        let response = sender.send_request(self.with_proxy_fields(request)?).await.map_err(broken)?;
        Ok(Answer { response, connection })
    }

    async fn connected(&self) -> io::Result<Box<dyn Io>> {
        Ok(match &self.at {
            At::Unix(path) => Box::new(unix(path).await?),
            At::Tcp { host, port, tls: None } => Box::new(tcp(host, *port).await?),
            At::Tcp { host, port, tls: Some(tls) } => Box::new(tls.over(tcp(host, *port).await?).await?),
        })
    }

    /// Adds the fields of every request to the proxy.
    fn with_proxy_fields(&self, mut request: Request<Full<Bytes>>) -> Result<Request<Full<Bytes>>, ProxyUnreachable> {
        let host = match request.uri().authority() {
            Some(authority) => authority.as_str().rsplit('@').next().unwrap_or_default().to_owned(),
            None => "proxy".to_owned(),
        };
        let host = HeaderValue::from_str(&host).map_err(|_| ProxyUnreachable::Unwritable)?;
        let headers = request.headers_mut();
        headers.insert(HOST, host);
        // Values known only at the end are sent in trailers, to clients that accept them (RFC 9110 §6.5.1).
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
        if let Some(proof) = &self.authorization {
            let mut field = HeaderValue::from_bytes(proof.expose()).map_err(|_| ProxyUnreachable::Unwritable)?;
            field.set_sensitive(true);
            headers.insert(PROXY_AUTHORIZATION, field);
        }
        Ok(request)
    }
}

impl fmt::Display for Proxy {
    /// Formats the address without the credentials.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.at {
            At::Tcp { host, port, tls } => {
                let scheme = if tls.is_some() { "https" } else { "http" };
                if host.contains(':') {
                    write!(f, "{scheme}://[{host}]:{port}")
                } else {
                    write!(f, "{scheme}://{host}:{port}")
                }
            }
            At::Unix(path) => write!(f, "unix:{}", path.display()),
        }
    }
}

impl Answer {
    /// Returns the code of a refusal.
    pub(super) fn refusal(&self) -> Option<&str> {
        self.response.headers().get(EXEAT_REFUSAL).map(|code| code.to_str().unwrap_or("unknown"))
    }

    /// Returns the response, and the connection that must be kept until it has been read.
    pub(super) fn into_parts(self) -> (Response<Incoming>, Connection) {
        (self.response, self.connection)
    }

    /// Reads a document of the proxy. Anything else is null.
    pub(super) async fn document(self, proxy: &Proxy) -> Result<Value, ProxyUnreachable> {
        let (response, _connection) = self.into_parts();
        let body = timeout(CALL_TIMEOUT, Limited::new(response.into_body(), MAX_DOCUMENT).collect()).await;
        let body = body.map_err(|_| ProxyUnreachable::TimedOut(proxy.to_string()))?;
        let body = body.map_err(|_| ProxyUnreachable::Broken(proxy.to_string()))?;
        Ok(serde_json::from_slice(&body.to_bytes()).unwrap_or_default())
    }

    /// Reads a refusal and its problem document.
    pub(super) async fn refused(self, proxy: &Proxy) -> Result<Refused, ProxyUnreachable> {
        let code = self.refusal().unwrap_or_default().to_owned();
        let problem = self.document(proxy).await?;
        Ok(Refused::new(code, problem))
    }
}

impl Refused {
    fn new(code: String, problem: Value) -> Self {
        Self { refusal: Refusal::with_code(&code), code, problem }
    }

    /// Returns a text of the problem document.
    pub(super) fn text(&self, member: &str) -> Option<&str> {
        self.problem.get(member).and_then(Value::as_str)
    }
}

/// Returns the value of `Proxy-Authorization` (RFC 7617) for the decoded userinfo.
fn authorization(userinfo: &str) -> Result<Secret, PlaceError> {
    let (id, token) = userinfo.split_once(':').ok_or(PlaceError::Malformed)?;
    let plain = |text: &str| Zeroizing::new(percent_decode_str(text).collect::<Vec<u8>>());
    let pair = Zeroizing::new([plain(id).as_slice(), b":", plain(token).as_slice()].concat());
    let coded = Zeroizing::new(STANDARD.encode(&pair));
    Ok(Secret::new([b"Basic ", coded.as_bytes()].concat()))
}

/// Returns the number in a field that occurs once, in the head or the trailers.
pub(super) fn number(fields: &HeaderMap, name: &HeaderName) -> Option<u64> {
    fields.get(name)?.to_str().ok()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_proxy_is_named_by_a_url_and_its_token_is_never_shown() {
        let rows = [
            ("http://t:token@127.0.0.1:3128", Ok("http://127.0.0.1:3128")),
            ("http://t:token@127.0.0.1:3128/", Ok("http://127.0.0.1:3128")),
            ("http://t:to%3Aken@exeat", Ok("http://exeat:80")),
            ("http://t:tok@en@exeat:1", Ok("http://exeat:1")),
            ("http://[::1]:3128", Ok("http://[::1]:3128")),
            ("https://t:token@proxy.example", Ok("https://proxy.example:443")),
            ("unix:/run/exeat/proxy.sock", Ok("unix:/run/exeat/proxy.sock")),
            ("unix:///run/exeat/proxy.sock", Ok("unix:/run/exeat/proxy.sock")),
            ("unix:", Err(PlaceError::Malformed)),
            ("127.0.0.1:3128", Err(PlaceError::Malformed)),
            ("socks5://127.0.0.1:3128", Err(PlaceError::Malformed)),
            ("http://token@127.0.0.1:3128", Err(PlaceError::Malformed)),
            ("http://t:token@127.0.0.1:3128/path", Err(PlaceError::Malformed)),
            ("http://", Err(PlaceError::Malformed)),
            ("http://t:token@127.0.0.1:99999", Err(PlaceError::Malformed)),
            ("http://t:token@127.0.0.1:", Err(PlaceError::Malformed)),
            ("http://t:token@127.0.0.1:0", Err(PlaceError::Malformed)),
            ("http://t:token", Err(PlaceError::Malformed)),
            ("http://t:token@[::1]:99999", Err(PlaceError::Malformed)),
        ];
        for (text, want) in rows {
            let proxy = Proxy::at(text, None).map(|proxy| proxy.to_string());
            assert_eq!(proxy, want.map(str::to_owned), "{text}");
        }
        assert!(matches!(Proxy::at("https://h", Some(b"no certificate")), Err(PlaceError::Roots)));
    }

    #[test]
    fn escapes_in_a_token_are_decoded() {
        let proof = |text: &str| Proxy::at(text, None).unwrap().authorization.map(|proof| proof.expose().to_vec());
        assert_eq!(proof("http://t:a%3Ab@h"), Some(b"Basic dDphOmI=".to_vec()));
        assert_eq!(proof("http://h"), None);
    }
}

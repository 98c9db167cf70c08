//! The client of the admin API: finds the daemon and its token, and sends one request per connection.

use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST};
use http::{HeaderValue, Method, Request, StatusCode, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper::body::Body;
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;
use zeroize::Zeroizing;

use super::terminal::{clean, escaped, print, say};
use super::{Exit, paths};
use crate::files;
use crate::model::secret::Secret;
use crate::policy::compile::AdminAddress;
use crate::policy::settings::ListenAt;
use crate::policy::source::{read_source, usable};

/// Maximum time to connect.
const TO_CONNECT: Duration = Duration::from_secs(5);
/// Maximum time for a request and its response.
const TO_ANSWER: Duration = Duration::from_secs(30);
/// Maximum size of a response, in bytes.
const MAX_ANSWER: usize = 64_000_000;
/// The variable with the token. It takes precedence.
const TOKEN: &str = "EXEAT_ADMIN_TOKEN";
/// The options that name another daemon than the configured one.
const FLAG: &str = "--admin or EXEAT_ADMIN";

/// A daemon and the operator's token for it.
pub(super) struct Operator {
    at: At,
    /// The source of the address, for error messages.
    named_by: String,
    /// `None` on a Unix socket, where the kernel identifies the user.
    token: Option<Token>,
}

/// The address of an admin listener.
#[derive(Debug, PartialEq, Eq)]
enum At {
    /// Addresses of one listener. The first one that responds is used.
    Tcp(Vec<SocketAddr>),
    Unix(PathBuf),
}

struct Token {
    value: Secret,
    /// The source of the token.
    from: String,
}

/// Why there is no usable response.
#[derive(Debug, thiserror::Error)]
pub(super) enum Failed {
    #[error("{0} closed the connection without a whole answer")]
    Closed(String),
    #[error("the answer from {0} did not come whole in time")]
    Late(String),
    #[error("the answer from {0} is longer than {MAX_ANSWER} bytes")]
    Long(String),
    #[error("what answers at {0} is not an exeat admin listener, or one of another version")]
    Odd(String),
    #[error("the daemon at {0} does not know this page; it is older than this exeat")]
    Older(String),
    #[error("{}", words(.0, .1))]
    Refused(StatusCode, Value),
    #[error("the daemon at {0} does not take the admin token of {1}")]
    TokenWrong(String, String),
    #[error("the daemon at {0} lets in neither this user nor anybody without its token; {TOKEN} can hold it")]
    TokenMissing(String),
    #[error(
        "no daemon can be reached at {at} (from {named_by}): {why}; is `exeat serve` running? \
         --admin or EXEAT_ADMIN can name another place"
    )]
    Unreached { at: String, named_by: String, why: io::Error },
}

/// Sends a request to the daemon and passes the response to `told`.
pub(super) fn ask(
    config: Option<&Path>,
    admin: Option<&str>,
    question: &Question<'_>,
    told: impl FnOnce(&Value) -> Option<()>,
) -> Exit {
    let failed = |failed: Failed| {
        say(format_args!("exeat: {failed}"));
        Exit::Failed
    };
    let operator = match Operator::find(config, admin) {
        Ok(operator) => operator,
        Err(exit) => return exit,
    };
    let answered = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|why| operator.unreached(why))
        .and_then(|runtime| runtime.block_on(operator.ask(question)));
    match answered {
        Ok(answer) => told(&answer).map_or_else(|| failed(Failed::Odd(operator.at.to_string())), |()| Exit::Done),
        Err(why) => failed(why),
    }
}

/// Prints a response as JSON.
pub(super) fn print_json(answer: &Value) {
    print(escaped(&format!("{answer:#}\n")));
}

/// A request to the daemon.
pub(super) struct Question<'q> {
    pub(super) method: Method,
    pub(super) path: &'q str,
    pub(super) body: Option<Value>,
}

impl<'q> Question<'q> {
    pub(super) fn get(path: &'q str) -> Self {
        Self { method: Method::GET, path, body: None }
    }

    pub(super) fn post(path: &'q str, body: Value) -> Self {
        Self { method: Method::POST, path, body: Some(body) }
    }

    pub(super) fn delete(path: &'q str) -> Self {
        Self { method: Method::DELETE, path, body: None }
    }
}

impl Operator {
    /// Returns the daemon that the flag or the configuration names. The file is only read if it is needed.
    fn find(config: Option<&Path>, admin: Option<&str>) -> Result<Self, Exit> {
        let admin = admin.filter(|text| !text.is_empty());
        let given = std::env::var_os(TOKEN).map(|token| token.into_encoded_bytes()).filter(|token| !token.is_empty());
        let place = || {
            paths::admin_place(config).map_err(|problems| {
                paths::say_problems(config, &problems);
                Exit::Usage
            })
        };
        let named = match admin {
            Some(text) => Some(At::named(text)?),
            None => None,
        };
        let (at, named_by, token) = match (named, given) {
            (Some(at), Some(given)) => (at, FLAG.to_owned(), Token::given(given)),
            (Some(at), None) => {
                let place = place()?;
                let token = Token::for_another(&place, &at);
                (at, FLAG.to_owned(), token)
            }
            (None, given) => {
                let place = place()?;
                let at = At::configured(&place)?;
                (at, listener(config), given.map_or_else(|| Token::of(&place), Token::given))
            }
        };
        match (token, &at) {
            (Ok(token), _) => Ok(Self { at, named_by, token: Some(token) }),
            (Err(_), At::Unix(_)) => Ok(Self { at, named_by, token: None }),
            (Err(why), At::Tcp(_)) => {
                say(format_args!("exeat: no admin token: {why}; set it in {TOKEN}"));
                Err(Exit::Failed)
            }
        }
    }

    async fn ask(&self, question: &Question<'_>) -> Result<Value, Failed> {
        let answer = timeout(TO_ANSWER, self.exchange(question)).await;
        let (status, body) = answer.map_err(|_| Failed::Late(self.at.to_string()))??;
        let document: Option<Value> = serde_json::from_slice(&body).ok();
        let at = || self.at.to_string();
        match (status, document) {
            (StatusCode::UNAUTHORIZED, _) => Err(match &self.token {
                Some(token) => Failed::TokenWrong(at(), token.from.clone()),
                None => Failed::TokenMissing(at()),
            }),
            (status, Some(document)) if status.is_success() => Ok(document),
            (status, Some(document)) if document.get("error").is_some() => Err(Failed::Refused(status, document)),
            (StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, None) => Err(Failed::Older(at())),
            _ => Err(Failed::Odd(at())),
        }
    }

    /// Sends one request on a connection of its own.
    async fn exchange(&self, question: &Question<'_>) -> Result<(StatusCode, Zeroizing<Vec<u8>>), Failed> {
        match &self.at {
            At::Tcp(addresses) => {
                let (stream, address) = self.connected(tcp(addresses)).await?;
                self.over(stream, &address.to_string(), question).await
            }
            At::Unix(path) => {
                let stream = self.connected(UnixStream::connect(path)).await?;
                self.over(stream, "localhost", question).await
            }
        }
    }

    async fn connected<S>(&self, connecting: impl Future<Output = io::Result<S>>) -> Result<S, Failed> {
        let connected = timeout(TO_CONNECT, connecting).await;
        connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(|why| self.unreached(why))
    }

    async fn over(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        host: &str,
        question: &Question<'_>,
    ) -> Result<(StatusCode, Zeroizing<Vec<u8>>), Failed> {
        let at = || self.at.to_string();
        let odd = |error: hyper::Error| if error.is_parse() { Failed::Odd(at()) } else { Failed::Closed(at()) };
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(odd)?;
        let connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let request = self.request(host, question).map_err(|_| Failed::Odd(at()))?;
        let response = sender.send_request(request).await.map_err(odd)?;
        let status = response.status();
        if response.body().size_hint().lower() > MAX_ANSWER as u64 {
            return Err(Failed::Long(at()));
        }
        let body = Limited::new(response.into_body(), MAX_ANSWER).collect().await;
        drop(connection);
        match body {
            // The body may contain the token of an execution.
            Ok(body) => Ok((status, Zeroizing::new(body.to_bytes().into()))),
            Err(error) if error.is::<LengthLimitError>() => Err(Failed::Long(at())),
            Err(_) => Err(Failed::Closed(at())),
        }
    }

    fn request(&self, host: &str, question: &Question<'_>) -> http::Result<Request<Full<Bytes>>> {
        let mut request = Request::builder().method(&question.method).uri(question.path).header(HOST, host);
        if let Some(token) = &self.token {
            let field = Zeroizing::new([b"Bearer ", token.value.expose()].concat());
            let mut field = HeaderValue::from_bytes(&field)?;
            field.set_sensitive(true);
            request = request.header(AUTHORIZATION, field);
        }
        let body = match &question.body {
            Some(body) => {
                request = request.header(CONTENT_TYPE, "application/json");
                Bytes::from(body.to_string())
            }
            None => Bytes::new(),
        };
        request.body(Full::new(body))
    }

    fn unreached(&self, why: io::Error) -> Failed {
        Failed::Unreached { at: self.at.to_string(), named_by: self.named_by.clone(), why }
    }
}

/// Connects to the operator's daemon. The addresses are literal: no name is resolved.
#[expect(clippy::disallowed_methods, reason = "to the operator's daemon, not to an origin")]
async fn tcp(addresses: &[SocketAddr]) -> io::Result<(TcpStream, SocketAddr)> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok((stream, *address)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl At {
    /// Parses the value of `--admin`.
    fn named(text: &str) -> Result<Self, Exit> {
        Self::parse(text).ok_or_else(|| {
            // The value is not repeated, because it may contain a token.
            say(format_args!(
                "exeat: {FLAG}: write http://ADDRESS:PORT, with an IP address or localhost, or unix:PATH"
            ));
            Exit::Usage
        })
    }

    fn configured(place: &AdminAddress) -> Result<Self, Exit> {
        place.listen.as_ref().and_then(Self::of).ok_or_else(|| {
            say("exeat: [admin].listen has no fixed port; name the one that the daemon took with --admin");
            Exit::Usage
        })
    }

    /// Parses `http://ADDRESS:PORT` or `unix:PATH`.
    fn parse(text: &str) -> Option<Self> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return (!path.is_empty()).then(|| Self::Unix(path.into()));
        }
        let uri: Uri = text.parse().ok()?;
        let authority = uri.authority()?;
        let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none() && !authority.as_str().contains('@');
        if uri.scheme_str() != Some("http") || !is_bare {
            return None;
        }
        let port = if authority.as_str().ends_with(':') { None } else { Some(uri.port_u16().unwrap_or(80)) };
        let port = port.filter(|port| *port != 0)?;
        let host = authority.host();
        let addresses = match host {
            "localhost" => vec![IpAddr::from(Ipv4Addr::LOCALHOST), IpAddr::from(Ipv6Addr::LOCALHOST)],
            _ => vec![host.trim_start_matches('[').trim_end_matches(']').parse().ok()?],
        };
        Some(Self::Tcp(addresses.into_iter().map(|address| SocketAddr::new(address, port)).collect()))
    }

    /// Returns true for an address of this machine.
    fn is_here(&self) -> bool {
        match self {
            Self::Tcp(addresses) => addresses.iter().all(|address| address.ip().is_loopback()),
            Self::Unix(_) => true,
        }
    }

    /// Returns true for the listener of this configuration.
    fn is_of(&self, place: &AdminAddress) -> bool {
        place.listen.as_ref().and_then(Self::of).is_some_and(|own| own == *self)
    }

    /// Returns the address at which a listener is reached from its own machine.
    fn of(listen: &ListenAt) -> Option<Self> {
        match listen {
            ListenAt::Unix(path) => Some(Self::Unix(path.clone())),
            ListenAt::Tcp(address) if address.port() == 0 => None,
            ListenAt::Tcp(address) => {
                let ip = match address.ip() {
                    IpAddr::V4(ip) if ip.is_unspecified() => Ipv4Addr::LOCALHOST.into(),
                    IpAddr::V6(ip) if ip.is_unspecified() => Ipv6Addr::LOCALHOST.into(),
                    ip => ip,
                };
                Some(Self::Tcp(vec![SocketAddr::new(ip, address.port())]))
            }
        }
    }
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(addresses) => addresses.iter().enumerate().try_for_each(|(i, address)| {
                let or = if i == 0 { "" } else { " or " };
                write!(f, "{or}http://{address}")
            }),
            Self::Unix(path) => write!(f, "unix:{}", clean(&path.display().to_string())),
        }
    }
}

impl Token {
    /// Returns the token that the configuration gives the daemon.
    fn of(place: &AdminAddress) -> Result<Self, String> {
        if let Some(source) = &place.token {
            let value = read_source(source, &|name| std::env::var(name).ok()).map_err(|why| why.to_string())?;
            return Self::checked(value, "the configuration's [admin].token".to_owned());
        }
        let path = place.state_dir.join("admin.token");
        let from = clean(&path.display().to_string());
        let read = files::read_private(&path).map_err(|why| format!("{from}: {why}"))?;
        Self::checked(Secret::new(read.trim_ascii_end().to_vec()), from)
    }

    /// As [`Self::of`], for a daemon that the flag names. A token of this machine is not sent over a network because of
    /// a typing error.
    fn for_another(place: &AdminAddress, at: &At) -> Result<Self, String> {
        if at.is_here() || at.is_of(place) {
            return Self::of(place);
        }
        Err(format!("the token found here is for the configured [admin].listen on this machine, not for {at}"))
    }

    /// Reads a token from the environment.
    fn given(token: Vec<u8>) -> Result<Self, String> {
        Self::checked(Secret::new(token), TOKEN.to_owned())
    }

    /// Checks that a token is valid in a header field.
    fn checked(value: Secret, from: String) -> Result<Self, String> {
        match usable(value) {
            Ok(value) => Ok(Self { value, from }),
            Err(why) => Err(format!("{from}: {why}")),
        }
    }
}

fn listener(config: Option<&Path>) -> String {
    match config {
        Some(path) => format!("[admin].listen of {}", clean(&path.display().to_string())),
        None => "the built-in configuration; -c names yours".to_owned(),
    }
}

/// Returns the daemon's error text.
fn words(status: &StatusCode, document: &Value) -> String {
    let why = document.get("error").and_then(Value::as_str).map(clean).unwrap_or_default();
    let state = document.get("state").and_then(Value::as_str).map(|state| format!(" ({})", clean(state)));
    let why = if why.is_empty() { format!("the daemon answered {status}") } else { why };
    why + &state.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_daemon_is_named_without_a_dns_lookup() {
        let tcp = |all: &[&str]| Some(At::Tcp(all.iter().map(|one| one.parse().unwrap()).collect()));
        let rows = [
            ("http://127.0.0.1:3129", tcp(&["127.0.0.1:3129"])),
            ("http://127.0.0.1:3129/", tcp(&["127.0.0.1:3129"])),
            ("http://127.0.0.1", tcp(&["127.0.0.1:80"])),
            ("http://[::1]:3129", tcp(&["[::1]:3129"])),
            ("http://10.1.2.3:3129", tcp(&["10.1.2.3:3129"])),
            ("http://localhost:3129", tcp(&["127.0.0.1:3129", "[::1]:3129"])),
            ("unix:/run/exeat/admin.sock", Some(At::Unix("/run/exeat/admin.sock".into()))),
            ("unix:///run/exeat/admin.sock", Some(At::Unix("/run/exeat/admin.sock".into()))),
            ("unix:admin.sock", Some(At::Unix("admin.sock".into()))),
            ("unix:", None),
            ("", None),
            ("127.0.0.1:3129", None),
            ("/run/exeat/admin.sock", None),
            ("https://127.0.0.1:3129", None),
            ("http://exeat.internal:3129", None),
            ("http://localhost.evil.example:3129", None),
            ("http://2130706433:3129", None),
            ("http://operator:token@127.0.0.1:3129", None),
            ("http://127.0.0.1:3129/v1", None),
            ("http://127.0.0.1:3129?x", None),
            ("http://127.0.0.1:0", None),
            ("http://127.0.0.1:", None),
        ];
        for (text, want) in rows {
            assert_eq!(At::parse(text), want, "{text}");
        }
    }

    #[test]
    fn a_listener_on_all_addresses_is_reached_over_the_loopback() {
        let rows = [
            ("0.0.0.0:3129", Some("http://127.0.0.1:3129")),
            ("[::]:3129", Some("http://[::1]:3129")),
            ("10.1.2.3:3129", Some("http://10.1.2.3:3129")),
            ("127.0.0.1:0", None),
        ];
        for (listen, want) in rows {
            let at = At::of(&ListenAt::Tcp(listen.parse().unwrap()));
            assert_eq!(at.map(|at| at.to_string()).as_deref(), want, "{listen}");
        }
    }

    /// The paused clock advances immediately while all tasks are idle.
    #[tokio::test(start_paused = true)]
    async fn a_silent_daemon_times_out() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = At::Tcp(vec![silent.local_addr().unwrap()]);
        let operator = Operator { at, named_by: "the test".to_owned(), token: None };
        let failed = operator.ask(&Question::get("/v1/executions")).await.unwrap_err();
        assert!(matches!(failed, Failed::Late(_) | Failed::Unreached { .. }), "{failed}");
    }
}

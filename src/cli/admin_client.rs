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
use crate::policy::settings::{ListenAt, TokenSource};
use crate::policy::source::{read_source, usable};

/// The timeout to establish the connection.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The timeout for the whole exchange, from connecting to the end of the response.
const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);
/// The maximum size of a response body, in bytes.
const MAX_RESPONSE: usize = 64_000_000;
/// The maximum size of a response of plain text, in bytes.
const MAX_TEXT: usize = 1_000;
/// The variable with the admin token. It takes precedence over all other sources.
const TOKEN_VARIABLE: &str = "EXEAT_ADMIN_TOKEN";
/// The options that select another daemon than the configured one, for messages.
const ADDRESS_OPTION: &str = "--admin or EXEAT_ADMIN";

/// A client of the admin API of one daemon.
pub(super) struct AdminClient {
    endpoint: Endpoint,
    /// The source of the address, for error messages.
    endpoint_source: String,
    /// `None` only on a Unix socket, where the daemon can authenticate the operator by user id.
    token: Option<Token>,
}

/// The address of an admin listener.
#[derive(Debug, PartialEq, Eq)]
enum Endpoint {
    /// The addresses of one listener. The first that accepts a connection is used.
    Tcp(Vec<SocketAddr>),
    Unix(PathBuf),
}

struct Token {
    value: Secret,
    /// The source of the token, for error messages.
    from: String,
}

/// A failed exchange with the daemon.
#[derive(Debug, thiserror::Error)]
pub(super) enum AdminError {
    #[error("{0} closed the connection before the response was complete")]
    Closed(String),
    #[error("timed out waiting for the response from {0}")]
    TimedOut(String),
    #[error("the response from {0} is longer than {MAX_RESPONSE} bytes")]
    TooLong(String),
    #[error("the server at {0} is not an exeat admin listener, or has an incompatible version")]
    NotExeat(String),
    #[error("the daemon at {0} does not support this request; it is older than this exeat")]
    DaemonTooOld(String),
    #[error("{}", error_text(.0, .1))]
    Refused(StatusCode, Value),
    #[error("the daemon at {0} rejected the admin token from {1}")]
    TokenWrong(String, String),
    #[error("the daemon at {0} requires its admin token from this user; set it in {TOKEN_VARIABLE}")]
    TokenMissing(String),
    #[error(
        "cannot connect to the daemon at {endpoint} (from {endpoint_source}): {why}; is `exeat serve` running? \
         To use another address, set --admin or EXEAT_ADMIN"
    )]
    Unreachable { endpoint: String, endpoint_source: String, why: io::Error },
}

/// Sends a request to the daemon and passes the response to `print_response`, which returns `None` for an unexpected
/// document. Errors are printed.
pub(super) fn send(
    config: Option<&Path>,
    admin: Option<&str>,
    request: &AdminRequest<'_>,
    print_response: impl FnOnce(&Value) -> Option<()>,
) -> Exit {
    let failed = |error: AdminError| {
        say(format_args!("exeat: {error}"));
        Exit::Failed
    };
    let client = match AdminClient::find(config, admin) {
        Ok(client) => client,
        Err(exit) => return exit,
    };
    let response = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|why| client.unreachable(why))
        .and_then(|runtime| runtime.block_on(client.send(request)));
    match response {
        Ok(response) => print_response(&response)
            .map_or_else(|| failed(AdminError::NotExeat(client.endpoint.to_string())), |()| Exit::Done),
        Err(error) => failed(error),
    }
}

/// Prints the response document as JSON.
pub(super) fn print_json(document: &Value) {
    print(escaped(&format!("{document:#}\n")));
}

/// A request to the daemon.
pub(super) struct AdminRequest<'q> {
    pub(super) method: Method,
    pub(super) path: &'q str,
    pub(super) body: Option<Value>,
}

impl<'q> AdminRequest<'q> {
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

impl AdminClient {
    /// Finds the daemon and the token by the option and the environment, else by the configuration. The file is read
    /// only if the address or the token is not given otherwise.
    fn find(config: Option<&Path>, admin: Option<&str>) -> Result<Self, Exit> {
        let admin = admin.filter(|text| !text.is_empty());
        let env_token =
            std::env::var_os(TOKEN_VARIABLE).map(|token| token.into_encoded_bytes()).filter(|token| !token.is_empty());
        let configured = || configured(config);
        let given = match admin {
            Some(text) => Some(Endpoint::from_option(text)?),
            None => None,
        };
        let (endpoint, endpoint_source, token) = match (given, env_token) {
            (Some(endpoint), Some(token)) => (endpoint, ADDRESS_OPTION.to_owned(), Token::from_environment(token)),
            (Some(endpoint), None) => {
                let configured = configured()?;
                let token = Token::for_option(&configured, &endpoint);
                (endpoint, ADDRESS_OPTION.to_owned(), token)
            }
            (None, token) => {
                let configured = configured()?;
                let endpoint = Endpoint::from_config(&configured)?;
                let token = token.map_or_else(|| Token::from_config(&configured), Token::from_environment);
                (endpoint, config_source(config), token)
            }
        };
        match (token, &endpoint) {
            (Ok(token), _) => Ok(Self { endpoint, endpoint_source, token: Some(token) }),
            (Err(_), Endpoint::Unix(_)) => Ok(Self { endpoint, endpoint_source, token: None }),
            (Err(why), Endpoint::Tcp(_)) => {
                say(format_args!("exeat: no admin token: {why}; set it in {TOKEN_VARIABLE}"));
                Err(Exit::Failed)
            }
        }
    }

    /// Finds the daemon as [`Self::find`] does, for requests that need no token.
    pub(super) fn without_token(config: Option<&Path>, admin: Option<&str>) -> Result<Self, Exit> {
        let (endpoint, endpoint_source) = match admin.filter(|text| !text.is_empty()) {
            Some(text) => (Endpoint::from_option(text)?, ADDRESS_OPTION.to_owned()),
            None => (Endpoint::from_config(&configured(config)?)?, config_source(config)),
        };
        Ok(Self { endpoint, endpoint_source, token: None })
    }

    /// Sends a request and returns a response of plain text.
    pub(super) async fn text(
        &self,
        request: &AdminRequest<'_>,
        within: Duration,
    ) -> Result<(StatusCode, String), AdminError> {
        let answered = timeout(within, self.exchange(request)).await;
        let (status, body) = answered.map_err(|_| AdminError::TimedOut(self.endpoint.to_string()))??;
        let text = std::str::from_utf8(&body).ok().filter(|text| text.len() <= MAX_TEXT);
        Ok((status, text.ok_or_else(|| self.not_exeat())?.to_owned()))
    }

    /// Returns the error for an answer that no exeat gives.
    pub(super) fn not_exeat(&self) -> AdminError {
        AdminError::NotExeat(self.endpoint.to_string())
    }

    async fn send(&self, request: &AdminRequest<'_>) -> Result<Value, AdminError> {
        let response = timeout(RESPONSE_TIMEOUT, self.exchange(request)).await;
        let (status, body) = response.map_err(|_| AdminError::TimedOut(self.endpoint.to_string()))??;
        let document: Option<Value> = serde_json::from_slice(&body).ok();
        let at = || self.endpoint.to_string();
        match (status, document) {
            (StatusCode::UNAUTHORIZED, _) => Err(match &self.token {
                Some(token) => AdminError::TokenWrong(at(), token.from.clone()),
                None => AdminError::TokenMissing(at()),
            }),
            (status, Some(document)) if status.is_success() => Ok(document),
            (status, Some(document)) if document.get("error").is_some() => Err(AdminError::Refused(status, document)),
            (StatusCode::NOT_FOUND | StatusCode::METHOD_NOT_ALLOWED, None) => Err(AdminError::DaemonTooOld(at())),
            _ => Err(AdminError::NotExeat(at())),
        }
    }

    /// Opens a connection and sends one request on it.
    async fn exchange(&self, request: &AdminRequest<'_>) -> Result<(StatusCode, Zeroizing<Vec<u8>>), AdminError> {
        match &self.endpoint {
            Endpoint::Tcp(addresses) => {
                let (stream, address) = self.connect(connect_tcp(addresses)).await?;
                self.exchange_on(stream, &address.to_string(), request).await
            }
            Endpoint::Unix(path) => {
                let stream = self.connect(UnixStream::connect(path)).await?;
                self.exchange_on(stream, "localhost", request).await
            }
        }
    }

    async fn connect<S>(&self, connecting: impl Future<Output = io::Result<S>>) -> Result<S, AdminError> {
        let connected = timeout(CONNECT_TIMEOUT, connecting).await;
        connected.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into())).map_err(|why| self.unreachable(why))
    }

    async fn exchange_on(
        &self,
        stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static,
        host: &str,
        request: &AdminRequest<'_>,
    ) -> Result<(StatusCode, Zeroizing<Vec<u8>>), AdminError> {
        let at = || self.endpoint.to_string();
        let failed =
            |error: hyper::Error| if error.is_parse() { AdminError::NotExeat(at()) } else { AdminError::Closed(at()) };
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(failed)?;
        let connection = AbortOnDropHandle::new(tokio::spawn(connection));
        let request = self.build_request(host, request).map_err(|_| AdminError::NotExeat(at()))?;
        let response = sender.send_request(request).await.map_err(failed)?;
        let status = response.status();
        if response.body().size_hint().lower() > MAX_RESPONSE as u64 {
            return Err(AdminError::TooLong(at()));
        }
        let body = Limited::new(response.into_body(), MAX_RESPONSE).collect().await;
        drop(connection);
        match body {
            // The body may contain the token of an execution.
            Ok(body) => Ok((status, Zeroizing::new(body.to_bytes().into()))),
            Err(error) if error.is::<LengthLimitError>() => Err(AdminError::TooLong(at())),
            Err(_) => Err(AdminError::Closed(at())),
        }
    }

    fn build_request(&self, host: &str, request: &AdminRequest<'_>) -> http::Result<Request<Full<Bytes>>> {
        let mut builder = Request::builder().method(&request.method).uri(request.path).header(HOST, host);
        if let Some(token) = &self.token {
            let field = Zeroizing::new([b"Bearer ", token.value.expose()].concat());
            let mut field = HeaderValue::from_bytes(&field)?;
            field.set_sensitive(true);
            builder = builder.header(AUTHORIZATION, field);
        }
        let body = match &request.body {
            Some(body) => {
                builder = builder.header(CONTENT_TYPE, "application/json");
                Bytes::from(body.to_string())
            }
            None => Bytes::new(),
        };
        builder.body(Full::new(body))
    }

    fn unreachable(&self, why: io::Error) -> AdminError {
        let endpoint = self.endpoint.to_string();
        AdminError::Unreachable { endpoint, endpoint_source: self.endpoint_source.clone(), why }
    }
}

/// Connects to the operator's daemon at a given or configured address. No name is resolved.
#[expect(clippy::disallowed_methods, reason = "to the operator's daemon, not to an origin")]
async fn connect_tcp(addresses: &[SocketAddr]) -> io::Result<(TcpStream, SocketAddr)> {
    let mut last = io::Error::from(io::ErrorKind::AddrNotAvailable);
    for address in addresses {
        match TcpStream::connect(address).await {
            Ok(stream) => return Ok((stream, *address)),
            Err(error) => last = error,
        }
    }
    Err(last)
}

impl Endpoint {
    /// Parses the address in `--admin`, and reports an invalid one.
    fn from_option(text: &str) -> Result<Self, Exit> {
        Self::parse(text).ok_or_else(|| {
            // The message does not repeat the text, because it may contain a token.
            say(format_args!(
                "exeat: {ADDRESS_OPTION}: expected http://ADDRESS:PORT, with an IP address or localhost, or unix:PATH"
            ));
            Exit::Usage
        })
    }

    fn from_config(configured: &AdminAddress) -> Result<Self, Exit> {
        configured.listen.as_ref().and_then(Self::from_listener).ok_or_else(|| {
            say("exeat: [admin].listen has no fixed port; give the daemon's address with --admin");
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

    /// Returns true if connections to the endpoint do not leave the machine.
    fn is_local(&self) -> bool {
        match self {
            Self::Tcp(addresses) => addresses.iter().all(|address| address.ip().is_loopback()),
            Self::Unix(_) => true,
        }
    }

    /// Returns true if the endpoint is the configured listener.
    fn is_configured(&self, configured: &AdminAddress) -> bool {
        configured.listen.as_ref().and_then(Self::from_listener).is_some_and(|own| own == *self)
    }

    /// Returns the endpoint of a listener as reached from its own machine, or `None` if it has no fixed port.
    fn from_listener(listen: &ListenAt) -> Option<Self> {
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

impl fmt::Display for Endpoint {
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
    /// Reads the token from the configured source or the state directory, as the daemon does.
    fn from_config(configured: &AdminAddress) -> Result<Self, String> {
        if let Some(TokenSource { key, source }) = configured.tokens.first() {
            let value = read_source(source, &|name| std::env::var(name).ok()).map_err(|why| why.to_string())?;
            return Self::checked(value, format!("the configuration's [admin].{key}"));
        }
        let path = configured.state_dir.join("admin.token");
        let from = clean(&path.display().to_string());
        let read = files::read_private(&path).map_err(|why| format!("{from}: {why}"))?;
        Self::checked(Secret::new(read.trim_ascii_end().to_vec()), from)
    }

    /// Reads the token as [`Self::from_config`] does, for an endpoint given by option. It is not sent to an
    /// unconfigured remote endpoint: a mistyped address would disclose it.
    fn for_option(configured: &AdminAddress, endpoint: &Endpoint) -> Result<Self, String> {
        if endpoint.is_local() || endpoint.is_configured(configured) {
            return Self::from_config(configured);
        }
        Err(format!("the local admin token is only for the configured [admin].listen, not for {endpoint}"))
    }

    /// Reads a token from the environment.
    fn from_environment(token: Vec<u8>) -> Result<Self, String> {
        Self::checked(Secret::new(token), TOKEN_VARIABLE.to_owned())
    }

    /// Checks that the token is a valid header field value.
    fn checked(value: Secret, from: String) -> Result<Self, String> {
        match usable(value) {
            Ok(value) => Ok(Self { value, from }),
            Err(why) => Err(format!("{from}: {why}")),
        }
    }
}

/// Returns the admin listener of the configuration, or reports its problems.
fn configured(config: Option<&Path>) -> Result<AdminAddress, Exit> {
    paths::admin_address(config).map_err(|problems| {
        paths::report_problems(config, &problems);
        Exit::Usage
    })
}

fn config_source(config: Option<&Path>) -> String {
    match config {
        Some(path) => format!("[admin].listen of {}", clean(&path.display().to_string())),
        None => "the built-in configuration; use -c for yours".to_owned(),
    }
}

/// Returns the error text of the daemon's response.
fn error_text(status: &StatusCode, document: &Value) -> String {
    let why = document.get("error").and_then(Value::as_str).map(clean).unwrap_or_default();
    let state = document.get("state").and_then(Value::as_str).map(|state| format!(" ({})", clean(state)));
    let why = if why.is_empty() { format!("the daemon answered {status}") } else { why };
    why + &state.unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_addresses_that_need_no_lookup() {
        let tcp = |all: &[&str]| Some(Endpoint::Tcp(all.iter().map(|one| one.parse().unwrap()).collect()));
        let rows = [
            ("http://127.0.0.1:3129", tcp(&["127.0.0.1:3129"])),
            ("http://127.0.0.1:3129/", tcp(&["127.0.0.1:3129"])),
            ("http://127.0.0.1", tcp(&["127.0.0.1:80"])),
            ("http://[::1]:3129", tcp(&["[::1]:3129"])),
            ("http://10.1.2.3:3129", tcp(&["10.1.2.3:3129"])),
            ("http://localhost:3129", tcp(&["127.0.0.1:3129", "[::1]:3129"])),
            ("unix:/run/exeat/admin.sock", Some(Endpoint::Unix("/run/exeat/admin.sock".into()))),
            ("unix:///run/exeat/admin.sock", Some(Endpoint::Unix("/run/exeat/admin.sock".into()))),
            ("unix:admin.sock", Some(Endpoint::Unix("admin.sock".into()))),
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
            assert_eq!(Endpoint::parse(text), want, "{text}");
        }
    }

    #[test]
    fn unspecified_addresses_are_reached_over_the_loopback() {
        let rows = [
            ("0.0.0.0:3129", Some("http://127.0.0.1:3129")),
            ("[::]:3129", Some("http://[::1]:3129")),
            ("10.1.2.3:3129", Some("http://10.1.2.3:3129")),
            ("127.0.0.1:0", None),
        ];
        for (listen, want) in rows {
            let at = Endpoint::from_listener(&ListenAt::Tcp(listen.parse().unwrap()));
            assert_eq!(at.map(|at| at.to_string()).as_deref(), want, "{listen}");
        }
    }

    /// The paused clock advances at once while all tasks are idle.
    #[tokio::test(start_paused = true)]
    async fn silent_daemons_time_out() {
        let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
        let endpoint = Endpoint::Tcp(vec![silent.local_addr().unwrap()]);
        let client = AdminClient { endpoint, endpoint_source: "the test".to_owned(), token: None };
        let error = client.send(&AdminRequest::get("/v1/executions")).await.unwrap_err();
        assert!(matches!(error, AdminError::TimedOut(_) | AdminError::Unreachable { .. }), "{error}");
    }
}

//! Sends lines of the log to a collector: RFC 5424 messages over TCP or TLS, or POST requests.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use futures_util::FutureExt;
use http::header::{AUTHORIZATION, CONTENT_TYPE, HOST, RETRY_AFTER, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, StatusCode};
use http_body_util::{BodyExt, Full, Limited};
use hyper::client::conn::http1;
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::task::spawn_blocking;
use tokio::time::timeout;
use tokio_util::task::AbortOnDropHandle;

use super::own_server::{OwnServers, ServerAddress};
use crate::ledger::{Connect, Stream};
use crate::policy::log_collector::{LogCollector, LogProtocol};
use crate::policy::settings::{Shipping, Source};
use crate::policy::source;
use crate::stages::forward::EarlyAnswer;
use crate::stages::pin::OwnServer;

/// The time limit for a connection with TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for one batch of lines, up to the end of the response.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for the end of a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// The time limit for the body of a response.
const BODY_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum size of a response body, in bytes. A connection with a larger one is closed.
const MAX_RESPONSE: usize = 64 * 1024;
/// The maximum size of a response head, in bytes.
const MAX_HEAD: usize = 64 * 1024;
/// The priority of the messages: facility 13 (log audit), severity 6 (informational), by RFC 5424 §6.2.1.
const PRIORITY: u8 = 13 * 8 + 6;

/// Sends batches of lines, over one connection at a time.
pub(super) struct LogSender {
    collector: LogCollector,
    authorization: Option<Source>,
    connect: Connect,
    connection: Option<Connection>,
    syslog: SyslogHeader,
}

enum Connection {
    Http { sender: http1::SendRequest<Full<Bytes>>, _driver: AbortOnDropHandle<hyper::Result<()>> },
    Syslog(Box<dyn Stream>),
}

/// Why lines were not sent.
#[derive(Debug, thiserror::Error)]
pub(super) enum SendError {
    /// The batch is too large for the server.
    #[error("the server refuses the size of a batch")]
    TooLarge,
    /// The server answered with another status than 2xx.
    #[error("the server answered {status}")]
    Status {
        /// The status.
        status: StatusCode,
        /// How long the server asks to wait.
        retry_after: Option<Duration>,
    },
    /// The value for `Authorization` cannot be read.
    #[error("ship_authorization: {0}")]
    Authorization(String),
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

impl LogSender {
    pub(super) fn new(shipping: &Shipping, own_servers: &OwnServers<'_>) -> Self {
        let server = match shipping.collector.keeps_authorization() {
            true => OwnServer::AuthenticatingCollector,
            false => OwnServer::OpenCollector,
        };
        let LogCollector { host, port, is_tls, .. } = &shipping.collector;
        let connect = own_servers.connector(&ServerAddress { server, host, port: *port, is_tls: *is_tls });
        let (collector, authorization) = (shipping.collector.clone(), shipping.authorization.clone());
        Self { collector, authorization, connect, connection: None, syslog: SyslogHeader::of_this_process() }
    }

    /// Sends whole lines.
    ///
    /// # Errors
    /// [`SendError`]. Some of the lines may have been sent.
    pub(super) async fn send(&mut self, lines: Vec<u8>) -> Result<(), SendError> {
        // A connection that fails is not used again.
        let connection = match self.connection.take().and_then(Connection::if_open) {
            Some(connection) => connection,
            None => self.open().await?,
        };
        let sent = timeout(SEND_TIMEOUT, self.send_over(connection, lines));
        self.connection = sent.await.map_err(|_| no_answer())??;
        Ok(())
    }

    /// Ends the connection, so that the server gets what was sent.
    pub(super) async fn close(&mut self) {
        if let Some(Connection::Syslog(mut stream)) = self.connection.take() {
            let _ = timeout(CLOSE_TIMEOUT, stream.shutdown()).await;
        }
    }

    /// Connects, to see whether the server can be reached and the value for `Authorization` be read.
    ///
    /// # Errors
    /// [`SendError`].
    pub(super) async fn try_open(&mut self) -> Result<(), SendError> {
        timeout(CONNECT_TIMEOUT, self.authorization()).await.map_err(|_| no_answer())??;
        self.open().await.map(drop)
    }

    async fn open(&mut self) -> Result<Connection, SendError> {
        let opened = timeout(CONNECT_TIMEOUT, async {
            let stream = (self.connect)().await?;
            Ok(match self.collector.protocol {
                LogProtocol::Syslog => Connection::Syslog(stream),
                LogProtocol::Http(_) => {
                    // A server may refuse a batch before it has read it.
                    let stream = TokioIo::new(EarlyAnswer::new(stream));
                    let handshake = http1::Builder::new().max_buf_size(MAX_HEAD).handshake(stream);
                    let (sender, driver) = handshake.await?;
                    Connection::Http { sender, _driver: AbortOnDropHandle::new(tokio::spawn(driver)) }
                }
            })
        });
        opened.await.map_err(|_| no_answer())?
    }

    /// Returns the connection if it can be used again.
    async fn send_over(&mut self, connection: Connection, lines: Vec<u8>) -> Result<Option<Connection>, SendError> {
        match connection {
            Connection::Http { mut sender, _driver } => {
                let request = self.request(lines).await?;
                sender.ready().await?;
                let (head, body) = sender.send_request(request).await?.into_parts();
                // The status decides. The rest only shows whether the connection can be used again.
                let read = timeout(BODY_TIMEOUT, Limited::new(body, MAX_RESPONSE).collect()).await;
                let is_read = read.is_ok_and(|body| body.is_ok());
                match head.status {
                    status if status.is_success() => Ok(is_read.then_some(Connection::Http { sender, _driver })),
                    StatusCode::PAYLOAD_TOO_LARGE => Err(SendError::TooLarge),
                    status => Err(SendError::Status { status, retry_after: retry_after(&head.headers) }),
                }
            }
            Connection::Syslog(mut stream) => {
                stream.write_all(&self.syslog.messages(&lines)).await?;
                stream.flush().await?;
                Ok(Some(Connection::Syslog(stream)))
            }
        }
    }

    async fn request(&mut self, lines: Vec<u8>) -> Result<Request<Full<Bytes>>, SendError> {
        let path = match &self.collector.protocol {
            LogProtocol::Http(path) => path.as_str(),
            LogProtocol::Syslog => "/",
        };
        let is_default = self.collector.port == if self.collector.is_tls { 443 } else { 80 };
        let host = &self.collector.host;
        let host = if is_default { host.to_string() } else { format!("{host}:{}", self.collector.port) };
        let mut request = Request::post(path)
            .header(HOST, host)
            .header(USER_AGENT, concat!("exeat/", env!("CARGO_PKG_VERSION")))
            .header(CONTENT_TYPE, "application/x-ndjson")
            .body(Full::new(Bytes::from(lines)))
            .map_err(|error| SendError::Connection(error.to_string()))?;
        if let Some(authorization) = self.authorization().await? {
            request.headers_mut().insert(AUTHORIZATION, authorization);
        }
        Ok(request)
    }

    /// Reads the value each time, because it may have been replaced in its file.
    async fn authorization(&mut self) -> Result<Option<HeaderValue>, SendError> {
        let Some(source) = self.authorization.clone() else { return Ok(None) };
        // The file may be on a disk that hangs.
        let read = spawn_blocking(move || source::read_source(&source, &|name| std::env::var(name).ok())).await;
        let value = read.map_err(io::Error::other)?.map_err(|error| SendError::Authorization(error.to_string()))?;
        let mut value = HeaderValue::from_bytes(value.expose())
            .map_err(|_| SendError::Authorization("the value is not one of a header".to_owned()))?;
        value.set_sensitive(true);
        Ok(Some(value))
    }
}

impl Connection {
    /// Returns the connection unless the server has closed it, which a write over TCP would not show.
    fn if_open(self) -> Option<Self> {
        match self {
            Self::Http { sender, _driver } => (!sender.is_closed()).then_some(Self::Http { sender, _driver }),
            Self::Syslog(mut stream) => {
                let mut byte = [0];
                // A syslog server sends nothing, so a read ends only with the connection.
                let is_open = stream.read(&mut byte).now_or_never().is_none();
                is_open.then_some(Self::Syslog(stream))
            }
        }
    }
}

fn no_answer() -> SendError {
    SendError::Connection("no answer in time".to_owned())
}

/// Returns the seconds of `Retry-After`. Its other form, a date, is ignored.
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    headers.get(RETRY_AFTER)?.to_str().ok()?.parse().ok().map(Duration::from_secs)
}

/// The parts of a syslog message that are the same for all lines.
struct SyslogHeader {
    /// `HOSTNAME APP-NAME PROCID MSGID STRUCTURED-DATA`, by RFC 5424 §6.
    rest: String,
}

impl SyslogHeader {
    fn of_this_process() -> Self {
        let system = rustix::system::uname();
        let host = system.nodename().to_bytes();
        Self { rest: format!("{} exeat {} audit -", host_name(host), std::process::id()) }
    }

    /// Returns a message for each line, framed by its length in bytes (RFC 6587 §3.4.1, RFC 5425 §4.3.1).
    fn messages(&self, lines: &[u8]) -> Vec<u8> {
        let mut messages = Vec::with_capacity(lines.len().saturating_mul(5) / 4);
        let lines = lines.split(|byte| *byte == b'\n').filter(|line| !line.is_empty());
        for line in lines {
            let header = format!("<{PRIORITY}>1 {} {} ", timestamp(line), self.rest);
            let length = header.len().saturating_add(line.len());
            messages.extend_from_slice(format!("{length} {header}").as_bytes());
            messages.extend_from_slice(line);
        }
        messages
    }
}

/// Returns the host name as RFC 5424 §6.2.4 allows it.
fn host_name(name: &[u8]) -> String {
    let is_valid = !name.is_empty() && name.len() <= 255 && name.iter().all(u8::is_ascii_graphic);
    if is_valid { String::from_utf8_lossy(name).into_owned() } else { "-".to_owned() }
}

/// Returns the time of a line with at most six digits of a second (RFC 5424 §6.2.3), or `-` if the line has none.
fn timestamp(line: &[u8]) -> String {
    #[derive(serde::Deserialize)]
    struct Timed<'l> {
        #[serde(borrow)]
        ts: std::borrow::Cow<'l, str>,
    }
    let parsed = serde_json::from_slice::<Timed<'_>>(line).ok();
    let time = parsed.and_then(|line| {
        let (date, time) = line.ts.split_once('T')?;
        let (second, fraction) = time.strip_suffix('Z')?.split_once('.').unwrap_or((time.strip_suffix('Z')?, ""));
        let is_time = |text: &str| text.bytes().all(|byte| byte.is_ascii_digit() || matches!(byte, b'-' | b':'));
        let fraction = fraction.get(..6).unwrap_or(fraction);
        let point = if fraction.is_empty() { "" } else { "." };
        (is_time(date) && is_time(second) && is_time(fraction)).then(|| format!("{date}T{second}{point}{fraction}Z"))
    });
    time.unwrap_or_else(|| "-".to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_of_syslog_has_its_length_and_the_time_of_its_line() {
        let header = SyslogHeader { rest: "host exeat 7 audit -".to_owned() };
        let rows: [(&str, &str); 5] = [
            ("{\"ts\":\"2026-11-27T01:02:03.123456789Z\",\"n\":1}", "2026-11-27T01:02:03.123456Z"),
            ("{\"ts\":\"2026-11-27T01:02:03Z\"}", "2026-11-27T01:02:03Z"),
            ("{\"ts\":\"2026-11-27T01:02:03.5Z\"}", "2026-11-27T01:02:03.5Z"),
            ("{\"ts\":\"<0>1 T xZ\"}", "-"),
            ("{\"ev", "-"),
        ];
        for (line, time) in rows {
            let message = format!("<110>1 {time} host exeat 7 audit - {line}");
            let want = format!("{} {message}", message.len());
            assert_eq!(String::from_utf8(header.messages(format!("{line}\n").as_bytes())).unwrap(), want);
        }
        let both = header.messages(b"{}\n{}\n");
        assert_eq!(both.windows(7).filter(|window| window == b"32 <110").count(), 2, "{both:?}");
    }

    #[test]
    fn host_names_outside_of_the_syntax_are_left_out() {
        let long = "a".repeat(256);
        for (name, want) in [("host-1.x", "host-1.x"), ("", "-"), ("a b", "-"), ("a\n", "-"), ("ä", "-"), (&long, "-")]
        {
            assert_eq!(host_name(name.as_bytes()), want, "{name:?}");
        }
    }
}

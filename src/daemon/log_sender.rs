//! Sends lines of the log to a collector: RFC 5424 messages over TCP or TLS, or POST requests.

use std::time::Duration;

use futures_util::FutureExt;
use http::header::AUTHORIZATION;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;

use super::http_sender::{HttpSender, SecretField, SendError};
use super::own_server::{OwnServers, ServerAddress};
use crate::ledger::{Connect, Stream};
use crate::policy::log_collector::LogCollector;
use crate::policy::settings::Shipping;
use crate::stages::pin::OwnServer;

/// The time limit for a connection with TLS.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// The time limit for one batch of lines.
const SEND_TIMEOUT: Duration = Duration::from_secs(30);
/// The time limit for the end of a connection.
const CLOSE_TIMEOUT: Duration = Duration::from_millis(500);
/// The priority of the messages: facility 13 (log audit), severity 6 (informational), by RFC 5424 §6.2.1.
const PRIORITY: u8 = 13 * 8 + 6;

/// Sends batches of lines, over one connection at a time.
pub(super) enum LogSender {
    Http(Box<HttpSender>),
    Syslog(SyslogSender),
}

impl LogSender {
    pub(super) fn new(shipping: &Shipping, own_servers: &OwnServers<'_>) -> Self {
        match &shipping.collector {
            LogCollector::Http(url) => {
                let authorization = shipping.authorization.iter().map(|source| SecretField {
                    name: AUTHORIZATION,
                    source: source.clone(),
                    key: "ship_authorization".to_owned(),
                });
                // The URL itself may hold a token, too.
                let server = if url.is_tls { OwnServer::AuthenticatingCollector } else { OwnServer::OpenCollector };
                let (to, fields) = ((server, url.clone()), authorization.collect());
                let sender = HttpSender::new(to, "application/x-ndjson", fields, own_servers);
                Self::Http(Box::new(sender))
            }
            LogCollector::Syslog { host, port, is_tls } => {
                let server = OwnServer::OpenCollector;
                let address = ServerAddress { server, host, port: *port, is_tls: *is_tls };
                let connect = own_servers.connector(&address);
                Self::Syslog(SyslogSender { connect, connection: None, header: SyslogHeader::of_this_process() })
            }
        }
    }

    /// Sends whole lines.
    ///
    /// # Errors
    /// [`SendError`]. Some of the lines may have been sent.
    pub(super) async fn send(&mut self, lines: Vec<u8>) -> Result<(), SendError> {
        match self {
            Self::Http(sender) => sender.send(lines).await.map(drop),
            Self::Syslog(sender) => sender.send(&lines).await,
        }
    }

    /// Ends the connection, so that the server gets what was sent.
    pub(super) async fn close(&mut self) {
        if let Self::Syslog(sender) = self
            && let Some(mut stream) = sender.connection.take()
        {
            let _ = timeout(CLOSE_TIMEOUT, stream.shutdown()).await;
        }
    }

    /// Connects, to see whether the server can be reached and the value for `Authorization` be read.
    ///
    /// # Errors
    /// [`SendError`].
    pub(super) async fn try_open(&mut self) -> Result<(), SendError> {
        match self {
            Self::Http(sender) => sender.try_open().await,
            Self::Syslog(sender) => sender.open().await.map(drop),
        }
    }
}

/// Sends RFC 5424 messages.
pub(super) struct SyslogSender {
    connect: Connect,
    connection: Option<Box<dyn Stream>>,
    header: SyslogHeader,
}

impl SyslogSender {
    async fn send(&mut self, lines: &[u8]) -> Result<(), SendError> {
        // A connection that fails is not used again.
        let mut stream = match self.connection.take().and_then(if_open) {
            Some(stream) => stream,
            None => self.open().await?,
        };
        let messages = self.header.messages(lines);
        let sent = timeout(SEND_TIMEOUT, async {
            stream.write_all(&messages).await?;
            stream.flush().await
        });
        sent.await.map_err(|_| SendError::no_answer())??;
        self.connection = Some(stream);
        Ok(())
    }

    async fn open(&mut self) -> Result<Box<dyn Stream>, SendError> {
        let opened = timeout(CONNECT_TIMEOUT, (self.connect)());
        Ok(opened.await.map_err(|_| SendError::no_answer())??)
    }
}

/// Returns the connection unless the server has closed it, which a write over TCP would not show.
fn if_open(mut stream: Box<dyn Stream>) -> Option<Box<dyn Stream>> {
    let mut byte = [0];
    // A syslog server sends nothing, so a read ends only with the connection.
    let is_open = stream.read(&mut byte).now_or_never().is_none();
    is_open.then_some(stream)
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

//! The load: clients that do as little as possible beside checking every answer.

use std::sync::Arc;

use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

/// The error that a proxy did not do what the scenario requires.
pub(crate) type Failure = String;

/// A connection with what has been read from it and not used.
pub(crate) struct Connection<S> {
    pub(crate) stream: S,
    buffer: Vec<u8>,
}

/// The port of a proxy on loopback, and the value of `Proxy-Authorization` for it.
pub(crate) type ProxyAccess<'a> = (u16, &'a str);

/// The head of an answer.
pub(crate) struct Head {
    pub(crate) status: u16,
    text: String,
}

impl Head {
    pub(crate) fn field(&self, name: &str) -> Option<&str> {
        let lines = self.text.lines().filter_map(|line| line.split_once(':'));
        lines.filter(|(known, _)| known.eq_ignore_ascii_case(name)).map(|(_, value)| value.trim()).next()
    }
}

pub(crate) async fn connect(proxy: u16) -> Result<Connection<TcpStream>, Failure> {
    let tcp = TcpStream::connect(("127.0.0.1", proxy)).await.map_err(|error| format!("connect: {error}"))?;
    let _ = tcp.set_nodelay(true);
    Ok(Connection::new(tcp))
}

/// Opens a tunnel. Returns the head of the answer if the proxy refuses it.
pub(crate) async fn tunnel(
    (proxy, authorization): ProxyAccess<'_>,
    host: &str,
    port: u16,
) -> Result<Result<TcpStream, Head>, Failure> {
    let mut connection = connect(proxy).await?;
    let head = connection.ask_for_tunnel(authorization, host, port).await?;
    Ok(if head.status == 200 { Ok(connection.stream) } else { Err(head) })
}

/// Opens a tunnel and a TLS connection in it. The configuration decides whose certificate is accepted.
pub(crate) async fn tls(
    proxy: ProxyAccess<'_>,
    (host, port): (&str, u16),
    sni: &str,
    config: &Arc<ClientConfig>,
) -> Result<Connection<TlsStream<TcpStream>>, Failure> {
    let tcp = tunnel(proxy, host, port).await?.map_err(|head| format!("CONNECT: {}", head.status))?;
    let name = ServerName::try_from(sni.to_owned()).unwrap();
    let tls = TlsConnector::from(config.clone()).connect(name, tcp).await;
    Ok(Connection::new(tls.map_err(|error| format!("TLS: {error}"))?))
}

impl<S: AsyncReadExt + AsyncWriteExt + Unpin> Connection<S> {
    pub(crate) fn new(stream: S) -> Self {
        Self { stream, buffer: Vec::with_capacity(128 * 1024) }
    }

    pub(crate) async fn write(&mut self, bytes: &[u8]) -> Result<(), Failure> {
        let written = async {
            self.stream.write_all(bytes).await?;
            self.stream.flush().await
        };
        written.await.map_err(|error| format!("write: {error}"))
    }

    /// Sends CONNECT and returns the head of the answer.
    pub(crate) async fn ask_for_tunnel(&mut self, authorization: &str, host: &str, port: u16) -> Result<Head, Failure> {
        let head = format!(
            "CONNECT {host}:{port} HTTP/1.1\r\nHost: {host}:{port}\r\nProxy-Authorization: {authorization}\r\n\r\n"
        );
        self.write(head.as_bytes()).await?;
        self.head().await
    }

    /// Reads more into the buffer.
    pub(crate) async fn fill(&mut self) -> Result<(), Failure> {
        match self.stream.read_buf(&mut self.buffer).await {
            Ok(0) => Err("the connection was closed".to_owned()),
            Ok(_) => Ok(()),
            Err(error) => Err(format!("read: {error}")),
        }
    }

    /// Reads a head. Interim ones are skipped.
    pub(crate) async fn head(&mut self) -> Result<Head, Failure> {
        loop {
            let head = self.any_head().await?;
            if !(100..200).contains(&head.status) || head.status == 101 {
                return Ok(head);
            }
        }
    }

    async fn any_head(&mut self) -> Result<Head, Failure> {
        let end = loop {
            if let Some(at) = self.buffer.windows(4).position(|four| four == b"\r\n\r\n") {
                break at + 4;
            }
            self.fill().await?;
        };
        let text = String::from_utf8_lossy(&self.buffer[..end]).into_owned();
        self.buffer.drain(..end);
        let status = text.split(' ').nth(1).and_then(|status| status.parse().ok());
        Ok(Head { status: status.ok_or_else(|| format!("no status in {text}"))?, text })
    }

    /// Sends a request and reads the answer. Fails unless it is a 200 with exactly the expected length, and ends as the
    /// expected text does.
    pub(crate) async fn exchange(&mut self, request: &[u8], expected: &[u8], length: usize) -> Result<(), Failure> {
        self.write(request).await?;
        let head = self.head().await?;
        let found = head.field("content-length").and_then(|length| length.parse::<usize>().ok());
        if head.status != 200 || found != Some(length) {
            return Err(format!("status {}, content-length {found:?} of {length}", head.status));
        }
        let mut left = length;
        loop {
            let held = self.buffer.len();
            if held >= left {
                break;
            }
            if length > expected.len() {
                left -= held;
                self.buffer.clear();
            }
            self.fill().await?;
        }
        if length == expected.len() && self.buffer[..left] != *expected {
            return Err("the body is not the origin's".to_owned());
        }
        self.buffer.drain(..left);
        Ok(())
    }

    /// Returns the next line of a chunked or unframed stream that starts with `prefix`, without it.
    pub(crate) async fn line(&mut self, prefix: &str) -> Result<String, Failure> {
        loop {
            let at = self.buffer.windows(prefix.len()).position(|found| found == prefix.as_bytes());
            let end = at.and_then(|at| self.buffer[at..].iter().position(|byte| *byte == b'\n').map(|end| at + end));
            if let (Some(at), Some(end)) = (at, end) {
                let line = String::from_utf8_lossy(&self.buffer[at + prefix.len()..end]).into_owned();
                self.buffer.drain(..=end);
                return Ok(line);
            }
            self.fill().await?;
        }
    }
}

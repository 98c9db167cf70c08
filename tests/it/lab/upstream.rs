//! An upstream proxy on a free port of 127.0.0.1. It relays, or answers with scripted bytes.

use std::net::{Ipv4Addr, SocketAddr};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;

use super::client::basic;

/// The user and the password that a proxy with [`Script::login`] requires.
pub const USER: &str = "exeat";
pub const PASSWORD: &str = "upstream-p:ss%word";

/// The behaviour of an upstream proxy.
#[derive(Clone, Default)]
pub struct Script {
    /// It speaks TLS with its clients.
    pub tls: Option<Arc<ServerConfig>>,
    /// It requires [`USER`] and [`PASSWORD`].
    pub login: bool,
    /// It speaks SOCKS5.
    pub socks: bool,
    /// It sends these bytes in place of its answer to CONNECT, or of its first message, and closes.
    pub answer: Option<Vec<u8>>,
    /// It sends this SOCKS5 reply code to each request.
    pub reply: Option<u8>,
    /// It reads the request and never answers.
    pub silent: bool,
    /// It writes its answers one byte at a time.
    pub trickle: bool,
    /// It sends the first bytes of the origin together with its answer to CONNECT.
    pub joins_first_bytes: bool,
}

/// A running upstream proxy.
#[derive(Clone)]
pub struct UpstreamProxy {
    pub address: SocketAddr,
    asked: Arc<Mutex<Vec<String>>>,
    heads: Arc<Mutex<Vec<String>>>,
    connections: Arc<AtomicUsize>,
}

impl UpstreamProxy {
    pub async fn start(script: Script) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let proxy = Self { address, asked: Arc::default(), heads: Arc::default(), connections: Arc::default() };
        let running = proxy.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                running.connections.fetch_add(1, Ordering::SeqCst);
                let (proxy, script) = (running.clone(), script.clone());
                tokio::spawn(async move {
                    let _ = match script.tls.clone() {
                        None => proxy.serve(stream, &script).await,
                        Some(config) => match TlsAcceptor::from(config).accept(stream).await {
                            Ok(stream) => proxy.serve(stream, &script).await,
                            Err(error) => Err(error),
                        },
                    };
                });
            }
        });
        proxy
    }

    /// Returns the destinations that were asked for, as `HOST:PORT`.
    pub fn asked(&self) -> Vec<String> {
        self.asked.lock().unwrap().clone()
    }

    /// Returns the heads of the CONNECT requests.
    pub fn heads(&self) -> Vec<String> {
        self.heads.lock().unwrap().clone()
    }

    /// Returns the number of accepted connections.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    #[allow(clippy::disallowed_methods, reason = "the test plays a proxy that connects to the origin")]
    async fn serve(&self, mut client: impl AsyncRead + AsyncWrite + Unpin, script: &Script) -> std::io::Result<()> {
        let to =
            if script.socks { self.socks(&mut client, script).await? } else { self.http(&mut client, script).await? };
        let Some(to) = to else { return Ok(()) };
        self.asked.lock().unwrap().push(to.clone());
        if script.silent {
            let _ = client.read(&mut [0; 1]).await;
            return Ok(());
        }
        if let Some(reply) = script.reply {
            return client.write_all(&[5, reply, 0, 1, 0, 0, 0, 0, 0, 0]).await;
        }
        // Names lead to the loopback.
        let (host, port) = to.rsplit_once(':').unwrap();
        let ip = host.trim_matches(['[', ']']).parse().unwrap_or(Ipv4Addr::LOCALHOST.into());
        let origin = TcpStream::connect(SocketAddr::new(ip, port.parse().unwrap())).await;
        let Ok(mut origin) = origin else {
            let refusal: &[u8] = if script.socks {
                &[5, 5, 0, 1, 0, 0, 0, 0, 0, 0]
            } else {
                b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\n\r\n"
            };
            return client.write_all(refusal).await;
        };
        let mut answer = if script.socks {
            // A bound address with a name.
            b"\x05\x00\x00\x03\x04test\x12\x34".to_vec()
        } else {
            // The length has no meaning after CONNECT.
            b"HTTP/1.1 200 Connection established\r\nContent-Length: 9\r\nVia: 1.1 upstream\r\n\r\n".to_vec()
        };
        if script.joins_first_bytes {
            let mut first = vec![0; 1024];
            let length = origin.read(&mut first).await?;
            answer.extend_from_slice(&first[..length]);
        }
        say(&mut client, &answer, script).await?;
        copy_bidirectional(&mut client, &mut origin).await.map(drop)
    }

    /// Reads a CONNECT. Returns its target, unless it was answered already.
    async fn http(
        &self,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin),
        script: &Script,
    ) -> std::io::Result<Option<String>> {
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            head.push(client.read_u8().await?);
            if !head[0].is_ascii_uppercase() {
                client.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n").await?;
                return Ok(None);
            }
        }
        let head = String::from_utf8(head).unwrap();
        self.heads.lock().unwrap().push(head.clone());
        if let Some(answer) = &script.answer {
            say(client, answer, script).await?;
            return Ok(None);
        }
        let login = format!("\r\nProxy-Authorization: {}\r\n", basic(&format!("{USER}:{PASSWORD}")));
        if script.login != head.contains("Proxy-Authorization") || (script.login && !head.contains(&login)) {
            let refusal = b"HTTP/1.1 407 Proxy Authentication Required\r\nProxy-Authenticate: Basic\r\n\r\n";
            client.write_all(refusal).await?;
            return Ok(None);
        }
        let target = head.strip_prefix("CONNECT ").unwrap().split(' ').next().unwrap().to_owned();
        assert!(head.contains(&format!("\r\nHost: {target}\r\n")), "{head}");
        Ok(Some(target))
    }

    /// Reads a SOCKS5 request. Returns its target, unless it was answered already.
    async fn socks(
        &self,
        client: &mut (impl AsyncRead + AsyncWrite + Unpin),
        script: &Script,
    ) -> std::io::Result<Option<String>> {
        let mut greeting = [0; 3];
        client.read_exact(&mut greeting).await?;
        if let Some(answer) = &script.answer {
            say(client, answer, script).await?;
            return Ok(None);
        }
        let method = if script.login { 2 } else { 0 };
        if greeting != [5, 1, method] {
            client.write_all(&[5, 0xff]).await?;
            return Ok(None);
        }
        say(client, &[5, method], script).await?;
        if script.login {
            let mut message = vec![0; 3 + USER.len() + PASSWORD.len()];
            client.read_exact(&mut message).await?;
            let mut expected = vec![1, USER.len() as u8];
            expected.extend_from_slice(USER.as_bytes());
            expected.push(PASSWORD.len() as u8);
            expected.extend_from_slice(PASSWORD.as_bytes());
            let is_right = message == expected;
            say(client, &[1, u8::from(!is_right)], script).await?;
            if !is_right {
                return Ok(None);
            }
        }
        let mut request = [0; 4];
        client.read_exact(&mut request).await?;
        let host = match request {
            [5, 1, 0, 1] => Ipv4Addr::from(client.read_u32().await?).to_string(),
            [5, 1, 0, 4] => format!("[{}]", std::net::Ipv6Addr::from(client.read_u128().await?)),
            [5, 1, 0, 3] => {
                let mut name = vec![0; client.read_u8().await?.into()];
                client.read_exact(&mut name).await?;
                String::from_utf8(name).unwrap()
            }
            other => panic!("{other:?}"),
        };
        Ok(Some(format!("{host}:{}", client.read_u16().await?)))
    }
}

async fn say(client: &mut (impl AsyncWrite + Unpin), answer: &[u8], script: &Script) -> std::io::Result<()> {
    if !script.trickle {
        client.write_all(answer).await?;
        return client.flush().await;
    }
    for byte in answer {
        client.write_all(&[*byte]).await?;
        client.flush().await?;
        tokio::task::yield_now().await;
    }
    Ok(())
}

//! Opens a tunnel through an upstream proxy: with CONNECT (RFC 9110 §9.3.6) or SOCKS5 (RFC 1928).
//!
//! The proxy is trusted with the bytes that any router on the way sees, and with nothing else: TLS with the origin is inside the
//! tunnel, and verifies the origin. What it answers is bounded, and none of it is shown or logged.

use std::io;
use std::net::IpAddr;

use bytes::{Buf, Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_util::either::Either;

use crate::model::host::Host;
use crate::model::upstream_proxy::UpstreamProxyFailure;
use crate::policy::upstream_proxy::{Login, ProxyProtocol, UpstreamProxy};
use crate::tls::{failure, upstream};

/// The longest head of an answer to CONNECT, in bytes. Proxies describe refusals in the body, which is not read.
const MAX_HEAD: usize = 16 * 1024;
const MAX_FIELDS: usize = 64;

/// A connection to an origin or to an upstream proxy: TCP, or TLS with the proxy.
pub(super) type Carrier = Either<TcpStream, Box<TlsStream<TcpStream>>>;

/// A tunnel through an upstream proxy, and what arrived with the answer of the proxy.
pub(super) type Tunnel = (Carrier, Bytes);

/// Opens a tunnel on a connection to the proxy, for an address, or for a name that the proxy resolves.
///
/// # Errors
/// [`UpstreamProxyFailure`].
pub(super) async fn open_tunnel(
    stream: TcpStream,
    (proxy, tls): (&UpstreamProxy, &TlsConnector),
    (host, port): (&Host, u16),
) -> Result<Tunnel, UpstreamProxyFailure> {
    let mut stream = secure(stream, proxy, tls).await?;
    let early = match proxy.address().protocol {
        ProxyProtocol::Http | ProxyProtocol::Https => connect(&mut stream, proxy.login(), (host, port)).await?,
        ProxyProtocol::Socks5 => {
            socks(&mut stream, proxy.login(), (host, port)).await?;
            Bytes::new()
        }
    };
    Ok((stream, early))
}

/// Takes TLS on a connection to the proxy, if the proxy speaks it.
///
/// # Errors
/// [`UpstreamProxyFailure::TlsFailed`].
pub(super) async fn secure(
    stream: TcpStream,
    proxy: &UpstreamProxy,
    tls: &TlsConnector,
) -> Result<Carrier, UpstreamProxyFailure> {
    if proxy.address().protocol != ProxyProtocol::Https {
        return Ok(Either::Left(stream));
    }
    let name = upstream::server_name(&proxy.address().host).ok_or(UpstreamProxyFailure::TlsFailed)?;
    let handshake = tls.connect(name, stream).await;
    let secured = handshake.map_err(|error| {
        // The whole text has the names of a certificate.
        let reason = failure::of_handshake(&error).kind.text().name;
        tracing::info!(reason, proxy = %proxy.address(), "TLS handshake with the upstream proxy failed");
        UpstreamProxyFailure::TlsFailed
    })?;
    Ok(Either::Right(Box::new(secured)))
}

/// An error while the proxy is spoken to. One that closes early may have been shut down; it did not answer with anything wrong.
fn broken(_: io::Error) -> UpstreamProxyFailure {
    UpstreamProxyFailure::Unreachable
}

/// Sends CONNECT. Returns what arrived behind the head of the answer.
async fn connect(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    login: Option<&Login>,
    (host, port): (&Host, u16),
) -> Result<Bytes, UpstreamProxyFailure> {
    let authority = format!("{host}:{port}");
    // The buffer does not grow, so that no copy of the password stays behind.
    let mut head = zeroize::Zeroizing::new(Vec::with_capacity(2 * authority.len() + 1024));
    head.extend_from_slice(format!("CONNECT {authority} HTTP/1.1\r\nHost: {authority}\r\n").as_bytes());
    if let Some(login) = login {
        head.extend_from_slice(b"Proxy-Authorization: ");
        head.extend_from_slice(login.basic().as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    stream.write_all(&head).await.map_err(broken)?;
    stream.flush().await.map_err(broken)?;
    let mut answer = BytesMut::with_capacity(1024);
    let status = loop {
        if stream.read_buf(&mut answer).await.map_err(broken)? == 0 {
            return Err(UpstreamProxyFailure::Unreachable);
        }
        if let Some((status, length)) = final_status(&answer)? {
            // The length fields of a 2xx are ignored (RFC 9110 §9.3.6).
            answer.advance(length);
            break status;
        }
        if answer.len() > MAX_HEAD {
            return Err(UpstreamProxyFailure::Protocol);
        }
    };
    match status {
        200..=299 => Ok(answer.freeze()),
        401 | 407 => Err(UpstreamProxyFailure::CredentialsRejected),
        408 | 429 | 500..=599 => Err(UpstreamProxyFailure::NoConnection),
        400..=499 => Err(UpstreamProxyFailure::Denied),
        _ => Err(UpstreamProxyFailure::Protocol),
    }
}

/// Returns the status of the first response that is not interim, and where its head ends, once that has arrived.
fn final_status(bytes: &[u8]) -> Result<Option<(u16, usize)>, UpstreamProxyFailure> {
    let mut start = 0_usize;
    loop {
        let mut fields = [httparse::EMPTY_HEADER; MAX_FIELDS];
        let mut response = httparse::Response::new(&mut fields);
        let rest = bytes.get(start..).unwrap_or_default();
        let length = match response.parse(rest) {
            Ok(httparse::Status::Complete(length)) => length,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(_) => return Err(UpstreamProxyFailure::Protocol),
        };
        start = start.saturating_add(length);
        match response.code {
            // A switch of protocols was not asked for.
            Some(101) | None => return Err(UpstreamProxyFailure::Protocol),
            Some(100..=199) => {}
            Some(status) => return Ok(Some((status, start))),
        }
    }
}

const VERSION: u8 = 5;
const NO_LOGIN: u8 = 0;
const PASSWORD: u8 = 2;

/// Asks a SOCKS5 proxy for a connection.
async fn socks(
    stream: &mut (impl AsyncRead + AsyncWrite + Unpin),
    login: Option<&Login>,
    (host, port): (&Host, u16),
) -> Result<(), UpstreamProxyFailure> {
    let method = if login.is_some() { PASSWORD } else { NO_LOGIN };
    // Only one method is offered: a user that is configured must not be left out.
    stream.write_all(&[VERSION, 1, method]).await.map_err(broken)?;
    stream.flush().await.map_err(broken)?;
    match read::<2>(stream).await? {
        [VERSION, chosen] if chosen == method => {}
        [VERSION, 0xff] => return Err(UpstreamProxyFailure::CredentialsRejected),
        _ => return Err(UpstreamProxyFailure::Protocol),
    }
    if let Some(login) = login {
        stream.write_all(&login.socks()).await.map_err(broken)?;
        stream.flush().await.map_err(broken)?;
        match read::<2>(stream).await? {
            [1, 0] => {}
            [1, _] => return Err(UpstreamProxyFailure::CredentialsRejected),
            _ => return Err(UpstreamProxyFailure::Protocol),
        }
    }
    let mut request = vec![VERSION, 1, 0];
    match host {
        Host::Ip(IpAddr::V4(ip)) => {
            request.push(1);
            request.extend(ip.octets());
        }
        Host::Ip(IpAddr::V6(ip)) => {
            request.push(4);
            request.extend(ip.octets());
        }
        Host::Name(name) => {
            let name = name.as_str().as_bytes();
            request.extend([3, u8::try_from(name.len()).map_err(|_| UpstreamProxyFailure::Protocol)?]);
            request.extend(name);
        }
    }
    request.extend(port.to_be_bytes());
    stream.write_all(&request).await.map_err(broken)?;
    stream.flush().await.map_err(broken)?;
    let [version, reply, _, kind] = read::<4>(stream).await?;
    if version != VERSION {
        return Err(UpstreamProxyFailure::Protocol);
    }
    match reply {
        0 => {}
        2 => return Err(UpstreamProxyFailure::Denied),
        1 | 3..=8 => return Err(UpstreamProxyFailure::NoConnection),
        _ => return Err(UpstreamProxyFailure::Protocol),
    }
    // The address that the proxy has connected from. It may be a name.
    let length = match kind {
        1 => 4,
        4 => 16,
        3 => usize::from(read::<1>(stream).await?[0]),
        _ => return Err(UpstreamProxyFailure::Protocol),
    };
    let mut bound = vec![0; length.saturating_add(2)];
    stream.read_exact(&mut bound).await.map_err(broken)?;
    Ok(())
}

async fn read<const N: usize>(stream: &mut (impl AsyncRead + Unpin)) -> Result<[u8; N], UpstreamProxyFailure> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).await.map_err(broken)?;
    Ok(bytes)
}

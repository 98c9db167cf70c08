//! The header of the PROXY protocol, in which a load balancer names the address of its client (versions 1 and 2 of HAProxy's
//! specification).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::str::FromStr;

use tokio::io::{AsyncRead, AsyncReadExt};

/// The beginning of a header of version 2.
const SIGNATURE: [u8; 12] = *b"\r\n\r\n\0\r\nQUIT\n";
/// The beginning of a header of version 1.
const TEXT_START: &[u8] = b"PROXY ";
/// The longest header of version 1, in bytes, by the specification.
const MAX_TEXT: usize = 107;
/// The longest rest of a header of version 2, in bytes. Load balancers add few hundred.
const MAX_REST: usize = 4096;

/// A header that is not one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ProxyHeaderError {
    #[error("the connection does not begin with one")]
    Missing,
    #[error("it is malformed")]
    Malformed,
    #[error("it is too long")]
    TooLong,
    #[error("it names no TCP connection")]
    NotTcp,
    #[error("{0}")]
    Io(#[from] io::Error),
}

/// Reads the header at the beginning of a connection, and nothing behind it. Returns the client's address, or `None` if the
/// connection is the load balancer's own, such as a health check. The caller limits the time.
pub(crate) async fn read(from: &mut (impl AsyncRead + Unpin)) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    // Every header has that many bytes.
    let mut start = [0; 12];
    from.read_exact(&mut start).await?;
    if start == SIGNATURE {
        return read_binary(from).await;
    }
    if start.starts_with(TEXT_START) { read_text(from, &start).await } else { Err(ProxyHeaderError::Missing) }
}

async fn read_text(from: &mut (impl AsyncRead + Unpin), start: &[u8]) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    let mut line = start.to_vec();
    while !line.ends_with(b"\r\n") {
        if line.len() >= MAX_TEXT {
            return Err(ProxyHeaderError::TooLong);
        }
        // The length is not known, and what is behind it is another's.
        line.push(from.read_u8().await?);
    }
    let line = std::str::from_utf8(&line).ok().and_then(|line| line.strip_suffix("\r\n"));
    parse_text(line.ok_or(ProxyHeaderError::Malformed)?)
}

/// Parses `PROXY TCP4 SOURCE DESTINATION PORT PORT`, or the same with `TCP6`.
fn parse_text(line: &str) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    let mut words = line.split(' ').skip(1);
    let mut next = || words.next().ok_or(ProxyHeaderError::Malformed);
    let kind = next()?;
    let addresses = match kind {
        // Whatever follows has no meaning.
        "UNKNOWN" => return Ok(None),
        "TCP4" => [next()?, next()?].map(|text| Ipv4Addr::from_str(text).ok().map(IpAddr::V4)),
        "TCP6" => [next()?, next()?].map(|text| Ipv6Addr::from_str(text).ok().map(IpAddr::V6)),
        _ => return Err(ProxyHeaderError::NotTcp),
    };
    let ports = [next()?, next()?].map(port);
    match (addresses, ports, words.next()) {
        ([Some(source), Some(_)], [Some(port), Some(_)], None) => Ok(Some(SocketAddr::new(source, port))),
        _ => Err(ProxyHeaderError::Malformed),
    }
}

/// Parses a port in decimal digits, without a sign and leading zeros.
fn port(text: &str) -> Option<u16> {
    text.parse::<u16>().ok().filter(|port| port.to_string() == text)
}

async fn read_binary(from: &mut (impl AsyncRead + Unpin)) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    let (version_and_command, family) = (from.read_u8().await?, from.read_u8().await?);
    let length = usize::from(from.read_u16().await?);
    if length > MAX_REST {
        return Err(ProxyHeaderError::TooLong);
    }
    // The addresses, and then further values, which say nothing that is needed.
    let mut rest = vec![0; length];
    from.read_exact(&mut rest).await?;
    parse_binary(version_and_command, family, &rest)
}

fn parse_binary(version_and_command: u8, family: u8, rest: &[u8]) -> Result<Option<SocketAddr>, ProxyHeaderError> {
    const LOCAL: u8 = 0x20;
    const PROXY: u8 = 0x21;
    let source = |address: IpAddr, port: [u8; 2]| Some(SocketAddr::new(address, u16::from_be_bytes(port)));
    match (version_and_command, family) {
        (LOCAL, _) | (PROXY, 0x00) => Ok(None),
        (PROXY, 0x11) => {
            let addresses = rest.first_chunk::<12>().ok_or(ProxyHeaderError::Malformed)?;
            let [a, b, c, d, _, _, _, _, high, low, _, _] = *addresses;
            Ok(source(Ipv4Addr::new(a, b, c, d).into(), [high, low]))
        }
        (PROXY, 0x21) => {
            let addresses = rest.first_chunk::<36>().ok_or(ProxyHeaderError::Malformed)?;
            let address = addresses.first_chunk::<16>().ok_or(ProxyHeaderError::Malformed)?;
            let [.., high, low, _, _] = *addresses;
            Ok(source(Ipv6Addr::from(*address).into(), [high, low]))
        }
        (PROXY, _) => Err(ProxyHeaderError::NotTcp),
        _ => Err(ProxyHeaderError::Malformed),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binary(version_and_command: u8, family: u8, rest: &[u8]) -> Vec<u8> {
        let length = u16::try_from(rest.len()).unwrap().to_be_bytes();
        [&SIGNATURE[..], &[version_and_command, family], &length, rest].concat()
    }

    const V4: [u8; 12] = [192, 0, 2, 7, 10, 0, 0, 1, 0x9c, 0x40, 0x0c, 0x38];

    fn v6() -> Vec<u8> {
        let addresses = ["2001:db8::7", "fd00::1"].map(|text| text.parse::<Ipv6Addr>().unwrap().octets());
        [&addresses[0][..], &addresses[1], &[0x9c, 0x40, 0x0c, 0x38]].concat()
    }

    #[tokio::test]
    async fn the_clients_address_is_read_and_nothing_behind_the_header() {
        let rows: [(Vec<u8>, Option<&str>); 11] = [
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 40000 3128\r\n".to_vec(), Some("192.0.2.7:40000")),
            (b"PROXY TCP4 0.0.0.0 0.0.0.0 0 0\r\n".to_vec(), Some("0.0.0.0:0")),
            (b"PROXY TCP6 2001:db8::7 fd00::1 40000 3128\r\n".to_vec(), Some("[2001:db8::7]:40000")),
            (b"PROXY UNKNOWN\r\n".to_vec(), None),
            (b"PROXY UNKNOWN ffff::1 whatever \x01\r\n".to_vec(), None),
            (binary(0x21, 0x11, &V4), Some("192.0.2.7:40000")),
            (binary(0x21, 0x11, &[&V4[..], &[3, 0, 4, 1, 2, 3, 4]].concat()), Some("192.0.2.7:40000")),
            (binary(0x21, 0x21, &v6()), Some("[2001:db8::7]:40000")),
            (binary(0x20, 0x00, &[]), None),
            (binary(0x20, 0x11, &V4), None),
            (binary(0x21, 0x00, &[1, 2, 3]), None),
        ];
        for (header, want) in rows {
            let all = [&header[..], b"CONNECT "].concat();
            let mut from = all.as_slice();
            let found = read(&mut from).await.unwrap_or_else(|error| panic!("{header:?}: {error}"));
            assert_eq!(found.map(|address| address.to_string()).as_deref(), want, "{header:?}");
            assert_eq!(from, b"CONNECT ", "{header:?}");
            // Cut anywhere, it is none.
            for end in 0..header.len() {
                let cut = read(&mut &header[..end]).await;
                assert!(matches!(cut, Err(ProxyHeaderError::Io(_))), "{header:?} up to {end}");
            }
        }
    }

    #[tokio::test]
    async fn what_is_no_header_is_refused() {
        let rows: [(Vec<u8>, &str); 22] = [
            (b"CONNECT api.test:443 HTTP/1.1\r\n\r\n".to_vec(), "does not begin"),
            (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03aaaa".to_vec(), "does not begin"),
            (b"proxy TCP4 192.0.2.7 10.0.0.1 1 2\r\n".to_vec(), "does not begin"),
            (b"\r\n\r\n\0\r\nQUIT\r\n".to_vec(), "does not begin"),
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 1 2\n".repeat(9), "too long"),
            (b"PROXY TCP4  192.0.2.7 10.0.0.1 1 2\r\n".to_vec(), "malformed"),
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 1 2 3\r\n".to_vec(), "malformed"),
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 1\r\n".to_vec(), "malformed"),
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 1 65536\r\n".to_vec(), "malformed"),
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 +1 2\r\n".to_vec(), "malformed"),
            (b"PROXY TCP4 192.0.2.7 10.0.0.1 01 2\r\n".to_vec(), "malformed"),
            (b"PROXY TCP4 192.0.2.007 10.0.0.1 1 2\r\n".to_vec(), "malformed"),
            (b"PROXY TCP4 2001:db8::7 fd00::1 1 2\r\n".to_vec(), "malformed"),
            (b"PROXY TCP6 192.0.2.7 10.0.0.1 1 2\r\n".to_vec(), "malformed"),
            (b"PROXY TCP6 fe80::1%eth0 fd00::1 1 2\r\n".to_vec(), "malformed"),
            (b"PROXY UDP4 192.0.2.7 10.0.0.1 1 2\r\n".to_vec(), "no TCP"),
            (binary(0x11, 0x11, &V4), "malformed"),
            (binary(0x22, 0x11, &V4), "malformed"),
            (binary(0x21, 0x11, &V4[..11]), "malformed"),
            (binary(0x21, 0x21, &V4), "malformed"),
            (binary(0x21, 0x12, &V4), "no TCP"),
            (binary(0x21, 0x11, &[0; MAX_REST + 1]), "too long"),
        ];
        for (header, want) in rows {
            let error = read(&mut header.as_slice()).await.unwrap_err().to_string();
            assert!(error.contains(want), "{header:?}: {error}");
        }
    }
}

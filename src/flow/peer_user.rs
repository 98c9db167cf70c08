//! Finds the user of a client on this machine: the owner of the socket at the other end of a TCP connection, as the kernel
//! reports it (sock_diag(7)).

use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};

/// `SOCK_DIAG_BY_FAMILY`, the type of the request and of its answer.
const BY_FAMILY: u16 = 20;
/// `NLM_F_REQUEST`.
const IS_REQUEST: u16 = 1;
/// `IPPROTO_TCP`.
const TCP: u8 = 6;
/// `INET_DIAG_NOCOOKIE`: the socket is known by its addresses.
const NO_COOKIE: u32 = u32::MAX;
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;
/// The length of `nlmsghdr`.
const HEADER: usize = 16;
/// The offsets in `inet_diag_msg` of `idiag_state`, of the ports and addresses, of `idiag_uid` and of `idiag_inode`.
const STATE_AT: usize = 1;
const ADDRESSES_AT: usize = 4;
const UID_AT: usize = 64;
const INODE_AT: usize = 68;
/// The offset of the ports and addresses in `inet_diag_req_v2`.
const REQUESTED_AT: usize = 8;
/// The states of a connection whose client has not closed it: ESTABLISHED, FIN_WAIT1, FIN_WAIT2, CLOSE_WAIT, LAST_ACK and
/// CLOSING. Without such a connection, the kernel reports a socket that listens at the client's port.
const OPEN_STATES: [u8; 6] = [1, 4, 5, 8, 9, 11];
/// The id that the kernel reports for users that this user namespace does not have (`kernel.overflowuid`).
const OVERFLOW: u32 = 65534;

/// Returns the id of the user who owns the client's socket. `None` if the kernel does not say, if the client is on another
/// machine, or if it has closed its socket: the kernel reports such sockets as root's.
#[must_use]
pub fn of_connection(client: SocketAddr, ours: SocketAddr) -> Option<u32> {
    // A packet filter can pass connections of other machines on to the loopback interface.
    if !client.ip().to_canonical().is_loopback() {
        return None;
    }
    owner_of(client, ours)
}

/// Returns the id of the user who owns the client's socket of a captured connection, which was made to another address than
/// the one that it is accepted at. A client on another machine has no such socket here.
#[must_use]
pub fn of_captured(client: SocketAddr, original: SocketAddr) -> Option<u32> {
    owner_of(client, original)
}

fn owner_of(client: SocketAddr, other_end: SocketAddr) -> Option<u32> {
    let request = request(client, other_end);
    owner(&request, &ask(&request).ok()?)
}

/// Returns whether the kernel reports owners here.
///
/// # Errors
/// If no connection can be made over the loopback interface.
pub fn is_supported() -> io::Result<bool> {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?;
    let ours = listener.local_addr()?;
    let socket = socket2::Socket::new(socket2::Domain::IPV4, socket2::Type::STREAM, None)?;
    socket.connect(&ours.into())?;
    let client = socket.local_addr()?.as_socket().ok_or(io::ErrorKind::Unsupported)?;
    Ok(of_connection(client, ours) == Some(rustix::process::geteuid().as_raw()))
}

#[cfg(target_os = "linux")]
fn ask(request: &[u8]) -> io::Result<Vec<u8>> {
    use rustix::fd::OwnedFd;
    use rustix::net::netlink::{SOCK_DIAG, SocketAddrNetlink};
    use rustix::net::sockopt::{Timeout, set_socket_timeout};
    use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};
    let socket: OwnedFd =
        socket_with(AddressFamily::NETLINK, SocketType::DGRAM, SocketFlags::CLOEXEC, Some(SOCK_DIAG))?;
    // The kernel answers before the call returns. This is in case it does not.
    set_socket_timeout(&socket, Timeout::Recv, Some(std::time::Duration::from_millis(100)))?;
    sendto(&socket, request, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = vec![0; 4096];
    let (read, _) = recv(&socket, answer.as_mut_slice(), RecvFlags::empty())?;
    answer.truncate(read);
    Ok(answer)
}

/// Only Linux has this interface.
#[cfg(not(target_os = "linux"))]
fn ask(_: &[u8]) -> io::Result<Vec<u8>> {
    Err(io::ErrorKind::Unsupported.into())
}

/// Returns the message that asks for one socket: `nlmsghdr` and `inet_diag_req_v2`.
fn request(client: SocketAddr, ours: SocketAddr) -> Vec<u8> {
    let (client_ip, our_ip) = (client.ip().to_canonical(), ours.ip().to_canonical());
    let family = if client_ip.is_ipv4() { AF_INET } else { AF_INET6 };
    let mut body = vec![family, TCP, 0, 0];
    // All states.
    body.extend(u32::MAX.to_ne_bytes());
    body.extend(client.port().to_be_bytes());
    body.extend(ours.port().to_be_bytes());
    body.extend(octets(client_ip));
    body.extend(octets(our_ip));
    // The interface matters for link-local addresses only.
    body.extend(0_u32.to_ne_bytes());
    body.extend(NO_COOKIE.to_ne_bytes());
    body.extend(NO_COOKIE.to_ne_bytes());
    let length = u32::try_from(HEADER.saturating_add(body.len())).unwrap_or_default();
    let mut message = Vec::from(length.to_ne_bytes());
    message.extend(BY_FAMILY.to_ne_bytes());
    message.extend(IS_REQUEST.to_ne_bytes());
    // The sequence number and the sender's port.
    message.extend([0; 8]);
    message.extend(body);
    message
}

fn octets(address: IpAddr) -> [u8; 16] {
    match address {
        IpAddr::V6(address) => address.octets(),
        IpAddr::V4(address) => {
            let [a, b, c, d] = address.octets();
            [a, b, c, d, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0]
        }
    }
}

/// Returns the owner in the kernel's answer, if it is about the connection of the request.
fn owner(request: &[u8], answer: &[u8]) -> Option<u32> {
    let kind = answer.get(4..6)?.first_chunk().map(|bytes| u16::from_ne_bytes(*bytes))?;
    if kind != BY_FAMILY {
        return None;
    }
    let state = answer.get(HEADER.checked_add(STATE_AT)?)?;
    if !OPEN_STATES.contains(state) || ends(request, REQUESTED_AT)? != ends(answer, ADDRESSES_AT)? {
        return None;
    }
    let number = |at: usize| {
        let bytes = answer.get(HEADER.checked_add(at)?..)?.first_chunk()?;
        Some(u32::from_ne_bytes(*bytes))
    };
    let (uid, inode) = (number(UID_AT)?, number(INODE_AT)?);
    // A socket without an inode has been closed by its process.
    (inode != 0 && uid != OVERFLOW).then_some(uid)
}

/// Returns the two ends of the connection that a message is about. IPv4 connections of IPv6 sockets have IPv4 addresses.
fn ends(message: &[u8], at: usize) -> Option<[SocketAddr; 2]> {
    let family = *message.get(HEADER)?;
    let (ports, addresses) = message.get(HEADER.checked_add(at)?..)?.split_at_checked(4)?;
    let port = |bytes: &[u8]| bytes.first_chunk().map(|bytes| u16::from_be_bytes(*bytes));
    let address = |bytes: &[u8]| {
        Some(match family {
            AF_INET => IpAddr::from(*bytes.first_chunk::<4>()?),
            AF_INET6 => IpAddr::from(*bytes.first_chunk::<16>()?).to_canonical(),
            _ => return None,
        })
    };
    let client = SocketAddr::new(address(addresses)?, port(ports)?);
    Some([client, SocketAddr::new(address(addresses.get(16..)?)?, port(ports.get(2..)?)?)])
}

#[cfg(test)]
mod tests {
    use std::io::Write;
    use std::net::TcpStream;

    use super::*;

    fn us() -> Option<u32> {
        Some(rustix::process::geteuid().as_raw())
    }

    fn connected(listen: &str, to: &str) -> (TcpStream, TcpStream, SocketAddr) {
        let listener = TcpListener::bind(listen).unwrap();
        let port = listener.local_addr().unwrap().port();
        let to = SocketAddr::new(to.parse().unwrap(), port);
        let client = socket2::Socket::new(socket2::Domain::for_address(to), socket2::Type::STREAM, None).unwrap();
        client.connect(&to.into()).unwrap();
        let (accepted, address) = listener.accept().unwrap();
        (client.into(), accepted, address)
    }

    #[test]
    fn the_owner_of_a_connection_is_found_until_it_closes_its_socket() {
        assert!(is_supported().unwrap());
        // Some programs have IPv6 sockets only, gRPC for example.
        let rows = [
            ("127.0.0.1:0", "127.0.0.1"),
            ("127.0.0.1:0", "::ffff:127.0.0.1"),
            ("[::1]:0", "::1"),
            ("[::]:0", "127.0.0.1"),
            ("[::]:0", "::ffff:127.0.0.1"),
        ];
        for (listen, to) in rows {
            // Another test may get the port in between.
            let is_done = (0..100).any(|_| owner_is_found_until_it_closes(listen, to));
            assert!(is_done, "every port was taken: {listen} {to}");
        }
    }

    /// Returns false if the port of the client is taken once it is free.
    fn owner_is_found_until_it_closes(listen: &str, to: &str) -> bool {
        let (mut client, accepted, address) = connected(listen, to);
        let ours = accepted.local_addr().unwrap();
        assert_eq!(of_connection(address, ours), us(), "{listen} {to}");
        client.write_all(b"x").unwrap();
        client.shutdown(std::net::Shutdown::Write).unwrap();
        assert_eq!(of_connection(address, ours), us(), "half closed: {listen} {to}");
        drop(client);
        // The kernel reports an orphan as root's, or not at all.
        assert_eq!(of_connection(address, ours), None, "closed: {listen} {to}");
        drop(accepted);
        // Without a connection, it reports a socket that listens at the client's port.
        let at_port = if listen.starts_with("127") { "0.0.0.0" } else { "::" };
        let socket = socket2::Socket::new(socket2::Domain::for_address(address), socket2::Type::STREAM, None).unwrap();
        socket.set_reuse_address(true).unwrap();
        if socket.bind(&SocketAddr::new(at_port.parse().unwrap(), address.port()).into()).is_err() {
            return false;
        }
        socket.listen(1).unwrap();
        assert_eq!(of_connection(address, ours), None, "a listener: {listen} {to}");
        let other = SocketAddr::new(address.ip(), 1);
        assert_eq!(of_connection(other, ours), None, "another port: {listen} {to}");
        true
    }

    #[test]
    fn an_answer_without_an_owner_names_nobody() {
        let asked = request("127.0.0.1:40000".parse().unwrap(), "127.0.0.1:3128".parse().unwrap());
        let with_state = |state: u8, kind: u16, uid: u32, inode: u32| {
            let mut bytes = vec![0; HEADER + 72];
            bytes[HEADER] = AF_INET;
            bytes[HEADER + STATE_AT] = state;
            let from = HEADER + REQUESTED_AT;
            bytes[HEADER + ADDRESSES_AT..][..36].copy_from_slice(&asked[from..from + 36]);
            bytes[4..6].copy_from_slice(&kind.to_ne_bytes());
            bytes[HEADER + UID_AT..HEADER + UID_AT + 4].copy_from_slice(&uid.to_ne_bytes());
            bytes[HEADER + INODE_AT..HEADER + INODE_AT + 4].copy_from_slice(&inode.to_ne_bytes());
            bytes
        };
        let answer = |kind: u16, uid: u32, inode: u32| with_state(1, kind, uid, inode);
        let of = |answer: &[u8]| owner(&asked, answer);
        assert_eq!(of(&answer(BY_FAMILY, 1000, 7)), Some(1000));
        assert_eq!(of(&answer(BY_FAMILY, 0, 7)), Some(0));
        assert_eq!(of(&answer(BY_FAMILY, 0, 0)), None);
        assert_eq!(of(&answer(BY_FAMILY, OVERFLOW, 7)), None);
        assert_eq!(of(&answer(2, 1000, 7)), None);
        for state in 0..=12 {
            let is_open = OPEN_STATES.contains(&state);
            assert_eq!(of(&with_state(state, BY_FAMILY, 1000, 7)).is_some(), is_open, "{state}");
        }
        // Two ports, and the first four bytes of each address.
        for at in [0, 1, 2, 3, 4, 7, 20, 23].map(|at| ADDRESSES_AT + at) {
            let mut other = answer(BY_FAMILY, 1000, 7);
            other[HEADER + at] ^= 1;
            assert_eq!(of(&other), None, "another connection: {at}");
        }
        for length in 0..HEADER + 72 {
            assert_eq!(of(&answer(BY_FAMILY, 1000, 7)[..length]), None, "{length}");
        }
        assert_eq!(of_connection("192.0.2.1:22".parse().unwrap(), "127.0.0.1:3128".parse().unwrap()), None);
    }
}

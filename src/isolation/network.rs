//! Configures the command's network (rtnetlink(7)).

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::os::fd::OwnedFd;

use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

const RTM_NEWLINK: u16 = 16;
const RTM_NEWADDR: u16 = 20;
const RTM_NEWROUTE: u16 = 24;
const NLM_F_REQUEST_AND_ACK: u16 = 1 | 4;
const NLM_F_CREATE: u16 = 0x400;
const NLMSG_ERROR: u16 = 2;
/// The loopback is the first interface of every network namespace.
const LOOPBACK_INDEX: u32 = 1;
const IFF_UP: u32 = 1;
const IFA_ADDRESS: u16 = 1;
const IFA_LOCAL: u16 = 2;
const IFA_F_NODAD: u8 = 2;
const RT_TABLE_LOCAL: u8 = 255;
const RTPROT_STATIC: u8 = 4;
const RT_SCOPE_HOST: u8 = 254;
const RTN_LOCAL: u8 = 2;
const RTA_OIF: u16 = 4;
const RTA_PREFSRC: u16 = 7;

/// The command's own addresses, which are for documentation (RFC 5737, RFC 3849). Resolvers look for addresses of a family only if
/// the machine has one that is not a loopback's.
const OWN_V4: Ipv4Addr = Ipv4Addr::new(192, 0, 2, 1);
const OWN_V6: Ipv6Addr = Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 1);

/// Enables the loopback interface.
pub(crate) fn enable_loopback() -> io::Result<()> {
    let socket = netlink()?;
    // The unspecified family and device type, then the interface, the flags and their mask.
    let body = [0, LOOPBACK_INDEX, IFF_UP, IFF_UP].map(u32::to_ne_bytes).concat();
    request(&socket, RTM_NEWLINK, 0, &body)
}

/// Makes each address one of the loopback interface, so that all connections arrive at this machine's own sockets, and those to
/// ports without one are refused at once. Returns whether that includes IPv6, which the kernel may not have.
pub(crate) fn lead_everything_here() -> io::Result<bool> {
    let socket = netlink()?;
    for own in [IpAddr::V4(OWN_V4), IpAddr::V6(OWN_V6)] {
        let done = add_address(&socket, own).and_then(|()| add_local_route(&socket, own));
        match done {
            Ok(()) => {}
            Err(error) if own.is_ipv6() && is_without_family(&error) => return Ok(false),
            Err(error) => return Err(error),
        }
    }
    Ok(true)
}

/// Returns true if the kernel does not have the family of addresses, or has it disabled.
fn is_without_family(error: &io::Error) -> bool {
    let missing = [nix::libc::EAFNOSUPPORT, nix::libc::EOPNOTSUPP, nix::libc::EACCES];
    error.raw_os_error().is_some_and(|code| missing.contains(&code))
}

fn family(address: IpAddr) -> u8 {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    family.as_raw().to_le_bytes()[0]
}

fn octets(address: IpAddr) -> Vec<u8> {
    match address {
        IpAddr::V4(address) => address.octets().to_vec(),
        IpAddr::V6(address) => address.octets().to_vec(),
    }
}

fn add_address(socket: &OwnedFd, address: IpAddr) -> io::Result<()> {
    let (octets, bits) = (octets(address), if address.is_ipv4() { 32 } else { 128 });
    // No other machine is asked whether it has the address.
    let mut body = vec![family(address), bits, IFA_F_NODAD, RT_SCOPE_HOST];
    body.extend(LOOPBACK_INDEX.to_ne_bytes());
    body.extend([attribute(IFA_LOCAL, &octets), attribute(IFA_ADDRESS, &octets)].concat());
    request(socket, RTM_NEWADDR, NLM_F_CREATE, &body)
}

/// Adds what `ip route add local default dev lo src ADDRESS` adds. Without a source, IPv4 connections would come from the address that they
/// go to, and a program could connect to itself.
fn add_local_route(socket: &OwnedFd, source: IpAddr) -> io::Result<()> {
    // The lengths of both prefixes and the type of service are 0, and so are the flags.
    let mut body = vec![family(source), 0, 0, 0, RT_TABLE_LOCAL, RTPROT_STATIC, RT_SCOPE_HOST, RTN_LOCAL, 0, 0, 0, 0];
    body.extend(attribute(RTA_OIF, &LOOPBACK_INDEX.to_ne_bytes()));
    body.extend(attribute(RTA_PREFSRC, &octets(source)));
    request(socket, RTM_NEWROUTE, NLM_F_CREATE, &body)
}

/// Encodes an attribute, whose length here is always a multiple of 4.
fn attribute(kind: u16, value: &[u8]) -> Vec<u8> {
    let length = u16::try_from(value.len().saturating_add(4)).unwrap_or(u16::MAX);
    [&length.to_ne_bytes(), &kind.to_ne_bytes(), value].concat()
}

fn netlink() -> io::Result<OwnedFd> {
    // No protocol means `NETLINK_ROUTE`, which is number 0.
    Ok(socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?)
}

/// Sends a request, and returns after the kernel has confirmed it.
fn request(socket: &OwnedFd, kind: u16, flags: u16, body: &[u8]) -> io::Result<()> {
    let length = u32::try_from(body.len().saturating_add(16)).unwrap_or(u32::MAX);
    let mut message = length.to_ne_bytes().to_vec();
    message.extend([kind, NLM_F_REQUEST_AND_ACK | flags].map(u16::to_ne_bytes).concat());
    // The sequence number and the port id.
    message.extend([1_u32, 0].map(u32::to_ne_bytes).concat());
    message.extend(body);
    sendto(socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0_u8; 1024];
    let (_, n) = recv(socket, &mut answer, RecvFlags::empty())?;
    let answer = answer.get(..n).unwrap_or_default();
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let code = answer.get(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(NLMSG_ERROR), Some(0)) => Ok(()),
        (Some(NLMSG_ERROR), Some(code)) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

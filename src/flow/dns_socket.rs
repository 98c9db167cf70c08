//! The UDP socket of the DNS listener. An answer comes from the address that was asked, also if the socket listens on all addresses
//! of the machine.

use std::io;
use std::net::{IpAddr, SocketAddr};

use tokio::net::UdpSocket;

/// A socket for queries.
pub(super) struct DnsSocket {
    udp: UdpSocket,
}

/// The addresses of a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct QueryPath {
    pub(super) from: SocketAddr,
    /// The address that was asked. `None` if it is that of the socket.
    asked: Option<IpAddr>,
}

#[cfg(target_os = "linux")]
impl DnsSocket {
    /// # Errors
    /// If the options of the socket cannot be read or set.
    pub(super) fn new(udp: UdpSocket) -> io::Result<Self> {
        use nix::sys::socket::{setsockopt, sockopt};
        let at = udp.local_addr()?.ip();
        if at.is_unspecified() {
            match at {
                IpAddr::V4(_) => setsockopt(&udp, sockopt::Ipv4PacketInfo, &true)?,
                // Also of queries over IPv4, with an address that is mapped.
                IpAddr::V6(_) => setsockopt(&udp, sockopt::Ipv6RecvPacketInfo, &true)?,
            }
        }
        Ok(Self { udp })
    }

    /// Receives a query, and returns its length.
    ///
    /// # Errors
    /// Those of the socket.
    pub(super) async fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, QueryPath)> {
        use std::io::IoSliceMut;
        use std::net::Ipv6Addr;
        use std::os::fd::AsRawFd;

        use nix::libc;
        use nix::sys::socket::{ControlMessageOwned, MsgFlags, SockaddrStorage, recvmsg};

        let mut space = nix::cmsg_space!(libc::in6_pktinfo);
        self.udp
            .async_io(tokio::io::Interest::READABLE, || {
                let mut slices = [IoSliceMut::new(buffer)];
                let received =
                    recvmsg::<SockaddrStorage>(self.udp.as_raw_fd(), &mut slices, Some(&mut space), MsgFlags::empty())?;
                let asked = received.cmsgs()?.find_map(|message| match message {
                    ControlMessageOwned::Ipv4PacketInfo(info) => {
                        Some(IpAddr::from(info.ipi_spec_dst.s_addr.to_ne_bytes()))
                    }
                    ControlMessageOwned::Ipv6PacketInfo(info) => {
                        Some(IpAddr::from(Ipv6Addr::from(info.ipi6_addr.s6_addr)))
                    }
                    _ => None,
                });
                let from = received.address.as_ref().and_then(socket_address).ok_or(io::ErrorKind::InvalidData)?;
                Ok((received.bytes, QueryPath { from, asked }))
            })
            .await
    }

    /// Sends the answer to a query.
    ///
    /// # Errors
    /// Those of the socket.
    pub(super) async fn answer(&self, answer: &[u8], path: &QueryPath) -> io::Result<()> {
        use std::io::IoSlice;
        use std::os::fd::AsRawFd;

        use nix::libc;
        use nix::sys::socket::{ControlMessage, MsgFlags, SockaddrStorage, sendmsg};

        let to = SockaddrStorage::from(path.from);
        let send = |from: &[ControlMessage<'_>]| -> io::Result<()> {
            sendmsg(self.udp.as_raw_fd(), &[IoSlice::new(answer)], from, MsgFlags::empty(), Some(&to))?;
            Ok(())
        };
        let sent = self.udp.async_io(tokio::io::Interest::WRITABLE, || match path.asked {
            None => send(&[]),
            Some(IpAddr::V4(asked)) => {
                let own = libc::in_addr { s_addr: u32::from_ne_bytes(asked.octets()) };
                let any = libc::in_addr { s_addr: 0 };
                send(&[ControlMessage::Ipv4PacketInfo(&libc::in_pktinfo {
                    ipi_ifindex: 0,
                    ipi_spec_dst: own,
                    ipi_addr: any,
                })])
            }
            Some(IpAddr::V6(asked)) => {
                let own = libc::in6_addr { s6_addr: asked.octets() };
                send(&[ControlMessage::Ipv6PacketInfo(&libc::in6_pktinfo { ipi6_addr: own, ipi6_ifindex: 0 })])
            }
        });
        sent.await
    }
}

/// Returns the address of a peer.
#[cfg(target_os = "linux")]
fn socket_address(address: &nix::sys::socket::SockaddrStorage) -> Option<SocketAddr> {
    let v4 = address.as_sockaddr_in().map(|v4| SocketAddr::V4((*v4).into()));
    v4.or_else(|| address.as_sockaddr_in6().map(|v6| SocketAddr::V6((*v6).into())))
}

/// The configuration allows no address there that stands for all of the machine.
#[cfg(not(target_os = "linux"))]
impl DnsSocket {
    pub(super) fn new(udp: UdpSocket) -> io::Result<Self> {
        Ok(Self { udp })
    }

    pub(super) async fn receive(&self, buffer: &mut [u8]) -> io::Result<(usize, QueryPath)> {
        let (length, from) = self.udp.recv_from(buffer).await?;
        Ok((length, QueryPath { from, asked: None }))
    }

    pub(super) async fn answer(&self, answer: &[u8], path: &QueryPath) -> io::Result<()> {
        self.udp.send_to(answer, path.from).await.map(drop)
    }
}

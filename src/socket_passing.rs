//! Passes sockets to another process over a Unix socket (SCM_RIGHTS, unix(7)).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, ReturnFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// A process that has ended is an error, and no signal.
#[cfg(target_os = "linux")]
const SEND_FLAGS: SendFlags = SendFlags::NOSIGNAL;
/// The sockets are not inherited by programs that this process starts.
#[cfg(target_os = "linux")]
const RECEIVE_FLAGS: RecvFlags = RecvFlags::CMSG_CLOEXEC;
#[cfg(not(target_os = "linux"))]
const SEND_FLAGS: SendFlags = SendFlags::empty();
#[cfg(not(target_os = "linux"))]
const RECEIVE_FLAGS: RecvFlags = RecvFlags::empty();

/// The most sockets in a message: Linux allows 253.
pub(crate) const MAX_SOCKETS: usize = 128;
/// Maximum size of a message, in bytes.
const MAX_MESSAGE: usize = 64 * 1024;

/// Sends a message, which is not empty, with sockets.
///
/// # Errors
/// If there are more than [`MAX_SOCKETS`], or the message is not sent whole.
pub(crate) fn send(stream: impl AsFd, message: &[u8], sockets: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SOCKETS))];
    let mut rights = SendAncillaryBuffer::new(&mut space);
    if !rights.push(SendAncillaryMessage::ScmRights(sockets)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let sent = sendmsg(stream, &[IoSlice::new(message)], &mut rights, SEND_FLAGS)?;
    if sent == message.len() { Ok(()) } else { Err(io::ErrorKind::WriteZero.into()) }
}

/// Receives a message and the sockets in it.
///
/// # Errors
/// [`io::ErrorKind::UnexpectedEof`] if the other process has closed the connection; if this process may not have so many descriptors.
pub(crate) fn receive(stream: impl AsFd) -> io::Result<(Vec<u8>, Vec<OwnedFd>)> {
    let mut message = vec![0; MAX_MESSAGE];
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(MAX_SOCKETS))];
    let mut rights = RecvAncillaryBuffer::new(&mut space);
    let received = recvmsg(stream, &mut [IoSliceMut::new(&mut message)], &mut rights, RECEIVE_FLAGS)?;
    // The sockets that were received are closed again.
    if received.flags.contains(ReturnFlags::TRUNC) {
        return Err(io::Error::other("the message is too long"));
    }
    if received.flags.contains(ReturnFlags::CTRUNC) {
        return Err(io::Error::other("not all sockets were received; raise the limit of open files (ulimit -n)"));
    }
    message.truncate(received.bytes);
    if message.is_empty() {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    let mut sockets = Vec::new();
    for part in rights.drain() {
        if let RecvAncillaryMessage::ScmRights(passed) = part {
            for socket in passed {
                #[cfg(not(target_os = "linux"))]
                rustix::io::fcntl_setfd(&socket, rustix::io::FdFlags::CLOEXEC)?;
                sockets.push(socket);
            }
        }
    }
    Ok((message, sockets))
}

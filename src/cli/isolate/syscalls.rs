//! Refuses system calls that lead out of the namespaces.

use nix::libc;
use seccompiler::{Error, SeccompCmpArgLen::Dword, SeccompCmpOp, SeccompCondition, SeccompRule};

use super::super::seccomp::{self, Rules, X32, put};

/// Refuses the calls from now on, for this process and its children.
pub(super) fn refuse(unix_sockets: bool) -> Result<(), Error> {
    seccomp::refuse(libc::EAFNOSUPPORT, families(unix_sockets)?)?;
    seccomp::refuse(libc::EPERM, others()?)
}

/// Restricts sockets to the families that a network namespace isolates. Those of virtual machines (`AF_VSOCK`), for
/// example, lead to the host. A Unix socket reaches every listener in the file system. A connected pair does not, but a
/// pair of datagram sockets can be connected again.
fn families(unix_sockets: bool) -> Result<Rules, Error> {
    let mut held = vec![libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    held.extend(unix_sockets.then_some(libc::AF_UNIX));
    let none_of_them = held.into_iter().map(|family| is(0, SeccompCmpOp::Ne, family)).collect::<Result<_, _>>()?;
    let mut pairs = vec![SeccompRule::new(vec![is(0, SeccompCmpOp::Ne, libc::AF_UNIX)?])?];
    if !unix_sockets {
        // The kernel treats a raw socket like a datagram socket here.
        for kind in [libc::SOCK_DGRAM, libc::SOCK_RAW] {
            pairs.push(SeccompRule::new(vec![is(1, SeccompCmpOp::MaskedEq(0xf), kind)?])?);
        }
    }
    let mut rules = Rules::new();
    put(&mut rules, libc::SYS_socket, vec![SeccompRule::new(none_of_them)?]);
    put(&mut rules, libc::SYS_socketpair, pairs);
    Ok(rules)
}

/// Returns rules against system calls that open sockets in other ways (io_uring), start a helper of the kernel outside
/// that may use DNS (keys), or write to the caller's terminal (`TIOCSTI`).
fn others() -> Result<Rules, Error> {
    let mut rules = Rules::new();
    for call in [libc::SYS_io_uring_setup, libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl] {
        put(&mut rules, call, Vec::new());
    }
    let typing = [libc::TIOCSTI, libc::TIOCLINUX].into_iter().map(|request| {
        let request = u64::from(request as u32);
        SeccompRule::new(vec![SeccompCondition::new(1, Dword, SeccompCmpOp::Eq, request)?])
    });
    let typing = typing.collect::<Result<Vec<_>, _>>()?;
    put(&mut rules, libc::SYS_ioctl, typing.clone());
    if cfg!(target_arch = "x86_64") {
        // Only this call has a number of its own in the x32 ABI.
        rules.insert(X32 | 514, typing);
    }
    Ok(rules)
}

fn is(argument: u8, how: SeccompCmpOp, value: i32) -> Result<SeccompCondition, Error> {
    Ok(SeccompCondition::new(argument, Dword, how, u64::from(value.unsigned_abs()))?)
}

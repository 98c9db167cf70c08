//! Creates namespaces without root, with user mappings and a working loopback.

use std::fs;
use std::io;

use nix::sched::{CloneFlags, unshare};
use rustix::net::netlink::SocketAddrNetlink;
use rustix::net::{AddressFamily, RecvFlags, SendFlags, SocketFlags, SocketType, recv, sendto, socket_with};

use super::Failed;

/// Leaves the caller's namespaces for new ones with the same user. Children get a new PID namespace too.
pub(super) fn enter() -> Result<(), Failed> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    let all = CloneFlags::CLONE_NEWUSER
        | CloneFlags::CLONE_NEWNET
        | CloneFlags::CLONE_NEWNS
        | CloneFlags::CLONE_NEWIPC
        | CloneFlags::CLONE_NEWPID;
    unshare(all).map_err(|error| forbidden("new namespaces", error.into()))?;
    // Files keep their owner, and the user does not become root.
    let maps = [("setgroups", "deny".to_owned()), ("uid_map", map(uid)), ("gid_map", map(gid))];
    for (file, text) in maps {
        fs::write(format!("/proc/self/{file}"), text).map_err(|error| forbidden(file, error))?;
    }
    Ok(())
}

fn map(id: u32) -> String {
    format!("{id} {id} 1")
}

/// Returns the error with its cause and a remedy.
pub(super) fn forbidden(what: &str, error: io::Error) -> Failed {
    let is = |file: &str, value: &str| fs::read_to_string(file).is_ok_and(|text| text.trim() == value);
    let filtered = || fs::read_to_string("/proc/self/status").is_ok_and(|text| text.contains("Seccomp:\t2"));
    let why = if is("/proc/sys/user/max_user_namespaces", "0") {
        "user namespaces are switched off; the administrator allows them with `sysctl user.max_user_namespaces=10000`"
    } else if is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        "users may not make namespaces; the administrator allows it with `sysctl kernel.unprivileged_userns_clone=1`"
    } else if is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        "AppArmor restricts user namespaces; the administrator gives exeat a profile with `userns,`, or sets \
         `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
    } else if filtered() {
        "a seccomp filter is in force, as in a container; let its profile permit `unshare` and `mount`, or isolate the \
         container itself: its only network the proxy"
    } else {
        "the kernel or what surrounds this process (a container, a chroot, a limit) does not permit it; isolate what \
         surrounds it instead: its only network the proxy"
    };
    Failed(format!("{what}: {error}; {why}"))
}

const NEWLINK: u16 = 16;
const REQUEST_AND_ACK: u16 = 1 | 4;
const ERROR: u16 = 2;
/// The loopback is the first interface of every network namespace.
const LOOPBACK: u32 = 1;
const UP: u32 = 1;

/// Enables the loopback (`RTM_NEWLINK`, rtnetlink(7)).
pub(super) fn loopback() -> io::Result<()> {
    // Protocol 0 is `NETLINK_ROUTE`.
    let socket = socket_with(AddressFamily::NETLINK, SocketType::RAW, SocketFlags::CLOEXEC, None)?;
    let words = [LOOPBACK, UP, UP].map(u32::to_ne_bytes).concat();
    let mut message = 32_u32.to_ne_bytes().to_vec();
    message.extend([NEWLINK, REQUEST_AND_ACK].map(u16::to_ne_bytes).concat());
    // Sequence number and sender, then address family and device type, which are not needed.
    message.extend([1_u32, 0, 0].map(u32::to_ne_bytes).concat());
    message.extend(words);
    sendto(&socket, &message, SendFlags::empty(), &SocketAddrNetlink::new(0, 0))?;
    let mut answer = [0_u8; 1024];
    let (_, n) = recv(&socket, &mut answer, RecvFlags::empty())?;
    let answer = answer.get(..n).unwrap_or_default();
    let kind = answer.get(4..6).and_then(|bytes| bytes.try_into().ok()).map(u16::from_ne_bytes);
    let code = answer.get(16..20).and_then(|bytes| bytes.try_into().ok()).map(i32::from_ne_bytes);
    match (kind, code) {
        (Some(ERROR), Some(0)) => Ok(()),
        (Some(ERROR), Some(code)) => Err(io::Error::from_raw_os_error(code.saturating_neg())),
        _ => Err(io::ErrorKind::InvalidData.into()),
    }
}

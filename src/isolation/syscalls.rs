//! Denies system calls that could escape the namespaces.

use nix::libc;
use seccompiler::{Error, SeccompCmpArgLen::Dword, SeccompCmpOp, SeccompCondition, SeccompRule};

use super::seccomp::{self, Rules, X32, add};

/// Denies the system calls to this process and its future children. `group_signals` denies signals to the own process
/// group.
pub(crate) fn deny(unix_sockets: bool, group_signals: bool) -> Result<(), Error> {
    seccomp::deny(libc::EAFNOSUPPORT, socket_family_rules(unix_sockets)?)?;
    if unix_sockets {
        seccomp::deny(libc::EPERM, mount_rules())?;
    }
    seccomp::deny(libc::EPERM, process_group_rules(group_signals)?)?;
    seccomp::deny(libc::EPERM, other_rules()?)
}

/// Returns rules against mounts. In a namespace of its own, the command could mount a directory a second time and rename
/// a hidden socket, or one of its parents, into it. The second mount would show it.
pub(crate) fn mount_rules() -> Rules {
    /// The same on all architectures. The library does not have it yet.
    const SYS_OPEN_TREE_ATTR: libc::c_long = 467;
    let mut rules = Rules::new();
    for call in [
        libc::SYS_mount,
        libc::SYS_umount2,
        libc::SYS_pivot_root,
        libc::SYS_open_tree,
        SYS_OPEN_TREE_ATTR,
        libc::SYS_move_mount,
        libc::SYS_fsopen,
        libc::SYS_fsconfig,
        libc::SYS_fsmount,
        libc::SYS_fspick,
        libc::SYS_mount_setattr,
    ] {
        add(&mut rules, call, Vec::new());
    }
    rules
}

/// Returns rules against sockets of families that a network namespace does not confine: `AF_VSOCK`, for example,
/// reaches the host of a virtual machine. Unix sockets reach every listener in the file system. Pairs of them do not,
/// except that a datagram socket can be connected again.
fn socket_family_rules(unix_sockets: bool) -> Result<Rules, Error> {
    let mut confined = vec![libc::AF_INET, libc::AF_INET6, libc::AF_NETLINK];
    confined.extend(unix_sockets.then_some(libc::AF_UNIX));
    let none_of_them =
        confined.into_iter().map(|family| compare(0, SeccompCmpOp::Ne, family)).collect::<Result<_, _>>()?;
    let mut pairs = vec![SeccompRule::new(vec![compare(0, SeccompCmpOp::Ne, libc::AF_UNIX)?])?];
    if !unix_sockets {
        // The kernel treats a raw Unix socket as a datagram socket.
        for kind in [libc::SOCK_DGRAM, libc::SOCK_RAW] {
            pairs.push(SeccompRule::new(vec![compare(1, SeccompCmpOp::MaskedEq(0xf), kind)?])?);
        }
    }
    let mut rules = Rules::new();
    add(&mut rules, libc::SYS_socket, vec![SeccompRule::new(none_of_them)?]);
    add(&mut rules, libc::SYS_socketpair, pairs);
    Ok(rules)
}

/// Returns rules against system calls that act on the own process group, written as 0, which may be that of the caller.
/// The number of that group exists only in the caller's PID namespace.
fn process_group_rules(signals: bool) -> Result<Rules, Error> {
    const PRIO_PGRP: i32 = libc::PRIO_PGRP as i32;
    const IOPRIO_WHO_PGRP: i32 = 2;
    let own = |which| -> Result<_, Error> {
        let conditions = vec![compare(0, SeccompCmpOp::Eq, which)?, compare(1, SeccompCmpOp::Eq, 0)?];
        Ok(vec![SeccompRule::new(conditions)?])
    };
    let mut rules = Rules::new();
    add(&mut rules, libc::SYS_setpriority, own(PRIO_PGRP)?);
    add(&mut rules, libc::SYS_ioprio_set, own(IOPRIO_WHO_PGRP)?);
    if signals {
        add(&mut rules, libc::SYS_kill, vec![SeccompRule::new(vec![compare(0, SeccompCmpOp::Eq, 0)?])?]);
    }
    Ok(rules)
}

/// Returns rules against system calls that open sockets in other ways (io_uring), start a kernel helper outside that
/// may use DNS (keys), or inject input into the caller's terminal (`TIOCSTI`).
fn other_rules() -> Result<Rules, Error> {
    let mut rules = Rules::new();
    for call in [libc::SYS_io_uring_setup, libc::SYS_add_key, libc::SYS_request_key, libc::SYS_keyctl] {
        add(&mut rules, call, Vec::new());
    }
    let typing = [libc::TIOCSTI, libc::TIOCLINUX].into_iter().map(|request| {
        let request = u64::from(request as u32);
        SeccompRule::new(vec![SeccompCondition::new(1, Dword, SeccompCmpOp::Eq, request)?])
    });
    let typing = typing.collect::<Result<Vec<_>, _>>()?;
    add(&mut rules, libc::SYS_ioctl, typing.clone());
    if cfg!(target_arch = "x86_64") {
        // Of these calls, only ioctl has a different number in the x32 ABI.
        rules.insert(X32 | 514, typing);
    }
    Ok(rules)
}

fn compare(argument: u8, how: SeccompCmpOp, value: i32) -> Result<SeccompCondition, Error> {
    Ok(SeccompCondition::new(argument, Dword, how, u64::from(value.unsigned_abs()))?)
}

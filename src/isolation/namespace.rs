//! Creates namespaces without root privileges, with user mappings.

use std::fs;
use std::io;

use nix::sched::{CloneFlags, unshare};

use super::IsolationError;

/// Moves this process to new namespaces with the same user and group. Its children are also in a new PID namespace.
pub(crate) fn enter() -> Result<(), IsolationError> {
    unshare_users(
        CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWNS | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWPID,
    )
}

/// Moves this process to a user namespace within that of [`enter`], with the same user and group. It gets all
/// capabilities there and has none over the namespaces of [`enter`].
pub(crate) fn enter_inner_users() -> Result<(), IsolationError> {
    unshare_users(CloneFlags::empty())
}

/// Moves this process to a new user namespace and the others, with the same user and group.
pub(crate) fn unshare_users(others: CloneFlags) -> Result<(), IsolationError> {
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    unshare(CloneFlags::CLONE_NEWUSER | others).map_err(|error| forbidden("new namespaces", error.into()))?;
    // Each id maps to itself: files keep their owner, and no process becomes root.
    let maps = [("setgroups", "deny".to_owned()), ("uid_map", identity_map(uid)), ("gid_map", identity_map(gid))];
    for (file, text) in maps {
        fs::write(format!("/proc/self/{file}"), text).map_err(|error| forbidden(file, error))?;
    }
    Ok(())
}

fn identity_map(id: u32) -> String {
    format!("{id} {id} 1")
}

/// Returns the error of a denied operation, with its likely cause and a remedy.
pub(crate) fn forbidden(what: &str, error: io::Error) -> IsolationError {
    let is = |file: &str, value: &str| fs::read_to_string(file).is_ok_and(|text| text.trim() == value);
    let filtered = || fs::read_to_string("/proc/self/status").is_ok_and(|text| text.contains("Seccomp:\t2"));
    let why = if is("/proc/sys/user/max_user_namespaces", "0") {
        "user namespaces are disabled; the administrator can enable them with `sysctl user.max_user_namespaces=10000`"
    } else if is("/proc/sys/kernel/unprivileged_userns_clone", "0") {
        "users may not create namespaces; the administrator can allow it with \
         `sysctl kernel.unprivileged_userns_clone=1`"
    } else if is("/proc/sys/kernel/apparmor_restrict_unprivileged_userns", "1") {
        "AppArmor restricts user namespaces; the administrator can give exeat a profile with `userns,`, or set \
         `sysctl kernel.apparmor_restrict_unprivileged_userns=0`"
    } else if filtered() {
        "a seccomp filter is in force, as in a container; allow `unshare`, `mount`, `fsopen`, `fsconfig` \
         and `fsmount` in its profile, or isolate the container itself, with the proxy as its only network"
    } else {
        "the kernel or the environment of this process (a container, a chroot, a limit) does not permit it; isolate \
         that environment instead, with the proxy as its only network"
    };
    IsolationError(format!("{what}: {error}; {why}"))
}

//! Reduces the privileges of the processes between `exeat run` and the command.

use std::fs;
use std::io;
use std::os::fd::RawFd;

use landlock::{CompatLevel, Compatible, Ruleset, RulesetAttr, RulesetError, Scope};
use rustix::process::{Pid, Signal, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, configure_capability_in_ambient_set, remove_capability_from_bounding_set,
    set_capabilities, set_capabilities_secure_bits, set_no_new_privs,
};

use super::{IsolationError, failed, namespace};

/// Closes all descriptors except standard input, output and error and the given one, because an inherited socket could
/// bypass the proxy. Must be called before this process opens any descriptors.
pub(crate) fn close_inherited_but(kept: RawFd) -> io::Result<()> {
    let open: Vec<RawFd> = fs::read_dir("/proc/self/fd")?
        .map(|entry| Ok(entry?.file_name().to_str().and_then(|name| name.parse().ok()).unwrap_or_default()))
        .collect::<io::Result<_>>()?;
    for fd in open.into_iter().filter(|fd| *fd > 2 && *fd != kept) {
        // Errors are ignored: the descriptor used for listing is already closed.
        let _ = nix::unistd::close(fd);
    }
    Ok(())
}

/// Makes the kernel kill this process when its parent ends.
///
/// # Errors
/// If the parent has already ended.
pub(crate) fn die_with(parent: Option<Pid>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() == parent { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
}

/// The capabilities that the first process of the namespaces needs. It may not be root there, and then exec would drop
/// them. `SETFCAP` permits root to be mapped into a namespace (user_namespaces(7)).
const INHERITED_CAPABILITIES: [CapabilitySet; 3] =
    [CapabilitySet::SYS_ADMIN, CapabilitySet::SETPCAP, CapabilitySet::SETFCAP];

/// Makes the next exec keep the [`INHERITED_CAPABILITIES`].
pub(crate) fn keep_across_exec() -> io::Result<()> {
    let mut own = capabilities(None)?;
    own.inheritable = INHERITED_CAPABILITIES.into_iter().collect();
    set_capabilities(None, own)?;
    for capability in INHERITED_CAPABILITIES {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// Drops the privileges of the command's process. A normal user gets capabilities by creating a user namespace, as
/// sandboxes do, but root without capabilities could not. So root is moved to a user namespace of its own instead, where
/// its capabilities are those that a normal user can get.
pub(crate) fn drop_for_command() -> Result<(), IsolationError> {
    if rustix::process::geteuid().is_root() {
        namespace::enter_inner_users()?;
        set_no_new_privs(true).map_err(failed("dropping privileges"))
    } else {
        drop_all().map_err(failed("dropping privileges"))
    }
}

/// Confines the signals of this thread and its future children to these children (Linux 6.12). The command is in the process
/// group of its caller, as job control needs, and a PID namespace does not confine signals to the own group.
pub(crate) fn confine_signals() -> Result<(), RulesetError> {
    let ruleset = Ruleset::default().set_compatibility(CompatLevel::HardRequirement).scope(Scope::Signal)?;
    ruleset.create()?.restrict_self().map(drop)
}

/// Drops all privileges, and those that an exec could restore: by root's user id, file capabilities or setuid bits.
pub(crate) fn drop_all() -> io::Result<()> {
    // All bits are tried until the kernel reports an unknown one: it may have capabilities that rustix does not name.
    for capability in (0..u64::BITS).map(|bit| CapabilitySet::from_bits_retain(1 << bit)) {
        match capability_is_in_bounding_set(capability) {
            Ok(true) => remove_capability_from_bounding_set(capability)?,
            Ok(false) => {}
            Err(_) => break,
        }
    }
    clear_ambient_capability_set()?;
    set_capabilities_secure_bits(
        CapabilitiesSecureBits::NO_ROOT
            | CapabilitiesSecureBits::NO_ROOT_LOCKED
            | CapabilitiesSecureBits::NO_SETUID_FIXUP
            | CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE
            | CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED,
    )?;
    let none = CapabilitySet::empty();
    set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })?;
    set_no_new_privs(true)?;
    Ok(())
}

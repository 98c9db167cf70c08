//! Privileges of the helper processes, reduced step by step.

use std::fs;
use std::io;
use std::os::fd::RawFd;

use rustix::process::{Pid, Signal, set_parent_process_death_signal};
use rustix::thread::{
    CapabilitiesSecureBits, CapabilitySet, CapabilitySets, capabilities, capability_is_in_bounding_set,
    clear_ambient_capability_set, configure_capability_in_ambient_set, remove_capability_from_bounding_set,
    set_capabilities, set_capabilities_secure_bits, set_no_new_privs,
};

/// Closes all descriptors except standard input, output and error: a socket that the caller left open would be a way
/// out. This process has not opened any yet.
pub(super) fn close_inherited() -> io::Result<()> {
    let open: Vec<RawFd> = fs::read_dir("/proc/self/fd")?
        .map(|entry| Ok(entry?.file_name().to_str().and_then(|name| name.parse().ok()).unwrap_or_default()))
        .collect::<io::Result<_>>()?;
    for fd in open.into_iter().filter(|fd| *fd > 2) {
        // The descriptor that listed the others is already closed.
        let _ = nix::unistd::close(fd);
    }
    Ok(())
}

/// Ends this process with its parent, which must still be alive.
pub(super) fn die_with(parent: Option<Pid>) -> io::Result<()> {
    set_parent_process_death_signal(Some(Signal::KILL))?;
    if rustix::process::getppid() == parent { Ok(()) } else { Err(io::ErrorKind::NotConnected.into()) }
}

/// The capabilities that the first process of the namespaces needs for its own steps. It is not root there, so an exec
/// would drop them.
const NEEDED: [CapabilitySet; 2] = [CapabilitySet::SYS_ADMIN, CapabilitySet::SETPCAP];

/// Keeps the needed capabilities across the next exec.
pub(super) fn hand_on() -> io::Result<()> {
    let mut own = capabilities(None)?;
    own.inheritable = NEEDED.into_iter().collect();
    set_capabilities(None, own)?;
    for capability in NEEDED {
        configure_capability_in_ambient_set(capability, true)?;
    }
    Ok(())
}

/// Drops all privileges, including those that an exec would restore: for root, by a file's capabilities, or by its
/// setuid bit.
pub(super) fn give_up() -> io::Result<()> {
    // All that the kernel knows, which may be more than the library names.
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

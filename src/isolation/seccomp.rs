//! Seccomp filters for this process and its future children.

use std::collections::BTreeMap;

use nix::libc::c_long;
use seccompiler::{BpfProgram, Error, SeccompAction, SeccompFilter, SeccompRule, apply_filter_all_threads};

/// System calls and the conditions on which they are denied. A call without conditions is always denied.
pub(crate) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// The bit that marks the system calls of the x32 ABI. They have the same architecture as those of x86-64.
pub(crate) const X32: i64 = 0x4000_0000;

/// Makes the system calls fail with `errno`. Programs for other architectures, where the numbers differ, are killed.
pub(crate) fn deny(errno: i32, rules: Rules) -> Result<(), Error> {
    let denied = SeccompAction::Errno(errno.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, denied, std::env::consts::ARCH.try_into()?)?;
    apply_filter_all_threads(&BpfProgram::try_from(filter)?)
}

/// Adds a system call. On x86-64, the call of the x32 ABI is added, too.
pub(crate) fn add(rules: &mut Rules, call: c_long, conditions: Vec<SeccompRule>) {
    if cfg!(target_arch = "x86_64") {
        rules.insert(X32 | call, conditions.clone());
    }
    rules.insert(call, conditions);
}

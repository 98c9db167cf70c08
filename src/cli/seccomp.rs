//! Seccomp filters for this process and its children.

use std::collections::BTreeMap;

use nix::libc::c_long;
use seccompiler::{BpfProgram, Error, SeccompAction, SeccompFilter, SeccompRule, apply_filter_all_threads};

/// System calls and their conditions. Without a condition, the rule always applies.
pub(super) type Rules = BTreeMap<i64, Vec<SeccompRule>>;

/// Calls of the x32 ABI have the same architecture and this bit.
pub(super) const X32: i64 = 0x4000_0000;

/// Makes these calls fail with an error. Programs for another architecture, in which calls have other numbers, are
/// killed.
pub(super) fn refuse(errno: i32, rules: Rules) -> Result<(), Error> {
    let refused = SeccompAction::Errno(errno.unsigned_abs());
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, std::env::consts::ARCH.try_into()?)?;
    apply_filter_all_threads(&BpfProgram::try_from(filter)?)
}

/// Adds a call under both of its numbers, if it has two.
pub(super) fn put(rules: &mut Rules, call: c_long, conditions: Vec<SeccompRule>) {
    if cfg!(target_arch = "x86_64") {
        rules.insert(X32 | call, conditions.clone());
    }
    rules.insert(call, conditions);
}

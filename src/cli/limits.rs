//! The limits that the daemon sets for its own process.

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Disables core dumps, because a core file would contain secrets.
pub(super) fn disable_core_dumps() {
    if let Err(error) = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }) {
        tracing::warn!(%error, "core dumps cannot be disabled");
    }
}

/// Raises the soft limit of open files to the hard limit. The daemon divides the descriptors among its parts.
pub(super) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    let raise = |current| setrlimit(Resource::Nofile, Rlimit { current, maximum: limit.maximum });
    // macOS refuses an unlimited number.
    if let Err(error) = raise(limit.maximum).or_else(|_| raise(Some(10_240))) {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
}

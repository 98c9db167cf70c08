//! The confinement of the daemon on systems other than Linux: no core files, and nothing else.

use std::path::Path;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

use crate::policy::settings::Settings;

/// Disables core dumps, because a core file would contain secrets.
pub(super) fn disable_core_dumps() {
    if let Err(error) = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }) {
        tracing::warn!(%error, "core dumps cannot be disabled");
    }
}

/// Raises the soft limit of open files to the hard limit. The daemon divides the descriptors among its parts.
pub(super) fn raise_descriptor_limit() {
    let limit = getrlimit(Resource::Nofile);
    if let Err(error) = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, maximum: limit.maximum }) {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
}

/// Says that nothing confines the process.
pub(super) fn confine(_: &Settings, _: Option<&Path>) {
    tracing::warn!("the daemon is not confined: seccomp and landlock need Linux");
}

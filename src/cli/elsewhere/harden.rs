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
    // macOS refuses an unlimited one.
    let raised = [limit.maximum, Some(10_240)]
        .into_iter()
        .map(|current| setrlimit(Resource::Nofile, Rlimit { current, maximum: limit.maximum }));
    if let Some(Err(error)) = raised.reduce(Result::or) {
        tracing::warn!(%error, "the limit of open files cannot be raised");
    }
}

/// Says that nothing confines the process.
pub(super) fn confine(_: &Settings, _: Option<&Path>) {
    tracing::warn!("the daemon is not confined: seccomp and landlock need Linux");
}

//! The confinement of the daemon on systems other than Linux: there is none.

use std::path::Path;

use crate::policy::settings::Settings;

/// Says that nothing confines the process.
pub(super) fn confine(_: &Settings, _: Option<&Path>) {
    tracing::warn!("the daemon is not confined: seccomp and landlock need Linux");
}

//! Names of tasks, credentials and executions.

use std::fmt;
use std::sync::Arc;

macro_rules! names {
    ($($(#[$doc:meta])* $kind:ident),+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
            pub struct $kind(Arc<str>);

            impl $kind {
                /// Returns the name as text.
                #[must_use]
                pub fn as_str(&self) -> &str {
                    &self.0
                }
            }

            impl fmt::Display for $kind {
                fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                    f.write_str(&self.0)
                }
            }
        )+
    };
}

names! {
    /// A task's name in the configuration.
    TaskName,
    /// A credential's name in the configuration.
    CredentialName,
    /// The id of one counted run of a task. With a static token, it is the task's name.
    ExecutionId
}

impl TaskName {
    /// Wraps a name from the configuration.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }
}

impl CredentialName {
    /// Wraps a name from the configuration.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }
}

impl ExecutionId {
    /// Wraps an id from the ledger, or an unverified one from a client.
    #[must_use]
    pub fn new(id: &str) -> Self {
        Self(id.into())
    }

    /// Returns the id of the single execution of a task's static token.
    #[must_use]
    pub fn of_static(task: &TaskName) -> Self {
        Self(task.0.clone())
    }
}

/// Returns true for a valid name: 1 to 64 letters, digits, `-` and `_`.
#[must_use]
pub fn is_plain(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
}

//! Names given by the operator: tasks, credentials, executions.

use std::fmt;
use std::sync::Arc;

macro_rules! names {
    ($($(#[$doc:meta])* $kind:ident),+) => {
        $(
            $(#[$doc])*
            #[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
            pub struct $kind(Arc<str>);

            impl $kind {
                /// The name as text.
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
    /// A task's name, as the configuration writes it.
    TaskName,
    /// A credential's name, as the configuration writes it.
    CredentialName,
    /// One counted run of a task. With a static token it bears the task's name.
    ExecutionId
}

impl TaskName {
    /// Wraps a name that the configuration gave.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }
}

impl CredentialName {
    /// Wraps a name that the configuration gave.
    #[must_use]
    pub fn new(name: &str) -> Self {
        Self(name.into())
    }
}

impl ExecutionId {
    /// Wraps an id that the ledger gave, or that somebody claims to have.
    #[must_use]
    pub fn new(id: &str) -> Self {
        Self(id.into())
    }

    /// The one execution that a task's static token stands for.
    #[must_use]
    pub fn of_static(task: &TaskName) -> Self {
        Self(task.0.clone())
    }
}

/// True for what the operator may call things: letters, digits, `-` and `_`, 64 at most.
#[must_use]
pub fn is_plain(name: &str) -> bool {
    (1..=64).contains(&name.len()) && name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_'))
}

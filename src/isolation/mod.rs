//! Isolates processes that run other programs: namespaces without root, privileges, and filters of system calls.

pub(crate) mod namespace;
pub(crate) mod network;
pub(crate) mod privilege;
pub(crate) mod seccomp;
pub(crate) mod syscalls;

use std::fmt::Display;

/// The files with the machine's roots in PEM: of Debian and Alpine, Fedora, SUSE, OpenSSL and BSD.
pub(crate) const ROOTS: [&str; 6] = [
    "/etc/ssl/certs/ca-certificates.crt",
    "/etc/pki/tls/certs/ca-bundle.crt",
    "/etc/ssl/ca-bundle.pem",
    "/var/lib/ca-certificates/ca-bundle.pem",
    "/etc/ssl/cert.pem",
    "/usr/lib/ssl/cert.pem",
];

/// The reason why a command was not run.
#[derive(Debug)]
pub(crate) struct IsolationError(pub(crate) String);

/// Returns a function that adds to an error what was done.
pub(crate) fn failed<E: Display>(doing: impl Display) -> impl FnOnce(E) -> IsolationError {
    move |error| IsolationError(format!("{doing}: {error}"))
}

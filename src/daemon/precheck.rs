//! Finds what a start would refuse, without creating or changing anything: for `exeat check`.

use std::io;
use std::net::TcpListener;
use std::path::{Path, PathBuf};

use rustix::fs::{Access, access};
use rustix::process::{Resource, getrlimit};
use socket2::{Domain, SockAddr, Socket, Type};

use super::admin_token_from;
use crate::files;
use crate::flow::listener::ConnectionSetup;
use crate::model::descriptors::Descriptors;
use crate::policy::compile::Problem;
use crate::policy::settings::{ListenAt, Roots, Settings};
use crate::stages::pin::{OwnEndpoints, Resolver};
use crate::tls::authority::Authority;
use crate::tls::upstream::UpstreamTls;

/// The key of the state directory, as the path of a problem.
pub const STATE_DIR: &str = "state_dir";

/// The problems that stop a start, and the warnings.
#[derive(Default)]
pub struct Found {
    /// The problems that stop a start.
    pub problems: Vec<Problem>,
    /// What may stop a start, or will soon.
    pub warnings: Vec<Problem>,
}

impl Found {
    fn problem(&mut self, path: &str, problem: impl ToString, suggestion: &str) {
        self.problems.push(self::problem(path, problem, suggestion));
    }

    fn warning(&mut self, path: &str, problem: impl ToString, suggestion: &str) {
        self.warnings.push(self::problem(path, problem, suggestion));
    }
}

fn problem(path: &str, problem: impl ToString, suggestion: &str) -> Problem {
    Problem { path: path.to_owned(), problem: problem.to_string(), suggestion: suggestion.to_owned() }
}

/// Checks the files, directories and addresses that a start needs, as this process's user. The vault is not checked.
#[must_use]
pub fn find(settings: &Settings) -> Found {
    let mut found = Found::default();
    check_directories(settings, &mut found);
    check_authority(settings, &mut found);
    let system = settings.upstream.roots == Roots::System;
    match UpstreamTls::new(system, &settings.upstream.extra_roots, &settings.upstream.crls) {
        Ok(tls) => {
            let descriptors = Descriptors::divided(getrlimit(Resource::Nofile).current, settings.proxy.max_connections);
            if let Err(error) = Resolver::new(&settings.dns, &tls, OwnEndpoints::default(), &descriptors) {
                found.problem("dns", format_args!("the resolver cannot be set up: {error}"), "");
            }
        }
        Err(error) => found.problem("upstream", error, "files with PEM certificates or revocation lists"),
    }
    if let Err(error) = ConnectionSetup::new(&settings.proxy) {
        found.problem("proxy.tls", error, "");
    }
    // Without a state directory, the token in it would be a problem of its own.
    let has_state = found.problems.iter().all(|problem| problem.path != STATE_DIR);
    if settings.admin.listen.is_some() && has_state {
        match admin_token_from(settings, files::read_private) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                found.problem("admin.token", error, "");
            }
            _ => {}
        }
    }
    for at in &settings.proxy.listen {
        check_address("proxy.listen", at, &mut found);
    }
    if let Some(at) = &settings.admin.listen {
        check_address("admin.listen", at, &mut found);
    }
    found
}

/// Checks that the directories of the files that are written exist and are writable, or can be created.
fn check_directories(settings: &Settings, found: &mut Found) {
    let suggestion = "a directory that the daemon's user may write";
    let mut check = |path: &str, directory: &Path| {
        if let Err(error) = writable(directory) {
            found.problem(path, format_args!("{}: {error}", directory.display()), suggestion);
        }
    };
    check(STATE_DIR, &settings.state_dir);
    let files =
        [("audit.path", settings.audit.path.as_deref()), ("ledger.path", settings.ledger.file().map(PathBuf::as_path))];
    for (path, file) in files {
        let Some(directory) = file.map(files::folder) else { continue };
        if directory != settings.state_dir {
            check(path, directory);
        }
    }
}

/// Returns an error if the directory, or the nearest parent that exists, is not a writable directory.
fn writable(directory: &Path) -> io::Result<()> {
    let existing = directory.ancestors().map(|path| if path.as_os_str().is_empty() { Path::new(".") } else { path });
    for path in existing {
        match access(path, Access::EXISTS) {
            Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
            Ok(()) if !path.is_dir() => return Err(io::ErrorKind::NotADirectory.into()),
            Ok(()) => return Ok(access(path, Access::WRITE_OK | Access::EXEC_OK)?),
        }
    }
    Ok(())
}

fn check_authority(settings: &Settings, found: &mut Found) {
    let Some(key) = &settings.interception.ca_key else { return };
    match Authority::existing(&settings.interception.ca_cert, key) {
        Ok(authority) => {
            let days = authority.and_then(|authority| authority.expires_within_days());
            if let Some(days) = days {
                let path = settings.interception.ca_cert.display();
                found.warning("interception.ca_cert", format_args!("{path} expires in {days} days"), "");
            }
        }
        Err(error) => found.problem("interception", error, ""),
    }
}

/// Warns of an address that cannot be bound now. It may be that of the running daemon, or be passed by the service manager.
fn check_address(path: &str, at: &ListenAt, found: &mut Found) {
    let error = match at {
        ListenAt::Tcp(address) => TcpListener::bind(address).err(),
        // A daemon replaces a socket that nobody serves.
        ListenAt::Unix(socket) => is_served(socket).then(|| io::ErrorKind::AddrInUse.into()),
    };
    if let Some(error) = error {
        found.warning(path, format_args!("{at}: {error}; if that is a running exeat, ignore this"), "");
    }
}

/// Returns true if a process listens on the socket, also if it does not accept connections.
fn is_served(path: &Path) -> bool {
    let connected = SockAddr::unix(path).and_then(|address| {
        let socket = Socket::new(Domain::UNIX, Type::STREAM.nonblocking(), None)?;
        socket.connect(&address)
    });
    match connected {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::WouldBlock,
    }
}

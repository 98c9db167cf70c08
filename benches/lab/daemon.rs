//! The configuration of exeat with everything on: interception, rules with methods, credentials in requests and
//! responses, limits, the ledger and the audit log in files.

use std::fmt::Write;
use std::fs;
use std::path::Path;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::process::{create_state, mixed, private};

/// The credential `C0`, which the origin requires and no client has.
pub(crate) const REAL_KEY: &str = "Bearer kJ4rX9vQ2mZ7tB1nW6yL3pD8sF5gH0aC";
/// `Proxy-Authorization` of the task `bench`, which contenders without authentication ignore.
pub(crate) const PROXY_AUTHORIZATION: &str = "Basic YmVuY2g6YmVuY2gtdG9rZW4tb2YtMjQtYnl0ZXMtb3ItbW9yZQ==";
/// The token in it.
const TOKEN: &str = "bench-token-of-24-bytes-or-more";

/// The size of a policy. The task `bench` is in every policy; it has the first credential, or all that no other task has.
#[derive(Clone, Copy)]
pub(crate) struct Scale {
    pub(crate) credentials: usize,
    /// The number of integrations beside the two that are used.
    pub(crate) rules: usize,
    /// The number of tasks beside `bench`. The credentials are divided among them.
    pub(crate) tasks: usize,
}

/// The ports that the configuration names.
#[derive(Clone, Copy)]
pub(crate) struct Ports {
    pub(crate) proxy: u16,
    pub(crate) origin: u16,
    pub(crate) dns: u16,
}

/// Returns `Proxy-Authorization` of a task beside `bench`.
pub(crate) fn task_authorization(n: usize) -> String {
    basic(&format!("t{n}"), &task_token(n))
}

/// Returns credentials of the `Basic` scheme (RFC 7617).
pub(crate) fn basic(user: &str, password: &str) -> String {
    format!("Basic {}", STANDARD.encode(format!("{user}:{password}")))
}

fn task_token(n: usize) -> String {
    format!("{:016x}{:016x}", mixed(n as u64 + 1_000_003), mixed(n as u64 + 2_000_003))
}

/// Writes `exeat.toml`, the files that it names, and the state directory into `dir`. The CAs are in `shared`.
pub(crate) fn configure(shared: &Path, dir: &Path, ports: Ports, scale: Scale) {
    fs::write(dir.join("exeat.toml"), text(shared, dir, ports, scale)).unwrap();
    create_state(dir, shared);
}

fn text(shared: &Path, dir: &Path, Ports { proxy, origin, dns }: Ports, scale: Scale) -> String {
    let mut text = format!(
        "state_dir = \"{state}\"\n\
         [proxy]\nlisten = [\"127.0.0.1:{proxy}\"]\nmax_connections = 9000\nmax_connections_per_caller = 8000\n\
         [admin]\nlisten = \"unix:admin.sock\"\n\
         [interception]\nrefuse_inside = false\n\
         [upstream]\nextra_roots = [\"{roots}\"]\n\
         [dns]\nservers = [\"127.0.0.1:{dns}\"]\nnew_names_per_minute = 1000000\n\
         [audit]\nrotate_bytes = \"10GB\"\n\
         [network]\nallow_cidrs = [\"127.0.0.0/8\"]\n\
         [integrations.bench]\nallowed_domains = [\"*.bench.test\"]\nports = [{origin}]\n\
         methods = [\"GET\", \"POST\"]\n\
         [integrations.opaque]\nallowed_domains = [\"*.opaque.test\"]\nports = [{origin}]\nmode = \"opaque\"\n\
         [plans.bench]\ncalls_per_execution = 1000000000\nmax_response_bytes = \"1GB\"\nrequest_timeout = \"300s\"\n\
         [plans.bench.raw]\ncalls_per_execution = 1000000000\nrequests_per_second = 1000000\nconcurrent = 8000\n\
         max_response_bytes = \"10GB\"\n",
        state = dir.join("state").display(),
        roots = shared.join("origin-ca.pem").display(),
    );
    let mut integrations = String::from("\"bench\", \"opaque\"");
    for n in 0..scale.rules {
        write!(text, "[integrations.r{n}]\nallowed_domains = [\"r{n}.rules.test\"]\nmethods = [\"GET\"]\n").unwrap();
        write!(integrations, ", \"r{n}\"").unwrap();
    }
    for n in 0..scale.credentials {
        let value = match n {
            0 => REAL_KEY.trim_start_matches("Bearer ").to_owned(),
            _ => format!("sk-{:016x}{:016x}", mixed(n as u64), mixed(n as u64 + 7_777)),
        };
        private(&dir.join(format!("value-{n}")), &value);
        write!(
            text,
            "[credentials.C{n}]\nauth_type = \"bearer\"\nvalue = \"file:value-{n}\"\n\
             domains = [\"api{n}.bench.test:{origin}\"]\n"
        )
        .unwrap();
    }
    let mut task = |name: &str, token: &str, integrations: &str, credentials: &[usize]| {
        private(&dir.join(format!("token-{name}")), token);
        let names: Vec<String> = credentials.iter().map(|n| format!("\"C{n}\"")).collect();
        write!(
            text,
            "[tasks.{name}]\ntoken = \"file:token-{name}\"\nintegrations = [{integrations}]\nplan = \"bench\"\n\
             raw = true\ntools = [\"http_get\"]\ncredentials = [{}]\n",
            names.join(", ")
        )
        .unwrap();
    };
    let all: Vec<usize> = (0..scale.credentials).collect();
    if scale.tasks == 0 {
        task("bench", TOKEN, &integrations, &all);
    } else {
        task("bench", TOKEN, &integrations, &all[..1]);
        for n in 0..scale.tasks {
            let own: Vec<usize> = (n..scale.credentials).step_by(scale.tasks).collect();
            task(&format!("t{n}"), &task_token(n), "\"bench\", \"opaque\"", &own);
        }
    }
    text
}

//! Third-party programs behind `exeat run` and `exeat env`, with origins on the loopback.
//!
//! The tests are ignored by default, because the programs may not be installed; continuous integration installs and
//! runs them. `docs/clients.md` lists what each needs and what it shows, and [`table`] compares that page with the test
//! results.

mod agents;
mod browser;
mod capture;
mod command_line;
mod env;
mod first_token;
mod grpc;
mod http2_proxy;
mod languages;
mod learned;
mod model_apis;
mod no_proxy;
mod packages;
mod sandboxes;
mod table;
mod tproxy;
mod upstream_proxies;
mod ways_in;

use std::ffi::OsString;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use crate::lab::{LabBuilder, Origin};
use crate::operation::cli::{exeat, output, text};

use table::{Row, row};

/// A client that needs nothing beyond what `exeat run` and `exeat env` set.
const NOTHING: &str = "nothing";

/// A configuration with one TLS origin, `api.test`, and one without TLS, `plain.test`.
struct Place {
    builder: LabBuilder,
    origin: Origin,
    plain: Origin,
    config: PathBuf,
}

async fn place() -> Place {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let plain = Origin::http().await;
    builder.dns.set("plain.test", &["127.0.0.1"]);
    let config = builder.dir.path().join("run.toml");
    let body = builder.config(&format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n\
         [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\nmethods = [\"GET\", \"POST\", \"PUT\"]\n\
         [integrations.plain]\nallowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n\
         [tasks.t]\nintegrations = [\"api\", \"plain\"]\n",
        origin.port(),
        plain.port()
    ));
    fs::write(&config, body).unwrap();
    Place { builder, origin, plain, config }
}

impl Place {
    fn dir(&self) -> &Path {
        self.builder.dir.path()
    }

    fn url(&self, path: &str) -> String {
        format!("https://api.test:{}{path}", self.origin.port())
    }

    fn plain_url(&self, path: &str) -> String {
        format!("http://plain.test:{}{path}", self.plain.port())
    }

    /// Runs a command behind a proxy of its own that asks for a password, as a daemon does.
    async fn run(&self, command: &[&str]) -> Output {
        self.run_with(&["--password"], command).await
    }

    async fn run_with(&self, flags: &[&str], command: &[&str]) -> Output {
        let config = self.config.to_str().unwrap();
        let args = [&["run", "-c", config, "--task", "t"], flags, &["--"], command].concat();
        let mut command = exeat(self.dir(), &args);
        with_clients(&mut command);
        output(command).await
    }

    async fn sh(&self, script: &str) -> Output {
        self.run(&["sh", "-c", script]).await
    }

    /// Asserts that the command and nothing else passed. Returns its output, with the count of `exeat run` checked.
    #[track_caller]
    fn passed(&self, output: &Output) -> String {
        let out = assert_ok(output);
        let summary = text(&output.stderr);
        let (passed, refused) = summary.lines().last().and_then(|line| line.split_once(" allowed, ")).expect(&summary);
        assert!(passed.strip_prefix("exeat: ").unwrap().parse::<u32>().unwrap() > 0, "{summary}");
        assert_eq!(refused, "0 refused or failed", "{summary}");
        out
    }

    /// Asserts that the command gets nothing from a host that is not allowed, and that it shows this to the user.
    #[track_caller]
    fn refused(&self, output: &Output, shown: &str) {
        let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
        let (own, summary) = said.split_once("exeat: 0 allowed, ").unwrap_or_else(|| panic!("{said}"));
        assert!(own.contains(shown), "{shown:?} is not what it says: {own}");
        assert!(summary.contains("× evil.test:443") && summary.contains("host_not_allowed"), "{summary}");
        assert!(summary.contains("--allow evil.test"), "{summary}");
        assert_eq!(self.builder.dns.queries("evil.test"), 0);
    }
}

/// The line of the refusal's body that tells why, in clients that show the body.
const PROBLEM: &str = "\"code\": \"host_not_allowed\"";

/// Asserts that the command does not trust the CA, and that the summary suggests this cause.
#[track_caller]
fn assert_broke_off(output: &Output) {
    let words = text(&output.stderr);
    assert!(!output.status.success() && words.contains("exeat: 0 allowed, "), "{words}");
    assert!(words.contains("TLS aborted by the command: does it trust $SSL_CERT_FILE?"), "{words}");
}

#[track_caller]
fn assert_ok(output: &Output) -> String {
    assert!(output.status.success(), "{}\n{}", text(&output.stdout), text(&output.stderr));
    text(&output.stdout)
}

/// The folder with the clients at the tested versions: `bin` as in a virtual environment, and `node_modules`. If it is
/// not set, the tests use the installed clients.
pub(crate) fn clients() -> Option<PathBuf> {
    std::env::var_os("EXEAT_TEST_CLIENTS").map(PathBuf::from)
}

pub(crate) fn with_clients(command: &mut Command) {
    let mut path: Vec<PathBuf> =
        clients().iter().flat_map(|clients| [clients.join("bin"), clients.join("node_modules/.bin")]).collect();
    path.extend(std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()));
    command.env("PATH", std::env::join_paths(path).unwrap());
    let modules = clients().map_or_else(OsString::new, |clients| clients.join("node_modules").into());
    command.env("NODE_PATH", modules);
}

/// Runs a program that prepares what a test needs, without a proxy.
#[track_caller]
fn prepare(dir: &Path, program: &str, args: &[&str]) {
    let mut command = Command::new(program);
    command.args(args).current_dir(dir).env("HOME", dir);
    let output = command.output().unwrap_or_else(|error| panic!("{program}: {error}"));
    assert!(output.status.success(), "{program} {args:?}: {}", text(&output.stderr));
}

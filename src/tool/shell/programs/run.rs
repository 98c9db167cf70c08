//! Starts the processes of a program, serves its network, and collects its output.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Stdio;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, Interest};
use tokio::net::{TcpListener, UnixStream};
use tokio::process::{Child, Command as Process};
use tokio::time::timeout;

use super::inside::{DONE, FAILED, PROXY, Setup, socket_pair};
use super::relay::Relay;
use super::{Command, git, root};
use crate::socket_passing;
use crate::tool::proxy::Proxy;
use crate::tool::shell::PROGRAM_COMMAND;
use crate::tool::shell::options::MAX_OUTPUT;
use crate::tool::shell::path::WORKSPACE;
use crate::tool::shell::sandbox::{Confinement, Sandbox};
use crate::tool::verbs::VerbResult;

/// The time for the start of a program.
const START: Duration = Duration::from_secs(30);
/// The time that its processes may take to end after they were killed.
const END: Duration = Duration::from_secs(5);
/// The end of an output that is not whole.
const CUT: &str = "\n[the rest is cut]";
/// Maximum size of an output that is kept, in bytes.
const MAX_KEPT: usize = MAX_OUTPUT - CUT.len();
/// Maximum size of the output that a program's error has, in bytes.
const MAX_ERROR: usize = 64 * 1024;
/// Maximum size of an error of the processes around it, in bytes.
const MAX_REASON: usize = 4096;
/// Maximum size of all arguments of a program, in bytes: with all else they are in one message of 64 KiB.
const MAX_ARGUMENTS: usize = 24 * 1024;

/// Maximum size of the message, in bytes.
const MAX_MESSAGE: usize = 63 * 1024;

/// Runs a program, within the time left. `limit` is the name of the time-out.
pub(in super::super) async fn run(
    command: Command,
    (sandbox, confinement): (&Sandbox, Option<&Confinement>),
    proxy: &Proxy,
    within: Duration,
    limit: &str,
) -> VerbResult {
    let not_started = |why: &str| VerbResult::denied(&format!("the program is not started: {why}"));
    if command.args.iter().map(String::len).fold(0, usize::saturating_add) > MAX_ARGUMENTS {
        return VerbResult::failed(&format!("the arguments have more than {} KiB", MAX_ARGUMENTS / 1024));
    }
    let starting = async {
        let ca = if command.network { proxy.ca_certificate().await.map_err(|why| why.to_string())? } else { None };
        start(command, sandbox, confinement, ca).await
    };
    let started = tokio::time::Instant::now();
    let running = match timeout(START.min(within), starting).await {
        Ok(Ok(running)) => running,
        Ok(Err(why)) => return not_started(&why),
        Err(_) => return not_started("the proxy, or the start of its processes, takes too long"),
    };
    let relay = Relay::new(proxy);
    let Running { mut process, listener, mut stdout, mut stderr } = running;
    let (mut out, mut err) = (Output::default(), Output::default());
    let ended = {
        let collecting = async {
            let collected = async { tokio::join!(out.collect(&mut stdout), err.collect(&mut stderr)) };
            tokio::join!(collected, process.wait()).1
        };
        let serving = async {
            match &listener {
                Some(listener) => match relay.serve(listener).await {},
                None => std::future::pending().await,
            }
        };
        let both = async {
            tokio::select! {
                ended = collecting => ended,
                never = serving => never,
            }
        };
        timeout(within.saturating_sub(started.elapsed()), both).await
    };
    match ended {
        Ok(Ok(status)) => result(status.code(), &out, &err, &relay.refusals()),
        Ok(Err(error)) => VerbResult::failed(&format!("the program's end is not known: {error}")),
        Err(_) => {
            // Its processes have ended when nothing holds its output any more.
            let _ = process.start_kill();
            let end = async {
                let _ = process.wait().await;
                tokio::join!(out.collect(&mut stdout), err.collect(&mut stderr))
            };
            let is_over = timeout(END, end).await.is_ok();
            let ended = if is_over { "was ended with all that it started" } else { "may still be running" };
            let said = shown(&out, &err, MAX_ERROR);
            let said = if said.is_empty() { said } else { format!("; it said: {said}") };
            VerbResult::failed(&format!("exceeded its {limit}, and {ended}{said}"))
        }
    }
}

/// A program that runs.
struct Running {
    process: Child,
    listener: Option<TcpListener>,
    stdout: tokio::process::ChildStdout,
    stderr: tokio::process::ChildStderr,
}

/// Starts the processes around a program, and the program.
async fn start(
    command: Command,
    sandbox: &Sandbox,
    confinement: Option<&Confinement>,
    ca: Option<String>,
) -> Result<Running, String> {
    let text = |error: io::Error| error.to_string();
    let confinement = confinement.ok_or("this sandbox has no directory")?;
    let directory = sandbox.directory().map_err(text)?.ok_or("this sandbox has no directory")?;
    let programs = &sandbox.programs;
    let network = command.network;
    let setup = Setup {
        environment: environment(sandbox, network),
        program: command.program,
        args: command.args,
        read_only: programs.read_only.clone(),
        places: command.places,
        ca,
        network,
        is_shell: command.is_shell,
        allow_unconfined: confinement.allow_unconfined,
    };
    let (control, other) = socket_pair().map_err(text)?;
    control.set_nonblocking(true).map_err(text)?;
    let mut process = Process::new(&confinement.program);
    process.arg(PROGRAM_COMMAND).env_clear().current_dir(Path::new("/")).kill_on_drop(true).process_group(0);
    process.stdin(Stdio::from(other)).stdout(Stdio::piped()).stderr(Stdio::piped());
    let mut child = process.spawn().map_err(text)?;
    drop(process);
    let message = serde_json::to_vec(&setup).map_err(|error| error.to_string())?;
    if message.len() > MAX_MESSAGE {
        return Err("the arguments and the environment are too long".to_owned());
    }
    socket_passing::send(&control, &message, &[directory.as_fd()]).map_err(text)?;
    let control = UnixStream::from_std(control).map_err(text)?;
    let listener = match received(&control).await?.pop() {
        Some(socket) => {
            let listener = std::net::TcpListener::from(socket);
            listener.set_nonblocking(true).map_err(text)?;
            Some(TcpListener::from_std(listener).map_err(text)?)
        }
        None => None,
    };
    received(&control).await?;
    let (stdout, stderr) = child.stdout.take().zip(child.stderr.take()).ok_or("it has no output")?;
    Ok(Running { process: child, listener, stdout, stderr })
}

/// Waits for the next message from inside.
async fn received(control: &UnixStream) -> Result<Vec<OwnedFd>, String> {
    let message = control.async_io(Interest::READABLE, || socket_passing::receive(control)).await;
    let (message, sockets) = message.map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => "the process around it has ended".to_owned(),
        _ => error.to_string(),
    })?;
    match message.split_first() {
        Some((&DONE, _)) => Ok(sockets),
        Some((&FAILED, why)) => Err(String::from_utf8_lossy(why.get(..MAX_REASON).unwrap_or(why)).into_owned()),
        _ => Err("the process around it is not as expected".to_owned()),
    }
}

/// Returns the variables of a program. Those of this process, with the token, are not among them.
fn environment(sandbox: &Sandbox, network: bool) -> Vec<(String, String)> {
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    let mut all: Vec<(String, String)> = sandbox.variables().map(owned).collect();
    all.extend(
        [
            ("HOME", root::HOME),
            ("LANG", "C.UTF-8"),
            ("PATH", "/usr/local/bin:/usr/bin:/bin"),
            ("PWD", WORKSPACE),
            ("TERM", "dumb"),
            ("TMPDIR", "/tmp"),
            ("TZ", "UTC"),
            ("USER", "agent"),
            ("LOGNAME", "agent"),
        ]
        .map(owned),
    );
    all.extend(git::environment(sandbox.programs.git.as_ref()));
    if network {
        let proxy = format!("http://{PROXY}");
        all.extend(["HTTPS_PROXY", "https_proxy"].map(|name| (name.to_owned(), proxy.clone())));
        let roots = [
            "CARGO_HTTP_CAINFO",
            "CURL_CA_BUNDLE",
            "GIT_SSL_CAINFO",
            "NODE_EXTRA_CA_CERTS",
            "PIP_CERT",
            "REQUESTS_CA_BUNDLE",
            "SSL_CERT_FILE",
        ];
        all.extend(roots.map(|name| owned((name, root::CERTIFICATES))));
    }
    all
}

/// The output of a program, as far as it is kept.
#[derive(Default)]
struct Output {
    bytes: Vec<u8>,
    is_cut: bool,
}

impl Output {
    /// Reads to the end. What does not fit is read and dropped, so that the program is not held up.
    async fn collect(&mut self, from: &mut (impl AsyncRead + Unpin)) {
        let mut buffer = vec![0; 16 * 1024];
        while let Ok(count @ 1..) = from.read(&mut buffer).await {
            let room = MAX_KEPT.saturating_sub(self.bytes.len());
            let kept = buffer.get(..count.min(room)).unwrap_or_default();
            self.bytes.extend_from_slice(kept);
            self.is_cut |= count > room;
        }
    }

    fn text(&self) -> String {
        let mut text = String::from_utf8_lossy(&self.bytes).trim_end_matches('\n').to_owned();
        if self.is_cut {
            text.push_str(CUT);
        }
        text
    }
}

/// Returns the result of a program that has ended: what it wrote, or else what it said.
fn result(code: Option<i32>, out: &Output, err: &Output, refusals: &[String]) -> VerbResult {
    let text = out.text();
    if code == Some(0) {
        return VerbResult::completed(bounded(if text.is_empty() { err.text() } else { text }, MAX_OUTPUT));
    }
    let code = match code {
        None => "none: it was killed, perhaps because memory was short".to_owned(),
        Some(code @ 129..=192) => format!("{code} (signal {})", code.saturating_sub(128)),
        Some(code) => code.to_string(),
    };
    let why = match refusals {
        [] => String::new(),
        some => format!("; the proxy refused it: {}", some.join("; ")),
    };
    let said = shown(out, err, MAX_ERROR);
    let said = if said.is_empty() { said } else { format!(": {said}") };
    VerbResult::failed(&format!("exit status {code}{why}{said}"))
}

fn shown(out: &Output, err: &Output, most: usize) -> String {
    let (out, err) = (out.text(), err.text());
    let both = [err, out].into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join("\n");
    bounded(both, most)
}

fn bounded(mut text: String, most: usize) -> String {
    if text.len() > most {
        text.truncate(text.floor_char_boundary(most));
        text.push('…');
    }
    text
}

//! The daemon under load: its configuration, its process, its messages and its admin listener.

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use parking_lot::Mutex;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tokio::sync::watch;
use tokio::time::timeout;

use crate::book::Book;
use crate::lab::admin;
use crate::measure;
use crate::origin::Ports;
use crate::process::{create_state, private, serve_dns};
use crate::secrets::{CREDENTIALS, Secrets};

/// The calls that an execution of the task `limited` may make.
pub(crate) const LIMIT: u64 = 5;
/// The finds after which an execution is stopped.
pub(crate) const MAX_FINDS: u64 = 3;
/// The tasks: with the steady load, of leak attempts, with a limit of calls, with short timeouts, and of clients that
/// vanish.
const TASKS: [&str; 5] = ["work", "leaker", "limited", "impatient", "vague"];
const START_TIMEOUT: Duration = Duration::from_secs(60);
const STOP_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of lines of stderr that are kept for reports.
const KEPT_LINES: usize = 200;

/// The running daemon.
pub(crate) struct Gateway {
    pub(crate) port: u16,
    program: PathBuf,
    dir: PathBuf,
    ports: Ports,
    connections: usize,
    dns: u16,
    child: Mutex<Child>,
    pid: u32,
    messages: watch::Receiver<Messages>,
}

/// What the daemon wrote to stderr.
#[derive(Clone, Default)]
pub(crate) struct Messages {
    ready: Option<u16>,
    /// The number of policies that came into force after the first.
    pub(crate) reloads: u64,
    /// The number of tasks that ran at each reload.
    pub(crate) running: Vec<u64>,
    /// Lines about panics, and lines with the level ERROR or WARN.
    pub(crate) bad: Vec<String>,
    last: Vec<String>,
    ended: bool,
}

/// The resources of the daemon.
#[derive(Clone, Copy, Default)]
pub(crate) struct Resources {
    pub(crate) cpu: f64,
    pub(crate) rss_kib: u64,
    pub(crate) descriptors: usize,
}

/// An execution and its expected counts.
pub(crate) struct Execution {
    pub(crate) id: String,
    pub(crate) authorization: String,
    /// Raw calls.
    pub(crate) calls: AtomicU64,
    pub(crate) tool_calls: AtomicU64,
    /// Requests with an injected credential, at half a credit each.
    pub(crate) injected: AtomicU64,
    /// The counts are upper limits, because clients vanish.
    pub(crate) is_vague: bool,
}

impl Gateway {
    /// Starts the daemon, and returns once it is ready.
    pub(crate) async fn start(
        (program, dir): (&Path, &Path),
        ports: Ports,
        secrets: &Secrets,
        connections: usize,
    ) -> Self {
        create_state(dir, dir);
        for n in 0..CREDENTIALS {
            private(&dir.join(format!("value-{n}")), secrets.value(n));
        }
        for task in TASKS {
            // The clients use started executions. A task without a token would be reported at each reload.
            private(&dir.join(format!("token-{task}")), &format!("static-token-of-24-bytes-or-more-{task}"));
        }
        let dns = serve_dns();
        fs::write(dir.join("exeat.toml"), config(ports, dns, connections, 0)).unwrap();
        let mut command = exeat(program, dir);
        command.args(["serve", "-c", "exeat.toml"]).stdin(Stdio::null()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let pid = child.id();
        let (sender, mut messages) = watch::channel(Messages::default());
        let stderr = BufReader::new(child.stderr.take().unwrap());
        std::thread::spawn(move || read_messages(stderr, &sender));
        let ready = timeout(START_TIMEOUT, messages.wait_for(|it| it.ready.is_some() || it.ended)).await;
        let ready = ready.expect("the daemon is ready in time").expect("its stderr is read").clone();
        let Some(port) = ready.ready else { panic!("the daemon does not start: {:#?}", ready.last) };
        let (program, dir) = (program.to_owned(), dir.to_owned());
        Self { port, program, dir, ports, connections, dns, child: Mutex::new(child), pid, messages }
    }

    pub(crate) fn resources(&self) -> Resources {
        let usage = measure::usage(self.pid);
        let descriptors = fs::read_dir(format!("/proc/{}/fd", self.pid)).map_or(0, Iterator::count);
        Resources { cpu: usage.cpu, rss_kib: usage.rss_kib, descriptors }
    }

    pub(crate) fn messages(&self) -> Messages {
        self.messages.borrow().clone()
    }

    /// Puts another configuration in place and has it reloaded. `round` makes each text different; odd ones have a
    /// rule more. Returns once it is in force.
    pub(crate) async fn reload(&self, round: u64) -> Result<(), String> {
        let before = self.messages().reloads;
        let text = config(self.ports, self.dns, self.connections, round);
        fs::write(self.dir.join("next.toml"), text).map_err(|error| error.to_string())?;
        fs::rename(self.dir.join("next.toml"), self.dir.join("exeat.toml")).map_err(|error| error.to_string())?;
        self.signal(Signal::HUP);
        let mut messages = self.messages.clone();
        let in_force = timeout(admin::TIMEOUT, messages.wait_for(|it| it.reloads > before)).await;
        in_force.map(drop).map_err(|_| format!("reload {round} was not in force after {:?}", admin::TIMEOUT))
    }

    pub(crate) fn signal(&self, signal: Signal) {
        let _ = kill_process(Pid::from_raw(self.pid as i32).unwrap(), signal);
    }

    /// Returns the exit status, if the daemon has ended.
    pub(crate) fn has_ended(&self) -> Option<ExitStatus> {
        self.child.lock().try_wait().ok().flatten()
    }

    /// Ends the daemon. Returns its status and its last messages.
    pub(crate) async fn stop(&self) -> Result<(ExitStatus, Messages), String> {
        self.signal(Signal::TERM);
        let mut messages = self.messages.clone();
        let ended = timeout(STOP_TIMEOUT, messages.wait_for(|it| it.ended)).await;
        let messages = ended.map_err(|_| format!("the daemon did not end within {STOP_TIMEOUT:?}"))?;
        let messages = messages.map_err(|error| error.to_string())?.clone();
        let status = self.child.lock().wait().map_err(|error| error.to_string())?;
        Ok((status, messages))
    }

    /// Runs `exeat audit verify` and returns its report.
    pub(crate) fn verify_log(&self) -> Result<Value, String> {
        let mut command = exeat(&self.program, &self.dir);
        let output = command.args(["audit", "verify", "-c", "exeat.toml", "--json"]).output().unwrap();
        let report = String::from_utf8_lossy(&output.stdout).into_owned();
        let failed = || format!("audit verify: {}: {report}{}", output.status, String::from_utf8_lossy(&output.stderr));
        if !output.status.success() {
            return Err(failed());
        }
        serde_json::from_str(&report).map_err(|_| failed())
    }

    /// Returns the files of the audit log, oldest first.
    pub(crate) fn log_files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(self.dir.join("state")).unwrap().flatten().map(|entry| entry.path());
        let name = |path: &PathBuf| path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let mut rotated: Vec<PathBuf> = entries.filter(|path| name(path).starts_with("audit.jsonl.")).collect();
        rotated.sort();
        rotated.push(self.dir.join("state/audit.jsonl"));
        rotated
    }

    /// Sends a request to the admin listener.
    pub(crate) async fn admin(&self, method: &str, path: &str, body: Option<Value>) -> Result<Value, String> {
        admin::request(&self.dir.join("admin.sock"), method, path, body).await
    }

    pub(crate) async fn start_execution(&self, task: &str) -> Result<Arc<Execution>, String> {
        let document =
            self.admin("POST", "/v1/executions", Some(json!({ "task": task, "expires_in_s": 86_400 }))).await?;
        let text =
            |name: &str| document[name].as_str().map(str::to_owned).ok_or_else(|| format!("no {name}: {document}"));
        let (id, token) = (text("id")?, text("token")?);
        let authorization = format!("Basic {}", STANDARD.encode(format!("{id}:{token}")));
        let (calls, tool_calls, injected) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let is_vague = task == "vague";
        Ok(Arc::new(Execution { id, authorization, calls, tool_calls, injected, is_vague }))
    }

    /// Compares the counts of an execution in the ledger with the requests that were made.
    pub(crate) async fn check_execution(&self, execution: &Execution, finds: u64, book: &Book) -> Result<(), String> {
        let document = self.admin("GET", &format!("/v1/executions/{}", execution.id), None).await?;
        let load = |count: &AtomicU64| count.load(Ordering::Relaxed);
        let expected = json!({
            "raw": load(&execution.calls),
            "tool": load(&execution.tool_calls),
            "credits": load(&execution.injected) as f64 / 2.0,
            "finds": finds,
            "stopped": if finds >= MAX_FINDS { json!("finds") } else { Value::Null },
        });
        let found = json!({
            "raw": document["raw"]["calls"],
            "tool": document["calls"],
            "credits": document["credits"].as_f64(),
            "finds": document["finds"],
            "stopped": document["stopped"],
        });
        let is_right = if execution.is_vague {
            found["raw"].as_u64() <= expected["raw"].as_u64() && found["finds"] == expected["finds"]
        } else {
            found == expected
        };
        if !is_right {
            book.violation(&format!(
                "the ledger has {found} for an execution, and {expected} was expected: {document}"
            ));
        }
        Ok(())
    }
}

impl Execution {
    /// Returns the same execution with counts that are not compared.
    pub(crate) fn uncounted(&self) -> Self {
        Self {
            id: self.id.clone(),
            authorization: self.authorization.clone(),
            calls: AtomicU64::new(0),
            tool_calls: AtomicU64::new(0),
            injected: AtomicU64::new(0),
            is_vague: self.is_vague,
        }
    }
}

impl Drop for Gateway {
    fn drop(&mut self) {
        let mut child = self.child.lock();
        let _ = child.kill();
        let _ = child.wait();
    }
}

fn exeat(program: &Path, dir: &Path) -> Command {
    let mut command = Command::new(program);
    command.current_dir(dir).env_clear().env("HOME", dir);
    command
}

fn read_messages(stderr: impl BufRead, sender: &watch::Sender<Messages>) {
    for line in stderr.lines().map_while(Result::ok) {
        sender.send_modify(|it| {
            if let Some(rest) = line.split_once("ready; proxy on 127.0.0.1:").map(|(_, rest)| rest) {
                it.ready = number(rest).and_then(|port| port.try_into().ok());
            }
            if line.contains("a new policy is in force") {
                it.reloads += 1;
                it.running.extend(line.split_once("\"running\":").and_then(|(_, rest)| number(rest)));
            }
            let is_bad = ["panicked", "\"level\":\"ERROR\"", "\"level\":\"WARN\""].iter().any(|bad| line.contains(bad));
            if is_bad && it.bad.len() < KEPT_LINES {
                it.bad.push(line.clone());
            }
            if it.last.len() == KEPT_LINES {
                it.last.remove(0);
            }
            it.last.push(line);
        });
    }
    sender.send_modify(|it| it.ended = true);
}

/// Returns the number at the beginning of a text.
fn number(text: &str) -> Option<u64> {
    text.split(|c: char| !c.is_ascii_digit()).next()?.parse().ok()
}

/// The configuration. `round` is written into a comment, and odd rounds have a rule more. Timeouts are long, so that a busy
/// machine does not cause refusals.
fn config(ports: Ports, dns: u16, connections: usize, round: u64) -> String {
    let Ports { plain, credential, fault, closed } = ports;
    let (added, rule) = match round % 2 {
        0 => ("", String::new()),
        _ => {
            (", \"added\"", format!("[integrations.added]\nallowed_domains = [\"*.added.test\"]\nports = [{plain}]\n"))
        }
    };
    let mut text = format!(
        "# round {round}\n\
         state_dir = \"state\"\n\
         [proxy]\nlisten = [\"127.0.0.1:0\"]\nmax_connections = {max}\nmax_connections_per_caller = {connections}\n\
         header_timeout = \"60s\"\nhandshake_timeout = \"60s\"\n\
         [admin]\nlisten = \"unix:admin.sock\"\n\
         [interception]\nrefuse_inside = false\n\
         [upstream]\nextra_roots = [\"origin-ca.pem\"]\nconnect_timeout = \"30s\"\n\
         [dns]\nservers = [\"127.0.0.1:{dns}\"]\ntimeout = \"30s\"\nnew_names_per_minute = 1000000\n\
         hosts = {{ \"private.work.test\" = [\"10.0.0.1\"] }}\n\
         [network]\nallow_cidrs = [\"127.0.0.1/32\"]\n\
         [audit]\nrotate_bytes = \"50MB\"\nrefusals_per_second = 1000000\n\
         [leak]\nmax_finds = {MAX_FINDS}\n\
         [integrations.work]\nallowed_domains = [\"*.work.test\"]\nports = [{plain}, {closed}]\n\
         methods = [\"GET\", \"POST\"]\n\
         [integrations.opaque]\nallowed_domains = [\"*.opaque.test\"]\nports = [{plain}]\nmode = \"opaque\"\n\
         [integrations.credential]\nallowed_domains = [\"*.cred.test\"]\nports = [{credential}]\n\
         [integrations.fault]\nallowed_domains = [\"*.fault.test\", \"wrong.name.test\"]\nports = [{fault}]\n\
         {rule}\
         [plans.wide]\ncalls_per_execution = 1000000000\n\
         [plans.wide.raw]\ncalls_per_execution = 1000000000\nrequests_per_second = 1000000\nconcurrent = 8000\n\
         max_response_bytes = \"10MB\"\n\
         [plans.impatient.raw]\nresponse_header_timeout = \"10s\"\nidle_timeout = \"10s\"\n\
         [plans.limited.raw]\ncalls_per_execution = {LIMIT}\n",
        max = 2 * connections + 500,
    );
    let mut names = Vec::new();
    for n in 0..CREDENTIALS {
        text.push_str(&format!(
            "[credentials.C{n}]\nauth_type = \"bearer\"\nvalue = \"file:value-{n}\"\n\
             domains = [\"c{n}.cred.test:{credential}\"]\n"
        ));
        names.push(format!("\"C{n}\""));
    }
    let names = names.join(", ");
    let plans = [
        ("work", "wide", "tools = [\"http_get\"]\n"),
        ("leaker", "wide", ""),
        ("limited", "limited", ""),
        ("impatient", "impatient", ""),
        ("vague", "wide", ""),
    ];
    for (task, plan, more) in plans {
        text.push_str(&format!(
            "[tasks.{task}]\nintegrations = [\"work\", \"opaque\", \"credential\", \"fault\"{added}]\nplan = \"{plan}\"\n\
             raw = true\ncredentials = [{names}]\ntoken = \"file:token-{task}\"\n{more}"
        ));
    }
    text
}

//! `exeat run`: runs one command behind a proxy of its own.

use std::collections::{BTreeMap, BTreeSet};
use std::convert::Infallible;
use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::process::Command;
use tokio::sync::watch;
use toml::Table;

use super::child::{Signals, exit_code, report_spawn_error};
use super::handover::Environment;
use super::placeholder::{HiddenKeys, PlaceholderCredential, PlaceholderKey, variable_of};
use super::terminal::{self, clean, say};
use super::{Exit, env, isolate, paths};
use crate::audit::line::{Event, Line, LineVerdict, Misplaced, PlaceholderPlace};
use crate::daemon::Daemon;
use crate::daemon::vault;
use crate::files;
use crate::model::host::Host;
use crate::model::name::{CredentialName, TaskName};
use crate::policy::compile::{self, Config, Problem};
use crate::policy::source::CompileContext;

/// Flags of `exeat run`.
///
/// The command gets the variables with which clients use the proxy and trust its CA. Without `--isolate`, a program
/// that ignores them connects directly.
#[derive(Args)]
#[command(
    after_long_help = "Without --isolate, the command is not confined: a program that ignores the proxy variables \
connects directly. With --isolate, the command has its own network, which leads only to the proxy, sees only its own \
processes, and cannot create Unix sockets. It is killed together with its children when it or exeat ends. If it cannot \
be isolated, it is not run. 127.0.0.1 is then the command's own loopback; --allow http://127.0.0.1:8080 allows the \
machine's, through the proxy. Only the network is isolated, not files: a program that the command writes and that is \
run later by others runs outside.\n\nExamples:\n  \
exeat run --allow example.org -- curl https://example.org/\n  \
exeat run --allow '*.example.org' --allow http://127.0.0.1:8080 -- ./agent\n  \
exeat run --credential GITHUB_TOKEN@api.github.com -- ./agent\n  \
exeat run --isolate --allow example.org -- ./agent\n  \
exeat run --learn -- pip download six"
)]
pub(super) struct RunArgs {
    /// A host that the command may reach: HOST, HOST:PORT, *.HOST, or http://HOST for plain HTTP. An IP address is
    /// reached even if it is private; a name is never resolved to such an address
    #[arg(long, value_name = "HOST")]
    allow: Vec<String>,
    /// A key that the command can use but not see: NAME@HOST. The value is read from the variable NAME. The command gets a
    /// placeholder of the same format instead, which the proxy replaces with the key in requests to HOST only, in the
    /// field or query parameter in which the command sends it. This also allows HOST. NAME=HOW@HOST allows one place
    /// only: HOW is bearer, basic, header:FIELD or query:PARAMETER. Can be repeated, also for more hosts or places of the
    /// same key; each place then applies to all of its hosts
    #[arg(long, value_name = "NAME[=HOW]@HOST")]
    credential: Vec<String>,
    /// Also use the integrations and credentials of this task in the configuration
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Allow every public https destination, and list those that would have been refused
    #[arg(long)]
    learn: bool,
    /// Isolate the command: its own network, processes and mounts, with the proxy as the only way out (Linux, no root)
    #[arg(long)]
    isolate: bool,
    /// With --isolate, allow the command to create Unix sockets. It can then connect to those in the file system that
    /// are not hidden; see the operations manual
    #[arg(long, requires = "isolate")]
    unix_sockets: bool,
    /// Print no summary at the end
    #[arg(short, long)]
    quiet: bool,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<String>,
}

/// The name of the command's task.
const TASK: &str = "run";
const TOKEN_VARIABLE: &str = "EXEAT_RUN_TOKEN";

pub(super) fn run(config: Option<&Path>, mut args: RunArgs) -> ExitCode {
    terminal::log("error");
    match start(config, &mut args) {
        Ok(code) => code,
        Err(exit) => exit.into(),
    }
}

fn start(config: Option<&Path>, args: &mut RunArgs) -> Result<ExitCode, Exit> {
    let io_failed = |error: io::Error| {
        say(format_args!("exeat: {error}"));
        Exit::Failed
    };
    let named: Vec<&str> = args.credential.iter().map(|flag| variable_of(flag)).collect();
    let environment = Environment::take_from_process(&named).map_err(io_failed)?;
    let command = args.command.iter().map(|argument| environment.unmarked(argument, &named));
    args.command = command.collect();
    let args = &*args;
    let private = fs::Permissions::from_mode(0o700);
    let state = tempfile::Builder::new().prefix("exeat-run-").permissions(private).tempdir().map_err(io_failed)?;
    let token = files::hex(files::random::<24>().map_err(io_failed)?.as_slice());
    let prepared = configure(config, args, state.path(), &token, &environment).map_err(|problems| {
        paths::report_problems(config, &problems);
        Exit::Usage
    })?;
    let runtime = super::runtime().map_err(io_failed)?;
    let log = prepared.config.settings.audit.path.clone();
    let status = runtime.block_on(run_command(prepared, args, state.path(), &token, environment))?;
    if let (Some(log), false) = (log, args.quiet) {
        summarize(&fs::read_to_string(log).unwrap_or_default(), args.learn);
    }
    Ok(exit_code(status))
}

async fn run_command(
    prepared: Prepared,
    args: &RunArgs,
    state: &Path,
    token: &str,
    environment: Environment,
) -> Result<ExitStatus, Exit> {
    let failed = |error: &dyn std::fmt::Display| {
        say(format_args!("exeat: {error}"));
        Exit::Failed
    };
    let mut signals = Signals::new().map_err(|error| failed(&error))?;
    let Prepared { config, hidden_variables, placeholders } = prepared;
    let warnings = config.warnings.iter().cloned().chain(config.policy.weak_values());
    for warning in warnings.filter(|warning| warning.path.starts_with("credentials.")) {
        say(format_args!("warning: {warning}"));
    }
    let own: Vec<_> = placeholders.iter().map(|key| (key.name.clone(), key.placeholder().to_owned())).collect();
    let keys = HiddenKeys::new(config.policy.task(&TaskName::new(TASK)).map(Arc::as_ref), placeholders);
    let ca = config.settings.interception.ca_cert.clone();
    let daemon = Daemon::start(config.settings, config.policy, None).await.map_err(|error| failed(&error))?;
    let own_loopback = args.isolate.then(|| isolate::PROXY.to_owned());
    let ours = || daemon.proxy_addresses().first().map(ToString::to_string);
    let address = own_loopback.or_else(ours).ok_or_else(|| failed(&"the proxy has no address"))?;
    let bundle = env::write_bundle(state, daemon.ca_pem()).map_err(|error| failed(&error))?;
    let variables = env::variables(&format!("http://{TASK}:{token}@{address}"), &ca, &bundle);
    let (program, rest) = args.command.split_first().ok_or(Exit::Usage)?;
    let mut command = match args.isolate {
        true => isolate::isolated_command(state, args.unix_sockets, program),
        false => Command::new(program),
    };
    command.kill_on_drop(true);
    set_arguments_and_environment(&mut command, rest, &keys, hidden_variables, &environment)?;
    drop(environment);
    command.envs(variables).envs(own);
    let status = match command.spawn() {
        Ok(child) => tokio::select! {
            status = signals.wait(child) => status.map_err(|error| failed(&error))?,
            never = report_own_keys(daemon.sent_by_clients()) => match never {},
        },
        Err(error) => report_spawn_error(program, &error),
    };
    let abort = daemon.abort_token();
    tokio::select! {
        _ = daemon.shutdown() => {}
        () = async { signals.next().await; abort.cancel(); std::future::pending().await } => {}
    }
    Ok(status)
}

/// Reports each key that the command itself sends, once.
async fn report_own_keys(mut sent: watch::Receiver<BTreeSet<CredentialName>>) -> Infallible {
    let mut reported = BTreeSet::new();
    loop {
        for name in sent.borrow_and_update().difference(&reported.clone()) {
            say(format_args!(
                "exeat: the command sent the real {name} itself; it has it from a file or its configuration"
            ));
            reported.insert(name.clone());
        }
        if sent.changed().await.is_err() {
            std::future::pending::<()>().await;
        }
    }
}

/// Sets the command's arguments and environment, with keys replaced by placeholders and `hidden_variables` removed.
///
/// Variables that contain a key in another form, such as base64, are left out, because what they are for is unknown.
///
/// # Errors
/// [`Exit::Usage`] if an argument contains a key in another form.
fn set_arguments_and_environment(
    command: &mut Command,
    rest: &[String],
    keys: &HiddenKeys,
    hidden_variables: Vec<String>,
    environment: &Environment,
) -> Result<(), Exit> {
    if rest.iter().any(|argument| keys.replace_in(argument.as_ref()).is_some()) {
        say(
            "exeat: the command's arguments contain a key, which others could see at the start; write '$NAME' in quotes",
        );
    }
    for argument in rest {
        let hidden = keys.hide_in(argument.as_ref()).map_err(|found| {
            say(format_args!(
                "exeat: an argument of the command contains {} in another form, such as base64, or a part of it; write \
                 '$NAME' in quotes instead",
                found.owner
            ));
            Exit::Usage
        })?;
        command.arg(hidden);
    }
    command.env_clear();
    for (name, value) in environment.all() {
        match keys.hide_in(value) {
            Ok(hidden) => {
                command.env(name, hidden);
            }
            Err(found) => say(format_args!(
                "exeat: the variable {} is not passed on: it contains {} in another form, such as base64, or a part of it",
                clean(&name.to_string_lossy()),
                found.owner
            )),
        }
    }
    // The command does not get the variables that configure the proxy, because they include its tokens.
    let ours = environment.all().map(|(name, _)| name.to_owned());
    let ours = ours.filter(|name| name.as_encoded_bytes().starts_with(b"EXEAT_"));
    for name in ours
        .chain(hidden_variables.into_iter().map(Into::into))
        .chain(env::NO_PROXY_VARIABLES.map(Into::into))
        .chain(env::CLIENT_PROXY_VARIABLES.map(Into::into))
    {
        command.env_remove(name);
    }
    Ok(())
}

/// The configuration of the command's proxy.
struct Prepared {
    config: Config,
    /// The variables to hide from the command.
    hidden_variables: Vec<String>,
    /// The keys given by flags.
    placeholders: Vec<PlaceholderCredential>,
}

/// Compiles the configuration of the command's proxy: the file's settings with the chosen task's integrations and
/// credentials, but with its own listener, state directory and task.
fn configure(
    config: Option<&Path>,
    args: &RunArgs,
    state: &Path,
    token: &str,
    environment: &Environment,
) -> Result<Prepared, Vec<Problem>> {
    let mut table = match config {
        None => Table::new(),
        Some(path) => read(path)?,
    };
    let hidden_variables = secret_variables(&toml::Value::Table(table.clone()));
    let base = config.and_then(Path::parent).unwrap_or(Path::new(""));
    let of_task = wanted_task(&table, args)?;
    let list = |key: &str| of_task.get(key).and_then(toml::Value::as_array).cloned().unwrap_or_default();
    let (mut integrations, mut credentials) = (list("integrations"), list("credentials"));
    let placeholders = placeholder_credentials(args, environment)?;
    for key in &placeholders {
        put(&mut table, "credentials", key.name.clone(), key.credential.clone());
        credentials.retain(|name| name.as_str() != Some(&key.name));
        credentials.push(key.name.clone().into());
    }
    let placeholder_hosts = placeholders.iter().flat_map(PlaceholderCredential::hosts);
    for (n, allowed) in args.allow.iter().map(String::as_str).chain(placeholder_hosts).enumerate() {
        let name = format!("exeat-run-allow-{n}");
        put(&mut table, "integrations", name.clone(), integration(allowed)?);
        integrations.push(name.into());
    }
    let mut task = Table::new();
    task.insert("token".to_owned(), format!("env:{TOKEN_VARIABLE}").into());
    task.insert("integrations".to_owned(), integrations.into());
    task.insert("credentials".to_owned(), credentials.into());
    if let Some(workspace) = of_task.get("workspace") {
        task.insert("workspace".to_owned(), workspace.clone());
    }
    task.insert("observe".to_owned(), args.learn.into());
    // The other tasks are removed, so that their tokens are neither accepted nor loaded.
    let mut tasks = Table::new();
    tasks.insert(TASK.to_owned(), task.into());
    table.insert("tasks".to_owned(), tasks.into());
    let listen = if args.isolate { isolate::listen_address(state) } else { "127.0.0.1:0".to_owned() };
    put(&mut table, "proxy", "listen".to_owned(), vec![listen]);
    // The authentication settings of the daemon's listeners do not apply to this one.
    if let Some(toml::Value::Table(proxy)) = table.get_mut("proxy") {
        for key in ["tls", "unix_tasks", "unix_mode"] {
            proxy.remove(key);
        }
    }
    // Secrets are read from the configured vault. All other state is in the run's own directory.
    let vault = vault::vault_with(&paths::vault_settings(config)?, &|name| environment.text(name));
    let secrets = &vault::Reader::of_vault(vault);
    table.insert("state_dir".to_owned(), state.display().to_string().into());
    // The origin of a key may get it from the command, too, which may have it from a file.
    let is_set = table.get("leak").and_then(|leak| leak.get("own_place")).is_some();
    if !is_set {
        put(&mut table, "leak", "own_place".to_owned(), "allow");
    }
    for own_files in ["interception", "vault", "audit", "ledger", "admin"] {
        table.remove(own_files);
    }
    let env = |name: &str| if name == TOKEN_VARIABLE { Some(token.to_owned()) } else { environment.text(name) };
    let mut compiled =
        compile::compile(&table.to_string(), &CompileContext { base, state_dir: state, env: &env, secrets })?;
    compiled.settings.admin.listen = None;
    // The CA key is not written to a file: the command runs as the same user and could read it.
    compiled.settings.interception.ca_key = None;
    // Processes that outlive the command must not delay the exit.
    compiled.settings.proxy.drain_timeout = Duration::from_secs(2);
    Ok(Prepared { config: compiled, hidden_variables, placeholders })
}

fn read(path: &Path) -> Result<Table, Vec<Problem>> {
    let text = fs::read_to_string(path)
        .map_err(|error| problem(&path.display().to_string(), format!("cannot be read: {error}"), ""))?;
    text.parse().map_err(|error: toml::de::Error| problem(&path.display().to_string(), error.message().to_owned(), ""))
}

/// Returns the variables that the configuration names as sources of secrets.
fn secret_variables(value: &toml::Value) -> Vec<String> {
    match value {
        toml::Value::String(text) => text.strip_prefix("env:").map(str::to_owned).into_iter().collect(),
        toml::Value::Array(items) => items.iter().flat_map(secret_variables).collect(),
        toml::Value::Table(table) => table.values().flat_map(secret_variables).collect(),
        _ => Vec::new(),
    }
}

/// Parses the `--credential` flags. Flags with the same name are merged into one credential with several hosts.
fn placeholder_credentials(
    args: &RunArgs,
    environment: &Environment,
) -> Result<Vec<PlaceholderCredential>, Vec<Problem>> {
    let mut placeholders: Vec<PlaceholderCredential> = Vec::new();
    let stable = || PlaceholderKey::read_or_create(&paths::state_dir());
    let stable = (!args.credential.is_empty()).then(stable).and_then(|key| {
        key.inspect_err(|error| say(format_args!("exeat: the next run will have other placeholders: {error}"))).ok()
    });
    for flag in &args.credential {
        let key = PlaceholderCredential::new(flag, &|name| environment.text(name), stable.as_ref())
            .map_err(|problem| vec![problem])?;
        match placeholders.iter_mut().find(|other| other.name == key.name) {
            Some(known) => known.add(&key).map_err(|problem| vec![problem])?,
            None => placeholders.push(key),
        }
    }
    Ok(placeholders)
}

/// Returns the configuration of the chosen task, or an empty table if none was chosen.
fn wanted_task(table: &Table, args: &RunArgs) -> Result<Table, Vec<Problem>> {
    let Some(task) = &args.task else { return Ok(Table::new()) };
    let found = table.get("tasks").and_then(|tasks| tasks.get(task));
    let found = found.ok_or_else(|| {
        problem("--task", format!("the configuration has no task {task:?}"), "a task of the configuration file")
    })?;
    Ok(found.as_table().cloned().unwrap_or_default())
}

fn put(table: &mut Table, section: &str, key: String, value: impl Into<toml::Value>) {
    let mut inner = match table.remove(section) {
        Some(toml::Value::Table(inner)) => inner,
        _ => Table::new(),
    };
    inner.insert(key, value.into());
    table.insert(section.to_owned(), inner.into());
}

/// Converts the value of `--allow` to an integration: `HOST`, `HOST:PORT`, `*.HOST`, `http://HOST[:PORT]` or
/// `https://HOST[:PORT]`.
fn integration(allowed: &str) -> Result<Table, Vec<Problem>> {
    let wrong = || {
        problem(
            "--allow",
            format!("{allowed:?} is not a valid host"),
            "HOST, HOST:PORT, *.HOST or http://HOST, without a path",
        )
    };
    let (plain, rest) = match allowed.split_once("://") {
        Some(("http", rest)) => (true, rest),
        Some(("https", rest)) => (false, rest),
        Some(_) => return Err(wrong()),
        None => (false, allowed),
    };
    let rest = rest.strip_suffix('/').unwrap_or(rest);
    let with_port = rest.rsplit_once(':').filter(|(host, _)| !host.contains(':') || host.ends_with(']'));
    let (host, port) = match with_port {
        Some((host, port)) => (host, Some(port.parse::<u16>().ok().filter(|p| *p > 0).ok_or_else(wrong)?)),
        None => (rest, None),
    };
    let host = host.to_ascii_lowercase();
    let bare = host.strip_prefix("*.").unwrap_or(&host);
    let mut table = Table::new();
    let pattern = match Host::parse(bare) {
        // A literal address is allowed explicitly, so it may be private.
        Ok(Host::Ip(ip)) if bare == host => {
            table.insert("allow_cidrs".to_owned(), vec![ip.to_string()].into());
            ip.to_string()
        }
        Ok(_) => host,
        Err(_) => return Err(wrong()),
    };
    table.insert("allowed_domains".to_owned(), vec![pattern].into());
    table.insert("plain_http".to_owned(), plain.into());
    if let Some(port) = port {
        table.insert("ports".to_owned(), vec![i64::from(port)].into());
    }
    Ok(table)
}

fn problem(path: &str, problem: String, suggestion: &str) -> Vec<Problem> {
    vec![Problem { path: path.to_owned(), problem, suggestion: suggestion.to_owned() }]
}

/// Prints the numbers of allowed and refused requests, and the flag that would have allowed each refused one.
fn summarize(log: &str, learned: bool) {
    let lines: Vec<Line> = log.lines().filter_map(|line| serde_json::from_str(line).ok()).collect();
    let passed = lines.iter().filter(|line| line.event == Event::Decided).count();
    let mut refused: BTreeMap<(String, String), (usize, String)> = BTreeMap::new();
    let mut flags: BTreeMap<String, ()> = BTreeMap::new();
    for line in &lines {
        let code = line.code.as_deref().unwrap_or_default();
        let observed = line.rule.as_deref().and_then(|rule| rule.strip_prefix("observe:"));
        if let (Some(code), true) = (observed, line.event == Event::Decided) {
            flags.extend(allow_flag(line, code).map(|flag| (flag, ())));
        }
        if !code.is_empty() && !is_auth_challenge(line, &lines) {
            let entry = refused
                .entry((place(line), code.to_owned()))
                .or_insert_with(|| (0, allow_flag(line, code).unwrap_or_default()));
            entry.0 = entry.0.saturating_add(1);
        }
    }
    for (code, more) in lines.iter().flat_map(|line| &line.codes) {
        let entry = refused.entry(("(too many to list)".to_owned(), code.to_string())).or_default();
        entry.0 = entry.0.saturating_add(usize::try_from(*more).unwrap_or(usize::MAX));
    }
    let count: usize = refused.values().map(|(count, _)| count).sum();
    say(format_args!("exeat: {passed} allowed, {count} refused or failed"));
    let mut used: BTreeMap<(&str, &str), usize> = BTreeMap::new();
    // A credential is known to be sent only if an origin has responded.
    for line in lines.iter().filter(|line| line.event == Event::Closed && line.response_status.is_some()) {
        if let (Some(name), Some(host)) = (line.credential_used.as_deref(), line.host.as_deref()) {
            let count = used.entry((name, host)).or_default();
            *count = count.saturating_add(1);
        }
    }
    for ((name, host), count) in &used {
        say(format_args!("  {count:>4} × {name} sent to {}", clean(host)));
    }
    for ((place, code), (count, flag)) in &refused {
        say(format_args!("  {count:>4} × {:<32} {code:<20} {flag}", place));
    }
    for advice in misplaced(&lines).into_iter().chain(leaks(&lines)) {
        say(format_args!("  {advice}"));
    }
    let mut aborted: BTreeMap<String, usize> = BTreeMap::new();
    for line in lines.iter().filter(|line| is_client_tls_abort(line)) {
        let count = aborted.entry(place(line)).or_default();
        *count = count.saturating_add(1);
    }
    for (place, count) in &aborted {
        say(format_args!("  {count:>4} × {place:<32} TLS aborted by the command: does it trust $SSL_CERT_FILE?"));
    }
    if learned && !flags.is_empty() {
        let all: Vec<_> = flags.into_keys().collect();
        say(format_args!("exeat: without --learn, the command would need: {}", all.join(" ")));
    }
}

/// Says where placeholders were that were not replaced, and what to write, once for each place.
fn misplaced(lines: &[Line]) -> BTreeSet<String> {
    let of = |line: &Line| {
        let PlaceholderPlace { credential, place, reason } = line.placeholder.as_ref()?;
        let (place, host) = (clean(place), line.host.as_deref().map(clean)?);
        let port = line.port.filter(|port| *port != 443).map(|port| format!(":{port}")).unwrap_or_default();
        let to_do = match reason {
            Misplaced::OtherPlace => {
                format!(": write --credential {credential}@{host}{port}, or {credential}={place}@{host}{port}")
            }
            _ => String::new(),
        };
        Some(format!("the placeholder of {credential} was in {place}, {}, for {host}{port}{to_do}", reason.text()))
    };
    lines.iter().filter_map(of).collect()
}

/// Says where keys were that were stopped, once for each place.
fn leaks(lines: &[Line]) -> BTreeSet<String> {
    let leaks = lines.iter().filter(|line| line.code.as_deref() == Some("leak_detected"));
    leaks.filter_map(|line| Some(format!("{}, for {}", clean(line.rule.as_deref()?), place(line)))).collect()
}

/// Returns the host and port of a request, as far as they are known.
fn place(line: &Line) -> String {
    let port = line.port.map(|port| format!(":{port}")).unwrap_or_default();
    format!("{}{port}", line.host.as_deref().map_or("-".to_owned(), clean))
}

/// Whether a client first sent a request without the password and then repeated it with the password, on the same
/// connection. git does this, and it is not a failure.
fn is_auth_challenge(line: &Line, lines: &[Line]) -> bool {
    line.code.as_deref() == Some("caller_unknown")
        && lines.iter().any(|other| other.peer == line.peer && other.task.is_some())
}

/// Whether a client aborted the handshake. It probably does not trust the CA; nothing has been refused.
fn is_client_tls_abort(line: &Line) -> bool {
    line.verdict == Some(LineVerdict::Abandoned)
        && line.rule.as_deref().is_some_and(|rule| rule.starts_with("client handshake: "))
}

/// Returns the flag that would have allowed a refused request, if there is one.
fn allow_flag(line: &Line, code: &str) -> Option<String> {
    let host = clean(line.host.as_deref()?);
    let port = line.port?;
    let plain = line.scheme.as_deref() == Some("http");
    let usual = if plain { 80 } else { 443 };
    let port = if port == usual { String::new() } else { format!(":{port}") };
    let scheme = if plain { "http://" } else { "" };
    matches!(code, "host_not_allowed" | "port_not_allowed" | "scheme_not_allowed")
        .then(|| format!("--allow {scheme}{host}{port}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn auth_challenges_are_not_failures() {
        let line = |peer: &str, code: Option<&'static str>, task: Option<&str>| Line {
            peer: Some(peer.to_owned()),
            code: code.map(Into::into),
            task: task.map(str::to_owned),
            ..Line::default()
        };
        let lines = [
            line("127.0.0.1:1", Some("caller_unknown"), None),
            line("127.0.0.1:1", None, Some("run")),
            line("127.0.0.1:2", Some("caller_unknown"), None),
            line("127.0.0.1:3", Some("host_not_allowed"), Some("run")),
        ];
        assert_eq!(lines.each_ref().map(|line| is_auth_challenge(line, &lines)), [true, false, false, false]);
    }

    #[test]
    fn only_aborted_client_handshakes_count() {
        let rows = [
            (LineVerdict::Abandoned, "client handshake: received fatal alert: UnknownCA", true),
            (LineVerdict::Abandoned, "client: connection reset", false),
            (LineVerdict::Deny, "client handshake: x", false),
        ];
        for (verdict, rule, want) in rows {
            let line = Line { verdict: Some(verdict), rule: Some(rule.to_owned()), ..Line::default() };
            assert_eq!(is_client_tls_abort(&line), want, "{verdict:?} {rule}");
        }
    }

    #[test]
    fn an_allowed_host_becomes_an_integration() {
        let rows = [
            ("example.org", Some(("example.org", None, false))),
            ("Example.org:8443", Some(("example.org", Some(8443), false))),
            ("*.example.org", Some(("*.example.org", None, false))),
            ("http://example.org", Some(("example.org", None, true))),
            ("http://example.org:8080/", Some(("example.org", Some(8080), true))),
            ("https://example.org", Some(("example.org", None, false))),
            ("[2001:db8::1]:443", Some(("2001:db8::1", Some(443), false))),
            ("192.0.2.1", Some(("192.0.2.1", None, false))),
            ("ftp://example.org", None),
            ("example.org/path", None),
            ("example.org:0", None),
            ("example.org:x", None),
            ("127.1", None),
            ("", None),
        ];
        for (text, want) in rows {
            let got = integration(text).ok().map(|table| {
                let domain = table["allowed_domains"][0].as_str().unwrap().to_owned();
                let port = table.get("ports").map(|ports| ports[0].as_integer().unwrap());
                (domain, port, table["plain_http"].as_bool().unwrap())
            });
            assert_eq!(got, want.map(|(d, p, h)| (d.to_owned(), p, h)), "{text:?}");
        }
    }
}

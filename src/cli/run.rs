//! `exeat run`: runs one command behind a proxy of its own.

use std::collections::{BTreeSet, HashMap};
use std::convert::Infallible;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{ExitCode, ExitStatus};
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use tokio::process::Command;
use tokio::sync::watch;
use toml::Table;

use super::child::{Signals, exit_code, report_spawn_error};
use super::handover::Environment;
use super::isolate::{CapturedPorts, RunDirectory, WaitingCommand};
use super::placeholder::{HiddenKeys, PlaceholderCredential, PlaceholderKey, variable_of};
use super::summary::{Flags, summary};
use super::terminal::{self, clean, say};
use super::{Exit, env, isolate, paths};
use crate::audit::sink;
use crate::daemon::vault;
use crate::daemon::{Daemon, StartParts};
use crate::files;
use crate::flow::peer_user;
use crate::model::host::Host;
use crate::model::name::{CredentialName, TaskName};
use crate::policy::compile::{self, Config, Problem};
use crate::policy::pattern::HostPattern;
use crate::policy::source::CompileContext;
use crate::policy::upstream_proxy::UpstreamProxy;

/// Flags of `exeat run`.
///
/// The command gets the variables with which clients use the proxy and trust its CA. Without `--isolate`, a program
/// that ignores them connects directly.
#[derive(Args)]
#[command(
    after_long_help = "Without --isolate, the command is not confined: a program that ignores the proxy variables \
connects directly. With --isolate, the command has its own network, which leads only to the proxy, sees only its own \
processes, and cannot create Unix sockets. It is killed together with its children when it or exeat ends. If it cannot \
be isolated, it is not run. Connections of programs that ignore the proxy variables are captured at the ports 80, 443 and \
those of allowed names, which the command's own servers cannot use, and DNS queries are answered; all else is refused. \
127.0.0.1 is then the command's own loopback; --allow http://127.0.0.1:8080 allows the machine's, through the proxy. Only the network is isolated, not files: a program that the command writes and that is \
run later by others runs outside.\n\nExamples:\n  \
exeat run --allow example.org -- curl https://example.org/\n  \
exeat run --allow '*.example.org' --allow http://127.0.0.1:8080 -- ./agent\n  \
exeat run --credential GITHUB_TOKEN@api.github.com -- ./agent\n  \
exeat run --isolate --allow example.org -- ./agent\n  \
exeat run --learn --audit-log log.jsonl -- pip download six; exeat audit learn log.jsonl"
)]
pub(super) struct RunArgs {
    /// A host that the command may reach: HOST, HOST:PORT, *.HOST, or http://HOST for plain HTTP. An IP address is
    /// reached even if it is private; a name is never resolved to such an address
    #[arg(long, value_name = "HOST")]
    allow: Vec<String>,
    /// A host that the command may not reach, whatever else allows it, and whose refusals are not listed at the end: HOST or
    /// *.HOST. For telemetry and updates, for example
    #[arg(long, value_name = "HOST")]
    deny: Vec<String>,
    /// A key that the command can use but not see: NAME@HOST. The value is read from the variable NAME. The command gets a
    /// placeholder of the same format instead, which the proxy replaces with the key in requests to HOST only, in the
    /// field or query parameter in which the command sends it. This also allows HOST. NAME=HOW@HOST allows one place
    /// only: HOW is bearer, basic, header:FIELD, query:PARAMETER, cookie:COOKIE, path,
    /// body:json:/POINTER, body:form:PARAMETER or websocket:/POINTER. Can be repeated, also for more hosts or places
    /// of the same key; each place then applies to all of its hosts
    #[arg(long, value_name = "NAME[=HOW]@HOST")]
    credential: Vec<String>,
    /// Also use the integrations and credentials of this task in the configuration
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// A file with a CA certificate in PEM that the proxy trusts for origins, beside those of the system. Can be repeated
    #[arg(long, value_name = "FILE")]
    ca: Vec<PathBuf>,
    /// A DNS server that the proxy asks instead of those of the system: IP, IP:PORT, tls://IP#NAME or
    /// https://IP/PATH#NAME. Can be repeated
    #[arg(long, value_name = "SERVER")]
    dns: Vec<String>,
    /// A proxy that connections leave through, where the network allows no direct ones: http://HOST:PORT, https://… or socks5://…;
    /// or env:NAME for a variable with such a URL, which may have a user and a password. HTTPS_PROXY is not used unless it is named
    /// here: env:HTTPS_PROXY
    #[arg(long, value_name = "URL")]
    upstream_proxy: Option<String>,
    /// A network that allowed names may resolve to although it is not public, such as 10.1.0.0/16 or an address. Can be
    /// repeated
    #[arg(long, value_name = "CIDR")]
    allow_cidr: Vec<String>,
    /// Allow every public https destination, and list those that would have been refused
    #[arg(long)]
    learn: bool,
    /// Isolate the command: its own network, processes and mounts, with the proxy as the only way out (Linux, no root)
    #[arg(long)]
    isolate: bool,
    /// With --isolate, do not capture connections of programs that ignore the proxy variables, and answer no DNS queries: only
    /// those that use the proxy reach the network
    #[arg(long, requires = "isolate")]
    proxy_only: bool,
    /// With --isolate, allow the command to create Unix sockets. It can then connect to those in the file system that
    /// are not hidden; see the operations manual
    #[arg(long, requires = "isolate")]
    unix_sockets: bool,
    /// Ask for the password in the proxy variables. Without this, the proxy serves the programs of the current user and root,
    /// and no others; this is for commands that start programs as other users
    #[arg(long, conflicts_with = "isolate")]
    password: bool,
    /// Write the audit log of the run to this file, which is replaced: for `exeat audit learn`, for example
    #[arg(long, value_name = "FILE")]
    audit_log: Option<PathBuf>,
    /// Print no summary at the end
    #[arg(short, long)]
    quiet: bool,
    /// The least severe messages of the proxy to print: error, warn, info or debug [default: error]
    #[arg(long, value_name = "LEVEL", value_parser = ["error", "warn", "info", "debug"], hide_possible_values = true)]
    log: Option<String>,
    /// The command and its arguments
    #[arg(required = true, trailing_var_arg = true, value_name = "CMD")]
    command: Vec<String>,
}

/// The name of the command's task.
const TASK: &str = "run";
/// The address of its proxy, on a free port.
const LISTEN: &str = "127.0.0.1:0";
const TOKEN_VARIABLE: &str = "EXEAT_RUN_TOKEN";

pub(super) fn run(config: Option<&Path>, mut args: RunArgs) -> ExitCode {
    match args.log.as_deref() {
        Some(level) => terminal::log_at(level),
        None => terminal::log("error"),
    }
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
    // The maps of a user namespace cannot be written by a process that is not dumpable. The first process still has the
    // variables of its caller anyway.
    let made = (args.isolate && !Environment::is_handed_over()).then(isolate::hidden_directory).transpose()?;
    terminal::undumpable();
    let environment = Environment::take_from_process(&named, made.as_ref()).map_err(io_failed)?;
    let state = match args.isolate {
        true => Environment::inherited_directory().ok_or(io::ErrorKind::NotFound.into()).and_then(RunDirectory::hidden),
        false => RunDirectory::visible(args.password),
    };
    let state = state.map_err(|error| {
        say(format_args!("exeat: the directory of the run: {error}"));
        Exit::Failed
    })?;
    let command = args.command.iter().map(|argument| environment.unmarked(argument, &named));
    args.command = command.collect();
    let args = &*args;
    let denied = denied_hosts(args).map_err(|problems| {
        paths::report_problems(config, &problems);
        Exit::Usage
    })?;
    let token = files::hex(files::random::<24>().map_err(io_failed)?.as_slice());
    let prepared = configure(config, args, state.path(), &token, &environment).map_err(|mut problems| {
        paths::locate(config, &mut problems);
        paths::report_problems(config, &problems);
        Exit::Usage
    })?;
    if let Some(out) = &args.audit_log {
        write_log(out, "")?;
    }
    let runtime = super::runtime().map_err(io_failed)?;
    let log = prepared.config.settings.audit.path.clone();
    let status = runtime.block_on(run_command(prepared, args, &state, &token, environment))?;
    let log = log.map(|log| read_log(&log));
    if let (Some(out), Some(log)) = (&args.audit_log, &log) {
        write_log(out, log)?;
    }
    if let (Some(log), false) = (log, args.quiet) {
        let keys: Vec<String> = named.iter().map(|name| (*name).to_owned()).collect();
        let flags = Flags { learned: args.learn, isolated: args.isolate, keys: &keys, denied: &denied };
        for line in summary(&log, &flags) {
            say(line);
        }
    }
    Ok(exit_code(status))
}

/// Returns the log of the run with its rotated files.
fn read_log(log: &Path) -> String {
    let rotated = sink::rotated(log).unwrap_or_default().into_iter().map(|(_, file)| file);
    rotated.chain([log.to_owned()]).filter_map(|file| fs::read_to_string(file).ok()).collect()
}

/// Writes the log to a file that only its owner can read.
fn write_log(out: &Path, log: &str) -> Result<(), Exit> {
    files::replace(out, log.as_bytes(), 0o600).map_err(|error| {
        say(format_args!("exeat: {} cannot be written: {error}", out.display()));
        Exit::Failed
    })
}

async fn run_command(
    prepared: Prepared,
    args: &RunArgs,
    directory: &RunDirectory,
    token: &str,
    environment: Environment,
) -> Result<ExitStatus, Exit> {
    let failed = |error: &dyn std::fmt::Display| {
        say(format_args!("exeat: {error}"));
        Exit::Failed
    };
    let mut signals = Signals::new().map_err(|error| failed(&error))?;
    let Prepared { config, hidden_variables, placeholders, knows_user, captured } = prepared;
    warn(&config, &captured);
    let own: Vec<_> = placeholders.iter().map(|key| (key.name.clone(), key.placeholder().to_owned())).collect();
    let keys = HiddenKeys::new(config.policy.task(&TaskName::new(TASK)).map(Arc::as_ref), placeholders);
    let ca = config.settings.interception.ca_cert.clone();
    let commands = super::command_runner(&config.policy, &|name| environment.text(name).map(Into::into))
        .map_err(|error| failed(&error))?;
    let (program, rest) = args.command.split_first().ok_or(Exit::Usage)?;
    let mut command = match args.isolate {
        true => isolate::isolated_command(directory, &captured, (args.unix_sockets, args.quiet), program),
        false => Command::new(program),
    };
    command.kill_on_drop(true);
    let hidden = (hidden_variables, config.policy.upstream_proxies());
    set_arguments_and_environment(&mut command, rest, &keys, hidden, &environment)?;
    drop(environment);
    command.envs(own);
    let start_proxy = async |enclosed| {
        let parts = StartParts { commands, enclosed, ..StartParts::default() };
        let daemon = Daemon::start_on(parts, config.settings, config.policy, None).await?;
        let bundle = env::write_bundle(directory.path(), &daemon.ca_pem())?;
        Ok::<_, Box<dyn std::error::Error>>((daemon, bundle))
    };
    let (daemon, started) = if args.isolate {
        let certificates = Path::new(isolate::CERTIFICATES);
        let (ca, bundle) = (certificates.join(env::CA_FILE), certificates.join(env::BUNDLE_FILE));
        command.envs(env::variables(&format!("http://{}", isolate::PROXY), &ca, &bundle));
        let starting = async {
            // The proxy serves the sockets of the command's network, so the network is there before it.
            let (waiting, sockets) = WaitingCommand::spawn(command, directory).await.map_err(isolate::not_started)?;
            let (daemon, _) = start_proxy(Some(sockets)).await.map_err(|error| failed(&error))?;
            Ok((daemon, Ok(waiting.start().await.map_err(isolate::not_started)?)))
        };
        tokio::select! {
            started = starting => started?,
            _ = signals.next() => return Err(failed(&"interrupted before the command was started")),
        }
    } else {
        let (daemon, bundle) = start_proxy(None).await.map_err(|error| failed(&error))?;
        let address = *daemon.proxy_addresses().first().ok_or_else(|| failed(&"the proxy has no address"))?;
        let userinfo = if knows_user { String::new() } else { format!("{TASK}:{token}@") };
        command.envs(env::variables(&format!("http://{userinfo}{address}"), &ca, &bundle));
        (daemon, command.spawn())
    };
    let status = match started {
        // Polled in this order, so that a key that is sent just before the end is reported, too.
        Ok(child) => tokio::select! {
            biased;
            never = report_own_keys(daemon.sent_by_clients()) => match never {},
            status = signals.wait(child) => status.map_err(|error| failed(&error))?,
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

/// Prints the warnings about credentials and about ports that are not captured.
fn warn(config: &Config, captured: &CapturedPorts) {
    let warnings = config.warnings.iter().cloned().chain(config.policy.weak_values());
    for warning in warnings.filter(|warning| warning.path.starts_with("credentials.")) {
        say(format_args!("warning: {warning}"));
    }
    if !captured.left_out().is_empty() {
        let ports: Vec<String> = captured.left_out().iter().map(ToString::to_string).collect();
        say(format_args!(
            "exeat: warning: not captured, and reached only by programs that use the proxy: port {}",
            ports.join(", ")
        ));
    }
}

/// Reports each key that the command itself sends, once.
async fn report_own_keys(mut sent: watch::Receiver<BTreeSet<CredentialName>>) -> Infallible {
    let mut reported = BTreeSet::new();
    loop {
        let all = sent.borrow_and_update().clone();
        for name in all.difference(&reported) {
            say(format_args!(
                "exeat: the command sent the real {name} itself; it has it from a file or its configuration"
            ));
        }
        reported = all;
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
    (hidden_variables, proxies): (Vec<String>, &[Arc<UpstreamProxy>]),
    environment: &Environment,
) -> Result<(), Exit> {
    if rest.iter().any(|argument| keys.replace_in(argument.as_ref()).is_some()) {
        say(
            "exeat: the command's arguments contain a key, which others could see at the start; write '$NAME' in quotes",
        );
    }
    if rest.iter().any(|argument| proxies.iter().any(|proxy| proxy.is_revealed_by(argument.as_bytes()))) {
        say("exeat: an argument of the command contains the password of the upstream proxy");
        return Err(Exit::Usage);
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
        if proxies.iter().any(|proxy| proxy.is_revealed_by(value.as_encoded_bytes())) {
            report_hidden_login(&name.to_string_lossy(), &hidden_variables);
            continue;
        }
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

/// Says that a variable with the password of the upstream proxy is not passed on. Variables that name a proxy get values of their
/// own, and those of the configuration are hidden anyway.
fn report_hidden_login(variable: &str, hidden_variables: &[String]) {
    if !env::names_proxy(variable) && !hidden_variables.iter().any(|hidden| hidden == variable) {
        let name = clean(variable);
        say(format_args!(
            "exeat: the variable {name} is not passed on: it contains the password of the upstream proxy"
        ));
    }
}

/// The configuration of the command's proxy.
struct Prepared {
    config: Config,
    /// The variables to hide from the command.
    hidden_variables: Vec<String>,
    /// The keys given by flags.
    placeholders: Vec<PlaceholderCredential>,
    /// The listener knows the user of the command, so that clients need no token.
    knows_user: bool,
    /// The ports of the command's own network that lead to the proxy.
    captured: CapturedPorts,
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
    let mut hidden_variables = secret_variables(&toml::Value::Table(table.clone()));
    hidden_variables.extend(args.upstream_proxy.iter().flat_map(|proxy| secret_variables(&proxy.as_str().into())));
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
    let denied =
        list("denied_domains").into_iter().chain(args.deny.iter().map(|host| host.to_ascii_lowercase().into()));
    task.insert("denied_domains".to_owned(), denied.collect::<Vec<_>>().into());
    // The other tasks are removed, so that their tokens are neither accepted nor loaded.
    let mut tasks = Table::new();
    tasks.insert(TASK.to_owned(), task.into());
    table.insert("tasks".to_owned(), tasks.into());
    let knows_user = put_listener(&mut table, args);
    let flags = put_network(&mut table, args)?;
    // Secrets are read from the configured vault. All other state is in the run's own directory.
    let vault = vault::vault_with(&paths::vault_settings(config)?, &|name| environment.text(name));
    let secrets = &vault::Reader::of_vault(vault);
    table.insert("state_dir".to_owned(), state.display().to_string().into());
    // The origin of a key may get it from the command, too, which may have it from a file.
    let is_set = table.get("leak").and_then(|leak| leak.get("own_place")).is_some();
    if !is_set {
        put(&mut table, "leak", "own_place".to_owned(), "allow");
    }
    if let Some(toml::Value::Table(interception)) = table.get_mut("interception") {
        interception.retain(|key, _| !key.starts_with("ca_"));
    }
    for own_files in ["vault", "audit", "ledger", "admin"] {
        table.remove(own_files);
    }
    let env = |name: &str| if name == TOKEN_VARIABLE { Some(token.to_owned()) } else { environment.text(name) };
    let compiled = compile::compile(
        &table.to_string(),
        &CompileContext { base, state_dir: state, env: &env, secrets, is_offline: false },
    );
    let mut compiled = compiled.map_err(|problems| of_flags(problems, &flags))?;
    (compiled.settings.admin.listen, compiled.settings.metrics.listen) = (None, None);
    // The CA key is not written to a file: the command runs as the same user and could read it.
    compiled.settings.interception.ca_key = None;
    // Processes that outlive the command must not delay the exit.
    compiled.settings.proxy.drain_timeout = Duration::from_secs(2);
    let captured = captured_ports(&compiled, args);
    if args.isolate {
        compiled.settings.proxy.listeners = captured.listeners(&TaskName::new(TASK));
    }
    Ok(Prepared { config: compiled, hidden_variables, placeholders, knows_user, captured })
}

/// Returns the ports at which connections of the command are captured.
fn captured_ports(config: &Config, args: &RunArgs) -> CapturedPorts {
    if args.proxy_only || !args.isolate {
        return CapturedPorts::default();
    }
    CapturedPorts::with(config.policy.tasks().flat_map(|task| task.ports_of_names().collect::<Vec<_>>()))
}

/// Replaces the paths of problems by the flags that they come from.
fn of_flags(mut problems: Vec<Problem>, flags: &HashMap<String, &'static str>) -> Vec<Problem> {
    for problem in &mut problems {
        // The line is of a text that the user has not seen.
        problem.line = None;
        if let Some(flag) = flags.get(&problem.path) {
            problem.path = (*flag).to_owned();
        }
    }
    problems
}

/// Sets the listener of the command's proxy. Returns whether it knows the command by its user. Browsers and other clients
/// that cannot send a token need that.
fn put_listener(table: &mut Table, args: &RunArgs) -> bool {
    // The authentication settings of the daemon's listeners do not apply to this one.
    if let Some(toml::Value::Table(proxy)) = table.get_mut("proxy") {
        for key in ["tls", "unix_tasks", "unix_mode", "listen", "listeners", "cidr_tasks"] {
            proxy.remove(key);
        }
    }
    let mut tasks = Table::new();
    tasks.insert(rustix::process::geteuid().as_raw().to_string(), TASK.into());
    if args.isolate {
        // The listeners of the command's network replace it.
        put(table, "proxy", "listen".to_owned(), vec![isolate::PROXY.to_string()]);
        return true;
    }
    // Some sandboxes do not have the interface of the kernel that says who a client is.
    if args.password || !peer_user::is_supported().unwrap_or_default() {
        put(table, "proxy", "listen".to_owned(), vec![LISTEN.to_owned()]);
        return false;
    }
    // Root may read the user's memory and files anyway, and a command may contain sudo.
    tasks.insert("0".to_owned(), TASK.into());
    let mut listener = Table::new();
    listener.insert("listen".to_owned(), LISTEN.into());
    listener.insert("user_tasks".to_owned(), tasks.into());
    put(table, "proxy", "listeners".to_owned(), vec![toml::Value::Table(listener)]);
    true
}

/// Adds the certificates, DNS servers, networks and the upstream proxy that are given by flags. Returns the flag of each by its
/// path in the configuration.
fn put_network(table: &mut Table, args: &RunArgs) -> Result<HashMap<String, &'static str>, Vec<Problem>> {
    let mut flags = HashMap::new();
    let mut append = |section: &str, key: &str, item: String, flag: &'static str| {
        let list = table.get(section).and_then(|section| section.get(key)).and_then(toml::Value::as_array);
        let mut list = list.cloned().unwrap_or_default();
        flags.insert(format!("{section}.{key}[{}]", list.len()), flag);
        list.push(item.into());
        put(table, section, key.to_owned(), list);
    };
    for file in &args.ca {
        let path = std::path::absolute(file).map_err(|error| {
            problem("--ca", format!("{}: {error}", file.display()), "a file with a certificate in PEM")
        })?;
        append("upstream", "extra_roots", path.display().to_string(), "--ca");
    }
    for cidr in &args.allow_cidr {
        append("network", "allow_cidrs", cidr.clone(), "--allow-cidr");
    }
    if let Some(proxy) = &args.upstream_proxy {
        put(table, "upstream", "proxy".to_owned(), proxy.clone());
        flags.extend(["upstream.proxy", "upstream.proxy_password"].map(|key| (key.to_owned(), "--upstream-proxy")));
    }
    if !args.dns.is_empty() {
        put(table, "dns", "servers".to_owned(), args.dns.clone());
        flags.extend((0..args.dns.len()).map(|n| (format!("dns.servers[{n}]"), "--dns")));
    }
    Ok(flags)
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
    let stable = || PlaceholderKey::read_or_create(&paths::user_state_dir()?);
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

/// Parses the `--deny` flags.
fn denied_hosts(args: &RunArgs) -> Result<Vec<HostPattern>, Vec<Problem>> {
    let parsed = args.deny.iter().map(|host| {
        let wrong = || problem("--deny", format!("{host:?} is not a valid host"), "HOST or *.HOST, without a port");
        HostPattern::parse_wide(&host.to_ascii_lowercase()).map_err(|_| wrong())
    });
    parsed.collect()
}

/// Returns the configuration of the chosen task, or an empty table if none was chosen.
fn wanted_task(table: &Table, args: &RunArgs) -> Result<Table, Vec<Problem>> {
    let Some(task) = &args.task else { return Ok(Table::new()) };
    let found = table.get("tasks").and_then(|tasks| tasks.get(task));
    let found = found.ok_or_else(|| {
        let tasks = table.get("tasks").and_then(toml::Value::as_table);
        let known = compile::known_names(tasks.into_iter().flat_map(Table::keys), "tasks", task);
        problem("--task", format!("the configuration has no task {task:?}"), &known)
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
    vec![Problem::new(path, problem, suggestion)]
}

#[cfg(test)]
mod tests {
    use super::*;

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

//! `exeat serve`: the daemon.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use futures_util::future::OptionFuture;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing::Level;

use super::systemd::Passed;
use super::{Exit, harden, limits, paths, systemd, terminal};
use crate::daemon::command_runner::CommandRunner;
use crate::daemon::reload::Reloaded;
use crate::daemon::takeover::Takeover;
use crate::daemon::{Daemon, StartParts, precheck};
use crate::policy::compile::Problem;
use crate::policy::rule::Policy;
use crate::policy::settings::Settings;

/// Maximum time that threads have at the end to finish what they read or write.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(1);

/// Flags of `exeat serve`.
#[derive(Args)]
pub(super) struct ServeArgs {
    /// Do not confine the process (seccomp, Landlock), on kernels and file systems that do not support it
    #[arg(long)]
    no_confine: bool,
    /// Take the listening sockets over from the daemon that runs with the same state directory, which ends after its
    /// requests in flight. If none runs, start as usual
    #[arg(long)]
    takeover: bool,
}

pub(super) fn run(config: Option<&Path>, args: &ServeArgs) -> Exit {
    // Written to the end of the process, by a thread of its own: a full pipe must not stop the daemon.
    let log = terminal::log_without_waiting("info");
    let ended = serve(config, args);
    // Written before the reason of a failure, so that the reason is the last line.
    drop(log);
    ended.unwrap_or_else(|why| failed(&why))
}

/// Runs the daemon to its end. An error is the reason why it cannot start, or did not end as it should.
fn serve(config: Option<&Path>, args: &ServeArgs) -> Result<Exit, String> {
    limits::disable_core_dumps();
    let file = paths::config_file(config);
    let loaded = match &file {
        Some(file) => file.load(),
        None => paths::load(None),
    };
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(problems) => {
            report(config, &problems);
            return Ok(Exit::Usage);
        }
    };
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let (passed, commands) = before_confinement(args, &loaded.policy)?;
    if args.no_confine {
        tracing::warn!("the process is not confined, because of --no-confine");
    } else {
        harden::confine(&loaded.settings, config);
    }
    let takeover = args.takeover.then(|| request_takeover(&loaded.settings)).transpose()?.flatten();
    let runtime = super::runtime().map_err(|error| error.to_string())?;
    let ended = runtime.block_on(async {
        fail_writes_over_file_size_limit().map_err(|error| error.to_string())?;
        let inherited = passed.into_listeners().map_err(|error| error.to_string())?;
        // A takeover waits for the end of the old process. A reload that is asked for meanwhile must not end this one.
        let hangup = signal(SignalKind::hangup()).map_err(|error| error.to_string())?;
        let parts = StartParts { inherited, takeover, is_offered: true, commands, enclosed: None };
        let daemon = Daemon::start_on(parts, loaded.settings, loaded.policy, file).await;
        run_until_stopped(daemon.map_err(|error| error.to_string())?, hangup).await
    });
    // A thread may wait for a file system that hangs.
    runtime.shutdown_timeout(BLOCKING_TIMEOUT);
    ended
}

/// Takes the sockets of the service manager, which other programs must not get, starts the process that runs commands, which a
/// confined process cannot, and then raises the limit of open files, with which commands could take long.
fn before_confinement(args: &ServeArgs, policy: &Policy) -> Result<(Passed, Option<Arc<CommandRunner>>), String> {
    if args.takeover && std::env::var_os("LISTEN_FDS").is_some() {
        let why = "--takeover cannot be used with sockets of the service manager, which restarts the daemon itself";
        return Err(why.to_owned());
    }
    let passed = systemd::take_sockets().map_err(|error| error.to_string())?;
    let commands = super::command_runner(policy, &|name| std::env::var_os(name));
    let commands = commands.map_err(|error| error.to_string())?;
    limits::raise_descriptor_limit();
    Ok((passed, commands))
}

/// Asks the running daemon for its sockets. A start that would fail for another reason must not end that daemon.
fn request_takeover(settings: &Settings) -> Result<Option<Takeover>, String> {
    if let Some(problem) = precheck::find(settings).problems.first() {
        return Err(format!("the running daemon is not taken over: {problem}"));
    }
    let takeover = Takeover::request(&settings.state_dir).map_err(|error| error.to_string())?;
    match &takeover {
        Some(_) => tracing::info!("taking over from the running daemon"),
        None => tracing::info!("no daemon that can be taken over answers; starting as usual"),
    }
    Ok(takeover)
}

/// Handles the signal that ends a process whose file exceeds the size limit (`RLIMIT_FSIZE`). The write fails then, and
/// requests are refused while the log cannot be written.
fn fail_writes_over_file_size_limit() -> std::io::Result<()> {
    // The handler stays installed until the process ends.
    signal(SignalKind::from_raw(rustix::process::Signal::XFSZ.as_raw())).map(drop)
}

async fn run_until_stopped(daemon: Daemon, mut hangup: Signal) -> Result<Exit, String> {
    let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()));
    let (Ok(mut terminate), Ok(mut interrupt)) = signals else {
        return Err("signals cannot be handled".to_owned());
    };
    let status = ready_line(&daemon);
    say_ready(&daemon, &status);
    systemd::ready(&status);
    let mut reload = None;
    let mut taken_over = Box::pin(daemon.taken_over());
    let successor = loop {
        tokio::select! {
            biased;
            // A new process that has been told that this one ends must find its end, whatever else arrives.
            successor = &mut taken_over => break Some(successor),
            // A signal that arrives meanwhile is handled after the reload.
            _ = hangup.recv(), if reload.is_none() => {
                systemd::reloading();
                reload = Some(Box::pin(daemon.reload()));
            }
            // A reload may wait for a file system that hangs, and must not keep the daemon from stopping.
            Some(reloaded) = OptionFuture::from(reload.as_mut()), if reload.is_some() => {
                reload = None;
                match reloaded {
                    Some(Reloaded::New(..)) => systemd::ready(&status),
                    Some(Reloaded::Kept(_)) => {
                        systemd::ready(&format!("{status}; the old policy stays in force, see the log"));
                    }
                    None => {
                        tracing::warn!("there is no configuration file to reload");
                        systemd::ready(&status);
                    }
                }
            }
            _ = terminate.recv() => break None,
            _ = interrupt.recv() => break None,
        }
    };
    drop((reload, taken_over));
    systemd::stopping();
    let is_taken_over = successor.is_some();
    tracing::info!(is_taken_over, "draining");
    let abort = daemon.abort_token();
    // A script may stop the old process itself. That is not the second signal.
    let signals = if is_taken_over { 2 } else { 1 };
    let second_signal = async {
        for _ in 0..signals {
            tokio::select! {
                _ = terminate.recv() => {}
                _ = interrupt.recv() => {}
            }
        }
        abort.cancel();
        std::future::pending::<()>().await;
    };
    // Also after a second signal, the new process waits for the end of this one.
    if let Some(successor) = successor {
        successor.hold_until_exit();
    }
    let stopped = async { if is_taken_over { daemon.hand_over().await } else { daemon.shutdown().await } };
    tokio::select! {
        drained = stopped => if drained { Ok(Exit::Done) } else { Err("some requests were aborted".to_owned()) },
        () = second_signal => Ok(Exit::Failed),
    }
}

/// Returns the line that reports the addresses of the listeners.
fn ready_line(daemon: &Daemon) -> String {
    let proxy = daemon.proxy().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let admin = daemon.admin().map_or_else(|| "off".to_owned(), |address| address.to_string());
    let metrics = daemon.metrics().map(|address| format!("; metrics on {address}")).unwrap_or_default();
    format!("exeat: ready; proxy on {proxy}; admin on {admin}{metrics}")
}

/// Writes the addresses to the log, whatever its level.
fn say_ready(daemon: &Daemon, status: &str) {
    if !terminal::log_is_json() {
        return terminal::say(status);
    }
    let proxy: Vec<String> = daemon.proxy().iter().map(ToString::to_string).collect();
    let admin = daemon.admin().map(ToString::to_string);
    let message = status.strip_prefix("exeat: ").unwrap_or(status);
    let metrics = daemon.metrics().map(ToString::to_string);
    let addresses = [("proxy", proxy.into()), ("admin", admin.into()), ("metrics", metrics.into())];
    terminal::say(terminal::json_line(Level::INFO, message, &addresses));
}

/// Writes the problems of the configuration to the log.
fn report(config: Option<&Path>, problems: &[Problem]) {
    if !terminal::log_is_json() {
        return paths::report_problems(config, problems);
    }
    let file = config.map(|file| file.display().to_string());
    for Problem { path, problem, suggestion, line } in problems {
        let fields = [
            ("file", file.clone().into()),
            ("line", (*line).into()),
            ("path", path.as_str().into()),
            ("problem", problem.as_str().into()),
            ("expected", suggestion.as_str().into()),
        ];
        terminal::say(terminal::json_line(Level::ERROR, "the configuration is not valid", &fields));
    }
}

fn failed(why: &str) -> Exit {
    let line =
        if terminal::log_is_json() { terminal::json_line(Level::ERROR, why, &[]) } else { format!("exeat: {why}") };
    terminal::say_within(BLOCKING_TIMEOUT, line);
    Exit::Failed
}

//! `exeat serve`: the daemon.

use std::path::Path;
use std::time::Duration;

use clap::Args;
use futures_util::future::OptionFuture;
use rustix::process::Signal;
use tokio::signal::unix::{SignalKind, signal};
use tracing::Level;

use super::{Exit, harden, paths, systemd, terminal};
use crate::daemon::Daemon;
use crate::daemon::reload::Reloaded;
use crate::policy::compile::Problem;

/// Maximum time that threads have at the end to finish what they read or write.
const BLOCKING_TIMEOUT: Duration = Duration::from_secs(1);

/// Flags of `exeat serve`.
#[derive(Args)]
pub(super) struct ServeArgs {
    /// Do not confine the process (seccomp, Landlock), on kernels and file systems that do not support it
    #[arg(long)]
    no_confine: bool,
}

pub(super) fn run(config: Option<&Path>, args: &ServeArgs) -> Exit {
    // Written to the end of the process, by a thread of its own: a full pipe must not stop the daemon.
    let _log = terminal::log_without_waiting("info");
    harden::disable_core_dumps();
    let file = paths::config_file(config);
    let loaded = match &file {
        Some(file) => file.load(),
        None => paths::load(None),
    };
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(problems) => {
            report(config, &problems);
            return Exit::Usage;
        }
    };
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    harden::raise_descriptor_limit();
    if args.no_confine {
        tracing::warn!("the process is not confined, because of --no-confine");
    } else {
        harden::confine(&loaded.settings, config);
    }
    let runtime = match super::runtime() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error),
    };
    let exit = runtime.block_on(async {
        if let Err(error) = fail_writes_over_file_size_limit() {
            return failed(&error);
        }
        let inherited = match systemd::inherited() {
            Ok(inherited) => inherited,
            Err(error) => return failed(&error),
        };
        match Daemon::start_on(inherited, loaded.settings, loaded.policy, file).await {
            Ok(daemon) => run_until_stopped(daemon).await,
            Err(error) => failed(&error),
        }
    });
    // A thread may wait for a file system that hangs.
    runtime.shutdown_timeout(BLOCKING_TIMEOUT);
    exit
}

/// Handles the signal that ends a process whose file exceeds the size limit (`RLIMIT_FSIZE`). The write fails then, and
/// requests are refused while the log cannot be written.
fn fail_writes_over_file_size_limit() -> std::io::Result<()> {
    // The handler stays installed until the process ends.
    signal(SignalKind::from_raw(Signal::XFSZ.as_raw())).map(drop)
}

async fn run_until_stopped(daemon: Daemon) -> Exit {
    let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()), signal(SignalKind::hangup()));
    let (Ok(mut terminate), Ok(mut interrupt), Ok(mut hangup)) = signals else {
        return failed(&"signals cannot be handled");
    };
    let status = ready_line(&daemon);
    say_ready(&daemon, &status);
    systemd::ready(&status);
    let mut reload = None;
    loop {
        tokio::select! {
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
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    drop(reload);
    systemd::stopping();
    tracing::info!("draining");
    let abort = daemon.abort_token();
    let second_signal = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        abort.cancel();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        drained = daemon.shutdown() => if drained { Exit::Done } else { failed(&"some requests were aborted") },
        () = second_signal => Exit::Failed,
    }
}

/// Returns the line that reports the addresses of the listeners.
fn ready_line(daemon: &Daemon) -> String {
    let proxy = daemon.proxy().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let admin = daemon.admin().map_or_else(|| "off".to_owned(), |address| address.to_string());
    format!("exeat: ready; proxy on {proxy}; admin on {admin}")
}

/// Writes the addresses to the log, whatever its level.
fn say_ready(daemon: &Daemon, status: &str) {
    if !terminal::log_is_json() {
        return terminal::say(status);
    }
    let proxy: Vec<String> = daemon.proxy().iter().map(ToString::to_string).collect();
    let admin = daemon.admin().map(ToString::to_string);
    let message = status.strip_prefix("exeat: ").unwrap_or(status);
    terminal::say(terminal::json_line(Level::INFO, message, &[("proxy", proxy.into()), ("admin", admin.into())]));
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

fn failed(why: &dyn std::fmt::Display) -> Exit {
    let why = why.to_string();
    let line =
        if terminal::log_is_json() { terminal::json_line(Level::ERROR, &why, &[]) } else { format!("exeat: {why}") };
    terminal::say_within(BLOCKING_TIMEOUT, line);
    Exit::Failed
}

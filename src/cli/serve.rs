//! `exeat serve`: the daemon.

use std::path::Path;

use tokio::signal::unix::{SignalKind, signal};

use super::{Exit, sources, terminal};
use crate::flow::daemon::Daemon;

pub(super) fn run(config: Option<&Path>) -> Exit {
    terminal::log("info");
    harden();
    let file = sources::file(config);
    let loaded = match &file {
        Some(file) => file.load(),
        None => sources::load(None),
    };
    let loaded = match loaded {
        Ok(loaded) => loaded,
        Err(problems) => {
            sources::say_problems(config, &problems);
            return Exit::Usage;
        }
    };
    for warning in &loaded.warnings {
        tracing::warn!("{warning}");
    }
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error),
    };
    runtime.block_on(async {
        match Daemon::start(loaded.settings, loaded.policy, file).await {
            Ok(daemon) => until_stopped(daemon).await,
            Err(error) => failed(&error),
        }
    })
}

async fn until_stopped(daemon: Daemon) -> Exit {
    let signals = (signal(SignalKind::terminate()), signal(SignalKind::interrupt()), signal(SignalKind::hangup()));
    let (Ok(mut terminate), Ok(mut interrupt), Ok(mut hangup)) = signals else {
        return failed(&"signals cannot be handled");
    };
    terminal::say(ready(&daemon));
    loop {
        tokio::select! {
            _ = hangup.recv() => {
                if daemon.reload().await.is_none() {
                    tracing::warn!("there is no configuration file to read again");
                }
            }
            _ = terminate.recv() => break,
            _ = interrupt.recv() => break,
        }
    }
    tracing::info!("draining");
    let breaker = daemon.breaker();
    let impatience = async {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
        breaker.cancel();
        std::future::pending::<()>().await;
    };
    tokio::select! {
        drained = daemon.shutdown() => if drained { Exit::Done } else { failed(&"some requests had to be broken off") },
        () = impatience => Exit::Failed,
    }
}

/// The one line that says that it listens, and where.
fn ready(daemon: &Daemon) -> String {
    let proxy = daemon.proxy().iter().map(ToString::to_string).collect::<Vec<_>>().join(", ");
    let admin = daemon.admin().map_or_else(|| "off".to_owned(), |address| address.to_string());
    format!("exeat: ready; proxy on {proxy}; admin on {admin}")
}

fn failed(why: &dyn std::fmt::Display) -> Exit {
    terminal::say(format_args!("exeat: {why}"));
    Exit::Failed
}

/// What the process holds must not end up in a core file.
fn harden() {
    use rustix::process::{Resource, Rlimit, setrlimit};
    if let Err(error) = setrlimit(Resource::Core, Rlimit { current: Some(0), maximum: Some(0) }) {
        tracing::warn!(%error, "the process could be dumped");
    }
}

//! `exeat health`: asks the running daemon whether it is ready, for health checks in containers, which have no shell.

use std::path::Path;
use std::time::Duration;

use http::StatusCode;

use super::Exit;
use super::admin_client::{AdminClient, AdminRequest};
use super::terminal::{clean, print, say};

/// The timeout for connecting and for the answer. The daemon itself waits half a second for its log.
const TIMEOUT: Duration = Duration::from_secs(5);

/// The paths of the admin listener, and the first lines of the answers by a healthy daemon.
const READY: (&str, &str) = ("/readyz", "ready\n");
const LIVE: (&str, &str) = ("/healthz", "ok\n");

/// Prints the state of the daemon, or with `live` only whether it answers. Returns [`Exit::Failed`] if it is not ready or
/// cannot be asked, whatever the reason, because container engines reserve other codes.
pub(super) fn run(config: Option<&Path>, admin: Option<&str>, live: bool) -> Exit {
    let Ok(client) = AdminClient::without_token(config, admin) else { return Exit::Failed };
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            say(format_args!("exeat: {error}"));
            return Exit::Failed;
        }
    };
    let (path, healthy) = if live { LIVE } else { READY };
    let state = runtime.block_on(client.text(&AdminRequest::get(path), TIMEOUT));
    match state {
        Ok((StatusCode::OK, state)) if state.starts_with(healthy) => {
            state.lines().for_each(|line| print(format_args!("{}\n", clean(line))));
            Exit::Done
        }
        Ok((StatusCode::SERVICE_UNAVAILABLE, state)) => {
            say(format_args!("exeat: not ready: {}", clean(state.trim_end())));
            Exit::Failed
        }
        Ok(_) => {
            say(format_args!("exeat: {}", client.not_exeat()));
            Exit::Failed
        }
        Err(error) => {
            say(format_args!("exeat: {error}"));
            Exit::Failed
        }
    }
}

//! `exeat run` on systems other than Linux, where it is refused.

use std::ffi::OsString;
use std::path::Path;
use std::process::ExitCode;

use clap::Args;

use super::Exit;
use super::terminal::say;

/// Flags of `exeat run`.
#[derive(Args)]
pub(super) struct RunArgs {
    /// The flags, the command and its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, value_name = "CMD")]
    command: Vec<OsString>,
}

/// Refuses to run the command: its environment and memory would be open to it, and so would the keys.
pub(super) fn run(_: Option<&Path>, args: RunArgs) -> ExitCode {
    drop(args.command);
    say("exeat: exeat run needs Linux, which keeps the keys from the command; the command has not been run");
    Exit::Failed.into()
}

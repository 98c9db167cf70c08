//! `exeat completions` and `exeat man`: shell completions and manual pages, generated from the flags.

use std::io;

use clap::{Args, Command, ValueEnum};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use super::Exit;
use super::terminal::{clean, print, say};

/// The shells for which completions are generated.
#[derive(Clone, Copy, ValueEnum)]
pub(super) enum CompletionShell {
    Bash,
    Fish,
    Zsh,
}

/// Flags of `exeat man`.
#[derive(Args)]
pub(super) struct ManArgs {
    /// The command, such as `serve` or `secret set` [default: the overview]
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

pub(super) fn completions(mut cli: Command, shell: CompletionShell) -> Exit {
    use clap_complete::{Shell, generate};
    let shell = match shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Fish => Shell::Fish,
        CompletionShell::Zsh => Shell::Zsh,
    };
    let mut script = Vec::new();
    generate(shell, &mut cli, "exeat", &mut script);
    print(String::from_utf8_lossy(&script));
    Exit::Done
}

pub(super) fn man(cli: Command, args: &ManArgs) -> Exit {
    // `help` has no page of its own.
    let mut root = cli.disable_help_subcommand(true);
    // Sets the full names of the subcommands and adds the global flags to them.
    root.build();
    let mut command = &root;
    for name in &args.command {
        let Some(inner) = command.find_subcommand(name).filter(|inner| !inner.is_hide_set()) else {
            let shown = command.get_subcommands().filter(|inner| !inner.is_hide_set());
            let known = shown.map(Command::get_name).collect::<Vec<_>>().join(", ");
            let known = if known.is_empty() { "none".to_owned() } else { known };
            let parent = command.get_bin_name().unwrap_or("exeat");
            say(format_args!("exeat: {parent} has no command {:?}; it has: {known}", clean(name)));
            return Exit::Usage;
        };
        command = inner;
    }
    match page(command.clone()) {
        Ok(page) => print(String::from_utf8_lossy(&page)),
        Err(error) => {
            say(format_args!("exeat: {error}"));
            return Exit::Failed;
        }
    }
    Exit::Done
}

fn page(mut command: Command) -> io::Result<Vec<u8>> {
    let usage = command.render_usage().to_string();
    // The usage line of the help, which shows the value of each flag.
    let command = command.override_usage(usage.trim_start_matches("Usage: ").to_owned());
    let title = command.get_display_name().unwrap_or("exeat").to_uppercase();
    let version = format!("exeat {}", env!("CARGO_PKG_VERSION"));
    // A date would make builds differ. An empty field would shift the fields after it.
    let man = Man::new(command).title(title).date(" ").source(version).manual("exeat");
    let mut page = Vec::new();
    man.render(&mut page)?;
    let mut more = Roff::new();
    for (heading, rows) in EXTRA_SECTIONS {
        more.control("SH", [heading]);
        for (word, meaning) in rows {
            more.control("TP", []).text([bold(*word)]).text([roman(*meaning)]);
        }
    }
    more.to_writer(&mut page)?;
    Ok(page)
}

/// The sections that are the same for all commands.
const EXTRA_SECTIONS: [(&str, &[(&str, &str)]); 2] = [
    (
        "EXIT STATUS",
        &[
            ("0", "done"),
            ("1", "failed"),
            ("2", "usage or configuration"),
            ("3", "refused by policy (explain)"),
            (
                "any",
                "the status of the command that exeat run ran; 127 if it does not exist, 126 if it could not be \
                 started, 128+N if signal N ended it",
            ),
        ],
    ),
    (
        "ENVIRONMENT",
        &[
            ("EXEAT_CONFIG", "the configuration file, if -c is not given"),
            ("EXEAT_ADMIN", "the daemon's admin listener, if --admin is not given"),
            ("EXEAT_ADMIN_TOKEN", "the admin token, for the daemon and its clients"),
            ("EXEAT_LOG", "the log level on standard error, such as warn, info or debug"),
            ("STATE_DIRECTORY, XDG_STATE_HOME", "the state directory, if the configuration does not set it"),
        ],
    ),
];

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    /// The check includes conflicts between the flags of a command.
    #[test]
    fn the_flags_are_valid() {
        crate::cli::Cli::command().debug_assert();
    }
}

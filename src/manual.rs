//! Shell completions and manual pages of both programs, generated from their flags.

use std::io;

use clap::{Args, Command, ValueEnum};
use clap_mangen::Man;
use clap_mangen::roff::{Roff, bold, roman};

use crate::terminal::clean;

/// The shells for which completions are generated.
#[derive(Clone, Copy, ValueEnum)]
pub(crate) enum CompletionShell {
    Bash,
    Fish,
    Zsh,
}

/// The command of a manual page.
#[derive(Args)]
pub(crate) struct ManArgs {
    /// The command, such as `serve` or `pack check` [default: the overview]
    #[arg(value_name = "COMMAND")]
    command: Vec<String>,
}

/// A section of a manual page: its heading, and words with their meanings.
pub(crate) type Section = (&'static str, &'static [(&'static str, &'static str)]);

/// The error of a manual page.
#[derive(Debug, thiserror::Error)]
pub(crate) enum ManualError {
    /// There is no such command. The text names those that exist.
    #[error("{0}")]
    UnknownCommand(String),
    /// The page cannot be generated.
    #[error(transparent)]
    Io(#[from] io::Error),
}

/// Returns the completion script of a program.
pub(crate) fn completions(mut cli: Command, shell: CompletionShell) -> String {
    use clap_complete::{Shell, generate};
    let shell = match shell {
        CompletionShell::Bash => Shell::Bash,
        CompletionShell::Fish => Shell::Fish,
        CompletionShell::Zsh => Shell::Zsh,
    };
    let (name, mut script) = (cli.get_name().to_owned(), Vec::new());
    generate(shell, &mut cli, name, &mut script);
    String::from_utf8_lossy(&script).into_owned()
}

/// Returns a manual page of a program, with these sections at its end.
///
/// # Errors
/// [`ManualError`]
pub(crate) fn man(cli: Command, args: &ManArgs, sections: &[Section]) -> Result<String, ManualError> {
    let program = cli.get_name().to_owned();
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
            let parent = command.get_bin_name().unwrap_or(&program);
            let text = format!("{parent} has no command {:?}; it has: {known}", clean(name));
            return Err(ManualError::UnknownCommand(text));
        };
        command = inner;
    }
    Ok(page(command.clone(), &program, sections)?)
}

fn page(mut command: Command, program: &str, sections: &[Section]) -> io::Result<String> {
    let usage = command.render_usage().to_string();
    // The usage line of the help, which shows the value of each flag.
    let command = command.override_usage(usage.trim_start_matches("Usage: ").to_owned());
    let title = command.get_display_name().unwrap_or(program).to_uppercase();
    let version = format!("exeat {}", env!("CARGO_PKG_VERSION"));
    // A date would make builds differ. An empty field would shift the fields after it.
    let man = Man::new(command).title(title).date(" ").source(version).manual("exeat");
    let mut page = Vec::new();
    man.render(&mut page)?;
    let mut more = Roff::new();
    for (heading, rows) in sections {
        more.control("SH", [*heading]);
        for (word, meaning) in *rows {
            more.control("TP", []).text([bold(*word)]).text([roman(*meaning)]);
        }
    }
    more.to_writer(&mut page)?;
    Ok(String::from_utf8_lossy(&page).into_owned())
}

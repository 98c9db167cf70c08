//! A command of the dangerous shell, as the client shows it to the proxy.

use serde::{Deserialize, Serialize};

use super::name::is_plain;

/// The name of the dangerous shell among the calls of an execution.
pub const SHELL_TOOL: &str = "dangerous_shell";
/// Maximum size of a command, in bytes: as much as an approval shows.
pub const MAX_COMMAND: usize = 8_000;
/// Maximum size of a path, in bytes.
const MAX_PATH: usize = 4_096;
/// Maximum number of directories that a command can read.
const MAX_READ_ONLY: usize = 64;
/// Maximum time of a command, in seconds.
const MAX_TIMEOUT: u32 = 3_600;

/// A command, and where the client will run it.
#[derive(Clone, Debug, Deserialize, PartialEq, Eq, Serialize)]
#[serde(deny_unknown_fields)]
pub struct ShellCommand {
    /// The text that the shell runs.
    pub command: String,
    /// The name of the sandbox.
    pub sandbox: String,
    /// The directory that is its workspace.
    pub directory: String,
    /// Whether it reaches the network, through the proxy.
    pub network: bool,
    /// Its time-out, in seconds.
    pub timeout_s: u32,
    /// Directories of the machine that it can read, besides those of the system.
    pub read_only: Vec<String>,
    /// The SHA-256 of the signed statement about the sandbox, in hex.
    pub statement: String,
}

impl ShellCommand {
    /// Returns all texts.
    pub fn texts(&self) -> impl Iterator<Item = &String> {
        [&self.command, &self.sandbox, &self.directory, &self.statement].into_iter().chain(&self.read_only)
    }

    /// Returns whether it can be shown to a person as it will be run.
    #[must_use]
    pub fn is_valid(&self) -> bool {
        let is_path =
            |path: &String| path.starts_with('/') && path.len() <= MAX_PATH && !path.chars().any(char::is_control);
        is_readable(&self.command)
            && is_plain(&self.sandbox)
            && is_path(&self.directory)
            && (1..=MAX_TIMEOUT).contains(&self.timeout_s)
            && self.read_only.len() <= MAX_READ_ONLY
            && self.read_only.iter().all(is_path)
            && self.statement.len() == 64
            && self.statement.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
    }
}

/// Returns whether a command can be read as it is: printable ASCII and line feeds, without blanks at the ends of lines. Other
/// characters can look like these or hide text; a tab looks like blanks; and a blank behind a backslash, or behind the delimiter of a
/// here-document, is not seen.
#[must_use]
pub fn is_readable(command: &str) -> bool {
    let is_shown = |byte: u8| matches!(byte, b' '..=b'~' | b'\n');
    (1..=MAX_COMMAND).contains(&command.len())
        && command.bytes().all(is_shown)
        && command.bytes().any(|byte| byte.is_ascii_graphic())
        && !command.split('\n').any(|line| line.ends_with(' '))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Returns a valid command.
    pub(crate) fn command() -> ShellCommand {
        ShellCommand {
            command: "ls -l | wc\n".to_owned(),
            sandbox: "work".to_owned(),
            directory: "/home/a".to_owned(),
            network: false,
            timeout_s: 60,
            read_only: vec!["/opt/a".to_owned()],
            statement: "0".repeat(64),
        }
    }

    #[test]
    fn only_text_that_looks_like_what_it_is_can_be_approved() {
        for text in ["ls", "a b\n  c\n", "~ !", "\n\nls"] {
            assert!(is_readable(text), "{text:?}");
        }
        let long = "x".repeat(MAX_COMMAND + 1);
        for text in [
            "",
            " ",
            "\n",
            "a\r\nb",
            "a\tb",
            "echo \\ \nrm x",
            "ls ",
            "a\u{0}",
            "a\u{1b}[2K",
            "a\u{7f}",
            "\u{430}",
            "a\u{a0}b",
            "a\u{202e}b",
            "a\u{200b}",
            &long,
        ] {
            assert!(!is_readable(text), "{text:?}");
        }
    }

    #[test]
    fn what_cannot_be_shown_is_invalid() {
        assert!(command().is_valid());
        let changes: [fn(&mut ShellCommand); 9] = [
            |command| command.command.push('\r'),
            |command| command.sandbox = "a b".to_owned(),
            |command| command.directory = "home".to_owned(),
            |command| command.directory.push('\n'),
            |command| command.timeout_s = 0,
            |command| command.timeout_s = MAX_TIMEOUT + 1,
            |command| command.read_only.push(String::new()),
            |command| command.read_only = vec!["/a".to_owned(); MAX_READ_ONLY + 1],
            |command| command.statement = "A".repeat(64),
        ];
        for (at, change) in changes.into_iter().enumerate() {
            let mut changed = command();
            change(&mut changed);
            assert!(!changed.is_valid(), "{at}");
        }
    }
}

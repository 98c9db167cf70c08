//! Commands whose output is the value of a credential: `exec:["PROGRAM", "ARGUMENT", …]`.

use std::fmt;
use std::path::Path;
use std::time::Duration;

use super::aws::FetchedAwsKey;
use super::held_secret::PartsHash;

/// The scheme of a command.
pub const SCHEME: &str = "exec:";
/// The form of such a source.
pub const FORM: &str =
    "'exec:[\"/usr/bin/PROGRAM\", \"ARGUMENT\"]', perhaps with \"#MEMBER\" of the JSON that it prints";
/// The longest source, in bytes.
const MAX_SOURCE: usize = 4096;
/// The most arguments, with the program.
const MAX_ARGUMENTS: usize = 64;

/// A command whose output is a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CommandSource {
    /// The program by its whole path, and its arguments.
    pub command: Vec<String>,
    /// The member of the JSON object in the output that is the value. `None` for the whole output.
    pub member: Option<String>,
}

/// A value that a command prints, and how long it is kept.
#[derive(Clone)]
pub struct CommandRead {
    /// The command.
    pub source: CommandSource,
    /// The rest of the key, if the value is the secret of one of AWS.
    pub aws_key: Option<FetchedAwsKey>,
    /// The value may have several lines.
    pub is_document: bool,
    /// The time after which it is run again.
    pub refresh: Duration,
    /// How much longer a value is used while the command fails.
    pub max_stale: Duration,
}

impl CommandSource {
    /// Parses a source. `None` if the text has not the scheme of one.
    ///
    /// # Errors
    /// The problem, if the rest is not a command.
    #[must_use]
    pub fn parse(text: &str) -> Option<Result<Self, &'static str>> {
        let rest = text.strip_prefix(SCHEME)?;
        Some(if text.len() > MAX_SOURCE { Err("too long") } else { Self::of(rest) })
    }

    fn of(rest: &str) -> Result<Self, &'static str> {
        const NO_LIST: &str = "not a list of texts in JSON";
        let mut lists = serde_json::Deserializer::from_str(rest).into_iter::<Vec<String>>();
        let command = lists.next().and_then(Result::ok).ok_or(NO_LIST)?;
        let member = match rest.get(lists.byte_offset()..).ok_or(NO_LIST)? {
            "" => None,
            rest => Some(rest.strip_prefix('#').ok_or(NO_LIST)?.to_owned()),
        };
        let program = command.first().ok_or("no program")?;
        if !Path::new(program).is_absolute() {
            return Err("the program is not named by its whole path");
        }
        if command.len() > MAX_ARGUMENTS || command.iter().any(|text| text.contains('\0')) {
            return Err("too many arguments, or one with a null character");
        }
        if member.as_ref().is_some_and(|name| name.is_empty() || name.chars().any(char::is_control)) {
            return Err("no name of a member");
        }
        Ok(Self { command, member })
    }

    /// Returns the program.
    #[must_use]
    pub fn program(&self) -> &str {
        self.command.first().map_or("", String::as_str)
    }

    /// Returns the whole command in one line, for operators.
    #[must_use]
    pub fn in_full(&self) -> String {
        let list = serde_json::to_string(&self.command).unwrap_or_default();
        let member = self.member.as_ref().map(|name| format!("#{name}")).unwrap_or_default();
        format!("{SCHEME}{list}{member}")
    }
}

impl fmt::Display for CommandSource {
    /// Writes the program. Somebody could have written a secret into an argument.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let arguments = if self.command.len() > 1 { " …" } else { "" };
        write!(f, "{SCHEME}{}{arguments}", self.program())
    }
}

impl CommandRead {
    /// Adds everything that the value depends on.
    pub(super) fn add_to(&self, hash: &mut PartsHash) {
        hash.add_all([self.source.in_full().as_str()]);
        self.aws_key.iter().for_each(|key| key.add_to(hash));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn commands_are_lists_of_texts() {
        let parse = |text: &str| CommandSource::parse(text).and_then(Result::ok);
        let rows = [
            (r##"exec:["/usr/bin/op", "read", "op://a/b]#c"]"##, 3, None, "exec:/usr/bin/op …"),
            (r##"exec:["/bin/token"]"##, 1, None, "exec:/bin/token"),
            (r##"exec:[ "/bin/token" ,"a b" ]#access_token"##, 2, Some("access_token"), "exec:/bin/token …"),
        ];
        for (text, count, member, shown) in rows {
            let command = parse(text).unwrap();
            assert_eq!((command.command.len(), command.member.as_deref()), (count, member), "{text}");
            assert_eq!(command.to_string(), shown);
            assert_eq!(parse(&command.in_full()), Some(command));
        }
        let bad = [
            "exec:",
            "exec:/usr/bin/op",
            "exec:[]",
            r#"exec:["op"]"#,
            r#"exec:["./op"]"#,
            r#"exec:["/bin/a", 1]"#,
            r#"exec:["/bin/a"] x"#,
            r##"exec:["/bin/a"]#"##,
            r#"exec:["/bin/a", "\u0000"]"#,
            &format!("exec:[\"/bin/a\", \"{}\"]", "x".repeat(5000)),
            &format!("exec:[\"/bin/a\"{}]", ", \"x\"".repeat(64)),
        ];
        for text in bad {
            assert!(matches!(CommandSource::parse(text), Some(Err(_))), "{text}");
        }
        assert!(CommandSource::parse("env:KEY").is_none());
    }
}

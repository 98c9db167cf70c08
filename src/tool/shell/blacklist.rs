//! Patterns that no argument of a script contains, whatever its verb does with it.

/// The patterns of every sandbox: commands that destroy, devices, and files that hold accounts and keys. They are a last line: no verb
/// runs an argument as a command.
const DEFAULT: [&str; 36] = [
    "rm -rf /",
    "rm -fr /",
    "rm -rf ~",
    "rm -rf *",
    "--no-preserve-root",
    "mkfs.",
    "dd if=",
    "shred -",
    "wipefs",
    "diskpart",
    "format c:",
    ":(){",
    "/dev/sda",
    "/dev/nvme",
    "/dev/mem",
    "\\\\.\\physicaldrive",
    "/etc/shadow",
    "/etc/sudoers",
    "/proc/self",
    "/proc/1/",
    "/.ssh/id_",
    "/.aws/credentials",
    "sudo ",
    "chmod 777 /",
    "chown -r root",
    "kill -9 -1",
    "killall -9",
    "init 0",
    "shutdown -",
    "reboot -f",
    "poweroff",
    "drop database",
    "drop table",
    "truncate table",
    "xp_cmdshell",
    "reg delete",
];
const MIN_LENGTH: usize = 2;

/// The patterns of a sandbox. ASCII case does not matter.
pub(super) struct Blacklist {
    /// In lower case.
    patterns: Vec<String>,
}

/// The operator's pattern is shorter than two bytes, and would refuse nearly everything.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the pattern {0:?} is too short; a pattern has at least {MIN_LENGTH} bytes")]
pub(super) struct ShortPattern(String);

impl Default for Blacklist {
    fn default() -> Self {
        Self::of(DEFAULT.iter().map(|pattern| (*pattern).to_owned()).collect())
    }
}

impl Blacklist {
    /// Returns the default patterns and those of the operator.
    ///
    /// # Errors
    /// [`ShortPattern`].
    pub(super) fn new(more: &[String]) -> Result<Self, ShortPattern> {
        if let Some(short) = more.iter().find(|pattern| pattern.len() < MIN_LENGTH) {
            return Err(ShortPattern(short.clone()));
        }
        Ok(Self::of(DEFAULT.iter().map(|pattern| (*pattern).to_owned()).chain(more.iter().cloned()).collect()))
    }

    fn of(patterns: Vec<String>) -> Self {
        let patterns: Vec<String> = patterns.into_iter().map(|pattern| pattern.to_ascii_lowercase()).collect();
        Self { patterns }
    }

    /// Returns the pattern in a text.
    pub(super) fn find(&self, text: &str) -> Option<&str> {
        let text = text.to_ascii_lowercase();
        self.patterns
            .iter()
            .map(String::as_str)
            .find(|pattern| memchr::memmem::find(text.as_bytes(), pattern.as_bytes()).is_some())
    }

    pub(super) fn patterns(&self) -> &[String] {
        &self.patterns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn patterns_are_found_anywhere_and_in_any_case() {
        let list = Blacklist::new(&["Project-X".to_owned()]).unwrap();
        assert_eq!(list.find("please SUDO  reboot"), Some("sudo "));
        assert_eq!(list.find("about project-x."), Some("project-x"));
        assert_eq!(list.find("pseudonym, formatted text"), None);
        for pattern in DEFAULT {
            assert!(list.find(&format!("x{pattern}y")).is_some(), "{pattern}");
        }
        assert!(Blacklist::new(&["x".to_owned()]).is_err());
    }
}

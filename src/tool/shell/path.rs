//! Paths of a script: beneath the workspace, and the names that no script writes.

use std::fmt;

/// The workspace in scripts. The name of the directory on the machine is not disclosed.
pub(super) const WORKSPACE: &str = "/workspace";
/// The beginning of the names of files that are not complete yet. One that is left over can be deleted.
pub(super) const PARTIAL: &str = ".exeat-partial-";
const MAX_LENGTH: usize = 4096;
const MAX_NAME: usize = 255;

/// File names that build tools and others run or load by themselves, in lower case.
const BLOCKED_NAMES: [&str; 31] = [
    ".bash_login",
    ".bash_profile",
    ".bashrc",
    ".envrc",
    ".gitattributes",
    ".gitconfig",
    ".gitmodules",
    ".npmrc",
    ".profile",
    ".yarnrc",
    ".yarnrc.yml",
    ".zshenv",
    ".zshrc",
    "build.rs",
    "cargo.toml",
    "cmakelists.txt",
    "containerfile",
    "directory.build.props",
    "directory.build.targets",
    "directory.packages.props",
    "dockerfile",
    "gnumakefile",
    "head",
    "justfile",
    "makefile",
    "nuget.config",
    "package.json",
    "pyproject.toml",
    "rakefile",
    "setup.cfg",
    "setup.py",
];
/// Extensions of programs, libraries and project files, in lower case.
const BLOCKED_EXTENSIONS: [&str; 34] = [
    "appimage", "bin", "cjs", "class", "com", "csproj", "dll", "dylib", "elf", "exe", "fsproj", "jar", "js", "jse",
    "mjs", "msh", "msi", "msp", "node", "proj", "props", "pth", "pyc", "rs", "run", "scr", "sln", "so", "targets",
    "vbe", "vbproj", "vbs", "wsf", "wsh",
];

/// The access of an operation to a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Access {
    Read,
    /// It creates a directory, or removes something.
    Change,
    /// It writes a file, which then has this name.
    Write,
}

/// A path beneath the workspace, in its normal form: names with one `/` between, none of them `.` or `..`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct WorkspacePath(String);

/// The reason why a path is not one of a script.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum PathError {
    #[error("a path is not empty")]
    Empty,
    #[error("a path has at most {MAX_LENGTH} bytes, and each name at most {MAX_NAME}")]
    TooLong,
    #[error("a path contains no control characters")]
    Control,
    #[error("absolute paths lead out of the workspace; write $WORKSPACE/… or a relative path")]
    Absolute,
    #[error("'..' is not permitted in a path")]
    Parent,
    #[error("backslashes are not permitted in a path")]
    Backslash,
    #[error("the workspace itself cannot be written, moved or deleted")]
    Root,
    #[error("git's own directories (.git, NAME.git) are written by git alone")]
    Git,
    #[error("files of this name are run or loaded by other programs, so no script writes them")]
    BlockedName,
    #[error("files whose names begin with '{PARTIAL}' are not complete; they can only be deleted")]
    Partial,
    #[error("files with this extension are run or loaded by other programs, so no script writes them")]
    BlockedExtension,
}

impl WorkspacePath {
    /// Parses a path: `$WORKSPACE`, expanded, or relative to it.
    pub(super) fn parse(text: &str) -> Result<Self, PathError> {
        if text.is_empty() {
            return Err(PathError::Empty);
        }
        if text.len() > MAX_LENGTH {
            return Err(PathError::TooLong);
        }
        if text.chars().any(char::is_control) {
            return Err(PathError::Control);
        }
        if text.contains('\\') {
            return Err(PathError::Backslash);
        }
        let relative = match text.strip_prefix(WORKSPACE) {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => rest.trim_start_matches('/'),
            _ if text.starts_with('/') => return Err(PathError::Absolute),
            _ => text,
        };
        let names: Vec<&str> = relative.split('/').filter(|name| !matches!(*name, "" | ".")).collect();
        if names.contains(&"..") {
            return Err(PathError::Parent);
        }
        if names.iter().any(|name| name.len() > MAX_NAME) {
            return Err(PathError::TooLong);
        }
        Ok(Self(names.join("/")))
    }

    /// Checks that a script may do this here.
    pub(super) fn check(&self, access: Access) -> Result<(), PathError> {
        if access == Access::Read {
            return Ok(());
        }
        if self.is_root() {
            return Err(PathError::Root);
        }
        let names: Vec<String> = self.0.split('/').map(folded_name).collect();
        if names.iter().any(|name| name.ends_with(".git") || name.starts_with("git~")) {
            return Err(PathError::Git);
        }
        if access == Access::Change {
            return Ok(());
        }
        let name = names.last().map(String::as_str).unwrap_or_default();
        if name.starts_with(PARTIAL) {
            return Err(PathError::Partial);
        }
        if BLOCKED_NAMES.contains(&name) {
            return Err(PathError::BlockedName);
        }
        match name.rsplit_once('.') {
            Some((_, extension)) if BLOCKED_EXTENSIONS.contains(&extension) => Err(PathError::BlockedExtension),
            _ => Ok(()),
        }
    }

    pub(super) fn is_root(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the path relative to the workspace, which is empty for the workspace itself.
    pub(super) fn as_str(&self) -> &str {
        &self.0
    }

    /// Returns the path of an entry of this directory.
    pub(super) fn join(&self, name: &str) -> Self {
        if self.is_root() { Self(name.to_owned()) } else { Self(format!("{}/{name}", self.0)) }
    }

    /// Returns the path as file systems may compare it.
    pub(super) fn folded(&self) -> String {
        self.0.split('/').map(folded_name).collect::<Vec<_>>().join("/")
    }

    /// Returns the directory that it is in, and its name. The workspace has none.
    pub(super) fn split(&self) -> Option<(Self, &str)> {
        if self.is_root() {
            return None;
        }
        let (parent, name) = self.0.rsplit_once('/').unwrap_or(("", &self.0));
        Some((Self(parent.to_owned()), name))
    }
}

/// Returns a name as file systems compare it that ignore case, trailing dots and blanks, invisible characters (HFS+), or what is after a
/// colon (NTFS).
fn folded_name(name: &str) -> String {
    let before = name.split(':').next().unwrap_or_default();
    let visible = before.chars().filter(|c| !is_ignorable(*c));
    let mut folded = String::with_capacity(before.len());
    for c in visible {
        match c {
            'ſ' => folded.push('s'),
            '\u{fb00}' => folded.push_str("ff"),
            '\u{fb01}' => folded.push_str("fi"),
            '\u{fb02}' => folded.push_str("fl"),
            '\u{fb03}' => folded.push_str("ffi"),
            '\u{fb04}' => folded.push_str("ffl"),
            '\u{fb05}' | '\u{fb06}' => folded.push_str("st"),
            c => folded.extend(c.to_lowercase()),
        }
    }
    folded.truncate(folded.trim_end_matches(['.', ' ']).len());
    folded
}

/// Returns whether file systems may ignore a character (Unicode's Default_Ignorable_Code_Point).
fn is_ignorable(c: char) -> bool {
    matches!(
        c,
        '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}' | '\u{180b}'..='\u{180f}'
            | '\u{200b}'..='\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{3164}'
            | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff0}'..='\u{fff8}' | '\u{1bca0}'..='\u{1bca3}'
            | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}'
    )
}

impl fmt::Display for WorkspacePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_root() { "." } else { &self.0 })
    }
}

/// Returns the names and extensions that no script writes, for the manual.
pub(super) fn blocked() -> (&'static [&'static str], &'static [&'static str]) {
    (&BLOCKED_NAMES, &BLOCKED_EXTENSIONS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_have_one_form_beneath_the_workspace() {
        let rows = [
            ("a.txt", Ok("a.txt")),
            ("./a//b/./c", Ok("a/b/c")),
            ("/workspace", Ok("")),
            ("/workspace/a", Ok("a")),
            ("/workspace//a", Ok("a")),
            (".", Ok("")),
            ("a b/ä", Ok("a b/ä")),
            ("", Err(PathError::Empty)),
            ("/", Err(PathError::Absolute)),
            ("/etc/passwd", Err(PathError::Absolute)),
            ("/workspaces", Err(PathError::Absolute)),
            ("//workspace/a", Err(PathError::Absolute)),
            ("..", Err(PathError::Parent)),
            ("a/../b", Err(PathError::Parent)),
            ("/workspace/../etc", Err(PathError::Parent)),
            ("a\\..\\b", Err(PathError::Backslash)),
            ("a\0b", Err(PathError::Control)),
            ("a\nb", Err(PathError::Control)),
        ];
        for (text, want) in rows {
            assert_eq!(
                WorkspacePath::parse(text).as_ref().map(WorkspacePath::as_str),
                want.as_ref().map(|s| *s),
                "{text:?}"
            );
        }
        assert_eq!(WorkspacePath::parse(&"a/".repeat(3000)), Err(PathError::TooLong));
        assert_eq!(WorkspacePath::parse(&"a".repeat(256)), Err(PathError::TooLong));
    }

    #[test]
    fn names_that_others_run_are_not_written() {
        let rows = [
            ("a.txt", Ok(())),
            ("deploy.sh", Ok(())),
            ("a/.github/x.yml", Ok(())),
            (".gitignore", Ok(())),
            ("so", Ok(())),
            (".", Err(PathError::Root)),
            (".git/hooks/x", Err(PathError::Git)),
            ("a/.GIT/config", Err(PathError::Git)),
            (".git", Err(PathError::Git)),
            (".git./config", Err(PathError::Git)),
            (".git ", Err(PathError::Git)),
            ("repo.git/hooks/x", Err(PathError::Git)),
            (".gi\u{200c}t/config", Err(PathError::Git)),
            ("git~1/config", Err(PathError::Git)),
            (".git::$INDEX_ALLOCATION/x", Err(PathError::Git)),
            ("Makefile::$DATA", Err(PathError::BlockedName)),
            (".ba\u{17f}hrc", Err(PathError::BlockedName)),
            ("Make\u{fb01}le", Err(PathError::BlockedName)),
            (".gi\u{3164}t/x", Err(PathError::Git)),
            ("r/HEAD", Err(PathError::BlockedName)),
            ("a/Makefile", Err(PathError::BlockedName)),
            ("DOCKERFILE", Err(PathError::BlockedName)),
            ("a/.npmrc", Err(PathError::BlockedName)),
            ("x.SO", Err(PathError::BlockedExtension)),
            ("x.tar.exe.", Err(PathError::BlockedExtension)),
            (".js", Err(PathError::BlockedExtension)),
        ];
        for (text, want) in rows {
            assert_eq!(WorkspacePath::parse(text).unwrap().check(Access::Write), want, "{text:?}");
        }
    }

    #[test]
    fn files_of_these_names_are_removed_but_git_s_own_are_not() {
        let of = |text, access| WorkspacePath::parse(text).unwrap().check(access);
        assert_eq!(of("Makefile", Access::Change), Ok(()));
        assert_eq!(of("a/.git/config", Access::Change), Err(PathError::Git));
        assert_eq!(of(".", Access::Change), Err(PathError::Root));
        assert_eq!(of(".git/config", Access::Read), Ok(()));
    }

    #[test]
    fn a_path_is_split_and_joined() {
        let of = |text| WorkspacePath::parse(text).unwrap();
        assert_eq!(of("a/b").split(), Some((of("a"), "b")));
        assert_eq!(of(".").split(), None);
        assert_eq!(of(".").join("x"), of("x"));
    }
}

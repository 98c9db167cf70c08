//! Command templates: the commands that `ProcRun` may run, with holes for values of a type each.

use std::collections::BTreeMap;

use serde::Deserialize;

use super::git;
use crate::tool::messages;
use crate::tool::shell::path::{Access, WORKSPACE, WorkspacePath};

/// Maximum length of a text in a hole, in characters, and of a word.
const MAX_TEXT: usize = 200;
const MAX_WORD: usize = 128;
/// Maximum number of paths in a hole for several.
const MAX_PATHS: usize = 64;
/// Parts of a text that assign a credential, in upper case.
const ASSIGNMENTS: &[&str] = &["KEY=", "SECRET=", "TOKEN=", "PASSWORD=", "CREDENTIAL=", "BEARER "];

/// Programs that run what is in their arguments or their input, or that reach the network by themselves. No template has them.
const NEVER: &[&str] = &[
    "ash",
    "awk",
    "bash",
    "bun",
    "busybox",
    "bwrap",
    "chmod",
    "chown",
    "chroot",
    "cmd",
    "csh",
    "curl",
    "dash",
    "deno",
    "doas",
    "ed",
    "elvish",
    "emacs",
    "env",
    "expect",
    "find",
    "fish",
    "flock",
    "ftp",
    "gawk",
    "gdb",
    "gosu",
    "ionice",
    "irb",
    "julia",
    "ksh",
    "ld-linux",
    "less",
    "ltrace",
    "lua",
    "luajit",
    "man",
    "mawk",
    "mksh",
    "more",
    "nawk",
    "nc",
    "ncat",
    "netcat",
    "nice",
    "node",
    "nodejs",
    "nohup",
    "npx",
    "nsenter",
    "nu",
    "nvim",
    "osascript",
    "parallel",
    "perl",
    "php",
    "powershell",
    "pwsh",
    "pypy",
    "python",
    "rbash",
    "rlwrap",
    "rsh",
    "rsync",
    "ruby",
    "run-parts",
    "runuser",
    "scalar",
    "scp",
    "screen",
    "script",
    "sed",
    "setpriv",
    "setsid",
    "sftp",
    "sh",
    "socat",
    "ssh",
    "start-stop-daemon",
    "stdbuf",
    "strace",
    "su",
    "sudo",
    "taskset",
    "tclsh",
    "tcsh",
    "telnet",
    "time",
    "timeout",
    "tmux",
    "unshare",
    "vi",
    "view",
    "vim",
    "watch",
    "wget",
    "wish",
    "xargs",
    "yash",
    "zsh",
];

/// The dangerous shell.
pub(super) const SHELL: &str = "bash";

/// The words of lists, by name.
pub(in super::super) type Vocabularies = BTreeMap<String, Vec<String>>;

/// A template as the file has it.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct TemplateEntry {
    command: Vec<PartEntry>,
    /// The program reaches the network, through the proxy.
    #[serde(default)]
    network: bool,
    /// The primitive of packs that runs it, besides `exec`.
    #[serde(default, rename = "for")]
    purpose: Purpose,
}

/// The use of a command template. Scripts and `exec` use all of them.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(rename_all = "snake_case")]
pub(in crate::tool) enum Purpose {
    #[default]
    #[serde(skip)]
    Script,
    #[serde(skip)]
    Exec,
    RunTests,
    Build,
}

impl Purpose {
    /// Returns where a model finds the templates.
    pub(super) fn list(self) -> &'static str {
        match self {
            Self::Script => "Mk8Templates lists all",
            Self::Exec => "The description of exec lists all",
            Self::RunTests => "The description of run_tests lists all",
            Self::Build => "The description of build lists all",
        }
    }
}

#[derive(Deserialize)]
#[serde(
    untagged,
    expecting = "a text, or a hole with one of any, word, path, paths, output, branch, choice, flags and number"
)]
enum PartEntry {
    Word(String),
    Hole(Box<HoleEntry>),
}

/// A hole as the file has it. It has one type.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct HoleEntry {
    any: Option<String>,
    word: Option<String>,
    path: Option<String>,
    paths: Option<String>,
    output: Option<String>,
    branch: Option<String>,
    choice: Option<Vec<String>>,
    flags: Option<Vec<String>>,
    number: Option<(u32, u32)>,
    /// The list of words that `word` and `any` take.
    vocabulary: Option<String>,
    /// The hole may be left out, and follows this flag.
    option: Option<String>,
}

/// A command that may be run.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct CommandTemplate {
    pub(super) slots: Vec<Slot>,
    pub(super) network: bool,
    pub(super) purpose: Purpose,
}

/// One place of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Slot {
    /// This argument.
    Word(String),
    /// An argument that the program gets without being given in the script.
    Added(&'static str),
    /// Any of these, each once.
    Flags(Vec<String>),
    /// A flag and a value, or neither.
    Option(String, Kind),
    /// One value.
    Hole(String, Kind),
    /// One or more paths, at the end.
    Paths(String),
}

/// The type of a hole.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// Free text, or words of a list.
    Text(Option<String>),
    Word(Option<String>),
    /// A path that the program reads.
    Path,
    /// A path that the program may write, so names that others run are refused.
    Output,
    /// A directory in which git works: not one of git's own.
    Repository,
    /// The name of a tag, which is not that of a protected branch either.
    Tag,
    /// A branch that is not protected.
    Branch,
    /// The same, for a push: the program gets the refspec that leads to the branch of this name and to no other.
    PushedBranch,
    Choice(Vec<String>),
    Number(u32, u32),
}

/// The argument at which a command does not match a template. One whose value is wrong is nearer than one that is another word.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Mismatch {
    pub(super) at: usize,
    pub(super) is_value: bool,
    pub(super) why: String,
}

/// A command that matches a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(in super::super) struct Command {
    pub(super) program: String,
    pub(super) args: Vec<String>,
    /// Paths beneath the workspace that it writes to, or works in.
    pub(super) places: Vec<String>,
    pub(super) network: bool,
    /// It is a text for the shell, which a person has approved.
    pub(super) is_shell: bool,
}

impl Command {
    /// Returns the command of a shell that runs a text.
    pub(in super::super) fn shell(text: &str, network: bool) -> Self {
        let args = ["-c", "--", text].map(str::to_owned).into();
        Self { program: SHELL.to_owned(), args, places: Vec::new(), network, is_shell: true }
    }

    /// Returns the program and its arguments.
    #[cfg(target_os = "linux")]
    pub(in super::super) fn into_words(self) -> Vec<String> {
        [vec![self.program], self.args].concat()
    }
}

impl TemplateEntry {
    /// Compiles a template.
    ///
    /// # Errors
    /// The problem.
    pub(in super::super) fn compile(self, vocabularies: &Vocabularies) -> Result<CommandTemplate, String> {
        let count = self.command.len();
        let mut slots = Vec::new();
        for (at, part) in self.command.into_iter().enumerate() {
            slots.push(match part {
                PartEntry::Word(word) if word.is_empty() || word.chars().any(char::is_control) => {
                    return Err("a word is not empty, and has no control characters".to_owned());
                }
                PartEntry::Word(word) => Slot::Word(word),
                PartEntry::Hole(_) if at == 0 => return Err("the program is a word, not a hole".to_owned()),
                PartEntry::Hole(hole) => hole.compile(vocabularies, at.saturating_add(1) == count)?,
            });
        }
        let Some(Slot::Word(program)) = slots.first() else { return Err("a command is not empty".to_owned()) };
        check_program(program)?;
        if program == "git" {
            git::check_template(&mut slots)?;
        }
        Ok(CommandTemplate { slots, network: self.network, purpose: self.purpose })
    }
}

impl HoleEntry {
    fn compile(self, vocabularies: &Vocabularies, is_last: bool) -> Result<Slot, String> {
        let Self { any, word, path, paths, output, branch, choice, flags, number, vocabulary, option } = self;
        let is_flag = |flag: &String| flag.len() > 1 && flag.starts_with('-') && !flag.chars().any(char::is_whitespace);
        if let Some(name) = &vocabulary {
            if any.is_none() && word.is_none() {
                return Err("vocabulary belongs to any or word".to_owned());
            }
            if !vocabularies.contains_key(name) {
                return Err(format!("no vocabulary {name:?}"));
            }
        }
        let mut found: Vec<(String, Option<Kind>)> = Vec::new();
        found.extend(any.map(|name| (name, Some(Kind::Text(vocabulary.clone())))));
        found.extend(word.map(|name| (name, Some(Kind::Word(vocabulary.clone())))));
        found.extend(path.map(|name| (name, Some(Kind::Path))));
        found.extend(output.map(|name| (name, Some(Kind::Output))));
        found.extend(branch.map(|name| (name, Some(Kind::Branch))));
        found.extend(paths.map(|name| (name, None)));
        if let Some(values) = choice {
            if values.is_empty() {
                return Err("choice has at least one value".to_owned());
            }
            found.push((values.join("|"), Some(Kind::Choice(values))));
        }
        if let Some((least, most)) = number {
            if least > most {
                return Err("number is [least, most]".to_owned());
            }
            found.push((format!("{least}-{most}"), Some(Kind::Number(least, most))));
        }
        match (found.pop(), flags, option) {
            _ if !found.is_empty() => Err("a hole has one type".to_owned()),
            (None, Some(flags), None) if !flags.is_empty() && flags.iter().all(is_flag) => Ok(Slot::Flags(flags)),
            (None, Some(_), None) => Err("flags is a list of texts that begin with '-'".to_owned()),
            (Some((name, Some(kind))), None, None) => Ok(Slot::Hole(name, kind)),
            (Some((_, Some(kind))), None, Some(option)) if is_flag(&option) => Ok(Slot::Option(option, kind)),
            (Some((name, None)), None, None) if is_last => Ok(Slot::Paths(name)),
            (Some((_, None)), None, None) => Err("paths is the last part of a command".to_owned()),
            _ => Err(
                "a hole has one of any, word, path, paths, output, branch, choice, flags and number; option is a flag before one \
                 that takes a value"
                    .to_owned(),
            ),
        }
    }
}

/// Checks that a template may have this program.
///
/// # Errors
/// The reason why it may not.
pub(super) fn check_program(program: &str) -> Result<(), String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '+');
    if program.is_empty() || program.starts_with(['-', '.']) || !program.chars().all(is_part) {
        return Err(format!(
            "{:?} is not the name of a program; it is found in /usr/local/bin, /usr/bin and /bin",
            program
        ));
    }
    if is_never_run(program) {
        return Err(format!(
            "{program} is an interpreter, a network tool or a program that starts others, and is never run"
        ));
    }
    Ok(())
}

/// Returns whether no template may have this program, in whatever version: `python3.11` is `python`.
pub(super) fn is_never_run(program: &str) -> bool {
    let name = program.to_ascii_lowercase();
    let name = name.strip_suffix(".exe").unwrap_or(&name);
    let first = name.split('.').next().unwrap_or(name);
    let bare = first.trim_end_matches(|c: char| c.is_ascii_digit() || c == '-');
    [name, first, bare].iter().any(|name| NEVER.contains(name))
}

impl CommandTemplate {
    pub(super) fn program(&self) -> &str {
        match self.slots.first() {
            Some(Slot::Word(program)) => program,
            _ => "",
        }
    }

    /// Returns the words that a command always has.
    pub(super) fn words(&self) -> Vec<String> {
        let word = |slot: &Slot| if let Slot::Word(word) = slot { Some(word.clone()) } else { None };
        self.slots.iter().filter_map(word).collect()
    }

    /// Matches a command. The error is the first argument that does not match.
    pub(super) fn matched(&self, given: &[String], vocabularies: &Vocabularies) -> Result<Command, Mismatch> {
        let not_the_word = |at, why| Mismatch { at, is_value: false, why };
        let program = self.program();
        let mut command = Command {
            program: program.to_owned(),
            args: Vec::new(),
            places: Vec::new(),
            network: self.network,
            is_shell: false,
        };
        let mut at = 0_usize;
        let next = |at: usize| given.get(at).map(String::as_str);
        let take = |command: &mut Command, kind: &Kind, at: usize, value: &str| {
            let own = kind.checked(value, vocabularies).map_err(|why| Mismatch { at, is_value: true, why })?;
            if matches!(kind, Kind::Output | Kind::Repository) {
                command.places.push(own.clone());
            }
            // Git takes paths relative to its -C, and has a meaning for some beginnings.
            let is_path = matches!(kind, Kind::Path | Kind::Output | Kind::Repository);
            command.args.push(match own.as_str() {
                "." if is_path && program == "git" => WORKSPACE.to_owned(),
                path if is_path && program == "git" => format!("{WORKSPACE}/{path}"),
                _ => own,
            });
            Ok(())
        };
        for slot in &self.slots {
            match slot {
                Slot::Added(word) => {
                    // It may be given, too.
                    at = at.saturating_add(usize::from(*word == "--" && next(at) == Some("--")));
                    command.args.push((*word).to_owned());
                }
                Slot::Word(word) => {
                    if next(at) != Some(word) {
                        return Err(not_the_word(at, format!("expected {word}")));
                    }
                    command.args.push(word.clone());
                    at = at.saturating_add(1);
                }
                Slot::Flags(flags) => {
                    let mut left: Vec<&String> = flags.iter().collect();
                    while let Some(found) = next(at).and_then(|arg| left.iter().position(|flag| *flag == arg)) {
                        command.args.push(left.remove(found).clone());
                        at = at.saturating_add(1);
                    }
                }
                Slot::Option(flag, kind) => {
                    if next(at) == Some(flag) {
                        at = at.saturating_add(1);
                        let value = next(at).ok_or_else(|| not_the_word(at, format!("{flag} takes a value")))?;
                        command.args.push(flag.clone());
                        take(&mut command, kind, at, value)?;
                        at = at.saturating_add(1);
                    }
                }
                Slot::Hole(name, kind) => {
                    let value = next(at).ok_or_else(|| not_the_word(at, format!("{name} is missing")))?;
                    take(&mut command, kind, at, value)?;
                    at = at.saturating_add(1);
                }
                Slot::Paths(name) => {
                    let paths = given.get(at..).unwrap_or_default();
                    if paths.is_empty() || paths.len() > MAX_PATHS {
                        return Err(not_the_word(at, format!("{name} is 1 to {MAX_PATHS} paths")));
                    }
                    for path in paths {
                        take(&mut command, &Kind::Path, at, path)?;
                        at = at.saturating_add(1);
                    }
                }
            }
        }
        if at < given.len() {
            return Err(not_the_word(at, "expected nothing more".to_owned()));
        }
        command.args.remove(0);
        let place = git::place_of_clone(&command.args, command.places.first());
        command.places.extend(place.filter(|_| program == "git"));
        Ok(command)
    }

    pub(super) fn has_free_text(&self) -> bool {
        self.slots
            .iter()
            .any(|slot| matches!(slot, Slot::Hole(_, Kind::Text(None)) | Slot::Option(_, Kind::Text(None))))
    }

    /// Returns the template as it is shown to scripts.
    pub(super) fn shown(&self) -> String {
        let slot = |slot: &Slot| match slot {
            Slot::Word(word) => Some(word.clone()),
            Slot::Added(_) => None,
            Slot::Flags(flags) => Some(format!("[{}]...", flags.join("|"))),
            Slot::Option(flag, kind) => Some(format!("[{flag} {}]", kind.shown(""))),
            Slot::Hole(name, kind) => Some(kind.shown(name)),
            Slot::Paths(name) => Some(format!("<{name}: path>...")),
        };
        self.slots.iter().filter_map(slot).collect::<Vec<_>>().join(" ")
    }
}

impl Kind {
    fn shown(&self, name: &str) -> String {
        let named = |of: &str| if name.is_empty() { format!("<{of}>") } else { format!("<{name}: {of}>") };
        match self {
            Self::Text(None) => named("text"),
            Self::Text(Some(list)) => named(&format!("words of {list}")),
            Self::Word(None) => named("word"),
            Self::Word(Some(list)) => named(&format!("word of {list}")),
            Self::Path | Self::Repository => named("path"),
            Self::Tag => named("tag"),
            Self::Output => named("path to write"),
            Self::Branch | Self::PushedBranch => named("branch"),
            Self::Choice(values) => format!("<{}>", values.join("|")),
            Self::Number(least, most) => format!("<{least}-{most}>"),
        }
    }

    /// Returns the argument for the program, if the value is of this type. No value of a hole begins with `-`.
    fn checked(&self, value: &str, vocabularies: &Vocabularies) -> Result<String, String> {
        let shown = || messages::name(value);
        let list = |name: &String| vocabularies.get(name).map(Vec::as_slice).unwrap_or_default();
        let own = match self {
            Self::Choice(values) => {
                let known = values.iter().any(|one| one == value);
                return if known {
                    Ok(value.to_owned())
                } else {
                    Err(format!("expected one of {}", values.join(", ")))
                };
            }
            Self::Number(least, most) => {
                let number = value.parse::<u32>().ok().filter(|number| (least..=most).contains(&number));
                let number = number.filter(|_| value.bytes().all(|byte| byte.is_ascii_digit()));
                return number
                    .map(|number| number.to_string())
                    .ok_or_else(|| format!("expected a number from {least} to {most}"));
            }
            Self::Path | Self::Output | Self::Repository => {
                let path = WorkspacePath::parse(value).map_err(|error| error.to_string())?;
                let access = match self {
                    Self::Output => Access::Write,
                    Self::Repository if !path.is_root() => Access::Change,
                    _ => Access::Read,
                };
                path.check(access).map_err(|error| error.to_string())?;
                // Git has a meaning for a path that begins with ':'.
                let path = path.to_string();
                if path.starts_with([':', '@', '+', '~']) {
                    return Err(format!("'{}' begins with a character that programs have a meaning for", shown()));
                }
                path
            }
            Self::Tag => {
                git::check_tag(value)?;
                value.to_owned()
            }
            Self::Branch | Self::PushedBranch => {
                git::check_branch(value)?;
                match self {
                    Self::PushedBranch => format!("refs/heads/{value}:refs/heads/{value}"),
                    _ => value.to_owned(),
                }
            }
            Self::Word(vocabulary) => {
                let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
                if value.is_empty() || value.len() > MAX_WORD || !value.chars().all(is_part) || value.contains("..") {
                    return Err(format!("a word has 1 to {MAX_WORD} letters, digits, '.', '-' and '_'"));
                }
                if let Some(name) = vocabulary.as_ref().filter(|name| !list(name).iter().any(|word| word == value)) {
                    return Err(format!("'{}' is not in the vocabulary {name}", shown()));
                }
                value.to_owned()
            }
            Self::Text(vocabulary) => {
                if value.trim().is_empty() || value.chars().count() > MAX_TEXT || value.chars().any(char::is_control) {
                    return Err(format!("a text has 1 to {MAX_TEXT} characters, and none that control"));
                }
                let upper = value.to_ascii_uppercase();
                if ASSIGNMENTS.iter().any(|part| upper.contains(part)) {
                    return Err("a text assigns no keys, tokens or passwords".to_owned());
                }
                if let Some(name) = vocabulary {
                    let unknown = value.split_whitespace().find(|word| !list(name).iter().any(|known| known == word));
                    if let Some(word) = unknown {
                        return Err(format!("'{}' is not in the vocabulary {name}", messages::name(word)));
                    }
                }
                value.to_owned()
            }
        };
        if own.starts_with('-') {
            return Err(format!("'{}' begins with '-', as options do", shown()));
        }
        Ok(own)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn vocabularies() -> Vocabularies {
        [("commit".to_owned(), vec!["Fix".to_owned(), "build".to_owned()])].into()
    }

    fn template(command: &str) -> Result<CommandTemplate, String> {
        let entry: TemplateEntry =
            toml::from_str(&format!("command = {command}")).map_err(|error| error.to_string())?;
        entry.compile(&vocabularies())
    }

    fn matched(command: &str, given: &[&str]) -> Result<String, String> {
        let given: Vec<String> = given.iter().map(|arg| (*arg).to_owned()).collect();
        let found = template(command).unwrap().matched(&given, &vocabularies());
        found.map(|command| command.args.join(" ")).map_err(|Mismatch { at, why, .. }| format!("{at}: {why}"))
    }

    #[test]
    fn a_hole_takes_values_of_its_type_only() {
        let long = "x".repeat(201);
        let rows: [(&str, &[&str], Result<&str, &str>); 33] = [
            (r#"["make", "test"]"#, &["make", "test"], Ok("test")),
            (r#"["make", "test"]"#, &["make"], Err("1: expected test")),
            (r#"["make", "test"]"#, &["make", "test", "x"], Err("2: expected nothing more")),
            (r#"["make", { flags = ["-k", "-s"] }, "x"]"#, &["make", "-s", "-k", "x"], Ok("-s -k x")),
            (r#"["make", { flags = ["-k", "-s"] }, "x"]"#, &["make", "x"], Ok("x")),
            (r#"["make", { flags = ["-k", "-s"] }]"#, &["make", "-k", "-k"], Err("expected nothing more")),
            (r#"["make", { flags = ["-k"] }]"#, &["make", "-f"], Err("expected nothing more")),
            (r#"["t", { option = "-n", number = [1, 9] }]"#, &["t", "-n", "3"], Ok("-n 3")),
            (r#"["t", { option = "-n", number = [1, 9] }]"#, &["t"], Ok("")),
            (r#"["t", { option = "-n", number = [1, 9] }]"#, &["t", "-n"], Err("takes a value")),
            (r#"["t", { number = [1, 9] }]"#, &["t", "+3"], Err("from 1 to 9")),
            (r#"["t", { number = [1, 9] }]"#, &["t", "10"], Err("from 1 to 9")),
            (r#"["t", { choice = ["Debug"] }]"#, &["t", "debug"], Err("one of Debug")),
            (r#"["t", { word = "w" }]"#, &["t", "a-b.c"], Ok("a-b.c")),
            (r#"["t", { word = "w" }]"#, &["t", "-b"], Err("begins with '-'")),
            (r#"["t", { word = "w" }]"#, &["t", "a b"], Err("a word has")),
            (r#"["t", { word = "w" }]"#, &["t", ""], Err("a word has")),
            (r#"["t", { word = "w", vocabulary = "commit" }]"#, &["t", "Fix"], Ok("Fix")),
            (r#"["t", { word = "w", vocabulary = "commit" }]"#, &["t", "fix"], Err("not in the vocabulary")),
            (r#"["t", { any = "m" }]"#, &["t", "a text; $(x) `y`"], Ok("a text; $(x) `y`")),
            (r#"["t", { any = "m" }]"#, &["t", "--upload-pack=x"], Err("begins with '-'")),
            (r#"["t", { any = "m" }]"#, &["t", "a\nb"], Err("a text has")),
            (r#"["t", { any = "m" }]"#, &["t", &long], Err("a text has")),
            (r#"["t", { any = "m" }]"#, &["t", "api_token=x"], Err("assigns no keys")),
            (r#"["t", { any = "m", vocabulary = "commit" }]"#, &["t", "Fix build"], Ok("Fix build")),
            (r#"["t", { any = "m", vocabulary = "commit" }]"#, &["t", "Fix all"], Err("'all' is not in")),
            (r#"["t", { path = "p" }]"#, &["t", "/workspace/a//b"], Ok("a/b")),
            (r#"["t", { path = "p" }]"#, &["t", "../a"], Err("'..'")),
            (r#"["t", { path = "p" }]"#, &["t", "-a"], Err("begins with '-'")),
            (r#"["t", { path = "p" }]"#, &["t", ":(top)a"], Err("have a meaning for")),
            (r#"["t", { output = "p" }]"#, &["t", "a/Makefile"], Err("run or loaded")),
            (r#"["t", { paths = "p" }]"#, &["t", "a", "b"], Ok("a b")),
            (r#"["t", { paths = "p" }]"#, &["t"], Err("1 to 64 paths")),
        ];
        for (command, given, want) in rows {
            let found = matched(command, given);
            match (&found, want) {
                (Ok(found), Ok(want)) => assert_eq!(found, want, "{command} {given:?}"),
                (Err(found), Err(want)) => assert!(found.contains(want), "{command} {given:?}: {found}"),
                _ => panic!("{command} {given:?}: {found:?}"),
            }
        }
    }

    #[test]
    fn interpreters_network_tools_and_malformed_templates_are_refused() {
        for program in [
            "bash",
            "sh",
            "python3",
            "python3.11",
            "node",
            "curl",
            "env",
            "xargs",
            "Perl",
            "php8.2",
            "lua5.4",
            "cmd.exe",
        ] {
            let error = template(&format!("[\"{program}\", \"x\"]")).unwrap_err();
            assert!(error.contains("is never run"), "{program}: {error}");
        }
        for (command, want) in [
            ("[]", "not empty"),
            ("[\"\"]", "not empty"),
            ("[\"/bin/ls\"]", "not the name of a program"),
            ("[\"../x\"]", "not the name of a program"),
            ("[{ word = \"x\" }]", "the program is a word"),
            ("[\"ls\", { }]", "a hole has one of"),
            ("[\"ls\", { word = \"x\", path = \"y\" }]", "one type"),
            ("[\"ls\", { paths = \"x\" }, \"y\"]", "the last part"),
            ("[\"ls\", { choice = [] }]", "at least one"),
            ("[\"ls\", { flags = [\"x\"] }]", "begin with '-'"),
            ("[\"ls\", { number = [2, 1] }]", "[least, most]"),
            ("[\"ls\", { path = \"x\", vocabulary = \"commit\" }]", "belongs to any or word"),
            ("[\"ls\", { word = \"x\", vocabulary = \"other\" }]", "no vocabulary"),
            ("[\"ls\", { word = \"x\", option = \"y\" }]", "option is a flag"),
            ("[\"ls\", { nosuch = \"x\" }]", "a hole with one of any"),
        ] {
            let error = template(command).unwrap_err();
            assert!(error.contains(want), "{command}: {error}");
        }
    }
}

//! Git for scripts: its commands, the branches that none of them names, and the settings that keep it from starting other programs.

use serde::Deserialize;

use super::template::{CommandTemplate, Kind, Purpose, Slot};

/// Branches that are in use by others: no command names them.
const PROTECTED: &[&str] = &["develop", "live", "main", "master", "production", "release", "staging", "trunk"];
const REMOTES: &[&str] = &["origin", "upstream", "fork", "backup", "mirror"];
/// The commands that a template of the operator may have, with the arguments that it may have. The other commands name branches or reach
/// the network, and are built in only.
const OF_OPERATOR: &[(&str, &[&str])] = &[
    ("add", &["-A", "--all", "-u", "--update", "--"]),
    ("commit", &["-a", "--all", "-q", "--quiet", "-m"]),
    ("describe", &["--tags", "--always", "--long"]),
    (
        "diff",
        &[
            "--staged",
            "--cached",
            "--stat",
            "--name-only",
            "--name-status",
            "--word-diff",
            "--quiet",
            "--exit-code",
            "--",
        ],
    ),
    ("log", &["--oneline", "--all", "--no-decorate", "--graph", "--reverse", "--stat", "-p", "-n", "--"]),
    ("ls-files", &["--modified", "--deleted", "--others", "--ignored", "--exclude-standard"]),
    ("status", &["--short", "-s", "--porcelain", "--branch", "-b"]),
];

/// Git as the operator permits it.
#[derive(Clone, Debug, Default, Deserialize, PartialEq, Eq)]
#[serde(deny_unknown_fields)]
pub(in super::super) struct GitEntry {
    /// The URLs that can be cloned, and added as remotes.
    #[serde(default)]
    urls: Vec<String>,
    /// The author of commits.
    #[serde(default = "author")]
    name: String,
    #[serde(default = "address")]
    email: String,
}

fn author() -> String {
    "exeat agent".to_owned()
}

fn address() -> String {
    "agent@invalid".to_owned()
}

impl GitEntry {
    /// Checks it.
    ///
    /// # Errors
    /// The problem.
    pub(in super::super) fn check(&self) -> Result<(), String> {
        if let Some(url) = self.urls.iter().find(|url| !is_url(url)) {
            return Err(format!("{url:?} is not https://HOST/PATH, without a user, a query and a fragment"));
        }
        if [&self.name, &self.email].iter().any(|text| text.is_empty() || text.contains(['<', '>', '\n', '\0'])) {
            return Err("name and email are not empty, and without '<' and '>'".to_owned());
        }
        Ok(())
    }

    /// Returns the commands of git.
    pub(super) fn templates(&self) -> Vec<CommandTemplate> {
        let w = |text: &str| Slot::Word(text.to_owned());
        let flags = |all: &[&str]| Slot::Flags(all.iter().map(|flag| (*flag).to_owned()).collect());
        let branch = || Slot::Hole("branch".to_owned(), Kind::Branch);
        let message = || Slot::Hole("message".to_owned(), Kind::Text(None));
        let tag = || Slot::Hole("tag".to_owned(), Kind::Tag);
        let paths = || Slot::Paths("paths".to_owned());
        let remote = || choice(REMOTES.iter().map(|remote| (*remote).to_owned()).collect());
        let url = || choice(self.urls.clone());
        // Git has no program of the configuration show a difference or convert a file.
        let plain = || [Slot::Added("--no-ext-diff"), Slot::Added("--no-textconv")];
        let log = || flags(&["--oneline", "--all", "--no-decorate", "--graph", "--reverse", "--stat"]);
        let count = || Slot::Option("-n".to_owned(), Kind::Number(1, 100));
        let diff = || flags(&["--staged", "--cached", "--stat", "--name-only", "--name-status", "--word-diff"]);
        let merge = || flags(&["--no-ff", "--ff-only", "--squash"]);
        let mut all = vec![
            (false, vec![w("init")]),
            (false, vec![w("status"), flags(&["--short", "-s", "--porcelain", "--branch"])]),
            (false, [vec![w("log")], plain().into(), vec![log(), count()]].concat()),
            (false, [vec![w("log")], plain().into(), vec![log(), count(), w("--"), paths()]].concat()),
            (false, [vec![w("diff")], plain().into(), vec![diff()]].concat()),
            (false, [vec![w("diff")], plain().into(), vec![diff(), Slot::Added("--"), paths()]].concat()),
            (false, vec![w("branch"), flags(&["--list", "-a", "--all", "-r"])]),
            (false, vec![w("remote"), flags(&["-v"])]),
            (false, vec![w("remote"), w("remove"), remote()]),
            (false, vec![w("ls-files"), flags(&["--modified", "--deleted", "--others", "--ignored"])]),
            (false, vec![w("describe"), flags(&["--tags", "--always", "--long"])]),
            (false, vec![w("tag")]),
            (false, vec![w("tag"), w("--list")]),
            (false, vec![w("tag"), w("-l")]),
            (false, vec![w("tag"), tag()]),
            (false, vec![w("tag"), w("-a"), tag(), w("-m"), message()]),
            (false, vec![w("tag"), w("-d"), tag()]),
            (false, vec![w("stash")]),
            (false, vec![w("stash"), choice(["list", "pop", "drop"].map(str::to_owned).into())]),
            (false, vec![w("add"), w("-A")]),
            (false, vec![w("add"), Slot::Added("--"), paths()]),
            (false, vec![w("commit"), flags(&["-a", "--all"]), w("-m"), message()]),
            (false, vec![w("checkout"), branch(), Slot::Added("--")]),
            (false, vec![w("checkout"), w("-b"), branch()]),
            (false, vec![w("switch"), branch()]),
            (false, vec![w("switch"), w("-c"), branch()]),
            (false, vec![w("merge"), merge(), branch()]),
            (false, vec![w("merge"), merge(), branch(), w("-m"), message()]),
            (false, vec![w("merge"), w("--abort")]),
            (
                true,
                vec![
                    w("push"),
                    flags(&["-u", "--set-upstream"]),
                    remote(),
                    Slot::Hole("branch".to_owned(), Kind::PushedBranch),
                ],
            ),
            (true, vec![w("pull"), flags(&["--ff-only", "--no-rebase"]), remote(), branch()]),
        ];
        if !self.urls.is_empty() {
            all.push((true, vec![w("clone"), url()]));
            all.push((true, vec![w("clone"), url(), Slot::Hole("directory".to_owned(), Kind::Output)]));
            all.push((false, vec![w("remote"), w("add"), remote(), url()]));
        }
        let start = || [w("git"), Slot::Option("-C".to_owned(), Kind::Repository)];
        let template = |(network, rest): (bool, Vec<Slot>)| CommandTemplate {
            slots: [start().into(), rest].concat(),
            network,
            purpose: Purpose::Script,
        };
        let version =
            CommandTemplate { slots: vec![w("git"), w("--version")], network: false, purpose: Purpose::Script };
        std::iter::once(version).chain(all.into_iter().map(template)).collect()
    }
}

fn choice(values: Vec<String>) -> Slot {
    Slot::Hole(values.join("|"), Kind::Choice(values))
}

fn is_url(url: &str) -> bool {
    let rest = url.strip_prefix("https://").unwrap_or_default();
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/' | ':' | '~');
    rest.split_once('/').is_some_and(|(host, path)| !host.is_empty() && !path.is_empty())
        && rest.chars().all(is_part)
        && !rest.contains("..")
}

/// Checks the name of a branch: it is one for git (git-check-ref-format(1)), and not a protected one, however that is written.
///
/// # Errors
/// The reason why it is refused.
pub(super) fn check_branch(name: &str) -> Result<(), String> {
    let is_part = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | '/');
    let is_name = !name.is_empty()
        && name.len() <= 128
        && name.chars().all(is_part)
        && !name.contains("..")
        && name.split('/').all(|part| {
            !part.is_empty()
                && !part.starts_with(['.', '-'])
                && !part.ends_with('.')
                && !part.to_ascii_lowercase().ends_with(".lock")
        });
    if !is_name {
        return Err("the name of a branch has letters, digits, '-', '_', '.' and '/', such as feature/login".to_owned());
    }
    let lower = name.to_ascii_lowercase();
    let (first, rest) = lower.split_once('/').map_or((lower.as_str(), None), |(first, rest)| (first, Some(rest)));
    // HEAD is whatever branch is checked out, and the others lead to any branch.
    if name.ends_with("HEAD")
        || matches!(first, "refs" | "heads" | "remotes" | "tags" | "fetch_head" | "orig_head" | "merge_head")
    {
        return Err("a branch is named by itself, without refs/heads/ and the like".to_owned());
    }
    if REMOTES.contains(&lower.as_str()) {
        return Err(format!("{name} is a remote, and stands for its default branch"));
    }
    let of_remote = REMOTES.contains(&first).then_some(rest).flatten();
    for name in [Some(lower.as_str()), of_remote].into_iter().flatten() {
        let first = name.split('/').next().unwrap_or_default();
        if PROTECTED.contains(&name) || first == "release" {
            return Err(format!("{name} is a protected branch; work on feature/…, bugfix/… or hotfix/…"));
        }
    }
    Ok(())
}

/// Returns the directory of a clone for which none is given, beneath that of `-C`: the last part of the URL.
pub(super) fn place_of_clone(args: &[String], base: Option<&String>) -> Option<String> {
    let url = args.last().filter(|last| args.iter().any(|arg| arg == "clone") && last.starts_with("https://"))?;
    let name = url.trim_end_matches('/').rsplit('/').next()?;
    let name = name.strip_suffix(".git").unwrap_or(name);
    Some(base.map_or_else(|| name.to_owned(), |base| format!("{base}/{name}")))
}

/// Checks the name of a tag: it is not that of a protected branch, because git prefers a tag to a branch of the same name.
///
/// # Errors
/// The reason why it is refused.
pub(super) fn check_tag(name: &str) -> Result<(), String> {
    check_branch(name).map_err(|_| {
        "the name of a tag has letters, digits, '-', '_', '.' and '/', such as v1.2.0, and is not that of a protected branch".to_owned()
    })
}

/// Checks a template of the operator for git, and adds that no program shows a difference.
///
/// # Errors
/// The reason why it is refused.
pub(super) fn check_template(slots: &mut Vec<Slot>) -> Result<(), String> {
    let is_start = |slot: &Slot| matches!(slot, Slot::Option(flag, Kind::Path) if flag == "-C");
    let at = 1_usize.saturating_add(usize::from(slots.get(1).is_some_and(is_start)));
    if let Some(Slot::Option(_, kind)) = slots.get_mut(1) {
        *kind = Kind::Repository;
    }
    let command = match slots.get(at) {
        Some(Slot::Word(word)) => OF_OPERATOR.iter().find(|(command, _)| command == word),
        _ => None,
    };
    let Some((command, known)) = command else {
        let all: Vec<&str> = OF_OPERATOR.iter().map(|(command, _)| *command).collect();
        return Err(format!(
            "a template for git is about {}, after {{ option = \"-C\", path = … }} or not; the other commands are built in: git = {{ … }}",
            all.join(", ")
        ));
    };
    let refused = |text: &str| Err(format!("{text:?} is not in a template for git {command}"));
    let mut before = "";
    for slot in slots.iter().skip(at.saturating_add(1)) {
        match slot {
            Slot::Word(_) if before == "-m" => {}
            Slot::Word(word) if !known.contains(&word.as_str()) => return refused(word),
            Slot::Flags(flags) => {
                if let Some(flag) = flags.iter().find(|flag| !known.contains(&flag.as_str()) || **flag == "--") {
                    return refused(flag);
                }
            }
            Slot::Option(flag, Kind::Number(..)) if flag == "-n" && known.contains(&"-n") => {}
            Slot::Hole(_, Kind::Text(_) | Kind::Word(_) | Kind::Choice(_)) if before == "-m" => {}
            Slot::Hole(_, Kind::Path) | Slot::Paths(_) if before == "--" => {}
            Slot::Hole(_, Kind::Path) | Slot::Paths(_) => {
                return Err("a path in a template for git is after \"--\"".to_owned());
            }
            Slot::Hole(name, _) | Slot::Option(name, _) => return refused(name),
            Slot::Word(_) | Slot::Added(_) => {}
        }
        before = match slot {
            Slot::Word(word) => word.as_str(),
            Slot::Hole(_, Kind::Path) => before,
            _ => "",
        };
    }
    if matches!(*command, "diff" | "log") {
        let after = at.saturating_add(1);
        slots.splice(after..after, [Slot::Added("--no-ext-diff"), Slot::Added("--no-textconv")]);
    }
    Ok(())
}

/// Returns the variables for git: nobody's configuration, and no program besides itself.
pub(super) fn environment(git: Option<&GitEntry>) -> Vec<(String, String)> {
    let settings = [
        ("advice.detachedHead", "false"),
        ("commit.gpgSign", "false"),
        ("core.alternateRefsCommand", "false"),
        ("core.askPass", ""),
        ("core.attributesFile", "/dev/null"),
        ("core.editor", "false"),
        ("core.fsmonitor", "false"),
        ("core.hooksPath", "/dev/null"),
        ("core.pager", "cat"),
        ("core.sshCommand", "false"),
        ("credential.helper", ""),
        ("core.sharedRepository", "0"),
        ("fetch.recurseSubmodules", "false"),
        ("gc.auto", "0"),
        ("gpg.openpgp.program", "false"),
        ("gpg.program", "false"),
        ("gpg.ssh.defaultKeyCommand", "false"),
        ("gpg.ssh.program", "false"),
        ("gpg.x509.program", "false"),
        ("init.defaultBranch", "main"),
        ("log.showSignature", "false"),
        ("maintenance.auto", "false"),
        ("merge.verifySignatures", "false"),
        ("protocol.allow", "never"),
        ("protocol.https.allow", "always"),
        ("push.default", "nothing"),
        ("push.followTags", "false"),
        ("push.gpgSign", "false"),
        ("push.recurseSubmodules", "no"),
        ("safe.bareRepository", "explicit"),
        ("safe.directory", "*"),
        ("submodule.recurse", "false"),
        ("tag.forceSignAnnotated", "false"),
        ("tag.gpgSign", "false"),
    ];
    let owned = |(name, value): (&str, &str)| (name.to_owned(), value.to_owned());
    let fixed = [
        ("GIT_ALLOW_PROTOCOL", "https"),
        ("GIT_ASKPASS", ""),
        ("GIT_CONFIG_GLOBAL", "/dev/null"),
        ("GIT_CONFIG_NOSYSTEM", "1"),
        ("GIT_EDITOR", "false"),
        ("GIT_PAGER", "cat"),
        ("GIT_SEQUENCE_EDITOR", "false"),
        ("GIT_TEMPLATE_DIR", ""),
        ("GIT_TERMINAL_PROMPT", "0"),
        ("SSH_ASKPASS", "false"),
    ];
    let mut all: Vec<(String, String)> = fixed.map(owned).into();
    // Before 2.31, git has the second form only.
    let quoted = settings.map(|(name, value)| format!("'{name}={value}'"));
    all.push(("GIT_CONFIG_PARAMETERS".to_owned(), quoted.join(" ")));
    all.push(("GIT_CONFIG_COUNT".to_owned(), settings.len().to_string()));
    for (index, (name, value)) in settings.into_iter().enumerate() {
        all.push((format!("GIT_CONFIG_KEY_{index}"), name.to_owned()));
        all.push((format!("GIT_CONFIG_VALUE_{index}"), value.to_owned()));
    }
    let GitEntry { name, email, .. } =
        git.cloned().unwrap_or_else(|| GitEntry { urls: Vec::new(), name: author(), email: address() });
    for role in ["AUTHOR", "COMMITTER"] {
        all.push((format!("GIT_{role}_NAME"), name.clone()));
        all.push((format!("GIT_{role}_EMAIL"), email.clone()));
    }
    all
}

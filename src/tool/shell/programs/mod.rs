//! `ProcRun`: programs that match a command template of the operator, each isolated as `exeat run --isolate` isolates its command, with
//! a file system that has the workspace and the machine's programs only.

mod git;
#[cfg(target_os = "linux")]
mod inside;
#[cfg(target_os = "linux")]
mod relay;
#[cfg(target_os = "linux")]
mod root;
#[cfg(target_os = "linux")]
mod run;
mod template;

use std::path::PathBuf;

pub(super) use self::git::GitEntry;
#[cfg(target_os = "linux")]
pub(super) use self::inside::main;
#[cfg(target_os = "linux")]
pub(super) use self::run::run;
pub(in crate::tool) use self::template::Purpose;
pub(super) use self::template::{Command, TemplateEntry, Vocabularies};
use self::template::{CommandTemplate, Mismatch, check_program};
use crate::tool::messages;

/// Returns the reason why the dangerous shell cannot be started on this machine, if there is one.
pub(super) fn why_no_shell() -> Option<String> {
    #[cfg(target_os = "linux")]
    let is_there = inside::shell().is_some();
    #[cfg(not(target_os = "linux"))]
    let is_there = false;
    (!is_there).then(|| format!("{} cannot be run on this machine", template::SHELL))
}

/// The programs of a sandbox.
#[derive(Debug, Default)]
pub(super) struct Programs {
    templates: Vec<CommandTemplate>,
    vocabularies: Vocabularies,
    git: Option<GitEntry>,
    /// Directories of the machine that programs can read.
    read_only: Vec<PathBuf>,
}

impl Programs {
    /// Returns the programs that the operator permits.
    ///
    /// # Errors
    /// The key of what is wrong, and the problem.
    pub(super) fn new(
        templates: Vec<TemplateEntry>,
        vocabularies: Vocabularies,
        git: Option<GitEntry>,
        read_only: Vec<PathBuf>,
    ) -> Result<Self, (String, String)> {
        for (name, words) in &vocabularies {
            let is_word =
                |word: &String| !word.is_empty() && !word.chars().any(|c| c.is_whitespace() || c.is_control());
            if !words.iter().all(is_word) {
                return Err((format!("vocabularies.{name}"), "a word is not empty, and without spaces".to_owned()));
            }
        }
        if let Some((one, other)) = nested(&read_only) {
            let problem = format!("{} is within {}", other.display(), one.display());
            return Err(("read_only".to_owned(), problem));
        }
        if let Some(path) = read_only.iter().find(|path| !is_taken(path)) {
            let problem =
                "it is an absolute path without '..', and not in /dev, /etc, /old, /proc, /sys, /tmp and /workspace";
            return Err(("read_only".to_owned(), format!("{}: {problem}", path.display())));
        }
        let mut all = Vec::new();
        if let Some(git) = &git {
            git.check().map_err(|problem| ("git".to_owned(), problem))?;
            all.extend(git.templates());
        }
        for (index, entry) in templates.into_iter().enumerate() {
            all.push(entry.compile(&vocabularies).map_err(|problem| (format!("templates[{index}]"), problem))?);
        }
        Ok(Self { templates: all, vocabularies, git, read_only })
    }

    pub(super) fn is_empty(&self) -> bool {
        self.templates.is_empty()
    }

    /// Takes away the templates with the network.
    pub(super) fn close_network(&mut self) {
        self.templates.retain(|template| !template.network);
    }

    /// Returns whether there is a template for this.
    pub(super) fn has(&self, purpose: Purpose) -> bool {
        self.of(purpose).next().is_some()
    }

    fn of(&self, purpose: Purpose) -> impl Iterator<Item = &CommandTemplate> {
        let is_any = matches!(purpose, Purpose::Script | Purpose::Exec);
        self.templates.iter().filter(move |template| is_any || template.purpose == purpose)
    }

    /// Returns the command of the first template for this that needs no values.
    pub(super) fn usual(&self, purpose: Purpose) -> Option<Vec<String>> {
        let without_values = |template: &CommandTemplate| {
            let words = template.words();
            template.matched(&words, &self.vocabularies).is_ok().then_some(words)
        };
        self.of(purpose).find_map(without_values)
    }

    /// Returns the command that the arguments of `ProcRun` are, if a template for this permits it.
    ///
    /// # Errors
    /// The reason why none does.
    pub(super) fn command(&self, given: &[String], purpose: Purpose) -> Result<Command, String> {
        let program = given.first().map(String::as_str).unwrap_or_default();
        check_program(program)?;
        let mut nearest: Option<(Mismatch, &CommandTemplate)> = None;
        for template in self.of(purpose).filter(|template| template.program() == program) {
            let found = match template.matched(given, &self.vocabularies) {
                Ok(command) => return Ok(command),
                Err(found) => found,
            };
            let is_nearer = |best: &Mismatch| (found.at, found.is_value) > (best.at, best.is_value);
            if nearest.as_ref().is_none_or(|(best, _)| is_nearer(best)) {
                nearest = Some((found, template));
            }
        }
        Err(match nearest {
            Some((Mismatch { at, why, .. }, template)) => format!(
                "no command template matches; the nearest is '{}': argument {}: {why}. {}",
                template.shown(),
                at.saturating_add(1),
                purpose.list()
            ),
            None => format!("no command template is for '{}'. {}", messages::name(program), purpose.list()),
        })
    }

    /// Returns the templates for this as they are shown to a model.
    pub(super) fn shown(&self, purpose: Purpose) -> String {
        let line = |template: &CommandTemplate| {
            let network = if template.network { " (network)" } else { "" };
            format!("{}{network}", template.shown())
        };
        self.of(purpose).map(line).collect::<Vec<_>>().join("\n")
    }

    pub(super) fn read_only(&self) -> &[PathBuf] {
        &self.read_only
    }

    pub(super) fn vocabularies(&self) -> &Vocabularies {
        &self.vocabularies
    }

    /// Returns the templates of a program, or all, in which free text is permitted.
    pub(super) fn with_free_text(&self, program: &str) -> Vec<String> {
        let has_text = |template: &&CommandTemplate| {
            let of_program = program.split(' ').next().unwrap_or_default();
            template.has_free_text() && (program.is_empty() || template.program() == of_program)
        };
        self.templates.iter().filter(has_text).map(CommandTemplate::shown).collect()
    }
}

/// Returns two directories of which the second is within the first, if there are such.
fn nested(all: &[PathBuf]) -> Option<(&PathBuf, &PathBuf)> {
    let pairs = all.iter().enumerate().flat_map(|(at, one)| {
        let others = all.iter().enumerate().filter(move |(index, _)| *index != at);
        others.map(move |(_, other)| (one, other))
    });
    pairs.into_iter().find(|(one, other)| other.starts_with(one))
}

/// Returns whether a directory can be at its own path in the file system of a program.
fn is_taken(path: &std::path::Path) -> bool {
    let mut parts = path.components();
    let is_plain = parts.next() == Some(std::path::Component::RootDir)
        && path.components().skip(1).all(|part| matches!(part, std::path::Component::Normal(_)));
    let first = path.components().nth(1).and_then(|part| part.as_os_str().to_str()).unwrap_or_default();
    is_plain && !["", "dev", "etc", "old", "proc", "sys", "tmp", "workspace"].contains(&first)
}

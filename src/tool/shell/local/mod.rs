//! The verbs that run in the confined process. None has an effect beyond the workspace.

mod archives;
mod calculation;
mod date;
mod directories;
mod edits;
mod files;
mod hash;
mod json;
mod path_names;
mod primitives;
mod sql;
mod system;
mod text;
mod values;

use std::fmt::Display;
use std::ops::RangeInclusive;
use std::str::FromStr;

use super::child::Request;
/// An output that is longer is an error, or truncated where lines are listed.
use super::options::MAX_OUTPUT;
use super::path::{Access, WorkspacePath};
use super::workspace::Workspace;

/// Maximum memory of a compiled regular expression, in bytes.
const MAX_REGEX: usize = 1 << 20;
const MAX_PATTERN: usize = 4096;

/// A verb has failed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(super) enum VerbError {
    #[error("{0}")]
    Denied(String),
    #[error("{0}")]
    Failed(String),
    #[error("the time is over")]
    TimedOut,
    /// The file or directory does not exist.
    #[error("{0}")]
    Missing(String),
}

type Output = Result<String, VerbError>;

fn failed<T>(text: impl Into<String>) -> Result<T, VerbError> {
    Err(VerbError::Failed(text.into()))
}

/// The arguments of a verb. Their number has been checked.
#[derive(Clone, Copy)]
struct Args<'a>(&'a [String]);

impl<'a> Args<'a> {
    fn text(self, index: usize) -> &'a str {
        self.0.get(index).map(String::as_str).unwrap_or_default()
    }

    fn optional(self, index: usize) -> Option<&'a str> {
        self.0.get(index).map(String::as_str)
    }

    /// Returns a number, or the usual one if it is left out.
    fn number<T: FromStr + PartialOrd + Display>(
        self,
        index: usize,
        name: &str,
        range: RangeInclusive<T>,
        usual: Option<T>,
    ) -> Result<T, VerbError> {
        let Some(text) = self.optional(index) else {
            return usual.map_or_else(|| failed(format!("{name} is missing")), Ok);
        };
        let number = text.trim().parse().ok().filter(|number| range.contains(number));
        number.map_or_else(|| failed(format!("{name} is a number from {} to {}", range.start(), range.end())), Ok)
    }

    fn path(self, index: usize, access: Access) -> Result<WorkspacePath, VerbError> {
        let path = WorkspacePath::parse(self.text(index)).and_then(|path| path.check(access).map(|()| path));
        path.map_err(|error| VerbError::Denied(error.to_string()))
    }
}

/// Runs an operation.
pub(super) fn run(request: &Request, workspace: &Workspace) -> Output {
    let (verb, args) = (request.verb.as_str(), Args(&request.args));
    workspace.check_time()?;
    let output = text::run(verb, args)
        .or_else(|| json::run(verb, args))
        .or_else(|| values::run(verb, args))
        .or_else(|| date::run(verb, args))
        .or_else(|| path_names::run(verb, args))
        .or_else(|| calculation::run(verb, args))
        .or_else(|| files::run(verb, args, workspace))
        .or_else(|| directories::run(verb, args, workspace))
        .or_else(|| archives::run(verb, args, workspace))
        .or_else(|| edits::run(request, workspace))
        .or_else(|| system::run(verb, args, workspace))
        .or_else(|| primitives::run(verb, args, workspace))
        .or_else(|| sql::run(verb, args, workspace));
    let output = output.unwrap_or_else(|| Err(VerbError::Denied(format!("{verb} is not served"))))?;
    if output.len() > MAX_OUTPUT {
        return failed(format!("the output has more than {MAX_OUTPUT} bytes"));
    }
    Ok(output)
}

fn truth(is_true: bool) -> Output {
    Ok(if is_true { "True" } else { "False" }.to_owned())
}

/// Compiles a regular expression, which takes time linear in the text.
fn pattern(text: &str) -> Result<regex::Regex, VerbError> {
    if text.len() > MAX_PATTERN {
        return failed(format!("a regular expression has at most {MAX_PATTERN} bytes"));
    }
    let built = regex::RegexBuilder::new(text).size_limit(MAX_REGEX).dfa_size_limit(MAX_REGEX).build();
    built.map_err(|error| match error {
        regex::Error::CompiledTooBig(_) => VerbError::Failed("the regular expression is too large".to_owned()),
        _ => VerbError::Failed(format!("not a regular expression: {}", crate::tool::messages::name(text))),
    })
}

/// Lines of an output, of which those that are too many are left out with a note.
struct Lines {
    text: String,
    left: usize,
    omitted: usize,
}

impl Lines {
    fn at_most(most: usize) -> Self {
        Self { text: String::new(), left: most, omitted: 0 }
    }

    fn push(&mut self, line: &str) {
        let fits = self.text.len().saturating_add(line.len()) < MAX_OUTPUT.saturating_sub(100);
        if self.left == 0 || !fits {
            self.omitted = self.omitted.saturating_add(1);
            return;
        }
        self.left = self.left.saturating_sub(1);
        if !self.text.is_empty() {
            self.text.push('\n');
        }
        self.text.push_str(line);
    }

    fn finish(mut self) -> String {
        if self.omitted > 0 {
            self.text.push_str(&format!("\n… and {} more", self.omitted));
        }
        self.text
    }
}

#[cfg(test)]
mod tests {
    use std::fs::{self, File};
    use std::time::{Duration, Instant};

    use proptest::prelude::*;

    use super::*;
    use crate::tool::shell::table::{self, Place};

    /// Arguments as the verbs expect them, and others.
    fn argument() -> impl Strategy<Value = String> {
        prop_oneof![
            any::<String>(),
            "[ -~]{0,12}",
            any::<i64>().prop_map(|number| number.to_string()),
            (0..300_u32).prop_map(|number| number.to_string()),
            any::<f64>().prop_map(|number| number.to_string()),
            "[0-9.+*/%() -]{0,20}",
            "[yMdHmsf:. T-]{1,12}",
            "[a-z.*?{}\\[\\]()|+^$\\\\]{0,12}",
            "(\\{\"[a-c]\":|\\[|1|,|\\}|\\]|\"x\"){0,8}",
            "\\$(\\.[a-c]|\\[[0-9*]\\]|\\.\\.|\\[\\?@\\.a>1\\]){0,4}",
            prop::sample::select(vec![
                "a.txt",
                "dir",
                "dir/b.txt",
                "new.txt",
                ".",
                "x.zip",
                "x.tar.gz",
                "md5",
                "asc",
                "16"
            ])
            .prop_map(str::to_owned),
        ]
    }

    fn verbs() -> Vec<&'static str> {
        table::all().map(|(verb, _)| verb).filter(|verb| table::runs_in(verb) == Place::Sandbox).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(1000))]

        #[test]
        fn any_arguments_have_a_result(verb in prop::sample::select(verbs()), args in prop::collection::vec(argument(), 0..6)) {
            let dir = tempfile::tempdir().unwrap();
            fs::write(dir.path().join("a.txt"), "one\ntwo\n").unwrap();
            fs::create_dir(dir.path().join("dir")).unwrap();
            fs::write(dir.path().join("dir/b.txt"), b"\xff\x00").unwrap();
            fs::write(dir.path().join("x.zip"), args.concat()).unwrap();
            let mut workspace = Workspace::new(File::open(dir.path()).unwrap().into()).unwrap();
            workspace.until = Instant::now().checked_add(Duration::from_secs(5)).unwrap();
            workspace.may_write.set(1 << 20);
            let request = Request {
                verb: verb.to_owned(), args, template: None, patches: Vec::new(), milliseconds: 5000, ends_batch: true,
            };
            match run(&request, &workspace) {
                Ok(output) => prop_assert!(output.len() <= MAX_OUTPUT),
                Err(error) => prop_assert!(error != VerbError::TimedOut && !error.to_string().contains("is not served"), "{error}"),
            }
            let left = fs::read_dir(dir.path()).unwrap().filter_map(Result::ok);
            let partial = left.filter(|one| one.file_name().to_string_lossy().starts_with(".exeat-partial"));
            prop_assert_eq!(partial.count(), 0);
        }
    }
}

//! `exeat diff`: the requests that a new configuration allows and an old one refuses, and the reverse.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use clap::Args;
use serde_json::{Value, json};

use super::terminal::{Paint, clean, escaped, print, say};
use super::{Exit, paths};
use crate::model::name::TaskName;
use crate::policy::compile::Config;
use crate::policy::difference::{self, Difference, Paths, Presence, Region, Row, TaskDifference, Values};

/// The most hosts, methods or paths of a row that are printed for reading.
const MAX_LISTED: usize = 20;

/// Flags of `exeat diff`.
#[derive(Args)]
pub(super) struct DiffArgs {
    /// The old configuration
    #[arg(value_name = "OLD")]
    old: PathBuf,
    /// The new configuration
    #[arg(value_name = "NEW")]
    new: PathBuf,
    /// Only this task
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Exit with status 0 also if the new configuration allows more
    #[arg(long)]
    allow_opening: bool,
    /// Print the differences as JSON
    #[arg(long)]
    json: bool,
}

pub(super) fn run(args: &DiffArgs) -> Exit {
    let (Ok(old), Ok(new)) = (load(&args.old), load(&args.new)) else { return Exit::Usage };
    let is_wanted = |name: &TaskName| args.task.as_deref().is_none_or(|task| task == name.as_str());
    let names = || old.policy.tasks().chain(new.policy.tasks()).map(|task| task.name());
    if let Some(task) = args.task.as_deref().filter(|_| !names().any(is_wanted)) {
        paths::report_unknown_task(names().map(TaskName::as_str), task);
        return Exit::Usage;
    }
    let difference = match difference::difference(&old.policy, &new.policy, is_wanted) {
        Ok(difference) => difference,
        Err(error) => {
            say(format_args!("exeat: {error}"));
            return Exit::Failed;
        }
    };
    if args.json {
        print(format_args!("{}\n", escaped(&format!("{:#}", document(&difference)))));
    } else {
        print(text(&difference, &Paint::stdout()));
    }
    if difference.opens() && !args.allow_opening { Exit::Refused } else { Exit::Done }
}

fn load(file: &Path) -> Result<Config, ()> {
    paths::load_offline(Some(file)).map_err(|problems| paths::report_problems(Some(file), &problems))
}

fn document(difference: &Difference) -> Value {
    let tasks = difference.tasks.iter().map(|task| {
        let rows = |rows: &[Row]| rows.iter().map(|row| row_document(task, row)).collect::<Vec<_>>();
        json!({
            "task": task.task.as_str(),
            "in": match task.presence {
                Presence::Both => "both",
                Presence::Old => "old",
                Presence::New => "new",
            },
            "opens": rows(&task.opens),
            "closes": rows(&task.closes),
            "raised_limits": task.raised_limits,
            "lowered_limits": task.lowered_limits,
        })
    });
    json!({
        "opens": difference.opens(), "closes": difference.closes(), "tasks": tasks.collect::<Vec<_>>(),
        "settings": { "opens": difference.opens, "closes": difference.closes },
    })
}

fn row_document(task: &TaskDifference, row: &Row) -> Value {
    fn texts<T: std::fmt::Display>(items: impl IntoIterator<Item = T>) -> Vec<String> {
        items.into_iter().map(|item| item.to_string()).collect()
    }
    fn values<T: std::fmt::Display + Ord>(values: &Values<T>) -> Value {
        match values {
            Values::Only(values) => json!({ "only": texts(values) }),
            Values::AllBut(values) => json!({ "all_but": texts(values) }),
        }
    }
    let (paths, which) = regions(&row.paths);
    json!({
        "changes": row.changes, "by": texts(&row.ways), "schemes": row.schemes, "hosts": texts(&row.hosts),
        "except_hosts": texts(task.except(row)), "ports": values(&row.ports), "methods": values(&row.methods),
        "paths": paths, "which_paths": which,
    })
}

/// Returns the paths of a row as patterns, and which of the paths that they match are meant, if not all.
fn regions(paths: &Paths) -> (Vec<String>, Option<&'static str>) {
    let texts = |regions: &[Region]| regions.iter().map(ToString::to_string).collect();
    match paths {
        Paths::All => (vec!["/**".to_owned()], None),
        Paths::In(regions) => (texts(regions), Some("those that can be read in one way only")),
        Paths::WithoutParameters(regions) => (texts(regions), Some("those without a ;")),
        Paths::WithParameters(regions) => (texts(regions), Some("those with a ;")),
        Paths::Ambiguous => (Vec::new(), Some("those that servers may read in different ways")),
    }
}

fn text(difference: &Difference, paint: &Paint) -> String {
    let mut out = String::new();
    for task in &difference.tasks {
        let only = match task.presence {
            Presence::Both => "",
            Presence::Old => " (only in the old configuration)",
            Presence::New => " (only in the new configuration)",
        };
        out.push_str(&format!("task {}{only}\n", clean(task.task.as_str())));
        task.opens.iter().for_each(|row| out.push_str(&row_text(&paint.bad("opens "), task, row)));
        task.raised_limits.iter().for_each(|limit| out.push_str(&format!("  {}  {limit}\n", paint.bad("opens "))));
        task.closes.iter().for_each(|row| out.push_str(&row_text(&paint.good("closes"), task, row)));
        task.lowered_limits.iter().for_each(|limit| out.push_str(&format!("  {}  {limit}\n", paint.good("closes"))));
        out.push('\n');
    }
    if !difference.opens.is_empty() || !difference.closes.is_empty() {
        out.push_str("all tasks\n");
        difference.opens.iter().for_each(|line| out.push_str(&format!("  {}  {}\n", paint.bad("opens "), clean(line))));
        difference
            .closes
            .iter()
            .for_each(|line| out.push_str(&format!("  {}  {}\n", paint.good("closes"), clean(line))));
        out.push('\n');
    }
    out.push_str(match (difference.opens(), difference.closes()) {
        (false, false) => "both configurations allow the same\n",
        (true, false) => "the new configuration allows more\n",
        (false, true) => "the new configuration allows less\n",
        (true, true) => "the new configuration allows more in some places and less in others\n",
    });
    out
}

fn row_text(verdict: &str, task: &TaskDifference, row: &Row) -> String {
    let changes: Vec<String> = row.changes.iter().map(|change| clean(change)).collect();
    let mut out = format!("  {verdict}  {}\n", changes.join("; "));
    let mut line = |name: &str, text: String| out.push_str(&format!("          {name:<8} {}\n", clean(&text)));
    let except = task.except(row);
    let except = if except.is_empty() { String::new() } else { format!(" except {}", listed(&except)) };
    line("host", format!("{}{except}", listed(&row.hosts)));
    let schemes: Vec<&str> = row.schemes.iter().copied().collect();
    line("port", format!("{} ({})", values(&row.ports, "any port"), schemes.join(", ")));
    line("method", values(&row.methods, "any method"));
    let (paths, which) = regions(&row.paths);
    let paths = if paths == ["/**"] { "any path".to_owned() } else { cut(paths) };
    let which = match row.paths {
        Paths::All => String::new(),
        Paths::In(_) if paths != "any path" => String::new(),
        Paths::Ambiguous => which.unwrap_or_default().to_owned(),
        _ => format!(", {}", which.unwrap_or_default()),
    };
    line("path", if matches!(row.paths, Paths::Ambiguous) { which } else { format!("{paths}{which}") });
    line("by", listed(&row.ways));
    out
}

fn listed<T: std::fmt::Display>(items: &BTreeSet<T>) -> String {
    cut(items.iter().map(ToString::to_string).collect())
}

/// Joins texts, the first of them if there are many.
fn cut(texts: Vec<String>) -> String {
    let more = texts.len().saturating_sub(MAX_LISTED);
    let shown = texts.into_iter().take(MAX_LISTED).collect::<Vec<_>>().join(", ");
    if more == 0 { shown } else { format!("{shown} and {more} more, which --json prints") }
}

fn values<T: std::fmt::Display + Ord>(values: &Values<T>, any: &str) -> String {
    match values {
        Values::Only(values) => listed(values),
        Values::AllBut(values) if values.is_empty() => any.to_owned(),
        Values::AllBut(values) => format!("{any} except {}", listed(values)),
    }
}

//! `exeat audit replay`: the requests of an audit log that a new configuration would decide otherwise.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use clap::Args;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::Exit;
use super::log_files::{LogFiles, LogSelection};
use super::past_request::{self, LoggedPath, Outcome, Parsed, PastRequest};
use super::path_groups;
use super::terminal::{clean, escaped, print, say, table};
use crate::model::refusal::{Deny, Refusal};
use crate::model::tool::{Kind, Tool};
use crate::policy::path;
use crate::policy::rule::{AccessKind, MatchedRequest, MatchedRules, Mode, Policy, Task};
use crate::policy::usage::Usage;

/// The most rows. Further ones are only counted.
const MAX_ROWS: usize = 5_000;
/// The rows that are printed for reading.
const MAX_PRINTED: usize = 200;

/// Flags of `exeat audit replay`.
#[derive(Args)]
pub(super) struct ReplayArgs {
    #[command(flatten)]
    log: LogSelection,
    /// Print the result as JSON
    #[arg(long)]
    json: bool,
}

/// A difference between the decision in the log and that of the new configuration.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Change {
    /// It was allowed.
    Refused,
    /// It was sent with a credential that it would not get.
    NoCredential,
    /// It was not approved by an operator.
    NeedsApproval,
    /// It was inspected.
    NotInspected,
    /// It was an opaque tunnel.
    Inspected,
    /// It waited for an operator.
    NeedsNoApproval,
    /// It was refused by the rules.
    Allowed,
}

impl Change {
    const fn as_str(self) -> &'static str {
        match self {
            Self::Refused => "refused now",
            Self::NoCredential => "without its credential",
            Self::NeedsApproval => "needs an approval",
            Self::NotInspected => "not inspected now",
            Self::Inspected => "inspected now",
            Self::NeedsNoApproval => "needs no approval",
            Self::Allowed => "allowed now",
        }
    }
}

/// Requests that would be decided otherwise in the same way.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Row {
    change: Change,
    task: String,
    tool: Option<&'static str>,
    method: String,
    /// Scheme, host and port.
    to: String,
    /// The pattern of the path. Empty for a tunnel.
    path: String,
    /// The code of the refusal, then or now; or the credential.
    detail: String,
}

/// The result.
#[derive(Default)]
struct Replay {
    judged: u64,
    different: u64,
    /// Requests that the configuration cannot be asked about.
    not_judged: u64,
    unreadable: u64,
    rows: BTreeMap<Row, (u64, Option<OffsetDateTime>)>,
    tasks: BTreeSet<String>,
    usage: Usage,
}

/// The decision of the new configuration.
struct Decision {
    allowed: MatchedRules,
    needs_approval: bool,
}

pub(super) fn run(policy: &Policy, path: Option<&Path>, args: &ReplayArgs) -> Exit {
    let mut replay = Replay::default();
    let read =
        LogFiles::find(path, &args.log.files).and_then(|files| files.read(|line| replay.add(policy, line, args)));
    if let Err(why) = read {
        say(format_args!("exeat: {why}"));
        return Exit::Failed;
    }
    let unused = replay.usage.unused(policy, |task| replay.tasks.contains(task));
    if args.json {
        print(format_args!("{}\n", escaped(&format!("{:#}", replay.document(&unused)))));
    } else {
        print(replay.text(&unused));
    }
    if replay.unreadable > 0 {
        say(format_args!("note: {} lines are not lines of an audit log", replay.unreadable));
    }
    if replay.different > 0 { Exit::Refused } else { Exit::Done }
}

impl Replay {
    fn add(&mut self, policy: &Policy, written: &str, args: &ReplayArgs) {
        let request = match past_request::parse(written) {
            Parsed::Request(request) => *request,
            Parsed::Counted { count, of } => {
                let is_wanted = args.log.has(of.task.as_deref(), of.at);
                self.not_judged = self.not_judged.saturating_add(if is_wanted { count } else { 0 });
                return;
            }
            Parsed::Incomplete(of) => {
                let is_wanted = args.log.has(of.task.as_deref(), of.at);
                self.not_judged = self.not_judged.saturating_add(u64::from(is_wanted));
                return;
            }
            Parsed::Other => return,
            Parsed::Unreadable => {
                self.unreadable = self.unreadable.saturating_add(1);
                return;
            }
        };
        if !args.log.has(Some(request.task.as_str()), request.at) {
            return;
        }
        if self.tasks.len() < MAX_ROWS {
            self.tasks.insert(request.task.to_string());
        }
        if request.outcome == Outcome::Ended {
            return self.judge_address(policy, &request);
        }
        if !request.path.as_ref().is_none_or(is_whole) {
            // Another path may be judged otherwise.
            self.not_judged = self.not_judged.saturating_add(1);
            return;
        }
        self.judged = self.judged.saturating_add(1);
        let Some((change, detail)) = self.change(policy, &request) else { return };
        self.add_row(&request, change, detail);
    }

    fn add_row(&mut self, request: &PastRequest, change: Change, detail: String) {
        self.different = self.different.saturating_add(1);
        let row = Row {
            change,
            task: request.task.to_string(),
            tool: request.kind.tool().map(Tool::as_str),
            method: request.method.to_string(),
            to: format!("{}://{}", request.target.scheme().as_str(), request.target.authority()),
            path: pattern(request.path.as_ref()),
            detail,
        };
        if self.rows.contains_key(&row) || self.rows.len() < MAX_ROWS {
            let (count, last) = self.rows.entry(row).or_default();
            *count = count.saturating_add(1);
            *last = (*last).max(Some(request.at));
        }
    }

    fn change(&mut self, policy: &Policy, request: &PastRequest) -> Option<(Change, String)> {
        let decision = policy.task(&request.task).ok_or(Deny::CallerUnknown).and_then(|task| judge(task, request));
        let (was_allowed, code) = match request.outcome {
            Outcome::Refused(refusal) => (!is_of_the_rules(refusal), refusal.code()),
            Outcome::Allowed { .. } | Outcome::Ended => (true, ""),
        };
        let Decision { allowed, needs_approval } = match decision {
            Ok(decision) => decision,
            Err(_) if !was_allowed || !code.is_empty() => return None,
            Err(deny) => return Some((Change::Refused, Refusal::from(deny).code().to_owned())),
        };
        let whole = request.path.as_ref().map(|path| (&request.method, path_of(path)));
        self.usage.record(&allowed, &request.target, whole);
        if !was_allowed {
            return Some((Change::Allowed, code.to_owned()));
        }
        let is_refused = !code.is_empty();
        if let Outcome::Refused(Refusal::Deny(Deny::AddressNotAllowed)) = request.outcome {
            let is_allowed = request.address.is_some_and(|address| policy.check_address(address, &allowed).is_ok());
            return is_allowed.then(|| (Change::Allowed, code.to_owned()));
        }
        let lacks = |name: &str| !would_send(policy, request, name) && !is_always_sent(policy, request, name);
        if !is_refused && allowed.required().any(|name| lacks(name.as_str())) {
            return Some((Change::Refused, Refusal::from(Deny::CredentialRequired).code().to_owned()));
        }
        if let Outcome::Refused(Refusal::Deny(Deny::CredentialRequired)) = request.outcome {
            let is_allowed = allowed.required().next().is_none() && request.kind != Kind::Tool(Tool::ApiCall);
            return is_allowed.then(|| (Change::Allowed, code.to_owned()));
        }
        let is_sent_now = |name: &String| sends(policy, request, &allowed, name);
        if let Some(name) = request.credentials.iter().find(|name| !is_refused && !is_sent_now(name)) {
            return Some((Change::NoCredential, name.clone()));
        }
        let was_asked = request.needed_approval;
        match (was_asked, needs_approval) {
            (true, false) => return Some((Change::NeedsNoApproval, String::new())),
            (false, true) if !is_refused => return Some((Change::NeedsApproval, String::new())),
            _ => {}
        }
        if is_refused {
            return None;
        }
        match (request.path.is_none(), allowed.mode()) {
            (true, Mode::Inspect) => Some((Change::Inspected, String::new())),
            (false, Mode::Opaque) if request.kind == Kind::Raw => Some((Change::NotInspected, String::new())),
            _ => None,
        }
    }

    /// Judges the address of a request that was sent.
    fn judge_address(&mut self, policy: &Policy, request: &PastRequest) {
        let decision = policy.task(&request.task).and_then(|task| judge(task, request).ok());
        let (Some(Decision { allowed, .. }), Some(address)) = (decision, request.address) else { return };
        if policy.check_address(address, &allowed).is_err() {
            let detail = format!("{} ({address})", Refusal::from(Deny::AddressNotAllowed).code());
            self.add_row(request, Change::Refused, detail);
        }
    }

    fn document(&self, unused: &[String]) -> serde_json::Value {
        let rows = self.rows.iter().map(|(row, (count, last))| {
            let Row { change, task, tool, method, to, path, detail } = row;
            let last = last.and_then(|at| at.format(&Rfc3339).ok());
            serde_json::json!({
                "change": change.as_str(), "task": task, "tool": tool, "method": method, "to": to, "path": path,
                "detail": detail, "count": count, "last": last,
            })
        });
        serde_json::json!({
            "judged": self.judged, "not_judged": self.not_judged, "different": self.different,
            "requests": rows.collect::<Vec<_>>(), "unused": unused,
        })
    }

    fn text(&self, unused: &[String]) -> String {
        let mut out = match (self.judged, self.different) {
            (judged, 0) => format!("{judged} requests would be decided as they were\n"),
            (judged, different) => format!("of {judged} requests, {different} would be decided otherwise\n"),
        };
        if self.not_judged > 0 {
            out.push_str(&format!("{} more cannot be judged: the log does not say what they were\n", self.not_judged));
        }
        if !self.rows.is_empty() {
            let mut rows: Vec<_> = self.rows.iter().collect();
            rows.sort_by_key(|(row, (count, _))| (row.change, std::cmp::Reverse(*count)));
            let cells = rows.iter().take(MAX_PRINTED).map(|(row, (count, _))| {
                let method = row.tool.map_or_else(|| row.method.clone(), |tool| format!("{tool} {}", row.method));
                let request = format!("{method} {}{}", row.to, row.path);
                let cells =
                    [count.to_string(), row.change.as_str().to_owned(), row.task.clone(), request, row.detail.clone()];
                cells.iter().map(|cell| clean(cell)).collect()
            });
            out.push('\n');
            out.push_str(&table(&["COUNT", "CHANGE", "TASK", "REQUEST", "WHY"], cells));
            let hidden = rows.len().saturating_sub(MAX_PRINTED);
            if hidden > 0 {
                out.push_str(&format!("and {hidden} more rows, which --json prints\n"));
            }
        }
        if !unused.is_empty() {
            out.push_str("\nnone of these requests needs:\n");
            out.extend(unused.iter().map(|key| format!("  {}\n", clean(key))));
        }
        out
    }
}

/// Judges a request by the rules of a task.
fn judge(task: &Task, request: &PastRequest) -> Result<Decision, Deny> {
    let PastRequest { target, kind, method, .. } = request;
    let Some(path) = &request.path else {
        let allowed = task.destination(target, AccessKind::Connect)?;
        return Ok(Decision { allowed, needs_approval: false });
    };
    let MatchedRequest { allowed, .. } = task.judge(target, *kind, method, path_of(path))?;
    let needs_approval = allowed.approval(method, *kind).is_some();
    Ok(Decision { allowed, needs_approval })
}

/// Returns whether the request would still be sent with a credential.
fn sends(policy: &Policy, request: &PastRequest, allowed: &MatchedRules, name: &str) -> bool {
    let credential = policy.task(&request.task).and_then(|task| task.credentials().named(name));
    let lacks = || allowed.required().any(|required| !would_send(policy, request, required.as_str()));
    let may_go = credential.is_some_and(|credential| allowed.may_receive(credential, &request.target));
    may_go && would_send(policy, request, name) && !lacks()
}

/// Returns whether a credential would be sent, by the one that the client selected or beside it.
fn would_send(policy: &Policy, request: &PastRequest, name: &str) -> bool {
    let Some(task) = policy.task(&request.task) else { return false };
    let selected = request.credentials.first().and_then(|first| task.credentials().named(first));
    selected
        .is_some_and(|selected| task.credentials().sent_with(selected).iter().any(|sent| sent.name().as_str() == name))
}

/// Returns whether a credential is sent with every request of the task.
fn is_always_sent(policy: &Policy, request: &PastRequest, name: &str) -> bool {
    let Some(task) = policy.task(&request.task) else { return false };
    let mut always = task.credentials().always_injected().iter().flat_map(|one| task.credentials().sent_with(one));
    always.any(|sent| sent.name().as_str() == name) && request.kind.takes_placeholders()
}

/// Returns whether the log has the whole path, and no value was replaced in it.
fn is_whole(path: &LoggedPath) -> bool {
    match path {
        LoggedPath::Whole(path) => !path.contains("***"),
        LoggedPath::Cut(_) => false,
        LoggedPath::Hash => true,
    }
}

/// Returns whether the rules of the policy have refused a request. Limits, leaks and failures come after them.
fn is_of_the_rules(refusal: Refusal) -> bool {
    let Refusal::Deny(deny) = refusal else { return false };
    matches!(
        deny,
        Deny::HostNotAllowed
            | Deny::SchemeNotAllowed
            | Deny::PortNotAllowed
            | Deny::MethodNotAllowed
            | Deny::PathNotAllowed
            | Deny::RawNotAllowed
            | Deny::ToolNotEnabled
            | Deny::WebhookNotEnabled
            | Deny::WebhookNotRegistered
    )
}

/// Returns the path to judge. That of a webhook is not judged.
fn path_of(path: &LoggedPath) -> &str {
    match path {
        LoggedPath::Whole(path) | LoggedPath::Cut(path) => path,
        LoggedPath::Hash => "/",
    }
}

fn pattern(path: Option<&LoggedPath>) -> String {
    match path {
        None => String::new(),
        Some(LoggedPath::Hash) => "/…".to_owned(),
        Some(LoggedPath::Whole(path) | LoggedPath::Cut(path)) => match path::canonical(path) {
            Ok(canonical) => path_groups::text(&path_groups::pattern(&canonical)),
            Err(_) => path.clone(),
        },
    }
}

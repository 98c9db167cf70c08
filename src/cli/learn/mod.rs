//! `exeat audit learn`: the TOML that allows the requests of an audit log.
//!
//! A sandbox decides what it asks for, so everything that is kept while the log is read has a maximum number.

mod toml_text;

use std::collections::{BTreeMap, BTreeSet};
use std::net::IpAddr;
use std::path::Path;

use clap::Args;
use http::Method;
use time::OffsetDateTime;

use super::Exit;
use super::log_files::{LogFiles, LogSelection};
use super::past_request::{self, LoggedPath, Outcome, Parsed, PastRequest};
use super::path_groups::{self, Pattern};
use super::terminal::{print, say};
use crate::model::refusal::{Deny, Refusal};
use crate::model::target::{Scheme, Target};
use crate::model::tool::Kind;
use crate::policy::address::{self, Class};
use crate::policy::path;

/// The most destinations of a task.
const MAX_DESTINATIONS: usize = 2_000;
/// The most patterns for one method of a destination. With more of them, paths are not limited.
const MAX_PATTERNS: usize = 2_000;
/// The most patterns of all destinations together.
const MAX_ALL_PATTERNS: usize = 50_000;
/// The most methods of a destination.
const MAX_METHODS: usize = 50;
/// The most addresses of a destination.
const MAX_ADDRESSES: usize = 64;
/// The most tasks and credentials.
const MAX_NAMES: usize = 1_000;

/// Flags of `exeat audit learn`.
#[derive(Args)]
pub(super) struct LearnArgs {
    #[command(flatten)]
    log: LogSelection,
    /// Also allow the requests that were refused for their host, scheme, port, method or path
    #[arg(long)]
    refused: bool,
    /// More names than this at one place of the paths of a host become `*`
    #[arg(long, value_name = "N", default_value_t = 50, value_parser = clap::value_parser!(u16).range(1..))]
    max_names: u16,
}

impl LearnArgs {
    /// Returns whether the configuration says which file is meant.
    pub(super) fn needs_configuration(&self) -> bool {
        self.log.files.is_empty()
    }
}

/// How often something was seen, and when.
#[derive(Clone, Copy)]
struct Seen {
    count: u64,
    first: OffsetDateTime,
    last: OffsetDateTime,
}

impl Seen {
    fn at(at: OffsetDateTime) -> Self {
        Self { count: 1, first: at, last: at }
    }

    fn add(&mut self, other: Self) {
        self.count = self.count.saturating_add(other.count);
        self.first = self.first.min(other.first);
        self.last = self.last.max(other.last);
    }
}

/// Adds what was seen to an entry.
fn add_seen<K: Ord>(to: &mut BTreeMap<K, Seen>, key: K, seen: Seen) {
    to.entry(key).and_modify(|known| known.add(seen)).or_insert(seen);
}

/// The requests of a log.
#[derive(Default)]
struct Learned {
    all: Option<Seen>,
    tasks: BTreeMap<String, TaskRequests>,
    /// Requests that were refused, and are left out.
    refused: u64,
    /// Requests of which the log does not say enough.
    incomplete: u64,
    unreadable: u64,
    /// Requests that are beyond one of the maximum numbers.
    beyond: u64,
    /// Requests with methods that no configuration can list.
    unlistable: u64,
    /// The number of patterns of all tasks.
    patterns: usize,
}

/// The requests of one task.
#[derive(Default)]
struct TaskRequests {
    has_raw: bool,
    tools: BTreeSet<&'static str>,
    credentials: BTreeSet<String>,
    webhooks: u64,
    destinations: BTreeMap<Destination, Requests>,
}

/// The part of a request that one integration is about, beside its method and path.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Destination {
    host: String,
    port: u16,
    is_plain: bool,
    is_tunnel: bool,
    needs_approval: bool,
}

/// The requests to one destination.
#[derive(Default)]
struct Requests {
    target: Option<Target>,
    /// Special-purpose addresses that were used, with the names of their blocks.
    special: BTreeMap<IpAddr, &'static str>,
    /// The requests that only `observe` has allowed, and those that were refused.
    not_allowed: u64,
    credentials: BTreeMap<String, Seen>,
    methods: BTreeMap<String, MethodRequests>,
}

/// The requests with one method.
#[derive(Default)]
struct MethodRequests {
    patterns: BTreeMap<Pattern, Seen>,
    /// Requests that no pattern can allow, or that were too many.
    any_path: Option<Seen>,
    /// One of their paths.
    example: Option<String>,
}

pub(super) fn run(path: Option<&Path>, args: &LearnArgs) -> Exit {
    let mut learned = Learned::default();
    let read = LogFiles::find(path, &args.log.files).and_then(|files| files.read(|line| learned.add(line, args)));
    if let Err(why) = read {
        say(format_args!("exeat: {why}"));
        return Exit::Failed;
    }
    for note in learned.notes(args) {
        say(format_args!("note: {note}"));
    }
    if learned.tasks.is_empty() {
        say("exeat: the log has no requests to learn from");
        return Exit::Failed;
    }
    print(toml_text::of(learned, usize::from(args.max_names)));
    Exit::Done
}

impl Learned {
    fn add(&mut self, written: &str, args: &LearnArgs) {
        let request = match past_request::parse(written) {
            Parsed::Request(request) => *request,
            Parsed::Counted { count, of } => {
                let is_wanted = args.log.has(of.task.as_deref(), of.at);
                self.refused = self.refused.saturating_add(if is_wanted { count } else { 0 });
                return;
            }
            Parsed::Incomplete(of) if args.log.has(of.task.as_deref(), of.at) => {
                return increment(&mut self.incomplete);
            }
            Parsed::Incomplete(_) => return,
            Parsed::Other => return,
            Parsed::Unreadable => return increment(&mut self.unreadable),
        };
        if !args.log.has(Some(request.task.as_str()), request.at) {
            return;
        }
        let is_learned = match request.outcome {
            Outcome::Ended => return self.add_address(&request),
            Outcome::Allowed { .. } => true,
            Outcome::Refused(refusal) => args.refused && is_about_the_rules(refusal),
        };
        if !is_learned {
            return increment(&mut self.refused);
        }
        if request.path.is_some() && !is_listable(&request.method) {
            return increment(&mut self.unlistable);
        }
        let task = request.task.as_str().to_owned();
        if !self.tasks.contains_key(&task) && self.tasks.len() >= MAX_NAMES {
            return increment(&mut self.beyond);
        }
        let seen = Seen::at(request.at);
        if self.tasks.entry(task).or_default().add(request, &mut self.patterns) {
            self.all = Some(self.all.map_or(seen, |mut all| {
                all.add(seen);
                all
            }));
        } else {
            increment(&mut self.beyond);
        }
    }

    /// Adds the address of a request whose line has been read. Lines that were left out have no destination.
    fn add_address(&mut self, request: &PastRequest) {
        let Some(address) = request.address else { return };
        let block = match address::classify(address) {
            Class::Special(block) => block,
            Class::Metadata => "metadata service",
            Class::Public => return,
        };
        let task = self.tasks.get_mut(request.task.as_str());
        if let Some(requests) = task.and_then(|task| task.destinations.get_mut(&Destination::of(request)))
            && requests.special.len() < MAX_ADDRESSES
        {
            requests.special.insert(address, block);
        }
    }

    fn notes(&self, args: &LearnArgs) -> Vec<String> {
        let hint = if args.refused { "" } else { "; --refused includes those that a rule would allow" };
        let notes = [
            (self.refused, format!("requests were refused and are left out{hint}")),
            (self.incomplete, "lines do not say where the request went, and are left out".to_owned()),
            (self.unreadable, "lines are not lines of an audit log".to_owned()),
            (self.unlistable, "requests have a method that no configuration can list, and are left out".to_owned()),
            (self.beyond, "requests are beyond the number of hosts that are kept, and are left out".to_owned()),
        ];
        notes.into_iter().filter(|(count, _)| *count > 0).map(|(count, text)| format!("{count} {text}")).collect()
    }
}

impl TaskRequests {
    /// Returns false if there are too many destinations.
    fn add(&mut self, request: PastRequest, patterns: &mut usize) -> bool {
        match request.kind {
            Kind::Raw => self.has_raw = true,
            Kind::Tool(tool) => drop(self.tools.insert(tool.as_str())),
        }
        if matches!(request.path, Some(LoggedPath::Hash)) {
            increment(&mut self.webhooks);
            return true;
        }
        for credential in &request.credentials {
            if self.credentials.len() < MAX_NAMES {
                self.credentials.insert(credential.clone());
            }
        }
        let destination = Destination::of(&request);
        if !self.destinations.contains_key(&destination) && self.destinations.len() >= MAX_DESTINATIONS {
            return false;
        }
        self.destinations.entry(destination).or_default().add(request, patterns)
    }
}

impl Destination {
    fn of(request: &PastRequest) -> Self {
        Self {
            host: request.target.host().to_string(),
            port: request.target.port(),
            is_plain: request.target.scheme() == Scheme::Http,
            is_tunnel: request.path.is_none() && !matches!(request.outcome, Outcome::Refused(_)),
            needs_approval: request.needed_approval,
        }
    }
}

impl Requests {
    /// Returns false if there are too many methods.
    fn add(&mut self, request: PastRequest, patterns: &mut usize) -> bool {
        let seen = Seen::at(request.at);
        if !matches!(request.outcome, Outcome::Allowed { observed: false }) {
            increment(&mut self.not_allowed);
        }
        // The others come with it.
        if let Some(credential) = request.credentials.into_iter().next()
            && self.credentials.len() < MAX_NAMES
        {
            add_seen(&mut self.credentials, credential, seen);
        }
        let method = request.method.as_str();
        if !self.methods.contains_key(method) && self.methods.len() >= MAX_METHODS {
            return false;
        }
        self.methods.entry(method.to_owned()).or_default().add(request.path, seen, patterns);
        self.target.get_or_insert(request.target);
        true
    }
}

impl Requests {
    /// Returns the number of requests.
    fn count(&self) -> u64 {
        let of_method = |method: &MethodRequests| {
            method.patterns.values().chain(&method.any_path).map(|seen| seen.count).fold(0, u64::saturating_add)
        };
        self.methods.values().map(of_method).fold(0, u64::saturating_add)
    }
}

impl MethodRequests {
    fn add(&mut self, path: Option<LoggedPath>, seen: Seen, patterns: &mut usize) {
        let (pattern, text) = match path {
            Some(LoggedPath::Whole(text)) => {
                let pattern = path::canonical(&text).ok().map(|canonical| path_groups::pattern(&canonical));
                (pattern, text)
            }
            // The end, which could make it ambiguous, is not known.
            Some(LoggedPath::Cut(text)) => {
                let beginning = text.rfind('/').and_then(|end| text.get(..end)).unwrap_or_default();
                let below = |canonical: std::borrow::Cow<'_, str>| path_groups::pattern_of_all_below(&canonical);
                let pattern = match beginning {
                    "" => Some(vec!["*".to_owned()]),
                    _ => path::canonical(beginning).ok().map(below),
                };
                (pattern, text)
            }
            Some(LoggedPath::Hash) | None => (None, String::new()),
        };
        if let Some(pattern) = pattern {
            let is_known = self.patterns.contains_key(&pattern);
            if !is_known && (self.patterns.len() >= MAX_PATTERNS || *patterns >= MAX_ALL_PATTERNS) {
                return self.add_any(text, seen);
            }
            *patterns = patterns.saturating_add(usize::from(!is_known));
            return add_seen(&mut self.patterns, pattern, seen);
        }
        self.add_any(text, seen);
    }

    fn add_any(&mut self, text: String, seen: Seen) {
        self.example.get_or_insert(text);
        self.any_path = Some(self.any_path.map_or(seen, |mut any| {
            any.add(seen);
            any
        }));
    }
}

/// Returns whether a refusal is one that another integration could prevent.
fn is_about_the_rules(refusal: Refusal) -> bool {
    matches!(
        refusal,
        Refusal::Deny(
            Deny::HostNotAllowed
                | Deny::SchemeNotAllowed
                | Deny::PortNotAllowed
                | Deny::MethodNotAllowed
                | Deny::PathNotAllowed
        )
    )
}

/// Returns true if a method can be in a configuration, and a request with it be sent.
fn is_listable(method: &Method) -> bool {
    let has_form = method.as_str().bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'-');
    has_form && !matches!(*method, Method::CONNECT | Method::TRACE)
}

fn increment(count: &mut u64) {
    *count = count.saturating_add(1);
}

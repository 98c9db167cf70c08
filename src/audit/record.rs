//! The audit record of one exchange: filled in by the stages and written when it is dropped.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::net::IpAddr;
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::Request;
use sha2::{Digest, Sha256};

use super::finds::{FindReporter, Finds, StreamFinds};
use super::flood::{self, Source};
use super::line::{Event, Line, LineVerdict, Misplaced, PlaceholderPlace};
use super::progress::TransferCounts;
use super::sink::{Announce, Keep, Sink, SinkError};
use super::tally::{Ended, ExchangeKind, Outcome};
use super::timestamp;
use super::traces::OpenTrace;
use crate::files;
use crate::leak::{FindCount, Finding, LogValues, Matcher, ValueOwner};
use crate::model::dns::DnsFailure;
use crate::model::failure::FailureReason;
use crate::model::host::{Host, HostName};
use crate::model::limited::ReachedLimit;
use crate::model::name::{CredentialName, ExecutionId, TaskName, is_plain};
use crate::model::peer::{Peer, PeerNetwork};
use crate::model::refusal::{Deny, Fail, Refusal, Stage, Verdict};
use crate::model::target::Target;
use crate::model::tls::TlsFailure;
use crate::model::tool::{EXEAT_TOOL, Kind, Tool};
use crate::model::trace_context::TraceParent;
use crate::model::unique_id;
use crate::model::upstream_proxy::UpstreamProxyFailure;

/// The replacement for a host that contains a credential's value.
const REDACTED: &str = "[redacted]";
/// The maximum length of a logged method and path, in characters.
const MAX_METHOD: usize = 64;
/// In the log, the name of a place that is too long.
const TOO_LONG: &str = "[too long]";
/// The maximum length of the place of a placeholder, in bytes.
const MAX_PLACE: usize = 80;
const MAX_PATH: usize = 2048;
/// The maximum length of an unauthenticated caller's path, in characters. Such lines must not fill the disk.
const MAX_UNAUTHENTICATED_PATH: usize = 256;

/// The maximum length of the searched part of an unknown credential's name, in bytes.
const MAX_SEARCHED_NAME: usize = 4096;

/// The number of finds of one execution whose lines are always written, whatever the quota. It is far above the limit
/// that stops an execution, so that only finds of requests in flight are ever merely counted.
const MAX_FIND_LINES: u32 = 1_000;

/// The credits for a request whose head was sent to its origin with a credential.
const FEE: f64 = 0.5;

/// The progress of an exchange in the log.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Progress {
    /// Nothing was sent and no line was written.
    Undecided,
    /// The proxy answered the request itself. Only `closed` is missing.
    Answered,
    /// `decided` was queued; it may not have been written yet.
    Deciding,
    /// `decided` was written; `closed` is missing.
    Decided,
    /// No further line is written.
    Done,
}

/// The record of one exchange. It writes the missing lines when it is dropped, so early returns, client disconnects and
/// panics are logged too.
pub struct Record {
    sink: Arc<Sink>,
    finds: Arc<Finds>,
    line: Line,
    started: Instant,
    progress: Progress,
    counts: Arc<TransferCounts>,
    /// The values that must not appear in the log.
    values: Arc<LogValues>,
    /// Matches the caller's own values, of which no part may appear in the log either. `None` if the caller is unknown.
    own: Option<Arc<Matcher>>,
    /// The method and the path before redaction, until they are needed for a line. Never logged. Most refusals of a flood
    /// are only counted, and redacting a long path takes longer than all other work on them.
    unredacted: Option<RequestTarget>,
    /// The requested host, unredacted. Never logged.
    requested_host: Option<String>,
    /// The tool call as its client wrote it, unredacted. Never logged.
    call: Option<RequestTarget>,
    /// The recorded reason of the refusal.
    refusal: Option<Refusal>,
    /// The credentials whose values are sent.
    sent_values: Vec<CredentialName>,
    /// The credential that a refusal is about.
    about: Option<CredentialName>,
    /// The place of a placeholder for which the request is refused, as sent, unless it is long.
    placeholder_place: Option<String>,
    /// The task and execution that finds are counted for.
    caller: Option<(TaskName, ExecutionId)>,
    /// The network of the peer, for callers that are not authenticated.
    peer_network: PeerNetwork,
    /// Whether a credential was found in outbound data.
    found: bool,
    /// Other finds had stopped the execution before that one was counted.
    is_over_limit: bool,
    /// The number of finds in the response so far.
    finds_in_answer: u64,
    /// Counts them for the execution. `None` until the first, and once it has been handed over.
    reporter: Option<FindReporter>,
    /// The limit that was reached.
    limited: Option<ReachedLimit>,
    /// The reason for the failure, if its code has several.
    failure_reason: Option<FailureReason>,
    /// Resources held until the exchange ends.
    held: Vec<Box<dyn Send + Sync>>,
    /// Whether the line is always written, regardless of the quota for refusals.
    always_written: bool,
    /// No refusal repeats a part of the request.
    is_hidden: bool,
    /// The time until the request was released to its origin.
    released: Option<Duration>,
    /// `None` unless the exchange is traced.
    trace: Option<Box<OpenTrace>>,
}

/// The method and the path of a request, before redaction.
#[derive(Clone)]
struct RequestTarget {
    method: String,
    /// The path; for a webhook, its hash. `None` if it is not the destination's.
    path: Option<String>,
}

impl Record {
    /// Creates the record of a request from `peer`. Texts in it are redacted with `values`.
    #[must_use]
    pub fn begin(sink: &Arc<Sink>, finds: &Arc<Finds>, values: &Arc<LogValues>, peer: &Peer) -> Self {
        let id = unique_id::new();
        let original = peer.original().map(|address| address.to_string());
        let line = Line { id: id.to_string(), peer: Some(peer.to_string()), original, ..Line::default() };
        let mut trace = sink.traces().and_then(|traces| traces.begin(id));
        if let Some(trace) = &mut trace {
            trace.enter(Stage::Identify);
        }
        Self {
            sink: sink.clone(),
            finds: finds.clone(),
            line,
            started: Instant::now(),
            progress: Progress::Undecided,
            counts: Arc::new(TransferCounts::new()),
            values: values.clone(),
            own: None,
            unredacted: None,
            requested_host: None,
            call: None,
            refusal: None,
            about: None,
            sent_values: Vec::new(),
            placeholder_place: None,
            caller: None,
            peer_network: peer.network(),
            found: false,
            is_over_limit: false,
            finds_in_answer: 0,
            reporter: None,
            limited: None,
            failure_reason: None,
            held: Vec::new(),
            always_written: false,
            is_hidden: false,
            released: None,
            trace,
        }
    }

    /// Returns the request's id (UUIDv7), which is also the `Exeat-Request-Id` header.
    #[must_use]
    pub fn id(&self) -> &str {
        &self.line.id
    }

    /// Records the method and path as the client wrote them, without the query. A webhook's path is secret, so its
    /// hash is recorded instead.
    pub fn request<B>(&mut self, head: &Request<B>) {
        self.line.tool = Kind::of(head.headers()).ok().and_then(Kind::tool).map(|tool| tool.as_str().into());
        if let Some(trace) = &mut self.trace {
            trace.continues(TraceParent::of(head.headers()));
        }
        let method = head.method().as_str().to_owned();
        if *head.method() == http::Method::CONNECT {
            self.unredacted = Some(RequestTarget { method, path: None });
            return;
        }
        let path = head.uri().path();
        // A malformed webhook call is hashed too: its path is just as secret.
        let mut tools = head.headers().get_all(EXEAT_TOOL).iter();
        let path = if tools.any(|tool| {
            Tool::from_name(&String::from_utf8_lossy(tool.as_bytes())).is_none_or(|tool| tool == Tool::Webhook)
        }) {
            format!("sha256:{}", files::hex(&Sha256::digest(path)))
        } else {
            path.to_owned()
        };
        let is_call = head.headers().contains_key(EXEAT_TOOL);
        let target = RequestTarget { method, path: Some(path) };
        self.call = is_call.then(|| target.clone());
        self.unredacted = Some(target);
    }

    /// Notes for the trace that a stage begins, and that the one before has ended.
    pub fn enter(&mut self, stage: Stage) {
        if let Some(trace) = &mut self.trace {
            trace.enter(stage);
        }
    }

    /// Returns the trace context of the request to the origin: that of the client, as far as it is sent, or of the exchange's own
    /// span if it is traced.
    pub fn context_for_origin(&mut self, of_client: Option<TraceParent>) -> Option<TraceParent> {
        let has_value = self.has_value_in_context();
        let Some(trace) = &mut self.trace else { return of_client };
        // The origin gets the ids that the collector gets.
        if has_value || of_client.is_none() {
            trace.continues(None);
        }
        Some(trace.context())
    }

    /// Returns whether the client's trace context, whose ids the client chooses, holds a value.
    fn has_value_in_context(&self) -> bool {
        let Some(parent) = self.trace.as_ref().and_then(|trace| trace.parent()) else { return false };
        let texts = [parent.to_string(), format!("{:032x}{:016x}", parent.trace, parent.span)];
        texts.iter().any(|text| self.redact(text) != *text)
    }

    /// Records a request to the proxy itself that counts as a call. The verb takes the place of a tool; the path of the
    /// request is not the destination's, so it is removed.
    pub fn proxy_call(&mut self, verb: &'static str) {
        self.line.tool = Some(verb.into());
        if let Some(target) = &mut self.unredacted {
            target.path = None;
        }
    }

    /// Records a query to the DNS listener. The name is logged once the caller is known, like that of a destination.
    pub fn dns_query(&mut self) {
        self.line.tool = Some("dns".into());
    }

    /// Records the name that a query is for.
    pub fn dns_name(&mut self, name: &HostName) {
        self.record_host(name.as_str().to_owned());
    }

    fn record_host(&mut self, host: String) {
        self.line.host = Some(self.logged_name(&host).to_owned());
        self.requested_host = Some(host);
    }

    /// Records the caller. `own` matches its values. They are removed from the method and the path, and from all texts that
    /// follow.
    pub fn caller(&mut self, task: &TaskName, execution: &ExecutionId, own: Option<&Arc<Matcher>>) {
        self.line.task = Some(task.to_string());
        self.line.execution = Some(execution.to_string());
        self.caller = Some((task.clone(), execution.clone()));
        self.own = own.cloned();
    }

    /// Returns a name for the log: of a host, a field or a parameter. Names are in lower case, so a value is not overwritten in
    /// them like in other texts.
    fn logged_name<'n>(&self, name: &'n str) -> &'n str {
        let is_own = self.own.as_ref().is_some_and(|own| own.find_in_name(name).is_some());
        if is_own || self.values.occur_in_name(name) { REDACTED } else { name }
    }

    /// Records the destination.
    pub fn target(&mut self, target: &Target) {
        self.line.scheme = Some(target.scheme().as_str().into());
        self.destination(target.host(), target.port());
    }

    /// Records the destination of a connection whose protocol is not known.
    pub fn destination(&mut self, host: &Host, port: u16) {
        self.record_host(host.to_string());
        self.line.port = Some(port);
    }

    /// Returns the requested host as logged, if a target was parsed.
    #[must_use]
    pub fn host(&self) -> Option<&str> {
        self.line.host.as_deref()
    }

    /// Returns the requested host for the caller, or `None` if it contains one of the caller's own values. Other
    /// tasks' values are not removed, because their absence would reveal them.
    #[must_use]
    pub fn host_without(&self, own: &Matcher) -> Option<&str> {
        self.requested_host.as_deref().filter(|host| own.find_in_name(host).is_none())
    }

    /// Returns the URL of a tool call for the caller: like [`Self::url`], but redacts only the caller's own values.
    /// Returns `None` if no target was parsed, or if the URL may still contain such a value.
    #[must_use]
    pub fn url_without(&self, own: &Matcher) -> Option<String> {
        let (path, asked) = (self.call.as_ref()?.path.as_ref()?, self.requested_host.as_deref()?);
        let host = if own.find_in_name(asked).is_none() { asked } else { REDACTED };
        let url = self.line.url_of(host, &cut(&own.redact(path), MAX_PATH));
        // A value that is a URL can span host and path, and the host is in lower case.
        Some(url).filter(|url| own.find(url.as_bytes()).is_none() && own.find_in_name(url).is_none())
    }

    /// Returns the method of a tool call for the caller, or `None` if it contains one of the caller's own values.
    #[must_use]
    pub fn method_without(&self, own: &Matcher) -> Option<String> {
        let method = &self.call.as_ref()?.method;
        own.find(method.as_bytes()).is_none().then(|| cut(method, MAX_METHOD))
    }

    /// Finds one of the caller's own values in what a refusal shows of the request without them: the host, the place of
    /// a placeholder, and of a tool call also the rest of the URL and the method.
    #[must_use]
    pub fn own_in_refused(&self, own: &Matcher) -> Option<Finding> {
        let host = self.requested_host.as_deref()?;
        let place = self.placeholder_place.as_deref().unwrap_or_default();
        let in_place = || own.find(place.as_bytes()).or_else(|| own.find_in_name(place));
        own.find_in_name(host).or_else(in_place).or_else(|| {
            let RequestTarget { method, path } = self.call.as_ref()?;
            let path = path.as_ref()?;
            let whole = self.line.url_of(host, path);
            let text = || [&whole, path, method].into_iter().find_map(|text| own.find(text.as_bytes()));
            own.find_in_name(&whole).or_else(text)
        })
    }

    /// Records that the refusal may not repeat a part of the request, because it could not be searched for finds.
    pub fn hide_request(&mut self) {
        self.is_hidden = true;
    }

    /// Returns whether a refusal may repeat parts of the request. It may not once the execution has reached the limit of
    /// finds: that a part is left out would confirm another guess.
    #[must_use]
    pub fn may_repeat_request(&self) -> bool {
        !self.is_hidden && self.check_execution().is_ok()
    }

    /// Checks whether finds have stopped the execution.
    ///
    /// # Errors
    /// [`Deny::ExecutionStopped`].
    pub fn check_execution(&self) -> Verdict<()> {
        self.execution().map_or(Ok(()), |execution| self.finds.check(execution))
    }

    /// Records a value found in a request that is refused for another reason. It counts as a find too.
    pub fn additional_find(&mut self, found: &Finding, place: &str) {
        self.note_where_found(found, place);
        self.note_find();
    }

    /// Returns whether a credential was found in outbound data.
    #[must_use]
    pub fn has_find(&self) -> bool {
        self.found
    }

    /// Returns whether a credential was found, and counted for the limit of finds. Those over the limit are not: their
    /// execution had already been stopped.
    #[must_use]
    pub fn has_counted_find(&self) -> bool {
        self.found && !self.is_over_limit
    }

    fn note_where_found(&mut self, found: &Finding, place: &str) {
        self.rule(match &found.owner {
            ValueOwner::Credential(name) => format!("{name}: its value is in {place}"),
            other => format!("{other} is in {place}"),
        });
    }

    /// Records the rule that decided, or the detail of a refusal.
    pub fn rule(&mut self, rule: impl Into<String>) {
        self.line.rule = Some(self.noted(&rule.into(), 256));
    }

    /// Records the injected credential, if any, and those that are sent beside it, each with whether its value is sent.
    pub fn credentials<'n>(&mut self, credentials: impl Iterator<Item = (&'n CredentialName, bool)>) {
        self.sent_values.clear();
        let sent_values = &mut self.sent_values;
        let mut names = credentials.map(|(name, is_sent)| {
            sent_values.extend(is_sent.then(|| name.clone()));
            name.to_string()
        });
        self.line.credential_used = names.next();
        self.line.credentials_beside = names.collect();
    }

    /// Records the credentials whose values were sent in messages, beside those that are known.
    pub fn note_credentials_in_messages(&mut self) {
        for name in self.counts.credentials_in_messages() {
            let text = name.to_string();
            let is_known =
                self.line.credential_used.as_ref() == Some(&text) || self.line.credentials_beside.contains(&text);
            match &self.line.credential_used {
                _ if is_known => {}
                None => self.line.credential_used = Some(text),
                Some(_) => self.line.credentials_beside.push(text),
            }
            if !self.sent_values.contains(&name) {
                self.sent_values.push(name);
            }
        }
    }

    /// Returns the injected credential, if any.
    #[must_use]
    pub fn credential_used(&self) -> Option<&str> {
        self.line.credential_used.as_deref()
    }

    /// Records the approval that the request waits for or has used.
    pub fn approval(&mut self, id: &str) {
        self.line.approval = Some(id.to_owned());
    }

    /// Returns the approval that the request waits for or has used, if any.
    #[must_use]
    pub fn approval_id(&self) -> Option<&str> {
        self.line.approval.as_deref()
    }

    /// Returns the URL as logged: redacted, without the query, and with a hash for a webhook's path.
    #[must_use]
    pub fn url(&mut self) -> String {
        self.redact_target();
        let Some(host) = &self.line.host else { return String::new() };
        self.line.url_of(host, self.line.path.as_deref().unwrap_or("/"))
    }

    /// Returns the method as logged.
    #[must_use]
    pub fn method(&mut self) -> &str {
        self.redact_target();
        self.line.method.as_deref().unwrap_or_default()
    }

    /// Returns a refusal about one of the task's own credentials, and records the reason.
    pub fn refused_for(&mut self, deny: Deny, name: &CredentialName, why: &str) -> Refusal {
        self.rule(format!("{name}: {why}"));
        self.about = Some(name.clone());
        deny.into()
    }

    /// Returns a refusal of a placeholder of one of the task's own credentials, and records the place in which it stood:
    /// `header:NAME` or `query:NAME`.
    pub fn refused_placeholder(&mut self, name: &CredentialName, place: &str, reason: Misplaced) -> Refusal {
        // The name in it is text of the client. A long one is neither searched nor shown.
        let (kind, text) = place.split_once(':').unwrap_or((place, ""));
        let is_short = place.len() <= MAX_PLACE;
        let logged = if is_short { self.logged_name(text) } else { TOO_LONG };
        let logged = self.redact(&format!("{kind}:{logged}")).into_owned();
        self.rule(format!("{name}: its placeholder is in {logged}, {}", reason.text()));
        self.about = Some(name.clone());
        self.line.placeholder = Some(PlaceholderPlace { credential: name.to_string(), place: logged, reason });
        self.placeholder_place = is_short.then(|| place.to_owned());
        Deny::CredentialNotBound.into()
    }

    /// Records that the client itself sent the value of this credential, in its own place.
    pub fn sent_by_client(&mut self, name: &CredentialName) {
        self.line.sent_by_client = Some(name.to_string());
        self.finds.sent_by_client(name);
    }

    /// Returns the place of the placeholder for which the request is refused, for the caller. Returns `None` if it contains one
    /// of the caller's own values.
    #[must_use]
    pub fn place_without(&self, own: &Matcher) -> Option<&str> {
        let place = self.placeholder_place.as_deref()?;
        (own.find(place.as_bytes()).is_none() && own.find_in_name(place).is_none()).then_some(place)
    }

    /// Returns a refusal because the task has no credential with this name. A plausible name is recorded. A
    /// credential's value used as a name is not; it counts as a find. Of a long name only the start is searched, because it
    /// is neither sent nor shown.
    pub fn unknown_credential(&mut self, name: &str, values: &Matcher) -> Refusal {
        let name = name.get(..name.floor_char_boundary(MAX_SEARCHED_NAME)).unwrap_or_default();
        if let Some(found) = values.find(name.as_bytes()).or_else(|| values.find_in_name(name)) {
            self.additional_find(&found, "the place of a credential's name");
        } else if is_plain(name) {
            self.rule(format!("{name}: the task has no such credential"));
            self.about = Some(CredentialName::new(name));
        }
        Deny::CredentialUnknown.into()
    }

    /// Returns a refusal because of a value found at `place`. The credential's name is shown only to the task that
    /// owns it.
    pub fn leak(&mut self, found: &Finding, place: &str) -> Refusal {
        self.note_where_found(found, place);
        self.about = found.credential().cloned();
        self.count_find(Deny::LeakDetected.into());
        Deny::LeakDetected.into()
    }

    /// As [`Self::leak`], for a find in a header field.
    pub fn leak_in_field(&mut self, found: &Finding, field: &str) -> Refusal {
        let place = format!("the header field {}", self.logged_name(field));
        self.leak(found, &place)
    }

    /// Returns a refusal because of a limit of the plan.
    pub fn limited(&mut self, deny: Deny, limited: ReachedLimit) -> Refusal {
        self.rule(format!("{}: {}", limited.name, limited.limit));
        self.limited = Some(limited);
        deny.into()
    }

    /// Returns a refusal because TLS with the origin failed.
    pub fn tls_failed(&mut self, failure: TlsFailure) -> Refusal {
        self.line.tls_error = Some(failure.kind.text().name.into());
        self.failed_because(FailureReason::Tls(failure))
    }

    /// Returns a refusal because the name of the destination has no address.
    pub fn resolve_failed(&mut self, failure: DnsFailure) -> Refusal {
        self.rule(format!("dns: {}", failure.text().name));
        self.failed_because(FailureReason::Dns(failure))
    }

    /// Returns a refusal because the upstream proxy did not open a connection.
    pub fn upstream_proxy_failed(&mut self, failure: UpstreamProxyFailure) -> Refusal {
        self.rule(format!("upstream proxy: {}", failure.text().name));
        self.failed_because(FailureReason::UpstreamProxy(failure))
    }

    fn failed_because(&mut self, reason: FailureReason) -> Refusal {
        self.failure_reason = Some(reason);
        reason.refusal()
    }

    /// Returns the reason for the refusal, if its code has several.
    #[must_use]
    pub fn reason_for(&self, refusal: Refusal) -> Option<FailureReason> {
        self.failure_reason.filter(|reason| reason.refusal() == refusal)
    }

    /// Returns the limit, if that is the reason for the refusal.
    #[must_use]
    pub fn limit(&self) -> Option<&ReachedLimit> {
        self.limited.as_ref()
    }

    /// Holds a resource until the exchange ends.
    pub fn hold(&mut self, place: impl Send + Sync + 'static) {
        self.held.push(Box::new(place));
    }

    /// Returns the credential that the refusal is about. It is one of the task's own, so its name may be shown.
    #[must_use]
    pub fn about(&self) -> Option<&CredentialName> {
        self.about.as_ref()
    }

    /// Records that the response was truncated.
    pub fn truncated(&mut self) {
        self.line.truncated = Some(true);
    }

    /// Records that credentials in the response were redacted. Raises an alarm if one of them was not sent.
    pub fn redacted(&mut self, count: u64, whose: &[Vec<&ValueOwner>]) {
        self.line.redacted = Some(count);
        let was_sent =
            |one: &ValueOwner| matches!(one, ValueOwner::Credential(name) if self.sent_values.contains(name));
        let unsent = whose.iter().filter(|one| !one.iter().any(|one| was_sent(one))).flatten();
        let unsent: BTreeSet<String> = unsent.map(ToString::to_string).collect();
        if !unsent.is_empty() {
            let names = unsent.into_iter().collect::<Vec<_>>().join(", ");
            self.line.alarm = Some(format!("came back without having been sent: {names}"));
        } else if self.finds_in_answer > 0 {
            self.line.alarm = Some("a part of a credential came back without the rest of it".to_owned());
        }
    }

    /// Records the total number of finds in the response so far.
    ///
    /// # Errors
    /// As [`FindReporter::reached`].
    pub fn finds_in_answer(&mut self, finds: FindCount) -> Verdict<()> {
        let mut reporter = self.find_reporter();
        self.finds_in_answer = self.finds_in_answer.max(finds.certain);
        let reached = reporter.reached(finds);
        self.reporter = Some(reporter);
        reached
    }

    /// Returns a recorder for the find in the part of the request that is searched while it is sent.
    #[must_use]
    pub fn stream_finds(&self) -> StreamFinds {
        StreamFinds::new(&self.finds, self.execution().cloned())
    }

    /// Returns a reporter that counts the finds in the rest of the response.
    #[must_use]
    pub fn find_reporter(&mut self) -> FindReporter {
        if let Some(reporter) = self.reporter.take() {
            return reporter;
        }
        let execution = self.caller.as_ref().map(|(_, execution)| execution.clone());
        FindReporter::new(&self.finds, execution, self.finds_in_answer)
    }

    /// Removes credentials from an external text.
    #[must_use]
    pub fn redact<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let redacted = self.values.redact(text);
        match &self.own {
            None => redacted,
            Some(own) => match own.redact_for_log(&redacted) {
                Cow::Borrowed(_) => redacted,
                Cow::Owned(own) => Cow::Owned(own),
            },
        }
    }

    /// Redacts the method and the path for the log.
    fn redact_target(&mut self) {
        let Some(target) = self.unredacted.take() else { return };
        self.line.method = Some(self.noted(&target.method, MAX_METHOD));
        self.line.path = target.path.as_ref().map(|path| self.noted(path, MAX_PATH));
        if self.caller.is_none() {
            // Once the caller is known, parts of its own values are removed as well.
            self.unredacted = Some(target);
        }
    }

    /// Redacts a text, then truncates it. The other order could leave a part of a value that is not found.
    fn noted(&self, text: &str, most: usize) -> String {
        cut(&self.redact(text), most)
    }

    /// Records the upstream proxy that the request leaves through, and whether the address of its destination was checked. `None`
    /// for a request that leaves directly.
    pub fn upstream_proxy(&mut self, proxy: Option<String>, is_checked: bool) {
        self.line.upstream_proxy = proxy;
        self.line.addr_checked = (!is_checked).then_some(false);
    }

    /// Records the dialled address, or the one that the upstream proxy was asked for.
    pub fn address(&mut self, address: IpAddr) {
        self.line.addr = Some(address.to_string());
    }

    /// Records the protocol spoken with the origin.
    pub fn alpn(&mut self, alpn: &'static str) {
        self.line.alpn = Some(alpn.into());
    }

    /// Records that the request is sent a second time, because the pooled connection that it was sent on was
    /// closed.
    pub fn repeated(&mut self) {
        self.line.repeated = Some(true);
        self.counts.sends_again();
    }

    /// Records the origin's status.
    pub fn status(&mut self, status: http::StatusCode) {
        self.line.response_status = Some(status.as_u16());
    }

    /// Returns the counters that the bodies share.
    #[must_use]
    pub fn transfer_counts(&self) -> Arc<TransferCounts> {
        self.counts.clone()
    }

    /// Ensures that the line is written and not only counted. The caller must bound such lines by other means.
    pub fn keep_line(&mut self) {
        self.always_written = true;
    }

    /// Checks that the log can be written, according to the last write. After a failed write, tries again.
    ///
    /// # Errors
    /// [`Fail::AuditUnavailable`]: then nothing may leave.
    pub async fn can_be_written(&self) -> Verdict<()> {
        if self.sink.is_healthy() || (self.sink.flush().await.is_ok() && self.sink.is_healthy()) {
            return Ok(());
        }
        Err(Fail::AuditUnavailable.into())
    }

    /// Writes that the name of the destination is about to be looked up, and waits until it has been written. The query
    /// leaves whatever becomes of the request.
    ///
    /// # Errors
    /// [`Fail::AuditUnavailable`] if the sink cannot take it: then nothing may leave.
    pub async fn write_lookup(&self) -> Verdict<()> {
        let Line { id, task, execution, peer, scheme, host, port, .. } = self.line.clone();
        let (ts, event) = (timestamp::now(), Event::LookedUp);
        let line = Line { ts, id, event, task, execution, peer, scheme, host, port, ..Line::default() };
        self.sink.write_and_wait(&line).await.map_err(|SinkError| Fail::AuditUnavailable.into())
    }

    /// Returns whether `decided` was written or queued: the call was admitted, and a second line closes it.
    #[must_use]
    pub fn is_decided(&self) -> bool {
        matches!(self.progress, Progress::Deciding | Progress::Decided)
    }

    /// Writes `decided` and waits until it has been written.
    ///
    /// # Errors
    /// [`Fail::AuditUnavailable`] if the sink cannot take it: then nothing may be sent.
    pub async fn write_decision(&mut self) -> Verdict<()> {
        self.enter(Stage::Audit);
        self.redact_target();
        self.stamp(Event::Decided);
        // The verdict of the exchange is not known yet.
        let verdict = self.line.verdict.replace(LineVerdict::Allow);
        self.sink.recent().offer(&self.line);
        let written = self.sink.write_and_wait(&self.line);
        self.line.verdict = verdict;
        self.progress = Progress::Deciding;
        self.sink.opened();
        match written.await {
            Ok(()) => {
                self.progress = Progress::Decided;
                // A tunnel has waited for its client and for the connection to the origin by now.
                let is_tunnel = self.line.method.as_deref() == Some("CONNECT");
                self.released = (!is_tunnel).then(|| self.started.elapsed());
                Ok(())
            }
            Err(SinkError) => {
                self.progress = Progress::Undecided;
                self.sink.closed();
                Err(Fail::AuditUnavailable.into())
            }
        }
    }

    /// Records why the exchange failed, for the line that is written on drop.
    pub fn failed(&mut self, refusal: Refusal) {
        let counts = self.counts.clone();
        // A find has been counted, so it has its line even if another reason came first.
        let refusal = if counts.find().is_some() { Deny::LeakDetected.into() } else { refusal };
        self.count_find(refusal);
        if self.counts.has_client_failed() && refusal != Deny::LeakDetected.into() {
            // A client that has disconnected takes precedence over any other result.
            return self.abandoned();
        }
        if let Some(find) = counts.find() {
            self.leak(&find.found, find.place);
        }
        let notice = refusal.notice();
        self.refusal = Some(refusal);
        self.line.code = Some(notice.code.into());
        self.line.stage = Some(notice.stage.as_str().into());
        self.line.verdict = Some(match refusal {
            Refusal::Deny(_) => LineVerdict::Deny,
            Refusal::Fail(_) => LineVerdict::Fail,
        });
    }

    /// Returns the recorded reason. It is a find if there was one in the request, whatever else has ended the exchange.
    #[must_use]
    pub fn refusal(&self) -> Option<Refusal> {
        self.refusal
    }

    /// Counts a find, once per exchange and only here. Finds count even if the client has disconnected: a guess
    /// does not need the response.
    fn count_find(&mut self, refusal: Refusal) {
        if refusal == Deny::LeakDetected.into() {
            self.note_find();
        }
    }

    /// Returns the refusal that the caller is shown. A find over the limit is not shown as such, because it would confirm
    /// one more guess than the limit allows. Its line in the log is that of a find.
    #[must_use]
    pub fn shown(&self, refusal: Refusal) -> Refusal {
        let is_hidden = self.is_over_limit && refusal == Deny::LeakDetected.into();
        if is_hidden { Deny::ExecutionStopped.into() } else { refusal }
    }

    fn note_find(&mut self) {
        if std::mem::replace(&mut self.found, true) {
            return;
        }
        if let Some((_, execution)) = &self.caller {
            let noted_before = self.counts.find().and_then(|find| find.noted);
            let noted = noted_before.unwrap_or_else(|| self.finds.note(execution));
            self.always_written |= noted.number <= MAX_FIND_LINES;
            self.is_over_limit = noted.is_over_limit;
        }
    }

    /// Records that the client disconnected before the end.
    pub fn abandoned(&mut self) {
        if self.counts.find().is_some() {
            return self.failed(Deny::LeakDetected.into());
        }
        self.line.verdict = Some(LineVerdict::Abandoned);
    }

    /// Records that the proxy answered the request itself. Such an exchange has a single line.
    pub fn answered(&mut self) {
        self.progress = Progress::Answered;
        self.line.verdict = Some(LineVerdict::Allow);
    }

    /// Returns whether [`Self::answered`] was called.
    #[must_use]
    pub fn is_answered(&self) -> bool {
        matches!(self.progress, Progress::Answered)
    }

    /// Records that a tunnel ended normally, or that a query was answered.
    pub fn completed(&mut self) {
        self.line.verdict = Some(LineVerdict::Allow);
    }

    /// Returns the task, if the caller is known.
    #[must_use]
    pub fn task(&self) -> Option<&str> {
        self.line.task.as_deref()
    }

    /// Returns the execution, if the caller is known.
    #[must_use]
    pub fn execution(&self) -> Option<&ExecutionId> {
        self.caller.as_ref().map(|(_, execution)| execution)
    }

    /// Drops the record of a tunnel without a line, because that of its first request stands for it.
    pub fn replaced_by(self, first: &mut Self) {
        first.always_written |= self.always_written;
        self.forget();
    }

    /// Drops the record without a line.
    pub fn forget(mut self) {
        self.progress = Progress::Done;
    }

    /// Drops the resources that are held until the exchange ends.
    pub fn release(&mut self) {
        self.held.clear();
    }

    /// Returns the source whose quota of lines a refusal would use.
    fn source(&self) -> Source {
        match &self.caller {
            Some((task, execution)) => Source::Execution(task.clone(), execution.clone()),
            None => Source::Unknown(self.peer_network),
        }
    }

    /// Adds what is known at the end of the exchange to the line.
    fn complete_line(&mut self, decided: bool) {
        if decided {
            self.note_credentials_in_messages();
        }
        let line = &mut self.line;
        if decided {
            line.request_bytes = Some(self.counts.sent_so_far());
            line.response_size_bytes = Some(self.counts.received_so_far());
        } else {
            // The credential was selected but not used.
            line.credential_used = None;
            line.credentials_beside.clear();
        }
        let elapsed = self.started.elapsed().as_secs_f64() * 1000.0;
        line.latency_ms = Some((elapsed * 1000.0).round() / 1000.0);
        // The credits are due whatever the result: the origin may have processed the request.
        line.credits = line.credential_used.as_ref().filter(|_| decided && self.counts.has_left()).map(|_| FEE);
    }

    /// Adds the exchange to the sums for metrics, whether or not it gets a line of its own.
    fn tally(&self, verdict: LineVerdict, is_decided: bool) {
        let method = self.unredacted.as_ref().map_or(self.line.method.as_deref(), |target| Some(&target.method));
        let kind = if self.line.response_status == Some(101) {
            ExchangeKind::Websocket
        } else if method == Some("CONNECT") {
            ExchangeKind::Tunnel
        } else {
            ExchangeKind::Request
        };
        let notice = self.refusal.map(Refusal::notice);
        let outcome = Outcome {
            kind,
            verdict: verdict.as_str(),
            code: notice.as_ref().map_or("", |notice| notice.code),
            stage: notice.as_ref().map_or("", |notice| notice.stage.as_str()),
        };
        self.sink.tally().add(&Ended {
            line: &self.line,
            outcome,
            is_decided,
            is_find: self.found,
            duration: self.started.elapsed(),
            released_after: self.released,
            scanned: self.counts.scans(),
        });
    }

    /// Hands the trace over. Callers that are not identified have none: anybody could fill the collector.
    fn end_trace(&mut self) {
        let has_value = self.has_value_in_context();
        let Some(mut trace) = self.trace.take() else { return };
        let (Some((task, _)), Some(traces)) = (&self.caller, self.sink.traces()) else { return };
        if self.found || has_value {
            trace.continues(None);
        }
        traces.add(task.as_str(), trace.end(&self.line, self.started));
    }

    /// Completes the line for an event.
    fn stamp(&mut self, event: Event) {
        (self.line.ts, self.line.event) = (timestamp::now(), event);
        self.line.finds = self.caller.as_ref().and_then(|(_, execution)| self.finds.total(execution));
        if self.caller.is_none()
            && let Some(path) = &mut self.line.path
        {
            *path = cut(path, MAX_UNAUTHENTICATED_PATH);
        }
    }
}

impl Drop for Record {
    fn drop(&mut self) {
        // The client may have left before the task of the exchange learned of a find in its request.
        if self.progress != Progress::Done && !self.found && self.counts.find().is_some() {
            self.failed(Deny::LeakDetected.into());
        }
        let decided = match self.progress {
            Progress::Done => return,
            Progress::Undecided | Progress::Answered => false,
            Progress::Deciding | Progress::Decided => true,
        };
        let is_answered = self.line.response_status.is_some();
        let default = if is_answered { LineVerdict::Allow } else { LineVerdict::Abandoned };
        let verdict = *self.line.verdict.get_or_insert(default);
        let refused = self.progress == Progress::Undecided;
        let counted_as = if refused {
            self.refusal.map_or(verdict.as_str(), |refusal| refusal.notice().code)
        } else {
            flood::ANSWERED
        };
        self.complete_line(decided);
        self.tally(verdict, decided);
        if !decided && !self.always_written && !self.sink.admits(self.source(), counted_as) {
            self.sink.recent().skip();
            return;
        }
        self.redact_target();
        self.stamp(if refused { Event::Refused } else { Event::Closed });
        self.end_trace();
        let line = &self.line;
        let told = match (line.credits, &line.tool, &line.execution) {
            (Some(_), _, _) => Announce::Bill,
            (None, Some(_), Some(_)) => Announce::Record,
            (None, ..) => Announce::No,
        };
        self.sink.recent().offer(line);
        let keep = if decided || self.always_written { Keep::Line } else { Keep::Count };
        self.sink.write(&self.line, told, keep);
        if decided {
            self.sink.closed();
        }
    }
}

fn cut(text: &str, most: usize) -> String {
    text.chars().take(most).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::audit::sink;
    use crate::model::name::TaskName;

    const VALUE: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb";

    /// The find may become known between the stop of the execution, which ends the exchange, and its record. The response must
    /// not show that there was one, nor its credential.
    #[tokio::test]
    async fn a_find_over_the_limit_is_not_shown_if_it_becomes_known_late() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = sink::tests::parts(dir.path());
        let (sink, _) = Sink::open(place, key, true, tokio::sync::mpsc::channel(4).0).unwrap();
        let (sink, finds) = (Arc::new(sink), Arc::new(Finds::new(|| 1)));
        let (found, stopped) = (Refusal::from(Deny::LeakDetected), Refusal::from(Deny::ExecutionStopped));
        let matcher = Matcher::new(std::iter::once((ValueOwner::Token, VALUE.as_bytes())));
        for shown in [found, stopped] {
            let mut record = Record::begin(&sink, &finds, &Arc::default(), &Peer::unix(0, None));
            record.caller(&TaskName::new("t"), &ExecutionId::new("e"), None);
            let find = matcher.find(VALUE.as_bytes()).unwrap();
            record.transfer_counts().stop_at_find(find, "the body", &record.stream_finds());
            record.failed(stopped);
            assert_eq!(record.refusal(), Some(found));
            assert_eq!(record.shown(found), shown);
        }
    }

    /// Waiting for the ledger would show that a request of a stopped execution contained a value.
    #[tokio::test]
    async fn a_find_over_the_limit_is_not_waited_for() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = sink::tests::parts(dir.path());
        let (sink, _) = Sink::open(place, key, true, tokio::sync::mpsc::channel(4).0).unwrap();
        let (sink, finds) = (Arc::new(sink), Arc::new(Finds::new(|| 2)));
        let counted = (0..4).map(|_| {
            let mut record = Record::begin(&sink, &finds, &Arc::default(), &Peer::unix(0, None));
            record.caller(&TaskName::new("t"), &ExecutionId::new("e"), None);
            record.failed(Deny::LeakDetected.into());
            (record.has_find(), record.has_counted_find())
        });
        assert_eq!(counted.collect::<Vec<_>>(), [(true, true), (true, true), (true, false), (true, false)]);
    }

    /// A find is counted where it is found. The exchange can end for another reason before its task learns of it.
    #[tokio::test]
    async fn a_counted_find_has_its_line_however_the_exchange_ends() {
        let dir = tempfile::tempdir().unwrap();
        let (place, key) = sink::tests::parts(dir.path());
        let log = place.path.clone().unwrap();
        let (sink, _) = Sink::open(place, key, true, tokio::sync::mpsc::channel(4).0).unwrap();
        let (sink, finds) = (Arc::new(sink), Arc::new(Finds::new(|| 100)));
        let matcher = Matcher::new(std::iter::once((ValueOwner::Token, VALUE.as_bytes())));
        let execution = ExecutionId::new("e");
        let ends: [fn(&mut Record); 4] = [
            |_| {},
            Record::abandoned,
            |record| record.failed(crate::model::refusal::Fail::RequestTimedOut.into()),
            |record| record.failed(Deny::LeakDetected.into()),
        ];
        for end in ends {
            let mut record = Record::begin(&sink, &finds, &Arc::default(), &Peer::unix(0, None));
            record.caller(&TaskName::new("t"), &execution, None);
            let found = matcher.find(VALUE.as_bytes()).unwrap();
            record.transfer_counts().stop_at_find(found, "the body", &record.stream_finds());
            end(&mut record);
        }
        sink.flush().await.unwrap();
        let text = std::fs::read_to_string(log).unwrap();
        assert_eq!(text.matches("\"code\":\"leak_detected\"").count(), ends.len(), "{text}");
        assert_eq!(finds.total(&execution), Some(4));
    }
}

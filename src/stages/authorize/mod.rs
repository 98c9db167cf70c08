//! Authorizes a destination by host, scheme and port, and each request by method, path and credential.

pub(super) mod credential;
pub mod revocation;

use http::Method;
use http::Version;
use http::header::HOST;
use http::request::Parts;
use http::uri::PathAndQuery;

use std::sync::Arc;
use std::time::Duration;

use self::credential::SelectedCredential;
use super::identify::{Caller, Proof};
use super::limit::redact::RedactionPlan;
use super::limit::report::ReportTarget;
use super::throttle::Taken;
use crate::audit::record::Record;
use crate::coding::{DecodeLimits, Direction};
use crate::leak::Matcher;
use crate::ledger::Millis;
use crate::model::name::{CredentialName, ExecutionId};
use crate::model::refusal::{Deny, Fail, Verdict};
use crate::model::target::Target;
use crate::model::tool::Kind;
use crate::policy::credential::{PlaceholderSyntax, Placement};
use crate::policy::plan::{Limits, Timeouts};
use crate::policy::rule::{AccessKind, Ech, MatchedRules, Mode, Policy, Task};

/// Evidence that a task may reach a destination.
///
/// ```compile_fail
/// use exeat::{model::target::Target, stages::authorize::Admitted};
/// // What was admitted for one target is not for another.
/// fn elsewhere(admitted: Admitted, target: Target) -> Admitted { Admitted { target, ..admitted } }
/// ```
/// ```
/// use exeat::stages::authorize::Admitted;
/// fn host(admitted: &Admitted) -> String { admitted.target().authority() }
/// ```
#[derive(Clone)]
pub struct Admitted {
    caller: Caller,
    target: Target,
    asked: AccessKind,
    allowed: MatchedRules,
    generation: u64,
}

/// Evidence that one request may be sent to an admitted destination.
///
/// ```compile_fail
/// use exeat::stages::authorize::{Admitted, Grant};
/// // What was granted for one destination is not for another.
/// fn elsewhere(grant: Grant, admitted: Admitted) -> Grant { Grant { admitted, ..grant } }
/// ```
/// ```
/// use exeat::stages::authorize::{Admitted, Grant};
/// fn of(grant: &Grant) -> &Admitted { grant.admitted() }
/// ```
pub struct Grant {
    admitted: Admitted,
    method: Method,
    path: PathAndQuery,
    limits: Limits,
    reader: ReportTarget,
    values: Arc<Matcher>,
    own: Arc<Matcher>,
    masked: Arc<Matcher>,
    bounds: DecodeLimits,
    marks: PlaceholderSyntax,
    chosen: Option<SelectedCredential>,
    exclusive: Option<Vec<Placement>>,
    known_there: bool,
    restricted: bool,
}

/// The part of a grant that is checked again under a later policy.
#[derive(Clone)]
pub(crate) struct RevocationCheck {
    admitted: Admitted,
    method: Method,
    path: PathAndQuery,
    credential: Option<CredentialName>,
    /// A person has allowed it.
    approved: bool,
    /// The values that are searched for while the exchange lasts.
    values: Option<Arc<Matcher>>,
}

impl RevocationCheck {
    /// Returns the execution of the exchange.
    pub(super) fn execution(&self) -> &ExecutionId {
        self.admitted.caller.execution()
    }

    /// When its execution ends by itself.
    pub(super) fn expires_at(&self) -> Option<Millis> {
        self.admitted.caller.facts().expires_at
    }

    /// Of an exchange that goes on with what it looks for: it ends if that changes.
    pub(super) fn looking_for(self, values: &Arc<Matcher>) -> Self {
        Self { values: Some(values.clone()), ..self }
    }

    /// Of an exchange that a person has allowed: no later policy has to ask for it again.
    pub(super) fn approved(self) -> Self {
        Self { approved: true, ..self }
    }

    /// Returns the rules that match under a later policy; `None` if this policy granted the exchange.
    ///
    /// # Errors
    /// As [`request`]; [`Deny::ApprovalPending`] if it would have to be approved now, and was not;
    /// [`Fail::Draining`] if other values are to be looked for from now on.
    pub(super) fn renewed(&self, policy: &Policy) -> Verdict<Option<MatchedRules>> {
        if self.admitted.generation == policy.generation() {
            return Ok(None);
        }
        let current = destination_again(policy, &self.admitted)?;
        let task = task(policy, &current.caller)?;
        let judged = task.request(&current.target, &current.allowed, &self.method, self.path.path())?;
        if judged.allowed.required().any(|name| Some(name) != self.credential.as_ref()) {
            return Err(Deny::CredentialRequired.into());
        }
        if !self.approved && judged.allowed.approval(&self.method, current.kind()).is_some() {
            return Err(Deny::ApprovalPending.into());
        }
        if let Some(name) = &self.credential {
            let known = task.credentials().iter().find(|credential| credential.name() == name);
            let known = known.filter(|credential| credential.value().is_some()).ok_or(Deny::CredentialUnknown)?;
            if !known.is_bound_to(&current.target, &judged.allowed) {
                return Err(Deny::CredentialNotBound.into());
            }
        }
        if self.values.as_ref().is_some_and(|values| !values.looks_for_the_same_as(task.own())) {
            // It may come again, and is looked through for the new ones then.
            return Err(Fail::Draining.into());
        }
        Ok(Some(judged.allowed))
    }
}

impl Admitted {
    /// Returns the caller.
    #[must_use]
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Where to.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the rules that match.
    #[must_use]
    pub fn allowed(&self) -> &MatchedRules {
        &self.allowed
    }

    /// Whether requests inside a tunnel are seen.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.allowed.mode()
    }

    /// Whether an encrypted `ClientHello` passes in an opaque tunnel.
    #[must_use]
    pub fn ech(&self) -> Ech {
        self.allowed.ech()
    }

    /// Returns the kind of the request; a tunnel is not a tool call.
    fn kind(&self) -> Kind {
        match self.asked {
            AccessKind::Connect | AccessKind::Probe => Kind::Raw,
            AccessKind::Request(kind) => kind,
        }
    }

    /// Under which policy this was judged.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

impl Grant {
    /// The destination, narrowed to the integrations that allow this very request.
    #[must_use]
    pub fn admitted(&self) -> &Admitted {
        &self.admitted
    }

    /// The method that was judged.
    #[must_use]
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The path and query to send: where a path was judged, its canonical bytes.
    #[must_use]
    pub fn path(&self) -> &PathAndQuery {
        &self.path
    }

    /// How long the exchange may take.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        self.limits.timeouts
    }

    /// Returns the limits of the exchange.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// A tool call, or not.
    pub(super) fn kind(&self) -> Kind {
        self.admitted.kind()
    }

    /// How long an approval is good for, if a person has to allow this very request.
    pub(super) fn approval(&self) -> Option<Duration> {
        self.admitted.allowed.approval(&self.method, self.kind())
    }

    /// Returns the target of the body report.
    pub(super) fn reader(&self) -> ReportTarget {
        self.reader
    }

    /// Returns the data to check under a later policy.
    pub(super) fn revocation_check(&self) -> RevocationCheck {
        RevocationCheck {
            admitted: self.admitted.clone(),
            method: self.method.clone(),
            path: self.path.clone(),
            credential: self.chosen.as_ref().map(|chosen| chosen.credential.name().clone()),
            approved: false,
            values: None,
        }
    }

    /// The values that must not leave in the request.
    pub(super) fn values(&self) -> &Arc<Matcher> {
        &self.values
    }

    /// The values of the task's own credentials.
    pub(super) fn own_values(&self) -> &Arc<Matcher> {
        &self.own
    }

    /// Whether the body has to be read before it goes.
    pub(super) fn wants_body(&self) -> bool {
        !self.values.is_empty() || self.marks != PlaceholderSyntax::Usual
    }

    /// Whether a placeholder stands in a text where none is swapped, and who sends wanted every one swapped.
    pub(super) fn is_marked(&self, text: &[u8]) -> bool {
        self.marks != PlaceholderSyntax::Usual && self.marks.first(&[], text).is_some()
    }

    /// The credential that goes along.
    pub(super) fn chosen(&self) -> Option<&SelectedCredential> {
        self.chosen.as_ref()
    }

    /// Where nothing but an injected credential may go along: the places of the task's credentials, which
    /// the sandbox could fill with keys of its own.
    pub(super) fn exclusive(&self) -> Option<&[Placement]> {
        self.exclusive.as_deref()
    }

    /// Where credentials go that are injected here.
    pub(super) fn places(&self) -> impl Iterator<Item = Placement> {
        let of_chosen = self.chosen.iter().flat_map(|chosen| chosen.credential.places());
        of_chosen.chain(self.exclusive.iter().flatten().cloned())
    }

    /// Whether another method or path might not have been granted, or not without an approval.
    pub(super) fn is_restricted(&self) -> bool {
        self.restricted
    }

    /// Whether a credential of the task is known there.
    pub(super) fn is_known_there(&self) -> bool {
        self.known_there
    }

    /// How much may come out of a coded body.
    pub(super) fn bounds(&self) -> DecodeLimits {
        self.bounds
    }

    /// Returns the plan for redacting the answer.
    pub(super) fn guard(&self) -> Option<RedactionPlan> {
        (!self.masked.is_empty()).then(|| RedactionPlan {
            values: self.masked.clone(),
            sent: self.chosen.as_ref().map(|chosen| chosen.credential.name().clone()),
            bounds: DecodeLimits { direction: Direction::Received, ..self.bounds },
        })
    }
}

/// Judges a destination, for a tunnel or for one request.
///
/// # Errors
/// [`Deny::RawNotAllowed`], [`Deny::ToolNotEnabled`], [`Deny::WebhookNotEnabled`] or
/// [`Deny::WebhookNotRegistered`]; [`Deny::HostNotAllowed`], [`Deny::SchemeNotAllowed`] or
/// [`Deny::PortNotAllowed`]; [`Deny::LeakDetected`] if a credential's value stands in the host's name;
/// [`Deny::CallerUnknown`] if the policy no longer knows the task.
pub fn destination(
    policy: &Policy,
    caller: &Caller,
    _taken: &Taken,
    (target, parts): (Target, &Parts),
    record: &mut Record,
) -> Verdict<Admitted> {
    let asked = if parts.method == Method::CONNECT {
        AccessKind::Connect
    } else {
        AccessKind::Request(Kind::of(&parts.headers)?)
    };
    let admitted = admit(policy, caller, target, asked)?;
    check_host_for_leaks(policy, admitted, record)
}

/// Judges a destination of which somebody wants to know more, and where no request goes: host and port, whatever tools
/// the task has.
///
/// # Errors
/// [`Deny::HostNotAllowed`], [`Deny::PortNotAllowed`], [`Deny::LeakDetected`] or [`Deny::CallerUnknown`].
pub fn destination_to_probe(
    policy: &Policy,
    caller: &Caller,
    _taken: &Taken,
    target: Target,
    record: &mut Record,
) -> Verdict<Admitted> {
    let admitted = admit(policy, caller, target, AccessKind::Probe)?;
    check_host_for_leaks(policy, admitted, record)
}

/// The name is the first thing that leaves, as a query to DNS.
fn check_host_for_leaks(policy: &Policy, admitted: Admitted, record: &mut Record) -> Verdict<Admitted> {
    let values = task(policy, &admitted.caller)?.values();
    if let Some(found) = values.find_in_name(&admitted.target.host().to_string()) {
        return Err(record.leak(&found, "the host"));
    }
    Ok(admitted)
}

/// Judges the same destination again, under a newer policy.
///
/// # Errors
/// As [`destination`].
pub fn destination_again(policy: &Policy, admitted: &Admitted) -> Verdict<Admitted> {
    admit(policy, &admitted.caller, admitted.target.clone(), admitted.asked)
}

/// Judges the same host and port again, for plain HTTP that was found inside a tunnel.
///
/// # Errors
/// As [`destination`].
pub fn plain_http_inside(policy: &Policy, admitted: &Admitted) -> Verdict<Admitted> {
    admit(policy, &admitted.caller, admitted.target.in_the_clear(), admitted.asked)
}

/// Judges one request to an admitted destination: it names the same authority, the task may make such
/// calls, an integration allows its method and path, and the credential that it asks for may go there.
/// Under a newer policy the destination is judged again first.
///
/// # Errors
/// [`Deny::AuthorityMismatch`], [`Deny::MethodNotAllowed`], [`Deny::PathNotAllowed`],
/// [`Deny::CredentialUnknown`], [`Deny::CredentialNotBound`], [`Deny::CredentialRequired`], or as
/// [`destination`].
pub fn request(
    policy: &Policy,
    admitted: &Admitted,
    _taken: Taken,
    parts: &Parts,
    record: &mut Record,
) -> Verdict<Grant> {
    same_authority(&admitted.target, parts)?;
    grant(policy, admitted, parts, record)
}

/// Judges a granted request again, if there is a newer policy: what was taken away meanwhile must not be used.
///
/// # Errors
/// As [`request`].
pub fn renewed(policy: &Policy, granted: Grant, parts: &Parts, record: &mut Record) -> Verdict<Grant> {
    if granted.admitted.generation == policy.generation() {
        return Ok(granted);
    }
    grant(policy, &granted.admitted, parts, record)
}

fn grant(policy: &Policy, admitted: &Admitted, parts: &Parts, record: &mut Record) -> Verdict<Grant> {
    let kind = Kind::of(&parts.headers)?;
    let asked = AccessKind::Request(kind);
    let known = admitted.generation == policy.generation() && admitted.asked == asked;
    let current =
        if known { admitted.clone() } else { admit(policy, &admitted.caller, admitted.target.clone(), asked)? };
    let task = task(policy, &current.caller)?;
    let given = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    if kind.tool().is_some_and(|tool| !tool.admits_method(&parts.method)) {
        return Err(Deny::MethodNotAllowed.into());
    }
    let judged = task.request(&current.target, &current.allowed, &parts.method, given.path())?;
    let path = match judged.path {
        None => given,
        Some(canonical) => with_path(&canonical, given.query())?,
    };
    let by_tool = kind.tool().is_some_and(|tool| !tool.admits_any_method());
    let restricted = judged.is_restricted || by_tool;
    let admitted = Admitted { allowed: judged.allowed, ..current };
    record.rule(admitted.allowed.rule());
    let marks = credential::marks(&parts.headers)?;
    let to = (&admitted.target, &admitted.allowed);
    let chosen = credential::choose(task, to, (kind, &marks), parts, record)?;
    record.credential(chosen.as_ref().map(|chosen| chosen.credential.name()));
    let places = || task.credentials().iter().flat_map(|credential| credential.places()).collect();
    let exclusive = admitted.allowed.required().next().is_some().then(places);
    Ok(Grant {
        method: parts.method.clone(),
        path,
        limits: limits(task, kind, parts)?,
        reader: ReportTarget::of(parts, kind),
        values: task.values().clone(),
        own: task.own().clone(),
        masked: task.masked_after(chosen.as_ref().map(|chosen| &*chosen.credential)),
        bounds: DecodeLimits {
            total: policy.leak().max_decoded(),
            ratio: policy.leak().max_ratio(),
            direction: Direction::Sent,
        },
        marks,
        chosen,
        known_there: task.credentials().iter().any(|credential| credential.could_come_from(to.0.host())),
        exclusive,
        restricted,
        admitted,
    })
}

/// Returns the limits of the plan, with the timeout that the call itself asks for, which only shortens the plan's.
fn limits(task: &Task, kind: Kind, parts: &Parts) -> Verdict<Limits> {
    let mut limits = task.limits(kind);
    if let Some(asked) = kind.timeout(&parts.headers)? {
        limits.timeouts.request = Some(asked.min(limits.timeouts.most_asked));
    }
    Ok(limits)
}

fn admit(policy: &Policy, caller: &Caller, target: Target, asked: AccessKind) -> Verdict<Admitted> {
    let allowed = task(policy, caller)?.destination(&target, asked)?;
    Ok(Admitted { caller: caller.clone(), target, asked, allowed, generation: policy.generation() })
}

/// The caller's task, if it is still there and takes the token that the caller came with.
fn task<'p>(policy: &'p Policy, caller: &Caller) -> Verdict<&'p Task> {
    let task = policy.task(caller.task()).filter(|task| match caller.proof() {
        Proof::Token(token) => task.has_token(token),
        Proof::Execution | Proof::Listener => true,
    });
    task.map(AsRef::as_ref).ok_or(Deny::CallerUnknown.into())
}

/// Every name that the request gives must be the destination's: the request target's authority,
/// `:authority`, `Host`. Otherwise an allowed host fronts for another (RFC 9110 §7.4).
fn same_authority(target: &Target, parts: &Parts) -> Verdict<()> {
    let in_uri = parts.uri.authority().map(|authority| authority.as_str().as_bytes());
    let in_field = parts.headers.get(HOST).map(http::HeaderValue::as_bytes);
    if in_uri.is_none() && in_field.is_none() && parts.version != Version::HTTP_10 {
        return Err(Deny::RequestMalformed.into());
    }
    for name in [in_uri, in_field].into_iter().flatten() {
        let named = std::str::from_utf8(name).ok().and_then(|text| Target::named(target.scheme(), text).ok());
        if named.as_ref() != Some(target) {
            return Err(Deny::AuthorityMismatch.into());
        }
    }
    match parts.uri.scheme_str() {
        Some(scheme) if scheme != target.scheme().as_str() => Err(Deny::AuthorityMismatch.into()),
        _ => Ok(()),
    }
}

fn with_path(path: &str, query: Option<&str>) -> Verdict<PathAndQuery> {
    let text = match query {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    text.parse().map_err(|_| Deny::PathNotAllowed.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    #[test]
    fn every_name_in_a_request_must_be_the_destinations() {
        let target = Target::connect(&"a.example:443".parse().unwrap()).unwrap();
        let rows = [
            (Version::HTTP_11, "/", Some("a.example"), Ok(())),
            (Version::HTTP_11, "/", Some("A.Example.:443"), Ok(())),
            (Version::HTTP_11, "/", Some("a.example:8443"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", Some("b.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", Some("a.example, b.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", Some("u@a.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", Some(""), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", None, Err(Deny::RequestMalformed)),
            (Version::HTTP_10, "/", None, Ok(())),
            (Version::HTTP_2, "https://a.example/", None, Ok(())),
            (Version::HTTP_2, "https://a.example/", Some("a.example"), Ok(())),
            (Version::HTTP_2, "https://a.example/", Some("b.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_2, "https://b.example/", None, Err(Deny::AuthorityMismatch)),
            (Version::HTTP_2, "https://b.example/", Some("a.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_2, "http://a.example:443/", None, Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "https://b.example/", Some("a.example"), Err(Deny::AuthorityMismatch)),
        ];
        for (version, uri, host, want) in rows {
            let mut request = Request::builder().version(version).uri(uri);
            if let Some(host) = host {
                request = request.header(HOST, host);
            }
            let parts = request.body(()).unwrap().into_parts().0;
            assert_eq!(same_authority(&target, &parts), want.map_err(Into::into), "{version:?} {uri} {host:?}");
        }
    }
}

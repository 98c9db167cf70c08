//! Authorizes destinations and requests: host, scheme and port once per destination, method and path for each request.

pub(super) mod credential;
mod own_place;
mod placeholder_search;
pub mod revocation;

use http::header::HOST;
use http::request::Parts;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, Version};
use http_body::Body as _;

use std::sync::Arc;
use std::time::Duration;

use self::credential::{SearchedRequest, SelectedCredential};
use self::placeholder_search::SearchedBody;
use super::identify::{Caller, Proof};
use super::throttle::CountedCall;
use crate::audit::record::Record;
use crate::coding::DecodeLimits;
use crate::leak::Matcher;
use crate::ledger::Millis;
use crate::model::host::Host;
use crate::model::name::{CredentialName, ExecutionId};
use crate::model::refusal::{Deny, Fail, Stage, Verdict};
use crate::model::target::Target;
use crate::model::tool::Kind;
use crate::policy::client_identity::ClientIdentity;
use crate::policy::credential::{Credential, Placement};
use crate::policy::hmac::HmacRecipe;
use crate::policy::mint::MintedValue;
use crate::policy::placeholder::PlaceholderSyntax;
use crate::policy::plan::{Limits, Timeouts};
use crate::policy::rule::{AccessKind, Ech, MatchedRules, Mode, Policy, Task};
use crate::policy::task_credentials::TaskCredentials;
use crate::stages::message::aws_fields::AnnouncedPayload;
use crate::stages::message::message_swaps::MessageSwaps;
use crate::stages::message::request_body::RequestBody;
use crate::stages::message::swap_body::BodyKind;

/// Evidence that a task may reach a destination.
///
/// ```compile_fail
/// use exeat::{model::target::Target, stages::authorize::Admitted};
/// // An admission for one target does not apply to another.
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
    access: AccessKind,
    allowed: MatchedRules,
    generation: u64,
    rules_generation: u64,
}

/// Evidence that one request may be sent to an admitted destination.
///
/// ```compile_fail
/// use exeat::stages::authorize::{Admitted, Grant};
/// // A grant for one destination does not apply to another.
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
    values: ProtectedValues,
    credentials: CredentialRules,
    is_restricted: bool,
    forwards_trace_context: bool,
}

/// The values that the messages of one exchange are scanned for.
struct ProtectedValues {
    /// The values that must not be sent.
    in_request: Arc<Matcher>,
    /// The values that are redacted in the response.
    in_response: Arc<Matcher>,
    /// The tokens that the destination may know.
    minted: Vec<Arc<MintedValue>>,
    /// A hash of the values that only a new configuration changes.
    fixed: [u8; 32],
    /// The limits for decoding a request body.
    decoding: DecodeLimits,
}

/// The credential of one request, and the places that are kept free for it.
struct CredentialRules {
    /// The selected credential, and those that are sent beside it.
    selected: Vec<SelectedCredential>,
    placeholders: PlaceholderSyntax,
    /// The body may have placeholders and has not been searched for them.
    awaits_body: bool,
    /// The placements of all the task's credentials, if only an injected one may be sent.
    reserved: Option<Vec<Placement>>,
    /// The destination may know a credential of the task.
    may_be_known: bool,
    /// The credentials that are swapped in the messages of a WebSocket.
    in_messages: Option<Arc<MessageSwaps>>,
}

/// The parts of a granted exchange that later policies are checked against.
#[derive(Clone)]
pub(crate) struct RevocationCheck {
    admitted: Admitted,
    method: Method,
    path: PathAndQuery,
    credentials: Vec<CredentialName>,
    /// A person has approved the request.
    approved: bool,
    /// The tokens that are searched for during the exchange, of those that the destination may know.
    minted: Vec<Arc<MintedValue>>,
    /// A hash of the other values, for an exchange without a limit.
    fixed: Option<[u8; 32]>,
    /// The credentials that are swapped in the messages of a WebSocket.
    in_messages: Option<Arc<MessageSwaps>>,
}

impl RevocationCheck {
    /// Returns the execution of the exchange.
    pub(super) fn execution(&self) -> &ExecutionId {
        self.admitted.caller.execution()
    }

    /// Returns the time when the execution expires.
    pub(super) fn expires_at(&self) -> Option<Millis> {
        self.admitted.caller.facts().expires_at
    }

    /// Adds the values of a grant, for an exchange that may go on for long. It ends if they change.
    pub(super) fn with_values_of(self, grant: &Grant) -> Self {
        Self { fixed: Some(grant.values.fixed), ..self }
    }

    /// Returns true if the destination may be sent a token that is not searched for in this exchange. It could come back.
    fn misses_token(&self, task: &Task) -> bool {
        let credentials = task.credentials().minted_for(self.admitted.target.host());
        let mut sent = credentials.filter_map(|credential| credential.minted_value());
        sent.any(|sent| !self.minted.iter().any(|known| known.is_same_as(sent)))
    }

    /// Marks the exchange as approved by a person, so that later policies do not require another approval.
    pub(super) fn approved(self) -> Self {
        Self { approved: true, ..self }
    }

    /// Returns the rules that allow the exchange under a later policy, or `None` if `policy` is the one that granted
    /// it.
    ///
    /// # Errors
    /// The errors of [`request`]; [`Deny::ApprovalPending`] if the exchange now needs an approval and has none;
    /// [`Fail::Draining`] if other values must be scanned for from now on.
    pub(super) fn renewed(&self, policy: &Policy) -> Verdict<Option<MatchedRules>> {
        if self.admitted.generation == policy.generation() {
            return Ok(None);
        }
        if self.admitted.rules_generation == policy.rules_generation() {
            // Only tokens have been minted since.
            let task = task(policy, &self.admitted.caller)?;
            return if self.misses_token(task) { Err(Fail::Draining.into()) } else { Ok(None) };
        }
        let current = destination_again(policy, &self.admitted)?;
        let task = task(policy, &current.caller)?;
        let matched = task.request(&current.target, &current.allowed, &self.method, self.path.path())?;
        if matched.allowed.required().any(|name| !self.credentials.contains(name)) {
            return Err(Deny::CredentialRequired.into());
        }
        if !self.approved && matched.allowed.approval(&self.method, current.kind()).is_some() {
            return Err(Deny::ApprovalPending.into());
        }
        let in_messages = self.in_messages.iter().flat_map(|swaps| swaps.credentials()).map(|one| one.name());
        for name in self.credentials.iter().chain(in_messages) {
            let known = task.credentials().named(name.as_str());
            let known = known.filter(|credential| credential.is_enabled()).ok_or(Deny::CredentialUnknown)?;
            if !matched.allowed.may_receive(known, &current.target) {
                return Err(Deny::CredentialNotBound.into());
            }
            if self.in_messages.as_ref().is_some_and(|swaps| !swaps.has_form_of(known, task.credentials())) {
                // It would be sent in other places than now.
                return Err(Fail::Draining.into());
            }
        }
        let has_other_values = self.fixed.is_some_and(|fixed| fixed != task.credentials().fixed_values());
        if has_other_values || self.misses_token(task) {
            // The client may retry. The new request is then scanned for the new values.
            return Err(Fail::Draining.into());
        }
        Ok(Some(matched.allowed))
    }
}

impl Admitted {
    /// Returns the caller.
    #[must_use]
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Returns the destination.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the rules that allow the destination.
    #[must_use]
    pub fn allowed(&self) -> &MatchedRules {
        &self.allowed
    }

    /// Returns whether tunnels to the destination are inspected.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.allowed.mode()
    }

    /// Returns whether an encrypted `ClientHello` may pass in an opaque tunnel.
    #[must_use]
    pub fn ech(&self) -> Ech {
        self.allowed.ech()
    }

    /// Returns the kind of the request. A tunnel is not a tool call.
    fn kind(&self) -> Kind {
        match self.access {
            AccessKind::Connect | AccessKind::Probe => Kind::Raw,
            AccessKind::Request(kind) => kind,
        }
    }

    /// Returns the generation of the rules that admitted the destination.
    #[must_use]
    pub fn rules_generation(&self) -> u64 {
        self.rules_generation
    }
}

impl Grant {
    /// Returns the destination, narrowed to the integrations that allow this request.
    #[must_use]
    pub fn admitted(&self) -> &Admitted {
        &self.admitted
    }

    /// Returns the authorized method.
    #[must_use]
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// Returns the path and query to send. A path that was matched is in canonical form.
    #[must_use]
    pub fn path(&self) -> &PathAndQuery {
        &self.path
    }

    /// Returns the timeouts of the exchange.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        self.limits.timeouts
    }

    /// Returns the limits of the exchange.
    #[must_use]
    pub fn limits(&self) -> Limits {
        self.limits
    }

    /// Returns the kind of the request: raw or a tool call.
    pub(super) fn kind(&self) -> Kind {
        self.admitted.kind()
    }

    /// Returns how long an approval is valid, or `None` if the request needs no approval.
    pub(super) fn approval(&self) -> Option<Duration> {
        self.admitted.allowed.approval(&self.method, self.kind())
    }

    /// Returns the check for later policies.
    pub(super) fn revocation_check(&self) -> RevocationCheck {
        RevocationCheck {
            admitted: self.admitted.clone(),
            method: self.method.clone(),
            path: self.path.clone(),
            credentials: self.selected_credentials().iter().map(|chosen| chosen.credential.name().clone()).collect(),
            approved: false,
            minted: self.values.minted.clone(),
            fixed: None,
            in_messages: self.credentials.in_messages.clone(),
        }
    }

    /// Returns the values that must not be sent in the request.
    pub(super) fn values(&self) -> &Arc<Matcher> {
        &self.values.in_request
    }

    /// Returns true if the body has to be scanned before it is sent.
    pub(super) fn needs_body_scan(&self) -> bool {
        !self.values.in_request.is_empty() || self.credentials.placeholders != PlaceholderSyntax::Usual
    }

    /// Returns true if the body has to be read before the request is sent, because it is signed for
    /// AWS.
    pub(super) fn signs_body_for_aws(&self, headers: &HeaderMap) -> bool {
        let mut scopes = self.selected_credentials().iter().filter_map(|chosen| chosen.scope.as_ref());
        scopes.any(|scope| !scope.is_s3()) && AnnouncedPayload::of(headers) == Some(AnnouncedPayload::None)
    }

    /// Returns true if the body has to be read before the request is sent, because it is signed with a shared key.
    pub(super) fn signs_body_with_hmac(&self) -> bool {
        let mut recipes = self.selected_credentials().iter().filter_map(|chosen| chosen.credential.hmac());
        recipes.any(HmacRecipe::signs_body)
    }

    /// Returns true if the body has to be read before the request is sent, because it may have placeholders.
    pub(super) fn awaits_body(&self) -> bool {
        self.credentials.awaits_body
    }

    /// Returns the client certificate for the connection.
    pub(super) fn client_identity(&self) -> Option<&Arc<ClientIdentity>> {
        self.selected_credentials().iter().find_map(|chosen| chosen.credential.identity())
    }

    /// Returns the credentials whose values are sent. A key that signs is not.
    pub(super) fn sent_values(&self) -> impl Iterator<Item = &Credential> {
        self.all_credentials().map(|credential| &**credential).filter(|one| one.is_sent())
    }

    /// Returns true if a cookie of this name is replaced.
    pub(super) fn replaces_cookie(&self, name: &[u8]) -> bool {
        let mut places = self.selected_credentials().iter().flat_map(SelectedCredential::placements);
        places.any(|place| matches!(place, Placement::Cookie(own) if own.as_bytes() == name))
    }

    /// Returns true if placeholders in the body are replaced.
    pub(super) fn swaps_in_body(&self) -> bool {
        self.selected_credentials().iter().any(|chosen| !chosen.in_body.is_empty())
    }

    /// Returns true if a buffered body contains a placeholder that would not be replaced, and the client has asked for all of them to
    /// be replaced.
    pub(super) fn has_placeholder_in_body(&self, body: &[u8]) -> bool {
        let swaps = self.selected_credentials().iter().flat_map(|chosen| &chosen.in_body);
        let mut ranges: Vec<_> = swaps.map(|swap| swap.range.clone()).collect();
        ranges.sort_unstable_by_key(|range| range.start);
        let ends = ranges.iter().map(|range| range.start).chain([body.len()]);
        let starts = [0].into_iter().chain(ranges.iter().map(|range| range.end));
        let mut others = starts.zip(ends).filter_map(|(start, end)| body.get(start..end));
        others.any(|text| self.has_placeholder(text))
    }

    /// Returns true if a text contains a placeholder that would not be replaced, and the client has asked for all of
    /// them to be replaced.
    pub(super) fn has_placeholder(&self, text: &[u8]) -> bool {
        let placeholders = &self.credentials.placeholders;
        *placeholders != PlaceholderSyntax::Usual && placeholders.first(&TaskCredentials::default(), text).is_some()
    }

    /// Returns the selected credential, if any, and those that are sent beside it.
    pub(super) fn selected_credentials(&self) -> &[SelectedCredential] {
        &self.credentials.selected
    }

    /// Returns the credentials that are swapped in the messages of a WebSocket.
    pub(super) fn message_swaps(&self) -> Option<&Arc<MessageSwaps>> {
        self.credentials.in_messages.as_ref()
    }

    /// Returns the credentials that may be sent in messages and are not selected.
    pub(super) fn only_in_messages(&self) -> impl Iterator<Item = &Arc<Credential>> {
        let all = self.message_swaps().into_iter().flat_map(|swaps| swaps.credentials());
        all.filter(|one| self.selected_credentials().iter().all(|chosen| chosen.credential.name() != one.name()))
    }

    /// Returns the selected credentials, and those that may be sent in messages.
    fn all_credentials(&self) -> impl Iterator<Item = &Arc<Credential>> {
        self.selected_credentials().iter().map(|chosen| &chosen.credential).chain(self.only_in_messages())
    }

    /// Returns the placements reserved for an injected credential: those of all the task's credentials, where the
    /// sandbox could otherwise send keys of its own.
    pub(super) fn reserved_placements(&self) -> Option<&[Placement]> {
        self.credentials.reserved.as_deref()
    }

    /// Returns all placements of injected credentials.
    pub(super) fn injected_placements(&self) -> impl Iterator<Item = Placement> {
        let CredentialRules { selected, reserved, .. } = &self.credentials;
        let of_selected =
            selected.iter().flat_map(|selected| selected.credential.places().chain(selected.placements()));
        of_selected.chain(reserved.iter().flatten().cloned())
    }

    /// Returns true if another method or path might have been refused, or might have needed an approval.
    pub(super) fn is_restricted(&self) -> bool {
        self.is_restricted
    }

    /// Returns true if the trace context is forwarded to the destination.
    pub(super) fn forwards_trace_context(&self) -> bool {
        self.forwards_trace_context
    }

    /// Returns true if the destination may know a credential of the task.
    pub(super) fn may_know_credential(&self) -> bool {
        self.credentials.may_be_known
    }

    /// Returns the limits for decoding bodies.
    pub(super) fn decode_limits(&self) -> DecodeLimits {
        self.values.decoding
    }

    /// Returns the values to redact in the response.
    pub(super) fn values_in_response(&self) -> &Arc<Matcher> {
        &self.values.in_response
    }
}

/// Authorizes a destination, for a tunnel or for one request.
///
/// # Errors
/// [`Deny::RawNotAllowed`], [`Deny::ToolNotEnabled`], [`Deny::WebhookNotEnabled`] or [`Deny::WebhookNotRegistered`];
/// [`Deny::HostNotAllowed`], [`Deny::SchemeNotAllowed`] or [`Deny::PortNotAllowed`]; [`Deny::LeakDetected`] if the host
/// name contains a credential's value; [`Deny::CallerUnknown`] if the policy no longer contains the task.
pub fn destination(
    policy: &Policy,
    caller: &Caller,
    _taken: &CountedCall,
    (target, parts): (Target, &Parts),
    record: &mut Record,
) -> Verdict<Admitted> {
    record.enter(Stage::Authorize);
    let asked = if parts.method == Method::CONNECT {
        AccessKind::Connect
    } else {
        AccessKind::Request(Kind::of(&parts.headers)?)
    };
    let admitted = admit(policy, caller, target, asked)?;
    check_host_for_leaks(policy, admitted, record)
}

/// Authorizes a destination for a probe, which sends no request: host and port, regardless of the task's tools.
///
/// # Errors
/// [`Deny::HostNotAllowed`], [`Deny::PortNotAllowed`], [`Deny::LeakDetected`] or [`Deny::CallerUnknown`].
pub fn destination_to_probe(
    policy: &Policy,
    caller: &Caller,
    _taken: &CountedCall,
    target: Target,
    record: &mut Record,
) -> Verdict<Admitted> {
    record.enter(Stage::Authorize);
    let admitted = admit(policy, caller, target, AccessKind::Probe)?;
    check_host_for_leaks(policy, admitted, record)
}

/// Authorizes a name that a caller looks up, to connect to it at any port. Each connection is authorized itself.
///
/// # Errors
/// [`Deny::HostNotAllowed`], [`Deny::LeakDetected`] or [`Deny::CallerUnknown`].
pub fn name(policy: &Policy, caller: &Caller, host: &Host, record: &mut Record) -> Verdict<()> {
    record.enter(Stage::Authorize);
    task(policy, caller)?.may_reach(host)?;
    check_name_for_leaks(policy, caller, host, record)
}

/// The host name is the first thing sent out, in a DNS query.
fn check_host_for_leaks(policy: &Policy, admitted: Admitted, record: &mut Record) -> Verdict<Admitted> {
    check_name_for_leaks(policy, &admitted.caller, admitted.target.host(), record)?;
    Ok(admitted)
}

fn check_name_for_leaks(policy: &Policy, caller: &Caller, host: &Host, record: &mut Record) -> Verdict<()> {
    match task(policy, caller)?.values().find_in_name(&host.to_string()) {
        Some(found) => Err(record.leak(&found, "the host")),
        None => Ok(()),
    }
}

/// Authorizes the same destination under a newer policy.
///
/// # Errors
/// The errors of [`destination`].
pub fn destination_again(policy: &Policy, admitted: &Admitted) -> Verdict<Admitted> {
    admit(policy, &admitted.caller, admitted.target.clone(), admitted.access)
}

/// Authorizes the same host and port for plain HTTP detected inside a tunnel.
///
/// # Errors
/// The errors of [`destination`].
pub fn plain_http_inside(policy: &Policy, admitted: &Admitted) -> Verdict<Admitted> {
    admit(policy, &admitted.caller, admitted.target.in_the_clear(), admitted.access)
}

/// Authorizes one request to an admitted destination: it must name the same authority, the task must be allowed such
/// calls, an integration must allow the method and path, and the requested credential must be bound to the destination.
/// Under a newer policy, the destination is authorized again first.
///
/// # Errors
/// [`Deny::AuthorityMismatch`], [`Deny::MethodNotAllowed`], [`Deny::PathNotAllowed`],
/// [`Deny::CredentialUnknown`], [`Deny::CredentialNotBound`], [`Deny::CredentialRequired`], or the errors of
/// [`destination`].
pub fn request(
    policy: &Policy,
    admitted: &Admitted,
    _taken: CountedCall,
    parts: &mut Parts,
    record: &mut Record,
) -> Verdict<Grant> {
    record.enter(Stage::Authorize);
    same_authority(&admitted.target, parts)?;
    if policy.leak().allows_own_place() {
        own_place::replace(task(policy, &admitted.caller)?, admitted, parts, record)?;
    }
    grant(policy, admitted, (parts, None), record)
}

/// Selects the credentials whose placeholders stand in the body, which has been read if it may have any.
///
/// # Errors
/// The errors of [`request`]; [`Fail::Draining`] if the body is already being sent; [`Fail::Overloaded`] if too many bodies are being
/// searched.
pub async fn with_body(
    policy: &Policy,
    granted: Grant,
    parts: &Parts,
    body: &RequestBody,
    record: &mut Record,
) -> Verdict<Grant> {
    if !granted.awaits_body() {
        return Ok(granted);
    }
    // Boxed, so that the requests without such a body do not pay for it.
    Box::pin(grant_with_body(policy, &granted.admitted, (parts, body), record)).await
}

/// Authorizes a granted request again if there is a newer policy, so that revoked permissions are not used.
///
/// # Errors
/// The errors of [`with_body`].
pub async fn renew(
    policy: &Policy,
    granted: Grant,
    parts: &Parts,
    body: &RequestBody,
    record: &mut Record,
) -> Verdict<Grant> {
    if granted.admitted.generation == policy.generation() {
        return Ok(granted);
    }
    Box::pin(grant_with_body(policy, &granted.admitted, (parts, body), record)).await
}

/// Authorizes a request whose body has been read, or is not searched for placeholders.
async fn grant_with_body(
    policy: &Policy,
    admitted: &Admitted,
    (parts, body): (&Parts, &RequestBody),
    record: &mut Record,
) -> Verdict<Grant> {
    record.enter(Stage::Authorize);
    // The search takes some milliseconds.
    let _permit = if body.buffered().is_some() { Some(body.scan_limit().acquire().await?) } else { None };
    grant(policy, admitted, (parts, Some(body)), record)
}

fn grant(
    policy: &Policy,
    admitted: &Admitted,
    (parts, body): (&Parts, Option<&RequestBody>),
    record: &mut Record,
) -> Verdict<Grant> {
    let kind = Kind::of(&parts.headers)?;
    let asked = AccessKind::Request(kind);
    let known = admitted.rules_generation == policy.rules_generation() && admitted.access == asked;
    let current =
        if known { admitted.clone() } else { admit(policy, &admitted.caller, admitted.target.clone(), asked)? };
    let task = task(policy, &current.caller)?;
    let given = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    if kind.tool().is_some_and(|tool| !tool.admits_method(&parts.method)) {
        return Err(Deny::MethodNotAllowed.into());
    }
    let matched = task.request(&current.target, &current.allowed, &parts.method, given.path())?;
    let path = match matched.path {
        None => given,
        Some(canonical) => with_path(&canonical, given.query())?,
    };
    let by_tool = kind.tool().is_some_and(|tool| !tool.admits_any_method());
    let is_restricted = matched.is_restricted || by_tool;
    let admitted = Admitted { allowed: matched.allowed, generation: policy.generation(), ..current };
    record.rule(admitted.allowed.rule());
    let marks = credential::placeholder_syntax(&parts.headers)?;
    let to = (&admitted.target, &admitted.allowed);
    let body = match swappable_body(task, to, kind, &parts.headers) {
        None => SearchedBody::None,
        Some(kind) => searched_body(kind, body)?,
    };
    let awaits_body = body.is_awaited();
    let is_exclusive = admitted.allowed.required().next().is_some();
    let in_messages = MessageSwaps::of(task.shared_credentials(), is_exclusive, |one| to.1.may_receive(one, to.0));
    let takes_placeholders = kind.takes_placeholders() && marks == PlaceholderSyntax::Usual;
    let in_messages = in_messages.filter(|_| takes_placeholders && credential::is_websocket(parts)).map(Arc::new);
    let searched = SearchedRequest { parts, path: &path, body, swaps: in_messages.as_deref() };
    let chosen = credential::select(task, to, (kind, &marks), &searched, record)?;
    record.credentials(chosen.iter().map(|chosen| (chosen.credential.name(), chosen.credential.is_sent())));
    let places = || task.credentials().placements().to_vec();
    let reserved = is_exclusive.then(places);
    let sent = chosen.iter().map(|chosen| &*chosen.credential);
    let sent = sent.chain(in_messages.iter().flat_map(|swaps| swaps.credentials()).map(AsRef::as_ref));
    let values = ProtectedValues {
        in_request: task.values().clone(),
        minted: task.credentials().minted_for(to.0.host()).flat_map(|one| one.minted_values()).cloned().collect(),
        fixed: task.credentials().fixed_values(),
        in_response: task.credentials().masked_after(sent),
        decoding: DecodeLimits { total: policy.leak().max_decoded(), ratio: Some(policy.leak().max_ratio()) },
    };
    let may_be_known = task.credentials().could_come_from(to.0.host());
    Ok(Grant {
        method: parts.method.clone(),
        path,
        limits: limits(task, kind, parts)?,
        values,
        credentials: CredentialRules {
            selected: chosen,
            placeholders: marks,
            awaits_body,
            reserved,
            may_be_known,
            in_messages,
        },
        is_restricted,
        forwards_trace_context: admitted.allowed.forwards_trace_context(),
        admitted,
    })
}

/// Returns the kind of the body, if a credential that the destination may receive is swapped in such bodies.
fn swappable_body(
    task: &Task,
    (target, allowed): (&Target, &MatchedRules),
    kind: Kind,
    headers: &HeaderMap,
) -> Option<BodyKind> {
    let is_in_body = |place: &Placement| matches!(place, Placement::Json(_) | Placement::Form(_));
    if !task.credentials().placements().iter().any(is_in_body) || !kind.takes_placeholders() {
        return None;
    }
    let body = BodyKind::of(headers)?;
    let mut swapped = task.credentials().iter().filter(|one| one.places().any(|place| body.contains(&place)));
    swapped.any(|credential| allowed.may_receive(credential, target)).then_some(body)
}

fn searched_body(kind: BodyKind, body: Option<&RequestBody>) -> Verdict<SearchedBody<'_>> {
    let Some(body) = body else { return Ok(SearchedBody::Awaited) };
    match body.buffered() {
        Some((data, _)) => Ok(SearchedBody::Read(kind, data)),
        None if body.is_end_stream() => Ok(SearchedBody::None),
        // Only a later policy has such a credential.
        None => Err(Fail::Draining.into()),
    }
}

/// Returns the plan's limits with the call's own timeout, capped by the plan.
fn limits(task: &Task, kind: Kind, parts: &Parts) -> Verdict<Limits> {
    let mut limits = task.limits(kind);
    if let Some(asked) = kind.timeout(&parts.headers)? {
        limits.timeouts.request = Some(asked.min(limits.timeouts.most_asked));
    }
    Ok(limits)
}

fn admit(policy: &Policy, caller: &Caller, target: Target, asked: AccessKind) -> Verdict<Admitted> {
    let allowed = task(policy, caller)?.destination(&target, asked)?;
    Ok(Admitted {
        caller: caller.clone(),
        target,
        access: asked,
        allowed,
        generation: policy.generation(),
        rules_generation: policy.rules_generation(),
    })
}

/// Returns the caller's task if the policy still contains it and accepts the caller's token.
fn task<'p>(policy: &'p Policy, caller: &Caller) -> Verdict<&'p Task> {
    let task = policy.task(caller.task()).filter(|task| match caller.proof() {
        Proof::Token(token) => task.has_token(token),
        Proof::Execution | Proof::Listener => true,
    });
    task.map(AsRef::as_ref).ok_or(Deny::CallerUnknown.into())
}

/// Checks that all names in the request are the destination's: the authority of the request target, `:authority` and
/// `Host`. Otherwise an allowed host could be used to front another one (RFC 9110 §7.4).
fn same_authority(target: &Target, parts: &Parts) -> Verdict<()> {
    let in_uri = parts.uri.authority().map(|authority| authority.as_str().as_bytes());
    let in_field = parts.headers.get(HOST).map(http::HeaderValue::as_bytes);
    if in_uri.is_none() && in_field.is_none() && parts.version != Version::HTTP_10 {
        return Err(Deny::RequestMalformed.into());
    }
    for name in [in_uri, in_field].into_iter().flatten() {
        let named = std::str::from_utf8(name).ok().and_then(|text| Target::from_authority(target.scheme(), text).ok());
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

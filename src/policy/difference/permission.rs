//! The permission that a policy gives to a request, and the ways in which two of them differ.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use http::Method;
use ipnet::IpNet;

use super::super::address::{self, Class};
use super::super::credential::{Auth, Credential};
use super::super::rule::{AccessKind, Ech, MatchedRules, Mode, Policy, Task};
use crate::model::target::Target;
use crate::model::tool::{Kind, Tool};

/// A way to send something to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Way {
    /// A request that is not a tool call.
    Raw,
    /// A call of a tool, by its position in [`Tool::ALL`].
    Tool(usize),
    /// A tunnel that is not inspected.
    Tunnel,
    /// A probe: the name is resolved, and the certificate is fetched. It sends no request.
    Probe,
}

impl Way {
    pub(super) fn all() -> impl Iterator<Item = Self> {
        [Self::Raw].into_iter().chain((0..Tool::ALL.len()).map(Self::Tool)).chain([Self::Tunnel, Self::Probe])
    }

    /// Returns the kind of request. `None` for a tunnel and a probe.
    #[must_use]
    pub fn kind(self) -> Option<Kind> {
        match self {
            Self::Raw => Some(Kind::Raw),
            Self::Tool(at) => Tool::ALL.get(at).copied().map(Kind::Tool),
            Self::Tunnel | Self::Probe => None,
        }
    }
}

impl std::fmt::Display for Way {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match (self, self.kind()) {
            (_, Some(Kind::Tool(tool))) => f.write_str(tool.as_str()),
            (Self::Tunnel, _) => f.write_str("tunnels without inspection"),
            (Self::Probe, _) => f.write_str("probes"),
            _ => f.write_str("raw requests"),
        }
    }
}

/// The permission of a request that is allowed.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Permission {
    /// How long an approval is valid, if one is needed.
    approval: Option<Duration>,
    /// The credentials that may be sent, and how.
    credentials: BTreeSet<String>,
    /// The credentials without which the request is refused.
    required: BTreeSet<String>,
    /// Whether the name in a tunnel may be encrypted.
    hides_name: bool,
    /// The networks that the name may resolve to although they are not public.
    networks: BTreeSet<IpNet>,
    /// Whether the client's trace context is forwarded.
    forwards_trace_context: bool,
}

/// The text about [`Permission::forwards_trace_context`].
const TRACE_CONTEXT: &str = "with the client's trace context";

/// The differences between two permissions: those that allow more, and those that allow less.
#[derive(Clone, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Changes {
    pub(super) opens: Vec<String>,
    pub(super) closes: Vec<String>,
}

impl Permission {
    fn of(
        policy: &Policy,
        task: &Task,
        (way, method): (Way, &Method),
        target: &Target,
        allowed: &MatchedRules,
    ) -> Self {
        let kind = way.kind();
        let required: BTreeSet<String> = allowed.required().map(ToString::to_string).collect();
        let can_send = |auth: &Auth, is_always: bool| {
            let kind = kind?;
            match (kind.takes_placeholders(), kind.takes_names() && !auth.needs_placeholder()) {
                (true, _) if is_always => Some("with every request"),
                (true, _) => Some("by name or placeholder"),
                (false, true) => Some("by name"),
                (false, false) => None,
            }
        };
        let credentials = task.credentials().iter().filter(|credential| allowed.may_receive(credential, target));
        let has_required = |credential: &&Arc<Credential>| {
            let sent = task.credentials().sent_with(credential);
            required.iter().all(|name| sent.iter().any(|one| one.name().as_str() == name))
        };
        let credentials = credentials.filter(has_required);
        let credentials = credentials.flat_map(|credential| {
            let name = credential.name();
            let how = can_send(credential.auth(), credential.is_always_injected());
            let scope = credential.aws().map_or_else(String::new, |key| {
                let part = |part: &Option<String>| part.clone().unwrap_or_else(|| "any".to_owned());
                format!(" for {} in {}", part(&key.service), part(&key.region))
            });
            let minted = credential.recipe().map_or_else(String::new, |recipe| format!(" of {}", recipe.permissions()));
            let signed = credential.hmac().map_or_else(String::new, |recipe| format!(" of {recipe}"));
            let beside = task.credentials().sent_with(credential);
            let mut beside: Vec<_> = beside.iter().skip(1).map(|one| one.name().as_str()).collect();
            beside.sort_unstable();
            let beside = if beside.is_empty() { String::new() } else { format!(", beside {}", beside.join(" and ")) };
            let whole = how.map(|how| format!("{name} as {}{scope}{minted}{signed}, {how}{beside}", credential.auth()));
            // `swap_in`, and the placeholder that is a text of the operator.
            let by_text = kind.is_some_and(Kind::takes_placeholders);
            let own = credential.auth().place();
            let places = credential.places().filter(|place| by_text && Some(place) != own.as_ref());
            let places: Vec<_> = places.map(|place| format!("{name} within {place}")).collect();
            let text =
                credential.placeholder().filter(|_| by_text).map(|_| format!("{name} by a placeholder of its own"));
            whole.into_iter().chain(places).chain(text).collect::<Vec<_>>()
        });
        Self {
            approval: kind.and_then(|kind| allowed.approval(method, kind)),
            credentials: credentials.collect(),
            required,
            hides_name: way == Way::Tunnel && allowed.ech() == Ech::Allow,
            networks: policy.networks(allowed).collect(),
            forwards_trace_context: kind.is_some() && allowed.forwards_trace_context(),
        }
    }
}

/// Returns the permission of a request. `None` if it is refused.
pub(super) fn request(
    policy: &Policy,
    task: &Task,
    (way, method): (Way, &Method),
    target: &Target,
    (path, is_ambiguous): (&str, bool),
) -> Option<Permission> {
    let Some(kind) = way.kind() else {
        let access = if way == Way::Probe { AccessKind::Probe } else { AccessKind::Connect };
        let allowed = task.destination(target, access).ok()?;
        let is_possible = way == Way::Probe || allowed.mode() == Mode::Opaque;
        return is_possible.then(|| Permission::of(policy, task, (way, method), target, &allowed));
    };
    let refuses = || task.destination(target, AccessKind::Request(kind)).is_ok_and(|to| to.refuses_ambiguous_paths());
    if is_ambiguous && refuses() {
        return None;
    }
    let matched = task.judge(target, kind, method, path).ok()?;
    Some(Permission::of(policy, task, (way, method), target, &matched.allowed))
}

/// Compares two permissions.
pub(super) fn changes(old: Option<&Permission>, new: Option<&Permission>) -> Changes {
    let mut changes = Changes::default();
    match (old, new) {
        (None, None) => {}
        (None, Some(new)) => changes.opens.push(format!("allowed{}", conditions(new))),
        (Some(old), None) => changes.closes.push(format!("refused; was allowed{}", conditions(old))),
        (Some(old), Some(new)) => compare(old, new, &mut changes),
    }
    changes
}

/// Describes what else belongs to a permission.
fn conditions(permission: &Permission) -> String {
    let Permission { approval, credentials, required, hides_name, networks, forwards_trace_context } = permission;
    let mut out = String::new();
    let mut add = |text: String| out.push_str(&format!(", {text}"));
    if approval.is_some() {
        add("after an approval".to_owned());
    }
    required.iter().for_each(|name| add(format!("with {name} only")));
    credentials.iter().for_each(|credential| add(format!("with {credential}")));
    if *hides_name {
        add("also with an encrypted name (ech)".to_owned());
    }
    if !networks.is_empty() {
        add(format!("also at {}", listed(networks.iter())));
    }
    if *forwards_trace_context {
        add(TRACE_CONTEXT.to_owned());
    }
    out
}

fn compare(old: &Permission, new: &Permission, changes: &mut Changes) {
    let Changes { opens, closes } = changes;
    match (old.approval, new.approval) {
        (Some(_), None) => opens.push("no approval is needed".to_owned()),
        (None, Some(_)) => closes.push("an approval is needed".to_owned()),
        (Some(before), Some(after)) if before != after => {
            let text = format!("an approval is valid for {} s; was {} s", after.as_secs(), before.as_secs());
            if after > before { opens.push(text) } else { closes.push(text) }
        }
        _ => {}
    }
    opens.extend(new.credentials.difference(&old.credentials).map(|credential| format!("with {credential}")));
    closes.extend(old.credentials.difference(&new.credentials).map(|credential| format!("not with {credential}")));
    opens.extend(old.required.difference(&new.required).map(|name| format!("also without {name}")));
    closes.extend(new.required.difference(&old.required).map(|name| format!("with {name} only")));
    if new.hides_name != old.hides_name {
        let text = "with an encrypted name (ech)";
        if new.hides_name { opens.push(format!("also {text}")) } else { closes.push(format!("not {text}")) }
    }
    match (old.forwards_trace_context, new.forwards_trace_context) {
        (false, true) => opens.push(TRACE_CONTEXT.to_owned()),
        (true, false) => closes.push(format!("not {TRACE_CONTEXT}")),
        _ => {}
    }
    let added = beyond(&new.networks, &old.networks);
    let removed = beyond(&old.networks, &new.networks);
    if !added.is_empty() {
        opens.push(format!("also at {}", listed(added.iter())));
    }
    if !removed.is_empty() {
        closes.push(format!("not at {}", listed(removed.iter())));
    }
}

/// Returns the networks that are not within others together.
pub(super) fn not_within(these: &BTreeSet<IpNet>, others: &BTreeSet<IpNet>) -> Vec<IpNet> {
    let whole = IpNet::aggregate(&others.iter().copied().collect());
    these.iter().filter(|net| !whole.iter().any(|other| other.contains(*net))).copied().collect()
}

/// Returns the networks that are not within others together. An address of a metadata service is only within an entry for
/// exactly this address.
pub(super) fn beyond(these: &BTreeSet<IpNet>, others: &BTreeSet<IpNet>) -> Vec<IpNet> {
    let whole = IpNet::aggregate(&others.iter().copied().collect());
    let is_metadata =
        |net: &IpNet| net.prefix_len() == net.max_prefix_len() && address::classify(net.addr()) == Class::Metadata;
    let is_within =
        |net: &IpNet| others.contains(net) || whole.iter().any(|other| other.contains(net) && !is_metadata(net));
    these.iter().filter(|net| !is_within(net)).copied().collect()
}

pub(super) fn listed<T: ToString>(items: impl Iterator<Item = T>) -> String {
    items.map(|item| item.to_string()).collect::<Vec<_>>().join(", ")
}

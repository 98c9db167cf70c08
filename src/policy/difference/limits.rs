//! The limits of tasks and the settings for all tasks, compared.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Display;
use std::time::Duration;

use super::super::plan::{Limits, Oversize};
use super::super::rule::{Policy, Task};
use super::super::upstream_proxy::{ProxyOverride, UpstreamProxy};
use super::permission::{Changes, listed, not_within};
use crate::model::tool::{Kind, Tool};

/// Compares the limits of a task that both policies have.
pub(super) fn of_task(old: &Task, new: &Task) -> Changes {
    let mut changes = Changes::default();
    for (what, kind) in [("raw requests", Kind::Raw), ("tool calls", Kind::Tool(Tool::HttpRequest))] {
        let is_possible = |task: &Task| match kind {
            Kind::Raw => task.takes_raw(),
            Kind::Tool(_) => !task.tools().is_empty(),
        };
        if is_possible(old) && is_possible(new) {
            compare(what, &old.limits(kind), &new.limits(kind), &mut changes);
        }
    }
    changes
}

/// Compares how long the approval of a command is valid. `None` if no command is run.
pub(super) fn of_commands(old: Option<Duration>, new: Option<Duration>, changes: &mut Changes) {
    match (old, new) {
        (before, after) if before == after => {}
        (None, Some(after)) => {
            changes.opens.push(format!(
                "commands of the dangerous shell, each after an approval that is valid for {} s",
                after.as_secs()
            ));
        }
        (Some(_), None) => changes.closes.push("no commands of the dangerous shell".to_owned()),
        (Some(before), Some(after)) => {
            let line =
                format!("the approval of a command is valid for {} s; was {} s", after.as_secs(), before.as_secs());
            if after > before { changes.opens.push(line) } else { changes.closes.push(line) }
        }
        (None, None) => {}
    }
}

fn compare(what: &str, old: &Limits, new: &Limits, changes: &mut Changes) {
    let mut limit = |key: &str, before: Option<u128>, after: Option<u128>, unit: &str| {
        if before == after {
            return;
        }
        let text = |value: Option<u128>| value.map_or_else(|| "unlimited".to_owned(), |value| format!("{value}{unit}"));
        let line = format!("{what}: {key} {}; was {}", text(after), text(before));
        let is_more = after.is_none_or(|after| before.is_some_and(|before| after > before));
        if is_more { changes.opens.push(line) } else { changes.closes.push(line) }
    };
    let count = |value: Option<u64>| value.map(u128::from);
    let ms = |value: Duration| Some(value.as_millis());
    limit("calls_per_execution", count(old.calls.per_execution), count(new.calls.per_execution), "");
    limit("calls_per_minute", count(old.calls.per_minute), count(new.calls.per_minute), "");
    let rate = |limits: &Limits| limits.rate.map(|rate| u128::from(rate.per_second.get()));
    let burst = |limits: &Limits| limits.rate.map(|rate| u128::from(rate.burst.get()));
    limit("requests_per_second", rate(old), rate(new), "");
    if old.rate.is_some() && new.rate.is_some() {
        limit("burst", burst(old), burst(new), "");
    }
    limit("concurrent", old.concurrent.map(u128::from), new.concurrent.map(u128::from), "");
    limit("max_request_bytes", count(old.request), count(new.request), "");
    limit("max_response_bytes", count(old.response.most), count(new.response.most), "");
    let (old_times, new_times) = (old.timeouts, new.timeouts);
    let whole = |value: Option<Duration>| value.map(|value| value.as_millis());
    limit("request_timeout", whole(old_times.request), whole(new_times.request), " ms");
    limit("longest Exeat-Timeout", ms(old_times.most_asked), ms(new_times.most_asked), " ms");
    limit("response_header_timeout", ms(old_times.response_header), ms(new_times.response_header), " ms");
    limit("idle_timeout", ms(old_times.idle), ms(new_times.idle), " ms");
    if old.response.oversize != new.response.oversize {
        let line = |what_now: &str| format!("{what}: a response that is too large is {what_now}");
        match new.response.oversize {
            Oversize::Truncate => changes.opens.push(line("truncated; was refused")),
            Oversize::Refuse => changes.closes.push(line("refused; was truncated")),
        }
    }
}

/// Returns the ways that connections leave by, by their key in the configuration.
fn routes(policy: &Policy) -> BTreeMap<String, String> {
    let proxies = &policy.upstream_proxies;
    let text = |proxy: &UpstreamProxy| format!("through the proxy {}", proxy.describe());
    let mut routes = BTreeMap::new();
    if let Some(proxy) = &proxies.default {
        routes.insert("upstream.proxy".to_owned(), text(proxy));
        routes.insert("upstream.no_proxy".to_owned(), format!("[{}]", listed(proxies.no_proxy.iter())));
    }
    for integration in policy.tasks().flat_map(|task| &task.integrations) {
        let way = match &integration.upstream {
            None => continue,
            Some(ProxyOverride::Direct) => "none".to_owned(),
            Some(ProxyOverride::Proxy(proxy)) => text(proxy),
        };
        routes.insert(format!("integrations.{}.upstream", integration.name), way);
    }
    routes
}

/// Compares the settings that apply to all tasks.
pub(super) fn of_all(old: &Policy, new: &Policy) -> Changes {
    let mut changes = Changes::default();
    let Changes { opens, closes } = &mut changes;
    let nets = |policy: &Policy| -> BTreeSet<_> { policy.network.deny.iter().copied().collect() };
    let (removed, added) = (not_within(&nets(old), &nets(new)), not_within(&nets(new), &nets(old)));
    if !removed.is_empty() {
        opens.push(format!("network.deny_cidrs without {}", listed(removed.iter())));
    }
    if !added.is_empty() {
        closes.push(format!("network.deny_cidrs with {}", listed(added.iter())));
    }
    let unchecked = |policy: &Policy| -> BTreeSet<String> {
        let resolving = policy.upstream_proxies().iter().filter(|proxy| proxy.resolves());
        resolving.map(|proxy| proxy.section().to_owned()).collect()
    };
    let (before, after) = (routes(old), routes(new));
    for key in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
        let text = |routes: &BTreeMap<String, String>| routes.get(key).map_or("not set", String::as_str).to_owned();
        let (was, now) = (text(&before), text(&after));
        // Whoever is in between sees plain HTTP and destinations, so no change of the way is harmless.
        if was != now {
            opens.push(format!("{key}: {now}; was {was}"));
        }
    }
    let (before, after) = (unchecked(old), unchecked(new));
    let resolved = |section: &String| format!("{section}.resolve = \"proxy\": addresses of names are not checked");
    opens.extend(after.difference(&before).map(resolved));
    closes.extend(before.difference(&after).map(|section| format!("not: {}", resolved(section))));
    let families =
        |policy: &Policy| -> BTreeSet<&str> { policy.leak.families().iter().map(|family| family.as_str()).collect() };
    let (before, after) = (families(old), families(new));
    opens.extend(before.difference(&after).map(|family| format!("leak.families without {family}")));
    closes.extend(after.difference(&before).map(|family| format!("leak.families with {family}")));
    if old.leak.allows_own_place() != new.leak.allows_own_place() {
        let line = "a client may send a credential itself, in its own place (leak.own_place)";
        let is_opened = new.leak.allows_own_place();
        if is_opened { opens.push(line.to_owned()) } else { closes.push(format!("not: {line}")) }
    }
    let mut number = |key: &str, before: u64, after: u64| {
        let line = format!("leak.{key} = {after}; was {before}");
        match after.cmp(&before) {
            std::cmp::Ordering::Greater => opens.push(line),
            std::cmp::Ordering::Less => closes.push(line),
            std::cmp::Ordering::Equal => {}
        }
    };
    number("max_finds", old.leak.max_finds().into(), new.leak.max_finds().into());
    number("max_decoded_bytes", old.leak.max_decoded(), new.leak.max_decoded());
    number("max_ratio", old.leak.max_ratio(), new.leak.max_ratio());
    let hosts = |policy: &Policy| -> BTreeMap<String, String> {
        let sorted = |ips: &Vec<std::net::IpAddr>| listed(ips.iter().collect::<BTreeSet<_>>().into_iter());
        policy.hosts.iter().map(|(name, ips)| (name.to_string(), sorted(ips))).collect()
    };
    let (before, after) = (hosts(old), hosts(new));
    for (name, ips) in &after {
        if before.get(name) != Some(ips) {
            opens.push(format!("dns.hosts: {name} is {ips}; was {}", known(before.get(name))));
        }
    }
    for name in before.keys().filter(|name| !after.contains_key(*name)) {
        opens.push(format!("dns.hosts: {name} is resolved; was {}", known(before.get(name))));
    }
    changes
}

fn known(ips: Option<&impl Display>) -> String {
    ips.map_or_else(|| "resolved".to_owned(), ToString::to_string)
}

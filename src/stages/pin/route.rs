//! The way to a pinned target: directly, or through an upstream proxy.

use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use futures_util::future::join_all;
use parking_lot::RwLock;

use super::lookup::LookupFailure;
use super::{OwnPlace, PinnedTarget, Resolver};
use crate::audit::record::Record;
use crate::model::host::Host;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::model::upstream_proxy::UpstreamProxyFailure;
use crate::policy::rule::Policy;
use crate::policy::upstream_proxy::{ProxyChoice, UpstreamProxy};
use crate::stages::authorize::Admitted;

/// The rule that refuses requests to an upstream proxy.
pub(super) const PROXY_RULE: &str = "address: the proxy's own upstream proxy";

/// The upstream proxy to connect through, and the destination that it is asked for.
#[derive(Clone, Debug)]
pub(in crate::stages) struct Via {
    pub(in crate::stages) proxy: Arc<UpstreamProxy>,
    /// The addresses of the proxy.
    pub(in crate::stages) at: Vec<SocketAddr>,
    pub(in crate::stages) asked: Asked,
}

/// The destination that an upstream proxy is asked for.
#[derive(Clone, Debug)]
pub(in crate::stages) enum Asked {
    /// One of these addresses, which were checked.
    Addresses(Vec<SocketAddr>),
    /// The name of the target, which the proxy resolves.
    Name,
}

/// A destination to dial.
#[derive(Clone, Copy)]
pub(in crate::stages) struct Destination<'p> {
    pub(in crate::stages) target: (&'p Host, u16),
    /// The addresses to dial, if there is no proxy.
    pub(in crate::stages) addresses: &'p [SocketAddr],
    pub(in crate::stages) via: Option<&'p Via>,
}

impl Destination<'_> {
    /// Returns true if a pooled connection to this address may be used. `None` is one through a proxy that has resolved the name.
    pub(in crate::stages) fn includes(&self, address: Option<SocketAddr>) -> bool {
        match (address, self.via.map(|via| &via.asked)) {
            (None, Some(Asked::Name)) => true,
            (Some(address), Some(Asked::Addresses(addresses))) => addresses.contains(&address),
            (Some(address), None) => self.addresses.contains(&address),
            (None, _) | (Some(_), Some(Asked::Name)) => false,
        }
    }
}

/// The way to a server of the proxy's own.
pub struct OwnServerRoute {
    pub(super) target: (Host, u16),
    pub(super) addresses: Vec<SocketAddr>,
    pub(super) via: Option<Via>,
}

impl OwnServerRoute {
    pub(in crate::stages) fn destination(&self) -> Destination<'_> {
        let (host, port) = &self.target;
        Destination { target: (host, *port), addresses: &self.addresses, via: self.via.as_ref() }
    }
}

/// An upstream proxy with its addresses.
#[derive(Clone)]
pub(super) struct KnownProxy {
    host: Host,
    port: u16,
    /// The addresses of the latest answer.
    addresses: Vec<SocketAddr>,
    /// Those of earlier answers too, newest first: a name may have different ones at different times.
    seen: Vec<SocketAddr>,
    /// The time until which the name is not looked up again, after that has failed.
    usable_until: Option<Instant>,
}

impl KnownProxy {
    fn new(host: &Host, port: u16, ips: Vec<IpAddr>) -> Self {
        let addresses: Vec<_> = ips.into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        Self { host: host.clone(), port, seen: addresses.clone(), addresses, usable_until: None }
    }

    /// Returns true if the proxy is or was at the address.
    pub(super) fn is_at(&self, address: SocketAddr) -> bool {
        self.seen.iter().any(|at| super::is_served_at(address, *at))
    }

    fn is_named(&self, host: &Host, port: u16) -> bool {
        self.host == *host && self.port == port
    }
}

/// The upstream proxies that were resolved lately. Those whose addresses have changed last come last.
#[derive(Default)]
pub(super) struct KnownProxies(RwLock<Vec<KnownProxy>>);

impl KnownProxies {
    fn get(&self, host: &Host, port: u16) -> Option<KnownProxy> {
        self.0.read().iter().find(|proxy| proxy.is_named(host, port)).cloned()
    }

    /// Stores the addresses of a new answer, and returns them with those that were seen before.
    fn store(&self, mut new: KnownProxy) -> KnownProxy {
        let mut known = self.0.write();
        if let Some(at) = known.iter().position(|proxy| proxy.is_named(&new.host, new.port)) {
            let earlier = known.remove(at).seen.into_iter().filter(|address| !new.addresses.contains(address));
            new.seen.extend(earlier);
            new.seen.truncate(MAX_SEEN.max(new.addresses.len()));
        } else if known.len() >= MAX_KNOWN {
            known.remove(0);
        }
        known.push(new.clone());
        new
    }

    /// Lets the addresses of a proxy be used for a while without another lookup. Returns them, if there are some.
    fn keep(&self, host: &Host, port: u16) -> Option<KnownProxy> {
        let mut known = self.0.write();
        let proxy = known.iter_mut().find(|proxy| proxy.is_named(host, port))?;
        proxy.usable_until = Some(Instant::now() + RETRY_AFTER);
        Some(proxy.clone())
    }
}

/// The most proxies that are remembered, and the most addresses of each.
const MAX_KNOWN: usize = 256;
const MAX_SEEN: usize = 32;
/// The time for which the earlier addresses of a proxy are used after a lookup has failed. Each lookup may take the whole
/// `dns.timeout`.
const RETRY_AFTER: Duration = Duration::from_secs(30);

/// Returns the upstream proxy for a destination, if it resolves the name.
pub(super) fn proxy_that_resolves<'p>(policy: &'p Policy, admitted: &Admitted) -> Option<ProxyChoice<'p>> {
    let host = admitted.target().host();
    policy.upstream_proxy(admitted.allowed(), host).filter(|choice| policy.is_resolved_by(&choice.proxy, host))
}

/// Returns the addresses of a host that needs no lookup.
fn fixed_addresses(policy: &Policy, host: &Host) -> Option<Vec<IpAddr>> {
    match host {
        Host::Ip(ip) => Some(vec![*ip]),
        Host::Name(name) => policy.hosts_override(name).map(<[IpAddr]>::to_vec),
    }
}

/// Returns the upstream proxies of a policy, without those at the same place.
fn distinct(policy: &Policy) -> Vec<&Arc<UpstreamProxy>> {
    let mut distinct: Vec<&Arc<UpstreamProxy>> = Vec::new();
    for proxy in policy.upstream_proxies() {
        let (host, port) = (&proxy.address().host, proxy.address().port);
        if !distinct.iter().any(|other| other.address().host == *host && other.address().port == port) {
            distinct.push(proxy);
        }
    }
    distinct
}

impl Resolver {
    /// Resolves the names of the upstream proxies. Their addresses are denied to sandboxes, so they have to be known before
    /// anything is dialed, also directly.
    ///
    /// # Errors
    /// [`Fail::UpstreamProxyFailed`] and [`Fail::Overloaded`].
    pub(super) async fn look_up_proxies(&self, policy: &Policy, record: &mut Record) -> Verdict<Vec<KnownProxy>> {
        if policy.upstream_proxies().is_empty() {
            return Ok(Vec::new());
        }
        let proxies = distinct(policy);
        let found = join_all(proxies.iter().map(|proxy| self.look_up_proxy(policy, proxy))).await;
        let mut known = Vec::with_capacity(found.len());
        for (proxy, found) in proxies.iter().zip(found) {
            known.push(found.map_err(|refusal| match refusal {
                Refusal::Fail(Fail::UpstreamProxyFailed) => {
                    record.upstream_proxy(Some(proxy.address().to_string()), true);
                    record.upstream_proxy_failed(UpstreamProxyFailure::Unresolved)
                }
                other => other,
            })?);
        }
        Ok(known)
    }

    /// Returns what is known of the upstream proxies without a lookup.
    pub(super) fn known_proxies(&self, policy: &Policy) -> Vec<KnownProxy> {
        let known = |proxy: &Arc<UpstreamProxy>| {
            let (host, port) = (&proxy.address().host, proxy.address().port);
            match fixed_addresses(policy, host) {
                Some(fixed) => KnownProxy::new(host, port, fixed),
                None => self.proxies.get(host, port).unwrap_or_else(|| KnownProxy::new(host, port, Vec::new())),
            }
        };
        distinct(policy).into_iter().map(known).collect()
    }

    /// Returns the addresses of an upstream proxy.
    ///
    /// # Errors
    /// [`Fail::UpstreamProxyFailed`] if its name has none; [`Fail::Overloaded`].
    pub async fn proxy_addresses(&self, policy: &Policy, proxy: &UpstreamProxy) -> Verdict<Vec<SocketAddr>> {
        Ok(self.look_up_proxy(policy, proxy).await?.addresses)
    }

    /// Resolves the name of an upstream proxy. While that fails, the addresses that it had are used.
    ///
    /// # Errors
    /// [`Fail::UpstreamProxyFailed`] and [`Fail::Overloaded`].
    pub(super) async fn look_up_proxy(&self, policy: &Policy, proxy: &UpstreamProxy) -> Verdict<KnownProxy> {
        let (host, port) = (&proxy.address().host, proxy.address().port);
        if let Some(fixed) = fixed_addresses(policy, host).filter(|fixed| !fixed.is_empty()) {
            return Ok(KnownProxy::new(host, port, fixed));
        }
        let known = self.proxies.get(host, port);
        let is_usable = |known: &KnownProxy| known.usable_until.is_some_and(|until| Instant::now() < until);
        if let Some(known) = known.as_ref().filter(|known| is_usable(known)) {
            return Ok(known.clone());
        }
        let failure = match self.addresses(policy, host, None).await {
            Ok(found) if !found.is_empty() => {
                let found = KnownProxy::new(host, port, found);
                let is_new = known
                    .as_ref()
                    .is_none_or(|known| known.addresses != found.addresses || known.usable_until.is_some());
                return Ok(if is_new { self.proxies.store(found) } else { known.unwrap_or(found) });
            }
            Ok(_) | Err(LookupFailure::Dns(_)) => Fail::UpstreamProxyFailed,
            Err(LookupFailure::Overloaded) => Fail::Overloaded,
        };
        self.proxies.keep(host, port).ok_or(failure.into())
    }

    /// Checks that a target is not named like an upstream proxy, or like a server of the proxy's own. Its addresses may be unknown
    /// here.
    ///
    /// # Errors
    /// [`Deny::AddressNotAllowed`].
    pub(super) fn check_own_names(
        &self,
        policy: &Policy,
        admitted: &Admitted,
        proxies: &[KnownProxy],
        record: &mut Record,
    ) -> Verdict<()> {
        let (host, port) = (admitted.target().host(), admitted.target().port());
        let is_left_to_proxy = !proxies.is_empty() && proxy_that_resolves(policy, admitted).is_some();
        let is_proxy = proxies.iter().any(|known| known.is_named(host, port));
        let own_rule = || {
            let servers = self.own_servers.read();
            let mut named = servers.iter().filter(|(_, place)| place.host == *host && place.port == port);
            // Otherwise its addresses decide.
            let is_unknown = |place: &OwnPlace| place.addresses.is_empty() || is_left_to_proxy;
            named.find(|(_, place)| is_unknown(place)).map(|(server, _)| server.rule())
        };
        let Some(rule) = is_proxy.then_some(PROXY_RULE).or_else(own_rule) else { return Ok(()) };
        record.rule(rule);
        Err(Deny::AddressNotAllowed.into())
    }

    /// Returns the pin of a name that the upstream proxy resolves. Returns `None` if the target has to be resolved here.
    ///
    /// # Errors
    /// [`Deny::LoopDetected`] if the upstream proxy is this one.
    pub(super) fn pin_name(
        &self,
        policy: &Policy,
        admitted: &Admitted,
        proxies: &[KnownProxy],
        record: &mut Record,
    ) -> Verdict<Option<PinnedTarget>> {
        let Some(choice) = proxy_that_resolves(policy, admitted) else { return Ok(None) };
        let target = admitted.target().clone();
        let via = self.via(&choice, None, proxies)?;
        record.upstream_proxy(Some(choice.proxy.address().to_string()), false);
        Ok(Some(PinnedTarget { target, addresses: Vec::new(), via, generation: policy.rules_generation() }))
    }

    /// Returns the pin of checked addresses.
    ///
    /// # Errors
    /// [`Deny::LoopDetected`] if the upstream proxy is this one.
    pub(super) fn pin_addresses(
        &self,
        policy: &Policy,
        admitted: &Admitted,
        (addresses, proxies): (Vec<SocketAddr>, &[KnownProxy]),
        record: &mut Record,
    ) -> Verdict<PinnedTarget> {
        let target = admitted.target().clone();
        let choice = policy.upstream_proxy(admitted.allowed(), target.host());
        let via = match &choice {
            Some(choice) => self.via(choice, Some(&addresses), proxies)?,
            None => None,
        };
        record.upstream_proxy(via.as_ref().map(|via| via.proxy.address().to_string()), true);
        Ok(PinnedTarget { target, addresses, via, generation: policy.rules_generation() })
    }

    /// Returns the way through a proxy to those of the addresses that are not exempt, or, with `None`, to the name. Returns `None`
    /// if all of them are exempt.
    ///
    /// # Errors
    /// [`Fail::UpstreamProxyFailed`] if the proxy is not among those that were resolved; [`Deny::LoopDetected`] if it is this one.
    pub(super) fn via(
        &self,
        choice: &ProxyChoice<'_>,
        addresses: Option<&[SocketAddr]>,
        proxies: &[KnownProxy],
    ) -> Verdict<Option<Via>> {
        let proxied = |address: &&SocketAddr| !choice.exempts(address.ip());
        let asked = match addresses.map(|addresses| addresses.iter().filter(proxied).copied().collect::<Vec<_>>()) {
            None => Asked::Name,
            Some(proxied) if proxied.is_empty() => return Ok(None),
            Some(proxied) => Asked::Addresses(proxied),
        };
        let (host, port) = (&choice.proxy.address().host, choice.proxy.address().port);
        let known = proxies.iter().find(|known| known.is_named(host, port));
        let at = known.map(|known| known.addresses.clone()).ok_or(Fail::UpstreamProxyFailed)?;
        if at.iter().any(|address| self.own.is_listener(*address)) {
            return Err(Deny::LoopDetected.into());
        }
        Ok(Some(Via { proxy: choice.proxy.clone(), at, asked }))
    }
}

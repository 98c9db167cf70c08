//! The way to a pinned target: directly, or through an upstream proxy.

use std::net::SocketAddr;
use std::sync::Arc;

use parking_lot::RwLock;

use super::lookup::LookupFailure;
use super::{PinnedTarget, Resolver};
use crate::audit::record::Record;
use crate::model::host::Host;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::model::upstream_proxy::UpstreamProxyFailure;
use crate::policy::rule::Policy;
use crate::policy::upstream_proxy::{ProxyChoice, UpstreamProxy};
use crate::stages::authorize::Admitted;

/// The upstream proxy to connect through, and what it is asked for.
#[derive(Clone, Debug)]
pub(in crate::stages) struct Via {
    pub(in crate::stages) proxy: Arc<UpstreamProxy>,
    /// The addresses of the proxy.
    pub(in crate::stages) at: Vec<SocketAddr>,
    pub(in crate::stages) asked: Asked,
}

/// What an upstream proxy is asked to connect to.
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
    /// Returns true if a connection to this address may be used, or through a proxy that has resolved the name itself.
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
#[derive(Clone, PartialEq, Eq)]
pub(super) struct KnownProxy {
    host: Host,
    port: u16,
    addresses: Vec<SocketAddr>,
}

/// The upstream proxies of the latest policy with the addresses that were last resolved.
#[derive(Default)]
pub(super) struct KnownProxies(RwLock<Vec<KnownProxy>>);

impl KnownProxies {
    /// Returns true if one of them is at the address.
    pub(super) fn are_at(&self, address: SocketAddr) -> bool {
        self.0.read().iter().flat_map(|proxy| &proxy.addresses).any(|at| super::is_served_at(address, *at))
    }

    fn get(&self, host: &Host, port: u16) -> Option<KnownProxy> {
        self.0.read().iter().find(|proxy| proxy.host == *host && proxy.port == port).cloned()
    }

    fn replace(&self, proxies: &[KnownProxy]) {
        if *self.0.read() != proxies {
            *self.0.write() = proxies.to_vec();
        }
    }
}

/// Returns the upstream proxy for a destination, if it resolves the name.
pub(super) fn proxy_that_resolves<'p>(policy: &'p Policy, admitted: &Admitted) -> Option<ProxyChoice<'p>> {
    let host = admitted.target().host();
    policy.upstream_proxy(admitted.allowed(), host).filter(|choice| policy.is_resolved_by(&choice.proxy, host))
}

impl Resolver {
    /// Resolves the names of the upstream proxies. Their addresses are denied to sandboxes, so they have to be known before
    /// anything is dialed, also directly.
    pub(super) async fn look_up_proxies(&self, policy: &Policy, record: &mut Record) -> Verdict<Vec<KnownProxy>> {
        let mut found = Vec::new();
        for proxy in policy.upstream_proxies() {
            let proxy = self.look_up_proxy(policy, proxy).await;
            found.push(proxy.map_err(|refusal| match refusal {
                Refusal::Fail(Fail::UpstreamProxyFailed) => {
                    record.upstream_proxy_failed(UpstreamProxyFailure::Unresolved)
                }
                other => other,
            })?);
        }
        if !found.is_empty() {
            self.proxies.replace(&found);
        }
        Ok(found)
    }

    /// Returns the addresses of an upstream proxy.
    ///
    /// # Errors
    /// [`Fail::UpstreamProxyFailed`] if its name has none; [`Fail::Overloaded`].
    pub async fn proxy_addresses(&self, policy: &Policy, proxy: &UpstreamProxy) -> Verdict<Vec<SocketAddr>> {
        Ok(self.look_up_proxy(policy, proxy).await?.addresses)
    }

    /// Resolves the name of an upstream proxy. While that fails, the addresses that it had are used.
    pub(super) async fn look_up_proxy(&self, policy: &Policy, proxy: &UpstreamProxy) -> Verdict<KnownProxy> {
        let (host, port) = (&proxy.address().host, proxy.address().port);
        let failure = match self.addresses(policy, host, None).await {
            Ok(found) if !found.is_empty() => {
                let addresses = found.into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
                return Ok(KnownProxy { host: host.clone(), port, addresses });
            }
            Ok(_) | Err(LookupFailure::Dns(_)) => Fail::UpstreamProxyFailed,
            Err(LookupFailure::Overloaded) => Fail::Overloaded,
        };
        self.proxies.get(host, port).ok_or(failure.into())
    }

    /// Returns the pin of a name that the upstream proxy resolves. Returns `None` if the target has to be resolved here.
    ///
    /// # Errors
    /// [`Deny::AddressNotAllowed`] for the name of an upstream proxy, or of a server of the proxy's own; [`Deny::LoopDetected`] if
    /// the upstream proxy is this one.
    pub(super) fn pin_name(
        &self,
        policy: &Policy,
        admitted: &Admitted,
        proxies: &[KnownProxy],
        record: &mut Record,
    ) -> Verdict<Option<PinnedTarget>> {
        let Some(choice) = proxy_that_resolves(policy, admitted) else { return Ok(None) };
        let target = admitted.target().clone();
        let is_there = |host: &Host, port: u16| host == target.host() && port == target.port();
        let own_rule = || {
            let known = self.own_servers.read();
            known.iter().find(|(_, place)| is_there(&place.host, place.port)).map(|(server, _)| server.rule())
        };
        let proxy_rule = proxies
            .iter()
            .any(|known| is_there(&known.host, known.port))
            .then_some("address: the proxy's own upstream proxy");
        if let Some(rule) = proxy_rule.or_else(own_rule) {
            record.rule(rule);
            return Err(Deny::AddressNotAllowed.into());
        }
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
        let known = proxies.iter().find(|known| known.host == *host && known.port == port);
        let at = known.map(|known| known.addresses.clone()).ok_or(Fail::UpstreamProxyFailed)?;
        if at.iter().any(|address| self.own.is_listener(*address)) {
            return Err(Deny::LoopDetected.into());
        }
        Ok(Some(Via { proxy: choice.proxy.clone(), at, asked }))
    }
}

//! Resolves a host name once, checks every address, and returns the evidence.
//!
//! A name is looked up only after the policy has admitted it. Every address of the answer is checked, and one denied
//! address denies the host. Only the checked addresses are dialed later, so an answer that changes in between has no
//! effect (DNS rebinding).

mod answer_size;
mod health;
mod lookup;
mod name_quota;
mod route;

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::sync::Arc;
use std::time::{Duration, Instant};

use hickory_resolver::Resolver as Hickory;
use hickory_resolver::config::{ConnectionConfig, NameServerConfig, ProtocolConfig, ResolveHosts, ResolverConfig};
use hickory_resolver::proto::rr::{Name, RecordType};
use ipnet::IpNet;
use moka::sync::Cache;
use parking_lot::RwLock;
use prometheus_client::metrics::counter::Counter;
use tokio::sync::OnceCell;
use tokio::time::timeout_at;

use self::answer_size::DnsSockets;
use self::health::DnsHealth;
use self::lookup::{CachedAddresses, LookupFailure, join_families, query_family};
use self::name_quota::{NameQuota, Seen};
pub use self::route::OwnServerRoute;
pub(in crate::stages) use self::route::{Asked, Destination, Via};
use self::route::{KnownProxies, KnownProxy};
use super::authorize::Admitted;
use super::authorize::revocation::CheckedAddresses;
use super::socket_quota::SocketQuota;
use crate::audit::record::Record;
use crate::model::descriptors::Descriptors;
use crate::model::dns::DnsFailure;
use crate::model::host::{Host, HostName};
use crate::model::limited::{LimitScope, ReachedLimit};
use crate::model::name::ExecutionId;
use crate::model::refusal::{Deny, Fail, Stage, Verdict};
use crate::model::target::Target;
use crate::policy::address::embedded_v4;
use crate::policy::rule::{MatchedRules, Policy};
use crate::policy::settings::{Dns, DnsServer};
use crate::policy::upstream_proxy::UpstreamProxy;
use crate::tls::upstream::UpstreamTls;

/// The shortest and longest time for which an answer is cached, and the time for which a failure is cached.
const MIN_TTL: Duration = Duration::from_secs(5);
const MAX_TTL: Duration = Duration::from_secs(300);
const FAILURE_TTL: Duration = Duration::from_secs(1);
const CACHED_NAMES: u64 = 8_192;

/// Evidence that these addresses of a target were checked. Only they may be dialed, or named to an upstream proxy. If that proxy
/// resolves the name, its addresses are not known, and the evidence is that the policy says so.
///
/// ```compile_fail
/// use exeat::{model::target::Target, stages::pin::PinnedTarget};
/// let target = Target::connect(&"example.com:443".parse().unwrap()).unwrap();
/// // An unchecked address cannot be pinned.
/// let pinned = PinnedTarget { target, addresses: vec!["10.0.0.1:443".parse().unwrap()], via: None, generation: 1 };
/// ```
/// ```compile_fail
/// // Nor can a checked one be read and dialed by other means.
/// fn addresses(pinned: &exeat::stages::pin::PinnedTarget) { pinned.addresses(); }
/// ```
/// ```compile_fail
/// // The dialer is private to the stages.
/// use exeat::stages::forward::dial::connect;
/// ```
/// ```
/// fn authority(pinned: &exeat::stages::pin::PinnedTarget) -> String { pinned.target().authority() }
/// ```
#[derive(Clone, Debug)]
pub struct PinnedTarget {
    target: Target,
    /// All addresses of the target. Empty if the upstream proxy resolves its name.
    addresses: Vec<SocketAddr>,
    via: Option<Via>,
    generation: u64,
}

impl PinnedTarget {
    /// Returns the target that the addresses belong to.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// Returns the generation of the rules under which the addresses were checked.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns whether an address is one of them.
    #[must_use]
    pub fn includes(&self, ip: IpAddr) -> bool {
        self.addresses.iter().any(|address| address.ip().to_canonical() == ip.to_canonical())
    }

    /// Returns the addresses as text, for the probe's response.
    pub fn address_texts(&self) -> impl Iterator<Item = String> {
        self.addresses.iter().map(|address| address.ip().to_string())
    }

    /// Returns true if the upstream proxy resolves the name, so that no address was checked.
    #[must_use]
    pub fn is_resolved_by_proxy(&self) -> bool {
        self.via.as_ref().is_some_and(|via| matches!(via.asked, Asked::Name))
    }

    /// Returns the upstream proxy, if the target is reached through one.
    pub(super) fn upstream_proxy(&self) -> Option<&Arc<UpstreamProxy>> {
        self.via.as_ref().map(|via| &via.proxy)
    }

    /// Returns the addresses to check under a later policy.
    pub(super) fn checked_addresses(&self) -> CheckedAddresses {
        if self.is_resolved_by_proxy() {
            CheckedAddresses::LeftToProxy(self.target.host().clone())
        } else {
            CheckedAddresses::These(self.addresses.clone())
        }
    }

    /// Returns the destination to dial.
    pub(super) fn destination(&self) -> Destination<'_> {
        let target = (self.target.host(), self.target.port());
        Destination { target, addresses: &self.addresses, via: self.via.as_ref() }
    }
}

/// The proxy's own addresses, which are never a valid target.
#[derive(Clone, Debug, Default)]
pub struct OwnEndpoints {
    /// The proxy and admin listeners. A connection to them would be a loop.
    pub listeners: Vec<SocketAddr>,
    /// The ranges that a DNS listener answers with, if there is one. Nobody is at their addresses.
    pub synthetic: Vec<IpNet>,
}

/// A server of the proxy's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum OwnServer {
    /// The server of a shared ledger.
    Ledger,
    /// A server that takes log lines or traces of those who have a credential. It may share its addresses with other sites.
    AuthenticatingCollector,
    /// A server that takes log lines of anybody.
    OpenCollector,
    /// A server that takes traces of anybody.
    OpenTraceCollector,
    /// A server that is told of approvals. It knows the proxy by a signature or by the secret in its URL, and may share its
    /// addresses with other sites.
    ApprovalHook,
    /// A token endpoint. It knows the proxy by its secrets, and may share its addresses with other sites.
    TokenEndpoint,
    /// A secret store. It knows the proxy by its secrets, and may share its addresses with other sites.
    SecretStore,
}

/// Returns true if an address leads to a server.
fn is_served_at(address: SocketAddr, server: SocketAddr) -> bool {
    let (address, server) = (canonical(address), canonical(server));
    // The last two bind a socket, so they are asked last.
    let here = || (address.ip().is_unspecified() || is_local(address.ip())) && is_local(server.ip());
    server == address || (server.port() == address.port() && here())
}

impl OwnServer {
    fn is_denied(self) -> bool {
        matches!(self, Self::Ledger | Self::OpenCollector | Self::OpenTraceCollector)
    }

    /// Returns the rule that refuses requests to the server.
    fn rule(self) -> &'static str {
        match self {
            Self::Ledger => "address: the proxy's own ledger",
            Self::AuthenticatingCollector | Self::OpenCollector | Self::OpenTraceCollector => {
                "address: the proxy's own collector"
            }
            Self::ApprovalHook => "address: the proxy's own approval hook",
            Self::TokenEndpoint => "address: the proxy's own token endpoint",
            Self::SecretStore => "address: the proxy's own secret store",
        }
    }
}

/// The numbers of lookups since the start.
#[derive(Default)]
pub struct DnsMetrics {
    /// Names that were looked up for requests, in the cache or with a server.
    pub lookups: Counter,
    /// Names that a server was asked for.
    pub queried: Counter,
    /// Those without an address, in the order of [`DnsFailure::ALL`].
    failures: [Counter; DnsFailure::ALL.len()],
}

impl DnsMetrics {
    fn note_failure(&self, failure: DnsFailure) {
        self.failures().filter(|(reason, _)| *reason == failure).for_each(|(_, count)| {
            count.inc();
        });
    }

    /// Returns the number of names without an address, by reason.
    pub fn failures(&self) -> impl Iterator<Item = (DnsFailure, &Counter)> {
        DnsFailure::ALL.into_iter().zip(&self.failures)
    }
}

/// Resolves names and checks the addresses.
pub struct Resolver {
    dns: Hickory<DnsSockets>,
    servers: Vec<SocketAddr>,
    timeout: Duration,
    own: OwnEndpoints,
    /// The places of the proxy's own servers that are denied to sandboxes.
    own_servers: RwLock<BTreeMap<OwnServer, OwnPlace>>,
    /// The addresses of upstream proxies that were resolved before.
    proxies: KnownProxies,
    answers: Cache<HostName, Arc<CacheEntry>>,
    /// Limits concurrent lookups.
    lookups: Arc<SocketQuota>,
    /// Limits the new names per execution.
    names: NameQuota,
    health: DnsHealth,
    metrics: DnsMetrics,
}

/// The place of a server of the proxy's own.
struct OwnPlace {
    host: Host,
    port: u16,
    addresses: Vec<SocketAddr>,
}

impl OwnPlace {
    /// Returns the place with the addresses that it had before, if the new ones are not known.
    fn after(mut self, before: Option<Self>) -> Self {
        let before = before.filter(|before| before.host == self.host && before.port == self.port);
        if let Some(before) = before.filter(|_| self.addresses.is_empty()) {
            self.addresses = before.addresses;
        }
        self
    }
}

/// The answer for one name, filled by the first request for it.
#[derive(Default)]
struct CacheEntry(OnceCell<CachedAddresses>);

impl Resolver {
    /// Creates the resolver without sending any queries.
    ///
    /// # Errors
    /// Returns an error if the resolver cannot be built. A machine without `/etc/resolv.conf` resolves nothing.
    pub fn new(settings: &Dns, tls: &UpstreamTls, own: OwnEndpoints, descriptors: &Descriptors) -> io::Result<Self> {
        let mut name_servers = Vec::new();
        for server in &settings.servers {
            name_servers.extend(name_servers_of(server));
        }
        if name_servers.is_empty() {
            tracing::warn!("no DNS server is configured; only [dns].hosts and IP literals can be reached");
        }
        let servers = endpoints(&name_servers);
        let sockets = DnsSockets::new(plain_tcp(&name_servers));
        let config = ResolverConfig::from_name_servers(name_servers);
        // DNS servers are verified with the same roots as origins. Each protocol adds its own ALPN.
        let mut tls = tls.config().as_ref().clone();
        tls.alpn_protocols.clear();
        let mut builder = Hickory::builder_with_config(config, sockets).with_tls_config(tls);
        let options = builder.options_mut();
        options.use_hosts_file = ResolveHosts::Never;
        options.ndots = 0;
        // Answers are cached here instead, with our own limits.
        options.cache_size = 0;
        options.num_concurrent_reqs = 1;
        options.timeout = settings.timeout / 2;
        options.attempts = 2;
        options.try_tcp_on_error = true;
        let dns = builder.build().map_err(io::Error::other)?;
        let answers = Cache::builder().max_capacity(CACHED_NAMES).time_to_live(MAX_TTL).build();
        let lookups = SocketQuota::new(descriptors.lookups, descriptors.lookups_each);
        let names = NameQuota::new(settings.new_names_per_minute);
        let (own_servers, health) = (RwLock::default(), DnsHealth::default());
        let (timeout, metrics) = (settings.timeout, DnsMetrics::default());
        let proxies = KnownProxies::default();
        Ok(Self { dns, servers, timeout, own, own_servers, proxies, answers, lookups, names, health, metrics })
    }

    /// Returns the numbers of lookups and of their failures.
    #[must_use]
    pub fn metrics(&self) -> &DnsMetrics {
        &self.metrics
    }

    /// Returns whether no DNS server has answered for a while, although names were looked up.
    #[must_use]
    pub fn is_degraded(&self) -> bool {
        self.health.is_degraded()
    }

    /// Resolves an admitted destination and checks every address. IP literals are checked too. A name that the upstream proxy
    /// resolves is not looked up.
    ///
    /// # Errors
    /// [`Fail::AuditUnavailable`] if the audit log cannot be written, since then nothing may be sent;
    /// [`Deny::RateLimited`] if the execution has looked up too many new names; [`Deny::AddressNotAllowed`],
    /// [`Deny::LoopDetected`], [`Fail::ResolveFailed`]; [`Fail::UpstreamProxyFailed`] if the addresses of the upstream proxy are
    /// not known; [`Fail::Overloaded`] if too many lookups are pending, of the execution or in total.
    pub async fn pin(&self, policy: &Policy, admitted: &Admitted, record: &mut Record) -> Verdict<PinnedTarget> {
        record.enter(Stage::Pin);
        record.can_be_written().await?;
        self.check_name(policy, admitted, record).await?;
        let proxies = self.look_up_proxies(policy, record).await?;
        self.check_own_names(policy, admitted, &proxies, record)?;
        if let Some(pinned) = self.pin_name(policy, admitted, &proxies, record)? {
            return Ok(pinned);
        }
        let execution = Some(admitted.caller().execution());
        let addresses = self.addresses(policy, admitted.target().host(), execution).await;
        let addresses = addresses.map_err(|failure| failure.refusal(record))?;
        let port = admitted.target().port();
        let addresses: Vec<_> = addresses.into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        self.check_addresses(policy, admitted, (&addresses, &proxies), record)?;
        self.pin_addresses(policy, admitted, (addresses, &proxies), record)
    }

    /// Checks the addresses of a pin again, for a request granted by narrower rules or under a newer policy. There is no DNS
    /// query for the target, unless its name was left to an upstream proxy and now is not.
    ///
    /// # Errors
    /// The errors of [`Self::pin`].
    pub async fn recheck(
        &self,
        policy: &Policy,
        admitted: &Admitted,
        pinned: &PinnedTarget,
        record: &mut Record,
    ) -> Verdict<PinnedTarget> {
        check_target(admitted, pinned)?;
        let proxies = self.look_up_proxies(policy, record).await?;
        self.check_own_names(policy, admitted, &proxies, record)?;
        if let Some(pinned) = self.pin_name(policy, admitted, &proxies, record)? {
            return Ok(pinned);
        }
        if pinned.is_resolved_by_proxy() {
            return Box::pin(self.pin(policy, admitted, record)).await;
        }
        self.check_addresses(policy, admitted, (&pinned.addresses, &proxies), record)?;
        self.pin_addresses(policy, admitted, (pinned.addresses.clone(), &proxies), record)
    }

    /// Checks whether a newer policy allows the addresses of an open tunnel, without a DNS query.
    ///
    /// # Errors
    /// [`Deny::AuthorityMismatch`], [`Deny::LoopDetected`]; [`Deny::AddressNotAllowed`] also if the addresses are not known, and
    /// the policy requires that they are checked.
    pub fn check_open(
        &self,
        policy: &Policy,
        admitted: &Admitted,
        pinned: &PinnedTarget,
        record: &mut Record,
    ) -> Verdict<()> {
        check_target(admitted, pinned)?;
        let proxies = self.known_proxies(policy);
        self.check_own_names(policy, admitted, &proxies, record)?;
        if !pinned.is_resolved_by_proxy() {
            return self.check_addresses(policy, admitted, (&pinned.addresses, &proxies), record);
        }
        match route::proxy_that_resolves(policy, admitted) {
            Some(_) => Ok(()),
            None => {
                record.rule("address: not known, because the upstream proxy has resolved the name");
                Err(Deny::AddressNotAllowed.into())
            }
        }
    }

    /// Resolves and checks a webhook at registration, unless the upstream proxy resolves its name. Each call is checked again.
    ///
    /// # Errors
    /// [`Fail::ResolveFailed`] or [`Deny::AddressNotAllowed`].
    pub async fn precheck(&self, policy: &Policy, webhook: &Target) -> Verdict<()> {
        let proxy = policy.upstream_proxy(&MatchedRules::as_webhook(), webhook.host());
        if proxy.is_some_and(|choice| policy.is_resolved_by(&choice.proxy, webhook.host())) {
            return Ok(());
        }
        let addresses = self.addresses(policy, webhook.host(), None).await?;
        let checked = addresses.into_iter().try_for_each(|ip| policy.check_address(ip, &MatchedRules::as_webhook()));
        checked.map_err(|_| Deny::AddressNotAllowed.into())
    }

    /// Resolves a server of the proxy's own. Unless its protocol keeps clients without credentials out, its addresses are
    /// denied to all sandboxes from then on, whatever their rules allow.
    ///
    /// # Errors
    /// [`Fail::ResolveFailed`], [`Fail::UpstreamProxyFailed`] and [`Fail::Overloaded`]; [`Deny::LoopDetected`] if the upstream proxy
    /// is this one.
    pub async fn own_server(
        &self,
        policy: &Policy,
        server: OwnServer,
        host: &Host,
        port: u16,
    ) -> Verdict<OwnServerRoute> {
        // Such an address means another machine to the proxy.
        let is_here = host.ip().is_some_and(|ip| ip.to_canonical().is_loopback());
        let choice = policy.upstream_proxy_to_own_server(host).filter(|_| !is_here);
        let is_left_to_proxy = choice.as_ref().is_some_and(|choice| policy.is_resolved_by(&choice.proxy, host));
        let addresses = if is_left_to_proxy { Vec::new() } else { self.addresses(policy, host, None).await? };
        let addresses: Vec<_> = addresses.into_iter().map(|ip| SocketAddr::new(ip, port)).collect();
        if server.is_denied() {
            let place = OwnPlace { host: host.clone(), port, addresses: addresses.clone() };
            let mut servers = self.own_servers.write();
            let place = place.after(servers.remove(&server));
            servers.insert(server, place);
        }
        let via = match choice {
            None => None,
            Some(choice) => {
                let proxy = self.look_up_proxy(policy, &choice.proxy).await?;
                self.via(&choice, (!is_left_to_proxy).then_some(&addresses), &[proxy])?
            }
        };
        Ok(OwnServerRoute { target: (host.clone(), port), addresses, via })
    }

    /// Checks whether the execution may look up the name. A new name is logged first, whatever the outcome of the request:
    /// a tunnel has no other line before its first request or its end.
    async fn check_name(&self, policy: &Policy, admitted: &Admitted, record: &mut Record) -> Verdict<()> {
        let Host::Name(name) = admitted.target().host() else { return Ok(()) };
        if policy.hosts_override(name).is_some() {
            return Ok(());
        }
        match self.names.record(admitted.caller().execution(), name, Instant::now()) {
            Ok(Seen::Before) => Ok(()),
            Ok(Seen::Never) => {
                let written = record.write_lookup().await;
                if written.is_err() {
                    self.names.forget(admitted.caller().execution(), name);
                }
                written
            }
            Err(wait) => {
                let (limit, within) = (self.names.per_minute().into(), LimitScope::Time(NameQuota::window()));
                let name = "dns.new_names_per_minute";
                Err(record
                    .limited(Deny::RateLimited, ReachedLimit { name, limit, scope: within, retry_after: Some(wait) }))
            }
        }
    }

    async fn addresses(
        &self,
        policy: &Policy,
        host: &Host,
        execution: Option<&ExecutionId>,
    ) -> Result<Vec<IpAddr>, LookupFailure> {
        match host {
            Host::Ip(ip) => Ok(vec![*ip]),
            Host::Name(name) => match policy.hosts_override(name) {
                Some(addresses) => Ok(addresses.to_vec()),
                None => self.resolve(name, execution).await,
            },
        }
    }

    fn check_addresses(
        &self,
        policy: &Policy,
        admitted: &Admitted,
        (addresses, proxies): (&[SocketAddr], &[KnownProxy]),
        record: &mut Record,
    ) -> Verdict<()> {
        if addresses.is_empty() {
            return Err(Fail::ResolveFailed.into());
        }
        for address in addresses {
            let mut refused = |rule: &str| {
                record.address(address.ip());
                record.rule(rule);
            };
            if self.own.is_listener(*address) {
                refused("address: the proxy's own listener");
                return Err(Deny::LoopDetected.into());
            }
            if self.own.synthetic.iter().any(|range| range.contains(&canonical(*address).ip())) {
                refused("address: one that stands for a name (dns.synthetic_ranges)");
                return Err(Deny::AddressNotAllowed.into());
            }
            if self.is_dns_server(*address) {
                refused("address: the proxy's own DNS server");
                return Err(Deny::AddressNotAllowed.into());
            }
            if proxies.iter().any(|proxy| proxy.is_at(*address)) {
                refused(route::PROXY_RULE);
                return Err(Deny::AddressNotAllowed.into());
            }
            // One that is reached without TLS may serve its secrets to anybody on this machine.
            let is_store = || policy.local_stores().iter().any(|store| is_served_at(*address, *store));
            let own_server = self.own_server_at(*address).or_else(|| is_store().then_some(OwnServer::SecretStore));
            if let Some(server) = own_server {
                refused(server.rule());
                return Err(Deny::AddressNotAllowed.into());
            }
            if let Err(denied) = policy.check_address(address.ip(), admitted.allowed()) {
                refused(&format!("address: {}", denied.block()));
                return Err(Deny::AddressNotAllowed.into());
            }
        }
        Ok(())
    }

    fn is_dns_server(&self, address: SocketAddr) -> bool {
        let address = canonical(address);
        let here = |server: &SocketAddr| server.ip().is_loopback() && address.ip().is_unspecified();
        self.servers.iter().any(|server| *server == address || (server.port() == address.port() && here(server)))
    }

    fn own_server_at(&self, address: SocketAddr) -> Option<OwnServer> {
        let known = self.own_servers.read();
        let is_at = |server: &SocketAddr| is_served_at(address, *server);
        known.iter().find(|(_, place)| place.addresses.iter().any(is_at)).map(|(server, _)| *server)
    }

    async fn resolve(&self, name: &HostName, execution: Option<&ExecutionId>) -> Result<Vec<IpAddr>, LookupFailure> {
        self.metrics.lookups.inc();
        for _ in 0..2 {
            let slot = self.answers.get_with(name.clone(), Arc::default);
            let answer = Box::pin(self.fill_slot(&slot, name, execution)).await?;
            if answer.until > Instant::now() {
                return answer.addresses.clone().map_err(LookupFailure::Dns);
            }
            // The entry is stale. The first request to notice removes it, unless another one has already replaced it.
            self.answers.remove_if_same(name, &slot);
        }
        let permit = self.lookups.acquire_within(execution, self.timeout).await;
        let _permit = permit.ok_or(LookupFailure::Overloaded)?;
        Box::pin(self.query(name)).await.addresses.map_err(LookupFailure::Dns)
    }

    /// Returns the answer in a slot, and fills the slot if it is empty. The slot is not locked while waiting for a
    /// permit, because other requests for the same name would have to wait too.
    async fn fill_slot<'s>(
        &self,
        slot: &'s CacheEntry,
        name: &HostName,
        execution: Option<&ExecutionId>,
    ) -> Result<&'s CachedAddresses, LookupFailure> {
        let asked = slot.0.get_or_try_init(|| async {
            let _permit = self.lookups.try_acquire(execution).ok_or(())?;
            Ok::<_, ()>(self.query(name).await)
        });
        if let Ok(answer) = asked.await {
            return Ok(answer);
        }
        let permit = self.lookups.acquire_within(execution, self.timeout).await;
        let _permit = permit.ok_or(LookupFailure::Overloaded)?;
        Ok(slot.0.get_or_init(|| self.query(name)).await)
    }

    /// Queries A and AAAA separately. A failed family is left out; if both fail, so does the lookup.
    async fn query(&self, name: &HostName) -> CachedAddresses {
        self.metrics.queried.inc();
        let found = self.query_families(name).await;
        let failures = found.as_ref().err().map(Vec::as_slice).unwrap_or_default();
        self.health.note(failures, Instant::now());
        match found {
            Ok((addresses, until)) => {
                let (least, most) = (Instant::now() + MIN_TTL, Instant::now() + MAX_TTL);
                CachedAddresses { addresses: Ok(addresses), until: until.min(most).max(least) }
            }
            Err(failures) => {
                let failure = failures.into_iter().min().unwrap_or(DnsFailure::NoAddress);
                self.metrics.note_failure(failure);
                CachedAddresses { addresses: Err(failure), until: Instant::now() + FAILURE_TTL }
            }
        }
    }

    /// Returns the addresses of both families, and when the first of their answers ends, or the failures of both.
    async fn query_families(&self, name: &HostName) -> Result<(Vec<IpAddr>, Instant), Vec<DnsFailure>> {
        if self.servers.is_empty() {
            return Err(vec![DnsFailure::NoServer]);
        }
        let mut fqdn = Name::from_ascii(name.as_str()).map_err(|_| vec![DnsFailure::NoName])?;
        // Without this, the resolver would try search domains first.
        fqdn.set_fqdn(true);
        let deadline = tokio::time::Instant::now() + self.timeout;
        let family = async |family| {
            let answer = timeout_at(deadline, query_family(&self.dns, fqdn.clone(), family)).await;
            answer.unwrap_or(Err(DnsFailure::TimedOut))
        };
        let (v6, v4) = (family(RecordType::AAAA), family(RecordType::A));
        tokio::pin!(v4, v6);
        let families = tokio::select! {
            first = &mut v6 => join_families(first, v4).await,
            first = &mut v4 => join_families(first, v6).await,
        };
        match families {
            (Ok((mut addresses, until)), Ok((others, other_until))) => {
                addresses.extend(others);
                Ok((addresses, until.min(other_until)))
            }
            (Ok(answer), Err(_)) | (Err(_), Ok(answer)) => Ok(answer),
            (Err(first), Err(second)) => Err(vec![first, second]),
        }
    }
}

/// Checks that a pin is of the target.
fn check_target(admitted: &Admitted, pinned: &PinnedTarget) -> Verdict<()> {
    let (admitted, pinned) = (admitted.target(), &pinned.target);
    let is_same = admitted.host() == pinned.host() && admitted.port() == pinned.port();
    if is_same { Ok(()) } else { Err(Deny::AuthorityMismatch.into()) }
}

trait RemoveIfSame {
    fn remove_if_same(&self, name: &HostName, slot: &Arc<CacheEntry>);
}

impl RemoveIfSame for Cache<HostName, Arc<CacheEntry>> {
    fn remove_if_same(&self, name: &HostName, slot: &Arc<CacheEntry>) {
        if self.get(name).is_some_and(|current| Arc::ptr_eq(&current, slot)) {
            self.invalidate(name);
        }
    }
}

impl OwnEndpoints {
    fn is_listener(&self, address: SocketAddr) -> bool {
        let address = canonical(address);
        let same = |own: &SocketAddr| {
            let own = canonical(*own);
            let everywhere = own.ip().is_unspecified() && is_local(address.ip());
            own.port() == address.port() && (own.ip() == address.ip() || everywhere || address.ip().is_unspecified())
        };
        self.listeners.iter().any(same)
    }
}

/// Returns true if the address belongs to this machine, that is if a socket can be bound to it. Sends nothing.
fn is_local(ip: IpAddr) -> bool {
    ip.is_loopback() || UdpSocket::bind((ip, 0)).is_ok()
}

/// Returns the IPv4 address if one is embedded, or the address itself.
fn canonical(address: SocketAddr) -> SocketAddr {
    let ip = address.ip();
    let inner = embedded_v4(ip).first().copied();
    SocketAddr::new(inner.map_or(ip, IpAddr::from), address.port())
}

/// Returns the `nameserver` lines of `/etc/resolv.conf`. Search domains and options are ignored.
fn system_servers() -> Vec<NameServerConfig> {
    let text = std::fs::read_to_string("/etc/resolv.conf").unwrap_or_default();
    nameserver_lines(&text).map(NameServerConfig::udp_and_tcp).collect()
}

fn nameserver_lines(text: &str) -> impl Iterator<Item = IpAddr> {
    let words = text.lines().map(str::split_whitespace);
    words.filter_map(|mut words| if words.next()? == "nameserver" { words.next()?.parse().ok() } else { None })
}

fn name_servers_of(server: &DnsServer) -> Vec<NameServerConfig> {
    let (at, mut connections) = match server {
        DnsServer::System => return system_servers(),
        DnsServer::Plain(at) => (at, vec![ConnectionConfig::udp(), ConnectionConfig::tcp()]),
        DnsServer::Tls { at, name } => (at, vec![ConnectionConfig::tls(name.as_str().into())]),
        DnsServer::Https { at, name, path } => {
            (at, vec![ConnectionConfig::https(name.as_str().into(), Some(path.as_str().into()))])
        }
    };
    for connection in &mut connections {
        connection.port = at.port();
    }
    vec![NameServerConfig::new(at.ip(), true, connections)]
}

fn endpoints(servers: &[NameServerConfig]) -> Vec<SocketAddr> {
    let of = |server: &NameServerConfig| {
        server.connections.iter().map(|c| canonical(SocketAddr::new(server.ip, c.port))).collect::<Vec<_>>()
    };
    servers.iter().flat_map(of).collect()
}

/// Returns the addresses at which DNS is spoken over TCP without TLS.
fn plain_tcp(servers: &[NameServerConfig]) -> Arc<[SocketAddr]> {
    let is_plain = |connection: &&ConnectionConfig| matches!(connection.protocol, ProtocolConfig::Tcp);
    let of = |server: &NameServerConfig| {
        let plain = server.connections.iter().filter(is_plain);
        plain.map(|connection| SocketAddr::new(server.ip, connection.port)).collect::<Vec<_>>()
    };
    servers.iter().flat_map(of).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detects_own_listeners_in_all_address_forms() {
        let own = |listen: &str| OwnEndpoints { listeners: vec![listen.parse().unwrap()], ..OwnEndpoints::default() };
        let rows = [
            ("127.0.0.1:3128", "127.0.0.1:3128", true),
            ("127.0.0.1:3128", "[::ffff:127.0.0.1]:3128", true),
            ("127.0.0.1:3128", "0.0.0.0:3128", true),
            ("127.0.0.1:3128", "127.0.0.1:3129", false),
            ("127.0.0.1:3128", "127.0.0.2:3128", false),
            ("0.0.0.0:3128", "127.0.0.2:3128", true),
            ("[::]:3128", "127.0.0.1:3128", true),
            ("0.0.0.0:3128", "192.0.2.1:3128", false),
            ("[::ffff:127.0.0.1]:3128", "127.0.0.1:3128", true),
            ("127.0.0.1:3128", "[64:ff9b::7f00:1]:3128", true),
        ];
        for (listen, address, want) in rows {
            assert_eq!(own(listen).is_listener(address.parse().unwrap()), want, "{listen} {address}");
        }
    }

    #[test]
    fn known_addresses_of_an_own_server_outlive_a_proxy_that_resolves() {
        let place = |host: &str, ips: &[&str]| OwnPlace {
            host: Host::parse(host).unwrap(),
            port: 514,
            addresses: ips.iter().map(|ip| SocketAddr::new(ip.parse().unwrap(), 514)).collect(),
        };
        let rows = [
            (place("a.test", &["192.0.2.1"]), place("a.test", &[]), "192.0.2.1:514"),
            (place("a.test", &["192.0.2.1"]), place("a.test", &["192.0.2.2"]), "192.0.2.2:514"),
            (place("a.test", &["192.0.2.1"]), place("b.test", &[]), ""),
        ];
        for (before, new, want) in rows {
            let kept: Vec<_> = new.after(Some(before)).addresses.iter().map(ToString::to_string).collect();
            assert_eq!(kept.join(","), want);
        }
    }

    #[test]
    fn only_nameserver_lines_of_resolv_conf_count() {
        let text = "search -x a..b\ndomain a..b\nnameserver 192.0.2.53\n# nameserver 192.0.2.1\nnameserver 2001:db8::53 # x\nnameserver x\noptions ndots:5\n";
        let found: Vec<_> = nameserver_lines(text).map(|ip| ip.to_string()).collect();
        assert_eq!(found, ["192.0.2.53", "2001:db8::53"]);
    }
}

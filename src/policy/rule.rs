//! Tasks and integrations, and the rules that combine several integrations into one decision.

use std::borrow::Cow;
use std::collections::{HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use http::Method;
use ipnet::IpNet;

use super::address::Cidrs;
use super::approval::Approval;
use super::compile::Problem;
use super::credential::{Credential, strong_values};
use super::leak::Leak;
use super::mint::{MintKey, MintRecipe, Minting};
use super::path;
use super::pattern::{HostPattern, PathPattern};
use super::plan::{Limits, Plan};
use super::task_credentials::TaskCredentials;
use super::task_token::TaskToken;
use super::upstream_proxy::{ProxyChoice, ProxyOverride, UpstreamProxies, UpstreamProxy};
use crate::leak::families::Families;
use crate::leak::strength::{Strength, WEAK};
use crate::leak::{LogValues, Matcher, ValueSource};
use crate::model::host::{Host, HostName};
use crate::model::name::{CredentialName, TaskName};
use crate::model::refusal::Deny;
use crate::model::secret::TokenHash;
use crate::model::target::{Scheme, Target};
use crate::model::tool::{Kind, Tool};

/// The most tasks that are prepared for a minted value, which delays the requests that wait for it.
const MAX_PREPARED: usize = 64;

/// The rules that apply to requests. Immutable; a reload creates a new policy.
#[derive(Default)]
pub struct Policy {
    /// The number of this policy within the process. Evidence from another policy is checked again.
    pub(super) generation: u64,
    /// The generation in which these rules came into force. A minted value creates a new policy with the same rules.
    pub(super) rules_generation: u64,
    /// `[network]`.
    pub(super) network: Network,
    /// `[leak]`.
    pub(super) leak: Leak,
    /// `[dns].hosts`.
    pub(super) hosts: HashMap<HostName, Vec<IpAddr>>,
    /// The proxies of `[upstream]` and of integrations.
    pub(super) upstream_proxies: UpstreamProxies,
    /// `[tasks]`.
    pub(super) tasks: HashMap<TaskName, Arc<Task>>,
    /// Static tokens, hashed.
    pub(super) tokens: HashMap<TokenHash, TaskName>,
    /// The credentials of all tasks.
    pub(super) credentials: Vec<Arc<Credential>>,
    /// Those that are minted.
    pub(super) minted: HashMap<MintKey, Arc<Credential>>,
    /// The addresses of secret stores that are reached without TLS.
    pub(super) local_stores: Arc<[SocketAddr]>,
    /// The commands of the configuration, whether a task has their credential or not.
    pub(super) commands: Arc<[Vec<String>]>,
    /// The values of all credentials and tokens, which no log or record may contain.
    pub(super) log_values: Arc<LogValues>,
    /// Those of them that are not minted.
    pub(super) fixed_log_values: Arc<LogValues>,
}

/// Returns the values of credentials and tokens that are not minted. The log may not contain them.
pub(super) fn fixed_log_values<'t>(
    credentials: &[Arc<Credential>],
    tasks: impl Iterator<Item = &'t Arc<Task>>,
) -> Arc<LogValues> {
    let credentials = credentials.iter().filter(|credential| credential.recipe().is_none());
    let credentials = credentials.map(|credential| Box::new(credential.clone()) as Box<dyn ValueSource>);
    let tokens = tasks.flat_map(|task| task.tokens.clone()).map(|token| Box::new(token) as Box<dyn ValueSource>);
    Arc::new(LogValues::new(credentials.chain(tokens)))
}

/// Indexes the credentials that are minted.
pub(super) fn minted(credentials: &[Arc<Credential>]) -> HashMap<MintKey, Arc<Credential>> {
    credentials.iter().filter_map(|credential| Some((credential.mint_key()?, credential.clone()))).collect()
}

/// Returns the addresses of secret stores that are reached without TLS: programs on this machine.
pub(super) fn local_stores(credentials: &[Arc<Credential>]) -> Arc<[SocketAddr]> {
    let recipes = credentials.iter().filter_map(|credential| credential.recipe());
    let local = recipes.flat_map(|recipe| recipe.urls()).filter(|url| !url.is_tls);
    let mut addresses: Vec<_> = local.filter_map(|url| Some(SocketAddr::new(url.host.ip()?, url.port))).collect();
    addresses.sort_unstable();
    addresses.dedup();
    addresses.into()
}

/// Returns all values that the log may not contain.
pub(super) fn log_values(fixed: &Arc<LogValues>, credentials: &[Arc<Credential>]) -> Arc<LogValues> {
    let mut minted = credentials.iter().filter(|credential| credential.recipe().is_some()).peekable();
    if minted.peek().is_none() {
        return fixed.clone();
    }
    let minted = minted.map(|credential| Box::new(credential.clone()) as Box<dyn ValueSource>);
    Arc::new(LogValues::new(minted).with_base(fixed.clone()))
}

/// `[network]`: blocks that are allowed or denied for all tasks.
#[derive(Clone, Default)]
pub(super) struct Network {
    pub(super) allow: Vec<IpNet>,
    pub(super) deny: Vec<IpNet>,
}

/// The permissions of a sandbox.
#[derive(Clone)]
pub struct Task {
    pub(super) name: TaskName,
    /// The static tokens, of which each is accepted.
    pub(super) tokens: Vec<Arc<TaskToken>>,
    pub(super) integrations: Vec<Arc<Integration>>,
    /// The hosts that the task may not reach, whatever its integrations allow.
    pub(super) denied: Vec<HostPattern>,
    pub(super) observe: bool,
    pub(super) plan: Plan,
    pub(super) credentials: Arc<TaskCredentials>,
    /// The families of keys to search for.
    pub(super) families: Arc<Families>,
    /// Matches the values that must not leave in requests. Built at its first use.
    pub(super) values: OnceLock<Arc<Matcher>>,
    pub(super) tools: Vec<Tool>,
    pub(super) raw: bool,
    /// The registered webhook URLs. `None` without the integration `webhook`.
    pub(super) webhooks: Option<Vec<Target>>,
    pub(super) commands: Option<Duration>,
}

/// The kind of access to a destination.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AccessKind {
    /// A tunnel. Its requests are authorized when they arrive.
    Connect,
    /// A probe of its addresses, certificate and reachability. It sends no request.
    Probe,
    /// One request.
    Request(Kind),
}

/// A named set of allowed destinations.
pub struct Integration {
    pub(super) name: String,
    pub(super) allowed: Vec<HostPattern>,
    pub(super) denied: Vec<HostPattern>,
    pub(super) any_public_host: bool,
    pub(super) ports: Vec<u16>,
    pub(super) methods: Option<Vec<Method>>,
    pub(super) paths: Option<Vec<PathPattern>>,
    pub(super) plain_http: bool,
    pub(super) mode: Mode,
    pub(super) ech: Ech,
    pub(super) allow_cidrs: Vec<IpNet>,
    pub(super) require_credential: Option<CredentialName>,
    pub(super) approval: Option<Approval>,
    pub(super) trace_context: bool,
    /// The upstream proxy in place of that of `[upstream]`.
    pub(super) upstream: Option<ProxyOverride>,
}

/// The handling of a tunnel's content.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Mode {
    /// The proxy terminates TLS and authorizes every request.
    #[default]
    Inspect,
    /// The proxy checks the SNI and then forwards the bytes without inspecting them.
    Opaque,
}

/// The handling of the encrypted `ClientHello` extension in an opaque tunnel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ech {
    /// It is allowed. Only the outer name has been checked then.
    Allow,
    /// It is refused, because the outer name proves nothing.
    #[default]
    Deny,
}

/// The integrations that together allow a destination or request.
#[derive(Clone)]
pub struct MatchedRules {
    rules: Vec<Arc<Integration>>,
    /// The refusal that `observe` overrode. If set, `rules` is empty and the limits of the public rule apply.
    observed: Option<Deny>,
    /// Whether the destination is a registered webhook URL. If so, `rules` is empty.
    webhook: bool,
    /// The integrations that name a webhook's host. They allow nothing, but may require an approval.
    approval_rules: Vec<Arc<Integration>>,
}

/// An allowed request, with the path to forward instead of the one sent.
pub struct MatchedRequest {
    /// The integrations that allow it.
    pub allowed: MatchedRules,
    /// The canonical path, if the path was checked and its canonical form differs from the one sent.
    pub path: Option<String>,
    /// Whether another method or path might be denied, or require an approval or a certain credential.
    pub is_restricted: bool,
}

impl Policy {
    /// Returns the number of this policy within the process.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }

    /// Returns the generation in which the rules came into force. Values may have been minted since.
    #[must_use]
    pub fn rules_generation(&self) -> u64 {
        self.rules_generation
    }

    /// Returns a task by its name.
    #[must_use]
    pub fn task(&self, name: &TaskName) -> Option<&Arc<Task>> {
        self.tasks.get(name)
    }

    /// Returns all tasks, in no particular order.
    pub fn tasks(&self) -> impl Iterator<Item = &Arc<Task>> {
        self.tasks.values()
    }

    /// Returns the task of a static token.
    #[must_use]
    pub fn task_by_token(&self, token: TokenHash) -> Option<&Arc<Task>> {
        self.tokens.get(&token).and_then(|name| self.tasks.get(name))
    }

    /// Returns the operator's addresses for a host. They are checked like any DNS answer.
    #[must_use]
    pub fn hosts_override(&self, name: &HostName) -> Option<&[IpAddr]> {
        self.hosts.get(name).map(Vec::as_slice)
    }

    /// Returns the upstream proxy for a host that `allowed` permits. Its addresses may still be exempt.
    #[must_use]
    pub fn upstream_proxy(&self, allowed: &MatchedRules, host: &Host) -> Option<ProxyChoice<'_>> {
        let rules = allowed.rules.iter().chain(&allowed.approval_rules);
        self.upstream_proxies.choose(rules.map(|rule| rule.upstream.as_ref()), host)
    }

    /// Returns the upstream proxy for a server of the daemon's own.
    #[must_use]
    pub fn upstream_proxy_to_own_server(&self, host: &Host) -> Option<ProxyChoice<'_>> {
        self.upstream_proxies.choose(std::iter::empty(), host)
    }

    /// Returns true if an upstream proxy resolves a host. Addresses, names with addresses in the configuration, and those of this
    /// machine (RFC 6761 §6.3) are resolved here.
    #[must_use]
    pub fn is_resolved_by(&self, proxy: &UpstreamProxy, host: &Host) -> bool {
        let is_unknown = |name: &HostName| self.hosts_override(name).is_none() && !name.is_at_or_below("localhost");
        proxy.resolves() && host.name().is_some_and(is_unknown)
    }

    /// Returns all upstream proxies.
    #[must_use]
    pub fn upstream_proxies(&self) -> &[Arc<UpstreamProxy>] {
        &self.upstream_proxies.all
    }

    /// Returns the settings of the leak scan.
    #[must_use]
    pub fn leak(&self) -> &Leak {
        &self.leak
    }

    /// Returns the values of all credentials and tokens. No log or record may contain them.
    #[must_use]
    pub fn log_values(&self) -> &Arc<LogValues> {
        &self.log_values
    }

    /// Estimates the strength of all values, and returns a warning for each weak one. This takes about a millisecond of
    /// processor time for each value that has not been used yet.
    pub fn weak_values(&self) -> impl Iterator<Item = Problem> {
        self.estimated_values().flatten()
    }

    /// As [`Self::weak_values`], but returns `None` for each strong value, so that the caller can stop between any two.
    pub fn estimated_values(&self) -> impl Iterator<Item = Option<Problem>> {
        let credential = move |credential: &Arc<Credential>| match credential.strength() {
            Strength::Strong(_) => None,
            Strength::Weak(why) => {
                let path = format!("credentials.{}.value", credential.name());
                Some(Problem::new(path, format!("the value is weak: {why}; {WEAK}"), ""))
            }
        };
        let token = move |(task, token): (&Arc<Task>, &Arc<TaskToken>)| match token.strength() {
            Strength::Strong(_) => None,
            Strength::Weak(why) => {
                let problem = format!("the token is weak: {why}; requests are not scanned for it");
                Some(Problem::new(format!("tasks.{}.{}", task.name, token.key()), problem, ""))
            }
        };
        let of_recipe = |credential: &Arc<Credential>| {
            let (name, recipe) = (credential.name().clone(), credential.recipe().cloned());
            let held: Vec<_> =
                recipe.iter().flat_map(|recipe| recipe.secrets()).map(|(key, held)| (key, held.clone())).collect();
            held.into_iter().map(move |(key, held)| match held.strength() {
                Strength::Strong(_) => None,
                Strength::Weak(why) => {
                    let problem = format!("the secret is weak: {why}; {WEAK}");
                    Some(Problem::new(format!("credentials.{name}.{key}"), problem, ""))
                }
            })
        };
        let tokens = self.tasks.values().flat_map(|task| task.tokens.iter().map(move |token| (task, token)));
        let recipes = self.credentials.iter().flat_map(of_recipe);
        self.credentials
            .iter()
            .filter(|one| one.recipe().is_none())
            .map(credential)
            .chain(recipes)
            .chain(tokens.map(token))
    }

    /// Takes over what has been built for an older policy, and builds anew what was in use there and has changed. So
    /// requests do not have to wait for it after a reload.
    pub fn prepare_from(&mut self, old: &Self) {
        if self.has_fixed_values_of(old) {
            self.fixed_log_values = old.fixed_log_values.clone();
            self.log_values = log_values(&self.fixed_log_values, &self.credentials);
        }
        let known: HashMap<&CredentialName, &Arc<Credential>> =
            old.credentials.iter().map(|credential| (credential.name(), credential)).collect();
        for credential in &self.credentials {
            if let Some(old) = known.get(credential.name()) {
                credential.reuse_strength(old);
            }
        }
        for task in self.tasks.values() {
            let Some(old) = old.tasks.get(&task.name) else { continue };
            for token in &task.tokens {
                old.tokens.iter().for_each(|old| token.reuse_strength(old));
            }
            if old.is_prepared() {
                task.prepare_from(old);
            }
        }
    }

    /// Returns the addresses of secret stores that are reached without TLS, and may serve anybody.
    #[must_use]
    pub fn local_stores(&self) -> &[SocketAddr] {
        &self.local_stores
    }

    /// Returns the credentials of all tasks.
    pub fn credentials(&self) -> impl Iterator<Item = &Arc<Credential>> {
        self.credentials.iter()
    }

    /// Returns the commands of the configuration, whether a task has their credential or not.
    #[must_use]
    pub fn commands(&self) -> &[Vec<String>] {
        &self.commands
    }

    /// Returns a minted credential.
    #[must_use]
    pub fn minted(&self, key: &MintKey) -> Option<&Arc<Credential>> {
        self.minted.get(key)
    }

    /// Returns the policy with another state of a minted credential. `None` if the policy no longer has this recipe.
    pub(super) fn with_minting(
        &self,
        key: &MintKey,
        used: &MintRecipe,
        change: impl FnOnce(&Minting) -> Option<Minting>,
    ) -> Option<Self> {
        let credential = self.minted(key)?;
        let minting = credential.minting.as_ref()?;
        if minting.fingerprint != used.fingerprint() {
            return None;
        }
        let new = Arc::new(credential.with_minting(change(minting)?));
        let new = HashMap::from([(Arc::as_ptr(credential), new)]);
        Some(self.with_credentials(&new))
    }

    /// Takes over the values that were minted under an older policy.
    pub(super) fn take_over_minted(&mut self, old: &Self) {
        let place = |credential: &Credential| (credential.name().clone(), credential.workspace().to_owned());
        let all: HashMap<_, &Arc<Credential>> = old.credentials.iter().map(|old| (place(old), old)).collect();
        for credential in &self.credentials {
            if let Some(old) = all.get(&place(credential)) {
                credential.take_over_former(old);
            }
        }
        let known: HashMap<MintKey, &Arc<Credential>> =
            old.credentials.iter().filter_map(|old| Some((old.mint_key()?, old))).collect();
        let taken_over = |credential: &Arc<Credential>| {
            let old = known.get(&credential.mint_key()?)?;
            // A value was checked for the form in which it is sent.
            let has_form = credential.has_form_of(old);
            let minting = old.minting.as_ref()?.taken_over_by(credential.minting.as_ref()?, has_form);
            Some((Arc::as_ptr(credential), Arc::new(credential.with_minting(minting))))
        };
        let new: HashMap<_, _> = self.credentials.iter().filter_map(taken_over).collect();
        if !new.is_empty() {
            *self = self.with_credentials(&new);
        }
    }

    /// Builds what was in use under the policy that this one differs from by a minted value. If many tasks have the
    /// credential, the others build it at their next request.
    pub(super) fn prepare_minted(&self, old: &Self) {
        self.log_values.prepare();
        let changed = self.tasks.values().filter_map(|task| Some((task, old.tasks.get(&task.name)?)));
        let changed = changed.filter(|(task, old)| !Arc::ptr_eq(task, old) && old.is_prepared());
        changed.take(MAX_PREPARED).for_each(|(task, old)| task.prepare_from(old));
    }

    /// Returns the policy with other credentials in place of some.
    fn with_credentials(&self, new: &HashMap<*const Credential, Arc<Credential>>) -> Self {
        let of = |old: &Arc<Credential>| new.get(&Arc::as_ptr(old)).unwrap_or(old).clone();
        let credentials: Vec<_> = self.credentials.iter().map(of).collect();
        // Tasks with the same credentials share them, and their matcher.
        let mut sets: HashMap<*const TaskCredentials, Arc<TaskCredentials>> = HashMap::new();
        let mut task = |task: &Arc<Task>| {
            if task.credentials.iter().all(|credential| !new.contains_key(&Arc::as_ptr(credential))) {
                return task.clone();
            }
            let set = sets.entry(Arc::as_ptr(&task.credentials));
            let set = set.or_insert_with(|| Arc::new(TaskCredentials::new(task.credentials.iter().map(of).collect())));
            Arc::new(Task { credentials: set.clone(), values: OnceLock::new(), ..(**task).clone() })
        };
        let tasks: HashMap<_, _> = self.tasks.iter().map(|(name, old)| (name.clone(), task(old))).collect();
        Self {
            generation: self.generation,
            rules_generation: self.rules_generation,
            network: self.network.clone(),
            leak: self.leak.clone(),
            hosts: self.hosts.clone(),
            upstream_proxies: self.upstream_proxies.clone(),
            tokens: self.tokens.clone(),
            log_values: log_values(&self.fixed_log_values, &credentials),
            fixed_log_values: self.fixed_log_values.clone(),
            tasks,
            minted: minted(&credentials),
            local_stores: self.local_stores.clone(),
            commands: self.commands.clone(),
            credentials,
        }
    }

    /// Returns true if both policies have the same credentials and tokens, except those that are minted.
    fn has_fixed_values_of(&self, old: &Self) -> bool {
        fn fixed(policy: &Policy) -> impl Iterator<Item = &Arc<Credential>> {
            policy.credentials.iter().filter(|credential| credential.recipe().is_none())
        }
        let tokens = |policy: &Self| policy.tokens.keys().copied().collect::<HashSet<_>>();
        fixed(self).count() == fixed(old).count()
            && fixed(self).zip(fixed(old)).all(|(one, other)| one.has_values_of(other))
            && tokens(self) == tokens(old)
    }

    /// Returns the networks that an allowed name may resolve to although they are not public. Denied ones are among them.
    pub(super) fn networks<'a>(&'a self, allowed: &'a MatchedRules) -> impl Iterator<Item = IpNet> + 'a {
        let of_all: &[IpNet] = if allowed.is_public_rule() { &[] } else { &self.network.allow };
        of_all.iter().chain(allowed.rules.iter().flat_map(|rule| &rule.allow_cidrs)).copied()
    }

    /// Checks an address for a destination that `allowed` permits.
    ///
    /// # Errors
    /// [`super::address::Denied`] with the block's name.
    pub fn check_address(&self, ip: IpAddr, allowed: &MatchedRules) -> Result<(), super::address::Denied> {
        let integrations: Vec<&[IpNet]> = allowed.rules.iter().map(|rule| rule.allow_cidrs.as_slice()).collect();
        let network: &[IpNet] = if allowed.is_public_rule() { &[] } else { &self.network.allow };
        super::address::check(ip, Cidrs { network, integrations: &integrations, deny: &self.network.deny })
    }
}

impl Task {
    /// Returns the task's name.
    #[must_use]
    pub fn name(&self) -> &TaskName {
        &self.name
    }

    /// Returns true if this is a static token of the task, compared in constant time.
    #[must_use]
    pub fn has_token(&self, token: TokenHash) -> bool {
        self.tokens.iter().any(|own| own.hash() == token)
    }

    /// Returns the limits for requests of one kind.
    #[must_use]
    pub fn limits(&self, kind: Kind) -> Limits {
        self.plan.limits(kind)
    }

    /// Returns the idle timeout of the task's client connections.
    #[must_use]
    pub fn idle(&self) -> Duration {
        self.plan.limits(Kind::Raw).timeouts.idle
    }

    /// Returns the tools that the task may call.
    #[must_use]
    pub fn tools(&self) -> &[Tool] {
        &self.tools
    }

    /// Whether the task may make raw requests.
    #[must_use]
    pub fn takes_raw(&self) -> bool {
        self.raw
    }

    /// Returns true if an integration names this host itself, so that its name comes from the policy.
    #[must_use]
    pub fn lists(&self, host: &Host) -> bool {
        let is_exact = |pattern: &HostPattern| matches!(pattern, HostPattern::Exactly(exact) if exact == host);
        self.integrations.iter().any(|rule| rule.allowed.iter().any(is_exact))
    }

    /// Returns whether tunnels to a host would be inspected, or would be if it were allowed.
    #[must_use]
    pub fn intercepts(&self, host: &Host) -> bool {
        let named = self.for_host(host);
        let rules = if named.is_empty() { &self.integrations } else { &named };
        rules.iter().any(|rule| rule.mode == Mode::Inspect)
    }

    /// Returns the approved hosts, for the response to a refused client.
    #[must_use]
    pub fn approved(&self) -> Vec<String> {
        let mut hosts: Vec<String> = self
            .integrations
            .iter()
            .flat_map(|rule| {
                let any = rule.any_public_host.then(|| "any public host".to_owned());
                rule.allowed.iter().map(ToString::to_string).chain(any)
            })
            .collect();
        hosts.sort();
        hosts.dedup();
        hosts
    }

    /// Returns the names of the task's integrations.
    #[must_use]
    pub fn integration_names(&self) -> Vec<String> {
        self.integrations.iter().map(|rule| rule.name.clone()).collect()
    }

    /// Returns the ports of its integrations that allow names, and not only addresses.
    pub fn ports_of_names(&self) -> impl Iterator<Item = u16> {
        let has_name =
            |rule: &&Arc<Integration>| rule.any_public_host || rule.allowed.iter().any(|pattern| !pattern.is_address());
        self.integrations.iter().filter(has_name).flat_map(|rule| rule.ports.iter().copied())
    }

    /// Returns the credentials that the task may use.
    #[must_use]
    pub fn credentials(&self) -> &TaskCredentials {
        &self.credentials
    }

    /// Returns the credentials, which tasks with the same ones share.
    #[must_use]
    pub fn shared_credentials(&self) -> &Arc<TaskCredentials> {
        &self.credentials
    }

    /// Returns the matcher for the values that must not leave in a request: the strong values of the task's
    /// credentials, and its tokens. Building it at the first use takes about a millisecond for each credential; see
    /// [`Self::is_prepared`].
    #[must_use]
    pub fn values(&self) -> &Arc<Matcher> {
        self.values.get_or_init(|| {
            let tokens: Vec<_> = self.tokens.iter().filter_map(|token| token.search_value()).collect();
            let matcher = if tokens.is_empty() {
                self.own().with_families(&self.families)
            } else {
                Matcher::new(strong_values(self.credentials.iter()).chain(tokens))
            };
            Arc::new(matcher.with_families(&self.families))
        })
    }

    /// Returns the matcher for the strong values of the task's own credentials, which must not come back.
    #[must_use]
    pub fn own(&self) -> &Arc<Matcher> {
        self.credentials.own()
    }

    /// Returns true if the matchers of the task have been built.
    #[must_use]
    pub fn is_prepared(&self) -> bool {
        self.values.get().is_some() && self.credentials.is_prepared()
    }

    /// Builds the matchers of the task.
    pub fn prepare(&self) {
        let _ = self.own();
        let _ = self.values();
        let _ = self.credentials.placeholders();
    }

    fn prepare_from(&self, old: &Self) {
        self.credentials.reuse_matcher(&old.credentials);
        let tokens = |task: &Self| task.tokens.iter().map(|token| token.hash()).collect::<HashSet<_>>();
        if tokens(self) == tokens(old)
            && *self.families == *old.families
            && self.credentials.has_values_of(&old.credentials)
        {
            self.values.get_or_init(|| old.values().clone());
        }
        self.prepare();
    }

    /// Whether the integration `webhook` is enabled, even if no URL is registered.
    #[must_use]
    pub fn takes_webhooks(&self) -> bool {
        self.webhooks.is_some()
    }

    /// Returns how long the approval of a command of the dangerous shell is valid. `None` if the task runs none.
    #[must_use]
    pub fn commands(&self) -> Option<Duration> {
        self.commands
    }

    /// Returns the registered webhook URLs, as destinations.
    pub fn webhooks(&self) -> impl Iterator<Item = &Target> {
        self.webhooks.iter().flatten()
    }

    /// Checks the kind of access, then host, scheme and port, in this order.
    ///
    /// # Errors
    /// [`Deny::RawNotAllowed`] or [`Deny::ToolNotEnabled`]; [`Deny::WebhookNotEnabled`] or
    /// [`Deny::WebhookNotRegistered`]; otherwise the refusal for the first of host, scheme and port that no
    /// integration allows together with those before it.
    pub fn destination(&self, target: &Target, asked: AccessKind) -> Result<MatchedRules, Deny> {
        if let AccessKind::Request(kind) = asked {
            self.admits(kind)?;
        }
        if self.denies(target.host()) {
            return Err(Deny::HostNotAllowed);
        }
        let allowed = match asked {
            AccessKind::Connect | AccessKind::Probe => self.by_integration(target)?,
            AccessKind::Request(kind) => {
                if target.scheme() == Scheme::Http && !kind.admits_plain_http() {
                    return Err(Deny::SchemeNotAllowed);
                }
                if kind == Kind::Tool(Tool::Webhook) { self.by_webhook(target)? } else { self.by_integration(target)? }
            }
        };
        // The content of an opaque tunnel cannot be distinguished from a raw request.
        if asked == AccessKind::Connect && allowed.mode() == Mode::Opaque {
            self.admits(Kind::Raw)?
        }
        Ok(allowed)
    }

    /// Checks whether the task may reach a host in any way.
    ///
    /// # Errors
    /// [`Deny::HostNotAllowed`].
    pub fn may_reach(&self, host: &Host) -> Result<(), Deny> {
        let is_hook = || self.webhooks().any(|hook| hook.host() == host);
        let is_observed = || self.observe && is_public_name(host);
        let may = !self.denies(host) && (!self.for_host(host).is_empty() || is_hook() || is_observed());
        if may { Ok(()) } else { Err(Deny::HostNotAllowed) }
    }

    fn admits(&self, kind: Kind) -> Result<(), Deny> {
        match kind {
            Kind::Raw if !self.raw => Err(Deny::RawNotAllowed),
            Kind::Tool(tool) if !self.tools.contains(&tool) => Err(Deny::ToolNotEnabled),
            _ => Ok(()),
        }
    }

    fn denies(&self, host: &Host) -> bool {
        self.denied.iter().any(|pattern| pattern.matches(host))
    }

    fn by_webhook(&self, target: &Target) -> Result<MatchedRules, Deny> {
        let registered = self.webhooks.as_ref().ok_or(Deny::WebhookNotEnabled)?;
        if !registered.contains(target) {
            return Err(Deny::WebhookNotRegistered);
        }
        if self.requires_credential_at(target.host()) {
            return Err(Deny::CredentialRequired);
        }
        Ok(MatchedRules { approval_rules: self.for_host(target.host()), ..MatchedRules::as_webhook() })
    }

    fn by_integration(&self, target: &Target) -> Result<MatchedRules, Deny> {
        let rules = self.for_host(target.host());
        let found = narrow(rules, Deny::HostNotAllowed, |_| true)
            .and_then(|rules| narrow(rules, Deny::SchemeNotAllowed, |rule| rule.admits_scheme(target.scheme())))
            .and_then(|rules| narrow(rules, Deny::PortNotAllowed, |rule| rule.ports.contains(&target.port())));
        match found {
            Ok(rules) => Ok(MatchedRules::by(rules)),
            Err(deny) if self.observes(target, deny) => Ok(MatchedRules::as_observed(deny)),
            Err(deny) => Err(deny),
        }
    }

    /// Judges a whole request by the task's rules, in the order in which real requests are judged.
    ///
    /// # Errors
    /// The errors of [`Self::destination`] and [`Self::request`]; [`Deny::MethodNotAllowed`] also for a method that the tool does
    /// not send.
    pub fn judge(&self, target: &Target, kind: Kind, method: &Method, path: &str) -> Result<MatchedRequest, Deny> {
        let to = self.destination(target, AccessKind::Request(kind))?;
        if kind.tool().is_some_and(|tool| !tool.admits_method(method)) {
            return Err(Deny::MethodNotAllowed);
        }
        self.request(target, &to, method, path)
    }

    /// Checks the method and path of a request to an allowed destination.
    ///
    /// # Errors
    /// [`Deny::MethodNotAllowed`] or [`Deny::PathNotAllowed`].
    pub fn request(
        &self,
        target: &Target,
        to: &MatchedRules,
        method: &Method,
        path: &str,
    ) -> Result<MatchedRequest, Deny> {
        if matches!(*method, Method::CONNECT | Method::TRACE) {
            return Err(Deny::MethodNotAllowed);
        }
        if to.observed.is_some() || to.webhook {
            return Ok(MatchedRequest { allowed: to.clone(), path: None, is_restricted: false });
        }
        let canonical = path::canonical(path).ok();
        // Servers differ in whether parameters (RFC 3986 §3.3) belong to a segment, and many routes ignore them.
        let is_ambiguous = canonical.as_ref().is_none_or(|path| path.contains(';'));
        if is_ambiguous && to.refuses_ambiguous_paths() {
            // It could be a path that requires a certain credential or an approval.
            return Err(Deny::PathNotAllowed);
        }
        let found = narrow(to.rules.clone(), Deny::MethodNotAllowed, |rule| rule.admits_method(method))
            .and_then(|rules| narrow(rules, Deny::PathNotAllowed, |rule| rule.admits_path(canonical.as_deref())));
        match found {
            Ok(rules) => {
                let judged = rules.iter().all(|rule| rule.paths.is_some());
                let path = canonical.filter(|_| judged).filter(|c| *c != path).map(Cow::into_owned);
                let stricter = |rule: &Arc<Integration>| rule.has_conditions() && rule.restricts();
                let is_restricted = rules.iter().all(|rule| rule.restricts()) || to.rules.iter().any(stricter);
                Ok(MatchedRequest { allowed: MatchedRules::by(rules), path, is_restricted })
            }
            Err(deny) if self.observes(target, deny) => {
                Ok(MatchedRequest { allowed: MatchedRules::as_observed(deny), path: None, is_restricted: false })
            }
            Err(deny) => Err(deny),
        }
    }

    /// Returns the integrations that match the host. `any_public_host` only applies if no other integration names it.
    pub(super) fn for_host(&self, host: &Host) -> Vec<Arc<Integration>> {
        let by = |wanted: fn(&Integration, &Host) -> bool| {
            self.integrations.iter().filter(|rule| wanted(rule, host)).cloned().collect::<Vec<_>>()
        };
        let named = by(Integration::names);
        if named.is_empty() { by(Integration::admits_as_public) } else { named }
    }

    fn requires_credential_at(&self, host: &Host) -> bool {
        self.integrations.iter().any(|rule| rule.require_credential.is_some() && rule.names(host))
    }

    fn observes(&self, target: &Target, deny: Deny) -> bool {
        let about =
            matches!(deny, Deny::HostNotAllowed | Deny::PortNotAllowed | Deny::MethodNotAllowed | Deny::PathNotAllowed);
        let denied = |rule: &Arc<Integration>| rule.denied.iter().any(|pattern| pattern.matches(target.host()));
        let public = target.scheme() == Scheme::Https && is_public_name(target.host());
        // `observe` does not override a required credential or approval.
        let required = self.for_host(target.host()).iter().any(|rule| rule.has_conditions());
        self.observe && about && public && !required && !self.integrations.iter().any(denied)
    }
}

impl Integration {
    /// Whether an allowed request also needs a certain credential or an approval.
    pub(super) fn has_conditions(&self) -> bool {
        self.require_credential.is_some() || self.approval.is_some()
    }

    /// Whether the decision depends on the method or path.
    fn restricts(&self) -> bool {
        let asks_by_method = self.approval.as_ref().is_some_and(|approval| !approval.methods().is_empty());
        self.methods.is_some() || self.paths.is_some() || asks_by_method
    }

    fn names(&self, host: &Host) -> bool {
        self.allowed.iter().any(|pattern| pattern.matches(host))
    }

    fn admits_as_public(&self, host: &Host) -> bool {
        self.any_public_host && is_public_name(host) && !self.denied.iter().any(|pattern| pattern.matches(host))
    }

    pub(super) fn admits_scheme(&self, scheme: Scheme) -> bool {
        scheme == Scheme::Https || self.plain_http
    }

    pub(super) fn admits_method(&self, method: &Method) -> bool {
        self.methods.as_ref().is_none_or(|methods| methods.contains(method))
    }

    pub(super) fn admits_path(&self, canonical: Option<&str>) -> bool {
        match (&self.paths, canonical) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(paths), Some(path)) => paths.iter().any(|pattern| pattern.matches(path)),
        }
    }
}

impl MatchedRules {
    /// Returns the mode. It is opaque only if all integrations are opaque.
    #[must_use]
    pub fn mode(&self) -> Mode {
        let opaque = !self.rules.is_empty() && self.rules.iter().all(|rule| rule.mode == Mode::Opaque);
        if opaque { Mode::Opaque } else { Mode::Inspect }
    }

    /// Returns the handling of ECH. It is allowed only if all integrations allow it.
    #[must_use]
    pub fn ech(&self) -> Ech {
        if self.rules.iter().all(|rule| rule.ech == Ech::Allow) { Ech::Allow } else { Ech::Deny }
    }

    /// Whether the trace context of a request is forwarded. It is only if all integrations say so.
    #[must_use]
    pub fn forwards_trace_context(&self) -> bool {
        !self.rules.is_empty() && self.rules.iter().all(|rule| rule.trace_context)
    }

    /// Returns the refusal that `observe` overrode.
    #[must_use]
    pub fn observed(&self) -> Option<Deny> {
        self.observed
    }

    /// Returns the rule's name for the audit record: the integrations, or the refusal that `observe` overrode.
    #[must_use]
    pub fn rule(&self) -> String {
        match self.observed {
            Some(deny) => format!("observe:{}", crate::model::refusal::Refusal::from(deny).code()),
            None if self.webhook => super::webhook::NAME.to_owned(),
            None => self.rules.iter().map(|rule| rule.name.as_str()).collect::<Vec<_>>().join("+"),
        }
    }

    /// Whether paths that can be read in different ways are refused, because an integration has a condition for some paths.
    pub(super) fn refuses_ambiguous_paths(&self) -> bool {
        self.rules.iter().any(|rule| rule.paths.is_some() && rule.has_conditions())
    }

    /// Returns the integrations.
    pub(super) fn rules(&self) -> &[Arc<Integration>] {
        &self.rules
    }

    /// Returns the integrations that name the host of a webhook.
    pub(super) fn approval_rules(&self) -> &[Arc<Integration>] {
        &self.approval_rules
    }

    /// Creates the rules that allow a registered webhook URL.
    #[must_use]
    pub fn as_webhook() -> Self {
        Self { webhook: true, ..Self::by(Vec::new()) }
    }

    /// Returns true if the integration is one of these.
    pub(super) fn contains(&self, rule: &Arc<Integration>) -> bool {
        self.rules.iter().any(|own| Arc::ptr_eq(own, rule))
    }

    fn by(rules: Vec<Arc<Integration>>) -> Self {
        Self { rules, observed: None, webhook: false, approval_rules: Vec::new() }
    }

    fn as_observed(deny: Deny) -> Self {
        Self { observed: Some(deny), ..Self::by(Vec::new()) }
    }

    /// Returns how long an approval of such a request is valid, if any of the integrations requires one.
    #[must_use]
    pub fn approval(&self, method: &Method, kind: Kind) -> Option<Duration> {
        let asked = self.rules.iter().chain(&self.approval_rules).filter_map(|rule| rule.approval.as_ref());
        asked.filter_map(|approval| approval.expiry_for(method, kind)).min()
    }

    /// Returns the credentials that any of the integrations requires.
    pub fn required(&self) -> impl Iterator<Item = &CredentialName> {
        self.rules.iter().filter_map(|rule| rule.require_credential.as_ref())
    }

    /// Whether a credential may be sent to a destination that these rules allow. The scheme must be https, the
    /// credential must be bound to the host and port, and an integration must name the host.
    #[must_use]
    pub fn may_receive(&self, credential: &Credential, target: &Target) -> bool {
        !self.rules.is_empty() && !self.is_public_rule() && credential.is_bound_to(target)
    }

    /// Whether the destination is allowed only as part of the public internet. `[network].allow_cidrs` does not apply
    /// then.
    fn is_public_rule(&self) -> bool {
        self.observed.is_some() || self.rules.iter().any(|rule| rule.any_public_host)
    }
}

fn narrow(
    rules: Vec<Arc<Integration>>,
    otherwise: Deny,
    keep: impl Fn(&Integration) -> bool,
) -> Result<Vec<Arc<Integration>>, Deny> {
    let kept: Vec<_> = rules.into_iter().filter(|rule| keep(rule)).collect();
    if kept.is_empty() { Err(otherwise) } else { Ok(kept) }
}

/// Returns true for a name that `any_public_host` may match: not an address, not a single label, and not
/// below a name that resolves to this machine or network (RFC 6761, 6762, 8375, 9476).
fn is_public_name(host: &Host) -> bool {
    host.name()
        .is_some_and(|name| name.as_str().contains('.') && !NOT_PUBLIC.iter().any(|base| name.is_at_or_below(base)))
}

pub(super) const NOT_PUBLIC: [&str; 10] = [
    "localhost",
    "local",
    "internal",
    "home.arpa",
    "alt",
    "onion",
    // Metadata services under public names.
    "metadata.platformequinix.com",
    "metadata.packet.net",
    "metadata.tencentyun.com",
    "metadata.goog",
];

#[cfg(test)]
mod tests {
    use super::super::compile::tests::policy;
    use super::*;

    const RAW: AccessKind = AccessKind::Request(Kind::Raw);

    fn target(url: &str) -> Target {
        Target::absolute(&url.parse().unwrap()).unwrap()
    }

    fn verdict(policy: &Policy, url: &str, method: &Method) -> Result<String, Deny> {
        let uri: http::Uri = url.parse().unwrap();
        let target = Target::absolute(&uri).unwrap();
        let task = policy.task(&TaskName::new("t")).unwrap();
        let allowed = task.destination(&target, RAW)?;
        task.request(&target, &allowed, method, uri.path()).map(|r| r.allowed.rule())
    }

    #[test]
    fn one_integration_must_allow_everything_together() {
        let policy = policy(
            r#"
            [integrations.read]
            allowed_domains = ["api.example.com"]
            methods = ["GET"]
            [integrations.hooks]
            allowed_domains = ["api.example.com", "hooks.example.com"]
            methods = ["POST"]
            paths = ["/hooks/*"]
            [integrations.odd]
            allowed_domains = ["api.example.com"]
            ports = [8443]
            plain_http = true
            [tasks.t]
            integrations = ["read", "hooks", "odd"]
            "#,
        );
        let rows = [
            ("https://api.example.com/x", Method::GET, Ok("read")),
            ("https://api.example.com/hooks/1", Method::POST, Ok("hooks")),
            ("https://api.example.com/x", Method::POST, Err(Deny::PathNotAllowed)),
            ("https://api.example.com/x", Method::DELETE, Err(Deny::MethodNotAllowed)),
            ("https://hooks.example.com/hooks/1", Method::GET, Err(Deny::MethodNotAllowed)),
            ("https://api.example.com:8443/x", Method::DELETE, Ok("odd")),
            ("https://api.example.com:9000/x", Method::GET, Err(Deny::PortNotAllowed)),
            ("http://api.example.com:8443/x", Method::GET, Ok("odd")),
            ("http://hooks.example.com/hooks/1", Method::POST, Err(Deny::SchemeNotAllowed)),
            ("http://api.example.com/x", Method::GET, Err(Deny::PortNotAllowed)),
            ("https://other.example.com/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://example.com/", Method::GET, Err(Deny::HostNotAllowed)),
        ];
        for (url, method, want) in rows {
            assert_eq!(verdict(&policy, url, &method).as_deref(), want.as_ref().map(|s| *s), "{method} {url}");
        }
    }

    #[test]
    fn inspect_wins_and_ech_must_be_allowed_by_all() {
        let policy = policy(
            r#"
            [integrations.a]
            allowed_domains = ["a.example.com", "b.example.com"]
            mode = "opaque"
            ech = "allow"
            [integrations.b]
            allowed_domains = ["b.example.com"]
            [tasks.t]
            integrations = ["a", "b"]
            "#,
        );
        let task = policy.task(&TaskName::new("t")).unwrap();
        let a = task.destination(&target("https://a.example.com/"), RAW).unwrap();
        let b = task.destination(&target("https://b.example.com/"), RAW).unwrap();
        assert_eq!((a.mode(), a.ech()), (Mode::Opaque, Ech::Allow));
        assert_eq!((b.mode(), b.ech()), (Mode::Inspect, Ech::Deny));
    }

    #[test]
    fn any_public_host_admits_only_public_looking_names_that_no_other_names() {
        let policy = policy(
            r#"
            [network]
            allow_cidrs = ["10.0.0.0/8"]
            [integrations.web]
            any_public_host = true
            denied_domains = ["*.pastebin.example", "pastebin.example"]
            [integrations.named]
            allowed_domains = ["api.example.com"]
            methods = ["GET"]
            [tasks.t]
            integrations = ["web", "named"]
            "#,
        );
        let rows = [
            ("https://news.example.org/", Method::POST, Ok("web")),
            ("https://api.example.com/", Method::GET, Ok("named")),
            ("https://api.example.com/", Method::POST, Err(Deny::MethodNotAllowed)),
            ("https://x.pastebin.example/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://pastebin.example/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://8.8.8.8/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://[2606:4700::1111]/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://intranet/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://localhost/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://x.localhost/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://printer.local/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://metadata.google.internal/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://nas.home.arpa/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://metadata.packet.net/", Method::GET, Err(Deny::HostNotAllowed)),
            ("http://news.example.org/", Method::GET, Err(Deny::SchemeNotAllowed)),
            ("https://news.example.org:8443/", Method::GET, Err(Deny::PortNotAllowed)),
        ];
        for (url, method, want) in rows {
            assert_eq!(verdict(&policy, url, &method).as_deref(), want.as_ref().map(|s| *s), "{method} {url}");
        }
        let task = policy.task(&TaskName::new("t")).unwrap();
        let ten = "10.0.0.1".parse().unwrap();
        let web = task.destination(&target("https://news.example.org/"), RAW).unwrap();
        let named = task.destination(&target("https://api.example.com/"), RAW).unwrap();
        assert!(policy.check_address(ten, &web).is_err(), "[network].allow_cidrs is not for the public rule");
        assert!(policy.check_address(ten, &named).is_ok());
    }

    #[test]
    fn observe_lets_public_destinations_through_and_nothing_else() {
        let policy = policy(
            r#"
            [network]
            allow_cidrs = ["10.0.0.0/8"]
            [integrations.named]
            allowed_domains = ["api.example.com"]
            methods = ["GET"]
            paths = ["/v1/*"]
            [tasks.t]
            integrations = ["named"]
            observe = true
            "#,
        );
        let rows = [
            ("https://api.example.com/v1/x", Method::GET, Ok("named")),
            ("https://api.example.com/v1/x", Method::POST, Ok("observe:method_not_allowed")),
            ("https://api.example.com/v2", Method::GET, Ok("observe:path_not_allowed")),
            ("https://api.example.com:8443/", Method::GET, Ok("observe:port_not_allowed")),
            ("https://other.example.com/", Method::GET, Ok("observe:host_not_allowed")),
            ("http://other.example.com/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://localhost/", Method::GET, Err(Deny::HostNotAllowed)),
            ("https://10.0.0.1/", Method::GET, Err(Deny::HostNotAllowed)),
        ];
        for (url, method, want) in rows {
            assert_eq!(verdict(&policy, url, &method).as_deref(), want.as_ref().map(|s| *s), "{method} {url}");
        }
        let task = policy.task(&TaskName::new("t")).unwrap();
        let seen = task.destination(&target("https://other.example.com/"), RAW).unwrap();
        assert!(policy.check_address("10.0.0.1".parse().unwrap(), &seen).is_err());
    }

    #[test]
    fn a_host_that_is_denied_to_the_task_is_allowed_by_nothing() {
        let policy = policy(
            r#"
            [integrations.named]
            allowed_domains = ["*.example.com", "api.example.org"]
            [integrations.web]
            any_public_host = true
            [tasks.t]
            integrations = ["named", "web"]
            denied_domains = ["*.t.example.com", "api.example.org", "*.ads.test"]
            observe = true
            "#,
        );
        for (url, denied) in [
            ("https://a.example.com/", false),
            ("https://a.t.example.com/", true),
            ("https://b.a.t.example.com/", true),
            ("https://t.example.com/", false),
            ("https://api.example.org/", true),
            ("https://api.example.org:8443/", true),
            ("http://api.example.org/", true),
            ("https://www.example.org/", false),
            ("https://x.ads.test/", true),
        ] {
            let got = verdict(&policy, url, &Method::GET);
            assert_eq!(got == Err(Deny::HostNotAllowed), denied, "{url}: {got:?}");
        }
        let task = policy.task(&TaskName::new("t")).unwrap();
        let denied = task.destination(&target("https://x.ads.test/"), AccessKind::Connect).err();
        assert_eq!(denied, Some(Deny::HostNotAllowed));
    }

    /// Returns how long an approval of a request is valid, in seconds, if it needs one.
    fn approval(policy: &Policy, url: &str, method: &str, kind: Kind) -> Result<Option<u64>, Deny> {
        let uri: http::Uri = url.parse().unwrap();
        let (target, method) = (target(url), Method::from_bytes(method.as_bytes()).unwrap());
        let task = policy.task(&TaskName::new("t")).unwrap();
        let allowed = task.destination(&target, AccessKind::Request(kind))?;
        let judged = task.request(&target, &allowed, &method, uri.path())?;
        Ok(judged.allowed.approval(&method, kind).map(|expires| expires.as_secs()))
    }

    #[test]
    fn approval_is_needed_if_any_integration_that_allows_the_request_requires_it() {
        let policy = policy(
            r#"
            [integrations.all]
            allowed_domains = ["all.example.com", "both.example.com"]
            approval = "required"
            [integrations.some]
            allowed_domains = ["some.example.com", "both.example.com", "hooks.example.com"]
            approval = { methods = ["POST"], tools = ["api_call", "webhook"], expires = "30s" }
            [integrations.posts]
            allowed_domains = ["posts.example.com", "open.example.com"]
            methods = ["POST"]
            approval = { methods = ["POST"] }
            [integrations.calls]
            allowed_domains = ["calls.example.com"]
            approval = { tools = ["http_get"] }
            [integrations.open]
            allowed_domains = ["open.example.com"]
            [integrations.web]
            any_public_host = true
            approval = { expires = "24h" }
            [tasks.t]
            integrations = ["all", "some", "posts", "calls", "open", "web", "webhook"]
            tools = ["api_call", "http_get", "webhook"]
            webhook_urls = ["https://hooks.example.com/x", "https://open.example.com/x", "https://web.example.com/x"]
            raw = true
            "#,
        );
        let (raw, api, get, webhook) =
            (Kind::Raw, Kind::Tool(Tool::ApiCall), Kind::Tool(Tool::HttpGet), Kind::Tool(Tool::Webhook));
        let rows = [
            ("all", "GET", raw, Some(600)),
            ("all", "POST", api, Some(600)),
            ("some", "POST", raw, None),
            ("some", "GET", api, None),
            ("some", "POST", api, Some(30)),
            // Some origins treat methods as case-insensitive.
            ("some", "post", api, Some(30)),
            // The shortest expiry applies.
            ("both", "POST", api, Some(30)),
            ("both", "GET", api, Some(600)),
            ("posts", "POST", raw, Some(600)),
            ("posts", "POST", api, Some(600)),
            ("calls", "GET", raw, None),
            ("calls", "GET", get, Some(600)),
            ("open", "GET", raw, None),
            ("open", "POST", raw, Some(600)),
            ("web", "GET", raw, Some(86_400)),
            // Webhooks need the approvals of the integrations that match their host.
            ("hooks", "POST", webhook, Some(30)),
            ("open", "POST", webhook, Some(600)),
            ("web", "POST", webhook, Some(86_400)),
        ];
        for (host, method, kind, want) in rows {
            let url = format!("https://{host}.example.com/x");
            assert_eq!(approval(&policy, &url, method, kind), Ok(want), "{host} {method} {kind:?}");
        }
    }

    /// Neither `observe` nor a non-canonical path bypasses an approval.
    #[test]
    fn approval_cannot_be_bypassed() {
        let policy = policy(
            r#"
            [integrations.asked]
            allowed_domains = ["a.example.com"]
            methods = ["GET"]
            paths = ["/admin/*"]
            approval = "required"
            [integrations.open]
            allowed_domains = ["a.example.com"]
            methods = ["GET"]
            [integrations.web]
            any_public_host = true
            methods = ["GET"]
            approval = "required"
            [tasks.t]
            integrations = ["asked", "open", "web"]
            observe = true
            "#,
        );
        let rows = [
            ("https://a.example.com/admin/x", "GET", Ok(Some(600))),
            ("https://a.example.com/%61dmin/x", "GET", Ok(Some(600))),
            ("https://a.example.com/other", "GET", Ok(None)),
            ("https://a.example.com/other/%2e%2e/admin/x", "GET", Err(Deny::PathNotAllowed)),
            ("https://a.example.com/x%2f..%2fadmin/x", "GET", Err(Deny::PathNotAllowed)),
            ("https://a.example.com/admin;a=1/x", "GET", Err(Deny::PathNotAllowed)),
            ("https://a.example.com/other;a=1", "GET", Err(Deny::PathNotAllowed)),
            ("https://a.example.com/admin/x", "POST", Err(Deny::MethodNotAllowed)),
            ("https://a.example.com:8443/admin/x", "GET", Err(Deny::PortNotAllowed)),
            ("https://web.example.org/", "POST", Err(Deny::MethodNotAllowed)),
        ];
        for (url, method, want) in rows {
            assert_eq!(approval(&policy, url, method, Kind::Raw), want, "{method} {url}");
        }
    }

    /// Credentials are not sent to hosts that no integration names.
    #[test]
    fn public_hosts_receive_no_credentials() {
        let policy = policy(
            r#"
            [integrations.web]
            any_public_host = true
            [integrations.named]
            allowed_domains = ["api.example.com"]
            [credentials.K]
            auth_type = "bearer"
            value = "env:K"
            domains = ["api.example.com", "news.example.org"]
            inject = "always"
            [tasks.t]
            integrations = ["web", "named"]
            credentials = ["K"]
            [tasks.o]
            credentials = ["K"]
            observe = true
            "#,
        );
        let rows = [
            ("t", "https://api.example.com/", true),
            ("t", "https://news.example.org/", false),
            ("o", "https://news.example.org/", false),
        ];
        for (task, url, want) in rows {
            let (task, target) = (policy.task(&TaskName::new(task)).unwrap(), target(url));
            let allowed = task.destination(&target, RAW).unwrap();
            assert_eq!(allowed.may_receive(&task.credentials()[0], &target), want, "{url}");
        }
    }

    #[test]
    fn the_canonical_path_is_forwarded_where_the_path_was_checked() {
        let policy = policy(
            r#"
            [integrations.paths]
            allowed_domains = ["p.example.com", "q.example.com"]
            paths = ["/~user/*"]
            [integrations.free]
            allowed_domains = ["q.example.com"]
            [tasks.t]
            integrations = ["paths", "free"]
            "#,
        );
        let task = policy.task(&TaskName::new("t")).unwrap();
        let forwarded = |url: &str, path: &str| {
            let target = target(url);
            let allowed = task.destination(&target, RAW).unwrap();
            task.request(&target, &allowed, &Method::GET, path).map(|r| r.path)
        };
        assert_eq!(forwarded("https://p.example.com/", "/%7euser/a"), Ok(Some("/~user/a".to_owned())));
        assert_eq!(forwarded("https://p.example.com/", "/~user/%2e%2e/x"), Err(Deny::PathNotAllowed));
        assert_eq!(forwarded("https://q.example.com/", "/%7euser/a"), Ok(None), "as sent");
        assert_eq!(forwarded("https://q.example.com/", "/a/../b"), Ok(None), "as sent");
    }
}

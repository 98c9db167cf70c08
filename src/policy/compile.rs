//! Compiles the parsed configuration file into settings and a policy, and reports all problems at once.
//! No default allows anything.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::net::{IpAddr, SocketAddr};
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};

use ipnet::IpNet;

use super::address;
use super::credential::Credential;
use super::credential_file;
use super::credential_file::RawCredential;
use super::file::{self, File, RawIntegration, RawTask};
use super::lines;
use super::listeners;
use super::plan::Plan;
use super::reader::{Findings, MAX_DISTANCE, UNKNOWN_KEY};
pub use super::reader::{Problem, duration};
use super::rule::{Integration, Mode, Network, Policy, Task, fixed_log_values, local_stores, log_values, minted};
use super::secret_store_file::SecretStores;
use super::settings::{DnsServer, LedgerAt, ListenAt, Settings, Source, TokenSource, Vault};
use super::source::{CompileContext, read_source};
use super::task_credentials::TaskCredentials;
use super::task_token::TaskToken;
use super::upstream_proxy::{ProxyOverride, UpstreamProxies};
use super::upstream_proxy_file::{RawNoProxy, RawUpstreamProxy};
use super::webhook;
use crate::leak::families::Families;
use crate::model::host::{Host, HostName};
use crate::model::name::{CredentialName, TaskName, is_plain};
use crate::model::secret::{Secret, TokenHash};
use crate::model::tool::Tool;

/// A valid configuration.
pub struct Config {
    /// The settings, read once at start.
    pub settings: Settings,
    /// The policy, in force until the next reload.
    pub policy: Policy,
    /// Warnings about keys that are valid but possibly unintended.
    pub warnings: Vec<Problem>,
}

/// Compiles a configuration file's text.
///
/// # Errors
/// All problems found, at least one.
pub fn compile(text: &str, context: &CompileContext<'_>) -> Result<Config, Vec<Problem>> {
    let findings = Findings::default();
    let compiled =
        file::read(text, context.base, context.state_dir, &findings).map(|file| assemble(file, context, &findings));
    let (mut problems, mut warnings) = (findings.problems.into_inner(), findings.warnings.into_inner());
    match compiled {
        Some((settings, policy)) if problems.is_empty() => {
            lines::locate(text, &mut warnings);
            Ok(Config { settings, policy, warnings })
        }
        _ => {
            lines::locate(text, &mut problems);
            Err(problems)
        }
    }
}

/// Returns the vault settings of a configuration, ignoring problems in other sections.
///
/// # Errors
/// The problems of `state_dir` and `[vault]`, or the position of a TOML syntax error.
pub fn vault_place(text: &str, base: &Path, state_dir: &Path) -> Result<Vault, Vec<Problem>> {
    settings_of("vault", text, base, state_dir).map(|settings| settings.vault)
}

/// The address of a daemon's admin listener and the sources of its tokens.
pub struct AdminAddress {
    /// The listen address. `None` if there is no admin listener.
    pub listen: Option<ListenAt>,
    /// The sources of the tokens. Empty if the token is in the state directory.
    pub tokens: Vec<TokenSource>,
    /// The directory of the token that the daemon generated.
    pub state_dir: PathBuf,
}

/// Returns the admin listener's address of a configuration, ignoring problems in other sections.
///
/// # Errors
/// The problems of `state_dir` and `[admin]`, or the position of a TOML syntax error.
pub fn admin_place(text: &str, base: &Path, state_dir: &Path) -> Result<AdminAddress, Vec<Problem>> {
    let Settings { state_dir, admin, .. } = settings_of("admin", text, base, state_dir)?;
    Ok(AdminAddress { listen: admin.listen, tokens: admin.tokens, state_dir })
}

/// Returns settings of which only one section and `state_dir` are valid.
fn settings_of(section: &str, text: &str, base: &Path, state_dir: &Path) -> Result<Settings, Vec<Problem>> {
    let findings = Findings::default();
    let file = file::read(text, base, state_dir, &findings);
    let mut problems = findings.problems.into_inner();
    match file {
        None => Err(problems),
        Some(file) => {
            // An unknown top-level key may be one of these, misspelt.
            let misspelt = |problem: &Problem| !problem.path.contains('.') && problem.problem == UNKNOWN_KEY;
            let ours = |problem: &Problem| problem.path == "state_dir" || problem.path.starts_with(section);
            problems.retain(|problem| ours(problem) || misspelt(problem));
            lines::locate(text, &mut problems);
            if problems.is_empty() { Ok(file.settings) } else { Err(problems) }
        }
    }
}

fn assemble(file: File, context: &CompileContext<'_>, findings: &Findings) -> (Settings, Policy) {
    let proxy = |raw: RawUpstreamProxy| raw.compile(context, &file.settings.vault, findings);
    let integrations: HashMap<String, Arc<Integration>> = file
        .integrations
        .into_iter()
        .map(|(name, raw)| (name.clone(), Arc::new(integration(name, raw, &proxy, findings))))
        .collect();
    let default_proxy = file.upstream_proxy.and_then(proxy);
    file.credentials.values().for_each(|raw| raw.check(findings));
    for (name, raw) in &file.credentials {
        for (i, other) in raw.with().iter().enumerate().filter(|(_, other)| !file.credentials.contains_key(*other)) {
            let known = known_names(file.credentials.keys(), "credentials", other);
            findings.problem(format!("credentials.{name}.with[{i}]"), format!("no credential named {other:?}"), known);
        }
    }
    for (name, integration) in &integrations {
        let required = integration.require_credential.as_ref();
        if let Some(required) = required.filter(|required| !file.credentials.contains_key(required.as_str())) {
            let path = format!("integrations.{name}.require_credential");
            let known = known_names(file.credentials.keys(), "credentials", required.as_str());
            findings.problem(path, format!("no credential named {:?}", required.as_str()), known);
        }
    }
    let stores = file.secret_stores.compile(context, findings);
    let commands = file.credentials.values().flat_map(RawCredential::commands).map(<[String]>::to_vec).collect();
    let mut known = References {
        stores: &stores,
        integrations: &integrations,
        plans: &file.plans,
        raw: &file.credentials,
        settings: &file.settings,
        compiled: HashMap::new(),
        sets: HashMap::new(),
    };
    let families = Arc::new(Families::of(file.leak.families().iter().copied()));
    let tasks: Vec<Arc<Task>> = file
        .tasks
        .into_iter()
        .map(|(name, raw)| Arc::new(task(&name, raw, &mut known, (context, &families), findings)))
        .collect();
    let mut credentials: Vec<Arc<Credential>> = known.compiled.into_values().flatten().collect();
    credentials.sort_by(|a, b| a.name.cmp(&b.name));
    let mut tokens = HashMap::new();
    for task in &tasks {
        for token in &task.tokens {
            if let Some(other) = tokens.insert(token.hash(), task.name.clone()) {
                findings.problem(
                    format!("tasks.{}.{}", task.name, token.key()),
                    format!("the token is the same as that of tasks.{other}"),
                    "a different token",
                );
            }
        }
    }
    warn_of_wide_networks("network.allow_cidrs", &file.allow_cidrs, findings);
    let fixed_log_values = fixed_log_values(&credentials, tasks.iter());
    let upstream_proxies = upstream_proxies((default_proxy, file.no_proxy), &integrations);
    let policy = Policy {
        generation: 0,
        rules_generation: 0,
        hosts: hosts(file.hosts, findings),
        leak: file.leak,
        upstream_proxies,
        network: Network { allow: file.allow_cidrs, deny: file.deny_cidrs },
        log_values: log_values(&fixed_log_values, &credentials),
        fixed_log_values,
        minted: minted(&credentials),
        local_stores: local_stores(&credentials),
        commands,
        credentials,
        tasks: tasks.into_iter().map(|task| (task.name.clone(), task)).collect(),
        tokens,
    };
    check_references(&file.settings, &policy, context, findings);
    if file.settings.proxy.listeners.is_empty() {
        findings.problem("proxy.listen", "no address to listen on", "[\"127.0.0.1:3128\"]");
    }
    (file.settings, policy)
}

/// Collects the upstream proxies.
fn upstream_proxies(
    (default, no_proxy): (Option<ProxyOverride>, RawNoProxy),
    integrations: &HashMap<String, Arc<Integration>>,
) -> UpstreamProxies {
    let proxy = |one: &ProxyOverride| match one {
        ProxyOverride::Direct => None,
        ProxyOverride::Proxy(proxy) => Some(proxy.clone()),
    };
    let default = default.as_ref().and_then(proxy);
    let others = integrations.values().filter_map(|integration| proxy(integration.upstream.as_ref()?));
    let all = default.iter().cloned().chain(others).collect();
    UpstreamProxies { default, no_proxy: no_proxy.all, local: no_proxy.local, all }
}

/// Indexes `[dns].hosts` by name in normal form.
fn hosts(raw: Vec<(String, Vec<IpAddr>)>, findings: &Findings) -> HashMap<HostName, Vec<IpAddr>> {
    let read = |(name, addresses): (String, Vec<IpAddr>)| {
        let path = format!("dns.hosts.{name:?}");
        match Host::parse(&name) {
            Ok(Host::Name(parsed)) if parsed.as_str() == name => return Some((parsed, addresses)),
            Ok(Host::Name(parsed)) => {
                findings.problem(path, "not in normal form", format!("{:?}", parsed.as_str()));
            }
            _ => findings.problem(path, "not a host name", "a name such as \"api.test\""),
        }
        None
    };
    raw.into_iter().filter_map(read).collect()
}

/// Checks that the listeners for operators have addresses of their own.
fn check_own_listeners(settings: &Settings, findings: &Findings) {
    let is_fixed = |at: &&ListenAt| at.tcp().is_none_or(|address| address.port() != 0);
    let admin = settings.admin.listen.as_ref().filter(is_fixed);
    let metrics = settings.metrics.listen.as_ref().filter(is_fixed);
    let used = |at: &ListenAt| (format!("{at} is used by another listener"), "each address at most once");
    for at in admin.into_iter().chain(metrics) {
        if let Some(listener) = settings.proxy.listeners.iter().find(|listener| listener.at == *at) {
            let (problem, expected) = used(at);
            findings.problem(&listener.key, problem, expected);
        }
    }
    if let Some(at) = metrics.filter(|at| admin == Some(*at)) {
        let (problem, expected) = used(at);
        findings.problem("metrics.listen", problem, expected);
    }
}

/// Checks that everything the settings refer to exists. Otherwise the daemon would only fail at its start.
fn check_references(settings: &Settings, policy: &Policy, context: &CompileContext<'_>, findings: &Findings) {
    let named =
        [("extra_roots", &settings.upstream.extra_roots, "a PEM file"), ("crls", &settings.upstream.crls, "a CRL")];
    for (key, files, wanted) in named {
        for (i, file) in files.iter().enumerate() {
            if let Err(error) = std::fs::File::open(file) {
                let problem = format!("{} cannot be read: {error}", file.display());
                findings.unavailable(context, format!("upstream.{key}[{i}]"), problem, wanted);
            }
        }
    }
    if settings.vault.path.is_dir() {
        findings.problem("vault.path", "the path is a directory", "a file, such as \"vault.exeat\"");
    }
    if let Source::Env(_) = &settings.vault.key
        && let Err(why) = read_source(&settings.vault.key, context.env)
    {
        findings.unavailable(context, "vault.key", why.to_string(), "a source that holds the master key");
    }
    if let LedgerAt::Shared { key: Some(key), .. } = &settings.ledger
        && let Err(why) = read_source(key, context.env)
    {
        findings.unavailable(context, "ledger.key", why.to_string(), "a source that holds 32 bytes in hex or base64");
    }
    listeners::check(&settings.proxy, policy, findings);
    let is_own = |server: &DnsServer| {
        let dns = settings.proxy.listeners.iter().filter(|listener| listener.is_dns());
        matches!(server, DnsServer::Plain(at) if dns.into_iter().any(|listener| listener.at.tcp() == Some(*at)))
    };
    if settings.dns.servers.iter().any(is_own) {
        findings.problem("dns.servers", "a listener of the proxy itself, which asks nobody", "another server");
    }
    check_own_listeners(settings, findings);
    for proxy in policy.upstream_proxies() {
        let at = proxy.address().host.ip().map(|ip| SocketAddr::new(ip, proxy.address().port));
        if at.is_some() && settings.proxy.listeners.iter().any(|listener| listener.at.tcp() == at) {
            findings.problem(format!("{}.proxy", proxy.section()), "a listener of the proxy itself", "another proxy");
        }
    }
    let tls = settings.proxy.tls.iter();
    let files = tls.flat_map(|tls| {
        let may = [("client_ca", tls.client_ca.as_ref()), ("crl", tls.crl.as_ref())];
        [("cert", Some(&tls.cert)), ("key", Some(&tls.key))].into_iter().chain(may)
    });
    for (key, file) in files.filter_map(|(key, file)| Some((key, file?))) {
        if let Err(error) = std::fs::File::open(file) {
            findings.unavailable(
                context,
                format!("proxy.tls.{key}"),
                format!("{} cannot be read: {error}", file.display()),
                "a PEM file",
            );
        }
    }
    for TokenSource { key, source } in &settings.admin.tokens {
        let at = format!("admin.{key}");
        match read_source(source, context.env).map(|token| (token.expose().len(), TokenHash::of(token.expose()))) {
            Err(why) => findings.unavailable(context, at, why.to_string(), "a source that holds the token"),
            Ok((length, _)) if length < TokenHash::MIN_TOKEN => {
                let expected = format!("{} random bytes or more", TokenHash::MIN_TOKEN);
                findings.problem(at, "the token is too short", expected);
            }
            Ok((_, hash)) if policy.tokens.contains_key(&hash) => {
                findings.problem(at, "the token is also the token of a task", "a different token");
            }
            Ok(_) => {}
        }
    }
}

fn integration(
    name: String,
    raw: RawIntegration,
    proxy: &impl Fn(RawUpstreamProxy) -> Option<ProxyOverride>,
    findings: &Findings,
) -> Integration {
    check_integration(&name, &raw, findings);
    let ports = raw.ports.unwrap_or_else(|| if raw.plain_http { vec![443, 80] } else { vec![443] });
    Integration {
        allowed: raw.allowed_domains,
        denied: raw.denied_domains,
        any_public_host: raw.any_public_host,
        ports,
        methods: raw.methods,
        paths: raw.paths,
        plain_http: raw.plain_http,
        mode: raw.mode,
        ech: raw.ech,
        allow_cidrs: raw.allow_cidrs,
        require_credential: raw.require_credential.as_deref().map(CredentialName::new),
        approval: raw.approval,
        trace_context: raw.trace_context,
        upstream: raw.upstream.and_then(proxy),
        name,
    }
}

/// Warns of networks that allow all of a special-purpose block.
fn warn_of_wide_networks(path: &str, networks: &[IpNet], findings: &Findings) {
    for (n, network) in networks.iter().enumerate() {
        let Some((block, name)) = address::covered_block(network) else { continue };
        let what = if network.prefix_len() == 0 {
            "opens every special-purpose address except cloud metadata".to_owned()
        } else {
            format!("opens all of {block} ({name})")
        };
        findings.warning(format!("{path}[{n}]"), format!("{what}; list only the addresses that are needed"));
    }
}

/// Reports keys of one integration that conflict with each other.
fn check_integration(name: &str, raw: &RawIntegration, findings: &Findings) {
    let at = |key: &str| format!("integrations.{name}.{key}");
    if raw.allowed_domains.is_empty() && !raw.any_public_host && !findings.has(&at("allowed_domains")) {
        findings.warning(at("allowed_domains"), "the list is empty, so this integration allows nothing");
    }
    if raw.any_public_host && !raw.allowed_domains.is_empty() {
        findings.problem(
            at("allowed_domains"),
            "cannot be combined with any_public_host",
            "a separate integration for these domains",
        );
    }
    warn_of_wide_networks(&at("allow_cidrs"), &raw.allow_cidrs, findings);
    if raw.any_public_host && !raw.allow_cidrs.is_empty() {
        findings.warning(
            at("allow_cidrs"),
            "with any_public_host, the owner of any domain can point it to these addresses",
        );
    }
    if !raw.any_public_host && !raw.denied_domains.is_empty() {
        findings.problem(
            at("denied_domains"),
            "requires any_public_host",
            "any_public_host = true, or no denied_domains",
        );
    }
    for (key, list_is_empty) in [
        ("ports", raw.ports.as_ref().is_some_and(Vec::is_empty)),
        ("methods", raw.methods.as_ref().is_some_and(Vec::is_empty)),
        ("paths", raw.paths.as_ref().is_some_and(Vec::is_empty)),
    ] {
        // A list of which no element is valid has been reported.
        if list_is_empty && !findings.has(&at(key)) {
            findings.problem(at(key), "an empty list allows nothing", "at least one entry, or leave the key out");
        }
    }
    if raw.mode == Mode::Opaque {
        let unseen = [
            ("methods", raw.methods.is_some()),
            ("paths", raw.paths.is_some()),
            ("any_public_host", raw.any_public_host),
            ("plain_http", raw.plain_http),
            ("require_credential", raw.require_credential.is_some()),
            ("approval", raw.approval.is_some()),
            ("trace_context", raw.trace_context),
        ];
        for (key, _) in unseen.into_iter().filter(|(_, used)| *used) {
            findings.problem(
                at(key),
                "cannot be enforced with mode = \"opaque\", which does not inspect tunnels",
                "mode = \"inspect\"",
            );
        }
    }
    if raw.require_credential.is_some() && (raw.any_public_host || raw.plain_http) {
        findings.problem(
            at("require_credential"),
            "credentials are sent only to hosts in allowed_domains, and only over https",
            "an integration without any_public_host and plain_http",
        );
    }
    if let (Some(methods), Some(approval)) = (&raw.methods, &raw.approval) {
        for method in approval.methods().iter().filter(|method| !methods.contains(method)) {
            let why = format!("{method} is not in this integration's methods, so this entry has no effect");
            findings.warning(at("approval.methods"), why);
        }
    }
    if name == webhook::NAME {
        findings.problem(
            at("allowed_domains"),
            "\"webhook\" is a built-in integration",
            "another name for this integration, and webhook URLs in webhook_urls",
        );
    }
}

/// The named items that a task can refer to.
struct References<'a> {
    integrations: &'a HashMap<String, Arc<Integration>>,
    plans: &'a BTreeMap<String, Plan>,
    raw: &'a BTreeMap<String, RawCredential>,
    stores: &'a SecretStores,
    settings: &'a Settings,
    /// Compiled credentials by name and workspace. `None` if the credential is invalid.
    compiled: HashMap<(String, String), Option<Arc<Credential>>>,
    sets: CredentialSets,
}

impl References<'_> {
    fn integrations(&self, wanted: &[String], at: &str, findings: &Findings) -> Vec<Arc<Integration>> {
        let named = wanted.iter().enumerate().filter(|(_, wanted)| *wanted != webhook::NAME);
        let find = |(i, wanted): (usize, &String)| {
            let found = self.integrations.get(wanted).cloned();
            if found.is_none() {
                let expected = known_names(self.integrations.keys(), "integrations", wanted);
                findings.problem(format!("{at}[{i}]"), format!("no integration named {wanted:?}"), expected);
            }
            found
        };
        named.filter_map(find).collect()
    }

    fn credentials(
        &mut self,
        task: &RawTask,
        at: &str,
        context: &CompileContext<'_>,
        findings: &Findings,
    ) -> Vec<Arc<Credential>> {
        let (mut found, mut names) = (Vec::new(), HashSet::new());
        for (i, wanted) in task.credentials.iter().enumerate() {
            let path = format!("{at}[{i}]");
            if !self.raw.contains_key(wanted) {
                let expected = known_names(self.raw.keys(), "credentials", wanted);
                findings.problem(path, format!("no credential named {wanted:?}"), expected);
            } else if !names.insert(wanted) {
                findings.problem(path, format!("{wanted:?} is listed twice"), "each credential once");
            } else {
                found.extend(self.credential(wanted, &task.workspace, context, findings));
            }
        }
        found
    }

    /// Returns the shared set of these credentials.
    fn set(&mut self, credentials: Vec<Arc<Credential>>) -> Arc<TaskCredentials> {
        let key = credentials.iter().map(Arc::as_ptr).collect();
        self.sets.entry(key).or_insert_with(|| Arc::new(TaskCredentials::new(credentials))).clone()
    }

    fn credential(
        &mut self,
        name: &str,
        workspace: &str,
        context: &CompileContext<'_>,
        findings: &Findings,
    ) -> Option<Arc<Credential>> {
        let raw = self.raw.get(name)?;
        let compile = || raw.compile(name, workspace, (self.settings, self.stores), context, findings).map(Arc::new);
        self.compiled.entry((name.to_owned(), workspace.to_owned())).or_insert_with(compile).clone()
    }
}

/// The credentials of tasks by their set. Tasks with the same credentials share them, and their matcher.
type CredentialSets = HashMap<Vec<*const Credential>, Arc<TaskCredentials>>;

fn task(
    name: &str,
    raw: RawTask,
    known: &mut References<'_>,
    (context, families): (&CompileContext<'_>, &Arc<Families>),
    findings: &Findings,
) -> Task {
    let at = |key: &str| format!("tasks.{name}.{key}");
    let found = known.integrations(&raw.integrations, &at("integrations"), findings);
    let plan = match &raw.plan {
        None => Plan::default(),
        Some(plan) => known.plans.get(plan).copied().unwrap_or_else(|| {
            findings.problem(
                at("plan"),
                format!("no plan named {plan:?}"),
                known_names(known.plans.keys(), "plans", plan),
            );
            Plan::default()
        }),
    };
    let read = |TokenSource { key, source }: &TokenSource| {
        let value = token(source, &at(key), context, findings)?;
        Some(Arc::new(TaskToken::new(key.clone(), value)))
    };
    let tokens = raw.tokens.iter().filter_map(read).collect();
    let proxy = &known.settings.proxy;
    let certified = proxy.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    let named = proxy.listeners.iter().flat_map(|listener| listener.tasks.tasks()).chain(proxy.tasks.tasks());
    let has_listener = named.into_iter().any(|task| task.as_str() == name);
    if raw.tokens.is_empty() && !certified && !has_listener {
        findings.warning(at("token"), "no token: only executions started by `exeat execution start` can use this task");
    }
    if !is_plain(&raw.workspace) {
        findings.problem(at("workspace"), "not a valid name", "at most 64 letters, digits, - and _");
    }
    let credentials = known.credentials(&raw, &at("credentials"), context, findings);
    credential_file::check_task(name, &credentials, &found, findings);
    let webhooks = raw.integrations.iter().any(|name| name == webhook::NAME);
    let registered = webhook::registered(&raw.webhook_urls, &at("webhook_urls"), findings);
    if webhooks == registered.is_empty() || webhooks != raw.tools.contains(&Tool::Webhook) {
        let why = "webhooks need all of these: the integration \"webhook\", the tool \"webhook\" and webhook_urls";
        findings.warning(at("webhook_urls"), why);
    }
    Task {
        name: TaskName::new(name),
        tokens,
        integrations: found,
        denied: raw.denied_domains,
        observe: raw.observe,
        plan,
        families: families.clone(),
        values: OnceLock::new(),
        credentials: known.set(credentials),
        raw: raw.raw.unwrap_or(raw.tools.is_empty()),
        tools: raw.tools,
        webhooks: webhooks.then_some(registered),
        commands: raw.commands,
    }
}

fn token(source: &Source, at: &str, context: &CompileContext<'_>, findings: &Findings) -> Option<Secret> {
    match read_source(source, context.env) {
        Ok(token) if token.expose().len() < TokenHash::MIN_TOKEN => {
            let expected = format!("{} random bytes or more", TokenHash::MIN_TOKEN);
            findings.problem(at, "the token is too short", expected);
            None
        }
        Ok(token) => Some(token),
        Err(why) => {
            findings.unavailable(context, at, why.to_string(), "a source that holds the token");
            None
        }
    }
}

/// The number of names that a message lists.
const MAX_NAMES: usize = 20;

/// Returns the text of what was expected instead of a name that is not known: the most similar name first, then the others.
#[must_use]
pub fn known_names<'a>(
    known: impl Iterator<Item = &'a (impl AsRef<str> + ?Sized + 'a)>,
    table: &str,
    wanted: &str,
) -> String {
    let mut known: Vec<_> = known.map(AsRef::as_ref).collect();
    known.sort_unstable();
    known.sort_by_key(|name| strsim::levenshtein(name, wanted) > MAX_DISTANCE);
    let more = match known.len().saturating_sub(MAX_NAMES) {
        0 => String::new(),
        more => format!(" and {more} more"),
    };
    known.truncate(MAX_NAMES);
    if known.is_empty() { format!("[{table}.{wanted}]") } else { format!("one of {}{more}", known.join(", ")) }
}

#[cfg(test)]
pub(super) mod tests {
    use std::time::Duration;

    use super::super::plan::{Calls, Oversize, Sizes};
    use super::super::settings::ListenAt;
    use super::super::source::{SecretSource, SourceError};
    use super::*;
    use crate::model::tool::Kind;

    /// A vault that contains every secret except `NONE`.
    struct Everything;

    impl SecretSource for Everything {
        fn secret(&self, _: &Vault, workspace: &str, name: &str) -> Result<Secret, SourceError> {
            match name {
                "NONE" => Err(SourceError::Missing(format!("the vault has no secret {name} in {workspace}"))),
                _ => Ok(Secret::new(format!("{workspace}/{name}: hJ7-rT2qLz").into_bytes())),
            }
        }
    }

    pub(in crate::policy) fn try_compile(text: &str) -> Result<Config, Vec<Problem>> {
        let env = |name: &str| match name {
            "SHORT" => Some("too-short".to_owned()),
            "BLANK" => Some("      ".to_owned()),
            "LONG" => Some("x".repeat(256)),
            "UNSET" => None,
            _ => Some(format!("{name}-token-of-at-least-24-bytes")),
        };
        let (base, state_dir) = (Path::new("/etc/exeat"), Path::new("/var/lib/exeat"));
        compile(text, &CompileContext { base, state_dir, env: &env, secrets: &Everything, is_offline: false })
    }

    pub(in crate::policy) fn policy(text: &str) -> Policy {
        try_compile(text).unwrap_or_else(|problems| panic!("{problems:#?}")).policy
    }

    #[test]
    fn changed_settings_are_named() {
        let settings = |text: &str| try_compile(text).unwrap_or_else(|problems| panic!("{problems:?}")).settings;
        let changed = |text: &str| settings(text).changed_since(&settings(""));
        assert_eq!(changed("[dns]\ntimeout = \"1s\"\n[audit]\nrefusals_per_second = 9\n").join(", "), "[dns], [audit]");
        assert_eq!(changed("state_dir = \"/elsewhere\"\n")[0], "state_dir");
        assert!(changed("[integrations.a]\nallowed_domains = [\"a.test\"]\n").is_empty());
    }

    #[test]
    fn an_empty_file_denies_everything() {
        let config = try_compile("").unwrap_or_else(|problems| panic!("{problems:?}"));
        assert_eq!(config.policy.tasks().count(), 0);
        let listen: Vec<_> = config.settings.proxy.listeners.into_iter().map(|listener| listener.at).collect();
        assert_eq!(listen, [ListenAt::Tcp("127.0.0.1:3128".parse().unwrap())]);
        assert_eq!(config.settings.audit.path.as_deref(), Some(Path::new("/var/lib/exeat/audit.jsonl")));
    }

    #[test]
    fn each_problem_has_its_key_and_a_suggestion() {
        let rows = [
            ("lisen = 1", "lisen", ""),
            ("[proxy]\nlisten = [\"127.0.0.1:99999\"]", "proxy.listen[0]", "127.0.0.1:3128"),
            ("[proxy]\nlisten = [\"unix:\"]", "proxy.listen[0]", "unix:PATH"),
            ("[proxy]\nlisten = [\"unix:a\", \"unix:a\"]", "proxy.listen[1]", "once"),
            ("[admin]\nlisten = \"unix\"", "admin.listen", "unix:PATH"),
            ("[metrics]\nlisten = \"127.0.0.1:3129\"", "metrics.listen", "once"),
            ("[metrics]\nlisten = \"127.0.0.1:3128\"", "proxy.listen[0]", "once"),
            ("[admin]\nuids = [-1]", "admin.uids[0]", "number"),
            ("[proxy]\nunix_mode = 660", "proxy.unix_mode", "\"0660\""),
            ("[proxy]\nunix_mode = \"0888\"", "proxy.unix_mode", "\"0660\""),
            ("[proxy]\nunix_mode = \"1777\"", "proxy.unix_mode", "\"0660\""),
            ("[proxy]\nunix_tasks = { x = \"t\" }", "proxy.unix_tasks.x", "1001"),
            ("[proxy]\nunix_tasks = { 01 = \"t\" }", "proxy.unix_tasks.01", "1001"),
            ("[proxy]\nunix_tasks = { 1 = \"nobody\" }", "proxy.unix_tasks.1", "[tasks.nobody]"),
            (
                "[proxy]\ncidr_tasks = { \"10.0.0.0/8\" = \"nobody\" }",
                "proxy.cidr_tasks.\"10.0.0.0/8\"",
                "[tasks.nobody]",
            ),
            (
                "[proxy]\ncidr_tasks = { \"10.0.0.1/8\" = \"t\" }\n[tasks.t]",
                "proxy.cidr_tasks.\"10.0.0.1/8\"",
                "network",
            ),
            (
                "[proxy]\ncidr_tasks = { \"0.0.0.0/0\" = \"t\" }\n[tasks.t]",
                "proxy.cidr_tasks.\"0.0.0.0/0\"",
                "networks",
            ),
            (
                "[proxy]\ncidr_tasks = { \"::ffff:10.0.0.0/104\" = \"t\" }\n[tasks.t]",
                "proxy.cidr_tasks.\"::ffff:10.0.0.0/104\"",
                "10.1.2.0/24",
            ),
            (
                "[proxy]\ncidr_tasks = { \"10.0.0.1\" = \"t\", \"10.0.0.1/32\" = \"t\" }\n[tasks.t]",
                "proxy.cidr_tasks",
                "once",
            ),
            ("[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"", "proxy.listeners[0]", "task = "),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nproxy_protocol = {}\n[tasks.t]",
                "proxy.listeners[0].proxy_protocol.trusted",
                "10.1.2.3/32",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nproxy_protocol = { trusted = [\"0.0.0.0/0\"] }\n[tasks.t]",
                "proxy.listeners[0].proxy_protocol.trusted[0]",
                "load balancers",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nproxy_protocol = { trusted = [\"::ffff:10.0.0.1/128\"] }\n[tasks.t]",
                "proxy.listeners[0].proxy_protocol.trusted[0]",
                "10.1.2.3/32",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nproxy_protocol = { trusted = [\"10.0.0.1/32\"], a = 1 }\n[tasks.t]",
                "proxy.listeners[0].proxy_protocol.a",
                "trusted",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nmode = \"socks\"\ntask = \"t\"\n[tasks.t]",
                "proxy.listeners[0].mode",
                "socks5",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nmode = \"transparent\"\n[tasks.t]",
                "proxy.listeners[0]",
                "task = ",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"unix:a\"\nmode = \"transparent\"\ntask = \"t\"\n[tasks.t]",
                "proxy.listeners[0].listen",
                "0.0.0.0:15001",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:53\"\nmode = \"dns\"\nuser_tasks = { 7 = \"t\" }\n[tasks.t]",
                "proxy.listeners[0].user_tasks",
                "cidr_tasks",
            ),
            ("[dns]\nsynthetic_ranges = [\"8.8.0.0/16\"]", "dns.synthetic_ranges[0]", "198.18.0.0/15"),
            ("[dns]\nsynthetic_ranges = [\"192.168.0.0/13\"]", "dns.synthetic_ranges[0]", "198.18.0.0/15"),
            ("[dns]\nsynthetic_ranges = [\"224.0.0.0/8\"]", "dns.synthetic_ranges[0]", "198.18.0.0/15"),
            (
                "[dns]\nservers = [\"127.0.0.1:53\"]\n[[proxy.listeners]]\nlisten = \"127.0.0.1:53\"\nmode = \"dns\"\ntask = \"t\"\n[tasks.t]",
                "dns.servers",
                "another server",
            ),
            ("[dns]\nsynthetic_ranges = [\"10.0.0.0/30\"]", "dns.synthetic_ranges[0]", "8 to 24"),
            (
                "[dns]\nsynthetic_ranges = [\"10.0.0.0/16\", \"10.1.0.0/16\"]",
                "dns.synthetic_ranges[1]",
                "one range of each",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nmode = \"transparent\"\ntproxy = true\ntask = \"t\"\n[tasks.t]",
                "proxy.listeners[0].task",
                "cidr_tasks",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nmode = \"transparent\"\ntproxy = true\nuser_tasks = { 7 = \"t\" }\n[tasks.t]",
                "proxy.listeners[0].user_tasks",
                "cidr_tasks",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nmode = \"socks5\"\ntproxy = true\n[tasks.t]",
                "proxy.listeners[0].tproxy",
                "transparent",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"0.0.0.0:1\"\nmode = \"transparent\"\ntask = \"t\"\n[tasks.t]",
                "proxy.listeners[0].task",
                "cidr_tasks",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"0.0.0.0:1\"\nmode = \"transparent\"\ncidr_tasks = { \"10.1.0.0/16\" = \"t\" }\n\
                 proxy_protocol = { trusted = [\"10.0.0.1/32\"] }\n[tasks.t]",
                "proxy.listeners[0].proxy_protocol",
                "no proxy_protocol",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"unix:a\"\nproxy_protocol = { trusted = [\"10.0.0.1/32\"] }\n[tasks.t]",
                "proxy.listeners[0].proxy_protocol",
                "no proxy_protocol",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\ntask = \"t\"\nproxy_protocol = { trusted = [\"10.0.0.1/32\"] }\n[tasks.t]",
                "proxy.listeners[0].task",
                "cidr_tasks",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nuser_tasks = { 7 = \"t\" }\nproxy_protocol = { trusted = [\"10.0.0.1/32\"] }\n[tasks.t]",
                "proxy.listeners[0].user_tasks",
                "cidr_tasks",
            ),
            ("[proxy]\ncidr_tasks = 1", "proxy.cidr_tasks", "10.1.2.0/24"),
            (
                "[proxy]\nlisten = [\"0.0.0.0:1\"]\ncidr_tasks = { \"10.0.0.0/8\" = \"t\" }\n[tasks.t]",
                "proxy.cidr_tasks",
                "[[proxy.listeners]]",
            ),
            ("[[proxy.listeners]]\ntask = \"t\"\n[tasks.t]", "proxy.listeners[0].listen", "127.0.0.1:3130"),
            ("[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\ntask = \"x\"", "proxy.listeners[0].task", "[tasks.x]"),
            ("[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\ntsk = \"x\"", "proxy.listeners[0].tsk", "task"),
            (
                "[[proxy.listeners]]\nlisten = \"10.0.0.1:1\"\ntask = \"t\"\n[tasks.t]",
                "proxy.listeners[0].task",
                "cidr_tasks with the networks",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"[::1]:1\"\ntask = \"t\"\ncidr_tasks = { \"::1\" = \"t\" }\n[tasks.t]",
                "proxy.listeners[0].task",
                "one of them",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"unix:a\"\ncidr_tasks = { \"::1\" = \"t\" }\n[tasks.t]",
                "proxy.listeners[0].cidr_tasks",
                "task = ",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"10.0.0.1:1\"\nuser_tasks = { 7 = \"t\" }\n[tasks.t]",
                "proxy.listeners[0].user_tasks",
                "loopback",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nuser_tasks = { 65534 = \"t\" }\n[tasks.t]",
                "proxy.listeners[0].user_tasks.65534",
                "one's own",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nuser_tasks = { x = \"t\" }\n[tasks.t]",
                "proxy.listeners[0].user_tasks.x",
                "1001",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nuser_tasks = { 7 = \"x\" }",
                "proxy.listeners[0].user_tasks.7",
                "[tasks.x]",
            ),
            (
                "[[proxy.listeners]]\nlisten = \"127.0.0.1:1\"\nuser_tasks = { 7 = \"t\" }\n\
                 cidr_tasks = { \"127.0.0.1\" = \"t\" }\n[tasks.t]",
                "proxy.listeners[0].cidr_tasks",
                "one of them",
            ),
            ("[[proxy.listeners]]\nlisten = \"127.0.0.1:3129\"\ntask = \"t\"\n[tasks.t]", "proxy.listeners[0]", "once"),
            ("[proxy]\ntls = { cert = \"c.pem\" }", "proxy.tls.key", "PEM"),
            ("[proxy]\ntls = { key = \"k.pem\" }", "proxy.tls.cert", "PEM"),
            ("[proxy]\ntls = { cert = \"/nonexistent\", key = \"/dev/null\" }", "proxy.tls.cert", "PEM"),
            (
                "[proxy]\ntls = { cert = \"/dev/null\", key = \"/dev/null\", crl = \"/dev/null\" }",
                "proxy.tls.crl",
                "client_ca",
            ),
            ("[proxy]\ntls = { cert = \"/dev/null\", key = \"/dev/null\", ca = \"x\" }", "proxy.tls.ca", "crl"),
            ("[proxy]\nmax_connections_per_caller = 2000000", "proxy.max_connections_per_caller", "1000000"),
            ("[proxy]\nlisten = []", "proxy.listen", "127.0.0.1:3128"),
            ("[audit]\nkeep = \"59m\"", "audit.keep", "30d"),
            ("[audit]\nkeep = \"1w\"", "audit.keep", "5m"),
            ("[audit]\nmax_total = \"299MB\"", "audit.max_total", "10GB"),
            ("[audit]\npath = \"-\"\nkeep = \"30d\"", "audit.path", "a file"),
            ("[audit]\nship = \"udp://logs.test\"", "audit.ship", "syslog://HOST"),
            ("[audit]\nship = \"https://u:p@logs.test\"", "audit.ship", "ship_authorization = "),
            ("[audit]\nship = \"http://logs.test\"", "audit.ship", "https://HOST/PATH"),
            ("[audit]\nship = \"https://logs.test\"\npath = \"-\"", "audit.ship", "audit.jsonl"),
            ("[audit]\nship_authorization = \"env:T\"", "audit.ship_authorization", "ship = "),
            (
                "[audit]\nship = \"syslog+tls://logs.test\"\nship_authorization = \"env:T\"",
                "audit.ship_authorization",
                "https://",
            ),
            (
                "[audit]\nship = \"http://127.0.0.1/\"\nship_authorization = \"env:T\"",
                "audit.ship_authorization",
                "https://",
            ),
            ("[traces]\nendpoint = \"http://collector.test:4318\"", "traces.endpoint", "https://HOST:4318"),
            ("[traces]\nsample = 0.5", "traces.endpoint", "https://HOST:4318"),
            ("[traces]\nheaders = { x-key = \"env:T\" }", "traces.endpoint", "https://HOST:4318"),
            ("[traces]\nendpoint = \"https://c.test\"\nsample = 1.5", "traces.sample", "0.0 to 1.0"),
            (
                "[traces]\nendpoint = \"https://c.test\"\nheaders = { x-key = \"T\" }",
                "traces.headers.x-key",
                "env:NAME",
            ),
            ("[traces]\nendpoint = \"https://c.test\"\nheaders = { host = \"env:T\" }", "traces.headers", "field"),
            (
                "[traces]\nendpoint = \"http://127.0.0.1:4318\"\nheaders = { x-key = \"env:T\" }",
                "traces.headers",
                "https://",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.test\"]\nmode = \"opaque\"\ntrace_context = true",
                "integrations.a.trace_context",
                "inspect",
            ),
            ("[proxy]\nheader_timout = \"1s\"", "proxy.header_timout", "header_timeout"),
            ("[proxy]\nheader_timeout = 10", "proxy.header_timeout", "30s"),
            ("[proxy]\nmax_head_bytes = 12", "proxy.max_head_bytes", "8192"),
            ("[proxy]\nmax_connections = 9223372036854775807", "proxy.max_connections", "1000000"),
            ("[proxy]\nlisten = [\"127.0.0.1:3129\"]", "proxy.listen[0]", "once"),
            ("[admin]\ntoken = \"env:UNSET\"", "admin.token", "source"),
            ("[admin]\ntoken = \"env:SHORT\"", "admin.token", "24"),
            ("[admin]\ntoken = \"env:X\"\n[tasks.a]\ntoken = \"env:X\"", "admin.token", "different token"),
            ("[admin]\ntokens = [\"env:X\", \"env:SHORT\"]", "admin.tokens[1]", "24"),
            ("[admin]\ntokens = []", "admin.tokens", "1 to 4"),
            ("[admin]\ntokens = [\"env:A\", \"env:B\", \"env:C\", \"env:D\", \"env:E\"]", "admin.tokens", "1 to 4"),
            ("[admin]\ntoken = \"env:A\"\ntokens = [\"env:B\"]", "admin.tokens", "either"),
            ("[admin]\ntokens = \"env:A\"", "admin.tokens", "["),
            ("[upstream]\nextra_roots = [\"missing.pem\"]", "upstream.extra_roots[0]", "PEM"),
            ("[upstream]\ncrls = [\"missing.crl\"]", "upstream.crls[0]", "CRL"),
            ("[upstream]\ncrls = \"revoked.crl\"", "upstream.crls", "["),
            ("[upstream]\nproxy = \"http://u:secret@p.test:1\"", "upstream.proxy", "proxy_password"),
            ("[upstream]\nproxy = \"http://p.test\"", "upstream.proxy", "HOST:PORT"),
            ("[upstream]\nproxy = \"socks5h://p.test:1\"", "upstream.proxy", "resolve"),
            ("[upstream]\nproxy = 3128", "upstream.proxy", "http://HOST:PORT"),
            ("[upstream]\nproxy = \"env:UNSET\"", "upstream.proxy", "source"),
            ("[upstream]\nproxy = \"env:SHORT\"", "upstream.proxy", "http://HOST:PORT"),
            ("[upstream]\nproxy = \"http://127.0.0.1:3128\"", "upstream.proxy", "another proxy"),
            ("[upstream]\nproxy = \"http://u@p.test:1\"", "upstream.proxy_password", "env:NAME"),
            ("[upstream]\nproxy = \"http://p.test:1\"\nproxy_password = \"env:KEY\"", "upstream.proxy", "USER@"),
            (
                "[upstream]\nproxy = \"http://u@p.test:1\"\nproxy_password = \"hunter2\"",
                "upstream.proxy_password",
                "secret:NAME",
            ),
            (
                "[upstream]\nproxy = \"http://u@p.test:1\"\nproxy_password = \"env:UNSET\"",
                "upstream.proxy_password",
                "source",
            ),
            ("[upstream]\nproxy_password = \"env:KEY\"", "upstream.proxy", "http://HOST:PORT"),
            ("[upstream]\nresolve = \"proxy\"", "upstream.proxy", "http://HOST:PORT"),
            ("[upstream]\nproxy = \"none\"\nresolve = \"proxy\"", "upstream.resolve", "a proxy"),
            ("[upstream]\nproxy = \"http://p.test:1\"\nresolve = \"remote\"", "upstream.resolve", "\"local\""),
            ("[upstream]\nno_proxy = [\"a.test\"]", "upstream.no_proxy", "a proxy"),
            ("[upstream]\nproxy = \"http://p.test:1\"\nno_proxy = [\".a.test\"]", "upstream.no_proxy[0]", "*.a.test"),
            (
                "[upstream]\nproxy = \"http://p.test:1\"\nno_proxy = [\"10.0.0.1/8\"]",
                "upstream.no_proxy[0]",
                "bits set",
            ),
            (
                "[upstream]\nproxy = \"http://p.test:1\"\nno_proxy = [\"a.*.test\"]",
                "upstream.no_proxy[0]",
                "10.0.0.0/8",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.test\"]\nupstream = { proxy = \"x\" }",
                "integrations.a.upstream.proxy",
                "socks5",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.test\"]\nupstream = {}",
                "integrations.a.upstream.proxy",
                "HOST:PORT",
            ),
            (
                "[upstream]\nproxy = \"http://p.test:1\"\nno_proxy = \"localhost,.corp.test\"",
                "upstream.no_proxy",
                "a list such as",
            ),
            ("[upstream]\nproxy = \"none\"\nno_proxy = [\"a.test\"]", "upstream.no_proxy", "a proxy"),
            (
                "[upstream]\nproxy = \"http://u@p.test:1\"\nproxy_password = \"env:LONG\"",
                "upstream.proxy_password",
                "1 to 255 bytes",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.test\"]\nupstream = { no_proxy = [] }",
                "integrations.a.upstream.no_proxy",
                "\"none\"",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"*.kawasaki.jp\"]",
                "integrations.a.allowed_domains[0]",
                "*.example.com",
            ),
            ("[proxy]\nmax_connections = 0", "proxy.max_connections", "whole number"),
            ("proxy = 3", "proxy", "[proxy]"),
            ("[dns]\nservers = [\"dns.example\"]", "dns.servers[0]", "system"),
            ("[dns]\nnew_names_per_minute = 0", "dns.new_names_per_minute", "1 to 1000000"),
            ("[dns]\nhosts = { \"API.test\" = [\"127.0.0.1\"] }", "dns.hosts.\"API.test\"", "api.test"),
            ("[dns]\nhosts = { \"api.test\" = [\"localhost\"] }", "dns.hosts.\"api.test\"[0]", "192.0.2.1"),
            ("[network]\nallow_cidrs = [\"10.0.0.1/8\"]", "network.allow_cidrs[0]", "bits set"),
            ("[upstream]\nroots = \"mozilla\"", "upstream.roots", "\"webpki\" or \"system\""),
            ("[audit]\ndurability = \"none\"", "audit.durability", "written"),
            ("[audit]\nrefusals_per_second = 1000001", "audit.refusals_per_second", "1 to 1000000"),
            ("[integrations.a]\nallowed_domains = [\"*.com\"]", "integrations.a.allowed_domains[0]", "*.example.com"),
            ("[integrations.a]\nallowed_domains = [\"A.example\"]", "integrations.a.allowed_domains[0]", "a.example"),
            ("[integrations.a]\nallowed_domains = \"a.example\"", "integrations.a.allowed_domains", "["),
            (
                "[integrations.a]\nany_public_host = true\nallowed_domains = [\"a.example\"]",
                "integrations.a.allowed_domains",
                "separate integration",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\ndenied_domains = [\"b.example\"]",
                "integrations.a.denied_domains",
                "any_public_host",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nmethods = [\"get\"]",
                "integrations.a.methods[0]",
                "GET",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nmethods = []",
                "integrations.a.methods",
                "leave the key out",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nports = [0]",
                "integrations.a.ports[0]",
                "1 to 65535",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\npaths = [\"/a/../b\"]",
                "integrations.a.paths[0]",
                "/repos/*",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nmode = \"opaque\"\nmethods = [\"GET\"]",
                "integrations.a.methods",
                "inspect",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nmode = \"opaque\"\npaths = [\"/\"]",
                "integrations.a.paths",
                "inspect",
            ),
            (
                "[integrations.a]\nany_public_host = true\nmode = \"opaque\"",
                "integrations.a.any_public_host",
                "inspect",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nmode = \"mitm\"",
                "integrations.a.mode",
                "\"inspect\" or \"opaque\"",
            ),
            ("[integrations.\"a b\"]\nallowed_domains = [\"a.example\"]", "integrations.a b", "letters"),
            ("[tasks.t]\nintegrations = [\"nope\"]", "tasks.t.integrations[0]", "[integrations.nope]"),
            ("[tasks.t]\ntoken = \"s3cret\"", "tasks.t.token", "env:NAME"),
            ("[tasks.t]\ntoken = \"env:SHORT\"", "tasks.t.token", "24"),
            ("[tasks.t]\ntokens = [\"env:X\", \"env:UNSET\"]", "tasks.t.tokens[1]", "source"),
            ("[tasks.t]\ntokens = [\"env:X\", \"env:X\"]", "tasks.t.tokens[1]", "different token"),
            (
                "[tasks.a]\ntoken = \"env:X\"\n[tasks.b]\ntokens = [\"env:Y\", \"env:X\"]",
                "tasks.b.tokens[1]",
                "different token",
            ),
            ("[tasks.t]\ntoken = \"env:BLANK\"", "tasks.t.token", "source"),
            ("[tasks.t]\ntoken = \"env:UNSET\"", "tasks.t.token", "source"),
            ("[tasks.t]\ntoken = \"file:/nonexistent/token\"", "tasks.t.token", "source"),
            ("[tasks.a]\ntoken = \"env:X\"\n[tasks.b]\ntoken = \"env:X\"", "tasks.b.token", "different token"),
            ("[tasks.t]\nplan = \"guru\"", "tasks.t.plan", "[plans.guru]"),
            ("[plans.p]\ncalls_per_execution = 0", "plans.p.calls_per_execution", "1 to"),
            ("[plans.p.raw]\ncalls_per_minute = 0", "plans.p.raw.calls_per_minute", "1 to"),
            ("[plans.p]\nconcurrent = 2_000_000_000", "plans.p.concurrent", "1 to"),
            ("[plans.p]\nburst = 20", "plans.p.burst", "requests_per_second"),
            ("[plans.p]\nrequests_per_second = -1", "plans.p.requests_per_second", "whole number"),
            ("[ledger]\nstore = \"redis\"", "ledger.store", "embedded"),
            ("[ledger]\nstore = \"redis://u:p@cache.test\"", "ledger.store", "password = "),
            ("[ledger]\nstore = \"redis://cache.test\"\nuser = \"u\"", "ledger.user", "password = "),
            ("[ledger]\npassword = \"env:P\"", "ledger.password", "no password"),
            ("[ledger]\nkey = \"env:P\"", "ledger.key", "no key"),
            ("[ledger]\nstore = \"redis://cache.test\"\nkey = \"env:UNSET\"", "ledger.key", "32 bytes"),
            ("[ledger]\nstore = \"redis://cache.test\"\nkey = \"secret:X\"", "ledger.key", "env:NAME"),
            ("[ledger]\nstore = \"memory\"\npath = \"x\"", "ledger.path", "no path"),
            ("[plans.p.raw]\nidle_timeout = 3", "plans.p.raw.idle_timeout", "30s"),
            ("[plans.p]\nmax_response_bytes = 0", "plans.p.max_response_bytes", "2MB"),
            ("[plans.p.raw]\nmax_response_bytes = \"2MiB\"", "plans.p.raw.max_response_bytes", "2MB"),
            ("[plans.p]\non_oversize = \"cut\"", "plans.p.on_oversize", "\"truncate\" or \"refuse\""),
            ("[plans.p.raw]\non_oversize = true", "plans.p.raw.on_oversize", "\"truncate\" or \"refuse\""),
            ("[leak]\nfamilies = [\"aws\", \"\"]", "leak.families[1]", "one of"),
            ("[leak]\nfamilies = [\"a b\"]", "leak.families[0]", "github"),
            ("[leak]\nfamilies = \"aws\"", "leak.families", "["),
            ("[leak]\nmax_finds = 0", "leak.max_finds", "1 to 1000000"),
            ("[leak]\nmax_finds = 1000001", "leak.max_finds", "1 to 1000000"),
            ("[leak]\nmax_decoded = \"63KB\"", "leak.max_decoded", "64KB"),
            ("[leak]\nmax_decoded = \"2GB\"", "leak.max_decoded", "1GB"),
            ("[leak]\nmax_ratio = 9", "leak.max_ratio", "10 to 10000"),
            ("[leak]\nmax_ratio = 10001", "leak.max_ratio", "10 to 10000"),
            ("[leak]\nmax_find = 3", "leak.max_find", "max_finds"),
            ("[vault]\nkey = \"env:UNSET\"", "vault.key", "master key"),
            ("[vault]\npath = \"/\"", "vault.path", "a file"),
            ("[credentials.A]\nvalue = \"env:\"", "credentials.A.value", "env:NAME"),
            ("[tasks.t]\ntoken = \"file:\"", "tasks.t.token", "file:PATH"),
            ("[vault]\nkey = \"secret:X\"", "vault.key", "env:NAME"),
            ("[tasks.t]\ntoken = \"secret:X\"", "tasks.t.token", "env:NAME"),
            ("[credentials.A]", "credentials.A.auth_type", "bearer"),
            ("[credentials.A]", "credentials.A.value", "secret:NAME"),
            ("[credentials.A]", "credentials.A.domains", "api.example.com"),
            ("[credentials.A]\nauth_type = \"token\"", "credentials.A.auth_type", "\"bearer\" or \"header\""),
            ("[credentials.A]\nauth_type = \"header\"", "credentials.A.auth_header_name", "X-Api-Key"),
            (
                "[credentials.A]\nauth_type = \"header\"\nauth_header_name = \"Proxy-Authorization\"",
                "credentials.A.auth_header_name",
                "X-Api-Key",
            ),
            (
                "[credentials.A]\nauth_type = \"header\"\nauth_header_name = \"Content-Length\"",
                "credentials.A.auth_header_name",
                "X-Api-Key",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nauth_header_name = \"X\"",
                "credentials.A.auth_header_name",
                "no auth_header_name",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nauth_query_name = \"x\"",
                "credentials.A.auth_query_name",
                "no auth_query_name",
            ),
            (
                "[credentials.A]\nauth_type = \"query_param\"\nauth_query_name = \"a&b\"",
                "credentials.A.auth_query_name",
                "letters",
            ),
            ("[credentials.A]\ndomains = [\"*.example.com\"]", "credentials.A.domains[0]", "without wildcards"),
            ("[credentials.A]\ndomains = [\"A.example\"]", "credentials.A.domains[0]", "lower case"),
            ("[credentials.A]\ndomains = [\"a.example:0\"]", "credentials.A.domains[0]", "a"),
            ("[credentials.A]\nvalue = \"secret:a b\"", "credentials.A.value", "secret:NAME"),
            ("[credentials.A]\ninject = \"sometimes\"", "credentials.A.inject", "\"named\" or \"always\""),
            ("[credentials.A]\nplaceholder = \"short\"", "credentials.A.placeholder", "8 or more"),
            ("[credentials.A]\nplaceholder = \"with a space in it\"", "credentials.A.placeholder", "without quotes"),
            ("[credentials.A]\nauth_type = \"aws_sigv4\"", "credentials.A.access_key_id", "AKIA"),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\naccess_key_id = \"short\"",
                "credentials.A.access_key_id",
                "env:AWS_ACCESS_KEY_ID",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nregion = \"us-east-1,eu-west-1\"",
                "credentials.A.region",
                "us-east-1",
            ),
            ("[credentials.A]\nauth_type = \"aws_sigv4a\"\nregion = \"*x\"", "credentials.A.region", "us-east-1"),
            ("[credentials.A]\nauth_type = \"aws_sigv4\"\nregion = \"us east\"", "credentials.A.region", "us-east-1"),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nswap_in = [\"header:x\"]",
                "credentials.A.swap_in",
                "no swap_in",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = {  }",
                "credentials.A.assume_role.role_arn",
                "arn:aws:iam",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { role_arn = \"arn:aws:iam::123456789012:user/a\" }",
                "credentials.A.assume_role.role_arn",
                "arn:aws:iam",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { role_arn = \"arn:aws:iam::123456789012:role/a\", session_name = \"a b\" }",
                "credentials.A.assume_role.session_name",
                "2 to 64",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { external_id = \"a b\" }",
                "credentials.A.assume_role.external_id",
                "1224",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { policy = \"text\" }",
                "credentials.A.assume_role.policy",
                "JSON object",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { policy_arns = [\"arn:aws:iam::aws:role/a\"] }",
                "credentials.A.assume_role.policy_arns[0]",
                "policy/NAME",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { duration = \"5m\" }",
                "credentials.A.assume_role.duration",
                "15m",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { duration = \"13h\" }",
                "credentials.A.assume_role.duration",
                "12h",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { region = \"us east\" }",
                "credentials.A.assume_role.region",
                "us-east-1",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { role_arn = \"arn:aws:iam::123456789012:role/a\" }",
                "credentials.A.assume_role.region",
                "us-east-1",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { region = \"a\", endpoint = \"http://sts.test\" }",
                "credentials.A.assume_role.endpoint",
                "https://sts",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { region = \"a\", endpoint = \"https://sts.test/a\" }",
                "credentials.A.assume_role.endpoint",
                "https://sts",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nassume_role = { role = \"a\" }",
                "credentials.A.assume_role.role",
                "role_arn",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nassume_role = {}",
                "credentials.A.assume_role",
                "no assume_role",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nmint_timeout = \"3s\"",
                "credentials.A.mint_timeout",
                "no mint_timeout",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nvalue = 'exec:[\"op\"]'",
                "credentials.A.value",
                "/usr/bin/PROGRAM",
            ),
            ("[credentials.A]\nauth_type = \"bearer\"\nvalue = 'exec:/usr/bin/op'", "credentials.A.value", "PROGRAM"),
            (
                "[credentials.A]\nauth_type = \"tls_client\"\nvalue = 'exec:[\"/bin/a\"]'",
                "credentials.A.value",
                "secret:NAME",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nsession_token = 'exec:[\"/bin/a\"]'",
                "credentials.A.session_token",
                "secret:NAME",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nvalue = 'exec:[\"/bin/a\"]#s'\nsession_token = 'exec:[\"/bin/b\"]#t'",
                "credentials.A.session_token",
                "another",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nvalue = 'exec:[\"/bin/a\"]#s'\nsession_token = 'env:TOKEN'",
                "credentials.A.session_token",
                "another",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nvalue = 'exec:[\"/bin/a\"]#s'\naccess_key_id = 'exec:[\"/bin/a\"]#s'",
                "credentials.A.access_key_id",
                "another",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nvalue = 'vault://a/b#c'\naccess_key_id = 'vault://a/c#d'",
                "credentials.A.access_key_id",
                "another",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nvalue = 'op://a/b/c'\naccess_key_id = 'op://a/b/d'",
                "credentials.A.access_key_id",
                "another",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\naccess_key_id = 'vault://a/c#d'",
                "credentials.A.access_key_id",
                "env:NAME",
            ),
            (
                "[credentials.A]\nauth_type = \"aws_sigv4\"\nvalue = 'exec:[\"/bin/a\"]#s'\nassume_role = { role_arn = 'arn:aws:iam::123456789012:role/a', region = 'a' }",
                "credentials.A.value",
                "secret:NAME",
            ),
            ("[credentials.A]\nauth_type = \"bearer\"\nservice = \"s3\"", "credentials.A.service", "no service"),
            ("[credentials.A]\nswap_in = [\"body\"]", "credentials.A.swap_in[0]", "header:NAME"),
            ("[credentials.A]\nswap_in = [\"body:json:key\"]", "credentials.A.swap_in[0]", "body:json:/POINTER"),
            ("[credentials.A]\nswap_in = [\"body:json:/a~2\"]", "credentials.A.swap_in[0]", "body:json:/POINTER"),
            ("[credentials.A]\nswap_in = [\"body:form:\"]", "credentials.A.swap_in[0]", "body:form:NAME"),
            ("[credentials.A]\nswap_in = [\"cookie:a b\"]", "credentials.A.swap_in[0]", "cookie:NAME"),
            (
                "[credentials.A]\nauth_type = \"auto\"\nswap_in = [\"body:json:/key\"]",
                "credentials.A.swap_in",
                "\"placeholder\" with these places",
            ),
            ("[credentials.A]\nauth_type = \"placeholder\"", "credentials.A.swap_in", "body:json:/api_key"),
            (
                "[credentials.A]\nauth_type = \"placeholder\"\nswap_in = [\"path\"]\ninject = \"always\"",
                "credentials.A.inject",
                "no inject",
            ),
            ("[credentials.A]\nauth_type = \"cookie\"", "credentials.A.auth_cookie_name", "session"),
            (
                "[credentials.A]\nauth_type = \"cookie\"\nauth_cookie_name = \"a;b\"",
                "credentials.A.auth_cookie_name",
                "at most 64",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nauth_cookie_name = \"a\"",
                "credentials.A.auth_cookie_name",
                "no auth_cookie_name",
            ),
            ("[credentials.A]\nauth_type = \"hmac\"", "credentials.A.hmac", "sign and headers"),
            ("[credentials.A]\nauth_type = \"bearer\"\n[credentials.A.hmac]", "credentials.A.hmac", "no hmac"),
            ("[credentials.A]\nauth_type = \"hmac\"\n[credentials.A.hmac]", "credentials.A.hmac.sign", "{body}"),
            ("[credentials.A]\nauth_type = \"hmac\"\nhmac = { preset = \"x\" }", "credentials.A.hmac.preset", "slack"),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { preset = \"slack\" }\nswap_in = [\"path\"]",
                "credentials.A.swap_in",
                "no swap_in",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{date}\" }",
                "credentials.A.hmac.sign",
                "timestamp",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{body}\" }",
                "credentials.A.hmac.headers",
                "X-Signature",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{signature}\", headers = { X-A = \"{signature}\" } }",
                "credentials.A.hmac.sign",
                "without {signature}",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{nonce}\", headers = { X-A = \"{signature}\" } }",
                "credentials.A.hmac.headers",
                "{nonce}",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{body}\", headers = { Host = \"{signature}\" } }",
                "credentials.A.hmac.headers.Host",
                "X-Signature",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{body}\", headers = { X-A = \"{signature}{body}\" } }",
                "credentials.A.hmac.headers",
                "other variables",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { preset = \"aws_mws\" }",
                "credentials.A.hmac.key_id",
                "visible",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                 hmac = { preset = \"slack\", key_encoding = \"hex\" }\n[tasks.t]\ncredentials = [\"A\"]",
                "credentials.A.value",
                "key_encoding",
            ),
            ("[credentials.A]\nauth_type = \"tls_client\"", "credentials.A.certificate", "file:client.pem"),
            (
                "[credentials.A]\nauth_type = \"bearer\"\ncertificate = \"file:a\"",
                "credentials.A.certificate",
                "no certificate",
            ),
            (
                "[credentials.A]\nauth_type = \"tls_client\"\nplaceholder = \"a-placeholder\"",
                "credentials.A.placeholder",
                "no placeholder",
            ),
            (
                "[credentials.A]\nauth_type = \"tls_client\"\nvalue = \"env:KEY\"\ncertificate = \"env:KEY\"\ndomains = [\"a.example\"]\n[tasks.t]\ncredentials = [\"A\"]",
                "credentials.A.certificate",
                "both in PEM",
            ),
            ("[credentials.A]\nwith = [\"B\"]", "credentials.A.with[0]", "A"),
            ("[credentials.A]\nwith = [\"A\"]", "credentials.A.with[0]", "each credential once"),
            ("[credentials.A]\nwith = [\"B\", \"B\"]", "credentials.A.with[1]", "each credential once"),
            ("[credentials.A]\nwith = [\"B\", \"C\", \"D\", \"E\", \"F\"]", "credentials.A.with", "fewer"),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\", \"b.example\"]\nwith = [\"B\"]\n\
                 [credentials.B]\nauth_type = \"query_param\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                 [tasks.t]\ncredentials = [\"A\", \"B\"]",
                "tasks.t.credentials[0]",
                "the same domains for B",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\nwith = [\"B\"]\n\
                 [credentials.B]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                 [tasks.t]\ncredentials = [\"A\", \"B\"]",
                "tasks.t.credentials[0]",
                "another auth_type",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\nwith = [\"B\"]\n\
                 [credentials.B]\nauth_type = \"query_param\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                 [tasks.t]\ncredentials = [\"A\"]",
                "tasks.t.credentials[0]",
                "\"B\" in this list",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\nwith = [\"B\", \"C\"]\n\
                 [credentials.B]\nauth_type = \"header\"\nauth_header_name = \"X-B\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                 [credentials.C]\nauth_type = \"hmac\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                 hmac = { sign = \"{timestamp}\", headers = { X-B = \"{timestamp}\", X-C = \"{signature}\" } }\n\
                 [tasks.t]\ncredentials = [\"A\", \"B\", \"C\"]",
                "tasks.t.credentials[0]",
                "another auth_type",
            ),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\nwith = [\"B\"]\ninject = \"always\"\n\
                 [credentials.B]\nauth_type = \"path\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\n\
                 [tasks.t]\ncredentials = [\"A\", \"B\"]",
                "tasks.t.credentials[0]",
                "inject = \"named\"",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{header:host}\", headers = { X-A = \"{signature}\" } }",
                "credentials.A.hmac.sign",
                "{host}",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{body\", headers = { X-A = \"{signature}\" } }",
                "credentials.A.hmac.sign",
                "timestamp",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { preset = \"aws_mws\", key_id = \"a\", algorithm = \"sha1\" }",
                "credentials.A.hmac.algorithm",
                "written out",
            ),
            (
                "[credentials.A]\nauth_type = \"hmac\"\nhmac = { sign = \"{body}\", headers = { X-A = \"{signature}\", x-a = \"1\" } }",
                "credentials.A.hmac.headers",
                "each field once",
            ),
            ("[credentials.A]\nswap_in = [\"header:Host\"]", "credentials.A.swap_in[0]", "header:NAME"),
            (
                "[credentials.A]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"a.example\"]\nplaceholder = \"KEY-token-of\"\n[tasks.t]\ncredentials = [\"A\"]",
                "credentials.A.placeholder",
                "another",
            ),
            ("[tasks.t]\ncredentials = [\"A\"]", "tasks.t.credentials[0]", "[credentials.A]"),
            ("[tasks.t]\ntools = [\"shell\"]", "tasks.t.tools[0]", "api_call"),
            ("[tasks.t]\nworkspace = \"a/b\"", "tasks.t.workspace", "letters"),
            ("[tasks.t]\ncommands = \"always\"", "tasks.t.commands", "by_approval"),
            ("[tasks.t]\ncommands = true", "tasks.t.commands", "by_approval"),
            ("[tasks.t]\ncommands = { expires = \"1s\" }", "tasks.t.commands.expires", "\"10s\" to \"24h\""),
            ("[tasks.t]\ncommands = { expires = \"25h\" }", "tasks.t.commands.expires", "\"10s\" to \"24h\""),
            ("[tasks.t]\ncommands = { shell = \"bash\" }", "tasks.t.commands.shell", ""),
            ("[tasks.t]\nwebhook_urls = [\"http://a.example/\"]", "tasks.t.webhook_urls[0]", "https"),
            ("[tasks.t]\nwebhook_urls = [\"https://10.0.0.1/\"]", "tasks.t.webhook_urls[0]", "public"),
            (
                "[tasks.t]\nwebhook_urls = [\"https://a.example/1\", \"https://a.example/2\", \"https://a.example/3\", \"https://a.example/4\"]",
                "tasks.t.webhook_urls",
                "at most 3",
            ),
            (
                "[integrations.webhook]\nallowed_domains = [\"a.example\"]",
                "integrations.webhook.allowed_domains",
                "another name",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nrequire_credential = \"A\"",
                "integrations.a.require_credential",
                "[credentials.A]",
            ),
            (
                "[integrations.a]\nany_public_host = true\nrequire_credential = \"A\"",
                "integrations.a.require_credential",
                "without any_public_host",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nmode = \"opaque\"\nrequire_credential = \"A\"",
                "integrations.a.require_credential",
                "inspect",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = \"yes\"",
                "integrations.a.approval",
                "\"required\" or { methods",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = true",
                "integrations.a.approval",
                "\"required\" or { methods",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = { method = [\"POST\"] }",
                "integrations.a.approval.method",
                "methods",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = { methods = [] }",
                "integrations.a.approval.methods",
                "at least one entry",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = { methods = [\"post\"] }",
                "integrations.a.approval.methods[0]",
                "upper-case",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = { tools = [] }",
                "integrations.a.approval.tools",
                "at least one entry",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = { tools = [\"shell\"] }",
                "integrations.a.approval.tools[0]",
                "api_call",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = { expires = \"9999ms\" }",
                "integrations.a.approval.expires",
                "\"10s\" to \"24h\"",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = { expires = \"25h\" }",
                "integrations.a.approval.expires",
                "\"10s\" to \"24h\"",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\napproval = { expires = 600 }",
                "integrations.a.approval.expires",
                "30s",
            ),
            (
                "[integrations.a]\nallowed_domains = [\"a.example\"]\nmode = \"opaque\"\napproval = \"required\"",
                "integrations.a.approval",
                "inspect",
            ),
            ("a = ", "line 1, column 5", ""),
        ];
        for (text, path, suggestion) in rows {
            let problems = try_compile(text).err().unwrap_or_default();
            let hit = problems.iter().any(|p| p.path == path && p.suggestion.contains(suggestion));
            assert!(hit, "{text:?} should name {path} and say {suggestion:?}: {problems:#?}");
        }
    }

    /// A valid credential with tasks and integrations that use it.
    fn with_credential(keys: &str, rest: &str) -> String {
        format!(
            "[integrations.a]\nallowed_domains = [\"a.example\"]\n[credentials.A]\nauth_type = \"bearer\"\n\
             value = \"env:KEY\"\ndomains = [\"a.example\"]\n{keys}\n{rest}"
        )
    }

    #[test]
    fn credentials_of_one_task_must_go_together() {
        let second = "[credentials.B]\nauth_type = \"header\"\nauth_header_name = \"X-B\"\nvalue = \"env:B\"\n\
                      domains = [\"a.example\"]\n";
        let task = "[tasks.t]\ntoken = \"env:T\"\nintegrations = [\"a\"]\ncredentials = [\"A\", \"B\"]\n";
        let rows = [
            ("inject = \"always\"", "inject = \"always\"", Some("both always injected")),
            ("inject = \"always\"", "", None),
            ("placeholder = \"ghp_0000000000\"", "placeholder = \"ghp_00000000001\"", Some("overlapping placeholders")),
            ("placeholder = \"ghp_0000000000\"", "placeholder = \"ghp_1111111111\"", None),
            (
                "placeholder = \"a_ghp_0000000000\"",
                "placeholder = \"ghp_0000000000\"",
                Some("overlapping placeholders"),
            ),
            ("placeholder = \"ghp_0000000000\"", "placeholder = \"ghp_0000000000\"", Some("overlapping placeholders")),
        ];
        for (a, b, want) in rows {
            let text = with_credential(a, &format!("{second}{b}\n{task}"));
            let problems = try_compile(&text).err().unwrap_or_default();
            let found = problems.iter().find(|p| p.path == "tasks.t.credentials[1]").map(|p| p.problem.as_str());
            assert_eq!(found.is_some(), want.is_some(), "{a} {b}: {problems:?}");
            assert!(found.unwrap_or_default().contains(want.unwrap_or_default()), "{found:?}");
        }
        let opaque = with_credential("", "[tasks.t]\nintegrations = [\"a\"]\ncredentials = [\"A\"]\n")
            .replace("[\"a.example\"]\n[cred", "[\"a.example\"]\nmode = \"opaque\"\n[cred");
        let problems = try_compile(&opaque).err().unwrap_or_default();
        assert!(problems[0].problem.contains("\"opaque\""), "{problems:?}");
        let required = with_credential("", "[tasks.t]\nintegrations = [\"a\"]\n")
            .replace("[\"a.example\"]\n[cred", "[\"a.example\"]\nrequire_credential = \"A\"\n[cred");
        let problems = try_compile(&required).err().unwrap_or_default();
        assert!(problems[0].problem.contains("requires A"), "{problems:?}");
    }

    #[test]
    fn a_missing_value_is_a_warning_and_disables_the_credential() {
        for source in ["env:UNSET", "secret:NONE", "workspace-secret://NONE", "file:/nonexistent/key"] {
            let text = with_credential("", "[tasks.t]\nintegrations = [\"a\"]\ncredentials = [\"A\"]\n")
                .replace("env:KEY", source);
            let config = try_compile(&text).unwrap_or_else(|problems| panic!("{source}: {problems:?}"));
            assert!(config.warnings.iter().any(|w| w.path == "credentials.A.value" && w.problem.contains("disabled")));
            assert!(config.policy.task(&TaskName::new("t")).unwrap().credentials()[0].value().is_none(), "{source}");
        }
    }

    #[test]
    fn the_vault_is_a_source_of_credentials_only() {
        let redis = "[ledger]\nkind = \"redis\"\nurl = \"redis://127.0.0.1\"\npassword = \"SOURCE\"";
        for place in
            ["[tasks.t]\ntoken = \"SOURCE\"", "[admin]\ntoken = \"SOURCE\"", "[vault]\nkey = \"SOURCE\"", redis]
        {
            for source in ["secret:K", "workspace-secret://K"] {
                let problems = try_compile(&place.replace("SOURCE", source)).err().unwrap_or_default();
                let found = problems.iter().any(|problem| problem.problem == "not the source of a secret");
                assert!(found, "{place}: {problems:?}");
            }
        }
    }

    /// After a reload, nothing that is unchanged is built again, and what was in use and has changed is built at once.
    #[test]
    fn a_new_policy_takes_over_what_is_built() {
        let tasks = "[tasks.t]\ntoken = \"env:t\"\nintegrations = [\"a\"]\ncredentials = [\"A\"]\n\
                     [tasks.idle]\ntoken = \"env:idle\"\nintegrations = [\"a\"]\n";
        let text = with_credential("", tasks).replace("env:KEY", "secret:K");
        let (old, mut same) = (policy(&text), policy(&text));
        let mut changed = policy(&text.replace("secret:K", "secret:L"));
        let task = |policy: &Policy, name: &str| policy.task(&TaskName::new(name)).unwrap().clone();
        assert!(!task(&old, "t").is_prepared());
        task(&old, "t").prepare();
        same.prepare_from(&old);
        assert!(Arc::ptr_eq(task(&same, "t").values(), task(&old, "t").values()));
        assert!(Arc::ptr_eq(task(&same, "t").own(), task(&old, "t").own()));
        assert!(!task(&same, "idle").is_prepared(), "nobody has used it");
        assert!(Arc::ptr_eq(same.log_values(), old.log_values()));
        changed.prepare_from(&old);
        assert!(task(&changed, "t").is_prepared() && !Arc::ptr_eq(changed.log_values(), old.log_values()));
        let (new, gone) = (b"default/L: hJ7-rT2qLz", b"default/K: hJ7-rT2qLz");
        assert!(task(&changed, "t").own().find(new).is_some() && task(&changed, "t").own().find(gone).is_none());
    }

    #[test]
    fn weak_values_and_tokens_are_reported() {
        let tasks = "[tasks.t]\ntoken = \"env:t\"\nintegrations = [\"a\"]\ncredentials = [\"A\"]\n";
        let text = with_credential("", tasks);
        let strong: Vec<Problem> = policy(&text.replace("env:KEY", "secret:K")).weak_values().collect();
        assert!(strong.iter().all(|warning| warning.path != "credentials.A.value"), "{strong:?}");
        let weak: Vec<Problem> = policy(&text.replace("env:KEY", "env:SHORT")).weak_values().collect();
        let found = weak.iter().find(|warning| warning.path == "credentials.A.value");
        assert!(found.is_some_and(|warning| warning.problem.contains("the value is weak")), "{weak:?}");
        assert_eq!(policy(&text).estimated_values().count(), 2, "one for the credential, one for the token");
    }

    /// `secret:NAME` is looked up in the task's own workspace.
    #[test]
    fn each_task_gets_the_value_of_its_workspace() {
        let task = |name: &str, workspace: &str| {
            format!(
                "[tasks.{name}]\ntoken = \"env:{name}\"\nworkspace = \"{workspace}\"\nintegrations = [\"a\"]\ncredentials = [\"A\"]\n"
            )
        };
        let text = with_credential("", &(task("one", "w1") + &task("two", "w2"))).replace("env:KEY", "secret:K");
        let policy = policy(&text);
        for (name, want) in [("one", "w1/K: hJ7-rT2qLz"), ("two", "w2/K: hJ7-rT2qLz")] {
            let task = policy.task(&TaskName::new(name)).unwrap();
            assert_eq!(task.credentials()[0].value().unwrap().expose(), want.as_bytes());
            let other = if name == "one" { "w2/K: hJ7-rT2qLz" } else { "w1/K: hJ7-rT2qLz" };
            assert!(task.values().find(want.as_bytes()).is_some() && task.own().find(other.as_bytes()).is_none());
            assert!(!policy.log_values().redact(other).contains("hJ7"));
        }
    }

    #[test]
    fn all_problems_are_reported_at_once_without_secrets() {
        let text =
            "x = 1\n[proxy]\nvia = 3\n[tasks.t]\ntoken = \"hunter2-hunter2-hunter2\"\nintegrations = [\"a\", \"b\"]";
        let problems = try_compile(text).err().unwrap_or_default();
        assert_eq!(problems.len(), 5, "{problems:#?}");
        assert!(!format!("{problems:?}").contains("hunter2"));
    }

    #[test]
    fn the_shipped_files_are_valid_and_only_the_example_opens_anything() {
        for (name, text, tasks) in [
            ("default.toml", include_str!("../../config/default.toml"), 0),
            ("example.toml", include_str!("../../config/example.toml"), 3),
        ] {
            let config = try_compile(text).unwrap_or_else(|problems| panic!("{name}: {problems:#?}"));
            assert_eq!(config.policy.tasks().count(), tasks, "{name}");
            assert_eq!(config.warnings, [], "{name}");
        }
    }

    #[test]
    fn default_toml_writes_out_the_defaults() {
        let compiled = |text| try_compile(text).ok().map(|c| (c.settings, c.policy.leak));
        assert_eq!(compiled(include_str!("../../config/default.toml")), compiled(""));
    }

    #[test]
    fn the_example_has_the_plans_guru_and_pro_with_their_numbers() {
        let config = try_compile(include_str!("../../config/example.toml")).unwrap_or_else(|all| panic!("{all:#?}"));
        for (task, per_execution, per_minute, most) in [("agent", 20, 10, 500_000), ("research", 50, 20, 2_000_000)] {
            let task = config.policy.task(&TaskName::new(task)).unwrap();
            for tool in Tool::ALL {
                let limits = task.limits(Kind::Tool(tool));
                let calls = Calls { per_execution: Some(per_execution), per_minute: Some(per_minute) };
                let response = Sizes { most: Some(most), oversize: Oversize::Truncate };
                assert_eq!((limits.calls, limits.response), (calls, response), "{} {tool:?}", task.name());
                assert_eq!(limits.timeouts.request, Some(Duration::from_secs(30)), "{} {tool:?}", task.name());
            }
        }
    }

    #[test]
    fn the_example_of_an_approval_is_valid() {
        let example = include_str!("../../config/example.toml");
        let line = example.lines().find(|line| line.starts_with("# approval = ")).unwrap();
        let text = example.replacen(line, line.trim_start_matches("# "), 1);
        let config = try_compile(&text).unwrap_or_else(|problems| panic!("{problems:#?}"));
        let task = config.policy.task(&TaskName::new("research")).unwrap();
        assert!(task.integrations.iter().any(|integration| integration.approval.is_some()));
        assert_eq!(config.warnings, []);
    }

    #[test]
    fn an_approval_for_denied_methods_is_a_warning() {
        let integration = "[integrations.a]\nallowed_domains = [\"a.example\"]\n";
        for (keys, want) in [
            (
                "methods = [\"GET\"]\napproval = { methods = [\"GET\", \"POST\"] }",
                Some("integrations.a.approval.methods"),
            ),
            ("methods = [\"GET\"]\napproval = \"required\"", None),
            ("approval = { methods = [\"POST\"] }", None),
        ] {
            let warnings = try_compile(&format!("{integration}{keys}")).ok().map(|config| config.warnings).unwrap();
            assert_eq!(warnings.first().map(|warning| warning.path.as_str()), want, "{keys}");
        }
    }

    #[test]
    fn allow_cidrs_with_any_public_host_is_a_warning() {
        let rows = [
            ("any_public_host = true\nallow_cidrs = [\"10.1.0.0/16\"]", Some("integrations.a.allow_cidrs")),
            ("allowed_domains = [\"a.example\"]\nallow_cidrs = [\"10.1.0.0/16\"]", None),
            ("any_public_host = true", None),
        ];
        for (keys, want) in rows {
            let warnings =
                try_compile(&format!("[integrations.a]\n{keys}")).ok().map(|config| config.warnings).unwrap();
            assert_eq!(warnings.first().map(|warning| warning.path.as_str()), want, "{keys}");
        }
    }

    #[test]
    fn networks_that_open_whole_special_ranges_are_warnings() {
        let rows = [
            ("0.0.0.0/0", Some("every special-purpose address")),
            ("::/0", Some("every special-purpose address")),
            ("0.0.0.0/1", Some("0.0.0.0/8 (this network)")),
            ("10.0.0.0/8", Some("10.0.0.0/8 (private use)")),
            ("172.0.0.0/8", Some("172.16.0.0/12 (private use)")),
            ("127.0.0.0/8", Some("127.0.0.0/8 (loopback)")),
            ("169.254.0.0/16", Some("169.254.0.0/16 (link-local)")),
            ("fc00::/7", Some("fc00::/7 (unique local)")),
            ("fd00::/8", Some("fd00::/8 (unique local)")),
            ("fe80::/10", Some("fe80::/10 (link-local)")),
            ("10.20.0.0/16", None),
            ("172.16.0.0/13", None),
            ("127.0.0.1/32", None),
            ("255.255.255.255/32", None),
            ("::1/128", None),
            ("fd12::/16", None),
            ("8.0.0.0/8", None),
        ];
        for (net, want) in rows {
            for (text, path) in [
                (format!("[network]\nallow_cidrs = [\"192.0.2.1/32\", \"{net}\"]"), "network.allow_cidrs[1]"),
                (
                    format!("[integrations.a]\nallowed_domains = [\"a.example\"]\nallow_cidrs = [\"{net}\"]"),
                    "integrations.a.allow_cidrs[0]",
                ),
            ] {
                let warnings = try_compile(&text).ok().map(|config| config.warnings).unwrap();
                let warning = warnings.first().map(|warning| (warning.path.as_str(), warning.problem.as_str()));
                assert_eq!(warning.map(|(path, _)| path), want.map(|_| path), "{net}: {warning:?}");
                assert!(want.is_none_or(|want| warning.is_some_and(|(_, why)| why.contains(want))), "{warning:?}");
                assert!(warnings.len() < 2, "{warnings:?}");
            }
        }
    }

    #[test]
    fn on_oversize_without_a_limit_is_a_warning() {
        let rows = [
            ("[plans.p]\non_oversize = \"refuse\"", Some("plans.p.on_oversize")),
            ("[plans.p.raw]\non_oversize = \"truncate\"", Some("plans.p.raw.on_oversize")),
            ("[plans.p]\non_oversize = \"refuse\"\nmax_response_bytes = 1", None),
        ];
        for (text, want) in rows {
            let warnings = try_compile(text).ok().map(|config| config.warnings).unwrap_or_default();
            assert_eq!(warnings.first().map(|warning| warning.path.as_str()), want, "{text}");
        }
    }
}

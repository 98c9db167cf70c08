//! Parses the TOML file into raw sections, before names are resolved and the policy is compiled.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::Method;
use ipnet::IpNet;
use toml::{Table, Value};

use super::address::{self, Class};
use super::approval::{self, Approval};
use super::credential_file;
use super::credential_file::RawCredential;
use super::hook_url::HookUrl;
use super::leak::Leak;
use super::listeners::{self, NetworkTasks, UserTasks};
use super::log_collector::LogCollector;
use super::pattern::{HostPattern, PathPattern, quoted};
use super::plan::{Calls, Limits, Oversize, Plan, Rate, Sizes, Timeouts};
use super::preset;
use super::reader::{Findings, Readable, Section, Size, choice};
use super::rule::{Ech, Mode};
use super::secret_store_file::{self, RawStores};
use super::settings::{
    Admin, Audit, Dns, DnsServer, Durability, Interception, LedgerAt, ListenAt, ListenerMode, ListenerTasks, Metrics,
    Notify, NotifyFormat, NotifyUrl, Proxy, ProxyTls, Roots, Settings, Shipping, Source, TokenSource, Upstream, Vault,
};
use super::trace_export;
use super::upstream_proxy_file::{self, RawNoProxy, RawUpstreamProxy};
use crate::leak::families::Family;
use crate::model::tool::Tool;

/// The ranges of synthetic addresses, if none are configured: that for benchmarks (RFC 2544), and one of unique local addresses.
const SYNTHETIC_RANGES: [&str; 2] = ["198.18.0.0/15", "fd65:7861:6174::/96"];
/// The maximum number of tokens of a task and of the admin API.
const MAX_TOKENS: usize = 4;

/// The whole file.
pub(super) struct File {
    pub(super) settings: Settings,
    pub(super) allow_cidrs: Vec<IpNet>,
    pub(super) deny_cidrs: Vec<IpNet>,
    pub(super) hosts: Vec<(String, Vec<IpAddr>)>,
    pub(super) upstream_proxy: Option<RawUpstreamProxy>,
    pub(super) no_proxy: RawNoProxy,
    pub(super) integrations: BTreeMap<String, RawIntegration>,
    pub(super) leak: Leak,
    pub(super) plans: BTreeMap<String, Plan>,
    pub(super) secret_stores: RawStores,
    pub(super) credentials: BTreeMap<String, RawCredential>,
    pub(super) tasks: BTreeMap<String, RawTask>,
}

/// `[integrations.NAME]`.
pub(super) struct RawIntegration {
    pub(super) allowed_domains: Vec<HostPattern>,
    pub(super) denied_domains: Vec<HostPattern>,
    pub(super) any_public_host: bool,
    pub(super) ports: Option<Vec<u16>>,
    pub(super) methods: Option<Vec<Method>>,
    pub(super) paths: Option<Vec<PathPattern>>,
    pub(super) plain_http: bool,
    pub(super) mode: Mode,
    pub(super) ech: Ech,
    pub(super) allow_cidrs: Vec<IpNet>,
    pub(super) require_credential: Option<String>,
    pub(super) approval: Option<Approval>,
    pub(super) trace_context: bool,
    pub(super) upstream: Option<RawUpstreamProxy>,
}

/// `[tasks.NAME]`.
pub(super) struct RawTask {
    pub(super) workspace: String,
    /// The sources of the static tokens, of which each is accepted.
    pub(super) tokens: Vec<TokenSource>,
    pub(super) integrations: Vec<String>,
    pub(super) credentials: Vec<String>,
    pub(super) tools: Vec<Tool>,
    pub(super) raw: Option<bool>,
    pub(super) webhook_urls: Vec<String>,
    /// How long the approval of a command is valid, if the task runs commands.
    pub(super) commands: Option<Duration>,
    pub(super) denied_domains: Vec<HostPattern>,
    pub(super) observe: bool,
    pub(super) plan: Option<String>,
}

/// Parses the text. `base` is the directory that relative paths outside the state directory start from.
pub(super) fn read(text: &str, base: &Path, default_state_dir: &Path, findings: &Findings) -> Option<File> {
    let mut table = match text.parse::<Table>() {
        Ok(table) => table,
        Err(error) => {
            findings.problem(position(text, error.span()), error.message().replace('\n', ", "), "");
            return None;
        }
    };
    preset::expand(&mut table, findings);
    let mut root = Section::root(table, findings);
    let dir = root.take::<PathBuf>("state_dir").map_or_else(|| default_state_dir.to_owned(), |dir| base.join(dir));
    let proxy = proxy(root.section("proxy"), base, findings);
    let admin = admin(root.section("admin"), base, findings);
    let metrics = metrics(root.section("metrics"), base);
    let interception = interception(root.section("interception"), &dir);
    let (upstream, upstream_proxy, no_proxy) = upstream(root.section("upstream"), base);
    let (dns, hosts) = dns(root.section("dns"), findings);
    let mut network = root.section("network");
    let (allow_cidrs, deny_cidrs) = (network.take("allow_cidrs"), network.take("deny_cidrs"));
    let vault = vault(root.section("vault"), &dir);
    let audit = audit(root.section("audit"), &dir, base, findings);
    let ledger = ledger(root.section("ledger"), &dir, base, findings);
    let notify = approvals(root.section("approvals"), base, findings);
    let traces = trace_export::read(root.section("traces"), base, findings);
    let leak = leak(root.section("leak"), findings);
    let integrations = root
        .tables("integrations")
        .into_iter()
        .map(|(name, section)| (name, integration(section, base, findings)))
        .collect();
    let plans = root.tables("plans").into_iter().map(|(name, section)| (name, plan(section, findings))).collect();
    let secret_stores = secret_store_file::read(root.section("secret_stores"), base);
    let credentials = root
        .tables("credentials")
        .into_iter()
        .map(|(name, section)| (name, credential_file::read(section, base)))
        .collect();
    let tasks = root.tables("tasks").into_iter().map(|(name, section)| (name, task(section, base, findings))).collect();
    Some(File {
        settings: Settings {
            state_dir: dir,
            proxy,
            admin,
            metrics,
            interception,
            upstream,
            dns,
            vault,
            audit,
            ledger,
            notify,
            traces,
        },
        allow_cidrs: allow_cidrs.unwrap_or_default(),
        deny_cidrs: deny_cidrs.unwrap_or_default(),
        hosts,
        upstream_proxy,
        no_proxy,
        integrations,
        leak,
        plans,
        secret_stores,
        credentials,
        tasks,
    })
}

fn position(text: &str, span: Option<std::ops::Range<usize>>) -> String {
    let before = span.and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count().saturating_add(1);
    let column = before.chars().rev().take_while(|c| *c != '\n').count().saturating_add(1);
    format!("line {line}, column {column}")
}

fn proxy(mut s: Section<'_>, base: &Path, findings: &Findings) -> Proxy {
    let head = s.take::<Size>("max_head_bytes").map_or(64_000, |size| size.0);
    if !(8_192..=1_000_000).contains(&head) {
        findings.problem(s.at("max_head_bytes"), format!("{head} bytes is out of range"), "8192 to \"1MB\"");
    }
    let tasks = ListenerTasks {
        all: None,
        networks: s.take::<NetworkTasks>("cidr_tasks").unwrap_or_default().0,
        users: s.take::<UserTasks>("unix_tasks").unwrap_or_default().0,
        loopback_users: BTreeMap::new(),
    };
    Proxy {
        listeners: listeners::read(&mut s, base, &tasks),
        tasks,
        tls: if s.has("tls") { proxy_tls(s.section("tls"), base, findings) } else { None },
        unix_mode: s.take::<FileMode>("unix_mode").map_or(0o600, |mode| mode.0),
        max_connections: bounded(&mut s, "max_connections", 10_000, findings),
        max_connections_per_caller: bounded(&mut s, "max_connections_per_caller", 1_000, findings),
        max_head_bytes: usize::try_from(head).unwrap_or(64_000),
        header_timeout: s.take("header_timeout").unwrap_or(Duration::from_secs(10)),
        handshake_timeout: s.take("handshake_timeout").unwrap_or(Duration::from_secs(10)),
        drain_timeout: s.take("drain_timeout").unwrap_or(Duration::from_secs(30)),
        via: s.take("via").unwrap_or(false),
    }
}

fn bounded(s: &mut Section<'_>, key: &'static str, default: usize, findings: &Findings) -> usize {
    let most = s.take(key).unwrap_or(default);
    if !(1..=1_000_000).contains(&most) {
        findings.problem(s.at(key), format!("{most} is out of range"), "1 to 1000000");
    }
    most
}

fn proxy_tls(mut s: Section<'_>, base: &Path, findings: &Findings) -> Option<ProxyTls> {
    let mut file = |key| s.take::<PathBuf>(key).map(|file| base.join(file));
    let (cert, key, client_ca, crl) = (file("cert"), file("key"), file("client_ca"), file("crl"));
    if crl.is_some() && client_ca.is_none() {
        findings.problem(s.at("crl"), "requires client_ca", "client_ca = \"PATH\", or no crl");
    }
    for (key, missing) in [("cert", cert.is_none()), ("key", key.is_none())] {
        if missing && !findings.has(&s.at(key)) {
            findings.problem(s.at(key), "missing", "a PEM file");
        }
    }
    Some(ProxyTls { cert: cert?, key: key?, client_ca, crl })
}

fn admin(mut s: Section<'_>, base: &Path, findings: &Findings) -> Admin {
    let default = ListenAt::Tcp(SocketAddr::from(([127, 0, 0, 1], 3129)));
    let listen = if s.has("listen") { s.take("listen") } else { Some(default) };
    Admin {
        listen: listen.map(|at: ListenAt| at.relative_to(base)),
        uids: s.take("uids").unwrap_or_default(),
        tokens: tokens(&mut s, base, findings),
    }
}

fn metrics(mut s: Section<'_>, base: &Path) -> Metrics {
    Metrics { listen: s.take("listen").map(|at: ListenAt| at.relative_to(base)) }
}

/// Reads `token`, or `tokens` with the new and the old one while a token is replaced.
fn tokens(s: &mut Section<'_>, base: &Path, findings: &Findings) -> Vec<TokenSource> {
    if s.has("token") && s.has("tokens") {
        findings.problem(s.at("tokens"), "token and tokens are both given", "either of them");
    }
    let single = s.take::<Source>("token").map(|source| ("token".to_owned(), source));
    let is_list = s.has("tokens");
    let listed = s.take::<Vec<Source>>("tokens").unwrap_or_default();
    if is_list && !(1..=MAX_TOKENS).contains(&listed.len()) && !findings.has(&s.at("tokens")) {
        findings.problem(s.at("tokens"), format!("{} tokens", listed.len()), format!("1 to {MAX_TOKENS} sources"));
    }
    let listed = listed.into_iter().enumerate().map(|(index, source)| (format!("tokens[{index}]"), source));
    single
        .into_iter()
        .chain(listed)
        .map(|(key, source)| TokenSource { key, source: source.relative_to(base) })
        .collect()
}

fn interception(mut s: Section<'_>, dir: &Path) -> Interception {
    let mut file = |key, default: &str| dir.join(s.take::<PathBuf>(key).unwrap_or_else(|| default.into()));
    let (ca_cert, ca_key) = (file("ca_cert", "ca.pem"), Some(file("ca_key", "ca-key.pem")));
    Interception { ca_cert, ca_key, refuse_inside: s.take("refuse_inside").unwrap_or(true) }
}

fn upstream(mut s: Section<'_>, base: &Path) -> (Upstream, Option<RawUpstreamProxy>, RawNoProxy) {
    let mut files = |key| -> Vec<PathBuf> {
        let files: Vec<PathBuf> = s.take(key).unwrap_or_default();
        files.into_iter().map(|file| base.join(file)).collect()
    };
    let (extra_roots, crls) = (files("extra_roots"), files("crls"));
    let proxy = upstream_proxy_file::read(&mut s, base);
    let no_proxy = upstream_proxy_file::no_proxy(&mut s, proxy.as_ref());
    let upstream = Upstream {
        roots: s.take("roots").unwrap_or(Roots::Webpki),
        extra_roots,
        crls,
        connect_timeout: s.take("connect_timeout").unwrap_or(Duration::from_secs(5)),
    };
    (upstream, proxy, no_proxy)
}

fn dns(mut s: Section<'_>, findings: &Findings) -> (Dns, Vec<(String, Vec<IpAddr>)>) {
    let servers = s.take("servers").unwrap_or_else(|| vec![DnsServer::System]);
    let timeout = s.take("timeout").unwrap_or(Duration::from_secs(5));
    let hosts = s.take::<Hosts>("hosts").map_or_else(Vec::new, |hosts| hosts.0);
    let new_names_per_minute = s.take("new_names_per_minute").unwrap_or(300);
    if !(1..=1_000_000).contains(&new_names_per_minute) {
        findings.problem(
            s.at("new_names_per_minute"),
            format!("{new_names_per_minute} is out of range"),
            "1 to 1000000",
        );
    }
    let synthetic_ranges = synthetic_ranges(&mut s, findings);
    (Dns { servers, timeout, new_names_per_minute, synthetic_ranges }, hosts)
}

/// Reads `synthetic_ranges`: no server may be at their addresses.
fn synthetic_ranges(s: &mut Section<'_>, findings: &Findings) -> Vec<IpNet> {
    let at = s.at("synthetic_ranges");
    let Some(given) = s.take::<Vec<IpNet>>("synthetic_ranges") else {
        return SYNTHETIC_RANGES.iter().filter_map(|range| range.parse().ok()).collect();
    };
    for (i, range) in given.iter().enumerate() {
        let at = format!("{at}[{i}]");
        let (shortest, longest) = if range.addr().is_ipv4() { (8, 24) } else { (32, 112) };
        if !(shortest..=longest).contains(&range.prefix_len()) {
            let suggestion = format!("a prefix length of {shortest} to {longest}");
            findings.problem(&at, "the range is too small or too large", suggestion);
        }
        let (first, last) = (address::classify(range.network()), address::classify(range.broadcast()));
        if first != last || !matches!(first, Class::Special(_)) || range.network().is_multicast() {
            findings.problem(&at, "it is not within one block of addresses that no server has", "\"198.18.0.0/15\"");
        }
        if given.iter().take(i).any(|other| other.addr().is_ipv4() == range.addr().is_ipv4()) {
            findings.problem(&at, "there is another range of this family", "one range of each family");
        }
    }
    given.iter().map(IpNet::trunc).collect()
}

fn vault(mut s: Section<'_>, dir: &Path) -> Vault {
    let path = s.take::<PathBuf>("path").unwrap_or_else(|| "vault.exeat".into());
    let key = s.take::<Source>("key").unwrap_or_else(|| Source::File("vault.key".into()));
    Vault { path: dir.join(path), key: key.relative_to(dir) }
}

/// The shortest time for which lines can be kept.
const MIN_KEEP: Duration = Duration::from_secs(3600);

fn audit(mut s: Section<'_>, dir: &Path, base: &Path, findings: &Findings) -> Audit {
    let refusals_per_second = s.take("refusals_per_second").unwrap_or(50);
    if !(1..=1_000_000).contains(&refusals_per_second) {
        findings.problem(s.at("refusals_per_second"), format!("{refusals_per_second} is out of range"), "1 to 1000000");
    }
    let path = s.take::<PathBuf>("path").unwrap_or_else(|| "audit.jsonl".into());
    let rotate_bytes = s.take::<Size>("rotate_bytes").map_or(100_000_000, |size| size.0);
    let (keep, max_total) = (s.take::<Duration>("keep"), s.take::<Size>("max_total").map(|size| size.0));
    if keep.is_some_and(|keep| keep < MIN_KEEP) {
        findings.problem(s.at("keep"), "lines must be kept for an hour at least", "\"30d\"");
    }
    // The current file and the newest rotated one are never dropped.
    if max_total.is_some_and(|most| most < rotate_bytes.saturating_mul(3)) {
        findings.problem(
            s.at("max_total"),
            format!("less than three files of {rotate_bytes} bytes"),
            "\"10GB\", or a smaller rotate_bytes",
        );
    }
    if path == Path::new("-") && (keep.is_some() || max_total.is_some()) {
        findings.problem(
            s.at("path"),
            "lines on standard output cannot be dropped",
            "a file, or neither keep nor max_total",
        );
    }
    let ship = shipping(&mut s, base, findings);
    if path == Path::new("-") && ship.is_some() {
        findings.problem(
            s.at("ship"),
            "lines are sent from the log's file, and this log has none",
            "path = \"audit.jsonl\"",
        );
    }
    Audit {
        path: (path != Path::new("-")).then(|| dir.join(path)),
        durability: s.take("durability").unwrap_or(Durability::Written),
        rotate_bytes,
        keep,
        max_total,
        ship,
        refusals_per_second,
    }
}

fn shipping(s: &mut Section<'_>, base: &Path, findings: &Findings) -> Option<Shipping> {
    let authorization = s.take::<Source>("ship_authorization").map(|source| source.relative_to(base));
    let Some(url) = s.take::<String>("ship") else {
        if authorization.is_some() {
            findings.problem(s.at("ship_authorization"), "not used without ship", "ship = \"https://HOST/PATH\"");
        }
        return None;
    };
    match LogCollector::parse(&url) {
        Ok(collector) if authorization.is_some() && !collector.keeps_authorization() => {
            findings.problem(
                s.at("ship_authorization"),
                "it would be sent without TLS, or not at all",
                "an https:// URL",
            );
            None
        }
        Ok(collector) => Some(Shipping { collector, authorization }),
        Err(error) => {
            findings.problem(s.at("ship"), error.to_string(), error.suggestion());
            None
        }
    }
}

fn approvals(mut s: Section<'_>, base: &Path, findings: &Findings) -> Option<Notify> {
    let key = s.take::<Source>("notify_key").map(|source| source.relative_to(base));
    let (has_key, has_format) = (s.has("notify_key"), s.has("notify_format"));
    let format = s.take("notify_format").unwrap_or_default();
    let link = s.take::<String>("notify_link");
    let Some(text) = s.take::<String>("notify") else {
        let given =
            [("notify_key", has_key || key.is_some()), ("notify_format", has_format), ("notify_link", link.is_some())];
        for (key, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
            findings.problem(s.at(key), "not used without notify", "notify = \"https://HOST/PATH\"");
        }
        return None;
    };
    if format == NotifyFormat::Generic && key.is_none() && !findings.has(&s.at("notify_key")) {
        findings.problem(s.at("notify_key"), "missing: the messages are signed", "notify_key = \"env:NAME\"");
    }
    if link.as_ref().is_some_and(|link| !link.starts_with("https://") && !link.starts_with("http://")) {
        findings.problem(s.at("notify_link"), "not a URL", "\"https://HOST/\"");
    }
    let url = match Source::parse(&text) {
        Some(source) => NotifyUrl::Secret(source.relative_to(base)),
        None => match HookUrl::parse(&text) {
            Ok(url) => NotifyUrl::Plain(url),
            Err(error) => {
                let expected = "\"https://HOST/PATH\", or \"env:NAME\" or \"file:PATH\" for a URL with a secret in it";
                findings.problem(s.at("notify"), error.to_string(), expected);
                return None;
            }
        },
    };
    Some(Notify { url, format, key, link })
}

fn ledger(mut s: Section<'_>, dir: &Path, base: &Path, findings: &Findings) -> LedgerAt {
    let store = s.take::<String>("store").unwrap_or_else(|| "embedded".to_owned());
    let path = s.take::<PathBuf>("path");
    let user = s.take::<String>("user");
    let password = s.take::<Source>("password").map(|source| source.relative_to(base));
    let key = s.take::<Source>("key").map(|source| source.relative_to(base));
    let is_shared = store.starts_with("redis:") || store.starts_with("rediss:");
    let given = [
        ("path", path.is_some(), store == "embedded"),
        ("user", user.is_some(), is_shared),
        ("password", password.is_some(), is_shared),
        ("key", key.is_some(), is_shared),
    ];
    for (key, _, _) in given.into_iter().filter(|(_, is_given, belongs)| *is_given && !belongs) {
        findings.problem(s.at(key), format!("not used with store = {store:?}"), format!("no {key}"));
    }
    if user.is_some() && password.is_none() {
        findings.problem(s.at("user"), "requires a password", "password = \"env:NAME\"");
    }
    match store.as_str() {
        "embedded" => {}
        "memory" => return LedgerAt::Memory,
        _ if is_shared && store.contains('@') => {
            findings.problem(
                s.at("store"),
                "the URL contains a user or password",
                "user = \"NAME\" and password = \"env:NAME\"",
            );
        }
        _ if is_shared => return LedgerAt::Shared { url: store, user, password, key },
        _ => findings.problem(
            s.at("store"),
            format!("invalid value {store:?}"),
            "\"embedded\", \"memory\" or \"redis://HOST:PORT\"",
        ),
    }
    LedgerAt::Embedded(dir.join(path.unwrap_or_else(|| "ledger.exeat".into())))
}

fn denied_domains(s: &mut Section<'_>) -> Vec<HostPattern> {
    s.take::<Vec<DenyPattern>>("denied_domains").unwrap_or_default().into_iter().map(|pattern| pattern.0).collect()
}

fn integration(mut s: Section<'_>, base: &Path, findings: &Findings) -> RawIntegration {
    // Its keys are in the table already.
    let _ = s.take::<String>(preset::KEY);
    RawIntegration {
        allowed_domains: s.take("allowed_domains").unwrap_or_default(),
        denied_domains: denied_domains(&mut s),
        any_public_host: s.take("any_public_host").unwrap_or(false),
        ports: s.take("ports"),
        methods: s.take("methods"),
        paths: s.take("paths"),
        plain_http: s.take("plain_http").unwrap_or(false),
        mode: s.take("mode").unwrap_or_default(),
        ech: s.take("ech").unwrap_or_default(),
        allow_cidrs: s.take("allow_cidrs").unwrap_or_default(),
        require_credential: s.take("require_credential"),
        approval: Approval::read(&mut s, findings),
        trace_context: s.take("trace_context").unwrap_or(false),
        upstream: s.optional("upstream").map(|upstream| upstream_proxy_file::of_integration(upstream, base)),
    }
}

fn task(mut s: Section<'_>, base: &Path, findings: &Findings) -> RawTask {
    RawTask {
        workspace: s.take("workspace").unwrap_or_else(|| "default".to_owned()),
        tokens: tokens(&mut s, base, findings),
        integrations: s.take("integrations").unwrap_or_default(),
        credentials: s.take("credentials").unwrap_or_default(),
        tools: s.take("tools").unwrap_or_default(),
        raw: s.take("raw"),
        webhook_urls: s.take("webhook_urls").unwrap_or_default(),
        commands: approval::of_commands(&mut s, findings),
        denied_domains: denied_domains(&mut s),
        observe: s.take("observe").unwrap_or(false),
        plan: s.take("plan"),
    }
}

fn plan(mut s: Section<'_>, findings: &Findings) -> Plan {
    let default = Plan::default();
    let mut raw = s.section("raw");
    Plan { tools: limits(&mut s, default.tools, findings), raw: limits(&mut raw, default.raw, findings) }
}

fn limits(s: &mut Section<'_>, default: Limits, findings: &Findings) -> Limits {
    Limits {
        calls: Calls {
            per_execution: count(s, "calls_per_execution", findings),
            per_minute: count(s, "calls_per_minute", findings),
        },
        rate: rate(s, findings),
        concurrent: count(s, "concurrent", findings).and_then(|n| u32::try_from(n).ok()),
        timeouts: timeouts(s, default.timeouts),
        request: s.take::<Size>("max_request_bytes").map(|size| size.0).or(default.request),
        response: sizes(s, default.response, findings),
    }
}

/// Reads a number of calls, at least one.
fn count(s: &mut Section<'_>, key: &'static str, findings: &Findings) -> Option<u64> {
    let n = s.take::<u64>(key)?;
    if !(1..=MAX_CALLS).contains(&n) {
        findings.problem(s.at(key), format!("{n} is out of range"), format!("1 to {MAX_CALLS}"));
    }
    Some(n)
}

/// The largest number of calls that a limit accepts.
const MAX_CALLS: u64 = 1_000_000_000;

fn rate(s: &mut Section<'_>, findings: &Findings) -> Option<Rate> {
    let has_burst = s.has("burst");
    let per_second = count(s, "requests_per_second", findings);
    let burst = count(s, "burst", findings);
    if has_burst && per_second.is_none() {
        findings.problem(s.at("burst"), "requires requests_per_second", "requests_per_second = 50");
    }
    let number = |n: u64| NonZeroU32::new(u32::try_from(n).ok()?);
    let per_second = number(per_second?)?;
    Some(Rate { per_second, burst: burst.and_then(number).unwrap_or(per_second) })
}

fn timeouts(s: &mut Section<'_>, default: Timeouts) -> Timeouts {
    let request = s.take("request_timeout");
    Timeouts {
        response_header: s.take("response_header_timeout").unwrap_or(default.response_header),
        idle: s.take("idle_timeout").unwrap_or(default.idle),
        request: request.or(default.request),
        most_asked: request.unwrap_or(default.most_asked),
    }
}

fn sizes(s: &mut Section<'_>, default: Sizes, findings: &Findings) -> Sizes {
    let is_given = s.has("on_oversize");
    let sizes = Sizes {
        most: s.take::<Size>("max_response_bytes").map(|size| size.0),
        oversize: s.take("on_oversize").unwrap_or(default.oversize),
    };
    if is_given && sizes.most.is_none() {
        findings.warning(s.at("on_oversize"), "has no effect without max_response_bytes");
    }
    sizes
}

/// The treatment of a credential's value that a client itself sends in the credential's place.
#[derive(Clone, Copy, PartialEq, Eq)]
enum OwnPlace {
    Refuse,
    Allow,
}

choice!(OwnPlace, "refuse" => OwnPlace::Refuse, "allow" => OwnPlace::Allow);

fn leak(mut s: Section<'_>, findings: &Findings) -> Leak {
    let default = Leak::default();
    let families = s.take::<Vec<Family>>("families").unwrap_or_default();
    let max_finds = s.take("max_finds").unwrap_or(default.max_finds);
    if !(1..=1_000_000).contains(&max_finds) {
        findings.problem(s.at("max_finds"), format!("{max_finds} is out of range"), "1 to 1000000");
    }
    let max_decoded = s.take::<Size>("max_decoded").map_or(default.max_decoded, |size| size.0);
    if !(64_000..=1_000_000_000).contains(&max_decoded) {
        findings.problem(s.at("max_decoded"), format!("{max_decoded} bytes is out of range"), "\"64KB\" to \"1GB\"");
    }
    let max_ratio = s.take::<u32>("max_ratio").map_or(default.max_ratio, u64::from);
    if !(10..=10_000).contains(&max_ratio) {
        findings.problem(s.at("max_ratio"), format!("{max_ratio} is out of range"), "10 to 10000");
    }
    let allows_own_place = s.take("own_place").unwrap_or(OwnPlace::Refuse) == OwnPlace::Allow;
    Leak { families, max_finds, max_decoded, max_ratio, allows_own_place }
}

impl Source {
    pub(super) fn relative_to(self, base: &Path) -> Self {
        match self {
            Self::File(path) => Self::File(base.join(path)),
            elsewhere @ (Self::Env(_) | Self::Secret(_) | Self::Store(_) | Self::Command(_)) => elsewhere,
        }
    }
}

impl ListenAt {
    pub(super) fn relative_to(self, base: &Path) -> Self {
        match self {
            Self::Unix(path) => Self::Unix(base.join(path)),
            tcp @ Self::Tcp(_) => tcp,
        }
    }
}

impl Readable for ListenAt {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        let at = match text.strip_prefix("unix:") {
            Some("") => None,
            Some(file) => Some(Self::Unix(file.into())),
            None => text.parse().ok().map(Self::Tcp),
        };
        if at.is_none() {
            findings.problem(
                path,
                format!("{} is not a valid listen address", quoted(&text)),
                "\"127.0.0.1:3128\" or \"unix:PATH\"",
            );
        }
        at
    }
}

/// A file mode, in octal digits.
struct FileMode(u32);

impl Readable for FileMode {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = value.as_str().unwrap_or_default();
        let mode = u32::from_str_radix(text, 8).ok().filter(|mode| *mode <= 0o777 && !text.starts_with('+'));
        if mode.is_none() {
            findings.problem(path, "not a valid file mode", "octal digits in quotes, such as \"0660\"");
        }
        mode.map(Self)
    }
}

/// A pattern that denies. Its width is not limited.
struct DenyPattern(HostPattern);

impl Readable for DenyPattern {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        let pattern = HostPattern::parse_wide(&text);
        pattern.map_err(|error| findings.problem(path, error.problem, error.suggestion)).ok().map(Self)
    }
}

/// `[dns].hosts`: host names with their addresses.
struct Hosts(Vec<(String, Vec<IpAddr>)>);

impl Readable for Hosts {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let Value::Table(table) = value else {
            findings.problem(path, "not a table", "{ \"api.test\" = [\"127.0.0.1\"] }");
            return None;
        };
        let read = |(name, value): (String, Value)| {
            let addresses = Vec::<IpAddr>::read(value, &format!("{path}.{name:?}"), findings)?;
            Some((name, addresses))
        };
        Some(Self(table.into_iter().filter_map(read).collect()))
    }
}

impl Readable for Source {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        // The text does not repeat the value, because it may be the secret itself.
        let source = value.as_str().and_then(Self::parse);
        if source.is_none() {
            findings.problem(
                path,
                "not the source of a secret",
                "\"env:NAME\" or \"file:PATH\", never the secret itself",
            );
        }
        source
    }
}

impl Readable for Tool {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        let tool = Self::from_name(&text);
        if tool.is_none() {
            let known = Self::ALL.map(Self::as_str).join(", ");
            findings.problem(path, format!("{text:?} is not a tool"), format!("one of {known}"));
        }
        tool
    }
}

impl Readable for Family {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        let family = Self::from_name(&text);
        if family.is_none() {
            let known = Self::ALL.map(Self::as_str).join(", ");
            findings.problem(path, format!("{text:?} is not a key family"), format!("one of {known}"));
        }
        family
    }
}

impl Readable for DnsServer {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        let server = Self::parse(&text);
        if server.is_none() {
            findings.problem(
                path,
                format!("{} is not a valid DNS server", quoted(&text)),
                "\"system\", \"192.0.2.53\", \"192.0.2.53:5353\", \"tls://192.0.2.53#dns.example\" or \"https://192.0.2.53/dns-query#dns.example\"",
            );
        }
        server
    }
}

impl DnsServer {
    fn parse(text: &str) -> Option<Self> {
        if text == "system" {
            return Some(Self::System);
        }
        if let Some(rest) = text.strip_prefix("tls://") {
            let (at, name) = rest.split_once('#')?;
            return Some(Self::Tls { at: address(at, 853)?, name: tls_name(name)? });
        }
        if let Some(rest) = text.strip_prefix("https://") {
            let (url, name) = rest.split_once('#')?;
            let slash = url.find('/')?;
            let (at, path) = url.split_at(slash);
            return Some(Self::Https { at: address(at, 443)?, name: tls_name(name)?, path: path.to_owned() });
        }
        address(text, 53).map(Self::Plain)
    }
}

fn address(text: &str, port: u16) -> Option<SocketAddr> {
    let bare = text.strip_prefix('[').and_then(|t| t.strip_suffix(']')).unwrap_or(text);
    let given = text.parse().ok().or_else(|| bare.parse().ok().map(|ip: IpAddr| SocketAddr::new(ip, port)));
    given.filter(|address| address.port() != 0)
}

fn tls_name(name: &str) -> Option<String> {
    rustls::pki_types::ServerName::try_from(name).ok().map(|name| name.to_str().into_owned())
}

choice!(ListenerMode, "proxy" => ListenerMode::Proxy, "socks5" => ListenerMode::Socks5, "transparent" => ListenerMode::Transparent, "dns" => ListenerMode::Dns);
choice!(Mode, "inspect" => Mode::Inspect, "opaque" => Mode::Opaque);
choice!(Oversize, "truncate" => Oversize::Truncate, "refuse" => Oversize::Refuse);
choice!(NotifyFormat, "generic" => NotifyFormat::Generic, "slack" => NotifyFormat::Slack);
choice!(Ech, "deny" => Ech::Deny, "allow" => Ech::Allow);
choice!(Roots, "webpki" => Roots::Webpki, "system" => Roots::System);
choice!(Durability, "written" => Durability::Written, "synced" => Durability::Synced);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dns_servers_come_in_five_forms() {
        let at = |s: &str| s.parse().unwrap();
        let rows = [
            ("system", Some(DnsServer::System)),
            ("192.0.2.53", Some(DnsServer::Plain(at("192.0.2.53:53")))),
            ("192.0.2.53:5353", Some(DnsServer::Plain(at("192.0.2.53:5353")))),
            ("2001:db8::53", Some(DnsServer::Plain(at("[2001:db8::53]:53")))),
            (
                "tls://192.0.2.53#dns.example",
                Some(DnsServer::Tls { at: at("192.0.2.53:853"), name: "dns.example".into() }),
            ),
            (
                "https://192.0.2.53/dns-query#dns.example",
                Some(DnsServer::Https {
                    at: at("192.0.2.53:443"),
                    name: "dns.example".into(),
                    path: "/dns-query".into(),
                }),
            ),
            ("dns.example", None),
            ("tls://192.0.2.53", None),
            ("192.0.2.53:0", None),
            ("tls://dns.example#dns.example", None),
            ("", None),
        ];
        for (text, want) in rows {
            assert_eq!(DnsServer::parse(text), want, "{text:?}");
        }
    }
}

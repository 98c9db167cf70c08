//! The lab: a real proxy built from a TOML text, real origins, a DNS server and a sandbox client, all on the loopback.

pub mod captured;
pub mod client;
pub mod described;
pub mod h2;
pub mod h2_proxy;
pub mod origin;
pub mod page;
pub mod upstream;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use exeat::cli::demo::dns::ScriptedDns;
use exeat::daemon::reload::ConfigFile;
use exeat::daemon::vault;
use exeat::daemon::{Daemon, StartError};
use exeat::model::host::Host;
use exeat::policy::compile::{self, Config};
use exeat::policy::settings::{LedgerAt, ListenAt, ListenerMode, ListenerTasks, ProxyListener, Settings};
use exeat::policy::source::CompileContext;
use exeat::tls::authority::Authority;
use serde_json::Value;
use tempfile::TempDir;

pub use client::Reply;
pub use origin::Origin;

/// The token of the task `t`.
pub const TOKEN: &str = "a-token-of-more-than-24-bytes";
/// The value of the credential in the source `env:KEY`. It contains characters that every encoding has to escape.
pub const KEY: &str = "sk-live-51H/8xPq+Zz~0=%w&R";
/// A refused CONNECT is answered as such, so that a test sees its response.
pub const REFUSE_OUTSIDE: &str = "[interception]\nrefuse_inside = false\n";
/// The time after which a test fails instead of waiting longer.
pub const TIMEOUT: Duration = Duration::from_secs(20);

/// A running proxy with everything that a test needs around it.
pub struct Lab {
    pub daemon: Daemon,
    pub dns: ScriptedDns,
    pub proxy: SocketAddr,
    pub dir: TempDir,
    pub settings: Settings,
    text: String,
}

/// The parts of a lab that start before the proxy, because the configuration contains their ports.
pub struct LabBuilder {
    pub dir: TempDir,
    pub dns: ScriptedDns,
    pub origin_ca: Authority,
}

impl LabBuilder {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let origin_ca =
            Authority::of(&dir.path().join("origin-ca.pem"), Some(&dir.path().join("origin-ca-key.pem"))).unwrap();
        Self { dir, dns: ScriptedDns::start().await.unwrap(), origin_ca }
    }

    /// Starts a TLS origin for this name, which resolves to 127.0.0.1.
    pub async fn origin(&self, name: &str) -> Origin {
        self.dns.set(name, &["127.0.0.1"]);
        Origin::https(self.server_config(name)).await
    }

    /// Like [`Self::origin`], without h2.
    pub async fn origin_h1(&self, name: &str) -> Origin {
        self.dns.set(name, &["127.0.0.1"]);
        let mut config = self.server_config(name).as_ref().clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Origin::https(config.into()).await
    }

    pub fn server_config(&self, name: &str) -> std::sync::Arc<rustls::ServerConfig> {
        self.origin_ca.server_config(&Host::parse(name).unwrap()).unwrap()
    }

    /// Starts the proxy. The configuration is `text` plus the defaults of every lab: free ports, the lab's DNS server
    /// and roots, the loopback opened, and limits on finds and audit lines that most tests never reach. `[tasks.t]` has
    /// [`TOKEN`].
    pub async fn proxy(self, text: &str) -> Lab {
        let config = self.config(text);
        let compiled = compiled(&config, self.dir.path());
        let mut settings = compiled.settings;
        if !text.contains("[admin]") {
            settings.admin.listen = None;
        }
        // Every lab has this way in, too.
        settings.proxy.listeners.push(ProxyListener {
            at: ListenAt::Tcp("127.0.0.1:0".parse().unwrap()),
            key: String::new(),
            is_own: true,
            tasks: ListenerTasks::default(),
            balancers: None,
            is_tproxy: false,
            mode: ListenerMode::Socks5,
        });
        let daemon = Daemon::start(settings.clone(), compiled.policy, None).await.unwrap();
        let proxy = daemon.proxy_addresses()[0];
        Lab { daemon, dns: self.dns, proxy, dir: self.dir, settings, text: config }
    }

    /// Starts the proxy from a file in the lab's folder, which it can reload.
    pub async fn proxy_from_file(self, name: &str) -> Lab {
        let file = ConfigFile::new(&self.dir.path().join(name), self.dir.path());
        let config = file.load().unwrap_or_else(|problems| panic!("{problems:#?}"));
        let mut settings = config.settings;
        settings.admin.listen = None;
        let daemon = Daemon::start(settings.clone(), config.policy, Some(file)).await.unwrap();
        let proxy = daemon.proxy_addresses()[0];
        Lab { daemon, dns: self.dns, proxy, dir: self.dir, settings, text: String::new() }
    }

    /// Returns the complete text of a configuration.
    pub fn config(&self, text: &str) -> String {
        std::fs::write(self.dir.path().join("token"), TOKEN).unwrap();
        let base = [
            ("[proxy]", "listen = [\"127.0.0.1:0\"]".to_owned()),
            ("[upstream]", "extra_roots = [\"origin-ca.pem\"]".to_owned()),
            ("[dns]", format!("servers = [\"{}\"]", self.dns.address())),
            ("[network]", "allow_cidrs = [\"127.0.0.0/8\"]".to_owned()),
            ("[leak]", "max_finds = 1000000".to_owned()),
            ("[audit]", "refusals_per_second = 1000000".to_owned()),
            ("[tasks.t]", "token = \"file:token\"".to_owned()),
        ];
        let mut whole = text.to_owned();
        for (section, key) in base {
            let name = key.split(' ').next().unwrap();
            let given = whole.split(section).nth(1).and_then(|rest| rest.split("\n[").next().map(str::to_owned));
            match given {
                Some(body) if body.contains(&format!("{name} =")) => {}
                Some(_) => whole = whole.replacen(section, &format!("{section}\n{key}"), 1),
                None => whole.push_str(&format!("\n{section}\n{key}\n")),
            }
        }
        whole
    }
}

fn compiled(text: &str, dir: &Path) -> Config {
    let env = |name: &str| (name == "KEY").then(|| KEY.to_owned());
    let around =
        CompileContext { base: dir, state_dir: dir, env: &env, secrets: &vault::Reader::default(), is_offline: false };
    compile::compile(text, &around).unwrap_or_else(|problems| panic!("{problems:#?}\n{text}"))
}

/// Starts a lab with one origin, `api.test`, which task `t` may use without restriction.
pub async fn simple() -> (Lab, Origin) {
    simple_with("").await
}

/// As [`simple`], with more of the configuration.
pub async fn simple_with(more: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!("{more}{}", allow_api(origin.port()));
    (builder.proxy(&text).await, origin)
}

pub fn allow_api(port: u16) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n[tasks.t]\nintegrations = [\"api\"]\n"
    )
}

/// Yields until a condition holds.
pub async fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let start = Instant::now();
    while !holds() {
        assert!(start.elapsed() < TIMEOUT, "{what}");
        tokio::task::yield_now().await;
    }
}

fn is_free(file: &Path) -> bool {
    std::fs::File::open(file).is_ok_and(|file| file.try_lock().is_ok())
}

impl Lab {
    pub fn audit_file(&self) -> PathBuf {
        self.dir.path().join("audit.jsonl")
    }

    /// Returns the audit lines of exchanges written so far.
    pub async fn audit(&self) -> Vec<Value> {
        let mut lines = self.log().await;
        lines.retain(|line| !["opened", "approval", "looked_up", "mint"].iter().any(|event| line["event"] == **event));
        lines
    }

    /// Returns the audit lines of names that were looked up so far.
    pub async fn lookups(&self) -> Vec<Value> {
        let mut lines = self.log().await;
        lines.retain(|line| line["event"] == "looked_up");
        lines
    }

    /// Returns the operator's decisions in the audit log so far.
    pub async fn decisions(&self) -> Vec<Value> {
        let mut lines = self.log().await;
        lines.retain(|line| line["event"] == "approval");
        lines
    }

    async fn log(&self) -> Vec<Value> {
        assert!(self.daemon.flush_audit().await);
        let text = std::fs::read_to_string(self.audit_file()).unwrap();
        // The last line may be incomplete, because the proxy writes concurrently.
        let whole = text.rsplit_once('\n').map(|(whole, _)| whole).unwrap_or_default();
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// Waits for the line that ended the `n`-th exchange, counted from 0.
    pub async fn ended(&self, n: usize) -> Value {
        let start = Instant::now();
        while start.elapsed() < TIMEOUT {
            let ended = self.audit().await.into_iter().filter(|line| line["event"] != "decided").nth(n);
            if let Some(line) = ended {
                return line;
            }
            tokio::task::yield_now().await;
        }
        panic!("exchange {n} left no line: {:#?}", self.audit().await);
    }

    /// Returns the number of refusals in the log.
    pub async fn refused(&self) -> usize {
        self.audit().await.iter().filter(|line| line["verdict"] == "deny").count()
    }

    /// Asserts that the only exchange was refused with this code before anything left.
    pub async fn assert_only_refused(&self, code: &str) {
        let line = self.ended(0).await;
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("refused"), Some(code)), "{line}");
        let lines = self.audit().await;
        assert_eq!(lines.len(), 1, "{lines:#?}");
    }

    /// Stops the proxy and starts it again on the same files with its first configuration.
    pub async fn restarted(self) -> Self {
        self.restarted_after(async |_| {}).await
    }

    /// Like [`Self::restarted`], and runs `between` in the lab's folder while the proxy is stopped.
    pub async fn restarted_after(self, between: impl AsyncFnOnce(&Path)) -> Self {
        let Self { daemon, dns, dir, settings, text, .. } = self;
        assert!(daemon.shutdown().await);
        let since = Instant::now();
        // The threads of the stopped daemon close their files shortly after it has shut down.
        let is_held = || matches!(&settings.ledger, LedgerAt::Embedded(path) if !is_free(path));
        while is_held() {
            assert!(since.elapsed() < TIMEOUT);
            tokio::task::yield_now().await;
        }
        between(dir.path()).await;
        let start = Instant::now();
        let daemon = loop {
            match Daemon::start(settings.clone(), compiled(&text, dir.path()).policy, None).await {
                Ok(daemon) => break daemon,
                // The threads of the stopped daemon close their files shortly after it has shut down.
                Err(StartError::Audit(_) | StartError::Ledger(_)) if start.elapsed() < TIMEOUT => {
                    tokio::task::yield_now().await;
                }
                Err(error) => panic!("{error}"),
            }
        };
        let proxy = daemon.proxy_addresses()[0];
        Self { daemon, dns, proxy, dir, settings, text }
    }

    /// Applies a policy; `text` as for [`LabBuilder::proxy`].
    pub fn reload(&self, text: &str) {
        self.reload_with_network(text, "allow_cidrs = [\"127.0.0.0/8\"]");
    }

    /// Like [`Self::reload`], with the given `[network]` section.
    pub fn reload_with_network(&self, text: &str, network: &str) {
        let with_token = text.replace("[tasks.t]", "[tasks.t]\ntoken = \"file:token\"");
        let whole = format!("[network]\n{network}\n{with_token}");
        let _ = self.daemon.replace_policy(compiled(&whole, self.dir.path()).policy);
    }
}

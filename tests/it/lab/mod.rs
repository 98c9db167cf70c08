//! Real things on the loopback: a proxy from a TOML text, origins, a DNS server, and a sandbox to play.

pub mod client;
pub mod h2;
pub mod origin;
pub mod page;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use exeat::cli::demo::dns::ScriptedDns;
use exeat::daemon::reload::ConfigFile;
use exeat::daemon::vault;
use exeat::daemon::{Daemon, StartError};
use exeat::model::host::Host;
use exeat::policy::compile::{self, Config};
use exeat::policy::settings::{LedgerAt, Settings};
use exeat::policy::source::CompileContext;
use exeat::tls::authority::Authority;
use serde_json::Value;
use tempfile::TempDir;

pub use client::Reply;
pub use origin::Origin;

/// The token of the task `t`.
pub const TOKEN: &str = "a-token-of-more-than-24-bytes";
/// A credential's value, in the source `env:KEY`: with characters that every encoding has to do something about.
pub const KEY: &str = "sk-live-51H/8xPq+Zz~0=%w&R";
/// How long anything may take before a test gives up.
pub const PATIENCE: Duration = Duration::from_secs(20);

/// Everything a test needs.
pub struct Lab {
    pub daemon: Daemon,
    pub dns: ScriptedDns,
    pub proxy: SocketAddr,
    pub dir: TempDir,
    pub settings: Settings,
    text: String,
}

/// The parts that start before the proxy, because the configuration contains their ports.
pub struct Ground {
    pub dir: TempDir,
    pub dns: ScriptedDns,
    pub origin_ca: Authority,
}

impl Ground {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let origin_ca =
            Authority::load_or_create(&dir.path().join("origin-ca.pem"), &dir.path().join("origin-ca-key.pem"))
                .unwrap();
        Self { dir, dns: ScriptedDns::start().await.unwrap(), origin_ca }
    }

    /// A TLS origin for these names, which lead to 127.0.0.1.
    pub async fn origin(&self, name: &str) -> Origin {
        self.dns.set(name, &["127.0.0.1"]);
        Origin::https(self.server_config(name)).await
    }

    /// As [`Self::origin`], without h2.
    pub async fn origin_h1(&self, name: &str) -> Origin {
        self.dns.set(name, &["127.0.0.1"]);
        let mut config = self.server_config(name).as_ref().clone();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Origin::https(config.into()).await
    }

    pub fn server_config(&self, name: &str) -> std::sync::Arc<rustls::ServerConfig> {
        self.origin_ca.server_config(&Host::parse(name).unwrap()).unwrap()
    }

    /// The proxy. The text is added to what every lab has: free ports, our DNS, our roots, the loopback
    /// opened, more finds and lines than most tests have. `[tasks.t]` has [`TOKEN`].
    pub async fn proxy(self, text: &str) -> Lab {
        let config = self.config(text);
        let compiled = compiled(&config, self.dir.path());
        let mut settings = compiled.settings;
        if !text.contains("[admin]") {
            settings.admin.listen = None;
        }
        let daemon = Daemon::start(settings.clone(), compiled.policy, None).await.unwrap();
        let proxy = daemon.proxy_addresses()[0];
        Lab { daemon, dns: self.dns, proxy, dir: self.dir, settings, text: config }
    }

    /// The proxy, from a file in the lab's folder that it can read again.
    pub async fn proxy_from_file(self, name: &str) -> Lab {
        let file = ConfigFile::new(&self.dir.path().join(name), self.dir.path());
        let config = file.load().unwrap_or_else(|problems| panic!("{problems:#?}"));
        let mut settings = config.settings;
        settings.admin.listen = None;
        let daemon = Daemon::start(settings.clone(), config.policy, Some(file)).await.unwrap();
        let proxy = daemon.proxy_addresses()[0];
        Lab { daemon, dns: self.dns, proxy, dir: self.dir, settings, text: String::new() }
    }

    /// The whole text of a configuration.
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
    let around = CompileContext { base: dir, state_dir: dir, env: &env, secrets: &vault::Reader::default() };
    compile::compile(text, &around).unwrap_or_else(|problems| panic!("{problems:#?}\n{text}"))
}

/// A lab with one origin, `api.test`, that task `t` may use in every way.
pub async fn simple() -> (Lab, Origin) {
    let ground = Ground::new().await;
    let origin = ground.origin("api.test").await;
    let port = origin.port();
    let lab = ground.proxy(&allow_api(port)).await;
    (lab, origin)
}

pub fn allow_api(port: u16) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n[tasks.t]\nintegrations = [\"api\"]\n"
    )
}

fn is_free(file: &Path) -> bool {
    std::fs::File::open(file).is_ok_and(|file| file.try_lock().is_ok())
}

impl Lab {
    pub fn audit_file(&self) -> PathBuf {
        self.dir.path().join("audit.jsonl")
    }

    /// The audit lines so far, of exchanges.
    pub async fn audit(&self) -> Vec<Value> {
        let mut lines = self.log().await;
        lines.retain(|line| line["event"] != "opened" && line["event"] != "approval");
        lines
    }

    /// The operator's decisions so far, from the audit log.
    pub async fn decisions(&self) -> Vec<Value> {
        let mut lines = self.log().await;
        lines.retain(|line| line["event"] == "approval");
        lines
    }

    async fn log(&self) -> Vec<Value> {
        assert!(self.daemon.flush_audit().await);
        let text = std::fs::read_to_string(self.audit_file()).unwrap();
        // Further lines may be written meanwhile.
        let whole = text.rsplit_once('\n').map(|(whole, _)| whole).unwrap_or_default();
        whole.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
    }

    /// The line that ended the `n`-th exchange, counted from 0.
    pub async fn ended(&self, n: usize) -> Value {
        let start = Instant::now();
        while start.elapsed() < PATIENCE {
            let ended = self.audit().await.into_iter().filter(|line| line["event"] != "decided").nth(n);
            if let Some(line) = ended {
                return line;
            }
            tokio::task::yield_now().await;
        }
        panic!("exchange {n} left no line: {:#?}", self.audit().await);
    }

    /// The only exchange was refused with this code, before anything left.
    pub async fn refused_only(&self, code: &str) {
        let line = self.ended(0).await;
        assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("refused"), Some(code)), "{line}");
        let lines = self.audit().await;
        assert_eq!(lines.len(), 1, "{lines:#?}");
    }

    /// Stops the proxy and starts it again on the same files, as it was configured at first.
    pub async fn restarted(self) -> Self {
        self.restarted_after(async |_| {}).await
    }

    /// As [`Self::restarted`], with something in between that is done in its folder.
    pub async fn restarted_after(self, between: impl AsyncFnOnce(&Path)) -> Self {
        let Self { daemon, dns, dir, settings, text, .. } = self;
        assert!(daemon.shutdown().await);
        let since = Instant::now();
        // The old one's threads let go of their files a moment after it.
        let is_held = || matches!(&settings.ledger, LedgerAt::Embedded(path) if !is_free(path));
        while is_held() {
            assert!(since.elapsed() < PATIENCE);
            tokio::task::yield_now().await;
        }
        between(dir.path()).await;
        let start = Instant::now();
        let daemon = loop {
            match Daemon::start(settings.clone(), compiled(&text, dir.path()).policy, None).await {
                Ok(daemon) => break daemon,
                // The old one's threads let go of their files a moment after it.
                Err(StartError::Audit(_) | StartError::Ledger(_)) if start.elapsed() < PATIENCE => {
                    tokio::task::yield_now().await;
                }
                Err(error) => panic!("{error}"),
            }
        };
        let proxy = daemon.proxy_addresses()[0];
        Self { daemon, dns, proxy, dir, settings, text }
    }

    /// Puts a policy in force; `text` as for [`Ground::proxy`].
    pub fn reload(&self, text: &str) {
        self.reload_with_network(text, "allow_cidrs = [\"127.0.0.0/8\"]");
    }

    /// As [`Self::reload`], with another `[network]`.
    pub fn reload_with_network(&self, text: &str, network: &str) {
        let with_token = text.replace("[tasks.t]", "[tasks.t]\ntoken = \"file:token\"");
        let whole = format!("[network]\n{network}\n{with_token}");
        let _ = self.daemon.replace_policy(compiled(&whole, self.dir.path()).policy);
    }
}

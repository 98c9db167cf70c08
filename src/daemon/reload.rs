//! Reloads the policy without a restart: a valid one replaces the old one, an invalid one changes nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

use super::vault;
use crate::flow::Services;
use crate::policy::compile::{self, CompileContext, Config, Problem};
use crate::tls::crl;

/// A file is taken once it has not changed for this long: editors and mounts write in steps.
const SETTLED: Duration = Duration::from_secs(1);
const LOOK_EVERY: Duration = Duration::from_millis(250);

/// Where a configuration comes from, to read it again.
#[derive(Clone)]
pub struct ConfigFile {
    path: PathBuf,
    state_dir: PathBuf,
    /// The file as last read, valid or not, to detect a change.
    read: Arc<Mutex<Option<Vec<u8>>>>,
    /// Held from reading to swapping: of two reloads at once, the later reader wins.
    swap: Arc<Mutex<()>>,
}

/// How a reload went.
pub enum Reloaded {
    /// In force, with its generation, and what may not be meant.
    New(u64, Vec<Problem>),
    /// Not in force: these problems.
    Kept(Vec<Problem>),
}

impl ConfigFile {
    /// A file, and where state lives if it does not say so.
    #[must_use]
    pub fn new(path: &Path, state_dir: &Path) -> Self {
        Self { path: path.to_owned(), state_dir: state_dir.to_owned(), read: Arc::default(), swap: Arc::default() }
    }

    /// Reads and compiles the file.
    ///
    /// # Errors
    /// Every problem found, at least one.
    pub fn load(&self) -> Result<Config, Vec<Problem>> {
        self.load_with(&vault::Reader::default())
    }

    fn load_with(&self, secrets: &vault::Reader) -> Result<Config, Vec<Problem>> {
        let unreadable = |why: &dyn std::fmt::Display| {
            let problem = format!("cannot be read: {why}");
            vec![Problem { path: self.path.display().to_string(), problem, suggestion: String::new() }]
        };
        let bytes = std::fs::read(&self.path).map_err(|error| unreadable(&error))?;
        *self.read.lock() = Some(bytes.clone());
        let text = String::from_utf8(bytes).map_err(|_| unreadable(&"it is not UTF-8"))?;
        let base = self.path.parent().unwrap_or(Path::new(""));
        let env = |name: &str| std::env::var(name).ok();
        let mut config =
            compile::compile(&text, &CompileContext { base, state_dir: &self.state_dir, env: &env, secrets })?;
        config.warnings.extend(crls(&config.settings.upstream.crls)?);
        Ok(config)
    }

    fn last_read(&self) -> Option<Vec<u8>> {
        self.read.lock().clone()
    }

    fn content(&self) -> Option<Vec<u8>> {
        std::fs::read(&self.path).ok()
    }
}

/// Reloads once, off the threads that serve: files may be slow, and a passphrase is stretched. It goes on if
/// nobody waits any more.
pub async fn once(services: Arc<Services>, file: ConfigFile) -> Reloaded {
    let done = tokio::task::spawn_blocking(move || now(&services, &file)).await;
    done.unwrap_or_else(|error| {
        let problem = format!("the reload broke off: {error}");
        Reloaded::Kept(vec![Problem { path: String::new(), problem, suggestion: String::new() }])
    })
}

fn now(services: &Services, file: &ConfigFile) -> Reloaded {
    // Also where the policy is not: a certificate that was revoked must not wait for that.
    if let Err(error) = services.connection_setup.renew() {
        tracing::error!(%error, "the listener's old certificates stay in use");
    }
    if let Err(error) = services.forwarder.renew() {
        tracing::error!(%error, "the old lists of revoked certificates stay in use");
    }
    let _swap = file.swap.lock();
    // The vault is a setting: secrets are set in the one that the daemon was started with.
    match file.load_with(&vault::Reader::of(&services.settings.vault)) {
        Ok(config) => {
            for warning in &config.warnings {
                tracing::warn!("{warning}");
            }
            if config.settings != services.settings {
                tracing::warn!("settings outside of the policy have changed; they take effect at the next start");
            }
            let generation = services.policies.replace(config.policy);
            let running = tokio::runtime::Handle::try_current().map_or(0, |it| it.metrics().num_alive_tasks());
            tracing::info!(generation, running, "a new policy is in force");
            Reloaded::New(generation, config.warnings)
        }
        Err(problems) => {
            for problem in &problems {
                tracing::error!(%problem, "the old policy stays in force");
            }
            Reloaded::Kept(problems)
        }
    }
}

/// Reads the lists of revoked certificates, and warns of those that are out of date: what their issuers have signed is
/// refused until there are newer ones.
fn crls(files: &[PathBuf]) -> Result<Vec<Problem>, Vec<Problem>> {
    let (mut problems, mut warnings) = (Vec::new(), Vec::new());
    for (i, file) in files.iter().enumerate() {
        let suggestion = "a current CRL, in PEM or DER".to_owned();
        let of = |problem| Problem { path: format!("upstream.crls[{i}]"), problem, suggestion };
        match crl::read(file).map(|lists| lists.expired) {
            Ok(None) => {}
            Ok(Some(end)) => {
                let file = file.display();
                warnings.push(of(format!("{file} is out of date since {end}: its issuer's certificates are refused")));
            }
            Err(error) => problems.push(of(error.to_string())),
        }
    }
    if problems.is_empty() { Ok(warnings) } else { Err(problems) }
}

/// Looks at the file until the daemon drains, and reloads once a change has settled.
pub(crate) async fn watch(services: Arc<Services>, file: ConfigFile) {
    let mut seen = file.last_read();
    let mut since = Instant::now();
    while !services.drain.is_cancelled() {
        tokio::time::sleep(LOOK_EVERY).await;
        let content = file.content();
        if content != seen {
            seen = content;
            since = Instant::now();
        } else if seen.is_some() && seen != file.last_read() && since.elapsed() >= SETTLED {
            once(services.clone(), file.clone()).await;
        }
    }
}

//! Reloads the policy without a restart: a valid one replaces the old one, an invalid one changes nothing.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use parking_lot::Mutex;
use tokio::sync::Mutex as AsyncMutex;
use tokio::time::Instant;

use super::{admin_tokens, preparation, vault};
use crate::flow::Services;
use crate::model::secret::{Secret, TokenHash};
use crate::policy::compile::{self, Config, Problem};
use crate::policy::settings::{Settings, Vault};
use crate::policy::source::{CompileContext, SecretSource, SourceError};
use crate::tls::crl;

/// A changed file is loaded after it has not changed for this long, because editors and mounts write in several steps.
const SETTLED: Duration = Duration::from_secs(1);
/// Interval at which the file is checked for changes.
const POLL_INTERVAL: Duration = Duration::from_millis(250);

/// The configuration file, which can be read again.
#[derive(Clone)]
pub struct ConfigFile {
    path: PathBuf,
    state_dir: PathBuf,
    /// The file as last read, valid or not, to detect a change.
    read: Arc<Mutex<Option<Vec<u8>>>>,
    /// Held from reading the file to replacing the policy, so that of two concurrent reloads the later read wins. A file on
    /// a file system that hangs occupies one thread, however many reloads wait for it.
    swap: Arc<AsyncMutex<()>>,
}

/// The vault of a configuration that is checked offline.
struct Unread;

impl SecretSource for Unread {
    fn secret(&self, _: &Vault, _: &str, name: &str) -> Result<Secret, SourceError> {
        Err(SourceError::Missing(format!("the vault was not read for the secret {name}")))
    }
}

/// The result of a reload.
pub enum Reloaded {
    /// The new policy is in force, with this generation and these warnings.
    New(u64, Vec<Problem>),
    /// The old policy stays in force because of these problems.
    Kept(Vec<Problem>),
}

impl ConfigFile {
    /// Creates a configuration file at `path`. `state_dir` is the state directory if the file does not set one.
    #[must_use]
    pub fn new(path: &Path, state_dir: &Path) -> Self {
        Self { path: path.to_owned(), state_dir: state_dir.to_owned(), read: Arc::default(), swap: Arc::default() }
    }

    /// Reads and compiles the file.
    ///
    /// # Errors
    /// All problems, at least one.
    pub fn load(&self) -> Result<Config, Vec<Problem>> {
        self.load_with(&vault::Reader::default(), false)
    }

    /// Reads and compiles the file without the vault, and without files and values that are not on this machine.
    ///
    /// # Errors
    /// All problems, at least one.
    pub fn load_offline(&self) -> Result<Config, Vec<Problem>> {
        self.load_with(&Unread, true)
    }

    /// Compiles a text as [`Self::load_offline`] does that of the file.
    ///
    /// # Errors
    /// All problems, at least one.
    pub fn compile_offline(&self, text: &str) -> Result<Config, Vec<Problem>> {
        let base = self.path.parent().unwrap_or(Path::new(""));
        let env = |name: &str| std::env::var(name).ok();
        let context =
            CompileContext { base, state_dir: &self.state_dir, env: &env, secrets: &Unread, is_offline: true };
        compile::compile(text, &context)
    }

    fn load_with(&self, secrets: &dyn SecretSource, is_offline: bool) -> Result<Config, Vec<Problem>> {
        let unreadable = |why: &dyn std::fmt::Display| {
            let problem = format!("cannot be read: {why}");
            vec![Problem::new(self.path.display().to_string(), problem, "")]
        };
        let bytes = std::fs::read(&self.path).map_err(|error| unreadable(&error))?;
        *self.read.lock() = Some(bytes.clone());
        let text = String::from_utf8(bytes).map_err(|_| unreadable(&"it is not UTF-8"))?;
        let base = self.path.parent().unwrap_or(Path::new(""));
        let env = |name: &str| std::env::var(name).ok();
        let context = CompileContext { base, state_dir: &self.state_dir, env: &env, secrets, is_offline };
        let mut config = compile::compile(&text, &context)?;
        if !is_offline {
            config.warnings.extend(crls(&config.settings.upstream.crls)?);
        }
        Ok(config)
    }

    /// Returns the path of the file.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the names of the integrations in the file as it was last read.
    pub(crate) fn integration_names(&self) -> Vec<String> {
        let text = self.last_read().and_then(|bytes| String::from_utf8(bytes).ok());
        let table = text.and_then(|text| text.parse::<toml::Table>().ok()).unwrap_or_default();
        let integrations = table.get("integrations").and_then(toml::Value::as_table);
        integrations.into_iter().flat_map(toml::Table::keys).cloned().collect()
    }

    fn last_read(&self) -> Option<Vec<u8>> {
        self.read.lock().clone()
    }

    /// Returns the content of the file, if it can be read. The file system may be slow, or hang.
    async fn content(&self) -> Option<Vec<u8>> {
        let path = self.path.clone();
        tokio::task::spawn_blocking(move || std::fs::read(path).ok()).await.ok().flatten()
    }
}

/// Reloads once on a blocking thread, because file access and passphrase derivation may be slow. A reload that has begun
/// is completed even if the future is dropped; one that waits for another is not begun then.
pub async fn once(services: Arc<Services>, file: ConfigFile) -> Reloaded {
    let swap = file.swap.clone().lock_owned().await;
    let result = tokio::task::spawn_blocking(move || {
        let _swap = swap;
        reload(&services, &file)
    })
    .await;
    result.unwrap_or_else(|error| {
        let problem = format!("the reload was interrupted: {error}");
        Reloaded::Kept(vec![Problem::new("", problem, "")])
    })
}

fn reload(services: &Arc<Services>, file: &ConfigFile) -> Reloaded {
    // Done even if the policy is invalid, because a revocation must take effect at once.
    if let Err(error) = services.connection_setup.renew() {
        tracing::error!(%error, "the listener's old certificates stay in use");
    }
    if let Err(error) = services.forwarder.renew() {
        tracing::error!(%error, "the old lists of revoked certificates stay in use");
    }
    match services.authority.renew() {
        Ok(false) => {}
        Ok(true) => {
            tracing::info!(sha256 = services.authority.fingerprint(), "the files of the interception CA have changed")
        }
        Err(error) => tracing::error!(%error, "the old interception CA stays in use"),
    }
    // The vault is a setting, and settings do not change at a reload: secrets are read from the vault in use.
    match file.load_with(&vault::Reader::of(&services.settings.vault), false) {
        Ok(config) => {
            match admin_tokens(services, &config.settings) {
                Ok(Some(tokens)) => services.admin_tokens.replace(tokens),
                Ok(None) => {}
                Err(problem) => return kept(services, vec![problem]),
            }
            for warning in &config.warnings {
                tracing::warn!(line = warning.line, "{warning}");
            }
            let changed = config.settings.changed_since(&services.settings).join(", ");
            if !changed.is_empty() {
                tracing::warn!(changed, "these settings take effect at the next start");
            }
            let generation = services.policies.replace(config.policy);
            preparation::start(services);
            let running = tokio::runtime::Handle::try_current().map_or(0, |it| it.metrics().num_alive_tasks());
            tracing::info!(generation, running, "a new policy is in force");
            Reloaded::New(generation, config.warnings)
        }
        Err(problems) => kept(services, problems),
    }
}

fn kept(services: &Services, problems: Vec<Problem>) -> Reloaded {
    for problem in &problems {
        tracing::error!(%problem, line = problem.line, "the old policy stays in force");
    }
    services.policies.note_rejected(problems.clone());
    Reloaded::Kept(problems)
}

/// Reads the admin tokens again. Returns `None` without an admin listener.
///
/// # Errors
/// The problem of a token that cannot be read.
fn admin_tokens(services: &Services, new: &Settings) -> Result<Option<Vec<TokenHash>>, Problem> {
    if services.admin_tokens.is_empty() {
        return Ok(None);
    }
    let read = admin_tokens::read(&new.admin, &services.settings.state_dir);
    read.map(Some).map_err(|unusable| {
        Problem::new(format!("admin.{}", unusable.key), unusable.error.to_string(), "a source that holds the token")
    })
}

/// Reads the certificate revocation lists, and warns about expired ones. Certificates of their issuers are refused
/// until there are newer lists.
///
/// # Errors
/// A problem for each list that cannot be read.
fn crls(files: &[PathBuf]) -> Result<Vec<Problem>, Vec<Problem>> {
    let (mut problems, mut warnings) = (Vec::new(), Vec::new());
    for (i, file) in files.iter().enumerate() {
        let suggestion = "a current CRL, in PEM or DER".to_owned();
        let problem_at = |problem| Problem::new(format!("upstream.crls[{i}]"), problem, suggestion);
        match crl::read(file).map(|lists| lists.expired) {
            Ok(None) => {}
            Ok(Some(end)) => {
                let file = file.display();
                warnings.push(problem_at(format!("{file} expired at {end}: its issuer's certificates are refused")));
            }
            Err(error) => problems.push(problem_at(error.to_string())),
        }
    }
    if problems.is_empty() { Ok(warnings) } else { Err(problems) }
}

/// Checks the file for changes until the daemon drains, and reloads it after each change.
pub(crate) async fn watch(services: Arc<Services>, file: ConfigFile) {
    let mut seen = file.last_read();
    let mut since = Instant::now();
    while !services.drain.is_cancelled() {
        tokio::time::sleep(POLL_INTERVAL).await;
        let content = file.content().await;
        if content != seen {
            seen = content;
            since = Instant::now();
        } else if seen.is_some() && seen != file.last_read() && since.elapsed() >= SETTLED {
            once(services.clone(), file.clone()).await;
        }
    }
}

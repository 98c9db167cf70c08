//! The status document of the admin API: the state of the daemon, its policy, log, ledger, CA and connections.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use serde_json::{Value, json};
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use tokio::sync::Mutex;
use tokio::time::timeout;

use crate::admission::Admission;
use crate::audit::shipping::{ShippingReport, ShippingState};
use crate::audit::sink;
use crate::daemon::reload::ConfigFile;
use crate::flow::Services;
use crate::ledger::{ApprovalState, Millis};
use crate::policy::settings::ListenAt;
use crate::policy::store::History;

/// Maximum time to count the log's files.
const FILES_TIMEOUT: Duration = Duration::from_secs(2);

/// The parts of the status that begin with the daemon.
pub(crate) struct StatusReport {
    started_at: SystemTime,
    started: Instant,
    admin: ListenAt,
    connections: Arc<Admission>,
    /// Held while the log's files are counted. A file system that hangs occupies one thread, however many requests there are.
    counting: Arc<Mutex<()>>,
}

impl StatusReport {
    pub(crate) fn new(admin: ListenAt, connections: Arc<Admission>) -> Self {
        Self { started_at: SystemTime::now(), started: Instant::now(), admin, connections, counting: Arc::default() }
    }

    /// Returns the document. `unready` is the reason why requests are refused at present.
    pub(super) async fn document(
        &self,
        services: &Services,
        file: Option<&ConfigFile>,
        unready: Option<&'static str>,
    ) -> Value {
        let is_usable = services.ledger.check().await.is_ok();
        let listeners: Vec<_> = services.listeners.iter().map(ToString::to_string).collect();
        let total = self.connections.total();
        json!({
            "version": env!("CARGO_PKG_VERSION"),
            "ready": unready.is_none(),
            "reason": unready,
            "started_at": timestamp(self.started_at),
            "uptime_s": self.started.elapsed().as_secs(),
            "listeners": { "proxy": listeners, "admin": self.admin.to_string() },
            "policy": policy(services, file),
            "connections": { "open": total.saturating_sub(self.connections.free()), "max": total },
            "exchanges": services.audit.open_exchanges(),
            "executions": if is_usable { executions(services).await } else { Value::Null },
            "approvals": if is_usable { approvals(services).await } else { Value::Null },
            "origin_connections": { "reusable": services.forwarder.reusable_connections() },
            "audit": self.audit(services).await,
            "ledger": {
                "kind": if services.ledger.is_shared() { "shared" } else { "local" },
                "usable": is_usable,
            },
            "dns": if services.resolver.is_degraded() { "degraded" } else { "ok" },
            "ca": ca(services),
            "tokens": tokens(services),
        })
    }

    async fn audit(&self, services: &Services) -> Value {
        let path = services.settings.audit.path.clone();
        let files = match path.clone() {
            Some(path) => self.files(path).await,
            None => None,
        };
        json!({
            "path": path.map(|path| path.display().to_string()),
            "healthy": services.audit.is_healthy(),
            "waiting_lines": services.audit.waiting_lines(),
            "disk_used_percent": services.audit.disk_used(),
            "ship": services.shipping.as_deref().map(shipping),
            "files": files.as_ref().map(Vec::len),
            "bytes": files.map(|files| files.iter().fold(0_u64, |sum, size| sum.saturating_add(*size))),
        })
    }

    /// Returns the sizes of the log and of its rotated files, or `None` if they cannot be read in time.
    async fn files(&self, path: PathBuf) -> Option<Vec<u64>> {
        let counting = self.counting.clone().try_lock_owned().ok()?;
        let files = tokio::task::spawn_blocking(move || {
            let _counting = counting;
            let rotated = sink::rotated(&path).ok()?;
            let size = |path: &Path| std::fs::metadata(path).ok().map(|metadata| metadata.len());
            Some(rotated.iter().map(|(_, path)| path).chain([&path]).filter_map(|path| size(path)).collect())
        });
        timeout(FILES_TIMEOUT, files).await.ok()?.ok()?
    }
}

fn policy(services: &Services, file: Option<&ConfigFile>) -> Value {
    let policy = services.policies.snapshot();
    let History { since, rejected } = services.policies.history();
    let rejected = rejected.map(|reload| json!({ "at": timestamp(reload.at), "problems": reload.problems }));
    json!({
        "generation": policy.rules_generation(),
        "since": timestamp(since),
        "age_s": age(since),
        "file": file.map(|file| file.path().display().to_string()),
        "tasks": policy.tasks().count(),
        "rejected_reload": rejected,
    })
}

/// Returns the numbers of executions, or null if the ledger cannot be used.
async fn executions(services: &Services) -> Value {
    let counts = execution_counts(services).await;
    counts.map_or(Value::Null, |(active, ended)| json!({ "active": active, "ended": ended }))
}

/// Returns the number of approvals that wait for a decision, or null if the ledger cannot be used.
async fn approvals(services: &Services) -> Value {
    pending_approvals(services).await.map_or(Value::Null, |pending| json!({ "pending": pending }))
}

/// Returns the numbers of active and of ended executions, or `None` if the ledger cannot be used.
pub(super) async fn execution_counts(services: &Services) -> Option<(usize, usize)> {
    let executions = services.ledger.list().await.ok()?;
    let now = Millis::now();
    let ended = executions.iter().filter(|execution| execution.ended_at(now).is_some_and(|end| end <= now)).count();
    Some((executions.len().saturating_sub(ended), ended))
}

/// Returns the number of approvals that wait for a decision, or `None` if the ledger cannot be used.
pub(super) async fn pending_approvals(services: &Services) -> Option<usize> {
    let now = Millis::now();
    let approvals = services.ledger.approvals(now).await.ok()?;
    Some(approvals.iter().filter(|approval| approval.state_at(now) == ApprovalState::Pending).count())
}

fn shipping(shipping: &ShippingState) -> Value {
    let ShippingReport { to, lag, waiting_bytes, sent_lines, gaps, error } = shipping.report();
    json!({
        "to": to,
        "lag_s": lag.as_secs(),
        "waiting_bytes": waiting_bytes,
        "sent_lines": sent_lines,
        "gaps": gaps,
        "error": error,
    })
}

/// Returns the state of each minted credential.
fn tokens(services: &Services) -> Value {
    let document = services.mints.report().into_iter().map(|token| {
        json!({
            "credential": token.credential.as_str(),
            "workspace": token.workspace,
            "endpoint": token.endpoint,
            "expires_at": token.expires.map(timestamp),
            "failure": token.failure,
        })
    });
    document.collect()
}

fn ca(services: &Services) -> Value {
    let end = services.authority.not_after();
    let days = (end - OffsetDateTime::from(SystemTime::now())).whole_days();
    json!({
        "not_after": end.format(&Rfc3339).unwrap_or_default(),
        "days_left": days,
        "sha256": services.authority.fingerprint(),
    })
}

pub(super) fn timestamp(at: SystemTime) -> String {
    let at = OffsetDateTime::from(at);
    at.replace_nanosecond(0).unwrap_or(at).format(&Rfc3339).unwrap_or_default()
}

/// Returns the seconds since then, or zero if the clock was set back.
fn age(since: SystemTime) -> u64 {
    SystemTime::now().duration_since(since).unwrap_or_default().as_secs()
}

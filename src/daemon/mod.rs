//! Starts the parts of the daemon, and stops them without losing requests in flight.

mod admin_tokens;
mod approval_notifier;
mod assumed_role;
mod aws_signature;
mod billing;
mod clock_skew;
pub mod command_runner;
mod find_journal;
mod form;
mod http_sender;
mod issuer;
mod ledger;
mod listeners;
mod log_sender;
mod log_shipping;
mod own_request;
mod own_server;
pub mod precheck;
mod preparation;
pub mod reload;
mod secret_store;
pub mod takeover;
mod token_endpoint;
#[cfg_attr(not(feature = "otel"), path = "no_trace_exporter.rs")]
mod trace_exporter;
pub mod vault;

use std::collections::BTreeSet;
use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use futures_util::future::OptionFuture;
use rustix::process::{Resource, getrlimit};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use self::approval_notifier::ApprovalNotifier;
use self::command_runner::CommandRunner;
use self::listeners::Listeners;
pub use self::listeners::StartParts;
use self::log_shipping::{LogShipper, LogShipping};
use self::own_server::OwnServers;
use self::reload::{ConfigFile, Reloaded};
use self::takeover::{Successor, TakeoverSocket};
use self::trace_exporter::{TraceExporter, TraceExporting};
use crate::admission::Admission;
use crate::admission::queue::AcceptQueue;
use crate::api::admin::Admin;
use crate::api::metrics::MetricsReport;
use crate::api::metrics_listener::MetricsListener;
use crate::api::status::StatusReport;
use crate::audit::finds::Finds;
use crate::audit::retention::Retention;
use crate::audit::sink::{LogLocation, Sink, Written};
use crate::audit::traces::Traces;
use crate::fair_queue::FairQueue;
use crate::flow::caller_connections::CallerConnections;
use crate::flow::listener::{ConnectionSetup, ListenerAddress};
use crate::flow::open_counts::OpenCounts;
use crate::flow::refused_tunnel::UnreadRefusals;
use crate::flow::synthetic_addresses::SyntheticAddresses;
use crate::flow::{Services, accept, webhooks};
use crate::model::descriptors::Descriptors;
use crate::model::name::CredentialName;
use crate::model::secret::{AcceptedTokens, TokenHash};
use crate::policy::rule::Policy;
use crate::policy::settings::{Durability, ListenAt, ListenerMode, Roots, Settings};
use crate::policy::store::PolicyStore;
use crate::stages::approve::{Notices, PendingApprovals};
use crate::stages::forward::Forwarder;
use crate::stages::mint::Mints;
use crate::stages::per_execution::PerExecution;
use crate::stages::pin::{OwnEndpoints, Resolver};
use crate::stages::throttle::Throttle;
use crate::tls::authority::Authority;
use crate::tls::upstream::UpstreamTls;

/// A running proxy.
pub struct Daemon {
    services: Arc<Services>,
    proxy: Vec<ListenerAddress>,
    admin: Option<ListenAt>,
    metrics: Option<ListenAt>,
    file: Option<ConfigFile>,
    /// `None` if the sockets are the service manager's, which can start the daemon anew itself.
    takeover: Option<TakeoverSocket>,
    shipping: Option<LogShipping>,
    trace_exporting: Option<TraceExporting>,
}

/// The reason why the daemon did not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    /// The admin token cannot be read or created.
    #[error("the admin token cannot be used: {0}")]
    AdminToken(String),
    /// The audit log cannot be opened.
    #[error("the audit log cannot be opened: {0}")]
    Audit(#[source] io::Error),
    /// The interception CA cannot be used.
    #[error(transparent)]
    Authority(#[from] crate::tls::authority::AuthorityError),
    /// The ledger cannot be opened.
    #[error("the ledger cannot be opened: {0}")]
    Ledger(#[source] io::Error),
    /// An address is in use, or cannot be bound.
    #[error("cannot listen on {address}: {source}")]
    Listen {
        /// The address.
        address: ListenAt,
        /// The cause.
        source: io::Error,
    },
    /// TLS of the proxy's own listeners cannot be set up.
    #[error("proxy.tls: {0}")]
    Tls(#[from] crate::tls::listener::ListenerTlsError),
    /// The running daemon cannot be taken over.
    #[error(transparent)]
    Takeover(#[from] takeover::TakeoverError),
    /// The vault cannot be used.
    #[error("{0}: {1}")]
    Vault(std::path::PathBuf, #[source] crate::vault::VaultError),
    /// The resolver cannot be set up.
    #[error("the resolver cannot be set up: {0}")]
    Resolver(#[source] io::Error),
    /// The root certificates cannot be loaded.
    #[error(transparent)]
    Roots(#[from] crate::tls::upstream::RootsError),
}

impl Daemon {
    /// Binds the listeners and starts serving. With a file, the policy is reloaded when the file changes.
    ///
    /// # Errors
    /// [`StartError`]. No listener stays open then.
    pub async fn start(settings: Settings, policy: Policy, file: Option<ConfigFile>) -> Result<Self, StartError> {
        Self::start_on(StartParts::default(), settings, policy, file).await
    }

    /// Like [`Self::start`], with sockets passed by the service manager, or those of a daemon that is taken over, and with the
    /// process that runs commands.
    ///
    /// # Errors
    /// [`StartError`].
    pub async fn start_on(
        parts: StartParts,
        settings: Settings,
        policy: Policy,
        file: Option<ConfigFile>,
    ) -> Result<Self, StartError> {
        let commands = parts.commands.clone();
        let mut listeners = Listeners::open(parts, &settings).await?;
        if let Some(listener) = precheck::without_owners(&settings) {
            tracing::warn!(listener = %listener.at, "{}", precheck::NO_OWNERS);
        }
        let (proxy, admin) = (listeners.proxy_addresses(), listeners.admin_address());
        let metrics = listeners.metrics_address();
        let own =
            OwnEndpoints { listeners: listeners.own_addresses(), synthetic: settings.synthetic_ranges().to_vec() };
        let prepared = Prepared::of(&settings, own, admin.is_some())?;
        let descriptors = prepared.descriptors;
        // The rest needs the log and the ledger, which the old process has until its end.
        let takeover_lock = listeners.take_over(&settings)?;
        let (written, written_lines) = mpsc::channel(billing::MAX_WAITING);
        let (services, last, exporters) =
            services(prepared, settings, policy, (proxy.clone(), admin.clone()), (written, commands))?;
        let services = Arc::new(services);
        let caught_up = billing::catch_up_at_start(&services, &last).await.map_err(StartError::Audit)?;
        tokio::spawn(billing::run(services.clone(), written_lines, (!caught_up).then_some(last)));
        find_journal::restore(&services).await;
        if let Some(notes) = services.finds.notes() {
            tokio::spawn(find_journal::run(services.clone(), notes));
        }
        if services.ledger.is_shared() {
            tokio::spawn(find_journal::watch(services.clone()));
        }
        if let (Some(_), Some(file)) = (&takeover_lock, &file) {
            // The old process may have been told of changes while this one waited.
            let _ = reload::once(services.clone(), file.clone()).await;
        }
        let lifetime = services.settings.proxy.header_timeout;
        let connections = Arc::new(Admission::new(descriptors.connections, lifetime));
        let queue = Arc::new(AcceptQueue::new(connections.clone()));
        for listener in listeners.proxy {
            services.tracker.spawn(accept::run(listener, services.clone(), queue.clone()));
        }
        for listener in listeners.dns {
            services.tracker.spawn(listener.run(services.clone()));
        }
        let report = Arc::new(MetricsReport::new(connections.clone()));
        if let Some(listener) = listeners.metrics {
            tokio::spawn(MetricsListener { services: services.clone(), report: report.clone() }.run(listener));
        }
        if let Some(listener) = listeners.admin {
            let status = StatusReport::new(listener.at().clone(), connections);
            let admin = Admin { services: services.clone(), file: file.clone(), status, metrics: report };
            tokio::spawn(admin.run(listener));
        }
        let shipping = exporters.shipper.map(LogShipper::start);
        let trace_exporting = exporters.traces.map(TraceExporter::start);
        preparation::start(&services);
        tokio::spawn(webhooks::watch(services.clone()));
        if let Some(file) = &file {
            tokio::spawn(reload::watch(services.clone(), file.clone()));
        }
        let (state_dir, drain_timeout) = (&services.settings.state_dir, services.settings.proxy.drain_timeout);
        let takeover = match listeners.shared {
            Some(shared) => TakeoverSocket::open(state_dir, shared, drain_timeout).await,
            None => None,
        };
        // From now on, a new process asks this one.
        drop(takeover_lock);
        Ok(Self { services, proxy, admin, metrics, file, takeover, shipping, trace_exporting })
    }

    /// Returns the addresses of the listeners for sandboxes.
    #[must_use]
    pub fn proxy(&self) -> &[ListenerAddress] {
        &self.proxy
    }

    /// Returns the addresses of the TCP listeners for clients that use the proxy as such.
    #[must_use]
    pub fn proxy_addresses(&self) -> Vec<SocketAddr> {
        let http = self.proxy.iter().filter(|listener| listener.mode == ListenerMode::Proxy);
        http.filter_map(|listener| listener.at.tcp()).collect()
    }

    /// Returns the address of the admin listener.
    #[must_use]
    pub fn admin(&self) -> Option<&ListenAt> {
        self.admin.as_ref()
    }

    /// Returns the address of the admin listener, if it is a TCP address.
    #[must_use]
    pub fn admin_address(&self) -> Option<SocketAddr> {
        self.admin.as_ref().and_then(ListenAt::tcp)
    }

    /// Returns the address of the listener for metrics.
    #[must_use]
    pub fn metrics(&self) -> Option<&ListenAt> {
        self.metrics.as_ref()
    }

    /// Returns the interception CA's certificate in PEM.
    #[must_use]
    pub fn ca_pem(&self) -> String {
        self.services.authority.ca_pem()
    }

    /// Returns after all audit lines so far have been written. False if a write failed.
    pub async fn flush_audit(&self) -> bool {
        self.services.audit.flush().await.is_ok()
    }

    /// Puts a new policy in force and returns its generation.
    #[must_use]
    pub fn replace_policy(&self, policy: Policy) -> u64 {
        self.services.policies.replace(policy)
    }

    /// Reloads the configuration file. Returns `None` if the daemon runs without one.
    pub async fn reload(&self) -> Option<Reloaded> {
        match &self.file {
            Some(file) => Some(reload::once(self.services.clone(), file.clone()).await),
            None => None,
        }
    }

    /// Waits until a new process has the listening sockets and is ready for requests. It never returns if the sockets are the
    /// service manager's.
    pub async fn taken_over(&self) -> Successor {
        match &self.takeover {
            Some(takeover) => takeover.wait().await,
            None => std::future::pending().await,
        }
    }

    /// Stops accepting, lets each open connection have one more response within a short time, and then shuts down. New
    /// connections are those of the new process.
    pub async fn hand_over(self) -> bool {
        if let Some(takeover) = &self.takeover {
            takeover.keep_files();
        }
        self.services.last_requests.cancel();
        self.services.tracker.close();
        let last_requests = tokio::time::timeout(LAST_REQUESTS, self.services.tracker.wait());
        let _ = self.services.abort.run_until_cancelled(last_requests).await;
        // The new process, which waits for the end of this one, sends the lines that are left.
        self.stop(LogShipping::hand_over, TraceExporting::hand_over).await
    }

    /// Stops accepting, lets requests in flight finish within `drain_timeout`, aborts the others, and flushes the audit
    /// log. Returns true if nothing was aborted and the log was flushed.
    pub async fn shutdown(self) -> bool {
        self.stop(LogShipping::finish, TraceExporting::finish).await
    }

    async fn stop<S: Future<Output = ()>, T: Future<Output = ()>>(
        self,
        end_shipping: impl FnOnce(LogShipping) -> S,
        end_tracing: impl FnOnce(TraceExporting) -> T,
    ) -> bool {
        // The kernel refuses connections from now on.
        drop(self.takeover);
        self.services.drain.cancel();
        self.services.tracker.close();
        let drain_timeout = self.services.settings.proxy.drain_timeout;
        let waiting = tokio::time::timeout(drain_timeout, self.services.tracker.wait());
        let waited = self.services.abort.run_until_cancelled(waiting).await;
        // If the abort token was cancelled, tasks were aborted while this waited for them.
        let drained = matches!(waited, Some(Ok(()))) && !self.services.abort.is_cancelled();
        self.services.abort.cancel();
        let closing = tokio::time::timeout(ABORT_TIMEOUT, async {
            self.services.tracker.wait().await;
            // Tasks of h2 streams may end shortly after their connection.
            while self.services.audit.open_exchanges() > 0 {
                tokio::time::sleep(Duration::from_millis(2)).await;
            }
        });
        let closed = closing.await.is_ok();
        let flushed = self.services.audit.flush().await.is_ok();
        let shipping = OptionFuture::from(self.shipping.map(end_shipping));
        let tracing = OptionFuture::from(self.trace_exporting.map(end_tracing));
        tokio::join!(shipping, tracing);
        drained && closed && flushed
    }

    /// Returns the credentials whose values clients have sent themselves, and announces each further one.
    #[must_use]
    pub fn sent_by_clients(&self) -> watch::Receiver<BTreeSet<CredentialName>> {
        self.services.finds.sent_by_clients()
    }

    /// Returns a token that makes [`Self::shutdown`] abort the requests in flight when it is cancelled.
    #[must_use]
    pub fn abort_token(&self) -> CancellationToken {
        self.services.abort.clone()
    }
}

/// Maximum time for the last request on each connection when a new process takes over.
const LAST_REQUESTS: Duration = Duration::from_secs(2);
/// Maximum time for aborted exchanges to write their audit lines.
const ABORT_TIMEOUT: Duration = Duration::from_secs(2);

/// Divides the file descriptors that the process may open. Logs a warning if `proxy.max_connections` exceeds the limit.
fn descriptors(settings: &Settings) -> Descriptors {
    let (limit, wanted) = (getrlimit(Resource::Nofile).current, settings.proxy.max_connections);
    let divided = Descriptors::divided(limit, wanted);
    if divided.connections < wanted {
        let connections = divided.connections;
        tracing::warn!(limit, wanted, connections, "proxy.max_connections needs a higher limit of open files");
    }
    divided
}

/// The parts of the services that need neither the log nor the ledger.
struct Prepared {
    descriptors: Descriptors,
    admin_tokens: Vec<TokenHash>,
    authority: Authority,
    tls: UpstreamTls,
    resolver: Arc<Resolver>,
    connection_setup: ConnectionSetup,
}

impl Prepared {
    fn of(settings: &Settings, own: OwnEndpoints, has_admin: bool) -> Result<Self, StartError> {
        let admin_tokens = if has_admin {
            admin_tokens::read_or_create(&settings.admin, &settings.state_dir)
                .map_err(|unusable| StartError::AdminToken(unusable.error.to_string()))?
        } else {
            Vec::new()
        };
        let descriptors = descriptors(settings);
        let authority = Authority::of(&settings.interception.ca_cert, settings.interception.ca_key.as_deref())?;
        if let Some(days) = authority.expires_within_days() {
            tracing::warn!(days, "the certificate of the interception CA expires soon");
        }
        let system = settings.upstream.roots == Roots::System;
        let tls = UpstreamTls::new(system, &settings.upstream.extra_roots, &settings.upstream.crls)?;
        let resolver = Resolver::new(&settings.dns, &tls, own, &descriptors).map_err(StartError::Resolver)?;
        let connection_setup = ConnectionSetup::new(&settings.proxy)?;
        Ok(Self { descriptors, admin_tokens, authority, tls, resolver: Arc::new(resolver), connection_setup })
    }
}

/// The tasks that send to collectors, before they run.
struct Exporters {
    shipper: Option<LogShipper>,
    traces: Option<TraceExporter>,
}

fn services(
    Prepared { descriptors, admin_tokens, authority, tls, resolver, connection_setup }: Prepared,
    settings: Settings,
    policy: Policy,
    (listeners, admin): (Vec<ListenerAddress>, Option<ListenAt>),
    (written, commands): (mpsc::Sender<Written>, Option<Arc<CommandRunner>>),
) -> Result<(Services, String, Exporters), StartError> {
    let unusable = |error| StartError::Vault(settings.vault.path.clone(), error);
    let (audit_key, has_chain) = vault::audit_key(&settings).map_err(unusable)?;
    let (audit, last) =
        Sink::open(audit_location(&settings), audit_key, !has_chain, written).map_err(StartError::Audit)?;
    let traces = settings.traces.as_ref().map(|export| Arc::new(Traces::new(export.sample.millionths())));
    let audit = Arc::new(audit.with_traces(traces.clone()));
    if !has_chain {
        vault::note_chain(&settings).map_err(unusable)?;
    }
    let policies = Arc::new(PolicyStore::new(policy));
    let connect_timeout = settings.upstream.connect_timeout;
    let own_servers = OwnServers { policies: &policies, resolver: &resolver, tls: &tls, connect_timeout };
    let ledger = Arc::new(ledger::open(&settings, &own_servers, &audit).map_err(StartError::Ledger)?);
    let shipper = LogShipper::new(&settings, &own_servers, &audit);
    let trace_exporter = settings.traces.as_ref().zip(traces);
    let trace_exporter = trace_exporter.and_then(|(export, traces)| TraceExporter::new(export, traces, &own_servers));
    let mut pending_approvals = PendingApprovals::default();
    if let Some(notify) = &settings.notify {
        let (notices, approvals) = Notices::with_receiver();
        pending_approvals.notices = notices;
        let page = admin.as_ref().and_then(ListenAt::tcp).filter(|address| !address.ip().is_unspecified());
        let page = page.map(|address| format!("http://{address}/"));
        tokio::spawn(ApprovalNotifier::new(notify, &own_servers, page).run(approvals));
    }
    let finds = Arc::new(Finds::new({
        let policies = policies.clone();
        move || policies.snapshot().leak().max_finds()
    }));
    let tracker = TaskTracker::new();
    let issuer = issuer::issuer(&own_servers, commands);
    let secret = authority.derived_secret("synthetic addresses");
    let synthetic_addresses = SyntheticAddresses::new(settings.synthetic_ranges(), secret);
    let drain = CancellationToken::new();
    let mints = Mints::new(policies.clone(), audit.clone(), issuer, (tracker.clone(), drain.clone()));
    let caller_connections =
        Arc::new(CallerConnections::new(settings.proxy.max_connections_per_caller, descriptors.connections));
    let queues = Arc::<PerExecution<FairQueue>>::default();
    let services = Services {
        listeners,
        synthetic_addresses,
        connection_setup,
        webhook_prechecks: webhooks::WebhookPrechecks::default(),
        caller_connections,
        resolver,
        forwarder: Forwarder::new(
            tls,
            settings.upstream.connect_timeout,
            settings.proxy.handshake_timeout,
            &descriptors,
            queues.clone(),
        ),
        queues,
        open_counts: OpenCounts::default(),
        unread_refusals: UnreadRefusals::default(),
        policies,
        mints: Arc::new(mints),
        authority,
        audit,
        shipping: shipper.as_ref().map(LogShipper::state),
        pending_approvals,
        throttle: Throttle::new(ledger.clone(), finds.clone()),
        body_budget: Arc::default(),
        windows: Arc::default(),
        finds,
        admin_tokens: AcceptedTokens::new(admin_tokens),
        ledger,
        last_requests: CancellationToken::new(),
        drain,
        abort: CancellationToken::new(),
        tracker,
        settings,
    };
    Ok((services, last, Exporters { shipper, traces: trace_exporter }))
}

/// Returns the location of the audit log.
#[must_use]
pub fn audit_location(settings: &Settings) -> LogLocation {
    LogLocation {
        path: settings.audit.path.clone(),
        state_dir: settings.state_dir.clone(),
        synced: settings.audit.durability == Durability::Synced,
        rotate_bytes: settings.audit.rotate_bytes,
        retention: Retention { keep: settings.audit.keep, max_total: settings.audit.max_total },
        refusals_per_second: settings.audit.refusals_per_second,
    }
}

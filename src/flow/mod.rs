//! Accepts connections, runs the stages for each request, and responds.

pub mod accept;
pub(crate) mod caller_connections;
mod captured;
mod carrier;
pub(crate) mod client;
pub(crate) mod connection;
pub(crate) mod disconnect;
pub(crate) mod dns_listener;
mod dns_message;
mod dns_socket;
pub(crate) mod documents;
pub(crate) mod exchange;
pub(crate) mod http1_gate;
pub(crate) mod http1_server;
mod http2_connection;
mod http2_server;
mod http2_streams;
mod inner_server;
pub(crate) mod io;
pub mod listener;
mod open_answers;
pub(crate) mod open_counts;
pub mod peer_user;
mod proxy_header;
pub(crate) mod refused_tunnel;
pub mod respond;
pub(crate) mod self_api;
mod server_names;
mod socks;
pub(crate) mod synthetic_addresses;
pub(crate) mod tunnel;
pub mod webhooks;
pub(crate) mod websocket;
mod write_state;

use std::sync::Arc;

use self::listener::ListenerAddress;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::audit::finds::Finds;
use crate::audit::record::Record;
use crate::audit::shipping::ShippingState;
use crate::audit::sink::Sink;
use crate::fair_queue::FairQueue;
use crate::ledger::Ledger;
use crate::model::name::TaskName;
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Refusal};
use crate::model::secret::AcceptedTokens;
use crate::policy::settings::Settings;
use crate::policy::store::PolicyStore;
use crate::stages::approve;
use crate::stages::body_budget::Budget;
use crate::stages::forward::Forwarder;
use crate::stages::mint::Mints;
use crate::stages::per_execution::PerExecution;
use crate::stages::pin::Resolver;
use crate::stages::throttle::Throttle;
use crate::tls::authority::Authority;

/// The state that every request needs, made once at start.
pub struct Services {
    /// The settings, read at start.
    pub settings: Settings,
    /// The policy in force.
    pub policies: Arc<PolicyStore>,
    /// Resolves names and checks the addresses.
    pub resolver: Arc<Resolver>,
    /// Provides tokens for credentials that are minted.
    pub mints: Arc<Mints>,
    /// Connects to origins and exchanges messages with them.
    pub forwarder: Forwarder,
    /// The interception CA.
    pub authority: Authority,
    /// The audit log.
    pub audit: Arc<Sink>,
    /// The state of the shipping of the log, if lines are sent to another server.
    pub shipping: Option<Arc<ShippingState>>,
    /// The number of finds of each execution, and the stopped executions.
    pub finds: Arc<Finds>,
    /// The tokens of the admin API.
    pub(crate) admin_tokens: AcceptedTokens,
    /// Executions and their usage.
    pub ledger: Arc<Ledger>,
    /// The facts and notices of requests that wait for an approval, for the operator.
    pub pending_approvals: approve::PendingApprovals,
    /// Counts and limits calls.
    pub throttle: Throttle,
    /// The memory budget for buffered request bodies.
    pub body_budget: Arc<Budget>,
    /// The memory budget for the flow-control windows of h2 tunnels.
    pub windows: Arc<Budget>,
    /// The addresses of the listeners for sandboxes.
    pub(crate) listeners: Vec<ListenerAddress>,
    /// The addresses that the DNS listeners have answered with.
    pub(crate) synthetic_addresses: synthetic_addresses::SyntheticAddresses,
    /// Sets up accepted connections for HTTP.
    pub(crate) connection_setup: listener::ConnectionSetup,
    /// The results of the checks on registered webhooks.
    pub(crate) webhook_prechecks: webhooks::WebhookPrechecks,
    /// The connection counts of the callers.
    pub(crate) caller_connections: Arc<caller_connections::CallerConnections>,
    /// The numbers of open tunnels, WebSockets and HTTP/2 streams.
    pub(crate) open_counts: open_counts::OpenCounts,
    /// The hosts whose refusals were not fetched from tunnels.
    pub(crate) unread_refusals: refused_tunnel::UnreadRefusals,
    /// The queues for the tasks of each execution.
    pub(crate) queues: Arc<PerExecution<FairQueue>>,
    /// Cancelled when a new process takes over. The next response on each connection is its last.
    pub last_requests: CancellationToken,
    /// Cancelled when the daemon starts to stop. No new requests are served.
    pub drain: CancellationToken,
    /// Cancelled when the drain timeout has passed. Open exchanges are aborted.
    pub abort: CancellationToken,
    /// The tasks of open connections and tunnels.
    pub tracker: TaskTracker,
}

impl Services {
    /// Starts the record of a request, under the policy in force.
    fn record(&self, peer: &Peer) -> Record {
        Record::begin(&self.audit, &self.finds, self.policies.snapshot().log_values(), peer)
    }

    /// Adds finds in a refused request to its record. If there are any, waits until they have been persisted, so that a
    /// restart does not erase them.
    async fn settle(&self, refused: Option<Refusal>, record: &mut Record) {
        let Some(refusal) = refused else { return };
        if refusal == Deny::LeakDetected.into() {
            record.failed(refusal);
        } else {
            self.find_in_refused(record).await;
        }
        // A find over the limit is answered as fast as any other request of the stopped execution.
        if record.has_counted_find() {
            self.finds.settled().await;
        }
    }

    /// Counts the finds in a request that was refused before the scan. The response and the log show it without the caller's
    /// own values. Whether a value is left out confirms the caller's guess, so it counts as a find.
    async fn find_in_refused(&self, record: &mut Record) {
        let policy = self.policies.snapshot();
        let (Some(task), Some(execution)) = (record.task(), record.execution()) else { return };
        let task = policy.task(&TaskName::new(task));
        let Ok(_permit) = self.body_budget.scan_limit(execution).acquire().await else { return record.hide_request() };
        if let Some(found) = task.and_then(|task| record.own_in_refused(task.own())) {
            record.additional_find(&found, "the refused request");
        }
    }
}

//! Accepts connections, runs the stages for each request, and responds.

pub mod accept;
pub(crate) mod accept_queue;
pub(crate) mod admission;
pub(crate) mod caller_connections;
pub(crate) mod connection;
pub(crate) mod disconnect;
pub(crate) mod documents;
pub(crate) mod exchange;
pub(crate) mod http1_gate;
pub(crate) mod io;
pub mod listener;
pub mod respond;
pub(crate) mod self_api;
pub(crate) mod tunnel;
pub mod webhooks;
pub(crate) mod websocket;

use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::audit::finds::Finds;
use crate::audit::record::Record;
use crate::audit::sink::Sink;
use crate::ledger::Ledger;
use crate::model::name::TaskName;
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Refusal};
use crate::policy::settings::{ListenAt, Settings};
use crate::policy::store::PolicyStore;
use crate::stages::body_budget::Budget;
use crate::stages::forward::Forwarder;
use crate::stages::pin::Resolver;
use crate::stages::throttle::Throttle;
use crate::tls::authority::Authority;

/// The state that every request needs, made once at start.
pub struct Services {
    /// The settings, read at start.
    pub settings: Settings,
    /// The policy in force.
    pub policies: Arc<PolicyStore>,
    /// The one that resolves and judges.
    pub resolver: Arc<Resolver>,
    /// The one that dials.
    pub forwarder: Forwarder,
    /// The interception CA.
    pub authority: Authority,
    /// The audit log.
    pub audit: Arc<Sink>,
    /// How often credentials were found in requests, and who was stopped.
    pub finds: Arc<Finds>,
    /// Executions and what they have used up.
    pub ledger: Arc<Ledger>,
    /// Counts and limits calls.
    pub throttle: Throttle,
    /// The memory for request bodies that are held.
    pub bodies: Arc<Budget>,
    /// The memory for what clients may send in tunnels before it is read.
    pub windows: Arc<Budget>,
    /// Where it listens for sandboxes.
    pub(crate) listeners: Vec<ListenAt>,
    /// Sets up accepted connections for HTTP.
    pub(crate) connection_setup: listener::ConnectionSetup,
    /// Where registered webhooks lead.
    pub(crate) webhook_prechecks: webhooks::WebhookPrechecks,
    /// Connections of each caller.
    pub(crate) caller_connections: Arc<caller_connections::CallerConnections>,
    /// Cancelled when the daemon is told to stop.
    pub drain: CancellationToken,
    /// Cancelled when draining has taken long enough.
    pub abort: CancellationToken,
    /// Connections and tunnels that are open.
    pub tracker: TaskTracker,
}

impl Services {
    /// Begins the record of a request, under the policy in force.
    fn record(&self, peer: &Peer) -> Record {
        Record::begin(&self.audit, &self.finds, self.policies.snapshot().values(), peer)
    }

    /// Waits, on a find, until it has been written down: who sent it must not get away with it by a restart.
    async fn settle(&self, refused: Option<Refusal>, record: &mut Record) {
        let Some(refusal) = refused else { return };
        if refusal == Deny::LeakDetected.into() {
            record.failed(refusal);
        } else {
            self.find_in_refused(record);
        }
        if record.has_find() {
            self.finds.settled().await;
        }
    }

    /// A call that is refused before it is looked through is shown to its client without the client's own values.
    /// A redacted value confirms the caller's guess, so it counts as a find.
    fn find_in_refused(&self, record: &mut Record) {
        let policy = self.policies.snapshot();
        let task = record.task().and_then(|task| policy.task(&TaskName::new(task)));
        if let Some(found) = task.and_then(|task| record.own_in_call(task.own())) {
            record.found_besides(&found, "the refused call");
        }
    }
}

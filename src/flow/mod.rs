//! The conductor: takes connections, leads requests through the stages, answers.

pub mod accept;
pub mod admin;
mod connection;
pub mod daemon;
mod exchange;
mod io;
pub mod keep;
pub mod reload;
pub mod respond;
mod secrets;
mod tunnel;

use std::net::SocketAddr;
use std::sync::Arc;

use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::audit::record::Record;
use crate::audit::sink::Sink;
use crate::policy::settings::Settings;
use crate::policy::store::PolicyStore;
use crate::stages::forward::Forwarder;
use crate::stages::pin::Resolver;
use crate::tls::authority::Authority;

/// What every request needs, made once.
pub struct Services {
    /// What was read at start.
    pub settings: Settings,
    /// The policy in force.
    pub policies: PolicyStore,
    /// The one that resolves and judges.
    pub resolver: Resolver,
    /// The one that dials.
    pub forwarder: Forwarder,
    /// The interception CA.
    pub authority: Authority,
    /// The audit log.
    pub audit: Arc<Sink>,
    /// Cancelled when the daemon is told to stop.
    pub drain: CancellationToken,
    /// Cancelled when draining has taken long enough.
    pub abort: CancellationToken,
    /// Connections and tunnels that are open.
    pub tracker: TaskTracker,
}

impl Services {
    /// Begins the record of a request, under the policy in force.
    fn record(&self, peer: SocketAddr) -> Record {
        Record::begin(&self.audit, self.policies.snapshot().values(), peer)
    }
}

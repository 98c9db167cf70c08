//! The numbers of open tunnels, WebSockets and HTTP/2 streams, for metrics.

use prometheus_client::metrics::gauge::Gauge;

/// The numbers of what is open now.
#[derive(Default)]
pub(crate) struct OpenCounts {
    /// CONNECT tunnels, opaque and intercepted ones.
    pub(crate) tunnels: Gauge,
    /// WebSockets.
    pub(crate) websockets: Gauge,
    /// HTTP/2 streams of clients.
    pub(crate) h2_streams: Gauge,
}

/// Counts something until it is dropped.
pub(super) struct Open(Gauge);

impl Open {
    pub(super) fn count(gauge: &Gauge) -> Self {
        gauge.inc();
        Self(gauge.clone())
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.dec();
    }
}

//! The listener for metrics alone. Nobody needs a token there, so it has nothing else.

use std::sync::Arc;

use bytes::Bytes;
use http::{Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;

use super::admin::{self, Names};
use super::http_server::{self, Site};
use super::metrics::{self, MetricsReport};
use crate::admission::Slot;
use crate::flow::Services;
use crate::flow::listener::Listener;

/// The listener of `[metrics]`.
pub(crate) struct MetricsListener {
    pub(crate) services: Arc<Services>,
    pub(crate) report: Arc<MetricsReport>,
}

impl MetricsListener {
    /// Accepts connections until the daemon drains or is taken over.
    pub(crate) async fn run(self, listener: Listener) {
        http_server::run(Arc::new(self), listener).await;
    }
}

impl Site for MetricsListener {
    /// Few, because anybody may open them and each may hold an answer.
    const MAX_CONNECTIONS: usize = 16;

    fn services(&self) -> &Arc<Services> {
        &self.services
    }

    fn is_trusted(&self, _: u32) -> bool {
        false
    }

    async fn answer(&self, request: Request<Incoming>, _: bool, slot: &Slot) -> Response<Full<Bytes>> {
        if !admin::is_same_site(request.headers(), Names::Unqualified) {
            return admin::text(
                StatusCode::FORBIDDEN,
                "the Host or Origin field names another site; use an address, or a name without a dot\n",
            );
        }
        match (request.method(), request.uri().path()) {
            // Silent connections must not end one that has asked.
            (&(Method::GET | Method::HEAD), "/metrics") if !slot.identify() => {
                admin::text(StatusCode::SERVICE_UNAVAILABLE, "too many connections\n")
            }
            (&(Method::GET | Method::HEAD), "/metrics") => {
                admin::reply(StatusCode::OK, metrics::MEDIA_TYPE, self.report.text(&self.services).await)
            }
            (_, "/metrics") => admin::method_not_allowed("GET, HEAD"),
            _ => admin::text(StatusCode::NOT_FOUND, "this listener has /metrics only\n"),
        }
    }
}

//! The admin listener: health, tasks, executions, approvals, secrets and reload, with a token of its own.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderValue, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use serde_json::json;
use tokio::io::{AsyncRead, AsyncWrite};

use super::{approvals, executions, secrets};
use crate::daemon::reload;
use crate::daemon::reload::{ConfigFile, Reloaded};
use crate::flow::Services;
use crate::flow::accept_queue::{AcceptQueue, QueueStep};
use crate::flow::admission::{Admission, Slot};
use crate::flow::listener::{Accepted, Listener};
use crate::model::host::Host;
use crate::model::secret::TokenHash;

/// For one request and its answer.
const MOST_TIME: Duration = Duration::from_secs(30);
/// Largest head of a request that is read in several steps, in bytes; hyper may read as much again in the last one.
const MAX_HEAD: usize = 32_768;
/// Connections at a time.
const MAX_CONNECTIONS: usize = 64;

/// The listener and what it may do.
pub(crate) struct Admin {
    pub(crate) services: Arc<Services>,
    pub(crate) token: TokenHash,
    pub(crate) file: Option<ConfigFile>,
}

impl Admin {
    /// Accepts until the daemon drains.
    pub(crate) async fn run(self, listener: Listener) {
        let admin = Arc::new(self);
        let lifetime = admin.services.settings.proxy.header_timeout;
        let connections = Arc::new(Admission::new(MAX_CONNECTIONS, lifetime));
        let lobby = AcceptQueue::new(connections).with_timeout(MOST_TIME);
        loop {
            let accepted = tokio::select! {
                biased;
                () = admin.services.drain.cancelled() => return,
                step = lobby.next() => {
                    if let QueueStep::Serve(accepted, slot) = step {
                        tokio::spawn(admin.clone().take(accepted, slot));
                    }
                    continue;
                }
                accepted = listener.accept() => accepted,
            };
            match accepted {
                Ok(accepted) => lobby.enqueue(accepted.source(), accepted),
                Err(_) => tokio::time::sleep(Duration::from_millis(50)).await,
            }
        }
    }

    async fn take(self: Arc<Self>, accepted: Accepted, slot: Slot) {
        match accepted {
            Accepted::Tcp(stream, _) => self.serve(stream, false, slot).await,
            Accepted::Unix(stream, uid) => self.serve(stream, self.knows(uid), slot).await,
        }
    }

    /// On a Unix socket the kernel says who asks.
    fn knows(&self, uid: u32) -> bool {
        uid == rustix::process::geteuid().as_raw() || self.services.settings.admin.uids.contains(&uid)
    }

    async fn serve(self: &Arc<Self>, stream: impl AsyncRead + AsyncWrite + Unpin, known: bool, slot: Slot) {
        if known && !slot.identify() {
            return;
        }
        let service = service_fn(|request| {
            let (admin, slot) = (self.clone(), &slot);
            async move { Ok::<_, Infallible>(admin.answer(request, known, slot).await) }
        });
        let connection = http1::Builder::new()
            .timer(TokioTimer::new())
            .header_read_timeout(Duration::from_secs(10))
            // One request each, so that nobody can hold a place by asking on and on without reading.
            .keep_alive(false)
            .max_buf_size(MAX_HEAD)
            .serve_connection(TokioIo::new(stream), service);
        tokio::select! {
            ended = tokio::time::timeout(MOST_TIME, connection) => {
                if let Ok(Err(error)) = ended {
                    tracing::debug!(%error, "an admin connection broke");
                }
            }
            () = slot.evicted() => {}
            () = slot.overdue() => {}
            () = self.services.drain.cancelled() => {}
        }
    }

    async fn answer(&self, mut request: Request<Incoming>, known: bool, slot: &Slot) -> Response<Full<Bytes>> {
        if !is_for_us(request.headers()) {
            return words(StatusCode::FORBIDDEN, "the Host or Origin field names another site\n");
        }
        let allowed = methods(request.uri().path());
        let is_allowed = allowed.is_some_and(|allowed| allowed.split(", ").any(|it| it == request.method().as_str()));
        if *request.method() == Method::HEAD && is_allowed {
            // The HTTP server leaves the body out.
            *request.method_mut() = Method::GET;
        }
        let path = request.uri().path();
        match (request.method(), path) {
            (&Method::GET, "/healthz") => return words(StatusCode::OK, "ok\n"),
            (&Method::GET, "/readyz") => return self.ready().await,
            _ if !known && !self.is_authorized(request.headers()) => return unauthorized(),
            _ if !slot.identify() => return words(StatusCode::SERVICE_UNAVAILABLE, "too many connections\n"),
            _ => {}
        }
        if let Some(allowed) = allowed.filter(|_| !is_allowed) {
            return another_method(allowed);
        }
        if secrets::owns(path) {
            let (status, value) = secrets::answer(&self.services, self.file.as_ref(), request).await;
            return document(status, &value);
        }
        if executions::owns(path) {
            let (status, value) = executions::answer(&self.services, request).await;
            return document(status, &value);
        }
        if approvals::owns(path) {
            let (status, value) = approvals::answer(&self.services, request).await;
            return document(status, &value);
        }
        match (request.method(), path) {
            (&Method::GET, "/v1/tasks") => self.tasks(),
            (&Method::POST, "/v1/reload") => self.reload().await,
            _ => words(StatusCode::NOT_FOUND, "no such page\n"),
        }
    }

    async fn ready(&self) -> Response<Full<Bytes>> {
        if self.services.drain.is_cancelled() {
            return words(StatusCode::SERVICE_UNAVAILABLE, "draining\n");
        }
        if !self.services.audit.is_healthy() {
            return words(StatusCode::SERVICE_UNAVAILABLE, "the audit log cannot be written\n");
        }
        if self.services.ledger.check().await.is_err() {
            return words(StatusCode::SERVICE_UNAVAILABLE, "the ledger cannot be used\n");
        }
        words(StatusCode::OK, "ready\n")
    }

    fn tasks(&self) -> Response<Full<Bytes>> {
        let policy = self.services.policies.snapshot();
        let mut tasks: Vec<_> = policy
            .tasks()
            .map(|task| {
                let webhooks = task.webhooks().enumerate().map(|(index, target)| {
                    let state = self.services.webhook_prechecks.state(policy.generation(), task.name(), index);
                    json!({ "host": target.host().to_string(), "port": target.port(), "state": state })
                });
                let webhooks: Vec<_> = webhooks.collect();
                json!({ "task": task.name().as_str(), "approved": task.approved(), "webhooks": webhooks })
            })
            .collect();
        tasks.sort_by_key(|task| task["task"].as_str().map(str::to_owned));
        document(StatusCode::OK, &json!({ "generation": policy.generation(), "tasks": tasks }))
    }

    async fn reload(&self) -> Response<Full<Bytes>> {
        let Some(file) = &self.file else {
            return document(StatusCode::CONFLICT, &json!({ "error": "the daemon runs without a configuration file" }));
        };
        match reload::once(self.services.clone(), file.clone()).await {
            Reloaded::New(generation, warnings) => {
                document(StatusCode::OK, &json!({ "generation": generation, "warnings": warnings }))
            }
            Reloaded::Kept(problems) => document(StatusCode::UNPROCESSABLE_ENTITY, &json!({ "problems": problems })),
        }
    }

    fn is_authorized(&self, headers: &HeaderMap) -> bool {
        let mut fields = headers.get_all(AUTHORIZATION).iter();
        let (Some(field), None) = (fields.next(), fields.next()) else { return false };
        let token = field
            .to_str()
            .ok()
            .and_then(|value| value.split_once(' '))
            .filter(|(scheme, _)| scheme.eq_ignore_ascii_case("bearer"));
        token.is_some_and(|(_, token)| TokenHash::of(token.trim().as_bytes()) == self.token)
    }
}

/// Pages of other sites must not reach this listener through a browser: neither by a name that was
/// rebound to our address, nor by a request across origins.
fn is_for_us(headers: &HeaderMap) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let authority = host.to_str().unwrap_or_default();
    let name =
        authority.rsplit_once(':').map_or(authority, |(name, port)| if port.ends_with(']') { authority } else { name });
    let named_by_address = match Host::parse(name) {
        Ok(Host::Ip(_)) => true,
        Ok(Host::Name(name)) => name.as_str() == "localhost",
        Err(_) => false,
    };
    let origin_is_ours =
        headers.get(ORIGIN).is_none_or(|origin| origin.as_bytes() == format!("http://{authority}").as_bytes());
    named_by_address && origin_is_ours
}

/// The methods that a path takes; none if there is no such path.
fn methods(path: &str) -> Option<&'static str> {
    let segments: Vec<&str> = path.strip_prefix('/')?.split('/').collect();
    match segments.as_slice() {
        ["healthz" | "readyz"] | ["v1", "tasks"] => Some("GET, HEAD"),
        ["v1", "reload"] => Some("POST"),
        ["v1", "executions"] => Some("GET, HEAD, POST"),
        ["v1", "executions", _] => Some("GET, HEAD, DELETE"),
        ["v1", "executions", _, "tool_calls"] => Some("GET, HEAD"),
        ["v1", "secrets"] | ["v1", "secrets", _] => Some("GET, HEAD"),
        ["v1", "secrets", _, _] => Some("GET, HEAD, PUT, DELETE"),
        ["v1", "approvals"] => Some("GET, HEAD"),
        ["v1", "approvals", _] => Some("GET, HEAD, POST"),
        _ => None,
    }
}

/// The path is there, and takes these methods (RFC 9110 §15.5.6).
fn another_method(allowed: &'static str) -> Response<Full<Bytes>> {
    let mut response = document(StatusCode::METHOD_NOT_ALLOWED, &json!({ "error": "another method" }));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

fn words(status: StatusCode, text: &'static str) -> Response<Full<Bytes>> {
    reply(status, "text/plain; charset=utf-8", Bytes::from_static(text.as_bytes()))
}

fn document(status: StatusCode, value: &serde_json::Value) -> Response<Full<Bytes>> {
    reply(status, "application/json", format!("{value}\n").into())
}

fn unauthorized() -> Response<Full<Bytes>> {
    let mut response = words(StatusCode::UNAUTHORIZED, "the admin token is missing or wrong\n");
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

fn reply(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Full<Bytes>> {
    let mut response = Response::new(Full::new(body));
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_meant_for_this_listener_are_read() {
        let rows = [
            (Some("127.0.0.1:3129"), None, true),
            (Some("localhost:3129"), None, true),
            (Some("[::1]:3129"), None, true),
            (Some("[::1]"), None, true),
            (Some("127.0.0.1:3129"), Some("http://127.0.0.1:3129"), true),
            (Some("127.0.0.1:3129"), Some("http://evil.example"), false),
            (Some("127.0.0.1:3129"), Some("null"), false),
            (Some("rebound.example:3129"), None, false),
            (Some("localhost.evil.example"), None, false),
            (None, None, false),
        ];
        for (host, origin, want) in rows {
            let mut headers = HeaderMap::new();
            host.map(|h| headers.insert(HOST, h.parse().unwrap()));
            origin.map(|o| headers.insert(ORIGIN, o.parse().unwrap()));
            assert_eq!(is_for_us(&headers), want, "{host:?} {origin:?}");
        }
    }
}

//! The admin listener: health, status, tasks, executions, approvals, secrets and reload, protected by the admin token.

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, AUTHORIZATION, CACHE_CONTROL, CONTENT_TYPE, HOST, HeaderValue, ORIGIN, WWW_AUTHENTICATE};
use http::{HeaderMap, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::Incoming;
use serde_json::json;

use super::http_server::{self, Site};
use super::metrics::{self, MetricsReport};
use super::status::StatusReport;
use super::{approvals, decisions, executions, explain, openapi, page, secrets};
use crate::admission::Slot;
use crate::daemon::reload;
use crate::daemon::reload::{ConfigFile, Reloaded};
use crate::flow::Services;
use crate::flow::listener::Listener;
use crate::model::host::Host;
use crate::model::secret::TokenHash;

/// Maximum time between two writes of the audit log while lines wait, if it is ready.
const LOG_TIMEOUT: Duration = Duration::from_millis(500);
/// The answers of `GET /readyz` by a daemon that is ready. DNS alone is no reason to send no requests: it may be the network
/// of the machine, and addresses and `[dns].hosts` need none.
const READY: &str = "ready\n";
const READY_WITHOUT_DNS: &str = "ready\ndns: degraded\n";
/// The media type of the plain answers.
const PLAIN: &str = "text/plain; charset=utf-8";

/// The admin API and its state.
pub(crate) struct Admin {
    pub(crate) services: Arc<Services>,
    /// The configuration file, which a reload reads again.
    pub(crate) file: Option<ConfigFile>,
    pub(crate) status: StatusReport,
    pub(crate) metrics: Arc<MetricsReport>,
}

impl Admin {
    /// Accepts connections until the daemon drains or is taken over.
    pub(crate) async fn run(self, listener: Listener) {
        http_server::run(Arc::new(self), listener).await;
    }
}

impl Site for Admin {
    const MAX_CONNECTIONS: usize = 64;

    fn services(&self) -> &Arc<Services> {
        &self.services
    }

    /// Returns true if a user needs no token. The kernel reports the user id of the peer of a Unix socket.
    fn is_trusted(&self, uid: u32) -> bool {
        uid == rustix::process::geteuid().as_raw() || self.services.settings.admin.uids.contains(&uid)
    }

    async fn answer(&self, mut request: Request<Incoming>, trusted: bool, slot: &Slot) -> Response<Full<Bytes>> {
        if !is_same_site(request.headers(), Names::Localhost) {
            return text(StatusCode::FORBIDDEN, "the Host or Origin field names another site\n");
        }
        let allowed = methods(request.uri().path());
        let is_allowed = allowed.is_some_and(|allowed| allowed.split(", ").any(|it| it == request.method().as_str()));
        if *request.method() == Method::HEAD && is_allowed {
            // hyper omits the body of a response to HEAD.
            *request.method_mut() = Method::GET;
        }
        let path = request.uri().path();
        match (request.method(), path) {
            (&Method::GET, "/healthz") => return text(StatusCode::OK, "ok\n"),
            (&Method::GET, "/readyz") => return self.ready().await,
            // The page itself has nothing to hide. It asks for the token.
            (&Method::GET, "/") => return page::response(),
            _ if !trusted && !self.is_authorized(request.headers()) => return unauthorized(),
            _ if !slot.identify() => return text(StatusCode::SERVICE_UNAVAILABLE, "too many connections\n"),
            _ => {}
        }
        if let Some(allowed) = allowed.filter(|_| !is_allowed) {
            return method_not_allowed(allowed);
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
        if path == "/v1/explain" {
            let (status, value) = explain::answer(&self.services, self.file.as_ref(), request).await;
            return document(status, &value);
        }
        match (request.method(), path) {
            (&Method::GET, "/v1/decisions") => decisions::answer(&self.services, request.uri().query()),
            (&Method::GET, "/v1/status") => {
                let unready = self.unready_because().await;
                document(StatusCode::OK, &self.status.document(&self.services, self.file.as_ref(), unready).await)
            }
            (&Method::GET, "/v1/credentials") => {
                document(StatusCode::OK, &super::credentials::document(&self.services))
            }
            (&Method::GET, "/v1/tasks") => self.tasks(),
            (&Method::GET, "/metrics") => {
                reply(StatusCode::OK, metrics::MEDIA_TYPE, self.metrics.text(&self.services).await)
            }
            (&Method::GET, "/openapi.json") => document(StatusCode::OK, openapi::description()),
            (&Method::POST, "/v1/reload") => self.reload().await,
            _ => text(StatusCode::NOT_FOUND, "no such page\n"),
        }
    }
}

impl Admin {
    async fn ready(&self) -> Response<Full<Bytes>> {
        if let Some(unready) = self.unready_because().await {
            return reply(StatusCode::SERVICE_UNAVAILABLE, PLAIN, format!("{unready}\n").into());
        }
        let is_degraded = self.services.resolver.is_degraded();
        text(StatusCode::OK, if is_degraded { READY_WITHOUT_DNS } else { READY })
    }

    /// Returns the reason why requests are refused at present, if they are.
    async fn unready_because(&self) -> Option<&'static str> {
        if self.services.drain.is_cancelled() {
            return Some("draining");
        }
        // A write that hangs is no failure yet, but requests are refused meanwhile.
        if !self.services.audit.is_healthy() || self.services.audit.hangs_for(LOG_TIMEOUT).await {
            return Some("the audit log cannot be written");
        }
        if self.services.ledger.check().await.is_err() {
            return Some("the ledger cannot be used");
        }
        None
    }

    fn tasks(&self) -> Response<Full<Bytes>> {
        let policy = self.services.policies.snapshot();
        let mut tasks: Vec<_> = policy
            .tasks()
            .map(|task| {
                let webhooks = task.webhooks().enumerate().map(|(index, target)| {
                    let state = self.services.webhook_prechecks.state(policy.rules_generation(), task.name(), index);
                    json!({ "host": target.host().to_string(), "port": target.port(), "state": state })
                });
                let webhooks: Vec<_> = webhooks.collect();
                json!({ "task": task.name().as_str(), "approved": task.approved(), "webhooks": webhooks })
            })
            .collect();
        tasks.sort_by_key(|task| task["task"].as_str().map(str::to_owned));
        document(StatusCode::OK, &json!({ "generation": policy.rules_generation(), "tasks": tasks }))
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
        token.is_some_and(|(_, token)| self.services.admin_tokens.contains(TokenHash::of(token.trim().as_bytes())))
    }
}

/// The names that a request may have in `Host`. Any may have an address.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Names {
    /// `localhost`.
    Localhost,
    /// Names without a dot, as those of containers. Nobody can register one in the public DNS to rebind it to this listener.
    Unqualified,
}

/// Returns true unless a browser may have sent the request for another site's page, either through DNS rebinding or as
/// a cross-origin request.
pub(super) fn is_same_site(headers: &HeaderMap, names: Names) -> bool {
    let mut hosts = headers.get_all(HOST).iter();
    let (Some(host), None) = (hosts.next(), hosts.next()) else { return false };
    let authority = host.to_str().unwrap_or_default();
    let name =
        authority.rsplit_once(':').map_or(authority, |(name, port)| if port.ends_with(']') { authority } else { name });
    let is_local_name = match Host::parse(name) {
        Ok(Host::Ip(_)) => true,
        Ok(Host::Name(name)) => {
            name.as_str() == "localhost" || (names == Names::Unqualified && !name.as_str().contains('.'))
        }
        Err(_) => false,
    };
    let is_same_origin =
        headers.get(ORIGIN).is_none_or(|origin| origin.as_bytes() == format!("http://{authority}").as_bytes());
    is_local_name && is_same_origin
}

/// The paths, with the methods that each supports. A part in braces stands for any segment.
pub(super) const PATHS: [(&str, &str); 19] = [
    ("/", "GET, HEAD"),
    ("/healthz", "GET, HEAD"),
    ("/readyz", "GET, HEAD"),
    ("/metrics", "GET, HEAD"),
    ("/openapi.json", "GET, HEAD"),
    ("/v1/status", "GET, HEAD"),
    ("/v1/credentials", "GET, HEAD"),
    ("/v1/tasks", "GET, HEAD"),
    ("/v1/decisions", "GET, HEAD"),
    ("/v1/explain", "POST"),
    ("/v1/reload", "POST"),
    ("/v1/executions", "GET, HEAD, POST"),
    ("/v1/executions/{execution}", "GET, HEAD, DELETE"),
    ("/v1/executions/{execution}/tool_calls", "GET, HEAD"),
    ("/v1/secrets", "GET, HEAD"),
    ("/v1/secrets/{workspace}", "GET, HEAD"),
    ("/v1/secrets/{workspace}/{name}", "GET, HEAD, PUT, DELETE"),
    ("/v1/approvals", "GET, HEAD"),
    ("/v1/approvals/{approval}", "GET, HEAD, POST"),
];

/// Returns the methods that a path supports, or `None` for an unknown path.
fn methods(path: &str) -> Option<&'static str> {
    let is_it = |known: &str| {
        let same = |(known, segment): (&str, &str)| known.starts_with('{') || known == segment;
        known.split('/').count() == path.split('/').count() && known.split('/').zip(path.split('/')).all(same)
    };
    PATHS.iter().find(|(known, _)| is_it(known)).map(|(_, methods)| *methods)
}

/// Returns a 405 with the methods that the path supports (RFC 9110 §15.5.6).
pub(super) fn method_not_allowed(allowed: &'static str) -> Response<Full<Bytes>> {
    let mut response =
        document(StatusCode::METHOD_NOT_ALLOWED, &json!({ "error": "the path does not support the method" }));
    response.headers_mut().insert(ALLOW, HeaderValue::from_static(allowed));
    response
}

pub(super) fn text(status: StatusCode, body: &'static str) -> Response<Full<Bytes>> {
    reply(status, PLAIN, Bytes::from_static(body.as_bytes()))
}

pub(super) fn document(status: StatusCode, value: &serde_json::Value) -> Response<Full<Bytes>> {
    reply(status, "application/json", format!("{value}\n").into())
}

fn unauthorized() -> Response<Full<Bytes>> {
    let mut response = text(StatusCode::UNAUTHORIZED, "the admin token is missing or wrong\n");
    response.headers_mut().insert(WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
    response
}

pub(super) fn reply(status: StatusCode, kind: &'static str, body: Bytes) -> Response<Full<Bytes>> {
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
            assert_eq!(is_same_site(&headers, Names::Localhost), want, "{host:?} {origin:?}");
            assert_eq!(is_same_site(&headers, Names::Unqualified), want, "{host:?} {origin:?}");
        }
        let headers = HeaderMap::from_iter([(HOST, "exeat:9464".parse().unwrap())]);
        let among = [Names::Localhost, Names::Unqualified].map(|names| is_same_site(&headers, names));
        assert_eq!(among, [false, true]);
    }
}

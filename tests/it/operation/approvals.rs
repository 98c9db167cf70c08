//! Approvals by the operator: requested before anything is sent, bound to the exact request, and used once.

use std::time::{Duration, Instant};

use base64::Engine;
use bytes::Bytes;
use exeat::ledger::{Decision, Ledger, Millis};
use futures_util::future::join_all;
use http::{HeaderMap, Request};
use http_body_util::{Channel, Full, StreamBody};
use hyper::body::Frame;
use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::http::websocket::{self, Echo};
use crate::lab::client::{Way, auth, empty, h1, read_head};
use crate::lab::{self, KEY, Lab, LabBuilder, Origin, Reply};

/// Returns a configuration in which `api.test` and `other.test` are in an integration with these keys; `t` has a
/// credential and all tools.
fn config(port: u16, keys: &str) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\", \"other.test\"]\nports = [{port}, 8443]\nplain_http = true\n\
         {keys}\n[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\nraw = true\n\
         tools = [\"api_call\", \"http_get\", \"http_post\", \"http_request\"]\n"
    )
}

async fn lab_with(keys: &str, rest: &str) -> (Lab, Origin, String) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}{rest}", config(origin.port(), keys));
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/", origin.port());
    (lab, origin, url)
}

async fn lab(keys: &str) -> (Lab, Origin, String) {
    lab_with(keys, "").await
}

const REQUIRED: &str = "approval = \"required\"";

impl Lab {
    /// Returns the operator's answer to a request with this token and body.
    async fn operator(&self, token: Option<&str>, method: &str, path: &str, body: impl Into<Bytes>) -> Reply {
        let address = self.daemon.admin_address().unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let stream = tokio::net::TcpStream::connect(address).await.unwrap();
        let mut request = Request::builder().method(method).uri(path).header("host", address.to_string());
        if let Some(token) = token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let reply = Reply::read(h1(stream, request.body(Full::new(body.into())).unwrap()).await).await;
        reply.assert_described(method, path);
        reply
    }

    fn admin_token(&self) -> String {
        std::fs::read_to_string(self.dir.path().join("admin.token")).unwrap()
    }

    async fn admin(&self, method: &str, path: &str, body: &str) -> (u16, Value) {
        let reply = self.operator(Some(&self.admin_token()), method, path, body.to_owned()).await;
        (reply.status.as_u16(), serde_json::from_slice(&reply.body).unwrap_or_default())
    }

    async fn decide(&self, id: &str, decision: &str) -> (u16, Value) {
        let body = json!({ "decision": decision }).to_string();
        self.admin("POST", &format!("/v1/approvals/{id}"), &body).await
    }

    async fn approve(&self, id: &str) {
        let (status, shown) = self.decide(id, "approve").await;
        assert_eq!((status, shown["state"].as_str()), (200, Some("approved")), "{shown}");
    }

    async fn approvals(&self) -> Vec<Value> {
        let (status, shown) = self.admin("GET", "/v1/approvals", "").await;
        assert_eq!(status, 200);
        shown.as_array().unwrap().clone()
    }

    async fn state(&self, id: &str) -> String {
        let (_, shown) = self.admin("GET", &format!("/v1/approvals/{id}"), "").await;
        shown["state"].as_str().unwrap().to_owned()
    }

    /// Starts another execution of `t`. Returns its id and its `Proxy-Authorization` value.
    async fn execution(&self) -> (String, String) {
        let (status, started) = self.admin("POST", "/v1/executions", "{\"task\":\"t\"}").await;
        assert_eq!(status, 201, "{started}");
        let id = started["id"].as_str().unwrap().to_owned();
        let pair = format!("{id}:{}", started["token"].as_str().unwrap());
        (id, format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(pair)))
    }

    async fn get_as(&self, who: &str, url: &str) -> Reply {
        let mut request = self.absolute("GET", url).body(empty()).unwrap();
        request.headers_mut().insert("proxy-authorization", who.parse().unwrap());
        self.send(request).await
    }
}

/// Returns the id in a refusal that waits for a decision.
fn pending(reply: &Reply) -> String {
    reply.assert_refused(403, "approval_pending");
    let problem = reply.problem();
    assert_eq!((problem["retry"].as_str(), problem["stage"].as_str()), (Some("later"), Some("approve")));
    problem["approval"].as_str().unwrap().to_owned()
}

/// The operator sees everything that the decision is bound to, without values, as long as this daemon has it in memory.
#[tokio::test(flavor = "multi_thread")]
async fn an_operator_sees_what_a_decision_is_bound_to() {
    let (lab, _, url) = lab(REQUIRED).await;
    let url = format!("{url}path?page=2");
    let post = async |lab: &Lab, more: &[(&'static str, &str)], body: Vec<u8>| {
        let mut request = lab.absolute("POST", &url).header("exeat-credential", "KEY");
        for (name, value) in more {
            request = request.header(*name, *value);
        }
        pending(&lab.send(request.body(Full::new(Bytes::from(body))).unwrap()).await)
    };
    let id = post(&lab, &[("x-note", "for you")], b"{\"to\": \"all\"}".to_vec()).await;
    let (status, shown) = lab.admin("GET", &format!("/v1/approvals/{id}"), "").await;
    assert_eq!(status, 200, "{shown}");
    let bound = &shown["bound"];
    assert_eq!(bound["query"], "page=2", "{bound:#}");
    assert_eq!(bound["credentials"], json!([{ "name": "KEY", "places": ["header:authorization"] }]), "{bound:#}");
    assert!(bound["fields"].as_array().unwrap().contains(&json!(["x-note", "for you"])), "{bound:#}");
    assert_eq!((&bound["body"]["text"], &bound["body"]["is_whole"]), (&json!("{\"to\": \"all\"}"), &json!(true)));
    assert_eq!(bound["is_complete"], true, "{bound:#}");
    assert_eq!(bound["digest"].as_str().unwrap().len(), 64);
    assert!(!shown.to_string().contains(KEY) && !bound.to_string().contains("proxy-authorization"), "{bound:#}");
    // The list and the client's own answer do not have it.
    assert!(lab.approvals().await.iter().all(|one| one.get("bound").is_none()));
    let own = Request::builder().uri(format!("/v1/self/approvals/{id}")).header("host", lab.proxy.to_string());
    let own = lab.send(own.header("proxy-authorization", auth()).body(empty()).unwrap()).await;
    assert!(own.status == 200 && own.problem()["id"] == *id && own.problem().get("bound").is_none(), "{own:?}");

    let large = post(&lab, &[], "é".repeat(50_000).into_bytes()).await;
    let (_, shown) = lab.admin("GET", &format!("/v1/approvals/{large}"), "").await;
    let body = &shown["bound"]["body"];
    assert_eq!((&body["bytes"], &body["is_whole"]), (&json!(100_000), &json!(false)));
    assert_eq!(body["text"].as_str().unwrap().chars().count(), 8_000);
    assert_eq!(shown["bound"]["is_complete"], false);
    let long = "x".repeat(40_000);
    let long = post(&lab, &[("x-long", &long), ("x-last", "hidden")], Vec::new()).await;
    let (_, shown) = lab.admin("GET", &format!("/v1/approvals/{long}"), "").await;
    assert_eq!(shown["bound"]["is_complete"], false, "a field is cut");
    let binary = post(&lab, &[], vec![0xff; 100]).await;
    let (_, shown) = lab.admin("GET", &format!("/v1/approvals/{binary}"), "").await;
    assert_eq!((&shown["bound"]["body"]["text"], &shown["bound"]["body"]["bytes"]), (&Value::Null, &json!(100)));
    let lab = lab.restarted().await;
    let (_, shown) = lab.admin("GET", &format!("/v1/approvals/{id}"), "").await;
    assert_eq!((&shown["bound"], &shown["state"]), (&Value::Null, &json!("pending")));
}

/// A value of another task is masked for the operator too, who is told that not all is shown. Neither is a field that is not text.
#[tokio::test(flavor = "multi_thread")]
async fn a_masked_request_is_not_shown_as_complete() {
    const OTHER: &str = "another-tasks-value-9f3c71d0";
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    std::fs::write(builder.dir.path().join("other"), OTHER).unwrap();
    let text = format!(
        "[admin]\nlisten = \"127.0.0.1:0\"\n{}[credentials.OTHER]\nauth_type = \"bearer\"\nvalue = \"file:other\"\n\
         domains = [\"api.test\"]\n[tasks.other]\nintegrations = [\"api\"]\ncredentials = [\"OTHER\"]\n",
        config(origin.port(), REQUIRED)
    );
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/", origin.port());
    let bound = async |query: &str, field: &[u8], body: &str| {
        let request = lab.absolute("POST", &format!("{url}{query}")).header("x-note", field);
        let id = pending(&lab.send(request.body(Full::new(Bytes::from(body.to_owned()))).unwrap()).await);
        let (_, shown) = lab.admin("GET", &format!("/v1/approvals/{id}"), "").await;
        assert!(!shown.to_string().contains(OTHER), "{shown}");
        shown["bound"].clone()
    };
    let whole = bound("?a=b", b"note", "text").await;
    assert_eq!((&whole["is_complete"], &whole["body"]["is_whole"]), (&json!(true), &json!(true)), "{whole:#}");
    for (query, field, body) in
        [(OTHER, &b"note"[..], "text"), ("", OTHER.as_bytes(), "text"), ("", b"note", OTHER), ("", b"\xff", "text")]
    {
        let query = if query.is_empty() { String::new() } else { format!("?{query}") };
        let bound = bound(&query, field, body).await;
        assert_eq!(bound["is_complete"], false, "{bound:#}");
        assert_eq!(bound["body"]["is_whole"], body != OTHER, "{bound:#}");
    }
    // In the path, and in one whose end is cut because the log and the ledger store so many bytes of a URL only.
    for path in [OTHER.to_owned(), "x".repeat(2_040), format!("{}{OTHER}", "x".repeat(2_040))] {
        assert_eq!(bound(&path, b"note", "text").await["is_complete"], false, "{path}");
    }
    assert_eq!(bound(&"x".repeat(1_900), b"note", "text").await["is_complete"], true);
}

#[tokio::test(flavor = "multi_thread")]
async fn approval_is_requested_before_anything_leaves_on_every_way() {
    for way in Way::ALL {
        let (lab, origin, url) = lab(REQUIRED).await;
        let url = format!("{url}path?secret=query");
        let id = pending(&lab.by(way, "POST", &url, &[("x-a", "1")], "body").await);
        assert_eq!((origin.connections(), origin.seen().len()), (0, 0), "{way:?}");
        // A tunnel resolves its host when it is opened; the query reveals nothing of the request.
        assert_eq!(lab.dns.queries("api.test") == 0, way == Way::Absolute, "{:?}", lab.dns.all_queries());
        let line = lab.ended(0).await;
        let want = json!(["refused", "deny", "approval_pending", "approve", id, "api", null]);
        let fields = ["event", "verdict", "code", "stage", "approval", "rule", "addr"].map(|key| line[key].clone());
        assert_eq!(json!(fields), want, "{line}");

        assert_eq!(pending(&lab.by(way, "POST", &url, &[("x-a", "1")], "body").await), id, "requested once");
        assert_eq!(lab.decisions().await, Vec::<Value>::new());
        lab.approve(&id).await;
        let decisions = lab.decisions().await;
        let [decision] = &*decisions else { panic!("{decisions:#?}") };
        let of = |key: &str| decision[key].as_str().unwrap_or_default().to_owned();
        assert_eq!(
            [of("approval"), of("decision"), of("execution"), of("task"), of("method")],
            [&*id, "approve", "t", "t", "POST"],
            "{decision}"
        );
        let reply = lab.by(way, "POST", &url, &[("x-a", "1")], "body").await;
        assert_eq!(reply.status, 200, "{way:?} {reply:?}");
        assert_eq!((origin.last().body, origin.last().uri.query()), (Bytes::from("body"), Some("secret=query")));
        let again = pending(&lab.by(way, "POST", &url, &[("x-a", "1")], "body").await);
        assert_ne!(again, id, "the approval is used once");
        assert_eq!(lab.state(&id).await, "used");
        let closed = lab.ended(2).await;
        assert_eq!((closed["event"].as_str(), closed["approval"].as_str()), (Some("closed"), Some(&*id)), "{closed}");
        let lines = lab.audit().await;
        let decided = lines.iter().find(|line| line["event"] == "decided").unwrap();
        assert_eq!((decided["approval"].as_str(), decided["id"] == closed["id"]), (Some(&*id), true), "{decided}");
        assert_eq!(origin.seen().len(), 1);
    }
}

#[tokio::test]
async fn plain_http_requires_approval_too() {
    let builder = LabBuilder::new().await;
    let origin = Origin::http().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let text = format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", config(origin.port(), REQUIRED));
    let lab = builder.proxy(&text).await;
    let url = format!("http://api.test:{}/", origin.port());
    let id = pending(&lab.get(&url).await);
    assert_eq!((origin.connections(), lab.dns.queries("api.test")), (0, 0));
    lab.approve(&id).await;
    assert_eq!(lab.get(&url).await.status, 200);
    pending(&lab.get(&url).await);
    // Through CONNECT it is the same request.
    let id = pending(&lab.get(&url).await);
    let to = format!("api.test:{}", origin.port());
    let inner = Request::builder().uri("/").header("host", &to).body(empty()).unwrap();
    let reply = Reply::read(h1(lab.tunnel(&to).await, inner).await).await;
    assert_eq!(pending(&reply), id);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_integration_selects_the_requests_to_approve() {
    /// A tool, a method, and whether the request waits.
    type Asked = (&'static str, &'static str, bool);
    let rows: [(&str, &[Asked]); 4] = [
        (REQUIRED, &[("", "GET", true), ("", "POST", true), ("http_get", "GET", true)]),
        (
            "approval = { methods = [\"POST\"] }",
            &[("", "GET", false), ("", "POST", true), ("http_get", "GET", false), ("http_post", "POST", true)],
        ),
        (
            "approval = { tools = [\"http_get\"] }",
            &[("", "GET", false), ("http_get", "GET", true), ("http_post", "POST", false)],
        ),
        (
            "approval = { methods = [\"POST\"], tools = [\"http_request\"] }",
            &[
                ("", "POST", false),
                ("http_request", "GET", false),
                ("http_request", "POST", true),
                ("http_post", "POST", false),
            ],
        ),
    ];
    for (keys, requests) in rows {
        let (lab, _, url) = lab(keys).await;
        for (tool, method, waits) in requests {
            let fields: &[_] = if tool.is_empty() { &[] } else { &[("exeat-tool", *tool)] };
            let reply = lab.by(Way::Absolute, method, &url, fields, "").await;
            if *waits {
                let id = pending(&reply);
                let shown = lab.admin("GET", &format!("/v1/approvals/{id}"), "").await.1;
                assert_eq!(shown["tool"].as_str().unwrap_or_default(), *tool, "{shown}");
            } else {
                assert_eq!(reply.status, 200, "{keys} {tool} {method}: {reply:?}");
            }
        }
    }
}

#[tokio::test]
async fn an_integration_sets_the_validity_of_approvals() {
    for (keys, want) in [(REQUIRED, 600), ("approval = { expires = \"24h\" }", 86_400)] {
        let (lab, _, url) = lab(keys).await;
        pending(&lab.get(&url).await);
        let shown = lab.approvals().await.remove(0);
        let time = |key: &str| {
            let text = shown[key].as_str().unwrap();
            time::OffsetDateTime::parse(text, &time::format_description::well_known::Rfc3339).unwrap()
        };
        assert_eq!((time("expires_at") - time("created_at")).whole_seconds(), want, "{shown}");
    }
}

/// A request, with all parts that a test may change.
#[derive(Clone)]
struct Sent<'a> {
    way: Way,
    method: &'a str,
    url: String,
    fields: Vec<(&'a str, &'a str)>,
    body: &'a str,
}

impl Sent<'_> {
    async fn asked(&self, lab: &Lab) -> String {
        pending(&lab.by(self.way, self.method, &self.url, &self.fields, self.body).await)
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approval_covers_every_part_of_a_request() {
    let (lab, origin, base) = lab(REQUIRED).await;
    let port = origin.port();
    let sent = Sent {
        way: Way::Absolute,
        method: "POST",
        url: format!("{base}path?q=1"),
        fields: vec![("x-a", "1"), ("x-a", "2"), ("x-b", "3"), ("content-type", "text/plain")],
        body: "body",
    };
    let id = sent.asked(&lab).await;
    // Hop-by-hop fields, and fields that differ between protocols.
    let mut same: Vec<Sent> = Way::ALL.map(|way| Sent { way, ..sent.clone() }).into();
    let mut reordered = sent.clone();
    reordered.fields.rotate_left(2);
    same.push(reordered);
    for more in [("x-hop", "1"), ("keep-alive", "5"), ("te", "trailers"), ("expect", "100-continue")] {
        let mut hop = sent.clone();
        hop.fields.extend([more, ("connection", "x-hop, keep-alive, te")]);
        same.push(hop);
    }
    for (n, same) in same.into_iter().enumerate() {
        assert_eq!(same.asked(&lab).await, id, "{n}");
    }
    let with = |change: &dyn Fn(&mut Sent<'static>)| {
        let mut changed = Sent {
            way: sent.way,
            method: "POST",
            url: sent.url.clone(),
            fields: vec![("x-a", "1"), ("x-a", "2"), ("x-b", "3"), ("content-type", "text/plain")],
            body: "body",
        };
        change(&mut changed);
        changed
    };
    let changes: Vec<Sent> = vec![
        with(&|sent| sent.method = "PUT"),
        with(&|sent| sent.method = "PATCH"),
        with(&|sent| sent.url = format!("https://other.test:{port}/path?q=1")),
        with(&|sent| sent.url = "https://api.test:8443/path?q=1".to_owned()),
        with(&|sent| sent.url = format!("http://api.test:{port}/path?q=1")),
        with(&|sent| sent.url = format!("{base}Path?q=1")),
        with(&|sent| sent.url = format!("{base}path/?q=1")),
        with(&|sent| sent.url = format!("{base}path?q=2")),
        with(&|sent| sent.url = format!("{base}path?q=1&")),
        with(&|sent| sent.url = format!("{base}path?")),
        with(&|sent| sent.url = format!("{base}path")),
        with(&|sent| sent.fields[0].1 = "9"),
        with(&|sent| sent.fields[2].0 = "x-c"),
        with(&|sent| sent.fields.swap(0, 1)),
        with(&|sent| sent.fields = vec![("x-a", "1, 2"), ("x-b", "3"), ("content-type", "text/plain")]),
        with(&|sent| sent.fields.truncate(3)),
        with(&|sent| sent.fields.push(("x-d", ""))),
        with(&|sent| sent.fields.push(("cookie", "a=b"))),
        with(&|sent| sent.fields.push(("authorization", "Bearer mine"))),
        with(&|sent| sent.fields.push(("exeat-credential", "KEY"))),
        with(&|sent| sent.fields.push(("authorization", "Bearer ${secrets.KEY}"))),
        with(&|sent| sent.fields.push(("exeat-tool", "http_request"))),
        with(&|sent| sent.fields.push(("exeat-tool", "http_post"))),
        with(&|sent| sent.body = "bodY"),
        with(&|sent| sent.body = "body "),
        with(&|sent| sent.body = ""),
    ];
    let mut ids = vec![id.clone()];
    for changed in &changes {
        ids.push(changed.asked(&lab).await);
    }
    let all = ids.len();
    ids.sort();
    ids.dedup();
    assert_eq!(ids.len(), all, "two requests have the same id");
    assert_eq!((origin.connections(), lab.approvals().await.len()), (0, all));
    // None of them passes on another request's approval.
    lab.approve(&id).await;
    for changed in &changes {
        assert_ne!(changed.asked(&lab).await, id);
    }
    assert_eq!(lab.state(&id).await, "approved");
    assert_eq!(
        lab.by(Way::TunnelH2, "POST", &sent.url, &sent.fields, "body").await.status,
        200,
        "the id does not depend on the way"
    );
}

#[tokio::test]
async fn an_approval_covers_trailers() {
    let (lab, origin, url) = lab(REQUIRED).await;
    let send = async |trailer: Option<&str>| {
        let mut frames = vec![Frame::data(Bytes::from("body"))];
        frames.extend(trailer.map(|value| {
            let mut trailers = HeaderMap::new();
            trailers.insert("x-sum", value.parse().unwrap());
            Frame::trailers(trailers)
        }));
        let frames = frames.into_iter().map(Ok::<_, std::convert::Infallible>);
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let request = Request::builder().method("POST").uri(&url).header("content-length", "4").body(body).unwrap();
        let mut h2 = lab.h2(&format!("api.test:{}", origin.port())).await;
        Reply::read(h2.send_request(request).await.unwrap()).await
    };
    let id = pending(&send(Some("1")).await);
    assert_eq!(pending(&send(Some("1")).await), id);
    assert_ne!(pending(&send(Some("2")).await), id);
    assert_ne!(pending(&send(None).await), id);
    lab.approve(&id).await;
    assert_eq!(send(Some("1")).await.status, 200);
    assert_eq!((origin.last().body, origin.last().trailers["x-sum"].to_str().unwrap()), ("body".into(), "1"));
}

/// A client may choose a new placeholder mark each time.
#[tokio::test]
async fn an_approval_covers_a_credentials_name_and_place_not_its_placeholder() {
    let (lab, origin, url) = lab(REQUIRED).await;
    let send = async |nonce: &str, before: &str| {
        let mark = format!("{before}${{{nonce}.KEY}}");
        let fields = [("exeat-tool", "http_request"), ("exeat-swap", nonce), ("authorization", &*mark)];
        lab.by(Way::Absolute, "GET", &url, &fields, "").await
    };
    let id = pending(&send("nonce-of-16-bytes-a", "Bearer ").await);
    assert_eq!(pending(&send("nonce-of-16-bytes-b", "Bearer ").await), id);
    assert_ne!(pending(&send("nonce-of-16-bytes-b", "token ").await), id);
    lab.approve(&id).await;
    assert_eq!(send("nonce-of-16-bytes-c", "Bearer ").await.status, 200);
    assert_eq!(origin.last().headers["authorization"], format!("Bearer {KEY}"));
}

#[tokio::test(flavor = "multi_thread")]
async fn an_approval_admits_one_of_ten_concurrent_requests() {
    let (lab, origin, url) = lab(REQUIRED).await;
    let ten = async || {
        let send = |n: usize| lab.by(Way::ALL[n % Way::ALL.len()], "POST", &url, &[], "body");
        join_all((0..10).map(send)).await
    };
    let mut ids: Vec<_> = ten().await.iter().map(pending).collect();
    ids.dedup();
    assert_eq!(ids.len(), 1, "one approval for all");
    lab.approve(&ids[0]).await;
    let (passed, refused): (Vec<_>, Vec<_>) = ten().await.into_iter().partition(|reply| reply.status == 200);
    assert_eq!((passed.len(), origin.seen().len()), (1, 1));
    let mut new: Vec<_> = refused.iter().map(pending).collect();
    new.dedup();
    assert_eq!((new.len(), new[0] == ids[0]), (1, false));
}

#[tokio::test]
async fn a_denied_request_stays_denied() {
    let (lab, origin, url) = lab(REQUIRED).await;
    let id = pending(&lab.get(&url).await);
    let (status, shown) = lab.decide(&id, "deny").await;
    assert_eq!((status, shown["state"].as_str()), (200, Some("denied")));
    for _ in 0..2 {
        let reply = lab.get(&url).await;
        reply.assert_refused(403, "approval_denied");
        assert_eq!(
            (reply.problem()["approval"].as_str(), reply.problem()["retry"].as_str()),
            (Some(&*id), Some("never"))
        );
    }
    let line = lab.ended(1).await;
    assert_eq!((line["code"].as_str(), line["approval"].as_str()), (Some("approval_denied"), Some(&*id)));
    assert_eq!(origin.connections(), 0);
}

#[tokio::test]
async fn approvals_are_per_execution_and_a_stopped_one_uses_none() {
    let (lab, origin, url) = lab(REQUIRED).await;
    let ((one, as_one), (_, as_two)) = (lab.execution().await, lab.execution().await);
    let id = pending(&lab.get_as(&as_one, &url).await);
    assert_ne!(pending(&lab.get_as(&as_two, &url).await), id);
    assert_ne!(pending(&lab.get(&url).await), id);
    lab.approve(&id).await;
    pending(&lab.get_as(&as_two, &url).await);
    pending(&lab.get(&url).await);
    assert_eq!(lab.admin("DELETE", &format!("/v1/executions/{one}"), "").await.0, 200);
    lab.get_as(&as_one, &url).await.assert_refused(403, "execution_stopped");
    assert_eq!((origin.connections(), lab.state(&id).await.as_str()), (0, "approved"));
}

#[tokio::test]
async fn approvals_survive_a_restart() {
    let (lab, origin, url) = lab(REQUIRED).await;
    let (waits, passes) = (format!("{url}waits"), format!("{url}passes"));
    let (waiting, approved) = (pending(&lab.get(&waits).await), pending(&lab.get(&passes).await));
    lab.approve(&approved).await;
    let lab = lab.restarted().await;
    assert_eq!(pending(&lab.get(&waits).await), waiting);
    assert_eq!(lab.get(&passes).await.status, 200);
    assert_ne!(pending(&lab.get(&passes).await), approved);
    lab.approve(&waiting).await;
    assert_eq!(lab.get(&waits).await.status, 200);
    assert_eq!(origin.seen().len(), 2);
}

/// A Redis server on a port of its own for the duration of the test.
struct Server(std::process::Child);

impl Server {
    fn start() -> (Self, u16) {
        let free = std::net::TcpListener::bind(("127.0.0.1", 0)).unwrap().local_addr().unwrap().port();
        let mut command = std::process::Command::new("redis-server");
        command.args(["--bind", "127.0.0.1", "--save", "", "--port"]).arg(free.to_string());
        let server = Self(command.stdout(std::process::Stdio::null()).spawn().expect("redis-server must be installed"));
        (server, free)
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs redis-server"]
async fn a_fleet_requests_one_approval_and_admits_one_request() {
    let (_server, port) = Server::start();
    // Proxies with separate vaults share a signing key.
    let mut key = tempfile::NamedTempFile::new().unwrap();
    std::io::Write::write_all(&mut key, "0f".repeat(32).as_bytes()).unwrap();
    let key_line = format!("key = \"file:{}\"\n", key.path().display());
    let shared = format!("[ledger]\nstore = \"redis://127.0.0.1:{port}\"\n{key_line}");
    let (one, origin, url) = lab_with(REQUIRED, &shared).await;
    let admin = "[admin]\nlisten = \"127.0.0.1:0\"\n";
    let two = LabBuilder::new().await.proxy(&format!("{admin}{}{shared}", config(origin.port(), REQUIRED))).await;
    let start = Instant::now();
    while one.get(&url).await.header("exeat-refusal") != Some("approval_pending") {
        assert!(start.elapsed() < lab::TIMEOUT);
    }
    let id = pending(&one.get(&url).await);
    assert_eq!(pending(&two.get(&url).await), id);
    assert_eq!(one.approvals().await, two.approvals().await);
    two.approve(&id).await;
    assert_eq!(one.get(&url).await.status, 200);
    assert_ne!(pending(&two.get(&url).await), id);
    assert_eq!((one.decide(&id, "deny").await.0, origin.seen().len()), (409, 1));
}

#[tokio::test]
async fn expired_approvals_admit_nothing() {
    let (lab, origin, url) = lab(REQUIRED).await;
    let (waits, passes) = (format!("{url}waits"), format!("{url}passes"));
    let (waiting, approved) = (pending(&lab.get(&waits).await), pending(&lab.get(&passes).await));
    // As if they had been requested long ago.
    let lab = lab
        .restarted_after(async |dir| {
            let start = Instant::now();
            let ledger = loop {
                match Ledger::embedded(&dir.join("ledger.exeat")) {
                    Ok(ledger) => break ledger,
                    // The thread of the stopped daemon releases it shortly after.
                    Err(error) => assert!(start.elapsed() < lab::TIMEOUT, "{error}"),
                }
                tokio::task::yield_now().await;
            };
            let asked = ledger.approvals(Millis::now()).await.unwrap();
            let execution = ledger.find(&asked[0].execution).await.unwrap().unwrap();
            ledger.restart(execution).await.unwrap();
            let then = Millis(Millis::now().0 - 60_000);
            for old in asked {
                let id = old.id.clone();
                let expires_at = then.plus(Duration::from_secs(10));
                ledger.ask(exeat::ledger::Approval { created_at: then, expires_at, ..old }, then).await.unwrap();
                if id == approved {
                    ledger.decide(&id, Decision::Approve, then).await.unwrap();
                }
            }
        })
        .await;
    for id in [&waiting, &approved] {
        assert_eq!(lab.state(id).await, "expired");
        let (status, said) = lab.decide(id, "approve").await;
        assert_eq!((status, said["state"].as_str()), (409, Some("expired")), "{said}");
    }
    assert_ne!(pending(&lab.get(&waits).await), waiting);
    assert_ne!(pending(&lab.get(&passes).await), approved);
    assert_eq!(origin.connections(), 0);
}

#[tokio::test]
async fn a_body_to_approve_is_read_completely_and_needs_a_length() {
    let plan = "plan = \"p\"\n[plans.p.raw]\nmax_request_bytes = \"2MB\"\n";
    for (rest, most) in [("", 1_000_000), (plan, 2_000_000)] {
        let (lab, origin, url) = lab_with(REQUIRED, rest).await;
        let large = format!(
            "POST {url}sink HTTP/1.1\r\nHost: api.test:{}\r\nProxy-Authorization: {}\r\nContent-Length: {}\r\n\r\n",
            origin.port(),
            auth(),
            most + 1
        );
        let mut stream = lab.connect().await;
        stream.write_all(large.as_bytes()).await.unwrap();
        let head = read_head(&mut stream).await;
        assert!(head.starts_with("HTTP/1.1 413") && head.contains("exeat-refusal: request_too_large"), "{head}");

        let (mut sender, body) = Channel::<Bytes>::new(1);
        sender.send_data(Bytes::from_static(b"x")).await.unwrap();
        let chunked = lab.absolute("POST", &url).body(body).unwrap();
        lab.send(chunked).await.assert_refused(413, "request_too_large");
        let line = lab.ended(1).await;
        assert_eq!(line["rule"], "approval needs a body of known length", "{line}");
        assert!(lab.approvals().await.is_empty());

        let body = "x".repeat(most);
        let id = pending(&lab.by(Way::TunnelH1, "POST", &format!("{url}sink"), &[], &body).await);
        let other = format!("{}y", &body[1..]);
        assert_ne!(pending(&lab.by(Way::TunnelH1, "POST", &format!("{url}sink"), &[], &other).await), id);
        assert_eq!(origin.connections(), 0);
        lab.approve(&id).await;
        let reply = lab.by(Way::TunnelH2, "POST", &format!("{url}sink"), &[], &body).await;
        assert_eq!((reply.status.as_u16(), reply.text()), (200, &*most.to_string()));
    }
}

#[tokio::test]
async fn leaks_are_found_before_an_approval_is_requested() {
    let (lab, origin, url) = lab(REQUIRED).await;
    lab.by(Way::Absolute, "POST", &url, &[], KEY).await.assert_refused(403, "leak_detected");
    // Also far beyond the size that is read completely without an approval.
    let far = format!("{}{KEY}", "x".repeat(500_000));
    lab.by(Way::TunnelH1, "POST", &url, &[], &far).await.assert_refused(403, "leak_detected");
    assert!(lab.approvals().await.is_empty(), "no approval is requested");
    // The request was approved before the text was known to be a value.
    const LATE: &str = "a-value-that-becomes-known-late";
    let id = pending(&lab.by(Way::Absolute, "POST", &url, &[], LATE).await);
    lab.approve(&id).await;
    std::fs::write(lab.dir.path().join("late"), LATE).unwrap();
    let text = config(origin.port(), REQUIRED).replace("env:KEY", "file:late");
    lab.reload(&text);
    lab.by(Way::Absolute, "POST", &url, &[], LATE).await.assert_refused(403, "leak_detected");
    assert_eq!((origin.connections(), lab.state(&id).await.as_str()), (0, "approved"));
}

#[tokio::test]
async fn a_policy_without_approvals_uses_none() {
    let (lab, origin, url) = lab(REQUIRED).await;
    let id = pending(&lab.get(&url).await);
    lab.approve(&id).await;
    lab.reload(&config(origin.port(), ""));
    assert_eq!(lab.get(&url).await.status, 200);
    assert_eq!(lab.state(&id).await, "approved");
    lab.reload(&config(origin.port(), REQUIRED));
    assert_eq!(lab.get(&url).await.status, 200);
    assert_eq!(lab.state(&id).await, "used");
}

#[tokio::test(flavor = "multi_thread")]
async fn unapproved_requests_in_flight_end_when_approval_becomes_required() {
    let (lab, origin, url) = lab("").await;
    let stall = format!("{url}stall");
    let begun = async |n: usize| {
        let start = Instant::now();
        while origin.seen().len() < n {
            assert!(start.elapsed() < lab::TIMEOUT);
            tokio::task::yield_now().await;
        }
    };
    let (reply, ()) = tokio::join!(lab.get(&stall), async {
        begun(1).await;
        lab.reload(&config(origin.port(), REQUIRED));
    });
    reply.assert_refused(403, "approval_pending");
    assert_eq!(reply.problem().get("approval"), None, "no approval was requested yet");
    // A request that was approved continues under the next policy that requires approval.
    let id = pending(&lab.get(&stall).await);
    lab.approve(&id).await;
    let goes_on = lab.get(&stall);
    tokio::pin!(goes_on);
    tokio::select! {
        reply = &mut goes_on => panic!("{reply:?}"),
        () = begun(2) => {}
    }
    lab.reload(&config(origin.port(), "approval = { expires = \"1h\" }"));
    assert!(tokio::time::timeout(Duration::from_millis(300), goes_on).await.is_err());
}

#[tokio::test]
async fn a_websockets_handshake_is_approved() {
    let builder = LabBuilder::new().await;
    let echo = Echo::start(&builder, Some(&["http/1.1"])).await;
    let text = format!("[admin]\nlisten = \"127.0.0.1:0\"\n{}", config(echo.port, REQUIRED));
    let lab = builder.proxy(&text).await;
    let to = format!("api.test:{}", echo.port);
    let url = format!("wss://{to}/ws");
    let shake = async |key: Option<&str>, fields: &[(&str, &str)]| {
        let mut request = websocket::ask(&url, fields);
        if let Some(key) = key {
            request.headers_mut().insert("sec-websocket-key", key.parse().unwrap());
        }
        let (mut head, ()) = request.into_parts();
        head.uri = "/ws".parse().unwrap();
        h1(lab.tls(&to, &["http/1.1"]).await, Request::from_parts(head, empty())).await
    };
    let id = pending(&Reply::read(shake(None, &[]).await).await);
    assert_ne!(pending(&Reply::read(shake(None, &[("sec-websocket-protocol", "chat")]).await).await), id);
    let plain = Request::builder().uri("/ws").header("host", &to).header("sec-websocket-version", "13");
    assert_ne!(pending(&lab.send_in_tunnel(&to, plain.body(empty()).unwrap()).await), id, "a GET is no handshake");
    lab.approve(&id).await;
    assert_eq!(shake(Some("AAAAAAAAAAAAAAAAAAAAAA=="), &[]).await.status(), 101, "each handshake has its own key");
    assert_ne!(pending(&Reply::read(shake(None, &[]).await).await), id);
}

#[tokio::test(flavor = "multi_thread")]
async fn pending_approvals_are_limited_per_execution() {
    let (lab, _, url) = lab(REQUIRED).await;
    let (_, other) = lab.execution().await;
    for n in 0..exeat::ledger::MAX_OPEN {
        pending(&lab.get(&format!("{url}{n}")).await);
    }
    let reply = lab.get(&format!("{url}more")).await;
    reply.assert_refused(429, "concurrency_limited");
    assert_eq!(reply.problem()["limit"], json!({ "name": "open_approvals", "allowed": exeat::ledger::MAX_OPEN }));
    pending(&lab.get_as(&other, &format!("{url}more")).await);
    let id = pending(&lab.get(&format!("{url}0")).await);
    lab.decide(&id, "deny").await;
    pending(&lab.get(&format!("{url}more")).await);
}

#[tokio::test]
async fn the_operator_sees_the_request_without_secrets() {
    let (lab, origin, url) = lab("approval = { tools = [\"api_call\"] }").await;
    let fields = [("exeat-tool", "api_call"), ("exeat-credential", "KEY"), ("x-more", "hidden")];
    let id = pending(&lab.by(Way::Absolute, "DELETE", &format!("{url}things/1?also=hidden"), &fields, "").await);
    let shown = lab.approvals().await.remove(0);
    let keys: Vec<_> = shown.as_object().unwrap().keys().map(String::as_str).collect();
    let want = ["created_at", "execution", "expires_at", "id", "method", "state", "task", "tool", "url"];
    assert_eq!(keys, want);
    let url = format!("https://api.test:{}/things/1", origin.port());
    for (key, want) in [
        ("id", &*id),
        ("execution", "t"),
        ("task", "t"),
        ("tool", "api_call"),
        ("method", "DELETE"),
        ("url", &*url),
        ("state", "pending"),
    ] {
        assert_eq!(shown[key], want, "{shown}");
    }
}

/// The path of a webhook is its secret.
#[tokio::test]
async fn a_webhook_is_approved_under_its_hosts_integration() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("hooks.test").await;
    let url = format!("https://hooks.test:{}/services/path", origin.port());
    let lab = builder
        .proxy(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[integrations.hooks]\nallowed_domains = [\"hooks.test\"]\n\
             approval = {{ tools = [\"webhook\"] }}\n[tasks.t]\nintegrations = [\"hooks\", \"webhook\"]\n\
             tools = [\"webhook\"]\nwebhook_urls = [\"{url}\"]\n"
        ))
        .await;
    let send = async || lab.by(Way::Absolute, "POST", &url, &[("exeat-tool", "webhook")], "{}").await;
    let id = pending(&send().await);
    let shown = lab.approvals().await.remove(0)["url"].as_str().unwrap().to_owned();
    assert!(shown.starts_with(&format!("https://hooks.test:{}/sha256:", origin.port())), "{shown}");
    assert!(!shown.contains("services"), "{shown}");
    let (_, whole) = lab.admin("GET", &format!("/v1/approvals/{id}"), "").await;
    assert_eq!(whole["bound"]["is_complete"], false, "a hash is not the path: {whole:#}");
    lab.approve(&id).await;
    assert_eq!(send().await.status, 200);
}

#[tokio::test]
async fn the_operator_decides_once_and_errors_are_explained() {
    let (lab, _, url) = lab(REQUIRED).await;
    let id = pending(&lab.get(&url).await);
    let path = format!("/v1/approvals/{id}");
    for (method, path) in [("GET", "/v1/approvals"), ("GET", &*path), ("POST", &*path)] {
        for token in [None, Some("wrong"), Some(lab::TOKEN)] {
            assert_eq!(lab.operator(token, method, path, "{\"decision\":\"approve\"}").await.status, 401);
        }
    }
    let long = format!("{{\"decision\":\"approve\",\"x\":\"{}\"}}", "x".repeat(70_000));
    let rows = [
        ("POST", &*path, "", 400),
        ("POST", &*path, "{}", 400),
        ("POST", &*path, "{\"decision\":\"Approve\"}", 400),
        ("POST", &*path, "{\"decision\":\"approve\",\"more\":1}", 400),
        ("POST", &*path, &*long, 413),
        ("POST", "/v1/approvals/nope", "{\"decision\":\"approve\"}", 404),
        ("POST", "/v1/approvals", "{\"decision\":\"approve\"}", 405),
        ("DELETE", &*path, "", 405),
        ("GET", "/v1/approvals/nope", "", 404),
        ("GET", "/v1/approvals/a/b", "", 404),
        ("GET", "/v1/approvals?state=all", "", 422),
        ("GET", "/v1/approvals?task=t", "", 422),
    ];
    for (method, path, body, status) in rows {
        let (said, why) = lab.admin(method, path, body).await;
        assert_eq!(said, status, "{method} {path} {why}");
        assert!(why["error"].is_string(), "{why}");
    }
    assert_eq!(lab.state(&id).await, "pending");
    lab.approve(&id).await;
    for decision in ["approve", "deny"] {
        let (status, said) = lab.decide(&id, decision).await;
        assert_eq!((status, said["state"].as_str()), (409, Some("approved")), "{said}");
    }
    assert_eq!(lab.get(&url).await.status, 200);
    assert_eq!(lab.decide(&id, "deny").await.1["state"], "used");
    let other = pending(&lab.get(&url).await);
    for (state, want) in [("pending", vec![&*other]), ("used", vec![&*id]), ("denied", vec![])] {
        let (_, listed) = lab.admin("GET", &format!("/v1/approvals?state={state}"), "").await;
        let ids: Vec<_> = listed.as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap()).collect();
        assert_eq!(ids, want, "{state}");
    }
    let all: Vec<_> = lab.approvals().await.iter().map(|one| one["id"].clone()).collect();
    assert_eq!(all, [json!(id), json!(other)], "oldest first");
}

/// This holds even if an integration names the admin listener, and with the operator's own token.
#[tokio::test]
async fn approvals_cannot_be_decided_through_the_proxy() {
    let (lab, _, url) = lab(REQUIRED).await;
    let id = pending(&lab.get(&url).await);
    let admin = lab.daemon.admin_address().unwrap();
    lab.dns.set("admin.test", &["127.0.0.1"]);
    let (token, path) = (lab.admin_token(), format!("/v1/approvals/{id}"));
    lab.reload(&format!(
        "[integrations.admin]\nallowed_domains = [\"127.0.0.1\", \"admin.test\"]\nports = [{}]\nplain_http = true\n\
         [tasks.t]\nintegrations = [\"admin\"]\n",
        admin.port()
    ));
    let body = || Full::new(Bytes::from("{\"decision\":\"approve\"}"));
    for host in ["127.0.0.1", "admin.test"] {
        let to = format!("{host}:{}", admin.port());
        let request = lab.absolute("POST", &format!("http://{to}{path}"));
        let request = request.header("authorization", format!("Bearer {token}")).body(body()).unwrap();
        lab.send(request).await.assert_refused(508, "loop_detected");
        let (head, _) = lab.try_connect(&to).await;
        assert!(head.starts_with("HTTP/1.1 508") && head.contains("exeat-refusal: loop_detected"), "{head}");
    }
    // The proxy's own listener has no such path.
    let own = format!(
        "POST {path} HTTP/1.1\r\nHost: {}\r\n{{auth}}Authorization: Bearer {token}\r\nConnection: close\r\n\
         Content-Length: 22\r\n\r\n{{\"decision\":\"approve\"}}",
        lab.proxy
    );
    let answer = lab.raw(&own).await;
    assert!(answer.contains("exeat-refusal: ") && !answer.starts_with("HTTP/1.1 2"), "{answer}");
    assert_eq!(lab.state(&id).await, "pending");
}

/// A client that stores no state can ask which of its requests are waiting.
#[tokio::test(flavor = "multi_thread")]
async fn an_execution_sees_its_own_pending_approvals() {
    let (lab, _, url) = lab(REQUIRED).await;
    let (other, who) = lab.execution().await;
    let mut asked = Vec::new();
    for path in ["a", "b", "c"] {
        asked.push(pending(&lab.get(&format!("{url}{path}")).await));
    }
    let foreign = pending(&lab.get_as(&who, &format!("{url}d")).await);
    let waiting = async |who: &str| {
        let request = Request::builder().uri("/v1/self/approvals").header("host", "proxy");
        let reply = lab.send(request.header("proxy-authorization", who).body(empty()).unwrap()).await;
        let told = reply.problem();
        for one in told["approvals"].as_array().unwrap() {
            assert_eq!(one["state"], "pending", "{told}");
        }
        let ids = told["approvals"].as_array().unwrap().iter().map(|one| one["id"].as_str().unwrap().to_owned());
        ids.collect::<Vec<_>>()
    };
    assert_eq!(waiting(&auth()).await, asked, "oldest first");
    assert_eq!(waiting(&who).await, [foreign]);
    lab.approve(&asked[0]).await;
    assert_eq!(lab.decide(&asked[2], "deny").await.0, 200);
    assert_eq!(waiting(&auth()).await, asked[1..2]);
    assert_ne!(other, "t");
}

/// Values of all tasks are removed from an approval. What its execution sees must not confirm a guess of one.
#[tokio::test(flavor = "multi_thread")]
async fn an_execution_cannot_test_guesses_with_its_approvals() {
    let builder = LabBuilder::new().await;
    let value = "k7qz2mxv9lpw4svt6erru8ybon3chd5j";
    std::fs::write(builder.dir.path().join("value"), value).unwrap();
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "[admin]\nlisten = \"127.0.0.1:0\"\n[integrations.asked]\nallowed_domains = [\"api.test\", \"*.api.test\"]\n\
             ports = [{port}]\napproval = \"required\"\n[integrations.other]\nallowed_domains = [\"other.test\"]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"other.test\"]\n\
             [tasks.t]\nintegrations = [\"asked\"]\n[tasks.u]\nintegrations = [\"other\"]\n\
             credentials = [\"KEY\"]\n"
        ))
        .await;
    let wrong = value.replace('k', "x");
    let seen = async |method: &str, host: &str| {
        let reply = lab.by(Way::Absolute, method, &format!("https://{host}:{port}/"), &[], "").await;
        let id = pending(&reply);
        let request = Request::builder().uri(format!("/v1/self/approvals/{id}")).header("host", "proxy");
        let shown = lab.send(request.header("proxy-authorization", auth()).body(empty()).unwrap()).await.problem();
        (shown["method"].clone(), shown["url"].clone())
    };
    let named = json!(format!("https://api.test:{port}/"));
    assert_eq!(seen("POST", "api.test").await, (json!("POST"), named.clone()));
    for guess in [value, wrong.as_str()] {
        assert_eq!(seen(guess, "api.test").await, (json!(null), named.clone()), "{guess}");
        assert_eq!(seen("GET", &format!("{guess}.api.test")).await, (json!("GET"), json!(null)), "{guess}");
    }
}

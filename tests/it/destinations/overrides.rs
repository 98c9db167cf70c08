//! Fields by which an origin derives another method or path than the one that was checked.

use bytes::Bytes;
use http::{HeaderMap, Request};
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;

use crate::lab::client::Way;
use crate::lab::{Lab, LabBuilder, Origin, Reply};

const OVERRIDES: [(&str, &str); 13] = [
    ("x-original-url", "/admin"),
    ("x-rewrite-url", "/admin"),
    ("x-original-uri", "/admin"),
    ("x-forwarded-uri", "/admin"),
    ("x-original-method", "DELETE"),
    ("x-forwarded-method", "DELETE"),
    ("x-http-method", "DELETE"),
    ("x-http-method-override", "DELETE"),
    ("X-HTTP-METHOD_Override", "DELETE"),
    ("x-method-override", "DELETE"),
    ("script_name", "/open"),
    ("path-info", "/admin"),
    ("X_Script_Name", "/open"),
];

async fn lab(integration: &str, task: &str) -> (Lab, Origin, String) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n{integration}\n\
         [tasks.t]\nintegrations = [\"api\"]\n{task}\n",
        origin.port()
    );
    let url = format!("https://api.test:{}/open", origin.port());
    (builder.proxy(&text).await, origin, url)
}

/// Returns the override fields that arrived.
fn received_overrides(headers: &HeaderMap) -> Vec<String> {
    let is_one = |name: &str| OVERRIDES.iter().any(|(known, _)| known.eq_ignore_ascii_case(name));
    headers.keys().map(ToString::to_string).filter(|name| is_one(name)).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_field_overrides_the_checked_method_or_path() {
    // The last: a request that needs no approval must not become one that does.
    let restricting = [
        "methods = [\"GET\"]",
        "paths = [\"/open\"]",
        "approval = { methods = [\"DELETE\"] }",
        "methods = [\"GET\"]\npaths = [\"/*\"]",
    ];
    for integration in restricting {
        let (lab, origin, url) = lab(integration, "").await;
        for way in Way::ALL {
            let fields = [&OVERRIDES[..], &[("x-kept", "1")]].concat();
            let reply = lab.by(way, "GET", &url, &fields, "").await;
            assert_eq!(reply.status, 200, "{integration} {way:?}: {reply:?}");
            let seen = origin.last();
            assert_eq!(received_overrides(&seen.headers), [""; 0], "{integration} {way:?}");
            assert_eq!(seen.headers["x-kept"], "1");
        }
        for line in lab.audit().await {
            assert!(line["code"].is_null(), "{line}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn override_fields_pass_if_every_method_and_path_is_allowed() {
    let (lab, origin, url) = lab("", "").await;
    for way in Way::ALL {
        assert_eq!(lab.by(way, "GET", &url, &OVERRIDES, "").await.status, 200);
        assert_eq!(received_overrides(&origin.last().headers).len(), OVERRIDES.len(), "{way:?}: {:?}", origin.last());
    }
    assert_eq!(lab.ended(0).await["response_status"], 200);
}

/// A tool that only reads cannot delete, whatever the integration allows.
#[tokio::test(flavor = "multi_thread")]
async fn no_field_overrides_the_method_of_a_tool() {
    let (lab, origin, url) = lab("", "tools = [\"http_get\", \"http_request\"]").await;
    for (tool, passes) in [("http_get", false), ("http_request", true)] {
        let fields = [&OVERRIDES[..], &[("exeat-tool", tool)]].concat();
        let reply = lab.by(Way::Absolute, "GET", &url, &fields, "").await;
        assert_eq!(reply.status, 200, "{reply:?}");
        assert_eq!(!received_overrides(&origin.last().headers).is_empty(), passes, "{tool}");
    }
    assert_eq!(lab.ended(0).await["tool"], "http_get");
}

#[tokio::test(flavor = "multi_thread")]
async fn no_trailer_overrides_the_checked_method_or_path() {
    for integration in ["", "methods = [\"POST\"]"] {
        let (lab, origin, url) = lab(integration, "").await;
        let mut trailers = HeaderMap::new();
        for (name, value) in OVERRIDES {
            trailers.append(http::HeaderName::try_from(name).unwrap(), value.parse().unwrap());
        }
        trailers.append("x-sum", "1".parse().unwrap());
        let frames = [Frame::data(Bytes::from_static(b"x")), Frame::trailers(trailers)];
        let frames = frames.into_iter().map(Ok::<_, std::io::Error>);
        let body = StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync();
        let mut sender = lab.h2(&format!("api.test:{}", origin.port())).await;
        let reply = Reply::read(sender.send_request(Request::post(url).body(body).unwrap()).await.unwrap()).await;
        assert_eq!(reply.status, 200, "{reply:?}");
        let names: Vec<_> = origin.last().trailers.keys().map(ToString::to_string).collect();
        assert_eq!(names, ["x-sum"], "{integration}");
        assert_eq!(lab.ended(0).await["response_status"], 200);
    }
}

//! Methods, paths and ports: refused before anything leaves, and forwarded exactly as checked.

use http::Request;

use crate::lab::client::empty;
use crate::lab::{Lab, LabBuilder, Origin, Reply};

async fn restricted_lab() -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nmethods = [\"GET\"]\npaths = [\"/public/*\", \"/~me/*\"]\n[tasks.t]\nintegrations = [\"api\"]\n"
    );
    (builder.proxy(&text).await, origin)
}

/// Each request in three ways: absolute form, h1 in a tunnel, h2 in a tunnel.
async fn three_ways(lab: &Lab, origin: &Origin, method: &str, path: &str) -> [Reply; 3] {
    let to = format!("api.test:{}", origin.port());
    let url = format!("https://{to}{path}");
    let inner = Request::builder().method(method).uri(path).header("host", &to).body(empty()).unwrap();
    let mut h2 = lab.h2(&to).await;
    let h2_request = Request::builder().method(method).uri(&url).body(empty()).unwrap();
    [
        lab.send(lab.absolute(method, &url).body(empty()).unwrap()).await,
        lab.send_in_tunnel(&to, inner).await,
        Reply::read(h2.send_request(h2_request).await.unwrap()).await,
    ]
}

#[tokio::test]
async fn methods_and_paths_are_checked_alike_on_every_way() {
    let (lab, origin) = restricted_lab().await;
    let rows = [
        ("POST", "/public/x", "method_not_allowed"),
        ("get", "/public/x", "method_not_allowed"),
        ("GET", "/admin", "path_not_allowed"),
        ("GET", "/public", "path_not_allowed"),
        ("GET", "/public/../admin", "path_not_allowed"),
        ("GET", "/public/%2e%2e/admin", "path_not_allowed"),
        ("GET", "/public/.%2E/admin", "path_not_allowed"),
        ("GET", "/public/..;/admin", "path_not_allowed"),
        ("GET", "/public/..%3b/admin", "path_not_allowed"),
        ("GET", "/public/%5c..%5cadmin", "path_not_allowed"),
        ("GET", "/public%2f..%2fadmin", "path_not_allowed"),
        ("GET", "/public/%252e%252e/admin", "path_not_allowed"),
        ("GET", "//public/x", "path_not_allowed"),
        ("GET", "/public//x", "path_not_allowed"),
        ("GET", "/PUBLIC/x", "path_not_allowed"),
        ("GET", "/public/%00", "path_not_allowed"),
    ];
    for (n, (method, path, code)) in rows.iter().enumerate() {
        for reply in three_ways(&lab, &origin, method, path).await {
            reply.assert_refused(403, code);
        }
        for way in 0..3 {
            let line = lab.ended(n * 3 + way).await;
            assert_eq!(
                (line["event"].as_str(), line["code"].as_str()),
                (Some("refused"), Some(*code)),
                "{method} {path}"
            );
        }
    }
    assert_eq!(origin.connections(), 0);
}

#[tokio::test]
async fn the_checked_bytes_are_the_forwarded_bytes() {
    let (lab, origin) = restricted_lab().await;
    let rows = [
        ("/public/a%2Db?x=%2e%2e/", "/public/a-b?x=%2e%2e/"),
        ("/%7eme/%e2%82%ac", "/~me/%E2%82%AC"),
        ("/public/a;v=1?", "/public/a;v=1?"),
        ("/public/?q", "/public/?q"),
    ];
    for (sent, forwarded) in rows {
        for reply in three_ways(&lab, &origin, "GET", sent).await {
            assert_eq!(reply.status, 200, "{sent}");
            assert_eq!(origin.last().uri.path_and_query().unwrap().as_str(), forwarded);
        }
    }
}

#[tokio::test]
async fn an_unrestricted_path_is_forwarded_unchanged() {
    let (lab, origin) = crate::lab::simple().await;
    for path in ["/a/../b", "/a%2Fb/%7e", "//a//b", "/a;b/..;/c?x=/../y", "/%e2%82%ac"] {
        for reply in three_ways(&lab, &origin, "GET", path).await {
            assert_eq!(reply.status, 200, "{path}");
            assert_eq!(origin.last().uri.path_and_query().unwrap().as_str(), path);
        }
    }
}

#[tokio::test]
async fn refuses_other_ports_and_single_label_names() {
    let (lab, origin) = restricted_lab().await;
    lab.get("https://api.test/public/x").await.assert_refused(403, "port_not_allowed");
    let (head, _) = lab.try_connect("api.test:22").await;
    assert!(head.contains("exeat-refusal: port_not_allowed"), "{head}");
    lab.get("https://api/public/x").await.assert_refused(403, "host_not_allowed");
    assert_eq!((origin.connections(), lab.dns.all_queries().len()), (0, 0));
}

#[tokio::test]
async fn observe_allows_only_public_destinations_and_records_them() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    builder.dns.set("seen.example", &["127.0.0.1"]);
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n[tasks.t]\nintegrations = [\"api\"]\nobserve = true\n"
    );
    let lab = builder.proxy(&text).await;
    // The name is allowed and resolved; its address is checked under the public rule, which no CIDR widens.
    lab.get("https://seen.example/").await.assert_refused(403, "address_not_allowed");
    assert_eq!(lab.dns.queries("seen.example"), 2);
    lab.get("http://seen.example/").await.assert_refused(403, "host_not_allowed");
    lab.get("https://127.0.0.1/").await.assert_refused(403, "host_not_allowed");
    assert_eq!(lab.get(&format!("https://api.test:{port}/")).await.status, 200);
}

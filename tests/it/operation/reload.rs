//! A new policy applies to the next request, to open tunnels and to existing pins.

use http::Request;
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::lab::client::empty;
use crate::lab::{self, LabBuilder, Reply};

#[tokio::test]
async fn requests_in_an_open_tunnel_follow_the_new_policy() {
    let (lab, origin) = lab::simple().await;
    let port = origin.port();
    let to = format!("api.test:{port}");
    let mut h2 = lab.h2(&to).await;
    let request = || Request::builder().uri(format!("https://{to}/")).body(empty()).unwrap();
    assert_eq!(h2.send_request(request()).await.unwrap().status(), 200);

    lab.reload(&lab::allow_api(port).replace("ports", "methods = [\"POST\"]\nports"));
    Reply::read(h2.send_request(request()).await.unwrap()).await.assert_refused(403, "method_not_allowed");

    lab.reload("[tasks.t]\n");
    Reply::read(h2.send_request(request()).await.unwrap()).await.assert_refused(403, "host_not_allowed");

    lab.reload(&format!("{}\n[integrations.none]\nallowed_domains = [\"x.test\"]\n", lab::allow_api(port)));
    assert_eq!(h2.send_request(request()).await.unwrap().status(), 200, "allowed again");
}

#[tokio::test]
async fn a_pin_is_checked_again_under_the_new_policy() {
    let (lab, origin) = lab::simple().await;
    let port = origin.port();
    let to = format!("api.test:{port}");
    let mut h2 = lab.h2(&to).await;
    let request = || Request::builder().uri(format!("https://{to}/")).body(empty()).unwrap();
    assert_eq!(h2.send_request(request()).await.unwrap().status(), 200);
    // The same names, with the loopback closed again.
    let closed = lab::allow_api(port);
    let dir = lab.dir.path();
    std::fs::write(dir.join("closed.toml"), closed.replace("[tasks.t]", "[tasks.t]\ntoken = \"file:token\"")).unwrap();
    let file = exeat::daemon::reload::ConfigFile::new(&dir.join("closed.toml"), dir);
    let _ = lab.daemon.replace_policy(file.load().unwrap_or_else(|problems| panic!("{problems:?}")).policy);
    Reply::read(h2.send_request(request()).await.unwrap()).await.assert_refused(403, "address_not_allowed");
    assert_eq!(lab.dns.queries("api.test"), 2, "no further query");
}

#[tokio::test]
async fn a_forbidden_opaque_tunnel_is_closed() {
    let builder = LabBuilder::new().await;
    let (port, _) = lab::origin::raw("never", b"").await;
    builder.dns.set("sealed.test", &["127.0.0.1"]);
    let text = format!(
        "[integrations.s]\nallowed_domains = [\"sealed.test\"]\nports = [{port}]\nmode = \"opaque\"\n[tasks.t]\nintegrations = [\"s\"]\n"
    );
    let lab = builder.proxy(&text).await;
    let mut stream = lab.tunnel(&format!("sealed.test:{port}")).await;
    let config = lab::client::client_config(rustls::RootCertStore::empty(), &[]);
    let mut client =
        rustls::ClientConnection::new(std::sync::Arc::new(config), "sealed.test".try_into().unwrap()).unwrap();
    let mut hello = Vec::new();
    client.write_tls(&mut hello).unwrap();
    stream.write_all(&hello).await.unwrap();
    while lab.audit().await.is_empty() {
        tokio::task::yield_now().await;
    }
    lab.reload(&text);
    lab.reload(&text.replace("sealed.test", "other.test"));
    let mut rest = Vec::new();
    let _ = tokio::time::timeout(lab::TIMEOUT, stream.read_to_end(&mut rest)).await.expect("the tunnel is closed");
    let line = lab.ended(0).await;
    assert_eq!((line["event"].as_str(), line["code"].as_str()), (Some("closed"), Some("host_not_allowed")));
}

#[tokio::test]
async fn draining_lets_a_request_in_flight_finish() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut h2 = lab.h2(&to).await;
    let (mut send, body) = http_body_util::Channel::<bytes::Bytes>::new(1);
    let request = Request::builder().method("POST").uri(format!("https://{to}/echo")).body(body).unwrap();
    let response = tokio::spawn(async move { h2.send_request(request).await.unwrap() });
    send.send_data("first ".into()).await.unwrap();
    let response = response.await.unwrap();
    let lab::Lab { daemon, proxy, .. } = lab;
    let stopped = tokio::spawn(daemon.shutdown());
    // The daemon no longer accepts connections.
    let start = std::time::Instant::now();
    loop {
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox: it connects to the proxy")]
        let refused = tokio::net::TcpStream::connect(proxy).await.is_err();
        if refused {
            break;
        }
        assert!(start.elapsed() < lab::TIMEOUT, "still accepting connections");
    }
    send.send_data("second".into()).await.unwrap();
    drop(send);
    assert_eq!(Reply::read(response).await.text(), "first second");
    assert!(stopped.await.unwrap(), "no request was aborted");
}

#[tokio::test]
async fn requests_aborted_at_the_end_of_draining_are_logged() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let to = format!("api.test:{}", origin.port());
    let lab = builder.proxy(&format!("[proxy]\ndrain_timeout = \"300ms\"\n{}", lab::allow_api(origin.port()))).await;
    let mut held = Vec::new();
    for path in ["/stall", "/stall-body", "/stall-body"] {
        let mut h2 = lab.h2(&to).await;
        let request = Request::builder().uri(format!("https://{to}{path}")).body(empty()).unwrap();
        held.push(tokio::spawn(async move { (h2.send_request(request).await, h2) }));
    }
    while origin.seen().len() < 3 {
        tokio::task::yield_now().await;
    }
    let log = lab.audit_file();
    assert!(!lab.daemon.shutdown().await, "a request was aborted");
    let text = std::fs::read_to_string(log).unwrap();
    assert_eq!((text.matches("\"decided\"").count(), text.matches("\"closed\"").count()), (3, 3), "{text}");
}

#[tokio::test]
async fn a_request_that_begins_while_draining_gets_a_refusal() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    // A request in flight keeps the daemon draining.
    let mut h2 = lab.h2(&to).await;
    let request = Request::builder().uri(format!("https://{to}/stall-body")).body(empty()).unwrap();
    let held = h2.send_request(request).await.unwrap();
    let mut late = lab.connect().await;
    late.write_all(format!("GET https://{to}/ HTTP/1.1\r\nHost: {to}\r\n").as_bytes()).await.unwrap();
    // The proxy has begun to read it once a later request has been answered.
    assert_eq!(lab.get(&format!("https://{to}/")).await.status, 200);
    let breaker = lab.daemon.abort_token();
    let log = lab.audit_file();
    let lab::Lab { daemon, dir, .. } = lab;
    let stopped = tokio::spawn(daemon.shutdown());
    tokio::task::yield_now().await;
    late.write_all(b"\r\n").await.unwrap();
    let text = lab::client::read_to_end(&mut late).await;
    assert!(text.starts_with("HTTP/1.1 503 ") && text.contains("exeat-refusal: draining\r\n"), "{text}");
    breaker.cancel();
    assert!(!stopped.await.unwrap(), "the download was aborted");
    assert!(std::fs::read_to_string(log).unwrap().contains("\"code\":\"draining\""));
    drop((held, dir));
}

/// An endless answer is a way out just like a tunnel.
#[tokio::test]
async fn requests_in_flight_end_when_they_are_no_longer_allowed() {
    let narrowed = |port: u16, more: &str| {
        format!(
            "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n{more}[tasks.t]\nintegrations = [\"api\"]\n"
        )
    };
    for way in lab::client::Way::ALL {
        for (more, code) in [
            ("methods = [\"POST\"]\n", "method_not_allowed"),
            ("paths = [\"/elsewhere\"]\n", "path_not_allowed"),
            ("", "address_not_allowed"),
        ] {
            let (lab, origin) = lab::simple().await;
            let url = format!("https://api.test:{}", origin.port());
            let lab = std::sync::Arc::new(lab);
            let ask = |path: &str| {
                let (lab, url) = (lab.clone(), format!("{url}{path}"));
                tokio::spawn(async move { lab.by(way, "GET", &url, &[], "").await })
            };
            let (waiting, streaming) = (ask("/stall"), ask("/stall-body"));
            while origin.seen().len() < 2 || lab.audit().await.len() < 2 {
                tokio::task::yield_now().await;
            }
            // It continues as long as it is allowed.
            lab.reload(&lab::allow_api(origin.port()));
            assert_eq!(lab.by(way, "GET", &url, &[], "").await.status, 200);
            assert!(!waiting.is_finished() && !streaming.is_finished(), "{way:?} {code}");
            if more.is_empty() {
                lab.reload_with_network(&lab::allow_api(origin.port()), "deny_cidrs = [\"127.0.0.0/8\"]");
            } else {
                lab.reload(&narrowed(origin.port(), more));
            }
            waiting.await.unwrap().assert_refused(403, code);
            assert!(streaming.await.is_err(), "{way:?} {code}: the body is cut, and does not look whole");
            let ended = [lab.ended(1).await, lab.ended(2).await];
            assert!(ended.iter().all(|line| line["event"] == "closed" && line["code"] == code), "{way:?} {ended:#?}");
        }
    }
}

/// Requests that need a credential after the reload are refused without one.
#[tokio::test]
async fn a_newly_required_credential_is_enforced() {
    let (lab, origin) = lab::simple().await;
    let url = format!("https://api.test:{}/stall", origin.port());
    let lab = std::sync::Arc::new(lab);
    let asking = tokio::spawn({
        let lab = lab.clone();
        async move { lab.get(&url).await }
    });
    while origin.seen().is_empty() {
        tokio::task::yield_now().await;
    }
    let port = origin.port();
    lab.reload(&format!(
        "[credentials.K]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test:{port}\"]\n\
         [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nrequire_credential = \"K\"\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"K\"]\n"
    ));
    asking.await.unwrap().assert_refused(403, "credential_required");
}

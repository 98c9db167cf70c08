//! An execution with too many finds in its requests is stopped, on every way in, and no other execution is.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::Request;
use http_body_util::BodyExt;
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::lab::client::{Way, auth, empty, h1, read_to_end};
use crate::lab::{self, KEY, Lab, LabBuilder, Origin, REFUSE_OUTSIDE, h2};

/// A value that is valid in a host name.
const HOST_NAME_SAFE: &str = "ghp7q2zt9lmx4vbn8kcyw3p";
const OTHER: &str = "another-token-of-more-than-24-bytes";

/// `t` has two credentials, and there is another task; `open.test` is an opaque tunnel.
fn config(origin: &Origin, leak: &str) -> String {
    let port = origin.port();
    let task = "integrations = [\"api\", \"open\"]\ncredentials = [\"KEY\", \"FOLDED\"]\n";
    format!(
        "{leak}\n[integrations.api]\nallowed_domains = [\"api.test\", \"*.names.test\"]\nports = [{port}]\n\
         [integrations.open]\nallowed_domains = [\"open.test\"]\nports = [{port}]\nmode = \"opaque\"\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [credentials.FOLDED]\nauth_type = \"bearer\"\nvalue = \"file:folded\"\ndomains = [\"api.test\"]\n\
         [tasks.neighbour]\ntoken = \"file:other\"\n{task}[tasks.t]\n{task}"
    )
}

async fn lab(leak: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("folded"), HOST_NAME_SAFE).unwrap();
    std::fs::write(builder.dir.path().join("other"), OTHER).unwrap();
    let origin = builder.origin("api.test").await;
    builder.dns.set("open.test", &["127.0.0.1"]);
    let lab = builder.proxy(&config(&origin, leak)).await;
    (lab, origin)
}

/// Returns the codes of the lines that ended exchanges.
async fn codes(lab: &Lab) -> Vec<String> {
    let lines = lab.audit().await.into_iter().filter(|line| line["event"] != "decided");
    lines.map(|line| line["code"].as_str().unwrap_or("-").to_owned()).collect()
}

/// Sends a request of the other task.
async fn other_task_get(lab: &Lab, url: &str) -> u16 {
    let token = format!("Basic {}", STANDARD.encode(format!("neighbour:{OTHER}")));
    let host = url.parse::<http::Uri>().unwrap().authority().unwrap().to_string();
    let request = Request::builder().uri(url).header("host", host).header("proxy-authorization", token);
    lab.send(request.body(empty()).unwrap()).await.status.as_u16()
}

#[tokio::test]
async fn three_finds_stop_an_execution_on_every_way() {
    for way in Way::ALL {
        let (lab, origin) = lab(&format!("{REFUSE_OUTSIDE}[leak]\nmax_finds = 3")).await;
        let to = format!("api.test:{}", origin.port());
        let url = format!("https://{to}/");
        let mut standing = lab.h2(&to).await;
        let mut still = lab.tls(&to, &["http/1.1"]).await;
        for n in 0..3 {
            assert_eq!(lab.by(way, "GET", &url, &[], "").await.status, 200, "{way:?} before find {n}");
            lab.by(way, "GET", &url, &[("x-note", KEY)], "").await.assert_refused(403, "leak_detected");
        }
        let asked = origin.seen().len();
        lab.get(&url).await.assert_refused(403, "execution_stopped");
        lab.get(&format!("http://{to}/")).await.assert_refused(403, "execution_stopped");
        for host in [to.clone(), format!("open.test:{}", origin.port()), "elsewhere.test:443".to_owned()] {
            let (head, mut stream) = lab.try_connect(&host).await;
            assert!(head.starts_with("HTTP/1.1 403") && head.contains("exeat-refusal: execution_stopped"), "{head}");
            read_to_end(&mut stream).await;
        }
        let request = Request::builder().uri(&url).body(empty()).unwrap();
        let reply = timeout(lab::TIMEOUT, standing.send_request(request)).await.unwrap().unwrap();
        assert_eq!(reply.headers()["exeat-refusal"], "execution_stopped", "{way:?} in a tunnel that stood");
        let text = format!("GET / HTTP/1.1\r\nhost: {to}\r\nconnection: close\r\n\r\n");
        still.write_all(text.as_bytes()).await.unwrap();
        assert!(read_to_end(&mut still).await.contains("exeat-refusal: execution_stopped\r\n"), "{way:?}");
        assert_eq!(origin.seen().len(), asked, "nothing was sent");
        assert_eq!(other_task_get(&lab, &url).await, 200, "{way:?}");
        let codes = codes(&lab).await;
        let count = |code: &str| codes.iter().filter(|it| *it == code).count();
        assert_eq!((count("leak_detected"), count("execution_stopped")), (3, 7), "{way:?} {codes:?}");
        let line = lab.audit().await.into_iter().find(|line| line["code"] == "execution_stopped").unwrap();
        let of = |name: &str| line[name].as_str().unwrap_or_default().to_owned();
        assert_eq!(
            [of("event"), of("stage"), of("verdict"), of("task"), of("execution")],
            ["refused", "throttle", "deny", "t", "t"],
            "{line}"
        );
    }
}

/// A value counts once, wherever it was found.
#[tokio::test]
async fn every_kind_of_find_counts() {
    let handshake = "GET https://{to}/ HTTP/1.1\r\nhost: {to}\r\n{auth}connection: upgrade\r\nupgrade: websocket\r\n\
                     sec-websocket-version: 13\r\nsec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nx-key: {key}\r\n\r\n";
    for kind in ["header", "query", "body", "host", "connect", "handshake"] {
        let (lab, origin) = lab("[leak]\nmax_finds = 2").await;
        let to = format!("api.test:{}", origin.port());
        let url = format!("https://{to}/");
        let named = format!("{HOST_NAME_SAFE}.names.test:{}", origin.port());
        for n in 0..2 {
            assert_eq!(lab.get(&url).await.status, 200, "{kind} {n}");
            match kind {
                "header" => drop(lab.by(Way::Absolute, "GET", &url, &[("x-key", KEY)], "").await),
                "query" => drop(lab.get(&format!("{url}?k={HOST_NAME_SAFE}")).await),
                "body" => drop(lab.by(Way::TunnelH2, "POST", &url, &[], KEY).await),
                "host" => drop(lab.get(&format!("https://{named}/")).await),
                "connect" => drop(lab.try_connect(&named).await),
                _ => {
                    let token = format!("proxy-authorization: {}\r\n", auth());
                    let text =
                        handshake.replace("{to}", &to).replace("{auth}", &token).replace("{key}", HOST_NAME_SAFE);
                    let mut stream = lab.connect().await;
                    stream.write_all(text.as_bytes()).await.unwrap();
                    stream.shutdown().await.unwrap();
                    assert!(read_to_end(&mut stream).await.contains("leak_detected"), "{kind}");
                }
            }
        }
        lab.get(&url).await.assert_refused(403, "execution_stopped");
        let found = codes(&lab).await.into_iter().filter(|code| code == "leak_detected").count();
        assert_eq!(found, 2, "{kind}");
    }
}

/// Requests in flight when an execution is stopped are aborted, and a waiting request is refused.
#[tokio::test]
async fn requests_in_flight_end_when_the_execution_is_stopped() {
    let (lab, origin) = lab("[leak]\nmax_finds = 1").await;
    let to = format!("api.test:{}", origin.port());
    let stalled = lab.absolute("GET", &format!("https://{to}/stall-body")).body(empty()).unwrap();
    let download = h1(lab.connect().await, stalled).await;
    assert_eq!(download.status(), 200);
    let mut opaque = lab.tunnel(&format!("open.test:{}", origin.port())).await;
    // The ClientHello opens the tunnel; the origin does not answer it.
    opaque.write_all(&hello("open.test")).await.unwrap();
    let mut waiting = lab.h2(&to).await;
    let request = Request::builder().uri(format!("https://{to}/stall")).body(empty()).unwrap();
    let waiting = tokio::spawn(async move { waiting.send_request(request).await.unwrap() });
    wait_until(|| origin.seen().iter().any(|seen| seen.uri.path() == "/stall")).await;
    until_decided(&lab, 3).await;
    lab.by(Way::Absolute, "GET", &format!("https://{to}/"), &[("x-key", KEY)], "")
        .await
        .assert_refused(403, "leak_detected");
    let answer = timeout(lab::TIMEOUT, waiting).await.unwrap().unwrap();
    assert_eq!(
        (answer.status().as_u16(), &answer.headers()["exeat-refusal"]),
        (403, &"execution_stopped".parse().unwrap())
    );
    assert!(timeout(lab::TIMEOUT, download.collect()).await.unwrap().is_err(), "the download is aborted");
    let mut rest = Vec::new();
    let _ = timeout(lab::TIMEOUT, opaque.read_to_end(&mut rest)).await.expect("the tunnel ends");
    let lines = ended(&lab, 4).await;
    let stopped = lines.iter().filter(|line| line["code"] == "execution_stopped").count();
    assert_eq!((stopped, lines.len()), (3, 4), "{lines:#?}");
}

/// A new policy resets no count, and a policy that allows more finds does not resume a stopped execution.
#[tokio::test]
async fn a_reload_keeps_the_count_of_finds() {
    let (lab, origin) = lab("[leak]\nmax_finds = 2").await;
    let url = format!("https://api.test:{}/", origin.port());
    let find = || lab.by(Way::TunnelH2, "GET", &url, &[("x-key", KEY)], "");
    find().await.assert_refused(403, "leak_detected");
    lab.reload(&config(&origin, "[leak]\nmax_finds = 2"));
    assert_eq!(lab.get(&url).await.status, 200);
    find().await.assert_refused(403, "leak_detected");
    lab.get(&url).await.assert_refused(403, "execution_stopped");
    lab.reload(&config(&origin, "[leak]\nmax_finds = 2"));
    lab.get(&url).await.assert_refused(403, "execution_stopped");
    lab.reload(&config(&origin, "[leak]\nmax_finds = 3"));
    lab.get(&url).await.assert_refused(403, "execution_stopped");
    assert_eq!(other_task_get(&lab, &url).await, 200);
}

/// Of requests whose last bytes are sent at once, as many are refused as leaks as the limit allows. The others learn only
/// that the execution is stopped.
#[tokio::test]
async fn simultaneous_finds_over_the_limit_look_like_a_stopped_execution() {
    const REQUESTS: usize = 60;
    let (lab, origin) = lab("[leak]\nmax_finds = 3").await;
    let url = format!("https://api.test:{}/", origin.port());
    let (most, last) = KEY.split_at(KEY.len() - 1);
    let mut clients = Vec::new();
    for _ in 0..REQUESTS {
        let mut client = lab.connect().await;
        let head = format!(
            "POST {url} HTTP/1.1\r\nHost: api.test:{}\r\nProxy-Authorization: {}\r\nContent-Length: {}\r\n\r\n{most}",
            origin.port(),
            auth(),
            KEY.len()
        );
        client.write_all(head.as_bytes()).await.unwrap();
        clients.push(client);
    }
    for client in &mut clients {
        client.write_all(last.as_bytes()).await.unwrap();
    }
    let mut codes = std::collections::BTreeMap::<&str, usize>::new();
    for mut client in clients {
        let mut head = [0; 512];
        client.read_exact(&mut head).await.unwrap();
        let head = String::from_utf8_lossy(&head);
        let code = ["leak_detected", "execution_stopped"].into_iter().find(|code| head.contains(code));
        *codes.entry(code.unwrap_or("another")).or_default() += 1;
    }
    let want = [("execution_stopped", REQUESTS - 3), ("leak_detected", 3)];
    assert_eq!(codes, want.into());
}

/// The stop of an execution ends all its requests alike. The response does not show whether a request contained a value.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_with_a_find_over_the_limit_ends_like_any_other() {
    const UPLOADS: usize = 40;
    let (lab, origin) = lab("[leak]\nmax_finds = 3").await;
    let mut clients = Vec::new();
    for _ in 0..UPLOADS {
        let mut client = lab.connect().await;
        let (port, auth) = (origin.port(), auth());
        let head = format!(
            "POST https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {auth}\r\n\
             Transfer-Encoding: chunked\r\n\r\n"
        );
        client.write_all(head.as_bytes()).await.unwrap();
        clients.push(client);
    }
    until_decided(&lab, UPLOADS).await;
    for (at, client) in clients.iter().enumerate() {
        let guess: String = if at % 2 == 0 { KEY.to_owned() } else { KEY.chars().rev().collect() };
        let chunk = format!("{:x}\r\n{guess}\r\n", guess.len());
        assert_eq!(client.try_write(chunk.as_bytes()).unwrap(), chunk.len());
    }
    let mut forms = std::collections::BTreeMap::<_, usize>::new();
    for mut client in clients {
        let answer = timeout(lab::TIMEOUT, read_to_end(&mut client)).await.unwrap();
        let is_fixed = |line: &&str| !["exeat-request-id", "date"].iter().any(|name| line.starts_with(name));
        let form: Vec<_> = answer.lines().filter(is_fixed).filter(|line| !line.contains("instance")).collect();
        if answer.contains("leak_detected") {
            continue;
        }
        *forms.entry(form.join("\n")).or_default() += 1;
    }
    assert!(forms.len() == 1 && forms.values().eq([&(UPLOADS - 3)]), "{forms:#?}");
}

/// The DATA frames that an origin over HTTP/2 has received, and the codes with which its streams were reset.
#[derive(Default)]
struct OriginFrames {
    data: usize,
    resets: Vec<u32>,
}

/// Starts an origin over HTTP/2 that answers nothing.
async fn silent_h2_origin(builder: &LabBuilder) -> (u16, Arc<Mutex<OriginFrames>>) {
    let mut config = builder.server_config("api.test").as_ref().clone();
    config.alpn_protocols = vec![b"h2".to_vec()];
    let tls = TlsAcceptor::from(Arc::new(config));
    builder.dns.set("api.test", &["127.0.0.1"]);
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let (port, frames) = (listener.local_addr().unwrap().port(), Arc::<Mutex<OriginFrames>>::default());
    let noted = frames.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let (tls, noted) = (tls.clone(), noted.clone());
            tokio::spawn(async move {
                let Ok(mut io) = tls.accept(stream).await else { return };
                let settings = h2::frame(h2::SETTINGS, 0, 0, &[]);
                io.write_all(&[settings, h2::frame(h2::SETTINGS, 1, 0, &[])].concat()).await.unwrap();
                let _ = io.read_exact(&mut [0; h2::PREFACE.len()]).await;
                let mut head = [0; 9];
                while io.read_exact(&mut head).await.is_ok() {
                    let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
                    io.read_exact(&mut payload).await.unwrap();
                    let mut noted = noted.lock().unwrap();
                    match head[3] {
                        h2::RST_STREAM => noted.resets.push(u32::from_be_bytes(payload.try_into().unwrap())),
                        h2::DATA => noted.data += 1,
                        _ => {}
                    }
                }
            });
        }
    });
    (port, frames)
}

/// The origin may be an accomplice of the sandbox. It must not see which of the stopped requests contained a value.
#[tokio::test(flavor = "multi_thread")]
async fn an_origin_sees_the_same_reset_of_requests_with_and_without_a_find() {
    let builder = LabBuilder::new().await;
    let (port, frames) = silent_h2_origin(&builder).await;
    let policy = format!(
        "[leak]\nmax_finds = 3\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n[credentials.KEY]\n\
         auth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n[tasks.t]\nintegrations = [\"api\"]\n\
         credentials = [\"KEY\"]\n"
    );
    let lab = builder.proxy(&policy).await;
    let open = async |guesses: usize| {
        let mut clients = Vec::new();
        for _ in 0..guesses {
            let mut client = lab.connect().await;
            let auth = auth();
            let head = format!(
                "POST https://api.test:{port}/ HTTP/1.1\r\nHost: api.test:{port}\r\nProxy-Authorization: {auth}\r\n\
                 Transfer-Encoding: chunked\r\n\r\n4\r\nopen\r\n"
            );
            client.write_all(head.as_bytes()).await.unwrap();
            clients.push(client);
        }
        clients
    };
    let mut clients = open(24).await;
    wait_until(|| frames.lock().unwrap().data == 24).await;
    for (at, client) in clients.iter().enumerate() {
        let guess: String = if at % 2 == 0 { KEY.to_owned() } else { KEY.chars().rev().collect() };
        let chunk = format!("{:x}\r\n{guess}\r\n", guess.len());
        assert_eq!(client.try_write(chunk.as_bytes()).unwrap(), chunk.len());
    }
    for client in &mut clients {
        assert!(timeout(lab::TIMEOUT, read_to_end(client)).await.unwrap().starts_with("HTTP/1.1 403"));
    }
    wait_until(|| frames.lock().unwrap().resets.len() == 24).await;
    const CANCEL: u32 = 8;
    assert_eq!(frames.lock().unwrap().resets, [CANCEL; 24]);
}

/// The limit is three unless the configuration sets another.
#[tokio::test]
async fn the_default_limit_is_three_finds() {
    let (lab, origin) = lab("").await;
    let url = format!("https://api.test:{}/", origin.port());
    lab.reload(&config(&origin, ""));
    for _ in 0..3 {
        lab.by(Way::Absolute, "POST", &url, &[], KEY).await.assert_refused(403, "leak_detected");
    }
    lab.by(Way::Absolute, "POST", &url, &[], KEY).await.assert_refused(403, "execution_stopped");
}

/// Returns a `ClientHello` for a name.
pub fn hello(name: &str) -> Vec<u8> {
    let config = lab::client::client_config(rustls::RootCertStore::empty(), &[]);
    let name = name.to_owned().try_into().unwrap();
    let mut client = rustls::ClientConnection::new(Arc::new(config), name).unwrap();
    let mut bytes = Vec::new();
    client.write_tls(&mut bytes).unwrap();
    bytes
}

async fn wait_until(mut done: impl FnMut() -> bool) {
    let start = Instant::now();
    while !done() {
        assert!(start.elapsed() < lab::TIMEOUT, "the condition was not met in time");
        tokio::task::yield_now().await;
    }
}

async fn until_decided(lab: &Lab, count: usize) {
    let start = Instant::now();
    while lab.audit().await.iter().filter(|line| line["event"] == "decided").count() < count {
        assert!(start.elapsed() < Duration::from_secs(20), "{:#?}", lab.audit().await);
    }
}

async fn ended(lab: &Lab, count: usize) -> Vec<Value> {
    lab.ended(count - 1).await;
    lab.audit().await.into_iter().filter(|line| line["event"] != "decided").collect()
}

//! `exeat demo`: a proxy, origins and a DNS server on the loopback, and what comes of each request.

pub mod dns;
mod origin;

use std::fs;
use std::io;
use std::net::SocketAddr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use serde_json::Value;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use self::dns::ScriptedDns;
use super::Exit;
use super::terminal::{self, Paint, print, say};
use crate::files;
use crate::flow::daemon::Daemon;
use crate::flow::keep;
use crate::model::host::Host;
use crate::policy::compile::{self, Surroundings};
use crate::tls::authority::Authority;

/// One request of the tour.
struct Scene {
    what: &'static str,
    want: &'static str,
    how: How,
}

/// What the sandbox does.
enum How {
    /// Raw bytes to the proxy; `{auth}` is replaced by the right header.
    Raw(String),
    /// CONNECT, then these bytes instead of TLS.
    Tunnel(String, &'static [u8]),
    /// CONNECT, TLS with this name or none, then one request with this Host.
    Tls { connect: String, name: Option<&'static str>, request: String },
}

/// What is running while the tour lasts.
struct Stage {
    daemon: Daemon,
    scenes: Vec<Scene>,
    proxy: SocketAddr,
    token: String,
    log: std::path::PathBuf,
}

pub(super) fn run() -> Exit {
    terminal::log("off");
    let runtime = match tokio::runtime::Builder::new_multi_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error),
    };
    let toured = runtime.block_on(async {
        let dir =
            tempfile::Builder::new().prefix("exeat-demo-").permissions(fs::Permissions::from_mode(0o700)).tempdir()?;
        let stage = set(dir.path()).await?;
        tour(stage).await
    });
    match toured {
        Ok(true) => Exit::Done,
        Ok(false) => failed(&"a verdict was not the expected one"),
        Err(error) => failed(&error),
    }
}

fn failed(why: &dyn std::fmt::Display) -> Exit {
    say(format_args!("exeat: {why}"));
    Exit::Failed
}

/// Plays every scene and prints the verdict that the audit log gives.
async fn tour(stage: Stage) -> io::Result<bool> {
    let paint = Paint::stdout();
    print(format_args!("{:<56} {:<22} {}\n", "WHAT THE SANDBOX DOES", "VERDICT", "WHY"));
    let mut seen = 0;
    let mut as_expected = true;
    for scene in &stage.scenes {
        // Scenes that break off are part of the tour; the log tells what came of them.
        let _ = timeout(Duration::from_secs(10), play(&stage, &scene.how)).await;
        let line = next_verdict(&stage.log, &mut seen).await?;
        let code = line.get("code").and_then(Value::as_str).unwrap_or("allowed");
        as_expected &= code == scene.want;
        let shown = format!("{code:<22}");
        let shown = if code == "allowed" { paint.good(&shown) } else { paint.bad(&shown) };
        print(format_args!("{:<56} {shown} {}\n", scene.what, why(&line)));
    }
    stage.daemon.shutdown().await;
    print(format_args!(
        "\nEach line stands in a chained audit log; `exeat audit verify` would show a change or a cut.\n"
    ));
    Ok(as_expected)
}

fn why(line: &Value) -> String {
    let status =
        line["response_status"].as_u64().map(|s| format!("{s} from {}", line["addr"].as_str().unwrap_or_default()));
    let rule = line["rule"].as_str().unwrap_or_default();
    let stage = line["stage"].as_str().map(|stage| format!("stage {stage}")).unwrap_or_default();
    [status.unwrap_or(stage), rule.to_owned()].into_iter().filter(|s| !s.is_empty()).collect::<Vec<_>>().join("; ")
}

/// The next line that ends an exchange.
async fn next_verdict(log: &Path, seen: &mut usize) -> io::Result<Value> {
    for _ in 0..500 {
        let text = fs::read_to_string(log)?;
        let ended = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
        let mut ended = ended.filter(|line| line["event"] == "closed" || line["event"] == "refused");
        if let Some(line) = ended.nth(*seen) {
            *seen = seen.saturating_add(1);
            return Ok(line);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err(io::Error::other("a request left no line in the audit log"))
}

/// Origins, DNS, the configuration, the proxy, and the scenes that speak of their ports.
async fn set(dir: &Path) -> io::Result<Stage> {
    let origin_ca =
        Authority::load_or_create(&dir.join("origin-ca.pem"), &dir.join("origin-key.pem")).map_err(io::Error::other)?;
    let stranger =
        Authority::load_or_create(&dir.join("x-ca.pem"), &dir.join("x-key.pem")).map_err(io::Error::other)?;
    let host = |name: &str| Host::parse(name).map_err(io::Error::other);
    let config = |ca: &Authority, name: &str| ca.server_config(&host(name)?).map_err(io::Error::other);
    let api = origin::https(config(&origin_ca, "api.test")?).await?.port();
    let lying = origin::https(config(&stranger, "lying.test")?).await?.port();
    let plain = origin::plain().await?.port();
    let broken = origin::raw(b"SMTP 220 hello\r\n").await?.port();
    let dead = TcpListener::bind("127.0.0.2:0").await?.local_addr()?.port();
    let dns = ScriptedDns::start().await?;
    for name in ["api.test", "lying.test", "plain.test", "broken.test"] {
        dns.set(name, &["127.0.0.1"]);
    }
    dns.set("dead.test", &["127.0.0.2"]);
    dns.set("inside.test", &["10.0.0.7"]);
    dns.set("mixed.test", &["127.0.0.1", "169.254.169.254"]);
    let token = files::hex(files::random::<24>()?.as_slice());
    let text = format!(
        r#"
        [proxy]
        listen = ["127.0.0.1:0"]
        header_timeout = "500ms"
        [upstream]
        extra_roots = ["{dir}/origin-ca.pem"]
        [dns]
        servers = ["{dns}"]
        [network]
        allow_cidrs = ["127.0.0.0/8"]
        [plans.short.raw]
        response_header_timeout = "300ms"
        [integrations.api]
        allowed_domains = ["api.test"]
        ports = [{api}]
        methods = ["GET"]
        paths = ["/", "/public/*", "/slow"]
        [integrations.others]
        allowed_domains = ["lying.test", "plain.test", "broken.test", "dead.test", "inside.test", "mixed.test", "gone.test", "127.0.0.1"]
        ports = [{lying}, {plain}, {broken}, {dead}, 1, 443]
        plain_http = true
        [integrations.sealed]
        allowed_domains = ["sealed.test"]
        mode = "opaque"
        [tasks.demo]
        token = "env:TOKEN"
        integrations = ["api", "others", "sealed"]
        plan = "short"
        "#,
        dir = dir.display(),
        dns = dns.address(),
    );
    let env = |_: &str| Some(token.clone());
    let around = Surroundings { base: dir, state_dir: dir, env: &env, secrets: &keep::Reader::default() };
    let mut config = compile::compile(&text, &around).map_err(|problems| io::Error::other(format!("{problems:?}")))?;
    config.settings.admin.listen = None;
    let log = dir.join("audit.jsonl");
    // The proxy's own port is not known before it listens, so the loop is asked of the policy afterwards.
    let own = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    config.settings.proxy.listen = vec![own];
    let text = text.replace(", 1, 443]", &format!(", 1, 443, {}]", own.port()));
    let policy = compile::compile(&text, &around).map_err(|problems| io::Error::other(format!("{problems:?}")))?.policy;
    let daemon = Daemon::start(config.settings, policy, None).await.map_err(io::Error::other)?;
    let proxy = daemon.proxy_addresses().first().copied().unwrap_or(own);
    let scenes = scenes(&Ports { api, lying, plain, broken, dead, own: own.port() });
    Ok(Stage { daemon, scenes, proxy, token, log })
}

struct Ports {
    api: u16,
    lying: u16,
    plain: u16,
    broken: u16,
    dead: u16,
    own: u16,
}

fn scenes(ports: &Ports) -> Vec<Scene> {
    let Ports { api, lying, plain, broken, dead, own } = ports;
    let raw = |what, want, text: String| Scene { what, want, how: How::Raw(text) };
    let get = |what, want, url: String| {
        let host = url.split("//").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default().to_owned();
        Scene {
            what,
            want,
            how: How::Raw(format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n{{auth}}Connection: close\r\n\r\n")),
        }
    };
    let tls = |what, want, name, request: String| Scene {
        what,
        want,
        how: How::Tls { connect: format!("api.test:{api}"), name, request },
    };
    let inner = |host: &str, path: &str, method: &str| {
        format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")
    };
    let host = format!("api.test:{api}");
    vec![
        tls("GET through CONNECT, inspected", "allowed", Some("api.test"), inner(&host, "/public/x", "GET")),
        get("GET https://… in absolute form, the proxy does the TLS", "allowed", format!("https://api.test:{api}/")),
        get("GET http://… where plain HTTP is allowed", "allowed", format!("http://plain.test:{plain}/")),
        raw("no token", "caller_unknown", format!("GET https://api.test:{api}/ HTTP/1.1\r\nHost: {host}\r\n\r\n")),
        raw(
            "two Host fields",
            "request_malformed",
            format!("GET https://api.test:{api}/ HTTP/1.1\r\nHost: {host}\r\nHost: evil.test\r\n{{auth}}\r\n"),
        ),
        raw(
            "gzip as a transfer coding",
            "not_implemented",
            format!(
                "POST https://api.test:{api}/ HTTP/1.1\r\nHost: {host}\r\n{{auth}}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n"
            ),
        ),
        raw("a head of 70 kB", "head_too_large", format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(70_000))),
        raw("half a head, then silence", "header_timeout", "GET https://api.test/ HTTP/1.1\r\nHo".to_owned()),
        get("a host written as 0x7f.1", "target_malformed", "https://0x7f.1/".to_owned()),
        get("a host nobody allowed", "host_not_allowed", "https://evil.test/".to_owned()),
        get("plain HTTP where only https is allowed", "scheme_not_allowed", format!("http://api.test:{api}/")),
        get("another port", "port_not_allowed", "https://api.test:22/".to_owned()),
        tls("DELETE where only GET is allowed", "method_not_allowed", Some("api.test"), inner(&host, "/", "DELETE")),
        tls("/public/%2e%2e/admin", "path_not_allowed", Some("api.test"), inner(&host, "/public/%2e%2e/admin", "GET")),
        tls(
            "fronting: another Host inside the tunnel",
            "authority_mismatch",
            Some("api.test"),
            inner("evil.test", "/", "GET"),
        ),
        tls("fronting: another name in the TLS handshake", "sni_mismatch", Some("evil.test"), String::new()),
        tls("no name in the TLS handshake", "sni_missing", None, String::new()),
        Scene {
            what: "something else than TLS in a tunnel",
            want: "not_tls",
            how: How::Tunnel(format!("api.test:{api}"), b"\x05\x01\x00"),
        },
        get("a name that leads to 10.0.0.7", "address_not_allowed", "https://inside.test/".to_owned()),
        get("one good address and the metadata service", "address_not_allowed", "https://mixed.test/".to_owned()),
        get("the proxy itself", "loop_detected", format!("http://127.0.0.1:{own}/")),
        get("a name that does not exist", "resolve_failed", "https://gone.test/".to_owned()),
        get("an origin that is down", "connect_failed", format!("https://dead.test:{dead}/")),
        get("an origin with a stranger's certificate", "tls_failed", format!("https://lying.test:{lying}/")),
        get("an origin that does not speak HTTP", "upstream_protocol", format!("http://broken.test:{broken}/")),
        get("an origin that never answers", "request_timed_out", format!("https://api.test:{api}/slow")),
    ]
}

/// Plays the sandbox's part.
async fn play(stage: &Stage, how: &How) -> io::Result<()> {
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("demo:{}", stage.token));
    let auth = format!("Proxy-Authorization: Basic {auth}\r\n");
    let mut stream = connect(stage.proxy).await?;
    match how {
        How::Raw(text) => exchange(&mut stream, &text.replace("{auth}", &auth)).await,
        How::Tunnel(to, bytes) => {
            open(&mut stream, to, &auth).await?;
            stream.write_all(bytes).await?;
            drain(&mut stream).await
        }
        How::Tls { connect, name, request } => {
            open(&mut stream, connect, &auth).await?;
            let mut config = client_config(stage)?;
            config.enable_sni = name.is_some();
            let name = name.unwrap_or("api.test").try_into().map_err(io::Error::other)?;
            let mut tls = TlsConnector::from(Arc::new(config)).connect(name, stream).await?;
            exchange(&mut tls, request).await
        }
    }
}

#[expect(clippy::disallowed_methods, reason = "the demo plays the sandbox: it connects to the proxy, not to an origin")]
async fn connect(proxy: SocketAddr) -> io::Result<TcpStream> {
    TcpStream::connect(proxy).await
}

async fn open(stream: &mut TcpStream, to: &str, auth: &str) -> io::Result<()> {
    stream.write_all(format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\n{auth}\r\n").as_bytes()).await?;
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await?);
    }
    if head.starts_with(b"HTTP/1.1 200") { Ok(()) } else { Err(io::Error::other("refused")) }
}

async fn exchange(stream: &mut (impl AsyncRead + AsyncWrite + Unpin), text: &str) -> io::Result<()> {
    stream.write_all(text.as_bytes()).await?;
    stream.flush().await?;
    let mut first = [0; 1];
    stream.read_exact(&mut first).await?;
    Ok(())
}

async fn drain(stream: &mut TcpStream) -> io::Result<()> {
    tokio::io::copy(stream, &mut tokio::io::sink()).await.map(|_| ())
}

fn client_config(stage: &Stage) -> io::Result<rustls::ClientConfig> {
    let ca = CertificateDer::from_pem_slice(stage.daemon.ca_pem().as_bytes()).map_err(io::Error::other)?;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ca).map_err(io::Error::other)?;
    let builder =
        rustls::ClientConfig::builder_with_provider(crate::tls::provider()).with_safe_default_protocol_versions();
    Ok(builder.map_err(io::Error::other)?.with_root_certificates(roots).with_no_client_auth())
}

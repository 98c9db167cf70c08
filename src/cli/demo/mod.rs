//! `exeat demo`: runs a proxy, origins and a DNS server on the loopback, and shows the result of each request.

pub mod dns;
mod origin;
mod scenes;

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
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;

use self::dns::ScriptedDns;
use self::scenes::{Action, Ports, Scene};
use super::Exit;
use super::terminal::{self, Paint, indented, print, say};
use crate::audit::line::{Event, Line};
use crate::daemon::Daemon;
use crate::daemon::vault;
use crate::files;
use crate::model::host::Host;
use crate::policy::compile;
use crate::policy::settings::{ListenAt, ListenerMode, ProxyListener};
use crate::policy::source::CompileContext;
use crate::tls::authority::Authority;

/// The servers and directories of the demo.
struct Demo {
    daemon: Daemon,
    scenes: Vec<Scene>,
    proxy: SocketAddr,
    token: String,
    log: std::path::PathBuf,
}

pub(super) fn run() -> Exit {
    terminal::log("off");
    let runtime = match super::runtime() {
        Ok(runtime) => runtime,
        Err(error) => return failed(&error),
    };
    let result = runtime.block_on(async {
        let dir =
            tempfile::Builder::new().prefix("exeat-demo-").permissions(fs::Permissions::from_mode(0o700)).tempdir()?;
        let demo = set_up(dir.path()).await?;
        play_all(demo).await
    });
    match result {
        Ok(true) => Exit::Done,
        Ok(false) => failed(&"a verdict was not as expected"),
        Err(error) => failed(&error),
    }
}

fn failed(why: &dyn std::fmt::Display) -> Exit {
    say(format_args!("exeat: {why}"));
    Exit::Failed
}

/// Sends the request of each scene and prints its verdict from the audit log. Returns false if a verdict is not as
/// expected.
async fn play_all(demo: Demo) -> io::Result<bool> {
    let paint = Paint::stdout();
    print(format_args!("{:<56} VERDICT\n", "REQUEST OF THE SANDBOX"));
    let mut seen = 0;
    let mut as_expected = true;
    for scene in &demo.scenes {
        // Some scenes break off. The log has their result.
        let _ = timeout(Duration::from_secs(10), play(&demo, &scene.action)).await;
        let line = next_verdict(&demo.log, &mut seen).await?;
        let code = line.code.as_deref().unwrap_or("allowed");
        as_expected &= code == scene.expected;
        let shown = if code == "allowed" { paint.good(code) } else { paint.bad(code) };
        print(format_args!("{:<56} {shown}\n", scene.title));
        let why = explanation(&line);
        if !why.is_empty() {
            print(format_args!("{}\n", paint.quiet(&indented(&why, 4))));
        }
    }
    demo.daemon.shutdown().await;
    let end = "Each request has a line in a chained audit log. `exeat audit verify` detects changes and truncation.";
    print(format_args!("\n{}\n", indented(end, 0)));
    Ok(as_expected)
}

/// Returns what the code does not say: the address, the rule, and the credential.
fn explanation(line: &Line) -> String {
    let addr = line.addr.as_deref().unwrap_or_default();
    let status = line.response_status.map(|status| format!("{status} from {addr}")).unwrap_or_default();
    let rule = line.rule.as_deref().unwrap_or_default();
    // Without the name of an integration: the code says more.
    let rule = if line.code.is_some() && !rule.contains(' ') { "" } else { rule };
    let key = line.credential_used.as_deref().map(|name| format!("{name} injected")).unwrap_or_default();
    let echoes = line.redacted.map(|n| format!("{n} echo redacted")).unwrap_or_default();
    [status, rule.to_owned(), key, echoes].into_iter().filter(|s| !s.is_empty()).collect::<Vec<_>>().join("; ")
}

/// Waits for the next line that ends an exchange.
async fn next_verdict(log: &Path, seen: &mut usize) -> io::Result<Line> {
    for _ in 0..500 {
        let text = fs::read_to_string(log)?;
        let ended = text.lines().filter_map(|line| serde_json::from_str::<Line>(line).ok());
        let mut ended = ended.filter(|line| matches!(line.event, Event::Closed | Event::Refused));
        if let Some(line) = ended.nth(*seen) {
            *seen = seen.saturating_add(1);
            return Ok(line);
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Err(io::Error::other("a request left no line in the audit log"))
}

/// Starts the origins, the DNS server and the proxy, and creates the scenes with their ports.
async fn set_up(dir: &Path) -> io::Result<Demo> {
    let origin_ca =
        Authority::of(&dir.join("origin-ca.pem"), Some(&dir.join("origin-key.pem"))).map_err(io::Error::other)?;
    let stranger = Authority::of(&dir.join("x-ca.pem"), Some(&dir.join("x-key.pem"))).map_err(io::Error::other)?;
    let host = |name: &str| Host::parse(name).map_err(io::Error::other);
    let config = |ca: &Authority, name: &str| ca.server_config(&host(name)?).map_err(io::Error::other);
    let api = origin::https(config(&origin_ca, "api.test")?).await?.port();
    let lying = origin::https(config(&stranger, "lying.test")?).await?.port();
    let plain = origin::plain().await?.port();
    let broken = origin::fixed_reply(b"SMTP 220 hello\r\n").await?.port();
    let dead = TcpListener::bind("127.0.0.2:0").await?.local_addr()?.port();
    let dns = ScriptedDns::start().await?;
    for name in ["api.test", "lying.test", "plain.test", "broken.test"] {
        dns.set(name, &["127.0.0.1"]);
    }
    dns.set("dead.test", &["127.0.0.2"]);
    dns.set("inside.test", &["10.0.0.7"]);
    dns.set("mixed.test", &["127.0.0.1", "169.254.169.254"]);
    let token = files::hex(files::random::<24>()?.as_slice());
    let ports = Ports { api, lying, plain, broken, dead, own: 0 };
    let text = configuration(dir, dns.address(), &ports);
    let key = format!("demo-{}", files::hex(files::random::<16>()?.as_slice()));
    let env = |name: &str| Some(if name == "API_KEY" { key.clone() } else { token.clone() });
    let context =
        CompileContext { base: dir, state_dir: dir, env: &env, secrets: &vault::Reader::default(), is_offline: false };
    let mut config = compile::compile(&text, &context).map_err(|problems| io::Error::other(format!("{problems:?}")))?;
    (config.settings.admin.listen, config.settings.metrics.listen) = (None, None);
    let log = dir.join("audit.jsonl");
    // The policy allows the proxy's own port, for the scene with the loop. The port is only known once it is bound.
    let own = TcpListener::bind("127.0.0.1:0").await?.local_addr()?;
    let tasks = config.settings.proxy.tasks.clone();
    config.settings.proxy.listeners = vec![ProxyListener {
        at: ListenAt::Tcp(own),
        key: String::new(),
        is_own: false,
        tasks,
        balancers: None,
        is_tproxy: false,
        mode: ListenerMode::Proxy,
    }];
    let text = text.replace(", 1, 443]", &format!(", 1, 443, {}]", own.port()));
    let policy =
        compile::compile(&text, &context).map_err(|problems| io::Error::other(format!("{problems:?}")))?.policy;
    let daemon = Daemon::start(config.settings, policy, None).await.map_err(io::Error::other)?;
    let proxy = daemon.proxy_addresses().first().copied().unwrap_or(own);
    let scenes = scenes::all(&Ports { own: own.port(), ..ports }, &key);
    Ok(Demo { daemon, scenes, proxy, token, log })
}

fn configuration(dir: &Path, dns: SocketAddr, ports: &Ports) -> String {
    let Ports { api, lying, plain, broken, dead, .. } = ports;
    format!(
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
        [credentials.API_KEY]
        auth_type = "bearer"
        value = "env:API_KEY"
        domains = ["api.test"]
        [tasks.demo]
        token = "env:TOKEN"
        integrations = ["api", "others", "sealed"]
        credentials = ["API_KEY"]
        tools = ["api_call", "webhook"]
        raw = true
        plan = "short"
        "#,
        dir = dir.display(),
    )
}

/// Sends the request of a scene, as the sandbox would.
async fn play(demo: &Demo, action: &Action) -> io::Result<()> {
    let auth = base64::engine::general_purpose::STANDARD.encode(format!("demo:{}", demo.token));
    let auth = format!("Proxy-Authorization: Basic {auth}\r\n");
    let mut stream = connect(demo.proxy).await?;
    match action {
        Action::Raw(text) => exchange(&mut stream, &text.replace("{auth}", &auth)).await,
        Action::Tunnel(to, bytes) => {
            open_tunnel(&mut stream, to, &auth).await?;
            stream.write_all(bytes).await?;
            drain(&mut stream).await
        }
        Action::Tls { connect, name, request } => {
            open_tunnel(&mut stream, connect, &auth).await?;
            let mut config = client_config(demo)?;
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

async fn open_tunnel(stream: &mut TcpStream, to: &str, auth: &str) -> io::Result<()> {
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

fn client_config(demo: &Demo) -> io::Result<rustls::ClientConfig> {
    let ca = CertificateDer::from_pem_slice(demo.daemon.ca_pem().as_bytes()).map_err(io::Error::other)?;
    let mut roots = rustls::RootCertStore::empty();
    roots.add(ca).map_err(io::Error::other)?;
    let builder =
        rustls::ClientConfig::builder_with_provider(crate::tls::provider()).with_safe_default_protocol_versions();
    Ok(builder.map_err(io::Error::other)?.with_root_certificates(roots).with_no_client_auth())
}

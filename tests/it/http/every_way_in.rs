//! The same hostile request as a tool call, through a tunnel and in absolute form. The code is the same, for each code
//! that can occur on all of them.

use std::collections::BTreeSet;
use std::io::{BufRead, BufReader, Write};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use exeat::model::refusal::Refusal;
use http::{Request, Uri};
use http_body_util::Full;
use hyper_util::rt::{TokioExecutor, TokioIo};
use percent_encoding::{NON_ALPHANUMERIC, utf8_percent_encode};
use rcgen::{CertificateParams, KeyPair};
use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use serde_json::{Value, json};
use socket2::{Domain, Socket, Type};
use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};
use tokio::time::timeout;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;

use crate::callers::listeners::Certificates;
use crate::lab::captured::Synthetic;
use crate::lab::client::{Reply, SOCKS_PASSWORD_WRONG, client_config, h1, read_head, socks_connect};
use crate::lab::h2_proxy::{H2Proxy, TLS};
use crate::lab::{self, KEY, Lab, LabBuilder, Origin, TIMEOUT, TOKEN, origin};

/// The way in which a request reaches the proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum By {
    Tool,
    Absolute,
    /// In absolute form, over HTTP/2 to the proxy.
    AbsoluteH2,
    TunnelH1,
    TunnelH2,
    /// HTTP/1.1 in the tunnel of a CONNECT over HTTP/2.
    ConnectH2,
    Socks,
    /// HTTP/1.1 in a connection that is captured, in TLS if the URL says so.
    Captured,
}

const EVERY: [By; 8] =
    [By::Tool, By::Absolute, By::AbsoluteH2, By::TunnelH1, By::TunnelH2, By::ConnectH2, By::Socks, By::Captured];

/// A tool call as a model makes it, with everything needed to send the same request without the front-end.
#[derive(Clone, Debug)]
struct Call {
    tool: &'static str,
    input: Value,
}

/// A proxy as its clients see it.
struct Proxy {
    proxy: SocketAddr,
    /// The SOCKS5 listener, which the binary has at a path.
    socks: SocksAt,
    /// The names and ports with a transparent listener.
    captured: Vec<(&'static str, u16)>,
    at: Synthetic,
    ca: String,
    token: String,
    /// The folder with the certificates of the proxy itself.
    dir: PathBuf,
}

#[derive(Clone)]
enum SocksAt {
    Tcp(SocketAddr),
    Unix(std::path::PathBuf),
}

/// What the client is told of a refusal.
#[derive(Debug, PartialEq, Eq)]
enum Told {
    /// The code in the response.
    Code(String),
    /// The reply code of SOCKS5.
    Socks(u8),
    /// The TLS alert.
    Alert(String),
}

fn ask(tool: &'static str, input: Value) -> Call {
    Call { tool, input }
}

impl Call {
    fn text(&self, member: &str) -> Option<&str> {
        self.input[member].as_str()
    }

    fn uri(&self) -> String {
        let mut url = self.text("url").unwrap().to_owned();
        let code = |text: &str| utf8_percent_encode(text, NON_ALPHANUMERIC).to_string();
        for (name, value) in self.input["query_params"].as_object().into_iter().flatten() {
            let between = if url.contains('?') { '&' } else { '?' };
            url.push_str(&format!("{between}{}={}", code(name), code(value.as_str().unwrap())));
        }
        url
    }

    fn method(&self) -> &str {
        let fixed = if matches!(self.tool, "http_post" | "webhook") { "POST" } else { "GET" };
        self.text("method").unwrap_or(fixed)
    }

    /// Returns the same request without the fields that address the proxy.
    fn request(&self, target: &str) -> http::request::Builder {
        let mut request = Request::builder().method(self.method()).uri(target).header("exeat-tool", self.tool);
        if let Some(name) = self.text("credential") {
            request = request.header("exeat-credential", name);
        }
        let plain = |value: &Value| value.as_str().map_or(value.to_string(), str::to_owned);
        if !self.input["timeout"].is_null() {
            request = request.header("exeat-timeout", plain(&self.input["timeout"]));
        }
        for (name, value) in self.input["headers"].as_object().into_iter().flatten() {
            request = request.header(name, plain(value));
        }
        request
    }

    fn body(&self) -> Full<Bytes> {
        match &self.input["body"] {
            Value::Null => Full::default(),
            Value::String(text) => Full::new(text.clone().into()),
            other => Full::new(other.to_string().into()),
        }
    }
}

impl Proxy {
    fn of(lab: &Lab, captured: &[(&'static str, u16)]) -> Self {
        let socks = SocksAt::Tcp(lab.socks_address());
        Self {
            proxy: lab.proxy,
            socks,
            captured: captured.to_vec(),
            at: Synthetic::of(lab.dir.path()),
            ca: lab.daemon.ca_pem().to_owned(),
            token: TOKEN.to_owned(),
            dir: lab.dir.path().to_owned(),
        }
    }

    /// Connects to the proxy, over TLS.
    async fn connect(&self, protocol: &str) -> TlsStream<TcpStream> {
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let stream = TcpStream::connect(self.proxy).await.unwrap();
        stream.set_nodelay(true).unwrap();
        let mut config = Certificates::client_config(&self.dir);
        config.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        TlsConnector::from(Arc::new(config)).connect("localhost".try_into().unwrap(), stream).await.unwrap()
    }

    /// Connects to the proxy over HTTP/2.
    async fn connect_h2(&self) -> H2Proxy {
        H2Proxy::over(self.connect("h2").await).await
    }

    fn authorization(&self) -> String {
        format!("Basic {}", STANDARD.encode(format!("t:{}", self.token)))
    }

    /// Makes a tool call with the real front-end and returns its result.
    fn call(&self, ask: &Call) -> Value {
        let ca = self.dir.join("clients.pem");
        // A proxy without TLS tells more of why it closes a connection.
        let has_tls = ca.exists();
        let scheme = if has_tls { "https" } else { "http" };
        let mut child = Command::new(env!("CARGO_BIN_EXE_exeat-tools"))
            .args(["call", ask.tool, "--input", "-"])
            .env_remove("HTTPS_PROXY")
            .env("EXEAT_PROXY", format!("{scheme}://t:{}@localhost:{}", self.token, self.proxy.port()))
            .envs(has_tls.then_some(("EXEAT_PROXY_CA", &ca)))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        child.stdin.take().unwrap().write_all(ask.input.to_string().as_bytes()).unwrap();
        let output = child.wait_with_output().unwrap();
        assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
        serde_json::from_slice(&output.stdout).unwrap()
    }

    /// Sends the request without the front-end. Returns the code of the refused CONNECT or request.
    async fn code(&self, by: By, ask: &Call) -> Option<Told> {
        let url = ask.uri();
        let (scheme, rest) = url.split_once("://").unwrap();
        let authority = rest.split(['/', '?']).next().unwrap();
        let usual = if scheme == "http" { 80 } else { 443 };
        let has_port = authority.rsplit_once(':').is_some_and(|(_, port)| port.parse::<u16>().is_ok());
        let to = if has_port { authority.to_owned() } else { format!("{authority}:{usual}") };
        let named = authority.rsplit('@').next().unwrap();
        let code = |reply: &Reply| reply.header("exeat-refusal").map(|code| Told::Code(code.to_owned()));
        if by == By::Absolute {
            let request = ask.request(&url).header("host", named).header("proxy-authorization", self.authorization());
            let stream = self.connect("http/1.1").await;
            let reply = Reply::read(h1(stream, request.body(ask.body()).unwrap()).await).await;
            return code(&reply);
        }
        if by == By::AbsoluteH2 {
            let request = ask.request(&url).header("proxy-authorization", self.authorization());
            return code(&self.connect_h2().await.send(request.body(ask.body()).unwrap()).await);
        }
        if by == By::ConnectH2 {
            let mut proxy = self.connect_h2().await;
            let tunnel = match proxy.connect_with(&to, &[("proxy-authorization", &self.authorization())]).await {
                Ok(tunnel) => tunnel,
                Err(reply) => return code(&reply),
            };
            let uri: Uri = url.parse().unwrap();
            let request = ask.request(uri.path_and_query().unwrap().as_str()).header("host", authority);
            let request = request.body(ask.body()).unwrap();
            let response = match scheme {
                "http" => h1(tunnel, request).await,
                _ => h1(self.tls(&to, tunnel, "http/1.1").await, request).await,
            };
            return code(&Reply::read(response).await);
        }
        if by == By::Captured {
            let (host, port) = to.rsplit_once(':').unwrap();
            let stream = self.at.connect(self.captured_at(ask).unwrap(), port.parse().unwrap()).await;
            let uri: Uri = url.parse().unwrap();
            let request = ask.request(uri.path_and_query().unwrap().as_str()).header("host", authority);
            let request = request.body(ask.body()).unwrap();
            let response = match scheme {
                "http" => h1(stream, request).await,
                _ => match self.try_tls(host, stream, "http/1.1").await {
                    Ok(tls) => h1(tls, request).await,
                    Err(error) => return Some(Told::Alert(error.to_string())),
                },
            };
            return code(&Reply::read(response).await);
        }
        if by == By::Socks {
            let user = format!("t:{}", self.token);
            let uri: Uri = url.parse().unwrap();
            let request = ask.request(uri.path_and_query().unwrap().as_str()).header("host", authority);
            let request = request.body(ask.body()).unwrap();
            let response = match &self.socks {
                SocksAt::Tcp(address) => {
                    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
                    let mut stream = TcpStream::connect(address).await.unwrap();
                    match socks_connect(&mut stream, &user, &to).await {
                        Err(told) => return Some(Told::Socks(told)),
                        Ok(()) if scheme == "http" => h1(stream, request).await,
                        Ok(()) => h1(self.tls(&to, stream, "http/1.1").await, request).await,
                    }
                }
                SocksAt::Unix(path) => {
                    let mut stream = UnixStream::connect(path).await.unwrap();
                    match socks_connect(&mut stream, &user, &to).await {
                        Err(told) => return Some(Told::Socks(told)),
                        Ok(()) => h1(self.tls(&to, stream, "http/1.1").await, request).await,
                    }
                }
            };
            return code(&Reply::read(response).await);
        }
        let mut stream = self.connect("http/1.1").await;
        let head =
            format!("CONNECT {to} HTTP/1.1\r\nHost: {to}\r\nProxy-Authorization: {}\r\n\r\n", self.authorization());
        stream.write_all(head.as_bytes()).await.unwrap();
        let head = read_head(&mut stream).await;
        if !head.starts_with("HTTP/1.1 200") {
            let field = head.lines().find_map(|line| line.strip_prefix("exeat-refusal: "));
            return Some(Told::Code(field.unwrap_or_else(|| panic!("{head}")).to_owned()));
        }
        let uri: Uri = url.parse().unwrap();
        if by == By::TunnelH2 && scheme == "https" {
            let tls = self.tls(&to, stream, "h2").await;
            let (mut h2, connection) =
                hyper::client::conn::http2::handshake(TokioExecutor::new(), TokioIo::new(tls)).await.unwrap();
            tokio::spawn(connection);
            let request = ask.request(&url).body(ask.body()).unwrap();
            return code(&Reply::read(timeout(TIMEOUT, h2.send_request(request)).await.unwrap().unwrap()).await);
        }
        let request = ask.request(uri.path_and_query().unwrap().as_str()).header("host", authority);
        let request = request.body(ask.body()).unwrap();
        let response = match scheme {
            "http" => h1(stream, request).await,
            _ => h1(self.tls(&to, stream, "http/1.1").await, request).await,
        };
        code(&Reply::read(response).await)
    }

    async fn tls<S: AsyncRead + AsyncWrite + Unpin>(&self, to: &str, stream: S, alpn: &str) -> TlsStream<S> {
        self.try_tls(to.rsplit_once(':').unwrap().0, stream, alpn).await.unwrap()
    }

    async fn try_tls<S: AsyncRead + AsyncWrite + Unpin>(
        &self,
        name: &str,
        stream: S,
        alpn: &str,
    ) -> std::io::Result<TlsStream<S>> {
        let mut roots = rustls::RootCertStore::empty();
        roots.add(CertificateDer::from_pem_slice(self.ca.as_bytes()).unwrap()).unwrap();
        let name = name.to_owned().try_into().unwrap();
        TlsConnector::from(Arc::new(client_config(roots, &[alpn]))).connect(name, stream).await
    }

    /// Returns the name whose address the request is captured at. `None` if it cannot be made in this way: its host is no name, or
    /// no listener has its port.
    fn captured_at(&self, ask: &Call) -> Option<&'static str> {
        let uri: Uri = ask.uri().parse().ok()?;
        let (host, port) = (uri.host()?, uri.port_u16()?);
        let is_name = !uri.authority()?.as_str().contains('@') && host.ends_with(".test");
        let mut here = self.captured.iter().filter(|(_, at)| *at == port && is_name).map(|(name, _)| *name);
        let first = here.clone().next()?;
        Some(here.find(|name| *name == host).unwrap_or(first))
    }

    /// Sends the request by one way and checks its code. Returns the result of a tool call.
    async fn refused(&self, by: By, ask: &Call, code: &str) -> Option<Value> {
        if by != By::Tool {
            match self.code(by, ask).await {
                Some(Told::Alert(told)) => {
                    assert!(by == By::Captured && told.contains(alert_of(code)), "{told} {code} {ask:?}");
                }
                Some(Told::Socks(told)) => assert_eq!((by, told), (By::Socks, socks_code(code)), "{code} {ask:?}"),
                told => assert_eq!(told, Some(Told::Code(code.to_owned())), "{by:?} {ask:?}"),
            }
            return None;
        }
        let result = tokio::task::block_in_place(|| self.call(ask));
        let refusal = Refusal::with_code(code).unwrap();
        let said = (result["block_reason"].as_str(), result["blocked"].as_bool());
        assert_eq!(said, (Some(refusal.block_reason()), Some(refusal.is_blocked())), "{ask:?} {result:#}");
        assert_eq!(result["response_status"], Value::Null, "{result:#}");
        assert_eq!(result.as_object().map(serde_json::Map::len), Some(10), "{result:#}");
        let content = result["content"].as_str().unwrap();
        assert!(content.starts_with("Error: ") && !content.contains("<tool_response"), "{content}");
        Some(result)
    }
}

/// Returns the reply code that stands for a refusal.
fn socks_code(code: &str) -> u8 {
    match code {
        "caller_unknown" => SOCKS_PASSWORD_WRONG,
        "resolve_failed" | "connect_timed_out" => 4,
        "connect_failed" => 5,
        "target_malformed" => 1,
        code if matches!(Refusal::with_code(code), Some(Refusal::Deny(_))) => 2,
        _ => 1,
    }
}

/// Returns the alert that stands for a refusal.
fn alert_of(code: &str) -> &'static str {
    if matches!(Refusal::with_code(code), Some(Refusal::Deny(_))) { "AccessDenied" } else { "InternalError" }
}

/// Checks that every way returns this code and logs it. For a call that the front-end does not send, the record of
/// calls has the reason instead.
async fn assert_refused_on_every_way(gate: &Proxy, lab: &Lab, ask: &Call, code: &str) {
    for by in EVERY {
        if by != By::Captured || gate.captured_at(ask).is_some() {
            assert_refused_by(lab, gate, by, ask, code).await;
        }
    }
}

async fn assert_refused_by(lab: &Lab, gate: &Proxy, by: By, ask: &Call, code: &str) {
    let before = codes(lab).await.len();
    let result = gate.refused(by, ask, code).await;
    if result.as_ref().is_some_and(|_| is_unsent(ask)) {
        assert_eq!(
            last_unsent_call(lab).await["block_reason"],
            Refusal::with_code(code).unwrap().block_reason(),
            "{ask:?}"
        );
        assert_eq!(codes(lab).await.len(), before, "{ask:?} {result:?}");
        return;
    }
    let start = Instant::now();
    let logged = loop {
        match codes(lab).await.get(before..) {
            Some([]) | None => assert!(start.elapsed() < TIMEOUT, "{by:?} {ask:?} left no line"),
            Some(new) => break new.to_vec(),
        }
    };
    assert_eq!(logged, [code], "{by:?} {ask:?}");
}

/// Returns true if the front-end refuses the request itself.
fn is_unsent(ask: &Call) -> bool {
    let url = ask.text("url").unwrap_or_default();
    ask.tool == "shell" || ask.input["timeout"].is_string() || url.len() > 65_534
}

async fn codes(lab: &Lab) -> Vec<String> {
    lab.audit().await.iter().filter_map(|line| line["code"].as_str().map(str::to_owned)).collect()
}

/// Returns the newest call of `t` in the record that was not sent.
async fn last_unsent_call(lab: &Lab) -> Value {
    let (_, calls) = lab.admin_request("GET", "/v1/executions/t/tool_calls", &Value::Null).await;
    calls.as_array().unwrap().iter().rfind(|call| call["reported"] == true).cloned().unwrap_or_default()
}

const ADMIN: &str = "[admin]\nlisten = \"127.0.0.1:0\"\n";

/// The reachable hosts, and those that only look reachable.
struct Hosts {
    lab: Lab,
    origin: Origin,
    plain: Origin,
    text: String,
    captured: Vec<(&'static str, u16)>,
    closed: u16,
    full: u16,
    stranger: u16,
    garbage: u16,
    _sockets: Vec<Socket>,
}

fn socket() -> (Socket, SocketAddr) {
    let socket = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
    socket.bind(&"127.0.0.1:0".parse::<SocketAddr>().unwrap().into()).unwrap();
    let address = socket.local_addr().unwrap().as_socket().unwrap();
    (socket, address)
}

/// Starts an origin with a certificate of an unknown issuer.
async fn untrusted_origin(name: &str) -> Origin {
    let key = KeyPair::generate().unwrap();
    let cert = CertificateParams::new(vec![name.to_owned()]).unwrap().self_signed(&key).unwrap();
    let builder = rustls::ServerConfig::builder_with_provider(exeat::tls::provider());
    let key = PrivateKeyDer::try_from(key.serialize_der()).unwrap();
    let config = builder.with_safe_default_protocol_versions().unwrap().with_no_client_auth();
    Origin::https(Arc::new(config.with_single_cert(vec![cert.der().clone()], key).unwrap())).await
}

/// `more` is added to the configuration.
async fn start_hosts(more: &str) -> Hosts {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let plain = Origin::http().await;
    let (stranger, (garbage, _)) =
        (untrusted_origin("api.test").await.port(), origin::raw_tls(&builder, "api.test", b"no HTTP").await);
    std::fs::write(builder.dir.path().join("client-secret"), "Kq2mZv9LpW4sVt6eRRu8YbN3").unwrap();
    for name in ["only.test", "locked.test", "minted.test", "plain.test", "dead.test"] {
        builder.dns.set(name, &["127.0.0.1"]);
    }
    builder.dns.set("inside.test", &["10.0.0.7"]);
    // One socket is bound and does not listen; the other has a full backlog.
    let (unheard, closed) = socket();
    let (dead, dead_proxy) = socket();
    let (listener, full) = socket();
    listener.listen(0).unwrap();
    let mut sockets: Vec<_> = (0..4)
        .map(|_| {
            let filler = Socket::new(Domain::IPV4, Type::STREAM, None).unwrap();
            filler.set_nonblocking(true).unwrap();
            let _ = filler.connect(&full.into());
            filler
        })
        .collect();
    sockets.extend([unheard, dead, listener]);
    let (closed, full, port) = (closed.port(), full.port(), origin.port());
    let ports = format!("ports = [{port}, {closed}, {full}, {stranger}, {garbage}, LOOP]");
    let text = format!(
        "[leak]\nmax_finds = 1_000_000\n[plans.p]\nmax_request_bytes = 2000\nmax_response_bytes = 5000\non_oversize = \"refuse\"\n\
         [integrations.api]\nallowed_domains = [\"api.test\", \"inside.test\", \"minted.test\", \"*.gone.test\"]\n{ports}\n\
         [integrations.only]\nallowed_domains = [\"only.test\"]\nports = [{port}]\nmethods = [\"GET\"]\n\
         paths = [\"/only/*\"]\n\
         [integrations.locked]\nallowed_domains = [\"locked.test\"]\nports = [{port}]\nrequire_credential = \"KEY\"\n\
         [integrations.plain]\nallowed_domains = [\"plain.test\"]\nports = [{}]\nplain_http = true\n\
         [integrations.dead]\nallowed_domains = [\"dead.test\"]\nports = [{port}]\n\
         upstream = {{ proxy = \"http://{dead_proxy}\", resolve = \"proxy\" }}\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\", \"locked.test\"]\n\
         [credentials.MINTED]\nauth_type = \"oauth2_client_credentials\"\ntoken_url = \"https://api.test:{closed}/\"\n\
         client_id = \"c\"\nclient_secret = \"file:client-secret\"\ndomains = [\"minted.test\"]\n\
         [tasks.t]\nintegrations = [\"api\", \"only\", \"locked\", \"plain\", \"dead\"WEBHOOK]\ncredentials = [\"KEY\", \"MINTED\"]\nplan = \"p\"\n\
         tools = [\"api_call\", \"http_get\", \"http_request\", \"webhook\"]\n",
        plain.port(),
    );
    let mut captured: Vec<_> = [port, closed, full, stranger, garbage].map(|port| ("api.test", port)).into();
    captured.extend(
        ["only.test", "locked.test", "minted.test", "inside.test", "x.gone.test", "dead.test"].map(|name| (name, port)),
    );
    captured.push(("plain.test", plain.port()));
    let listeners = Synthetic::of(builder.dir.path()).listeners(&captured);
    let begin = text.replace("LOOP", "1").replace("WEBHOOK", "");
    Certificates::new(builder.dir.path());
    let lab =
        builder.proxy(&format!("{listeners}{TLS}{more}{ADMIN}[upstream]\nconnect_timeout = \"400ms\"\n{begin}")).await;
    Hosts { lab, origin, plain, text, captured, closed, full, stranger, garbage, _sockets: sockets }
}

/// Returns the expected results that depend on the request alone, not on the caller.
fn rows(yard: &Hosts) -> Vec<(&'static str, Call)> {
    let port = yard.origin.port();
    let at = |host: &str, path: &str| format!("https://{host}:{port}{path}");
    let get = |url: String| ask("http_get", json!({ "url": url }));
    let api =
        |credential: &str, url: String| ask("api_call", json!({"method": "GET", "url": url, "credential": credential}));
    let coded = STANDARD.encode(KEY);
    let escaped = utf8_percent_encode(KEY, NON_ALPHANUMERIC).to_string();
    let mut rows = vec![
        // The requests that the front-end does not send come first, while the record of calls has room for them.
        ("request_malformed", ask("http_request", json!({"url": at("api.test", "/"), "timeout": "soon"}))),
        ("tool_not_enabled", ask("shell", json!({"url": at("api.test", "/")}))),
        ("host_not_allowed", get(at("evil.test", "/"))),
        ("host_not_allowed", get("https://169.254.169.254/".to_owned())),
        ("host_not_allowed", get(format!("https://api.test.evil.test:{port}/"))),
        ("port_not_allowed", get("https://api.test/".to_owned())),
        ("method_not_allowed", ask("http_request", json!({"method": "POST", "url": at("only.test", "/only/x")}))),
        ("method_not_allowed", ask("http_request", json!({"method": "TRACE", "url": at("api.test", "/")}))),
        ("path_not_allowed", get(at("only.test", "/other"))),
        ("path_not_allowed", get(at("only.test", "/only/..%2fother"))),
        ("address_not_allowed", get(at("inside.test", "/"))),
        ("resolve_failed", get(at("x.gone.test", "/"))),
        ("target_malformed", get("https://0x7f.1/".to_owned())),
        ("target_malformed", get("https://2130706433/".to_owned())),
        ("target_malformed", get(format!("https://user@api.test:{port}/"))),
        ("scheme_not_allowed", get(format!("http://plain.test:{}/", yard.plain.port()))),
        ("credential_unavailable", api("MINTED", at("minted.test", "/"))),
        ("credential_unknown", api("OTHER", at("api.test", "/"))),
        ("credential_not_bound", api("KEY", at("only.test", "/only/x"))),
        ("credential_required", get(at("locked.test", "/"))),
        (
            "content_coding_unsupported",
            ask(
                "http_request",
                json!({
            "method": "POST", "url": at("api.test", "/"), "body": "x", "headers": {"Content-Encoding": "compress"}}),
            ),
        ),
        (
            "request_too_large",
            ask(
                "http_request",
                json!({
            "method": "POST", "url": at("api.test", "/sink"), "body": "x".repeat(3000)}),
            ),
        ),
        ("response_too_large", ask("http_request", json!({"url": at("api.test", "/known?6000")}))),
        ("connect_failed", get(format!("https://api.test:{}/", yard.closed))),
        ("connect_timed_out", get(format!("https://api.test:{}/", yard.full))),
        ("tls_failed", get(format!("https://api.test:{}/", yard.stranger))),
        ("upstream_protocol", get(format!("https://api.test:{}/", yard.garbage))),
        ("upstream_proxy_failed", get(at("dead.test", "/"))),
        ("request_timed_out", ask("http_request", json!({"url": at("api.test", "/stall"), "timeout": 1}))),
        ("tool_not_enabled", ask("http_post", json!({"url": at("api.test", "/"), "body": {}}))),
        ("uri_too_long", get(at("api.test", &format!("/{}", "x".repeat(33_000))))),
        ("loop_detected", get(format!("https://api.test:{}/", yard.lab.proxy.port()))),
    ];
    for form in [KEY, &coded, &escaped, &STANDARD.encode(format!("ab{KEY}cd"))] {
        let post = |more: Value| {
            let mut input =
                json!({"method": "POST", "url": at("api.test", "/"), "credential": "KEY", "body": {"a": 1}});
            input.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
            ("leak_detected", ask("api_call", input))
        };
        rows.extend([
            post(json!({"headers": {"X-Note": format!("see {form}!")}})),
            post(json!({"body": {"deep": [{"text": form}]}})),
            post(json!({"query_params": {"q": form}})),
            ("leak_detected", ask("http_request", json!({"method": "POST", "url": at("api.test", "/"), "body": form}))),
        ]);
        if !form.contains('%') || form == escaped {
            let path = format!("/{}", form.replace('/', "%2F"));
            rows.push(("leak_detected", ask("http_get", json!({"url": at("api.test", &path)}))));
        }
    }
    let hex: String = KEY.bytes().map(|byte| format!("{byte:02x}")).collect();
    rows.push(("leak_detected", get(at(&format!("{hex}.gone.test"), "/"))));
    rows
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_request_gets_the_same_code_on_every_way() {
    get_the_same_code_on_every_way("").await;
}

/// As the test above, where the CONNECT itself is refused.
#[tokio::test(flavor = "multi_thread")]
async fn a_hostile_request_gets_the_same_code_if_connects_are_refused() {
    get_the_same_code_on_every_way(lab::REFUSE_OUTSIDE).await;
}

async fn get_the_same_code_on_every_way(more: &str) {
    let yard = start_hosts(more).await;
    let Hosts { lab, origin, text, .. } = &yard;
    let reached = || origin.seen().iter().filter(|seen| !["/known", "/stall"].contains(&seen.uri.path())).count();
    let open = text.replace("LOOP", &lab.proxy.port().to_string());
    lab.reload(&open.replace("WEBHOOK", ""));
    let rows = rows(&yard);
    let gate = Proxy::of(lab, &yard.captured);
    assert!(rows.iter().filter(|(_, ask)| gate.captured_at(ask).is_some()).count() > 40, "most can be captured");
    assert_eq!(rows.iter().map(|(code, _)| *code).collect::<BTreeSet<_>>(), BTreeSet::from(TESTED_ABOVE));
    for (code, ask) in rows {
        assert_refused_on_every_way(&gate, lab, &ask, code).await;
    }
    let hook = ask("webhook", json!({"url": format!("https://api.test:{}/x", origin.port()), "body": {}}));
    assert_refused_on_every_way(&gate, lab, &hook, "webhook_not_enabled").await;
    let hooks = "[tasks.t]\nwebhook_urls = [\"https://hooks.test/x\"]";
    lab.reload(&open.replace("WEBHOOK", ", \"webhook\"").replace("[tasks.t]", hooks));
    assert_refused_on_every_way(&gate, lab, &hook, "webhook_not_registered").await;
    assert_eq!((reached(), yard.plain.connections()), (0, 0), "{:?}", origin.seen());
    assert_eq!((lab.dns.queries("evil.test"), lab.dns.queries("api.test.evil.test")), (0, 0));
    // No line contains a value in any form.
    let log = std::fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains(KEY) && !log.contains(&STANDARD.encode(KEY)), "{log}");
}

#[tokio::test(flavor = "multi_thread")]
async fn unknown_callers_get_the_same_code_on_every_way() {
    let yard = start_hosts("").await;
    let gate = Proxy { token: "another-token-of-24-bytes-or-more".to_owned(), ..Proxy::of(&yard.lab, &[]) };
    let ask = ask("http_get", json!({ "url": format!("https://api.test:{}/", yard.origin.port()) }));
    // A captured connection has no token to be wrong.
    assert_refused_on_every_way(&gate, &yard.lab, &ask, "caller_unknown").await;
}

/// Starts a lab with one origin and additional configuration, for example a plan.
async fn lab_with(more: &str) -> (Lab, Origin, Call) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let port = origin.port();
    Certificates::new(builder.dir.path());
    let listeners = Synthetic::of(builder.dir.path()).listeners(&[("api.test", port)]);
    let text = format!(
        "{listeners}{TLS}{ADMIN}[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\nAPPROVAL\n\
         [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\nraw = true\n\
         tools = [\"http_get\", \"http_request\"]\nPLAN\n{more}"
    );
    let plan = if more.contains("[plans.p]") { "plan = \"p\"" } else { "" };
    let (approval, text) = match text.split_once("# approval\n") {
        Some((before, after)) => ("approval = \"required\"", format!("{before}{after}")),
        None => ("", text),
    };
    let lab = builder.proxy(&text.replace("APPROVAL", approval).replace("PLAN", plan)).await;
    (lab, origin, ask("http_get", json!({ "url": format!("https://api.test:{port}/") })))
}

/// Returns the ways into a lab of [`lab_with`].
fn gate_of(lab: &Lab, origin: &Origin) -> Proxy {
    Proxy::of(lab, &[("api.test", origin.port())])
}

#[tokio::test(flavor = "multi_thread")]
async fn plan_limits_are_counted_alike_on_every_way() {
    for (plan, code) in [("calls_per_execution = 1", "execution_limit"), ("calls_per_minute = 1", "rate_limited")] {
        let (lab, origin, ask) = lab_with(&format!("[plans.p]\n{plan}\n")).await;
        let done = tokio::task::block_in_place(|| Proxy::of(&lab, &[]).call(&ask));
        assert_eq!(done["response_status"], 200, "{done:#}");
        assert_refused_on_every_way(&gate_of(&lab, &origin), &lab, &ask, code).await;
        assert_eq!(origin.seen().len(), 1);
    }
    let (lab, origin, ask) = lab_with("[plans.p]\nconcurrent = 1\n").await;
    let url = format!("https://api.test:{}/stall", origin.port());
    let request = lab.absolute("GET", &url).header("exeat-tool", "http_get").body(lab::client::empty()).unwrap();
    let stream = lab.proxy_tls(&["http/1.1"]).await;
    tokio::spawn(async move { h1(stream, request).await });
    while origin.seen().is_empty() {
        tokio::task::yield_now().await;
    }
    assert_refused_on_every_way(&gate_of(&lab, &origin), &lab, &ask, "concurrency_limited").await;
}

#[tokio::test(flavor = "multi_thread")]
async fn too_many_fields_are_refused_on_every_way() {
    let (lab, origin, ask) = lab_with("").await;
    let many: serde_json::Map<_, _> = (0..120).map(|n| (format!("x-{n}"), json!("x"))).collect();
    let ask = Call { input: json!({"url": ask.input["url"], "headers": many}), ..ask };
    assert_refused_on_every_way(&gate_of(&lab, &origin), &lab, &ask, "head_too_large").await;
    assert!(origin.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stopped_execution_is_refused_on_every_way() {
    let (lab, origin, ask) = lab_with("").await;
    assert_eq!(tokio::task::block_in_place(|| Proxy::of(&lab, &[]).call(&ask))["response_status"], 200);
    assert_eq!(lab.admin_request("DELETE", "/v1/executions/t", &Value::Null).await.0, 200);
    assert_refused_on_every_way(&gate_of(&lab, &origin), &lab, &ask, "execution_stopped").await;
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn approval_is_required_on_every_way() {
    let (lab, origin, ask) = lab_with("# approval\n").await;
    let gate = gate_of(&lab, &origin);
    for by in EVERY {
        let url = format!("{}?{by:?}", ask.text("url").unwrap());
        let ask = Call { input: json!({ "url": url }), ..ask.clone() };
        assert_refused_by(&lab, &gate, by, &ask, "approval_pending").await;
        let (_, all) = lab.admin_request("GET", "/v1/approvals", &Value::Null).await;
        let id = all.as_array().unwrap().iter().find(|one| one["state"] == "pending").unwrap()["id"].clone();
        let path = format!("/v1/approvals/{}", id.as_str().unwrap());
        assert_eq!(lab.admin_request("POST", &path, &json!({"decision": "deny"})).await.0, 200);
        assert_refused_by(&lab, &gate, by, &ask, "approval_denied").await;
    }
    assert!(origin.seen().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_leaves_without_the_ledger_on_any_way() {
    let (_unheard, closed) = socket();
    let (lab, origin, ask) = lab_with(&format!(
        "[plans.p]\ncalls_per_minute = 5\n[ledger]\nstore = \"redis://127.0.0.1:{}/0\"\n",
        closed.port()
    ))
    .await;
    assert_refused_on_every_way(&gate_of(&lab, &origin), &lab, &ask, "ledger_unavailable").await;
    assert!(origin.seen().is_empty());
}

/// The log is written to a pipe whose reader has gone.
#[tokio::test(flavor = "multi_thread")]
async fn nothing_leaves_without_the_audit_log_on_any_way() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let dir = builder.dir.path();
    let text = format!(
        "{ADMIN}[audit]\npath = \"-\"\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [tasks.t]\nintegrations = [\"api\"]\ntools = [\"http_get\"]\n",
        origin.port()
    );
    let at = Synthetic::of(&dir.join("state/exeat"));
    Certificates::new(dir);
    let text = format!("{}{TLS}{text}", at.listeners(&[("api.test", origin.port())]));
    std::fs::write(
        dir.join("e.toml"),
        builder.config(&format!("{text}[[proxy.listeners]]\nlisten = \"unix:s.sock\"\nmode = \"socks5\"\n")),
    )
    .unwrap();
    let mut command = crate::operation::cli::exeat(dir, &["serve", "-c", "e.toml"]);
    command.stdout(Stdio::piped());
    let mut served = crate::operation::cli::Served::start(command);
    let mut out = BufReader::new(served.child.stdout.take().unwrap());
    let ca = std::fs::read_to_string(dir.join("state/exeat/ca.pem")).unwrap();
    let (socks, captured) = (SocksAt::Unix(dir.join("s.sock")), vec![("api.test", origin.port())]);
    let (proxy, token, dir) = (served.proxy().parse().unwrap(), TOKEN.to_owned(), dir.to_owned());
    let gate = Proxy { proxy, socks, captured, at, ca, token, dir };
    let ask = ask("http_get", json!({ "url": format!("https://api.test:{}/", origin.port()) }));
    let done = tokio::task::block_in_place(|| gate.call(&ask));
    assert_eq!(done["response_status"], 200, "{done:#}");
    let mut line = String::new();
    while !line.contains("\"closed\"") {
        line.clear();
        out.read_line(&mut line).unwrap();
    }
    drop(out);
    for by in EVERY {
        gate.refused(by, &ask, "audit_unavailable").await;
    }
    assert_eq!(origin.seen().len(), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn overload_is_reported_on_every_way() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text =
        format!("{ADMIN}[proxy]\nmax_connections = 1\n{}tools = [\"http_get\"]\n", lab::allow_api(origin.port()));
    let lab = builder.proxy(&text).await;
    let _only = lab.tunnel(&format!("api.test:{}", origin.port())).await;
    let ask = ask("http_get", json!({ "url": format!("https://api.test:{}/", origin.port()) }));
    for _ in 0..5 {
        assert_refused_by(&lab, &Proxy::of(&lab, &[]), By::Tool, &ask, "overloaded").await;
    }
}

/// The codes that the table above checks for every way.
const TESTED_ABOVE: [&str; 26] = [
    "address_not_allowed",
    "connect_failed",
    "connect_timed_out",
    "content_coding_unsupported",
    "credential_not_bound",
    "credential_required",
    "credential_unavailable",
    "credential_unknown",
    "host_not_allowed",
    "leak_detected",
    "loop_detected",
    "method_not_allowed",
    "path_not_allowed",
    "port_not_allowed",
    "request_malformed",
    "request_timed_out",
    "request_too_large",
    "resolve_failed",
    "response_too_large",
    "scheme_not_allowed",
    "target_malformed",
    "tls_failed",
    "tool_not_enabled",
    "upstream_protocol",
    "upstream_proxy_failed",
    "uri_too_long",
];
/// The codes that another test of this file checks.
const TESTED_SEPARATELY: [&str; 12] = [
    "approval_denied",
    "approval_pending",
    "audit_unavailable",
    "caller_unknown",
    "concurrency_limited",
    "execution_limit",
    "execution_stopped",
    "head_too_large",
    "ledger_unavailable",
    "rate_limited",
    "webhook_not_enabled",
    "webhook_not_registered",
];
/// The refusals that cannot occur on one of the ways, with the reason.
const EXCEPTIONS: [(&str, &str); 11] = [
    ("authority_mismatch", "the front-end writes Host from the URL: there is no second name"),
    ("draining", "the front-end has a connection for each call, and a proxy that is leaving takes none"),
    ("header_timeout", "the front-end writes its head at once"),
    ("no_name", "only a captured connection can lack a name"),
    ("not_implemented", "Transfer-Encoding is not a model's to set, and h2 has none"),
    ("not_tls", "only a tunnel can carry something else than TLS"),
    ("overloaded", "it is said of a connection, before anything is asked"),
    ("raw_not_allowed", "a tool call is no raw request"),
    ("scan_limit", "it takes a compressed body, and what a model writes is text"),
    ("sni_mismatch", "only a tunnel has a handshake that names a server"),
    ("sni_missing", "only a tunnel has a handshake that names a server"),
];

#[test]
fn every_code_is_tested_on_all_ways_or_excepted() {
    let excused = EXCEPTIONS.map(|(code, why)| {
        assert!(!why.is_empty(), "{code}");
        code
    });
    let mut known: Vec<_> = TESTED_ABOVE.into_iter().chain(TESTED_SEPARATELY).chain(excused).collect();
    known.sort_unstable();
    let mut all: Vec<_> = Refusal::ALL.iter().map(|refusal| refusal.code()).collect();
    all.sort_unstable();
    assert_eq!(known, all, "each code must be in exactly one of the three tables");
    let beside = include_str!("every_way_in.rs");
    for code in TESTED_SEPARATELY {
        let told =
            beside.lines().filter(|line| line.contains(&format!("\"{code}\"")) && line.trim().len() > code.len() + 3);
        assert!(told.count() > 0, "no test covers {code}");
    }
}

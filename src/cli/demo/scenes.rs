//! The requests of the demo's sandbox, and the expected results.

/// A request of the demo, with its expected result.
pub(super) struct Scene {
    pub(super) title: &'static str,
    pub(super) expected: &'static str,
    pub(super) action: Action,
}

/// A request of the sandbox.
pub(super) enum Action {
    /// Sends raw bytes to the proxy. `{auth}` is replaced by the `Proxy-Authorization` field.
    Raw(String),
    /// Sends CONNECT, then these bytes instead of TLS.
    Tunnel(String, &'static [u8]),
    /// Sends CONNECT, starts TLS with this server name or none, then sends one request.
    Tls { connect: String, name: Option<&'static str>, request: String },
}

/// The ports of the origins and of the proxy itself.
pub(super) struct Ports {
    pub(super) api: u16,
    pub(super) lying: u16,
    pub(super) plain: u16,
    pub(super) broken: u16,
    pub(super) dead: u16,
    pub(super) own: u16,
}

/// Returns all scenes in order.
pub(super) fn all(ports: &Ports, key: &str) -> Vec<Scene> {
    let parts = [
        passing(ports),
        malformed(ports),
        not_allowed(ports),
        credentials(ports, key),
        unreachable_or_unsafe_origins(ports),
    ];
    parts.into_iter().flatten().collect()
}

/// A request given as raw bytes.
fn raw(title: &'static str, expected: &'static str, text: String) -> Scene {
    Scene { title, expected, action: Action::Raw(text) }
}

/// A GET request in absolute form with additional fields.
fn get(title: &'static str, expected: &'static str, url: String, fields: &str) -> Scene {
    let host = url.split("//").nth(1).and_then(|rest| rest.split('/').next()).unwrap_or_default();
    let text = format!("GET {url} HTTP/1.1\r\nHost: {host}\r\n{{auth}}{fields}Connection: close\r\n\r\n");
    raw(title, expected, text)
}

/// One request through an inspected tunnel to `api.test`.
fn tls(
    ports: &Ports,
    title: &'static str,
    expected: &'static str,
    name: Option<&'static str>,
    request: String,
) -> Scene {
    Scene { title, expected, action: Action::Tls { connect: ports.api(), name, request } }
}

fn tunnel_request(host: &str, path: &str, method: &str, fields: &str) -> String {
    format!("{method} {path} HTTP/1.1\r\nHost: {host}\r\n{fields}Connection: close\r\n\r\n")
}

impl Ports {
    fn api(&self) -> String {
        format!("api.test:{}", self.api)
    }
}

const API: Option<&str> = Some("api.test");
const PLACEHOLDER: &str = "Authorization: Bearer ${secrets.API_KEY}\r\n";

fn passing(ports: &Ports) -> Vec<Scene> {
    let (host, plain) = (ports.api(), ports.plain);
    let ask = |fields: &str| tunnel_request(&host, "/public/x", "GET", fields);
    let by_name = "Exeat-Credential: API_KEY\r\n";
    vec![
        tls(ports, "GET through CONNECT, inspected", "allowed", API, ask("")),
        get("GET https://… in absolute form; the proxy does TLS", "allowed", format!("https://{host}/"), ""),
        get("GET http://… where plain HTTP is allowed", "allowed", format!("http://plain.test:{plain}/"), ""),
        tls(ports, "a credential by name; the origin echoes it", "allowed", API, ask(by_name)),
        tls(ports, "a placeholder instead of the key", "allowed", API, ask(PLACEHOLDER)),
    ]
}

fn malformed(ports: &Ports) -> Vec<Scene> {
    let host = ports.api();
    let start = |method: &str| format!("{method} https://{host}/ HTTP/1.1\r\nHost: {host}\r\n");
    let gzip = "{auth}Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n";
    vec![
        raw("no token", "caller_unknown", start("GET") + "\r\n"),
        raw("two Host fields", "request_malformed", start("GET") + "Host: evil.test\r\n{auth}\r\n"),
        raw("gzip as a transfer coding", "not_implemented", start("POST") + gzip),
        raw("a head of 70 kB", "head_too_large", format!("GET / HTTP/1.1\r\nX: {}\r\n\r\n", "x".repeat(70_000))),
        raw("an incomplete head", "header_timeout", "GET https://api.test/ HTTP/1.1\r\nHo".to_owned()),
        get("a host written as 0x7f.1", "target_malformed", "https://0x7f.1/".to_owned(), ""),
    ]
}

fn not_allowed(ports: &Ports) -> Vec<Scene> {
    let host = ports.api();
    let fronting = "fronting: another Host inside the tunnel";
    let dotted = "/public/%2e%2e/admin";
    vec![
        get("a host that is not allowed", "host_not_allowed", "https://evil.test/".to_owned(), ""),
        get("plain HTTP where only https is allowed", "scheme_not_allowed", format!("http://{host}/"), ""),
        get("another port", "port_not_allowed", "https://api.test:22/".to_owned(), ""),
        tls(
            ports,
            "DELETE where only GET is allowed",
            "method_not_allowed",
            API,
            tunnel_request(&host, "/", "DELETE", ""),
        ),
        tls(ports, dotted, "path_not_allowed", API, tunnel_request(&host, dotted, "GET", "")),
        tls(ports, fronting, "authority_mismatch", API, tunnel_request("evil.test", "/", "GET", "")),
        tls(ports, "fronting: another name in the TLS handshake", "sni_mismatch", Some("evil.test"), String::new()),
        tls(ports, "no name in the TLS handshake", "sni_missing", None, String::new()),
        Scene {
            title: "data other than TLS in a tunnel",
            expected: "not_tls",
            action: Action::Tunnel(host, b"\x05\x01\x00"),
        },
    ]
}

fn credentials(ports: &Ports, key: &str) -> Vec<Scene> {
    let (host, lying) = (ports.api(), format!("https://lying.test:{}/", ports.lying));
    let url = || format!("https://{host}/");
    let tool = |name: &str| format!("Exeat-Tool: {name}\r\n");
    let foreign = "a credential that the task does not have";
    vec![
        get("the placeholder sent to another host", "credential_not_bound", lying, PLACEHOLDER),
        get(foreign, "credential_unknown", url(), "Exeat-Credential: OTHER\r\n"),
        get("the key itself in a URL", "leak_detected", format!("https://{host}/public/{key}"), ""),
        get("api_call without a credential", "credential_required", url(), &tool("api_call")),
        get("a tool that the task does not have", "tool_not_enabled", url(), &tool("http_get")),
        get("a webhook without an integration", "webhook_not_enabled", url(), &tool("webhook")),
    ]
}

fn unreachable_or_unsafe_origins(ports: &Ports) -> Vec<Scene> {
    let Ports { lying, broken, dead, own, .. } = ports;
    let slow = format!("https://{}/slow", ports.api());
    let untrusted = "an origin with an untrusted certificate";
    vec![
        get("a name that resolves to 10.0.0.7", "address_not_allowed", "https://inside.test/".to_owned(), ""),
        get("an allowed address and the metadata service", "address_not_allowed", "https://mixed.test/".to_owned(), ""),
        get("the proxy itself", "loop_detected", format!("http://127.0.0.1:{own}/"), ""),
        get("a name that does not exist", "resolve_failed", "https://gone.test/".to_owned(), ""),
        get("an origin that is down", "connect_failed", format!("https://dead.test:{dead}/"), ""),
        get(untrusted, "tls_failed", format!("https://lying.test:{lying}/"), ""),
        get("an origin that does not speak HTTP", "upstream_protocol", format!("http://broken.test:{broken}/"), ""),
        get("an origin that never answers", "request_timed_out", slow, ""),
    ]
}

//! Upstream proxies of others: squid with HTTP and with TLS, and microsocks. The daemon is in a network that leads to them only.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::callers::listeners::Certificates;
use crate::lab::TOKEN;
use crate::operation::cli::{output, text};

const PASSWORD: &str = "p:ss w%rd";

const ORIGIN: &str = r#"
import http.server, ssl, threading
class Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    def do_GET(self):
        body = b"from the origin\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): open("connections", "a").write(self.client_address[0] + "\n")
def serve(server): threading.Thread(target=server.serve_forever, daemon=True).start()
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("origin.pem", "origin-key.pem")
server = http.server.ThreadingHTTPServer(("203.0.113.9", 443), Handler)
server.socket = context.wrap_socket(server.socket, server_side=True)
serve(server)
serve(http.server.ThreadingHTTPServer(("203.0.113.9", 8081), Handler))
print("ready", flush=True)
http.server.ThreadingHTTPServer(("203.0.113.9", 80), Handler).serve_forever()
"#;

const CONFIG: &str = r#"
state_dir = "state"
[proxy]
listen = ["127.0.0.1:3128"]
[upstream]
extra_roots = ["clients.pem"]
connect_timeout = "3s"
UPSTREAM
[dns]
servers = []
hosts = { HOSTS"proxy.test" = ["10.9.0.1"] }
[network]
allow_cidrs = ["203.0.113.0/24"]
[audit]
path = "audit.jsonl"
[integrations.api]
allowed_domains = ["api.test"]
ports = [80, 443, 8081]
plain_http = true
[integrations.sealed]
allowed_domains = ["sealed.test"]
mode = "opaque"
[tasks.t]
token = "file:token"
integrations = ["api", "sealed"]
"#;

const SQUID: &str = r#"
http_port 10.9.0.1:3128
https_port 10.9.0.1:3129 tls-cert=DIR/proxy.pem tls-key=DIR/proxy-key.pem
auth_param basic program /usr/lib/squid/basic_ncsa_auth DIR/users
auth_param basic children 1
acl users proxy_auth REQUIRED
acl web port 80 443
http_access deny !web
http_access allow users
http_access deny all
hosts_file DIR/hosts
pid_filename none
cache deny all
cache_log DIR/squid/cache.log
access_log stdio:DIR/squid/access.log
cache_effective_user nobody
netdb_filename none
coredump_dir DIR/squid
shutdown_lifetime 1 second
"#;

/// `world` has the origin, `edge` the upstream proxies, and `inner` the daemon and its clients. `edge` forwards nothing.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
for name in world edge inner; do ip netns add $name; ip -n $name link set lo up; done
ip link add w0 netns world type veth peer name e0 netns edge
ip link add e1 netns edge type veth peer name i0 netns inner
address() { ip -n "$1" addr add "$3" dev "$2"; ip -n "$1" link set "$2" up; }
address world w0 203.0.113.9/24; address edge e0 203.0.113.2/24
address edge e1 10.9.0.1/24; address inner i0 10.9.0.2/24
ip netns exec edge sh -c 'echo 0 > /proc/sys/net/ipv4/ip_forward'
mount --bind hosts /etc/hosts
trap 'kill $(jobs -p)' EXIT
mkfifo up
ip netns exec world python3 origin.py > up &
read ready < up
printf 'exeat:%s\n' "$(openssl passwd -apr1 "$PASSWORD")" > users; chmod 644 users
mkdir squid; chmod 777 squid
ip netns exec edge squid -N -f squid.conf > squid.log 2>&1 &
ip netns exec edge microsocks -i 10.9.0.1 -p 1080 -u exeat -P "$PASSWORD" > socks.log 2>&1 &
for port in 3128 3129 1080; do
    for i in $(seq 200); do ip netns exec edge bash -c ": > /dev/tcp/10.9.0.1/$port" 2>/dev/null && break; sleep 0.1; done
done
get() { echo "$1: $(ip netns exec inner curl -sS -m 20 -x "http://t:$TOKEN@127.0.0.1:3128" "${@:2}" 2>&1 | tr '\n' ' ')"; }
run() {
    rm -rf state; cp "$2" e.toml
    ip netns exec inner env HTTPS_PROXY=http://10.9.0.1:9 "$EXEAT" serve -c e.toml 2> log &
    daemon=$!
    for i in $(seq 200); do grep -q ready log && break; kill -0 $daemon || { cat log >&2; exit 1; }; sleep 0.1; done
    get "$1 https" --cacert state/ca.pem https://api.test/
    get "$1 http" http://api.test/
    # Its certificate has the name of its issuer.
    get "$1 opaque" -k https://sealed.test/
    get "$1 port" http://api.test:8081/
    kill $daemon; wait $daemon || true
    cp state/audit.jsonl "$1.jsonl"
}
for file in *.conf.toml; do run "${file%.conf.toml}" "$file"; done
echo "direct: $(ip netns exec inner curl -sS -m 5 http://203.0.113.9/ 2>&1)"
"#;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root, unshare, ip, curl, python3, openssl, squid and microsocks"]
async fn squid_and_microsocks_are_the_only_way_out() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let certificates = Certificates::new(dir.path());
    let (cert, key) = certificates.issue(&["api.test", "sealed.test"], 7);
    let (proxy_cert, proxy_key) = certificates.issue(&["proxy.test"], 8);
    let squid = SQUID.replace("DIR", dir.path().to_str().unwrap());
    let hosts = "203.0.113.9 api.test sealed.test\n127.0.0.1 localhost\n";
    let files = [
        ("origin.pem", cert.as_str()),
        ("origin-key.pem", &key),
        ("proxy.pem", &proxy_cert),
        ("proxy-key.pem", &proxy_key),
        ("origin.py", ORIGIN),
        ("squid.conf", &squid),
        ("hosts", hosts),
        ("password", PASSWORD),
        ("wrong", "another password"),
        ("token", TOKEN),
    ];
    let known = "\"api.test\" = [\"203.0.113.9\"], \"sealed.test\" = [\"203.0.113.9\"], ";
    let login = |url: &str, password: &str| format!("proxy = \"{url}\"\nproxy_password = \"file:{password}\"");
    let resolving = |url: &str| format!("{}\nresolve = \"proxy\"", login(url, "password"));
    let configs = [
        ("none", String::new(), known),
        ("http", login("http://exeat@proxy.test:3128", "password"), known),
        ("https", login("https://exeat@proxy.test:3129", "password"), known),
        ("socks5", login("socks5://exeat@10.9.0.1:1080", "password"), known),
        ("http-names", resolving("http://exeat@proxy.test:3128"), ""),
        ("https-names", resolving("https://exeat@proxy.test:3129"), ""),
        ("socks5-names", resolving("socks5://exeat@proxy.test:1080"), ""),
        ("http-wrong", login("http://exeat@proxy.test:3128", "wrong"), known),
        ("socks5-wrong", login("socks5://exeat@proxy.test:1080", "wrong"), known),
        ("http-anonymous", "proxy = \"http://proxy.test:3128\"".to_owned(), known),
        ("plain-to-tls", login("http://exeat@proxy.test:3129", "password"), known),
        ("tls-to-plain", login("https://exeat@proxy.test:3128", "password"), known),
    ];
    let write = |name: &str, text: &str| {
        std::fs::write(dir.path().join(name), text).unwrap();
        std::fs::set_permissions(dir.path().join(name), std::fs::Permissions::from_mode(0o644)).unwrap();
    };
    files.iter().for_each(|(name, text)| write(name, text));
    for (name, upstream, hosts) in &configs {
        write(&format!("{name}.conf.toml"), &CONFIG.replace("UPSTREAM", upstream).replace("HOSTS", hosts));
    }
    let mut command = Command::new("unshare");
    command.args(["-n", "-m", "bash", "-c", SCRIPT]).current_dir(dir.path());
    command.env("EXEAT", env!("CARGO_BIN_EXE_exeat")).env("PASSWORD", PASSWORD).env("TOKEN", TOKEN);
    let output = output(command).await;
    let out = text(&output.stdout);
    let said = |name: &str| {
        let line = out.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.unwrap_or_else(|| panic!("{name}: {out}\n{}", text(&output.stderr)))
    };
    const REACHED: &str = "from the origin";
    for name in ["http", "https", "socks5", "http-names", "https-names", "socks5-names"] {
        for way in ["https", "http", "opaque"] {
            assert!(said(&format!("{name} {way}")).contains(REACHED), "{name} {way}: {out}");
        }
        // squid does not allow this port.
        let want = if name.starts_with("socks5") { REACHED } else { "does not allow the destination" };
        assert!(said(&format!("{name} port")).contains(want), "{name}: {out}");
        let log = std::fs::read_to_string(dir.path().join(format!("{name}.jsonl"))).unwrap();
        let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        let closed: Vec<_> = lines.iter().filter(|line| line["event"] == "closed" && line["code"].is_null()).collect();
        assert!(closed.len() >= 3, "{name}: {log}");
        for line in closed {
            let port = if name.starts_with("https") {
                3129
            } else if name.starts_with("http") {
                3128
            } else {
                1080
            };
            assert!(line["upstream_proxy"].as_str().unwrap().ends_with(&format!(":{port}")), "{line}");
            let is_checked = !name.ends_with("names");
            assert_eq!(
                (line["addr"] == "203.0.113.9", line["addr_checked"].is_null()),
                (is_checked, is_checked),
                "{line}"
            );
        }
    }
    let rejected = "does not accept the credentials";
    let refused = [
        ("none", "does not accept connections"),
        ("http-wrong", rejected),
        ("socks5-wrong", rejected),
        ("http-anonymous", rejected),
        ("tls-to-plain", "TLS to the upstream proxy failed"),
    ];
    for (name, want) in refused {
        for way in ["https", "http"] {
            let told = said(&format!("{name} {way}"));
            assert!(told.contains(want), "{name} {way}: {told}");
        }
    }
    let told = said("plain-to-tls https");
    assert!(told.contains("upstream_proxy_failed"), "{told}");
    assert!(said("direct").contains("Network is unreachable") || said("direct").contains("Couldn't connect"), "{out}");
    // Every connection to the origin has come from the machine of the proxies.
    let connections = std::fs::read_to_string(dir.path().join("connections")).unwrap();
    assert!(connections.lines().all(|address| address == "203.0.113.2"), "{connections}");
    let access = std::fs::read_to_string(dir.path().join("squid/access.log")).unwrap();
    for asked in ["CONNECT 203.0.113.9:443 exeat", "CONNECT api.test:443 exeat", "CONNECT 203.0.113.9:80 exeat"] {
        assert!(access.contains(asked), "{asked}: {access}");
    }
}

//! Connections that TPROXY rules lead to the proxy: no address is translated, and none is tracked.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::callers::listeners::Certificates;
use crate::operation::cli::{output, text};

const ORIGIN: &str = r#"
import http.server, socket, ssl, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"from the origin, to " + self.client_address[0].encode() + b"\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
class V6(http.server.ThreadingHTTPServer): address_family = socket.AF_INET6
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("origin.pem", "origin-key.pem")
for kind, address in [(http.server.ThreadingHTTPServer, "203.0.113.9"), (V6, "2001:db8:2::9")]:
    tls = kind((address, 443), Handler)
    tls.socket = context.wrap_socket(tls.socket, server_side=True)
    for server in [tls, kind((address, 80), Handler)]:
        threading.Thread(target=server.serve_forever, daemon=True).start()
print("ready", flush=True)
threading.Event().wait()
"#;

const CONFIG: &str = r#"
state_dir = "state"
[proxy]
listen = []
[[proxy.listeners]]
listen = "127.0.0.1:15001"
mode = "transparent"
tproxy = true
cidr_tasks = { "10.9.0.0/24" = "t" }
[[proxy.listeners]]
listen = "[::1]:15001"
mode = "transparent"
tproxy = true
cidr_tasks = { "2001:db8:9::/64" = "t" }
[[proxy.listeners]]
listen = "10.9.0.1:53"
mode = "dns"
cidr_tasks = { "10.9.0.0/24" = "t" }
[upstream]
extra_roots = ["clients.pem"]
[dns]
servers = []
hosts = { "api.test" = ["203.0.113.9", "2001:db8:2::9"] }
[network]
allow_cidrs = ["203.0.113.0/24", "2001:db8:2::/64"]
[audit]
path = "audit.jsonl"
[integrations.api]
allowed_domains = ["api.test"]
ports = [80, 443]
plain_http = true
[tasks.t]
token = "file:token"
integrations = ["api"]
"#;

/// `world` has the origin, `gate` the daemon (user 65532), and `box` a sandbox whose default route is `gate`.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
for name in world gate box; do ip netns add $name; ip -n $name link set lo up; done
ip link add w0 netns world type veth peer name g0 netns gate
ip link add g1 netns gate type veth peer name b0 netns box
address() { ip -n "$1" addr add "$3" dev "$2" $4; ip -n "$1" link set "$2" up; }
address world w0 203.0.113.9/24; address world w0 2001:db8:2::9/64 nodad
address gate g0 203.0.113.2/24; address gate g0 2001:db8:2::2/64 nodad
address gate g1 10.9.0.1/24; address gate g1 2001:db8:9::1/64 nodad
address box b0 10.9.0.2/24; address box b0 10.9.7.7/32; address box b0 2001:db8:9::2/64 nodad
ip -n box route add default via 10.9.0.1
ip -n box route add default via 2001:db8:9::1
# Without the rules, the sandbox reaches the world.
ip -n world route add 10.9.0.0/24 via 203.0.113.2
ip -n world route add 2001:db8:9::/64 via 2001:db8:2::2
ip netns exec gate sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding'
trap 'kill $(jobs -p)' EXIT
mkfifo up
ip netns exec world python3 origin.py > up &
read ready < up
try() { echo "$1: $(ip netns exec box curl -sS -m 9 --cacert ca.pem "${@:2}" 2>&1 | tr '\n' ' ')"; }
cp clients.pem ca.pem
try "no rules" --resolve api.test:443:203.0.113.9 https://api.test/
try "no rules v6" --resolve 'api.test:443:[2001:db8:2::9]' https://api.test/
ip netns exec gate nft -f rules.nft; ip netns exec gate nft -f rules.nft
ip netns exec gate sh -e route.sh; ip netns exec gate sh -e route.sh
echo "rules: $(ip netns exec gate nft list ruleset | grep -c tproxy)"
echo "nameserver 10.9.0.1" > resolv.conf
mount --bind resolv.conf /etc/resolv.conf
mkdir state; chown 65532:65532 . state
daemon() { ip netns exec gate setpriv --reuid 65532 --regid 65532 --clear-groups "$@" "$EXEAT" serve -c e.toml; }
echo "no capability: $(daemon --inh-caps +net_bind_service --ambient-caps +net_bind_service 2>&1 | tail -1)"
ip netns exec gate setpriv --reuid 65532 --regid 65532 --clear-groups --inh-caps +net_raw,+net_bind_service \
    --ambient-caps +net_raw,+net_bind_service "$EXEAT" serve -c e.toml 2> log &
daemon=$!
until grep -q ready log; do kill -0 $daemon || { cat log >&2; exit 1; }; sleep 0.1; done
cp state/ca.pem ca.pem; chmod 644 ca.pem
all() {
    try "$1 https" https://api.test/
    try "$1 http" http://api.test/
    try "$1 pinned" --resolve api.test:443:203.0.113.9 https://api.test/
    try "$1 v6" --resolve 'api.test:443:[2001:db8:2::9]' https://api.test/
    try "$1 v6 http" --resolve 'api.test:80:[2001:db8:2::9]' http://api.test/
    try "$1 other" --resolve api.test:443:203.0.113.10 https://api.test/
    try "$1 denied" --resolve evil.test:443:203.0.113.9 https://evil.test/
    echo "$1 udp: $(ip netns exec box python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(9); s.connect(("10.9.0.1", 54)); s.send(b"x"); s.recv(1)' 2>&1 | tail -1)"
    echo "$1 dig: $(ip netns exec box dig +short +tcp +tries=1 +timeout=5 api.test 2>&1 | tail -1)"
    echo "$1 spoofed: $(ip netns exec box dig -b 10.9.7.7 +short +tries=1 +timeout=1 api.test 2>&1 | tail -1)"
    try "$1 listener" --resolve api.test:15001:10.9.0.1 https://api.test:15001/
}
all led
echo "gate: $(ip netns exec gate curl -sS -m 9 --cacert ca.pem --connect-to ::127.0.0.1:15001 https://api.test/ 2>&1)"
# Without the capability, with the socket of the daemon before it.
ip netns exec gate setpriv --reuid 65532 --regid 65532 --clear-groups --inh-caps +net_bind_service \
    --ambient-caps +net_bind_service "$EXEAT" serve --takeover -c e.toml 2> next-log &
next=$!
wait $daemon || true
until grep -q ready next-log; do kill -0 $next || { cat next-log >&2; exit 1; }; sleep 0.1; done
daemon=$next
try "taken over" --resolve api.test:443:203.0.113.9 https://api.test/
kill -9 $daemon
wait $daemon 2>/dev/null || true
all killed
"#;

/// Returns the first block of a language in the manual's section on TPROXY.
fn block(language: &str) -> &'static str {
    let section = include_str!("../../../docs/ways-in.md").split_once("\n### TPROXY\n").unwrap().1;
    let (_, block) = section.split_once(&format!("```{language}\n")).unwrap();
    block.split_once("```").unwrap().0
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root, unshare, ip, nft, setpriv, curl, dig, and python3"]
async fn connections_that_tproxy_rules_lead_to_the_proxy_are_captured() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (cert, key) = Certificates::new(dir.path()).issue(&["api.test"], 7);
    let files = [
        ("origin.pem", cert.as_str()),
        ("origin-key.pem", &key),
        ("origin.py", ORIGIN),
        ("e.toml", CONFIG),
        ("token", crate::lab::TOKEN),
        ("rules.nft", &block("nft").replace("veth0", "g1")),
        ("route.sh", block("sh")),
    ];
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let mut command = Command::new("unshare");
    command.args(["-n", "-m", "bash", "-c", SCRIPT]).current_dir(dir.path());
    command.env("EXEAT", env!("CARGO_BIN_EXE_exeat"));
    let output = output(command).await;
    let out = text(&output.stdout);
    let log = std::fs::read_to_string(dir.path().join("state/audit.jsonl")).unwrap_or_default();
    let rows = [
        ("no capability", "tproxy needs CAP_NET_RAW"),
        ("no rules", "from the origin, to 10.9.0.2"),
        ("no rules v6", "from the origin, to 2001:db8:9::2"),
        ("led https", "from the origin, to "),
        ("led http", "from the origin, to "),
        ("led pinned", "from the origin, to "),
        ("led v6", "from the origin, to "),
        ("led v6 http", "from the origin, to "),
        ("led other", "unrecognized name"),
        ("led denied", "host_not_allowed"),
        ("led listener", "port_not_allowed"),
        ("led udp", "No route to host"),
        ("led dig", "198.1"),
        ("led spoofed", "no servers could be reached"),
        ("gate", "access denied"),
        ("taken over", "from the origin, to "),
        ("killed https", "Could not resolve host"),
        ("killed pinned", "Failed to connect"),
        ("killed v6", "Failed to connect"),
        ("killed v6 http", "Failed to connect"),
        ("killed other", "Failed to connect"),
        ("killed denied", "Failed to connect"),
        ("killed listener", "Failed to connect"),
        ("killed http", "Could not resolve host"),
        ("killed dig", "no servers could be reached"),
        ("killed spoofed", "no servers could be reached"),
        ("killed udp", "No route to host"),
        ("rules", "2"),
    ];
    for (name, want) in rows {
        let line = out.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        let line = line.unwrap_or_else(|| panic!("{name}: {out}\n{}", text(&output.stderr)));
        assert!(line.contains(want), "{name}: {line}\n{out}\n{log}");
    }
    let direct = |line: &str| line.contains("to 10.9.0.2") || line.contains("to 2001:db8:9::2");
    assert_eq!(out.lines().filter(|line| direct(line)).count(), 2, "{out}");
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let with = |code: &str, original: &str| {
        lines.iter().any(|line| line["code"] == code && line["original"].as_str() == Some(original))
    };
    assert!(with("sni_mismatch", "203.0.113.10:443") && with("host_not_allowed", "203.0.113.9:443"), "{log}");
    // A query from another address would have a line.
    assert!(!log.contains("10.9.7.7"), "{log}");
    assert!(with("caller_unknown", "127.0.0.1:15001"), "{log}");
    let original = |address: &str| lines.iter().any(|line| line["event"] == "closed" && line["original"] == address);
    assert!(original("203.0.113.9:443") && original("[2001:db8:2::9]:443"), "{log}");
}

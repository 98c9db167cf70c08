//! The proxies that are measured, with comparable settings, and the place they run in.

use std::fs;
use std::io::{BufRead, BufReader};
use std::net::{Ipv4Addr, TcpStream};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use exeat::tls::authority::Authority;
use rustix::process::{Pid, Signal, kill_process};
use sha2::{Digest, Sha256};

use crate::client::ProxyAccess;
use crate::lab::daemon::{self, PROXY_AUTHORIZATION, Ports, REAL_KEY, Scale};
use crate::measure::{self, Usage};
use crate::pki;
use crate::process::{free_port, private, serve_dns};

/// The policy of the comparison.
const SCALE: Scale = Scale { credentials: 1_000, rules: 0, tasks: 0 };
/// The number of hosts that squid, which has no wildcard in its hosts file, can resolve.
pub(crate) const NEW_HOSTS: usize = 20_000;
/// The addresses that stand for names. On Linux they are all the machine's own.
const SYNTHETIC_RANGE: &str = "127.18.0.0/16";
/// The name of the captured connections.
pub(crate) const CAPTURED: &str = "api0.bench.test";
const START_TIMEOUT: Duration = Duration::from_secs(30);

/// A proxy that can be measured.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Contender {
    /// The relays of this benchmark, without any policy.
    Relay,
    Exeat,
    /// The same, with TLS to its clients.
    ExeatTls,
    /// Another binary of exeat, for example an earlier one.
    Other,
    Squid,
    Mitmproxy,
    Tinyproxy,
}

/// The origin, the certificates and the directory of a run.
pub(crate) struct Lab {
    pub(crate) dir: tempfile::TempDir,
    pub(crate) origin_port: u16,
    dns_port: u16,
    other: Option<PathBuf>,
    origin: Child,
}

/// The ways in that programs use which know no HTTP proxy.
#[derive(Clone, Copy)]
pub(crate) struct OtherWays {
    pub(crate) socks: u16,
    /// The address that stands for [`CAPTURED`]. The transparent listener is there, at the origin's port.
    pub(crate) captured: Ipv4Addr,
}

/// A started contender. It is killed when it is dropped.
pub(crate) struct Proxy {
    pub(crate) contender: Contender,
    pub(crate) port: u16,
    /// The ways into exeat beside its port. The others have none.
    pub(crate) other_ways: OtherWays,
    /// From the start of the process to the first accepted connection.
    pub(crate) started_within: Duration,
    child: Child,
    pub(crate) dir: tempfile::TempDir,
}

impl Lab {
    pub(crate) fn new(other: Option<PathBuf>) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // squid drops its privileges.
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
        pki::create_ca(dir.path(), "ca");
        pki::create_ca(dir.path(), "origin-ca");
        pki::create_leaf(dir.path(), "ca", "proxy");
        let mut command = this_program("origin", dir.path());
        let mut origin = command.stdout(Stdio::piped()).spawn().unwrap();
        let origin_port = printed_port(&mut origin);
        Self { dir, origin_port, dns_port: serve_dns(), other, origin }
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        let _ = self.origin.kill();
        let _ = self.origin.wait();
    }
}

impl Drop for Proxy {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

impl Proxy {
    pub(crate) fn usage(&self) -> Usage {
        measure::usage(self.child.id())
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    pub(crate) fn access(&self) -> ProxyAccess<'static> {
        (self.port, PROXY_AUTHORIZATION)
    }
}

impl Contender {
    pub(crate) const ALL: [Self; 7] =
        [Self::Relay, Self::Exeat, Self::ExeatTls, Self::Other, Self::Squid, Self::Mitmproxy, Self::Tinyproxy];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Relay => "relay",
            Self::Exeat => "exeat",
            Self::ExeatTls => "exeat with TLS",
            Self::Other => "other",
            Self::Squid => "squid",
            Self::Mitmproxy => "mitmproxy",
            Self::Tinyproxy => "tinyproxy",
        }
    }

    pub(crate) fn is_installed(self, lab: &Lab) -> bool {
        match self {
            Self::Relay | Self::Exeat | Self::ExeatTls => true,
            Self::Other => lab.other.is_some(),
            Self::Squid | Self::Mitmproxy | Self::Tinyproxy => self.program().is_some(),
        }
    }

    /// Returns the version for the report.
    pub(crate) fn version(self) -> String {
        let program = match self {
            Self::Relay => return "hyper and rustls, of this benchmark".to_owned(),
            Self::Exeat | Self::ExeatTls | Self::Other => PathBuf::from(env!("CARGO_BIN_EXE_exeat")),
            _ => self.program().unwrap_or_default(),
        };
        let flag = if self == Self::Squid || self == Self::Tinyproxy { "-v" } else { "--version" };
        let output = Command::new(program).arg(flag).output().map(|output| output.stdout).unwrap_or_default();
        String::from_utf8_lossy(&output).lines().next().unwrap_or_default().to_owned()
    }

    fn program(self) -> Option<PathBuf> {
        let name = match self {
            Self::Squid => "squid",
            Self::Mitmproxy => "mitmdump",
            _ => "tinyproxy",
        };
        let path = std::env::var_os("PATH").unwrap_or_default();
        let all = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
        all.map(|folder| folder.join(name)).find(|program| program.is_file())
    }

    /// Returns the name to give in a CONNECT: some resolve with the system's resolver only.
    pub(crate) fn connect_host(self, host: &str) -> &str {
        match self {
            Self::Tinyproxy => "127.0.0.1",
            Self::Mitmproxy => "localhost",
            _ => host,
        }
    }

    /// Adds the other ways in to the configuration of exeat.
    fn add_ways(lab: &Lab, dir: &Path) -> OtherWays {
        let ways = OtherWays { socks: free_port(), captured: captured_address(&dir.join("state")) };
        let path = dir.join("exeat.toml");
        let text = fs::read_to_string(&path).unwrap();
        let text = text.replace("[dns]\n", &format!("[dns]\nsynthetic_ranges = [\"{SYNTHETIC_RANGE}\"]\n"));
        let listener = |at: String, mode: &str| {
            format!("[[proxy.listeners]]\nlisten = \"{at}\"\nmode = \"{mode}\"\ntask = \"bench\"\n")
        };
        let listeners = [
            listener(format!("127.0.0.1:{}", ways.socks), "socks5"),
            listener(format!("{}:{}", ways.captured, lab.origin_port), "transparent"),
            listener(format!("127.0.0.1:{}", free_port()), "dns"),
        ];
        fs::write(path, text + &listeners.concat()).unwrap();
        ways
    }

    /// Adds TLS to the listener of exeat.
    fn add_tls(lab: &Lab, dir: &Path) {
        let path = dir.join("exeat.toml");
        let text = fs::read_to_string(&path).unwrap();
        let [cert, key] = ["proxy.pem", "proxy-key.pem"].map(|name| lab.dir.path().join(name));
        let tls = format!("[proxy]\ntls = {{ cert = \"{}\", key = \"{}\" }}\n", cert.display(), key.display());
        fs::write(path, text.replace("[proxy]\n", &tls)).unwrap();
    }

    /// Starts the proxy on the first core, with a directory of its own.
    pub(crate) fn start(self, lab: &Lab) -> Proxy {
        self.start_prepared(lab, SCALE, |_| {})
    }

    /// As [`Self::start`], where exeat has a policy of this size. `prepare` gets its state directory before the start.
    pub(crate) fn start_prepared(self, lab: &Lab, scale: Scale, prepare: impl FnOnce(&Path)) -> Proxy {
        let dir = tempfile::tempdir_in(lab.dir.path()).unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let port = free_port();
        let ports = Ports { proxy: port, origin: lab.origin_port, dns: lab.dns_port };
        let mut other_ways = OtherWays { socks: 0, captured: Ipv4Addr::UNSPECIFIED };
        let exeat = |program: &Path| {
            daemon::configure(lab.dir.path(), dir.path(), ports, scale);
            match self {
                Self::Exeat => other_ways = Self::add_ways(lab, dir.path()),
                Self::ExeatTls => Self::add_tls(lab, dir.path()),
                _ => {}
            }
            prepare(&dir.path().join("state"));
            let mut command = Command::new(program);
            command.args(["serve", "-c", "exeat.toml"]).current_dir(dir.path());
            command
        };
        let command = match self {
            Self::Relay => this_program("relay", lab.dir.path()),
            Self::Exeat | Self::ExeatTls => exeat(env!("CARGO_BIN_EXE_exeat").as_ref()),
            Self::Other => exeat(lab.other.as_deref().unwrap()),
            Self::Squid => squid(lab, dir.path(), port, &self.program().unwrap()),
            Self::Mitmproxy => mitmproxy(lab, dir.path(), port, &self.program().unwrap()),
            Self::Tinyproxy => tinyproxy(dir.path(), port, &self.program().unwrap()),
        };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let mut pinned = Command::new("taskset");
        // With a single core there is nothing to choose; the process that runs this has been pinned otherwise.
        pinned.args(["-c", "0"]).arg(command.get_program()).args(command.get_args());
        if let Some(folder) = command.get_current_dir() {
            pinned.current_dir(folder);
        }
        let log = fs::File::create(dir.path().join("stderr")).unwrap();
        pinned.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(log);
        let began = Instant::now();
        let mut child = pinned.spawn().expect("taskset (util-linux) is installed");
        let port = if self == Self::Relay { printed_port(&mut child) } else { port };
        while TcpStream::connect(("127.0.0.1", port)).is_err() {
            let has_ended = child.try_wait().unwrap().is_some();
            if has_ended || began.elapsed() > START_TIMEOUT {
                let said = fs::read_to_string(dir.path().join("stderr")).unwrap_or_default();
                panic!("{} does not start ({cores} cores): {said}", self.name());
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        Proxy { contender: self, port, other_ways, started_within: began.elapsed(), child, dir }
    }
}

/// Returns the address that stands for [`CAPTURED`], as a daemon with this CA gives it to the task `bench`.
fn captured_address(state_dir: &Path) -> Ipv4Addr {
    let authority = Authority::of(&state_dir.join("ca.pem"), Some(&state_dir.join("ca-key.pem"))).unwrap();
    let secret = authority.derived_secret("synthetic addresses");
    let hash = Sha256::digest([&secret[..], b"bench\0", CAPTURED.as_bytes()].concat());
    let number = u32::from_be_bytes(*hash.first_chunk().unwrap()) % ((1 << 16) - 2);
    Ipv4Addr::from((127 << 24 | 18 << 16) + 1 + number)
}

fn this_program(role: &str, dir: &Path) -> Command {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["role", role]).arg(dir);
    command
}

fn printed_port(child: &mut Child) -> u16 {
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
    line.trim().parse().expect("a port is printed")
}

/// Interception with its own certificate cache, an access rule, no cache, an access log.
fn squid(lab: &Lab, dir: &Path, port: u16, program: &Path) -> Command {
    let shared = lab.dir.path().display();
    let own = dir.display();
    let hosts = lab.dir.path().join("hosts");
    if !hosts.exists() {
        let mut names = String::from("127.0.0.1 api0.bench.test a.opaque.test\n");
        for n in 0..NEW_HOSTS {
            names.push_str(&format!("127.0.0.1 new{n}.bench.test\n"));
        }
        fs::write(&hosts, names).unwrap();
    }
    let helper = "/usr/lib/squid/security_file_certgen";
    let database = dir.join("certificates");
    let mut made = Command::new(helper);
    made.args(["-c", "-s"]).arg(&database).args(["-M", "16MB"]).stdout(Stdio::null());
    let status = made.status().expect("squid-openssl has a certificate helper");
    assert!(status.success(), "the certificate database cannot be created");
    for entry in [&database, &database.join("certs"), &database.join("index.txt"), &database.join("size")] {
        let _ = fs::set_permissions(entry, fs::Permissions::from_mode(0o777));
    }
    let key = REAL_KEY;
    let config = format!(
        "http_port 127.0.0.1:{port} ssl-bump generate-host-certificates=on dynamic_cert_mem_cache_size=16MB \
         tls-cert={shared}/ca.pem tls-key={shared}/ca-key.pem\n\
         sslcrtd_program {helper} -s {own}/certificates -M 16MB\n\
         sslcrtd_children 4 startup=2 idle=1\n\
         acl opaque dstdomain .opaque.test\n\
         acl known dstdomain .bench.test .opaque.test\n\
         acl auth urlpath_regex ^/auth\n\
         ssl_bump splice opaque\n\
         ssl_bump bump all\n\
         http_access deny !known\n\
         http_access allow all\n\
         request_header_access Authorization deny auth\n\
         request_header_add Authorization \"{key}\" auth\n\
         tls_outgoing_options cafile={shared}/origin-ca.pem\n\
         hosts_file {shared}/hosts\n\
         cache deny all\ncache_mem 0\nvia off\nforwarded_for delete\nworkers 1\nmax_filedescriptors 16384\n\
         access_log stdio:{own}/access.log\ncache_log {own}/cache.log\npid_filename {own}/squid.pid\n\
         coredump_dir {own}\nnetdb_filename none\nshutdown_lifetime 0 seconds\n"
    );
    private(&dir.join("squid.conf"), &config);
    let mut command = Command::new(program);
    command.args(["--foreground", "-f"]).arg(dir.join("squid.conf"));
    command
}

/// Interception with an addon that allows the known hosts, leads them to the origin and injects a key. Nothing is logged.
fn mitmproxy(lab: &Lab, dir: &Path, port: u16, program: &Path) -> Command {
    let both = ["ca-key.pem", "ca.pem"].map(|name| fs::read_to_string(lab.dir.path().join(name)).unwrap()).concat();
    private(&dir.join("mitmproxy-ca.pem"), &both);
    let addon = format!(
        "from mitmproxy import http\n\
         class Policy:\n\
         \x20   def server_connect(self, data):\n\
         \x20       if data.server.address[0].startswith(\"new\"):\n\
         \x20           data.server.address = (\"127.0.0.1\", data.server.address[1])\n\
         \x20   def http_connect(self, flow):\n\
         \x20       if not flow.request.host.endswith((\"localhost\", \".bench.test\")):\n\
         \x20           flow.response = http.Response.make(403)\n\
         \x20   def requestheaders(self, flow):\n\
         \x20       if flow.request.path == \"/auth\":\n\
         \x20           flow.request.headers[\"authorization\"] = \"{REAL_KEY}\"\n\
         addons = [Policy()]\n"
    );
    fs::write(dir.join("policy.py"), addon).unwrap();
    let mut command = Command::new(program);
    command.args(["-q", "--listen-host", "127.0.0.1", "-p", &port.to_string(), "-s"]).arg(dir.join("policy.py"));
    for setting in [
        format!("confdir={}", dir.display()),
        format!("ssl_verify_upstream_trusted_ca={}", lab.dir.path().join("origin-ca.pem").display()),
        "connection_strategy=lazy".to_owned(),
        "upstream_cert=false".to_owned(),
        "stream_large_bodies=1m".to_owned(),
        "ignore_hosts=opaque\\.test".to_owned(),
    ] {
        command.args(["--set", &setting]);
    }
    command
}

/// Tunnels only.
fn tinyproxy(dir: &Path, port: u16, program: &Path) -> Command {
    let config = format!(
        "Port {port}\nListen 127.0.0.1\nMaxClients 5000\nTimeout 600\nAllow 127.0.0.1\nLogFile \"{}/log\"\n\
         LogLevel Connect\n",
        dir.display()
    );
    fs::write(dir.join("tinyproxy.conf"), config).unwrap();
    let mut command = Command::new(program);
    command.args(["-d", "-c"]).arg(dir.join("tinyproxy.conf"));
    command
}

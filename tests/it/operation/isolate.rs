//! `exeat run --isolate`: the command reaches the proxy and nothing else.
//!
//! Without user namespaces there is nothing to test, so most tests are ignored by default; continuous integration runs
//! them. Root and other users are isolated differently, so root tests both.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::lab::{LabBuilder, Origin};
use crate::operation::cli::{output, text};

const KEY: &str = "ghp_16C7e42F292c6912E7710c838347Ae178B4a";
pub(crate) const NOBODY: u32 = 65_534;

/// Returns the users that this process can run as.
pub(crate) fn users() -> Vec<Option<u32>> {
    if rustix::process::geteuid().is_root() { vec![None, Some(NOBODY)] } else { vec![None] }
}

pub(crate) struct Place {
    pub(crate) builder: LabBuilder,
    pub(crate) origin: Origin,
}

impl Place {
    pub(crate) async fn new() -> Self {
        let builder = LabBuilder::new().await;
        let origin = builder.origin("api.test").await;
        let dir = builder.dir.path();
        let body = builder.config(&format!(
            "[proxy]\nunix_tasks = {{ \"{NOBODY}\" = \"t\", \"0\" = \"t\" }}\n\
             [integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n[tasks.t]\nintegrations = [\"api\"]\n",
            origin.port()
        ));
        fs::write(dir.join("run.toml"), body).unwrap();
        // For all users, and with a program that all of them can run.
        for (path, mode) in [(".", 0o777), ("token", 0o644), ("origin-ca.pem", 0o644), ("run.toml", 0o644)] {
            fs::set_permissions(dir.join(path), fs::Permissions::from_mode(mode)).unwrap();
        }
        // A separate process makes the copy. If this process did, a child that it starts meanwhile could hold the copy
        // open for writing, and running it would fail.
        let copied = Command::new("cp").args([env!("CARGO_BIN_EXE_exeat"), "exeat"]).current_dir(dir).status().unwrap();
        assert!(copied.success());
        Self { builder, origin }
    }

    pub(crate) fn dir(&self) -> &Path {
        self.builder.dir.path()
    }

    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.dir().join(name)
    }

    pub(crate) fn url(&self, path: &str) -> String {
        format!("https://api.test:{}{path}", self.origin.port())
    }

    /// Returns `exeat run --isolate` of a command, as this user.
    pub(crate) fn run(&self, user: Option<u32>, flags: &[&str], command: &[&str]) -> Command {
        let args = [&["run", "-c", "run.toml", "--task", "t", "--isolate"], flags, &["--"], command].concat();
        let mut run = Command::new(self.path("exeat"));
        run.args(args);
        self.as_user(&mut run, user);
        run
    }

    fn as_user(&self, command: &mut Command, user: Option<u32>) {
        let path = std::env::var("PATH").unwrap();
        // Another user may have no access to our user's folders.
        let path = if user.is_some() { "/usr/local/bin:/usr/bin:/bin" } else { &path };
        command.current_dir(self.dir()).env_clear().env("PATH", path).env("TMPDIR", self.dir()).stdin(Stdio::null());
        if let Some(id) = user {
            command.uid(id).gid(id);
        }
    }

    pub(crate) fn shell(&self, user: Option<u32>, flags: &[&str], script: &str) -> Command {
        self.run(user, flags, &["sh", "-c", script])
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and curl"]
async fn requests_through_the_proxy_work() {
    for user in users() {
        let place = Place::new().await;
        let flag = format!("GITHUB_TOKEN=bearer@api.test:{}", place.origin.port());
        let script = format!(
            "curl -sS -H \"Authorization: Bearer $GITHUB_TOKEN\" {} && curl -sS --http1.1 -o big -w '%{{size_download}}\n' {} \
             && curl -sS https://evil.test/",
            place.url("/"),
            place.url("/big?5000000"),
        );
        let mut command = place.shell(user, &["--credential", &flag], &script);
        command.env("GITHUB_TOKEN", KEY);
        let output = output(command).await;
        let (out, words) = (text(&output.stdout), text(&output.stderr));
        assert!(out.starts_with("hello\n5000000\n{") && out.contains("host_not_allowed"), "{out} {words}");
        assert_eq!(output.status.code(), Some(0), "{words}");
        assert_eq!(place.origin.seen()[0].headers["authorization"], format!("Bearer {KEY}"));
        assert!(words.contains("2 allowed, 1 refused"), "{words}");
        assert!(words.contains("GITHUB_TOKEN sent to api.test") && words.contains("--allow evil.test"), "{words}");
        assert_eq!(words.contains("warning: as root"), user.is_none() && users().len() > 1, "{words}");
    }
}

/// Tries each way out and prints the results, with errors by name.
const WAYS: &str = r#"
import errno, os, socket, struct, sys
port, dns, other, listed, runtime, service = sys.argv[1:]
def way(name, go):
    try: print(name, 'OPEN', go())
    except OSError as e: print(name, errno.errorcode.get(e.errno, e))
def tcp(host):
    s = socket.socket(); s.settimeout(20); s.connect((host, int(port)))
way('loopback', lambda: tcp('127.0.0.1'))
way('other', lambda: tcp(other))
query = struct.pack('>6H', 7, 256, 1, 0, 0, 0) + b'\4leak\4test\0' + struct.pack('>2H', 1, 1)
def udp(host, port):
    s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); s.settimeout(20); s.connect((host, port)); s.send(query); a = s.recv(512); assert a[:2] == query[:2] and a[3] & 15 == 3, a
way('dns', lambda: udp('127.0.0.1', int(dns)))
way('dns-out', lambda: udp('192.0.2.53', 53))
try: print('name OPEN', socket.getaddrinfo('leak.test', 443))
except socket.gaierror as e: print('name fails')
def unix(path): socket.socket(socket.AF_UNIX).connect(path)
for name, path in [('listed', listed), ('runtime', runtime), ('service', service), ('abstract', '\0' + listed)]:
    way(name, lambda: unix(path))
def pair():
    a, b = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM); a.sendto(b'x', listed)
way('pair', pair)
way('vsock', lambda: socket.socket(40, socket.SOCK_STREAM))
way('packet', lambda: socket.socket(17, socket.SOCK_DGRAM))
way('raw', lambda: socket.socket(socket.AF_INET, socket.SOCK_RAW, 1))
def own():
    s = socket.socket(socket.AF_UNIX); s.bind('own.sock'); s.listen(); unix('own.sock'); os.unlink('own.sock')
way('own', own)
a, b = socket.socketpair(); a.send(b'connected'); print('pair of streams', b.recv(9).decode())
"#;

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and python3"]
async fn the_command_cannot_bypass_the_proxy() {
    let flags = [&[][..], &["--unix-sockets"], &["--proxy-only"]];
    for (user, flags) in users().into_iter().flat_map(|user| flags.map(|flags| (user, flags))) {
        let place = Place::new().await;
        let runtime = place.path("runtime");
        fs::create_dir(&runtime).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (listed, in_runtime) = (place.path("listed.sock"), runtime.join("sock"));
        // Only root can create one where services do.
        let service = tempfile::Builder::new().prefix("exeat-test-").tempdir_in("/run").ok();
        let service = service.as_ref().map_or(in_runtime.clone(), |dir| dir.path().join("sock"));
        let paths = [&listed, &in_runtime, &service];
        let mut listeners: Vec<_> = paths[..if service == in_runtime { 2 } else { 3 }]
            .iter()
            .map(|path| UnixListener::bind(path).unwrap())
            .collect();
        for path in paths {
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
            fs::set_permissions(path.parent().unwrap(), fs::Permissions::from_mode(0o777)).unwrap();
        }
        let name = SocketAddr::from_abstract_name(listed.as_os_str().as_encoded_bytes()).unwrap();
        listeners.push(UnixListener::bind_addr(&name).unwrap());
        let port = listener.local_addr().unwrap().port().to_string();
        let dns = place.builder.dns.address().port().to_string();
        let other = other_address();
        let [listed, in_runtime, service] = paths.map(|path| path.to_str().unwrap());
        let mut command =
            place.run(user, flags, &["python3", "-c", WAYS, &port, &dns, &other, listed, in_runtime, service]);
        command.env("XDG_RUNTIME_DIR", &runtime);
        let output = output(command).await;
        let (out, words) = (text(&output.stdout), text(&output.stderr));
        let has_flag = |flag| flags.contains(&flag);
        let unix = |error: &'static str| if has_flag("--unix-sockets") { error } else { "EAFNOSUPPORT" };
        let other = |captured: &'static str| if has_flag("--proxy-only") { "ENETUNREACH" } else { captured };
        let want = [
            ("loopback", "ECONNREFUSED"),
            ("other", other("ECONNREFUSED")),
            ("dns", "ECONNREFUSED"),
            // The DNS listener answers for all servers, and asks none.
            ("dns-out", other("OPEN None")),
            ("name", "fails"),
            ("listed", unix("ECONNREFUSED")),
            ("runtime", unix("ENOENT")),
            ("service", unix("ENOENT")),
            ("abstract", unix("ECONNREFUSED")),
            ("pair", unix("ECONNREFUSED")),
            ("vsock", "EAFNOSUPPORT"),
            ("packet", "EAFNOSUPPORT"),
            ("raw", "EPERM"),
            ("own", unix("OPEN None")),
            ("pair of streams", "connected"),
        ];
        let want: String = want.map(|(way, end)| format!("{way} {end}\n")).concat();
        assert_eq!(out, want, "{user:?} {flags:?} {words}");
        listener.set_nonblocking(true).unwrap();
        assert!(listener.accept().is_err(), "no connection arrived");
        for listener in listeners {
            listener.set_nonblocking(true).unwrap();
            assert!(listener.accept().is_err(), "nobody came to {:?}", listener.local_addr());
        }
        assert!(place.builder.dns.all_queries().is_empty(), "{:?}", place.builder.dns.all_queries());
    }
}

/// Returns a non-loopback address of this machine, or else an unassigned one. Nothing is sent.
fn other_address() -> String {
    let socket = UdpSocket::bind("0.0.0.0:0").unwrap();
    let found = socket.connect("192.0.2.1:9").and_then(|()| socket.local_addr());
    found.map_or("192.0.2.1".to_owned(), |address| address.ip().to_string())
}

/// Browsers cannot send the password of a variable.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and curl"]
async fn the_command_needs_no_password() {
    for user in users() {
        let place = Place::new().await;
        let script = "echo $HTTPS_PROXY $http_proxy; curl -s http://other.test/ | grep code; \
                      curl -s -U u:p http://other.test/ | grep code";
        let output = output(place.shell(user, &[], script)).await;
        let (out, words) = (text(&output.stdout), text(&output.stderr));
        let lines: Vec<_> = out.lines().map(str::trim).collect();
        assert_eq!(lines[0], "http://127.0.0.1:3128 http://127.0.0.1:3128", "{out}");
        // A wrong password is not ignored.
        assert_eq!(lines[1..], ["\"code\": \"host_not_allowed\",", "\"code\": \"caller_unknown\","], "{words}");
        assert!(words.contains("--allow http://other.test\n"), "{words}");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces"]
async fn the_command_inherits_no_capabilities_descriptors_or_sockets() {
    for user in users() {
        let place = Place::new().await;
        let _socket = UnixListener::bind(place.path("agent")).unwrap();
        let script = "grep -E '^(Cap|NoNewPrivs|Seccomp:)' /proc/self/status | tr '\\n\\t' '  '; echo; \
             (cd /proc/self/fd; echo *); echo /proc/[0-9]*; ls /run/exeat; id -u; pwd; readlink /proc/self/ns/user; env | cut -d= -f1 | sort | tr '\\n' ' '";
        // A file that the caller left open, as a launcher might leave a socket.
        let mut command = Command::new("sh");
        let call = "exec 7</dev/null 9</dev/null; exec ./exeat run -q --isolate -- sh -c \"$0\"";
        command.args(["-c", call, script]);
        place.as_user(&mut command, user);
        command.env("SSH_AUTH_SOCK", place.path("agent")).env("DBUS_SESSION_BUS_ADDRESS", "unix:abstract=/x,guid=1");
        let output = output(command).await;
        let (out, words) = (text(&output.stdout), text(&output.stderr));
        let none = "0000000000000000";
        let lines: Vec<_> = out.lines().collect();
        let id = user.unwrap_or(rustix::process::geteuid().as_raw());
        // Root has all capabilities, but over a user namespace of its own.
        let all = if id == 0 { lines[0].split(' ').nth(3).unwrap() } else { none };
        let set = u64::from_str_radix(all, 16).unwrap();
        assert!(id != 0 || (set > u32::MAX.into() && (set + 1).is_power_of_two()), "all up to the last one: {out}");
        let ours = fs::read_link("/proc/self/ns/user").unwrap();
        assert!(lines[8].starts_with("user:") && Path::new(lines[8]) != ours, "{out}");
        let want = format!(
            "CapInh: {none} CapPrm: {all} CapEff: {all} CapBnd: {all} CapAmb: {none} NoNewPrivs: 1 Seccomp: 2 "
        );
        assert_eq!(lines[0], want, "{words}");
        // The third is the descriptor through which the directory is read.
        assert_eq!(lines[1], "0 1 2 3", "{out}");
        // Number 2 was the thread that spawned the command.
        assert_eq!(lines[2], "/proc/1 /proc/3", "{out}");
        assert_eq!(lines[3..6], ["ca-bundle.pem", "ca.pem", "replaced"], "without keys, record and socket");
        assert_eq!(lines[6..8], [id.to_string().as_str(), place.dir().to_str().unwrap()]);
        assert!(lines[9].contains("HTTPS_PROXY ") && !lines[9].contains("SSH_AUTH") && !lines[9].contains("DBUS"));
        assert!(!lines[9].contains("EXEAT_RUN"), "{out}");
    }
}

/// Ways back to the outer namespaces: other processes, mounts over others, nested namespaces.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces, unshare, nsenter, and python3"]
async fn the_command_cannot_leave_its_namespaces() {
    for user in users() {
        let place = Place::new().await;
        let runtime = place.path("runtime");
        fs::create_dir(&runtime).unwrap();
        let hidden = [runtime.join("hidden"), place.path("hidden")];
        let _sockets = hidden.clone().map(|path| UnixListener::bind(path).unwrap());
        // A process of the same user outside, which could be traced except for the namespaces.
        let mut outside = Command::new("sleep");
        place.as_user(&mut outside, user);
        let outside = Ended(outside.arg("1000").spawn().unwrap());
        let script = format!(
            "import os, ctypes\n\
             libc = ctypes.CDLL(None, use_errno=True)\n\
             def call(n, *a): print(ctypes.get_errno() if libc.syscall(n, *a) == -1 else 'OPEN', end=' ')\n\
             pid = {0}\n\
             call(101, 16, pid, 0, 0); call(101, 16, 1, 0, 0); call(434, pid, 0); call(62, pid, 0); call(425, 8, None)\n\
             call(249, b'dns_resolver', b'leak.test', b'', 0); call(0x40000029, 40, 1, 0); call(16, 0, 0x5412, b'x')\n\
             call(166, b'{1}', 2); call(166, b'hidden', 2); call(82, b'hidden', b'moved'); call(87, b'hidden')\n\
             call(165, b'none', b'/', b'tmpfs', 0, None); call(155, b'/', b'/'); call(170, b'x', 1)\n\
             call(308, os.open('/proc/self/ns/net', 0), 0); call(133, b'memory', 0o20600, 0x101)\n\
             print()\n",
            outside.0.id(),
            runtime.display(),
        );
        fs::write(place.path("calls.py"), script).unwrap();
        fs::set_permissions(place.path("calls.py"), fs::Permissions::from_mode(0o644)).unwrap();
        let script = format!(
            "[ $(uname -m) != x86_64 ] || python3 calls.py; \
             for of in 1 {0}; do nsenter -t $of -n true && echo OPEN; done; ls /proc/1/root /proc/1/cwd && echo OPEN; mkdir m; \
             unshare -Urm sh -c 'mount --bind . m && echo OPEN'; \
             unshare -Urm sh -c 'mount --rbind . m && umount -l m/runtime && echo OPEN; ls m/runtime; ls -l m/hidden | cut -c1'; \
             unshare -Urm sh -c 'umount -l runtime && echo OPEN; umount -l hidden && echo OPEN'; \
             unshare -m sh -c 'umount -l runtime && echo OPEN; umount -l hidden && echo OPEN; umount -l /proc && echo OPEN'; \
             unshare -m sh -c 'mount --bind . m && echo OPEN'; \
             unshare -m sh -c 'mount --rbind . m && umount -l m/runtime && echo OPEN; ls m/runtime; ls -l m/hidden | cut -c1'; \
             unshare -n ip link set lo up; ip link set lo down && echo OPEN; \
             unshare -Urm sh -c 'mount -t overlay none -o lowerdir=.:/usr m && echo OPEN'; echo end",
            outside.0.id()
        );
        let mut command = place.shell(user, &[], &script);
        command.env("XDG_RUNTIME_DIR", &runtime);
        let output = output(command).await;
        let (out, words) = (text(&output.stdout), text(&output.stderr));
        assert!(!out.contains("OPEN") && out.ends_with("end\n"), "{user:?} {out} {words}");
        assert!(!out.contains("s\n"), "a socket is visible: {out}");
        if cfg!(target_arch = "x86_64") {
            // No process can be traced, opened or killed, including the first one; the system calls are refused; mounts
            // and mount points are unchanged; the namespaces cannot be changed, and no device can be made.
            assert!(out.starts_with("3 1 3 3 1 1 97 1 1 1 16 16 1 1 1 1 1 \n"), "{out} {words}");
        }
    }
}

/// A cover protects a path, and the command can rename the parents of many paths. So mounts are refused where Unix sockets
/// are hidden, and the files of the run have no path.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and python3"]
async fn a_second_mount_leads_to_no_hidden_socket() {
    for (user, flags) in users().into_iter().flat_map(|user| [(user, &["-q"][..]), (user, &["-q", "--unix-sockets"])]) {
        let place = Place::new().await;
        let holder = place.path("holder");
        for path in [&holder, &holder.join("runtime")] {
            fs::create_dir(path).unwrap();
            fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
        }
        let listener = UnixListener::bind(holder.join("runtime/sock")).unwrap();
        fs::set_permissions(holder.join("runtime/sock"), fs::Permissions::from_mode(0o777)).unwrap();
        listener.set_nonblocking(true).unwrap();
        fs::write(place.path("uncover.py"), include_str!("uncover.py")).unwrap();
        fs::set_permissions(place.path("uncover.py"), fs::Permissions::from_mode(0o644)).unwrap();
        let script = "ls holder; python3 uncover.py \"$PWD\" runtime";
        let mut command = place.shell(user, flags, script);
        command.env("TMPDIR", &holder).env("XDG_RUNTIME_DIR", holder.join("runtime"));
        if let Some(id) = user {
            std::os::unix::fs::chown(holder.join("runtime"), Some(id), Some(id)).unwrap();
        }
        let output = output(command).await;
        let (out, words) = (text(&output.stdout), text(&output.stderr));
        let no_socket = "Address family not supported by protocol\n";
        let want = match flags.len() {
            1 => format!("by its parent ['sock']\n{no_socket}by itself ['sock']\n{no_socket}"),
            _ => "failed: [Errno 1] Operation not permitted\n".to_owned(),
        };
        assert_eq!(out, format!("runtime\n{want}"), "{user:?} {flags:?} {words}");
        assert!(listener.accept().is_err(), "no connection arrived");
    }
}

/// The command cannot reach the record of its run, or replace it, whatever it does to the directory for temporary files.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and curl"]
async fn the_files_of_a_run_have_no_path() {
    for user in users() {
        let place = Place::new().await;
        let temporary = place.path("temporary");
        fs::create_dir(&temporary).unwrap();
        fs::set_permissions(&temporary, fs::Permissions::from_mode(0o777)).unwrap();
        let script = "ls -A temporary; ls -A /run/exeat; touch /run/exeat/x; mv temporary moved; ln -s /etc temporary; \
                      curl -sS https://evil.test/ >answer; cut -c1 answer | head -1; ls /proc/self/fd";
        let mut command = place.shell(user, &[], script);
        command.env("TMPDIR", &temporary);
        let output = output(command).await;
        let (out, words) = (text(&output.stdout), text(&output.stderr));
        assert_eq!(out, "ca-bundle.pem\nca.pem\nreplaced\n{\n0\n1\n2\n3\n", "{user:?} {words}");
        assert!(words.contains("0 allowed, 1 refused") && words.contains("× evil.test:443"), "{user:?} {words}");
        assert!(words.contains("touch: cannot touch '/run/exeat/x': Read-only file system"), "{user:?} {words}");
        assert_eq!(fs::read_dir(place.path("moved")).unwrap().count(), 0, "nothing is left");
    }
}

struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// The process group is that of the caller, as job control needs, but signals and priorities stay inside. The script is
/// run on a kernel with Landlock and, by a filter of its own, on one without.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and python3"]
async fn the_command_cannot_signal_the_process_group_of_its_caller() {
    for (user, landlock) in users().into_iter().flat_map(|user| [(user, true), (user, false)]) {
        let place = Place::new().await;
        fs::write(place.path("group.py"), include_str!("group.py")).unwrap();
        fs::set_permissions(place.path("group.py"), fs::Permissions::from_mode(0o644)).unwrap();
        let mut command = Command::new("python3");
        command.args(["group.py", if landlock { "landlock" } else { "none" }]);
        place.as_user(&mut command, user);
        command.process_group(0);
        let output = output(command).await;
        let (out, words) = (text(&output.stdout), text(&output.stderr));
        // With Landlock, the signal reaches the members of the group that are inside, and each of them once.
        let first = if out.starts_with("term") { "term\nterm\n" } else { "without Landlock\nkill: 1\n" };
        assert!(landlock || !out.starts_with("term"), "{out}");
        assert_eq!(
            out,
            format!("{first}priority: 1\nioprio: 1\nown group: term\noutside: alive\n"),
            "{user:?} {words}"
        );
    }
}

/// A queue that a mounted file system shows can be used from another IPC namespace.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces, root and unshare"]
async fn message_queues_of_the_machine_are_hidden() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let place = Place::new().await;
    let script = "set -e; mkdir dev; mount -t tmpfs none dev; mkdir dev/mqueue; \
                  for d in null urandom; do touch dev/$d; mount --bind /dev/$d dev/$d; done; \
                  mount --rbind dev /dev; mount -t mqueue none /dev/mqueue; touch /dev/mqueue/queue; ls /dev/mqueue; \
                  setpriv --reuid 65534 --regid 65534 --clear-groups \
                  ./exeat run -q -c run.toml --task t --isolate -- ls -A /dev /dev/mqueue";
    let mut command = Command::new("unshare");
    command.args(["-m", "sh", "-c", script]);
    place.as_user(&mut command, None);
    let output = output(command).await;
    let want = "queue\n/dev:\nmqueue\nnull\nurandom\n\n/dev/mqueue:\n";
    assert_eq!(text(&output.stdout), want, "{}", text(&output.stderr));
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces"]
async fn status_and_signals_are_forwarded() {
    for user in users() {
        let place = Place::new().await;
        for (script, code) in [("exit 42", 42), ("kill -9 $$", 137), ("kill -TERM $$", 143), ("true & exit 3", 3)] {
            assert_eq!(output(place.shell(user, &["-q"], script)).await.status.code(), Some(code), "{script}");
        }
        let none = output(place.run(user, &["-q"], &["/no/such/program"])).await;
        assert_eq!(none.status.code(), Some(127), "{}", text(&none.stderr));
        assert_eq!(output(place.run(user, &["-q"], &["./run.toml"])).await.status.code(), Some(126));
        for (signal, name) in [(rustix::process::Signal::TERM, "TERM"), (rustix::process::Signal::HUP, "HUP")] {
            let script = format!("trap 'exit 7' {name}; echo ready; read x; while :; do :; done");
            let mut child = Ended(place.shell(user, &["-q"], &script).stdout(Stdio::piped()).spawn().unwrap());
            let mut line = String::new();
            BufReader::new(child.0.stdout.take().unwrap()).read_line(&mut line).unwrap();
            let pid = rustix::process::Pid::from_raw(child.0.id() as i32).unwrap();
            rustix::process::kill_process(pid, signal).unwrap();
            assert_eq!(child.0.wait().unwrap().code(), Some(7), "{name}");
        }
    }
}

/// No process outlives the command or the proxy.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces"]
async fn all_processes_end_with_the_command_and_with_the_proxy() {
    for user in users() {
        let place = Place::new().await;
        // The output ends when the last process that holds it has ended.
        let output = output(place.shell(user, &["-q"], "(sleep 15; echo late) & echo started")).await;
        assert_eq!(text(&output.stdout), "started\n");
        let mut child = place.shell(user, &["-q"], "late() { sleep 15; echo late; }; late & echo ready; late");
        let mut child = Ended(child.stdout(Stdio::piped()).spawn().unwrap());
        let mut out = BufReader::new(child.0.stdout.take().unwrap());
        let mut said = String::new();
        out.read_line(&mut said).unwrap();
        child.0.kill().unwrap();
        out.read_to_string(&mut said).unwrap();
        assert_eq!(said, "ready\n");
    }
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces"]
async fn a_working_directory_in_a_hidden_place_is_reported() {
    let place = Place::new().await;
    let inner = place.path("runtime/inner");
    fs::create_dir_all(&inner).unwrap();
    let mut command = place.run(None, &["-q"], &["touch", "../../was-run"]);
    command.current_dir(&inner).env("XDG_RUNTIME_DIR", place.path("runtime"));
    command.env("EXEAT_CONFIG", place.path("run.toml"));
    let mut args: Vec<_> = command.get_args().map(ToOwned::to_owned).collect();
    args.retain(|arg| arg != "-c" && arg != "run.toml");
    let mut again = Command::new(place.path("exeat"));
    again.args(args).current_dir(&inner).envs(command.get_envs().filter_map(|(name, value)| Some((name, value?))));
    let output = output(again).await;
    let words = text(&output.stderr);
    assert!(
        output.status.code() == Some(1) && words.contains("is hidden from the command; start it elsewhere"),
        "{words}"
    );
    assert!(!place.path("was-run").exists());
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and unshare"]
async fn if_namespaces_are_disabled_the_setting_is_named() {
    let place = Place::new().await;
    let script = "echo 0 > /proc/sys/user/max_user_namespaces && exec ./exeat run -q --isolate -- touch was-run";
    let mut command = Command::new("unshare");
    command.args(["-Ur", "sh", "-c", script]);
    place.as_user(&mut command, None);
    let output = output(command).await;
    let words = text(&output.stderr);
    assert!(output.status.code() == Some(1) && words.contains("run: new namespaces: "), "{words}");
    assert!(words.contains("sysctl user.max_user_namespaces="), "{words}");
    assert!(!place.path("was-run").exists(), "{words}");
}

/// As in a container whose root has capabilities, with and without the right to mount.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and unshare"]
async fn root_of_a_user_namespace_can_isolate() {
    let place = Place::new().await;
    for command in [&["unshare", "-Ur"][..], &["unshare", "-Urm"]] {
        let mut unshare = Command::new(command[0]);
        unshare.args(&command[1..]).args(["sh", "-c", "exec ./exeat run -q --isolate -- sh -c 'id -u; ls /run/exeat'"]);
        place.as_user(&mut unshare, None);
        let output = output(unshare).await;
        assert_eq!(
            text(&output.stdout),
            "0\nca-bundle.pem\nca.pem\nreplaced\n",
            "{command:?} {}",
            text(&output.stderr)
        );
    }
}

/// Links lead out of what is replaced, and to files of other kinds. Nothing is written through them.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces and unshare"]
async fn the_machine_s_files_do_not_change() {
    let place = Place::new().await;
    let script = r#"
        mkdir -p e/chromium real jdk/lib/security
        cp /etc/passwd /etc/group /etc/hosts e/
        ln -s "$PWD/real" e/chromium/policies
        echo kept > e/chromium/other; echo own > real/own.json; ln -s /missing e/chromium/dangling
        printf '#!/bin/sh\necho as before\n' > tool; chmod 755 tool; ln -s "$PWD/tool" jdk/lib/security/cacerts
        ln -s "$1" e/resolv.conf
        mount --bind e /etc
        JAVA_HOME="$PWD/jdk" ./exeat run -q --isolate --allow api.test -- sh -c '
            cat /etc/chromium/other /etc/chromium/policies/own.json; cut -c1-17 /etc/chromium/policies/managed/exeat.json
            touch /etc/chromium/x; ./tool; echo discarded > /dev/null && echo written'
        ls real; [ -e missing ] || echo untouched
    "#;
    for resolver in ["missing/resolv.conf", "/dev/null", "e"] {
        let _ = Command::new("rm").args(["-rf", "e", "real", "jdk"]).current_dir(place.dir()).status();
        let mut unshare = Command::new("unshare");
        let target =
            if resolver.starts_with('/') { resolver.to_owned() } else { place.path(resolver).display().to_string() };
        unshare.args(["-Urm", "sh", "-c", script, "sh", &target]);
        place.as_user(&mut unshare, None);
        let output = output(unshare).await;
        let want = "kept\nown\n{\"CACertificates\"\nas before\nwritten\nown.json\nuntouched\n";
        assert_eq!(text(&output.stdout), want, "{resolver} {}", text(&output.stderr));
        assert!(text(&output.stderr).contains("'/etc/chromium/x': Read-only"), "{resolver} {}", text(&output.stderr));
    }
}

/// With too few descriptors for the sockets, or a signal before the command has started, the run ends.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs user namespaces"]
async fn a_run_that_cannot_start_ends() {
    let place = Place::new().await;
    let mut refused = 0;
    for limit in 9..24 {
        let mut command = Command::new("sh");
        let script = format!("ulimit -n {limit}; exec timeout -s KILL 60 ./exeat run -q --isolate -- true");
        command.args(["-c", &script]);
        place.as_user(&mut command, None);
        let output = output(command).await;
        let words = text(&output.stderr);
        assert!(matches!(output.status.code(), Some(0 | 1)), "{limit} {:?} {words}", output.status);
        assert!(output.status.success() || words.contains("exeat: "), "{limit} {words}");
        refused += usize::from(!output.status.success());
    }
    assert!(refused > 3, "{refused}");
}

/// As in a container whose profile does not permit namespaces, or does not know the calls that create a file system.
#[tokio::test(flavor = "multi_thread")]
async fn a_command_that_cannot_be_isolated_is_not_run() {
    use nix::libc::{ENOSYS, EPERM, SYS_fsopen, SYS_unshare};
    use seccompiler::{BpfProgram, SeccompAction, SeccompFilter, apply_filter};
    for (call, errno, why) in
        [(SYS_unshare, EPERM, "new namespaces: Operation not permitted"), (SYS_fsopen, ENOSYS, "it needs Linux 5.2")]
    {
        let place = Place::new().await;
        let mut command = place.run(None, &[], &["touch", "was-run"]);
        let run = std::thread::spawn(move || {
            let refused = SeccompAction::Errno(errno as u32);
            let arch = std::env::consts::ARCH.try_into().unwrap();
            let rules = [(call, Vec::new())].into();
            let filter = SeccompFilter::new(rules, SeccompAction::Allow, refused, arch).unwrap();
            apply_filter(&BpfProgram::try_from(filter).unwrap()).unwrap();
            command.output().unwrap()
        });
        let output = tokio::task::spawn_blocking(move || run.join().unwrap()).await.unwrap();
        let words = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{words}");
        assert!(words.contains("has not been run: ") && words.contains(why), "{words}");
        assert!(!words.contains("--unix-sockets") && !place.path("was-run").exists(), "{words}");
    }
}

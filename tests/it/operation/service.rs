//! The daemon as a service: inherited sockets, notifications, confinement, and floods.

use std::fs;
use std::net::TcpListener;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixDatagram;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use rustix::process::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpStream, UnixStream};

use crate::lab::client::{auth, read_head};
use crate::lab::{self, LabBuilder, Origin, TIMEOUT};
use crate::operation::cli::{Served, exeat, output, text};

async fn place(text: &str) -> (LabBuilder, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let admin = if text.contains("[admin]") { "" } else { "[admin]\nlisten = \"127.0.0.1:0\"\n" };
    let config = builder.config(&format!("{admin}{text}{}", lab::allow_api(origin.port())));
    fs::write(builder.dir.path().join("e.toml"), config).unwrap();
    (builder, origin)
}

#[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
async fn connect(served: &Served) -> TcpStream {
    TcpStream::connect(served.proxy()).await.unwrap()
}

/// As systemd does it: descriptors from 3 on, and variables that announce them.
#[tokio::test(flavor = "multi_thread")]
async fn inherited_sockets_are_used() {
    // The listener of a task is opened besides.
    let own = "[[proxy.listeners]]\nlisten = \"unix:own.sock\"\ntask = \"t\"\n";
    let config = format!("[proxy]\nlisten = [\"127.0.0.1:1\"]\n{own}[admin]\nlisten = \"127.0.0.1:2\"\n");
    let (builder, origin) = place(&config).await;
    let dir = builder.dir.path();
    let socket = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = socket.local_addr().unwrap();
    let admin = std::os::unix::net::UnixListener::bind(dir.join("admin.sock")).unwrap();
    let mut command = exeat(dir, &[]);
    let mut shell = Command::new("sh");
    shell.args(["-c", "exec 3<&0 4<&1 0</dev/null 1>&2; export LISTEN_PID=$$ LISTEN_FDS=2 LISTEN_FDNAMES=proxy:admin; exec \"$0\" serve -c e.toml"]);
    shell.arg(command.get_program()).current_dir(dir).env("HOME", dir).env("XDG_STATE_HOME", dir.join("state"));
    shell.stdin(Stdio::from(OwnedFd::from(socket))).stdout(Stdio::from(OwnedFd::from(admin)));
    let served = Served::start(shell);
    let ready = format!("proxy on {address}, unix:own.sock; admin on unix:");
    assert!(served.ready.contains(&ready), "{}", served.ready);
    let mut own = UnixStream::connect(dir.join("own.sock")).await.unwrap();
    own.write_all(b"GET /v1/self HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    own.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert_eq!(served.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    let mut admin = UnixStream::connect(dir.join("admin.sock")).await.unwrap();
    admin.write_all(b"GET /v1/tasks HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    admin.read_to_string(&mut answer).await.unwrap();
    assert!(
        answer.starts_with("HTTP/1.1 200") && answer.contains("\"api.test\""),
        "our own user needs no token: {answer}"
    );
    // A descriptor that is not a socket makes the start fail.
    command.args(["serve", "-c", "e.toml"]);
    let mut odd = Command::new("sh");
    odd.args(["-c", "exec 3</dev/null; export LISTEN_PID=$$ LISTEN_FDS=1; exec \"$0\" serve -c e.toml"]);
    odd.arg(command.get_program()).current_dir(dir).env("HOME", dir).env("XDG_STATE_HOME", dir.join("other"));
    let refused = output(odd).await;
    assert_eq!(refused.status.code(), Some(1));
    assert!(text(&refused.stderr).contains("the inherited socket 0"), "{}", text(&refused.stderr));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_service_manager_is_notified() {
    let (builder, _origin) = place("").await;
    let dir = builder.dir.path();
    let manager = UnixDatagram::bind(dir.join("notify.sock")).unwrap();
    manager.set_read_timeout(Some(TIMEOUT)).unwrap();
    let heard = || {
        let mut words = [0; 4096];
        let n = manager.recv(&mut words).unwrap();
        text(&words[..n])
    };
    let mut command = exeat(dir, &["serve", "-c", "e.toml"]);
    command.env("NOTIFY_SOCKET", dir.join("notify.sock"));
    let mut served = Served::start(command);
    let ready = heard();
    assert!(ready.contains("READY=1") && ready.contains("STATUS=exeat: ready; proxy on 127.0.0.1:"), "{ready}");
    served.signal(Signal::HUP);
    let reloading = heard();
    assert!(reloading.contains("RELOADING=1") && reloading.contains("MONOTONIC_USEC="), "{reloading}");
    assert!(heard().contains("READY=1"));
    fs::write(dir.join("e.toml"), "nonsense").unwrap();
    served.signal(Signal::HUP);
    assert!(heard().contains("RELOADING=1"));
    let kept = heard();
    assert!(kept.contains("READY=1") && kept.contains("the old policy stays"), "{kept}");
    served.signal(Signal::TERM);
    assert!(heard().contains("STOPPING=1"));
    assert!(served.ended());
}

/// The confinement as reported by the kernel, and the files that a reload can read.
#[tokio::test(flavor = "multi_thread")]
async fn the_daemon_is_confined_by_default() {
    for confined in [true, false] {
        let (builder, _origin) = place("").await;
        let dir = builder.dir.path();
        let elsewhere = tempfile::tempdir().unwrap();
        fs::write(elsewhere.path().join("token"), "another-token-of-24-bytes").unwrap();
        let flags: &[&str] = if confined { &[] } else { &["--no-confine"] };
        let served = Served::start(exeat(dir, &[&["serve", "-c", "e.toml"], flags].concat()));
        let status = fs::read_to_string(format!("/proc/{}/status", served.child.id())).unwrap();
        assert_eq!(status.contains("Seccomp:\t2"), confined, "{status}");
        assert_eq!(status.contains("NoNewPrivs:\t1"), confined, "{status}");
        let said = served.stderr();
        assert_eq!(said.contains("\"seccomp\":\"on\""), confined, "{said}");
        if said.contains("\"landlock\":\"off (this kernel has none)\"") {
            continue;
        }
        let config = fs::read_to_string(dir.join("e.toml")).unwrap();
        let token = elsewhere.path().join("token");
        fs::write(dir.join("e.toml"), format!("{config}\n[tasks.other]\ntoken = \"file:{}\"\n", token.display()))
            .unwrap();
        served.signal(Signal::HUP);
        let want = if confined { "the old policy stays in force" } else { "a new policy is in force" };
        let start = Instant::now();
        while !served.stderr().contains(want) {
            assert!(start.elapsed() < TIMEOUT, "{}", served.stderr());
            tokio::task::yield_now().await;
        }
    }
}

/// Certificates are often symbolic links, as are those of common ACME clients; so are configurations that are deployed
/// as a whole.
#[tokio::test(flavor = "multi_thread")]
async fn a_confined_daemon_follows_symbolic_links() {
    let (builder, _origin) = place("[proxy]\ntls = { cert = \"../live/cert.pem\", key = \"../live/key.pem\" }\n").await;
    let dir = builder.dir.path();
    for folder in ["live", "archive", "current", "release"] {
        fs::create_dir(dir.join(folder)).unwrap();
    }
    let key = rcgen::KeyPair::generate().unwrap();
    let cert = rcgen::CertificateParams::new(vec!["localhost".to_owned()]).unwrap().self_signed(&key).unwrap();
    fs::write(dir.join("archive/cert.pem"), cert.pem()).unwrap();
    fs::write(dir.join("archive/key.pem"), key.serialize_pem()).unwrap();
    for name in ["cert.pem", "key.pem"] {
        std::os::unix::fs::symlink(dir.join("archive").join(name), dir.join("live").join(name)).unwrap();
    }
    let config = fs::read_to_string(dir.join("e.toml")).unwrap();
    let config = config.replace("\"file:token\"", &format!("\"file:{}\"", dir.join("token").display()));
    let config = config.replace("\"origin-ca.pem\"", &format!("\"{}\"", dir.join("origin-ca.pem").display()));
    fs::write(dir.join("release/e.toml"), &config).unwrap();
    std::os::unix::fs::symlink(dir.join("release/e.toml"), dir.join("current/e.toml")).unwrap();
    let served = Served::start(exeat(dir, &["serve", "-c", "current/e.toml"]));
    assert!(served.ready.contains("ready; proxy on"), "{}{}", served.stderr(), served.ready);
    fs::write(dir.join("release/e.toml"), format!("{config}\n[tasks.other]\n")).unwrap();
    served.signal(Signal::HUP);
    let start = Instant::now();
    while !served.stderr().contains("a new policy is in force") {
        assert!(start.elapsed() < TIMEOUT, "{}", served.stderr());
        tokio::task::yield_now().await;
    }
}

/// A daemon that is told to stop under load finishes the requests that it has begun: each request that reached the
/// origin is answered completely.
#[tokio::test(flavor = "multi_thread")]
async fn stopping_under_load_loses_no_request_in_flight() {
    let (builder, origin) = place("").await;
    let mut served = Served::start(exeat(builder.dir.path(), &["serve", "-c", "e.toml"]));
    let host = format!("api.test:{}", origin.port());
    let ask = format!("GET https://{host}/ HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: {}\r\n\r\n", auth());
    let workers: Vec<_> = (0..16)
        .map(|_| {
            let (proxy, ask) = (served.proxy(), ask.clone());
            tokio::spawn(async move {
                let mut whole = 0;
                // Until nothing listens any more.
                #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
                while let Ok(mut stream) = TcpStream::connect(&proxy).await {
                    for _ in 0..10 {
                        if stream.write_all(ask.as_bytes()).await.is_err() {
                            break;
                        }
                        let mut words = Vec::new();
                        while !words.ends_with(b"hello\n") && !words.ends_with(b"}\n") {
                            match stream.read_buf(&mut words).await {
                                Ok(0) | Err(_) => break,
                                Ok(_) => {}
                            }
                        }
                        let text = text(&words);
                        if text.is_empty() {
                            break;
                        }
                        let done = text.starts_with("HTTP/1.1 200") && text.ends_with("hello\n");
                        assert!(done || text.contains("exeat-refusal: draining"), "{text}");
                        whole += usize::from(done);
                    }
                }
                whole
            })
        })
        .collect();
    while origin.seen().len() < 200 {
        tokio::task::yield_now().await;
    }
    served.signal(Signal::TERM);
    let mut whole = 0;
    for worker in workers {
        whole += worker.await.unwrap();
    }
    assert!(served.ended(), "{}", served.stderr());
    assert_eq!(whole, origin.seen().len());
}

/// Starts a daemon with this limit on descriptors.
fn start_with_descriptor_limit(builder: &LabBuilder, descriptors: usize) -> Served {
    start_with_limit(builder, &format!("-n {descriptors}"))
}

/// Starts the daemon with a limit of the shell's `ulimit`.
fn start_with_limit(builder: &LabBuilder, limit: &str) -> Served {
    let dir = builder.dir.path();
    let command = exeat(dir, &["serve", "-c", "e.toml"]);
    let mut shell = Command::new("sh");
    let script = format!("ulimit {limit}; exec \"$0\" \"$@\"");
    shell.args(["-c", &script]).arg(command.get_program()).args(command.get_args());
    shell.current_dir(dir).env("HOME", dir).env("XDG_STATE_HOME", dir.join("state"));
    Served::start(shell)
}

/// A log that has reached the size limit of files is one that cannot be written.
#[tokio::test(flavor = "multi_thread")]
async fn requests_are_refused_at_the_file_size_limit() {
    let (builder, origin) = place("").await;
    // In blocks of 512 or 1,024 bytes, depending on the shell.
    let mut served = start_with_limit(&builder, "-f 64");
    let url = format!("https://api.test:{}/", origin.port());
    let mut allowed = 0;
    loop {
        let reply = served.get(&url).await;
        if reply.status == 200 {
            allowed += 1;
            assert!(allowed < 1_000, "a line has more than 64 bytes");
            continue;
        }
        reply.assert_refused(503, "audit_unavailable");
        break;
    }
    assert!(allowed > 0 && served.child.try_wait().unwrap().is_none(), "{allowed}");
    let log = fs::read_to_string(builder.dir.path().join("state/exeat/audit.jsonl")).unwrap();
    assert_eq!(log.lines().filter(|line| line.contains("\"decided\"")).count(), allowed);
}

/// However many unidentified connections exist, descriptors are left for existing callers, for a new caller, for the
/// operator and for the log.
#[tokio::test(flavor = "multi_thread")]
async fn descriptors_are_kept_for_callers_the_operator_and_the_log() {
    let (builder, origin) = place("").await;
    let served = start_with_descriptor_limit(&builder, 48);
    assert!(
        served.stderr().contains("proxy.max_connections needs a higher limit of open files"),
        "{}",
        served.stderr()
    );
    let url = format!("https://evil.test:{}/", origin.port());
    let ask =
        format!("GET {url} HTTP/1.1\r\nHost: evil.test:{}\r\nProxy-Authorization: {}\r\n\r\n", origin.port(), auth());
    let mut working = connect(&served).await;
    working.write_all(ask.as_bytes()).await.unwrap();
    assert!(read_head(&mut working).await.starts_with("HTTP/1.1 403"));
    let mut idle = Vec::new();
    for _ in 0..60 {
        idle.push(connect(&served).await);
    }
    let admin = served.admin();
    for _ in 0..20 {
        #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
        let mut operator = TcpStream::connect(&admin).await.unwrap();
        operator.write_all(b"GET /readyz HTTP/1.1\r\nHost: localhost\r\n\r\n").await.unwrap();
        assert!(read_head(&mut operator).await.starts_with("HTTP/1.1 200"));
        working.write_all(ask.as_bytes()).await.unwrap();
        let mut body = Vec::new();
        while !body.windows(4).any(|end| end == b"403 ") {
            assert_ne!(working.read_buf(&mut body).await.unwrap(), 0);
        }
        assert_eq!(served.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    }
    assert!(!served.stderr().contains("cannot accept connections"), "{}", served.stderr());
    drop(idle);
}

/// One execution that connects to more and more origins is limited to its share of the descriptors.
#[tokio::test(flavor = "multi_thread")]
async fn sockets_to_origins_are_divided_between_executions() {
    let (builder, origin) = place("[tasks.other]\nintegrations = [\"api\"]\ntoken = \"file:other-token\"\n").await;
    fs::write(builder.dir.path().join("other-token"), "the-other-token-of-24-bytes").unwrap();
    let served = start_with_descriptor_limit(&builder, 256);
    let ask = |path: &str, fields: &str| {
        let to = format!("api.test:{}", origin.port());
        format!("GET https://{to}{path} HTTP/1.1\r\nHost: {to}\r\nExeat-Nothing: x\r\n{fields}\r\n")
    };
    let own = format!("Proxy-Authorization: {}\r\n", auth());
    let mut stalled = Vec::new();
    // Upgrades do not share a connection.
    let upgrade = "Upgrade: websocket\r\nConnection: upgrade\r\nSec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n";
    for _ in 0..16 {
        let mut stream = connect(&served).await;
        stream.write_all(ask("/stall", &format!("{own}{upgrade}")).as_bytes()).await.unwrap();
        stalled.push(stream);
    }
    let start = Instant::now();
    while origin.seen().len() < 16 {
        assert!(start.elapsed() < TIMEOUT, "{}", origin.seen().len());
        tokio::task::yield_now().await;
    }
    let mut more = connect(&served).await;
    more.write_all(ask("/stall", &own).as_bytes()).await.unwrap();
    let head = read_head(&mut more).await;
    assert!(head.starts_with("HTTP/1.1 503") && head.contains("exeat-refusal: overloaded"), "{head}");
    let mut other = connect(&served).await;
    let token = "Proxy-Authorization: Bearer the-other-token-of-24-bytes\r\n";
    other.write_all(ask("/", token).as_bytes()).await.unwrap();
    assert!(read_head(&mut other).await.starts_with("HTTP/1.1 200"));
    // Slots are free again once the proxy has noticed the closed connections.
    drop(stalled);
    let start = Instant::now();
    while served.get(&format!("https://api.test:{}/", origin.port())).await.status != 200 {
        assert!(start.elapsed() < TIMEOUT);
    }
}

/// Ten thousand connections over the limit: each is answered or closed, and existing callers are not affected.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "opens ten thousand connections"]
async fn idle_connections_over_the_limit_do_not_affect_others() {
    const ROOM: usize = 200;
    // One caller alone does not get the last quarter.
    let other = "[tasks.u]\ntoken = \"file:other\"\nintegrations = [\"api\"]\n";
    let (builder, origin) = place(&format!("[proxy]\nmax_connections = {ROOM}\n{other}")).await;
    fs::write(builder.dir.path().join("other"), "another-token-of-24-bytes-or-more").unwrap();
    let served = Served::start(exeat(builder.dir.path(), &["serve", "-c", "e.toml"]));
    let url = format!("https://api.test:{}/", origin.port());
    let asked_by = |auth: &str| {
        format!("GET {url} HTTP/1.1\r\nHost: api.test:{}\r\nProxy-Authorization: {auth}\r\n\r\n", origin.port())
    };
    let ask = asked_by(&auth());
    let other = asked_by(&format!("Basic {}", STANDARD.encode("u:another-token-of-24-bytes-or-more")));
    let mut inside = Vec::new();
    for n in 0..ROOM {
        let ask = if n < ROOM * 3 / 4 { &ask } else { &other };
        let mut stream = connect(&served).await;
        stream.write_all(ask.as_bytes()).await.unwrap();
        assert!(read_head(&mut stream).await.starts_with("HTTP/1.1 200"));
        inside.push(stream);
    }
    let (mut told, mut closed) = (0, 0);
    let mut idle = Vec::new();
    for round in 0..10_000 {
        idle.push(connect(&served).await);
        if round % 100 == 0 {
            let stream = &mut inside[round / 100];
            let start = Instant::now();
            stream.write_all(ask.as_bytes()).await.unwrap();
            let mut body = [0; 6];
            stream.read_exact(&mut body).await.unwrap();
            assert!(read_head(stream).await.starts_with("HTTP/1.1 200"));
            assert!(start.elapsed() < Duration::from_secs(5), "served within {:?}", start.elapsed());
        }
    }
    for mut stream in idle {
        let mut words = Vec::new();
        // A reset counts as a close.
        let _ = tokio::time::timeout(TIMEOUT, stream.read_to_end(&mut words)).await.expect("closed");
        if words.is_empty() {
            closed += 1;
        } else {
            assert!(text(&words).contains("exeat-refusal: overloaded"), "{}", text(&words));
            told += 1;
        }
    }
    println!("{told} told, {closed} closed");
    assert!(told > 0);
    drop(inside);
    let start = Instant::now();
    loop {
        // While the proxy is full it answers before the request is sent, which an HTTP client library reports as an
        // error.
        let mut stream = connect(&served).await;
        let sent = stream.write_all(ask.as_bytes()).await;
        if sent.is_ok() && read_head(&mut stream).await.starts_with("HTTP/1.1 200") {
            break;
        }
        assert!(start.elapsed() < TIMEOUT);
    }
}

/// Waits until a process has ended.
async fn end_of(mut served: Served) -> bool {
    let start = Instant::now();
    while served.child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < TIMEOUT, "the daemon does not end");
        tokio::task::yield_now().await;
    }
    served.ended()
}

/// A file system may hang, as that of a network does. A reload waits for it, and nothing else does.
#[tokio::test(flavor = "multi_thread")]
async fn a_file_that_hangs_stops_neither_requests_nor_the_end() {
    use rustix::fs::{Mode, OFlags};
    for hanging in ["e.toml", "value"] {
        let (builder, origin) =
            place("[credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"api.test\"]\n")
                .await;
        let dir = builder.dir.path();
        fs::write(dir.join("value"), "k7Qz2mXv9LpW4sVt6eRRu8Yb").unwrap();
        let text = fs::read_to_string(dir.join("e.toml")).unwrap();
        assert!(text.contains("[tasks.t]\n"), "{text}");
        fs::write(dir.join("e.toml"), text.replace("[tasks.t]\n", "[tasks.t]\ncredentials = [\"KEY\"]\n")).unwrap();
        let served = Served::start(exeat(dir, &["serve", "-c", "e.toml"]));
        let url = format!("https://api.test:{}/", origin.port());
        assert_eq!(served.get(&url).await.status, 200, "{}", served.ready);
        // A pipe hangs for its reader while somebody holds its other end.
        let path = dir.join(hanging);
        fs::remove_file(&path).unwrap();
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        served.signal(Signal::HUP);
        let start = Instant::now();
        let _writer = loop {
            match rustix::fs::open(&path, OFlags::WRONLY | OFlags::NONBLOCK, Mode::empty()) {
                Ok(writer) => break writer,
                Err(error) => assert!(
                    error == rustix::io::Errno::NXIO && start.elapsed() < TIMEOUT,
                    "{hanging}: {error} {}",
                    served.stderr()
                ),
            }
            tokio::task::yield_now().await;
        };
        // More of them wait for the first one.
        for _ in 0..3 {
            served.signal(Signal::HUP);
        }
        for _ in 0..20 {
            assert_eq!(served.get(&url).await.status, 200, "{hanging}");
        }
        served.signal(Signal::TERM);
        assert!(end_of(served).await, "{hanging}");
    }
}

/// A log shipper may stop to read.
#[tokio::test(flavor = "multi_thread")]
async fn a_full_pipe_of_messages_stops_neither_reloads_nor_the_end() {
    use std::io::{BufRead, BufReader};
    let (builder, _origin) = place("[admin]\nlisten = \"unix:admin.sock\"\n").await;
    let dir = builder.dir.path();
    let mut child = exeat(dir, &["serve", "-c", "e.toml"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut messages = BufReader::with_capacity(64, child.stderr.take().unwrap());
    rustix::pipe::fcntl_setpipe_size(messages.get_ref(), 4096).unwrap();
    let mut line = String::new();
    while !line.contains("ready; proxy on ") {
        line.clear();
        assert!(messages.read_line(&mut line).unwrap() > 0, "the daemon starts");
    }
    for round in 0..60 {
        let mut admin = UnixStream::connect(dir.join("admin.sock")).await.unwrap();
        admin
            .write_all(b"POST /v1/reload HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
            .await
            .unwrap();
        let mut answer = String::new();
        tokio::time::timeout(TIMEOUT, admin.read_to_string(&mut answer)).await.expect("a reload ends").unwrap();
        assert!(answer.starts_with("HTTP/1.1 200"), "{round}: {answer}");
    }
    let pid = rustix::process::Pid::from_raw(child.id() as i32).unwrap();
    rustix::process::kill_process(pid, Signal::TERM).unwrap();
    let start = Instant::now();
    while child.try_wait().unwrap().is_none() {
        assert!(start.elapsed() < TIMEOUT, "the daemon does not end");
        tokio::task::yield_now().await;
    }
}

//! A new process takes the listening sockets over from a running daemon.

use std::fs;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Instant;

use http::Request;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::lab::client::{auth, client_config, empty, read_head, read_to_end};
use crate::lab::h2::{DATA, END_STREAM, GOAWAY, Wire, frame, read_frame};
use crate::lab::{self, Lab, LabBuilder, Origin, Reply, TIMEOUT};
use crate::operation::cli::{Served, exeat, output, text};

async fn place(more: &str) -> (LabBuilder, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let admin = "[admin]\nlisten = \"127.0.0.1:0\"\n[metrics]\nlisten = \"127.0.0.1:0\"\n";
    let config = builder.config(&format!("{admin}{more}{}", lab::allow_api(origin.port())));
    fs::write(builder.dir.path().join("e.toml"), config).unwrap();
    (builder, origin)
}

fn serve(dir: &Path, more: &[&str]) -> Served {
    Served::start(exeat(dir, &[&["serve", "-c", "e.toml"], more].concat()))
}

/// Reads one response with the body `hello\n`. Returns whether the connection goes on.
async fn hello(stream: &mut TcpStream) -> Result<bool, String> {
    let mut words = Vec::new();
    while !words.ends_with(b"hello\n") {
        match stream.read_buf(&mut words).await {
            Ok(0) => return Err(format!("closed behind {:?}", text(&words))),
            Ok(_) => {}
            Err(error) => return Err(format!("{error} behind {:?}", text(&words))),
        }
    }
    let head = text(&words).to_ascii_lowercase();
    if head.starts_with("http/1.1 200") { Ok(!head.contains("connection: close")) } else { Err(head) }
}

/// Sends a request and reads to the end of the connection.
async fn exchange(to: &str, ask: &str) -> String {
    #[allow(clippy::disallowed_methods, reason = "the test plays the operator")]
    let mut stream = TcpStream::connect(to).await.expect("something listens");
    stream.write_all(ask.as_bytes()).await.unwrap();
    read_to_end(&mut stream).await
}

/// Opens a tunnel and makes three requests in it, as far as the proxy keeps it open.
async fn in_tunnel(proxy: &str, host: &str, roots: &[u8], protocol: &str) {
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    let mut stream = TcpStream::connect(proxy).await.expect("something listens");
    let connect = format!("CONNECT {host} HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: {}\r\n\r\n", auth());
    stream.write_all(connect.as_bytes()).await.unwrap();
    let head = read_head(&mut stream).await;
    assert!(head.starts_with("HTTP/1.1 200"), "{head}");
    let mut trusted = rustls::RootCertStore::empty();
    trusted.add_parsable_certificates(CertificateDer::pem_slice_iter(roots).map(Result::unwrap));
    let config = client_config(trusted, &[protocol]);
    let connector = tokio_rustls::TlsConnector::from(Arc::new(config));
    let tls = connector.connect("api.test".try_into().unwrap(), stream).await.unwrap();
    let request = |url: &str| Request::get(url).header("host", host).body(empty()).unwrap();
    let io = TokioIo::new(tls);
    if protocol == "h2" {
        let (mut sender, connection) = hyper::client::conn::http2::handshake(TokioExecutor::new(), io).await.unwrap();
        let connection = tokio::spawn(connection);
        for _ in 0..3 {
            let response = match sender.send_request(request(&format!("https://{host}/"))).await {
                Ok(response) => response,
                // The proxy has said GOAWAY, and the request has not been sent.
                Err(error) if error.is_canceled() || error.is_closed() => break,
                Err(error) => panic!("{error:?}"),
            };
            let reply = Reply::read(response).await;
            assert_eq!((reply.status.as_u16(), reply.text()), (200, "hello\n"));
        }
        connection.abort();
    } else {
        let (mut sender, connection) = hyper::client::conn::http1::handshake(io).await.unwrap();
        tokio::spawn(connection);
        for _ in 0..3 {
            let reply = Reply::read(sender.send_request(request("/")).await.unwrap()).await;
            assert_eq!((reply.status.as_u16(), reply.text()), (200, "hello\n"));
            if reply.header("connection") == Some("close") {
                break;
            }
        }
    }
}

/// Four processes in a row, under load: connections of one request, and those that are kept as long as the proxy keeps them.
/// No connection is refused, and each request has its response.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_process_takes_over_without_a_failed_request() {
    const TAKEOVERS: usize = 3;
    let (builder, origin) = place("").await;
    let dir = builder.dir.path();
    let mut old = serve(dir, &[]);
    let (proxy, admin) = (old.proxy(), old.admin());
    let metrics = |served: &Served| {
        let (_, after) = served.ready.split_once("metrics on ").expect("it is said");
        after.split('"').next().map(|address| address.trim().to_owned())
    };
    let metrics_before = metrics(&old);
    let host = format!("api.test:{}", origin.port());
    let ask = format!("GET https://{host}/ HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: {}\r\n\r\n", auth());
    let (is_over, served) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    // Operators ask, and clients use HTTP/1.1 and HTTP/2 inside tunnels.
    let token = fs::read_to_string(dir.join("state/exeat/admin.token")).unwrap();
    let roots = fs::read(dir.join("state/exeat/ca.pem")).unwrap();
    let others = (0..4).map(|number| {
        let (is_over, admin, token, proxy) = (is_over.clone(), admin.clone(), token.clone(), proxy.clone());
        let (host, roots) = (host.clone(), roots.clone());
        tokio::spawn(async move {
            while !is_over.load(Ordering::Relaxed) {
                if number == 0 {
                    let ask =
                        format!("GET /v1/tasks HTTP/1.1\r\nHost: {admin}\r\nAuthorization: Bearer {token}\r\n\r\n");
                    let answer = exchange(&admin, &ask).await;
                    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("}\n"), "{answer}");
                } else {
                    in_tunnel(&proxy, &host, &roots, if number == 1 { "http/1.1" } else { "h2" }).await;
                }
            }
        })
    });
    let others: Vec<_> = others.collect();
    let workers: Vec<_> = (0..12)
        .map(|number| {
            let (proxy, ask) = (proxy.clone(), ask.clone());
            let (is_over, served) = (is_over.clone(), served.clone());
            tokio::spawn(async move {
                let keeps = number % 2 == 0;
                while !is_over.load(Ordering::Relaxed) {
                    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
                    let mut stream = TcpStream::connect(&proxy).await.expect("something listens");
                    loop {
                        stream.write_all(ask.as_bytes()).await.unwrap();
                        let goes_on = hello(&mut stream).await.unwrap_or_else(|error| panic!("{number}: {error}"));
                        served.fetch_add(1, Ordering::Relaxed);
                        if !keeps || !goes_on || is_over.load(Ordering::Relaxed) {
                            break;
                        }
                    }
                }
            })
        })
        .collect();
    let wait_for = async |more: usize| {
        let (start, before) = (Instant::now(), served.load(Ordering::Relaxed));
        while served.load(Ordering::Relaxed) < before + more {
            assert!(start.elapsed() < TIMEOUT, "the requests stop");
            tokio::task::yield_now().await;
        }
    };
    for _ in 0..TAKEOVERS {
        wait_for(100).await;
        let new = serve(dir, &["--takeover"]);
        assert_eq!((new.proxy(), new.admin()), (proxy.clone(), admin.clone()), "{}", new.stderr());
        assert_eq!(metrics(&new), metrics_before, "{}", new.ready);
        assert!(old.ended(), "{}", old.stderr());
        assert!(old.stderr().contains("\"is_taken_over\":true"), "{}", old.stderr());
        old = new;
    }
    wait_for(100).await;
    is_over.store(true, Ordering::Relaxed);
    for worker in workers.into_iter().chain(others) {
        worker.await.unwrap();
    }
    assert!(served.load(Ordering::Relaxed) < origin.seen().len(), "requests inside tunnels");
    // The log of all four is one chain.
    old.signal(rustix::process::Signal::TERM);
    assert!(old.ended());
    let verified = output(exeat(dir, &["audit", "verify", "-c", "e.toml"])).await;
    assert!(verified.status.success(), "{}{}", text(&verified.stdout), text(&verified.stderr));
    let log = fs::read_to_string(dir.join("state/exeat/audit.jsonl")).unwrap();
    assert_eq!(log.matches("\"event\":\"closed\"").count(), origin.seen().len());
}

/// The files of Unix sockets stay, get the mode of the new configuration, and belong to the new process. Those that it does not
/// name any more are removed.
#[tokio::test(flavor = "multi_thread")]
async fn unix_sockets_are_taken_over_with_their_files() {
    let own = "[[proxy.listeners]]\nlisten = \"unix:own.sock\"\ntask = \"t\"\n";
    let gone = own.replace("own.sock", "gone.sock");
    let (builder, _origin) = place(&format!("[proxy]\nunix_mode = \"0666\"\n{own}{gone}")).await;
    let dir = builder.dir.path();
    let mut old = serve(dir, &[]);
    let (socket, gone_socket) = (dir.join("own.sock"), dir.join("gone.sock"));
    let mode = || fs::symlink_metadata(&socket).unwrap().permissions().mode() & 0o777;
    assert!(mode() == 0o666 && gone_socket.exists());
    let config = fs::read_to_string(dir.join("e.toml")).unwrap();
    fs::write(dir.join("e.toml"), config.replace(&gone, "").replace("0666", "0600")).unwrap();
    let mut new = serve(dir, &["--takeover"]);
    assert!(old.ended(), "{}", old.stderr());
    assert!(fs::symlink_metadata(&socket).unwrap().file_type().is_socket());
    assert!(mode() == 0o600 && !gone_socket.exists(), "{:o}", mode());
    let mut stream = tokio::net::UnixStream::connect(&socket).await.unwrap();
    stream.write_all(b"GET /v1/self HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n").await.unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    new.signal(rustix::process::Signal::TERM);
    assert!(new.ended());
    assert!(!socket.exists() && !dir.join("state/exeat/takeover.sock").exists());
}

/// A start that fails does not end the running daemon, and other users cannot reach its socket.
#[tokio::test(flavor = "multi_thread")]
async fn a_new_process_that_cannot_start_leaves_the_old_one_alone() {
    let (builder, origin) = place("[proxy]\nlisten = [\"127.0.0.1:0\", \"unix:s.sock\"]\n").await;
    let dir = builder.dir.path();
    let old = serve(dir, &[]);
    let mode = fs::metadata(dir.join("state/exeat/takeover.sock")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o600);
    let config = fs::read_to_string(dir.join("e.toml")).unwrap();
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let also = format!("listen = [\"127.0.0.1:0\", \"unix:s.sock\", \"{}\"]", taken.local_addr().unwrap());
    let rows = [
        (config.replace("[admin]", "[admin]\nnonsense = 1"), "nonsense"),
        (config.replace("listen = [\"127.0.0.1:0\", \"unix:s.sock\"]", &also), "cannot listen on"),
        (config.replace("extra_roots = [\"origin-ca.pem\"]", "extra_roots = [\"e.toml\"]"), "extra_roots"),
    ];
    for (broken, want) in rows {
        fs::write(dir.join("e.toml"), broken).unwrap();
        let failed = output(exeat(dir, &["serve", "-c", "e.toml", "--takeover"])).await;
        let said = text(&failed.stderr);
        assert!(!failed.status.success() && said.contains(want), "{want}: {said}");
        assert_eq!(old.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
        // The socket files that it had taken already stay those of the old process.
        tokio::net::UnixStream::connect(dir.join("s.sock")).await.unwrap();
    }
    // Neither does a process that says something else, or nothing.
    for said in [&[][..], &[9]] {
        let mut other = tokio::net::UnixStream::connect(dir.join("state/exeat/takeover.sock")).await.unwrap();
        other.write_all(said).await.unwrap();
        drop(other);
        assert_eq!(old.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    }
    // Its policy was not replaced either.
    fs::write(dir.join("e.toml"), config).unwrap();
    let mut old = old;
    let new = serve(dir, &["--takeover"]);
    assert!(old.ended(), "{}", old.stderr());
    assert_eq!(new.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn without_a_running_daemon_it_starts_as_usual() {
    let (builder, origin) = place("").await;
    let dir = builder.dir.path();
    let served = serve(dir, &["--takeover"]);
    assert!(served.stderr().contains("starting as usual"), "{}", served.stderr());
    assert_eq!(served.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    let mut both = exeat(dir, &["serve", "-c", "e.toml", "--takeover"]);
    both.env("LISTEN_FDS", "1");
    let refused = output(both).await;
    assert!(text(&refused.stderr).contains("service manager"), "{}", text(&refused.stderr));
}

/// Java, and curl 7.88, drop a response that follows GOAWAY. So the daemon waits for the end of it.
#[tokio::test(flavor = "multi_thread")]
async fn a_response_in_progress_ends_before_goaway() {
    let (lab, origin) = lab::simple().await;
    let to = format!("api.test:{}", origin.port());
    let mut wire = Wire::open(&lab, &to).await;
    wire.headers(1, false, &[(":method", "POST"), (":scheme", "https"), (":authority", &to), (":path", "/echo")]);
    wire.send(&frame(DATA, 0, 1, b"one")).await;
    while origin.seen().is_empty() && origin.connections() == 0 {
        tokio::task::yield_now().await;
    }
    let Lab { daemon, proxy, dir, dns, .. } = lab;
    let stopped = tokio::spawn(daemon.shutdown());
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    while TcpStream::connect(proxy).await.is_ok() {
        tokio::task::yield_now().await;
    }
    wire.send(&frame(DATA, END_STREAM, 1, b"two")).await;
    let (mut echoed, mut has_ended, mut ended_before_goaway) = (Vec::new(), false, None);
    while let Some(frame) = read_frame(&mut wire.io).await {
        match frame.kind {
            GOAWAY => ended_before_goaway = ended_before_goaway.or(Some(has_ended)),
            DATA => echoed.extend(frame.payload),
            _ => {}
        }
        has_ended |= frame.stream == 1 && frame.flags & END_STREAM != 0;
    }
    assert_eq!((text(&echoed), ended_before_goaway), ("onetwo".to_owned(), Some(true)));
    assert!(stopped.await.unwrap());
    drop((dir, dns));
}

/// Of two processes that take over at once, one gets the sockets. The other fails, or takes over from the first.
#[tokio::test(flavor = "multi_thread")]
async fn two_takeovers_at_once_leave_one_daemon() {
    let (builder, origin) = place("").await;
    let dir = builder.dir.path();
    let mut old = serve(dir, &[]);
    let (proxy, path) = (old.proxy(), dir.to_owned());
    let starts: Vec<_> = (0..2)
        .map(|_| {
            let path = path.clone();
            std::thread::spawn(move || serve(&path, &["--takeover"]))
        })
        .collect();
    let mut started: Vec<_> = starts.into_iter().map(|start| start.join().unwrap()).collect();
    assert!(old.ended(), "{}", old.stderr());
    let began = Instant::now();
    let left = loop {
        let mut alive: Vec<_> =
            started.iter_mut().filter_map(|it| it.child.try_wait().unwrap().is_none().then_some(it)).collect();
        assert!(!alive.is_empty(), "no daemon is left");
        if alive.len() == 1 {
            break alive.remove(0);
        }
        assert!(began.elapsed() < TIMEOUT, "two daemons run");
        tokio::task::yield_now().await;
    };
    assert_eq!(left.proxy(), proxy, "{}", left.stderr());
    assert_eq!(left.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
}

/// No daemon answers between the end of the old process and the start of the new one. A second one does not start then.
#[tokio::test(flavor = "multi_thread")]
async fn a_second_takeover_waits_for_no_gap_of_the_first() {
    let (builder, origin) = place("").await;
    let dir = builder.dir.path();
    let old = serve(dir, &[]);
    let lock = fs::File::create(dir.join("state/exeat/takeover.lock")).unwrap();
    lock.lock().unwrap();
    let busy = output(exeat(dir, &["serve", "-c", "e.toml", "--takeover"])).await;
    assert_eq!(busy.status.code(), Some(1));
    assert!(text(&busy.stderr).contains("another process is taking it over"), "{}", text(&busy.stderr));
    assert_eq!(old.get(&format!("https://api.test:{}/", origin.port())).await.status, 200);
    drop(lock);
    let new = serve(dir, &["--takeover"]);
    assert_eq!(new.proxy(), old.proxy());
}

/// A script that stops the old process itself does not cut off its requests, and a killed one does not keep the new one waiting.
#[tokio::test(flavor = "multi_thread")]
async fn the_old_process_may_be_stopped_or_killed_meanwhile() {
    for signal in [rustix::process::Signal::TERM, rustix::process::Signal::KILL] {
        let (builder, origin) = place("").await;
        let dir = builder.dir.path();
        let mut old = serve(dir, &[]);
        let host = format!("api.test:{}", origin.port());
        // An exchange that lasts keeps the old process from ending.
        #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
        let mut upload = TcpStream::connect(old.proxy()).await.unwrap();
        let head = format!(
            "POST https://{host}/sink HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: {}\r\nContent-Length: 6\r\n\r\none",
            auth()
        );
        upload.write_all(head.as_bytes()).await.unwrap();
        let path = dir.to_owned();
        let start = std::thread::spawn(move || serve(&path, &["--takeover"]));
        let began = Instant::now();
        while !old.stderr().contains("\"is_taken_over\":true") {
            assert!(began.elapsed() < TIMEOUT, "{}", old.stderr());
            tokio::task::yield_now().await;
        }
        old.signal(signal);
        if signal == rustix::process::Signal::TERM {
            upload.write_all(b"two").await.unwrap();
            let answer = read_to_end(&mut upload).await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
            assert!(old.ended(), "{}", old.stderr());
        }
        let new = start.join().unwrap();
        assert_eq!(new.get(&format!("https://{host}/")).await.status, 200, "{}", new.stderr());
    }
}

//! Origins: one that answers by path and records its requests, and one that sends raw bytes.

use std::collections::HashMap;
use std::convert::Infallible;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Request, Response, Uri, Version};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, Channel, Full, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::service::service_fn;
use hyper_util::rt::{TokioExecutor, TokioIo};
use rustls::ServerConfig;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::TcpListener;
use tokio_rustls::TlsAcceptor;

pub type Body = UnsyncBoxBody<Bytes, std::io::Error>;

/// A request as the origin received it.
#[derive(Clone, Debug)]
pub struct Seen {
    pub uri: Uri,
    pub version: Version,
    pub headers: HeaderMap,
    pub body: Bytes,
    pub trailers: HeaderMap,
}

impl Seen {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name).map(|value| value.to_str().unwrap())
    }
}

/// An origin on a free port of 127.0.0.1.
#[derive(Clone)]
pub struct Origin {
    address: SocketAddr,
    seen: Arc<Mutex<Vec<Seen>>>,
    connections: Arc<AtomicUsize>,
    repositories: Arc<Mutex<PathBuf>>,
    files: Arc<Mutex<HashMap<String, (&'static str, Bytes)>>>,
    streaming: Arc<AtomicUsize>,
    echoed_trailers: Arc<AtomicUsize>,
    broken_upload: Arc<AtomicBool>,
}

/// Counts a response body as in progress until it is dropped.
struct Streaming(Arc<AtomicUsize>);

impl Streaming {
    fn begin(count: &Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count.clone())
    }
}

impl Drop for Streaming {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl Origin {
    pub async fn https(config: Arc<ServerConfig>) -> Self {
        Self::listen(Some(TlsAcceptor::from(config))).await
    }

    pub async fn http() -> Self {
        Self::listen(None).await
    }

    pub fn port(&self) -> u16 {
        self.address.port()
    }

    pub fn seen(&self) -> Vec<Seen> {
        self.seen.lock().unwrap().clone()
    }

    pub fn last(&self) -> Seen {
        self.seen().pop().expect("the origin was asked")
    }

    /// Serves the git repositories in a folder under `/git/`, through git's own CGI program.
    pub fn serve_repositories(&self, folder: PathBuf) {
        *self.repositories.lock().unwrap() = folder;
    }

    /// Serves a file below `/files/`. Other paths there get a 404.
    pub fn serve_file(&self, path: &str, kind: &'static str, content: impl Into<Bytes>) {
        self.files.lock().unwrap().insert(format!("/files/{path}"), (kind, content.into()));
    }

    /// Returns the number of accepted connections.
    pub fn connections(&self) -> usize {
        self.connections.load(Ordering::SeqCst)
    }

    /// Returns the number of requests whose trailers were echoed.
    pub fn echoed_trailers(&self) -> usize {
        self.echoed_trailers.load(Ordering::SeqCst)
    }

    /// Returns the number of `/big` and `/known` bodies in progress.
    pub fn streaming(&self) -> usize {
        self.streaming.load(Ordering::SeqCst)
    }

    /// Returns whether the upload to `/early` was aborted.
    pub fn has_broken_upload(&self) -> bool {
        self.broken_upload.load(Ordering::SeqCst)
    }

    async fn listen(tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let origin = Self {
            address,
            seen: Arc::default(),
            connections: Arc::default(),
            repositories: Arc::default(),
            files: Arc::default(),
            streaming: Arc::default(),
            echoed_trailers: Arc::default(),
            broken_upload: Arc::default(),
        };
        let running = origin.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                running.connections.fetch_add(1, Ordering::SeqCst);
                let (origin, tls) = (running.clone(), tls.clone());
                tokio::spawn(async move {
                    match tls {
                        None => origin.serve(stream, false).await,
                        Some(acceptor) => {
                            if let Ok(stream) = acceptor.accept(stream).await {
                                let h2 = stream.get_ref().1.alpn_protocol() == Some(b"h2");
                                origin.serve(stream, h2).await;
                            }
                        }
                    }
                });
            }
        });
        origin
    }

    async fn serve(self, stream: impl AsyncRead + AsyncWrite + Unpin + Send + 'static, h2: bool) {
        let io = TokioIo::new(stream);
        let service = service_fn(move |request| {
            let origin = self.clone();
            async move { origin.answer(request).await }
        });
        // Many tests abort the connection, so errors are ignored.
        let _ = if h2 {
            hyper::server::conn::http2::Builder::new(TokioExecutor::new()).serve_connection(io, service).await
        } else {
            hyper::server::conn::http1::Builder::new().preserve_header_case(true).serve_connection(io, service).await
        };
    }

    async fn answer(self, request: Request<Incoming>) -> Result<Response<Body>, std::io::Error> {
        let (parts, body) = request.into_parts();
        let path = parts.uri.path().to_owned();
        let note = |body: Bytes, trailers: HeaderMap| {
            let seen =
                Seen { uri: parts.uri.clone(), version: parts.version, headers: parts.headers.clone(), body, trailers };
            self.seen.lock().unwrap().push(seen);
        };
        match path.as_str() {
            // Streams the request body back as it arrives.
            "/echo" => {
                note(Bytes::new(), HeaderMap::new());
                let echoed = self.echoed_trailers.clone();
                let body = body.map_frame(move |frame| {
                    echoed.fetch_add(usize::from(frame.is_trailers()), Ordering::SeqCst);
                    frame
                });
                return Ok(Response::new(body.map_err(std::io::Error::other).boxed_unsync()));
            }
            // Returns the body in reverse order, so that the proxy cannot recognise values in it.
            "/reverse" => {
                note(Bytes::new(), HeaderMap::new());
                let body = body.collect().await.map_err(std::io::Error::other)?.to_bytes();
                return Ok(Response::new(full(body.iter().rev().copied().collect::<Vec<u8>>())));
            }
            // Counts the bytes of the body without keeping them.
            "/sink" => {
                note(Bytes::new(), HeaderMap::new());
                let mut body = body;
                let mut count = 0;
                while let Some(frame) = body.frame().await {
                    count += frame.map_err(std::io::Error::other)?.data_ref().map_or(0, Bytes::len);
                }
                return Ok(Response::new(full(count.to_string())));
            }
            // Answers before it has read the body, and continues reading.
            "/early" => {
                note(Bytes::new(), HeaderMap::new());
                let broken = self.broken_upload.clone();
                tokio::spawn(async move { broken.store(body.collect().await.is_err(), Ordering::SeqCst) });
                return Ok(by_path("/known", parts.uri.query(), &self.streaming));
            }
            // Echoes the request in every part of the answer.
            "/tell" => {
                note(Bytes::new(), HeaderMap::new());
                return Ok(echo_request(&parts));
            }
            // Requires Basic authentication.
            _ if path.starts_with("/private/") && !parts.headers.contains_key("authorization") => {
                let asking = Response::builder().status(401).header("www-authenticate", "Basic realm=\"private\"");
                return Ok(asking.body(full("")).unwrap());
            }
            "/stall" => {
                note(Bytes::new(), HeaderMap::new());
                return std::future::pending().await;
            }
            _ => {}
        }
        let collected = body.collect().await.map_err(std::io::Error::other)?;
        let trailers = collected.trailers().cloned().unwrap_or_default();
        let body = collected.to_bytes();
        note(body.clone(), trailers);
        if path.starts_with("/git/") {
            return self.git(&parts, &body).await;
        }
        if path.starts_with("/files/") {
            return Ok(self.file(&path));
        }
        Ok(by_path(&path, parts.uri.query(), &self.streaming))
    }
}

impl Origin {
    fn file(&self, path: &str) -> Response<Body> {
        match self.files.lock().unwrap().get(path).cloned() {
            Some((kind, content)) => Response::builder().header("content-type", kind).body(full(content)).unwrap(),
            None => Response::builder().status(404).body(full("no such file\n")).unwrap(),
        }
    }

    /// Runs `git http-backend`, which speaks CGI (RFC 3875): variables and a body in, a head and a body out.
    async fn git(&self, parts: &http::request::Parts, body: &[u8]) -> Result<Response<Body>, std::io::Error> {
        let field = |name: &str| parts.headers.get(name).and_then(|v| v.to_str().ok()).unwrap_or_default();
        let root = self.repositories.lock().unwrap().clone();
        let mut command = tokio::process::Command::new("git");
        command
            .arg("http-backend")
            .env("GIT_PROJECT_ROOT", root)
            .env("GIT_HTTP_EXPORT_ALL", "1")
            .env("GIT_PROTOCOL", field("git-protocol"));
        command
            .env("PATH_INFO", parts.uri.path().trim_start_matches("/git"))
            .env("QUERY_STRING", parts.uri.query().unwrap_or_default());
        command.env("REQUEST_METHOD", parts.method.as_str()).env("CONTENT_TYPE", field("content-type"));
        command.env("HTTP_CONTENT_ENCODING", field("content-encoding")).env("CONTENT_LENGTH", body.len().to_string());
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn()?;
        child.stdin.take().unwrap().write_all(body).await?;
        let output = child.wait_with_output().await?.stdout;
        let split = output.windows(4).position(|w| w == b"\r\n\r\n").unwrap_or(0);
        let mut response = Response::builder();
        for line in String::from_utf8_lossy(&output[..split]).lines() {
            response = match line.split_once(": ") {
                Some(("Status", status)) => response.status(&status[..3]),
                Some((name, value)) => response.header(name, value),
                None => response,
            };
        }
        Ok(response.body(full(output[split + 4..].to_vec())).unwrap())
    }
}

/// Echoes the credential in fields, in a body that is cut at byte `n` (from the query), and in a trailer.
fn echo_request(parts: &http::request::Parts) -> Response<Body> {
    let all =
        parts.headers.iter().map(|(name, value)| format!("{name}: {}\n", String::from_utf8_lossy(value.as_bytes())));
    let text = format!("{}\n{}end\n", parts.uri, all.collect::<String>());
    let sent = parts.headers.get("authorization").or(parts.headers.get("x-api-key")).cloned();
    let mut response = Response::builder().status(500).header("content-location", parts.uri.to_string());
    if let Some(sent) = &sent {
        let sent = sent.to_str().unwrap();
        response = response.header("x-echo", sent).header("set-cookie", format!("k={sent}; Path=/"));
        response = response.header("location", format!("https://elsewhere.test/?k={}", sent.replace(' ', "%20")));
    }
    let query = parts.uri.query().unwrap_or_default();
    if query.contains("whole") {
        return response.body(full(text)).unwrap();
    }
    let cut = query.split('&').find_map(|n| n.parse::<usize>().ok()).unwrap_or_default().min(text.len());
    // http-body-util's channel loses data that is sent immediately before its end.
    let (send, mut received) = tokio::sync::mpsc::channel(4);
    tokio::spawn(async move {
        let (first, rest) = text.split_at(cut);
        let _ = send.send(Frame::data(Bytes::copy_from_slice(first.as_bytes()))).await;
        // The first part has been taken, and therefore sent, before the second is queued.
        while send.capacity() < 4 && !send.is_closed() {
            tokio::task::yield_now().await;
        }
        let _ = send.send(Frame::data(Bytes::copy_from_slice(rest.as_bytes()))).await;
        let mut trailers = HeaderMap::new();
        trailers.extend(sent.map(|sent| (http::HeaderName::from_static("x-echo"), sent)));
        let _ = send.send(Frame::trailers(trailers)).await;
    });
    let frames = futures_util::stream::poll_fn(move |cx| received.poll_recv(cx).map(|frame| frame.map(Ok)));
    response.header("trailer", "x-echo").body(StreamBody::new(frames).boxed_unsync()).unwrap()
}

fn by_path(path: &str, query: Option<&str>, streaming: &Arc<AtomicUsize>) -> Response<Body> {
    let number = query.and_then(|q| q.parse::<usize>().ok());
    match path {
        "/big" => Response::new(zeros(number.unwrap_or_default(), Streaming::begin(streaming))),
        // Like `/big`, with a Content-Length.
        "/known" => {
            let length = number.unwrap_or_default();
            let response = Response::builder().header("content-length", length);
            response.body(zeros(length, Streaming::begin(streaming))).unwrap()
        }
        "/trailers" => {
            let (mut send, body) = Channel::<Bytes, std::io::Error>::new(4);
            tokio::spawn(async move {
                let _ = send.send_data(Bytes::from_static(b"body")).await;
                let mut trailers = HeaderMap::new();
                trailers.insert("x-sum", "42".parse().unwrap());
                let _ = send.send_trailers(trailers).await;
            });
            Response::builder().header("trailer", "x-sum").body(body.boxed_unsync()).unwrap()
        }
        // No body, but a head, or a head and trailers, with a field of this length.
        "/large-head" => Response::builder().header("x-large", "x".repeat(number.unwrap_or(0))).body(full("")).unwrap(),
        "/large-trailers" => {
            let (mut send, body) = Channel::<Bytes, std::io::Error>::new(4);
            tokio::spawn(async move {
                let value = "x".repeat(number.unwrap_or(0)).parse().unwrap();
                let _ = send.send_trailers([("x-large".parse().unwrap(), value)].into_iter().collect()).await;
            });
            Response::builder().header("trailer", "x-large").body(body.boxed_unsync()).unwrap()
        }
        // Sends a head and one byte, then stalls.
        "/stall-body" => {
            let (mut send, body) = Channel::<Bytes, std::io::Error>::new(4);
            tokio::spawn(async move {
                let _ = send.send_data(Bytes::from_static(b"x")).await;
                std::future::pending::<()>().await;
            });
            Response::new(body.boxed_unsync())
        }
        // Aborts in the middle of the body.
        "/cut" => {
            let (mut send, body) = Channel::<Bytes, std::io::Error>::new(4);
            tokio::spawn(async move {
                let _ = send.send_data(Bytes::from_static(b"half")).await;
                send.abort(std::io::Error::other("cut"));
            });
            Response::new(body.boxed_unsync())
        }
        // Sends fields with which an origin must not be able to impersonate the proxy.
        "/pretend" => Response::builder()
            .header("exeat-refusal", "host_not_allowed")
            .header("exeat-request-id", "forged")
            .header("exeat-credential-used", "KEY")
            .header("proxy-status", "exeat; error=x")
            .header("alt-svc", "h3=\":443\"")
            .header("connection", "x-hop")
            .header("x-hop", "1")
            .header("x-kept", "1")
            .body(full("pretend"))
            .unwrap_or_default(),
        "/redirect" => {
            Response::builder().status(302).header("location", "https://elsewhere.test/").body(full("")).unwrap()
        }
        "/status" => Response::builder().status(number.unwrap_or(200) as u16).body(full("")).unwrap(),
        "/error" => Response::builder().status(500).body(full("boom")).unwrap(),
        _ => Response::new(full("hello\n")),
    }
}

fn full(text: impl Into<Bytes>) -> Body {
    Full::new(text.into()).map_err(|never: Infallible| match never {}).boxed_unsync()
}

fn zeros(mut left: usize, streaming: Streaming) -> Body {
    static CHUNK: [u8; 64 * 1024] = [b'z'; 64 * 1024];
    let frames = std::iter::from_fn(move || {
        let _ = &streaming;
        let n = left.min(CHUNK.len());
        left -= n;
        (n > 0).then(|| Ok(Frame::data(Bytes::from_static(&CHUNK[..n]))))
    });
    StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync()
}

/// Starts an origin of raw bytes. It reads until `until` has arrived (if empty: any byte) and then sends `words`.
/// Returns its port and the bytes that it read.
pub async fn raw(until: &'static str, words: &'static [u8]) -> (u16, Arc<Mutex<Vec<u8>>>) {
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let read = Arc::new(Mutex::new(Vec::new()));
    let kept = read.clone();
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let kept = kept.clone();
            tokio::spawn(async move {
                let mut buffer = [0; 4096];
                let mut own = Vec::new();
                while until.is_empty() && own.is_empty()
                    || !until.is_empty() && !own.windows(until.len()).any(|w| w == until.as_bytes())
                {
                    match stream.read(&mut buffer).await {
                        Ok(0) | Err(_) => return,
                        Ok(n) => {
                            own.extend_from_slice(&buffer[..n]);
                            kept.lock().unwrap().extend_from_slice(&buffer[..n]);
                        }
                    }
                }
                let _ = stream.write_all(words).await;
                let _ = stream.shutdown().await;
            });
        }
    });
    (port, read)
}

/// Like [`raw`], behind TLS and with a name. It reads until the end of a head.
pub async fn raw_tls(builder: &super::LabBuilder, name: &str, words: &'static [u8]) -> (u16, Arc<AtomicUsize>) {
    builder.dns.set(name, &["127.0.0.1"]);
    let mut config = builder.server_config(name).as_ref().clone();
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let asked = Arc::new(AtomicUsize::new(0));
    let count = asked.clone();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut stream) = acceptor.accept(stream).await else { continue };
            let mut seen = Vec::new();
            while !seen.windows(4).any(|w| w == b"\r\n\r\n") {
                match stream.read_u8().await {
                    Ok(byte) => seen.push(byte),
                    Err(_) => break,
                }
            }
            count.fetch_add(1, Ordering::SeqCst);
            let _ = stream.write_all(words).await;
            let _ = stream.shutdown().await;
        }
    });
    (port, asked)
}

//! A token endpoint or secret store that answers as a test says.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use bytes::Bytes;
use http::{HeaderMap, Method, Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::service::service_fn;
use hyper_util::rt::TokioIo;
use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio_rustls::TlsAcceptor;

use crate::lab::LabBuilder;

/// A request for a token.
#[derive(Clone, Debug)]
pub struct Asked {
    pub method: Method,
    pub path: String,
    pub headers: HeaderMap,
    pub body: String,
}

impl Asked {
    /// Returns the only value of a parameter of the form.
    pub fn parameter(&self, name: &str) -> Option<String> {
        let mut found = self.all(name);
        assert!(found.len() < 2, "{name} is repeated");
        found.pop()
    }

    pub fn all(&self, name: &str) -> Vec<String> {
        let decode = |text: &str| percent_encoding::percent_decode_str(text).decode_utf8().unwrap().into_owned();
        let pairs = self.body.split('&').filter_map(|pair| pair.split_once('='));
        pairs.filter(|(key, _)| decode(key) == name).map(|(_, value)| decode(value)).collect()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }
}

type Script = Arc<dyn Fn(&Asked, usize) -> Response<String> + Send + Sync>;

#[derive(Clone)]
pub struct TokenServer {
    pub port: u16,
    asked: Arc<Mutex<Vec<Asked>>>,
    arrived: Arc<AtomicUsize>,
    /// Each answer takes a permit.
    gate: Arc<Semaphore>,
    script: Script,
}

impl TokenServer {
    /// Starts a server for this name. `script` gets each request with its number, from 0.
    pub async fn start(
        builder: &LabBuilder,
        name: &str,
        script: impl Fn(&Asked, usize) -> Response<String> + Send + Sync + 'static,
    ) -> Self {
        builder.dns.set(name, &["127.0.0.1"]);
        let acceptor = TlsAcceptor::from(builder.server_config(name));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            port: listener.local_addr().unwrap().port(),
            asked: Arc::default(),
            arrived: Arc::default(),
            gate: Arc::new(Semaphore::new(Semaphore::MAX_PERMITS)),
            script: Arc::new(script),
        };
        let running = server.clone();
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                let (server, acceptor) = (running.clone(), acceptor.clone());
                tokio::spawn(async move {
                    let Ok(stream) = acceptor.accept(stream).await else { return };
                    let service = service_fn(move |request| {
                        let server = server.clone();
                        async move { server.answer(request).await }
                    });
                    let io = TokioIo::new(stream);
                    let _ = hyper::server::conn::http1::Builder::new().serve_connection(io, service).await;
                });
            }
        });
        server
    }

    /// Answers no request until [`Self::open`] is called.
    pub fn close(&self) {
        self.gate.forget_permits(Semaphore::MAX_PERMITS);
    }

    pub fn open(&self) {
        self.gate.add_permits(1000);
    }

    pub fn asked(&self) -> Vec<Asked> {
        self.asked.lock().unwrap().clone()
    }

    pub fn arrived(&self) -> usize {
        self.arrived.load(Ordering::SeqCst)
    }

    async fn answer(&self, request: Request<Incoming>) -> Result<Response<Full<Bytes>>, hyper::Error> {
        self.arrived.fetch_add(1, Ordering::SeqCst);
        self.gate.acquire().await.unwrap().forget();
        let (parts, body) = request.into_parts();
        let body = String::from_utf8(body.collect().await?.to_bytes().to_vec()).unwrap();
        let asked = Asked { method: parts.method, path: parts.uri.to_string(), headers: parts.headers, body };
        let number = {
            let mut all = self.asked.lock().unwrap();
            all.push(asked.clone());
            all.len() - 1
        };
        Ok((self.script)(&asked, number).map(|text| Full::new(Bytes::from(text))))
    }
}

/// A JSON answer.
pub fn json(status: u16, body: &serde_json::Value) -> Response<String> {
    let response = Response::builder().status(status).header("content-type", "application/json");
    response.body(body.to_string()).unwrap()
}

/// A token that differs in every call.
pub fn token(number: usize) -> String {
    format!("eyJhbGciOiJub25lIn0.k7Qz2mXv9LpW4sVt6eRR{number:04}.u8YbN3cHd5JfQwEr{:04}", 7919 * (number + 1) % 10_000)
}

/// An answer with [`token`] that lives for this many seconds.
pub fn issue(number: usize, life: u64) -> Response<String> {
    let body = serde_json::json!({ "access_token": token(number), "token_type": "Bearer", "expires_in": life });
    json(200, &body)
}

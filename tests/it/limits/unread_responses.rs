//! Responses over HTTP/2 that the client does not take, because it opens no window for them or does not read.

use std::time::{Duration, Instant};

use bytes::Bytes;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper::client::conn::http2::SendRequest;
use hyper_util::rt::{TokioExecutor, TokioIo};
use serde_json::Value;
use tokio::io::AsyncWriteExt;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

use crate::http::origin_floods::flooding;
use crate::lab::client::empty;
use crate::lab::h2::Wire;
use crate::lab::origin::Origin;
use crate::lab::{self, Lab, LabBuilder, TIMEOUT, h2, wait_until};

const BODY: &[u8] = &[b'x'; 100];

struct Setup {
    lab: Lab,
    origin: Origin,
    to: String,
    policy: String,
}

async fn setup(keys: &str) -> Setup {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    origin.serve_file("f", "application/octet-stream", BODY);
    let to = format!("api.test:{}", origin.port());
    let policy = format!("[plans.p.raw]\n{keys}\n{}plan = \"p\"\n", lab::allow_api(origin.port()));
    let lab = builder.proxy(&policy).await;
    Setup { lab, origin, to, policy }
}

/// A client of one destination.
struct Client<'a> {
    lab: &'a Lab,
    to: &'a str,
}

impl Client<'_> {
    /// Opens an h2 connection whose streams have this window.
    async fn open(&self, window: u32) -> SendRequest<Full<Bytes>> {
        let io = self.lab.tls(self.to, &["h2"]).await;
        // A small window takes many small messages.
        io.get_ref().0.set_nodelay(true).unwrap();
        let io = TokioIo::new(io);
        let mut client = hyper::client::conn::http2::Builder::new(TokioExecutor::new());
        let (h2, connection) = client.initial_stream_window_size(window).handshake(io).await.unwrap();
        tokio::spawn(connection);
        h2
    }

    async fn get(&self, h2: &mut SendRequest<Full<Bytes>>) -> Response<Incoming> {
        let request = Request::builder().uri(format!("https://{}/files/f", self.to)).body(empty()).unwrap();
        timeout(TIMEOUT, h2.send_request(request)).await.expect("a response").unwrap()
    }
}

impl Setup {
    fn as_client(&self) -> Client<'_> {
        Client { lab: &self.lab, to: &self.to }
    }

    async fn client(&self, window: u32) -> SendRequest<Full<Bytes>> {
        self.as_client().open(window).await
    }

    async fn get(&self, h2: &mut SendRequest<Full<Bytes>>) -> Response<Incoming> {
        self.as_client().get(h2).await
    }

    /// Sends requests until the proxy has all of their responses, one of which does not count as being in flight.
    async fn unread(&self, h2: &mut SendRequest<Full<Bytes>>, count: usize) -> Vec<Response<Incoming>> {
        let first = self.get(h2).await;
        assert_eq!(first.status(), 200);
        let line = self.lab.ended(0).await;
        assert_eq!((&line["verdict"], &line["event"]), (&"allow".into(), &"closed".into()), "{line}");
        let mut responses = vec![first];
        for n in 1..count {
            let response = self.get(h2).await;
            assert_eq!(response.status(), 200, "request {n}");
            responses.push(response);
        }
        wait_until("the origin has sent all", || self.origin.seen().len() == count).await;
        responses
    }

    /// Reloads a policy that does not allow the host.
    fn revoke(&self) {
        self.lab.reload(&self.policy.replace("allowed_domains = [\"api.test\"]", "allowed_domains = [\"other.test\"]"));
    }

    /// Returns the lines that ended exchanges, after `count` of them.
    async fn ended(&self, count: usize) -> Vec<Value> {
        self.lab.ended(count - 1).await;
        let mut lines = self.lab.audit().await;
        lines.retain(|line| line["event"] != "decided");
        lines
    }
}

#[tokio::test]
async fn unread_responses_are_in_flight() {
    for window in [0, 1] {
        let setup = setup("concurrent = 3").await;
        let mut h2 = setup.client(window).await;
        let responses = setup.unread(&mut h2, 4).await;
        for _ in 0..3 {
            let refused = setup.get(&mut h2).await;
            assert_eq!(refused.headers()["exeat-refusal"], "concurrency_limited", "window {window}");
        }
        // On another connection as well.
        let other = setup.get(&mut setup.client(65_535).await).await;
        assert_eq!(other.headers()["exeat-refusal"], "concurrency_limited", "window {window}");
        assert_eq!(setup.origin.seen().len(), 4);
        if window == 0 {
            continue;
        }
        // A client that reads gets them whole, and the calls end.
        for response in responses {
            assert_eq!(response.collect().await.unwrap().to_bytes(), BODY);
        }
        let lines = setup.ended(8).await;
        let allowed = lines.iter().filter(|line| line["verdict"] == "allow").count();
        assert_eq!(allowed, 4, "{lines:#?}");
        assert_eq!(setup.get(&mut h2).await.collect().await.unwrap().to_bytes(), BODY);
    }
}

#[tokio::test]
async fn the_timeouts_apply_to_unread_responses() {
    for keys in ["request_timeout = \"600ms\"", "idle_timeout = \"600ms\""] {
        for window in [0, 1] {
            let setup = setup(keys).await;
            let mut h2 = setup.client(window).await;
            let responses = setup.unread(&mut h2, 3).await;
            let lines = setup.ended(3).await;
            for line in &lines[1..] {
                assert_eq!(line["code"], "request_timed_out", "{keys}, window {window}: {line}");
            }
            // Their data is not kept either.
            wait_until("the connection ends", || h2.is_closed()).await;
            for response in responses {
                assert!(response.collect().await.is_err(), "{keys}, window {window}");
            }
        }
    }
}

/// The origin has sent so much that the response cannot be complete, or is about to send more.
#[tokio::test]
async fn the_timeouts_apply_to_responses_that_are_not_complete() {
    for keys in ["request_timeout = \"600ms\"", "idle_timeout = \"600ms\""] {
        let setup = setup(keys).await;
        setup.origin.serve_file("f", "application/octet-stream", vec![b'x'; 1_000_000]);
        let mut h2 = setup.client(0).await;
        let responses = [setup.get(&mut h2).await, setup.get(&mut h2).await];
        for line in &setup.ended(2).await {
            assert_eq!(line["code"], "request_timed_out", "{keys}: {line}");
        }
        wait_until("the connection ends", || h2.is_closed()).await;
        for response in responses {
            assert!(response.collect().await.is_err(), "{keys}");
        }
    }
}

/// Only the stream ends if the client would take the data that the origin does not send.
#[tokio::test]
async fn a_timeout_of_a_slow_origin_ends_only_its_stream() {
    let setup = setup("idle_timeout = \"600ms\"").await;
    let mut h2 = setup.client(65_535).await;
    let stalled = Request::builder().uri(format!("https://{}/stall-body", setup.to)).body(empty()).unwrap();
    let stalled = timeout(TIMEOUT, h2.send_request(stalled)).await.expect("a response").unwrap();
    assert!(stalled.collect().await.is_err());
    assert_eq!(setup.ended(1).await[0]["code"], "request_timed_out");
    // Longer than the interval at which connections are checked, but not idle for longer than allowed.
    for _ in 0..8 {
        sleep(Duration::from_millis(300)).await;
        assert_eq!(setup.get(&mut h2).await.collect().await.unwrap().to_bytes(), BODY);
    }
}

/// A client that takes something now and then is not idle.
#[tokio::test]
async fn a_client_that_reads_slowly_is_not_idle() {
    let setup = setup("idle_timeout = \"1s\"").await;
    let mut h2 = setup.client(1).await;
    let responses = setup.unread(&mut h2, 3).await;
    let start = Instant::now();
    let mut bodies: Vec<_> = responses.into_iter().map(|response| (response.into_body(), 0)).collect();
    while start.elapsed() < Duration::from_millis(2500) {
        // The pauses are what is tested.
        sleep(Duration::from_millis(200)).await;
        for (body, length) in &mut bodies {
            let frame = timeout(TIMEOUT, body.frame()).await.expect("data").unwrap().unwrap();
            *length += frame.into_data().unwrap().len();
        }
    }
    for (body, length) in bodies {
        let rest = body.collect().await.unwrap().to_bytes().len();
        assert!(length < BODY.len() && length + rest == BODY.len(), "{length} and {rest}");
    }
    assert!(setup.ended(3).await.iter().all(|line| line["verdict"] == "allow"));
}

#[tokio::test]
async fn a_reload_takes_unread_responses_back() {
    let setup = setup("").await;
    let mut h2 = setup.client(0).await;
    let responses = setup.unread(&mut h2, 3).await;
    setup.revoke();
    let lines = setup.ended(3).await;
    for line in &lines[1..] {
        assert_eq!(line["code"], "host_not_allowed", "{line}");
    }
    wait_until("the connection ends", || h2.is_closed()).await;
    for response in responses {
        assert!(response.collect().await.is_err());
    }
}

#[tokio::test]
async fn a_reload_takes_unread_responses_without_data_back() {
    for request in WITHOUT_DATA {
        let setup = setup("concurrent = 3").await;
        let mut client = Unread::open(&setup).await;
        let passed = client.fill(request, 1).await;
        setup.revoke();
        let lines = setup.ended(usize::try_from(client.sent).unwrap()).await;
        let revoked = lines.iter().filter(|line| line["code"] == "host_not_allowed").count();
        assert_eq!(revoked, 3, "{request:?}, {passed} have passed: {lines:#?}");
        client.assert_closed().await;
    }
}

/// The heads have been read before the client stopped reading.
#[tokio::test]
async fn trailers_are_in_flight_until_they_are_sent() {
    let setup = setup("concurrent = 5").await;
    let mut client = Unread::open(&setup).await;
    let echoed = [1, 3];
    for stream in echoed {
        let fields = [(":method", "POST"), (":scheme", "https"), (":authority", &setup.to), (":path", "/echo")];
        client.wire.headers(stream, false, &[&fields[..], &[("te", "trailers")]].concat());
        client.wire.send(&[]).await;
        assert_eq!(client.wire.answer(stream).await, h2::Answer::Head);
        client.sent += 1;
    }
    client.fill(WITHOUT_DATA[0], 1).await;
    // The origin answers with these trailers.
    let trailers = echoed.map(|stream| {
        h2::frame(h2::HEADERS, h2::END_STREAM | h2::END_HEADERS, stream, &h2::block(&[("x-large", &"x".repeat(9_000))]))
    });
    client.wire.send(&trailers.concat()).await;
    wait_until("the origin has sent the trailers", || setup.origin.echoed_trailers() == 2).await;
    sleep(Duration::from_millis(800)).await;
    setup.revoke();
    let lines = setup.ended(usize::try_from(client.sent).unwrap()).await;
    let revoked = lines.iter().filter(|line| line["code"] == "host_not_allowed").count();
    assert_eq!(revoked, 5, "{lines:#?}");
}

/// The origin has announced the length and sent all of it, and does not end the stream.
#[tokio::test]
async fn data_that_was_announced_and_not_sent_has_not_been_received() {
    let builder = LabBuilder::new().await;
    let response = |stream| {
        let fields = [&[0x88], &h2::block(&[("content-length", "100")])[..]].concat();
        let head = h2::frame(h2::HEADERS, h2::END_HEADERS, stream, &fields);
        [head, h2::frame(h2::DATA, 0, stream, BODY)].concat()
    };
    let never = CancellationToken::new();
    let (port, _written) = flooding(&builder, response, |_| Vec::new(), Duration::ZERO, never).await;
    let (to, policy) = (format!("api.test:{port}"), lab::allow_api(port));
    let lab = builder.proxy(&policy).await;
    let client = Client { lab: &lab, to: &to };
    let mut h2 = client.open(1).await;
    let mut response = client.get(&mut h2).await;
    // The first byte has been sent, so the proxy has the data.
    assert_eq!(response.frame().await.unwrap().unwrap().into_data().unwrap().len(), 1);
    drop((response, h2));
    let line = lab.ended(0).await;
    assert_eq!((&line["verdict"], &line["response_size_bytes"]), (&"abandoned".into(), &100.into()), "{line}");
}

#[tokio::test]
async fn a_client_that_leaves_has_not_received_the_response() {
    let setup = setup("").await;
    let mut h2 = setup.client(1).await;
    let responses = setup.unread(&mut h2, 3).await;
    // A reset stream, and then the end of the connection.
    let mut responses = responses.into_iter().skip(1);
    drop(responses.next());
    assert_eq!(setup.ended(2).await[1]["verdict"], "abandoned");
    drop((responses, h2));
    assert_eq!(setup.ended(3).await[2]["verdict"], "abandoned");
}

/// A client that has not read anything of its connection since it was opened.
struct Unread<'a> {
    setup: &'a Setup,
    wire: Wire,
    sent: u32,
}

impl<'a> Unread<'a> {
    async fn open(setup: &'a Setup) -> Self {
        Self { setup, wire: Wire::open(&setup.lab, &setup.to).await, sent: 0 }
    }

    /// Sends a request, and returns whether it has reached the origin.
    async fn reaches_the_origin(&mut self, (method, path): (&str, &str)) -> bool {
        let (origin, lab) = (&self.setup.origin, &self.setup.lab);
        let (seen, refused) = (origin.seen().len(), lab.refused().await);
        self.wire.headers(
            2 * self.sent + 1,
            true,
            &[(":method", method), (":scheme", "https"), (":authority", &self.setup.to), (":path", path)],
        );
        self.sent += 1;
        self.wire.send(&[]).await;
        let start = Instant::now();
        loop {
            assert!(start.elapsed() < TIMEOUT, "request {} is neither refused nor sent", self.sent);
            if origin.seen().len() > seen {
                // The proxy has the response when the exchange has been decided.
                return true;
            }
            if lab.refused().await > refused {
                return false;
            }
            sleep(Duration::from_millis(5)).await;
        }
    }

    /// Sends requests until `count` have been refused, and returns the number of those that have not.
    async fn fill(&mut self, request: (&str, &str), count: usize) -> usize {
        let (mut passed, mut refused) = (0, 0);
        while refused < count {
            if self.reaches_the_origin(request).await {
                passed += 1;
                let size: usize = request.1.split_once('?').unwrap().1.parse().unwrap();
                assert!(passed * size < 700_000, "{request:?}: the proxy keeps all responses");
            } else {
                refused += 1;
            }
        }
        passed
    }

    /// Reads to the end of the connection, or until as many streams have ended as requests were sent. Returns the number of
    /// heads.
    async fn read(&mut self) -> usize {
        let (mut heads, mut ended) = (0, 0);
        while ended < self.sent
            && let Some(frame) = h2::read_frame(&mut self.wire.io).await
        {
            heads += usize::from(frame.kind == h2::HEADERS);
            ended += u32::from(frame.flags & h2::END_STREAM != 0 && frame.kind <= h2::HEADERS);
        }
        heads
    }

    /// Waits until the proxy has closed the connection, without reading.
    async fn assert_closed(&mut self) {
        let (start, ping) = (Instant::now(), h2::frame(h2::PING, 0, 0, &[0; 8]));
        while self.wire.io.write_all(&ping).await.is_ok() && self.wire.io.flush().await.is_ok() {
            assert!(start.elapsed() < TIMEOUT, "the connection is open");
            sleep(Duration::from_millis(100)).await;
        }
    }
}

/// Requests whose responses have no data, and many bytes of fields, in one frame or in several.
const WITHOUT_DATA: [(&str, &str); 5] = [
    ("HEAD", "/large-head?14000"),
    ("HEAD", "/large-head?40000"),
    ("GET", "/large-head?40000"),
    ("GET", "/large-trailers?14000"),
    ("GET", "/large-trailers?40000"),
];

#[tokio::test]
async fn responses_without_data_are_in_flight_until_they_are_sent() {
    for request in WITHOUT_DATA {
        let setup = setup("concurrent = 3").await;
        let mut client = Unread::open(&setup).await;
        let passed = client.fill(request, 3).await;
        // A client that reads gets them, and the calls end.
        let all = usize::try_from(client.sent).unwrap();
        assert!(client.read().await >= all, "{request:?}");
        let lines = setup.ended(all).await;
        let allowed = lines.iter().filter(|line| line["verdict"] == "allow").count();
        assert_eq!(allowed, passed, "{request:?}: {lines:#?}");
        assert!(client.reaches_the_origin(request).await, "{request:?}");
    }
}

/// Those that wait for the connection. Those that the HTTP library has encoded cannot be told from those that were sent.
#[tokio::test]
async fn a_client_that_leaves_has_not_received_the_responses_that_wait() {
    let setup = setup("concurrent = 4").await;
    let mut client = Unread::open(&setup).await;
    let passed = client.fill(WITHOUT_DATA[0], 1).await;
    let all = usize::try_from(client.sent).unwrap();
    drop(client);
    let lines = setup.ended(all).await;
    let of = |verdict: &str| lines.iter().filter(|line| line["verdict"] == verdict).count();
    assert_eq!((of("allow") + of("abandoned"), of("abandoned") >= 3), (passed, true), "{lines:#?}");
}

/// A large download does not hold back the other responses of its connection, although each of its pieces blocks it.
#[tokio::test]
async fn a_slow_download_lets_other_responses_through() {
    let setup = setup("").await;
    let mut wire = Wire::open(&setup.lab, &setup.to).await;
    // Windows that never end (RFC 9113 §6.5.2, §6.9).
    let window = (1_u32 << 31) - 1;
    wire.out.extend(h2::frame(h2::SETTINGS, 0, 0, &[&[0, 4][..], &window.to_be_bytes()].concat()));
    wire.out.extend(h2::frame(h2::WINDOW_UPDATE, 0, 0, &(window - 65_535).to_be_bytes()));
    let get = |wire: &mut Wire, stream, path| {
        wire.headers(
            stream,
            true,
            &[(":method", "GET"), (":scheme", "https"), (":authority", &setup.to), (":path", path)],
        );
    };
    get(&mut wire, 1, "/big?1000000000");
    wire.send(&[]).await;
    // The client reads slower than the origin sends.
    let read = async |wire: &mut Wire| {
        sleep(Duration::from_millis(1)).await;
        h2::read_frame(&mut wire.io).await.expect("a frame")
    };
    for _ in 0..200 {
        read(&mut wire).await;
    }
    for stream in (3..43).step_by(2) {
        get(&mut wire, stream, "/files/f");
        wire.send(&[]).await;
        let mut frames = 0;
        while read(&mut wire).await.stream != stream {
            frames += 1;
            assert!(frames < 1_000, "the response on stream {stream} waits for the download");
        }
    }
}

#[tokio::test]
async fn the_timeouts_apply_to_responses_without_data() {
    for request in WITHOUT_DATA {
        for keys in ["request_timeout = \"600ms\"", "idle_timeout = \"600ms\""] {
            let setup = setup(&format!("concurrent = 3\n{keys}")).await;
            let mut client = Unread::open(&setup).await;
            let mut passed = 0;
            while setup.lab.refused().await < 1 {
                passed += usize::from(client.reaches_the_origin(request).await);
                assert!(passed < 60, "{request:?}, {keys}: the proxy keeps all responses");
            }
            let timed_out = || async {
                let lines = setup.lab.audit().await;
                lines.iter().filter(|line| line["code"] == "request_timed_out").count()
            };
            let start = Instant::now();
            while timed_out().await < 3 {
                assert!(start.elapsed() < TIMEOUT, "{request:?}, {keys}: {} of {passed}", timed_out().await);
                sleep(Duration::from_millis(20)).await;
            }
            client.assert_closed().await;
        }
    }
}

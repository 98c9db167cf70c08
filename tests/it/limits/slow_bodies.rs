//! Bodies that are slow to scan, and the pauses of other tasks on the same thread.

use std::convert::Infallible;
use std::future::poll_fn;
use std::io::Write;
use std::sync::Arc;
use std::task::Poll;
use std::time::{Duration, Instant};

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http_body_util::{BodyExt, Full, StreamBody};
use hyper::body::{Body, Frame};
use parking_lot::Mutex;

use crate::lab::client::Way;
use crate::lab::{self, LabBuilder, origin};

/// The size of the pieces in which bodies are scanned, in bytes, and their number in each body.
const PIECE: usize = 64 * 1024;
const PIECES: usize = 64;

/// Returns a text with several escapes, which the scanner reads slowest.
fn escapes() -> String {
    r#"{"a":[1,2,3,"\u0041%41&#65;QUJD"]},"#.repeat(PIECES * PIECE / 35)
}

/// Runs again after all tasks that are ready. `yield_now` of tokio would also wait until it has looked at the sockets.
async fn yield_to_others() {
    let mut has_yielded = false;
    poll_fn(|cx| {
        cx.waker().wake_by_ref();
        if std::mem::replace(&mut has_yielded, true) { Poll::Ready(()) } else { Poll::Pending }
    })
    .await;
}

/// Runs `work`. Returns the time it took, and the longest pause of another task meanwhile.
async fn longest_pause_during(work: impl Future<Output = ()>) -> (Duration, Duration) {
    let longest = Arc::new(Mutex::new(Duration::ZERO));
    let other = tokio::spawn({
        let longest = longest.clone();
        async move {
            loop {
                let last = Instant::now();
                yield_to_others().await;
                let mut longest = longest.lock();
                *longest = last.elapsed().max(*longest);
            }
        }
    });
    let start = Instant::now();
    work.await;
    other.abort();
    let pause = *longest.lock();
    (start.elapsed(), pause)
}

fn gzip(text: &str) -> Vec<u8> {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
    encoder.write_all(text.as_bytes()).unwrap();
    encoder.finish().unwrap()
}

/// One read of an encoded body can contain all pieces, and the server of HTTP polls a body until its buffer is full. Other
/// tasks run between the pieces all the same: a pause is far shorter than the whole scan, also on a busy machine.
#[tokio::test]
async fn other_tasks_run_between_the_pieces_of_a_body() {
    let coded = gzip(&escapes());
    let head = format!("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n\r\n", coded.len());
    let response = [head.as_bytes(), &coded].concat();
    let builder = LabBuilder::new().await;
    let (port, _) = origin::raw_tls(&builder, "raw.test", response.leak()).await;
    let origin = builder.origin_h1("api.test").await;
    let rule = lab::allow_api(origin.port()).replace("\"api.test\"]", "\"api.test\", \"raw.test\"]");
    std::fs::write(builder.dir.path().join("key"), "qv7Rz2mXw9LkT4pB8nHs").unwrap();
    let key = "credentials = [\"key\"]\n[credentials.key]\nauth_type = \"bearer\"\nvalue = \"file:key\"\ndomains = [\"api.test\"]\n";
    let lab = builder.proxy(&format!("{}{key}", rule.replace("ports = [", &format!("ports = [{port}, ")))).await;
    for way in Way::ALL {
        let (took, pause) = longest_pause_during(async {
            let reply = lab.by(way, "GET", &format!("https://raw.test:{port}/"), &[], "").await;
            assert_eq!((reply.status.as_u16(), reply.text().len()), (200, escapes().len()));
        })
        .await;
        assert!(pause < took / 4, "{way:?}: a pause of {pause:?} in {took:?}");
    }
    // A body of a known and small length is buffered first. Any other is scanned while it is sent.
    let frame = Frame::data(Bytes::from(coded.clone()));
    let streamed = StreamBody::new(futures_util::stream::iter([Ok::<_, Infallible>(frame)]));
    for body in [Full::new(Bytes::from(coded)).boxed_unsync(), streamed.boxed_unsync()] {
        let is_buffered = body.size_hint().exact().is_some();
        let request = lab.absolute("POST", &format!("https://api.test:{}/", origin.port()));
        let request = request.header("content-encoding", "gzip").body(body).unwrap();
        let (took, pause) = longest_pause_during(async { assert_eq!(lab.send(request).await.status, 200) }).await;
        assert!(pause < took / 4, "request, buffered: {is_buffered}: a pause of {pause:?} in {took:?}");
    }
}

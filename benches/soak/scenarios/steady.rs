//! Requests that must be answered, byte for byte, on connections that are kept.

use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::stream;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{sleep, timeout};

use crate::book::{Outcome, Scenario, Serial};
use crate::dice::Dice;
use crate::gateway::Execution;
use crate::origin::gzip;
use crate::secrets::CREDENTIALS;
use crate::world::{Body, Call, Session, Way, World, full};

/// The mean time between two requests on a connection.
const PAUSE: Duration = Duration::from_secs(2);
/// The longest time of a response that is read slowly.
const SLOW_PATIENCE: Duration = Duration::from_secs(180);
/// The hosts of the steady load.
const HOSTS: usize = 24;

/// Sends requests on one connection, one after the other.
pub(super) async fn requests(
    world: &World,
    execution: &Arc<Execution>,
    scenario: Scenario,
    way: Way,
    dice: &mut Dice,
) -> Result<(), String> {
    // The log has an opaque tunnel as one exchange; its name has the number.
    let tunnel = (way == Way::Opaque).then(|| world.book.begin(scenario));
    let host = match tunnel {
        Some(serial) => format!("s{serial}.opaque.test"),
        None => format!("h{}.work.test", dice.below(HOSTS)),
    };
    let opened = world.session(execution, way, (&host, world.ports.plain)).await;
    let mut session = match (opened, tunnel) {
        (Ok(session), _) => session,
        (Err(why), Some(serial)) => {
            world.book.fail(serial, &why);
            return Ok(());
        }
        (Err(why), None) => return Err(why),
    };
    if let Some(serial) = tunnel {
        world.book.end(serial, Outcome::Answered);
    }
    for _ in 0..30 + dice.below(200) {
        let serial = world.book.begin(scenario);
        let (call, expected) = call(world, way, serial, dice);
        let start = Instant::now();
        let is_get = call.method == "GET";
        let result = match session.send(call).await {
            Ok(reply) => reply.expect_body(&expected),
            Err(why) => Err(why),
        };
        if is_get {
            world.book.latency(scenario, start);
        }
        let outcome = if matches!(way, Way::Opaque | Way::Direct) { Outcome::Unlogged } else { Outcome::Answered };
        if !world.book.settle(serial, result.map(|_| outcome)) || !world.pause(dice.about(PAUSE)).await {
            break;
        }
    }
    Ok(())
}

/// Sends up to four requests at once on one h2 connection.
pub(super) async fn parallel(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let host = format!("h{}.work.test", dice.below(HOSTS));
    let mut session = world.session(execution, Way::Http2, (&host, world.ports.plain)).await?;
    for _ in 0..30 + dice.below(200) {
        let mut exchanges = Vec::new();
        for _ in 0..1 + dice.below(4) {
            let serial = world.book.begin(Scenario::Http2);
            let (call, expected) = call(world, Way::Http2, serial, dice);
            let is_get = call.method == "GET";
            let answered = session.send_in_parallel(call);
            exchanges.push(async move {
                let start = Instant::now();
                let result = answered.await.and_then(|reply| reply.expect_body(&expected));
                if is_get {
                    world.book.latency(Scenario::Http2, start);
                }
                world.book.settle(serial, result)
            });
        }
        let all = join_all(exchanges).await;
        if all.contains(&false) || !world.pause(dice.about(PAUSE * 2)).await {
            break;
        }
    }
    Ok(())
}

/// Opens a connection with all its handshakes for one request. Some hosts are new to the proxy.
pub(super) async fn new_connection(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let serial = world.book.begin(Scenario::NewConnection);
    let host =
        if dice.below(5) == 0 { format!("n{serial}.work.test") } else { format!("h{}.work.test", dice.below(HOSTS)) };
    let way = dice.among(&[Way::Http1, Way::Http2]);
    let (call, expected) = call(world, way, serial, dice);
    let start = Instant::now();
    let result = async {
        let mut session = world.session(execution, way, (&host, world.ports.plain)).await?;
        let reply = session.send(call).await?;
        Ok::<_, String>((session, reply.expect_body(&expected)?))
    };
    let session = match result.await {
        Ok((session, outcome)) => {
            world.book.latency(Scenario::NewConnection, start);
            world.book.end(serial, outcome);
            Some(session)
        }
        Err(why) => {
            world.book.fail(serial, &why);
            None
        }
    };
    // The connection stays open for a while, as one of many.
    world.pause(dice.about(PAUSE * 2)).await;
    drop(session);
    Ok(())
}

/// Returns a random request, and the body of its response.
fn call(world: &World, way: Way, serial: Serial, dice: &mut Dice) -> (Call, Bytes) {
    let size = dice.among(&[200, 1_000, 1_000, 4_000, 16_000, 70_000]);
    let expected = world.text.part(serial, size);
    let get = Call::get(format!("/text/{serial}/{size}?q=some+words&n={serial}"));
    let post = format!("/post/{serial}/{size}");
    let call = match dice.below(20) {
        // The proxy delivers the body decoded, and the client does not decode.
        0..4 if !matches!(way, Way::Opaque | Way::Direct) => get.field("accept-encoding", "gzip"),
        0..12 => get,
        12..14 if way == Way::Absolute => get.field("exeat-tool", "http_get").field("te", "trailers"),
        12..16 => Call::post(post, full(expected.clone())),
        16 | 17 => Call::post(post, full(gzip(&expected))).field("content-encoding", "gzip"),
        _ => Call::post(post, in_pieces(expected.clone(), 1 + size / 5, Duration::ZERO)),
    };
    (call, expected)
}

/// A body of unknown length.
pub(super) fn in_pieces(text: Bytes, size: usize, pause: Duration) -> Body {
    let pieces = stream::unfold(text, move |mut left| async move {
        if left.is_empty() {
            return None;
        }
        if !pause.is_zero() {
            sleep(pause).await;
        }
        let piece = left.split_to(size.min(left.len()));
        Some((Ok::<_, Infallible>(Frame::data(piece)), left))
    });
    StreamBody::new(pieces).boxed_unsync()
}

/// Has credentials injected, and receives their echo in pieces that cut the value. The execution is the client's own: a
/// part of a value in an open response counts towards the finds until the rest follows, so several clients that share an
/// execution would stop it.
pub(super) async fn credentials(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let n = dice.below(CREDENTIALS);
    let host = format!("c{n}.cred.test");
    let way = dice.among(&[Way::Http1, Way::Http2, Way::Absolute]);
    let mut session = world.session(execution, way, (&host, world.ports.credential)).await?;
    for _ in 0..10 + dice.below(50) {
        let serial = world.book.begin(Scenario::Credential);
        let start = Instant::now();
        let result = echo(world, &mut session, n, serial, dice).await;
        world.book.latency(Scenario::Credential, start);
        execution.injected.fetch_add(1, Ordering::Relaxed);
        if !world.book.settle(serial, result) || !world.pause(dice.about(PAUSE)).await {
            break;
        }
    }
    Ok(())
}

async fn echo(
    world: &World,
    session: &mut Session,
    n: usize,
    serial: Serial,
    dice: &mut Dice,
) -> Result<Outcome, String> {
    let size = dice.among(&[100, 3_000, 30_000]);
    let call = Call::get(format!("/echo/{serial}/{size}"));
    let call = match dice.below(2) {
        0 => call.field("exeat-credential", format!("C{n}")),
        _ => call.field("authorization", format!("Bearer ${{secrets.C{n}}}")),
    };
    let reply = session.send(call).await?;
    let masked = format!("Bearer {}", "*".repeat(world.secrets.value(n).len()));
    let padding = world.text.part(size, size);
    let expected = [format!("{{\"received\":\"{masked}\",\"padding\":").as_bytes(), &padding[..]].concat();
    let outcome = reply.expect_body(&expected)?;
    let echoed = reply.headers.get("x-received").and_then(|value| value.to_str().ok()).unwrap_or_default();
    let used = reply.headers.get("exeat-credential-used").and_then(|value| value.to_str().ok()).unwrap_or_default();
    if echoed != masked || used != format!("C{n}") {
        return Err(format!("the echo in a field is {echoed:?}, used {used:?}: {}", reply.describe()));
    }
    if let Some(name) = world.secrets.find(&reply.body) {
        return Err(format!("a value ({name}) in a body"));
    }
    Ok(outcome)
}

/// Reads slowly with a small buffer, or sends slowly.
pub(super) async fn slow(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let serial = world.book.begin(Scenario::Slow);
    let result = if dice.below(2) == 0 {
        read_slowly(world, execution, serial, dice).await
    } else {
        send_slowly(world, execution, serial, dice).await
    };
    world.book.settle(serial, result);
    Ok(())
}

async fn send_slowly(
    world: &World,
    execution: &Arc<Execution>,
    serial: Serial,
    dice: &mut Dice,
) -> Result<Outcome, String> {
    let way = dice.among(&[Way::Http1, Way::Http2, Way::Absolute]);
    let mut session = world.session(execution, way, ("slow.work.test", world.ports.plain)).await?;
    let expected = world.text.part(serial, 12_000);
    // Shorter and longer than the pause after which the proxy sends what it holds.
    let pause = Duration::from_millis(dice.among(&[20, 120]));
    let body = in_pieces(expected.clone(), 200, pause);
    session.send(Call::post(format!("/post/{serial}/12000"), body)).await?.expect_body(&expected)
}

async fn read_slowly(
    world: &World,
    execution: &Arc<Execution>,
    serial: Serial,
    dice: &mut Dice,
) -> Result<Outcome, String> {
    const SIZE: usize = 1 << 20;
    let expected = world.text.part(serial, SIZE);
    let mut stream = world.tls(execution, Way::Http1, ("slow.work.test", world.ports.plain)).await?;
    let tcp = stream.get_ref().get_ref().0.get_ref();
    let _ = socket2::SockRef::from(tcp).set_recv_buffer_size(16 << 10);
    let head = format!("GET /text/{serial}/{SIZE} HTTP/1.1\r\nHost: slow.work.test:{}\r\n\r\n", world.ports.plain);
    let pause = dice.about(Duration::from_millis(40));
    let mut read = Vec::new();
    let exchange = timeout(SLOW_PATIENCE, async {
        stream.write_all(head.as_bytes()).await.map_err(|error| error.to_string())?;
        let mut piece = vec![0; 16 << 10];
        loop {
            let end = read.windows(4).take(4_096).position(|four| four == b"\r\n\r\n").map(|at| at + 4);
            if end.is_some_and(|end| read.len() >= end + SIZE) {
                return Ok(end.unwrap_or_default());
            }
            let count = stream.read(&mut piece).await.map_err(|error| error.to_string())?;
            if count == 0 {
                return Err(format!("the end after {} bytes", read.len()));
            }
            read.extend_from_slice(&piece[..count]);
            sleep(pause).await;
        }
    });
    let end = exchange.await.unwrap_or_else(|_| Err(format!("no end within {SLOW_PATIENCE:?}")))?;
    if !read.starts_with(b"HTTP/1.1 200") || read[end..] != expected[..] {
        return Err(format!("not the body: {:?}", String::from_utf8_lossy(&read[..end])));
    }
    Ok(Outcome::Answered)
}

//! Requests that must be refused with exactly the expected code, leak attempts, and a limit of calls.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{SinkExt, StreamExt};
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use super::steady::in_pieces;
use super::streams;
use crate::book::{Outcome, Scenario, Serial};
use crate::client::{Connection, Head};
use crate::dice::Dice;
use crate::gateway::{Execution, LIMIT, MAX_FINDS};
use crate::origin::gzip;
use crate::secrets::{CREDENTIALS, hex, percent};
use crate::world::{Call, PATIENCE, Session, Tcp, Way, World, full};

/// The mean time between two requests that are refused, and between two executions that end.
const PAUSE: Duration = Duration::from_secs(2);
/// The requests at once beyond the limit of an execution.
const EXCESS: u64 = 3;
/// The code of requests that a wrong head ends before they have a path in the log.
pub(crate) const MALFORMED: &str = "request_malformed";

/// Sends requests that are refused for different reasons.
pub(super) async fn refused(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let serial = world.book.begin(Scenario::Refused);
    let result = match dice.below(11) {
        0 => connect(world, execution, (&format!("s{serial}.refused.test"), 443), "host_not_allowed").await,
        1 => connect(world, execution, (&format!("s{serial}.work.test"), 1), "port_not_allowed").await,
        2 => {
            let to = (&*format!("s{serial}.refused.test"), world.ports.plain);
            inner(world, execution, Way::Absolute, to, Call::get(format!("/text/{serial}/9")), "host_not_allowed").await
        }
        3 => {
            let call = Call { method: "DELETE", ..Call::get(format!("/text/{serial}/9")) };
            let way = dice.among(&[Way::Absolute, Way::Http1, Way::Http2]);
            inner(world, execution, way, ("h0.work.test", world.ports.plain), call, "method_not_allowed").await
        }
        4 => {
            let to = ("private.work.test", world.ports.plain);
            let call = Call::get(format!("/text/{serial}/9"));
            inner(world, execution, Way::Absolute, to, call, "address_not_allowed").await
        }
        5 => {
            let call = Call::get(format!("/text/{serial}/9")).field("host", "other.work.test");
            inner(world, execution, Way::Http1, ("h0.work.test", world.ports.plain), call, "authority_mismatch").await
        }
        6 => {
            let call = Call::get(format!("/text/{serial}/9")).field("exeat-credential", "C1");
            let way = dice.among(&[Way::Absolute, Way::Http1, Way::Http2]);
            inner(world, execution, way, ("h0.work.test", world.ports.plain), call, "credential_not_bound").await
        }
        7 => unknown_caller(world, execution, serial).await,
        8 => plain_http(world, execution, serial).await,
        9 => other_name(world, execution, serial).await,
        _ => malformed(world, execution, serial).await,
    };
    world.book.settle(serial, result);
    if dice.below(4) == 0 {
        pipelined(world, execution).await?;
    }
    world.pause(dice.about(PAUSE)).await;
    Ok(())
}

async fn connect(
    world: &World,
    execution: &Execution,
    (host, port): (&str, u16),
    code: &'static str,
) -> Result<Outcome, String> {
    match world.tunnel(execution, host, port).await? {
        Ok(_) => Err(format!("the tunnel to {host} was opened instead of {code}")),
        Err(head) => expect_head(&head, 403, code),
    }
}

fn expect_head(head: &Head, status: u16, code: &'static str) -> Result<Outcome, String> {
    let found = head.field("exeat-refusal");
    if (head.status, found) == (status, Some(code)) {
        return Ok(Outcome::Refused(code));
    }
    Err(format!("{} {found:?} instead of {status} {code}", head.status))
}

async fn inner(
    world: &World,
    execution: &Arc<Execution>,
    way: Way,
    to: (&str, u16),
    call: Call,
    code: &'static str,
) -> Result<Outcome, String> {
    let mut session = world.session(execution, way, to).await?;
    session.send(call).await?.expect_refusal(403, code)?;
    Ok(Outcome::Refused(code))
}

async fn unknown_caller(world: &World, execution: &Arc<Execution>, serial: Serial) -> Result<Outcome, String> {
    let authorization = format!("Basic {}", STANDARD.encode(format!("{}:another-token-of-24-bytes", execution.id)));
    let stranger = Arc::new(Execution { authorization, ..execution.uncounted() });
    let mut session = world.session(&stranger, Way::Absolute, ("h0.work.test", world.ports.plain)).await?;
    session.send(Call::get(format!("/text/{serial}/9"))).await?.expect_refusal(407, "caller_unknown")?;
    Ok(Outcome::Refused("caller_unknown"))
}

/// Sends the text of a request on a new connection, and returns the head of the response.
async fn raw(world: &World, text: &str) -> Result<(Connection<Tcp>, Head), String> {
    let mut connection = Connection::new(world.connect().await?);
    let exchange = async {
        connection.write(text.as_bytes()).await?;
        connection.head().await
    };
    let head = timeout(PATIENCE, exchange).await.map_err(|_| format!("no response within {PATIENCE:?}"))??;
    Ok((connection, head))
}

fn absolute(world: &World, execution: &Execution, line: &str, more: &str) -> String {
    let authorization = &execution.authorization;
    let port = world.ports.plain;
    format!("{line} HTTP/1.1\r\nHost: h0.work.test:{port}\r\nProxy-Authorization: {authorization}\r\n{more}\r\n")
}

async fn plain_http(world: &World, execution: &Execution, serial: Serial) -> Result<Outcome, String> {
    let line = format!("GET http://h0.work.test:{}/text/{serial}/9", world.ports.plain);
    execution.calls.fetch_add(1, Ordering::Relaxed);
    let (_, head) = raw(world, &absolute(world, execution, &line, "")).await?;
    expect_head(&head, 403, "scheme_not_allowed")
}

/// Sends another server name than the CONNECT did. The refusal is a TLS alert.
async fn other_name(world: &World, execution: &Execution, serial: Serial) -> Result<Outcome, String> {
    let host = format!("s{serial}.work.test");
    let tunnel = world.tunnel(execution, &host, world.ports.plain).await?;
    let tunnel = tunnel.map_err(|head| format!("CONNECT: {}", head.status))?;
    match world.handshake(tunnel, Way::Http1, "other.work.test").await {
        Err(why) if why.contains("UnrecognisedName") || why.contains("UnrecognizedName") => {
            Ok(Outcome::Refused("sni_mismatch"))
        }
        Err(why) => Err(format!("no alert unrecognized_name, but {why}")),
        Ok(_) => Err("another server name was accepted".to_owned()),
    }
}

/// Sends a length beside a transfer coding. The line in the log has no path; such lines are counted.
async fn malformed(world: &World, execution: &Execution, serial: Serial) -> Result<Outcome, String> {
    let line = format!("POST https://h0.work.test:{}/post/{serial}/9", world.ports.plain);
    let more = "Content-Length: 1\r\nTransfer-Encoding: chunked\r\n";
    let (_, head) = raw(world, &absolute(world, execution, &line, more)).await?;
    expect_head(&head, 400, MALFORMED)?;
    world.malformed.fetch_add(1, Ordering::Relaxed);
    Ok(Outcome::Unlogged)
}

/// Sends two requests at once on one connection. Both must be answered, in order.
async fn pipelined(world: &World, execution: &Execution) -> Result<(), String> {
    const SIZE: usize = 500;
    let serials = [world.book.begin(Scenario::Refused), world.book.begin(Scenario::Refused)];
    let line = |serial| format!("GET https://h0.work.test:{}/text/{serial}/{SIZE}", world.ports.plain);
    let both = serials.map(|serial| absolute(world, execution, &line(serial), "")).concat();
    execution.calls.fetch_add(2, Ordering::Relaxed);
    let mut connection = Connection::new(world.connect().await?);
    let exchange = async {
        connection.exchange(both.as_bytes(), &world.text.part(serials[0], SIZE), SIZE).await?;
        connection.exchange(b"", &world.text.part(serials[1], SIZE), SIZE).await
    };
    let result = timeout(PATIENCE, exchange).await.unwrap_or_else(|_| Err(format!("no end within {PATIENCE:?}")));
    for serial in serials {
        world.book.settle(serial, result.clone().map(|()| Outcome::Answered));
    }
    Ok(())
}

/// Lets an execution of its own send values until it is stopped.
pub(super) async fn leaks(world: &World, dice: &mut Dice) -> Result<(), String> {
    let execution = world.gateway.start_execution("leaker").await?;
    for _ in 0..MAX_FINDS {
        let serial = world.book.begin(Scenario::Leak);
        let result = leak(world, &execution, serial, dice).await;
        if !world.book.settle(serial, result) {
            return Ok(());
        }
        world.pause(dice.about(PAUSE / 4)).await;
    }
    let stopped = Arc::new(execution.uncounted());
    let serial = world.book.begin(Scenario::Leak);
    let result = inner(
        world,
        &stopped,
        Way::Absolute,
        ("h0.work.test", world.ports.plain),
        Call::get(format!("/text/{serial}/9")),
        "execution_stopped",
    );
    world.book.settle(serial, result.await);
    let serial = world.book.begin(Scenario::Leak);
    let host = format!("s{serial}.work.test");
    let result = connect(world, &stopped, (&host, world.ports.plain), "execution_stopped").await;
    // The line of this refusal has no host, because the execution is checked before the target. Such lines are counted.
    let result = result.map(|_| Outcome::Unlogged);
    if world.book.settle(serial, result) {
        world.stopped_connects.fetch_add(1, Ordering::Relaxed);
    }
    world.gateway.check_execution(&execution, MAX_FINDS, &world.book).await?;
    world.pause(dice.about(PAUSE * 4)).await;
    Ok(())
}

/// Sends a value in one of many ways. It must be refused.
async fn leak(world: &World, execution: &Arc<Execution>, serial: Serial, dice: &mut Dice) -> Result<Outcome, String> {
    let value = world.secrets.value(dice.below(CREDENTIALS)).to_owned();
    let way = dice.among(&[Way::Absolute, Way::Http1, Way::Http2]);
    let path = format!("/leak/{serial}/9");
    let json = |text: &str| format!("{{\"note\":\"{}\",\"more\":[1,2,3]}}", text);
    let call = match dice.below(9) {
        0 => Call::get(path).field("x-note", value),
        1 => Call::get(format!("{path}?note={}", percent(&value))),
        2 => Call::get(format!("{path}/{value}")),
        3 => Call::post(path, full(json(&STANDARD.encode(format!("a{value}"))))),
        4 => Call::post(path, full(json(&hex(&value)))),
        5 => Call::post(path, full(gzip(json(&value).as_bytes()))).field("content-encoding", "gzip"),
        6 => Call::post(path, full(json(&value[..value.len() / 2]))),
        7 => return leak_in_stream(world, execution, serial, way, &value).await,
        _ => return leak_in_message(world, execution, serial, &value).await,
    };
    inner(world, execution, way, ("h0.work.test", world.ports.plain), call, "leak_detected").await
}

/// Sends a value late in a body of unknown length. What was before it has been sent by then.
async fn leak_in_stream(
    world: &World,
    execution: &Arc<Execution>,
    serial: Serial,
    way: Way,
    value: &str,
) -> Result<Outcome, String> {
    let text = world.text.part(serial, 200_000);
    let body = Bytes::from([&text[..150_000], value.as_bytes(), &text[150_000..]].concat());
    let call = Call::post(format!("/leakstream/{serial}/9"), in_pieces(body, 9_999, Duration::ZERO));
    inner(world, execution, way, ("h0.work.test", world.ports.plain), call, "leak_detected").await?;
    Ok(Outcome::Failed("leak_detected"))
}

async fn leak_in_message(world: &World, execution: &Execution, serial: Serial, value: &str) -> Result<Outcome, String> {
    let to = ("ws.work.test", world.ports.plain);
    let mut socket = streams::open(world, execution, to, &format!("/ws/{serial}"), None).await?;
    socket.send(Message::text(format!("the key is {value}"))).await.map_err(|error| error.to_string())?;
    match timeout(PATIENCE, socket.next()).await {
        Ok(Some(Ok(Message::Close(Some(frame))))) if u16::from(frame.code) == 1008 => {
            Ok(Outcome::Failed("leak_detected"))
        }
        other => Err(format!("a message with a value was not closed with 1008: {other:?}")),
    }
}

/// Sends more requests at once than an execution may make. Exactly as many as it may make are answered.
pub(super) async fn limits(world: &World, dice: &mut Dice) -> Result<(), String> {
    let execution = world.gateway.start_execution("limited").await?;
    execution.calls.store(LIMIT, Ordering::Relaxed);
    let mut sessions: Vec<Session> = Vec::new();
    for _ in 0..LIMIT + EXCESS {
        let uncounted = Arc::new(execution.uncounted());
        sessions.push(world.session(&uncounted, Way::Absolute, ("h0.work.test", world.ports.plain)).await?);
    }
    let requests = sessions.iter_mut().map(async |session| {
        let serial = world.book.begin(Scenario::Limits);
        let reply = session.send(Call::get(format!("/text/{serial}/900"))).await;
        let result = reply.and_then(|reply| match reply.status {
            429 => reply.expect_refusal(429, "execution_limit").map(|()| Outcome::Refused("execution_limit")),
            _ => reply.expect_body(&world.text.part(serial, 900)),
        });
        let is_answered = result == Ok(Outcome::Answered);
        world.book.settle(serial, result);
        is_answered
    });
    let answered = join_all(requests).await.into_iter().filter(|is_answered| *is_answered).count();
    if answered as u64 != LIMIT {
        world.book.violation(&format!("{answered} calls of an execution were answered, and its limit is {LIMIT}"));
    }
    world.gateway.check_execution(&execution, 0, &world.book).await?;
    world.pause(dice.about(PAUSE * 4)).await;
    Ok(())
}

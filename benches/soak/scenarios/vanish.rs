//! Clients that close, reset or half-close their connections at any moment.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use futures_util::SinkExt;
use http_body_util::BodyExt;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;

use super::steady::in_pieces;
use super::streams;
use crate::book::{Outcome, Scenario, Serial};
use crate::client::Connection;
use crate::dice::Dice;
use crate::gateway::Execution;
use crate::world::{Call, PATIENCE, Way, World};

const PAUSE: Duration = Duration::from_millis(500);
const HOST: &str = "v.work.test";

pub(super) async fn round(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let serial = world.book.begin(Scenario::Vanish);
    let moment = dice.about(Duration::from_millis(10));
    let result = match dice.below(9) {
        0 => raw(world, execution, &format!("GET {}", url(world, "text", serial, 1_000)), "", moment, dice).await,
        1 => raw(world, execution, &format!("GET {}", url(world, "text", serial, 1 << 20)), "", moment, dice).await,
        2 => {
            let body = "Content-Length: 100000\r\n\r\nonly the beginning of a body";
            raw(world, execution, &format!("POST {}", url(world, "post", serial, 100_000)), body, moment, dice).await
        }
        3 => {
            world.vanished_connects.fetch_add(1, Ordering::Relaxed);
            let line = format!("CONNECT s{serial}.work.test:{}", world.ports.plain);
            raw(world, execution, &line, "", moment, dice).await
        }
        4 => {
            // All handshakes, and no request.
            let host = format!("s{serial}.work.test");
            let tls = world.tls(execution, Way::Http1, (&host, world.ports.plain)).await;
            tls.map(|_| Outcome::Unknown)
        }
        5 => half_close(world, execution, serial).await,
        6 => reset_stream(world, execution, serial, moment, dice).await,
        7 => leave_socket(world, execution, serial).await,
        _ => leave_response(world, execution, serial, dice).await,
    };
    world.book.settle(serial, result);
    world.pause(dice.about(PAUSE)).await;
    Ok(())
}

fn url(world: &World, what: &str, serial: Serial, size: usize) -> String {
    format!("https://{HOST}:{}/{what}/{serial}/{size}", world.ports.plain)
}

/// Sends the text of a request, and closes or resets the connection a moment later.
async fn raw(
    world: &World,
    execution: &Execution,
    line: &str,
    more: &str,
    moment: Duration,
    dice: &mut Dice,
) -> Result<Outcome, String> {
    execution.calls.fetch_add(1, Ordering::Relaxed);
    let mut stream = world.connect().await?;
    let more = if more.is_empty() { "\r\n" } else { more };
    let authorization = &execution.authorization;
    let host = format!("{HOST}:{}", world.ports.plain);
    let text = format!("{line} HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: {authorization}\r\n{more}");
    stream.write_all(text.as_bytes()).await.map_err(|error| format!("write: {error}"))?;
    if dice.below(2) == 0 {
        world.pause(moment).await;
    }
    if dice.below(2) == 0 {
        let _ = socket2::SockRef::from(stream.get_ref()).set_linger(Some(Duration::ZERO));
    }
    Ok(Outcome::Unknown)
}

/// Closes the sending side after a request. It must be answered all the same.
async fn half_close(world: &World, execution: &Execution, serial: Serial) -> Result<Outcome, String> {
    const SIZE: usize = 20_000;
    execution.calls.fetch_add(1, Ordering::Relaxed);
    let line = format!("GET {}", url(world, "text", serial, SIZE));
    let authorization = &execution.authorization;
    let host = format!("{HOST}:{}", world.ports.plain);
    let text = format!("{line} HTTP/1.1\r\nHost: {host}\r\nProxy-Authorization: {authorization}\r\n\r\n");
    let mut connection = Connection::new(world.connect().await?);
    let exchange = async {
        connection.write(text.as_bytes()).await?;
        connection.stream.shutdown().await.map_err(|error| format!("shutdown: {error}"))?;
        connection.exchange(b"", &world.text.part(serial, SIZE), SIZE).await
    };
    let result = timeout(PATIENCE, exchange).await.unwrap_or_else(|_| Err(format!("no end within {PATIENCE:?}")));
    result.map(|()| Outcome::Answered).map_err(|why| format!("half-closed: {why}"))
}

/// Resets an h2 stream, perhaps in the middle of its body.
async fn reset_stream(
    world: &World,
    execution: &Arc<Execution>,
    serial: Serial,
    moment: Duration,
    dice: &mut Dice,
) -> Result<Outcome, String> {
    // The number is in the host as well: if the request does not leave in time, the line is that of the tunnel.
    let host = format!("s{serial}.work.test");
    let mut session = world.session(execution, Way::Http2, (&host, world.ports.plain)).await?;
    let call = match dice.below(2) {
        0 => Call::get(format!("/text/{serial}/100000")),
        _ => {
            let body = in_pieces(world.text.part(serial, 100_000), 1_000, Duration::from_millis(2));
            Call::post(format!("/post/{serial}/100000"), body)
        }
    };
    let _ = timeout(moment, session.send(call)).await;
    Ok(Outcome::Unknown)
}

/// Leaves a WebSocket without a close.
async fn leave_socket(world: &World, execution: &Execution, serial: Serial) -> Result<Outcome, String> {
    let to = (HOST, world.ports.plain);
    let mut socket = streams::open(world, execution, to, &format!("/ws/{serial}"), None).await?;
    socket.send(Message::text("and then")).await.map_err(|error| error.to_string())?;
    Ok(Outcome::CutOff)
}

/// Reads the beginning of a response, and leaves.
async fn leave_response(
    world: &World,
    execution: &Arc<Execution>,
    serial: Serial,
    dice: &mut Dice,
) -> Result<Outcome, String> {
    let way = dice.among(&[Way::Absolute, Way::Http1, Way::Http2]);
    let mut session = world.session(execution, way, (HOST, world.ports.plain)).await?;
    let response = session.begin(Call::get(format!("/text/{serial}/{}", 1 << 20))).await?;
    if response.status() != 200 {
        return Err(format!("status {}, {:?}", response.status(), response.headers()));
    }
    let frame = timeout(PATIENCE, response.into_body().frame()).await;
    frame.map_err(|_| "no body in time".to_owned())?;
    Ok(Outcome::CutOff)
}

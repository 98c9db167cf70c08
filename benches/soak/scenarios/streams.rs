//! Server-sent events and WebSockets.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use futures_util::{SinkExt, StreamExt};
use http_body_util::BodyExt;
use tokio::time::timeout;
use tokio_tungstenite::tungstenite::Message;
use tokio_tungstenite::tungstenite::client::IntoClientRequest;
use tokio_tungstenite::{WebSocketStream, client_async};

use crate::book::{Outcome, Scenario, Serial};
use crate::dice::Dice;
use crate::gateway::Execution;
use crate::measure::now_ns;
use crate::secrets::CREDENTIALS;
use crate::world::{Call, PATIENCE, Tls, Way, World, chain};

/// The mean interval of events and messages.
const INTERVAL: Duration = Duration::from_millis(1_500);

/// Receives a stream of events: all of them, in order, each soon after it was sent.
pub(super) async fn events(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let way = dice.among(&[Way::Http1, Way::Http2, Way::Absolute]);
    let mut session = world.session(execution, way, ("events.work.test", world.ports.plain)).await?;
    let count = 5 + dice.below(25);
    let interval = dice.about(INTERVAL).as_millis();
    let serial = world.book.begin(Scenario::Events);
    let call = Call::get(format!("/events/{serial}/{count}/{interval}")).field("accept", "text/event-stream");
    let received = async {
        let response = session.begin(call).await?;
        if response.status() != 200 {
            return Err(format!("status {}, {:?}", response.status(), response.headers()));
        }
        let mut body = response.into_body();
        let (mut text, mut n) = (String::new(), 0);
        loop {
            if world.stop.is_cancelled() {
                return Ok(Outcome::CutOff);
            }
            let frame = tokio::select! {
                frame = timeout(PATIENCE, body.frame()) => frame.map_err(|_| "no event in time".to_owned())?,
                () = world.stop.cancelled() => return Ok(Outcome::CutOff),
            };
            let Some(frame) = frame else { break };
            let frame = frame.map_err(|error| format!("after {n} events: {}", chain(&error)))?;
            let Some(data) = frame.data_ref() else { continue };
            text.push_str(&String::from_utf8_lossy(data));
            while let Some(end) = text.find("\n\n") {
                let event: String = text.drain(..end + 2).collect();
                let sent = event.strip_prefix(&format!("id: {serial}-{n}\ndata: {{\"sent\":"));
                let sent = sent.and_then(|rest| rest.trim_end_matches("}\n\n").trim().parse::<u64>().ok());
                let sent = sent.ok_or_else(|| format!("event {n} is {event:?}"))?;
                world.book.latency_us(Scenario::Events, now_ns().saturating_sub(sent) as f64 / 1_000.0);
                n += 1;
            }
        }
        if n == count && text.is_empty() {
            Ok(Outcome::Answered)
        } else {
            Err(format!("{n} of {count} events, {text:?}"))
        }
    };
    world.book.settle(serial, received.await);
    Ok(())
}

/// Talks to an echo, or to an origin that sends back an injected credential.
pub(super) async fn websocket(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let serial = world.book.begin(Scenario::WebSocket);
    let credential = (dice.below(4) == 0).then(|| dice.below(CREDENTIALS));
    let result = match credential {
        None => talk(world, execution, serial, None, dice).await,
        Some(n) => {
            execution.injected.fetch_add(1, Ordering::Relaxed);
            talk(world, execution, serial, Some(n), dice).await
        }
    };
    world.book.settle(serial, result);
    Ok(())
}

async fn talk(
    world: &World,
    execution: &Arc<Execution>,
    serial: Serial,
    credential: Option<usize>,
    dice: &mut Dice,
) -> Result<Outcome, String> {
    let mut socket = match credential {
        None => open(world, execution, ("ws.work.test", world.ports.plain), &format!("/ws/{serial}"), None).await?,
        Some(n) => {
            let host = format!("c{n}.cred.test");
            open(world, execution, (&host, world.ports.credential), &format!("/tell/{serial}"), Some(n)).await?
        }
    };
    for n in 0..5 + dice.below(30) {
        let text = world.text.part(serial + n, 20 + dice.below(3_000));
        let message = match dice.below(3) {
            0 if credential.is_none() => Message::binary(text),
            _ => Message::text(String::from_utf8_lossy(&text).into_owned()),
        };
        let start = Instant::now();
        socket.send(message.clone()).await.map_err(|error| format!("message {n}: {error}"))?;
        let answer = timeout(PATIENCE, socket.next()).await.map_err(|_| format!("no answer to message {n} in time"))?;
        let answer = answer.ok_or("the end")?.map_err(|error| format!("answer {n}: {error}"))?;
        world.book.latency(Scenario::WebSocket, start);
        let expected = match credential {
            Some(c) => Message::text(format!("Bearer {}", "*".repeat(world.secrets.value(c).len()))),
            None => message,
        };
        if answer != expected {
            return Err(format!("answer {n} of {} bytes is {:.300?}", expected.len(), answer));
        }
        if !world.pause(dice.about(INTERVAL)).await {
            break;
        }
    }
    socket.close(None).await.map_err(|error| format!("close: {error}"))?;
    match timeout(PATIENCE, socket.next()).await {
        Ok(None | Some(Ok(Message::Close(_)))) => Ok(Outcome::Answered),
        other => Err(format!("no close: {other:?}")),
    }
}

/// Opens a WebSocket in a tunnel of its own.
pub(super) async fn open(
    world: &World,
    execution: &Execution,
    (host, port): (&str, u16),
    path: &str,
    credential: Option<usize>,
) -> Result<WebSocketStream<Tls>, String> {
    let tls = world.tls(execution, Way::Http1, (host, port)).await?;
    let mut request = format!("wss://{host}:{port}{path}").into_client_request().map_err(|error| error.to_string())?;
    if let Some(n) = credential {
        request.headers_mut().insert("exeat-credential", format!("C{n}").parse().unwrap());
    }
    let opened = timeout(PATIENCE, client_async(request, tls)).await;
    let opened = opened.map_err(|_| "no handshake in time".to_owned())?;
    opened.map(|(socket, _)| socket).map_err(|error| format!("handshake: {error}"))
}

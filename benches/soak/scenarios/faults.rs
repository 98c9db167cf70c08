//! Origins that fail: the client must get the right code, or see that the body is not complete.

use std::sync::Arc;

use http_body_util::BodyExt;
use tokio::time::timeout;

use crate::book::{Outcome, Scenario, Serial};
use crate::dice::Dice;
use crate::gateway::Execution;
use crate::world::{Call, NO_RESPONSE, PATIENCE, Session, Way, World};

/// The size of a body that breaks off in its middle.
const SIZE: usize = 60_000;

/// Sends a request that is answered, and then one that fails, perhaps on the same connection to the origin.
pub(super) async fn round(world: &World, execution: &Arc<Execution>, dice: &mut Dice) -> Result<(), String> {
    let way = dice.among(&[Way::Absolute, Way::Http1, Way::Http2]);
    let over_h2 = dice.below(3) == 0;
    // The origin over h2 fails by resetting streams, so that requests of others on its connection go on.
    let to = if over_h2 { ("f.work.test", world.ports.plain) } else { ("a.fault.test", world.ports.fault) };
    let kind = dice.below(if over_h2 { 5 } else { 9 });
    match kind {
        3 => return refuse(world, execution, way, ("f.work.test", world.ports.closed), "connect_failed").await,
        4 => return refuse(world, execution, way, ("wrong.name.test", world.ports.fault), "tls_failed").await,
        _ => {}
    }
    let mut session = world.session(execution, way, to).await?;
    let serial = world.book.begin(Scenario::Fault);
    let good = session.send(Call::get(format!("/text/{serial}/1000"))).await;
    let good = good.and_then(|reply| reply.expect_body(&world.text.part(serial, 1_000)));
    world.book.settle(serial, good);
    let serial = world.book.begin(Scenario::Fault);
    let get = |what: &str| Call::get(format!("/{what}/{serial}/{SIZE}"));
    let result = match kind {
        0 => fail(&mut session, get("die"), 502, "upstream_protocol").await,
        1 => cut_off(world, &mut session, get("cut"), serial).await,
        2 => cut_off(world, &mut session, get("cutchunked"), serial).await,
        5 => fail(&mut session, get("reset"), 502, "upstream_protocol").await,
        6 => cut_off(world, &mut session, get("resetbody"), serial).await,
        7 => fail(&mut session, get("stall"), 504, "request_timed_out").await,
        _ => cut_off(world, &mut session, get("stallbody"), serial).await,
    };
    world.book.settle(serial, result.map_err(|why| format!("kind {kind}, {way:?}, origin over h2: {over_h2}: {why}")));
    Ok(())
}

async fn refuse(
    world: &World,
    execution: &Arc<Execution>,
    way: Way,
    to: (&str, u16),
    code: &'static str,
) -> Result<(), String> {
    let mut session = world.session(execution, way, to).await?;
    let serial = world.book.begin(Scenario::Fault);
    let result = fail(&mut session, Call::get(format!("/text/{serial}/9")), 502, code).await;
    world.book.settle(serial, result);
    Ok(())
}

async fn fail(session: &mut Session, call: Call, status: u16, code: &'static str) -> Result<Outcome, String> {
    session.send(call).await?.expect_refusal(status, code)?;
    Ok(Outcome::Failed(code))
}

/// Receives a part of a response. It must be right as far as it goes, and must not look complete.
async fn cut_off(world: &World, session: &mut Session, call: Call, serial: Serial) -> Result<Outcome, String> {
    let response = match session.begin(call).await {
        Ok(response) => response,
        // The error has come before the head was sent. Then the connection or the stream ends without a response.
        Err(why) if why.starts_with(NO_RESPONSE) => return Ok(Outcome::CutOff),
        Err(why) => return Err(why),
    };
    let code = response.headers().get("exeat-refusal").cloned();
    if response.status() == 502 && code.is_some_and(|code| code == "upstream_protocol") {
        // A reset has overtaken the head.
        return Ok(Outcome::Failed("upstream_protocol"));
    }
    if response.status() != 200 {
        return Err(format!("status {}, {:?}", response.status(), response.headers()));
    }
    let expected = world.text.part(serial, SIZE);
    let mut body = response.into_body();
    let mut received = 0;
    loop {
        let frame = timeout(PATIENCE, body.frame()).await.map_err(|_| "a broken body has no end".to_owned())?;
        match frame {
            None => return Err(format!("a broken body looks complete after {received} bytes")),
            Some(Err(_)) => return Ok(Outcome::CutOff),
            Some(Ok(frame)) => {
                let data = frame.data_ref().cloned().unwrap_or_default();
                if expected.get(received..received + data.len()) != Some(&data[..]) {
                    return Err(format!("another body behind {received} bytes"));
                }
                received += data.len();
            }
        }
    }
}

/// Sends a request that only the added rule allows.
pub(crate) async fn probe_added_rule(
    world: &World,
    execution: &Arc<Execution>,
    is_allowed: bool,
) -> Result<(), String> {
    let serial = world.book.begin(Scenario::Reload);
    let result = async {
        let mut session = world.session(execution, Way::Absolute, ("a.added.test", world.ports.plain)).await?;
        let reply = session.send(Call::get(format!("/text/{serial}/900"))).await?;
        if is_allowed {
            return reply.expect_body(&world.text.part(serial, 900));
        }
        reply.expect_refusal(403, "host_not_allowed").map(|()| Outcome::Refused("host_not_allowed"))
    };
    world.book.settle(serial, result.await);
    Ok(())
}

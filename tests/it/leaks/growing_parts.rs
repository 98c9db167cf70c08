//! Parts of a value in answers: a part that grows confirms guesses and counts each time, and the echo of a value that was
//! sent does not count, wherever it is cut.

use std::sync::Arc;

use bytes::Bytes;
use exeat::leak::strength::Strength;
use exeat::leak::{Matcher, Redactor, Value, ValueOwner};
use exeat::model::name::CredentialName;

use super::origin::Words;
use super::road::{Ask, Way};
use super::{Field, Origins, config};
use crate::lab::Ground;

const SHORT: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb";
const LONG: &str = "k7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5JfTgA1xZq";
/// A key with the prefix of GitHub.
const PREFIXED: &str = "ghp_k7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5JfTgA";

fn key() -> CredentialName {
    CredentialName::new("KEY")
}

fn matcher(value: &str) -> Arc<Matcher> {
    let strength = Strength::of(value.as_bytes());
    assert!(strength.is_strong());
    let value = Value::new(ValueOwner::Credential(key()), value.as_bytes()).with_halves(strength);
    Arc::new(Matcher::new(std::iter::once(value)))
}

/// A proxy that stops an execution after three finds.
async fn three_finds(value: &str) -> Field {
    let ground = Ground::new().await;
    let origins = Origins::start(&ground).await;
    let ports = [origins.plain.port, origins.h1.port, origins.h2.port];
    let text = config(&ground, &ports, &[("KEY", value)]).replace("max_finds = 1000000", "max_finds = 3");
    Field { lab: ground.proxy(&text).await, origins }
}

fn taken(redactor: &mut Redactor) -> Vec<u8> {
    std::iter::from_fn(|| redactor.take()).flatten().collect()
}

/// Feeds a text in two pieces, optionally with pauses. Returns the output and the number of finds.
fn through(mut redactor: Redactor, text: &[u8], cut: usize, pauses: bool) -> (Vec<u8>, u64) {
    let mut out = Vec::new();
    for piece in [&text[..cut], &text[cut..]] {
        redactor.feed(Bytes::copy_from_slice(piece));
        if pauses {
            redactor.pause();
        }
        out.extend(taken(&mut redactor));
    }
    redactor.end();
    out.extend(taken(&mut redactor));
    (out, redactor.finds(true))
}

/// A part that grows from pause to pause counts each time.
#[test]
fn a_part_that_grows_from_pause_to_pause_counts_each_time() {
    for (value, grown) in [(SHORT, 16), (LONG, 20)] {
        let mut redactor = Redactor::new(matcher(value));
        redactor.feed(Bytes::copy_from_slice(&value.as_bytes()[..grown]));
        redactor.pause();
        for at in grown..grown + 3 {
            redactor.feed(Bytes::copy_from_slice(&value.as_bytes()[at..=at]));
            redactor.pause();
        }
        assert!(
            redactor.finds(true) >= 4,
            "{value}: {} finds, masked {:?}",
            redactor.finds(true),
            taken(&mut redactor)
        );
    }
}

/// An echo of the value that was sent is no find, wherever it is cut.
#[test]
fn an_echo_of_a_key_with_a_public_prefix_is_no_find_wherever_it_is_cut() {
    let mut counted = Vec::new();
    for value in [SHORT, LONG, PREFIXED, "sk-ant-api03-k7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5JfTgA1xZqk7Qz2mXv9LpW"] {
        let text = format!("echo {value} and more");
        for cut in 0..=text.len() {
            for pauses in [false, true] {
                let redactor = Redactor::after(matcher(value), Some(key()));
                let (out, finds) = through(redactor, text.as_bytes(), cut, pauses);
                assert!(!String::from_utf8_lossy(&out).contains(value));
                if finds > 0 {
                    counted.push((value, cut, pauses, finds));
                }
            }
        }
    }
    assert!(counted.is_empty(), "{counted:#?}");
}

/// The same against the daemon: three honest echoes in small pieces stop nobody.
#[tokio::test(flavor = "multi_thread")]
async fn three_echoes_in_small_pieces_stop_nobody() {
    let field = three_finds(PREFIXED).await;
    let way = Way::Https;
    let pieces = format!("echo {PREFIXED} and more").bytes().map(|byte| vec![byte]).collect();
    field.origin(way).says("echo", Words { status: 200, pieces, ..Words::default() });
    let ask = Ask { fields: vec![("Exeat-Credential".into(), "KEY".into())], ..Ask::default() };
    for n in 0..5 {
        let answer = field.road(way).send("echo", &ask).await;
        assert_eq!((answer.status, answer.header("exeat-refusal")), (200, None), "echo {n}: {answer:?}");
    }
}

/// A whole value in a list of numbers is overwritten, also if a pause comes right behind its last digit.
#[test]
fn a_whole_value_in_a_list_of_numbers_is_not_shown_at_a_pause() {
    let url = "https://hooks.slack.com/services/T01ABCDEF23/B04GHIJKL56/k7Qz2mXv9LpW4sVt6eRRu8Yb";
    let mut shown = Vec::new();
    for list in super::blanks_and_lists::lists(url) {
        let text = format!("{{\"data\":[{list}]}}");
        let (out, finds) = through(Redactor::new(matcher(url)), text.as_bytes(), text.len() - 2, true);
        if out == text.as_bytes() {
            shown.push((text, finds));
        }
    }
    assert!(shown.is_empty(), "{shown:#?}");
}

//! Ways to get a value, or nearly all of it, past the scanner, and honest texts that must not be finds. Each was found
//! by playing a hostile sandbox.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use bytes::Bytes;
use exeat::leak::strength::Strength;
use exeat::leak::{Holdback, Matcher, Redactor, Value, ValueOwner};
use exeat::model::name::CredentialName;

const VALUE: &[u8] = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";

fn matcher(values: &[(&str, &[u8])]) -> Arc<Matcher> {
    let value = |(name, value): &(&str, &'_ [u8])| (CredentialName::new(name), value.to_vec());
    let values: Vec<_> = values.iter().map(value).collect();
    Arc::new(Matcher::new(
        values.iter().map(|(name, value)| {
            Value::new(ValueOwner::Credential(name.clone()), value).with_halves(Strength::of(value))
        }),
    ))
}

fn taken(hold: &mut Holdback) -> Vec<u8> {
    std::iter::from_fn(|| hold.take()).flatten().collect()
}

/// Returns the bytes released from a stream without pauses before a find, or all of them.
fn left(matcher: &Arc<Matcher>, pieces: &[&[u8]]) -> (Vec<u8>, bool) {
    let (mut hold, mut out) = (Holdback::new(matcher.clone()), Vec::new());
    for piece in pieces {
        for piece in piece.chunks(1000) {
            if hold.feed(Bytes::copy_from_slice(piece)).and_then(|()| hold.release_beyond_lag()).is_err() {
                return (out, true);
            }
            out.extend(taken(&mut hold));
        }
    }
    if hold.end().is_err() {
        return (out, true);
    }
    out.extend(taken(&mut hold));
    (out, false)
}

/// If a value continues after more line breaks than the lag holds, no part that takes 2^40 guesses leaves.
#[test]
fn no_large_part_leaves_before_a_long_run_of_skipped_characters() {
    let matcher = matcher(&[("KEY", VALUE)]);
    for skipped in ["\n", "\u{200b}", " "] {
        for right in [23, 20, 16, 15] {
            let run = format!("\n{}", skipped.repeat(30_000));
            let before = "some text ".repeat(1000);
            let (out, is_found) =
                left(&matcher, &[before.as_bytes(), &VALUE[..right], run.as_bytes(), &VALUE[right..], b" more"]);
            assert!(is_found);
            assert!(
                !out.windows(right).any(|left| left == &VALUE[..right]),
                "{right} of {} bytes have left: {skipped:?}",
                VALUE.len()
            );
        }
    }
}

/// The same in hex inside base64, where carriage returns are skipped.
#[test]
fn no_large_part_leaves_before_a_long_run_of_carriage_returns() {
    let matcher = matcher(&[("KEY", VALUE)]);
    let hex: String = VALUE.iter().map(|byte| format!("{byte:02x}")).collect();
    let coded = STANDARD.encode(hex);
    let (first, rest) = coded.split_at(coded.len() - 4);
    let first = format!("{}\"{first}", "some text ".repeat(1000));
    let (out, is_found) =
        left(&matcher, &[first.as_bytes(), "\r".repeat(30_000).as_bytes(), rest.as_bytes(), b"\" and so on"]);
    assert!(is_found);
    assert!(!out.starts_with(first.as_bytes()));
}

fn jwt(role: &str, signature: &str) -> String {
    let payload = format!(
        "{{\"iss\":\"supabase\",\"ref\":\"xkqzvtwplmdbnrjgyhcf\",\"role\":\"{role}\",\"iat\":1612345678,\"exp\":1927921678}}"
    );
    let head = URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256","typ":"JWT"}"#);
    format!("{head}.{}.{signature}", URL_SAFE_NO_PAD.encode(payload))
}

/// The first half of a signed token names its subject, and is the same in other tokens of the same issuer.
#[test]
fn another_token_of_the_same_issuer_is_no_find() {
    let held = jwt("service_role", "b7KqWz2mXv9LpW4sVt6eRRu8YbQ3nH5jG1fD0sA9kL2");
    let public = jwt("anon", "RvGcU3hZk1mQp8sTnWx2Yb5Ae7Lc9Dd0Ff4Jj6Kk8Mm");
    let shared = held.bytes().zip(public.bytes()).take_while(|(a, b)| a == b).count();
    assert_eq!(shared, held.len().div_ceil(2));
    assert!(matcher(&[("KEY", held.as_bytes())]).find(public.as_bytes()).is_none(), "an anon key");
}

/// The same for a renewed token.
#[test]
fn the_same_token_renewed_is_no_find() {
    let of = |iat: u64, signature: &str| {
        let payload = format!(
            "{{\"iss\":\"https://id.example.com/\",\"sub\":\"auth0|5f7c8ec7c33c6c004bbafe82\",\"aud\":\"https://api.example.com/\",\"iat\":{iat},\"exp\":{}}}",
            iat + 86_400
        );
        let head = URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256","typ":"JWT"}"#);
        format!("{head}.{}.{signature}", URL_SAFE_NO_PAD.encode(payload))
    };
    let held = of(1_700_000_000, "b7KqWz2mXv9LpW4sVt6eRRu8YbQ3nH5jG1fD0sA9kL2");
    let renewed = of(1_700_086_400, "RvGcU3hZk1mQp8sTnWx2Yb5Ae7Lc9Dd0Ff4Jj6Kk8Mm");
    let shared = held.bytes().zip(renewed.bytes()).take_while(|(a, b)| a == b).count();
    assert!(shared > held.len().div_ceil(2));
    let mut redactor = Redactor::with_sent(matcher(&[("KEY", held.as_bytes())]), Some(CredentialName::new("KEY")));
    for _ in 0..3 {
        redactor.feed(format!("{{\"access_token\":\"{renewed}\"}}\n").into());
    }
    redactor.end();
    assert_eq!(redactor.finds(true), 0);
}

/// Each row is an encoding of the value that a parser of the language decodes.
#[test]
fn finds_values_in_string_escapes_and_with_invisible_characters() {
    let matcher = matcher(&[("KEY", VALUE)]);
    let value = std::str::from_utf8(VALUE).unwrap();
    let (a, b) = value.split_at(11);
    let rows = [
        ("JavaScript, Python, CSS: a line that goes on", format!("'{a}\\\n{b}'")),
        ("JavaScript, with CRLF", format!("'{a}\\\r\n{b}'")),
        ("JavaScript, CSS: a letter escaped as itself", format!("'{a}\\{b}'")),
        ("CSS: soft hyphen with zeros", format!("'{a}\\0000ad {b}'")),
        ("CSS: zero-width space", format!("'{a}\\200b {b}'")),
        ("HTML: word joiner", format!("{a}&NoBreak;{b}")),
        ("HTML: af", format!("{a}&af;{b}")),
        ("HTML: lrm", format!("{a}&lrm;{b}")),
        ("HTML: many zeros", format!("{a}&#x{}200b;{b}", "0".repeat(700))),
        ("JSON surrogates", format!("{a}\\uDB40\\uDC41{b}")),
        ("JSON surrogates twice", format!("{a}\\\\uDB40\\\\uDC41{b}")),
    ];
    let missed: Vec<&str> =
        rows.iter().filter(|(_, text)| matcher.find(text.as_bytes()).is_none()).map(|(name, _)| *name).collect();
    assert!(missed.is_empty(), "{missed:#?}");
}

/// A line break, a split invisible character and the line's indentation, repeated until they are dropped.
#[test]
fn finds_a_value_in_indented_lines_with_a_split_invisible_character() {
    let matcher = matcher(&[("KEY", VALUE)]);
    let unseen = "\u{200b}".as_bytes();
    let breaks = b"\n".repeat(2000);
    let before = b"some text ".repeat(500);
    for cut in 0..=3 {
        let first = [&before[..], &VALUE[..8], &breaks, &unseen[..cut]].concat();
        let second = [&unseen[cut..], b"  ", &VALUE[8..], b" more text"].concat();
        let mut hold = Holdback::new(matcher.clone());
        let found = hold.feed(first.into()).and_then(|()| hold.feed(second.into())).and_then(|()| hold.end());
        assert!(found.is_err(), "cut after {cut} of 3 bytes");
    }
}

/// The same in one piece: the scanner processes a text in blocks, and the character is split at the end of a block.
#[test]
fn finds_a_value_in_indented_lines_with_an_invisible_character_at_a_block_end() {
    let matcher = matcher(&[("KEY", VALUE)]);
    let breaks = b"\n".repeat(2000);
    for behind in 1..=3 {
        let before = b".".repeat(4096 - behind - 2000 - 8);
        let text = [&before[..], &VALUE[..8], &breaks, "\u{200b}  ".as_bytes(), &VALUE[8..], b" more text"].concat();
        assert!(matcher.find(&text).is_some(), "{behind} of 3 bytes before the end of a block");
    }
}

/// An answer contains the sent value as a list of bytes and as plain text.
#[test]
fn an_echo_in_two_encodings_is_no_find() {
    let value = "k7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5JfTgA1xZq";
    let matcher = matcher(&[("KEY", value.as_bytes())]);
    let list = value.bytes().map(|byte| byte.to_string()).collect::<Vec<_>>().join(",");
    let coded = STANDARD.encode(value.bytes().map(|byte| format!("%{byte:02x}")).collect::<String>());
    for (name, before) in [("list", &list), ("part", &coded)] {
        let text = format!("{{\"a\":[\"{before}\"],\"text\":\"{value}\"}}").replace(&format!("\"{list}\""), &list);
        let mut wrong = Vec::new();
        for cut in 0..=text.len() {
            let mut redactor = Redactor::with_sent(matcher.clone(), Some(CredentialName::new("KEY")));
            let (first, second) = text.as_bytes().split_at(cut);
            redactor.feed(Bytes::copy_from_slice(first));
            redactor.feed(Bytes::copy_from_slice(second));
            redactor.end();
            if redactor.finds(true) > 0 {
                wrong.push(cut);
            }
        }
        assert!(wrong.is_empty(), "{name}: {} of {} cuts, from {:?}", wrong.len(), text.len() + 1, wrong.first());
    }
}

/// Line breaks cost no more time than other skipped characters.
#[test]
fn line_breaks_take_no_longer_than_invisible_characters() {
    let matcher = matcher(&[("KEY", VALUE)]);
    // The fastest of several runs, because other programs slow down some of them.
    let time = |unit: &str| {
        let text = unit.repeat(64 * 1024 / unit.len());
        let runs = (0..8).map(|_| {
            let began = std::time::Instant::now();
            assert!(matcher.find(text.as_bytes()).is_none());
            began.elapsed()
        });
        runs.min().unwrap()
    };
    let (breaks, unseen) = (time("\n"), time("\u{200b}"));
    assert!(breaks < unseen * 16, "{breaks:?} for line breaks, {unseen:?} for zero-width spaces");
}

fn misses(matcher: &Arc<Matcher>, unit: &str, piece: usize) -> Option<usize> {
    let (text, mut hold) = (unit.repeat(20_000), Holdback::new(matcher.clone()));
    let mut at = 0;
    for piece in text.as_bytes().chunks(piece) {
        at += piece.len();
        if hold.feed(Bytes::copy_from_slice(piece)).and_then(|()| hold.release_beyond_lag()).is_err() {
            return Some(at / unit.len());
        }
        while hold.take().is_some() {}
    }
    None
}

/// The number of finds does not depend on how a text is split.
#[test]
fn parts_count_once_however_they_are_split() {
    let matcher = matcher(&[("KEY", VALUE)]);
    let escaped: String = VALUE[..23].iter().map(|byte| format!("%{byte:02x}")).collect();
    for unit in [escaped + "#", format!("{} some other text\n", std::str::from_utf8(&VALUE[..23]).unwrap())] {
        for piece in [1, 37, 500, 16 * 1024] {
            let count = misses(&matcher, &unit, piece);
            assert!(count.is_none_or(|count| count > 9_900), "{count:?} of {unit:?} by {piece}");
        }
    }
}

/// In answers, parts that lag far enough are overwritten too.
#[test]
fn no_large_part_returns_before_a_long_run_of_skipped_characters() {
    let mut redactor = Redactor::new(matcher(&[("KEY", VALUE)]));
    let text = ["some text ".repeat(1000).as_bytes(), &VALUE[..23], &b"\n".repeat(30_000), &VALUE[23..]].concat();
    let mut out = Vec::new();
    for piece in text.chunks(1000) {
        redactor.feed(Bytes::copy_from_slice(piece));
        out.extend(std::iter::from_fn(|| redactor.take()).flatten());
    }
    redactor.end();
    out.extend(std::iter::from_fn(|| redactor.take()).flatten());
    assert!(!out.windows(23).any(|shown| shown == &VALUE[..23]), "{} finds", redactor.finds(true));
}

//! Texts that are built to mislead the scanner, and honest texts that it must not mistake for them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use bytes::Bytes;
use exeat::leak::{Holdback, Matcher, Redactor, Value, ValueOwner};
use exeat::model::name::CredentialName;

const VALUE: &[u8] = b"k7Qz2mXv9LpW4sVt6eRRu8Yb";

fn named(name: &str) -> ValueOwner {
    ValueOwner::Credential(CredentialName::new(name))
}

fn matcher(values: &[(&str, &[u8])]) -> Arc<Matcher> {
    Arc::new(Matcher::new(values.iter().map(|(name, value)| (named(name), *value))))
}

fn hex() -> String {
    VALUE.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a decoy followed by the value in hex with one digit escaped.
fn decoy() -> String {
    let hex = hex();
    let (begin, rest) = hex.split_at(20);
    let (digit, end) = rest.split_at(1);
    let more = "and so on ".repeat(60);
    format!("{{\"a\": \"%{begin}\\u00{:02x}{end}\", \"b\": \"{more}\"}}", digit.as_bytes()[0])
}

fn leaves(pieces: &[&[u8]]) -> bool {
    let mut hold = Holdback::new(matcher(&[("KEY", VALUE)]));
    let mut feed =
        |piece: &&[u8]| hold.feed(Bytes::copy_from_slice(piece)).and_then(|()| hold.release_beyond_lag()).is_ok();
    pieces.iter().all(&mut feed) && hold.end().is_ok()
}

#[test]
fn a_decoy_hides_no_value_however_it_is_split() {
    let text = decoy();
    for cut in 0..=text.len() {
        let (one, two) = text.as_bytes().split_at(cut);
        assert!(!leaves(&[one, two]), "cut at {cut}");
    }
}

/// The scanner processes a text in blocks.
#[test]
fn a_decoy_hides_no_value_at_the_end_of_a_block() {
    for blanks in 4050..4100 {
        let text = format!("{}{}", " ".repeat(blanks), decoy());
        assert!(matcher(&[("KEY", VALUE)]).find(text.as_bytes()).is_some(), "{blanks}");
    }
}

#[test]
fn a_decoy_hides_no_value_after_another_encoding() {
    let hex = hex();
    let (begin, rest) = hex.split_at(9);
    let (digit, end) = rest.split_at(1);
    let before = "..........%41".repeat(50);
    let inner = format!("x%41.\\u0041.{before}%{begin}\\u00{:02x}{end}", digit.as_bytes()[0]);
    for write in [|byte: u8| format!("%{byte:02x}"), |byte| format!("\\u{byte:04x}"), |byte| format!("&#{byte};")] {
        let text: String = inner.bytes().map(write).collect();
        assert!(matcher(&[("KEY", VALUE)]).find(text.as_bytes()).is_some(), "{}", &text[..60]);
    }
}

#[test]
fn a_decoy_hides_no_value_in_indented_lines() {
    let text = decoy().replacen(&hex()[..20], &format!("{}\n{}", &hex()[..20], " ".repeat(1200)), 1);
    assert!(matcher(&[("KEY", VALUE)]).find(text.as_bytes()).is_some());
}

/// Skipped characters are not buffered: four times as many line breaks take four times as long, not sixteen.
#[test]
fn line_breaks_take_linear_time() {
    let time = |kilobytes: usize, lead: &str| {
        let mut hold = Holdback::new(matcher(&[("KEY", VALUE)]));
        let text: Vec<u8> = lead.bytes().chain(std::iter::repeat(b'\n')).take(kilobytes * 1024).collect();
        let began = Instant::now();
        for piece in text.chunks(16 * 1024) {
            hold.feed(Bytes::copy_from_slice(piece)).unwrap();
            hold.release_beyond_lag().unwrap();
            while hold.take().is_some() {}
        }
        began.elapsed()
    };
    for lead in ["abcdefgh ", "%41\\u0041&#65; "] {
        let short = time(64, lead).max(Duration::from_millis(2));
        let long = time(512, lead);
        assert!(long < short * 40, "{lead}: {short:?} {long:?}");
    }
}

fn token(payload: &str, signature: &str) -> String {
    format!(
        "{}.{}.{signature}",
        URL_SAFE_NO_PAD.encode(r#"{"alg":"HS256","typ":"JWT"}"#),
        URL_SAFE_NO_PAD.encode(payload)
    )
}

/// Feeds small pieces with a pause after each. Returns the number of finds.
fn finds(redactor: &mut Redactor, pieces: impl IntoIterator<Item = Bytes>) -> u64 {
    for piece in pieces {
        redactor.feed(piece);
        redactor.pause();
        while redactor.take().is_some() {}
    }
    redactor.end();
    redactor.finds(true)
}

#[test]
fn an_echo_of_one_of_two_values_with_a_common_prefix_is_no_find() {
    let of = |role: &str| {
        format!(
            "{{\"iss\":\"issuer\",\"ref\":\"abcdefghijklmnopqrst\",\"role\":\"{role}\",\"iat\":1612345678,\"exp\":1927921678}}"
        )
    };
    let anon = token(&of("anon"), "RvGcU3hZk1mQp8sTnWx2Yb5Ae7Lc9Dd0Ff4Jj6Kk8Mm");
    let service = token(&of("service_role"), "b7KqWz2mXv9LpW4sVt6eRRu8YbQ3nH5jG1fD0sA9kL2");
    let values = [("ANON", anon.as_bytes()), ("SERVICE", service.as_bytes())];
    for (name, value) in values {
        for length in [1, 2, 3, 110] {
            let mut redactor = Redactor::with_sent(matcher(&values), Some(CredentialName::new(name)));
            let pieces = value.chunks(length).map(Bytes::copy_from_slice);
            let more = [Bytes::from_static(b" and so on")];
            assert_eq!(finds(&mut redactor, pieces.chain(more)), 0, "{name} by {length}");
        }
    }
}

/// A part of a weak value is an ordinary word.
#[test]
fn words_in_a_stream_are_no_finds_for_a_weak_value() {
    let weak = Value::new(named("WEAK"), b"password123").whole();
    let matcher = Arc::new(Matcher::new([weak].into_iter()));
    let mut redactor = Redactor::with_sent(matcher, Some(CredentialName::new("WEAK")));
    let words = ["Enter your ", "password", " here, then the ", "password", " again: ", "password", "!"];
    assert_eq!(finds(&mut redactor, words.map(Bytes::from)), 0);
    assert_eq!(redactor.count(), 0);
}

/// Other tokens have the same head, which is not secret.
#[test]
fn a_list_of_other_tokens_is_no_find() {
    let one = |n: u64| {
        let signature =
            format!("{:x}{:x}", n.wrapping_mul(0x9e37_79b9_7f4a_7c15), n.wrapping_mul(0xbf58_476d_1ce4_e5b9));
        let payload = format!("{{\"sub\":\"{n}\",\"iat\":{}}}", 1_600_000_000 + n * 7919);
        token(&payload, &URL_SAFE_NO_PAD.encode(signature))
    };
    let text: String = (0..12_000).map(|n| one(n) + "\n").collect();
    let mine = one(424_242);
    for _ in 0..4 {
        // The filter chooses its sample positions anew each time.
        assert!(matcher(&[("KEY", mine.as_bytes())]).find(text.as_bytes()).is_none());
    }
}

#[test]
fn one_echo_without_its_end_is_one_find() {
    let mut redactor = Redactor::with_sent(matcher(&[("KEY", VALUE)]), Some(CredentialName::new("KEY")));
    assert_eq!(finds(&mut redactor, [Bytes::from_static(&VALUE[..14]), Bytes::from_static(&VALUE[14..18])]), 1);
}

//! Rare forms, parts of a value at the end of a text, and public prefixes of keys, against the library.

use std::sync::Arc;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use exeat::leak::strength::Strength;
use exeat::leak::{Holdback, Matcher, Value, ValueOwner};

const VALUE: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb";
const LONG: &str = "sk_live_k7Qz2mXv9LpW4sVt6eRRu8Yb5TgHc3Nd";

fn matcher(value: &str) -> Arc<Matcher> {
    let strength = Strength::of(value.as_bytes());
    assert!(strength.is_strong());
    Arc::new(Matcher::new(std::iter::once(Value::new(ValueOwner::Token, value.as_bytes()).with_halves(strength))))
}

fn passes(matcher: &Arc<Matcher>, text: &str) -> bool {
    let mut hold = Holdback::new(matcher.clone());
    hold.feed(Bytes::copy_from_slice(text.as_bytes())).and_then(|()| hold.end()).is_ok()
}

/// Returns true if all of the text leaves when the sender pauses after it.
fn leaves_at_a_pause(matcher: &Arc<Matcher>, text: &str) -> bool {
    let mut hold = Holdback::new(matcher.clone());
    hold.feed(Bytes::copy_from_slice(text.as_bytes())).and_then(|()| hold.pause()).is_ok()
}

fn each(value: &str, write: impl Fn(char) -> String) -> String {
    value.chars().map(write).collect()
}

fn between(value: &str, what: &str) -> String {
    value.chars().map(String::from).collect::<Vec<_>>().join(what)
}

fn none_passes(rows: &[(&str, &str, String)]) {
    let passed: Vec<_> = rows.iter().filter(|(_, value, text)| passes(&matcher(value), text)).collect();
    assert!(passed.is_empty(), "{passed:#?}");
}

/// A soft hyphen as written in JavaScript and Python, and in HTML without the semicolon.
#[test]
fn finds_values_with_invisible_characters_in_other_escapes() {
    none_passes(&[
        ("between characters", LONG, format!("<p>{}", between(LONG, "&shy"))),
        ("in base64", LONG, format!("<p>{}", between(&STANDARD.encode(LONG), "&shy"))),
    ]);
}

/// Characters that JavaScript and CSS decode as themselves after a backslash; Markdown does so for punctuation.
#[test]
fn finds_values_with_characters_escaped_as_themselves() {
    let marked = "glpat-Zq7_x-2mXv9_pW4sVt6e";
    none_passes(&[
        ("Markdown", marked, each(marked, |c| if c.is_ascii_punctuation() { format!("\\{c}") } else { c.into() })),
        (
            "a shell",
            "k7Qz$mXv9L!W4s(t6eRR#8Yb",
            each("k7Qz$mXv9L!W4s(t6eRR#8Yb", |c| if "$!(#".contains(c) { format!("\\{c}") } else { c.into() }),
        ),
    ]);
}

/// HTML references for ASCII characters: old ones need no semicolon, and two have long names.
#[test]
fn finds_values_in_html_references_for_ascii() {
    let value = "a&b|7Q`z2m&v9L|W4sVt6eRR";
    none_passes(&[
        ("&amp", value, value.replace('&', "&amp")),
        ("&AMP", value, value.replace('&', "&AMP")),
        ("in the middle", value, value.replace('v', "v&shy")),
    ]);
}

/// All of a short value but its last byte, with nothing after it.
#[test]
fn finds_nearly_all_of_a_short_value_at_the_end_of_a_body() {
    none_passes(&[("body", VALUE, format!("abc {}", &VALUE[..VALUE.len() - 1]))]);
}

/// The prefix of a kind of keys is not secret, even if it is half of the value. Texts may end in it, and the characters
/// after it must not be revealed in parts.
#[test]
fn a_well_known_prefix_passes_although_it_is_half_of_a_value() {
    for (value, known) in [("acme_live_k7Qz2mXv9L", "acme_live_"), ("sk-ant-api03-k7Qz2mXv9LpWu", "sk-ant-api03-")] {
        let matcher = matcher(value);
        assert!(leaves_at_a_pause(&matcher, &format!("our keys begin with {known}")), "{known}");
    }
}

/// If a prefix of a value is known, one message must not distinguish its next four bytes from others.
#[test]
fn four_bytes_after_a_known_prefix_cannot_be_guessed() {
    let value = "sk_live_k7Qz2mXv9LpWu8Yb";
    let matcher = matcher(value);
    let (right, wrong) = ("sk_live_k7Qz", "sk_live_k7Qx");
    assert_eq!(leaves_at_a_pause(&matcher, right), leaves_at_a_pause(&matcher, wrong));
}

/// A value in two layers of escapes of one family, after a prefix that looks like an escape of another family. It is
/// found wherever the stream is split, and also where the sender pauses.
#[test]
fn finds_a_value_in_two_layers_after_a_decoy_and_pauses() {
    let matcher = matcher(VALUE);
    let texts = [
        "%e6b37517a326d5876394c7\\u005cu003057347356743665525275385962",
        "\\6b3751&#55;a326d5876394c7057347356743665525275%3385962%",
        "\\6b37517a%332%2536d58763%394c7057347356743665525275385962",
        "%ek7Qz2mXv9LpW4s\\u005cu0056t6eRRu8Yb",
        "%edead k7Qz2mXv9L\\u0070W4s\\u005cu0056t6eRRu8Yb",
    ];
    let mut missed = Vec::new();
    for text in texts {
        let bytes = text.as_bytes();
        for (one, two) in (0..=bytes.len()).flat_map(|two| (0..=two).map(move |one| (one, two))) {
            let mut hold = Holdback::new(matcher.clone());
            let pieces = [&bytes[..one], &bytes[one..two], &bytes[two..]];
            let sent = |hold: &mut Holdback| {
                pieces.iter().try_for_each(|piece| hold.feed(Bytes::copy_from_slice(piece)).and_then(|()| hold.pause()))
            };
            if !passes(&matcher, text) && sent(&mut hold).and_then(|()| hold.end()).is_ok() {
                missed.push((text, one, two));
            }
        }
    }
    missed.retain(|(_, one, two)| one == two);
    assert!(missed.is_empty(), "{missed:?}");
}

/// The same without a pause, after a long run of skipped characters; and all of a long value, neither half of which is
/// found.
#[test]
fn finds_a_value_in_two_layers_after_a_decoy_and_a_long_run() {
    for run in [100, 600, 5000, 20_000, 100_000] {
        let text = format!("%e6b37517a326d{}5876394c7\\u005cu003057347356743665525275385962", "\n".repeat(run));
        assert!(!passes(&matcher(VALUE), &text), "{run}");
    }
}

#[test]
fn finds_a_long_value_in_two_layers_after_a_decoy_and_a_pause() {
    let value = "f7c1a83be05d924677aec1039bd8f2645e1d0c7b";
    let matcher = matcher(value);
    let coded: String = value.bytes().map(|b| format!("\\u005cu{b:04x}")).collect();
    // The first half in plain text, except for the bytes that the decoy consumes, with its last byte escaped.
    for text in [
        format!("%e{}{}", &value[..19], &coded[19 * 11..]),
        format!("%e{}{}{}", &value[..19], &coded[19 * 11..20 * 11], &value[20..39]),
        format!("%e{}{}{}{}", &value[..19], &coded[19 * 11..20 * 11], &value[20..39], &coded[39 * 11..]),
    ] {
        let mut hold = Holdback::new(matcher.clone());
        let (one, two) = text.as_bytes().split_at(3);
        let sent = hold.feed(Bytes::copy_from_slice(one)).and_then(|()| hold.pause());
        let sent = sent.and_then(|()| hold.feed(Bytes::copy_from_slice(two))).and_then(|()| hold.end());
        assert!(sent.is_err(), "{text}");
    }
}

/// The same without a pause: the result must not depend on where the stream is split.
#[test]
fn finds_a_value_in_two_layers_after_a_decoy_however_it_is_split() {
    let matcher = matcher(VALUE);
    let text = "&#xazdRej%254atWHY5THBXNHN%2557dDZlU%6cJ1%254f%2546li";
    assert!(!passes(&matcher, text));
    let mut hold = Holdback::new(matcher);
    let sent = [0..9, 9..13, 13..28, 28..35, 35..53].into_iter().try_for_each(|piece| {
        hold.feed(Bytes::copy_from_slice(&text.as_bytes()[piece])).and_then(|()| hold.release_beyond_lag())
    });
    assert!(sent.and_then(|()| hold.end()).is_err());
}

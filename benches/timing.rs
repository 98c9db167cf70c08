//! Measures whether the duration of a scan reveals how much of a guess is right.
//!
//! `cargo bench --bench timing` plays a sandbox that has the beginning of a value and tries the next characters: for
//! each guess it repeatedly sends compressed bodies that decode to nothing but the guess, and measures their duration.
//! It also sends the guess with a few escapes, pauses, and measures the bytes after that, which the scanner skips. It
//! does so for values of its own task, of another task, and for its token. A word after `--` selects rows by name;
//! `BODIES`, `GUESSES` and `MEGABYTES` in the environment change the size.
//!
//! Each row shows the time of a body with the right guess (the sum of the rounds' medians) as a ratio to that of the
//! wrong ones, the difference in standard deviations of the wrong guesses' times, the rank among all guesses (1 is the
//! slowest), and the number of rounds, out of 25 with a different value each, in which the right guess was the slowest
//! or the fastest. The number expected by chance is 25 divided by the number of guesses.

#![allow(clippy::unwrap_used, clippy::print_stdout, clippy::indexing_slicing)]

use std::io::Write;
use std::sync::Arc;
use std::time::Instant;

use bytes::Bytes;
use exeat::coding::{Coding, DecodeLimits, Decoder};
use exeat::leak::strength::Strength;
use exeat::leak::{Holdback, Matcher, Value, ValueOwner};
use exeat::model::name::CredentialName;
use flate2::Compression;
use flate2::write::GzEncoder;

const LETTERS: &[u8] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789";
const ROUNDS: usize = 25;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let number = |name: &str, usual: usize| std::env::var(name).ok().and_then(|n| n.parse().ok()).unwrap_or(usual);
    let size =
        Size { bodies: number("BODIES", 200), guesses: number("GUESSES", 8), bytes: number("MEGABYTES", 4) << 20 };
    println!("{} bodies a guess, {} guesses, {} MiB a body once decoded", size.bodies, size.guesses, size.bytes >> 20);
    println!("{:<44} {:>8} {:>7} {:>6} {:>8} {:>8}", "", "ratio", "sd", "rank", "slowest", "fastest");
    for whose in ["own", "other", "token"] {
        for known in [3, 8, 12] {
            for text in [Text::Plain, Text::Escaped, Text::Hex, Text::Paused] {
                let name = format!("{whose}, {known} bytes known, {}", text.name());
                if wanted.is_empty() || wanted.iter().any(|word| name.contains(word.as_str())) {
                    row(&name, whose, (known, text), &size);
                }
            }
        }
    }
}

struct Size {
    bodies: usize,
    guesses: usize,
    bytes: usize,
}

/// The encoding of a guess in a body.
#[derive(Clone, Copy)]
enum Text {
    Plain,
    /// With some escapes, so that the scanner reads it in several ways.
    Escaped,
    Hex,
    /// Once, and then a pause and line breaks.
    Paused,
}

/// The bytes of one measurement, in the order in which they are sent.
enum Body {
    Gzip(Vec<u8>),
    /// Pieces with a pause after each.
    Pieces(Vec<Vec<u8>>),
}

impl Text {
    fn name(self) -> &'static str {
        match self {
            Self::Plain => "as it is",
            Self::Escaped => "among escapes",
            Self::Hex => "in hex",
            Self::Paused => "before a pause",
        }
    }

    fn body(self, guess: &[u8], bytes: usize) -> Body {
        let unit: Vec<u8> = match self {
            Self::Plain => guess.to_vec(),
            Self::Escaped => [&guess.repeat(64 / guess.len()), &b"\\n"[..]].concat(),
            Self::Hex => guess.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()).collect(),
            Self::Paused => {
                let head = [&b"text ...... "[..], guess, b"%0a\\n&#10;"].concat();
                return Body::Pieces(vec![head, vec![b'\n'; bytes]]);
            }
        };
        coded(&unit.into_iter().cycle().take(bytes).collect::<Vec<_>>())
    }
}

fn row(name: &str, whose: &str, how: (usize, Text), size: &Size) {
    let each = size.bodies.div_ceil(ROUNDS);
    let (mut sums, mut slowest, mut fastest) = (vec![0.0; size.guesses], 0, 0);
    for _ in 0..ROUNDS {
        // The right guess is the first; the order in which they are tried changes with each body.
        let times = median_times(whose, how, size, each);
        let right = times[0];
        slowest += usize::from(times[1..].iter().all(|wrong| right > *wrong));
        fastest += usize::from(times[1..].iter().all(|wrong| right < *wrong));
        sums.iter_mut().zip(&times).for_each(|(sum, time)| *sum += time);
    }
    let (right, wrong) = (sums[0], &sums[1..]);
    let mean = wrong.iter().sum::<f64>() / wrong.len() as f64;
    let deviation = (wrong.iter().map(|it| (it - mean).powi(2)).sum::<f64>() / (wrong.len() - 1) as f64).sqrt();
    let rank = 1 + wrong.iter().filter(|it| **it > right).count();
    println!(
        "{name:<44} {:>8.4} {:>7.2} {rank:>6} {slowest:>8} {fastest:>8}",
        right / mean,
        (right - mean) / deviation
    );
}

/// Returns the median of the seconds that a body takes, for each guess.
fn median_times(whose: &str, (known, text): (usize, Text), size: &Size, each: usize) -> Vec<f64> {
    let value = random(40);
    let other = random(40);
    let credential = ValueOwner::Credential(CredentialName::new("KEY"));
    let held: Vec<(ValueOwner, &[u8])> = match whose {
        "own" => vec![(credential, &value)],
        "token" => vec![(credential, &other), (ValueOwner::Token, &value)],
        _ => vec![(credential, &other)],
    };
    let held = held.into_iter().map(|(whose, value)| Value::new(whose, value).with_halves(Strength::of(value)));
    let matcher = Arc::new(Matcher::new(held));
    let mut next: Vec<u8> = vec![value[known]];
    while next.len() < size.guesses {
        let letter = random(1)[0];
        if !next.contains(&letter) {
            next.push(letter);
        }
    }
    let body = |letter: &u8| text.body(&[&value[..known], &[*letter]].concat(), size.bytes);
    let bodies: Vec<Body> = next.iter().map(body).collect();
    let mut times = vec![Vec::new(); bodies.len()];
    for body in &bodies {
        time(body, &matcher);
    }
    for turn in 0..each {
        let first = usize::from(random(1)[0]) + turn;
        for n in 0..bodies.len() {
            let at = (first + n * 3) % bodies.len();
            times[at].push(time(&bodies[at], &matcher));
        }
    }
    times.iter_mut().for_each(|times| times.sort_by(f64::total_cmp));
    times.iter().map(|times| times[times.len() / 2]).collect()
}

/// Returns the seconds that the scan of a body takes.
fn time(body: &Body, matcher: &Arc<Matcher>) -> f64 {
    match body {
        Body::Gzip(body) => time_of_gzip(body, matcher),
        Body::Pieces(pieces) => time_of_pieces(pieces, matcher),
    }
}

fn time_of_pieces(pieces: &[Vec<u8>], matcher: &Arc<Matcher>) -> f64 {
    let began = Instant::now();
    let mut hold = Holdback::new(matcher.clone());
    for piece in pieces {
        for portion in piece.chunks(16 * 1024) {
            hold.feed(Bytes::copy_from_slice(portion)).unwrap();
            hold.release_beyond_lag().unwrap();
            while hold.take().is_some() {}
        }
        hold.pause().unwrap();
    }
    hold.end().unwrap();
    began.elapsed().as_secs_f64()
}

fn time_of_gzip(body: &[u8], matcher: &Arc<Matcher>) -> f64 {
    let bounds = DecodeLimits { total: u64::MAX, ratio: None };
    let began = Instant::now();
    let mut decoder = Decoder::new(&[Coding::Gzip], bounds, &Arc::default()).unwrap();
    let mut hold = Holdback::coded(matcher.clone());
    for portion in body.chunks(16 * 1024) {
        hold.send(Bytes::copy_from_slice(portion)).unwrap();
        let (mut rest, mut more) = (portion, true);
        while more {
            let mut out = Vec::new();
            more = decoder.decode(&mut rest, &mut out).unwrap();
            hold.read(&out).unwrap();
            hold.mark(decoder.settled());
            hold.release_beyond_lag().unwrap();
            while hold.take().is_some() {}
        }
    }
    hold.end().unwrap();
    began.elapsed().as_secs_f64()
}

fn coded(text: &[u8]) -> Body {
    let mut encoder = GzEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).unwrap();
    Body::Gzip(encoder.finish().unwrap())
}

fn random(length: usize) -> Vec<u8> {
    (0..length).map(|_| LETTERS[(getrandom::u32().unwrap() >> 8) as usize % LETTERS.len()]).collect()
}

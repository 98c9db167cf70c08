//! Measures the throughput and latency of stream scanning: input is queued, searched in every reading and returned.
//!
//! `cargo bench --bench leak` prints tables; a word after `--` selects the tables of that name (`throughput`, `pieces`,
//! `build`, `latency`), and `--only=WORDS` the kinds of data with these words in their name. Every figure is the median of seven runs over the same bytes, with the lowest and the highest.
//! The other engine and a plain copy are measured between those runs. `benches/stages` has the scanner among its stages,
//! with one kind of data and no other engine, to find regressions; this benchmark compares many kinds of data.

#![allow(clippy::indexing_slicing, clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::panic)]

mod leak_data;

use std::hint::black_box;
use std::sync::Arc;
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use daachorse::DoubleArrayAhoCorasick;
use exeat::leak::{Holdback, Matcher, Redactor};
use leak_data::{Random, WORDS, chat, matcher, sentence, values};

const SIZE: usize = 4 << 20;
const RUNS: usize = 7;

fn main() {
    let wanted: Vec<String> = std::env::args().skip(1).filter(|arg| !arg.starts_with('-')).collect();
    let wants = |name: &str| wanted.is_empty() || wanted.iter().any(|want| want == name);
    if wants("build") {
        build();
    }
    for n in [10, 1000] {
        let values = values(n);
        let subject =
            Subject { matcher: matcher(&values), other: DoubleArrayAhoCorasick::new(patterns(&values)).unwrap() };
        if wants("throughput") {
            subject.throughput(n, &values);
        }
        if wants("pieces") {
            subject.pieces(n, &values);
        }
        if wants("latency") {
            latency(n, &subject.matcher);
        }
    }
}

/// Returns the patterns of the index: plain, in base64 at three alignments, in hex.
fn patterns(values: &[Vec<u8>]) -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = values.iter().flat_map(|value| forms(value)).collect();
    all.sort_unstable();
    all.dedup();
    all
}

fn forms(value: &[u8]) -> Vec<Vec<u8>> {
    let aligned = |offset: usize| {
        let shifted = [&vec![0; offset], value].concat();
        let encoded = STANDARD_NO_PAD.encode(&shifted).into_bytes();
        encoded[(offset * 8).div_ceil(6)..shifted.len() * 8 / 6].to_vec()
    };
    let hex = value.iter().flat_map(|byte| format!("{byte:02x}").into_bytes()).collect();
    vec![value.to_vec(), aligned(0), aligned(1), aligned(2), hex]
}

/// Returns all kinds of data, by name.
fn kinds(values: &[Vec<u8>]) -> Vec<(&'static str, Bytes)> {
    let mut random = Random(7);
    let bytes: Vec<u8> = std::iter::repeat_with(|| random.next().to_le_bytes()[4]).take(SIZE).collect();
    let base64 = STANDARD_NO_PAD.encode(&bytes).into_bytes();
    let short: Vec<u8> = std::iter::repeat_with(|| {
        let value = random.pick(values);
        let forms = forms(value);
        let form = random.pick(&forms);
        // Half of a value would be a find.
        [&form[..form.len() / 2 - 2], b"~"].concat()
    })
    .take(SIZE / 40)
    .flatten()
    .collect();
    let encoded =
        |text: &[u8], each: &dyn Fn(u8) -> String| text.iter().take(SIZE).flat_map(|b| each(*b).into_bytes()).collect();
    let percent: Vec<u8> = encoded(&short, &|b| format!("%{b:02X}"));
    let twice: Vec<u8> = encoded(&short, &|b| format!("%25{b:02X}"));
    let unicode: Vec<u8> = encoded(&short, &|b| format!("\\u{b:04x}"));
    let turns = std::cell::Cell::new(0_usize);
    let mixed: Vec<u8> = encoded(&short, &|b| {
        turns.set(turns.get() + 1);
        match turns.get() * 7 % 5 {
            0 => format!("%{b:02X}"),
            1 => format!("\\u{b:04x}"),
            2 => format!("&#x{b:x};"),
            3 => format!("%5cu{b:04x}"),
            _ => char::from(b).to_string(),
        }
    });
    let mixed_in_base64 = format!("{{\"data\": \"{}\"}}", STANDARD_NO_PAD.encode(&mixed[..SIZE / 2])).into_bytes();
    let wrapped: Vec<u8> = base64.chunks(76).flat_map(|line| [line, b"\r\n"].concat()).collect();
    let rows = [
        ("random bytes", bytes),
        ("base64", base64),
        ("base64, 76 columns", wrapped),
        ("JSON of a chat", chat(&mut random, SIZE)),
        ("source, short lines", source(&mut random)),
        ("JSON in JSON", serde_json::to_string(&String::from_utf8(pretty(&mut random)).unwrap()).unwrap().into_bytes()),
        ("events", events(&mut random).concat()),
        ("prefixes", short),
        ("prefixes, %", percent),
        ("prefixes, %25", twice),
        ("prefixes, \\u", unicode),
        ("prefixes, all escapes", mixed),
        ("all escapes, in base64", mixed_in_base64),
    ];
    let only = std::env::args().find_map(|arg| arg.strip_prefix("--only=").map(str::to_owned)).unwrap_or_default();
    rows.into_iter().filter(|(name, _)| name.contains(&only)).map(|(name, data)| (name, fit(data))).collect()
}

/// Repeats or truncates the data to the measured size.
fn fit(mut data: Vec<u8>) -> Bytes {
    while data.len() < SIZE {
        data.extend_from_within(..data.len().min(SIZE - data.len()));
    }
    data.truncate(SIZE);
    data.into()
}

fn pretty(random: &mut Random) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < SIZE {
        let some = serde_json::json!({"name": *random.pick(&WORDS), "size": random.below(100_000), "of": [true, null],
            "more": {"path": format!("src/{}/{}.rs", random.pick(&WORDS), random.pick(&WORDS)), "kind": "file"}});
        out.extend_from_slice(serde_json::to_string_pretty(&some).unwrap().as_bytes());
    }
    out
}

fn source(random: &mut Random) -> Vec<u8> {
    let mut out = Vec::new();
    while out.len() < SIZE {
        let indent = " ".repeat(4 * random.below(4));
        let (one, two, three) = (random.pick(&WORDS), random.pick(&WORDS), random.below(1000));
        let line = match random.below(6) {
            0 => "}\n".to_owned(),
            1 => format!("let {one} = {two}.get({three});\n"),
            2 => format!("if {one} && !{two} {{\n"),
            3 => format!("println!(\"{one}: {{}}\\n\", &{two});\n"),
            4 => format!("// {}\n", sentence(random).trim()),
            _ => format!("fn {one}({two}: &[u8]) -> Option<usize> {{\n"),
        };
        out.extend_from_slice(format!("{indent}{line}").as_bytes());
    }
    out
}

/// Returns server-sent events of about 120 bytes.
fn events(random: &mut Random) -> Vec<Vec<u8>> {
    let mut size = 0;
    let mut out = Vec::new();
    while size < SIZE {
        let delta = format!(" {} {}{}", random.pick(&WORDS), random.pick(&WORDS), ["", "", "", "\n"][random.below(4)]);
        let choices = serde_json::json!([{"index": 0, "delta": {"content": delta}}]);
        let event = format!("data: {{\"id\":\"chatcmpl-{:020}\",\"choices\":{choices}}}\n\n", random.next());
        size += event.len();
        out.push(event.into_bytes());
    }
    out
}

/// The rates of several runs, in MB/s.
struct Rate(Vec<f64>);

impl Rate {
    fn median(&self) -> f64 {
        self.0[self.0.len() / 2]
    }
}

impl std::fmt::Display for Rate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let text = format!("{:.0} ({:.0}–{:.0})", self.median(), self.0[0], self.0[self.0.len() - 1]);
        f.pad(&text)
    }
}

/// Alternates between the runners, so that other load on the machine affects all of them.
fn race<const N: usize>(size: usize, runners: [&mut dyn FnMut(); N]) -> [Rate; N] {
    let mut times: [Vec<f64>; N] = std::array::from_fn(|_| Vec::new());
    let mut runners = runners;
    for run in 0..=RUNS {
        for (runner, times) in runners.iter_mut().zip(&mut times) {
            let start = Instant::now();
            runner();
            // The first run warms up.
            if run > 0 {
                times.push(size as f64 / start.elapsed().as_secs_f64() / 1e6);
            }
        }
    }
    times.map(|mut rates| {
        rates.sort_unstable_by(f64::total_cmp);
        Rate(rates)
    })
}

fn cut(data: &Bytes, piece: usize) -> Vec<Bytes> {
    (0..data.len()).step_by(piece).map(|at| data.slice(at..data.len().min(at + piece))).collect()
}

fn redact(matcher: &Arc<Matcher>, pieces: &[Bytes]) {
    let mut redactor = Redactor::new(matcher.clone());
    let mut size = 0;
    let mut take = |redactor: &mut Redactor| {
        while let Some(piece) = redactor.take() {
            size += black_box(piece).len();
        }
    };
    for piece in pieces {
        redactor.feed(piece.clone());
        take(&mut redactor);
    }
    redactor.end();
    take(&mut redactor);
    assert_eq!(size, pieces.iter().map(Bytes::len).sum::<usize>());
    assert!(redactor.count() <= 1, "nothing is there to be found but half of a value at the end");
}

fn hold(matcher: &Arc<Matcher>, pieces: &[Bytes]) {
    let mut hold = Holdback::new(matcher.clone());
    let mut size = 0;
    let mut take = |hold: &mut Holdback| {
        while let Some(piece) = hold.take() {
            size += black_box(piece).len();
        }
    };
    for piece in pieces {
        assert!(hold.feed(piece.clone()).is_ok() && hold.release_beyond_lag().is_ok(), "nothing is there to be found");
        take(&mut hold);
    }
    assert!(hold.end().is_ok());
    take(&mut hold);
    assert_eq!(size, pieces.iter().map(Bytes::len).sum::<usize>());
}

fn copy(pieces: &[Bytes]) {
    let mut buffer = vec![0; pieces[0].len()];
    for piece in pieces {
        buffer[..piece.len()].copy_from_slice(piece);
        black_box(&mut buffer);
    }
}

struct Subject {
    matcher: Arc<Matcher>,
    other: DoubleArrayAhoCorasick<u32>,
}

impl Subject {
    fn find(&self, pieces: &[Bytes]) {
        for piece in pieces {
            black_box(self.other.find_iter(piece).count());
        }
    }

    /// Measures the rates by kind of data, in pieces of 16 KiB.
    fn throughput(&self, n: usize, values: &[Vec<u8>]) {
        println!("\n{n} credentials, {SIZE} bytes in pieces of 16 KiB; MB/s");
        println!("{:22}{:>20}{:>20}{:>20}{:>20}{:>8}", "", "Redactor", "Hold", "daachorse", "copy", "ratio");
        for (name, data) in kinds(values) {
            let pieces = cut(&data, 16 << 10);
            let [back, out, other, plain] = race(
                data.len(),
                [
                    &mut || redact(&self.matcher, &pieces),
                    &mut || hold(&self.matcher, &pieces),
                    &mut || self.find(&pieces),
                    &mut || copy(&pieces),
                ],
            );
            let ratio = back.median() / other.median();
            println!("{name:22}{back:>20}{out:>20}{other:>20}{plain:>20}{ratio:>8.2}");
        }
    }

    /// Measures the rates by size of the pieces.
    fn pieces(&self, n: usize, values: &[Vec<u8>]) {
        println!("\n{n} credentials, by size of pieces; MB/s");
        println!("{:30}{:>20}{:>20}{:>20}{:>20}", "", "Redactor", "Hold", "daachorse", "copy");
        for (name, data) in kinds(values) {
            for (piece, size) in [(1, 1 << 17), (120, 1 << 20), (1 << 10, SIZE), (64 << 10, SIZE)] {
                let pieces = cut(&data.slice(..size), piece);
                let [back, out, other, plain] = race(
                    size,
                    [
                        &mut || redact(&self.matcher, &pieces),
                        &mut || hold(&self.matcher, &pieces),
                        &mut || self.find(&pieces),
                        &mut || copy(&pieces),
                    ],
                );
                println!("{name:22}{piece:>8}{back:>20}{out:>20}{other:>20}{plain:>20}");
            }
        }
    }
}

/// Measures the time to build an index, and the memory that it keeps.
fn build() {
    println!("\nbuild; median of seven");
    for n in [10, 1000] {
        let values = values(n);
        let mut times: Vec<Duration> = Vec::new();
        let mut kept = Vec::new();
        let before = resident();
        for _ in 0..RUNS {
            let start = Instant::now();
            kept.push(matcher(&values));
            times.push(start.elapsed());
        }
        let each = resident().saturating_sub(before) / RUNS;
        times.sort_unstable();
        let mut others: Vec<Duration> = Vec::new();
        for _ in 0..RUNS {
            let start = Instant::now();
            black_box(DoubleArrayAhoCorasick::<u32>::new(patterns(&values)).unwrap());
            others.push(start.elapsed());
        }
        others.sort_unstable();
        let heap = DoubleArrayAhoCorasick::<u32>::new(patterns(&values)).unwrap().heap_bytes();
        println!(
            "{n:5} credentials: {:?} ({:?}–{:?}), about {} KiB; daachorse {:?} and {} KiB",
            times[RUNS / 2],
            times[0],
            times[RUNS - 1],
            each / 1024,
            others[RUNS / 2],
            heap / 1024
        );
    }
}

/// Returns the resident memory, in bytes.
fn resident() -> usize {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap_or_default();
    line.trim().trim_end_matches(" kB").parse().map_or(0, |kib: usize| kib * 1024)
}

/// Measures the delay that a sender of events sees: from an event's arrival until all of it may be forwarded.
fn latency(n: usize, matcher: &Arc<Matcher>) {
    println!("\n{n} credentials, one event of about 120 bytes at a time; nanoseconds until it may go on");
    let events: Vec<Bytes> = events(&mut Random(9)).into_iter().map(Bytes::from).collect();
    let mut redactor = Redactor::new(matcher.clone());
    let mut with = Vec::new();
    let mut queue = std::collections::VecDeque::new();
    let mut without = Vec::new();
    for event in events.iter().cycle().take(RUNS * events.len()) {
        let start = Instant::now();
        redactor.feed(event.clone());
        redactor.pause();
        while let Some(piece) = redactor.take() {
            black_box(piece);
        }
        with.push(start.elapsed());
        let start = Instant::now();
        queue.push_back(event.clone());
        while let Some(piece) = queue.pop_front() {
            black_box(piece);
        }
        without.push(start.elapsed());
    }
    println!("{:18}{:>8}{:>8}{:>8}{:>8}{:>10}", "", "p50", "p90", "p99", "p99.9", "most");
    for (name, mut times) in [("with a redactor", with), ("without", without)] {
        times.sort_unstable();
        let at = |share: f64| times[((times.len() - 1) as f64 * share) as usize].as_nanos();
        println!("{name:18}{:>8}{:>8}{:>8}{:>8}{:>10}", at(0.5), at(0.9), at(0.99), at(0.999), at(1.0));
    }
}

//! Measures the rate of false finds in ordinary data and the speed of the search. These tests are ignored by default:
//!
//! ```sh
//! EXEAT_FAMILIES_LOOK_AT=/usr/share:~/.cargo/registry cargo test --release --lib families::measure -- --ignored --nocapture
//! ```

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;
use std::{env, fs};

use super::{Families, Family, FamilyStream};

/// The number of characters printed of a find. The rest may be a real key.
const SHOWN: usize = 14;

#[test]
#[ignore = "measures the folders in EXEAT_FAMILIES_LOOK_AT"]
fn finds_in_folders() {
    let families = Families::of(Family::ALL);
    let folders = env::var("EXEAT_FAMILIES_LOOK_AT").unwrap_or_default();
    for folder in folders.split(':').filter(|folder| !folder.is_empty()) {
        let mut counts: BTreeMap<Family, usize> = BTreeMap::new();
        let (mut files, mut bytes) = (0_usize, 0_usize);
        for path in files_in(Path::new(folder)) {
            let Ok(text) = fs::read(&path) else { continue };
            files += 1;
            bytes += text.len();
            let mut start = 0;
            while let Some((family, range)) = families.search(&text, start..text.len(), true).key {
                *counts.entry(family).or_default() += 1;
                let shown = &text[range.start..range.end.min(range.start + SHOWN)];
                println!("  {} at {} of {}: {}…", family.as_str(), range.start, path.display(), shown.escape_ascii());
                start = range.end;
            }
        }
        let counts: Vec<String> = counts.iter().map(|(family, count)| format!("{} {count}", family.as_str())).collect();
        println!("{folder}: {files} files, {:.1} MB: {}", bytes as f64 / 1e6, counts.join(", "));
    }
}

fn files_in(folder: &Path) -> Vec<PathBuf> {
    let mut folders = vec![folder.to_path_buf()];
    let mut files = Vec::new();
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                Ok(kind) if kind.is_file() => files.push(entry.path()),
                _ => {}
            }
        }
    }
    files
}

#[test]
#[ignore = "measures the speed of a release build"]
fn speed() {
    const SIZE: usize = 64 << 20;
    let mut state = 1_u64;
    let mut random = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let bytes: Vec<u8> = (0..SIZE).map(|_| random() as u8).collect();
    let alphabet = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
    let base64 = bytes.iter().map(|byte| alphabet[usize::from(byte & 63)]).collect();
    let json = fs::read(env::var("EXEAT_FAMILIES_JSON").unwrap_or_default()).unwrap_or_else(|_| {
        br#"{"id":"1b4e28ba-2fa1-11d2-883f-0016d3cca427","name":"some_package","tags":["a","b-c"],"size":12345},"#
            .to_vec()
    });
    let source = fs::read(env::var("EXEAT_FAMILIES_SOURCE").unwrap_or_default())
        .unwrap_or_else(|_| include_bytes!("tests.rs").iter().copied().filter(|byte| *byte != b'-').collect());
    let half = format!("-----BEGIN PGP PRIVATE KEY BLOCK-----\n.sk-.pypi-AgEIcHlwaS5vcmcCJ{}", "aB3".repeat(20));
    for (kind, text) in [
        ("random", bytes),
        ("base64url", base64),
        ("json", json.iter().copied().cycle().take(SIZE).collect::<Vec<u8>>()),
        ("source", source.iter().copied().cycle().take(SIZE).collect()),
        ("zeros", vec![0; SIZE]),
        // The slowest case: starts of keys that stay undecided as long as possible.
        ("half keys", half.into_bytes().into_iter().cycle().take(SIZE).collect()),
    ] {
        let families = Arc::new(Families::of(Family::ALL));
        for piece in [16 << 10, 1 << 10] {
            let mut best = f64::MAX;
            for _ in 0..5 {
                let started = Instant::now();
                let mut stream = FamilyStream::new(Arc::clone(&families));
                let found = text.chunks(piece).find_map(|piece| stream.feed(piece));
                assert_eq!(found, None, "{kind}");
                best = best.min(started.elapsed().as_secs_f64());
            }
            println!("{kind} in pieces of {piece}: {:.0} MB/s", SIZE as f64 / 1e6 / best);
        }
    }
}

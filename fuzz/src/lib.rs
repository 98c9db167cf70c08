//! Fuzz targets. The first bytes of each input determine how it is split.

mod script;

use std::path::PathBuf;
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant};

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::Bytes;
use exeat::coding::{Coding, DecodeLimits, Decoder, STEP};
use exeat::leak::{Holdback, Matcher, Redactor, ValueOwner};
use exeat::stages::message::websocket::{Downward, Upward};
use exeat::tls::hello::{self, Progress};
use exeat::tool::shell::Exercise;

/// The values to find: one with each kind of character, and one that is half of another.
pub const VALUES: [&[u8]; 3] = [b"ghp_0123456789abcdefghij", b"s3cr3t/+? value", b"s3cr3t/+? value of another"];

static MATCHER: LazyLock<Arc<Matcher>> =
    LazyLock::new(|| Arc::new(Matcher::new(VALUES.into_iter().map(|value| (ValueOwner::Token, value)))));

/// A target: its name, its function, and its initial inputs.
pub type Target = (&'static str, fn(&[u8]), fn() -> Vec<Vec<u8>>);

/// All targets.
pub const TARGETS: [Target; 6] = [
    ("coding", coding, codings),
    ("hello", hello, hellos),
    ("scan", scan, texts),
    ("script_runs", runs, choices),
    ("scripts", scripts, choices),
    ("websocket", websocket, frames),
];

/// Splits the rest of an input as its first bytes determine.
fn cut(data: &[u8]) -> (Vec<&[u8]>, &[u8]) {
    let (head, text) = data.split_at(data.len().min(4));
    let mut pieces = Vec::new();
    let mut rest = text;
    for at in 0.. {
        if rest.is_empty() || head.is_empty() {
            break;
        }
        let size = usize::from(head[at % head.len()] ^ (at / head.len()) as u8).max(1);
        let (piece, more) = rest.split_at(size.min(rest.len()));
        pieces.push(piece);
        rest = more;
    }
    (pieces, text)
}

fn redacted(pieces: &[&[u8]], pausing: bool) -> (Vec<u8>, bool) {
    let mut redactor = Redactor::new(MATCHER.clone());
    let mut out = Vec::new();
    for piece in pieces {
        redactor.feed(Bytes::copy_from_slice(piece));
        if pausing {
            redactor.pause();
        }
        out.extend(std::iter::from_fn(|| redactor.take()).flatten());
    }
    redactor.end();
    out.extend(std::iter::from_fn(|| redactor.take()).flatten());
    assert_eq!(redactor.held(), 0);
    (out, redactor.count() > 0)
}

fn sent(pieces: &[&[u8]], pausing: bool) -> Option<Vec<u8>> {
    let mut hold = Holdback::new(MATCHER.clone());
    let mut out = Vec::new();
    for piece in pieces {
        hold.feed(Bytes::copy_from_slice(piece)).ok()?;
        if pausing {
            hold.pause().ok()?;
        }
        hold.release_beyond_lag().ok()?;
        out.extend(std::iter::from_fn(|| hold.take()).flatten());
    }
    hold.end().ok()?;
    out.extend(std::iter::from_fn(|| hold.take()).flatten());
    Some(out)
}

/// Returns true if a text contains a value in plain text, base64 or hex. Line breaks and the whitespace after them are
/// ignored, because indentation cannot be distinguished from whitespace of the value.
fn holds_a_value(text: &[u8]) -> bool {
    let mut is_indented = false;
    let counts = |byte: &u8| {
        is_indented = matches!(byte, b'\r' | b'\n') || (is_indented && matches!(byte, b' ' | b'\t'));
        !is_indented
    };
    let joined: Vec<u8> = text.iter().copied().filter(counts).collect();
    VALUES.iter().any(|value| {
        let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        let within = |part: &[u8]| joined.windows(part.len()).any(|some| some == part);
        within(value)
            || within(hex.as_bytes())
            || within(&STANDARD_NO_PAD.encode(value).as_bytes()[..value.len() * 8 / 6])
    })
}

/// The result of a scan does not depend on how a stream is split; it keeps the length and removes the values.
pub fn scan(data: &[u8]) {
    let (pieces, text) = cut(data);
    let (whole, found) = redacted(&[text], false);
    assert_eq!(whole.len(), text.len());
    assert_eq!(redacted(&pieces, false), (whole.clone(), found));
    let (paused, _) = redacted(&pieces, true);
    assert_eq!(paused.len(), text.len());
    assert!(!holds_a_value(&whole) && !holds_a_value(&paused));
    let has = MATCHER.find(text).is_some();
    assert!(has || !holds_a_value(text));
    for sent in [sent(&[text], false), sent(&pieces, false)] {
        assert_eq!(sent.as_deref(), (!has).then_some(text));
    }
    // A pause within a value is a find too.
    assert!(!has || sent(&pieces, true).is_none());
}

/// Decoders respect their limits, and their output does not depend on how the input is split.
pub fn coding(data: &[u8]) {
    let Some((kinds, data)) = data.split_first() else { return };
    let kind = |bits: u8| match bits & 7 {
        0 | 4 => Coding::Brotli,
        1 | 5 => Coding::Deflate,
        2 | 6 => Coding::Gzip,
        3 => Coding::Zstd,
        _ => Coding::AwsChunked,
    };
    let codings = if kinds & 0x80 == 0 { vec![kind(*kinds)] } else { vec![kind(*kinds), kind(kinds >> 3)] };
    let bounds = DecodeLimits { total: 1 << 20, ratio: Some(100) };
    let decode = |pieces: &[&[u8]]| {
        let mut decoder = Decoder::new(&codings, bounds, &Arc::default()).expect("no more codings than may be");
        let mut all = Vec::new();
        for piece in pieces {
            let mut rest = *piece;
            let mut idle = 0;
            loop {
                let (before, mut out) = (rest.len(), Vec::new());
                let goes_on = decoder.decode(&mut rest, &mut out).ok()?;
                assert!(out.len() <= STEP && rest.len() <= before);
                all.extend_from_slice(&out);
                assert!(all.len() as u64 <= bounds.total);
                if !goes_on {
                    break;
                }
                // One decoder may have no output for the next, but not repeatedly.
                idle = if out.is_empty() && rest.len() == before { idle + 1 } else { 0 };
                assert!(idle < 16, "it goes on without an end");
            }
        }
        decoder.end().ok().map(|()| all)
    };
    let (pieces, text) = cut(data);
    let (whole, parts) = (decode(&[text]), decode(&pieces));
    assert_eq!(whole, parts);
}

/// Whether frames pass does not depend on how they are split, and forwarded frames contain no value.
pub fn websocket(data: &[u8]) {
    let (pieces, text) = cut(data);
    for matcher in [MATCHER.clone(), Arc::new(Matcher::default())] {
        let up = |pieces: &[&[u8]]| {
            let (mut up, mut out) = (Upward::new(matcher.clone()), Vec::new());
            let stop = pieces.iter().find_map(|piece| up.pass(piece, &mut out).err());
            (out, stop, up.is_between_frames())
        };
        let (whole, stop, ends) = up(&[text]);
        let (parts, stop_parts, ends_parts) = up(&pieces);
        assert_eq!(stop, stop_parts);
        match stop {
            None => assert_eq!((&whole, ends), (&parts, ends_parts)),
            // A find releases no byte of its piece, and a part of a broken frame may have been released.
            Some(_) => assert!(parts.starts_with(&whole) || whole.starts_with(&parts)),
        }
        assert!(text.starts_with(&parts) || !matcher.is_empty());
        let redactor = || (!matcher.is_empty()).then(|| Redactor::new(matcher.clone()));
        let down = |pieces: &[&[u8]]| {
            let (mut down, mut out) = (Downward::new(redactor()), Vec::new());
            let stop = pieces.iter().find_map(|piece| down.pass(piece, &mut out, |_| Ok(())).err());
            let ends = down.is_between_frames();
            let paused = down.pause();
            assert!(stop.is_some() || !ends || paused.is_empty());
            (out, stop, ends)
        };
        let (whole, stop, _) = down(&[text]);
        let (parts, stop_parts, _) = down(&pieces);
        assert_eq!(stop, stop_parts);
        assert!(parts.len() >= whole.len() && parts.len() <= text.len());
        assert!(parts.starts_with(&whole));
    }
}

/// The result of parsing a prefix of a hello stays valid when more bytes arrive.
pub fn hello(data: &[u8]) {
    let whole = hello::read(data);
    for end in 0..data.len().min(300) {
        match hello::read(&data[..end]) {
            Ok(Progress::Partial) => {}
            Ok(done) => assert_eq!(Ok(done), whole),
            Err(_) => assert!(whole.is_err()),
        }
    }
}

/// The options that the commands of scripts can have.
const OPTIONS: [&str; 47] = [
    "-C",
    "-E",
    "-a",
    "-b",
    "-c",
    "-d",
    "-l",
    "-m",
    "-n",
    "-r",
    "-s",
    "-u",
    "-v",
    "-x",
    "-A",
    "--",
    "--abort",
    "--all",
    "--always",
    "--branch",
    "--cached",
    "--deleted",
    "--ff-only",
    "--graph",
    "--ignored",
    "--list",
    "--long",
    "--modified",
    "--name-only",
    "--name-status",
    "--no-decorate",
    "--no-ext-diff",
    "--no-ff",
    "--no-rebase",
    "--no-textconv",
    "--oneline",
    "--others",
    "--porcelain",
    "--reverse",
    "--set-upstream",
    "--short",
    "--squash",
    "--staged",
    "--stat",
    "--tags",
    "--version",
    "--word-diff",
];

/// A directory with a workspace in it, and a sandbox that works in the workspace.
struct Place {
    directory: PathBuf,
    exercise: Exercise,
}

/// Nothing of it gets into a script, or out of a sandbox.
const OUTSIDE: &str = "9f3c-outside-of-the-workspace-71d0";

thread_local! {
    static PLACE: Place = Place::new();
}

impl Place {
    fn new() -> Self {
        let directory = std::env::temp_dir().join(format!("exeat-fuzz-{}", std::process::id()));
        let workspace = directory.join("workspace");
        std::fs::create_dir_all(&workspace).expect("the directory for temporary files can be written to");
        let program = std::env::current_exe().expect("the program is known");
        let exercise = Exercise::new(&workspace, program).expect("the sandbox is complete");
        std::fs::write(directory.join("outside"), OUTSIDE).expect("a file");
        let place = Self { directory, exercise };
        place.fill();
        place
    }

    /// Restores the contents of the workspace.
    fn fill(&self) {
        let workspace = self.directory.join("workspace");
        for entry in std::fs::read_dir(&workspace).expect("the workspace").flatten() {
            let path = entry.path();
            let is_directory = entry.file_type().is_ok_and(|kind| kind.is_dir());
            let removed = if is_directory { std::fs::remove_dir_all(&path) } else { std::fs::remove_file(&path) };
            removed.expect("a file of the workspace");
        }
        std::fs::create_dir(workspace.join("d")).expect("a directory");
        for (name, content) in
            [("a", "hello\nx {{k}}\n"), ("b.txt", "a,b\n1,2\n"), ("d/e.json", "{\"k\":[1,{\"x\":2}]}")]
        {
            std::fs::write(workspace.join(name), content).expect("a file");
        }
        for (name, to) in [("link", "../outside"), ("dir-link", "..")] {
            std::os::unix::fs::symlink(to, workspace.join(name)).expect("a link");
        }
    }

    /// Checks that nothing but the workspace has changed.
    fn check(&self) {
        let entries = std::fs::read_dir(&self.directory).expect("the directory").flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name()).collect();
        names.sort();
        assert_eq!(names, ["outside", "workspace"]);
        assert_eq!(std::fs::read_to_string(self.directory.join("outside")).expect("the file"), OUTSIDE);
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.directory);
    }
}

/// Every script compiles or has its problems told, and the commands in it have known options, no protected branches and no paths
/// outside.
pub fn scripts(data: &[u8]) {
    let commands = PLACE.with(|place| place.exercise.commands(&script::script(data)));
    for command in commands.unwrap_or_default() {
        check_command(&command);
    }
}

fn check_command(command: &[String]) {
    let is_text = |at: usize| at > 0 && command[at - 1] == "-m";
    assert!(["cat", "cp", "git", "tag"].contains(&command[0].as_str()), "{command:?}");
    for (at, arg) in command.iter().enumerate().skip(1) {
        assert!(!arg.chars().any(char::is_control), "{command:?}");
        assert!(!arg.starts_with('-') || OPTIONS.contains(&arg.as_str()), "{command:?}");
        assert!(is_text(at) || !arg.split('/').any(|part| part == ".."), "{command:?}");
        assert!(!arg.starts_with('/') || is_text(at) || arg.starts_with("/workspace"), "{command:?}");
        let names = arg.split([':', '+']).map(|name| name.trim_start_matches("refs/heads/"));
        let is_branch = command[0] == "git" && !is_text(at);
        assert!(!is_branch || !names.into_iter().any(|name| ["main", "master", "HEAD"].contains(&name)), "{command:?}");
        assert!(!is_branch || !arg.starts_with("https:") || arg == "https://api.test/shop.git", "{command:?}");
    }
}

/// Every script that compiles runs to its end, in a confined process of this program. It reads and changes nothing outside of the
/// workspace. The process does not end by itself, which it does where it panics.
pub fn runs(data: &[u8]) {
    let script = script::script(data);
    PLACE.with(|place| {
        let started = Instant::now();
        if let Ok((_, text)) = place.exercise.run(&script) {
            assert!(!text.contains("the process of the sandbox"), "{text}");
            assert!(!text.contains(OUTSIDE) && !text.contains("root:x:0:0"), "{text}");
            assert!(started.elapsed() < Duration::from_secs(12), "{:?}", started.elapsed());
            place.check();
            place.fill();
        }
    });
}

/// The inputs are choices, so that any bytes will do.
fn choices() -> Vec<Vec<u8>> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (state >> 24) as u8
    };
    (0..64).map(|at| (0..40 + at * 16).map(|_| next()).collect()).collect()
}

fn texts() -> Vec<Vec<u8>> {
    let mut all: Vec<Vec<u8>> = vec![
        br#"1234{"a":"\u0067hp_\/\\u{41}%25\"&amp;&#65;&#x41 %u0041\ud83d\ude00"}"#.to_vec(),
        b"\x01\x01\x01\x01100% of &nothing; and \\u{000000000\r\n".to_vec(),
    ];
    for value in VALUES {
        let each = |form: &dyn Fn(u8) -> String| value.iter().map(|byte| form(*byte)).collect::<String>().into_bytes();
        let forms = [
            value.to_vec(),
            STANDARD_NO_PAD.encode(value).into_bytes(),
            STANDARD_NO_PAD.encode([b"x", value].concat()).into_bytes(),
            each(&|byte| format!("{byte:02x}")),
            each(&|byte| format!("%{byte:02X}")),
            each(&|byte| format!("%25{byte:02x}")),
            each(&|byte| format!("\\u{byte:04x}")),
            each(&|byte| format!("&#{byte};")),
            each(&|byte| format!("\\u00{byte:02x}\n")),
            value.chunks(5).collect::<Vec<_>>().join(&b"\r\n"[..]),
        ];
        all.extend(forms.into_iter().map(|form| [b"\x07\x03\xff\x10before ", &form[..], b" after"].concat()));
        // An escape within an escape, after a prefix that looks like an escape of another family.
        let hex: String = value.iter().map(|byte| format!("{byte:02x}")).collect();
        let (before, rest) = hex.split_at(hex.len() / 2);
        let (one, behind) = rest.split_at(1);
        let one = one.as_bytes()[0];
        let nested = [
            format!("\\u005cu{one:04x}"),
            format!("%25{one:02x}"),
            format!("&amp;#{one};"),
            format!("%5cu{one:04x}"),
            format!("&#37;{one:02x}"),
        ];
        let decoys = ["%e", "%u", "&#x", "&#", "\\x", "\\", "%25e"];
        for (decoy, nested) in decoys.iter().flat_map(|decoy| nested.iter().map(move |nested| (decoy, nested))) {
            all.push(format!("\x03\x05\x01\x02{decoy}{before}{nested}{behind}").into_bytes());
        }
    }
    all
}

fn codings() -> Vec<Vec<u8>> {
    // `hello hello hello` in each coding, and an empty gzip.
    let some: [&[u8]; 6] = [
        &[
            0, 9, 9, 9, 9, 0x0b, 0x08, 0x80, b'h', b'e', b'l', b'l', b'o', b' ', b'h', b'e', b'l', b'l', b'o', b' ',
            b'h', b'e', b'l', b'l', b'o', 3,
        ],
        &[1, 9, 9, 9, 9, 0x78, 0x9c, 0xcb, 0x48, 0xcd, 0xc9, 0xc9, 0x57, 0xc8, 0x40, 0x27, 0, 0x3a, 0xc1, 6, 0x5c],
        &[2, 9, 9, 9, 9, 0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0],
        &[3, 9, 9, 9, 9, 0x28, 0xb5, 0x2f, 0xfd, 0x20, 5, 0x29, 0, 0, b'h', b'e', b'l', b'l', b'o'],
        b"\x07\x09\x09\x09\x095;chunk-signature=00ff\r\nhello\r\n0\r\nx-amz-checksum-crc32:NhCmhg==\r\n\r\n",
        &[0x93, 9, 9, 9, 9, 0x28, 0xb5, 0x2f, 0xfd, 0x20, 5, 0x29, 0, 0, b'h', b'e', b'l', b'l', b'o'],
    ];
    some.map(<[u8]>::to_vec).to_vec()
}

fn frames() -> Vec<Vec<u8>> {
    let masked = |head: u8, payload: &[u8]| {
        let mut frame = vec![4, 4, 4, 4, head, 0x80 | payload.len() as u8, 1, 2, 3, 4];
        frame.extend(payload.iter().zip([1, 2, 3, 4].iter().cycle()).map(|(byte, mask)| byte ^ mask));
        frame
    };
    let plain = |head: u8, payload: &[u8]| [&[5, 5, 5, 5, head, payload.len() as u8][..], payload].concat();
    let mut all = vec![plain(0x88, &[3, 0xe8]), masked(0x88, &[3, 0xe8]), masked(0x89, b"ping"), plain(0x01, b"frag")];
    for value in VALUES {
        all.extend([masked(0x81, value), plain(0x82, value), masked(0x01, value), plain(0x8a, value)]);
    }
    let several = |frame: &dyn Fn(u8, &[u8]) -> Vec<u8>| {
        let frames =
            [(0x01, &b"a\xe2"[..]), (0x89, b"ping"), (0x80, b"\x82\xac"), (0x81, b"text"), (0x88, b"\x03\xe8bye")];
        let wire = frames.map(|(head, payload)| frame(head, payload).split_off(4)).concat();
        [&[3, 1, 7, 2][..], &wire].concat()
    };
    all.extend([several(&masked), several(&plain)]);
    all
}

fn hellos() -> Vec<Vec<u8>> {
    let name = [0, 0, 0, 16, 0, 14, 0, 0, 11, b'a', b'.', b'e', b'x', b'a', b'm', b'p', b'l', b'e', b'.', b'x'];
    let extensions = [&name[..], &[0xfe, 0x0d, 0, 1, 0]].concat();
    let rest = [&[0, 0, 2, 0x13, 1, 1, 0, 0, extensions.len() as u8][..], &extensions].concat();
    let body = [&[3, 3][..], &[7; 32], &rest].concat();
    let message = [&[1, 0, 0, body.len() as u8][..], &body].concat();
    let record = |part: &[u8]| [&[22, 3, 1, 0, part.len() as u8][..], part].concat();
    vec![record(&message), message.chunks(9).flat_map(record).collect()]
}

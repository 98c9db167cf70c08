//! Parts of a value in answers. A growing part confirms guesses and counts each time; the echo of a sent value does not
//! count, wherever it is split.

use std::sync::Arc;

use bytes::Bytes;
use exeat::leak::strength::Strength;
use exeat::leak::{Matcher, Redactor, Value, ValueOwner};
use exeat::model::name::CredentialName;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt};

use super::blanks_and_lists::lists;
use super::origin::Words;
use super::road::{Ask, Way, unmasked, upgrade};
use super::{Field, Origins, config};
use crate::lab::{LabBuilder, TIMEOUT};

const SHORT: &str = "k7Qz2mXv9LpW4sVt6eRRu8Yb";
const LONG: &str = "k7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5JfTgA1xZq";
/// A key with GitHub's prefix.
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

/// Starts a proxy that stops an execution after three finds.
async fn three_finds(value: &str) -> Field {
    let builder = LabBuilder::new().await;
    let origins = Origins::start(&builder).await;
    let ports = [origins.plain.port, origins.h1.port, origins.h2.port];
    let text = config(&builder, &ports, &[("KEY", value)]).replace("max_finds = 1000000", "max_finds = 3");
    Field { lab: builder.proxy(&text).await, origins }
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
fn a_part_that_grows_at_each_pause_counts_each_time() {
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

/// An echo of the sent value is not a find, wherever it is split.
#[test]
fn an_echo_of_a_key_with_a_public_prefix_is_no_find_however_it_is_split() {
    let mut counted = Vec::new();
    for value in [SHORT, LONG, PREFIXED, "sk-ant-api03-k7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5JfTgA1xZqk7Qz2mXv9LpW"] {
        let text = format!("echo {value} and more");
        for cut in 0..=text.len() {
            for pauses in [false, true] {
                let redactor = Redactor::with_sent(matcher(value), Some(key()));
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

/// The same against the daemon: three honest echoes in small pieces stop no execution.
#[tokio::test(flavor = "multi_thread")]
async fn three_echoes_in_small_pieces_stop_no_execution() {
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

/// A whole value in a list of numbers is overwritten, even if a pause directly follows its last digit.
#[test]
fn a_whole_value_in_a_list_of_numbers_is_not_shown_at_a_pause() {
    let url = "https://hooks.slack.com/services/T01ABCDEF23/B04GHIJKL56/k7Qz2mXv9LpW4sVt6eRRu8Yb";
    let mut shown = Vec::new();
    for list in lists(url) {
        let text = format!("{{\"data\":[{list}]}}");
        let (out, finds) = through(Redactor::new(matcher(url)), text.as_bytes(), text.len() - 2, true);
        if out == text.as_bytes() {
            shown.push((text, finds));
        }
    }
    assert!(shown.is_empty(), "{shown:#?}");
}

/// An origin that knows the first half tries the characters of the rest in many frames that arrive together. Each mask is
/// a find, and the frames after the last permitted find are not sent.
#[tokio::test(flavor = "multi_thread")]
async fn frames_that_arrive_together_confirm_no_more_guesses_than_the_limit() {
    let half = LONG.len() / 2;
    let mut guesses = Vec::new();
    for at in half..LONG.len() {
        let right = LONG.as_bytes()[at];
        for guess in (b'0'..=b'z').filter(u8::is_ascii_alphanumeric) {
            guesses.push([&LONG.as_bytes()[..at], &[guess]].concat());
            if guess == right {
                break;
            }
        }
    }
    let frames = guesses.iter().map(|text| [unmasked(1, true, text), unmasked(1, true, b" ")].concat());
    for (way, pieces) in
        [(Way::Http, vec![frames.clone().flatten().collect()]), (Way::Https, frames.clone().collect::<Vec<_>>())]
    {
        let field = three_finds(LONG).await;
        field.origin(way).says("guess", Words { pieces, ..Words::default() });
        let (mut stream, mut received) = field.socket(way, "guess").await;
        let end = async { while stream.read_buf(&mut received).await.is_ok_and(|n| n > 0) {} };
        tokio::time::timeout(TIMEOUT, end).await.expect("the execution is stopped");
        let masks = received.split(|byte| *byte != b'*').filter(|run| run.len() >= half).count();
        assert!(masks < 3, "{way:?}: {masks} masks in {} bytes", received.len());
        let line = field.lab.ended(0).await;
        assert_eq!(line["code"], "execution_stopped", "{line}");
    }
}

/// The end of a field is an end: a part of a value there is overwritten, and is a find.
#[tokio::test(flavor = "multi_thread")]
async fn a_part_at_the_end_of_a_field_or_trailer_of_an_answer_is_overwritten() {
    let field = Field::holding(&[("KEY", SHORT)]).await;
    let part = &SHORT.as_bytes()[..SHORT.len() - 1];
    for way in Way::ALL {
        let words = Words {
            status: 200,
            fields: vec![("x-echo".into(), [b"key ", part].concat())],
            pieces: vec![b"nothing".to_vec()],
            trailers: vec![("x-last".into(), part.to_vec())],
            ..Words::default()
        };
        field.origin(way).says("part", words);
        let ask = Ask { fields: vec![("te".into(), "trailers".into())], ..Ask::default() };
        let answer = field.road(way).send("part", &ask).await;
        let mask = "*".repeat(part.len());
        assert_eq!(answer.header("x-echo"), Some(format!("key {mask}").as_str()), "{way:?}: {answer:?}");
        let trailer = answer.trailers.get("x-last").map(|value| value.to_str().unwrap());
        assert!(trailer.is_none_or(|value| value == mask), "{way:?}: {trailer:?}");
    }
}

/// Reads until a mask or the end.
async fn shows_mask(stream: &mut (impl AsyncRead + Unpin)) -> bool {
    let mut received = Vec::new();
    let has_mask = |received: &[u8]| received.windows(8).any(|bytes| bytes == b"********");
    let read = async {
        while !has_mask(&received)
            && !received.ends_with(b"}\n")
            && stream.read_buf(&mut received).await.is_ok_and(|n| n > 0)
        {}
    };
    tokio::time::timeout(TIMEOUT, read).await.expect("a mask or an end");
    has_mask(&received)
}

/// The part of a sent value at a pause is no find while the rest may follow. Such parts in open responses confirm guesses
/// all the same, so only a few are shown together.
#[tokio::test(flavor = "multi_thread")]
async fn parts_of_the_sent_value_in_open_responses_confirm_no_more_guesses_than_the_limit() {
    let field = three_finds(SHORT).await;
    let part = SHORT.as_bytes()[..SHORT.len() / 2 + 1].to_vec();
    let words = Words { status: 200, pieces: vec![part], silent: true, ..Words::default() };
    field.origin(Way::Https).says("part", words);
    let ask = Ask { fields: vec![("Exeat-Credential".into(), "KEY".into())], ..Ask::default() };
    let (mut open, mut shown) = (Vec::new(), 0);
    for _ in 0..8 {
        let mut stream = field.wire(Way::Https).await;
        stream.write_all(&[&field.head(Way::Https, "GET", "part", &ask)[..], b"\r\n"].concat()).await.unwrap();
        shown += usize::from(shows_mask(&mut stream).await);
        open.push(stream);
    }
    assert!(shown < 3, "{shown} masks");
}

/// The find that stops the execution is in a frame whose head has been written. No close frame is written within that frame.
#[tokio::test(flavor = "multi_thread")]
async fn a_stop_within_a_frame_leaves_no_close_frame_in_it() {
    let field = three_finds(SHORT).await;
    let part = &SHORT.as_bytes()[..SHORT.len() / 2 + 1];
    let fragment = unmasked(1, false, part);
    let words = Words { pieces: vec![fragment.clone()], silent: true, ..Words::default() };
    field.origin(Way::Http).says("part", words);
    let mut ended = Vec::new();
    for n in 0..3 {
        let (mut stream, mut received) = field.socket(Way::Http, "part").await;
        let whole = |received: &[u8]| received.len() >= fragment.len();
        let read = async {
            while (n == 2 || !whole(&received)) && stream.read_buf(&mut received).await.is_ok_and(|read| read > 0) {}
        };
        tokio::time::timeout(TIMEOUT, read).await.expect("a mask or the end");
        if n < 2 {
            assert!(received.ends_with(&vec![b'*'; part.len()]), "{n}: {received:?}");
        }
        ended.push((stream, received));
    }
    let (_, last) = ended.pop().unwrap();
    assert_eq!(last, fragment[..2], "the head of the frame, and nothing within it");
}

/// The fields of a WebSocket handshake count before it is answered.
#[tokio::test(flavor = "multi_thread")]
async fn fields_of_a_handshake_confirm_no_more_guesses_than_the_limit() {
    let field = three_finds(SHORT).await;
    let fields = vec![("x-echo".to_owned(), SHORT.as_bytes()[..SHORT.len() - 2].to_vec())];
    let (mut open, mut shown) = (Vec::new(), 0);
    for _ in 0..6 {
        field.origin(Way::Https).says("part", Words { fields: fields.clone(), ..Words::default() });
        let mut stream = field.wire(Way::Https).await;
        let ask = Ask { fields: upgrade(), ..Ask::default() };
        stream.write_all(&[&field.head(Way::Https, "GET", "part", &ask)[..], b"\r\n"].concat()).await.unwrap();
        shown += usize::from(shows_mask(&mut stream).await);
        open.push(stream);
    }
    assert!(shown < 3, "{shown} masks");
    assert_eq!(
        field.lab.get(&format!("https://api.test:{}/", field.origins.h1.port)).await.header("exeat-refusal"),
        Some("execution_stopped")
    );
}

/// A part at the end of a path is a find. The log shows neither the part nor its encodings.
#[tokio::test(flavor = "multi_thread")]
async fn a_part_at_the_end_of_a_path_is_not_in_the_log() {
    let field = Field::holding(&[("KEY", SHORT)]).await;
    let part = &SHORT[..SHORT.len() - 1];
    let percent: String = part.bytes().map(|byte| format!("%{byte:02x}")).collect();
    let base64 = base64::Engine::encode(&base64::engine::general_purpose::URL_SAFE_NO_PAD, &part[..21]);
    let cases = [(part, ""), (percent.as_str(), ""), (base64.as_str(), ""), (part, "?"), (percent.as_str(), "?x=1")];
    for (n, (written, query)) in cases.into_iter().enumerate() {
        let url = format!("https://api.test:{}/s/{written}{query}", field.origins.h1.port);
        assert_eq!(field.lab.get(&url).await.header("exeat-refusal"), Some("leak_detected"), "{written}");
        let line = field.lab.ended(n).await;
        assert_eq!(
            (&line["code"], &line["path"]),
            (&"leak_detected".into(), &format!("/s/{}", "*".repeat(written.len())).into())
        );
    }
}

/// Returns the finds and the redacted text of a field.
fn field_finds(value: &str, sent: Option<CredentialName>, text: &str) -> (u64, String) {
    let mut redactor = Redactor::with_sent(matcher(value), sent);
    let redacted = redactor.redact_text(text.as_bytes());
    let shown = redacted.map_or(text.to_owned(), |bytes| String::from_utf8(bytes).unwrap());
    (redactor.finds(true), shown)
}

#[test]
fn a_part_at_the_end_of_a_field_counts_once() {
    for sent in [None, Some(key())] {
        for (value, from, to, want) in [
            (SHORT, 0, 15, 1),
            (SHORT, 0, 7, 0),
            (LONG, 0, 25, 1),
            (LONG, 0, 20, 1),
            (LONG, 0, 10, 0),
            (LONG, 20, 40, 1),
            (LONG, 21, 40, 0),
        ] {
            let text = format!("key {}", &value[from..to]);
            let (finds, shown) = field_finds(value, sent.clone(), &text);
            let masked = format!("key {}", "*".repeat(to - from));
            assert_eq!((finds, shown), (want, if want > 0 { masked } else { text.clone() }), "{text} {sent:?}");
        }
        let (finds, shown) = field_finds(SHORT, sent.clone(), &format!("{}...", &SHORT[..20]));
        assert_eq!((finds, shown), (0, format!("{}...", &SHORT[..20])), "followed by other text");
        let whole = field_finds(SHORT, sent.clone(), SHORT).0;
        assert_eq!(whole, u64::from(sent.is_none()), "the whole value");
    }
}

/// The end of a body is an end, also if an escape seems to begin there.
#[test]
fn a_part_at_the_end_of_an_answer_before_an_incomplete_escape_is_overwritten() {
    let matcher = matcher(SHORT);
    let part = &SHORT[..SHORT.len() - 1];
    let json: String = part.bytes().map(|byte| format!("\\u{byte:04x}")).collect();
    for end in ["", "%", "\\", "&", "&#", "%2", "\\u00"] {
        for text in [format!("{part}{end}"), format!("{json}{end}")] {
            assert!(matcher.find(text.as_bytes()).is_some(), "a request with {text} is refused");
            for (cut, pauses) in [(0, false), (text.len(), true), (text.len() - 1, false), (text.len() / 2, true)] {
                let (out, finds) = through(Redactor::new(matcher.clone()), text.as_bytes(), cut, pauses);
                assert!(out != text.as_bytes() && finds > 0, "{text} cut at {cut}");
            }
        }
    }
}

/// A value that ends with the start of an escape, in a list before a pause: its echo is no find.
#[test]
fn the_echo_of_a_value_with_an_escape_at_its_end_is_no_find() {
    let value = "k7Qz2mXv9LpW4sVt6eRRu8Y%";
    for list in lists(value).into_iter().chain([value.to_owned()]) {
        let text = format!("[{list} \n\n and so on");
        for cut in list.len()..list.len() + 4 {
            let (out, finds) = through(Redactor::with_sent(matcher(value), Some(key())), text.as_bytes(), cut, true);
            assert_eq!(finds, 0, "cut at {cut}: {}", String::from_utf8_lossy(&out));
            assert!(out.ends_with(b"and so on"), "{}", String::from_utf8_lossy(&out));
        }
    }
}

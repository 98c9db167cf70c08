//! Responses of an origin: every form on every surface is redacted in place, and the rest is unchanged.

use std::collections::BTreeMap;

use futures_util::future::join_all;
use serde_json::Value;
use tokio::io::AsyncReadExt;

use super::forms::{FORMS, Form, VALUES, contains, encode, junk};
use super::origin::Words;
use super::page::{self, Cell};
use super::road::{Ask, Road, Way, unmasked};
use super::{Field, forms};
use crate::lab::TIMEOUT;

/// A place in an origin's message where a form may appear.
struct Surface {
    name: &'static str,
    place: Place,
}

#[derive(Clone, Copy)]
enum Place {
    /// A header field, with the text before and after the form.
    Field(&'static str, &'static str),
    Trailer,
    /// A body: its status, its media type, its coding, whether its length is known, and how it is split.
    Body {
        status: u16,
        kind: &'static str,
        coding: Option<&'static str>,
        known: bool,
        cut: usize,
    },
    /// Frames of a WebSocket: their opcode, and whether there are two of them.
    Frames(u8, bool),
}

const fn body(name: &'static str, coding: Option<&'static str>, known: bool, cut: usize) -> Surface {
    Surface { name, place: Place::Body { status: 200, kind: "text/plain", coding, known, cut } }
}

const SURFACES: [Surface; 18] = [
    Surface { name: "field", place: Place::Field("x-echo", "you sent ") },
    Surface { name: "`Location`", place: Place::Field("location", "https://api.test/?k=") },
    Surface { name: "`Set-Cookie`", place: Place::Field("set-cookie", "k=") },
    body("body, length known", None, true, 0),
    body("body, length unknown", None, false, 1000),
    body("body in small pieces", None, false, 7),
    body("gzip", Some("gzip"), true, 0),
    body("deflate", Some("deflate"), true, 0),
    body("br", Some("br"), false, 100),
    body("zstd", Some("zstd"), true, 0),
    Surface {
        name: "events",
        place: Place::Body { status: 200, kind: "text/event-stream", coding: None, known: false, cut: 0 },
    },
    Surface {
        name: "JSON",
        place: Place::Body { status: 200, kind: "application/json", coding: None, known: true, cut: 0 },
    },
    Surface {
        name: "error page",
        place: Place::Body { status: 500, kind: "text/html", coding: None, known: true, cut: 0 },
    },
    Surface { name: "trailers", place: Place::Trailer },
    Surface { name: "WebSocket: text", place: Place::Frames(1, false) },
    Surface { name: "WebSocket: binary", place: Place::Frames(2, false) },
    Surface { name: "WebSocket: fragments", place: Place::Frames(1, true) },
    Surface { name: "WebSocket: close reason", place: Place::Frames(8, false) },
];

impl Place {
    fn fits(self, text: &[u8]) -> bool {
        let printable = text.iter().all(|byte| (b' '..=b'~').contains(byte));
        match self {
            Self::Field(..) | Self::Trailer => printable,
            Self::Body { .. } => true,
            Self::Frames(8, _) => text.len() <= 123,
            Self::Frames(..) => true,
        }
    }
}

/// The text before and after a form.
struct Around {
    before: Vec<u8>,
    after: Vec<u8>,
}

fn around(place: Place) -> Around {
    let (before, after) = match place {
        Place::Field(_, before) => (before.into(), b";x".to_vec()),
        Place::Trailer => (b"sum ".to_vec(), b";x".to_vec()),
        Place::Body { kind: "text/event-stream", .. } => (b"data: 1\n\ndata: ".to_vec(), b"\n\ndata: 3\n\n".to_vec()),
        Place::Body { kind: "application/json", .. } => (b"{\"k\":\"".to_vec(), b"\"}".to_vec()),
        Place::Body { cut: 1..10, .. } => (junk(50), junk(50)),
        Place::Body { .. } => (junk(5000), junk(5000)),
        Place::Frames(8, _) => (vec![0x03, 0xe8], Vec::new()),
        Place::Frames(..) => (b"you said: ".to_vec(), b".".to_vec()),
    };
    Around { before, after }
}

/// Returns the error in a redacted text, if any: everything but the form must be unchanged. If the text was sent in
/// pieces, less than half of the form may have passed before.
fn wrong(form: &Form, value: &str, Around { before, after }: &Around, came: &[u8], pieces: bool) -> Option<String> {
    let text = form.write(value);
    let shown = || Some(String::from_utf8_lossy(came).into_owned());
    let Some(inner) = came.strip_prefix(&before[..]).and_then(|came| came.strip_suffix(&after[..])) else {
        return shown();
    };
    let (mut begin, end) = form.edges(value);
    if pieces {
        begin = form.half(value);
    }
    let is_kept = |(n, (was, is)): (usize, (&u8, &u8))| {
        let edge = n < begin || n + end >= text.len();
        *is == b'*' || (was == is && (edge || matches!(was, b'\r' | b'\n')))
    };
    let masked = inner.len() == text.len() && text.iter().zip(inner).enumerate().all(is_kept);
    let leaks = contains(came, &text[..form.half(value)]) || contains(came, value.as_bytes());
    if masked && !leaks { None } else { shown() }
}

struct Trial {
    form: Form,
    surface: usize,
    way: Way,
    wrong: Option<String>,
    key: String,
}

async fn tried(road: &mut Road<'_>, form: Form, at: usize) -> Option<Trial> {
    let (field, way, place) = (road.field, road.way, SURFACES[at].place);
    let (_, value) = VALUES.into_iter().find(|(_, value)| place.fits(&form.write(value)))?;
    let (text, around) = (form.write(value), around(place));
    let whole = [&around.before[..], &text, &around.after].concat();
    let key = format!("in-{way:?}-{at}-{}", FORMS.iter().position(|one| one.name == form.name).unwrap());
    let came = if let Place::Frames(opcode, is_cut) = place {
        if way == Way::TunnelH2 {
            return None;
        }
        received_message(field, way, &key, opcode, is_cut, &whole).await
    } else {
        answered(road, &key, place, &whole).await
    };
    let pieces = matches!(place, Place::Body { cut: 1.., .. } | Place::Frames(_, true));
    let wrong = came.map_or_else(Some, |came| wrong(&form, value, &around, &came, pieces));
    Some(Trial { form, surface: at, way, wrong, key })
}

/// Returns the text of an answer, or the error in the answer.
async fn answered(road: &mut Road<'_>, key: &str, place: Place, whole: &[u8]) -> Result<Vec<u8>, String> {
    let mut words = Words { status: 200, known: true, pieces: vec![b"hello".to_vec()], ..Words::default() };
    match place {
        Place::Field(name, _) => words.fields.push((name.to_owned(), whole.to_vec())),
        Place::Trailer => {
            words.known = false;
            words.trailers.push(("x-sum".to_owned(), whole.to_vec()));
        }
        Place::Body { status, kind, coding, known, cut } => {
            (words.status, words.known) = (status, known);
            words.fields.push(("content-type".to_owned(), kind.into()));
            words.fields.push(("etag".to_owned(), b"\"1\"".to_vec()));
            let sent = coding.map_or_else(|| whole.to_vec(), |coding| encode(coding, whole));
            words.pieces = if cut == 0 { vec![sent] } else { sent.chunks(cut).map(<[u8]>::to_vec).collect() };
            if let Some(coding) = coding {
                words.fields.push(("content-encoding".to_owned(), coding.into()));
                words.fields.push(("content-digest".to_owned(), b"sha-256=:AAAA:".to_vec()));
            }
        }
        Place::Frames(..) => {}
    }
    let status = words.status;
    road.field.origin(road.way).says(key, words);
    let fields = [("TE", "trailers"), ("Accept-Encoding", "gzip, deflate, br, zstd, compress, exi")];
    let ask = Ask { fields: fields.map(|(name, value)| (name.into(), value.into())).to_vec(), ..Ask::default() };
    let answer = road.send(key, &ask).await;
    if answer.status != status || answer.cut {
        return Err(format!("{answer:?}"));
    }
    let asked = road.field.origin(road.way).arrived(key).unwrap().fields;
    if asked["accept-encoding"] != "identity" {
        return Err(format!("asked for {:?}", asked["accept-encoding"]));
    }
    match place {
        Place::Field(name, _) => Ok(answer.headers[name].as_bytes().to_vec()),
        Place::Trailer => match answer.trailers.get("x-sum") {
            Some(sum) if answer.body == b"hello" => Ok(sum.as_bytes().to_vec()),
            _ => Err(format!("{answer:?}")),
        },
        Place::Body { coding, .. } => {
            let length = answer.header("content-length").map(|length| length.parse().unwrap());
            let tag = if coding.is_some() { "W/\"1\"" } else { "\"1\"" };
            let head = (answer.header("etag"), answer.header("content-encoding"), answer.header("content-digest"));
            if length.is_some_and(|length: usize| length != whole.len()) || head != (Some(tag), None, None) {
                return Err(format!("{:?}", answer.headers));
            }
            Ok(answer.body)
        }
        Place::Frames(..) => Err("is no answer".to_owned()),
    }
}

/// Returns the text of a message as received.
async fn received_message(
    field: &Field,
    way: Way,
    key: &str,
    opcode: u8,
    is_cut: bool,
    whole: &[u8],
) -> Result<Vec<u8>, String> {
    let frames = if is_cut {
        let (one, two) = whole.split_at(whole.len() / 3);
        vec![unmasked(opcode, false, one), unmasked(9, true, b"hi"), unmasked(0, true, two)]
    } else {
        vec![unmasked(opcode, true, whole)]
    };
    let sent = frames.concat();
    field.origin(way).says(key, Words { pieces: vec![sent.clone()], ..Words::default() });
    let (mut stream, mut heard) = field.socket(way, key).await;
    let reading = async {
        while heard.len() < sent.len() {
            match stream.read_buf(&mut heard).await {
                Ok(1..) => {}
                _ => break,
            }
        }
    };
    tokio::time::timeout(TIMEOUT, reading).await.map_err(|_| "no message came".to_owned())?;
    if heard.len() != sent.len() {
        return Err(format!("{} bytes instead of {}", heard.len(), sent.len()));
    }
    // Without the heads of the frames, which must be unchanged.
    let (mut at, mut message) = (0, Vec::new());
    for frame in frames {
        let payload = frame.len() - if frame.len() > 127 { 4 } else { 2 };
        let head = frame.len() - payload;
        let came = &heard[at..at + frame.len()];
        if came[..head] != frame[..head] {
            return Err(format!("{came:02x?}"));
        }
        if frame[0] & 0x0f != 9 {
            message.extend(&came[head..]);
        } else if came != frame {
            return Err("another ping".to_owned());
        }
        at += frame.len();
    }
    Ok(message)
}

#[tokio::test(flavor = "multi_thread")]
async fn every_form_of_a_returned_value_is_redacted() {
    let field = Field::new().await;
    let by_way = join_all(Way::ALL.map(|way| {
        let field = &field;
        async move {
            let mut road = field.road(way);
            let mut done = Vec::new();
            for at in 0..SURFACES.len() {
                for form in FORMS.iter().filter(|form| form.codings.is_empty()) {
                    done.extend(tried(&mut road, *form, at).await);
                }
            }
            done
        }
    }));
    let cells: Vec<Trial> = by_way.await.into_iter().flatten().collect();
    // Open exchanges end too, and write their lines.
    let crate::lab::Lab { daemon, dir, .. } = field.lab;
    assert!(daemon.shutdown().await);
    let log = std::fs::read_to_string(dir.path().join("audit.jsonl")).unwrap();
    let lines: Vec<Value> = log.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let closed = lines.into_iter().filter(|line| line["event"] == "closed");
    let redacted: BTreeMap<String, (u64, String)> = closed
        .map(|line| {
            let text = |key: &str| line[key].as_str().unwrap_or_default().to_owned();
            (text("path"), (line["redacted"].as_u64().unwrap_or_default(), text("alarm")))
        })
        .collect();
    let (mut found, mut wrong) = (BTreeMap::new(), Vec::new());
    for cell in &cells {
        let name = SURFACES[cell.surface].name;
        let noted = redacted.get(&format!("/cell/{}", cell.key));
        if cell.form.is_not_yet() {
            found.insert((cell.form.name, cell.surface), Cell::NotYet);
            if cell.wrong.is_none() {
                wrong
                    .push(format!("{} | {name} | {:?} is overwritten: take it off the list", cell.form.name, cell.way));
            }
            continue;
        }
        found.insert((cell.form.name, cell.surface), Cell::Caught);
        let named =
            noted.is_some_and(|(count, alarm)| *count == 1 && VALUES.iter().any(|(one, _)| alarm.ends_with(one)));
        if !named || cell.wrong.is_some() {
            wrong.push(format!("{} | {name} | {:?}: {noted:?} {:?}", cell.form.name, cell.way, cell.wrong));
        }
    }
    assert!(wrong.is_empty(), "{} of {} cells:\n{}", wrong.len(), cells.len(), wrong.join("\n"));
    let cell = |form: &Form, surface| found.get(&(form.name, surface)).copied().unwrap_or(Cell::Cannot);
    let rows: Vec<_> = FORMS
        .iter()
        .filter(|form| form.codings.is_empty())
        .map(|form| (form.name, (0..SURFACES.len()).map(|at| cell(form, at)).collect()))
        .collect();
    page::PAGE.check("inbound", &page::table("form", &SURFACES.map(|surface| surface.name), &rows));
}

/// Texts without a value are unchanged, to the last byte.
#[tokio::test(flavor = "multi_thread")]
async fn answers_without_a_value_are_unchanged() {
    let field = Field::new().await;
    // At the end of the received text, a longer part is overwritten. The text between keeps the compression ratio below
    // the limit.
    let random = junk(80_000);
    let near = (0..10_000).flat_map(|n| {
        let (_, value) = VALUES[n % VALUES.len()];
        [&value.as_bytes()[..value.len() / 2 - 1], &random[n * 8..n * 8 + 8]].concat()
    });
    let bodies = [junk(300_000), near.collect(), (0..=255).cycle().take(60_000).collect(), Vec::new()];
    for way in Way::ALL {
        let mut road = field.road(way);
        for (n, body) in bodies.iter().enumerate() {
            for (m, coding) in [None, Some("gzip"), Some("deflate"), Some("br"), Some("zstd")].into_iter().enumerate() {
                for known in [false, true] {
                    let key = format!("benign-{way:?}-{n}-{m}-{known}");
                    let sent = coding.map_or_else(|| body.clone(), |coding| forms::encode(coding, body));
                    let pieces = sent.chunks(10_000).map(<[u8]>::to_vec).collect();
                    let coding = coding.map(|coding| ("content-encoding".to_owned(), coding.into()));
                    let fields = coding.into_iter().collect();
                    field.origin(way).says(&key, Words { status: 200, fields, pieces, known, ..Words::default() });
                    let answer = road.send(&key, &Ask::default()).await;
                    assert!(answer.status == 200 && !answer.cut && answer.body == *body, "{key}: {:?}", answer.headers);
                }
            }
        }
    }
}

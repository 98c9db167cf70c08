//! Requests of a sandbox: every form on every surface by every way in is refused and does not reach the origin.

use std::collections::{BTreeMap, HashMap};

use futures_util::future::join_all;
use http::{HeaderName, HeaderValue};
use serde_json::Value;
use tokio::io::AsyncWriteExt;

use super::forms::{FORMS, Form, VALUES, contains, junk};
use super::page::{self, Cell};
use super::road::{Answer, Ask, Payload, Road, Way, frame, read_answer, rest};
use super::{Field, Origins, quiet};
use crate::lab::{Lab, LabBuilder};

/// A place in a client's message where a form may appear.
#[derive(Clone, Copy)]
struct Surface {
    name: &'static str,
    ways: &'static [Way],
    /// The characters that the place accepts.
    takes: Takes,
    put: Put,
    /// Whether a find prevents any contact with the origin.
    before: bool,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Takes {
    /// A label of a host name: case-insensitive letters, digits and hyphens.
    Label,
    /// A field name: case-insensitive token characters.
    Token,
    /// A field value.
    Text,
    /// A cookie value.
    Cookie,
    /// Inside quotes within another form.
    Quoted,
    Path,
    Query,
    /// Any bytes.
    All,
    /// Any bytes, and content codings for a complete body.
    Body,
    /// At most this many bytes, as in a control frame.
    Few(usize),
}

#[derive(Clone, Copy)]
enum Put {
    Request(fn(&[u8], &Form) -> Ask),
    /// Frames of a WebSocket.
    Frames(fn(&[u8]) -> Vec<Vec<u8>>),
}

impl Takes {
    fn fits(self, form: &Form, text: &[u8]) -> bool {
        let printable = |byte: &u8| (b' '..=b'~').contains(byte);
        let visible = |byte: &u8| (b'!'..=b'~').contains(byte);
        let in_path = |byte: &u8| byte.is_ascii_alphanumeric() || b"-._~!$&'()*+,;=:@/%".contains(byte);
        if !form.codings.is_empty() {
            return self == Self::Body;
        }
        match self {
            Self::Label => {
                text.len() <= 63 && !form.cased && text.iter().all(|b| b.is_ascii_alphanumeric() || *b == b'-')
            }
            Self::Token => {
                let token = |byte: &u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(byte);
                !form.cased && text.iter().all(token)
            }
            Self::Text => text.iter().all(printable),
            Self::Cookie => text.iter().all(|byte| printable(byte) && *byte != b';'),
            Self::Quoted => text.iter().all(|byte| printable(byte) && *byte != b'"'),
            Self::Path => text.iter().all(in_path),
            Self::Query => text.iter().all(|byte| in_path(byte) || *byte == b'?'),
            Self::All | Self::Body => true,
            Self::Few(most) => text.len() <= most && text.iter().all(|byte| visible(byte) || *byte == b' '),
        }
    }

    /// Returns the first value whose form is valid in this place, if the form changes the text at all.
    fn value(self, form: &Form) -> Option<(&'static str, &'static str, Vec<u8>)> {
        let is_raw = form.name == FORMS[0].name || !form.codings.is_empty();
        let texts = VALUES.into_iter().map(|(name, value)| (name, value, form.write(value)));
        texts.into_iter().find(|(_, value, text)| (is_raw || text != value.as_bytes()) && self.fits(form, text))
    }
}

fn field(name: &str, value: &[u8]) -> (Vec<u8>, Vec<u8>) {
    (name.into(), value.to_vec())
}

/// Splits in the middle, at a place where no whitespace is trimmed.
fn halves(text: &[u8]) -> (&[u8], &[u8]) {
    let middle = text.len() / 2;
    let at = (middle..text.len()).find(|at| text[*at] != b' ' && text[*at - 1] != b' ').unwrap();
    text.split_at(at)
}

fn around(before: &[u8], text: &[u8], after: &[u8]) -> Vec<u8> {
    [before, text, after].concat()
}

fn body(form: &Form, bytes: &[u8], kind: &str, payload: fn(Vec<u8>) -> Payload) -> Ask {
    let mut fields = vec![field("Content-Type", kind.as_bytes())];
    if !form.codings.is_empty() {
        fields.push(field("Content-Encoding", form.content_encoding().as_bytes()));
    }
    Ask { fields, payload: payload(form.coded(bytes)), ..Ask::default() }
}

fn pieces(body: Vec<u8>) -> Payload {
    Payload::Pieces(body.chunks(1000).map(<[u8]>::to_vec).collect())
}

fn message(payload: &[u8]) -> Vec<u8> {
    [&[0][..], &u32::try_from(payload.len()).unwrap().to_be_bytes(), payload].concat()
}

const ALL: &[Way] = &Way::ALL;
const H1: &[Way] = &Way::H1;

const fn row(name: &'static str, takes: Takes, put: fn(&[u8], &Form) -> Ask, before: bool) -> Surface {
    Surface { name, ways: ALL, takes, put: Put::Request(put), before }
}

const fn socket(name: &'static str, takes: Takes, put: fn(&[u8]) -> Vec<Vec<u8>>) -> Surface {
    Surface { name, ways: H1, takes, put: Put::Frames(put), before: false }
}

const SURFACES: [Surface; 27] = [
    row(
        "host name",
        Takes::Label,
        |text, _| Ask { label: Some(String::from_utf8(text.to_vec()).unwrap()), ..Ask::default() },
        true,
    ),
    row("path", Takes::Path, |text, _| Ask { path: around(b"/", text, b"/x"), ..Ask::default() }, true),
    row("query", Takes::Query, |text, _| Ask { path: around(b"?a=1&k=", text, b"&b=2"), ..Ask::default() }, true),
    row(
        "field value",
        Takes::Text,
        |text, _| Ask { fields: vec![field("X-Note", &around(b"(", text, b")"))], ..Ask::default() },
        true,
    ),
    row(
        "field name",
        Takes::Token,
        |text, _| Ask { fields: vec![(around(b"X-", text, b"-y"), b"1".to_vec())], ..Ask::default() },
        true,
    ),
    row(
        "two fields of a name",
        Takes::Text,
        |text, _| {
            let (one, two) = halves(text);
            Ask { fields: vec![field("X-Note", one), field("X-Note", two)], ..Ask::default() }
        },
        true,
    ),
    row(
        "two fields",
        Takes::Text,
        |text, _| {
            let (one, two) = halves(text);
            Ask { fields: vec![field("X-One", one), field("X-Two", two)], ..Ask::default() }
        },
        true,
    ),
    row(
        "cookie",
        Takes::Cookie,
        |text, _| {
            let cookies = [&b"a=1"[..], &around(b"k=", text, b""), b"b=2"];
            Ask { fields: cookies.map(|cookie| field("Cookie", cookie)).to_vec(), ..Ask::default() }
        },
        true,
    ),
    row(
        "two cookies",
        Takes::Cookie,
        |text, _| {
            let (one, two) = halves(text);
            Ask {
                fields: [("a=", one), ("b=", two)]
                    .map(|(name, half)| field("Cookie", &around(name.as_bytes(), half, b"")))
                    .to_vec(),
                ..Ask::default()
            }
        },
        true,
    ),
    row(
        "body to 64 KiB",
        Takes::Body,
        |text, form| body(form, &around(b"before=", text, b"&after"), "text/plain", Payload::Known),
        true,
    ),
    row(
        "longer body",
        Takes::Body,
        |text, form| {
            let before = junk(if form.codings.is_empty() { 70_000 } else { 100_000 });
            body(form, &around(&before, text, b"&after"), "text/plain", Payload::Known)
        },
        false,
    ),
    row(
        "body of unknown length",
        Takes::Body,
        |text, form| body(form, &around(&junk(6000), text, &junk(6000)), "text/plain", pieces),
        false,
    ),
    row(
        "multipart: name",
        Takes::Quoted,
        |text, form| {
            let part = around(b"--b\r\nContent-Disposition: form-data; name=\"", text, b"\"\r\n\r\nx\r\n--b--\r\n");
            body(form, &part, "multipart/form-data; boundary=b", Payload::Known)
        },
        true,
    ),
    row(
        "multipart: file name",
        Takes::Quoted,
        |text, form| {
            let part = around(
                b"--b\r\nContent-Disposition: form-data; name=\"f\"; filename=\"",
                text,
                b"\"\r\n\r\nx\r\n--b--\r\n",
            );
            body(form, &part, "multipart/form-data; boundary=b", Payload::Known)
        },
        true,
    ),
    row(
        "multipart: part",
        Takes::All,
        |text, form| {
            let part = around(b"--c\r\nContent-Disposition: form-data; name=\"f\"\r\n\r\n", text, b"\r\n--c--\r\n");
            body(form, &part, "multipart/form-data; boundary=c", pieces)
        },
        false,
    ),
    row(
        "JSON",
        Takes::All,
        |text, form| body(form, &around(b"{\"a\":1,\"k\":\"", text, b"\"}"), "application/json", Payload::Known),
        true,
    ),
    row(
        "form",
        Takes::Query,
        |text, form| body(form, &around(b"a=1&k=", text, b"&b=2"), "application/x-www-form-urlencoded", Payload::Known),
        true,
    ),
    row(
        "trailers",
        Takes::Text,
        |text, _| {
            let trailers = vec![field("X-Sum", text)];
            Ask {
                payload: pieces(b"body".to_vec()),
                trailers,
                fields: vec![field("TE", b"trailers")],
                ..Ask::default()
            }
        },
        false,
    ),
    row(
        "body and trailers",
        Takes::Text,
        |text, _| {
            let (one, two) = halves(text);
            Ask { payload: pieces(around(b"body ", one, b"")), trailers: vec![field("X-Sum", two)], ..Ask::default() }
        },
        false,
    ),
    row(
        "gRPC message",
        Takes::All,
        |text, form| body(form, &message(&around(b"\n$", text, b"x")), "application/grpc", pieces),
        false,
    ),
    row(
        "two gRPC messages",
        Takes::All,
        |text, form| {
            let (one, two) = halves(text);
            body(form, &[message(one), message(two)].concat(), "application/grpc+proto", pieces)
        },
        false,
    ),
    socket("WebSocket: text", Takes::All, |text| vec![frame(1, true, &around(b"my key is ", text, b"."))]),
    socket("WebSocket: binary", Takes::All, |text| vec![frame(2, true, text)]),
    socket("WebSocket: fragments", Takes::All, |text| {
        let (one, two) = halves(text);
        vec![frame(1, false, one), frame(9, true, b"still there?"), frame(0, true, two)]
    }),
    socket("WebSocket: ping", Takes::Few(125), |text| vec![frame(9, true, text)]),
    socket("WebSocket: pong", Takes::Few(125), |text| vec![frame(10, true, text)]),
    socket("WebSocket: close reason", Takes::Few(123), |text| vec![frame(8, true, &around(&[0x03, 0xe8], text, b""))]),
];

/// One cell for one way in, and its expected result.
struct Trial {
    key: String,
    form: Form,
    surface: usize,
    way: Way,
    owner: &'static str,
    value: &'static str,
    text: Vec<u8>,
    answer: Answer,
}

async fn tried(road: &mut Road<'_>, form: Form, surface: usize, key: String) -> Option<Trial> {
    let Surface { takes, put, .. } = SURFACES[surface];
    let (owner, value, text) = takes.value(&form)?;
    let way = road.way;
    let answer = match put {
        Put::Frames(frames) => send_frames(road.field, way, &key, &frames(&text)).await,
        Put::Request(ask) => {
            let ask = ask(&text, &form);
            match ask.label {
                Some(label) if matches!(way, Way::TunnelH1 | Way::TunnelH2) => connect(road.field, way, &label).await,
                _ => road.send(&key, &ask).await,
            }
        }
    };
    Some(Trial { key, form, surface, way, owner, value, text, answer })
}

/// Returns the close code of a WebSocket as a status.
async fn send_frames(field: &Field, way: Way, key: &str, frames: &[Vec<u8>]) -> Answer {
    let (mut stream, mut heard) = field.socket(way, key).await;
    // The proxy may close the connection before it has read everything.
    for frame in frames {
        let _ = stream.write_all(frame).await;
        let _ = stream.flush().await;
    }
    // This ends the connection if nothing was found.
    let _ = stream.shutdown().await;
    heard.extend(rest(stream).await);
    let status = if heard.ends_with(&[0x88, 2, 0x03, 0xf0]) { 1008 } else { 0 };
    Answer { status, body: heard, ..Answer::default() }
}

/// Sends a CONNECT to a host below `api.test`.
async fn connect(field: &Field, way: Way, label: &str) -> Answer {
    let (head, _) = field.lab.try_connect(&format!("{label}.{}", field.authority(way))).await;
    let mut answer = Answer { status: head[9..12].parse().unwrap(), ..Answer::default() };
    for (name, value) in head.lines().filter_map(|line| line.split_once(": ")) {
        answer.headers.insert(HeaderName::try_from(name).unwrap(), HeaderValue::try_from(value).unwrap());
    }
    answer
}

impl Trial {
    /// Returns the error in the result, if any.
    fn wrong(&self, origins: &Origins, lines: &HashMap<String, Value>) -> Option<String> {
        let surface = SURFACES[self.surface];
        let is_socket = matches!(surface.put, Put::Frames(_));
        if self.answer.status != if is_socket { 1008 } else { 403 } {
            return Some(format!("answered {:?}", self.answer));
        }
        if !is_socket && self.answer.header("exeat-refusal") != Some("leak_detected") {
            return Some(format!("refused as {:?}", self.answer.header("exeat-refusal")));
        }
        let line = match self.answer.header("exeat-request-id") {
            Some(id) => lines.get(id),
            None => lines.get(&format!("/cell/{}", self.key)),
        };
        let Some(line) = line else { return Some("left no line".to_owned()) };
        let named = line["rule"].as_str().is_some_and(|rule| rule.starts_with(&format!("{}: ", self.owner)));
        if line["code"] != "leak_detected" || !named {
            return Some(format!("wrote down {line}"));
        }
        let arrived = origins.at(self.way).arrived(&self.key);
        if surface.before {
            return arrived.map(|arrived| format!("arrived: {}", String::from_utf8_lossy(&arrived.head)));
        }
        let arrived = arrived.unwrap_or_default();
        let body =
            self.form.decoded(&if surface.name.contains("gRPC") { unframed(&arrived.body) } else { arrived.body });
        let half = &self.text[..self.form.half(self.value)];
        let leaks = |bytes: &[u8]| contains(bytes, half) || contains(bytes, self.value.as_bytes());
        (leaks(&arrived.head) || leaks(&body)).then(|| format!("arrived: {}", String::from_utf8_lossy(&body)))
    }
}

/// Returns the gRPC messages without their heads.
fn unframed(mut body: &[u8]) -> Vec<u8> {
    let mut out = Vec::new();
    while let Some((head, rest)) = body.split_at_checked(5) {
        let length = u32::from_be_bytes(head[1..].try_into().unwrap()) as usize;
        let (message, behind) = rest.split_at(length.min(rest.len()));
        out.extend_from_slice(message);
        body = behind;
    }
    out
}

/// Returns all lines that ended an exchange, by id and by path.
async fn lines(lab: &Lab) -> HashMap<String, Value> {
    let mut found = HashMap::new();
    for line in lab.audit().await.into_iter().filter(|line| line["event"] != "decided") {
        for key in ["id", "path"] {
            if let Some(key) = line[key].as_str() {
                found.insert(key.to_owned(), line.clone());
            }
        }
    }
    found
}

#[tokio::test(flavor = "multi_thread")]
async fn no_form_of_a_value_leaves_on_any_surface_or_way() {
    let field = Field::new().await;
    let cells = all(&field).await;
    let lines = lines(&field.lab).await;
    let origins = quiet(field).await;
    let mut wrong = Vec::new();
    let mut caught: BTreeMap<(&str, usize), Cell> = BTreeMap::new();
    for cell in &cells {
        let place = (cell.form.name, cell.surface);
        let failure = cell.wrong(&origins, &lines);
        if cell.form.is_not_yet() {
            caught.insert(place, Cell::NotYet);
            if failure.is_none() {
                wrong.push(format!("{place:?} {:?} is caught: take it off the list", cell.way));
            }
            continue;
        }
        caught.insert(place, Cell::Caught);
        let name = SURFACES[cell.surface].name;
        wrong.extend(failure.map(|failure| format!("{} | {name} | {:?}: {failure}", cell.form.name, cell.way)));
    }
    assert!(wrong.is_empty(), "{} of {} cells:\n{}", wrong.len(), cells.len(), wrong.join("\n"));
    // As sent over HTTP/1.1, where headers are not compressed.
    for (origin, (_, value)) in [&origins.plain, &origins.h1].into_iter().flat_map(|o| VALUES.map(|value| (o, value))) {
        assert!(!contains(&origin.wire(), value.as_bytes()), "{value}");
    }
    let cell = |form: &Form, surface| caught.get(&(form.name, surface)).copied().unwrap_or(Cell::Cannot);
    let rows: Vec<_> =
        FORMS.iter().map(|form| (form.name, (0..SURFACES.len()).map(|at| cell(form, at)).collect())).collect();
    page::PAGE.check("outbound", &page::table("form", &SURFACES.map(|surface| surface.name), &rows));
    page::PAGE.check("ways", &ways(&cells));
}

/// Extensions of a chunk are not forwarded.
#[tokio::test]
async fn an_extension_of_a_chunk_is_dropped() {
    let field = Field::new().await;
    for way in Way::H1 {
        let mut stream = field.wire(way).await;
        let head = field.head(way, "POST", "extension", &Ask::default());
        let body = format!("5;k={}\r\nhello\r\n0;k=\"{}\"\r\n\r\n", VALUES[2].1, VALUES[1].1);
        stream.write_all(&[&head[..], b"Transfer-Encoding: chunked\r\n\r\n", body.as_bytes()].concat()).await.unwrap();
        stream.flush().await.unwrap();
        assert_eq!(read_answer(&mut stream).await.unwrap().status, 200, "{way:?}");
        assert_eq!(field.origin(way).arrived("extension").unwrap().body, b"hello");
        assert!(VALUES.iter().all(|(_, value)| !contains(&field.origin(way).wire(), value.as_bytes())), "{way:?}");
    }
}

/// An opaque tunnel sends the name that was checked, or none.
#[tokio::test]
async fn an_opaque_tunnels_server_name_carries_no_value() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("sealed.test").await;
    let (_, named) = VALUES[2];
    std::fs::write(builder.dir.path().join("NAMED"), named).unwrap();
    let text = format!(
        "[integrations.sealed]\nallowed_domains = [\"*.sealed.test\", \"sealed.test\"]\nports = [{}]\nmode = \"opaque\"\n\
         [credentials.NAMED]\nauth_type = \"bearer\"\nvalue = \"file:NAMED\"\ndomains = [\"api.test\"]\n\
         [tasks.t]\nintegrations = [\"sealed\"]\ncredentials = [\"NAMED\"]\n",
        origin.port()
    );
    let lab = builder.proxy(&text).await;
    let stream = lab.tunnel(&format!("sealed.test:{}", origin.port())).await;
    let name = format!("{named}.sealed.test").try_into().unwrap();
    let handshake =
        tokio_rustls::TlsConnector::from(std::sync::Arc::new(lab.client_tls_config(&[]))).connect(name, stream);
    assert!(handshake.await.is_err());
    assert_eq!(lab.ended(0).await["code"], "sni_mismatch");
    let (head, _) = lab.try_connect(&format!("{}.sealed.test:{}", named.to_uppercase(), origin.port())).await;
    assert!(head.starts_with("HTTP/1.1 403") && head.contains("exeat-refusal: leak_detected"), "{head}");
    assert_eq!(lab.ended(1).await["code"], "leak_detected");
    let log = std::fs::read_to_string(lab.audit_file()).unwrap().to_lowercase();
    assert!(!log.contains(named), "{log}");
}

/// Returns how many forms were tried on each surface by each way.
fn ways(cells: &[Trial]) -> String {
    let mut text = String::from(
        "| surface | CONNECT, HTTP/1.1 | CONNECT, HTTP/2 | `http://` | `https://` |\n|---|--:|--:|--:|--:|\n",
    );
    for (at, surface) in SURFACES.iter().enumerate() {
        text.push_str(&format!("| {} |", surface.name));
        for way in Way::ALL {
            let tried = |cell: &&Trial| cell.surface == at && cell.way == way && !cell.form.is_not_yet();
            match cells.iter().filter(tried).count() {
                0 => text.push_str(" – |"),
                n => text.push_str(&format!(" {n} |")),
            }
        }
        text.push('\n');
    }
    text
}

/// Tries every form on every surface by every way.
async fn all(field: &Field) -> Vec<Trial> {
    let by_way = join_all(Way::ALL.map(|way| async move {
        let mut road = field.road(way);
        let mut done = Vec::new();
        for (s, _) in SURFACES.iter().enumerate().filter(|(_, surface)| surface.ways.contains(&way)) {
            for (f, form) in FORMS.iter().enumerate() {
                done.extend(tried(&mut road, *form, s, format!("{way:?}-{s}-{f}")).await);
            }
        }
        done
    }));
    by_way.await.into_iter().flatten().collect()
}

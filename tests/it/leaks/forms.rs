//! The forms of a value. The encoders belong to the tests and share no code with the scanner.

use std::io::{Read, Write};

use flate2::Compression;
use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};

/// The forms that are not found yet. The test fails if a form in this list is found; then remove it.
pub const NOT_YET: &[&str] = &[];

/// The values; the first has the most special characters, and the last is valid in names.
pub const VALUES: [(&str, &str); 3] =
    [("ODD", "q?>~ \"x/+&=%<'???>>>Zz 7w9J"), ("KEY", crate::lab::KEY), ("NAMED", "tok7q2zt9lmx4vbn8kcyw3pd")];

/// An encoding of a value.
#[derive(Clone, Copy)]
pub struct Form {
    pub name: &'static str,
    write: fn(&[u8]) -> Vec<u8>,
    /// Whether upper case and lower case letters are significant.
    pub cased: bool,
    /// The content codings of a body in this form.
    pub codings: &'static [&'static str],
}

impl Form {
    pub fn write(&self, value: &str) -> Vec<u8> {
        (self.write)(value.as_bytes())
    }

    pub fn is_not_yet(&self) -> bool {
        NOT_YET.contains(&self.name)
    }

    /// Returns the number of bytes of the text that reveal half of the value, or eight bytes of a short one. An escape
    /// counts once it has ended.
    pub fn half(&self, value: &str) -> usize {
        let last = value.len().div_ceil(2).max(8).min(value.len()) - 1;
        let agree = |a: &[u8], b: &[u8]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let known = self.agreements(value, last, agree).max().unwrap() + 1;
        let ended = if last + 1 < value.len() { self.agreements(value, last + 1, agree).min() } else { None };
        known.max(ended.unwrap_or_default())
    }

    /// Returns the number of bytes at the beginning and at the end of the text that reveal nothing certain about the
    /// value.
    pub fn edges(&self, value: &str) -> (usize, usize) {
        let begin = |a: &[u8], b: &[u8]| a.iter().zip(b).take_while(|(a, b)| a == b).count();
        let end = |a: &[u8], b: &[u8]| a.iter().rev().zip(b.iter().rev()).take_while(|(a, b)| a == b).count();
        let most = |at, measure: fn(&[u8], &[u8]) -> usize| self.agreements(value, at, measure).max().unwrap();
        (most(0, begin) + 1, most(value.len() - 1, end) + 1)
    }

    /// Returns the lengths for which the text agrees with the texts of values that differ in one byte.
    fn agreements(&self, value: &str, at: usize, measure: fn(&[u8], &[u8]) -> usize) -> impl Iterator<Item = usize> {
        let (text, write, value) = (self.write(value), self.write, value.as_bytes().to_vec());
        let own = value[at];
        (b'!'..=b'~').filter(move |byte| *byte != own).map(move |byte| {
            let mut other = value.clone();
            other[at] = byte;
            measure(&text, &write(&other))
        })
    }

    /// Encodes a complete body with its content codings.
    pub fn coded(&self, body: &[u8]) -> Vec<u8> {
        self.codings.iter().fold(body.to_vec(), |body, coding| encode(coding, &body))
    }

    /// Decodes as much as possible of a body that may be truncated.
    pub fn decoded(&self, body: &[u8]) -> Vec<u8> {
        self.codings.iter().rev().fold(body.to_vec(), |body, coding| decode(coding, &body))
    }

    /// The value of `Content-Encoding`.
    pub fn content_encoding(&self) -> String {
        let named: Vec<_> = self.codings.iter().map(|coding| coding.trim_end_matches(" alone")).collect();
        named.join(", ")
    }
}

const fn form(name: &'static str, write: fn(&[u8]) -> Vec<u8>) -> Form {
    Form { name, write, cased: false, codings: &[] }
}

const fn cased(name: &'static str, write: fn(&[u8]) -> Vec<u8>) -> Form {
    Form { name, write, cased: true, codings: &[] }
}

const fn coded(name: &'static str, codings: &'static [&'static str]) -> Form {
    Form { name, write: <[u8]>::to_vec, cased: true, codings }
}

/// All forms; those with content codings come last.
pub const FORMS: [Form; 59] = [
    form("as it is", <[u8]>::to_vec),
    form("with a line break in it", |v| [&v[..v.len() / 3], b"\r\n", &v[v.len() / 3..]].concat()),
    form("with zero-width spaces in it", |v| join(v, |b| char::from(b).into(), "\u{200b}")),
    form("with soft hyphens in it, `\\u00ad`", |v| join(v, |b| char::from(b).into(), "\\u00ad")),
    form("with zero-width joiners in it, `%E2%80%8D`", |v| join(v, |b| reserved(b, "%"), "%E2%80%8D")),
    form("percent-encoded, `%4A`", |v| each(v, |b| format!("%{b:02X}"))),
    form("percent-encoded, `%4a`", |v| each(v, |b| format!("%{b:02x}"))),
    form("percent-encoded where it must be", |v| each(v, |b| reserved(b, "%"))),
    form("percent-encoded here and there", |v| {
        mixed(v, |b, n| if n % 2 == 0 { format!("%{b:02x}") } else { format!("%{b:02X}") })
    }),
    form("percent-encoded twice, `%254A`", |v| each(v, |b| format!("%25{b:02X}"))),
    form("percent-encoded twice where it must be", |v| each(v, |b| reserved(b, "%25"))),
    form("of a form: `+` for a space", |v| each(v, |b| if b == b' ' { "+".into() } else { reserved(b, "%") })),
    cased("base64", |v| base64(b"", v, STANDARD, true)),
    cased("base64, behind 1 byte", |v| base64(b"u", v, STANDARD, true)),
    cased("base64, behind 2 bytes", |v| base64(b"us", v, STANDARD, true)),
    cased("base64 without padding", |v| base64(b"", v, STANDARD, false)),
    cased("base64 without padding, behind 1 byte", |v| base64(b"u", v, STANDARD, false)),
    cased("base64 without padding, behind 2 bytes", |v| base64(b"us", v, STANDARD, false)),
    cased("base64url", |v| base64(b"", v, URL, true)),
    cased("base64url, behind 1 byte", |v| base64(b"u", v, URL, true)),
    cased("base64url, behind 2 bytes", |v| base64(b"us", v, URL, true)),
    cased("base64url without padding", |v| base64(b"", v, URL, false)),
    cased("base64url without padding, behind 1 byte", |v| base64(b"u", v, URL, false)),
    cased("base64url without padding, behind 2 bytes", |v| base64(b"us", v, URL, false)),
    cased("base64 in lines of 76, CRLF", |v| lines(&base64(&[b'x'; 45], v, STANDARD, true), 76, b"\r\n")),
    cased("base64 in lines of 64, LF", |v| lines(&base64(&[b'x'; 37], v, STANDARD, true), 64, b"\n")),
    cased("base64 in lines of 20, LF", |v| lines(&base64(b"", v, STANDARD, true), 20, b"\n")),
    cased("base64 in lines of 20, indented", |v| lines(&base64(b"", v, STANDARD, true), 20, b"\n\t  ")),
    cased("base64, percent-encoded", |v| each(&base64(b"", v, STANDARD, true), |b| reserved(b, "%"))),
    cased("base64 in JSON, `\\/`", |v| json(&base64(b"", v, STANDARD, true))),
    cased("`Basic`: base64 of `user:value`", |v| [&b"Basic "[..], &base64(b"user:", v, STANDARD, true)].concat()),
    form("hex", |v| each(v, |b| format!("{b:02x}"))),
    form("HEX", |v| each(v, |b| format!("{b:02X}"))),
    form("hEx", |v| {
        v.iter()
            .enumerate()
            .flat_map(|(n, b)| if n % 2 == 0 { format!("{b:02x}") } else { format!("{b:02X}") }.into_bytes())
            .collect()
    }),
    form("`\\x4a`", |v| each(v, |b| format!("\\x{b:02x}"))),
    form("hex with `-` between, `4a-61`", |v| join(v, |b| format!("{b:02x}"), "-")),
    form("hex, `0x4a, 0x61`", |v| join(v, |b| format!("0x{b:02x}"), ", ")),
    form("decimal bytes, `[74,97]`", |v| [b"[", &join(v, |b| b.to_string(), ",")[..], b"]"].concat()),
    form("numbers as an object, `{\"0\":74,\"1\":97}`", |v| {
        let mut at = 0..;
        [b"{", &join(v, |b| format!("\"{}\":{b}", at.next().unwrap_or(0)), ",")[..], b"}"].concat()
    }),
    form("decimal bytes in lines, in JSON", |v| join(v, |b| b.to_string(), ",\\n  ")),
    form("decimal bytes, percent-encoded", |v| join(v, |b| b.to_string(), "%2C%20")),
    form("`\\U0000004a`", |v| each(v, |b| format!("\\U{b:08x}"))),
    form("CSS, `\\4a `", |v| each(v, |b| format!("\\{b:x} "))),
    form("JSON, `\\u004a`", |v| each(v, |b| format!("\\u{b:04x}"))),
    form("JSON, `\\u004A` here and there", |v| mixed(v, |b, _| format!("\\u{b:04X}"))),
    form("JSON, `\\/` and `\\\"`", json),
    form("JSON in JSON", |v| json(&json(v))),
    form("JSON in JSON, `\\\\u004a`", |v| json(&each(v, |b| format!("\\u{b:04x}")))),
    form("HTML, `&#74;`", |v| each(v, |b| format!("&#{b};"))),
    form("HTML, `&#x4A;`", |v| each(v, |b| format!("&#x{b:X};"))),
    form("HTML, `&amp;`", |v| each(v, named)),
    cased("base64 of JSON with `\\u`, in JSON", |v| {
        let inner = [b"{\"k\":\"", &each(v, |b| format!("\\u{b:04x}"))[..], b"\"}"].concat();
        [b"{\"doc\":\"", &base64(b"", &inner, STANDARD, true)[..], b"\"}"].concat()
    }),
    cased("base64 of hex, in a `data:` URI in JSON", |v| {
        let inner = base64(b"", &each(v, |b| format!("{b:02x}")), STANDARD, true);
        [b"{\"url\":\"data:text/plain;base64,", &inner[..], b"\"}"].concat()
    }),
    cased("base64 of percent-encoding, in a part of multipart", |v| {
        let inner = lines(&base64(b"", &each(v, |b| format!("%{b:02X}")), STANDARD, true), 76, b"\r\n");
        let head = b"--b\r\nContent-Disposition: form-data; name=\"f\"\r\nContent-Transfer-Encoding: base64\r\n\r\n";
        [&head[..], &inner, b"\r\n--b--\r\n"].concat()
    }),
    coded("in a gzip body", &["gzip"]),
    coded("in a deflate body", &["deflate"]),
    coded("in a deflate body without zlib", &["deflate alone"]),
    coded("in a br body", &["br"]),
    coded("in a zstd body", &["zstd"]),
];

fn join(value: &[u8], mut write: impl FnMut(u8) -> String, between: &str) -> Vec<u8> {
    value.iter().map(|byte| write(*byte)).collect::<Vec<_>>().join(between).into_bytes()
}

fn each(value: &[u8], write: impl Fn(u8) -> String) -> Vec<u8> {
    value.iter().flat_map(|byte| write(*byte).into_bytes()).collect()
}

/// Escapes some bytes and not others, in no regular pattern.
fn mixed(value: &[u8], escape: impl Fn(u8, usize) -> String) -> Vec<u8> {
    let numbered = value.iter().enumerate();
    numbered
        .flat_map(|(n, byte)| {
            let plain = byte.is_ascii_alphanumeric() && (n * 7 + n / 3) % 5 < 2;
            if plain { vec![*byte] } else { escape(*byte, n).into_bytes() }
        })
        .collect()
}

/// Escapes all characters except the unreserved ones of RFC 3986.
fn reserved(byte: u8, mark: &str) -> String {
    if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
        char::from(byte).to_string()
    } else {
        format!("{mark}{byte:02X}")
    }
}

/// Returns the inside of a JSON string.
fn json(value: &[u8]) -> Vec<u8> {
    each(value, |byte| match byte {
        b'"' | b'\\' | b'/' => format!("\\{}", char::from(byte)),
        _ => char::from(byte).to_string(),
    })
}

fn named(byte: u8) -> String {
    let name = match byte {
        b'&' => "amp",
        b'<' => "lt",
        b'>' => "gt",
        b'"' => "quot",
        b'\'' => "apos",
        b'/' => "sol",
        b'+' => "plus",
        b'=' => "equals",
        b'%' => "percnt",
        b'?' => "quest",
        _ => return char::from(byte).to_string(),
    };
    format!("&{name};")
}

const STANDARD: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
const URL: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";

/// RFC 4648 §4 and §5, bit by bit.
fn base64(before: &[u8], value: &[u8], alphabet: &[u8; 64], padded: bool) -> Vec<u8> {
    let bits: Vec<u8> =
        before.iter().chain(value).flat_map(|byte| (0..8).rev().map(move |bit| byte >> bit & 1)).collect();
    let digit = |bits: &[u8]| (0..6).fold(0, |n, at| n << 1 | usize::from(bits.get(at).copied().unwrap_or_default()));
    let mut text: Vec<u8> = bits.chunks(6).map(|bits| alphabet[digit(bits)]).collect();
    while padded && !text.len().is_multiple_of(4) {
        text.push(b'=');
    }
    text
}

fn lines(text: &[u8], length: usize, end: &[u8]) -> Vec<u8> {
    text.chunks(length).collect::<Vec<_>>().join(end)
}

pub fn encode(coding: &str, body: &[u8]) -> Vec<u8> {
    let level = Compression::default();
    match coding {
        "gzip" => {
            let mut encoder = GzEncoder::new(Vec::new(), level);
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        "deflate" => {
            let mut encoder = ZlibEncoder::new(Vec::new(), level);
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        "deflate alone" => {
            let mut encoder = DeflateEncoder::new(Vec::new(), level);
            encoder.write_all(body).unwrap();
            encoder.finish().unwrap()
        }
        "br" => {
            let mut out = Vec::new();
            let mut encoder = brotli::CompressorWriter::new(&mut out, 4096, 3, 18);
            encoder.write_all(body).unwrap();
            drop(encoder);
            out
        }
        "zstd" => ruzstd::encoding::compress_to_vec(body, ruzstd::encoding::CompressionLevel::Fastest),
        other => panic!("no coding {other}"),
    }
}

fn decode(coding: &str, body: &[u8]) -> Vec<u8> {
    let mut reader: Box<dyn Read + '_> = match coding {
        "gzip" => Box::new(flate2::read::GzDecoder::new(body)),
        "deflate" => Box::new(flate2::read::ZlibDecoder::new(body)),
        "deflate alone" => Box::new(flate2::read::DeflateDecoder::new(body)),
        "br" => Box::new(brotli_decompressor::Decompressor::new(body, 4096)),
        "zstd" => match ruzstd::decoding::StreamingDecoder::new(body) {
            Ok(decoder) => Box::new(decoder),
            Err(_) => return Vec::new(),
        },
        other => panic!("no coding {other}"),
    };
    let (mut out, mut piece) = (Vec::new(), [0; 4096]);
    while let Ok(n @ 1..) = reader.read(&mut piece) {
        out.extend_from_slice(&piece[..n]);
    }
    out
}

/// Returns meaningless letters that compress badly.
pub fn junk(length: usize) -> Vec<u8> {
    let mut state = 1_u32;
    let mut next = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,"[(state >> 26) as usize]
    };
    (0..length).map(|_| next()).collect()
}

pub fn contains(text: &[u8], part: &[u8]) -> bool {
    memchr::memmem::find(text, part).is_some()
}

/// The encoders produce the same output as other implementations.
#[test]
fn the_encoders_agree_with_other_implementations() {
    let write = |name: &str| {
        let form = FORMS.iter().find(|form| form.name == name).unwrap();
        String::from_utf8(form.write("a/\"b?c>~")).unwrap()
    };
    let rows = [
        ("base64", "YS8iYj9jPn4="),
        ("base64url, behind 1 byte", "dWEvImI_Yz5-"),
        ("base64 without padding, behind 2 bytes", "dXNhLyJiP2M+fg"),
        ("percent-encoded where it must be", "a%2F%22b%3Fc%3E~"),
        ("JSON in JSON", "a\\\\\\/\\\\\\\"b?c>~"),
        ("HTML, `&#74;`", "&#97;&#47;&#34;&#98;&#63;&#99;&#62;&#126;"),
    ];
    for (name, want) in rows {
        assert_eq!(write(name), want, "{name}");
    }
    let raw = FORMS[0];
    assert_eq!((raw.half("0123456789abcdef"), raw.half("012345678"), raw.edges("0123456789abcdef")), (8, 8, (1, 1)));
    for form in FORMS.iter().filter(|form| !form.codings.is_empty()) {
        let body = junk(100_000);
        assert!(form.decoded(&form.coded(&body)) == body, "{}", form.name);
    }
}

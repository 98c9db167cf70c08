//! An origin that writes a whole answer at once does not pause in it, however it is cut into chunks or fragments: no part of a
//! returned value is visible.

use tokio::io::AsyncReadExt;
use tokio::time::timeout;

use super::Field;
use super::origin::Words;
use super::road::{self, unmasked};
use crate::lab::client::Way;
use crate::lab::{Lab, LabBuilder, TIMEOUT, origin};

const KEY: &str = "k7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5JfTgA1xZq";

/// Starts a proxy with [`KEY`], and an origin over HTTP/1.1 that answers each request with these bytes.
async fn lab(words: Vec<u8>) -> (Lab, String) {
    let builder = LabBuilder::new().await;
    let (port, _) = origin::raw_tls(&builder, "api.test", words.leak()).await;
    std::fs::write(builder.dir.path().join("key"), KEY).unwrap();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
         [credentials.KEY]\nvalue = \"file:key\"\ndomains = [\"api.test\"]\nauth_type = \"bearer\"\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
    );
    (builder.proxy(&text).await, format!("https://api.test:{port}/"))
}

/// Returns the length of the longest part of the value in a text.
fn visible(text: &[u8]) -> usize {
    let parts = (0..KEY.len()).flat_map(|from| (from + 1..=KEY.len()).map(move |to| &KEY[from..to]));
    let shown = parts.filter(|part| text.windows(part.len()).any(|window| window == part.as_bytes()));
    shown.map(str::len).max().unwrap_or_default()
}

fn chunked(pieces: &[&[u8]]) -> Vec<u8> {
    let mut words = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n".to_vec();
    for piece in pieces {
        words.extend(format!("{:x}\r\n", piece.len()).bytes());
        words.extend_from_slice(piece);
        words.extend(b"\r\n");
    }
    words.extend(b"0\r\n\r\n");
    words
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_that_arrive_together_show_no_part() {
    let text = format!("{}{KEY}{}", "#".repeat(50), "#".repeat(50));
    let (long_before, long_after) = ("#".repeat(4096 - 19), "#".repeat(4000));
    let long = format!("{long_before}{KEY}{long_after}");
    let half = 50 + KEY.len() / 2 - 1;
    let bytes = text.as_bytes();
    let cuts: [Vec<&[u8]>; 5] = [
        vec![&bytes[..half], &bytes[half..]],
        bytes.chunks(1).collect(),
        bytes.chunks(4).collect(),
        bytes.chunks(10).collect(),
        long.as_bytes().chunks(4096).collect(),
    ];
    for (n, cut) in cuts.iter().enumerate() {
        let (lab, url) = lab(chunked(cut)).await;
        for round in 0..10 {
            for way in Way::ALL {
                // In an exchange in which the value was sent, and in another one.
                let fields: &[(&str, &str)] = if round % 2 == 0 { &[("exeat-credential", "KEY")] } else { &[] };
                let reply = lab.by(way, "GET", &url, fields, "").await;
                let shown = visible(&reply.body);
                assert!(reply.body.len() == cut.concat().len() && shown <= 1, "{n} {round} {way:?}: {shown}");
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn fragments_that_arrive_together_show_no_part() {
    let text = format!("##########{KEY}##########");
    let field = Field::holding(&[("KEY", KEY)]).await;
    for length in [1, 4, 10 + KEY.len() / 2 - 1] {
        let pieces: Vec<&[u8]> = text.as_bytes().chunks(length).collect();
        let (mut sent, mut wanted) = (Vec::new(), Vec::new());
        for (n, piece) in pieces.iter().enumerate() {
            let (opcode, last) = (u8::from(n == 0), n + 1 == pieces.len());
            let redacted: Vec<u8> = piece.iter().map(|byte| if *byte == b'#' { b'#' } else { b'*' }).collect();
            sent.extend(unmasked(opcode, last, piece));
            wanted.extend(unmasked(opcode, last, &redacted));
            // Control frames between fragments stay where they are.
            sent.extend(unmasked(9, true, b"ping"));
            wanted.extend(unmasked(9, true, b"ping"));
        }
        // Fragments without payload, and a message after the fragmented one.
        for frames in [&mut sent, &mut wanted] {
            for (opcode, last, payload) in [(2, false, ""), (0, false, ""), (0, true, ""), (1, true, "next")] {
                frames.extend(unmasked(opcode, last, payload.as_bytes()));
            }
        }
        for way in [road::Way::Http, road::Way::Https, road::Way::TunnelH1] {
            for round in 0..5 {
                let key = format!("fragments-{length}-{round}");
                field.origin(way).says(&key, Words { pieces: vec![sent.clone()], ..Words::default() });
                let (mut stream, mut received) = field.socket(way, &key).await;
                while received.len() < wanted.len() {
                    let more = timeout(TIMEOUT, stream.read_buf(&mut received)).await.expect("more arrives");
                    assert!(more.unwrap() > 0, "{way:?}: {} of {}", received.len(), wanted.len());
                }
                let shown = String::from_utf8_lossy(&received);
                assert!(received == wanted, "{length} {way:?} {round}: {shown:?}");
            }
        }
    }
}

//! Tests of all codings together.

use std::io::Write;

use flate2::write::{DeflateEncoder, GzEncoder, ZlibEncoder};
use flate2::{Compress, Compression, FlushCompress, GzBuilder};
use proptest::collection::vec;
use proptest::prelude::*;

use super::brotli::{MAX_PIECE, window_bits};
use super::budget::{CAPACITY, WindowMemory};
use super::*;

const FREE: DecodeLimits = DecodeLimits { total: u64::MAX, ratio: None };
const ALL: [Coding; 5] = [Coding::AwsChunked, Coding::Brotli, Coding::Deflate, Coding::Gzip, Coding::Zstd];

fn encode(coding: Coding, text: &[u8]) -> Vec<u8> {
    match coding {
        Coding::AwsChunked => aws_chunked(text, 1000),
        Coding::Brotli => brotli_encode(text, 22, false),
        Coding::Deflate => {
            let mut encoder = ZlibEncoder::new(Vec::new(), Compression::default());
            encoder.write_all(text).unwrap();
            encoder.finish().unwrap()
        }
        Coding::Gzip => gzipped(text, GzBuilder::new()),
        Coding::Zstd => ruzstd::encoding::compress_to_vec(text, ruzstd::encoding::CompressionLevel::Fastest),
    }
}

fn aws_chunked(text: &[u8], size: usize) -> Vec<u8> {
    let signature = "b055".repeat(16);
    let mut coded = Vec::new();
    for chunk in text.chunks(size) {
        coded.extend(format!("{:x};chunk-signature={signature}\r\n", chunk.len()).into_bytes());
        coded.extend([chunk, b"\r\n"].concat());
    }
    coded.extend(format!("0;chunk-signature={signature}\r\nx-amz-checksum-crc32:sOO8/Q==\r\n\r\n").into_bytes());
    coded
}

fn brotli_encode(text: &[u8], lgwin: i32, large_window: bool) -> Vec<u8> {
    let params = ::brotli::enc::BrotliEncoderParams { quality: 5, lgwin, large_window, ..Default::default() };
    let mut coded = Vec::new();
    ::brotli::BrotliCompress(&mut &text[..], &mut coded, &params).unwrap();
    coded
}

fn gzipped(text: &[u8], builder: GzBuilder) -> Vec<u8> {
    let mut encoder: GzEncoder<Vec<u8>> = builder.write(Vec::new(), Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn raw(text: &[u8]) -> Vec<u8> {
    let mut encoder = DeflateEncoder::new(Vec::new(), Compression::default());
    encoder.write_all(text).unwrap();
    encoder.finish().unwrap()
}

fn encode_all(codings: &[Coding], text: &[u8]) -> Vec<u8> {
    codings.iter().fold(text.to_vec(), |text, coding| encode(*coding, &text))
}

/// A decoder, with its input and output.
struct Run {
    decoder: Decoder,
    fed: u64,
    out: Vec<u8>,
}

impl Run {
    fn new(codings: &[Coding], bounds: DecodeLimits) -> Self {
        Self { decoder: Decoder::new(codings, bounds, &Arc::default()).unwrap(), fed: 0, out: Vec::new() }
    }

    fn feed(&mut self, mut piece: &[u8]) -> Result<(), DecodeError> {
        self.fed += piece.len() as u64;
        let mut more = true;
        while more {
            let (mut out, settled) = (Vec::new(), self.decoder.settled());
            let result = self.decoder.decode(&mut piece, &mut out);
            assert!(out.len() <= STEP);
            self.out.extend(out);
            assert!(settled <= self.decoder.settled() && self.decoder.settled() <= self.fed);
            more = result?;
        }
        assert!(piece.is_empty());
        Ok(())
    }

    fn end(&self) -> Result<(), DecodeError> {
        self.decoder.end()?;
        assert_eq!(self.decoder.settled(), self.fed);
        Ok(())
    }
}

fn decode<'b>(codings: &[Coding], cuts: impl IntoIterator<Item = &'b [u8]>) -> Result<Vec<u8>, DecodeError> {
    let mut run = Run::new(codings, FREE);
    cuts.into_iter().try_for_each(|piece| run.feed(piece))?;
    run.end()?;
    Ok(run.out)
}

fn every_pair() -> Vec<Vec<Coding>> {
    let pairs = ALL.into_iter().flat_map(|first| ALL.map(|last| vec![first, last]));
    ALL.map(|coding| vec![coding]).into_iter().chain(pairs).collect()
}

fn lines(count: u64) -> Vec<u8> {
    (0..count).flat_map(|i| format!("{i} {}\n", i * i % 97).into_bytes()).collect()
}

fn periodic(size: usize) -> Vec<u8> {
    let mut text: Vec<u8> = Vec::new();
    for i in 0_usize.. {
        if text.len() >= size {
            break;
        }
        text.extend(format!("{}:", i * i % 1009).repeat(1 + i % 5 * 200).into_bytes());
    }
    text.truncate(size);
    text
}

fn unbase64(text: &str) -> Vec<u8> {
    use base64::Engine as _;
    base64::engine::general_purpose::STANDARD.decode(text).unwrap()
}

/// Texts with near and distant repetitions, and incompressible data between.
fn text() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        vec(any::<u8>(), 0..600),
        (vec(any::<u8>(), 1..20), 1_usize..3000).prop_map(|(bytes, times)| bytes.repeat(times)),
        (0_u64..600).prop_map(lines),
    ];
    vec(piece, 0..8).prop_map(|pieces| {
        let text = pieces.concat();
        [&text[..], &pieces.first().cloned().unwrap_or_default()].concat()
    })
}

fn some_codings() -> impl Strategy<Value = Vec<Coding>> {
    proptest::sample::select(every_pair())
}

#[test]
fn aws_chunks_are_joined_and_malformed_ones_refused() {
    let fine = [
        "3\r\nabc\r\n2;chunk-signature=00ff\r\nde\r\n0\r\n\r\n",
        "0000003\r\nabc\r\n2\r\nde\r\n0;chunk-signature=00ff\r\n\r\n",
        "5\r\nabcde\r\n0\r\nx-amz-checksum-crc32:sOO8/Q==\r\n\r\n",
        "5\r\nabcde\r\n0\r\nx-amz-checksum-crc32:sOO8/Q==\r\nx-amz-trailer-signature:00ff\r\n\r\n",
    ];
    for coded in fine {
        assert_eq!(decode(&[Coding::AwsChunked], [coded.as_bytes()]).unwrap(), b"abcde", "{coded:?}");
        let cut = decode(&[Coding::AwsChunked], coded.as_bytes().chunks(1));
        assert_eq!(cut.unwrap(), b"abcde", "{coded:?}");
    }
    let bad = [
        "abcde".to_owned(),
        ";x\r\nabc\r\n0\r\n\r\n".to_owned(),
        "\r\nabc\r\n0\r\n\r\n".to_owned(),
        "3\nabc\n0\n\n".to_owned(),
        "3 \r\nabc\r\n0\r\n\r\n".to_owned(),
        "3;a b\r\nabc\r\n0\r\n\r\n".to_owned(),
        "3\r\nabcd\r\n0\r\n\r\n".to_owned(),
        "3\r\nabc".to_owned(),
        "3\r\nabc\r\n".to_owned(),
        "3\r\nabc\r\n0".to_owned(),
        "3\r\nabc\r\n0\r\n".to_owned(),
        "3\r\nabc\r\n0\r\nx-amz\r\n".to_owned(),
        "3\r\nabc\r\n0\r\n\r\nx".to_owned(),
        "10000000000000000\r\nabc\r\n0\r\n\r\n".to_owned(),
        format!("3;{}\r\nabc\r\n0\r\n\r\n", "x".repeat(1100)),
        format!("0\r\n{}\r\n", "x".repeat(17_000)),
    ];
    for coded in bad {
        assert_eq!(decode(&[Coding::AwsChunked], [coded.as_bytes()]), Err(DecodeError::Malformed), "{coded:?}");
    }
}

#[test]
fn tokens_parse_as_codings() {
    let rows = [
        ("gzip", Some(Coding::Gzip)),
        ("X-GZip", Some(Coding::Gzip)),
        ("Deflate", Some(Coding::Deflate)),
        ("br", Some(Coding::Brotli)),
        ("ZSTD", Some(Coding::Zstd)),
        ("identity", None),
        ("compress", None),
        ("dcb", None),
        ("", None),
    ];
    for (token, want) in rows {
        assert_eq!(Coding::from_token(token), want, "{token}");
    }
    for coding in ALL {
        let want = Some(coding).filter(|coding| *coding != Coding::AwsChunked);
        assert_eq!(Coding::from_token(coding.as_str()), want);
    }
}

#[test]
fn one_or_two_codings_are_decoded() {
    assert!(Decoder::new(&[], FREE, &Arc::default()).is_none());
    assert!(Decoder::new(&[Coding::Gzip; 3], FREE, &Arc::default()).is_none());
    let text = [lines(500), periodic(300_000)].concat();
    for codings in every_pair() {
        let coded = encode_all(&codings, &text);
        assert_eq!(decode(&codings, [&coded[..]]).unwrap(), text, "{codings:?}");
        assert_eq!(decode(&codings, coded.chunks(1)).unwrap(), text, "{codings:?} in pieces");
    }
}

#[test]
fn an_empty_body_is_valid_in_every_coding() {
    for codings in every_pair() {
        assert_eq!(decode(&codings, [&b""[..]]), Ok(Vec::new()));
        let coded = encode_all(&codings, b"");
        assert_eq!(decode(&codings, [&coded[..]]), Ok(Vec::new()));
    }
    // The outer coding holds an empty body.
    assert_eq!(decode(&[Coding::Zstd, Coding::Gzip], [&encode(Coding::Gzip, b"")[..]]), Ok(Vec::new()));
}

#[test]
fn a_truncated_body_is_malformed() {
    for codings in every_pair() {
        let coded = encode_all(&codings, &lines(60));
        for size in 1..coded.len() {
            assert_eq!(
                decode(&codings, [&coded[..size]]),
                Err(DecodeError::Malformed),
                "{codings:?} after {size} bytes"
            );
        }
    }
    let text = lines(60);
    let coded = raw(&text);
    for size in 1..coded.len() {
        assert_eq!(decode(&[Coding::Deflate], [&coded[..size]]), Err(DecodeError::Malformed));
    }
}

#[test]
fn bytes_after_the_end_are_malformed() {
    let rests: [&[u8]; 5] = [b"\0", b"x", b"secret", &[0; 512], b"\x1f\x8b"];
    for coding in ALL {
        for rest in rests {
            let coded = [&encode(coding, b"text"), rest].concat();
            assert_eq!(decode(&[coding], [&coded[..]]), Err(DecodeError::Malformed), "{coding:?} {rest:?}");
            assert_eq!(decode(&[coding], coded.chunks(1)), Err(DecodeError::Malformed), "{coding:?} {rest:?}");
            let coded = encode(Coding::Gzip, &coded);
            assert_eq!(decode(&[coding, Coding::Gzip], [&coded[..]]), Err(DecodeError::Malformed));
        }
    }
    let twice = [raw(b"text"), raw(b"text")].concat();
    assert_eq!(decode(&[Coding::Deflate], [&twice[..]]), Err(DecodeError::Malformed));
}

#[test]
fn an_error_is_permanent() {
    let mut run = Run::new(&[Coding::Zstd], FREE);
    assert_eq!(run.feed(b"not zstd"), Err(DecodeError::Malformed));
    assert_eq!(run.feed(&encode(Coding::Zstd, b"text")), Err(DecodeError::Malformed));
    assert_eq!(run.end(), Err(DecodeError::Malformed));
}

#[test]
fn bombs_exceed_the_limits() {
    let bounds = DecodeLimits { total: 8 << 20, ratio: None };
    let low_ratio = DecodeLimits { total: u64::MAX, ratio: Some(20) };
    // A frame of RLE blocks: one GiB.
    let blocks = [0x02 | 1 << 1, 0, 0x10, 0].repeat(8192);
    let zstd = [&b"\x28\xb5\x2f\xfd\0\x68"[..], &blocks].concat();
    let zeros = vec![0; 64 << 20];
    let mut bombs = vec![(vec![Coding::Zstd], zstd.clone())];
    for coding in [Coding::Brotli, Coding::Deflate, Coding::Gzip] {
        let one = encode(coding, &zeros);
        bombs.push((vec![coding, Coding::Gzip], encode(Coding::Gzip, &one)));
        bombs.push((vec![coding], one));
    }
    for coding in ALL {
        bombs.push((vec![Coding::Zstd, coding], encode(coding, &zstd)));
    }
    for (codings, bomb) in bombs {
        let mut run = Run::new(&codings, bounds);
        assert_eq!(run.feed(&bomb), Err(DecodeError::TooMuch), "{codings:?}");
        assert!(run.out.len() <= (8 << 20) + STEP, "{codings:?}");
        assert_eq!(run.end(), Err(DecodeError::TooMuch));
        let mut run = Run::new(&codings, low_ratio);
        assert_eq!(run.feed(&bomb), Err(DecodeError::TooMuch), "{codings:?}");
        assert!(run.out.len() <= 20 * bomb.len() + RATIO_FREE_BYTES as usize + STEP, "{codings:?}");
    }
    // The inner coding need not return anything.
    let silent = [&b"\x50\x2a\x4d\x18\0\0\0\x04"[..], &zeros].concat();
    let mut run = Run::new(&[Coding::Zstd, Coding::Gzip], bounds);
    assert_eq!(run.feed(&encode(Coding::Gzip, &silent)), Err(DecodeError::TooMuch));
    // A small body may have a high ratio.
    let mut run = Run::new(&[Coding::Gzip], DecodeLimits { total: 65536, ratio: Some(0) });
    assert_eq!(run.feed(&encode(Coding::Gzip, &zeros[..65536])), Ok(()));
    assert_eq!(run.end(), Ok(()));
}

#[test]
fn gzip_may_have_many_members_and_long_heads() {
    let names = || GzBuilder::new().filename("a name").comment("a comment").extra(&b"something"[..]);
    let coded = [gzipped(b"one ", names()), gzipped(b"", names()), gzipped(b"two", GzBuilder::new())].concat();
    assert_eq!(decode(&[Coding::Gzip], [&coded[..]]).unwrap(), b"one two");
    assert_eq!(decode(&[Coding::Gzip], coded.chunks(1)).unwrap(), b"one two");
    let coded = gzipped(b"text", GzBuilder::new().comment("x".repeat(1_000_000)));
    assert_eq!(decode(&[Coding::Gzip], coded.chunks(1000)).unwrap(), b"text");
    // The flags are not combined over the members.
    let many = gzipped(b"x", names()).repeat(500);
    assert_eq!(decode(&[Coding::Gzip], many.chunks(7)).unwrap(), b"x".repeat(500));
}

#[test]
fn gzip_heads_and_trailers_are_checked() {
    let body = raw(b"text");
    let mut crc = flate2::Crc::new();
    crc.update(b"text");
    let trailer = [crc.sum().to_le_bytes(), 4_u32.to_le_bytes()].concat();
    let of_head = |head: &[u8]| {
        let mut crc = flate2::Crc::new();
        crc.update(head);
        u16::try_from(crc.sum() & 0xffff).unwrap().to_le_bytes()
    };
    let head = |flags: u8| vec![0x1f, 0x8b, 8, flags, 1, 2, 3, 4, 5, 6];
    let empty_extra = [&head(4)[..], &[0, 0]].concat();
    let checked = [&head(2)[..], &of_head(&head(2))].concat();
    let all = [&head(1 | 2 | 4 | 8 | 16)[..], b"\x03\0abcname\0\0"].concat();
    let all = [&all[..], &of_head(&all)].concat();
    let wrong = [&head(2)[..], &[0, 0]].concat();
    let rows = [
        (head(0), true),
        (head(1), true),
        (empty_extra, true),
        (checked, true),
        (all, true),
        (wrong, false),
        (head(0x20), false),
        (vec![0x1f, 0x8b, 7, 0, 0, 0, 0, 0, 0, 0], false),
        (vec![0x1f, 0x8c, 8, 0, 0, 0, 0, 0, 0, 0], false),
    ];
    for (head, fine) in rows {
        let coded = [&head[..], &body, &trailer].concat();
        assert_eq!(decode(&[Coding::Gzip], [&coded[..]]).is_ok(), fine, "{head:02x?}");
        for at in 0..trailer.len() {
            let mut coded = coded.clone();
            let place = coded.len() - 1 - at;
            coded[place] ^= 1;
            assert_eq!(decode(&[Coding::Gzip], [&coded[..]]), Err(DecodeError::Malformed));
        }
    }
}

#[test]
fn deflate_may_be_raw() {
    for text in [b"".to_vec(), b"x".to_vec(), lines(400)] {
        let coded = raw(&text);
        assert_eq!(decode(&[Coding::Deflate], [&coded[..]]).unwrap(), text);
        assert_eq!(decode(&[Coding::Deflate], coded.chunks(1)).unwrap(), text);
        assert_eq!(decode(&[Coding::Deflate, Coding::Gzip], encode(Coding::Gzip, &coded).chunks(1)).unwrap(), text);
    }
    let mut encoder = Compress::new(Compression::default(), true);
    encoder.set_dictionary(b"a dictionary").unwrap();
    let mut coded = Vec::with_capacity(100);
    encoder.compress_vec(b"a dictionary", &mut coded, FlushCompress::Finish).unwrap();
    assert_eq!(decode(&[Coding::Deflate], [&coded[..]]), Err(DecodeError::Malformed));
    // A wrong checksum.
    let mut coded = encode(Coding::Deflate, b"text");
    *coded.last_mut().unwrap() ^= 1;
    assert_eq!(decode(&[Coding::Deflate], [&coded[..]]), Err(DecodeError::Malformed));
}

/// Tests that short bodies can request much memory only up to the limit for all.
#[test]
fn windows_share_a_memory_limit() {
    let window = |bits: i32| window_bits(brotli_encode(b"text", bits, false)[0]);
    // The encoder may use a smaller window than requested.
    assert!(
        (10..=24).all(|bits| window(bits) <= bits.max(16) as u32),
        "{:?}",
        (10..=24).map(window).collect::<Vec<_>>()
    );
    assert_eq!((window_bits(0x0f), window_bits(0x01), window_bits(0x00), window_bits(0x21)), (24, 17, 16, 10));
    let pool = Arc::<WindowPool>::default();
    let room = |most: u64, decoded: u64| {
        let mut room = WindowMemory::new(pool.clone());
        room.start_window(most);
        room.reserve(decoded).map(|()| room)
    };
    assert_eq!(room(16 << 20, 1).map(|room| room.taken), Ok(1 << 20), "as much as has been filled");
    let half = room(CAPACITY, CAPACITY * 3 / 4);
    assert!(half.is_ok() && pool.is_short() && room(CAPACITY, CAPACITY / 2).is_err());
    drop(half);
    assert!(room(CAPACITY, CAPACITY / 2).is_ok());
    // Of an execution's share, no other execution has to give.
    let (one, other) = (pool.share(), pool.share());
    let of = |share: &Arc<WindowPool>, decoded: u64| {
        let mut room = WindowMemory::new(share.clone());
        room.start_window(CAPACITY);
        room.reserve(decoded).map(|()| room)
    };
    let all = of(&one, CAPACITY / 4);
    assert!(all.is_ok() && one.is_short() && !other.is_short());
    assert_eq!(of(&one, 1).err(), Some(DecodeError::NoMemory));
    let rest = room(CAPACITY, CAPACITY * 3 / 4);
    assert!(rest.is_ok() && of(&other, 1).is_err(), "what a share reserves counts for the pool");
    drop((all, rest));
    assert!(of(&one, CAPACITY / 4).is_ok() && of(&other, 1).is_ok() && !pool.is_short());
    assert_eq!(decode(&[Coding::Brotli], [&brotli_encode(b"text", 24, false)[..]]).unwrap(), b"text");
}

/// A window is charged when it is filled, before its content is returned.
#[test]
fn brotli_windows_are_charged_when_they_are_filled() {
    let coded = brotli_encode(&vec![b'x'; 40_000_000], 24, false);
    let pool = Arc::<WindowPool>::default().share();
    // Decodes up to the first output.
    let begin = || {
        let mut decoder = Decoder::new(&[Coding::Brotli], FREE, &pool).unwrap();
        let (mut out, mut rest) = (Vec::new(), coded.as_slice());
        for _ in 0..100 {
            if out.is_empty() {
                decoder.decode(&mut rest, &mut out)?;
            }
        }
        assert!((1..=STEP).contains(&out.len()));
        Ok(decoder)
    };
    let mut decoders: Vec<_> = (0..3).map(|_| begin().unwrap()).collect();
    assert_eq!(begin().err(), Some(DecodeError::NoMemory), "the share has 64 MiB, and each decoder has tables");
    decoders.pop();
    assert!(begin().is_ok());
}

/// Eighteen bytes announce 256 trees for each of two kinds of symbols, which take megabytes before any output.
#[test]
fn brotli_tables_are_charged() {
    let announced = [33, 252, 255, 243, 255, 0, 16, 249, 255, 255, 223, 207, 255, 5, 128, 255, 11, 0];
    let pool = Arc::<WindowPool>::default().share();
    let begin = |coded: &[u8]| {
        let mut decoder = Decoder::new(&[Coding::Brotli], FREE, &pool).unwrap();
        let (mut out, mut rest) = (Vec::new(), coded);
        while decoder.decode(&mut rest, &mut out)? {}
        Ok(decoder)
    };
    let mut decoders = Vec::new();
    while let Ok(decoder) = begin(&announced) {
        decoders.push(decoder);
        assert!(decoders.len() < 64, "{} are open", decoders.len());
    }
    assert_eq!(begin(&announced).err(), Some(DecodeError::NoMemory));
    assert!(decoders.len() > 15);
    decoders.clear();
    // An ordinary body takes little more than its window.
    let coded = brotli_encode(LONG.repeat(20).as_bytes(), 22, false);
    let ordinary = || begin(&coded[..coded.len() - 1]);
    let decoders: Vec<_> = (0..40).map(|_| ordinary().map_err(|error| format!("{error:?}"))).collect();
    assert!(decoders.iter().all(Result::is_ok));
}

#[test]
fn brotli_refuses_large_windows() {
    let text = lines(3000);
    for lgwin in [10, 16, 24] {
        assert_eq!(decode(&[Coding::Brotli], brotli_encode(&text, lgwin, false).chunks(100)).unwrap(), text);
    }
    let coded = brotli_encode(&text, 28, true);
    assert_eq!(decode(&[Coding::Brotli], [&coded[..]]), Err(DecodeError::Malformed));
}

#[test]
fn output_of_the_zstd_command_is_decoded() {
    let rows = [(LINES, lines(300)), (LINES_STREAMED, lines(300)), (PERIODIC, periodic(1_200_000))];
    for (coded, text) in rows {
        let coded = unbase64(coded);
        assert!(decode(&[Coding::Zstd], [&coded[..]]).unwrap() == text);
        assert!(decode(&[Coding::Zstd], coded.chunks(1)).unwrap() == text);
        for at in 0..coded.len().min(1000) {
            let mut coded = coded.clone();
            coded[at] ^= 0x10;
            drop(decode(&[Coding::Zstd], [&coded[..]]));
        }
    }
    assert_eq!(decode(&[Coding::Zstd], [&unbase64(LONG)[..]]), Err(DecodeError::Malformed));
    let mut wrong = unbase64(LINES);
    *wrong.last_mut().unwrap() ^= 1;
    assert_eq!(decode(&[Coding::Zstd], [&wrong[..]]), Err(DecodeError::Malformed));
}

#[test]
fn zstd_frames_must_match_their_headers() {
    let magic = b"\x28\xb5\x2f\xfd";
    let raw_block = |last: bool, text: &[u8]| {
        let head = u32::try_from(text.len()).unwrap() << 3 | u32::from(last);
        [&head.to_le_bytes()[..3], text].concat()
    };
    let text = raw_block(true, b"text");
    let first_of_two = raw_block(false, b"te");
    let (one, skipped) = ([&magic[..], b"\x20\x04", &text].concat(), b"\x5f\x2a\x4d\x18\x03\0\0\0abc".to_vec());
    let rows: [(Vec<u8>, Option<&[u8]>); 19] = [
        (one.clone(), Some(b"text")),
        ([&one[..], &one].concat(), Some(b"texttext")),
        ([&skipped[..], &one, &skipped, &one].concat(), Some(b"texttext")),
        (b"\x50\x2a\x4d\x18\0\0\0\0".to_vec(), Some(b"")),
        ([&one[..], b"\x50\x2a\x4d\x18\x01\0\0\0"].concat(), None),
        ([&one[..], b"\x60\x2a\x4d\x18\x01\0\0\0a"].concat(), None),
        // Content sizes of one, two, four and eight bytes.
        ([&magic[..], b"\x20\x05", &text].concat(), None),
        ([&magic[..], b"\x20\x03", &text].concat(), None),
        ([&magic[..], b"\x60\0\0", &raw_block(true, &[b'x'; 256])].concat(), Some(&[b'x'; 256])),
        ([&magic[..], b"\x80\0\x04\0\0\0", &text].concat(), Some(b"text")),
        ([&magic[..], b"\xc0\0\x04\0\0\0\0\0\0\0", &text].concat(), Some(b"text")),
        // Only a window: slightly more than 8 MiB.
        ([&magic[..], b"\0\x68", &first_of_two, &text].concat(), Some(b"tetext")),
        ([&magic[..], b"\0\x69", &text].concat(), None),
        ([&magic[..], b"\xa0\x01\0\x80\0", &text].concat(), None),
        // A dictionary: id zero, and another id.
        ([&magic[..], b"\x01\0\0", &text].concat(), Some(b"text")),
        ([&magic[..], b"\x03\0\0\x01\0\0", &text].concat(), None),
        // A reserved bit, a reserved block type, and a block larger than the window.
        ([&magic[..], b"\x08\0", &text].concat(), None),
        ([&magic[..], b"\0\0\x27\0\0text"].concat(), None),
        ([&magic[..], b"\0\0", &raw_block(true, &[0; 1025])].concat(), None),
    ];
    for (coded, want) in rows {
        let head = &coded[..coded.len().min(20)];
        assert_eq!(decode(&[Coding::Zstd], [&coded[..]]).ok().as_deref(), want, "{head:02x?}");
        assert_eq!(decode(&[Coding::Zstd], coded.chunks(1)).ok().as_deref(), want, "{head:02x?}");
    }
}

#[test]
fn zstd_returns_each_complete_block() {
    let coded = unbase64(PERIODIC);
    let mut run = Run::new(&[Coding::Zstd], FREE);
    let size = usize::try_from(u32::from_le_bytes([coded[6], coded[7], coded[8], 0]) >> 3).unwrap();
    run.feed(&coded[..9 + size]).unwrap();
    assert!(run.out == periodic(128 * 1024));
    assert_eq!(run.decoder.settled(), 9 + size as u64);
}

#[test]
fn a_flushed_stream_does_not_stall() {
    // More than one call returns.
    for text in [b"an event".to_vec(), periodic(1_000_000)] {
        let mut inflated = Vec::with_capacity(1 << 20);
        let mut encoder = Compress::new(Compression::default(), false);
        encoder.compress_vec(&text, &mut inflated, FlushCompress::Sync).unwrap();
        let mut encoder = ::brotli::CompressorWriter::new(Vec::new(), 4096, 5, 22);
        encoder.write_all(&text).unwrap();
        encoder.flush().unwrap();
        let brotli = encoder.get_ref().clone();
        for (codings, coded) in [
            (&[Coding::Deflate][..], &inflated),
            (&[Coding::Brotli], &brotli),
            (&[Coding::Brotli, Coding::Gzip], &encode(Coding::Gzip, &brotli)),
        ] {
            let mut run = Run::new(codings, FREE);
            run.feed(coded).unwrap();
            assert!(run.out == text, "{codings:?}");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn whole_equals_cut_anywhere(text in text(), codings in some_codings(), cuts in vec(1_usize..5000, 1..20)) {
        let coded = encode_all(&codings, &text);
        prop_assert!(decode(&codings, [&coded[..]]).unwrap() == text);
        let (mut pieces, mut rest) = (Vec::new(), &coded[..]);
        for cut in cuts.iter().cycle() {
            let (piece, remaining) = rest.split_at((*cut).min(rest.len()));
            pieces.push(piece);
            rest = remaining;
            if rest.is_empty() {
                break;
            }
        }
        prop_assert!(decode(&codings, pieces).unwrap() == text);
    }

        /// The output for a settled prefix is complete, and decoding resumes after it.
    #[test]
    fn all_output_of_settled_bytes_is_returned(text in text(), codings in some_codings(), size in 1_usize..200) {
        let coded = encode_all(&codings, &text);
        let mut run = Run::new(&codings, FREE);
        for (number, piece) in coded.chunks(size).enumerate() {
            run.feed(piece).unwrap();
            if number % (1 + coded.len() / size / 10) != 0 {
                continue;
            }
            let (prefix, rest) = coded.split_at(usize::try_from(run.decoder.settled()).unwrap());
            let mut again = Run::new(&codings, FREE);
            again.feed(prefix).unwrap();
            prop_assert!(run.out.starts_with(&again.out));
            again.feed(rest).unwrap();
            prop_assert!(again.out == text);
            prop_assert_eq!(again.end(), Ok(()));
        }
        prop_assert_eq!(run.end(), Ok(()));
    }

    #[test]
    fn hostile_bytes_are_bounded(text in text(), codings in some_codings(), flips in vec((any::<u32>(), any::<u8>()), 1..6), size in 1_usize..5000) {
        let mut coded = encode_all(&codings, &text);
        for (at, mask) in flips {
            let place = at as usize % coded.len();
            coded[place] ^= mask;
        }
        let mut run = Run::new(&codings, DecodeLimits { total: 1 << 20, ratio: Some(1000) });
        let done = coded.chunks(size).try_for_each(|piece| run.feed(piece)).and_then(|()| run.end());
        prop_assert!(run.out.len() <= (1 << 20) + STEP);
        let checked = [Coding::Deflate, Coding::Gzip].contains(codings.last().unwrap());
        prop_assert!(done.is_err() || !checked || run.out == text);
    }

    #[test]
    fn any_bytes_are_bounded(mut bytes in vec(any::<u8>(), 0..2000), coding in proptest::sample::select(&ALL[..]), begun: bool) {
        let begin: &[u8] = match coding {
            Coding::AwsChunked => b"3ff;",
            Coding::Brotli => b"\x0b",
            Coding::Deflate => b"\x78\x9c",
            Coding::Gzip => b"\x1f\x8b\x08\0\0\0\0\0\0\0",
            Coding::Zstd => b"\x28\xb5\x2f\xfd\0\x58",
        };
        if begun {
            bytes.splice(..0, begin.iter().copied());
        }
        let mut run = Run::new(&[coding], DecodeLimits { total: 1 << 20, ratio: Some(1000) });
        let _ = run.feed(&bytes);
        prop_assert!(run.out.len() <= (1 << 20) + STEP);
    }
}

// Written by the `zstd` command, version 1.5.4: with -19 from a file; with -1 --no-check from a pipe; with -19
// --zstd=wlog=17; with --ultra -22 --long=27.

const LINES: &str = "\
    KLUv/WSVBp0aALpTeAkJsDskSRSBGMCNkwCTAJQAJ07URLtAJOsNiWpDk9bwURqaO0OqTMzHA3PCqJpwqiW8KgnHOsK4ipAaQnMvfNRCk4KQqB\
    ckqwXtVnCiFDR1gmeV4N8IyvRBszpYLwSHeqfVTpjWKVc6Qzqnr3KKNE66/oypz7twQvXMiJo51zJPJdPRMV8xXw2zpDfltRkF09ajUI0nLVKU\
    OO+QXOE1KD1dEwoBQ6Wb1rkJU7nGzZD+pq++KVK4Sdebmm0TqmQzomOhhk1HX9t8FXyvgYk6YIkGGExyDeYVwJSeHaF1dOkoneNVjuTGcd4fKe\
    rjSeEo1DPaasZoGeUlY0nH+KoY3zA6euOpNs4VjBG9IlSteLeKMaUiXacoUin6GsWQvihXF2EKResRh2rEeotoViLKdIh/hXjWIJoa56sFZ0np\
    HTijAqetAadQD+dJDSdFAW5FcyZUznTjTOnPvPpMcuHMec9MipqZJy0zhUpm2jpmRsXCbjbzBTMdvbIqqimZRrlcUEdGVSJzqENmvUKmWYNMJq\
    CL2nhoZmRiPibVA3NWVJ2qiHnVEHOsFzOuFpMKYpp7UQtTKUyyTph2JcyJRpimPsyzOsy/EKZMz2r3zRTqnV3db07id0J9pwt3Sq9mJ7llZGNC\
    DTttvZ1RG9iVtYpqSirq5YI6MioiGpIGnUxAH5samplPzMcDc2JSNBJyRvVVy3lVkHOsF2dcreVSnI9OnCYVasRJ1ruOc6IQ/3lW+/m3fsqUrP\
    P/HGr8tP4nTP1TrvBfzadIyyddyWdMx+dd8QnV8BnR+5yrfZ4KPh29GgR+qDFAGQUWSTBBkiYFSaExIEZgmCraAxBQ/J4MkgVBjUcWvc+RXy7Z\
    SQok8wsKIH+6ewJPHcaCO1SJsxwF4MkBWVlpSNOhLClPSYRABzsLOLUuk/f5wmidieIaOP6owmmPQhCjXo0RcYXXjteVli+VUYAPfoN70lSyGl\
    ehryT7H6iQhran7hOUlwrAn8/dG9/7n6rDyY4RXugdZGmlkUaHsKSiE/dMrc9kfQaCwG9B4QbHEzUZLgsB7TPd8aNaHo+NS/vHHwEk9k3S+01z\
    4oD0PEnK+iYlEeQDuAcJssS6KnA8dC+oQHs2Ny8ohQ2LYF4FYRRn6g==";
const LINES_STREAMED: &str = "\
    KLUv/QBI/RoAWnloDQmwOyRJFIEYwI3VANIA0QAV4xtGR2881ca5gjGiV4SqFe9WMaZUpOsURSpFX6MY0hfl6iJMoWg94lCNWG8RzUpEmQ7xrx\
    DPGkRTT5yoiXaBSNYbEtWGJq3hozQ0d4ZUGcY1hmP98KoeThWGUT1hVE041RJelYRjHWFcRUgNobkXPmqhSUFI1AuS1YJ2KzhRCpo6wbNK8G8E\
    ZfqgWR2sF4JDvdNqJ0zrlCudIZ3TVzlFGiddf8bU5104oXpmRM2ca5mnkunomK+Yr4ZZ0pvy2oyCaetRqMaTFilKnHdIrvAalJ6uCYW0W2OSlc\
    Yk6oxpUhnz0RjT3I9J9ZhxhTHHemJe1cScaokZVRIzqiPmVEXMq4aYY72YcbWYVBDT3AvzUQvTpBUmUSlMsk6YdiXMiUaYpj7MszrMvxCmTO+m\
    We1mvXVzqHTTOjdhKjflGjdD+pu++qZI4SZdz2ZMzebdsglVshnRsTlXsXlq2HT0Nl/bfBVslvTAlNfAjBaYthKYQh0wTypgUjTAnPdgkmswrw\
    Cm9I6uHaF1dOkoneNVjuTGcd4fKerjSeEo1DPaasZoGeUlY0nH+Ao/z2o//9ZPmdJPs87PeuXnUOOn9T9h6p9yhZ8hPZ++mk+Rlk+6ks+Yjs+7\
    4hOq4TOi9zlX+zwVfDp6cL4G56sFZ0kJTnkHzqjAaWvAKdTDeVLDSVGAc947k1w781pnSulMd86EyplunCn9mVefSS6cOe+ZSVEz86RlplDJTF\
    vHzKiYKW+YWdKb+arNfMFMR6/MU63MuVaZEaUyoTpl3pUyYxpl0vVlitRl+gplhvTIlKuRCdMi00pkDnXIrFfINGuQKdOT+ddknhXINPXGnKiN\
    AxTq3XlSu5Oidee8dCe5c+dV7pTGne7vhPpOF+6Unp1Xs5PcsnNespOiY+dJxU6hhp223s6o7ZQX7Czp1fmq1flWnY5SnadOnXOVOiMadUL1dd\
    51nTGFOul6dIrU6PS16Awp0SnXoROmQqc16Bzq6azXdJoV6JTpzfnX5jxrzWkqzTnRmdOuzEnWmJOon9OknvNRmNPck5Nqcsa15BwryXnVkXOq\
    ImdUQ86oXs6pWs6rgpxjvTjjanFSK05zKc5HJ06TSpxEjTjJ+jjtOs6JQpymXgA=";
const PERIODIC: &str = "\
    KLUv/QQ4rAgA0k8eCbB5TNfC1UnyCQaJiKIJMInDeEDKjfkg+i+m4LJoTwoBWNUXzi8hBUbRB2Zp9pIrRiqdCJIEqwHY6aPxHZfiGw+fo51qhg\
    S9yHBcI04kCo45y+N0cNlMBUDre+J4XEJ7iNKvLYDOZdAtLCFN5HZcAWyvqY4SetQVBEaoEBDpSfKg7RL4////BiLTD+AoPBr/8+kV83E9Pj/q\
    Ghw+skfyI73y9hEpnId+pFfoo6xH0CvqlfRxPcKP9Yp91PG4H/eK+2g95kfplfPRP1bQj+YVfMzx6H/cK+kj9Dj8iA02XYE8yo/slfwYPJIf+Q\
    r52H+UH/nK8vF/lB/3K/ojzB8Xr5TB5kqLFQCvSOXKwCOKOAaQJswHAONPHASxk+tY1IhoSwTM5JIJyzsRBa6+EwiBBgpwEUI2wA5X0luEzCCC\
    TRELMv4DbkSFA+6QDV+WGSqUJVqngLoyAHYZmVSHEgPnCEXUYf9nOxpjDWD8iAUkJlYSZA5NuthWNAJOUM6QWIVQPTNCCgLWefnuQ7wgxKjSPE\
    frlfhYPdKP0CtQXPHzyF6vKK/Mx/R4P+YV+7jVo4p+pFfmI+YxP/aK+Vg97sd7RR9vj/VjXoF91HrmGP24V+bj9Uh+tEPbYT4yetS2V7RX9HF6\
    jB/zin2c8Lgfe+V8FB7z43hlH9dj/Civ6GP0aD/mlfQR9Ygf8wrAb30mQYQIAIcQHx4AHQAeACMr+RhKDBuIdRKJkOZ4TIsbPQIFMUyJxO1g0K\
    leBzH0inAVmxL9b3opi6ekvl2LahDSH7dTJAeEkKASMOQ+jaAXozwJBcZ0yUxiflJO0JqhhwwmY5YF/CgCYCpqqcTWpWhrQpTWRK6cqtShsLfU\
    fGboOh6wKCZG+BL4/xsE/r8BqPQD+LFXwsfrUT/eK/sI6hFIH/1XmHRF7nF+5BX4CHjMj3mFfUSP8CPyCl9XPI/3I16hj5ZH/Ngr5iP1uB/tlX\
    y8HuHHeIX7CMWK8yOvJPdR8yvyY69IPrJoxX6cV+yj9Ij8yIXB6mPyiB/xCvu4HvUj8grbu6LOo/b2Mb5CH53HaTWa8xIEtAcA4w8cBRpylqGX\
    SVsOFCVdaoI+hHBPiyi6CbUnuBp1fsmTdKiiERwTvPZLSgl/XA+voQ0JEZUC4EU0AnNm2deEG/cHaVCFRHwMhI5LQKT0CfIkrIF5B2DpQIqEYO\
    V8GEFTFJIjH4nNVcEyI8L4pAyweWmobkT8m+uVfPx63I96JT5ej/hxXrmPQI9arwSL+vg86kf1Sh+tx86PjA1WH5fH86MNBgMfl0f8uFfi4/X4\
    +1GfweyjeVR+ZMBg8nHymB95BbOPnF+BH+cVfDw8yo/jFeNc4Tzqx7zyPiKP+XGvxMddj9Be8XqFHa7I4vF+5JXxEYQJ3pAgRAgAhxAfHQAdAB\
    4A9fYxoyw2FwEBkCCGB6y2jlM+ouLiUJwCJpLL6kjuvGILh8zke6tONGz6ZLOW3CL0kdR7amZBJPGDF/Vgoj7yDwBMgGOLwiTnmEhKgQycAjjR\
    GNdG7Po4A44AENvVeAHGW2MmJWSZvwx+LYNN81PMyFFjGQ+ZAkT4Evj//38GAUKpH1bwEdIj8vz6ij6qR8+PHAwOHy+P+LFXzEfqcT+qV/pIPQ\
    J+ZDPbAT6SHtuP5gzmPp7H/Dhe2Uf0mH7MK/Sx8pgfeeV8vB71472Sj9Tj/JhX7uOER/9or8xH9Lj4EcBg4+PymB/1ynysHq0f2TO4fUwe82Ne\
    UR/TI80NBiAgzAcAc84ZQxLkqZk50cSIr+mY/hgF1XiIgBWgOu/BKgSIek8B0gJY6vsYOgWY14MOsI10I4uINDFXKgsXbQg+ECK+4IOTD78kKY\
    CBnaRhdDVzjwAZOmRqPxu7WWixwrv8TQKrEAZURAhG/GpnAUTsoKt9A5CuPg1AvldASA4sux8/kP0f+0rqY+pj/ONfefhYfRR/5BjccmUUK//j\
    9Yr+WHjkj3gF9zH/mD/qle5j8cc/4nmIGkx8XB7z416Zj9Vj/eh5Zf+ohBXxY17Jx+FR/Li8gnSumDzux7yiPjp5RCQ+dq/k4/MofuyV+Jh63I\
    97ZT7WPfrH7ipozwYB7AgA0woTjdsGEEdUpxOfYESkAhpCgd1UvnizUujNxor7Q2boAKk9ZkY3JKlgBxiS+OWj4ISPFxpQEZw2C0tlbtEE0QH2\
    oM/n03ufGxqPp/MZCkqsoORW0gEhmhR/ZA8u2ivqowM9YnxFeKX4uHtcP45X2EeqR/OjXpk+Eno8P9Yr20eHR/Ij7xVGrrg9Qj+GV9xHqsfMj2\
    yD9T46P5of1SvqY8Aj8iPn43HI+OpnkInMOWQ5H04/JnhcEpl0+QQZ3hghso4wfwzzuC0yFOsMMucpJLK5KPxj8nEhZH7GG8hIiOzIkoPqj79a\
    0YhFtcuFhdN6IsviE/9Y6HFJkQ8mU5CnHAOROxP8x67HBYs8OyGD/O/0iZyk+I/nr+hfq9slHAgAlxAfHgAeAB0A/3wEJuqRqcYzFnLE7Kcyjc\
    FfGXxL5kKeyRrjVQEWc4Ujts5P91HsNorxRANYcAIZUkzkFMkpPFaAALAKsyzGesxb8OInkppN3EPqxxIhuWedzPRquBPeyJdDn2XIKlBHXBJJ\
    wBUnhyp+RFnjbA2Y4QQpABLQAkSsIALipnmg7XnwUXi8H/UKPnaP82OvjD5qagU/4hX7qD3mR7zifXTMCvyYV/bxuEf9v6Je6SPiEX7sFfRRPe\
    7HvDIft8f8mFfyMfCYH3vlfUyP+rFeMR8dt1J+xCvrI7I3j/wor8RH8jg/9kp9nDzyI14pPmpopX6UV/SR6PGVmgyWIEQIAKLPHQmweYkt0/Vh\
    +AknoWd5epFZgHDMhGZqiNAuPh1HbbSZnGgyckHw84AZArTMIKDPNpukhh8YArawEpOMUG4YuoIas9EdF3XoHwDm5X/Rhx4GL+iokQ7XGsy+ZC\
    QU0v3hVlHHKYuWBizg3RChD9IyjeT3CGd4tdMtQqgghLAKPIDbARL4//9/QaQfVeuVfSzyiEA8j/SKGFecPerHe4WPZo/6Ua/oo9EjP5JX6Lni\
    7JEf5RV9tDyuH/UZDH9kHvUjXuE+GrUiP9Yr7iNAK+ZHXnEfkcd+jFe8j6JWzI965X30QSvKj7zyPiKP/Riv3EfUY36sV/YR8Lgf8cp9BD2Cfl\
    yixTk3gdUBAKOCBO6MtKnhOf5L9rVhzIUsP7LOBwww0CP/cEU/9lhpP/aHV/zh4z88rowf/eEV/vDxHx5vZSarEgjiEWFa";
const LONG: &str = "\
    KLUv/QSIFQEA4oIHCaDt8NsNkAqQhQc2Jyue1Numdklri9LZmSpHYygEADBOSBE=";

/// Blocks of brotli without output may be expensive to read, so a call reads few of them.
#[test]
fn a_call_reads_little_of_a_stream_without_output() {
    let coded = [&b"\x0c"[..], &vec![6; 100_000], b"\x03"].concat();
    let pool = Arc::new(WindowPool::default());
    let mut decoder = Decoder::new(&[Coding::Brotli], FREE, &pool).unwrap();
    let (mut rest, mut out, mut calls) = (&coded[..], Vec::new(), 0);
    loop {
        let before = rest.len();
        let more = decoder.decode(&mut rest, &mut out).unwrap();
        assert!(before - rest.len() <= MAX_PIECE, "{}", before - rest.len());
        calls += 1;
        if !more {
            break;
        }
    }
    assert!(out.is_empty() && rest.is_empty() && calls >= coded.len() / MAX_PIECE);
    decoder.end().unwrap();
}

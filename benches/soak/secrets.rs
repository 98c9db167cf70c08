//! The values that must not be seen, and streams that search all that is read from them for these values.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use base64::Engine;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use daachorse::DoubleArrayAhoCorasick;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use crate::book::{Book, OpenConnection};
use crate::dice::Dice;

/// The number of credentials.
pub(crate) const CREDENTIALS: usize = 50;
const LENGTH: usize = 40;

pub(crate) struct Secrets {
    values: Vec<String>,
    automaton: DoubleArrayAhoCorasick<u32>,
    /// The name of each pattern.
    names: Vec<String>,
    longest: usize,
}

impl Secrets {
    pub(crate) fn new(seed: u64) -> Self {
        let mut dice = Dice::new(seed);
        let alphabet: Vec<char> = ('a'..='z').chain('A'..='Z').chain('0'..='9').collect();
        let values: Vec<String> =
            (0..CREDENTIALS).map(|_| (0..LENGTH).map(|_| alphabet[dice.below(alphabet.len())]).collect()).collect();
        let (mut patterns, mut names) = (Vec::new(), Vec::new());
        for (n, value) in values.iter().enumerate() {
            for (form, text) in forms(value) {
                patterns.push(text);
                names.push(format!("C{n}, {form}"));
            }
        }
        let longest = patterns.iter().map(String::len).max().unwrap_or_default();
        let automaton = DoubleArrayAhoCorasick::new(&patterns).unwrap();
        Self { values, automaton, names, longest }
    }

    pub(crate) fn value(&self, n: usize) -> &str {
        &self.values[n]
    }

    /// Returns the name of a value in the text, if there is any.
    pub(crate) fn find(&self, text: &[u8]) -> Option<&str> {
        self.automaton.find_iter(text).next().map(|found| self.names[found.value() as usize].as_str())
    }
}

/// The forms of a value that are searched for: whole and by halves, and encoded as the leak attempts do it.
fn forms(value: &str) -> Vec<(&'static str, String)> {
    let (first, second) = value.split_at(value.len() / 2);
    let mut forms = vec![
        ("first half", first.to_owned()),
        ("second half", second.to_owned()),
        ("hex", hex(value)),
        ("percent-encoded", percent(value)),
    ];
    for (shift, name) in [(0, "base64"), (1, "base64 behind 1 byte"), (2, "base64 behind 2 bytes")] {
        let text = STANDARD_NO_PAD.encode([&b"xx"[..shift], value.as_bytes()].concat());
        // The first and last characters depend on what is before and after the value.
        forms.push((name, text[4..text.len() - 4].to_owned()));
    }
    forms
}

pub(crate) fn hex(value: &str) -> String {
    value.bytes().map(|byte| format!("{byte:02x}")).collect()
}

pub(crate) fn percent(value: &str) -> String {
    value.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

/// A search that continues from one piece of a stream to the next.
pub(crate) struct Scan {
    secrets: Arc<Secrets>,
    tail: Vec<u8>,
}

impl Scan {
    pub(crate) fn new(secrets: Arc<Secrets>) -> Self {
        Self { secrets, tail: Vec::new() }
    }

    /// Returns the name of a value that ends in this piece.
    pub(crate) fn feed(&mut self, piece: &[u8]) -> Option<String> {
        let kept = self.secrets.longest - 1;
        let seam = [&self.tail, &piece[..piece.len().min(kept)]].concat();
        let found = self.secrets.find(&seam).or_else(|| self.secrets.find(piece)).map(str::to_owned);
        if piece.len() >= kept {
            self.tail.clear();
            self.tail.extend_from_slice(&piece[piece.len() - kept..]);
        } else {
            self.tail = seam[seam.len().saturating_sub(kept)..].to_vec();
        }
        found
    }
}

/// A stream that reports every value that is read from it.
pub(crate) struct Watched<S> {
    stream: S,
    scan: Option<(Scan, Arc<Book>, &'static str)>,
    _open: Option<OpenConnection>,
}

impl<S> Watched<S> {
    /// Searches what is read from the stream. `reader` names its reader in reports.
    pub(crate) fn new(stream: S, secrets: &Arc<Secrets>, book: &Arc<Book>, reader: &'static str) -> Self {
        Self { stream, scan: Some((Scan::new(secrets.clone()), book.clone(), reader)), _open: None }
    }

    /// Counts the stream as a connection, without a search.
    pub(crate) fn counted(stream: S, book: &Arc<Book>) -> Self {
        Self { stream, scan: None, _open: Some(book.connection()) }
    }

    pub(crate) fn get_ref(&self) -> &S {
        &self.stream
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Watched<S> {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buf.filled().len();
        ready!(Pin::new(&mut self.stream).poll_read(cx, buf))?;
        let read = &buf.filled()[before..];
        if let Some((scan, book, reader)) = &mut self.scan
            && let Some(name) = scan.feed(read)
        {
            let text = String::from_utf8_lossy(&read[..read.len().min(600)]).into_owned();
            book.violation(&format!("{reader} received a value ({name}) in {text:?}"));
        }
        Poll::Ready(Ok(()))
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Watched<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

//! Wherever a stream is split or pauses, neither a value nor half of it leaves or returns.

use std::sync::{Arc, OnceLock};

use bytes::Bytes;
use exeat::leak::{Holdback, Matcher, Redactor, ValueOwner};
use exeat::model::name::CredentialName;
use futures_util::StreamExt;
use futures_util::stream;
use proptest::prelude::*;
use proptest::sample::Index;
use tokio::io::AsyncWriteExt;
use tokio::time::timeout;

use super::forms::{FORMS, Form, VALUES, contains, junk};
use super::road::{Ask, Way, chunk, read_answer};
use super::{Field, quiet};
use crate::lab::TIMEOUT;

/// A form of a value in the middle of a text.
struct Text {
    what: String,
    bytes: Vec<u8>,
    from: usize,
    form: Vec<u8>,
    half: usize,
    value: &'static str,
    matcher: Arc<Matcher>,
}

impl Text {
    fn leaks(&self, out: &[u8]) -> bool {
        contains(out, &self.form[..self.half]) || contains(out, self.value.as_bytes())
    }
}

fn looking_for(value: &str) -> Arc<Matcher> {
    let whose = ValueOwner::Credential(CredentialName::new("KEY"));
    Arc::new(Matcher::new(std::iter::once((whose, value.as_bytes()))))
}

/// Returns the forms without a content coding that the scanner finds.
fn bare() -> impl Iterator<Item = Form> {
    FORMS.into_iter().filter(|form| form.codings.is_empty() && !form.is_not_yet())
}

/// Returns every form of every value at the beginning, in the middle and at the end of a text.
fn texts() -> &'static [Text] {
    static TEXTS: OnceLock<Vec<Text>> = OnceLock::new();
    TEXTS.get_or_init(|| {
        let mut texts = Vec::new();
        let values = VALUES.map(|(_, value)| value).into_iter().chain(["8bytes+/x"]);
        for value in values {
            let matcher = looking_for(value);
            for form in bare() {
                let written = form.write(value);
                for (before, after) in [(0, 30), (30, 0)] {
                    texts.push(Text {
                        what: format!("{}, {before} before and {after} after {value}", form.name),
                        bytes: [&junk(before)[..], &written, &junk(after)].concat(),
                        from: before,
                        half: form.half(value).min(written.len()),
                        form: written.clone(),
                        value,
                        matcher: matcher.clone(),
                    });
                }
            }
        }
        texts
    })
}

/// Returns the bytes of a text that are sent, and whether it was stopped. The flag of each piece says whether a pause
/// follows.
fn sent(text: &Text, pieces: &[(&[u8], bool)]) -> (Vec<u8>, bool) {
    let mut hold = Holdback::new(text.matcher.clone());
    let mut out = Vec::new();
    for (piece, pauses) in pieces {
        let passes = hold.feed(Bytes::copy_from_slice(piece)).is_ok()
            && if *pauses { hold.pause().is_ok() } else { hold.release_beyond_lag().is_ok() };
        if !passes {
            return (out, true);
        }
        out.extend(std::iter::from_fn(|| hold.take()).flatten());
    }
    let stopped = hold.end().is_err();
    if !stopped {
        out.extend(std::iter::from_fn(|| hold.take()).flatten());
    }
    (out, stopped)
}

/// Returns the redacted text.
fn redacted(text: &Text, pieces: &[(&[u8], bool)]) -> Vec<u8> {
    let mut redactor = Redactor::new(text.matcher.clone());
    let mut out = Vec::new();
    for (piece, pauses) in pieces {
        redactor.feed(Bytes::copy_from_slice(piece));
        if *pauses {
            redactor.pause();
        }
        out.extend(std::iter::from_fn(|| redactor.take()).flatten());
    }
    redactor.end();
    out.extend(std::iter::from_fn(|| redactor.take()).flatten());
    out
}

#[test]
fn no_split_lets_a_form_pass_in_either_direction() {
    let mut wrong = Vec::new();
    for text in texts() {
        for cut in text.from..=text.from + text.form.len() {
            let (left, right) = text.bytes.split_at(cut);
            for pauses in [false, true] {
                let pieces = [(left, pauses), (right, false)];
                let (out, stopped) = sent(text, &pieces);
                if !stopped || text.leaks(&out) {
                    wrong.push(format!("{} out, cut at {cut}, pause {pauses}: {}", text.what, text_of(&out)));
                }
                let back = redacted(text, &pieces);
                if back.len() != text.bytes.len() || text.leaks(&back) {
                    wrong.push(format!("{} back, cut at {cut}, pause {pauses}: {}", text.what, text_of(&back)));
                }
            }
        }
    }
    wrong.truncate(50);
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

fn text_of(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

proptest! {
    #[test]
    fn no_splits_and_pauses_let_a_form_pass_in_either_direction(
        which in any::<Index>(),
        cuts in proptest::collection::vec((any::<Index>(), any::<bool>()), 0..8),
    ) {
        let text = which.get(texts());
        let mut cuts: Vec<_> = cuts.iter().map(|(cut, pauses)| (cut.index(text.bytes.len() + 1), *pauses)).collect();
        cuts.sort_unstable();
        cuts.push((text.bytes.len(), false));
        let mut at = 0;
        let pieces: Vec<_> = cuts.iter().map(|(cut, pauses)| (&text.bytes[std::mem::replace(&mut at, *cut)..*cut], *pauses)).collect();
        let (out, stopped) = sent(text, &pieces);
        prop_assert!(stopped && !text.leaks(&out), "{}: {}", text.what, text_of(&out));
        let back = redacted(text, &pieces);
        prop_assert!(back.len() == text.bytes.len() && !text.leaks(&back), "{}: {}", text.what, text_of(&back));
    }
}

/// Sends a chunked upload in two writes, the second after the releasable part of the first has arrived.
async fn upload(field: &Field, way: Way, form: Form, cut: usize, pauses: bool) -> Option<String> {
    let (name, value) = VALUES[0];
    let text = form.write(value);
    let key = format!("{way:?}-{}-{cut}-{pauses}", FORMS.iter().position(|one| one.name == form.name).unwrap());
    let mut stream = field.wire(way).await;
    let head = field.head(way, "POST", &key, &Ask::default());
    let (left, right) = text.split_at(cut);
    let first = chunk(&[&junk(100), left].concat());
    stream.write_all(&[&head[..], b"Transfer-Encoding: chunked\r\n\r\n", &first].concat()).await.unwrap();
    stream.flush().await.unwrap();
    let (mut read, mut write) = tokio::io::split(stream);
    let second = [&chunk(&[right, &junk(100)].concat())[..], b"0\r\n\r\n"].concat();
    let answering = read_answer(&mut read);
    tokio::pin!(answering);
    let early = tokio::select! {
        biased;
        // If half of the value is at the end, it is found at the pause.
        answer = &mut answering, if pauses => Some(answer),
        () = async { if pauses { field.origin(way).has(&key, 100).await } } => {
            write.write_all(&second).await.unwrap();
            write.flush().await.unwrap();
            None
        }
    };
    let what = format!("{} by {way:?}, cut at {cut} of {}, pause {pauses}", form.name, text.len());
    let answer = match early {
        Some(answer) => answer,
        None => timeout(TIMEOUT, answering).await.ok().flatten(),
    };
    let Some(answer) = answer else { return Some(format!("{what}: no answer")) };
    if answer.header("exeat-refusal") != Some("leak_detected") {
        return Some(format!("{what}: {answer:?}"));
    }
    let told: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    (told["credential"] != name).then(|| format!("{what}: {told}"))
}

#[tokio::test(flavor = "multi_thread")]
async fn an_upload_in_two_writes_does_not_arrive() {
    let field = Field::new().await;
    let mut uploads = Vec::new();
    for (n, form) in bare().enumerate() {
        let value = VALUES[0].1;
        let (length, half) = (form.write(value).len(), form.half(value));
        // All splits of a few texts, and the critical splits of all texts.
        let cuts: Vec<_> =
            if n % 10 == 0 { (0..=length).collect() } else { vec![1, half / 2, half - 1, half, length - 1] };
        let pauses = cuts.iter().enumerate().filter(|(at, _)| n % 10 > 0 || at % 8 == 1).map(|(_, cut)| (*cut, true));
        for (cut, pauses) in cuts.iter().map(|cut| (*cut, false)).chain(pauses) {
            uploads.push((if n % 7 == 0 { Way::TunnelH1 } else { Way::Http }, form, cut, pauses));
        }
    }
    let all = uploads.len();
    let wrong: Vec<String> = stream::iter(uploads)
        .map(|(way, form, cut, pauses)| upload(&field, way, form, cut, pauses))
        .buffer_unordered(24)
        .filter_map(std::future::ready)
        .collect()
        .await;
    assert!(wrong.is_empty(), "{} of {all}:\n{}", wrong.len(), wrong.join("\n"));
    let origins = quiet(field).await;
    for form in bare() {
        let value = VALUES[0].1;
        let half = &form.write(value)[..form.half(value)];
        for origin in [&origins.plain, &origins.h1] {
            origin.each(|arrived| assert!(!contains(&arrived.body, half), "{}: {}", form.name, text_of(&arrived.body)));
        }
    }
}

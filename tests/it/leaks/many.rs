//! A thousand credentials, credentials within others, and bodies that consist of a value alone.

use super::Field;
use super::forms::{FORMS, VALUES, contains, junk};
use super::origin::Words;
use super::road::{Ask, Payload, Way};

/// Returns the credential named by the refusal of a body.
async fn refused_credential(field: &Field, way: Way, key: &str, payload: Payload) -> String {
    let answer = field.road(way).send(key, &Ask { payload, ..Ask::default() }).await;
    assert_eq!((answer.status, answer.header("exeat-refusal")), (403, Some("leak_detected")), "{key}: {answer:?}");
    let problem: serde_json::Value = serde_json::from_slice(&answer.body).unwrap();
    problem["credential"].as_str().unwrap_or_default().to_owned()
}

async fn received_body(field: &Field, key: &str, body: Vec<u8>, known: bool) -> Vec<u8> {
    let words = Words { status: 200, pieces: vec![body], known, ..Words::default() };
    field.origin(Way::Http).says(key, words);
    field.road(Way::Http).send(key, &Ask::default()).await.body
}

#[tokio::test(flavor = "multi_thread")]
async fn each_of_a_thousand_credentials_is_found_and_redacted() {
    let random = junk(32_000);
    let value = |n: usize| String::from_utf8(random[n * 32..n * 32 + 20 + n % 13].to_vec()).unwrap();
    let all: Vec<_> = (0..1000).map(|n| (format!("KEY_{n}"), value(n))).collect();
    let values: Vec<_> = all.iter().map(|(name, value)| (name.as_str(), value.as_str())).collect();
    let field = Field::holding(&values).await;
    for n in (0..1000).step_by(37) {
        let (name, value) = values[n];
        let form = FORMS[n % 20];
        let body = [b"before ", &form.write(value)[..], b" after"].concat();
        assert_eq!(
            refused_credential(&field, Way::Http, &n.to_string(), Payload::Known(body)).await,
            name,
            "{}",
            form.name
        );
    }
    let body: Vec<u8> = values.iter().flat_map(|(_, value)| [value.as_bytes(), b"\n"].concat()).collect();
    let came = received_body(&field, "all", body.clone(), true).await;
    assert_eq!(came.len(), body.len());
    assert!(came.iter().all(|byte| b"*\n".contains(byte)), "{}", String::from_utf8_lossy(&came));
}

#[tokio::test(flavor = "multi_thread")]
async fn credentials_that_are_prefixes_of_others_are_redacted_completely() {
    let values = [("A", "tok-8f3K2m9QxZ"), ("B", "tok-8f3K2m9QxZ7LpW4s"), ("C", "tok-8f3K2m9QxZ7LpW4sVt6eRR")];
    let field = Field::holding(&values).await;
    for (name, value) in values {
        for form in FORMS.iter().filter(|form| form.codings.is_empty() && !form.is_not_yet()) {
            let text = [b"k=", &form.write(value)[..], b"&x"].concat();
            let key = format!("{name}-{}", FORMS.iter().position(|one| one.name == form.name).unwrap());
            let found = refused_credential(&field, Way::Http, &key, Payload::Known(text.clone())).await;
            // The credential's own name, or that of a credential that is a prefix of it.
            assert!(found.as_str() <= name, "{} of {name}: {found}", form.name);
            let came = received_body(&field, &key, text.clone(), true).await;
            let (begin, end) = form.edges(value);
            let inner = &came[2 + begin..came.len() - 2 - end];
            assert!(
                came.len() == text.len() && inner.iter().all(|byte| b"*\r\n".contains(byte)),
                "{} of {name}: {}",
                form.name,
                String::from_utf8_lossy(&came)
            );
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_is_found_at_the_beginning_and_at_the_end() {
    let field = Field::new().await;
    let (name, value) = VALUES[0];
    for (n, form) in FORMS.iter().enumerate().filter(|(_, form)| form.codings.is_empty() && !form.is_not_yet()) {
        let text = form.write(value);
        let bodies = [text.clone(), [&text[..], &junk(70_000)].concat(), [&junk(70_000)[..], &text].concat()];
        for (m, body) in bodies.into_iter().enumerate() {
            let bytes = body.chunks(if body.len() < 1000 { 1 } else { 999 }).map(<[u8]>::to_vec).collect();
            for (l, payload) in [Payload::Known(body.clone()), Payload::Pieces(bytes)].into_iter().enumerate() {
                let way = if n % 2 == 0 { Way::Http } else { Way::Https };
                assert_eq!(
                    refused_credential(&field, way, &format!("{n}-{m}-{l}"), payload).await,
                    name,
                    "{}",
                    form.name
                );
            }
            let key = format!("in-{n}-{m}");
            let came = received_body(&field, &key, body.clone(), m % 2 == 0).await;
            let leaks = contains(&came, &text[..form.half(value)]) || contains(&came, value.as_bytes());
            assert!(came.len() == body.len() && !leaks, "{}: {}", form.name, String::from_utf8_lossy(&came));
        }
    }
}

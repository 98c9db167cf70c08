//! Parts of values in answers: which of them are masked and counted, and which must not be.

use std::sync::Arc;

use bytes::Bytes;
use exeat::leak::strength::Strength;
use exeat::leak::{Matcher, Redactor, Value, ValueOwner};
use exeat::model::name::CredentialName;

use crate::lab::client::Way;
use crate::lab::{Lab, LabBuilder, Origin};

const LONG: &[u8] = b"k7qz2mxv9lpw4svt6erru8ybon3chd5jftga1xzq";

async fn lab(value: &str, pages: &[(String, String)]) -> (Lab, Origin, String) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), value).unwrap();
    let origin = builder.origin("api.test").await;
    for (path, page) in pages {
        origin.serve_file(path, "text/plain", page.clone());
    }
    let port = origin.port();
    let lab = builder
        .proxy(&format!(
            "[leak]\nmax_finds = 3\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n\
             [credentials.KEY]\nauth_type = \"bearer\"\nvalue = \"file:value\"\ndomains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
        ))
        .await;
    (lab, origin, format!("https://api.test:{port}"))
}

fn redactor(value: &[u8], sent: Option<&str>) -> Redactor {
    let owner = ValueOwner::Credential(CredentialName::new("KEY"));
    let value = Value::new(owner, value).with_halves(Strength::of(value));
    Redactor::with_sent(Arc::new(Matcher::new([value].into_iter())), sent.map(CredentialName::new))
}

/// A strong value whose half is weak must not be readable with two dictionaries: wrong words cost nothing, and each
/// right half costs one find.
#[tokio::test(flavor = "multi_thread")]
async fn a_dictionary_cannot_guess_a_value_by_halves() {
    let value = "correct-horse-battery";
    assert!(Strength::of(value.as_bytes()).is_strong());
    let halves: Vec<String> = ["letters", "example", "correct", "battery"]
        .iter()
        .flat_map(|word| ["-fro", "-hor", "-tab"].map(|end| format!("{word}{end}")))
        .collect();
    let mut pages: Vec<(String, String)> =
        halves.iter().enumerate().map(|(n, half)| (format!("h{n}"), half.clone())).collect();
    let rests = ["se-letters", "se-monday!", "se-battery", "se-example"];
    pages.push(("rests".to_owned(), rests.map(|rest| format!("correct-hor{rest}#")).concat()));
    let (lab, _origin, url) = lab(value, &pages).await;
    let mut known = Vec::new();
    for (n, half) in halves.iter().enumerate() {
        let answer = lab.by(Way::Absolute, "GET", &format!("{url}/files/h{n}"), &[], "").await;
        if answer.text().contains('*') {
            known.push(half.clone());
        }
    }
    let answer = lab.by(Way::Absolute, "GET", &format!("{url}/files/rests"), &[], "").await;
    let read = answer.text();
    let masked = read.split('#').position(|piece| piece.starts_with('*'));
    let after = lab.by(Way::Absolute, "GET", &format!("{url}/files/h0"), &[], "").await;
    assert!(
        after.status == 403 || known.is_empty() || masked.is_none(),
        "half {known:?}, rest number {masked:?}, and the execution goes on"
    );
}

/// The longest field of a connection string may be the address of the server, which is not secret.
#[tokio::test(flavor = "multi_thread")]
async fn the_address_in_a_connection_string_is_no_find() {
    let value =
        "Server=tcp:prod-sql.database.windows.net,1433;Initial Catalog=orders;User ID=app;Password=Xk29dLq8VwRt41;";
    let page = "Use Server=tcp:yourserver.database.windows.net,1433;Database=test; in your code.";
    let (lab, _origin, url) = lab(value, &[("doc".to_owned(), page.to_owned())]).await;
    let sent = lab.by(Way::Absolute, "POST", &format!("{url}/x"), &[], page).await;
    let answer = lab.by(Way::Absolute, "GET", &format!("{url}/files/doc"), &[], "").await;
    assert_eq!((sent.status.as_u16(), answer.text().to_string()), (200, page.to_owned()), "{sent:?}");
}

/// The rest of a connection string may be public, and so may the text before the secret of a webhook's URL.
#[test]
fn public_prefixes_before_a_pause_are_no_finds() {
    let rows = [
        (
            "https://hooks.slack.com/services/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",
            "https://hooks.slack.com/services/T01AB2CD3",
        ),
        ("postgres://orders_readonly_service:xK9q2LmPv7@db/o", "postgres://orders_readonly_service"),
    ];
    let finds = rows.map(|(value, text)| {
        let mut redactor = redactor(value.as_bytes(), None);
        redactor.feed(Bytes::from(text));
        redactor.end();
        redactor.finds(true)
    });
    assert_eq!(finds, [0, 0]);
}

/// A mask of half of the sent value counts, unless the whole value is returned.
#[test]
fn half_of_the_sent_value_in_a_field_name_is_a_find() {
    for half in [&LONG[..20], &LONG[20..]] {
        let mut redactor = redactor(LONG, Some("KEY"));
        assert!(redactor.check_name(std::str::from_utf8(half).unwrap()));
        assert_eq!(redactor.finds(true), 1);
    }
}

/// One part in one place is one find, whether it ends at the half or after it.
#[test]
fn one_part_counts_once() {
    for length in [20, 21, 30, 39] {
        let mut redactor = redactor(LONG, None);
        redactor.feed(Bytes::copy_from_slice(&LONG[..length]));
        redactor.end();
        assert_eq!(redactor.finds(true), 1, "{length} of {}", LONG.len());
    }
}

/// Words that begin a weak value are not finds at the host to which it was sent, because that host's pages may end with
/// them.
#[tokio::test(flavor = "multi_thread")]
async fn a_word_that_begins_a_weak_value_is_no_find() {
    let (lab, _origin, url) = lab("password1234", &[("error".to_owned(), "missing password".to_owned())]).await;
    for n in 0..4 {
        let sent = [("exeat-credential", "KEY")];
        let answer = lab.by(Way::Absolute, "GET", &format!("{url}/files/error"), &sent, "").await;
        assert_eq!(answer.status, 200, "{n}");
        assert!(lab.ended(n).await.get("alarm").is_none());
    }
}

/// An origin that returns the value can be made to pause within it. The rest must then be hard to guess, also for keys
/// with few possibilities for each character.
#[test]
fn a_pause_within_an_echo_of_a_hex_key_shows_half_of_it() {
    use sha2::{Digest, Sha256};
    let keys = (0..40).flat_map(|seed: u32| {
        let digest = Sha256::digest(seed.to_be_bytes());
        let hex: String = digest.iter().map(|byte| format!("{byte:02x}")).collect();
        [16, 20, 24, 28].map(|length| hex[..length].to_owned())
    });
    let keys: Vec<String> = keys.filter(|key| Strength::of(key.as_bytes()).is_strong()).collect();
    // Returns the number of digits that a pause within the key shows at most.
    let shown = |key: &str| {
        let shown_at = |cut: usize| {
            let (part, rest) = key.split_at(cut);
            let through = |rest: &str| {
                let mut redactor = redactor(key.as_bytes(), Some("KEY"));
                redactor.feed(Bytes::copy_from_slice(part.as_bytes()));
                redactor.pause();
                let out: Vec<u8> = std::iter::from_fn(|| redactor.take()).flatten().collect();
                redactor.feed(Bytes::copy_from_slice(rest.as_bytes()));
                redactor.end();
                (out.iter().filter(|byte| **byte != b'*').count(), redactor.finds(true))
            };
            let (shown, finds) = through(rest);
            assert_eq!(finds, 0, "{key} cut at {cut}: the whole value returns");
            assert_eq!(through("#"), (shown, u64::from(shown < cut)), "{key} cut at {cut}: a part is a find");
            shown
        };
        (1..key.len()).map(shown_at).max().unwrap_or_default()
    };
    let at_half = keys.iter().filter(|key| shown(key) < key.len() / 2).count();
    // Some halves look like words or dates, which can be guessed.
    assert!(keys.len() >= 150 && at_half * 10 >= keys.len() * 9, "{at_half} of {}", keys.len());
}

//! Redaction in an answer confirms a guess, so it counts as a find, and values that can be guessed are not redacted.

use crate::lab::client::Way;
use crate::lab::{KEY, Lab, LabBuilder, Origin};

/// Starts a lab in which `open.test` is allowed, and no credential is bound to it.
async fn lab(auth: &str, value: &str, pages: &[(&str, String)]) -> (Lab, Origin, String) {
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
             [credentials.KEY]\nauth_type = \"{auth}\"\nvalue = \"file:value\"\ndomains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n"
        ))
        .await;
    (lab, origin, format!("https://api.test:{port}"))
}

const SENT: &[(&str, &str)] = &[("exeat-credential", "KEY")];

/// The limit is the same as for finds in requests.
#[tokio::test(flavor = "multi_thread")]
async fn three_answers_with_a_value_that_was_not_sent_stop_the_execution() {
    for way in Way::ALL {
        let (lab, _origin, url) = lab("bearer", KEY, &[("whole", format!("a {KEY} b {KEY} c"))]).await;
        let whole = format!("{url}/files/whole");
        for _ in 0..5 {
            let echo = lab.by(way, "GET", &whole, SENT, "").await;
            assert_eq!((echo.status.as_u16(), echo.text().contains(KEY)), (200, false), "{way:?}");
        }
        for _ in 0..2 {
            let answer = lab.by(way, "GET", &whole, &[], "").await;
            assert!(answer.status == 200 && !answer.text().contains(KEY) && answer.text().contains("a ***"), "{way:?}");
        }
        assert_not_answered(&lab, &whole, "").await;
        for n in 0..3 {
            let line = lab.ended(5 + n).await;
            let alarm = line["alarm"].as_str().unwrap_or_default();
            assert!(alarm.contains("KEY") && line["redacted"] == 2, "{way:?} {line}");
            assert_eq!(line["code"].as_str(), (n == 2).then_some("execution_stopped"), "{way:?} {line}");
        }
        lab.by(Way::Absolute, "GET", &whole, &[], "").await.assert_refused(403, "execution_stopped");
    }
}

/// The response with the find that reaches the limit does not arrive.
async fn assert_not_answered(lab: &Lab, url: &str, fields: &str) {
    let authority = url.split('/').nth(2).unwrap();
    let auth = crate::lab::client::auth();
    let head = format!("GET {url} HTTP/1.1\r\nhost: {authority}\r\nproxy-authorization: {auth}\r\n{fields}\r\n");
    let answer = lab.raw(&head).await;
    assert!(!answer.contains("**"), "{answer}");
}

/// The mask of a part at the end of an answer confirms a guess, whoever sent the value.
#[tokio::test(flavor = "multi_thread")]
async fn parts_of_a_value_alone_are_finds() {
    for fields in [&[][..], SENT] {
        let (lab, _origin, url) = lab("bearer", KEY, &[("part", format!("x {}", &KEY[..23]))]).await;
        let part = format!("{url}/files/part");
        for _ in 0..2 {
            // This includes a value that was sent, because nothing follows that completes it.
            let answer = lab.by(Way::TunnelH2, "GET", &part, fields, "").await;
            assert_eq!(answer.text(), format!("x {}", "*".repeat(23)), "{fields:?}");
        }
        let selected = if fields.is_empty() { "" } else { "exeat-credential: KEY\r\n" };
        assert_not_answered(&lab, &part, selected).await;
        for n in 0..3 {
            assert!(lab.ended(n).await["alarm"].is_string(), "{fields:?}");
        }
        lab.by(Way::Absolute, "GET", &part, fields, "").await.assert_refused(403, "execution_stopped");
    }
}

/// The user name of a Basic credential is not secret, whatever its length.
#[tokio::test(flavor = "multi_thread")]
async fn the_user_name_does_not_count_towards_half_of_a_password() {
    let user = "AC7d1c0be94b37a29f6e58c0d4a1b2f3e9";
    let password = "rT2qLz9Vb4Xn7Ks1Wc8Yd3Hf6Jg5MpQe";
    let known = format!("{user}:{}", &password[..8]);
    let half = format!("{user}:{}", &password[..16]);
    let pages = [("known", known.clone()), ("half", half)];
    let (lab, _origin, url) = lab("basic", &format!("{user}:{password}"), &pages).await;
    for n in 0..5 {
        assert_eq!(lab.by(Way::Absolute, "GET", &format!("{url}/files/known"), &[], "").await.text(), known);
        let line = lab.ended(n).await;
        assert!(line.get("redacted").is_none() && line.get("alarm").is_none(), "{line}");
    }
    let answer = lab.by(Way::Absolute, "GET", &format!("{url}/files/half"), &[], "").await;
    assert!(answer.text().contains("****") && !answer.text().contains(&password[..16]), "{answer:?}");
}

/// A dictionary contains the value, and any reaction to one of its words would reveal which word it is.
#[tokio::test(flavor = "multi_thread")]
async fn a_weak_value_is_redacted_only_in_answers_to_requests_with_it() {
    for weak in ["Winter1987?", "hunter2", "password"] {
        let (lab, origin, url) = lab("bearer", weak, &[("words", format!("Winter1986? {weak} Winter1988?"))]).await;
        let words = format!("{url}/files/words");
        for way in Way::ALL {
            for _ in 0..4 {
                let answer = lab.by(way, "GET", &words, &[], "").await;
                assert!(answer.status == 200 && answer.text().contains(weak), "{weak} {way:?}");
                let sent = lab.by(way, "POST", &format!("{url}/x"), &[("x-word", weak)], weak).await;
                assert_eq!(sent.status, 200, "{weak} {way:?}: {sent:?}");
                assert_eq!(origin.last().headers["x-word"], weak);
            }
            let answer = lab.by(way, "GET", &words, SENT, "").await;
            assert!(answer.status == 200 && !answer.text().contains(weak), "{weak} {way:?}: {}", answer.text());
            let used = lab.audit().await.iter().filter(|line| line["credential_used"] == "KEY").count();
            assert!(used > 0, "{weak} {way:?}");
        }
        let lines = lab.audit().await;
        assert!(lines.iter().all(|line| line.get("code").is_none() && line.get("alarm").is_none()), "{weak}");
    }
}

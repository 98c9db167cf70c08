//! Half of a long value has as much entropy as a shorter value, so it does not leave either.

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};

use crate::lab::client::Way;
use crate::lab::{Lab, LabBuilder, Origin};

const VALUE: &str = "k7Qz2mXv9LpW4sVt6eRRu8YbwN3cHd5JfTgA1xZq";
const SHORT: &str = "Rk3vYp9XwQz6Lm2Bn8Hc5Jd4Sf7Gt1A";
const WORDY: &str = "0000000000000000000000000Bd4nR8zKw1Yx7Lq";

async fn lab() -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let mut text = format!(
        "[leak]\nmax_finds = 1000\n[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\nplain_http = true\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"VALUE\", \"SHORT\", \"WORDY\", \"LOGIN\"]\n",
        origin.port()
    );
    let values =
        [("VALUE", VALUE), ("SHORT", SHORT), ("WORDY", WORDY), ("LOGIN", "a-user-with-a-long-name-of-its-own:")];
    for (name, value) in values {
        let (auth, value) = match name {
            "LOGIN" => ("basic", format!("{value}{}", VALUE.replace('k', "j").replace('q', "w").replace('4', "5"))),
            _ => ("bearer", value.to_owned()),
        };
        std::fs::write(builder.dir.path().join(name), value).unwrap();
        text.push_str(&format!(
            "[credentials.{name}]\nauth_type = \"{auth}\"\nvalue = \"file:{name}\"\ndomains = [\"api.test\"]\n"
        ));
    }
    (builder.proxy(&text).await, origin)
}

fn hex(text: &str) -> String {
    text.bytes().map(|byte| format!("{byte:02X}")).collect()
}

#[tokio::test]
async fn half_of_a_long_value_does_not_leave_in_any_place() {
    let (lab, origin) = lab().await;
    let url = format!("https://api.test:{}/", origin.port());
    let (first, second) = VALUE.split_at(20);
    let texts = [
        first.to_owned(),
        second.to_owned(),
        VALUE[..39].to_owned(),
        VALUE[1..].to_owned(),
        hex(first),
        hex(second),
        URL_SAFE_NO_PAD.encode(format!("x{first}y")),
        STANDARD.encode(format!("xy{second}z")).replace('+', "%2B").replace('/', "%2F"),
        first.bytes().map(|byte| format!("%{byte:02x}")).collect(),
    ];
    for text in &texts {
        for way in Way::ALL {
            let within = format!("some.{text}.text-behind-it");
            lab.by(way, "GET", &format!("{url}?k={within}"), &[], "").await.assert_refused(403, "leak_detected");
            lab.by(way, "GET", &url, &[("x-k", &within)], "").await.assert_refused(403, "leak_detected");
            lab.by(way, "POST", &url, &[], &within).await.assert_refused(403, "leak_detected");
        }
    }
    assert!(origin.seen().is_empty(), "nothing was sent");
    let finds: Vec<_> = lab.audit().await.into_iter().filter(|line| line["code"] == "leak_detected").collect();
    assert_eq!(finds.len(), texts.len() * 3 * Way::ALL.len());
    assert!(finds.iter().all(|line| line["rule"].as_str().unwrap().starts_with("VALUE: ")), "{}", finds[0]);
}

/// Less than half; half of a value of 31 bytes; a half that is easy to guess; half of a user name.
#[tokio::test]
async fn less_than_half_of_a_long_secret_passes() {
    let (lab, origin) = lab().await;
    let url = format!("https://api.test:{}/", origin.port());
    for text in
        [&VALUE[..19], &VALUE[21..], &SHORT[..30], &SHORT[1..], &WORDY[..20], "a-user-with-a-long-name-of-its-own:"]
    {
        let within = format!("some.{text}.text-behind-it");
        assert_eq!(lab.by(Way::Absolute, "GET", &url, &[("x-k", &within)], "").await.status, 200, "{text}");
        assert_eq!(lab.by(Way::Absolute, "POST", &url, &[], &within).await.status, 200, "{text}");
    }
    let rest = &WORDY[20..];
    lab.by(Way::Absolute, "GET", &url, &[("x-k", rest)], "").await.assert_refused(403, "leak_detected");
}

/// Of `user:password`, the halves are those of the password.
#[tokio::test]
async fn half_of_a_long_password_does_not_leave() {
    let (lab, origin) = lab().await;
    let url = format!("https://api.test:{}/", origin.port());
    let password = VALUE.replace('k', "j").replace('q', "w").replace('4', "5");
    for half in [&password[..20], &password[20..]] {
        let within = format!("some.{half}.text-behind-it");
        lab.by(Way::TunnelH1, "POST", &url, &[], &within).await.assert_refused(403, "leak_detected");
    }
    assert!(origin.seen().is_empty());
}

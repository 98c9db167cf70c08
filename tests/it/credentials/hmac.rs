//! Requests signed with a shared key, verified as an origin does it.

use std::fs;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use hmac::{Hmac, KeyInit, Mac};
use sha2::{Sha256, Sha512};
use time::OffsetDateTime;

use crate::lab::client::Way;
use crate::lab::origin::Seen;
use crate::lab::{Lab, LabBuilder, Origin};

const KEY: &str = "Zk8Qw3Rt6Yp1Lx9Vb4Nc7Md2Hs5Gf0Ja";

async fn lab(hmac: &str, value: &str, integration: &str) -> (Lab, Origin) {
    lab_with("", hmac, value, integration).await
}

async fn lab_with(credential: &str, hmac: &str, value: &str, integration: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    fs::write(builder.dir.path().join("key"), value).unwrap();
    fs::write(builder.dir.path().join("id"), "AKID").unwrap();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n{integration}\n\
         [credentials.KEY]\nauth_type = \"hmac\"\nvalue = \"file:key\"\ndomains = [\"api.test\"]\n{credential}\n\
         [credentials.KEY.hmac]\n{hmac}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n",
        origin.port()
    );
    (builder.proxy(&text).await, origin)
}

fn url(origin: &Origin, path: &str) -> String {
    format!("https://api.test:{}{path}", origin.port())
}

pub fn sha256(key: &[u8], text: &[u8]) -> Vec<u8> {
    Hmac::<Sha256>::new_from_slice(key).unwrap().chain_update(text).finalize().into_bytes().to_vec()
}

pub fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns a field with the time, which is now.
fn time(seen: &Seen, name: &str) -> String {
    let text = seen.header(name).unwrap().to_owned();
    let age = OffsetDateTime::now_utc().unix_timestamp() - text.parse::<i64>().unwrap();
    assert!((0..60).contains(&age), "{age}");
    text
}

#[tokio::test]
async fn requests_are_signed_on_every_way_in() {
    let (lab, origin) = lab("preset = \"slack\"", KEY, "").await;
    let signature = "x-slack-signature";
    for way in Way::ALL {
        for fields in
            [&[("exeat-credential", "KEY")][..], &[(signature, "${secrets.KEY}"), ("x-slack-request-timestamp", "1")]]
        {
            for body in ["", "a=1&b=ä", &"x".repeat(200_000)] {
                let reply = lab.by(way, "POST", &url(&origin, "/hook?x=1"), fields, body).await;
                assert_eq!(reply.status, 200, "{way:?}");
                assert_eq!(reply.header("exeat-credential-used"), Some("KEY"));
                let seen = origin.last();
                let text = format!("v0:{}:{body}", time(&seen, "x-slack-request-timestamp"));
                let want = format!("v0={}", hex(&sha256(KEY.as_bytes(), text.as_bytes())));
                assert_eq!(seen.header(signature), Some(want.as_str()), "{way:?}");
                assert_eq!(seen.body, body);
            }
        }
        let reply = lab.by(way, "POST", &url(&origin, "/"), &[(signature, "v0=${secrets.KEY}")], "").await;
        reply.assert_refused(403, "credential_not_bound");
    }
    let line = lab.ended(0).await;
    assert_eq!((&line["credential_used"], &line["verdict"]), (&"KEY".into(), &"allow".into()));
    assert!(!fs::read_to_string(lab.audit_file()).unwrap().contains(KEY));
}

#[tokio::test]
async fn a_recipe_can_sign_the_parts_of_the_head() {
    let recipe = r#"
algorithm = "sha512"
encoding = "base64"
key_encoding = "base64"
key_id = "id-1"
timestamp = "unix_ms"
sign = "{key_id}\n{timestamp}\n{nonce}\n{method}\n{host}\n{path_and_query}\n{path}\n{query}\n{header:x-two}\n{header:x-none}\n{body_hash}"
headers = { X-Text = "{{x} {nonce}", X-Key = "{key_id}", X-Time = "{timestamp}", X-Nonce = "{nonce}", X-Hash = "{body_hash}", Authorization = "HMAC id={key_id}, sig={signature}" }"#;
    let key: Vec<u8> = (0..64).map(|n| 255 - n).collect();
    let (lab, origin) = lab(recipe, &STANDARD.encode(&key), "").await;
    let mut nonces = Vec::new();
    for way in Way::ALL {
        let fields = [("exeat-credential", "KEY"), ("x-two", "text/a"), ("x-two", "text/b"), ("x-nonce", "mine")];
        let reply = lab.by(way, "PUT", &url(&origin, "/a%20b/c?z=1&a=%2f+"), &fields, "body").await;
        assert_eq!(reply.status, 200, "{way:?}");
        let seen = origin.last();
        let field = |name: &str| seen.header(name).unwrap().to_owned();
        let hash = STANDARD.encode(<Sha512 as sha2::Digest>::digest("body"));
        assert_eq!((field("x-key"), field("x-hash")), ("id-1".to_owned(), hash.clone()));
        assert_eq!(seen.headers.get_all("x-nonce").iter().count(), 1);
        assert_eq!(field("x-text"), format!("{{x}} {}", field("x-nonce")));
        assert_eq!(field("x-nonce").len(), 36);
        nonces.push(field("x-nonce"));
        let host = format!("api.test:{}", origin.port());
        let text = format!(
            "id-1\n{}\n{}\nPUT\n{host}\n/a%20b/c?z=1&a=%2f+\n/a%20b/c\nz=1&a=%2f+\ntext/a, text/b\n\n{hash}",
            field("x-time"),
            field("x-nonce")
        );
        let signature = Hmac::<Sha512>::new_from_slice(&key).unwrap().chain_update(&text).finalize().into_bytes();
        assert_eq!(field("authorization"), format!("HMAC id=id-1, sig={}", STANDARD.encode(signature)), "{way:?}");
    }
    nonces.sort();
    nonces.dedup();
    assert_eq!(nonces.len(), Way::ALL.len());
}

#[tokio::test]
async fn a_signature_can_be_a_parameter() {
    let (lab, origin) = lab("preset = \"aws_mws\"\nkey_id = \"file:id\"", KEY, "").await;
    for way in Way::ALL {
        let path = "/Orders/2013-09-01?Version=2013-09-01&Action=List%20It&Signature=mine&b=ä&Marker=a+b%7e";
        let path = path.replace('ä', "%C3%A4");
        assert_eq!(lab.by(way, "GET", &url(&origin, &path), &[("exeat-credential", "KEY")], "").await.status, 200);
        let seen = origin.last();
        let query = seen.uri.query().unwrap();
        let (rest, signature) = query.rsplit_once("&Signature=").unwrap();
        assert!(!rest.contains("Signature="), "{query}");
        let time = rest.split("Timestamp=").nth(1).unwrap().split('&').next().unwrap();
        assert!(time.ends_with("Z") && time.contains("%3A"), "{time}");
        let sorted = format!(
            "AWSAccessKeyId=AKID&Action=List%20It&Marker=a%20b~&SignatureMethod=HmacSHA256&SignatureVersion=2&\
             Timestamp={time}&Version=2013-09-01&b=%C3%A4"
        );
        let text = format!("GET\napi.test:{}\n/Orders/2013-09-01\n{sorted}", origin.port());
        let want = sha256(KEY.as_bytes(), text.as_bytes());
        let got = percent_encoding::percent_decode_str(signature).decode_utf8().unwrap();
        assert_eq!(got, STANDARD.encode(want), "{way:?}");
    }
}

#[tokio::test]
async fn a_body_that_cannot_be_signed_is_refused() {
    let (lab, origin) = lab("preset = \"stripe\"", KEY, "").await;
    let named = [("exeat-credential", "KEY")];
    let large = "x".repeat(1_000_001);
    let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &named, &large).await;
    reply.assert_refused(413, "request_too_large");
    assert!(lab.ended(0).await["rule"].as_str().unwrap().contains("the signature"));
    assert!(origin.seen().is_empty());
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &named, &large[1..]).await.status, 200);
    let seen = origin.last();
    let field = seen.header("stripe-signature").unwrap();
    let (time, signature) = field.strip_prefix("t=").unwrap().split_once(",v1=").unwrap();
    assert_eq!(signature, hex(&sha256(KEY.as_bytes(), format!("{time}.{}", &large[1..]).as_bytes())));
}

/// The time and the nonce differ in each attempt, so they are no part of what a person approves.
#[tokio::test]
async fn a_signed_request_can_be_approved() {
    let (lab, origin) =
        lab("preset = \"stripe\"", KEY, "approval = \"required\"\n[admin]\nlisten = \"127.0.0.1:0\"").await;
    let mine = |time: &'static str| [("stripe-signature", "${secrets.KEY}"), ("x-other", time)];
    let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &mine("1"), "body").await;
    reply.assert_refused(403, "approval_pending");
    let path = format!("/v1/approvals/{}", reply.problem()["approval"].as_str().unwrap());
    let decision = serde_json::json!({ "decision": "approve" });
    assert_eq!(lab.admin_request("POST", &path, &decision).await.0, 200);
    lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &mine("2"), "body").await.assert_refused(403, "approval_pending");
    let named = [("exeat-credential", "KEY"), ("stripe-signature", "t=5,v1=mine"), ("x-other", "1")];
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &named, "body").await.status, 200);
    assert!(origin.last().header("stripe-signature").unwrap().starts_with("t=1"));
}

#[tokio::test]
async fn a_signature_can_be_made_for_every_request() {
    let (lab, origin) = lab("preset = \"stripe\"\nencoding = \"hex_upper\"", KEY, "require_credential = \"KEY\"").await;
    let mine = [("authorization", "mine"), ("stripe-signature", "t=1,v1=mine")];
    lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &mine, "x").await.assert_refused(403, "credential_required");
    let named = [("exeat-credential", "KEY"), ("authorization", "mine")];
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &named, "x").await.status, 200);
    let seen = origin.last();
    let (time, signature) = seen.header("stripe-signature").unwrap()[2..].split_once(",v1=").unwrap();
    assert_eq!(signature, hex(&sha256(KEY.as_bytes(), format!("{time}.x").as_bytes())).to_ascii_uppercase());
    assert_eq!(seen.header("authorization"), None);
    let (lab, origin) =
        lab_with("inject = \"always\"", "preset = \"stripe\"", KEY, "require_credential = \"KEY\"").await;
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &mine, "x").await.status, 200);
    assert_eq!(origin.last().headers.get_all("stripe-signature").iter().count(), 1);
    assert_ne!(origin.last().header("stripe-signature"), Some("t=1,v1=mine"));
}

/// The key never leaves, and it comes back only from an origin that has it.
#[tokio::test]
async fn a_signing_key_is_found_and_redacted_and_raises_an_alarm() {
    let (lab, origin) = lab("preset = \"stripe\"", KEY, "").await;
    let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[("exeat-credential", "KEY")], KEY).await;
    reply.assert_refused(403, "leak_detected");
    origin.serve_file("key", "text/plain", format!("the key is {KEY}"));
    let reply = lab.by(Way::TunnelH1, "GET", &url(&origin, "/files/key"), &[("exeat-credential", "KEY")], "").await;
    assert!(!reply.text().contains(KEY) && reply.text().contains("****"), "{}", reply.text());
    let line = lab.ended(1).await;
    assert!(line["alarm"].as_str().unwrap().contains("KEY"), "{line}");
}

//! A value that is itself an encoding is found in its usual other spellings, which contain the whole secret.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::lab::client::Way;
use crate::lab::{LabBuilder, origin};

const SECRET: &str = "Pw7Rr2mVt6LxK0pWd3NfHb7YcAe5UgJ";

/// Returns the value of a credential, and texts from which a recipient has the whole secret.
fn values() -> [(&'static str, String, Vec<String>); 6] {
    let api_key = STANDARD.encode(format!("VuaCfGcBCdbkQm:{SECRET}"));
    let login = STANDARD.encode(format!("alice:{SECRET}"));
    let bytes =
        STANDARD.encode([0xa1, 0xf2, 0xc3, 0xd4, 0xe5, 0xf6, 7, 24, 0x29, 0x3a, 0x4b, 0x5c, 0x6d, 0x7e, 0x8f, 0x90]);
    let owned = |texts: &[&str]| texts.iter().map(|text| (*text).to_owned()).collect();
    [
        ("API_KEY", format!("ApiKey {api_key}"), vec![format!("VuaCfGcBCdbkQm:{SECRET}"), SECRET.to_owned()]),
        ("LOGIN", format!("Basic {login}"), vec![format!("alice:{SECRET}"), login.trim_end_matches('=').to_owned()]),
        ("PADDED", "Zq8R2mVt6LxK0pWd3Nfz9A==".to_owned(), owned(&["Zq8R2mVt6LxK0pWd3Nfz9A"])),
        ("UUID", "3f2504e0-4f89-41d3-9a0c-0305e82c3301".to_owned(), owned(&["3f2504e04f8941d39a0c0305e82c3301"])),
        ("DIGITS", "7b1f04e04f8941d39a0c0305e82c4402".to_owned(), owned(&["7B1F04E0-4F89-41D3-9A0C-0305E82C4402"])),
        ("HEX", "a1f2c3d4e5f60718293a4b5c6d7e8f90".to_owned(), vec![bytes]),
    ]
}

#[tokio::test]
async fn equivalents_of_a_value_neither_leave_nor_come_back() {
    for (name, value, texts) in values() {
        for text in texts {
            let builder = LabBuilder::new().await;
            let body = format!("{{\"you are\": \"{text}\"}}");
            let answer = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len());
            let (port, asked) = origin::raw_tls(&builder, "api.test", answer.leak().as_bytes()).await;
            std::fs::write(builder.dir.path().join("value"), &value).unwrap();
            let lab = builder
                .proxy(&format!(
                    "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{port}]\n[tasks.t]\n\
                     integrations = [\"api\"]\ncredentials = [\"{name}\"]\n[credentials.{name}]\nauth_type = \"header\"\n\
                     auth_header_name = \"x-key\"\nvalue = \"file:value\"\ndomains = [\"api.test\"]\n"
                ))
                .await;
            let url = format!("https://api.test:{port}/");
            let reply = lab.by(Way::Absolute, "GET", &url, &[("exeat-credential", name)], "").await;
            // The padding tells nothing.
            let secret = text.trim_end_matches('=');
            assert_eq!(reply.text(), body.replace(secret, &"*".repeat(secret.len())), "{name}: {text}");
            for way in Way::ALL {
                lab.by(way, "POST", &url, &[], &body).await.assert_refused(403, "leak_detected");
            }
            assert_eq!(asked.load(std::sync::atomic::Ordering::SeqCst), 1, "{name}: {text}");
            let lines = lab.audit().await;
            let finds = lines.iter().filter(|line| line["code"] == "leak_detected");
            assert_eq!(finds.count(), Way::ALL.len(), "{lines:#?}");
        }
    }
}

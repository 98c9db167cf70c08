//! A placeholder in the path, for APIs that take their key there.

use std::fs;

use crate::lab::client::Way;
use crate::lab::{Lab, LabBuilder, Origin};

/// In the form of Telegram's tokens.
const VALUE: &str = "7216504398:AAHq2mZv9LpW4sVt6eRRu8YbN3cHd5JfQw-";

async fn lab(credential: &str, integration: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    builder.dns.set("other.test", &["127.0.0.1"]);
    fs::write(builder.dir.path().join("bot"), VALUE).unwrap();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\", \"other.test\"]\nports = [{}]\n{integration}\n\
         [credentials.BOT]\nvalue = \"file:bot\"\ndomains = [\"api.test\"]\n{credential}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"BOT\"]\n",
        origin.port()
    );
    (builder.proxy(&text).await, origin)
}

const PATH: &str = "auth_type = \"path\"";

#[tokio::test]
async fn a_placeholder_in_the_path_is_replaced_on_every_way_in() {
    let (lab, origin) = lab(PATH, "paths = [\"/tell\", \"/*/sendMessage\"]").await;
    let port = origin.port();
    for way in Way::ALL {
        for spelled in ["${secrets.BOT}", "$%7Bsecrets.BOT%7D", "%24%7bsecrets%2eBOT%7d"] {
            let url = format!("https://api.test:{port}/bot{spelled}/sendMessage?chat_id=1&text=%24%7B");
            let reply = lab.by(way, "POST", &url, &[], "").await;
            assert_eq!(reply.status, 200, "{way:?} {spelled}");
            let seen = origin.last().uri;
            assert_eq!(seen.path(), format!("/bot{VALUE}/sendMessage"), "{way:?} {spelled}");
            assert_eq!(seen.query(), Some("chat_id=1&text=%24%7B"));
            assert_eq!(reply.header("exeat-credential-used"), Some("BOT"));
        }
    }
    // The rules apply to the path with the placeholder.
    let url = format!("https://api.test:{port}/bot$%7Bsecrets.BOT%7D/deleteWebhook");
    lab.by(Way::TunnelH1, "GET", &url, &[], "").await.assert_refused(403, "path_not_allowed");
    let log = fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains(VALUE) && log.contains("/bot$%7Bsecrets.BOT%7D/sendMessage"), "{log}");
    let line = lab.ended(0).await;
    assert_eq!((&line["credential_used"], &line["verdict"]), (&"BOT".into(), &"allow".into()));
}

#[tokio::test]
async fn what_comes_back_of_the_path_is_redacted() {
    let (lab, origin) = lab(PATH, "").await;
    let url = format!("https://api.test:{}/tell/$%7Bsecrets.BOT%7D?whole", origin.port());
    let reply = lab.by(Way::TunnelH1, "GET", &url, &[], "").await;
    assert!(origin.last().uri.path().ends_with(VALUE));
    let shown = format!("{:?} {}", reply.headers, reply.text());
    assert!(!shown.contains(VALUE), "{shown}");
}

#[tokio::test]
async fn a_placeholder_that_is_not_replaced_is_refused_or_a_text() {
    let (lab, origin) = lab(PATH, "").await;
    let at = |host: &str, path: &str| format!("https://{host}:{}{path}", origin.port());
    let bot = "$%7Bsecrets.BOT%7D";
    let refused = [
        (at("other.test", &format!("/bot{bot}/x")), "other_host"),
        (at("api.test", &format!("/bot{bot}/{bot}")), "repeated"),
        (at("api.test", &format!("/bot{bot}{bot}")), "repeated"),
        (at("api.test", &format!("/x%2541%4{bot}")), "in_escape"),
    ];
    for (url, _) in &refused {
        let reply = lab.by(Way::TunnelH1, "GET", url, &[], "").await;
        reply.assert_refused(403, "credential_not_bound");
        assert_eq!(reply.problem()["place"], "path", "{url}");
    }
    let lines = lab.audit().await;
    let reasons: Vec<_> = lines.iter().filter_map(|line| line["placeholder"]["reason"].as_str()).collect();
    assert_eq!(reasons, refused.iter().map(|(_, reason)| *reason).collect::<Vec<_>>());
    // Elsewhere the API could show it to others, as the text of a message.
    let text = at("api.test", "/botOTHER/sendMessage?text=$%7Bsecrets.BOT%7D");
    let fields = [("x-note", "${secrets.BOT}"), ("authorization", "Bearer ${secrets.BOT}")];
    let mut elsewhere = vec![(text, vec![])];
    elsewhere.extend(fields.map(|field| (at("api.test", "/"), vec![field])));
    for (url, fields) in elsewhere {
        lab.by(Way::TunnelH1, "GET", &url, &fields, "").await.assert_refused(403, "credential_not_bound");
    }
    let named = [("exeat-credential", "BOT")];
    lab.by(Way::TunnelH1, "GET", &at("api.test", "/"), &named, "").await.assert_refused(403, "credential_not_bound");
    // The task has no such credential, so it has this form by chance.
    let url = at("api.test", "/$%7Bsecrets.NONE%7D");
    assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[], "").await.status, 200);
    assert_eq!(origin.last().uri.path(), "/$%7Bsecrets.NONE%7D");
    assert_eq!(origin.seen().len(), 1);

    let nonce = ("exeat-swap", "0123456789abcdef");
    let url = at("api.test", "/bot$%7B0123456789abcdef.BOT%7D/$%7Bsecrets.BOT%7D");
    assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[nonce], "").await.status, 200);
    assert_eq!(origin.last().uri.path(), format!("/bot{VALUE}/$%7Bsecrets.BOT%7D"));
    let url = at("api.test", "/bot$%7B0123456789abcdef.NONE%7D");
    lab.by(Way::TunnelH1, "GET", &url, &[nonce], "").await.assert_refused(403, "credential_not_bound");
}

/// Without `swap_in`, a path is no place for a credential.
#[tokio::test]
async fn only_swap_in_replaces_in_the_path() {
    for credential in ["auth_type = \"auto\"", "auth_type = \"bearer\""] {
        let (lab, origin) = lab(credential, "").await;
        let url = format!("https://api.test:{}/bot$%7Bsecrets.BOT%7D/x", origin.port());
        assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[], "").await.status, 200);
        assert_eq!(origin.last().uri.path(), "/bot$%7Bsecrets.BOT%7D/x", "{credential}");
    }
}

#[tokio::test]
async fn a_required_credential_may_stand_in_the_path() {
    let (lab, origin) = lab(PATH, "require_credential = \"BOT\"").await;
    let url = |path: &str| format!("https://api.test:{}{path}", origin.port());
    lab.by(Way::TunnelH1, "GET", &url("/botMINE/x"), &[], "").await.assert_refused(403, "credential_required");
    let own = [("authorization", "Bearer mine"), ("x-api-key", "mine")];
    let reply = lab.by(Way::TunnelH1, "GET", &url("/bot$%7Bsecrets.BOT%7D/x"), &own, "").await;
    assert_eq!(reply.status, 200);
    let seen = origin.last();
    assert_eq!((seen.header("authorization"), seen.header("x-api-key")), (None, None));
}

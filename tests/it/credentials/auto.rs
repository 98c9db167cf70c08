//! `auth_type = "auto"`: the placeholder is replaced wherever it stands as a credential. A placeholder that is not replaced
//! is refused with its place.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use crate::lab::client::{Way, basic};
use crate::lab::{KEY, Lab, LabBuilder, Origin};

const PLACEHOLDER: &str = "sk-live-placeholder-0000000";

/// Starts `api.test` and `other.test`, with one credential `KEY` that is bound to the first.
async fn lab(credential: &str, integration: &str) -> (Lab, Origin, Origin) {
    lab_with("env:KEY", credential, integration, "").await
}

/// As [`lab`], with the source of the value, and the content of the file `value`.
async fn lab_with(source: &str, credential: &str, integration: &str, value: &str) -> (Lab, Origin, Origin) {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), value).unwrap();
    let (origin, other) = (builder.origin("api.test").await, builder.origin("other.test").await);
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n{integration}\n\
         [integrations.other]\nallowed_domains = [\"other.test\"]\nports = [{}]\n\
         [credentials.KEY]\nvalue = \"{source}\"\ndomains = [\"api.test\"]\nplaceholder = \"{PLACEHOLDER}\"\n{credential}\n\
         [tasks.t]\nintegrations = [\"api\", \"other\"]\ncredentials = [\"KEY\"]\n",
        origin.port(),
        other.port()
    );
    (builder.proxy(&text).await, origin, other)
}

/// Returns the text with the key in place of the placeholder, also within `Basic`.
fn with_key(text: &str) -> String {
    match text.strip_prefix("Basic ").and_then(|coded| STANDARD.decode(coded).ok()) {
        Some(decoded) => basic(&String::from_utf8(decoded).unwrap().replace(PLACEHOLDER, KEY)),
        None => text.replace(PLACEHOLDER, KEY),
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_goes_where_the_client_sends_its_placeholder() {
    let (lab, origin, _) = lab("auth_type = \"auto\"", "").await;
    let p = PLACEHOLDER;
    let (bearer, token) = (format!("Bearer {p}"), format!("token {p}"));
    let (user, password, both) = (basic(&format!("{p}:")), basic(&format!("x-access-token:{p}")), basic(p));
    let rows: [&[(&str, &str)]; 9] = [
        &[("authorization", &bearer)],
        &[("x-api-key", p)],
        &[("x-goog-api-key", p), ("x-text", "kept")],
        &[("authorization", &token), ("x-api-key", p)],
        &[("authorization", &user)],
        &[("authorization", &password)],
        &[("authorization", &both)],
        &[("x-upstream-authorization", &password)],
        &[("x-unusual", p)],
    ];
    let mut count = 0;
    for way in Way::ALL {
        for fields in rows {
            let url = format!("https://api.test:{}/p?a=1", origin.port());
            let reply = lab.by(way, "POST", &url, fields, "body").await;
            assert_eq!(
                (reply.status.as_u16(), reply.header("exeat-credential-used")),
                (200, Some("KEY")),
                "{fields:?}"
            );
            for (name, value) in fields {
                let seen: Vec<_> = origin.last().headers.get_all(*name).iter().cloned().collect();
                assert_eq!(seen, [with_key(value).parse::<http::HeaderValue>().unwrap()], "{way:?} {fields:?}");
            }
            let line = lab.ended(count).await;
            assert_eq!((&line["event"], &line["credential_used"]), (&"closed".into(), &"KEY".into()), "{line}");
            count += 1;
        }
        // As a parameter, alone and beside a field.
        for (query, fields, want) in [
            (format!("a=1&key={p}&b"), &[][..], "a=1&b&key="),
            (format!("api_key={p}"), &[("x-api-key", p)][..], "api_key="),
            (format!("k%2Ey={p}&a={p}"), &[][..], ""),
        ] {
            let url = format!("https://api.test:{}/p?{query}", origin.port());
            assert_eq!(lab.by(way, "GET", &url, fields, "").await.status, 200);
            let encoded = "sk-live-51H%2F8xPq%2BZz~0%3D%25w%26R";
            let seen = origin.last();
            let seen = seen.uri.query().unwrap();
            let want = if want.is_empty() { format!("k.y={encoded}&a={encoded}") } else { format!("{want}{encoded}") };
            assert_eq!(seen, want);
            count += 1;
        }
    }
    assert!(!std::fs::read_to_string(lab.audit_file()).unwrap().contains(KEY));
}

/// The number of placeholders in a request is limited, and a long query with one is served.
#[tokio::test(flavor = "multi_thread")]
async fn a_request_has_few_placeholders() {
    let (lab, origin, _) = lab("auth_type = \"auto\"", "").await;
    let of = |count: usize| (0..count).map(|n| format!("k{n}={PLACEHOLDER}")).collect::<Vec<_>>().join("&");
    let url = |query: &str| format!("https://api.test:{}/?{query}", origin.port());
    for way in Way::ALL {
        assert_eq!(lab.by(way, "GET", &url(&of(8)), &[], "").await.status, 200);
        assert_eq!(origin.last().uri.query().unwrap().matches("sk-live-51H").count(), 8);
        lab.by(way, "GET", &url(&of(9)), &[], "").await.assert_refused(403, "credential_not_bound");
        assert_eq!(lab.audit().await.last().unwrap()["placeholder"]["reason"], "too_many");
        let long = "a&".repeat(4_000) + &of(1);
        assert_eq!(lab.by(way, "GET", &url(&long), &[], "").await.status, 200);
        assert!(origin.last().uri.query().unwrap().len() > 8_000);
    }
    assert_eq!(origin.seen().len(), 2 * Way::ALL.len());
}

/// The field or parameter, and the reason.
type Refused<'a> = (&'a str, &'a [(&'a str, &'a str)], &'a str, &'a str);

async fn assert_refused(lab: &Lab, origin: &Origin, rows: &[Refused<'_>]) {
    let (before, mut count) = (origin.seen().len(), lab.audit().await.len());
    for way in Way::ALL {
        for (path, fields, place, reason) in rows {
            let reply = lab.by(way, "GET", &format!("https://api.test:{}{path}", origin.port()), fields, "").await;
            let case = format!("{way:?} {path} {fields:?}: {reply:?}");
            reply.assert_refused(403, "credential_not_bound");
            let problem = reply.problem();
            assert_eq!((&problem["credential"], &problem["place"]), (&"KEY".into(), &(*place).into()), "{case}");
            let line = lab.ended(count).await;
            let placeholder = &line["placeholder"];
            assert_eq!(line["code"], "credential_not_bound", "{line}");
            assert_eq!(
                (&placeholder["credential"], &placeholder["place"]),
                (&"KEY".into(), &(*place).into()),
                "{line}"
            );
            assert_eq!(placeholder["reason"], *reason, "{case}");
            count += 1;
        }
    }
    assert_eq!(origin.seen().len(), before, "nothing reaches the origin");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_that_is_no_credential_is_refused() {
    let (lab, origin, _) = lab("auth_type = \"auto\"", "").await;
    let p = PLACEHOLDER;
    let (cookie, twice, text) = (format!("s={p}"), format!("Bearer {p} {p}"), format!("a b {p}"));
    let (behind, escape) = (format!("Bearer {p}x"), format!("%4{p}"));
    let in_user = basic(&format!("a:{p}:b"));
    let query = |text: &str| format!("/p?{text}");
    assert_refused(
        &lab,
        &origin,
        &[
            ("/", &[("cookie", &cookie)], "header:cookie", "beside_text"),
            ("/", &[("user-agent", &text)], "header:user-agent", "beside_text"),
            ("/", &[("authorization", &behind)], "header:authorization", "beside_text"),
            ("/", &[("x-key", &escape)], "header:x-key", "beside_text"),
            ("/", &[("authorization", &in_user)], "header:authorization", "beside_text"),
            ("/", &[("authorization", &twice)], "header:authorization", "repeated"),
            ("/", &[("x-api-key", p), ("x-api-key", "mine")], "header:x-api-key", "repeated"),
            ("/", &[("range", p)], "header:range", "other_place"),
            (&query(&format!("q=a+{p}")), &[], "query:q", "beside_text"),
            (&query(&format!("a=1;key={p}")), &[], "query:a", "beside_text"),
            (&query(&format!("key={p}&key=mine")), &[], "query:key", "repeated"),
            (&query(&format!("{p}=1")), &[], &format!("query:{p}"), "in_name"),
            (&query(&format!("%22={p}")), &[], "query:\"", "other_place"),
        ],
    )
    .await;
    // In the path and the body, a placeholder is text.
    let url = format!("https://api.test:{}/{p}", origin.port());
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url, &[], p).await.status, 200);
    assert_eq!((origin.last().uri.path(), &origin.last().body[..]), (format!("/{p}").as_str(), p.as_bytes()));
    // Such a credential is not sent by name.
    let reply = lab.by(Way::Absolute, "GET", &url, &[("exeat-credential", "KEY")], "").await;
    reply.assert_refused(403, "credential_not_bound");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_in_another_place_is_never_sent() {
    for credential in
        ["auth_type = \"bearer\"", "auth_type = \"bearer\"\nswap_in = [\"header:x-other\", \"query:other\"]"]
    {
        let (lab, origin, other) = lab(credential, "").await;
        let p = PLACEHOLDER;
        let coded = basic(&format!("a:{p}"));
        assert_refused(
            &lab,
            &origin,
            &[
                ("/", &[("x-api-key", p)], "header:x-api-key", "other_place"),
                ("/", &[("x-api-key", "${secrets.KEY}")], "header:x-api-key", "other_place"),
                ("/", &[("x-api-key", "${secrets.NOPE} ${secrets.KEY}")], "header:x-api-key", "repeated"),
                ("/", &[("x-authorization", &coded)], "header:x-authorization", "other_place"),
                (&format!("/?key={p}"), &[], "query:key", "other_place"),
                (&format!("/?key=%73{}", &p[1..]), &[], "query:key", "other_place"),
            ],
        )
        .await;
        let url = format!("https://other.test:{}/?x={p}", other.port());
        let reply = lab.by(Way::TunnelH2, "GET", &url, &[], "").await;
        reply.assert_refused(403, "credential_not_bound");
        assert!(other.seen().is_empty());
        let lines = lab.audit().await;
        assert_eq!(lines.last().unwrap()["placeholder"]["reason"], "other_host");
        // The places that the configuration lists.
        let url = format!("https://api.test:{}/?other=a+{p}", origin.port());
        let reply = lab.by(Way::TunnelH2, "GET", &url, &[("x-other", &format!("a {p} b"))], "").await;
        if credential.contains("swap_in") {
            assert_eq!(reply.status, 200);
            assert_eq!(origin.last().headers["x-other"], format!("a {KEY} b"));
            assert!(origin.last().uri.query().unwrap().starts_with("other=a%20sk-live-51H"));
        } else {
            reply.assert_refused(403, "credential_not_bound");
        }
    }
}

/// The name of a field or parameter is text of the sandbox. A value in it is neither logged nor shown, and is a find.
#[tokio::test(flavor = "multi_thread")]
async fn a_place_with_a_value_in_its_name_is_hidden() {
    let value = "plain7q2zt9lmx4value";
    let (lab, origin, _) = lab_with("file:value", "auth_type = \"bearer\"", "", value).await;
    let url = format!("https://api.test:{}/", origin.port());
    let reply = lab.by(Way::TunnelH1, "GET", &url, &[(value, PLACEHOLDER)], "").await;
    reply.assert_refused(403, "credential_not_bound");
    assert!(reply.problem().get("place").is_none(), "{reply:?}");
    let line = lab.ended(0).await;
    assert_eq!((&line["placeholder"]["place"], &line["finds"]), (&"header:[redacted]".into(), &1.into()), "{line}");
    assert!(!std::fs::read_to_string(lab.audit_file()).unwrap().contains(value));
}

/// A long name is not shown, and the placeholder in it is not either.
#[tokio::test(flavor = "multi_thread")]
async fn a_long_place_is_not_shown() {
    let (lab, origin, _) = lab("auth_type = \"auto\"", "").await;
    let url = format!("https://api.test:{}/?{}={PLACEHOLDER}", origin.port(), "k".repeat(100));
    let reply = lab.by(Way::TunnelH1, "GET", &url, &[], "").await;
    reply.assert_refused(403, "credential_not_bound");
    assert!(reply.problem().get("place").is_none(), "{reply:?}");
    assert_eq!(lab.ended(0).await["placeholder"]["place"], "query:[too long]");
    assert!(origin.seen().is_empty());
}

/// The client may send the value with `Basic`, so its password is protected alone. With `bearer`, the value is a single text.
#[tokio::test(flavor = "multi_thread")]
async fn the_password_of_a_value_is_protected() {
    for (auth_type, status) in [("auto", 403), ("basic", 403), ("bearer", 200)] {
        let password = "k7Qz2mXv9LpW4sVt6eRR";
        let credential = format!("auth_type = \"{auth_type}\"");
        let (lab, origin, _) = lab_with("file:value", &credential, "", &format!("some-user:{password}")).await;
        let url = format!("https://api.test:{}/", origin.port());
        let reply = lab.by(Way::TunnelH1, "POST", &url, &[], &format!("a {password} b")).await;
        assert_eq!(reply.status, status, "{auth_type}");
    }
}

/// Where a credential is required, the text around its placeholder cannot be a key of the sandbox's own.
#[tokio::test(flavor = "multi_thread")]
async fn a_required_key_comes_alone() {
    let (lab, origin, _) = lab("auth_type = \"auto\"", "require_credential = \"KEY\"").await;
    let p = PLACEHOLDER;
    let url = format!("https://api.test:{}/?token=mine&a=1", origin.port());
    let own = [("cookie", "s=mine"), ("x-api-key", "mine"), ("x-text", "kept")];
    for value in [format!("Bearer {p}"), p.to_owned(), basic(&format!("x-access-token:{p}")), basic(&format!("{p}:"))] {
        let fields = [&own[..], &[("authorization", &value)]].concat();
        assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &fields, "").await.status, 200, "{value}");
        let seen = origin.last();
        assert_eq!(seen.headers["authorization"], with_key(&value));
        assert!(!seen.headers.contains_key("cookie") && !seen.headers.contains_key("x-api-key"), "{seen:?}");
        assert_eq!((seen.uri.query(), seen.headers["x-text"].as_bytes()), (Some("a=1"), &b"kept"[..]));
    }
    let count = origin.seen().len();
    let own_key = "sk_live_0123456789";
    for value in [format!("{own_key} {p}"), basic(&format!("{own_key}:{p}")), basic(&format!("{p}:{own_key}"))] {
        let reply = lab.by(Way::TunnelH1, "GET", &url, &[("authorization", &value)], "").await;
        reply.assert_refused(403, "credential_not_bound");
    }
    lab.by(Way::TunnelH1, "GET", &url, &own, "").await.assert_refused(403, "credential_required");
    assert_eq!(origin.seen().len(), count);
}

//! Placeholders in bodies, which are replaced at their parsed place.

use std::fs;

use serde_json::{Value, json};

use crate::lab::client::Way;
use crate::lab::{Lab, LabBuilder, Origin};

const VALUE: &str = "tvly-\"q8Zx\\4Rk&2+Lm%9Vb7Nc3Wd6Ye1Tf5";
const JSON: (&str, &str) = ("content-type", "application/json");
const FORM: (&str, &str) = ("content-type", "application/x-www-form-urlencoded");
const ANYWHERE: &str = "auth_type = \"placeholder\"\nswap_in = [\"body:json\", \"body:form\"]";

async fn lab(credential: &str, integration: &str, plan: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    fs::write(builder.dir.path().join("key"), VALUE).unwrap();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n{integration}\n\
         [credentials.KEY]\nvalue = \"file:key\"\ndomains = [\"api.test\"]\n{credential}\n\
         [plans.p]\n{plan}\n\
         [tasks.t]\nplan = \"p\"\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n",
        origin.port()
    );
    (builder.proxy(&text).await, origin)
}

fn url(origin: &Origin, path: &str) -> String {
    format!("https://api.test:{}{path}", origin.port())
}

#[tokio::test]
async fn placeholders_in_a_body_are_replaced_on_every_way_in() {
    let (lab, origin) = lab(ANYWHERE, "", "").await;
    let json = r#"{"query":"ä \"x\"","deep":[{"api_key":"${secrets.KEY}"}],"again":"Bearer \u0024{secrets.KEY}!"}"#;
    for way in Way::ALL {
        let digest = [JSON, ("content-md5", "x"), ("digest", "x"), ("content-digest", "x"), ("repr-digest", "x")];
        let reply = lab.by(way, "POST", &url(&origin, "/"), &digest, json).await;
        assert_eq!(reply.status, 200, "{way:?}");
        let seen = origin.last();
        let read: Value = serde_json::from_slice(&seen.body).unwrap();
        let want = json!({ "query": "ä \"x\"", "deep": [{ "api_key": VALUE }], "again": format!("Bearer {VALUE}!") });
        assert_eq!(read, want, "{way:?}");
        assert_eq!(seen.header("content-length"), Some(seen.body.len().to_string().as_str()), "{way:?}");
        for name in ["content-md5", "digest", "content-digest", "repr-digest"] {
            assert_eq!(seen.header(name), None, "{way:?}: it is of another body");
        }
        assert_eq!(reply.header("exeat-credential-used"), Some("KEY"));

        let form = "a=1&token=%24%7Bsecrets.KEY%7D&b=x+y%26";
        let reply = lab.by(way, "POST", &url(&origin, "/"), &[FORM], form).await;
        assert_eq!(reply.status, 200, "{way:?}");
        let body = String::from_utf8(origin.last().body.to_vec()).unwrap();
        assert_eq!(body, "a=1&token=tvly%2D%22q8Zx%5C4Rk%262%2BLm%259Vb7Nc3Wd6Ye1Tf5&b=x+y%26", "{way:?}");
    }
    let line = lab.ended(0).await;
    assert_eq!((&line["credential_used"], &line["verdict"]), (&"KEY".into(), &"allow".into()));
    let log = fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains("q8Zx"), "{log}");
}

/// Without the placeholder, a body is sent as it is.
#[tokio::test]
async fn other_bodies_are_sent_unchanged() {
    let (lab, origin) = lab(ANYWHERE, "", "").await;
    let rows = [
        (JSON, r#"{"a" : "\u00e4\/" , "n":1.50}"#),
        (JSON, "{not json"),
        (JSON, r#"{"a":1,"a":2}"#),
        (JSON, ""),
        (JSON, r#"{"a":"${secrets.NONE}"}"#),
        (FORM, "a=%zz&a;b=%24%7Bsecrets.NONE%7D"),
        (("content-type", "text/plain"), "${secrets.KEY}"),
        (("content-type", "application/json; charset=utf-16"), "{\"a\":\"${secrets.KEY}\"}"),
    ];
    for (kind, body) in rows {
        let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[kind], body).await;
        assert_eq!(reply.status, 200, "{body}");
        assert_eq!(origin.last().body, body, "{kind:?}");
        assert_eq!(reply.header("exeat-credential-used"), None, "{body}");
    }
}

#[tokio::test]
async fn what_comes_back_of_a_body_is_redacted() {
    let (lab, origin) = lab(ANYWHERE, "", "").await;
    let body = r#"{"k":"${secrets.KEY}"}"#;
    let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/echo"), &[JSON], body).await;
    assert_eq!(reply.status, 200);
    assert!(!reply.text().contains("q8Zx") && reply.text().contains("\"k\":\"****"), "{}", reply.text());
}

#[tokio::test]
async fn a_place_can_be_a_single_member_or_parameter() {
    let credential =
        "auth_type = \"placeholder\"\nswap_in = [\"body:json:/auth/key\", \"body:json:/a~1b/1\", \"body:form:token\"]";
    let (lab, origin) = lab(credential, "", "").await;
    let own = "${secrets.KEY}";
    // Other text beside it could make a server read another place.
    for (kind, body) in [(JSON, format!(r#"{{"auth":{{"key":"&text={own}&x="}}}}"#)), (FORM, format!("token=x{own}"))] {
        let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[kind], &body).await;
        reply.assert_refused(403, "credential_not_bound");
    }
    let rows = [
        (FORM, format!("expand[]=1&expand[]=2&token={own}"), 1),
        (JSON, format!(r#"{{"auth":{{"key":"{own}"}},"text":"{own}"}}"#), 1),
        (JSON, format!(r#"{{"a/b":["{own}","{own}"]}}"#), 1),
        (JSON, format!(r#"{{"key":"{own}","text":"{own}"}}"#), 0),
        (JSON, format!(r#"{{"auth":{{"key":["{own}"]}}}}"#), 0),
        (FORM, format!("text={own}&token={own}"), 1),
        (FORM, format!("text={own}&tokens={own}"), 0),
    ];
    for (kind, body, replaced) in rows {
        let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[kind], &body).await;
        assert_eq!(reply.status, 200, "{body}");
        let seen = String::from_utf8(origin.last().body.to_vec()).unwrap();
        assert_eq!(seen.matches("q8Zx").count(), replaced, "{body} {seen}");
        assert_eq!(seen.matches(own).count(), body.matches(own).count() - replaced, "the others are texts: {seen}");
        assert_eq!(reply.header("exeat-credential-used"), (replaced > 0).then_some("KEY"), "{body}");
    }
}

#[tokio::test]
async fn a_placeholder_that_cannot_be_replaced_is_refused() {
    let (lab, origin) = lab(ANYWHERE, "", "").await;
    let own = "${secrets.KEY}";
    let many = vec![format!("\"{own}\""); 9].join(",");
    let refused = [
        (JSON, format!(r#"{{"{own}":1}}"#), "in_name"),
        (JSON, format!(r#"{{"a":"{own}{own}"}}"#), "repeated"),
        (JSON, format!(r#"{{"a":"%2{own}"}}"#), "in_escape"),
        (JSON, format!(r#"{{"a":"{own}","b":1,"\u0062":2}}"#), "ambiguous"),
        (JSON, format!(r#"{{"a":"{own}",}}"#), "ambiguous"),
        (JSON, format!(r#"{{"a":"{own}"}} // x"#), "ambiguous"),
        (JSON, format!(r#"{{"a":"{own}","b":"\ud800"}}"#), "ambiguous"),
        (JSON, format!("[{many}]"), "too_many"),
        (FORM, format!("{own}=1"), "in_name"),
        (FORM, format!("a={own}&a=2"), "ambiguous"),
        (FORM, format!("a={own};b=2"), "ambiguous"),
        (FORM, format!("a=x{own}y{own}"), "repeated"),
        (JSON, format!(r#"{{"a":"${{secrets.NONE}} {own}"}}"#), "repeated"),
        (JSON, format!(r#"{{"key":"{own}","KEY":"mine"}}"#), "ambiguous"),
        (FORM, format!("a.b={own}&A_b=mine"), "ambiguous"),
        (FORM, format!("x=1;a=mine&a={own}"), "ambiguous"),
        (FORM, format!("{{\"message\":\"x=&token={own}\"}}"), "ambiguous"),
    ];
    for (kind, body, _) in &refused {
        let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[*kind], body).await;
        reply.assert_refused(403, "credential_not_bound");
        assert!(reply.problem()["place"].as_str().is_some_and(|place| place.starts_with("body:")), "{body}");
    }
    assert!(origin.seen().is_empty());
    let lines = lab.audit().await;
    let reasons: Vec<_> = lines.iter().filter_map(|line| line["placeholder"]["reason"].as_str()).collect();
    assert_eq!(reasons, refused.iter().map(|(.., reason)| *reason).collect::<Vec<_>>());

    // A client that requires all placeholders to be replaced.
    let nonce = ("exeat-swap", "0123456789abcdef");
    let of_nonce = |name: &str| format!("${{0123456789abcdef.{name}}}");
    let both = format!(r#"{{"a":"{}","b":"{own}"}}"#, of_nonce("KEY"));
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON, nonce], &both).await.status, 200);
    let seen = String::from_utf8(origin.last().body.to_vec()).unwrap();
    assert!(seen.contains("q8Zx") && seen.contains(own), "{seen}");
    for body in [format!(r#"{{"a":"{}"}}"#, of_nonce("NONE")), format!("{{\"a\":{}", of_nonce("KEY"))] {
        let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON, nonce], &body).await;
        reply.assert_refused(403, "credential_not_bound");
    }
}

/// Neither the number of credentials nor the way in which a value is sent is known before the body has been read.
#[tokio::test]
async fn a_required_credential_may_stand_in_the_body() {
    let (lab, origin) = lab(ANYWHERE, "require_credential = \"KEY\"", "").await;
    for body in [r#"{"a":"mine"}"#, "", "{"] {
        let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON], body).await;
        reply.assert_refused(403, "credential_required");
    }
    let body = r#"{"a":"${secrets.KEY}"}"#;
    let text = [("content-type", "text/plain")];
    lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &text, body).await.assert_refused(403, "credential_required");
    // An own key beside it, which the origin could read instead.
    for body in [r#"{"a":"mine ${secrets.KEY}"}"#, r#"{"a":"${secrets.KEY}","A":"mine"}"#] {
        let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON], body).await;
        reply.assert_refused(403, "credential_not_bound");
    }
    assert!(origin.seen().is_empty());
    let own = [JSON, ("authorization", "Bearer mine"), ("cookie", "a=mine")];
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &own, body).await.status, 200);
    let seen = origin.last();
    assert_eq!((seen.header("authorization"), seen.header("cookie")), (None, None));
    assert!(String::from_utf8_lossy(&seen.body).contains("q8Zx"));
}

#[tokio::test]
async fn a_body_that_is_too_large_for_the_search_is_refused() {
    let (lab, origin) = lab(ANYWHERE, "", "").await;
    let large = format!(r#"{{"a":"${{secrets.KEY}}","b":"{}"}}"#, "x".repeat(1_000_000));
    let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON], &large).await;
    reply.assert_refused(413, "request_too_large");
    let line = lab.ended(0).await;
    assert!(line["rule"].as_str().unwrap().contains("placeholders"), "{line}");
    // Of another kind, it is scanned while it is sent.
    let text = [("content-type", "text/plain")];
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &text, &large).await.status, 200);
    assert_eq!(origin.last().body.len(), large.len());
    let fits = format!(r#"{{"a":"${{secrets.KEY}}","b":"{}"}}"#, "x".repeat(900_000));
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON], &fits).await.status, 200);
    assert!(String::from_utf8_lossy(&origin.last().body).contains("q8Zx"));
}

/// The approval is of the body with the placeholder, and of its place.
#[tokio::test]
async fn an_approval_is_of_the_body_with_the_placeholder() {
    let (lab, origin) = lab(ANYWHERE, "approval = \"required\"\n[admin]\nlisten = \"127.0.0.1:0\"", "").await;
    let body = r#"{"a":"${secrets.KEY}"}"#;
    let pending = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON], body).await;
    pending.assert_refused(403, "approval_pending");
    let id = pending.problem()["approval"].as_str().unwrap().to_owned();
    let (_, shown) = lab.admin_request("GET", &format!("/v1/approvals/{id}"), &Value::Null).await;
    let bound = &shown["bound"];
    assert_eq!(bound["credentials"], json!([{ "name": "KEY", "places": ["body:json:/a"] }]), "{shown:#}");
    assert_eq!(bound["body"]["text"], body);
    let decision = json!({ "decision": "approve" });
    let (status, _) = lab.admin_request("POST", &format!("/v1/approvals/{id}"), &decision).await;
    assert_eq!(status, 200);
    let other = r#"{"b":"${secrets.KEY}"}"#;
    lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON], other).await.assert_refused(403, "approval_pending");
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON], body).await.status, 200);
    assert!(String::from_utf8_lossy(&origin.last().body).contains("q8Zx"));
}

/// A placeholder is a text for a host that the credential is not bound to, as it is in every body without such a place.
#[tokio::test]
async fn a_placeholder_is_a_text_for_another_host() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("other.test").await;
    fs::write(builder.dir.path().join("key"), VALUE).unwrap();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\", \"other.test\"]\nports = [{}]\n\
         [credentials.KEY]\nvalue = \"file:key\"\ndomains = [\"api.test\"]\n{ANYWHERE}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n",
        origin.port()
    );
    let lab = builder.proxy(&text).await;
    let (url, body) = (format!("https://other.test:{}/", origin.port()), r#"{"a":"${secrets.KEY}"}"#);
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url, &[JSON], body).await.status, 200);
    assert_eq!(origin.last().body, body);
}

/// Documents that cost much for their size: deep ones, long keys, and many texts with the form of a placeholder.
#[tokio::test]
async fn hostile_bodies_take_little_time() {
    let (lab, origin) = lab(ANYWHERE, "", "").await;
    let unknown = "\"${secrets.x}\",".repeat(30_000);
    let own = "\"${secrets.KEY}\",".repeat(30_000);
    let deep = format!("{}{unknown}\"a\"{}", "[".repeat(200_000), "]".repeat(200_000));
    let rows = [
        (JSON, format!("[{unknown}\"a\"]"), 200),
        (JSON, format!(r#"{{"{}":[{unknown}"a"]}}"#, "k".repeat(400_000)), 200),
        (JSON, deep.clone(), 200),
        (JSON, format!("{}[\"\\u0041", &unknown), 200),
        (JSON, format!("[{own}\"a\"]"), 403),
        (JSON, format!("{{{own}"), 403),
        (JSON, format!("{}[{own}1]{}", r#"{"a":"#.repeat(120), "}".repeat(120)), 403),
        (FORM, "a%41&".repeat(190_000), 200),
        (FORM, "a=${secrets.KEY}&".repeat(50_000), 403),
    ];
    for (kind, body, status) in rows {
        let began = std::time::Instant::now();
        let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[kind], &body).await;
        assert_eq!(reply.status, status, "{}", &body[..40]);
        let took = began.elapsed();
        assert!(took < std::time::Duration::from_secs(20), "{took:?}: {}", &body[..40]);
    }
}

/// A shared key or a token that was fetched, in a body.
#[tokio::test]
async fn a_body_with_a_placeholder_can_be_signed() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    for (name, value) in [("key", VALUE), ("signing", "Zk8Qw3Rt6Yp1Lx9Vb4Nc7Md2Hs5Gf0Ja")] {
        fs::write(builder.dir.path().join(name), value).unwrap();
    }
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [credentials.KEY]\nvalue = \"file:key\"\ndomains = [\"api.test\"]\n{ANYWHERE}\nwith = [\"SIGNING\"]\n\
         [credentials.SIGNING]\nauth_type = \"hmac\"\nvalue = \"file:signing\"\ndomains = [\"api.test\"]\nhmac.preset = \"slack\"\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\", \"SIGNING\"]\n",
        origin.port()
    );
    let lab = builder.proxy(&text).await;
    let body = r#"{"a":"${secrets.KEY}"}"#;
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &[JSON], body).await.status, 200);
    let seen = origin.last();
    assert!(String::from_utf8_lossy(&seen.body).contains("q8Zx"));
    let signed = [format!("v0:{}:", seen.header("x-slack-request-timestamp").unwrap()).as_bytes(), &seen.body].concat();
    let want = super::hmac::sha256(b"Zk8Qw3Rt6Yp1Lx9Vb4Nc7Md2Hs5Gf0Ja", &signed);
    assert_eq!(seen.header("x-slack-signature"), Some(format!("v0={}", super::hmac::hex(&want)).as_str()));
}

/// Some servers read a parameter of the query before one of the body.
#[tokio::test]
async fn a_required_parameter_of_a_form_is_removed_from_the_query() {
    let credential = "auth_type = \"placeholder\"\nswap_in = [\"body:form:hapi_key\"]";
    let (lab, origin) = lab(credential, "require_credential = \"KEY\"", "").await;
    let form = "hapi_key=${secrets.KEY}&a=1";
    let url = url(&origin, "/?hapikey=mine&a=2");
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url, &[FORM], form).await.status, 200);
    let seen = origin.last();
    assert_eq!((seen.uri.query(), seen.body.starts_with(b"hapi_key=tvly")), (Some("a=2"), true));
    // `Connection` cannot take the type away.
    let beside = [FORM, ("connection", "content-type")];
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url, &beside, form).await.status, 200);
    assert_eq!(origin.last().header("content-type"), Some(FORM.1));
}

/// The credential that leads to the others may be the one in the body.
#[tokio::test]
async fn the_body_may_have_the_credential_that_brings_the_others() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    for name in ["key", "a", "b"] {
        fs::write(builder.dir.path().join(name), format!("{name}-{}", "k7Qz2mXv9LpW4sVt6eRRu8Yb")).unwrap();
    }
    let header = |name: &str| {
        format!(
            "[credentials.{name}]\nauth_type = \"header\"\nauth_header_name = \"x-{name}\"\nvalue = \"file:{name}\"\n\
             domains = [\"api.test\"]\n"
        )
    };
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [credentials.KEY]\nvalue = \"file:key\"\ndomains = [\"api.test\"]\n{ANYWHERE}\nwith = [\"a\", \"b\"]\n{}{}\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\", \"a\", \"b\"]\n",
        origin.port(),
        header("a"),
        header("b"),
    );
    let lab = builder.proxy(&text).await;
    let heads = [JSON, ("x-a", "${secrets.a}"), ("x-b", "${secrets.b}")];
    let reply = lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &heads, r#"{"k":"${secrets.KEY}"}"#).await;
    assert_eq!((reply.status.as_u16(), reply.header("exeat-credential-used")), (200, Some("KEY")));
    let seen = origin.last();
    assert!(seen.header("x-a").unwrap().starts_with("a-") && seen.header("x-b").unwrap().starts_with("b-"));
    // Nothing leads from one of the two to the other.
    lab.by(Way::TunnelH1, "POST", &url(&origin, "/"), &heads, "{}").await.assert_refused(403, "credential_not_bound");
}

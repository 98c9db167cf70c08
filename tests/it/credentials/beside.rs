//! Several credentials on one request, and cookies.

use std::fs;

use crate::lab::client::Way;
use crate::lab::{Lab, LabBuilder, Origin};

const KEY: &str = "zk8Qw3-Rt6Yp1Lx9Vb4Nc7Md2";
const APP: &str = "a7Hs-5Gd2Kf8Jq4Wm1Zx6Pn3Vt";
const SESSION: &str = "s9Fj-4Tb7Lw2Xe6Rk1Qh8Yc5Um";

async fn lab(credentials: &str, integration: &str, task: &[&str]) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    for (name, value) in [("key", KEY), ("app", APP), ("session", SESSION)] {
        fs::write(builder.dir.path().join(name), value).unwrap();
    }
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n{integration}\n{credentials}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = {task:?}\n",
        origin.port()
    );
    (builder.proxy(&text).await, origin)
}

/// As the API of Datadog wants it: two keys in two fields.
const PAIR: &str = r#"
[credentials.KEY]
auth_type = "header"
auth_header_name = "DD-API-KEY"
value = "file:key"
domains = ["api.test"]
with = ["APP"]
[credentials.APP]
auth_type = "header"
auth_header_name = "DD-APPLICATION-KEY"
value = "file:app"
domains = ["api.test"]
"#;

fn url(origin: &Origin, path: &str) -> String {
    format!("https://api.test:{}{path}", origin.port())
}

#[tokio::test]
async fn a_credential_brings_others_with_it_on_every_way_in() {
    let (lab, origin) = lab(PAIR, "", &["KEY", "APP"]).await;
    let named = ("exeat-credential", "KEY");
    let of_key = ("dd-api-key", "${secrets.KEY}");
    let of_app = ("dd-application-key", "${secrets.APP}");
    let mine = ("dd-application-key", "mine");
    for way in Way::ALL {
        for fields in [&[named][..], &[of_key], &[of_app, of_key], &[of_key, of_app], &[named, of_app], &[named, mine]]
        {
            let reply = lab.by(way, "GET", &url(&origin, "/tell"), fields, "").await;
            let seen = origin.last();
            let sent = (seen.header("dd-api-key"), seen.header("dd-application-key"));
            assert_eq!(sent, (Some(KEY), Some(APP)), "{way:?} {fields:?}");
            assert_eq!(reply.header("exeat-credential-used"), Some("KEY"), "{way:?} {fields:?}");
            assert!(!reply.text().contains(KEY) && !reply.text().contains(APP), "{}", reply.text());
        }
        // The other way round it goes alone.
        let reply = lab.by(way, "GET", &url(&origin, "/"), &[of_app], "").await;
        assert_eq!(reply.header("exeat-credential-used"), Some("APP"));
        assert_eq!((origin.last().header("dd-api-key"), origin.last().header("dd-application-key")), (None, Some(APP)));
    }
    let line = lab.ended(0).await;
    assert_eq!((&line["credential_used"], &line["credentials_beside"]), (&"KEY".into(), &serde_json::json!(["APP"])));
    assert!(line.get("alarm").is_none(), "both were sent: {line}");
    let log = fs::read_to_string(lab.audit_file()).unwrap();
    assert!(!log.contains(KEY) && !log.contains(APP));
}

#[tokio::test]
async fn all_that_an_integration_requires_may_go_together() {
    let required = "require_credential = \"APP\"";
    let (lab, origin) = lab(PAIR, required, &["KEY", "APP"]).await;
    let own = [("exeat-credential", "KEY"), ("x-api-key", "mine"), ("dd-application-key", "mine")];
    assert_eq!(lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &own, "").await.status, 200);
    let seen = origin.last();
    assert_eq!((seen.header("dd-api-key"), seen.header("dd-application-key")), (Some(KEY), Some(APP)));
    assert_eq!(seen.header("x-api-key"), None);
    lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &[], "").await.assert_refused(403, "credential_required");
}

#[tokio::test]
async fn credentials_that_do_not_go_together_are_refused() {
    let alone = PAIR.replace("with = [\"APP\"]", "");
    let (lab, origin) = lab(&alone, "", &["KEY", "APP"]).await;
    let both = [("dd-api-key", "${secrets.KEY}"), ("dd-application-key", "${secrets.APP}")];
    lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &both, "").await.assert_refused(403, "credential_not_bound");

    // Both placeholders stand in the same field, or in fields of the same place.
    let auto = r#"
[credentials.KEY]
auth_type = "auto"
value = "file:key"
domains = ["api.test"]
with = ["APP"]
[credentials.APP]
auth_type = "bearer"
value = "file:app"
domains = ["api.test"]
"#;
    let (lab, origin) = self::lab(auto, "", &["KEY", "APP"]).await;
    let same = [("authorization", "Bearer ${secrets.KEY}")];
    lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &same, "").await.assert_refused(403, "credential_not_bound");
    let apart = [("x-key", "${secrets.KEY}")];
    assert_eq!(lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &apart, "").await.status, 200);
    let bearer = format!("Bearer {APP}");
    let seen = origin.last();
    assert_eq!((seen.header("x-key"), seen.header("authorization")), (Some(KEY), Some(bearer.as_str())));
    assert_eq!(origin.seen().len(), 1);
}

const COOKIE: &str = r#"
[credentials.SESSION]
auth_type = "cookie"
auth_cookie_name = "sid"
value = "file:session"
domains = ["api.test"]
"#;

#[tokio::test]
async fn a_cookie_is_set_beside_the_others() {
    let (lab, origin) = lab(COOKIE, "", &["SESSION"]).await;
    let own = format!("sid={SESSION}");
    let beside = format!("a=1; b=2; sid={SESSION}");
    for way in Way::ALL {
        let named = ("exeat-credential", "SESSION");
        let rows: [(&[(&str, &str)], &str); 6] = [
            (&[named], &own),
            (&[named, ("cookie", "a=1; sid=mine; b=2")], &beside),
            (&[named, ("cookie", "a=1"), ("cookie", "b=2; sid=${secrets.SESSION}")], &beside),
            (&[("cookie", "a=1; sid=${secrets.SESSION}; b=2")], &beside),
            (&[("cookie", "a=1; b=2"), ("cookie", "sid=${secrets.SESSION}")], &beside),
            (&[("cookie", "sid=${secrets.SESSION}")], &own),
        ];
        for (fields, want) in rows {
            let reply = lab.by(way, "GET", &url(&origin, "/tell"), fields, "").await;
            assert_eq!(reply.header("exeat-credential-used"), Some("SESSION"), "{way:?} {fields:?}");
            assert_eq!(origin.last().header("cookie"), Some(want), "{way:?} {fields:?}");
            assert_eq!(origin.last().headers.get_all("cookie").iter().count(), 1);
            assert!(!reply.text().contains(SESSION), "{}", reply.text());
        }
    }
    assert_eq!(lab.ended(0).await["credential_used"], "SESSION");
    let refused = [
        ("sid=x${secrets.SESSION}", "beside_text"),
        ("other=${secrets.SESSION}", "other_place"),
        ("sid=${secrets.SESSION}; sid=2", "repeated"),
    ];
    for (cookie, _) in refused {
        let reply = lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &[("cookie", cookie)], "").await;
        reply.assert_refused(403, "credential_not_bound");
    }
    let lines = lab.audit().await;
    let reasons: Vec<_> = lines.iter().filter_map(|line| line["placeholder"]["reason"].as_str()).collect();
    assert_eq!(reasons, refused.map(|(_, reason)| reason));
}

/// Where only the injected credential may be sent, cookies of the sandbox's own are removed.
#[tokio::test]
async fn a_required_cookie_goes_alone() {
    let (lab, origin) = lab(COOKIE, "require_credential = \"SESSION\"", &["SESSION"]).await;
    let rows = [
        [("exeat-credential", "SESSION"), ("cookie", "sid=mine; login=mine")],
        [("x-a", "b"), ("cookie", "login=mine; sid=${secrets.SESSION}")],
    ];
    for fields in rows {
        assert_eq!(lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &fields, "").await.status, 200);
        assert_eq!(origin.last().header("cookie"), Some(format!("sid={SESSION}").as_str()), "{fields:?}");
    }
}

/// Neither of two credentials that bring the same third one leads to the other.
#[tokio::test]
async fn one_credential_must_lead_to_all_others() {
    let third =
        "[credentials.SESSION]\nauth_type = \"query_param\"\nvalue = \"file:session\"\ndomains = [\"api.test\"]\n";
    let both = PAIR.replace("value = \"file:app\"", "value = \"file:app\"\nwith = [\"SESSION\"]");
    let apart = both.replace("with = [\"APP\"]", "with = [\"SESSION\"]");
    let all = [("dd-api-key", "${secrets.KEY}"), ("dd-application-key", "${secrets.APP}")];
    let path = "/?api_key=${secrets.SESSION}";
    for (credentials, is_allowed) in [(both, true), (apart, false)] {
        let (lab, origin) = lab(&format!("{credentials}{third}"), "", &["KEY", "APP", "SESSION"]).await;
        for path in [path, "/"] {
            let reply = lab.by(Way::TunnelH1, "GET", &url(&origin, path), &all, "").await;
            match is_allowed {
                true => assert_eq!(reply.status, 200),
                false => reply.assert_refused(403, "credential_not_bound"),
            }
        }
        if is_allowed {
            assert_eq!(origin.last().uri.query(), Some(format!("api_key={SESSION}").as_str()), "by two steps");
            assert_eq!(lab.ended(0).await["credential_used"], "KEY");
        }
    }
}

/// A value that is split between cookies is found, also around the one that is replaced.
#[tokio::test]
async fn cookies_that_become_neighbors_are_searched_together() {
    let (lab, origin) = lab(COOKIE, "", &["SESSION"]).await;
    let (one, two) = SESSION.split_at(13);
    let cookie = format!("a={one}; sid=mine; b={two}");
    let fields = [("exeat-credential", "SESSION"), ("cookie", cookie.as_str())];
    lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &fields, "").await.assert_refused(403, "leak_detected");
    let nonce =
        [("exeat-swap", "0123456789abcdef"), ("cookie", "${0123456789abcdef.X}; sid=${0123456789abcdef.SESSION}")];
    lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &nonce, "").await.assert_refused(403, "credential_not_bound");
    let named = [("cookie", "${secrets.SESSION}=1; sid=${secrets.SESSION}")];
    lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &named, "").await.assert_refused(403, "credential_not_bound");
    let quoted = [("exeat-credential", "SESSION"), ("cookie", "theme=\"x; a=1")];
    lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &quoted, "").await.assert_refused(403, "credential_not_bound");
    let many = format!("sid=${{secrets.SESSION}}; {}", "a=${secrets.x}; ".repeat(3_000));
    let began = std::time::Instant::now();
    lab.by(Way::TunnelH1, "GET", &url(&origin, "/"), &[("cookie", &many)], "").await;
    assert!(began.elapsed() < std::time::Duration::from_secs(5), "{:?}", began.elapsed());
    assert!(origin.seen().iter().all(|seen| seen.header("cookie").is_none_or(|cookie| cookie.len() > 1_000)));
}

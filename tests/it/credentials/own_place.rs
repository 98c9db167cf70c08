//! `leak.own_place`: a client itself sends the value of a credential.

use crate::lab::client::{Way, basic};
use crate::lab::{KEY, Lab, LabBuilder, Origin};

/// Starts `api.test` and `other.test`, with one credential `KEY` that is bound to the first.
async fn lab(own_place: &str, credential: &str) -> (Lab, Origin, Origin) {
    let builder = LabBuilder::new().await;
    let (origin, other) = (builder.origin("api.test").await, builder.origin("other.test").await);
    std::fs::write(builder.dir.path().join("basic"), format!("user:{KEY}")).unwrap();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [integrations.other]\nallowed_domains = [\"other.test\"]\nports = [{}]\n\
         [credentials.KEY]\ndomains = [\"api.test\"]\n{credential}\n\
         [tasks.t]\nintegrations = [\"api\", \"other\"]\ncredentials = [\"KEY\"]\n\
         [leak]\nmax_finds = 1000\n{own_place}\n",
        origin.port(),
        other.port()
    );
    (builder.proxy(&text).await, origin, other)
}

fn encoded(text: &str) -> String {
    text.bytes().map(|byte| format!("%{byte:02X}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_in_its_own_place_passes_if_allowed() {
    let (bearer, token) = (format!("Bearer {KEY}"), format!("token {KEY}"));
    let (user, both) = (basic(&format!("{KEY}:")), basic(&format!("user:{KEY}")));
    type Row<'a> = (&'a str, &'a str, &'a [(&'a str, &'a str)], String);
    let none: &[(&str, &str)] = &[];
    let cookie = format!("sid={KEY}");
    let rows: [Row; 10] = [
        ("auth_type = \"cookie\"\nauth_cookie_name = \"sid\"", "env:KEY", &[("cookie", &cookie)], String::new()),
        ("auth_type = \"bearer\"", "env:KEY", &[("authorization", &bearer)], String::new()),
        ("auth_type = \"bearer\"", "env:KEY", &[("authorization", &token)], String::new()),
        ("auth_type = \"bearer\"", "env:KEY", &[("authorization", &user)], String::new()),
        ("auth_type = \"basic\"", "file:basic", &[("authorization", &both)], String::new()),
        ("auth_type = \"header\"\nauth_header_name = \"x-key\"", "env:KEY", &[("x-key", KEY)], String::new()),
        ("auth_type = \"query_param\"", "env:KEY", none, format!("api_key={}", encoded(KEY))),
        ("auth_type = \"auto\"", "env:KEY", &[("authorization", &bearer), ("x-key", KEY)], String::new()),
        ("auth_type = \"auto\"", "env:KEY", &[("x-key", KEY)], format!("key={}", encoded(KEY))),
        (
            "auth_type = \"auto\"",
            "env:KEY",
            none,
            format!("key={}", KEY.replace('%', "%25").replace('&', "%26").replace('+', "%2B")),
        ),
    ];
    for (auth_type, source, fields, query) in rows {
        let credential = format!("{auth_type}\nvalue = \"{source}\"");
        let (lab, origin, _) = lab("own_place = \"allow\"", &credential).await;
        for (n, way) in Way::ALL.into_iter().enumerate() {
            let url = format!("https://api.test:{}/tell?whole&{query}", origin.port());
            // The origin answers with an error that tells what it received.
            let reply = lab.by(way, "GET", &url, fields, "").await;
            let case = format!("{auth_type} {fields:?} {query} {way:?}: {reply:?}");
            assert_eq!((reply.status.as_u16(), reply.header("exeat-credential-used")), (500, Some("KEY")), "{case}");
            assert!(!reply.text().contains(KEY), "the answer is redacted: {case}");
            let seen = origin.last();
            for (name, value) in fields {
                assert_eq!(seen.headers[*name], *value, "{case}");
            }
            let parameter = format!("{}=sk-live-51H%2F8xPq%2BZz~0%3D%25w%26R", query.split('=').next().unwrap());
            assert!(query.is_empty() || seen.uri.query().unwrap().ends_with(&parameter), "{case} {seen:?}");
            let line = lab.ended(n).await;
            assert_eq!((&line["sent_by_client"], &line["credential_used"]), (&"KEY".into(), &"KEY".into()), "{line}");
            assert!(line.get("finds").is_none(), "{line}");
        }
        assert!(!std::fs::read_to_string(lab.audit_file()).unwrap().contains(KEY));
    }
}

/// The response to a right guess of a weak value must be the same as to a wrong one.
#[tokio::test(flavor = "multi_thread")]
async fn a_weak_value_is_not_recognized() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    std::fs::write(builder.dir.path().join("weak"), "Winter1987?").unwrap();
    let lab = builder
        .proxy(&format!(
            "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
             [credentials.KEY]\nauth_type = \"auto\"\nvalue = \"file:weak\"\ndomains = [\"api.test\"]\n\
             [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n[leak]\nown_place = \"allow\"\n",
            origin.port()
        ))
        .await;
    let url = format!("https://api.test:{}/tell?whole", origin.port());
    for (n, guess) in ["Bearer Winter1987?", "Bearer Winter1986?"].into_iter().enumerate() {
        let reply = lab.by(Way::Absolute, "GET", &url, &[("authorization", guess)], "").await;
        assert_eq!((reply.status.as_u16(), reply.header("exeat-credential-used")), (500, None), "{guess}");
        assert!(reply.text().contains(guess), "{reply:?}");
        let line = lab.ended(n).await;
        assert!(line.get("sent_by_client").is_none() && line.get("credential_used").is_none(), "{line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_value_elsewhere_is_a_find() {
    let bearer = format!("Bearer {KEY}");
    let (beside, cookie) = (format!("Bearer {KEY};x"), format!("s={KEY}"));
    let upper = basic(&format!("a:b:{KEY}"));
    let fields: [&[(&str, &str)]; 5] = [
        &[("x-other", KEY)],
        &[("authorization", &beside)],
        &[("authorization", &upper)],
        &[("cookie", &cookie)],
        &[("authorization", &bearer), ("x-other", KEY)],
    ];
    for own_place in ["", "own_place = \"refuse\"", "own_place = \"allow\""] {
        let (lab, origin, other) = lab(own_place, "auth_type = \"bearer\"\nvalue = \"env:KEY\"").await;
        let url = format!("https://api.test:{}/", origin.port());
        let mut count = 0;
        let mut refused = async |url: &str, fields: &[(&str, &str)], body: &str| {
            for way in Way::ALL {
                let reply = lab.by(way, "POST", url, fields, body).await;
                reply.assert_refused(403, "leak_detected");
                let line = lab.ended(count).await;
                assert_eq!((&line["code"], line["finds"].is_u64()), (&"leak_detected".into(), true), "{line}");
                count += 1;
            }
        };
        for fields in fields {
            refused(&url, fields, "").await;
        }
        refused(&url, &[], KEY).await;
        refused(&format!("{url}?key={}", encoded(KEY)), &[], "").await;
        refused(&format!("https://other.test:{}/", other.port()), &[("authorization", &bearer)], "").await;
        if own_place != "own_place = \"allow\"" {
            refused(&url, &[("authorization", &bearer)], "").await;
        }
        assert!(origin.seen().is_empty() && other.seen().is_empty());
        // A wrong value is not known to the proxy.
        assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &[("authorization", "Bearer wrong")], "").await.status, 200);
    }
}

//! The sandbox names a credential or holds a placeholder; only the origin receives the value.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;

use exeat::model::secret::Secret;
use exeat::vault::{MasterKey, Vault};

use crate::lab::client::{Way, empty};
use crate::lab::{KEY, Lab, LabBuilder, Origin};

/// A placeholder with the format of the key.
const PLACEHOLDER: &str = "sk-live-placeholder-0000000";

/// Starts `api.test` and `other.test`, with one credential `KEY` that is bound to the first.
async fn lab(credential: &str, task: &str, h1: bool) -> (Lab, Origin, Origin) {
    let builder = LabBuilder::new().await;
    let origin = if h1 { builder.origin_h1("api.test").await } else { builder.origin("api.test").await };
    let other = builder.origin("other.test").await;
    let text = config(&origin, &other, credential, task);
    (builder.proxy(&text).await, origin, other)
}

fn config(origin: &Origin, other: &Origin, credential: &str, task: &str) -> String {
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n\
         [integrations.other]\nallowed_domains = [\"other.test\"]\nports = [{}]\n\
         [credentials.KEY]\nvalue = \"env:KEY\"\ndomains = [\"api.test\"]\n{credential}\n\
         [tasks.t]\nintegrations = [\"api\", \"other\"]\ncredentials = [\"KEY\"]\n{task}\n",
        origin.port(),
        other.port()
    )
}

/// Every auth type, selected in every way, by every way in, to HTTP/1.1 and h2 origins.
#[tokio::test(flavor = "multi_thread")]
async fn every_auth_type_is_injected_on_every_way() {
    let basic = format!("Basic {}", STANDARD.encode(format!("user:{KEY}")));
    let bearer = format!("Bearer {KEY}");
    // The auth type, its keys, the source, the field and its value.
    let types = [
        ("bearer", "", "env:KEY", "authorization", bearer.as_str()),
        ("header", "auth_header_name = \"X-Api-Key\"", "env:KEY", "x-api-key", KEY),
        ("query_param", "auth_query_name = \"k.y\"", "env:KEY", "", ""),
        ("basic", "", "file:basic", "authorization", basic.as_str()),
    ];
    for (auth_type, keys, source, field, want) in types {
        for h1 in [false, true] {
            for choice in ["named", "placeholder", "secrets", "always"] {
                let inject = if choice == "always" { "always" } else { "named" };
                let credential = format!(
                    "auth_type = \"{auth_type}\"\n{keys}\ninject = \"{inject}\"\nplaceholder = \"{PLACEHOLDER}\""
                );
                let builder = LabBuilder::new().await;
                std::fs::write(builder.dir.path().join("basic"), format!("user:{KEY}\n")).unwrap();
                let origin = if h1 { builder.origin_h1("api.test").await } else { builder.origin("api.test").await };
                let text = config(&origin, &origin, &credential, "").replace("env:KEY", source);
                let lab = builder.proxy(&text).await;
                for way in Way::ALL {
                    let case = format!("{auth_type} {choice} h1:{h1} {way:?}");
                    let mark = if choice == "secrets" { "${secrets.KEY}" } else { PLACEHOLDER };
                    let mut fields = vec![("x-other", "kept"), ("range", "bytes=0-9"), ("if-range", "x")];
                    fields.push(("accept-charset", "utf-16"));
                    let given = match auth_type {
                        "bearer" => format!("Bearer {mark}"),
                        "basic" => format!("Basic {}", STANDARD.encode(format!("user:{mark}"))),
                        _ => mark.to_owned(),
                    };
                    let own = given.replace(mark, "the caller's own");
                    let mut path = "/p?a=%2F&b".to_owned();
                    match choice {
                        "named" => fields.push(("exeat-credential", "KEY")),
                        "always" => {}
                        _ if field.is_empty() => {
                            path = format!("/p?a=%2F&k.y={mark}&b").replace("${secrets.KEY}", "%24%7Bsecrets.KEY%7D")
                        }
                        _ => fields.push((field, &given)),
                    }
                    if matches!(choice, "named" | "always") {
                        // The caller's own value in that field is removed.
                        if field.is_empty() {
                            path = "/p?k.y=mine&a=%2F&k%2ey=too&b".to_owned()
                        } else {
                            fields.push((field, &own))
                        }
                    }
                    let url = format!("https://api.test:{}{path}", origin.port());
                    let reply = lab.by(way, "POST", &url, &fields, "body").await;
                    assert_eq!(reply.status, 200, "{case}: {reply:?}");
                    assert_eq!(reply.header("exeat-credential-used"), Some("KEY"), "{case}");
                    let seen = origin.last();
                    let query = seen.uri.query().unwrap();
                    let values = seen.headers.values().chain(seen.trailers.values()).map(|v| v.to_str().unwrap());
                    let sent = values.chain([query]).collect::<Vec<_>>().join("\n");
                    let encoded = ["sk-live-51H%2F8xPq%2BZz~0%3D%25w%26R", &basic, KEY];
                    let count: usize = encoded.iter().map(|form| sent.matches(form).count()).sum();
                    assert_eq!(count, 1, "{case}: once, and in one form: {sent}");
                    if field.is_empty() {
                        assert_eq!(query, "a=%2F&b&k.y=sk-live-51H%2F8xPq%2BZz~0%3D%25w%26R", "{case}");
                    } else {
                        let values: Vec<_> = seen.headers.get_all(field).iter().map(|v| v.to_str().unwrap()).collect();
                        assert_eq!((values, query), (vec![want], "a=%2F&b"), "{case}");
                    }
                    assert_eq!(seen.body, "body", "{case}");
                    for gone in ["exeat-credential", "range", "if-range", "accept-charset", "proxy-authorization"] {
                        assert!(!seen.headers.contains_key(gone), "{case}: {gone}");
                    }
                    assert_eq!(seen.headers["x-other"], "kept");
                    assert_eq!(seen.headers["accept-encoding"], "identity");
                }
                for line in lab.audit().await {
                    assert_eq!(line["credential_used"], "KEY", "{line}");
                    assert!(!line.to_string().contains(KEY));
                }
            }
        }
    }
}

#[tokio::test]
async fn a_query_parameter_is_added_once_and_encoded() {
    let reserved = ":/?#[]@!$&'()*+,;= %\"<>\\^`{|}~-._ü";
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), reserved).unwrap();
    let origin = builder.origin("api.test").await;
    let text = config(&origin, &origin, "auth_type = \"query_param\"", "").replace("env:KEY", "file:value");
    let lab = builder.proxy(&text).await;
    let value = "%3A%2F%3F%23%5B%5D%40%21%24%26%27%28%29%2A%2B%2C%3B%3D%20%25%22%3C%3E%5C%5E%60%7B%7C%7D~-._%C3%BC";
    let rows = [
        ("/", format!("/?api_key={value}")),
        ("/?", format!("/?api_key={value}")),
        ("/p?a=1", format!("/p?a=1&api_key={value}")),
        ("/p?api_key=mine&a=1", format!("/p?a=1&api_key={value}")),
        ("/p?api_key=", format!("/p?api_key={value}")),
        ("/p?API_KEY=kept", format!("/p?API_KEY=kept&api_key={value}")),
    ];
    for (path, want) in rows {
        // Client libraries do not send the fragment, so the test writes it itself.
        for fragment in ["", "#fragment"] {
            let url = format!("https://api.test:{}{path}{fragment}", origin.port());
            let answer = lab
                .raw(&format!("GET {url} HTTP/1.1\r\nHost: api.test:{}\r\n{{auth}}Exeat-Credential: KEY\r\nConnection: close\r\n\r\n", origin.port()))
                .await;
            assert!(answer.starts_with("HTTP/1.1 200"), "{path}{fragment}: {answer}");
            assert_eq!(origin.last().uri.path_and_query().unwrap().as_str(), want, "{path}{fragment}");
        }
    }
}

/// A placeholder for another destination is refused in a place where it could be swapped, and is plain text anywhere
/// else.
#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_is_replaced_only_in_its_field() {
    let credential = format!("auth_type = \"bearer\"\nplaceholder = \"{PLACEHOLDER}\"\nswap_in = [\"header:X-Swap\"]");
    let (lab, origin, other) = lab(&credential, "", false).await;
    let api = |path: &str| format!("https://api.test:{}{path}", origin.port());
    let (bearer, in_text) = (format!("Bearer {PLACEHOLDER}"), format!("k={PLACEHOLDER};"));
    let basic = format!("Basic {}", STANDARD.encode(format!("x-access-token:{PLACEHOLDER}")));
    for way in Way::ALL {
        // To another host.
        let reply = lab
            .by(way, "GET", &format!("https://other.test:{}/", other.port()), &[("authorization", &bearer)], "")
            .await;
        reply.assert_refused(403, "credential_not_bound");
        assert_eq!(reply.problem()["credential"], "KEY");
        assert!(other.seen().is_empty());
        // As text: in the path and the body, and one that has the form by chance.
        let path = api(&format!("/{PLACEHOLDER}?q=${{secrets.NOPE}}").replace(['{', '}'], ""));
        let reply = lab.by(way, "POST", &path, &[("x-text", "${secrets.NOPE}")], PLACEHOLDER).await;
        assert_eq!((reply.status.as_u16(), reply.header("exeat-credential-used")), (200, None));
        let seen = origin.last();
        assert_eq!(seen.uri.path_and_query().unwrap().as_str(), format!("/{PLACEHOLDER}?q=$secrets.NOPE"));
        assert_eq!(
            (&seen.headers["x-text"], &seen.body[..]),
            (&"${secrets.NOPE}".parse().unwrap(), PLACEHOLDER.as_bytes())
        );
        // In a field that the configuration names, and inside Basic credentials.
        assert_eq!(lab.by(way, "GET", &api("/"), &[("x-swap", &in_text)], "").await.status, 200);
        assert_eq!(origin.last().headers["x-swap"], format!("k={KEY};"));
        assert_eq!(lab.by(way, "GET", &api("/"), &[("authorization", &basic)], "").await.status, 200);
        let want = format!("Basic {}", STANDARD.encode(format!("x-access-token:{KEY}")));
        assert_eq!(origin.last().headers["authorization"], want);
        let basic = format!("Basic {}", STANDARD.encode(format!("{PLACEHOLDER}:x-oauth-basic")));
        assert_eq!(lab.by(way, "GET", &api("/"), &[("authorization", &basic)], "").await.status, 200);
        let want = format!("Basic {}", STANDARD.encode(format!("{KEY}:x-oauth-basic")));
        assert_eq!(origin.last().headers["authorization"], want);
        assert_eq!(
            lab.by(way, "GET", &api("/"), &[("authorization", &format!("token {PLACEHOLDER}"))], "").await.status,
            200
        );
        assert_eq!(origin.last().headers["authorization"], format!("token {KEY}"));
        // A credential that does not exist.
        let reply = lab.by(way, "GET", &api("/"), &[("authorization", "Bearer ${secrets.NOPE}")], "").await;
        reply.assert_refused(403, "credential_unknown");
        // The placeholder twice.
        let twice = format!("Bearer {PLACEHOLDER} {PLACEHOLDER}");
        lab.by(way, "GET", &api("/"), &[("authorization", &twice)], "")
            .await
            .assert_refused(403, "credential_not_bound");
        let fields = [("authorization", bearer.as_str()), ("authorization", "Bearer mine")];
        lab.by(way, "GET", &api("/"), &fields, "").await.assert_refused(403, "credential_not_bound");
    }
    for line in lab.audit().await.iter().filter(|line| line["event"] == "refused") {
        assert!(line.get("credential_used").is_none(), "it was not used: {line}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_injected_over_plain_http() {
    let builder = LabBuilder::new().await;
    let origin = Origin::http().await;
    builder.dns.set("api.test", &["127.0.0.1"]);
    let text = config(&origin, &origin, &format!("auth_type = \"bearer\"\nplaceholder = \"{PLACEHOLDER}\""), "");
    let text = text.replace("[\"api.test\"]\nports", "[\"api.test\"]\nplain_http = true\nports");
    let lab = builder.proxy(&text).await;
    let url = format!("http://api.test:{}/", origin.port());
    let bearer = format!("Bearer {PLACEHOLDER}");
    for field in [("exeat-credential", "KEY"), ("authorization", bearer.as_str())] {
        let request = lab.absolute("GET", &url).header(field.0, field.1).body(crate::lab::client::empty()).unwrap();
        lab.send(request).await.assert_refused(403, "credential_not_bound");
    }
    assert!(origin.seen().is_empty());
    // A credential that is always injected is not sent there either, and the request passes without it.
    let always = text.replace("auth_type = \"bearer\"", "auth_type = \"bearer\"\ninject = \"always\"");
    lab.reload(&always);
    assert_eq!(lab.get(&url).await.status, 200);
    assert!(!origin.last().headers.contains_key("authorization"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_credential_is_bound_to_its_host_and_port() {
    let (lab, origin, other) = lab("auth_type = \"bearer\"", "", false).await;
    let named = [("exeat-credential", "KEY")];
    let elsewhere = format!("https://other.test:{}/", other.port());
    lab.by(Way::Absolute, "GET", &elsewhere, &named, "").await.assert_refused(403, "credential_not_bound");
    let here = format!("https://api.test:{}/", origin.port());
    assert_eq!(lab.by(Way::Absolute, "GET", &here, &named, "").await.status, 200, "a port listed in the integration");
    let text =
        config(&origin, &other, "auth_type = \"bearer\"", "").replace("[\"api.test\"]\nauth", "[\"api.test:1\"]\nauth");
    lab.reload(&text);
    lab.by(Way::TunnelH1, "GET", &here, &named, "").await.assert_refused(403, "credential_not_bound");
    let text = text.replace("api.test:1", &format!("api.test:{}", origin.port()));
    lab.reload(&text);
    assert_eq!(lab.by(Way::TunnelH2, "GET", &here, &named, "").await.status, 200, "the explicit port");
    assert!(other.seen().is_empty());
}

/// The other task learns neither that the credential exists, nor its name, nor whether it has a value.
#[tokio::test(flavor = "multi_thread")]
async fn a_task_learns_nothing_of_another_tasks_credentials() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    std::fs::write(builder.dir.path().join("other-token"), "another-token-of-24-bytes-or-more").unwrap();
    let text = config(&origin, &origin, &format!("auth_type = \"bearer\"\nplaceholder = \"{PLACEHOLDER}\""), "");
    // `t` loses the credential to another task.
    let text = text.replace("credentials = [\"KEY\"]", "")
        + "[tasks.other]\ntoken = \"file:other-token\"\nintegrations = [\"api\"]\ncredentials = [\"KEY\"]\n";
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/", origin.port());
    let mut answers = Vec::new();
    for name in ["KEY", "NONE"] {
        for field in [("exeat-credential", name.to_owned()), ("authorization", format!("Bearer ${{secrets.{name}}}"))] {
            let reply = lab.by(Way::Absolute, "GET", &url, &[(field.0, &field.1)], "").await;
            reply.assert_refused(403, "credential_unknown");
            let mut problem = reply.problem();
            assert_eq!(problem["credential"], name, "only the requested name");
            (problem["instance"], problem["credential"]) = ("".into(), "".into());
            answers.push(problem);
        }
    }
    assert_eq!(answers[..2], answers[2..], "existing and missing names are distinguished");
    assert!(!format!("{answers:?}").contains("KEY"));
    // The placeholder is plain text for other tasks.
    let bearer = format!("Bearer {PLACEHOLDER}");
    assert_eq!(lab.by(Way::Absolute, "GET", &url, &[("authorization", &bearer)], "").await.status, 200);
    assert_eq!(origin.last().headers["authorization"], bearer);
}

#[tokio::test(flavor = "multi_thread")]
async fn refuses_requests_without_the_required_credential() {
    let credential = format!("auth_type = \"bearer\"\nplaceholder = \"{PLACEHOLDER}\"");
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = config(&origin, &origin, &credential, "")
        .replace("[\"api.test\"]\nports", "[\"api.test\"]\nrequire_credential = \"KEY\"\nports");
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/p?access_token=mine&a=1&api_key=mine", origin.port());
    let own = [
        ("authorization", "Bearer mine"),
        ("cookie", "session=mine"),
        ("x-api-key", "mine"),
        ("private-token", "mine"),
    ];
    for way in Way::ALL {
        let reply = lab.by(way, "GET", &url, &own, "").await;
        reply.assert_refused(403, "credential_required");
        assert_eq!(reply.problem()["credential"], "KEY");
        let with_ours = [&own[..], &[("exeat-credential", "KEY")]].concat();
        assert_eq!(lab.by(way, "GET", &url, &with_ours, "").await.status, 200);
        let seen = origin.last();
        assert_eq!(seen.headers["authorization"], format!("Bearer {KEY}"));
        assert_eq!(seen.uri.path_and_query().unwrap(), "/p?a=1");
        for gone in ["cookie", "x-api-key", "private-token"] {
            assert!(!seen.headers.contains_key(gone), "{gone}");
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn two_credentials_in_one_request_are_refused() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = config(&origin, &origin, "auth_type = \"bearer\"", "")
        .replace("credentials = [\"KEY\"]", "credentials = [\"KEY\", \"TWO\"]")
        + "[credentials.TWO]\nauth_type = \"header\"\nauth_header_name = \"X-Two\"\nvalue = \"file:token\"\ndomains = [\"api.test\"]\n";
    let lab = builder.proxy(&text).await;
    let url = format!("https://api.test:{}/", origin.port());
    let rows: [&[(&str, &str)]; 4] = [
        &[("exeat-credential", "KEY"), ("x-two", "${secrets.TWO}")],
        &[("authorization", "Bearer ${secrets.KEY}"), ("x-two", "${secrets.TWO}")],
        // In the field of the other credential.
        &[("x-two", "${secrets.KEY}")],
        &[("authorization", "Bearer ${secrets.TWO}")],
    ];
    for fields in rows {
        lab.by(Way::Absolute, "GET", &url, fields, "").await.assert_refused(403, "credential_not_bound");
    }
    let fields = [("exeat-credential", "KEY"), ("exeat-credential", "TWO")];
    lab.by(Way::Absolute, "GET", &url, &fields, "").await.assert_refused(400, "request_malformed");
    assert!(origin.seen().is_empty());
}

/// With a nonce, `${NONCE.NAME}` is the only placeholder; everything else is plain text.
#[tokio::test(flavor = "multi_thread")]
async fn with_a_nonce_only_its_own_placeholders_count() {
    let credential = format!("auth_type = \"bearer\"\nplaceholder = \"{PLACEHOLDER}\"");
    let (lab, origin, other) = lab(&credential, "", false).await;
    let url = format!("https://api.test:{}/p", origin.port());
    const NONCE: &str = "0123456789abcdef";
    let swap = ("exeat-swap", NONCE);
    let mark = format!("${{{NONCE}.KEY}}");
    let marked = format!("Bearer {mark}");
    let reply = lab.by(Way::Absolute, "POST", &url, &[swap, ("authorization", &marked)], "${secrets.KEY}").await;
    assert_eq!(reply.status, 200, "{reply:?}");
    let seen = origin.last();
    assert_eq!(
        (&seen.headers["authorization"], &seen.body[..]),
        (&format!("Bearer {KEY}").parse().unwrap(), &b"${secrets.KEY}"[..])
    );
    assert!(!seen.headers.contains_key("exeat-swap"));
    for text in ["Bearer ${secrets.KEY}", &format!("Bearer {PLACEHOLDER}")] {
        assert_eq!(lab.by(Way::Absolute, "GET", &url, &[swap, ("authorization", text)], "").await.status, 200);
        assert_eq!(origin.last().headers["authorization"], text, "a text");
    }
    // A mark in a place that is never swapped is refused.
    let before = origin.seen().len();
    let escaped = mark.replace('$', "%24").replace('{', "%7B").replace('}', "%7D");
    for (url, fields, body) in [
        (format!("{url}/{escaped}"), vec![swap], ""),
        (format!("{url}?q={escaped}"), vec![swap], ""),
        (url.clone(), vec![swap, ("x-text", mark.as_str())], ""),
        (url.clone(), vec![swap], mark.as_str()),
        (format!("https://other.test:{}/", other.port()), vec![swap, ("authorization", marked.as_str())], ""),
    ] {
        lab.by(Way::Absolute, "POST", &url, &fields, body).await.assert_refused(403, "credential_not_bound");
    }
    for nonce in ["", "short", "not plain: 0123456789", "0123456789abcde\u{e9}"] {
        let reply = lab.by(Way::Absolute, "GET", &url, &[("exeat-swap", nonce)], "").await;
        reply.assert_refused(400, "request_malformed");
    }
    assert_eq!((origin.seen().len(), other.seen().len()), (before, 0));
}

/// A credential without a value is disabled: neither an empty field nor the placeholder is sent.
#[tokio::test(flavor = "multi_thread")]
async fn refuses_a_credential_without_a_value() {
    let credential = format!("auth_type = \"bearer\"\nplaceholder = \"{PLACEHOLDER}\"");
    let (lab, origin, other) = lab(&credential, "", false).await;
    let url = format!("https://api.test:{}/", origin.port());
    let gone = config(&origin, &other, &credential, "").replace("env:KEY", "secret:NOT_SET");
    lab.reload(&gone);
    let bearer = format!("Bearer {PLACEHOLDER}");
    for field in
        [("exeat-credential", "KEY"), ("authorization", bearer.as_str()), ("authorization", "Bearer ${secrets.KEY}")]
    {
        lab.by(Way::Absolute, "GET", &url, &[field], "").await.assert_refused(403, "credential_unknown");
    }
    lab.reload(&gone.replace("auth_type", "inject = \"always\"\nauth_type"));
    lab.by(Way::Absolute, "GET", &url, &[], "").await.assert_refused(403, "credential_unknown");
    assert!(origin.seen().is_empty());
    assert_eq!(lab.dns.queries("api.test"), 0, "refused before any query");
}

/// A sandbox that has obtained a value cannot send it in any of these forms.
#[tokio::test(flavor = "multi_thread")]
async fn a_value_does_not_leave_in_a_request() {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let text = config(&origin, &origin, "auth_type = \"bearer\"", "")
        .replace("[\"api.test\"]\nports", "[\"api.test\", \"*.api.test\"]\nports");
    let lab = builder.proxy(&text).await;
    let asked = lab.dns.all_queries().len();
    let api = |path: &str| format!("https://api.test:{}{path}", origin.port());
    let base64 = STANDARD.encode(format!("user:{KEY}"));
    let percent: String = KEY.bytes().map(|b| format!("%{b:02x}")).collect();
    let twice = percent.replace('%', "%25");
    let forms = [KEY, &base64, &percent, &twice];
    for way in Way::ALL {
        for form in forms {
            let in_path = if form == KEY { percent.as_str() } else { form };
            let rows = [
                (api(&format!("/p/{in_path}")), vec![], ""),
                (api(&format!("/p?q={in_path}")), vec![], ""),
                (api("/p"), vec![("x-any", form)], ""),
                (api("/p"), vec![("authorization", form)], ""),
                (api("/p"), vec![("cookie", form)], ""),
                (api("/p"), vec![("exeat-credential", "KEY"), ("authorization", form)], ""),
                (api("/p"), vec![], form),
            ];
            for (url, fields, body) in rows {
                let reply = lab.by(way, "POST", &url, &fields, body).await;
                reply.assert_refused(403, "leak_detected");
                assert_eq!(reply.problem()["credential"], "KEY");
                assert!(!reply.text().contains(KEY));
            }
        }
    }
    assert!(origin.seen().is_empty());
    let lines = lab.audit().await;
    assert!(lines.iter().all(|line| line["code"] == "leak_detected"), "{lines:#?}");
    assert!(lines.iter().all(|line| line["rule"].as_str().unwrap().starts_with("KEY: its value is in")));
    let text = format!("{lines:?}");
    for form in forms {
        assert!(!text.contains(form), "{form} is in the log");
    }
    // In absolute form, no DNS query has left either. The tunnels asked for api.test once.
    assert!(lab.dns.all_queries().len() <= asked + 2, "{:?}", lab.dns.all_queries());
}

#[tokio::test]
async fn a_value_does_not_leave_as_a_host() {
    let builder = LabBuilder::new().await;
    std::fs::write(builder.dir.path().join("value"), "Ghp7q2zt9lmx4vbn8kcYW3P").unwrap();
    let origin = builder.origin("api.test").await;
    let text = config(&origin, &origin, "auth_type = \"bearer\"", "")
        .replace("env:KEY", "file:value")
        .replace("[\"api.test\"]\nports", "[\"api.test\", \"*.api.test\"]\nports");
    let lab = builder.proxy(&text).await;
    for host in ["ghp7q2zt9lmx4vbn8kcyw3p.api.test", "a.ghp7q2zt.9lmx4vbn8kcyw3p.api.test"] {
        lab.get(&format!("https://{host}:{}/", origin.port())).await.assert_refused(403, "leak_detected");
        let (head, _) = lab.try_connect(&format!("{host}:{}", origin.port())).await;
        assert!(head.contains("exeat-refusal: leak_detected"), "{head}");
    }
    assert!(lab.dns.all_queries().is_empty(), "{:?}", lab.dns.all_queries());
    let log = format!("{:?}", lab.audit().await);
    assert!(!log.to_lowercase().contains("ghp01234"), "{log}");
}

/// As above, in the places of the other auth types, and over plain HTTP.
#[tokio::test(flavor = "multi_thread")]
async fn a_placeholder_of_any_type_is_replaced_for_its_host_only() {
    let types = [
        ("bearer", "", "authorization"),
        ("basic", "", "authorization"),
        ("header", "auth_header_name = \"X-Api-Key\"", "x-api-key"),
        ("query_param", "", ""),
    ];
    for (auth_type, keys, field) in types {
        let builder = LabBuilder::new().await;
        std::fs::write(builder.dir.path().join("basic"), format!("user:{KEY}")).unwrap();
        let (origin, plain) = (builder.origin("api.test").await, Origin::http().await);
        let other = builder.origin("other.test").await;
        let credential = format!("auth_type = \"{auth_type}\"\n{keys}\nplaceholder = \"{PLACEHOLDER}\"");
        let mut text = config(&origin, &other, &credential, "");
        if auth_type == "basic" {
            text = text.replace("env:KEY", "file:basic");
        }
        let text = text.replace("[\"api\", ", "[\"api\", \"plain\", ")
            + &format!(
                "[integrations.plain]\nallowed_domains = [\"api.test\"]\nports = [{}]\nplain_http = true\n",
                plain.port()
            );
        let lab = builder.proxy(&text).await;
        let given = match auth_type {
            "bearer" => format!("Bearer {PLACEHOLDER}"),
            "basic" => format!("basic\t{}", STANDARD.encode(format!("{PLACEHOLDER}:x"))),
            _ => PLACEHOLDER.to_owned(),
        };
        let path = if field.is_empty() { format!("/?api_key={PLACEHOLDER}") } else { "/".to_owned() };
        let fields: Vec<_> = [(field, given.as_str())].into_iter().filter(|(name, _)| !name.is_empty()).collect();
        let elsewhere = format!("https://other.test:{}{path}", other.port());
        lab.by(Way::TunnelH2, "GET", &elsewhere, &fields, "").await.assert_refused(403, "credential_not_bound");
        let mut request = lab.absolute("GET", &format!("http://api.test:{}{path}", plain.port()));
        for (name, value) in &fields {
            request = request.header(*name, *value);
        }
        let reply = lab.send(request.body(crate::lab::client::empty()).unwrap()).await;
        reply.assert_refused(403, "credential_not_bound");
        assert_eq!((other.seen().len(), plain.seen().len()), (0, 0), "{auth_type}");
    }
}

/// A refusal names its credential if the caller may learn the name: because the caller asked for it or owns it. A value
/// in the place of a name is neither returned nor logged, and counts as a find.
#[tokio::test(flavor = "multi_thread")]
async fn a_refusal_names_its_credential() {
    const VALUE: &str = "Plain7q2zt9lmx4value";
    const FOREIGN: &str = "another-tasks-value-7q2zt9lmx4";
    let builder = LabBuilder::new().await;
    let (origin, elsewhere) = (builder.origin("api.test").await, builder.origin("other.test").await);
    for (file, text) in [("value", VALUE), ("foreign", FOREIGN), ("token-2", "another-token-of-24-bytes-or-more")] {
        std::fs::write(builder.dir.path().join(file), text).unwrap();
    }
    let text = config(&origin, &elsewhere, "auth_type = \"bearer\"", "").replace("env:KEY", "file:value")
        + "[credentials.F]\nauth_type = \"bearer\"\nvalue = \"file:foreign\"\ndomains = [\"api.test\"]\n\
           [tasks.u]\ntoken = \"file:token-2\"\nintegrations = [\"api\"]\ncredentials = [\"F\"]\n\
           [leak]\nmax_finds = 3\n";
    let lab = builder.proxy(&text).await;
    let (here, there) =
        (format!("https://api.test:{}/", origin.port()), format!("https://other.test:{}/", elsewhere.port()));
    let swap = ("exeat-swap", "0123456789abcdef");
    let upper = VALUE.to_uppercase();
    let (unknown, not_bound, leak) = ("credential_unknown", "credential_not_bound", "leak_detected");
    let told = |name: &'static str| Some(name);
    type Row<'a> = (&'a str, Vec<(&'a str, &'a str)>, &'a str, Option<&'a str>, &'a str);
    let (starred, unknown_foreign) = ("*".repeat(FOREIGN.len()), ": the task has no such credential");
    let foreign = starred + unknown_foreign;
    let rows: [Row; 10] = [
        (&here, vec![("exeat-credential", "NONE")], unknown, told("NONE"), "NONE: the task has no such credential"),
        (
            &here,
            vec![("authorization", "Bearer ${secrets.NONE}")],
            unknown,
            told("NONE"),
            "NONE: the task has no such credential",
        ),
        (
            &here,
            vec![swap, ("authorization", "Bearer ${0123456789abcdef.NONE}")],
            unknown,
            told("NONE"),
            "NONE: the task has no such credential",
        ),
        (&here, vec![("exeat-credential", "no name")], unknown, None, "api"),
        (&there, vec![("exeat-credential", "KEY")], not_bound, told("KEY"), "KEY: it is bound to other destinations"),
        (
            &there,
            vec![("authorization", "Bearer ${secrets.KEY}")],
            not_bound,
            told("KEY"),
            "KEY: its placeholder is in header:authorization, sent to a host that the credential is not bound to",
        ),
        (
            &here,
            vec![("exeat-credential", VALUE)],
            unknown,
            None,
            "KEY: its value is in the place of a credential's name",
        ),
        (
            &here,
            vec![("exeat-credential", &upper)],
            unknown,
            None,
            "KEY: its value is in the place of a credential's name",
        ),
        (
            &here,
            vec![("exeat-credential", FOREIGN)],
            unknown,
            // The value of another task is neither searched for nor logged.
            told(FOREIGN),
            &foreign,
        ),
        (&here, vec![("x-text", VALUE)], leak, told("KEY"), "KEY: its value is in the header field x-text"),
    ];
    for (n, (url, fields, code, name, rule)) in rows.iter().enumerate() {
        let reply = lab.by(Way::Absolute, "GET", url, fields, "").await;
        reply.assert_refused(403, code);
        assert_eq!(reply.problem()["credential"].as_str(), *name, "{fields:?}: {reply:?}");
        assert!(!reply.text().contains("q2zt9lmx4v"), "{fields:?}: {reply:?}");
        assert_eq!(lab.ended(n).await["rule"], *rule, "{fields:?}");
    }
    lab.by(Way::Absolute, "GET", &here, &[], "").await.assert_refused(403, "execution_stopped");
    let log = std::fs::read_to_string(lab.audit_file()).unwrap().to_lowercase();
    assert!(!log.contains(&VALUE.to_lowercase()) && !log.contains(FOREIGN), "{log}");
}

/// Two tasks use the same credential, and each sends the value of its own workspace.
#[tokio::test(flavor = "multi_thread")]
async fn each_task_sends_the_value_of_its_workspace() {
    const NONCE: &str = "0123456789abcdef";
    let builder = LabBuilder::new().await;
    let (origin, dir) = (builder.origin("api.test").await, builder.dir.path().to_owned());
    let vault = Vault::new(dir.join("vault.exeat"), MasterKey::File(dir.join("vault.key")));
    let tasks = [("t", crate::lab::TOKEN, "one"), ("u", "another-token-of-24-bytes-or-more", "two")];
    let value = |workspace: &str| format!("value-of-{workspace}-7q2zt9lmx4");
    for (_, token, workspace) in tasks {
        vault.set(workspace, "K", Secret::new(value(workspace).into_bytes())).unwrap();
        std::fs::write(dir.join(workspace), token).unwrap();
    }
    let task = |(name, _, workspace): (&str, &str, &str)| {
        format!(
            "[tasks.{name}]\ntoken = \"file:{workspace}\"\nworkspace = \"{workspace}\"\nintegrations = [\"api\"]\n\
             credentials = [\"KEY\"]\ntools = [\"api_call\", \"http_request\"]\nraw = true\n"
        )
    };
    for source in ["secret:K", "workspace-secret://K"] {
        let text = format!(
            "[integrations.api]\nallowed_domains = [\"api.test\"]\nports = [{}]\n[credentials.KEY]\n\
             auth_type = \"bearer\"\nvalue = \"{source}\"\ndomains = [\"api.test\"]\n{}",
            origin.port(),
            tasks.map(task).concat()
        );
        let builder = LabBuilder { dir: tempfile::tempdir_in(&dir).unwrap(), ..LabBuilder::new().await };
        builder.dns.set("api.test", &["127.0.0.1"]);
        for file in ["vault.exeat", "vault.key", "one", "two", "origin-ca.pem"] {
            std::fs::copy(dir.join(file), builder.dir.path().join(file)).unwrap();
        }
        let lab = builder.proxy(&text).await;
        let url = format!("https://api.test:{}/", origin.port());
        let (usual, marked) = ("Bearer ${secrets.KEY}", format!("Bearer ${{{NONCE}.KEY}}"));
        let ways: [&[(&str, &str)]; 4] = [
            &[("exeat-tool", "api_call"), ("exeat-credential", "KEY")],
            &[("exeat-tool", "http_request"), ("authorization", usual)],
            &[("exeat-tool", "http_request"), ("exeat-swap", NONCE), ("authorization", &marked)],
            &[("authorization", usual)],
        ];
        for (name, token, workspace) in tasks {
            for fields in ways {
                let mut request = lab.absolute("GET", &url);
                for (name, value) in fields {
                    request = request.header(*name, *value);
                }
                let mut request = request.body(empty()).unwrap();
                let who = format!("Basic {}", STANDARD.encode(format!("{name}:{token}")));
                request.headers_mut().insert("proxy-authorization", who.parse().unwrap());
                let reply = lab.send(request).await;
                assert_eq!((reply.status.as_u16(), reply.header("exeat-credential-used")), (200, Some("KEY")));
                let sent = origin.last().headers["authorization"].clone();
                assert_eq!(sent, format!("Bearer {}", value(workspace)), "{name} {fields:?}");
            }
        }
    }
}

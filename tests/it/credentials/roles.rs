//! Roles of AWS are assumed by the proxy: requests are signed with temporary credentials, which the sandbox never sees.

use std::fs;
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use http::{HeaderMap, Response, Version};
use serde_json::Value;

use super::aws::verify_signature_of;
use super::token_server::{Asked, TokenServer};
use crate::lab::client::Way;
use crate::lab::origin::Seen;
use crate::lab::{Lab, LabBuilder, Origin};

const ID: &str = "AKIAIOSFODNN7EXAMPLE";
const SECRET: &str = "wJalrXUtnFEMIK7MDENGbPxRfiCYzEXAMPLEKEY1";
const ROLE: &str = "arn:aws:iam::123456789012:role/agent";

/// The id, the secret and the token of the credentials that are issued as the `number`th.
fn key(number: usize) -> (String, String, String) {
    let mix = 7919 * (number + 3) % 10_000;
    (
        format!("ASIAQ3EGSIZTEXAMP{number:03}"),
        format!("q7Zk2mXv9LpW4sVt{mix:04}+6eRRu8YbN3cHd5J/{number:03}"),
        format!("FwoGZXIvYXdzEN{mix:04}zEaDKq7Vp2xT9mLs4nR8wKvQyUeJhZb{number:03}NcXfGdAoIiPlOkMjYtRrEeWw=="),
    )
}

fn xml(status: u16, text: impl Into<String>) -> Response<String> {
    let response = Response::builder().status(status).header("content-type", "text/xml");
    response.body(text.into()).unwrap()
}

fn time(in_seconds: i64) -> String {
    let time = time::OffsetDateTime::now_utc() + time::Duration::seconds(in_seconds);
    time.format(&time::format_description::well_known::Rfc3339).unwrap()
}

/// The answer of the service, as its documentation shows it.
fn document(number: usize, life: i64) -> String {
    let (id, secret, token) = key(number);
    format!(
        "<AssumeRoleResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\">\n  <AssumeRoleResult>\n    \
         <SourceIdentity>Alice &amp; Bob</SourceIdentity>\n    <AssumedRoleUser>\n      \
         <Arn>arn:aws:sts::123456789012:assumed-role/agent/exeat</Arn>\n    </AssumedRoleUser>\n    <Credentials>\n      \
         <AccessKeyId>{id}</AccessKeyId>\n      <SecretAccessKey>{secret}</SecretAccessKey>\n      \
         <SessionToken>{token}</SessionToken>\n      <Expiration>{}</Expiration>\n    </Credentials>\n    \
         <PackedPolicySize>6</PackedPolicySize>\n  </AssumeRoleResult>\n  <ResponseMetadata>\n    \
         <RequestId>c6104cbe-af31-11e0-8154-cbc7ccf896c7</RequestId>\n  </ResponseMetadata>\n</AssumeRoleResponse>\n",
        time(life)
    )
}

fn error(code: &str) -> String {
    format!(
        "<ErrorResponse xmlns=\"https://sts.amazonaws.com/doc/2011-06-15/\"><Error><Type>Sender</Type><Code>{code}</Code>\
         <Message>User: x is not &lt;allowed&gt; wJalr</Message></Error><RequestId>1</RequestId></ErrorResponse>"
    )
}

struct Assumed {
    lab: Lab,
    origin: Origin,
    server: TokenServer,
}

async fn start(
    role: &str,
    credential: &str,
    script: impl Fn(&Asked, usize) -> Response<String> + Send + Sync + 'static,
) -> Assumed {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    let server = TokenServer::start(&builder, "sts.test", script).await;
    fs::write(builder.dir.path().join("secret"), SECRET).unwrap();
    let text = configuration(&origin, &server, role, credential);
    Assumed { lab: builder.proxy(&text).await, origin, server }
}

fn configuration(origin: &Origin, server: &TokenServer, role: &str, credential: &str) -> String {
    let (port, sts) = (origin.port(), server.port);
    format!(
        "[integrations.api]\nallowed_domains = [\"api.test\", \"sts.test\"]\nports = [{port}, {sts}]\n\
         [credentials.AWS]\nauth_type = \"aws_sigv4\"\nvalue = \"file:secret\"\ndomains = [\"api.test\"]\n\
         access_key_id = \"{ID}\"\nregion = \"eu-west-1\"\nservice = \"sqs\"\n{credential}\n\
         [credentials.AWS.assume_role]\nrole_arn = \"{ROLE}\"\nendpoint = \"https://sts.test:{sts}\"\n{role}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"AWS\"]\n"
    )
}

impl Assumed {
    async fn send(&self, way: Way, path: &str, body: &str) -> crate::lab::Reply {
        let url = format!("https://api.test:{}{path}", self.origin.port());
        self.lab.by(way, "POST", &url, &[("exeat-credential", "AWS")], body).await
    }

    /// Verifies that the last request has the signature and the token of the `number`th credentials.
    fn assert_signed_with(&self, number: usize) {
        let (id, secret, token) = key(number);
        let seen = self.origin.last();
        let names = verify_signature_of((&id, &secret), "POST", &seen, ("eu-west-1", "sqs"));
        assert!(names.contains(&"x-amz-security-token".to_owned()), "{names:?}");
        assert_eq!(seen.header("x-amz-security-token"), Some(token.as_str()));
    }

    async fn mints(&self) -> Vec<Value> {
        assert!(self.lab.daemon.flush_audit().await);
        let text = fs::read_to_string(self.lab.audit_file()).unwrap();
        let lines = text.lines().map(|line| serde_json::from_str::<Value>(line).unwrap());
        lines.filter(|line| line["event"] == "mint").collect()
    }
}

/// Verifies the signature of a request for credentials, as the service does, and returns its time.
fn verify_request(asked: &Asked, region: &str) -> String {
    let headers: HeaderMap = asked.headers.clone();
    let body = Bytes::from(asked.body.clone());
    let (uri, trailers) = (asked.path.parse().unwrap(), HeaderMap::new());
    let seen = Seen { uri, version: Version::HTTP_11, headers, body, trailers };
    verify_signature_of((ID, SECRET), asked.method.as_str(), &seen, (region, "sts"));
    asked.header("x-amz-date").to_owned()
}

#[tokio::test]
async fn temporary_credentials_sign_on_every_way_in() {
    let policy = r#"{"Version":"2012-10-17","Statement":[]}"#;
    let role = format!(
        "session_name = \"agents\"\nexternal_id = \"a+b/c\"\npolicy = '{policy}'\nduration = \"15m\"\nregion = \"eu-central-1\"\n\
         policy_arns = [\"arn:aws:iam::aws:policy/ReadOnlyAccess\", \"arn:aws:iam::aws:policy/B\"]"
    );
    let assumed = start(&role, "", |_, number| xml(200, document(number, 900))).await;
    for way in Way::ALL {
        assert_eq!(assumed.send(way, "/a%20b?x=1", "text").await.status, 200, "{:?}", assumed.mints().await);
        assumed.assert_signed_with(0);
    }
    let asked = assumed.server.asked();
    assert_eq!(asked.len(), 1, "once for all requests");
    verify_request(&asked[0], "eu-central-1");
    let wanted = [
        ("Action", "AssumeRole"),
        ("Version", "2011-06-15"),
        ("RoleArn", ROLE),
        ("RoleSessionName", "agents"),
        ("DurationSeconds", "900"),
        ("ExternalId", "a+b/c"),
        ("Policy", policy),
        ("PolicyArns.member.1.arn", "arn:aws:iam::aws:policy/ReadOnlyAccess"),
        ("PolicyArns.member.2.arn", "arn:aws:iam::aws:policy/B"),
    ];
    for (name, value) in wanted {
        assert_eq!(asked[0].parameter(name).as_deref(), Some(value), "{name}");
    }
    assert!(asked[0].header("authorization").contains(ID) && !asked[0].body.contains(SECRET));
    let mints = assumed.mints().await;
    assert_eq!((mints.len(), &mints[0]["credential_used"]), (1, &"AWS".into()), "{mints:?}");
    let (id, secret, token) = key(0);
    let log = fs::read_to_string(assumed.lab.audit_file()).unwrap();
    assert!(!log.contains(&secret) && !log.contains(&token) && !log.contains(SECRET));

    // The origin returns the head of the request, with the token in it.
    let told = assumed.send(Way::TunnelH1, "/tell", "").await;
    assert!(told.text().contains("x-amz-security-token") && told.text().contains(&id), "{told:?}");
    assert!(!format!("{told:?}").contains(&token));
    for value in [SECRET, &secret, &token] {
        assumed.send(Way::TunnelH2, "/", value).await.assert_refused(403, "leak_detected");
    }
}

#[tokio::test]
async fn a_rejected_key_is_replaced_and_searched_for_on() {
    let assumed = start("", "", |_, number| xml(200, document(number, 3600))).await;
    let (_, secret, token) = key(0);
    assert_eq!(assumed.send(Way::TunnelH1, "/status?401", "").await.status, 401);
    assumed.assert_signed_with(0);
    assert_eq!(assumed.send(Way::TunnelH1, "/", "").await.status, 200);
    assumed.assert_signed_with(1);
    for value in [secret, token] {
        assumed.send(Way::TunnelH1, "/", &value).await.assert_refused(403, "leak_detected");
    }
    // A reload with another role gets credentials of that.
    let text = configuration(&assumed.origin, &assumed.server, "session_name = \"other\"", "");
    assumed.lab.reload(&text);
    assert_eq!(assumed.send(Way::TunnelH1, "/", "").await.status, 200);
    assumed.assert_signed_with(2);
    assert_eq!(assumed.server.asked().last().unwrap().parameter("RoleSessionName").as_deref(), Some("other"));
}

/// A reload without the key disables the credential. The session lives on.
#[tokio::test]
async fn a_session_is_searched_for_when_its_recipe_is_gone() {
    let assumed = start("", "", |_, number| xml(200, document(number, 3600))).await;
    assert_eq!(assumed.send(Way::TunnelH1, "/", "").await.status, 200);
    let (_, _, token) = key(0);
    let file = assumed.lab.dir.path().join("secret");
    fs::remove_file(&file).unwrap();
    let text = configuration(&assumed.origin, &assumed.server, "", "");
    let url = format!("https://api.test:{}/", assumed.origin.port());
    let post = async |body: &str| assumed.lab.by(Way::TunnelH1, "POST", &url, &[], body).await;
    for restored in [false, true] {
        if restored {
            fs::write(&file, SECRET).unwrap();
        }
        assumed.lab.reload(&text);
        // Twice, because the second policy takes over from the first.
        assumed.lab.reload(&text);
        let status = assumed.send(Way::TunnelH1, "/", "").await.status;
        assert_eq!(status, if restored { 200 } else { 403 });
        let value = if restored { &token } else { SECRET };
        post(value).await.assert_refused(403, "leak_detected");
    }
    assumed.assert_signed_with(1);
    // Also if the credential signs with the key itself then.
    let start = text.find("[credentials.AWS.assume_role]").unwrap();
    let end = text.find("[tasks.t]").unwrap();
    assumed.lab.reload(&format!("{}{}", &text[..start], &text[end..]));
    assert_eq!(assumed.send(Way::TunnelH1, "/", "").await.status, 200);
    assert_eq!(assumed.origin.last().header("x-amz-security-token"), None);
    post(&key(1).2).await.assert_refused(403, "leak_detected");
}

/// The clock of the service is an hour ahead of the proxy's, or behind it.
#[tokio::test]
async fn a_wrong_clock_is_made_up_for() {
    for ahead in [3600, -3600] {
        let assumed = start("", "", move |asked, number| {
            let now = SystemTime::now();
            let hour = Duration::from_secs(3600);
            let there = if ahead > 0 { now + hour } else { now - hour };
            let signed = verify_request(asked, "eu-west-1");
            let mut response = match number {
                0 => xml(403, error("SignatureDoesNotMatch")),
                _ => xml(200, document(number, ahead + 60)),
            };
            let day = |time: SystemTime| time::OffsetDateTime::from(time).hour();
            assert_eq!(&signed[9..11], format!("{:02}", day(if number == 0 { now } else { there })), "{signed}");
            response.headers_mut().insert("date", httpdate::fmt_http_date(there).parse().unwrap());
            response
        })
        .await;
        assert_eq!(assumed.send(Way::TunnelH1, "/", "").await.status, 200, "{:?}", assumed.mints().await);
        assumed.assert_signed_with(1);
        assert_eq!(assumed.server.asked().len(), 2);
    }
}

#[tokio::test]
async fn a_bad_answer_of_the_service_is_no_credential() {
    let with = |from: &str, to: &str| {
        let document = document(0, 3600);
        assert!(document.contains(from), "{from}");
        xml(200, document.replacen(from, to, 1))
    };
    let (id, secret, token) = key(0);
    let unknown = "the answer is not that of the Security Token Service";
    let rows = [
        (xml(403, error("AccessDenied")), "answered 403: AccessDenied"),
        (xml(400, error("wJalr-own-text")), "answered 400"),
        (xml(500, "<html>wJalr</html>"), "answered 500"),
        (xml(302, ""), "answered 302"),
        (xml(200, ""), "no credentials"),
        (xml(200, "{\"AssumeRoleResponse\": {}}"), "no credentials"),
        (xml(200, error("AccessDenied")), "no credentials"),
        (with("<Credentials>", "<Other>"), unknown),
        (with("</AssumeRoleResponse>", ""), unknown),
        (with("<AccessKeyId>", "<AccessKeyId>x</AccessKeyId><AccessKeyId>"), unknown),
        (with("<AssumeRoleResponse", "<!DOCTYPE a [<!ENTITY x \"y\">]><AssumeRoleResponse"), unknown),
        (with(&secret, "&#113;&quot;"), unknown),
        (with(&secret, "<![CDATA[q7Zk2mXv9LpW4sVt]]>"), unknown),
        (with("<AssumeRoleResult>", &"<a>".repeat(100)), unknown),
        (with(&id, "x"), "id of an access key"),
        (with(&secret, "q7Zk2mXv9LpW4sVt\r\nX-Evil: 1"), "secret access key"),
        (with(&secret, "password"), "too easy to guess"),
        (with(&token, "aaaaaaaaaaaaaaaa"), "too easy to guess"),
        (with(&token, &"k7Qz2mXv9LpW4sVt".repeat(300)), "4096"),
        (with(&token, &"k7Qz2mXv9LpW4sVt".repeat(5000)), "too long"),
        (with("<Expiration>", "<Expiration>x"), "not a time"),
        (xml(200, document(0, -5)), "expired"),
    ];
    for (response, why) in rows {
        let (status, text) = (response.status().as_u16(), response.body().clone());
        let assumed = start("", "", move |_, _| xml(status, text.clone())).await;
        assumed.send(Way::TunnelH1, "/", "").await.assert_refused(503, "credential_unavailable");
        let mints = assumed.mints().await;
        let reason = mints[0]["rule"].as_str().unwrap();
        assert!(reason.contains(why), "{why}: {reason}");
        assert!(assumed.origin.seen().is_empty(), "{why}");
        let log = fs::read_to_string(assumed.lab.audit_file()).unwrap();
        assert!(!log.contains("wJalr") && !log.contains("q7Zk2mXv9LpW4sVt"), "{why}");
    }
}

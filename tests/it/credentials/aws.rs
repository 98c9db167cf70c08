//! Requests are signed for AWS by the proxy, and the sandbox has no key.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::time::{Duration, Instant};

use aws_lc_rs::agreement;
use aws_lc_rs::signature::{ECDSA_P256_SHA256_ASN1, UnparsedPublicKey};
use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use hmac::{Hmac, KeyInit, Mac};
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::Frame;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode_str, percent_encode};
use serde_json::Value;
use sha2::{Digest, Sha256};
use tokio::io::AsyncWriteExt;
use tokio::process::Command;
use tokio::time::timeout;
use tokio_rustls::TlsAcceptor;

use crate::clients::clients;
use crate::lab::client::Way;
use crate::lab::origin::Seen;
use crate::lab::{Lab, LabBuilder, Origin, TOKEN};

const SECRET: &str = "wJalrXUtnFEMIK7MDENGbPxRfiCYzEXAMPLEKEY1";
const SESSION: &str = "FwoGZXIvYXdzEBYaDKq7Vp2xT9mLs4nR8wKvQyUeJhZbNcXfGdAoIiPlOkMjYtRrEeWw";
const ID: &str = "AKIAIOSFODNN7EXAMPLE";
/// The signature of an SDK that has a placeholder as its key.
const CLIENT: &str = "AWS4-HMAC-SHA256 Credential=${secrets.AWS}/20261127/eu-west-3/sqs/aws4_request, \
     SignedHeaders=host;x-amz-date, Signature=0123456789abcdef0123456789abcdef0123456789abcdef0123456789abcdef";

async fn lab(credential: &str, more: &str) -> (Lab, Origin) {
    lab_of("aws_sigv4", credential, more).await
}

async fn lab_of(auth_type: &str, credential: &str, more: &str) -> (Lab, Origin) {
    let builder = LabBuilder::new().await;
    let origin = builder.origin("api.test").await;
    fs::write(builder.dir.path().join("secret"), SECRET).unwrap();
    fs::write(builder.dir.path().join("session"), SESSION).unwrap();
    let text = format!(
        "[integrations.api]\nallowed_domains = [\"api.test\", \"other.test\"]\nports = [{port}]\n{more}\n\
         [credentials.AWS]\nauth_type = \"{auth_type}\"\nvalue = \"file:secret\"\ndomains = [\"api.test\"]\n\
         access_key_id = \"{ID}\"\n{credential}\n\
         [tasks.t]\nintegrations = [\"api\"]\ncredentials = [\"AWS\"]\n",
        port = origin.port()
    );
    (builder.proxy(&text).await, origin)
}

const SQS: &str = "region = \"us-east-1\"\nservice = \"sqs\"";
const S3: &str = "region = \"us-east-1\"\nservice = \"s3\"";

fn hmac(key: &[u8], text: &str) -> Vec<u8> {
    let mut mac = Hmac::<Sha256>::new_from_slice(key).unwrap();
    mac.update(text.as_bytes());
    mac.finalize().into_bytes().to_vec()
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// All but the unreserved characters of RFC 3986 §2.3.
const NOT_UNRESERVED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'-').remove(b'.').remove(b'_').remove(b'~');

/// Verifies the signature of a request as a service would, by the documentation of AWS and not with the library that made it.
/// Returns the names of the signed fields.
fn verify_signature(method: &str, seen: &Seen, scope: (&str, &str)) -> Vec<String> {
    verify_signature_of((ID, SECRET), method, seen, scope)
}

/// Verifies the signature of any key.
pub fn verify_signature_of(
    (id, secret): (&str, &str),
    method: &str,
    seen: &Seen,
    (region, service): (&str, &str),
) -> Vec<String> {
    let date = seen.header("x-amz-date").unwrap();
    let scope = format!("{}/{region}/{service}/aws4_request", &date[..8]);
    let signed = Signed::of((id, "AWS4-HMAC-SHA256", &scope), method, seen, service);
    let key = [region, service, "aws4_request"]
        .iter()
        .fold(hmac(format!("AWS4{secret}").as_bytes(), &date[..8]), |key, part| hmac(&key, part));
    assert_eq!(signed.signature, hex(&hmac(&key, &signed.text)), "{}", signed.text);
    signed.names
}

/// Verifies a signature for several regions (SigV4A) with a public key that is derived as the documentation of AWS says.
fn verify_signature_of_regions(method: &str, seen: &Seen, (regions, service): (&str, &str)) {
    let scope = format!("{}/{service}/aws4_request", &seen.header("x-amz-date").unwrap()[..8]);
    let signed = Signed::of((ID, "AWS4-ECDSA-P256-SHA256", &scope), method, seen, service);
    assert!(signed.names.contains(&"x-amz-region-set".to_owned()), "{:?}", signed.names);
    assert_eq!(seen.header("x-amz-region-set"), Some(regions));
    let context = format!("\0\0\0\u{1}AWS4-ECDSA-P256-SHA256\0{ID}\u{1}\0\0\u{1}\0");
    let mut key = hmac(format!("AWS4A{SECRET}").as_bytes(), &context);
    // The key is the number that follows. This one does not overflow its last byte.
    let last = key.last_mut().unwrap();
    *last = last.checked_add(1).unwrap();
    let key = agreement::PrivateKey::from_private_key(&agreement::ECDH_P256, &key).unwrap();
    let public = UnparsedPublicKey::new(&ECDSA_P256_SHA256_ASN1, key.compute_public_key().unwrap());
    let digits: Vec<_> = signed.signature.as_bytes().chunks(2).map(|pair| std::str::from_utf8(pair).unwrap()).collect();
    let signature: Vec<u8> = digits.into_iter().map(|pair| u8::from_str_radix(pair, 16).unwrap()).collect();
    public.verify(signed.text.as_bytes(), &signature).expect("the signature is the key's");
}

/// The text that a request's signature must be of, the names of its fields, and the signature.
struct Signed {
    text: String,
    names: Vec<String>,
    signature: String,
}

impl Signed {
    fn of((id, algorithm, scope): (&str, &str, &str), method: &str, seen: &Seen, service: &str) -> Self {
        let value = |name: &str| {
            let values: Vec<_> = seen.headers.get_all(name).iter().map(|value| value.to_str().unwrap()).collect();
            assert!(values.len() < 2, "{name}: {values:?}");
            values.first().map(|value| (*value).to_owned())
        };
        let authorization = value("authorization").unwrap();
        let date = value("x-amz-date").unwrap();
        let rest = authorization.strip_prefix(&format!("{algorithm} Credential={id}/{scope}, SignedHeaders="));
        let (names, signature) = rest.unwrap_or_else(|| panic!("{authorization}")).split_once(", Signature=").unwrap();
        let names: Vec<String> = names.split(';').map(str::to_owned).collect();
        let is_s3 = service == "s3";
        let path = seen.uri.path();
        // S3 decodes a path before it encodes it; others encode it as it is sent.
        let bytes = if is_s3 { percent_decode_str(path).collect() } else { path.as_bytes().to_vec() };
        let path: String = bytes
            .iter()
            .map(|byte| match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                    char::from(*byte).to_string()
                }
                byte => format!("%{byte:02X}"),
            })
            .collect();
        let pairs: Vec<(&str, &str)> = seen.uri.query().map_or_else(Vec::new, |query| {
            query.split('&').map(|pair| pair.split_once('=').unwrap_or((pair, ""))).collect()
        });
        // In a query, everything else is encoded.
        let encoded = |text: &str| {
            let decoded: Vec<u8> = percent_decode_str(text).collect();
            percent_encode(&decoded, NOT_UNRESERVED).to_string()
        };
        let mut pairs: Vec<(String, String)> =
            pairs.into_iter().map(|(name, value)| (encoded(name), encoded(value))).collect();
        pairs.sort_unstable();
        let query: Vec<String> = pairs.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let authority = seen.uri.authority().map(ToString::to_string);
        let fields: String = names
            .iter()
            .map(|name| {
                let own = if name == "host" { value("host").or(authority.clone()) } else { value(name) };
                let own = own.unwrap_or_else(|| panic!("{name} is signed and not sent"));
                format!("{name}:{}\n", own.split_ascii_whitespace().collect::<Vec<_>>().join(" "))
            })
            .collect();
        let payload = value("x-amz-content-sha256").unwrap_or_else(|| hex(&Sha256::digest(&seen.body)));
        if payload.len() == 64 {
            assert_eq!(payload, hex(&Sha256::digest(&seen.body)), "the body is the one that was signed");
        }
        let request = format!("{method}\n{path}\n{}\n{fields}\n{}\n{payload}", query.join("&"), names.join(";"));
        let text = format!("{algorithm}\n{date}\n{scope}\n{}", hex(&Sha256::digest(&request)));
        Self { text, names, signature: signature.to_owned() }
    }
}

#[tokio::test]
async fn requests_are_signed_however_the_credential_is_chosen() {
    type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], (&'a str, &'a str));
    let rows: [Row<'_>; 4] = [
        (SQS, &[("exeat-credential", "AWS")], ("us-east-1", "sqs")),
        ("", &[("authorization", CLIENT), ("x-amz-date", "20260101T000000Z")], ("eu-west-3", "sqs")),
        ("region = \"us-east-1\"", &[("exeat-credential", "AWS"), ("authorization", CLIENT)], ("us-east-1", "sqs")),
        ("inject = \"always\"\nregion = \"a\"\nservice = \"s3\"", &[], ("a", "s3")),
    ];
    for (credential, fields, scope) in rows {
        let (lab, origin) = lab(credential, "").await;
        let base = format!("https://api.test:{}", origin.port());
        for way in Way::ALL {
            let more =
                [("content-type", "application/json"), ("x-amz-target", "A.B"), ("x-amz-security-token", "dummy")];
            let fields: Vec<_> = fields.iter().chain(&more).copied().collect();
            for (method, path, body) in [
                ("GET", "/", ""),
                ("POST", "/a%20b/%C3%A4/c?b=2&a=%2F&a=1&empty", "{\"x\": 1}"),
                ("PUT", "/a.b~c_d-e/%3A?x=%C3%A4%20b", "text"),
                ("DELETE", "/x?y&a=b/c:d,e", ""),
            ] {
                let reply = lab.by(way, method, &format!("{base}{path}"), &fields, body).await;
                assert_eq!(reply.status, 200, "{reply:?}");
                assert_eq!(reply.header("exeat-credential-used"), Some("AWS"));
                let seen = origin.last();
                let names = verify_signature(method, &seen, scope);
                assert!(
                    names.iter().any(|name| name == "x-amz-target") && names.iter().any(|name| name == "content-type")
                );
                assert!(!seen.headers.contains_key("x-amz-security-token"), "the client's own is removed");
                assert_ne!(seen.headers["x-amz-date"], "20260101T000000Z");
                assert_eq!(seen.body, body);
            }
        }
        let line = lab.ended(0).await;
        assert_eq!((&line["credential_used"], &line["credits"]), (&"AWS".into(), &0.5.into()), "{line}");
        let text = fs::read_to_string(lab.audit_file()).unwrap();
        assert!(!text.contains(SECRET) && !text.contains("Signature"), "{text}");
    }
}

/// Sends random requests, with what a client may put into a path and a query. Returns the method, the request as the origin
/// received it, and the scope of its signature.
async fn generated(count: usize) -> Vec<(&'static str, Seen, (&'static str, &'static str))> {
    let (lab, origin) = lab(S3, "").await;
    let (other, other_origin) = self::lab(SQS, "").await;
    let mut state = 7_u64;
    let mut next = move |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        usize::try_from(state >> 33).unwrap() % below
    };
    let segments = ["a", "b.c", "%20", "%C3%A4", "x~y", "-_", "%2B", "%27", "A%3DB", "1,2", "%E2%82%AC", "k:v", "(z)"];
    let values = ["", "1", "%20", "a%2Fb", "%C3%A4", "x.y~z-_", "%2B", "%3D", "%26"];
    let mut found = Vec::new();
    for n in 0..count {
        let path: String = (0..=next(4)).map(|_| format!("/{}", segments[next(segments.len())])).collect();
        let query: Vec<String> = (0..next(4)).map(|at| format!("p{}={}", at % 2, values[next(values.len())])).collect();
        let query = if query.is_empty() { String::new() } else { format!("?{}", query.join("&")) };
        let bodies = [("GET", String::new()), ("POST", "ä".repeat(next(3_000))), ("PUT", "{}".to_owned())];
        let (method, body) = bodies[next(3)].clone();
        let meta = ["a", "a  b", "", "x;y=\"z\""][next(4)];
        let (lab, origin, scope) = if n % 2 == 0 {
            (&lab, &origin, ("us-east-1", "s3"))
        } else {
            (&other, &other_origin, ("us-east-1", "sqs"))
        };
        let to = format!("api.test:{}", origin.port());
        let url = format!("https://{to}{path}{query}");
        let fields =
            [("exeat-credential", "AWS"), ("x-amz-meta-m", meta), ("content-type", "text/plain; charset=utf-8")];
        let reply = if n % 10 == 0 {
            let mut request = http::Request::builder().method("PUT").uri(format!("{path}{query}")).header("host", &to);
            for (name, value) in fields {
                request = request.header(name, value);
            }
            lab.send_in_tunnel(&to, request.body(chunked(body.clone().into_bytes())).unwrap()).await
        } else {
            let way = [Way::Absolute, Way::TunnelH1, Way::TunnelH2][next(3)];
            lab.by(way, method, &url, &fields, &body).await
        };
        assert_eq!(reply.status, 200, "{url}: {reply:?}");
        found.push((if n % 10 == 0 { "PUT" } else { method }, origin.last(), scope));
    }
    found
}

#[tokio::test]
async fn two_hundred_requests_have_signatures_that_a_service_accepts() {
    for (method, seen, scope) in generated(200).await {
        verify_signature(method, &seen, scope);
    }
}

fn python() -> PathBuf {
    clients().expect("EXEAT_TEST_CLIENTS").join("aws/bin/python")
}

fn script() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/credentials/aws.py")
}

#[tokio::test]
#[ignore = "needs boto3 and moto of PyPI"]
async fn signatures_are_those_that_botocore_makes() {
    let requests = generated(200).await;
    let lines: Vec<String> = requests
        .iter()
        .map(|(method, seen, _)| {
            let authority = seen.uri.authority().map(ToString::to_string);
            let host = seen.headers.get("host").map(|host| host.to_str().unwrap().to_owned()).or(authority).unwrap();
            let fields = seen.headers.iter().map(|(name, value)| [name.as_str(), value.to_str().unwrap()]);
            let mut fields: Vec<[&str; 2]> = fields.collect();
            fields.push(["host", &host]);
            let url = format!("https://{host}{}", seen.uri.path_and_query().unwrap());
            let body = STANDARD.encode(&seen.body);
            serde_json::json!({ "method": method, "url": url, "headers": fields, "body": body }).to_string()
        })
        .collect();
    let mut verify = Command::new(python());
    verify.arg(script()).args(["verify", SECRET]).stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
    let mut verify = verify.spawn().unwrap();
    verify.stdin.take().unwrap().write_all(lines.join("\n").as_bytes()).await.unwrap();
    let output = timeout(Duration::from_secs(60), verify.wait_with_output()).await.unwrap().unwrap();
    assert_eq!(String::from_utf8_lossy(&output.stdout).trim(), "200");
}

/// AWS on this machine, which verifies signatures after the first requests.
pub struct Moto {
    pub port: u16,
    _server: tokio::process::Child,
}

impl Moto {
    pub async fn start() -> Self {
        let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
        let mut moto = Command::new(clients().unwrap().join("aws/bin/moto_server"));
        moto.args(["-H", "127.0.0.1", "-p", &port.to_string()])
            .envs([("INITIAL_NO_AUTH_ACTION_COUNT", "3"), ("S3_IGNORE_SUBDOMAIN_BUCKETNAME", "true")]);
        let server = moto.stdout(Stdio::null()).stderr(Stdio::null()).kill_on_drop(true).spawn().unwrap();
        #[allow(clippy::disallowed_methods, reason = "the test plays the origin")]
        let is_up = async || tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_ok();
        let start = Instant::now();
        while !is_up().await {
            assert!(start.elapsed() < Duration::from_secs(60), "moto does not start");
        }
        Self { port, _server: server }
    }
}

/// Runs a command of `aws.py`, and returns what it prints.
pub async fn run_script(arguments: &[&str], variables: &[(&str, &str)]) -> Value {
    let mut command = Command::new(python());
    command.arg(script()).args(arguments).envs(variables.iter().copied()).kill_on_drop(true);
    let output = timeout(Duration::from_secs(90), command.output()).await.unwrap().unwrap();
    let (out, err) = (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    serde_json::from_str::<Value>(&out).unwrap_or_else(|_| panic!("{out}\n{err}"))
}

/// boto3 with a placeholder as its key uses S3, SQS, DynamoDB and STS of moto, which verifies each signature.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs boto3 and moto of PyPI"]
async fn boto3_needs_no_key() {
    let used = use_moto(false).await;
    assert!(used.found["user"].as_str().unwrap().ends_with(":user/agent"), "{}", used.found);
}

/// The same with temporary credentials of a role, which moto verifies too.
#[tokio::test(flavor = "multi_thread")]
#[ignore = "needs boto3 and moto of PyPI"]
async fn boto3_has_the_permissions_of_a_role() {
    let used = use_moto(true).await;
    assert!(used.found["user"].as_str().unwrap().ends_with(":assumed-role/agent/of-exeat"), "{}", used.found);
    let mints: Vec<_> = used.log.lines().filter(|line| line.contains("\"event\":\"mint\"")).collect();
    assert!(mints.len() == 1 && !mints[0].contains("\"code\""), "{mints:?}");
}

/// The findings of boto3, and the log.
struct Used {
    found: Value,
    log: String,
}

async fn use_moto(with_role: bool) -> Used {
    let moto = Moto::start().await;
    let moto_port = moto.port;
    let key = run_script(&["setup", &moto_port.to_string()], &[]).await;
    let builder = LabBuilder::new().await;
    builder.dns.set("aws.test", &["127.0.0.1"]);
    let port = tls_before(&builder, "aws.test", moto_port).await;
    fs::write(builder.dir.path().join("secret"), key["secret"].as_str().unwrap()).unwrap();
    let mut role = String::new();
    if with_role {
        let (id, secret) = (key["id"].as_str().unwrap(), key["secret"].as_str().unwrap());
        let made = run_script(&["role", &moto_port.to_string(), id, secret], &[]).await;
        role = format!(
            "assume_role = {{ role_arn = {}, session_name = \"of-exeat\", external_id = \"a+b/c\", region = \"eu-central-1\", \
             endpoint = \"https://aws.test:{port}\" }}\n",
            made["arn"]
        );
    }
    let text = format!(
        "[integrations.aws]\nallowed_domains = [\"aws.test\"]\nports = [{port}]\n\
         [credentials.AWS]\nauth_type = \"aws_sigv4\"\nvalue = \"file:secret\"\ndomains = [\"aws.test\"]\n\
         access_key_id = {}\n{role}[tasks.t]\nintegrations = [\"aws\"]\ncredentials = [\"AWS\"]\n",
        key["id"]
    );
    let lab = builder.proxy(&text).await;
    let bundle = lab.dir.path().join("bundle.pem");
    fs::write(&bundle, lab.daemon.ca_pem()).unwrap();
    let proxy = format!("http://t:{TOKEN}@{}", lab.proxy);
    let variables = [
        ("HTTPS_PROXY", proxy.as_str()),
        ("AWS_CA_BUNDLE", bundle.to_str().unwrap()),
        ("AWS_ACCESS_KEY_ID", "${secrets.AWS}"),
        ("AWS_SECRET_ACCESS_KEY", "none"),
    ];
    let found = run_script(&["use", &format!("https://aws.test:{port}")], &variables).await;
    assert_eq!((found["keys"].as_array().unwrap().len(), &found["bodies"]), (6, &true.into()), "{found}");
    assert_eq!((&found["message"], &found["item"]), (&"ä message".into(), &"ä".into()), "{found}");
    let lines = lab.audit().await;
    let passed = lines.iter().filter(|line| line["event"] == "closed" && line["credential_used"] == "AWS").count();
    assert!(passed >= 20, "{passed}");
    assert!(!lines.iter().any(|line| line["event"] == "refused"), "{lines:#?}");
    let log = fs::read_to_string(lab.audit_file()).unwrap();
    Used { found, log }
}

/// Terminates TLS for a name before a port. Returns the port with TLS.
pub async fn tls_before(builder: &LabBuilder, name: &str, port: u16) -> u16 {
    builder.dns.set(name, &["127.0.0.1"]);
    let mut config = builder.server_config(name).as_ref().clone();
    config.alpn_protocols.clear();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = listener.local_addr().unwrap().port();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            let acceptor = acceptor.clone();
            tokio::spawn(async move {
                let Ok(mut client) = acceptor.accept(stream).await else { return };
                #[allow(clippy::disallowed_methods, reason = "the test plays the origin")]
                let Ok(mut server) = tokio::net::TcpStream::connect(("127.0.0.1", port)).await else { return };
                let _ = tokio::io::copy_bidirectional(&mut client, &mut server).await;
            });
        }
    });
    at
}

/// A body without a length, in two parts.
fn chunked(data: Vec<u8>) -> UnsyncBoxBody<Bytes, std::io::Error> {
    let half = data.len() / 2;
    let parts = [data[..half].to_vec(), data[half..].to_vec()];
    let frames = parts.map(|part| Ok(Frame::data(Bytes::from(part))));
    StreamBody::new(futures_util::stream::iter(frames)).boxed_unsync()
}

/// A body is part of the signature where the service requires it, and is never read without need.
#[tokio::test]
async fn bodies_are_read_only_where_their_hash_is_needed() {
    let (s3, bucket) = lab(S3, "").await;
    let (sqs, queue) = lab(SQS, "").await;
    let large = "x".repeat(3_000_000);
    let named = ("exeat-credential", "AWS");
    let url = |origin: &Origin| format!("https://api.test:{}/o", origin.port());
    assert_eq!(s3.by(Way::TunnelH1, "PUT", &url(&bucket), &[named], &large).await.status, 200);
    verify_signature("PUT", &bucket.last(), ("us-east-1", "s3"));
    assert_eq!(bucket.last().headers["x-amz-content-sha256"], "UNSIGNED-PAYLOAD", "a large body is not read before");
    assert_eq!(sqs.by(Way::TunnelH1, "PUT", &url(&queue), &[named], &large).await.status, 200);
    verify_signature("PUT", &queue.last(), ("us-east-1", "sqs"));
    assert!(!queue.last().headers.contains_key("x-amz-content-sha256"));
    let hash = hex(&Sha256::digest(&large));
    let announced = [named, ("x-amz-content-sha256", hash.as_str())];
    assert_eq!(sqs.by(Way::TunnelH2, "PUT", &url(&queue), &announced, &large).await.status, 200);
    verify_signature("PUT", &queue.last(), ("us-east-1", "sqs"));
    for lab_and_origin in [(&s3, &bucket, ("us-east-1", "s3")), (&sqs, &queue, ("us-east-1", "sqs"))] {
        let (lab, origin, scope) = lab_and_origin;
        for payload in ["UNSIGNED-PAYLOAD", "STREAMING-UNSIGNED-PAYLOAD-TRAILER"] {
            let mut announced = vec![named, ("x-amz-content-sha256", payload)];
            let mut body = "text";
            if payload.starts_with("STREAMING") {
                announced.extend([("content-encoding", "aws-chunked"), ("x-amz-decoded-content-length", "4")]);
                body = "4\r\ntext\r\n0\r\nx-amz-checksum-crc32:AAAAAA==\r\n\r\n";
            }
            assert_eq!(lab.by(Way::TunnelH1, "PUT", &url(origin), &announced, body).await.status, 200);
            verify_signature("PUT", &origin.last(), scope);
            assert_eq!(origin.last().headers["x-amz-content-sha256"], payload);
        }
        for payload in ["STREAMING-AWS4-HMAC-SHA256-PAYLOAD", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD-TRAILER", "nonsense"]
        {
            let announced = [named, ("x-amz-content-sha256", payload)];
            let reply = lab.by(Way::TunnelH1, "PUT", &url(origin), &announced, "text").await;
            reply.assert_refused(403, "credential_not_bound");
        }
    }
    // Without a length, the body cannot be read within a limit.
    let send = async |lab: &Lab, origin: &Origin| {
        let to = format!("api.test:{}", origin.port());
        let request = http::Request::put("/o").header("host", &to).header("exeat-credential", "AWS");
        lab.send_in_tunnel(&to, request.body(chunked(b"ab".to_vec())).unwrap()).await
    };
    assert_eq!(send(&s3, &bucket).await.status, 200);
    verify_signature("PUT", &bucket.last(), ("us-east-1", "s3"));
    let refused = send(&sqs, &queue).await;
    refused.assert_refused(413, "request_too_large");
    let lines = sqs.audit().await;
    let line = lines.iter().find(|line| line["code"] == "request_too_large").unwrap();
    assert_eq!(line["rule"], "the signature needs a body of known length");
    let too_large = "x".repeat(8_000_001);
    let reply = sqs.by(Way::TunnelH1, "PUT", &url(&queue), &[named], &too_large).await;
    reply.assert_refused(413, "request_too_large");
    assert_eq!(
        (&reply.problem()["limit"]["name"], &reply.problem()["limit"]["allowed"]),
        (&"max_request_bytes".into(), &8_000_000.into())
    );
}

#[tokio::test]
async fn temporary_credentials_have_their_token() {
    let (lab, origin) = lab(&format!("{SQS}\nsession_token = \"file:session\""), "").await;
    let url = format!("https://api.test:{}", origin.port());
    let fields = [("exeat-credential", "AWS"), ("x-amz-security-token", "dummy")];
    assert_eq!(lab.by(Way::TunnelH2, "GET", &format!("{url}/"), &fields, "").await.status, 200);
    let names = verify_signature("GET", &origin.last(), ("us-east-1", "sqs"));
    assert!(names.contains(&"x-amz-security-token".to_owned()), "{names:?}");
    assert_eq!(origin.last().headers["x-amz-security-token"], SESSION);
    // The origin returns the head of the request.
    let told = lab.by(Way::TunnelH1, "GET", &format!("{url}/tell"), &fields, "").await;
    assert_eq!(told.status, 500);
    assert!(told.text().contains("x-amz-security-token"), "the head is in the answer: {told:?}");
    assert!(!format!("{told:?}").contains(SESSION), "{told:?}");
    for value in [SECRET, SESSION] {
        let reply = lab.by(Way::TunnelH1, "POST", &format!("{url}/"), &fields, value).await;
        reply.assert_refused(403, "leak_detected");
    }
}

/// Signatures for several regions (SigV4A), as multi-region access points of S3 require them.
#[tokio::test]
async fn requests_are_signed_for_several_regions() {
    const CLIENT: &str = "AWS4-ECDSA-P256-SHA256 Credential=${secrets.AWS}/20261127/sqs/aws4_request, \
         SignedHeaders=host;x-amz-date;x-amz-region-set, Signature=3045022100aa";
    type Row<'a> = (&'a str, &'a [(&'a str, &'a str)], (&'a str, &'a str));
    let rows: [Row<'_>; 4] = [
        ("service = \"s3\"", &[("exeat-credential", "AWS")], ("*", "s3")),
        ("", &[("authorization", CLIENT), ("x-amz-region-set", "cn-north-1")], ("*", "sqs")),
        ("region = \"us-*,eu-west-1\"\nservice = \"s3\"\ninject = \"always\"", &[], ("us-*,eu-west-1", "s3")),
        (
            "region = \"eu-west-1\"\nsession_token = \"file:session\"",
            &[("authorization", super::aws::CLIENT)],
            ("eu-west-1", "sqs"),
        ),
    ];
    for (credential, fields, scope) in rows {
        let (lab, origin) = lab_of("aws_sigv4a", credential, "").await;
        let base = format!("https://api.test:{}", origin.port());
        for way in Way::ALL {
            for (method, path, body) in [("GET", "/", ""), ("POST", "/a%20b/%C3%A4/c?b=2&a=%2F&empty", "{\"x\": 1}")] {
                let reply = lab.by(way, method, &format!("{base}{path}"), fields, body).await;
                assert_eq!(reply.status, 200, "{reply:?}");
                verify_signature_of_regions(method, &origin.last(), scope);
            }
        }
        let text = fs::read_to_string(lab.audit_file()).unwrap();
        assert!(!text.contains(SECRET) && !text.contains(SESSION) && !text.contains("Signature"), "{text}");
    }
    // A client's signature for several regions has no region for one that is for one.
    let (lab, origin) = lab("", "").await;
    let url = format!("https://api.test:{}/", origin.port());
    let reply = lab.by(Way::TunnelH1, "GET", &url, &[("authorization", CLIENT)], "").await;
    reply.assert_refused(403, "credential_not_bound");
}

#[tokio::test]
async fn what_cannot_be_signed_is_refused() {
    let (lab, origin) = lab("", "").await;
    let url = format!("https://api.test:{}/", origin.port());
    let no_scope = CLIENT.replace("eu-west-3/sqs/aws4_request", "aws4_request");
    let beside = CLIENT.replace("${secrets.AWS}", "x${secrets.AWS}");
    let unknown = CLIENT.replace("AWS}", "OTHER}");
    let (named, auth) = ("exeat-credential", "authorization");
    let rows: [(&[(&str, &str)], &str); 7] = [
        (&[(named, "AWS")], "credential_not_bound"),
        (&[(auth, no_scope.as_str())], "credential_not_bound"),
        (&[(auth, beside.as_str())], "credential_not_bound"),
        (&[(auth, "Bearer ${secrets.AWS}")], "credential_not_bound"),
        (&[(auth, unknown.as_str())], "credential_unknown"),
        (&[("x-other", "${secrets.AWS}")], "credential_not_bound"),
        (&[(auth, CLIENT), ("x-amz-content-sha256", "STREAMING-AWS4-HMAC-SHA256-PAYLOAD")], "credential_not_bound"),
    ];
    for (fields, code) in rows {
        lab.by(Way::Absolute, "POST", &url, fields, "body").await.assert_refused(403, code);
    }
    let basic = format!("Basic {}", STANDARD.encode("AWS4-HMAC-SHA256 Credential=${secrets.AWS}/"));
    lab.by(Way::Absolute, "GET", &url, &[(auth, &basic)], "").await.assert_refused(403, "credential_not_bound");
    // A repeated field would be joined by the origin, and other characters replaced in the signature.
    let repeated = [(auth, CLIENT), ("x-amz-meta-a", "1"), ("x-amz-meta-a", "2")];
    lab.by(Way::TunnelH1, "GET", &url, &repeated, "").await.assert_refused(400, "request_malformed");
    let reply = lab.by(Way::TunnelH1, "GET", &format!("{url}?a=%FF"), &[(auth, CLIENT)], "").await;
    reply.assert_refused(400, "request_malformed");
    let reply = lab.by(Way::Absolute, "GET", &format!("{url}?X-Amz-Credential=$%7Bsecrets.AWS%7D"), &[], "").await;
    reply.assert_refused(403, "credential_not_bound");
    let other = format!("https://other.test:{}/", origin.port());
    lab.by(Way::Absolute, "GET", &other, &[(auth, CLIENT)], "").await.assert_refused(403, "credential_not_bound");
    assert!(origin.seen().is_empty());
}

/// With a required credential, no other key of the client's reaches the origin.
#[tokio::test]
async fn a_required_signature_is_the_only_key() {
    let (lab, origin) = lab(SQS, "require_credential = \"AWS\"").await;
    let url = format!("https://api.test:{}/?X-Amz-Signature=own&X-Amz-Credential=own&a=b", origin.port());
    let fields = [("exeat-credential", "AWS"), ("x-api-key", "own"), ("x-amz-security-token", "own")];
    assert_eq!(lab.by(Way::TunnelH1, "GET", &url, &fields, "").await.status, 200);
    let seen = origin.last();
    verify_signature("GET", &seen, ("us-east-1", "sqs"));
    assert!(!format!("{seen:?}").contains("own"), "{seen:?}");
    lab.by(Way::TunnelH1, "GET", &url, &[], "").await.assert_refused(403, "credential_required");
}

/// Each attempt of an SDK has another date and signature, and another span of a trace. An approval of one fits the next.
#[tokio::test]
async fn an_approval_fits_the_next_attempt() {
    let (lab, origin) = lab(SQS, "approval = \"required\"\n[admin]\nlisten = \"127.0.0.1:0\"").await;
    let url = format!("https://api.test:{}/q", origin.port());
    let send = async |attempt: u32, body: &str| {
        let authorization = CLIENT.replace("012345", &format!("00000{attempt}"));
        let (date, count) = (format!("20261127T10000{attempt}Z"), format!("attempt={attempt}; max=3"));
        let (id, parent) = (format!("id-{attempt}"), format!("00-{:032x}-{:016x}-01", attempt + 1, attempt + 1));
        let fields = [
            ("authorization", authorization.as_str()),
            ("x-amz-date", &date),
            ("x-amz-security-token", &date),
            ("amz-sdk-request", &count),
            ("amz-sdk-invocation-id", &id),
            ("traceparent", &parent),
            ("x-amz-target", "Queue.Send"),
        ];
        lab.by(Way::TunnelH1, "POST", &url, &fields, body).await
    };
    // Nobody is asked for a request that cannot be signed.
    let repeated = [("authorization", CLIENT), ("x-amz-meta-a", "1"), ("x-amz-meta-a", "2")];
    lab.by(Way::TunnelH1, "POST", &url, &repeated, "body").await.assert_refused(400, "request_malformed");
    assert_eq!(lab.admin_request("GET", "/v1/approvals", &Value::Null).await.1, serde_json::json!([]));
    let asked = send(1, "body").await;
    asked.assert_refused(403, "approval_pending");
    let id = asked.problem()["approval"].as_str().unwrap().to_owned();
    let (path, decision) = (format!("/v1/approvals/{id}"), serde_json::json!({ "decision": "approve" }));
    assert_eq!(lab.admin_request("POST", &path, &decision).await.0, 200);
    send(2, "another body").await.assert_refused(403, "approval_pending");
    assert_eq!(send(3, "body").await.status, 200);
    let seen = origin.last();
    verify_signature("POST", &seen, ("us-east-1", "sqs"));
    assert!(seen.headers.keys().all(|name| !name.as_str().starts_with("amz-sdk")), "{seen:?}");
    send(4, "body").await.assert_refused(403, "approval_pending");
}

/// Without a configured region, the client chooses the scope, which is part of what a person approves.
#[tokio::test]
async fn an_approval_is_of_the_scope_of_the_signature() {
    let (lab, origin) = lab("", "approval = \"required\"\n[admin]\nlisten = \"127.0.0.1:0\"").await;
    let url = format!("https://api.test:{}/q", origin.port());
    let other = CLIENT.replace("eu-west-3/sqs", "us-east-1/sns");
    let asked = lab.by(Way::TunnelH1, "POST", &url, &[("authorization", CLIENT)], "body").await;
    asked.assert_refused(403, "approval_pending");
    let path = format!("/v1/approvals/{}", asked.problem()["approval"].as_str().unwrap());
    assert_eq!(lab.admin_request("POST", &path, &serde_json::json!({ "decision": "approve" })).await.0, 200);
    let reply = lab.by(Way::TunnelH1, "POST", &url, &[("authorization", &other)], "body").await;
    reply.assert_refused(403, "approval_pending");
    assert_eq!(lab.by(Way::TunnelH1, "POST", &url, &[("authorization", CLIENT)], "body").await.status, 200);
    verify_signature("POST", &origin.last(), ("eu-west-3", "sqs"));
}

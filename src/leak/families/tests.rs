//! Tests of the families with real and generated keys.

use std::sync::Arc;

use proptest::prelude::*;

use super::checks::{OPENAI_INFIX, crc62};
use super::shapes::{GROQ_INFIX, MAX_KEY, MAX_PREFIX, SHAPES, Verdict};
use super::{Families, Family, FamilyStream};

const UPPER: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const LOWER: &str = "abcdefghijklmnopqrstuvwxyz";
const DIGITS: &str = "0123456789";
const HEX: &str = "0123456789abcdef";
const BASE32: &str = "ABCDEFGHIJKLMNOPQRSTUVWXYZ234567";

fn all() -> Families {
    Families::of(Family::ALL)
}

fn find(text: impl AsRef<[u8]>) -> Option<Family> {
    all().find(text.as_ref())
}

/// Returns pseudo-random characters, always the same. The tests contain no key, because other scanners read them too.
fn pseudo_random(length: usize, alphabet: &str) -> String {
    let mut state = 0x9e37_79b9_7f4a_7c15_u64 ^ length as u64;
    let next = || {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        char::from(alphabet.as_bytes()[(state >> 33) as usize % alphabet.len()])
    };
    std::iter::repeat_with(next).take(length).collect()
}

fn base62(length: usize) -> String {
    pseudo_random(length, &[DIGITS, UPPER, LOWER].concat())
}

fn url(length: usize) -> String {
    // Does not end in - or _, so that a row reads as one word.
    let body = pseudo_random(length - 1, &[DIGITS, UPPER, LOWER, "-_"].concat());
    body + "k"
}

fn hex(length: usize) -> String {
    pseudo_random(length, HEX)
}

fn digits(length: usize) -> String {
    pseudo_random(length, "9180273645")
}

fn checked(prefix: &str, length: usize) -> String {
    let drawn = base62(length - 6);
    let checksum = String::from_utf8(crc62(drawn.as_bytes()).to_vec()).unwrap();
    format!("{prefix}{drawn}{checksum}")
}

fn openai(prefix: &str, half: usize, draw: fn(usize) -> String) -> String {
    format!("{prefix}{}{}{}", draw(half), str::from_utf8(OPENAI_INFIX).unwrap(), draw(half))
}

fn account_key(before: &str) -> String {
    format!("{before}{}/+{}Q==", base62(40), base62(43))
}

fn groq() -> String {
    format!("gsk_{}{}{}", base62(20), str::from_utf8(GROQ_INFIX).unwrap(), base62(24))
}

/// Returns a key of each shape that ends with its last character.
fn keys() -> Vec<(Family, String)> {
    let aws = |prefix: &str| format!("{prefix}Q{}", pseudo_random(15, BASE32));
    vec![
        (Family::Age, format!("AGE-SECRET-KEY-1{}", pseudo_random(58, "QPZRY9X8GF2TVDW0S3JN54KHCE6MUA7L"))),
        (Family::Anthropic, format!("sk-ant-api03-{}AA", url(93))),
        (Family::Anthropic, format!("sk-ant-admin01-{}AA", url(93))),
        (Family::Anthropic, format!("sk-ant-oat01-{}AA", url(93))),
        (Family::Aws, aws("AKIA")),
        (Family::Aws, aws("ASIA")),
        (Family::Aws, format!("AKIAJ{}", pseudo_random(15, BASE32))),
        (Family::Atlassian, format!("ATATT3{}={}", url(177), pseudo_random(8, "0123456789ABCDEF"))),
        (Family::Azure, account_key("AccountKey=")),
        (Family::Azure, account_key("accountKey\": \"")),
        (Family::Azure, account_key("accountkey=")),
        (Family::Azure, account_key("account_key = '")),
        (Family::Azure, account_key("account-key ")),
        (Family::Azure, account_key("ACCOUNT_KEY: ")),
        (Family::Brevo, format!("xkeysib-{}-{}", hex(64), base62(16))),
        (Family::CratesIo, format!("cio{}", base62(32))),
        (Family::Databricks, format!("dapi{}", hex(32))),
        (Family::Databricks, format!("dapi{}-2", hex(32))),
        (Family::DigitalOcean, format!("dop_v1_{}", hex(64))),
        (Family::DigitalOcean, format!("doo_v1_{}", hex(64))),
        (Family::DigitalOcean, format!("dor_v1_{}", hex(64))),
        (Family::Docker, format!("dckr_pat_{}", url(27))),
        (Family::Doppler, format!("dp.pt.{}", base62(43))),
        (Family::Dynatrace, format!("dt0c01.{}.{}", pseudo_random(24, BASE32), pseudo_random(64, BASE32))),
        (Family::Fly, format!("fo1_{}", url(43))),
        (Family::GitHub, checked("ghp_", 36)),
        (Family::GitHub, checked("gho_", 36)),
        (Family::GitHub, checked("ghu_", 36)),
        (Family::GitHub, checked("ghs_", 36)),
        (Family::GitHub, checked("ghr_", 76)),
        (Family::GitHub, format!("github_pat_{}_{}", base62(22), base62(59))),
        (Family::GitLab, format!("glpat-{}", url(20))),
        (Family::GitLab, format!("glpat-{}.01.{}", url(43), pseudo_random(9, HEX))),
        (Family::GitLab, format!("glpat-{}.{}", url(300), pseudo_random(9, HEX))),
        (Family::GitLab, format!("gldt-{}", url(20))),
        (Family::GitLab, format!("glptt-{}", hex(40))),
        (Family::GitLab, format!("gloas-{}", hex(64))),
        (Family::GitLab, format!("glagent-{}", url(50))),
        (Family::Google, format!("AIzaSy{}", url(33))),
        (Family::Grafana, format!("glsa_{}_{}", base62(32), hex(8))),
        (Family::Groq, groq()),
        (Family::HuggingFace, format!("hf_{}", pseudo_random(34, &[UPPER, LOWER].concat()))),
        (Family::HuggingFace, format!("api_org_{}", pseudo_random(34, &[UPPER, LOWER].concat()))),
        (Family::LangSmith, format!("lsv2_pt_{}_{}", hex(32), hex(10))),
        (Family::LangSmith, format!("lsv2_sk_{}_{}", hex(32), hex(10))),
        (Family::Linear, format!("lin_api_{}", base62(40))),
        (Family::NewRelic, format!("NRAK-{}", pseudo_random(27, &[UPPER, DIGITS].concat()))),
        (Family::Notion, format!("ntn_{}{}", digits(11), base62(35))),
        (Family::Npm, checked("npm_", 36)),
        (Family::OpenAi, openai("sk-", 20, base62)),
        (Family::OpenAi, openai("sk-proj-", 20, base62)),
        (Family::OpenAi, openai("sk-proj-", 58, url)),
        (Family::OpenAi, openai("sk-proj-", 74, url)),
        (Family::OpenAi, openai("sk-svcacct-", 58, url)),
        (Family::OpenAi, openai("sk-svcacct-", 74, url)),
        (Family::OpenAi, openai("sk-admin-", 58, url)),
        (Family::OpenAi, openai("sk-admin-", 74, url)),
        (Family::OpenAi, openai("sk-svcacct-", 20, base62)),
        (Family::OpenAi, openai("sk-None-", 20, base62)),
        (Family::OpenAi, openai("sk-my-service_account-2-", 20, base62)),
        (Family::OpenAi, openai("sk-nightly-build-", 74, url)),
        (Family::OpenShift, format!("sha256~{}", url(43))),
        (Family::OpenRouter, format!("sk-or-v1-{}", hex(64))),
        (Family::Perplexity, format!("pplx-{}", base62(48))),
        (Family::Postman, format!("PMAK-{}-{}", hex(24), hex(34))),
        (Family::Pulumi, format!("pul-{}", hex(40))),
        (Family::PyPi, format!("pypi-AgEIcHlwaS5vcmcCJ{}", url(157))),
        (Family::PyPi, format!("pypi-AgENdGVzdC5weXBpLm9yZwIk{}", url(157))),
        (Family::Replicate, format!("r8_{}", base62(37))),
        (Family::RubyGems, format!("rubygems_{}", hex(48))),
        (Family::Sentry, format!("sntryu_{}", hex(64))),
        (Family::Sourcegraph, format!("sgp_{}", hex(40))),
        (Family::Sourcegraph, format!("sgp_{}_{}", hex(16), hex(40))),
        (Family::Sourcegraph, format!("sgp_local_{}", hex(40))),
        (Family::SendGrid, format!("SG.{}.{}", url(22), url(43))),
        (Family::Shopify, format!("shpat_{}", hex(32))),
        (Family::Shopify, format!("shpca_{}", hex(32))),
        (Family::Shopify, format!("shppa_{}", hex(32))),
        (Family::Shopify, format!("shpss_{}", hex(32))),
        (Family::Slack, format!("xapp-1-A{}-{}-{}", pseudo_random(10, BASE32), digits(13), hex(64))),
        (Family::Slack, format!("xoxb-{}-{}-{}", digits(12), digits(13), base62(24))),
        (Family::Slack, format!("xoxp-{}-{}-{}-{}", digits(11), digits(12), digits(13), hex(32))),
        (Family::Stripe, format!("sk_live_{}", base62(24))),
        (Family::Stripe, format!("sk_live_51{}", base62(97))),
        (Family::Stripe, format!("rk_live_{}", base62(24))),
        (Family::Stripe, format!("rk_live_51{}", base62(97))),
        (Family::Vault, format!("hvs.{}", url(90))),
        (Family::Vault, format!("hvb.{}", url(138))),
        (Family::XAi, format!("xai-{}", base62(80))),
    ]
}

/// Returns the starts of private keys, with placeholders for the newlines.
fn armored_keys() -> Vec<String> {
    let label = |label: &str| format!("-----BEGIN {label}-----");
    let der = format!("MIIE{}", base62(60));
    let encrypted = format!("{{n}}Proc-Type: 4,ENCRYPTED{{n}}DEK-Info: AES-128-CBC,{}{{n}}{{n}}", hex(32));
    let mut rows: Vec<String> = ["", "ENCRYPTED ", "RSA ", "EC ", "DSA "]
        .map(|kind| format!("{}{{n}}{der}{{n}}", label(&format!("{kind}PRIVATE KEY"))))
        .into();
    for kind in ["RSA ", "EC ", "DSA "] {
        rows.push(format!("{}{encrypted}{}{{n}}", label(&format!("{kind}PRIVATE KEY")), base62(64)));
    }
    rows.push(format!("{}{{n}}b3BlbnNzaC1rZXktdjEAAAAABG5vbmUAAAAEbm9uZQAAAAA{{n}}", label("OPENSSH PRIVATE KEY")));
    for (version, first) in [("", "lQVYB"), ("Version: GnuPG v2{n}Comment: mine{n}", "lQVYB"), ("", "xVgEZ")] {
        rows.push(format!("{}{{n}}{version}{{n}}{first}{}{{n}}", label("PGP PRIVATE KEY BLOCK"), base62(59)));
    }
    rows
}

#[test]
fn finds_every_shape_alone_and_in_context() {
    for (family, key) in keys() {
        for text in [
            key.clone(),
            format!("KEY={key}\n"),
            format!("{{\"key\":\"{key}\"}}"),
            format!("{{\"file\":\"A=1\\n{key}\\nB=2\"}}"),
            format!("a=b&key%3D{key}%26c"),
            format!("{{\"q\":\"a\\u003d{key}\\u0026b\"}}"),
            format!("https://x:{key}@host.example/x.git"),
            format!("Bearer {key}, and so on"),
            format!("\0{key}\0"),
            format!("é{key}é"),
        ] {
            assert_eq!(find(&text), Some(family), "{text}");
        }
    }
}

#[test]
fn ignores_near_misses() {
    for (family, key) in keys() {
        let (but_last, last) = key.split_at(key.len() - 1);
        let (first, but_first) = key.split_at(1);
        let other_case = if first == first.to_lowercase() { first.to_uppercase() } else { first.to_lowercase() };
        let mut rows = vec![key.to_uppercase(), key.to_lowercase()];
        // The name of an account key has several spellings, and may be the end of a longer name.
        if family != Family::Azure {
            rows.extend([but_first.to_owned(), format!("{other_case}{but_first}")]);
            rows.extend(["A", "z", "9", "_", "-"].map(|before| format!("{before}{key}")));
        }
        let after: &[&str] = if family == Family::Azure { &["="] } else { &["A", "z", "9", "_", "-"] };
        // PyPI and Vault tokens have no fixed length.
        if !matches!(family, Family::PyPi | Family::Vault) {
            rows.extend([but_last.to_owned(), format!("{but_last}.{last}")]);
            rows.extend(after.iter().map(|after| format!("{key}{after}")));
        }
        for text in rows.into_iter().filter(|text| *text != key) {
            assert_eq!(find(&text), None, "{text} is not quite {key}");
        }
    }
}

#[test]
fn finds_account_keys_after_their_name() {
    let names = ["AccountKey", "accountKey", "accountkey", "storageAccountKey", "storage_account_key"];
    for name in names.into_iter().chain(["AZURE_STORAGE_ACCOUNT_KEY", "--account-key"]) {
        for between in
            ["=", ":", ": ", " = ", " ", "\":\"", "\": \"", "': '", " => '", "=\"", "\\\":\\\"", "=`", "', '"]
        {
            let text = account_key(&format!("{name}{between}"));
            for (before, after) in [("", ""), ("{\"", "\"}"), ("export ", ";EndpointSuffix=x"), ("\n  ", "\n")] {
                assert_eq!(find(format!("{before}{text}{after}")), Some(Family::Azure), "{before}{text}{after}");
            }
            let (key, padding) = text.split_at(text.len() - 3);
            for near in [format!("{key}B=="), format!("{key}Q="), format!("{key}Q==="), format!("{key}Q==A")] {
                assert_eq!(find(&near), None, "{near}");
            }
            assert_eq!(find(format!("{}{padding}", &key[..key.len() - 1])), None, "one less of {text}");
            let longer = text.replace("/+", "/+/");
            assert_eq!(find(&longer), None, "{longer}");
        }
        for between in ["", "\n", " is ", ":::::::::", "()=", "_hash=", "Name="] {
            let text = account_key(&format!("{name}{between}"));
            assert_eq!(find(&text), None, "{text}");
        }
    }
}

#[test]
fn openai_halves_have_equal_lengths() {
    let infix = str::from_utf8(OPENAI_INFIX).unwrap();
    for (before, after) in [(20, 21), (21, 20), (19, 20), (58, 57), (74, 58), (20, 58), (30, 30), (57, 58)] {
        for prefix in ["sk-", "sk-proj-", "sk-my-name-"] {
            let text = format!("{prefix}{}{infix}{}", base62(before), base62(after));
            assert_eq!(find(&text), None, "{text}");
        }
    }
    for text in [
        format!("sk-name{}{infix}{}", base62(20), base62(20)),
        format!("sk-proj-{}{infix}{}", "x".repeat(58), "x".repeat(58)),
        format!("sk-{}-{}{infix}{}", "n".repeat(200), base62(20), base62(20)),
        format!("disk-{}{infix}{}", base62(20), base62(20)),
    ] {
        assert_eq!(find(&text), None, "{text}");
    }
    // The infix may also occur in a half.
    let key = format!("sk-proj-{}{infix}{}{infix}{}", base62(30), base62(20), base62(74 - 36 + 36));
    assert_eq!(find(&key), None, "{key}");
    let half = format!("{}{infix}{}", base62(30), base62(36));
    assert_eq!(find(format!("sk-proj-{half}{infix}{half}")), Some(Family::OpenAi), "{half}");
}

#[test]
fn vault_tokens_have_length_limits() {
    for (prefix, min, max) in [("hvs.", 90, 120), ("hvb.", 138, 300)] {
        for (length, want) in [(min - 1, None), (min, Some(Family::Vault)), (max, Some(Family::Vault)), (max + 1, None)]
        {
            assert_eq!(find(format!("{prefix}{}", url(length))), want, "{prefix} and {length}");
        }
    }
}

#[test]
fn ignores_wrong_checksums() {
    for prefix in ["ghp_", "gho_", "ghu_", "ghs_", "npm_"] {
        assert_eq!(find(format!("{prefix}{}", base62(36))), None, "{prefix}");
        let key = checked(prefix, 36);
        let other = if key.ends_with('7') { "8" } else { "7" };
        assert_eq!(find(format!("{}{other}", &key[..key.len() - 1])), None, "{prefix}");
    }
    // Account 1 099 511 627 775 has thirteen digits.
    assert_eq!(find("AKIA77777777Q7777777"), None);
    // Ids without an account start with I or J, and ids with one with Q or later.
    assert_eq!(find("AKIAA7RW2T5QK3JNB6XD"), None);
}

#[test]
fn ignores_placeholders_and_identifiers() {
    let x = |count: usize| "x".repeat(count);
    let rows = [
        // AWS's example in all of its documentation is public.
        "AKIAIOSFODNN7EXAMPLE".to_owned(),
        "ASIAIOSFODNN7EXAMPLE".to_owned(),
        "AKIAI44QH8DHBEXAMPLE".to_owned(),
        "AKIAXXXXXXXXXXXXXXXX".to_owned(),
        "arn:aws:iam::029608264753:role/AKIA".to_owned(),
        format!("ghp_{}", x(36)),
        format!("npm_{}", x(36)),
        format!("github_pat_{}_{}", x(22), x(59)),
        format!("glpat-{}", x(20)),
        "glpat-some-class-name-in-css".to_owned(),
        "glagent-a-rather-long-name-of-a-class-in-some-style-sheet".to_owned(),
        "sk-ant-api03-... or sk-ant-…, as in our documentation".to_owned(),
        format!("sk-ant-api03-{}AA", x(93)),
        format!("sk-{}", x(48)),
        format!("sk-proj-{}T3BlbkFJ{}", x(74), x(74)),
        format!("hf_{}", x(34)),
        "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".to_owned(),
        "r8_ThisIsAnIdentifierInAProgram32BitWide0".to_owned(),
        format!("gsk_{}", base62(52)),
        format!("xai-{}", "0".repeat(80)),
        format!("AIzaSy{}", "0123456789abcdefghijklmnopqrstuvw"),
        format!("xoxb-123456789012-1234567890123-{}", base62(24)),
        format!("sk_test_{}", base62(24)),
        format!("sk_live_{}", "1234567890abcdefghijklmn"),
        format!("sk_live_{}", "aaaaaaBBBBBBccccccDDDDDD"),
        format!("shpat_{}", "0".repeat(32)),
        format!("dop_v1_{}", "0123456789abcdef".repeat(4)),
        format!("SG.{}.{}", x(22), x(43)),
        format!("AccountKey={}==", "A".repeat(86)),
        // The key of the storage emulator, published by Microsoft.
        "AccountKey=Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw=="
            .to_owned(),
        format!("AccountKey={}B==", base62(85)),
        "AGE-SECRET-KEY-1".to_owned() + &"Q".repeat(58),
        format!("sha256~{}", x(43)),
        format!("dapi{}", "0".repeat(32)),
        "pul-0123456789abcdef0123456789abcdef01234567".to_owned(),
        "account_key_name_of_the_storage_account = request.get_account_key()".to_owned(),
        format!("accountKey: {}", hex(88)),
        format!("sgp_local_{}", "f".repeat(40)),
        "ntn_12345678901".to_owned() + &x(35),
        "550e8400-e29b-41d4-a716-446655440000".to_owned(),
        format!("{{\"sha256\":\"{}\"}}", hex(64)),
        format!("ciorbi{}", hex(29)),
        "conversational-and-precious-socioeconomicconsiderations".to_owned(),
        "-----BEGIN PRIVATE KEY-----".to_owned(),
        "-----BEGIN PRIVATE KEY-----\n...\n-----END PRIVATE KEY-----".to_owned(),
        "-----BEGIN PRIVATE KEY-----\nMIIE...\n-----END PRIVATE KEY-----".to_owned(),
        "if (text.startsWith(\"-----BEGIN RSA PRIVATE KEY-----\\n\")) return".to_owned(),
        format!("-----BEGIN RSA PRIVATE KEY-----\nMIIE{}...{}\n", base62(60), base62(20)),
        format!("-----BEGIN RSA PRIVATE KEY-----\nMIIE{}\u{2026}", base62(70)),
        format!("-----BEGIN PUBLIC KEY-----\nMIIB{}", base62(60)),
        format!("-----BEGIN CERTIFICATE-----\nMIID{}", base62(60)),
        format!("-----BEGIN RSA PUBLIC KEY-----\nMIIB{}", base62(60)),
        format!("-----BEGIN PGP PUBLIC KEY BLOCK-----\n\nmQGN{}", base62(60)),
        format!("-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nmQGN{}", base62(60)),
        format!("------BEGIN PRIVATE KEY-----\nMIIE{}", base62(60)),
        format!("-----BEGIN PRIVATE KEY-----MIIE{}", base62(60)),
        format!("-----BEGIN OPENSSH PRIVATE KEY-----\nb3BlbnNzaC1rZXktdjEB{}", base62(50)),
    ];
    for text in rows {
        assert_eq!(find(&text), None, "{text}");
    }
}

/// Signed URLs are meant to be shared, and contain no secret besides the signature.
#[test]
fn ignores_ids_in_signed_urls() {
    let id = format!("AKIAQ{}", pseudo_random(15, BASE32));
    for text in [
        format!("?X-Amz-Credential={id}%2F20261101%2Feu-west-1%2Fs3%2Faws4_request&X-Amz-Date="),
        format!("AWS4-HMAC-SHA256 Credential={id}/20261101/eu-west-1/s3/aws4_request, SignedHeaders="),
        format!("https://b.s3.amazonaws.com/k?AWSAccessKeyId={id}&Signature=x"),
        format!("https://b.s3.amazonaws.com/k?Signature=x&AWSAccessKeyId={id}"),
    ] {
        assert_eq!(find(&text), None, "{text}");
    }
    for text in [format!("AWSAccessKeyId={id}\nAWSSecretKey="), format!("x={id}%2F"), format!("x={id}%2F1")] {
        assert_eq!(find(&text), Some(Family::Aws), "{text}");
    }
}

#[test]
fn ignores_prefixes_inside_base64() {
    let id = format!("AKIAQ{}", pseudo_random(15, BASE32));
    let (cio, google) = (format!("cio{}", base62(32)), format!("AIzaSy{}", pseudo_random(33, LOWER)));
    for key in [id, cio, google] {
        for (before, after) in
            [("/", "/"), ("+", " "), (" ", "+"), ("iVBORw0KGgo", " "), ("\"", "=="), ("-", ""), ("", "/")]
        {
            let text = format!("{before}{key}{after}");
            assert_eq!(find(&text), None, "{text}");
        }
    }
}

#[test]
fn finds_private_keys_with_any_line_ending() {
    for row in armored_keys() {
        for newline in ["\n", "\r\n", "\\n", "\\r\\n", "\\\\n", "\n    ", "\r\n\t\t"] {
            let text = row.replace("{n}", newline);
            assert_eq!(find(&text), Some(Family::PrivateKey), "{text}");
            assert_eq!(find(format!("key: |\n  {text}")), Some(Family::PrivateKey), "{text}");
        }
        assert_eq!(find(row.replace("{n}", " ")), None, "{row}");
        assert_eq!(find(row.replace("{n}", "\n").to_lowercase()), None, "{row}");
    }
    // Joined into one line, or a short line with its padding.
    let begins = "-----BEGIN PRIVATE KEY-----\\nMC4CAQAwBQYDK2VwBCIEI";
    for rest in [base62(900), base62(42) + "=", base62(43) + "\\n-----END", base62(42)] {
        assert_eq!(find(format!("{begins}{rest}")), Some(Family::PrivateKey), "{rest}");
    }
    let account = r#"{"type":"service_account","private_key":"-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0B"#;
    assert_eq!(find(format!("{account}{}", base62(40))), Some(Family::PrivateKey));
}

/// Fails for a row of the table without a test key.
#[test]
fn every_shape_has_a_test_key() {
    let texts: Vec<String> = keys()
        .into_iter()
        .map(|(_, key)| key)
        .chain(armored_keys().iter().map(|row| row.replace("{n}", "\n")))
        .collect();
    for (row, shape) in SHAPES.iter().enumerate() {
        let fits = |text: &String| {
            text.as_bytes().starts_with(shape.prefix)
                && matches!(shape.match_at(text.as_bytes(), 0, true), Verdict::Match(_))
        };
        assert!(texts.iter().any(fits), "row {row}, {}", String::from_utf8_lossy(shape.prefix));
    }
    for family in Family::ALL {
        assert!(SHAPES.iter().any(|shape| shape.family == family), "{family:?}");
        assert_eq!(Family::from_name(family.as_str()), Some(family));
    }
    assert_eq!(Family::from_name("Aws"), None);
}

/// A caller holds back 4 KiB.
#[test]
fn no_shape_exceeds_the_lag() {
    const { assert!(FamilyStream::DELAY < 2048) };
    for shape in SHAPES {
        assert!(shape.max_len() <= MAX_KEY, "{}", String::from_utf8_lossy(shape.prefix));
        assert!(shape.prefix.len() <= MAX_PREFIX && shape.prefix.len() >= 3);
    }
}

#[test]
fn finds_only_enabled_families() {
    let none = Families::default();
    assert!(none.is_empty() && Families::of([]).is_empty() && !all().is_empty());
    for (family, key) in keys() {
        assert_eq!(none.find(key.as_bytes()), None);
        assert_eq!(Families::of([family]).find(key.as_bytes()), Some(family));
        let others = Family::ALL.into_iter().filter(|other| *other != family);
        assert_eq!(Families::of(others).find(key.as_bytes()), None, "{key}");
    }
    let mut stream = FamilyStream::new(Arc::new(none));
    assert_eq!((stream.feed(keys()[0].1.as_bytes()), stream.end()), (None, None));
}

/// Returns the find of a stream fed in pieces of these lengths, repeated.
fn streamed(text: &[u8], lengths: &[usize]) -> Option<Family> {
    let mut stream = FamilyStream::new(Arc::new(all()));
    let room = stream.capacity();
    let mut rest = text;
    for length in lengths.iter().cycle() {
        let (piece, after) = rest.split_at(rest.len().min(*length));
        stream.feed(piece);
        assert_eq!(stream.capacity(), room, "the buffer never grows");
        rest = after;
        if rest.is_empty() {
            break;
        }
    }
    stream.end()
}

#[test]
fn a_stream_agrees_with_the_whole_text_at_any_cut() {
    let armours = armored_keys().into_iter().map(|row| (Family::PrivateKey, row.replace("{n}", "\r\n")));
    for (family, key) in keys().into_iter().chain(armours) {
        let text = format!("a=b\\n{key} and\n");
        for cut in 0..text.len() {
            assert_eq!(streamed(text.as_bytes(), &[cut.max(1), text.len()]), Some(family), "{text} cut at {cut}");
        }
        assert_eq!(streamed(text.as_bytes(), &[1]), Some(family), "{text} byte by byte");
        assert_eq!(streamed(key.as_bytes(), &[7]), Some(family), "{key} at the end");
        let longer = format!("{key}-{key}");
        let whole = find(&longer);
        assert_eq!(streamed(longer.as_bytes(), &[key.len()]).is_some(), whole.is_some(), "{longer}");
    }
}

#[test]
fn finds_keys_at_the_edges_of_large_pieces() {
    let key = checked("ghp_", 36);
    for before in (0..60).chain(1_000..1_100).chain(4_050..4_100) {
        let text = [vec![b'.'; before], key.clone().into_bytes(), vec![b'.'; 9_000]].concat();
        for pieces in [&[4_096][..], &[1_040, 1_041], &[1_039, 3, 5_000], &[2_000, 16]] {
            assert_eq!(streamed(&text, pieces), Some(Family::GitHub), "{before} before, in {pieces:?}");
        }
    }
}

#[test]
fn a_stream_can_be_reused() {
    let key = checked("npm_", 36);
    let (start, rest) = key.split_at(10);
    let mut stream = FamilyStream::new(Arc::new(all()));
    assert_eq!((stream.feed(start.as_bytes()), stream.end()), (None, None));
    assert_eq!((stream.feed(rest.as_bytes()), stream.end()), (None, None), "two streams are not one");
    assert_eq!((stream.feed(key.as_bytes()), stream.feed(b" ")), (None, Some(Family::Npm)));
    assert_eq!((stream.feed(b"more"), stream.end()), (Some(Family::Npm), Some(Family::Npm)));
    assert_eq!(stream.end(), None);
}

/// Generates texts from whole keys, halves, prefixes, neighbors and noise.
fn key_texts() -> impl Strategy<Value = Vec<u8>> {
    let mut keys: Vec<Vec<u8>> = keys().into_iter().map(|(_, key)| key.into_bytes()).collect();
    keys.extend(armored_keys().into_iter().map(|row| row.replace("{n}", "\n").into_bytes()));
    let whole = prop::sample::select(keys);
    let broken = (whole.clone(), any::<prop::sample::Index>(), any::<u8>()).prop_map(|(mut key, at, byte)| {
        let at = at.index(key.len());
        key[at] = byte;
        key
    });
    let half = (whole.clone(), any::<prop::sample::Index>()).prop_map(|(key, at)| key[at.index(key.len())..].to_vec());
    let beginning =
        (whole.clone(), any::<prop::sample::Index>()).prop_map(|(key, at)| key[..at.index(key.len())].to_vec());
    let noise = prop::collection::vec(any::<u8>(), 0..40);
    let filler = (0_usize..1500).prop_map(|count| vec![b'.'; count]);
    let between = prop::sample::select(vec![" ", "\\n", "=", "-", "A", "\n", "%3D", "/", "&AWSAccessKeyId=", ""]);
    let between = between.prop_map(|text: &str| text.as_bytes().to_vec());
    let piece = prop_oneof![1 => whole, 3 => broken, 3 => half, 3 => beginning, 2 => noise, 1 => filler, 4 => between];
    prop::collection::vec(piece, 0..8).prop_map(|pieces| pieces.concat())
}

/// Generates texts without keys: random bytes in the encodings of requests, words, and prefixes of keys.
fn ordinary_text() -> impl Strategy<Value = String> {
    let prefixes: Vec<String> = SHAPES.iter().map(|shape| String::from_utf8_lossy(shape.prefix).into_owned()).collect();
    let drawn = prop_oneof![
        "[A-Za-z0-9+/]{0,400}(=|==)?",
        "[A-Za-z0-9_-]{0,400}",
        "[0-9a-f]{0,200}",
        "[0-9A-F]{0,200}",
        "([a-z]{1,12} ){0,60}",
        "([a-z]{1,8}[_.(:=\"' ]){0,40}",
    ];
    let prefixed = (prop::sample::select(prefixes), "[a-z]{1,12}([-_.][a-z]{1,12}){0,30}");
    prop::collection::vec(prop_oneof![6 => drawn, 2 => prefixed.prop_map(|(prefix, words)| prefix + &words)], 1..6)
        .prop_map(|pieces| pieces.join("\n"))
}

proptest! {
    #[test]
    fn ignores_ordinary_text(text in ordinary_text()) {
        prop_assert_eq!(find(&text), None);
    }

    #[test]
    fn a_stream_agrees_with_the_whole_text(text in key_texts(), lengths in prop::collection::vec(1_usize..1500, 1..6)) {
        let whole = all().find(&text).is_some();
        prop_assert_eq!(streamed(&text, &lengths).is_some(), whole);
        prop_assert_eq!(streamed(&text, &[1]).is_some(), whole);
    }

    /// The search finds all keys that trying every shape at every offset finds.
    #[test]
    fn the_search_agrees_with_naive_search(text in key_texts()) {
        let tried = (0..text.len()).any(|start| {
            SHAPES.iter().any(|shape| {
                text[start..].starts_with(shape.prefix) && matches!(shape.match_at(&text, start, true), Verdict::Match(_))
            })
        });
        prop_assert_eq!(all().find(&text).is_some(), tried);
    }
}

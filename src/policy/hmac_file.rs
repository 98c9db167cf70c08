//! `[credentials.NAME.hmac]`: reads the section.

use std::collections::{BTreeMap, HashSet};
use std::path::Path;

use http::HeaderName;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, HOST};
use toml::{Table, Value};

use super::credential::Placement;
use super::credential_file::{AccessKeyId, CredentialSource};
use super::hmac::{Algorithm, Encoding, HmacRecipe, Part, Template, TimestampFormat};
use super::reader::{Findings, Readable, Section, choice};

choice!(Algorithm, "sha1" => Algorithm::Sha1, "sha256" => Algorithm::Sha256, "sha384" => Algorithm::Sha384, "sha512" => Algorithm::Sha512);
choice!(Encoding, "base64" => Encoding::Base64, "base64url" => Encoding::Base64Url, "hex" => Encoding::Hex, "hex_upper" => Encoding::HexUpper);
choice!(TimestampFormat, "http" => TimestampFormat::Http, "iso8601" => TimestampFormat::Iso8601, "iso8601_ms" => TimestampFormat::Iso8601Ms, "unix" => TimestampFormat::Unix, "unix_ms" => TimestampFormat::UnixMs);

/// The keys of well-known ways to sign.
const PRESETS: [(&str, &str); 3] = [
    (
        "stripe",
        r#"sign = "{timestamp}.{body}"
        headers = { Stripe-Signature = "t={timestamp},v1={signature}" }"#,
    ),
    (
        "slack",
        r#"sign = "v0:{timestamp}:{body}"
        headers = { X-Slack-Request-Timestamp = "{timestamp}", X-Slack-Signature = "v0={signature}" }"#,
    ),
    (
        "aws_mws",
        r#"sign = "{method}\n{host}\n{path}\n{sorted_query}"
        encoding = "base64"
        timestamp = "iso8601"
        query = { AWSAccessKeyId = "{key_id}", SignatureMethod = "HmacSHA256", SignatureVersion = "2", Timestamp = "{timestamp}", Signature = "{signature}" }"#,
    ),
];
const NAMES: &str = "\"stripe\", \"slack\" or \"aws_mws\"";

/// The public name of a key, or its source.
struct KeyId(AccessKeyId);

impl Readable for KeyId {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let is_source =
            |text: &str| ["env:", "file:", "secret:", "workspace-secret:"].iter().any(|kind| text.starts_with(kind));
        match value.as_str() {
            Some(text) if !is_source(text) => Some(Self(AccessKeyId::Text(text.to_owned()))),
            _ => CredentialSource::read(value, path, findings).map(|source| Self(AccessKeyId::Source(source))),
        }
    }
}

/// The section, as it is written.
#[derive(Default)]
pub(super) struct RawHmac {
    algorithm: Option<Algorithm>,
    encoding: Option<Encoding>,
    key_encoding: Option<Encoding>,
    key_id: Option<AccessKeyId>,
    timestamp: Option<TimestampFormat>,
    sign: Option<String>,
    headers: BTreeMap<String, String>,
    query: BTreeMap<String, String>,
}

impl RawHmac {
    /// Reads the section, and the keys of its preset that it does not have itself.
    pub(super) fn read(mut s: Section<'_>, base: &Path) -> Self {
        let preset = s.take::<String>("preset");
        let known = preset.as_ref().map(|name| PRESETS.iter().find(|(known, _)| known == name));
        if let (Some(None), Some(name)) = (known, &preset) {
            s.findings().problem(s.at("preset"), format!("no preset named {name:?}"), NAMES);
        }
        let of_preset = known.flatten().and_then(|(_, text)| text.parse::<Table>().ok()).unwrap_or_default();
        let mut own = Self::read_keys(&mut s);
        if let Some(AccessKeyId::Source(source)) = own.key_id {
            own.key_id = Some(AccessKeyId::Source(CredentialSource(source.0.relative_to(base))));
        }
        if preset.as_deref() == Some("aws_mws") && own.algorithm.is_some_and(|own| own != Algorithm::Sha256) {
            let expected = "sha256, or the keys of the preset written out";
            s.findings().problem(s.at("algorithm"), "the preset sends the name of its own algorithm", expected);
        }
        let mut preset = Section::of(Some(Value::Table(of_preset)), s.path().to_owned(), s.findings());
        let Self { algorithm, encoding, timestamp, sign, headers, query, .. } = Self::read_keys(&mut preset);
        own.algorithm = own.algorithm.or(algorithm);
        own.encoding = own.encoding.or(encoding);
        own.timestamp = own.timestamp.or(timestamp);
        own.sign = own.sign.or(sign);
        if own.headers.is_empty() && own.query.is_empty() {
            (own.headers, own.query) = (headers, query);
        }
        own
    }

    fn read_keys(s: &mut Section<'_>) -> Self {
        Self {
            algorithm: s.take("algorithm"),
            encoding: s.take("encoding"),
            key_encoding: s.take("key_encoding"),
            key_id: s.take::<KeyId>("key_id").map(|KeyId(id)| id),
            timestamp: s.take("timestamp"),
            sign: s.take("sign"),
            headers: s.values::<String>("headers").into_iter().collect(),
            query: s.values::<String>("query").into_iter().collect(),
        }
    }

    /// Returns the public name of the key, or its source.
    pub(super) fn key_id(&self) -> Option<&AccessKeyId> {
        self.key_id.as_ref()
    }

    /// Returns the recipe with the public name of the key. `None` if it cannot be used, after that has been reported.
    pub(super) fn recipe(&self, key_id: Option<String>, path: &str, findings: &Findings) -> Option<HmacRecipe> {
        let at = |key: &str| format!("{path}.hmac.{key}");
        let Some(sign) = self.sign.as_deref().filter(|sign| !sign.is_empty()) else {
            findings.problem(
                at("sign"),
                "missing",
                "the text that is signed, such as \"{timestamp}.{body}\", or a preset",
            );
            return None;
        };
        let template = |key: String, text: &str| match Template::parse(text) {
            Ok(template) => Some(template),
            Err(problem) => {
                let expected = "timestamp, nonce, key_id, method, host, path, query, path_and_query, sorted_query, header:NAME, body, body_hash or signature";
                findings.problem(key, problem, expected);
                None
            }
        };
        let sign = template(at("sign"), sign)?;
        let headers: Option<Vec<_>> = self
            .headers
            .iter()
            .map(|(name, text)| {
                let key = at(&format!("headers.{name}"));
                let field = name
                    .parse()
                    .ok()
                    .filter(|name| Placement::Field(http::HeaderName::clone(name)).can_hold_credential());
                if field.is_none() {
                    findings.problem(
                        &key,
                        format!("{name:?} cannot carry a signature"),
                        "another field, such as \"X-Signature\"",
                    );
                }
                Some((field?, template(key, text)?))
            })
            .collect();
        let query: Option<Vec<_>> = self
            .query
            .iter()
            .map(|(name, text)| {
                let key = at(&format!("query.{name}"));
                if !Placement::Parameter(name.clone()).can_hold_credential() {
                    findings.problem(
                        &key,
                        format!("{name:?} is not a valid parameter name"),
                        "at most 64 letters, digits and any of -_.[]",
                    );
                    return None;
                }
                Some((name.clone(), template(key, text)?))
            })
            .collect();
        let recipe = HmacRecipe {
            algorithm: self.algorithm.unwrap_or(Algorithm::Sha256),
            encoding: self.encoding.unwrap_or(Encoding::Hex),
            key_encoding: self.key_encoding,
            key_id,
            timestamp: self.timestamp.unwrap_or(TimestampFormat::Unix),
            sign,
            headers: headers?,
            query: query?,
        };
        check(&recipe, path, findings).then_some(recipe)
    }
}

/// Reports what is missing in a recipe, or contradicts itself.
fn check(recipe: &HmacRecipe, path: &str, findings: &Findings) -> bool {
    let at = |key: &str| format!("{path}.hmac.{key}");
    let mut is_valid = true;
    let mut problem = |key: &str, problem: &str, expected: &str| {
        findings.problem(at(key), problem, expected);
        is_valid = false;
    };
    let is_sent = |part: &Part| recipe.templates().skip(1).any(|template| template.has(part));
    if !is_sent(&Part::Signature) {
        problem("headers", "the signature is not sent", "{ X-Signature = \"{signature}\" }, or query");
    }
    if recipe.sign.has(&Part::Signature) {
        problem("sign", "the signature cannot be a part of itself", "a text without {signature}");
    }
    for (part, name) in [(Part::Nonce, "{nonce}"), (Part::Timestamp, "{timestamp}")] {
        if recipe.sign.has(&part) && !is_sent(&part) {
            problem(
                "headers",
                &format!("{name} is signed and not sent, so the origin cannot verify it"),
                &format!("{{ X-Name = \"{name}\" }}, or query"),
            );
        }
    }
    let mut names = HashSet::new();
    if let Some((name, _)) = recipe.headers.iter().find(|(name, _)| !names.insert(name.clone())) {
        problem("headers", &format!("{name} is there twice"), "each field once");
    }
    let unsigned = |part: &Part| matches!(part, Part::Header(name) if *name == HOST || is_connection_field(name));
    if recipe.sign.parts().iter().any(unsigned) {
        problem(
            "sign",
            "it has a field that is written for the connection, after the signature",
            "{host} for the field Host",
        );
    }
    let has_key_id = recipe.templates().any(|template| template.has(&Part::KeyId));
    let is_visible = |id: &String| !id.is_empty() && id.bytes().all(|byte| byte.is_ascii_graphic());
    if has_key_id && recipe.key_id.is_none() || recipe.key_id.as_ref().is_some_and(|id| !is_visible(id)) {
        problem("key_id", "not the public name of the key", "visible ASCII characters");
    }
    let in_sent = |part: &Part| {
        matches!(part, Part::Body | Part::Query | Part::SortedQuery | Part::PathAndQuery | Part::Path | Part::Header(_))
    };
    let is_head_text = |part: &Part| matches!(part, Part::Text(text) if text.bytes().any(|byte| byte.is_ascii_control() || !byte.is_ascii()));
    if recipe.templates().skip(1).flat_map(Template::parts).any(|part| in_sent(part) || is_head_text(part)) {
        problem(
            "headers",
            "only {signature}, {timestamp}, {nonce}, {key_id}, {body_hash}, {method}, {host} and visible text can be sent",
            "other variables in sign",
        );
    }
    is_valid
}

/// Returns true for a field that is not sent as the client sends it.
fn is_connection_field(name: &HeaderName) -> bool {
    !Placement::Field(name.clone()).can_hold_credential() && ![CONTENT_LENGTH, CONTENT_ENCODING].contains(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn presets_are_whole_recipes() {
        for (name, _) in PRESETS {
            let findings = Findings::default();
            let mut table = Table::new();
            table.insert("preset".to_owned(), name.into());
            table.insert("key_id".to_owned(), "AKID".into());
            let raw = RawHmac::read(
                Section::of(Some(Value::Table(table)), "credentials.A.hmac".to_owned(), &findings),
                Path::new("/"),
            );
            let recipe = raw.recipe(Some("AKID".to_owned()), "credentials.A", &findings);
            assert!(recipe.is_some_and(|recipe| recipe.place().is_some()), "{name}");
        }
    }
}

//! `auth_type = "hmac"`: the parts of a request that are signed with the key, and the fields and parameters in which the signature is
//! sent (HMAC: RFC 2104).

use base64::Engine;
use base64::engine::general_purpose::{STANDARD, URL_SAFE_NO_PAD};
use http::HeaderName;

use super::credential::Placement;

/// How a request is signed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HmacRecipe {
    /// The hash function.
    pub algorithm: Algorithm,
    /// The encoding of the signature and of hashes.
    pub encoding: Encoding,
    /// The encoding of the key in the credential's value. `None` for the value itself.
    pub key_encoding: Option<Encoding>,
    /// The public name of the key, for `{key_id}`.
    pub key_id: Option<String>,
    /// The format of `{timestamp}`.
    pub timestamp: TimestampFormat,
    /// The text that is signed.
    pub sign: Template,
    /// The fields that are sent.
    pub headers: Vec<(HeaderName, Template)>,
    /// The query parameters that are sent.
    pub query: Vec<(String, Template)>,
}

/// A hash function.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Algorithm {
    /// SHA-1, only for old APIs.
    Sha1,
    /// SHA-256.
    Sha256,
    /// SHA-384.
    Sha384,
    /// SHA-512.
    Sha512,
}

/// An encoding of bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Encoding {
    /// Standard base64 with padding (RFC 4648 §4).
    Base64,
    /// base64 for URLs, without padding (RFC 4648 §5).
    Base64Url,
    /// Lower-case hexadecimal digits.
    Hex,
    /// Upper-case hexadecimal digits.
    HexUpper,
}

/// A format of the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TimestampFormat {
    /// As in the field `Date` (RFC 9110 §5.6.7).
    Http,
    /// `2026-01-31T12:00:00Z` (RFC 3339).
    Iso8601,
    /// `2026-01-31T12:00:00.000Z`.
    Iso8601Ms,
    /// Seconds since 1970.
    Unix,
    /// Milliseconds since 1970.
    UnixMs,
}

/// A text with variables.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Template(Vec<Part>);

/// A part of a template.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Part {
    /// A literal text.
    Text(String),
    /// The body.
    Body,
    /// The hash of the body.
    BodyHash,
    /// The values of a field as they are sent, joined by commas.
    Header(HeaderName),
    /// The host, and the port if it is not 443.
    Host,
    /// The public name of the key.
    KeyId,
    /// The method.
    Method,
    /// A random UUID that is new for each request.
    Nonce,
    /// The path, as it is sent.
    Path,
    /// The path and the query.
    PathAndQuery,
    /// The query, as it is sent.
    Query,
    /// The signature.
    Signature,
    /// The parameters of the query, encoded by RFC 3986 and sorted.
    SortedQuery,
    /// The time.
    Timestamp,
}

impl HmacRecipe {
    /// Returns true for a value that is a key in its encoding.
    pub(super) fn takes_key(&self, value: &[u8]) -> bool {
        let is_hex = || value.len().is_multiple_of(2) && value.iter().all(u8::is_ascii_hexdigit);
        let is_key = match self.key_encoding {
            None => true,
            Some(Encoding::Hex | Encoding::HexUpper) => is_hex(),
            Some(Encoding::Base64) => STANDARD.decode(value).is_ok(),
            Some(Encoding::Base64Url) => URL_SAFE_NO_PAD.decode(value).is_ok(),
        };
        is_key && !value.is_empty()
    }
}

impl Template {
    /// Parses a text with variables in braces. `{{` is the text `{`.
    ///
    /// # Errors
    /// The reason why the text is not a template, for the first place that is not.
    pub fn parse(text: &str) -> Result<Self, String> {
        let (mut parts, mut literal, mut rest) = (Vec::new(), String::new(), text);
        while let Some((before, behind)) = rest.split_once('{') {
            literal.push_str(before);
            if let Some(after) = behind.strip_prefix('{') {
                literal.push('{');
                rest = after;
                continue;
            }
            if !literal.is_empty() {
                parts.push(Part::Text(std::mem::take(&mut literal)));
            }
            let (name, after) = behind.split_once('}').ok_or("a brace is not closed; {{ is the text {")?;
            parts.push(variable(name).ok_or_else(|| format!("no variable named {name:?}; {{{{ is the text {{"))?);
            rest = after;
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            parts.push(Part::Text(literal));
        }
        Ok(Self(parts))
    }

    /// Returns the parts.
    #[must_use]
    pub fn parts(&self) -> &[Part] {
        &self.0
    }

    /// Returns true if a part occurs.
    #[must_use]
    pub fn has(&self, part: &Part) -> bool {
        self.0.contains(part)
    }
}

/// The variables, beside `{header:NAME}`.
const VARIABLES: [(&str, Part); 12] = [
    ("body", Part::Body),
    ("body_hash", Part::BodyHash),
    ("host", Part::Host),
    ("key_id", Part::KeyId),
    ("method", Part::Method),
    ("nonce", Part::Nonce),
    ("path", Part::Path),
    ("path_and_query", Part::PathAndQuery),
    ("query", Part::Query),
    ("signature", Part::Signature),
    ("sorted_query", Part::SortedQuery),
    ("timestamp", Part::Timestamp),
];

fn variable(name: &str) -> Option<Part> {
    let known = VARIABLES.into_iter().find(|(known, _)| *known == name).map(|(_, part)| part);
    known.or_else(|| name.strip_prefix("header:")?.parse().ok().map(Part::Header))
}

impl HmacRecipe {
    /// Returns true if the signature depends on the body.
    #[must_use]
    pub fn signs_body(&self) -> bool {
        self.templates().any(|template| template.has(&Part::Body) || template.has(&Part::BodyHash))
    }

    /// Returns the place of the signature.
    #[must_use]
    pub fn place(&self) -> Option<Placement> {
        let field = self.headers.iter().find(|(_, template)| template.has(&Part::Signature));
        let parameter = || self.query.iter().find(|(_, template)| template.has(&Part::Signature));
        let of_field = field.map(|(name, _)| Placement::Field(name.clone()));
        of_field.or_else(|| parameter().map(|(name, _)| Placement::Parameter(name.clone())))
    }

    /// Returns all places that are written.
    pub fn places(&self) -> impl Iterator<Item = Placement> {
        let fields = self.headers.iter().map(|(name, _)| Placement::Field(name.clone()));
        fields.chain(self.query.iter().map(|(name, _)| Placement::Parameter(name.clone())))
    }

    /// Returns the templates of all that is sent or signed.
    pub(super) fn templates(&self) -> impl Iterator<Item = &Template> {
        let fields = self.headers.iter().map(|(_, template)| template);
        std::iter::once(&self.sign).chain(fields).chain(self.query.iter().map(|(_, template)| template))
    }
}

impl std::fmt::Display for HmacRecipe {
    /// Describes all that the signature depends on, and what is sent.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{:?} in {:?} over \"{}\"", self.algorithm, self.encoding, self.sign)?;
        let (key, id) = (self.key_encoding, self.key_id.as_deref().unwrap_or_default());
        write!(f, ", key {id:?} in {key:?}, time in {:?}", self.timestamp)?;
        self.headers.iter().try_for_each(|(name, template)| write!(f, ", {name}: {template}"))?;
        self.query.iter().try_for_each(|(name, template)| write!(f, ", ?{name}={template}"))
    }
}

impl std::fmt::Display for Template {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.iter().try_for_each(|part| part.fmt(f))
    }
}

impl std::fmt::Display for Part {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Text(text) => f.write_str(&text.replace('{', "{{").escape_debug().to_string()),
            Self::Header(name) => write!(f, "{{header:{name}}}"),
            other => {
                VARIABLES.iter().filter(|(_, part)| part == other).try_for_each(|(name, _)| write!(f, "{{{name}}}"))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn templates_have_literal_texts_and_variables() {
        let text = |text: &str| Part::Text(text.to_owned());
        let rows: [(&str, Result<Vec<Part>, &str>); 7] = [
            ("t={timestamp},v1={signature}", Ok(vec![text("t="), Part::Timestamp, text(",v1="), Part::Signature])),
            (
                "{method}\n{header:X-A}",
                Ok(vec![Part::Method, text("\n"), Part::Header(HeaderName::from_static("x-a"))]),
            ),
            ("a}", Ok(vec![text("a}")])),
            ("", Ok(vec![])),
            ("{{\"a\":{nonce}}", Ok(vec![text("{\"a\":"), Part::Nonce, text("}")])),
            ("{date}", Err("no variable named \"date\"; {{ is the text {")),
            ("x{body", Err("a brace is not closed; {{ is the text {")),
        ];
        for (given, want) in rows {
            let parsed = Template::parse(given);
            if let Ok(parsed) = &parsed {
                let again = Template::parse(&parsed.to_string().replace("\\n", "\n").replace("\\\"", "\""));
                assert_eq!(again.as_ref(), Ok(parsed), "{given}");
            }
            assert_eq!(parsed.map(|template| template.0), want.map_err(str::to_owned), "{given}");
        }
    }
}

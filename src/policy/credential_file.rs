//! `[credentials]`: reads the section and compiles it for a task.

use std::collections::{BTreeSet, HashMap};
use std::path::Path;
use std::sync::{Arc, OnceLock};

use http::HeaderName;
use toml::Value;

use super::assumed_role::RawRole;
use super::aws::{self, AwsAlgorithm, AwsKey, AwsSigning, FetchedAwsKey, FetchedKeyId};
use super::client_identity::{ClientIdentity, IdentityError};
use super::command_source::{self, CommandSource};
use super::credential::{Auth, Binding, Credential, Placement, is_cookie_name};
use super::held_secret::HeldSecret;
use super::hmac_file::RawHmac;
use super::mint::{MintMethod, MintRecipe, Minting};
use super::mint_file::{MintType, RawMint, ReadSecret};
use super::pattern::quoted;
use super::preset;
use super::reader::{Findings, Readable, Section, choice};
use super::rule::{Integration, Mode};
use super::secret_store::StoreReference;
use super::secret_store_file::{RawKeeping, SecretStores, command_recipe};
use super::settings::{Settings, Source};
use super::source::{CompileContext, SourceError, has_blank_edge, read_document, read_source, usable, usable_document};
use super::token_request::{SecretRead, StoredSecret};
use super::value_fit::{MAX_VALUE, Unfit, repeated_scheme, unfit};
use crate::leak::strength::Strength;
use crate::model::host::Host;
use crate::model::name::{CredentialName, is_plain};
use crate::model::secret::Secret;

/// The shortest placeholder, in bytes. Shorter ones occur in texts by accident.
const MIN_PLACEHOLDER: usize = 8;
/// The problem of a key whose source is a secret store.
pub(super) const ONLY_VALUES: &str = "only the value of a credential can be in a secret store, or printed by a command";
/// The longest JSON Pointer, in bytes.
const MAX_POINTER: usize = 512;
/// The largest number of credentials that are sent beside one.
const MAX_WITH: usize = 4;

/// `[credentials.NAME]`.
pub(super) struct RawCredential {
    auth_type: Option<AuthType>,
    auth_header_name: Option<String>,
    auth_query_name: Option<String>,
    auth_cookie_name: Option<String>,
    value: Option<CredentialSource>,
    /// The client certificate of `tls_client`.
    certificate: Option<CredentialSource>,
    domains: Vec<Binding>,
    inject: Inject,
    placeholder: Option<String>,
    swap_in: Vec<String>,
    with: Vec<String>,
    aws: RawAws,
    /// The section `hmac`, if it is there.
    hmac: Option<RawHmac>,
    mint: RawMint,
    keeping: RawKeeping,
    /// The key path of the section.
    path: String,
    /// Whether `auth_type` and `value` are missing. Invalid values have already been reported.
    missing: [bool; 2],
}

/// The keys of `auth_type = "aws_sigv4"`.
#[derive(Default)]
struct RawAws {
    access_key_id: Option<AccessKeyId>,
    session_token: Option<CredentialSource>,
    region: Option<String>,
    service: Option<String>,
    /// The section `assume_role`, if it is there.
    role: Option<RawRole>,
}

/// The id of an access key, which is no secret, or its source.
pub(super) enum AccessKeyId {
    Text(String),
    Source(CredentialSource),
}

impl AccessKeyId {
    pub(super) fn relative_to(self, base: &Path) -> Self {
        match self {
            Self::Source(CredentialSource(source)) => Self::Source(CredentialSource(source.relative_to(base))),
            text @ Self::Text(_) => text,
        }
    }

    pub(super) fn source(&self) -> Option<&CredentialSource> {
        match self {
            Self::Text(_) => None,
            Self::Source(source) => Some(source),
        }
    }
}

impl Readable for AccessKeyId {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        match value.as_str() {
            Some(text) if aws::is_access_key_id(text) => Some(Self::Text(text.to_owned())),
            Some(text) if text.contains(':') => CredentialSource::read(value, path, findings).map(Self::Source),
            _ => {
                let expected =
                    "the id, such as \"AKIAIOSFODNN7EXAMPLE\", or its source, such as \"env:AWS_ACCESS_KEY_ID\"";
                findings.problem(path, "not the id of an access key", expected);
                None
            }
        }
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum AuthType {
    Auto,
    Aws(AwsAlgorithm),
    Basic,
    Bearer,
    Cookie,
    Header,
    Hmac,
    Minted(MintType),
    Path,
    Placeholder,
    Query,
    TlsClient,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Inject {
    Always,
    Named,
}

choice!(AuthType, "auto" => AuthType::Auto, "bearer" => AuthType::Bearer, "header" => AuthType::Header, "query_param" => AuthType::Query, "basic" => AuthType::Basic, "path" => AuthType::Path, "cookie" => AuthType::Cookie, "placeholder" => AuthType::Placeholder, "hmac" => AuthType::Hmac, "tls_client" => AuthType::TlsClient, "aws_sigv4" => AuthType::Aws(AwsAlgorithm::V4), "aws_sigv4a" => AuthType::Aws(AwsAlgorithm::V4a),
    "oauth2_client_credentials" => AuthType::Minted(MintType::ClientCredentials),
    "oauth2_refresh_token" => AuthType::Minted(MintType::RefreshToken),
    "oauth2_jwt_bearer" => AuthType::Minted(MintType::JwtBearer),
    "oauth2_token_exchange" => AuthType::Minted(MintType::TokenExchange),
    "github_app" => AuthType::Minted(MintType::GithubApp),
    "gcp_service_account" => AuthType::Minted(MintType::GcpServiceAccount),
    "azure_client_credentials" => AuthType::Minted(MintType::AzureClientCredentials)
);
impl AuthType {
    /// Returns the name in the configuration.
    fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Aws(AwsAlgorithm::V4) => "aws_sigv4",
            Self::Aws(AwsAlgorithm::V4a) => "aws_sigv4a",
            Self::Basic => "basic",
            Self::Bearer => "bearer",
            Self::Cookie => "cookie",
            Self::Header => "header",
            Self::Hmac => "hmac",
            Self::Minted(kind) => kind.name(),
            Self::Path => "path",
            Self::Placeholder => "placeholder",
            Self::Query => "query_param",
            Self::TlsClient => "tls_client",
        }
    }
}

choice!(Inject, "named" => Inject::Named, "always" => Inject::Always);

/// A source that can also be the vault.
pub(super) struct CredentialSource(pub(super) Source);

impl Readable for CredentialSource {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let of_vault = |text: &str| {
            let name = text.strip_prefix("secret:").or_else(|| text.strip_prefix("workspace-secret://"))?;
            Some(name.to_owned())
        };
        if let Some(reference) = value.as_str().and_then(StoreReference::parse) {
            let scheme = reference.as_ref().err().copied();
            if let Some(scheme) = scheme {
                findings.problem(path, "not a reference to a value in a secret store", scheme.form());
            }
            return reference.ok().map(|reference| Self(Source::Store(reference)));
        }
        if let Some(command) = value.as_str().and_then(CommandSource::parse) {
            let command = command.map_err(|problem| findings.problem(path, problem, command_source::FORM));
            return command.ok().map(|command| Self(Source::Command(command)));
        }
        match value.as_str().and_then(of_vault) {
            Some(name) if is_plain(&name) => Some(Self(Source::Secret(name))),
            Some(_) => {
                findings.problem(
                    path,
                    "not a valid secret name",
                    "\"secret:NAME\", with a NAME that `exeat secret list` shows",
                );
                None
            }
            None if value.as_str().is_some_and(|text| text.starts_with("env:") || text.starts_with("file:")) => {
                Source::read(value, path, findings).map(Self)
            }
            None => {
                // The text does not repeat the value, because it may be the secret itself.
                let expected = "\"secret:NAME\", \"env:NAME\", \"file:PATH\", a command in \"exec:\", or a reference such as \"vault://MOUNT/PATH#FIELD\", never the secret itself";
                findings.problem(path, "not the source of a secret", expected);
                None
            }
        }
    }
}

impl Readable for Binding {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        let with_port = text.rsplit_once(':').filter(|(host, _)| !host.contains(':') || host.ends_with(']'));
        let (host, port) = match with_port {
            Some((host, port)) => (host, port.parse::<u16>().ok().filter(|port| *port > 0).map(Some)),
            None => (text.as_str(), Some(None)),
        };
        let parsed = Host::parse(host).ok().filter(|parsed| parsed.to_string() == host);
        match (parsed, port) {
            (Some(host), Some(port)) => Some(Self { host, port }),
            _ => {
                let expected =
                    "a host in lower case, without wildcards, such as \"api.example.com\" or \"api.example.com:8443\"";
                findings.problem(path, format!("{} is not a single host", quoted(&text)), expected);
                None
            }
        }
    }
}

/// Reads one `[credentials.NAME]` section.
pub(super) fn read(mut s: Section<'_>, base: &Path) -> RawCredential {
    let missing = ["auth_type", "value"].map(|key| !s.has(key));
    // Its keys are in the table already.
    let _ = s.take::<String>(preset::KEY);
    RawCredential {
        missing,
        auth_type: s.take("auth_type"),
        auth_header_name: s.take("auth_header_name"),
        auth_query_name: s.take("auth_query_name"),
        auth_cookie_name: s.take("auth_cookie_name"),
        value: s.take::<CredentialSource>("value").map(|source| CredentialSource(source.0.relative_to(base))),
        certificate: s
            .take::<CredentialSource>("certificate")
            .map(|source| CredentialSource(source.0.relative_to(base))),
        domains: s.take("domains").unwrap_or_default(),
        inject: s.take("inject").unwrap_or(Inject::Named),
        placeholder: s.take("placeholder"),
        swap_in: s.take("swap_in").unwrap_or_default(),
        with: s.take("with").unwrap_or_default(),
        aws: RawAws {
            access_key_id: s.take::<AccessKeyId>("access_key_id").map(|id| id.relative_to(base)),
            session_token: s
                .take::<CredentialSource>("session_token")
                .map(|source| CredentialSource(source.0.relative_to(base))),
            region: s.take("region"),
            service: s.take("service"),
            role: s.optional("assume_role").map(RawRole::read),
        },
        hmac: s.optional("hmac").map(|s| RawHmac::read(s, base)),
        mint: RawMint::read(&mut s, base),
        keeping: RawKeeping { refresh: s.take("refresh"), max_stale: s.take("max_stale") },
        path: s.at("").trim_end_matches('.').to_owned(),
    }
}

impl RawCredential {
    /// Reports the problems that do not depend on the task.
    pub(super) fn check(&self, findings: &Findings) {
        let at = |key: &str| format!("{}.{key}", self.path);
        let [no_auth_type, no_value] = self.missing;
        let minted = self.minted();
        let takes_value = minted.is_none_or(MintType::has_value);
        let no_domains = self.domains.is_empty() && !findings.has(&at("domains"));
        if no_auth_type {
            findings.problem(
                at("auth_type"),
                "missing",
                "\"auto\", \"bearer\", \"header\", \"query_param\", \"basic\", \"path\", \"cookie\", \"placeholder\", \"hmac\", \"tls_client\", \"aws_sigv4\", \"aws_sigv4a\" or one that is minted, such as \"oauth2_client_credentials\"",
            );
        }
        if !takes_value && !no_value {
            findings.problem(at("value"), "the value of this auth_type is minted", "no value");
        }
        if takes_value && no_value {
            findings.problem(at("value"), "missing", "\"secret:NAME\", \"env:NAME\" or \"file:PATH\"");
        }
        if no_domains {
            findings.problem(at("domains"), "not bound to any host", "[\"api.example.com\"]");
        }
        match (&self.auth_header_name, self.auth_type) {
            (None, Some(AuthType::Header)) => {
                findings.problem(at("auth_header_name"), "missing", "a header name, such as \"X-Api-Key\"")
            }
            (Some(_), Some(kind)) if !matches!(kind, AuthType::Header | AuthType::Minted(_)) => {
                findings.problem(at("auth_header_name"), "requires auth_type = \"header\"", "no auth_header_name")
            }
            (Some(name), _) if field(name).is_none() => findings.problem(
                at("auth_header_name"),
                format!("{name:?} cannot carry a credential"),
                "another header name, such as \"X-Api-Key\"",
            ),
            _ => {}
        }
        match (&self.auth_query_name, self.auth_type) {
            (Some(_), Some(kind)) if kind != AuthType::Query => {
                findings.problem(at("auth_query_name"), "requires auth_type = \"query_param\"", "no auth_query_name")
            }
            (Some(name), _) if !is_parameter(name) => findings.problem(
                at("auth_query_name"),
                format!("{name:?} is not a valid parameter name"),
                "at most 64 letters, digits and any of -_.[]",
            ),
            _ => {}
        }
        match (&self.auth_cookie_name, self.auth_type) {
            (None, Some(AuthType::Cookie)) => {
                findings.problem(at("auth_cookie_name"), "missing", "the name of the cookie, such as \"session\"")
            }
            (Some(_), Some(kind)) if kind != AuthType::Cookie => {
                findings.problem(at("auth_cookie_name"), "requires auth_type = \"cookie\"", "no auth_cookie_name")
            }
            (Some(name), _) if !is_cookie_name(name) => findings.problem(
                at("auth_cookie_name"),
                format!("{name:?} is not the name of a cookie"),
                "at most 64 letters, digits and any of !#$%&'*+-.^_`|~",
            ),
            _ => {}
        }
        if let Some(placeholder) = &self.placeholder {
            let visible = placeholder.bytes().all(|b| b.is_ascii_graphic() && !b"\"',;\\".contains(&b));
            if placeholder.len() < MIN_PLACEHOLDER || !visible || placeholder.contains("${") {
                findings.problem(
                    at("placeholder"),
                    "not a valid placeholder",
                    "8 or more visible ASCII characters without quotes, commas, semicolons and backslashes, in the format of a real key",
                );
            }
        }
        for (i, place) in self.swap_in.iter().enumerate() {
            if placement(place).is_none() {
                findings.problem(
                    format!("{}[{i}]", at("swap_in")),
                    format!("{place:?} is not a place for a placeholder"),
                    "\"header:NAME\", \"query:NAME\", \"cookie:NAME\", \"path\", \"body:json\", \"body:json:/POINTER\", \"body:form\", \"body:form:NAME\", \"websocket\" or \"websocket:/POINTER\"",
                );
            }
        }
        self.check_aws(findings);
        if self.auth_type.is_some() {
            let is_fetched = self.fetched_value().is_some() || self.aws.role.is_some();
            self.mint.check(minted, is_fetched, &self.path, findings);
            self.check_stored(findings);
        }
        self.check_with(findings);
        self.check_hmac(findings);
        self.check_certificate(findings);
        let needs_placeholder = matches!(self.auth_type, Some(AuthType::Auto | AuthType::Path | AuthType::Placeholder));
        if needs_placeholder && self.inject == Inject::Always {
            findings.problem(
                at("inject"),
                "with this auth_type the value is sent only where its placeholder stands",
                "no inject, or another auth_type",
            );
        }
        let outside_of_head = |place: &String| {
            let place = placement(place);
            matches!(place, Some(Placement::Path | Placement::Json(_) | Placement::Form(_) | Placement::Message(_)))
        };
        if self.auth_type == Some(AuthType::Auto) && self.swap_in.iter().any(outside_of_head) {
            // An API with its key there may show any parameter to others, such as the text of a message.
            findings.problem(
                at("swap_in"),
                "with auth_type = \"auto\" the value could be sent in any parameter of such an API",
                "auth_type = \"path\", or \"placeholder\" with these places",
            );
        }
        if self.auth_type == Some(AuthType::Placeholder) && self.swap_in.is_empty() && !findings.has(&at("swap_in")) {
            findings.problem(
                at("swap_in"),
                "missing",
                "the places of the placeholder, such as [\"body:json:/api_key\"]",
            );
        }
    }

    /// Returns the source of a value that is fetched while the policy is in force.
    fn fetched_value(&self) -> Option<&Source> {
        self.value.as_ref().map(|CredentialSource(source)| source).filter(|source| source.is_fetched())
    }

    fn check_stored(&self, findings: &Findings) {
        let at = |key: &str| format!("{}.{key}", self.path);
        self.keeping.check(self.fetched_value().is_some(), &self.path, findings);
        let takes_store = !matches!(self.auth_type, Some(AuthType::TlsClient | AuthType::Minted(_)));
        if self.fetched_value().is_some() && !takes_store {
            let problem = "the value of this auth_type is read when the configuration is, which a secret store or a command is not";
            findings.problem(at("value"), problem, "\"secret:NAME\", \"env:NAME\" or \"file:PATH\"");
        }
        self.check_fetched_key(findings);
        let others = [
            ("certificate", self.certificate.as_ref()),
            ("hmac.key_id", self.hmac.as_ref().and_then(|hmac| hmac.key_id()?.source())),
        ];
        let stored = |source: Option<&CredentialSource>| source.is_some_and(|it| it.0.is_fetched());
        for (key, _) in others.into_iter().filter(|(_, source)| stored(*source)) {
            findings.problem(at(key), ONLY_VALUES, "\"secret:NAME\", \"env:NAME\" or \"file:PATH\"");
        }
    }

    /// Checks an AWS key of which a part is fetched: all such parts must be members of one item or output.
    fn check_fetched_key(&self, findings: &Findings) {
        let at = |key: &str| format!("{}.{key}", self.path);
        let is_aws = matches!(self.auth_type, Some(AuthType::Aws(_)));
        let value = self.fetched_value().filter(|_| is_aws);
        if value.is_some() && self.aws.role.is_some() {
            let problem =
                "the key of a role is read when the configuration is, which a secret store or a command is not";
            findings.problem(at("value"), problem, "\"secret:NAME\", \"env:NAME\" or \"file:PATH\"");
        }
        let id = self.aws.access_key_id.as_ref().and_then(AccessKeyId::source);
        for (key, part) in [("access_key_id", id), ("session_token", self.aws.session_token.as_ref())] {
            let Some(CredentialSource(part)) = part else { continue };
            match value {
                None if part.is_fetched() => {
                    findings.problem(at(key), ONLY_VALUES, "\"secret:NAME\", \"env:NAME\" or \"file:PATH\"")
                }
                // An id may be known before.
                Some(_) if key == "access_key_id" && !part.is_fetched() => {}
                Some(value) if member_beside(value, part).is_none() => {
                    let problem = "not a member of the item or output with the value";
                    findings.problem(at(key), problem, "the source of value, with another \"#MEMBER\"");
                }
                _ => {}
            }
        }
    }

    /// Returns the parts of an AWS key beside its secret, which is fetched. `None` if it is not, or for a problem that has been
    /// reported.
    fn fetched_key(&self, read: impl Fn(&CredentialSource) -> Option<String>) -> Option<FetchedAwsKey> {
        let value = self.fetched_value()?;
        let access_key_id = match self.aws.access_key_id.as_ref()? {
            AccessKeyId::Text(text) => FetchedKeyId::Text(text.clone()),
            AccessKeyId::Source(source) if source.0.is_fetched() => {
                FetchedKeyId::Member(member_beside(value, &source.0)?)
            }
            AccessKeyId::Source(source) => FetchedKeyId::Text(read(source)?),
        };
        let session_token = match &self.aws.session_token {
            Some(CredentialSource(source)) => Some(member_beside(value, source)?),
            None => None,
        };
        Some(FetchedAwsKey { access_key_id, session_token })
    }

    fn check_certificate(&self, findings: &Findings) {
        let at = |key: &str| format!("{}.{key}", self.path);
        match (&self.certificate, self.auth_type) {
            (None, Some(AuthType::TlsClient)) if !findings.has(&at("certificate")) => {
                findings.problem(at("certificate"), "missing", "\"file:client.pem\"")
            }
            (Some(_), Some(kind)) if kind != AuthType::TlsClient => {
                findings.problem(at("certificate"), "requires auth_type = \"tls_client\"", "no certificate")
            }
            _ => {}
        }
        if self.auth_type == Some(AuthType::TlsClient) {
            for (key, is_given) in [("swap_in", !self.swap_in.is_empty()), ("placeholder", self.placeholder.is_some())]
            {
                if is_given {
                    findings.problem(at(key), "the key of tls_client is never sent", format!("no {key}"));
                }
            }
        }
    }

    /// Returns the client certificate and its key. `None` if they cannot be used, after that has been reported.
    fn identity(&self, key: &Secret, secrets: &CredentialSecrets<'_>) -> Option<Arc<ClientIdentity>> {
        let CredentialSource(source) = self.certificate.as_ref()?;
        let certificate = secrets.document("certificate", source)?;
        match ClientIdentity::new(&certificate, key) {
            Ok(identity) => Some(Arc::new(identity)),
            Err(error) => {
                let at = if error == IdentityError::Key { "value" } else { "certificate" };
                let expected = "a certificate, and as value its private key, both in PEM";
                secrets.findings.problem(format!("{}.{at}", self.path), error.to_string(), expected);
                None
            }
        }
    }

    fn check_hmac(&self, findings: &Findings) {
        let at = |key: &str| format!("{}.{key}", self.path);
        match (&self.hmac, self.auth_type) {
            (None, Some(AuthType::Hmac)) => {
                findings.problem(at("hmac"), "missing", "[credentials.NAME.hmac] with sign and headers, or a preset")
            }
            (Some(_), Some(kind)) if kind != AuthType::Hmac => {
                findings.problem(at("hmac"), "requires auth_type = \"hmac\"", "no hmac")
            }
            // Also if no task has the credential.
            (Some(hmac), _) => {
                let id = hmac.key_id().map(|id| match id {
                    AccessKeyId::Text(text) => text.clone(),
                    // It is read for a task.
                    AccessKeyId::Source(_) => "id".to_owned(),
                });
                drop(hmac.recipe(id, &self.path, findings));
            }
            (None, _) => {}
        }
        if self.auth_type == Some(AuthType::Hmac) && !self.swap_in.is_empty() {
            findings.problem(at("swap_in"), "the key of hmac signs requests and is never sent", "no swap_in");
        }
    }

    /// Checks the names in `with`. Whether there are such credentials is checked with all of them.
    fn check_with(&self, findings: &Findings) {
        let at = format!("{}.with", self.path);
        if self.with.len() > MAX_WITH {
            findings.problem(&at, format!("more than {MAX_WITH} credentials beside this one"), "fewer");
        }
        let own = self.path.rsplit('.').next();
        for (i, name) in self.with.iter().enumerate() {
            if Some(name.as_str()) == own || self.with.iter().take(i).any(|other| other == name) {
                findings.problem(format!("{at}[{i}]"), format!("{name:?} is sent already"), "each credential once");
            }
        }
    }

    /// Returns the commands that print its secrets.
    pub(super) fn commands(&self) -> impl Iterator<Item = &[String]> {
        let sources = self.value.iter().map(|CredentialSource(source)| source).chain(self.mint.sources());
        sources.filter_map(|source| match source {
            Source::Command(source) => Some(source.command.as_slice()),
            _ => None,
        })
    }

    /// Returns the credentials that are sent beside this one.
    pub(super) fn with(&self) -> &[String] {
        &self.with
    }

    /// Returns the type, if the value is minted.
    fn minted(&self) -> Option<MintType> {
        match self.auth_type {
            Some(AuthType::Minted(kind)) => Some(kind),
            _ => None,
        }
    }

    fn check_aws(&self, findings: &Findings) {
        let at = |key: &str| format!("{}.{key}", self.path);
        let RawAws { access_key_id, session_token, region, service, role } = &self.aws;
        if self.auth_type.is_none() {
            return;
        }
        let Some(AuthType::Aws(algorithm)) = self.auth_type else {
            let given = [
                ("access_key_id", access_key_id.is_some()),
                ("session_token", session_token.is_some()),
                ("region", region.is_some()),
                ("service", service.is_some()),
                ("assume_role", role.is_some()),
            ];
            for (key, _) in given.into_iter().filter(|(_, is_given)| *is_given) {
                findings.problem(at(key), "requires auth_type = \"aws_sigv4\"", format!("no {key}"));
            }
            return;
        };
        if access_key_id.is_none() && !findings.has(&at("access_key_id")) {
            findings.problem(at("access_key_id"), "missing", "the id of the key, such as \"AKIAIOSFODNN7EXAMPLE\"");
        }
        for (key, name) in [("region", region), ("service", service)] {
            let is_set = key == "region" && algorithm == AwsAlgorithm::V4a;
            if name.as_ref().is_some_and(|name| if is_set { !aws::is_region_set(name) } else { !aws::is_name(name) }) {
                findings.problem(at(key), format!("not the name of a {key}"), "such as \"us-east-1\" or \"s3\"");
            }
        }
        if !self.swap_in.is_empty() {
            findings.problem(
                at("swap_in"),
                "the key of such a credential signs requests and is never sent",
                "no swap_in",
            );
        }
        if let Some(role) = role {
            role.check(one_region(region.as_deref()), findings);
        }
    }

    /// Returns the id of an AWS key from its source. `None` if it is not one, after that has been reported.
    fn key_id(
        &self,
        CredentialSource(source): &CredentialSource,
        place: (&str, &Settings),
        context: &CompileContext<'_>,
        findings: &Findings,
    ) -> Option<String> {
        let id = self.read("access_key_id", source, place, context, findings)?;
        let id = String::from_utf8(id.expose().to_vec()).ok().filter(|id| aws::is_access_key_id(id));
        if id.is_none() {
            let at = format!("{}.access_key_id", self.path);
            findings.problem(at, "its source does not hold the id of an access key", "16 letters and digits or more");
        }
        id
    }

    /// Returns the rest of an AWS key. `None` if it cannot be used, after that has been reported.
    fn aws_key(
        &self,
        workspace: &str,
        settings: &Settings,
        context: &CompileContext<'_>,
        findings: &Findings,
    ) -> Option<AwsKey> {
        let RawAws { access_key_id, session_token, .. } = &self.aws;
        let read = |key: &str, CredentialSource(source): &CredentialSource| {
            self.read(key, source, (workspace, settings), context, findings)
        };
        let access_key_id = match access_key_id.as_ref()? {
            AccessKeyId::Text(text) => text.clone(),
            AccessKeyId::Source(source) => self.key_id(source, (workspace, settings), context, findings)?,
        };
        let session_token = match session_token {
            None => None,
            Some(source) => Some(read("session_token", source)?),
        };
        let is_usable = |token: &Secret| {
            let value = token.expose();
            value.is_ascii() && !has_blank_edge(token) && value.len() <= MAX_VALUE && Strength::of(value).is_strong()
        };
        if session_token.as_ref().is_some_and(|token| !is_usable(token)) {
            findings.problem(format!("{}.session_token", self.path), "not a session token", "the token alone");
            return None;
        }
        Some(AwsKey { access_key_id, session_token: session_token.map(|token| Arc::new(HeldSecret::new(token))) })
    }

    /// Compiles the credential with its value in a workspace. Returns `None` if the section is invalid, after the
    /// problems have been reported.
    pub(super) fn compile(
        &self,
        name: &str,
        workspace: &str,
        (settings, stores): (&Settings, &SecretStores),
        context: &CompileContext<'_>,
        findings: &Findings,
    ) -> Option<Credential> {
        let auth = match self.auth_type? {
            AuthType::Auto => Auth::Auto,
            AuthType::Aws(algorithm) => Auth::Aws(algorithm),
            AuthType::Basic => Auth::Basic,
            AuthType::Bearer => Auth::Bearer,
            AuthType::Header => Auth::Header(field(self.auth_header_name.as_deref()?)?),
            AuthType::Hmac => {
                let hmac = self.hmac.as_ref()?;
                let id = match hmac.key_id() {
                    None => None,
                    Some(AccessKeyId::Text(text)) => Some(text.clone()),
                    Some(AccessKeyId::Source(CredentialSource(source))) => {
                        let read = self.read("hmac.key_id", source, (workspace, settings), context, findings)?;
                        Some(String::from_utf8_lossy(read.expose()).into_owned())
                    }
                };
                // Problems that do not depend on the task have been reported.
                let problems = Findings::default();
                let recipe = hmac.recipe(id, &self.path, &problems);
                if recipe.is_none() && matches!(hmac.key_id(), Some(AccessKeyId::Source(_))) {
                    findings.problem(
                        format!("{}.hmac.key_id", self.path),
                        "its source does not hold a name",
                        "visible ASCII characters",
                    );
                }
                Auth::Hmac(Arc::new(recipe?))
            }
            AuthType::Minted(_) => match &self.auth_header_name {
                Some(name) => Auth::Header(field(name)?),
                None => Auth::Bearer,
            },
            AuthType::Path => Auth::Path,
            AuthType::Cookie => Auth::Cookie(self.auth_cookie_name.clone().filter(|name| is_cookie_name(name))?),
            AuthType::Placeholder => Auth::Placeholder,
            AuthType::TlsClient => Auth::TlsClient,
            AuthType::Query => Auth::Query(self.auth_query_name.clone().unwrap_or_else(|| "api_key".to_owned())),
        };
        let minted = self.minted();
        let secrets = CredentialSecrets { of: self, place: (workspace, settings), stores, context, findings };
        let mut value = match auth {
            _ if minted.is_some() || self.fetched_value().is_some() => None,
            // It has several lines.
            Auth::TlsClient => self.value.as_ref().and_then(|CredentialSource(key)| secrets.document("value", key)),
            _ => self.value(&auth, workspace, settings, context, findings),
        };
        let mut identity = None;
        if auth == Auth::TlsClient {
            identity = value.as_ref().and_then(|key| self.identity(key, &secrets));
            value = value.filter(|_| identity.is_some());
        }
        let document = self.value.as_ref().map(|CredentialSource(source)| source);
        let is_aws = matches!(auth, Auth::Aws(_));
        let fetched_key = || self.fetched_key(|source| self.key_id(source, (workspace, settings), context, findings));
        let fetched_key = if is_aws { fetched_key() } else { None };
        // One whose parts are not known cannot sign.
        let fetched_value = self.fetched_value().filter(|_| !is_aws || fetched_key.is_some());
        let mut recipe = match (minted, fetched_value) {
            (Some(kind), _) => self.mint.recipe(kind, document, &secrets, (&self.path, findings)),
            (None, Some(Source::Command(command))) => {
                Some(command_recipe(command, fetched_key, self.keeping, self.mint.timeout()))
            }
            (None, Some(Source::Store(reference))) => {
                let at = format!("{}.value", self.path);
                stores.recipe((reference, fetched_key), self.keeping, self.mint.timeout(), (&at, findings))
            }
            (None, _) => None,
        };
        let RawAws { region, service, role, .. } = &self.aws;
        let aws = match auth {
            Auth::Aws(algorithm) => Some(AwsSigning { algorithm, region: region.clone(), service: service.clone() }),
            _ => None,
        };
        let has_key = is_aws && self.fetched_value().is_none();
        let mut aws_key = has_key.then(|| self.aws_key(workspace, settings, context, findings)).flatten();
        if aws.is_some() && aws_key.is_none() {
            value = None;
        }
        if let (Some(value), Some(placeholder)) = (&value, &self.placeholder)
            && memchr::memmem::find(value.expose(), placeholder.as_bytes()).is_some()
        {
            findings.problem(
                format!("{}.placeholder", self.path),
                "the value contains the placeholder",
                "another placeholder, in the format of a real key",
            );
        }
        if let Some(role) = role {
            let (key, secret) = (aws_key.take(), value.take());
            let request =
                key.zip(secret).and_then(|(key, secret)| role.request(key, secret, one_region(region.as_deref())));
            let method = request.map(|request| MintMethod::Role(Arc::new(request)));
            recipe = method.map(|method| MintRecipe { method, mint_timeout: self.mint.timeout() });
        }
        let source = match &recipe {
            Some(recipe) => recipe.source(),
            None => self.value.as_ref().map(|CredentialSource(source)| source.to_string()).unwrap_or_default(),
        };
        Some(Credential {
            name: CredentialName::new(name),
            workspace: workspace.to_owned(),
            kind: self.auth_type?.name(),
            source,
            auth,
            bound: self.domains.clone(),
            always: self.inject == Inject::Always,
            placeholder: self.placeholder.clone(),
            swap_in: self.swap_in.iter().filter_map(|place| placement(place)).collect(),
            with: self.with.iter().map(|name| CredentialName::new(name)).collect(),
            aws,
            aws_key,
            identity,
            value,
            minting: recipe.map(|recipe| Minting::new(recipe, workspace)),
            former: OnceLock::new(),
            strength: OnceLock::new(),
        })
    }

    /// Reads a source. `None` if it yields nothing, after that has been reported.
    fn read(
        &self,
        key: &str,
        source: &Source,
        (workspace, settings): (&str, &Settings),
        context: &CompileContext<'_>,
        findings: &Findings,
    ) -> Option<Secret> {
        let read = match source {
            Source::Secret(name) => context.secrets.secret(&settings.vault, workspace, name).and_then(usable),
            other => read_source(other, context.env),
        };
        self.reported(key, source, read, findings)
    }

    fn reported(
        &self,
        key: &str,
        source: &Source,
        read: Result<Secret, SourceError>,
        findings: &Findings,
    ) -> Option<Secret> {
        let at = format!("{}.{key}", self.path);
        match read {
            Ok(value) => Some(value),
            Err(SourceError::Missing(why)) => {
                findings
                    .warning(at, format!("{why}; the credential is disabled, and requests that use it are refused"));
                None
            }
            Err(SourceError::Unusable(why)) => {
                let expected = match source {
                    Source::Secret(_) => "the path and key of the vault in [vault], or another source",
                    _ => "a source that holds the value",
                };
                findings.problem(at, why, expected);
                None
            }
        }
    }

    fn value(
        &self,
        auth: &Auth,
        workspace: &str,
        settings: &Settings,
        context: &CompileContext<'_>,
        findings: &Findings,
    ) -> Option<Secret> {
        let at = format!("{}.value", self.path);
        let CredentialSource(source) = self.value.as_ref()?;
        let value = self.read("value", source, (workspace, settings), context, findings)?;
        let swap_in: Vec<Placement> = self.swap_in.iter().filter_map(|place| placement(place)).collect();
        if let Some(Unfit { problem, expected }) = unfit(&value, auth, &swap_in) {
            findings.problem(&at, problem, expected);
            return None;
        }
        if let Some(scheme) = repeated_scheme(&value, auth) {
            let problem =
                format!("the value begins with {scheme:?}, which auth_type = {:?} adds", scheme.to_ascii_lowercase());
            findings.warning(&at, format!("{problem}; store it without"));
        }
        Some(value)
    }
}

/// Reads the secrets of a recipe.
struct CredentialSecrets<'c> {
    of: &'c RawCredential,
    place: (&'c str, &'c Settings),
    stores: &'c SecretStores,
    context: &'c CompileContext<'c>,
    findings: &'c Findings,
}

impl ReadSecret for CredentialSecrets<'_> {
    fn line(&self, key: &str, source: &Source) -> Option<Secret> {
        let secret = self.of.read(key, source, self.place, self.context, self.findings)?;
        if secret.expose().len() > MAX_VALUE {
            let problem = format!("the secret is longer than {MAX_VALUE} bytes");
            self.findings.problem(format!("{}.{key}", self.of.path), problem, "a shorter one");
            return None;
        }
        Some(secret)
    }

    fn stored(&self, name: &str) -> StoredSecret {
        let (workspace, settings) = self.place;
        let store = self.context.secrets.store(&settings.vault);
        StoredSecret { store, workspace: workspace.to_owned(), name: name.to_owned() }
    }

    fn fetched(&self, key: &str, source: &Source) -> Option<SecretRead> {
        let at = format!("{}.{key}", self.of.path);
        self.stores.secret_read(source, key == "private_key", (&at, self.findings))
    }

    fn document(&self, key: &str, source: &Source) -> Option<Secret> {
        let (workspace, settings) = self.place;
        let read = match source {
            Source::Secret(name) => self.context.secrets.secret(&settings.vault, workspace, name),
            other => read_document(other, self.context.env),
        };
        self.of.reported(key, source, read.and_then(usable_document), self.findings)
    }
}

/// Reports credentials of one task that conflict with each other or with the task's integrations.
pub(super) fn check_task(
    task: &str,
    credentials: &[Arc<Credential>],
    integrations: &[Arc<Integration>],
    findings: &Findings,
) {
    let at = |i: usize| format!("tasks.{task}.credentials[{i}]");
    let (always, placeholders) = (always_for_one_host(credentials), overlapping_placeholders(credentials));
    let conflicts = |pairs: &BTreeSet<(usize, usize)>, i: usize| -> Vec<&CredentialName> {
        let others = pairs.range((i, 0)..=(i, i)).filter_map(|(_, other)| credentials.get(*other));
        others.map(|other| &other.name).collect()
    };
    for (i, credential) in credentials.iter().enumerate() {
        let name = &credential.name;
        for other in conflicts(&always, i) {
            let problem = format!("{name} and {other} are both always injected for the same host");
            findings.problem(at(i), problem, "inject = \"named\" for one of them");
        }
        for other in conflicts(&placeholders, i) {
            let problem = format!("{name} and {other} have overlapping placeholders");
            findings.problem(at(i), problem, "a distinct placeholder");
        }
        let named = |rule: &&Arc<Integration>| {
            rule.allowed.iter().any(|pattern| credential.bound.iter().any(|bound| pattern.matches(&bound.host)))
        };
        let meant: Vec<_> = integrations.iter().filter(named).collect();
        if let Some(opaque) = meant.iter().find(|rule| rule.mode == Mode::Opaque) {
            let problem = format!("{name} is bound to a host of {}, whose mode is \"opaque\"", opaque.name);
            findings.problem(at(i), problem, "mode = \"inspect\", or another host");
        }
        if meant.is_empty() {
            findings
                .warning(at(i), format!("{name} is bound to no host of this task's integrations, so it is never sent"));
        }
    }
    for (i, credential) in credentials.iter().enumerate().filter(|(_, credential)| !credential.with.is_empty()) {
        check_group(&at(i), credential, credentials, findings);
    }
    for rule in integrations {
        let required = rule.require_credential.as_ref();
        if let Some(name) = required.filter(|name| credentials.iter().all(|credential| credential.name != **name)) {
            let problem = format!("{} requires {name}, which the task does not have", rule.name);
            findings.problem(format!("tasks.{task}.credentials"), problem, format!("{:?} in this list", name.as_str()));
        }
    }
}

/// Reports problems of credentials that are sent together.
fn check_group(at: &str, first: &Arc<Credential>, credentials: &[Arc<Credential>], findings: &Findings) {
    let own = &first.name;
    let mut group: Vec<&Arc<Credential>> = vec![first];
    let mut next = 0;
    while let Some(one) = group.get(next).copied() {
        for name in &one.with {
            match credentials.iter().find(|other| other.name == *name) {
                Some(other) if group.iter().all(|known| known.name != *name) => group.push(other),
                Some(_) => {}
                None => {
                    let problem = format!("{own} is sent with {name}, which the task does not have");
                    return findings.problem(at, problem, format!("{:?} in this list too", name.as_str()));
                }
            }
        }
        next = next.saturating_add(1);
    }
    if group.len() > MAX_WITH.saturating_add(1) {
        let problem = format!("{own} brings {} credentials with it", group.len().saturating_sub(1));
        findings.problem(at, problem, format!("at most {MAX_WITH}"));
    }
    let covers = |bound: &Binding, wider: &Binding| {
        bound.host == wider.host && (wider.port.is_none() || wider.port == bound.port)
    };
    for (i, other) in group.iter().enumerate().skip(1) {
        let name = &other.name;
        if let Some(bound) = first.bound.iter().find(|bound| !other.bound.iter().any(|wider| covers(bound, wider))) {
            let problem = format!("{own} is sent with {name}, which is not bound to {}", bound.host);
            findings.problem(at, problem, format!("the same domains for {name}"));
        }
        if first.always && other.auth.needs_placeholder() {
            let problem =
                format!("{own} is always sent, and with it {name}, which is sent only where its placeholder stands");
            findings.problem(at, problem, "inject = \"named\"");
        }
        for earlier in group.iter().take(i) {
            let both = || (&earlier.name, name);
            let taken: Vec<Placement> = earlier.written_places().collect();
            if let Some(place) = other.written_places().find(|place| taken.iter().any(|other| place.excludes(other))) {
                let (one, two) = both();
                findings.problem(
                    at,
                    format!("{one} and {two} would be sent in the same place: {place}"),
                    "another auth_type",
                );
            }
            if earlier.is_signing_key() && other.is_signing_key() {
                let (one, two) = both();
                findings.problem(at, format!("{one} and {two} would both sign the request"), "one of them");
            }
        }
    }
}

/// Returns the pairs of credentials that are always injected for the same host, the later one first. They are looked up by
/// host, because a task may have thousands of credentials.
fn always_for_one_host(credentials: &[Arc<Credential>]) -> BTreeSet<(usize, usize)> {
    let mut earlier: HashMap<&Host, Vec<(usize, &Binding)>> = HashMap::new();
    let mut pairs = BTreeSet::new();
    for (i, credential) in credentials.iter().enumerate().filter(|(_, credential)| credential.always) {
        for binding in &credential.bound {
            let others = earlier.entry(&binding.host).or_default();
            pairs.extend(others.iter().filter(|(j, other)| *j != i && binding.overlaps(other)).map(|(j, _)| (i, *j)));
            others.push((i, binding));
        }
    }
    pairs
}

/// Returns the pairs of credentials of which one has a placeholder that contains the other's, the later one first. They
/// are looked up by the first bytes of the contained one.
fn overlapping_placeholders(credentials: &[Arc<Credential>]) -> BTreeSet<(usize, usize)> {
    let placeholders =
        || credentials.iter().enumerate().filter_map(|(i, credential)| Some((i, credential.placeholder()?.as_bytes())));
    let mut by_start: HashMap<&[u8], Vec<(usize, &[u8])>> = HashMap::new();
    for (i, placeholder) in placeholders() {
        if let Some(start) = placeholder.get(..MIN_PLACEHOLDER) {
            by_start.entry(start).or_default().push((i, placeholder));
        }
    }
    let mut pairs = BTreeSet::new();
    for (i, placeholder) in placeholders() {
        for (at, start) in placeholder.windows(MIN_PLACEHOLDER).enumerate() {
            let rest = placeholder.get(at..).unwrap_or_default();
            let contained = by_start.get(start).into_iter().flatten();
            let others = contained.filter(|(j, other)| *j != i && rest.starts_with(other));
            pairs.extend(others.map(|(j, _)| (i.max(*j), i.min(*j))));
        }
    }
    pairs
}

/// Returns the header field if it can carry a credential. Fields for framing, routing and the proxy itself cannot.
fn field(name: &str) -> Option<HeaderName> {
    let name: HeaderName = name.parse().ok()?;
    Placement::Field(name.clone()).can_hold_credential().then_some(name)
}

/// Parses `header:NAME`, `query:NAME`, `cookie:NAME`, `path`, or a place in a body or a message.
fn placement(place: &str) -> Option<Placement> {
    match place {
        "path" => return Some(Placement::Path),
        "body:json" => return Some(Placement::Json(None)),
        "body:form" => return Some(Placement::Form(None)),
        "websocket" => return Some(Placement::Message(None)),
        _ => {}
    }
    if let Some(pointer) = place.strip_prefix("body:json:") {
        return is_pointer(pointer).then(|| Placement::Json(Some(pointer.to_owned())));
    }
    if let Some(pointer) = place.strip_prefix("websocket:") {
        return is_pointer(pointer).then(|| Placement::Message(Some(pointer.to_owned())));
    }
    if let Some(name) = place.strip_prefix("body:form:") {
        return (1..=MAX_POINTER).contains(&name.len()).then(|| Placement::Form(Some(name.to_owned())));
    }
    match place.split_once(':')? {
        ("header", name) => field(name).map(Placement::Field),
        ("cookie", name) => is_cookie_name(name).then(|| Placement::Cookie(name.to_owned())),
        ("query", name) => is_parameter(name).then(|| Placement::Parameter(name.to_owned())),
        _ => None,
    }
}

/// Returns true for a JSON Pointer (RFC 6901 §3) to a member or an element.
fn is_pointer(pointer: &str) -> bool {
    let is_escaped = |token: &str| token.split('~').skip(1).all(|rest| rest.starts_with(['0', '1']));
    pointer.len() <= MAX_POINTER && pointer.starts_with('/') && pointer.split('/').all(is_escaped)
}

/// Returns the member of a source, if it is one beside that of the value: of the same item or output, and another one.
fn member_beside(value: &Source, part: &Source) -> Option<String> {
    let (of_value, of_part) = match (value, part) {
        (Source::Store(value), Source::Store(part)) if value.has_item_of(part) => (&value.member, &part.member),
        (Source::Command(value), Source::Command(part)) if value.command == part.command => {
            (&value.member, &part.member)
        }
        _ => return None,
    };
    let (of_value, of_part) = (of_value.as_ref()?, of_part.as_ref()?);
    (of_value != of_part).then(|| of_part.clone())
}

/// Returns the region, if it is not a set of regions.
fn one_region(region: Option<&str>) -> Option<&str> {
    region.filter(|region| aws::is_name(region))
}

fn is_parameter(name: &str) -> bool {
    Placement::Parameter(name.to_owned()).can_hold_credential()
}

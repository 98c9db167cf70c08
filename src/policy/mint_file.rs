//! `[credentials]`: the keys of credentials that are minted.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use zeroize::Zeroizing;

use super::credential_file::CredentialSource;
use super::held_secret::HeldSecret;
use super::hook_url::HookUrl;
use super::mint::{MintMethod, MintRecipe};
use super::reader::{Findings, Section};
use super::settings::Source;
use super::token_request::{
    Assertion, ClientAuth, FetchedSecret, SecretRead, StoredSecret, TokenGrant, TokenRequest, key_problem,
};
use crate::model::secret::Secret;

/// How long a request waits for a token, unless the configuration says otherwise.
const MINT_TIMEOUT: Duration = Duration::from_secs(10);
/// The longest time that a request may wait for a token.
const MAX_MINT_TIMEOUT: Duration = Duration::from_secs(60);
/// The life of a token whose server does not state it.
pub(super) const ASSUMED_LIFE: Duration = Duration::from_secs(3600);
/// The longest text of a key, in bytes.
const MAX_TEXT: usize = 2048;
/// The type of an access token (RFC 8693 §3).
const ACCESS_TOKEN: &str = "urn:ietf:params:oauth:token-type:access_token";
const GITHUB_API: &str = "https://api.github.com";
pub(super) const GOOGLE_TOKEN_URL: &str = "https://oauth2.googleapis.com/token";
pub(super) const MICROSOFT_LOGIN: &str = "https://login.microsoftonline.com";

/// The `auth_type`s whose values are minted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum MintType {
    AzureClientCredentials,
    ClientCredentials,
    GcpServiceAccount,
    GithubApp,
    JwtBearer,
    RefreshToken,
    TokenExchange,
}

/// A key of the section, for some types.
struct Key {
    name: &'static str,
    required: &'static [MintType],
    optional: &'static [MintType],
    example: &'static str,
}

use MintType::{
    AzureClientCredentials, ClientCredentials, GcpServiceAccount, GithubApp, JwtBearer, RefreshToken, TokenExchange,
};

/// The types with a token endpoint that takes forms.
const FORMS: &[MintType] = &[ClientCredentials, RefreshToken, JwtBearer, TokenExchange];
/// The keys with a text.
const TEXTS: [Key; 13] = [
    key("app_id", &[GithubApp], &[], "\"123456\""),
    key("audience", &[], FORMS, "the audience of the token"),
    key("client_auth", &[], FORMS, "\"client_secret_basic\", \"client_secret_post\" or \"private_key_jwt\""),
    key(
        "client_id",
        &[ClientCredentials, AzureClientCredentials],
        &[RefreshToken, JwtBearer, TokenExchange],
        "the id of the client",
    ),
    key("installation_id", &[GithubApp], &[], "\"12345678\""),
    key("issuer", &[JwtBearer], &[], "the claim iss of the assertion"),
    key("key_id", &[], &[ClientCredentials, RefreshToken, JwtBearer, TokenExchange], "the id of the private key"),
    key("scope", &[GcpServiceAccount, AzureClientCredentials], FORMS, "\"read write\""),
    key("subject", &[], &[JwtBearer, GcpServiceAccount], "the claim sub of the assertion"),
    key("subject_token_type", &[], &[TokenExchange], "the URI of the token's type"),
    key(
        "assertion_audience",
        &[],
        &[ClientCredentials, RefreshToken, JwtBearer, TokenExchange, GcpServiceAccount],
        "the claim aud of the assertion",
    ),
    key("tenant", &[], &[AzureClientCredentials], "the id of the tenant"),
    key(
        "token_url",
        FORMS,
        &[GithubApp, GcpServiceAccount, AzureClientCredentials],
        "\"https://login.example.com/oauth2/token\"",
    ),
];

/// The keys with the source of a secret.
const SOURCES: [Key; 4] = [
    key(
        "client_secret",
        &[AzureClientCredentials],
        &[ClientCredentials, RefreshToken, JwtBearer, TokenExchange],
        "\"secret:NAME\"",
    ),
    key("private_key", &[JwtBearer, GithubApp], &[ClientCredentials, RefreshToken, TokenExchange], "\"file:key.pem\""),
    key("refresh_token", &[RefreshToken], &[], "\"secret:NAME\", a secret of the vault"),
    key("subject_token", &[TokenExchange], &[], "\"file:token.jwt\""),
];

/// The keys with a list of texts.
const LISTS: [Key; 2] = [
    key("repositories", &[], &[GithubApp], "the names of repositories"),
    key("resource", &[], FORMS, "the URIs of resources"),
];

const fn key(
    name: &'static str,
    required: &'static [MintType],
    optional: &'static [MintType],
    example: &'static str,
) -> Key {
    Key { name, required, optional, example }
}

/// The keys of a credential that is minted.
pub(super) struct RawMint {
    texts: BTreeMap<&'static str, String>,
    sources: BTreeMap<&'static str, Source>,
    lists: BTreeMap<&'static str, Vec<String>>,
    permissions: Vec<(String, String)>,
    has_permissions: bool,
    mint_timeout: Option<Duration>,
    token_lifetime: Option<Duration>,
}

/// The secrets of a recipe, as they are read.
pub(super) trait ReadSecret {
    /// Returns the secret of a key, which is one line. `None` if it cannot be read, after that has been reported.
    fn line(&self, key: &str, source: &Source) -> Option<Secret>;

    /// Returns the vault of the credential, with the secret of this name in the workspace.
    fn stored(&self, name: &str) -> StoredSecret;

    /// Returns how the secret of a key is fetched. `None` if a problem has been reported.
    fn fetched(&self, key: &str, source: &Source) -> Option<SecretRead>;

    /// Returns the secret of a key, which may have several lines.
    fn document(&self, key: &str, source: &Source) -> Option<Secret>;
}

/// The members of a Google service account's key file that are used.
#[derive(serde::Deserialize)]
struct ServiceAccount {
    client_email: String,
    private_key: Zeroizing<String>,
    private_key_id: Option<String>,
}

impl MintType {
    pub(super) fn name(self) -> &'static str {
        match self {
            AzureClientCredentials => "azure_client_credentials",
            ClientCredentials => "oauth2_client_credentials",
            GcpServiceAccount => "gcp_service_account",
            GithubApp => "github_app",
            JwtBearer => "oauth2_jwt_bearer",
            RefreshToken => "oauth2_refresh_token",
            TokenExchange => "oauth2_token_exchange",
        }
    }

    /// Whether the type has the key `value`, which then holds a document with the secret.
    pub(super) fn has_value(self) -> bool {
        self == GcpServiceAccount
    }
}

impl Key {
    fn admits(&self, kind: MintType) -> bool {
        self.required.contains(&kind) || self.optional.contains(&kind)
    }

    fn types(&self) -> String {
        let all = self.required.iter().chain(self.optional);
        all.map(|kind| format!("{:?}", kind.name())).collect::<Vec<_>>().join(", ")
    }
}

impl RawMint {
    pub(super) fn read(s: &mut Section<'_>, base: &Path) -> Self {
        let has_permissions = s.has("permissions");
        let mut raw = Self {
            has_permissions,
            texts: BTreeMap::new(),
            sources: BTreeMap::new(),
            lists: BTreeMap::new(),
            permissions: if has_permissions { s.values::<String>("permissions") } else { Vec::new() },
            mint_timeout: s.take("mint_timeout"),
            token_lifetime: s.take("token_lifetime"),
        };
        for Key { name, .. } in TEXTS {
            raw.texts.extend(s.take::<String>(name).map(|text| (name, text)));
        }
        for Key { name, .. } in SOURCES {
            let source = s.take::<CredentialSource>(name);
            raw.sources.extend(source.map(|CredentialSource(source)| (name, source.relative_to(base))));
        }
        for Key { name, .. } in LISTS {
            raw.lists.extend(s.take::<Vec<String>>(name).map(|list| (name, list)));
        }
        raw
    }

    fn names(&self) -> impl Iterator<Item = &'static str> {
        let durations =
            [("mint_timeout", self.mint_timeout.is_some()), ("token_lifetime", self.token_lifetime.is_some())];
        let given = durations.into_iter().chain([("permissions", self.has_permissions)]);
        let given = given.filter(|(_, is_given)| *is_given).map(|(name, _)| name);
        self.texts.keys().chain(self.sources.keys()).chain(self.lists.keys()).copied().chain(given)
    }

    /// Returns the sources of its secrets.
    pub(super) fn sources(&self) -> impl Iterator<Item = &Source> {
        self.sources.values()
    }

    fn text(&self, name: &str) -> Option<String> {
        self.texts.get(name).cloned()
    }

    /// Reports the keys that a type does not have, those that it lacks, and those that are invalid.
    pub(super) fn check(&self, kind: Option<MintType>, is_fetched: bool, path: &str, findings: &Findings) {
        let at = |name: &str| format!("{path}.{name}");
        if self.mint_timeout.is_some_and(|timeout| timeout > MAX_MINT_TIMEOUT) {
            findings.problem(at("mint_timeout"), "too long", "at most 60s");
        }
        let keys = || TEXTS.into_iter().chain(SOURCES).chain(LISTS);
        let Some(kind) = kind else {
            for name in self.names().filter(|name| !(is_fetched && *name == "mint_timeout")) {
                let types = keys().find(|key| key.name == name).map(|key| key.types());
                let types = types.unwrap_or_else(|| "a type that is minted".to_owned());
                findings.problem(at(name), format!("requires auth_type = {types}"), format!("no {name}"));
            }
            return;
        };
        for key in keys() {
            let is_given = self.names().any(|name| name == key.name);
            if is_given && !key.admits(kind) {
                let problem = format!("not a key of auth_type = {:?}", kind.name());
                findings.problem(at(key.name), problem, format!("no {}", key.name));
            }
            if !is_given && key.required.contains(&kind) && !findings.has(&at(key.name)) {
                findings.problem(at(key.name), "missing", key.example);
            }
        }
        for (name, text) in &self.texts {
            if text.is_empty() || text.len() > MAX_TEXT || text.chars().any(char::is_control) {
                findings.problem(at(name), "not a text of this key", "1 to 2048 characters in one line");
            }
        }
        for name in ["app_id", "installation_id"] {
            if self
                .texts
                .get(name)
                .is_some_and(|text| !text.bytes().all(|b| b.is_ascii_alphanumeric() || b".-_".contains(&b)))
            {
                findings.problem(at(name), "not an id", "digits, or the client id of the app");
            }
        }
        if self.texts.get("tenant").is_some_and(|text| !is_tenant(text)) {
            findings.problem(at("tenant"), "not a tenant", "its id, or its domain");
        }
        for (name, list) in &self.lists {
            let is_text = |text: &String| (1..=MAX_TEXT).contains(&text.len()) && !text.chars().any(char::is_control);
            // An empty list of repositories would mean all of them.
            if list.is_empty() || !list.iter().all(is_text) {
                findings.problem(at(name), "not a list of texts", "at least one, each of 1 to 2048 characters");
            }
        }
        if self.has_permissions && self.permissions.is_empty() {
            findings.problem(at("permissions"), "an empty table would mean all permissions", "{ contents = \"read\" }");
        }
        let has_url = self.texts.contains_key("token_url");
        if kind == AzureClientCredentials && !has_url && !self.texts.contains_key("tenant") {
            findings.problem(at("tenant"), "missing", "the id of the tenant");
        }
        if kind == AzureClientCredentials && has_url && self.texts.contains_key("tenant") {
            findings.problem(at("tenant"), "the tenant is in token_url already", "no tenant, or no token_url");
        }
        if kind == GithubApp && self.token_lifetime.is_some() {
            findings.problem(at("token_lifetime"), "GitHub states the life of its tokens", "no token_lifetime");
        }
        if self.has_permissions && kind != GithubApp {
            findings.problem(at("permissions"), "requires auth_type = \"github_app\"", "no permissions");
        }
        if self.sources.get("refresh_token").is_some_and(|it| !matches!(it, Source::Secret(_))) {
            let problem = "a refresh token may be replaced by its server, and only the vault can store the new one";
            findings.problem(at("refresh_token"), problem, "\"secret:NAME\"");
        }
        self.check_client(kind, path, findings);
        if let Some(Err(error)) = self.url(kind) {
            findings.problem(at("token_url"), error, "\"https://login.example.com/oauth2/token\"");
        }
    }

    fn check_client(&self, kind: MintType, path: &str, findings: &Findings) {
        let at = |name: &str| format!("{path}.{name}");
        if !FORMS.contains(&kind) {
            return;
        }
        let has = |name: &str| self.sources.contains_key(name) || self.texts.contains_key(name);
        let (has_secret, signs_client) = (has("client_secret"), self.client_auth() == "private_key_jwt");
        match self.client_auth() {
            "client_secret_basic" | "client_secret_post"
                if !has_secret && (kind == ClientCredentials || has("client_auth")) =>
            {
                findings.problem(at("client_secret"), "missing", "\"secret:NAME\", or a private_key");
            }
            "client_secret_basic" | "client_secret_post" => {}
            "private_key_jwt" => {
                if !has("private_key") {
                    findings.problem(at("private_key"), "missing", "\"file:key.pem\"");
                } else if has_secret {
                    findings.problem(at("client_secret"), "not a key of private_key_jwt", "no client_secret");
                }
            }
            other => findings.problem(
                at("client_auth"),
                format!("{other:?} is not known"),
                "\"client_secret_basic\", \"client_secret_post\" or \"private_key_jwt\"",
            ),
        }
        if (has_secret || signs_client) && !has("client_id") && kind != ClientCredentials {
            findings.problem(at("client_id"), "missing", "the id of the client");
        }
        let signs = signs_client || kind == JwtBearer;
        for name in ["private_key", "key_id", "assertion_audience"].into_iter().filter(|name| has(name) && !signs) {
            findings.problem(at(name), "requires client_auth = \"private_key_jwt\"", format!("no {name}"));
        }
    }

    /// Returns the method of client authentication.
    fn client_auth(&self) -> &str {
        let is_signed = self.sources.contains_key("private_key") && !self.texts.contains_key("issuer");
        let usual = if is_signed { "private_key_jwt" } else { "client_secret_basic" };
        self.texts.get("client_auth").map_or(usual, String::as_str)
    }

    /// Returns the URL of the token endpoint. `None` if it is missing.
    fn url(&self, kind: MintType) -> Option<Result<HookUrl, String>> {
        let text = match (self.text("token_url"), kind) {
            (url, GithubApp) => {
                let api = url.unwrap_or_else(|| GITHUB_API.to_owned());
                format!(
                    "{}/app/installations/{}/access_tokens",
                    api.trim_end_matches('/'),
                    self.text("installation_id")?
                )
            }
            (Some(url), _) => url,
            (None, GcpServiceAccount) => GOOGLE_TOKEN_URL.to_owned(),
            (None, AzureClientCredentials) => format!("{MICROSOFT_LOGIN}/{}/oauth2/v2.0/token", self.text("tenant")?),
            (None, _) => return None,
        };
        let url = HookUrl::parse(&text).map_err(|error| error.to_string());
        Some(
            url.and_then(
                |url| if url.is_tls { Ok(url) } else { Err("it would be sent secrets without TLS".to_owned()) },
            ),
        )
    }

    /// Returns the recipe. `None` if a secret is missing or a key is invalid, after that has been reported.
    pub(super) fn recipe(
        &self,
        kind: MintType,
        value: Option<&Source>,
        secrets: &dyn ReadSecret,
        (path, findings): (&str, &Findings),
    ) -> Option<MintRecipe> {
        let url = self.url(kind)?.ok()?;
        let held = |secret: Secret| Arc::new(HeldSecret::new(secret));
        let mut fetched: Vec<FetchedSecret> = Vec::new();
        for (key, source) in self.sources.iter().filter(|(_, source)| source.is_fetched()) {
            fetched.push(FetchedSecret { key, read: secrets.fetched(key, source)? });
        }
        let source = |key: &str| {
            let source = self.sources.get(key)?;
            Some(if source.is_fetched() { None } else { Some(source) })
        };
        let pending = || Some(Arc::new(HeldSecret::pending()));
        let line = |key: &str| match source(key)? {
            Some(source) => secrets.line(key, source).map(held),
            None => pending(),
        };
        let private_key = || {
            let Some(source) = source("private_key")? else { return pending() };
            let key = secrets.document("private_key", source).map(held)?;
            is_private_key(key.secret(), &format!("{path}.private_key"), findings).then_some(key)
        };
        let audience = || self.text("assertion_audience").or_else(|| Some(full_url(&url)));
        let assertion = |issuer: String, subject: Option<String>| {
            let (key_id, key) = (self.text("key_id"), private_key()?);
            Some(Assertion { issuer, subject, audience: audience(), scope: None, key_id, key })
        };
        let client = match (kind, self.text("client_id"), self.client_auth()) {
            (GithubApp | GcpServiceAccount, ..) | (_, None, _) => ClientAuth::Anonymous,
            (AzureClientCredentials, Some(id), _) => ClientAuth::Post { id, secret: line("client_secret")? },
            (_, Some(id), "private_key_jwt") => {
                let assertion = assertion(id.clone(), Some(id.clone()))?;
                ClientAuth::PrivateKeyJwt { id, assertion }
            }
            (_, Some(id), _) if !self.sources.contains_key("client_secret") => ClientAuth::Public { id },
            (_, Some(id), "client_secret_post") => ClientAuth::Post { id, secret: line("client_secret")? },
            (_, Some(id), _) => ClientAuth::Basic { id, secret: line("client_secret")? },
        };
        let grant = match kind {
            ClientCredentials | AzureClientCredentials => TokenGrant::ClientCredentials,
            RefreshToken => {
                let Some(Source::Secret(name)) = self.sources.get("refresh_token") else { return None };
                TokenGrant::RefreshToken { token: line("refresh_token")?, stored: secrets.stored(name) }
            }
            JwtBearer => {
                let issuer = self.text("issuer")?;
                TokenGrant::JwtBearer(assertion(issuer.clone(), self.text("subject").or(Some(issuer)))?)
            }
            TokenExchange => {
                let kind = self.text("subject_token_type").unwrap_or_else(|| ACCESS_TOKEN.to_owned());
                let source = self.sources.get("subject_token")?.clone();
                let stored = match &source {
                    Source::Secret(name) => Some(secrets.stored(name)),
                    Source::Env(_) | Source::File(_) | Source::Store(_) | Source::Command(_) => None,
                };
                let subject_token = line("subject_token")?;
                TokenGrant::TokenExchange { subject_token, source, stored, subject_token_type: kind }
            }
            GcpServiceAccount => {
                let document = secrets.document("value", value?)?;
                let account = service_account(&document, &format!("{path}.value"), findings)?;
                TokenGrant::JwtBearer(Assertion {
                    issuer: account.client_email.clone(),
                    subject: self.text("subject"),
                    audience: audience(),
                    scope: self.text("scope"),
                    key_id: account.private_key_id.clone(),
                    key: held(Secret::new(account.private_key.as_bytes().to_vec())),
                })
            }
            GithubApp => TokenGrant::GithubInstallation {
                assertion: Assertion {
                    issuer: self.text("app_id")?,
                    subject: None,
                    audience: None,
                    scope: None,
                    key_id: None,
                    key: private_key()?,
                },
                repositories: self.lists.get("repositories").cloned().unwrap_or_default(),
                permissions: self.permissions.clone(),
            },
        };
        let (parameters, assumed_life) = (self.parameters(kind), self.token_lifetime.unwrap_or(ASSUMED_LIFE));
        let request = TokenRequest { url, grant, client, parameters, assumed_life, fetched };
        Some(MintRecipe { method: MintMethod::Token(Arc::new(request)), mint_timeout: self.timeout() })
    }

    /// Returns how long a request waits for a value.
    pub(super) fn timeout(&self) -> Duration {
        self.mint_timeout.unwrap_or(MINT_TIMEOUT)
    }

    fn parameters(&self, kind: MintType) -> Vec<(&'static str, String)> {
        let names = match kind {
            GithubApp => return Vec::new(),
            // Google reads the scope of the assertion.
            GcpServiceAccount => &[][..],
            _ => &["scope", "audience"][..],
        };
        let texts = names.iter().filter_map(|name| Some((*name, self.text(name)?)));
        let resources = self.lists.get("resource").into_iter().flatten().map(|resource| ("resource", resource.clone()));
        texts.chain(resources).collect()
    }
}

/// Returns true for the id or the domain of a tenant, which is a segment of a URL.
pub(super) fn is_tenant(text: &str) -> bool {
    text.bytes().all(|b| b.is_ascii_alphanumeric() || b".-".contains(&b))
}

/// Returns the request for a token by the key file of a Google service account. `None` if it is not one, after that has been
/// reported.
pub(super) fn google_request(
    document: &Secret,
    url: HookUrl,
    scope: String,
    (path, findings): (&str, &Findings),
) -> Option<TokenRequest> {
    let account = service_account(document, path, findings)?;
    let assertion = Assertion {
        issuer: account.client_email.clone(),
        subject: None,
        audience: Some(full_url(&url)),
        scope: Some(scope),
        key_id: account.private_key_id.clone(),
        key: Arc::new(HeldSecret::new(Secret::new(account.private_key.as_bytes().to_vec()))),
    };
    let (grant, client) = (TokenGrant::JwtBearer(assertion), ClientAuth::Anonymous);
    let (parameters, fetched) = (Vec::new(), Vec::new());
    Some(TokenRequest { url, grant, client, parameters, assumed_life: ASSUMED_LIFE, fetched })
}

/// Returns the whole URL, which is the usual audience of an assertion (RFC 7523 §3).
fn full_url(url: &HookUrl) -> String {
    format!("{url}{}", url.path())
}

/// Reports a private key that is not in PEM. Whether it can sign is found out when it does.
fn is_private_key(key: &Secret, path: &str, findings: &Findings) -> bool {
    let problem = key_problem(key);
    if let Some(problem) = problem {
        findings.problem(path, problem, "a key in PEM without a passphrase, with its line breaks");
    }
    problem.is_none()
}

fn service_account(document: &Secret, path: &str, findings: &Findings) -> Option<ServiceAccount> {
    let account = serde_json::from_slice::<ServiceAccount>(document.expose()).ok();
    if account.is_none() {
        // The error's text could have a part of the document.
        findings.problem(path, "not the key file of a service account", "JSON with client_email and private_key");
    }
    let account = account?;
    is_private_key(&Secret::new(account.private_key.as_bytes().to_vec()), path, findings).then_some(account)
}

#[cfg(test)]
mod tests {
    use crate::model::secret::Secret;
    use crate::policy::compile::{Config, compile};
    use crate::policy::reader::Problem;
    use crate::policy::settings::Vault;
    use crate::policy::source::{CompileContext, SecretSource, SourceError};

    /// A vault in which every secret exists.
    struct Everything;

    impl SecretSource for Everything {
        fn secret(&self, _: &Vault, _: &str, name: &str) -> Result<Secret, SourceError> {
            Ok(Secret::new(secret_text(name).into_bytes()))
        }
    }

    fn secret_text(name: &str) -> String {
        match name {
            "PEM" | "PARTNER_KEY" => "-----BEGIN PRIVATE KEY-----\nabc\n-----END PRIVATE KEY-----\n".to_owned(),
            "ACCOUNT" => r#"{"client_email":"a@b","private_key":"-----BEGIN PRIVATE KEY-----\nabc\n"}"#.to_owned(),
            "ENCRYPTED" => "-----BEGIN ENCRYPTED PRIVATE KEY-----\nabc\n-----END".to_owned(),
            "LONG" => "x".repeat(9000),
            other => format!("{other}: hJ7-rT2qLz"),
        }
    }

    fn problems(keys: &str) -> Vec<Problem> {
        let text = format!(
            "[credentials.C]\ndomains = [\"a.example\"]\n{keys}\n[integrations.a]\nallowed_domains = [\"a.example\"]\n\
             [tasks.t]\nintegrations = [\"a\"]\ncredentials = [\"C\"]\n"
        );
        compiled(&text).err().unwrap_or_default()
    }

    /// Compiles a text beside the files that the documentation names.
    fn compiled(text: &str) -> Result<Config, Vec<Problem>> {
        let dir = tempfile::tempdir().unwrap();
        for (file, secret) in [("client-key.pem", "PEM"), ("app.pem", "PEM"), ("service-account.json", "ACCOUNT")] {
            std::fs::write(dir.path().join(file), secret_text(secret)).unwrap();
        }
        let (base, state_dir) = (dir.path(), dir.path());
        compile(text, &CompileContext { base, state_dir, env: &|_| None, secrets: &Everything, is_offline: false })
    }

    /// The examples of the documentation, each as a whole configuration.
    #[test]
    fn the_examples_of_the_documentation_are_valid() {
        let page = include_str!("../../docs/credentials.md");
        let examples: Vec<&str> = page.split("```toml\n").skip(1).filter_map(|rest| rest.split("```").next()).collect();
        let mut recipes = Vec::new();
        for example in &examples {
            let names = example
                .lines()
                .filter_map(|line| line.strip_prefix("[credentials.")?.strip_suffix(']'))
                .filter(|name| !name.contains('.'));
            let names: Vec<String> = names.map(|name| format!("{name:?}")).collect();
            let task = match example.contains("[tasks.") {
                true => String::new(),
                false => format!("[tasks.t]\ncredentials = [{}]\n", names.join(", ")),
            };
            // The token of a task is of another machine.
            let text = format!("{example}\n{task}").replace("token = \"env:RESEARCH_TOKEN\"\n", "");
            let config = compiled(&text).unwrap_or_else(|problems| panic!("{example}: {problems:#?}"));
            let of_task = config.policy.tasks().flat_map(|task| task.credentials().iter().cloned());
            recipes.extend(of_task.filter(|one| one.recipe().is_some()).map(|one| one.name().to_string()));
        }
        // Those of VAULTED and JIRA are in files of another machine.
        recipes.sort();
        let stored = ["CRM_KEY", "GITHUB_TOKEN", "LEASED", "LICENSE", "LINEAR", "NOTION", "STRIPE", "WAREHOUSE"];
        let minted = ["CRM", "DEPLOY", "GITHUB", "GOOGLE", "GRAPH", "LEDGER", "MAIL", "PARTNER"];
        let mut want: Vec<&str> = stored.into_iter().chain(minted).collect();
        want.sort_unstable();
        assert_eq!(recipes, want);
    }

    const GITHUB: &str =
        "auth_type = \"github_app\"\napp_id = \"1\"\ninstallation_id = \"2\"\nprivate_key = \"secret:PEM\"\n";
    const CLIENT: &str =
        "auth_type = \"oauth2_client_credentials\"\ntoken_url = \"https://a.test/t\"\nclient_id = \"c\"\n";

    #[test]
    fn valid_keys_of_each_type() {
        let rows = [
            format!("{CLIENT}client_secret = \"secret:S\"\nscope = \"a\"\nresource = [\"urn:x\"]\naudience = \"y\""),
            format!("{CLIENT}client_secret = \"secret:S\"\nclient_auth = \"client_secret_post\"\nmint_timeout = \"3s\""),
            format!("{CLIENT}private_key = \"secret:PEM\"\nkey_id = \"k\"\nassertion_audience = \"z\""),
            format!("{CLIENT}client_secret = \"secret:S\"\nauth_header_name = \"X-Token\"\ntoken_lifetime = \"5m\""),
            "auth_type = \"oauth2_refresh_token\"\ntoken_url = \"https://a.test/t\"\nrefresh_token = \"secret:R\"".to_owned(),
            "auth_type = \"oauth2_jwt_bearer\"\ntoken_url = \"https://a.test/t\"\nissuer = \"i\"\nprivate_key = \"secret:PEM\"".to_owned(),
            "auth_type = \"oauth2_token_exchange\"\ntoken_url = \"https://a.test/t\"\nsubject_token = \"secret:T\"".to_owned(),
            "auth_type = \"github_app\"\napp_id = \"Iv1.abc\"\ninstallation_id = \"1\"\nprivate_key = \"secret:PEM\"\npermissions = { issues = \"write\" }".to_owned(),
            "auth_type = \"gcp_service_account\"\nvalue = \"secret:ACCOUNT\"\nscope = \"s\"\nsubject = \"u@b\"".to_owned(),
            "auth_type = \"azure_client_credentials\"\ntenant = \"t.example\"\nclient_id = \"c\"\nclient_secret = \"secret:S\"\nscope = \"s\"".to_owned(),
        ];
        for keys in rows {
            assert_eq!(problems(&keys), [], "{keys}");
        }
    }

    #[test]
    fn invalid_keys_are_reported_at_their_places() {
        let client = |more: &str| format!("{CLIENT}{more}");
        let with_secret = |more: &str| format!("{CLIENT}client_secret = \"secret:S\"\n{more}");
        let rows = [
            (client(""), "client_secret", "missing"),
            (client("value = \"secret:S\"\nclient_secret = \"secret:S\""), "value", "minted"),
            (with_secret("refresh_token = \"secret:R\""), "refresh_token", "not a key of"),
            (with_secret("tenant = \"t\""), "tenant", "not a key of"),
            (with_secret("client_auth = \"magic\""), "client_auth", "not known"),
            (with_secret("client_auth = \"private_key_jwt\""), "private_key", "missing"),
            (with_secret("mint_timeout = \"5m\""), "mint_timeout", "too long"),
            (with_secret("token_lifetime = \"0s\""), "token_lifetime", "invalid value"),
            (with_secret("scope = \"\""), "scope", "not a text"),
            (with_secret("key_id = \"k\""), "key_id", "private_key_jwt"),
            (with_secret("permissions = { a = \"read\" }"), "permissions", "github_app"),
            (with_secret("resource = []"), "resource", "not a list"),
            (format!("{GITHUB}repositories = []"), "repositories", "not a list"),
            (format!("{GITHUB}permissions = {{}}"), "permissions", "all permissions"),
            (format!("{GITHUB}token_lifetime = \"1h\""), "token_lifetime", "GitHub states"),
            ("auth_type = \"bearer\"\nvalue = \"secret:S\"\npermissions = {}".to_owned(), "permissions", "a type that is minted"),
            (client("private_key = \"secret:ENCRYPTED\""), "private_key", "encrypted"),
            ("auth_type = \"azure_client_credentials\"\ntoken_url = \"https://a.test/\"\ntenant = \"t\"\nclient_id = \"c\"\nclient_secret = \"secret:S\"\nscope = \"s\"".to_owned(), "tenant", "already"),
            (with_secret("").replace("https://a.test/t", "http://127.0.0.1/t"), "token_url", "without TLS"),
            (with_secret("").replace("https://a.test/t", "http://a.test/t"), "token_url", "http://"),
            (with_secret("").replace("https://a.test/t", "https://u:p@a.test/t"), "token_url", "user or password"),
            (client("client_secret = \"secret:LONG\""), "client_secret", "longer than 8192"),
            (client("private_key = \"secret:S\""), "private_key", "not a private key"),
            (client("private_key = \"secret:PEM\"\nclient_secret = \"secret:S\""), "client_secret", "not a key of private_key_jwt"),
            ("auth_type = \"oauth2_refresh_token\"\ntoken_url = \"https://a.test/t\"\nrefresh_token = \"file:r\"".to_owned(), "refresh_token", "only the vault"),
            ("auth_type = \"github_app\"\napp_id = \"1\"\nprivate_key = \"secret:PEM\"".to_owned(), "installation_id", "missing"),
            ("auth_type = \"github_app\"\napp_id = \"1\"\ninstallation_id = \"1/../2\"\nprivate_key = \"secret:PEM\"".to_owned(), "installation_id", "not an id"),
            ("auth_type = \"gcp_service_account\"\nvalue = \"secret:S\"\nscope = \"s\"".to_owned(), "value", "key file of a service account"),
            ("auth_type = \"azure_client_credentials\"\ntenant = \"a/b\"\nclient_id = \"c\"\nclient_secret = \"secret:S\"\nscope = \"s\"".to_owned(), "tenant", "not a tenant"),
            ("auth_type = \"bearer\"\nvalue = \"secret:S\"\ntoken_url = \"https://a.test\"".to_owned(), "token_url", "requires auth_type"),
            ("auth_type = \"bearer\"\nvalue = \"secret:S\"\nmint_timeout = \"3s\"".to_owned(), "mint_timeout", "a type that is minted"),
        ];
        for (keys, key, want) in rows {
            let found = problems(&keys);
            let at = format!("credentials.C.{key}");
            let is_found = found.iter().any(|problem| problem.path == at && problem.problem.contains(want));
            assert!(is_found && found.len() == 1, "{keys}: {found:#?}");
            assert!(!format!("{found:?}").contains("hJ7-rT2qLz"));
        }
    }
}

//! `[secret_stores]`: the servers that hold the values of credentials.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use toml::Value;

use super::aws::{self, FetchedAwsKey};
use super::command_source::{CommandRead, CommandSource};
use super::credential_file::{AccessKeyId, CredentialSource};
use super::held_secret::HeldSecret;
use super::hook_url::HookUrl;
use super::mint::{MintMethod, MintRecipe};
use super::mint_file::{self, ASSUMED_LIFE, GOOGLE_TOKEN_URL, MICROSOFT_LOGIN};
use super::reader::{Findings, Readable, Section};
use super::secret_store::{
    ACCESS_KEY_ID, LoginSecret, StoreItem, StoreLogin, StoreRead, StoreReference, StoreScheme, StoreServer,
};
use super::settings::Source;
use super::source::{CompileContext, SourceError, read_document, read_source};
use super::token_request::{ClientAuth, SecretRead, TokenGrant, TokenRequest};
use crate::model::secret::Secret;

/// How long a value is used before it is read again.
const REFRESH: Duration = Duration::from_secs(600);
/// The shortest and the longest such time.
const REFRESH_RANGE: std::ops::RangeInclusive<Duration> = Duration::from_secs(1)..=Duration::from_secs(24 * 3600);
/// How much longer a value is used while its store does not answer.
const MAX_STALE: Duration = Duration::from_secs(3600);
/// The longest such time.
const LONGEST_STALE: Duration = Duration::from_secs(7 * 24 * 3600);
/// The longest text of a key, in bytes.
const MAX_TEXT: usize = 1024;

/// `[secret_stores]`.
#[derive(Default)]
pub(super) struct SecretStores {
    servers: Vec<(StoreScheme, Arc<StoreServer>)>,
    /// The sections that are there, also those with problems.
    given: Vec<StoreScheme>,
    /// The engines of Vault by the segments of their path, the longest first.
    engines: Vec<(Vec<String>, Engine)>,
    aws: Option<AwsStore>,
    azure: Option<AzureStore>,
}

/// A kind of secrets engine of Vault.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Engine {
    Kv1,
    Kv2,
    Dynamic,
}

super::reader::choice!(Engine, "kv-v1" => Engine::Kv1, "kv-v2" => Engine::Kv2, "dynamic" => Engine::Dynamic);

/// The keys of a credential whose value is in a secret store, or printed by a command.
#[derive(Clone, Copy, Default)]
pub(super) struct RawKeeping {
    pub(super) refresh: Option<Duration>,
    pub(super) max_stale: Option<Duration>,
}

/// A text of one line.
struct Line(String);

impl Readable for Line {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let text = String::read(value, path, findings)?;
        let is_line = (1..=MAX_TEXT).contains(&text.len()) && !text.chars().any(char::is_control);
        if !is_line {
            findings.problem(path, "not a text of this key", "1 to 1024 characters in one line");
        }
        is_line.then_some(Self(text))
    }
}

/// A path in Vault.
struct VaultPath(Vec<String>);

impl Readable for VaultPath {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let Line(text) = Line::read(value, path, findings)?;
        let parsed = vault_path(&text);
        if parsed.is_none() {
            findings.problem(
                path,
                format!("{text:?} is not a path"),
                "names with slashes between them, such as \"team/kv\"",
            );
        }
        parsed.map(Self)
    }
}

fn vault_path(text: &str) -> Option<Vec<String>> {
    let is_name = |name: &str| !matches!(name, "" | "." | "..") && !name.contains(|c| "?#%\\".contains(c));
    let names = text.split('/');
    names.clone().all(is_name).then(|| names.map(str::to_owned).collect())
}

/// Reads `[secret_stores]`, and the secrets of the logins.
pub(super) fn read(mut s: Section<'_>, base: &Path) -> RawStores {
    let vault = s.optional("vault").map(|s| RawVault::read(s, base));
    let one_password = s.optional("one_password").map(|s| RawOnePassword::read(s, base));
    let aws = s.optional("aws").map(|s| RawAws::read(s, base));
    let gcp = s.optional("gcp").map(|s| RawGoogle::read(s, base));
    let azure = s.optional("azure").map(|s| RawAzure::read(s, base));
    RawStores { vault, one_password, aws, gcp, azure }
}

/// The sections as they are read.
pub(super) struct RawStores {
    vault: Option<RawVault>,
    one_password: Option<RawOnePassword>,
    aws: Option<RawAws>,
    gcp: Option<RawGoogle>,
    azure: Option<RawAzure>,
}

struct RawAws {
    at: String,
    region: Option<String>,
    endpoint: Option<HookUrl>,
    access_key_id: Option<AccessKeyId>,
    secret_access_key: Option<Source>,
    session_token: Option<Source>,
}

struct RawGoogle {
    at: String,
    endpoint: Option<HookUrl>,
    token_url: Option<HookUrl>,
    credentials: Option<Source>,
}

struct RawAzure {
    at: String,
    /// With `{vault}`.
    endpoint: Option<String>,
    scope: Option<String>,
    token_url: Option<HookUrl>,
    tenant: Option<String>,
    client_id: Option<String>,
    client_secret: Option<Source>,
}

struct RawVault {
    at: String,
    address: Option<HookUrl>,
    namespace: Option<String>,
    auth: VaultAuth,
    auth_mount: Option<Vec<String>>,
    role: Option<String>,
    role_id: Option<String>,
    token: Option<Source>,
    secret_id: Option<Source>,
    jwt: Option<Source>,
    engines: Vec<(Vec<String>, Engine)>,
}

struct RawOnePassword {
    at: String,
    address: Option<HookUrl>,
    token: Option<Source>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum VaultAuth {
    Token,
    AppRole,
    Kubernetes,
}

super::reader::choice!(VaultAuth, "token" => VaultAuth::Token, "approle" => VaultAuth::AppRole, "kubernetes" => VaultAuth::Kubernetes);

const ADDRESS: &str = "\"https://HOST[:PORT]\"";

/// Reads the address of a server, which has no default.
fn address(s: &mut Section<'_>) -> Option<HookUrl> {
    if !s.has("address") {
        s.findings().problem(s.at("address"), "missing", ADDRESS);
    }
    url(s, "address")
}

/// Reads a URL. Without TLS, only a program on this machine is sent secrets.
fn url(s: &mut Section<'_>, key: &'static str) -> Option<HookUrl> {
    let path = s.at(key);
    let text = s.take::<String>(key);
    let findings = s.findings();
    match HookUrl::parse(&text?) {
        Ok(url) if url.path().contains('?') => {
            findings.problem(path, "the URL has a query", ADDRESS);
            None
        }
        Ok(url) => Some(url),
        Err(error) => {
            findings.problem(path, error.to_string(), ADDRESS);
            None
        }
    }
}

fn source(s: &mut Section<'_>, key: &'static str, base: &Path) -> Option<Source> {
    s.take::<Source>(key).map(|source| source.relative_to(base))
}

impl RawVault {
    fn read(mut s: Section<'_>, base: &Path) -> Self {
        let at = s.path().to_owned();
        let address = address(&mut s);
        let has_auth = s.has("auth");
        let auth = s.take::<VaultAuth>("auth");
        if !has_auth {
            let expected = "\"token\", \"approle\" or \"kubernetes\"";
            s.findings().problem(s.at("auth"), "missing", expected);
        }
        let line = |s: &mut Section<'_>, key| s.take::<Line>(key).map(|Line(text)| text);
        let (namespace, role, role_id) = (line(&mut s, "namespace"), line(&mut s, "role"), line(&mut s, "role_id"));
        let auth_mount = s.take::<VaultPath>("auth_mount").map(|VaultPath(path)| path);
        let sources = ["token", "secret_id", "jwt"].map(|key| (key, source(&mut s, key, base)));
        let mut engines = Vec::new();
        for (mount, engine) in s.values::<Engine>("engines") {
            match vault_path(&mount) {
                Some(path) => engines.push((path, engine)),
                None => {
                    let path = format!("{}.{mount:?}", s.at("engines"));
                    s.findings().problem(path, "not the path of an engine", "such as \"secret\" or \"team/kv\"");
                }
            }
        }
        engines.sort_by_key(|(path, _)| std::cmp::Reverse(path.len()));
        let own: &[&str] = match auth {
            Some(VaultAuth::Token) => &["token"],
            Some(VaultAuth::AppRole) => &["role_id", "secret_id", "auth_mount"],
            Some(VaultAuth::Kubernetes) => &["role", "jwt", "auth_mount"],
            None => &["token", "role_id", "secret_id", "role", "jwt", "auth_mount"],
        };
        let required = |key: &str| auth.is_some() && own.contains(&key) && key != "auth_mount";
        let given = [
            ("auth_mount", auth_mount.is_some(), ""),
            ("jwt", sources.iter().any(|(key, it)| *key == "jwt" && it.is_some()), JWT),
            ("role", role.is_some(), "the name of the role"),
            ("role_id", role_id.is_some(), "the id of the role"),
            ("secret_id", sources.iter().any(|(key, it)| *key == "secret_id" && it.is_some()), "\"file:secret-id\""),
            ("token", sources.iter().any(|(key, it)| *key == "token" && it.is_some()), "\"file:vault-token\""),
        ];
        for (key, is_given, expected) in given {
            let path = s.at(key);
            if is_given && !own.contains(&key) {
                s.findings().problem(path, "not a key of this auth", format!("no {key}"));
            } else if !is_given && required(key) && !s.findings().has(&path) {
                s.findings().problem(path, "missing", expected);
            }
        }
        let [(_, token), (_, secret_id), (_, jwt)] = sources;
        let auth = auth.unwrap_or(VaultAuth::Token);
        Self { at, address, namespace, auth, auth_mount, role, role_id, token, secret_id, jwt, engines }
    }

    fn server(&self, secrets: &LoginSources<'_>) -> Option<StoreServer> {
        let url = self.address.clone()?;
        let namespace = self.namespace.clone();
        let mount = |usual: &str| self.auth_mount.clone().unwrap_or_else(|| vec![usual.to_owned()]);
        let secret = |key, source: &Option<Source>| Some(secrets.read(&self.at, key, source.as_ref()?));
        let (login, secret) = match self.auth {
            VaultAuth::Token => (StoreLogin::VaultToken { namespace }, secret("token", &self.token)?),
            VaultAuth::AppRole => {
                let role = ("role_id", self.role_id.clone()?);
                let login = StoreLogin::Vault { namespace, mount: mount("approle"), role, secret: "secret_id" };
                (login, secret("secret_id", &self.secret_id)?)
            }
            VaultAuth::Kubernetes => {
                let role = ("role", self.role.clone()?);
                let login = StoreLogin::Vault { namespace, mount: mount("kubernetes"), role, secret: "jwt" };
                (login, secret("jwt", &self.jwt)?)
            }
        };
        Some(StoreServer { url, login, secrets: vec![secret] })
    }
}

const JWT: &str = "\"file:/var/run/secrets/kubernetes.io/serviceaccount/token\"";

impl RawOnePassword {
    fn read(mut s: Section<'_>, base: &Path) -> Self {
        let (at, address, token) = (s.path().to_owned(), address(&mut s), source(&mut s, "token", base));
        if token.is_none() && !s.findings().has(&s.at("token")) {
            s.findings().problem(s.at("token"), "missing", "\"env:OP_CONNECT_TOKEN\" or \"file:PATH\"");
        }
        Self { at, address, token }
    }

    fn server(&self, secrets: &LoginSources<'_>) -> Option<StoreServer> {
        let secret = secrets.read(&self.at, "token", self.token.as_ref()?);
        Some(StoreServer { url: self.address.clone()?, login: StoreLogin::Bearer, secrets: vec![secret] })
    }
}

/// Reports the keys that are missing, unless they are invalid.
fn require(s: &Section<'_>, keys: &[(&str, bool, &str)]) {
    for (key, _, expected) in keys.iter().filter(|(_, is_given, _)| !is_given) {
        if !s.findings().has(&s.at(key)) {
            s.findings().problem(s.at(key), "missing", *expected);
        }
    }
}

impl RawAws {
    fn read(mut s: Section<'_>, base: &Path) -> Self {
        let (at, region, endpoint) = (s.path().to_owned(), s.take::<String>("region"), url(&mut s, "endpoint"));
        if region.as_ref().is_some_and(|region| !aws::is_name(region)) {
            s.findings().problem(s.at("region"), "not the name of a region", "such as \"us-east-1\"");
        }
        let access_key_id = s.take::<AccessKeyId>("access_key_id").map(|id| id.relative_to(base));
        let secret_access_key = source(&mut s, "secret_access_key", base);
        let session_token = source(&mut s, "session_token", base);
        if access_key_id.as_ref().and_then(AccessKeyId::source).is_some_and(|it| !it.0.is_local()) {
            s.findings().problem(
                s.at("access_key_id"),
                "not the source of an id here",
                "\"env:NAME\" or \"file:PATH\"",
            );
        }
        require(
            &s,
            &[
                ("region", region.is_some(), "such as \"us-east-1\""),
                ("access_key_id", access_key_id.is_some(), "the id, or \"env:AWS_ACCESS_KEY_ID\""),
                ("secret_access_key", secret_access_key.is_some(), "\"env:AWS_SECRET_ACCESS_KEY\" or \"file:PATH\""),
            ],
        );
        Self { at, region, endpoint, access_key_id, secret_access_key, session_token }
    }

    /// Returns the store of each service: its server, without the region of an ARN.
    fn store(&self, secrets: &LoginSources<'_>) -> Option<AwsStore> {
        let mut held = vec![secrets.read(&self.at, "secret_access_key", self.secret_access_key.as_ref()?)];
        if let Some(source) = &self.session_token {
            held.push(secrets.read(&self.at, "session_token", source));
        }
        let access_key_id = match self.access_key_id.as_ref()? {
            AccessKeyId::Text(text) => Some(text.clone()),
            AccessKeyId::Source(CredentialSource(source)) => {
                held.push(secrets.read(&self.at, ACCESS_KEY_ID, source));
                None
            }
        };
        let region = self.region.clone().filter(|region| aws::is_name(region))?;
        Some(AwsStore { endpoint: self.endpoint.clone(), region, access_key_id, secrets: held })
    }
}

/// The services of AWS.
struct AwsStore {
    endpoint: Option<HookUrl>,
    region: String,
    access_key_id: Option<String>,
    secrets: Vec<LoginSecret>,
}

impl AwsStore {
    /// Returns the server of an item. An ARN names its region.
    fn server(&self, service: &str, id: &str) -> Option<StoreServer> {
        let of_arn = id.strip_prefix("arn:").and_then(|rest| rest.split(':').nth(2)).filter(|name| aws::is_name(name));
        let region = of_arn.unwrap_or(&self.region).to_owned();
        let suffix = if region.starts_with("cn-") { ".cn" } else { "" };
        let url = match &self.endpoint {
            Some(endpoint) => endpoint.clone(),
            None => HookUrl::parse(&format!("https://{service}.{region}.amazonaws.com{suffix}")).ok()?,
        };
        let login = StoreLogin::Aws { access_key_id: self.access_key_id.clone(), region };
        Some(StoreServer { url, login, secrets: self.secrets.clone() })
    }
}

impl RawGoogle {
    fn read(mut s: Section<'_>, base: &Path) -> Self {
        let (at, endpoint, token_url) = (s.path().to_owned(), url(&mut s, "endpoint"), url(&mut s, "token_url"));
        let credentials = source(&mut s, "credentials", base);
        require(&s, &[("credentials", credentials.is_some(), "the key file of a service account, \"file:PATH\"")]);
        Self { at, endpoint, token_url, credentials }
    }

    fn server(&self, secrets: &LoginSources<'_>) -> Option<StoreServer> {
        let path = format!("{}.credentials", self.at);
        let document = secrets.document(&path, self.credentials.as_ref()?)?;
        let url = self.token_url.clone().or_else(|| HookUrl::parse(GOOGLE_TOKEN_URL).ok())?;
        let scope = "https://www.googleapis.com/auth/cloud-platform".to_owned();
        let request = mint_file::google_request(&document, url, scope, (&path, secrets.findings))?;
        let url = self.endpoint.clone().or_else(|| HookUrl::parse("https://secretmanager.googleapis.com").ok())?;
        Some(StoreServer { url, login: StoreLogin::Token(Arc::new(request)), secrets: Vec::new() })
    }
}

impl RawAzure {
    fn read(mut s: Section<'_>, base: &Path) -> Self {
        let line = |s: &mut Section<'_>, key| s.take::<Line>(key).map(|Line(text)| text);
        let (at, endpoint, token_url) = (s.path().to_owned(), line(&mut s, "endpoint"), url(&mut s, "token_url"));
        let is_endpoint = |text: &String| text.contains(VAULT_MARK) && azure_url(text, "vault").is_some();
        if endpoint.as_ref().is_some_and(|text| !is_endpoint(text)) {
            let expected = "\"https://{vault}.vault.azure.cn\"";
            s.findings().problem(s.at("endpoint"), "not a URL with the name of the vault in it", expected);
        }
        let (tenant, client_id, scope) = (line(&mut s, "tenant"), line(&mut s, "client_id"), line(&mut s, "scope"));
        let client_secret = source(&mut s, "client_secret", base);
        require(
            &s,
            &[
                ("tenant", tenant.is_some() || token_url.is_some(), "the id of the tenant"),
                ("client_id", client_id.is_some(), "the id of the application"),
                ("client_secret", client_secret.is_some(), "\"file:PATH\" or \"env:NAME\""),
            ],
        );
        if tenant.as_ref().is_some_and(|tenant| !mint_file::is_tenant(tenant)) {
            s.findings().problem(s.at("tenant"), "not a tenant", "its id, or its domain");
        }
        Self { at, endpoint, scope, token_url, tenant, client_id, client_secret }
    }

    fn store(&self, secrets: &LoginSources<'_>) -> Option<AzureStore> {
        let secret = secrets.read(&self.at, "client_secret", self.client_secret.as_ref()?).held?;
        let url = match (&self.token_url, &self.tenant) {
            (Some(url), _) => url.clone(),
            (None, Some(tenant)) => HookUrl::parse(&format!("{MICROSOFT_LOGIN}/{tenant}/oauth2/v2.0/token")).ok()?,
            (None, None) => return None,
        };
        let request = TokenRequest {
            url,
            grant: TokenGrant::ClientCredentials,
            client: ClientAuth::Post { id: self.client_id.clone()?, secret },
            parameters: vec![("scope", self.scope.clone().unwrap_or_else(|| AZURE_SCOPE.to_owned()))],
            assumed_life: ASSUMED_LIFE,
            fetched: Vec::new(),
        };
        Some(AzureStore { endpoint: self.endpoint.clone(), request: Arc::new(request) })
    }
}

/// The place of the vault's name in the URL of Azure Key Vault.
const VAULT_MARK: &str = "{vault}";
const AZURE_ENDPOINT: &str = "https://{vault}.vault.azure.net";
const AZURE_SCOPE: &str = "https://vault.azure.net/.default";

/// Returns the URL of a vault.
fn azure_url(endpoint: &str, vault: &str) -> Option<HookUrl> {
    HookUrl::parse(&endpoint.replace(VAULT_MARK, vault)).ok().filter(|url| !url.path().contains('?'))
}

/// Azure Key Vault: each vault has a host.
struct AzureStore {
    endpoint: Option<String>,
    request: Arc<TokenRequest>,
}

impl AzureStore {
    fn server(&self, vault: &str) -> Option<StoreServer> {
        let url = azure_url(self.endpoint.as_deref().unwrap_or(AZURE_ENDPOINT), vault)?;
        Some(StoreServer { url, login: StoreLogin::Token(self.request.clone()), secrets: Vec::new() })
    }
}

/// Reads the secrets of logins.
struct LoginSources<'c> {
    context: &'c CompileContext<'c>,
    findings: &'c Findings,
}

impl LoginSources<'_> {
    /// Reads a secret. One that is missing may be there later: its source is read for each login.
    fn read(&self, at: &str, key: &'static str, source: &Source) -> LoginSecret {
        let read = self.reported(&format!("{at}.{key}"), read_source(source, self.context.env));
        LoginSecret { key, source: source.clone(), held: read.map(HeldSecret::new).map(Arc::new) }
    }

    /// Reads a secret of several lines. `None` if it cannot be used, after that has been reported.
    fn document(&self, path: &str, source: &Source) -> Option<Secret> {
        self.reported(path, read_document(source, self.context.env))
    }

    fn reported(&self, path: &str, read: Result<Secret, SourceError>) -> Option<Secret> {
        match read {
            Ok(secret) => return Some(secret),
            Err(SourceError::Missing(why)) => {
                self.findings.warning(path, format!("{why}; the store cannot be read without it"));
            }
            Err(SourceError::Unusable(why)) => {
                self.findings.problem(path, why, "a source that holds the secret");
            }
        }
        None
    }
}

impl RawStores {
    /// Compiles the sections. The servers are shared by the credentials.
    pub(super) fn compile(self, context: &CompileContext<'_>, findings: &Findings) -> SecretStores {
        let secrets = LoginSources { context, findings };
        let vault = self.vault.as_ref().map(|raw| (StoreScheme::Vault, raw.server(&secrets)));
        let one_password = self.one_password.as_ref().map(|raw| (StoreScheme::OnePassword, raw.server(&secrets)));
        let google = self.gcp.as_ref().map(|raw| (StoreScheme::GoogleSecretManager, raw.server(&secrets)));
        let mut given: Vec<StoreScheme> =
            [&vault, &one_password, &google].into_iter().flatten().map(|it| it.0).collect();
        if self.aws.is_some() {
            given.extend([StoreScheme::AwsSecretsManager, StoreScheme::AwsParameterStore]);
        }
        given.extend(self.azure.as_ref().map(|_| StoreScheme::AzureKeyVault));
        let servers = [vault, one_password, google].into_iter().flatten();
        SecretStores {
            given,
            servers: servers.filter_map(|(scheme, server)| Some((scheme, Arc::new(server?)))).collect(),
            engines: self.vault.map(|raw| raw.engines).unwrap_or_default(),
            aws: self.aws.as_ref().and_then(|raw| raw.store(&secrets)),
            azure: self.azure.as_ref().and_then(|raw| raw.store(&secrets)),
        }
    }
}

/// Returns the recipe of a value that a command prints.
pub(super) fn command_recipe(
    source: &CommandSource,
    aws_key: Option<FetchedAwsKey>,
    keeping: RawKeeping,
    mint_timeout: Duration,
) -> MintRecipe {
    let RawKeeping { refresh, max_stale } = keeping;
    let (refresh, max_stale) = (refresh.unwrap_or(REFRESH), max_stale.unwrap_or(MAX_STALE));
    let read = CommandRead { source: source.clone(), aws_key, is_document: false, refresh, max_stale };
    MintRecipe { method: MintMethod::Command(Arc::new(read)), mint_timeout }
}

impl SecretStores {
    /// Returns the recipe of a value. `None` if a problem has been reported.
    pub(super) fn recipe(
        &self,
        (reference, aws_key): (&StoreReference, Option<FetchedAwsKey>),
        keeping: RawKeeping,
        mint_timeout: Duration,
        (path, findings): (&str, &Findings),
    ) -> Option<MintRecipe> {
        let scheme = reference.scheme;
        if !self.given.contains(&scheme) {
            let problem = format!("there is no [secret_stores.{}] for it", scheme.section());
            findings.problem(path, problem, "the section with the address of the store, or another source");
        }
        let item = self.item(reference)?;
        let read = StoreRead {
            server: self.server(reference, &item)?,
            reference: reference.clone(),
            item,
            aws_key,
            is_document: false,
            refresh: keeping.refresh.unwrap_or(REFRESH),
            max_stale: keeping.max_stale.unwrap_or(MAX_STALE),
        };
        Some(MintRecipe { method: MintMethod::Store(Arc::new(read)), mint_timeout })
    }

    /// Returns how a secret of a recipe is fetched. `None` for another source, or if a problem has been reported.
    pub(super) fn secret_read(
        &self,
        source: &Source,
        is_document: bool,
        (path, findings): (&str, &Findings),
    ) -> Option<SecretRead> {
        let (keeping, no_wait) = (RawKeeping::default(), Duration::ZERO);
        let recipe = match source {
            Source::Store(reference) => self.recipe((reference, None), keeping, no_wait, (path, findings))?,
            Source::Command(command) => command_recipe(command, None, keeping, no_wait),
            Source::Env(_) | Source::File(_) | Source::Secret(_) => return None,
        };
        match recipe.method {
            MintMethod::Store(read) => {
                Some(SecretRead::Store(Arc::new(StoreRead { is_document, ..Arc::unwrap_or_clone(read) })))
            }
            MintMethod::Command(read) => {
                Some(SecretRead::Command(Arc::new(CommandRead { is_document, ..Arc::unwrap_or_clone(read) })))
            }
            MintMethod::Token(_) | MintMethod::Role(_) => None,
        }
    }

    fn server(&self, reference: &StoreReference, item: &StoreItem) -> Option<Arc<StoreServer>> {
        let other = match item {
            StoreItem::AwsSecret { id } => self.aws.as_ref()?.server("secretsmanager", id)?,
            StoreItem::AwsParameter { name } => self.aws.as_ref()?.server("ssm", name)?,
            StoreItem::Azure { .. } => self.azure.as_ref()?.server(reference.segments.first()?)?,
            _ => {
                let (_, server) = self.servers.iter().find(|(of, _)| *of == reference.scheme)?;
                return Some(server.clone());
            }
        };
        Some(Arc::new(other))
    }

    fn item(&self, reference: &StoreReference) -> Option<StoreItem> {
        let segments = &reference.segments;
        match reference.scheme {
            StoreScheme::Vault => {
                let named =
                    self.engines.iter().find(|(mount, _)| segments.starts_with(mount) && segments.len() > mount.len());
                // Most engines are of this kind, at a path of one name.
                let (mount, engine) = named.map_or((1, Engine::Kv2), |(mount, engine)| (mount.len(), *engine));
                let (mount, path) = segments.split_at_checked(mount)?;
                Some(match engine {
                    Engine::Kv1 => StoreItem::VaultKv1 { path: segments.clone() },
                    Engine::Kv2 => StoreItem::VaultKv2 { mount: mount.to_vec(), path: path.to_vec() },
                    Engine::Dynamic => StoreItem::VaultLease { path: segments.clone() },
                })
            }
            StoreScheme::OnePassword => {
                let (section, field) = match segments.get(2..)? {
                    [field] => (None, field.clone()),
                    [section, field] => (Some(section.clone()), field.clone()),
                    _ => return None,
                };
                let (vault, item) = (segments.first()?.clone(), segments.get(1)?.clone());
                Some(StoreItem::OnePassword { vault, item, section, field })
            }
            StoreScheme::AwsSecretsManager => Some(StoreItem::AwsSecret { id: segments.join("/") }),
            StoreScheme::AwsParameterStore => Some(StoreItem::AwsParameter { name: segments.join("/") }),
            StoreScheme::GoogleSecretManager => Some(StoreItem::Google {
                project: segments.first()?.clone(),
                secret: segments.get(1)?.clone(),
                version: segments.get(2).map_or("latest", String::as_str).to_owned(),
            }),
            StoreScheme::AzureKeyVault => {
                Some(StoreItem::Azure { secret: segments.get(1)?.clone(), version: segments.get(2).cloned() })
            }
        }
    }
}

impl RawKeeping {
    /// Reports keys that are out of range, or have no effect.
    pub(super) fn check(self, is_stored: bool, path: &str, findings: &Findings) {
        let Self { refresh, max_stale } = self;
        for (key, is_given) in [("refresh", refresh.is_some()), ("max_stale", max_stale.is_some())] {
            if is_given && !is_stored {
                let problem = "only a value from a secret store or a command is read again";
                findings.problem(format!("{path}.{key}"), problem, format!("no {key}"));
            }
        }
        if refresh.is_some_and(|refresh| !REFRESH_RANGE.contains(&refresh)) {
            findings.problem(format!("{path}.refresh"), "out of range", "\"1s\" to \"24h\"");
        }
        if max_stale.is_some_and(|stale| stale > LONGEST_STALE) {
            findings.problem(format!("{path}.max_stale"), "too long", "at most \"7d\"");
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use crate::model::secret::Secret;
    use crate::policy::compile::{Config, compile};
    use crate::policy::reader::Problem;
    use crate::policy::settings::Vault;
    use crate::policy::source::{CompileContext, SecretSource, SourceError};

    struct NoVault;

    impl SecretSource for NoVault {
        fn secret(&self, _: &Vault, _: &str, _: &str) -> Result<Secret, SourceError> {
            Err(SourceError::Missing("no vault".to_owned()))
        }
    }

    fn compiled(stores: &str, credential: &str) -> Result<Config, Vec<Problem>> {
        let text = format!(
            "{stores}\n[credentials.C]\ndomains = [\"a.example\"]\n{credential}\n\
             [integrations.a]\nallowed_domains = [\"a.example\"]\n\
             [tasks.t]\ntoken = \"env:TOKEN\"\nintegrations = [\"a\"]\ncredentials = [\"C\"]\n"
        );
        let here = Path::new("/nowhere");
        let env = |name: &str| match name {
            "KEY" => Some("k7Qz2mXv9LpW4sVt6eRR".to_owned()),
            "TOKEN" => Some("t7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf".to_owned()),
            "LINES" => Some("a\nb".to_owned()),
            _ => None,
        };
        let context = CompileContext { base: here, state_dir: here, env: &env, secrets: &NoVault, is_offline: true };
        compile(&text, &context)
    }

    const VAULT: &str = "[secret_stores.vault]\naddress = \"https://v.test\"\nauth = \"token\"\ntoken = \"env:KEY\"";
    const BEARER: &str = "auth_type = \"bearer\"\nvalue = \"vault://secret/a#b\"";

    #[test]
    fn each_problem_of_a_store_has_its_key() {
        let vault = |more: &str| format!("{VAULT}\n{more}");
        let bearer = |value: &str| format!("auth_type = \"bearer\"\nvalue = \"{value}\"");
        let with = |more: &str| format!("{BEARER}\n{more}");
        let aws =
            "[secret_stores.aws]\nregion = \"eu-west-1\"\naccess_key_id = \"env:ID\"\nsecret_access_key = \"env:KEY\"";
        let rows: Vec<(String, String, &str, &str)> = vec![
            (String::new(), BEARER.to_owned(), "credentials.C.value", "there is no [secret_stores.vault]"),
            (vault(""), bearer("vault://secret#b"), "credentials.C.value", "not a reference"),
            (vault(""), bearer("aws-sm://a"), "credentials.C.value", "there is no [secret_stores.aws]"),
            (vault(""), with("refresh = \"500ms\""), "credentials.C.refresh", "out of range"),
            (vault(""), with("refresh = \"25h\""), "credentials.C.refresh", "out of range"),
            (vault(""), with("max_stale = \"8d\""), "credentials.C.max_stale", "too long"),
            (vault(""), with("mint_timeout = \"61s\""), "credentials.C.mint_timeout", "too long"),
            (vault(""), with("token_lifetime = \"61s\""), "credentials.C.token_lifetime", "requires auth_type"),
            (
                String::new(),
                "auth_type = \"bearer\"\nvalue = \"env:KEY\"\nrefresh = \"1m\"".to_owned(),
                "credentials.C.refresh",
                "only a value from a secret store",
            ),
            (
                vault(""),
                "auth_type = \"tls_client\"\ncertificate = \"env:KEY\"\nvalue = \"vault://secret/a#b\"".to_owned(),
                "credentials.C.value",
                "which a secret store or a command is not",
            ),
            (
                String::new(),
                "auth_type = \"oauth2_client_credentials\"\ntoken_url = \"https://a.test\"\nclient_id = \"c\"\nclient_secret = \"vault://secret/a#b\"".to_owned(),
                "credentials.C.client_secret",
                "there is no [secret_stores.vault]",
            ),
            (
                vault(""),
                "auth_type = \"oauth2_refresh_token\"\ntoken_url = \"https://a.test\"\nrefresh_token = \"vault://secret/a#b\"".to_owned(),
                "credentials.C.refresh_token",
                "only the vault",
            ),
            (vault("role = \"r\""), BEARER.to_owned(), "secret_stores.vault.role", "not a key of this auth"),
            (vault("engines = { a = \"kv\" }"), BEARER.to_owned(), "secret_stores.vault.engines.a", "invalid value"),
            (
                vault("engines = { \"a//b\" = \"kv-v1\" }"),
                BEARER.to_owned(),
                "secret_stores.vault.engines.\"a//b\"",
                "not the path",
            ),
            (VAULT.replace("auth = \"token\"", ""), BEARER.to_owned(), "secret_stores.vault.auth", "missing"),
            (VAULT.replace("auth = \"token\"", "auth = \"x\""), BEARER.to_owned(), "secret_stores.vault.auth", "invalid"),
            (VAULT.replace("token = \"env:KEY\"", ""), BEARER.to_owned(), "secret_stores.vault.token", "missing"),
            (VAULT.replace("env:KEY", "env:LINES"), BEARER.to_owned(), "secret_stores.vault.token", "control"),
            (VAULT.replace("env:KEY", "hvs.abc"), BEARER.to_owned(), "secret_stores.vault.token", "not the source"),
            (VAULT.replace("https", "http"), BEARER.to_owned(), "secret_stores.vault.address", "http://"),
            (VAULT.replace("v.test", "v.test/?a"), BEARER.to_owned(), "secret_stores.vault.address", "query"),
            (VAULT.replace("address = \"https://v.test\"", ""), BEARER.to_owned(), "secret_stores.vault.address", "missing"),
            (
                VAULT.replace("auth = \"token\"", "auth = \"approle\""),
                BEARER.to_owned(),
                "secret_stores.vault.role_id",
                "missing",
            ),
            (
                "[secret_stores.one_password]\naddress = \"https://o.test\"".to_owned(),
                bearer("op://a/b/c"),
                "secret_stores.one_password.token",
                "missing",
            ),
            (aws.replace("eu-west-1", "eu west"), bearer("aws-sm://a"), "secret_stores.aws.region", "not the name"),
            (aws.replace("env:ID", "secret:ID"), bearer("aws-sm://a"), "secret_stores.aws.access_key_id", "not the source"),
            (aws.replace("region", "#"), bearer("aws-sm://a"), "secret_stores.aws.region", "missing"),
            (
                "[secret_stores.gcp]\ncredentials = \"env:KEY\"".to_owned(),
                bearer("gcp-sm://a/b"),
                "secret_stores.gcp.credentials",
                "not the key file",
            ),
            (
                "[secret_stores.azure]\ntenant = \"a/b\"\nclient_id = \"c\"\nclient_secret = \"env:KEY\"".to_owned(),
                bearer("azure-kv://a/b"),
                "secret_stores.azure.tenant",
                "not a tenant",
            ),
            ("[secret_stores.consul]\na = 1".to_owned(), bearer("env:KEY"), "secret_stores.consul", "unknown key"),
        ];
        for (stores, credential, path, problem) in rows {
            let problems = compiled(&stores, &credential).err().unwrap_or_default();
            let found = problems.iter().find(|found| found.path == path && found.problem.contains(problem));
            assert!(found.is_some(), "{stores}\n{credential}\n{path}: {problem}\n{problems:?}");
        }
    }

    #[test]
    fn a_secret_that_is_missing_is_a_warning() {
        let stores = VAULT.replace("env:KEY", "env:NONE");
        let config = compiled(&stores, BEARER).map_err(|problems| format!("{problems:?}")).ok().unwrap();
        let warned = config.warnings.iter().any(|found| found.path == "secret_stores.vault.token");
        assert!(warned, "{:?}", config.warnings);
        assert!(config.policy.credentials().all(|credential| credential.recipe().is_some()));
    }
}

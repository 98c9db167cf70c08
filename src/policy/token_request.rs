//! Requests for access tokens: the token endpoint, the grant, and how the proxy identifies itself.

use std::sync::Arc;
use std::time::Duration;

use super::command_source::CommandRead;
use super::held_secret::{HeldSecret, PartsHash};
use super::hook_url::HookUrl;
use super::secret_store::StoreRead;
use super::settings::Source;
use super::source::SecretStore;
use super::value_fit::MAX_VALUE;
use crate::model::secret::Secret;

/// How an access token is fetched.
#[derive(Clone)]
pub struct TokenRequest {
    /// The URL that the request is sent to, which is always the operator's.
    pub url: HookUrl,
    /// The permission that the server is shown.
    pub grant: TokenGrant,
    /// How the proxy identifies itself to the server.
    pub client: ClientAuth,
    /// The request's further parameters, such as `scope`. A name may occur several times.
    pub parameters: Vec<(&'static str, String)>,
    /// The life of a token whose server does not state it.
    pub assumed_life: Duration,
    /// The secrets that are fetched for each token.
    pub fetched: Vec<FetchedSecret>,
}

/// A secret of a request that is in a secret store, or printed by a command. It is fetched before each token.
#[derive(Clone)]
pub struct FetchedSecret {
    /// The key that names its source.
    pub key: &'static str,
    /// How it is fetched.
    pub read: SecretRead,
}

/// How a secret is fetched.
#[derive(Clone)]
pub enum SecretRead {
    /// From a secret store.
    Store(Arc<StoreRead>),
    /// By a command.
    Command(Arc<CommandRead>),
}

/// The longest private key that is fetched, in bytes.
const MAX_KEY: usize = 64 * 1024;

/// Checks a secret that was fetched for a key. Takes some milliseconds.
///
/// # Errors
/// Why it cannot be used, or not be searched for.
pub fn check_fetched(key: &str, held: &HeldSecret) -> Result<(), &'static str> {
    let (secret, is_key) = (held.secret(), key == "private_key");
    if secret.expose().len() > if is_key { MAX_KEY } else { MAX_VALUE } {
        return Err("it is too long");
    }
    if let Some(problem) = is_key.then(|| key_problem(secret)).flatten() {
        return Err(problem);
    }
    if held.strength().is_strong() { Ok(()) } else { Err("it is too easy to guess to be searched for") }
}

/// Returns why a private key cannot be used, as far as its text tells.
pub(super) fn key_problem(key: &Secret) -> Option<&'static str> {
    let has = |text: &[u8]| memchr::memmem::find(key.expose(), text).is_some();
    if has(b"ENCRYPTED") {
        return Some("the private key is encrypted");
    }
    let is_pem = has(b"PRIVATE KEY-----\n") || has(b"PRIVATE KEY-----\r\n");
    (!is_pem).then_some("not a private key in PEM")
}

impl SecretRead {
    fn source(&self) -> String {
        match self {
            Self::Store(read) => format!("{} at {}", read.reference, read.server.url),
            Self::Command(read) => read.source.in_full(),
        }
    }

    fn add_to(&self, hash: &mut PartsHash) {
        match self {
            Self::Store(read) => read.add_to(hash),
            Self::Command(read) => read.add_to(hash),
        }
    }

    /// Returns the secrets of the store's login.
    fn secrets(&self) -> impl Iterator<Item = (&'static str, &Arc<HeldSecret>)> {
        let read = match self {
            Self::Store(read) => Some(read),
            Self::Command(_) => None,
        };
        read.into_iter().flat_map(|read| read.secrets())
    }
}

/// The permission that a token endpoint is shown.
#[derive(Clone)]
pub enum TokenGrant {
    /// The client's own (RFC 6749 §4.4).
    ClientCredentials,
    /// A refresh token (RFC 6749 §6). It is a secret of the vault, because the server may replace it.
    RefreshToken {
        /// The token when the configuration was read, or the one that replaced it.
        token: Arc<HeldSecret>,
        /// Its place in the vault.
        stored: StoredSecret,
    },
    /// A signed assertion (RFC 7523 §2.1).
    JwtBearer(Assertion),
    /// A token of another issuer (RFC 8693).
    TokenExchange {
        /// The token when the configuration was read, or a later one.
        subject_token: Arc<HeldSecret>,
        /// Its source, which is read for each token, because others renew it.
        source: Source,
        /// Its place, if that is the vault.
        stored: Option<StoredSecret>,
        /// The URI of its type.
        subject_token_type: String,
    },
    /// An installation of a GitHub App, in JSON instead of a form.
    GithubInstallation {
        /// The assertion of the app.
        assertion: Assertion,
        /// The names of repositories. Empty for all of the installation.
        repositories: Vec<String>,
        /// Permissions with their levels. Empty for all of the app.
        permissions: Vec<(String, String)>,
    },
}

/// A secret of the vault, which is read and replaced while the policy is in force.
#[derive(Clone)]
pub struct StoredSecret {
    /// The vault.
    pub store: Arc<dyn SecretStore>,
    /// The workspace.
    pub workspace: String,
    /// The name.
    pub name: String,
}

/// How a client identifies itself to a token endpoint.
#[derive(Clone)]
pub enum ClientAuth {
    /// Not at all: the grant is enough.
    Anonymous,
    /// By its id alone (RFC 6749 §2.2).
    Public {
        /// The client's id.
        id: String,
    },
    /// `Authorization: Basic` (RFC 6749 §2.3.1).
    Basic {
        /// The client's id.
        id: String,
        /// The client's secret.
        secret: Arc<HeldSecret>,
    },
    /// Parameters of the form (RFC 6749 §2.3.1).
    Post {
        /// The client's id.
        id: String,
        /// The client's secret.
        secret: Arc<HeldSecret>,
    },
    /// A signed assertion (RFC 7523 §2.2).
    PrivateKeyJwt {
        /// The client's id.
        id: String,
        /// The assertion.
        assertion: Assertion,
    },
}

/// The constant parts of a signed assertion (RFC 7523 §3).
#[derive(Clone)]
pub struct Assertion {
    /// The claim `iss`.
    pub issuer: String,
    /// The claim `sub`.
    pub subject: Option<String>,
    /// The claim `aud`.
    pub audience: Option<String>,
    /// The claim `scope`, which Google reads.
    pub scope: Option<String>,
    /// The header parameter `kid`.
    pub key_id: Option<String>,
    /// The private key, in PEM.
    pub key: Arc<HeldSecret>,
}

impl Assertion {
    fn add_to(&self, hash: &mut PartsHash) {
        let Self { issuer, subject, audience, scope, key_id, key: _ } = self;
        hash.add_all([issuer.as_str()]);
        hash.add_optional([subject, audience, scope, key_id].map(Option::as_deref));
    }
}

impl TokenRequest {
    /// Returns the secrets that are sent to the token endpoint, or sign what is sent, and those of the stores that they are in, with
    /// the keys that name their sources. Those that have not been fetched are left out.
    pub fn secrets(&self) -> impl Iterator<Item = (&'static str, &Arc<HeldSecret>)> {
        let of_stores = self.fetched.iter().flat_map(|fetched| fetched.read.secrets());
        self.own_secrets().filter(|(_, held)| !held.is_pending()).chain(of_stores)
    }

    /// Returns those of the secrets that are not of a store's login, with places of those that have not been fetched.
    pub(super) fn own_secrets(&self) -> impl Iterator<Item = (&'static str, &Arc<HeldSecret>)> {
        let of_grant = match &self.grant {
            TokenGrant::ClientCredentials => None,
            TokenGrant::RefreshToken { token, .. } => Some(("refresh_token", token)),
            TokenGrant::JwtBearer(assertion) | TokenGrant::GithubInstallation { assertion, .. } => {
                Some(("private_key", &assertion.key))
            }
            TokenGrant::TokenExchange { subject_token, .. } => Some(("subject_token", subject_token)),
        };
        let of_client = match &self.client {
            ClientAuth::Anonymous | ClientAuth::Public { .. } => None,
            ClientAuth::Basic { secret, .. } | ClientAuth::Post { secret, .. } => Some(("client_secret", secret)),
            ClientAuth::PrivateKeyJwt { assertion, .. } => Some(("private_key", &assertion.key)),
        };
        of_grant.into_iter().chain(of_client)
    }

    /// Describes what its tokens permit, without a secret.
    #[must_use]
    pub fn permissions(&self) -> String {
        let of_assertion = |Assertion { issuer, subject, audience, scope, .. }: &Assertion| {
            let parts = [Some(issuer), subject.as_ref(), audience.as_ref(), scope.as_ref()];
            parts.into_iter().flatten().cloned().collect::<Vec<_>>().join(" ")
        };
        // A query could have a secret.
        let path = self.url.path().split('?').next().unwrap_or_default();
        let mut parts = vec![format!("{}{path}", self.url)];
        match &self.client {
            ClientAuth::Anonymous => {}
            ClientAuth::Public { id }
            | ClientAuth::Basic { id, .. }
            | ClientAuth::Post { id, .. }
            | ClientAuth::PrivateKeyJwt { id, .. } => parts.push(format!("client {id}")),
        }
        match &self.grant {
            TokenGrant::ClientCredentials => {}
            TokenGrant::RefreshToken { stored, .. } => parts.push(format!("refresh token {}", stored.name)),
            TokenGrant::TokenExchange { subject_token_type, .. } => parts.push(subject_token_type.clone()),
            TokenGrant::JwtBearer(assertion) => parts.push(of_assertion(assertion)),
            TokenGrant::GithubInstallation { assertion, repositories, permissions } => {
                parts.push(of_assertion(assertion));
                let repositories = if repositories.is_empty() { "all".to_owned() } else { repositories.join(" ") };
                parts.push(format!("repositories {repositories}"));
                let all = permissions.iter().map(|(name, level)| format!("{name}={level}")).collect::<Vec<_>>();
                parts.push(format!("permissions {}", if all.is_empty() { "all".to_owned() } else { all.join(" ") }));
            }
        }
        parts.extend(self.parameters.iter().map(|(name, value)| format!("{name} {value}")));
        parts.extend(self.fetched.iter().map(|FetchedSecret { key, read }| format!("{key} of {}", read.source())));
        parts.join(", ")
    }

    /// Returns true if a request for a token has a time in it, which depends on the clocks.
    #[must_use]
    pub fn has_assertion(&self) -> bool {
        matches!(self.client, ClientAuth::PrivateKeyJwt { .. })
            || matches!(self.grant, TokenGrant::JwtBearer(_) | TokenGrant::GithubInstallation { .. })
    }

    /// Returns the secrets that change while the policy is in force.
    pub(super) fn changing_secrets(&self) -> impl Iterator<Item = &Arc<HeldSecret>> {
        let fetched = self.own_secrets().filter(|(key, _)| self.fetches(key)).map(|(_, held)| held);
        let of_stores = self.fetched.iter().flat_map(|fetched| fetched.read.secrets()).map(|(_, held)| held);
        self.changing_token().into_iter().chain(fetched).chain(of_stores)
    }

    /// Returns true if the secret of a key is fetched before each token.
    #[must_use]
    pub fn fetches(&self, key: &str) -> bool {
        self.fetched.iter().any(|fetched| fetched.key == key)
    }

    /// Returns the request with the secret of a key, and how it is fetched the next time.
    #[must_use]
    pub fn with_fetched(&self, fetched: FetchedSecret, secret: &Arc<HeldSecret>) -> Self {
        let mut request = self.clone();
        request.set_secret(fetched.key, secret);
        for known in request.fetched.iter_mut().filter(|known| known.key == fetched.key) {
            *known = fetched.clone();
        }
        request
    }

    /// Returns the same request with what has been fetched for another one.
    #[must_use]
    pub(super) fn with_fetched_of(&self, other: &Self) -> Self {
        let mut request = self.clone();
        for key in self.fetched.iter().map(|fetched| fetched.key) {
            if let Some(known) = other.secret_of(key).filter(|held| !held.is_pending()) {
                request.set_secret(key, known);
            }
        }
        request
    }

    /// Returns the secret of a key.
    #[must_use]
    pub fn secret_of(&self, key: &str) -> Option<&Arc<HeldSecret>> {
        self.own_secrets().find(|(known, _)| *known == key).map(|(_, held)| held)
    }

    fn set_secret(&mut self, key: &str, new: &Arc<HeldSecret>) {
        match &mut self.client {
            ClientAuth::Basic { secret, .. } | ClientAuth::Post { secret, .. } if key == "client_secret" => {
                *secret = new.clone();
            }
            ClientAuth::PrivateKeyJwt { assertion, .. } if key == "private_key" => assertion.key = new.clone(),
            _ => {}
        }
        match &mut self.grant {
            TokenGrant::JwtBearer(assertion) | TokenGrant::GithubInstallation { assertion, .. }
                if key == "private_key" =>
            {
                assertion.key = new.clone();
            }
            TokenGrant::TokenExchange { subject_token, .. } if key == "subject_token" => *subject_token = new.clone(),
            _ => {}
        }
    }

    /// Returns the token of the grant, if it is one that changes while the policy is in force.
    #[must_use]
    pub fn changing_token(&self) -> Option<&Arc<HeldSecret>> {
        match &self.grant {
            TokenGrant::RefreshToken { token, .. } | TokenGrant::TokenExchange { subject_token: token, .. } => {
                Some(token)
            }
            TokenGrant::ClientCredentials | TokenGrant::JwtBearer(_) | TokenGrant::GithubInstallation { .. } => None,
        }
    }

    /// Returns the request with the secrets of another one that change, if they have the same source.
    #[must_use]
    pub(super) fn with_secrets_of(&self, other: &Self) -> Self {
        let mut request = self.clone();
        let same = self.fetched.iter().filter(|fetched| other.fetches(fetched.key)).map(|fetched| fetched.key);
        for key in same {
            if let Some(secret) = other.secret_of(key) {
                request.set_secret(key, secret);
            }
        }
        request.fetched.clone_from(&other.fetched);
        match (&mut request.grant, &other.grant) {
            (TokenGrant::RefreshToken { token, .. }, TokenGrant::RefreshToken { token: new, .. }) => {
                *token = new.clone()
            }
            (
                TokenGrant::TokenExchange { subject_token, source, .. },
                TokenGrant::TokenExchange { subject_token: new, source: of_new, .. },
            ) if source == of_new => *subject_token = new.clone(),
            _ => {}
        }
        request
    }

    /// Returns the request with another token of the grant.
    #[must_use]
    pub fn with_token(&self, new: Secret) -> Self {
        let mut request = self.clone();
        match &mut request.grant {
            TokenGrant::RefreshToken { token, .. } | TokenGrant::TokenExchange { subject_token: token, .. } => {
                *token = Arc::new(HeldSecret::new(new));
            }
            TokenGrant::ClientCredentials | TokenGrant::JwtBearer(_) | TokenGrant::GithubInstallation { .. } => {}
        }
        request
    }

    /// Adds everything that a token depends on.
    pub(super) fn add_to(&self, hash: &mut PartsHash) {
        hash.add_all([self.url.to_string().as_str(), self.url.path()]);
        match &self.client {
            ClientAuth::Anonymous => hash.add_all(["anonymous"]),
            ClientAuth::Public { id } => hash.add_all(["public", id]),
            ClientAuth::Basic { id, .. } => hash.add_all(["basic", id]),
            ClientAuth::Post { id, .. } => hash.add_all(["post", id]),
            ClientAuth::PrivateKeyJwt { id, assertion } => {
                hash.add_all(["private_key_jwt", id]);
                assertion.add_to(hash);
            }
        }
        match &self.grant {
            TokenGrant::ClientCredentials => hash.add_all(["client_credentials"]),
            TokenGrant::RefreshToken { stored: StoredSecret { workspace, name, .. }, .. } => {
                hash.add_all(["refresh_token", workspace, name]);
            }
            TokenGrant::JwtBearer(assertion) => {
                hash.add_all(["jwt_bearer"]);
                assertion.add_to(hash);
            }
            TokenGrant::TokenExchange { subject_token_type, .. } => hash.add_all(["exchange", subject_token_type]),
            TokenGrant::GithubInstallation { assertion, repositories, permissions } => {
                hash.add_all(["github"]);
                assertion.add_to(hash);
                hash.add_all(repositories.iter().map(String::as_str));
                permissions.iter().for_each(|(name, level)| hash.add_all([name, "=", level]));
            }
        }
        self.parameters.iter().for_each(|(name, value)| hash.add_all([*name, "=", value]));
        // Others renew the token that is exchanged, which changes nothing of what it permits.
        let is_part = |key: &str| key != "subject_token" && !self.fetches(key);
        let secrets = self.own_secrets().filter(|(key, _)| is_part(key));
        secrets.for_each(|(_, held)| hash.add(held.secret().expose()));
        for FetchedSecret { key, read } in &self.fetched {
            hash.add_all([*key]);
            read.add_to(hash);
        }
    }
}

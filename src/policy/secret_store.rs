//! Secret stores: servers that hold the values of credentials, and references to values in them.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::aws::FetchedAwsKey;
use super::held_secret::{HeldSecret, PartsHash};
use super::hook_url::HookUrl;
use super::settings::Source;
use super::token_request::TokenRequest;
use crate::model::secret::Secret;

/// The longest reference, in bytes.
const MAX_REFERENCE: usize = 2048;

/// The key of the id of an access key.
pub const ACCESS_KEY_ID: &str = "access_key_id";

/// The kinds of references, by the scheme of their URI.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum StoreScheme {
    /// `vault://MOUNT/PATH#FIELD`: HashiCorp Vault or OpenBao.
    Vault,
    /// `op://VAULT/ITEM/[SECTION/]FIELD`: 1Password Connect.
    OnePassword,
    /// `aws-sm://ID[#KEY]`: AWS Secrets Manager.
    AwsSecretsManager,
    /// `aws-ssm://NAME[#KEY]`: the Parameter Store of AWS Systems Manager.
    AwsParameterStore,
    /// `gcp-sm://PROJECT/SECRET[/VERSION][#KEY]`: Google Secret Manager.
    GoogleSecretManager,
    /// `azure-kv://VAULT/SECRET[/VERSION][#KEY]`: Azure Key Vault.
    AzureKeyVault,
}

/// A reference to a value in a secret store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StoreReference {
    /// The kind.
    pub scheme: StoreScheme,
    /// The item's path: the segments of the URI.
    pub segments: Vec<String>,
    /// The member of the item that is the value. Of a value that is one text, `None` or a member of the JSON in it.
    pub member: Option<String>,
}

/// A value in a secret store, and how long it is kept.
#[derive(Clone)]
pub struct StoreRead {
    /// The server.
    pub server: Arc<StoreServer>,
    /// The value.
    pub reference: StoreReference,
    /// The item in the server.
    pub item: StoreItem,
    /// The rest of the key, if the value is the secret of one of AWS.
    pub aws_key: Option<FetchedAwsKey>,
    /// The value may have several lines.
    pub is_document: bool,
    /// The time after which the value is read again, unless the server states its life.
    pub refresh: Duration,
    /// How much longer a value is used while the server does not answer.
    pub max_stale: Duration,
}

/// An item in a secret store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum StoreItem {
    /// An item of a key-value engine of Vault, version 1.
    VaultKv1 {
        /// The path of the engine, with that of the item.
        path: Vec<String>,
    },
    /// An item of a key-value engine of Vault, version 2.
    VaultKv2 {
        /// The path of the engine.
        mount: Vec<String>,
        /// The path of the item.
        path: Vec<String>,
    },
    /// A secret of Vault that is created when it is read, with a lease.
    VaultLease {
        /// The path of the engine, with that of the role.
        path: Vec<String>,
    },
    /// A field of an item of 1Password.
    OnePassword {
        /// The name or the id of the vault.
        vault: String,
        /// The title or the id of the item.
        item: String,
        /// The label or the id of the section.
        section: Option<String>,
        /// The label or the id of the field.
        field: String,
    },
    /// A secret of AWS Secrets Manager, by its name or ARN.
    AwsSecret {
        /// The name or ARN.
        id: String,
    },
    /// A parameter of AWS Systems Manager, by its name or ARN.
    AwsParameter {
        /// The name or ARN.
        name: String,
    },
    /// A secret of Google Secret Manager.
    Google {
        /// The id or the number of the project.
        project: String,
        /// The name.
        secret: String,
        /// The version, or `latest`.
        version: String,
    },
    /// A secret of Azure Key Vault.
    Azure {
        /// The name.
        secret: String,
        /// The version. `None` for the latest one.
        version: Option<String>,
    },
}

/// A secret store, and how the proxy identifies itself to it.
#[derive(Clone)]
pub struct StoreServer {
    /// The address, perhaps with a path that precedes those of the API.
    pub url: HookUrl,
    /// The way in which the proxy identifies itself.
    pub login: StoreLogin,
    /// The secrets with which it does.
    pub secrets: Vec<LoginSecret>,
}

/// The way in which the proxy identifies itself to a secret store.
#[derive(Clone)]
pub enum StoreLogin {
    /// Vault, with a token.
    VaultToken {
        /// The namespace.
        namespace: Option<String>,
    },
    /// Vault, with a token that it issues at a login.
    Vault {
        /// The namespace.
        namespace: Option<String>,
        /// The path of the auth method.
        mount: Vec<String>,
        /// The member of the login with the name, `role_id` or `role`, and the name.
        role: (&'static str, String),
        /// The member of the login with the secret.
        secret: &'static str,
    },
    /// A token in `Authorization: Bearer`.
    Bearer,
    /// A signature (AWS Signature Version 4).
    Aws {
        /// The id of the access key. `None` if it is among the secrets.
        access_key_id: Option<String>,
        /// The region.
        region: String,
    },
    /// An access token from a token endpoint.
    Token(Arc<TokenRequest>),
}

/// A secret for a login. Others may renew it, so its source is read for each login.
#[derive(Clone)]
pub struct LoginSecret {
    /// The key that names its source.
    pub key: &'static str,
    /// The source.
    pub source: Source,
    /// The secret when its source was read last. `None` if that had none.
    pub held: Option<Arc<HeldSecret>>,
}

impl StoreScheme {
    /// All kinds.
    pub const ALL: [Self; 6] = [
        Self::Vault,
        Self::OnePassword,
        Self::AwsSecretsManager,
        Self::AwsParameterStore,
        Self::GoogleSecretManager,
        Self::AzureKeyVault,
    ];

    /// Returns the scheme of the URI.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Vault => "vault",
            Self::OnePassword => "op",
            Self::AwsSecretsManager => "aws-sm",
            Self::AwsParameterStore => "aws-ssm",
            Self::GoogleSecretManager => "gcp-sm",
            Self::AzureKeyVault => "azure-kv",
        }
    }

    /// Returns the name of the section in `[secret_stores]`.
    #[must_use]
    pub fn section(self) -> &'static str {
        match self {
            Self::Vault => "vault",
            Self::OnePassword => "one_password",
            Self::AwsSecretsManager | Self::AwsParameterStore => "aws",
            Self::GoogleSecretManager => "gcp",
            Self::AzureKeyVault => "azure",
        }
    }

    /// Returns the form of a reference.
    #[must_use]
    pub fn form(self) -> &'static str {
        match self {
            Self::Vault => "\"vault://MOUNT/PATH#FIELD\"",
            Self::OnePassword => "\"op://VAULT/ITEM/FIELD\" or \"op://VAULT/ITEM/SECTION/FIELD\"",
            Self::AwsSecretsManager => "\"aws-sm://ID\" or \"aws-sm://ID#KEY\"",
            Self::AwsParameterStore => "\"aws-ssm://NAME\" or \"aws-ssm://NAME#KEY\"",
            Self::GoogleSecretManager => "\"gcp-sm://PROJECT/SECRET\", perhaps with \"/VERSION\" and \"#KEY\"",
            Self::AzureKeyVault => "\"azure-kv://VAULT/SECRET\", perhaps with \"/VERSION\" and \"#KEY\"",
        }
    }
}

impl StoreReference {
    /// Parses a reference. `None` if the text has not the scheme of one.
    ///
    /// # Errors
    /// The scheme, if the rest is not a reference of it.
    #[must_use]
    pub fn parse(text: &str) -> Option<Result<Self, StoreScheme>> {
        let (name, rest) = text.split_once("://")?;
        let scheme = StoreScheme::ALL.into_iter().find(|scheme| scheme.name() == name)?;
        Some(Self::of(scheme, rest).filter(|_| text.len() <= MAX_REFERENCE).ok_or(scheme))
    }

    fn of(scheme: StoreScheme, rest: &str) -> Option<Self> {
        let (path, member) = match rest.split_once('#') {
            Some((path, member)) => (path, Some(member)),
            None => (rest, None),
        };
        // A name in AWS may begin with a slash.
        let is_aws = matches!(scheme, StoreScheme::AwsParameterStore | StoreScheme::AwsSecretsManager);
        let root = if is_aws { path.strip_prefix('/') } else { None };
        let segments: Vec<String> = root.unwrap_or(path).split('/').map(str::to_owned).collect();
        // Dot segments would lead to another item, whatever they are encoded as.
        let is_segment = |text: &str| {
            !text.is_empty()
                && !matches!(text, "." | "..")
                && !text.chars().any(|c| c.is_control() || "?#%\\".contains(c))
        };
        let has_form = match scheme {
            StoreScheme::Vault => segments.len() >= 2 && member.is_some(),
            StoreScheme::OnePassword => matches!(segments.len(), 3 | 4) && member.is_none() && !path.contains('"'),
            StoreScheme::AwsSecretsManager | StoreScheme::AwsParameterStore => true,
            StoreScheme::GoogleSecretManager => matches!(segments.len(), 2 | 3),
            StoreScheme::AzureKeyVault => {
                // The vault is a part of a host name.
                let is_label = |text: &String| text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'-');
                matches!(segments.len(), 2 | 3) && segments.first().is_some_and(is_label)
            }
        };
        let is_member = |member: &str| !member.is_empty() && !member.chars().any(char::is_control);
        let is_valid = has_form && segments.iter().all(|text| is_segment(text)) && member.is_none_or(is_member);
        let mut segments = segments;
        if root.is_some() {
            segments.insert(0, String::new());
        }
        is_valid.then(|| Self { scheme, segments, member: member.map(str::to_owned) })
    }
}

impl StoreReference {
    /// Returns whether both are members of one item.
    pub(super) fn has_item_of(&self, other: &Self) -> bool {
        self.scheme == other.scheme && self.segments == other.segments
    }
}

impl fmt::Display for StoreReference {
    /// Writes the URI.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}", self.scheme.name(), self.segments.join("/"))?;
        self.member.as_ref().map_or(Ok(()), |member| write!(f, "#{member}"))
    }
}

impl StoreServer {
    /// Returns the secret of a key.
    #[must_use]
    pub fn secret(&self, key: &str) -> Option<&Secret> {
        let found = self.secrets.iter().find(|secret| secret.key == key)?;
        found.held.as_ref().map(|held| held.secret())
    }

    /// Returns the server with other secrets, in the order of [`Self::secrets`].
    #[must_use]
    pub fn with_secrets(&self, new: Vec<Option<Arc<HeldSecret>>>) -> Self {
        let mut server = self.clone();
        for (secret, held) in server.secrets.iter_mut().zip(new) {
            secret.held = held;
        }
        server
    }

    /// Returns a hash of everything but the secrets.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hash = PartsHash::default();
        self.add_to(&mut hash);
        hash.finish()
    }

    fn add_to(&self, hash: &mut PartsHash) {
        hash.add_all([self.url.to_string().as_str(), self.url.path()]);
        match &self.login {
            StoreLogin::VaultToken { namespace } => {
                hash.add_all(["vault_token"]);
                hash.add_optional([namespace.as_deref()]);
            }
            StoreLogin::Vault { namespace, mount, role: (key, role), secret } => {
                hash.add_all(["vault", key, role, secret, &mount.join("/")]);
                hash.add_optional([namespace.as_deref()]);
            }
            StoreLogin::Bearer => hash.add_all(["bearer"]),
            StoreLogin::Aws { access_key_id, region } => {
                hash.add_all(["aws", region]);
                hash.add_optional([access_key_id.as_deref()]);
            }
            StoreLogin::Token(request) => request.add_to(hash),
        }
        for secret in &self.secrets {
            hash.add_all([secret.key, &secret.source.to_string()]);
        }
    }
}

impl StoreRead {
    /// Returns the secrets of the login, with the keys that name their sources.
    pub fn secrets(&self) -> impl Iterator<Item = (&'static str, &Arc<HeldSecret>)> {
        let of_token = match &self.server.login {
            StoreLogin::Token(request) => Some(request),
            _ => None,
        };
        // The id of a key is in the open in each request that it signs.
        let own = self.server.secrets.iter().filter(|secret| secret.key != ACCESS_KEY_ID);
        let own = own.filter_map(|secret| Some((secret.key, secret.held.as_ref()?)));
        own.chain(of_token.into_iter().flat_map(|request| request.own_secrets()))
    }

    /// Adds everything that the value depends on.
    pub(super) fn add_to(&self, hash: &mut PartsHash) {
        self.server.add_to(hash);
        hash.add_all([self.reference.to_string().as_str(), &format!("{:?}", self.item)]);
        self.aws_key.iter().for_each(|key| key.add_to(hash));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn references_are_parsed_by_their_scheme() {
        let valid = [
            "vault://secret/github#token",
            "vault://team/kv/apps/github#api key",
            "op://Private Vault/GitHub/token",
            "op://v/i/section/f",
            "aws-sm://prod/github",
            "aws-sm://arn:aws:secretsmanager:eu-west-1:123456789012:secret:prod/github-AbCdEf#token",
            "aws-ssm:///prod/github/token",
            "aws-sm:///prod/github",
            "aws-ssm://token#a.b",
            "gcp-sm://my-project/github",
            "gcp-sm://123456/github/5#token",
            "azure-kv://my-vault/github",
            "azure-kv://my-vault/github/ec96f02080254f109c51a1f14cdb1931#token",
        ];
        for text in valid {
            let parsed = StoreReference::parse(text).and_then(Result::ok);
            assert_eq!(parsed.map(|reference| reference.to_string()).as_deref(), Some(text));
        }
        let invalid = [
            "vault://secret#token",
            "vault://secret/github",
            "vault://secret/github#",
            "vault:///github#token",
            "vault://secret//github#token",
            "vault://secret/../sys#token",
            "vault://secret/a?version=1#token",
            "vault://secret/%2e%2e/a#token",
            "op://v/i",
            "op://v/i/f#x",
            "op://v/i/a/b/c",
            "op://v/a\"b/c",
            "aws-sm://",
            "aws-sm:///",
            "aws-ssm:////x",
            "gcp-sm://p",
            "gcp-sm://p/s/v/w",
            "azure-kv://my.vault/github",
            "azure-kv://github",
        ];
        for text in invalid {
            assert!(matches!(StoreReference::parse(text), Some(Err(_))), "{text}");
        }
        for text in ["env:KEY", "file:a", "https://x/y", "secret:NAME", "s3://a/b#c"] {
            assert!(StoreReference::parse(text).is_none(), "{text}");
        }
    }
}

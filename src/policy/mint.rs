//! Credentials that are minted: an access token from a token endpoint, which expires and is then replaced.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use super::hook_url::HookUrl;
use crate::leak::strength::Strength;
use crate::leak::{Value, ValueOwner};
use crate::model::name::CredentialName;
use crate::model::secret::Secret;

/// The most earlier tokens of a credential that are searched for, beside the one in use.
const MAX_EARLIER: usize = 4;
/// The longest life of a token, whatever its server says.
const MAX_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// A token is not used in its last seconds, because a request takes time and clocks differ.
const MARGIN: Duration = Duration::from_secs(10);

/// A secret, and how hard it is to guess.
pub struct HeldSecret {
    secret: Secret,
    /// Estimated at its first use, because the estimate is slow.
    strength: OnceLock<Strength>,
}

/// How an access token is fetched.
#[derive(Clone)]
pub struct MintRecipe {
    /// The URL that the request is sent to, which is always the operator's.
    pub url: HookUrl,
    /// The permission that the server is shown.
    pub grant: TokenGrant,
    /// How the proxy identifies itself to the server.
    pub client: ClientAuth,
    /// The request's further parameters, such as `scope`. A name may occur several times.
    pub parameters: Vec<(&'static str, String)>,
    /// How long a request waits for a token.
    pub mint_timeout: Duration,
    /// The life of a token whose server does not state it.
    pub assumed_life: Duration,
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
        /// Its workspace in the vault.
        workspace: String,
        /// Its name in the vault.
        name: String,
    },
    /// A signed assertion (RFC 7523 §2.1).
    JwtBearer(Assertion),
    /// A token of another issuer (RFC 8693).
    TokenExchange {
        /// The token.
        subject_token: Arc<HeldSecret>,
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

/// An access token.
pub struct MintedValue {
    value: HeldSecret,
    minted: Instant,
    /// The end of its life, by both clocks: only one of them goes on while the machine sleeps.
    expires: (Instant, SystemTime),
    /// The time from which on it is replaced.
    renew_at: Instant,
}

/// The recipe of a credential, and the tokens that were minted by it.
pub(super) struct Minting {
    pub(super) recipe: Arc<MintRecipe>,
    /// The workspace of the tasks that share the tokens.
    pub(super) workspace: String,
    pub(super) current: Option<Arc<MintedValue>>,
    /// Tokens that may still be valid, the latest first. They are searched for, and not sent.
    pub(super) earlier: Vec<Arc<MintedValue>>,
}

/// The name of a minted credential, which is the same under every policy.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MintKey {
    /// The credential's name.
    pub name: CredentialName,
    /// The workspace of its tasks.
    pub workspace: String,
}

/// Whether a token can be sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Freshness {
    /// It can.
    Fresh,
    /// It can, but will expire soon.
    Aging,
    /// It has expired, or there is none.
    Absent,
}

/// A token was rejected for this reason.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum UnusableToken {
    /// The scan could not tell it from other texts.
    #[error("the token is too easy to guess to be searched for")]
    Weak,
    /// It is never valid.
    #[error("the token has expired")]
    Expired,
}

impl HeldSecret {
    /// Wraps a secret.
    #[must_use]
    pub fn new(secret: Secret) -> Self {
        Self { secret, strength: OnceLock::new() }
    }

    /// Returns the secret.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        &self.secret
    }

    pub(super) fn strength(&self) -> Strength {
        *self.strength.get_or_init(|| Strength::of(self.secret.expose()))
    }

    /// Returns the value to search for, if it is strong.
    pub(super) fn search_value(&self, owner: &CredentialName) -> Option<Value<'_>> {
        let strength = self.strength();
        let value = || Value::new(ValueOwner::Credential(owner.clone()), self.secret.expose());
        strength.is_strong().then(|| value().with_halves(strength))
    }
}

impl MintRecipe {
    /// Returns the secrets that are sent to the token endpoint, or sign what is sent.
    pub fn secrets(&self) -> impl Iterator<Item = &HeldSecret> {
        let of_grant = match &self.grant {
            TokenGrant::ClientCredentials => None,
            TokenGrant::RefreshToken { token, .. } => Some(token),
            TokenGrant::JwtBearer(assertion) | TokenGrant::GithubInstallation { assertion, .. } => Some(&assertion.key),
            TokenGrant::TokenExchange { subject_token, .. } => Some(subject_token),
        };
        let of_client = match &self.client {
            ClientAuth::Anonymous | ClientAuth::Public { .. } => None,
            ClientAuth::Basic { secret, .. } | ClientAuth::Post { secret, .. } => Some(secret),
            ClientAuth::PrivateKeyJwt { assertion, .. } => Some(&assertion.key),
        };
        of_grant.into_iter().chain(of_client).map(AsRef::as_ref)
    }

    /// Returns true if a request for a token has a time in it, which depends on the clocks.
    #[must_use]
    pub fn has_assertion(&self) -> bool {
        matches!(self.client, ClientAuth::PrivateKeyJwt { .. })
            || matches!(self.grant, TokenGrant::JwtBearer(_) | TokenGrant::GithubInstallation { .. })
    }

    /// Returns the recipe with another refresh token, if it has one.
    #[must_use]
    pub fn with_refresh_token(&self, token: Secret) -> Self {
        let mut recipe = self.clone();
        if let TokenGrant::RefreshToken { token: old, .. } = &mut recipe.grant {
            *old = Arc::new(HeldSecret::new(token));
        }
        recipe
    }

    /// Returns a hash of everything that a token depends on. A token is not used under another recipe than its own.
    pub(super) fn fingerprint(&self) -> [u8; 32] {
        let mut hash = PartsHash::default();
        hash.add_all([self.url.to_string().as_str(), self.url.path()]);
        match &self.client {
            ClientAuth::Anonymous => hash.add_all(["anonymous"]),
            ClientAuth::Public { id } => hash.add_all(["public", id]),
            ClientAuth::Basic { id, .. } => hash.add_all(["basic", id]),
            ClientAuth::Post { id, .. } => hash.add_all(["post", id]),
            ClientAuth::PrivateKeyJwt { id, assertion } => {
                hash.add_all(["private_key_jwt", id]);
                hash.add_assertion(assertion);
            }
        }
        match &self.grant {
            TokenGrant::ClientCredentials => hash.add_all(["client_credentials"]),
            TokenGrant::RefreshToken { workspace, name, .. } => hash.add_all(["refresh_token", workspace, name]),
            TokenGrant::JwtBearer(assertion) => {
                hash.add_all(["jwt_bearer"]);
                hash.add_assertion(assertion);
            }
            TokenGrant::TokenExchange { subject_token_type, .. } => hash.add_all(["exchange", subject_token_type]),
            TokenGrant::GithubInstallation { assertion, repositories, permissions } => {
                hash.add_all(["github"]);
                hash.add_assertion(assertion);
                hash.add_all(repositories.iter().map(String::as_str));
                permissions.iter().for_each(|(name, level)| hash.add_all([name, "=", level]));
            }
        }
        self.parameters.iter().for_each(|(name, value)| hash.add_all([*name, "=", value]));
        self.secrets().for_each(|held| hash.add(held.secret.expose()));
        hash.0.finalize().into()
    }
}

/// The hash of parts, each with its length.
#[derive(Default)]
struct PartsHash(Sha256);

impl PartsHash {
    fn add(&mut self, part: &[u8]) {
        self.0.update(part.len().to_be_bytes());
        self.0.update(part);
    }

    fn add_all<'t>(&mut self, texts: impl IntoIterator<Item = &'t str>) {
        texts.into_iter().for_each(|text| self.add(text.as_bytes()));
    }

    fn add_assertion(&mut self, Assertion { issuer, subject, audience, scope, key_id, key: _ }: &Assertion) {
        self.add_all([issuer.as_str()]);
        for text in [subject, audience, scope, key_id] {
            self.add_all([if text.is_some() { "1" } else { "0" }, text.as_deref().unwrap_or_default()]);
        }
    }
}

impl MintedValue {
    /// Creates a token that is valid for `life` from now on. `spread`, from 0 to 1, moves the time of its renewal, so that
    /// many proxies do not renew theirs at the same time.
    ///
    /// # Errors
    /// [`UnusableToken`].
    pub fn new(value: Secret, life: Duration, spread: f64) -> Result<Self, UnusableToken> {
        let (now, life) = (Instant::now(), life.min(MAX_LIFE));
        let usable = life.saturating_sub(MARGIN.min(life / 10));
        if usable.is_zero() {
            return Err(UnusableToken::Expired);
        }
        let value = HeldSecret::new(value);
        if !value.strength().is_strong() {
            return Err(UnusableToken::Weak);
        }
        // A fifth of its life before the end, or somewhat earlier.
        let early = life.mul_f64(0.2 + 0.05 * spread.clamp(0.0, 1.0));
        let renew_at = now.checked_add(life.saturating_sub(early)).unwrap_or(now);
        let expires = (now.checked_add(usable).unwrap_or(now), SystemTime::now() + usable);
        Ok(Self { value, minted: now, expires, renew_at })
    }

    /// Returns the token.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        self.value.secret()
    }

    /// Returns the time at which it was minted.
    #[must_use]
    pub fn minted(&self) -> Instant {
        self.minted
    }

    /// Returns the time at which it expires.
    #[must_use]
    pub fn expires(&self) -> SystemTime {
        self.expires.1
    }

    fn has_expired(&self) -> bool {
        self.expires.0 <= Instant::now() || self.expires.1 <= SystemTime::now()
    }

    fn freshness(&self) -> Freshness {
        match self.has_expired() {
            true => Freshness::Absent,
            false if self.renew_at <= Instant::now() => Freshness::Aging,
            false => Freshness::Fresh,
        }
    }

    pub(super) fn strength(&self) -> Strength {
        self.value.strength()
    }

    pub(super) fn held(&self) -> &HeldSecret {
        &self.value
    }
}

impl Minting {
    pub(super) fn new(recipe: MintRecipe, workspace: &str) -> Self {
        Self { recipe: Arc::new(recipe), workspace: workspace.to_owned(), current: None, earlier: Vec::new() }
    }

    pub(super) fn freshness(&self) -> Freshness {
        self.current.as_ref().map_or(Freshness::Absent, |current| current.freshness())
    }

    /// Returns all secrets, except the token in use.
    pub(super) fn others(&self) -> impl Iterator<Item = &HeldSecret> {
        self.recipe.secrets().chain(self.earlier.iter().map(|earlier| earlier.held()))
    }

    /// Returns the state after a token has been minted.
    pub(super) fn with_value(&self, recipe: Arc<MintRecipe>, value: Arc<MintedValue>) -> Self {
        Self { recipe, workspace: self.workspace.clone(), current: Some(value), earlier: self.still_valid() }
    }

    /// Returns the state under a newer policy. Tokens of another recipe are only searched for.
    pub(super) fn taken_over_by(&self, new: &Self) -> Self {
        let is_same = self.recipe.fingerprint() == new.recipe.fingerprint();
        let (current, earlier) =
            if is_same { (self.current.clone(), self.earlier.clone()) } else { (None, self.still_valid()) };
        Self { recipe: new.recipe.clone(), workspace: new.workspace.clone(), current, earlier }
    }

    /// Returns the tokens that have not expired, except the oldest if there are too many.
    fn still_valid(&self) -> Vec<Arc<MintedValue>> {
        let all = self.current.iter().chain(&self.earlier);
        all.filter(|value| !value.has_expired()).take(MAX_EARLIER).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf";

    fn value(life: u64) -> Result<MintedValue, UnusableToken> {
        MintedValue::new(Secret::new(TOKEN.into()), Duration::from_secs(life), 0.5)
    }

    #[test]
    fn a_token_is_renewed_before_its_end_and_not_used_in_its_last_seconds() {
        let left = |value: &MintedValue| {
            let now = Instant::now();
            (
                value.renew_at.saturating_duration_since(now).as_secs(),
                value.expires.0.saturating_duration_since(now).as_secs(),
            )
        };
        for (life, renewed, used) in [(3600, 2789, 3589), (100, 77, 89), (1, 0, 0), (u64::MAX, 2_008_799, 2_591_989)] {
            let value = value(life).ok().unwrap();
            assert_eq!(left(&value), (renewed, used), "{life}");
        }
        assert_eq!(value(3600).ok().unwrap().freshness(), Freshness::Fresh);
        assert_eq!(value(0).err(), Some(UnusableToken::Expired));
        let weak = MintedValue::new(Secret::new(b"password1".to_vec()), Duration::from_secs(60), 0.0);
        assert_eq!(weak.err(), Some(UnusableToken::Weak));
    }

    #[test]
    fn the_end_by_either_clock_counts() {
        let fresh = || value(3600).ok().unwrap();
        let (now, wall) = (Instant::now(), SystemTime::now());
        let slept = MintedValue { expires: (fresh().expires.0, wall), ..fresh() };
        let over = MintedValue { expires: (now, fresh().expires.1), ..fresh() };
        let aging = MintedValue { renew_at: now, ..fresh() };
        assert_eq!(
            [slept, over, aging].map(|value| value.freshness()),
            [Freshness::Absent, Freshness::Absent, Freshness::Aging]
        );
    }

    #[test]
    fn earlier_tokens_are_kept_while_they_may_be_valid() {
        let recipe = |scope: &str| MintRecipe {
            url: HookUrl::parse("https://login.test/token").unwrap(),
            grant: TokenGrant::ClientCredentials,
            client: ClientAuth::Public { id: "me".to_owned() },
            parameters: vec![("scope", scope.to_owned())],
            mint_timeout: Duration::from_secs(10),
            assumed_life: Duration::from_secs(3600),
        };
        let mut minting = Minting::new(recipe("a"), "default");
        assert_eq!(minting.freshness(), Freshness::Absent);
        for n in 0..MAX_EARLIER + 3 {
            minting = minting.with_value(minting.recipe.clone(), Arc::new(value(3600).ok().unwrap()));
            assert_eq!(minting.earlier.len(), n.min(MAX_EARLIER));
        }
        let over = MintedValue { expires: (Instant::now(), SystemTime::now()), ..value(3600).ok().unwrap() };
        minting.current = Some(Arc::new(over));
        assert_eq!(minting.still_valid().len(), MAX_EARLIER);

        minting.current = Some(Arc::new(value(3600).ok().unwrap()));
        let same = minting.taken_over_by(&Minting::new(recipe("a"), "default"));
        assert!(same.current.is_some() && same.earlier.len() == MAX_EARLIER);
        let other = minting.taken_over_by(&Minting::new(recipe("a b"), "default"));
        assert!(other.current.is_none() && other.earlier.len() == MAX_EARLIER, "they are searched for, and not sent");
    }
}

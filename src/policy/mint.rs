//! Credentials that are minted: an access token from a token endpoint, which expires and is then replaced.

use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant, SystemTime};

use sha2::{Digest, Sha256};

use super::hook_url::HookUrl;
use super::settings::Source;
use super::source::SecretStore;
use crate::leak::strength::Strength;
use crate::leak::{Value, ValueOwner};
use crate::model::name::CredentialName;
use crate::model::secret::Secret;

/// The most earlier tokens of a credential that are searched for, beside those that are sent. There are fewer unless an endpoint
/// issues tokens of seconds.
const MAX_EARLIER: usize = 16;
/// With this many earlier tokens that may still be valid, none is replaced before its time.
pub const MAX_REPLACED: usize = 8;
/// The most secrets of a recipe that are searched for after they were replaced.
const MAX_RETIRED: usize = 4;
/// How long a token is searched for after the end of its life, because clocks differ.
const AFTER_END: Duration = Duration::from_secs(300);
/// How long a token is searched for whose endpoint does not state its life.
const UNSTATED_SEARCH: Duration = Duration::from_secs(12 * 3600);
/// The longest life of a token, whatever its server says.
const MAX_LIFE: Duration = Duration::from_secs(30 * 24 * 3600);
/// The longest time that a token is searched for.
const MAX_SEARCH: Duration = Duration::from_secs(400 * 24 * 3600);
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

/// An access token.
pub struct MintedValue {
    value: HeldSecret,
    minted: Instant,
    minted_at: SystemTime,
    /// The end of its use, by both clocks: only one of them goes on while the machine sleeps.
    expires: (Instant, SystemTime),
    /// The end of its life.
    ends: Instant,
    /// The time from which on it is replaced.
    renew_at: Instant,
    /// The time up to which it is searched for.
    searched_until: Instant,
}

/// The life of a token.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenLife {
    /// Its endpoint says so.
    Stated(Duration),
    /// The configuration says so, because the endpoint does not.
    Assumed(Duration),
}

/// The recipe of a credential, and the tokens that were minted by it.
pub(super) struct Minting {
    pub(super) recipe: Arc<MintRecipe>,
    /// The recipe's fingerprint, which each request compares.
    pub(super) fingerprint: [u8; 32],
    /// The workspace of the tasks that share the tokens.
    pub(super) workspace: String,
    /// The token that is sent.
    pub(super) current: Option<Arc<MintedValue>>,
    /// The token that will be sent once the current one has expired. It is searched for already, so that exchanges that begin
    /// now know it.
    pub(super) next: Option<Arc<MintedValue>>,
    /// Tokens that may still be valid, the latest first. They are searched for, and not sent.
    pub(super) earlier: Vec<Arc<MintedValue>>,
    /// Secrets of earlier recipes, the latest first.
    retired: Vec<Arc<HeldSecret>>,
}

/// The way in which a new token takes its place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Placing {
    /// It is sent from now on.
    Now,
    /// It is sent once the current one has expired.
    AfterCurrent,
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
    /// It has expired, and the next one is there.
    Replaceable,
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
    /// Returns the secrets that are sent to the token endpoint, or sign what is sent, with the keys that name their sources.
    pub fn secrets(&self) -> impl Iterator<Item = (&'static str, &Arc<HeldSecret>)> {
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
        parts.join(", ")
    }

    /// Returns true if a request for a token has a time in it, which depends on the clocks.
    #[must_use]
    pub fn has_assertion(&self) -> bool {
        matches!(self.client, ClientAuth::PrivateKeyJwt { .. })
            || matches!(self.grant, TokenGrant::JwtBearer(_) | TokenGrant::GithubInstallation { .. })
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

    /// Returns the recipe with another token of the grant.
    #[must_use]
    pub fn with_token(&self, new: Secret) -> Self {
        let mut recipe = self.clone();
        match &mut recipe.grant {
            TokenGrant::RefreshToken { token, .. } | TokenGrant::TokenExchange { subject_token: token, .. } => {
                *token = Arc::new(HeldSecret::new(new));
            }
            TokenGrant::ClientCredentials | TokenGrant::JwtBearer(_) | TokenGrant::GithubInstallation { .. } => {}
        }
        recipe
    }

    /// Returns a hash of everything that a token depends on. A token is not used under another recipe than its own.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
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
            TokenGrant::RefreshToken { stored: StoredSecret { workspace, name, .. }, .. } => {
                hash.add_all(["refresh_token", workspace, name]);
            }
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
        // Others renew the token that is exchanged, which changes nothing of what it permits.
        let is_part = |key: &str| key != "subject_token";
        let secrets = self.secrets().filter(|(key, _)| is_part(key));
        secrets.for_each(|(_, held)| hash.add(held.secret.expose()));
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
    /// Creates a token whose life begins now. `spread`, from 0 to 1, moves the time of its renewal, so that many proxies do not
    /// renew theirs at the same time.
    ///
    /// # Errors
    /// [`UnusableToken`].
    pub fn new(value: Secret, life: TokenLife, spread: f64) -> Result<Self, UnusableToken> {
        let (TokenLife::Stated(whole) | TokenLife::Assumed(whole)) = life;
        let (now, life_used) = (Instant::now(), whole.min(MAX_LIFE));
        let usable = life_used.saturating_sub(MARGIN.min(life_used / 10));
        if usable.is_zero() {
            return Err(UnusableToken::Expired);
        }
        let value = HeldSecret::new(value);
        if !value.strength().is_strong() {
            return Err(UnusableToken::Weak);
        }
        // A fifth of its life before the end, or somewhat earlier.
        let early = life_used.mul_f64(0.2 + 0.05 * spread.clamp(0.0, 1.0));
        let after = |time: Duration| now.checked_add(time).unwrap_or(now);
        let searched = match life {
            TokenLife::Stated(whole) => whole.min(MAX_SEARCH).saturating_add(AFTER_END),
            TokenLife::Assumed(assumed) => assumed.max(UNSTATED_SEARCH),
        };
        Ok(Self {
            value,
            minted: now,
            minted_at: SystemTime::now(),
            expires: (after(usable), SystemTime::now() + usable),
            ends: after(life_used),
            renew_at: after(life_used.saturating_sub(early)),
            searched_until: after(searched),
        })
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

    /// Returns that time by the clock.
    #[must_use]
    pub fn minted_at(&self) -> SystemTime {
        self.minted_at
    }

    /// Returns the time at which it expires.
    #[must_use]
    pub fn expires(&self) -> SystemTime {
        self.expires.1
    }

    /// Returns true if it is not valid any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.ends <= Instant::now()
    }

    fn has_expired(&self) -> bool {
        self.expires.0 <= Instant::now() || self.expires.1 <= SystemTime::now()
    }

    /// Returns true if both are the same token.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        self.secret().expose() == other.secret().expose()
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
        Self {
            fingerprint: recipe.fingerprint(),
            recipe: Arc::new(recipe),
            workspace: workspace.to_owned(),
            current: None,
            next: None,
            earlier: Vec::new(),
            retired: Vec::new(),
        }
    }

    pub(super) fn freshness(&self) -> Freshness {
        let current = self.current.as_ref().map_or(Freshness::Absent, |current| current.freshness());
        let has_next = self.has_next();
        match current {
            Freshness::Absent if has_next => Freshness::Replaceable,
            // The renewal is there already.
            Freshness::Aging if has_next => Freshness::Fresh,
            other => other,
        }
    }

    /// Returns the tokens that are searched for, except the current one.
    pub(super) fn other_values(&self) -> impl Iterator<Item = &Arc<MintedValue>> {
        self.next.iter().chain(&self.earlier)
    }

    /// Returns all secrets, except the current token.
    pub(super) fn others(&self) -> impl Iterator<Item = &HeldSecret> {
        let recipe = self.recipe.secrets().map(|(_, held)| held.as_ref());
        let tokens = self.other_values().map(|value| value.held());
        recipe.chain(tokens).chain(self.retired.iter().map(AsRef::as_ref))
    }

    /// Returns the number of tokens that were replaced before their time.
    pub(super) fn replaced_count(&self) -> usize {
        self.earlier.iter().filter(|earlier| !earlier.has_expired()).count()
    }

    /// Returns true if the next token is there and valid.
    pub(super) fn has_next(&self) -> bool {
        self.next.as_ref().is_some_and(|next| !next.has_expired())
    }

    /// Returns the state with the recipe for the next token.
    pub(super) fn with_recipe(&self, recipe: Arc<MintRecipe>) -> Self {
        let retired = self.retired_by(&recipe);
        let (current, next, earlier) = (self.current.clone(), self.next.clone(), self.earlier.clone());
        let fingerprint = recipe.fingerprint();
        Self { recipe, fingerprint, workspace: self.workspace.clone(), current, next, earlier, retired }
    }

    /// Returns the state after a token has been minted. An endpoint may issue the same token again.
    pub(super) fn with_value(&self, recipe: Arc<MintRecipe>, value: Arc<MintedValue>, placing: Placing) -> Self {
        let is_known = self.current.as_ref().is_some_and(|current| current.is_same_as(&value));
        let is_valid = self.current.as_ref().is_some_and(|current| !current.has_expired());
        let waits = placing == Placing::AfterCurrent && is_valid && !is_known;
        let (current, next) = if waits { (self.current.clone(), Some(value)) } else { (Some(value), None) };
        let earlier = self.searched_besides(&[&current, &next]);
        let (retired, fingerprint) = (self.retired_by(&recipe), recipe.fingerprint());
        Self { recipe, fingerprint, workspace: self.workspace.clone(), current, next, earlier, retired }
    }

    /// Returns the state in which the next token is sent, if it is time: the current one has expired, or an origin has rejected
    /// the one that was minted at this time.
    pub(super) fn promoted(&self, rejected: Option<Instant>) -> Option<Self> {
        let is_rejected = self.current.as_ref().is_some_and(|current| rejected == Some(current.minted));
        if !self.has_next() || !(is_rejected || self.freshness() == Freshness::Replaceable) {
            return None;
        }
        let current = self.next.clone();
        let earlier = self.searched_besides(&[&current]);
        let (recipe, workspace, retired) = (self.recipe.clone(), self.workspace.clone(), self.retired.clone());
        Some(Self { recipe, fingerprint: self.fingerprint, workspace, current, next: None, earlier, retired })
    }

    /// Returns the state under a newer policy. Tokens of another recipe are only searched for.
    pub(super) fn taken_over_by(&self, new: &Self) -> Self {
        let is_same = self.fingerprint == new.fingerprint;
        let (current, next) = if is_same { (self.current.clone(), self.next.clone()) } else { (None, None) };
        let earlier = self.searched_besides(&[&current, &next]);
        let retired = self.retired_by(&new.recipe);
        let (recipe, workspace) = (new.recipe.clone(), new.workspace.clone());
        Self { recipe, fingerprint: new.fingerprint, workspace, current, next, earlier, retired }
    }

    /// Returns the tokens that may still be valid, except those that are kept elsewhere, and the oldest if there are too many.
    fn searched_besides(&self, kept: &[&Option<Arc<MintedValue>>]) -> Vec<Arc<MintedValue>> {
        let now = Instant::now();
        let is_kept =
            |value: &MintedValue| kept.iter().any(|kept| kept.as_ref().is_some_and(|kept| kept.is_same_as(value)));
        let all = self.current.iter().chain(&self.next).chain(&self.earlier);
        let mut left: Vec<Arc<MintedValue>> = Vec::new();
        for value in all.filter(|value| value.searched_until > now && !is_kept(value)) {
            if left.len() < MAX_EARLIER && !left.iter().any(|known| known.is_same_as(value)) {
                left.push(value.clone());
            }
        }
        left
    }

    /// Returns the secrets that are no longer those of the recipe.
    fn retired_by(&self, new: &MintRecipe) -> Vec<Arc<HeldSecret>> {
        let is_new = |held: &HeldSecret| new.secrets().any(|(_, new)| new.secret.expose() == held.secret.expose());
        let all = self.recipe.secrets().map(|(_, held)| held).chain(&self.retired);
        all.filter(|held| !is_new(held)).take(MAX_RETIRED).cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TOKEN: &str = "k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf";

    fn value(life: u64) -> Result<MintedValue, UnusableToken> {
        value_of(TOKEN, life)
    }

    fn value_of(token: &str, life: u64) -> Result<MintedValue, UnusableToken> {
        MintedValue::new(Secret::new(token.into()), TokenLife::Stated(Duration::from_secs(life)), 0.5)
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
        let weak = value_of("password1", 60);
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
        let token = |n: usize| Arc::new(value_of(&format!("{TOKEN}{n:03}"), 3600).ok().unwrap());
        assert_eq!(minting.freshness(), Freshness::Absent);
        for n in 0..MAX_EARLIER + 3 {
            minting = minting.with_value(minting.recipe.clone(), token(n), Placing::Now);
            assert_eq!(minting.earlier.len(), n.min(MAX_EARLIER));
            // The endpoint issues the same one again.
            minting = minting.with_value(minting.recipe.clone(), token(n), Placing::AfterCurrent);
            assert_eq!((minting.earlier.len(), minting.next.is_some()), (n.min(MAX_EARLIER), false));
        }
        let now = Instant::now();
        let over = MintedValue { searched_until: now, ..value(3600).ok().unwrap() };
        minting.current = Some(Arc::new(over));
        minting = minting.with_value(minting.recipe.clone(), token(0), Placing::Now);
        assert_eq!(minting.earlier.len(), MAX_EARLIER, "the one that is over is not among them");

        let same = minting.taken_over_by(&Minting::new(recipe("a"), "default"));
        assert!(same.current.is_some() && same.earlier.len() == MAX_EARLIER);
        let other = minting.taken_over_by(&Minting::new(recipe("a b"), "default"));
        assert!(other.current.is_none() && other.earlier.len() == MAX_EARLIER, "they are searched for, and not sent");
        assert!(other.earlier[0].is_same_as(&token(0)));
    }

    #[test]
    fn a_renewal_is_sent_after_the_end_of_the_current_token() {
        let recipe = MintRecipe {
            url: HookUrl::parse("https://login.test/token").unwrap(),
            grant: TokenGrant::ClientCredentials,
            client: ClientAuth::Public { id: "me".to_owned() },
            parameters: Vec::new(),
            mint_timeout: Duration::from_secs(10),
            assumed_life: Duration::from_secs(3600),
        };
        let now = Instant::now();
        let aging = MintedValue { renew_at: now, ..value(3600).ok().unwrap() };
        let renewal = Arc::new(value_of(&TOKEN.replace('k', "x"), 3600).ok().unwrap());
        let minting = Minting::new(recipe, "default");
        let minting = minting.with_value(minting.recipe.clone(), Arc::new(aging), Placing::AfterCurrent);
        assert_eq!(minting.freshness(), Freshness::Aging);
        let mut minting = minting.with_value(minting.recipe.clone(), renewal.clone(), Placing::AfterCurrent);
        assert_eq!(minting.freshness(), Freshness::Fresh);
        assert_eq!(minting.others().count(), 1, "it is searched for");
        let current = minting.current.as_ref().map(|current| current.minted);
        assert!(minting.promoted(None).is_none() && minting.promoted(Some(now)).is_none(), "it is not time");
        assert!(minting.promoted(current).is_some(), "an origin has rejected the current one");
        minting.current =
            Some(Arc::new(MintedValue { expires: (now, SystemTime::now()), ..value(3600).ok().unwrap() }));
        assert_eq!(minting.freshness(), Freshness::Replaceable);
        let minting = minting.promoted(None).unwrap();
        assert!(minting.promoted(None).is_none(), "once");
        assert!(minting.current.as_ref().is_some_and(|current| current.is_same_as(&renewal)));
        assert_eq!((minting.freshness(), minting.next.is_some(), minting.earlier.len()), (Freshness::Fresh, false, 1));
    }
}

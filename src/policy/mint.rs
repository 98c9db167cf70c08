//! Credentials that are minted: their values are fetched from a token endpoint or a secret store, and replaced later.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use parking_lot::RwLock;

use super::assumed_role::RoleRequest;
use super::aws::AwsKey;
use super::command_source::CommandRead;
use super::held_secret::{HeldSecret, PartsHash};
use super::hook_url::HookUrl;
use super::secret_store::StoreRead;
use super::token_request::{SecretRead, TokenGrant, TokenRequest};
use crate::leak;
use crate::leak::strength::Strength;
use crate::model::name::CredentialName;
use crate::model::secret::Secret;

/// The most earlier tokens of a credential that are searched for, beside those that are sent. There are fewer unless an endpoint
/// issues tokens of seconds.
const MAX_EARLIER: usize = 16;
/// The most values of removed recipes that are searched for.
pub(super) const MAX_FORMER: usize = MAX_EARLIER;
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
/// The longest time in which an earlier value is still used, although its store has another one.
const MAX_GRACE: Duration = Duration::from_secs(60);
/// A token is not used in its last seconds, because a request takes time and clocks differ.
const MARGIN: Duration = Duration::from_secs(10);

/// How a value is fetched.
#[derive(Clone)]
pub struct MintRecipe {
    /// The request.
    pub method: MintMethod,
    /// How long a request of a client waits for a value.
    pub mint_timeout: Duration,
}

/// The server that a value is fetched from, and the request.
#[derive(Clone)]
pub enum MintMethod {
    /// An access token from a token endpoint.
    Token(Arc<TokenRequest>),
    /// A value from a secret store.
    Store(Arc<StoreRead>),
    /// Temporary credentials of a role of AWS.
    Role(Arc<RoleRequest>),
    /// The output of a command.
    Command(Arc<CommandRead>),
}

/// A value that was fetched.
pub struct MintedValue {
    value: HeldSecret,
    /// It is `user:password`, and the password is a secret of its own.
    has_password: bool,
    /// The rest of the key, if the value is one of AWS.
    aws_key: Option<AwsKey>,
    /// They change if the same value is fetched again.
    times: RwLock<Times>,
}

/// The times of a value.
#[derive(Clone, Copy)]
struct Times {
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
    /// Nobody has stated a life.
    has_no_life: bool,
}

/// The life of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TokenLife {
    /// Its endpoint says so.
    Stated(Duration),
    /// The configuration says so, because the endpoint does not.
    Assumed(Duration),
    /// It has none. It is fetched again after a time, because it may have been replaced, and not used longer without that.
    Kept {
        /// The time after which it is fetched again.
        refresh: Duration,
        /// How much longer it is used if that fails.
        max_stale: Duration,
    },
}

/// The recipe of a credential, and the tokens that were minted by it.
pub(super) struct Minting {
    pub(super) recipe: Arc<MintRecipe>,
    /// The recipe's fingerprint, which each request compares.
    pub(super) fingerprint: [u8; 32],
    /// The time at which the configuration with the recipe was read.
    pub(super) since: Instant,
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
    /// It is sent in a short time, so that most requests in progress end before.
    Soon,
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
    /// It can, but the configuration was read again since it was fetched, and its store may have another one.
    Unconfirmed,
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
    /// It cannot be sent where the credential says.
    #[error("{0}")]
    Unfit(&'static str),
}

impl TokenLife {
    /// Returns the time in which the value is used.
    #[must_use]
    pub fn time(self) -> Duration {
        match self {
            Self::Stated(time) | Self::Assumed(time) => time,
            Self::Kept { refresh, max_stale } => refresh.saturating_add(max_stale),
        }
    }
}

impl MintRecipe {
    /// Returns the URL of the server, which is always the operator's. `None` for a command.
    #[must_use]
    pub fn url(&self) -> Option<&HookUrl> {
        match &self.method {
            MintMethod::Token(request) => Some(&request.url),
            MintMethod::Store(read) => Some(&read.server.url),
            MintMethod::Role(request) => Some(&request.url),
            MintMethod::Command(_) => None,
        }
    }

    /// Returns the URLs of all servers that are asked for a value.
    pub(super) fn urls(&self) -> impl Iterator<Item = &HookUrl> {
        let fetched = match &self.method {
            MintMethod::Token(request) => request.fetched.as_slice(),
            _ => &[],
        };
        let of_fetched = fetched.iter().filter_map(|fetched| match &fetched.read {
            SecretRead::Store(read) => Some(&read.server.url),
            SecretRead::Command(_) => None,
        });
        self.url().into_iter().chain(of_fetched)
    }

    /// Returns the server that is asked, without the path of its URL, or the program that is run.
    #[must_use]
    pub fn server(&self) -> String {
        match &self.method {
            MintMethod::Command(read) => read.source.to_string(),
            _ => self.url().map(ToString::to_string).unwrap_or_default(),
        }
    }

    /// Returns the place that values come from, without a secret: the token endpoint without its path, the reference, the ARN of
    /// the role, or the program.
    #[must_use]
    pub fn source(&self) -> String {
        match &self.method {
            MintMethod::Token(request) => request.url.to_string(),
            MintMethod::Store(read) => read.reference.to_string(),
            MintMethod::Role(request) => request.role_arn.clone(),
            MintMethod::Command(read) => read.source.to_string(),
        }
    }

    /// Returns the secrets that are sent to the server, or sign what is sent, with the keys that name their sources.
    pub fn secrets(&self) -> impl Iterator<Item = (&'static str, &Arc<HeldSecret>)> {
        let (token, store, role) = match &self.method {
            MintMethod::Token(request) => (Some(request), None, None),
            MintMethod::Store(read) => (None, Some(read), None),
            MintMethod::Role(request) => (None, None, Some(request)),
            MintMethod::Command(_) => (None, None, None),
        };
        let of_token = token.into_iter().flat_map(|request| request.secrets());
        let of_store = store.into_iter().flat_map(|read| read.secrets());
        of_token.chain(of_store).chain(role.into_iter().flat_map(|request| request.secrets()))
    }

    /// Returns those of the secrets that change while the policy is in force.
    pub(super) fn changing_secrets(&self) -> impl Iterator<Item = &Arc<HeldSecret>> {
        let (token, store) = match &self.method {
            MintMethod::Token(request) => (Some(request.changing_secrets()), None),
            MintMethod::Store(read) => (None, Some(read)),
            MintMethod::Role(_) | MintMethod::Command(_) => (None, None),
        };
        token.into_iter().flatten().chain(store.into_iter().flat_map(|read| read.secrets()).map(|(_, held)| held))
    }

    /// Describes what its values permit, without a secret.
    #[must_use]
    pub fn permissions(&self) -> String {
        match &self.method {
            MintMethod::Token(request) => request.permissions(),
            MintMethod::Store(read) => format!("{} at {}", read.reference, read.server.url),
            MintMethod::Role(request) => request.permissions(),
            MintMethod::Command(read) => read.source.in_full(),
        }
    }

    /// Returns a hash of everything that a value depends on. A value is not used under another recipe than its own.
    #[must_use]
    pub fn fingerprint(&self) -> [u8; 32] {
        let mut hash = PartsHash::default();
        match &self.method {
            MintMethod::Token(request) => request.add_to(&mut hash),
            MintMethod::Store(read) => {
                hash.add_all(["store"]);
                read.add_to(&mut hash);
            }
            MintMethod::Role(request) => {
                hash.add_all(["role"]);
                request.add_to(&mut hash);
            }
            MintMethod::Command(read) => {
                hash.add_all(["command"]);
                read.add_to(&mut hash);
            }
        }
        hash.finish()
    }

    /// Returns the recipe with the secrets of another one that is the same otherwise, except for its times.
    #[must_use]
    pub fn with_secrets_of(&self, other: &Self) -> Self {
        let method = match (&self.method, &other.method) {
            (MintMethod::Token(own), MintMethod::Token(other)) => {
                MintMethod::Token(Arc::new(own.with_secrets_of(other)))
            }
            (MintMethod::Store(own), MintMethod::Store(other)) => {
                let server = other.server.clone();
                MintMethod::Store(Arc::new(StoreRead { server, ..(**own).clone() }))
            }
            (own, _) => own.clone(),
        };
        Self { method, mint_timeout: self.mint_timeout }
    }

    /// Returns true if a fetch must go on until it ends, because it replaces a secret that it needs.
    #[must_use]
    pub fn replaces_secret(&self) -> bool {
        matches!(&self.method, MintMethod::Token(request) if matches!(request.grant, TokenGrant::RefreshToken { .. }))
    }

    /// Returns how long a value without a life is used after another one was fetched.
    fn grace(&self) -> Duration {
        match &self.method {
            MintMethod::Token(_) | MintMethod::Role(_) => Duration::ZERO,
            MintMethod::Store(read) => MAX_GRACE.min(read.refresh),
            MintMethod::Command(read) => MAX_GRACE.min(read.refresh),
        }
    }

    /// Returns true if the value may change before its time, when an operator changes it.
    fn is_kept(&self) -> bool {
        matches!(self.method, MintMethod::Store(_) | MintMethod::Command(_))
    }
}

impl MintedValue {
    /// Creates a value whose life begins when it was asked for, with its strength, which is that of the password if it has one.
    /// `spread`, from 0 to 1, moves the time of its renewal, so that many proxies do not renew theirs at the same time.
    ///
    /// # Errors
    /// [`UnusableToken`].
    pub fn new(
        value: Secret,
        (strength, has_password): (Strength, bool),
        (asked, life): (Instant, TokenLife),
        spread: f64,
    ) -> Result<Self, UnusableToken> {
        let times = Times::of(asked, life, spread.clamp(0.0, 1.0)).ok_or(UnusableToken::Expired)?;
        if !strength.is_strong() {
            return Err(UnusableToken::Weak);
        }
        let (value, times) = (HeldSecret::with_strength(value, strength), RwLock::new(times));
        Ok(Self { value, has_password, aws_key: None, times })
    }

    /// Returns the value with the rest of its key.
    ///
    /// # Errors
    /// [`UnusableToken::Weak`] if its session token is.
    pub(super) fn with_aws_key(self, key: AwsKey) -> Result<Self, UnusableToken> {
        if key.session_token.as_ref().is_some_and(|token| !token.strength().is_strong()) {
            return Err(UnusableToken::Weak);
        }
        Ok(Self { aws_key: Some(key), ..self })
    }

    /// Returns the rest of the key, if the value is one of AWS.
    #[must_use]
    pub(super) fn aws_key(&self) -> Option<&AwsKey> {
        self.aws_key.as_ref()
    }

    /// Returns the token of temporary credentials of AWS.
    pub(super) fn session_token(&self) -> Option<&Arc<HeldSecret>> {
        self.aws_key.as_ref()?.session_token.as_ref()
    }

    /// Returns the password, if the value is `user:password`.
    pub(super) fn password(&self) -> Option<&[u8]> {
        self.has_password.then(|| leak::password(self.secret().expose()))
    }

    /// Returns the value, its password and its session token.
    pub(super) fn secrets(&self) -> impl Iterator<Item = &[u8]> {
        let token = self.session_token().map(|held| held.secret());
        std::iter::once(self.secret()).chain(token).map(Secret::expose).chain(self.password())
    }

    /// Notes that another value takes the place of this one. One without a life may be valid long after that.
    fn replace(&self) {
        let mut times = self.times.write();
        if times.has_no_life {
            let until = Instant::now().checked_add(UNSTATED_SEARCH).unwrap_or(times.searched_until);
            times.searched_until = times.searched_until.max(until);
        }
    }

    /// Takes the times of the same value, which was fetched again.
    pub fn confirm(&self, again: &Self) {
        let times = *again.times.read();
        *self.times.write() = times;
    }

    /// Returns the token.
    #[must_use]
    pub fn secret(&self) -> &Secret {
        self.value.secret()
    }

    /// Returns the time at which it was minted.
    #[must_use]
    pub fn minted(&self) -> Instant {
        self.times.read().minted
    }

    /// Returns that time by the clock.
    #[must_use]
    pub fn minted_at(&self) -> SystemTime {
        self.times.read().minted_at
    }

    /// Returns the time at which it expires.
    #[must_use]
    pub fn expires(&self) -> SystemTime {
        self.times.read().expires.1
    }

    /// Returns true if it is not valid any more.
    #[must_use]
    pub fn is_over(&self) -> bool {
        self.times.read().ends <= Instant::now()
    }

    /// Ends the use of the value after this time, if that is not over before.
    fn expire_within(&self, time: Duration) {
        let mut times = self.times.write();
        let (now, wall) = (Instant::now(), SystemTime::now());
        let at = now.checked_add(time).unwrap_or(now);
        times.expires = (times.expires.0.min(at), times.expires.1.min(wall + time));
    }

    /// Returns true if it may still be valid.
    pub(super) fn is_searched_for(&self) -> bool {
        self.times.read().searched_until > Instant::now()
    }

    fn has_expired(&self) -> bool {
        let expires = self.times.read().expires;
        expires.0 <= Instant::now() || expires.1 <= SystemTime::now()
    }

    /// Returns true if both are the same token, with the same parts beside it.
    #[must_use]
    pub fn is_same_as(&self, other: &Self) -> bool {
        let is_same_key = match (&self.aws_key, &other.aws_key) {
            (Some(own), Some(other)) => own.is(other),
            (own, other) => own.is_none() && other.is_none(),
        };
        self.secret().expose() == other.secret().expose() && is_same_key
    }

    fn freshness(&self) -> Freshness {
        match self.has_expired() {
            true => Freshness::Absent,
            false if self.times.read().renew_at <= Instant::now() => Freshness::Aging,
            false => Freshness::Fresh,
        }
    }

    pub(super) fn strength(&self) -> Strength {
        self.value.strength()
    }
}

impl Times {
    /// Returns the times of a value whose life begins at this time. `None` if it is over already.
    fn of(now: Instant, life: TokenLife, spread: f64) -> Option<Self> {
        let after = |time: Duration| now.checked_add(time).unwrap_or(now);
        let whole = life.time();
        let used = whole.min(MAX_LIFE);
        let (margin, renewed) = match life {
            // A fifth of its life before the end, or somewhat earlier.
            TokenLife::Stated(_) | TokenLife::Assumed(_) => {
                (MARGIN.min(used / 10), used.saturating_sub(used.mul_f64(0.2 + 0.05 * spread)))
            }
            TokenLife::Kept { refresh, .. } => (Duration::ZERO, refresh.mul_f64(1.0 - 0.1 * spread)),
        };
        let usable = used.saturating_sub(margin);
        let searched = match life {
            TokenLife::Stated(whole) => whole.min(MAX_SEARCH).saturating_add(AFTER_END),
            TokenLife::Assumed(assumed) => assumed.max(UNSTATED_SEARCH),
            TokenLife::Kept { .. } => whole.max(UNSTATED_SEARCH),
        };
        (!usable.is_zero()).then(|| Self {
            minted: now,
            minted_at: SystemTime::now(),
            expires: (after(usable), SystemTime::now() + usable),
            ends: after(used),
            renew_at: after(renewed),
            searched_until: after(searched),
            has_no_life: matches!(life, TokenLife::Kept { .. }),
        })
    }
}

impl Minting {
    pub(super) fn new(recipe: MintRecipe, workspace: &str) -> Self {
        Self {
            fingerprint: recipe.fingerprint(),
            since: Instant::now(),
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
        let is_older = || self.current.iter().chain(&self.next).all(|value| value.minted() < self.since);
        match current {
            Freshness::Absent if has_next => Freshness::Replaceable,
            Freshness::Fresh | Freshness::Aging if self.recipe.is_kept() && is_older() => Freshness::Unconfirmed,
            // The renewal is there already.
            Freshness::Aging if has_next => Freshness::Fresh,
            other => other,
        }
    }

    /// Returns the tokens that are searched for, except the current one.
    pub(super) fn other_values(&self) -> impl Iterator<Item = &Arc<MintedValue>> {
        self.next.iter().chain(&self.earlier)
    }

    /// Returns the secrets of the recipe and of earlier ones.
    pub(super) fn recipe_secrets(&self) -> impl Iterator<Item = &Arc<HeldSecret>> {
        self.recipe.secrets().map(|(_, held)| held).chain(&self.retired)
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
    pub(super) fn with_recipe(&self, next: &MintRecipe) -> Self {
        let recipe = Arc::new(self.recipe.with_secrets_of(next));
        let retired = self.retired_by(&recipe);
        let (current, next, earlier) = (self.current.clone(), self.next.clone(), self.earlier.clone());
        Self { current, next, earlier, retired, ..self.emptied(recipe) }
    }

    /// Returns the state after a token has been minted, with the secrets of `next` for the next one. An endpoint may issue the same
    /// token again.
    pub(super) fn with_value(&self, next: Option<&MintRecipe>, value: Arc<MintedValue>, placing: Placing) -> Self {
        let recipe = next.map_or_else(|| self.recipe.clone(), |next| Arc::new(self.recipe.with_secrets_of(next)));
        if let (Placing::Soon, Some(current)) = (placing, &self.current) {
            current.expire_within(recipe.grace());
        }
        let is_known = self.current.as_ref().is_some_and(|current| current.is_same_as(&value));
        let is_valid = self.current.as_ref().is_some_and(|current| !current.has_expired());
        let waits = placing != Placing::Now && is_valid && !is_known;
        let (current, next) = if waits { (self.current.clone(), Some(value)) } else { (Some(value), None) };
        let earlier = self.searched_besides(&[&current, &next]);
        let retired = self.retired_by(&recipe);
        Self { current, next, earlier, retired, ..self.emptied(recipe) }
    }

    /// Returns the state in which the next token is sent, if it is time: the current one has expired, or an origin has rejected
    /// the one that was minted at this time.
    pub(super) fn promoted(&self, rejected: Option<Instant>) -> Option<Self> {
        let is_rejected = self.current.as_ref().is_some_and(|current| rejected == Some(current.minted()));
        if !self.has_next() || !(is_rejected || self.freshness() == Freshness::Replaceable) {
            return None;
        }
        let current = self.next.clone();
        let earlier = self.searched_besides(&[&current]);
        let retired = self.retired.clone();
        Some(Self { current, earlier, retired, ..self.emptied(self.recipe.clone()) })
    }

    /// Returns the state under a newer policy. Tokens of another recipe are only searched for.
    pub(super) fn taken_over_by(&self, new: &Self, has_same_form: bool) -> Self {
        let is_same = self.fingerprint == new.fingerprint && has_same_form;
        let (current, next) = if is_same { (self.current.clone(), self.next.clone()) } else { (None, None) };
        let earlier = self.searched_besides(&[&current, &next]);
        // The secrets that were fetched for the same recipe are still in use.
        let recipe = match (&self.recipe.method, &new.recipe.method) {
            (MintMethod::Token(old), MintMethod::Token(own))
                if self.fingerprint == new.fingerprint && !own.fetched.is_empty() =>
            {
                let method = MintMethod::Token(Arc::new(own.with_fetched_of(old)));
                Arc::new(MintRecipe { method, mint_timeout: new.recipe.mint_timeout })
            }
            _ => new.recipe.clone(),
        };
        let retired = self.retired_by(&recipe);
        Self { current, next, earlier, retired, ..new.emptied(recipe) }
    }

    /// Returns the state with another recipe and without a value.
    fn emptied(&self, recipe: Arc<MintRecipe>) -> Self {
        let (fingerprint, since, workspace) = (recipe.fingerprint(), self.since, self.workspace.clone());
        let (current, next, earlier, retired) = (None, None, Vec::new(), Vec::new());
        Self { recipe, fingerprint, since, workspace, current, next, earlier, retired }
    }

    /// Returns the tokens that may still be valid, except those that are kept elsewhere, and the oldest if there are too many.
    fn searched_besides(&self, kept: &[&Option<Arc<MintedValue>>]) -> Vec<Arc<MintedValue>> {
        let is_kept =
            |value: &MintedValue| kept.iter().any(|kept| kept.as_ref().is_some_and(|kept| kept.is_same_as(value)));
        let all = self.current.iter().chain(&self.next).chain(&self.earlier);
        self.current.iter().chain(&self.next).filter(|value| !is_kept(value)).for_each(|value| value.replace());
        let mut left: Vec<Arc<MintedValue>> = Vec::new();
        for value in all.filter(|value| value.is_searched_for() && !is_kept(value)) {
            if left.len() < MAX_EARLIER && !left.iter().any(|known| known.is_same_as(value)) {
                left.push(value.clone());
            }
        }
        left
    }

    /// Returns the values that may still be valid when the recipe is removed.
    pub(super) fn replaced(&self) -> Vec<Arc<MintedValue>> {
        self.searched_besides(&[])
    }

    /// Returns the secrets that are no longer those of the recipe.
    fn retired_by(&self, new: &MintRecipe) -> Vec<Arc<HeldSecret>> {
        let is_new = |held: &HeldSecret| new.secrets().any(|(_, new)| new.is(held.secret()));
        let mut left: Vec<Arc<HeldSecret>> = Vec::new();
        for held in self.recipe.secrets().map(|(_, held)| held).chain(&self.retired).filter(|held| !is_new(held)) {
            if left.len() < MAX_RETIRED && !left.iter().any(|known| known.is(held.secret())) {
                left.push(held.clone());
            }
        }
        left
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::secret_store::{StoreItem, StoreLogin, StoreReference, StoreServer};
    use crate::policy::token_request::ClientAuth;

    const TOKEN: &str = "k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf";

    fn value(life: u64) -> Result<MintedValue, UnusableToken> {
        value_of(TOKEN, life)
    }

    fn value_of(token: &str, life: u64) -> Result<MintedValue, UnusableToken> {
        minted(token, TokenLife::Stated(Duration::from_secs(life)))
    }

    fn minted(token: &str, life: TokenLife) -> Result<MintedValue, UnusableToken> {
        let strength = Strength::of(token.as_bytes());
        MintedValue::new(Secret::new(token.into()), (strength, false), (Instant::now(), life), 0.5)
    }

    /// Returns a value with other times.
    fn with_times(value: MintedValue, change: impl FnOnce(&mut Times)) -> MintedValue {
        change(&mut value.times.write());
        value
    }

    fn request(scope: Option<&str>) -> MintRecipe {
        let request = TokenRequest {
            url: HookUrl::parse("https://login.test/token").unwrap(),
            grant: TokenGrant::ClientCredentials,
            client: ClientAuth::Public { id: "me".to_owned() },
            parameters: scope.map(|scope| ("scope", scope.to_owned())).into_iter().collect(),
            assumed_life: Duration::from_secs(3600),
            fetched: Vec::new(),
        };
        MintRecipe { method: MintMethod::Token(Arc::new(request)), mint_timeout: Duration::from_secs(10) }
    }

    fn stored() -> MintRecipe {
        let server = StoreServer {
            url: HookUrl::parse("https://vault.test").unwrap(),
            login: StoreLogin::VaultToken { namespace: None },
            secrets: Vec::new(),
        };
        let read = StoreRead {
            server: Arc::new(server),
            reference: StoreReference::parse("vault://secret/a#b").and_then(Result::ok).unwrap(),
            item: StoreItem::VaultKv1 { path: Vec::new() },
            refresh: Duration::from_secs(600),
            max_stale: Duration::from_secs(3600),
            aws_key: None,
            is_document: false,
        };
        MintRecipe { method: MintMethod::Store(Arc::new(read)), mint_timeout: Duration::from_secs(10) }
    }

    #[test]
    fn a_token_is_renewed_before_its_end_and_not_used_in_its_last_seconds() {
        let left = |value: &MintedValue| {
            let now = Instant::now();
            (
                value.times.read().renew_at.saturating_duration_since(now).as_secs(),
                value.times.read().expires.0.saturating_duration_since(now).as_secs(),
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
        let slept = with_times(fresh(), |times| times.expires.1 = wall);
        let over = with_times(fresh(), |times| times.expires.0 = now);
        let aging = with_times(fresh(), |times| times.renew_at = now);
        assert_eq!(
            [slept, over, aging].map(|value| value.freshness()),
            [Freshness::Absent, Freshness::Absent, Freshness::Aging]
        );
    }

    #[test]
    fn earlier_tokens_are_kept_while_they_may_be_valid() {
        let recipe = |scope: &str| request(Some(scope));
        let mut minting = Minting::new(recipe("a"), "default");
        let token = |n: usize| Arc::new(value_of(&format!("{TOKEN}{n:03}"), 3600).ok().unwrap());
        assert_eq!(minting.freshness(), Freshness::Absent);
        for n in 0..MAX_EARLIER + 3 {
            minting = minting.with_value(None, token(n), Placing::Now);
            assert_eq!(minting.earlier.len(), n.min(MAX_EARLIER));
            // The endpoint issues the same one again.
            minting = minting.with_value(None, token(n), Placing::AfterCurrent);
            assert_eq!((minting.earlier.len(), minting.next.is_some()), (n.min(MAX_EARLIER), false));
        }
        let now = Instant::now();
        let over = with_times(value(3600).ok().unwrap(), |times| times.searched_until = now);
        minting.current = Some(Arc::new(over));
        minting = minting.with_value(None, token(0), Placing::Now);
        assert_eq!(minting.earlier.len(), MAX_EARLIER, "the one that is over is not among them");

        let same = minting.taken_over_by(&Minting::new(recipe("a"), "default"), true);
        assert!(same.current.is_some() && same.earlier.len() == MAX_EARLIER);
        let other = minting.taken_over_by(&Minting::new(recipe("a b"), "default"), true);
        assert!(other.current.is_none() && other.earlier.len() == MAX_EARLIER, "they are searched for, and not sent");
        assert!(other.earlier[0].is_same_as(&token(0)));
    }

    #[test]
    fn a_renewal_is_sent_after_the_end_of_the_current_token() {
        let now = Instant::now();
        let aging = with_times(value(3600).ok().unwrap(), |times| times.renew_at = now);
        let renewal = Arc::new(value_of(&TOKEN.replace('k', "x"), 3600).ok().unwrap());
        let minting = Minting::new(request(None), "default");
        let minting = minting.with_value(None, Arc::new(aging), Placing::AfterCurrent);
        assert_eq!(minting.freshness(), Freshness::Aging);
        let mut minting = minting.with_value(None, renewal.clone(), Placing::AfterCurrent);
        assert_eq!(minting.freshness(), Freshness::Fresh);
        assert_eq!(minting.other_values().count(), 1, "it is searched for");
        let current = minting.current.as_ref().map(|current| current.minted());
        assert!(minting.promoted(None).is_none() && minting.promoted(Some(now)).is_none(), "it is not time");
        assert!(minting.promoted(current).is_some(), "an origin has rejected the current one");
        minting.current =
            Some(Arc::new(with_times(value(3600).ok().unwrap(), |times| times.expires = (now, SystemTime::now()))));
        assert_eq!(minting.freshness(), Freshness::Replaceable);
        let minting = minting.promoted(None).unwrap();
        assert!(minting.promoted(None).is_none(), "once");
        assert!(minting.current.as_ref().is_some_and(|current| current.is_same_as(&renewal)));
        assert_eq!((minting.freshness(), minting.next.is_some(), minting.earlier.len()), (Freshness::Fresh, false, 1));
    }

    #[test]
    fn a_value_without_a_life_is_fetched_again_and_used_while_that_fails() {
        let kept = TokenLife::Kept { refresh: Duration::from_secs(600), max_stale: Duration::from_secs(3600) };
        let new = || minted(TOKEN, kept).ok().unwrap();
        let (now, times) = (Instant::now(), *new().times.read());
        let left = |time: Instant| time.saturating_duration_since(now).as_secs();
        assert_eq!((left(times.renew_at), left(times.expires.0)), (570, 4200));
        assert!(left(times.searched_until) > 11 * 3600);
        let minting = Minting::new(stored(), "default");
        let minting = minting.with_value(None, Arc::new(new()), Placing::Now);
        assert_eq!(minting.freshness(), Freshness::Fresh);

        // A reload reads it again, although it is fresh. The same value has new times then, under the same policy.
        let reloaded = minting.taken_over_by(&Minting::new(stored(), "default"), true);
        assert_eq!(reloaded.freshness(), Freshness::Unconfirmed);
        let current = reloaded.current.as_ref().unwrap();
        current.confirm(&new());
        assert_eq!(reloaded.freshness(), Freshness::Fresh);
        current.confirm(&with_times(new(), |times| times.renew_at = now));
        assert_eq!(reloaded.freshness(), Freshness::Aging);

        // Another value is sent a minute later, or at once if an operator wants it.
        let other = Arc::new(minted(&TOKEN.replace('k', "x"), kept).ok().unwrap());
        let replaced = reloaded.with_value(None, other.clone(), Placing::Soon);
        assert_eq!((replaced.freshness(), replaced.has_next()), (Freshness::Fresh, true));
        assert_eq!(left(replaced.current.as_ref().unwrap().times.read().expires.0), 60);
        let replaced = reloaded.with_value(None, other.clone(), Placing::Now);
        assert!(replaced.current.unwrap().is_same_as(&other));

        // The life of a token is stated by its endpoint, and a reload changes nothing of that.
        let token = Minting::new(request(None), "default");
        let token = token.with_value(None, Arc::new(value(3600).ok().unwrap()), Placing::Now);
        assert_eq!(token.taken_over_by(&Minting::new(request(None), "default"), true).freshness(), Freshness::Fresh);
    }
}

//! Credentials: their destinations, the form in which they are sent, and the places in which they may stand.

use std::sync::{Arc, OnceLock};
use std::time::Instant;

use http::HeaderName;
use http::header::{
    ACCEPT_ENCODING, AUTHORIZATION, CONNECTION, CONTENT_ENCODING, CONTENT_LENGTH, COOKIE, EXPECT, HOST, RANGE, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE, VIA,
};
use subtle::ConstantTimeEq;

use super::aws::{AwsAlgorithm, AwsKey, AwsSigning};
use super::client_identity::ClientIdentity;
use super::held_secret::HeldSecret;
use super::hmac::HmacRecipe;
use super::mint::{Freshness, MAX_FORMER, MintKey, MintRecipe, MintedValue, Minting, TokenLife, UnusableToken};
use super::value_fit::{self, Unfit};
use crate::leak::strength::{Halves, Strength};
use crate::leak::{self, Value, ValueOwner, ValueSource};
use crate::model::host::Host;
use crate::model::name::CredentialName;
use crate::model::secret::Secret;
use crate::model::target::{Scheme, Target};
use crate::model::wire;

/// A named secret, with the form in which it is sent and the destinations that may receive it.
///
/// ```compile_fail
/// fn show(credential: &exeat::policy::credential::Credential) -> String { format!("{credential:?}") } // no Debug
/// ```
/// ```
/// fn name(credential: &exeat::policy::credential::Credential) -> &str { credential.name().as_str() }
/// ```
pub struct Credential {
    pub(super) name: CredentialName,
    /// The workspace of the tasks that have it.
    pub(super) workspace: String,
    /// The `auth_type` of the configuration.
    pub(super) kind: &'static str,
    /// The place that the value comes from. A path is that of the file, not relative to the configuration.
    pub(super) source: String,
    pub(super) auth: Auth,
    pub(super) bound: Vec<Binding>,
    pub(super) always: bool,
    pub(super) placeholder: Option<String>,
    /// Further places in which the placeholder is replaced.
    pub(super) swap_in: Vec<Placement>,
    /// The credentials that are sent beside this one.
    pub(super) with: Vec<CredentialName>,
    /// With `aws_sigv4`, how it signs.
    pub(super) aws: Option<AwsSigning>,
    /// With `aws_sigv4`, the rest of the key. `None` if that is minted too.
    pub(super) aws_key: Option<AwsKey>,
    /// With `tls_client`, the certificate and the key that is the value.
    pub(super) identity: Option<Arc<ClientIdentity>>,
    /// `None` if the value is minted, or if the credential is disabled. The reason was reported when the configuration was
    /// read.
    pub(super) value: Option<Secret>,
    /// The recipe and the tokens of a value that is minted.
    pub(super) minting: Option<Minting>,
    /// The remains of a recipe that a reload removed. Set once, when the policy takes over from an older one.
    pub(super) former: OnceLock<Former>,
    /// Estimated at its first use, because the estimate is slow.
    pub(super) strength: OnceLock<Strength>,
}

/// The values and secrets of a recipe that a reload removed. They may still be valid, and are searched for.
#[derive(Clone, Default)]
pub(super) struct Former {
    values: Vec<Arc<MintedValue>>,
    secrets: Vec<Arc<HeldSecret>>,
}

/// The form in which a value is sent.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Auth {
    /// `Authorization: Basic base64(value)`; the value is `user:password` (RFC 7617).
    Basic,
    /// `Authorization: Bearer value` (RFC 6750 §2.1).
    Bearer,
    /// The bare value in a header field.
    Header(HeaderName),
    /// A query parameter.
    Query(String),
    /// Any header field or query parameter in which the placeholder stands as a credential: alone, after a scheme, or as the
    /// user or the password of `Basic`. The value is never sent otherwise.
    Auto,
    /// A segment of the path in which the placeholder stands. The value is never sent otherwise.
    Path,
    /// A cookie.
    Cookie(String),
    /// The places of `swap_in` in which the placeholder stands. The value is never sent otherwise.
    Placeholder,
    /// A signature of the request with a shared key, in the fields and parameters of the recipe. The value is the key, which is never
    /// sent.
    Hmac(Arc<HmacRecipe>),
    /// A client certificate in the TLS handshake with the origin. The value is its private key, which is never sent.
    TlsClient,
    /// `Authorization: AWS4-HMAC-SHA256 …` or `AWS4-ECDSA-P256-SHA256 …`: a signature of the request for AWS. The value is the
    /// secret access key, which is never sent.
    Aws(AwsAlgorithm),
}

/// A place in a request for a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// A header field.
    Field(HeaderName),
    /// A query parameter.
    Parameter(String),
    /// A segment of the path, of which the value may be a part.
    Path,
    /// A cookie.
    Cookie(String),
    /// A string in a JSON body, by its JSON Pointer (RFC 6901), or any string.
    Json(Option<String>),
    /// A parameter of a form, by its name, or any parameter.
    Form(Option<String>),
    /// A string in a JSON message of a WebSocket client, by its JSON Pointer (RFC 6901), or any string.
    Message(Option<String>),
}

/// A destination that a credential may be sent to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Binding {
    pub(super) host: Host,
    /// `None` allows every port that the task's integrations allow for that host.
    pub(super) port: Option<u16>,
}

impl Binding {
    /// Returns true if both can match the same destination.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        let ports = self.port.zip(other.port).is_none_or(|(a, b)| a == b);
        self.host == other.host && ports
    }
}

impl Auth {
    /// Returns the place of the value in a request, if it is always the same.
    #[must_use]
    pub fn place(&self) -> Option<Placement> {
        match self {
            Self::Basic | Self::Bearer | Self::Aws(_) => Some(Placement::Field(AUTHORIZATION)),
            Self::Header(name) => Some(Placement::Field(name.clone())),
            Self::Query(name) => Some(Placement::Parameter(name.clone())),
            Self::Path => Some(Placement::Path),
            Self::Cookie(name) => Some(Placement::Cookie(name.clone())),
            Self::Hmac(recipe) => recipe.place(),
            Self::Auto | Self::Placeholder | Self::TlsClient => None,
        }
    }

    /// Returns true if the value is sent only where its placeholder stands.
    #[must_use]
    pub fn needs_placeholder(&self) -> bool {
        matches!(self, Self::Auto | Self::Path | Self::Placeholder)
    }
}

impl std::fmt::Display for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Basic => f.write_str("Authorization: Basic …"),
            Self::Bearer => f.write_str("Authorization: Bearer …"),
            Self::Header(name) => write!(f, "{name}: …"),
            Self::Query(name) => write!(f, "?{name}=…"),
            Self::Auto => f.write_str("the field or parameter of its placeholder"),
            Self::Path => f.write_str("the path"),
            Self::Cookie(name) => write!(f, "Cookie: {name}=…"),
            Self::Placeholder => f.write_str("the place of its placeholder"),
            Self::TlsClient => f.write_str("a client certificate"),
            Self::Hmac(recipe) => match recipe.place() {
                Some(place) => write!(f, "{place}: a signature"),
                None => f.write_str("a signature"),
            },
            Self::Aws(algorithm) => write!(f, "Authorization: {} …", algorithm.name()),
        }
    }
}

impl Placement {
    /// Returns true if two values in these places would replace each other, or could.
    #[must_use]
    pub fn excludes(&self, other: &Self) -> bool {
        match (self, other) {
            // Each placeholder has a text of its own.
            (Self::Json(_) | Self::Form(_) | Self::Message(_), _) => false,
            (Self::Cookie(_), Self::Field(name)) | (Self::Field(name), Self::Cookie(_)) => *name == COOKIE,
            _ => self == other,
        }
    }

    /// Returns true if a place of a request is this one, or one of those that it stands for.
    fn contains(&self, place: &Self) -> bool {
        let is_kind = match self {
            Self::Json(None) => matches!(place, Self::Json(_)),
            Self::Form(None) => matches!(place, Self::Form(_)),
            Self::Message(None) => matches!(place, Self::Message(_)),
            _ => false,
        };
        is_kind || self == place
    }

    /// Returns true for a field or a parameter that is sent as it is received and has no meaning for the proxy.
    #[must_use]
    pub fn can_hold_credential(&self) -> bool {
        match self {
            Self::Field(name) => {
                let ours = name.as_str().starts_with(wire::PREFIX) || name.as_str().starts_with("proxy-");
                !ours && !RESERVED_FIELDS.contains(name)
            }
            // Only where `auth_type` or `swap_in` says so: what stands there may be shown to others.
            Self::Path | Self::Cookie(_) | Self::Json(_) | Self::Form(_) | Self::Message(_) => false,
            Self::Parameter(name) => {
                (1..=64).contains(&name.len())
                    && name.bytes().all(|b| b.is_ascii_alphanumeric() || b"-_.[]".contains(&b))
            }
        }
    }
}

/// Returns true for a value that every server reads as a part of one segment. An escaped slash or dot segment may be decoded
/// before the path is split.
#[must_use]
pub fn fits_path(value: &[u8]) -> bool {
    let fits = |byte: &u8| byte.is_ascii_graphic() && !b"/\\%?#;".contains(byte);
    !value.is_empty() && value.iter().all(fits) && !value.iter().all(|byte| *byte == b'.')
}

/// Returns true for the name of a cookie, which is a token (RFC 6265 §4.1.1).
#[must_use]
pub fn is_cookie_name(name: &str) -> bool {
    let is_token = |byte: u8| byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte);
    (1..=64).contains(&name.len()) && name.bytes().all(is_token)
}

/// Returns true for a value that every server reads as it is in a cookie (RFC 6265 §4.1.1).
#[must_use]
pub fn fits_cookie(value: &[u8]) -> bool {
    !value.is_empty() && value.iter().all(|byte| byte.is_ascii_graphic() && !b"\",;\\".contains(byte))
}

/// Fields that the proxy reads, removes or writes.
const RESERVED_FIELDS: [HeaderName; 13] = [
    ACCEPT_ENCODING,
    CONNECTION,
    CONTENT_ENCODING,
    CONTENT_LENGTH,
    EXPECT,
    HOST,
    HeaderName::from_static("keep-alive"),
    RANGE,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    VIA,
];

impl std::fmt::Display for Placement {
    /// Writes the place as the configuration and `--credential` name it.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Field(name) => write!(f, "header:{name}"),
            Self::Parameter(name) => write!(f, "query:{name}"),
            Self::Path => f.write_str("path"),
            Self::Cookie(name) => write!(f, "cookie:{name}"),
            Self::Json(None) => f.write_str("body:json"),
            Self::Json(Some(pointer)) => write!(f, "body:json:{pointer}"),
            Self::Form(None) => f.write_str("body:form"),
            Self::Form(Some(name)) => write!(f, "body:form:{name}"),
            Self::Message(None) => f.write_str("websocket"),
            Self::Message(Some(pointer)) => write!(f, "websocket:{pointer}"),
        }
    }
}

impl Credential {
    /// Returns the credential's name.
    #[must_use]
    pub fn name(&self) -> &CredentialName {
        &self.name
    }

    /// Returns the workspace of the tasks that have the credential.
    #[must_use]
    pub fn workspace(&self) -> &str {
        &self.workspace
    }

    /// Returns the `auth_type` of the configuration.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        self.kind
    }

    /// Returns the place that the value comes from: `env:NAME`, `file:PATH`, `secret:NAME`, a reference to a secret store, or the token
    /// endpoint without its path.
    #[must_use]
    pub fn source(&self) -> &str {
        &self.source
    }

    /// Returns the form in which the value is sent.
    #[must_use]
    pub fn auth(&self) -> &Auth {
        &self.auth
    }

    /// Whether the value is injected into every request to a host that the credential is bound to.
    #[must_use]
    pub fn is_always_injected(&self) -> bool {
        self.always
    }

    /// Returns the credentials that are sent beside this one.
    #[must_use]
    pub fn with(&self) -> &[CredentialName] {
        &self.with
    }

    /// Returns the credential's own placeholder, for clients that check a key's format.
    #[must_use]
    pub fn placeholder(&self) -> Option<&str> {
        self.placeholder.as_deref()
    }

    /// Returns the placeholder that a sandbox is given: the credential's own, or else `${secrets.NAME}`.
    #[must_use]
    pub fn given_placeholder(&self) -> String {
        self.placeholder().map_or_else(|| format!("${{secrets.{}}}", self.name), str::to_owned)
    }

    /// Returns the value, or `None` if the credential is disabled or has not been minted.
    #[must_use]
    pub fn value(&self) -> Option<&Secret> {
        self.value.as_ref().or_else(|| self.minted_value().map(|minted| minted.secret()))
    }

    /// Returns true if the credential has a value, or can get one.
    #[must_use]
    pub fn is_enabled(&self) -> bool {
        self.value.is_some() || self.minting.is_some()
    }

    /// Returns the value if it can be sent now.
    #[must_use]
    pub fn usable_value(&self) -> Option<&Secret> {
        // One that was fresh when the request was authorized is valid some seconds longer.
        self.value().filter(|_| self.minted_value().is_none_or(|minted| !minted.is_over()))
    }

    /// Returns whether a minted value can be sent. One that is not minted is always fresh.
    #[must_use]
    pub fn freshness(&self) -> Freshness {
        self.minting.as_ref().map_or(Freshness::Fresh, Minting::freshness)
    }

    /// Returns the recipe of a value that is minted.
    #[must_use]
    pub fn recipe(&self) -> Option<&Arc<MintRecipe>> {
        self.minting.as_ref().map(|minting| &minting.recipe)
    }

    /// Returns the fingerprint of that recipe.
    #[must_use]
    pub fn fingerprint(&self) -> Option<[u8; 32]> {
        self.minting.as_ref().map(|minting| minting.fingerprint)
    }

    /// Returns the time at which the configuration with that recipe was read.
    #[must_use]
    pub fn configured_at(&self) -> Option<Instant> {
        self.minting.as_ref().map(|minting| minting.since)
    }

    /// Returns the name of a minted credential.
    #[must_use]
    pub fn mint_key(&self) -> Option<MintKey> {
        let minting = self.minting.as_ref()?;
        Some(MintKey { name: self.name.clone(), workspace: minting.workspace.clone() })
    }

    /// Checks a value that was asked for at this time, with the rest of the key if it is one of AWS. `spread` is as for
    /// [`MintedValue::new`]. Takes some milliseconds.
    ///
    /// # Errors
    /// [`UnusableToken`] if the value cannot be sent, or not be searched for.
    pub fn checked(
        &self,
        (value, aws_key): (Secret, Option<AwsKey>),
        (asked, life): (Instant, TokenLife),
        spread: f64,
    ) -> Result<MintedValue, UnusableToken> {
        if self.aws.is_some() != aws_key.is_some() {
            return Err(UnusableToken::Unfit("not a key of AWS with its id"));
        }
        if let Some(Unfit { problem, .. }) = value_fit::unfit(&value, &self.auth, &self.swap_in) {
            return Err(UnusableToken::Unfit(problem));
        }
        if self.auth == Auth::Bearer && value_fit::repeated_scheme(&value, &self.auth).is_some() {
            return Err(UnusableToken::Unfit("the value begins with the scheme that auth_type = \"bearer\" adds"));
        }
        let password = self.password_in(value.expose());
        let (strength, has_password) = (Strength::of(password.unwrap_or(value.expose())), password.is_some());
        let minted = MintedValue::new(value, (strength, has_password), (asked, life), spread)?;
        match aws_key {
            Some(key) => minted.with_aws_key(key),
            None => Ok(minted),
        }
    }

    /// Returns the token in use.
    #[must_use]
    pub fn minted_value(&self) -> Option<&Arc<MintedValue>> {
        self.minting.as_ref()?.current.as_ref()
    }

    /// Returns the tokens that are searched for.
    pub fn minted_values(&self) -> impl Iterator<Item = &Arc<MintedValue>> {
        self.minting.iter().flat_map(|minting| &minting.current).chain(self.other_values())
    }

    /// Returns the number of tokens that were replaced before their time.
    #[must_use]
    pub fn replaced_count(&self) -> usize {
        self.minting.as_ref().map_or(0, Minting::replaced_count)
    }

    /// Returns true if the next token is there.
    #[must_use]
    pub fn has_next(&self) -> bool {
        self.minting.as_ref().is_some_and(Minting::has_next)
    }

    /// Returns true if the values of both are sent in the same form and places.
    #[must_use]
    pub fn has_form_of(&self, other: &Self) -> bool {
        self.auth == other.auth && self.swap_in == other.swap_in
    }

    /// Returns the credential with another state of its minting.
    pub(super) fn with_minting(&self, minting: Minting) -> Self {
        Self {
            name: self.name.clone(),
            workspace: self.workspace.clone(),
            kind: self.kind,
            source: self.source.clone(),
            auth: self.auth.clone(),
            bound: self.bound.clone(),
            always: self.always,
            placeholder: self.placeholder.clone(),
            swap_in: self.swap_in.clone(),
            with: self.with.clone(),
            aws: self.aws.clone(),
            // None of them is minted.
            aws_key: None,
            identity: None,
            value: None,
            minting: Some(minting),
            former: self.former.clone(),
            strength: OnceLock::new(),
        }
    }

    /// With [`Auth::Aws`], returns how requests are signed.
    #[must_use]
    pub fn aws(&self) -> Option<&AwsSigning> {
        self.aws.as_ref()
    }

    /// With [`Auth::Aws`], returns the rest of the key whose secret is the value.
    #[must_use]
    pub fn aws_key(&self) -> Option<&AwsKey> {
        self.aws_key.as_ref().or_else(|| self.minted_value()?.aws_key())
    }

    /// With [`Auth::Hmac`], returns how requests are signed.
    #[must_use]
    pub fn hmac(&self) -> Option<&HmacRecipe> {
        match &self.auth {
            Auth::Hmac(recipe) => Some(recipe),
            _ => None,
        }
    }

    /// With [`Auth::TlsClient`], returns the certificate and its key.
    #[must_use]
    pub fn identity(&self) -> Option<&Arc<ClientIdentity>> {
        self.identity.as_ref()
    }

    /// Returns true if the origin gets the value. A key that only signs is never sent; of AWS, a session token may be.
    #[must_use]
    pub fn is_sent(&self) -> bool {
        !matches!(self.auth, Auth::Hmac(_) | Auth::TlsClient)
    }

    /// Returns true if the value is a key that signs requests and is never sent.
    #[must_use]
    pub fn is_signing_key(&self) -> bool {
        matches!(self.auth, Auth::Hmac(_) | Auth::Aws(_))
    }

    /// Returns the token of temporary AWS credentials.
    fn session_token(&self) -> Option<&[u8]> {
        self.aws_key()?.session_token.as_ref().map(|held| held.secret().expose())
    }

    /// Whether a text is the value. Compares in constant time, because the time must not tell how much of a guess is right.
    #[must_use]
    pub fn is_value(&self, text: &[u8]) -> bool {
        let earlier = self.other_values().map(|minted| minted.secret());
        self.value().into_iter().chain(earlier).any(|value| value.expose().ct_eq(text).into())
    }

    /// Returns how hard the value is to guess. For `user:password` this is the strength of the password.
    #[must_use]
    pub fn strength(&self) -> Strength {
        if let Some(minting) = &self.minting {
            return minting.current.as_ref().map_or(Strength::Strong(Halves::default()), |minted| minted.strength());
        }
        *self.strength.get_or_init(|| match self.password().or(self.value().map(Secret::expose)) {
            Some(secret) => Strength::of(secret),
            None => Strength::Strong(Halves::default()),
        })
    }

    /// Takes over the strength of a credential with the same value.
    pub(super) fn reuse_strength(&self, other: &Self) {
        if let Some(known) = other.strength.get().filter(|_| self.has_values_of(other)) {
            self.strength.get_or_init(|| *known);
        }
    }

    /// Returns true if both credentials are searched for in the same way.
    pub(super) fn has_values_of(&self, other: &Self) -> bool {
        let is_basic = |credential: &Self| credential.password().is_some();
        let values = (self.value().map(Secret::expose), other.value().map(Secret::expose));
        let is_same = values.0 == values.1 && self.session_token() == other.session_token();
        let is_same = is_same && self.other_secrets().eq(other.other_secrets());
        self.name == other.name && is_basic(self) == is_basic(other) && is_same
    }

    /// Returns the password of `user:password`.
    fn password(&self) -> Option<&[u8]> {
        self.password_in(self.value()?.expose())
    }

    /// Returns the password of a value of the credential, if that is `user:password`.
    fn password_in<'v>(&self, value: &'v [u8]) -> Option<&'v [u8]> {
        let is_basic = match self.auth {
            Auth::Basic => true,
            // The client decides whether it sends the value with `Basic`.
            Auth::Auto => value.contains(&b':'),
            Auth::Bearer
            | Auth::Header(_)
            | Auth::Query(_)
            | Auth::Path
            | Auth::Cookie(_)
            | Auth::Placeholder
            | Auth::Hmac(_)
            | Auth::TlsClient
            | Auth::Aws(_) => false,
        };
        is_basic.then(|| leak::password(value))
    }

    /// Returns the values to search for. For `user:password` these are the whole value and the password alone; for AWS, the
    /// secret access key and the session token.
    pub(super) fn terms(&self) -> impl Iterator<Item = Value<'_>> {
        self.terms_of_value().chain(self.term_of_token())
    }

    /// Returns those of the values that are strong, and the secrets of its minting.
    fn strong_terms(&self) -> impl Iterator<Item = Value<'_>> {
        let of_value = self.strength().is_strong().then(|| self.terms_of_value());
        let of_recipe = self.recipe_secrets().filter_map(|held| held.search_value(&self.name));
        let minted = self
            .other_values()
            .flat_map(|minted| self.terms_of((minted.secret().expose(), minted.password()), minted.strength()));
        let tokens = self.other_values().filter_map(|minted| minted.session_token()?.search_value(&self.name));
        of_value.into_iter().flatten().chain(self.term_of_token()).chain(of_recipe).chain(minted).chain(tokens)
    }

    /// Returns the values that only a new configuration changes. The token of a grant may be replaced by its endpoint.
    pub(super) fn fixed_values(&self) -> impl Iterator<Item = &[u8]> {
        let changing = || self.recipe().into_iter().flat_map(|recipe| recipe.changing_secrets());
        let of_recipe = self.recipe().into_iter().flat_map(|recipe| recipe.secrets()).map(|(_, held)| held);
        let of_recipe = of_recipe.filter(move |held| !changing().any(|changing| Arc::ptr_eq(changing, held)));
        let token = self.aws_key.as_ref().and_then(|key| key.session_token.as_ref());
        let of_value = self.value.as_ref().into_iter().chain(token.map(|held| held.secret())).map(Secret::expose);
        of_value.chain(of_recipe.map(|held| held.secret().expose()))
    }

    /// Returns the minted values that are searched for, except the one in use.
    fn other_values(&self) -> impl Iterator<Item = &Arc<MintedValue>> {
        self.minting
            .iter()
            .flat_map(Minting::other_values)
            .chain(self.former.get().into_iter().flat_map(|former| &former.values))
    }

    /// Searches for the values of a credential under an older policy, as far as its own minting does not.
    pub(super) fn take_over_former(&self, old: &Self) {
        let removed = old.minting.as_ref().filter(|_| self.minting.is_none());
        let before = old.former.get();
        let mut former = Former::default();
        let values = before.into_iter().flat_map(|before| before.values.iter().cloned());
        for value in removed.into_iter().flat_map(Minting::replaced).chain(values) {
            let is_new = !former.values.iter().any(|known| known.is_same_as(&value));
            if is_new && value.is_searched_for() && former.values.len() < MAX_FORMER {
                former.values.push(value);
            }
        }
        let secrets = before.into_iter().flat_map(|before| &before.secrets);
        for held in removed.into_iter().flat_map(Minting::recipe_secrets).chain(secrets) {
            let is_new = !former.secrets.iter().any(|known| known.is(held.secret()));
            if is_new && former.secrets.len() < MAX_FORMER {
                former.secrets.push(held.clone());
            }
        }
        if !former.values.is_empty() || !former.secrets.is_empty() {
            // It has just been compiled.
            let _ = self.former.set(former);
        }
    }

    /// Returns the secrets of the recipe, of earlier ones, and of one that was removed.
    fn recipe_secrets(&self) -> impl Iterator<Item = &Arc<HeldSecret>> {
        let former = self.former.get().into_iter().flat_map(|former| &former.secrets);
        self.minting.iter().flat_map(Minting::recipe_secrets).chain(former)
    }

    /// Returns the secrets of the minting, and the values that were in use.
    fn other_secrets(&self) -> impl Iterator<Item = &[u8]> {
        let of_recipe = self.recipe_secrets().map(|held| held.secret().expose());
        of_recipe.chain(self.other_values().flat_map(|minted| minted.secrets()))
    }

    /// A token that is weak is refused when the configuration is read, or when it was minted.
    fn term_of_token(&self) -> Option<Value<'_>> {
        self.aws_key()?.session_token.as_ref()?.search_value(&self.name)
    }

    fn terms_of_value(&self) -> impl Iterator<Item = Value<'_>> {
        let value = self.value().map(|value| (value.expose(), self.password_in(value.expose())));
        value.into_iter().flat_map(|value| self.terms_of(value, self.strength()))
    }

    fn terms_of<'v>(
        &self,
        (value, password): (&'v [u8], Option<&'v [u8]>),
        strength: Strength,
    ) -> impl Iterator<Item = Value<'v>> {
        let owner = || ValueOwner::Credential(self.name.clone());
        let whole = match password {
            Some(_) => Value::basic(owner(), value),
            None => Value::new(owner(), value).with_halves(strength),
        };
        let password = password.map(|password| Value::new(owner(), password).with_halves(strength));
        std::iter::once(whole).chain(password)
    }

    /// Returns the destinations in the configuration's form: `host` or `host:port`.
    pub fn domains(&self) -> impl Iterator<Item = String> {
        self.bound.iter().map(|Binding { host, port }| match port {
            Some(port) => format!("{host}:{port}"),
            None => host.to_string(),
        })
    }

    /// Whether the scheme is https and the credential is bound to the host and port. Whether it may be sent there, only
    /// [`MatchedRules::may_receive`](super::rule::MatchedRules::may_receive) decides.
    pub(super) fn is_bound_to(&self, target: &Target) -> bool {
        let fits =
            |bound: &Binding| bound.host == *target.host() && bound.port.is_none_or(|port| port == target.port());
        target.scheme() == Scheme::Https && self.bound.iter().any(fits)
    }

    /// Returns the hosts that could return the value. Every host that receives the value may store it.
    pub(super) fn hosts(&self) -> impl Iterator<Item = &Host> {
        self.bound.iter().map(|bound| &bound.host)
    }

    /// Whether the credential's placeholder is replaced in this place.
    #[must_use]
    pub fn swaps_in(&self, place: &Placement) -> bool {
        self.auth == Auth::Auto && place.can_hold_credential()
            || self.auth.place().as_ref() == Some(place)
            || self.is_in_swap_in(place)
    }

    fn is_in_swap_in(&self, place: &Placement) -> bool {
        self.swap_in.iter().any(|own| own.contains(place))
    }

    /// Whether the placeholder must stand in this place as a credential, without other text around it.
    #[must_use]
    pub fn must_stand_alone_in(&self, place: &Placement) -> bool {
        !self.is_in_swap_in(place) || self.auth.place().as_ref() == Some(place)
    }

    /// Returns the places that are always written when the credential is sent as its `auth_type` says.
    pub(super) fn written_places(&self) -> impl Iterator<Item = Placement> {
        let of_signature = self.hmac().into_iter().flat_map(HmacRecipe::places);
        self.auth.place().filter(|_| self.hmac().is_none()).into_iter().chain(of_signature)
    }

    /// Whether the placeholder must be the whole string or parameter in this place of a body or a message: where a place is named, other text could
    /// make a server read something else there.
    #[must_use]
    pub fn must_be_whole_in(&self, place: &Placement) -> bool {
        let anywhere = match place {
            Placement::Json(_) => Placement::Json(None),
            Placement::Form(_) => Placement::Form(None),
            Placement::Message(_) => Placement::Message(None),
            _ => return false,
        };
        !self.swap_in.contains(&anywhere)
    }

    /// Returns the places in messages in which the placeholder is replaced.
    pub fn message_places(&self) -> impl Iterator<Item = &Placement> {
        self.swap_in.iter().filter(|place| matches!(place, Placement::Message(_)))
    }

    /// Returns the places in which the placeholder is replaced or which are written, as far as they are known without a request.
    pub fn places(&self) -> impl Iterator<Item = Placement> {
        let of_signature = self.hmac().into_iter().flat_map(HmacRecipe::places);
        self.auth.place().into_iter().chain(of_signature).chain(self.swap_in.iter().cloned())
    }
}

impl ValueSource for Arc<Credential> {
    fn values(&self) -> Vec<&[u8]> {
        let of_value = self.value().map(Secret::expose).into_iter().chain(self.password());
        of_value.chain(self.session_token()).chain(self.other_secrets()).collect()
    }

    fn search_values(&self) -> Vec<Value<'_>> {
        strong_values(std::iter::once(self)).collect()
    }
}

/// Returns the strong values of these credentials, for the leak scan.
pub(super) fn strong_values<'c>(
    credentials: impl Iterator<Item = &'c Arc<Credential>>,
) -> impl Iterator<Item = Value<'c>> {
    credentials.flat_map(|credential| credential.strong_terms())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_that_a_server_could_split_do_not_fit_a_path() {
        for value in ["7216504398:AAHq-2_m", "a.b", "a=b@c"] {
            assert!(fits_path(value.as_bytes()), "{value}");
        }
        for value in ["a/b", "a\\b", "a%2Fb", "a?b", "a#b", "a;b", "a b", "", ".", "..", "ä", "a\n"] {
            assert!(!fits_path(value.as_bytes()), "{value}");
        }
    }
}

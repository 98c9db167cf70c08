//! Credentials: their destinations, the form in which they are sent, and the placeholders that select them.

use std::sync::Arc;

use http::HeaderName;
use http::header::AUTHORIZATION;

use crate::leak::strength::Strength;
use crate::leak::{self, Value, ValueOwner};
use crate::model::host::Host;
use crate::model::name::{CredentialName, is_plain};
use crate::model::secret::Secret;
use crate::model::target::{Scheme, Target};

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
    pub(super) auth: Auth,
    pub(super) bound: Vec<Binding>,
    pub(super) always: bool,
    pub(super) placeholder: Option<String>,
    pub(super) swap_in: Vec<HeaderName>,
    /// `None` if the credential is disabled. The reason was reported when the configuration was read.
    pub(super) value: Option<Secret>,
    pub(super) strength: Strength,
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
}

/// A place in a request for a value.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Placement {
    /// A header field.
    Field(HeaderName),
    /// A query parameter.
    Parameter(String),
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
    /// Returns the place of the value in a request.
    #[must_use]
    pub fn place(&self) -> Placement {
        match self {
            Self::Basic | Self::Bearer => Placement::Field(AUTHORIZATION),
            Self::Header(name) => Placement::Field(name.clone()),
            Self::Query(name) => Placement::Parameter(name.clone()),
        }
    }
}

impl std::fmt::Display for Auth {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Basic => f.write_str("Authorization: Basic …"),
            Self::Bearer => f.write_str("Authorization: Bearer …"),
            Self::Header(name) => write!(f, "{name}: …"),
            Self::Query(name) => write!(f, "?{name}=…"),
        }
    }
}

impl Credential {
    /// Returns the credential's name.
    #[must_use]
    pub fn name(&self) -> &CredentialName {
        &self.name
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

    /// Returns the credential's own placeholder, for clients that check a key's format.
    #[must_use]
    pub fn placeholder(&self) -> Option<&str> {
        self.placeholder.as_deref()
    }

    /// Returns the value, or `None` if the credential is disabled.
    #[must_use]
    pub fn value(&self) -> Option<&Secret> {
        self.value.as_ref()
    }

    /// Returns how hard the value is to guess. For `user:password` this is the strength of the password.
    #[must_use]
    pub fn strength(&self) -> Strength {
        self.strength
    }

    /// Returns the values to search for. For `user:password` these are the whole value and the password alone.
    pub(super) fn search_values(&self) -> impl Iterator<Item = Value<'_>> {
        let whose = || ValueOwner::Credential(self.name.clone());
        let value = self.value().map(Secret::expose);
        let password = value.filter(|_| self.auth == Auth::Basic).map(leak::password);
        let whole = value.map(|value| match password {
            Some(_) => Value::basic(whose(), value),
            None => Value::new(whose(), value).with_halves(self.strength),
        });
        let password = password.map(|password| Value::new(whose(), password).with_halves(self.strength));
        whole.into_iter().chain(password)
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

    /// Whether a host could return the value. Every host that receives the value may store it.
    #[must_use]
    pub fn could_come_from(&self, host: &Host) -> bool {
        self.bound.iter().any(|bound| bound.host == *host)
    }

    /// Whether the credential's placeholder is replaced in this place.
    #[must_use]
    pub fn swaps_in(&self, place: &Placement) -> bool {
        let listed = |name: &HeaderName| *place == Placement::Field(name.clone());
        self.auth.place() == *place || self.swap_in.iter().any(listed)
    }

    /// Returns the places in which the placeholder is replaced.
    pub fn places(&self) -> impl Iterator<Item = Placement> {
        [self.auth.place()].into_iter().chain(self.swap_in.iter().cloned().map(Placement::Field))
    }
}

/// Returns the strong values of these credentials, for the leak scan.
pub(super) fn strong_values<'c>(
    credentials: impl Iterator<Item = &'c Arc<Credential>>,
) -> impl Iterator<Item = Value<'c>> {
    credentials.filter(|credential| credential.strength.is_strong()).flat_map(|credential| credential.search_values())
}

/// The maximum length of a credential's name, in bytes.
const MAX_NAME: usize = 64;

/// The syntax of placeholders for credentials in a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PlaceholderSyntax {
    /// Only `${NONCE.NAME}`, which the sender's own texts cannot contain by accident.
    Nonce(String),
    /// `${secrets.NAME}`, and the credentials' own placeholders.
    Usual,
}

/// A placeholder in a text, with the text around it.
pub struct Placeholder<'t> {
    /// The credential, or the name if the task has no credential of that name.
    pub credential: Result<Arc<Credential>, &'t str>,
    /// The text before the placeholder.
    pub before: &'t [u8],
    /// The text after the placeholder.
    pub after: &'t [u8],
}

impl PlaceholderSyntax {
    fn opening(&self) -> String {
        match self {
            Self::Nonce(nonce) => format!("${{{nonce}."),
            Self::Usual => "${secrets.".to_owned(),
        }
    }

    /// Returns the first placeholder in a text.
    pub fn first<'t>(&self, credentials: &[Arc<Credential>], text: &'t [u8]) -> Option<Placeholder<'t>> {
        self.named(credentials, text).or_else(|| match self {
            Self::Nonce(_) => None,
            Self::Usual => own_placeholder(credentials, text),
        })
    }

    fn named<'t>(&self, credentials: &[Arc<Credential>], text: &'t [u8]) -> Option<Placeholder<'t>> {
        let opening = self.opening();
        let mut from = 0;
        loop {
            let at = memchr::memmem::find(text.get(from..)?, opening.as_bytes())?.checked_add(from)?;
            let (before, rest) = text.split_at_checked(at)?;
            let inner = rest.get(opening.len()..)?;
            // Limit the search for `}` to the maximum length of a name.
            let near = inner.get(..MAX_NAME.saturating_add(1)).unwrap_or(inner);
            let name = memchr::memchr(b'}', near).and_then(|end| inner.split_at_checked(end));
            let plain = name.and_then(|(name, _)| std::str::from_utf8(name).ok()).filter(|name| is_plain(name));
            if let (Some(plain), Some((_, closing))) = (plain, name) {
                let credential = credentials.iter().find(|credential| credential.name.as_str() == plain);
                return Some(Placeholder {
                    credential: credential.cloned().ok_or(plain),
                    before,
                    after: closing.get(1..)?,
                });
            }
            from = at.checked_add(opening.len())?;
        }
    }
}

/// Returns the first credential's own placeholder in a text.
fn own_placeholder<'t>(credentials: &[Arc<Credential>], text: &'t [u8]) -> Option<Placeholder<'t>> {
    credentials.iter().find_map(|credential| {
        let placeholder = credential.placeholder.as_ref()?.as_bytes();
        let (before, rest) = text.split_at_checked(memchr::memmem::find(text, placeholder)?)?;
        Some(Placeholder { credential: Ok(credential.clone()), before, after: rest.get(placeholder.len()..)? })
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::leak::strength::Halves;

    fn credential(name: &str, placeholder: Option<&str>) -> Arc<Credential> {
        Arc::new(Credential {
            name: CredentialName::new(name),
            auth: Auth::Bearer,
            bound: Vec::new(),
            always: false,
            placeholder: placeholder.map(str::to_owned),
            swap_in: Vec::new(),
            strength: Strength::Strong(Halves::default()),
            value: None,
        })
    }

    #[test]
    fn placeholders_are_found_only_in_their_own_syntax() {
        let credentials = [credential("KEY", Some("ghp_placeholder")), credential("OTHER", None)];
        let nonce = PlaceholderSyntax::Nonce("n0nce".to_owned());
        type Split<'t> = Option<(Option<&'t str>, &'t str, &'t str)>;
        let rows: [(&PlaceholderSyntax, &str, Split<'_>); 13] = [
            (&PlaceholderSyntax::Usual, "Bearer ${secrets.KEY}", Some((Some("KEY"), "Bearer ", ""))),
            (&PlaceholderSyntax::Usual, "a ${secrets.OTHER} b", Some((Some("OTHER"), "a ", " b"))),
            (&PlaceholderSyntax::Usual, "${secrets.NOPE}", Some((None, "", ""))),
            (&PlaceholderSyntax::Usual, "token ghp_placeholder", Some((Some("KEY"), "token ", ""))),
            (&PlaceholderSyntax::Usual, "${secrets.}", None),
            (&PlaceholderSyntax::Usual, "${secrets.KEY", None),
            (&PlaceholderSyntax::Usual, "${secrets.A B}${secrets.KEY}", Some((Some("KEY"), "${secrets.A B}", ""))),
            (&PlaceholderSyntax::Usual, "$secrets.KEY", None),
            (&PlaceholderSyntax::Usual, "${n0nce.KEY}", None),
            (&nonce, "x${n0nce.KEY}y", Some((Some("KEY"), "x", "y"))),
            (&nonce, "${secrets.KEY}", None),
            (&nonce, "ghp_placeholder", None),
            (&nonce, "${n0nce.NOPE}", Some((None, "", ""))),
        ];
        for (syntax, text, want) in rows {
            let found = syntax.first(&credentials, text.as_bytes());
            let got = found.as_ref().map(|found| {
                let name = found.credential.as_ref().ok().map(|c| c.name.as_str());
                (name, std::str::from_utf8(found.before).unwrap(), std::str::from_utf8(found.after).unwrap())
            });
            assert_eq!(got, want, "{text:?}");
        }
    }
}

//! Placeholders: texts in a request that stand for a credential of the task.

use std::borrow::Cow;
use std::sync::Arc;

use super::credential::Credential;
use super::task_credentials::TaskCredentials;
use crate::model::name::{CredentialName, is_plain};

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
    fn opening(&self) -> Cow<'static, str> {
        match self {
            Self::Nonce(nonce) => format!("${{{nonce}.").into(),
            Self::Usual => "${secrets.".into(),
        }
    }

    /// Returns the placeholder of a credential.
    #[must_use]
    pub fn placeholder(&self, name: &CredentialName) -> String {
        format!("{}{name}}}", self.opening())
    }

    /// Returns the first placeholder in a text.
    pub fn first<'t>(&self, credentials: &TaskCredentials, text: &'t [u8]) -> Option<Placeholder<'t>> {
        self.named(credentials, text).or_else(|| match self {
            Self::Nonce(_) => None,
            Self::Usual => own_placeholder(credentials, text),
        })
    }

    fn named<'t>(&self, credentials: &TaskCredentials, text: &'t [u8]) -> Option<Placeholder<'t>> {
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
                return Some(Placeholder {
                    credential: credentials.named(plain).cloned().ok_or(plain),
                    before,
                    after: closing.get(1..)?,
                });
            }
            from = at.checked_add(opening.len())?;
        }
    }
}

/// Returns the first credential's own placeholder in a text.
fn own_placeholder<'t>(credentials: &TaskCredentials, text: &'t [u8]) -> Option<Placeholder<'t>> {
    let (credential, before, after) = credentials.find_own_placeholder(text)?;
    Some(Placeholder { credential: Ok(credential.clone()), before, after })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::OnceLock;

    use crate::policy::credential::Auth;

    fn credential(name: &str, placeholder: Option<&str>) -> Arc<Credential> {
        Arc::new(Credential {
            name: CredentialName::new(name),
            workspace: "default".to_owned(),
            kind: "bearer",
            source: String::new(),
            auth: Auth::Bearer,
            bound: Vec::new(),
            always: false,
            placeholder: placeholder.map(str::to_owned),
            swap_in: Vec::new(),
            with: Vec::new(),
            strength: OnceLock::new(),
            aws: None,
            aws_key: None,
            identity: None,
            value: None,
            minting: None,
            former: OnceLock::new(),
        })
    }

    #[test]
    fn placeholders_are_found_only_in_their_own_syntax() {
        let credentials =
            TaskCredentials::new(vec![credential("KEY", Some("ghp_placeholder")), credential("OTHER", None)]);
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

//! The admin tokens: those of the configuration, or one that is generated in the state directory.

use std::io;
use std::path::Path;

use zeroize::Zeroizing;

use crate::files;
use crate::model::secret::TokenHash;
use crate::policy::settings::{Admin, TokenSource};
use crate::policy::source;

/// The file of the generated token, in the state directory.
const FILE: &str = "admin.token";
/// The variable with the token, if the configuration names none.
const VARIABLE: &str = "EXEAT_ADMIN_TOKEN";

/// A token that cannot be used, with its key in `[admin]`.
pub(super) struct UnusableToken {
    pub(super) key: String,
    pub(super) error: io::Error,
}

/// Returns the hashes of the configured tokens, else of `EXEAT_ADMIN_TOKEN`, else of the token in the state directory, which
/// is created if it does not exist. The error names the file.
pub(super) fn read_or_create(admin: &Admin, state_dir: &Path) -> Result<Vec<TokenHash>, UnusableToken> {
    let make = || Ok(Zeroizing::new(files::hex(files::random::<32>()?.as_slice()).into_bytes()));
    from(admin, state_dir, |path| files::read_or_create(path, make))
}

/// As [`read_or_create`], but creates nothing.
pub(super) fn read(admin: &Admin, state_dir: &Path) -> Result<Vec<TokenHash>, UnusableToken> {
    from(admin, state_dir, files::read_private)
}

fn from(
    admin: &Admin,
    state_dir: &Path,
    read: impl FnOnce(&Path) -> io::Result<Zeroizing<Vec<u8>>>,
) -> Result<Vec<TokenHash>, UnusableToken> {
    let env = |name: &str| std::env::var(name).ok();
    let unusable = |key: &str| {
        let key = key.to_owned();
        move |error| UnusableToken { key, error }
    };
    if !admin.tokens.is_empty() {
        let configured = admin.tokens.iter().map(|TokenSource { key, source }| {
            let token = source::read_source(source, &env).map_err(io::Error::other);
            token.and_then(|token| hash(token.expose())).map_err(unusable(key))
        });
        return configured.collect();
    }
    let generated = || match env(VARIABLE) {
        Some(token) => hash(&Zeroizing::new(token.into_bytes())),
        None => {
            let path = state_dir.join(FILE);
            let named = |error: io::Error| io::Error::new(error.kind(), format!("{}: {error}", path.display()));
            hash(read(&path).map_err(named)?.trim_ascii_end())
        }
    };
    generated().map(|token| vec![token]).map_err(unusable("token"))
}

fn hash(token: &[u8]) -> io::Result<TokenHash> {
    if token.len() < TokenHash::MIN_TOKEN {
        return Err(io::Error::other(format!("it has fewer than {} bytes", TokenHash::MIN_TOKEN)));
    }
    Ok(TokenHash::of(token))
}

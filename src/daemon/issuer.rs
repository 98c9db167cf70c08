//! Fetches the values of credentials, from token endpoints, secret stores and commands.

use std::sync::Arc;

use tokio::task::spawn_blocking;

use super::assumed_role::AssumedRoles;
use super::command_runner::{self, CommandRunner};
use super::own_server::OwnServers;
use super::secret_store::SecretStores;
use super::token_endpoint::TokenEndpoints;
use crate::model::secret::Secret;
use crate::policy::held_secret::HeldSecret;
use crate::policy::mint::{MintMethod, MintRecipe};
use crate::policy::token_request::{FetchedSecret, SecretRead, TokenRequest, check_fetched};
use crate::stages::mint::{Issued, IssuedToken, Issuer, MintError, Purpose};

/// The servers of the configuration.
struct Servers {
    endpoints: TokenEndpoints,
    stores: SecretStores,
    roles: AssumedRoles,
    commands: Option<Arc<CommandRunner>>,
}

/// Returns a function that fetches a value by its recipe.
pub(super) fn issuer(own_servers: &OwnServers<'_>, commands: Option<Arc<CommandRunner>>) -> Issuer {
    let (endpoints, stores) = (TokenEndpoints::new(own_servers), SecretStores::new(own_servers));
    let servers = Arc::new(Servers { endpoints, stores, roles: AssumedRoles::new(own_servers), commands });
    Arc::new(move |recipe, purpose| {
        let servers = servers.clone();
        Box::pin(async move { servers.issue(&recipe, purpose).await })
    })
}

impl Servers {
    /// Returns a request with the secrets that their stores and commands have now, and why one is missing. What was fetched before
    /// that, or sent to a store, is in the request nevertheless.
    async fn with_fetched_secrets(
        &self,
        request: &Arc<TokenRequest>,
        purpose: Purpose,
    ) -> (Arc<TokenRequest>, Result<(), MintError>) {
        let mut used = request.clone();
        for FetchedSecret { key, read } in &request.fetched {
            let (value, next) = match read {
                SecretRead::Store(read) => self.stores.read(read, purpose, &self.endpoints).await,
                SecretRead::Command(read) => (command_runner::read(self.commands.as_deref(), read).await, None),
            };
            let known = request.secret_of(key).cloned();
            let (held, failure) = match value {
                Ok(IssuedToken { value, .. }) if known.as_ref().is_some_and(|known| known.is(&value)) => (None, None),
                Ok(IssuedToken { value, .. }) => match checked(key, value).await {
                    Ok(held) => (Some(held), None),
                    Err(error) => (None, Some(error)),
                },
                Err(error) => (None, Some(error)),
            };
            if held.is_some() || next.is_some() {
                let read = next.map_or_else(|| read.clone(), SecretRead::Store);
                let held = held.or(known).unwrap_or_else(|| Arc::new(HeldSecret::pending()));
                used = Arc::new(used.with_fetched(FetchedSecret { key, read }, &held));
            }
            if let Some(error) = failure {
                return (used, Err(MintError { reason: format!("{key}: {}", error.reason), ..error }));
            }
        }
        (used, Ok(()))
    }

    async fn issue(&self, recipe: &MintRecipe, purpose: Purpose) -> Issued {
        let next = |method| Arc::new(MintRecipe { method, mint_timeout: recipe.mint_timeout });
        match &recipe.method {
            MintMethod::Token(request) => {
                let (used, fetched) = self.with_fetched_secrets(request, purpose).await;
                let (token, other) = match fetched {
                    Ok(()) => self.endpoints.issue(&used).await,
                    Err(error) => (Err(error), None),
                };
                // The secrets that were fetched are searched for from now on.
                let other = other.or_else(|| (!Arc::ptr_eq(&used, request)).then_some(used));
                Issued { token, next: other.map(|request| next(MintMethod::Token(request))) }
            }
            MintMethod::Store(read) => {
                let (token, other) = self.stores.read(read, purpose, &self.endpoints).await;
                Issued { token, next: other.map(|read| next(MintMethod::Store(read))) }
            }
            MintMethod::Role(request) => Issued { token: self.roles.assume(request).await, next: None },
            MintMethod::Command(read) => {
                Issued { token: command_runner::read(self.commands.as_deref(), read).await, next: None }
            }
        }
    }
}

/// Checks a secret that was fetched for a key.
async fn checked(key: &'static str, value: Secret) -> Result<Arc<HeldSecret>, MintError> {
    let held = Arc::new(HeldSecret::new(value));
    let checked = held.clone();
    // Whether it can be guessed is estimated, which is slow.
    let result = spawn_blocking(move || check_fetched(key, &checked)).await;
    let result = result.map_err(|_| MintError::new("it could not be checked"))?;
    result.map(|()| held).map_err(MintError::lasting)
}

//! Fetches the values of credentials, from token endpoints, secret stores and commands.

use std::sync::Arc;

use super::assumed_role::AssumedRoles;
use super::command_runner::{self, CommandRunner};
use super::own_server::OwnServers;
use super::secret_store::SecretStores;
use super::token_endpoint::TokenEndpoints;
use crate::policy::held_secret::HeldSecret;
use crate::policy::mint::{MintMethod, MintRecipe};
use crate::policy::token_request::{FetchedSecret, SecretRead, TokenRequest};
use crate::stages::mint::{Issued, Issuer, MintError, Purpose};

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
    /// Returns a request with the secrets that their stores and commands have now.
    async fn with_fetched_secrets(&self, request: &Arc<TokenRequest>) -> Result<Arc<TokenRequest>, MintError> {
        let mut used = request.clone();
        for FetchedSecret { key, read } in &request.fetched {
            let (value, next) = match read {
                SecretRead::Store(read) => self.stores.read(read, Purpose::First, &self.endpoints).await,
                SecretRead::Command(read) => (command_runner::read(self.commands.as_deref(), read).await, None),
            };
            let secret =
                value.map_err(|error| MintError { reason: format!("{key}: {}", error.reason), ..error })?.value;
            let known = request.secret_of(key).filter(|held| held.is(&secret)).cloned();
            if known.is_none() || next.is_some() {
                let held = known.unwrap_or_else(|| Arc::new(HeldSecret::new(secret)));
                let read = next.map_or_else(|| read.clone(), SecretRead::Store);
                used = Arc::new(used.with_fetched(FetchedSecret { key, read }, &held));
            }
        }
        Ok(used)
    }

    async fn issue(&self, recipe: &MintRecipe, purpose: Purpose) -> Issued {
        let next = |method| Arc::new(MintRecipe { method, mint_timeout: recipe.mint_timeout });
        match &recipe.method {
            MintMethod::Token(request) => {
                let used = match self.with_fetched_secrets(request).await {
                    Ok(used) => used,
                    Err(error) => return Issued { token: Err(error), next: None },
                };
                let (token, other) = self.endpoints.issue(&used).await;
                // What was fetched is searched for from now on.
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

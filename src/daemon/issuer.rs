//! Fetches the values of credentials, from token endpoints, secret stores and commands.

use std::sync::Arc;

use super::assumed_role::AssumedRoles;
use super::command_runner::{self, CommandRunner};
use super::own_server::OwnServers;
use super::secret_store::SecretStores;
use super::token_endpoint::TokenEndpoints;
use crate::policy::mint::{MintMethod, MintRecipe};
use crate::stages::mint::{Issued, Issuer, Purpose};

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
    async fn issue(&self, recipe: &MintRecipe, purpose: Purpose) -> Issued {
        let next = |method| Arc::new(MintRecipe { method, mint_timeout: recipe.mint_timeout });
        match &recipe.method {
            MintMethod::Token(request) => {
                let (token, other) = self.endpoints.issue(request).await;
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

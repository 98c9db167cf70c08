//! Credentials: injected for their hosts, kept in the vault, and found nowhere else.

pub mod auto;
pub mod aws;
pub mod beside;
pub mod body;
pub mod commands;
pub mod credential_theft;
pub mod grants;
pub mod hmac;
pub mod injection;
pub mod messages;
pub mod minted;
pub mod own_place;
pub mod path;
pub mod roles;
pub mod secret_hygiene;
pub mod secret_stores;
pub mod tls_client;
pub mod token_server;
pub mod vault;

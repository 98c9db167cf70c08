//! Secrets in the admin API: set, deleted and listed by name. Values are never returned.

use std::sync::Arc;

use http::{Method, Request, StatusCode};
use hyper::body::Incoming;
use serde_json::json;
use zeroize::Zeroizing;

use super::reply::{Reply, error, read_body};
use crate::daemon::reload;
use crate::daemon::reload::{ConfigFile, Reloaded};
use crate::daemon::vault;
use crate::flow::Services;
use crate::model::name::is_plain;
use crate::model::secret::Secret;
use crate::policy::source::{usable, usable_document};
use crate::vault::{Entry, VaultError};

/// Returns true for paths of this module.
pub(crate) fn owns(path: &str) -> bool {
    path == "/v1/secrets" || path.starts_with("/v1/secrets/")
}

/// Answers an authorized request.
pub(crate) async fn answer(services: &Arc<Services>, file: Option<&ConfigFile>, request: Request<Incoming>) -> Reply {
    let path = request.uri().path().to_owned();
    let segments: Vec<&str> = path.strip_prefix("/v1/secrets").unwrap_or_default().split('/').skip(1).collect();
    match (request.method(), segments.as_slice()) {
        (_, names) if !names.iter().all(|name| is_plain(name)) => {
            error(StatusCode::BAD_REQUEST, "a workspace or secret name has at most 64 letters, digits, - and _")
        }
        (&Method::GET, []) => list(services, None).await,
        (&Method::GET, [workspace]) => list(services, Some(workspace)).await,
        (&Method::GET, [workspace, name]) => show(services, workspace, name).await,
        (&Method::DELETE, [workspace, name]) => {
            let (workspace, name) = ((*workspace).to_owned(), (*name).to_owned());
            change_vault(services, file, move |vault| vault.delete(&workspace, &name)).await
        }
        (&Method::PUT, [workspace, name]) => {
            let (workspace, name) = ((*workspace).to_owned(), (*name).to_owned());
            match value(request).await {
                Ok(value) => {
                    change_vault(services, file, move |vault| vault.set(&workspace, &name, value).map(|_| true)).await
                }
                Err(reply) => reply,
            }
        }
        _ => error(StatusCode::NOT_FOUND, "no such page"),
    }
}

async fn list(services: &Arc<Services>, workspace: Option<&str>) -> Reply {
    let entries = with_vault(services, |vault| vault.list()).await;
    let is_listed = |entry: &&Entry| {
        vault::is_of_operators(&entry.workspace) && workspace.is_none_or(|wanted| entry.workspace == wanted)
    };
    entries
        .map_or_else(|reply| reply, |all| (StatusCode::OK, all.iter().filter(is_listed).map(vault::metadata).collect()))
}

async fn show(services: &Arc<Services>, workspace: &str, name: &str) -> Reply {
    let entries = match with_vault(services, |vault| vault.list()).await {
        Ok(entries) => entries,
        Err(reply) => return reply,
    };
    let found = entries.iter().find(|entry| entry.workspace == workspace && entry.name == name);
    found.map_or_else(
        || error(StatusCode::NOT_FOUND, "the secret does not exist"),
        |entry| (StatusCode::OK, vault::metadata(entry)),
    )
}

/// Reads a value from a request body. A trailing newline is part of the value.
async fn value(request: Request<Incoming>) -> Result<Secret, Reply> {
    let body = Zeroizing::new(read_body(request.into_body()).await?.to_vec());
    if body.is_empty() {
        return Err(error(StatusCode::BAD_REQUEST, "the value is empty"));
    }
    // A private key, or the key file of a service account. Others have a line break by mistake.
    let is_document = [&b"-----BEGIN "[..], b"{"].into_iter().any(|start| body.starts_with(start));
    let secret = Secret::new(body.to_vec());
    let secret = if is_document { usable_document(secret) } else { usable(secret) };
    secret.map_err(|why| error(StatusCode::UNPROCESSABLE_ENTITY, &why.to_string()))
}

/// Runs a vault operation on a blocking thread, because disk access and passphrase derivation may be slow.
async fn with_vault<T: Send + 'static>(
    services: &Arc<Services>,
    act: impl FnOnce(&crate::vault::Vault) -> Result<T, VaultError> + Send + 'static,
) -> Result<T, Reply> {
    let place = services.settings.vault.clone();
    let done = tokio::task::spawn_blocking(move || act(&vault::vault(&place))).await;
    let broken = |why: String| (StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": why }));
    done.map_err(|error| broken(error.to_string()))?.map_err(|error| broken(error.to_string()))
}

/// Changes the vault and applies the change. Both are completed even if the client disconnects, because a revoked key
/// must not stay in use.
async fn change_vault(
    services: &Arc<Services>,
    file: Option<&ConfigFile>,
    change: impl FnOnce(&crate::vault::Vault) -> Result<bool, VaultError> + Send + 'static,
) -> Reply {
    let (services, file) = (services.clone(), file.cloned());
    let task = tokio::spawn(async move {
        match with_vault(&services, change).await {
            Ok(false) => error(StatusCode::NOT_FOUND, "the secret does not exist"),
            Ok(true) => apply(services, file).await,
            Err(reply) => reply,
        }
    });
    task.await.unwrap_or_else(|_| error(StatusCode::INTERNAL_SERVER_ERROR, "the change was interrupted"))
}

/// Applies the change at once, if the configuration is valid.
async fn apply(services: Arc<Services>, file: Option<ConfigFile>) -> Reply {
    let Some(file) = file else { return (StatusCode::OK, json!({ "reloaded": false })) };
    match reload::once(services, file).await {
        Reloaded::New(generation, warnings) => {
            (StatusCode::OK, json!({ "reloaded": true, "generation": generation, "warnings": warnings }))
        }
        // The vault has changed, but the policy in force has not.
        Reloaded::Kept(problems) => (StatusCode::CONFLICT, json!({ "reloaded": false, "problems": problems })),
    }
}

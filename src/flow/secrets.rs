//! The operator's secrets over the admin listener: set, deleted, listed by name. No value comes back out.

use std::sync::Arc;
use std::time::Duration;

use http::{Method, Request, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::{Value, json};
use zeroize::Zeroizing;

use super::Services;
use super::keep;
use super::reload::{self, ConfigFile, Reloaded};
use crate::model::name::is_plain;
use crate::model::secret::Secret;
use crate::policy::compile::usable;
use crate::vault::{Entry, MAX_VALUE, VaultError};

/// For the body of a PUT.
const PATIENCE: Duration = Duration::from_secs(10);

/// What is answered: a status and a document.
type Said = (StatusCode, Value);

/// True for paths that are answered here.
pub(super) fn owns(path: &str) -> bool {
    path == "/v1/secrets" || path.starts_with("/v1/secrets/")
}

/// Answers a request of the operator, who has shown the token.
pub(super) async fn answer(services: &Arc<Services>, file: Option<&ConfigFile>, request: Request<Incoming>) -> Said {
    let path = request.uri().path().to_owned();
    let named: Vec<&str> = path.strip_prefix("/v1/secrets").unwrap_or_default().split('/').skip(1).collect();
    match (request.method(), named.as_slice()) {
        (&Method::GET, []) => list(services, None).await,
        (&Method::GET, [workspace]) => list(services, Some(workspace)).await,
        (_, [workspace, name]) if !is_plain(workspace) || !is_plain(name) => {
            said(StatusCode::BAD_REQUEST, "letters, digits, - and _, 64 at most")
        }
        (&Method::GET, [workspace, name]) => show(services, workspace, name).await,
        (&Method::DELETE, [workspace, name]) => {
            let (workspace, name) = ((*workspace).to_owned(), (*name).to_owned());
            changed(services, file, move |vault| vault.delete(&workspace, &name)).await
        }
        (&Method::PUT, [workspace, name]) => {
            let (workspace, name) = ((*workspace).to_owned(), (*name).to_owned());
            match value(request).await {
                Ok(value) => {
                    changed(services, file, move |vault| vault.set(&workspace, &name, value).map(|_| true)).await
                }
                Err(why) => why,
            }
        }
        _ => said(StatusCode::NOT_FOUND, "no such page"),
    }
}

async fn list(services: &Arc<Services>, workspace: Option<&str>) -> Said {
    let entries = in_vault(services, |vault| vault.list()).await;
    let of = |entry: &&Entry| {
        keep::is_of_operators(&entry.workspace) && workspace.is_none_or(|wanted| entry.workspace == wanted)
    };
    entries.map_or_else(|why| why, |all| (StatusCode::OK, all.iter().filter(of).map(keep::metadata).collect()))
}

async fn show(services: &Arc<Services>, workspace: &str, name: &str) -> Said {
    let entries = match in_vault(services, |vault| vault.list()).await {
        Ok(entries) => entries,
        Err(why) => return why,
    };
    let found = entries.iter().find(|entry| entry.workspace == workspace && entry.name == name);
    found.map_or_else(
        || said(StatusCode::NOT_FOUND, "there is no such secret"),
        |entry| (StatusCode::OK, keep::metadata(entry)),
    )
}

/// The body as it is: no newline is cut here.
async fn value(request: Request<Incoming>) -> Result<Secret, Said> {
    let body = Limited::new(request.into_body(), MAX_VALUE).collect();
    let body = match tokio::time::timeout(PATIENCE, body).await {
        Ok(Ok(body)) => Zeroizing::new(body.to_bytes().to_vec()),
        Ok(Err(_)) => return Err(said(StatusCode::PAYLOAD_TOO_LARGE, "64 KiB at most, and the body has to be whole")),
        Err(_) => return Err(said(StatusCode::REQUEST_TIMEOUT, "the body did not arrive in time")),
    };
    if body.is_empty() {
        return Err(said(StatusCode::BAD_REQUEST, "the value is empty"));
    }
    usable(Secret::new(body.to_vec())).map_err(|why| said(StatusCode::UNPROCESSABLE_ENTITY, &why.to_string()))
}

/// Off the threads that serve: the disk may be slow, and a passphrase is stretched.
async fn in_vault<T: Send + 'static>(
    services: &Arc<Services>,
    act: impl FnOnce(&crate::vault::Vault) -> Result<T, VaultError> + Send + 'static,
) -> Result<T, Said> {
    let place = services.settings.vault.clone();
    let done = tokio::task::spawn_blocking(move || act(&keep::vault(&place))).await;
    let broken = |why: String| (StatusCode::INTERNAL_SERVER_ERROR, json!({ "error": why }));
    done.map_err(|error| broken(error.to_string()))?.map_err(|error| broken(error.to_string()))
}

/// Changes the vault and takes the change up. Both are done also if the client has gone meanwhile: a key
/// that was revoked must not stay in force.
async fn changed(
    services: &Arc<Services>,
    file: Option<&ConfigFile>,
    change: impl FnOnce(&crate::vault::Vault) -> Result<bool, VaultError> + Send + 'static,
) -> Said {
    let (services, file) = (services.clone(), file.cloned());
    let both = tokio::spawn(async move {
        match in_vault(&services, change).await {
            Ok(false) => said(StatusCode::NOT_FOUND, "there is no such secret"),
            Ok(true) => taken_up(services, file).await,
            Err(why) => why,
        }
    });
    both.await.unwrap_or_else(|_| said(StatusCode::INTERNAL_SERVER_ERROR, "the change broke off"))
}

/// What has changed is in force at once, if the configuration can be read.
async fn taken_up(services: Arc<Services>, file: Option<ConfigFile>) -> Said {
    let Some(file) = file else { return (StatusCode::OK, json!({ "reloaded": false })) };
    match reload::once(services, file).await {
        Reloaded::New(generation, warnings) => {
            (StatusCode::OK, json!({ "reloaded": true, "generation": generation, "warnings": warnings }))
        }
        // The vault has changed, and what is in force has not.
        Reloaded::Kept(problems) => (StatusCode::CONFLICT, json!({ "reloaded": false, "problems": problems })),
    }
}

fn said(status: StatusCode, why: &str) -> Said {
    (status, json!({ "error": why }))
}

//! Reads values from AWS Secrets Manager and from the Parameter Store of AWS Systems Manager.

use std::time::SystemTime;

use http::{HeaderName, Method};
use serde::Deserialize;
use serde_json::json;
use zeroize::Zeroizing;

use super::{StoreRequest, StoreValue, parsed};
use crate::daemon::aws_signature::{SignedFor, UnsignedRequest, signature};
use crate::daemon::own_request::OwnRequests;
use crate::policy::secret_store::{ACCESS_KEY_ID, StoreItem, StoreLogin, StoreRead};
use crate::stages::mint::MintError;

const TARGET: HeaderName = HeaderName::from_static("x-amz-target");
/// The content type of both services' protocol.
const AWS_JSON: &str = "application/x-amz-json-1.1";

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct SecretAnswer {
    secret_string: Option<Zeroizing<String>>,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct ParameterAnswer {
    parameter: Parameter,
}

#[derive(Deserialize)]
#[serde(rename_all = "PascalCase")]
struct Parameter {
    value: Zeroizing<String>,
}

/// Reads the value that `read` refers to.
pub(super) async fn read(requests: &OwnRequests, read: &StoreRead) -> Result<StoreValue, MintError> {
    let (service, target, body) = match &read.item {
        StoreItem::AwsSecret { id } => ("secretsmanager", "secretsmanager.GetSecretValue", json!({ "SecretId": id })),
        StoreItem::AwsParameter { name } => {
            ("ssm", "AmazonSSM.GetParameter", json!({ "Name": name, "WithDecryption": true }))
        }
        _ => return Err(MintError::lasting("not an item of AWS")),
    };
    let mut request = StoreRequest::get("/".to_owned());
    (request.method, request.content_type) = (Method::POST, AWS_JSON);
    request.fields.push((TARGET, target.to_owned()));
    request.body = Zeroizing::new(body.to_string().into_bytes());
    request.secrets = signed_fields(&request, read, service)?;
    let body = request.send(requests, &read.server).await?;
    let text = match read.item {
        StoreItem::AwsSecret { .. } => parsed::<SecretAnswer>(&body)?.secret_string,
        _ => Some(parsed::<ParameterAnswer>(&body)?.parameter.value),
    };
    let text = text.ok_or_else(|| MintError::lasting("the secret is binary, not a text"))?;
    StoreValue::of_text(&text, read)
}

/// Returns the fields that sign a request.
fn signed_fields(
    request: &StoreRequest,
    read: &StoreRead,
    service: &str,
) -> Result<Vec<(HeaderName, Zeroizing<String>)>, MintError> {
    let invalid = || MintError::lasting("the request to the store cannot be signed");
    let StoreLogin::Aws { access_key_id, region } = &read.server.login else { return Err(invalid()) };
    let text = |key: &str| {
        let secret = read.server.secret(key).map(|secret| String::from_utf8(secret.expose().to_vec()));
        secret.transpose().map_err(|_| MintError::lasting(format!("{key} is not in UTF-8")))
    };
    let missing = |key: &str| MintError::lasting(format!("the store has no {key}"));
    let id = access_key_id.clone().map_or_else(|| text(ACCESS_KEY_ID), |id| Ok(Some(id)))?;
    let id = id.ok_or_else(|| missing(ACCESS_KEY_ID))?;
    let key = text("secret_access_key")?.ok_or_else(|| missing("secret_access_key"))?;
    let unsigned = UnsignedRequest {
        method: request.method.as_str(),
        url: &read.server.url,
        path: &request.path,
        fields: request
            .fields
            .iter()
            .map(|(name, value)| (name.as_str(), value.as_str()))
            .chain([("content-type", request.content_type)])
            .collect(),
        body: &request.body,
    };
    let signed_for = SignedFor { region, service, time: SystemTime::now() };
    signature(&unsigned, (id, key, text("session_token")?), &signed_for).map_err(|_| invalid())
}

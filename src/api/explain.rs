//! The reason of a refusal under the policy in force, and the TOML that would lead past it. Nothing is changed.

use http::{Method, Request, StatusCode, Uri};
use hyper::body::Incoming;
use serde::Deserialize;
use serde_json::json;

use super::reply::{Reply, error, read_json};
use crate::daemon::reload::ConfigFile;
use crate::flow::Services;
use crate::model::name::TaskName;
use crate::model::refusal::{Deny, Refusal};
use crate::model::target::Target;
use crate::model::tool::{Kind, Tool};
use crate::policy::remedy::{Asked, Remedy};
use crate::policy::rule::{AccessKind, Task};

/// The body of a POST.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ExplainRequest {
    task: String,
    tool: Option<String>,
    method: String,
    url: String,
}

/// Answers an authorized request.
pub(super) async fn answer(services: &Services, file: Option<&ConfigFile>, request: Request<Incoming>) -> Reply {
    match explain(services, file, request).await {
        Ok(reply) | Err(reply) => reply,
    }
}

async fn explain(services: &Services, file: Option<&ConfigFile>, request: Request<Incoming>) -> Result<Reply, Reply> {
    let unprocessable = |what: &str| error(StatusCode::UNPROCESSABLE_ENTITY, what);
    let asked: ExplainRequest = read_json(request).await?;
    let policy = services.policies.snapshot();
    let task = policy.task(&TaskName::new(&asked.task)).ok_or_else(|| unprocessable("the task does not exist"))?;
    let kind = match asked.tool.as_deref() {
        None => Kind::Raw,
        Some(name) => Kind::Tool(Tool::from_name(name).ok_or_else(|| unprocessable("the tool does not exist"))?),
    };
    let method: Method = asked.method.parse().map_err(|_| unprocessable("the method is not valid"))?;
    let uri: Uri = asked.url.parse().map_err(|_| unprocessable("the URL is not valid"))?;
    let target = Target::absolute(&uri).map_err(|_| unprocessable("the URL is not valid"))?;
    let names = names(task, file);
    let asked = Asked { target: &target, method: &method, path: uri.path(), kind, names: &names };
    let document = match judge(task, asked) {
        Ok(rule) => json!({ "allowed": true, "rule": rule, "code": null, "stage": null, "hint": null, "remedy": null }),
        Err((deny, remedy)) => {
            let notice = Refusal::from(deny).notice();
            let remedy =
                remedy.map(|Remedy { reason, key, toml }| json!({ "reason": reason, "key": key, "toml": toml }));
            json!({
                "allowed": false, "rule": null, "code": notice.code, "stage": notice.stage.as_str(), "hint": notice.hint,
                "remedy": remedy,
            })
        }
    };
    Ok((StatusCode::OK, document))
}

/// Returns the rule that allows a request, or the refusal. A `CONNECT` is judged as the tunnel that it asks for.
fn judge(task: &Task, asked: Asked<'_>) -> Result<String, (Deny, Option<Remedy>)> {
    let Asked { target, method, path, kind, .. } = asked;
    let explained = |deny| (deny, task.remedy(deny, asked));
    if *method == Method::CONNECT {
        return task.destination(target, AccessKind::Connect).map(|to| to.rule()).map_err(explained);
    }
    task.judge(target, kind, method, path).map(|matched| matched.allowed.rule()).map_err(explained)
}

/// Returns the names of the integrations, also of those that no task has, so that a new one gets another name.
fn names(task: &Task, file: Option<&ConfigFile>) -> Vec<String> {
    file.map(ConfigFile::integration_names).unwrap_or_default().into_iter().chain(task.integration_names()).collect()
}

//! `exeat explain`: what would happen to a request, without sending anything.

use std::net::IpAddr;
use std::path::Path;

use clap::Args;
use http::{Method, Uri};

use super::terminal::{Paint, print, say};
use super::{Exit, sources};
use crate::model::host::Host;
use crate::model::name::TaskName;
use crate::model::refusal::{Deny, Refusal};
use crate::model::target::Target;
use crate::policy::rule::{Allowed, Mode, Policy, Task};

/// Flags of `exeat explain`.
#[derive(Args)]
pub(super) struct ExplainArgs {
    /// Whose request it would be
    #[arg(long, value_name = "TASK")]
    task: String,
    /// The method
    #[arg(short = 'X', long = "method", value_name = "METHOD", default_value = "GET")]
    method: Method,
    /// Print the steps as JSON
    #[arg(long)]
    json: bool,
    /// The URL
    url: String,
}

/// What one step says.
#[derive(serde::Serialize)]
struct Step {
    stage: &'static str,
    verdict: &'static str,
    why: String,
}

pub(super) fn run(config: Option<&Path>, args: &ExplainArgs) -> Exit {
    let policy = match sources::load_or_say(config) {
        Ok(config) => config.policy,
        Err(exit) => return exit,
    };
    let Some(task) = policy.task(&TaskName::new(&args.task)) else {
        say(format_args!("exeat: the configuration has no task {:?}", args.task));
        return Exit::Usage;
    };
    let mut steps = Vec::new();
    let outcome = walk(&policy, task, args, &mut steps);
    if let Err(refusal) = outcome {
        let notice = refusal.notice();
        steps.push(Step {
            stage: notice.stage.as_str(),
            verdict: "deny",
            why: format!("{}: {}. {}", notice.code, notice.title, notice.hint),
        });
    }
    if args.json {
        print(format_args!("{:#}\n", serde_json::json!({ "allowed": outcome.is_ok(), "steps": steps })));
    } else {
        let paint = Paint::stdout();
        for step in &steps {
            let verdict = format!("{:<5}", step.verdict);
            let verdict = if step.verdict == "deny" { paint.bad(&verdict) } else { paint.good(&verdict) };
            print(format_args!("{:<10} {verdict}  {}\n", step.stage, step.why));
        }
    }
    if outcome.is_ok() { Exit::Done } else { Exit::Refused }
}

fn walk(policy: &Policy, task: &Task, args: &ExplainArgs, steps: &mut Vec<Step>) -> Result<(), Refusal> {
    let mut pass = |stage, why: String| steps.push(Step { stage, verdict: "allow", why });
    let uri: Uri = args.url.parse().map_err(|_| Deny::TargetMalformed)?;
    let target = Target::absolute(&uri).map_err(|_| Deny::TargetMalformed)?;
    pass("parse", format!("{} port {}", target, target.port()));
    let to = task.destination(&target)?;
    let mode = match to.mode() {
        Mode::Inspect => "requests are inspected",
        Mode::Opaque => "a tunnel is passed on unseen; absolute-form requests are inspected",
    };
    pass("authorize", format!("destination: {}; {mode}", to.rule()));
    let judged = task.request(&target, &to, &args.method, uri.path())?;
    let path = judged.path.map(|path| format!("; sent as {path}")).unwrap_or_default();
    pass("authorize", format!("request: {}{path}", judged.allowed.rule()));
    match known_addresses(policy, &target) {
        None => pass("pin", "the name would be resolved now, and every address judged".to_owned()),
        Some(addresses) => {
            judge(policy, &judged.allowed, &addresses)?;
            pass("pin", addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "));
        }
    }
    Ok(())
}

/// Addresses that are known without asking anybody.
fn known_addresses(policy: &Policy, target: &Target) -> Option<Vec<IpAddr>> {
    match target.host() {
        Host::Ip(ip) => Some(vec![*ip]),
        Host::Name(name) => policy.hosts_override(name).map(<[IpAddr]>::to_vec),
    }
}

fn judge(policy: &Policy, allowed: &Allowed, addresses: &[IpAddr]) -> Result<(), Refusal> {
    let all = addresses.iter().try_for_each(|ip| policy.judge(*ip, allowed));
    all.map_err(|_| Deny::AddressNotAllowed.into())
}

//! `exeat explain`: shows the decision on a request without sending anything.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;

use clap::Args;
use clap::builder::PossibleValuesParser;
use http::{Method, Uri};
use toml::{Table, Value};

use super::terminal::{Paint, clean, print, say};
use super::{Exit, paths};
use crate::model::host::Host;
use crate::model::name::{CredentialName, TaskName};
use crate::model::refusal::{Deny, Refusal};
use crate::model::target::Target;
use crate::model::tool::{Kind, Tool};
use crate::policy::compile::Problem;
use crate::policy::credential::Credential;
use crate::policy::preset::PRESETS;
use crate::policy::remedy::{Asked, Remedy};
use crate::policy::rule::{AccessKind, MatchedRules, Mode, Policy, Task};
use crate::policy::upstream_proxy::{ProxyAddress, ProxyChoice};

/// Flags of `exeat explain`.
#[derive(Args)]
pub(super) struct ExplainArgs {
    /// The task that makes the request
    #[arg(
        long,
        value_name = "TASK",
        required_unless_present = "preset",
        default_value = "",
        hide_default_value = true
    )]
    task: String,
    /// The method
    #[arg(short = 'X', long = "method", value_name = "METHOD", default_value = "GET")]
    method: Method,
    /// Explain it as a call of this tool
    #[arg(long, value_name = "NAME", value_parser = parse_tool)]
    tool: Option<Tool>,
    /// Print the steps as JSON
    #[arg(long)]
    json: bool,
    /// Show what `preset = "NAME"` stands for in an integration and a credential, and end
    #[arg(long, value_name = "NAME", value_parser = preset_names(), hide_possible_values = true, conflicts_with_all = ["task", "url"])]
    preset: Option<String>,
    /// The URL
    #[arg(required_unless_present = "preset", default_value = "", hide_default_value = true)]
    url: String,
}

/// The result of one step.
#[derive(serde::Serialize)]
struct Step {
    stage: &'static str,
    verdict: &'static str,
    why: String,
}

fn preset_names() -> PossibleValuesParser {
    PossibleValuesParser::new(PRESETS.keys().map(String::as_str))
}

pub(super) fn run(config: Option<&Path>, args: &ExplainArgs) -> Exit {
    if let Some((name, preset)) = args.preset.as_ref().and_then(|name| PRESETS.get_key_value(name)) {
        print(preset.toml(name));
        return Exit::Done;
    }
    let (policy, absent) = match paths::load_offline(config) {
        Ok(config) => (config.policy, config.warnings),
        Err(problems) => {
            paths::report_problems(config, &problems);
            return Exit::Usage;
        }
    };
    let Some(task) = policy.task(&TaskName::new(&args.task)) else {
        paths::report_unknown_task(policy.tasks().map(|task| task.name().as_str()), &args.task);
        return Exit::Usage;
    };
    if !args.url.contains("://") {
        say(format_args!(
            "exeat: {:?} is not a URL; give a full one, such as https://api.example.com/path",
            clean(&args.url)
        ));
        return Exit::Usage;
    }
    let mut steps = Vec::new();
    let table = paths::table(config);
    let names = integrations(&table);
    let outcome = evaluate(&policy, task, args, (&names, &absent), &mut steps);
    let (remedy, outcome) = match outcome {
        Ok(()) => (None, Ok(())),
        Err(Explained { refusal, remedy }) => (remedy, Err(refusal)),
    };
    let remedy = remedy.map(|remedy| {
        let after = config.and_then(|file| refusal_after(&remedy, (file, table), args));
        Shown::of(remedy, after, config)
    });
    if let Err(refusal) = outcome {
        let notice = refusal.notice();
        steps.push(Step {
            stage: notice.stage.as_str(),
            verdict: "deny",
            why: format!("{}: {}. {}", notice.code, notice.title, notice.hint),
        });
    }
    if args.json {
        let document = serde_json::json!({ "allowed": outcome.is_ok(), "steps": steps, "remedy": remedy });
        print(format_args!("{document:#}\n"));
    } else {
        let paint = Paint::stdout();
        for step in &steps {
            let verdict = format!("{:<5}", step.verdict);
            let verdict = if step.verdict == "deny" { paint.bad(&verdict) } else { paint.good(&verdict) };
            print(format_args!("{:<10} {verdict}  {}\n", step.stage, step.why));
        }
        if let Some(remedy) = &remedy {
            print(remedy.text());
        }
    }
    if outcome.is_ok() { Exit::Done } else { Exit::Refused }
}

/// A refusal, and what would allow the request.
struct Explained {
    refusal: Refusal,
    remedy: Option<Remedy>,
}

impl From<Deny> for Explained {
    fn from(deny: Deny) -> Self {
        Self { refusal: deny.into(), remedy: None }
    }
}

/// The result of a request after the keys of a remedy have been written to the configuration.
enum After {
    Allowed,
    /// The next reason.
    Refused(Refusal),
}

/// Evaluates the request with the keys of a remedy. Returns `None` if they do not help, or are not valid.
fn refusal_after(remedy: &Remedy, (file, mut table): (&Path, Table), args: &ExplainArgs) -> Option<After> {
    if !remedy.apply_to(&mut table) {
        return None;
    }
    let names = integrations(&table);
    let policy = paths::compile_offline(file, &table.to_string()).ok()?.policy;
    let task = policy.task(&TaskName::new(&args.task))?;
    match evaluate(&policy, task, args, (&names, &[]), &mut Vec::new()) {
        Ok(()) => Some(After::Allowed),
        // The same refusal for the same reason: the keys do not help.
        Err(after) if after.remedy.as_ref().is_some_and(|next| next.reason == remedy.reason) => None,
        Err(after) => Some(After::Refused(after.refusal)),
    }
}

/// Returns the names of all integrations.
fn integrations(table: &Table) -> Vec<String> {
    let found = table.get("integrations").and_then(Value::as_table);
    found.into_iter().flat_map(Table::keys).cloned().collect()
}

/// A remedy as it is printed.
#[derive(serde::Serialize)]
struct Shown {
    reason: String,
    /// The file, and the line of the key or of the table that lacks it.
    #[serde(skip_serializing_if = "Option::is_none")]
    file: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    line: Option<usize>,
    key: String,
    /// Empty if no key would help.
    toml: String,
    /// The code of the next refusal, if the keys do not allow the request yet.
    #[serde(skip_serializing_if = "Option::is_none")]
    then: Option<&'static str>,
}

impl Shown {
    fn of(remedy: Remedy, after: Option<After>, config: Option<&Path>) -> Self {
        let Remedy { reason, key, toml } = remedy;
        let (toml, then) = match after {
            None => (String::new(), None),
            Some(After::Allowed) => (toml, None),
            Some(After::Refused(refusal)) => (toml, Some(refusal.code())),
        };
        let mut at = [Problem::new(key.as_str(), "", "")];
        paths::locate(config, &mut at);
        let [Problem { line, .. }] = at;
        let file = config.map(|file| file.display().to_string());
        Self { reason, file, line, key, toml, then }
    }

    fn text(&self) -> String {
        let Self { reason, file, line, key, toml, then } = self;
        let position = file.as_deref().zip(*line).map(|(file, line)| format!("{}:{line}: ", clean(file)));
        let at = if key.is_empty() { String::new() } else { format!(" ({}{key})", position.unwrap_or_default()) };
        let mut out = format!("\n{}{at}\n", clean(reason));
        if !toml.is_empty() {
            out.push_str(&match then {
                None => "\nThis would allow the request:\n\n".to_owned(),
                Some(code) => format!("\nWith this, the next refusal would be {code}:\n\n"),
            });
            out.extend(toml.lines().map(|line| format!("{}\n", clean(line))));
        }
        out
    }
}

fn evaluate(
    policy: &Policy,
    task: &Task,
    args: &ExplainArgs,
    (names, warnings): (&[String], &[Problem]),
    steps: &mut Vec<Step>,
) -> Result<(), Explained> {
    let mut pass = |stage, why: String| steps.push(Step { stage, verdict: "allow", why });
    let uri: Uri = args.url.parse().map_err(|_| Deny::TargetMalformed)?;
    let target = Target::absolute(&uri).map_err(|_| Deny::TargetMalformed)?;
    pass("parse", format!("{} port {}", target, target.port()));
    let kind = args.tool.map_or(Kind::Raw, Kind::Tool);
    let asked = Asked { target: &target, method: &args.method, path: uri.path(), kind, names };
    let explained = |deny| Explained { refusal: Refusal::from(deny), remedy: task.remedy(deny, asked) };
    let to = task.destination(&target, AccessKind::Request(kind)).map_err(explained)?;
    let mode = match to.mode() {
        Mode::Inspect => "requests are inspected",
        Mode::Opaque => "tunnels are relayed without inspection; absolute-form requests are inspected",
    };
    pass("authorize", format!("destination: {}; {mode}", to.rule()));
    if kind.tool().is_some_and(|tool| !tool.admits_method(&args.method)) {
        return Err(explained(Deny::MethodNotAllowed));
    }
    let decision = task.request(&target, &to, &args.method, uri.path()).map_err(explained)?;
    let path = decision.path.map(|path| format!("; sent as {path}")).unwrap_or_default();
    pass("authorize", format!("request: {}{path}", decision.allowed.rule()));
    if let Some(expires) = decision.allowed.approval(&args.method, kind) {
        let seconds = expires.as_secs();
        pass("approve", format!("the request is refused until the operator approves it, within {seconds} s"));
    }
    for step in credential_steps(task, kind, &target, &decision.allowed, warnings) {
        pass("inject", step);
    }
    let is_proxy = |proxy: &ProxyAddress| proxy.host == *target.host() && proxy.port == target.port();
    if policy.upstream_proxies().iter().any(|proxy| is_proxy(proxy.address())) {
        return Err(Deny::AddressNotAllowed.into());
    }
    let choice = policy.upstream_proxy(&decision.allowed, target.host());
    let resolver = choice.as_ref().filter(|choice| policy.is_resolved_by(&choice.proxy, target.host()));
    let known = known_addresses(policy, &target);
    match &known {
        None if resolver.is_some() => {
            pass("pin", "the upstream proxy resolves the name, so its addresses are not checked".to_owned());
        }
        None => pass("pin", "the name would be resolved now, and every address checked".to_owned()),
        Some(addresses) => {
            let denied = addresses.iter().any(|ip| policy.check_address(*ip, &decision.allowed).is_err());
            if denied {
                let remedy = task.remedy_for_address(policy, &decision.allowed, addresses);
                return Err(Explained { refusal: Deny::AddressNotAllowed.into(), remedy });
            }
            pass("pin", addresses.iter().map(ToString::to_string).collect::<Vec<_>>().join(", "));
        }
    }
    if let Some(step) = choice.as_ref().and_then(|choice| dial_step(choice, known.as_deref(), resolver.is_some())) {
        pass("dial", step);
    }
    Ok(())
}

/// Describes the way through an upstream proxy. Returns `None` if the addresses are reached without it.
fn dial_step(choice: &ProxyChoice<'_>, known: Option<&[IpAddr]>, is_resolved_by_proxy: bool) -> Option<String> {
    if known.is_some_and(|addresses| addresses.iter().all(|ip| choice.exempts(*ip))) {
        return None;
    }
    let networks = choice.exempt_networks().filter(|_| known.is_none() && !is_resolved_by_proxy);
    let unless = networks.map(|networks| format!(", unless all addresses are {networks}")).unwrap_or_default();
    Some(format!("through the upstream proxy {}{unless}", choice.proxy.describe()))
}

/// Describes the credentials that would be sent and where, never their values.
fn credential_steps(
    task: &Task,
    kind: Kind,
    target: &Target,
    allowed: &MatchedRules,
    warnings: &[Problem],
) -> Vec<String> {
    let required: Vec<_> = allowed.required().map(CredentialName::as_str).collect();
    let bound = task.credentials().iter().filter(|credential| allowed.may_receive(credential, target));
    let describe = |credential: &Arc<Credential>| {
        let (name, auth) = (credential.name(), credential.auth());
        let only = if required.contains(&name.as_str()) { "; it is required, other keys are removed" } else { "" };
        // Without a value, the warning says why. The daemon may have one.
        let path = format!("credentials.{name}.");
        let absent = warnings.iter().find(|warning| warning.path.starts_with(&path) && !credential.is_enabled());
        let absent = absent.and_then(|warning| warning.problem.split(';').next()).map(|why| format!("; {why}"));
        let beside = task.credentials().sent_with(credential);
        let beside: Vec<_> = beside.iter().skip(1).map(|one| one.name().as_str()).collect();
        let beside = if beside.is_empty() { String::new() } else { format!("; beside it {}", beside.join(", ")) };
        let only = &format!("{beside}{only}{}", absent.unwrap_or_default());
        if auth.needs_placeholder() && kind.takes_placeholders() {
            let own = auth.place();
            let places = credential.places().filter(|place| Some(place) != own.as_ref());
            let places: Vec<_> = places.map(|place| place.to_string()).collect();
            let places = if places.is_empty() { String::new() } else { format!(" ({})", places.join(", ")) };
            return format!("{name} would be sent in {auth}{places}{only}");
        }
        let takes_names = kind.takes_names() && !auth.needs_placeholder();
        let how = match (credential.is_always_injected(), kind.takes_placeholders(), takes_names) {
            (true, true, _) => "with every request",
            (_, true, _) => "by name or placeholder",
            (_, false, true) => "by name",
            (_, false, false) => {
                return format!("{name} is bound to this host, but the tool does not support credentials");
            }
        };
        format!("{name} would be sent as `{auth}`, {how}{only}")
    };
    let steps: Vec<_> = bound.map(describe).collect();
    if steps.is_empty() { vec!["no credential is bound to this destination".to_owned()] } else { steps }
}

fn parse_tool(name: &str) -> Result<Tool, String> {
    Tool::from_name(name).ok_or_else(|| format!("expected one of {}", Tool::ALL.map(Tool::as_str).join(", ")))
}

/// Returns the target's addresses if they are known without a DNS query.
fn known_addresses(policy: &Policy, target: &Target) -> Option<Vec<IpAddr>> {
    match target.host() {
        Host::Ip(ip) => Some(vec![*ip]),
        Host::Name(name) => policy.hosts_override(name).map(<[IpAddr]>::to_vec),
    }
}

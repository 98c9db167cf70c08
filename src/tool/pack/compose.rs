//! Parses `tools.custom[]`: first each tool alone, then the delegation between them.

use std::cell::RefCell;
use std::sync::Arc;

use serde_json::Value;

use super::composed::{Composed, Does};
use super::delegation::{self, Delegator, Target};
use super::mapping::{Fields, MISSING, quoted};
use super::mock::Mock;
use super::place::{Findings, Place};
use super::policy::{HTTP_REQUEST, primitive};
use super::request::Request;
use super::schema::Schema;
use super::template::{Scope, Secrets, Template, no_workspace_secret};
use super::yaml::Node;
use crate::model::name::is_plain;
use crate::model::tool::Tool;
use crate::tool::primitives::Primitive;

const KEYS: [&str; 4] = ["name", "description", "parameters", "implementation"];
const PLAIN_KEYS: [&str; 3] = ["type", "primitive", "args"];
const ELSEWHERE: Secrets = Secrets::Not("reaches only a tool whose implementation.primitive is http_request");

/// A tool as written.
struct Draft {
    place: Place,
    name: String,
    description: String,
    schema: Option<Schema>,
    action: Option<Action>,
}

enum Action {
    Args(String, Option<Template>),
    Mock(Mock),
    Request(Request),
    /// The kind is known, but the implementation could not be parsed.
    Unread(Option<String>),
}

/// A tool, with the primitive that its gates depend on.
pub(super) struct Linked {
    pub(super) tool: Arc<Composed>,
    pub(super) target: Target,
}

/// Parses all custom tools, in document order. Returns `None` if the pack has a problem, here or before.
pub(super) fn read(root: &Fields<'_>, findings: &Findings) -> Option<Vec<Linked>> {
    let drafts = drafts(root, findings);
    let delegators: Vec<Delegator<'_>> = drafts.iter().map(Draft::delegator).collect();
    let targets = delegation::targets(&delegators, findings);
    for (draft, target) in drafts.iter().zip(&targets) {
        if let Some(next) = target.next.and_then(|next| drafts.get(next)) {
            draft.gives_what_is_required(next, findings);
        }
    }
    if !findings.is_empty() {
        return None;
    }
    link(drafts, &targets)
}

fn drafts(root: &Fields<'_>, findings: &Findings) -> Vec<Draft> {
    let version = root.node("version").filter(|node| matches!(node, Node::Map(_)));
    let version = version.and_then(|node| Fields::of(node, root.at("version"), findings));
    let mut drafts: Vec<Draft> = Vec::new();
    let sections = [root.fields("tools"), version.as_ref().and_then(|version| version.fields("tools"))];
    if let (Some(_), Some(version)) = (root.node("tools"), version.filter(|version| version.node("tools").is_some())) {
        findings.problem(&version.at("tools"), "tools are at the top already; keep one of the two");
    }
    for tools in sections.into_iter().flatten() {
        tools.report_others(&["custom"]);
        for (index, node) in tools.list("custom").iter().enumerate() {
            if let Some(fields) = Fields::of(node, tools.at("custom").at(index), findings) {
                let draft = Draft::read(&fields, &drafts, findings);
                drafts.push(draft);
            }
        }
    }
    drafts
}

impl Draft {
    fn read(fields: &Fields<'_>, before: &[Self], findings: &Findings) -> Self {
        fields.report_others(&KEYS);
        let written = fields.required_text("name");
        if let Some(Err(why)) = written.map(|name| check_name(name, before)) {
            findings.problem(&fields.at("name"), why);
        }
        let name = written.unwrap_or_default();
        let description = description(fields, findings);
        let schema = Schema::read(fields.node("parameters"), &fields.at("parameters"), findings);
        if fields.node("implementation").is_none() {
            findings.problem(&fields.at("implementation"), MISSING);
        }
        let action = fields.fields("implementation").map(|implementation| {
            let open = fields.node("parameters").map(Node::to_value).unwrap_or_default();
            let parameters = schema.as_ref().map_or(&open, Schema::value);
            action(&implementation, name, parameters, findings)
        });
        Self { place: fields.place.clone(), name: name.to_owned(), description, schema, action }
    }

    /// Checks that a tool passes the parameters that the next one requires. Otherwise every call would fail.
    fn gives_what_is_required(&self, next: &Self, findings: &Findings) {
        let Some(Action::Args(_, Some(Template::Map(given)))) = &self.action else { return };
        let schema = next.schema.as_ref().map(Schema::value);
        let required = schema.and_then(|schema| schema.get("required")).and_then(Value::as_array);
        for name in required.into_iter().flatten().filter_map(Value::as_str) {
            if !given.iter().any(|(key, _)| key == name) {
                let place = self.place.key("implementation").key("args");
                findings.problem(&place, format!("{} requires {}, which is missing", next.name, quoted(name)));
            }
        }
    }

    fn delegator(&self) -> Delegator<'_> {
        Delegator { place: &self.place, name: &self.name, primitive: self.primitive() }
    }

    /// Returns the primitive that the tool delegates to; `None` for a mock.
    fn primitive(&self) -> Option<&str> {
        match self.action.as_ref()? {
            Action::Args(primitive, _) => Some(primitive),
            Action::Mock(_) => None,
            Action::Request(_) => Some(HTTP_REQUEST),
            Action::Unread(primitive) => primitive.as_deref(),
        }
    }
}

fn check_name(name: &str, before: &[Draft]) -> Result<(), String> {
    if !is_plain(name) {
        return Err(format!("{} is not a valid name: use 1 to 64 letters, digits, _ and -", quoted(name)));
    }
    if primitive(name).is_some() {
        return Err(format!("{name} is the name of a primitive"));
    }
    if Tool::from_name(name).is_some() {
        return Err(format!("{name} is the name of a built-in tool"));
    }
    match before.iter().find(|other| other.name == name) {
        Some(other) => Err(format!("{name} is the name of {} already", other.place)),
        None => Ok(()),
    }
}

fn description(fields: &Fields<'_>, findings: &Findings) -> String {
    let Some(text) = fields.text("description") else { return String::new() };
    let place = fields.at("description");
    if text.trim().is_empty() {
        findings.problem(&place, "empty; models need it to decide when to call the tool");
    }
    if text.contains("${secrets.") {
        findings.problem(&place, "a description resolves no secret");
    }
    no_workspace_secret(text, &place, findings);
    text.to_owned()
}

fn action(fields: &Fields<'_>, name: &str, parameters: &Value, findings: &Findings) -> Action {
    match fields.text("type") {
        Some("mock") => return Mock::read(fields, parameters, findings).map_or(Action::Unread(None), Action::Mock),
        Some(other) => {
            let why = format!("unknown type {}; mock, or left out for a primitive", quoted(other));
            findings.problem(&fields.at("type"), why);
            return Action::Unread(None);
        }
        None => fields.report_others(&PLAIN_KEYS),
    }
    let primitive = fields.required_text("primitive").map(str::to_owned);
    let args = args(fields, findings);
    let (Some(primitive), Some(args)) = (primitive.clone(), args) else { return Action::Unread(primitive) };
    let scope = Scope { schema: parameters, findings, secrets: RefCell::default() };
    if primitive == HTTP_REQUEST {
        return Action::Request(Request::read(&args, &scope));
    }
    if primitive == name {
        return Action::Unread(Some(primitive));
    }
    let template = fields.node("args").map(|node| scope.template(node, &args.place, ELSEWHERE));
    if let (Some(known), Some(Template::Map(given))) = (Primitive::named(&primitive), &template) {
        check_arguments(known, &args, given, findings);
    }
    Action::Args(primitive, template)
}

/// Checks the arguments of a primitive that works in a sandbox, as far as they are known.
fn check_arguments(primitive: Primitive, args: &Fields<'_>, given: &[(String, Template)], findings: &Findings) {
    let (name, schema, names) = (primitive.name(), primitive.schema(), primitive.arguments());
    args.report_others(&names.iter().map(String::as_str).collect::<Vec<_>>());
    for missing in primitive.required().iter().filter(|required| !args.has(required)) {
        findings.problem(&args.place, format!("{name} requires {}, which is missing", quoted(missing)));
    }
    for (key, value) in given {
        let (Template::Literal(value), Some(expected)) = (value, schema.pointer(&format!("/properties/{key}"))) else {
            continue;
        };
        if !jsonschema::is_valid(expected, value) {
            findings.problem(&args.at(key), format!("{name} does not take this value"));
        }
    }
}

fn args<'p>(fields: &Fields<'p>, findings: &'p Findings) -> Option<Fields<'p>> {
    match fields.node("args") {
        None => findings.problem(&fields.at("args"), MISSING),
        Some(Node::Map(_)) => return fields.fields("args"),
        Some(other) => findings.problem(&fields.at("args"), format!("must be a mapping, not {}", other.kind())),
    }
    None
}

/// Links the tools, those that others delegate to first.
fn link(drafts: Vec<Draft>, targets: &[Target]) -> Option<Vec<Linked>> {
    let mut order: Vec<usize> = (0..drafts.len()).collect();
    order.sort_by_key(|at| targets.get(*at).map_or(0, |target| target.delegations));
    let mut drafts: Vec<Option<Draft>> = drafts.into_iter().map(Some).collect();
    let mut tools: Vec<Option<Arc<Composed>>> = vec![None; drafts.len()];
    for at in order {
        let draft = drafts.get_mut(at)?.take()?;
        let next = targets.get(at)?.next.and_then(|next| tools.get(next).cloned().flatten());
        *tools.get_mut(at)? = Some(Arc::new(draft.into_tool(next)?));
    }
    let linked = tools.into_iter().zip(targets);
    linked.map(|(tool, target)| Some(Linked { tool: tool?, target: target.clone() })).collect()
}

impl Draft {
    fn into_tool(self, next: Option<Arc<Composed>>) -> Option<Composed> {
        let does = match (self.action?, next) {
            (Action::Mock(mock), _) => Does::Mock(mock),
            (Action::Request(request), _) => Does::Request(request),
            (Action::Args(_, template), Some(next)) => Does::Delegate { args: template?, next },
            (Action::Args(name, template), None) => {
                let (name, _) = primitive(&name)?;
                Does::Primitive { args: template?, name }
            }
            (Action::Unread(_), _) => return None,
        };
        Some(Composed::new(self.name, self.description, self.schema?, does))
    }
}

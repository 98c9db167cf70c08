//! The arguments of `http_request` in a composed tool's template.

use serde_json::{Map, Value};

use super::mapping::{Fields, quoted};
use super::place::Place;
use super::problem::truncate;
use super::template::{Part, Scope, Secrets, Template, Values};
use super::url::Url;
use super::yaml::Node;
use crate::model::tool::MAX_TIMEOUT;
use crate::tool::arguments::is_reserved;

const KEYS: [&str; 5] = ["method", "url", "headers", "body", "timeout"];
/// The error for a timeout out of range.
const BAD_TIMEOUT: &str = "must be a whole number of seconds from 1 to 60";
const NO_SECRET: &str = "is in a place where the proxy swaps none; put it into headers, the body or the URL";
/// The most secrets of one request: a credential, and those that it names in `with`.
const MAX_SECRETS: usize = 5;
const NOT_TEMPLATED: &str = "must be a mapping, or one placeholder for all of them";

/// A request template.
#[derive(Debug)]
pub(super) struct Request {
    method: Option<Template>,
    url: Option<Url>,
    headers: Headers,
    body: Option<Template>,
    timeout: Option<Template>,
}

#[derive(Debug)]
enum Headers {
    Each(Vec<(String, Template)>),
    Whole(Template),
}

/// A call of `http_request`, ready to be sent.
#[derive(Clone, Debug, PartialEq)]
pub struct Rendered {
    /// Those of `method`, `url`, `headers`, `body` and `timeout` that the template contains. Header values are text.
    pub arguments: Map<String, Value>,
    /// The nonce of the placeholders `${NONCE.NAME}` in it: the value of `Exeat-Swap`.
    pub nonce: String,
    /// Names of the fields that the template itself sets, in lower case. Only these may include `Authorization`.
    pub own_fields: Vec<String>,
}

impl Request {
    pub(super) fn read(args: &Fields<'_>, scope: &Scope<'_>) -> Self {
        args.report_others(&KEYS);
        let request = Self {
            method: args.node("method").map(|node| method(node, &args.at("method"), scope)),
            url: url(args, scope),
            headers: args.node("headers").map_or(Headers::Each(Vec::new()), |node| headers(node, args, scope)),
            body: args.node("body").map(|node| scope.template(node, &args.at("body"), Secrets::Here)),
            timeout: args.node("timeout").map(|node| timeout(node, &args.at("timeout"), scope)),
        };
        check_secrets(&request, args, scope);
        request
    }

    pub(super) fn fill(&self, arguments: &Value, nonce: String) -> Result<Rendered, String> {
        let values = Values::new(arguments, &nonce);
        let mut filled = Map::new();
        if let Some(method) = fill(self.method.as_ref(), &values)? {
            let sound = method.as_str().is_some_and(is_token);
            insert(&mut filled, "method", method, sound, "must be a method such as GET")?;
        }
        let url = self.url.as_ref().ok_or("the url is missing")?.fill(&values)?;
        filled.insert("url".to_owned(), Value::String(url));
        let headers = self.headers.fill(&values)?;
        if !headers.is_empty() {
            filled.insert("headers".to_owned(), Value::Object(headers));
        }
        if let Some(body) = fill(self.body.as_ref(), &values)? {
            filled.insert("body".to_owned(), body);
        }
        if let Some(timeout) = fill(self.timeout.as_ref(), &values)? {
            let sound = is_timeout(&timeout);
            insert(&mut filled, "timeout", timeout, sound, BAD_TIMEOUT)?;
        }
        let own_fields = self.headers.own();
        Ok(Rendered { arguments: filled, nonce, own_fields })
    }
}

fn fill(template: Option<&Template>, values: &Values<'_>) -> Result<Option<Value>, String> {
    let filled = template.map(|template| values.fill(template)).transpose()?.flatten();
    Ok(filled.filter(|value| !value.is_null()))
}

fn insert(to: &mut Map<String, Value>, key: &str, value: Value, sound: bool, why: &str) -> Result<(), String> {
    if !sound {
        return Err(format!("{key} {why}"));
    }
    to.insert(key.to_owned(), value);
    Ok(())
}

fn method(node: &Node, place: &Place, scope: &Scope<'_>) -> Template {
    let template = scope.template(node, place, Secrets::Not(NO_SECRET));
    if let Template::Literal(value) = &template
        && !value.as_str().is_some_and(is_token)
    {
        scope.findings.problem(place, "must be a method such as GET");
    } else if matches!(&template, Template::Literal(Value::String(method)) if method.eq_ignore_ascii_case("CONNECT")) {
        scope.findings.problem(place, "CONNECT opens a tunnel and is not supported");
    } else if matches!(template, Template::List(_) | Template::Map(_)) {
        scope.findings.problem(place, format!("must be text, not {}", node.kind()));
    }
    template
}

fn url(args: &Fields<'_>, scope: &Scope<'_>) -> Option<Url> {
    let text = args.required_text("url")?;
    Url::read(text, &args.at("url"), scope)
}

fn timeout(node: &Node, place: &Place, scope: &Scope<'_>) -> Template {
    let template = scope.template(node, place, Secrets::Not(NO_SECRET));
    let sound = match &template {
        Template::Literal(value) => is_timeout(value),
        Template::Whole(_) => true,
        Template::List(_) | Template::Map(_) | Template::Text(_) => false,
    };
    if !sound {
        scope.findings.problem(place, BAD_TIMEOUT);
    }
    template
}

fn is_timeout(value: &Value) -> bool {
    value.as_u64().is_some_and(|seconds| (1..=MAX_TIMEOUT.as_secs()).contains(&seconds))
}

/// Whether a text is a token (RFC 9110 §5.6.2).
fn is_token(text: &str) -> bool {
    let byte = |b: u8| b.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&b);
    !text.is_empty() && text.bytes().all(byte)
}

fn headers(node: &Node, args: &Fields<'_>, scope: &Scope<'_>) -> Headers {
    let place = args.at("headers");
    match node {
        Node::Map(members) => {
            let mut names: Vec<String> = Vec::new();
            for (name, _) in members {
                let lower = name.to_ascii_lowercase();
                if let Err(why) = header_name(&lower, names.contains(&lower)) {
                    scope.findings.problem(&place.key(name), why);
                }
                names.push(lower);
            }
            let value = |(name, value): &(String, Node)| (name.clone(), header(value, &place.key(name), scope));
            Headers::Each(members.iter().map(value).collect())
        }
        Node::Text(text) => {
            let template = scope.text(text, &place, Secrets::Not("replaces all headers; put it into one of them"));
            if !matches!(template, Template::Whole(_)) {
                scope.findings.problem(&place, NOT_TEMPLATED);
            }
            Headers::Whole(template)
        }
        _ => {
            scope.findings.problem(&place, NOT_TEMPLATED);
            Headers::Each(Vec::new())
        }
    }
}

fn header_name(lower: &str, seen: bool) -> Result<(), String> {
    if lower.contains("${") {
        return Err("placeholders are not allowed in keys".to_owned());
    }
    if !is_token(lower) {
        return Err(format!("{} is not a valid header name", quoted(lower)));
    }
    if is_reserved(lower) {
        return Err(format!("{lower} is set by exeat; leave it out"));
    }
    if seen { Err(format!("{lower} is written twice")) } else { Ok(()) }
}

fn header(node: &Node, place: &Place, scope: &Scope<'_>) -> Template {
    if !matches!(node, Node::Bool(_) | Node::Number(_) | Node::Text(_)) {
        scope.findings.problem(place, format!("must be text, not {}", node.kind()));
    }
    let template = scope.template(node, place, Secrets::Here);
    let controls = |text: &str| text.chars().any(char::is_control);
    let wrong = match &template {
        Template::Literal(Value::String(text)) => controls(text),
        Template::Text(parts) => parts.iter().any(|part| matches!(part, Part::Text(text) if controls(text))),
        _ => false,
    };
    if wrong {
        scope.findings.problem(place, "control characters, such as line ends, are not allowed in headers");
    }
    template
}

/// Reports secrets that the proxy would refuse in every call.
fn check_secrets(request: &Request, args: &Fields<'_>, scope: &Scope<'_>) {
    let names = scope.secrets.borrow();
    if names.len() > MAX_SECRETS {
        let names: Vec<&str> = names.iter().map(String::as_str).collect();
        let names = truncate(&names.join(", "), 200);
        scope
            .findings
            .problem(&args.place, format!("a request may use {MAX_SECRETS} secrets, and this one names {names}"));
    }
    if !names.is_empty() && request.url.as_ref().is_some_and(Url::is_plain_http) {
        scope.findings.problem(&args.at("url"), "a secret leaves over https only");
    }
}

impl Headers {
    fn own(&self) -> Vec<String> {
        match self {
            Self::Each(members) => members.iter().map(|(name, _)| name.to_ascii_lowercase()).collect(),
            Self::Whole(_) => Vec::new(),
        }
    }

    fn fill(&self, values: &Values<'_>) -> Result<Map<String, Value>, String> {
        let mut filled = Map::new();
        match self {
            Self::Each(members) => {
                for (name, template) in members {
                    if let Some(text) = values.fill(template)?.map(|value| field(name, value)).transpose()?.flatten() {
                        filled.insert(name.clone(), text);
                    }
                }
            }
            Self::Whole(template) => match values.fill(template)? {
                None | Some(Value::Null) => {}
                Some(Value::Object(members)) => {
                    for (name, value) in members {
                        if let Some(text) = field(&name, value)? {
                            filled.insert(name, text);
                        }
                    }
                }
                Some(_) => return Err("headers must be an object".to_owned()),
            },
        }
        Ok(filled)
    }
}

/// Returns a header's value as text, or `None` for null.
fn field(name: &str, value: Value) -> Result<Option<Value>, String> {
    let text = match value {
        Value::Null => return Ok(None),
        Value::String(text) => text,
        Value::Bool(_) | Value::Number(_) => value.to_string(),
        Value::Array(_) | Value::Object(_) => return Err(format!("header {} must be text", quoted(name))),
    };
    if text.chars().any(char::is_control) {
        return Err(format!("header {} has control characters", quoted(name)));
    }
    Ok(Some(Value::String(text)))
}

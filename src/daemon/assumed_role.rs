//! Fetches temporary credentials of roles from the Security Token Service of AWS. Redirects are not followed.

use std::sync::Arc;
use std::time::{Duration, SystemTime};

use http::header::{ACCEPT, CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderValue, Method, Request, Response, StatusCode};
use http_body_util::Full;
use hyper::body::{Bytes, Incoming};
use quick_xml::Reader;
use quick_xml::events::Event;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;
use zeroize::Zeroizing;

use super::aws_signature::{SignedFor, UnsignedRequest, signature};
use super::clock_skew::{ClockSkew, ClockSkews};
use super::form::Form;
use super::own_request::{OwnRequests, retry_after};
use super::own_server::OwnServers;
use super::secret_store::MAX_SESSION_TOKEN;
use crate::model::secret::Secret;
use crate::policy::assumed_role::RoleRequest;
use crate::policy::aws::{AwsKey, is_access_key_id};
use crate::policy::held_secret::HeldSecret;
use crate::policy::mint::TokenLife;
use crate::stages::mint::{IssuedToken, MintError};
use crate::stages::pin::OwnServer;

/// The maximum size of a response's body, in bytes.
const MAX_RESPONSE: usize = 64 * 1024;
/// The longest secret access key, in bytes.
const MAX_SECRET: usize = 256;
/// The deepest element of an answer.
const MAX_DEPTH: usize = 16;
const FORM: &str = "application/x-www-form-urlencoded; charset=utf-8";
const XML: &str = "text/xml";
/// The version of the API.
const VERSION: &str = "2011-06-15";
/// The errors that are told to operators.
const ERRORS: [&str; 15] = [
    "AccessDenied",
    "ExpiredToken",
    "ExpiredTokenException",
    "IncompleteSignature",
    "InvalidClientTokenId",
    "MalformedPolicyDocument",
    "OptInRequired",
    "PackedPolicyTooLarge",
    "RegionDisabledException",
    "RequestExpired",
    "RequestLimitExceeded",
    "SignatureDoesNotMatch",
    "Throttling",
    "ThrottlingException",
    "ValidationError",
];

/// Those that pass.
const THROTTLED: [&str; 3] = ["RequestLimitExceeded", "Throttling", "ThrottlingException"];

/// The Security Token Services of the configuration.
pub(super) struct AssumedRoles {
    requests: OwnRequests,
    skews: ClockSkews,
}

/// The text of an answer's elements.
#[derive(Default)]
struct Answer {
    access_key_id: Option<Zeroizing<String>>,
    secret_access_key: Option<Zeroizing<String>>,
    session_token: Option<Zeroizing<String>>,
    expiration: Option<Zeroizing<String>>,
    error: Option<Zeroizing<String>>,
}

impl AssumedRoles {
    pub(super) fn new(own_servers: &OwnServers<'_>) -> Self {
        let (dialer, server) = (own_servers.dialer(), OwnServer::TokenEndpoint);
        let requests = OwnRequests { dialer, server, name: "Security Token Service" };
        Self { requests, skews: ClockSkews::default() }
    }

    /// Fetches credentials, with a second request if the clocks differ.
    pub(super) async fn assume(&self, role: &Arc<RoleRequest>) -> Result<IssuedToken, MintError> {
        let server = role.url.to_string();
        let mut skew = self.skews.of(&server);
        let mut response = self.ask(role, skew).await?;
        if let Some(new) = self.skews.note(&server, response.headers(), skew) {
            skew = new;
            if response.status().is_client_error() {
                response = self.ask(role, skew).await?;
            }
        }
        let (head, body) = response.into_parts();
        let retry_after = retry_after(&head.headers);
        let body = self.requests.read(body, MAX_RESPONSE).await?;
        let answer = Answer::parse(&body);
        if !head.status.is_success() {
            let error = answer.and_then(|answer| answer.known_error());
            let status = head.status.as_u16();
            let reason = match error {
                Some(error) => format!("the Security Token Service answered {status}: {error}"),
                None => format!("the Security Token Service answered {status}"),
            };
            let passes = [StatusCode::REQUEST_TIMEOUT, StatusCode::TOO_MANY_REQUESTS].contains(&head.status);
            let is_throttled = error.is_some_and(|error| THROTTLED.contains(&error));
            let is_lasting = !head.status.is_server_error() && !passes && !is_throttled;
            return Err(MintError { reason, retry_after, is_lasting });
        }
        let answer = answer.ok_or("the answer is not that of the Security Token Service");
        let issued = answer.and_then(|answer| answer.issued(skew.applied_to(SystemTime::now())));
        issued.map_err(MintError::lasting)
    }

    async fn ask(&self, role: &RoleRequest, skew: ClockSkew) -> Result<Response<Incoming>, MintError> {
        let request = build(role, skew.applied_to(SystemTime::now()));
        let request = request.ok_or_else(|| MintError::lasting("the request for the role cannot be signed"))?;
        self.requests.send(&role.url, request).await
    }
}

/// Returns the signed request. `None` if the key has characters that cannot be signed with.
fn build(role: &RoleRequest, time: SystemTime) -> Option<Request<Full<Bytes>>> {
    let text = |secret: &HeldSecret| String::from_utf8(secret.secret().expose().to_vec()).ok();
    let Form(body) = form(role);
    let fields = vec![("content-type", FORM)];
    let unsigned = UnsignedRequest { method: Method::POST.as_str(), url: &role.url, path: "/", fields, body: &body };
    let token = match &role.key.session_token {
        Some(token) => Some(text(token)?),
        None => None,
    };
    let key = (role.key.access_key_id.clone(), text(&role.secret)?, token);
    let signed = signature(&unsigned, key, &SignedFor { region: &role.region, service: "sts", time }).ok()?;
    let mut request = Request::post("/")
        .header(HOST, role.url.host_field())
        .header(USER_AGENT, concat!("exeat/", env!("CARGO_PKG_VERSION")))
        .header(ACCEPT, XML)
        .header(CONTENT_TYPE, FORM)
        .body(Full::new(Bytes::from_owner(body)))
        .ok()?;
    for (name, value) in signed {
        let mut value = HeaderValue::from_str(&value).ok()?;
        value.set_sensitive(true);
        request.headers_mut().insert(name, value);
    }
    Some(request)
}

fn form(role: &RoleRequest) -> Form {
    let mut form = Form::default();
    let duration = role.duration.as_secs().to_string();
    let texts = [
        ("Action", "AssumeRole"),
        ("Version", VERSION),
        ("RoleArn", &role.role_arn),
        ("RoleSessionName", &role.session_name),
        ("DurationSeconds", &duration),
    ];
    let given = [("ExternalId", &role.external_id), ("Policy", &role.policy)];
    let given = given.into_iter().filter_map(|(name, value)| Some((name, value.as_deref()?)));
    texts.into_iter().chain(given).for_each(|(name, value)| form.add(name, value.as_bytes()));
    for (number, arn) in (1..).zip(&role.policy_arns) {
        form.add(&format!("PolicyArns.member.{number}.arn"), arn.as_bytes());
    }
    form
}

impl Answer {
    /// Reads the elements that are used. `None` for anything but well-formed XML without references and a document type, and for
    /// an element that occurs twice.
    fn parse(body: &[u8]) -> Option<Self> {
        let mut reader = Reader::from_reader(body);
        let mut answer = Self::default();
        let mut path: Vec<String> = Vec::new();
        loop {
            match reader.read_event().ok()? {
                Event::Start(start) => {
                    // Names of namespaces are not checked: the address is that of the operator.
                    path.push(start.local_name().into_inner().to_owned());
                    if path.len() > MAX_DEPTH {
                        return None;
                    }
                    if let Some(element) = answer.element(&path) {
                        if element.is_some() {
                            return None;
                        }
                        *element = Some(Zeroizing::default());
                    }
                }
                Event::Text(text) => {
                    if let Some(element) = answer.element(&path) {
                        element.get_or_insert_default().push_str(&text);
                    }
                }
                Event::End(_) => {
                    path.pop()?;
                }
                Event::Decl(_) | Event::Comment(_) | Event::Empty(_) => {}
                Event::Eof => return path.is_empty().then_some(answer),
                Event::CData(_) | Event::DocType(_) | Event::PI(_) | Event::GeneralRef(_) => {
                    // An error's text may have references, which are not read.
                    if answer.element(&path).is_some() || path.is_empty() {
                        return None;
                    }
                }
            }
        }
    }

    /// Returns the place for the text of an element.
    fn element(&mut self, path: &[String]) -> Option<&mut Option<Zeroizing<String>>> {
        let names: Vec<&str> = path.iter().map(String::as_str).collect();
        match names[..] {
            ["AssumeRoleResponse", "AssumeRoleResult", "Credentials", name] => match name {
                "AccessKeyId" => Some(&mut self.access_key_id),
                "SecretAccessKey" => Some(&mut self.secret_access_key),
                "SessionToken" => Some(&mut self.session_token),
                "Expiration" => Some(&mut self.expiration),
                _ => None,
            },
            ["ErrorResponse", "Error", "Code"] => Some(&mut self.error),
            _ => None,
        }
    }

    /// Returns the error's code, if it is a documented one.
    fn known_error(&self) -> Option<&'static str> {
        let error = self.error.as_ref()?;
        ERRORS.into_iter().find(|known| **known == ***error)
    }

    /// Returns the credentials, at the time of the service's clock.
    fn issued(self, now: SystemTime) -> Result<IssuedToken, &'static str> {
        const INCOMPLETE: &str = "the answer has no credentials";
        let is_visible = |text: &str, max: usize| {
            (1..=max).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_graphic())
        };
        let id = self.access_key_id.ok_or(INCOMPLETE)?;
        let (secret, token) = self.secret_access_key.zip(self.session_token).ok_or(INCOMPLETE)?;
        if !is_access_key_id(&id) {
            return Err("the answer has no valid id of an access key");
        }
        if !is_visible(&secret, MAX_SECRET) {
            return Err("the answer has no valid secret access key");
        }
        if !is_visible(&token, MAX_SESSION_TOKEN) {
            return Err("the answer has no valid session token, or one of more than 4096 bytes");
        }
        let end = self.expiration.ok_or(INCOMPLETE)?;
        let end =
            OffsetDateTime::parse(&end, &Rfc3339).map_err(|_| "the end of the credentials' life is not a time")?;
        let life = SystemTime::from(end).duration_since(now).ok().filter(|life| *life > Duration::ZERO);
        let life = life.ok_or("the credentials have expired already")?;
        let token = Arc::new(HeldSecret::new(Secret::new(token.as_bytes().to_vec())));
        let aws_key = AwsKey { access_key_id: id.to_string(), session_token: Some(token) };
        let value = Secret::new(secret.as_bytes().to_vec());
        Ok(IssuedToken { value, aws_key: Some(aws_key), life: TokenLife::Stated(life) })
    }
}

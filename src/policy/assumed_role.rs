//! Roles of AWS that are assumed with the key of a credential: the keys of `assume_role`, and the request for temporary
//! credentials (`AssumeRole` of the Security Token Service).

use std::sync::Arc;
use std::time::Duration;

use super::aws::{self, AwsKey};
use super::held_secret::{HeldSecret, PartsHash};
use super::hook_url::HookUrl;
use super::reader::{Findings, Section};
use crate::model::secret::Secret;

/// The life of temporary credentials, unless the configuration says otherwise.
const DURATION: Duration = Duration::from_secs(3600);
/// The shortest and the longest life, by the documentation of AWS.
const DURATIONS: std::ops::RangeInclusive<Duration> = Duration::from_secs(900)..=Duration::from_secs(12 * 3600);
/// The name of the session, unless the configuration says otherwise. The logs of AWS show it.
const SESSION_NAME: &str = "exeat";
/// The largest number of managed policies that narrow a session.
const MAX_POLICIES: usize = 10;
/// The longest policy, in characters.
const MAX_POLICY: usize = 2048;

/// A request for temporary credentials of a role.
#[derive(Clone)]
pub struct RoleRequest {
    /// The Security Token Service.
    pub url: HookUrl,
    /// The region that the request is signed for.
    pub region: String,
    /// The role.
    pub role_arn: String,
    /// The name of the session.
    pub session_name: String,
    /// A name that the role's owner requires.
    pub external_id: Option<String>,
    /// A policy that narrows the session, in JSON.
    pub policy: Option<String>,
    /// Managed policies that narrow the session, by their ARNs.
    pub policy_arns: Vec<String>,
    /// The life that is asked for.
    pub duration: Duration,
    /// The key that signs the request.
    pub key: AwsKey,
    /// The secret of that key.
    pub secret: Arc<HeldSecret>,
}

/// `assume_role` of a credential.
pub(super) struct RawRole {
    role_arn: Option<String>,
    session_name: Option<String>,
    external_id: Option<String>,
    policy: Option<String>,
    policy_arns: Vec<String>,
    duration: Option<Duration>,
    region: Option<String>,
    endpoint: Option<String>,
    is_missing: bool,
    path: String,
}

impl RawRole {
    pub(super) fn read(mut s: Section<'_>) -> Self {
        Self {
            is_missing: !s.has("role_arn"),
            role_arn: s.take("role_arn"),
            session_name: s.take("session_name"),
            external_id: s.take("external_id"),
            policy: s.take("policy"),
            policy_arns: s.take("policy_arns").unwrap_or_default(),
            duration: s.take("duration"),
            region: s.take("region"),
            endpoint: s.take("endpoint"),
            path: s.at("").trim_end_matches('.').to_owned(),
        }
    }

    /// Reports the keys that are missing or invalid. `region` is that of the credential.
    pub(super) fn check(&self, region: Option<&str>, findings: &Findings) {
        let at = |key: &str| format!("{}.{key}", self.path);
        if self.is_missing {
            findings.problem(at("role_arn"), "missing", "\"arn:aws:iam::123456789012:role/NAME\"");
        }
        if self.role_arn.as_ref().is_some_and(|arn| !is_arn_of(arn, "role/")) {
            let expected = "\"arn:aws:iam::123456789012:role/NAME\"";
            findings.problem(at("role_arn"), "not the ARN of a role", expected);
        }
        if self.session_name.as_ref().is_some_and(|name| !is_name(name, 2..=64, "_=,.@-")) {
            findings.problem(
                at("session_name"),
                "not the name of a session",
                "2 to 64 letters, digits and any of _=,.@-",
            );
        }
        if self.external_id.as_ref().is_some_and(|id| !is_name(id, 2..=1224, "_=,.@:/-+")) {
            findings.problem(at("external_id"), "not an external id", "2 to 1224 letters, digits and any of _=,.@:/-+");
        }
        let is_policy = |text: &String| {
            text.chars().count() <= MAX_POLICY
                && serde_json::from_str::<serde_json::Map<String, serde_json::Value>>(text).is_ok()
        };
        if self.policy.as_ref().is_some_and(|policy| !is_policy(policy)) {
            findings.problem(at("policy"), "not a policy", "a JSON object of at most 2048 characters");
        }
        if self.policy_arns.len() > MAX_POLICIES {
            findings.problem(at("policy_arns"), "too many policies", format!("at most {MAX_POLICIES}"));
        }
        for (i, _) in self.policy_arns.iter().enumerate().filter(|(_, arn)| !is_arn_of(arn, "policy/")) {
            let expected = "\"arn:aws:iam::aws:policy/NAME\"";
            findings.problem(format!("{}[{i}]", at("policy_arns")), "not the ARN of a policy", expected);
        }
        if self.duration.is_some_and(|duration| !DURATIONS.contains(&duration)) {
            findings.problem(at("duration"), "AWS issues no credentials with such a life", "\"15m\" to \"12h\"");
        }
        if self.region.as_ref().is_some_and(|region| !aws::is_name(region)) {
            findings.problem(at("region"), "not the name of a region", "such as \"us-east-1\"");
        }
        if self.region(region).is_none() && !findings.has(&at("region")) {
            findings.problem(
                at("region"),
                "missing",
                "the region of the Security Token Service, such as \"us-east-1\"",
            );
        }
        if let Some(Err(error)) = self.url(region) {
            findings.problem(at("endpoint"), error, "\"https://sts.us-east-1.amazonaws.com\"");
        }
    }

    fn region<'a>(&'a self, of_credential: Option<&'a str>) -> Option<&'a str> {
        self.region.as_deref().or(of_credential)
    }

    /// Returns the URL of the service in the region. The credentials of the global one are not valid everywhere.
    fn url(&self, region: Option<&str>) -> Option<Result<HookUrl, String>> {
        let region = self.region(region)?;
        // The partition of China has a domain of its own.
        let domain = if region.starts_with("cn-") { "amazonaws.com.cn" } else { "amazonaws.com" };
        let text = self.endpoint.clone().unwrap_or_else(|| format!("https://sts.{region}.{domain}"));
        let url = HookUrl::parse(&text).map_err(|error| error.to_string());
        Some(url.and_then(|url| match url.path() {
            "/" => Ok(url),
            _ => Err("it has a path".to_owned()),
        }))
    }

    /// Returns the request. `None` if a key is missing or invalid, after that has been reported.
    pub(super) fn request(&self, key: AwsKey, secret: Secret, of_credential: Option<&str>) -> Option<RoleRequest> {
        let region = self.region(of_credential)?.to_owned();
        Some(RoleRequest {
            url: self.url(of_credential)?.ok()?,
            region,
            role_arn: self.role_arn.clone()?,
            session_name: self.session_name.clone().unwrap_or_else(|| SESSION_NAME.to_owned()),
            external_id: self.external_id.clone(),
            policy: self.policy.clone(),
            policy_arns: self.policy_arns.clone(),
            duration: self.duration.unwrap_or(DURATION),
            key,
            secret: Arc::new(HeldSecret::new(secret)),
        })
    }
}

impl RoleRequest {
    /// Returns the secrets that sign the request or are sent in it, with the keys that name their sources.
    pub(super) fn secrets(&self) -> impl Iterator<Item = (&'static str, &Arc<HeldSecret>)> {
        let token = self.key.session_token.iter().map(|token| ("session_token", token));
        std::iter::once(("value", &self.secret)).chain(token)
    }

    /// Describes what its credentials permit, without a secret.
    pub(super) fn permissions(&self) -> String {
        let mut parts = vec![format!("{} as {} at {}", self.role_arn, self.session_name, self.url)];
        parts.push(format!("key {}", self.key.access_key_id));
        parts.extend(self.external_id.iter().map(|id| format!("external id {id}")));
        parts.extend(self.policy.iter().map(|policy| format!("policy {policy}")));
        parts.extend(self.policy_arns.iter().map(|arn| format!("policy {arn}")));
        parts.join(", ")
    }

    /// Adds everything that the credentials depend on.
    pub(super) fn add_to(&self, hash: &mut PartsHash) {
        hash.add_all([self.url.to_string().as_str(), &self.region, &self.role_arn, &self.session_name]);
        hash.add_optional([self.external_id.as_deref(), self.policy.as_deref()]);
        hash.add(&self.policy_arns.len().to_be_bytes());
        hash.add_all(self.policy_arns.iter().map(String::as_str));
        hash.add(&self.duration.as_secs().to_be_bytes());
        hash.add_all([self.key.access_key_id.as_str()]);
        self.secrets().for_each(|(_, held)| hash.add(held.secret().expose()));
    }
}

/// Returns true for an ARN of IAM, of a resource of this kind.
fn is_arn_of(text: &str, kind: &str) -> bool {
    let parts: Vec<&str> = text.splitn(6, ':').collect();
    let [arn, partition, "iam", "", account, resource] = parts[..] else { return false };
    let is_label = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-');
    let is_resource = resource.strip_prefix(kind).is_some_and(|name| is_name(name, 1..=512, "_=,.@/+-"));
    arn == "arn" && is_label(partition) && is_label(account) && is_resource && text.len() <= 2048
}

/// Returns true for letters, digits and these characters.
fn is_name(text: &str, lengths: std::ops::RangeInclusive<usize>, others: &str) -> bool {
    lengths.contains(&text.len()) && text.chars().all(|c| c.is_ascii_alphanumeric() || others.contains(c))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arns_of_roles_and_policies() {
        for arn in ["arn:aws:iam::123456789012:role/agent", "arn:aws-cn:iam::123456789012:role/team/a.b@c"] {
            assert!(is_arn_of(arn, "role/"), "{arn}");
        }
        assert!(is_arn_of("arn:aws:iam::aws:policy/ReadOnlyAccess", "policy/"));
        for arn in [
            "arn:aws:iam::123456789012:user/agent",
            "arn:aws:iam::123456789012:role/",
            "arn:aws:iam::123456789012:role",
            "arn:aws:iam::123456789012:role/a b",
            "arn:aws:iam:eu-west-1:123456789012:role/a",
            "arn:aws:iam:::role/a",
            "arn:aws:sts::123456789012:role/a",
            "",
        ] {
            assert!(!is_arn_of(arn, "role/"), "{arn}");
        }
    }
}

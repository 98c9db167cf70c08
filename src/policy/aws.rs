//! The parts of an AWS credential that are not its secret access key, and the scope of a signature.

use std::sync::Arc;

use super::held_secret::{HeldSecret, PartsHash};
use crate::model::host::Host;

/// The set of all regions.
const ALL_REGIONS: &str = "*";
/// The longest set of regions.
const MAX_REGION_SET: usize = 256;
/// The longest name of a region or a service.
const MAX_NAME: usize = 64;

/// The parts of an access key that are not its secret.
#[derive(Clone)]
pub struct AwsKey {
    /// The id of the access key, which is no secret.
    pub access_key_id: String,
    /// The token of temporary credentials.
    pub session_token: Option<Arc<HeldSecret>>,
}

impl AwsKey {
    /// Returns true if both are the same.
    pub(super) fn is(&self, other: &Self) -> bool {
        let is_same_token = match (&self.session_token, &other.session_token) {
            (Some(own), Some(other)) => own.is(other.secret()),
            (own, other) => own.is_none() && other.is_none(),
        };
        self.access_key_id == other.access_key_id && is_same_token
    }
}

/// The parts of an access key beside its secret, which is fetched: a member of an item or an output.
#[derive(Clone)]
pub struct FetchedAwsKey {
    /// The id.
    pub access_key_id: FetchedKeyId,
    /// The member with the token of temporary credentials.
    pub session_token: Option<String>,
}

/// The id of an access key whose secret is fetched.
#[derive(Clone)]
pub enum FetchedKeyId {
    /// It is known.
    Text(String),
    /// A member of the same item.
    Member(String),
}

impl FetchedAwsKey {
    /// Adds the parts to a hash.
    pub(super) fn add_to(&self, hash: &mut PartsHash) {
        match &self.access_key_id {
            FetchedKeyId::Text(id) => hash.add_all(["id", id]),
            FetchedKeyId::Member(member) => hash.add_all(["id in", member]),
        }
        hash.add_optional([self.session_token.as_deref()]);
    }
}

/// The kinds of signatures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AwsAlgorithm {
    /// AWS Signature Version 4, for one region.
    V4,
    /// AWS Signature Version 4A, for several regions.
    V4a,
}

/// How a credential with `auth_type = "aws_sigv4"` or `"aws_sigv4a"` signs.
#[derive(Clone)]
pub struct AwsSigning {
    /// The kind of signatures.
    pub algorithm: AwsAlgorithm,
    /// The region, if the configuration names one. With [`AwsAlgorithm::V4a`], regions with commas between them, or `*`.
    pub region: Option<String>,
    /// The service, if the configuration names one.
    pub service: Option<String>,
}

/// The region and the service that a signature is for, by their names in signatures.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct AwsScope {
    /// The kind of the signature.
    pub algorithm: AwsAlgorithm,
    /// The region, such as `us-east-1`, or regions as in [`AwsSigning::region`].
    pub region: String,
    /// The service, such as `s3`.
    pub service: String,
}

impl AwsSigning {
    /// Returns the scope of a signature: what the configuration names, then what the host says, then what the client has signed
    /// for. `None` if a part is not known. The client does not precede the host, which could use a signature for another
    /// service. For several regions, it is valid in all of them unless the configuration says otherwise.
    #[must_use]
    pub fn scope(&self, of_client: Option<AwsScope>, host: &Host) -> Option<AwsScope> {
        let algorithm = self.algorithm;
        let known = AwsScope::of_host(host).or(of_client);
        let (region, service) = known.map_or((None, None), |scope| (Some(scope.region), Some(scope.service)));
        let region = match algorithm {
            AwsAlgorithm::V4 => region.filter(|region| region != ALL_REGIONS),
            AwsAlgorithm::V4a => Some(ALL_REGIONS.to_owned()),
        };
        let (region, service) = (self.region.clone().or(region)?, self.service.clone().or(service)?);
        Some(AwsScope { algorithm, region, service })
    }
}

impl AwsAlgorithm {
    const ALL: [Self; 2] = [Self::V4, Self::V4a];

    /// Returns the name in `Authorization`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::V4 => "AWS4-HMAC-SHA256",
            Self::V4a => "AWS4-ECDSA-P256-SHA256",
        }
    }

    /// Splits the name and a blank off the value of `Authorization`.
    fn of(value: &[u8]) -> Option<(Self, &[u8])> {
        Self::ALL
            .into_iter()
            .find_map(|one| Some((one, value.strip_prefix(one.name().as_bytes())?.strip_prefix(b" ")?)))
    }
}

impl AwsScope {
    /// Reads the scope of `AWS4-HMAC-SHA256 Credential=ID/DATE/REGION/SERVICE/aws4_request, …`, or of
    /// `AWS4-ECDSA-P256-SHA256 Credential=ID/DATE/SERVICE/aws4_request, …`, which names its regions in another field.
    #[must_use]
    pub fn of_authorization(value: &[u8]) -> Option<Self> {
        let (algorithm, parameters) = AwsAlgorithm::of(value)?;
        let parameters = std::str::from_utf8(parameters).ok()?.split(',');
        let credential = parameters.map(str::trim).find_map(|parameter| parameter.strip_prefix("Credential="))?;
        let mut parts = credential.rsplit('/');
        let (end, service) = (parts.next()?, parts.next()?);
        let region = match algorithm {
            AwsAlgorithm::V4 => parts.next().filter(|region| is_name(region))?,
            AwsAlgorithm::V4a => ALL_REGIONS,
        };
        let date = parts.next()?;
        let is_date = date.len() == 8 && date.bytes().all(|byte| byte.is_ascii_digit());
        let is_valid = end == "aws4_request" && is_date && is_name(service);
        is_valid.then(|| Self { algorithm, region: region.to_owned(), service: service.to_owned() })
    }

    /// Returns whether a text before a placeholder, and the one after it, are those of the id of a key in such a value.
    #[must_use]
    pub fn surrounds_id(before: &[u8], after: &[u8]) -> bool {
        AwsAlgorithm::of(before).is_some_and(|(_, start)| start == b"Credential=") && after.starts_with(b"/")
    }

    /// Reads the scope from a host name of AWS: `SERVICE.REGION.amazonaws.com` with labels before it, `SERVICE.amazonaws.com` for
    /// global services, and the like below `api.aws` and `on.aws`.
    #[must_use]
    pub fn of_host(host: &Host) -> Option<Self> {
        let name = host.name()?.as_str();
        let domains = [".amazonaws.com", ".amazonaws.com.cn", ".api.aws", ".on.aws"];
        let rest = domains.into_iter().find_map(|domain| name.strip_suffix(domain))?;
        let labels: Vec<&str> = rest.split('.').filter(|label| *label != "dualstack").collect();
        let region_at = labels.iter().rposition(|label| is_region(label));
        let (region, service) = match region_at {
            // `es` and some others have the service behind the region.
            Some(at) => (*labels.get(at)?, *labels.get(at.checked_add(1)?).or_else(|| labels.get(at.checked_sub(1)?))?),
            None => ("us-east-1", *labels.last()?),
        };
        let service = service.strip_suffix("-fips").unwrap_or(service);
        let renamed = RENAMED.iter().find(|(endpoint, _)| *endpoint == service);
        let service = renamed.map_or(service, |(_, service)| service);
        Some(Self { algorithm: AwsAlgorithm::V4, region: region.to_owned(), service: service.to_owned() })
    }

    /// Returns whether a signature has its path encoded once, and the service takes bodies that are not signed: S3 and its
    /// relatives.
    #[must_use]
    pub fn is_s3(&self) -> bool {
        matches!(self.service.as_str(), "s3" | "s3express" | "s3-object-lambda" | "s3-outposts")
    }
}

/// Names of endpoints whose services have another name in signatures.
const RENAMED: [(&str, &str); 9] = [
    ("bedrock-agent", "bedrock"),
    ("bedrock-agent-runtime", "bedrock"),
    ("bedrock-runtime", "bedrock"),
    ("email", "ses"),
    ("lambda-url", "lambda"),
    ("mobile", "AWSMobileHubService"),
    ("runtime", "lex"),
    ("s3-global", "s3"),
    ("streams", "dynamodb"),
];

/// Returns true for the name of a region or a service.
#[must_use]
pub fn is_name(text: &str) -> bool {
    let is_valid = |byte: u8| byte.is_ascii_alphanumeric() || byte == b'-';
    (1..=MAX_NAME).contains(&text.len()) && text.bytes().all(is_valid)
}

/// Returns true for a set of regions: `*`, or names with commas between them, which may end with `*`.
#[must_use]
pub fn is_region_set(text: &str) -> bool {
    let is_pattern = |region: &str| region == ALL_REGIONS || is_name(region.strip_suffix('*').unwrap_or(region));
    text.len() <= MAX_REGION_SET && text.split(',').all(is_pattern)
}

/// Returns true for the id of an access key.
#[must_use]
pub fn is_access_key_id(text: &str) -> bool {
    (16..=128).contains(&text.len()) && text.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

/// Such as `us-east-1` and `us-gov-west-1`.
fn is_region(label: &str) -> bool {
    let mut parts = label.split('-');
    let first = parts.next().is_some_and(|part| part.len() == 2 && part.bytes().all(|byte| byte.is_ascii_lowercase()));
    let last = parts.next_back().is_some_and(|part| part.len() == 1 && part.bytes().all(|byte| byte.is_ascii_digit()));
    let mut middle = parts.peekable();
    let has_middle = middle.peek().is_some();
    first
        && last
        && has_middle
        && middle.all(|part| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_lowercase()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(region: &str, service: &str) -> AwsScope {
        AwsScope { algorithm: AwsAlgorithm::V4, region: region.to_owned(), service: service.to_owned() }
    }

    #[test]
    fn hosts_name_region_and_service() {
        let rows = [
            ("s3.eu-central-1.amazonaws.com", Some(("eu-central-1", "s3"))),
            ("bucket.s3.eu-central-1.amazonaws.com", Some(("eu-central-1", "s3"))),
            ("a.b.s3.dualstack.us-west-2.amazonaws.com", Some(("us-west-2", "s3"))),
            ("bucket.s3.amazonaws.com", Some(("us-east-1", "s3"))),
            ("iam.amazonaws.com", Some(("us-east-1", "iam"))),
            ("sts.us-gov-west-1.amazonaws.com", Some(("us-gov-west-1", "sts"))),
            ("kms-fips.us-east-2.amazonaws.com", Some(("us-east-2", "kms"))),
            ("dynamodb.cn-north-1.amazonaws.com.cn", Some(("cn-north-1", "dynamodb"))),
            ("bedrock-runtime.us-east-1.amazonaws.com", Some(("us-east-1", "bedrock"))),
            ("email.eu-west-1.amazonaws.com", Some(("eu-west-1", "ses"))),
            ("abc123.execute-api.us-east-1.amazonaws.com", Some(("us-east-1", "execute-api"))),
            ("abc.lambda-url.us-east-1.on.aws", Some(("us-east-1", "lambda"))),
            ("search-x.us-east-1.es.amazonaws.com", Some(("us-east-1", "es"))),
            ("mfzwi23gnjvgw.mrap.accesspoint.s3-global.amazonaws.com", Some(("us-east-1", "s3"))),
            ("amazonaws.com", None),
            ("s3.us-east-1.amazonaws.com.evil.test", None),
            ("api.example.com", None),
        ];
        for (host, want) in rows {
            let want = want.map(|(region, service)| scope(region, service));
            assert_eq!(AwsScope::of_host(&Host::parse(host).unwrap()), want, "{host}");
        }
        assert_eq!(AwsScope::of_host(&Host::parse("192.0.2.1").unwrap()), None);
    }

    #[test]
    fn the_client_names_them_in_its_own_signature() {
        let rest = "SignedHeaders=host;x-amz-date, Signature=00";
        let rows = [
            (
                format!("AWS4-HMAC-SHA256 Credential=${{secrets.A}}/20261127/us-east-1/s3/aws4_request, {rest}"),
                Some(("us-east-1", "s3")),
            ),
            (format!("AWS4-HMAC-SHA256 {rest},Credential=A/B/20261127/a/b/aws4_request"), Some(("a", "b"))),
            ("AWS4-HMAC-SHA256 Credential=A/2026112/us-east-1/s3/aws4_request".to_owned(), None),
            ("AWS4-HMAC-SHA256 Credential=A/20261127/us-east-1/s3/aws5_request".to_owned(), None),
            ("AWS4-HMAC-SHA256 Credential=A/20261127/us east/s3/aws4_request".to_owned(), None),
            ("AWS4-HMAC-SHA256 Credential=A/20261127//s3/aws4_request".to_owned(), None),
            ("AWS4-ECDSA-P256-SHA256 Credential=A/20261127/us-east-1/s3/aws4_request".to_owned(), None),
            ("AWS4-ECDSA-P256-SHA512 Credential=A/20261127/us-east-1/s3/aws4_request".to_owned(), None),
            ("Bearer x".to_owned(), None),
            (String::new(), None),
        ];
        for (value, want) in rows {
            let want = want.map(|(region, service)| scope(region, service));
            assert_eq!(AwsScope::of_authorization(value.as_bytes()), want, "{value}");
        }
        assert!(AwsScope::surrounds_id(b"AWS4-HMAC-SHA256 Credential=", b"/2026"));
        assert!(!AwsScope::surrounds_id(b"AWS4-HMAC-SHA256 Credential=a", b"/2026"));
        assert!(!AwsScope::surrounds_id(b"AWS4-HMAC-SHA256 Credential=", b"a/2026"));
        assert!(!AwsScope::surrounds_id(b"Bearer ", b""));
        let several = AwsScope::of_authorization(b"AWS4-ECDSA-P256-SHA256 Credential=A/20261127/s3/aws4_request, x=y");
        assert_eq!(several, Some(AwsScope { algorithm: AwsAlgorithm::V4a, ..scope("*", "s3") }));
        assert!(AwsScope::surrounds_id(b"AWS4-ECDSA-P256-SHA256 Credential=", b"/2026"));
    }

    #[test]
    fn the_configuration_precedes_the_host_and_the_host_the_client() {
        let key = |region: Option<&str>, service: Option<&str>| AwsSigning {
            algorithm: AwsAlgorithm::V4,
            region: region.map(str::to_owned),
            service: service.map(str::to_owned),
        };
        let (aws, other) = (Host::parse("s3.us-east-1.amazonaws.com").unwrap(), Host::parse("minio.test").unwrap());
        let client = || Some(scope("eu-west-1", "s3"));
        assert_eq!(key(Some("a"), Some("b")).scope(client(), &aws), Some(scope("a", "b")));
        assert_eq!(key(Some("a"), None).scope(client(), &aws), Some(scope("a", "s3")));
        assert_eq!(key(None, None).scope(client(), &aws), Some(scope("us-east-1", "s3")));
        assert_eq!(key(None, None).scope(client(), &other), Some(scope("eu-west-1", "s3")));
        assert_eq!(key(None, None).scope(None, &aws), Some(scope("us-east-1", "s3")));
        let of_several = Some(AwsScope { algorithm: AwsAlgorithm::V4a, ..scope("*", "sqs") });
        assert_eq!(key(None, None).scope(of_several.clone(), &other), None, "a region of the client's is missing");
        let several = AwsSigning { algorithm: AwsAlgorithm::V4a, ..key(None, None) };
        let scope_of =
            |region: &str, service: &str| Some(AwsScope { algorithm: AwsAlgorithm::V4a, ..scope(region, service) });
        assert_eq!(several.scope(client(), &aws), scope_of("*", "s3"), "the client does not choose the regions");
        assert_eq!(several.scope(of_several, &other), scope_of("*", "sqs"));
        let narrowed = AwsSigning { region: Some("us-*,eu-west-1".to_owned()), ..several };
        assert_eq!(narrowed.scope(client(), &aws), scope_of("us-*,eu-west-1", "s3"));
        assert_eq!(key(None, Some("s3")).scope(None, &other), None);
        assert_eq!(key(Some("a"), Some("s3")).scope(None, &other), Some(scope("a", "s3")));
    }
}

//! Finds keys of well-known families by their shape, even if the proxy does not hold them. Off by default.
//!
//! The shapes favor precision over recall: each has a distinctive prefix, an exact length and alphabet, and the
//! issuer's checksum if it is known. See `docs/leak-families.md`. Entropy is not used, because a wrongly refused
//! request costs more than a key that another safeguard has to catch.

mod checks;
#[cfg(test)]
mod measure;
mod probes;
mod shapes;
mod stream;
#[cfg(test)]
mod tests;

use std::ops::Range;

use probes::Probes;
use shapes::{SHAPES, Shape, Verdict};
pub use stream::FamilyStream;

/// A family of keys, by issuer or kind. Each can be enabled by its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Family {
    /// Secret keys of the file encryption tool age.
    Age,
    /// API keys and subscription tokens of Claude.
    Anthropic,
    /// API tokens of Jira and Confluence.
    Atlassian,
    /// Long-term and temporary access key ids.
    Aws,
    /// Account keys of Storage and Cosmos DB after their name.
    Azure,
    /// API keys of Brevo, formerly Sendinblue.
    Brevo,
    /// API tokens of crates.io.
    CratesIo,
    /// Personal access tokens.
    Databricks,
    /// Personal and application tokens.
    DigitalOcean,
    /// Access tokens of Docker Hub.
    Docker,
    /// Personal tokens.
    Doppler,
    /// Access tokens.
    Dynatrace,
    /// Access tokens of Fly.io.
    Fly,
    /// Personal, application and installation tokens.
    GitHub,
    /// Personal, project, deploy, trigger and agent tokens.
    GitLab,
    /// API keys of Google Cloud, Maps, Firebase and Gemini.
    Google,
    /// Service account tokens.
    Grafana,
    /// API keys of Groq.
    Groq,
    /// Tokens of Hugging Face.
    HuggingFace,
    /// Personal and service API keys.
    LangSmith,
    /// Personal API keys.
    Linear,
    /// User API keys.
    NewRelic,
    /// Integration tokens.
    Notion,
    /// Tokens of the npm registry.
    Npm,
    /// Personal, project, service account and admin keys.
    OpenAi,
    /// API keys of OpenRouter.
    OpenRouter,
    /// OAuth access tokens of users.
    OpenShift,
    /// API keys of Perplexity.
    Perplexity,
    /// API keys.
    Postman,
    /// Private keys in PEM, OpenSSH and OpenPGP armor, also inside JSON as in Google's service accounts.
    PrivateKey,
    /// Access tokens.
    Pulumi,
    /// Upload tokens of PyPI and its test index.
    PyPi,
    /// API tokens of Replicate.
    Replicate,
    /// API keys of RubyGems.org.
    RubyGems,
    /// API keys of SendGrid.
    SendGrid,
    /// Personal tokens.
    Sentry,
    /// Access tokens and secrets of Shopify applications.
    Shopify,
    /// Bot, user and application tokens.
    Slack,
    /// Access tokens.
    Sourcegraph,
    /// Live mode secret and restricted keys.
    Stripe,
    /// Service and batch tokens of HashiCorp Vault.
    Vault,
    /// API keys of xAI.
    XAi,
}

impl Family {
    /// All families.
    pub const ALL: [Self; 42] = [
        Self::Age,
        Self::Anthropic,
        Self::Atlassian,
        Self::Aws,
        Self::Azure,
        Self::Brevo,
        Self::CratesIo,
        Self::Databricks,
        Self::DigitalOcean,
        Self::Docker,
        Self::Doppler,
        Self::Dynatrace,
        Self::Fly,
        Self::GitHub,
        Self::GitLab,
        Self::Google,
        Self::Grafana,
        Self::Groq,
        Self::HuggingFace,
        Self::LangSmith,
        Self::Linear,
        Self::NewRelic,
        Self::Notion,
        Self::Npm,
        Self::OpenAi,
        Self::OpenRouter,
        Self::OpenShift,
        Self::Perplexity,
        Self::Postman,
        Self::PrivateKey,
        Self::Pulumi,
        Self::PyPi,
        Self::Replicate,
        Self::RubyGems,
        Self::SendGrid,
        Self::Sentry,
        Self::Shopify,
        Self::Slack,
        Self::Sourcegraph,
        Self::Stripe,
        Self::Vault,
        Self::XAi,
    ];

    /// Returns the family with this name in the configuration.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.as_str() == name)
    }

    /// Returns the name in the configuration and in the audit log.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Age => "age",
            Self::Anthropic => "anthropic",
            Self::Atlassian => "atlassian",
            Self::Aws => "aws",
            Self::Azure => "azure",
            Self::Brevo => "brevo",
            Self::CratesIo => "crates-io",
            Self::Databricks => "databricks",
            Self::DigitalOcean => "digitalocean",
            Self::Docker => "docker",
            Self::Doppler => "doppler",
            Self::Dynatrace => "dynatrace",
            Self::Fly => "fly",
            Self::GitHub => "github",
            Self::GitLab => "gitlab",
            Self::Google => "google",
            Self::Grafana => "grafana",
            Self::Groq => "groq",
            Self::HuggingFace => "huggingface",
            Self::LangSmith => "langsmith",
            Self::Linear => "linear",
            Self::NewRelic => "new-relic",
            Self::Notion => "notion",
            Self::Npm => "npm",
            Self::OpenAi => "openai",
            Self::OpenRouter => "openrouter",
            Self::OpenShift => "openshift",
            Self::Perplexity => "perplexity",
            Self::Postman => "postman",
            Self::PrivateKey => "private-key",
            Self::Pulumi => "pulumi",
            Self::PyPi => "pypi",
            Self::Replicate => "replicate",
            Self::RubyGems => "rubygems",
            Self::SendGrid => "sendgrid",
            Self::Sentry => "sentry",
            Self::Shopify => "shopify",
            Self::Slack => "slack",
            Self::Sourcegraph => "sourcegraph",
            Self::Stripe => "stripe",
            Self::Vault => "vault",
            Self::XAi => "xai",
        }
    }
}

/// The enabled families. None are enabled by default.
#[derive(Default)]
pub struct Families {
    wanted: Vec<Family>,
    probes: Option<Probes>,
}

impl PartialEq for Families {
    fn eq(&self, other: &Self) -> bool {
        self.wanted == other.wanted
    }
}

/// The result of a search in a text, or in a piece of a text that continues.
struct FamilyMatch {
    key: Option<(Family, Range<usize>)>,
    /// The start of the first shape that matches up to the end of the piece.
    undecided: Option<usize>,
}

impl Families {
    /// Builds the search for these families.
    pub fn of(list: impl IntoIterator<Item = Family>) -> Self {
        let mut wanted: Vec<Family> = list.into_iter().collect();
        wanted.sort_unstable();
        wanted.dedup();
        let shapes: Vec<&'static Shape> = SHAPES.iter().filter(|shape| wanted.contains(&shape.family)).collect();
        Self { probes: (!shapes.is_empty()).then(|| Probes::new(&shapes)), wanted }
    }

    /// Returns true if there is nothing to search for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.probes.is_none()
    }

    /// Returns a family of which a whole text contains a key.
    #[must_use]
    pub fn find(&self, text: &[u8]) -> Option<Family> {
        self.search(text, 0..text.len(), true).key.map(|(family, _)| family)
    }

    /// Searches for shapes that start within `starts`, with the bytes before as context. `ended` is true if the text
    /// does not continue.
    fn search(&self, text: &[u8], starts: Range<usize>, ended: bool) -> FamilyMatch {
        let mut result = FamilyMatch { key: None, undecided: None };
        let Some(probes) = &self.probes else { return result };
        probes.for_each_prefix(text, &starts, |start, shape| {
            match shape.match_at(text, start, ended) {
                Verdict::Mismatch => {}
                Verdict::Match(end) => result.key = Some((shape.family, start..end)),
                Verdict::Undecided => result.undecided = Some(result.undecided.map_or(start, |first| first.min(start))),
            }
            result.key.is_none()
        });
        result
    }
}

//! Finds keys of well-known families by their shape, even if the proxy does not hold them. Off by default.
//!
//! Precise rather than complete: each shape has a distinctive prefix, an exact length and alphabet, and the
//! issuer's checksum where it is known; see `docs/leak-families.md`. Nothing guesses by entropy, because a
//! request refused for a made-up reason costs more than a key that some other net has to catch.

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
    /// Secret keys of age, the file encryption.
    Age,
    /// Keys of Claude's API, and its tokens of subscriptions.
    Anthropic,
    /// API tokens of Jira and Confluence.
    Atlassian,
    /// Ids of access keys, long-term and temporary.
    Aws,
    /// Account keys of Storage and Cosmos DB behind their name.
    Azure,
    /// API keys of Brevo, which was Sendinblue.
    Brevo,
    /// API tokens of crates.io.
    CratesIo,
    /// Personal access tokens.
    Databricks,
    /// Tokens of people and applications.
    DigitalOcean,
    /// Access tokens of Docker Hub.
    Docker,
    /// Tokens of people.
    Doppler,
    /// Access tokens.
    Dynatrace,
    /// Access tokens of Fly.io.
    Fly,
    /// Tokens of people, applications and installations.
    GitHub,
    /// Tokens of people, projects, deployments, triggers and agents.
    GitLab,
    /// API keys of Google Cloud, Maps, Firebase and Gemini.
    Google,
    /// Tokens of service accounts.
    Grafana,
    /// API keys of Groq.
    Groq,
    /// Tokens of Hugging Face.
    HuggingFace,
    /// API keys of people and services.
    LangSmith,
    /// API keys of people.
    Linear,
    /// API keys of people.
    NewRelic,
    /// Tokens of integrations.
    Notion,
    /// Tokens of the npm registry.
    Npm,
    /// Keys of people, projects, services and administrators.
    OpenAi,
    /// API keys of OpenRouter.
    OpenRouter,
    /// OAuth access tokens of people.
    OpenShift,
    /// API keys of Perplexity.
    Perplexity,
    /// API keys.
    Postman,
    /// Private keys in PEM, OpenSSH's and OpenPGP's armour; also inside JSON, as in Google's service accounts.
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
    /// Tokens of people.
    Sentry,
    /// Access tokens and secrets of Shopify's applications.
    Shopify,
    /// Tokens of bots, people and applications.
    Slack,
    /// Access tokens.
    Sourcegraph,
    /// Secret and restricted keys of live mode.
    Stripe,
    /// Service and batch tokens of HashiCorp Vault.
    Vault,
    /// API keys of xAI.
    XAi,
}

impl Family {
    /// Every family there is.
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

    /// The family that an operator means.
    #[must_use]
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|family| family.as_str() == name)
    }

    /// Its name in the configuration and in the audit log.
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

/// The families that are looked for; none by default.
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

/// The state of a search in a text, or in a piece of one that continues.
struct FamilyMatch {
    key: Option<(Family, Range<usize>)>,
    /// Where the first shape begins that fits up to the end of what has come.
    undecided: Option<usize>,
}

impl Families {
    /// Prepares to look for these.
    pub fn of(list: impl IntoIterator<Item = Family>) -> Self {
        let mut wanted: Vec<Family> = list.into_iter().collect();
        wanted.sort_unstable();
        wanted.dedup();
        let shapes: Vec<&'static Shape> = SHAPES.iter().filter(|shape| wanted.contains(&shape.family)).collect();
        Self { probes: (!shapes.is_empty()).then(|| Probes::new(&shapes)), wanted }
    }

    /// True if there is nothing to look for.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.probes.is_none()
    }

    /// A family that a whole text has a key of.
    #[must_use]
    pub fn find(&self, text: &[u8]) -> Option<Family> {
        self.search(text, 0..text.len(), true).key.map(|(family, _)| family)
    }

    /// Looks at the shapes that begin within `starts`; what stands before helps to judge them. The text is all
    /// there is, or goes on.
    fn search(&self, text: &[u8], starts: Range<usize>, ended: bool) -> FamilyMatch {
        let mut sight = FamilyMatch { key: None, undecided: None };
        let Some(probes) = &self.probes else { return sight };
        probes.for_each_prefix(text, &starts, |start, shape| {
            match shape.match_at(text, start, ended) {
                Verdict::Mismatch => {}
                Verdict::Match(end) => sight.key = Some((shape.family, start..end)),
                Verdict::Undecided => sight.undecided = Some(sight.undecided.map_or(start, |first| first.min(start))),
            }
            sight.key.is_none()
        });
        sight
    }
}

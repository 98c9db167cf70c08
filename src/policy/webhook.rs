//! The registered webhook URLs of a task. The integration `webhook` is built in.

use http::Uri;

use super::address::{self, Cidrs};
use super::reader::Findings;
use crate::model::host::Host;
use crate::model::target::{Scheme, Target};

/// The name of the built-in integration.
pub(super) const NAME: &str = "webhook";
/// The maximum number of URLs per task.
const MAX_URLS: usize = 3;

/// Parses `webhook_urls`: at most three https URLs without private addresses. The addresses of host names are checked
/// when the names are resolved.
pub(super) fn registered(urls: &[String], at: &str, findings: &Findings) -> Vec<Target> {
    if urls.len() > MAX_URLS {
        findings.problem(at, format!("{} URLs are too many", urls.len()), format!("at most {MAX_URLS}"));
    }
    let read = |(i, url): (usize, &String)| {
        let target = url.parse::<Uri>().ok().and_then(|uri| Target::absolute(&uri).ok());
        let Some(target) = target.filter(|target| target.scheme() == Scheme::Https) else {
            // The text does not repeat the URL, because the path of a webhook is its secret.
            findings.problem(format!("{at}[{i}]"), "not an https URL", "\"https://hooks.example.com/…\"");
            return None;
        };
        if let Host::Ip(ip) = target.host()
            && let Err(denied) = address::check(*ip, Cidrs::default())
        {
            let problem = format!("the address is not public: {}", denied.block());
            findings.problem(format!("{at}[{i}]"), problem, "a public host");
        }
        Some(target)
    };
    urls.iter().enumerate().filter_map(read).collect()
}

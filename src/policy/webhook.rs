//! A task's registered webhook URLs, for the built-in integration `webhook`.

use http::Uri;

use super::address::{self, Cidrs};
use super::reader::Findings;
use crate::model::host::Host;
use crate::model::target::{Scheme, Target};

/// The built-in integration.
pub(super) const NAME: &str = "webhook";
/// URLs of one task.
const MOST: usize = 3;

/// Reads `webhook_urls`: https, three at most, no private address. Names are judged once they are resolved.
pub(super) fn registered(urls: &[String], at: &str, findings: &Findings) -> Vec<Target> {
    if urls.len() > MOST {
        findings.problem(at, format!("{} URLs", urls.len()), format!("{MOST} at most"));
    }
    let read = |(i, url): (usize, &String)| {
        let target = url.parse::<Uri>().ok().and_then(|uri| Target::absolute(&uri).ok());
        let Some(target) = target.filter(|target| target.scheme() == Scheme::Https) else {
            // Not repeated: the path of a webhook is its secret.
            findings.problem(format!("{at}[{i}]"), "not an https URL", "\"https://hooks.example.com/…\"");
            return None;
        };
        if let Host::Ip(ip) = target.host()
            && let Err(denied) = address::check(*ip, Cidrs::default())
        {
            let problem = format!("the address is not a public one: {}", denied.block());
            findings.problem(format!("{at}[{i}]"), problem, "a public host");
        }
        Some(target)
    };
    urls.iter().enumerate().filter_map(read).collect()
}

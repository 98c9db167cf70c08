//! Checks delegation between tools: no cycles, a limited depth, and a known primitive at the end.

use super::mapping::quoted;
use super::place::{Findings, Place};
use super::policy::{PRIMITIVES, primitive};
use super::problem::truncate;

/// Maximum number of delegations of a call, including the one to the primitive.
const MAX_DELEGATIONS: usize = 8;
/// Maximum length of a chain in a message, in characters.
const MAX_CHAIN: usize = 400;

/// The target of a tool's calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Target {
    /// The tool that it delegates to.
    pub(super) next: Option<usize>,
    /// The number of delegations.
    pub(super) delegations: usize,
    /// The primitive at the end. `None` for a mock.
    pub(super) primitive: Option<&'static str>,
}

/// A tool, as far as delegation is concerned.
pub(super) struct Delegator<'d> {
    pub(super) place: &'d Place,
    pub(super) name: &'d str,
    /// The tool or primitive that it delegates to.
    pub(super) primitive: Option<&'d str>,
}

/// Returns the target of each tool, in order.
pub(super) fn targets(drafts: &[Delegator<'_>], findings: &Findings) -> Vec<Target> {
    let next: Vec<Option<usize>> = drafts.iter().map(|draft| next(draft, drafts, findings)).collect();
    let mut reported = vec![false; drafts.len()];
    (0..drafts.len()).map(|at| target(at, drafts, &next, &mut reported, findings)).collect()
}

fn next(draft: &Delegator<'_>, drafts: &[Delegator<'_>], findings: &Findings) -> Option<usize> {
    let name = draft.primitive.filter(|name| primitive(name).is_none())?;
    let place = draft.place.key("implementation").key("primitive");
    if name == draft.name {
        findings.problem(&place, "names the tool itself");
        return None;
    }
    let found = drafts.iter().position(|other| other.name == name);
    if found.is_none() {
        let known = PRIMITIVES.map(|(name, _)| name).join(", ");
        findings.problem(&place, format!("{} is neither a tool of this pack nor a primitive: {known}", quoted(name)));
    }
    found
}

fn target(
    start: usize,
    drafts: &[Delegator<'_>],
    next: &[Option<usize>],
    reported: &mut [bool],
    findings: &Findings,
) -> Target {
    let mut chain = vec![start];
    let mut at = start;
    while let Some(to) = next.get(at).copied().flatten() {
        if let Some(begin) = chain.iter().position(|seen| *seen == to) {
            if begin == 0 && !reported.get(start).copied().unwrap_or(true) {
                circle(&chain, drafts, findings);
                chain.iter().filter_map(|seen| reported.get_mut(*seen).map(|flag| *flag = true)).for_each(drop);
            }
            return Target::default();
        }
        chain.push(to);
        at = to;
    }
    let end = drafts.get(at).and_then(|draft| draft.primitive).and_then(primitive).map(|(name, _)| name);
    let jumps = chain.len() - 1 + usize::from(end.is_some());
    if jumps > MAX_DELEGATIONS
        && let Some(draft) = drafts.get(start)
    {
        let chain = names(&chain, drafts, end);
        findings.problem(
            &draft.place.key("implementation").key("primitive"),
            format!("delegates {jumps} times, and {MAX_DELEGATIONS} is the most: {chain}"),
        );
    }
    Target { next: next.get(start).copied().flatten(), delegations: jumps, primitive: end }
}

fn circle(chain: &[usize], drafts: &[Delegator<'_>], findings: &Findings) {
    let Some(first) = chain.first().and_then(|at| drafts.get(*at)) else { return };
    let place = first.place.key("implementation").key("primitive");
    findings.problem(&place, format!("delegates in a circle: {}", names(chain, drafts, Some(first.name))));
}

fn names(chain: &[usize], drafts: &[Delegator<'_>], end: Option<&str>) -> String {
    let tools = chain.iter().filter_map(|at| drafts.get(*at)).map(|draft| draft.name);
    truncate(&tools.chain(end).collect::<Vec<_>>().join(" -> "), MAX_CHAIN)
}

//! The requests that one policy allows and another one refuses, and the reverse: exactly, not by samples.
//!
//! Requests are divided into classes that both policies treat alike: by task, tool, scheme, host, port, method and path. One request
//! of each class is judged by the rules that judge real requests. Paths are divided by an automaton of the patterns; the other
//! parts by the values that the policies name.

mod hosts;
mod limits;
mod paths;
mod permission;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use http::Method;

use self::hosts::HostSpace;
use self::paths::PathSpace;
use self::permission::{Changes, changes};
use super::pattern::PathPattern;
use super::rule::{Integration, NOT_PUBLIC, Policy, Task};
use crate::model::host::Host;
use crate::model::name::TaskName;
use crate::model::target::{Scheme, Target};
use crate::model::tool::{Kind, Tool};

pub use self::hosts::HostClass;
pub use self::paths::Region;
pub use self::permission::Way;

/// A path that servers can read in different ways.
const AMBIGUOUS_PATH: &str = "//";

/// The error of integrations whose path patterns have too many combinations.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the paths of {} have too many combinations to be compared", .0.join(", "))]
pub struct TooComplex(Vec<String>);

/// The differences between two policies.
pub struct Difference {
    /// The differences of each task, without tasks that have none.
    pub tasks: Vec<TaskDifference>,
    /// Settings that allow more now, for all tasks.
    pub opens: Vec<String>,
    /// Settings that allow less now, for all tasks.
    pub closes: Vec<String>,
}

/// The differences of one task.
pub struct TaskDifference {
    /// The task.
    pub task: TaskName,
    /// Whether only one of the policies has it.
    pub presence: Presence,
    /// Requests that are allowed now, or with less conditions.
    pub opens: Vec<Row>,
    /// Requests that are refused now, or allowed with more conditions.
    pub closes: Vec<Row>,
    /// Limits that allow more now.
    pub raised_limits: Vec<String>,
    /// Limits that allow less now.
    pub lowered_limits: Vec<String>,
    space: HostSpace,
}

/// The policies that have a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Presence {
    /// Both.
    Both,
    /// Only the old one.
    Old,
    /// Only the new one.
    New,
}

/// Requests that change in the same way: any combination of these parts.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Row {
    /// The changes, as texts.
    pub changes: Vec<String>,
    /// The hosts.
    pub hosts: BTreeSet<HostClass>,
    /// The schemes, `http` and `https`.
    pub schemes: BTreeSet<&'static str>,
    /// The ports.
    pub ports: Values<u16>,
    /// Tool calls, raw requests or tunnels.
    pub ways: BTreeSet<Way>,
    /// The methods.
    pub methods: Values<MethodClass>,
    /// The paths.
    pub paths: Paths,
}

/// Some values, or all but some.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Values<T: Ord> {
    /// These.
    Only(BTreeSet<T>),
    /// All but these.
    AllBut(BTreeSet<T>),
}

/// Methods that both policies treat alike.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum MethodClass {
    /// One method.
    Exactly(String),
    /// The same method with letters in another case, which approvals apply to as well.
    OtherCase {
        /// The method.
        of: String,
        /// The spellings that are classes of their own.
        except: BTreeSet<String>,
    },
}

impl MethodClass {
    fn contains(&self, method: &str) -> bool {
        match self {
            Self::Exactly(name) => name == method,
            Self::OtherCase { of, except } => method.eq_ignore_ascii_case(of) && !except.contains(method),
        }
    }
}

impl std::fmt::Display for MethodClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exactly(name) => f.write_str(name),
            Self::OtherCase { of, .. } => write!(f, "{of} in another case"),
        }
    }
}

/// The paths of a row.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Paths {
    /// All paths.
    All,
    /// Those in one of the regions that have a canonical form.
    In(Vec<Region>),
    /// Those in one of the regions that have no `;`.
    WithoutParameters(Vec<Region>),
    /// Those in one of the regions that have a `;`.
    WithParameters(Vec<Region>),
    /// Those that servers can read in different ways.
    Ambiguous,
}

impl<T: Ord> Values<T> {
    /// Returns whether a value is one of them. `is` compares it with those that are listed.
    fn contain(&self, is: impl Fn(&T) -> bool) -> bool {
        match self {
            Self::Only(values) => values.iter().any(is),
            Self::AllBut(values) => !values.iter().any(is),
        }
    }
}

impl Difference {
    /// Returns true if the new policy allows something that the old one does not.
    #[must_use]
    pub fn opens(&self) -> bool {
        let by_task = |task: &TaskDifference| !task.opens.is_empty() || !task.raised_limits.is_empty();
        !self.opens.is_empty() || self.tasks.iter().any(by_task)
    }

    /// Returns true if the new policy does not allow something that the old one does.
    #[must_use]
    pub fn closes(&self) -> bool {
        let by_task = |task: &TaskDifference| !task.closes.is_empty() || !task.lowered_limits.is_empty();
        !self.closes.is_empty() || self.tasks.iter().any(by_task)
    }
}

impl TaskDifference {
    /// Returns the hosts below those of a row that are not meant by it.
    #[must_use]
    pub fn except<'s>(&'s self, row: &'s Row) -> BTreeSet<HostClass> {
        let bases =
            row.hosts.iter().filter_map(|class| if let HostClass::Below(base) = class { Some(base) } else { None });
        bases.flat_map(|base| self.space.within(base)).filter(|class| !row.hosts.contains(class)).collect()
    }

    /// Returns whether a request is one of a row. A path in canonical form is given with `is_canonical`.
    #[must_use]
    pub fn contains(
        &self,
        row: &Row,
        way: Way,
        target: &Target,
        method: &Method,
        (path, is_canonical): (&str, bool),
    ) -> bool {
        let is_within = |regions: &[Region]| is_canonical && regions.iter().any(|region| region.contains(path));
        row.hosts.contains(&self.space.class_of(target.host()))
            && row.schemes.contains(target.scheme().as_str())
            && row.ports.contain(|port| *port == target.port())
            && row.ways.contains(&way)
            && row.methods.contain(|class| class.contains(method.as_str()))
            && match &row.paths {
                Paths::All => true,
                Paths::In(regions) => is_within(regions),
                Paths::WithoutParameters(regions) => is_within(regions) && !path.contains(';'),
                Paths::WithParameters(regions) => is_within(regions) && path.contains(';'),
                Paths::Ambiguous => !is_canonical,
            }
    }
}

/// Compares two policies. `wanted` selects the tasks by name.
///
/// # Errors
/// [`TooComplex`].
pub fn difference(old: &Policy, new: &Policy, wanted: impl Fn(&TaskName) -> bool) -> Result<Difference, TooComplex> {
    let names: BTreeSet<&TaskName> = old.tasks().chain(new.tasks()).map(|task| task.name()).collect();
    let mut tasks = Vec::new();
    for name in names.into_iter().filter(|name| wanted(name)) {
        let found = of_task((old, old.task(name)), (new, new.task(name)), name)?;
        let has_rows = !found.opens.is_empty() || !found.closes.is_empty();
        let has_limits = !found.raised_limits.is_empty() || !found.lowered_limits.is_empty();
        if has_rows || has_limits || found.presence != Presence::Both {
            tasks.push(found);
        }
    }
    let Changes { opens, closes } = limits::of_all(old, new);
    Ok(Difference { tasks, opens, closes })
}

/// A policy, and a task of it if it has the task.
type Side<'p> = (&'p Policy, Option<&'p Arc<Task>>);

fn of_task(old: Side<'_>, new: Side<'_>, name: &TaskName) -> Result<TaskDifference, TooComplex> {
    let presence = match (old.1, new.1) {
        (Some(_), None) => Presence::Old,
        (None, Some(_)) => Presence::New,
        _ => Presence::Both,
    };
    let mut limits = old.1.zip(new.1).map(|(old, new)| limits::of_task(old, new)).unwrap_or_default();
    let commands = |side: Side<'_>| side.1.and_then(|task| task.commands());
    limits::of_commands(commands(old), commands(new), &mut limits);
    let mut comparison = Comparison { old, new, spaces: HashMap::new(), opens: Vec::new(), closes: Vec::new() };
    let space = comparison.hosts();
    for (class, host) in space.classes() {
        comparison.compare_host(&class, &host)?;
    }
    Ok(TaskDifference {
        task: name.clone(),
        presence,
        opens: merged(comparison.opens),
        closes: merged(comparison.closes),
        raised_limits: limits.opens,
        lowered_limits: limits.closes,
        space,
    })
}

/// The comparison of one task.
struct Comparison<'p> {
    old: Side<'p>,
    new: Side<'p>,
    /// The paths that integrations distinguish, by their names.
    spaces: HashMap<Vec<Vec<String>>, PathSpace>,
    opens: Vec<Row>,
    closes: Vec<Row>,
}

/// The values of a part of a request that are named, and one that is not.
struct Classes<T> {
    named: BTreeSet<T>,
    other: T,
}

impl<T: Ord + Clone> Classes<T> {
    fn iter(&self) -> impl Iterator<Item = (Values<T>, &T)> {
        let named = self.named.iter().map(|value| (Values::Only(BTreeSet::from([value.clone()])), value));
        named.chain([(Values::AllBut(self.named.clone()), &self.other)])
    }
}

impl Comparison<'_> {
    fn tasks(&self) -> impl Iterator<Item = &Arc<Task>> {
        self.old.1.into_iter().chain(self.new.1)
    }

    fn integrations(&self) -> impl Iterator<Item = &Arc<Integration>> {
        self.tasks().flat_map(|task| &task.integrations)
    }

    /// Returns the classes of hosts.
    fn hosts(&self) -> HostSpace {
        let mut space = HostSpace::default();
        for task in self.tasks() {
            task.denied.iter().for_each(|pattern| space.add_pattern(pattern));
            task.webhooks().for_each(|target| space.add_host(target.host()));
            for rule in &task.integrations {
                rule.allowed.iter().chain(&rule.denied).for_each(|pattern| space.add_pattern(pattern));
            }
            for credential in task.credentials().iter() {
                credential.hosts().for_each(|host| space.add_host(host));
            }
            if task.observe || task.integrations.iter().any(|rule| rule.any_public_host) {
                NOT_PUBLIC.iter().for_each(|name| space.add_name_and_below(name));
            }
        }
        space
    }

    /// Returns the integrations that could allow requests to a host.
    fn rules_for(&self, host: &Host) -> Vec<&Arc<Integration>> {
        let could =
            |rule: &&Arc<Integration>| rule.any_public_host || rule.allowed.iter().any(|pattern| pattern.matches(host));
        self.integrations().filter(could).collect()
    }

    fn ports(&self, host: &Host, rules: &[&Arc<Integration>]) -> Classes<u16> {
        let webhooks = self.tasks().flat_map(|task| task.webhooks()).filter(|target| target.host() == host);
        let bound = self.tasks().flat_map(|task| task.credentials().iter()).flat_map(|credential| &credential.bound);
        let bound = bound.filter(|bound| bound.host == *host).filter_map(|bound| bound.port);
        let named: BTreeSet<u16> = rules
            .iter()
            .flat_map(|rule| rule.ports.iter().copied())
            .chain(webhooks.map(Target::port))
            .chain(bound)
            // `observe` allows this one only.
            .chain([443])
            .collect();
        let other = (1..=u16::MAX).rev().find(|port| !named.contains(port)).unwrap_or(u16::MAX);
        Classes { named, other }
    }

    fn methods(&self, rules: &[&Arc<Integration>]) -> Classes<MethodClass> {
        let listed = rules.iter().flat_map(|rule| rule.methods.iter().flatten());
        let approved = || rules.iter().flat_map(|rule| rule.approval.iter().flat_map(|approval| approval.methods()));
        let mut named: BTreeSet<String> = listed.chain(approved()).map(ToString::to_string).collect();
        if self.tasks().any(|task| task.tools().iter().any(|tool| !tool.admits_any_method())) {
            named.extend(["GET", "POST", "PUT", "DELETE"].map(str::to_owned));
        }
        // Never forwarded.
        named.retain(|method| !matches!(method.as_str(), "CONNECT" | "TRACE"));
        let spellings = |of: &str| named.iter().filter(|name| name.eq_ignore_ascii_case(of)).cloned().collect();
        let other_cases: BTreeSet<String> = approved().map(|method| method.as_str().to_ascii_uppercase()).collect();
        let other_cases = other_cases.into_iter().map(|of| MethodClass::OtherCase { except: spellings(&of), of });
        let other = (0_u64..).map(|n| format!("X{n}")).find(|name| spellings(name).is_empty()).unwrap_or_default();
        let other_cases: Vec<_> = other_cases.collect();
        let named = named.into_iter().map(MethodClass::Exactly).chain(other_cases).collect();
        Classes { named, other: MethodClass::Exactly(other) }
    }

    fn compare_host(&mut self, class: &HostClass, host: &Host) -> Result<(), TooComplex> {
        let rules = self.rules_for(host);
        let is_webhook = self.tasks().any(|task| task.webhooks().any(|target| target.host() == host));
        if rules.is_empty() && !is_webhook && !self.tasks().any(|task| task.observe) {
            return Ok(());
        }
        let (ports, methods) = (self.ports(host, &rules), self.methods(&rules));
        for scheme in [Scheme::Https, Scheme::Http] {
            for (port_class, port) in ports.iter() {
                let Ok(target) = Target::from_authority(scheme, &format!("{host}:{port}")) else { continue };
                // A request includes the look-up and the certificate that a probe has.
                let (opened, closed) = (self.opens.len(), self.closes.len());
                for way in Way::all() {
                    let methods: Vec<_> = match way {
                        Way::Tunnel | Way::Probe => vec![(Values::AllBut(BTreeSet::new()), Some(Method::CONNECT))],
                        _ => methods.iter().map(|(class, method)| (class, example(method))).collect(),
                    };
                    for (method_class, method) in methods {
                        let Some(method) = method else { continue };
                        let row = |changes: Vec<String>, paths| Row {
                            changes,
                            hosts: BTreeSet::from([class.clone()]),
                            schemes: BTreeSet::from([scheme.as_str()]),
                            ports: port_class.clone(),
                            ways: BTreeSet::from([way]),
                            methods: method_class.clone(),
                            paths,
                        };
                        for (Changes { mut opens, mut closes }, paths) in self.compare_paths(way, &method, &target)? {
                            if way == Way::Probe && self.opens.len() > opened {
                                opens.clear();
                            }
                            if way == Way::Probe && self.closes.len() > closed {
                                closes.clear();
                            }
                            if !opens.is_empty() {
                                self.opens.push(row(opens, paths.clone()));
                            }
                            if !closes.is_empty() {
                                self.closes.push(row(closes, paths));
                            }
                        }
                    }
                }
            }
        }
        Ok(())
    }

    /// Compares the requests with one method to one destination, by their paths.
    fn compare_paths(
        &mut self,
        way: Way,
        method: &Method,
        target: &Target,
    ) -> Result<Vec<(Changes, Paths)>, TooComplex> {
        let (old, new) = (self.old, self.new);
        let judge = move |path: &str, is_ambiguous: bool| {
            let of = |(policy, task): Side<'_>| {
                permission::request(policy, task?, (way, method), target, (path, is_ambiguous))
            };
            changes(of(old).as_ref(), of(new).as_ref())
        };
        let with_paths = |(_, task): Side<'_>| -> Vec<Arc<Integration>> {
            let named = task.map(|task| task.for_host(target.host())).unwrap_or_default();
            named.into_iter().filter(|rule| rule.paths.is_some() && rule.ports.contains(&target.port())).collect()
        };
        let sides = [with_paths(old), with_paths(new)];
        let has_paths = sides.iter().any(|side| !side.is_empty());
        if way.kind().is_none() || way.kind() == Some(Kind::Tool(Tool::Webhook)) || !has_paths {
            let changes = judge("/", false);
            return Ok(if changes == Changes::default() { Vec::new() } else { vec![(changes, Paths::All)] });
        }
        let names: Vec<Vec<String>> =
            sides.iter().map(|side| side.iter().map(|rule| rule.name.clone()).collect()).collect();
        if !self.spaces.contains_key(&names) {
            let patterns: Vec<&PathPattern> =
                sides.iter().flatten().flat_map(|rule| rule.paths.iter().flatten()).collect();
            let space = PathSpace::new(&patterns).map_err(|_| TooComplex(names.concat()))?;
            self.spaces.insert(names.clone(), space);
        }
        let Some(space) = self.spaces.get(&names) else { return Ok(Vec::new()) };
        let classes =
            |is_ambiguous| -> Vec<Changes> { space.witnesses().iter().map(|path| judge(path, is_ambiguous)).collect() };
        let (plain, with_parameters) = (classes(false), classes(true));
        let is_different = |(changes, _): &(Changes, Vec<Region>)| *changes != Changes::default();
        let regions = |classes: &[Changes]| space.regions(classes).into_iter().filter(is_different);
        let ambiguous = judge(AMBIGUOUS_PATH, false);
        let mut out: Vec<(Changes, Paths)> = if plain == with_parameters {
            regions(&plain).map(|(changes, regions)| (changes, Paths::In(regions))).collect()
        } else {
            let with = regions(&with_parameters).map(|(changes, regions)| (changes, Paths::WithParameters(regions)));
            let without = regions(&plain).map(|(changes, regions)| (changes, Paths::WithoutParameters(regions)));
            without.chain(with).collect()
        };
        if ambiguous != Changes::default() {
            let is_all = |(changes, paths): &&mut (Changes, Paths)| {
                *changes == ambiguous && matches!(paths, Paths::In(regions) if regions.iter().all(Region::is_all))
            };
            match out.iter_mut().find(is_all) {
                Some((_, paths)) => *paths = Paths::All,
                None => out.push((ambiguous, Paths::Ambiguous)),
            }
        }
        Ok(out)
    }
}

/// Returns a method of a class. `None` if all spellings are classes of their own.
fn example(class: &MethodClass) -> Option<Method> {
    let text = match class {
        MethodClass::Exactly(name) => Some(name.clone()),
        MethodClass::OtherCase { of, .. } => spellings(of).find(|spelling| class.contains(spelling)),
    };
    Method::from_bytes(text?.as_bytes()).ok()
}

/// Returns the spellings of a method in upper and lower case.
fn spellings(method: &str) -> impl Iterator<Item = String> {
    // One of so many is no class of its own, because few are listed.
    let most = 1_u64.checked_shl(u32::try_from(method.len()).unwrap_or(u32::MAX)).unwrap_or(u64::MAX).min(4_096);
    let lower = method.to_ascii_lowercase();
    (0..most).map(move |bits| {
        let spelled = |(at, letter): (usize, char)| {
            let is_upper = u32::try_from(at).ok().and_then(|at| bits.checked_shr(at)).is_some_and(|bits| bits & 1 == 1);
            if is_upper { letter.to_ascii_uppercase() } else { letter }
        };
        lower.chars().enumerate().map(spelled).collect()
    })
}

/// Joins rows that differ in one part only.
fn merged(rows: Vec<Row>) -> Vec<Row> {
    let rows = join(
        rows,
        |row| std::mem::replace(&mut row.methods, Values::Only(BTreeSet::new())),
        |row, methods| {
            row.methods = union(methods);
        },
    );
    let rows = join(
        rows,
        |row| std::mem::replace(&mut row.ports, Values::Only(BTreeSet::new())),
        |row, ports| {
            row.ports = union(ports);
        },
    );
    let rows = join(
        rows,
        |row| std::mem::take(&mut row.schemes),
        |row, schemes| {
            row.schemes = schemes.into_iter().flatten().collect();
        },
    );
    let rows =
        join(rows, |row| std::mem::take(&mut row.ways), |row, ways| row.ways = ways.into_iter().flatten().collect());
    join(rows, |row| std::mem::take(&mut row.hosts), |row, hosts| row.hosts = hosts.into_iter().flatten().collect())
}

/// Joins rows that are equal without the part that `take` takes out. `put` puts all of these parts back.
fn join<P>(rows: Vec<Row>, take: impl Fn(&mut Row) -> P, put: impl Fn(&mut Row, Vec<P>)) -> Vec<Row> {
    let mut joined: BTreeMap<Row, Vec<P>> = BTreeMap::new();
    for mut row in rows {
        let part = take(&mut row);
        joined.entry(row).or_default().push(part);
    }
    let put_back = |(mut row, parts): (Row, Vec<P>)| {
        put(&mut row, parts);
        row
    };
    joined.into_iter().map(put_back).collect()
}

fn union<T: Ord + Clone>(parts: Vec<Values<T>>) -> Values<T> {
    let mut only = BTreeSet::new();
    let mut all_but: Option<BTreeSet<T>> = None;
    for part in parts {
        match part {
            Values::Only(values) => only.extend(values),
            Values::AllBut(values) => {
                all_but = Some(match all_but {
                    Some(known) => known.intersection(&values).cloned().collect(),
                    None => values,
                });
            }
        }
    }
    match all_but {
        Some(except) => Values::AllBut(except.difference(&only).cloned().collect()),
        None => Values::Only(only),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::compile::tests::{policy, try_compile};
    use super::super::path;
    use super::super::rule::AccessKind;
    use super::*;

    /// Returns the rows as texts: the changes, the ways, methods, schemes, hosts, ports and paths.
    fn opened(old: &str, new: &str) -> Vec<String> {
        let difference = difference(&policy(old), &policy(new), |_| true).unwrap();
        let rows = difference.tasks.iter().flat_map(|task| task.opens.iter().map(move |row| text(task, row)));
        let limits = difference.tasks.iter().flat_map(|task| task.raised_limits.clone());
        rows.chain(limits).chain(difference.opens).collect()
    }

    fn text(task: &TaskDifference, row: &Row) -> String {
        let listed = |items: Vec<String>| items.join(",");
        let methods = match &row.methods {
            Values::Only(set) => listed(set.iter().map(ToString::to_string).collect()),
            Values::AllBut(set) => format!("!{}", listed(set.iter().map(ToString::to_string).collect())),
        };
        let ports = match &row.ports {
            Values::Only(set) => listed(set.iter().map(ToString::to_string).collect()),
            Values::AllBut(set) => format!("!{}", listed(set.iter().map(ToString::to_string).collect())),
        };
        let except = task.except(row);
        let except = if except.is_empty() {
            String::new()
        } else {
            format!(" except {}", listed(except.iter().map(ToString::to_string).collect()))
        };
        let regions = |regions: &[Region]| listed(regions.iter().map(ToString::to_string).collect());
        let paths = match &row.paths {
            Paths::All => "all".to_owned(),
            Paths::In(found) => regions(found),
            Paths::WithoutParameters(found) => format!("{} without ;", regions(found)),
            Paths::WithParameters(found) => format!("{} with ;", regions(found)),
            Paths::Ambiguous => "ambiguous".to_owned(),
        };
        format!(
            "{}: {} {methods} {} {}{except} {ports} {paths}",
            row.changes.join(" and "),
            listed(row.ways.iter().map(ToString::to_string).collect()),
            listed(row.schemes.iter().map(ToString::to_string).collect()),
            listed(row.hosts.iter().map(ToString::to_string).collect()),
        )
    }

    #[test]
    fn openings_are_said_as_patterns() {
        let base = "[integrations.a]\nallowed_domains = [\"a.test\"]\nmethods = [\"GET\"]\npaths = [\"/v1/*\"]\n";
        let task = "[tasks.t]\nintegrations = [\"a\"]\n";
        let with = |from: &str, to: &str| format!("{base}{task}").replace(from, to);
        let rows: [(String, &[&str]); 9] = [
            (with("", ""), &[]),
            (with("\"/v1/*\"", "\"/v1/a\""), &[]),
            (with("\"/v1/*\"", "\"/*\""), &["allowed: raw requests GET https a.test 443 /** except /v1/**"]),
            (with("\"GET\"", "\"GET\", \"POST\""), &["allowed: raw requests POST https a.test 443 /v1/**"]),
            (
                with("paths = [\"/v1/*\"]\n", ""),
                &[
                    "allowed: raw requests GET https a.test 443 /** except /v1/**",
                    "allowed: raw requests GET https a.test 443 ambiguous",
                ],
            ),
            (
                with("[\"a.test\"]", "[\"a.test\", \"*.a.test\", \"b.a.test\"]"),
                &["allowed: raw requests GET https b.a.test,*.a.test 443 /v1/**"],
            ),
            (
                with("methods", "trace_context = true\nmethods"),
                &["with the client's trace context: raw requests GET https a.test 443 /v1/**"],
            ),
            (with("methods", "ports = [443, 8443]\nmethods"), &["allowed: raw requests GET https a.test 8443 /v1/**"]),
            (
                with("methods = [\"GET\"]\n", "plain_http = true\n"),
                &[
                    "allowed: raw requests ! http a.test 80,443 /v1/**",
                    "allowed: raw requests ! https a.test 80 /v1/**",
                    "allowed: raw requests !GET https a.test 443 /v1/**",
                ],
            ),
        ];
        for (new, want) in rows {
            let mut found = opened(&with("", ""), &new);
            found.sort();
            assert_eq!(found, want, "{new}");
        }
    }

    #[test]
    fn conditions_credentials_limits_and_settings_are_compared() {
        let base = "[integrations.a]\nallowed_domains = [\"a.test\"]\napproval = \"required\"\n\
                    [credentials.K]\nauth_type = \"bearer\"\nvalue = \"env:K\"\ndomains = [\"a.test\"]\n\
                    [plans.p.raw]\nmax_request_bytes = 10\n[network]\ndeny_cidrs = [\"8.8.8.0/24\"]\n\
                    [leak]\nmax_finds = 3\n[tasks.t]\nintegrations = [\"a\"]\ncredentials = []\nplan = \"p\"\n";
        let rows: [(&str, &str, &[&str]); 9] = [
            ("approval = \"required\"\n", "", &["no approval is needed: raw requests ! https a.test 443 all"]),
            (
                "approval = \"required\"",
                "approval = { methods = [\"POST\"] }",
                &["no approval is needed: raw requests !POST,POST in another case https a.test 443 all"],
            ),
            (
                "credentials = []",
                "credentials = [\"K\"]",
                &["with K as Authorization: Bearer …, by name or placeholder: raw requests ! https a.test 443 all"],
            ),
            (
                "approval = \"required\"",
                "approval = \"required\"\nallow_cidrs = [\"10.0.0.0/8\"]",
                &["also at 10.0.0.0/8: raw requests ! https a.test 443 all"],
            ),
            ("max_request_bytes = 10", "max_request_bytes = 11", &["raw requests: max_request_bytes 11; was 10"]),
            ("max_request_bytes = 10", "max_request_bytes = 9", &[]),
            (
                "deny_cidrs = [\"8.8.8.0/24\"]",
                "deny_cidrs = [\"8.8.8.0/25\"]",
                &["network.deny_cidrs without 8.8.8.0/24"],
            ),
            ("max_finds = 3", "max_finds = 4", &["leak.max_finds = 4; was 3"]),
            (
                "approval = \"required\"",
                "mode = \"opaque\"",
                &[
                    "allowed: tunnels without inspection ! https a.test 443 all",
                    "no approval is needed: raw requests ! https a.test 443 all",
                ],
            ),
        ];
        for (from, to, want) in rows {
            let mut found = opened(base, &base.replace(from, to));
            found.sort();
            assert_eq!(found, want, "{to}");
        }
        assert_eq!(opened(base, ""), ["network.deny_cidrs without 8.8.8.0/24"]);
        assert_eq!(opened("", base), ["allowed, after an approval: raw requests ! https a.test 443 all"]);
    }

    /// A credential opens what it brings with it, and a signature what it no longer covers.
    #[test]
    fn credentials_beside_others_and_signatures_are_compared() {
        let base = "[integrations.a]\nallowed_domains = [\"a.test\"]\nrequire_credential = \"B\"\n\
                    [credentials.A]\nauth_type = \"header\"\nauth_header_name = \"X-A\"\nvalue = \"env:K\"\ndomains = [\"a.test\"]\n\
                    [credentials.B]\nauth_type = \"hmac\"\nvalue = \"env:K\"\ndomains = [\"a.test\"]\n\
                    hmac = { preset = \"stripe\" }\n\
                    [tasks.t]\nintegrations = [\"a\"]\ncredentials = [\"A\", \"B\"]\n";
        let brings = base.replace("name = \"X-A\"\n", "name = \"X-A\"\nwith = [\"B\"]\n");
        let found = opened(base, &brings);
        let want = "with A as x-a: …, by name or placeholder, beside B: raw requests ! https a.test 443 all";
        assert_eq!(found, [want]);
        let less = base.replace("preset = \"stripe\"", "preset = \"stripe\", sign = \"{timestamp}\"");
        let found = opened(base, &less);
        assert_eq!(found.len(), 1);
        assert!(found[0].contains("over \"{timestamp}\", key"), "{found:?}");
    }

    #[test]
    fn commands_are_compared() {
        let of = |commands: &str| format!("[tasks.t]\n{commands}\n");
        let (none, usual, longer) = (of(""), of("commands = \"by_approval\""), of("commands = { expires = \"11m\" }"));
        let allowed = "commands of the dangerous shell, each after an approval that is valid for 600 s";
        assert_eq!(opened(&none, &usual), [allowed]);
        assert_eq!(opened("", &usual), [allowed], "a new task");
        assert_eq!(opened(&usual, &longer), ["the approval of a command is valid for 660 s; was 600 s"]);
        assert_eq!(opened(&usual, &of("commands = { expires = \"10m\" }")), [""; 0]);
        for (old, new) in [(&usual, &none), (&longer, &usual)] {
            assert_eq!(opened(old, new), [""; 0]);
            let difference = difference(&policy(old), &policy(new), |_| true).unwrap();
            assert_eq!(difference.tasks.iter().map(|task| task.lowered_limits.len()).sum::<usize>(), 1, "{new}");
        }
    }

    /// Found by a reader: each of these was missed.
    #[test]
    fn rare_openings_are_found() {
        let rule = |more: &str| {
            format!("[integrations.a]\nallowed_domains = [\"a.test\"]\n{more}[tasks.t]\nintegrations = [\"a\"]\n")
        };
        let approved = |paths: &str| rule(&format!("approval = \"required\"\npaths = {paths}\n"));
        let found = opened(&approved("[\"/a;b\"]"), &approved("[\"/a;b\", \"/*/z\"]"));
        assert_eq!(found, ["allowed, after an approval: raw requests ! https a.test 443 /*/z without ;"]);

        let credential = |more: &str| {
            let credential = "[credentials.K]\nauth_type = \"bearer\"\nvalue = \"env:K\"\ndomains = [\"a.test\"]\n";
            format!("{}credentials = [\"K\"]\n{credential}{more}", rule(""))
        };
        let found = opened(&credential(""), &credential("swap_in = [\"query:q\"]\n"));
        assert!(found.iter().any(|row| row.contains("with K within query:q")), "{found:?}");

        let tools = |more: &str| {
            format!(
                "[integrations.any]\nany_public_host = true\nmethods = [\"POST\"]\n[tasks.t]\ntools = [\"http_get\"]\n{more}"
            )
        };
        let found = opened(&tools(""), &tools("integrations = [\"any\"]\n"));
        assert!(found.iter().any(|row| row.starts_with("allowed: probes ! https any other name")), "{found:?}");

        let plan = |more: &str| format!("{}tools = [\"http_request\"]\nplan = \"p\"\n[plans.p]\n{more}", rule(""));
        let found = opened(&plan("request_timeout = \"30s\"\n"), &plan(""));
        assert_eq!(found, ["tool calls: longest Exeat-Timeout 60000 ms; was 30000 ms"]);
        let deny = |net: &str| format!("[network]\ndeny_cidrs = [{net:?}]\n");
        assert_eq!(opened(&deny("169.254.169.254/32"), &deny("169.254.0.0/16")), Vec::<String>::new());
        let long = format!("/{}b", "a/".repeat(5_000));
        let policies = [rule(""), rule(&format!("paths = [{long:?}]\n"))].map(|text| policy(&text));
        assert!(difference(&policies[0], &policies[1], |_| true).is_err());
    }

    fn one_of(texts: &'static [&'static str]) -> impl Strategy<Value = String> {
        proptest::sample::select(texts).prop_map(str::to_owned)
    }

    fn some_of(texts: &'static [&'static str]) -> impl Strategy<Value = String> {
        let listed = |texts: Vec<&str>| {
            format!("[{}]", texts.iter().map(|text| format!("{text:?}")).collect::<Vec<_>>().join(", "))
        };
        proptest::sample::subsequence(texts, 1..=texts.len()).prop_map(listed)
    }

    fn optional(key: &'static str, value: impl Strategy<Value = String>) -> impl Strategy<Value = String> {
        proptest::option::weighted(0.4, value)
            .prop_map(move |value| value.map_or_else(String::new, |value| format!("{key} = {value}\n")))
    }

    fn integration() -> impl Strategy<Value = String> {
        let paths = || some_of(&["/a/*", "/a/b", "/*/b", "/", "/a/*/c", "/x;y/*"]);
        let methods = || some_of(&["GET", "POST", "BREW"]);
        let approval =
            || one_of(&["\"required\"", "{ methods = [\"POST\"] }", "{ tools = [\"http_get\"], expires = \"20s\" }"]);
        let ports = || optional("ports", one_of(&["[443]", "[443, 8443]", "[80]"]));
        let networks = one_of(&["[\"10.0.0.0/8\"]", "[\"10.0.0.0/9\", \"10.128.0.0/9\"]"]);
        let hosts = some_of(&["a.test", "b.a.test", "*.a.test", "*.c.a.test", "d.test", "10.0.0.1", "intranet"]);
        let more = prop_oneof![
            3 => Just(String::new()),
            1 => Just("plain_http = true\n".to_owned()),
            1 => Just("require_credential = \"K\"\n".to_owned()),
            1 => Just("trace_context = true\n".to_owned()),
        ];
        let inspected = (
            hosts.prop_map(|hosts| format!("allowed_domains = {hosts}\n")),
            ports(),
            optional("methods", methods()),
            optional("paths", paths()),
            optional("approval", approval()),
            optional("allow_cidrs", networks),
            more,
        );
        let inspected = inspected.prop_map(|(a, b, c, d, e, f, g)| [a, b, c, d, e, f, g].concat());
        let opaque =
            (some_of(&["b.a.test", "*.c.a.test", "intranet"]), ports(), optional("ech", one_of(&["\"allow\""])));
        let opaque = opaque.prop_map(|(a, b, c)| format!("mode = \"opaque\"\nallowed_domains = {a}\n{b}{c}"));
        let public = (optional("methods", methods()), optional("paths", paths()), optional("approval", approval()));
        let public = public.prop_map(|(a, b, c)| {
            format!("any_public_host = true\ndenied_domains = [\"d.test\", \"*.e.test\"]\n{a}{b}{c}")
        });
        prop_oneof![5 => inspected, 1 => opaque, 1 => public]
    }

    /// A configuration with three integrations, of which the task has some.
    fn configuration() -> impl Strategy<Value = String> {
        let task = (
            some_of(&["i0", "i1", "i2"]),
            optional("tools", some_of(&["api_call", "http_get", "http_request"])),
            optional("raw", one_of(&["true", "false"])),
            optional("observe", one_of(&["true"])),
            prop_oneof![3 => Just("credentials = [\"K\"]\n".to_owned()), 1 => Just(String::new())],
            optional("denied_domains", one_of(&["[\"*.a.test\"]", "[\"a.test\"]"])),
        );
        (proptest::collection::vec(integration(), 3), task).prop_map(|(rules, (names, a, b, c, d, e))| {
            let rules: String =
                rules.iter().enumerate().map(|(n, rule)| format!("[integrations.i{n}]\n{rule}")).collect();
            let credential =
                "[credentials.K]\nauth_type = \"bearer\"\nvalue = \"env:K\"\ndomains = [\"a.test\", \"d.test:8443\"]\n";
            format!("{rules}{credential}[tasks.t]\nintegrations = {names}\n{a}{b}{c}{d}{e}")
        })
    }

    fn requests() -> impl Strategy<Value = Vec<(Way, String, String, String)>> {
        let way = prop_oneof![3 => Just(Way::Raw), 1 => proptest::sample::select(Way::all().collect::<Vec<_>>())];
        let host = one_of(&[
            "a.test",
            "b.a.test",
            "x.a.test",
            "c.a.test",
            "x.c.a.test",
            "d.test",
            "e.test",
            "x.local",
            "10.0.0.1",
            "192.0.2.1",
            "[2001:db8::7]",
            "intranet",
            "other",
        ]);
        let to = (
            prop_oneof![5 => Just("https"), 1 => Just("http")],
            host,
            prop_oneof![4 => Just("443"), 1 => proptest::sample::select(&["80", "8443", "9000"][..])],
        );
        let to = to.prop_map(|(scheme, host, port)| format!("{scheme}://{host}:{port}"));
        let method = one_of(&["GET", "POST", "post", "PoSt", "PUT", "DELETE", "BREW", "get"]);
        let path = prop_oneof!["(/(a|b|c|q|x;y|b;z)){1,4}/?", one_of(&["/", "/a/../b", "/a//b", "/%61/b", "/a%2fb"]),];
        proptest::collection::vec((way, to, method, path), 60)
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 100, max_global_rejects: 10_000, ..ProptestConfig::default() })]

        /// A request is in a row exactly if the policies decide it differently, and the row says how.
        #[test]
        fn rows_are_the_requests_that_are_decided_differently(
            old in configuration(),
            new in configuration(),
            requests in requests(),
        ) {
            let (Ok(old), Ok(new)) = (try_compile(&old), try_compile(&new)) else { return Err(TestCaseError::reject("invalid")) };
            let (old, new) = (old.policy, new.policy);
            let difference = difference(&old, &new, |_| true).unwrap();
            let name = TaskName::new("t");
            let found = difference.tasks.first();
            for (way, to, method, path) in requests {
                let uri: http::Uri = format!("{to}{path}").parse().unwrap();
                let target = Target::absolute(&uri).unwrap();
                // A probe has no row where a request has one.
                if way == Way::Probe || (way == Way::Tunnel && target.scheme() == Scheme::Http) {
                    continue;
                }
                let method = Method::from_bytes(method.as_bytes()).unwrap();
                let of = |policy: &Policy| permission::request(policy, policy.task(&name)?, (way, &method), &target, (uri.path(), false));
                let want = changes(of(&old).as_ref(), of(&new).as_ref());
                // As `exeat explain` judges it.
                let is_allowed = |policy: &Policy| {
                    let task = policy.task(&name).unwrap();
                    let Some(kind) = way.kind() else {
                        return task.destination(&target, AccessKind::Connect).is_ok_and(|to| to.mode() == super::super::rule::Mode::Opaque);
                    };
                    let to = task.destination(&target, AccessKind::Request(kind));
                    to.is_ok_and(|to| {
                        kind.tool().is_none_or(|tool| tool.admits_method(&method))
                            && task.request(&target, &to, &method, uri.path()).is_ok()
                    })
                };
                prop_assert_eq!(want.opens.iter().any(|text| text.starts_with("allowed")), !is_allowed(&old) && is_allowed(&new));
                prop_assert_eq!(want.closes.iter().any(|text| text.starts_with("refused")), is_allowed(&old) && !is_allowed(&new));
                let canonical = path::canonical(uri.path()).map(std::borrow::Cow::into_owned);
                let given = (canonical.as_deref().unwrap_or_default(), canonical.is_ok());
                let rows = |rows: fn(&TaskDifference) -> &[Row]| -> Vec<Vec<String>> {
                    let containing = |task: &&TaskDifference| -> Vec<Vec<String>> {
                        let is_in = |row: &&Row| task.contains(row, way, &target, &method, given);
                        rows(task).iter().filter(is_in).map(|row| row.changes.clone()).collect()
                    };
                    found.as_ref().map(containing).unwrap_or_default()
                };
                let expected = |changes: &[String]| if changes.is_empty() { vec![] } else { vec![changes.to_vec()] };
                prop_assert_eq!(rows(|task| &task.opens), expected(&want.opens), "{} {} {} {}", way, method, to, path);
                prop_assert_eq!(rows(|task| &task.closes), expected(&want.closes), "{} {} {} {}", way, method, to, path);
            }
        }
    }
}

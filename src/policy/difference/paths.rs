//! The paths that patterns distinguish, as a finite automaton over segments.
//!
//! Each pattern is a chain of segments, so the automaton of several has no cycles but at its ends, where nothing that follows
//! makes a difference. Equal parts are merged from the ends on, which gives the minimal automaton. Paths are in canonical form:
//! they have one segment or more, and only the last one may be empty.

use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};

use super::super::pattern::PathPattern;

/// The most states of an automaton. Patterns of usual policies need a few for each segment.
const MAX_STATES: usize = 50_000;
/// The most sets of patterns that paths can match together.
const MAX_SETS: usize = 5_000;
/// The most segments of a pattern.
const MAX_SEGMENTS: usize = 64;

/// The error of patterns that have too many combinations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct TooManyStates;

/// The number of a set of patterns that a path matches, in [`PathSpace::witnesses`].
type Matched = usize;

/// A state: the same paths from here on match the same patterns.
struct State {
    /// The patterns that a path matches that ends here. Not meant for the first state, where no segment has been read.
    end: Matched,
    /// The patterns of a path with one more, empty segment.
    empty: Matched,
    /// The next state for segments that no pattern names.
    other: usize,
    /// The next states for segments that patterns name.
    named: BTreeMap<String, usize>,
}

/// All paths, divided by the patterns that they match.
pub(super) struct PathSpace {
    states: Vec<State>,
    /// A path for each set of patterns, without `;` if there is one.
    witnesses: Vec<String>,
}

/// The progress of the patterns: how many segments have been read of those that can still match, and those that match whatever
/// follows.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Progress {
    live: BTreeSet<(usize, usize)>,
    below: BTreeSet<usize>,
}

/// A segment that is read.
#[derive(Clone, Copy)]
enum Symbol<'a> {
    Named(&'a str),
    Other,
    Empty,
}

impl Progress {
    fn after(&self, symbol: Symbol<'_>, patterns: &[&PathPattern]) -> Self {
        let mut next = Self { live: BTreeSet::new(), below: self.below.clone() };
        for &(number, read) in &self.live {
            let Some(pattern) = patterns.get(number) else { continue };
            let fits = match (pattern.segment(read), symbol) {
                (Some(None), Symbol::Empty) => false,
                (Some(None), _) => true,
                (Some(Some(text)), Symbol::Named(name)) => text == name,
                (Some(Some(text)), Symbol::Empty) => text.is_empty(),
                (Some(Some(_)), Symbol::Other) => false,
                (None, _) => {
                    if pattern.has_open_end() {
                        next.below.insert(number);
                    }
                    false
                }
            };
            if fits {
                next.live.insert((number, read.saturating_add(1)));
            }
        }
        next
    }

    fn matched(&self, patterns: &[&PathPattern]) -> BTreeSet<usize> {
        let is_read = |&&(number, read): &&(usize, usize)| {
            patterns.get(number).is_some_and(|pattern| pattern.segment(read).is_none() && !pattern.has_open_end())
        };
        let read = self.live.iter().filter(is_read).map(|(number, _)| *number);
        read.chain(self.below.iter().copied()).collect()
    }

    /// Returns the segments that patterns name next.
    fn names<'p>(&self, patterns: &[&'p PathPattern]) -> BTreeSet<&'p str> {
        let next = |&(number, read): &(usize, usize)| patterns.get(number)?.segment(read)?;
        self.live.iter().filter_map(next).filter(|text| !text.is_empty()).collect()
    }
}

impl PathSpace {
    /// # Errors
    /// [`TooManyStates`].
    pub(super) fn new(patterns: &[&PathPattern]) -> Result<Self, TooManyStates> {
        if patterns.iter().any(|pattern| pattern.segment(MAX_SEGMENTS).is_some()) {
            return Err(TooManyStates);
        }
        let mut sets: HashMap<BTreeSet<usize>, Matched> = HashMap::new();
        let mut set = |matched: BTreeSet<usize>| {
            let known = sets.len();
            *sets.entry(matched).or_insert(known)
        };
        let start = Progress { live: (0..patterns.len()).map(|number| (number, 0)).collect(), below: BTreeSet::new() };
        let mut known: HashMap<Progress, usize> = HashMap::from([(start.clone(), 0)]);
        let mut states: Vec<State> = Vec::new();
        let mut waiting = vec![start];
        while let Some(progress) = waiting.get(states.len()).cloned() {
            let mut state = State {
                end: set(progress.matched(patterns)),
                empty: set(progress.after(Symbol::Empty, patterns).matched(patterns)),
                other: 0,
                named: BTreeMap::new(),
            };
            for symbol in progress.names(patterns).into_iter().map(Symbol::Named).chain([Symbol::Other]) {
                let next = progress.after(symbol, patterns);
                let number = known.get(&next).copied().unwrap_or(waiting.len());
                if number == waiting.len() {
                    if number >= MAX_STATES {
                        return Err(TooManyStates);
                    }
                    known.insert(next.clone(), number);
                    waiting.push(next);
                }
                match symbol {
                    Symbol::Named(name) => drop(state.named.insert(name.to_owned(), number)),
                    Symbol::Other | Symbol::Empty => state.other = number,
                }
            }
            states.push(state);
        }
        if sets.len() > MAX_SETS {
            return Err(TooManyStates);
        }
        let witnesses = witnesses(&states, sets.len(), &unnamed(patterns));
        Ok(Self { states, witnesses })
    }

    /// Returns one path for each set of patterns that a path can match.
    pub(super) fn witnesses(&self) -> &[String] {
        &self.witnesses
    }

    /// Divides the paths by a class for each witness, and returns the regions of each class.
    pub(super) fn regions<C: Clone + Ord>(&self, classes: &[C]) -> BTreeMap<C, Vec<Region>> {
        let mut merged =
            Merged { space: self, classes, parts: Vec::new(), known: BTreeMap::new(), of_state: HashMap::new() };
        let Some(start) = merged.start() else { return BTreeMap::new() };
        let all: BTreeSet<&C> = classes.iter().collect();
        let regions = |class: &&C| {
            let [own, _] = merged.below(&start, class, &[]);
            (!own.is_empty()).then(|| ((*class).clone(), own))
        };
        all.iter().filter_map(regions).collect()
    }
}

/// Returns a segment that no pattern names.
fn unnamed(patterns: &[&PathPattern]) -> String {
    let is_named = |text: &str| patterns.iter().any(|pattern| pattern.names(text));
    let candidates = (0_u64..).map(|n| if n == 0 { "x".to_owned() } else { format!("x{n}") });
    candidates.into_iter().find(|text| !is_named(text)).unwrap_or_default()
}

/// Returns a path for each set of patterns. Paths with `;` are refused where an integration has conditions for paths, so one without it
/// is preferred.
fn witnesses(states: &[State], sets: usize, other: &str) -> Vec<String> {
    let mut found: Vec<Option<String>> = vec![None; sets];
    let mut prefixes: Vec<Option<String>> = vec![None; states.len()];
    if let Some(first) = prefixes.first_mut() {
        *first = Some(String::new());
    }
    for with_parameters in [false, true] {
        let mut waiting: VecDeque<usize> =
            (0..states.len()).filter(|at| prefixes.get(*at).is_some_and(Option::is_some)).collect();
        while let Some(at) = waiting.pop_front() {
            let (Some(state), Some(Some(prefix))) = (states.get(at), prefixes.get(at).cloned()) else { continue };
            let named = state.named.iter().filter(|(name, _)| with_parameters || !name.contains(';'));
            let named = named.map(|(name, next)| (name.as_str(), *next));
            for (text, next) in [(other, state.other)].into_iter().chain(named) {
                if let Some(unknown @ None) = prefixes.get_mut(next) {
                    *unknown = Some(format!("{prefix}/{text}"));
                    waiting.push_back(next);
                }
            }
            let is_path = !prefix.is_empty();
            let ends = [(state.end, prefix.clone(), is_path), (state.empty, format!("{prefix}/"), true)];
            for (set, path, _) in ends.into_iter().filter(|(.., is_path)| *is_path) {
                if let Some(unknown @ None) = found.get_mut(set) {
                    *unknown = Some(path);
                }
            }
        }
    }
    // The set of the first state alone, where no path ends, has none.
    found.into_iter().map(Option::unwrap_or_default).collect()
}

/// A part of the minimal automaton.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum Part<C> {
    /// The class is the same whatever follows, and if nothing does.
    Same(C),
    Node {
        end: C,
        empty: C,
        other: usize,
        named: Vec<(String, usize)>,
    },
}

/// The merging of equal parts.
struct Merged<'s, C> {
    space: &'s PathSpace,
    classes: &'s [C],
    parts: Vec<Part<C>>,
    known: BTreeMap<Part<C>, usize>,
    of_state: HashMap<usize, usize>,
}

impl<C: Clone + Ord> Merged<'_, C> {
    /// Returns the part of the first state.
    fn start(&mut self) -> Option<Part<C>> {
        // States are numbered in the order in which they are reached. An order in which each comes behind those that it leads to
        // is found by depth, without recursion.
        let mut order = Vec::new();
        let mut stack = vec![(0, false)];
        let mut seen = BTreeSet::new();
        while let Some((number, is_left)) = stack.pop() {
            if is_left {
                order.push(number);
                continue;
            }
            if !seen.insert(number) {
                continue;
            }
            stack.push((number, true));
            let state = self.space.states.get(number)?;
            let next = state.named.values().copied().chain([state.other]);
            stack.extend(next.filter(|next| *next != number).map(|next| (next, false)));
        }
        for number in order.into_iter().filter(|number| *number != 0) {
            let part = self.part(number)?;
            let known = self.parts.len();
            let at = *self.known.entry(part.clone()).or_insert(known);
            if at == known {
                self.parts.push(part);
            }
            self.of_state.insert(number, at);
        }
        let state = self.space.states.first()?;
        // Without patterns, the first state leads to itself.
        if state.other == 0 {
            return Some(Part::Same(self.classes.get(state.empty)?.clone()));
        }
        let empty = self.classes.get(state.empty)?.clone();
        let (other, named) = self.next(state)?;
        // No path ends at the first state, so its class is that of the paths that follow, if there is one.
        Some(Part::Node { end: empty.clone(), empty, other, named })
    }

    fn part(&self, number: usize) -> Option<Part<C>> {
        let state = self.space.states.get(number)?;
        let end = self.classes.get(state.end)?.clone();
        if state.other == number && state.named.is_empty() {
            return Some(Part::Same(end));
        }
        let empty = self.classes.get(state.empty)?.clone();
        let (other, named) = self.next(state)?;
        let is_same = named.is_empty() && end == empty && self.parts.get(other) == Some(&Part::Same(end.clone()));
        Some(if is_same { Part::Same(end) } else { Part::Node { end, empty, other, named } })
    }

    /// Returns the parts that follow, with those names that lead elsewhere than others.
    fn next(&self, state: &State) -> Option<(usize, Vec<(String, usize)>)> {
        let other = *self.of_state.get(&state.other)?;
        let named = state.named.iter().filter_map(|(name, next)| Some((name.clone(), *self.of_state.get(next)?)));
        Some((other, named.filter(|(_, next)| *next != other).collect()))
    }

    /// Returns the regions of a class behind a beginning, and those of all others.
    fn below(&self, part: &Part<C>, class: &C, before: &[Segment]) -> [Vec<Region>; 2] {
        let region = |segments: Vec<Segment>, tail| Region { segments, tail, except: Vec::new() };
        let all = || vec![region(before.to_vec(), Tail::Below)];
        let (empty, other, named) = match part {
            Part::Same(same) if same == class => return [all(), Vec::new()],
            Part::Same(_) => return [Vec::new(), all()],
            Part::Node { empty, other, named, .. } => (empty, other, named),
        };
        let mut regions = [Vec::new(), Vec::new()];
        let [own, others] = &mut regions;
        if empty == class { &mut *own } else { &mut *others }.push(region(before.to_vec(), Tail::Slash));
        let except = named.iter().map(|(name, _)| name.clone()).collect();
        let named = named.iter().map(|(name, next)| (Segment::Exactly(name.clone()), next));
        for (segment, next) in [(Segment::Other { except }, other)].into_iter().chain(named) {
            let Some(next) = self.parts.get(*next) else { continue };
            let segments = [before, &[segment]].concat();
            let end = match next {
                Part::Same(end) | Part::Node { end, .. } => end,
            };
            if end == class { &mut *own } else { &mut *others }.push(region(segments.clone(), Tail::End));
            let [more_own, more_others] = self.below(next, class, &segments);
            own.extend(more_own);
            others.extend(more_others);
        }
        // The exceptions may be shorter to say.
        let shorter = |these: &Vec<Region>, rest: &Vec<Region>| {
            let is_shorter = rest.len().saturating_add(1) < these.len();
            is_shorter.then(|| vec![Region { segments: before.to_vec(), tail: Tail::Below, except: rest.clone() }])
        };
        if others.is_empty() {
            *own = all();
        } else if own.is_empty() {
            *others = all();
        } else if let Some(short) = shorter(own, others) {
            *own = short;
        } else if let Some(short) = shorter(others, own) {
            *others = short;
        }
        regions
    }
}

/// Paths with the same beginning.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Region {
    segments: Vec<Segment>,
    tail: Tail,
    /// Regions within this one that are not meant.
    except: Vec<Region>,
}

#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Segment {
    Exactly(String),
    /// Any segment that is not empty, except these.
    Other {
        except: Vec<String>,
    },
}

/// The end of the paths of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Tail {
    /// They end behind the segments.
    End,
    /// They end with a slash.
    Slash,
    /// One or more segments follow.
    Below,
}

impl Region {
    /// Returns true if the region is all paths.
    #[must_use]
    pub fn is_all(&self) -> bool {
        self.segments.is_empty() && self.tail == Tail::Below && self.except.is_empty()
    }

    /// Returns whether a path is in the region. It must be in canonical form.
    #[must_use]
    pub fn contains(&self, path: &str) -> bool {
        let mut given = path.split('/').skip(1);
        let is_equal = |(segment, text): (&Segment, &str)| match segment {
            Segment::Exactly(name) => name == text,
            Segment::Other { except } => !text.is_empty() && except.iter().all(|name| name != text),
        };
        let starts = self.segments.iter().all(|segment| given.next().is_some_and(|text| is_equal((segment, text))));
        starts
            && match self.tail {
                Tail::End => given.next().is_none(),
                Tail::Slash => given.next() == Some("") && given.next().is_none(),
                Tail::Below => given.next().is_some(),
            }
            && !self.except.iter().any(|region| region.contains(path))
    }

    /// Returns the text of the region with one of its segments replaced.
    fn text(&self, replaced: Option<(usize, &str)>) -> String {
        let segment = |(at, segment): (usize, &Segment)| match (replaced, segment) {
            (Some((position, name)), _) if position == at => format!("/{name}"),
            (_, Segment::Exactly(name)) => format!("/{name}"),
            (_, Segment::Other { .. }) => "/*".to_owned(),
        };
        let before: String = self.segments.iter().enumerate().map(segment).collect();
        let tail = match self.tail {
            Tail::End => "",
            Tail::Slash => "/",
            Tail::Below => "/**",
        };
        format!("{before}{tail}")
    }
}

/// Writes `/a/*/b/**` and, behind `except`, the paths that are not in it: `*` is one segment, and a final `**` is one or more.
impl std::fmt::Display for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.text(None))?;
        let names = self.segments.iter().enumerate().flat_map(|(at, segment)| match segment {
            Segment::Exactly(_) => Vec::new(),
            Segment::Other { except } => except.iter().map(|name| self.text(Some((at, name)))).collect(),
        });
        let regions = self.except.iter().map(|region| {
            let text = region.to_string();
            // An exception of an exception.
            if text.contains(" except ") { format!("({text})") } else { text }
        });
        let mut is_first = true;
        for exception in names.chain(regions) {
            f.write_str(if is_first { " except " } else { ", " })?;
            f.write_str(&exception)?;
            is_first = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patterns(texts: &[&str]) -> Vec<PathPattern> {
        texts.iter().map(|text| PathPattern::parse(text).unwrap()).collect()
    }

    /// Returns the regions of the paths that the second patterns match and the first do not.
    fn added(old: &[&str], new: &[&str]) -> Vec<String> {
        let (old, new) = (patterns(old), patterns(new));
        let all: Vec<&PathPattern> = old.iter().chain(&new).collect();
        let space = PathSpace::new(&all).unwrap();
        let matches = |patterns: &[PathPattern], path: &str| patterns.iter().any(|pattern| pattern.matches(path));
        let class = |path: &String| !matches(&old, path) && matches(&new, path);
        let classes: Vec<bool> = space.witnesses().iter().map(class).collect();
        let regions = space.regions(&classes).remove(&true).unwrap_or_default();
        regions.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn differences_are_written_as_patterns() {
        let rows: [(&[&str], &[&str], &[&str]); 12] = [
            (&[], &["/*"], &["/**"]),
            (&["/*"], &["/a"], &[]),
            (&["/a"], &["/*"], &["/** except /a"]),
            (&[], &["/a/*"], &["/a/**"]),
            (&["/a/b"], &["/a/*"], &["/a/** except /a/b"]),
            (&["/a/*/b"], &["/a/*/b", "/a/*/c"], &["/a/*/c"]),
            (&["/a/x/b"], &["/a/*/b"], &["/a/*/b except /a/x/b"]),
            (&["/a/*"], &["/a/b", "/a/c/*"], &[]),
            (&[], &["/"], &["/"]),
            (&[], &["/a/"], &["/a/"]),
            (&["/a"], &["/a", "/b"], &["/b"]),
            (&["/*/x/*"], &["/a/*"], &["/a/** except /a/x/**"]),
        ];
        for (old, new, want) in rows {
            assert_eq!(added(old, new), want, "{old:?} {new:?}");
        }
    }

    #[test]
    fn patterns_with_too_many_combinations_are_an_error() {
        // Each `*` before a different name doubles the states.
        let texts: Vec<String> =
            (0..20).map(|n| format!("{}/a{}", "/*".repeat(n), "/*".repeat(19 - n)) + "/b").collect();
        let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
        let all = patterns(&texts);
        let refs: Vec<&PathPattern> = all.iter().collect();
        assert!(matches!(PathSpace::new(&refs), Err(TooManyStates)));
    }

    const PATTERN: &str = "(/(a|b|c|[*])){1,4}/?";

    proptest::proptest! {
        /// Whatever the patterns are, each path is in the regions of its own class, once, and of no other.
        #[test]
        fn regions_divide_the_paths_as_the_patterns_do(
            texts in proptest::collection::vec(PATTERN, 0..6),
            paths in proptest::collection::vec("(/(a|b|c|d|x)){0,6}/?", 1..20),
        ) {
            let texts: Vec<&str> = texts.iter().map(String::as_str).collect();
            let all = patterns(&texts);
            let refs: Vec<&PathPattern> = all.iter().collect();
            let space = PathSpace::new(&refs).unwrap();
            let class = |path: &str| -> Vec<bool> { all.iter().map(|pattern| pattern.matches(path)).collect() };
            let classes: Vec<_> = space.witnesses().iter().map(|witness| class(witness)).collect();
            let regions = space.regions(&classes);
            for path in paths.iter().filter(|path| !path.is_empty()) {
                let own = class(path);
                for (class, regions) in &regions {
                    let containing = regions.iter().filter(|region| region.contains(path)).count();
                    proptest::prop_assert_eq!(containing, usize::from(*class == own), "{} {:?} {:?}", path, texts, regions);
                }
                proptest::prop_assert!(regions.contains_key(&own), "{} {:?}", path, texts);
            }
        }
    }
}

//! Aho–Corasick over all forms of all values, wiped when dropped.
//!
//! Our own, because a ready-made one neither wipes its tables nor tells what stands at the end of a
//! text that has not ended yet, which is what a stream needs to know when it pauses.

use std::collections::HashMap;

use zeroize::{Zeroize, Zeroizing};

use super::encodings::Form;

/// One state: what has been read ends with a prefix of a pattern.
#[derive(Clone, Copy, Default, Zeroize)]
struct Node {
    /// The longest proper suffix that is a prefix as well.
    fail: u32,
    /// The children stand side by side; of a node with [`MANY`], the row where they are found.
    first: u32,
    depth: u32,
    /// The set of patterns that end here, or 0.
    ends: u32,
    /// The longest proper suffix at which a pattern ends, or 0.
    output: u32,
    /// Of whose patterns this is half or more, but not all, and then of whose it is less: a set, or 0.
    half: u32,
    children: u8,
    byte: u8,
    /// The byte of the first child.
    only: u8,
}

/// With more children a node has a row of its own.
const MANY: u8 = 5;

/// Where a text stands. The start is 0.
pub(super) type State = u32;

pub(super) struct Automaton {
    nodes: Zeroizing<Vec<Node>>,
    root: Zeroizing<[State; 256]>,
    /// 256 children for each node with many.
    rows: Zeroizing<Vec<State>>,
    /// Sets of owners; the first is empty.
    sets: Vec<Vec<u32>>,
    longest: usize,
}

/// A pattern, and whose it is.
type Pattern = (Form, Vec<u32>);

impl Automaton {
    /// Builds the automaton. Each form has an owner, by number.
    pub(super) fn new(mut forms: Vec<(Form, u32)>) -> Self {
        forms.retain(|(form, _)| !form.bytes.is_empty());
        forms.sort_by(|(a, _), (b, _)| a.bytes.cmp(&b.bytes));
        let longest = forms.iter().map(|(form, _)| form.bytes.len()).max().unwrap_or_default();
        let most = forms.iter().map(|(form, _)| form.bytes.len()).sum::<usize>().saturating_add(1);
        let mut patterns: Vec<Pattern> = Vec::with_capacity(forms.len());
        for (form, owner) in forms {
            match patterns.last_mut().filter(|(last, _)| last.bytes == form.bytes) {
                Some((last, owners)) => {
                    last.half = last.half.min(form.half);
                    owners.push(owner);
                }
                None => patterns.push((form, vec![owner])),
            }
        }
        // Of the final size from the start: a vector that grows leaves unwiped copies behind.
        let mut this = Self {
            nodes: Zeroizing::new(Vec::with_capacity(most)),
            root: Zeroizing::new([0; 256]),
            rows: Zeroizing::default(),
            sets: vec![Vec::new()],
            longest,
        };
        this.nodes.push(Node::default());
        this.grow(&patterns);
        this.straighten();
        this.widen();
        this
    }

    /// Breadth first over the sorted patterns: each node is a range of them that agree so far.
    fn grow(&mut self, patterns: &[Pattern]) {
        let mut known = HashMap::new();
        let mut ranges = vec![(0, patterns.len())];
        let mut at = 0;
        while let Some((low, high)) = ranges.get(at).copied() {
            let depth = self.node(narrow(at)).depth as usize;
            let mut rest = patterns.get(low..high).unwrap_or_default();
            let mut start = low;
            // The one that ends here sorts first.
            if let Some(((form, _), others)) = rest.split_first()
                && form.bytes.len() == depth
            {
                (rest, start) = (others, start.saturating_add(1));
            }
            let first = self.nodes.len();
            for group in rest.chunk_by(|(a, _), (b, _)| a.bytes.get(depth) == b.bytes.get(depth)) {
                let end = start.saturating_add(group.len());
                self.add_child(at, depth.saturating_add(1), group, &mut known);
                ranges.push((start, end));
                start = end;
            }
            let children = self.nodes.len().saturating_sub(first);
            let only = self.node(narrow(first)).byte;
            if let Some(node) = self.nodes.get_mut(at) {
                node.first = narrow(first);
                node.only = only;
                node.children = u8::try_from(children).unwrap_or(u8::MAX);
            }
            at = at.saturating_add(1);
        }
    }

    fn add_child(&mut self, parent: usize, depth: usize, group: &[Pattern], known: &mut HashMap<Vec<u32>, u32>) {
        let Some((shortest, owners)) = group.first() else { return };
        let byte = shortest.bytes.get(depth.saturating_sub(1)).copied().unwrap_or_default();
        let fail = if parent == 0 { 0 } else { self.step(self.node(narrow(parent)).fail, byte) };
        let ends = if shortest.bytes.len() == depth { self.set(owners.clone(), known) } else { 0 };
        // A whole one is no part.
        let is_part = |form: &Form| form.half <= depth && depth < form.bytes.len();
        let owners_of = |is_among: &dyn Fn(&Form) -> bool| {
            let mut owners: Vec<u32> =
                group.iter().filter(|(form, _)| is_among(form)).flat_map(|(_, owners)| owners.clone()).collect();
            owners.sort_unstable();
            owners.dedup();
            owners
        };
        let mut halves = owners_of(&is_part);
        if !halves.is_empty() {
            // It may become another value, of which it is less than half.
            let others = owners_of(&|form| depth < form.bytes.len());
            let new: Vec<u32> = others.into_iter().filter(|owner| !halves.contains(owner)).collect();
            halves.extend(new);
        }
        let half = self.set(halves, known);
        let behind = self.node(fail);
        let output = if behind.ends > 0 { fail } else { behind.output };
        let id = narrow(self.nodes.len());
        if parent == 0
            && let Some(entry) = self.root.get_mut(usize::from(byte))
        {
            *entry = id;
        }
        self.nodes.push(Node { byte, fail, ends, output, half, depth: narrow(depth), ..Node::default() });
    }

    /// The number of a set of owners.
    fn set(&mut self, owners: Vec<u32>, known: &mut HashMap<Vec<u32>, u32>) -> u32 {
        if owners.is_empty() {
            return 0;
        }
        *known.entry(owners).or_insert_with_key(|owners| {
            self.sets.push(owners.clone());
            narrow(self.sets.len().saturating_sub(1))
        })
    }

    /// Puts the nodes of a pattern beside each other, as they are read. The children of a node stay together.
    fn straighten(&mut self) {
        let mut order = Vec::with_capacity(self.nodes.len());
        let mut places = vec![0; self.nodes.len()];
        let mut next: Vec<_> = std::iter::once(0..1).collect();
        while let Some(children) = next.pop() {
            for node in children.clone() {
                if let Some(place) = places.get_mut(node as usize) {
                    *place = narrow(order.len());
                }
                order.push(node);
            }
            next.extend(children.rev().filter_map(|node| {
                let node = self.node(node);
                (node.children > 0).then(|| node.first..node.first.saturating_add(u32::from(node.children)))
            }));
        }
        let place = |node: u32| places.get(node as usize).copied().unwrap_or_default();
        let mut nodes = Zeroizing::new(Vec::with_capacity(self.nodes.capacity()));
        nodes.extend(order.iter().map(|node| {
            let node = self.node(*node);
            let first = if node.children > 0 { place(node.first) } else { 0 };
            Node { fail: place(node.fail), output: place(node.output), first, ..node }
        }));
        self.nodes = nodes;
        self.root.iter_mut().for_each(|child| *child = place(*child));
    }

    /// Gives rows to the nodes with many children. Only now, because growing goes through the children.
    fn widen(&mut self) {
        let many = self.nodes.iter().filter(|node| node.children >= MANY).count();
        let mut rows = Vec::with_capacity(many.saturating_mul(256));
        for at in 0..self.nodes.len() {
            let node = self.node(narrow(at));
            if node.children < MANY {
                continue;
            }
            let mut row = [0; 256];
            for child in (node.first..).take(node.children.into()) {
                if let Some(place) = row.get_mut(usize::from(self.node(child).byte)) {
                    *place = child;
                }
            }
            if let Some(node) = self.nodes.get_mut(at) {
                (node.first, node.children) = (narrow(rows.len()), u8::MAX);
            }
            rows.extend_from_slice(&row);
        }
        self.rows = Zeroizing::new(rows);
    }

    fn node(&self, state: State) -> Node {
        self.nodes.get(state as usize).copied().unwrap_or_default()
    }

    /// The state after one more byte, which has been folded.
    pub(super) fn step(&self, mut state: State, byte: u8) -> State {
        while state != 0 {
            let Some(node) = self.nodes.get(state as usize) else { return 0 };
            match node.children {
                0 => {}
                u8::MAX => {
                    let at = (node.first as usize).saturating_add(byte.into());
                    if let Some(child) = self.rows.get(at).filter(|child| **child != 0) {
                        return *child;
                    }
                }
                _ if node.only == byte => return node.first,
                1 => {}
                n => {
                    let others = (node.first..).take(n.into()).skip(1);
                    if let Some(child) = others.into_iter().find(|child| self.node(*child).byte == byte) {
                        return child;
                    }
                }
            }
            state = node.fail;
        }
        self.root.get(usize::from(byte)).copied().unwrap_or_default()
    }

    /// How many bytes at the end are the beginning of a pattern, and whether a pattern ends here.
    pub(super) fn look(&self, state: State) -> (usize, bool) {
        if state == 0 {
            return (0, false);
        }
        self.nodes
            .get(state as usize)
            .map_or((0, false), |node| (node.depth as usize, node.ends > 0 || node.output > 0))
    }

    /// The first of those of whose patterns this is half or more, but not all.
    pub(super) fn part(&self, state: State) -> Option<u32> {
        let node = self.nodes.get(state as usize)?;
        self.owners(node.half).first().copied()
    }

    /// The longest state of these that holds: this one, and what it ends with.
    pub(super) fn shortened(&self, mut state: State, holds: impl Fn(usize) -> bool) -> State {
        while state != 0 && !holds(self.look(state).0) {
            state = self.node(state).fail;
        }
        state
    }

    /// The patterns that end here, the longest first: their lengths, and whose they are.
    pub(super) fn ends(&self, mut state: State) -> impl Iterator<Item = (usize, &[u32])> {
        std::iter::from_fn(move || {
            while state != 0 {
                let node = self.node(state);
                state = node.output;
                if node.ends > 0 {
                    return Some((node.depth as usize, self.owners(node.ends)));
                }
            }
            None
        })
    }

    /// How many bytes at the end are half a pattern or more, but not all of it, the most first, and of whose.
    pub(super) fn halves(&self, mut state: State) -> impl Iterator<Item = (usize, &[u32])> {
        std::iter::from_fn(move || {
            while state != 0 {
                let node = self.node(state);
                state = node.fail;
                if node.half > 0 {
                    return Some((node.depth as usize, self.owners(node.half)));
                }
            }
            None
        })
    }

    fn owners(&self, set: u32) -> &[u32] {
        self.sets.get(set as usize).map_or(&[], Vec::as_slice)
    }

    /// Bytes of the longest pattern.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }
}

/// Sizes here are those of a configuration's secrets: far below four thousand million.
pub(super) fn narrow(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn automaton(patterns: &[Vec<u8>]) -> Automaton {
        let form =
            |bytes: &Vec<u8>| Form { bytes: Zeroizing::new(bytes.clone()), half: bytes.len().div_ceil(2), lead: 0 };
        Automaton::new(patterns.iter().enumerate().map(|(i, p)| (form(p), narrow(i))).collect())
    }

    proptest! {
        /// Against the plainest search there is. Few letters make for many children that overlap, many
        /// letters for rows.
        #[test]
        fn agrees_with_looking_at_every_place(
            patterns in prop_oneof![
                proptest::collection::vec(proptest::collection::vec(0_u8..3, 1..7), 1..6),
                proptest::collection::vec(proptest::collection::vec(0_u8..12, 1..4), 1..60),
            ],
            text in proptest::collection::vec(0_u8..12, 0..60),
            narrowed in any::<bool>(),
        ) {
            let text: Vec<u8> = if narrowed { text.iter().map(|byte| byte % 3).collect() } else { text };
            let automaton = automaton(&patterns);
            let mut state = 0;
            for end in 1..=text.len() {
                state = automaton.step(state, text[end - 1]);
                let ending = |pattern: &&Vec<u8>| text[..end].ends_with(pattern);
                let mut want: Vec<_> = patterns.iter().filter(ending).map(Vec::len).collect();
                want.sort_unstable();
                want.dedup();
                want.reverse();
                prop_assert_eq!(automaton.ends(state).map(|(length, _)| length).collect::<Vec<_>>(), &*want);
                prop_assert_eq!(automaton.look(state).1, !want.is_empty());
                for (length, owners) in automaton.ends(state) {
                    let whose = (0..).zip(&patterns).filter(|(_, p)| text[..end].ends_with(p) && p.len() == length);
                    prop_assert_eq!(owners, whose.map(|(owner, _)| owner).collect::<Vec<u32>>());
                }
                let prefixes = |p: &'_ Vec<u8>| (p.len().div_ceil(2)..p.len()).map(|n| p[..n].to_vec()).collect::<Vec<_>>();
                let halves = patterns.iter().flat_map(prefixes);
                let half = halves.filter(|h| text[..end].ends_with(h)).map(|h| h.len()).max();
                prop_assert_eq!(automaton.halves(state).next().map(|(length, _)| length), half);
            }
        }
    }
}

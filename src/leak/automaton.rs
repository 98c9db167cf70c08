//! An Aho–Corasick automaton over all forms of all values. Its memory is wiped when it is dropped.
//!
//! Existing implementations do not wipe their tables. They also do not report the partial match at the end of a text
//! that has not ended, which a stream needs at a pause.

use std::collections::HashMap;

use zeroize::{Zeroize, Zeroizing};

use super::encodings::Form;

/// A state of the automaton: the bytes read so far end with this prefix of a pattern.
#[derive(Clone, Copy, Default, Zeroize)]
struct Node {
    /// The longest proper suffix that is a prefix of a pattern too.
    fail: u32,
    /// The first child; the other children follow it. If there are [`MIN_ROW_CHILDREN`] or more, the start of the
    /// node's row instead.
    first_child: u32,
    depth: u32,
    /// The set of owners of the pattern that ends here, or 0.
    matches: u32,
    /// The longest proper suffix at which a pattern ends, or 0.
    output: u32,
    /// The set of owners of the patterns of which this prefix is a partial match, followed by those of the patterns of
    /// which it is less; or 0 if it is a partial match of none. If it is a partial match only where the value was sent, the
    /// owners have the flag [`ONLY_IF_SENT`].
    partial: u32,
    children: u8,
    byte: u8,
    /// The byte of the first child.
    first_byte: u8,
}

/// The flag of an owner of a partial match that counts only in a response to a request in which the value was sent.
const ONLY_IF_SENT: u32 = 1 << 31;
/// A node with this many children or more has a row of its own.
const MIN_ROW_CHILDREN: u8 = 5;

/// The index of a node. The start state is 0.
pub(super) type State = u32;

pub(super) struct Automaton {
    nodes: Zeroizing<Vec<Node>>,
    root: Zeroizing<[State; 256]>,
    /// 256 children for each node that has a row.
    rows: Zeroizing<Vec<State>>,
    /// Sets of owners. The first one is empty.
    sets: Vec<Vec<u32>>,
    longest: usize,
}

/// A pattern and its owners.
type Pattern = (Form, Vec<u32>);

impl Automaton {
    /// Builds the automaton. The number with each form is its owner.
    pub(super) fn new(mut forms: Vec<(Form, u32)>) -> Self {
        forms.retain(|(form, _)| !form.bytes.is_empty());
        forms.sort_by(|(a, _), (b, _)| a.bytes.cmp(&b.bytes));
        let longest = forms.iter().map(|(form, _)| form.bytes.len()).max().unwrap_or_default();
        let max_nodes = forms.iter().map(|(form, _)| form.bytes.len()).sum::<usize>().saturating_add(1);
        let mut patterns: Vec<Pattern> = Vec::with_capacity(forms.len());
        for (form, owner) in forms {
            match patterns.last_mut().filter(|(last, _)| last.bytes == form.bytes) {
                Some((last, owners)) => {
                    last.min_partial = last.min_partial.min(form.min_partial);
                    last.min_sent_partial = last.min_sent_partial.min(form.min_sent_partial);
                    owners.push(owner);
                }
                None => patterns.push((form, vec![owner])),
            }
        }
        // Allocated in the final size, because a growing vector would leave unwiped copies behind.
        let mut this = Self {
            nodes: Zeroizing::new(Vec::with_capacity(max_nodes)),
            root: Zeroizing::new([0; 256]),
            rows: Zeroizing::default(),
            sets: vec![Vec::new()],
            longest,
        };
        this.nodes.push(Node::default());
        this.build_trie(&patterns);
        this.order_depth_first();
        this.build_rows();
        this
    }

    /// Builds the trie breadth first. Each node is a range of the sorted patterns that share its prefix.
    fn build_trie(&mut self, patterns: &[Pattern]) {
        let mut interned = HashMap::new();
        let mut ranges = vec![(0, patterns.len())];
        let mut at = 0;
        while let Some((low, high)) = ranges.get(at).copied() {
            let depth = self.node(to_u32(at)).depth as usize;
            let mut rest = patterns.get(low..high).unwrap_or_default();
            let mut start = low;
            // A pattern that ends here sorts first.
            if let Some(((form, _), others)) = rest.split_first()
                && form.bytes.len() == depth
            {
                (rest, start) = (others, start.saturating_add(1));
            }
            let first = self.nodes.len();
            for group in rest.chunk_by(|(a, _), (b, _)| a.bytes.get(depth) == b.bytes.get(depth)) {
                let end = start.saturating_add(group.len());
                self.add_child(at, depth.saturating_add(1), group, &mut interned);
                ranges.push((start, end));
                start = end;
            }
            let children = self.nodes.len().saturating_sub(first);
            let first_byte = self.node(to_u32(first)).byte;
            if let Some(node) = self.nodes.get_mut(at) {
                node.first_child = to_u32(first);
                node.first_byte = first_byte;
                node.children = u8::try_from(children).unwrap_or(u8::MAX);
            }
            at = at.saturating_add(1);
        }
    }

    fn add_child(&mut self, parent: usize, depth: usize, group: &[Pattern], interned: &mut HashMap<Vec<u32>, u32>) {
        let Some((shortest, owners)) = group.first() else { return };
        let byte = shortest.bytes.get(depth.saturating_sub(1)).copied().unwrap_or_default();
        let fail = if parent == 0 { 0 } else { self.step(self.node(to_u32(parent)).fail, byte) };
        let matches = if shortest.bytes.len() == depth { self.intern(owners.clone(), interned) } else { 0 };
        // A complete pattern is no partial match.
        let is_partial = |form: &Form| form.min_partial <= depth && depth < form.bytes.len();
        let owners_of = |is_among: &dyn Fn(&Form) -> bool| {
            let mut owners: Vec<u32> =
                group.iter().filter(|(form, _)| is_among(form)).flat_map(|(_, owners)| owners.clone()).collect();
            owners.sort_unstable();
            owners.dedup();
            owners
        };
        let mut partial_owners = owners_of(&is_partial);
        if !partial_owners.is_empty() {
            // The text may continue as another value too, of which this is less than half.
            let others = owners_of(&|form| depth < form.bytes.len());
            let new: Vec<u32> = others.into_iter().filter(|owner| !partial_owners.contains(owner)).collect();
            partial_owners.extend(new);
        } else {
            let if_sent = owners_of(&|form| form.min_sent_partial <= depth && depth < form.bytes.len());
            partial_owners.extend(if_sent.into_iter().map(|owner| owner | ONLY_IF_SENT));
        }
        let partial = self.intern(partial_owners, interned);
        let fail_node = self.node(fail);
        let output = if fail_node.matches > 0 { fail } else { fail_node.output };
        let id = to_u32(self.nodes.len());
        if parent == 0
            && let Some(entry) = self.root.get_mut(usize::from(byte))
        {
            *entry = id;
        }
        self.nodes.push(Node { byte, fail, matches, output, partial, depth: to_u32(depth), ..Node::default() });
    }

    /// Returns the index of a set of owners.
    fn intern(&mut self, owners: Vec<u32>, interned: &mut HashMap<Vec<u32>, u32>) -> u32 {
        if owners.is_empty() {
            return 0;
        }
        *interned.entry(owners).or_insert_with_key(|owners| {
            self.sets.push(owners.clone());
            to_u32(self.sets.len().saturating_sub(1))
        })
    }

    /// Reorders the nodes depth first, so that the nodes of a pattern are close in memory. The children of a node stay
    /// together.
    fn order_depth_first(&mut self) {
        let mut order = Vec::with_capacity(self.nodes.len());
        let mut new_indices = vec![0; self.nodes.len()];
        let mut next: Vec<_> = std::iter::once(0..1).collect();
        while let Some(children) = next.pop() {
            for node in children.clone() {
                if let Some(index) = new_indices.get_mut(node as usize) {
                    *index = to_u32(order.len());
                }
                order.push(node);
            }
            next.extend(children.rev().filter_map(|node| {
                let node = self.node(node);
                (node.children > 0).then(|| node.first_child..node.first_child.saturating_add(u32::from(node.children)))
            }));
        }
        let new_index = |node: u32| new_indices.get(node as usize).copied().unwrap_or_default();
        let mut nodes = Zeroizing::new(Vec::with_capacity(self.nodes.capacity()));
        nodes.extend(order.iter().map(|node| {
            let node = self.node(*node);
            let first_child = if node.children > 0 { new_index(node.first_child) } else { 0 };
            Node { fail: new_index(node.fail), output: new_index(node.output), first_child, ..node }
        }));
        self.nodes = nodes;
        self.root.iter_mut().for_each(|child| *child = new_index(*child));
    }

    /// Builds the rows of the nodes with many children. This is the last step, because the others iterate over the
    /// children.
    fn build_rows(&mut self) {
        let many = self.nodes.iter().filter(|node| node.children >= MIN_ROW_CHILDREN).count();
        let mut rows = Vec::with_capacity(many.saturating_mul(256));
        for at in 0..self.nodes.len() {
            let node = self.node(to_u32(at));
            if node.children < MIN_ROW_CHILDREN {
                continue;
            }
            let mut row = [0; 256];
            for child in (node.first_child..).take(node.children.into()) {
                if let Some(entry) = row.get_mut(usize::from(self.node(child).byte)) {
                    *entry = child;
                }
            }
            if let Some(node) = self.nodes.get_mut(at) {
                (node.first_child, node.children) = (to_u32(rows.len()), u8::MAX);
            }
            rows.extend_from_slice(&row);
        }
        self.rows = Zeroizing::new(rows);
    }

    fn node(&self, state: State) -> Node {
        self.nodes.get(state as usize).copied().unwrap_or_default()
    }

    /// Returns the state after one more folded byte.
    pub(super) fn step(&self, mut state: State, byte: u8) -> State {
        while state != 0 {
            let Some(node) = self.nodes.get(state as usize) else { return 0 };
            match node.children {
                0 => {}
                u8::MAX => {
                    let at = (node.first_child as usize).saturating_add(byte.into());
                    if let Some(child) = self.rows.get(at).filter(|child| **child != 0) {
                        return *child;
                    }
                }
                _ if node.first_byte == byte => return node.first_child,
                1 => {}
                n => {
                    let others = (node.first_child..).take(n.into()).skip(1);
                    if let Some(child) = others.into_iter().find(|child| self.node(*child).byte == byte) {
                        return child;
                    }
                }
            }
            state = node.fail;
        }
        self.root.get(usize::from(byte)).copied().unwrap_or_default()
    }

    /// Returns the length of the matched prefix, and whether a pattern ends here.
    pub(super) fn depth_and_match(&self, state: State) -> (usize, bool) {
        if state == 0 {
            return (0, false);
        }
        self.nodes
            .get(state as usize)
            .map_or((0, false), |node| (node.depth as usize, node.matches > 0 || node.output > 0))
    }

    /// Returns the first owner of which the matched prefix is a partial match that counts everywhere.
    pub(super) fn partial_owner(&self, state: State) -> Option<u32> {
        let node = self.nodes.get(state as usize)?;
        self.owners(node.partial).first().copied().filter(|owner| owner & ONLY_IF_SENT == 0)
    }

    /// Returns the longest among a state and its suffixes with a length that satisfies the predicate.
    pub(super) fn longest_suffix(&self, mut state: State, predicate: impl Fn(usize) -> bool) -> State {
        while state != 0 && !predicate(self.depth_and_match(state).0) {
            state = self.node(state).fail;
        }
        state
    }

    /// Returns the patterns that end here, the longest first: their lengths and owners.
    pub(super) fn matches(&self, mut state: State) -> impl Iterator<Item = (usize, &[u32])> {
        std::iter::from_fn(move || {
            while state != 0 {
                let node = self.node(state);
                state = node.output;
                if node.matches > 0 {
                    return Some((node.depth as usize, self.owners(node.matches)));
                }
            }
            None
        })
    }

    /// Returns the partial matches that end here, the longest first: their lengths and owners, and true for those that
    /// count only where the value was sent.
    pub(super) fn partials(&self, mut state: State) -> impl Iterator<Item = (usize, u32, bool)> {
        let sets = std::iter::from_fn(move || {
            while state != 0 {
                let node = self.node(state);
                state = node.fail;
                if node.partial > 0 {
                    return Some((node.depth as usize, self.owners(node.partial)));
                }
            }
            None
        });
        sets.flat_map(|(length, owners)| {
            owners.iter().map(move |owner| (length, owner & !ONLY_IF_SENT, owner & ONLY_IF_SENT != 0))
        })
    }

    fn owners(&self, set: u32) -> &[u32] {
        self.sets.get(set as usize).map_or(&[], Vec::as_slice)
    }

    /// Returns the length of the longest pattern in bytes.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }
}

/// Converts a size. The sizes here are bounded by the secrets of a configuration, far below 2^32.
pub(super) fn to_u32(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn automaton(patterns: &[Vec<u8>]) -> Automaton {
        let form = |bytes: &Vec<u8>| Form {
            bytes: Zeroizing::new(bytes.clone()),
            min_partial: bytes.len().div_ceil(2),
            min_sent_partial: bytes.len().div_ceil(2),
            prefix_len: 0,
        };
        Automaton::new(patterns.iter().enumerate().map(|(i, p)| (form(p), to_u32(i))).collect())
    }

    proptest! {
        /// Compares with the simplest possible search. Few letters make many overlapping patterns, many letters make
        /// rows.
        #[test]
        fn agrees_with_naive_search(
            patterns in prop_oneof![
                proptest::collection::vec(proptest::collection::vec(0_u8..3, 1..7), 1..6),
                proptest::collection::vec(proptest::collection::vec(0_u8..12, 1..4), 1..60),
            ],
            text in proptest::collection::vec(0_u8..12, 0..60),
            few_letters in any::<bool>(),
        ) {
            let text: Vec<u8> = if few_letters { text.iter().map(|byte| byte % 3).collect() } else { text };
            let automaton = automaton(&patterns);
            let mut state = 0;
            for end in 1..=text.len() {
                state = automaton.step(state, text[end - 1]);
                let ending = |pattern: &&Vec<u8>| text[..end].ends_with(pattern);
                let mut want: Vec<_> = patterns.iter().filter(ending).map(Vec::len).collect();
                want.sort_unstable();
                want.dedup();
                want.reverse();
                prop_assert_eq!(automaton.matches(state).map(|(length, _)| length).collect::<Vec<_>>(), &*want);
                prop_assert_eq!(automaton.depth_and_match(state).1, !want.is_empty());
                for (length, owners) in automaton.matches(state) {
                    let whose = (0..).zip(&patterns).filter(|(_, p)| text[..end].ends_with(p) && p.len() == length);
                    prop_assert_eq!(owners, whose.map(|(owner, _)| owner).collect::<Vec<u32>>());
                }
                let prefixes = |p: &'_ Vec<u8>| (p.len().div_ceil(2)..p.len()).map(|n| p[..n].to_vec()).collect::<Vec<_>>();
                let partial_owners = patterns.iter().flat_map(prefixes);
                let half = partial_owners.filter(|h| text[..end].ends_with(h)).map(|h| h.len()).max();
                prop_assert_eq!(automaton.partials(state).next().map(|(length, ..)| length), half);
            }
        }
    }
}

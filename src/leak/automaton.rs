//! Aho–Corasick over all forms of all values, wiped when dropped.
//!
//! Our own, because a ready-made one neither wipes its tables nor tells what stands at the end of a
//! text that has not ended yet, which is what a stream needs to know when it pauses.

use zeroize::{Zeroize, Zeroizing};

use super::forms::Form;

/// One state: what has been read ends with a prefix of a pattern.
#[derive(Clone, Copy, Default, Zeroize)]
struct Node {
    byte: u8,
    /// The children stand side by side.
    first: u32,
    children: u16,
    /// The longest proper suffix that is a prefix as well.
    fail: u32,
    /// Length of the longest pattern that ends here, or 0.
    ends: u32,
    owner: u32,
    /// How many bytes at the end are half a value or more, or 0.
    half: u32,
    half_owner: u32,
}

/// Where a text stands. The start is 0.
pub(super) type State = u32;

pub(super) struct Automaton {
    nodes: Zeroizing<Vec<Node>>,
    root: Zeroizing<[State; 256]>,
    longest: usize,
}

impl Automaton {
    /// Builds the automaton. Each form has an owner, by number.
    pub(super) fn new(mut forms: Vec<(Form, u32)>) -> Self {
        forms.sort_by(|(a, _), (b, _)| a.bytes.cmp(&b.bytes));
        forms.dedup_by(|(a, _), (b, _)| a.bytes == b.bytes);
        forms.retain(|(form, _)| !form.bytes.is_empty());
        let longest = forms.iter().map(|(form, _)| form.bytes.len()).max().unwrap_or_default();
        let most = forms.iter().map(|(form, _)| form.bytes.len()).sum::<usize>().saturating_add(1);
        // Of the final size from the start: a vector that grows leaves unwiped copies behind.
        let mut this =
            Self { nodes: Zeroizing::new(Vec::with_capacity(most)), root: Zeroizing::new([0; 256]), longest };
        this.nodes.push(Node::default());
        this.grow(&forms);
        this
    }

    /// Breadth first over the sorted forms: each node is a range of them that agree so far.
    fn grow(&mut self, forms: &[(Form, u32)]) {
        let mut ranges = vec![(0, forms.len())];
        let mut depths = vec![0_usize];
        let mut at = 0;
        while let (Some((low, high)), Some(depth)) = (ranges.get(at).copied(), depths.get(at).copied()) {
            let mut rest = forms.get(low..high).unwrap_or_default();
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
                self.add_child(at, depth.saturating_add(1), group);
                ranges.push((start, end));
                depths.push(depth.saturating_add(1));
                start = end;
            }
            let children = self.nodes.len().saturating_sub(first);
            if let Some(node) = self.nodes.get_mut(at) {
                (node.first, node.children) = (narrow(first), u16::try_from(children).unwrap_or(u16::MAX));
            }
            at = at.saturating_add(1);
        }
    }

    fn add_child(&mut self, parent: usize, depth: usize, group: &[(Form, u32)]) {
        let Some((shortest, owner)) = group.first() else { return };
        let byte = shortest.bytes.get(depth.saturating_sub(1)).copied().unwrap_or_default();
        let fail = if parent == 0 { 0 } else { self.step(self.node(narrow(parent)).fail, byte) };
        let behind = self.node(fail);
        let (ends, owner) =
            if shortest.bytes.len() == depth { (narrow(depth), *owner) } else { (behind.ends, behind.owner) };
        let begun = group.iter().find(|(form, _)| form.half <= depth);
        let (half, half_owner) = begun.map_or((behind.half, behind.half_owner), |(_, owner)| (narrow(depth), *owner));
        let id = narrow(self.nodes.len());
        if parent == 0
            && let Some(entry) = self.root.get_mut(usize::from(byte))
        {
            *entry = id;
        }
        self.nodes.push(Node { byte, fail, ends, owner, half, half_owner, ..Node::default() });
    }

    fn node(&self, state: State) -> Node {
        self.nodes.get(state as usize).copied().unwrap_or_default()
    }

    /// The state after one more byte.
    pub(super) fn step(&self, mut state: State, byte: u8) -> State {
        while state != 0 {
            let node = self.node(state);
            let first = node.first as usize;
            let children = self.nodes.get(first..first.saturating_add(node.children.into())).unwrap_or_default();
            if let Some(at) = children.iter().position(|child| child.byte == byte) {
                return narrow(first.saturating_add(at));
            }
            state = node.fail;
        }
        self.root.get(usize::from(byte)).copied().unwrap_or_default()
    }

    /// The longest pattern that ends here, and whose it is.
    pub(super) fn ends(&self, state: State) -> Option<(usize, u32)> {
        // Most bytes of most texts begin nothing.
        if state == 0 {
            return None;
        }
        let node = self.node(state);
        (node.ends > 0).then_some((node.ends as usize, node.owner))
    }

    /// How many bytes at the end are half a value or more, and whose.
    pub(super) fn half(&self, state: State) -> Option<(usize, u32)> {
        let node = self.node(state);
        (node.half > 0).then_some((node.half as usize, node.half_owner))
    }

    /// Bytes of the longest pattern.
    pub(super) fn longest(&self) -> usize {
        self.longest
    }
}

/// Sizes here are those of a configuration's secrets: far below four thousand million.
fn narrow(n: usize) -> u32 {
    u32::try_from(n).unwrap_or(u32::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn automaton(patterns: &[Vec<u8>]) -> Automaton {
        let form = |bytes: &Vec<u8>| Form { bytes: Zeroizing::new(bytes.clone()), half: bytes.len().div_ceil(2) };
        Automaton::new(patterns.iter().enumerate().map(|(i, p)| (form(p), narrow(i))).collect())
    }

    proptest! {
        /// Against the plainest search there is.
        #[test]
        fn agrees_with_looking_at_every_place(
            patterns in proptest::collection::vec(proptest::collection::vec(0_u8..3, 1..7), 1..6),
            text in proptest::collection::vec(0_u8..3, 0..60),
        ) {
            let automaton = automaton(&patterns);
            let mut state = 0;
            for end in 1..=text.len() {
                state = automaton.step(state, text[end - 1]);
                let longest = patterns.iter().filter(|p| text[..end].ends_with(p)).map(Vec::len).max();
                prop_assert_eq!(automaton.ends(state).map(|(length, _)| length), longest);
                let halves = patterns.iter().flat_map(|p| (p.len().div_ceil(2)..=p.len()).map(move |n| &p[..n]));
                let half = halves.filter(|h| text[..end].ends_with(h)).map(<[u8]>::len).max().unwrap_or(0);
                prop_assert_eq!(automaton.half(state).map_or(0, |(length, _)| length), half);
            }
        }
    }
}

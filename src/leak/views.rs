//! The views of a stream: the raw bytes, and the same bytes with escapes decoded once and twice.
//!
//! Recipients decode escapes differently. One decodes percent-encoding only, another decodes percent-encoding and then
//! JSON strings. A value has to be found whatever a recipient decodes, so the stream is searched in several views. They
//! form a tree. Its root is the raw view. Each view has derived views ([`DerivedViews`]): one in which all families of
//! escapes are decoded, and one for each single family. The tree is [`MAX_DEPTH`] levels deep below the root.
//!
//! Most streams have few escapes, so derived views are maintained lazily:
//!
//! * Without escapes, all views are equal and only the raw view is searched.
//! * At the first escape a derived view *diverges*: it forks the search state of its parent and from then on receives
//!   the parent's bytes with the escapes decoded.
//! * Once all bytes that can still belong to a match follow the last decoded escape, the view would find the same
//!   matches as its parent. It *converges* and is dropped until the next escape.
//! * The single-family views exist only from the second family on. Before that, they would equal the view in which all
//!   families are decoded. Once no match can reach back to the escapes of all families but one, they are dropped again.
//!
//! Every byte of a view carries its position in the stream, so a match in any view covers a range of the stream.

use super::automaton::Automaton;
use super::index::Index;
use super::matches::{Matches, Partial};
use super::unescape::{DecodedTo, EscapeFamilies, MAX_ESCAPE};
use super::unescaped_view::UnescapedView;
use super::view::{Buffer, SearchMode, Source};

/// All views of one stream.
#[derive(Clone, Default)]
pub(super) struct ViewTree {
    raw: Buffer,
    derived: DerivedViews,
}

/// The number of times that escapes are decoded.
const MAX_DEPTH: usize = 2;

impl ViewTree {
    /// Resets to the start of another stream and keeps the allocated memory.
    pub(super) fn clear(&mut self) {
        self.raw.clear();
        self.derived.clear();
    }

    /// Searches the next bytes of the stream, which start at position `from`, and adds the matches that end in them.
    pub(super) fn feed(&mut self, index: &Index, piece: &[u8], from: u64, matches: &mut Matches) {
        self.raw.push(piece, from);
        self.derived.feed(&self.raw, index, (MAX_DEPTH, SearchMode::Filter), matches);
        self.raw.search(index, SearchMode::Filter, matches);
        self.raw.advance();
    }

    /// Returns true if all views are equal.
    pub(super) fn is_plain(&self) -> bool {
        !self.derived.is_diverged()
    }

    /// Searches the last bytes too, although they are too few for the prefilter.
    pub(super) fn flush(&mut self, index: &Index, matches: &mut Matches) {
        self.search_rest(index, SearchMode::Pause, matches);
    }

    fn search_rest(&mut self, index: &Index, mode: SearchMode, matches: &mut Matches) {
        self.derived.feed(&self.raw, index, (MAX_DEPTH, mode), matches);
        self.raw.search(index, mode, matches);
        self.raw.advance();
    }

    /// Ends the stream. An escape that is still incomplete may be complete at the end of a text.
    pub(super) fn end(&mut self, index: &Index, matches: &mut Matches) {
        self.search_rest(index, SearchMode::End, matches);
        self.derived.end(index, MAX_DEPTH, matches);
    }

    /// Returns the position of the first byte that has not been searched in every view.
    pub(super) fn first_unsearched(&self) -> Option<u64> {
        let mut first = self.raw.first_unsearched();
        self.derived.for_each(&mut |view| {
            if view.is_diverged() {
                first = first.into_iter().chain(view.buffer.first_unsearched()).min();
            }
        });
        first
    }

    /// Returns true if some view holds the start of an incomplete escape.
    pub(super) fn has_pending_escape(&self) -> bool {
        self.derived.any(&|view| view.has_pending_escape())
    }

    /// Returns the partial matches at the end that start before a position.
    pub(super) fn partials(&self, index: &Index, before: u64) -> Vec<Partial> {
        let mut partials = self.raw.view.partials(&index.patterns.automaton, before);
        self.derived.for_each(&mut |view| {
            if view.is_diverged() {
                partials.extend(view.buffer.view.partials(&index.patterns.automaton, before));
            }
        });
        partials
    }
}

/// The views derived from one parent view: one with all families of escapes decoded and, if the stream has several
/// families, one for each of them. With all families decoded, a sequence that only looks like an escape of one family
/// may consume bytes of another family's escape. The single-family views are not affected.
#[derive(Clone, Default)]
struct DerivedViews {
    combined: Option<Box<DerivedView>>,
    single: Vec<DerivedView>,
    /// The families of all escapes so far.
    seen_families: EscapeFamilies,
    /// The escapes that other views have decoded. A match in a view of the same family cannot start inside one of them.
    decoded_to: DecodedTo,
}

/// A view with escapes decoded, and the views derived from it.
#[derive(Clone)]
struct DerivedView {
    view: UnescapedView,
    derived: DerivedViews,
}

impl DerivedViews {
    fn clear(&mut self) {
        self.single.clear();
        (self.seen_families, self.decoded_to) = Default::default();
        if let Some(combined) = &mut self.combined {
            combined.view.clear();
            combined.derived.clear();
        }
    }

    fn iter(&self) -> impl Iterator<Item = &DerivedView> {
        self.combined.iter().map(|combined| &**combined).chain(&self.single)
    }

    fn is_diverged(&self) -> bool {
        self.iter().any(|child| child.view.is_diverged())
    }

    fn any(&self, predicate: &impl Fn(&UnescapedView) -> bool) -> bool {
        self.iter().any(|child| predicate(&child.view) || child.derived.any(predicate))
    }

    fn for_each(&self, visit: &mut impl FnMut(&UnescapedView)) {
        for child in self.iter() {
            visit(&child.view);
            child.derived.for_each(visit);
        }
    }

    /// Decodes the escapes in the parent's fresh bytes and searches the result.
    fn feed(&mut self, parent: &Buffer, index: &Index, (depth, mode): (usize, SearchMode), matches: &mut Matches) {
        let Some(depth) = depth.checked_sub(1) else { return };
        let added = self.new_families(parent);
        if added == EscapeFamilies::default() && !self.is_diverged() {
            return;
        }
        let seen_families = self.seen_families;
        self.add_families(added);
        let decoded_to = self.decoded_to;
        let diverges_now = |child: &DerivedView| !child.view.is_diverged() && child.view.families().intersects(added);
        let snapshot =
            (depth > 0 && self.single.iter().any(diverges_now)).then(|| self.snapshot(seen_families)).flatten();
        let combined = self
            .combined
            .get_or_insert_with(|| Box::new(DerivedView::starting_after(EscapeFamilies::ALL, decoded_to, decoded_to)));
        if combined.view.is_diverged() || combined.view.families().intersects(added) {
            combined.feed(parent, index, (depth, mode), matches);
        }
        for child in &mut self.single {
            match snapshot.as_ref().filter(|_| diverges_now(child)) {
                Some(snapshot) => child.feed_first_escape(parent, snapshot, index, (depth, mode), matches),
                None if child.view.is_diverged() || child.view.families().intersects(added) => {
                    child.feed(parent, index, (depth, mode), matches);
                }
                None => {}
            }
        }
        self.forget_families(parent, &index.patterns.automaton);
    }

    /// Forgets the families whose escapes are all before the bytes that can still belong to a match, and drops the
    /// single-family views if they would equal the view in which all families are decoded.
    fn forget_families(&mut self, parent: &Buffer, automaton: &Automaton) {
        let is_settled = |child: &DerivedView| !child.view.has_pending_escape() && !child.derived.is_diverged();
        if self.seen_families == EscapeFamilies::default() || !self.iter().all(is_settled) {
            return;
        }
        // Escapes of any family at the next level may consist of decoded bytes and of bytes that follow them.
        let mut of_derived = 0;
        self.iter().for_each(|child| {
            child
                .derived
                .for_each(&mut |view| of_derived = view.decoded_to().latest(EscapeFamilies::ALL).max(of_derived));
        });
        let is_past = |family: &EscapeFamilies| {
            let end = self.iter().map(|child| child.view.decoded_to().latest(*family)).fold(of_derived, u64::max);
            let diverged = self.iter().filter(|child| child.view.is_diverged()).map(|child| &child.view.buffer);
            std::iter::once(parent).chain(diverged).all(|buffer| buffer.starts_at_or_after(end, automaton))
        };
        let seen = EscapeFamilies::EACH.into_iter().filter(|family| self.seen_families.intersects(*family));
        let recent = seen.filter(|family| !is_past(family)).fold(EscapeFamilies::default(), EscapeFamilies::union);
        if !recent.is_mixed() {
            self.single.clear();
            self.seen_families = recent;
        }
    }

    /// Returns a copy of these views before the fresh bytes are added. It becomes the children of a single-family view
    /// whose family had no escapes so far: up to now, decoding that view again gives what decoding the parent gives.
    /// Returns `None` if these views equal their parent.
    fn snapshot(&self, seen_families: EscapeFamilies) -> Option<Self> {
        let combined = self.combined.as_ref().filter(|_| self.is_diverged())?;
        let without_children = |child: &DerivedView| DerivedView { view: child.view.clone(), derived: Self::default() };
        let single = self.single.iter().map(without_children).collect();
        Some(Self {
            combined: Some(Box::new(without_children(combined))),
            single,
            seen_families,
            decoded_to: self.decoded_to,
        })
    }

    /// Returns the families of the escapes in the parent's fresh bytes.
    fn new_families(&self, parent: &Buffer) -> EscapeFamilies {
        // An escape may have started in older bytes.
        let Source { bytes, .. } = parent.source();
        let from = parent.fresh_from().saturating_sub(MAX_ESCAPE);
        EscapeFamilies::in_text(if self.is_diverged() { parent.fresh() } else { bytes.get(from..).unwrap_or_default() })
    }

    /// Records the families of new escapes. Creates the single-family views when a second family occurs. The distance
    /// between the escapes does not matter, because any number of line breaks may separate them.
    fn add_families(&mut self, added: EscapeFamilies) {
        let before = self.seen_families;
        self.seen_families = before.union(added);
        if !self.seen_families.is_mixed() || !self.single.is_empty() {
            return;
        }
        let (combined, decoded_to) = (self.combined.as_deref(), self.decoded_to);
        let next = combined.map_or(decoded_to, |combined| combined.view.decoded_to().max(decoded_to));
        let single = |family: EscapeFamilies| {
            let before = combined.filter(|_| before == family).map(|combined| combined.restricted_to(family));
            before.unwrap_or_else(|| DerivedView::starting_after(family, decoded_to, next))
        };
        self.single = EscapeFamilies::EACH.into_iter().map(single).collect();
    }

    /// Ends the parent view.
    fn end(&mut self, index: &Index, depth: usize, matches: &mut Matches) {
        let Some(depth) = depth.checked_sub(1) else { return };
        for child in self.combined.iter_mut().map(|combined| &mut **combined).chain(&mut self.single) {
            if child.view.is_diverged() {
                child.view.end();
                child.search(index, (depth, SearchMode::End), matches);
                child.derived.end(index, depth, matches);
            }
        }
    }
}

impl DerivedView {
    /// Creates a view where other views have already decoded escapes, at its own level and at the next one.
    fn starting_after(families: EscapeFamilies, decoded_to: DecodedTo, next: DecodedTo) -> Self {
        let next = DerivedViews { decoded_to: next, seen_families: next.families(), ..DerivedViews::default() };
        Self { view: UnescapedView::starting_after(families, decoded_to), derived: next }
    }

    /// Returns a copy for one family, valid while no other family has occurred.
    fn restricted_to(&self, family: EscapeFamilies) -> Self {
        Self { view: self.view.restricted_to(family), derived: self.derived.clone() }
    }

    fn feed(&mut self, parent: &Buffer, index: &Index, mode: (usize, SearchMode), matches: &mut Matches) {
        self.view.feed(parent, &index.patterns.automaton);
        self.search(index, mode, matches);
    }

    /// Adds the first escape of this family. The children up to that point are a snapshot of the siblings.
    fn feed_first_escape(
        &mut self,
        parent: &Buffer,
        snapshot: &DerivedViews,
        index: &Index,
        mode: (usize, SearchMode),
        matches: &mut Matches,
    ) {
        self.view.feed_first_escape(parent, &index.patterns.automaton);
        self.derived = snapshot.clone();
        let family = self.view.families();
        for child in self.derived.combined.iter_mut().map(|combined| &mut **combined).chain(&mut self.derived.single) {
            child.view.discard_pending(family);
        }
        self.search(index, mode, matches);
    }

    /// Searches the decoded bytes.
    fn search(&mut self, index: &Index, (depth, mode): (usize, SearchMode), matches: &mut Matches) {
        self.derived.feed(&self.view.buffer, index, (depth, mode), matches);
        self.view.buffer.search(index, mode, matches);
        self.view.advance(!self.derived.is_diverged(), &index.patterns.automaton);
    }
}

//! The stretches of a text in which a pattern may extend over a *seam*: an escape, which is decoded, or bytes that are
//! skipped, which are left out. A pattern elsewhere has all its bytes in the text itself.

use std::ops::Range;

use memchr::memchr2_iter;
use zeroize::Zeroize;

use super::fold::{begins_escape, find_ignorable, ignorable_len, is_indent, is_line_break};
use super::separators::Separators;
use super::unescape::{EscapeFamilies, MAX_ESCAPE, ParsedEscape, find_candidate, parse_escape};

/// The patterns that an excerpt is made for.
#[derive(Clone, Copy)]
pub(super) struct Extent<'p> {
    pub(super) separators: &'p Separators,
    /// The number of bytes of a pattern that a text must contain for the pattern to be found.
    pub(super) required: usize,
    /// The length of the shortest pattern in bytes.
    pub(super) shortest: usize,
    /// The escapes in the excerpt are decoded later. Until then, separators in them do not count.
    pub(super) has_escapes: bool,
}

/// An excerpt of a text.
#[derive(Default)]
pub(super) struct Excerpt {
    bytes: Vec<u8>,
    runs: Vec<Run>,
    /// The lengths of `bytes` and `runs` before the last stretch.
    stretch_start: (usize, usize),
    /// A number of bytes that no view of the last stretch exceeds.
    stretch_count: usize,
    /// The end of the last seam in the text.
    seam_end: Option<usize>,
    /// The number of following bytes that may belong to an escape that is decoded later.
    in_escape: usize,
}

/// The origin of consecutive bytes: the offset of the first in the excerpt and in the text.
#[derive(Clone, Copy)]
struct Run {
    at: usize,
    source: usize,
}

/// A number of bytes at one end of a text.
struct Part {
    length: usize,
    /// A number of bytes that no view of the part exceeds.
    count: usize,
    /// The part extends over the whole text, and a pattern may extend beyond it.
    is_whole: bool,
    /// The part ends at a separator, so no pattern extends beyond it.
    is_separated: bool,
    /// The number of bytes after the part that may belong to an escape in it.
    in_escape: usize,
}

/// The end of the bytes after a seam that belong to it.
#[derive(Clone, Copy, PartialEq, Eq)]
enum HeadEnd {
    /// The next seam. A pattern may extend over both.
    Seam,
    /// A separator, or the start of the text.
    Separator,
    /// A byte after which a pattern over the seam has been found. Another one may contain the last of these bytes.
    Length,
}

impl Excerpt {
    /// Returns the bytes of all stretches.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes
    }

    /// Returns the offset in the text of a byte of the excerpt.
    pub(super) fn source_offset(&self, at: usize) -> usize {
        let run = self.runs.partition_point(|run| run.at <= at).checked_sub(1).and_then(|run| self.runs.get(run));
        run.map_or(at, |run| run.source.saturating_add(at.saturating_sub(run.at)))
    }

    /// Overwrites the bytes, which may be those of a value.
    pub(super) fn zeroize(&mut self) {
        self.bytes.zeroize();
    }

    fn clear(&mut self) {
        self.bytes.clear();
        self.runs.clear();
        (self.stretch_start, self.stretch_count, self.seam_end, self.in_escape) = ((0, 0), 0, None, 0);
    }

    /// Leaves out line breaks, the indentation after them and invisible code points.
    pub(super) fn join(&mut self, text: &[u8], is_ascii: bool, extent: Extent<'_>) {
        self.clear();
        let extent = Extent { has_escapes: false, ..extent };
        let mut line_breaks = memchr2_iter(b'\n', b'\r', text).peekable();
        let next_ignorable = |from: usize| if is_ascii { None } else { find_ignorable(text, from) };
        let mut ignorable = next_ignorable(0);
        let mut is_indented = false;
        loop {
            let (at, mut end) = match (line_breaks.peek(), ignorable) {
                (Some(line_break), _) if ignorable.is_none_or(|(at, _)| *line_break < at) => {
                    let at = *line_break;
                    line_breaks.next();
                    is_indented = true;
                    (at, at.saturating_add(1))
                }
                (_, Some((at, length))) => {
                    is_indented &= self.seam_end == Some(at);
                    let end = at.saturating_add(length);
                    ignorable = next_ignorable(end);
                    (at, end)
                }
                _ => break,
            };
            if is_indented {
                end = end.saturating_add(indent_len(text, end));
            }
            self.add_seam(text, at..end, &[], extent);
        }
        self.finish(text, text.len(), extent);
    }

    /// Decodes the escapes of some families. Returns the families of the escapes, or `None` if an escape may be longer
    /// than [`MAX_ESCAPE`].
    pub(super) fn decode(
        &mut self,
        text: &[u8],
        families: EscapeFamilies,
        extent: Extent<'_>,
    ) -> Option<EscapeFamilies> {
        self.clear();
        let mut found = EscapeFamilies::default();
        let (mut at, mut text_end) = (0_usize, text.len());
        let mut is_indented = false;
        while let Some(candidate) = text.get(at..).and_then(|rest| find_candidate(rest, families)) {
            at = at.saturating_add(candidate);
            let rest = text.get(at..).unwrap_or_default();
            match parse_escape(rest.get(..MAX_ESCAPE).unwrap_or(rest)) {
                ParsedEscape::Plain => at = at.saturating_add(1),
                ParsedEscape::Incomplete if rest.len() >= MAX_ESCAPE => return None,
                ParsedEscape::Incomplete => {
                    // Its bytes are kept, and follow again with the next ones.
                    found = found.union(families_in(rest));
                    text_end = at;
                    break;
                }
                ParsedEscape::Escape(decoded, used) => {
                    let decoded = decoded.as_bytes();
                    // The second byte may start an escape of another family: `\%`.
                    found = found.union(families_in(rest.get(..2).unwrap_or_default()));
                    is_indented &= self.seam_end == Some(at);
                    is_indented = match decoded {
                        [byte] if is_line_break(*byte) => true,
                        [byte] if is_indent(*byte) => is_indented,
                        _ => is_indented && ignorable_len(decoded).is_some(),
                    };
                    let mut end = at.saturating_add(used);
                    if is_indented {
                        end = end.saturating_add(indent_len(text, end));
                    }
                    self.add_seam(text, at..end, decoded, extent);
                    at = end;
                }
            }
        }
        self.finish(text, text_end, extent);
        Some(found)
    }

    /// Adds a seam, the bytes that stand for it, and the bytes before it that a pattern over it may contain.
    fn add_seam(&mut self, text: &[u8], seam: Range<usize>, bytes: &[u8], extent: Extent<'_>) {
        if self.seam_end != Some(seam.start) {
            let (from, end) = self.add_head(text, seam.start, extent);
            if end != HeadEnd::Seam {
                let between = text.get(from..seam.start).unwrap_or_default();
                let tail = part_before(between, extent);
                if end == HeadEnd::Separator || tail.length < between.len() {
                    self.end_stretch(extent);
                    self.stretch_count = 0;
                }
                self.add(text, seam.start.saturating_sub(tail.length), tail.length);
                self.stretch_count = self.stretch_count.saturating_add(tail.count);
                self.in_escape = tail.in_escape;
            }
        }
        if !bytes.is_empty() {
            self.runs.push(Run { at: self.bytes.len(), source: seam.start });
            self.bytes.extend_from_slice(bytes);
            self.stretch_count = self.stretch_count.saturating_add(bytes.len());
            let begins_escape = extent.has_escapes && bytes.iter().any(|byte| begins_escape(*byte));
            self.in_escape = if begins_escape { MAX_ESCAPE } else { self.in_escape.saturating_sub(bytes.len()) };
        }
        self.seam_end = Some(seam.end);
    }

    /// Adds the bytes between the last seam and the next one that a pattern over the last one may contain. Returns the
    /// offset of the first byte that was not added, and where these bytes end.
    fn add_head(&mut self, text: &[u8], end: usize, extent: Extent<'_>) -> (usize, HeadEnd) {
        let Some(seam_end) = self.seam_end else { return (0, HeadEnd::Separator) };
        let head = part_after(text.get(seam_end..end).unwrap_or_default(), self.in_escape, extent);
        self.add(text, seam_end, head.length);
        self.stretch_count = self.stretch_count.saturating_add(head.count);
        self.in_escape = head.in_escape;
        let end = match head {
            Part { is_whole: true, .. } => HeadEnd::Seam,
            Part { is_separated: true, .. } => HeadEnd::Separator,
            _ => HeadEnd::Length,
        };
        (seam_end.saturating_add(head.length), end)
    }

    /// Adds the bytes after the last seam that a pattern over it may contain.
    fn finish(&mut self, text: &[u8], end: usize, extent: Extent<'_>) {
        self.add_head(text, end, extent);
        self.end_stretch(extent);
    }

    /// Ends a stretch, which is removed if it is too short for a pattern, or for the part of a long one that has to be
    /// in it.
    fn end_stretch(&mut self, extent: Extent<'_>) {
        if self.stretch_count < extent.shortest.min(extent.required) {
            let (bytes, runs) = self.stretch_start;
            self.bytes.truncate(bytes);
            self.runs.truncate(runs);
        }
        self.stretch_start = (self.bytes.len(), self.runs.len());
    }

    fn add(&mut self, text: &[u8], from: usize, length: usize) {
        if length > 0 {
            self.runs.push(Run { at: self.bytes.len(), source: from });
            self.bytes.extend_from_slice(text.get(from..from.saturating_add(length)).unwrap_or_default());
        }
    }
}

/// Returns the part at the start of a text that a pattern before it may extend over: up to the next separator, or until
/// every view has the required number of bytes. It never ends within an escape.
fn part_after(text: &[u8], in_escape: usize, extent: Extent<'_>) -> Part {
    if in_escape == 0
        && let Some(part) = plain_part(text.get(..extent.required).unwrap_or(text).iter(), text.len(), extent)
    {
        return part;
    }
    let (mut left, mut count, mut in_escape) = (extent.required, 0_usize, in_escape);
    for (length, byte) in (1_usize..).zip(text) {
        if extent.has_escapes && begins_escape(*byte) {
            in_escape = MAX_ESCAPE;
        }
        if in_escape > 0 {
            in_escape = in_escape.saturating_sub(usize::from(!may_repeat(*byte)));
        } else if extent.separators.is_separator(*byte) {
            return Part { length, count, is_whole: false, is_separated: true, in_escape };
        } else if is_solid(*byte) {
            left = left.saturating_sub(1);
            if left == 0 {
                return Part { length, count, is_whole: false, is_separated: false, in_escape };
            }
        }
        count = count.saturating_add(1);
    }
    Part { length: text.len(), count, is_whole: true, is_separated: false, in_escape }
}

/// As [`part_after`], for the part at the end of a text. The first [`MAX_ESCAPE`] bytes may be the end of an escape, so
/// as many are added.
fn part_before(text: &[u8], extent: Extent<'_>) -> Part {
    let needed = extent.required.saturating_add(MAX_ESCAPE);
    let visible = text.get(text.len().saturating_sub(needed)..).unwrap_or_default();
    let is_separated = |length: usize| {
        // A separator may belong to an escape that starts before it.
        let rest = text.get(..text.len().saturating_sub(length)).unwrap_or_default();
        let mut last = rest.iter().rev().filter(|byte| !may_repeat(**byte)).take(MAX_ESCAPE);
        !extent.has_escapes || !last.any(|byte| begins_escape(*byte))
    };
    if let Some(part) = plain_part(visible.iter().rev(), text.len(), extent)
        && (part.is_whole || part.length == needed || is_separated(part.length))
    {
        return part;
    }
    let (mut left, mut count, mut in_escape, mut distance) = (needed, 0_usize, 0_usize, 0_usize);
    for (length, byte) in (1_usize..).zip(text.iter().rev()) {
        distance = distance.saturating_add(usize::from(!may_repeat(*byte)));
        if extent.has_escapes && begins_escape(*byte) {
            left = left.saturating_add(MAX_ESCAPE);
            in_escape = in_escape.max(MAX_ESCAPE.saturating_sub(distance));
        } else if extent.separators.is_separator(*byte) {
            if is_separated(length) {
                return Part { length, count, is_whole: false, is_separated: true, in_escape };
            }
        } else if is_solid(*byte) {
            left = left.saturating_sub(1);
            if left == 0 {
                return Part { length, count, is_whole: false, is_separated: false, in_escape };
            }
        }
        count = count.saturating_add(1);
    }
    Part { length: text.len(), count, is_whole: true, is_separated: false, in_escape }
}

/// Returns the part if it consists of plain bytes up to a separator, as most do. `visible` are the next bytes, at most as
/// many as are needed, of `length` bytes in all.
fn plain_part<'t>(visible: impl ExactSizeIterator<Item = &'t u8>, length: usize, extent: Extent<'_>) -> Option<Part> {
    let needed = visible.len();
    let (mut count, mut previous) = (0_usize, 0);
    for byte in visible {
        if *byte == b' ' && previous == b' ' {
            // They may be indentation.
            return None;
        }
        previous = *byte;
        if !extent.separators.is_plain(*byte) {
            let is_separator = extent.separators.is_separator(*byte) && !(extent.has_escapes && begins_escape(*byte));
            return is_separator.then(|| Part {
                length: count.saturating_add(1),
                count,
                is_whole: false,
                is_separated: true,
                in_escape: 0,
            });
        }
        count = count.saturating_add(1);
    }
    Some(Part { length: needed, count, is_whole: needed == length, is_separated: false, in_escape: 0 })
}

/// Returns true for a byte of which an escape may have any number: a numeric reference may have leading zeros.
fn may_repeat(byte: u8) -> bool {
    byte == b'0'
}

/// Returns true for a byte that no view skips.
fn is_solid(byte: u8) -> bool {
    byte.is_ascii() && !is_indent(byte) && !is_line_break(byte)
}

/// Returns the number of blanks from an offset on.
fn indent_len(text: &[u8], from: usize) -> usize {
    text.get(from..).unwrap_or_default().iter().take_while(|byte| is_indent(**byte)).count()
}

/// Returns the families whose escapes start with a byte of this text.
fn families_in(text: &[u8]) -> EscapeFamilies {
    text.iter().fold(EscapeFamilies::default(), |all, byte| all.union(EscapeFamilies::of_byte(*byte)))
}

//! Removes the values of all tasks from texts for the log.
//!
//! The log may hold no value, whoever sent it. A [`Matcher`] for the values of all tasks would take a second of
//! processor time and tens of megabytes for a thousand values, and only a few of them ever occur in the log. So the
//! values that occur whole in a text are selected first, and only for these a matcher is built. It removes them, with
//! their halves and parts.

use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::{Arc, OnceLock};

use zeroize::Zeroizing;

use super::encodings::{self, Form, MIN_VALUE, SearchTerm};
use super::fold::{is_indent, is_line_break, without_ignorable};
use super::matcher::{Matcher, Value, folded_names};
use super::prefilter::Prefilter;
use super::unescape::{self, EscapeFamilies};

/// The number of times that escapes are decoded.
const MAX_DEPTH: usize = 2;

/// A credential or a token that may not appear in the log.
pub trait ValueSource: Send + Sync {
    /// Returns its values, whether they are searched for or not. The log is searched for them before their strength is
    /// known, because the estimate is slow.
    fn values(&self) -> Vec<&[u8]>;

    /// Returns the values to search for. There are none if they are weak.
    fn search_values(&self) -> Vec<Value<'_>>;
}

/// The values of all credentials and tokens.
#[derive(Default)]
pub struct LogValues {
    /// Further values, whose filters are kept when these change.
    base: Option<Arc<LogValues>>,
    sources: Vec<(Box<dyn ValueSource>, OnceLock<Matcher>)>,
    filters: OnceLock<Filters>,
}

/// Select the sources whose values occur whole in a text, and in a name.
struct Filters {
    texts: Prefilter,
    names: Prefilter,
}

impl LogValues {
    /// Creates the set. The filters are built at their first use, or by [`Self::prepare`].
    #[must_use]
    pub fn new(sources: impl Iterator<Item = Box<dyn ValueSource>>) -> Self {
        let sources = sources.map(|source| (source, OnceLock::new())).collect();
        Self { base: None, sources, filters: OnceLock::new() }
    }

    /// Adds the values of another set.
    #[must_use]
    pub fn with_base(self, base: Arc<Self>) -> Self {
        Self { base: Some(base), ..self }
    }

    /// Builds the filters.
    pub fn prepare(&self) {
        self.filters();
        self.base.iter().for_each(|base| base.prepare());
    }

    fn filters(&self) -> &Filters {
        self.filters.get_or_init(|| {
            let (mut texts, mut names) = (Vec::<(Form, u32)>::new(), Vec::<(Form, u32)>::new());
            for (owner, (source, _)) in (0..).zip(&self.sources) {
                for value in source.values().into_iter().filter(|value| value.len() >= MIN_VALUE) {
                    let term = SearchTerm { is_whole_only: true, ..SearchTerm::new(value) };
                    texts.extend(encodings::forms(term).into_iter().map(|form| (form, owner)));
                    names.extend(encodings::name_forms(value).map(|form| (form, owner)));
                }
            }
            Filters { texts: Prefilter::new(&texts), names: Prefilter::new(&names) }
        })
    }

    /// Overwrites the values in an external text, and parts of the same values.
    #[must_use]
    pub fn redact<'t>(&self, text: &'t str) -> Cow<'t, str> {
        let mut redacted = self.base.as_ref().map_or(Cow::Borrowed(text), |base| base.redact(text));
        if self.sources.is_empty() {
            return redacted;
        }
        let text = redacted.clone();
        for owner in self.owners_in(text.as_bytes()) {
            if let Some(matcher) = self.matcher(owner) {
                redacted = Cow::Owned(matcher.redact_for_log(&redacted).into_owned());
            }
        }
        redacted
    }

    /// Returns true if a host name or a field name contains a value.
    #[must_use]
    pub fn occur_in_name(&self, name: &str) -> bool {
        if self.base.as_ref().is_some_and(|base| base.occur_in_name(name)) {
            return true;
        }
        let mut owners = self.owners_in(name.as_bytes());
        owners.extend(self.owners_in(name.replace('.', "").as_bytes()));
        folded_names(name).iter().for_each(|text| self.filters().names.add_owners(text, &mut owners));
        owners.into_iter().filter_map(|owner| self.matcher(owner)).any(|matcher| matcher.find_in_name(name).is_some())
    }

    /// Returns the sources of which a value occurs whole in a text, however it is escaped.
    fn owners_in(&self, text: &[u8]) -> BTreeSet<u32> {
        let mut owners = BTreeSet::new();
        if text.len() >= MIN_VALUE && !self.sources.is_empty() {
            self.add_owners(text, MAX_DEPTH, &mut owners);
        }
        owners
    }

    fn add_owners(&self, text: &[u8], depth: usize, owners: &mut BTreeSet<u32>) {
        self.filters().texts.add_owners(&without_skipped(text), owners);
        let families = EscapeFamilies::in_text(text);
        let Some(depth) = depth.checked_sub(1).filter(|_| families != EscapeFamilies::default()) else { return };
        self.add_owners(&unescape::unescape_once(text), depth, owners);
        if families.is_mixed() {
            for family in EscapeFamilies::EACH.into_iter().filter(|family| families.intersects(*family)) {
                self.add_owners(&unescape::unescape_family(text, family), depth, owners);
            }
        }
    }

    fn matcher(&self, owner: u32) -> Option<&Matcher> {
        let (source, matcher) = self.sources.get(owner as usize)?;
        Some(matcher.get_or_init(|| Matcher::new(source.search_values().into_iter())))
    }
}

/// Returns a text without invisible code points, line breaks and the indentation after them.
fn without_skipped(text: &[u8]) -> Zeroizing<Vec<u8>> {
    let mut text = without_ignorable(text);
    let mut is_indented = false;
    text.retain(|byte| {
        is_indented = is_line_break(*byte) || (is_indented && is_indent(*byte));
        !is_indented
    });
    text
}

#[cfg(test)]
mod tests {
    use base64::Engine;
    use base64::engine::general_purpose::STANDARD;

    use super::*;
    use crate::leak::strength::Strength;
    use crate::leak::{ValueOwner, password};

    struct Source(&'static [u8]);

    impl ValueSource for Source {
        fn values(&self) -> Vec<&[u8]> {
            vec![self.0]
        }

        fn search_values(&self) -> Vec<Value<'_>> {
            let strength = Strength::of(password(self.0));
            let value = Value::new(ValueOwner::Token, self.0).with_halves(strength);
            Some(value).filter(|_| strength.is_strong()).into_iter().collect()
        }
    }

    const STRONG: &str = "k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5Jf";

    fn values() -> LogValues {
        let sources: [&[u8]; 3] = [b"Winter1987?", STRONG.as_bytes(), b"acme-live-Q2vB7nXw5TzK9mRd"];
        LogValues::new(sources.into_iter().map(|value| Box::new(Source(value)) as Box<dyn ValueSource>))
    }

    #[test]
    fn strong_values_are_overwritten_in_every_form() {
        let values = values();
        let each = |escape: &dyn Fn(u8) -> String| STRONG.bytes().map(escape).collect::<String>();
        let mixed = STRONG.bytes().enumerate().map(|(n, byte)| match n % 3 {
            0 => format!("%{byte:02x}"),
            1 => format!("\\u{byte:04x}"),
            _ => char::from(byte).to_string(),
        });
        let decoy = format!("&#x{}", each(&|byte| format!("%{byte:02x}")));
        let forms = [
            STRONG.to_owned(),
            each(&|byte| format!("%{byte:02x}")),
            each(&|byte| format!("%25{byte:02x}")),
            each(&|byte| format!("&#{byte};")),
            each(&|byte| format!("{byte:02X}")),
            mixed.collect(),
            decoy,
            STANDARD.encode(format!("a{STRONG}b")),
            format!("{}\u{200b}{}", &STRONG[..9], &STRONG[9..]),
            format!("{}\r\n  {}", &STRONG[..20], &STRONG[20..]),
        ];
        for form in forms {
            let text = format!("/path/{form}/end");
            let redacted = values.redact(&text);
            assert!(
                redacted.contains('*') && redacted.starts_with("/path/") && redacted.ends_with("end"),
                "{redacted}"
            );
            assert!(!values.redact(&redacted).contains(STRONG) && values.redact(&redacted) == redacted, "{redacted}");
        }
    }

    #[test]
    fn weak_values_and_other_texts_are_kept() {
        for text in ["/Winter1987?", "/k7Qz2mXv9LpW4sVt6eRRu8YbN3cHd5J", "/", "", "/acme-live-/%zz\\u00&#x;"] {
            assert_eq!(values().redact(text), text);
        }
        assert_eq!(LogValues::default().redact(STRONG), STRONG);
    }

    #[test]
    fn names_have_no_case_and_dots() {
        let values = values();
        let lower = STRONG.to_ascii_lowercase();
        let (one, two) = lower.split_at(20);
        assert!(values.occur_in_name(&format!("{one}.{two}.evil.test")));
        assert!(values.occur_in_name("acme-live-q2vb7nxw5tzk9mrd.evil.test"));
        assert!(!values.occur_in_name(&format!("{one}.evil.test")) && !values.occur_in_name("api.evil.test"));
    }
}

//! The credentials of a task, with indexes for the questions that are asked about every request. Their cost does not
//! grow with the number of credentials.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::ops::Deref;
use std::sync::{Arc, OnceLock};

use aho_corasick::AhoCorasick;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};

use super::credential::{Credential, Placement, strong_values};
use crate::leak::{Matcher, Value};
use crate::model::host::Host;
use crate::model::name::CredentialName;

/// The credentials of a task in the order of the configuration.
#[derive(Default)]
pub struct TaskCredentials {
    all: Vec<Arc<Credential>>,
    by_name: HashMap<String, usize>,
    /// Those with a placeholder of their own.
    with_placeholder: Vec<Arc<Credential>>,
    /// Finds these placeholders. Built at its first use.
    placeholders: OnceLock<Option<AhoCorasick>>,
    always_injected: Vec<Arc<Credential>>,
    /// Those whose values are minted.
    minted: Vec<Arc<Credential>>,
    /// The places in which placeholders are replaced, each once.
    placements: Vec<Placement>,
    /// The places that the `auth_type` of some credential defines.
    auth_placements: Vec<Placement>,
    hosts: HashSet<Host>,
    /// A hash of the values that are not minted. Made at its first use.
    fixed_values: OnceLock<[u8; 32]>,
    /// Matches the strong values. Built at its first use, because few of many tasks may be in use.
    own: OnceLock<Arc<Matcher>>,
    /// Matches these and the values of weak credentials, by their names. Built when they are first sent.
    masked: Mutex<HashMap<Vec<CredentialName>, Arc<Matcher>>>,
}

impl TaskCredentials {
    /// Indexes the credentials.
    #[must_use]
    pub fn new(all: Vec<Arc<Credential>>) -> Self {
        let mut this = Self::default();
        for (at, credential) in all.iter().enumerate() {
            this.by_name.entry(credential.name().to_string()).or_insert(at);
            this.hosts.extend(credential.hosts().cloned());
            credential.auth().place().into_iter().for_each(|place| insert(&mut this.auth_placements, place));
            credential.places().for_each(|place| insert(&mut this.placements, place));
            if credential.placeholder().is_some() {
                this.with_placeholder.push(credential.clone());
            }
            if credential.recipe().is_some() {
                this.minted.push(credential.clone());
            }
            if credential.is_always_injected() {
                this.always_injected.push(credential.clone());
            }
        }
        Self { all, ..this }
    }

    /// Returns a credential by its name.
    #[must_use]
    pub fn named(&self, name: &str) -> Option<&Arc<Credential>> {
        self.all.get(*self.by_name.get(name)?)
    }

    /// Returns a credential and all that are sent beside it.
    #[must_use]
    pub fn sent_with<'c>(&'c self, credential: &'c Arc<Credential>) -> Vec<&'c Arc<Credential>> {
        let mut sent = vec![credential];
        let mut at = 0;
        while let Some(one) = sent.get(at) {
            let others = one.with().iter().filter_map(|name| self.named(name.as_str()));
            let new: Vec<_> = others.filter(|other| !sent.iter().any(|known| known.name() == other.name())).collect();
            sent.extend(new);
            at = at.saturating_add(1);
        }
        sent
    }

    /// Returns the place of the credential that is sent beside all others of these, as `with` says.
    pub fn leader<'c>(&self, asked: impl Iterator<Item = &'c Arc<Credential>> + Clone) -> Option<usize> {
        asked.clone().position(|one| {
            let sent = self.sent_with(one);
            asked.clone().all(|other| sent.iter().any(|sent| sent.name() == other.name()))
        })
    }

    /// Returns the automaton that finds the credentials' own placeholders, or `None` if there are none.
    pub(super) fn placeholders(&self) -> Option<&AhoCorasick> {
        let build = || {
            let patterns = self.with_placeholder.iter().filter_map(|credential| credential.placeholder());
            // Fails only for gigabytes of patterns. Placeholders would then be sent as text, and no value would be.
            (!self.with_placeholder.is_empty()).then(|| AhoCorasick::new(patterns).ok()).flatten()
        };
        self.placeholders.get_or_init(build).as_ref()
    }

    /// Returns the first placeholder of a credential's own in a text, with the text before and after it.
    pub(super) fn find_own_placeholder<'t>(&self, text: &'t [u8]) -> Option<(&Arc<Credential>, &'t [u8], &'t [u8])> {
        let found = self.placeholders()?.find(text)?;
        let credential = self.with_placeholder.get(found.pattern().as_usize())?;
        Some((credential, text.get(..found.start())?, text.get(found.end()..)?))
    }

    /// Returns the credentials that are injected into every request to their hosts.
    #[must_use]
    pub fn always_injected(&self) -> &[Arc<Credential>] {
        &self.always_injected
    }

    /// Returns the places in which placeholders are replaced.
    #[must_use]
    pub fn placements(&self) -> &[Placement] {
        &self.placements
    }

    /// Returns true if the `auth_type` of some credential defines this place.
    #[must_use]
    pub fn is_auth_placement(&self, place: &Placement) -> bool {
        self.auth_placements.contains(place)
    }

    /// Returns the matcher for the strong values, which must not come back in a response.
    #[must_use]
    pub fn own(&self) -> &Arc<Matcher> {
        self.own.get_or_init(|| Arc::new(Matcher::new(strong_values(self.all.iter()))))
    }

    /// Returns true if [`Self::own`] and [`Self::placeholders`] have been built.
    pub(super) fn is_prepared(&self) -> bool {
        self.own.get().is_some() && self.placeholders.get().is_some()
    }

    /// Takes over the matcher of a task with the same values.
    pub(super) fn reuse_matcher(&self, other: &Self) {
        if let Some(known) = other.own.get().filter(|_| self.has_values_of(other)) {
            self.own.get_or_init(|| known.clone());
        }
    }

    /// Returns true if both tasks are searched for the same values.
    pub(super) fn has_values_of(&self, other: &Self) -> bool {
        self.len() == other.len() && self.iter().zip(other.iter()).all(|(one, other)| one.has_values_of(other))
    }

    /// Returns the matcher for the values that must not come back in an exchange that sends these credentials. It
    /// includes their values even if they are weak.
    pub fn masked_after<'c>(&self, sent: impl Iterator<Item = &'c Credential>) -> Arc<Matcher> {
        let weak: Vec<&Credential> = sent.filter(|sent| !sent.strength().is_strong()).collect();
        if weak.is_empty() {
            return self.own().clone();
        }
        let of_weak = || weak.iter().flat_map(|weak| weak.terms()).map(Value::whole);
        let values = || strong_values(self.all.iter()).chain(of_weak());
        let mut names: Vec<_> = weak.iter().map(|weak| weak.name().clone()).collect();
        names.sort_unstable();
        let mut masked = self.masked.lock();
        masked.entry(names).or_insert_with(|| Arc::new(Matcher::new(values()))).clone()
    }

    /// Returns the credentials whose values are minted and may be sent to a host.
    pub fn minted_for<'c>(&'c self, host: &'c Host) -> impl Iterator<Item = &'c Arc<Credential>> {
        self.minted.iter().filter(move |credential| credential.hosts().any(|bound| bound == host))
    }

    /// Returns a hash of all values that only a new configuration changes.
    pub fn fixed_values(&self) -> [u8; 32] {
        *self.fixed_values.get_or_init(|| {
            let values = self.all.iter().flat_map(|credential| credential.fixed_values());
            let hashes: BTreeSet<[u8; 32]> = values.map(|value| Sha256::digest(value).into()).collect();
            let mut hash = Sha256::new();
            hashes.iter().for_each(|value| hash.update(value));
            hash.finalize().into()
        })
    }

    /// Whether a host could return one of the values.
    #[must_use]
    pub fn could_come_from(&self, host: &Host) -> bool {
        self.hosts.contains(host)
    }
}

impl Deref for TaskCredentials {
    type Target = [Arc<Credential>];

    fn deref(&self) -> &Self::Target {
        &self.all
    }
}

fn insert(places: &mut Vec<Placement>, place: Placement) {
    if !places.contains(&place) {
        places.push(place);
    }
}

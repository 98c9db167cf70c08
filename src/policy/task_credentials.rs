//! The credentials of a task, with indexes for the questions that are asked about every request. Their cost does not
//! grow with the number of credentials.

use std::collections::{HashMap, HashSet};
use std::ops::Deref;
use std::sync::Arc;

use super::credential::{Credential, Placement};
use crate::model::host::Host;

/// The credentials of a task in the order of the configuration.
#[derive(Default)]
pub struct TaskCredentials {
    all: Vec<Arc<Credential>>,
    by_name: HashMap<String, usize>,
    /// Those with a placeholder of their own.
    with_placeholder: Vec<Arc<Credential>>,
    always_injected: Vec<Arc<Credential>>,
    /// The places in which placeholders are replaced, each once.
    placements: Vec<Placement>,
    /// The places that the `auth_type` of some credential defines.
    auth_placements: Vec<Placement>,
    hosts: HashSet<Host>,
}

impl TaskCredentials {
    /// Indexes the credentials.
    #[must_use]
    pub fn new(all: Vec<Arc<Credential>>) -> Self {
        let mut this = Self::default();
        for (at, credential) in all.iter().enumerate() {
            this.by_name.entry(credential.name().to_string()).or_insert(at);
            this.hosts.extend(credential.hosts().cloned());
            insert(&mut this.auth_placements, credential.auth().place());
            credential.places().for_each(|place| insert(&mut this.placements, place));
            if credential.placeholder().is_some() {
                this.with_placeholder.push(credential.clone());
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

    /// Returns the credentials with a placeholder of their own.
    #[must_use]
    pub fn with_placeholder(&self) -> &[Arc<Credential>] {
        &self.with_placeholder
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

//! The most frequent hosts, in bounded memory: the Space-Saving algorithm (Metwally, Agrawal and El Abbadi, 2005).

use std::collections::HashMap;

/// The number of counters. A host with more than this fraction of the requests always has one.
const COUNTERS: usize = 256;
/// A host is reported if it is certain that it has at least this fraction of all requests. Hosts of a sandbox that
/// counts through names do not become names of metrics in this way.
const REPORTED_FRACTION: u64 = 100;
/// The least number of requests of a reported host. Shortly after the start, a single one is a large fraction.
const REPORTED_LEAST: u64 = 100;

/// The counts of hosts.
#[derive(Default)]
pub(super) struct TopHosts {
    counters: HashMap<String, Counter>,
    total: u64,
}

#[derive(Clone, Copy)]
struct Counter {
    count: u64,
    /// The part of the count that may belong to other hosts.
    error: u64,
}

impl Counter {
    fn certain(self) -> u64 {
        self.count.saturating_sub(self.error)
    }
}

impl TopHosts {
    /// Counts a request to a host.
    pub(super) fn add(&mut self, host: &str) {
        self.total = self.total.saturating_add(1);
        if let Some(counter) = self.counters.get_mut(host) {
            counter.count = counter.count.saturating_add(1);
            return;
        }
        let error = if self.counters.len() < COUNTERS { 0 } else { self.remove_least() };
        self.counters.insert(host.to_owned(), Counter { count: error.saturating_add(1), error });
    }

    /// Removes the smallest counter, and returns its count.
    fn remove_least(&mut self) -> u64 {
        let least = self.counters.iter().min_by_key(|(_, counter)| counter.count);
        let Some((host, count)) = least.map(|(host, counter)| (host.clone(), counter.count)) else { return 0 };
        self.counters.remove(&host);
        count
    }

    /// Returns the hosts that certainly have at least a hundredth of all requests, with the number that is certain, the
    /// most frequent first.
    pub(super) fn certain(&self) -> Vec<(String, u64)> {
        let is_reported =
            |certain: u64| certain >= REPORTED_LEAST && certain.saturating_mul(REPORTED_FRACTION) >= self.total;
        let certain = self.counters.iter().map(|(host, counter)| (host.clone(), counter.certain()));
        let mut hosts: Vec<_> = certain.filter(|(_, certain)| is_reported(*certain)).collect();
        hosts.sort_by(|(a, a_count), (b, b_count)| b_count.cmp(a_count).then_with(|| a.cmp(b)));
        hosts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn few_hosts_are_counted_exactly() {
        let mut hosts = TopHosts::default();
        for (host, count) in [("a.example", 300), ("b.example", 100), ("rare.example", 3)] {
            (0..count).for_each(|_| hosts.add(host));
        }
        assert_eq!(hosts.certain(), [("a.example".to_owned(), 300), ("b.example".to_owned(), 100)]);
    }

    /// A sandbox that counts through names neither grows the memory, nor hides a frequent host, nor gets its names reported.
    #[test]
    fn a_flood_of_names_is_not_reported() {
        let mut hosts = TopHosts::default();
        for number in 0..50_000 {
            hosts.add(&format!("{number}.flood.example"));
            if number % 20 == 0 {
                hosts.add("api.example");
            }
        }
        assert!(hosts.counters.len() <= COUNTERS);
        let certain = hosts.certain();
        assert!(matches!(certain.as_slice(), [(host, 2_000..=2_500)] if host == "api.example"), "{certain:?}");
    }
}

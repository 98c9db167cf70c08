//! The addresses that the DNS listener answers with. Each stands for one name of one task, so that a captured connection to it
//! tells which name its client has looked up.

use std::collections::HashMap;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};
use std::time::{Duration, Instant};

use ipnet::IpNet;
use parking_lot::Mutex;
use sha2::{Digest, Sha256};
use zeroize::Zeroizing;

use crate::model::host::HostName;
use crate::model::name::TaskName;

/// The most names of a task.
const MAX_NAMES: usize = 4096;
/// The most names of all tasks. Each takes about 400 bytes.
const MAX_TOTAL: usize = 32_768;
/// The time without a lookup and a connection after which an address may stand for another name. Programs that keep an address for
/// longer than its lifetime still have it then.
const REUSE_AFTER: Duration = Duration::from_secs(3600);

/// The addresses of a name, one of each family that has a range.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Synthetic {
    pub(crate) v4: Option<Ipv4Addr>,
    pub(crate) v6: Option<Ipv6Addr>,
}

/// The assigned addresses.
pub(crate) struct SyntheticAddresses {
    /// The ranges, at most one of each family. Without one, no address is synthetic.
    ranges: Vec<IpNet>,
    /// The number of addresses in the smallest of them.
    size: u32,
    /// Makes the order of the names unknown to tasks: they could find out which addresses those of others have.
    key: Zeroizing<[u8; 32]>,
    assigned: Mutex<Assigned>,
}

#[derive(Default)]
struct Assigned {
    by_number: HashMap<u32, Entry>,
    numbers: HashMap<(TaskName, HostName), u32>,
    tasks: HashMap<TaskName, TaskUsage>,
    /// No address may be reused before, if there are as many as possible.
    full_until: Option<Instant>,
}

struct Entry {
    task: TaskName,
    name: HostName,
    used: Instant,
}

#[derive(Default)]
struct TaskUsage {
    names: usize,
    /// No address of the task may be reused before.
    full_until: Option<Instant>,
}

impl SyntheticAddresses {
    /// Creates the map. No address is assigned. With the same secret, names get the same addresses after a restart.
    pub(crate) fn new(ranges: &[IpNet], key: Zeroizing<[u8; 32]>) -> Self {
        // Not the addresses of the network itself and of its broadcast.
        let size = |range: &IpNet| {
            let bits = range.max_prefix_len().saturating_sub(range.prefix_len()).min(24);
            (1_u32 << bits).saturating_sub(2)
        };
        let smallest = ranges.iter().map(size).min().unwrap_or_default();
        Self { ranges: ranges.to_vec(), size: smallest, key, assigned: Mutex::default() }
    }

    /// Returns whether an address is in one of the ranges.
    pub(crate) fn contains(&self, ip: IpAddr) -> bool {
        self.ranges.iter().any(|range| range.contains(&ip))
    }

    /// Returns the addresses of a name, and whether they have been assigned just now. They are the same after a restart, unless
    /// another name came first. Returns `None` if there are too many names: the `tasks` of the policy share them alike.
    pub(crate) fn of_name(
        &self,
        (task, tasks): (&TaskName, usize),
        name: &HostName,
        now: Instant,
    ) -> Option<(Synthetic, bool)> {
        self.assign_if((task, tasks), name, now, |_| true)
    }

    /// Assigns addresses to a name that has none only if they are accepted.
    fn assign_if(
        &self,
        (task, tasks): (&TaskName, usize),
        name: &HostName,
        now: Instant,
        is_accepted: impl FnOnce(Synthetic) -> bool,
    ) -> Option<(Synthetic, bool)> {
        let mut assigned = self.assigned.lock();
        if let Some(number) = assigned.numbers.get(&(task.clone(), name.clone())).copied() {
            if let Some(entry) = assigned.by_number.get_mut(&number) {
                entry.used = now;
            }
            return Some((self.at(number), false));
        }
        // At least half of the range stays free, so the search is short.
        let half = usize::try_from(self.size / 2).unwrap_or(usize::MAX);
        let most = half.min(MAX_TOTAL);
        let share = most.checked_div(tasks.max(1)).unwrap_or_default().min(MAX_NAMES);
        if !assigned.has_room_for(task, share, now) || !assigned.has_room(most, now) {
            return None;
        }
        let mut number = self.first_number(task, name).checked_rem(self.size)?;
        while assigned.by_number.contains_key(&number) {
            number = number.saturating_add(1).checked_rem(self.size)?;
        }
        if !is_accepted(self.at(number)) {
            return None;
        }
        assigned.by_number.insert(number, Entry { task: task.clone(), name: name.clone(), used: now });
        assigned.numbers.insert((task.clone(), name.clone()), number);
        let usage = assigned.tasks.entry(task.clone()).or_default();
        usage.names = usage.names.saturating_add(1);
        Some((self.at(number), true))
    }

    /// Returns the name that an address stands for, if it is one of this task.
    pub(crate) fn name_at(&self, task: &TaskName, ip: IpAddr, now: Instant) -> Option<HostName> {
        let number = self.number(ip)?;
        let mut assigned = self.assigned.lock();
        let entry = assigned.by_number.get_mut(&number).filter(|entry| entry.task == *task)?;
        entry.used = now;
        Some(entry.name.clone())
    }

    /// Returns whether an address stands for a name of a task. The lookup may have been before a restart.
    pub(crate) fn leads_to(
        &self,
        (task, tasks): (&TaskName, usize),
        name: &HostName,
        ip: IpAddr,
        now: Instant,
    ) -> bool {
        let is_of = |found: Synthetic| match ip {
            IpAddr::V4(ip) => found.v4 == Some(ip),
            IpAddr::V6(ip) => found.v6 == Some(ip),
        };
        self.assign_if((task, tasks), name, now, is_of).is_some_and(|(found, _)| is_of(found))
    }

    /// Returns the number at which the search for a free one begins.
    fn first_number(&self, task: &TaskName, name: &HostName) -> u32 {
        let mut hash = Sha256::new();
        hash.update(self.key.as_slice());
        hash.update(task.as_str());
        hash.update([0]);
        hash.update(name.as_str());
        hash.finalize().first_chunk().map_or(0, |bytes| u32::from_be_bytes(*bytes))
    }

    fn at(&self, number: u32) -> Synthetic {
        let mut found = Synthetic { v4: None, v6: None };
        let offset = number.saturating_add(1);
        for range in &self.ranges {
            match range {
                IpNet::V4(range) => {
                    found.v4 = Some(Ipv4Addr::from(u32::from(range.network()).saturating_add(offset)));
                }
                IpNet::V6(range) => {
                    found.v6 = Some(Ipv6Addr::from(u128::from(range.network()).saturating_add(offset.into())));
                }
            }
        }
        found
    }

    fn number(&self, ip: IpAddr) -> Option<u32> {
        let range = self.ranges.iter().find(|range| range.contains(&ip))?;
        let offset = match (ip, range) {
            (IpAddr::V4(ip), IpNet::V4(range)) => u32::from(ip).checked_sub(u32::from(range.network()))?,
            (IpAddr::V6(ip), IpNet::V6(range)) => {
                u32::try_from(u128::from(ip).checked_sub(u128::from(range.network()))?).ok()?
            }
            _ => return None,
        };
        offset.checked_sub(1).filter(|number| *number < self.size)
    }
}

impl Assigned {
    /// Returns whether a task may have another name, of fewer than `share`. If it has as many, the one that was unused for
    /// longest makes room.
    fn has_room_for(&mut self, task: &TaskName, share: usize, now: Instant) -> bool {
        let Some(usage) = self.tasks.get_mut(task).filter(|usage| usage.names >= share) else { return true };
        if usage.full_until.is_some_and(|until| now < until) {
            return false;
        }
        let own = self.by_number.iter().filter(|(_, entry)| entry.task == *task);
        match oldest(own, now) {
            Ok(number) => self.remove(number),
            Err(until) => usage.full_until = until,
        }
        self.tasks.get(task).is_none_or(|usage| usage.names < share)
    }

    /// Returns whether there may be another name, of fewer than `most`. That of any task that was unused for longest makes room.
    fn has_room(&mut self, most: usize, now: Instant) -> bool {
        if self.by_number.len() < most {
            return true;
        }
        if self.full_until.is_some_and(|until| now < until) {
            return false;
        }
        match oldest(self.by_number.iter(), now) {
            Ok(number) => self.remove(number),
            Err(until) => self.full_until = until,
        }
        self.by_number.len() < most
    }

    fn remove(&mut self, number: u32) {
        let Some(Entry { task, name, .. }) = self.by_number.remove(&number) else { return };
        if let Some(usage) = self.tasks.get_mut(&task) {
            usage.names = usage.names.saturating_sub(1);
        }
        self.numbers.remove(&(task, name));
    }
}

/// Returns the number of the entry that was unused for longest.
///
/// # Errors
/// The time when it may be reused, if it may not yet.
fn oldest<'e>(entries: impl Iterator<Item = (&'e u32, &'e Entry)>, now: Instant) -> Result<u32, Option<Instant>> {
    let (number, entry) = entries.min_by_key(|(_, entry)| entry.used).ok_or(None)?;
    let free_at = entry.used.checked_add(REUSE_AFTER);
    if free_at.is_some_and(|at| at <= now) { Ok(*number) } else { Err(free_at) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::host::Host;

    fn name(text: &str) -> HostName {
        match Host::parse(text) {
            Ok(Host::Name(name)) => name,
            other => panic!("{other:?}"),
        }
    }

    fn map(ranges: &[&str]) -> SyntheticAddresses {
        SyntheticAddresses::new(
            &ranges.iter().map(|range| range.parse().unwrap()).collect::<Vec<_>>(),
            Zeroizing::new([7; 32]),
        )
    }

    #[test]
    fn each_name_of_each_task_has_addresses_of_its_own() {
        let (map, now) = (map(&["198.18.0.0/15", "fd65:7861:6174::/96"]), Instant::now());
        let tasks = [TaskName::new("a"), TaskName::new("b")];
        let mut seen = std::collections::BTreeSet::new();
        for task in &tasks {
            for n in 0..500 {
                let name = name(&format!("n{n}.test"));
                let (found, is_new) = map.of_name((task, 1), &name, now).unwrap();
                assert!(is_new);
                assert_eq!(map.of_name((task, 1), &name, now), Some((found, false)));
                for ip in [IpAddr::from(found.v4.unwrap()), found.v6.unwrap().into()] {
                    assert!(seen.insert(ip) && map.contains(ip), "{ip}");
                    assert_eq!(map.name_at(task, ip, now), Some(name.clone()));
                    assert!(map.leads_to((task, 1), &name, ip, now));
                    let other = if *task == tasks[0] { &tasks[1] } else { &tasks[0] };
                    assert_eq!(map.name_at(other, ip, now), None);
                    assert!(!map.leads_to((other, 1), &name, ip, now));
                }
            }
        }
        for ip in ["198.18.0.0", "198.19.255.255", "198.20.0.1", "fd65:7861:6174::", "fd65:7861:6174:1::1", "::1"] {
            assert_eq!(map.name_at(&tasks[0], ip.parse().unwrap(), now), None, "{ip}");
        }
        assert!(!map.contains("198.20.0.1".parse().unwrap()));
    }

    #[test]
    fn addresses_are_the_same_after_a_restart() {
        let (before, after, now) = (map(&["198.18.0.0/15"]), map(&["198.18.0.0/15"]), Instant::now());
        let task = TaskName::new("a");
        let (found, _) = before.of_name((&task, 1), &name("api.test"), now).unwrap();
        assert!(after.leads_to((&task, 1), &name("api.test"), found.v4.unwrap().into(), now));
        assert!(!after.leads_to((&task, 1), &name("other.test"), found.v4.unwrap().into(), now));
    }

    #[test]
    fn a_full_task_reuses_what_has_long_been_unused_and_nothing_of_others() {
        let (map, now) = (map(&["198.18.0.0/15"]), Instant::now());
        let (full, other) = (TaskName::new("full"), TaskName::new("other"));
        let (others, _) = map.of_name((&other, 1), &name("old.test"), now).unwrap();
        for n in 0..MAX_NAMES {
            let used = now + Duration::from_secs(u64::try_from(n).unwrap());
            assert!(map.of_name((&full, 1), &name(&format!("n{n}.test")), used).is_some());
        }
        let late = now + REUSE_AFTER - Duration::from_millis(1);
        assert_eq!(map.of_name((&full, 1), &name("new.test"), late), None);
        // The first one is used again, so the second one is the oldest.
        let (first, _) = map.of_name((&full, 1), &name("n0.test"), late).unwrap();
        assert_eq!(map.of_name((&full, 1), &name("new.test"), now + REUSE_AFTER), None);
        let later = now + REUSE_AFTER + Duration::from_secs(1);
        assert!(map.of_name((&full, 1), &name("new.test"), later).is_some());
        assert_eq!(map.name_at(&full, first.v4.unwrap().into(), later), Some(name("n0.test")));
        assert_eq!(map.name_at(&other, others.v4.unwrap().into(), later), Some(name("old.test")));
        // The next one is younger.
        assert_eq!(map.of_name((&full, 1), &name("newer.test"), later), None);
        let size = map.assigned.lock().by_number.len();
        assert_eq!((size, map.assigned.lock().numbers.len()), (MAX_NAMES + 1, MAX_NAMES + 1));
    }

    #[test]
    fn a_small_range_is_never_more_than_half_full() {
        let (map, now, task) = (map(&["127.18.0.0/24", "fd00::/64"]), Instant::now(), TaskName::new("a"));
        let taken = (0..300).filter(|n| map.of_name((&task, 1), &name(&format!("n{n}.test")), now).is_some()).count();
        assert_eq!(taken, 127);
        // The address of another task makes room, and tells that task nothing any more.
        let (other, later) = (TaskName::new("b"), now + REUSE_AFTER);
        assert_eq!(map.of_name((&other, 1), &name("b.test"), later - Duration::from_millis(1)), None);
        let (found, _) = map.of_name((&other, 1), &name("b.test"), later).unwrap();
        assert_eq!(map.name_at(&task, found.v4.unwrap().into(), later), None);
        assert_eq!(map.assigned.lock().by_number.len(), 127);
        let names = |task: &TaskName| map.assigned.lock().tasks[task].names;
        assert_eq!((names(&task), names(&other)), (126, 1));
        // Of several tasks, none can take the share of another.
        let map = self::map(&["127.18.0.0/24"]);
        let taken = (0..300).filter(|n| map.of_name((&task, 2), &name(&format!("n{n}.test")), now).is_some()).count();
        assert_eq!(taken, 63);
        assert!(map.of_name((&other, 2), &name("b.test"), now).is_some());
        assert_eq!(
            SyntheticAddresses::new(&[], Zeroizing::new([7; 32])).of_name((&task, 1), &name("a.test"), now),
            None
        );
    }
}

//! Processor time and memory of a process and its descendants, and the clock of latencies.

use std::collections::HashMap;
use std::fs;
use std::time::SystemTime;

/// The resources that a process and its descendants have used so far.
#[derive(Clone, Copy, Default)]
pub(crate) struct Usage {
    /// Processor time in seconds.
    pub(crate) cpu: f64,
    /// Resident memory in KiB.
    pub(crate) rss_kib: u64,
}

/// Returns the usage of a process tree. Times of descendants that have ended are included.
pub(crate) fn usage(root: u32) -> Usage {
    let ticks_per_second = 100.0;
    let mut children: HashMap<u32, Vec<u32>> = HashMap::new();
    let mut own: HashMap<u32, (u64, u64)> = HashMap::new();
    for entry in fs::read_dir("/proc").unwrap().flatten() {
        let Some(pid) = entry.file_name().to_str().and_then(|name| name.parse::<u32>().ok()) else { continue };
        let Ok(stat) = fs::read_to_string(entry.path().join("stat")) else { continue };
        // The name in parentheses may contain blanks.
        let fields: Vec<&str> = stat.rsplit(')').next().unwrap_or_default().split_whitespace().collect();
        let number = |at: usize| fields.get(at).and_then(|field| field.parse::<u64>().ok()).unwrap_or_default();
        children.entry(number(1) as u32).or_default().push(pid);
        own.insert(pid, (number(11) + number(12) + number(13) + number(14), number(21) * 4));
    }
    let (mut ticks, mut rss_kib, mut open) = (0, 0, vec![root]);
    while let Some(pid) = open.pop() {
        let (used, resident) = own.get(&pid).copied().unwrap_or_default();
        ticks += used;
        rss_kib += resident;
        open.extend(children.get(&pid).into_iter().flatten());
    }
    Usage { cpu: ticks as f64 / ticks_per_second, rss_kib }
}

/// Nanoseconds of the clock that all processes of this machine share.
pub(crate) fn now_ns() -> u64 {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).map_or(0, |since| since.as_nanos() as u64)
}

/// Returns a quantile of the values, interpolated between neighbours, or 0 if there are none.
pub(crate) fn quantile(values: &mut [f64], share: f64) -> f64 {
    values.sort_by(f64::total_cmp);
    let at = values.len().saturating_sub(1) as f64 * share;
    let value = |at: f64| values.get(at as usize).copied().unwrap_or_default();
    value(at.floor()) + (value(at.ceil()) - value(at.floor())) * at.fract()
}

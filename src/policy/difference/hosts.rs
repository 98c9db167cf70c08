//! The hosts that two policies distinguish: each host that one of them names, the names below each, and all others.

use std::collections::BTreeSet;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use super::super::pattern::HostPattern;
use crate::model::host::Host;

/// Hosts that both policies treat alike.
#[derive(Clone, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum HostClass {
    /// One host.
    Exactly(Host),
    /// The names below this one, without those of other classes.
    Below(String),
    /// All other names with a dot.
    OtherNames,
    /// All other names without a dot.
    OtherSingleLabels,
    /// All other IPv4 addresses.
    OtherV4,
    /// All other IPv6 addresses.
    OtherV6,
}

/// The classes of all hosts.
#[derive(Default)]
pub(super) struct HostSpace {
    exact: BTreeSet<Host>,
    /// Names whose subdomains are a class.
    bases: BTreeSet<String>,
}

impl HostSpace {
    pub(super) fn add_host(&mut self, host: &Host) {
        self.exact.insert(host.clone());
    }

    pub(super) fn add_pattern(&mut self, pattern: &HostPattern) {
        match pattern {
            HostPattern::Exactly(host) => self.add_host(host),
            HostPattern::Below(base) => drop(self.bases.insert(base.as_str().to_owned())),
        }
    }

    /// Adds a name together with all below it.
    pub(super) fn add_name_and_below(&mut self, name: &str) {
        self.exact.extend(Host::parse(name));
        self.bases.insert(name.to_owned());
    }

    /// Returns all classes with one host of each.
    pub(super) fn classes(&self) -> Vec<(HostClass, Host)> {
        let exact = self.exact.iter().map(|host| (HostClass::Exactly(host.clone()), host.clone()));
        let below =
            self.bases.iter().filter_map(|base| Some((HostClass::Below(base.clone()), self.unnamed_below(base)?)));
        let names = self.unnamed(|n| format!("x{n}.x{n}"));
        let labels = self.unnamed(|n| format!("x{n}"));
        let v4 = (0_u32..).map(|n| Ipv4Addr::from(n.wrapping_add(0xcb00_7101)));
        let v4 = v4.map(|ip| Host::Ip(IpAddr::V4(ip))).find(|host| !self.exact.contains(host));
        let v6 = (1_u128..).map(|n| Ipv6Addr::from(n.wrapping_add(0x2001_0db8_u128.wrapping_shl(96))));
        let v6 = v6.map(|ip| Host::Ip(IpAddr::V6(ip))).find(|host| !self.exact.contains(host));
        let others = [
            (HostClass::OtherNames, names),
            (HostClass::OtherSingleLabels, labels),
            (HostClass::OtherV4, v4),
            (HostClass::OtherV6, v6),
        ];
        exact.chain(below).chain(others.into_iter().filter_map(|(class, host)| Some((class, host?)))).collect()
    }

    fn unnamed_below(&self, base: &str) -> Option<Host> {
        let class = HostClass::Below(base.to_owned());
        // A name of the greatest length has room for one letter only.
        let short = (b'a'..=b'z').map(|letter| char::from(letter).to_string());
        let labels = (0_u64..=self.size()).map(|n| format!("x{n}")).chain(short);
        let candidates = labels.filter_map(|label| Host::parse(&format!("{label}.{base}")).ok());
        let mut candidates = candidates;
        candidates.find(|host| self.class_of(host) == class)
    }

    fn unnamed(&self, name: impl Fn(u64) -> String) -> Option<Host> {
        let is_other =
            |host: &Host| matches!(self.class_of(host), HostClass::OtherNames | HostClass::OtherSingleLabels);
        (0..=self.size()).filter_map(|n| Host::parse(&name(n)).ok()).find(is_other)
    }

    /// One of so many candidates plus one is not named.
    fn size(&self) -> u64 {
        u64::try_from(self.exact.len().saturating_add(self.bases.len())).unwrap_or(u64::MAX)
    }

    /// Returns the class of a host.
    pub(super) fn class_of(&self, host: &Host) -> HostClass {
        if self.exact.contains(host) {
            return HostClass::Exactly(host.clone());
        }
        let Some(name) = host.name() else {
            let is_v4 = matches!(host.ip(), Some(IpAddr::V4(_)));
            return if is_v4 { HostClass::OtherV4 } else { HostClass::OtherV6 };
        };
        let is_below = |base: &&String| name.as_str() != base.as_str() && name.is_at_or_below(base);
        match self.bases.iter().filter(is_below).max_by_key(|base| base.len()) {
            Some(base) => HostClass::Below(base.clone()),
            None if name.as_str().contains('.') => HostClass::OtherNames,
            None => HostClass::OtherSingleLabels,
        }
    }

    /// Returns the classes of names below a base that its own class does not contain.
    pub(super) fn within(&self, base: &str) -> impl Iterator<Item = HostClass> {
        let is_below = move |name: &str| name.strip_suffix(base).is_some_and(|rest| rest.ends_with('.'));
        let exact = self.exact.iter().filter(move |host| host.name().is_some_and(|name| is_below(name.as_str())));
        let bases = self.bases.iter().filter(move |name| is_below(name));
        exact.cloned().map(HostClass::Exactly).chain(bases.cloned().map(HostClass::Below))
    }
}

impl std::fmt::Display for HostClass {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Exactly(host) => host.fmt(f),
            Self::Below(base) => write!(f, "*.{base}"),
            Self::OtherNames => f.write_str("any other name"),
            Self::OtherSingleLabels => f.write_str("any other name without a dot"),
            Self::OtherV4 => f.write_str("any other IPv4 address"),
            Self::OtherV6 => f.write_str("any other IPv6 address"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_class_has_a_host_of_its_own() {
        let mut space = HostSpace::default();
        for pattern in ["a.test", "*.a.test", "x0.a.test", "*.x1.a.test", "x0.x0", "x0", "203.0.113.1", "2001:db8::1"] {
            space.add_pattern(&HostPattern::parse_wide(pattern).unwrap());
        }
        space.add_name_and_below("local");
        let classes = space.classes();
        assert_eq!(classes.len(), 8 + 2 + 4, "{classes:?}");
        for (class, host) in &classes {
            assert_eq!(space.class_of(host), *class, "{host}");
        }
        let of = |host: &str| space.class_of(&Host::parse(host).unwrap()).to_string();
        let rows = [
            ("a.test", "a.test"),
            ("b.a.test", "*.a.test"),
            ("c.b.a.test", "*.a.test"),
            ("x1.a.test", "*.a.test"),
            ("b.x1.a.test", "*.x1.a.test"),
            ("ba.test", "any other name"),
            ("printer.local", "*.local"),
            ("intranet", "any other name without a dot"),
            ("192.0.2.1", "any other IPv4 address"),
            ("[2001:db8::2]", "any other IPv6 address"),
        ];
        for (host, want) in rows {
            assert_eq!(of(host), want, "{host}");
        }
        let within: Vec<String> = space.within("a.test").map(|class| class.to_string()).collect();
        assert_eq!(within, ["x0.a.test", "*.x1.a.test"]);
    }
}

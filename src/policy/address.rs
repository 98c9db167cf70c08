//! Classifies addresses as public or special-purpose, for literal addresses and DNS answers alike.
//!
//! Sources: the IANA IPv4 and IPv6 Special-Purpose Address Registries (RFC 6890 and its updates),
//! RFC 5771 and RFC 4291 for multicast, and cloud providers' metadata services. Every block of the
//! registries is denied, including those marked globally reachable: no ordinary origin is in them.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use ipnet::{IpNet, Ipv4Net, Ipv6Net};

/// The class of an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Class {
    /// A cloud metadata service. Only an entry for exactly this address allows it.
    Metadata,
    /// Ordinary global unicast.
    Public,
    /// An address in a special-purpose block, with the block's name.
    Special(&'static str),
}

/// The blocks that are allowed or denied for one destination.
#[derive(Clone, Copy, Debug, Default)]
pub struct Cidrs<'a> {
    /// Special-purpose blocks that `[network].allow_cidrs` allows, where it applies.
    pub network: &'a [IpNet],
    /// Special-purpose blocks that the matching integrations allow.
    pub integrations: &'a [&'a [IpNet]],
    /// Denied blocks. They take precedence.
    pub deny: &'a [IpNet],
}

/// The reason why an address may not be dialled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Denied(&'static str);

impl Denied {
    /// Returns the block's name, for the audit record.
    #[must_use]
    pub fn block(self) -> &'static str {
        self.0
    }
}

/// Checks an address and the IPv4 addresses embedded in it. All of them must be allowed.
///
/// # Errors
/// [`Denied`] with the name of the block that contains the address.
pub fn check(ip: IpAddr, cidrs: Cidrs<'_>) -> Result<(), Denied> {
    check_one(ip, cidrs)?;
    embedded_v4(ip).into_iter().try_for_each(|inner| check_one(inner.into(), cidrs))
}

/// Classifies one address, without the addresses embedded in it.
#[must_use]
pub fn classify(ip: IpAddr) -> Class {
    match ip {
        IpAddr::V4(ip) => classify_v4(ip),
        IpAddr::V6(ip) => classify_v6(ip),
    }
}

/// Returns a special-purpose block of more than one address that a network contains completely, with its name.
#[must_use]
pub fn covered_block(net: &IpNet) -> Option<(IpNet, &'static str)> {
    let of_v4 = SPECIAL_V4.iter().map(|(block, name)| (IpNet::from(*block), *name));
    let of_v6 = SPECIAL_V6.iter().chain(&PARTS_V6).map(|(block, name)| (IpNet::from(*block), *name));
    of_v4.chain(of_v6).find(|(block, _)| block.prefix_len() < block.max_prefix_len() && net.contains(block))
}

/// Returns the IPv4 addresses embedded in an IPv6 address: mapped, compatible, translated (RFC 2765),
/// NAT64 (RFC 6052, also at the positions of its local prefix), ISATAP (RFC 5214), 6to4 (RFC 3056),
/// and the Teredo client (RFC 4380 §4, with inverted bits).
#[must_use]
pub fn embedded_v4(ip: IpAddr) -> Vec<Ipv4Addr> {
    let IpAddr::V6(ip) = ip else { return Vec::new() };
    if ip.is_unspecified() || ip.is_loopback() {
        // They are in the compatible block but embed no IPv4 address (RFC 4291 §2.5.5.1).
        return Vec::new();
    }
    let bits = ip.to_bits();
    let at = |shift: u32| Ipv4Addr::from_bits((bits >> shift) as u32);
    let mut found = Vec::new();
    if EMBEDDING.iter().any(|net| net.contains(&ip)) || is_isatap(ip) {
        found.push(at(0));
    }
    if LOCAL_NAT64.contains(&ip) {
        // With a 48-bit prefix, the address is split around byte 8 (RFC 6052 §2.2).
        let (high, low) = ((bits >> 64) as u32 & 0xffff, (bits >> 40) as u32 & 0xffff);
        found.extend([at(0), Ipv4Addr::from_bits(high << 16 | low)]);
    }
    if SIX_TO_FOUR.contains(&ip) {
        found.push(at(80));
    }
    if TEREDO.contains(&ip) {
        found.push(Ipv4Addr::from_bits(!at(0).to_bits()));
    }
    found
}

fn check_one(ip: IpAddr, cidrs: Cidrs<'_>) -> Result<(), Denied> {
    let within = |nets: &[IpNet]| nets.iter().any(|net| net.contains(&ip));
    let named = |nets: &[IpNet]| nets.iter().any(|net| net.contains(&ip) && net.prefix_len() == net.max_prefix_len());
    let allowed = |by: &dyn Fn(&[IpNet]) -> bool| by(cidrs.network) || cidrs.integrations.iter().any(|nets| by(nets));
    if within(cidrs.deny) {
        return Err(Denied("deny_cidrs"));
    }
    match classify(ip) {
        Class::Public => Ok(()),
        Class::Metadata if allowed(&named) => Ok(()),
        Class::Metadata => Err(Denied("cloud metadata")),
        Class::Special(_) if allowed(&within) => Ok(()),
        Class::Special(block) => Err(Denied(block)),
    }
}

fn classify_v4(ip: Ipv4Addr) -> Class {
    if METADATA_V4.contains(&ip) {
        return Class::Metadata;
    }
    match SPECIAL_V4.iter().find(|(net, _)| net.contains(&ip)) {
        Some((_, block)) => Class::Special(block),
        None => Class::Public,
    }
}

fn classify_v6(ip: Ipv6Addr) -> Class {
    if METADATA_V6.contains(&ip) {
        return Class::Metadata;
    }
    match SPECIAL_V6.iter().find(|(net, _)| net.contains(&ip)) {
        Some((_, block)) => Class::Special(block),
        // For NAT64's well-known prefix, only the embedded address counts (RFC 6052 §3.1).
        None if NAT64.contains(&ip) => Class::Public,
        // Only 2000::/3 has been allocated (IANA IPv6 Address Space).
        None if GLOBAL_UNICAST.contains(&ip) => Class::Public,
        None => Class::Special("not global unicast"),
    }
}

/// Returns true for interface identifiers `[02]00:5efe:a.b.c.d` under any prefix (RFC 5214 §6.1).
fn is_isatap(ip: Ipv6Addr) -> bool {
    matches!((ip.to_bits() >> 32) as u32, 0x0000_5efe | 0x0200_5efe)
}

const fn v4(a: u8, b: u8, c: u8, d: u8, len: u8) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(a, b, c, d), len)
}

const fn v6(bits: u128, len: u8) -> Ipv6Net {
    Ipv6Net::new_assert(Ipv6Addr::from_bits(bits), len)
}

/// AWS for tasks and pods; GCP and most others; Azure (a public address); Alibaba; Oracle.
const METADATA_V4: [Ipv4Addr; 6] = [
    Ipv4Addr::new(169, 254, 170, 2),
    Ipv4Addr::new(169, 254, 170, 23),
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(100, 100, 100, 200),
    Ipv4Addr::new(192, 0, 0, 192),
];
/// AWS (instances, pods), GCP.
const METADATA_V6: [Ipv6Addr; 3] = [
    Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x254),
    Ipv6Addr::new(0xfd00, 0x0ec2, 0, 0, 0, 0, 0, 0x23),
    Ipv6Addr::new(0xfd20, 0x00ce, 0, 0, 0, 0, 0, 0x254),
];

const GLOBAL_UNICAST: Ipv6Net = v6(0x2000 << 112, 3);
const NAT64: Ipv6Net = v6(0x0064_ff9b << 96, 96);
const MAPPED: Ipv6Net = v6(0xffff << 32, 96);
const TRANSLATED: Ipv6Net = v6(0xffff << 48, 96);
const COMPATIBLE: Ipv6Net = v6(0, 96);
const LOCAL_NAT64: Ipv6Net = v6(0x0064_ff9b_0001 << 80, 48);
const SIX_TO_FOUR: Ipv6Net = v6(0x2002 << 112, 16);
const TEREDO: Ipv6Net = v6(0x2001_0000 << 96, 32);
const EMBEDDING: [Ipv6Net; 4] = [NAT64, MAPPED, TRANSLATED, COMPATIBLE];

/// The first matching block determines the name, so narrower blocks come before wider ones.
const SPECIAL_V4: [(Ipv4Net, &str); 20] = [
    (v4(255, 255, 255, 255, 32), "limited broadcast"),
    (v4(0, 0, 0, 0, 8), "this network"),
    (v4(10, 0, 0, 0, 8), "private use"),
    (v4(100, 64, 0, 0, 10), "carrier-grade NAT"),
    (v4(127, 0, 0, 0, 8), "loopback"),
    (v4(169, 254, 0, 0, 16), "link-local"),
    (v4(172, 16, 0, 0, 12), "private use"),
    (v4(192, 0, 0, 0, 24), "IETF protocol assignments"),
    (v4(192, 0, 2, 0, 24), "documentation (TEST-NET-1)"),
    (v4(192, 31, 196, 0, 24), "AS112-v4"),
    (v4(192, 52, 193, 0, 24), "AMT"),
    (v4(192, 88, 99, 0, 24), "6to4 relay anycast"),
    (v4(192, 168, 0, 0, 16), "private use"),
    (v4(192, 175, 48, 0, 24), "AS112 direct delegation"),
    (v4(198, 18, 0, 0, 15), "benchmarking"),
    (v4(198, 51, 100, 0, 24), "documentation (TEST-NET-2)"),
    (v4(203, 0, 113, 0, 24), "documentation (TEST-NET-3)"),
    (v4(233, 252, 0, 0, 24), "documentation (MCAST-TEST-NET)"),
    (v4(224, 0, 0, 0, 4), "multicast"),
    (v4(240, 0, 0, 0, 4), "reserved"),
];

/// Like [`SPECIAL_V4`]. `64:ff9b::/96` is omitted on purpose: see [`classify_v6`].
const SPECIAL_V6: [(Ipv6Net, &str); 24] = [
    (v6(0, 128), "unspecified"),
    (v6(1, 128), "loopback"),
    (MAPPED, "IPv4-mapped"),
    (TRANSLATED, "IPv4-translated"),
    (COMPATIBLE, "IPv4-compatible"),
    (LOCAL_NAT64, "IPv4-IPv6 translation, local use"),
    (v6(0x0100 << 112, 64), "discard-only"),
    (v6(0x0100_0000_0000_0001 << 64, 64), "dummy prefix"),
    (TEREDO, "Teredo"),
    (v6(0x2001_0002_0000 << 80, 48), "benchmarking"),
    (v6(0x2001_0003 << 96, 32), "AMT"),
    (v6(0x2001_0004_0112 << 80, 48), "AS112-v6"),
    (v6(0x2001_0010 << 96, 28), "ORCHID"),
    (v6(0x2001_0020 << 96, 28), "ORCHIDv2"),
    (v6(0x2001_0030 << 96, 28), "drone remote ID"),
    (v6(0x2001_0000 << 96, 23), "IETF protocol assignments"),
    (v6(0x2001_0db8 << 96, 32), "documentation"),
    (SIX_TO_FOUR, "6to4"),
    (v6(0x2620_004f_8000 << 80, 48), "AS112 direct delegation"),
    (v6(0x3fff << 112, 20), "documentation"),
    (v6(0x5f00 << 112, 16), "SRv6 SIDs"),
    (v6(0xfc00 << 112, 7), "unique local"),
    (v6(0xfe80 << 112, 9), "link-local or site-local"),
    (v6(0xff00 << 112, 8), "multicast"),
];

/// The parts of wider blocks that are in use: locally assigned (RFC 4193 §3.1) and link-local addresses.
const PARTS_V6: [(Ipv6Net, &str); 2] = [(v6(0xfd00 << 112, 8), "unique local"), (v6(0xfe80 << 112, 10), "link-local")];

#[cfg(test)]
mod tests {
    use super::*;

    fn ip(text: &str) -> IpAddr {
        text.parse().unwrap()
    }

    fn nets(list: &[&str]) -> Vec<IpNet> {
        list.iter().map(|n| n.parse().unwrap()).collect()
    }

    /// `(first, last, neighbour below, neighbour above)`. A neighbour marked `!` is in another special block.
    const BLOCKS: &[(&str, &str, &str, &str)] = &[
        ("0.0.0.0", "0.255.255.255", "", "1.0.0.0"),
        ("10.0.0.0", "10.255.255.255", "9.255.255.255", "11.0.0.0"),
        ("100.64.0.0", "100.127.255.255", "100.63.255.255", "100.128.0.0"),
        ("127.0.0.0", "127.255.255.255", "126.255.255.255", "128.0.0.0"),
        ("169.254.0.0", "169.254.255.255", "169.253.255.255", "169.255.0.0"),
        ("172.16.0.0", "172.31.255.255", "172.15.255.255", "172.32.0.0"),
        ("192.0.0.0", "192.0.0.255", "191.255.255.255", "192.0.1.0"),
        ("192.0.2.0", "192.0.2.255", "192.0.1.255", "192.0.3.0"),
        ("192.31.196.0", "192.31.196.255", "192.31.195.255", "192.31.197.0"),
        ("192.52.193.0", "192.52.193.255", "192.52.192.255", "192.52.194.0"),
        ("192.88.99.0", "192.88.99.255", "192.88.98.255", "192.88.100.0"),
        ("192.168.0.0", "192.168.255.255", "192.167.255.255", "192.169.0.0"),
        ("192.175.48.0", "192.175.48.255", "192.175.47.255", "192.175.49.0"),
        ("198.18.0.0", "198.19.255.255", "198.17.255.255", "198.20.0.0"),
        ("198.51.100.0", "198.51.100.255", "198.51.99.255", "198.51.101.0"),
        ("203.0.113.0", "203.0.113.255", "203.0.112.255", "203.0.114.0"),
        ("224.0.0.0", "239.255.255.255", "223.255.255.255", "!240.0.0.0"),
        ("233.252.0.0", "233.252.0.255", "!233.251.255.255", "!233.252.1.0"),
        ("240.0.0.0", "255.255.255.254", "!239.255.255.255", "!255.255.255.255"),
        ("255.255.255.255", "255.255.255.255", "!255.255.255.254", ""),
        ("::", "::", "", "!::1"),
        ("::1", "::1", "!::", "!::2"),
        ("::2", "::ffff:ffff", "!::1", "!::1:0:0"),
        ("::ffff:0:0", "::ffff:ffff:ffff", "!::fffe:ffff:ffff", "!::1:0:0:0"),
        ("::ffff:0:0:0", "::ffff:0:ffff:ffff", "!::fffe:ffff:ffff:ffff", "!::ffff:1:0:0"),
        ("64:ff9b:1::", "64:ff9b:1:ffff:ffff:ffff:ffff:ffff", "!64:ff9b:0:ffff:ffff:ffff:ffff:ffff", "!64:ff9b:2::"),
        ("100::", "100::ffff:ffff:ffff:ffff", "!ff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!100:0:0:1::"),
        ("100:0:0:1::", "100:0:0:1:ffff:ffff:ffff:ffff", "!100::ffff:ffff:ffff:ffff", "!100:0:0:2::"),
        ("2001::", "2001:0:ffff:ffff:ffff:ffff:ffff:ffff", "2000:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:1::"),
        ("2001:2::", "2001:2:0:ffff:ffff:ffff:ffff:ffff", "!2001:1:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:2:1::"),
        ("2001:3::", "2001:3:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:2:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:4::"),
        (
            "2001:4:112::",
            "2001:4:112:ffff:ffff:ffff:ffff:ffff",
            "!2001:4:111:ffff:ffff:ffff:ffff:ffff",
            "!2001:4:113::",
        ),
        ("2001:10::", "2001:1f:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:f:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:20::"),
        ("2001:20::", "2001:2f:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:1f:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:30::"),
        ("2001:30::", "2001:3f:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:2f:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:40::"),
        ("2001:1::", "2001:1ff:ffff:ffff:ffff:ffff:ffff:ffff", "!2001:0:ffff:ffff:ffff:ffff:ffff:ffff", "2001:200::"),
        (
            "2001:db8::",
            "2001:db8:ffff:ffff:ffff:ffff:ffff:ffff",
            "2001:db7:ffff:ffff:ffff:ffff:ffff:ffff",
            "2001:db9::",
        ),
        ("2002::", "2002:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2001:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "2003::"),
        (
            "2620:4f:8000::",
            "2620:4f:8000:ffff:ffff:ffff:ffff:ffff",
            "2620:4f:7fff:ffff:ffff:ffff:ffff:ffff",
            "2620:4f:8001::",
        ),
        ("3fff::", "3fff:fff:ffff:ffff:ffff:ffff:ffff:ffff", "3ffe:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "3fff:1000::"),
        ("4000::", "5eff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "3fff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!5f00::"),
        ("5f00::", "5f00:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!5eff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!5f01::"),
        ("fc00::", "fdff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!fbff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!fe00::"),
        ("fe80::", "febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!fe7f:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!fec0::"),
        ("fec0::", "feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!febf:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!ff00::"),
        ("ff00::", "ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", "!feff:ffff:ffff:ffff:ffff:ffff:ffff:ffff", ""),
    ];

    #[test]
    fn denies_every_special_block_to_its_very_edges() {
        for (first, last, below, above) in BLOCKS {
            for inside in [first, last] {
                assert!(check(ip(inside), Cidrs::default()).is_err(), "{inside} is special");
            }
            for neighbour in [below, above].into_iter().filter(|n| !n.is_empty()) {
                let (address, denied) = match neighbour.strip_prefix('!') {
                    Some(address) => (address, true),
                    None => (*neighbour, false),
                };
                assert_eq!(check(ip(address), Cidrs::default()).is_err(), denied, "{address} next to {first}");
            }
        }
    }

    /// Fails for a row of `SPECIAL_*` without a test row.
    #[test]
    fn every_row_of_the_table_has_a_row_in_the_test() {
        let firsts: Vec<IpAddr> = BLOCKS.iter().map(|row| ip(row.0)).collect();
        let lasts: Vec<IpAddr> = BLOCKS.iter().map(|row| ip(row.1)).collect();
        let covered = |net: IpNet| firsts.contains(&net.network()) || lasts.contains(&net.broadcast());
        for (net, block) in SPECIAL_V4 {
            assert!(covered(net.into()), "{block} {net}");
        }
        for (net, block) in SPECIAL_V6 {
            assert!(covered(net.into()), "{block} {net}");
        }
    }

    #[test]
    fn public_addresses_pass() {
        for address in
            ["1.1.1.1", "8.8.8.8", "140.82.112.3", "223.255.255.255", "2606:4700::1111", "2a00:1450:4001::200e"]
        {
            assert_eq!(check(ip(address), Cidrs::default()), Ok(()), "{address}");
        }
    }

    #[test]
    fn checks_every_embedding_form() {
        // (address, denied by default, denied if the outer form itself is allowed)
        let rows = [
            ("::ffff:10.0.0.1", true, true),
            ("::ffff:8.8.8.8", true, false),
            ("::10.0.0.1", true, true),
            ("::8.8.8.8", true, false),
            ("::ffff:0:10.0.0.1", true, true),
            ("::ffff:0:8.8.8.8", true, false),
            ("64:ff9b::10.0.0.1", true, true),
            ("64:ff9b::169.254.169.254", true, true),
            ("64:ff9b::8.8.8.8", false, false),
            ("2a00:1450::5efe:10.0.0.1", true, true),
            ("2a00:1450::200:5efe:127.0.0.1", true, true),
            ("2a00:1450::5efe:8.8.8.8", false, false),
            ("fe80::5efe:10.0.0.1", true, true),
            ("2002:0a00:0001::", true, true),
            ("2002:0808:0808::", true, false),
            ("2002:a9fe:a9fe::1", true, true),
            ("2001:0:4136:e378:8000:63bf:f5ff:fffe", true, true),
            ("2001:0:4136:e378:8000:63bf:f7f7:f7f7", true, false),
            ("64:ff9b:1::a9fe:a9fe", true, true),
            ("64:ff9b:1:0808:8:800:0808:0808", true, false),
            ("64:ff9b:1:0a00:0:100:0808:0808", true, true),
        ];
        let outer = nets(&[
            "::/96",
            "::ffff:0:0/96",
            "::ffff:0:0:0/96",
            "fe80::/10",
            "2002::/16",
            "2001::/32",
            "64:ff9b:1::/48",
        ]);
        for (address, denied, denied_inside) in rows {
            assert_eq!(check(ip(address), Cidrs::default()).is_err(), denied, "{address}");
            let opened = Cidrs { network: &outer, ..Cidrs::default() };
            assert_eq!(check(ip(address), opened).is_err(), denied_inside, "{address} with the outer form allowed");
        }
    }

    #[test]
    fn metadata_is_allowed_only_by_its_own_address() {
        for address in [
            "169.254.169.254",
            "169.254.170.2",
            "168.63.129.16",
            "100.100.100.200",
            "192.0.0.192",
            "fd00:ec2::254",
            "fd20:ce::254",
        ] {
            let everything = nets(&["0.0.0.0/0", "::/0"]);
            let exact = vec![IpNet::from(ip(address))];
            let wide = Cidrs { network: &everything, ..Cidrs::default() };
            let named = Cidrs { network: &exact, ..Cidrs::default() };
            assert_eq!(check(ip(address), wide), Err(Denied("cloud metadata")), "{address}");
            assert_eq!(check(ip(address), named), Ok(()), "{address}");
        }
    }

    #[test]
    fn allow_permits_its_blocks_and_deny_wins() {
        let (ten, two, all) = (nets(&["10.0.0.0/8"]), nets(&["10.2.0.0/16"]), nets(&["8.8.8.0/24"]));
        let integrations: &[&[IpNet]] = &[&ten];
        let by_integration = Cidrs { integrations, ..Cidrs::default() };
        assert_eq!(check(ip("10.1.2.3"), by_integration), Ok(()));
        assert!(check(ip("192.168.0.1"), by_integration).is_err());
        let loopback = nets(&["::1/128"]);
        let six = Cidrs { network: &loopback, ..Cidrs::default() };
        assert_eq!((check(ip("::1"), six), check(ip("::2"), six).is_err()), (Ok(()), true));
        let both = Cidrs { network: &ten, deny: &two, ..Cidrs::default() };
        assert_eq!(check(ip("10.1.2.3"), both), Ok(()));
        assert_eq!(check(ip("10.2.0.1"), both), Err(Denied("deny_cidrs")));
        let public = Cidrs { deny: &all, ..Cidrs::default() };
        assert_eq!(check(ip("8.8.8.8"), public), Err(Denied("deny_cidrs")));
        assert_eq!(check(ip("64:ff9b::8.8.8.8"), public), Err(Denied("deny_cidrs")), "also inside");
    }
}

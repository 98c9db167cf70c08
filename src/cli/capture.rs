//! `exeat capture`: the nftables rules that lead a sandbox's connections to the transparent and the DNS listener, and refuse
//! everything else that would leave (nft(8)).

use std::fs;
use std::io::{self, Write};
use std::ops::RangeInclusive;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::{Args, Subcommand};

use super::terminal::{print, say};
use super::{Exit, paths};
use crate::policy::settings::{ListenAt, ListenerMode, Settings};

/// The table with all of the rules.
const TABLE: &str = "inet exeat";
/// The bits of a connection's mark that say that it was let out, and that it came from outside. A socket that has been closed with data
/// left to send has no user any more.
const LET_OUT: &str = "0x10000000";
const FROM_OUTSIDE: &str = "0x20000000";
/// The priority of the rules that redirect. Others, such as Docker's for its resolver, have -100, and the first redirection counts.
const REDIRECT: i32 = -110;
/// The priority of the rules about source addresses, before any redirection.
const SOURCES: i32 = -150;
/// The port of DNS.
const DNS: u16 = 53;
/// The address of Docker's resolver in the networks of containers. It listens at other ports than 53, and forwards queries.
const DOCKER_RESOLVER: &str = "127.0.0.11";
/// The ICMPv6 messages without which no neighbour is reached (RFC 4861). The kernel sends them. Reports of multicast groups are not among
/// them: whoever joins a group chooses its bytes.
const NEIGHBOURS: &str = "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit } accept";

#[derive(Subcommand)]
pub(super) enum CaptureAction {
    /// Load the rules with nft, in place of those that it has loaded before
    ///
    /// All or none of them are loaded. It needs root, or CAP_NET_ADMIN. Without --only and --interface, the connections of
    /// all users of this machine or container are captured, except those of the daemon's user and those to its own addresses.
    Install(CaptureArgs),
    /// Remove the rules
    Remove,
    /// Print the rules, for `nft -f -`
    Print(CaptureArgs),
}

#[derive(Args)]
pub(super) struct CaptureArgs {
    /// The user that the daemon runs as, by name or number, whose connections are not captured [default: the own one]
    #[arg(long, value_name = "USER")]
    user: Option<String>,
    /// Capture only the connections of this user. Can be repeated
    #[arg(long, value_name = "USER")]
    only: Vec<String>,
    /// Capture what arrives by this interface, and nothing of this machine's own: for sandboxes in networks of their own, for
    /// which it is the only way out. With --only, both. Can be repeated
    #[arg(long, value_name = "NAME")]
    interface: Vec<String>,
}

pub(super) fn run(config: Option<&Path>, action: &CaptureAction) -> Exit {
    let args = match action {
        // Declared first, because it may not exist.
        CaptureAction::Remove => return load(&format!("table {TABLE}\ndelete table {TABLE}\n")),
        CaptureAction::Install(args) | CaptureAction::Print(args) => args,
    };
    let settings = match paths::load_offline(config) {
        Ok(loaded) => loaded.settings,
        Err(problems) => {
            paths::report_problems(config, &problems);
            return Exit::Usage;
        }
    };
    let rules = match Captured::new(args, &settings) {
        Ok(captured) => captured.rules(),
        Err(problem) => {
            say(format_args!("exeat: {problem}"));
            return Exit::Usage;
        }
    };
    match action {
        CaptureAction::Install(args) => match args.interface.iter().find_map(|name| unmatched(name)) {
            Some(problem) => {
                say(format_args!("exeat: {problem}"));
                Exit::Usage
            }
            None => load(&rules),
        },
        _ => {
            print(rules);
            Exit::Done
        }
    }
}

/// Loads rules, all or none of them.
fn load(rules: &str) -> Exit {
    match nft(rules) {
        Ok(true) => Exit::Done,
        Ok(false) => {
            say("exeat: nft has refused the rules, and nothing has been changed");
            Exit::Failed
        }
        Err(error) => {
            say(format_args!(
                "exeat: nft: {error}; install nftables, or load what `exeat capture print` prints with nft -f - elsewhere"
            ));
            Exit::Failed
        }
    }
}

fn nft(rules: &str) -> io::Result<bool> {
    let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn()?;
    if let Some(mut input) = child.stdin.take() {
        input.write_all(rules.as_bytes())?;
    }
    Ok(child.wait()?.success())
}

/// The ports of a listener's addresses, by family. A family without one is refused.
#[derive(Clone, Copy, Default)]
struct Ports {
    v4: Option<u16>,
    v6: Option<u16>,
}

/// The connections to capture, and the listeners that they are led to.
struct Captured {
    /// The daemon's user.
    user: u32,
    /// Users, as elements of a set: numbers and ranges. All are captured if there are none.
    only: Vec<String>,
    interfaces: Vec<String>,
    transparent: Ports,
    dns: Ports,
    /// The ports of the listeners for clients that use the proxy as such, which may be reached from the interfaces.
    proxies: Vec<u16>,
    /// The ports of the listeners for operators, which captured users may not reach.
    operators: Vec<u16>,
}

impl Captured {
    fn new(args: &CaptureArgs, settings: &Settings) -> Result<Self, String> {
        let user = match &args.user {
            Some(user) => user_id(user, "--user")?,
            None => rustix::process::geteuid().as_raw(),
        };
        if user == 0 {
            return Err(
                "--user: name the user that the daemon runs as. Root cannot be exempt: whatever runs as root would be \
                        exempt, too"
                    .to_owned(),
            );
        }
        let ids = args.only.iter().map(|user| user_id(user, "--only")).collect::<Result<Vec<_>, _>>()?;
        let only: Vec<UserRange> =
            ids.iter().zip(&args.only).flat_map(|(id, name)| with_subordinates(*id, name)).collect();
        if only.iter().any(|range| range.contains(&user)) {
            return Err("--only: the users include the daemon's, whose connections would lead back to it".to_owned());
        }
        if let Some(name) = args.interface.iter().find(|name| !is_interface(name)) {
            return Err(format!("--interface: {name:?} is not the name of an interface"));
        }
        let by_network = !args.interface.is_empty();
        let transparent = ports(settings, ListenerMode::Transparent, by_network);
        if transparent.v4.or(transparent.v6).is_none() {
            let wanted = if by_network { "[::]" } else { "127.0.0.1 or [::]" };
            return Err(format!(
                "the configuration has no listener with mode = \"transparent\" to lead connections to, at {wanted} and a fixed port"
            ));
        }
        let dns = ports(settings, ListenerMode::Dns, by_network);
        if dns.v4.or(dns.v6).is_none() {
            say(
                "exeat: warning: the configuration has no such listener with mode = \"dns\", so names cannot be looked up",
            );
        }
        let listeners = settings.proxy.listeners.iter();
        let direct = listeners.filter(|one| matches!(one.mode, ListenerMode::Proxy | ListenerMode::Socks5));
        let tcp_ports = |all: Vec<&ListenAt>| -> Vec<u16> {
            all.into_iter().filter_map(ListenAt::tcp).map(|at| at.port()).filter(|port| *port != 0).collect()
        };
        Ok(Self {
            user,
            only: only.iter().map(element).collect(),
            interfaces: args.interface.clone(),
            transparent,
            dns,
            proxies: tcp_ports(direct.map(|one| &one.at).collect()),
            operators: tcp_ports(settings.admin.listen.iter().chain(&settings.metrics.listen).collect()),
        })
    }

    /// Returns the rules, which replace those that were there before in one step.
    fn rules(&self) -> String {
        let mut out = format!(
            "# The rules of `exeat capture`: connections lead to the proxy, and nothing else leaves.\n\
             table {TABLE}\ndelete table {TABLE}\ntable {TABLE} {{\n"
        );
        if self.interfaces.is_empty() || !self.only.is_empty() {
            self.own(&mut out);
        }
        if !self.interfaces.is_empty() {
            self.arriving(&mut out);
        }
        out.push_str("}\n");
        out
    }

    /// The rules for connections of this machine or container.
    fn own(&self, out: &mut String) {
        let user = self.user;
        let let_out = format!("ct mark set ct mark | {LET_OUT} accept");
        let others = set(&self.only).map(|users| format!("meta skuid != {users}"));
        let captured =
            set(&self.only).map_or_else(|| format!("meta skuid != {user}"), |users| format!("meta skuid {users}"));
        let answer = format!("ct direction reply ct mark & {FROM_OUTSIDE} == {FROM_OUTSIDE} accept");
        // Another machine's address needs no privilege with IPv6. The answer to such a packet would leave.
        let sources = [format!("{captured} fib saddr type != local drop")];
        chain(out, "own_sources", &hook("filter", "output", SOURCES), &sources);
        let [dns, all] = self.redirects();
        let mut redirects = vec![format!("meta skuid {user} accept")];
        redirects.extend(others.iter().map(|others| format!("{others} accept")));
        // Resolvers of this machine forward queries.
        redirects.extend(dns);
        redirects.push("fib daddr type local accept".to_owned());
        redirects.extend(all);
        chain(out, "own", &hook("nat", "output", REDIRECT), &redirects);
        // Captured users: never by the mark, because they may use the ports of a connection of the daemon that has ended.
        let mut decided: Vec<String> = others.iter().map(|others| format!("{others} {let_out}")).collect();
        decided.push(format!("ip daddr {DOCKER_RESOLVER} reject"));
        if let Some(ports) = set(&self.operators) {
            decided.push(format!("fib daddr type local tcp dport {ports} reject with tcp reset"));
        }
        decided.push("fib daddr type local accept".to_owned());
        // No answer, though it may look like that of a connection that has ended.
        decided.push("tcp flags & (syn | ack) == syn reject with tcp reset".to_owned());
        decided.push(answer.clone());
        decided.extend(refusals());
        chain(out, "own_captured", "", &decided);
        // Packets without a user: of sockets that have been closed, and of the kernel.
        let mut rest = vec![
            format!("meta skuid {user} {let_out}"),
            format!("meta skuid != {user} goto own_captured"),
            format!("ct mark & {LET_OUT} == {LET_OUT} accept"),
            answer.clone(),
            NEIGHBOURS.to_owned(),
            "fib daddr type local accept".to_owned(),
        ];
        match others {
            // The machine is not the sandbox's alone.
            Some(_) => rest.push("accept".to_owned()),
            None => rest.push("drop".to_owned()),
        }
        chain(out, "own_rest", &hook("filter", "output", 0), &rest);
        // Not UDP, nor the rest of a connection: any packet would open its sender to whoever takes the port that it was for.
        let from_outside = format!("ct state new ct mark set ct mark | {FROM_OUTSIDE}");
        let arrived = [
            format!("iifname != \"lo\" tcp flags & (fin | syn | rst | ack) == syn {from_outside}"),
            format!("iifname != \"lo\" meta l4proto {{ icmp, icmpv6 }} {from_outside}"),
        ];
        chain(out, "own_arrived", &hook("filter", "input", 0), &arrived);
        // A socket may be bound to an interface, also for an address of this machine.
        let leaving = ["oifname \"lo\" accept".to_owned(), format!("{captured} {answer}"), format!("{captured} drop")];
        chain(out, "own_leaving", &hook("filter", "postrouting", 0), &leaving);
    }

    /// The rules for what arrives by the interfaces.
    fn arriving(&self, out: &mut String) {
        let names: Vec<String> = self.interfaces.iter().map(|name| format!("\"{name}\"")).collect();
        let elsewhere = format!("iifname != {{ {} }} accept", names.join(", "));
        // The answer to a packet with the address of another machine would go there.
        let without_address = "ip6 saddr :: icmpv6 type { nd-neighbor-solicit, nd-router-solicit } accept".to_owned();
        let sources = [elsewhere.clone(), without_address, "fib saddr . iif oif missing drop".to_owned()];
        chain(out, "arriving_sources", &hook("filter", "prerouting", SOURCES), &sources);
        let proxies = set(&self.proxies).map(|ports| format!("fib daddr type local tcp dport {ports} accept"));
        let mut redirects = vec![elsewhere.clone()];
        redirects.extend(proxies.clone());
        redirects.extend(self.redirects().concat());
        chain(out, "arriving", &hook("nat", "prerouting", REDIRECT), &redirects);
        let mut here = vec![elsewhere.clone()];
        here.extend(proxies);
        let dns: Vec<u16> = self.dns.v4.into_iter().chain(self.dns.v6).collect();
        let tcp: Vec<u16> = dns.iter().copied().chain(self.transparent.v4).chain(self.transparent.v6).collect();
        here.extend(set(&tcp).map(|ports| format!("ct status dnat tcp dport {ports} accept")));
        here.extend(set(&dns).map(|ports| format!("ct status dnat udp dport {ports} accept")));
        // A query to the own address is not led elsewhere, if the listener is at the usual port.
        if dns.contains(&DNS) {
            here.extend(["udp", "tcp"].map(|protocol| format!("fib daddr type local {protocol} dport {DNS} accept")));
        }
        // Errors about these connections, such as those of packets that are too large.
        here.push("ct state related meta l4proto { icmp, icmpv6 } accept".to_owned());
        here.extend(["ct direction reply accept", NEIGHBOURS].map(str::to_owned));
        here.extend(refusals());
        chain(out, "arriving_here", &hook("filter", "input", 0), &here);
        let mut through = vec![elsewhere, "ct direction reply accept".to_owned()];
        through.extend(refusals());
        chain(out, "arriving_through", &hook("filter", "forward", 0), &through);
    }

    /// The rules that lead queries to the DNS listener, and those that lead all other connections to the transparent one.
    fn redirects(&self) -> [Vec<String>; 2] {
        let led = |protocol: &str, Ports { v4, v6 }: Ports| {
            let families = [("ipv4", v4), ("ipv6", v6)];
            let led = families
                .map(|(family, port)| port.map(|port| format!("meta nfproto {family} {protocol} redirect to :{port}")));
            led.into_iter().flatten().collect::<Vec<_>>()
        };
        let dns = ["udp dport 53", "tcp dport 53"].map(|protocol| led(protocol, self.dns)).concat();
        [dns, led("tcp dport != 53", self.transparent)]
    }
}

/// Returns the ports of the listeners of a mode that redirected connections reach: at all addresses, or at the loopback's if they come from
/// this machine or container.
fn ports(settings: &Settings, mode: ListenerMode, by_network: bool) -> Ports {
    let mut ports = Ports::default();
    let listeners = settings.proxy.listeners.iter().filter(|listener| listener.mode == mode);
    for at in listeners.filter_map(|listener| listener.at.tcp()).filter(|at| at.port() != 0) {
        let is_reached = at.ip().is_unspecified() || (!by_network && at.ip().is_loopback());
        if is_reached && (at.is_ipv4() || at.ip().is_unspecified()) {
            ports.v4 = ports.v4.or(Some(at.port()));
        }
        if is_reached && at.is_ipv6() {
            ports.v6 = ports.v6.or(Some(at.port()));
        }
    }
    ports
}

/// The rules at the end: programs are told at once that there is no other way.
fn refusals() -> [String; 2] {
    ["meta l4proto tcp reject with tcp reset".to_owned(), "reject".to_owned()]
}

fn hook(kind: &str, hook: &str, priority: i32) -> String {
    format!("type {kind} hook {hook} priority {priority}; policy accept;")
}

/// Adds a chain. One without a hook is entered from another.
fn chain(out: &mut String, name: &str, hook: &str, rules: &[String]) {
    let hook = if hook.is_empty() { String::new() } else { format!("\t\t{hook}\n") };
    let rules: String = rules.iter().map(|rule| format!("\t\t{rule}\n")).collect();
    out.push_str(&format!("\tchain {name} {{\n{hook}{rules}\t}}\n"));
}

/// Returns a set, or `None` if it is empty.
fn set<N: ToString>(elements: &[N]) -> Option<String> {
    let mut elements: Vec<String> = elements.iter().map(ToString::to_string).collect();
    elements.sort();
    elements.dedup();
    (!elements.is_empty()).then(|| format!("{{ {} }}", elements.join(", ")))
}

/// Returns the number of a user, from the users of this machine if it is a name.
fn user_id(user: &str, flag: &str) -> Result<u32, String> {
    if let Ok(id) = user.parse() {
        return Ok(id);
    }
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let mut known = users.lines().map(|line| line.split(':').collect::<Vec<_>>());
    let found = known.find(|fields| fields.first() == Some(&user)).and_then(|fields| fields.get(2)?.parse().ok());
    found.ok_or_else(|| format!("{flag}: this machine has no user {user:?}; a number works, too"))
}

/// Users with consecutive numbers.
type UserRange = RangeInclusive<u32>;

/// Returns users as an element of a set. A range of one is an error to nft.
fn element(users: &UserRange) -> String {
    let (first, last) = (users.start(), users.end());
    if first == last { first.to_string() } else { format!("{first}-{last}") }
}

/// Returns a user and those that the user may become in a user namespace (subuid(5)).
fn with_subordinates(id: u32, name: &str) -> Vec<UserRange> {
    let users = fs::read_to_string("/etc/passwd").unwrap_or_default();
    let is_of = |line: &&str| line.split(':').nth(2) == Some(&id.to_string());
    let known = users.lines().find(is_of).and_then(|line| line.split(':').next()).unwrap_or(name).to_owned();
    let ranges = fs::read_to_string("/etc/subuid").unwrap_or_default();
    [id..=id].into_iter().chain(subordinates(&ranges, &[&known, &id.to_string()])).collect()
}

/// Returns the ranges of the lines `USER:FIRST:COUNT` of these users.
fn subordinates(file: &str, users: &[&str]) -> Vec<UserRange> {
    let range = |line: &str| {
        let [user, first, count] = line.split(':').collect::<Vec<_>>()[..] else { return None };
        let (first, count): (u32, u32) = (first.parse().ok()?, count.parse().ok()?);
        let last = first.checked_add(count.checked_sub(1)?)?;
        users.contains(&user).then_some(first..=last)
    };
    file.lines().filter_map(range).collect()
}

/// Returns true for a name that an interface of Linux can have, and that needs no escaping.
fn is_interface(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_@:".contains(&byte);
    (1..=15).contains(&name.len()) && name.bytes().all(is_plain) && name != "lo"
}

/// Returns why rules for an interface of this machine would not match, if so.
fn unmatched(name: &str) -> Option<String> {
    let at = Path::new("/sys/class/net").join(name);
    if !at.exists() {
        return Some(format!("--interface: this machine has no interface {name:?}"));
    }
    let master = fs::read_link(at.join("master")).ok()?;
    let master = master.file_name().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default();
    Some(format!("--interface: what arrives by {name:?} is seen as arriving by {master:?}; name that"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured() -> Captured {
        Captured {
            user: 65_532,
            only: Vec::new(),
            interfaces: Vec::new(),
            transparent: Ports { v4: Some(15_001), v6: Some(15_001) },
            dns: Ports { v4: Some(15_053), v6: None },
            proxies: vec![3128],
            operators: vec![3129],
        }
    }

    #[test]
    fn a_family_that_no_listener_takes_is_not_redirected() {
        let rules = captured().rules();
        for family in ["ipv4", "ipv6"] {
            assert!(
                rules.contains(&format!("\t\tmeta nfproto {family} tcp dport != 53 redirect to :15001\n")),
                "{rules}"
            );
        }
        assert!(rules.contains("\t\tmeta nfproto ipv4 udp dport 53 redirect to :15053\n"), "{rules}");
        assert!(
            !rules.contains("ipv6 udp dport 53") && !rules.contains("3128") && !rules.contains("iifname {"),
            "{rules}"
        );
    }

    #[test]
    fn each_chain_that_decides_ends_with_a_refusal() {
        let all = Captured { only: vec!["1000".to_owned(), "100000-165535".to_owned()], ..captured() };
        for rules in [captured().rules(), Captured { interfaces: vec!["veth0".to_owned()], ..all }.rules()] {
            let chains: Vec<&str> = rules.split("chain ").skip(1).collect();
            let deciding =
                chains.iter().filter(|chain| !chain.contains("type nat") && !chain.starts_with("own_arrived"));
            for chain in deciding.filter(|chain| !(chain.starts_with("own_rest") && rules.contains("1000"))) {
                let last = chain.trim_end_matches(['\n', '\t', '}']).rsplit('\t').next().unwrap();
                assert!(last.ends_with("reject") || last.ends_with("drop"), "{chain}");
            }
        }
        let arriving = Captured { interfaces: vec!["veth0".to_owned()], ..captured() };
        assert!(!arriving.rules().contains("hook output"));
        // A query to the gateway's own address is not redirected.
        assert!(!arriving.rules().contains("local udp dport 53 accept"));
        let usual = Captured { dns: Ports { v4: Some(53), v6: Some(53) }, ..arriving };
        assert!(usual.rules().contains("fib daddr type local udp dport 53 accept"));
    }

    #[test]
    fn subordinate_users_are_found() {
        let file = "agent:100000:65536\nother:200000:10\n1000:300000:1\nagent:1:0\nagent:x:1\nagent:4294967295:2\n";
        let found = subordinates(file, &["agent", "1000"]);
        assert_eq!(found.iter().map(element).collect::<Vec<_>>(), ["100000-165535", "300000"]);
    }

    #[test]
    fn names_of_interfaces_are_plain() {
        for (name, want) in [
            ("eth0", true),
            ("br-1a.2", true),
            ("", false),
            ("lo", false),
            ("a\" accept", false),
            ("0123456789abcdef", false),
        ] {
            assert_eq!(is_interface(name), want, "{name:?}");
        }
    }
}

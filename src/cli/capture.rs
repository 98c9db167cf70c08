//! `exeat capture`: the nftables rules that lead a sandbox's connections to the transparent and the DNS listener, and refuse
//! everything else that would leave (nft(8)).

use std::fs;
use std::io::{self, Write};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Command, Stdio};

use clap::{Args, Subcommand};

use super::terminal::{print, say};
use super::{Exit, paths};
use crate::policy::settings::{ListenerMode, Settings};

/// The table with all of the rules.
const TABLE: &str = "inet exeat";
/// The bit of a connection's mark that says that it is the daemon's. A socket that has been closed with data left to send has no user.
const OWN_MARK: &str = "0x10000000";
/// The priority of the rules that redirect. Others, such as Docker's for its resolver, have -100, and the first redirection counts.
const BEFORE_OTHERS: i32 = -110;
/// The address of Docker's resolver in the networks of containers. It listens at other ports than 53, and forwards queries.
const DOCKER_RESOLVER: &str = "127.0.0.11";
/// The ICMPv6 messages without which no neighbour is reached (RFC 4861). The kernel sends them.
const NEIGHBOURS: &str =
    "icmpv6 type { nd-neighbor-solicit, nd-neighbor-advert, nd-router-solicit, mld2-listener-report } accept";

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
        CaptureAction::Install(_) => load(&rules),
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

/// What is captured, and where it is led to.
struct Captured {
    /// The daemon's user.
    user: u32,
    only: Vec<u32>,
    interfaces: Vec<String>,
    transparent: SocketAddr,
    dns: Option<SocketAddr>,
    /// The ports of the listeners for clients that use the proxy as such, which may be reached from the interfaces.
    proxies: Vec<u16>,
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
        let only = args.only.iter().map(|user| user_id(user, "--only")).collect::<Result<Vec<_>, _>>()?;
        if only.contains(&user) {
            return Err("--only: the user is the daemon's, whose connections would lead back to it".to_owned());
        }
        if let Some(name) = args.interface.iter().find(|name| !is_interface(name)) {
            return Err(format!("--interface: {name:?} is not the name of an interface"));
        }
        let listeners =
            || settings.proxy.listeners.iter().filter_map(|listener| Some((listener.mode, listener.at.tcp()?)));
        let of = |mode| listeners().find(|(found, _)| *found == mode).map(|(_, at)| at);
        let transparent = of(ListenerMode::Transparent)
            .ok_or("the configuration has no listener with mode = \"transparent\" to lead connections to")?;
        let dns = of(ListenerMode::Dns);
        if dns.is_none() {
            say("exeat: warning: the configuration has no listener with mode = \"dns\", so names cannot be looked up");
        }
        let interfaces = args.interface.clone();
        for at in [Some(transparent), dns].into_iter().flatten() {
            if !interfaces.is_empty() && at.ip().is_loopback() {
                return Err(format!(
                    "--interface: {at} cannot be reached from another machine or network; let it listen at [::]"
                ));
            }
            if at.port() == 0 {
                return Err(format!("{at}: the port of a listener that rules lead to must be fixed"));
            }
        }
        let direct = [ListenerMode::Proxy, ListenerMode::Socks5];
        let proxies = listeners().filter(|(mode, at)| direct.contains(mode) && at.port() != 0).map(|(_, at)| at.port());
        Ok(Self { user, only, interfaces, transparent, dns, proxies: proxies.collect() })
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
        let others = match set(&self.only) {
            None => Vec::new(),
            Some(users) => vec![format!("meta skuid != {users} accept")],
        };
        let [dns, all] = self.redirects();
        let mut redirects = vec![format!("meta skuid {user} accept")];
        redirects.extend(others.clone());
        // Resolvers of this machine forward queries.
        redirects.extend(dns);
        redirects.push("fib daddr type local accept".to_owned());
        redirects.extend(all);
        chain(out, "own", &format!("type nat hook output priority {BEFORE_OTHERS}; policy accept;"), &redirects);
        let mut rest = vec![
            format!("meta skuid {user} ct mark set ct mark | {OWN_MARK} accept"),
            // Not UDP: whoever takes the port of a query that has been answered would send by its entry.
            format!("meta l4proto tcp ct mark & {OWN_MARK} == {OWN_MARK} accept"),
            "ct direction reply accept".to_owned(),
            NEIGHBOURS.to_owned(),
        ];
        rest.extend(others);
        rest.push(format!("ip daddr {DOCKER_RESOLVER} reject"));
        rest.push("fib daddr type local accept".to_owned());
        rest.extend(refusals());
        chain(out, "own_rest", "type filter hook output priority 0; policy accept;", &rest);
    }

    /// The rules for what arrives by the interfaces.
    fn arriving(&self, out: &mut String) {
        let names: Vec<String> = self.interfaces.iter().map(|name| format!("\"{name}\"")).collect();
        let elsewhere = format!("iifname != {{ {} }} accept", names.join(", "));
        let proxies = set(&self.proxies).map(|ports| format!("fib daddr type local tcp dport {ports} accept"));
        let mut redirects = vec![elsewhere.clone()];
        redirects.extend(proxies.clone());
        redirects.extend(self.redirects().concat());
        chain(
            out,
            "arriving",
            &format!("type nat hook prerouting priority {BEFORE_OTHERS}; policy accept;"),
            &redirects,
        );
        let mut here = vec![elsewhere.clone()];
        here.extend(proxies);
        here.extend(["ct status dnat accept", "ct direction reply accept", NEIGHBOURS].map(str::to_owned));
        here.extend(refusals());
        chain(out, "arriving_here", "type filter hook input priority 0; policy accept;", &here);
        let mut through = vec![elsewhere, "ct direction reply accept".to_owned()];
        through.extend(refusals());
        chain(out, "arriving_through", "type filter hook forward priority 0; policy accept;", &through);
    }

    /// The rules that lead queries to the DNS listener, and those that lead all other connections to the transparent one. A family that
    /// a listener does not take is refused later.
    fn redirects(&self) -> [Vec<String>; 2] {
        let family = |at: &SocketAddr| match at {
            SocketAddr::V4(_) => "meta nfproto ipv4 ",
            SocketAddr::V6(v6) if v6.ip().is_unspecified() => "",
            SocketAddr::V6(_) => "meta nfproto ipv6 ",
        };
        let dns = self.dns.iter().flat_map(|at| {
            ["udp", "tcp"].map(|protocol| format!("{}{protocol} dport 53 redirect to :{}", family(at), at.port()))
        });
        let at = &self.transparent;
        let all = format!("{}meta l4proto tcp tcp dport != 53 redirect to :{}", family(at), at.port());
        [dns.collect(), vec![all]]
    }
}

/// The rules at the end: programs are told at once that there is no other way.
fn refusals() -> [String; 2] {
    ["meta l4proto tcp reject with tcp reset".to_owned(), "reject".to_owned()]
}

fn chain(out: &mut String, name: &str, hook: &str, rules: &[String]) {
    let rules: String = rules.iter().map(|rule| format!("\t\t{rule}\n")).collect();
    out.push_str(&format!("\tchain {name} {{\n\t\t{hook}\n{rules}\t}}\n"));
}

/// Returns a set, or `None` if it is empty.
fn set<N: ToString>(numbers: &[N]) -> Option<String> {
    let numbers: Vec<String> = numbers.iter().map(ToString::to_string).collect();
    (!numbers.is_empty()).then(|| format!("{{ {} }}", numbers.join(", ")))
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

/// Returns true for a name that an interface of Linux can have, and that needs no escaping.
fn is_interface(name: &str) -> bool {
    let is_plain = |byte: u8| byte.is_ascii_alphanumeric() || b".-_@:".contains(&byte);
    (1..=15).contains(&name.len()) && name.bytes().all(is_plain)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn captured() -> Captured {
        Captured {
            user: 65_532,
            only: Vec::new(),
            interfaces: Vec::new(),
            transparent: "[::]:15001".parse().unwrap(),
            dns: Some("127.0.0.1:15053".parse().unwrap()),
            proxies: vec![3128],
        }
    }

    #[test]
    fn a_family_that_no_listener_takes_is_not_redirected() {
        let rules = captured().rules();
        assert!(rules.contains("\t\tmeta l4proto tcp tcp dport != 53 redirect to :15001\n"), "{rules}");
        assert!(rules.contains("\t\tmeta nfproto ipv4 udp dport 53 redirect to :15053\n"), "{rules}");
        assert!(!rules.contains("3128") && !rules.contains("iifname"), "{rules}");
    }

    #[test]
    fn each_chain_ends_with_a_refusal() {
        let all = Captured { only: vec![1000, 1001], interfaces: vec!["veth0".to_owned()], ..captured() };
        let rules = all.rules();
        let chains: Vec<&str> = rules.split("chain ").skip(1).collect();
        assert_eq!(chains.len(), 5, "{rules}");
        for chain in chains.iter().filter(|chain| !chain.contains("type nat")) {
            assert!(chain.trim_end_matches(['\n', '\t', '}']).ends_with("\t\treject"), "{chain}");
        }
        assert!(rules.contains("meta skuid != { 1000, 1001 } accept") && rules.contains("tcp dport { 3128 } accept"));
        let arriving = Captured { interfaces: vec!["veth0".to_owned()], ..captured() };
        assert!(!arriving.rules().contains("hook output"));
    }

    #[test]
    fn names_of_interfaces_are_plain() {
        for (name, want) in
            [("eth0", true), ("br-1a.2", true), ("", false), ("a\" accept", false), ("0123456789abcdef", false)]
        {
            assert_eq!(is_interface(name), want, "{name:?}");
        }
    }
}

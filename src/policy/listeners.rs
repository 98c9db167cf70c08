//! The listeners for sandboxes, and the tasks as which their clients act without a token.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};
use std::path::Path;

use ipnet::IpNet;
use toml::Value;

use super::compile::known_names;
use super::reader::{Findings, Readable, Section};
use super::rule::Policy;
use super::settings::{ListenAt, ListenerMode, ListenerTasks, Proxy, ProxyListener};
use crate::model::name::TaskName;
use crate::model::peer::{Peer, PeerNetwork};

/// Reads `listen` and `[[listeners]]`. Without either, there is one listener on 127.0.0.1:3128.
pub(super) fn read(s: &mut Section<'_>, base: &Path, tasks: &ListenerTasks) -> Vec<ProxyListener> {
    let own = s.take::<Vec<OwnTasks>>("listeners").unwrap_or_default();
    let default =
        || if own.is_empty() { vec![ListenAt::Tcp(SocketAddr::from(([127, 0, 0, 1], 3128)))] } else { Vec::new() };
    let shared = s.take::<Vec<ListenAt>>("listen").unwrap_or_else(default);
    let shared = shared.into_iter().enumerate().map(|(i, at)| ProxyListener {
        at: at.relative_to(base),
        key: format!("proxy.listen[{i}]"),
        is_own: false,
        tasks: tasks.clone(),
        balancers: None,
        mode: ListenerMode::Proxy,
        is_tproxy: false,
    });
    let own = own.into_iter().map(|OwnTasks(listener)| ProxyListener { at: listener.at.relative_to(base), ..listener });
    shared.chain(own).collect()
}

/// An entry of `[[proxy.listeners]]`.
struct OwnTasks(ProxyListener);

impl Readable for OwnTasks {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let mut s = Section::of(Some(value), path.to_owned(), findings);
        let at = s.take::<ListenAt>("listen");
        if at.is_none() && !findings.has(&s.at("listen")) {
            findings.problem(s.at("listen"), "missing", "\"127.0.0.1:3130\"");
        }
        let all = s.take::<String>("task").map(|task| TaskName::new(&task));
        let networks = s.take::<NetworkTasks>("cidr_tasks").unwrap_or_default().0;
        let users = s.take::<UserTasks>("user_tasks").unwrap_or_default().0;
        let is_tcp = at.as_ref().is_some_and(|at| at.tcp().is_some());
        let (users, loopback_users) = if is_tcp { (BTreeMap::new(), users) } else { (users, BTreeMap::new()) };
        let tasks = ListenerTasks { all, networks, users, loopback_users };
        let balancers = s.optional("proxy_protocol").map(|s| balancers(s, findings));
        let mode = s.take::<ListenerMode>("mode").unwrap_or_default();
        let is_tproxy = s.take::<bool>("tproxy").unwrap_or_default();
        // The clients of others can send a token.
        let needs_task = match mode {
            ListenerMode::Proxy => balancers.is_none(),
            ListenerMode::Socks5 => false,
            ListenerMode::Transparent | ListenerMode::Dns => true,
        };
        if tasks == ListenerTasks::default() && needs_task && !findings.has(path) {
            let also = if mode == ListenerMode::Proxy {
                ", user_tasks, cidr_tasks or proxy_protocol"
            } else {
                " or cidr_tasks"
            };
            findings.problem(path, "it has no task", format!("task = \"NAME\"{also}"));
        }
        Some(Self(ProxyListener { at: at?, key: path.to_owned(), is_own: true, tasks, balancers, mode, is_tproxy }))
    }
}

/// Reads `proxy_protocol`: the networks of load balancers, which may name any address as that of a client.
fn balancers(mut s: Section<'_>, findings: &Findings) -> Vec<IpNet> {
    let at = s.at("trusted");
    let trusted = s.take::<Vec<IpNet>>("trusted").unwrap_or_default();
    if trusted.is_empty() && !findings.has(&at) {
        findings.problem(&at, "no load balancer is trusted", "[\"10.1.2.3/32\"], the addresses of the load balancers");
    }
    for (i, network) in trusted.iter().enumerate() {
        let at = format!("{at}[{i}]");
        if is_wide(network) {
            findings.problem(&at, "the network is too wide", "the addresses of the load balancers");
        }
        if network.addr().to_canonical() != network.addr() {
            findings.problem(&at, "IPv4 addresses are written as such", "\"10.1.2.3/32\"");
        }
    }
    trusted
}

/// Returns true for a network that others than those that are meant must be in.
fn is_wide(network: &IpNet) -> bool {
    network.prefix_len() < if network.addr().is_ipv4() { 8 } else { 16 }
}

/// `cidr_tasks`: the tasks of networks, narrower ones first.
#[derive(Default)]
pub(super) struct NetworkTasks(pub(super) Vec<(IpNet, TaskName)>);

impl Readable for NetworkTasks {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let Value::Table(table) = value else {
            findings.problem(path, "not a table", "{ \"10.1.2.0/24\" = \"research\" }");
            return None;
        };
        let read = |(network, task): (String, Value)| {
            let at = format!("{path}.{network:?}");
            let network = IpNet::read(Value::String(network), &at, findings);
            let task = String::read(task, &at, findings)?;
            if network.as_ref().is_some_and(is_wide) {
                findings.problem(&at, "the network is too wide", "the networks of the clients");
            }
            if network.is_some_and(|network| network.addr().to_canonical() != network.addr()) {
                findings.problem(&at, "IPv4 addresses are written as such", "\"10.1.2.0/24\"");
            }
            Some((network?, TaskName::new(&task)))
        };
        let mut tasks: Vec<(IpNet, TaskName)> = table.into_iter().filter_map(read).collect();
        for (i, (network, _)) in tasks.iter().enumerate() {
            if tasks.iter().take(i).any(|(other, _)| other == network) {
                findings.problem(path, format!("{network} is named twice"), "each network once");
            }
        }
        tasks.sort_by_key(|(network, _)| std::cmp::Reverse(network.prefix_len()));
        Some(Self(tasks))
    }
}

/// `unix_tasks` and `user_tasks`: the tasks of user ids.
#[derive(Default)]
pub(super) struct UserTasks(pub(super) BTreeMap<u32, TaskName>);

impl Readable for UserTasks {
    fn read(value: Value, path: &str, findings: &Findings) -> Option<Self> {
        let Value::Table(table) = value else {
            findings.problem(path, "not a table", "{ 1001 = \"research\" }");
            return None;
        };
        let read = |(uid, task): (String, Value)| {
            let at = format!("{path}.{uid}");
            let number = uid.parse().ok().filter(|number: &u32| number.to_string() == uid);
            if number.is_none() {
                findings.problem(&at, format!("{uid:?} is not a user id"), "a number, such as 1001");
            }
            let task = String::read(task, &at, findings)?;
            Some((number?, TaskName::new(&task)))
        };
        Some(Self(table.into_iter().filter_map(read).collect()))
    }
}

/// Checks that the tasks exist, and that a listener that others can reach gives a task to no more clients than are written
/// out.
pub(super) fn check(proxy: &Proxy, policy: &Policy, findings: &Findings) {
    for (i, listener) in proxy.listeners.iter().enumerate() {
        let others = proxy.listeners.iter().take(i).any(|other| other.at == listener.at);
        let takes_any_port = listener.at.tcp().is_some_and(|address| address.port() == 0);
        if others && !takes_any_port {
            findings.problem(
                &listener.key,
                format!("{} is used by another listener", listener.at),
                "each address at most once",
            );
        }
        if listener.is_own {
            check_own_tasks(listener, proxy, findings);
            check_balancers(listener, findings);
            check_captured(listener, findings);
            warn_of_tokens_in_the_clear(listener, findings);
        } else if let (Some(address), false) = (listener.at.tcp(), listener.tasks.networks.is_empty()) {
            check_shared(address, findings);
        }
    }
    let certified = proxy.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some());
    if certified && !proxy.tasks.networks.is_empty() {
        findings.problem("proxy.cidr_tasks", WITH_CERTIFICATES, "no cidr_tasks, or no tls.client_ca");
    }
    let shared = proxy.tasks.users.iter().map(|(uid, task)| (format!("proxy.unix_tasks.{uid}"), task));
    let users = |listener: &ProxyListener| {
        let all = listener.tasks.users.iter().chain(&listener.tasks.loopback_users);
        all.map(|(uid, task)| (format!("{}.user_tasks.{uid}", listener.key), task.clone())).collect::<Vec<_>>()
    };
    let networks = |path: &str, tasks: &ListenerTasks| {
        let at = |(network, task): &(IpNet, TaskName)| (format!("{path}.cidr_tasks.\"{network}\""), task.clone());
        tasks.networks.iter().map(at).collect::<Vec<_>>()
    };
    let own = proxy.listeners.iter().filter(|listener| listener.is_own).flat_map(|listener| {
        let all = listener.tasks.all.iter().map(|task| (format!("{}.task", listener.key), task.clone()));
        networks(&listener.key, &listener.tasks).into_iter().chain(all).chain(users(listener))
    });
    let named = shared.map(|(path, task)| (path, task.clone())).chain(networks("proxy", &proxy.tasks)).chain(own);
    for (path, task) in named.filter(|(_, task)| policy.task(task).is_none()) {
        let known = known_names(policy.tasks().map(|task| task.name().as_str()), "tasks", task.as_str());
        findings.problem(path, format!("no task named {:?}", task.as_str()), known);
    }
}

const WITH_CERTIFICATES: &str = "each client has a certificate that names its task";

/// The usual id of users that a user namespace does not have (`kernel.overflowuid`).
const UNKNOWN_USER: u32 = 65534;

fn check_own_tasks(listener: &ProxyListener, proxy: &Proxy, findings: &Findings) {
    let at = |key: &str| format!("{}.{key}", listener.key);
    let ListenerTasks { all, networks, users, loopback_users } = &listener.tasks;
    let has_users = !users.is_empty() || !loopback_users.is_empty();
    let given = [("task", all.is_some()), ("cidr_tasks", !networks.is_empty()), ("user_tasks", has_users)];
    let mut given = given.into_iter().filter(|(_, is_given)| *is_given).map(|(key, _)| key);
    let Some(key) = given.next() else { return };
    if let Some(other) = given.next() {
        return findings.problem(at(key), format!("cannot be combined with {other}"), "one of them");
    }
    let Some(address) = listener.at.tcp() else {
        if !networks.is_empty() {
            findings.problem(at(key), "clients of a Unix socket have no address", "task = \"NAME\"");
        }
        return;
    };
    if listener.is_tproxy && networks.is_empty() {
        return findings.problem(
            at(key),
            "TPROXY leads connections of other machines here, whatever the address of the listener",
            "cidr_tasks with the networks of the clients",
        );
    }
    if listener.is_http_proxy() && proxy.tls.as_ref().is_some_and(|tls| tls.client_ca.is_some()) {
        findings.problem(at(key), WITH_CERTIFICATES, "no task here, or no tls.client_ca");
    }
    if all.is_some() && !address.ip().to_canonical().is_loopback() {
        findings.problem(
            at(key),
            format!("everybody who can reach {address} would act as this task"),
            "an address of the loopback interface, or cidr_tasks with the networks of the clients",
        );
    }
    if loopback_users.contains_key(&UNKNOWN_USER) {
        findings.problem(
            format!("{}.{UNKNOWN_USER}", at(key)),
            "the kernel reports users that it cannot name by this id",
            "a user of one's own",
        );
    }
    if has_users && !address.ip().to_canonical().is_loopback() {
        findings.problem(
            at(key),
            format!("clients of other machines can reach {address}, and their users are unknown"),
            "an address of the loopback interface",
        );
    }
}

/// Checks the keys beside `proxy_protocol`: only the address in its header tells clients from each other.
fn check_balancers(listener: &ProxyListener, findings: &Findings) {
    let at = |key: &str| format!("{}.{key}", listener.key);
    if listener.balancers.is_none() {
        return;
    }
    if listener.at.tcp().is_none() {
        findings.problem(at("proxy_protocol"), "clients of a Unix socket have no address", "no proxy_protocol");
    }
    let ListenerTasks { all, users, loopback_users, .. } = &listener.tasks;
    let has_users = !users.is_empty() || !loopback_users.is_empty();
    for (key, is_given) in [("task", all.is_some()), ("user_tasks", has_users)] {
        if is_given {
            let problem = "the clients are behind a load balancer, and on other machines";
            findings.problem(at(key), problem, "cidr_tasks with the networks of the clients, or tokens");
        }
    }
}

/// Checks a listener for programs that do not know of the proxy: they have no token, and the kernel must know the addresses that they
/// connect to.
fn check_captured(listener: &ProxyListener, findings: &Findings) {
    if listener.is_tproxy && listener.mode != ListenerMode::Transparent {
        let problem = "only a transparent listener takes connections to other addresses";
        findings.problem(format!("{}.tproxy", listener.key), problem, "mode = \"transparent\", or no tproxy");
    }
    let (mode, example) = match listener.mode {
        ListenerMode::Proxy | ListenerMode::Socks5 => return,
        ListenerMode::Transparent => ("transparent", "\"0.0.0.0:15001\""),
        ListenerMode::Dns => ("dns", "\"127.0.0.1:53\""),
    };
    let at = |key: &str| format!("{}.{key}", listener.key);
    let address = listener.at.tcp();
    if address.is_none() {
        findings.problem(at("listen"), format!("a Unix socket cannot be {mode:?}"), example);
    }
    if listener.balancers.is_some() {
        findings.problem(at("proxy_protocol"), format!("clients of {mode:?} come directly"), "no proxy_protocol");
    }
    if listener.mode == ListenerMode::Transparent && cfg!(not(target_os = "linux")) {
        findings.problem(at("mode"), "only Linux captures connections", "\"proxy\" or \"socks5\"");
    }
    if listener.mode == ListenerMode::Dns {
        let is_wildcard = address.is_some_and(|address| address.ip().is_unspecified());
        if is_wildcard && cfg!(not(target_os = "linux")) {
            let problem = "an answer could come from another address than the one that was asked";
            findings.problem(at("listen"), problem, "the address that clients ask");
        }
        if !listener.tasks.loopback_users.is_empty() {
            findings.problem(at("user_tasks"), "the user of a query over UDP is not known", "task or cidr_tasks");
        }
    }
}

/// Warns of SOCKS5 over a network: it has no TLS, and no client certificates.
fn warn_of_tokens_in_the_clear(listener: &ProxyListener, findings: &Findings) {
    let is_near = listener.at.tcp().is_none_or(|address| address.ip().to_canonical().is_loopback());
    if listener.mode == ListenerMode::Socks5 && !is_near {
        findings.warning(
            format!("{}.mode", listener.key),
            "SOCKS5 has no TLS: tokens cross the network in the clear, and no client certificates are asked for",
        );
    }
}

/// Refuses `[proxy].cidr_tasks` for a listener that clients of any network can reach. Its networks have to be written beside
/// its address.
fn check_shared(address: SocketAddr, findings: &Findings) {
    let is_open = address.ip().is_unspecified() || Peer::tcp(address).network() == PeerNetwork::Public;
    if is_open && !findings.has("proxy.cidr_tasks") {
        findings.problem(
            "proxy.cidr_tasks",
            format!("other networks can reach {address}"),
            "an entry of [[proxy.listeners]] for this address, with its own cidr_tasks",
        );
    }
}

impl ListenerTasks {
    /// Returns the task of a client with this address.
    #[must_use]
    pub fn of_address(&self, address: IpAddr) -> Option<&TaskName> {
        let address = address.to_canonical();
        let by_network = || self.networks.iter().find(|(network, _)| network.contains(&address)).map(|(_, task)| task);
        self.all.as_ref().or_else(by_network)
    }

    /// Returns the task of a client on this machine, over TCP. `owner` finds the id of its user, which takes system calls.
    #[must_use]
    pub fn of_loopback_user(&self, owner: impl FnOnce() -> Option<u32>) -> Option<&TaskName> {
        if self.loopback_users.is_empty() { None } else { self.loopback_users.get(&owner()?) }
    }

    /// Returns the task of a client of a Unix socket with this user id.
    #[must_use]
    pub fn of_user(&self, uid: u32) -> Option<&TaskName> {
        self.all.as_ref().or_else(|| self.users.get(&uid))
    }

    /// Returns all tasks.
    pub fn tasks(&self) -> impl Iterator<Item = &TaskName> {
        self.all
            .iter()
            .chain(self.networks.iter().map(|(_, task)| task))
            .chain(self.users.values())
            .chain(self.loopback_users.values())
    }
}

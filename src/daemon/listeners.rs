//! Opens the daemon's listeners: at the configured addresses, with sockets that the service manager has passed, or with those of
//! a daemon that is taken over.

use std::io;
use std::net::SocketAddr;
use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::StartError;
use super::command_runner::CommandRunner;
use super::takeover::{Role, Takeover, TakeoverLock};
use crate::flow::dns_listener::DnsListener;
use crate::flow::listener::{Inherited, Listener, ListenerAddress, SharedSocket};
use crate::policy::settings::{self, ListenAt, ListenerTasks, ProxyListener, Settings};

/// The parts of a start that are there before it, beside the configuration.
#[derive(Default)]
pub struct StartParts {
    /// The sockets that the service manager has passed.
    pub inherited: Inherited,
    /// The sockets of the daemon that is taken over.
    pub takeover: Option<Takeover>,
    /// The sockets of all configured listeners, if they are in a network that is not this process's: that of a sandbox. They
    /// are in the order of the listeners, and a DNS listener has two: TCP, then UDP. No address is bound then.
    pub enclosed: Option<Vec<OwnedFd>>,
    /// Whether a new process may take over from this one. It may not take the service manager's sockets.
    pub is_offered: bool,
    /// The process that runs commands.
    pub commands: Option<Arc<CommandRunner>>,
}

/// The open listeners.
#[derive(Default)]
pub(super) struct Listeners {
    pub(super) proxy: Vec<Listener>,
    pub(super) dns: Vec<DnsListener>,
    pub(super) admin: Option<Listener>,
    pub(super) metrics: Option<Listener>,
    /// A second handle of each, if they are offered to a new process.
    pub(super) shared: Option<Vec<(Role, SharedSocket)>>,
    takeover: Option<Takeover>,
    /// They are in the network of a sandbox.
    is_enclosed: bool,
}

impl Listeners {
    /// Opens the listeners. Connections to sockets of a daemon that is taken over are still its own.
    ///
    /// # Errors
    /// [`StartError::Listen`].
    pub(super) async fn open(parts: StartParts, settings: &Settings) -> Result<Self, StartError> {
        let StartParts { inherited, takeover, is_offered, enclosed, .. } = parts;
        if let Some(sockets) = enclosed {
            return Self::enclosed(sockets, settings);
        }
        let is_offered = is_offered && inherited.proxy.is_empty() && inherited.admin.is_none();
        let shared = is_offered.then(Vec::new);
        let mut opened = Self { proxy: inherited.proxy, admin: inherited.admin, shared, takeover, ..Self::default() };
        if opened.proxy.is_empty() {
            for configured in settings.proxy.listeners.iter().filter(|configured| !configured.is_dns()) {
                let mut listener = opened.listen(Role::Proxy, &configured.at, settings.proxy.unix_mode).await?;
                listener.configure(configured).map_err(|source| failed(configured, source))?;
                opened.proxy.push(listener);
            }
        } else {
            identify_inherited(&mut opened.proxy, &settings.proxy).await?;
        }
        for configured in settings.proxy.listeners.iter().filter(|configured| configured.is_dns()) {
            let Some(at) = configured.at.tcp() else { continue };
            let failed = |source| failed(configured, source);
            opened
                .dns
                .push(DnsListener::bind(at, configured.tasks.clone(), opened.takeover.is_some()).map_err(failed)?);
        }
        if let (None, Some(at)) = (&opened.admin, &settings.admin.listen) {
            opened.admin = Some(opened.listen(Role::Admin, at, admin_mode(settings)).await?);
        }
        if let Some(at) = &settings.metrics.listen {
            opened.metrics = Some(opened.listen(Role::Metrics, at, METRICS_MODE).await?);
        }
        Ok(opened)
    }

    /// Returns the listeners of a sandbox's network, to which the passed sockets belong.
    fn enclosed(sockets: Vec<OwnedFd>, settings: &Settings) -> Result<Self, StartError> {
        let configured = &settings.proxy.listeners;
        let wanted: usize = configured.iter().map(|listener| if listener.is_dns() { 2 } else { 1 }).sum();
        if let (Some(first), true) = (configured.first(), wanted != sockets.len()) {
            let source = io::Error::other(format!("{} sockets were passed, and {wanted} are needed", sockets.len()));
            return Err(StartError::Listen { address: first.at.clone(), source });
        }
        let mut sockets = sockets.into_iter();
        let mut next = || sockets.next().ok_or(io::ErrorKind::NotFound.into());
        let mut opened = Self { is_enclosed: true, ..Self::default() };
        for configured in configured {
            let failed = |source| failed(configured, source);
            if configured.is_dns() {
                let (tcp, udp) = (next().map_err(failed)?, next().map_err(failed)?);
                opened.dns.push(DnsListener::of(tcp.into(), udp.into(), configured.tasks.clone()).map_err(failed)?);
            } else {
                let socket = next().and_then(|socket| Listener::taken_over(socket, &configured.at));
                let mut listener = socket.map_err(failed)?;
                listener.configure(configured).map_err(failed)?;
                opened.proxy.push(listener);
            }
        }
        Ok(opened)
    }

    /// Returns the addresses that lead to the listeners, from this process's network.
    pub(super) fn own_addresses(&self) -> Vec<SocketAddr> {
        let proxy = self.proxy_addresses().into_iter().map(|listener| listener.at);
        let all = proxy.chain(self.admin_address()).chain(self.metrics_address());
        all.filter_map(|at| at.tcp()).filter(|_| !self.is_enclosed).collect()
    }

    /// Listens on an address, with the socket of the daemon that is taken over if it has one for it.
    async fn listen(&mut self, role: Role, at: &ListenAt, mode: u32) -> Result<Listener, StartError> {
        let failed = |source| StartError::Listen { address: at.clone(), source };
        let listener = match self.takeover.as_mut().and_then(|takeover| takeover.socket(role, at)) {
            Some(taken) => taken.map_err(failed)?,
            None => bind(at, mode).await?,
        };
        if let Some(shared) = &mut self.shared {
            shared.push((role, listener.share(at).map_err(failed)?));
        }
        Ok(listener)
    }

    /// Ends the daemon that is taken over, if there is one, and makes its socket files this process's own. Returns the lock
    /// of the takeover, if there was one.
    ///
    /// # Errors
    /// [`StartError::Takeover`], and [`StartError::Listen`] if a file cannot get its mode.
    pub(super) fn take_over(&mut self, settings: &Settings) -> Result<Option<TakeoverLock>, StartError> {
        let Some(takeover) = self.takeover.take() else { return Ok(None) };
        let lock = takeover.complete()?;
        let proxy = self.proxy.iter().map(|listener| (listener, settings.proxy.unix_mode));
        let admin = self.admin.iter().map(|listener| (listener, admin_mode(settings)));
        let metrics = self.metrics.iter().map(|listener| (listener, METRICS_MODE));
        for (listener, mode) in proxy.chain(admin).chain(metrics) {
            let failed = |source| StartError::Listen { address: listener.at().clone(), source };
            listener.own_file(mode).map_err(failed)?;
        }
        Ok(Some(lock))
    }

    pub(super) fn proxy_addresses(&self) -> Vec<ListenerAddress> {
        let dns = self.dns.iter().filter_map(DnsListener::address);
        self.proxy.iter().map(Listener::address).chain(dns).collect()
    }

    pub(super) fn metrics_address(&self) -> Option<ListenAt> {
        self.metrics.as_ref().map(|listener| listener.at().clone())
    }

    pub(super) fn admin_address(&self) -> Option<ListenAt> {
        self.admin.as_ref().map(|listener| listener.at().clone())
    }
}

/// The mode of the metrics socket: its directory decides who may connect.
const METRICS_MODE: u32 = 0o666;

/// Returns the mode of the admin socket. Other users than the daemon's own can connect only if `admin.uids` is set. The
/// kernel reports the user id of a client, and users that are not listed need the token.
fn admin_mode(settings: &Settings) -> u32 {
    if settings.admin.uids.is_empty() { 0o600 } else { 0o666 }
}

fn failed(configured: &ProxyListener, source: io::Error) -> StartError {
    StartError::Listen { address: configured.at.clone(), source }
}

async fn bind(at: &ListenAt, mode: u32) -> Result<Listener, StartError> {
    Listener::bind(at, mode).await.map_err(|source| StartError::Listen { address: at.clone(), source })
}

/// Sets the tasks of the clients of passed sockets, and adds the listeners with tasks of their own, which passed sockets do not
/// replace.
async fn identify_inherited(listeners: &mut Vec<Listener>, proxy: &settings::Proxy) -> Result<(), StartError> {
    for listener in listeners.iter_mut() {
        let configured =
            proxy.listeners.iter().find(|configured| !configured.is_dns() && configured.at == *listener.at());
        // The networks were checked against the configured addresses only.
        let unknown = || ListenerTasks { users: proxy.tasks.users.clone(), ..ListenerTasks::default() };
        match configured {
            Some(configured) => listener.configure(configured).map_err(|source| failed(configured, source))?,
            None => listener.set_tasks(unknown()),
        }
    }
    let own = proxy.listeners.iter().filter(|configured| configured.is_own && !configured.is_dns());
    for own in own {
        if listeners.iter().all(|listener| *listener.at() != own.at) {
            let mut listener = bind(&own.at, proxy.unix_mode).await?;
            listener.configure(own).map_err(|source| failed(own, source))?;
            listeners.push(listener);
        }
    }
    Ok(())
}

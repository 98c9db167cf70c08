//! The DNS listener: answers queries for names that the caller's task may reach with synthetic addresses, and asks nobody.
//!
//! A captured connection to such an address tells by itself which name its client has looked up. No query leaves the proxy here: the
//! name is resolved when a connection to it is authorized.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use http::HeaderMap;
use moka::sync::Cache;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Services;
use super::connection;
use super::dns_message::{Answer, Kind, Question};
use super::dns_socket::DnsSocket;
use super::listener::ListenerAddress;
use crate::audit::record::Record;
use crate::model::host::{Host, HostName};
use crate::model::name::ExecutionId;
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::policy::settings::{ListenAt, ListenerMode, ListenerTasks};
use crate::stages::{authorize, identify};

/// The most queries over UDP that are answered at a time, and of one address. Further ones are dropped, and their clients ask
/// again.
const QUERIES: Capacity = Capacity { total: 256, per_address: 32 };
/// The most connections at a time, and of one address. Further ones are closed.
const CONNECTIONS: Capacity = Capacity { total: 128, per_address: 16 };
/// The longest query that is read, in bytes. A name has at most 255, and options are ignored.
const MAX_QUERY: usize = 4096;
/// The time for the next query of a connection to arrive, and for its answer to be sent.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest time for which a connection is open.
const CONNECTION_LIFETIME: Duration = Duration::from_secs(60);
/// The time that queries have to be answered when a new process takes over.
const HAND_OVER: Duration = Duration::from_secs(3);
/// Pause after an error of a socket.
const BACK_OFF: Duration = Duration::from_millis(50);
/// The time for which a name is remembered in which a value was found, and the most such names. Resolvers repeat a query, and ask for
/// several types: it is one find.
const FIND_MEMORY: Duration = Duration::from_secs(60);
const MAX_FINDS: u64 = 4096;

/// The sockets of a DNS listener.
pub(crate) struct DnsListener {
    udp: DnsSocket,
    tcp: TcpListener,
    tasks: ListenerTasks,
    finds: NamesWithFinds,
}

/// The names of each execution in which a value was found.
type NamesWithFinds = Cache<(ExecutionId, HostName), ()>;

/// How many may be open at a time, and of one address.
struct Capacity {
    total: usize,
    per_address: usize,
}

/// The queries or connections that are open.
struct OpenTasks {
    capacity: Capacity,
    /// Each ends with the address that it is of.
    running: JoinSet<IpAddr>,
    by_address: HashMap<IpAddr, usize>,
}

impl OpenTasks {
    fn new(capacity: Capacity) -> Self {
        Self { capacity, running: JoinSet::new(), by_address: HashMap::new() }
    }

    /// Runs a task for an address, unless too many run.
    fn spawn(&mut self, address: IpAddr, task: impl Future<Output = ()> + Send + 'static) {
        let count = self.by_address.get(&address).copied().unwrap_or_default();
        if self.running.len() >= self.capacity.total || count >= self.capacity.per_address {
            return;
        }
        self.by_address.insert(address, count.saturating_add(1));
        self.running.spawn(async move {
            task.await;
            address
        });
    }

    /// Waits until one has ended. Never completes if none runs.
    async fn ended(&mut self) {
        let Some(ended) = self.running.join_next().await else { return std::future::pending().await };
        // One that panicked keeps its place.
        let Ok(address) = ended else { return };
        let left = self.by_address.get(&address).map_or(0, |count| count.saturating_sub(1));
        if left > 0 {
            self.by_address.insert(address, left)
        } else {
            self.by_address.remove(&address)
        };
    }
}

impl DnsListener {
    /// Listens on an address over UDP and TCP. During a takeover, the process that is being replaced still listens there.
    ///
    /// # Errors
    /// If the address is in use, or cannot be bound.
    pub(crate) fn bind(at: SocketAddr, tasks: ListenerTasks, is_takeover: bool) -> io::Result<Self> {
        let bound = |kind, at: SocketAddr, is_shared| {
            let socket = socket2::Socket::new(socket2::Domain::for_address(at), kind, None)?;
            socket.set_nonblocking(true)?;
            socket.set_reuse_port(is_shared)?;
            socket.set_reuse_address(kind == socket2::Type::STREAM)?;
            socket.bind(&at.into())?;
            Ok::<_, io::Error>(socket)
        };
        if !is_takeover {
            // A second daemon must not get a part of the queries.
            drop(bound(socket2::Type::DGRAM, at, false)?);
        }
        let tcp = bound(socket2::Type::STREAM, at, true)?;
        tcp.listen(128)?;
        let tcp = std::net::TcpListener::from(tcp);
        // Port 0 stands for a free one, the same for both.
        let udp = bound(socket2::Type::DGRAM, tcp.local_addr()?, true)?;
        Self::of(tcp, udp.into(), tasks)
    }

    /// Wraps sockets that are bound to the same address. That for TCP is listening.
    ///
    /// # Errors
    /// If their options cannot be set.
    pub(crate) fn of(tcp: std::net::TcpListener, udp: std::net::UdpSocket, tasks: ListenerTasks) -> io::Result<Self> {
        tcp.set_nonblocking(true)?;
        udp.set_nonblocking(true)?;
        let (tcp, udp) = (TcpListener::from_std(tcp)?, DnsSocket::new(UdpSocket::from_std(udp)?)?);
        let finds = Cache::builder().max_capacity(MAX_FINDS).time_to_live(FIND_MEMORY).build();
        Ok(Self { udp, tcp, tasks, finds })
    }

    /// Returns the address, with the port that was assigned to it.
    pub(crate) fn address(&self) -> Option<ListenerAddress> {
        let at = ListenAt::Tcp(self.tcp.local_addr().ok()?);
        Some(ListenerAddress { at, mode: ListenerMode::Dns, is_direct: true })
    }

    /// Answers queries until the daemon drains or is taken over.
    pub(crate) async fn run(self, services: Arc<Services>) {
        let udp = Arc::new(self.udp);
        let (mut queries, mut connections) = (OpenTasks::new(QUERIES), OpenTasks::new(CONNECTIONS));
        let mut buffer = vec![0; MAX_QUERY];
        loop {
            tokio::select! {
                () = services.drain.cancelled() => return,
                () = services.last_requests.cancelled() => break,
                () = queries.ended() => {}
                () = connections.ended() => {}
                received = udp.receive(&mut buffer) => {
                    let Ok((length, path)) = received else {
                        tokio::time::sleep(BACK_OFF).await;
                        continue;
                    };
                    let query = buffer.get(..length).unwrap_or_default().to_vec();
                    let peer = peer(&self.tasks, path.from);
                    let client = DnsClient { services: services.clone(), peer, finds: self.finds.clone() };
                    let udp = udp.clone();
                    queries.spawn(path.from.ip(), async move {
                        if let Some(answer) = client.answer(&query).await {
                            // The client may be gone.
                            let _ = udp.answer(&answer, &path).await;
                        }
                    });
                }
                accepted = self.tcp.accept() => match accepted {
                    Ok((stream, from)) => {
                        let client = DnsClient { services: services.clone(), peer: peer(&self.tasks, from), finds: self.finds.clone() };
                        connections.spawn(from.ip(), async move {
                            let _ = timeout(CONNECTION_LIFETIME, client.serve(stream)).await;
                        });
                    }
                    Err(_) => tokio::time::sleep(BACK_OFF).await,
                },
            }
        }
        // The new process has the next ones.
        let answered = async { while queries.running.join_next().await.is_some() {} };
        let _ = timeout(HAND_OVER, answered).await;
    }
}

fn peer(tasks: &ListenerTasks, from: SocketAddr) -> Peer {
    let from = SocketAddr::new(from.ip().to_canonical(), from.port());
    match tasks.of_address(from.ip()) {
        Some(task) => Peer::at_address(from, task.clone()),
        None => Peer::tcp(from),
    }
}

/// A client of the listener.
struct DnsClient {
    services: Arc<Services>,
    peer: Peer,
    finds: NamesWithFinds,
}

impl DnsClient {
    /// Answers the queries of a connection (RFC 7766), one after the other.
    async fn serve(&self, mut stream: TcpStream) {
        loop {
            let query = async {
                let length = usize::from(stream.read_u16().await?);
                if length > MAX_QUERY {
                    return Err(io::ErrorKind::InvalidData.into());
                }
                let mut query = vec![0; length];
                stream.read_exact(&mut query).await?;
                Ok::<_, io::Error>(query)
            };
            let Ok(Ok(query)) = timeout(CONNECTION_TIMEOUT, query).await else { return };
            let Some(answer) = self.answer(&query).await else { return };
            let Ok(length) = u16::try_from(answer.len()) else { return };
            let message = [&length.to_be_bytes()[..], &answer].concat();
            if !matches!(timeout(CONNECTION_TIMEOUT, stream.write_all(&message)).await, Ok(Ok(()))) {
                return;
            }
        }
    }

    /// Returns the answer to a query in wire format, or `None` if nothing may be sent.
    async fn answer(&self, query: &[u8]) -> Option<Vec<u8>> {
        let question = match Question::read(query) {
            Ok(question) => question,
            Err(answer) => return answer,
        };
        let mut record = self.services.record(&self.peer);
        let refusal = match self.lookup(&question, &mut record).await {
            Ok(answer) => {
                if !record.is_answered() {
                    record.forget();
                }
                return question.answer(answer);
            }
            Err(refusal) => refusal,
        };
        // The name of a query beyond the rate is not searched, and nothing repeats it.
        if refusal != Deny::RateLimited.into() {
            self.services.settle(Some(refusal), &mut record).await;
        }
        record.failed(refusal);
        question.answer(match refusal {
            // Clients would ask other servers, or again, after REFUSED.
            Refusal::Deny(
                Deny::HostNotAllowed | Deny::TargetMalformed | Deny::LeakDetected | Deny::ExecutionStopped,
            ) => Answer::NoName,
            Refusal::Deny(_) => Answer::Refused,
            Refusal::Fail(_) => Answer::Failed,
        })
    }

    /// Returns the answer to a query of a task that may reach the name.
    async fn lookup(&self, question: &Question, record: &mut Record) -> Verdict<Answer> {
        let services = &self.services;
        let policy = services.policies.snapshot();
        record.dns_query();
        let caller = identify::caller(&policy, &services.ledger, &HeaderMap::new(), &self.peer).await?;
        connection::prepare(&policy, &caller).await;
        record.caller(caller.task(), caller.execution(), policy.task(caller.task()).map(|task| task.values()));
        let name = question.host();
        name.iter().for_each(|name| record.dns_name(name));
        let is_known_find = |name| self.finds.contains_key(&(caller.execution().clone(), HostName::clone(name)));
        if name.as_ref().is_some_and(is_known_find) {
            return Ok(Answer::NoName);
        }
        services.throttle.take_dns_query(&caller, record).await?;
        let name = name.ok_or(Deny::TargetMalformed)?;
        if let Err(refusal) = authorize::name(&policy, &caller, &Host::Name(name.clone()), record) {
            let task = policy.task(caller.task());
            let is_find = refusal == Deny::LeakDetected.into()
                || task.is_some_and(|task| task.own().find_in_name(name.as_str()).is_some());
            // Claimed before it is counted, because a resolver asks for several types at once.
            let is_new = || self.finds.entry((caller.execution().clone(), name)).or_insert(()).is_fresh();
            return if is_find && !is_new() { Ok(Answer::NoName) } else { Err(refusal) };
        }
        match question.kind() {
            Kind::V4 | Kind::V6 => {}
            Kind::Other => return Ok(Answer::Empty),
            Kind::Refused(kind) => {
                record.rule(format!("DNS: {kind} records are not answered"));
                return Err(Deny::NotImplemented.into());
            }
        }
        let of = (caller.task(), policy.tasks().count());
        let found = services.synthetic_addresses.of_name(of, &name, Instant::now());
        let (addresses, is_new) = found.ok_or_else(|| {
            record.rule("DNS: the task has looked up too many names");
            Fail::Overloaded
        })?;
        if is_new {
            // Each name has one line. Connections have their own.
            record.answered();
        }
        Ok(Answer::Addresses(addresses))
    }
}

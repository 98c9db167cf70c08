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
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream, UdpSocket};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::Services;
use super::dns_message::{Answer, Kind, Question};
use super::listener::ListenerAddress;
use crate::audit::record::Record;
use crate::model::host::Host;
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Fail, Refusal, Verdict};
use crate::policy::settings::{ListenAt, ListenerMode, ListenerTasks};
use crate::stages::{authorize, identify};

/// The most queries over UDP that are answered at a time. Further ones are dropped, and their clients ask again.
const MAX_QUERIES: usize = 256;
/// The most connections at a time, and of one address. Further ones are closed.
const MAX_CONNECTIONS: usize = 128;
const MAX_CONNECTIONS_EACH: usize = 16;
/// The longest query that is read, in bytes. A name has at most 255, and options are ignored.
const MAX_QUERY: usize = 4096;
/// The time for the next query of a connection to arrive, and for its answer to be sent.
const CONNECTION_TIMEOUT: Duration = Duration::from_secs(5);
/// The most queries on one connection.
const QUERIES_PER_CONNECTION: usize = 100;
/// Pause after an error of a socket.
const BACK_OFF: Duration = Duration::from_millis(50);

/// The sockets of a DNS listener.
pub(crate) struct DnsListener {
    udp: UdpSocket,
    tcp: TcpListener,
    tasks: ListenerTasks,
}

impl DnsListener {
    /// Listens on an address over UDP and TCP. Another process of this user may listen there, too: the one that is being replaced.
    ///
    /// # Errors
    /// If the address is in use, or cannot be bound.
    pub(crate) fn bind(at: SocketAddr, tasks: ListenerTasks) -> io::Result<Self> {
        let bound = |kind, at: SocketAddr| {
            let socket = socket2::Socket::new(socket2::Domain::for_address(at), kind, None)?;
            socket.set_nonblocking(true)?;
            socket.set_reuse_port(true)?;
            socket.set_reuse_address(kind == socket2::Type::STREAM)?;
            socket.bind(&at.into())?;
            Ok::<_, io::Error>(socket)
        };
        let tcp = bound(socket2::Type::STREAM, at)?;
        tcp.listen(128)?;
        let tcp = TcpListener::from_std(tcp.into())?;
        // Port 0 stands for a free one, the same for both.
        let udp = UdpSocket::from_std(bound(socket2::Type::DGRAM, tcp.local_addr()?)?.into())?;
        Ok(Self { udp, tcp, tasks })
    }

    /// Returns the address, with the port that was assigned to it.
    pub(crate) fn address(&self) -> Option<ListenerAddress> {
        let at = ListenAt::Tcp(self.tcp.local_addr().ok()?);
        Some(ListenerAddress { at, mode: ListenerMode::Dns, is_direct: true })
    }

    /// Answers queries until the daemon drains or is taken over.
    pub(crate) async fn run(self, services: Arc<Services>) {
        let (udp, permits) = (Arc::new(self.udp), Arc::new(Semaphore::new(MAX_QUERIES)));
        // The queries of connections end with this.
        let mut connections = JoinSet::new();
        let mut open: HashMap<IpAddr, usize> = HashMap::new();
        let mut buffer = vec![0; MAX_QUERY];
        loop {
            tokio::select! {
                () = services.drain.cancelled() => return,
                () = services.last_requests.cancelled() => return,
                Some(ended) = connections.join_next() => {
                    // One that panicked keeps its place.
                    if let Some(count) = ended.ok().and_then(|address| open.get_mut(&address)) {
                        *count = count.saturating_sub(1);
                    }
                    open.retain(|_, count| *count > 0);
                }
                received = udp.recv_from(&mut buffer) => {
                    let Ok((length, from)) = received else {
                        tokio::time::sleep(BACK_OFF).await;
                        continue;
                    };
                    let (Some(query), Ok(permit)) = (buffer.get(..length), permits.clone().try_acquire_owned()) else { continue };
                    let (query, peer) = (query.to_vec(), peer(&self.tasks, from));
                    let (services, udp) = (services.clone(), udp.clone());
                    tokio::spawn(async move {
                        if let Some(answer) = answer(&services, &peer, &query).await {
                            // The client may be gone.
                            let _ = udp.send_to(&answer, from).await;
                        }
                        drop(permit);
                    });
                }
                accepted = self.tcp.accept() => match accepted {
                    Ok((stream, from)) => {
                        let address = from.ip();
                        let of_address = open.entry(address).or_default();
                        if connections.len() < MAX_CONNECTIONS && *of_address < MAX_CONNECTIONS_EACH {
                            *of_address = of_address.saturating_add(1);
                            let (services, peer) = (services.clone(), peer(&self.tasks, from));
                            connections.spawn(async move {
                                serve(&services, &peer, stream).await;
                                address
                            });
                        }
                        open.retain(|_, count| *count > 0);
                    }
                    Err(_) => tokio::time::sleep(BACK_OFF).await,
                },
            }
        }
    }
}

fn peer(tasks: &ListenerTasks, from: SocketAddr) -> Peer {
    match tasks.of_address(from.ip()) {
        Some(task) => Peer::at_address(from, task.clone()),
        None => Peer::tcp(from),
    }
}

/// Answers the queries of a connection (RFC 7766), one after the other.
async fn serve(services: &Services, peer: &Peer, mut stream: TcpStream) {
    for _ in 0..QUERIES_PER_CONNECTION {
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
        let Some(answer) = answer(services, peer, &query).await else { return };
        let Ok(length) = u16::try_from(answer.len()) else { return };
        let message = [&length.to_be_bytes()[..], &answer].concat();
        if !matches!(timeout(CONNECTION_TIMEOUT, stream.write_all(&message)).await, Ok(Ok(()))) {
            return;
        }
    }
}

/// Returns the answer to a query in wire format, or `None` if nothing may be sent.
async fn answer(services: &Services, peer: &Peer, query: &[u8]) -> Option<Vec<u8>> {
    let question = match Question::read(query) {
        Ok(question) => question,
        Err(answer) => return answer,
    };
    let mut record = services.record(peer);
    match find(services, peer, &question, &mut record).await {
        Ok(answer) => {
            if !record.is_answered() {
                record.forget();
            }
            question.answer(answer)
        }
        Err(refusal) => {
            services.settle(Some(refusal), &mut record).await;
            record.failed(refusal);
            question.answer(match record.shown(refusal) {
                Refusal::Deny(Deny::HostNotAllowed | Deny::TargetMalformed) => Answer::NoName,
                Refusal::Deny(_) => Answer::Refused,
                Refusal::Fail(_) => Answer::Failed,
            })
        }
    }
}

/// Returns the answer to a query of a task that may reach the name.
async fn find(services: &Services, peer: &Peer, question: &Question, record: &mut Record) -> Verdict<Answer> {
    let policy = services.policies.snapshot();
    record.dns_query();
    let caller = identify::caller(&policy, &services.ledger, &HeaderMap::new(), peer).await?;
    record.caller(caller.task(), caller.execution(), policy.task(caller.task()).map(|task| task.values()));
    let name = question.host();
    name.iter().for_each(|name| record.dns_name(name));
    services.throttle.take_dns_query(&caller, record).await?;
    let name = name.ok_or(Deny::TargetMalformed)?;
    authorize::name(&policy, &caller, &Host::Name(name.clone()), record)?;
    match question.kind() {
        Kind::V4 | Kind::V6 => {}
        Kind::Service => return Ok(Answer::Empty),
        Kind::Other(kind) => {
            record.rule(format!("DNS: {kind} records are not answered"));
            return Err(Deny::NotImplemented.into());
        }
    }
    let found = services.synthetic_addresses.of_name(caller.task(), &name, Instant::now());
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

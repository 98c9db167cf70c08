//! The demo's DNS server: scripted answers, counted queries.

use std::collections::HashMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, SocketAddr};
use std::sync::Arc;

use hickory_resolver::proto::op::{Message, MessageType, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA};
use hickory_resolver::proto::rr::{RData, Record, RecordType};
use parking_lot::{Mutex, MutexGuard};
use tokio::net::{TcpListener, UdpSocket};

/// The number of ports that are tried.
const MAX_TRIES: usize = 16;

/// A running DNS server on a free loopback port. It ends with the runtime.
#[derive(Clone)]
pub struct ScriptedDns {
    address: SocketAddr,
    script: Arc<Mutex<Script>>,
}

#[derive(Default)]
struct Script {
    answers: HashMap<String, Vec<Vec<IpAddr>>>,
    silent: Vec<String>,
    queries: Vec<(String, RecordType)>,
}

/// Binds a UDP port and reserves the TCP port of the same number. The proxy refuses the address of its DNS server as a
/// destination, so no origin may get that port.
async fn bind() -> io::Result<(TcpListener, UdpSocket)> {
    for _ in 0..MAX_TRIES {
        let reserved = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).await?;
        match UdpSocket::bind(reserved.local_addr()?).await {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return Ok((reserved, bound?)),
        }
    }
    Err(io::ErrorKind::AddrInUse.into())
}

impl ScriptedDns {
    /// Starts a server without names.
    ///
    /// # Errors
    /// If no socket can be bound.
    pub async fn start() -> io::Result<Self> {
        let (reserved, socket) = bind().await?;
        let address = socket.local_addr()?;
        let dns = Self { address, script: Arc::default() };
        let running = dns.clone();
        tokio::spawn(async move {
            let _reserved = reserved;
            running.run(socket).await;
        });
        Ok(dns)
    }

    /// Returns the server's address.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// Sets the answer for a name.
    pub fn set(&self, name: &str, addresses: &[&str]) {
        self.flip(name, &[addresses]);
    }

    /// Sets the successive answers for a name, with TTL 0. The last one is repeated.
    pub fn flip(&self, name: &str, answers: &[&[&str]]) {
        let parse = |list: &&[&str]| list.iter().filter_map(|ip| ip.parse().ok()).collect();
        self.script().answers.insert(name.to_owned(), answers.iter().map(parse).collect());
    }

    /// Makes the server ignore queries of this name.
    pub fn silence(&self, name: &str) {
        self.script().silent.push(name.to_owned());
    }

    /// Returns the number of queries for a name, A and AAAA together.
    #[must_use]
    pub fn queries(&self, name: &str) -> usize {
        self.script().queries.iter().filter(|(asked, _)| asked == name).count()
    }

    /// Returns the names of all queries, in order.
    #[must_use]
    pub fn all_queries(&self) -> Vec<String> {
        self.script().queries.iter().map(|(name, _)| name.clone()).collect()
    }

    /// Returns the reply to a query, both in wire format. Returns `None` for silenced names and invalid queries.
    #[must_use]
    pub fn reply(&self, query: &[u8]) -> Option<Vec<u8>> {
        self.answer(Message::from_vec(query).ok()?)
    }

    async fn run(self, socket: UdpSocket) {
        let mut buffer = [0; 1500];
        while let Ok((n, peer)) = socket.recv_from(&mut buffer).await {
            let reply = buffer.get(..n).and_then(|query| self.reply(query));
            if let Some(reply) = reply {
                // Send errors are ignored: the client may be gone.
                let _ = socket.send_to(&reply, peer).await;
            }
        }
    }

    fn answer(&self, query: Message) -> Option<Vec<u8>> {
        let question = query.queries.first()?.clone();
        let (name, kind) = (question.name().to_ascii().trim_end_matches('.').to_lowercase(), question.query_type());
        let mut script = self.script();
        let nth = script.queries.iter().filter(|asked| **asked == (name.clone(), kind)).count();
        script.queries.push((name.clone(), kind));
        if script.silent.contains(&name) {
            return None;
        }
        let mut reply = query;
        reply.metadata.message_type = MessageType::Response;
        reply.metadata.recursion_available = true;
        match script.answers.get(&name) {
            None => reply.metadata.response_code = ResponseCode::NXDomain,
            Some(answers) => {
                let current = answers.get(nth).or(answers.last());
                for ip in current.into_iter().flatten() {
                    let data = match (ip, kind) {
                        (IpAddr::V4(ip), RecordType::A) => RData::A(A(*ip)),
                        (IpAddr::V6(ip), RecordType::AAAA) => RData::AAAA(AAAA(*ip)),
                        _ => continue,
                    };
                    reply.add_answer(Record::from_rdata(question.name().clone(), 0, data));
                }
            }
        }
        reply.to_vec().ok()
    }

    fn script(&self) -> MutexGuard<'_, Script> {
        self.script.lock()
    }
}

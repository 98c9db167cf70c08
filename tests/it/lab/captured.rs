//! Captured connections. On Linux every address of 127.0.0.0/8 is the machine's own, so a connection to a synthetic address in it
//! reaches a transparent listener there, as one that the kernel has captured.

use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::DirBuilderExt;
use std::path::Path;

use hickory_resolver::proto::op::{Message, MessageType, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::{Name, RData, RecordType};
use sha2::{Digest, Sha256};
use tokio::net::TcpStream;

use super::Lab;
use exeat::policy::settings::ListenerMode;
use exeat::tls::authority::Authority;

/// The first address of the range, and the number of addresses that stand for names.
const RANGE: u32 = 127 << 24 | 18 << 16;
const SIZE: u32 = (1 << 16) - 2;

/// The addresses of a proxy that stand for names of the task `t`.
#[derive(Clone)]
pub struct Synthetic([u8; 32]);

impl Synthetic {
    /// Creates the CA of a proxy with this state directory, from which the addresses follow.
    pub fn of(state_dir: &Path) -> Self {
        std::fs::DirBuilder::new().recursive(true).mode(0o700).create(state_dir).unwrap();
        let authority = Authority::of(&state_dir.join("ca.pem"), Some(&state_dir.join("ca-key.pem"))).unwrap();
        Self(*authority.derived_secret("synthetic addresses"))
    }

    /// Returns the address that stands for a name.
    pub fn address(&self, name: &str) -> Ipv4Addr {
        let hash = Sha256::digest([&self.0[..], b"t\0", name.as_bytes()].concat());
        let number = u32::from_be_bytes(*hash.first_chunk().unwrap()) % SIZE;
        Ipv4Addr::from(RANGE + 1 + number)
    }

    /// Returns the configuration of a DNS listener, and of transparent listeners for these names and ports.
    pub fn listeners(&self, of: &[(&str, u16)]) -> String {
        let mut text = "[dns]\nsynthetic_ranges = [\"127.18.0.0/16\"]\n\
                        [[proxy.listeners]]\nlisten = \"127.0.0.1:0\"\nmode = \"dns\"\ntask = \"t\"\n"
            .to_owned();
        for (name, port) in of {
            let at = SocketAddr::new(self.address(name).into(), *port);
            text.push_str(&format!("[[proxy.listeners]]\nlisten = \"{at}\"\nmode = \"transparent\"\ntask = \"t\"\n"));
        }
        text
    }

    /// Connects to a port of the address that stands for a name.
    #[allow(clippy::disallowed_methods, reason = "the test plays the sandbox")]
    pub async fn connect(&self, name: &str, port: u16) -> TcpStream {
        let stream = TcpStream::connect((self.address(name), port)).await.unwrap();
        stream.set_nodelay(true).unwrap();
        stream
    }
}

/// Returns a query in wire format.
pub fn query(name: &str, kind: RecordType) -> Vec<u8> {
    let mut message = Message::new(7, MessageType::Query, OpCode::Query);
    message.metadata.recursion_desired = true;
    message.queries.push(Query::query(Name::from_ascii(name).unwrap(), kind));
    message.to_vec().unwrap()
}

/// The code and the addresses of an answer.
pub fn read(answer: &[u8]) -> (ResponseCode, Vec<String>) {
    let message = Message::from_vec(answer).unwrap();
    assert_eq!((message.metadata.id, message.metadata.message_type), (7, MessageType::Response));
    let addresses = message.answers.iter().map(|record| match &record.data {
        RData::A(ip) => ip.to_string(),
        RData::AAAA(ip) => ip.to_string(),
        other => panic!("{other:?}"),
    });
    (message.metadata.response_code, addresses.collect())
}

impl Lab {
    /// Returns the address of the DNS listener.
    pub fn dns_listener(&self) -> SocketAddr {
        let mut listeners = self.daemon.proxy().iter();
        listeners.find(|one| one.mode == ListenerMode::Dns).expect("a DNS listener").at.tcp().unwrap()
    }

    /// Asks the DNS listener over UDP.
    pub async fn ask_dns(&self, query: &[u8]) -> Vec<u8> {
        let socket = tokio::net::UdpSocket::bind("127.0.0.1:0").await.unwrap();
        socket.connect(self.dns_listener()).await.unwrap();
        socket.send(query).await.unwrap();
        let mut answer = vec![0; 2000];
        let length = tokio::time::timeout(super::TIMEOUT, socket.recv(&mut answer)).await.expect("an answer").unwrap();
        answer.truncate(length);
        answer
    }

    /// Returns the answer to a query for the addresses of a name.
    pub async fn lookup(&self, name: &str, kind: RecordType) -> (ResponseCode, Vec<String>) {
        read(&self.ask_dns(&query(name, kind)).await)
    }
}

//! Queries to the DNS listener, and their answers in wire format (RFC 1035).

use hickory_resolver::proto::op::{Edns, Message, MessageType, OpCode, Query, ResponseCode};
use hickory_resolver::proto::rr::rdata::{A, AAAA};
use hickory_resolver::proto::rr::{DNSClass, RData, Record, RecordType};

use super::synthetic_addresses::Synthetic;
use crate::model::host::{Host, HostName};

/// The length of a message's header, in bytes.
const HEADER: usize = 12;
/// The time for which clients may keep an answer, in seconds.
const TTL: u32 = 60;
/// The longest message that is taken over UDP, in bytes, as EDNS says it (RFC 6891 §6.2.5; no answer is as long).
const MAX_UDP: u16 = 1232;

/// The most additional records of a query: options (OPT), and a signature.
const MAX_ADDITIONAL: u16 = 4;

/// A query for one name.
pub(super) struct Question {
    id: u16,
    asked: Query,
    recursion_desired: bool,
    has_edns: bool,
}

/// The records that a query is for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// The addresses of a family.
    V4,
    V6,
    /// Records that carry free text, or all records: they are refused.
    Refused(RecordType),
    /// Other records, such as those of other ways to the host (RFC 9460). There are none.
    Other,
}

/// The answer to a query.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Answer {
    Addresses(Synthetic),
    Empty,
    /// The name does not exist.
    NoName,
    Refused,
    Failed,
}

impl Question {
    /// Reads a query.
    ///
    /// # Errors
    /// The message to answer with, if it is no query that could be answered. `None` if nothing may be sent: the message is no
    /// query, or is too short for one.
    pub(super) fn read(bytes: &[u8]) -> Result<Self, Option<Vec<u8>>> {
        let header = bytes.first_chunk::<HEADER>().ok_or(None)?;
        let id = u16::from_be_bytes([header[0], header[1]]);
        let is_response = header[2] & 0x80 != 0;
        // An answer to an answer could go on for ever.
        if is_response {
            return Err(None);
        }
        let refused = |code| Err(Some(error(id, code)));
        // The counts of the sections, for which memory is reserved.
        let counts = [[header[4], header[5]], [header[6], header[7]], [header[8], header[9]], [header[10], header[11]]];
        let [questions, answers, authorities, additional] = counts.map(u16::from_be_bytes);
        let is_query = header[2] & 0x78 == 0;
        if !is_query {
            return refused(ResponseCode::NotImp);
        }
        if questions != 1 || answers != 0 || authorities != 0 || additional > MAX_ADDITIONAL {
            return refused(ResponseCode::FormErr);
        }
        let Ok(message) = Message::from_vec(bytes) else { return refused(ResponseCode::FormErr) };
        if message.edns.as_ref().is_some_and(|edns| edns.version() != 0) {
            return refused(ResponseCode::BADVERS);
        }
        let [asked] = message.queries.as_slice() else { return refused(ResponseCode::FormErr) };
        if asked.query_class() != DNSClass::IN {
            return refused(ResponseCode::Refused);
        }
        let recursion_desired = message.metadata.recursion_desired;
        Ok(Self { id, asked: asked.clone(), recursion_desired, has_edns: message.edns.is_some() })
    }

    /// Returns the name in its normal form, or `None` if no host has such a name.
    pub(super) fn host(&self) -> Option<HostName> {
        let text = self.asked.name().to_ascii();
        match Host::parse(text.strip_suffix('.').unwrap_or(&text)) {
            Ok(Host::Name(name)) => Some(name),
            Ok(Host::Ip(_)) | Err(_) => None,
        }
    }

    /// Returns the records that it is for.
    pub(super) fn kind(&self) -> Kind {
        match self.asked.query_type() {
            RecordType::A => Kind::V4,
            RecordType::AAAA => Kind::V6,
            refused @ (RecordType::TXT | RecordType::NULL | RecordType::ANY) => Kind::Refused(refused),
            _ => Kind::Other,
        }
    }

    /// Returns an answer in wire format, with the name as it was written.
    pub(super) fn answer(&self, answer: Answer) -> Option<Vec<u8>> {
        let code = match answer {
            Answer::Addresses(_) | Answer::Empty => ResponseCode::NoError,
            Answer::NoName => ResponseCode::NXDomain,
            Answer::Refused => ResponseCode::Refused,
            Answer::Failed => ResponseCode::ServFail,
        };
        let mut message = Message::new(self.id, MessageType::Response, OpCode::Query);
        message.metadata.response_code = code;
        message.metadata.recursion_desired = self.recursion_desired;
        message.metadata.recursion_available = true;
        if let Answer::Addresses(found) = answer {
            let data = match self.kind() {
                Kind::V4 => found.v4.map(|ip| RData::A(A(ip))),
                Kind::V6 => found.v6.map(|ip| RData::AAAA(AAAA(ip))),
                Kind::Refused(_) | Kind::Other => None,
            };
            message.answers.extend(data.map(|data| Record::from_rdata(self.asked.name().clone(), TTL, data)));
        }
        message.queries.push(self.asked.clone());
        if self.has_edns {
            let mut edns = Edns::new();
            edns.set_max_payload(MAX_UDP);
            message.edns = Some(edns);
        }
        message.to_vec().ok()
    }
}

/// Returns a message that has nothing but a code.
fn error(id: u16, code: ResponseCode) -> Vec<u8> {
    let mut message = Message::new(id, MessageType::Response, OpCode::Query);
    message.metadata.response_code = code;
    // This code does not fit into the header (RFC 6891 §6.1.3).
    message.edns = (code == ResponseCode::BADVERS).then(Edns::new);
    message.to_vec().unwrap_or_default()
}

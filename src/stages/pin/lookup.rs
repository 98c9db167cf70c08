//! The two queries of a lookup, for IPv4 and IPv6.

use std::io::ErrorKind;
use std::net::IpAddr;
use std::time::{Duration, Instant};

use hickory_resolver::Resolver;
use hickory_resolver::net::{DnsError, NetError};
use hickory_resolver::proto::op::ResponseCode;
use hickory_resolver::proto::rr::{Name, RData, RecordType};
use tokio::time::timeout;

use super::answer_size::DnsSockets;
use crate::audit::record::Record;
use crate::model::dns::DnsFailure;
use crate::model::refusal::{Fail, Refusal};

/// Once one family has answered, the other one may take this long. RFC 8305 §3 waits less, but here every address has
/// to be checked.
const SECOND_FAMILY_TIMEOUT: Duration = Duration::from_millis(500);

/// The addresses of a name, or the reason for which there are none.
#[derive(Clone)]
pub(super) struct CachedAddresses {
    pub(super) addresses: Result<Vec<IpAddr>, DnsFailure>,
    pub(super) until: Instant,
}

/// The reason for which a lookup returns no address.
pub(super) enum LookupFailure {
    /// Too many lookups are pending, of the execution or in total.
    Overloaded,
    Dns(DnsFailure),
}

impl LookupFailure {
    /// Returns the refusal, and adds the reason to the record.
    pub(super) fn refusal(self, record: &mut Record) -> Refusal {
        match self {
            Self::Overloaded => Fail::Overloaded.into(),
            Self::Dns(failure) => record.resolve_failed(failure),
        }
    }
}

impl From<LookupFailure> for Refusal {
    fn from(failure: LookupFailure) -> Self {
        match failure {
            LookupFailure::Overloaded => Fail::Overloaded.into(),
            LookupFailure::Dns(_) => Fail::ResolveFailed.into(),
        }
    }
}

/// The addresses of one family, and the end of their validity.
pub(super) type FamilyAnswer = Result<(Vec<IpAddr>, Instant), DnsFailure>;

/// Queries the addresses of one family.
pub(super) async fn query_family(dns: &Resolver<DnsSockets>, name: Name, family: RecordType) -> FamilyAnswer {
    let lookup = dns.lookup(name, family).await.map_err(|error| failure_of(&error))?;
    let address = |data: &RData| match data {
        RData::A(a) => Some(IpAddr::V4(a.0)),
        RData::AAAA(aaaa) => Some(IpAddr::V6(aaaa.0)),
        _ => None,
    };
    let found: Vec<_> = lookup.answers().iter().filter_map(|record| address(&record.data)).collect();
    if found.is_empty() { Err(DnsFailure::NoAddress) } else { Ok((found, lookup.valid_until())) }
}

/// Returns both families' answers. If the first one has addresses, the second one is waited for only briefly.
pub(super) async fn join_families(
    first: FamilyAnswer,
    second: impl Future<Output = FamilyAnswer>,
) -> (FamilyAnswer, FamilyAnswer) {
    let second = match &first {
        Ok(_) => timeout(SECOND_FAMILY_TIMEOUT, second).await.unwrap_or(Err(DnsFailure::TimedOut)),
        Err(_) => second.await,
    };
    (first, second)
}

fn failure_of(error: &NetError) -> DnsFailure {
    match error {
        NetError::Dns(DnsError::NoRecordsFound(found)) => failure_of_code(found.response_code),
        NetError::Dns(DnsError::ResponseCode(code)) => failure_of_code(*code),
        NetError::Timeout => DnsFailure::TimedOut,
        // Also for an encrypted connection that failed: hickory keeps no reason.
        NetError::NoConnections => DnsFailure::Unreachable,
        NetError::Io(error) => match error.kind() {
            ErrorKind::TimedOut => DnsFailure::TimedOut,
            ErrorKind::InvalidData | ErrorKind::InvalidInput => DnsFailure::Unusable,
            _ => DnsFailure::Unreachable,
        },
        _ => DnsFailure::Unusable,
    }
}

fn failure_of_code(code: ResponseCode) -> DnsFailure {
    match code {
        ResponseCode::NXDomain => DnsFailure::NoName,
        ResponseCode::NoError => DnsFailure::NoAddress,
        ResponseCode::Refused => DnsFailure::Refused,
        _ => DnsFailure::ServerFailed,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_family_without_addresses_does_not_limit_the_other() {
        let found = |ip: &str| Ok((vec![ip.parse().unwrap()], Instant::now()));
        let after = |millis, answer: FamilyAnswer| async move {
            tokio::time::sleep(Duration::from_millis(millis)).await;
            answer
        };
        let rows = [
            (Err(DnsFailure::NoAddress), 900, 1, "the first family has no addresses"),
            (found("192.0.2.1"), 400, 2, "both families answer in time"),
            (found("192.0.2.1"), 900, 1, "the second family is late and left out"),
        ];
        for (first, millis, count, what) in rows {
            let (first, second) = join_families(first, after(millis, found("2001:db8::1"))).await;
            assert_eq!(usize::from(first.is_ok()) + usize::from(second.is_ok()), count, "{what}");
        }
    }
}

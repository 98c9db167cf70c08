//! SOCKS5 (RFC 1928), with user names and passwords (RFC 1929). A request is a CONNECT in another form: it goes through the same
//! stages, and the connection is the same tunnel.

use std::net::{Ipv4Addr, Ipv6Addr};
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use bytes::{Buf, BytesMut};
use http::header::PROXY_AUTHORIZATION;
use http::{HeaderMap, HeaderValue};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::{Instant, timeout, timeout_at};
use zeroize::{Zeroize, Zeroizing};

use super::accept::write_and_linger;
use super::client::{Client, ClientStream};
use super::connection::{self, Refused};
use super::io::Rewind;
use super::respond;
use super::tunnel::{ClientSide, Tunnel, TunnelIo};
use crate::audit::record::Record;
use crate::model::refusal::{Deny, Refusal, Verdict};
use crate::policy::rule::Policy;
use crate::stages::identify::Caller;

const VERSION: u8 = 5;
/// The version of the exchange of user name and password.
const PASSWORD_VERSION: u8 = 1;
/// The methods of authentication.
const NO_AUTHENTICATION: u8 = 0;
const PASSWORD: u8 = 2;
const NO_METHOD: u8 = 0xff;
/// The commands.
const CONNECT: u8 = 1;
const BIND: u8 = 2;
const UDP_ASSOCIATE: u8 = 3;
/// The kinds of addresses.
const IPV4: u8 = 1;
const NAME: u8 = 3;
const IPV6: u8 = 4;
/// The reply codes that stand for no refusal of a destination.
const SUCCEEDED: u8 = 0;
const COMMAND_NOT_SUPPORTED: u8 = 7;
const ADDRESS_NOT_SUPPORTED: u8 = 8;
/// The bytes of a buffer for the messages of a client, of which all together have at most 1,040.
const STEP: usize = 2048;

/// A negotiation that failed.
struct Failed {
    refused: Refused,
    answer: Answer,
}

/// The message that tells the client that a negotiation has failed.
enum Answer {
    /// No method of authentication is acceptable.
    Method,
    /// User name or password are wrong.
    Password,
    /// The reply to a request, with this code or that of the refusal.
    Reply(Option<u8>),
}

impl Answer {
    fn to(self, refused: impl Into<Refused>) -> Failed {
        Failed { refused: refused.into(), answer: self }
    }

    fn bytes(&self, refusal: Refusal) -> Vec<u8> {
        match self {
            Self::Method => vec![VERSION, NO_METHOD],
            Self::Password => vec![PASSWORD_VERSION, 1],
            Self::Reply(code) => reply(code.unwrap_or_else(|| respond::socks_code(refusal))),
        }
    }
}

/// Returns the reply to a request. The address that the proxy has connected from is not told.
fn reply(code: u8) -> Vec<u8> {
    vec![VERSION, code, 0, IPV4, 0, 0, 0, 0, 0, 0]
}

/// Serves a connection until it ends or fails, or the daemon drains.
pub(super) async fn serve(client: Arc<Client>, stream: ClientStream) {
    tokio::select! {
        biased;
        () = client.gone() => {}
        () = run(&client, stream) => {}
    }
}

async fn run(client: &Arc<Client>, stream: ClientStream) {
    let services = &client.services;
    let limit = services.settings.proxy.handshake_timeout;
    let mut wire = Wire { stream, read: BytesMut::with_capacity(STEP), deadline: client.deadline(limit) };
    // A connection without a byte leaves no line.
    if wire.fill(1).await.is_err() {
        return;
    }
    let mut record = services.record(&client.peer);
    let failed = match negotiate(client, &mut wire, &mut record).await {
        Ok(tunnel) => {
            record.keep_line();
            let Ok(side) = wire.established(limit).await else { return record.abandoned() };
            return tunnel.run(side, client.clone(), record).await;
        }
        Err(failed) => failed,
    };
    let refusal = failed.refused.refusal;
    services.settle(Some(refusal), &mut record).await;
    if let Some(tunnel) = failed.refused.open_inside(&mut record) {
        let Ok(side) = wire.established(limit).await else { return };
        return tunnel.run(side, client.clone(), record).await;
    }
    record.failed(refusal);
    let answer = failed.answer.bytes(record.shown(refusal));
    drop(record);
    let _ = timeout(limit, write_and_linger(wire.stream, &answer)).await;
}

/// Negotiates the authentication, reads the request, and opens the tunnel that it asks for.
async fn negotiate(client: &Arc<Client>, wire: &mut Wire, record: &mut Record) -> Result<Tunnel, Failed> {
    let (policy, caller) = authenticate(client, wire, record).await?;
    wire.deadline = client.deadline(client.services.settings.proxy.handshake_timeout);
    let authority = read_request(wire, record).await?;
    let request = connection::connect_request(&authority);
    record.request(&request);
    let mut head = request.into_parts().0;
    let opened = connection::connect(&client.services, (&policy, &caller), (&mut head, None), record).await;
    opened.map_err(|refused| Answer::Reply(None).to(refused))
}

/// Reads the methods that the client offers, and identifies the caller by user name and password if that is among them.
async fn authenticate(client: &Client, wire: &mut Wire, record: &mut Record) -> Result<(Arc<Policy>, Caller), Failed> {
    let malformed = |refusal: Refusal| Answer::Method.to(refusal);
    let version = wire.byte().await.map_err(malformed)?;
    if version != VERSION {
        record.rule(format!("SOCKS: the first byte is {version}, not that of version 5"));
        return Err(malformed(Deny::RequestMalformed.into()));
    }
    let count = wire.byte().await.map_err(malformed)?;
    let methods = wire.take(count.into()).await.map_err(malformed)?;
    if !methods.contains(&PASSWORD) {
        if !methods.contains(&NO_AUTHENTICATION) {
            record.rule("SOCKS: no user name and password offered");
            return Err(malformed(Deny::CallerUnknown.into()));
        }
        let identified = connection::identify(client, &HeaderMap::new(), record).await.map_err(malformed)?;
        wire.write(&[VERSION, NO_AUTHENTICATION]).await.map_err(malformed)?;
        return Ok(identified);
    }
    wire.write(&[VERSION, PASSWORD]).await.map_err(malformed)?;
    let fields = read_password(wire, record).await.map_err(|refusal| Answer::Password.to(refusal))?;
    let identified = connection::identify(client, &fields, record).await;
    let identified = identified.map_err(|refusal| Answer::Password.to(refusal))?;
    wire.write(&[PASSWORD_VERSION, 0]).await.map_err(|refusal| Answer::Password.to(refusal))?;
    Ok(identified)
}

/// Reads user name and password, and returns the field that has both in HTTP. A client that has none sends them empty.
async fn read_password(wire: &mut Wire, record: &mut Record) -> Verdict<HeaderMap> {
    if wire.byte().await? != PASSWORD_VERSION {
        record.rule("SOCKS: user name and password are malformed");
        return Err(Deny::RequestMalformed.into());
    }
    let length = wire.byte().await?.into();
    // With room for the password, so that nothing is moved.
    let mut both = Zeroizing::new(Vec::with_capacity(STEP));
    both.extend_from_slice(&wire.take(length).await?);
    let length = wire.byte().await?.into();
    // It could be any other pair.
    if both.contains(&b':') {
        record.rule("SOCKS: the user name has a colon");
        return Err(Deny::CallerUnknown.into());
    }
    let password = wire.take(length).await?;
    // No token is empty. Java sends the name of its user.
    if password.is_empty() {
        return Ok(HeaderMap::new());
    }
    both.push(b':');
    both.extend_from_slice(&password);
    let mut text = Zeroizing::new(String::with_capacity(STEP));
    text.push_str("Basic ");
    STANDARD.encode_string(&both, &mut text);
    let mut field = HeaderValue::from_str(&text).map_err(|_| Deny::CallerUnknown)?;
    field.set_sensitive(true);
    Ok(HeaderMap::from_iter([(PROXY_AUTHORIZATION, field)]))
}

/// Reads a request, and returns its destination as the target of a CONNECT.
async fn read_request(wire: &mut Wire, record: &mut Record) -> Result<String, Failed> {
    let closed = |refusal: Refusal| Answer::Reply(None).to(refusal);
    let (version, command) = (wire.byte().await.map_err(closed)?, wire.byte().await.map_err(closed)?);
    let (reserved, kind) = (wire.byte().await.map_err(closed)?, wire.byte().await.map_err(closed)?);
    if version != VERSION || reserved != 0 {
        record.rule("SOCKS: the request is malformed");
        return Err(closed(Deny::RequestMalformed.into()));
    }
    let host = match kind {
        IPV4 => {
            let octets = wire.take(4).await.map_err(closed)?;
            octets.first_chunk::<4>().map(|octets| Ipv4Addr::from(*octets).to_string())
        }
        IPV6 => {
            let octets = wire.take(16).await.map_err(closed)?;
            octets.first_chunk::<16>().map(|octets| format!("[{}]", Ipv6Addr::from(*octets)))
        }
        NAME => {
            let length = wire.byte().await.map_err(closed)?;
            let name = wire.take(length.into()).await.map_err(closed)?;
            std::str::from_utf8(&name).ok().map(|name| {
                // Some clients send an address as a name.
                if name.parse::<Ipv6Addr>().is_ok() { format!("[{name}]") } else { name.to_owned() }
            })
        }
        _ => {
            record.rule("SOCKS: the address is neither a name nor an IP address");
            return Err(Answer::Reply(Some(ADDRESS_NOT_SUPPORTED)).to(Refusal::from(Deny::TargetMalformed)));
        }
    };
    let port = [wire.byte().await.map_err(closed)?, wire.byte().await.map_err(closed)?];
    if command != CONNECT {
        record.rule(match command {
            BIND => "SOCKS: BIND is not served",
            UDP_ASSOCIATE => "SOCKS: UDP ASSOCIATE is not served",
            _ => "SOCKS: unknown command",
        });
        return Err(Answer::Reply(Some(COMMAND_NOT_SUPPORTED)).to(Refusal::from(Deny::NotImplemented)));
    }
    // Bytes that are no text are no name either.
    Ok(format!("{}:{}", host.unwrap_or_default(), u16::from_be_bytes(port)))
}

/// The client's connection while it negotiates.
struct Wire {
    stream: ClientStream,
    /// Bytes that have been read and not taken.
    read: BytesMut,
    /// The end of the time that the client has for its next messages.
    deadline: Instant,
}

impl Wire {
    /// Reads until there are `length` bytes.
    ///
    /// # Errors
    /// [`Deny::HeaderTimeout`], or [`Deny::RequestMalformed`] if the connection ends before.
    async fn fill(&mut self, length: usize) -> Verdict<()> {
        while self.read.len() < length {
            let read = timeout_at(self.deadline, self.stream.read_buf(&mut self.read)).await;
            match read.map_err(|_| Deny::HeaderTimeout)? {
                Ok(1..) => {}
                Ok(0) | Err(_) => return Err(Deny::RequestMalformed.into()),
            }
        }
        Ok(())
    }

    /// Takes this many bytes.
    async fn take(&mut self, length: usize) -> Verdict<Zeroizing<Vec<u8>>> {
        self.fill(length).await?;
        let taken = Zeroizing::new(self.read.get(..length).unwrap_or_default().to_vec());
        // They may be a password.
        self.read.get_mut(..length).unwrap_or_default().zeroize();
        self.read.advance(length);
        Ok(taken)
    }

    async fn byte(&mut self) -> Verdict<u8> {
        self.fill(1).await?;
        Ok(self.read.get_u8())
    }

    async fn write(&mut self, bytes: &[u8]) -> Verdict<()> {
        match timeout_at(self.deadline, self.stream.write_all(bytes)).await {
            Ok(Ok(())) => Ok(()),
            Ok(Err(_)) => Err(Deny::RequestMalformed.into()),
            Err(_) => Err(Deny::HeaderTimeout.into()),
        }
    }

    /// Tells the client that the tunnel is open, and returns its side of the tunnel.
    ///
    /// # Errors
    /// If the client does not take it.
    async fn established(mut self, limit: Duration) -> Verdict<ClientSide> {
        self.deadline = Instant::now() + limit;
        self.write(&reply(SUCCEEDED)).await?;
        Ok(ClientSide::Stream(Rewind::new(self.read.freeze(), TunnelIo::Left(self.stream))))
    }
}

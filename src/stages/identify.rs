//! Who is asking: the token says which task, and which execution of it.

use std::net::SocketAddr;

use base64::Engine;
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;

use crate::model::name::{ExecutionId, TaskName};
use crate::model::refusal::{Deny, Verdict};
use crate::model::secret::TokenHash;
use crate::policy::rule::{Policy, Task};

/// Evidence that a request came from an execution of a task.
///
/// ```compile_fail
/// use exeat::{model::name::{ExecutionId, TaskName}, stages::identify::Caller};
/// let task = TaskName::new("research");
/// // Nobody becomes a caller without a token.
/// let token = exeat::model::secret::TokenHash::of(b"guessed");
/// let caller = Caller { execution: ExecutionId::of_static(&task), task, peer: "127.0.0.1:1".parse().unwrap(), token };
/// ```
/// ```
/// use exeat::{model::name::{ExecutionId, TaskName}, policy::rule::Policy, stages::identify};
/// let peer = "127.0.0.1:1".parse().unwrap();
/// assert!(identify::caller(&Policy::default(), &http::HeaderMap::new(), peer).is_err());
/// ```
#[derive(Clone)]
pub struct Caller {
    task: TaskName,
    execution: ExecutionId,
    peer: SocketAddr,
    token: TokenHash,
}

impl Caller {
    /// The task.
    #[must_use]
    pub fn task(&self) -> &TaskName {
        &self.task
    }

    /// The execution.
    #[must_use]
    pub fn execution(&self) -> &ExecutionId {
        &self.execution
    }

    /// The token that proved it, hashed: a later policy may no longer take it.
    #[must_use]
    pub fn token(&self) -> TokenHash {
        self.token
    }

    /// Where the connection comes from.
    #[must_use]
    pub fn peer(&self) -> SocketAddr {
        self.peer
    }
}

/// Reads `Proxy-Authorization`: `Basic base64(id:token)` or `Bearer token`.
///
/// # Errors
/// [`Deny::CallerUnknown`] if there is none, more than one, or the token is nobody's.
pub fn caller(policy: &Policy, headers: &HeaderMap, peer: SocketAddr) -> Verdict<Caller> {
    let mut fields = headers.get_all(PROXY_AUTHORIZATION).iter();
    let (Some(field), None) = (fields.next(), fields.next()) else { return Err(Deny::CallerUnknown.into()) };
    let (task, token) = task_of(policy, field.as_bytes()).ok_or(Deny::CallerUnknown)?;
    let execution = ExecutionId::of_static(task.name());
    Ok(Caller { task: task.name().clone(), execution, peer, token })
}

fn task_of<'p>(policy: &'p Policy, field: &[u8]) -> Option<(&'p Task, TokenHash)> {
    let field = std::str::from_utf8(field).ok()?;
    let (scheme, credentials) = field.split_once(' ')?;
    let credentials = credentials.trim_matches(' ');
    if scheme.eq_ignore_ascii_case("bearer") {
        let hash = TokenHash::of(credentials.as_bytes());
        return policy.task_by_token(hash).map(|task| (task.as_ref(), hash));
    }
    if !scheme.eq_ignore_ascii_case("basic") {
        return None;
    }
    let decoded = zeroize::Zeroizing::new(base64::engine::general_purpose::STANDARD.decode(credentials).ok()?);
    let colon = decoded.iter().position(|b| *b == b':')?;
    let (id, token) = (decoded.get(..colon)?, decoded.get(colon.saturating_add(1)..)?);
    let hash = TokenHash::of(token);
    let task = policy.task(&TaskName::new(std::str::from_utf8(id).ok()?))?;
    task.has_token(hash).then_some((task, hash))
}

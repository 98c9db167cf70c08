//! Who is asking: the token says which task, and which execution of it; or the listener does, which has
//! seen a certificate or a user id.

use base64::Engine;
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;

use crate::model::name::{ExecutionId, TaskName};
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Verdict};
use crate::model::secret::TokenHash;
use crate::policy::rule::{Policy, Task};

/// Evidence that a request came from an execution of a task.
///
/// ```compile_fail
/// use exeat::{model::name::{ExecutionId, TaskName}, stages::identify::{Caller, Proof}};
/// let task = TaskName::new("research");
/// // Nobody becomes a caller without proof.
/// let caller = Caller { execution: ExecutionId::of_static(&task), task, proof: Proof::Listener };
/// ```
/// ```
/// use exeat::{model::{name::{ExecutionId, TaskName}, peer::Peer}, policy::rule::Policy, stages::identify};
/// let peer = Peer::tcp("127.0.0.1:1".parse().unwrap());
/// assert!(identify::caller(&Policy::default(), &http::HeaderMap::new(), &peer).is_err());
/// ```
#[derive(Clone)]
pub struct Caller {
    task: TaskName,
    execution: ExecutionId,
    proof: Proof,
}

/// What proved who a caller is.
#[derive(Clone, Copy)]
pub enum Proof {
    /// Its listener: a client certificate, or a user id of this machine.
    Listener,
    /// A token, hashed: a later policy may no longer take it.
    Token(TokenHash),
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

    /// What proved it.
    #[must_use]
    pub fn proof(&self) -> Proof {
        self.proof
    }
}

/// Reads `Proxy-Authorization`: `Basic base64(id:token)` or `Bearer token`. Where the listener vouches for
/// a single task nothing needs to be sent; what is sent has to name a task that it vouches for.
///
/// # Errors
/// [`Deny::CallerUnknown`] if nothing says who it is, the field stands there twice, the token is nobody's,
/// or listener and token do not agree.
pub fn caller(policy: &Policy, headers: &HeaderMap, peer: &Peer) -> Verdict<Caller> {
    let mut fields = headers.get_all(PROXY_AUTHORIZATION).iter();
    let (task, proof) = match (fields.next(), fields.next()) {
        (Some(field), None) => {
            let (task, token) = task_of(policy, field.as_bytes()).ok_or(Deny::CallerUnknown)?;
            (task, Proof::Token(token))
        }
        (None, _) => (vouched(policy, peer).ok_or(Deny::CallerUnknown)?, Proof::Listener),
        (Some(_), Some(_)) => return Err(Deny::CallerUnknown.into()),
    };
    if peer.tasks().is_some_and(|tasks| !tasks.contains(task.name())) {
        return Err(Deny::CallerUnknown.into());
    }
    Ok(Caller { task: task.name().clone(), execution: ExecutionId::of_static(task.name()), proof })
}

/// The one task that the listener vouches for. A certificate may bear names that mean nothing here.
fn vouched<'p>(policy: &'p Policy, peer: &Peer) -> Option<&'p Task> {
    let mut known = peer.tasks()?.iter().filter_map(|name| policy.task(name));
    let task = known.next()?;
    known.next().is_none().then_some(task)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::compile::{self, SourceError, Surroundings};
    use crate::policy::settings::Vault;

    struct NoSecrets;
    impl compile::Secrets for NoSecrets {
        fn secret(&self, _: &Vault, _: &str, name: &str) -> Result<crate::model::secret::Secret, SourceError> {
            Err(SourceError::Missing(name.to_owned()))
        }
    }

    fn policy() -> Policy {
        let text = "[tasks.a]\ntoken = \"env:A\"\n[tasks.b]\ntoken = \"env:B\"\n[tasks.c]\n";
        let env = |name: &str| Some(format!("a-token-of-24-bytes-or-more-{name}"));
        let here = std::path::Path::new("/nowhere");
        let around = Surroundings { base: here, state_dir: here, env: &env, secrets: &NoSecrets };
        compile::compile(text, &around).unwrap_or_else(|problems| panic!("{problems:?}")).policy
    }

    #[test]
    fn listener_and_token_have_to_agree() {
        let policy = policy();
        let address = "192.0.2.1:1".parse().unwrap();
        let names = |names: &[&str]| Peer::certified(address, names.iter().map(|name| TaskName::new(name)).collect());
        let tcp = Peer::tcp(address);
        let unix = |task: Option<&str>| Peer::unix(1000, task.map(TaskName::new));
        let bearer = |name: &str| format!("Bearer a-token-of-24-bytes-or-more-{name}");
        let (a, b) = (bearer("A"), bearer("B"));
        let rows: [(&Peer, &[&str], Option<&str>); 19] = [
            (&tcp, &[], None),
            (&tcp, &[&a], Some("a")),
            (&tcp, &[&a, &a], None),
            (&tcp, &["Bearer guessed"], None),
            (&unix(None), &[], None),
            (&unix(None), &[&b], Some("b")),
            (&unix(Some("a")), &[], Some("a")),
            (&unix(Some("c")), &[], Some("c")),
            (&unix(Some("a")), &[&a], Some("a")),
            (&unix(Some("a")), &[&b], None),
            (&unix(Some("a")), &["Bearer guessed"], None),
            (&unix(Some("gone")), &[], None),
            (&names(&["a"]), &[], Some("a")),
            (&names(&["a", "host.example"]), &[], Some("a")),
            (&names(&["a", "b"]), &[], None),
            (&names(&["a", "b"]), &[&b], Some("b")),
            (&names(&["a"]), &[&b], None),
            (&names(&[]), &[], None),
            (&names(&["host.example"]), &[&a], None),
        ];
        for (peer, fields, want) in rows {
            let mut headers = HeaderMap::new();
            for field in fields {
                headers.append(PROXY_AUTHORIZATION, field.parse().unwrap());
            }
            let got = caller(&policy, &headers, peer).ok().map(|caller| caller.task().to_string());
            assert_eq!(got.as_deref(), want, "{peer:?} {fields:?}");
        }
    }
}

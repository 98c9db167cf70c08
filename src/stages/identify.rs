//! Identifies the caller: the task and its execution, by the token, or by what the listener knows: a client certificate, a user
//! id, the network, or the listener itself.

use std::sync::Arc;

use base64::Engine;
use http::HeaderMap;
use http::header::PROXY_AUTHORIZATION;
use ipnet::IpNet;

use crate::ledger::{Execution, Ledger, Millis};
use crate::model::name::{ExecutionId, TaskName};
use crate::model::peer::Peer;
use crate::model::refusal::{Deny, Fail, Verdict};
use crate::model::secret::TokenHash;
use crate::model::token;
use crate::policy::rule::{Policy, Task};

/// Evidence that a request came from an execution of a task.
///
/// ```compile_fail
/// use exeat::{model::name::TaskName, stages::identify::{Caller, Proof}};
/// fn of(known: Caller) -> Caller {
///     // A caller cannot be created without proof.
///     Caller { proof: Proof::Listener, ..known }
/// }
/// ```
/// ```
/// use exeat::{model::name::TaskName, stages::identify::Caller};
/// fn of(known: &Caller) -> &TaskName { known.task() }
/// ```
#[derive(Clone)]
pub struct Caller {
    execution: Arc<Execution>,
    proof: Proof,
}

/// The proof of a caller's identity.
#[derive(Clone, Copy)]
pub enum Proof {
    /// The token of a started execution. The ledger decides whether it is still valid.
    Execution,
    /// The listener: a client certificate, a local user id, the client's network, or a task of its own.
    Listener,
    /// A task's static token, hashed. A later policy may no longer accept it.
    Token(TokenHash),
}

impl Caller {
    /// Returns the task.
    #[must_use]
    pub fn task(&self) -> &TaskName {
        &self.execution.task
    }

    /// Returns the execution's id.
    #[must_use]
    pub fn execution(&self) -> &ExecutionId {
        &self.execution.id
    }

    /// Returns the ledger's data about the execution.
    #[must_use]
    pub fn facts(&self) -> &Execution {
        &self.execution
    }

    /// Returns the proof of the caller's identity.
    #[must_use]
    pub fn proof(&self) -> Proof {
        self.proof
    }
}

/// Identifies the caller by `Proxy-Authorization`: `Basic base64(id:token)` or `Bearer token`. If the listener vouches
/// for exactly one task, the field may be omitted; if it is sent, it must name a task that the listener vouches for. A
/// started execution may be restricted to a network and is unknown from anywhere else.
///
/// # Errors
/// [`Deny::CallerUnknown`] if nothing identifies the caller, the field is repeated, the token is unknown, or listener
/// and token disagree; [`Fail::LedgerUnavailable`].
pub async fn caller(policy: &Policy, ledger: &Ledger, headers: &HeaderMap, peer: &Peer) -> Verdict<Caller> {
    let mut fields = headers.get_all(PROXY_AUTHORIZATION).iter();
    let caller = match (fields.next(), fields.next()) {
        (Some(field), None) => {
            let sent = ProxyAuthorization::parse(field.as_bytes()).ok_or(Deny::CallerUnknown)?;
            match sent.find_task(policy) {
                Some(task) => static_caller(task, Proof::Token(sent.token)),
                None => find_started(ledger, &sent, peer).await?,
            }
        }
        (None, _) => static_caller(vouched_task(policy, peer).ok_or(Deny::CallerUnknown)?, Proof::Listener),
        (Some(_), Some(_)) => return Err(Deny::CallerUnknown.into()),
    };
    if peer.tasks().is_some_and(|tasks| !tasks.contains(caller.task())) {
        return Err(Deny::CallerUnknown.into());
    }
    Ok(caller)
}

/// Returns the static execution of a task.
fn static_caller(task: &Task, proof: Proof) -> Caller {
    Caller { execution: Arc::new(Execution::of_static(task.name(), Millis::now())), proof }
}

/// Finds the started execution that has this token.
async fn find_started(ledger: &Ledger, sent: &ProxyAuthorization, peer: &Peer) -> Verdict<Caller> {
    let id = sent.id.as_ref().filter(|id| token::is_id(id.as_str())).ok_or(Deny::CallerUnknown)?;
    let known = ledger.find(id).await.map_err(|_| Fail::LedgerUnavailable)?;
    let is_here = |network: IpNet| peer.address().is_some_and(|address| network.contains(&address));
    let known = known
        .filter(|execution| execution.token == Some(sent.token))
        .filter(|execution| execution.peers.is_none_or(is_here));
    let execution = Arc::new(known.ok_or(Deny::CallerUnknown)?);
    Ok(Caller { execution, proof: Proof::Execution })
}

/// Returns the task that the listener vouches for, if there is exactly one. A certificate may contain names that are
/// not tasks.
fn vouched_task<'p>(policy: &'p Policy, peer: &Peer) -> Option<&'p Task> {
    let mut known = peer.tasks()?.iter().filter_map(|name| policy.task(name));
    let task = known.next()?;
    known.next().is_none().then_some(task)
}

/// A parsed `Proxy-Authorization` field.
struct ProxyAuthorization {
    /// The task name or execution id. `None` for a static token sent as `Bearer`, which is looked up by the token
    /// itself.
    id: Option<ExecutionId>,
    is_bearer: bool,
    token: TokenHash,
}

impl ProxyAuthorization {
    fn parse(field: &[u8]) -> Option<Self> {
        let field = std::str::from_utf8(field).ok()?;
        let (scheme, credentials) = field.split_once(' ')?;
        let credentials = credentials.trim_matches(' ');
        if scheme.eq_ignore_ascii_case("bearer") {
            let token = TokenHash::of(credentials.as_bytes());
            return Some(Self { id: token::id_of(credentials), is_bearer: true, token });
        }
        if !scheme.eq_ignore_ascii_case("basic") {
            return None;
        }
        let decoded = zeroize::Zeroizing::new(base64::engine::general_purpose::STANDARD.decode(credentials).ok()?);
        let colon = decoded.iter().position(|b| *b == b':')?;
        let (id, token) = (decoded.get(..colon)?, decoded.get(colon.saturating_add(1)..)?);
        let id = Some(ExecutionId::new(std::str::from_utf8(id).ok()?));
        Some(Self { id, is_bearer: false, token: TokenHash::of(token) })
    }

    /// Returns the task that has this static token.
    fn find_task<'p>(&self, policy: &'p Policy) -> Option<&'p Task> {
        if self.is_bearer {
            return policy.task_by_token(self.token).map(AsRef::as_ref);
        }
        let task = policy.task(&TaskName::new(self.id.as_ref()?.as_str()))?;
        task.has_token(self.token).then_some(task)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::policy::compile;
    use crate::policy::settings::Vault;
    use crate::policy::source::{CompileContext, SecretSource, SourceError};

    struct NoSecrets;
    impl SecretSource for NoSecrets {
        fn secret(&self, _: &Vault, _: &str, name: &str) -> Result<crate::model::secret::Secret, SourceError> {
            Err(SourceError::Missing(name.to_owned()))
        }
    }

    fn policy() -> Policy {
        let text = "[tasks.a]\ntoken = \"env:A\"\n[tasks.b]\ntoken = \"env:B\"\n[tasks.c]\n";
        let env = |name: &str| Some(format!("a-token-of-24-bytes-or-more-{name}"));
        let here = std::path::Path::new("/nowhere");
        let around = CompileContext { base: here, state_dir: here, env: &env, secrets: &NoSecrets, is_offline: false };
        compile::compile(text, &around).unwrap_or_else(|problems| panic!("{problems:?}")).policy
    }

    #[tokio::test]
    async fn listener_and_token_must_agree() {
        let (policy, ledger) = (policy(), Ledger::memory());
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
            let got = caller(&policy, &ledger, &headers, peer).await.ok().map(|caller| caller.task().to_string());
            assert_eq!(got.as_deref(), want, "{peer:?} {fields:?}");
        }
    }

    #[tokio::test]
    async fn identifies_a_started_execution_by_id_token_and_network() {
        let (policy, ledger) = (policy(), Ledger::memory());
        let start = |digit: &str, network: Option<&str>| {
            let id = ExecutionId::new(&digit.repeat(32));
            let token = token::write(&id, &[7; token::RANDOM]);
            let execution = Execution {
                task: TaskName::new("a"),
                created_at: Millis(1),
                expires_at: None,
                token: Some(TokenHash::of(token.as_bytes())),
                peers: network.map(|network| network.parse().unwrap()),
                is_static: false,
                id,
            };
            (execution, token)
        };
        let ((one, first), (two, second)) = (start("1", None), start("2", Some("192.0.2.0/24")));
        for execution in [&one, &two] {
            ledger.start(execution.clone(), Millis(1)).await.unwrap();
        }
        let basic = |id: &str, token: &str| {
            let text = format!("{id}:{token}");
            format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(text))
        };
        let (near, far) = (Peer::tcp("192.0.2.1:1".parse().unwrap()), Peer::tcp("198.51.100.1:1".parse().unwrap()));
        let mapped = Peer::tcp("[::ffff:192.0.2.9]:1".parse().unwrap());
        let unix = Peer::unix(1000, None);
        let vouched = |task: &str| Peer::unix(1000, Some(TaskName::new(task)));
        let (id, other) = (one.id.as_str(), two.id.as_str());
        let rows = [
            (&near, basic(id, &first), Some(id)),
            (&near, format!("Bearer {}", &*first), Some(id)),
            (&unix, basic(id, &first), Some(id)),
            (&vouched("a"), basic(id, &first), Some(id)),
            (&vouched("b"), basic(id, &first), None),
            (&near, basic(id, &second), None),
            (&near, basic(other, &first), None),
            (&near, basic("a", &first), None),
            (&near, basic(id, ""), None),
            (&near, basic(&"3".repeat(32), &first), None),
            (&near, basic(other, &second), Some(other)),
            (&mapped, basic(other, &second), Some(other)),
            (&far, basic(other, &second), None),
            (&unix, basic(other, &second), None),
        ];
        for (peer, field, want) in rows {
            let headers = HeaderMap::from_iter([(PROXY_AUTHORIZATION, field.parse().unwrap())]);
            let got = caller(&policy, &ledger, &headers, peer).await.ok().map(|caller| caller.execution().to_string());
            assert_eq!(got.as_deref(), want, "{peer:?} {field}");
        }
    }
}

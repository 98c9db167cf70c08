//! May they go there: host, scheme and port once for a destination, method and path for each request.

use http::Method;
use http::Version;
use http::header::HOST;
use http::request::Parts;
use http::uri::PathAndQuery;

use super::identify::Caller;
use super::throttle::Taken;
use crate::model::refusal::{Deny, Verdict};
use crate::model::target::Target;
use crate::policy::rule::{Allowed, Ech, Mode, Policy, Task, Timeouts};

/// Evidence that a task may reach a destination.
///
/// ```compile_fail
/// use exeat::{model::target::Target, stages::authorize::Admitted};
/// // What was admitted for one target is not for another.
/// fn elsewhere(admitted: Admitted, target: Target) -> Admitted { Admitted { target, ..admitted } }
/// ```
/// ```
/// use exeat::stages::authorize::Admitted;
/// fn host(admitted: &Admitted) -> String { admitted.target().authority() }
/// ```
#[derive(Clone)]
pub struct Admitted {
    caller: Caller,
    target: Target,
    allowed: Allowed,
    generation: u64,
}

/// Evidence that one request may be sent to an admitted destination.
///
/// ```compile_fail
/// use exeat::stages::authorize::{Admitted, Grant};
/// // What was granted for one destination is not for another.
/// fn elsewhere(grant: Grant, admitted: Admitted) -> Grant { Grant { admitted, ..grant } }
/// ```
/// ```
/// use exeat::stages::authorize::{Admitted, Grant};
/// fn of(grant: &Grant) -> &Admitted { grant.admitted() }
/// ```
pub struct Grant {
    admitted: Admitted,
    method: Method,
    path: PathAndQuery,
    timeouts: Timeouts,
}

impl Admitted {
    /// Who asks.
    #[must_use]
    pub fn caller(&self) -> &Caller {
        &self.caller
    }

    /// Where to.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }

    /// What lets it through.
    #[must_use]
    pub fn allowed(&self) -> &Allowed {
        &self.allowed
    }

    /// Whether requests inside a tunnel are seen.
    #[must_use]
    pub fn mode(&self) -> Mode {
        self.allowed.mode()
    }

    /// Whether an encrypted `ClientHello` passes in an opaque tunnel.
    #[must_use]
    pub fn ech(&self) -> Ech {
        self.allowed.ech()
    }

    /// Under which policy this was judged.
    #[must_use]
    pub fn generation(&self) -> u64 {
        self.generation
    }
}

impl Grant {
    /// The destination, narrowed to the integrations that allow this very request.
    #[must_use]
    pub fn admitted(&self) -> &Admitted {
        &self.admitted
    }

    /// The method that was judged.
    #[must_use]
    pub fn method(&self) -> &Method {
        &self.method
    }

    /// The path and query to send: where a path was judged, its canonical bytes.
    #[must_use]
    pub fn path(&self) -> &PathAndQuery {
        &self.path
    }

    /// How long the exchange may take.
    #[must_use]
    pub fn timeouts(&self) -> Timeouts {
        self.timeouts
    }
}

/// Judges a destination.
///
/// # Errors
/// [`Deny::HostNotAllowed`], [`Deny::SchemeNotAllowed`] or [`Deny::PortNotAllowed`];
/// [`Deny::CallerUnknown`] if the policy no longer knows the task.
pub fn destination(policy: &Policy, caller: &Caller, _taken: &Taken, target: Target) -> Verdict<Admitted> {
    admit(policy, caller, target)
}

/// Judges the same destination again, under a newer policy.
///
/// # Errors
/// As [`destination`].
pub fn again(policy: &Policy, admitted: &Admitted) -> Verdict<Admitted> {
    admit(policy, &admitted.caller, admitted.target.clone())
}

/// Judges the same host and port again, for plain HTTP that was found inside a tunnel.
///
/// # Errors
/// As [`destination`].
pub fn in_the_clear(policy: &Policy, admitted: &Admitted) -> Verdict<Admitted> {
    admit(policy, &admitted.caller, admitted.target.in_the_clear())
}

/// Judges one request to an admitted destination: it names the same authority, and an integration
/// allows its method and path. Under a newer policy the destination is judged again first.
///
/// # Errors
/// [`Deny::AuthorityMismatch`], [`Deny::MethodNotAllowed`], [`Deny::PathNotAllowed`], or as
/// [`destination`].
pub fn request(policy: &Policy, admitted: &Admitted, _taken: Taken, parts: &Parts) -> Verdict<Grant> {
    same_authority(&admitted.target, parts)?;
    let current = if admitted.generation == policy.generation() { admitted.clone() } else { again(policy, admitted)? };
    let task = task(policy, &current.caller)?;
    let given = parts.uri.path_and_query().cloned().unwrap_or_else(|| PathAndQuery::from_static("/"));
    let judged = task.request(&current.target, &current.allowed, &parts.method, given.path())?;
    let path = match judged.path {
        None => given,
        Some(canonical) => with_path(&canonical, given.query())?,
    };
    Ok(Grant {
        admitted: Admitted { allowed: judged.allowed, ..current },
        method: parts.method.clone(),
        path,
        timeouts: task.timeouts(),
    })
}

fn admit(policy: &Policy, caller: &Caller, target: Target) -> Verdict<Admitted> {
    let allowed = task(policy, caller)?.destination(&target)?;
    Ok(Admitted { caller: caller.clone(), target, allowed, generation: policy.generation() })
}

/// The caller's task, if it still takes the token that the caller came with.
fn task<'p>(policy: &'p Policy, caller: &Caller) -> Verdict<&'p Task> {
    let task = policy.task(caller.task()).filter(|task| task.has_token(caller.token()));
    task.map(AsRef::as_ref).ok_or(Deny::CallerUnknown.into())
}

/// Every name that the request gives must be the destination's: the request target's authority,
/// `:authority`, `Host`. Otherwise an allowed host fronts for another (RFC 9110 §7.4).
fn same_authority(target: &Target, parts: &Parts) -> Verdict<()> {
    let in_uri = parts.uri.authority().map(|authority| authority.as_str().as_bytes());
    let in_field = parts.headers.get(HOST).map(http::HeaderValue::as_bytes);
    if in_uri.is_none() && in_field.is_none() && parts.version != Version::HTTP_10 {
        return Err(Deny::RequestMalformed.into());
    }
    for name in [in_uri, in_field].into_iter().flatten() {
        let named = std::str::from_utf8(name).ok().and_then(|text| Target::named(target.scheme(), text).ok());
        if named.as_ref() != Some(target) {
            return Err(Deny::AuthorityMismatch.into());
        }
    }
    match parts.uri.scheme_str() {
        Some(scheme) if scheme != target.scheme().as_str() => Err(Deny::AuthorityMismatch.into()),
        _ => Ok(()),
    }
}

fn with_path(path: &str, query: Option<&str>) -> Verdict<PathAndQuery> {
    let text = match query {
        Some(query) => format!("{path}?{query}"),
        None => path.to_owned(),
    };
    text.parse().map_err(|_| Deny::PathNotAllowed.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Request;

    #[test]
    fn every_name_in_a_request_must_be_the_destinations() {
        let target = Target::connect(&"a.example:443".parse().unwrap()).unwrap();
        let rows = [
            (Version::HTTP_11, "/", Some("a.example"), Ok(())),
            (Version::HTTP_11, "/", Some("A.Example.:443"), Ok(())),
            (Version::HTTP_11, "/", Some("a.example:8443"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", Some("b.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", Some("a.example, b.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", Some("u@a.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", Some(""), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "/", None, Err(Deny::RequestMalformed)),
            (Version::HTTP_10, "/", None, Ok(())),
            (Version::HTTP_2, "https://a.example/", None, Ok(())),
            (Version::HTTP_2, "https://a.example/", Some("a.example"), Ok(())),
            (Version::HTTP_2, "https://a.example/", Some("b.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_2, "https://b.example/", None, Err(Deny::AuthorityMismatch)),
            (Version::HTTP_2, "https://b.example/", Some("a.example"), Err(Deny::AuthorityMismatch)),
            (Version::HTTP_2, "http://a.example:443/", None, Err(Deny::AuthorityMismatch)),
            (Version::HTTP_11, "https://b.example/", Some("a.example"), Err(Deny::AuthorityMismatch)),
        ];
        for (version, uri, host, want) in rows {
            let mut request = Request::builder().version(version).uri(uri);
            if let Some(host) = host {
                request = request.header(HOST, host);
            }
            let parts = request.body(()).unwrap().into_parts().0;
            assert_eq!(same_authority(&target, &parts), want.map_err(Into::into), "{version:?} {uri} {host:?}");
        }
    }
}

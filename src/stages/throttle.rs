//! Not too often: evidence that a call was counted. No limit is configurable yet.

use super::identify::Caller;
use crate::model::refusal::Verdict;

/// Evidence that a call was taken from the caller's allowance.
///
/// ```compile_fail
/// // A call that was not taken cannot be authorised.
/// let taken = exeat::stages::throttle::Taken(());
/// ```
/// ```
/// fn wants(_: exeat::stages::throttle::Taken) {}
/// ```
#[derive(Debug)]
pub struct Taken(());

/// Takes one call.
///
/// # Errors
/// None so far: a task without limits has none to exceed.
pub fn take(_caller: &Caller) -> Verdict<Taken> {
    Ok(Taken(()))
}

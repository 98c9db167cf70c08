//! Not too often: evidence that a call was counted, and that its execution has not been stopped. No other
//! limit is configurable yet.

use super::identify::Caller;
use crate::audit::finds::Finds;
use crate::model::refusal::Verdict;
use crate::policy::rule::Policy;

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
/// [`crate::model::refusal::Deny::ExecutionStopped`] if credentials were found in its requests too often.
pub fn take(policy: &Policy, finds: &Finds, caller: &Caller) -> Verdict<Taken> {
    finds.judge(caller.execution(), policy.leak().max_finds())?;
    Ok(Taken(()))
}

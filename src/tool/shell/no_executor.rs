//! Systems on which no script runs in a directory.

use std::marker::PhantomData;
use std::time::Duration;

use super::sandbox::{Confinement, Sandbox};
use crate::tool::verbs::VerbResult;

/// A stub: no script runs in a directory on this system.
pub(super) struct Executor<'a>(PhantomData<&'a ()>);

impl<'a> Executor<'a> {
    pub(super) fn new(_: &'a Sandbox, _: Option<&'a Confinement>) -> Self {
        Self(PhantomData)
    }

    pub(super) fn is_ahead(&self) -> bool {
        false
    }

    pub(super) fn abandon(&mut self) {}

    #[expect(clippy::unused_async, reason = "it waits on Linux")]
    pub(super) async fn next(&mut self, _: Duration, _: &str) -> VerbResult {
        VerbResult::denied("it runs on Linux only")
    }
}

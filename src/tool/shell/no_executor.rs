//! Systems on which no script runs in a directory.

use std::marker::PhantomData;

use super::sandbox::{Confinement, Sandbox};

/// A stub: no script runs in a directory on this system.
pub(super) struct Executor<'a>(PhantomData<&'a ()>);

impl<'a> Executor<'a> {
    pub(super) fn new(_: &'a Sandbox, _: Option<&'a Confinement>) -> Self {
        Self(PhantomData)
    }
}

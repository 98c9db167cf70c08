//! Systems on which no script runs in a directory.

use std::marker::PhantomData;

use super::sandbox::{Confinement, Sandbox};

/// The confined process of a script, which there is none of.
pub(super) struct Executor<'a>(PhantomData<&'a ()>);

impl<'a> Executor<'a> {
    pub(super) fn new(_: &'a Sandbox, _: Option<&'a Confinement>) -> Self {
        Self(PhantomData)
    }
}

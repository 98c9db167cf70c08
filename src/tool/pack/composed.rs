//! A composed tool, and the steps of one call.

use std::sync::Arc;

use serde_json::{Map, Value};

use super::mock::Mock;
use super::request::{Rendered, Request};
use super::schema::Schema;
use super::template::{Template, Values};
use crate::tool::nonce::nonce;

/// Maximum length of an error text, in characters.
const MAX_ERROR: usize = 1000;

/// A tool that a pack composes from others.
#[derive(Debug)]
pub struct Composed {
    name: String,
    description: String,
    schema: Schema,
    does: Does,
}

#[derive(Debug)]
pub(super) enum Does {
    Delegate {
        args: Template,
        next: Arc<Composed>,
    },
    /// A primitive that works in a sandbox.
    Primitive {
        args: Template,
        name: &'static str,
    },
    Mock(Mock),
    Request(Request),
}

/// The next step of a call.
#[derive(Clone, Debug, PartialEq)]
pub enum Step {
    /// The response of a mock.
    Answer(Value),
    /// A call of another primitive to make, in a sandbox.
    Primitive {
        /// The primitive.
        name: &'static str,
        /// Its arguments.
        arguments: Value,
    },
    /// A call of `http_request` to make.
    Request(Rendered),
}

impl Composed {
    pub(super) fn new(name: String, description: String, schema: Schema, does: Does) -> Self {
        Self { name, description, schema, does }
    }

    /// Returns the tool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the tool's description.
    #[must_use]
    pub fn description(&self) -> &str {
        &self.description
    }

    /// Returns the JSON Schema of its arguments.
    #[must_use]
    pub fn parameters(&self) -> &Value {
        self.schema.value()
    }

    /// Returns whether a call leads to a request. A mock's does not.
    #[must_use]
    pub fn sends_requests(&self) -> bool {
        match &self.does {
            Does::Delegate { next, .. } => next.sends_requests(),
            Does::Primitive { .. } | Does::Mock(_) => false,
            Does::Request(_) => true,
        }
    }

    /// Checks the arguments, fills in the template and follows the delegation. Null counts as no arguments.
    ///
    /// # Errors
    /// The text for the model, without the prefix `Error: `. It contains names, pointers and rules, never a value.
    pub fn run(&self, arguments: &Value) -> Result<Step, String> {
        let none = Value::Object(Map::new());
        let arguments = if arguments.is_null() { &none } else { arguments };
        self.step(arguments).map_err(|why| super::problem::truncate(&why, MAX_ERROR))
    }

    fn step(&self, arguments: &Value) -> Result<Step, String> {
        self.schema.check(arguments)?;
        match &self.does {
            Does::Delegate { args, next } => {
                let inner = Values::new(arguments, "").fill(args)?.unwrap_or_default();
                next.step(&inner).map_err(|why| format!("{}: {why}", next.name))
            }
            Does::Primitive { args, name } => {
                let arguments = Values::new(arguments, "").fill(args)?.unwrap_or_default();
                Ok(Step::Primitive { name, arguments })
            }
            Does::Mock(mock) => mock.answer(arguments).map(Step::Answer),
            Does::Request(request) => request.fill(arguments, nonce()?).map(Step::Request),
        }
    }
}

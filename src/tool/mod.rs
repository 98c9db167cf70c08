//! The tool front-end: a thin client of the proxy.
//!
//! A tool call is a request with `Exeat-Tool`, sent to the proxy in absolute-form. What may be called, how often, with
//! which credential and what comes back is the proxy's to judge, as for any client: nothing here holds a secret but the
//! execution's own token, a rule, or a count. What is written here are words: a model's arguments made into a request,
//! and an answer or a refusal made into text that a model can read.

mod arguments;
pub mod batch;
mod builtin;
mod call;
pub mod command;
pub mod definition;
mod dial;
pub mod mcp;
mod messages;
mod nonce;
pub mod outcome;
pub mod pack;
mod pack_tools;
pub mod proxy;
pub mod registry;
pub mod task;
mod tool_response;
pub mod turn;
mod url;
pub mod verbs;

//! The tool front-end: a thin client of the proxy.
//!
//! A tool call is a request with `Exeat-Tool`, sent to the proxy in absolute-form. The proxy decides what may be
//! called, how often, with which credential, and what is returned, as for any client. This module holds no secret
//! except the execution's own token, no rules and no counters. It only converts a model's arguments into a request, and
//! a response or a refusal into text for a model.

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
mod primitives;
pub mod proxy;
pub mod registry;
pub mod shell;
pub mod task;
mod tool_response;
pub mod turn;
mod url;
pub mod verbs;

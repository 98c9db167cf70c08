//! exeat: a forward HTTP egress proxy between AI-agent sandboxes and the internet.
//!
//! A sandbox has no other way out than this daemon, and nothing leaves without a permit. A request takes these steps:
//!
//! | step | evidence it leaves | question |
//! |---|---|---|
//! | [`stages::identify`] | `Caller` | who is the caller |
//! | [`stages::throttle`] | `CountedCall` | is the caller within its limits and not stopped |
//! | [`stages::parse`] | [`model::target::Target`] | what is the destination, in normal form |
//! | [`stages::authorize`] | `Admitted`, `Grant` | is the destination allowed; with this method, path and credential |
//! | [`stages::inspect`] | `Cleared` | does the request contain no secret |
//! | [`stages::approve`] | `Approved` | has an operator approved the request, if required |
//! | [`stages::pin`] | `PinnedTarget` | which checked addresses may be dialled |
//! | [`stages::inject`] | `Outbound` | which request is sent, with the credential inserted last |
//! | [`stages::forward`] | the response | send the request, over TLS that verifies the name |
//! | [`stages::limit`] | a bounded body | what comes back, and how long it may take |
//!
//! Each type has private fields and one constructor, in its own file. The next step takes it by value, so code that
//! skips a step does not compile. Read `flow/exchange.rs` first.
//!
//! Imports point down: `model` < `leak` < `policy`, `vault`, `tls`, `audit`, `ledger` < `stages` < `flow` < `cli`.
//! [`tool`] is a client of all this and depends on none of it but `model` and the connection slots of its own listener.

mod admission;
pub mod api;
pub mod audit;
pub mod cli;
pub mod coding;
pub mod daemon;
mod fair_queue;
pub mod files;
pub mod flow;
mod group_commit;
#[cfg(target_os = "linux")]
mod isolation;
pub mod leak;
pub mod ledger;
mod manual;
pub mod model;
pub mod policy;
mod socket_options;
mod socket_passing;
pub mod stages;
mod terminal;
pub mod tls;
pub mod tool;
pub mod vault;

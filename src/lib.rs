//! exeat: a forward HTTP egress proxy between AI-agent sandboxes and the internet.
//!
//! A sandbox has no way out but this daemon, and nothing leaves without a permit. The way of a request:
//!
//! | step | evidence it leaves | question |
//! |---|---|---|
//! | [`stages::identify`] | `Caller` | who is asking |
//! | [`stages::throttle`] | `Taken` | not too often, not stopped |
//! | [`stages::parse`] | [`model::target::Target`] | where to, in one normal form |
//! | [`stages::authorize`] | `Admitted`, `Grant` | may they go there; with this method, path and credential |
//! | [`stages::inspect`] | `Cleared` | does nothing leave that must stay |
//! | [`stages::approve`] | `Approved` | has a person allowed it, if one has to |
//! | [`stages::pin`] | `PinnedTarget` | which judged addresses may be dialled |
//! | [`stages::inject`] | `Outbound` | what leaves, put together once, the credential last |
//! | [`stages::forward`] | the response | send it, over TLS that proves the name |
//! | [`stages::limit`] | a bounded body | what comes back, and how long it may take |
//!
//! Each type has private fields and one constructor, in its own file; the next step takes it by value.
//! So a step that is left out does not compile. Read `flow/exchange.rs` first.
//!
//! Imports point down: `model` < `leak` < `policy`, `vault`, `tls`, `audit`, `ledger` < `stages` < `flow` < `cli`. [`tool`]
//! is a client of all this, and knows nothing of it but `model`.

pub mod api;
pub mod audit;
pub mod cli;
pub mod coding;
pub mod daemon;
pub mod files;
pub mod flow;
pub mod leak;
pub mod ledger;
pub mod model;
pub mod policy;
pub mod stages;
mod terminal;
pub mod tls;
pub mod tool;
pub mod vault;

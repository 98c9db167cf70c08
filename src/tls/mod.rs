//! TLS on both sides: certificates for clients, the proxy's own listener, the first bytes of a tunnel, trust in origins, and what they
//! show of themselves.

pub mod authority;
pub mod front;
pub mod hello;
pub mod look;
pub mod upstream;

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The one crypto provider of this program.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

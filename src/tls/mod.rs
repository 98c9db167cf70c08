//! TLS on both sides: certificates for clients, the proxy's own listener, the first bytes of a tunnel, trust in origins,
//! lists of revoked certificates, the kinds of failures, and what origins show of themselves.

pub mod authority;
pub mod crl;
pub mod failure;
pub mod hello;
pub mod listener;
pub mod probe;
pub mod upstream;

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// The one crypto provider of this program.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

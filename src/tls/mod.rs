//! TLS on both sides: interception, listeners, tunnel hellos, verification of origins, revocation lists, failures.

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

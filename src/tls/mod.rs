//! TLS on both sides: the interception CA, the proxy's own listener, `ClientHello` parsing, trust in origins,
//! revocation lists, limits of verification, failure kinds, and certificate probes.

pub mod authority;
pub mod ca_files;
pub mod crl;
pub mod failure;
pub mod hello;
pub mod hello_retry;
pub mod listener;
mod path_limit;
pub mod probe;
pub mod upstream;

use std::sync::Arc;

use rustls::crypto::{CryptoProvider, aws_lc_rs};

/// Returns the crypto provider of this program.
#[must_use]
pub fn provider() -> Arc<CryptoProvider> {
    Arc::new(aws_lc_rs::default_provider())
}

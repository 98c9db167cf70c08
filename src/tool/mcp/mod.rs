//! Serves the tools over the Model Context Protocol, on stdio or HTTP.
//!
//! The SDK implements the protocol. This module provides the tools, their results, the limits, and access control for
//! HTTP.

mod call_limit;
mod guard;
mod http;
mod server;
mod sessions;
mod stdio;

use std::io;
use std::net::SocketAddr;

use super::proxy::Proxy;
use super::registry::Registry;
use guard::Guard;
use server::Server;

/// Maximum size of a message, in bytes.
const MAX_MESSAGE: usize = 4_000_000;

/// The arguments of the command.
#[derive(clap::Args)]
pub(super) struct Args {
    /// Serve streamable HTTP at http://ADDR/mcp instead of stdin and stdout; a loopback address and a port, such as
    /// 127.0.0.1:8765; port 0 for any
    #[arg(long, value_name = "ADDR")]
    listen: Option<SocketAddr>,
    /// The variable that holds the bearer token for HTTP, of 24 bytes or more
    #[arg(long, value_name = "NAME", default_value = "EXEAT_MCP_TOKEN", requires = "listen")]
    token_env: String,
    /// One more HOST or HOST:PORT that clients may write into `Host`
    #[arg(long, value_name = "HOST", requires = "listen")]
    allow_host: Vec<String>,
    /// An origin, SCHEME://HOST or SCHEME://HOST:PORT, that may stand in `Origin`; without any, a request that has one is
    /// refused
    #[arg(long, value_name = "ORIGIN", requires = "listen")]
    allow_origin: Vec<String>,
}

/// An error that ends the command before its client does.
#[derive(Debug, thiserror::Error)]
pub(super) enum McpError {
    /// The address is not a loopback address. Plain HTTP could be intercepted.
    #[error("{0} is no loopback address; let a server that speaks TLS forward to one")]
    NotLoopback(SocketAddr),
    /// There is no token. Any local user could call the tools.
    #[error("{0} is not set to a token of {1} bytes or more, without spaces; try: export {0}=$(openssl rand -hex 32)")]
    NoToken(String, usize),
    #[error("--allow-host takes HOST or HOST:PORT, not {0:?}")]
    NotHost(String),
    #[error("--allow-origin takes SCHEME://HOST or SCHEME://HOST:PORT, not {0:?}")]
    NotOrigin(String),
    /// The port is in use or not permitted.
    #[error("cannot listen at {0}: {1}")]
    Listen(SocketAddr, io::Error),
    /// The client's first message does not show which protocol it speaks.
    #[error("the client did not begin as the Model Context Protocol does")]
    Beginning,
}

impl McpError {
    /// Whether the arguments or the environment are wrong.
    pub(super) fn is_usage(&self) -> bool {
        !matches!(self, Self::Listen(..) | Self::Beginning)
    }
}

impl Args {
    /// Serves until the client disconnects or a signal arrives.
    pub(super) async fn run(self, registry: Registry, proxy: Proxy) -> Result<(), McpError> {
        crate::terminal::log("warn");
        let server = Server::new(registry, proxy);
        match self.listen {
            None => stdio::serve(server).await,
            Some(address) => {
                let guard = Guard::new(address, &self.token_env, self.allow_host, &self.allow_origin)?;
                http::serve(server, guard, address).await
            }
        }
    }
}

//! The stdio transport: one client, which started the process.

use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use rmcp::service::{ServerInitializeError, serve_server};
use rmcp::transport::async_rw::AsyncRwTransport;
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::sync::CancellationToken;

use super::server::Server;
use super::{MAX_MESSAGE, McpError};

/// Maximum time for calls in progress after the end of input. The client may still read.
const SHUTDOWN_TIMEOUT: Duration = Duration::from_secs(1);

/// The input, and the time of its end.
struct Input<R> {
    inner: R,
    ended: CancellationToken,
}

/// Serves until stdin ends. Calls that do not end shortly after it are dropped.
pub(super) async fn serve(server: Server) -> Result<(), McpError> {
    let ended = CancellationToken::new();
    let input = Input { inner: tokio::io::stdin(), ended: ended.clone() };
    let transport = AsyncRwTransport::new_server(input, tokio::io::stdout()).with_max_line_length(MAX_MESSAGE);
    let running = match serve_server(server, transport).await {
        Ok(running) => running,
        Err(ServerInitializeError::ConnectionClosed(_)) => return Ok(()),
        Err(_) => return Err(McpError::Beginning),
    };
    tokio::select! {
        _ = running.waiting() => {}
        () = async { ended.cancelled().await; tokio::time::sleep(SHUTDOWN_TIMEOUT).await } => {}
    }
    Ok(())
}

impl<R: AsyncRead + Unpin> AsyncRead for Input<R> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<std::io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(cx, buffer);
        let is_more = matches!(read, Poll::Ready(Ok(()))) && buffer.filled().len() > before;
        if read.is_ready() && !is_more {
            self.ended.cancel();
        }
        read
    }
}

//! Sessions of clients before protocol version 2026-07-28, bounded in number and age.

use std::time::Duration;

use futures_util::Stream;
use rmcp::model::{ClientJsonRpcMessage, ServerJsonRpcMessage};
use rmcp::transport::streamable_http_server::SessionId;
use rmcp::transport::streamable_http_server::session::local::{LocalSessionManager, LocalSessionManagerError};
use rmcp::transport::streamable_http_server::session::{ServerSseMessage, SessionManager};
use tokio::sync::Mutex;

/// Maximum number of sessions.
const MAX_SESSIONS: usize = 64;
/// The idle timeout of a session. It exceeds the longest call.
const IDLE_TIMEOUT: Duration = Duration::from_secs(1200);

pub(super) struct Sessions {
    local: LocalSessionManager,
    /// Serializes the creation of sessions, so that they can be counted.
    beginning: Mutex<()>,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum SessionError {
    #[error("there are {MAX_SESSIONS} sessions already; end one, or wait")]
    TooMany,
    #[error(transparent)]
    Local(#[from] LocalSessionManagerError),
}

impl Sessions {
    pub(super) fn new() -> Self {
        let mut local = LocalSessionManager::default();
        local.session_config.keep_alive = Some(IDLE_TIMEOUT);
        Self { local, beginning: Mutex::new(()) }
    }
}

type Done<T> = Result<T, SessionError>;

impl SessionManager for Sessions {
    type Error = SessionError;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Done<(SessionId, Self::Transport)> {
        let _one = self.beginning.lock().await;
        if self.local.sessions.read().await.len() >= MAX_SESSIONS {
            return Err(SessionError::TooMany);
        }
        Ok(self.local.create_session().await?)
    }

    async fn initialize_session(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Done<ServerJsonRpcMessage> {
        Ok(self.local.initialize_session(id, message).await?)
    }

    async fn has_session(&self, id: &SessionId) -> Done<bool> {
        Ok(self.local.has_session(id).await?)
    }

    async fn close_session(&self, id: &SessionId) -> Done<()> {
        Ok(self.local.close_session(id).await?)
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Done<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static> {
        Ok(self.local.create_stream(id, message).await?)
    }

    async fn accept_message(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Done<()> {
        Ok(self.local.accept_message(id, message).await?)
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Done<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static> {
        Ok(self.local.create_standalone_stream(id).await?)
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Done<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static> {
        Ok(self.local.resume(id, last_event_id).await?)
    }
}

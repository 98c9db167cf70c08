//! What origins send: text that is the same in every run, and WebSockets.

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use hyper::body::Incoming;
use hyper::upgrade::Upgraded;
use hyper_util::rt::TokioIo;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::handshake::derive_accept_key;
use tokio_tungstenite::tungstenite::protocol::Role;

/// Text as a model API answers with: JSON with ordinary words, numbers and identifiers.
pub(crate) fn text(size: usize) -> Bytes {
    let mut text = String::with_capacity(size + 400);
    let mut n = 0_u64;
    while text.len() < size {
        n += 1;
        let id = n.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        text.push_str(&format!(
            "{{\"id\":\"msg_{id:016x}\",\"role\":\"assistant\",\"index\":{n},\"content\":\"The request took {} ms, and \
             the server answered with the list of files that had changed since the last run.\\nNothing else was \
             found.\",\"usage\":{{\"input_tokens\":{},\"output_tokens\":{}}}}},",
            id % 997,
            id % 8_191,
            id % 509
        ));
    }
    text.truncate(size);
    Bytes::from(text)
}

/// The origin's side of a WebSocket.
pub(crate) type ServerSocket = WebSocketStream<TokioIo<Upgraded>>;

/// Accepts a WebSocket, and runs `talk` on it in a task of its own. Returns a 200 if the request is no handshake.
pub(crate) fn accept_websocket<F: Future<Output = ()> + Send>(
    mut request: Request<Incoming>,
    talk: impl FnOnce(ServerSocket) -> F + Send + 'static,
) -> Response<()> {
    let mut response = Response::new(());
    let Some(key) = request.headers().get("sec-websocket-key").cloned() else { return response };
    tokio::spawn(async move {
        let Ok(upgraded) = hyper::upgrade::on(&mut request).await else { return };
        talk(WebSocketStream::from_raw_socket(TokioIo::new(upgraded), Role::Server, None).await).await;
    });
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    let headers = response.headers_mut();
    headers.insert("connection", "upgrade".parse().unwrap());
    headers.insert("upgrade", "websocket".parse().unwrap());
    headers.insert("sec-websocket-accept", derive_accept_key(key.as_bytes()).parse().unwrap());
    response
}

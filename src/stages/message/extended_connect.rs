//! WebSocket handshakes over HTTP/2 (RFC 8441), in the form of those over HTTP/1.1 and back, so that all other code handles one form.

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use http::header::{
    CONNECTION, HOST, HeaderValue, SEC_WEBSOCKET_ACCEPT, SEC_WEBSOCKET_KEY, SEC_WEBSOCKET_VERSION, UPGRADE,
};
use http::{Method, Request, Response, StatusCode, Version};
use hyper::ext::Protocol;

use crate::model::tool::EXEAT_TOOL;

const WEBSOCKET: &str = "websocket";

/// Gives an extended CONNECT for a WebSocket the form of a handshake over HTTP/1.1. Returns false, and leaves the request unchanged, if
/// it is for another protocol or a tool call, which is answered with a body, or if there is no random key for it.
pub(crate) fn request_to_http1<B>(request: &mut Request<B>) -> bool {
    let is_websocket = request.method() == Method::CONNECT
        && request.extensions().get::<Protocol>().is_some_and(|protocol| protocol.as_str() == WEBSOCKET)
        && !request.headers().contains_key(EXEAT_TOOL);
    let mut nonce = [0; 16];
    if !is_websocket || getrandom::fill(&mut nonce).is_err() {
        return false;
    }
    let Ok(key) = HeaderValue::from_str(&STANDARD.encode(nonce)) else { return false };
    request.extensions_mut().remove::<Protocol>();
    *request.method_mut() = Method::GET;
    *request.version_mut() = Version::HTTP_11;
    let authority = request.uri().authority().and_then(|named| HeaderValue::from_str(named.as_str()).ok());
    let headers = request.headers_mut();
    if let Some(authority) = authority.filter(|_| !headers.contains_key(HOST)) {
        headers.insert(HOST, authority);
    }
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(WEBSOCKET));
    headers.insert(SEC_WEBSOCKET_KEY, key);
    true
}

/// Gives the response that accepts a handshake the form of one to an extended CONNECT (RFC 8441 §5).
pub(crate) fn response_to_http2<B>(response: &mut Response<B>) {
    *response.status_mut() = StatusCode::OK;
    for name in [CONNECTION, UPGRADE, SEC_WEBSOCKET_ACCEPT] {
        response.headers_mut().remove(name);
    }
}

/// Gives a handshake over HTTP/1.1 the form of an extended CONNECT, for an origin that speaks HTTP/2 alone.
pub(crate) fn request_to_http2<B>(request: &mut Request<B>) {
    *request.method_mut() = Method::CONNECT;
    request.extensions_mut().insert(Protocol::from_static(WEBSOCKET));
    for name in [CONNECTION, UPGRADE, SEC_WEBSOCKET_KEY] {
        request.headers_mut().remove(name);
    }
    request.headers_mut().insert(SEC_WEBSOCKET_VERSION, HeaderValue::from_static("13"));
}

/// Gives an origin's response that accepts an extended CONNECT the form of one over HTTP/1.1, to a handshake whose key has this
/// answer.
pub(crate) fn response_to_http1<B>(response: &mut Response<B>, accept: HeaderValue) {
    *response.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    *response.version_mut() = Version::HTTP_11;
    let headers = response.headers_mut();
    headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
    headers.insert(UPGRADE, HeaderValue::from_static(WEBSOCKET));
    headers.insert(SEC_WEBSOCKET_ACCEPT, accept);
}

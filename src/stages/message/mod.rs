//! Message parts shared by several stages: header fields, bodies, queries, WebSocket frames and trailers.

pub(crate) mod arrivals;
pub(super) mod aws_fields;
pub mod chunked;
pub(super) mod cookies;
mod decoded_text;
pub(crate) mod extended_connect;
mod h2_field_count;
mod h2_frame_budget;
pub mod h2_trailers;
pub(super) mod headers;
pub(super) mod late_trailers;
pub mod message_swaps;
pub(super) mod path_segments;
pub(super) mod query;
pub mod request_body;
pub(super) mod swap_body;
pub(super) mod text_placeholder;
pub mod websocket;
mod ws_frames;

//! The tool front-end, and tool calls at the proxy.

pub mod agent_loops;
pub mod dangerous_shell;
pub mod error_texts;
pub mod front_end;
pub mod hostile_model;
pub mod mcp;
pub mod packs;
pub mod primitives;
pub mod self_api;
pub mod shell_programs;
pub mod shell_scripts;
pub mod shell_verbs;
pub mod tool_calls;
pub mod turn;

//! Rules for the source code.

mod interface;
mod layering;
mod operations_page;

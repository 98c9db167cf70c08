//! The tool front-end's command line: all of it lives in the library.

fn main() {}

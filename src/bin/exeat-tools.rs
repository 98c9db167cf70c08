//! The tool front-end's command line: all of it lives in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    exeat::tool::command::main()
}

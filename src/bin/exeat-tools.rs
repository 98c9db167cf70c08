//! The tool front-end's binary; the library has the code.

use std::process::ExitCode;

fn main() -> ExitCode {
    exeat::tool::command::main()
}

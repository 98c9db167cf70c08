//! The binary of the tool front-end. The code is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    exeat::tool::command::main()
}

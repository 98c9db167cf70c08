//! The binary of the daemon and the operator's command line; the library has the code.

use std::process::ExitCode;

fn main() -> ExitCode {
    exeat::cli::main()
}

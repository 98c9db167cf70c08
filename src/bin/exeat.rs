//! The binary of the daemon and the operator's command line. The code is in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    exeat::cli::main()
}

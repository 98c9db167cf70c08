//! The daemon and the operator's command line: all of it lives in the library.

use std::process::ExitCode;

fn main() -> ExitCode {
    exeat::cli::main()
}

//! The stored figure, and the check against it.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use serde::Deserialize;

const EXPLANATION: &str = "\
# The instructions of one intercepted keep-alive GET of 1 KiB, and how far a later figure may be above it.
# They are the median of several runs of the static binary on x86-64 with AVX2. They depend on the compiler, the
# profile, the C library and the CPU features that valgrind emulates. The command in .ci/run writes this file if it has
# --update for --check.
";

/// The stored figure.
#[derive(Deserialize)]
pub(crate) struct Figure {
    instructions: u64,
    margin_percent: f64,
    /// The compiler with which the figure was measured.
    rustc: String,
}

impl Figure {
    fn path() -> PathBuf {
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("benches/instructions/figure.toml")
    }

    pub(crate) fn load() -> Self {
        let text = fs::read_to_string(Self::path()).expect("figure.toml can be read");
        toml::from_str(&text).expect("figure.toml has a figure, a margin and the compiler")
    }

    /// Returns the figure with another count and the compiler in use.
    pub(crate) fn with(self, instructions: u64) -> Self {
        Self { instructions, rustc: rustc(), ..self }
    }

    pub(crate) fn store(&self) {
        let Self { instructions, margin_percent, rustc } = self;
        let values = format!("instructions = {instructions}\nmargin_percent = {margin_percent}\nrustc = \"{rustc}\"\n");
        fs::write(Self::path(), format!("{EXPLANATION}{values}")).expect("figure.toml can be written");
    }

    /// Checks that a measured count is not above the stored one by more than the margin.
    ///
    /// # Errors
    /// The difference, and how to store the new figure.
    pub(crate) fn check(&self, measured: u64) -> Result<(), String> {
        let percent = (measured as f64 / self.instructions as f64 - 1.0) * 100.0;
        if percent <= self.margin_percent {
            if percent < -self.margin_percent {
                println!("That is {percent:+.1} % of the stored figure. Store it, so that the gain is kept.");
            }
            return Ok(());
        }
        let current = rustc();
        let compiler = if current == self.rustc {
            String::new()
        } else {
            format!(" The stored figure is of {}, this one of {current}.", self.rustc)
        };
        Err(format!(
            "One request takes {measured} instructions, {percent:+.1} % of the stored {}; the margin is {} %.{compiler} \
             Find the cause, or store the figure if the cost is intended: run the command of .ci/run with --update for \
             --check.",
            self.instructions, self.margin_percent
        ))
    }
}

/// Returns the name and version of the compiler.
fn rustc() -> String {
    let program = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(program).arg("-V").output().map(|output| output.stdout).unwrap_or_default();
    let text = String::from_utf8_lossy(&output);
    // `rustc 1.95.0 (59807616e 2026-04-14)`
    text.split(" (").next().unwrap_or_default().trim().to_owned()
}

//! The command line: what was typed becomes what is meant, then the floors below act.

use std::process::ExitCode;

/// Runs the command line.
pub fn main() -> ExitCode {
    ExitCode::SUCCESS
}

//! A verb with its arguments and its output.

use crate::config::Settings;
use crate::config::refusal::Refusal;
use crate::support::stderr::printable;
use std::io::Write;

/// A verb with its arguments.
pub struct Invocation {
    /// Arguments that are not options.
    pub positional: Vec<String>,
    /// Options.
    pub settings: Settings,
    /// Whether the result is printed as JSON.
    pub json: bool,
    /// Output of the verb's result.
    pub out: Box<dyn Write>,
}

impl Invocation {
    /// Prints one line of the verb's result. JSON escapes control characters itself.
    pub fn say(&mut self, line: &str) -> Result<(), Refusal> {
        if self.json { self.say_as_it_is(line) } else { self.say_as_it_is(&printable(line)) }
    }

    /// Prints a line that contains our own colour codes.
    pub fn say_as_it_is(&mut self, line: &str) -> Result<(), Refusal> {
        written(writeln!(self.out, "{line}"))
    }
}

/// Ends the process where the reader of stdout has closed the pipe.
pub fn written(outcome: std::io::Result<()>) -> Result<(), Refusal> {
    outcome.map_err(|e| match e.kind() {
        // The reader closed the pipe (`| head`): 141 is the code that a shell shows for SIGPIPE.
        std::io::ErrorKind::BrokenPipe => crate::support::end::leave(141),
        _ => Refusal::failure(format!("stdout: {e}")),
    })
}

//! A verb with what was typed behind it, and where its result goes.

use crate::config::Settings;
use crate::config::refusal::Refusal;
use crate::support::stderr::printable;
use std::io::Write;

/// A verb with what was typed behind it.
pub struct Invocation {
    /// Arguments that are no options.
    pub positional: Vec<String>,
    /// Options.
    pub settings: Settings,
    /// The result is wanted as JSON.
    pub json: bool,
    /// Where a verb's result goes.
    pub out: Box<dyn Write>,
}

impl Invocation {
    /// One line of the verb's result; JSON has its own way with control characters.
    pub fn say(&mut self, line: &str) -> Result<(), Refusal> {
        if self.json { self.say_as_it_is(line) } else { self.say_as_it_is(&printable(line)) }
    }

    /// A line with colours of our own.
    pub fn say_as_it_is(&mut self, line: &str) -> Result<(), Refusal> {
        written(writeln!(self.out, "{line}"))
    }
}

/// A reader of stdout that has gone ends the process.
pub fn written(outcome: std::io::Result<()>) -> Result<(), Refusal> {
    outcome.map_err(|e| match e.kind() {
        // Its reader has seen enough (`| head`): the code is what a shell shows for SIGPIPE.
        std::io::ErrorKind::BrokenPipe => std::process::exit(141),
        _ => Refusal::failure(format!("stdout: {e}")),
    })
}

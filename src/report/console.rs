//! A run on stderr: a bar where somebody watches, plain lines where a file or a pipe does. Results go to
//! stdout and are not this file's business.

use super::progress::Progress;
use crate::train::event::Event;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};

/// How a run is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// A bar that is drawn over, and lines above it.
    Bar,
    /// Lines alone.
    Lines,
    /// Nothing (--quiet).
    Quiet,
}

impl Look {
    /// A bar where stderr is a terminal, else lines.
    pub fn detect() -> Self {
        if std::io::stderr().is_terminal() { Look::Bar } else { Look::Lines }
    }
}

/// Shows events as they come.
pub struct Console {
    look: Look,
    progress: Progress,
    bar: Option<ProgressBar>,
}

impl Console {
    /// Shows nothing until the first event.
    pub fn new(look: Look) -> Self {
        Console { look, progress: Progress::default(), bar: None }
    }

    /// Shows one event.
    pub fn see(&mut self, event: &Event) {
        self.progress.see(event);
        match (self.look, event) {
            (Look::Quiet, _) => {}
            (Look::Lines, _) => self.progress.lines(event).iter().for_each(|line| self.line(line)),
            (Look::Bar, Event::Step(step)) => {
                if let Some(bar) = &self.bar {
                    bar.set_message(self.progress.message());
                    bar.set_position(step.step);
                }
            }
            (Look::Bar, _) => {
                if matches!(event, Event::Done(_) | Event::Fault(_)) {
                    self.end();
                }
                self.progress.milestone(event).iter().for_each(|line| self.line(line));
                if let Event::Run(_) = event {
                    self.bar = Some(bar(self.progress.total_steps, self.progress.step));
                }
            }
        }
    }

    /// What was seen so far.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Takes the bar away, so that what is printed next has the terminal to itself.
    pub fn end(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish();
        }
    }

    fn line(&self, line: &str) {
        match &self.bar {
            Some(bar) => bar.println(line),
            // A closed stderr must not end a run.
            None => drop(writeln!(std::io::stderr(), "{line}")),
        }
    }
}

impl Drop for Console {
    fn drop(&mut self) {
        self.end();
    }
}

fn bar(total: u64, done: u64) -> ProgressBar {
    let colour = if std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty()) { "" } else { ".cyan" };
    let template = format!("{{bar:24{colour}}} {{pos}}/{{len}}  {{msg}}");
    let style = ProgressStyle::with_template(&template).unwrap_or_else(|_| ProgressStyle::default_bar());
    let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::stderr());
    bar.set_style(style.progress_chars("=> "));
    bar.set_position(done);
    bar
}

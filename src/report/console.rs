//! Shows a run on stderr. On a terminal: a progress bar, its numbers and one line per device, redrawn in place, below
//! the lines that stay (joins, losses, fallbacks, faults, evaluations). In a file or a pipe: plain lines. The output is
//! a function of the events alone; only the width comes from the terminal. Results go to stdout and are not written
//! here.

use super::progress::Progress;
use super::roster::{DeviceState, Roster};
use crate::train::event::Event;
use indicatif::{MultiProgress, ProgressBar, ProgressDrawTarget, ProgressStyle};
use std::io::{IsTerminal, Write};

/// How a run is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Look {
    /// A progress bar that is redrawn, with lines above it.
    Bar,
    /// Plain lines only.
    Lines,
    /// No output (--quiet).
    Quiet,
}

impl Look {
    /// A bar if stderr is a terminal that can move its cursor, otherwise lines.
    pub fn detect() -> Self {
        let dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        if std::io::stderr().is_terminal() && !dumb { Look::Bar } else { Look::Lines }
    }
}

/// Whether lines contain colour codes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Paint {
    Colours,
    Plain,
}

/// Shows events as they arrive.
pub struct Console {
    look: Look,
    paint: Paint,
    progress: Progress,
    roster: Roster,
    drawn: Option<Drawn>,
}

impl Console {
    /// A console that shows nothing before the first event.
    pub fn new(look: Look) -> Self {
        let plain = std::env::var_os("NO_COLOR").is_some_and(|v| !v.is_empty());
        let paint = if plain { Paint::Plain } else { Paint::Colours };
        Console { look, paint, progress: Progress::default(), roster: Roster::default(), drawn: None }
    }

    /// Shows one event.
    pub fn see(&mut self, event: &Event) {
        self.progress.see(event);
        self.roster.see(event);
        match (self.look, event) {
            (Look::Quiet, _) => {}
            (Look::Lines, _) => self.progress.lines(event).iter().for_each(|line| self.line(line)),
            (Look::Bar, Event::Step(_)) => self.draw(),
            (Look::Bar, _) => {
                if matches!(event, Event::Done(_) | Event::Fault(_)) {
                    self.end();
                }
                self.progress.milestone(event).iter().for_each(|line| self.line(line));
                match event {
                    Event::Run(_) => {
                        self.drawn = Some(Drawn::new(&self.progress, self.paint));
                        self.draw();
                    }
                    Event::Device(_) => self.draw(),
                    _ => {}
                }
            }
        }
    }

    /// Records an event of the steps before a resume without showing it.
    pub fn recall(&mut self, event: &Event) {
        self.progress.see(event);
    }

    /// The numbers of all events so far.
    pub fn progress(&self) -> &Progress {
        &self.progress
    }

    /// Leaves the bar as it is, so that later output has the terminal to itself.
    pub fn end(&mut self) {
        if let Some(drawn) = self.drawn.take() {
            drawn.end();
        }
    }

    fn draw(&mut self) {
        if let Some(drawn) = &mut self.drawn {
            drawn.draw(&self.progress, &self.roster, self.paint);
        }
    }

    fn line(&self, line: &str) {
        match &self.drawn {
            // `MultiProgress::println` pads lines with blanks, which wrap when the terminal becomes narrower.
            Some(drawn) => drawn.all.suspend(|| drop(writeln!(std::io::stderr(), "{line}"))),
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

/// The lines at the bottom of the terminal.
struct Drawn {
    all: MultiProgress,
    bar: ProgressBar,
    numbers: ProgressBar,
    devices: Vec<ProgressBar>,
}

pub(super) fn style(template: &str) -> ProgressStyle {
    ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar())
}

impl Drawn {
    fn new(progress: &Progress, paint: Paint) -> Self {
        let all = MultiProgress::with_draw_target(ProgressDrawTarget::stderr());
        let bar = all.add(ProgressBar::new(progress.total_steps));
        let colour = if paint == Paint::Colours { ".cyan" } else { "" };
        // `wide_msg` is cut at the edge of the terminal, also after a change of its width.
        let template = format!("{{bar:16{colour}}} {{pos}}/{{len}}  {{wide_msg}}");
        bar.set_style(style(&template).progress_chars("=> "));
        bar.set_position(progress.step);
        let numbers = all.add(ProgressBar::new(0));
        numbers.set_style(style("{wide_msg}"));
        Drawn { all, bar, numbers, devices: Vec::new() }
    }

    fn draw(&mut self, progress: &Progress, roster: &Roster, paint: Paint) {
        self.bar.set_message(progress.pace());
        self.bar.set_position(progress.step);
        self.numbers.set_message(progress.message());
        let lines = roster.lines();
        while self.devices.len() < lines.len() {
            let line = self.all.add(ProgressBar::new(0));
            line.set_style(style("{wide_msg}"));
            self.devices.push(line);
        }
        for gone in self.devices.drain(lines.len()..) {
            gone.finish_and_clear();
            self.all.remove(&gone);
        }
        for (bar, (state, line)) in self.devices.iter().zip(lines) {
            bar.set_message(painted(&line, state, paint));
        }
    }

    /// Removes the device lines, because the summary lists the devices; bar and numbers stay on the terminal.
    fn end(self) {
        self.devices.iter().for_each(ProgressBar::finish_and_clear);
        self.numbers.abandon();
        self.bar.abandon();
    }
}

/// Colours the state word. The state follows the name because a narrow terminal cuts the end of the line.
fn painted(line: &str, state: DeviceState, paint: Paint) -> String {
    let colour = match state {
        DeviceState::Running => "32",
        DeviceState::Paused | DeviceState::Fallback => "33",
        DeviceState::Failed | DeviceState::Lost => "31",
        DeviceState::Ready | DeviceState::Left => "2",
    };
    let word = state.word();
    match (paint, line.rsplit_once(&format!("  {word}"))) {
        (Paint::Colours, Some((name, rest))) => format!("{name}  \x1b[{colour}m{word}\x1b[0m{rest}"),
        _ => line.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn state_word_is_coloured_unless_plain() {
        let line = "  a, cpu  lost";
        assert_eq!(painted(line, DeviceState::Lost, Paint::Plain), line);
        assert_eq!(painted(line, DeviceState::Lost, Paint::Colours), "  a, cpu  \x1b[31mlost\x1b[0m");
        let line = "  a, cpu  lost  50.0 %";
        assert_eq!(painted(line, DeviceState::Lost, Paint::Colours), "  a, cpu  \x1b[31mlost\x1b[0m  50.0 %");
        assert_eq!(painted("  and 3 more", DeviceState::Running, Paint::Colours), "  and 3 more");
    }
}

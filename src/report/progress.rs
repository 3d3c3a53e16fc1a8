//! Running numbers of a run, accumulated from its events, and the lines that show them. No clock, no terminal: the same
//! events give the same lines, live or replayed.

use super::answers::Answers;
use super::confusion;
use super::team::TeamWork;
use super::words::{
    SHOWN_CLASSES, basis, best_line, change_line, duration, early_line, eval_line, line_formed, reward_words,
    run_lines, set_name, size, speed_line,
};
use crate::support::stderr::inline;
use crate::train::best::Best;
use crate::train::event::{Done, Eval, Event, Forecast, Rewards, Set, Speed, Step, Takes};
use std::collections::BTreeMap;

/// Weight of the past in smoothed numbers, per step.
pub const MEMORY: f64 = 0.9;
/// Approximate number of step lines in plain output, for a run of any length.
const LINES: u64 = 50;

/// Running numbers of the events so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Progress {
    /// Steps of the whole run.
    pub total_steps: u64,
    /// The last finished step.
    pub step: u64,
    /// Steps before the newest event of steps.
    before: u64,
    /// First and last training loss.
    pub loss: Option<(f64, f64)>,
    /// First and last evaluation.
    pub eval: Option<(Eval, Eval)>,
    /// The best evaluation, if the run asks for it.
    pub best: Option<Best>,
    /// Answers to rows of the evaluation.
    answers: Answers,
    /// Why the run ended before its last step, in one line.
    pub early: Option<String>,
    /// Trained tokens, supervised or not.
    pub tokens: u64,
    /// Wall time of all steps in seconds.
    pub seconds: f64,
    /// Gradient norm, learning rate and memory of the last step.
    last: Option<Last>,
    /// Work of each device.
    pub team: TeamWork,
    /// The forecast at the start or at the last resume.
    pub forecast: Option<Forecast>,
    /// Measured costs of each device, by worker and device.
    pub speeds: BTreeMap<(String, String), Speed>,
    /// Tokens and seconds of the steps since the start or the last resume.
    since: (u64, f64),
    /// Class names of a classifier.
    pub labels: Vec<String>,
    /// The start note about a base without a name; the summary repeats it.
    base: Option<String>,
    smooth: Smooth,
}

/// Numbers of the last step that are shown unchanged.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Last {
    grad_norm: f64,
    lr: f64,
    rewards: Rewards,
    accuracy: Option<f64>,
    memory: Option<u64>,
}

/// Exponentially weighted sums: old weights fall by [`MEMORY`] per step; `weight` normalises them without bias.
#[derive(Debug, Clone, Default, PartialEq)]
struct Smooth {
    weight: f64,
    loss: f64,
    tokens: f64,
    seconds: f64,
}

impl Progress {
    /// Adds an event.
    pub fn see(&mut self, event: &Event) {
        match event {
            Event::Run(run) => {
                self.total_steps = run.total_steps;
                self.step = run.first_step.saturating_sub(1);
                (self.since, self.forecast) = ((0, 0.0), None);
                (self.best, self.early) = (None, None);
                self.labels = run.labels.clone();
                self.base = run.notes.iter().find(|note| note.starts_with("base ")).cloned();
            }
            Event::Forecast(forecast) => self.forecast = Some(forecast.clone()),
            Event::Speed(speed) => {
                self.speeds.insert((speed.worker.clone(), speed.device.clone()), speed.clone());
            }
            Event::Sample(sample) => self.answers.see(sample),
            Event::Best(best) => self.best = Some(*best),
            Event::Early(early) => self.early = self.best.map(|best| early_line(early, &best)),
            Event::Step(step) => self.see_step(step),
            Event::Eval(eval) => {
                let first = self.eval.take().map_or_else(|| eval.clone(), |(first, _)| first);
                self.eval = Some((first, eval.clone()));
            }
            _ => {}
        }
    }

    fn see_step(&mut self, step: &Step) {
        // Islands report several steps at once.
        (self.before, self.step) = (self.step, step.step);
        let taken = step.step.saturating_sub(self.before).max(1) as f64;
        self.loss = Some((self.loss.map_or(step.loss, |(first, _)| first), step.loss));
        self.tokens += step.total_tokens;
        self.seconds += step.seconds;
        self.since.0 += step.total_tokens;
        self.since.1 += step.seconds;
        let Step { grad_norm, lr, rewards, accuracy, memory, .. } = *step;
        self.last = Some(Last { grad_norm, lr, rewards, accuracy, memory });
        self.team.see(step);
        let Smooth { weight, loss, tokens, seconds } = &mut self.smooth;
        for (sum, new) in [
            (weight, taken),
            (loss, taken * step.loss),
            (tokens, step.total_tokens as f64),
            (seconds, step.seconds),
        ] {
            *sum = MEMORY * *sum + new;
        }
    }

    /// Training loss, averaged over about ten steps.
    pub fn smooth_loss(&self) -> Option<f64> {
        (self.smooth.weight > 0.0).then(|| self.smooth.loss / self.smooth.weight)
    }

    /// Recent tokens per second.
    pub fn speed(&self) -> Option<f64> {
        (self.smooth.seconds > 0.0).then(|| self.smooth.tokens / self.smooth.seconds)
    }

    /// Seconds that the remaining steps take at the recent pace.
    pub fn remaining(&self) -> Option<f64> {
        let left = self.total_steps.saturating_sub(self.step) as f64;
        (self.smooth.weight > 0.0).then(|| left * self.smooth.seconds / self.smooth.weight)
    }

    /// Text next to the bar: progress and time left.
    pub fn pace(&self) -> String {
        let percent = 100 * self.step.min(self.total_steps) / self.total_steps.max(1);
        match (self.speed(), self.remaining()) {
            (Some(speed), Some(left)) => format!("{} left  {percent} %  {speed:.0} tokens/s", duration(left)),
            _ => format!("{percent} %"),
        }
    }

    /// Text below the bar: loss, smoothed loss, gradient norm, learning rate, memory.
    pub fn message(&self) -> String {
        let (Some((_, loss)), Some(smooth), Some(last)) = (self.loss, self.smooth_loss(), &self.last) else {
            return String::new();
        };
        let mut line = format!(
            "loss {loss:.4} (smoothed {smooth:.4})  grad norm {:.3}  lr {:.2e}",
            last.grad_norm, last.lr
        );
        line += &reward_words(&last.rewards, last.accuracy);
        if let Some(bytes) = last.memory {
            line += &format!("  memory {}", size(bytes));
        }
        line
    }

    /// The lines of plain output for `event`, which [`Progress::see`] has already recorded. A long run does not print
    /// every step.
    pub fn lines(&self, event: &Event) -> Vec<String> {
        match event {
            Event::Step(step) => {
                let every = self.total_steps.div_ceil(LINES).max(1);
                let due = self.before == 0
                    || step.step / every > self.before / every
                    || step.step == self.total_steps;
                if due { vec![self.step_line(step)] } else { vec![] }
            }
            other => self.milestone(other),
        }
    }

    fn step_line(&self, step: &Step) -> String {
        let width = self.total_steps.to_string().len();
        let mut line = format!(
            "step {:>width$}/{}  loss {:.4}  grad norm {:.3}  lr {:.2e}",
            step.step, self.total_steps, step.loss, step.grad_norm, step.lr
        );
        line += &reward_words(&step.rewards, step.accuracy);
        if let (Some(speed), Some(left)) = (self.speed(), self.remaining()) {
            line += &format!("  {speed:.0} tokens/s  {} left", duration(left));
        }
        line
    }

    /// The lines of all events except steps, which a bar shows itself.
    pub fn milestone(&self, event: &Event) -> Vec<String> {
        match event {
            Event::Run(run) => run_lines(run),
            Event::Step(_) => vec![],
            Event::Eval(eval) => {
                let right = self.answers.after(eval.step).map(|right| format!("  {right}"));
                vec![eval_line(eval) + &right.unwrap_or_default()]
            }
            // Answers to rows are compared at the end.
            Event::Sample(sample) if sample.expected.is_some() => vec![],
            Event::Sample(sample) => {
                vec![
                    format!("sample after step {}: {}", sample.step, inline(&sample.prompt)),
                    format!("  -> {}", inline(&sample.text)),
                ]
            }
            Event::Checkpoint(saved) => vec![format!("saved {}", saved.path.display())],
            Event::Device(change) => vec![change_line(change)],
            Event::Line(formed) => vec![line_formed(formed)],
            Event::Speed(speed) if speed.trials as f64 == speed.points.n => vec![speed_line(speed)],
            Event::Speed(_) => vec![],
            Event::Forecast(forecast) => vec![format!(
                "expected {:.0} tokens/s, {} in all ({})",
                forecast.tokens_per_second,
                duration(forecast.seconds),
                basis(&forecast.basis)
            )],
            Event::Best(_) => vec![],
            Event::Early(_) => self.early.clone().into_iter().collect(),
            // The reason is not repeated here: it becomes the last line on stderr, where errors are printed.
            Event::Fault(halt) => {
                let how = match halt.code {
                    3 => "halted",
                    75 => "stopped",
                    _ => "failed",
                };
                vec![format!("{how} after step {}", halt.step)]
            }
            Event::Done(done) => self.summary(done),
        }
    }

    /// Tokens per second since the start or the last resume.
    pub fn measured(&self) -> Option<f64> {
        (self.since.1 > 0.0).then(|| self.since.0 as f64 / self.since.1)
    }

    /// The forecast next to the measurement, for a run that took `seconds`.
    fn compared(&self, seconds: f64) -> Option<String> {
        let (expected, speed) = (self.forecast.as_ref()?, self.measured()?);
        let off = |measured: f64, expected: f64| 100.0 * (measured / expected.max(1e-9) - 1.0);
        Some(format!(
            "expected {:.0} tokens/s, measured {speed:.0} ({:+.0} %); {} in all, measured {} ({:+.0} %)",
            expected.tokens_per_second,
            off(speed, expected.tokens_per_second),
            duration(expected.seconds),
            duration(seconds),
            off(seconds, expected.seconds),
        ))
    }

    /// Expected and peak memory of each device, without the frozen weights.
    pub fn memory_compared(&self) -> Vec<String> {
        let takes = self.forecast.iter().flat_map(|forecast| &forecast.memory);
        let line = |takes: &Takes| {
            let key = (takes.worker.clone(), takes.device.clone());
            let most = self.speeds.get(&key)?.memory?.most;
            let who = [takes.worker.as_str(), &takes.device].into_iter().filter(|s| !s.is_empty());
            // Adding zero replaces negative zero by positive zero.
            let off = (100.0 * (most as f64 / takes.bytes.max(1) as f64 - 1.0)).round() + 0.0;
            Some(inline(&format!(
                "memory   {}: expected {:.1} MB ({}), peak {:.1} MB ({off:+.0} %), without the weights",
                who.collect::<Vec<_>>().join(", "),
                takes.bytes as f64 / 1e6,
                basis(&takes.basis),
                most as f64 / 1e6,
            )))
        };
        takes.filter_map(line).collect()
    }

    /// The summary of a finished run.
    pub fn summary(&self, done: &Done) -> Vec<String> {
        let mut lines = if done.complete { self.answers.lines() } else { Vec::new() };
        if let (Some((first, _)), Some(last)) = (self.loss, self.smooth_loss()) {
            let steps = format!("{} of {} steps", done.step, self.total_steps);
            lines.push(format!("loss     {first:.4} -> {last:.4}  (smoothed; {steps})"));
        }
        if let Some((before, after)) = &self.eval {
            let mut line = format!("eval     {:.4} -> {:.4}", before.eval_loss, after.eval_loss);
            if let (Some(a), Some(b)) = (before.accuracy, after.accuracy) {
                line += &format!("  accuracy {a:.4} -> {b:.4}");
            }
            if let (Some(a), Some(b)) = (before.macro_f1, after.macro_f1) {
                line += &format!("  macro F1 {a:.4} -> {b:.4}");
            }
            if let (Some(a), Some(b)) = (before.f1, after.f1) {
                line += &format!("  entity F1 {a:.4} -> {b:.4}");
            }
            lines.push(line);
            let further = before.sets.iter().zip(&after.sets).skip(1);
            let words = |(before, after): (&Set, &Set)| {
                let name = set_name(&after.name);
                format!("  {name} {:.4} -> {:.4}", before.eval_loss, after.eval_loss)
            };
            lines.extend(further.map(words));
            if let Some(matrix) = after.confusion.as_ref().filter(|m| m.len() <= SHOWN_CLASSES) {
                lines.extend(confusion::lines(&self.labels, matrix));
            }
        }
        lines.extend(self.best.map(|best| best_line(&best, done)));
        let answers = self.answers.counted().filter(|_| done.complete);
        lines.extend(answers.map(|counted| format!("held-out {counted}")));
        if let Some(speed) = self.measured() {
            let all = duration(done.seconds);
            lines.push(format!("speed    {speed:.0} tokens/s  ({} tokens; {all} in all)", self.since.0));
        }
        lines.extend(self.compared(done.seconds).filter(|_| done.complete && self.early.is_none()));
        lines.extend(self.memory_compared());
        let learnt = self.loss.zip(self.smooth_loss()).is_some_and(|((first, _), last)| last < first);
        lines.extend(self.team.lines());
        lines.extend(self.team.speed_line().filter(|_| learnt));
        lines.extend(self.base.iter().filter(|_| done.complete).map(|note| inline(note)));
        if done.complete && self.seconds > 0.0 {
            lines.push(format!("report   {}", done.path.join("report.html").display()));
        }
        lines.push(match done.complete {
            true => format!("adapter  {}", done.path.display()),
            false => format!("stopped  {} holds the state: go on with --resume", done.path.display()),
        });
        lines
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::event::{Part, RunStart, Shared};

    fn step(step: u64, loss: f64) -> Event {
        Event::Step(Step {
            step,
            loss,
            grad_norm: 0.5,
            lr: 2e-4,
            tokens: 50,
            total_tokens: 100,
            seconds: 0.5,
            epoch: 0.1,
            shared: None,
            traffic: None,
            memory: None,
            spans: vec![],
            ..Step::default()
        })
    }

    fn check(events: &[Event], want: &[&str]) {
        let mut progress = Progress::default();
        let mut lines = Vec::new();
        for event in events {
            progress.see(event);
            lines.extend(progress.lines(event));
        }
        assert_eq!(lines, want);
    }

    #[test]
    fn run_is_shown_as_lines() {
        let run =
            RunStart { total_steps: 2, steps_per_epoch: 2, first_step: 1, rows: 16, ..RunStart::default() };
        let eval =
            |step, eval_loss| Event::Eval(Eval { step, eval_loss, perplexity: Some(2.0), ..Eval::default() });
        let text = "a\nb\x1b[2J".to_owned();
        let sample = Event::Sample(crate::train::event::Sample {
            step: 2,
            prompt: "Hi".into(),
            text,
            ..Default::default()
        });
        let done = Event::Done(Done { step: 2, complete: true, path: "out".into(), seconds: 3661.0 });
        let events = [Event::Run(run), eval(0, 3.0), step(1, 3.0), step(2, 2.0), eval(2, 1.5), sample, done];
        check(
            &events,
            &[
                "16 rows; 2 steps, 2 per epoch; 0 trained values",
                "eval after step 0: loss 3.0000  perplexity 2.000",
                "step 1/2  loss 3.0000  grad norm 0.500  lr 2.00e-4  200 tokens/s  0:01 left",
                "step 2/2  loss 2.0000  grad norm 0.500  lr 2.00e-4  200 tokens/s  0:00 left",
                "eval after step 2: loss 1.5000  perplexity 2.000",
                "sample after step 2: Hi",
                "  -> a\\nb\\u{1b}[2J",
                "loss     3.0000 -> 2.4737  (smoothed; 2 of 2 steps)",
                "eval     3.0000 -> 1.5000",
                "speed    200 tokens/s  (200 tokens; 1:01:01 in all)",
                "report   out/report.html",
                "adapter  out",
            ],
        );
    }

    /// A run whose loss did not fall prints no speed-up; the same run with a falling loss prints it.
    #[test]
    fn run_without_falling_loss_prints_no_speed_up() {
        let shared = |loss: f64, number| {
            let part = |worker: &str| Part {
                worker: worker.into(),
                device: "cpu 0".into(),
                microbatches: 2,
                tokens: 200,
                busy: 0.5,
                ..Part::default()
            };
            let devices = vec![part("a"), part("b")];
            let Event::Step(taken) = step(number, loss) else { unreachable!("it is one") };
            Event::Step(Step { shared: Some(Shared { devices, ..Shared::default() }), ..taken })
        };
        for (last, named) in [(2.0, true), (3.0, false), (4.0, false)] {
            let mut progress = Progress::default();
            [shared(3.0, 1), shared(last, 2)].iter().for_each(|event| progress.see(event));
            let done = Done { step: 2, complete: true, path: "out".into(), seconds: 1.0 };
            let lines = progress.summary(&done);
            let said = lines.iter().any(|line| line.starts_with("speed-up"));
            assert_eq!(said, named, "{last}: {lines:?}");
        }
    }

    /// Islands report several steps at once.
    #[test]
    fn steps_that_are_reported_together_count_each() {
        let mut progress = Progress { total_steps: 1000, ..Progress::default() };
        let mut lines = Vec::new();
        for s in (17..=1000).step_by(17).take(12) {
            let event = step(s, 1.0);
            progress.see(&event);
            lines.extend(progress.lines(&event));
        }
        // Half a second for 17 steps, 796 are left; lines at the first one, and where a multiple of 20 is passed.
        let left = progress.remaining().unwrap();
        assert!((left - 796.0 * 0.5 / 17.0).abs() < 1e-9, "{left}");
        let at: Vec<&str> = lines.iter().map(|line| line[5..9].trim()).collect();
        assert_eq!(at, ["17", "34", "51", "68", "85", "102", "136", "153", "170", "187", "204"]);
    }

    #[test]
    fn long_run_prints_about_fifty_steps() {
        let mut progress = Progress { total_steps: 12_345, ..Progress::default() };
        let lines: usize = (1..=12_345)
            .map(|s| {
                let event = step(s, 1.0);
                progress.see(&event);
                progress.lines(&event).len()
            })
            .sum();
        assert!((45..=55).contains(&lines), "{lines}");
        assert_eq!(progress.smooth_loss(), Some(1.0));
    }
}

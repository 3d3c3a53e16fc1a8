//! One line per device with its current state, accumulated from events. Numbers cover about the last ten steps, so that
//! a worker that joined or slowed down is visible soon; shares over the whole run are in [`super::TeamWork`].

use super::progress::MEMORY;
use crate::support::stderr::inline;
use crate::train::event::{Change, Event, Part, What};
use std::collections::BTreeMap;

/// Maximum number of device lines; the last line sums up the other devices.
const SHOWN: usize = 12;

/// State of a device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum DeviceState {
    /// The device joined and has not computed yet.
    #[default]
    Ready,
    /// The device computes.
    Running,
    /// The run waits for other devices.
    Paused,
    /// The device replaced a failed one.
    Fallback,
    /// The device failed; its worker continues without it.
    Failed,
    /// The worker left by itself.
    Left,
    /// The connection to the worker was lost, or the worker was removed.
    Lost,
}

impl DeviceState {
    /// The state in one word.
    pub fn word(self) -> &'static str {
        match self {
            DeviceState::Ready => "ready",
            DeviceState::Running => "running",
            DeviceState::Paused => "paused",
            DeviceState::Fallback => "fallback",
            DeviceState::Failed => "failed",
            DeviceState::Left => "left",
            DeviceState::Lost => "lost",
        }
    }

    /// True if the device does no more work unless it returns.
    pub fn is_gone(self) -> bool {
        matches!(self, DeviceState::Failed | DeviceState::Left | DeviceState::Lost)
    }
}

/// Exponentially weighted sums, as in `Progress`.
#[derive(Debug, Clone, Default, PartialEq)]
struct Device {
    state: DeviceState,
    tokens: f64,
    busy: f64,
    seconds: f64,
}

/// All devices of a run.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Roster {
    /// Devices by worker and name.
    devices: BTreeMap<(String, String), Device>,
}

/// The numbers of a device line.
#[derive(Debug, Clone, PartialEq)]
pub struct Row {
    /// Worker and device: `host-1, cpu 0`.
    pub name: String,
    /// Percentage of the recent tokens.
    pub share: f64,
    /// Tokens of the device over wall time.
    pub tokens_per_second: f64,
    /// Percentage of wall time in which the device did not compute.
    pub idle: f64,
    /// Current state.
    pub state: DeviceState,
}

impl Roster {
    /// Adds an event.
    pub fn see(&mut self, event: &Event) {
        match event {
            Event::Step(step) => {
                let Some(shared) = &step.shared else { return };
                for device in self.devices.values_mut() {
                    device.fade(step.seconds);
                }
                shared.devices.iter().for_each(|part| self.part(part));
            }
            Event::Device(change) => self.change(change),
            _ => {}
        }
    }

    fn part(&mut self, part: &Part) {
        let device = self.devices.entry((part.worker.clone(), part.device.clone())).or_default();
        device.tokens += part.tokens as f64;
        device.busy += part.busy;
        // The work of a device in a step is reported after the device left.
        if part.microbatches > 0 && matches!(device.state, DeviceState::Ready | DeviceState::Paused) {
            device.state = DeviceState::Running;
        }
    }

    fn change(&mut self, change: &Change) {
        let gone = match change.what {
            What::Joined => {
                for name in change.devices.iter().map(|shown| plain(shown)) {
                    let device = Device::default();
                    self.devices.insert((change.worker.clone(), name.into()), device);
                }
                return;
            }
            What::Fallback => {
                let names = change.devices.iter().filter_map(|shown| shown.split_once(" -> "));
                for (before, now) in names {
                    self.devices.remove(&(change.worker.clone(), plain(before).into()));
                    let device = Device { state: DeviceState::Fallback, ..Device::default() };
                    self.devices.insert((change.worker.clone(), plain(now).into()), device);
                }
                return;
            }
            What::Failed => {
                for name in change.devices.iter().map(|shown| plain(shown)) {
                    if let Some(device) = self.devices.get_mut(&(change.worker.clone(), name.into())) {
                        device.state = DeviceState::Failed;
                    }
                }
                return;
            }
            What::Paused | What::Resumed => {
                let state =
                    if change.what == What::Paused { DeviceState::Paused } else { DeviceState::Ready };
                let here = self.devices.values_mut().filter(|device| !device.state.is_gone());
                here.for_each(|device| device.state = state);
                return;
            }
            What::Left => DeviceState::Left,
            What::Lost | What::Expelled => DeviceState::Lost,
            What::Refused | What::Waiting | What::Note => return,
        };
        for ((worker, _), device) in &mut self.devices {
            if *worker == change.worker && device.state != DeviceState::Failed {
                *device = Device { state: gone, ..Device::default() };
            }
        }
    }

    /// All devices, present ones first.
    pub fn rows(&self) -> Vec<Row> {
        let all: f64 = self.devices.values().map(|d| d.tokens).sum();
        let row = |((worker, name), d): (&(String, String), &Device)| Row {
            name: format!("{worker}, {name}"),
            share: if all > 0.0 { 100.0 * d.tokens / all } else { 0.0 },
            tokens_per_second: if d.seconds > 0.0 { d.tokens / d.seconds } else { 0.0 },
            idle: if d.seconds > 0.0 { 100.0 * (1.0 - d.busy / d.seconds).max(0.0) } else { 0.0 },
            state: d.state,
        };
        let mut rows: Vec<Row> = self.devices.iter().map(row).collect();
        rows.sort_by_key(|row| row.state.is_gone());
        rows
    }

    /// One line per device, and one line for the devices beyond the limit.
    pub fn lines(&self) -> Vec<(DeviceState, String)> {
        let rows = self.rows();
        let width = rows.iter().map(|row| row.name.chars().count()).max().unwrap_or(0).min(24);
        let line = |row: &Row| {
            let Row { name, share, tokens_per_second, idle, state } = row;
            let name = short(&inline(name), width);
            let word = state.word();
            match state {
                s if s.is_gone() => format!("  {name:<width$}  {word}"),
                DeviceState::Ready => format!("  {name:<width$}  {word}"),
                _ => format!(
                    "  {name:<width$}  {word:<8}  {share:>5.1} %  {tokens_per_second:>6.0} tokens/s  {idle:>3.0} % idle"
                ),
            }
        };
        let mut lines: Vec<_> = rows.iter().take(SHOWN).map(|row| (row.state, line(row))).collect();
        if rows.len() > SHOWN {
            let rest = &rows[SHOWN..];
            let speed: f64 = rest.iter().map(|row| row.tokens_per_second).sum();
            let gone = rest.iter().filter(|row| row.state.is_gone()).count();
            let text = format!("  and {} more: {speed:.0} tokens/s, {gone} of them gone", rest.len());
            lines.push((DeviceState::Running, text));
        }
        lines
    }
}

impl Device {
    fn fade(&mut self, seconds: f64) {
        self.tokens *= MEMORY;
        self.busy *= MEMORY;
        self.seconds = MEMORY * self.seconds + if self.state.is_gone() { 0.0 } else { seconds };
    }
}

/// The device name without its class: `cpu 0 (cpu-avx512-f32)` becomes `cpu 0`.
fn plain(shown: &str) -> &str {
    shown.rsplit_once(" (").map_or(shown, |(name, _)| name)
}

/// Shortens a name to `width` characters.
fn short(name: &str, width: usize) -> String {
    match name.chars().count() > width {
        true => name.chars().take(width.saturating_sub(1)).chain(['…']).collect(),
        false => name.into(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::event::{Shared, Step};

    fn step(parts: &[(&str, u64, f64)]) -> Event {
        let part = |(worker, tokens, busy): &(&str, u64, f64)| Part {
            worker: (*worker).into(),
            device: "cpu 0".into(),
            microbatches: 1,
            tokens: *tokens,
            busy: *busy,
            spans: vec![],
        };
        let shared = Shared { devices: parts.iter().map(part).collect(), ..Shared::default() };
        Event::Step(Step { seconds: 2.0, shared: Some(shared), ..Step::default() })
    }

    fn change(what: What, worker: &str, devices: &[&str]) -> Event {
        let devices = devices.iter().map(|d| d.to_string()).collect();
        Event::Device(Change { step: 1, what, worker: worker.into(), devices, reason: "why".into() })
    }

    fn check(events: &[Event], want: &[&str]) {
        let mut roster = Roster::default();
        events.iter().for_each(|event| roster.see(event));
        let lines: Vec<String> = roster.lines().into_iter().map(|(_, line)| line).collect();
        assert_eq!(lines, want);
    }

    #[test]
    fn device_lines_show_state_changes() {
        let joined = |w| change(What::Joined, w, &["cpu 0 (cpu-avx512-f32)"]);
        check(&[], &[]);
        check(&[joined("a")], &["  a, cpu 0  ready"]);
        let both = [joined("a"), joined("b"), step(&[("a", 300, 2.0), ("b", 100, 1.0)])];
        let two = "  b, cpu 0  running    25.0 %      50 tokens/s   50 % idle";
        check(&both, &["  a, cpu 0  running    75.0 %     150 tokens/s    0 % idle", two]);
        let lost = [&both[..], &[change(What::Lost, "a", &[])]].concat();
        check(&lost, &["  b, cpu 0  running   100.0 %      50 tokens/s   50 % idle", "  a, cpu 0  lost"]);
        let after = [&lost[..], &[step(&[("a", 50, 0.5), ("b", 100, 1.0)])]].concat();
        let mut roster = Roster::default();
        after.iter().for_each(|event| roster.see(event));
        assert_eq!(
            roster.rows().last().map(|row| row.state),
            Some(DeviceState::Lost),
            "its last part is no return"
        );
        let back = [&lost[..], &[joined("a")]].concat();
        let first = "  a, cpu 0  ready";
        check(&back, &[first, "  b, cpu 0  running   100.0 %      50 tokens/s   50 % idle"]);
        let paused = [&both[..], &[change(What::Paused, "", &[])]].concat();
        let mut roster = Roster::default();
        paused.iter().for_each(|event| roster.see(event));
        assert!(roster.rows().iter().all(|row| row.state == DeviceState::Paused));
        let fell = change(What::Fallback, "a", &["cpu 0 (x) -> cpu (cpu-plain-f32)"]);
        roster.see(&fell);
        assert_eq!(roster.rows()[0].name, "a, cpu");
        assert_eq!(roster.rows()[0].state, DeviceState::Fallback);
    }

    #[test]
    fn devices_beyond_the_limit_are_summed_up() {
        let names: Vec<String> = (0..40).map(|i| format!("host-{i:02}")).collect();
        let parts: Vec<(&str, u64, f64)> = names.iter().map(|n| (n.as_str(), 10, 1.0)).collect();
        let mut roster = Roster::default();
        for name in &names {
            roster.see(&change(What::Joined, name, &["cpu 0 (c)"]));
        }
        roster.see(&step(&parts));
        let lines = roster.lines();
        assert_eq!(lines.len(), SHOWN + 1);
        assert_eq!(lines[SHOWN].1, "  and 28 more: 140 tokens/s, 0 of them gone");
    }
}

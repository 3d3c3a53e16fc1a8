//! Work of each device, summed over the steps. Shares refer to the time of the steps in which a device took part, so
//! that a device that joins late does not count as idle before.

use crate::support::plural::count;
use crate::train::event::{Shared, Step};
use std::collections::BTreeMap;

/// Totals of all devices over the steps so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct TeamWork {
    /// Work by worker and device.
    devices: BTreeMap<(String, String), DeviceWork>,
    classes: BTreeMap<String, u64>,
    repeats: u64,
    cancels: u64,
    wasted_tokens: u64,
    sync: f64,
    hidden: f64,
    bytes: (u64, u64),
    seconds: f64,
    tokens: u64,
}

/// Work of one device so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct DeviceWork {
    /// Microbatches that count.
    pub microbatches: u64,
    /// Tokens of these microbatches.
    pub tokens: u64,
    /// Seconds of computation.
    pub busy: f64,
    /// Seconds of the steps in which the device took part.
    pub there: f64,
}

impl DeviceWork {
    /// Percentage of its steps' time in which the device did not compute.
    pub fn idle(&self) -> f64 {
        100.0 * (1.0 - self.busy / self.there.max(1e-9)).max(0.0)
    }
}

impl TeamWork {
    /// Adds a step.
    pub fn see(&mut self, step: &Step) {
        let Some(shared) = &step.shared else { return };
        let Shared { devices, classes, repeats, cancels, wasted_tokens, .. } = shared;
        for part in devices {
            let work = self.devices.entry((part.worker.clone(), part.device.clone())).or_default();
            work.microbatches += part.microbatches;
            work.tokens += part.tokens;
            work.busy += part.busy;
            work.there += step.seconds;
        }
        for (class, n) in classes {
            *self.classes.entry(class.clone()).or_default() += n;
        }
        self.repeats += repeats;
        self.cancels += cancels;
        self.wasted_tokens += wasted_tokens;
        self.sync += shared.sync_seconds;
        self.hidden += shared.hidden_seconds;
        self.bytes = (self.bytes.0 + shared.bytes_in, self.bytes.1 + shared.bytes_out);
        self.seconds += step.seconds;
        self.tokens += step.total_tokens;
    }

    /// Work of each device, by worker and device name.
    pub fn devices(&self) -> impl Iterator<Item = (&str, &str, &DeviceWork)> {
        self.devices.iter().map(|((worker, device), work)| (worker.as_str(), device.as_str(), work))
    }

    /// Numeric classes that computed a microbatch.
    pub fn classes(&self) -> Vec<&str> {
        self.classes.keys().map(String::as_str).collect()
    }

    /// Bytes of received sums and of sent parameters.
    pub fn bytes(&self) -> (u64, u64) {
        self.bytes
    }

    /// The speed-up over the fastest device alone on the same rows, and that device. The speed-up is the time that the
    /// device needs for all tokens at its measured speed, divided by the time of the steps. None for a single device,
    /// or if no speed was measured.
    pub fn speed_up(&self) -> Option<(f64, (&str, &str))> {
        if self.devices.len() < 2 || self.seconds <= 0.0 {
            return None;
        }
        let measured = self.devices.iter().filter(|(_, work)| work.busy > 0.0 && work.tokens > 0);
        let speeds = measured.map(|(name, work)| (name, work.tokens as f64 / work.busy));
        let ((worker, device), best) = speeds.max_by(|a, b| a.1.total_cmp(&b.1))?;
        Some((self.tokens as f64 / best / self.seconds, (worker, device)))
    }

    /// The lines of the summary, without the speed-up.
    pub fn lines(&self) -> Vec<String> {
        if self.devices.is_empty() {
            return vec![];
        }
        let mut lines = Vec::new();
        for ((worker, device), work) in &self.devices {
            lines.push(format!(
                "device   {worker}, {device}: {}, {} tokens, {:.0} % idle",
                count(work.microbatches, "microbatch"),
                work.tokens,
                work.idle()
            ));
        }
        if self.classes.len() > 1 {
            let each: Vec<String> = self.classes.iter().map(|(class, n)| format!("{n} on {class}")).collect();
            lines.push(format!("classes  microbatches: {}", each.join(", ")));
        }
        lines.push(format!(
            "repeats  {}; {} cancelled, {} tokens wasted",
            self.repeats, self.cancels, self.wasted_tokens
        ));
        let (megabytes_in, megabytes_out) = (self.bytes.0 as f64 / 1e6, self.bytes.1 as f64 / 1e6);
        lines.push(format!(
            "sync     {:.2} s of {:.2} s, {:.2} s of it hidden behind computing; {megabytes_in:.1} MB in, \
             {megabytes_out:.1} MB out",
            self.sync, self.seconds, self.hidden
        ));
        lines
    }

    /// The line with the speed-up. A run whose loss did not fall does not print it.
    pub fn speed_line(&self) -> Option<String> {
        let (factor, (worker, device)) = self.speed_up()?;
        Some(format!(
            "speed-up {factor:.2} over {worker}, {device} alone, the fastest device, on the same rows"
        ))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::event::Part;

    #[test]
    fn team_summary_has_devices_and_speed_up() {
        let part = |worker: &str, tokens, busy| Part {
            worker: worker.into(),
            device: "cpu 0".into(),
            microbatches: 2,
            tokens,
            busy,
            spans: vec![],
        };
        let step = |devices| Step {
            step: 1,
            loss: 1.0,
            grad_norm: 1.0,
            lr: 1.0,
            tokens: 10,
            total_tokens: 400,
            seconds: 2.0,
            epoch: 0.0,
            shared: Some(Shared { devices, repeats: 1, sync_seconds: 0.5, ..Shared::default() }),
            ..Step::default()
        };
        let mut team = TeamWork::default();
        assert!(team.lines().is_empty() && team.speed_line().is_none());
        // a: 300 tokens in 2 s; b: 100 tokens in 1 s of 2.
        team.see(&step(vec![part("a", 300, 2.0), part("b", 100, 1.0)]));
        let (factor, device) = team.speed_up().unwrap();
        assert_eq!((device, (factor * 1000.0).round()), (("a", "cpu 0"), 1333.0));
        assert_eq!(
            team.lines(),
            [
                "device   a, cpu 0: 2 microbatches, 300 tokens, 0 % idle",
                "device   b, cpu 0: 2 microbatches, 100 tokens, 50 % idle",
                "repeats  1; 0 cancelled, 0 tokens wasted",
                "sync     0.50 s of 2.00 s, 0.00 s of it hidden behind computing; 0.0 MB in, 0.0 MB out",
            ]
        );
        let line = "speed-up 1.33 over a, cpu 0 alone, the fastest device, on the same rows";
        assert_eq!(team.speed_line().as_deref(), Some(line));
        // Two devices of one worker count as two; a single device is not compared with itself.
        let mut team = TeamWork::default();
        team.see(&step(vec![part("a", 200, 2.0), Part { device: "cpu 1".into(), ..part("a", 200, 2.0) }]));
        assert_eq!(team.speed_up(), Some((2.0, ("a", "cpu 1"))));
        let mut team = TeamWork::default();
        team.see(&step(vec![part("a", 400, 2.0)]));
        assert_eq!(team.speed_line(), None);
    }
}

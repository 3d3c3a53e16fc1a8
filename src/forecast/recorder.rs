//! Records measurements during a run: all values for forecasts are collected from the run's events and their times, and
//! stored for the next plan. Before the first step the recorder forecasts the run, so that the report can compare the
//! forecast with the result.

use super::counts::Counts;
use super::profile::{self, Basis, Measured, ModelShape, Pace, Profiles};
use super::time::{Participant, Workload, forecast};
use crate::numeric::line::Points;
use crate::train::event::{Event, Forecast, HERE, Part, Speed, Step, Takes};
use std::collections::BTreeMap;
use std::time::Instant;

/// Minimum number of microbatches for useful times.
const FEW: f64 = 3.0;

/// The devices of this process with their hardware, and the estimated memory of the device of a run on one device.
type Here = (Vec<(String, String)>, Option<Takes>);

/// Recorder of one run.
pub struct Recorder {
    shape: ModelShape,
    counts: Counts,
    load: Workload,
    /// Name and hardware of the devices of this process.
    here: Vec<(String, String)>,
    /// Estimated memory of the only device, where known before measurement.
    takes: Option<Takes>,
    profiles: Profiles,
    /// Measurements of the only device in earlier runs of this shape.
    earlier: Option<Pace>,
    speeds: BTreeMap<(String, String), Speed>,
    /// Seconds of measuring the only device before the first step.
    trials: f64,
    steps: u64,
    /// Seconds of steps besides the longest computation of a device in each.
    besides: f64,
    all: f64,
    others: bool,
    eval: Points,
    save: Points,
    answer: Points,
    last: Instant,
    said: bool,
}

impl Recorder {
    /// A recorder for a run with the steps of `load`.
    pub fn new(shape: ModelShape, (counts, mut load): (Counts, Workload), (here, takes): Here) -> Self {
        load.trained = shape.trained;
        Recorder {
            shape,
            counts,
            load,
            here,
            takes,
            profiles: Profiles::read(),
            earlier: None,
            speeds: BTreeMap::new(),
            trials: 0.0,
            steps: 0,
            besides: 0.0,
            all: 0.0,
            others: false,
            eval: Points::default(),
            save: Points::default(),
            answer: Points::default(),
            last: Instant::now(),
            said: false,
        }
    }

    /// Records an event. Returns an event to report *before* it.
    pub fn before(&mut self, event: &Event) -> Option<Event> {
        match event {
            // The first step ends: all expected devices have joined.
            Event::Step(_) => self.say(event.step().saturating_sub(1)),
            _ => None,
        }
    }

    /// Records an event. Returns an event to report after it.
    pub fn after(&mut self, event: &Event) -> Option<Event> {
        let since = self.last.elapsed().as_secs_f64();
        self.last = Instant::now();
        let trained = self.shape.trained as f64;
        match event {
            Event::Run(run) => {
                let class = run.classes.last().cloned().unwrap_or_default();
                let alone = self.here.first().filter(|(name, _)| name.is_empty())?;
                let known = self.profiles.pace("", &profile::device(&class, &alone.1), &self.shape);
                self.earlier = known.filter(|pace| pace.basis == Basis::Measured);
            }
            Event::Speed(speed) => {
                self.others |= !speed.worker.is_empty() && !is_here(speed);
                self.speeds.insert((speed.worker.clone(), speed.device.clone()), speed.clone());
                if self.steps == 0 && speed.worker.is_empty() {
                    self.trials = if speed.trials > 0 { speed.points.y } else { 0.0 };
                    return self.say(speed.step);
                }
            }
            Event::Step(step) => self.step(step),
            Event::Eval(eval) => self.eval.add(self.counts.eval_tokens as f64, eval.seconds),
            Event::Sample(_) => self.answer.add(1.0, since),
            Event::Checkpoint(_) => self.save.add(trained, since),
            _ => {}
        }
        None
    }

    fn step(&mut self, step: &Step) {
        self.steps += 1;
        self.all += step.seconds;
        let longest = |parts: &[Part]| parts.iter().map(|p| p.busy).fold(0.0, f64::max);
        self.besides += step.shared.as_ref().map_or(0.0, |s| (step.seconds - longest(&s.devices)).max(0.0));
    }

    /// Record name of the hardware of a device.
    fn device(&self, speed: &Speed) -> String {
        let named = |(name, _): &&(String, String)| name.is_empty() || *name == speed.device;
        let hardware = self.here.iter().find(named).filter(|_| is_here(speed));
        match hardware {
            Some((_, hardware)) => profile::device(&speed.class, hardware),
            None => profile::device(&speed.class, &speed.device),
        }
    }

    /// Worker name in the record; empty for this machine.
    fn owner(&self, speed: &Speed) -> String {
        if is_here(speed) { String::new() } else { machine(&speed.worker) }
    }

    /// Reports the forecast once, before the first step, for all devices known then: from their measurements in this
    /// run, and for a single device from earlier runs where it could not be measured.
    fn say(&mut self, step: u64) -> Option<Event> {
        let mut paces: Vec<Pace> = self.speeds.values().map(|speed| self.pace(speed)).collect();
        if paces.is_empty() {
            paces.extend(self.earlier.clone());
        }
        if self.said || paces.is_empty() {
            return None;
        }
        self.expect(&paces, step)
    }

    fn pace(&self, speed: &Speed) -> Pace {
        let known = self.profiles.pace(&self.owner(speed), &self.device(speed), &self.shape);
        let guess = Pace::guess(&self.shape, self.shape.flops / speed.line.each.max(1e-12));
        let pace = known.unwrap_or(guess);
        Pace { train: speed.line, link: speed.link, basis: Basis::Measured, ..pace }
    }

    fn expect(&mut self, paces: &[Pace], step: u64) -> Option<Event> {
        self.said = true;
        let team: Vec<Participant> =
            paces.iter().map(|p| Participant { pace: p.clone(), link: p.link }).collect();
        let expected = forecast(&team, &self.load);
        // Measuring itself takes time too: two rounds, of which one is recorded.
        let basis = "measured".to_string();
        let (tokens_per_second, seconds) = (expected.tokens_per_second, expected.total() + 2.0 * self.trials);
        let memory = self.takes.clone().map_or_else(|| self.by_trials(), |takes| vec![takes]);
        (tokens_per_second > 0.0 && seconds.is_finite()).then_some(Event::Forecast(Forecast {
            step,
            tokens_per_second,
            seconds,
            basis,
            memory,
        }))
    }

    /// Memory of devices expected from their trials, for devices whose trials were about as long as the longest
    /// microbatch.
    fn by_trials(&self) -> Vec<Takes> {
        let longest = self.load.steps.iter().flatten().max().copied().unwrap_or(0);
        let takes = |speed: &Speed| {
            let line = speed.memory?.fit().filter(|fit| fit.reaches(longest as usize))?.line;
            let (worker, device) = (speed.worker.clone(), speed.device.clone());
            Some(Takes {
                worker,
                device,
                bytes: line.at(f64::from(longest)) as u64,
                basis: "measured".into(),
            })
        };
        self.speeds.values().filter_map(takes).collect()
    }

    /// Stores the measurements.
    pub fn keep(self) {
        // The time of an island is not that of a microbatch.
        if self.load.sent.islands.is_some() {
            return;
        }
        let steps = self.steps as f64;
        let alone = self.speeds.len() == 1;
        for speed in self.speeds.values().filter(|s| s.points.n >= FEW) {
            let mut measured = Measured { train: speed.points, link: speed.link, ..Measured::default() };
            measured.memory = speed.memory.unwrap_or_default();
            let besides = match alone && speed.worker.is_empty() {
                // Trials are not part of a step.
                true => (self.all - (speed.points.y - self.trials)).max(0.0),
                false => self.besides,
            };
            if !self.others && steps > 0.0 {
                measured.step.add(self.shape.trained as f64, besides / steps);
            }
            if is_here(speed) {
                let each = if alone { self.eval } else { self.eval.slower(self.speeds.len() as f64) };
                (measured.eval, measured.save, measured.answer) = (each, self.save, self.answer);
            }
            let (owner, device) = (self.owner(speed), self.device(speed));
            Profiles::keep(&owner, &device, &self.shape, &measured);
        }
    }
}

/// Whether the device belongs to this process.
fn is_here(speed: &Speed) -> bool {
    speed.worker.is_empty() || speed.worker == HERE
}

/// A worker's name without the part that changes at every start: `box-4711 (2)` is on `box`.
fn machine(worker: &str) -> String {
    let name = worker.split(" (").next().unwrap_or(worker);
    match name.rsplit_once('-') {
        Some((host, process)) if process.bytes().all(|b| b.is_ascii_digit()) => host.to_string(),
        _ => name.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::memory::{InUse, Used};

    /// Memory of trials does not predict that of much longer microbatches.
    #[test]
    fn memory_is_predicted_only_near_tried_sizes() {
        let mut memory = Used::default();
        for tokens in [128.0, 256.0] {
            memory.add(tokens, InUse { bytes: 1000 + 10 * tokens as u64, blocks: 3 });
        }
        let expected = |longest: u32| {
            let shape = ModelShape { key: "m".into(), model: "m".into(), flops: 1.0, trained: 1 };
            let load = Workload { steps: vec![vec![64, longest], vec![7]], ..Workload::default() };
            let mut recorder = Recorder::new(shape, (Counts::default(), load), (vec![], None));
            let speed = Speed { device: "cpu".into(), memory: Some(memory), ..Speed::default() };
            recorder.speeds.insert((String::new(), "cpu".into()), speed);
            recorder.by_trials().iter().map(|takes| takes.bytes).collect::<Vec<_>>()
        };
        assert_eq!(expected(256), [3560]);
        assert_eq!(expected(384), [4840]);
        assert_eq!(expected(4096), [] as [u64; 0]);
    }

    #[test]
    fn machine_name_drops_run_suffixes() {
        let cases =
            [("box-4711", "box"), ("box-4711 (2)", "box"), ("my-box-1", "my-box"), ("my-box", "my-box")];
        for (worker, expected) in cases {
            assert_eq!(machine(worker), expected, "{worker}");
        }
    }
}

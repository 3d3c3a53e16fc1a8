//! Measurements of devices in the cache folder: one file, `profiles.json`, with a record for each device and shape of
//! model. `finetune bench` and every run write it, `finetune plan` reads it. New measurements replace old ones
//! gradually. An unreadable or unwritable file affects plans only, not runs. No decision
//! depends on measurements of memory.

use crate::config::cache;
use crate::format::atomic;
use crate::model::config::Config;
use crate::model::decoder::Keep;
use crate::model::lora::LoraSpec;
use crate::model::memory::{self, Fit, Load, Used};
use crate::model::weights::ModelError;
use crate::numeric::line::{Line, Points};
pub use crate::train::event::Link;
use serde::{Deserialize, Serialize};
use std::time::{SystemTime, UNIX_EPOCH};

/// Weight of all earlier measurements, in points, when a new one is added.
const OLD: f64 = 24.0;
/// Maximum number of records; the newest are kept.
const MOST: usize = 200;
/// Tokens of the row by which models are compared.
const ROW: usize = 256;

/// Properties of a model that determine its speed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ModelShape {
    /// All properties that determine speed, as text: equal for models of equal speed.
    pub key: String,
    /// Name for users.
    pub model: String,
    /// Floating point operations per trained token, of a dry run of a row of 256 tokens.
    pub flops: f64,
    /// Number of trained values.
    pub trained: u64,
}

impl ModelShape {
    /// The shape of a model with its adapter; `kind` is the storage type of its weights.
    pub fn of(model: &str, (config, lora): (&Config, &LoraSpec), kind: &str) -> Result<Self, ModelError> {
        let h = &config.heads;
        let mut targets = lora.modules();
        targets.sort();
        let targets = targets.join(" ");
        let outputs = match &config.labels {
            Some(labels) => format!("{} labels", labels.len()),
            None => format!("{} tokens", config.vocab),
        };
        let inner = match &config.experts {
            Some(of) => format!("{} of {} experts of {}", of.chosen, of.count, of.feed_forward),
            None => format!("feed forward {}", config.feed_forward),
        };
        let others = lora.exceptions_in_short().map(|others| format!(" ({others})")).unwrap_or_default();
        let key = format!(
            "{} of {} layers, hidden {}, {inner}, heads {} / {} of {}, {outputs}, {kind}; rank {} on {targets}{others}",
            config.architecture(),
            config.layers,
            config.hidden,
            h.query,
            h.kv,
            h.size,
            lora.rank
        );
        let trained = crate::model::layout::of(config, lora, 0..config.layers).len() as u64;
        let flops = memory::flops(Load::of(config, lora, ROW, 0), Keep::Everything)? / ROW as f64;
        Ok(ModelShape { key, model: model.into(), flops, trained })
    }
}

/// Measurements of one device on one shape of model.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Measured {
    /// Seconds of a training microbatch by its tokens.
    pub train: Points,
    /// Seconds of an evaluation by its tokens.
    pub eval: Points,
    /// Seconds of a step besides its microbatches, by trained values.
    pub step: Points,
    /// Seconds of a checkpoint, by trained values.
    pub save: Points,
    /// Seconds of answers, each counted as one.
    pub answer: Points,
    /// Peak bytes of memory of a training microbatch by its tokens.
    pub memory: Used,
    /// Link to a device on another machine.
    pub link: Option<Link>,
}

/// One record.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// Name of the worker; empty for the coordinator's own process.
    #[serde(default)]
    pub worker: String,
    /// Class and hardware.
    pub device: String,
    /// The model.
    pub shape: ModelShape,
    /// The measurements.
    pub measured: Measured,
    /// Seconds since 1970.
    pub when: u64,
}

/// All records.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Profiles {
    /// Records, the newest last.
    pub records: Vec<Record>,
}

/// Basis of a forecast speed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Basis {
    /// Measured on this device with a model of this shape.
    Measured,
    /// Measured on this device with another model.
    Scaled {
        /// Name of the other model.
        from: String,
    },
    /// No measurements.
    Guess,
}

/// Expected speed of a device.
#[derive(Debug, Clone, PartialEq)]
pub struct Pace {
    /// Seconds of a training microbatch by its tokens.
    pub train: Line,
    /// Seconds per evaluated token.
    pub eval: f64,
    /// Seconds of a step besides its microbatches.
    pub step: f64,
    /// Seconds of a checkpoint.
    pub save: f64,
    /// Seconds of an answer.
    pub answer: f64,
    /// Link to the device, where it is on another machine.
    pub link: Option<Link>,
    /// Basis of these values.
    pub basis: Basis,
}

/// Name of a device in records.
pub fn device(class: &str, hardware: &str) -> String {
    format!("{class} on {hardware}")
}

impl Profiles {
    /// Reads the file; a missing or unreadable file counts as empty.
    pub fn read() -> Self {
        let bytes = cache::profiles().and_then(|path| std::fs::read(path).ok());
        bytes.and_then(|bytes| serde_json::from_slice(&bytes).ok()).unwrap_or_default()
    }

    /// Adds measurements to the file, which other processes may have changed since.
    pub fn keep(worker: &str, device: &str, shape: &ModelShape, measured: &Measured) {
        let mut all = Profiles::read();
        let when = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs());
        let record = Record {
            worker: worker.into(),
            device: device.into(),
            shape: shape.clone(),
            measured: measured.clone(),
            when,
        };
        all.learn(record);
        if let (Some(path), Ok(text)) = (cache::profiles(), serde_json::to_string_pretty(&all)) {
            let made = path.parent().map(std::fs::create_dir_all);
            if made.is_some_and(|made| made.is_ok()) {
                // If the write fails, the device is measured again later.
                let _ = atomic::write_file(&path, (text + "\n").as_bytes());
            }
        }
    }

    fn learn(&mut self, mut new: Record) {
        let same =
            |r: &Record| (&r.worker, &r.device, &r.shape.key) == (&new.worker, &new.device, &new.shape.key);
        if let Some(at) = self.records.iter().position(same) {
            let old = self.records.remove(at).measured;
            let m = &mut new.measured;
            let pairs = [
                (&mut m.train, old.train),
                (&mut m.eval, old.eval),
                (&mut m.step, old.step),
                (&mut m.save, old.save),
                (&mut m.answer, old.answer),
            ];
            for (points, old) in pairs {
                points.join(&old.faded(OLD));
            }
            m.link = m.link.or(old.link);
            // With another policy for kept values, old measurements are invalid. A fitted line is valid near the
            // largest size of the new measurements; an older, larger size would prevent its use there forever.
            let tokens = if m.memory.fit().is_some() { 0 } else { old.memory.tokens };
            let old = Used { points: old.memory.points.faded(OLD), tokens, ..old.memory };
            m.memory.join(&old);
        }
        self.records.push(new);
        let surplus = self.records.len().saturating_sub(MOST);
        self.records.drain(..surplus);
    }

    /// Expected speed of `device` for models of `shape`; `None` without measurements.
    pub fn pace(&self, worker: &str, device: &str, shape: &ModelShape) -> Option<Pace> {
        let of_it = self.records.iter().filter(|r| r.worker == worker && r.device == device);
        // The most similar amount of work; the newest among equals.
        let far = |r: &Record| match r.shape.key == shape.key {
            true => -1.0,
            false => (r.shape.flops / shape.flops).ln().abs(),
        };
        let usable = of_it.rev().filter(|r| r.measured.train.line().is_some() && far(r).is_finite());
        let record = usable.min_by(|a, b| far(a).total_cmp(&far(b)))?;
        record.pace(shape)
    }

    /// Measured memory of `device` for models of exactly this shape.
    pub fn memory(&self, device: &str, shape: &ModelShape) -> Option<Fit> {
        let same = |r: &&Record| r.worker.is_empty() && r.device == device && r.shape.key == shape.key;
        self.records.iter().rev().find(same)?.measured.memory.fit()
    }

    /// Measured workers on other machines, newest first, each with its devices.
    pub fn elsewhere(&self, shape: &ModelShape) -> Vec<(String, String, Pace)> {
        let mut found: Vec<(String, String, Pace)> = Vec::new();
        for record in self.records.iter().rev().filter(|r| !r.worker.is_empty()) {
            let known = found.iter().any(|(w, d, _)| (w, d) == (&record.worker, &record.device));
            if let (false, Some(pace)) = (known, self.pace(&record.worker, &record.device, shape)) {
                found.push((record.worker.clone(), record.device.clone(), pace));
            }
        }
        found
    }
}

impl Record {
    fn pace(&self, shape: &ModelShape) -> Option<Pace> {
        let (m, same) = (&self.measured, self.shape.key == shape.key);
        let factor = if same { 1.0 } else { shape.flops / self.shape.flops };
        // Work per trained value does not depend on the model's products.
        let values = if same { 1.0 } else { shape.trained as f64 / (self.shape.trained as f64).max(1.0) };
        let train = m.train.line()?.times(factor);
        let mean = |points: &Points| if points.n > 0.0 { points.y / points.n } else { 0.0 };
        let eval = m.eval.line().map_or(train.each / 3.0, |_| factor * m.eval.y / m.eval.x);
        Some(Pace {
            train,
            eval,
            step: mean(&m.step) * values,
            save: mean(&m.save) * values,
            answer: mean(&m.answer) * factor,
            link: m.link,
            basis: if same { Basis::Measured } else { Basis::Scaled { from: self.shape.model.clone() } },
        })
    }
}

impl Pace {
    /// Guess for a device with this number of operations per second.
    pub fn guess(shape: &ModelShape, per_second: f64) -> Self {
        let each = shape.flops / per_second;
        let step = shape.trained as f64 * 5e-9;
        let train = Line { fixed: 0.0, each };
        Pace {
            train,
            eval: each / 3.0,
            step,
            save: shape.trained as f64 * 4e-8,
            answer: 0.0,
            link: None,
            basis: Basis::Guess,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::model::memory::InUse;

    fn shape(model: &str, flops: f64) -> ModelShape {
        ModelShape { key: model.into(), model: model.into(), flops, trained: 100 }
    }

    fn record(device: &str, shape: ModelShape, each: f64, n: usize) -> Record {
        let mut train = Points::default();
        (1..=n).for_each(|i| train.add(100.0 * i as f64, 0.5 + each * 100.0 * i as f64));
        let measured = Measured { train, ..Measured::default() };
        Record { worker: String::new(), device: device.into(), shape, measured, when: 0 }
    }

    #[test]
    fn a_pace_is_measured_or_scaled_or_unknown() {
        let mut all = Profiles::default();
        all.learn(record("a", shape("small", 1e9), 0.001, 4));
        all.learn(record("a", shape("large", 8e9), 0.010, 4));
        all.learn(record("b", shape("small", 1e9), 0.1, 4));
        let of = |device: &str, model: &str, flops| all.pace("", device, &shape(model, flops));
        let exact = of("a", "small", 1e9).unwrap();
        assert_eq!(exact.basis, Basis::Measured);
        assert!((exact.train.each - 0.001).abs() < 1e-9 && (exact.train.fixed - 0.5).abs() < 1e-9);
        // By ratio 2e9 is nearer to 1e9 than to 8e9, and 4e9 is nearer to 8e9.
        let scaled = of("a", "other", 2e9).unwrap();
        assert_eq!(scaled.basis, Basis::Scaled { from: "small".into() });
        assert!((scaled.train.each - 0.002).abs() < 1e-9);
        assert_eq!(of("a", "other", 4e9).unwrap().basis, Basis::Scaled { from: "large".into() });
        assert_eq!(of("c", "small", 1e9), None);
    }

    #[test]
    fn memory_fit_is_per_device_and_shape() {
        let mut all = Profiles::default();
        let mut planted = record("a", shape("small", 1e9), 0.001, 4);
        let seen = |bytes| InUse { bytes, blocks: 3 };
        planted.measured.memory.rest(seen(1000));
        planted.measured.memory.add(10.0, seen(1500));
        all.learn(planted.clone());
        all.learn(planted);
        let fit = all.memory("a", &shape("small", 1e9)).unwrap();
        assert_eq!((fit.blocks, fit.line), (3, Line { fixed: 1000.0, each: 50.0 }));
        let text = serde_json::to_string(&all).unwrap();
        assert_eq!(serde_json::from_str::<Profiles>(&text).unwrap(), all, "it is kept");
        assert_eq!(all.memory("a", &shape("other", 1e9)), None);
        assert_eq!(all.memory("b", &shape("small", 1e9)), None);
    }

    /// A run of long microbatches must not invalidate the line for short ones.
    #[test]
    fn memory_fit_holds_near_sizes_of_the_newest_run() {
        let of = |sizes: &[f64]| {
            let mut new = record("a", shape("small", 1e9), 0.001, 4);
            let seen = |tokens: f64| InUse { bytes: 1000 + 50 * tokens as u64, blocks: 3 };
            sizes.iter().for_each(|&tokens| new.measured.memory.add(tokens, seen(tokens)));
            new
        };
        let mut all = Profiles::default();
        let mut reaches = |sizes: &[f64]| {
            all.learn(of(sizes));
            let fit = all.memory("a", &shape("small", 1e9)).unwrap();
            [256, 4096].map(|tokens| fit.reaches(tokens))
        };
        assert_eq!(reaches(&[1024.0, 4096.0]), [false, true]);
        // A single size gives no line: the old measurements remain the only ones.
        assert_eq!(reaches(&[256.0]), [false, true]);
        assert_eq!(reaches(&[128.0, 256.0]), [true, false]);
    }

    #[test]
    fn new_measurements_outweigh_old_ones() {
        let mut all = Profiles::default();
        all.learn(record("a", shape("m", 1e9), 0.001, 1000));
        all.learn(record("a", shape("m", 1e9), 0.002, 1000));
        assert_eq!(all.records.len(), 1);
        let each = all.pace("", "a", &shape("m", 1e9)).unwrap().train.each;
        assert!((0.0018..=0.0021).contains(&each), "{each}");
        // A single microbatch is one of many.
        all.learn(record("a", shape("m", 1e9), 0.002, 1));
        assert!((all.records[0].measured.train.n - OLD - 1.0).abs() < 1e-9);
    }

    #[test]
    fn only_the_newest_records_are_kept() {
        let mut all = Profiles::default();
        (0..MOST + 5).for_each(|i| all.learn(record(&i.to_string(), shape("m", 1e9), 0.1, 2)));
        assert_eq!((all.records.len(), all.records[0].device.as_str()), (MOST, "5"));
    }
}

//! TensorBoard's event files: records of length, masked CRC of the length, a protobuf `Event`, masked CRC of the event
//! (TensorFlow's record_writer.h and event.proto). Only scalars are written. This is the only file of the folder that
//! reads a clock, because the format requires a wall time.

use crate::format::FormatError;
use crate::train::event::Event;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes scalars of steps and evaluations. A full disk ends the log, not the run.
#[derive(Debug)]
pub struct TensorBoard {
    path: PathBuf,
    file: File,
    failed: Option<io::Error>,
}

impl TensorBoard {
    /// A new event file for the run `name`, in a folder of its own inside `dir`: TensorBoard treats each folder as one
    /// run. `before` is the folder that [`TensorBoard::folder`] returned before a resume; a folder outside `dir` is
    /// ignored. Without it the folder is `name`, or `name-2` ... if another run uses that name.
    pub fn create(dir: &Path, name: &str, before: Option<&Path>) -> Result<Self, FormatError> {
        fs::create_dir_all(dir).map_err(|e| FormatError::io(dir, e))?;
        let dir = dir.canonicalize().map_err(|e| FormatError::io(dir, e))?;
        match before.filter(|folder| folder.parent() == Some(&dir)) {
            Some(folder) => fs::create_dir_all(folder)
                .map_err(|e| FormatError::io(folder, e))
                .and_then(|()| TensorBoard::write_into(folder)),
            None => TensorBoard::write_into(&free(&dir, name)?),
        }
    }

    /// The run's folder, as an absolute path.
    pub fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(&self.path)
    }

    /// Creates a new file. TensorBoard itself drops later steps of older files in the folder.
    fn write_into(dir: &Path) -> Result<Self, FormatError> {
        let name = format!("events.out.tfevents.{:010}.finetune.{}", now() as u64, std::process::id());
        let path = dir.join(name);
        let file = File::create(&path).map_err(|e| FormatError::io(&path, e))?;
        let mut log = TensorBoard { path, file, failed: None };
        log.write(0, &field_bytes(3, b"brain.Event:2"));
        Ok(log)
    }

    /// Writes the scalars of `event`.
    pub fn see(&mut self, event: &Event) {
        if let Event::Run(run) = event {
            // SessionLog { status: START }: TensorBoard purges later steps of older files.
            self.write(run.first_step, &field_bytes(7, &field_varint(1, 1)));
        }
        let scalars = scalars(event);
        if !scalars.is_empty() {
            let mut values: Vec<u8> =
                scalars.iter().flat_map(|(tag, v)| field_bytes(1, &value(tag, *v))).collect();
            let sets = if let Event::Eval(eval) = event { &eval.sets[..] } else { &[] };
            for set in sets.iter().filter(|set| !set.name.is_empty()) {
                values.extend(field_bytes(1, &value(&format!("eval/{}/loss", set.name), set.eval_loss)));
            }
            self.write(event.step(), &field_bytes(5, &values));
        }
    }

    /// The first failure, if there was one.
    pub fn finish(self) -> Result<(), FormatError> {
        match self.failed {
            Some(error) => Err(FormatError::io(&self.path, error)),
            None => Ok(()),
        }
    }

    fn write(&mut self, step: u64, what: &[u8]) {
        if self.failed.is_none() {
            let mut event = vec![1 << 3 | 1];
            event.extend(now().to_le_bytes());
            event.extend(field_varint(2, step));
            event.extend(what);
            self.failed = self.file.write_all(&record(&event)).err();
        }
    }
}

/// Creates the first folder of `name`, `name-2`, `name-3` ... that does not exist.
fn free(dir: &Path, name: &str) -> Result<PathBuf, FormatError> {
    let mut folder = dir.join(name);
    for n in 2.. {
        match fs::create_dir(&folder) {
            Err(e) if e.kind() == io::ErrorKind::AlreadyExists => folder = dir.join(format!("{name}-{n}")),
            Err(e) => return Err(FormatError::io(&folder, e)),
            Ok(()) => break,
        }
    }
    Ok(folder)
}

fn scalars(event: &Event) -> Vec<(&'static str, f64)> {
    match event {
        Event::Step(e) => {
            let always = [
                ("train/loss", e.loss),
                ("train/grad_norm", e.grad_norm),
                ("train/learning_rate", e.lr),
                ("train/epoch", e.epoch),
                ("train/tokens_per_second", e.total_tokens as f64 / e.seconds.max(1e-9)),
            ];
            let optional = [
                ("train/rewards/chosen", e.rewards.rewards_chosen),
                ("train/rewards/rejected", e.rewards.rewards_rejected),
                ("train/rewards/margins", e.rewards.margin),
                ("train/rewards/accuracies", e.accuracy),
                ("train/rewards/min", e.rewards.min_reward),
                ("train/rewards/max", e.rewards.max_reward),
            ];
            let present = optional.into_iter().filter_map(|(tag, v)| Some((tag, v?)));
            always.into_iter().chain(present).collect()
        }
        Event::Eval(e) => {
            let optional = [
                ("eval/perplexity", e.perplexity),
                ("eval/accuracy", e.accuracy),
                ("eval/token_accuracy", e.token_accuracy),
                ("eval/pearson", e.pearson),
                ("eval/spearman", e.spearman),
                ("eval/macro_f1", e.macro_f1),
                ("eval/f1", e.f1),
                ("eval/rewards/chosen", e.rewards.rewards_chosen),
                ("eval/rewards/rejected", e.rewards.rewards_rejected),
                ("eval/rewards/margins", e.rewards.margin),
                ("eval/rewards/min", e.rewards.min_reward),
                ("eval/rewards/max", e.rewards.max_reward),
            ];
            let present = optional.into_iter().filter_map(|(tag, v)| Some((tag, v?)));
            [("eval/loss", e.eval_loss)].into_iter().chain(present).collect()
        }
        _ => vec![],
    }
}

/// A protobuf `Summary.Value { tag, simple_value }`.
fn value(tag: &str, x: f64) -> Vec<u8> {
    let mut out = field_bytes(1, tag.as_bytes());
    out.push(2 << 3 | 5);
    out.extend((x as f32).to_le_bytes());
    out
}

fn field_bytes(number: u8, bytes: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    out.extend(varint(bytes.len() as u64));
    out.extend(bytes);
    out
}

fn field_varint(number: u8, x: u64) -> Vec<u8> {
    let mut out = vec![number << 3];
    out.extend(varint(x));
    out
}

fn varint(mut x: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while x >= 0x80 {
        out.push(x as u8 | 0x80);
        x >>= 7;
    }
    out.push(x as u8);
    out
}

fn record(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    [&length[..], &masked(&length).to_le_bytes(), data, &masked(data).to_le_bytes()].concat()
}

fn masked(data: &[u8]) -> u32 {
    crc32c(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// CRC with Castagnoli's polynomial, reflected; computed bit by bit, because a step writes only 200 bytes.
fn crc32c(data: &[u8]) -> u32 {
    !data.iter().fold(!0u32, |crc, &byte| {
        (0..8).fold(crc ^ u32::from(byte), |c, _| if c & 1 == 1 { c >> 1 ^ 0x82f6_3b78 } else { c >> 1 })
    })
}

/// Seconds since 1970.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |t| t.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::train::event::{Eval, RunStart};

    #[test]
    fn checksum_is_crc32c() {
        // RFC 3720, B.4
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
    }

    #[test]
    fn each_run_has_its_own_folder_and_keeps_it() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().canonicalize().unwrap();
        let elsewhere = root.join("elsewhere/out");
        let folder = |name: &str, before: Option<&Path>| {
            TensorBoard::create(&root, name, before).unwrap().folder().to_owned()
        };
        let first = folder("out", None);
        for (name, before, want) in [
            ("out", None, "out-2"),
            ("out", Some(&first), "out"),
            ("out", Some(&elsewhere), "out-3"),
            ("other", None, "other"),
            ("out", None, "out-4"),
        ] {
            assert_eq!(folder(name, before.map(PathBuf::as_path)), root.join(want), "{name} {before:?}");
        }
        fs::remove_dir_all(&first).unwrap();
        assert_eq!(folder("out", Some(&first)), first, "removed and made again");
    }

    #[test]
    fn records_are_framed_and_contain_the_scalars() {
        let dir = tempfile::tempdir().unwrap();
        let mut log = TensorBoard::create(&dir.path().join("deep/er"), "run", None).unwrap();
        log.see(&Event::Run(RunStart { first_step: 301, ..RunStart::default() }));
        log.see(&Event::Eval(Eval { step: 300, eval_loss: 1.5, ..Eval::default() }));
        let bytes = fs::read(&log.path).unwrap();
        log.finish().unwrap();
        let (mut at, mut events) = (0, Vec::new());
        while at < bytes.len() {
            let length = u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()) as usize;
            let crc = |a: usize, n: usize| u32::from_le_bytes(bytes[a + n..a + n + 4].try_into().unwrap());
            assert_eq!(crc(at, 8), masked(&bytes[at..at + 8]));
            assert_eq!(crc(at + 12, length), masked(&bytes[at + 12..at + 12 + length]));
            // The event follows the wall time of nine bytes.
            events.push(bytes[at + 12 + 9..at + 12 + length].to_vec());
            at += length + 16;
        }
        assert_eq!(at, bytes.len());
        assert_eq!(events[0], [&[0x10, 0, 0x1a, 13][..], b"brain.Event:2"].concat());
        assert_eq!(events[1], [0x10, 0xad, 2, 0x3a, 2, 8, 1]);
        let value = [&[0x0a, 9][..], b"eval/loss", &[0x15], &1.5f32.to_le_bytes()].concat();
        assert_eq!(events[2], [&[0x10, 0xac, 2, 0x2a, 18, 0x0a, 16][..], &value].concat());
    }
}

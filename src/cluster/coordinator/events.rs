//! Converts notes of the machine to events of the run, and measures the communication cost of a step.

use super::super::machine::{self, Bad, DeviceReport, Kind, Note, Place, Tally};
use super::super::message::{Device, Packed};
use super::round::Task;
use super::{Counts, Passes};
use crate::support::plural::count;
use crate::train::event::{Change, LinePart, Part, SeatPart, Shared, Speed, What};
use crate::train::{Again, Finding, TrainError};
use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

/// Microbatches for each device that keep the wait at the end of a step short.
const ENOUGH: usize = 3;

/// Option values for the hint about few microbatches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Hint {
    /// --batch-size
    pub batch_size: usize,
    /// --micro-batch-tokens
    pub micro_batch_tokens: usize,
    /// Whether --islands is given.
    pub islands: bool,
}

/// The note on a run in which several numeric classes take part.
pub(super) fn mixed(classes: &BTreeSet<String>, step: u64) -> Change {
    let reason = crate::train::event::mixed(classes);
    Change { step, what: What::Note, worker: String::new(), devices: vec![], reason }
}

/// The classes of the devices that a note adds.
pub(super) fn classes(note: &Note) -> Vec<String> {
    match note {
        Note::Joined { devices, .. } => devices.iter().map(|d| d.class.clone()).collect(),
        Note::Fallback { now, .. } => vec![now.class.clone()],
        _ => vec![],
    }
}

/// A note as an event. `gone` is the kind of departure if the note is about one. Repeats have no event of their own;
/// they are counted.
pub(super) fn change(note: Note, gone: What, (step, hint): (u64, Hint)) -> Option<Change> {
    let of =
        |what, worker: String, devices, reason: String| Some(Change { step, what, worker, devices, reason });
    let run = |what, reason| of(what, String::new(), vec![], reason);
    match note {
        Note::Waiting { have, want, counts } => {
            let to_come = want.saturating_sub(have);
            run(
                What::Waiting,
                format!("waiting for {}: {have} here, {to_come} to come", count(want as u64, counts.word())),
            )
        }
        Note::Paused { have, want } => {
            run(What::Paused, format!("{} left, at least {want} needed", count(have as u64, "device")))
        }
        Note::Running { have } => run(What::Resumed, count(have as u64, "device")),
        Note::Joined { member, devices, refused } => {
            let what = if devices.is_empty() { What::Refused } else { What::Joined };
            of(what, member, devices.iter().map(named).collect(), refused.join("; "))
        }
        Note::Left { member, reason, reopened } => {
            let again = match reopened {
                0 => String::new(),
                n => format!("; {} given out again", count(n as u64, "microbatch")),
            };
            of(gone, member, vec![], format!("{reason}{again}"))
        }
        Note::Failed { place, reason } => of(What::Failed, place.member.clone(), vec![shown(&place)], reason),
        Note::Fallback { before, now, reason } => {
            let devices = vec![format!("{} -> {}", shown(&before), named(&now))];
            of(What::Fallback, before.member, devices, reason)
        }
        Note::Lone { place } => {
            let Place { member, device, class } = place;
            let reason = format!(
                "{device} gets no work: no other worker has a device of class {class}, so --verify cannot check it"
            );
            of(What::Note, member, vec![], reason)
        }
        Note::Repeated { .. } | Note::Measured { .. } => None,
        Note::Few { microbatches, devices } => run(What::Note, few(microbatches, devices, hint)),
    }
}

/// The measured speed of a device, or `None` if it was not measured.
pub(super) fn speed(device: DeviceReport, step: u64) -> Option<Speed> {
    let DeviceReport { place, points, trials, link, memory, .. } = device;
    let line = points.line()?;
    Some(Speed {
        step,
        worker: place.member,
        device: place.device,
        class: place.class,
        line,
        points,
        trials,
        link,
        memory: Some(memory).filter(|memory| memory.fit().is_some()),
    })
}

fn few(microbatches: usize, devices: usize, hint: Hint) -> String {
    let wait = match devices.saturating_sub(microbatches) {
        0 => "some wait at its end".to_string(),
        1 => "1 waits".to_string(),
        n => format!("{n} wait"),
    };
    if hint.islands {
        let (islands, devices) = (count(microbatches as u64, "island"), count(devices as u64, "device"));
        return format!("{islands} for {devices}, so {wait}; an island is computed by one device");
    }
    let factor = (ENOUGH * devices).div_ceil(microbatches.max(1));
    let tokens = (hint.micro_batch_tokens / factor.next_power_of_two()).max(1);
    let rows = hint.batch_size * factor;
    format!(
        "each step has {} for {}, so {wait}; try --batch-size {rows} or --micro-batch-tokens {tokens}",
        count(microbatches as u64, "microbatch"),
        count(devices as u64, "device"),
    )
}

fn named(device: &Device) -> String {
    format!("{} ({})", device.name, device.class)
}

fn shown(place: &Place) -> String {
    format!("{} ({})", place.device, place.class)
}

fn at(place: &Place) -> String {
    format!("worker {}, {}", place.member, place.device)
}

/// The note on microbatches that were computed again, if there are any.
pub(super) fn checks(counts: Counts) -> Option<Change> {
    let Counts { checked, unchecked, step, .. } = counts;
    let without = match unchecked {
        0 => String::new(),
        n => format!("; {n} drawn ones count without, as only this process has their class"),
    };
    let reason =
        format!("computed again by another worker and compared: {}{without}", count(checked, "microbatch"));
    let change = Change { step, what: What::Note, worker: String::new(), devices: vec![], reason };
    (checked + unchecked > 0).then_some(change)
}

/// Returns a note with the rejected connections and workers, if there are any.
pub(super) fn rejections(connections: u64, counts: Counts) -> Option<Change> {
    let Counts { expelled, refused, ignored, step, .. } = counts;
    let reason = format!(
        "rejected: {}, {} (token, version, model or options differ); removed: {}; late or duplicate messages: {ignored}",
        count(connections, "connection"),
        count(refused, "worker"),
        count(expelled, "worker"),
    );
    let change = Change { step, what: What::Note, worker: String::new(), devices: vec![], reason };
    (connections + refused + expelled > 0).then_some(change)
}

/// The error that ends a run on a bad value.
pub(super) fn halt(found: &machine::Finding, task: &Task) -> TrainError {
    let Bad { place, tensor, value } = &found.first;
    let again = found.again.as_ref().map(|again| match again {
        machine::Again::Also(bad) => Again { place: at(&bad.place), bad: true },
        machine::Again::Not(place) => Again { place: at(place), bad: false },
    });
    let finding = Box::new(Finding { place: at(place), class: place.class.clone(), again });
    let work = (task.work)(found.item);
    let (value, after, rows) = (*value, task.after, work.rows());
    match found.kind {
        Kind::Train if work.island().is_some() => {
            let last = after + work.island().map_or(0, |island| island.steps.len() as u64);
            let (island, what) = (found.item, tensor.clone());
            TrainError::Island { after, last, island, rows, what, value, finding }
        }
        Kind::Train => TrainError::NonFinite {
            step: after + 1,
            microbatch: found.item,
            rows,
            tensor: tensor.clone(),
            value,
            finding,
        },
        Kind::Eval | Kind::Prompt => TrainError::Evaluation {
            step: after,
            rows,
            tensor: tensor.clone(),
            value,
            finding: Some(finding),
        },
    }
}

/// The error that ends a run whose devices differ.
pub(super) fn dispute(item: usize, results: Vec<(Place, String)>, task: &Task) -> TrainError {
    let rows = (task.work)(item).rows();
    let results = results.iter().map(|(place, digest)| format!("{} has {digest}", at(place)));
    let results = results.collect::<Vec<_>>().join(", ");
    TrainError::Dispute { step: task.after + 1, microbatch: item, rows, results }
}

/// Bytes and times of communication in a step.
#[derive(Debug, Default)]
pub(super) struct Accounts {
    bytes_in: u64,
    bytes_out: u64,
    /// When the parameters were first sent; cleared by the first request for work with them.
    sent: Option<Instant>,
    /// Transfer time of the parameters; `None` until measured, because waiting for workers to join is no transfer.
    transfer: Option<Duration>,
    /// Whether devices still computed with older parameters when these arrived.
    behind: bool,
    before: BTreeMap<Place, DeviceReport>,
    /// When the step began.
    began: Option<Instant>,
    /// The work of each seat of each line in the step.
    lines: BTreeMap<String, BTreeMap<usize, SeatPart>>,
}

impl Accounts {
    /// New parameters are about to be sent: later bytes belong to the next step.
    pub fn parameters(&mut self) {
        (self.bytes_out, self.transfer, self.sent) = (0, None, None);
        self.behind = false;
    }

    /// Parameters were queued for a member.
    pub fn sent(&mut self, bytes: u64) {
        self.bytes_out += bytes;
        if self.transfer.is_none() {
            self.sent.get_or_insert_with(Instant::now);
        }
    }

    pub fn received(&mut self, packed: &Packed) {
        let (Packed::Fixed(bytes) | Packed::Single(bytes)) = packed;
        self.bytes_in += bytes.len() as u64;
    }

    /// A device asks for work: the parameters have arrived. `behind`: whether devices still compute with older ones.
    pub fn asked(&mut self, behind: impl FnOnce() -> bool) {
        if let Some(sent) = self.sent.take() {
            (self.transfer, self.behind) = (Some(sent.elapsed()), behind());
        }
    }

    /// Starts a step; `devices` holds the work done before it.
    pub fn begin(&mut self, devices: Vec<DeviceReport>) {
        (self.bytes_in, self.began) = (0, Some(Instant::now()));
        self.lines.clear();
        self.before = devices.into_iter().map(|d| (d.place.clone(), d)).collect();
    }

    /// A seat of a line has computed its layers of a microbatch.
    pub fn passed(&mut self, Passes { line, seat: (place, worker, device), spans }: Passes) {
        let Some(began) = self.began else { return };
        let part = self.lines.entry(line).or_default().entry(place).or_default();
        (part.worker, part.device, part.microbatches) = (worker, device, part.microbatches + 1);
        for (from, to) in spans {
            part.busy += to.saturating_duration_since(from.max(began)).as_secs_f64();
            let milli = |at: Instant| at.saturating_duration_since(began).as_millis() as f64 / 1e3;
            part.spans.push((milli(from), milli(to)));
        }
    }

    /// The costs of the step.
    pub fn finish(&mut self, tally: Tally, devices: Vec<DeviceReport>) -> Shared {
        let mut spans: BTreeMap<(&str, &str), Vec<(f64, f64)>> = BTreeMap::new();
        for (place, span) in &tally.spans {
            let milli = |at: Duration| at.as_millis() as f64 / 1e3;
            let of = spans.entry((&place.member, &place.device)).or_default();
            of.push((milli(span.from), milli(span.to)));
        }
        let part = |now: DeviceReport| {
            let spans = spans.get(&(&*now.place.member, &*now.place.device)).cloned().unwrap_or_default();
            let (before, here) = (self.before.get(&now.place), now.id.is_some());
            let part = Part {
                worker: now.place.member,
                device: now.place.device,
                microbatches: now.microbatches.saturating_sub(before.map_or(0, |b| b.microbatches)),
                tokens: now.tokens.saturating_sub(before.map_or(0, |b| b.tokens)),
                busy: now.busy.saturating_sub(before.map_or(Duration::ZERO, |b| b.busy)).as_secs_f64(),
                spans,
            };
            (here || part.microbatches > 0).then_some(part)
        };
        let devices = devices.into_iter().filter_map(part).collect();
        let lines = std::mem::take(&mut self.lines).into_iter().map(|(worker, seats)| {
            let mut seats: Vec<SeatPart> = seats.into_values().collect();
            seats.iter_mut().for_each(|seat| seat.spans.sort_by(|a, b| a.0.total_cmp(&b.0)));
            LinePart { worker, seats }
        });
        let lines = lines.collect();
        let transfer = self.transfer.unwrap_or_default();
        let sync = tally.hidden + tally.exposed + transfer;
        // The transfer is hidden if devices computed meanwhile.
        let [waited, behind] =
            if self.behind { [Duration::ZERO, transfer] } else { [transfer, Duration::ZERO] };
        Shared {
            classes: tally.classes,
            devices,
            lines,
            repeats: tally.repeats,
            cancels: tally.cancels,
            wasted_tokens: tally.wasted_tokens,
            sync_seconds: sync.as_secs_f64(),
            hidden_seconds: (tally.hidden + behind).as_secs_f64(),
            parameter_seconds: waited.as_secs_f64(),
            bytes_in: self.bytes_in,
            bytes_out: self.bytes_out,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn too_few_microbatches_give_advice() {
        let hint = Hint { batch_size: 8, micro_batch_tokens: 2048, islands: false };
        let want = "each step has 2 microbatches for 3 devices, so 1 waits; try --batch-size 40 or --micro-batch-tokens 256";
        assert_eq!(few(2, 3, hint), want);
        let want = "each step has 4 microbatches for 2 devices, so some wait at its end; try --batch-size 16 \
                    or --micro-batch-tokens 1024";
        assert_eq!(few(4, 2, hint), want);
        assert!(few(1, 4, hint).contains("1 microbatch for 4 devices, so 3 wait"));
        let want = "2 islands for 3 devices, so 1 waits; an island is computed by one device";
        assert_eq!(few(2, 3, Hint { islands: true, ..hint }), want);
    }
}

//! What the driver says to a line and hears from it, in terms of its seats: leases go to every seat, each gets its range
//! of the parameters, and a result is one once every seat has its part.

use super::cells::{Cell, Cells, Wrong};
use crate::cluster::message::{Changed, Hash, LeaseId, ToCoordinator, ToWorker, Trouble};
use crate::model::stage::Traffic;
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// Parameters whose hashes are known: those of the current step, and of results that come late.
const KNOWN: usize = 4;
/// Most sums of which some parts have come.
const MOST_SUMS: usize = 4;

/// What follows from a message of a seat.
#[derive(Debug, Default, PartialEq)]
pub(in crate::cluster) struct Heard {
    /// Messages to the driver.
    pub driver: Vec<ToCoordinator>,
    /// Messages to seats.
    pub seats: Vec<(usize, ToWorker)>,
}

/// Why a line falls because of a seat.
#[derive(Debug, PartialEq)]
pub(in crate::cluster) enum Fall {
    /// The seat's device failed, or it leaves: its worker may connect again.
    Lost(String),
    /// The seat broke the protocol, or computes with other parameters.
    Broke(String),
}

/// A lease that is not answered.
struct Open {
    /// Steps behind its parameters.
    after: u64,
    /// What each seat has announced: time and memory.
    announced: Vec<Option<(u64, u64)>>,
    /// What the last seat has beside a gradient.
    result: Option<ToCoordinator>,
    /// Whether it ended without a result.
    ended: bool,
    /// The seats that have said when they computed it.
    timed: BTreeSet<usize>,
}

/// A sum of which some parts have come.
struct Sum {
    cells: Cells,
    /// The end of each seat's part.
    ends: Vec<Option<ToCoordinator>>,
}

/// Some of the parameters of a seat.
struct Part {
    seat: usize,
    /// Of the first one among those of the seat.
    offset: u64,
    /// Little-endian f32.
    values: Bytes,
    /// Where they are in the piece that holds them.
    range: Range<usize>,
}

/// The hashes of the parameters after a step.
struct Known {
    step: u64,
    /// Of each seat's part.
    parts: Vec<Hash>,
    whole: Hash,
}

/// The state between a driver and the seats of a line.
pub(in crate::cluster) struct Translation {
    values: Vec<Range<usize>>,
    hashers: Vec<blake3::Hasher>,
    /// Parameters, newest first.
    known: VecDeque<Known>,
    open: BTreeMap<LeaseId, Open>,
    /// The newest `Ask` of each seat since the driver was asked: room and leases at the same time.
    asks: Vec<Option<(u16, u16)>>,
    /// Leases that were granted since the last request for a sum.
    granted: usize,
    sums: BTreeMap<u64, Sum>,
}

impl Translation {
    /// For seats that train these values.
    pub fn new(values: &[Range<usize>]) -> Self {
        let seats = values.len();
        Translation {
            values: values.to_vec(),
            hashers: vec![blake3::Hasher::new(); seats],
            known: VecDeque::new(),
            open: BTreeMap::new(),
            asks: vec![None; seats],
            granted: 0,
            sums: BTreeMap::new(),
        }
    }

    fn seats(&self) -> usize {
        self.values.len()
    }

    fn to_all(&self, message: &ToWorker) -> Vec<(usize, ToWorker)> {
        (0..self.seats()).map(|seat| (seat, message.clone())).collect()
    }

    /// The messages to seats for one of the driver.
    pub fn down(&mut self, message: ToWorker) -> Vec<(usize, ToWorker)> {
        match &message {
            ToWorker::ParametersPiece { step, offset, bytes } => self.piece(*step, *offset, bytes),
            ToWorker::ParametersChange { step, offset, len, values, changed } => {
                self.changes((*step, *offset, *len), values, changed)
            }
            ToWorker::Parameters { step, hash } => self.parameters(*step, *hash),
            ToWorker::Lease(lease) => {
                let announced = vec![None; self.seats()];
                let (result, ended, timed) = (None, false, BTreeSet::new());
                let open = Open { after: lease.after, announced, result, ended, timed };
                self.open.insert(lease.lease, open);
                self.to_all(&message)
            }
            ToWorker::Grant { lease } => {
                self.open.remove(lease);
                self.granted += 1;
                self.to_all(&message)
            }
            ToWorker::Deny { lease } => {
                self.open.remove(lease);
                self.to_all(&message)
            }
            // Seats answer a request at once, so a second one would find nothing.
            ToWorker::Flush { .. } if std::mem::take(&mut self.granted) == 0 => vec![],
            ToWorker::Cancel { .. } | ToWorker::Flush { .. } | ToWorker::SumTaken { .. } => {
                self.to_all(&message)
            }
            ToWorker::Welcome(_)
            | ToWorker::Piece { .. }
            | ToWorker::Ping { .. }
            | ToWorker::Bye(_)
            | ToWorker::Below { .. }
            | ToWorker::Sit(_)
            // --verify, relays and lines exclude each other.
            | ToWorker::Deliver { .. }
            | ToWorker::Listen
            | ToWorker::Relay(_)
            | ToWorker::Combine { .. }
            | ToWorker::Spread { .. } => vec![],
        }
    }

    /// The parts of a piece of the parameters, for the seats whose ranges it touches.
    fn piece(&mut self, step: u64, offset: u64, bytes: &Bytes) -> Vec<(usize, ToWorker)> {
        let message = |part: Part| {
            (part.seat, ToWorker::ParametersPiece { step, offset: part.offset, bytes: part.values })
        };
        self.parts(offset, bytes).into_iter().map(message).collect()
    }

    /// The same of changes of the parameters, whose new values are `values`.
    fn changes(
        &mut self,
        (step, offset, len): (u64, u64, u32),
        values: &Bytes,
        changed: &Changed,
    ) -> Vec<(usize, ToWorker)> {
        let message = |Part { seat, offset, values, range }: Part| {
            let part = changed.part(len as usize, range.clone()).map(|changed| {
                let len = range.len() as u32;
                ToWorker::ParametersChange { step, offset, len, values: values.clone(), changed }
            });
            // The coordinator's own packing is whole.
            (seat, part.unwrap_or(ToWorker::ParametersPiece { step, offset, bytes: values }))
        };
        self.parts(offset, values).into_iter().map(message).collect()
    }

    /// The parts of the values from `offset` on, for the seats whose ranges they touch. They enter the seats' hashes.
    fn parts(&mut self, offset: u64, bytes: &Bytes) -> Vec<Part> {
        if offset == 0 {
            self.hashers.fill(blake3::Hasher::new());
        }
        let from = usize::try_from(offset).unwrap_or(usize::MAX);
        let to = from.saturating_add(bytes.len() / 4);
        let mut out = Vec::new();
        for (seat, own) in self.values.iter().enumerate() {
            let (start, end) = (own.start.max(from), own.end.min(to));
            if start < end {
                let range = start - from..end - from;
                let values = bytes.slice(4 * range.start..4 * range.end);
                self.hashers[seat].update(&values);
                out.push(Part { seat, offset: (start - own.start) as u64, values, range });
            }
        }
        out
    }

    fn parameters(&mut self, step: u64, hash: Hash) -> Vec<(usize, ToWorker)> {
        let parts: Vec<Hash> = self.hashers.iter().map(|hasher| *hasher.finalize().as_bytes()).collect();
        self.known.push_front(Known { step, parts: parts.clone(), whole: hash });
        self.known.truncate(KNOWN);
        self.asks.fill(None);
        self.sums.clear();
        self.granted = 0;
        // A late result of an older step is not waited for.
        self.open.retain(|_, open| open.after + KNOWN as u64 > step);
        let message = |(seat, hash)| (seat, ToWorker::Parameters { step, hash });
        parts.into_iter().enumerate().map(message).collect()
    }

    /// The hash of all parameters after `after` steps, if `part` is that of the seat's part of them.
    fn whole(&self, seat: usize, after: u64, part: Hash) -> Result<Hash, Fall> {
        let known = self.known.iter().find(|known| known.step == after && known.parts[seat] == part);
        known.map(|known| known.whole).ok_or_else(|| Fall::Broke("it computed with other parameters".into()))
    }

    /// What follows from a message of a seat. The error is why the line falls.
    pub fn up(&mut self, seat: usize, message: ToCoordinator) -> Result<Heard, Fall> {
        let last = self.seats() - 1;
        match message {
            ToCoordinator::Ask { room, together, .. } => Ok(self.asked(seat, (room, together))),
            ToCoordinator::Announce { lease, parameters, micros, memory } => {
                self.announced(seat, lease, (parameters, micros, memory), None)
            }
            ToCoordinator::SumPiece { sum, offset, len, packed } => {
                let cells =
                    self.begun(sum)?.cells.add(seat, (offset, len), packed).map_err(|wrong| match wrong {
                        Wrong::Piece(reason) => Fall::Broke(reason),
                        Wrong::Parts(reason) => Fall::Lost(reason),
                    })?;
                let piece =
                    |Cell { offset, len, packed }| ToCoordinator::SumPiece { sum, offset, len, packed };
                Ok(Heard { driver: cells.into_iter().map(piece).collect(), seats: vec![] })
            }
            ToCoordinator::Sum { sum, .. } => self.summed(seat, sum, message),
            ToCoordinator::Score { lease, parameters, micros, .. } if seat == last => {
                self.announced(seat, lease, (parameters, micros, 0), Some(message))
            }
            ToCoordinator::Answer { lease, parameters, .. } if seat == last => {
                self.announced(seat, lease, (parameters, 0, 0), Some(message))
            }
            ToCoordinator::Stopped { lease, .. } => Ok(self.ended(lease, message)),
            ToCoordinator::Fault { lease, fault: Trouble::Value { .. } } => Ok(self.ended(lease, message)),
            ToCoordinator::Fault { fault: Trouble::Device { reason }, .. } => Err(Fall::Lost(reason)),
            ToCoordinator::Fallback { reason, .. } => Err(Fall::Lost(reason)),
            ToCoordinator::Leave { reason } => Err(Fall::Lost(format!("left: {reason}"))),
            ToCoordinator::Pong { .. } => Ok(Heard::default()),
            _ => Err(Fall::Broke("it sent a message that does not belong there".into())),
        }
    }

    /// Records that the seat said when it computed this lease. False if it had said so before, or if the lease is not open.
    pub fn times_once(&mut self, seat: usize, lease: LeaseId) -> bool {
        self.open.get_mut(&lease).is_some_and(|open| open.timed.insert(seat))
    }

    /// The line takes leases once all of its seats do.
    fn asked(&mut self, seat: usize, ask: (u16, u16)) -> Heard {
        self.asks[seat] = Some(ask);
        let (true, Some((room, together))) = (self.asks.iter().all(Option::is_some), self.asks[0]) else {
            return Heard::default();
        };
        self.asks.fill(None);
        Heard { driver: vec![ToCoordinator::Ask { device: 0, room, together }], seats: vec![] }
    }

    fn announced(
        &mut self,
        seat: usize,
        lease: LeaseId,
        (part, micros, memory): (Hash, u64, u64),
        result: Option<ToCoordinator>,
    ) -> Result<Heard, Fall> {
        let Some(Open { after, ended, .. }) = self.open.get(&lease) else { return Ok(Heard::default()) };
        if *ended {
            return Ok(Heard { driver: vec![], seats: vec![(seat, ToWorker::Deny { lease })] });
        }
        let parameters = self.whole(seat, *after, part)?;
        let Some(open) = self.open.get_mut(&lease) else { return Ok(Heard::default()) };
        open.announced[seat] = Some((micros, memory));
        open.result = result.or(open.result.take());
        // The first seat is the last to finish: the time between its results is that of the line.
        let all = open.announced.iter().all(Option::is_some);
        let Some((micros, memory)) = open.announced[0].filter(|_| all) else {
            return Ok(Heard::default());
        };
        let whole = match open.result.take() {
            Some(ToCoordinator::Score { sums, micros, .. }) => {
                ToCoordinator::Score { lease, sums, parameters, micros }
            }
            Some(ToCoordinator::Answer { ids, .. }) => ToCoordinator::Answer { lease, ids, parameters },
            _ => ToCoordinator::Announce { lease, parameters, micros, memory },
        };
        if !matches!(whole, ToCoordinator::Announce { .. }) {
            self.open.remove(&lease);
        }
        Ok(Heard { driver: vec![whole], seats: vec![] })
    }

    /// A lease ended in one seat without a result: it ends in all.
    fn ended(&mut self, lease: LeaseId, message: ToCoordinator) -> Heard {
        let Some(open) = self.open.get_mut(&lease).filter(|open| !open.ended) else {
            return Heard::default();
        };
        open.ended = true;
        let end = |(seat, announced): (usize, &Option<_>)| match announced {
            Some(_) => (seat, ToWorker::Deny { lease }),
            None => (seat, ToWorker::Cancel { lease }),
        };
        let seats = open.announced.iter().enumerate().map(end).collect();
        Heard { driver: vec![message], seats }
    }

    /// The parts of a sum.
    fn begun(&mut self, sum: u64) -> Result<&mut Sum, Fall> {
        if !self.sums.contains_key(&sum) && self.sums.len() >= MOST_SUMS {
            let reason = format!("it began sum {sum} before {MOST_SUMS} others were complete");
            return Err(Fall::Lost(reason));
        }
        let values = &self.values;
        let fresh = || Sum { cells: Cells::new(values), ends: vec![None; values.len()] };
        Ok(self.sums.entry(sum).or_insert_with(fresh))
    }

    /// The end of a seat's part of a sum.
    fn summed(&mut self, seat: usize, sum: u64, message: ToCoordinator) -> Result<Heard, Fall> {
        if let ToCoordinator::Sum { step, parameters, .. } = &message {
            self.whole(seat, step.saturating_sub(1), *parameters)?;
        }
        let last = self.seats() - 1;
        let broke = |reason: &str| Err(Fall::Broke(format!("sum {sum} {reason}")));
        // A seat whose values touch no cell sends no pieces, and may be the first to end.
        let parts = self.begun(sum)?;
        if !parts.cells.complete(seat) || parts.ends[seat].is_some() {
            return broke("ends twice, or before its last piece");
        }
        parts.ends[seat] = Some(message);
        if !parts.ends.iter().all(Option::is_some) {
            return Ok(Heard::default());
        }
        let ends: Vec<ToCoordinator> =
            self.sums.remove(&sum).into_iter().flat_map(|parts| parts.ends).flatten().collect();
        let leases = |end: &ToCoordinator| match end {
            ToCoordinator::Sum { leases, step, .. } => (*step, leases.clone()),
            _ => (0, vec![]),
        };
        if ends.iter().any(|end| leases(end) != leases(&ends[0])) {
            return Err(Fall::Lost(format!("the parts of sum {sum} are of different microbatches")));
        }
        let mut all = Traffic::default();
        for end in &ends {
            if let ToCoordinator::Sum { traffic, .. } = end {
                all.add(traffic);
            }
        }
        let end = ends.into_iter().nth(last).map(|mut end| {
            if let ToCoordinator::Sum { parameters, traffic, .. } = &mut end {
                let known = self.known.iter().find(|known| known.parts[last] == *parameters);
                (*parameters, *traffic) = (known.map_or(*parameters, |known| known.whole), all);
            }
            end
        });
        Ok(Heard { driver: end.into_iter().collect(), seats: vec![] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cluster::message::{Lease, Packed, Work};
    use crate::cluster::sum_chunk::little_endian;
    use crate::model::stage::{LossSums, Microbatch, Targets};
    use crate::numeric::{difference, pack};
    use crate::train::sum::RewardSums;

    fn lease(lease: LeaseId, work: fn(Microbatch) -> Work) -> ToWorker {
        let targets = Targets::Tokens(vec![1; 4]);
        let batch = Microbatch { step: 8, rows: vec![0], ids: vec![1; 4], bounds: vec![0, 4], targets };
        ToWorker::Lease(Box::new(Lease { lease, device: 0, after: 7, of: 2, work: work(batch) }))
    }

    /// Two seats of 3 and 2 values that hold the parameters after step 7: the translation, their hashes, and that of all.
    fn standing() -> (Translation, [Hash; 2], Hash) {
        standing_of(3)
    }

    /// The same with this number of values in the first seat.
    fn standing_of(first: usize) -> (Translation, [Hash; 2], Hash) {
        let mut line = Translation::new(&[0..first, first..5]);
        let values = little_endian(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        // Pieces that end within a seat.
        let pieces = [(0, values.slice(..8)), (2, values.slice(8..))];
        let mut parts = [Vec::new(), Vec::new()];
        for (offset, bytes) in pieces {
            for (seat, message) in line.down(ToWorker::ParametersPiece { step: 7, offset, bytes }) {
                let ToWorker::ParametersPiece { step: 7, offset, bytes } = message else {
                    panic!("{message:?}")
                };
                assert_eq!(offset as usize, parts[seat].len() / 4);
                parts[seat].extend_from_slice(&bytes);
            }
        }
        assert_eq!([&parts[0][..], &parts[1][..]], [&values[..4 * first], &values[4 * first..]]);
        let hash = *blake3::hash(&values).as_bytes();
        let hashes = [0, 1].map(|seat| *blake3::hash(&parts[seat]).as_bytes());
        let want = [0, 1].map(|seat| (seat, ToWorker::Parameters { step: 7, hash: hashes[seat] }));
        assert_eq!(line.down(ToWorker::Parameters { step: 7, hash }), want);
        (line, hashes, hash)
    }

    #[test]
    fn each_seat_gets_the_changes_of_its_parameters() {
        let (mut line, ..) = standing();
        let changes = [1 << 40, -(3 << 40), 0, 5 << 40, 7 << 40];
        let values = little_endian(&[1.5, 2.5, 3.5, 4.5, 5.5]);
        let before = little_endian(&[1.0, 2.0, 3.0, 4.0, 5.0]);
        let added = |range: Range<usize>| {
            let mut bytes = Vec::new();
            pack::pack(&changes[range], &mut bytes);
            Changed::Added(bytes.into())
        };
        let bits = |range: Range<usize>| {
            let (mut bytes, range) = (Vec::new(), 4 * range.start..4 * range.end);
            difference::pack(&values[range.clone()], &before[range], &mut bytes);
            Changed::Bits(bytes.into())
        };
        for packed in [&added as &dyn Fn(Range<usize>) -> Changed, &bits] {
            let change = |offset, range: Range<usize>| {
                let (len, values) = (range.len() as u32, values.slice(4 * range.start..4 * range.end));
                ToWorker::ParametersChange { step: 8, offset, len, values, changed: packed(range) }
            };
            assert_eq!(line.down(change(0, 0..2)), [(0, change(0, 0..2))]);
            assert_eq!(line.down(change(2, 2..5)), [(0, change(2, 2..3)), (1, change(0, 3..5))]);
            let hash = *blake3::hash(&values).as_bytes();
            let hashes = [0..3, 3..5].map(|r| *blake3::hash(&values[4 * r.start..4 * r.end]).as_bytes());
            let want = [0, 1].map(|seat| (seat, ToWorker::Parameters { step: 8, hash: hashes[seat] }));
            assert_eq!(line.down(ToWorker::Parameters { step: 8, hash }), want);
        }
    }

    fn announce(lease: LeaseId, parameters: Hash, micros: u64) -> ToCoordinator {
        ToCoordinator::Announce { lease, parameters, micros, memory: 0 }
    }

    #[test]
    fn a_result_counts_once_every_seat_has_its_part() {
        let (mut line, hashes, hash) = standing();
        let ask = || ToCoordinator::Ask { device: 0, room: 8, together: 3 };
        assert_eq!(line.up(1, ask()), Ok(Heard::default()));
        assert_eq!(line.up(0, ask()).unwrap().driver, [ask()]);
        assert_eq!(line.down(lease(1, Work::Train)).len(), 2);
        assert_eq!(line.up(1, announce(1, hashes[1], 5)), Ok(Heard::default()));
        let both = line.up(0, announce(1, hashes[0], 9)).unwrap();
        assert_eq!(
            both.driver,
            [announce(1, hash, 9)],
            "with the hash of all and the time of the first seat"
        );
        line.down(ToWorker::Grant { lease: 1 });
        assert_eq!(line.up(0, announce(1, hashes[0], 9)), Ok(Heard::default()), "a repetition");
        assert_eq!(line.down(ToWorker::Flush { step: 8, relays: None }).len(), 2);
        assert_eq!(line.down(ToWorker::Flush { step: 8, relays: None }), [], "nothing was granted since");
        // A seat with parameters of its own.
        line.down(lease(2, Work::Train));
        assert!(matches!(line.up(1, announce(2, [9; 32], 5)), Err(Fall::Broke(_))));
    }

    #[test]
    fn a_lease_that_ends_in_one_seat_ends_in_all() {
        let (mut line, hashes, _) = standing();
        line.down(lease(1, Work::Train));
        line.up(1, announce(1, hashes[1], 5)).unwrap();
        let stopped = || ToCoordinator::Stopped { lease: 1, micros: 0 };
        let heard = line.up(0, stopped()).unwrap();
        assert_eq!(heard.driver, [stopped()]);
        assert_eq!(heard.seats, [(0, ToWorker::Cancel { lease: 1 }), (1, ToWorker::Deny { lease: 1 })]);
        assert_eq!(line.up(1, stopped()), Ok(Heard::default()), "once");
        let late = line.up(0, announce(1, hashes[0], 5)).unwrap();
        assert_eq!((late.driver, late.seats), (vec![], vec![(0, ToWorker::Deny { lease: 1 })]));
    }

    #[test]
    fn scores_come_from_the_last_seat_with_the_parameters_of_all() {
        let (mut line, hashes, hash) = standing();
        let sums = LossSums { loss: 1.0, weight: 1.0, targets: 1, ..LossSums::default() };
        let score =
            |lease, parameters| ToCoordinator::Score { lease, sums: sums.clone(), parameters, micros: 3 };
        let answer = |parameters| ToCoordinator::Answer { lease: 2, ids: vec![5], parameters };
        line.down(lease(1, Work::Eval));
        assert!(line.up(0, score(1, hashes[0])).is_err());
        assert_eq!(line.up(1, score(1, hashes[1])), Ok(Heard::default()));
        assert_eq!(line.up(0, announce(1, hashes[0], 5)).unwrap().driver, [score(1, hash)]);
        line.down(lease(2, Work::Eval));
        assert_eq!(line.up(0, announce(2, hashes[0], 5)), Ok(Heard::default()));
        assert_eq!(line.up(1, answer(hashes[1])).unwrap().driver, [answer(hash)]);
        line.down(lease(3, Work::Eval));
        line.up(1, score(3, hashes[1])).unwrap();
        assert!(matches!(line.up(0, announce(3, [9; 32], 5)), Err(Fall::Broke(_))), "damaged parameters");
    }

    fn part(offset: u64, len: u32) -> ToCoordinator {
        let packed = Packed::Single(little_endian(&vec![1.0; len as usize]));
        ToCoordinator::SumPiece { sum: 1, offset, len, packed }
    }

    fn end(leases: &[LeaseId], targets: u64, parameters: Hash) -> ToCoordinator {
        let (leases, traffic) = (leases.to_vec(), Traffic { submissions: 1, ..Traffic::default() });
        let (loss, weight) = (i128::from(targets), i128::from(targets));
        let rewards = RewardSums::default();
        ToCoordinator::Sum {
            sum: 1,
            step: 8,
            leases,
            loss,
            weight,
            targets,
            rewards,
            parameters,
            traffic,
            relays: None,
        }
    }

    #[test]
    fn parts_of_a_sum_must_hold_the_same_microbatches() {
        let (mut line, hashes, hash) = standing();
        assert!(line.up(0, end(&[1], 0, hashes[0])).is_err(), "before its pieces");
        assert!(line.up(1, part(0, 5)).unwrap().driver.is_empty());
        assert!(line.up(1, end(&[1], 4, hashes[1])).unwrap().driver.is_empty());
        assert_eq!(line.up(0, part(0, 3)).unwrap().driver, [part(0, 5)]);
        let whole = line.up(0, end(&[1], 0, hashes[0])).unwrap().driver;
        let ToCoordinator::Sum { targets: 4, parameters, traffic, .. } = &whole[0] else {
            panic!("{whole:?}")
        };
        assert_eq!((*parameters, traffic.submissions), (hash, 2), "loss of the last seat, traffic of all");
        let (mut line, hashes, _) = standing();
        line.up(1, part(0, 5)).unwrap();
        line.up(1, end(&[1, 2], 4, hashes[1])).unwrap();
        line.up(0, part(0, 3)).unwrap();
        assert!(line.up(0, end(&[1], 0, hashes[0])).is_err());
    }

    /// A lower seat that trains nothing sends no pieces, and an upper one zeros in the place of the other's values. Its
    /// end may come first.
    #[test]
    fn a_seat_without_values_has_a_part_of_a_sum() {
        for (first, without) in [(0, 0), (5, 1)] {
            for ends_first in [true, false] {
                let (mut line, hashes, hash) = standing_of(first);
                let with = 1 - without;
                let order = if ends_first { [without, with] } else { [with, without] };
                let mut heard = Vec::new();
                for seat in order {
                    if (first, seat) != (0, 0) {
                        heard.extend(line.up(seat, part(0, 5)).unwrap().driver);
                    }
                    heard.extend(line.up(seat, end(&[1], 2, hashes[seat])).unwrap().driver);
                }
                let [piece, ToCoordinator::Sum { parameters, .. }] = &heard[..] else { panic!("{heard:?}") };
                assert!(*piece == part(0, 5) && *parameters == hash);
            }
        }
    }

    #[test]
    fn a_seat_that_fails_ends_the_line() {
        let (mut line, ..) = standing();
        let reason = || "why".to_string();
        let fault = ToCoordinator::Fault { lease: 1, fault: Trouble::Device { reason: reason() } };
        for message in [fault, ToCoordinator::Leave { reason: reason() }] {
            assert!(matches!(line.up(0, message), Err(Fall::Lost(_))));
        }
        assert!(matches!(line.up(0, ToCoordinator::Linked), Err(Fall::Broke(_))));
    }
}

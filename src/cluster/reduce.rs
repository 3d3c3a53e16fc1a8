//! The total of a step on the coordinator, added on separate threads while pieces still arrive.
//!
//! A piece is added to its cell of the total at once and kept until its sum is taken. The pieces of a member that is
//! lost half-way, or whose sum is refused at its end, are subtracted again exactly. Additions and subtractions wrap
//! and commute, so neither their order nor a total that is temporarily out of range changes a bit of the result. A
//! failed addition has no effect, and its subtraction fails in the same way.
//!
//! The limit of a complete sum is its number of microbatches times the cap of one; then the total of all of them
//! fits: see `numeric::fixed`. The ledger decides which member was granted which microbatch.

mod types;

pub use types::{Claim, Refusal, Report};

use super::digest;
use super::message::{Hash, Packed};
use super::sum_chunk::{self, SumChunkError};
use crate::numeric::fixed::{self, CELL};
use crate::train::sum::{Scalars, Sums};
use std::collections::BTreeMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};

/// Most sums of one member that were not taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    /// One that waits to be taken, and the next.
    Two,
    /// All of a round, where sums of one microbatch are taken at its end.
    Round,
}

/// Most additions that may wait for a thread; a caller with more waits.
const MOST_JOBS: usize = 512;

/// The sender of a sum.
pub type Member = u64;

/// Adds the sums of members.
pub struct Reducer {
    shared: Arc<Shared>,
    pool: rayon::ThreadPool,
    holds: Holds,
}

struct Shared {
    len: usize,
    cells: Vec<Mutex<Cell>>,
    state: Mutex<State>,
    done: Condvar,
    report: Box<dyn Fn(Report) + Send + Sync>,
}

/// Values of one round; values of an older round count as zero.
struct Cell {
    round: u64,
    values: Vec<i64>,
}

#[derive(Default)]
struct State {
    round: u64,
    microbatches: usize,
    sums: BTreeMap<(Member, u64), Arriving>,
    taken: Scalars,
    /// Number of unfinished additions and subtractions.
    jobs: usize,
    /// Queued additions and subtractions, by cell. One thread at a time works on a cell and does all of its queued
    /// jobs: no thread waits for a cell, and the cell stays in that thread's cache.
    queues: BTreeMap<usize, Vec<ChunkJob>>,
    serial: u64,
}

/// A sum that has not been taken.
struct Arriving {
    /// Distinguishes a repeated sum from its first attempt.
    serial: u64,
    pieces: Vec<Packed>,
    /// Number of pieces that are not added yet.
    waiting: usize,
    refusal: Option<Refusal>,
    claim: Option<Claim>,
}

#[derive(Clone, Copy, PartialEq)]
enum Sign {
    Plus,
    Minus,
}

impl Arriving {
    fn new(serial: u64) -> Self {
        Arriving { serial, pieces: Vec::new(), waiting: 0, refusal: None, claim: None }
    }
}

fn of_member(state: &State, member: Member) -> Vec<(Member, u64)> {
    state.sums.range((member, 0)..=(member, u64::MAX)).map(|(key, _)| *key).collect()
}

/// One piece to be added or subtracted.
struct ChunkJob {
    sign: Sign,
    sum: (Member, u64),
    serial: u64,
    index: usize,
    packed: Packed,
    round: u64,
    cap: i64,
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Reducer {
    /// A total of `len` values, added on `threads` threads. They call `report`, which must not block.
    pub fn new(
        len: usize,
        (threads, holds): (usize, Holds),
        report: impl Fn(Report) + Send + Sync + 'static,
    ) -> std::io::Result<Self> {
        let named = |i| format!("reduce {i}");
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads.max(1)).thread_name(named).build();
        let cell = |at| Mutex::new(Cell { round: 0, values: vec![0; CELL.min(len - at)] });
        let shared = Shared {
            len,
            cells: (0..len).step_by(CELL).map(cell).collect(),
            state: Mutex::default(),
            done: Condvar::new(),
            report: Box::new(report),
        };
        Ok(Reducer { shared: Arc::new(shared), pool: pool.map_err(std::io::Error::other)?, holds })
    }

    /// Starts a step of this many microbatches with an empty total.
    pub fn begin(&self, microbatches: usize) {
        let mut state = self.shared.fewer(lock(&self.shared.state), 1);
        let (round, serial) = (state.round + 1, state.serial);
        *state = State { round, serial, microbatches, ..State::default() };
    }

    /// Takes the next piece of a sum and queues its addition. A sum's first piece starts the sum over, unless the
    /// sum is complete: then it is a repeated transmission with the same values.
    pub fn piece(
        &self,
        member: Member,
        sum: u64,
        (offset, len): (u64, u32),
        packed: Packed,
    ) -> Result<(), Refusal> {
        let key = (member, sum);
        let mut state = self.shared.fewer(lock(&self.shared.state), MOST_JOBS);
        if state.sums.get(&key).is_some_and(|s| s.claim.is_some()) {
            return Ok(());
        }
        if offset == 0 {
            self.undo(&mut state, key);
            state.serial += 1;
            let serial = state.serial;
            state.sums.insert(key, Arriving::new(serial));
            let most = match self.holds {
                Holds::Two => 2,
                Holds::Round => state.microbatches + 1,
            };
            if of_member(&state, member).len() > most {
                return Err(Refusal::Many { most });
            }
        }
        let index = state.sums.get(&key).map_or(0, |s| s.pieces.len());
        let (want, want_len) = ((index * CELL) as u64, sum_chunk::cell_len(self.shared.len, index));
        if offset != want || len as usize != want_len || want_len == 0 {
            return Err(SumChunkError::Place { offset, len, want, want_len }.into());
        }
        let (round, cap) = (state.round, fixed::cap(state.microbatches));
        let Some(arriving) = state.sums.get_mut(&key) else { return Ok(()) };
        arriving.pieces.push(packed.clone());
        arriving.waiting += 1;
        let serial = arriving.serial;
        self.spawn(&mut state, ChunkJob { sign: Sign::Plus, sum: key, serial, index, packed, round, cap });
        Ok(())
    }

    /// Completes a sum. A [`Report`] follows, unless this sum had one already or is taken back.
    pub fn finish(&self, member: Member, claim: Claim) {
        let key = (member, claim.sum);
        let mut state = lock(&self.shared.state);
        state.serial += 1;
        let serial = state.serial;
        let arriving = state.sums.entry(key).or_insert_with(|| Arriving::new(serial));
        if arriving.claim.is_some() {
            return;
        }
        arriving.claim = Some(claim);
        let report = self.shared.conclude(&mut state, key);
        drop(state);
        self.shared.say(report);
    }

    /// Tells the hash of a complete sum of one microbatch, from a thread of the pool; `None` if there is no such sum.
    pub fn digest(&self, member: Member, sum: u64, tell: impl FnOnce(Option<Hash>) + Send + 'static) {
        let state = lock(&self.shared.state);
        let (cap, len) = (fixed::cap(state.microbatches), self.shared.len);
        let complete =
            state.sums.get(&(member, sum)).and_then(|s| Some((s.pieces.clone(), s.claim?.scalars)));
        drop(state);
        self.pool.spawn_fifo(move || {
            tell(complete.and_then(|(pieces, scalars)| digest::of_pieces(&pieces, len, cap, &scalars).ok()));
        });
    }

    /// Takes a complete sum: adds its scalars and drops its pieces. Returns false, without effect, if there is no
    /// such sum because it was taken back.
    pub fn take(&self, member: Member, sum: u64) -> bool {
        let mut state = lock(&self.shared.state);
        let done = |s: &Arriving| s.waiting == 0 && s.refusal.is_none();
        let Some(claim) = state.sums.get(&(member, sum)).filter(|s| done(s)).and_then(|s| s.claim) else {
            return false;
        };
        state.sums.remove(&(member, sum));
        let taken = &mut state.taken;
        taken.loss = taken.loss.wrapping_add(claim.scalars.loss);
        taken.weight = taken.weight.wrapping_add(claim.scalars.weight);
        taken.targets = taken.targets.wrapping_add(claim.scalars.targets);
        taken.rewards.add(&claim.scalars.rewards);
        true
    }

    /// Subtracts all added pieces of a member's sums that were not taken.
    pub fn take_back(&self, member: Member) {
        let mut state = lock(&self.shared.state);
        of_member(&state, member).into_iter().for_each(|key| self.undo(&mut state, key));
    }

    /// Moves the total of all taken sums into `into`, after all queued jobs. Sums that were not taken are excluded.
    /// [`Self::begin`] must follow, because the values move out.
    pub fn total(&self, into: &mut Sums) {
        let mut state = lock(&self.shared.state);
        let keys: Vec<_> = state.sums.keys().copied().collect();
        keys.into_iter().for_each(|key| self.undo(&mut state, key));
        let mut state = self.shared.fewer(state, 1);
        into.reset_len(self.shared.len);
        for (cell, out) in self.shared.cells.iter().zip(into.cells_mut()) {
            let mut cell = lock(cell);
            if cell.round != state.round {
                cell.values.fill(0);
            }
            std::mem::swap(&mut cell.values, out);
            cell.round = 0;
        }
        into.set_scalars(std::mem::take(&mut state.taken));
    }

    /// Removes a sum and subtracts its pieces, queued ones included.
    fn undo(&self, state: &mut State, key: (Member, u64)) {
        let Some(Arriving { serial, pieces, .. }) = state.sums.remove(&key) else { return };
        let (round, cap) = (state.round, fixed::cap(state.microbatches));
        for (index, packed) in pieces.into_iter().enumerate() {
            self.spawn(state, ChunkJob { sign: Sign::Minus, sum: key, serial, index, packed, round, cap });
        }
    }

    fn spawn(&self, state: &mut State, job: ChunkJob) {
        state.jobs += 1;
        let index = job.index;
        let mut taken = true;
        state
            .queues
            .entry(index)
            .or_insert_with(|| {
                taken = false;
                Vec::new()
            })
            .push(job);
        if !taken {
            let shared = self.shared.clone();
            self.pool.spawn_fifo(move || shared.run(index));
        }
    }
}

impl Shared {
    /// Waits until fewer than `than` jobs are unfinished.
    fn fewer<'a>(&self, state: MutexGuard<'a, State>, than: usize) -> MutexGuard<'a, State> {
        let waited = self.done.wait_while(state, |state| state.jobs >= than);
        waited.unwrap_or_else(PoisonError::into_inner)
    }

    /// Does the jobs of a cell until none is left.
    fn run(&self, index: usize) {
        let mut state = lock(&self.state);
        loop {
            let jobs = match state.queues.get_mut(&index) {
                Some(jobs) if !jobs.is_empty() => std::mem::take(jobs),
                _ => break,
            };
            drop(state);
            let done: Vec<_> = jobs.iter().map(|job| (job, self.work(job))).collect();
            state = lock(&self.state);
            state.jobs -= done.len();
            let reports: Vec<_> =
                done.into_iter().filter_map(|(job, result)| self.count(&mut state, job, result)).collect();
            self.done.notify_all();
            // Under the lock, so that the sums of a member are reported in their order.
            reports.into_iter().for_each(&self.report);
        }
        state.queues.remove(&index);
    }

    /// Counts a finished addition. Returns the report of its sum if that was the last pending piece.
    fn count(&self, state: &mut State, job: &ChunkJob, result: Result<(), SumChunkError>) -> Option<Report> {
        let arriving =
            state.sums.get_mut(&job.sum).filter(|s| s.serial == job.serial && job.sign == Sign::Plus)?;
        arriving.waiting -= 1;
        if let Err(error) = result {
            arriving.refusal.get_or_insert(error.into());
        }
        self.conclude(state, job.sum)
    }

    fn work(&self, job: &ChunkJob) -> Result<(), SumChunkError> {
        let Some(cell) = self.cells.get(job.index) else { return Ok(()) };
        let mut cell = lock(cell);
        let fresh = std::mem::replace(&mut cell.round, job.round) != job.round;
        if fresh && job.sign == Sign::Minus {
            cell.values.fill(0);
        }
        match job.sign {
            // Values of an older round are overwritten instead of cleared first.
            Sign::Plus if fresh => sum_chunk::set(&job.packed, &mut cell.values, job.cap),
            Sign::Plus => sum_chunk::add(&job.packed, &mut cell.values, job.cap),
            Sign::Minus => sum_chunk::subtract(&job.packed, &mut cell.values, job.cap),
        }
    }

    /// The report of a sum whose pieces are added and whose end has arrived.
    fn conclude(&self, state: &mut State, key: (Member, u64)) -> Option<Report> {
        let cap = fixed::cap(state.microbatches);
        let arriving = state.sums.get_mut(&key).filter(|s| s.waiting == 0)?;
        let claim = arriving.claim?;
        if arriving.refusal.is_none() {
            arriving.refusal = self.judge(arriving, &claim, (state.microbatches, cap)).err();
        }
        let result = arriving.refusal.clone().map_or(Ok(()), Err);
        Some(Report { member: key.0, sum: key.1, result })
    }

    fn judge(&self, arriving: &Arriving, claim: &Claim, (most, cap): (usize, i64)) -> Result<(), Refusal> {
        let (sum, leases) = (claim.sum, claim.leases);
        let have = arriving.pieces.len();
        if have != self.cells.len() {
            return Err(Refusal::Incomplete { sum, have, want: self.cells.len() });
        }
        let single = arriving.pieces.iter().any(|p| matches!(p, Packed::Single(_)));
        if leases == 0 || leases > most || (single && leases != 1) {
            return Err(Refusal::Leases { sum, leases });
        }
        let within = |value: i128| value.unsigned_abs() <= leases as u128 * i64::MAX as u128;
        let Scalars { loss, weight, targets, rewards } = claim.scalars;
        let most = leases as u64 * u64::from(u32::MAX);
        let rows = [targets, rewards.counts[0], rewards.counts[1], rewards.pairs];
        let fits = [loss, weight, rewards.sums[0], rewards.sums[1]].into_iter().all(within);
        let ordered = rewards.range.is_none_or(|[least, most]| least <= most);
        if !fits || !ordered || rows.into_iter().any(|n| n > most) || rewards.right > rewards.pairs {
            return Err(Refusal::Scalars { sum, leases });
        }
        let limit = cap.saturating_mul(leases as i64);
        for (index, packed) in arriving.pieces.iter().enumerate() {
            sum_chunk::within(packed, sum_chunk::cell_len(self.len, index), limit)?;
        }
        Ok(())
    }

    fn say(&self, report: Option<Report>) {
        if let Some(report) = report {
            (self.report)(report);
        }
    }
}

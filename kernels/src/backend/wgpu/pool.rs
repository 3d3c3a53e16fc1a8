//! Buffers by size class, four classes per doubling. The oldest buffer of a class is handed out first, regardless of
//! the order of return, so that microbatches of the same shape get the same buffers for the same verbs: nothing is
//! allocated and every bind group is found again. On a miss, free buffers are dropped, the largest first, until at most
//! 1.5 times the peak use plus [`SPARE`] is held, and no more than the budget, if there is one. Frozen buffers have
//! their exact size; those of released matrices wait for the next matrix of the same size.

use super::faults::Faults;
use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, PoisonError};
use wgpu::BufferUsages;

/// Bytes that may always be free: classes peak at different moments, and without this margin buffers would be dropped
/// and allocated repeatedly.
const SPARE: u64 = 64 << 20;
/// The smallest class, in bytes.
const LEAST: u64 = 256;

/// One buffer of a device.
#[derive(Debug, Clone)]
pub struct Storage {
    /// wgpu's handle.
    pub buffer: wgpu::Buffer,
    /// A unique number; 0 is the placeholder of a failed allocation.
    pub id: u64,
    /// Its size.
    pub bytes: u64,
}

/// Free buffers, and counts of those in use.
#[derive(Debug)]
pub struct Pool {
    /// By size, then by number.
    free: BTreeMap<u64, BTreeMap<u64, Storage>>,
    free_bytes: u64,
    live_bytes: u64,
    peak_bytes: u64,
    /// The peak use since the last query.
    since_bytes: u64,
    /// Bytes of frozen buffers, vacant ones too.
    frozen_bytes: u64,
    /// Frozen buffers of released matrices, by size.
    vacant: BTreeMap<u64, VecDeque<Storage>>,
    /// Most bytes that may be held, used or free.
    budget: u64,
    /// Bytes of the largest buffer that the device makes.
    largest: u64,
    last_id: u64,
    /// Buffers made so far.
    pub made: u64,
    /// Ids of dropped buffers, for the cache of bind groups.
    pub dropped: Vec<u64>,
    returned: Returned,
    nothing: Storage,
}

type Returned = Arc<Mutex<Vec<Storage>>>;

/// A buffer that is returned to the pool on drop.
#[derive(Debug)]
pub struct Leased {
    /// The buffer.
    pub storage: Storage,
    /// Bytes that were requested.
    pub bytes: u64,
    home: Returned,
}

impl Drop for Leased {
    fn drop(&mut self) {
        self.home.lock().unwrap_or_else(PoisonError::into_inner).push(self.storage.clone());
    }
}

/// The rounded size of a request, on a device whose buffers have at most `largest` bytes.
pub fn class(bytes: u64, largest: u64) -> u64 {
    let bytes = bytes.max(LEAST);
    let step = (bytes.checked_next_power_of_two().unwrap_or(bytes) / 8).max(LEAST / 4);
    let class = bytes.checked_next_multiple_of(step).unwrap_or(bytes);
    // A request that fits is not refused because its class does not fit.
    if bytes <= largest { class.min(largest) } else { class }
}

fn make(device: &wgpu::Device, bytes: u64, usage: BufferUsages) -> wgpu::Buffer {
    device.create_buffer(&wgpu::BufferDescriptor {
        label: None,
        size: bytes,
        usage,
        mapped_at_creation: false,
    })
}

const USAGE: BufferUsages = BufferUsages::STORAGE.union(BufferUsages::COPY_SRC).union(BufferUsages::COPY_DST);

impl Pool {
    /// An empty pool with a budget of `budget` bytes.
    pub fn new(device: &wgpu::Device, budget: u64) -> Pool {
        let nothing = Storage { buffer: make(device, LEAST, USAGE), id: 0, bytes: LEAST };
        Pool {
            free: BTreeMap::new(),
            free_bytes: 0,
            live_bytes: 0,
            peak_bytes: 0,
            since_bytes: 0,
            frozen_bytes: 0,
            vacant: BTreeMap::new(),
            budget,
            largest: device.limits().max_buffer_size / 4 * 4,
            last_id: 0,
            made: 0,
            dropped: Vec::new(),
            returned: Returned::default(),
            nothing,
        }
    }

    /// Makes room for a buffer of this size by dropping free buffers, unless a free one fits. Returns true if the
    /// budget required it: then the dropped buffers must be gone before the new one is made.
    pub fn make_room(&mut self, bytes: u64) -> bool {
        let returned = std::mem::take(&mut *self.returned.lock().unwrap_or_else(PoisonError::into_inner));
        returned.into_iter().for_each(|s| self.give(s));
        let bytes = class(bytes, self.largest);
        if self.free.contains_key(&bytes) || bytes > self.largest {
            return false;
        }
        let tight = self.held().saturating_add(bytes) > self.budget;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes.saturating_add(bytes));
        let usual = self.peak_bytes.saturating_add(self.peak_bytes / 2).saturating_add(SPARE);
        self.shrink(usual.min(self.budget.saturating_sub(self.frozen_bytes)).saturating_sub(bytes));
        tight && !self.dropped.is_empty()
    }

    /// A buffer of at least this size. Returns a placeholder if the device has no memory or has a fault.
    pub fn take(&mut self, device: &wgpu::Device, faults: &Faults, bytes: u64) -> Storage {
        if bytes == 0 || faults.raised() {
            return self.nothing.clone();
        }
        let bytes = class(bytes, self.largest);
        let found = self.pop(bytes);
        let Some(storage) = found.or_else(|| self.make(device, faults, bytes)) else {
            return self.nothing.clone();
        };
        self.live_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        self.since_bytes = self.since_bytes.max(self.live_bytes);
        storage
    }

    /// Wraps a buffer so that it is returned on drop.
    pub fn lease(&self, storage: Storage, bytes: u64) -> Leased {
        Leased { storage, bytes, home: self.returned.clone() }
    }

    /// Takes back the buffer of a released matrix.
    pub fn vacate(&mut self, storage: Storage) {
        self.vacant.entry(storage.bytes).or_default().push_back(storage);
    }

    /// A buffer of a released matrix with exactly this size, if there is one: the oldest, so that matrices of the same
    /// shapes get the same buffers. Recorded operations may still use it.
    pub fn reuse(&mut self, bytes: u64) -> Option<Storage> {
        self.vacant.get_mut(&bytes)?.pop_front()
    }

    /// Makes room in the budget for a new frozen buffer of this size: drops free buffers, then those of released
    /// matrices. Returns whether any was dropped.
    pub fn make_frozen_room(&mut self, bytes: u64) -> bool {
        let over = |pool: &Self| pool.held().saturating_add(bytes) > pool.budget;
        if over(self) {
            self.shrink(self.budget.saturating_sub(self.frozen_bytes).saturating_sub(bytes));
        }
        if over(self) {
            self.clear_vacant();
        }
        !self.dropped.is_empty()
    }

    /// Drops the buffers of released matrices.
    fn clear_vacant(&mut self) {
        for storage in std::mem::take(&mut self.vacant).into_values().flatten() {
            self.frozen_bytes -= storage.bytes;
            self.dropped.push(storage.id);
        }
    }

    /// A new buffer of exactly this size (a multiple of four), for a frozen matrix.
    pub fn freeze(&mut self, device: &wgpu::Device, faults: &Faults, bytes: u64) -> Option<Storage> {
        let made = self.make(device, faults, bytes);
        self.frozen_bytes += made.as_ref().map_or(0, |s| s.bytes);
        made
    }

    fn make(&mut self, device: &wgpu::Device, faults: &Faults, bytes: u64) -> Option<Storage> {
        faults.wanting(bytes);
        if bytes > self.largest {
            faults.out_of_memory();
            return None;
        }
        let buffer = make(device, bytes, USAGE);
        self.made += 1;
        self.last_id += 1;
        (!faults.raised()).then_some(Storage { buffer, id: self.last_id, bytes })
    }

    /// The size of the buffer for `bytes`.
    pub fn class(&self, bytes: u64) -> u64 {
        class(bytes, self.largest)
    }

    /// Bytes of all buffers.
    pub fn held(&self) -> u64 {
        self.frozen_bytes + self.live_bytes + self.free_bytes
    }

    /// Bytes of the buffers in use, without frozen ones.
    pub fn used(&self) -> u64 {
        self.live_bytes
    }

    /// Peak use in bytes since the last call.
    pub fn peak(&mut self) -> u64 {
        std::mem::replace(&mut self.since_bytes, self.live_bytes)
    }

    /// Drops all free buffers, and those of released matrices. Returns whether any buffer was dropped.
    pub fn let_go(&mut self) -> bool {
        self.shrink(0);
        self.clear_vacant();
        !self.dropped.is_empty()
    }

    /// Returns a buffer to the pool.
    pub fn give(&mut self, storage: Storage) {
        if storage.id == 0 {
            return;
        }
        self.live_bytes = self.live_bytes.saturating_sub(storage.bytes);
        self.free_bytes += storage.bytes;
        self.free.entry(storage.bytes).or_default().insert(storage.id, storage);
    }

    fn pop(&mut self, bytes: u64) -> Option<Storage> {
        let same = self.free.get_mut(&bytes)?;
        let found = same.pop_first().map(|(_, storage)| storage);
        if same.is_empty() {
            self.free.remove(&bytes);
        }
        self.free_bytes -= found.as_ref().map_or(0, |f| f.bytes);
        found
    }

    /// Drops free buffers until at most `most` bytes are in use or free.
    fn shrink(&mut self, most: u64) {
        while self.live_bytes + self.free_bytes > most {
            let Some((&bytes, _)) = self.free.last_key_value() else { break };
            let gone = self.pop(bytes);
            self.dropped.extend(gone.map(|s| s.id));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::class;

    #[test]
    fn size_class_wastes_at_most_a_quarter() {
        for bytes in (1..100_000).step_by(37) {
            let got = class(bytes, u64::MAX);
            assert!(got >= bytes && got.is_multiple_of(4), "{bytes}: {got}");
            assert!(got == 256 || got as f64 <= bytes as f64 * 1.25 + 64.0, "{bytes}: {got}");
            assert_eq!(class(got, u64::MAX), got, "a class is its own");
        }
    }

    #[test]
    fn size_class_does_not_exceed_the_largest_buffer() {
        let largest = ((1u64 << 31) - 1) / 4 * 4;
        assert_eq!(class(1_900 << 20, largest), largest, "the class would be 2^31");
        assert_eq!(class(largest, largest), largest);
        assert!(class(largest + 1, largest) > largest, "more than that stays too much");
    }
}

//! Buffers by size class, four classes to a doubling. Of a class the oldest buffer is handed out first, whatever the
//! order in which they came back, so that one microbatch after another of the same shape gets the same buffers for the
//! same verbs: nothing is allocated and every bind group is found again. On a miss free buffers are let go, the largest
//! first, until what is held is within half as much again as the most that was ever in use at once, and a little more.

use super::faults::Faults;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use wgpu::BufferUsages;

/// Bytes that may always lie free: classes peak at different moments, and what is let go for one of them is missed by
/// the next, over and over.
const SPARE: u64 = 64 << 20;
/// The smallest class, in bytes.
const LEAST: u64 = 256;

/// One buffer of a device.
#[derive(Debug, Clone)]
pub struct Storage {
    /// wgpu's handle.
    pub buffer: wgpu::Buffer,
    /// Never used twice; 0 stands for a buffer that could not be had.
    pub id: u64,
    /// Its size.
    pub bytes: u64,
}

/// Free buffers and what is in use.
#[derive(Debug)]
pub struct Pool {
    /// By size, then by number.
    free: BTreeMap<u64, BTreeMap<u64, Storage>>,
    free_bytes: u64,
    live_bytes: u64,
    peak_bytes: u64,
    last_id: u64,
    /// Buffers made so far.
    pub made: u64,
    /// Ids that no longer exist, for whoever remembers them.
    pub dropped: Vec<u64>,
    returned: Returned,
    nothing: Storage,
}

type Returned = Arc<Mutex<Vec<Storage>>>;

/// A buffer that goes back by itself.
#[derive(Debug)]
pub struct Leased {
    /// The buffer.
    pub storage: Storage,
    home: Returned,
}

impl Drop for Leased {
    fn drop(&mut self) {
        self.home.lock().unwrap_or_else(PoisonError::into_inner).push(self.storage.clone());
    }
}

/// The size that a request of `bytes` gets.
fn class(bytes: u64) -> u64 {
    let bytes = bytes.max(LEAST);
    let step = (bytes.next_power_of_two() / 8).max(LEAST / 4);
    bytes.next_multiple_of(step)
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
    /// Nothing yet.
    pub fn new(device: &wgpu::Device) -> Pool {
        let nothing = Storage { buffer: make(device, LEAST, USAGE), id: 0, bytes: LEAST };
        Pool {
            free: BTreeMap::new(),
            free_bytes: 0,
            live_bytes: 0,
            peak_bytes: 0,
            last_id: 0,
            made: 0,
            dropped: Vec::new(),
            returned: Returned::default(),
            nothing,
        }
    }

    /// A buffer of at least that size; a stand-in where the device has none, or has a fault.
    pub fn take(&mut self, device: &wgpu::Device, faults: &Faults, bytes: u64) -> Storage {
        let returned = std::mem::take(&mut *self.returned.lock().unwrap_or_else(PoisonError::into_inner));
        returned.into_iter().for_each(|s| self.give(s));
        if bytes == 0 || faults.raised() {
            return self.nothing.clone();
        }
        let bytes = class(bytes);
        let storage = match self.pop(bytes) {
            Some(storage) => storage,
            None => {
                self.peak_bytes = self.peak_bytes.max(self.live_bytes + bytes);
                self.shrink(bytes);
                match self.make(device, faults, bytes) {
                    Some(storage) => storage,
                    None => return self.nothing.clone(),
                }
            }
        };
        self.live_bytes += bytes;
        self.peak_bytes = self.peak_bytes.max(self.live_bytes);
        storage
    }

    /// A buffer that comes back when it is dropped.
    pub fn lease(&mut self, device: &wgpu::Device, faults: &Faults, bytes: u64) -> Leased {
        Leased { storage: self.take(device, faults, bytes), home: self.returned.clone() }
    }

    /// A new buffer of exactly that size (a multiple of four) that never comes back, for what is frozen.
    pub fn make(&mut self, device: &wgpu::Device, faults: &Faults, bytes: u64) -> Option<Storage> {
        faults.wanting(bytes);
        if bytes > device.limits().max_buffer_size {
            faults.out_of_memory();
            return None;
        }
        let buffer = make(device, bytes, USAGE);
        self.made += 1;
        self.last_id += 1;
        (!faults.raised()).then_some(Storage { buffer, id: self.last_id, bytes })
    }

    /// Takes a buffer back.
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

    fn shrink(&mut self, wanted: u64) {
        let most = self.peak_bytes + self.peak_bytes / 2 + SPARE;
        while self.live_bytes + self.free_bytes + wanted > most {
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
    fn a_class_wastes_a_quarter_at_most() {
        for bytes in (1..100_000).step_by(37) {
            let got = class(bytes);
            assert!(got >= bytes && got.is_multiple_of(4), "{bytes}: {got}");
            assert!(got == 256 || got as f64 <= bytes as f64 * 1.25 + 64.0, "{bytes}: {got}");
            assert_eq!(class(got), got, "a class is its own");
        }
    }
}

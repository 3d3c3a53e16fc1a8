//! Device memory. A buffer that is dropped or recycled goes to a list of its size and is used again by whoever next
//! asks for that size: after the first microbatches nothing is allocated. Everything runs in order on one stream, so
//! a buffer may be written again before what reads it has run.

use super::Driver;
use crate::backend::Fault;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

/// Addresses by size that nobody uses.
type Spare = Arc<Mutex<HashMap<usize, Vec<u64>>>>;

/// Device memory of one owner.
#[derive(Debug)]
pub struct Memory {
    address: u64,
    bytes: usize,
    spare: Spare,
}

impl Memory {
    /// The address of element `offset` of four bytes.
    pub(super) fn at(&self, offset: usize) -> u64 {
        self.address + 4 * offset as u64
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        let mut spare = self.spare.lock().unwrap_or_else(PoisonError::into_inner);
        spare.entry(self.bytes).or_default().push(self.address);
    }
}

/// Hands out buffers.
#[derive(Debug, Default)]
pub(super) struct Pool {
    spare: Spare,
}

impl Pool {
    /// A buffer of at least so many bytes. Where the device has no more, everything spare is given back first.
    pub fn take(&self, driver: &mut impl Driver, bytes: usize) -> Result<Memory, Fault> {
        let bytes = bytes.max(4).next_multiple_of(driver.granularity());
        let used = self.lock().get_mut(&bytes).and_then(Vec::pop);
        if let Some(address) = used {
            driver.forget(address, bytes);
            return Ok(self.own(address, bytes));
        }
        let address = match driver.alloc(bytes) {
            Err(Fault::OutOfMemory { .. }) => {
                let spare = std::mem::take(&mut *self.lock());
                spare.into_values().flatten().for_each(|a| driver.free(a));
                driver.alloc(bytes)?
            }
            other => other?,
        };
        Ok(self.own(address, bytes))
    }

    /// What stands for memory after a fault: nothing is launched any more, so nobody looks at it.
    pub fn nothing(&self) -> Memory {
        Memory { address: 0, bytes: 0, spare: Spare::default() }
    }

    fn own(&self, address: u64, bytes: usize) -> Memory {
        Memory { address, bytes, spare: self.spare.clone() }
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, HashMap<usize, Vec<u64>>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// How the numbers of a frozen matrix are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stored {
    /// 4 bytes.
    F32,
    /// 2 bytes.
    Bf16,
    /// 2 bytes.
    F16,
}

impl Stored {
    /// As entries are named.
    pub fn name(self) -> &'static str {
        match self {
            Stored::F32 => "f32",
            Stored::Bf16 => "bf16",
            Stored::F16 => "f16",
        }
    }
}

/// A frozen matrix [N, K], rows `stride` numbers apart.
#[derive(Debug)]
pub struct Weight {
    pub(super) memory: Memory,
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) stride: usize,
    pub(super) stored: Stored,
}

/// The integers of a microbatch, one after the other in one buffer: of every token its id, its position, its row of
/// the microbatch and its place in that row; then blocks of queries for attention.
#[derive(Debug)]
pub struct Tokens {
    pub(super) memory: Memory,
    /// T
    pub(super) count: usize,
    /// Rows of the microbatch.
    pub(super) rows: usize,
    /// Blocks of at most [`BLOCK`] tokens.
    pub(super) blocks: usize,
    /// Largest id and position: what a table must have.
    pub(super) largest: (u32, u32),
}

/// Tokens of an attention block; kernels with smaller tiles split it.
pub(super) const BLOCK: usize = 32;

impl Tokens {
    pub(super) fn ids(&self) -> u64 {
        self.memory.at(0)
    }
    pub(super) fn positions(&self) -> u64 {
        self.memory.at(self.count)
    }
    pub(super) fn row_of(&self) -> u64 {
        self.memory.at(2 * self.count)
    }
    pub(super) fn place_in_row(&self) -> u64 {
        self.memory.at(3 * self.count)
    }
    pub(super) fn blocks(&self) -> u64 {
        self.memory.at(4 * self.count)
    }
}

/// Blocks (first token, tokens, first of its row, end of its row) that cover rows of tokens.
pub(super) fn blocks(bounds: &[u32]) -> Vec<u32> {
    let of_row = |w: &[u32]| {
        let (from, to) = (w[0], w[1]);
        (from..to).step_by(BLOCK).flat_map(move |i| [i, (to - i).min(BLOCK as u32), from, to])
    };
    bounds.windows(2).flat_map(of_row).collect()
}

/// Integers on the device.
#[derive(Debug)]
pub struct Ids {
    pub(super) memory: Memory,
    pub(super) count: usize,
    pub(super) largest: u32,
}

//! The products of a block, in the room of a thread.

use super::super::operands::Context;
use super::super::runtime::memory::Memory;
use super::block::{BlockProducts, KEYS, QUERIES};
use super::block_floats::Floats;
use super::block_pairs::{InPairs, PairedKeys};
use std::cell::RefCell;

thread_local! {
    static ROOM: RefCell<Memory> = RefCell::new(Memory::default());
}

/// Runs `work` with the products for heads of `size` channels, of pairs where `keys` are given as such, and two blocks
/// of scores, in this thread's room.
pub fn with_products<'a>(
    cx: Context,
    size: usize,
    keys: Option<&PairedKeys>,
    work: impl FnOnce(&mut dyn BlockProducts<'a>, [&mut [f32]; 2]),
) {
    const SCORES: usize = QUERIES * KEYS;
    let needs = if keys.is_some() { InPairs::room(size) } else { Floats::room(size) };
    ROOM.with_borrow_mut(|room| {
        if room.values().len() < 2 * SCORES + needs {
            *room = Memory::zeros(2 * SCORES + needs);
        }
        let (p, rest) = room.values_mut().split_at_mut(SCORES);
        let (ds, rest) = rest.split_at_mut(SCORES);
        match keys {
            Some(keys) => work(&mut InPairs::new(size, keys, rest), [p, ds]),
            None => work(&mut Floats::new(cx, size, rest), [p, ds]),
        }
    });
}

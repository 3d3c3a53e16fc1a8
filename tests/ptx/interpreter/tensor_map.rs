//! The copy engine: copies boxes of a matrix in global memory, described by a tensor map, to shared memory. Numbers
//! have 2 bytes, rows of a box 128 bytes, swizzled; numbers beyond the matrix are zero.

use super::block::Block;
use super::ins::Arg;
use super::warp::{Memories, Warp};

/// A matrix, and the box to copy.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// Of its first number.
    pub address: u64,
    /// Lines of numbers.
    pub rows: u32,
    /// Numbers of a line.
    pub cols: u32,
    /// Bytes from row to row.
    pub stride: u64,
    /// Columns and rows of a box.
    pub part: (u32, u32),
}

/// The first address of maps; the parameter's number is added.
pub const MAPS: u64 = 1 << 62;

/// A pending copy.
pub struct Landing {
    pub barrier: u64,
    pub phase: u32,
    /// Pieces of 16 bytes, by number.
    pub pieces: Vec<(usize, [u8; 16])>,
}

/// The place of a byte: pieces of 16 bytes are exchanged within 1024 bytes.
pub fn swizzled(at: u64) -> u64 {
    at ^ ((at >> 7 & 7) << 4)
}

impl Warp {
    /// `cp.async.bulk.tensor.2d [to], [map, {column, row}], [mbarrier]`
    pub fn copy_box(
        &mut self,
        args: &[Arg],
        active: u32,
        (block, memory): (&Block, &mut Memories),
    ) -> Result<(), String> {
        let Arg::Tensor(map, place) = &args[1] else { return Err("a tensor map is expected".into()) };
        let (to, map) = (self.addresses(&args[0], active, block)?, self.get(map, active, block)?);
        let (columns, rows) = (self.get(&place[0], active, block)?, self.get(&place[1], active, block)?);
        let barrier = self.addresses(&args[2], active, block)?;
        for lane in (0..32).filter(|l| active >> l & 1 == 1) {
            let (l, who, me) = (lane as usize, self.who(block, lane), self.number());
            let of_param = |i: u64| block.call.args.get(i as usize).filter(|v| v.bytes == 128);
            let param = map[l].checked_sub(MAPS).and_then(of_param).ok_or("there is no tensor map")?;
            let map = block.call.maps[param.bits as usize];
            if map.part.0 != 64 || map.part.1 > 256 || !to[l].is_multiple_of(128) {
                return Err("a box that is not 128 bytes wide, or not aligned".into());
            }
            if !map.address.is_multiple_of(16) || !map.stride.is_multiple_of(16) {
                return Err("a tensor map of rows that are not aligned".into());
            }
            let phase = memory.1.phase(barrier[l], me, &self.clock)?;
            let mut pieces = Vec::new();
            for (row, piece) in (0..map.part.1).flat_map(|r| (0..8).map(move |p| (r, p))) {
                let at = swizzled(to[l] + u64::from(128 * row + 16 * piece));
                let (r, c) =
                    (rows[l] as u32 as i32 + row as i32, columns[l] as u32 as i32 + 8 * piece as i32);
                let inside = |x: i32, n: u32| x >= 0 && (x as u32) < n;
                let real = (0..8).filter(|i| inside(r, map.rows) && inside(c + i, map.cols));
                let mut bytes = [0; 16];
                let (mut real, mut len) = (real.collect::<Vec<i32>>(), 2);
                if real.len() == 8 && c % 8 == 0 {
                    (real, len) = (vec![0], 16);
                }
                for i in real {
                    let from = map.address + r as u64 * map.stride + 2 * (c + i) as u64;
                    let (region, at) = memory.0.find(from)?;
                    bytes[2 * i as usize..][..len]
                        .copy_from_slice(&region.read(at, len, who)?.to_le_bytes()[..len]);
                }
                memory.1.region.announce(at, 16, who)?;
                let number = at as usize / 16;
                let piece = &mut memory.1.pieces[number];
                if piece.under_way {
                    return Err("two copies to one place".into());
                }
                if let Some(w) = piece.reading.iter().position(|g| *g != 0) {
                    return Err(format!("a copy to what wgmma of warp {w} still reads"));
                }
                if let Some(w) = (0..piece.read.len()).find(|&w| self.clock[w] < piece.read[w]) {
                    return Err(format!("a copy, and no mbarrier orders it after the wgmma of warp {w}"));
                }
                (piece.under_way, piece.filled) = (true, None);
                pieces.push((number, bytes));
            }
            memory.1.landing.push(Landing { barrier: barrier[l], phase, pieces });
            memory.1.events += 1;
        }
        Ok(())
    }
}

impl super::ring::Shared {
    /// Completes the copy with this number.
    pub fn land(&mut self, number: usize) -> Result<(), String> {
        let Landing { barrier, phase, pieces } = self.landing.remove(number);
        for (number, bytes) in &pieces {
            self.region.bytes[16 * number..][..16].copy_from_slice(bytes);
            let piece = &mut self.pieces[*number];
            (piece.under_way, piece.filled) = (false, Some((barrier, phase)));
        }
        self.complete(barrier, 16 * pieces.len())
    }
}

#[test]
fn pieces_change_places_as_the_manual_draws_it() {
    // 128-byte swizzle: piece p of row r is at the place of piece p ^ r, with rows counted within 1024 bytes.
    assert_eq!([0, 16, 112, 127].map(swizzled), [0, 16, 112, 127]);
    assert_eq!([128, 144, 160, 256, 7 * 128, 7 * 128 + 112].map(swizzled), [144, 128, 176, 288, 1008, 896]);
    assert_eq!([1024 + 128, 8192 + 7 * 128 + 5].map(swizzled), [1024 + 144, 8192 + 1008 + 5]);
}

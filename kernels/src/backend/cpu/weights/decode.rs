//! Values of blocks in vectors of outputs: the codes of a run are loaded for every output of a vector, transposed four
//! bytes at a time and brought into one form, a byte each, so that a lane has the codes of its own output. Then value by
//! value they become numbers, are scaled, and are multiplied at once (few rows) or stored as the right factor of tiles.
//!
//! A value is what [`Packed::unpack`] computes, and products are added in ascending order, as tiles add them: the
//! result has the bits of the widened matrix.
//!
//! Everything is inlined always, without features of its own, into functions that have them. No vector is used in a
//! closure: the compiler may not inline a closure, and then a call with a vector takes as long as a run.

use super::super::gemm::gemv::{AT_ONCE, Sums};
use super::super::gemm::tile::soon;
use super::super::operands::COLS;
use super::block_rows::{Rounded, Rows};
use super::simd::{Levels, Shuffle, Simd, in_lanes};
use crate::numeric::block::{Bits, CodeLayout, Packed, RUN, Scales};
use std::ops::Range;

/// Most vectors of a panel.
const SIDES: usize = COLS / 8;

/// Bytes of a line of the processor's cache.
const LINE: usize = 64;

/// The rows of a panel.
type Panel = [*const u8; COLS];

/// The codes of a run: byte b of a lane of vector j is the code of value 4 j + b.
type Codes<V> = [<V as Simd>::Words; RUN / 4];

/// Scale and offset of the first sixteen values of a run, and of the others.
type Scaled<V> = [(<V as Simd>::Floats, <V as Simd>::Floats); 2];

/// The codes and scales of a run of a panel.
struct Run<V: Simd> {
    codes: [Codes<V>; SIDES],
    scales: [Scaled<V>; SIDES],
}

/// The chains over rows of x of at most four panels, see [`super::block_unpack::InPlace`].
///
/// # Safety
/// The processor has the instructions of V; x are whole runs, the same number in each row, with as many sums as rows of
/// x, at most [`AT_ONCE`]; there is a row, every row has these runs, and rows are at most four panels.
#[inline(always)]
pub unsafe fn chains<V: Simd, P: Packed>(sums: &mut [Sums], x: &[&[f32]], rows: Rows, from: usize) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows.rounded {
            Rounded::Not => panels::<V, P, false>(sums, x, rows, from),
            Rounded::Bf16 => panels::<V, P, true>(sums, x, rows, from),
        }
    }
}

/// One or two rows one after the other, more than two side by side.
#[inline(always)]
unsafe fn panels<V: Simd, P: Packed, const ROUND: bool>(
    sums: &mut [Sums],
    x: &[&[f32]],
    rows: Rows,
    from: usize,
) {
    for p in 0..rows.count.div_ceil(COLS) {
        let at = (panel(&rows, p * COLS), COLS * rows.size);
        // SAFETY: the caller's promise.
        unsafe {
            if x.len() > 2 {
                chain::<V, P, ROUND, AT_ONCE>(sums, x, (p, at), from);
            } else {
                for (sums, x) in sums.chunks_mut(1).zip(x.chunks(1)) {
                    chain::<V, P, ROUND, 1>(sums, x, (p, at), from);
                }
            }
        }
    }
}

/// The chains of panel p and at most T rows of x; the next panel begins `next` bytes further on.
#[inline(always)]
unsafe fn chain<V: Simd, P: Packed, const ROUND: bool, const T: usize>(
    out: &mut [Sums],
    x: &[&[f32]],
    (p, (panel, next)): (usize, (Panel, usize)),
    from: usize,
) {
    // SAFETY: the caller has checked that rows have these blocks, and the sums of a panel are 32 values.
    unsafe {
        let mut run = Run::<V>::new();
        let mut sums = [[V::float(0.0); SIDES]; T];
        for i in 0..x[0].len() / RUN {
            // A processor does not foresee 32 rows: the next panel's are asked for, a line at a time.
            let bytes = |run: usize| run * P::BYTES / (P::ELEMENTS / RUN);
            let [before, at] = [bytes((from + i).saturating_sub(1)), bytes(from + i)];
            if i == 0 || before / LINE != at / LINE {
                panel.iter().for_each(|row| soon(row.wrapping_add(next + at)));
            }
            run.load::<P>(&panel, from + i);
            // Four by four: how many products `take` adds is then known to the compiler.
            let x = std::array::from_fn(|t| &x[t.min(x.len() - 1)].as_chunks().0.as_chunks().0[i]);
            let mut chain = Chain { sums, x };
            run.values::<P, ROUND>(&mut chain);
            sums = chain.sums;
        }
        for (out, sums) in out.iter_mut().zip(sums) {
            for (side, &sum) in sums.iter().enumerate().take(COLS / V::LANES) {
                V::store(out[p].as_mut_ptr().add(side * V::LANES), sum);
            }
        }
    }
}

/// See [`super::block_unpack::Upright`].
///
/// # Safety
/// The processor has the instructions of V; there is a row, and every row has these runs.
#[inline(always)]
pub unsafe fn upright<V: Simd, P: Packed>(out: &mut [f32], rows: Rows, runs: Range<usize>) {
    // SAFETY: the caller's promise.
    unsafe {
        match rows.rounded {
            Rounded::Not => put::<V, P, false>(out, &panel(&rows, 0), runs),
            Rounded::Bf16 => put::<V, P, true>(out, &panel(&rows, 0), runs),
        }
    }
}

/// out[k][32] = the values.
#[inline(always)]
unsafe fn put<V: Simd, P: Packed, const ROUND: bool>(out: &mut [f32], panel: &Panel, runs: Range<usize>) {
    // SAFETY: the caller's promise; k is below RUN, and the sides of a panel have 32 values.
    unsafe {
        let mut run = Run::<V>::new();
        for (out, i) in out.as_chunks_mut::<{ RUN * COLS }>().0.iter_mut().zip(runs) {
            run.load::<P>(panel, i);
            run.values::<P, ROUND>(&mut Put { out: out.as_mut_ptr() });
        }
    }
}

/// See [`super::block_unpack::UprightPairs`].
///
/// # Safety
/// As [`upright`]; V has [`Simd::pairs`].
#[inline(always)]
pub unsafe fn upright_pairs<V: Simd, P: Packed>(out: &mut [u32], rows: Rows, runs: Range<usize>) {
    let panel = panel(&rows, 0);
    // SAFETY: the caller's promise; k is below RUN, and the sides of a panel have 32 values.
    unsafe {
        let mut run = Run::<V>::new();
        for (out, i) in out.as_chunks_mut::<{ RUN / 2 * COLS }>().0.iter_mut().zip(runs) {
            run.load::<P>(&panel, i);
            // Pairing rounds.
            run.values::<P, false>(&mut PutPairs { out: out.as_mut_ptr() });
        }
    }
}

/// What takes the values of a run.
trait Sink<V: Simd> {
    /// Values k .. k + 4 of the outputs of a side.
    unsafe fn take(&mut self, k: usize, side: usize, values: [V::Floats; 4]);
}

/// sums[t][side] += x[t][k] * value
struct Chain<'a, V: Simd, const T: usize> {
    sums: [[V::Floats; SIDES]; T],
    x: [&'a [[f32; 4]; RUN / 4]; T],
}

impl<V: Simd, const T: usize> Sink<V> for Chain<'_, V, T> {
    #[inline(always)]
    unsafe fn take(&mut self, k: usize, side: usize, values: [V::Floats; 4]) {
        for (sums, x) in self.sums.iter_mut().zip(&self.x) {
            for (&value, &x) in values.iter().zip(&x[k / 4]) {
                // SAFETY: the caller's promise.
                sums[side] = unsafe { V::fma(V::float(x), value, sums[side]) };
            }
        }
    }
}

/// out[k][32] = value
struct Put {
    out: *mut f32,
}

impl<V: Simd> Sink<V> for Put {
    #[inline(always)]
    unsafe fn take(&mut self, k: usize, side: usize, values: [V::Floats; 4]) {
        for (b, &value) in values.iter().enumerate() {
            // SAFETY: the caller's promise; k is below RUN, and the sides of a panel have 32 values.
            unsafe { V::store(self.out.add((k + b) * COLS + side * V::LANES), value) }
        }
    }
}

/// out[k / 2][32] = two values
struct PutPairs {
    out: *mut u32,
}

impl<V: Simd> Sink<V> for PutPairs {
    #[inline(always)]
    unsafe fn take(&mut self, k: usize, side: usize, values: [V::Floats; 4]) {
        for b in [0, 2] {
            // SAFETY: as above.
            unsafe {
                let at = self.out.add((k + b) / 2 * COLS + side * V::LANES);
                V::store_words(at, V::pairs(values[b], values[b + 1]));
            }
        }
    }
}

/// Where the rows of a panel begin; for a row that does not exist it is the last one, and its result is not used.
fn panel(rows: &Rows, first: usize) -> Panel {
    std::array::from_fn(|i| rows.bytes[(first + i).min(rows.count - 1) * rows.size..].as_ptr())
}

impl<V: Simd> Run<V> {
    /// Room for it.
    #[inline(always)]
    unsafe fn new() -> Self {
        // SAFETY: the caller's promise.
        unsafe {
            let (word, none) = (V::word(0), V::float(0.0));
            Run { codes: [[word; RUN / 4]; SIDES], scales: [[(none, none); 2]; SIDES] }
        }
    }

    /// Run `run` of a panel.
    #[inline(always)]
    unsafe fn load<P: Packed>(&mut self, panel: &Panel, run: usize) {
        let (block, run) = (run / (P::ELEMENTS / RUN) * P::BYTES, run % (P::ELEMENTS / RUN));
        let mut here = *panel;
        here.iter_mut().for_each(|row| *row = row.wrapping_add(block));
        for (rows, (codes, scales)) in
            here.chunks_exact(V::LANES).zip(self.codes.iter_mut().zip(&mut self.scales))
        {
            // SAFETY: the caller's promise.
            unsafe {
                load_codes::<V, P>(codes, rows, run);
                *scales = scales_of::<V, P>(rows, run);
            }
        }
    }

    /// Gives the values of the run to `sink`, in ascending order of k for each side. The sides of a panel side by side
    /// hide the latency of a multiply-add.
    #[inline(always)]
    unsafe fn values<P: Packed, const ROUND: bool>(&self, sink: &mut impl Sink<V>) {
        // SAFETY: the caller's promise.
        unsafe {
            for half in [0, 1] {
                let mut scales = [(V::float(0.0), V::float(0.0)); SIDES];
                for (scaled, of_side) in scales.iter_mut().zip(&self.scales).take(COLS / V::LANES) {
                    *scaled = (unit::<V, P>(of_side[half].0), of_side[half].1);
                }
                for j in half * RUN / 8..(half + 1) * RUN / 8 {
                    let sides = self.codes.iter().zip(&scales).enumerate();
                    for (side, (codes, &(by, plus))) in sides.take(COLS / V::LANES) {
                        let mut values = levels::<V, P>(codes[j]);
                        for value in &mut values {
                            // Where an offset is added the product is exact: a scale has at most 17 bits (an f16 times
                            // six bits), a code at most 5. So one rounding is that of the sum.
                            *value = match P::SCALES.add() {
                                true => V::fma(*value, by, plus),
                                false => V::mul(*value, by),
                            };
                            if ROUND {
                                *value = V::rounded(*value);
                            }
                        }
                        sink.take(4 * j, side, values);
                    }
                }
            }
        }
    }
}

/// The codes of a run of the rows of a vector.
#[inline(always)]
unsafe fn load_codes<V: Simd, P: Packed>(codes: &mut Codes<V>, blocks: &[*const u8], run: usize) {
    // SAFETY: the caller's promise, and the table's: a block has the bytes that its row of the table names.
    unsafe {
        match P::LAYOUT {
            CodeLayout::Bytes { at } => {
                let [first, second] = [at + 32 * run, at + 32 * run + 16];
                *codes = join::<V>(V::transposed(blocks, first), V::transposed(blocks, second));
            }
            CodeLayout::Planes { at } => {
                let (first, down) = (at + run / 2 * 32, 4 * (run % 2));
                let (low, high) = (V::transposed(blocks, first), V::transposed(blocks, first + 16));
                *codes = join::<V>(nibbles::<V>(low, down), nibbles::<V>(high, down));
            }
            CodeLayout::Halves { at, .. } | CodeLayout::Fifths { at, .. } | CodeLayout::Table { at, .. } => {
                let words = V::transposed(blocks, at + 16 * run);
                *codes = join::<V>(nibbles::<V>(words, 0), nibbles::<V>(words, 4));
            }
            CodeLayout::Pairs { at } => {
                let words = V::transposed(blocks, at + 16 * run);
                let (even, odd) = (nibbles::<V>(words, 4), nibbles::<V>(words, 0));
                for (i, codes) in codes.as_chunks_mut().0.iter_mut().enumerate() {
                    *codes = in_turn::<V>(even[i], odd[i]);
                }
            }
            CodeLayout::Split => {
                let split = P::split(run);
                let at = |bits: Bits| [bits.at, bits.at + 16];
                let [[low, low2], [high, high2]] = [at(split.low), at(split.high)];
                let low = join::<V>(V::transposed(blocks, low), V::transposed(blocks, low2));
                let high = join::<V>(V::transposed(blocks, high), V::transposed(blocks, high2));
                for (j, codes) in codes.iter_mut().enumerate() {
                    let upper = V::up(field::<V>(high[j], split.high), split.up as usize);
                    *codes = V::or(field::<V>(low[j], split.low), upper);
                }
            }
        }
        if let CodeLayout::Fifths { bits, .. } = P::LAYOUT {
            let fifths = V::gathered(blocks, bits + 4 * run);
            for (j, codes) in codes.iter_mut().enumerate() {
                *codes = V::or(*codes, spread::<V>(fifths, j));
            }
        }
        let less = match P::LAYOUT {
            _ if const { selects::<V, P>() } => 0,
            CodeLayout::Split => P::split(run).less,
            CodeLayout::Halves { less, .. } | CodeLayout::Fifths { less, .. } => less,
            CodeLayout::Bytes { .. }
            | CodeLayout::Planes { .. }
            | CodeLayout::Table { .. }
            | CodeLayout::Pairs { .. } => 0,
        };
        if less != 0 {
            let less = V::word(i32::from_le_bytes([less as u8; 4]));
            for codes in codes {
                *codes = V::less_bytes(*codes, less);
            }
        }
    }
}

/// Two halves of a run.
#[inline(always)]
fn join<V: Simd>([a, b, c, d]: [V::Words; 4], [e, f, g, h]: [V::Words; 4]) -> Codes<V> {
    [a, b, c, d, e, f, g, h]
}

/// A bit field of every byte.
#[inline(always)]
unsafe fn field<V: Simd>(x: V::Words, bits: Bits) -> V::Words {
    // SAFETY: the caller's promise.
    unsafe { V::and(V::down(x, bits.down), V::word(i32::from_le_bytes([bits.mask; 4]))) }
}

/// Four bits of every byte.
#[inline(always)]
unsafe fn nibbles<V: Simd>([a, b, c, d]: [V::Words; 4], down: usize) -> [V::Words; 4] {
    let bits = Bits { at: 0, down, mask: 15 };
    // SAFETY: the caller's promise.
    unsafe { [field::<V>(a, bits), field::<V>(b, bits), field::<V>(c, bits), field::<V>(d, bits)] }
}

/// Bits 4 j .. 4 j + 4 of every lane, each at bit 4 of a byte.
#[inline(always)]
unsafe fn spread<V: Simd>(fifths: V::Words, j: usize) -> V::Words {
    const BYTES: [Shuffle; 4] = [in_lanes([0; 4]), in_lanes([1; 4]), in_lanes([2; 4]), in_lanes([3; 4])];
    let each = if j.is_multiple_of(2) { 0x0804_0201 } else { 0x8040_2010_u32 as i32 };
    // SAFETY: the caller's promise.
    unsafe {
        let set = V::and(V::shuffled(fifths, &BYTES[j / 2]), V::word(each));
        V::up(V::least_bytes(set, V::word(0x0101_0101)), 4)
    }
}

/// The first two bytes of every lane of both in turn, and the last two.
#[inline(always)]
unsafe fn in_turn<V: Simd>(even: V::Words, odd: V::Words) -> [V::Words; 2] {
    const EVEN: [Shuffle; 2] = [in_lanes([0, -1, 1, -1]), in_lanes([2, -1, 3, -1])];
    const ODD: [Shuffle; 2] = [in_lanes([-1, 0, -1, 1]), in_lanes([-1, 2, -1, 3])];
    // SAFETY: the caller's promise.
    unsafe {
        [
            V::or(V::shuffled(even, &EVEN[0]), V::shuffled(odd, &ODD[0])),
            V::or(V::shuffled(even, &EVEN[1]), V::shuffled(odd, &ODD[1])),
        ]
    }
}

/// The scales of a run.
#[inline(always)]
unsafe fn scales_of<V: Simd, P: Packed>(blocks: &[*const u8], run: usize) -> Scaled<V> {
    // SAFETY: the caller's promise: a block begins with four bytes and more.
    unsafe {
        let none = V::float(0.0);
        match P::SCALES {
            Scales::Float => [(V::floats(V::gathered(blocks, 0)), none); 2],
            Scales::Exponent => [(exponents::<V>(V::gathered(blocks, 0)), none); 2],
            Scales::Half => [(V::halves(V::gathered(blocks, 0)), none); 2],
            Scales::Halves => {
                let words = V::gathered(blocks, 0);
                [(V::halves(words), V::halves(V::down(words, 16))); 2]
            }
            Scales::Signed { at } => {
                let two = V::gathered(blocks, at + 2 * run);
                let d = V::halves(V::down(V::gathered(blocks, at + P::ELEMENTS / 16 - 2), 16));
                // As in `levels`, with the byte at the top of its lane.
                let d = V::mul(d, V::float(PART));
                let [first, second] = [V::up(two, 24), V::and(V::up(two, 16), V::word(TOP))];
                [(V::mul(d, V::from_signed(first)), none), (V::mul(d, V::from_signed(second)), none)]
            }
            Scales::SixBits => six_bits::<V>(V::transposed(blocks, 0), run),
            Scales::Computed => {
                let mut all = [[0.0; COLS]; 4];
                for (i, &block) in blocks.iter().enumerate() {
                    let block = std::slice::from_raw_parts(block, P::BYTES);
                    let [first, second] = P::scales(block, run, |bits| V::half(bits));
                    (all[0][i], all[1][i], all[2][i], all[3][i]) = (first.0, first.1, second.0, second.1);
                }
                let [a, b, c, d] = &all;
                let first = (V::load(a.as_ptr()), V::load(b.as_ptr()));
                [first, (V::load(c.as_ptr()), V::load(d.as_ptr()))]
            }
        }
    }
}

/// 2^(e - 128) for the lowest byte e of every lane, as a product of two powers of two: a subnormal result is exact.
#[inline(always)]
unsafe fn exponents<V: Simd>(words: V::Words) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe {
        let half = part::<V>(words, 1, 127);
        let rest = V::less_bytes(part::<V>(words, 0, 255), half);
        V::mul(power::<V>(half), power::<V>(rest))
    }
}

/// 2^(e - 64) for e from 0 to 128 in every lane.
#[inline(always)]
unsafe fn power<V: Simd>(e: V::Words) -> V::Floats {
    // SAFETY: the caller's promise.
    unsafe { V::floats(V::up(V::less_bytes(e, V::word(-63i8 as u8 as i32)), 23)) }
}

/// d s and -(dmin m) of a run: d and dmin, then four bytes each of s, of m, and of the lower bits of later ones.
#[inline(always)]
unsafe fn six_bits<V: Simd>([d, s, m, low]: [V::Words; 4], run: usize) -> Scaled<V> {
    // SAFETY: the caller's promise.
    unsafe {
        let by = 8 * (run % 4);
        // From the fifth run on: the two bits above those of run - 4, beside four of its own.
        let (s, m) = match run {
            0..4 => (part::<V>(s, by, 63), part::<V>(m, by, 63)),
            _ => (
                V::or(part::<V>(s, by + 2, 48), part::<V>(low, by, 15)),
                V::or(part::<V>(m, by + 2, 48), part::<V>(low, by + 4, 15)),
            ),
        };
        let scale = V::mul(V::halves(d), V::from_signed(s));
        let least = V::mul(V::halves(V::down(d, 16)), V::from_signed(m));
        [(scale, V::minus(least)); 2]
    }
}

/// A bit field of every lane.
#[inline(always)]
unsafe fn part<V: Simd>(x: V::Words, down: usize, mask: i32) -> V::Words {
    // SAFETY: the caller's promise.
    unsafe { V::and(V::down(x, down), V::word(mask)) }
}

/// The upper byte of a lane.
const TOP: i32 = 0xff00_0000_u32 as i32;

/// 2^-24: undoes the factor of a code at the top of its lane.
const PART: f32 = 1.0 / (1 << 24) as f32;

/// Whether codes select levels: those of the type or of its layout, or of four bits where a processor looks sixteen
/// levels up at once.
const fn selects<V: Simd, P: Packed>() -> bool {
    let four_bits = matches!(P::LAYOUT, CodeLayout::Halves { .. } | CodeLayout::Planes { .. });
    let table = P::LEVELS.is_some() || matches!(P::LAYOUT, CodeLayout::Table { .. });
    table || V::LOOKS_UP && four_bits
}

/// What codes of four bits are worth.
const fn levels_of<P: Packed>() -> Levels {
    let less = if let CodeLayout::Halves { less, .. } = P::LAYOUT { less } else { 0 };
    let mut levels = [0.0; 16];
    let mut i = 0;
    while i < 16 {
        levels[i] = match (P::LEVELS, P::LAYOUT) {
            (Some(levels), _) => levels[i],
            (None, CodeLayout::Table { levels, .. }) => levels[i] as f32,
            (None, _) => (i as i8 - less) as f32,
        };
        i += 1;
    }
    Levels::new(levels)
}

/// A scale in the unit of [`levels`].
#[inline(always)]
unsafe fn unit<V: Simd, P: Packed>(by: V::Floats) -> V::Floats {
    const { assert!(selects::<V, P>() || !matches!(P::SCALES, Scales::Float | Scales::Exponent), "from f16") };
    // SAFETY: the caller's promise.
    if const { selects::<V, P>() } { by } else { unsafe { V::mul(by, V::float(PART)) } }
}

/// The levels of the four bytes of every lane. A code that is its own value is moved to the top of its lane, for its
/// sign, so it is 2^24 times as large. Both that and the 2^-24 of a scale that comes from f16 are exact, and so is
/// every bit of their product.
#[inline(always)]
unsafe fn levels<V: Simd, P: Packed>(codes: V::Words) -> [V::Floats; 4] {
    const AT_TOP: [Shuffle; 4] = [
        in_lanes([-1, -1, -1, 0]),
        in_lanes([-1, -1, -1, 1]),
        in_lanes([-1, -1, -1, 2]),
        in_lanes([-1, -1, -1, 3]),
    ];
    // SAFETY: the caller's promise.
    unsafe {
        if const { selects::<V, P>() } {
            return V::looked_up(codes, const { &levels_of::<P>() });
        }
        [
            V::from_signed(V::shuffled(codes, &AT_TOP[0])),
            V::from_signed(V::shuffled(codes, &AT_TOP[1])),
            V::from_signed(V::shuffled(codes, &AT_TOP[2])),
            V::from_signed(V::shuffled(codes, &AT_TOP[3])),
        ]
    }
}

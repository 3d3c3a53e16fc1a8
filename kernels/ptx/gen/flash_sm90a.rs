//! Shared code of the kernels of attention by wgmma. A block has three warpgroups. One thread of the first starts the
//! copy engine, which loads tiles of tokens of one head; the two others multiply them, each with 64 of the 128 rows
//! that the block holds. A tile consists of parts of 64 columns beside each other, each with rows of 128 bytes,
//! swizzled.

use crate::operand::Layout;
use crate::registers::numbered;
use crate::statement::NEVER;
use crate::{Text, Uses};

/// Head sizes that have a kernel, exactly.
pub const SIZES: [usize; 2] = [64, 128];
/// Threads of a block, with one block per multiprocessor: it divides all registers among its warpgroups.
pub const BLOCK: (usize, &str) = (384, " .minnctapersm 1");
/// Rows that a block holds.
pub const HELD: usize = 128;

/// Tokens of one head in shared memory.
#[derive(Clone, Copy)]
pub struct Tile {
    pub d: usize,
    pub rows: usize,
}

impl Tile {
    /// Bytes of 64 columns.
    pub fn part(self) -> usize {
        128 * self.rows
    }
    pub fn bytes(self) -> usize {
        self.d / 64 * self.part()
    }
}

/// Shared memory, from a multiple of 1024 bytes on: the held tiles, then a ring of slots that are filled and used in
/// turn, then mbarriers: full of every slot, empty of every slot, one for the held tiles.
#[derive(Clone, Copy)]
pub struct Ring {
    pub held: usize,
    pub slots: usize,
    /// Of a slot.
    pub bytes: usize,
}

impl Ring {
    /// The offset of the mbarriers.
    fn barriers(self) -> usize {
        self.held + self.slots * self.bytes
    }
    /// Bytes of the launch; its memory may begin up to 1023 bytes before a multiple of 1024.
    pub fn shared(self) -> usize {
        self.barriers() + 16 * self.slots + 8 + 1023
    }
}

/// Registers, parameters, mbarriers. `maps`: the parameters that are tensor maps, whose addresses are in `%{name}`.
pub fn open(t: &mut Text, ring: Ring, maps: &[&str]) {
    t.code(
        ".reg .u64 %list, %row, %safe, %wide, %sa, %sb; .reg .f32 %v, %u, %other, %scale, %c2;
         .reg .u32 %t, %lane, %warp, %wg, %g, %pair, %base, %bars, %slot, %parity, %bar, %to, %x, %y, %z;
         .reg .u32 %head, %group, %hq, %hkv, %d, %first, %count, %start, %stop, %wq, %wkv, %window;
         .reg .pred %p, %q, %one, %all, %none",
    );
    for map in maps {
        t.code(format!(".reg .u64 %{map}; mov.b64 %{map}, {map}; cvta.param.u64 %{map}, %{map}"));
    }
    t.code(
        "ld.param.u64 %list, [blocks]; ld.param.u32 %hq, [hq]; ld.param.u32 %hkv, [hkv]; ld.param.f32 %scale, [scale];
         ld.param.u32 %window, [window]; mul.f32 %c2, %scale, 0f3FB8AA3B; mov.u32 %t, %tid.x; and.b32 %lane, %t, 31; shr.u32 %g, %lane, 2;
         and.b32 %pair, %lane, 3; shl.b32 %pair, %pair, 1",
    );
    t.say("one value for the warp, which the compiler then knows");
    t.code("shr.u32 %warp, %t, 5; shfl.sync.idx.b32 %warp, %warp, 0, 31, 0xffffffff; shr.u32 %wg, %warp, 2");
    t.say("tiles begin at multiples of 1024 bytes, as the swizzle counts");
    t.code(format!(
        "mov.u32 %base, tiles; add.u32 %base, %base, 1023; and.b32 %base, %base, -1024; add.u32 %bars, %base, {};
         setp.ne.u32 %p, %t, 0; @%p bra READY",
        ring.barriers()
    ));
    for slot in 0..ring.slots {
        t.code(format!("mbarrier.init.shared::cta.b64 [%bars+{}], 1", 8 * slot));
        t.code(format!("mbarrier.init.shared::cta.b64 [%bars+{}], 8", 8 * (ring.slots + slot)));
    }
    t.code(format!("mbarrier.init.shared::cta.b64 [%bars+{}], 1", 16 * ring.slots));
    t.say("the copy engine sees them");
    t.code("fence.mbarrier_init.release.cluster");
    t.label("READY");
    t.code(
        "bar.sync 0; mov.u32 %slot, 0; setp.eq.u32 %one, %lane, 0; setp.eq.u32 %all, %t, %t;
         setp.ne.u32 %none, %t, %t",
    );
}

/// Warpgroups 1 and 2 branch to MULTIPLIES; of warpgroup 0 the filling thread continues, the others branch to END.
/// Slots are empty before the first arrival: the phase before the first counts as complete.
pub fn fills(t: &mut Text) {
    t.code(
        "setp.ne.u32 %p, %wg, 0; @%p bra MULTIPLIES; setmaxnreg.dec.sync.aligned.u32 24; setp.ne.u32 %p, %t, 0;
         @%p bra END; mov.u32 %parity, 1",
    );
}

/// The start of the multiplying warpgroups; %wg is 0 or 1 from here on.
pub fn multiplies(t: &mut Text) {
    t.code("bra END");
    t.label("MULTIPLIES");
    t.code("setmaxnreg.inc.sync.aligned.u32 240; mov.u32 %parity, 0; sub.u32 %wg, %wg, 1");
}

/// The held tiles go to %to, from %base on, and %bar counts their bytes.
pub fn hold(t: &mut Text, ring: Ring) {
    let t = &mut t
        .part("hold", &Uses { reads: ".u32 %bars, %base", changes: ".u32 %bar, %to", ..Uses::default() });
    t.code(format!(
        "add.u32 %bar, %bars, {}; mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {}; mov.u32 %to, %base",
        16 * ring.slots,
        ring.held
    ));
}

/// Waits for the held tiles.
pub fn held(t: &mut Text, ring: Ring) {
    let t = &mut t.part("held", &Uses { reads: ".u32 %bars", scratch: ".pred %p", ..Uses::default() });
    t.label("HELD");
    t.code(format!(
        "mbarrier.try_wait.parity.shared::cta.b64 %p, [%bars+{}], 0; @!%p bra HELD",
        16 * ring.slots
    ));
}

/// The next slot, once it is empty: copies to %to complete %bar, which expects a whole slot.
pub fn give(t: &mut Text, ring: Ring, label: &str) {
    let t = &mut t.part(
        "give",
        &Uses {
            reads: ".u32 %bars, %base",
            changes: ".u32 %slot, %parity, %bar, %to",
            scratch: ".u32 %x; .pred %p",
        },
    );
    t.code("shl.b32 %x, %slot, 3; add.u32 %bar, %bars, %x");
    t.label(label);
    t.code(format!(
        "mbarrier.try_wait.parity.shared::cta.b64 %p, [%bar+{}], %parity; @!%p bra {label};
         mbarrier.arrive.expect_tx.shared::cta.b64 _, [%bar], {2}; mad.lo.u32 %to, %slot, {2}, %base;
         add.u32 %to, %to, {1}",
        8 * ring.slots,
        ring.held,
        ring.bytes
    ));
    next(t, ring);
}

/// The next slot, once it is full: `{bar}` is its mbarrier, `{at}` the offset to add to descriptors of the first slot.
pub fn take(t: &mut Text, ring: Ring, label: &str, (bar, at): (&str, &str)) {
    let t = &mut t.part(
        "take",
        &Uses {
            reads: ".u32 %bars",
            changes: &format!(".u32 %slot, %parity, {bar}; .u64 {at}"),
            scratch: ".u32 %x; .pred %p",
        },
    );
    t.code(format!(
        "shl.b32 %x, %slot, 3; add.u32 {bar}, %bars, %x; mul.wide.u32 {at}, %slot, {}",
        ring.bytes / 16
    ));
    t.label(label);
    t.code(format!("mbarrier.try_wait.parity.shared::cta.b64 %p, [{bar}], %parity; @!%p bra {label}"));
    next(t, ring);
}

/// Releases the slot of this mbarrier, which is filled again once all eight warps have released it.
pub fn release(t: &mut Text, ring: Ring, bar: &str) {
    let t = &mut t.part("release", &Uses { reads: &format!(".u32 {bar}; .pred %one"), ..Uses::default() });
    t.code(format!("@%one mbarrier.arrive.shared::cta.b64 _, [{bar}+{}]", 8 * ring.slots));
}

/// The parity changes when the ring wraps around.
fn next(t: &mut Text, ring: Ring) {
    let t = &mut t.part(
        "next",
        &Uses { changes: ".u32 %slot, %parity", scratch: ".u32 %x; .pred %p", ..Uses::default() },
    );
    t.code(format!(
        "add.u32 %slot, %slot, 1; setp.eq.u32 %p, %slot, {}; selp.u32 %slot, 0, %slot, %p; selp.u32 %x, 1, 0, %p;
         xor.b32 %parity, %parity, %x",
        ring.slots
    ));
}

/// Copies the tile whose head begins at column `column` and whose first token is `row` to %to, in boxes of the given
/// rows; %to is then the address after the tile. %x and %y are scratch.
pub fn copy(t: &mut Text, map: &str, (column, row): (&str, &str), (tile, box_rows): (Tile, usize)) {
    let t = &mut t.part(
        "copy",
        &Uses {
            reads: &format!(".u32 %bar, {column}, {row}; .u64 {map}"),
            changes: ".u32 %to",
            scratch: ".u32 %x, %y",
        },
    );
    for (part, first) in (0..tile.d / 64).flat_map(|p| (0..tile.rows).step_by(box_rows).map(move |r| (p, r)))
    {
        t.code(format!(
            "add.u32 %x, {column}, {}; add.u32 %y, {row}, {first};
             cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes \
             [%to], [{map}, {{%x, %y}}], [%bar]; add.u32 %to, %to, {}",
            64 * part,
            128 * box_rows
        ));
    }
}

/// `{to}` describes the tile at the address `from`: along K, rows are outputs; across K, they are terms.
pub fn describe(t: &mut Text, to: &str, from: &str, (tile, layout): (Tile, Layout)) {
    let t = &mut t.part(
        "describe",
        &Uses { reads: &format!(".u32 {from}"), changes: &format!(".u64 {to}"), scratch: ".u32 %x" },
    );
    // The distance of 64 columns to the next, in bytes, is used across K only.
    let apart = if layout == Layout::AcrossK { tile.part() as u64 } else { 16 };
    t.code(format!(
        "shr.u32 %x, {from}, 4; cvt.u64.u32 {to}, %x; add.u64 {to}, {to}, 0x{:x}",
        (apart / 16) << 16 | (1024 / 16) << 32 | 1 << 62
    ));
}

/// An operand in shared memory.
#[derive(Clone, Copy)]
pub struct Operand<'a> {
    pub descriptor: &'a str,
    pub tile: Tile,
    pub layout: Layout,
}

impl Operand<'_> {
    /// The addend of step `n` of 16 terms to the descriptor.
    fn ahead(&self, n: usize) -> usize {
        match self.layout {
            Layout::AlongK => (32 * (n % 4) + self.tile.part() * (n / 4)) / 16,
            Layout::AcrossK => 128 * n,
        }
    }

    /// `{to}` is the descriptor of step `n`; returns its name.
    fn step<'t>(&'t self, t: &mut Text, to: &'t str, n: usize) -> &'t str {
        if self.ahead(n) == 0 {
            return self.descriptor;
        }
        t.code(format!("add.u64 {to}, {}, {}", self.descriptor, self.ahead(n)));
        to
    }
}

/// The left operand: 64 rows along K, or registers, four per step, from the first of that name on.
#[derive(Clone, Copy)]
pub enum Left<'a> {
    Shared(Operand<'a>),
    Registers(&'a str),
}

/// The treatment of existing sums.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Sums {
    Set,
    Add,
}

/// 64 x `n` sums from the first of that name on (=|+=) left right, over the steps of 16 terms. %sa and %sb are scratch.
pub fn multiply(
    t: &mut Text,
    (sums, n, write): (&str, usize, Sums),
    left: Left,
    right: Operand,
    steps: usize,
) {
    let all = numbered(sums, 0, n / 2);
    let reads = match left {
        Left::Shared(a) => format!(".u64 {}, {}", a.descriptor, right.descriptor),
        Left::Registers(stem) => format!(".u64 {}; .b32 {stem}<{}>", right.descriptor, 4 * steps),
    };
    let uses = Uses {
        reads: &format!("{reads}; .pred %all, %none"),
        changes: &format!(".f32 {all}"),
        scratch: ".u64 %sa, %sb",
    };
    let t = &mut t.part("multiply", &uses);
    for step in 0..steps {
        let (a, of_a) = match &left {
            Left::Shared(a) => (a.step(t, "%sa", step).to_string(), ", 0"),
            Left::Registers(stem) => (format!("{{{}}}", numbered(stem, 4 * step, 4)), ""),
        };
        let b = right.step(t, "%sb", step);
        let keeps = if step == 0 && write == Sums::Set { NEVER } else { "%all" };
        t.code(format!(
            "wgmma.mma_async.sync.aligned.m64n{n}k16.f32.bf16.bf16 {{{all}}}, {a}, {b}, {keeps}, 1, 1{of_a}, {}",
            u32::from(right.layout == Layout::AcrossK)
        ));
    }
}

/// Required before a wgmma whose registers were used by other instructions.
pub fn fence(t: &mut Text) {
    t.code("wgmma.fence.sync.aligned");
}

/// Commits the products since the last commit as a group.
pub fn commit(t: &mut Text) {
    t.code("wgmma.commit_group.sync.aligned");
}

/// Waits until at most that many groups are pending.
pub fn wait(t: &mut Text, left: usize) {
    t.code(format!("wgmma.wait_group.sync.aligned {left}"));
}

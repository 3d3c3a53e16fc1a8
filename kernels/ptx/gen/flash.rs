//! Shared code of the kernels of attention on tensor cores: tiles of bf16 rows in shared memory, filled by cp.async
//! and read by ldmatrix. A row is one token of one head, 2 D bytes in pieces of 16. Piece p of row r is at p ^ x(r),
//! so that the eight rows of a matrix use each bank once: x(r) is r % 8 if a row is a multiple of 128 bytes, r / 2 %
//! 4 for D = 96.

use crate::registers::numbered;
use crate::{Text, Uses};

/// Threads of each of these kernels: four warps.
pub const THREADS: usize = 128;

/// Bytes of a launch's shared memory that may precede its tiles.
pub const ALIGNING: usize = 127;

/// One size of a kernel: heads of up to `d` numbers.
#[derive(Clone, Copy)]
pub struct Head {
    pub d: usize,
}

/// Sizes that have a kernel; smaller heads are padded with zeros in shared memory.
pub const HEADS: [Head; 3] = [Head { d: 64 }, Head { d: 96 }, Head { d: 128 }];
/// The largest size. Its sums leave a warp registers for 16 rows.
pub const WIDE: Head = Head { d: 256 };

/// The order in which lanes name the rows of a matrix of fragments.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Walk {
    /// Rows first: the left operand, and a right one that is transposed by the load.
    RowsFirst,
    /// Pieces first: a right operand whose rows are outputs.
    PiecesFirst,
}

impl Head {
    /// Bytes of a row of a tile.
    pub fn row(self) -> usize {
        2 * self.d
    }
    /// Tokens of a streamed tile.
    pub fn step(self) -> usize {
        match self.d {
            64 => 64,
            256 => 16,
            _ => 32,
        }
    }
    /// Groups of 16 queries of a warp, in the forward pass.
    pub fn groups(self) -> usize {
        if self.d == WIDE.d { 1 } else { 2 }
    }
    /// Steps of 16 along the head.
    pub fn depth(self) -> usize {
        self.d / 16
    }
    /// Whether a row is a multiple of 128 bytes.
    fn whole(self) -> bool {
        self.d.is_multiple_of(64)
    }
    /// Threads that copy one row, and rows that all of them copy at once.
    fn copying(self) -> (usize, usize) {
        let lanes = if self.whole() { 8 } else { 4 };
        (lanes, THREADS / lanes)
    }
    /// Pieces of a row that a thread copies.
    pub fn pieces(self) -> usize {
        self.d / 8 / self.copying().0
    }
    /// `{to} = x({row})`
    fn exchange(self, to: &str, row: &str) -> String {
        if self.whole() {
            format!("and.b32 {to}, {row}, 7")
        } else {
            format!("shr.u32 {to}, {row}, 1; and.b32 {to}, {to}, 3")
        }
    }
    /// The change of a lane's address by step `n` of 16 numbers (two pieces): bits to exchange, and bytes to add.
    fn ahead(self, n: usize) -> (usize, usize) {
        let within = if self.whole() { 4 } else { 2 };
        (32 * (n % within), 32 * within * (n / within))
    }
}

/// Registers, and this thread's part of every copy: row %cr of a pass at %st, pieces from %wide on. `shared`: bytes of
/// shared memory, unless the file leaves them to the launch.
pub fn open(t: &mut Text, head: Head, shared: Option<usize>) {
    t.code(format!(
        ".reg .u64 %list, %row, %safe, %wide; .reg .b32 %b<4>; .reg .f32 %v, %u, %other, %scale, %c2;
         .reg .u32 %t, %lane, %warp, %g, %pair, %cr, %st, %keep<{}>, %x, %y, %z, %real;
         .reg .u32 %head, %group, %hq, %hkv, %d, %first, %count, %start, %stop, %j0, %next, %wq, %wkv, %r, %window, %base;
         .reg .s32 %wlast; .reg .pred %p, %q, %skip, %done",
        head.pieces()
    ));
    match shared {
        Some(shared) => t.code(format!(".shared .align 128 .b8 tiles[{shared}]; mov.u32 %base, tiles")),
        None => {
            t.say("tiles begin at multiples of 128 bytes, because pieces are exchanged in addresses");
            t.code(format!(
                "mov.u32 %base, tiles; add.u32 %base, %base, {ALIGNING}; and.b32 %base, %base, -128"
            ));
        }
    }
    let (lanes, _) = head.copying();
    t.code(format!(
        "mov.u32 %t, %tid.x; and.b32 %lane, %t, 31; shr.u32 %warp, %t, 5; shr.u32 %g, %lane, 2;
         and.b32 %pair, %lane, 3; shl.b32 %pair, %pair, 1; ld.param.u64 %list, [blocks]; ld.param.u32 %hq, [hq];
         ld.param.u32 %hkv, [hkv]; ld.param.u32 %d, [d]; ld.param.f32 %scale, [scale];
         ld.param.u32 %window, [window]; mul.f32 %c2, %scale, 0f3FB8AA3B; shr.u32 %cr, %t, {}; and.b32 %y, %t, {}; {};
         xor.b32 %x, %x, %y; shl.b32 %x, %x, 4; mad.lo.u32 %st, %cr, {}, %x; add.u32 %st, %st, %base",
        lanes.trailing_zeros(),
        lanes - 1,
        head.exchange("%x", "%cr"),
        head.row()
    ));
    t.say("pieces beyond the head are not copied but zero");
    for i in 0..head.pieces() {
        t.code(format!(
            "add.u32 %x, %y, {}; shl.b32 %x, %x, 3; setp.lt.u32 %p, %x, %d; selp.u32 %keep{i}, 16, 0, %p",
            lanes * i
        ));
    }
    t.code(
        "shl.b32 %y, %y, 4; cvt.u64.u32 %wide, %y; mul.lo.u32 %wq, %hq, %d; shl.b32 %wq, %wq, 1;
         mul.lo.u32 %wkv, %hkv, %d; shl.b32 %wkv, %wkv, 1",
    );
}

/// The entry of the block list for block %x of the grid.
pub fn entry_of_list(t: &mut Text) {
    let t = &mut t.part(
        "entry_of_list",
        &Uses {
            reads: ".u32 %x",
            changes: ".u64 %list; .u32 %first, %count, %start, %stop",
            ..Uses::default()
        },
    );
    t.code("mad.wide.u32 %list, %x, 16, %list; ld.global.nc.v4.u32 {%first, %count, %start, %stop}, [%list]");
}

/// `{to} = [{matrix}]` at the head `which`, at this thread's pieces.
pub fn at_head(t: &mut Text, to: &str, (matrix, which): (&str, &str)) {
    let t = &mut t.part(
        "at_head",
        &Uses {
            reads: &format!(".u32 {which}, %d; .u64 %wide"),
            changes: &format!(".u64 {to}"),
            scratch: ".u32 %x",
        },
    );
    t.code(format!(
        "ld.param.u64 {to}, [{matrix}]; mul.lo.u32 %x, {which}, %d; mad.wide.u32 {to}, %x, 2, {to}; add.u64 {to}, {to}, %wide"
    ));
}

/// Rows of a matrix to copy to a tile: tokens `from ..`, `count` of them valid, `apart` bytes from row to row.
pub struct Copy<'a> {
    pub pointer: &'a str,
    pub from: &'a str,
    pub count: &'a str,
    pub apart: &'a str,
    pub rows: usize,
    /// The place of the tile: a register with an offset, if there is one, and bytes.
    pub to: (Option<&'a str>, usize),
}

/// Starts the copies of this thread.
pub fn copy(t: &mut Text, head: Head, c: &Copy) {
    let (lanes, at_once) = head.copying();
    let stage = c.to.0.map_or(String::new(), |stage| format!(", {stage}"));
    let uses = Uses {
        reads: &format!(
            ".u32 %st, %cr, %keep<{}>, {}, {}, {}{stage}; .u64 {}",
            head.pieces(),
            c.from,
            c.count,
            c.apart,
            c.pointer
        ),
        scratch: ".u32 %x, %y, %z, %real; .u64 %row; .pred %p",
        ..Uses::default()
    };
    let t = &mut t.part("copy", &uses);
    match c.to.0 {
        Some(stage) => t.code(format!("add.u32 %z, %st, {stage}")),
        None => t.code("mov.u32 %z, %st"),
    }
    for pass in 0..c.rows / at_once {
        t.code(format!(
            "add.u32 %x, %cr, {}; setp.lt.u32 %p, %x, {}; add.u32 %y, {}, %x; mad.wide.u32 %row, %y, {}, {};
             selp.u64 %row, %row, {}, %p",
            pass * at_once,
            c.count,
            c.from,
            c.apart,
            c.pointer,
            c.pointer
        ));
        for i in 0..head.pieces() {
            t.code(format!(
                "selp.u32 %real, %keep{i}, 0, %p; cp.async.cg.shared.global [%z+{}], [%row+{}], 16, %real",
                c.to.1 + pass * at_once * head.row() + 16 * lanes * i,
                16 * lanes * i
            ));
        }
    }
}

/// `{to}` = this lane's address in a tile at `tiles`, in the order of `walk`.
pub fn lanes(t: &mut Text, head: Head, to: &str, walk: Walk) {
    let t = &mut t.part(
        "lanes",
        &Uses { reads: ".u32 %lane, %base", changes: &format!(".u32 {to}"), scratch: ".u32 %x, %y, %z" },
    );
    let (row, piece) = if walk == Walk::RowsFirst { (3, 4) } else { (4, 3) };
    t.code(format!(
        "and.b32 %x, %lane, 7; shr.u32 %y, %lane, {row}; and.b32 %y, %y, 1; shl.b32 %y, %y, 3; add.u32 %x, %x, %y;
         shr.u32 %z, %lane, {piece}; and.b32 %z, %z, 1; {}; xor.b32 %y, %y, %z; shl.b32 %y, %y, 4;
         mad.lo.u32 {to}, %x, {}, %y; add.u32 {to}, {to}, %base",
        head.exchange("%y", "%x"),
        head.row()
    ));
}

/// Fragments of 16 rows from `row` on by 16 numbers from 16 `step` on, of the tile at `to`.
pub struct Fragments<'a> {
    pub lane: &'a str,
    pub to: (Option<&'a str>, usize),
    pub row: usize,
    pub step: usize,
    pub transposed: bool,
}

/// Loads them into four registers.
pub fn fragments(t: &mut Text, head: Head, into: &str, f: &Fragments) {
    let (exchange, add) = head.ahead(f.step);
    let stage = f.to.0.map_or(String::new(), |stage| format!(", {stage}"));
    let uses = Uses {
        reads: &format!(".u32 {}{stage}", f.lane),
        changes: &format!(".b32 {into}<4>"),
        scratch: ".u32 %x",
    };
    let t = &mut t.part("fragments", &uses);
    t.code(format!("xor.b32 %x, {}, {exchange}", f.lane));
    if let Some(stage) = f.to.0 {
        t.code(format!("add.u32 %x, %x, {stage}"));
    }
    let bytes = f.to.1 + f.row * head.row() + add;
    let how = if f.transposed { ".trans" } else { "" };
    t.code(format!(
        "ldmatrix.sync.aligned.m8n8.x4{how}.shared.b16 {{{into}0, {into}1, {into}2, {into}3}}, [%x+{bytes}]"
    ));
}

/// Four sums += the left fragments times a pair of right ones.
pub fn multiply(t: &mut Text, (sums, at): (&str, usize), left: (&str, usize), right: (&str, usize)) {
    let name = |(stem, at): (&str, usize), n: usize| numbered(stem, at, n);
    let (d, left, right) = (name((sums, at), 4), name(left, 4), name(right, 2));
    let uses =
        Uses { reads: &format!(".b32 {left}, {right}"), changes: &format!(".f32 {d}"), ..Uses::default() };
    let t = &mut t.part("multiply", &uses);
    t.code(format!(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{{d}}}, {{{left}}}, {{{right}}}, {{{d}}}"
    ));
}

/// Converts scores of 16 rows by 16 columns, as in the sums of two products, to a left operand.
pub fn pack(t: &mut Text, (to, at): (&str, usize), (scores, first): (&str, usize)) {
    let uses = Uses {
        reads: &format!(".f32 {}", numbered(scores, first, 8)),
        changes: &format!(".b32 {}", numbered(to, at, 4)),
        ..Uses::default()
    };
    let t = &mut t.part("pack", &uses);
    for (i, (low, high)) in [(0, 1), (2, 3), (4, 5), (6, 7)].into_iter().enumerate() {
        t.code(format!(
            "cvt.rn.bf16x2.f32 {to}{}, {scores}{}, {scores}{}",
            at + i,
            first + high,
            first + low
        ));
    }
}

/// Stores sums of 16 rows as f32 rows: row g at `{pointers}0`, row g + 8 at `{pointers}1`, each if its predicate holds.
pub fn write(
    t: &mut Text,
    head: Head,
    (sums, at): (&str, usize),
    (pointer, holds): (&str, &str),
    by: [Option<&str>; 2],
) {
    let factors: String = by.iter().flatten().map(|by| format!("; .f32 {by}")).collect();
    let uses = Uses {
        reads: &format!(".u32 %d; .u64 {pointer}<2>; .pred {holds}<2>{factors}"),
        scratch: &format!(".f32 {}; .pred %p, %q", numbered(sums, at, head.d / 2)),
        ..Uses::default()
    };
    let t = &mut t.part("write", &uses);
    for n in 0..head.d / 8 {
        t.code(format!("setp.gt.u32 %p, %d, {}", 8 * n));
        for (high, by) in by.iter().enumerate() {
            t.code(format!("and.pred %q, %p, {holds}{high}"));
            for c in 0..2 {
                let sum = format!("{sums}{}", at + 4 * n + 2 * high + c);
                if let Some(by) = by {
                    t.code(format!("mul.f32 {sum}, {sum}, {by}"));
                }
                t.code(format!("@%q st.global.f32 [{pointer}{high}+{}], {sum}", 32 * n + 4 * c));
            }
        }
    }
}

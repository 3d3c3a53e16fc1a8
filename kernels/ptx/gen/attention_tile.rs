//! Shared code of the baseline kernels of attention and its gradient, flash-style in f32. A tile is B queries by B
//! keys of one head, for 4 B threads. Thread t has rows 2 (t / 8) and the next, and columns t % 8, t % 8 + 8, ..; so
//! the eight threads of a row are neighbours in a warp, and a butterfly over 1, 2, 4 reduces a row.

use crate::{Text, Uses};

/// One size of a kernel: heads of up to `d` numbers, tiles of `b`.
#[derive(Clone, Copy)]
pub struct Tile {
    pub d: usize,
    pub b: usize,
}

impl Tile {
    pub fn threads(self) -> usize {
        4 * self.b
    }
    /// Distance of rows of a tile of inputs, in numbers: odd, so that a column uses every bank.
    pub fn stride(self) -> usize {
        self.d + 1
    }
    pub fn score_stride(self) -> usize {
        self.b + 1
    }
    /// Scores of a thread in one row.
    pub fn scores(self) -> usize {
        self.b / 8
    }
    /// Output columns of a thread.
    pub fn columns(self) -> usize {
        self.d / 8
    }
}

/// Registers of all attention kernels.
pub fn registers(t: &mut Text, tile: Tile) {
    t.code(format!(
        ".reg .u64 %list, %base, %row, %wide;
         .reg .u32 %t, %g, %cx, %head, %group, %hq, %hkv, %d, %d4, %first, %count, %start, %stop, %x, %y;
         .reg .u32 %idx, %r, %c, %to, %lx, %rx, %i, %j0, %keys, %wq, %wkv, %offq, %offkv, %part, %window;
         .reg .f32 %scale, %v, %l<2>, %a<2>, %b<{}>, %other;
         .reg .pred %p, %q, %z",
        tile.scores().max(1)
    ));
}

/// The head and tokens of this block; ends blocks that have none. `owner` counts heads along the grid.
pub fn begin(t: &mut Text, tile: Tile, owner: &str) {
    let t = &mut t.part("begin", &Uses { changes: &format!(".u64 %list; .u32 %window, %hq, %hkv, %d, %t, %g, %cx, {owner}, %part, %first, %count, %start, %stop, %wq, %wkv, %d4; .f32 %scale"), scratch: ".u32 %x, %y; .pred %p", ..Uses::default() });
    let parts = 32 / tile.b;
    t.code(format!(
        "ld.param.u64 %list, [blocks]; ld.param.u32 %hq, [hq]; ld.param.u32 %hkv, [hkv];
         ld.param.u32 %d, [d]; ld.param.f32 %scale, [scale]; ld.param.u32 %window, [window];
         mov.u32 %t, %tid.x; shr.u32 %g, %t, 3; and.b32 %cx, %t, 7; mov.u32 {owner}, %ctaid.y;
         mov.u32 %x, %ctaid.x; div.u32 %y, %x, {parts}; mul.lo.u32 %part, %y, {parts};
         sub.u32 %part, %x, %part; mul.lo.u32 %part, %part, {};
         mad.wide.u32 %list, %y, 16, %list;
         ld.global.nc.v4.u32 {{%first, %count, %start, %stop}}, [%list];
         add.u32 %first, %first, %part; sub.s32 %count, %count, %part; min.s32 %count, %count, {};
         setp.le.s32 %p, %count, 0",
        tile.b, tile.b
    ));
    t.code("@%p ret");
    t.say("numbers between tokens, and the head's place among them");
    t.code("mul.lo.u32 %wq, %hq, %d; mul.lo.u32 %wkv, %hkv, %d; add.u32 %d4, %d, 3; and.b32 %d4, %d4, 0xfffffffc");
}

/// Copies a tile of inputs to shared memory, times `scale` if there is one, zero beyond tokens and head. Tokens are
/// `from ..`, `count` of them valid, in rows of `wide` numbers, with the head at `offset`.
pub struct Load<'a> {
    pub label: &'a str,
    pub to: &'a str,
    pub pointer: &'a str,
    pub from: &'a str,
    pub count: &'a str,
    pub wide: (&'a str, &'a str),
    pub scaled: Option<&'a str>,
}

pub fn load(t: &mut Text, tile: Tile, l: &Load) {
    let (wide, offset) = l.wide;
    let scale = l.scaled.map_or(String::new(), |s| format!("; .f32 {s}"));
    let t = &mut t.part(
        "load",
        &Uses {
            reads: &format!(
                ".u32 %t, %d, {}, {}, {wide}, {offset}; .u64 {}{scale}",
                l.from, l.count, l.pointer
            ),
            scratch: ".u32 %idx, %r, %c, %x, %y, %to; .u64 %wide, %row; .f32 %v; .pred %p, %q",
            ..Uses::default()
        },
    );
    let shift = tile.d.trailing_zeros();
    t.code("mov.u32 %idx, %t");
    t.label(l.label);
    t.code(format!(
        "shr.u32 %r, %idx, {shift}; and.b32 %c, %idx, {}; setp.lt.u32 %p, %r, {}; setp.lt.u32 %q, %c, %d;
         and.pred %p, %p, %q; add.u32 %x, {}, %r; add.u32 %y, {offset}, %c; cvt.u64.u32 %wide, %y;
         mad.wide.u32 %row, %x, {wide}, %wide; shl.b64 %row, %row, 2; add.u64 %row, %row, {};
         mov.f32 %v, 0f00000000; @%p ld.global.nc.f32 %v, [%row]",
        tile.d - 1,
        l.count,
        l.from,
        l.pointer
    ));
    if let Some(s) = l.scaled {
        t.code(format!("mul.f32 %v, %v, {s}"));
    }
    t.code(format!(
        "mad.lo.u32 %to, %r, {}, %c; shl.b32 %to, %to, 2; mov.u32 %x, {}; add.u32 %to, %to, %x;
         st.shared.f32 [%to], %v; add.u32 %idx, %idx, {}; setp.lt.u32 %p, %idx, {}; @%p bra {}",
        tile.stride(),
        l.to,
        tile.threads(),
        tile.b * tile.d,
        l.label
    ));
}

/// s[i][j] = sum over the head of left[2 g + i] . right[cx + 8 j]
pub fn scores(t: &mut Text, tile: Tile, label: &str, (s, left, right): (&str, &str, &str)) {
    let (n, row) = (tile.scores(), 4 * tile.stride());
    let t = &mut t.part(
        "scores",
        &Uses {
            reads: ".u32 %g, %cx, %d4",
            changes: &format!(".f32 %{s}<{}>", 2 * n),
            scratch: &format!(".u32 %lx, %rx, %i; .f32 %a<2>, %b<{n}>; .pred %p"),
        },
    );
    (0..2 * n).for_each(|i| t.code(format!("mov.f32 %{s}{i}, 0f00000000")));
    t.code(format!(
        "mov.u32 %lx, {left}; mad.lo.u32 %lx, %g, {}, %lx; mov.u32 %rx, {right}; mad.lo.u32 %rx, %cx, {row}, %rx;
         mov.u32 %i, 0",
        2 * row
    ));
    t.label(label);
    for u in 0..4 {
        (0..2).for_each(|i| t.code(format!("ld.shared.f32 %a{i}, [%lx+{}]", i * row + 4 * u)));
        (0..n).for_each(|j| t.code(format!("ld.shared.f32 %b{j}, [%rx+{}]", 8 * j * row + 4 * u)));
        for (i, j) in (0..2 * n).map(|x| (x / n, x % n)) {
            t.code(format!("fma.rn.f32 %{s}{0}, %a{i}, %b{j}, %{s}{0}", i * n + j));
        }
    }
    t.code(format!(
        "add.u32 %lx, %lx, 16; add.u32 %rx, %rx, 16; add.u32 %i, %i, 4; setp.lt.u32 %p, %i, %d4; @%p bra {label}"
    ));
}

/// Stores this thread's scores in their tile.
pub fn put(t: &mut Text, tile: Tile, (s, to): (&str, &str)) {
    let (n, row) = (tile.scores(), 4 * tile.score_stride());
    let t = &mut t.part(
        "put",
        &Uses {
            reads: &format!(".u32 %g, %cx; .f32 %{s}<{}>", 2 * n),
            scratch: ".u32 %to, %x",
            ..Uses::default()
        },
    );
    t.code(format!(
        "mov.u32 %to, {to}; mad.lo.u32 %to, %g, {}, %to; shl.b32 %x, %cx, 2; add.u32 %to, %to, %x",
        2 * row
    ));
    for (i, j) in (0..2 * n).map(|x| (x / n, x % n)) {
        t.code(format!("st.shared.f32 [%to+{}], %{s}{}", i * row + 32 * j, i * n + j));
    }
}

/// acc[i][j] += sum over the B rows k of right: coefficients[2 g + i][k] right[k][cx + 8 j]
pub fn accumulate(t: &mut Text, tile: Tile, label: &str, (acc, coefficients, right): (&str, &str, &str)) {
    let (n, row) = (tile.columns(), 4 * tile.score_stride());
    let t = &mut t.part(
        "accumulate",
        &Uses {
            reads: ".u32 %g, %cx",
            changes: &format!(".f32 %{acc}<{}>", 2 * n),
            scratch: ".u32 %lx, %rx, %x, %i; .f32 %a<2>, %v; .pred %p",
        },
    );
    t.code(format!(
        "mov.u32 %lx, {coefficients}; mad.lo.u32 %lx, %g, {}, %lx; mov.u32 %rx, {right};
         shl.b32 %x, %cx, 2; add.u32 %rx, %rx, %x; mov.u32 %i, 0",
        2 * row
    ));
    t.label(label);
    t.code(format!("ld.shared.f32 %a0, [%lx]; ld.shared.f32 %a1, [%lx+{row}]"));
    for j in 0..n {
        t.code(format!(
            "ld.shared.f32 %v, [%rx+{}]; fma.rn.f32 %{acc}{j}, %a0, %v, %{acc}{j};
             fma.rn.f32 %{acc}{1}, %a1, %v, %{acc}{1}",
            32 * j,
            n + j
        ));
    }
    t.code(format!(
        "add.u32 %lx, %lx, 4; add.u32 %rx, %rx, {}; add.u32 %i, %i, 1; setp.lt.u32 %p, %i, {}; @%p bra {label}",
        4 * tile.stride(),
        tile.b
    ));
}

/// Stores both rows of an accumulator in global memory, times %by0 and %by1 if `scaled`.
pub fn write_rows(
    t: &mut Text,
    tile: Tile,
    (acc, pointer): (&str, &str),
    (wide, offset): (&str, &str),
    by: &[&str],
) {
    let n = tile.columns();
    let factors: String = by.iter().map(|by| format!("; .f32 {by}")).collect();
    let uses = Uses {
        reads: &format!(".u32 %g, %cx, %count, %first, %d, {wide}, {offset}; .u64 {pointer}{factors}"),
        scratch: &format!(".f32 %{acc}<{}>; .u32 %r, %x, %y, %c; .u64 %wide, %row; .pred %p, %q", 2 * n),
        ..Uses::default()
    };
    let t = &mut t.part("write_rows", &uses);
    for i in 0..2 {
        t.code(format!(
            "shl.b32 %r, %g, 1; add.u32 %r, %r, {i}; setp.lt.u32 %q, %r, %count; add.u32 %x, %first, %r;
             add.u32 %y, {offset}, %cx; cvt.u64.u32 %wide, %y; mad.wide.u32 %row, %x, {wide}, %wide;
             shl.b64 %row, %row, 2; add.u64 %row, %row, {pointer}"
        ));
        for j in 0..n {
            let value = format!("%{acc}{}", i * n + j);
            if let Some(by) = by.get(i) {
                t.code(format!("mul.f32 {value}, {value}, {by}"));
            }
            t.code(format!(
                "add.u32 %c, %cx, {}; setp.lt.u32 %p, %c, %d; and.pred %p, %p, %q; @%p st.global.f32 [%row+{}], {value}",
                8 * j,
                32 * j
            ));
        }
    }
}

/// `%x` = the sum, or the maximum, over the eight threads of a row.
pub fn of_row(t: &mut Text, operation: &str, x: &str) {
    let t = &mut t
        .part("of_row", &Uses { changes: &format!(".f32 {x}"), scratch: ".f32 %other", ..Uses::default() });
    for by in [1, 2, 4] {
        t.code(format!(
            "shfl.sync.bfly.b32 %other, {x}, {by}, 31, 0xffffffff; {operation}.f32 {x}, {x}, %other"
        ));
    }
}

//! Tiles of an output that are inside its edges.

use crate::{Text, Uses};

/// `%full`: the tile of `rows` by `columns` at row `%m0`, column `%n0` is inside out [M, N], and all groups of `bytes`
/// bytes in its rows begin at multiples of that.
pub fn whole(t: &mut Text, (rows, columns): (usize, usize), bytes: usize) {
    let t = &mut t.part(
        "whole",
        &Uses {
            reads: ".u32 %m, %n, %m0, %n0, %ldo; .u64 %out",
            changes: ".pred %full",
            scratch: ".u32 %x, %y; .pred %p",
        },
    );
    t.code(format!(
        "add.u32 %x, %m0, {rows}; setp.le.u32 %full, %x, %m; add.u32 %x, %n0, {columns}; setp.le.u32 %p, %x, %n;
         and.pred %full, %full, %p; cvt.u32.u64 %x, %out; shl.b32 %y, %ldo, 2; or.b32 %x, %x, %y;
         and.b32 %x, %x, {}; setp.eq.u32 %p, %x, 0; and.pred %full, %full, %p",
        bytes - 1
    ));
}

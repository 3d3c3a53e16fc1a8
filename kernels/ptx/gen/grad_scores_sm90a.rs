//! Scores in the gradient of attention on sm_90a are converted to probabilities and their gradients, 0 at masked
//! places, packed as left operands. Sums have the layout of m64nSk16: number i of a thread is row 8 (i / 2 % 2) from
//! its first on, column 8 (i / 4) + i % 2 from its own pair on.

use crate::attention_grad_sm90a::{Holds, Kernel};
use crate::flash::pack;
use crate::{Text, Uses};

/// The column of number `i`, less the thread's pair.
fn column(i: usize) -> usize {
    8 * (i / 4) + i % 2
}

/// %lse{i} and %delta{i} of the query token %x of head %head, or of the last below `end`: places beyond are masked,
/// or no output. All threads load, because the compiler makes a branch of a load for some.
fn of_query(t: &mut Text, i: usize, end: &str) {
    let t = &mut t.part(
        "of_query",
        &Uses {
            reads: &format!(".u32 %x, %hq, %head, {end}; .u64 %lsep, %deltap"),
            changes: &format!(".f32 %lse{i}, %delta{i}"),
            scratch: ".u32 %y; .u64 %row",
        },
    );
    t.code(format!(
        "sub.u32 %y, {end}, 1; min.u32 %y, %x, %y; mad.lo.u32 %y, %y, %hq, %head; mad.wide.u32 %row, %y, 4, %lsep;
         ld.global.nc.f32 %lse{i}, [%row]; mad.wide.u32 %row, %y, 4, %deltap; ld.global.nc.f32 %delta{i}, [%row]"
    ));
}

/// %lse{i} = -logsumexp log2 e
fn negate(t: &mut Text) {
    let t = &mut t.part("negate", &Uses { changes: ".f32 %lse<2>", ..Uses::default() });
    (0..2).for_each(|i| t.code(format!("mul.f32 %lse{i}, %lse{i}, 0fBFB8AA3B")));
}

/// logsumexp and delta of the thread's two rows, up to %rows.
pub fn of_rows(t: &mut Text) {
    let t = &mut t.part(
        "of_rows",
        &Uses {
            reads: ".u32 %mine, %rows, %hq, %head; .u64 %lsep, %deltap",
            changes: ".f32 %lse<2>, %delta<2>",
            scratch: ".u32 %x, %y; .u64 %row",
        },
    );
    for i in 0..2 {
        t.code(format!("add.u32 %x, %mine, {}", 8 * i));
        of_query(t, i, "%rows");
    }
    negate(t);
}

/// Loads logsumexp and delta of the tile's queries at %j0: of the lane's own, and of the 32nd after it.
pub fn ask(t: &mut Text) {
    let t = &mut t.part(
        "ask",
        &Uses {
            reads: ".u32 %j0, %lane, %stop, %hq, %head; .u64 %lsep, %deltap",
            changes: ".f32 %lse<2>, %delta<2>",
            scratch: ".u32 %x, %y; .u64 %row",
        },
    );
    for i in 0..2 {
        t.code(format!("add.u32 %x, %j0, %lane; add.u32 %x, %x, {}", 32 * i));
        of_query(t, i, "%stop");
    }
}

/// %whole: no place of the tile is masked for any row of the warpgroup, as in most tiles. (A condition per warp would
/// suffice for the mask, but all four warps must take the same branch around a wait for wgmma.) %r, %limit: columns
/// from which on, or up to which, the thread's rows are masked.
pub fn whole(t: &mut Text, k: Kernel) {
    let t = &mut t.part(
        "whole",
        &Uses {
            reads: ".u32 %j0, %held, %stop, %mine, %pair, %window",
            changes: ".u32 %r, %limit; .pred %whole",
            scratch: ".u32 %x, %y; .pred %p",
        },
    );
    match k.holds {
        Holds::Queries => t.code(format!(
            "add.u32 %x, %j0, {}; setp.le.u32 %whole, %x, %held; add.u32 %x, %j0, %window; add.u32 %y, %held, 63;
             setp.gt.u32 %p, %x, %y",
            k.step() - 1
        )),
        Holds::Keys => t.code(format!(
            "add.u32 %x, %held, 63; setp.ge.u32 %whole, %j0, %x; add.u32 %x, %j0, {}; add.u32 %y, %held, %window;
             min.u32 %y, %y, %stop; setp.le.u32 %p, %x, %y; sub.u32 %limit, %stop, %j0; sub.u32 %limit, %limit, %pair",
            k.step()
        )),
    }
    t.code("and.pred %whole, %whole, %p");
    t.code("sub.u32 %r, %mine, %j0; sub.u32 %r, %r, %pair");
}

/// Replaces `what` by `by` at masked places.
pub fn hide(t: &mut Text, k: Kernel, (what, by): (&str, &str)) {
    let uses = Uses {
        reads: ".u32 %r, %limit, %window",
        changes: &format!(".f32 {what}<{}>", k.step() / 2),
        scratch: ".u32 %x; .pred %p, %q",
    };
    let t = &mut t.part("hide", &uses);
    for i in 0..k.step() / 2 {
        let (column, below) = (column(i), 8 * (i / 2 % 2));
        // Rows 8 below attend to 8 more columns of keys, and to 8 fewer of queries.
        let from = column as i64 - below as i64;
        match k.holds {
            Holds::Queries => t.code(format!("sub.u32 %x, %r, {from}; setp.ge.u32 %p, %x, %window")),
            Holds::Keys => t.code(format!(
                "sub.u32 %x, {from}, %r; setp.ge.u32 %p, %x, %window; setp.le.s32 %q, %limit, {column};
                 or.pred %p, %p, %q"
            )),
        }
        t.code(format!("selp.f32 {what}{i}, {by}, {what}{i}, %p"));
    }
}

/// -logsumexp log2 e of the query of column `c`, or delta, from the lane that loaded it.
fn spread(t: &mut Text, to: &str, stem: &str, c: usize) {
    let t = &mut t.part(
        "spread",
        &Uses {
            reads: &format!(".u32 %pair; .f32 {stem}<2>"),
            changes: &format!(".f32 {to}"),
            scratch: ".u32 %x",
        },
    );
    t.code(format!(
        "add.u32 %x, %pair, {}; shfl.sync.idx.b32 {to}, {stem}{}, %x, 31, 0xffffffff",
        c % 32,
        c / 32
    ));
}

/// Numbers with the same query, and that query: of the thread's rows, or of a column.
fn queries(k: Kernel) -> Vec<(usize, Vec<usize>)> {
    let all = 0..k.step() / 2;
    match k.holds {
        Holds::Queries => {
            (0..2).map(|row| (row, all.clone().filter(|i| i / 2 % 2 == row).collect())).collect()
        }
        Holds::Keys => all.filter(|i| i / 2 % 2 == 0).map(|i| (column(i), vec![i, i + 2])).collect(),
    }
}

/// s = p, which is never subnormal (the compiler would add two operations for subnormals); %fs = bf16(p) if it is a
/// factor.
pub fn probabilities(t: &mut Text, k: Kernel) {
    let (keys, packed) = (k.holds == Holds::Keys, k.step() / 4);
    let changes = format!(".f32 %s<{}>", 2 * packed);
    let uses = match k.holds {
        Holds::Queries => Uses { reads: ".f32 %c2, %lse<2>", changes: &changes, scratch: "" },
        Holds::Keys => Uses {
            reads: ".f32 %c2; .u32 %pair",
            changes: &format!("{changes}; .b32 %fs<{packed}>"),
            scratch: ".f32 %lse<2>, %u; .u32 %x",
        },
    };
    let t = &mut t.part("probabilities", &uses);
    if keys {
        negate(t);
    }
    for (query, numbers) in queries(k) {
        let lse = match k.holds {
            Holds::Queries => format!("%lse{query}"),
            Holds::Keys => {
                spread(t, "%u", "%lse", query);
                "%u".to_string()
            }
        };
        for i in numbers {
            t.code(format!("fma.rn.f32 %s{i}, %s{i}, %c2, {lse}; ex2.approx.ftz.f32 %s{i}, %s{i}"));
        }
    }
    if keys {
        (0..k.step() / 16).for_each(|j| pack(t, ("%fs", 4 * j), ("%s", 8 * j)));
    }
}

/// %fe = bf16(p (dp - delta))
pub fn gradients(t: &mut Text, k: Kernel) {
    let packed = k.step() / 4;
    let own = if k.holds == Holds::Keys { ", %u; .u32 %x" } else { "" };
    let uses = Uses {
        reads: &format!(".f32 %s<{}>, %delta<2>; .u32 %pair", 2 * packed),
        changes: &format!(".b32 %fe<{packed}>"),
        scratch: &format!(".f32 %e<{}>{own}", 2 * packed),
    };
    let t = &mut t.part("gradients", &uses);
    for (query, numbers) in queries(k) {
        let delta = match k.holds {
            Holds::Queries => format!("%delta{query}"),
            Holds::Keys => {
                spread(t, "%u", "%delta", query);
                "%u".to_string()
            }
        };
        for i in numbers {
            t.code(format!("sub.f32 %e{i}, %e{i}, {delta}; mul.f32 %e{i}, %e{i}, %s{i}"));
        }
    }
    (0..k.step() / 16).for_each(|j| pack(t, ("%fe", 4 * j), ("%e", 8 * j)));
}

//! The gradient of attention on tensor cores, sm_80. Both kernels have the same code: a block holds 64 rows, a warp
//! 16 of them, with fragments in registers; tiles of the other side stream through two stages. With held queries,
//! keys stream and dq is summed; with held keys, queries of all heads that share them stream, and dk and dv are
//! summed. Heads of 256 have a file of their own, because they need the shared memory of the launch.

use crate::attention_grad::{INPUTS, Stored, delta};
use crate::flash::{
    ALIGNING, Copy, Fragments, HEADS, Head, THREADS, WIDE, Walk, at_head, copy, entry_of_list, fragments,
    lanes, multiply, open, pack, write,
};
use crate::{File, Text, Uses, window};

const HEAD: &str = "
attention_grad_sm80: dq[T, H D], dk[T, G D], dv[T, G D] from dout, the saved logsumexp and delta. Query i sees key j of its
row if 0 <= i - j < window (2^30: no window).
q, k, v and dout are bf16 rows; D as in attention_sm80.ptx. delta: a warp per (query, head), delta = dout . out of the
rounded dout, so that what dp and delta have in common goes out.

  q: block (x, h) holds 64 queries              kv: block (x, g) holds 64 keys
     q, dout of the warp's 16 rows in registers     k, v of the warp's 16 rows in registers (v in shared memory for D > 96)
     for tiles of S keys that they see:             for query heads h of g, for tiles of S queries that see them:
         s = q k^T;  dp = dout v^T                      s = k q^T;  dp = v dout^T
         p = 2^(s scale log2 e - logsumexp log2 e), 0 where not seen
         ds = p (dp - delta)
         dq += bf16(ds) k                               dv += bf16(p) dout;  dk += bf16(ds) q
     dq = scale dq                                  dk = scale dk

The next tiles are fetched while these are used: one barrier a tile. S = 64; 32 for D > 64; scores of 32 columns are
held at a time, of 16 by kv for D > 64. A warp that sees nothing of a tile does nothing.
Sums: in the order of tiles, of heads, of 16 rows, inside as the tensor core has it; nothing is added atomically.
launch: grid (blocks of 64 tokens, H or G), 128 threads; q: the last block first. delta: grid ceil(T H / 4).
registers: 2 x D / 4 held fragments, D / 2 sums (kv: twice), scores and dp, packed scores, logsumexp and delta.
budget: 255 registers, 49152 bytes of shared memory
promises: HMMA
";

const HEAD_WIDE: &str = "
attention_grad_wide_sm80: attention_grad_sm80 for heads of multiples of 8 up to 256, padded with zeros to 256

The rows that a block holds are in shared memory, where their fragments are read for each tile: there are registers for one
sum. So dk and dv have a kernel each, in which the keys' probabilities are computed twice.
S = 16, and scores of 16 columns are held at a time. All else is as in attention_grad_sm80.ptx, whose delta is used.
launch: grid (blocks of 64 tokens, H for q or G), 128 threads, dynamic shared memory as much as the budget says; q: the last
block first.
registers: D / 2 sums, 8 scores and dp, packed scores, fragments 12, logsumexp and delta.
budget: 255 registers, {SHARED} bytes of shared memory
promises: HMMA
";

/// The side that a block holds.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Holds {
    Queries,
    Keys,
}

/// One entry.
#[derive(Clone, Copy)]
struct Kernel {
    head: Head,
    holds: Holds,
    /// The sums, whose names are those of the outputs: dq; or dk, dv, or both.
    outs: &'static [&'static str],
}

impl Kernel {
    fn queries(self) -> bool {
        self.holds == Holds::Queries
    }
    /// Whether ds is summed, in %sa.
    fn of_ds(self) -> bool {
        self.outs[0] != "dv"
    }
    /// Whether p is summed, in %sb.
    fn of_p(self) -> bool {
        self.outs.contains(&"dv")
    }
    /// The matrices of the held rows that are in shared memory and not in registers, of which there are too few for both.
    fn held_in_shared(self) -> usize {
        match (self.head.d, self.holds) {
            (256, _) => 2,
            (128, Holds::Keys) => 1,
            _ => 0,
        }
    }
    /// Columns of scores that are computed at a time.
    fn columns(self) -> usize {
        match self.head.d {
            256 => 16,
            96 | 128 if !self.queries() => 16,
            _ => 32,
        }
    }
    /// Bytes of shared memory.
    fn shared(self) -> usize {
        4 * tile(self.head) + self.held_in_shared() * HELD * self.head.row()
    }
    /// Where the held matrix `which` is in shared memory, if it is there.
    fn held_at(self, which: usize) -> Option<usize> {
        let place = (which + self.held_in_shared()).checked_sub(2)?;
        Some(4 * tile(self.head) + place * HELD * self.head.row())
    }
}

/// Rows that a block holds.
const HELD: usize = 64;

const DQ: (Holds, &[&str]) = (Holds::Queries, &["dq"]);

pub fn files() -> Vec<File> {
    let mut t = Text::default();
    t.head(HEAD, ("7.0", "sm_80"));
    delta(&mut t, "attention_grad_sm80_delta", Stored::Bf16);
    for (holds, outs) in [DQ, (Holds::Keys, &["dk", "dv"])] {
        HEADS.into_iter().for_each(|head| gradient(&mut t, Kernel { head, holds, outs }));
    }
    vec![t.finish("attention_grad_sm80.ptx"), wide()]
}

/// Heads of 256.
fn wide() -> File {
    let kernels: [_; 3] = [DQ, (Holds::Keys, &["dk"]), (Holds::Keys, &["dv"])];
    let kernels = kernels.map(|(holds, outs)| Kernel { head: WIDE, holds, outs });
    let shared = kernels.map(Kernel::shared).into_iter().max().unwrap_or(0) + ALIGNING;
    let mut t = Text::default();
    t.head(&HEAD_WIDE.replace("{SHARED}", &shared.to_string()), ("7.0", "sm_80"));
    t.line(".extern .shared .align 16 .b8 tiles[];\n");
    kernels.into_iter().for_each(|k| gradient(&mut t, k));
    t.finish("attention_grad_wide_sm80.ptx")
}

/// Bytes of a tile; a stage has two.
fn tile(head: Head) -> usize {
    head.step() * head.row()
}

fn begin(t: &mut Text, k: Kernel) {
    let (head, queries) = (k.head, k.queries());
    let params: Vec<_> = k.outs.iter().map(|out| ("u64", *out)).chain(INPUTS).collect();
    let name = match k.outs {
        ["dq"] => "sm80_q",
        ["dk"] => "wide_sm80_k",
        ["dv"] => "wide_sm80_v",
        _ => "sm80_kv",
    };
    let name = if head.d == WIDE.d && queries { "wide_sm80_q" } else { name };
    let more = if queries && head.d == 64 { " .maxnreg 192" } else { "" };
    t.entry_within(&format!("attention_grad_{name}_{}", head.d), &params, (THREADS, more));
    open(t, head, (head.d != WIDE.d).then_some(k.shared()));
    let (n, of_query) = (k.columns(), if queries { 2 } else { k.columns() / 4 });
    let fragments = |which| if k.held_at(which).is_some() { 4 } else { head.d / 4 };
    t.code(format!(
        ".reg .f32 %sa<{}>, %sb<{}>, %s<{2}>, %e<{2}>, %lse<{of_query}>, %delta<{of_query}>;
         .reg .b32 %ha<{3}>, %hb<{5}>, %fs<{4}>, %fe<{4}>;
         .reg .u64 %pa, %pb, %out<2>, %lsep, %deltap;
         .reg .u32 %la, %lb, %fill, %use, %held, %lv, %last, %end, %nhead, %tok, %left, %apart, %mine; .reg .pred %in<2>",
        if k.of_ds() { head.d / 2 } else { 1 },
        if k.of_p() { head.d / 2 } else { 1 },
        n / 2,
        fragments(0),
        n / 4,
        fragments(1)
    ));
    t.code("mov.u32 %x, %ctaid.x");
    if queries {
        t.code("mov.u32 %y, %nctaid.x; sub.u32 %x, %y, %x; sub.u32 %x, %x, 1");
    }
    entry_of_list(t);
    t.code("ld.param.u64 %lsep, [lse]; ld.param.u64 %deltap, [delta]; div.u32 %z, %hq, %hkv; mov.u32 %x, %ctaid.y");
    match k.holds {
        Holds::Queries => t.code("mov.u32 %head, %x; div.u32 %group, %head, %z"),
        Holds::Keys => t.code("mov.u32 %group, %x; mul.lo.u32 %head, %group, %z; add.u32 %last, %head, %z"),
    }
    lanes(t, head, "%la", Walk::RowsFirst);
    lanes(t, head, "%lb", Walk::PiecesFirst);
}

/// Both matrices of the held rows: fragments of the warp's 16 rows from global memory, zero beyond them and the head, or
/// the start of a copy to shared memory, after the stages.
fn hold(t: &mut Text, k: Kernel, (names, which): ([&str; 2], &str), apart: &str) {
    t.code("shl.b32 %held, %warp, 4; add.u32 %mine, %held, %g");
    for (i, (into, name)) in ["%ha", "%hb"].into_iter().zip(names).enumerate() {
        if i == 1 && !k.of_ds() {
            continue; // dv needs no dp
        }
        if let Some(to) = k.held_at(i) {
            at_head(t, "%pb", (name, which));
            let rows = HELD;
            copy(
                t,
                k.head,
                &Copy { pointer: "%pb", from: "%first", count: "%count", apart, rows, to: (None, to) },
            );
            continue;
        }
        for high in 0..2 {
            t.code(format!(
                "add.u32 %x, %mine, {}; setp.lt.u32 %q, %x, %count; add.u32 %x, %x, %first; ld.param.u64 %row, [{name}];
                 mad.wide.u32 %row, %x, {apart}, %row; mul.lo.u32 %x, {which}, %d; add.u32 %x, %x, %pair;
                 mad.wide.u32 %row, %x, 2, %row",
                8 * high
            ));
            for half in 0..2 * k.head.depth() {
                let r = format!("{into}{}", 4 * (half / 2) + 2 * (half % 2) + high);
                t.code(format!(
                    "setp.gt.u32 %p, %d, {}; and.pred %p, %p, %q; mov.b32 {r}, 0; @%p ld.global.nc.b32 {r}, [%row+{}]",
                    8 * half,
                    16 * half
                ));
            }
        }
    }
    if k.held_in_shared() > 0 {
        t.code(format!("mad.lo.u32 %lv, %warp, {}, %la", 16 * k.head.row()));
    }
}

/// Starts the copies of the tiles at token %tok, which have %left valid rows, into the stage at %fill.
fn fetch(t: &mut Text, head: Head, (pa, pb): (&str, &str), apart: &str) {
    for (pointer, to) in [(pa, 0), (pb, tile(head))] {
        let c =
            Copy { pointer, from: "%tok", count: "%left", apart, rows: head.step(), to: (Some("%fill"), to) };
        copy(t, head, &c);
    }
    t.code(format!("xor.b32 %fill, %fill, {}", 2 * tile(head)));
}

fn gradient(t: &mut Text, k: Kernel) {
    let Kernel { head, holds, .. } = k;
    begin(t, k);
    match holds {
        Holds::Queries => {
            hold(t, k, (["q", "dout"], "%head"), "%wq");
            at_head(t, "%pa", ("k", "%group"));
            at_head(t, "%pb", ("v", "%group"));
            open_queries(t, head);
        }
        Holds::Keys => {
            hold(t, k, (["k", "v"], "%group"), "%wkv");
            open_keys(t);
        }
    }
    for (sums, some) in [("%sa", k.of_ds()), ("%sb", k.of_p())] {
        (0..head.d / 2).filter(|_| some).for_each(|i| t.code(format!("mov.f32 {sums}{i}, 0f00000000")));
    }
    t.code("mov.u32 %fill, 0; mov.u32 %use, 0; mov.u32 %nhead, %head; mov.u32 %next, %j0; sub.u32 %left, %end, %next");
    next_tiles(t, head, holds);
    t.code("cp.async.commit_group");
    t.label("TILES");
    t.code("cp.async.wait_group 0; bar.sync 0");
    advance(t, head, holds);
    t.code("@%done bra LAST");
    next_tiles(t, head, holds);
    t.label("LAST");
    t.code("cp.async.commit_group");
    unseen(t, head, holds);
    t.code("@%skip bra SUMMED");
    for first in (0..head.step()).step_by(k.columns()) {
        part(t, k, first);
    }
    t.label("SUMMED");
    t.code(format!(
        "mov.u32 %j0, %next; mov.u32 %head, %nhead; xor.b32 %use, %use, {}; @!%done bra TILES; cp.async.wait_group 0",
        2 * tile(head)
    ));
    finish(t, k);
    t.end();
}

/// %j0 counts keys of the row, up to %end; the warp's last query is at %wlast.
fn open_queries(t: &mut Text, head: Head) {
    t.code(
        "sub.u32 %x, %first, %start; add.u32 %end, %x, %count; add.u32 %mine, %mine, %x;
         add.u32 %wlast, %x, %held; add.u32 %wlast, %wlast, 15; setp.ge.u32 %p, %held, %count;
         selp.s32 %wlast, -1, %wlast, %p; add.u32 %held, %held, %x; mov.u32 %next, %x",
    );
    window::first_tile(t, "%next", head.step());
    for i in 0..2 {
        t.code(format!(
            "shl.b32 %x, %warp, 4; add.u32 %x, %x, %g; add.u32 %x, %x, {}; setp.lt.u32 %p, %x, %count;
             add.u32 %x, %x, %first",
            8 * i
        ));
        of_query(t, i);
    }
}

/// %j0 counts tokens, from the first key to %end; the warp's first key is %held.
fn open_keys(t: &mut Text) {
    t.code(
        "mov.u32 %j0, %first; add.u32 %mine, %mine, %first; setp.ge.u32 %p, %held, %count;
         add.u32 %held, %held, %first; mov.u32 %wlast, %held; selp.s32 %wlast, 0x7fffffff, %wlast, %p",
    );
    window::last_query(t);
}

/// %lse{i} = -logsumexp log2 e and %delta{i} of the query token %x of head %head, 0 where not %p.
fn of_query(t: &mut Text, i: usize) {
    let t = &mut t.part(
        "of_query",
        &Uses {
            reads: ".u32 %x, %hq, %head; .u64 %lsep, %deltap; .pred %p",
            changes: &format!(".f32 %lse{i}, %delta{i}"),
            scratch: ".u32 %y; .u64 %row",
        },
    );
    t.code(format!(
        "mad.lo.u32 %y, %x, %hq, %head; mad.wide.u32 %row, %y, 4, %lsep; mov.f32 %lse{i}, 0f00000000;
         @%p ld.global.nc.f32 %lse{i}, [%row]; mad.wide.u32 %row, %y, 4, %deltap; mov.f32 %delta{i}, 0f00000000;
         @%p ld.global.nc.f32 %delta{i}, [%row]; mul.f32 %lse{i}, %lse{i}, 0fBFB8AA3B"
    ));
}

/// Starts the copies of the tiles at %next (of head %nhead), which have %left valid rows.
fn next_tiles(t: &mut Text, head: Head, holds: Holds) {
    match holds {
        Holds::Queries => {
            t.code("add.u32 %tok, %start, %next");
            fetch(t, head, ("%pa", "%pb"), "%wkv");
        }
        Holds::Keys => {
            at_head(t, "%pa", ("q", "%nhead"));
            at_head(t, "%pb", ("dout", "%nhead"));
            t.code("mov.u32 %tok, %next");
            fetch(t, head, ("%pa", "%pb"), "%wq");
        }
    }
}

/// The place of the next tiles, and whether there are any.
fn advance(t: &mut Text, head: Head, holds: Holds) {
    let t = &mut t.part(
        "advance",
        &Uses {
            reads: ".u32 %j0, %end, %head, %first, %last",
            changes: ".u32 %next, %nhead, %left; .pred %done",
            ..Uses::default()
        },
    );
    t.code(format!("add.u32 %next, %j0, {}; setp.ge.u32 %done, %next, %end", head.step()));
    if holds == Holds::Keys {
        t.code("mov.u32 %nhead, %head; @!%done bra SAME; mov.u32 %next, %first; add.u32 %nhead, %head, 1");
        t.code("setp.ge.u32 %done, %nhead, %last");
        t.label("SAME");
    }
    t.code("sub.u32 %left, %end, %next");
}

/// %skip: all of the tiles at %j0 is masked for the warp.
fn unseen(t: &mut Text, head: Head, holds: Holds) {
    let t = &mut t.part(
        "unseen",
        &Uses {
            reads: ".u32 %j0, %held, %window; .s32 %wlast",
            changes: ".pred %skip",
            scratch: ".u32 %x; .pred %p",
        },
    );
    match holds {
        Holds::Queries => t.code(format!(
            "setp.gt.s32 %skip, %j0, %wlast; add.u32 %x, %j0, {}; add.u32 %x, %x, %window; setp.le.u32 %p, %x, %held",
            head.step() - 1
        )),
        Holds::Keys => t.code(format!(
            "add.u32 %x, %j0, {}; setp.lt.s32 %skip, %x, %wlast; add.u32 %x, %held, 15; add.u32 %x, %x, %window;
             setp.ge.u32 %p, %j0, %x",
            head.step() - 1
        )),
    }
    t.code("or.pred %skip, %skip, %p");
}

/// Scores of the columns `first ..` of the tiles, and their contribution to the sums.
fn part(t: &mut Text, k: Kernel, first: usize) {
    let (head, n) = (k.head, k.columns());
    let both = [("%s", "%ha"), ("%e", "%hb")];
    let both = if k.of_ds() { &both[..] } else { &both[..1] };
    (0..n / 2)
        .for_each(|i| both.iter().for_each(|(sums, _)| t.code(format!("mov.f32 {sums}{i}, 0f00000000"))));
    for (step, pair) in (0..head.depth() * n / 16).map(|x| (x / (n / 16), x % (n / 16))) {
        for (which, (sums, held)) in both.iter().enumerate() {
            let to = (Some("%use"), which * tile(head));
            let shared = k.held_at(which);
            if let Some(at) = shared.filter(|_| pair == 0) {
                let f = Fragments { lane: "%lv", to: (None, at), row: 0, step, transposed: false };
                fragments(t, head, held, &f);
            }
            let at = if shared.is_some() { 0 } else { 4 * step };
            let f = Fragments { lane: "%lb", to, row: first + 16 * pair, step, transposed: false };
            fragments(t, head, "%b", &f);
            (0..2).for_each(|j| multiply(t, (sums, 8 * pair + 4 * j), (held, at), ("%b", 2 * j)));
        }
    }
    mask(t, k.holds, (n, first));
    weigh(t, k, first);
    let all = [(0, "%fe", "%sa", k.of_ds()), (1, "%fs", "%sb", k.of_p())];
    for (pair, step) in (0..n / 16 * head.depth()).map(|x| (x / head.depth(), x % head.depth())) {
        for (which, left, sums, _) in all.iter().filter(|sum| sum.3) {
            let (to, row) = (which * tile(head), first + 16 * pair);
            let f = Fragments { lane: "%la", to: (Some("%use"), to), row, step, transposed: true };
            fragments(t, head, "%b", &f);
            (0..2).for_each(|j| multiply(t, (sums, 8 * step + 4 * j), (left, 4 * pair), ("%b", 2 * j)));
        }
    }
}

/// Converts scores to p and ds, packed as left operands where they are summed.
fn weigh(t: &mut Text, k: Kernel, first: usize) {
    let n = k.columns();
    if !k.queries() {
        t.say("queries are columns here");
        for j in 0..n / 4 {
            t.code(format!(
                "add.u32 %x, %j0, %pair; add.u32 %x, %x, {}; setp.lt.u32 %p, %x, %end",
                first + 8 * (j / 2) + j % 2
            ));
            of_query(t, j);
        }
    }
    for i in 0..n / 2 {
        let query = if k.queries() { i / 2 % 2 } else { 2 * (i / 4) + i % 2 };
        t.code(format!("fma.rn.f32 %s{i}, %s{i}, %c2, %lse{query}; ex2.approx.f32 %s{i}, %s{i}"));
        if k.of_ds() {
            t.code(format!("sub.f32 %e{i}, %e{i}, %delta{query}; mul.f32 %e{i}, %e{i}, %s{i}"));
        }
    }
    for pair in 0..n / 16 {
        for (to, from, _) in [("%fe", "%e", k.of_ds()), ("%fs", "%s", k.of_p())].iter().filter(|some| some.2)
        {
            pack(t, (to, 4 * pair), (from, 8 * pair));
        }
    }
}

/// -inf at masked places; most tiles have none.
fn mask(t: &mut Text, holds: Holds, (n, first): (usize, usize)) {
    let t = &mut t.part(
        "mask",
        &Uses {
            reads: ".u32 %j0, %held, %mine, %pair, %window",
            changes: &format!(".f32 %s<{}>", n / 2),
            scratch: ".u32 %x, %y, %r; .pred %p, %q",
        },
    );
    match holds {
        Holds::Queries => t.code(format!(
            "add.u32 %x, %j0, {}; setp.le.u32 %p, %x, %held; add.u32 %x, %j0, {first}; add.u32 %x, %x, %window;
             add.u32 %y, %held, 15; setp.gt.u32 %q, %x, %y",
            first + n - 1
        )),
        Holds::Keys => t.code(format!(
            "add.u32 %x, %j0, {first}; add.u32 %y, %held, 15; setp.ge.u32 %p, %x, %y; add.u32 %x, %j0, {};
             add.u32 %y, %held, %window; setp.lt.u32 %q, %x, %y",
            first + n - 1
        )),
    }
    t.code(format!("and.pred %p, %p, %q; @%p bra SEEN{first}"));
    for high in 0..2 {
        t.code(format!("add.u32 %r, %mine, {}; sub.u32 %r, %r, %j0; sub.u32 %r, %r, %pair", 8 * high));
        for j in 0..n / 4 {
            let s = format!("%s{}", 4 * (j / 2) + 2 * high + j % 2);
            let column = first + 8 * (j / 2) + j % 2;
            let distance = match holds {
                Holds::Queries => format!("sub.u32 %x, %r, {column}"),
                Holds::Keys => format!("sub.u32 %x, {column}, %r"),
            };
            t.code(format!("{distance}; setp.ge.u32 %p, %x, %window; selp.f32 {s}, 0fFF800000, {s}, %p"));
        }
    }
    t.label(&format!("SEEN{first}"));
}

fn finish(t: &mut Text, k: Kernel) {
    let apart = if k.queries() { "%wq" } else { "%wkv" };
    for out in k.outs {
        let sums = if *out == "dv" { "%sb" } else { "%sa" };
        t.code(format!(
            "ld.param.u64 %safe, [{out}]; mov.u32 %z, %ctaid.y; mul.lo.u32 %z, %z, %d; add.u32 %z, %z, %pair;
             cvt.u64.u32 %wide, %z; shl.b64 %wide, %wide, 1"
        ));
        for high in 0..2 {
            t.code(format!(
                "shl.b32 %x, %warp, 4; add.u32 %x, %x, %g; add.u32 %x, %x, {}; setp.lt.u32 %in{high}, %x, %count;
                 add.u32 %x, %x, %first; mad.wide.u32 %row, %x, {apart}, %wide; shl.b64 %row, %row, 1;
                 add.u64 %out{high}, %safe, %row",
                8 * high
            ));
        }
        let by = (*out != "dv").then_some("%scale");
        write(t, k.head, (sums, 0), ("%out", "%in"), [by, by]);
    }
}

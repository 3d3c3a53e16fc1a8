//! The gradient of attention on the tensor cores of sm_90a. Both kernels have the same code, as on sm_80: a block
//! holds 128 rows in shared memory, a warpgroup 64 of them; tiles of the other side stream through four slots that
//! one thread of a third warpgroup fills. With held queries, keys stream and dq is summed; with held keys, queries of
//! all heads that share them stream, and dk and dv are summed.

use crate::flash::entry_of_list;
use crate::flash_sm90a::{self as flash, BLOCK, HELD, Ring, SIZES, Tile};
use crate::{File, Text, Uses, grad_scores_sm90a as scores, grad_sums_sm90a as sums, window};

const HEAD: &str = "
attention_grad_sm90a: dq[T, H D], dk[T, G D], dv[T, G D] from dout, the saved logsumexp and delta. Query i sees key j of its
row if 0 <= i - j < window (2^30: no window).
q, k, v and dout are bf16 rows, D is 64 or 128 exactly; delta is attention_grad_sm80.ptx's.

  q: block (x, h) holds q, dout of 128 queries   kv: block (x, g) holds k, v of 128 keys
  warpgroup 0, one thread of it:                         24 registers
      what is held, then a tile of the other side into each slot that is empty
  warpgroups 1, 2, 64 of the rows that are held each:    240 registers
     for tiles of S keys that they see:             for query heads h of g, for tiles of S queries that see them:
         s = q k^T;  dp = dout v^T                      s = k q^T;  dp = v dout^T                 wgmma m64nSk16
         p = 2^(s scale log2 e - logsumexp log2 e), 0 where not seen
         ds = p (dp - delta), 0 where not seen
         dq += bf16(ds) k                               dv += bf16(p) dout;  dk += bf16(ds) q     wgmma m64nDk16
     dq = scale dq                                  dk = scale dk

S = 64; 128 for q of D = 64. p is computed while dp is multiplied. What a tile adds to the sums is multiplied while the
scores of the next are, and its slot is given back then (kv of D = 128 has too few registers and waits before). p and ds are
left operands from the registers where they were computed; a tile that was read row by row for the scores is read across its
rows for the sums. A warpgroup that sees nothing of a tile gives it back. logsumexp and delta of queries that stream: two a
lane, asked for a tile ahead, spread by shuffles.
Sums: in the order of tiles, of heads, inside as the tensor core has it; nothing is added atomically.
A tile may reach beyond its row: into keys that no query sees, or another row's queries. p and ds are 0 there, whatever
stands there; 0 times a number that is not finite is none, but such a number of another row makes that row's own part of
the same matrix (dq of k, dk of q, dv of dout) not finite as well, so that the microbatch ends with a fault either way.
launch: grid (blocks of 128 tokens, H or G), 384 threads, dynamic shared memory as much as the budget says; q: the last
block first.
map_q, map_k, map_v, map_dout: boxes 64 x 64 of the bf16 rows [T, H D] or [T, G D].
registers: D / 2 sums (kv: twice), S / 2 scores and dp each, S / 4 packed (kv: twice), logsumexp and delta, addresses.
budget: 168 registers, {SHARED} bytes of shared memory
promises: HGMMA UTMALDG USETMAXREG
";

/// The side that a block holds.
#[derive(Clone, Copy, PartialEq, Eq)]
pub enum Holds {
    Queries,
    Keys,
}

/// One entry.
#[derive(Clone, Copy)]
pub struct Kernel {
    /// Head size.
    pub d: usize,
    pub holds: Holds,
}

impl Kernel {
    /// Whether a tile's contribution and the next tile's scores are multiplied together: kv of D = 128 lacks the
    /// registers.
    pub fn overlaps(self) -> bool {
        self.d == 64 || self.holds == Holds::Queries
    }
    /// Rows of a streamed tile.
    pub fn step(self) -> usize {
        if self.d == 64 && self.holds == Holds::Queries { 128 } else { 64 }
    }
    pub fn held(self) -> Tile {
        Tile { d: self.d, rows: HELD }
    }
    pub fn streams(self) -> Tile {
        Tile { d: self.d, rows: self.step() }
    }
    /// Two tiles are held, and a slot has two.
    pub fn ring(self) -> Ring {
        Ring { held: 2 * self.held().bytes(), slots: 4, bytes: 2 * self.streams().bytes() }
    }
}

/// Rows of a box of every map.
const BOX: usize = 64;
const MAPS: [&str; 4] = ["map_q", "map_k", "map_v", "map_dout"];

pub fn files() -> Vec<File> {
    let kernels: Vec<Kernel> = [Holds::Queries, Holds::Keys]
        .into_iter()
        .flat_map(|holds| SIZES.map(|d| Kernel { d, holds }))
        .collect();
    let shared = kernels.iter().map(|k| k.ring().shared()).max().unwrap_or(0);
    let mut t = Text::default();
    t.head(&HEAD.replace("{SHARED}", &shared.to_string()), ("8.0", "sm_90a"));
    t.line(".extern .shared .align 16 .b8 tiles[];\n");
    kernels.into_iter().for_each(|k| gradient(&mut t, k));
    vec![t.finish("attention_grad_sm90a.ptx")]
}

fn gradient(t: &mut Text, k: Kernel) {
    begin(t, k);
    flash::fills(t);
    fill(t, k);
    flash::multiplies(t);
    rows(t, k);
    sums::tiles(t, k);
    sums::store(t, k);
    t.label("END");
    t.end();
}

fn begin(t: &mut Text, k: Kernel) {
    let (name, outs): (_, &[(&str, &str)]) = match k.holds {
        Holds::Queries => ("q", &[("u64", "dq")]),
        Holds::Keys => ("kv", &[("u64", "dk"), ("u64", "dv")]),
    };
    let maps =
        [("align 64 .b8", "map_q[128]"), ("align 64 .b8", "map_k[128]"), ("align 64 .b8", "map_v[128]")];
    let rest = [
        ("align 64 .b8", "map_dout[128]"),
        ("u64", "lse"),
        ("u64", "delta"),
        ("u64", "blocks"),
        ("u32", "hq"),
        ("u32", "hkv"),
        ("f32", "scale"),
        window::PARAM,
    ];
    let params: Vec<_> = outs.iter().copied().chain(maps).chain(rest).collect();
    t.entry_within(&format!("attention_grad_sm90a_{name}_{}", k.d), &params, BLOCK);
    flash::open(t, k.ring(), &MAPS);
    let (sums, scores) = (k.d / 2, k.step() / 2);
    let keys = k.holds == Holds::Keys;
    t.code(format!(
        ".reg .f32 %ga<{sums}>, %gb<{}>, %s<{scores}>, %e<{scores}>, %lse<2>, %delta<2>;
         .reg .b32 %fs<{}>, %fe<{}>;
         .reg .u64 %at, %ha, %hb, %along, %across, %ta, %tb, %wa, %wb, %lsep, %deltap, %out<2>;
         .reg .u32 %lasthead, %j0, %end, %column, %columnkv, %held, %mine, %r, %limit, %rows, %last, %now;
         .reg .s32 %seen; .reg .pred %skip, %whole, %pending, %in<2>",
        if keys { sums } else { 1 },
        if keys { k.step() / 4 } else { 1 },
        k.step() / 4,
    ));
    t.code("mov.u32 %x, %ctaid.x");
    if !keys {
        t.code("mov.u32 %y, %nctaid.x; sub.u32 %x, %y, %x; sub.u32 %x, %x, 1");
    }
    entry_of_list(t);
    t.code("div.u32 %z, %hq, %hkv; mov.u32 %x, %ctaid.y");
    match k.holds {
        Holds::Queries => {
            t.code(
                "mov.u32 %head, %x; div.u32 %group, %head, %z; add.u32 %end, %first, %count; sub.u32 %r, %first, %start",
            );
            window::first_tile(t, "%r", k.step());
            t.code("add.u32 %j0, %start, %j0");
        }
        Holds::Keys => {
            t.code(
                "mov.u32 %group, %x; mul.lo.u32 %head, %group, %z; add.u32 %lasthead, %head, %z; mov.u32 %j0, %first",
            );
            window::last_query(t);
        }
    }
}

/// The one thread that fills: the held tiles, then the streamed ones in the order of their use.
fn fill(t: &mut Text, k: Kernel) {
    let t = &mut t.part("fill", &Uses { reads: ".u32 %group, %first, %end, %lasthead, %bars, %base; .u64 %map_q, %map_k, %map_v, %map_dout", changes: ".u32 %slot, %j0, %head", scratch: ".u32 %column, %columnkv, %parity, %bar, %to, %x, %y; .pred %p" });
    t.code(format!("mul.lo.u32 %column, %head, {0}; mul.lo.u32 %columnkv, %group, {0}", k.d));
    let (held, streams, [own, other]) = match k.holds {
        Holds::Queries => (["%map_q", "%map_dout"], ["%map_k", "%map_v"], ["%column", "%columnkv"]),
        Holds::Keys => (["%map_k", "%map_v"], ["%map_q", "%map_dout"], ["%columnkv", "%column"]),
    };
    flash::hold(t, k.ring());
    held.iter().for_each(|map| flash::copy(t, map, (own, "%first"), (k.held(), BOX)));
    t.label("FILL");
    t.code(format!("mul.lo.u32 %column, %head, {}", k.d));
    flash::give(t, k.ring(), "EMPTY");
    streams.iter().for_each(|map| flash::copy(t, map, (other, "%j0"), (k.streams(), BOX)));
    advance(t, k);
    t.code("@%p bra FILL");
}

/// The place of the next tile: %j0, and its head; %p: there is one.
pub fn advance(t: &mut Text, k: Kernel) {
    let t = &mut t.part(
        "advance",
        &Uses {
            reads: ".u32 %end, %first, %lasthead",
            changes: ".u32 %j0, %head; .pred %p",
            scratch: ".u32 %x",
        },
    );
    t.code(format!("add.u32 %j0, %j0, {}; setp.lt.u32 %p, %j0, %end", k.step()));
    if k.holds == Holds::Keys {
        t.code(
            "selp.u32 %j0, %j0, %first, %p; selp.u32 %x, 0, 1, %p; add.u32 %head, %head, %x;
             setp.lt.u32 %p, %head, %lasthead",
        );
    }
}

/// A multiplying thread's values of its held rows, in tokens like %j0. %held is the first row of its warpgroup, %mine
/// its own first row; its other row is 8 rows below. %in<2>: whether they are outputs.
fn rows(t: &mut Text, k: Kernel) {
    t.code(
        "ld.param.u64 %lsep, [lse]; ld.param.u64 %deltap, [delta]; shl.b32 %x, %wg, 6; add.u32 %held, %first, %x;
         add.u32 %rows, %first, %count",
    );
    t.say("the last tile that the warpgroup sees, or the first; none where it has no rows");
    match k.holds {
        Holds::Queries => {
            t.code("add.u32 %seen, %held, 63; setp.ge.u32 %p, %x, %count; selp.s32 %seen, -1, %seen, %p")
        }
        Holds::Keys => t.code(format!(
            "sub.u32 %seen, %held, {}; setp.ge.u32 %p, %x, %count; selp.s32 %seen, 0x7fffffff, %seen, %p",
            k.step() - 1
        )),
    }
    t.code("and.b32 %x, %warp, 3; shl.b32 %x, %x, 4; add.u32 %mine, %held, %x; add.u32 %mine, %mine, %g");
    for i in 0..2 {
        t.code(format!("add.u32 %x, %mine, {}; setp.lt.u32 %in{i}, %x, %rows", 8 * i));
    }
    match k.holds {
        Holds::Queries => scores::of_rows(t),
        Holds::Keys => scores::ask(t),
    }
}

//! Sums of the gradient of attention on sm_90a: the contributions of tiles, and the f32 rows of dq, or of dk and dv,
//! that are stored from them.

use crate::attention_grad_sm90a::{Holds, Kernel, advance};
use crate::flash_sm90a::{self as flash, Left, Operand, Sums};
use crate::operand::Layout;
use crate::{Text, grad_scores_sm90a as scores};

/// Adds tiles to sums. The wait for a tile's contribution, and the release of its slot, come after the start of the
/// next tile's scores. The two slots after it can be filled meanwhile, so that one in between may be skipped.
pub fn tiles(t: &mut Text, k: Kernel) {
    let (keys, ring) = (k.holds == Holds::Keys, k.ring());
    begin(t, k);
    flash::held(t, ring);
    t.label("TILE");
    flash::take(t, ring, "FULL", ("%now", "%at"));
    if keys {
        t.code(
            "setp.lt.s32 %skip, %j0, %seen; add.u32 %x, %held, 63; add.u32 %x, %x, %window; setp.ge.u32 %p, %j0, %x",
        );
    } else {
        t.code(format!(
            "setp.gt.s32 %skip, %j0, %seen; add.u32 %x, %j0, %window; add.u32 %x, %x, {}; setp.le.u32 %p, %x, %held",
            k.step() - 1
        ));
    }
    t.code("or.pred %skip, %skip, %p; @%skip bra SKIP");
    multiply(t, k);
    weigh(t, k);
    add(t, k);
    t.code("bra NEXT");
    t.label("SKIP");
    flash::release(t, ring, "%now");
    t.label("NEXT");
    advance(t, k);
    if keys {
        t.code("@!%p bra DONE");
        scores::ask(t);
        t.code("bra TILE");
        t.label("DONE");
    } else {
        t.code("@%p bra TILE");
    }
    if k.overlaps() {
        flash::wait(t, 0);
    }
}

/// Descriptors of this warpgroup's held tiles (%ha, %hb) and of the first slot's first tile; sums are 0.
fn begin(t: &mut Text, k: Kernel) {
    let (held, streams) = (k.held(), k.streams());
    t.code("shl.b32 %y, %wg, 13; add.u32 %y, %base, %y");
    flash::describe(t, "%ha", "%y", (held, Layout::AlongK));
    t.code(format!("add.u64 %hb, %ha, {}; add.u32 %y, %base, {}", held.bytes() / 16, k.ring().held));
    flash::describe(t, "%along", "%y", (streams, Layout::AlongK));
    flash::describe(t, "%across", "%y", (streams, Layout::AcrossK));
    for i in 0..k.d / 2 {
        t.code(format!("mov.f32 %ga{i}, 0f00000000"));
        if k.holds == Holds::Keys {
            t.code(format!("mov.f32 %gb{i}, 0f00000000"));
        }
    }
    t.code("setp.ne.u32 %pending, %t, %t; mov.u32 %last, %bars");
}

/// %s and %e: scores, and dout v, one group each.
fn multiply(t: &mut Text, k: Kernel) {
    let (held, streams) = (k.held(), k.streams());
    t.code(format!(
        "add.u64 %ta, %along, %at; add.u64 %tb, %ta, {0}; add.u64 %wa, %across, %at; add.u64 %wb, %wa, {0}",
        streams.bytes() / 16
    ));
    flash::fence(t);
    for (sums, left, right) in [("%s", "%ha", "%ta"), ("%e", "%hb", "%tb")] {
        let left = Left::Shared(Operand { descriptor: left, tile: held, layout: Layout::AlongK });
        let right = Operand { descriptor: right, tile: streams, layout: Layout::AlongK };
        flash::multiply(t, (sums, k.step(), Sums::Set), left, right, k.d / 16);
        flash::commit(t);
    }
    if k.overlaps() {
        t.say("what the tile before adds is added");
        flash::wait(t, 2);
        t.code(format!("@%pending mbarrier.arrive.shared::cta.b64 _, [%last+{}]", 8 * k.ring().slots));
    }
}

/// p and ds of them, as left operands.
fn weigh(t: &mut Text, k: Kernel) {
    t.say("the scores");
    flash::wait(t, 1);
    scores::whole(t, k);
    t.code("@%whole bra SEEN");
    scores::hide(t, k, ("%s", "0fFF800000"));
    t.label("SEEN");
    scores::probabilities(t, k);
    t.say("their gradients; without the branch the compiler waits before it computes what stands above");
    t.code("@!%whole bra PARTLY");
    flash::wait(t, 0);
    t.code("bra BOTH");
    t.label("PARTLY");
    flash::wait(t, 0);
    scores::hide(t, k, ("%e", "0f00000000"));
    t.label("BOTH");
    scores::gradients(t, k);
}

/// The tile's contribution to the sums.
fn add(t: &mut Text, k: Kernel) {
    let both = [("%gb", "%fs", "%wb"), ("%ga", "%fe", "%wa")];
    flash::fence(t);
    for (sums, left, right) in if k.holds == Holds::Keys { &both[..] } else { &both[1..] } {
        let right = Operand { descriptor: right, tile: k.streams(), layout: Layout::AcrossK };
        flash::multiply(t, (sums, k.d, Sums::Add), Left::Registers(left), right, k.step() / 16);
    }
    flash::commit(t);
    if k.overlaps() {
        t.code("mov.u32 %last, %now; and.pred %pending, %one, %one");
    } else {
        flash::wait(t, 0);
        flash::release(t, k.ring(), "%now");
    }
}

/// Stores sums as f32 rows, if they are outputs.
pub fn store(t: &mut Text, k: Kernel) {
    let outs: &[(&str, &str, &str, &str)] = match k.holds {
        Holds::Queries => &[("dq", "%ga", "%hq", "%head")],
        Holds::Keys => &[("dk", "%ga", "%hkv", "%group"), ("dv", "%gb", "%hkv", "%group")],
    };
    for (out, sums, heads, head) in outs {
        t.code(format!(
            "ld.param.u64 %safe, [{out}]; mul.lo.u32 %x, {head}, {0}; add.u32 %x, %x, %pair; mul.wide.u32 %wide, %x, 4;
             add.u64 %safe, %safe, %wide; mul.lo.u32 %y, {heads}, {1}; mad.wide.u32 %out0, %mine, %y, %safe;
             mul.wide.u32 %wide, %y, 8; add.u64 %out1, %out0, %wide",
            k.d,
            4 * k.d
        ));
        if *sums == "%ga" {
            (0..k.d / 2).for_each(|i| t.code(format!("mul.f32 %ga{i}, %ga{i}, %scale")));
        }
        t.say("pairs are stored as such where all of them begin at multiples of 8 bytes");
        t.code(format!(
            "cvt.u32.u64 %x, %safe; and.b32 %x, %x, 7; setp.ne.u32 %p, %x, 0; @%p bra SINGLES_{out}"
        ));
        let places = || (0..k.d / 8).flat_map(|n| (0..2).map(move |high| (n, high)));
        for (n, high) in places() {
            let i = 4 * n + 2 * high;
            t.code(format!(
                "@%in{high} st.global.v2.f32 [%out{high}+{}], {{{sums}{i}, {sums}{}}}",
                32 * n,
                i + 1
            ));
        }
        t.code(format!("bra STORED_{out}"));
        t.label(&format!("SINGLES_{out}"));
        for (n, high) in places() {
            for c in 0..2 {
                let i = 4 * n + 2 * high + c;
                t.code(format!("@%in{high} st.global.f32 [%out{high}+{}], {sums}{i}", 32 * n + 4 * c));
            }
        }
        t.label(&format!("STORED_{out}"));
    }
}

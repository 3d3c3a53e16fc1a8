//! What becomes of the sums of the gradient of attention on sm_90a: f32 rows of dq, or of dk and dv.

use super::Text;
use super::attention_grad_sm90a::{Holds, Kernel};

/// Sums to f32 rows, where they are outputs.
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

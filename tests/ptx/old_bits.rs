use crate::attention_sm80::{both, inputs};
use crate::bench::{Mat, Out, run, weight};
use crate::device::{Interpreted, device_of, device_with_at};
use crate::op_cases::tokens;
use finetune::backend::cuda::Flash;
use finetune::backend::{Activation, Backend, Cuda, Fused, Heads};
use finetune::numeric::dtype::Dtype;

fn old(file: &str, more: &str) -> String {
    let text = std::fs::read_to_string(format!("/tmp/ptx/before/{file}")).unwrap();
    text.split(".visible .entry ")
        .enumerate()
        .map(|(i, part)| {
            let body = if i == 0 || part.contains("_delta(") {
                part.to_string()
            } else {
                part.replacen("\n) .reqntid", &format!("{more}\n) .reqntid"), 1)
            };
            if i == 0 { body } else { format!(".visible .entry {body}") }
        })
        .collect()
}

fn bits(x: &[Vec<f32>]) -> Vec<u32> {
    x.iter().flatten().map(|x| x.to_bits()).collect()
}

#[test]
fn tmp_attention_has_old_bits() {
    let flash = Flash { forward: true, backward: true };
    let tiers: [(&[&'static str], (u32, u32), &[usize], &dyn Fn(Cuda<Interpreted>) -> Cuda<Interpreted>); 3] = [
        (&["attention.ptx", "attention_grad.ptx"], (7, 0), &[20, 68, 132], &|d| d),
        (&["attention_sm80.ptx", "attention_grad_sm80.ptx"], (8, 0), &[64, 72, 128], &|d| d.bf16().unwrap()),
        (&["attention_sm90a.ptx", "attention_grad_sm90a.ptx"], (9, 0), &[64, 128], &move |d| {
            d.bf16().unwrap().attending(flash)
        }),
    ];
    for (files, capability, sizes, open) in tiers {
        for size in sizes {
            for bounds in [&[0u32, 3, 140][..], &[0, 5, 38], &[0, 130, 131]] {
                let t = *bounds.last().unwrap() as usize;
                let heads = Heads::new(2, 1, *size);
                let x = inputs(t, heads);
                let new = both(&mut open(device_of(capability, 0)), &x, heads, bounds).unwrap();
                for file in files {
                    let text = old(file, ",\n    .param .u32 window");
                    let got = both(&mut open(device_with_at(capability, (file, &text), 0)), &x, heads, bounds).unwrap();
                    assert!(bits(&got) == bits(&new), "{file} {size} {bounds:?}");
                    println!("same: {file} {size} {bounds:?}");
                }
            }
        }
    }
}

fn gates(mut d: Cuda<Interpreted>) -> Vec<Vec<f32>> {
    let mut g = Mat::random(9, 300, 1).map(|x| 12.0 * x);
    g.v[..6].copy_from_slice(&[200.0, -200.0, -88.8, 0.0, 1e20, -1e20]);
    let (u, dout) = (Mat::random(9, 300, 2), Mat::random(9, 300, 3));
    let outs = [Out::Poison(9, 300), Out::Poison(9, 300), Out::Holds(g.clone()), Out::Holds(u.clone())];
    run("gates", &mut d, (&[&g, &u, &dout], &outs), |d, i, o| {
        let [a, b, g, u] = o else { unreachable!() };
        d.gated(a.view_mut(), i[0], i[1], Activation::SwiGlu);
        d.gated_for_linear(b.view_mut(), i[0], i[1], Activation::SwiGlu);
        d.gated_grad(g.view_mut(), u.view_mut(), i[2], Activation::SwiGlu);
    })
    .unwrap()
}

#[test]
fn tmp_gates_have_old_bits() {
    let new = gates(device_of((8, 0), 0).bf16().unwrap());
    for (was, is) in [("swiglu", "gated"), ("swiglu_grad", "gated_grad"), ("swiglu_sm80", "gated_sm80")] {
        let text = old(&format!("{was}.ptx"), ",\n    .param .f32 line,\n    .param .f32 cube");
        let text = text.replace(&format!(".entry {was}("), &format!(".entry {is}("));
        let file: &'static str = Box::leak(format!("{is}.ptx").into_boxed_str());
        let got = gates(device_with_at((8, 0), (file, &text), 0).bf16().unwrap());
        assert!(bits(&got) == bits(&new), "{is}");
        println!("same: {is}");
    }
    for dtype in [Dtype::F32, Dtype::Bf16, Dtype::F16] {
        let on = |mut d: Cuda<Interpreted>| {
            let table = Mat::random(11, 300, 1);
            run("embed", &mut d, (&[], &[Out::Poison(9, 300)]), |d, _, o| {
                let (w, t) = (weight(d, &table, dtype), tokens(d, &[0, 9]));
                d.embed(o[0].view_mut(), &w, &t, 1.0);
            })
            .unwrap()
        };
        let text = old("embed.ptx", ",\n    .param .f32 scale");
        assert!(bits(&on(device_of((7, 0), 0))) == bits(&on(device_with_at((7, 0), ("embed.ptx", &text), 0))));
        println!("same: embed {dtype:?}");
    }
}

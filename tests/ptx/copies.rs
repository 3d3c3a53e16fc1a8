//! Cached bf16 copies: a second read of the same memory uses the same copy, and a write in between causes a new one.

use crate::bench::{Mat, weight};
use crate::device::{device_at, device_bf16};
use crate::op_cases::tokens;
use crate::step::{Same, packed, qwen};
use finetune::backend::cuda::Driver;
use finetune::backend::{
    Activation, AttentionSaved, Backend, Cuda, Delta, DeltaGrad, DeltaHeads, DeltaSaved, DropoutKey, Fused,
    Gates, GatesGrad, Heads, LmHeadLoss, LoraGrad, LoraPart, Norm, Product, Qkv, QkvGrad, TokenRows,
    Transpose, View, ViewMut, Write, view, view_mut,
};
use finetune::model::decoder::{Build, Decoder, Keep};
use finetune::model::lora::{LoraSpec, MODULES};
use finetune::model::stage::Stage;
use finetune::numeric::dtype::Dtype;

type Device = Cuda<Box<dyn Driver>>;
type Memory = <Device as Backend>::Memory;
type Weight = <Device as Backend>::Weight;

/// Every matrix is square, so that each fits every op.
const N: usize = 8;
const ONE: Heads = Heads::new(1, 1, N);

/// The inputs of ops: matrices, a frozen one, and memory for outputs that are not compared.
struct Given {
    x: Memory,
    y: Memory,
    frozen: Weight,
    spare: [Memory; 3],
}

fn of(m: &Memory) -> View<'_, Memory> {
    view(m, N, N)
}

/// One way to write a matrix.
type Writer = fn(&mut Device, ViewMut<Memory>, &mut Given);

fn product<'a>(g: &'a Given) -> Product<'a, Memory> {
    Product { a: of(&g.x), b: of(&g.y), transpose: Transpose::Neither, scale: 1.0 }
}

fn qkv(g: &Given) -> Qkv<'_, Memory> {
    Qkv { q: of(&g.x), k: of(&g.y), v: of(&g.x) }
}

fn gates(g: &Given) -> Gates<'_, Memory> {
    Gates { before: of(&g.x), after: of(&g.y), x: of(&g.x) }
}

/// One of the gradients of a convolution.
fn convolution_grad(d: &mut Device, out: ViewMut<Memory>, g: &mut Given, which: usize) {
    let tokens = tokens(d, &[0, N as u32]);
    let [a, b, _] = &mut g.spare;
    let mut rest = [view_mut(a, N, N), view_mut(b, N, N)].into_iter();
    let mut out = Some(out);
    let mut next = |i: usize| if i == which { out.take().unwrap() } else { rest.next().unwrap() };
    let grad = GatesGrad { before: next(0), after: next(1), x: next(2) };
    let gates = Gates { before: of(&g.x), after: of(&g.y), x: of(&g.x) };
    d.convolution_grad(grad, of(&g.x), gates, of(&g.y), &tokens);
}

fn ruled<'a>(x: &'a Memory, y: &'a Memory) -> Delta<'a, Memory> {
    let [beta, decay] = [y, x].map(|m| view(m, N, 1));
    Delta { q: of(x), k: of(y), v: of(x), beta, decay, rates: view(y, 2, 1), heads: ONE_RULE }
}

const ONE_RULE: DeltaHeads = DeltaHeads { values: 1, keys: 1, value_size: N, key_size: N };

/// The output of a delta rule, its errors or its state.
fn rule(d: &mut Device, out: ViewMut<Memory>, g: &mut Given, which: usize) {
    let tokens = tokens(d, &[0, N as u32]);
    let [a, b, _] = &mut g.spare;
    d.fill(view_mut(a, N, N), 0.5);
    d.fill(view_mut(b, N, N), 0.5);
    let mut rest = [view_mut(a, N, N), view_mut(b, N, N)].into_iter();
    let mut out = Some(out);
    let mut next = |i: usize| if i == which { out.take().unwrap() } else { rest.next().unwrap() };
    let (out, errors, state) = (next(0), next(1), next(2));
    d.delta_rule(out, errors, Some(state), ruled(&g.x, &g.y), &tokens);
}

/// One of the gradients of a delta rule.
fn rule_grad(d: &mut Device, out: ViewMut<Memory>, g: &mut Given, which: usize) {
    let tokens = tokens(d, &[0, N as u32]);
    let [a, b, c] = &mut g.spare;
    let [mut e, mut f] = [d.memory(N), d.memory(N)];
    let mut wide = [view_mut(a, N, N), view_mut(b, N, N), view_mut(c, N, N)].into_iter();
    let mut narrow = [view_mut(&mut e, N, 1), view_mut(&mut f, N, 1)].into_iter();
    let mut out = Some(out);
    let mut next = |i: usize| match out.take_if(|_| i == which) {
        Some(own) if i > 2 => ViewMut { cols: 1, ..own },
        Some(own) => own,
        None if i > 2 => narrow.next().unwrap(),
        None => wide.next().unwrap(),
    };
    let grad = DeltaGrad { dq: next(0), dk: next(1), dv: next(2), dbeta: next(3), ddecay: next(4) };
    let saved = DeltaSaved { out: of(&g.x), errors: of(&g.y) };
    d.delta_rule_grad(grad, of(&g.x), saved, ruled(&g.x, &g.y), &tokens);
}

/// One of the gradients of attention.
fn grads(d: &mut Device, out: ViewMut<Memory>, g: &mut Given, which: usize) {
    let tokens = tokens(d, &[0, N as u32]);
    let [a, b, lse] = &mut g.spare;
    d.fill(view_mut(lse, N, 1), 0.0);
    let mut rest = [view_mut(a, N, N), view_mut(b, N, N)].into_iter();
    let mut out = Some(out);
    let mut next = |i: usize| if i == which { out.take().unwrap() } else { rest.next().unwrap() };
    let grad = QkvGrad { dq: next(0), dk: next(1), dv: next(2) };
    let qkv = Qkv { q: of(&g.x), k: of(&g.y), v: of(&g.x) };
    let saved = AttentionSaved { qkv, out: of(&g.y), logsumexp: view(lse, N, 1) };
    d.attention_grad(grad, of(&g.x), saved, ONE, &tokens);
}

/// All matrices that verbs write, by verb and argument.
const WRITERS: &[(&str, Writer)] = &[
    ("upload", |d, out, _| d.upload(out, &[0.25; N * N])),
    ("fill", |d, out, _| d.fill(out, 0.5)),
    ("fill of one number", |d, out, _| {
        d.fill(ViewMut { memory: out.memory, offset: N + 3, rows: 1, cols: 1 }, 9.0);
    }),
    ("copy", |d, out, g| d.copy(out, of(&g.x))),
    ("add", |d, out, g| d.add(out, of(&g.x))),
    ("embed", |d, out, g| {
        let tokens = d.tokens(TokenRows {
            ids: &[7, 6, 5, 4, 3, 2, 1, 0],
            bounds: &[0, N as u32],
            past: 0,
            short: u32::MAX,
        });
        d.embed(out, &g.frozen, &tokens, 1.0);
    }),
    ("rmsnorm out", |d, out, g| {
        d.rmsnorm(out, view_mut(&mut g.spare[0], N, 1), of(&g.x), view(&g.y, 1, N), 1e-5);
    }),
    ("rmsnorm inv_rms", |d, out, g| {
        let [normed, ..] = &mut g.spare;
        d.rmsnorm(view_mut(normed, N, N), out, of(&g.x), view(&g.y, 1, 1), 1e-5);
    }),
    ("rmsnorm_grad", |d, out, g| {
        let inv_rms = view(&g.x, N, 1);
        let norm = Norm { gain: view(&g.y, 1, N), inv_rms };
        d.rmsnorm_grad(out, Write::Add, of(&g.x), of(&g.y), norm);
    }),
    ("linear", |d, out, g| d.linear(out, Write::Set, of(&g.x), &g.frozen)),
    ("linear_grad", |d, out, g| d.linear_grad(out, Write::Add, of(&g.x), &g.frozen)),
    ("matmul", |d, out, g| d.matmul(out, Write::Set, product(g))),
    ("bias", |d, out, g| d.bias(out, view(&g.x, 1, N))),
    ("rope", |d, out, g| {
        let tokens = tokens(d, &[0, N as u32]);
        d.rope(out, of(&g.x), &tokens);
    }),
    ("rope_grad", |d, out, g| {
        let tokens = tokens(d, &[0, N as u32]);
        d.rope_grad(out, of(&g.x), &tokens);
    }),
    ("attention out", |d, out, g| {
        let tokens = tokens(d, &[0, N as u32]);
        let mut lse = d.memory(N);
        d.attention(out, view_mut(&mut lse, N, 1), qkv(g), ONE, &tokens);
    }),
    ("attention logsumexp", |d, out, g| {
        let tokens = tokens(d, &[0, N as u32]);
        let mut attended = d.memory(N * N);
        let lse = ViewMut { memory: out.memory, offset: 0, rows: N, cols: 1 };
        d.attention(view_mut(&mut attended, N, N), lse, qkv(g), ONE, &tokens);
    }),
    ("attention_grad dq", |d, out, g| grads(d, out, g, 0)),
    ("attention_grad dk", |d, out, g| grads(d, out, g, 1)),
    ("attention_grad dv", |d, out, g| grads(d, out, g, 2)),
    ("attention_cached out", |d, out, g| {
        let mut lse = d.memory(N);
        d.attention_cached(out, view_mut(&mut lse, N, 1), qkv(g), ONE);
    }),
    ("attention_cached logsumexp", |d, out, g| {
        let mut attended = d.memory(N * N);
        let lse = ViewMut { memory: out.memory, offset: 0, rows: N, cols: 1 };
        d.attention_cached(view_mut(&mut attended, N, N), lse, qkv(g), ONE);
    }),
    ("scale_rows", |d, out, g| d.scale_rows(out, of(&g.x), view(&g.y, N, 1))),
    ("scale_rows_grad dx", |d, out, g| {
        let [dscales, ..] = &mut g.spare;
        d.scale_rows_grad(out, view_mut(dscales, N, 1), of(&g.x), view(&g.y, N, 1));
    }),
    ("scale_rows_grad dscales", |d, out, g| {
        let [dx, ..] = &mut g.spare;
        d.fill(view_mut(dx, N, N), 0.5);
        let dscales = ViewMut { memory: out.memory, offset: 0, rows: N, cols: 1 };
        d.scale_rows_grad(view_mut(dx, N, N), dscales, of(&g.x), view(&g.y, N, 1));
    }),
    ("gated", |d, out, g| d.gated(out, of(&g.x), of(&g.y), Activation::SwiGlu)),
    ("gated_grad gate", |d, out, g| {
        let [up, ..] = &mut g.spare;
        d.fill(view_mut(up, N, N), 0.5);
        d.gated_grad(out, view_mut(up, N, N), of(&g.y), Activation::SwiGlu);
    }),
    ("gated_grad up", |d, out, g| {
        let [gate, ..] = &mut g.spare;
        d.fill(view_mut(gate, N, N), 0.5);
        d.gated_grad(view_mut(gate, N, N), out, of(&g.y), Activation::SwiGlu);
    }),
    ("dropout", |d, out, g| {
        let tokens = tokens(d, &[0, N as u32]);
        let key = DropoutKey { seed: 1, step: 1, rows: &[0], module: 0, p: 0.5 };
        d.dropout(out, Write::Set, of(&g.x), key, &tokens);
    }),
    ("convolution", |d, out, g| {
        let tokens = tokens(d, &[0, N as u32]);
        d.convolution(out, gates(g), of(&g.y), &tokens);
    }),
    ("convolution_grad", |d, out, g| convolution_grad(d, out, g, 0)),
    ("convolution_grad", |d, out, g| convolution_grad(d, out, g, 1)),
    ("convolution_grad", |d, out, g| convolution_grad(d, out, g, 2)),
    ("convolution_silu", |d, out, g| {
        let tokens = tokens(d, &[0, N as u32]);
        d.convolution_silu(out, of(&g.x), of(&g.y), &tokens);
    }),
    ("convolution_silu_grad", |d, out, g| {
        let tokens = tokens(d, &[0, N as u32]);
        d.convolution_silu_grad(out, of(&g.x), of(&g.y), of(&g.y), &tokens);
    }),
    ("delta_rule out", |d, out, g| rule(d, out, g, 0)),
    ("delta_rule errors", |d, out, g| rule(d, out, g, 1)),
    ("delta_rule state", |d, out, g| rule(d, out, g, 2)),
    ("delta_rule_grad dq", |d, out, g| rule_grad(d, out, g, 0)),
    ("delta_rule_grad dk", |d, out, g| rule_grad(d, out, g, 1)),
    ("delta_rule_grad dv", |d, out, g| rule_grad(d, out, g, 2)),
    ("delta_rule_grad dbeta", |d, out, g| rule_grad(d, out, g, 3)),
    ("delta_rule_grad ddecay", |d, out, g| rule_grad(d, out, g, 4)),
    ("gather_rows", |d, out, g| {
        let rows = d.ids(&[7, 6, 5, 4, 3, 2, 1, 0]);
        d.gather_rows(out, of(&g.x), &rows);
    }),
    ("gather_rows_grad", |d, out, g| {
        let rows = d.ids(&[3, 1]);
        d.gather_rows_grad(out, view(&g.x, 2, N), &rows);
    }),
    ("cross_entropy losses", |d, out, g| {
        let [logits, ..] = &mut g.spare;
        d.copy(view_mut(logits, N, N), of(&g.x));
        let targets = d.ids(&[0; N]);
        let losses = ViewMut { memory: out.memory, offset: 0, rows: N, cols: 1 };
        d.cross_entropy(losses, view_mut(logits, N, N), &targets, None);
    }),
    ("cross_entropy logits", |d, out, g| {
        let targets = d.ids(&[0; N]);
        d.cross_entropy(view_mut(&mut g.spare[0], N, 1), out, &targets, None);
    }),
    ("lora", |d, out, g| {
        d.lora(out, view_mut(&mut g.spare[0], N, N), of(&g.x), (of(&g.y), of(&g.x)), 1.0);
    }),
    ("lora_linear y", |d, out, g| {
        let h = view_mut(&mut g.spare[0], N, N);
        let lora = LoraPart { h, x: of(&g.x), ab: (of(&g.y), of(&g.y)), scale: 1.0 };
        d.lora_linear((out, Write::Set), of(&g.x), &g.frozen, lora);
    }),
    ("lora_linear h", |d, out, g| {
        let lora = LoraPart { h: out, x: of(&g.x), ab: (of(&g.y), of(&g.y)), scale: 1.0 };
        d.lora_linear((view_mut(&mut g.spare[0], N, N), Write::Set), of(&g.x), &g.frozen, lora);
    }),
    ("lora_linear_grad dx", |d, out, g| {
        let mut dab = d.memory(2 * N * N);
        let ab = (of(&g.x), of(&g.y));
        let dab = view_mut(&mut dab, 1, 2 * N * N);
        let args = LoraGrad { dab, dy: of(&g.x), x: of(&g.y), h: of(&g.x), ab, scale: 1.0 };
        d.lora_linear_grad((out, Write::Set), &g.frozen, args);
    }),
    ("lora_linear_grad dA", |d, out, g| {
        let (a, b) = (view(&g.x, 4, N), view(&g.y, N, 4));
        let dab = ViewMut { memory: out.memory, offset: 0, rows: 1, cols: N * N };
        let args = LoraGrad { dab, dy: of(&g.x), x: of(&g.y), h: view(&g.x, N, 4), ab: (a, b), scale: 1.0 };
        d.lora_linear_grad((view_mut(&mut g.spare[0], N, N), Write::Set), &g.frozen, args);
    }),
    ("lm_head_loss losses", |d, out, g| {
        let losses = ViewMut { memory: out.memory, offset: 0, rows: N, cols: 1 };
        let args = LmHeadLoss { x: of(&g.x), head: &g.frozen, vocab: N, targets: &[1; N], chunk: 3 };
        d.lm_head_loss(losses, None, args);
    }),
    ("lm_head_loss dx", |d, out, g| {
        let losses = view_mut(&mut g.spare[0], N, 1);
        let args = LmHeadLoss { x: of(&g.x), head: &g.frozen, vocab: N, targets: &[1; N], chunk: 3 };
        d.lm_head_loss(losses, Some(out), args);
    }),
];

fn memory(d: &mut Device, key: u64) -> Memory {
    let mut memory = d.memory(N * N);
    d.upload(view_mut(&mut memory, N, N), &Mat::random(N, N, key).v);
    memory
}

/// The product of a matrix before and after a write.
fn before_and_after(mut d: Device, writer: Writer) -> [Vec<f32>; 2] {
    let frozen = weight(&mut d, &Mat::random(N, N, 3).coarse(), Dtype::Bf16);
    let spare = [0; 3].map(|_| d.memory(N * N));
    let mut given = Given { x: memory(&mut d, 1), y: memory(&mut d, 2), frozen, spare };
    let mut written = memory(&mut d, 5);
    let w = weight(&mut d, &Mat::random(N, N, 4).coarse(), Dtype::Bf16);
    let [mut before, mut after] = [0; 2].map(|_| d.memory(N * N));
    d.linear(view_mut(&mut before, N, N), Write::Set, of(&written), &w);
    writer(&mut d, view_mut(&mut written, N, N), &mut given);
    d.linear(view_mut(&mut after, N, N), Write::Set, of(&written), &w);
    [before, after].map(|y| {
        let mut out = vec![0.0; N * N];
        d.read(of(&y), &mut out).unwrap();
        out
    })
}

#[test]
fn a_copy_is_never_older_than_what_it_is_of() {
    for (name, writer) in WRITERS {
        let (Ok(keeps), Ok(other)) = (device_at((8, 0), 0).bf16(), device_at((8, 0), 0).bf16()) else {
            return;
        };
        let [before, after] = before_and_after(keeps, *writer);
        let want = before_and_after(other.spelled(), *writer);
        assert!(before != after, "{name} writes nothing that shows");
        assert!([before, after] == want, "{name}: an old copy was read");
    }
}

#[test]
fn every_verb_that_writes_is_tried() {
    let seam =
        std::fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/kernels/src/backend/mod.rs")).unwrap();
    let verbs = seam.split("\n    fn ").skip(1).filter_map(|rest| rest.split_once('('));
    let written: Vec<(&str, usize)> = verbs
        .map(|(name, rest)| (name, rest.split([';', '{']).next().unwrap_or_default()))
        .map(|(name, args)| (name, args.matches("ViewMut<").count() + 3 * args.matches("Grad<").count()))
        .filter(|(_, count)| *count > 0)
        .collect();
    assert!(written.len() > 15, "{written:?}");
    for (verb, count) in written {
        let tried = WRITERS.iter().filter(|(name, _)| name.split(' ').next() == Some(verb)).count();
        assert!(tried >= count, "{verb} writes {count} matrices, and {tried} are tried");
    }
}

/// The number of kernels that the work launches.
fn kernels(d: &mut Device, work: impl FnOnce(&mut Device)) -> u64 {
    let before = d.traffic().dispatches;
    work(d);
    d.traffic().dispatches - before
}

#[test]
fn what_was_narrowed_is_not_narrowed_again() {
    let Some(mut d) = device_bf16() else { return };
    let w = weight(&mut d, &Mat::random(N, N, 4).coarse(), Dtype::Bf16);
    let (x, mut y) = (memory(&mut d, 1), d.memory(N * N));
    let mut linear = |d: &mut Device, x: View<Memory>| {
        kernels(d, |d| d.linear(view_mut(&mut y, x.rows, N), Write::Set, x, &w))
    };
    assert_eq!([linear(&mut d, of(&x)), linear(&mut d, of(&x))], [2, 1], "narrowed once");
    assert_eq!(linear(&mut d, of(&x).rows(2, 3)), 2, "other rows are another matrix");
    // Freed memory leaves no copy for new memory at the same address.
    let address = format!("{x:?}");
    drop(x);
    let x = memory(&mut d, 1);
    let place = |text: &str| text.split("address: ").nth(1).unwrap().split(',').next().map(String::from);
    assert_eq!(place(&format!("{x:?}")), place(&address), "the same place");
    assert_eq!(linear(&mut d, of(&x)), 2, "but not the same memory");
    // The oldest copies are evicted.
    let many = [0; 5].map(|_| memory(&mut d, 1));
    many.iter().for_each(|x| assert_eq!(linear(&mut d, of(x)), 2));
    assert_eq!([linear(&mut d, of(&many[0])), linear(&mut d, of(&x))], [1, 2]);
    // No copy is kept between microbatches.
    d.read(of(&x), &mut [0.0; N * N]).unwrap();
    assert_eq!(linear(&mut d, of(&x)), 2);
}

#[test]
fn attention_and_its_gradient_narrow_q_k_and_v_once() {
    let Some(mut d) = device_bf16() else { return };
    let [x, y, z, dout, mut dq, mut dk, mut dv] = [1, 2, 3, 4, 5, 6, 7].map(|key| memory(&mut d, key));
    let (mut out, mut lse) = (d.memory(N * N), d.memory(N));
    let tokens = tokens(&mut d, &[0, N as u32]);
    let qkv = Qkv { q: of(&x), k: of(&y), v: of(&z) };
    let forward = kernels(&mut d, |d| {
        d.attention(view_mut(&mut out, N, N), view_mut(&mut lse, N, 1), qkv, ONE, &tokens);
    });
    let backward = kernels(&mut d, |d| {
        let [dq, dk, dv] = [&mut dq, &mut dk, &mut dv].map(|m| view_mut(m, N, N));
        let saved = AttentionSaved { qkv, out: of(&out), logsumexp: view(&lse, N, 1) };
        d.attention_grad(QkvGrad { dq, dk, dv }, of(&dout), saved, ONE, &tokens);
    });
    assert_eq!((forward, backward), (4, 4), "q, k, v, attention; dout, delta, dq, dk and dv");
}

#[test]
fn copies_take_no_more_than_is_said() {
    // Two query heads of 16 and one key/value head; widths 32 and 48.
    let config = qwen(3, 50, (32, 48), Heads::new(2, 1, 16));
    // q, k, v, attention's output, the widest input and its gradient, all in bf16.
    let said = 2 * (32 + 16 + 16 + 32 + 48 + 48);
    let targets = MODULES.map(String::from).to_vec();
    let lora = LoraSpec { rank: 4, alpha: 8.0, targets, seed: 1, ..LoraSpec::none() };
    let (batch, t) = (packed(50, 2, 9), 18);
    for keep in [Keep::Everything, Keep::Inputs, Keep::Parts([1, 1, 1])] {
        let most = |device: Device| {
            let build = Build { keep, ..Build::whole(&config) };
            let mut stage = Decoder::load(device, &config, &Same::new(config.clone()), &lora, build).unwrap();
            let mut gradient = vec![0.0; stage.layout().len()];
            stage.gradient(&batch, &mut gradient).unwrap();
            stage.in_use();
            stage.gradient(&batch, &mut gradient).unwrap();
            (gradient, stage.in_use().unwrap().bytes)
        };
        let (Ok(keeps), Ok(other)) = (device_at((8, 0), 0).bf16(), device_at((8, 0), 0).bf16()) else {
            return;
        };
        let ((got, with), (want, without)) = (most(keeps), most(other.spelled()));
        println!("{keep:?}: {with} bytes in use, {without} where each product narrows, {} said", t * said);
        assert!(got == want, "{keep:?}: other bits than in verbs");
        assert!(
            with <= without + t * said,
            "{keep:?}: {with} bytes in use, {without} without, {said} a token"
        );
    }
}

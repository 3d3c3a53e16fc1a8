//! Products with few outputs across, which the bf16 class makes in kernels of their own: against sums in f64, at edges
//! of every tile, in several orders of warps, and at addresses that leave them to the plain product.

use crate::bench::{ALIGNED, GUARD, Mat, held, run_behind};
use crate::device::{device_at, device_bf16, device_of, device_with_at};
use crate::files;
use crate::mutations::of_entry;
use finetune::backend::cuda::{Arg, Driver, Launch};
use finetune::backend::{Backend, Cuda, Fault, Product, Transpose, Write};

/// M, N, K of out[M, N].
type Sizes = (usize, usize, usize);

/// Two steps of rows, two slices of columns, and an edge of every tile.
pub const CHANGED: Sizes = (68, 17, 260);

/// out[M, N] (=|+=) 0.5 op(a) op(b).
pub fn product<D: Driver>(
    device: Cuda<D>,
    sizes: Sizes,
    transpose: Transpose,
    write: Write,
) -> Result<Vec<Vec<f32>>, Fault> {
    product_behind(ALIGNED, device, sizes, (transpose, write))
}

fn operands((m, n, k): Sizes, transpose: Transpose) -> (Mat, Mat) {
    match transpose {
        Transpose::Neither => (Mat::random(m, k, 1), Mat::random(k, n, 2)),
        Transpose::Right => (Mat::random(m, k, 1), Mat::random(n, k, 2)),
        Transpose::Left => (Mat::random(k, m, 1), Mat::random(k, n, 2)),
    }
}

fn product_behind<D: Driver>(
    guard: usize,
    mut device: Cuda<D>,
    (m, n, k): Sizes,
    (transpose, write): (Transpose, Write),
) -> Result<Vec<Vec<f32>>, Fault> {
    let (a, b) = operands((m, n, k), transpose);
    run_behind(guard, "matmul", &mut device, (&[&a, &b], &[held(write, m, n)]), |d, i, o| {
        d.matmul(o[0].view_mut(), write, Product { a: i[0], b: i[1], transpose, scale: 0.5 });
    })
}

/// Each output in f64, and the sum of its terms' absolute values.
fn formula((m, n, k): Sizes, transpose: Transpose, write: Write) -> Vec<(f64, f64)> {
    let (a, b) = operands((m, n, k), transpose);
    let old = Mat::random(m, n, 99);
    let of = |i: usize, j: usize| {
        let term = |t: usize| {
            let a = if transpose == Transpose::Left { a.v[t * m + i] } else { a.v[i * k + t] };
            let b = if transpose == Transpose::Right { b.v[j * k + t] } else { b.v[t * n + j] };
            0.5 * f64::from(a) * f64::from(b)
        };
        let old = if write == Write::Add { f64::from(old.v[i * n + j]) } else { 0.0 };
        (0..k).fold((old, old.abs()), |(sum, terms), t| (sum + term(t), terms + term(t).abs()))
    };
    (0..m * n).map(|at| of(at / n, at % n)).collect()
}

/// Fewest sizes of a kernel, edges of tiles, several parts across; those of rows, then of sums over rows.
const ROWS: [Sizes; 4] = [(64, 1, 128), (70, 17, 300), (97, 16, 132), (65, 64, 256)];
const COLUMNS: [Sizes; 5] = [(1, 64, 128), (17, 580, 150), (64, 68, 333), (516, 16, 129), (68, 17, 260)];

#[test]
fn products_with_few_outputs_across_are_those_of_f64() {
    if device_at((8, 0), 0).bf16().is_err() {
        println!("skipped: no tensor cores for bf16");
        return;
    }
    let rows = ROWS.iter().flat_map(|s| [(Transpose::Right, *s), (Transpose::Neither, *s)]);
    for (transpose, sizes) in rows.chain(COLUMNS.map(|s| (Transpose::Left, s))) {
        for (write, guard) in [(Write::Set, ALIGNED), (Write::Add, ALIGNED), (Write::Set, GUARD)] {
            let want = formula(sizes, transpose, write);
            let on = |order| {
                let device = device_at((8, 0), order).bf16().unwrap();
                product_behind(guard, device, sizes, (transpose, write)).unwrap().remove(0)
            };
            let first = on(0);
            for (at, (got, (want, terms))) in first.iter().zip(&want).enumerate() {
                let (off, most) = ((f64::from(*got) - want).abs(), 16.0 * f64::from(f32::EPSILON) * terms);
                assert!(
                    off <= most,
                    "{sizes:?} {transpose:?} {write:?} {at}: {got}, want {want}, off by {off:e}"
                );
            }
            // A card has one order.
            let orders: &[u64] =
                if std::env::var_os("FINETUNE_PTX_DEVICE").is_none() { &[1, 3] } else { &[] };
            assert!(orders.iter().all(|&order| on(order) == first), "{sizes:?}: other bits in another order");
        }
    }
}

#[test]
fn products_with_few_outputs_across_have_kernels_of_their_own() {
    let files = |guard, sizes, transpose| {
        let mut device = device_of((8, 0), 0).bf16().unwrap();
        let (a, b) = operands(sizes, transpose);
        let (m, n, _) = sizes;
        run_behind(guard, "matmul", &mut device, (&[&a, &b], &[held(Write::Set, m, n)]), |d, i, o| {
            d.matmul(o[0].view_mut(), Write::Set, Product { a: i[0], b: i[1], transpose, scale: 1.0 });
        })
        .unwrap();
        device.driver().loaded("skinny.ptx")
    };
    for transpose in [Transpose::Right, Transpose::Neither, Transpose::Left] {
        assert!(files(ALIGNED, CHANGED, transpose), "{transpose:?}");
        assert!(!files(GUARD, CHANGED, transpose), "{transpose:?}: the large factor is not at 16 bytes");
        assert!(!files(ALIGNED, (68, 66, 260), transpose), "{transpose:?}: many outputs across");
    }
}

/// T, R, C and tokens of a slice: more than a block holds at a time, and the last piece and the last slice are shorter.
const SLICES: (usize, usize, usize, usize) = (501, 17, 68, 296);

fn factors() -> (Mat, Mat) {
    let (t, r, c, _) = SLICES;
    (Mat::random(t, r, 1), Mat::random(t, c, 2))
}

/// The sums of each slice of [`SLICES`].
pub fn slices<D: Driver>(mut device: Cuda<D>) -> Result<Vec<Vec<f32>>, Fault> {
    let ((t, r, c, slice), (left, x)) = (SLICES, factors());
    let mut got = vec![f32::NAN; t.div_ceil(slice) * r * c];
    let driver = device.driver();
    let mut held = Vec::new();
    for values in [&got, &left.v, &x.v] {
        let at = driver.alloc(4 * values.len())?;
        driver.write(at, bytemuck::cast_slice(values))?;
        held.push(at);
    }
    let [rows, across, along, size] = [t, r, c, slice].map(|n| Arg::U32(n as u32));
    let [part, a, b] = [held[0], held[1], held[2]].map(Arg::Address);
    let args = [part, a, b, rows, across, along, across, along, size];
    let (file, entry) = ("skinny.ptx", "skinny_columns");
    driver.launch(&Launch { file, entry, grid: [1, 2, 2], threads: 128, args: &args })?;
    driver.read(held[0], bytemuck::cast_slice_mut(&mut got))?;
    Ok(vec![got])
}

#[test]
fn long_slices_are_summed_in_pieces() {
    let Some(device) = device_bf16() else { return };
    let ((t, r, c, slice), (left, x)) = (SLICES, factors());
    let got = slices(device).unwrap().remove(0);
    for (at, got) in got.iter().enumerate() {
        let (s, i, j) = (at / (r * c), at / c % r, at % c);
        let terms = (s * slice..t.min((s + 1) * slice))
            .map(|row| f64::from(left.v[row * r + i]) * f64::from(x.v[row * c + j]));
        let (sum, size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
        let off = (f64::from(*got) - sum).abs();
        assert!(off <= 16.0 * f64::from(f32::EPSILON) * size, "{at}: {got}, want {sum}");
    }
}

/// Entry, old text, new text: a fault that [`CHANGED`] must show.
const CHANGES: [(&str, &str, &str, Transpose); 6] = [
    ("skinny_rows_nt", "min.u32 %i, %i, %j;", "", Transpose::Right),
    ("skinny_rows_nt", "shr.u32 %i, %lane, 3", "shr.u32 %i, %lane, 4", Transpose::Right),
    ("skinny_rows_nn", "sub.s32 %left, %left, 128", "sub.s32 %left, %left, 127", Transpose::Neither),
    ("skinny_columns", "setp.lt.u32 %in, %c0, %c", "setp.le.u32 %in, %c0, %c", Transpose::Left),
    ("skinny_sums", "add.f32 %sum, %sum, %v0", "add.f32 %sum, %sum, %v1", Transpose::Left),
    ("skinny_sums", "setp.ne.u32 %other, %transposed", "setp.eq.u32 %other, %transposed", Transpose::Left),
];

#[test]
fn any_changed_operand_is_detected() {
    for (entry, from, to, transpose) in CHANGES {
        let text = files::read("skinny.ptx").text;
        let (start, _) = of_entry(&text, entry);
        let at = start + text[start..].find(from).unwrap_or_else(|| panic!("{entry} has {from}"));
        let changed = format!("{}{to}{}", &text[..at], &text[at + from.len()..]);
        let device = |text: &str| device_with_at((8, 0), ("skinny.ptx", text), 0).bf16().unwrap();
        let of = |text: &str| product(device(text), CHANGED, transpose, Write::Set);
        let right = of(&text).unwrap();
        let detected = of(&changed).map_or(true, |out| out != right);
        assert!(detected, "{entry}: {to:?} for {from:?} goes undetected");
    }
}

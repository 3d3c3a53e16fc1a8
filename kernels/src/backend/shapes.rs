//! Shapes that must agree, whatever backend computes: a caller that breaks them has a bug, so they are asserted.

use super::{Delta, DeltaHeads, Gates, Heads, LoraGrad, Qkv, Transpose, View, ViewMut};

/// Whatever has a shape.
pub trait Shaped {
    /// A matrix: rows and columns. Tokens of a microbatch: their number, and that of its rows. Ids: their number, and 1.
    fn shape(&self) -> (usize, usize);
}

/// What has which shape.
macro_rules! shaped {
    ($($type:ident$(<$life:lifetime, $memory:ident>)?: |$x:ident| $shape:expr;)*) => {$(
        impl$(<$memory>)? $crate::backend::Shaped for $type$(<$life, $memory>)? {
            fn shape(&self) -> (usize, usize) {
                let $x = self;
                $shape
            }
        }
    )*};
}
pub(super) use shaped;

shaped! {
    View<'_, M>: |x| (x.rows, x.cols);
    ViewMut<'_, M>: |x| (x.rows, x.cols);
}

/// A matrix of that shape.
#[track_caller]
pub fn is(a: &impl Shaped, shape: (usize, usize)) {
    assert_eq!(a.shape(), shape, "both matrices have one shape");
}

/// A matrix that goes to the host or comes from there.
#[track_caller]
pub fn is_whole(x: &impl Shaped, values: &[f32]) {
    let (rows, cols) = x.shape();
    assert_eq!(rows * cols, values.len(), "as many values as the view has");
}

/// Two matrices of one shape.
#[track_caller]
pub fn same(a: &impl Shaped, b: &impl Shaped) {
    is(a, b.shape());
}

/// out = op(a) op(b).
#[track_caller]
pub fn is_product(out: &impl Shaped, transpose: Transpose, a: &impl Shaped, b: &impl Shaped) {
    let swapped = |(rows, cols): (usize, usize), swap: bool| if swap { (cols, rows) } else { (rows, cols) };
    let (m, k) = swapped(a.shape(), transpose == Transpose::Left);
    let (inner, n) = swapped(b.shape(), transpose == Transpose::Right);
    assert_eq!(k, inner, "the inner dimensions are equal");
    is(out, (m, n));
}

/// y = x wᵀ with a frozen w.
#[track_caller]
pub fn is_linear(y: &impl Shaped, x: &impl Shaped, w: &impl Shaped) {
    is(y, (x.shape().0, w.shape().0));
    assert_eq!(x.shape().1, w.shape().1, "x has as many columns as the weight");
}

/// dx = dy w with a frozen w.
#[track_caller]
pub fn is_linear_grad(dx: &impl Shaped, dy: &impl Shaped, w: &impl Shaped) {
    is(dx, (dy.shape().0, w.shape().1));
    assert_eq!(dy.shape().1, w.shape().0, "dy has as many columns as the weight has rows");
}

/// inv_rms has a number for each group of x, as wide as the gain.
#[track_caller]
pub fn is_normed<M>(gain: View<M>, inv_rms: &impl Shaped, x: &impl Shaped) {
    let (rows, groups) = inv_rms.shape();
    assert_eq!((rows, groups * gain.cols), x.shape(), "both matrices have one shape");
}

/// Whole heads of x, a position for each token, and the angles of a head.
#[track_caller]
pub fn is_rotated(x: &impl Shaped, table: &impl Shaped, tokens: &impl Shaped) {
    assert_eq!(x.shape().0, tokens.shape().0, "one position per token");
    let size = table.shape().1;
    assert_eq!((size % 2, x.shape().1 % size), (0, 0), "whole heads of even size");
}

/// Output and inputs of an attention; `tokens` is (queries, keys).
#[track_caller]
pub fn is_attended<M>((out, qkv, heads): (&impl Shaped, Qkv<M>, Heads), (queries, keys): (usize, usize)) {
    assert!(heads.kv > 0 && heads.query.is_multiple_of(heads.kv), "key/value heads divide the query heads");
    is(&qkv.q, (queries, heads.query * heads.size));
    is(&qkv.k, (keys, heads.kv * heads.size));
    same(&qkv.v, &qkv.k);
    same(out, &qkv.q);
}

/// What an adapter's gradient is made of, and where it goes.
#[track_caller]
pub fn is_lora_grad<M>(args: &LoraGrad<M>) {
    let (a, b) = args.ab;
    is_product(&args.h, Transpose::Right, &args.x, &a);
    is_product(&args.dy, Transpose::Right, &args.h, &b);
    assert_eq!(args.dab.len(), a.len() + b.len(), "the gradient is as large as A and B");
}

/// Inputs and taps of a convolution; `above` is the number of rows above those of the tokens.
#[track_caller]
pub fn is_convolved<M>(gates: Gates<M>, taps: &impl Shaped, tokens: &impl Shaped, above: usize) {
    let cols = taps.shape().1;
    is(&gates.after, (tokens.shape().0, cols));
    is(&gates.x, (above + tokens.shape().0, cols));
    same(&gates.before, &gates.x);
}

/// Inputs of a delta rule of `tokens` tokens.
#[track_caller]
pub fn is_delta<M>(inputs: Delta<M>, tokens: usize) {
    let DeltaHeads { values, keys, value_size, key_size } = inputs.heads;
    assert!(keys > 0 && values.is_multiple_of(keys), "key heads divide the value heads");
    is(&inputs.q, (tokens, keys * key_size));
    same(&inputs.k, &inputs.q);
    is(&inputs.v, (tokens, values * value_size));
    is(&inputs.beta, (tokens, values));
    same(&inputs.decay, &inputs.beta);
    is(&inputs.rates, (2, values));
}

//! Shapes that must agree, whatever backend computes: a caller that breaks them has a bug, so they are asserted.

use super::{Heads, Product, Qkv, Transpose};

/// Rows and columns of both.
pub fn same_shape(a: (usize, usize), b: (usize, usize)) {
    assert_eq!(a, b, "both matrices have one shape");
}

/// Inputs of an attention; `tokens` is (queries, keys).
pub fn check_heads<M>(qkv: Qkv<M>, heads: Heads, tokens: (usize, usize)) {
    assert!(heads.kv > 0 && heads.query.is_multiple_of(heads.kv), "key/value heads divide the query heads");
    same_shape((qkv.q.rows, qkv.q.cols), (tokens.0, heads.query * heads.size));
    same_shape((qkv.k.rows, qkv.k.cols), (tokens.1, heads.kv * heads.size));
    same_shape((qkv.v.rows, qkv.v.cols), (tokens.1, heads.kv * heads.size));
}

/// Factors of a product and its output [m, n]; returns what is summed over.
pub fn check_product<M>(product: &Product<M>, out: (usize, usize)) -> usize {
    let (a, b) = (product.a, product.b);
    let (m, k) = if product.transpose == Transpose::Left { (a.cols, a.rows) } else { (a.rows, a.cols) };
    let (inner, n) = if product.transpose == Transpose::Right { (b.cols, b.rows) } else { (b.rows, b.cols) };
    assert_eq!(k, inner, "the inner dimensions are equal");
    same_shape(out, (m, n));
    k
}

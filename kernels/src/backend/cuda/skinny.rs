//! Products of an adapter on cards with tensor cores, in f32: one side of the output is at most [`NARROW`] wide, so reading
//! the large factor is the work. Sums over tokens are made in slices, which are added in their order. Which kernel makes
//! a product follows from its shape and addresses.

use super::launches::adds;
use super::{Arg, Cuda, Driver, Launch, blocks, size};
use crate::backend::{Transpose, Write};

const FILE: &str = "skinny.ptx";
/// Most outputs across. The large factor is read once per [`ACROSS`] of them.
const NARROW: usize = 64;
/// Outputs across of a block.
const ACROSS: usize = 16;
/// Fewest outputs along, and fewest terms of a sum: below, the tiles of the plain product are as fast.
const ALONG: usize = 64;
const TERMS: usize = 128;
/// Rows of outputs of a block, and columns.
const ROWS: usize = 32;
const COLUMNS: usize = 512;
/// A slice has a multiple of these tokens.
const UNROLLED: usize = 8;
/// Blocks that fill a large card.
const ENOUGH: usize = 512;

/// A product out[m, n] (=|+=) scale * op(a) op(b) with k terms; rows of a, b and out are dense.
pub(super) struct Skinny {
    pub transpose: Transpose,
    pub out: (Arg, Write),
    pub a: Arg,
    pub b: Arg,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub scale: f32,
}

/// The narrow side of an output.
#[derive(Clone, Copy)]
enum Narrow {
    Rows,
    Columns,
}

/// The numbers that slices of a sum over `tokens` take, for outputs [narrow, along]; 0 for products that need none.
pub(super) fn partial_sums(tokens: usize, (narrow, along): (usize, usize)) -> usize {
    let takes = narrow <= NARROW && along >= ALONG && along.is_multiple_of(4) && tokens >= TERMS;
    if takes { tokens.div_ceil(slice(tokens, along)) * narrow * along } else { 0 }
}

/// Tokens of a slice: enough slices for all blocks, and no more, because their sums are written and read again.
fn slice(tokens: usize, along: usize) -> usize {
    let wanted = (ENOUGH / along.div_ceil(COLUMNS)).max(1);
    tokens.div_ceil(wanted).next_multiple_of(UNROLLED).max(2 * UNROLLED)
}

/// Whether 16 bytes at a time can be read.
fn aligned(x: Arg, between: usize) -> bool {
    matches!(x, Arg::Address(at) if at.is_multiple_of(16)) && between.is_multiple_of(4)
}

impl<D: Driver> Cuda<D> {
    /// Makes the product if it is of this kind.
    pub(super) fn skinny(&mut self, p: &Skinny) -> bool {
        let rows = p.n <= NARROW && p.m >= ALONG && p.k >= TERMS && aligned(p.a, p.k);
        match p.transpose {
            Transpose::Right if rows => self.skinny_rows("skinny_rows_nt", p, p.k),
            Transpose::Neither if rows => self.skinny_rows("skinny_rows_nn", p, p.n),
            Transpose::Left if partial_sums(p.k, (p.m, p.n)) > 0 && aligned(p.b, p.n) => {
                self.skinny_columns(p, Narrow::Rows);
            }
            Transpose::Left if partial_sums(p.k, (p.n, p.m)) > 0 && aligned(p.a, p.m) => {
                self.skinny_columns(p, Narrow::Columns);
            }
            _ => return false,
        }
        true
    }

    fn skinny_rows(&mut self, entry: &str, p: &Skinny, between_b: usize) {
        let [m, n, k, ldb] = [p.m, p.n, p.k, between_b].map(size);
        let args = [p.out.0, p.a, p.b, m, n, k, k, ldb, n, Arg::F32(p.scale), adds(p.out.1)];
        let grid = [blocks(p.n, ACROSS), blocks(p.m, ROWS), 1];
        self.launch(Launch { file: FILE, entry, grid, threads: 256, args: &args });
    }

    /// The product of a [k, m] and b [k, n], where one of m and n is narrow.
    fn skinny_columns(&mut self, p: &Skinny, side: Narrow) {
        let ((left, narrow), (x, along), transposed) = match side {
            Narrow::Rows => ((p.a, p.m), (p.b, p.n), 0),
            Narrow::Columns => ((p.b, p.n), (p.a, p.m), 1),
        };
        let slice = slice(p.k, along);
        let slices = p.k.div_ceil(slice);
        let part = self.take(4 * partial_sums(p.k, (narrow, along)));
        let at = Arg::Address(part.at(0));
        let [t, r, c] = [p.k, narrow, along].map(size);
        let args = [at, left, x, t, r, c, r, c, size(slice)];
        let grid = [blocks(along, COLUMNS), blocks(slices, 1), blocks(narrow, ACROSS)];
        self.launch(Launch { file: FILE, entry: "skinny_columns", grid, threads: 128, args: &args });
        let (between, transposed, scale) = (size(p.n), Arg::U32(transposed), Arg::F32(p.scale));
        let args = [p.out.0, at, size(slices), r, c, between, transposed, scale, adds(p.out.1)];
        let grid = [blocks(along, 256), blocks(narrow, 1), 1];
        self.launch(Launch { file: FILE, entry: "skinny_sums", grid, threads: 256, args: &args });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slices_fill_a_card_and_no_more() {
        assert_eq!((slice(8192, 2560), slice(8192, 9728), slice(8192, 576)), (88, 320, 32));
        assert_eq!((slice(128, 64), slice(32_768, 14_336)), (16, 1_822_usize.next_multiple_of(8)));
        // Numbers that are written, of rank 64 in a long microbatch.
        assert_eq!(partial_sums(32_768, (64, 14_336)), 18 * 64 * 14_336);
        for none in [(127, (16, 64)), (128, (65, 64)), (128, (16, 63)), (128, (16, 66))] {
            assert_eq!(partial_sums(none.0, none.1), 0, "{none:?}");
        }
    }
}

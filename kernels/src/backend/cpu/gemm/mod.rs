//! Matrix products: the kernels of tiles, products of strided f32 factors, and products of whatever gives the panels of
//! a right factor.

pub mod added;
#[cfg(target_arch = "x86_64")]
pub mod avx512;
#[cfg(target_arch = "x86_64")]
pub mod avx512_bf16;
pub mod gemv;
pub mod left_operand;
pub mod pair_tiles;
pub mod product;
pub mod product_plain;
pub mod product_tiles;
pub mod tile;
pub mod tile_avx2_neon;
pub mod tiled;
pub mod transpose;
#[cfg(target_arch = "x86_64")]
pub mod transpose_avx512;

/// No other processor is found to have AVX-512 BF16, so `Precision::Bf16Dot` is never chosen there, and none of these
/// functions is called.
#[cfg(not(target_arch = "x86_64"))]
pub mod avx512_bf16 {
    use super::super::operands::{Pairs, Place};

    macro_rules! absent {
        ($($name:ident($($argument:ty),*);)*) => {
            $(
                /// # Safety
                /// None is needed.
                pub unsafe fn $name($(_: $argument),*) {
                    unreachable!("pairs need AVX-512 BF16");
                }
            )*
        };
    }
    absent! {
        tile(Pairs, Option<Pairs>, Place);
        pair_up(&mut [u32], &[f32]);
        interleave(&mut [u32], &[f32], &[f32]);
        pair_and_turn(*mut u32, (*const f32, usize), (usize, usize));
        turn_rows(*mut u32, (*const u32, usize), usize, usize);
        turn_pairs(*mut u32, *const u32, usize);
    }
}

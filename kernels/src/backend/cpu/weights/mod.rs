//! Frozen matrices, in panels or in the blocks of their file, and how the kernels of products read them.

pub mod block_rows;
pub mod block_unpack;
#[cfg(target_arch = "x86_64")]
pub mod block_unpack_avx512;
pub mod blocks;
#[cfg(target_arch = "x86_64")]
pub mod decode;
pub mod panel_unpack;
#[cfg(target_arch = "x86_64")]
pub mod panel_unpack_avx512;
pub mod panel_words;
pub mod panels;
#[cfg(target_arch = "x86_64")]
pub mod simd;
#[cfg(target_arch = "x86_64")]
pub mod simd_avx2;
#[cfg(target_arch = "x86_64")]
pub mod simd_avx512;
pub mod weight;

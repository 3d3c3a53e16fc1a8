//! Every verb of the CPU backend against an f64 formula, every gradient against central differences of that formula in
//! f64, at odd sizes, on 1, 2, 3 and 7 threads with equal bits.
//!
//! All tests use [`bench`]: outputs that are overwritten start as NaN, all matrices are at odd offsets between guard
//! words, and bounds are relative to the largest expected value.

// A test that cannot continue stops at once.
#![allow(clippy::unwrap_used)]

mod attention;
mod bench;
mod bf16;
mod blocks;
mod fused;
mod loss;
mod products;
mod rig;
mod rows;
mod short;

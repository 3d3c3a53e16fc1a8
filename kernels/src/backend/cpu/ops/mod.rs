//! The verbs, and the fused operations that the CPU replaces.

pub mod adapter;
pub mod bf16_activations;
pub mod convolution;
pub mod convolution_silu;
pub mod delta_rule;
pub mod elementwise;
pub mod fused;
pub mod head;
pub mod linear;
pub mod loss;
pub mod norm;
pub mod peak;
pub mod rope;
pub mod verbs;
pub mod views;

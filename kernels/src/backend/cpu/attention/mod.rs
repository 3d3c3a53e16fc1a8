//! Causal attention and its gradient, in blocks of queries and keys.

pub mod block;
pub mod block_floats;
pub mod block_pairs;
pub mod block_products;
pub mod forward;
pub mod gradient;
pub mod inputs;

//! Floor 5: one run on many devices, in this process and on other machines. A coordinator hands out microbatches and
//! adds up the gradients that workers compute. This folder uses `model`, `net` and `train`, never a backend.

pub mod carry;
pub mod codec;
pub mod coordinator;
pub mod digest;
pub mod inject;
pub mod link;
pub mod machine;
pub mod message;
mod plain;
pub mod reduce;
#[cfg(test)]
mod simulator;
pub mod sum_chunk;
pub mod worker;

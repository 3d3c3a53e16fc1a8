//! Hand-written PTX without a GPU: every kernel assembles for every architecture within the budget that its head
//! states, and counts right in an interpreter, behind the same seam as the driver.

// A test that cannot go on should stop there.
#![allow(clippy::unwrap_used)]

mod assemble;
mod attention;
mod bench;
mod device;
mod files;
mod generate;
mod interpreter;
mod mutations;
mod opcodes;
mod products;
mod rows;
mod standin;
mod tensor;

//! Floor 1: rows to tokens to a plan.

pub mod plan;

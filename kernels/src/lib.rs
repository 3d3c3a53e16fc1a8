//! The lower floors of `finetune`: `support`, `numeric`, and `backend` with all kernels. It is a package of its own
//! and one unit of the compiler, which optimises across all of it (docs/explain/architecture.md).

#![warn(clippy::unwrap_used)]

pub mod backend;
pub mod numeric;
pub mod support;

//! Fine-tune a language model with LoRA on one or more machines.
//!
//! Modules form floors and import only lower ones (`tests/tidy` enforces this): `support` and `numeric`; `families`;
//! `data`, `format`; `backend`; `model`; `train`; `cluster`, which also imports `net`, and beside it `config`;
//! `devices`; `forecast`; `run`, which also imports `report`; at the top `cli`, which no module imports. `support`,
//! `numeric` and `backend` are the package `finetune-kernels`. Invariants and the map of the code are in
//! `docs/explain/architecture.md`.

#![warn(clippy::unwrap_used)]

pub mod cli;
pub mod cluster;
pub mod config;
pub mod data;
mod devices;
pub mod families;
mod forecast;
pub mod format;
pub mod model;
pub mod net;
pub mod report;
mod run;
pub mod train;

pub use finetune_kernels::{backend, numeric, support};

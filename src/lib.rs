//! Fine-tune a language model with LoRA on whatever machines are at hand.
//!
//! Floors, and arrows go down only (`tests/tidy.rs` enforces it): `support`, `numeric`, `families`; `data`,
//! `format`; `backend`; `model`; `train`; `cluster`, which also sees `net`, and beside it `config`; `devices`; `forecast`; `run`, which also
//! sees `report`; above them `cli`, which nothing imports.
//! Invariants and the map of the code are in `docs/architecture.md`.

pub mod backend;
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
pub mod numeric;
pub mod report;
mod run;
pub mod support;
pub mod train;

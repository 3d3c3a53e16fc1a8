//! Fine-tune a language model with LoRA on whatever machines are at hand.
//!
//! Floors, and arrows go down only (`tests/tidy.rs` enforces it): `support`, `numeric`; `data`, `format`; `backend`;
//! `model`; `train`; `cluster`, which also sees `net`; beside and above them `report` and `cli`, which nothing
//! imports.
//! Invariants and the map of the code are in `docs/architecture.md`.

pub mod backend;
pub mod cli;
pub mod cluster;
pub mod data;
pub mod format;
pub mod model;
pub mod net;
pub mod numeric;
pub mod report;
pub mod support;
pub mod train;

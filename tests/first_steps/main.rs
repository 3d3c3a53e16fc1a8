//! What a newcomer meets first, by the real binary: recipes, `doctor`, `import`, `help`, `inspect`; and what others
//! read of a run: Prometheus and TensorBoard.

#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod eval;
mod metrics;
mod recipes;
mod scripts;
mod sized;
mod terminal;
mod verbs;

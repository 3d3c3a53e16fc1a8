//! The first steps of a new user, with the real binary: recipes, `doctor`, `import`, `help`, `inspect`; and other
//! programs that read a run: Prometheus and TensorBoard.

#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod eval;
mod metrics;
mod recipes;
mod scripts;
mod sized;
mod terminal;
mod verbs;

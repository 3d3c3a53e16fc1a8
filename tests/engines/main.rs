//! `--role auto` under what starts the processes of a run: Slurm (`slurm.rs`), launchers of MPI and the variables of
//! torchrun (`launchers.rs`), and control groups (`limits.rs`). A program that is missing makes its tests print `skipped`, unless FINETUNE_NEED_SLURM or
//! FINETUNE_NEED_MPI is set.
#![cfg(target_os = "linux")]

#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod cluster;
mod launchers;
mod limits;
mod slurm;

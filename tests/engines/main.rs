//! `--role auto` under what starts the processes of a run: Slurm (`slurm.rs`), launchers of MPI and the variables of
//! torchrun (`launchers.rs`), pods of Kubernetes (`pods.rs`, `manifests.rs`), the image that they run (`container.rs`), and
//! control groups (`limits.rs`). A program that is missing makes its tests print `skipped`, unless FINETUNE_NEED_SLURM,
//! FINETUNE_NEED_MPI or FINETUNE_NEED_KUBEFLOW is set.
#![cfg(target_os = "linux")]

#[path = "../cli_fixture/mod.rs"]
mod cli_fixture;
mod cluster;
mod container;
mod image;
mod launchers;
mod limits;
mod manifests;
mod pods;
mod slurm;

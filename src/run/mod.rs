//! One run and its roles: from options to a base model with rows ([`prepare`]), to a [`job::Job`] in a [`folder`], and
//! to its end. The roles are [`single`], [`coordinator`] and [`worker`]. Verbs that read a run's adapter or run.yaml
//! use the same code.

pub mod adapter;
mod added_tokens;
pub mod auto_micro_batch;
pub mod base_model;
pub mod coordinator;
pub mod folder;
pub mod job;
pub mod prepare;
pub mod prompt;
pub mod row_sets;
pub mod row_warnings;
pub mod run_file;
pub mod signals;
pub mod single;
pub mod stages;
mod trained_rows;
pub mod watch;
pub mod worker;

//! Floor 4: step, optimizer, schedule, evaluation, checkpoints. This folder imports stages and plans, but no backend.

mod batches;
pub mod best;
pub mod checkpoint;
mod compute;
pub mod entities;
mod error;
pub mod eval;
pub mod event;
pub mod island;
mod local;
pub mod optim;
pub mod optimizer_step;
mod own_thread;
mod rounding;
mod run;
pub mod schedule;
pub mod shares;
pub mod stop;
pub mod sum;
pub mod trial;
mod work;

pub use batches::{Batches, Known, microbatch};
pub use compute::{Compute, Effort, Say, Scoring};
pub use error::{Again, Finding, TrainError};
pub use local::Local;
pub use rounding::Rounding;
pub use run::{Asked, Finished, Reference, Run, Sampler, refer, run};
pub use work::Work;

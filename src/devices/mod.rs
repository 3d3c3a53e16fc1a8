//! The only folder that names concrete backends: the list of devices ([`list`]), their choice ([`choose`]), and the
//! loading of a whole model. Code outside uses `Model`, `Opener` and strings.

mod building;
mod capacity;
mod cgroup;
mod chain;
pub mod choose;
mod compiled;
mod drivers;
mod environment;
mod line;
mod list;
mod open;
#[cfg(feature = "faults")]
mod pretend;
mod prospect;
mod room;
mod seat;
mod speed;
mod visible;

pub use crate::backend::cpu::refused_limit;
pub use crate::backend::cuda::refused_wait;
pub use building::note_streaming;
pub use capacity::Holder;
pub use chain::{equipment, hardware};
pub use choose::{Chosen, choose};
pub use drivers::cpu::{cores, free_memory};
pub use drivers::cuda::{silent as no_cuda, trial};
pub use environment::prepare;
pub use line::held;
pub use list::{Listed, check, drivers, list, no_gpu};
pub use open::{Need, Profiled, cpu_class, fits_by_layers, layer, open, profile, settle, takes};
pub use prospect::{Prospect, Sizes, assumed, expected_seat, named_hardware, prospects};
pub use speed::Speed;

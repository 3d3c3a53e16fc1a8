//! What people see of a run: pure functions of its events. Nothing imports this but `cli`.
//!
//! A run is shown by giving every event to a [`Console`] (bar or plain lines, on stderr) and to a [`Metrics`]
//! (metrics.jsonl); [`read`] gives the events back, and the same functions replay them.

mod console;
mod metrics;
mod progress;
mod team;
mod tensorboard;

pub use console::{Console, Look};
pub use metrics::{Metrics, read};
pub use progress::Progress;
pub use team::Team;
pub use tensorboard::TensorBoard;

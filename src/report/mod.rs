//! Output about a run for its users: pure functions of its events. Only `run` and `cli` import this module.
//!
//! A run is shown by passing each event to a [`Console`] (bar or plain lines, on stderr) and to a [`Metrics`]
//! (metrics.jsonl); [`read`] returns the events, and the same functions replay them.

mod answers;
mod card;
pub mod confusion;
mod console;
pub mod contracts;
pub mod draw;
mod history;
mod metrics;
mod packing;
pub mod page;
mod progress;
mod prometheus;
mod roster;
mod serve;
mod shift;
mod team;
mod tensorboard;
mod words;
mod write;

pub use card::card;
pub use console::{Console, Look};
pub use history::{History, Live, Member, Point, RunState};
pub use metrics::{Metrics, print, read};
pub use progress::Progress;
pub use roster::{Roster, Row};
pub use serve::{Dashboard, is_literal, respond, same};
pub use shift::Shift;
pub use team::{DeviceWork, TeamWork};
pub use tensorboard::TensorBoard;
pub use words::duration;
pub use write::{Difference, comparison, write};

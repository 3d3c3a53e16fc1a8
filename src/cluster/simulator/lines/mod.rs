//! Runs of lines in virtual time: the real machine, the real division of layers and the real translation between a line
//! and the driver, with seats that follow the protocol, and faults drawn from a seed.

mod fate;
mod seat;
mod seeds;
mod world;

pub use fate::{Blow, Fate};

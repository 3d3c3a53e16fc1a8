//! Where workers hold a model together: what each can hold, and its place. Where workers add parts of the sums for each
//! other: their places.

use crate::model::wire::Wire;
use crate::train::event::Link;
use serde::{Deserialize, Serialize};

/// What the device of a worker can hold of the model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Capacity {
    /// Seconds that the longest microbatch takes in a layer, and in the head.
    pub seconds: (f64, f64),
    /// Bytes that the device may use.
    pub limit: u64,
    /// Bytes of the weights of each layer.
    pub layers: Vec<u64>,
    /// By the number of seats above it: what it needs besides as the first seat of a line (without a seat above it: for
    /// the whole model), and as another one.
    pub needs: Vec<(Needs, Needs)>,
    /// Fewest and most layers that it streams as a seat, if it has as many.
    pub streams: (u32, u32),
    /// Seconds in which it reads a streamed layer for both passes of a microbatch.
    pub reading: f64,
    /// The network between the worker and the coordinator.
    pub link: Option<Link>,
}

/// Bytes that a seat needs besides the weights of its layers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Needs {
    /// With one layer.
    pub one: u64,
    /// With each further layer.
    pub more: u64,
}

/// A worker's place in a line: workers that hold the layers of one model together.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct SeatPlan {
    /// Random, one for each line: its seats prove to each other that they belong to the same one.
    pub key: [u8; 16],
    /// Position in the line, from 0 for the seat that embeds.
    pub place: u16,
    /// Number of seats.
    pub of: u16,
    /// Its first layer, and the one after its last.
    pub layers: (u32, u32),
    /// Number of its layers that it streams.
    pub streamed: u32,
    /// Its first value of the flat layout, and the one after its last.
    pub values: (u64, u64),
    /// Most microbatches that wait for their backward pass at the same time.
    pub depth: u16,
    /// The type of numbers between seats.
    pub wire: Wire,
}

/// A worker's place among relays: workers that add parts of the sums for each other, and pass on parts of the parameters.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RelayPlan {
    /// Number of this set of relays, counted from 1 in each epoch of a run.
    pub set: u64,
    /// Random, one for each set: its workers prove to each other that they belong to it.
    pub key: [u8; 16],
    /// Index of this worker in the two lists.
    pub place: u16,
    /// Where each worker listens: host, empty for the coordinator's, and port.
    pub addresses: Vec<(String, u16)>,
    /// The values that each worker adds and passes on: the first, and the one after the last. Each begins with a cell.
    pub ranges: Vec<(u64, u64)>,
}

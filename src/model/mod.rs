//! Floor 3: a decoder with LoRA adapters, generic over the backend and independent of rows, plans and runs.

pub mod block;
pub mod config;
pub mod decoder;
mod embedding_change;
pub mod generate;
pub mod head;
mod head_change;
pub mod implied;
pub mod layout;
pub mod line;
pub mod linear;
pub mod lora;
pub mod memory;
mod memory_fit;
pub mod merge;
mod outputs;
mod placement;
pub mod preference;
pub mod quantised;
mod rotation;
mod routes;
pub mod rows;
pub mod split;
pub mod stage;
pub mod targets;

pub mod weights;
pub mod wire;

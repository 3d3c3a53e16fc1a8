//! Floor 1: tokens, TLS and frames between machines. It knows no model, no step and no message: what it carries
//! are bytes whose length was bounded before they were read.

pub mod address;

pub use address::{DEFAULT_PORT, Endpoint};

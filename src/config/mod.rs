//! What was typed becomes what is meant. Flags, a YAML file and the environment are layers of (key, values,
//! source); each is translated by the same rules (`alias`), then the highest layer that speaks wins: flag over
//! YAML over environment over default. Every value remembers where it came from: mistakes and run.yaml say it.

pub mod alias;
pub mod cache;
pub mod cluster;
pub mod demo;
pub mod devices;
pub mod dialects;
pub mod flags;
pub mod groups;
pub mod output;
pub mod refusal;
pub mod settings;
pub mod table;
pub mod typed;
pub mod values;
pub mod variables;
pub mod verb;
pub mod yaml;

pub use settings::{Setting, Settings};
pub use typed::{Origin, Typed};

#[cfg(test)]
mod tests;

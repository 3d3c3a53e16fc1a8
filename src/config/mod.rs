//! From typed options to validated configuration. Flags, a YAML file and the environment are layers of (key, values,
//! source); each is translated by the same rules (`alias`), then the highest layer with a value wins: flag over YAML
//! over environment over default. Every value keeps its source for errors and run.yaml.

pub mod alias;
pub mod cache;
pub mod cluster;
mod delay;
pub mod demo;
pub mod devices;
pub mod dialects;
pub mod engine;
pub mod flags;
pub mod groups;
mod islands;
pub mod output;
mod preference;
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

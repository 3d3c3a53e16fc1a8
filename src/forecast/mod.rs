//! Forecast of a run's time and memory, from the work of its steps and the measurements of devices. Nothing here opens
//! a device or changes the results of a run.

pub mod counts;
pub mod link;
pub mod profile;
pub mod recorder;
pub mod team;
pub mod time;

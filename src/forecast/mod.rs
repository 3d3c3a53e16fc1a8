//! What a run will take: how long, and how much memory, out of what its steps hold and what devices were measured to
//! need. Nothing here opens a device or changes what a run computes.

pub mod counts;
pub mod link;
pub mod profile;
pub mod recorder;
pub mod team;
pub mod time;

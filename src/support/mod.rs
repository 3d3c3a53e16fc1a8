//! Floor 0, beside `numeric`: process-level services for every floor: lines on stderr, caught panics, and the
//! allocator.

pub mod allocator;
pub mod panics;
pub mod stderr;

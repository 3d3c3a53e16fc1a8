//! Floor 0, beside `numeric`: what every floor needs of the process itself. Lines on stderr, panics that end no
//! process, and the allocator.

pub mod allocator;
pub mod panics;
pub mod stderr;

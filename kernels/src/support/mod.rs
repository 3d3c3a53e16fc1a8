//! Floor 0, beside `numeric`: process-level services for every floor: lines on stderr, also during long work, plurals,
//! caught panics, and the allocator.

pub mod allocator;
pub mod end;
pub mod panics;
pub mod plural;
pub mod stderr;
pub mod waiting;

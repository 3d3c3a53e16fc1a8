//! Floor 4: step, optimizer, schedule, evaluation, checkpoints. It sees stages and plans, never a backend.

pub mod event;

//! The parties of a connection.

use std::fmt;

/// What a process is to the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Party {
    /// Hands out work.
    Coordinator,
    /// Takes it.
    Worker,
    /// A worker that computes a part of a model together with the other side.
    Seat,
}

impl Party {
    /// Whom it talks to.
    pub fn other(self) -> Party {
        match self {
            Party::Coordinator => Party::Worker,
            Party::Worker => Party::Coordinator,
            Party::Seat => Party::Seat,
        }
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(match self {
            Party::Coordinator => "coordinator",
            Party::Worker => "worker",
            Party::Seat => "seat of a line",
        })
    }
}

//! The two parties of a connection.

use std::fmt;

/// What a process is to the other side.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Party {
    /// Hands out work.
    Coordinator,
    /// Takes it.
    Worker,
}

impl Party {
    /// Whom it talks to.
    pub fn other(self) -> Party {
        match self {
            Party::Coordinator => Party::Worker,
            Party::Worker => Party::Coordinator,
        }
    }
}

impl fmt::Display for Party {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(if *self == Party::Worker { "worker" } else { "coordinator" })
    }
}

//! What went to a device and came back, counted since it was opened. A backend that computes in place counts
//! nothing.

/// Counted by a backend.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize, serde::Deserialize)]
pub struct Traffic {
    /// Batches of work that were sent.
    pub submissions: u64,
    /// Times that the host waited for results.
    pub read_backs: u64,
    /// Bytes to the device, but for the parameters of kernels.
    pub uploaded: u64,
    /// Bytes from the device.
    pub read: u64,
    /// Kernels started.
    pub dispatches: u64,
    /// Buffers, bind groups and pipelines made: none in the steady state.
    pub made: u64,
    /// The longest submission, in seconds.
    pub longest_submission: f64,
}

impl Traffic {
    /// What was counted after `before`; the longest submission is that of the whole time.
    pub fn since(&self, before: &Traffic) -> Traffic {
        Traffic {
            submissions: self.submissions - before.submissions,
            read_backs: self.read_backs - before.read_backs,
            uploaded: self.uploaded - before.uploaded,
            read: self.read - before.read,
            dispatches: self.dispatches - before.dispatches,
            made: self.made - before.made,
            longest_submission: self.longest_submission,
        }
    }
}

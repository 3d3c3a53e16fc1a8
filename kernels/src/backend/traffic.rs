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
    /// What another device, or the same one later, counted is counted too; the longest submission is that of all.
    pub fn add(&mut self, other: &Traffic) {
        for (sum, more) in [
            (&mut self.submissions, other.submissions),
            (&mut self.read_backs, other.read_backs),
            (&mut self.uploaded, other.uploaded),
            (&mut self.read, other.read),
            (&mut self.dispatches, other.dispatches),
            (&mut self.made, other.made),
        ] {
            *sum = sum.saturating_add(more);
        }
        // Of a stranger's numbers only those that are some.
        if other.longest_submission.is_finite() {
            self.longest_submission = self.longest_submission.max(other.longest_submission);
        }
    }

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

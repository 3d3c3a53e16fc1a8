//! What is known of a member's results where they are checked.

/// What is known of a member's results.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Record {
    /// Results that were compared and equal.
    pub checked: u64,
    /// Microbatches that counted.
    counted: u64,
    /// The first and the last step with one.
    steps: Option<(u64, u64)>,
}

impl Record {
    pub fn counts(&mut self, step: u64) {
        self.counted += 1;
        self.steps = Some((self.steps.map_or(step, |s| s.0), step));
    }

    pub fn shown(&self) -> String {
        let before = match self.steps {
            Some((from, to)) => format!("{} counted in steps {from} to {to}", self.counted),
            None => "none counted in an earlier step".into(),
        };
        format!("{} of its results were compared and equal, of its microbatches {before}", self.checked)
    }
}

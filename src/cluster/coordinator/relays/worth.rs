//! Whether relays are worth while: that follows from the measured networks and from what steps take.

use crate::train::shares::Shares;

/// Whether workers are relays: `--relays`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Use {
    /// They are not.
    Never,
    /// Where measured networks and waits say that steps are shorter with them.
    Auto,
    /// From two workers on.
    Always,
}

/// Bytes of a value in a sum, and in the parameters.
const BYTES: (f64, f64) = (4.5, 3.0);

/// How many times faster transfers must get.
const FASTER: f64 = 1.3;

/// Steps after which a set is judged.
const STEPS: usize = 3;

/// What steps took without relays and with them.
#[derive(Debug)]
pub(super) struct Worth {
    pub usage: Use,
    /// Seconds of waiting and of the whole step, of the last steps without relays.
    apart: Vec<(f64, f64)>,
    /// Seconds of waiting in the steps with the present set.
    together: Vec<f64>,
    /// Number of workers with which a set was not worth while.
    useless: Option<usize>,
    /// Number of workers of the last set.
    of: usize,
}

impl Worth {
    pub fn new(usage: Use) -> Self {
        Worth { usage, apart: Vec::new(), together: Vec::new(), useless: None, of: 0 }
    }

    /// A step took `whole` seconds, in `waits` of which devices waited.
    pub fn took(&mut self, waits: f64, whole: f64) {
        if self.apart.len() == STEPS {
            self.apart.remove(0);
        }
        self.apart.push((waits, whole));
    }

    /// In a step with the present set devices waited for `waits` seconds.
    pub fn took_together(&mut self, waits: f64) {
        if self.together.len() <= STEPS {
            self.together.push(waits);
        }
    }

    /// Whether workers with these bandwidths should be relays.
    pub fn wants(&mut self, bandwidths: &[Option<f64>], values: usize) -> bool {
        let of = bandwidths.len();
        self.of = of;
        match self.usage {
            Use::Never => false,
            Use::Always => of >= 2,
            Use::Auto => {
                let known: Option<Vec<f64>> = bandwidths.iter().copied().collect();
                let Some(known) = known.filter(|_| of >= 3 && self.useless != Some(of)) else { return false };
                let (waits, whole) =
                    self.apart.iter().fold((0.0, 0.0), |all, of| (all.0 + of.0, all.1 + of.1));
                let waited =
                    self.apart.len() >= 2 && waits > 0.1 * whole && waits > 0.05 * self.apart.len() as f64;
                let [apart, together] = Shares::of(&known).seconds(&known, values, BYTES);
                waited && apart > FASTER * together
            }
        }
    }

    /// Whether the steps with the present set wait as long as those before.
    pub fn is_useless(&self) -> bool {
        let mean = |of: &mut dyn ExactSizeIterator<Item = f64>| {
            let count = of.len().max(1) as f64;
            of.sum::<f64>() / count
        };
        // The first one may have begun without relays.
        let together = self.together.get(1..).unwrap_or_default();
        self.usage == Use::Auto
            && together.len() == STEPS
            && mean(&mut together.iter().copied())
                > 0.95 * mean(&mut self.apart.iter().map(|(waits, _)| *waits))
    }

    /// The present set is parted.
    pub fn parted(&mut self) {
        if self.is_useless() {
            self.useless = Some(self.of);
        }
        self.together.clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn relays_are_chosen_where_steps_wait_and_given_up_where_they_do_not_help() {
        let links = [Some(1e6); 3];
        let waiting = || {
            let mut worth = Worth::new(Use::Auto);
            (0..3).for_each(|_| worth.took(3.0, 10.0));
            worth
        };
        assert!(waiting().wants(&links, 1 << 20));
        assert!(!waiting().wants(&links[..2], 1 << 20), "two workers");
        assert!(!waiting().wants(&[Some(1e6), Some(1e6), None], 1 << 20), "a network that is not measured");
        assert!(!waiting().wants(&[Some(1e6), Some(1e6), Some(1e4)], 1 << 20), "a network that is too slow");
        let mut hidden = Worth::new(Use::Auto);
        (0..3).for_each(|_| hidden.took(0.5, 10.0));
        assert!(!hidden.wants(&links, 1 << 20), "steps that hardly wait");
        assert!(
            Worth::new(Use::Always).wants(&links[..2], 1) && !Worth::new(Use::Never).wants(&links, 1 << 20)
        );
        for (waits, useless) in [(1.0, false), (2.9, true)] {
            let mut worth = waiting();
            worth.wants(&links, 1 << 20);
            worth.took_together(9.0);
            (0..3).for_each(|_| worth.took_together(waits));
            assert_eq!(worth.is_useless(), useless, "{waits}");
            worth.parted();
            assert_eq!(worth.wants(&links, 1 << 20), !useless);
            assert!(worth.wants(&[Some(1e6); 4], 1 << 20), "another number of workers");
        }
    }
}

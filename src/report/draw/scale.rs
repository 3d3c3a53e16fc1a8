//! From numbers to places on a picture, and the round numbers that stand at its edges.

/// A straight map of one interval to another.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Scale {
    from: (f64, f64),
    to: (f64, f64),
}

impl Scale {
    /// Maps `from` to `to`; an interval of no length is widened, so that its one value lies in the middle.
    pub fn new(from: (f64, f64), to: (f64, f64)) -> Self {
        let (low, high) = from;
        let from = if high - low > low.abs().max(high.abs()) * 1e-12 {
            from
        } else {
            let half = if low == 0.0 { 0.5 } else { low.abs() * 0.05 };
            (low - half, high + half)
        };
        Scale { from, to }
    }

    /// Where `value` lies.
    pub fn at(&self, value: f64) -> f64 {
        let share = (value - self.from.0) / (self.from.1 - self.from.0);
        self.to.0 + share * (self.to.1 - self.to.0)
    }

    /// What it maps.
    pub fn domain(&self) -> (f64, f64) {
        self.from
    }
}

/// Round numbers inside `from`, about `count` of them: multiples of 1, 2 or 5 times a power of ten. (Heckbert 1990,
/// "Nice numbers for graph labels", Graphics Gems)
pub fn ticks((low, high): (f64, f64), count: usize) -> Vec<f64> {
    let span = high - low;
    if !span.is_finite() || span <= 0.0 || count == 0 {
        return Vec::new();
    }
    let rough = span / count as f64;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|m| m * power).into_iter().find(|s| *s >= rough * 0.999);
    let step = step.unwrap_or(10.0 * power);
    let (first, last) = ((low / step).ceil() as i64, (high / step * (1.0 + 1e-12)).floor() as i64);
    (first..=last).map(|i| i as f64 * step).collect()
}

/// A number in few characters: `1,234`, `12.3k`, `0.0125`, `2.0e-5`.
pub fn compact(value: f64) -> String {
    let size = value.abs();
    let trimmed = |text: String| match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    };
    match size {
        0.0 => "0".into(),
        s if s >= 1e6 => trimmed(format!("{:.2}", value / 1e6)) + "M",
        s if s >= 1e4 => trimmed(format!("{:.1}", value / 1e3)) + "k",
        s if s >= 100.0 => format!("{value:.0}"),
        s if s >= 1.0 => trimmed(format!("{value:.2}")),
        s if s >= 1e-3 => trimmed(format!("{value:.4}")),
        _ => {
            let text = format!("{value:.1e}");
            text.replace(".0e", "e")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn axis_edges_are_round_numbers() {
        for (range, count, want) in [
            ((0.0, 10.0), 5, vec![0.0, 2.0, 4.0, 6.0, 8.0, 10.0]),
            ((1.0, 296.0), 4, vec![100.0, 200.0]),
            ((1.5, 4.4), 3, vec![2.0, 3.0, 4.0]),
            ((0.0, 0.0), 4, vec![]),
            ((0.0, f64::NAN), 4, vec![]),
        ] {
            assert_eq!(ticks(range, count), want, "{range:?}");
        }
        let lr = ticks((0.0, 5e-4), 4);
        assert!((3..=6).contains(&lr.len()), "{lr:?}");
    }

    #[test]
    fn numbers_use_few_characters() {
        for (value, want) in [
            (0.0, "0"),
            (3.0, "3"),
            (2.5, "2.5"),
            (0.0125, "0.0125"),
            (2e-4, "2e-4"),
            (1.5e-5, "1.5e-5"),
            (296.4, "296"),
            (1234.0, "1234"),
            (12_345.0, "12.3k"),
            (4_884_480.0, "4.88M"),
        ] {
            assert_eq!(compact(value), want);
        }
    }

    #[test]
    fn single_value_is_centred() {
        assert_eq!(Scale::new((2.0, 2.0), (0.0, 100.0)).at(2.0), 50.0);
        assert_eq!(Scale::new((0.0, 0.0), (0.0, 100.0)).at(0.0), 50.0);
        assert_eq!(Scale::new((0.0, 4.0), (100.0, 0.0)).at(1.0), 75.0);
    }
}

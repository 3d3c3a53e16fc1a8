//! A line through measured points by least squares: what something takes is a fixed part and a part for each unit.
//! Points are kept as five sums, so that those of any two measurements add up to those of both, and a stream of
//! them needs no memory. A fixed part below zero, or units that cost nothing, cannot be: then the line goes through
//! the origin.

use serde::{Deserialize, Serialize};

/// Points (x, y) as sums, all of weight one unless they were faded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Points {
    /// How many.
    pub n: f64,
    /// Sum of x.
    pub x: f64,
    /// Sum of y.
    pub y: f64,
    /// Sum of x * x.
    pub xx: f64,
    /// Sum of x * y.
    pub xy: f64,
}

/// y = fixed + each * x.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// What it takes besides.
    pub fixed: f64,
    /// What one unit takes.
    pub each: f64,
}

impl Points {
    /// One more. What is not finite, or not above zero, was not measured.
    pub fn add(&mut self, x: f64, y: f64) {
        if x > 0.0 && y > 0.0 && x.is_finite() && y.is_finite() {
            self.join(&Points { n: 1.0, x, y, xx: x * x, xy: x * y });
        }
    }

    /// What it takes where there is nothing at all: a point at x = 0, which [`Points::add`] would not have.
    pub fn rest(&mut self, y: f64) {
        if y > 0.0 && y.is_finite() {
            self.join(&Points { n: 1.0, y, ..Points::default() });
        }
    }

    /// All of another's.
    pub fn join(&mut self, other: &Points) {
        self.n += other.n;
        self.x += other.x;
        self.y += other.y;
        self.xx += other.xx;
        self.xy += other.xy;
    }

    /// The same, with no more weight than `n` points have: what is old gives way to what is new.
    pub fn faded(&self, n: f64) -> Points {
        let by = if self.n > n { n / self.n } else { 1.0 };
        Points { n: self.n * by, x: self.x * by, y: self.y * by, xx: self.xx * by, xy: self.xy * by }
    }

    /// The same, had everything taken that many times as long.
    pub fn slower(&self, factor: f64) -> Points {
        Points { y: self.y * factor, xy: self.xy * factor, ..*self }
    }

    /// The line with the least sum of squared distances in y; None without points.
    pub fn line(&self) -> Option<Line> {
        let Points { n, x, y, xx, xy } = *self;
        let sound = [n, x, y, xx, xy].iter().all(|v| v.is_finite() && *v > 0.0);
        if !sound {
            return None;
        }
        let spread = n * xx - x * x;
        // Points of one size, as far as rounding goes, say nothing of a fixed part.
        if spread > 1e-9 * n * xx {
            let each = (n * xy - x * y) / spread;
            let fixed = (y - each * x) / n;
            if each > 0.0 && fixed >= 0.0 {
                return Some(Line { fixed, each });
            }
        }
        Some(Line { fixed: 0.0, each: y / x })
    }
}

impl Line {
    /// At x.
    pub fn at(&self, x: f64) -> f64 {
        self.fixed + self.each * x
    }

    /// The same line of something that many times as large.
    pub fn times(&self, factor: f64) -> Line {
        Line { fixed: self.fixed * factor, each: self.each * factor }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check(points: &[(f64, f64)], fixed: f64, each: f64) {
        let mut sums = Points::default();
        points.iter().for_each(|&(x, y)| sums.add(x, y));
        let line = sums.line().unwrap();
        let near = |a: f64, b: f64| (a - b).abs() <= 1e-9 * b.abs().max(1.0);
        assert!(near(line.fixed, fixed) && near(line.each, each), "{points:?}: {line:?}");
    }

    #[test]
    fn least_squares_fits_known_lines() {
        check(&[(1.0, 5.0), (2.0, 7.0), (5.0, 13.0)], 3.0, 2.0);
        // By hand: means 2 and 4; slope (1 * 1 + 1 * 2) / 2 = 1.5, and 4 - 3 = 1.
        check(&[(1.0, 3.0), (2.0, 3.0), (3.0, 6.0)], 1.0, 1.5);
        // The line of these has a negative fixed part.
        check(&[(1.0, 1.0), (3.0, 5.0)], 0.0, 1.5);
        // And of these, units that cost less than nothing.
        check(&[(1.0, 5.0), (2.0, 4.0)], 0.0, 3.0);
        check(&[(4.0, 8.0)], 0.0, 2.0);
        check(&[(4.0, 8.0), (4.0, 10.0)], 0.0, 2.25);
    }

    #[test]
    fn idle_point_gives_the_fixed_part() {
        let mut sums = Points::default();
        sums.rest(7.0);
        assert_eq!(sums.line(), None, "nothing moved yet");
        sums.add(4.0, 15.0);
        assert_eq!(sums.line(), Some(Line { fixed: 7.0, each: 2.0 }));
    }

    #[test]
    fn invalid_points_are_ignored() {
        let mut sums = Points::default();
        for (x, y) in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY), (-1.0, 1.0)] {
            sums.add(x, y);
        }
        assert_eq!((sums, sums.line()), (Points::default(), None));
    }

    #[test]
    fn new_points_outweigh_faded_ones() {
        let of = |y: f64, n: usize| {
            let mut sums = Points::default();
            (0..n).for_each(|i| sums.add((1 + i % 4) as f64, y * (1 + i % 4) as f64));
            sums
        };
        let mut sums = of(1.0, 1000).faded(8.0);
        assert!((sums.n - 8.0).abs() < 1e-12 && (sums.line().unwrap().each - 1.0).abs() < 1e-9);
        sums.join(&of(2.0, 80));
        let each = sums.line().unwrap().each;
        assert!((1.85..1.95).contains(&each), "{each}");
        assert_eq!(of(1.0, 4).faded(8.0), of(1.0, 4));
    }
}

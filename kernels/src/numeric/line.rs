//! A least-squares line through measured points: a cost is a fixed part plus a part per unit. Points are stored as five
//! sums, so that the points of two measurements can be added, and a stream of points needs no memory. A negative fixed
//! part and a cost per unit of zero or less are implausible: the line then goes through the origin.

use serde::{Deserialize, Serialize};

/// Points (x, y) as sums; each point has weight one unless it was faded.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Points {
    /// Number of points.
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

/// The line y = fixed + each * x.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// Fixed cost.
    pub fixed: f64,
    /// Cost per unit.
    pub each: f64,
}

impl Points {
    /// Adds a point. A value that is not finite or not positive is not a measurement and is ignored.
    pub fn add(&mut self, x: f64, y: f64) {
        if x > 0.0 && y > 0.0 && x.is_finite() && y.is_finite() {
            self.join(&Points { n: 1.0, x, y, xx: x * x, xy: x * y });
        }
    }

    /// Adds a point at x = 0, which is the cost without any unit; [`Points::add`] ignores such a point.
    pub fn rest(&mut self, y: f64) {
        if y > 0.0 && y.is_finite() {
            self.join(&Points { n: 1.0, y, ..Points::default() });
        }
    }

    /// Adds all points of `other`.
    pub fn join(&mut self, other: &Points) {
        self.n += other.n;
        self.x += other.x;
        self.y += other.y;
        self.xx += other.xx;
        self.xy += other.xy;
    }

    /// The same points with a total weight of at most `n`, so that new points outweigh old ones.
    pub fn faded(&self, n: f64) -> Points {
        let by = if self.n > n { n / self.n } else { 1.0 };
        Points { n: self.n * by, x: self.x * by, y: self.y * by, xx: self.xx * by, xy: self.xy * by }
    }

    /// The same points with all costs multiplied by `factor`.
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
        // Points of a single size, up to rounding, do not determine a fixed part.
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
    /// The cost at x.
    pub fn at(&self, x: f64) -> f64 {
        self.fixed + self.each * x
    }

    /// The line with both costs multiplied by `factor`.
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
    fn line_is_the_least_squares_line() {
        check(&[(1.0, 5.0), (2.0, 7.0), (5.0, 13.0)], 3.0, 2.0);
        // By hand: means 2 and 4; slope (1 * 1 + 1 * 2) / 2 = 1.5, and 4 - 3 = 1.
        check(&[(1.0, 3.0), (2.0, 3.0), (3.0, 6.0)], 1.0, 1.5);
        // The least-squares line has a negative fixed part.
        check(&[(1.0, 1.0), (3.0, 5.0)], 0.0, 1.5);
        // The least-squares line has a negative slope.
        check(&[(1.0, 5.0), (2.0, 4.0)], 0.0, 3.0);
        check(&[(4.0, 8.0)], 0.0, 2.0);
        check(&[(4.0, 8.0), (4.0, 10.0)], 0.0, 2.25);
    }

    #[test]
    fn point_at_zero_determines_the_fixed_part() {
        let mut sums = Points::default();
        sums.rest(7.0);
        assert_eq!(sums.line(), None, "nothing moved yet");
        sums.add(4.0, 15.0);
        assert_eq!(sums.line(), Some(Line { fixed: 7.0, each: 2.0 }));
    }

    #[test]
    fn invalid_measurements_are_ignored() {
        let mut sums = Points::default();
        for (x, y) in [(0.0, 1.0), (1.0, 0.0), (f64::NAN, 1.0), (1.0, f64::INFINITY), (-1.0, 1.0)] {
            sums.add(x, y);
        }
        assert_eq!((sums, sums.line()), (Points::default(), None));
    }

    #[test]
    fn new_points_outweigh_faded_points() {
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

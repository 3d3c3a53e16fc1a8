//! Curves over steps. A picture has no more points than pixels can tell apart: of all that fall on one column the
//! lowest and the highest stay, so that no spike is lost in a long run.

use super::scale::{Scale, compact, ticks};
use super::svg::Svg;

/// Room for the numbers at the left, and the margins above, at the right, and below.
const LEFT: f64 = 46.0;
const TOP: f64 = 28.0;
const RIGHT: f64 = 12.0;
const BOTTOM: f64 = 24.0;

/// How a curve is drawn.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// A line.
    Line,
    /// A line that stays in the background: the raw values behind a smoothed curve.
    Faint,
    /// A line with a dot at every value.
    Dots,
}

/// Values over steps, ascending.
#[derive(Debug, Clone, PartialEq)]
pub struct Curve {
    /// What stands in the legend; nothing where it needs none.
    pub name: String,
    /// Colour 0..8.
    pub colour: usize,
    /// How it is drawn.
    pub style: Style,
    /// Step and value; what is not finite is left out.
    pub points: Vec<(f64, f64)>,
}

/// Curves with a common pair of axes.
#[derive(Debug, Clone, PartialEq)]
pub struct Chart {
    /// What it shows, with its unit.
    pub title: String,
    /// In the order in which they are drawn.
    pub curves: Vec<Curve>,
    /// The last step of the run, so that a running one shows how far it is.
    pub last: f64,
    /// True where 0 belongs to the picture (rates, counts).
    pub from_zero: bool,
}

impl Chart {
    /// The picture, `width` x `height` pixels. No value at all: a frame that says so.
    pub fn draw(&self, width: f64, height: f64) -> Svg {
        let mut svg = Svg::new(width, height, &self.title);
        svg.text("heading", (0.0, 13.0), "start", &self.title);
        let finite = |p: &&(f64, f64)| p.0.is_finite() && p.1.is_finite();
        let all: Vec<(f64, f64)> =
            self.curves.iter().flat_map(|c| c.points.iter().filter(finite)).copied().collect();
        let plot = (LEFT, TOP, width - RIGHT, height - BOTTOM);
        if all.is_empty() {
            svg.text("label", (width / 2.0, height / 2.0), "middle", "no data yet");
            return svg;
        }
        let (x, y) = self.scales(&all, plot);
        axes(&mut svg, (x, y), plot);
        for curve in &self.curves {
            let points: Vec<(f64, f64)> = curve.points.iter().filter(finite).copied().collect();
            if points.is_empty() {
                continue;
            }
            let thin: Vec<(f64, f64)> =
                thinned(&points, x, plot.2 - plot.0).iter().map(|p| (x.at(p.0), y.at(p.1))).collect();
            let faint = if curve.style == Style::Faint { " faint" } else { "" };
            let alone = points.len() == 1;
            if !alone {
                svg.path(&format!("curve s{}{faint}", curve.colour), &thin);
            }
            if alone || (curve.style == Style::Dots && points.len() <= 200) {
                for (step, value) in &points {
                    let tip = format!("{} {}: {}", curve.name, compact(*step), precise(*value));
                    svg.dot(&format!("f{}", curve.colour), (x.at(*step), y.at(*value)), &tip);
                }
            }
        }
        self.legend(&mut svg, width);
        svg
    }

    fn scales(&self, all: &[(f64, f64)], plot: (f64, f64, f64, f64)) -> (Scale, Scale) {
        let bounds = |values: &mut dyn Iterator<Item = f64>| {
            values.fold((f64::INFINITY, f64::NEG_INFINITY), |(l, h), v| (l.min(v), h.max(v)))
        };
        let (first, last) = bounds(&mut all.iter().map(|p| p.0));
        let (mut low, mut high) = bounds(&mut all.iter().map(|p| p.1));
        let air = (high - low) * 0.06;
        (low, high) = match self.from_zero {
            true => (low.min(0.0), high + (high - low.min(0.0)) * 0.06),
            false => (low - air, high + air),
        };
        (
            Scale::new((first, last.max(self.last)), (plot.0, plot.2)),
            Scale::new((low, high), (plot.3, plot.1)),
        )
    }

    fn legend(&self, svg: &mut Svg, width: f64) {
        let mut at = width - RIGHT;
        for curve in self.curves.iter().rev().filter(|c| !c.name.is_empty()) {
            svg.text("label", (at, 13.0), "end", &curve.name);
            // No font is measured: six pixels and a half a character at 11 pixels, on the safe side.
            at -= curve.name.chars().count() as f64 * 6.5 + 8.0;
            let faint = if curve.style == Style::Faint { " faint" } else { "" };
            svg.line(&format!("curve key s{}{faint}", curve.colour), (at - 12.0, 9.5), (at, 9.5));
            at -= 26.0;
        }
    }
}

fn axes(svg: &mut Svg, (x, y): (Scale, Scale), (left, top, right, bottom): (f64, f64, f64, f64)) {
    for value in ticks(y.domain(), ((bottom - top) / 42.0).max(2.0) as usize) {
        svg.line("grid", (left, y.at(value)), (right, y.at(value)));
        svg.text("label", (left - 6.0, y.at(value) + 3.5), "end", &compact(value));
    }
    svg.line("axis", (left, bottom), (right, bottom));
    let count = ((right - left) / 90.0).max(2.0) as usize;
    // One number at an edge says nothing of its scale.
    let some = Some(ticks(x.domain(), count)).filter(|values| values.len() > 2);
    for value in some.unwrap_or_else(|| ticks(x.domain(), 2 * count)) {
        if value.fract() == 0.0 {
            svg.text("label", (x.at(value), bottom + 15.0), "middle", &compact(value));
        }
    }
}

/// At most two points for every two pixels.
fn thinned(points: &[(f64, f64)], x: Scale, width: f64) -> Vec<(f64, f64)> {
    let columns = (width / 2.0).max(1.0);
    if points.len() as f64 <= columns * 2.0 {
        return points.to_vec();
    }
    let column = |p: &(f64, f64)| (x.at(p.0) / 2.0) as i64;
    let mut out: Vec<(f64, f64)> = Vec::with_capacity(2 * columns as usize);
    for group in points.chunk_by(|a, b| column(a) == column(b)) {
        let low = group.iter().min_by(|a, b| a.1.total_cmp(&b.1));
        let high = group.iter().max_by(|a, b| a.1.total_cmp(&b.1));
        if let (Some(low), Some(high)) = (low, high) {
            let (first, second) = if low.0 <= high.0 { (low, high) } else { (high, low) };
            out.push(*first);
            if first != second {
                out.push(*second);
            }
        }
    }
    out
}

fn precise(value: f64) -> String {
    if value.abs() >= 1e-3 { format!("{value:.4}") } else { format!("{value:.3e}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chart(points: Vec<(f64, f64)>) -> Chart {
        let curve = Curve { name: "train".into(), colour: 0, style: Style::Line, points };
        Chart { title: "loss".into(), curves: vec![curve], last: 0.0, from_zero: false }
    }

    #[test]
    fn chart_of_a_long_run_is_small_and_keeps_its_spike() {
        let mut points: Vec<(f64, f64)> = (1..=100_000).map(|s| (s as f64, 1.0)).collect();
        points[70_123].1 = 9.0;
        let svg = chart(points).draw(720.0, 260.0).inline();
        assert!(svg.len() < 16_000, "{} bytes", svg.len());
        // The spike reaches the top of the plot, but for the air above it.
        let top = TOP + (260.0 - TOP - BOTTOM) * 0.06 / 1.12;
        assert!(svg.contains(&format!(" {top:.1}")), "{svg}");
    }

    #[test]
    fn empty_and_non_finite_series_draw_no_nan() {
        for points in [vec![], vec![(1.0, f64::NAN)], vec![(1.0, f64::INFINITY)]] {
            assert!(chart(points).draw(300.0, 200.0).inline().contains("no data yet"));
        }
        let svg = chart(vec![(1.0, 2.0), (2.0, f64::NAN), (3.0, 4.0)]).draw(300.0, 200.0).inline();
        assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        let one = chart(vec![(1.0, 2.0)]).draw(300.0, 200.0).inline();
        assert!(one.contains(r#"<circle class="f0 dot""#) && !one.contains("NaN"), "{one}");
    }
}

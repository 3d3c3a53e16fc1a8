//! The connections of a run: the coordinator at the left, its workers with their devices in a column at the right.

use super::svg::{Svg, fitting};

const CARD: f64 = 66.0;
const GAP: f64 = 14.0;
const TOP: f64 = 30.0;

/// A worker.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Name of the worker.
    pub name: String,
    /// Devices of the worker, or the reason why it left.
    pub detail: String,
    /// Texts above and below the link: share of the work, and bandwidth.
    pub link: (String, String),
    /// False once the worker has left.
    pub here: bool,
}

/// A star network.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Name of the centre, and a line about it.
    pub centre: (String, String),
    /// The nodes around the centre.
    pub nodes: Vec<Node>,
}

impl Topology {
    /// The picture; its height depends on the number of nodes.
    pub fn draw(&self, width: f64) -> Svg {
        let rows = self.nodes.len().max(1) as f64;
        let height = TOP + rows * CARD + (rows - 1.0) * GAP + 8.0;
        let mut svg = Svg::new(width, height, "topology");
        svg.text("heading", (0.0, 13.0), "start", "topology");
        let card = (width * 0.38).min(240.0);
        let middle = TOP + (height - 8.0 - TOP) / 2.0;
        let right = width - card;
        for (i, node) in self.nodes.iter().enumerate() {
            let y = TOP + i as f64 * (CARD + GAP);
            let class = if node.here { "link" } else { "link gone" };
            let (from, to) = ((card, middle), (right, y + CARD / 2.0));
            let bend = (card + right) / 2.0;
            svg.path(class, &curve(from, to));
            let on = (from.1 + to.1) / 2.0;
            for (y, text) in [(on - 5.0, &node.link.0), (on + 14.0, &node.link.1)] {
                svg.text("over", (bend, y), "middle", &fitting(text, right - card - 8.0));
            }
            let class = if node.here { "card" } else { "card gone" };
            put(&mut svg, class, (right, y, card), (&node.name, &node.detail));
        }
        put(&mut svg, "card", (0.0, middle - CARD / 2.0, card), (&self.centre.0, &self.centre.1));
        svg
    }
}

fn put(svg: &mut Svg, class: &str, (x, y, width): (f64, f64, f64), (name, detail): (&str, &str)) {
    svg.block(class, (x + 1.0, y, width - 2.0, CARD), &format!("{name}: {detail}"));
    svg.text("name", (x + 12.0, y + 22.0), "start", &fitting(name, width - 36.0));
    let (first, second) = halves(detail, width - 20.0);
    svg.text("label", (x + 12.0, y + 40.0), "start", &first);
    svg.text("label", (x + 12.0, y + 54.0), "start", &second);
}

/// Splits `text` at a blank into two lines; the second line is cut at `width`.
fn halves(text: &str, width: f64) -> (String, String) {
    let fits = |line: &str| fitting(line, width) == line;
    let ends = text.match_indices(' ').map(|(at, _)| at).chain([text.len()]);
    let at = ends.take_while(|at| fits(&text[..*at])).last();
    match at {
        Some(at) => (text[..at].into(), fitting(text[at..].trim_start(), width)),
        None => (fitting(text, width), String::new()),
    }
}

/// A smooth curve from one point to another, as points.
fn curve((x0, y0): (f64, f64), (x1, y1): (f64, f64)) -> Vec<(f64, f64)> {
    (0..=24)
        .map(|i| {
            let t = f64::from(i) / 24.0;
            (x0 + (x1 - x0) * t, y0 + (y1 - y0) * t * t * (3.0 - 2.0 * t))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn detail_is_split_into_two_lines() {
        for (text, want) in [
            ("cpu 0", ("cpu 0", "")),
            ("172 MB in, 1.2 GB out", ("172 MB in,", "1.2 GB out")),
            ("incomprehensibilities", ("incomprehe…", "")),
            ("the other side closed the connection", ("the other", "side close…")),
            ("", ("", "")),
        ] {
            let (first, second) = halves(text, 72.0);
            assert_eq!((first.as_str(), second.as_str()), want);
        }
    }
}

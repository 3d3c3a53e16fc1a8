//! The connections of a run: the coordinator at the left, its workers with their devices in a column at the right.

use super::svg::{Svg, fitting};

const CARD: f64 = 66.0;
const GAP: f64 = 14.0;
/// Between the cards of workers that hold the model together.
const JOINT: f64 = 24.0;
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
    /// Where it stands for several that hold the model together: their names, a line about each, and a text for the link
    /// to the next one.
    pub seats: Vec<(String, String, String)>,
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
        let heights: Vec<f64> = self.nodes.iter().map(Node::height).collect();
        let rows = heights.len().max(1) as f64;
        let height = TOP + heights.iter().sum::<f64>().max(CARD) + (rows - 1.0) * GAP + 8.0;
        let mut svg = Svg::new(width, height, "topology");
        svg.text("heading", (0.0, 13.0), "start", "topology");
        let card = (width * 0.38).min(240.0);
        let middle = TOP + (height - 8.0 - TOP) / 2.0;
        let right = width - card;
        let mut y = TOP;
        for (node, height) in self.nodes.iter().zip(heights) {
            let class = if node.here { "link" } else { "link gone" };
            let (from, to) = ((card, middle), (right, y + height / 2.0));
            let bend = (card + right) / 2.0;
            svg.path(class, &curve(from, to));
            let on = (from.1 + to.1) / 2.0;
            for (y, text) in [(on - 5.0, &node.link.0), (on + 14.0, &node.link.1)] {
                svg.text("over", (bend, y), "middle", &fitting(text, right - card - 8.0));
            }
            node.put(&mut svg, (right, y, card));
            y += height + GAP;
        }
        put(&mut svg, "card", (0.0, middle - CARD / 2.0, card), (&self.centre.0, &self.centre.1));
        svg
    }
}

impl Node {
    fn height(&self) -> f64 {
        let cards = self.seats.len().max(1) as f64;
        cards * CARD + (cards - 1.0) * JOINT
    }

    /// Draws its card, or those of its seats below each other.
    fn put(&self, svg: &mut Svg, (x, y, width): (f64, f64, f64)) {
        let class = if self.here { "card" } else { "card gone" };
        if self.seats.is_empty() {
            return put(svg, class, (x, y, width), (&self.name, &self.detail));
        }
        let link = if self.here { "link" } else { "link gone" };
        for (at, (name, detail, next)) in self.seats.iter().enumerate() {
            let y = y + at as f64 * (CARD + JOINT);
            if at + 1 < self.seats.len() {
                let below = y + CARD;
                svg.path(link, &[(x + 12.0, below), (x + 12.0, below + JOINT)]);
                svg.text(
                    "over",
                    (x + 20.0, below + JOINT / 2.0 + 4.0),
                    "start",
                    &fitting(next, width - 20.0),
                );
            }
            let detail = if self.here { detail } else { &self.detail };
            put(svg, class, (x, y, width), (name, detail));
        }
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
    fn workers_that_hold_the_model_together_are_joined_cards() {
        let seat = |name: &str| {
            (name.to_string(), "cpu, layers 0 to 14".to_string(), "4.6 MB each way a step".into())
        };
        let node = |seats| Node {
            name: "a + b".into(),
            detail: "cpu + cpu".into(),
            link: ("50 %".into(), String::new()),
            here: true,
            seats,
        };
        let centre = ("coordinator".to_string(), String::new());
        let picture = Topology { centre, nodes: vec![node(vec![seat("a"), seat("b")]), node(vec![])] };
        let text = picture.draw(600.0).inline();
        assert_eq!(text.matches("<rect class=\"card\"").count(), 4, "{text}");
        assert_eq!(text.matches("4.6 MB each way").count(), 1, "one link between two: {text}");
        assert_eq!(text.matches("<path class=\"link\"").count(), 3, "{text}");
    }

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

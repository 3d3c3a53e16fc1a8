//! Lanes over time: one lane per device, with the intervals in which the device was busy.

use super::scale::{Scale, ticks};
use super::svg::{Svg, fitting};
use crate::report::words::clock;

const ROW: f64 = 26.0;
const TOP: f64 = 30.0;
/// Height of a line of text above the lanes.
const LINE: f64 = 18.0;
/// Width of the key.
const KEY: f64 = 222.0;
const BOTTOM: f64 = 24.0;

/// A busy interval, in seconds since the run began.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    /// Start time.
    pub from: f64,
    /// End time.
    pub to: f64,
    /// Class of the colour: `compute`, `transfer`.
    pub kind: &'static str,
    /// Tooltip.
    pub tip: String,
}

/// The lane of one device.
#[derive(Debug, Clone, PartialEq)]
pub struct Lane {
    /// Label of the lane.
    pub name: String,
    /// Busy intervals, ascending and without overlaps; the gaps between them are idle time.
    pub blocks: Vec<Block>,
    /// Times at which the device joined and left; None if it joined before the picture begins, or has not left.
    pub there: (Option<f64>, Option<f64>),
}

/// Lanes that share one time axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Lanes {
    /// Title of the picture.
    pub title: String,
    /// Lanes from top to bottom.
    pub lanes: Vec<Lane>,
    /// End times of steps.
    pub marks: Vec<f64>,
}

impl Lanes {
    /// The picture; its height depends on the number of lanes.
    pub fn draw(&self, width: f64) -> Svg {
        let longest = self.lanes.iter().map(|l| l.name.chars().count()).max().unwrap_or(0);
        let left = (longest as f64 * 6.5 + 10.0).clamp(40.0, width * 0.34);
        // The key has a line of its own if the title leaves it no room.
        let below = if self.title.chars().count() as f64 * 7.5 + KEY > width { LINE } else { 0.0 };
        let top = TOP + below;
        let height = top + ROW * self.lanes.len().max(1) as f64 + BOTTOM;
        let mut svg = Svg::new(width, height, &self.title);
        svg.text("heading", (0.0, 13.0), "start", &self.title);
        self.key(&mut svg, (width, below));
        let blocks = || self.lanes.iter().flat_map(|l| &l.blocks);
        let from = blocks().map(|b| b.from).chain(self.marks.iter().copied()).fold(f64::INFINITY, f64::min);
        let to = blocks().map(|b| b.to).chain(self.marks.iter().copied()).fold(f64::NEG_INFINITY, f64::max);
        if !(from.is_finite() && to.is_finite()) {
            svg.text("label", (width / 2.0, height / 2.0 + 8.0), "middle", "no data yet");
            return svg;
        }
        let x = Scale::new((from, to), (left, width - 8.0));
        let bottom = height - BOTTOM;
        for (i, lane) in self.lanes.iter().enumerate() {
            let y = top + ROW * i as f64 + 4.0;
            svg.text("label", (left - 8.0, y + 12.5), "end", &fitting(&lane.name, left - 8.0));
            let (a, b) = lane.presence((from, to));
            if b > a {
                svg.block("idle", (x.at(a), y, x.at(b) - x.at(a), ROW - 8.0), "");
            }
            for block in &lane.blocks {
                let (a, b) = (x.at(block.from), x.at(block.to));
                svg.block(block.kind, (a, y, (b - a).max(0.4), ROW - 8.0), &block.tip);
            }
        }
        for mark in &self.marks {
            svg.line("mark", (x.at(*mark), top), (x.at(*mark), bottom));
        }
        svg.line("axis", (left, bottom), (width - 8.0, bottom));
        let values = ticks((from, to), ((width - left) / 90.0).max(2.0) as usize);
        let clock = clock_of(&values);
        for value in values {
            let text = clock(value);
            // The last label ends at the edge of the picture, not beyond it.
            let half = text.chars().count() as f64 * 3.3;
            svg.text("label", (x.at(value).min(width - half), bottom + 15.0), "middle", &text);
        }
        svg
    }

    fn key(&self, svg: &mut Svg, (width, below): (f64, f64)) {
        let mut at = width - 8.0;
        for kind in ["idle", "transfer", "compute"] {
            svg.text("label", (at, below + 13.0), "end", kind);
            at -= kind.len() as f64 * 6.5 + 16.0;
            svg.block(kind, (at, below + 4.0, 10.0, 10.0), "");
            at -= 14.0;
        }
    }
}

impl Lane {
    /// The part of a picture in which the device was present. Its busy intervals extend that part.
    fn presence(&self, (from, to): (f64, f64)) -> (f64, f64) {
        let first = self.blocks.first().map_or(to, |b| b.from);
        let last = self.blocks.last().map_or(from, |b| b.to);
        (
            self.there.0.map_or(from, |t| t.max(from).min(first)),
            self.there.1.map_or(to, |t| t.min(to).max(last)),
        )
    }
}

/// Formats all times of one axis alike: `0:07`, `12:30`, or `0:07.5` if one of them needs decimals.
fn clock_of(values: &[f64]) -> impl Fn(f64) -> String + use<> {
    let step = values.windows(2).map(|pair| pair[1] - pair[0]).fold(1.0, f64::min);
    let digits = if step < 1.0 { (-step.log10()).ceil().clamp(1.0, 3.0) as usize } else { 0 };
    move |seconds| clock(seconds, digits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn block_position_follows_its_time() {
        let block = |from, to| Block { from, to, kind: "compute", tip: "step 1".into() };
        let blocks = vec![block(0.0, 2.0), block(5.0, 10.0)];
        let lane = Lane { name: "gpu 0".into(), blocks, there: (None, None) };
        let lanes = Lanes { title: "devices".into(), lanes: vec![lane], marks: vec![10.0] };
        let svg = lanes.draw(450.0).inline();
        let left = "gpu 0".len() as f64 * 6.5 + 10.0;
        let per_second = (450.0 - 8.0 - left) / 10.0;
        let want = format!(r#"x="{:.1}" y="34.0" width="{:.2}""#, left + 5.0 * per_second, 5.0 * per_second);
        assert!(svg.contains(&want), "{want} in {svg}");
        let none = Lanes { title: "devices".into(), lanes: vec![], marks: vec![] };
        assert!(none.draw(300.0).inline().contains("no data yet"));
        let long = Lanes { title: "device activity, last steps".into(), ..none };
        let key = |width: f64| long.draw(width).inline().contains(r#"y="31.0" text-anchor="end">idle"#);
        assert!(key(340.0) && !key(700.0), "the key is below a title that leaves it no room");
    }

    #[test]
    fn times_of_one_axis_have_one_format() {
        for (values, want) in [
            (&[0.0, 5.0, 10.0][..], "0:00 0:05 0:10"),
            (&[15.0, 15.5, 16.0], "0:15.0 0:15.5 0:16.0"),
            (&[3600.0, 5400.0], "1:00:00 1:30:00"),
            (&[0.25, 0.3], "0:00.25 0:00.30"),
            (&[59.95, 60.0], "0:59.95 1:00.00"),
        ] {
            let clock = clock_of(values);
            assert_eq!(values.iter().map(|v| clock(*v)).collect::<Vec<_>>().join(" "), want);
        }
    }

    #[test]
    fn lane_ends_when_its_device_leaves() {
        let block = Block { from: 2.0, to: 4.0, kind: "compute", tip: String::new() };
        let lane = |there| Lane { name: "a".into(), blocks: vec![block.clone()], there };
        assert_eq!(lane((None, None)).presence((0.0, 9.0)), (0.0, 9.0));
        assert_eq!(lane((Some(1.0), Some(3.0))).presence((0.0, 9.0)), (1.0, 4.0), "what it did counts");
        assert_eq!(lane((Some(5.0), None)).presence((0.0, 9.0)), (2.0, 9.0));
        assert_eq!(lane((None, Some(20.0))).presence((0.0, 9.0)), (0.0, 9.0));
    }
}

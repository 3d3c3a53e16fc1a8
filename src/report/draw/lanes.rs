//! Lanes over time: one for each device, with what it did from when to when.

use super::scale::{Scale, ticks};
use super::svg::{Svg, fitting};

const ROW: f64 = 26.0;
const TOP: f64 = 30.0;
const BOTTOM: f64 = 24.0;

/// Something that took time, in seconds since the run began.
#[derive(Debug, Clone, PartialEq)]
pub struct Block {
    /// Its beginning.
    pub from: f64,
    /// Its end.
    pub to: f64,
    /// Class of its colour: `compute`, `transfer`.
    pub kind: &'static str,
    /// What it is, shown when it is pointed at.
    pub tip: String,
}

/// One device.
#[derive(Debug, Clone, PartialEq)]
pub struct Lane {
    /// Its name.
    pub name: String,
    /// Ascending, without overlaps; what lies between them is idle.
    pub blocks: Vec<Block>,
}

/// Lanes with a common clock.
#[derive(Debug, Clone, PartialEq)]
pub struct Lanes {
    /// What it shows.
    pub title: String,
    /// From top to bottom.
    pub lanes: Vec<Lane>,
    /// Times at which a step ended.
    pub marks: Vec<f64>,
}

impl Lanes {
    /// The picture; its height follows from the lanes.
    pub fn draw(&self, width: f64) -> Svg {
        let longest = self.lanes.iter().map(|l| l.name.chars().count()).max().unwrap_or(0);
        let left = (longest as f64 * 6.5 + 10.0).clamp(40.0, width * 0.34);
        let height = TOP + ROW * self.lanes.len().max(1) as f64 + BOTTOM;
        let mut svg = Svg::new(width, height, &self.title);
        svg.text("heading", (0.0, 13.0), "start", &self.title);
        self.key(&mut svg, width);
        let blocks = || self.lanes.iter().flat_map(|l| &l.blocks);
        let from = blocks().map(|b| b.from).chain(self.marks.iter().copied()).fold(f64::INFINITY, f64::min);
        let to = blocks().map(|b| b.to).chain(self.marks.iter().copied()).fold(f64::NEG_INFINITY, f64::max);
        if !(from.is_finite() && to.is_finite()) {
            svg.text("label", (width / 2.0, height / 2.0 + 8.0), "middle", "nothing yet");
            return svg;
        }
        let x = Scale::new((from, to), (left, width - 8.0));
        let bottom = height - BOTTOM;
        for (i, lane) in self.lanes.iter().enumerate() {
            let y = TOP + ROW * i as f64 + 4.0;
            svg.text("label", (left - 8.0, y + 12.5), "end", &fitting(&lane.name, left - 8.0));
            svg.block("idle", (left, y, width - 8.0 - left, ROW - 8.0), "");
            for block in &lane.blocks {
                let (a, b) = (x.at(block.from), x.at(block.to));
                svg.block(block.kind, (a, y, (b - a).max(0.4), ROW - 8.0), &block.tip);
            }
        }
        for mark in &self.marks {
            svg.line("mark", (x.at(*mark), TOP), (x.at(*mark), bottom));
        }
        svg.line("axis", (left, bottom), (width - 8.0, bottom));
        for value in ticks((from, to), ((width - left) / 90.0).max(2.0) as usize) {
            svg.text("label", (x.at(value), bottom + 15.0), "middle", &clock(value));
        }
        svg
    }

    fn key(&self, svg: &mut Svg, width: f64) {
        let mut at = width - 8.0;
        for kind in ["idle", "transfer", "compute"] {
            svg.text("label", (at, 13.0), "end", kind);
            at -= kind.len() as f64 * 6.5 + 16.0;
            svg.block(kind, (at, 4.0, 10.0, 10.0), "");
            at -= 14.0;
        }
    }
}

/// `0:07`, `12:30`, `1.25 s` where seconds are not enough.
fn clock(seconds: f64) -> String {
    if seconds.fract() != 0.0 {
        return format!("{} s", super::compact(seconds));
    }
    let s = seconds as u64;
    match s / 3600 {
        0 => format!("{}:{:02}", s / 60, s % 60),
        hours => format!("{hours}:{:02}:{:02}", s / 60 % 60, s % 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_lies_where_its_time_lies() {
        let block = |from, to| Block { from, to, kind: "compute", tip: "step 1".into() };
        let lane = Lane { name: "gpu 0".into(), blocks: vec![block(0.0, 2.0), block(5.0, 10.0)] };
        let lanes = Lanes { title: "devices".into(), lanes: vec![lane], marks: vec![10.0] };
        let svg = lanes.draw(450.0).inline();
        let left = "gpu 0".len() as f64 * 6.5 + 10.0;
        let per_second = (450.0 - 8.0 - left) / 10.0;
        let want = format!(r#"x="{:.1}" y="34.0" width="{:.2}""#, left + 5.0 * per_second, 5.0 * per_second);
        assert!(svg.contains(&want), "{want} in {svg}");
        let none = Lanes { title: "devices".into(), lanes: vec![], marks: vec![] };
        assert!(none.draw(300.0).inline().contains("nothing yet"));
    }
}

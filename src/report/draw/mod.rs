//! Pictures, drawn as SVG: pure functions of numbers. A picture is a separate file (light and dark) or part of the
//! page, where the page's style sheet applies; both have the same shapes. No font and no external program is needed.

mod curves;
mod lanes;
mod paint;
mod scale;
mod svg;
mod topology;

pub use curves::{Chart, Curve, Style};
pub use lanes::{Block, Lane, Lanes};
pub use scale::{Scale, compact, ticks};
pub use svg::{Svg, escape, fitting};
pub use topology::{Node, Topology};

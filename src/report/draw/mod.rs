//! Pictures, drawn as SVG: pure functions of numbers. A picture is a file of its own, in light and in dark, or part of
//! the page, whose style sheet then applies; both have the same shapes. Nothing needs a font or a program.

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

//! Lines on stderr. Whoever read them may have gone (`2>&1 | tee log`, ended by the same Ctrl-C; a terminal that was
//! closed): then a line is lost, never the run, as `eprintln!` would have it, which panics. A test keeps that one out.

use std::fmt::Arguments;
use std::io::Write;

/// Writes one line, at one go, so that lines of several threads stay whole.
pub fn line(text: Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("{text}\n").as_bytes());
}

/// As `eprintln!`, but nothing happens where nobody listens.
macro_rules! say {
    ($($text:tt)*) => { $crate::numeric::say::line(format_args!($($text)*)) };
}
pub(crate) use say;

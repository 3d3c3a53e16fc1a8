//! Lines on stderr. Whoever read them may have gone (`2>&1 | tee log`, ended by the same Ctrl-C; a terminal that was
//! closed): then a line is lost, never the run, as `eprintln!` would have it, which panics. A test keeps that one out.

use std::fmt::Arguments;
use std::io::Write;

/// Writes one line, at one go, so that lines of several threads stay whole.
pub fn line(text: Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("{}\n", printable(&text.to_string())).as_bytes());
}

/// Text for a terminal: rows, labels, models and strangers may hold control characters, which would move its cursor,
/// name its window or wipe it; they are shown escaped. Ends of lines and tabs stay.
pub fn printable(text: &str) -> String {
    escaped(text, |c| c.is_control() && !matches!(c, '\n' | '\t'))
}

/// The same on one line, whatever the text says.
pub fn inline(text: &str) -> String {
    escaped(text, char::is_control)
}

fn escaped(text: &str, which: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        match which(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
    }
    out
}

/// As `eprintln!`, but nothing happens where nobody listens.
macro_rules! say {
    ($($text:tt)*) => { $crate::numeric::say::line(format_args!($($text)*)) };
}
pub(crate) use say;

//! Lines on stderr. The reader of stderr may be gone (`2>&1 | tee log`, ended by the same Ctrl-C; a closed terminal):
//! then the line is lost and the run continues, whereas `eprintln!` would panic. A test forbids `eprintln!`.

use std::fmt::Arguments;
use std::io::Write;

/// Writes one line in one call, so that lines of several threads stay whole.
pub fn line(text: Arguments<'_>) {
    let _ = std::io::stderr().write_all(format!("{}\n", printable(&text.to_string())).as_bytes());
}

/// Escapes text for a terminal: rows, labels, models and other machines may contain characters that move the cursor,
/// set the window's title, clear the screen, or reorder the shown text. Line ends and tabs stay.
pub fn printable(text: &str) -> String {
    escaped(text, |c| !matches!(c, '\n' | '\t'))
}

/// Like [`printable`], on one line: line ends are escaped too.
pub fn inline(text: &str) -> String {
    escaped(text, |_| true)
}

/// Escapes the control characters, line and paragraph separators and format characters that `which` selects. A joiner
/// after a character that is not ASCII stays, because scripts and emoji need it.
fn escaped(text: &str, which: impl Fn(char) -> bool) -> String {
    let mut out = String::with_capacity(text.len());
    let mut before = ' ';
    for c in text.chars() {
        let joins = matches!(c, '\u{200c}' | '\u{200d}') && !before.is_ascii();
        match (c.is_control() || is_format(c)) && !joins && which(c) {
            true => out.extend(c.escape_default()),
            false => out.push(c),
        }
        before = c;
    }
    out
}

/// Whether a character is a line or paragraph separator, or one of Unicode's invisible format characters (category Cf):
/// directions, joiners, zero width, tags.
fn is_format(c: char) -> bool {
    matches!(c,
        '\u{ad}' | '\u{61c}' | '\u{180e}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
        | '\u{feff}' | '\u{fff9}'..='\u{fffb}' | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}'
        | '\u{e0000}'..='\u{e007f}')
}

/// Like `eprintln!`, but does nothing where stderr is closed.
#[macro_export]
macro_rules! say {
    ($($text:tt)*) => { $crate::support::stderr::line(format_args!($($text)*)) };
}
pub use crate::say;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn foreign_text_cannot_leave_its_line() {
        for (text, line, lines) in [
            ("plain äöü 漢字", "plain äöü 漢字", "plain äöü 漢字"),
            ("a\nnote: all is well\t", "a\\nnote: all is well\\t", "a\nnote: all is well\t"),
            ("\x1b[2J\r\u{9b}", "\\u{1b}[2J\\r\\u{9b}", "\\u{1b}[2J\\r\\u{9b}"),
            ("a\u{202e}b\u{2066}", "a\\u{202e}b\\u{2066}", "a\\u{202e}b\\u{2066}"),
            ("a\u{2028}b\u{200b}\u{feff}", "a\\u{2028}b\\u{200b}\\u{feff}", "a\\u{2028}b\\u{200b}\\u{feff}"),
            ("worker\u{200d}1", "worker\\u{200d}1", "worker\\u{200d}1"),
            ("\u{1f469}\u{200d}\u{1f4bb}", "\u{1f469}\u{200d}\u{1f4bb}", "\u{1f469}\u{200d}\u{1f4bb}"),
        ] {
            assert_eq!((inline(text).as_str(), printable(text).as_str()), (line, lines), "{text:?}");
        }
    }
}

//! Text that another machine sent, made fit for a terminal, a log and a page.

use crate::support::stderr::inline;

/// Longest text of another machine that is shown, in characters.
const LONGEST: usize = 1000;

/// One printable line of at most [`LONGEST`] characters of the text.
pub(super) fn plain(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => inline(&text[..end]) + "...",
        None => inline(text),
    }
}

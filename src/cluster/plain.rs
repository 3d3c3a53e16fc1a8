//! Makes text of another machine safe for a terminal, a log and a page.

use crate::support::stderr::inline;

/// Most characters of such a text that are shown.
const LONGEST: usize = 1000;

/// At most [`LONGEST`] characters of the text as one printable line.
pub(super) fn plain(text: &str) -> String {
    match text.char_indices().nth(LONGEST) {
        Some((end, _)) => inline(&text[..end]) + "...",
        None => inline(text),
    }
}

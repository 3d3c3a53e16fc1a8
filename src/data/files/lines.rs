//! Observes the bytes between a reader and a parser: the bytes since the last row, and the starts of lines.

use super::LONGEST;
use std::cell::RefCell;
use std::collections::VecDeque;
use std::io::{self, Read};
use std::rc::Rc;

/// Shared by the parser's reader and the consumer of its rows.
#[derive(Clone, Default)]
pub struct Lines(Rc<RefCell<Seen>>);

#[derive(Default)]
struct Seen {
    /// Bytes read.
    read: u64,
    /// Value of `read` at the end of the last row.
    taken: u64,
    /// Number of the current line, from 0.
    line: u64,
    /// True at the start of a line.
    fresh: bool,
    last: u8,
    /// (first byte, line number from 1) of non-empty lines, without those of earlier rows.
    begins: VecDeque<(u64, u64)>,
    /// True if no line numbers are needed; `begins` then stays empty.
    uncounted: bool,
}

impl Lines {
    /// A counter for rows that have no line numbers.
    pub fn uncounted() -> Self {
        Lines(Rc::new(RefCell::new(Seen { uncounted: true, ..Seen::default() })))
    }

    /// Wraps `reader`. Reading fails once a row is longer than `LONGEST`.
    pub fn watch<R: Read>(&self, reader: R) -> impl Read + use<R> {
        Watched { reader, lines: self.clone() }
    }

    /// Marks the end of a row.
    pub fn next_row(&self) {
        let seen = &mut *self.0.borrow_mut();
        seen.taken = seen.read;
    }

    /// Whether the current row is longer than `LONGEST`.
    pub fn exceeded(&self) -> bool {
        let seen = self.0.borrow();
        seen.read - seen.taken > LONGEST
    }

    /// The line number (from 1) of the row that begins at or after byte `at`: empty lines and the rest of a line end
    /// may precede it. Rows must be requested in their order.
    pub fn line(&self, at: u64) -> u64 {
        let seen = &mut *self.0.borrow_mut();
        while seen.begins.len() > 1 && seen.begins[0].0 < at {
            seen.begins.pop_front();
        }
        seen.begins.front().map_or(1, |(_, line)| *line)
    }
}

impl Seen {
    fn see(&mut self, bytes: &[u8]) {
        if self.uncounted {
            self.read += bytes.len() as u64;
            return;
        }
        for &byte in bytes {
            match byte {
                b'\n' if self.last == b'\r' => {}
                b'\n' | b'\r' => {
                    self.line += 1;
                    self.fresh = true;
                }
                _ if self.fresh || self.read == 0 => {
                    self.begins.push_back((self.read, self.line + 1));
                    self.fresh = false;
                }
                _ => {}
            }
            self.last = byte;
            self.read += 1;
        }
    }
}

struct Watched<R> {
    reader: R,
    lines: Lines,
}

impl<R: Read> Read for Watched<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.lines.exceeded() {
            return Err(io::Error::other("a row is too long"));
        }
        let read = self.reader.read(buffer)?;
        self.lines.0.borrow_mut().see(&buffer[..read]);
        Ok(read)
    }
}

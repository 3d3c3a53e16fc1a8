//! What passes through a reader on its way into a parser: how much since the last row, and where lines begin.

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
    /// Of these, when the last row was taken.
    taken: u64,
    /// The number of the line that `read` is in, from 0.
    line: u64,
    /// The last byte read ended a line, or none was read.
    fresh: bool,
    last: u8,
    /// (first byte, number from 1) of lines that are not empty, those of rows already taken left out.
    begins: VecDeque<(u64, u64)>,
    /// `begins` stays empty: whoever reads asks for no line.
    uncounted: bool,
}

impl Lines {
    /// For rows that are not addressed by lines.
    pub fn uncounted() -> Self {
        Lines(Rc::new(RefCell::new(Seen { uncounted: true, ..Seen::default() })))
    }

    /// The reader, watched. It fails when a row is longer than `LONGEST`.
    pub fn watch<R: Read>(&self, reader: R) -> impl Read + use<R> {
        Watched { reader, lines: self.clone() }
    }

    /// A row is complete.
    pub fn next_row(&self) {
        let seen = &mut *self.0.borrow_mut();
        seen.taken = seen.read;
    }

    /// Whether a row was longer than `LONGEST`.
    pub fn exceeded(&self) -> bool {
        let seen = self.0.borrow();
        seen.read - seen.taken > LONGEST
    }

    /// The line (from 1) of the row that begins at or after the byte `at`: empty lines and the rest of a line's end may
    /// stand before it. Rows must be asked for in their order.
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

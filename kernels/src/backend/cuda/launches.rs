//! Launches of the forms that several verbs share.

use super::{Arg, Cuda, Driver, Launch, Memory, Tokens, at, at_mut, blocks, size};
use crate::backend::{View, ViewMut, Write};

/// Threads of kernels without sums.
pub(super) const THREADS: usize = 256;
/// Edge of a product's tile.
const TILE: usize = 64;

pub(super) fn adds(write: Write) -> Arg {
    Arg::U32(u32::from(write == Write::Add))
}

/// The sizes and strides of a product out[m, n], summed over k.
#[derive(Debug, Clone, Copy)]
pub(super) struct Shape {
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub lda: usize,
    pub ldb: usize,
    pub ldo: usize,
}

impl Shape {
    /// The arguments that every kernel of products takes.
    pub fn args(&self, (out, write): (Arg, Write), (a, b): (Arg, Arg), scale: f32) -> [Arg; 11] {
        let [m, n, k, lda, ldb, ldo] = [self.m, self.n, self.k, self.lda, self.ldb, self.ldo].map(size);
        [out, a, b, m, n, k, lda, ldb, ldo, Arg::F32(scale), adds(write)]
    }
}

impl<D: Driver> Cuda<D> {
    /// Launches one thread per value.
    pub(super) fn each(&mut self, file: &'static str, n: usize, args: &[Arg]) {
        let entry = file.trim_end_matches(".ptx");
        self.launch(Launch { file, entry, grid: [blocks(n, THREADS), 1, 1], threads: THREADS as u32, args });
    }

    /// Launches blocks of threads per row, each for a part of the row.
    pub(super) fn rows(
        &mut self,
        file: &'static str,
        entry: &str,
        (rows, cols): (usize, usize),
        args: &[Arg],
    ) {
        let grid = [blocks(rows, 1), blocks(cols, THREADS), 1];
        self.launch(Launch { file, entry, grid, threads: THREADS as u32, args });
    }

    pub(super) fn product(
        &mut self,
        at_entry: (&'static str, &str),
        out: (Arg, Write),
        ab: (Arg, Arg),
        scale: f32,
        s: Shape,
    ) {
        let args = s.args(out, ab, scale);
        let grid = [blocks(s.n, TILE), blocks(s.m, TILE), 1];
        self.launch(Launch { file: at_entry.0, entry: at_entry.1, grid, threads: 256, args: &args });
    }

    /// Whether the table has the positions of all tokens. If not, records a fault.
    pub(super) fn turns(&mut self, table: &View<Memory>, tokens: &Tokens) -> bool {
        let there = tokens.count == 0 || (tokens.largest.1 as usize) < table.rows;
        if !there {
            self.refuse(format!("position {} of a table of {}", tokens.largest.1, table.rows));
        }
        there
    }

    pub(super) fn turn(&mut self, x: ViewMut<Memory>, table: View<Memory>, tokens: &Tokens, sign: f32) {
        if !self.turns(&table, tokens) {
            return;
        }
        let args = [
            at_mut(&x),
            at(&table),
            Arg::Address(tokens.positions()),
            size(x.cols),
            size(table.cols),
            Arg::F32(sign),
        ];
        self.rows("rope.ptx", "rope", (x.rows, x.cols / 2), &args);
    }
}

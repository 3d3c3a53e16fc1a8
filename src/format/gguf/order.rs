//! How a tensor of a GGUF file differs from that of Hugging Face: the order of its rows or columns, an offset, and the rates
//! of decays, of which Hugging Face has the logarithm.
//!
//! llama.cpp permutes the rows of q and k for arch `llama`, so that rotary pairs are side by side; Hugging Face has them
//! half a head apart. Value heads of a delta rule are stored by their number within their key head, in Hugging Face by
//! their key head. Rows are whole blocks in every kind, so they are put back as they are; columns where heads are.

use crate::families::tensors::{BESIDE_DELTA_RULE, DELTA_BIAS, DELTA_RATE, DELTA_RULE, DELTA_TAPS};
use crate::families::{Family, tensors};

/// Value heads that share key heads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shared {
    /// Key heads.
    pub keys: usize,
    /// Value heads of each.
    pub values: usize,
    /// Rows of q and k together.
    pub before: usize,
    /// Size of a value head.
    pub size: usize,
}

/// The orders of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Orders {
    /// (query heads, key/value heads) if rows of q and k are permuted.
    pub paired: Option<(usize, usize)>,
    /// Value heads, if there are several for a key head.
    pub shared: Option<Shared>,
}

/// The order of a tensor in the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// As in Hugging Face.
    Same,
    /// Rotary pairs side by side within each head, for this number of heads.
    Paired(usize),
    /// Value heads of `size` rows from row `first` on.
    Heads {
        /// Rows before the heads.
        first: usize,
        /// The heads.
        of: Shared,
        /// Rows of a head.
        size: usize,
    },
    /// Value heads of columns.
    Columns(Shared),
}

impl Shared {
    /// The place in the file of value `at` of heads of `size` values.
    fn place(self, at: usize, size: usize) -> usize {
        let (head, within) = (at / size, at % size);
        (head % self.values * self.keys + head / self.values) * size + within
    }
}

impl Orders {
    /// The order of a tensor with this Hugging Face name; of an adapter's B that of its matrix.
    pub fn of(&self, name: &str) -> Order {
        let has = |(_, own): (&str, &str)| name.contains(&format!(".{own}"));
        let [(qkv, _), (out, _)] = DELTA_RULE;
        let [(gate, _), (beta, _), (decay, _)] = BESIDE_DELTA_RULE;
        match (self.paired, self.shared) {
            (Some((heads, _)), _) if name.contains(".q_proj.") => Order::Paired(heads),
            (Some((_, heads)), _) if name.contains(".k_proj.") => Order::Paired(heads),
            (_, Some(of)) if has(qkv) || has(DELTA_TAPS) => {
                Order::Heads { first: of.before, of, size: of.size }
            }
            (_, Some(of)) if has(gate) => Order::Heads { first: 0, of, size: of.size },
            (_, Some(of)) if [beta, decay, DELTA_RATE, DELTA_BIAS].into_iter().any(has) => {
                Order::Heads { first: 0, of, size: 1 }
            }
            (_, Some(of)) if has(out) => Order::Columns(of),
            _ => Order::Same,
        }
    }

    /// The order of an adapter's A or B.
    pub fn of_adapter(&self, name: &str) -> Order {
        match self.of(name) {
            order @ Order::Columns(_) if name.contains(".lora_A.") => order,
            Order::Columns(_) => Order::Same,
            order if name.contains(".lora_B.") => order,
            _ => Order::Same,
        }
    }
}

impl Order {
    /// The row of the file that holds row `r` of the Hugging Face tensor of `n` rows.
    pub fn source_row(self, r: usize, n: usize) -> usize {
        match self {
            Order::Same | Order::Columns(_) => r,
            Order::Paired(heads) => {
                let d = n / heads;
                let (head, at) = (r / d, r % d);
                head * d + at % (d / 2) * 2 + at / (d / 2)
            }
            Order::Heads { first, .. } if r < first => r,
            Order::Heads { first, of, size } => first + of.place(r - first, size),
        }
    }

    /// Whether rows, and columns in blocks of this many values, can be put back as they are.
    pub fn keeps_blocks(self, elements: usize) -> bool {
        match self {
            Order::Columns(of) => of.size.is_multiple_of(elements),
            _ => true,
        }
    }

    /// Why a tensor of this shape cannot have this order.
    pub fn refuses(self, shape: &[usize]) -> Option<String> {
        let (n, columns) = (shape.first().copied().unwrap_or(0), shape.last().copied().unwrap_or(0));
        let whole = |n: usize, heads: usize| n.is_multiple_of(heads.max(1)) && heads > 0;
        match self {
            Order::Paired(heads) if !whole(n, 2 * heads) => {
                Some(format!("{n} rows do not divide into {heads} heads"))
            }
            Order::Heads { first, of, size } if n != first + of.keys * of.values * size => {
                Some(format!("{n} rows are not {} value heads", of.keys * of.values))
            }
            Order::Columns(of) if columns != of.keys * of.values * of.size => {
                Some(format!("{columns} columns are not {} value heads", of.keys * of.values))
            }
            _ => None,
        }
    }

    /// Bytes of `rows` rows of `size` bytes, in which a value of a head of columns has `value` bytes on average.
    pub fn put_back(self, packed: &[u8], (rows, size): (usize, usize), columns: usize) -> Vec<u8> {
        let mut out = Vec::with_capacity(packed.len());
        for r in 0..rows {
            let row = &packed[self.source_row(r, rows) * size..][..size];
            match self {
                Order::Columns(of) => {
                    let head = of.size * size / columns;
                    let heads = (0..columns / of.size).map(|h| of.place(h, 1) * head);
                    heads.for_each(|from| out.extend_from_slice(&row[from..from + head]));
                }
                _ => out.extend_from_slice(row),
            }
        }
        out
    }

    /// Values in the order of the file.
    pub fn stored(self, values: &[f32], rows: usize) -> Vec<f32> {
        self.permuted(values, rows, |there, here| (there, here))
    }

    /// The inverse.
    pub fn restored(self, values: &[f32], rows: usize) -> Vec<f32> {
        self.permuted(values, rows, |there, here| (here, there))
    }

    /// `way` chooses (to, from) of the places in the file and in Hugging Face.
    fn permuted(self, values: &[f32], rows: usize, way: impl Fn(usize, usize) -> (usize, usize)) -> Vec<f32> {
        let size = values.len() / rows.max(1);
        let mut out = vec![0f32; values.len()];
        for row in 0..rows {
            let (to, from) = way(self.source_row(row, rows), row);
            let (to, from) = (&mut out[to * size..(to + 1) * size], &values[from * size..(from + 1) * size]);
            match self {
                Order::Columns(of) => (0..size).for_each(|c| {
                    let (to_column, from_column) = way(of.place(c, of.size), c);
                    to[to_column] = from[from_column];
                }),
                _ => to.copy_from_slice(from),
            }
        }
        out
    }
}

/// Numbers of the file from those of Hugging Face: gains have their offset, rates of decays are no logarithms.
pub fn to_file(family: &Family, name: &str, values: &mut [f32]) {
    let offset = family.offset_in_gguf(name);
    match () {
        () if is_rate(name) => values.iter_mut().for_each(|x| *x = -libm::expf(*x)),
        () if offset != 0.0 => values.iter_mut().for_each(|x| *x += offset),
        () => {}
    }
}

/// The inverse of [`to_file`].
pub fn from_file(family: &Family, name: &str, values: &mut [f32]) {
    let offset = family.offset_in_gguf(name);
    match () {
        () if is_rate(name) => values.iter_mut().for_each(|x| *x = libm::logf(-*x)),
        () if offset != 0.0 => values.iter_mut().for_each(|x| *x -= offset),
        () => {}
    }
}

/// Whether the numbers of a tensor are others in the file.
pub fn changes(family: &Family, name: &str) -> bool {
    is_rate(name) || family.offset_in_gguf(name) != 0.0
}

fn is_rate(name: &str) -> bool {
    name.ends_with(tensors::DELTA_RATE.1)
}

//! Places of the trained values on a device. In the flat vector, as in the files of PEFT, an adapter of a fused matrix has
//! one A, and the rows of B are in the order of the files. On a device each projection has its own A and B, with rows in
//! the order in which a block computes them; the A of the embedding is transposed. Where no projection is fused or reordered both are the same.

use super::config::Config;
use super::layout::{self, EMBEDDING_A, EMBEDDING_B, EMBEDDING_ROWS, Entry, Layout};
use super::lora::{LoraSpec, MODULES, Numbers};
use std::borrow::Cow;
use std::ops::Range;

/// Where each trained value is on a device.
pub struct Placement {
    /// The tensors on the device.
    pub layout: Layout,
    /// Stretches that are together in both; `None` where both are the same.
    stretches: Option<Vec<Stretch>>,
}

struct Stretch {
    flat: usize,
    device: usize,
    len: usize,
    /// Rows of the matrix in the flat vector, where it is transposed on the device; else 1.
    rows: usize,
}

impl Stretch {
    /// The place on the device, in this stretch, of each value of the flat vector.
    fn places(&self) -> impl Iterator<Item = usize> {
        let (rows, cols) = (self.rows, self.len / self.rows);
        (0..self.len).map(move |i| i % cols * rows + i / cols)
    }
}

/// Path of projection `i` of a layer in the layout on the device.
pub fn path(layer: usize, i: usize) -> String {
    let beside = ["output_gate", "beta", "decay"];
    format!("layers.{layer}.{}", MODULES.iter().chain(&beside).nth(i).unwrap_or(&""))
}

impl Placement {
    /// The places of the parameters of layers `layers`.
    pub fn of(config: &Config, lora: &LoraSpec, layers: Range<usize>) -> Self {
        let flat = layout::of(config, lora, layers.clone());
        let (mut layout, mut stretches, mut next) = (Layout::default(), Vec::new(), 0);
        let whole = |layout: &mut Layout, entry: &Entry| {
            let (device, len) = (layout.len(), entry.rows * entry.cols);
            // Ids choose rows of the embedding's A on the device.
            let rows = if entry.name.ends_with(EMBEDDING_A) { entry.rows } else { 1 };
            let shape = if rows == 1 { (entry.rows, entry.cols) } else { (entry.cols, entry.rows) };
            layout.push(entry.name.clone(), shape.0, shape.1);
            Stretch { flat: entry.offset, device, len, rows }
        };
        let (below, above): (Vec<&Entry>, Vec<&Entry>) =
            flat.entries().iter().filter(|entry| !entry.name.contains(".layers.")).partition(|entry| {
                [EMBEDDING_ROWS, EMBEDDING_A, EMBEDDING_B].iter().any(|end| entry.name.ends_with(end))
            });
        stretches.extend(below.into_iter().map(|entry| whole(&mut layout, entry)));
        next += layout.len();
        for layer in layers {
            for matrix in layout::adapted(config, layer) {
                let Some(Numbers { rank, .. }) = lora.adapter(layer, matrix.module()) else { continue };
                // The flat layout has the same modules in the same order.
                let a = next;
                let (n, k) = config.shape_of(layer, &matrix);
                let b = a + rank * k;
                next = b + n * rank;
                for &i in matrix.projections {
                    let (rows, cols) = (config.rows(layer, i), k);
                    let device = layout.len();
                    layout.push_adapter(&path(layer, i), (rows.len(), cols), rank);
                    stretches.push(Stretch { flat: a, device, len: rank * cols, rows: 1 });
                    let to = device + rank * cols;
                    stretches.extend(rows.stretches().into_iter().map(|(here, there, rows)| Stretch {
                        flat: b + there * rank,
                        device: to + here * rank,
                        len: rows * rank,
                        rows: 1,
                    }));
                }
            }
        }
        stretches.extend(above.into_iter().map(|entry| whole(&mut layout, entry)));
        let differs =
            flat.len() != layout.len() || stretches.iter().any(|s| s.flat != s.device || s.rows > 1);
        Placement { layout, stretches: differs.then_some(stretches) }
    }

    /// Whether the flat vector is on the device as it is.
    pub fn is_plain(&self) -> bool {
        self.stretches.is_none()
    }

    /// The values on the device.
    pub fn place<'a>(&self, flat: &'a [f32]) -> Cow<'a, [f32]> {
        let Some(stretches) = &self.stretches else { return Cow::Borrowed(flat) };
        let mut device = vec![0.0; self.layout.len()];
        for s in stretches {
            let (to, from) = (&mut device[s.device..s.device + s.len], &flat[s.flat..s.flat + s.len]);
            match s.rows {
                1 => to.copy_from_slice(from),
                _ => s.places().zip(from).for_each(|(at, x)| to[at] = *x),
            }
        }
        Cow::Owned(device)
    }

    /// The flat gradient: values with several places have the sum of their gradients.
    pub fn collect(&self, device: &[f32], gradient: &mut [f32]) {
        gradient.fill(0.0);
        for s in self.stretches.iter().flatten() {
            let (to, from) = (&mut gradient[s.flat..s.flat + s.len], &device[s.device..s.device + s.len]);
            match s.rows {
                1 => to.iter_mut().zip(from).for_each(|(sum, x)| *sum += x),
                _ => to.iter_mut().zip(s.places()).for_each(|(sum, at)| *sum += from[at]),
            }
        }
    }
}

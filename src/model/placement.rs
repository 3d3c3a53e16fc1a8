//! Places of the trained values on a device. In the flat vector, as in the files of PEFT, an adapter of a fused matrix has
//! one A, and the rows of B are in the order of the files. On a device each projection has its own A and B, with rows in
//! the order in which a block computes them. Where no projection is fused or reordered both are the same.

use super::config::Config;
use super::layout::{self, Layout};
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
}

/// Path of projection `i` of a layer in the layout on the device.
pub fn path(layer: usize, i: usize) -> String {
    format!("layers.{layer}.{}", MODULES[i])
}

impl Placement {
    /// The places of the parameters of layers `layers`.
    pub fn of(config: &Config, lora: &LoraSpec, layers: Range<usize>) -> Self {
        let flat = layout::of(config, lora, layers.clone());
        let (mut layout, mut stretches, mut next) = (Layout::default(), Vec::new(), 0);
        for layer in layers {
            for matrix in layout::adapted(config, layer) {
                let Some(Numbers { rank, .. }) = lora.adapter(layer, matrix.module()) else { continue };
                // The flat layout has the same modules in the same order.
                let a = next;
                let (n, k) = config.shape_of(layer, &matrix);
                let b = a + rank * k;
                next = b + n * rank;
                for i in matrix.projections.clone() {
                    let (rows, cols) = (config.rows(layer, i), k);
                    let device = layout.len();
                    layout.push_adapter(&path(layer, i), (rows.len(), cols), rank);
                    stretches.push(Stretch { flat: a, device, len: rank * cols });
                    let to = device + rank * cols;
                    stretches.extend(rows.stretches().into_iter().map(|(here, there, rows)| Stretch {
                        flat: b + there * rank,
                        device: to + here * rank,
                        len: rows * rank,
                    }));
                }
            }
        }
        for part in flat.head() {
            let device = layout.len();
            layout.push(&*part.name, part.rows, part.cols);
            stretches.push(Stretch { flat: part.offset, device, len: part.rows * part.cols });
        }
        let differs = flat.len() != layout.len() || stretches.iter().any(|s| s.flat != s.device);
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
            device[s.device..s.device + s.len].copy_from_slice(&flat[s.flat..s.flat + s.len]);
        }
        Cow::Owned(device)
    }

    /// The flat gradient: values with several places have the sum of their gradients.
    pub fn collect(&self, device: &[f32], gradient: &mut [f32]) {
        gradient.fill(0.0);
        for s in self.stretches.iter().flatten() {
            let (to, from) = (&mut gradient[s.flat..s.flat + s.len], &device[s.device..s.device + s.len]);
            to.iter_mut().zip(from).for_each(|(sum, x)| *sum += x);
        }
    }
}

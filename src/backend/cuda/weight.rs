//! Frozen matrices go to the device as the file has them; f32 numbers that are all bf16 numbers go as such, which is
//! exact and takes half the memory.

use super::memory::{Stored, Weight};
use super::{Cuda, Driver};
use crate::backend::{Fault, Frozen};
use crate::numeric::dtype::Dtype;

impl<D: Driver> Cuda<D> {
    pub(super) fn pack(&mut self, source: Frozen) -> Result<Weight, Fault> {
        let Frozen { rows, cols, dtype, bytes } = source;
        let needed = rows * cols * dtype.size();
        if bytes.len() != needed {
            let reason = format!("a {rows} x {cols} matrix takes {needed} bytes, not {}", bytes.len());
            return Err(Fault::Device { device: self.driver.name().into(), reason });
        }
        let short = dtype == Dtype::F32 && bytes.chunks_exact(4).all(|b| b[0] == 0 && b[1] == 0);
        let (stored, owned) = match dtype {
            Dtype::F32 if short => {
                (Stored::Bf16, Some(bytes.chunks_exact(4).flat_map(|b| [b[2], b[3]]).collect::<Vec<u8>>()))
            }
            Dtype::F32 => (Stored::F32, None),
            Dtype::Bf16 => (Stored::Bf16, None),
            Dtype::F16 => (Stored::F16, None),
        };
        let bytes = owned.as_deref().unwrap_or(bytes);
        if let Some(fault) = &self.fault {
            return Err(fault.clone());
        }
        let memory = self.pool.take(&mut self.driver, bytes.len())?;
        self.driver.write(memory.at(0), bytes)?;
        Ok(Weight { memory, rows, cols, stride: cols, stored })
    }
}

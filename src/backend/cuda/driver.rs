//! What the backend needs of a driver: memory, copies, modules, launches in order. libcuda is one; tests have an
//! interpreter of PTX behind the same seam, so that every verb is tested from its shape checks to its last store
//! without a GPU.

use super::List;
use crate::backend::Fault;

/// One argument of a kernel.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Arg {
    /// A device address.
    Address(u64),
    /// A number.
    U32(u32),
    /// A factor.
    F32(f32),
    /// A matrix of which the kernel copies boxes.
    Tensor(TensorMap),
    /// A number that no kernel takes: it is told before the launch, and never reaches a driver.
    Beyond(usize),
}

impl Arg {
    /// The number that is too large.
    pub(super) fn beyond(&self) -> Option<usize> {
        match self {
            Arg::Beyond(n) => Some(*n),
            _ => None,
        }
    }
}

/// A matrix of bf16 numbers of which a kernel copies boxes to shared memory: 64 columns, which are 128 bytes, and so many
/// rows; pieces of 16 bytes change places within 1024 bytes (the swizzle of 128 bytes), zero beyond the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// Where it begins, a multiple of 16.
    pub address: u64,
    /// Rows of the matrix.
    pub rows: u32,
    /// Numbers of a row.
    pub cols: u32,
    /// Bytes from row to row, a multiple of 16.
    pub stride: u64,
    /// Rows of a box, at most 256.
    pub box_rows: u32,
}

/// One kernel launch; everything launched runs in order.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The file of kernels/ptx, for the driver that loads modules when they are first used.
    pub file: &'static str,
    /// Its entry.
    pub entry: &'a str,
    /// Blocks.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// In the order of the entry's parameters.
    pub args: &'a [Arg],
}

/// A device behind a driver. Work is in order: a copy or launch sees all before it.
pub trait Driver {
    /// The device's name, for faults.
    fn name(&self) -> &str;
    /// Compute capability, as (8, 0).
    fn capability(&self) -> (u32, u32);
    /// Its multiprocessors, where it runs the kernels of sm_90a and takes [`Arg::Tensor`].
    fn sm90a(&self) -> Option<u32> {
        None
    }
    /// Sizes are rounded up to multiples of this, so that buffers can be used again.
    fn granularity(&self) -> usize;
    /// So many bytes of unspecified contents.
    fn alloc(&mut self, bytes: usize) -> Result<u64, Fault>;
    /// Gives them back.
    fn free(&mut self, address: u64);
    /// A buffer is used anew: its contents mean nothing any more.
    fn forget(&mut self, address: u64, bytes: usize) {
        let _ = (address, bytes);
    }
    /// Host to device; `bytes` may be changed as soon as this returns.
    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), Fault>;
    /// Device to host; waits for everything before it.
    fn read(&mut self, from: u64, out: &mut [u8]) -> Result<(), Fault>;
    /// Several of them, waiting once.
    fn read_all(&mut self, parts: &mut [(u64, &mut [u8])]) -> Result<(), Fault> {
        parts.iter_mut().try_for_each(|(from, out)| self.read(*from, out))
    }
    /// What tells this device's arithmetic from that of another with the same capability: the model, and the driver,
    /// which compiles the kernels.
    fn variant(&self) -> String {
        String::new()
    }
    /// Starts a kernel.
    fn launch(&mut self, launch: &Launch) -> Result<(), Fault>;
    /// Starts kernels, one after the other or all at once; how often something was sent.
    fn start(&mut self, list: &List) -> Result<u64, Fault> {
        list.one_by_one(self)
    }
}

impl<D: Driver + ?Sized> Driver for Box<D> {
    fn name(&self) -> &str {
        (**self).name()
    }
    fn capability(&self) -> (u32, u32) {
        (**self).capability()
    }
    fn sm90a(&self) -> Option<u32> {
        (**self).sm90a()
    }
    fn granularity(&self) -> usize {
        (**self).granularity()
    }
    fn alloc(&mut self, bytes: usize) -> Result<u64, Fault> {
        (**self).alloc(bytes)
    }
    fn free(&mut self, address: u64) {
        (**self).free(address);
    }
    fn forget(&mut self, address: u64, bytes: usize) {
        (**self).forget(address, bytes);
    }
    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), Fault> {
        (**self).write(to, bytes)
    }
    fn read(&mut self, from: u64, out: &mut [u8]) -> Result<(), Fault> {
        (**self).read(from, out)
    }
    fn read_all(&mut self, parts: &mut [(u64, &mut [u8])]) -> Result<(), Fault> {
        (**self).read_all(parts)
    }
    fn variant(&self) -> String {
        (**self).variant()
    }
    fn launch(&mut self, launch: &Launch) -> Result<(), Fault> {
        (**self).launch(launch)
    }
    fn start(&mut self, list: &List) -> Result<u64, Fault> {
        (**self).start(list)
    }
}

//! The part of a driver that the backend needs: memory, copies, modules, launches in order. libcuda implements it;
//! tests implement it with an interpreter of PTX, which checks every verb from its shape checks to its last store
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
    /// A matrix that the kernel copies in boxes.
    Tensor(TensorMap),
    /// A number too large for any kernel. It is reported before the launch and never reaches a driver.
    Beyond(usize),
}

impl Arg {
    /// The number, if it is too large.
    pub(super) fn beyond(&self) -> Option<usize> {
        match self {
            Arg::Beyond(n) => Some(*n),
            _ => None,
        }
    }
}

/// A bf16 matrix from which a kernel copies boxes to shared memory. A box has 64 columns (128 bytes) and `box_rows`
/// rows. Pieces of 16 bytes are permuted within 1024 bytes (the 128-byte swizzle); elements outside the matrix are
/// zero.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TensorMap {
    /// Address of the first element, a multiple of 16.
    pub address: u64,
    /// Rows of the matrix.
    pub rows: u32,
    /// Numbers in a row.
    pub cols: u32,
    /// Bytes from row to row, a multiple of 16.
    pub stride: u64,
    /// Rows of a box, at most 256.
    pub box_rows: u32,
}

/// One kernel launch. Launches run in order.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The file in kernels/ptx. The driver loads its module at the first use.
    pub file: &'static str,
    /// The entry of the file.
    pub entry: &'a str,
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads per block.
    pub threads: u32,
    /// Arguments in the order of the entry's parameters.
    pub args: &'a [Arg],
}

/// A device behind a driver. Work runs in order: a copy or launch sees all earlier work.
pub trait Driver {
    /// The device's name, for faults.
    fn name(&self) -> &str;
    /// Compute capability, for example (8, 0).
    fn capability(&self) -> (u32, u32);
    /// The number of multiprocessors, if the device runs the kernels of sm_90a and takes [`Arg::Tensor`].
    fn sm90a(&self) -> Option<u32> {
        None
    }
    /// Sizes are rounded up to multiples of this number, so that buffers can be reused.
    fn granularity(&self) -> usize;
    /// Allocates `bytes` bytes with unspecified contents.
    fn alloc(&mut self, bytes: usize) -> Result<u64, Fault>;
    /// Frees memory of [`Driver::alloc`].
    fn free(&mut self, address: u64);
    /// Marks the contents of a reused buffer as undefined.
    fn forget(&mut self, address: u64, bytes: usize) {
        let _ = (address, bytes);
    }
    /// Copies host to device. `bytes` may change as soon as this returns.
    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), Fault>;
    /// Copies device to host, after waiting for all earlier work.
    fn read(&mut self, from: u64, out: &mut [u8]) -> Result<(), Fault>;
    /// Reads several parts and waits once.
    fn read_all(&mut self, parts: &mut [(u64, &mut [u8])]) -> Result<(), Fault> {
        parts.iter_mut().try_for_each(|(from, out)| self.read(*from, out))
    }
    /// Distinguishes this device's arithmetic from another device's of the same capability: the model, and the driver,
    /// which compiles the kernels.
    fn variant(&self) -> String {
        String::new()
    }
    /// Launches a kernel.
    fn launch(&mut self, launch: &Launch) -> Result<(), Fault>;
    /// Starts the kernels of a list, one by one or all at once. Returns the number of submissions.
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

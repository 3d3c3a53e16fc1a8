//! A PTX interpreter for tests: the numerics of kernels without a GPU.
//!
//! Lanes of a warp run in lock step; diverged lanes join again at the lowest statement of any of them. A block's
//! warps run one after the other between barriers, in an order by the seed, and so do blocks: a kernel whose result
//! depends on the order is wrong, and its race is an error too. Errors that a real device ignores (uninitialized
//! memory or registers, an address beyond a matrix) are reported with kernel, line and thread. An unknown opcode is
//! an error when the file is read.

mod access;
mod arithmetic;
mod block;
mod ins;
mod memory;
mod ring;
mod tensor;
mod tensor_map;
mod text;
mod warp;
mod wgmma;
mod wmma;

pub use ins::Kernel;
pub use memory::Global;
use std::collections::HashMap;
use std::sync::Arc;
pub use tensor_map::TensorMap;

/// One argument of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Value {
    /// Its value; for a tensor map, its number.
    pub bits: u64,
    /// Its size.
    pub bytes: usize,
}

/// Shape of a launch.
#[derive(Debug, Clone, Copy)]
pub struct Shape {
    /// Blocks in each dimension.
    pub grid: [u32; 3],
    /// Threads of a block.
    pub threads: u32,
    /// Bytes of shared memory of the launch.
    pub shared: usize,
}

/// The entries of a file.
pub fn read(source: &str) -> Result<Vec<Arc<Kernel>>, String> {
    Ok(text::kernels(source)?.into_iter().map(Arc::new).collect())
}

/// A device that executes PTX.
#[derive(Default)]
pub struct Machine {
    /// Its global memory.
    pub memory: Global,
    kernels: HashMap<String, Arc<Kernel>>,
    launches: u32,
    /// The tensor maps of arguments of 128 bytes, by number.
    pub maps: Vec<TensorMap>,
    /// Sets the order of warps, blocks and copies.
    pub seed: u64,
    /// Executed statements, counted per warp.
    pub steps: u64,
}

impl Machine {
    /// Keeps the entries of a file by name.
    pub fn load(&mut self, entries: &[Arc<Kernel>]) {
        self.kernels.extend(entries.iter().map(|k| (k.name.clone(), k.clone())));
    }

    /// Runs all blocks of a launch to their end.
    pub fn launch(&mut self, entry: &str, shape: Shape, args: &[Value]) -> Result<(), String> {
        let kernel = self.kernels.get(entry).ok_or_else(|| format!("no entry {entry}"))?;
        if kernel.threads != shape.threads {
            return Err(format!("{entry}: .reqntid {} and {} threads", kernel.threads, shape.threads));
        }
        let widths: Vec<usize> = kernel.params.iter().map(|p| p.bytes).collect();
        let given: Vec<usize> = args.iter().map(|a| a.bytes).collect();
        if widths != given {
            return Err(format!("{entry}: parameters of {widths:?} bytes, arguments of {given:?}"));
        }
        // The limit of a block of compute capability 9.0.
        if (shape.shared > 0) != kernel.dynamic || shape.shared > 232_448 {
            return Err(format!("{entry}: {} bytes of shared memory from the launch", shape.shared));
        }
        self.launches += 1;
        let [x, y, z] = shape.grid;
        if x > i32::MAX as u32 || y.max(z) > 65_535 {
            return Err(format!("{entry}: a grid of {x} x {y} x {z} blocks"));
        }
        let mut blocks: Vec<u32> = (0..x * y * z).collect();
        shuffle(&mut blocks, self.seed);
        for index in blocks {
            let place = [index % x, index / x % y, index / x / y];
            let (launch, seed, maps) = (self.launches, self.seed, &self.maps);
            let call = block::Call { kernel, shape, args, maps, launch, seed };
            let mut block = block::Block::new(&call, index, place);
            block.run(&mut self.memory, &mut self.steps)?;
        }
        Ok(())
    }
}

/// Seed 0 keeps the order.
fn shuffle<T>(items: &mut [T], seed: u64) {
    let mut state = seed;
    for i in (1..items.len()).rev().filter(|_| seed != 0) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        items.swap(i, ((state >> 33) % (i as u64 + 1)) as usize);
    }
}

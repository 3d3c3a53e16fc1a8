//! NVIDIA through PTX: only the driver is needed, no compiler and no toolkit. kernels/ptx holds one file per verb, 20
//! by hand and 18 from the generator in kernels/ptx/gen, each with its pseudo-code, register plan and launch shape in
//! its head. Launches are collected here and sent when a result is needed. The first fault is kept: nothing is launched
//! after it, and the next read returns it.

mod attention;
mod attention_sm80;
mod attention_sm90a;
mod copies;
mod delta;
mod devices;
mod driver;
mod dry;
mod frozen;
mod fused;
mod graphs;
pub mod kernels;
mod launches;
mod libcuda;
mod list;
mod memory;
mod pool;
mod skinny;
mod sm70;
mod sm90a;
mod staging;
mod tensor;
mod tensor_map;
mod trial;
mod trial_attention;
mod verbs;
mod waits;
mod weight;

use super::{Checked, Fault, Traffic, View, ViewMut};
use crate::numeric::block::Block;
pub use attention_sm90a::Flash;
pub use devices::{Absent, Device, Found, build, devices, free, ptx_version};
pub use driver::{Arg, Driver, Launch, TensorMap};
pub use dry::{DryCuda, Footprint};
pub use libcuda::Libcuda;
pub use list::{List, Waiting};
pub use memory::{Ids, Memory, Tokens, Weight};
use pool::Lasts;
pub use trial::Trial;
pub use trial_attention::AttentionTrial;
pub use waits::{WAIT, patience_in_trials, refused_wait};
pub use weight::{matrix_bytes, matrix_bytes_bf16};

/// One device.
pub struct Cuda<D: Driver> {
    driver: D,
    pool: pool::Pool,
    /// Launches that are not sent yet.
    list: List,
    copies: copies::Copies,
    fault: Option<Fault>,
    traffic: Traffic,
    tier: Tier,
    /// The number of multiprocessors for products of sm_90a, which replace large products of [`Tier::Sm80`].
    sm90a: Option<u32>,
    /// Why products do not use a higher tier, if one was tried.
    below: Option<String>,
    /// The directions of attention that are computed by wgmma, and why not both, if they were tried.
    flash: Flash,
    attention_below: Option<String>,
    /// Memory was short for a trial.
    undecided: bool,
    /// Numbers in a part of a matrix that is stored in blocks.
    slab: usize,
    /// Block types that the device has widened correctly.
    unpacked: Vec<Block>,
    /// No verb is fused, and no narrowed copy is kept.
    spelled: bool,
}

/// The arithmetic of products with frozen weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Tier {
    /// f32 arithmetic.
    F32,
    /// Tensor cores of sm_70: operands rounded to f16 on their way, f32 sums; all else as [`Tier::F32`].
    Sm70,
    /// Tensor cores of sm_80: bf16 operands, f32 sums.
    Sm80,
}

impl<D: Driver> Checked<Cuda<D>> {
    /// A backend on a driver that has opened its device.
    pub fn on(driver: D) -> Self {
        Checked::around(Cuda {
            driver,
            pool: pool::Pool::default(),
            list: List::default(),
            copies: copies::Copies::default(),
            fault: None,
            traffic: Traffic::default(),
            tier: Tier::F32,
            sm90a: None,
            below: None,
            flash: Flash::default(),
            attention_below: None,
            undecided: false,
            slab: frozen::SLAB,
            unpacked: Vec::new(),
            spelled: false,
        })
    }

    /// The same device with at most this many bytes.
    pub fn within(mut self, bytes: u64) -> Self {
        self.pool.within(bytes);
        self
    }

    /// The same device with slabs of this many numbers: tests have small matrices.
    pub fn slab(mut self, numbers: usize) -> Self {
        self.slab = numbers;
        self
    }

    /// The same device in the bf16 class, if it has tensor cores for bf16 (sm_80 and later).
    pub fn bf16(mut self) -> Result<Self, Fault> {
        let (major, minor) = self.driver.capability();
        if major < 8 {
            let reason = format!(
                "bf16 needs compute capability 8.0, and this has {major}.{minor}: leave --dtype out, or use --dtype f32"
            );
            return Err(Fault::Device { device: self.driver.name().into(), reason });
        }
        self.tier = Tier::Sm80;
        Ok(self)
    }
}

impl<D: Driver> Cuda<D> {
    /// The driver, for queries outside the trait.
    pub fn driver(&mut self) -> &mut D {
        &mut self.driver
    }

    fn note<T>(&mut self, result: Result<T, Fault>) -> Option<T> {
        match result {
            Ok(x) => Some(x),
            Err(fault) => {
                self.fault.get_or_insert(fault);
                None
            }
        }
    }

    /// Records an error of the caller that only the data shows.
    fn refuse(&mut self, reason: String) {
        let device = self.driver.name().to_string();
        self.fault.get_or_insert(Fault::Device { device, reason });
    }

    fn launch(&mut self, launch: Launch) {
        if self.fault.is_some() || launch.grid.contains(&0) {
            return;
        }
        if let Some(n) = launch.args.iter().find_map(Arg::beyond) {
            return self.refuse(format!("{}: {n} numbers, and kernels count to 2^32", launch.entry));
        }
        self.traffic.dispatches += 1;
        self.list.push(&launch);
        if self.list.launches().len() >= list::MOST {
            self.send();
        }
    }

    /// Sends the waiting launches.
    fn send(&mut self) {
        if self.fault.is_none() && !self.list.is_empty() {
            let result = self.driver.start(&self.list);
            self.traffic.submissions += self.note(result).unwrap_or(0);
        }
        self.list.clear();
        self.pool.sent();
    }

    fn take(&mut self, bytes: usize) -> Memory {
        self.take_for(Lasts::Verb, bytes)
    }

    fn take_for(&mut self, lasts: Lasts, bytes: usize) -> Memory {
        if self.fault.is_some() {
            return self.pool.nothing();
        }
        let bytes = pool::class(bytes, self.driver.granularity());
        match (self.pool.again(lasts, bytes), lasts) {
            (Some(memory), Lasts::List) => {
                self.driver.forget(memory.at(0), bytes);
                memory
            }
            (Some(memory), _) => {
                self.list.forget(memory.at(0), bytes);
                memory
            }
            (None, _) => {
                if let Some(memory) = self.pool.add(&mut self.driver, lasts, bytes) {
                    return memory;
                }
                // A waiting launch may use the memory that is freed here.
                self.send();
                let result = self.pool.make(&mut self.driver, lasts, bytes);
                self.note(result).unwrap_or_else(|| self.pool.nothing())
            }
        }
    }

    /// Writes after the waiting launches.
    fn write(&mut self, to: u64, bytes: &[u8]) {
        self.send();
        self.write_ahead(to, bytes);
    }

    /// Writes before the waiting launches, which do not use this memory.
    fn write_ahead(&mut self, to: u64, bytes: &[u8]) {
        if self.fault.is_none() && !bytes.is_empty() {
            self.traffic.uploaded += bytes.len() as u64;
            let result = self.driver.write(to, bytes);
            self.note(result);
        }
    }

    /// Reads bytes from the device, after the waiting launches.
    fn fetch(&mut self, from: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.send();
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => self.driver.read(from, out),
        }
    }

    /// Uploads integers ahead of the waiting launches, none of which uses their memory.
    fn integers(&mut self, values: &[u32]) -> Memory {
        let memory = self.take_for(Lasts::List, 4 * values.len());
        self.write_ahead(memory.at(0), bytemuck::cast_slice(values));
        memory
    }
}

/// The address of a view.
fn at(x: &View<Memory>) -> Arg {
    assert!(x.memory.reaches(x.offset + x.len()), "a view is inside its memory");
    Arg::Address(x.memory.at(x.offset))
}

/// The address of a view for writing. All writes pass here, so their copies become outdated.
fn at_mut(x: &ViewMut<Memory>) -> Arg {
    assert!(x.memory.reaches(x.offset + x.len()), "a view is inside its memory");
    x.memory.stamp().move_on();
    Arg::Address(x.memory.at(x.offset))
}

/// A size as an argument of a kernel.
fn size(n: usize) -> Arg {
    u32::try_from(n).map_or(Arg::Beyond(n), Arg::U32)
}

/// The number of blocks of `per` that cover `n`.
fn blocks(n: usize, per: usize) -> u32 {
    u32::try_from(n.div_ceil(per)).unwrap_or(u32::MAX)
}

//! NVIDIA through PTX: the driver is all that is needed, no compiler and no toolkit. Kernels lie in kernels/ptx, one file
//! per verb, 16 of them by hand and 16 from our own generator, each with its pseudo-code, register plan and launch shape
//! at its head; launches are put together here, and sent when a result is
//! waited for. The first fault stays: nothing is launched after it, and the next read tells it.

mod attention;
mod attention_sm80;
mod attention_sm90a;
mod copies;
mod devices;
mod driver;
mod frozen;
mod fused;
mod graphs;
pub mod kernels;
mod launches;
mod libcuda;
mod list;
mod memory;
mod pool;
mod sm70;
mod sm90a;
mod staging;
mod tensor;
mod tensor_map;
mod trial;
mod trial_attention;
mod verbs;
mod weight;

use super::{Checked, Fault, Traffic, View, ViewMut};
use crate::numeric::block::Block;
pub use attention_sm90a::Flash;
pub use copies::copies_bytes;
pub use devices::{Absent, Device, Found, build, devices, free, ptx_version};
pub use driver::{Arg, Driver, Launch, TensorMap};
pub use frozen::slab_bytes;
pub use libcuda::Libcuda;
pub use list::{List, Waiting};
pub use memory::{Ids, Memory, Tokens, Weight};
use pool::Lasts;
pub use trial::Trial;
pub use trial_attention::AttentionTrial;
pub use weight::{matrix_bytes, matrix_bytes_bf16};

/// One device.
pub struct Cuda<D: Driver> {
    driver: D,
    pool: pool::Pool,
    /// What is not sent yet.
    list: List,
    copies: copies::Copies,
    fault: Option<Fault>,
    traffic: Traffic,
    tier: Tier,
    /// Large products of the tier [`Tier::Sm80`] are those of sm_90a instead, on so many multiprocessors.
    sm90a: Option<u32>,
    /// Why products are not those of a higher tier, where that was tried.
    below: Option<String>,
    /// What of attention is computed by wgmma, and why not all, where it was tried.
    flash: Flash,
    attention_below: Option<String>,
    /// Memory was short for a trial.
    undecided: bool,
    /// Numbers of a part of a matrix that lies in blocks.
    slab: usize,
    /// Types of blocks that it has widened right.
    unpacked: Vec<Block>,
    /// Nothing is fused, and nothing is kept that was narrowed.
    spelled: bool,
}

/// What products of frozen weights are computed with.
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
    /// On a driver that has opened its device.
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

    /// The same device, which holds at most that many bytes.
    pub fn within(mut self, bytes: u64) -> Self {
        self.pool.within(bytes);
        self
    }

    /// The same device, which widens that many numbers of blocks at a time: tests have small matrices.
    pub fn slab(mut self, numbers: usize) -> Self {
        self.slab = numbers;
        self
    }

    /// The same device in the bf16 class, where it has tensor cores for bf16 (sm_80 and later).
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
    /// The driver, for what only it knows.
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

    /// What the caller got wrong in a way that only the data shows.
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

    /// Sends what waits.
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
                // What is let go of for it may be something that a launch has to do with.
                self.send();
                let result = self.pool.make(&mut self.driver, lasts, bytes);
                self.note(result).unwrap_or_else(|| self.pool.nothing())
            }
        }
    }

    /// After all that waits.
    fn write(&mut self, to: u64, bytes: &[u8]) {
        self.send();
        self.write_ahead(to, bytes);
    }

    /// Before all that waits, which has nothing to do with what lies there.
    fn write_ahead(&mut self, to: u64, bytes: &[u8]) {
        if self.fault.is_none() && !bytes.is_empty() {
            self.traffic.uploaded += bytes.len() as u64;
            let result = self.driver.write(to, bytes);
            self.note(result);
        }
    }

    /// Bytes from the device, after all that waits.
    fn fetch(&mut self, from: u64, out: &mut [u8]) -> Result<(), Fault> {
        self.send();
        match &self.fault {
            Some(fault) => Err(fault.clone()),
            None => self.driver.read(from, out),
        }
    }

    /// They go ahead of what waits: nothing of it has to do with their memory.
    fn integers(&mut self, values: &[u32]) -> Memory {
        let memory = self.take_for(Lasts::List, 4 * values.len());
        self.write_ahead(memory.at(0), bytemuck::cast_slice(values));
        memory
    }
}

/// Where a view begins on the device.
fn at(x: &View<Memory>) -> Arg {
    assert!(x.memory.reaches(x.offset + x.len()), "a view lies in its memory");
    Arg::Address(x.memory.at(x.offset))
}

/// The same of one that is written: all that is written passes here, so copies of it are known to be old.
fn at_mut(x: &ViewMut<Memory>) -> Arg {
    assert!(x.memory.reaches(x.offset + x.len()), "a view lies in its memory");
    x.memory.stamp().move_on();
    Arg::Address(x.memory.at(x.offset))
}

/// A size as kernels take it.
fn size(n: usize) -> Arg {
    u32::try_from(n).map_or(Arg::Beyond(n), Arg::U32)
}

/// Blocks of `per` that cover `n`.
fn blocks(n: usize, per: usize) -> u32 {
    u32::try_from(n.div_ceil(per)).unwrap_or(u32::MAX)
}

//! The interpreter as a driver of the backend: ops run from their shape checks to their last store, without a GPU.

use crate::files;
use crate::interpreter::{self, Kernel, Machine, Shape, Value, read};
use crate::profile::Profiled;
use finetune::backend::cuda::{Arg, Driver, Launch, Libcuda, TensorMap, kernels};
use finetune::backend::{Cuda, Fault};
use std::collections::{HashMap, HashSet};
use std::sync::{Arc, LazyLock, Mutex};

/// The kernels of files, by name.
type Files = HashMap<&'static str, Vec<Arc<Kernel>>>;

/// Files are read once for all tests.
static PARSED: LazyLock<Mutex<Files>> = LazyLock::new(Mutex::default);

pub struct Interpreted {
    machine: Machine,
    loaded: HashSet<&'static str>,
    /// A replacement for a file of the tree.
    changed: Files,
    capability: (u32, u32),
}

/// A backend on the interpreter, whose order of warps and blocks depends on the seed; or on the device with the index
/// FINETUNE_PTX_DEVICE, so that a machine with a GPU runs the same tests (benches/first_contact.sh).
pub fn device(seed: u64) -> Cuda<Box<dyn Driver>> {
    device_at((7, 0), seed)
}

pub fn device_at(capability: (u32, u32), seed: u64) -> Cuda<Box<dyn Driver>> {
    match std::env::var("FINETUNE_PTX_DEVICE") {
        Ok(n) => {
            let card = Libcuda::open(n.parse().unwrap()).unwrap();
            if switched("profile") {
                return Cuda::on(Box::new(Profiled::new(card)));
            }
            Cuda::on(Box::new(if switched("no-graphs") { card.kernel_by_kernel() } else { card }))
        }
        Err(_) => Cuda::on(Box::new(interpreter(capability, seed))),
    }
}

/// Whether FINETUNE_PTX_SWITCHES has that word: `no-graphs`, `no-wgmma`, `keep-everything`, `profile` (benches/first_contact.sh).
pub fn switched(word: &str) -> bool {
    std::env::var("FINETUNE_PTX_SWITCHES").is_ok_and(|words| words.split(' ').any(|w| w == word))
}

/// A device of the bf16 class; None, with a message, if the device does not have it.
pub fn device_bf16() -> Option<Cuda<Box<dyn Driver>>> {
    match device_at((8, 0), 0).bf16() {
        Ok(device) => Some(device),
        Err(why) => {
            assert!(std::env::var_os("FINETUNE_PTX_DEVICE").is_some(), "the interpreter: {why}");
            println!("skipped: {why}");
            None
        }
    }
}

pub fn device_of(capability: (u32, u32), seed: u64) -> Cuda<Interpreted> {
    Cuda::on(interpreter(capability, seed))
}

fn interpreter(capability: (u32, u32), seed: u64) -> Interpreted {
    let mut machine = Machine::default();
    machine.seed = seed;
    Interpreted { machine, loaded: HashSet::new(), changed: HashMap::new(), capability }
}

/// With a replaced file.
pub fn device_with(file: &'static str, text: &str, seed: u64) -> Cuda<Interpreted> {
    device_with_at((8, 0), (file, text), seed)
}

pub fn device_with_at(
    capability: (u32, u32),
    (file, text): (&'static str, &str),
    seed: u64,
) -> Cuda<Interpreted> {
    let mut device = device_of(capability, seed);
    device.driver().changed.insert(file, read(text).unwrap());
    device
}

impl Interpreted {
    /// Buffers that are not freed.
    pub fn held(&self) -> usize {
        self.machine.memory.held()
    }

    /// Whether a kernel of the file was launched.
    pub fn loaded(&self, file: &str) -> bool {
        self.loaded.contains(file)
    }

    fn fault(reason: String) -> Fault {
        Fault::Device { device: "interpreter".into(), reason }
    }
}

impl Driver for Interpreted {
    fn name(&self) -> &str {
        "interpreter"
    }
    fn capability(&self) -> (u32, u32) {
        self.capability
    }
    /// Fewer multiprocessors than tiles, so that a block has several.
    fn sm90a(&self) -> Option<u32> {
        kernels::find("product_sm90a.ptx")?.runs_on(self.capability, 80).then_some(3)
    }
    fn granularity(&self) -> usize {
        1 // exact, so that one byte beyond a matrix is an error
    }
    fn alloc(&mut self, bytes: usize) -> Result<u64, Fault> {
        Ok(self.machine.memory.alloc(bytes))
    }
    fn free(&mut self, address: u64) {
        assert!(self.machine.memory.free(address), "what is freed was had");
    }
    fn forget(&mut self, address: u64, bytes: usize) {
        self.machine.memory.find(address).unwrap().0.forget(0, bytes);
    }
    fn write(&mut self, to: u64, bytes: &[u8]) -> Result<(), Fault> {
        let (region, at) = self.machine.memory.find(to).map_err(Self::fault)?;
        region.put(at as usize, bytes);
        Ok(())
    }
    fn read(&mut self, from: u64, out: &mut [u8]) -> Result<(), Fault> {
        let (region, at) = self.machine.memory.find(from).map_err(Self::fault)?;
        region.get(at as usize, out).map_err(Self::fault)
    }
    fn launch(&mut self, launch: &Launch) -> Result<(), Fault> {
        if let Some(entries) = self.changed.get(launch.file) {
            self.machine.load(entries);
        } else if self.loaded.insert(launch.file) {
            let mut parsed = PARSED.lock().unwrap();
            if !parsed.contains_key(launch.file) {
                let entries = read(&files::read(launch.file).text).map_err(Self::fault)?;
                parsed.insert(launch.file, entries);
            }
            self.machine.load(&parsed[launch.file]);
        }
        let maps = &mut self.machine.maps;
        maps.clear();
        let value = |a: &Arg| match *a {
            Arg::Address(x) => Value { bits: x, bytes: 8 },
            Arg::U32(x) => Value { bits: u64::from(x), bytes: 4 },
            Arg::F32(x) => Value { bits: u64::from(x.to_bits()), bytes: 4 },
            Arg::Tensor(TensorMap { address, rows, cols, stride, box_rows }) => {
                maps.push(interpreter::TensorMap { address, rows, cols, stride, part: (64, box_rows) });
                Value { bits: maps.len() as u64 - 1, bytes: 128 }
            }
            Arg::Beyond(n) => unreachable!("{n} is refused before a launch"),
        };
        let args: Vec<Value> = launch.args.iter().map(value).collect();
        let shared = kernels::find(launch.file).map_or(0, kernels::Source::dynamic) as usize;
        let shape = Shape { grid: launch.grid, threads: launch.threads, shared };
        self.machine.launch(launch.entry, shape, &args).map_err(Self::fault)
    }
}
